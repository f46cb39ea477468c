"""Stages that make one result of several items."""

from __future__ import annotations

import copy
from typing import Any

from spdl_media.pipeline.engine.calls import CallSpec, ThreadCalls
from spdl_media.pipeline.engine.failing import FailureDesk
from spdl_media.pipeline.engine.hub import Hub
from spdl_media.pipeline.engine.node import Node
from spdl_media.pipeline.engine.workers import Threads
from spdl_media.pipeline.errors import PipelineError, describe
from spdl_media.pipeline.stages import Aggregator

__all__ = ("Aggregate", "CustomAggregate")


class Aggregate(Node):
    """Makes lists of a number of items. On the loop, for it costs less than any hand-off would.

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

    def _complete(self) -> None:
        self.held += 1
        self.counters.calls += 1
        self.out.append(self._group)
        self._group = []
        self.hub.touch(self)


class _Flush:
    """Stands in for an item when what is left over is asked for."""

    def __repr__(self) -> str:
        return "<no item: flush() at the end>"


FLUSH: Any = _Flush()


def _copied(aggregator: Aggregator, name: str) -> Aggregator:
    try:
        return copy.deepcopy(aggregator)
    except Exception as error:  # whatever the caller's __deepcopy__ or __reduce__ raises
        raise PipelineError(
            f"The aggregator of stage {name!r} cannot be copied, and each run works on a copy of its own: "
            f"{describe(error)}. Give it a method __deepcopy__(memo) that returns a new one"
        ) from error


class CustomAggregate(ThreadCalls):
    """Groups as an object of the caller's wants them. One thread at a time works on a copy of it."""

    def __init__(
        self,
        hub: Hub,
        name: str,
        aggregator: Aggregator,
        *,
        drop_last: bool,
        slack: int,
        desk: FailureDesk,
        threads: Threads,
    ) -> None:
        own = _copied(aggregator, name)

        def call(item: Any) -> Any:
            return own.flush() if item is FLUSH else own.accumulate(item)

        spec = CallSpec(call, name, slack=slack, ordered=True)
        super().__init__(hub, spec, desk, threads)
        self._drop_last = drop_last
        self._flushed = False

    def room(self) -> int:
        """How many items fit; 0 while a group waits for the next stage."""
        return 0 if self.out else super().room()

    def is_drained(self) -> bool:
        """Have what is left over made into a group, once an epoch."""
        if not self._flushed:
            self._flushed = True
            self.accept(FLUSH)
            self.dispatch()
            return False
        self._flushed = False
        return True

    def _leave(self, slot: Any) -> None:
        if slot.item is FLUSH and self._drop_last:
            slot.result = None
        super()._leave(slot)
