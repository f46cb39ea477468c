"""The event loop's side of a run: the hub, and what all nodes of a chain have in common."""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

from spdl_media.pipeline.failures import FailureRecord, describe, record_failure
from spdl_media.pipeline.stats import StageCounters

if TYPE_CHECKING:
    from spdl_media.pipeline.engine.run import Run

__all__ = ("Hub", "Inlet", "Node", "Pace", "Slot", "new_loop", "wake")


# Items that pass at more than one in so many seconds are quick ones. A turn for each takes some 7 us more
# than turns for many. What passes so quickly is not big: 64 such items are some megabytes.
QUICK_SECONDS = 500e-6
# How many in a row are looked at: as many as may be on their way because of it.
QUICK_ITEMS = 64
# For how long they count as quick afterwards: the machine may be busy with others for a moment, but big
# items must not pass for quick ones until so many of them have been made.
QUICK_FOR_SECONDS = 0.05


class Pace:
    """Sees how quickly items pass at one end of the chain, and tells the hub.

    At both ends, because a source may give groups of items, and the sink get groups of them.
    """

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._seen = 0
        self._looked_at = perf_counter()

    def look(self, total: int, now: float) -> None:
        """Hear how many items have passed in all by ``now``."""
        number = total - self._seen
        if number >= QUICK_ITEMS:
            if now - self._looked_at <= number * QUICK_SECONDS:
                self._hub.quick_until = now + QUICK_FOR_SECONDS
            self._looked_at = now
            self._seen = total
        self._hub.is_quick = now < self._hub.quick_until


