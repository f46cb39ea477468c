"""Progress of an epoch: the state to save, and the ledger that tracks progress during iteration."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from spdl_media._checks import warn_caller
from spdl_media.epochs import PLACE, HasEpochs, Pairs, Stateful, sampler_of

# Version of the state's dictionary. New fields get a default value, so they do not change the version.
VERSION = 1

Tag: TypeAlias = tuple[int, int | None]
"""The origin of a sample: the item's position in the source, and the sample's offset within that item.

The offset is ``None`` if the item gives at most one sample.
"""


# Fields of a state that hold intervals.
_INTERVALS = ("done", "partly_done", "before", "partly_before")


class Snapshot(NamedTuple):
    """The source's own state when ``position`` was the next item to read."""

    position: int
    state: Any


@dataclass(frozen=True, slots=True)
class State:
    """Progress of an epoch, as a value that can be saved and restored.

    Attributes:
        epoch: Number of the epoch.
        seed: Seed of the loader.
        done: Intervals of positions in the source whose samples were all handed out, dropped or failed.
        partly_done: Position of each item of which only some samples are done, with the offsets of those
            samples.
        snapshot: State of a stateful source at or before the first position that is not done.
        source_length: Number of items of an epoch, if the source knows it.
        order: Values on which the source's order depends besides the epoch, if the source tells.
        before: Intervals of places in the order of all ranks that were done before the number of ranks
            changed. Positions in ``done`` then count only the items that were left.
        partly_before: Place of each item that was then partly done, with the offsets of those samples. No
            rank may have the item now, if what was left could not be divided evenly.
    """

    epoch: int
    seed: int
    done: Pairs = ()
    partly_done: tuple[tuple[int, Pairs], ...] = ()
    snapshot: Snapshot | None = None
    source_length: int | None = None
    order: Mapping[str, Any] | None = None
    before: Pairs = ()
    partly_before: tuple[tuple[int, Pairs], ...] = ()

    @property
    def is_fresh(self) -> bool:
        """Whether no part of the epoch is done."""
        return not (self.done or self.partly_done or self.before or self.partly_before)

    def to_dict(self) -> dict[str, Any]:
        """Return the state as a dictionary of JSON types, with the source's own state unchanged."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        # Lists, because JSON has no tuples: the state stays equal through a JSON file.
        values |= {name: _as(list, values[name]) for name in _INTERVALS}
        snapshot: Snapshot | None = values.pop("snapshot")
        return {**values, "version": VERSION, "source": snapshot and snapshot._asdict()}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> State:
        """Restore a state from the dictionary that :meth:`to_dict` returned.

        Raises:
            TypeError: ``state`` is not a mapping.
            ValueError: ``state`` is not that of a DataLoader, or is of an unknown version.
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
            values = {"snapshot": None, **state}
            if state["source"] is not None:
                values["snapshot"] = Snapshot(**state["source"])
            values |= {name: _as(tuple, state[name]) for name in _INTERVALS}
            return cls(**{one.name: values[one.name] for one in fields(cls)})
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"the state is incomplete or damaged ({type(error).__name__}: {error}); {remedy}"
            ) from error


def _as(kind: type[list[Any] | tuple[Any, ...]], items: Any) -> Any:
    """Return nested lists or tuples as lists or as tuples."""
    return kind(_as(kind, item) if isinstance(item, list | tuple) else item for item in items)


def loaded_state(
    given: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    own: State,
    source: object,
    length_in: Callable[[int], int | None],
) -> State:
    """Restore the state from a loader's ``state_dict()``, or from those of all ranks.

    Args:
        given: One state, or the states of all ranks.
        own: The loader's state at the start of an epoch.
        source: The loader's source.
        length_in: Returns the source's number of items in an epoch.

    Raises:
        TypeError: A state is not a mapping, or the source cannot be redistributed to other ranks.
        ValueError: A state is invalid, or that of another source.
    """
    if isinstance(given, Sequence):
        return _regrouped([State.from_dict(one) for one in given], own, source)
    state = State.from_dict(given)
    # Without these checks, the state of another source would silently skip items.
    remedy = "rank and world size that it had, or load the states of all ranks"
    length = own.source_length
    if state.source_length != length and isinstance(source, HasEpochs):
        # The length may depend on the epoch. Before an epoch begins, the state has that of the last one.
        length = state.source_length if state.is_fresh else length_in(state.epoch)
    if state.source_length != length:
        raise ValueError(
            f"the state is that of a source of {state.source_length} items, and this one has "
            f"{length}; make the loader with the source, {remedy}"
        )
    if state.order != own.order:
        raise ValueError(
            f"the state is that of a source in the order of {state.order}, and this one has {own.order}; "
            f"make the loader with the sampler, its seed, {remedy}"
        )
    if state.snapshot is not None and not isinstance(source, Stateful):
        raise ValueError(
            f"the state holds that of a source with load_state_dict(), which {type(source).__name__} lacks"
        )
    sampler = sampler_of(source)
    # By the module, because the attribute may stand for something else.
    method = getattr(type(sampler), "__iter__", None) if hasattr(sampler, "generator") else None
    draws = str(getattr(method, "__module__", "")).startswith(("torch.", "torchdata."))
    if draws and not state.is_fresh and not isinstance(sampler, HasEpochs | Stateful):
        warn_caller(
            f"{type(sampler).__name__} draws its order from a generator, which the state does not hold: if "
            "it gives another order now, some samples repeat and others are missing; use "
            "DistributedRandomSampler",
            UserWarning,
        )
    return state


