"""What epochs are made of: protocols of sources, sources that repeat, random numbers by seed and epoch."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence, Sized
from enum import IntEnum
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

from spdl_media._checks import check_int

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

Pairs: TypeAlias = tuple[tuple[int, int], ...]
"""Half-open intervals ``start <= number < stop``, in order, with gaps between them."""


@runtime_checkable
class IterableWithShuffle(Iterable[T_co], Protocol[T_co]):
    """An iterable whose order can be changed."""

    def shuffle(self, seed: int) -> None:
        """Put the items in the order that belongs to ``seed``, whatever their order was before.

        Raises:
            Exception: Yours. It ends the iteration.
        """


@runtime_checkable
class SizedIterable(Sized, Iterable[T_co], Protocol[T_co]):
    """An iterable that knows how many items an iteration gives."""


@runtime_checkable
class SizedIterableWithShuffle(SizedIterable[T_co], IterableWithShuffle[T_co], Protocol[T_co]):
    """An iterable that knows its length and whose order can be changed."""


@runtime_checkable
class HasEpochs(Protocol):
    """An iterable that can be told which epoch the next iteration is, such as PyTorch's samplers."""

    def set_epoch(self, epoch: int, /) -> None:
        """Choose the epoch of the next iteration.

        Raises:
            Exception: Yours. It ends the iteration.
        """


@runtime_checkable
class Stateful(Protocol):
    """An iterable that can tell where it is and resume there, such as those of torchdata.

    Unless it is an iterator, each iteration begins at its start, except for the first one after
    :meth:`load_state_dict`.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return where the iteration is: after the item that it gave last.

        Raises:
            Exception: Yours. It ends the iteration, or comes from the loader's ``state_dict``.
        """

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Make the next iteration begin after that item.

        Raises:
            Exception: Yours. It ends the iteration.
        """


def begin_epoch(source: Iterable[T_co], epoch: int) -> Iterator[T_co]:
    """Iterate over an epoch of a source; over the source itself if it has no epochs.

    Raises:
        ValueError: The source refuses the epoch.
    """
    if isinstance(source, HasEpochs):
        source.set_epoch(epoch)
    return iter(source)


def begin_by_position(source: object, epoch: int, before: Pairs = ()) -> Sequence[Any] | None:
    """Begin an epoch whose items are asked for by position, and leave the source as an iteration does.

    Args:
        source: The source.
        epoch: The epoch.
        before: What other ranks than those of now have done of it, of a source that can leave that out.

    Returns:
        The items, which stay the same until the next epoch of the source begins; ``None``, with
        nothing done, if the source can only be read from its start.

    Raises:
        ValueError: The source refuses the epoch.
    """
    # A method of the library's own sources; no protocol, because users need not know of it.
    begin = getattr(source, "begin_by_position", None)
    if begin is not None:
        # Sources that cannot leave anything out take one argument; they are refused before.
        items: Sequence[Any] | None = begin(epoch, before) if before else begin(epoch)
        return items
    if not is_indexed(source):
        return None
    if isinstance(source, HasEpochs):
        source.set_epoch(epoch)
    return source  # type: ignore[return-value]  # a sequence in all but name


def is_indexed(source: object) -> bool:
    """Whether ``source[0]`` is the first of ``len(source)`` items."""
    # Having __getitem__ is not enough: that of a table takes names of columns. A class with it and
    # without __iter__ is one that Python itself reads by position.
    return isinstance(source, Sequence | np.ndarray) or (
        hasattr(source, "__getitem__")
        and isinstance(source, Sized)
        and not hasattr(source, "__iter__")
    )


class Mapped(Sequence[T_co]):
    """The results of a function for the items of a sequence, computed when asked for."""

    def __init__(self, fn: Callable[[Any], T_co], items: Any) -> None:
        self._fn = fn
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, position: Any) -> Any:
        item = self._items[position]
        return Mapped(self._fn, item) if isinstance(position, slice) else self._fn(item)


def iterator_in(source: object) -> object | None:
    """Return what can be read only once: a source that is an iterator, or one that it is ``made_of``."""
    if isinstance(source, Iterator | AsyncIterator):
        return source
    # Of a user's class the name may mean anything.
    parts = getattr(source, "made_of", ())
    found = map(iterator_in, parts if isinstance(parts, tuple) else ())
    return next((iterator for iterator in found if iterator is not None), None)


# PyTorch's DistributedSampler has num_replicas.
PLACE = ("rank", "world_size", "num_replicas")
_ORDER = ("seed", "shuffle_shards", "shuffle_buffer")


def place_of(source: object) -> tuple[int, int]:
    """Return rank and world size of a source or its sampler; ``(0, 1)`` if it knows no ranks."""
    sampler = getattr(source, "sampler", source)
    rank = getattr(sampler, "rank", 0)
    world_size = getattr(sampler, "world_size", getattr(sampler, "num_replicas", 1))
    # As in order_of: another class may use the names otherwise.
    return (rank, world_size) if isinstance(rank, int) and isinstance(world_size, int) else (0, 1)


def place_maker(source: object, before: Pairs) -> Callable[[int], int]:
    """Return the function from an item's position in the source to its place in the order of all ranks."""
    sampler = getattr(source, "sampler", source)
    if not hasattr(sampler, "places_of_rank"):
        rank, world_size = place_of(source)
        return lambda position: rank + world_size * position
    places = sampler.places_of_rank(before)
    if before:
        return lambda position: int(places[position])
    # Not by index: a subclass may give more than its places.
    return lambda position: places.start + places.step * position