class Hub:
    """Takes messages from any thread, delivers them one at a time, and lets the nodes concerned advance.

    A turn delivers all messages that have come, then advances the touched nodes until none is left.
    One thread at a time takes a turn: a thread of the engine's that has a message takes it at once, as
    waking the loop costs a system call and two switches of threads, more than all else that is done for an
    item. Only when it comes from elsewhere, the loop does. Nodes are touched within turns alone.

    Args:
        loop: The event loop of the run.
        events: The run.

    Attributes:
        turn: Held by the thread that takes a turn.
        taker: The identifier of that thread.
        loop_thread: That of the loop's, once it runs.
        closed: The run is over. Threads read it before each item.
        is_quick: Items pass so quickly that a turn for each would cost more than the items do.
            Only then may nodes hold more than their concurrency: what takes long may also be big.
        quick_until: They count as quick until then, unless more of them pass quickly.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, events: Run) -> None:
        self.loop = loop
        self.events = events
        self.closed = False
        self.is_quick = False
        self.quick_until = 0.0
        self.turn = threading.Lock()
        self.taker: int | None = None
        self.loop_thread: int | None = None
        self._messages: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._turn_is_due = False
        self._touched: deque[Node] = deque()
        self._for_loop: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._loop_is_due = False

    def post(self, handler: Callable[[Any], None], argument: Any) -> None:
        """Have ``handler(argument)`` called in a turn, soon. From any thread."""
        self._messages.append((handler, argument))
        # Who takes one looks for more messages after it.
        if not self.turn.locked():
            self._ask_loop()

    def deliver(self, handler: Callable[[Any], None], argument: Any) -> None:
        """Have ``handler(argument)`` called in a turn, by this thread unless another one takes turns.

        For threads of the engine's: in others a Ctrl-C may come.
        """
        if self.is_quick or self.closed:
            # The loop serves many messages in a turn, which costs less than a turn for each.
            self.post(handler, argument)
        else:
            self._messages.append((handler, argument))
            self._take_turns()

    def post_to_loop(self, handler: Callable[[Any], None], argument: Any) -> None:
        """Have ``handler(argument)`` called on the loop, outside of turns. From any thread."""
        self._for_loop.append((handler, argument))
        if not self._loop_is_due:
            self._loop_is_due = True
            self._call_soon(self._serve_loop)

    def touch(self, node: Node) -> None:
        """Have ``node`` advance in this turn."""
        # Once in a turn is enough: it does all that it can.
        if not node.touched:
            node.touched = True
            self._touched.append(node)

    def spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        """Run a task of the engine. It handles the errors of the user's code itself."""
        # The loop keeps tasks by weak references alone. Runners keep those that call, and what idle ones
        # wait for.
        self.loop.create_task(coroutine, name=name).add_done_callback(self._hear_of_end)

    def abandon(self) -> None:
        """Close the hub of a forked child, which has no loop and must not wake the parent's."""
        self.closed = True
        self._turn_is_due = self._loop_is_due = True

    def let_go(self) -> None:
        """Forget all messages, once the loop has been closed."""
        self._messages.clear()
        self._for_loop.clear()
        # So that the next message comes here, too.
        self._turn_is_due = self._loop_is_due = False

    def _hear_of_end(self, task: asyncio.Task[None]) -> None:
        # Retrieved in any case, or asyncio would print it.
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.closed:
            self.post(self._report_defect, error)

    def _ask_loop(self) -> None:
        # Two threads may both see it unset: the second turn then finds nothing to do.
        if not self._turn_is_due:
            self._turn_is_due = True
            self._call_soon(self._take_due_turn)

    def _call_soon(self, call: Callable[[], None]) -> None:
        try:
            if threading.get_ident() == self.loop_thread:
                self.loop.call_soon(call)
            else:
                self.loop.call_soon_threadsafe(call)
        except RuntimeError:
            # The loop has been closed: this thread was left behind in a blocking call.
            self.let_go()

    def _serve_loop(self) -> None:
        # First, so that what comes from now on asks for a call of its own.
        self._loop_is_due = False
        waiting = self._for_loop
        for _ in range(len(waiting)):
            handler, argument = waiting.popleft()
            handler(argument)

    def _take_due_turn(self) -> None:
        # First, so that a message that comes from now on asks for a turn of its own.
        self._turn_is_due = False
        self._take_turns()

    def _take_turns(self) -> None:
        # Who finds it taken has put a message there before, for which its taker looks afterwards.
        while self._messages and self.turn.acquire(blocking=False):
            self.taker = threading.get_ident()
            try:
                self._take_turn()
            finally:
                self.taker = None
                self.turn.release()
            if self.is_quick and self._messages:
                # The threads have items to make, and the loop has tasks to run between turns.
                self._ask_loop()
                return

    def _take_turn(self) -> None:
        messages = self._messages
        try:
            # Only those that are there now: a quick thread must not keep the nodes from advancing.
            for _ in range(len(messages)):
                handler, argument = messages.popleft()
                handler(argument)
        except Exception as error:  # noqa: BLE001  # see _report_defect
            self._report_defect(error)
        touched = self._touched
        try:
            while touched:
                node = touched.popleft()
                node.touched = False
                # Messages may have ended the run.
                if not self.closed:
                    node.advance()
        except Exception as error:  # noqa: BLE001  # see _report_defect
            self._report_defect(error)

    def _report_defect(self, error: BaseException) -> None:
        # No code of the user's runs here. asyncio would log the error and go on without the items
        # concerned, and the consumer would wait for them for ever.
        text = "".join(traceback.format_exception(error))
        message = f"The pipeline itself failed ({describe(error)}). Please report this"
        self.events.fail("pipeline", message, error, text)


def wake(future: asyncio.Future[None]) -> None:
    """Let a task go on that awaits ``future``; nothing if it was woken or cancelled before."""
    if not future.done():
        future.set_result(None)


def new_loop() -> asyncio.AbstractEventLoop:
    """Make an event loop in a thread, where no Ctrl-C comes: a half-made one fails when it is collected.

    Raises:
        OSError: The process may open no more files.
    """
    made: Future[asyncio.AbstractEventLoop] = Future()

    def make() -> None:
        try:
            made.set_result(asyncio.new_event_loop())
        except BaseException as error:  # noqa: BLE001  # raised below
            made.set_exception(error)

    thread = threading.Thread(target=make, name="spdl_media loop", daemon=True)
    try:
        thread.start()
        # Else it may take a signal that is blocked in this one.
        thread.join()
    except BaseException:
        # Nobody else will, and the garbage collector may find its sockets first.
        made.add_done_callback(lambda _: made.exception() or made.result().close())
        raise
    return made.result()


class Inlet(Protocol):
    """Where a node puts its results."""

    upstream: Any

    def room(self) -> int:
        """How many more items are accepted now."""

    def accept(self, item: Any) -> None:
        """Take an item for which there is room."""

    def end_epoch(self) -> None:
        """All items of this epoch have been accepted. No more come until room is asked for again."""


