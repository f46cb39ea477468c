"""Nodes that build groups of items, and nodes at which the chain splits."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any, SupportsIndex

from spdl_media.pipeline.engine.hub import Hub, Node, Slot
from spdl_media.pipeline.engine.nodes import Stage
from spdl_media.pipeline.engine.workers import WorkerThreads
from spdl_media.pipeline.failures import PipelineError, describe, short_repr
from spdl_media.pipeline.stages import Aggregator


class Aggregate(Node):
    """Groups items into lists of ``size``. It works in turns, which is cheaper than waking a thread.

    It has room for one group, complete or not.
    """

    def __init__(self, hub: Hub, name: str, size: int, *, drop_last: bool) -> None:
        super().__init__(hub, name)
        self._size = size
        self._drop_last = drop_last
        self._group: list[Any] = []

    def room(self) -> int:
        """Return how many items the group lacks; 0 while a complete group waits for the next stage."""
        return 0 if self.ending or self.out else self._size - len(self._group)

    def accept(self, item: Any) -> None:
        """Add an item to the group."""
        self._group.append(item)
        if len(self._group) == self._size:
            self._complete()

    def is_drained(self) -> bool:
        """Complete or drop the last group. Return whether the epoch may end."""
        if self._group and self._drop_last:
            self.counters.dropped += len(self._group)
            self._group = []
        elif self._group:
            self._complete()
        return not self.out

    def let_go(self) -> None:
        """Drop the items, including those of the incomplete group."""
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
    """The pseudo-item for which an aggregator's ``flush`` is called at the end of an epoch."""

    def __repr__(self) -> str:
        return "<no item: flush() at the end>"


FLUSH: Any = _Flush()


class CustomAggregate(Stage):
    """Groups items by a copy of the user's aggregator, which one thread at a time calls."""

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
            # An aggregator has state, and one definition may be run many times.
            own = copy.deepcopy(aggregator)
        except Exception as error:  # the user's __deepcopy__ or __reduce__ may raise anything
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
        """Return how many more items fit; 0 while a group waits for the next stage."""
        return 0 if self.out else super().room()

    def is_drained(self) -> bool:
        """Have the aggregator flushed once per epoch. Return whether that is done."""
        # Called twice per epoch: first to start the flush, then again when the flush has returned.
        self._flushed = not self._flushed
        if self._flushed:
            self.accept(FLUSH)
            self.dispatch()
        return not self._flushed

    def leave(self, slot: Slot) -> None:
        """Pass a group on, unless it is incomplete and ``drop_last`` is set."""
        # No group yet, or no more: the item is kept, not dropped.
        if slot.record is None and slot.result is None:
            self.held -= 1
            return
        if slot.item is FLUSH and self._drop_last:
            slot.result = None
        super().leave(slot)


class Switch(Stage):
    """Calls the router for each item, in a thread, and passes the item to the path with that index.

    While the path of the first item has no room, all items behind it wait.
    """

    def hand_on(self) -> None:
        """Pass items to their paths, until an item has to wait."""
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


def routed(
    router: Callable[[Any], SupportsIndex], num_paths: int
) -> Callable[[Any], tuple[int, Any]]:
    """Return a function that maps an item to ``(index of its path, item)``.

    Raises:
        IndexError: Raised by the returned function, when the router returns no index of a path.
    """

    def call(item: Any) -> tuple[int, Any]:
        returned = router(item)
        try:
            index = operator.index(returned)  # also accepts NumPy integers
        except TypeError:
            # Refused below by an error that shows the returned value.
            index = -1
        if not 0 <= index < num_paths:
            raise IndexError(
                f"the router returned {short_repr(returned)}; it must return the index of one of the "
                f"{num_paths} paths, from 0 to {num_paths - 1}"
            )
        return index, item

    return call


class EmptyPath(Node):
    """A path without stages, which holds no items."""

    def room(self) -> int:
        """Return how many more items the next node accepts from this one."""
        return 0 if self.has_ended else self.next.room()

    def accept(self, item: Any) -> None:
        """Pass an item on."""
        self.next.accept(item)

    def end(self) -> None:
        """Report the end of the epoch."""
        self.next.end_epoch(self)

    def retry(self) -> None:
        """Have the router retry."""
        self.retry_before()

    def hand_on(self) -> None:
        """Have the router pass on its results at once."""
        for node in self.before:
            node.hand_on()
