"""How far an epoch has come: the state to save, and the ledger that tracks it during iteration."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

VERSION = 1

Pairs: TypeAlias = tuple[tuple[int, int], ...]
"""Half-open intervals ``start <= number < stop``, in order, with gaps between them."""

Tag: TypeAlias = tuple[int, int | None]
"""The origin of a sample: position in the source, and offset among the samples of that item.

The offset is ``None`` if the item gives at most one sample.
"""


class Snapshot(NamedTuple):
    """The source's own state, after the item before ``position`` was read."""

    position: int
    state: Any


@dataclass(frozen=True, slots=True)
class State:
    """How far an epoch has come, as a value that can be saved and read back.

    Attributes:
        epoch: The epoch.
        seed: The seed of the loader.
        done: Positions in the source whose samples were all handed out, dropped or failed.
        partly_done: For each item of which some samples are done, its position and the offsets of
            those samples.
        snapshot: For a source that has a state, that state at or before the first position that is
            not done.
        source_length: Items of an epoch, if the source knows it.
        order: What the order of the source depends on beside the epoch, if it says so.
    """

    epoch: int
    seed: int
    done: Pairs = ()
    partly_done: tuple[tuple[int, Pairs], ...] = ()
    snapshot: Snapshot | None = None
    source_length: int | None = None
    order: Mapping[str, Any] | None = None

    @property
    def is_fresh(self) -> bool:
        """Whether nothing of the epoch is done."""
        return not self.done and not self.partly_done

    def to_dict(self) -> dict[str, Any]:
        """Return lists, numbers and dictionaries, and the source's own state as it is."""
        # Nearly all states are "the first n items", which reads best as one number.
        num_done = self.done[0][1] if self.done and self.done[0][0] == 0 else 0
        return {
            "version": VERSION,
            "epoch": self.epoch,
            "seed": self.seed,
            "num_done": num_done,
            # Lists, because JSON has no tuples.
            "done_beyond": [list(pair) for pair in self.done if pair[0] >= num_done],
            "partly_done": [
                [position, [list(pair) for pair in offsets]]
                for position, offsets in self.partly_done
            ],
            "source": None if self.snapshot is None else self.snapshot._asdict(),
            "source_length": self.source_length,
            "order": self.order,
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> State:
        """Read what :meth:`to_dict` wrote.

        Raises:
            TypeError: It is not a mapping.
            ValueError: It was not written by a DataLoader, or by a later release.
        """
        if not isinstance(state, Mapping):
            raise TypeError(
                f"the state must be a mapping, as state_dict() returns, not {type(state).__name__}"
            )
        remedy = "pass what state_dict() of a spdl_media.DataLoader returned"
        if state.get("version") != VERSION:
            raise ValueError(
                f"the state has version {state.get('version')!r}, and this release reads version "
                f"{VERSION}; {remedy}"
            )
        try:
            return cls._read(state)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"the state is incomplete or damaged ({type(error).__name__}: {error}); {remedy}"
            ) from error

    @classmethod
    def _read(cls, state: Mapping[str, Any]) -> State:
        # The first interval was written as one number.
        leading = [(0, state["num_done"])] if _count(state["num_done"]) else []
        source, length = state["source"], state["source_length"]
        return cls(
            epoch=_count(state["epoch"]),
            seed=_count(state["seed"]),
            done=_pairs([*leading, *state["done_beyond"]]),
            partly_done=tuple(
                (_count(position), _pairs(offsets)) for position, offsets in state["partly_done"]
            ),
            snapshot=None
            if source is None
            else Snapshot(_count(source["position"]), source["state"]),
            source_length=None if length is None else _count(length),
            # States of earlier releases have none.
            order=state.get("order"),
        )


def _count(value: Any) -> int:
    # A bool comes from another program's state, not from ours.
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _pairs(intervals: Any) -> Pairs:
    pairs = tuple((_count(start), _count(stop)) for start, stop in intervals)
    bounds = [bound for pair in pairs for bound in pair]
    if any(left >= right for left, right in pairwise(bounds)):
        raise ValueError(f"{pairs} are no intervals in order")
    return pairs


