"""Stages that make any number of results of each item: generators, and groups that are taken apart."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import aclosing
from time import perf_counter
from typing import Any

from spdl_media.pipeline.engine.hub import Hub, Node, Slot
from spdl_media.pipeline.engine.nodes import CallSpec
from spdl_media.pipeline.engine.workers import Crew, FailureDesk, Threads
from spdl_media.pipeline.failures import describe

__all__ = (
    "AsyncFanOut",
    "Disaggregate",
    "FanOut",
    "FanOutSlot",
    "ThreadFanOut",
    "close_generator",
)

LOG = logging.getLogger("spdl_media.pipeline")


class FanOutSlot(Slot):
    """An item and the values that its generator has made so far.

    States: *waiting* (no generator yet), *running* (a thread or task asks it for values), *paused* (it is
    as far ahead as it may be), *finished*. The slot is *gone* when it is finished and all its values
    have been handed on.
    """

    __slots__ = ("finished", "generator", "outstanding", "paused", "resume", "spent", "values")

    def __init__(self, stage: Node, item: Any) -> None:
        super().__init__(stage, item)
        self.generator: Iterator[Any] | None = None
        # Made and not yet handed on, and which of them wait for the slots before to be done.
        self.outstanding = 0
        self.values: deque[Any] = deque()
        self.paused = False
        self.finished = False
        self.spent = 0.0
        self.resume: asyncio.Future[None] | None = None


class FanOut(Node):
    """The part of such a stage that does not depend on who runs the generators.

    No more generators are open at once than the stage's concurrency, and none is further ahead of the
    next stage than its share of the slack. Values leave as they come; where the order of the input is
    kept, those of the first item leave, and the others' wait for their turn.
    """

    def __init__(self, hub: Hub, spec: CallSpec, desk: FailureDesk) -> None:
        super().__init__(hub, spec.name, spec.concurrency)
        self.spec = spec
        self.capacity = spec.concurrency + spec.slack
        self.ahead = max(1, spec.slack // spec.concurrency)
        self._desk = desk
        self._waiting: deque[FanOutSlot] = deque()
        self._open: dict[FanOutSlot, None] = {}
        self._window: deque[FanOutSlot] | None = deque() if spec.ordered else None

    def accept(self, item: Any) -> None:
        """Take an item for which there is room."""
        slot = FanOutSlot(self, item)
        self.held += 1
        self._waiting.append(slot)
        if self._window is not None:
            self._window.append(slot)
        self.hub.touch(self)

    def dispatch(self) -> None:
        """Open generators."""
        while self._waiting and len(self._open) < self.spec.concurrency:
            slot = self._waiting.popleft()
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
                    self._leave_if_gone(slot)
                elif slot.paused:
                    self._resume_if_behind(slot)
            self.counters.outputs += count

    def yielded(self, slot: FanOutSlot, value: Any) -> None:
        """Hear of a value."""
        # Settled: the generator took too long, and its thread went on.
        if value is None or slot.settled:
            self.counters.dropped += 1
            return
        slot.outstanding += 1
        if self._window is None or self._window[0] is slot:
            self.out.append((slot, value))
        else:
            slot.values.append(value)
        self.hub.touch(self)

    def finish(self, slot: FanOutSlot) -> None:
        """Hear that a generator has ended or failed."""
        slot.settled = True
        slot.ended_at = perf_counter()
        self.counters.count_call(slot.queued_at, slot.ended_at - slot.spent, slot.ended_at)
        if slot.error is None:
            self._close(slot)
        else:
            self._desk.report(slot, self.counters, self._close)

    def running(self) -> Iterable[Slot]:
        """The slots of generators that run, other than in worker threads."""
        return ()

    def _close(self, slot: Any) -> None:
        slot.finished = True
        slot.generator = None
        del self._open[slot]
        self._leave_if_gone(slot)
        self.hub.touch(self)

    def _leave_if_gone(self, slot: FanOutSlot) -> None:
        if slot.outstanding:
            return
        window = self._window
        if window is None:
            self.held -= 1
            return
        while window and window[0].finished and not window[0].outstanding:
            window.popleft()
            self.held -= 1
            if window:
                self._promote(window[0])

    def _promote(self, slot: FanOutSlot) -> None:
        """Let the values of a slot out that is now the first."""
        self.out.extend((slot, value) for value in slot.values)
        slot.values.clear()

    def _resume_if_behind(self, slot: FanOutSlot) -> None:
        if slot.outstanding <= self.ahead // 2:
            slot.paused = False
            self.resume(slot)


class ThreadFanOut(FanOut):
    """Generators that are stepped by threads. A paused one occupies none, and may go on in another."""

    def __init__(self, hub: Hub, spec: CallSpec, desk: FailureDesk, threads: Threads) -> None:
        super().__init__(hub, spec, desk)
        self.crew: Crew[FanOutSlot] = Crew(
            hub,
            threads,
            spec.concurrency,
            self._step,
            timeout=spec.timeout,
            on_timeout=self.finish,
        )

    def dispatch(self) -> None:
        """Open generators, and call threads to those that can go on."""
        super().dispatch()
        self.crew.dispatch()

    def open(self, slot: FanOutSlot) -> None:
        """Have a thread make the generator of a slot and step it."""
        self.crew.todo.append(slot)

    def resume(self, slot: FanOutSlot) -> None:
        """Have a thread step the generator of a slot on."""
        self.crew.todo.append(slot)
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
        self.yielded(*message)

    def _pause(self, slot: FanOutSlot) -> None:
        slot.paused = True
        self._resume_if_behind(slot)


END: Any = object()


def close_generator(generator: Iterator[Any]) -> None:
    """Have a generator do what it does at its end, although it was not exhausted."""
    if (close := getattr(generator, "close", None)) is None:
        return  # an iterator of another kind
    try:
        close()
    except BaseException as error:  # noqa: BLE001  # the caller's code may raise anything
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
        if slot.resume is not None and not slot.resume.done():
            slot.resume.set_result(None)

    def running(self) -> Iterable[Slot]:
        """The slots of generators that are open and not paused."""
        return [slot for slot in self._open if not slot.paused]

    async def _run(self, slot: FanOutSlot) -> None:
        try:
            async with aclosing(self.spec.fn(slot.item)) as generator:
                while (value := await self._next(slot, generator)) is not END:
                    self.yielded(slot, value)
                    if self.hub.closed:
                        return
                    if slot.outstanding >= self.ahead:
                        await self._wait_for_room(slot)
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
            if timeout is None:
                return await anext(generator, END)
            async with asyncio.timeout(timeout) as limit:
                return await anext(generator, END)
        except TimeoutError as error:
            if timeout is None or not limit.expired():
                raise
            raise TimeoutError(f"the next value took longer than timeout={timeout} s") from error
        finally:
            slot.spent += perf_counter() - slot.started_at

    async def _wait_for_room(self, slot: FanOutSlot) -> None:
        slot.paused = True
        slot.resume = self.hub.loop.create_future()
        await slot.resume


class Disaggregate(ThreadFanOut):
    """Takes groups apart, one after the other.

    Lists and tuples on the loop; what else can be iterated may run code of the caller's when it is, so
    threads do it. So may classes that derive from these.

    Args:
        hub: As for all nodes.
        spec: The slack is a number of groups.
        desk: As for all stages.
        threads: As for other generators.
        ahead: How many items of a group may be in front of the next stage.
    """

    def __init__(
        self, hub: Hub, spec: CallSpec, desk: FailureDesk, threads: Threads, *, ahead: int
    ) -> None:
        super().__init__(hub, spec, desk, threads)
        self.ahead = ahead

    def open(self, slot: FanOutSlot) -> None:
        """Take a group apart, or have a thread do it."""
        if type(slot.item) not in (list, tuple):
            super().open(slot)
            return
        slot.started_at = perf_counter()
        for value in slot.item:
            self.yielded(slot, value)
        slot.spent = perf_counter() - slot.started_at
        self.finish(slot)