class Node(Inlet):
    """A place in the chain: accepts items, makes results of them, and hands those on. Used within turns.

    State: *flowing*, until the node before says that the epoch has ended; then *ending*, without
    room, until all that it holds has been handed on; then it says the same to the next node and is
    flowing again. So no item overtakes the end of its epoch.

    Attributes:
        held: How many items or results are in it.
        capacity: How many may be.
        slack: How many more may be while items pass quickly.
        out: The results that wait for the next node.
        next: The next node, of several the last.
        upstream: The node before, which is told when there is room again.
    """

    def __init__(self, hub: Hub, name: str, concurrency: int = 1) -> None:
        self.hub = hub
        self.name = name
        self.touched = False
        self.ending = False
        self.held = 0
        self.capacity = concurrency
        self.slack = 0
        self.out: deque[Any] = deque()
        self.counters = StageCounters(concurrency)
        self.outlets: list[Inlet] = []
        self.next: Inlet
        self.upstream: Any

    def connect(self, inlet: Inlet) -> None:
        """Link the next node."""
        self.outlets.append(inlet)
        self.next = inlet
        inlet.upstream = self

    def room(self) -> int:
        """How many more items fit, none or fewer while the epoch is ending."""
        if self.ending:
            return 0
        return self.capacity - self.held + (self.slack if self.hub.is_quick else 0)

    def end_epoch(self) -> None:
        """No more items come in this epoch."""
        self.ending = True
        self.hub.touch(self)

    def advance(self) -> None:
        """Do all that can be done now."""
        self.hand_on()
        self.dispatch()
        if (
            self.ending
            and not self.held
            and all(inlet.room() > 0 for inlet in self.outlets)
            and self.is_drained()
        ):
            self.ending = False
            for inlet in self.outlets:
                inlet.end_epoch()
        # The node before may wait with results that it could not hand on.
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
        """Start work on the items that were accepted."""

    def running_seconds(self, now: float) -> float:  # noqa: ARG002  # calls are made by stages alone
        """For how long the calls have run, all together, that have not ended. From any thread."""
        return 0.0

    def let_go(self) -> None:
        """Forget all items. The run is over, and they would stay until a garbage collection comes."""
        for held in vars(self).values():
            if isinstance(held, deque | dict):
                held.clear()

    def note_failure(self, slot: Slot, error: BaseException, where: str = "") -> None:
        """Note that an item failed. ``where`` stands before the traceback of an error that was not raised."""
        slot.record = record_failure(self.name, slot.item, error, where)
        slot.error = error

    def fail_early(self, item: Any, error: BaseException) -> None:
        """Count and report an item as failed by a call that goes on, or one yet to come. From any thread."""
        slot = Slot(self, item)
        self.note_failure(slot, error)
        self.hub.post(self._count_early, slot)

    def end_early(self) -> None:
        """Say that the call of such an item is about to end. From any thread."""
        self.hub.post(self._forget_early, None)

    def _count_early(self, slot: Slot) -> None:
        # Until it has been reported, so that the epoch does not end before.
        self.held += 1
        self.counters.early += 1
        self.hub.events.item_failed(slot, self._end_report)

    def _end_report(self, _: Slot) -> None:
        self.held -= 1
        self.hub.touch(self)

    def _forget_early(self, _: None) -> None:
        self.counters.early -= 1

    def is_drained(self) -> bool:
        """Whether an epoch may end now that nothing is held. Makes what is due at the end."""
        return True


class Slot:
    """An item on its way through a stage, with its result or error.

    Attributes:
        released: The engine has heard of the outcome, and its failure, if any, has been reported.
        queued_at, started_at, ended_at: Times of ``time.perf_counter``.
    """

    __slots__ = (
        *("ended_at", "error", "item", "queued_at", "record", "released"),
        *("result", "stage", "started_at"),
    )

    def __init__(self, stage: Node, item: Any) -> None:
        self.stage = stage
        self.item = item
        self.result: Any = None
        self.error: BaseException | None = None
        self.record: FailureRecord | None = None
        self.released = False
        self.queued_at = perf_counter()
        self.started_at = 0.0
        self.ended_at = 0.0
