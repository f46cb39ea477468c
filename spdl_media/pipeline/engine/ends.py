"""The two ends of a chain: where items come in, and where results wait for the consumer."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import sys
import threading
from collections import deque
from collections.abc import AsyncIterable, Callable
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any

from spdl_media.pipeline.engine.hub import Hub, Pace, Slot, wake
from spdl_media.pipeline.engine.nodes import FanOut, FanOutSlot
from spdl_media.pipeline.engine.workers import TurnRunner, WorkerThreads
from spdl_media.pipeline.stages import ReadyItems, SourceConfig
from spdl_media.pipeline.stats import SinkStatistics

__all__ = ("END_OF_EPOCH", "Sink", "Source")

#: What :meth:`Sink.take` returns at the end of an epoch.
END_OF_EPOCH: Any = object()
NOTHING: Any = object()


class Source(FanOut):
    """A fan-out whose items are epochs: each time one is wanted, the source is iterated.

    A synchronous source has a thread of its own, which it may block. Items that are there already need none.

    Args:
        hub: Where turns are taken.
        config: What is iterated.

    Attributes:
        number_wanted: Epochs that were asked for and have not begun.
    """

    drops_none = False

    def __init__(self, hub: Hub, config: SourceConfig) -> None:
        # What can be iterated both ways is most often asynchronous with a fallback.
        is_async = isinstance(config.source, AsyncIterable)
        begin: Callable[[Any], Any] = aiter if is_async else iter
        self.threads = WorkerThreads(hub, f"spdl_media source {config.name}", 1)
        super().__init__(hub, begin, "source", None if is_async else self.threads)
        if type(config.source) in (list, tuple, range, ReadyItems):
            self.runner = TurnRunner(self)
        # A generator is closed in the thread that it has run in.
        self.threads.at_end = self.close_generators
        # It feeds itself, with epochs.
        self.upstream = self
        self.borrowed = config.source
        self.number_wanted = 0
        self._is_continuous = config.continuous
        self._pace = Pace(hub)

    def request_epoch(self) -> None:
        """Want one more epoch."""
        self.number_wanted += 1
        self.hub.touch(self)

    def retry(self) -> None:
        """Hand on what was refused for lack of room, and begin an epoch if one is wanted and none is open."""
        super().retry()
        if self.number_wanted and self.room() > 0:
            # A continuous source always wants the next one.
            self.number_wanted -= not self._is_continuous
            self.accept(self.borrowed)
            self.end_epoch()

    def hand_on(self) -> None:
        """Give items to the next node, and see how quickly they pass, which is as they are consumed."""
        super().hand_on()
        self._pace.look(self.counters.outputs, perf_counter())

    def note_failure(self, slot: Slot, error: BaseException, where: str = "") -> None:  # noqa: ARG002
        """Note that the source failed. It ends the run, so the error may keep its traceback."""
        slot.error = error

    def report(self, slot: FanOutSlot) -> None:
        """End the run with the epoch if it failed."""
        if slot.error is not None:
            self.hub.events.source_failed(slot.error)
        self.release(slot)

    def cut_short(self) -> None:
        """End the last epoch with what has come, however long the next item takes."""
        self.number_wanted = 0
        # A copy: settling takes the slot out.
        for slot in list(self._open):
            self.settle(slot)


class Sink:
    """The last node. The engine fills it; any number of threads and tasks may take from it.

    A consumer that finds something takes it without waking the loop, unless the pipeline has
    stalled for want of room here. One that finds nothing leaves a call by which it can be woken.

    Each item goes to one consumer, and so does the end of an epoch; without a continuous source, all
    others get the end, too, that ask before the next epoch.

    Args:
        hub: Where turns are taken.
        buffer_size: How many items may wait for the consumer.
        continuous: Whether epochs follow each other without being asked for.

    Attributes:
        slack: How many more may wait while items pass quickly, so that the loop need not be woken for each.
        has_ended: A consumer has seen the end of the epoch, and no other was asked for.
        quiet_since: When it got the last item, or the epoch began.
        look_out: What a consumer that waits calls now and then; returns when to call it again.
    """

    def __init__(self, hub: Hub, buffer_size: int, *, continuous: bool) -> None:
        self.hub = hub
        self.upstream: Any
        self.has_ended = False
        self.quiet_since = perf_counter()
        self.look_out: Callable[[], float] = lambda: math.inf
        self._delivered = 0
        self._occupied = 0
        self._waited = 0.0
        self._waiting_since: list[float] = []
        self._ready: deque[Any] = deque()
        self._waiters: deque[Callable[[], object]] = deque()
        self._buffer_size = buffer_size
        self._pace = Pace(hub)
        self.slack = 0
        self._stalled = self._has_no_limit = False
        self._ends_waiting = 0
        self._continuous = continuous
        self._closed: Callable[[], BaseException] | None = None

    def is_awaited(self) -> bool:
        """Whether items are expected, and none waits for the consumer."""
        return not self._ready and not self.has_ended

    def room(self) -> int:
        """How many more items may wait, none of the epoch after the next."""
        if self._has_no_limit:
            return sys.maxsize
        if self._ends_waiting > 1:
            return 0
        self._pace.look(self._delivered, perf_counter())
        capacity = self._buffer_size + (self.slack if self.hub.is_quick else 0)
        room = capacity - len(self._ready)
        if room <= 0:
            self._stalled = True
            # Asked again: a consumer may have looked before it could see that the engine has stalled.
            room = capacity - len(self._ready)
        return max(room, 0)

    def accept(self, item: Any) -> None:
        """Give an item to the consumers."""
        # Summed up at each delivery, for the mean.
        self._occupied += len(self._ready)
        self._ready.append(item)
        self._delivered += 1
        self.quiet_since = perf_counter()
        if self._waiters:
            self._wake_one()

    def accept_all(self) -> None:
        """Take what waits in the nodes before, as far as their results need no more calls."""
        self._has_no_limit = True
        self.upstream.hand_on()

    def end_epoch(self) -> None:
        """Tell the consumers that the epoch has ended."""
        self.hub.events.epoch_ended()
        if not self.hub.closed:
            self._ends_waiting += 1
            self._ready.append(END_OF_EPOCH)
            self._wake_one()

    def close(self, reason: Callable[[], BaseException], *, keep: bool) -> None:
        """Let consumers take what is there if it is to be kept, then raise what ``reason`` gives."""
        if not keep:
            self._ready.clear()
        self._closed = reason
        while self._waiters:
            self._wake_one()

    def statistics(self, elapsed: float, before: SinkStatistics | None = None) -> SinkStatistics:
        """Return the statistics of the last ``elapsed`` seconds, which began with the totals ``before``."""
        before = before or SinkStatistics(0, 0.0, 0.0, 0.0)
        number = self._delivered - before.number
        occupied = self._occupied - round(before.occupancy * before.number)
        now = perf_counter()
        waited = self._waited + sum(now - since for since in self._waiting_since.copy())
        return SinkStatistics(
            number=number,
            rate=number / elapsed if elapsed else 0.0,
            occupancy=occupied / number if number else 0.0,
            waited=waited - before.waited,
        )

    def take(self, timeout: float | None = None) -> Any:
        """Take an item, or ``END_OF_EPOCH``. Blocks until there is one.

        Raises:
            TimeoutError: There was none within ``timeout`` seconds.
            PipelineStopped: There will be none: the run was stopped.
            PipelineFailure: There will be none: the run failed.
        """
        item = self._pop()
        if item is NOTHING:
            return self._wait(timeout)
        if self._stalled or item is END_OF_EPOCH:
            self._note_taken(item)
        return item

    async def take_async(self) -> Any:
        """The same for a task of any event loop.

        Raises:
            PipelineStopped: There will be none: the run was stopped.
            PipelineFailure: There will be none: the run failed.
        """
        loop = asyncio.get_running_loop()
        start = perf_counter()
        self._waiting_since.append(start)
        try:
            while True:
                woken: asyncio.Future[None] = loop.create_future()
                call = functools.partial(loop.call_soon_threadsafe, wake, woken)
                self._waiters.append(call)
                try:
                    if (item := self._look()) is not NOTHING:
                        return item
                    await woken
                finally:
                    self._leave(call)
        finally:
            self._end_wait(start)

    def _wait(self, timeout: float | None) -> Any:
        tokens: SimpleQueue[None] = SimpleQueue()
        call = functools.partial(tokens.put, None)
        start = perf_counter()
        self._waiting_since.append(start)
        try:
            while True:
                self._waiters.append(call)
                try:
                    if (item := self._look()) is not NOTHING:
                        return item
                    left = math.inf if timeout is None else start + timeout - perf_counter()
                    if left <= 0:
                        raise TimeoutError(f"the pipeline gave no item within {timeout} s")
                    with contextlib.suppress(Empty):
                        # A time above TIMEOUT_MAX is an OverflowError.
                        tokens.get(timeout=min(left, self.look_out(), threading.TIMEOUT_MAX))
                finally:
                    self._leave(call)
        finally:
            self._end_wait(start)

    def _look(self) -> Any:
        """Take an item if there is one, else ``NOTHING``. Raises when there will be none."""
        if (item := self._pop()) is not NOTHING:
            self._note_taken(item)
            return item
        if self.has_ended:
            return END_OF_EPOCH
        if self._closed is not None:
            raise self._closed()
        return NOTHING

    def _pop(self) -> Any:
        # Asked first: a Ctrl-C while an IndexError is handled would print both. It still comes where another
        # consumer is quicker.
        try:
            return self._ready.popleft() if self._ready else NOTHING
        except IndexError:
            return NOTHING

    def _note_taken(self, item: Any) -> None:
        if item is END_OF_EPOCH:
            # By its one taker alone: who is told of it later must not end the next epoch.
            self.hub.post(self._make_room, 1)
            if not self._continuous:
                self.has_ended = True
                self._wake_one()
        # With slack the loop is woken when the buffer alone is left, else for each item.
        low = self._buffer_size if self.hub.is_quick and self.slack else self._buffer_size - 1
        if self._stalled and len(self._ready) <= low:
            self._stalled = False
            self.hub.post(self._make_room, 0)

    def _make_room(self, num_ends: int) -> None:
        self._ends_waiting -= num_ends
        self.upstream.retry()

    def _end_wait(self, start: float) -> None:
        self._waiting_since.remove(start)
        self._waited += perf_counter() - start

    def _leave(self, call: Callable[[], object]) -> None:
        # Asked first, as in _pop.
        if call in self._waiters:
            with contextlib.suppress(ValueError):
                self._waiters.remove(call)
                return
        # Woken, perhaps for an item that another consumer was meant to have as well.
        if self._ready or self.has_ended or self._closed is not None:
            self._wake_one()

    def _wake_one(self) -> None:
        while True:
            try:
                call = self._waiters.popleft()
            except IndexError:
                return
            # An event loop of a consumer's may have been closed while a task of it waited.
            with contextlib.suppress(RuntimeError):
                call()
                return
