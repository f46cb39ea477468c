"""Stages of a chain: of one result for each item, and of any number.

A stage says what a call is and what becomes of its outcome; a runner (:mod:`workers`) makes the calls.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Iterator
from time import perf_counter
from types import CoroutineType
from typing import Any

from spdl_media.pipeline.engine.hub import Hub, Node, Slot, wake
from spdl_media.pipeline.engine.workers import (
    TaskRunner,
    ThreadRunner,
    TurnRunner,
    WorkerThreads,
    limited,
)
from spdl_media.pipeline.executors import refuse_coroutine
from spdl_media.pipeline.failures import PoolBroken, describe

__all__ = ("FanOut", "FanOutSlot", "Stage")

LOG = logging.getLogger("spdl_media.pipeline")

END: Any = object()
MIN_AHEAD = 2


class Stage(Node):
    """A stage that calls a function for each item, which gives one result or none.

    An item is *queued* when accepted, *running* while its call is made, *settled* when the engine has
    heard of the outcome, and *released* when its failure, if any, has been reported.

    Args:
        hub: Where turns are taken.
        fn: The function, hooks included.
        name: Name of the stage.
        threads: Who calls it; ``None`` for what is asynchronous.
        concurrency: How many calls may run at once.
        ordered: Whether results leave in the order of the items.
        timeout: Seconds that a call may take.

    Attributes:
        queue: The slots that are queued.
        todo: Those that a thread or task may take.
        window: Where results keep the order of the items: the slots that have not left, in order.
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
        # One item waits, so that a thread that is done need not wait while another takes a turn.
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
        """Take an item for which there is room."""
        # By a local name: CPython 3.11 specializes this form alone, and it runs for each item.
        slot_type = self.slot_type
        slot = slot_type(self, item)
        self.held += 1
        if self.window is not None:
            self.window.append(slot)
        self.queue.append(slot)
        if not self.touched:
            self.hub.touch(self)

    def dispatch(self) -> None:
        """Have calls made for the slots that are queued."""
        if self.todo:
            self.runner.dispatch()

    def call(self, slot: Any) -> Callable[[Any], None]:
        """Make the call, in a thread. Returns what is called with the slot afterwards, in a turn.

        Raises:
            TypeError: The function returned a coroutine.
            BaseException: What the function raised.
        """
        slot.result = result = self.fn(slot.item)
        if result.__class__ is CoroutineType:
            refuse_coroutine(result, self.name)
        return self.settle

    def call_async(self, slot: Any) -> Awaitable[Any]:
        """Make the call, in a task that awaits its result.

        Raises:
            TimeoutError: While it is awaited: the call took longer than the stage's timeout.
            BaseException: What the function raised, here or while it is awaited.
        """
        call: Awaitable[Any] = self.fn(slot.item)
        return limited(call, self.timeout, "the call") if self.timeout else call

    def running_seconds(self, now: float) -> float:
        """For how long the calls have run, all together, that have not ended. From any thread."""
        return sum(now - slot.started_at for slot in self.runner.running())

    def settle(self, slot: Any) -> None:
        """Hear that a call has ended, or has been given up."""
        self.counters.count_call(slot.queued_at, slot.started_at, slot.ended_at)
        if slot.error is None:
            self.release(slot)
        else:
            self.report(slot)

    def report(self, slot: Any) -> None:
        """Release a slot once its failure, if any, has been reported."""
        error = slot.error
        if error is None:
            self.release(slot)
            return
        # No item can be processed any more, so the run fails, not the item alone.
        if type(error) is PoolBroken:
            self.hub.events.fail(self.name, str(error), error)
        self.hub.events.item_failed(slot, self.release)

    def release(self, slot: Any) -> None:
        """Let the result of a settled slot leave, now or in its turn."""
        self.hub.touch(self)
        window = self.window
        if window is None:
            self.leave(slot)
            return
        slot.released = True
        while window and window[0].released:
            self.leave(window.popleft())

    def leave(self, slot: Any) -> None:
        """Hand the result of a slot on, if there is one."""
        # Not the other way round: the call of a slot that was given up may have come back since.
        if slot.error is not None:
            self.held -= 1
        elif slot.result is None:
            self.held -= 1
            self.counters.dropped += 1
        else:
            self.out.append(slot.result)


