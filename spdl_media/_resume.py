"""How far an epoch has come: the state to save, and the ledger that tracks it during iteration."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from spdl_media.epochs import PLACE, Pairs, Stateful

# Of the dictionary. Fields that are added later have a default, and leave it as it is.
VERSION = 1

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
        order: What the order of the source depends on besides the epoch, if it says so.
        before: Places in the order of all ranks that were done when there were other ranks than now.
            Positions count what those have left.
    """

    epoch: int
    seed: int
    done: Pairs = ()
    partly_done: tuple[tuple[int, Pairs], ...] = ()
    snapshot: Snapshot | None = None
    source_length: int | None = None
    order: Mapping[str, Any] | None = None
    before: Pairs = ()

    @property
    def is_fresh(self) -> bool:
        """Whether nothing of the epoch is done."""
        return not (self.done or self.partly_done or self.before)

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
            "partly_done": [[at, [*map(list, offsets)]] for at, offsets in self.partly_done],
            "source": None if self.snapshot is None else self.snapshot._asdict(),
            "source_length": self.source_length,
            "order": self.order,
            "before": [*map(list, self.before)],
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
            # The first interval was written as one number.
            leading = [(0, state["num_done"])] if _count(state["num_done"]) else []
            source, length, partly = state["source"], state["source_length"], state["partly_done"]
            return cls(
                epoch=_count(state["epoch"]),
                seed=_count(state["seed"]),
                done=_pairs([*leading, *state["done_beyond"]]),
                partly_done=tuple((_count(at), _pairs(offsets)) for at, offsets in partly),
                snapshot=None
                if source is None
                else Snapshot(_count(source["position"]), source["state"]),
                source_length=None if length is None else _count(length),
                # States of earlier releases have none.
                order=state.get("order"),
                before=_pairs(state.get("before", ())),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"the state is incomplete or damaged ({type(error).__name__}: {error}); {remedy}"
            ) from error


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


def loaded_state(
    given: Mapping[str, Any] | Sequence[Mapping[str, Any]], own: State, source: object
) -> State:
    """Read what ``state_dict`` of a loader returned, or those of all ranks.

    Args:
        given: The state, or the states.
        own: The loader's, at the start of an epoch.
        source: The loader's.

    Raises:
        TypeError: It is no mapping, or the source cannot be shared out anew.
        ValueError: It is no state, or not one of such a source.
    """
    if isinstance(given, Sequence):
        return _regrouped([State.from_dict(one) for one in given], own, source)
    state = State.from_dict(given)
    # Without these checks a wrong state would skip items without a word.
    remedy = "rank and world size that it had, or load the states of all ranks"
    if state.source_length != own.source_length:
        raise ValueError(
            f"the state is that of a source of {state.source_length} items, and this one has "
            f"{own.source_length}; make the loader with the source, {remedy}"
        )
    if state.order not in (None, own.order):
        raise ValueError(
            f"the state is that of a source in the order of {state.order}, and this one has {own.order}; "
            f"make the loader with the sampler, its seed, {remedy}"
        )
    if state.snapshot is not None and not isinstance(source, Stateful):
        raise ValueError(
            f"the state holds that of a source with load_state_dict(), which {type(source).__name__} lacks"
        )
    return state


