"""Epochs of sources: protocols, repeated and shuffled sources, random numbers, order on each rank."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence, Sized
from enum import IntEnum
from typing import Any, Protocol, TypeAlias, TypeVar, cast, runtime_checkable

import numpy as np
import numpy.random  # here, because a Ctrl-C in an import of compiled modules may get lost
import numpy.typing as npt

from spdl_media._checks import check_int

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

Pairs: TypeAlias = tuple[tuple[int, int], ...]
"""Half-open intervals ``start <= number < stop``, in order, with gaps between them."""


@runtime_checkable
class IterableWithShuffle(Iterable[T_co], Protocol[T_co]):
    """An iterable that can be shuffled."""

    def shuffle(self, seed: int) -> None:
        """Put the items into an order that depends only on ``seed``, not on the order before.

        Raises:
            Exception: Any exception of the source; it ends the iteration.
        """


@runtime_checkable
class HasEpochs(Protocol):
    """An iterable whose epoch can be set, such as PyTorch's samplers."""

    def set_epoch(self, epoch: int, /) -> None:
        """Set the epoch of the next iteration.

        Raises:
            Exception: Any exception of the source; it ends the iteration.
        """


@runtime_checkable
class Stateful(Protocol):
    """An iterable that can save the state of its iteration and resume from it, such as those of torchdata.

    Each iteration begins at the start, except for the first one after :meth:`load_state_dict`. (An iterator
    has only one iteration.)
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the iteration after the last item that it gave.

        Raises:
            Exception: Any exception of the source; the iteration, or the loader's ``state_dict``, raises it.
        """

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Make the next iteration begin after the item at which ``state_dict`` was saved.

        Raises:
            Exception: Any exception of the source; it ends the iteration.
        """


class Epochs:
    """Base of sources of which each iteration is the next epoch.

    Attributes:
        epoch: The epoch of the next iteration.
    """

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration.

        Raises:
            ValueError: The epoch is negative.
        """
        self.epoch = check_int("epoch", epoch, at_least=0)


class Ranked(Epochs):
    """Base of samplers that give each process its part, which is read by position."""

    begin_by_position: Callable[[int], Sequence[Any]]  # begins an epoch, and returns its items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.begin_by_position(self.epoch))

    def _find_place(self) -> tuple[int, int]:
        """Return the rank of this process, and the number of processes."""
        raise NotImplementedError

    @property
    def rank(self) -> int:
        """The process that the indices are for."""
        return self._find_place()[0]

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self._find_place()[1]


def begin_epoch(source: Iterable[T_co], epoch: int) -> Iterator[T_co]:
    """Return an iterator over an epoch of a source, or over the source itself if it has no epochs.

    Raises:
        ValueError: The source refuses the epoch.
    """
    if isinstance(source, HasEpochs):
        source.set_epoch(epoch)
    return iter(source)


def begin_by_position(source: object, epoch: int, before: Pairs = ()) -> Sequence[Any] | None:
    """Begin an epoch whose items are read by position.

    Afterwards the source is in the same state as after an iteration.

    Args:
        source: The source.
        epoch: The epoch.
        before: Places of the epoch that were done before the number of ranks changed, to leave out.

    Returns:
        The items, which do not change until the next epoch of the source begins. ``None``, without any
        effect, if the source can only be read from its start.

    Raises:
        ValueError: The source refuses the epoch.
    """
    # A private method of the library's sources, and therefore not a public protocol.
    begin: Callable[..., Sequence[Any] | None] | None = getattr(source, "begin_by_position", None)
    if begin is not None:
        # Sources that cannot leave items out take one argument. For them, `before` was refused already.
        return begin(epoch, before) if before else begin(epoch)
    if not is_indexed(source):
        return None
    if isinstance(source, HasEpochs):
        source.set_epoch(epoch)
    return source  # type: ignore[return-value]  # a sequence in all but name


def is_indexed(source: object) -> bool:
    """Whether ``source[0]`` is the first of ``len(source)`` items."""
    # __getitem__ alone is not enough: that of a table takes column names. But a class with __getitem__ and
    # without __iter__ is one that Python itself iterates by position.
    return isinstance(source, Sequence | np.ndarray) or (
        hasattr(source, "__getitem__")
        and isinstance(source, Sized)
        and not hasattr(source, "__iter__")
    )


class Mapped(Sequence[T_co]):
    """A sequence of the results of a function for the items of another sequence, computed on access."""

    def __init__(self, fn: Callable[[Any], T_co], items: Any) -> None:
        self._fn, self._items = fn, items

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self[:2]))
        return f"<{len(self)} items: {shown}{', ...' if len(self) > 2 else ''}>"

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T_co]:
        return map(self._fn, self._items)

    def __getitem__(self, position: Any) -> Any:
        item = self._items[position]
        return Mapped(self._fn, item) if isinstance(position, slice) else self._fn(item)


