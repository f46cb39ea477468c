"""The items of an epoch, each with its position, from where the epoch is to go on."""

from __future__ import annotations

import copy
import threading
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from spdl_media._dataloading.intervals import Intervals
from spdl_media._dataloading.ledger import Ledger
from spdl_media._dataloading.state import Snapshot, State
from spdl_media._dataloading.tagged import Item, Sample
from spdl_media._sources.protocols import HasEpochs, Stateful, begin_by_position

__all__ = ("AnySource", "Feed", "SourceEpochs", "snapshot_of")

AnySource: TypeAlias = Iterable[Any] | AsyncIterable[Any]

# A source's state may be large. Between two copies of it, items are read again and thrown away.
_SNAPSHOT_INTERVAL = 16


def snapshot_of(source: object, position: int) -> Snapshot | None:
    """What a source says of itself, if it has a state."""
    if not isinstance(source, Stateful):
        return None
    return Snapshot(position, copy.deepcopy(source.state_dict()))


class SourceEpochs:
    """Begins epochs of a source that several runs may share, and notices when its user chooses one.

    A source with ``set_epoch`` is told the epoch; a user who sets it there means the loader's as
    well.
    """

    def __init__(self, source: AnySource) -> None:
        self.source = source
        self._lock = threading.Lock()
        self._epoch_left: int | None = 0

    def chosen_by_user(self) -> int | None:
        """The epoch that the user has set at the source since the last one was begun."""
        epoch = getattr(self.source, "epoch", None)
        if not isinstance(self.source, HasEpochs) or not isinstance(epoch, int):
            return None
        return None if epoch == self._epoch_left else epoch

    def begin(self, start: State) -> tuple[int, Any]:
        """Begin or go on with an epoch; gives the position of the first item, and the iterator."""
        with self._lock:
            position = 0
            if isinstance(self.source, HasEpochs):
                self.source.set_epoch(start.epoch)
            if isinstance(self.source, Stateful) and start.snapshot is not None:
                self.source.load_state_dict(copy.deepcopy(start.snapshot.state))
                position = start.snapshot.position
            iterator = (
                iter(self.source) if isinstance(self.source, Iterable) else aiter(self.source)
            )
            self._epoch_left = getattr(self.source, "epoch", None)
            return position, iterator

    def begin_by_position(self, start: State) -> Sequence[Any] | None:
        """Begin the epoch and give its items by position, if the source can be read that way."""
        with self._lock:
            if isinstance(self.source, Stateful):
                return None
            items = begin_by_position(self.source, start.epoch)
            if items is not None:
                self._epoch_left = getattr(self.source, "epoch", None)
            return items


class Feed:
    """What enters the pipeline: items with their positions, without those that are done."""

    def __init__(
        self, epochs: SourceEpochs, start: State, ledger: Ledger, *, as_samples: bool
    ) -> None:
        self._epochs = epochs
        self._start = start
        self._ledger = ledger
        self._as_samples = as_samples
        self._done = Intervals(start.done)
        self._offsets = dict(start.partly_done)

    def _tag(self, position: int, value: Any) -> Item | Sample | None:
        if not self._as_samples:
            return Item(position, value, self._offsets.get(position, ()))
        if value is None:
            self._ledger.settle([(position, None)])
            return None
        return Sample(position, None, value)

    def _is_wanted(self, position: int) -> bool:
        return position not in self._done

    def _begin(self) -> tuple[int, Any]:
        """Begin or go on with the epoch; gives the position of the first item, and the iterator."""
        position, iterator = self._epochs.begin(self._start)
        # What is iterated anew needs no state to begin with. An iterator does: the next iteration
        # of it leads back there, unless it goes on from a state already.
        is_iterator = isinstance(self._epochs.source, Iterator | AsyncIterator)
        if is_iterator and self._start.snapshot is None:
            self._note(position)
        return position, iterator

    def _note(self, position: int) -> None:
        """Ask the source for its state now and then."""
        if position % _SNAPSHOT_INTERVAL:
            return
        if (snapshot := snapshot_of(self._epochs.source, position)) is not None:
            self._ledger.keep_snapshot(snapshot)


class SyncFeed(Feed):
    """The feed of an iterable."""

    def __iter__(self) -> Iterator[Item | Sample]:
        for position, value in self._pairs():
            tagged = self._tag(position, value)
            if tagged is not None:
                yield tagged

    def _pairs(self) -> Iterator[tuple[int, Any]]:
        items = None if self._start.is_fresh else self._epochs.begin_by_position(self._start)
        if items is None:
            yield from self._read()
            return
        for position in range(len(items)):
            if self._is_wanted(position):
                yield position, items[position]

    def _read(self) -> Iterator[tuple[int, Any]]:
        position, iterator = self._begin()
        for value in iterator:
            if self._is_wanted(position):
                yield position, value
            position += 1
            self._note(position)


class AsyncFeed(Feed):
    """The feed of an async iterable."""

    async def __aiter__(self) -> AsyncIterator[Item | Sample]:
        position, iterator = self._begin()
        async for value in iterator:
            if self._is_wanted(position):
                tagged = self._tag(position, value)
                if tagged is not None:
                    yield tagged
            position += 1
            self._note(position)
