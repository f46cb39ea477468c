"""Where items come in: from a thread that iterates the source, or from a task that does."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterable, Iterable
from queue import SimpleQueue
from time import perf_counter
from typing import Any

from spdl_media.pipeline.engine.hub import Hub
from spdl_media.pipeline.engine.node import Inlet

__all__ = ("AsyncSource", "Source", "ThreadSource")

END_OF_EPOCH: Any = object()


class Source:
    """The part of a source that does not depend on who iterates it.

    Whoever iterates puts items into ``out``, and may be ``ahead`` items in front of what the next node
    has taken. An epoch is begun when it was asked for, or at once if the source is continuous.

    Attributes:
        asking_since: When the source was asked for the item that it has not given yet, on the clock of
            ``time.perf_counter``; ``None`` while nobody asks.
        given: Number of items that the next node has taken.
    """

    def __init__(self, hub: Hub, *, continuous: bool, ahead: int) -> None:
        self.hub = hub
        self.touched = False
        self.out: deque[Any] = deque()
        self.next: Inlet
        self.asking_since: float | None = None
        self.given = 0
        self.error: BaseException | None = None
        self._ahead = ahead
        # Entries of "out" that were taken, ends of epochs included; who iterates may make "ahead" more.
        self._taken = 0
        self._made = 0
        self._continuous = continuous
        self._epochs_wanted = 0
        # Merged with a source that failed: its last epoch is cut short, and when that has ended it is over.
        self._cut = False
        self._is_over = False
        self._epochs_begun = 0

    def start(self) -> None:
        """Begin to iterate as soon as an epoch is wanted."""
        raise NotImplementedError

    def stop(self) -> None:
        """Have the iteration end at the next item."""
        raise NotImplementedError

    def request_epoch(self) -> None:
        """Want one more epoch. On the loop."""
        self._epochs_wanted += 1
        self.wake()

    def wake(self) -> None:
        """Let who iterates look whether it may go on. On the loop."""
        raise NotImplementedError

    def retry(self) -> None:
        """Hand on what was refused for lack of room, if anything was."""
        if self.out:
            self.hub.touch(self)

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
                    self._end_epoch()
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

    def _end_epoch(self) -> None:
        self._is_over = self._cut
        if self.error is not None:
            self.hub.events.source_failed(self.error)
        self.next.end_epoch()

    def _may_make(self) -> bool:
        return self._made < self._taken + self._ahead

    def _may_begin(self) -> bool:
        return self._continuous or self._epochs_begun < self._epochs_wanted

    def _put(self, item: Any) -> None:
        self._made += 1
        self.out.append(item)


class ThreadSource(Source):
    """A synchronous source, iterated by a thread of its own, which it may block."""

    def __init__(
        self, hub: Hub, items: Iterable[Any], *, continuous: bool, ahead: int, name: str
    ) -> None:
        super().__init__(hub, continuous=continuous, ahead=ahead)
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._items = items
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

    def _run(self) -> None:
        while self._wait_until(self._may_begin):
            self._epochs_begun += 1
            try:
                self._iterate()
            except BaseException as error:  # noqa: BLE001  # of whatever kind, the consumer must hear of it
                self.error = error
            self.asking_since = None
            if not self._wait_until(self._may_make):
                return
            self._put(END_OF_EPOCH)
            self._announce()
            if self.error is not None:
                return

    def _iterate(self) -> None:
        self.asking_since = perf_counter()
        iterator = iter(self._items)
        try:
            while self._wait_until(self._may_make):
                self.asking_since = perf_counter()
                item = next(iterator, END_OF_EPOCH)
                self.asking_since = None
                if item is END_OF_EPOCH:
                    return
                self._put(item)
                self._announce()
        finally:
            # A generator made here is closed here, so that its "finally" runs now and in its thread; an
            # iterator of the caller's may be wanted further.
            if iterator is not self._items and (close := getattr(iterator, "close", None)):
                close()

    def _wait_until(self, condition: Any) -> bool:
        """Wait for something that the loop brings about; ``False`` when the run is over."""
        while not self.hub.closed:
            if condition():
                return True
            self._waiting = True
            # Asked again: the loop may have looked before it could see that somebody waits.
            if not condition():
                self._tokens.get()
            self._waiting = False
        return False

    def _announce(self) -> None:
        if not self._posted:
            self._posted = True
            self.hub.post(self._arrive, None)

    def _arrive(self, _: None) -> None:
        self._posted = False
        self.hub.touch(self)


class AsyncSource(Source):
    """An asynchronous source, iterated by a task."""

    def __init__(
        self, hub: Hub, items: AsyncIterable[Any], *, continuous: bool, ahead: int, name: str
    ) -> None:
        super().__init__(hub, continuous=continuous, ahead=ahead)
        self._items = items
        self._name = name
        self._waiting: asyncio.Future[None] | None = None

    def start(self) -> None:
        """Start the task."""
        self.hub.spawn(self._run(), self._name)

    def stop(self) -> None:
        """Nothing to do: the run cancels its tasks."""

    def wake(self) -> None:
        """Let the task go on, if it waits."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def _run(self) -> None:
        while not self.hub.closed:
            await self._wait_until(self._may_begin)
            self._epochs_begun += 1
            try:
                await self._iterate()
            except BaseException as error:  # as for synchronous sources
                if self.hub.closed:
                    raise
                self.error = error
            self.asking_since = None
            await self._wait_until(self._may_make)
            self._put(END_OF_EPOCH)
            self.hub.touch(self)
            if self.error is not None:
                return

    async def _iterate(self) -> None:
        iterator = aiter(self._items)
        try:
            while not self.hub.closed:
                await self._wait_until(self._may_make)
                self.asking_since = perf_counter()
                item = await anext(iterator, END_OF_EPOCH)
                self.asking_since = None
                if item is END_OF_EPOCH:
                    return
                self._put(item)
                self.hub.touch(self)
        finally:
            if iterator is not self._items and (close := getattr(iterator, "aclose", None)):
                await close()

    async def _wait_until(self, condition: Any) -> None:
        while not condition():
            self._waiting = self.hub.loop.create_future()
            await self._waiting
