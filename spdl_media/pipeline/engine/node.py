"""What all nodes of a running pipeline have in common."""

from __future__ import annotations

from collections import deque
from time import perf_counter
from typing import Any, Protocol

from spdl_media.pipeline.engine.hub import Hub
from spdl_media.pipeline.failures import FailureRecord, record_failure
from spdl_media.pipeline.stats import StageCounters

__all__ = ("Inlet", "Node", "Slot", "Upstream")


class Inlet(Protocol):
    """Where a node puts what it has made."""

    def room(self) -> int:
        """How many more items are accepted now."""

    def accept(self, item: Any) -> None:
        """Take an item for which there is room."""

    def end_epoch(self) -> None:
        """All items of this epoch have been accepted. No more come until room is asked for again."""


class Upstream(Protocol):
    """Where items come from: is told when there is room again."""

    def retry(self) -> None:
        """Hand on what was refused for lack of room, if anything was."""


class Node:
    """A place in the chain: accepts items, makes results of them, and hands those on.

    State: *flowing*, until the node before says that the epoch has ended; then *ending*, in which it
    has no room, until all that it holds has been handed on; then it says the same to the next node and
    is flowing again. So no item overtakes the end of its epoch.
    """

    def __init__(self, hub: Hub, name: str, concurrency: int = 1) -> None:
        self.hub = hub
        self.name = name
        self.touched = False
        self.ending = False
        self.held = 0
        self.capacity = 1
        self.out: deque[Any] = deque()
        self.counters = StageCounters(concurrency)
        self.next: Inlet
        self.upstream: Upstream

    def start(self) -> None:
        """Called on the loop before the first item."""

    def room(self) -> int:
        """How many more items fit, 0 while the epoch is ending."""
        return 0 if self.ending else self.capacity - self.held

    def accept(self, item: Any) -> None:
        """Take an item for which there is room."""
        raise NotImplementedError

    def end_epoch(self) -> None:
        """No more items come in this epoch."""
        self.ending = True
        self.hub.touch(self)

    def advance(self) -> None:
        """Do all that can be done now."""
        self.hand_on()
        self.dispatch()
        if self.ending and not self.held and self.next.room() > 0 and self.is_drained():
            self.ending = False
            self.next.end_epoch()
        if self.room() > 0:
            self.upstream.retry()

    def retry(self) -> None:
        """Hand on what was refused for lack of room, if anything was."""
        if self.out or self.ending:
            self.hub.touch(self)

    def hand_on(self) -> None:
        """Give results to the next node, as many as it has room for."""
        out = self.out
        # Until there is no room: who is asked for it in vain remembers to say when there is some.
        while out and (count := min(self.next.room(), len(out))) > 0:
            accept, popleft = self.next.accept, out.popleft
            for _ in range(count):
                accept(popleft())
            self.held -= count
            self.counters.outputs += count

    def dispatch(self) -> None:
        """Set those to work who make results of what was accepted."""

    def is_drained(self) -> bool:
        """Whether an epoch may end now that nothing is held. Makes what is due at the end."""
        return True


class Slot:
    """An item on its way through a stage, and what became of it."""

    __slots__ = (
        "ended_at",
        "error",
        "item",
        "queued_at",
        "record",
        "result",
        "settled",
        "stage",
        "started_at",
    )

    def __init__(self, stage: Node, item: Any) -> None:
        self.stage = stage
        self.item = item
        self.result: Any = None
        self.error: BaseException | None = None
        self.record: FailureRecord | None = None
        self.settled = False
        self.queued_at = perf_counter()
        self.started_at = 0.0
        self.ended_at = 0.0

    def fail(self, error: BaseException, where: str = "") -> None:
        """Note that the item failed. ``where`` replaces the traceback, for an error that was not raised."""
        self.record = record_failure(self.stage.name, self.item, error, where)
        self.error = error
