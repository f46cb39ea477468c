"""What a source may offer beyond iteration (epochs, positions, a state), and sources that repeat."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, Generic, Protocol, TypeVar, cast, runtime_checkable

import numpy as np

from spdl_media._checks import check_int

__all__ = (
    "HasEpochs",
    "IterableWithShuffle",
    "RepeatedSource",
    "ShuffledSource",
    "SizedIterable",
    "SizedIterableWithShuffle",
    "Stateful",
    "begin_by_position",
    "begin_epoch",
    "iterator_in",
    "length_of",
    "place_of",
)

T_co = TypeVar("T_co", covariant=True)


@runtime_checkable
class IterableWithShuffle(Iterable[T_co], Protocol[T_co]):
    """An iterable whose order can be changed."""

    def shuffle(self, seed: int) -> None:
        """Put the items in the order that belongs to ``seed``, whatever their order was before."""


@runtime_checkable
class SizedIterable(Sized, Iterable[T_co], Protocol[T_co]):
    """An iterable that knows how many items an iteration gives."""


@runtime_checkable
class SizedIterableWithShuffle(SizedIterable[T_co], Protocol[T_co]):
    """An iterable that knows its length and whose order can be changed."""

    def shuffle(self, seed: int) -> None:
        """Put the items in the order that belongs to ``seed``, whatever their order was before."""


@runtime_checkable
class HasEpochs(Protocol):
    """An iterable that can be told which epoch the next iteration is. PyTorch's samplers are such ones."""

    def set_epoch(self, epoch: int, /) -> None:
        """Make the next iteration that of an epoch."""


@runtime_checkable
class Stateful(Protocol):
    """An iterable that can tell where it is, and go on from there, as those of torchdata do.

    If it is no iterator, each iteration begins at its start, but for the first one after
    :meth:`load_state_dict`.
    """

    def state_dict(self) -> dict[str, Any]:
        """Say where the iteration is: behind the item that it gave last."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Make the next iteration go on behind that item."""


def begin_epoch(source: Iterable[T_co], epoch: int) -> Iterator[T_co]:
    """Iterate over an epoch of a source, if it has epochs, else over the source."""
    if isinstance(source, HasEpochs):
        source.set_epoch(epoch)
    return iter(source)


def begin_by_position(source: object, epoch: int) -> Sequence[Any] | None:
    """Begin an epoch whose items are asked for by position, and leave the source as an iteration does.

    Returns ``None``, and has done nothing, if the source can only be read from its start. The items may be
    those of the source itself, so they stay the same until its next epoch begins.

    Having ``__getitem__`` is not enough: of a table, it takes the names of columns. It is for a class without
    ``__iter__``, whose items Python itself reads by position.
    """
    begin = getattr(source, "begin_by_position", None)
    if begin is not None:
        items: Sequence[Any] | None = begin(epoch)
        return items
    is_indexed = isinstance(source, Sequence | np.ndarray) or (
        hasattr(source, "__getitem__")
        and isinstance(source, Sized)
        and not hasattr(source, "__iter__")
    )
    if not is_indexed:
        return None
    if isinstance(source, HasEpochs):
        source.set_epoch(epoch)
    return source  # type: ignore[return-value]  # a sequence in all but name


def iterator_in(source: object) -> object | None:
    """What of a source can be read once: itself if it is an iterator, or one that it is ``made_of``."""
    if isinstance(source, Iterator | AsyncIterator):
        return source
    parts = getattr(source, "made_of", ())
    found = map(iterator_in, parts if isinstance(parts, tuple) else ())
    return next((iterator for iterator in found if iterator is not None), None)


def length_of(source: object) -> int:
    """The number of items of an epoch.

    Raises:
        TypeError: The source has no length.
    """
    if not isinstance(source, Sized):
        raise TypeError(f"the source has no length, because {type(source).__name__} has none")
    return len(source)