def order_of(source: object) -> dict[str, Any] | None:
    """Return what the order of a source depends on besides the epoch; ``None``: it does not say."""
    sampler: Any = getattr(source, "sampler", source)
    # Whatever is no int is of another class that uses the name for something else.
    given = {name: getattr(sampler, name, None) for name in (*_ORDER, *PLACE)}
    order: dict[str, Any] = {name: value for name, value in given.items() if isinstance(value, int)}
    if hasattr(sampler, "mixed"):
        order["sources"] = [order_of_ranks(one) for one in sampler.mixed]
        order["counts"] = sampler.counts.tolist()
    return {"sampler": type(sampler).__name__, **order} if order else None


def order_of_ranks(source: object) -> dict[str, Any]:
    """Return what all ranks share of :func:`order_of`, and the number of items of all of them, if known."""
    order, sampler = order_of(source) or {}, getattr(source, "sampler", None) or source
    common = {name: value for name, value in order.items() if name not in (*PLACE, "counts")}
    length = getattr(sampler, "num_draws", None)
    # The ranks of PyTorch's sampler have equally many.
    is_equal = hasattr(sampler, "num_replicas") or place_of(source)[1] == 1
    if length is None and is_equal and isinstance(sampler, Sized):
        length = len(sampler)
    return {**common, "length": length}


class RepeatedSource(Iterator[T]):
    """Result of :func:`repeat_source`."""

    def __init__(self, source: Iterable[T], epoch: int) -> None:
        self._source = source
        self._epoch = epoch
        self._position = 0
        self._iterator: Iterator[T] | None = None

    def __next__(self) -> T:
        while True:
            if self._iterator is None:
                self._iterator = self._begin()
            # Counted before it is given: the state is that after this item.
            for item in self._iterator:
                self._position += 1
                return item
            # An empty epoch would be repeated for ever.
            if not self._position:
                raise ValueError(
                    f"the source to repeat, a {type(self._source).__name__}, gave no item in epoch "
                    f"{self._epoch}"
                )
            self._iterator = None
            self._epoch += 1
            self._position = 0

    def _begin(self) -> Iterator[T]:
        source, epoch = self._source, self._epoch
        # What has epochs shuffles by itself.
        if isinstance(source, IterableWithShuffle) and not isinstance(source, HasEpochs):
            source.shuffle(seed=epoch)
        if self._position:
            items = begin_by_position(source, epoch)
            if items is not None:
                return (items[position] for position in range(self._position, len(items)))
        # Read again and thrown away: it has neither positions nor a state.
        return itertools.islice(begin_epoch(source, epoch), self._position, None)

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, and how many of its items were given."""
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Go on after the last item that was given before :meth:`state_dict`.

        Raises:
            KeyError: It is no such state.
            TypeError: A number in it is none.
            ValueError: A number in it is negative.
        """
        self._epoch = check_int("epoch", state_dict["epoch"], at_least=0)
        self._position = check_int("position", state_dict["position"], at_least=0)
        self._iterator = None

    def __getstate__(self) -> dict[str, Any]:
        # An iterator cannot always be pickled; it is made again from the position.
        return {**self.__dict__, "_iterator": None}


