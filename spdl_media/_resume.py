"""How far an epoch has come: the state to save, and the ledger that tracks it during iteration."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

__all__ = (
    "Intervals",
    "Ledger",
    "Pairs",
    "Snapshot",
    "State",
    "Tag",
)

VERSION = 1

Pairs: TypeAlias = tuple[tuple[int, int], ...]
"""Half-open intervals ``start <= number < stop``, in order and apart from each other."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a source said of itself behind the item before ``position``."""

    position: int
    state: Any


@dataclass(frozen=True, slots=True)
class State:
    """How far an epoch has come.

    Attributes:
        epoch: The epoch.
        seed: Of the loader.
        done: Positions in the source whose samples have all been handed out, dropped or failed.
        partly_done: By position, of items of which some samples are done, the offsets of those.
        snapshot: The source's own state at or before the first position that is not done, of
            sources that have one.
        source_length: Items of an epoch, if the source knows it.
    """

    epoch: int
    seed: int
    done: Pairs = ()
    partly_done: tuple[tuple[int, Pairs], ...] = ()
    snapshot: Snapshot | None = None
    source_length: int | None = None

    @property
    def is_fresh(self) -> bool:
        """Whether nothing of the epoch is done."""
        return not self.done and not self.partly_done

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, numbers and dictionaries, but for what the source's own state is made of."""
        leading = self.done[0][1] if self.done and self.done[0][0] == 0 else 0
        beyond = self.done[1:] if leading else self.done
        return {
            "version": VERSION,
            "epoch": self.epoch,
            "seed": self.seed,
            "num_done": leading,
            "done_beyond": [list(pair) for pair in beyond],
            "partly_done": [
                [position, [list(pair) for pair in offsets]]
                for position, offsets in self.partly_done
            ],
            "source": None
            if self.snapshot is None
            else {"position": self.snapshot.position, "state": self.snapshot.state},
            "source_length": self.source_length,
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> State:
        """Read what :meth:`to_dict` wrote.

        Raises:
            TypeError: It is no mapping.
            ValueError: It was not written by a DataLoader, or by a later release.
        """
        if not isinstance(state, Mapping):
            raise TypeError(
                f"the state must be a mapping, as state_dict() returns, not {type(state).__name__}"
            )
        if state.get("version") != VERSION:
            raise ValueError(
                f"the state has version {state.get('version')!r}, and this release reads version {VERSION}; "
                "pass what state_dict() of a spdl_media.DataLoader returned"
            )
        try:
            return cls._read(state)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"the state is incomplete or damaged ({type(error).__name__}: {error}); pass what "
                "state_dict() of a spdl_media.DataLoader returned"
            ) from error

    @classmethod
    def _read(cls, state: Mapping[str, Any]) -> State:
        leading = _count(state["num_done"])
        done = ((0, leading),) if leading else ()
        source = state["source"]
        length = state["source_length"]
        return cls(
            epoch=_count(state["epoch"]),
            seed=_count(state["seed"]),
            done=_pairs([*done, *state["done_beyond"]]),
            partly_done=tuple(
                (_count(position), _pairs(offsets)) for position, offsets in state["partly_done"]
            ),
            snapshot=None
            if source is None
            else Snapshot(_count(source["position"]), source["state"]),
            source_length=None if length is None else _count(length),
        )


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _pairs(intervals: Any) -> Pairs:
    pairs = tuple((_count(start), _count(stop)) for start, stop in intervals)
    bounds = [bound for pair in pairs for bound in pair]
    if any(left >= right for left, right in pairwise(bounds)):
        raise ValueError(f"{pairs} are no intervals in order")
    return pairs


class Intervals:
    """A set of whole numbers, kept as half-open intervals: small while it has few gaps.

    A slow item at position 5 leaves one gap, however many items overtake it.
    """

    __slots__ = ("_starts", "_stops")

    def __init__(self, intervals: Iterable[tuple[int, int]] = ()) -> None:
        pairs = sorted(intervals)
        self._starts = [start for start, _ in pairs]
        self._stops = [stop for _, stop in pairs]

    def __contains__(self, number: int) -> bool:
        before = bisect_right(self._starts, number) - 1
        return before >= 0 and number < self._stops[before]

    def add(self, number: int) -> None:
        """Put a number in. It may be there already."""
        starts, stops = self._starts, self._stops
        before = bisect_right(starts, number) - 1
        after = before + 1
        if before >= 0 and number < stops[before]:
            return
        joins_before = before >= 0 and stops[before] == number
        joins_after = after < len(starts) and starts[after] == number + 1
        if joins_before and joins_after:
            stops[before] = stops.pop(after)
            del starts[after]
        elif joins_before:
            stops[before] = number + 1
        elif joins_after:
            starts[after] = number
        else:
            starts.insert(after, number)
            stops.insert(after, number + 1)

    @property
    def leading(self) -> int:
        """The first number that is not in the set: how many there are from 0 without a gap."""
        return self._stops[0] if self._starts and self._starts[0] == 0 else 0

    def pairs(self) -> tuple[tuple[int, int], ...]:
        """The intervals, in order: ``start <= number < stop``."""
        return tuple(zip(self._starts, self._stops, strict=True))

    def __len__(self) -> int:
        """How many numbers are in the set."""
        return sum(self._stops) - sum(self._starts)


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