def iterator_in(source: object) -> object | None:
    """Return the iterator, which can be read only once, in a source: itself, or in its ``made_of``."""
    if isinstance(source, Iterator | AsyncIterator):
        return source
    # In a user's class, the attribute may mean something else.
    parts = getattr(source, "made_of", ())
    found = map(iterator_in, parts if isinstance(parts, tuple) else ())
    return next((iterator for iterator in found if iterator is not None), None)


# num_replicas is the world size in PyTorch's DistributedSampler.
PLACE = ("rank", "world_size", "num_replicas")
_ORDER = ("seed", "num_lengths", "shuffle_shards", "shuffle_buffer")


def sampler_of(source: object) -> Any:
    """Return the sampler of a source, which decides the order; the source itself if it has none."""
    sampler = getattr(source, "sampler", None)
    return source if sampler is None else sampler


def place_of(source: object) -> tuple[int, int]:
    """Return rank and world size of a source or its sampler; ``(0, 1)`` if it has none."""
    sampler = sampler_of(source)
    rank = getattr(sampler, "rank", 0)
    world_size = getattr(sampler, "world_size", getattr(sampler, "num_replicas", 1))
    # As in order_of, another class may use the names for something else.
    return (rank, world_size) if isinstance(rank, int) and isinstance(world_size, int) else (0, 1)


def place_maker(source: object, before: Pairs) -> Callable[[int], int]:
    """Return a function from an item's position in the source to its place in the order of all ranks."""
    sampler = sampler_of(source)
    if not hasattr(sampler, "places_of_rank"):
        rank, world_size = place_of(source)
        return lambda position: rank + world_size * position
    if before:
        places = sampler.places_of_rank(before)
        return lambda position: int(places[position])
    share = sampler.share(sampler.num_draws)
    # Not share[position]: a subclass may give more items than it has places.
    return lambda position: share.start + share.step * position


def order_of(source: object) -> dict[str, Any] | None:
    """Return the values on which a source's order depends besides the epoch; ``None``: unknown.

    Raises:
        Exception: The ``__len__`` of a mixed sampler raises.
    """
    sampler = sampler_of(source)
    # An attribute that is not an int belongs to another class, which uses the name for something else.
    given = {name: getattr(sampler, name, None) for name in (*_ORDER, *PLACE)}
    order: dict[str, Any] = {name: value for name, value in given.items() if isinstance(value, int)}
    mix: Any = sampler if isinstance(sampler, Ranked) else None
    if hasattr(mix, "mixed"):
        order["sources"] = [order_of_ranks(one) for one in mix.mixed]
        order["counts"] = mix.counts.tolist()
    return {"sampler": type(sampler).__name__, **order} if order else None


def order_of_ranks(source: object) -> dict[str, Any]:
    """Return the part of :func:`order_of` that is equal on all ranks, and the total number of items.

    Raises:
        Exception: The sampler's ``__len__`` raises.
    """
    order, sampler = order_of(source) or {}, sampler_of(source)
    common = {name: value for name, value in order.items() if name not in (*PLACE, "counts")}
    length = getattr(sampler, "num_draws", None)
    # With PyTorch's sampler, all ranks have the same number of items.
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
            # Counted before it is returned, because the state is that after this item.
            for item in self._iterator:
                self._position += 1
                return item
            # An empty epoch would be repeated forever.
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
        # A source with epochs shuffles by itself.
        if isinstance(source, IterableWithShuffle) and not isinstance(source, HasEpochs):
            source.shuffle(seed=epoch)
        items = begin_by_position(source, epoch) if self._position else None
        if items is not None:
            return (items[position] for position in range(self._position, len(items)))
        # Without positions, the items before the position are read again and dropped.
        return itertools.islice(begin_epoch(source, epoch), self._position, None)

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, and the number of its items that were given."""
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Continue after the last item that was given before :meth:`state_dict`.

        Raises:
            KeyError: The state lacks a value.
            TypeError: A value is not a whole number.
            ValueError: A value is negative.
        """
        self._epoch = check_int("epoch", state_dict["epoch"], at_least=0)
        self._position = check_int("position", state_dict["position"], at_least=0)
        self._iterator = None

    def __getstate__(self) -> dict[str, Any]:
        # Not all iterators can be pickled; it is made again from the position.
        return {**self.__dict__, "_iterator": None}


