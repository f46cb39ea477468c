"""The two ends of a chain: the source of items, and the buffer of results for the consumer."""

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
from spdl_media.pipeline.failures import FailureRecord
from spdl_media.pipeline.stages import ReadyItems, SourceConfig
from spdl_media.pipeline.stats import SinkStatistics

__all__ = ("END_OF_EPOCH", "Sink", "Source")

#: What :meth:`Sink.take` returns at the end of an epoch.
END_OF_EPOCH: Any = object()
NOTHING: Any = object()


class Source(FanOut):
    """A :class:`FanOut` whose items are epochs: for each requested epoch, it iterates over the source.

    A synchronous source runs in a thread of its own, which it may block. A list, tuple, range or
    :class:`ReadyItems` needs no thread.

    Args:
        hub: Hub of the run.
        config: Definition of the source.

    Attributes:
        number_wanted: Number of epochs that were requested and have not begun.
    """

    drops_none = False

    def __init__(self, hub: Hub, config: SourceConfig) -> None:
        # An object with both protocols is most often asynchronous, with a synchronous fallback.
        is_async = isinstance(config.source, AsyncIterable)
        begin: Callable[[Any], Any] = aiter if is_async else iter
        self.threads = WorkerThreads(hub, f"spdl_media source {config.name}", 1)
        super().__init__(hub, begin, "source", None if is_async else self.threads)
        if type(config.source) in (list, tuple, range, ReadyItems):
            self.runner = TurnRunner(self)
        # A generator is closed in the thread in which it ran.
        self.threads.at_end = self.close_generators
        # The source has no node before it: it accepts epochs from itself.
        self.upstream = self
        self.borrowed = config.source
        self.number_wanted = 0
        self._is_continuous = config.continuous
        self._pace = Pace(hub)

    def request_epoch(self) -> None:
        """Request one more epoch."""
        self.number_wanted += 1
        self.hub.touch(self)

    def retry(self) -> None:
        """Pass on items that the next node had no room for. Begin a requested epoch if none is open."""
        super().retry()
        if self.number_wanted and self.room() > 0:
            # The count of a continuous source stays, so the next epoch begins by itself.
            self.number_wanted -= not self._is_continuous
            self.accept(self.borrowed)
            self.end_epoch()

    def hand_on(self) -> None:
        """Pass items to the next node, and update the pace, which is that of the consumer."""
        super().hand_on()
        self._pace.look(self.counters.outputs, perf_counter())

    def note_failure(self, slot: Slot, error: BaseException, where: str = "") -> None:  # noqa: ARG002
        """Note that the source failed. This ends the run, so the error may keep its traceback."""
        slot.record = FailureRecord(self.name, "", error, "")

    def report(self, slot: FanOutSlot) -> None:
        """Release the slot of an epoch. If the source failed, the run ends with this epoch."""
        if slot.record is not None:
            self.hub.events.source_failed(slot.record.exception)
        self.release(slot)

    def cut_short(self) -> None:
        """End the current epoch after the items that have arrived, without waiting for the next one."""
        self.number_wanted = 0
        # A copy, because settling a slot removes it.
        for slot in list(self._open):
            self.settle(slot)


