"""Where results wait for the consumer, and where consumers wait for results."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any

from spdl_media.pipeline.engine.hub import Hub
from spdl_media.pipeline.engine.node import Upstream
from spdl_media.pipeline.stats import SinkStatistics

__all__ = ("END_OF_EPOCH", "Sink")

#: What :meth:`Sink.take` returns when an epoch has ended.
END_OF_EPOCH: Any = object()
NOTHING: Any = object()


class Sink:
    """The last node. The loop fills it; any number of threads and tasks may take from it.

    A consumer that finds something takes it without waking the loop, unless the pipeline has stalled
    for want of room here. One that finds nothing leaves a call by which the loop can wake it.

    Each item goes to one consumer. The end of an epoch goes to one consumer, too, and if the source is
    not continuous, to all others that ask before the next epoch.

    Args:
        hub: The loop's side.
        buffer_size: How many items may wait for the consumer.
        slack: How many more may, so that the loop need not be woken for each.
        continuous: Whether epochs follow each other without being asked for.
    """

    def __init__(self, hub: Hub, buffer_size: int, slack: int, *, continuous: bool) -> None:
        self.hub = hub
        self.upstream: Upstream
        self.delivered = 0
        self.delivered_at = perf_counter()
        self.waited = 0.0
        # What a consumer that waits calls now and then; returns when to call it again.
        self.look_out: Callable[[], float] = lambda: math.inf
        self._occupied = 0
        self._ready: deque[Any] = deque()
        self._waiters: deque[Callable[[None], None]] = deque()
        self._capacity = buffer_size + slack
        # Down to what is left of them, the loop is not woken.
        self._low = min(buffer_size, self._capacity - 1)
        self._stalled = False
        self._ends_waiting = 0
        self._continuous = continuous
        self._ended = False
        self._closed: Callable[[], BaseException] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits for the consumer."""
        return not self._ready

    @property
    def has_ended(self) -> bool:
        """Whether a consumer has seen the end of the epoch, and no other was asked for."""
        return self._ended

    # The loop's side.

    def room(self) -> int:
        """How many more items may wait, none of the epoch after the next."""
        if self._ends_waiting > 1:
            return 0
        room = self._capacity - len(self._ready)
        if room <= 0:
            self._stalled = True
            # Asked again: a consumer may have looked before it could see that the loop has stalled.
            room = self._capacity - len(self._ready)
        return max(room, 0)

    def accept(self, item: Any) -> None:
        """Give an item to the consumers."""
        self._occupied += len(self._ready)
        self._ready.append(item)
        self.delivered += 1
        self.delivered_at = perf_counter()
        if self._waiters:
            self._wake_one()

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
        """What was delivered in the last ``elapsed`` seconds, which began with the totals ``before``."""
        before = before or SinkStatistics(0, 0.0, 0.0, 0.0)
        number = self.delivered - before.number
        occupied = self._occupied - round(before.occupancy * before.number)
        return SinkStatistics(
            number=number,
            rate=number / elapsed if elapsed else 0.0,
            occupancy=occupied / number if number else 0.0,
            waited=self.waited - before.waited,
        )

    def _end_taken(self, _: None) -> None:
        self._ends_waiting -= 1
        self.upstream.retry()

    def _room_made(self, _: None) -> None:
        self.upstream.retry()

    # The consumers' side.

    def begin_epoch(self) -> None:
        """Forget that the last epoch has ended."""
        self._ended = False

    def take(self, timeout: float | None = None) -> Any:
        """Take an item, or ``END_OF_EPOCH``. Blocks until there is one.

        Raises:
            TimeoutError: There was none within ``timeout`` seconds.
            PipelineStopped, PipelineFailure: There will be none.
        """
        try:
            item = self._ready.popleft()
        except IndexError:
            start = perf_counter()
            try:
                item = self._wait(start, timeout)
            finally:
                self.waited += perf_counter() - start
        return self._taken(item)

    async def take_async(self) -> Any:
        """The same for a task of any event loop."""
        try:
            item = self._ready.popleft()
        except IndexError:
            start = perf_counter()
            try:
                item = await self._wait_async()
            finally:
                self.waited += perf_counter() - start
        return self._taken(item)

    def _taken(self, item: Any) -> Any:
        if item is END_OF_EPOCH:
            self._take_end()
        if self._stalled and len(self._ready) <= self._low:
            self._stalled = False
            self.hub.post(self._room_made, None)
        return item

    def _take_end(self) -> None:
        if not self._ended:
            self.hub.post(self._end_taken, None)
        if not self._continuous:
            self._ended = True
            self._wake_one()

    def _look(self) -> Any:
        """Take an item if there is one, else ``NOTHING``. Raises when there will be none."""
        with contextlib.suppress(IndexError):
            return self._ready.popleft()
        if self._ended:
            return END_OF_EPOCH
        if self._closed is not None:
            raise self._closed()
        return NOTHING

    def _wait(self, start: float, timeout: float | None) -> Any:
        tokens: SimpleQueue[None] = SimpleQueue()
        wake = tokens.put
        while True:
            self._waiters.append(wake)
            try:
                if (item := self._look()) is not NOTHING:
                    return item
                left = math.inf if timeout is None else start + timeout - perf_counter()
                if left <= 0:
                    raise TimeoutError(f"the pipeline gave no item within {timeout} s")
                with contextlib.suppress(Empty):
                    tokens.get(timeout=min(left, self.look_out(), threading.TIMEOUT_MAX))
            finally:
                self._leave(wake)

    async def _wait_async(self) -> Any:
        loop = asyncio.get_running_loop()
        while True:
            woken = loop.create_future()

            def wake(_: None, woken: asyncio.Future[None] = woken) -> None:
                loop.call_soon_threadsafe(_set, woken)

            self._waiters.append(wake)
            try:
                if (item := self._look()) is not NOTHING:
                    return item
                await woken
            finally:
                self._leave(wake)

    def _leave(self, wake: Callable[[None], None]) -> None:
        try:
            self._waiters.remove(wake)
        except ValueError:
            # Woken, perhaps for an item that another consumer was meant to have as well.
            if self._ready or self._closed is not None:
                self._wake_one()

    def _wake_one(self) -> None:
        while True:
            try:
                wake = self._waiters.popleft()
            except IndexError:
                return
            # An event loop of a consumer's may have been closed while a task of it waited.
            with contextlib.suppress(RuntimeError):
                wake(None)
                return


def _set(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)
