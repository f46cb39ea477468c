"""Stages of any number of results for each item: generators, and groups that are taken apart."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import aclosing
from time import perf_counter
from typing import Any

from spdl_media.pipeline.engine.hub import Hub, Node, Slot, wake
from spdl_media.pipeline.engine.nodes import CallSpec, Stage, limited
from spdl_media.pipeline.engine.workers import Threads, WorkerGroup
from spdl_media.pipeline.failures import describe

__all__ = ("AsyncFanOut", "Disaggregate", "FanOut", "FanOutSlot", "ThreadFanOut", "close_generator")

LOG = logging.getLogger("spdl_media.pipeline")

END: Any = object()


class FanOutSlot(Slot):
    """An item and the values that its generator has made so far.

    States: *waiting* (no generator yet), *running* (a thread or task asks it for values), *paused*
    (it is as far ahead as it may be), *finished*. It leaves when it is finished and all its values
    have been handed on.

    Attributes:
        outstanding: How many values were made and not yet handed on.
        values: Those that wait for the slots before to be done.
        spent: Seconds in which the generator ran.
        woken: What its task waits for while it is paused.
    """

    __slots__ = ("finished", "generator", "outstanding", "paused", "spent", "values", "woken")

    def __init__(self, stage: Node, item: Any) -> None:
        super().__init__(stage, item)
        self.generator: Iterator[Any] | None = None
        self.outstanding = 0
        self.values: deque[Any] = deque()
        self.paused = False
        self.finished = False
        self.spent = 0.0
        self.woken: asyncio.Future[None] | None = None


class FanOut(Stage):
    """The part of such a stage that does not depend on who runs the generators.

    No more generators are open at once than the stage's concurrency, and none is further ahead of
    the next stage than its share of the slack. Values leave as they come; where the order of the
    input is kept, those of the first item leave, and the others wait for their turn.
    """

    def __init__(self, hub: Hub, spec: CallSpec) -> None:
        super().__init__(hub, spec, FanOutSlot)
        # An equal share for each generator that is open; one value at least, or none would start.
        self.ahead = max(1, spec.slack // spec.concurrency)
        self._open: dict[FanOutSlot, None] = {}

    def dispatch(self) -> None:
        """Open generators."""
        while self.todo and len(self._open) < self.spec.concurrency:
            slot = self.todo.popleft()
            self._open[slot] = None
            self.open(slot)

    def open(self, slot: FanOutSlot) -> None:
        """Have the generator of a slot run."""
        raise NotImplementedError

    def resume(self, slot: FanOutSlot) -> None:
        """Have a paused generator go on."""
        raise NotImplementedError

    def hand_on(self) -> None:
        """Give values to the next node, and let generators go on that have got far enough."""
        out, inlet = self.out, self.next
        while out and (count := min(inlet.room(), len(out))) > 0:
            for _ in range(count):
                slot, value = out.popleft()
                inlet.accept(value)
                slot.outstanding -= 1
                if slot.finished:
                    self.leave(slot)
                elif slot.paused:
                    self.resume_if_behind(slot)
            self.counters.outputs += count

    def take_value(self, slot: FanOutSlot, value: Any) -> None:
        """Hear of a value."""
        # Settled: the generator took too long, and its thread went on.
        if value is None or slot.settled:
            self.counters.dropped += 1
            return
        slot.outstanding += 1
        if self.window is None or self.window[0] is slot:
            self.out.append((slot, value))
        else:
            slot.values.append(value)
        self.hub.touch(self)

    def finish(self, slot: FanOutSlot) -> None:
        """Hear that a generator has ended or failed."""
        slot.settled = True
        slot.ended_at = perf_counter()
        # The call is the time in which the generator ran; its pauses count as waiting.
        slot.started_at = slot.ended_at - slot.spent
        self.settle(slot)

    def release(self, slot: FanOutSlot) -> None:
        """Close a slot; it leaves when its values have."""
        slot.finished = True
        # Its frame may hold big things until the slot leaves.
        slot.generator = None
        del self._open[slot]
        self.leave(slot)
        self.hub.touch(self)

    def leave(self, slot: Any) -> None:
        """Make room for another item if all values of this one have been handed on."""
        if slot.outstanding:
            return
        window = self.window
        if window is None:
            self.held -= 1
            return
        while window and window[0].finished and not window[0].outstanding:
            window.popleft()
            self.held -= 1
            if window:
                # Now the first: its values may leave.
                first = window[0]
                self.out.extend((first, value) for value in first.values)
                first.values.clear()

    def resume_if_behind(self, slot: FanOutSlot) -> None:
        """Have a paused generator go on if half of its values have been handed on."""
        # Half, so that one switch of threads serves several values.
        if slot.outstanding <= self.ahead // 2:
            slot.paused = False
            self.resume(slot)


class ThreadFanOut(FanOut):
    """Generators that are stepped by threads. A paused one occupies none, and may go on in another."""

    def __init__(self, hub: Hub, spec: CallSpec, threads: Threads) -> None:
        super().__init__(hub, spec)
        self.group = WorkerGroup(
            hub, threads, spec.concurrency, self._step, spec.timeout, self.finish
        )

    def dispatch(self) -> None:
        """Open generators, and have threads step those that can go on."""
        # First, because opened generators join those that wait for a thread.
        super().dispatch()
        self.group.dispatch()

    def open(self, slot: FanOutSlot) -> None:
        """Have a thread make the generator of a slot and step it."""
        self.group.todo.append(slot)

    def resume(self, slot: FanOutSlot) -> None:
        """Have a thread step the generator of a slot on."""
        self.group.todo.append(slot)
        self.hub.touch(self)

    def generators(self) -> Iterable[Iterator[Any]]:
        """Those that are open, to be closed when the run ends early."""
        return [slot.generator for slot in self._open if slot.generator is not None]

    def _step(self, slot: FanOutSlot) -> Callable[[FanOutSlot], None]:
        post = self.hub.post
        start = slot.started_at
        try:
            # Not read again: the loop takes it from a slot that it gives up.
            if (generator := slot.generator) is None:
                generator = slot.generator = iter(self.spec.fn(slot.item))
            for _ in range(self.ahead - slot.outstanding):
                slot.started_at = perf_counter()
                value = next(generator, END)
                if value is END:
                    return self.finish
                post(self._receive, (slot, value))
                if self.hub.closed or slot.settled:
                    # The run is over, or the item given up. The loop cannot do it while the generator runs.
                    close_generator(generator)
                    break
        except BaseException as error:  # noqa: BLE001  # as for functions
            slot.fail(error)
            return self.finish
        finally:
            slot.spent += perf_counter() - start
        return self._pause

    def _receive(self, message: tuple[FanOutSlot, Any]) -> None:
        self.take_value(*message)

    def _pause(self, slot: FanOutSlot) -> None:
        slot.paused = True
        self.resume_if_behind(slot)


def close_generator(generator: Iterator[Any]) -> None:
    """Have a generator do what it does at its end, although it was not exhausted."""
    if (close := getattr(generator, "close", None)) is None:
        return  # an iterator of another kind
    try:
        close()
    except BaseException as error:  # noqa: BLE001  # the user's code may raise anything
        # Thread and loop may both have come to close it; one of them is enough.
        if not getattr(generator, "gi_running", False):
            LOG.warning("a generator raised while it was closed: %s", describe(error))


class AsyncFanOut(FanOut):
    """Asynchronous generators, each in a task of its own while it is open."""

    def open(self, slot: FanOutSlot) -> None:
        """Start a task that steps the generator of a slot."""
        self.hub.spawn(self._run(slot), self.name)

    def resume(self, slot: FanOutSlot) -> None:
        """Wake the task of a slot."""
        if slot.woken is not None:
            wake(slot.woken)

    def running(self) -> Iterable[Slot]:
        """The slots of generators that are open and not paused."""
        return [slot for slot in self._open if not slot.paused]

    async def _run(self, slot: FanOutSlot) -> None:
        try:
            async with aclosing(self.spec.fn(slot.item)) as generator:
                # Not by "async for": each value has a time limit of its own.
                while (value := await self._next(slot, generator)) is not END:
                    self.take_value(slot, value)
                    if self.hub.closed:
                        return
                    if slot.outstanding >= self.ahead:
                        slot.paused = True
                        slot.woken = self.hub.loop.create_future()
                        await slot.woken
        except BaseException as error:  # as for functions
            if self.hub.closed:
                raise
            task: Any = asyncio.current_task()
            task.uncancel()
            slot.fail(error)
        self.finish(slot)

    async def _next(self, slot: FanOutSlot, generator: AsyncIterator[Any]) -> Any:
        slot.started_at = perf_counter()
        timeout = self.spec.timeout
        try:
            value = anext(generator, END)
            return await (limited(value, timeout, "the next value") if timeout else value)
        finally:
            slot.spent += perf_counter() - slot.started_at


class Disaggregate(ThreadFanOut):
    """Takes groups apart, one after the other.

    Lists and tuples on the loop. Other iterables, and classes that derive from these, may run code
    of the user's when they are iterated, so threads do it.

    Args:
        hub: As for all nodes.
        spec: The slack is a number of groups.
        threads: As for other generators.
        ahead: How many items of a group may be in front of the next stage.
    """

    def __init__(self, hub: Hub, spec: CallSpec, threads: Threads, *, ahead: int) -> None:
        super().__init__(hub, spec, threads)
        self.ahead = ahead

    def open(self, slot: FanOutSlot) -> None:
        """Take a group apart, or have a thread do it."""
        # The exact classes: those that derive from them may run any code when iterated.
        if type(slot.item) not in (list, tuple):
            super().open(slot)
            return
        slot.started_at = perf_counter()
        for value in slot.item:
            self.take_value(slot, value)
        slot.spent = perf_counter() - slot.started_at
        self.finish(slot)