class Sink:
    """The last node, a buffer. The engine fills it; any number of threads and tasks may take from it.

    A consumer that finds an item takes it without waking the loop, unless the pipeline has stalled because
    this buffer was full. A thread that finds none waits in the queue itself; a task adds a function to
    ``_waiters`` that wakes it. ``NOTHING`` in the queue makes a waiting thread look at the state again.

    Each item goes to one consumer, and so does the end of an epoch. If the source is not continuous, all
    other consumers that ask before the next epoch get the end of the epoch, too.

    Args:
        hub: Hub of the run.
        buffer_size: Maximum number of items that wait for the consumer.
        continuous: Whether an epoch begins by itself when the one before has ended.

    Attributes:
        slack: Additional capacity while items pass quickly, so that not each item wakes the loop.
        has_ended: Whether a consumer has got the end of the epoch and no other epoch was requested.
        quiet_since: Time of the last item, or of the begin of the epoch.
        look_out: Called by a waiting consumer from time to time; returns the seconds until the next call.
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
        self._ready: SimpleQueue[Any] = SimpleQueue()
        self._waiters: deque[Callable[[], object]] = deque()
        self._buffer_size = buffer_size
        self._pace = Pace(hub)
        self.slack = 0
        self._stalled = self._has_no_limit = False
        self._ends_waiting = 0
        self._continuous = continuous
        self._closed: Callable[[], BaseException] | None = None

    def is_awaited(self) -> bool:
        """Whether the buffer is empty and the epoch has not ended."""
        return self._ready.empty() and not self.has_ended

    def room(self) -> int:
        """Return how many more items fit; 0 if two ends of epochs are in the buffer already."""
        if self._has_no_limit:
            return sys.maxsize
        if self._ends_waiting > 1:
            return 0
        self._pace.look(self._delivered, perf_counter())
        capacity = self._buffer_size + (self.slack if self.hub.is_quick else 0)
        room = capacity - self._ready.qsize()
        if room <= 0:
            self._stalled = True
            # Look again: a consumer may have taken an item before it could see _stalled.
            room = capacity - self._ready.qsize()
        return max(room, 0)

    def accept(self, item: Any) -> None:
        """Add an item, and wake consumers that wait."""
        # The sum over all deliveries gives the mean number of items in the buffer.
        self._occupied += self._ready.qsize()
        self._delivered += 1
        self.quiet_since = perf_counter()
        self._put(item)

    def accept_all(self) -> None:
        """Lift the limit of the buffer, and take all results that the nodes before hold already."""
        self._has_no_limit = True
        self.upstream.hand_on()

    def end_epoch(self) -> None:
        """Report the end of the epoch to the run and to the consumers."""
        self.hub.events.epoch_ended()
        if not self.hub.closed:
            self._ends_waiting += 1
            self._put(END_OF_EPOCH)

    def close(self, reason: Callable[[], BaseException], *, keep: bool) -> None:
        """Have ``take`` raise ``reason()``, with ``keep`` only after the items in the buffer were taken."""
        if not keep:
            with contextlib.suppress(Empty):
                while True:
                    self._ready.get_nowait()
        self._closed = reason
        self._put(NOTHING)

    def statistics(self, elapsed: float, before: SinkStatistics | None = None) -> SinkStatistics:
        """Return the statistics of the last ``elapsed`` seconds. ``before`` are the totals at their begin."""
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
            TimeoutError: There was no item within ``timeout`` seconds.
            PipelineStopped: There are no more items, because the run was stopped.
            PipelineFailure: There are no more items, because the run failed.
        """
        item = self._pop()
        if item is NOTHING:
            return self._wait(timeout)
        if self._stalled or item is END_OF_EPOCH:
            self._taken(item)
        return item

    async def take_async(self) -> Any:
        """Take an item, or ``END_OF_EPOCH``, in a task of any event loop.

        Raises:
            PipelineStopped: There are no more items, because the run was stopped.
            PipelineFailure: There are no more items, because the run failed.
        """
        loop = asyncio.get_running_loop()
        start = perf_counter()
        self._waiting_since.append(start)
        try:
            while True:
                # Before looking, so that no item is missed. If there is one, it is called in vain.
                woken: asyncio.Future[None] = loop.create_future()
                self._waiters.append(functools.partial(loop.call_soon_threadsafe, wake, woken))
                if (item := self._taken(self._pop())) is not NOTHING:
                    return item
                await woken
        finally:
            self._end_wait(start)

    def _wait(self, timeout: float | None) -> Any:
        start = perf_counter()
        self._waiting_since.append(start)
        item = NOTHING
        try:
            while (item := self._taken(item)) is NOTHING:
                left = math.inf if timeout is None else start + float(timeout) - perf_counter()
                if left <= 0:
                    raise TimeoutError(f"the pipeline gave no item within {timeout} s")
                with contextlib.suppress(Empty):
                    # get() raises OverflowError for a timeout above TIMEOUT_MAX.
                    item = self._ready.get(
                        timeout=min(left, self.look_out(), threading.TIMEOUT_MAX)
                    )
            return item
        finally:
            self._end_wait(start)

    def _pop(self) -> Any:
        # Check first: a Ctrl-C while Empty is handled would print both. get_nowait() may still raise when
        # another consumer is quicker.
        try:
            while not self._ready.empty():
                # A NOTHING that was left in the queue would take the room of an item.
                if (item := self._ready.get_nowait()) is not NOTHING:
                    return item
        except Empty:
            pass
        return NOTHING

    def _taken(self, item: Any) -> Any:
        """Return what a consumer that took ``item`` gets; ``NOTHING``: it has to wait. Raises when closed."""
        # With slack, wake the loop when only buffer_size items are left, otherwise for each item.
        low = self._buffer_size if self.hub.is_quick and self.slack else self._buffer_size - 1
        if self._stalled and self._ready.qsize() <= low:
            self._stalled = False
            try:
                self.hub.post(self._make_room, 0)
            except BaseException:
                # A Ctrl-C before the message was there. The consumer may go on, and would wait for ever.
                self.hub.post(self._make_room, 0)
                raise
        if item is END_OF_EPOCH:
            self.hub.post(self._make_room, 1)
            self.has_ended = not self._continuous
        elif item is not NOTHING:
            return item
        if self.has_ended:
            # Other consumers wait for the end, too.
            self._put(NOTHING)
            return END_OF_EPOCH
        if item is NOTHING and self._closed is not None:
            self._put(NOTHING)
            raise self._closed()
        return item

    def _make_room(self, num_ends: int) -> None:
        self._ends_waiting -= num_ends
        self.upstream.retry()

    def _end_wait(self, start: float) -> None:
        self._waiting_since.remove(start)
        self._waited += perf_counter() - start

    def _put(self, item: Any) -> None:
        self._ready.put(item)
        while self._waiters:
            # Another thread may have called it, or the event loop of the task has been closed.
            with contextlib.suppress(IndexError, RuntimeError):
                self._waiters.popleft()()
