"""The hub, which passes messages and moves items in turns, and the base class of all nodes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import traceback
from collections import deque
from collections.abc import Callable, Coroutine
from time import perf_counter
from typing import TYPE_CHECKING, Any

from spdl_media.pipeline.failures import FailureRecord, describe, record_failure
from spdl_media.pipeline.stats import StageCounters

if TYPE_CHECKING:
    from spdl_media.pipeline.engine.run import Run
    from spdl_media.pipeline.engine.workers import WorkerThreads


# Items are quick if they pass at more than one per QUICK_SECONDS. A turn per item takes about 7 us more than
# a turn for many. Items that are made so quickly are not large: 64 of them are a few megabytes.
QUICK_SECONDS = 500e-6
# Number of items over which the pace is measured. It is also the slack: how many more items may be under way
# while items are quick.
QUICK_ITEMS = 64
# Seconds for which items then count as quick. The machine may be busy for a moment, but large items must not
# count as quick until 64 of them have been made.
QUICK_FOR_SECONDS = 0.05


class Pace:
    """Measures how quickly items pass one end of the chain, and reports it to the hub.

    It is used at both ends, because the source may give groups of items, or the sink may get groups.
    """

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._seen = 0
        self._looked_at = perf_counter()

    def look(self, total: int, now: float) -> None:
        """Update the pace: ``total`` items have passed by the time ``now``."""
        number = total - self._seen
        if number >= QUICK_ITEMS:
            if now - self._looked_at <= number * QUICK_SECONDS:
                self._hub.quick_until = now + QUICK_FOR_SECONDS
            self._looked_at = now
            self._seen = total
        self._hub.is_quick = now < self._hub.quick_until


class Hub:
    """Takes messages from any thread, delivers them one at a time, and advances the nodes that they touch.

    A turn delivers all messages that have arrived, then advances the touched nodes until none is left. One
    thread at a time takes a turn. An engine thread that has a message takes a turn at once: waking the loop
    costs a system call and two thread switches, more than all other work for an item. For messages of other
    threads, the loop takes the turn. Nodes are touched only within turns.

    Args:
        events: The run.

    Attributes:
        loop: The event loop of the run, which sets it.
        turn: Lock that is held by the thread that takes a turn.
        taker: Identifier of that thread.
        threads: All pools of threads of the run, which add themselves.
        loop_thread: Identifier of the loop's thread, once it runs.
        closed: Whether the run is over. Threads read it before each item.
        is_quick: Whether items pass so quickly that a turn per item would cost more than the items. Only then
            may nodes hold more items than their concurrency: items that take long may also be large.
        quick_until: Time until which items count as quick, unless further ones pass quickly.
    """

    loop: asyncio.AbstractEventLoop

    def __init__(self, events: Run) -> None:
        self.events = events
        self.closed = False
        self.is_quick = False
        self.quick_until = 0.0
        self.turn = threading.Lock()
        self.taker: int | None = None
        self.threads: list[WorkerThreads] = []
        self.loop_thread: int | None = None
        self._messages: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._for_loop: deque[tuple[Callable[[Any], object], Any]] = deque()
        self._touched: deque[Node] = deque()
        # Whether the loop is about to call _serve.
        self._loop_is_asked = False

    def post(self, handler: Callable[[Any], None], argument: Any) -> None:
        """Have ``handler(argument)`` called in a turn, soon. From any thread.

        Raises:
            KeyboardInterrupt: Ctrl-C in the user's thread. If the message was posted, it is delivered.
        """
        try:
            self._messages.append((handler, argument))
            # A thread that takes a turn looks for more messages after it.
            if not self.turn.locked():
                self._ask_loop()
        except BaseException:
            # A Ctrl-C in the user's thread, which may have come before the loop was asked.
            self._ask_loop()
            raise

    def deliver(self, handler: Callable[[Any], None], argument: Any) -> None:
        """Have ``handler(argument)`` called in a turn, by this thread unless another one takes turns.

        For engine threads only, where no Ctrl-C can interrupt the turn.
        """
        if self.is_quick or self.closed:
            # The loop delivers many messages in one turn, which costs less than a turn per message.
            self.post(handler, argument)
        else:
            self._messages.append((handler, argument))
            self._take_turns()

    def post_to_loop(self, handler: Callable[[Any], object], argument: Any) -> None:
        """Have ``handler(argument)`` called on the loop, outside of turns. From any thread."""
        self._for_loop.append((handler, argument))
        self._ask_loop()

    def touch(self, node: Node) -> None:
        """Have ``node`` advance in this turn."""
        # Once per turn is enough, because advance() does everything that it can.
        if not node.touched:
            node.touched = True
            self._touched.append(node)

    def spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        """Run a task of the engine, which handles the errors of the user's code itself."""
        # The loop has only weak references to tasks. Runners hold the tasks that make calls, and the futures
        # that idle tasks await.
        self.loop.create_task(coroutine, name=name).add_done_callback(self._hear_of_end)

    def abandon(self) -> None:
        """Close the hub in a forked process, which has no loop and must not wake the parent's loop."""
        self.closed = self._loop_is_asked = True

    def let_go(self) -> None:
        """Drop all messages, once the loop has been closed."""
        self._messages.clear()
        self._for_loop.clear()
        # So that the next message asks the loop, which drops it as well.
        self._loop_is_asked = False

    def _hear_of_end(self, task: asyncio.Task[None]) -> None:
        # Always retrieve the exception, or asyncio prints it.
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.closed:
            self.post(self._report_defect, error)

    def _ask_loop(self) -> None:
        # Two threads may both see it unset; the second call of _serve then finds nothing to do.
        if self._loop_is_asked:
            return
        try:
            self._loop_is_asked = True
            is_here = threading.get_ident() == self.loop_thread
            ask = self.loop.call_soon if is_here else self.loop.call_soon_threadsafe
            ask(self._serve)
        except RuntimeError:
            # The loop has been closed while this thread was in a blocking call.
            self.let_go()
        except BaseException:
            # A Ctrl-C, or memory is exhausted.
            self._loop_is_asked = False
            raise

    def _serve(self) -> None:
        # Reset first, so that messages that arrive from now on cause another call.
        self._loop_is_asked = False
        try:
            self._take_turns()
            waiting = self._for_loop
            for _ in range(len(waiting)):
                handler, argument = waiting.popleft()
                handler(argument)
        except BaseException as error:  # noqa: BLE001  # see _report_defect
            self.post(self._report_defect, error)

    def _take_turns(self) -> None:
        # If another thread has the turn, it looks for messages after the turn and finds that of this thread.
        while self._messages and self.turn.acquire(blocking=False):
            try:
                self.taker = threading.get_ident()
                self._take_turn()
            finally:
                self.taker = None
                self.turn.release()
            if self.is_quick and self._messages:
                # Leave the next turn to the loop: threads have items to make, and tasks run between turns.
                self._ask_loop()
                return

    def _take_turn(self) -> None:
        messages = self._messages
        try:
            # Only the messages that are there now: a quick thread must not keep the nodes from advancing.
            for _ in range(len(messages)):
                handler, argument = messages.popleft()
                handler(argument)
            while self._touched:
                node = self._touched.popleft()
                node.touched = False
                # Messages may have ended the run.
                if not self.closed:
                    node.advance()
        except BaseException as error:  # noqa: BLE001  # see _report_defect
            self._report_defect(error)

    def _report_defect(self, error: BaseException) -> None:
        # No user code runs in turns. asyncio would log the error and continue without the affected items, for
        # which the consumer would wait forever.
        text = "".join(traceback.format_exception(error))
        message = f"The pipeline itself failed ({describe(error)}). Please report this"
        self.events.fail("pipeline", message, error, text)


