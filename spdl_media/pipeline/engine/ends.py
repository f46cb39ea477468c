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

from spdl_media.pipeline.engine.hub import Hub, Inlet, Pace, Slot, wake
from spdl_media.pipeline.engine.nodes import FanOut, FanOutSlot
from spdl_media.pipeline.engine.workers import TurnRunner, WorkerThreads
from spdl_media.pipeline.failures import FailureRecord
from spdl_media.pipeline.stages import OwnSource, SourceConfig
from spdl_media.pipeline.stats import SinkStatistics

#: What :meth:`Sink.take` returns at the end of an epoch.
END_OF_EPOCH: Any = object()
NOTHING: Any = object()


class Source(FanOut):
    """A :class:`FanOut` whose items are epochs: for each requested epoch, it iterates over the source.

    A synchronous source runs in a thread of its own, which it may block. A list, tuple, range or
    :class:`OwnSource` that is ready needs no thread.

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
        self.threads = WorkerThreads(hub, f"spdl_media source {config.name}", 1)
        begin: Callable[[Any], Any] = aiter if is_async else self._open_here
        super().__init__(hub, begin, "source", None if is_async else self.threads)
        source = config.source
        is_ready = isinstance(source, OwnSource) and source.is_ready
        if is_ready or type(source) in (list, tuple, range):
            self.runner, self.fn = TurnRunner(self), iter
        self._last: Any = None
        self.threads.at_end = lambda: self.close(self._last)
        # The source has no node before it: it accepts epochs from itself.
        self.before.append(self)
        self.borrowed = config.source
        self.number_wanted = 0
        self._is_continuous = config.continuous
        self._pace = Pace(hub)

    def _open_here(self, source: Any) -> Any:
        # Kept for the thread, which closes it at its end: the run may have dropped the slot before.
        self._last = iter(source)
        return self._last

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
            self.end()

    def hand_on(self) -> None:
        """Pass items to the next node, and update the pace, which is that of the consumer."""
        super().hand_on()
        self._pace.look(self.counters.outputs, perf_counter())

    def note_failure(self, slot: Slot, error: BaseException) -> None:
        """Note that the source failed. This ends the run, so the error may keep its traceback."""
        slot.record = FailureRecord(self.name, "", error, "")

    def report(self, slot: FanOutSlot) -> None:
        """Release the slot of an epoch. If the source failed, the run ends with this epoch."""
        if slot.record is not None:
            self.hub.events.source_failed(slot.record.exception)
        self._last = None
        self.release(slot)

    def cut_short(self) -> None:
        """End the current epoch after the items that have arrived, without waiting for the next one."""
        self.number_wanted = 0
        # A copy, because settling a slot removes it.
        for slot in list(self._open):
            self.settle(slot)


class Sink(Inlet):
    """The last node, a buffer. The engine fills it; any number of threads and tasks may take from it.

    A consumer that finds an item takes it without waking the loop, unless the pipeline has stalled because
    this buffer was full. A consumer that finds none adds a function to ``_waiters`` that wakes it.

    Each item goes to one consumer, and so does the end of an epoch. If the source is not continuous, all
    other consumers that ask before the next epoch get the end of the epoch, too.

    Args:
        hub: Hub of the run.
        buffer_size: Maximum number of items that wait for the consumer.
        continuous: Whether an epoch begins by itself when the one before has ended.

    Attributes:
        delivered: Number of items that were added to the buffer.
        slack: Additional capacity while items pass quickly, so that not each item wakes the loop.
        quiet_since: Time of the last item, or of the begin of the epoch.
        look_out: Called by a waiting consumer from time to time; returns the seconds until the next call.
    """

    def __init__(self, hub: Hub, buffer_size: int, *, continuous: bool) -> None:
        super().__init__()
        self.hub = hub
        self.quiet_since = perf_counter()
        self.look_out: Callable[[], float] = lambda: math.inf
        self.delivered = 0
        self._occupied = 0
        self._waited = 0.0
        # Several consumers add to the sum. Reentrant, because a signal handler may take an item, too.
        self._adding = threading.RLock()
        self._waiting_since: list[float] = []
        self._ready: deque[Any] = deque()
        self._waiters: deque[Callable[[], object]] = deque()
        self._buffer_size = buffer_size
        self._pace = Pace(hub)
        self.slack = 0
        self._stalled = self._has_no_limit = False
        self._ends_waiting = 0
        # If the source is not continuous: an object per end, because a consumer may note it as taken when
        # another one has requested the next epoch already.
        self._end: object = None
        self._taken_end: object = None
        self._continuous = continuous
        self._closed: Callable[[], BaseException] | None = None

    def is_awaited(self) -> bool:
        """Whether the buffer is empty and the epoch has not ended."""
        return not self._ready and self._end is None

    def has_ended(self) -> bool:
        """Whether a consumer has got the end of the epoch and no other epoch was requested."""
        return self._end is not None and self._end is self._taken_end

    def begin_epoch(self) -> None:
        """Note that another epoch is requested."""
        self._end = None

    def room(self) -> int:
        """Return how many more items fit; 0 if two ends of epochs are in the buffer already."""
        if self._has_no_limit:
            return sys.maxsize
        if self._ends_waiting > 1:
            return 0
        self._pace.look(self.delivered, perf_counter())
        capacity = self._buffer_size + (self.slack if self.hub.is_quick else 0)
        room = capacity - len(self._ready)
        if room <= 0:
            self._stalled = True
            # Look again: a consumer may have taken an item before it could see _stalled.
            room = capacity - len(self._ready)
        return max(room, 0)

    def accept(self, item: Any) -> None:
        """Add an item, and wake a consumer that waits."""
        # The sum over all deliveries gives the mean number of items in the buffer.
        self._occupied += len(self._ready)
        self._ready.append(item)
        self.delivered += 1
        self.quiet_since = perf_counter()
        if self._waiters:
            self._wake_one()

    def accept_all(self) -> None:
        """Lift the limit of the buffer, and take all results that the nodes before hold already."""
        self._has_no_limit = True
        for node in self.before:
            if not node.has_ended:
                node.hand_on()

    def end(self) -> None:
        """Report the end of the epoch to the run and to the consumers."""
        self.hub.events.epoch_ended()
        if self.hub.closed:
            return
        if self._continuous:
            self._ends_waiting += 1
            self._ready.append(END_OF_EPOCH)
        else:
            # It stays if a Ctrl-C interrupts the consumer that takes it, unlike an item.
            self._end = object()
        self._wake_one()

    def close(self, reason: Callable[[], BaseException], *, keep: bool) -> None:
        """Have ``take`` raise ``reason()``, with ``keep`` only after the items in the buffer were taken."""
        if not keep:
            self._ready.clear()
            self._end = self._end if self.has_ended() else None
        self._closed = reason
        while self._waiters:
            self._wake_one()

    def statistics(self, elapsed: float, before: SinkStatistics | None = None) -> SinkStatistics:
        """Return the statistics of the last ``elapsed`` seconds. ``before`` are the totals at their begin."""
        before = before or SinkStatistics(0, 0.0, 0.0, 0.0)
        number = self.delivered - before.number
        occupied = self._occupied - round(before.occupancy * before.number)
        now = perf_counter()
        waited = self._waited + sum(now - since for since in self._waiting_since.copy())
        rate = number / elapsed if elapsed else 0.0
        occupancy = occupied / number if number else 0.0
        return SinkStatistics(number, rate, occupancy, waited - before.waited)

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
            self._note_taken(item)
        return item

    async def take_async(self) -> Any:
        """Take an item, or ``END_OF_EPOCH``, in a task of any asyncio event loop.

        Raises:
            PipelineStopped: There are no more items, because the run was stopped.
            PipelineFailure: There are no more items, because the run failed.
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
                    if (item := self._try_take()) is not NOTHING:
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
                try:
                    self._waiters.append(call)
                    if (item := self._try_take()) is not NOTHING:
                        return item
                    left = math.inf if timeout is None else start + float(timeout) - perf_counter()
                    if left <= 0:
                        raise TimeoutError(f"the pipeline gave no item within {timeout} s")
                    with contextlib.suppress(Empty):
                        # get() raises OverflowError for a timeout above TIMEOUT_MAX.
                        tokens.get(timeout=min(left, self.look_out(), threading.TIMEOUT_MAX))
                finally:
                    try:
                        self._leave(call)
                    except BaseException:
                        # After a Ctrl-C, it could be woken instead of one that waits.
                        self._leave(call)
                        raise
        finally:
            self._end_wait(start)

    def _try_take(self) -> Any:
        """Take an item, or return ``NOTHING`` if the buffer is empty. Raises when the sink was closed."""
        # Look first: the last item may arrive after _pop, and the end directly after it.
        end = self._end
        if (item := self._pop()) is not NOTHING:
            self._note_taken(item)
            return item
        if end is not None:
            self._taken_end = end
            return END_OF_EPOCH
        if self._closed is not None:
            raise self._closed()
        return NOTHING

    def _pop(self) -> Any:
        # Check first: a Ctrl-C while an IndexError is handled would print both. popleft() may still raise
        # when another consumer is quicker.
        try:
            return self._ready.popleft() if self._ready else NOTHING
        except IndexError:
            return NOTHING

    def _note_taken(self, item: Any) -> None:
        if item is END_OF_EPOCH:
            self.hub.post(self._make_room, 1)
        # With slack, wake the loop when only buffer_size items are left, otherwise for each item.
        low = self._buffer_size if self.hub.is_quick and self.slack else self._buffer_size - 1
        if self._stalled and len(self._ready) <= low:
            self._stalled = False
            # Not in interrupts_delayed(), which takes several microseconds, as long as a quick item.
            try:
                self.hub.post(self._make_room, 0)
            except BaseException:
                # A Ctrl-C before the message was there. The consumer may go on, and would wait for ever.
                self.hub.post(self._make_room, 0)
                raise

    def _make_room(self, num_ends: int) -> None:
        self._ends_waiting -= num_ends
        self.retry_before()

    def _end_wait(self, start: float) -> None:
        self._waiting_since.remove(start)
        waited = perf_counter() - start
        with self._adding:
            self._waited += waited

    def _leave(self, call: Callable[[], object]) -> None:
        # Check first, as in _pop.
        if call in self._waiters:
            with contextlib.suppress(ValueError):
                self._waiters.remove(call)
                return
        # This consumer was woken and leaves: if there is something to take, wake another one.
        if self._ready or self._end is not None or self._closed is not None:
            self._wake_one()

    def _wake_one(self) -> None:
        while True:
            try:
                call = self._waiters.popleft()
            except IndexError:
                return
            # The consumer's event loop may have been closed while one of its tasks waited.
            with contextlib.suppress(RuntimeError):
                call()
                return
