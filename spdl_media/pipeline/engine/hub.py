"""Where threads and the event loop meet."""

from __future__ import annotations

import asyncio
import traceback
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from spdl_media.pipeline.errors import describe

__all__ = ("Hub", "RunEvents")


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
