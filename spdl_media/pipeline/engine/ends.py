"""The two ends of a chain: where items come in, and where results wait for the consumer."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import threading
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any

from spdl_media.pipeline.engine.hub import Hub, Node, wake
from spdl_media.pipeline.stages import SourceConfig
from spdl_media.pipeline.stats import SinkStatistics

__all__ = ("AsyncSource", "Sink", "Source", "ThreadSource")

#: Stands for the end of an epoch on the way from a source, and is what :meth:`Sink.take` returns then.
END_OF_EPOCH: Any = object()
NOTHING: Any = object()


class Source(Node):
    """The part of a source that does not depend on who iterates it.

    Who iterates puts items into ``out``, at most ``ahead`` more than the next node has taken. An
    epoch begins when it was asked for, or at once if the source is continuous.

    Attributes:
        asking_since: When the source was asked for the item that it has not given yet, on the clock
            of ``time.perf_counter``; ``None`` while nobody asks.
        given: Number of items that the next node has taken.
    """

    def __init__(self, hub: Hub, config: SourceConfig, ahead: int) -> None:
        super().__init__(hub, f"spdl_media source {config.name}")
        self.asking_since: float | None = None
        self.given = 0
        self._items: Any = config.items
        self._continuous = config.continuous
        self._ahead = ahead
        # Entries of "out", ends of epochs included.
        self._taken = self._made = 0
        self._epochs_wanted = self._epochs_begun = 0
        self._error: BaseException | None = None
        # Merged with a source that failed: its last epoch is cut short, and when that has ended it is over.
        self._cut = self._is_over = False

    def start(self) -> None:
        """Begin to iterate as soon as an epoch is wanted."""
        raise NotImplementedError

    def stop(self) -> None:
        """Have the iteration end at the next item."""

    def wake(self) -> None:
        """Let who iterates look whether it may go on. On the loop."""
        raise NotImplementedError

    def request_epoch(self) -> None:
        """Want one more epoch. On the loop."""
        self._epochs_wanted += 1
        self.wake()

    def advance(self) -> None:
        """Hand items on, as many as the next node has room for."""
        out, inlet = self.out, self.next
        if self._is_over:
            out.clear()
        before = self._taken
        while out and (count := min(inlet.room(), len(out))) > 0:
            for _ in range(count):
                item = out.popleft()
                self._taken += 1
                if item is END_OF_EPOCH:
                    self._pass_end()
                    break
                inlet.accept(item)
                self.given += 1
        if self._taken > before:
            self.wake()

    def cut_short(self) -> None:
        """End the last epoch with what has come, however long the next item takes. On the loop."""
        if not self._cut:
            self._cut = True
            self.out.append(END_OF_EPOCH)
            self.hub.touch(self)

    def _pass_end(self) -> None:
        self._is_over = self._cut
        if self._error is not None:
            self.hub.events.source_failed(self._error)
        self.next.end_epoch()

    def _may_make(self) -> bool:
        return self._made < self._taken + self._ahead

    def _may_begin(self) -> bool:
        return self._continuous or self._epochs_begun < self._epochs_wanted

    async def _run(self) -> None:
        """Iterate epoch after epoch, as a task or, by a thread, without ever being suspended."""
        while await self._wait_until(self._may_begin):
            self._epochs_begun += 1
            try:
                await self._iterate()
            except BaseException as error:  # of whatever kind, the consumer must hear of it
                if self.hub.closed:
                    raise
                self._error = error
            self.asking_since = None
            if not await self._wait_until(self._may_make):
                return
            self._put(END_OF_EPOCH)
            if self._error is not None:
                return

    async def _iterate(self) -> None:
        """Put the items of one epoch, and close the iterator if it was made here."""
        raise NotImplementedError

    def _put(self, item: Any) -> None:
        self._made += 1
        self.out.append(item)
        self._announce()

    def _announce(self) -> None:
        """Have the loop hand the items on."""
        self.hub.touch(self)

    async def _wait_until(self, condition: Callable[[], bool]) -> bool:
        """Wait for something that the loop brings about; ``False`` when the run is over."""
        raise NotImplementedError


class ThreadSource(Source):
    """A synchronous source, iterated by a thread of its own, which it may block."""

    def __init__(self, hub: Hub, config: SourceConfig, ahead: int) -> None:
        super().__init__(hub, config, ahead)
        self.thread = threading.Thread(target=self._run_in_thread, name=self.name, daemon=True)
        # A token wakes the thread; one too many has it look once in vain.
        self._tokens: SimpleQueue[None] = SimpleQueue()
        self._waiting = False
        self._posted = False

    def start(self) -> None:
        """Start the thread."""
        self.thread.start()

    def stop(self) -> None:
        """Have the thread end at the next item."""
        self._tokens.put(None)

    def wake(self) -> None:
        """Let the thread go on, if it waits and is worth a switch of threads by now."""
        # Half of what it may make, so that one switch of threads serves several items.
        enough = self._taken + self._ahead - self._made >= (self._ahead + 1) // 2
        if self._waiting and enough:
            self._waiting = False
            self._tokens.put(None)

    def _run_in_thread(self) -> None:
        try:
            # What the coroutine awaits here blocks the thread instead, so one step runs all of it.
            self._run().send(None)
        except StopIteration:
            pass
        except BaseException:
            # What the source raises after the run is over is of interest to nobody.
            if not self.hub.closed:
                raise

    async def _iterate(self) -> None:
        self.asking_since = perf_counter()
        iterator = iter(self._items)
        hub, may_make = self.hub, self._may_make
        try:
            # Awaits nothing for most items: a call of a coroutine costs a tenth of what an item does.
            while (may_make() and not hub.closed) or await self._wait_until(may_make):
                self.asking_since = perf_counter()
                item = next(iterator, END_OF_EPOCH)
                self.asking_since = None
                if item is END_OF_EPOCH:
                    return
                self._put(item)
        finally:
            # Here, so that its "finally" runs now and in its thread. One of the user's may be wanted further.
            if iterator is not self._items and (close := getattr(iterator, "close", None)):
                close()

    def _announce(self) -> None:
        if not self._posted:
            self._posted = True
            self.hub.post(self._arrive, None)

    def _arrive(self, _: None) -> None:
        self._posted = False
        self.hub.touch(self)

    async def _wait_until(self, condition: Callable[[], bool]) -> bool:
        while not self.hub.closed:
            if condition():
                return True
            self._waiting = True
            # Asked again: the loop may have looked before it could see that somebody waits.
            if not condition():
                self._tokens.get()
            self._waiting = False
        return False


class AsyncSource(Source):
    """An asynchronous source, iterated by a task. The run cancels it at its end."""

    _woken: asyncio.Future[None] | None = None

    def start(self) -> None:
        """Start the task."""
        self.hub.spawn(self._run(), self.name)

    def wake(self) -> None:
        """Let the task go on, if it waits."""
        if self._woken is not None:
            wake(self._woken)

    async def _wait_until(self, condition: Callable[[], bool]) -> bool:
        while not condition():
            self._woken = self.hub.loop.create_future()
            await self._woken
        return not self.hub.closed

    async def _iterate(self) -> None:
        self.asking_since = perf_counter()
        iterator = aiter(self._items)
        try:
            while await self._wait_until(self._may_make):
                self.asking_since = perf_counter()
                item = await anext(iterator, END_OF_EPOCH)
                self.asking_since = None
                if item is END_OF_EPOCH:
                    return
                self._put(item)
        finally:
            if iterator is not self._items and (close := getattr(iterator, "aclose", None)):
                await close()


class Sink:
    """The last node. The loop fills it; any number of threads and tasks may take from it.

    A consumer that finds something takes it without waking the loop, unless the pipeline has
    stalled for want of room here. One that finds nothing leaves a call by which the loop can wake it.

    Each item goes to one consumer, and so does the end of an epoch; without a continuous source, all
    others get the end, too, that ask before the next epoch.

    Args:
        hub: The loop's side.
        buffer_size: How many items may wait for the consumer.
        slack: How many more may, so that the loop need not be woken for each.
        continuous: Whether epochs follow each other without being asked for.

    Attributes:
        has_ended: A consumer has seen the end of the epoch, and no other was asked for.
        look_out: What a consumer that waits calls now and then; returns when to call it again.
    """

    def __init__(self, hub: Hub, buffer_size: int, slack: int, *, continuous: bool) -> None:
        self.hub = hub
        self.upstream: Any
        self.has_ended = False
        self.delivered_at = perf_counter()
        self.look_out: Callable[[], float] = lambda: math.inf
        self._delivered = 0
        self._occupied = 0
        self._waited = 0.0
        self._ready: deque[Any] = deque()
        self._waiters: deque[Callable[[], object]] = deque()
        self._capacity = buffer_size + slack
        # Down to what is left of them, the loop is not woken.
        self._low = min(buffer_size, self._capacity - 1)
        self._stalled = False
        self._ends_waiting = 0
        self._continuous = continuous
        self._closed: Callable[[], BaseException] | None = None

    def is_awaited(self) -> bool:
        """Whether items are expected, and none waits for the consumer."""
        return not self._ready and not self.has_ended

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
        self._delivered += 1
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
        number = self._delivered - before.number
        occupied = self._occupied - round(before.occupancy * before.number)
        return SinkStatistics(
            number=number,
            rate=number / elapsed if elapsed else 0.0,
            occupancy=occupied / number if number else 0.0,
            waited=self._waited - before.waited,
        )

    def _make_room(self, num_ends: int) -> None:
        self._ends_waiting -= num_ends
        self.upstream.retry()

    def take(self, timeout: float | None = None) -> Any:
        """Take an item, or ``END_OF_EPOCH``. Blocks until there is one.

        Raises:
            TimeoutError: There was none within ``timeout`` seconds.
            PipelineStopped: There will be none: the run was stopped.
            PipelineFailure: There will be none: the run failed.
        """
        try:
            item = self._ready.popleft()
        except IndexError:
            start = perf_counter()
            try:
                item = self._wait(start, timeout)
            finally:
                self._waited += perf_counter() - start
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
                self._waited += perf_counter() - start
        return self._taken(item)

    def _taken(self, item: Any) -> Any:
        if item is END_OF_EPOCH:
            if not self.has_ended:
                self.hub.post(self._make_room, 1)
            if not self._continuous:
                self.has_ended = True
                self._wake_one()
        if self._stalled and len(self._ready) <= self._low:
            self._stalled = False
            self.hub.post(self._make_room, 0)
        return item

    def _look(self) -> Any:
        """Take an item if there is one, else ``NOTHING``. Raises when there will be none."""
        with contextlib.suppress(IndexError):
            return self._ready.popleft()
        if self.has_ended:
            return END_OF_EPOCH
        if self._closed is not None:
            raise self._closed()
        return NOTHING

    def _wait(self, start: float, timeout: float | None) -> Any:
        tokens: SimpleQueue[None] = SimpleQueue()
        call = functools.partial(tokens.put, None)
        while True:
            self._waiters.append(call)
            try:
                if (item := self._look()) is not NOTHING:
                    return item
                left = math.inf if timeout is None else start + timeout - perf_counter()
                if left <= 0:
                    raise TimeoutError(f"the pipeline gave no item within {timeout} s")
                with contextlib.suppress(Empty):
                    tokens.get(timeout=min(left, self.look_out(), threading.TIMEOUT_MAX))
            finally:
                self._leave(call)

    async def _wait_async(self) -> Any:
        loop = asyncio.get_running_loop()
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

    def _leave(self, call: Callable[[], object]) -> None:
        try:
            self._waiters.remove(call)
        except ValueError:
            # Woken, perhaps for an item that another consumer was meant to have as well.
            if self._ready or self._closed is not None:
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
