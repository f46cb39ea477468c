"""Nodes that call the user's functions: with one result per item, and with any number of results.

A stage defines how to make a call and how to handle its outcome; a runner (:mod:`workers`) makes the calls.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Iterator
from time import perf_counter
from types import CoroutineType
from typing import Any

from spdl_media.pipeline.engine.hub import Hub, Node, Slot, wake
from spdl_media.pipeline.engine.workers import (
    LOG,
    TaskRunner,
    ThreadRunner,
    TurnRunner,
    WorkerThreads,
    limited,
)
from spdl_media.pipeline.executors import refuse_coroutine
from spdl_media.pipeline.failures import PoolBroken, describe

END: Any = object()
MIN_AHEAD = 2


class Stage(Node):
    """A stage that calls a function for each item, which returns one result or none.

    An item is *queued* when it was accepted, *running* during its call, *settled* when the engine knows the
    outcome, and *released* when its failure, if any, has been reported.

    Args:
        hub: Hub of the run.
        fn: The function, including hooks.
        name: Name of the stage.
        threads: The threads that call ``fn``; ``None`` if ``fn`` is asynchronous.
        concurrency: Maximum number of calls at once.
        ordered: Whether results leave in the order of the items.
        timeout: Maximum seconds of a call.

    Attributes:
        queue: The queued slots.
        todo: The slots that a thread or task may take.
        window: If ``ordered``, the slots that have not left, in order; otherwise ``None``.
    """

    slot_type: type[Slot] = Slot

    def __init__(
        self,
        hub: Hub,
        fn: Callable[[Any], Any],
        name: str,
        threads: WorkerThreads | None,
        *,
        concurrency: int = 1,
        ordered: bool = False,
        timeout: float | None = None,
    ) -> None:
        super().__init__(hub, name, concurrency)
        # One more item is queued, so that a thread has its next item while another thread takes a turn.
        self.capacity += 1
        self.fn = fn
        self.concurrency = concurrency
        self.timeout = timeout
        self.queue: deque[Any] = deque()
        self.todo = self.queue
        self.window: deque[Any] | None = deque() if ordered else None
        self.runner: TaskRunner | ThreadRunner | TurnRunner = (
            TaskRunner(self) if threads is None else ThreadRunner(self, threads)
        )

    def accept(self, item: Any) -> None:
        """Queue an item. There must be room for it."""
        # By a local variable: CPython 3.11 specializes only this form, and this runs for each item.
        slot_type = self.slot_type
        slot = slot_type(self, item)
        self.held += 1
        if self.window is not None:
            self.window.append(slot)
        self.queue.append(slot)
        if not self.touched:
            self.hub.touch(self)

    def let_go(self) -> None:
        """Drop all items after the run, also the queued ones."""
        super().let_go()
        self.queue.clear()
        if self.window is not None:
            self.window.clear()

    def dispatch(self) -> None:
        """Have the runner make the calls of the slots in ``todo``."""
        if self.todo:
            self.runner.dispatch()

    def call(self, slot: Any) -> Callable[[Any], None]:
        """Make the call, in a thread. Return the function to call with the slot afterwards, in a turn.

        Raises:
            TypeError: The function returned a coroutine.
            BaseException: What the function raised.
        """
        slot.result = result = self.fn(slot.item)
        if result.__class__ is CoroutineType:
            refuse_coroutine(result, self.name)
        return self.settle

    def call_async(self, slot: Any) -> Awaitable[Any]:
        """Make the call, and return its awaitable to the task.

        Raises:
            TimeoutError: Raised by the awaitable, when the call took longer than the stage's timeout.
            BaseException: What the function raised, here or in the awaitable.
        """
        call: Awaitable[Any] = self.fn(slot.item)
        return limited(call, self.timeout, "the call") if self.timeout else call

    def running_seconds(self, now: float) -> float:
        """Return for how many seconds the current calls have run, in total. From any thread."""
        return sum(now - slot.started_at for slot in self.runner.running())

    def settle(self, slot: Any) -> None:
        """Handle the outcome of a call that has ended or was given up."""
        self.counters.count_call(slot.queued_at, slot.started_at, slot.ended_at)
        self.report(slot)

    def report(self, slot: Any) -> None:
        """Release a slot, after its failure, if any, has been reported."""
        if slot.record is None:
            self.release(slot)
            return
        error = slot.record.exception
        # No item can be processed any more, so the whole run fails.
        if isinstance(error, PoolBroken):
            self.hub.events.fail(self.name, str(error), error)
        self.hub.events.item_failed(slot, self.release)

    def release(self, slot: Any) -> None:
        """Let the result of a settled slot leave, now or, if ordered, after the slots before it."""
        self.hub.touch(self)
        window = self.window
        if window is None:
            self.leave(slot)
            return
        slot.released = True
        while window and window[0].released:
            self.leave(window.popleft())

    def leave(self, slot: Any) -> None:
        """Queue the result of a slot, if it has one, for the next node."""
        # Check the failure first: a call that was given up may have set a result since.
        if slot.record is not None:
            self.held -= 1
        elif slot.result is None:
            self.held -= 1
            self.counters.dropped += 1
        else:
            self.out.append(slot.result)


class FanOutSlot(Slot):
    """An item and the values that its generator yields.

    States: *queued* (no generator yet), *open* (*paused* when it is as far ahead as allowed) and *settled*.
    The slot leaves when it is released and all its values have been passed on.

    Attributes:
        values: The values that have not been passed on.
        is_announced: Whether a message about new values is under way.
        is_out: Whether the slot is in ``out`` of the stage.
        opened_at: When the generator first ran.
        spent: Total seconds for which the generator has run, without the current step, which began at
            ``started_at``.
        woken: Future that the slot's task awaits while it is paused.
    """

    generator: Iterator[Any] | None = None
    is_announced = is_out = paused = settled = False
    opened_at = spent = 0.0
    woken: asyncio.Future[None] | None = None

    def __init__(self, stage: Node, item: Any) -> None:
        super().__init__(stage, item)
        self.values: deque[Any] = deque()

    def end_step(self) -> None:
        """Count the time of a step that has ended, and begin the next one."""
        now = perf_counter()
        self.spent += now - self.started_at
        self.started_at = now


class FanOut(Stage):
    """A stage with any number of results per item, made by a generator, which may be asynchronous.

    At most ``concurrency`` generators are open at once. Each may be ahead of the next stage by two values, or
    by its share of the slack. A paused generator occupies no thread, and may continue in another one. Values
    leave as they come; if the stage is ordered, only the values of the first item leave, and those of later
    items wait. ``out`` holds the slots whose values may leave.
    """

    #: Whether a ``None`` that is yielded is dropped.
    drops_none = True
    slot_type: type[Slot] = FanOutSlot

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.todo = deque()
        # If the stage is ordered, the generators of later items have to work ahead while they wait.
        self._is_always_ahead = self.window is not None and self.concurrency > 1
        #: The user's own iterator, which must not be closed, because the user may continue to use it.
        self.borrowed: Any = None
        self._open: dict[FanOutSlot, None] = {}

    def dispatch(self) -> None:
        """Open generators, and have the runner step those that are not paused."""
        while self.queue and len(self._open) < self.concurrency:
            slot = self.queue.popleft()
            self._open[slot] = None
            self.open(slot)
        super().dispatch()

    def room(self) -> int:
        """Return how many more items fit. The slack applies to values, not to items."""
        return 0 if self.ending else self.capacity - self.held

    def let_go(self) -> None:
        """Drop all items after the run, also the open ones."""
        super().let_go()
        self.todo.clear()
        self._open.clear()

    def open(self, slot: FanOutSlot) -> None:
        """Have the runner make and step the generator of a slot."""
        self.todo.append(slot)

    def call(self, slot: FanOutSlot) -> Callable[[Any], None]:
        """Step a generator, in a thread.

        Raises:
            BaseException: What the generator raised.
        """
        hub, values, ahead = self.hub, slot.values, self._most_ahead()
        # Read once: another thread sets it to None when the slot is given up.
        if (generator := slot.generator) is None:
            slot.opened_at = slot.started_at
            generator = slot.generator = iter(self.fn(slot.item))
        while len(values) < ahead:
            if (value := next(generator, END)) is END:
                return self.settle
            slot.end_step()
            values.append(value)
            self._announce(slot)
            if hub.closed or slot.settled:
                # The run is over, or the item was given up. No other thread can close a running generator.
                self.close(generator)
                break
        return self._pause

    async def call_async(self, slot: FanOutSlot) -> None:
        """Step an asynchronous generator to its end, in a task.

        Raises:
            TimeoutError: The next value took longer than the stage's timeout.
            BaseException: What the generator raised.
        """
        slot.opened_at = slot.started_at
        iterator = aiter(self.fn(slot.item))
        try:
            # Not "async for", because each value has its own timeout.
            while (value := await self._next(iterator)) is not END:
                slot.end_step()
                slot.values.append(value)
                self._announce(slot)
                if self.hub.closed or slot.settled:
                    return
                if len(slot.values) >= self._most_ahead():
                    slot.woken = self.hub.loop.create_future()
                    self.hub.deliver(self._pause, slot)
                    await slot.woken
                    slot.started_at = perf_counter()
        finally:
            if iterator is not self.borrowed and (close := getattr(iterator, "aclose", None)):
                await close()

    def _next(self, iterator: Any) -> Awaitable[Any]:
        value: Awaitable[Any] = anext(iterator, END)
        return limited(value, self.timeout, "the next value") if self.timeout else value

    def running_seconds(self, now: float) -> float:
        """Return for how many seconds the open generators have run, in total. From any thread."""
        return super().running_seconds(now) + sum(slot.spent for slot in list(self._open))

    def _announce(self, slot: FanOutSlot) -> None:
        if not slot.is_announced:
            slot.is_announced = True
            self.hub.deliver(self.collect, slot)

    def collect(self, slot: FanOutSlot) -> None:
        """Let the new values of a slot leave, unless slots before it have to leave first."""
        slot.is_announced = False
        # A thread that was given up may still announce values.
        if not slot.settled:
            self._let_out(slot)

    def _let_out(self, slot: FanOutSlot) -> None:
        if self.window is None or self.window[0] is slot:
            if not slot.is_out:
                slot.is_out = True
                self.out.append(slot)
            self.hub.touch(self)

    def hand_on(self) -> None:
        """Pass values to the next node, and resume generators that are no longer far ahead."""
        out, counters, drops_none = self.out, self.counters, self.drops_none
        while out:
            slot = out[0]
            # Values that arrive meanwhile are announced by another message.
            left = len(slot.values)
            # Ask for room until there is none, as in Node.hand_on.
            while left and (count := min(self.next.room(), left)) > 0:
                accept, popleft = self.next.accept, slot.values.popleft
                num_dropped = 0
                for _ in range(count):
                    value = popleft()
                    if value is None and drops_none:
                        num_dropped += 1
                    else:
                        accept(value)
                left -= count
                counters.outputs += count - num_dropped
                counters.dropped += num_dropped
            if slot.paused:
                self._resume_if_behind(slot)
            if left:
                return
            out.popleft()
            slot.is_out = False
            if slot.released:
                self.leave(slot)

    def settle(self, slot: FanOutSlot) -> None:
        """Handle the end of a generator, which has ended, failed or was given up."""
        if slot.settled:
            return
        self._let_out(slot)
        slot.settled = True
        # A copy, because a thread that was given up may append to the other deque.
        slot.values = slot.values.copy()
        # Count only the time in which the generator ran: its pauses are neither running nor waiting.
        opened_at = slot.opened_at or slot.queued_at
        # With the last step, unless it still runs.
        spent = slot.spent + max(0.0, slot.ended_at - slot.started_at)
        self.counters.count_call(slot.queued_at, opened_at, opened_at + spent)
        self.report(slot)

    def release(self, slot: FanOutSlot) -> None:
        """Drop the generator of a slot; the slot leaves when its values have left."""
        slot.released = True
        # The generator's frame may hold large objects, and the slot may leave much later.
        slot.generator = None
        del self._open[slot]
        # Another generator may be opened now.
        self.hub.touch(self)
        self._let_out(slot)

    def leave(self, slot: FanOutSlot) -> None:  # noqa: ARG002  # if ordered, it is the first of the window
        """Make room for another item, and let the values of the next one leave."""
        self.held -= 1
        if self.window is not None:
            self.window.popleft()
            if self.window:
                self._let_out(self.window[0])

    def close_generators(self) -> None:
        """Close the open generators, except running ones, which their threads close."""
        for slot in list(self._open):
            if slot.generator is not None and not getattr(slot.generator, "gi_running", False):
                self.close(slot.generator)

    def close(self, generator: Iterator[Any]) -> None:
        """Close a generator that was not exhausted, so that its cleanup code runs."""
        # Other iterators may be open files, for example, which the user may continue to read.
        if generator is self.borrowed or not isinstance(generator, Generator):
            return
        try:
            generator.close()
        except BaseException as error:  # noqa: BLE001  # the user's code may raise anything
            # It fails with "already executing" if another thread is just closing it, which is fine.
            if not getattr(generator, "gi_running", False):
                LOG.warning("a generator raised while it was closed: %s", describe(error))

    def _most_ahead(self) -> int:
        # Two: one value is passed on while the next is made.
        if not (self.hub.is_quick or self._is_always_ahead):
            return MIN_AHEAD
        # Open generators share the slack equally.
        return max(MIN_AHEAD, self.slack // self.concurrency)

    def _pause(self, slot: FanOutSlot) -> None:
        slot.paused = True
        self._resume_if_behind(slot)

    def _resume_if_behind(self, slot: FanOutSlot) -> None:
        # Resume at half of the allowed values (at 0 of 2), so that one thread switch serves several values.
        if slot.settled or len(slot.values) > (self._most_ahead() - 1) // 2:
            return
        slot.paused = False
        if slot.woken is not None:
            self.hub.post_to_loop(wake, slot.woken)
        else:
            self.todo.append(slot)
            self.hub.touch(self)