def _regrouped(states: Sequence[State], own: State, source: object) -> State:
    """Merge the states of all ranks to one from which this rank starts its share of what is left."""
    sampler = sampler_of(source)
    if not hasattr(sampler, "places_of_rank"):
        raise TypeError(
            "states of several ranks need a sampler of spdl_media.source, a MapIterator over one, "
            f"ImageFolder or Shards, which split the rest again; {type(source).__name__} cannot. Load the "
            "state of each rank there, and change the number of ranks between two epochs"
        )
    # An empty sequence is refused, because the states of all ranks are missing.
    epoch = min((state.epoch for state in states), default=0)
    current = [state for state in states if state.epoch == epoch]
    places = _places_of(states, current, epoch, own)
    # Indexed by place in the order of all ranks, which does not depend on the number of ranks.
    is_done = np.zeros(sampler.num_draws, bool)
    for start, stop in current[0].before:
        is_done[start:stop] = True
    # Replaced below where a rank had the item since.
    partly = dict(current[0].partly_before)
    for (rank, world_size), state in zip(places, states, strict=True):
        old = sampler.of_rank(rank, world_size)
        if state.source_length != len(old):
            raise ValueError(
                f"rank {rank} of {world_size} had {state.source_length} items, and would have {len(old)} of "
                "this source; make it of the same data"
            )
        # Modulo, because padding repeats the first places.
        had = old.places_of_rank(current[0].before) % sampler.num_draws
        for start, stop in state.done if state.epoch == epoch else ((0, len(had)),):
            is_done[had[start:stop]] = True
        partly |= {int(had[position]): offsets for position, offsets in state.partly_done}
    # Even entries begin an interval of done places, odd entries end it.
    bounds = np.flatnonzero(np.diff(is_done, prepend=False, append=False)).tolist()
    before = tuple(zip(bounds[::2], bounds[1::2], strict=True))
    mine = sampler.places_of_rank(before) % sampler.num_draws
    # Converted to a list only if needed: it may have millions of numbers.
    places_left = enumerate(mine.tolist() if partly else ())
    return replace(
        own,
        epoch=epoch,
        seed=current[0].seed,
        before=before,
        partly_done=tuple((at, partly[place]) for at, place in places_left if place in partly),
        partly_before=tuple(sorted(partly.items())),
    )


def _places_of(states: Sequence[State], current: Sequence[State], epoch: int, own: State) -> Any:
    """Return rank and world size of each state.

    Raises:
        ValueError: The states are not those of all ranks, of one sampler and one moment.
    """
    # The state of a rank that has finished the epoch is at the start of the next one.
    ended = [state for state in states if (state.epoch, state.is_fresh) == (epoch + 1, True)]
    orders = [{**(state.order or {}), **dict.fromkeys(PLACE)} for state in states]
    # Only rank and world size may differ among the states.
    places = [[(state.order or {}).get(name) for name in PLACE[:2]] for state in states]
    if (
        len(current) + len(ended) != len(states)
        # Not sorted: a state of a source without ranks has None here.
        or any([rank, len(states)] not in places for rank in range(len(states)))
        or any(order != {**(own.order or {}), **dict.fromkeys(PLACE)} for order in orders)
        or len({(state.seed, state.before) for state in current}) != 1
    ):
        raise ValueError(
            "pass one state of each former rank, all saved after the same batch, of the same sampler and "
            f"seed as this loader's, {own.order}. These are of epochs "
            f"{[one.epoch for one in states]}, seeds {[one.seed for one in states]} and orders "
            f"{[one.order for one in states]}"
        )
    return places