def wake(future: asyncio.Future[None]) -> None:
    """Wake the task that awaits ``future``, unless it was woken or cancelled before."""
    # Ctrl-C cancels it at any moment, so a look at done() before would not do.
    with contextlib.suppress(asyncio.InvalidStateError):
        future.set_result(None)


class Inlet:
    """Where nodes put their results: another node, or the sink. Used only within turns.

    The items of several nodes before it come in the order of arrival. A node whose epoch has ended passes
    nothing on until the epochs of all of them have ended.

    Attributes:
        before: The nodes before.
        depth: Number of aggregates that its items have passed; for a node, its results.
        room: Returns how many more items are accepted now.
        accept: Takes an item, for which there must be room.
        end: Called at the end of the epoch. No item comes before ``room`` is called again.
    """

    room: Callable[[], int]
    accept: Callable[[Any], None]
    end: Callable[[], None]

    def __init__(self) -> None:
        self.before: deque[Node] = deque()
        self.depth = 0

    def end_epoch(self, node: Node) -> None:
        """Note that the epoch of a node before has ended."""
        node.has_ended = True
        if all(one.has_ended for one in self.before):
            for one in self.before:
                one.has_ended = False
            self.end()

    def retry_before(self) -> None:
        """Have the nodes before retry, each time in another order, so that none is starved."""
        self.before.rotate()
        for node in self.before:
            node.retry()