def place_of(source: object) -> tuple[int, int]:
    """Rank and world size of a source, or of its sampler; ``(0, 1)`` if it knows nothing of ranks."""
    sampler = getattr(source, "sampler", source)
    rank = getattr(sampler, "rank", 0)
    # What PyTorch's DistributedSampler calls it.
    world_size = getattr(sampler, "world_size", getattr(sampler, "num_replicas", 1))
    return (rank, world_size) if isinstance(rank, int) and isinstance(world_size, int) else (0, 1)


T = TypeVar("T")


class RepeatedSource(Iterator[T]):
    """What :func:`repeat_source` returns."""

    def __init__(self, source: Iterable[T], epoch: int) -> None:
        self._source = source
        self._epoch = epoch
        self._position = 0
        self._iterator: Iterator[T] | None = None

    def __next__(self) -> T:
        while True:
            if self._iterator is None:
                self._iterator = self._begin()
            try:
                item = next(self._iterator)
            except StopIteration:
                self._end_epoch()
            else:
                self._position += 1
                return item

    def _begin(self) -> Iterator[T]:
        source, epoch = self._source, self._epoch
        if isinstance(source, IterableWithShuffle) and not isinstance(source, HasEpochs):
            source.shuffle(seed=epoch)
        if self._position:
            items = begin_by_position(source, epoch)
            if items is not None:
                return (items[position] for position in range(self._position, len(items)))
        return itertools.islice(begin_epoch(source, epoch), self._position, None)

    def _end_epoch(self) -> None:
        if not self._position:
            raise ValueError(
                f"the source to repeat, a {type(self._source).__name__}, gave no item in epoch {self._epoch}"
            )
        self._iterator = None
        self._epoch += 1
        self._position = 0

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and how many of its items were given."""
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Go on behind the item that was the last one before :meth:`state_dict`."""
        self._epoch = check_int("epoch", state_dict["epoch"], at_least=0)
        self._position = check_int("position", state_dict["position"], at_least=0)
        self._iterator = None

    def __getstate__(self) -> dict[str, Any]:
        # The iterator cannot be pickled; it is made again from the position.
        return {**self.__dict__, "_iterator": None}


class ShuffledSource(Generic[T]):
    """What :func:`embed_shuffle` returns."""

    def __init__(self, source: IterableWithShuffle[T], epoch: int, *, shuffle_last: bool) -> None:
        self._source = source
        self._first = self._epoch = epoch
        self._shuffle_last = shuffle_last
        # The seed of the order in which the source is now; it may be shuffled by others.
        self._shuffled_ahead: int | None = None
        # In the order before the first shuffle, to which no seed leads back.
        self._first_items: list[T] | None = None

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that of an epoch."""
        self._epoch = check_int("epoch", epoch, at_least=0)

    def __len__(self) -> int:
        """The number of items of an epoch.

        Raises:
            TypeError: The source has no length.
        """
        return length_of(self._source)

    def __iter__(self) -> Iterator[T]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        return self._iterate(self._items(epoch), epoch)

    def begin_by_position(self, epoch: int) -> Sequence[T] | None:
        """Begin an epoch, and give its items by position; ``None`` if the source is no sequence."""
        if not isinstance(self._source, Sequence):
            return None
        self._epoch = epoch + 1
        return cast("Sequence[T]", self._items(epoch))

    def _items(self, epoch: int) -> Iterable[T]:
        """What an epoch gives: the source, put in the order of the epoch, or a list of its items."""
        if not self._shuffle_last:
            self._source.shuffle(seed=epoch)
            return self._source
        if self._first_items is None:
            self._first_items = list(self._source)
        if epoch <= self._first:
            return self._first_items
        ahead, self._shuffled_ahead = self._shuffled_ahead, None
        if ahead != epoch - 1:
            self._source.shuffle(seed=epoch - 1)
        return self._source

    def _iterate(self, items: Iterable[T], epoch: int) -> Iterator[T]:
        yield from items
        if self._shuffle_last:
            self._source.shuffle(seed=epoch)
            self._shuffled_ahead = epoch
