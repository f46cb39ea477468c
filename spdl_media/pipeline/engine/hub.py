"""The event loop's side of a run: the hub, and what all nodes have in common."""

from __future__ import annotations

import asyncio
import traceback
from collections import deque
from collections.abc import Callable, Coroutine
from time import perf_counter
from typing import Any, Protocol

from spdl_media.pipeline.failures import FailureRecord, describe, record_failure
from spdl_media.pipeline.stats import StageCounters

__all__ = (
    "Hub",
    "Inlet",
    "Node",
    "RunEvents",
    "Slot",
    "Upstream",
)


class _Advancing(Protocol):
    """A node, as far as the hub knows it."""

    touched: bool

    def advance(self) -> None:
        """Do all that can be done now."""


class RunEvents(Protocol):
    """What nodes tell the run that they belong to. On the loop only."""

    def fail(self, stage: str, message: str, error: BaseException, traceback: str = "") -> None:
        """End the run, and tell the consumer of ``error``, with its ``traceback`` where it lost its own."""

    def source_failed(self, error: BaseException) -> None:
        """End the run when what the source gave before it failed has been delivered."""

    def epoch_ended(self) -> None:
        """All items of an epoch have been delivered."""


class Hub:
    """Takes messages from any thread to the event loop, and lets the nodes that they concern advance.

    A turn of the loop delivers all messages that have come, then advances the nodes that were
    touched until none is left. Waking the loop costs a system call and a switch of threads, more
    than all else that is done for an item, so a turn is asked for once and not by each message.

    Args:
        loop: The event loop of the run.
        events: The run.

    Attributes:
        closed: The run is over. Threads look at it before each item.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, events: RunEvents) -> None:
        self.loop = loop
        self.events = events
        self.closed = False
        self._messages: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._rung = False
        self._touched: deque[_Advancing] = deque()
        self._in_turn = False
        self._tasks: set[asyncio.Task[None]] = set()

    def post(self, handler: Callable[[Any], None], argument: Any) -> None:
        """Have ``handler(argument)`` called on the loop, soon. From any thread."""
        self._messages.append((handler, argument))
        # Two threads may both see it unset: the second turn then finds nothing to do.
        if not self._rung:
            self._rung = True
            self._ring()

    def touch(self, node: _Advancing) -> None:
        """Have ``node`` advance in this turn. On the loop only."""
        if node.touched:
            return
        node.touched = True
        self._touched.append(node)
        if not self._in_turn:
            self._in_turn = True
            self.loop.call_soon(self._advance)

    def spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        """Run a task of the pipeline's own. It handles the errors of the caller's code itself."""
        task = self.loop.create_task(coroutine, name=name)
        # The loop itself keeps tasks by weak references alone.
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    def abandon(self) -> None:
        """In a forked child, where no loop runs: never wake the parent's."""
        self.closed = True
        self._rung = True

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        # Looked at in any case, or asyncio would print it.
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.closed:
            self._blame_ourselves(error)

    def _ring(self) -> None:
        try:
            self.loop.call_soon_threadsafe(self._turn)
        except RuntimeError:
            # The loop has been closed: this thread was left behind in a blocking call.
            self._messages.clear()

    def _turn(self) -> None:
        # First, so that a message that comes from now on asks for a turn of its own.
        self._rung = False
        self._in_turn = True
        messages = self._messages
        try:
            for _ in range(len(messages)):
                handler, argument = messages.popleft()
                handler(argument)
        except Exception as error:  # noqa: BLE001  # see _blame_ourselves
            self._blame_ourselves(error)
        self._advance()

    def _advance(self) -> None:
        touched = self._touched
        try:
            while touched:
                node = touched.popleft()
                node.touched = False
                if not self.closed:
                    node.advance()
        except Exception as error:  # noqa: BLE001  # see _blame_ourselves
            self._blame_ourselves(error)
        self._in_turn = False

    def _blame_ourselves(self, error: BaseException) -> None:
        # No code of the caller's runs here. asyncio would log the error and go on without the items
        # concerned, and the consumer would wait for them for ever.
        text = "".join(traceback.format_exception(error))
        message = f"The pipeline itself failed ({describe(error)}). Please report this"
        self.events.fail("pipeline", message, error, text)


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