class FanOutSlot(Slot):
    """An item and the values that its generator makes.

    States: *queued* (no generator yet), *open*, in which it is *paused* when it is as far ahead as it
    may be, and *settled*. It leaves when it is released and all its values have been handed on.

    Attributes:
        values: Those that have not been handed on.
        is_announced: A message tells of the values.
        is_out: It stands in ``out`` of the stage.
        opened_at, spent: When the generator first ran, and for how many seconds in all until it last paused.
        stepped_since: When it last went on; 0.0 while it is not stepped.
        woken: What its task waits for while it is paused.
    """

    generator: Iterator[Any] | None = None
    is_announced = is_out = paused = settled = False
    opened_at = spent = stepped_since = 0.0
    woken: asyncio.Future[None] | None = None

    def __init__(self, stage: Node, item: Any) -> None:
        super().__init__(stage, item)
        self.values: deque[Any] = deque()


class FanOut(Stage):
    """A stage of any number of results for each item: a generator, which may be asynchronous.

    No more generators are open at once than the stage's concurrency, and none is further ahead of the
    next stage than by two values, or by its share of the slack. A paused one occupies no thread, and may
    go on in another. Values leave as they come; where the order of the input is kept, those of the first
    item leave, and the others wait for their turn. ``out`` holds the slots whose values may leave.
    """

    #: Whether ``None`` is no value.
    drops_none = True
    slot_type: type[Slot] = FanOutSlot

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.todo = deque()
        # Where items keep their order, those that wait for their turn have to get on meanwhile.
        self._is_always_ahead = self.window is not None and self.concurrency > 1
        #: An iterator of the user's that may be wanted further, and is not to be closed.
        self.borrowed: Any = None
        self._open: dict[FanOutSlot, None] = {}

    def dispatch(self) -> None:
        """Open generators, and have those stepped that can go on."""
        while self.queue and len(self._open) < self.concurrency:
            slot = self.queue.popleft()
            self._open[slot] = None
            self.open(slot)
        self.runner.dispatch()

    def room(self) -> int:
        """How many more items fit. The slack is for their values."""
        return 0 if self.ending else self.capacity - self.held

    def open(self, slot: FanOutSlot) -> None:
        """Have the generator of a slot made and stepped."""
        self.todo.append(slot)

    def call(self, slot: FanOutSlot) -> Callable[[Any], None]:
        """Step a generator, in a thread.

        Raises:
            BaseException: What the generator raised.
        """
        hub, values, ahead = self.hub, slot.values, self._most_ahead()
        # Not read again: it is taken from a slot that is given up.
        if (generator := slot.generator) is None:
            slot.opened_at = slot.started_at
            generator = slot.generator = self._stepped(slot, lambda: iter(self.fn(slot.item)))
        while len(values) < ahead:
            value = self._stepped(slot, next, generator, END)
            if value is END:
                return self.settle
            values.append(value)
            self._announce(slot)
            if hub.closed or slot.settled:
                # The run is over, or the item given up. Nobody else can while the generator runs.
                self.close(generator)
                break
        return self._pause

    def _stepped(self, slot: FanOutSlot, step: Callable[..., Any], *args: Any) -> Any:
        # What the engine does between two values is no time of the generator's.
        slot.started_at = slot.stepped_since = perf_counter()
        try:
            return step(*args)
        finally:
            slot.stepped_since = 0.0
            slot.spent += perf_counter() - slot.started_at

    async def call_async(self, slot: FanOutSlot) -> None:
        """Step an asynchronous generator to its end, in a task.

        Raises:
            TimeoutError: The next value took longer than the stage's timeout.
            BaseException: What the generator raised.
        """
        slot.opened_at = slot.started_at
        iterator = aiter(self.fn(slot.item))
        try:
            # Not by "async for": each value has a time limit of its own.
            while (value := await self._next(slot, iterator)) is not END:
                slot.values.append(value)
                self._announce(slot)
                if self.hub.closed or slot.settled:
                    return
                if len(slot.values) >= self._most_ahead():
                    slot.woken = self.hub.loop.create_future()
                    self.hub.deliver(self._pause, slot)
                    await slot.woken
        finally:
            if iterator is not self.borrowed and (close := getattr(iterator, "aclose", None)):
                await close()

    async def _next(self, slot: FanOutSlot, iterator: Any) -> Any:
        slot.started_at = slot.stepped_since = perf_counter()
        try:
            value = anext(iterator, END)
            return await (limited(value, self.timeout, "the next value") if self.timeout else value)
        finally:
            slot.stepped_since = 0.0
            slot.spent += perf_counter() - slot.started_at

    def running_seconds(self, now: float) -> float:
        """For how long the generators have run, all together, that have not ended. From any thread."""
        return sum(
            # Read once: a thread may pause it meanwhile.
            slot.spent + (now - since if (since := slot.stepped_since) else 0.0)
            for slot in list(self._open)
        )

    def _announce(self, slot: FanOutSlot) -> None:
        if not slot.is_announced:
            slot.is_announced = True
            self.hub.deliver(self.collect, slot)

    def collect(self, slot: FanOutSlot) -> None:
        """Let values leave that have been made, if it is their turn."""
        slot.is_announced = False
        # A thread that was given up may announce more of them.
        if not slot.settled:
            self._let_out(slot)

    def _let_out(self, slot: FanOutSlot) -> None:
        if self.window is None or self.window[0] is slot:
            if not slot.is_out:
                slot.is_out = True
                self.out.append(slot)
            self.hub.touch(self)

    def hand_on(self) -> None:
        """Give values to the next node, and let generators go on that have got far enough."""
        out, counters, drops_none = self.out, self.counters, self.drops_none
        while out:
            slot = out[0]
            # Those that come meanwhile are announced.
            left = len(slot.values)
            # As in Node.hand_on.
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
        """Hear that a generator has ended, failed or has been given up."""
        if slot.settled:
            return
        self._let_out(slot)
        slot.settled = True
        # A thread that was given up keeps the other one.
        slot.values = slot.values.copy()
        # The call is the time in which the generator ran; its pauses count neither as that nor as waiting.
        opened_at = slot.opened_at or slot.queued_at
        self.counters.count_call(slot.queued_at, opened_at, opened_at + slot.spent)
        self.report(slot)

    def release(self, slot: FanOutSlot) -> None:
        """Close a slot; it leaves when its values have."""
        slot.released = True
        # Its frame may hold big things until the slot leaves.
        slot.generator = None
        del self._open[slot]
        # Another one may be opened.
        self.hub.touch(self)
        self._let_out(slot)

    def leave(self, slot: FanOutSlot) -> None:  # noqa: ARG002  # in order it is the first one
        """Make room for another item, and let the values of the next one leave."""
        self.held -= 1
        if self.window is not None:
            self.window.popleft()
            if self.window:
                self._let_out(self.window[0])

    def close_generators(self) -> None:
        """Close the open generators; a thread that steps one closes it by itself."""
        for slot in list(self._open):
            if slot.generator is not None and not getattr(slot.generator, "gi_running", False):
                self.close(slot.generator)

    def close(self, generator: Iterator[Any]) -> None:
        """Have a generator do what it does at its end, although it was not exhausted."""
        # Iterators of another kind may be open files, of which a user wants more.
        if generator is self.borrowed or not isinstance(generator, Generator):
            return
        try:
            generator.close()
        except BaseException as error:  # noqa: BLE001  # the user's code may raise anything
            # Thread and loop may both have come to close it; one of them is enough.
            if not getattr(generator, "gi_running", False):
                LOG.warning("a generator raised while it was closed: %s", describe(error))

    def _most_ahead(self) -> int:
        # One is handed on while the next is made.
        if not (self.hub.is_quick or self._is_always_ahead):
            return MIN_AHEAD
        # An equal share for each generator that is open.
        return max(MIN_AHEAD, self.slack // self.concurrency)

    def _pause(self, slot: FanOutSlot) -> None:
        slot.paused = True
        self._resume_if_behind(slot)

    def _resume_if_behind(self, slot: FanOutSlot) -> None:
        # Half, or none of two, so that one switch of threads serves several values.
        if slot.settled or len(slot.values) > (self._most_ahead() - 1) // 2:
            return
        slot.paused = False
        if slot.woken is not None:
            self.hub.post_to_loop(wake, slot.woken)
        else:
            self.todo.append(slot)
            self.hub.touch(self)
