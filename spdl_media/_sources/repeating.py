"""Sources that come again and again: without end, or in another order each time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

from spdl_media._checks import check_int
from spdl_media._sources.protocols import (
    HasEpochs,
    IterableWithShuffle,
    begin_by_position,
    begin_epoch,
    length_of,
)

__all__ = ("RepeatedSource", "ShuffledSource")

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