class ShuffledSource(Epochs, Iterable[T]):
    """Result of :func:`embed_shuffle`."""

    def __init__(self, source: IterableWithShuffle[T], epoch: int) -> None:
        self._source = source
        self.epoch = epoch

    def __len__(self) -> int:
        """Return the number of items in an epoch.

        Raises:
            TypeError: The source has no length.
        """
        return len(cast("Sized", self._source))

    def __iter__(self) -> Iterator[T]:
        # Shuffled here instead of at the first item, so that two iterators get two epochs.
        return iter(self._begin(self.epoch))

    def begin_by_position(self, epoch: int) -> Sequence[T] | None:
        """Begin an epoch, and return its items by position, or ``None`` if the source is not a sequence.

        Raises:
            ValueError: The source's ``shuffle`` refuses the epoch as a seed.
        """
        is_sequence = isinstance(self._source, Sequence)
        return cast("Sequence[T]", self._begin(epoch)) if is_sequence else None

    def _begin(self, epoch: int) -> Iterable[T]:
        self._source.shuffle(seed=epoch)
        self.epoch = epoch + 1
        return self._source


class Purpose(IntEnum):
    """Part of the key of random numbers, so that different uses of one seed have different numbers."""

    # Values must not change, because saved states depend on them.
    ORDER = 0
    SAMPLE = 1
    MERGE = 2
    FILES = 3
    MIX = 4
    SHARDS = 5
    BATCHES = 6


def random_bits(purpose: Purpose, seed: int, *key: int) -> np.random.PCG64:
    """Return a generator of random bits that depends only on the arguments.

    See:
        NEP 19 of NumPy: the raw output of PCG64 and SeedSequence is the same in all releases, but that of
        the methods of ``Generator`` may change. So orders are made from the raw output here.

    Raises:
        ValueError: A number is negative.
    """
    return np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(int(purpose), *key)))


def permutation(bits: np.random.PCG64, count: int) -> npt.NDArray[np.int64]:
    """Return the numbers from 0 to ``count - 1`` in random order."""
    # NumPy's shuffle is faster (0.3 s instead of 1.2 s for ten million), but may change in a release. The
    # sort is stable, so that the order of equal random numbers is defined, too.
    return np.argsort(bits.random_raw(count), kind="stable").astype(np.int64, copy=False)


def uniform(bits: np.random.PCG64, count: int) -> npt.NDArray[np.float64]:
    """Return random multiples of 2**-53 in [0, 1)."""
    raw: npt.NDArray[np.uint64] = bits.random_raw(count)
    # Keep 53 of the 64 bits, the precision of float64.
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53


def weighted_choice(
    cumulative: npt.NDArray[np.float64], numbers: npt.NDArray[np.float64]
) -> npt.NDArray[np.int64]:
    """Choose positions in proportion to their weights, never one of weight 0.

    Args:
        cumulative: The cumulative sums of the weights.
        numbers: A uniform random number for each choice.
    """
    total = cumulative[-1]
    chosen: npt.NDArray[np.intp] = np.searchsorted(cumulative, numbers * total, side="right")
    # The product may be rounded up to the total, which is after the last position with a weight above 0.
    last = np.searchsorted(cumulative, total, side="left")
    positions: npt.NDArray[np.int64] = np.minimum(chosen, last, dtype=np.int64)
    return positions


def compare_ranks(loader: Any, source: Any, epoch: int, key: str) -> None:
    """Compare the order of an epoch with that of the ``torch.distributed`` rank that began it first.

    Args:
        loader: The loader.
        source: Its source. It is compared only if it is sharded over exactly these ranks.
        epoch: The epoch.
        key: Identifies the iteration; equal on all ranks.

    Raises:
        ValueError: The other rank has another order.
    """
    # Only if the program has imported it; torch is not imported for this check.
    torch = sys.modules.get("torch.distributed")
    rank, world_size = place_of(source)
    if world_size == 1 or torch is None or not torch.is_available() or not torch.is_initialized():
        return
    # A sampler may shard over a group of ranks instead of all ranks.
    if (rank, world_size) != (torch.get_rank(), torch.get_world_size()):
        return
    store = torch.distributed_c10d._get_default_store()
    if store is None:  # the MPI backend has none
        return
    ours = {**order_of_ranks(source), "epoch": epoch}
    # If all ranks have equally many items, their batches must have the same size, too: otherwise one rank
    # would wait for another.
    if getattr(sampler_of(source), "_uneven", "keep") != "keep":
        ours |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    # The first rank stores its order and the others compare with it, so no rank waits.
    first = store.compare_set(f"spdl_media/{key}", "", json.dumps([rank, ours]))
    other, theirs = json.loads(first)
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    if names:
        differences = ", ".join(f"{name} {ours.get(name)} and {theirs.get(name)}" for name in names)
        raise ValueError(
            f"ranks {rank} and {other} split different epochs, so items would be repeated or lost, or one "
            f"rank would wait for the other: {differences}. Make the samplers and loaders of all ranks with "
            "the same arguments, over the same data, and set the same epoch"
        )
