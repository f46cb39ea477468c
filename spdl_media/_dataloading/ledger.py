"""Keeps book of what is done of an epoch, while items are under way in many threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from typing import TypeAlias

from spdl_media._dataloading.intervals import Intervals
from spdl_media._dataloading.state import Snapshot, State

__all__ = ("Ledger", "Tag")

Tag: TypeAlias = tuple[int, int | None]
"""Where a sample comes from: position in the source, and offset among the samples of that item.

The offset is ``None`` if the item can give one sample only.
"""


class Ledger:
    """What is done of one epoch: handed out, dropped, or failed.

    What is under way is not done, so that a loader that goes on from here makes it again.

    Thread safety: safe.
    """

    def __init__(self, start: State) -> None:
        self._start = start
        self._lock = threading.Lock()
        self._done = Intervals(start.done)
        self._offsets = {position: Intervals(pairs) for position, pairs in start.partly_done}
        # Of items whose samples have all been made, how many they were.
        self._counts: dict[int, int] = {}
        self._snapshots: deque[Snapshot] = deque([start.snapshot] if start.snapshot else [])
        self._is_closed = False

    def settle(self, tags: Iterable[Tag]) -> None:
        """Note that samples were handed out, or that nothing will ever come of them."""
        with self._lock:
            for position, offset in tags if not self._is_closed else ():
                if offset is None:
                    self._finish(position)
                else:
                    self._offsets.setdefault(position, Intervals()).add(offset)
                    self._finish_if_complete(position)

    def count_samples(self, position: int, count: int) -> None:
        """Note that an item has given all its samples, and how many they were."""
        with self._lock:
            if not self._is_closed:
                self._counts[position] = count
                self._finish_if_complete(position)

    def keep_snapshot(self, snapshot: Snapshot) -> None:
        """Keep what the source says of itself, until the items before it are done."""
        with self._lock:
            self._snapshots.append(snapshot)
            self._forget_snapshots()

    def close(self) -> None:
        """Let nothing change any more what is done: the consumer has gone.

        Takes no lock, because it may be called by the garbage collector in the middle of any call.
        """
        self._is_closed = True

    def state(self) -> State:
        """How far the epoch has come."""
        with self._lock:
            self._forget_snapshots()
            return State(
                epoch=self._start.epoch,
                seed=self._start.seed,
                done=self._done.pairs(),
                partly_done=tuple(
                    (position, offsets.pairs())
                    for position, offsets in sorted(self._offsets.items())
                ),
                snapshot=self._snapshots[0] if self._can_use_snapshot() else None,
                source_length=self._start.source_length,
            )

    def _finish_if_complete(self, position: int) -> None:
        offsets = self._offsets.get(position)
        if self._counts.get(position) == (0 if offsets is None else offsets.leading):
            self._offsets.pop(position, None)
            del self._counts[position]
            self._finish(position)

    def _finish(self, position: int) -> None:
        self._done.add(position)

    def _can_use_snapshot(self) -> bool:
        return bool(self._snapshots) and self._snapshots[0].position <= self._done.leading

    def _forget_snapshots(self) -> None:
        """Keep the last one from which nothing that is not done would be missed, and those after it."""
        leading = self._done.leading
        while len(self._snapshots) > 1 and self._snapshots[1].position <= leading:
            self._snapshots.popleft()