class Node(Inlet):
    """A node of the chain, which accepts items and passes their results on. Used only within turns.

    States: *flowing* until the node before reports the end of the epoch. Then *ending*, without room, until
    everything that the node holds has been passed on. Then it reports the end of the epoch to the next node
    and is flowing again. So no item overtakes the end of its epoch.

    Attributes:
        held: Number of items and results in the node.
        capacity: Maximum of ``held``.
        slack: Additional capacity while items pass quickly.
        out: The results that wait for the next node.
        outlets: The next nodes. Only a :class:`Switch` has several.
        next: The last of them.
        has_ended: Whether it has reported the end of its epoch, and the next node waits for others.
    """

    def __init__(self, hub: Hub, name: str, concurrency: int = 1) -> None:
        super().__init__()
        self.hub = hub
        self.name = name
        self.touched = False
        self.ending = False
        self.has_ended = False
        self.held = 0
        self.capacity = concurrency
        self.slack = 0
        self.out: deque[Any] = deque()
        self.counters = StageCounters(concurrency)
        self.outlets: list[Inlet] = []
        self.next: Inlet

    def connect(self, inlet: Inlet) -> None:
        """Link the next node."""
        self.outlets.append(inlet)
        self.next = inlet
        inlet.before.append(self)
        # Items of any node may be groups, so the deepest nesting counts.
        inlet.depth = max(inlet.depth, self.depth)

    def room(self) -> int:
        """Return how many more items fit, which may be negative; 0 while the epoch is ending."""
        if self.ending:
            return 0
        return self.capacity - self.held + (self.slack if self.hub.is_quick else 0)

    def end(self) -> None:
        """Note that no more items of this epoch come."""
        self.ending = True
        self.hub.touch(self)

    def advance(self) -> None:
        """Pass on results, start calls, end the epoch: everything that is possible now."""
        if not self.has_ended:
            self.hand_on()
        self.dispatch()
        if (
            self.ending
            and not self.has_ended
            and not self.held
            and all(inlet.room() > 0 for inlet in self.outlets)
            and self.is_drained()
        ):
            self.ending = False
            for inlet in self.outlets:
                inlet.end_epoch(self)
        # The nodes before may hold results that they could not pass on.
        if self.room() > 0:
            self.retry_before()

    def retry(self) -> None:
        """Pass on results that the next node had no room for, if there are any."""
        if self.out or self.ending:
            self.hub.touch(self)

    def hand_on(self) -> None:
        """Pass results to the next node, as many as it has room for."""
        out = self.out
        # Ask until there is no room: a node that returns no room calls retry() when it has some again.
        while out and (count := min(self.next.room(), len(out))) > 0:
            accept, popleft = self.next.accept, out.popleft
            for _ in range(count):
                accept(popleft())
            self.held -= count
            self.counters.outputs += count

    def dispatch(self) -> None:
        """Start the work on accepted items."""

    def running_seconds(self, now: float) -> float:  # noqa: ARG002  # only stages make calls
        """Return for how many seconds the current calls have run, in total. From any thread."""
        return 0.0

    def let_go(self) -> None:
        """Drop all items after the run: otherwise they would live until the next garbage collection."""
        self.out.clear()

    def note_failure(self, slot: Slot, error: BaseException) -> None:
        """Note that an item failed."""
        slot.record = record_failure(self.name, slot.item, error)

    def fail_early(self, item: Any, error: BaseException) -> None:
        """Count and report a failed item before its call has ended, or even begun. From any thread."""
        slot = Slot(self, item)
        self.note_failure(slot, error)
        self.hub.post(self._count_early, slot)

    def end_early(self) -> None:
        """Note that the call of an item passed to ``fail_early`` is about to end. From any thread."""
        self.hub.post(self._forget_early, None)

    def _count_early(self, slot: Slot) -> None:
        # Held until the failure has been reported, so that the epoch does not end before.
        self.held += 1
        self.counters.early += 1
        self.hub.events.item_failed(slot, self._end_report)

    def _end_report(self, _: Slot) -> None:
        self.held -= 1
        self.hub.touch(self)

    def _forget_early(self, _: None) -> None:
        self.counters.early -= 1

    def is_drained(self) -> bool:
        """Do what is due at the end of an epoch, when nothing is held. Return whether the epoch may end."""
        return True


class Slot:
    """An item on its way through a stage, with its result or the record of its failure.

    Attributes:
        released: Whether the engine knows the outcome and the failure, if any, has been reported.
        queued_at, started_at, ended_at: Times of ``time.perf_counter``.
    """

    __slots__ = tuple("ended_at item queued_at record released result stage started_at".split())

    def __init__(self, stage: Node, item: Any) -> None:
        self.stage = stage
        self.item = item
        self.result: Any = None
        self.record: FailureRecord | None = None
        self.released = False
        self.queued_at = perf_counter()
        self.started_at = 0.0
        self.ended_at = 0.0