def _regrouped(states: Sequence[State], own: State, source: object) -> State:
    """Make one state of those of all ranks: the beginning of what they have left of the epoch."""
    sampler: Any = getattr(source, "sampler", source)
    if not hasattr(sampler, "places_of_rank"):
        raise TypeError(
            "states of several ranks are taken for a sampler of spdl_media.source, a MapIterator over one, "
            f"ImageFolder and Shards, which share out anew what is left; {type(source).__name__} does not. "
            "Load the state of each rank there, and change the number of ranks between two epochs"
        )
    # No state at all is refused below, as one of each rank is missing.
    epoch = min((state.epoch for state in states), default=0)
    current = [state for state in states if state.epoch == epoch]
    # A rank that has ended the epoch is at the start of the next one.
    ended = [state for state in states if (state.epoch, state.is_fresh) == (epoch + 1, True)]
    orders = [{**(state.order or {}), **dict.fromkeys(PLACE)} for state in states]
    # Rank and world size differ among the states, and everything else must not.
    places = [[(state.order or {}).get(name) for name in PLACE[:2]] for state in states]
    if (
        len(current) + len(ended) != len(states)
        or sorted(places) != [[rank, len(states)] for rank in range(len(states))]
        or any(order != {**(own.order or {}), **dict.fromkeys(PLACE)} for order in orders)
        or len({(state.seed, state.before) for state in current}) != 1
    ):
        raise ValueError(
            "pass one state of each rank that there was, all saved at one time, of the same sampler and "
            f"seed as this loader's, {own.order}. These are of epochs {[one.epoch for one in states]}, seeds "
            f"{[one.seed for one in states]} and orders {[one.order for one in states]}"
        )
    # By place in the order of all ranks, which does not depend on their number.
    is_done = np.zeros(sampler.num_draws, bool)
    for start, stop in current[0].before:
        is_done[start:stop] = True
    partly: dict[int, Pairs] = {}
    for (rank, world_size), state in zip(places, states, strict=True):
        old = sampler.of_rank(rank, world_size)
        if state.source_length != len(old):
            raise ValueError(
                f"rank {rank} of {world_size} had {state.source_length} items, and would have {len(old)} of "
                "this source; make it of the same data"
            )
        # Padding repeats the first ones.
        had = np.asarray(old.places_of_rank(current[0].before), np.int64) % sampler.num_draws
        for start, stop in state.done if state.epoch == epoch else ((0, len(had)),):
            is_done[had[start:stop]] = True
        partly |= {int(had[position]): offsets for position, offsets in state.partly_done}
    # Where the numbers change from not done to done, and back.
    bounds = np.flatnonzero(np.diff(is_done, prepend=False, append=False)).tolist()
    before = tuple(zip(bounds[::2], bounds[1::2], strict=True))
    mine = np.asarray(sampler.places_of_rank(before), np.int64) % sampler.num_draws
    # As a list only if it is looked at: it may have millions of numbers.
    places_left = enumerate(mine.tolist() if partly else ())
    partly_done = tuple((at, partly[place]) for at, place in places_left if place in partly)
    return replace(own, epoch=epoch, seed=current[0].seed, before=before, partly_done=partly_done)


class Positions:
    """A set of whole numbers: all below ``leading``, and some beyond, which are few in a run."""

    __slots__ = ("_beyond", "leading")

    def __init__(self, pairs: Pairs = ()) -> None:
        self.leading = 0
        self._beyond: set[int] = set()
        # In order, so only the first interval can begin at 0.
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

    Attributes:
        is_closed: Whether the consumer has gone.

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
        self.is_closed = False

    def done_offsets(self, position: int) -> Positions:
        """Return which samples of an item were done at the start."""
        return Positions(dict(self._start.partly_done).get(position, ()))

    def settle(self, tags: Iterable[Tag]) -> None:
        """Note that samples were handed out, or that nothing will come of them."""
        with self._lock:
            # A thread may still end a call when the consumer has gone.
            for position, offset in tags if not self.is_closed else ():
                if offset is None:
                    self._done.add(position)
                else:
                    self._offsets.setdefault(position, Positions()).add(offset)
                    self._finish_if_complete(position)

    def count_samples(self, position: int, count: int) -> None:
        """Note that an item has given all its samples, and how many they were."""
        with self._lock:
            if not self.is_closed:
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
        self.is_closed = True

    def state(self) -> State:
        """Return how far the epoch has come."""
        with self._lock:
            self._drop_snapshots()
            first = self._snapshots[0] if self._snapshots else None
            return replace(
                self._start,
                done=self._done.pairs(),
                partly_done=tuple((at, self._offsets[at].pairs()) for at in sorted(self._offsets)),
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
