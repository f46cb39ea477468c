"""Groups of items, made and handed on; where the chain splits into paths, and where these meet."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from time import perf_counter
from typing import Any, SupportsIndex

from spdl_media.pipeline.engine.hub import Hub, Inlet, Node, Slot
from spdl_media.pipeline.engine.nodes import FanOut, FanOutSlot, Stage
from spdl_media.pipeline.engine.workers import WorkerThreads
from spdl_media.pipeline.failures import PipelineError, describe, short_repr
from spdl_media.pipeline.stages import Aggregator

__all__ = ("Aggregate", "CustomAggregate", "Disaggregate", "Join", "Switch", "routed")


class Aggregate(Node):
    """Makes lists of a number of items. In turns, where it costs less than any hand-off would.

    It has room for one group, complete or not.
    """

    def __init__(self, hub: Hub, name: str, size: int, *, drop_last: bool) -> None:
        super().__init__(hub, name)
        self._size = size
        self._drop_last = drop_last
        self._group: list[Any] = []

    def room(self) -> int:
        """How many items the group lacks; 0 while a complete one waits for the next stage."""
        return 0 if self.ending or self.out else self._size - len(self._group)

    def accept(self, item: Any) -> None:
        """Add an item to the group."""
        self._group.append(item)
        if len(self._group) == self._size:
            self._complete()

    def is_drained(self) -> bool:
        """Complete the group that is left, or drop it."""
        if self._group and self._drop_last:
            self.counters.dropped += len(self._group)
            self._group = []
        elif self._group:
            self._complete()
        return not self.out

    def let_go(self) -> None:
        """Forget the group, too."""
        super().let_go()
        self._group = []

    def _complete(self) -> None:
        self.held += 1
        self.counters.calls += 1
        # The list itself is the item, so the next group gets a new one.
        self.out.append(self._group)
        self._group = []
        self.hub.touch(self)


class _Flush:
    """Stands in for an item when an aggregator is asked for what is left over."""

    def __repr__(self) -> str:
        return "<no item: flush() at the end>"


FLUSH: Any = _Flush()


class CustomAggregate(Stage):
    """Groups as an aggregator of the user's wants them. One thread at a time works on a copy of it."""

    def __init__(
        self,
        hub: Hub,
        aggregator: Aggregator,
        name: str,
        threads: WorkerThreads,
        *,
        drop_last: bool,
    ) -> None:
        try:
            # An aggregator has state, and one definition serves many runs.
            own = copy.deepcopy(aggregator)
        except Exception as error:  # whatever the user's __deepcopy__ or __reduce__ raises
            raise PipelineError(
                f"The aggregator of stage {name!r} cannot be copied, and each run works on a copy of "
                f"its own: {describe(error)}. Give it a method __deepcopy__(memo) that returns a new one"
            ) from error

        def call(item: Any) -> Any:
            return own.flush() if item is FLUSH else own.accumulate(item)

        super().__init__(hub, call, name, threads, ordered=True)
        self._drop_last = drop_last
        self._flushed = False

    def room(self) -> int:
        """How many items fit; 0 while a group waits for the next stage."""
        return 0 if self.out else super().room()

    def is_drained(self) -> bool:
        """Have what is left over made into a group, once an epoch."""
        # Asked twice in an epoch: to flush, and again when that call has come back.
        self._flushed = not self._flushed
        if self._flushed:
            self.accept(FLUSH)
            self.dispatch()
        return not self._flushed

    def leave(self, slot: Slot) -> None:
        """Hand a group on, unless it is the incomplete one and to be dropped."""
        if slot.item is FLUSH and self._drop_last:
            slot.result = None
        super().leave(slot)


class Disaggregate(FanOut):
    """Takes groups apart, one after the other.

    Lists and tuples in turns. Other iterables, and classes that derive from these, may run code
    of the user's when they are iterated, so threads do it.
    """

    def open(self, slot: FanOutSlot) -> None:
        """Take a group apart, or have a thread do it."""
        # The exact classes: those that derive from them may run any code when iterated.
        if type(slot.item) in (list, tuple):
            slot.opened_at = perf_counter()
            slot.values.extend(slot.item)
            self.settle(slot)
        else:
            super().open(slot)


class Switch(Stage):
    """Calls the router for each item, in a thread, and hands the item to the path that it names.

    The first item waits for room in its path, and those behind it with it.
    """

    def __init__(self, *args: Any, num_paths: int, **options: Any) -> None:
        super().__init__(*args, ordered=True, **options)
        self.num_sent = [0] * num_paths

    def hand_on(self) -> None:
        """Give items to their paths, until one of them has to wait."""
        out = self.out
        while out:
            index, item = out[0]
            path = self.outlets[index]
            if path.room() <= 0:
                return
            out.popleft()
            path.accept(item)
            self.held -= 1
            self.counters.outputs += 1
            self.num_sent[index] += 1


def routed(
    router: Callable[[Any], SupportsIndex], num_paths: int
) -> Callable[[Any], tuple[int, Any]]:
    """Make a function from an item to the index of an existing path and the item itself.

    Raises:
        IndexError: While it is called: the router names no path.
    """

    def call(item: Any) -> tuple[int, Any]:
        returned = router(item)
        try:
            index = operator.index(returned)  # of NumPy's integers, too
        except TypeError:
            # Refused below, with what was returned.
            index = -1
        if not 0 <= index < num_paths:
            raise IndexError(
                f"the router returned {short_repr(returned)}; it must return the index of one of the "
                f"{num_paths} paths, from 0 to {num_paths - 1}"
            )
        return index, item

    return call


class Join:
    """Hands on what comes in by several inlets, as it comes.

    An inlet whose epoch has ended has no room until the epochs of all of them have.
    """

    def __init__(self) -> None:
        self.next: Inlet
        self.inlets: list[_JoinInlet] = []

    def connect(self, inlet: Inlet) -> None:
        """Link the next node."""
        self.next = inlet
        inlet.upstream = self

    def add_inlet(self) -> Inlet:
        """One more way in."""
        self.inlets.append(inlet := _JoinInlet(self))
        return inlet

    def retry(self) -> None:
        """Let all inlets hand on; another goes first each time, so that none is left behind."""
        # Only their order changes: an inlet that has ended waits for the others.
        self.inlets.append(self.inlets.pop(0))
        for inlet in self.inlets:
            inlet.upstream.retry()

    def hand_on(self) -> None:
        """Let all inlets hand on at once."""
        for inlet in self.inlets:
            inlet.upstream.hand_on()

    def end_epoch_if_all_have(self) -> None:
        """End the epoch of what follows when no inlet is left in it."""
        if all(inlet.ended for inlet in self.inlets):
            for inlet in self.inlets:
                inlet.ended = False
            self.next.end_epoch()


class _JoinInlet:
    """One of the ways into a join."""

    def __init__(self, join: Join) -> None:
        self.upstream: Any
        self.ended = False
        self._join = join

    def room(self) -> int:
        return 0 if self.ended else self._join.next.room()

    def accept(self, item: Any) -> None:
        self._join.next.accept(item)

    def end_epoch(self) -> None:
        self.ended = True
        self._join.end_epoch_if_all_have()