class ShuffledSource(Generic[T]):
    """Result of :func:`embed_shuffle`."""

    def __init__(self, source: IterableWithShuffle[T], epoch: int, *, shuffle_last: bool) -> None:
        self._source = source
        self._first = self.epoch = epoch
        self._shuffle_last = shuffle_last
        # The seed of the source's order, known until the next epoch begins: others may shuffle it then.
        self._shuffled_ahead: int | None = None
        # In the order before the first shuffle, to which no seed leads back.
        self._first_items: list[T] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration.

        Raises:
            ValueError: The epoch is negative.
        """
        self.epoch = check_int("epoch", epoch, at_least=0)

    def __len__(self) -> int:
        """The number of items of an epoch.

        Raises:
            TypeError: The source has no length.
        """
        return len(cast("Sized", self._source))

    def __iter__(self) -> Iterator[T]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        # Shuffled here, not at the first item: who makes two iterators gets two epochs.
        return self._iterate(self._items(epoch), epoch)

    def begin_by_position(self, epoch: int) -> Sequence[T] | None:
        """Begin an epoch; return its items by position, or ``None`` if the source is no sequence.

        Raises:
            ValueError: The source's ``shuffle`` refuses the epoch as a seed.
        """
        if not isinstance(self._source, Sequence):
            return None
        self.epoch = epoch + 1
        return cast("Sequence[T]", self._items(epoch))

    def _items(self, epoch: int) -> Iterable[T]:
        """Return the source in the order of the epoch, or a list of its items."""
        if not self._shuffle_last:
            self._source.shuffle(seed=epoch)
            return self._source
        # Before the first shuffle, after which nothing leads back to this order.
        if self._first_items is None:
            self._first_items = list(self._source)
        if epoch <= self._first:
            return self._first_items
        # Good for one epoch: meanwhile others may shuffle the source.
        ahead, self._shuffled_ahead = self._shuffled_ahead, None
        if ahead != epoch - 1:
            self._source.shuffle(seed=epoch - 1)
        return self._source

    def _iterate(self, items: Iterable[T], epoch: int) -> Iterator[T]:
        yield from items
        if self._shuffle_last:
            self._source.shuffle(seed=epoch)
            self._shuffled_ahead = epoch


class Purpose(IntEnum):
    """A part of the key of random numbers, so that no two uses of one seed get the same ones."""

    # A number never changes its meaning: saved states resume by it.
    ORDER = 0
    SAMPLE = 1
    MERGE = 2
    FILES = 3
    MIX = 4
    SHARDS = 5
    BATCHES = 6


def random_bits(purpose: Purpose, seed: int, *key: int) -> np.random.PCG64:
    """Return a source of random bits that depends on its arguments alone.

    See:
        NEP 19 of NumPy: the raw output of PCG64 and SeedSequence stays the same in each release,
        that of the methods of its ``Generator`` may change. So orders are made of raw numbers here.

    Raises:
        ValueError: A number is negative.
    """
    return np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(int(purpose), *key)))


def permutation(bits: np.random.PCG64, count: int) -> npt.NDArray[np.int64]:
    """Return the numbers from 0 to ``count`` in random order."""
    # NumPy's shuffle is quicker (0.3 s instead of 1.2 s for ten million), but may change with a
    # release. The sort is stable, so that even equal numbers have one order.
    return np.argsort(bits.random_raw(count), kind="stable").astype(np.int64, copy=False)


def uniform(bits: np.random.PCG64, count: int) -> npt.NDArray[np.float64]:
    """Return random multiples of 2**-53 from 0 up to, and not including, 1."""
    raw: npt.NDArray[np.uint64] = bits.random_raw(count)
    # A float64 has 53 bits of precision.
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53


def weighted_choice(
    cumulative: npt.NDArray[np.float64], numbers: npt.NDArray[np.float64]
) -> npt.NDArray[np.int64]:
    """Choose positions in proportion to their weights, never one without weight.

    Args:
        cumulative: The cumulative sums of the weights.
        numbers: A uniform random number for each choice.
    """
    total = cumulative[-1]
    chosen: npt.NDArray[np.intp] = np.searchsorted(cumulative, numbers * total, side="right")
    # The product may be rounded up to the total, beyond the last position that has weight.
    last = np.searchsorted(cumulative, total, side="left")
    positions: npt.NDArray[np.int64] = np.minimum(chosen, last, dtype=np.int64)
    return positions