class Positions:
    """A set of whole numbers: all below ``leading``, and a few larger ones."""

    __slots__ = ("_beyond", "leading")

    def __init__(self, pairs: Pairs = ()) -> None:
        self.leading = 0
        self._beyond: set[int] = set()
        # Pairs are in order, so only the first interval can begin at 0.
        for start, stop in pairs:
            if start == self.leading:
                self.leading = stop
            else:
                self._beyond.update(range(start, stop))

    def __contains__(self, number: int) -> bool:
        return number < self.leading or number in self._beyond

    def add(self, number: int) -> None:
        """Add a number, unless the set has it already."""
        if number >= self.leading:
            self._beyond.add(number)
        while self.leading in self._beyond:
            self._beyond.remove(self.leading)
            self.leading += 1

    def pairs(self) -> Pairs:
        """Return the numbers as half-open intervals, in order."""
        intervals = [[0, self.leading]] if self.leading else []
        for number in sorted(self._beyond):
            if intervals and intervals[-1][1] == number:
                intervals[-1][1] += 1
            else:
                intervals.append([number, number + 1])
        return tuple((start, stop) for start, stop in intervals)


class Ledger:
    """Tracks the samples of one epoch that are done: handed out, dropped, or failed.

    An item that is still being processed is not done, so a resumed loader processes it again.

    Attributes:
        start: The state in which the iteration began.
        is_closed: Whether the consumer has stopped, so that later results do not count.
        has_delivered: Whether the consumer has a batch.
        source_length: Number of items of the epoch, if the source knows it.

    Thread safety: safe.
    """

    def __init__(self, start: State) -> None:
        self.start, self.source_length = start, start.source_length
        # Reentrant, because a signal handler may ask for the state while this thread settles a batch.
        self._lock = threading.RLock()
        self._done = Positions(start.done)
        self._offsets = {position: Positions(pairs) for position, pairs in start.partly_done}
        # Number of samples of each item that has given all its samples, while not all of them are done.
        self._counts: dict[int, int] = {}
        # A snapshot is needed until all items before the next snapshot's position are done.
        self._snapshots = deque([start.snapshot] if start.snapshot else [])
        self.is_closed = self.has_delivered = False

    def settle(self, tags: Iterable[Tag]) -> None:
        """Mark samples as done: handed out, dropped, or failed."""
        with self._lock:
            # A worker thread may finish a call after the consumer has stopped.
            for position, offset in tags if not self.is_closed else ():
                if offset is None:
                    self._done.add(position)
                else:
                    self._offsets.setdefault(position, Positions()).add(offset)
                    self._finish_if_complete(position)

    def count_samples(self, position: int, count: int) -> None:
        """Set the number of samples of an item that has given all of them."""
        with self._lock:
            if not self.is_closed:
                self._counts[position] = count
                self._finish_if_complete(position)

    def keep_snapshot(self, snapshot: Snapshot) -> None:
        """Keep a state of the source for as long as a resumed loader may need it."""
        with self._lock:
            self._snapshots.append(snapshot)
            self._drop_snapshots()

    def close(self) -> None:
        """Ignore all later calls, because the consumer has stopped and gets no more samples."""
        # Without the lock: the garbage collector may call this while this thread holds it.
        self.is_closed = True

    def state(self) -> State:
        """Return the current state of the epoch."""
        with self._lock:
            self._drop_snapshots()
            first = self._snapshots[0] if self._snapshots else None
            return replace(
                self.start,
                source_length=self.source_length,
                done=self._done.pairs(),
                partly_done=tuple((at, self._offsets[at].pairs()) for at in sorted(self._offsets)),
                # From a later snapshot, items before it that are not done would be lost.
                snapshot=first if first and first.position <= self._done.leading else None,
            )

    def _finish_if_complete(self, position: int) -> None:
        offsets = self._offsets.get(position)
        # Complete when the samples 0 to count - 1 are all done, in whatever order.
        if self._counts.get(position) == (0 if offsets is None else offsets.leading):
            # Replace the offsets by the position, so that the ledger stays small.
            self._offsets.pop(position, None)
            del self._counts[position]
            self._done.add(position)

    def _drop_snapshots(self) -> None:
        # Keep the last snapshot at or before the first item that is not done, and all later ones.
        while len(self._snapshots) > 1 and self._snapshots[1].position <= self._done.leading:
            self._snapshots.popleft()