class Positions:
    """A set of whole numbers: all below ``leading``, and some beyond, which are few in a run."""

    __slots__ = ("_beyond", "leading")

    def __init__(self, pairs: Pairs = ()) -> None:
        self.leading = 0
        self._beyond: set[int] = set()
        for start, stop in pairs:
            if start == self.leading:
                self.leading = stop
            else:
                self._beyond.update(range(start, stop))

    def __contains__(self, number: int) -> bool:
        return number < self.leading or number in self._beyond

    def add(self, number: int) -> None:
        """Add a number, which may be in the set already."""
        if number >= self.leading:
            self._beyond.add(number)
        while self.leading in self._beyond:
            self._beyond.remove(self.leading)
            self.leading += 1

    def pairs(self) -> Pairs:
        """Return the numbers as intervals, in order."""
        intervals = [[0, self.leading]] if self.leading else []
        for number in sorted(self._beyond):
            if intervals and intervals[-1][1] == number:
                intervals[-1][1] += 1
            else:
                intervals.append([number, number + 1])
        return tuple((start, stop) for start, stop in intervals)


class Ledger:
    """Tracks what is done of one epoch: handed out, dropped, or failed.

    An item under way is not done, so a loader that resumes from here processes it again.

    Thread safety: safe.
    """

    def __init__(self, start: State) -> None:
        self._start = start
        self._lock = threading.Lock()
        self._done = Positions(start.done)
        self._offsets = {position: Positions(pairs) for position, pairs in start.partly_done}
        # The number of samples of each item whose samples have all been made.
        self._counts: dict[int, int] = {}
        # Each is needed until the next one is usable: when all items before that one are done.
        self._snapshots = deque([start.snapshot] if start.snapshot else [])
        self._is_closed = False

    def done_offsets(self, position: int) -> Positions:
        """Return which samples of an item were done at the start."""
        return Positions(dict(self._start.partly_done).get(position, ()))

    def settle(self, tags: Iterable[Tag]) -> None:
        """Note that samples were handed out, or that nothing will come of them."""
        with self._lock:
            for position, offset in tags if not self._is_closed else ():
                if offset is None:
                    self._done.add(position)
                else:
                    self._offsets.setdefault(position, Positions()).add(offset)
                    self._finish_if_complete(position)

    def count_samples(self, position: int, count: int) -> None:
        """Note that an item has given all its samples, and how many they were."""
        with self._lock:
            if not self._is_closed:
                self._counts[position] = count
                self._finish_if_complete(position)

    def keep_snapshot(self, snapshot: Snapshot) -> None:
        """Keep a state of the source for as long as it may be needed."""
        with self._lock:
            self._snapshots.append(snapshot)
            self._drop_snapshots()

    def close(self) -> None:
        """Ignore what comes later: the consumer has gone, so it gets nothing of that."""
        # Without the lock: the garbage collector may call this in the middle of any other call.
        self._is_closed = True

    def state(self) -> State:
        """Return how far the epoch has come."""
        with self._lock:
            self._drop_snapshots()
            first = self._snapshots[0] if self._snapshots else None
            return replace(
                self._start,
                done=self._done.pairs(),
                partly_done=tuple(
                    (position, offsets.pairs())
                    for position, offsets in sorted(self._offsets.items())
                ),
                # One that is further on would lose the items before it.
                snapshot=first if first and first.position <= self._done.leading else None,
            )

    def _finish_if_complete(self, position: int) -> None:
        offsets = self._offsets.get(position)
        # Complete when all samples before the last have been settled, in whatever order.
        if self._counts.get(position) == (0 if offsets is None else offsets.leading):
            # From now on the position alone says it, so the ledger stays small.
            self._offsets.pop(position, None)
            del self._counts[position]
            self._done.add(position)

    def _drop_snapshots(self) -> None:
        # The last one at or before the first item that is not done stays, and all after it.
        while len(self._snapshots) > 1 and self._snapshots[1].position <= self._done.leading:
            self._snapshots.popleft()
