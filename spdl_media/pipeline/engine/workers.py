"""Threads that call the functions of stages, and the hand-off between them and the event loop."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from queue import SimpleQueue
from time import perf_counter
from typing import Any, ParamSpec, TypeAlias, TypeVar

from spdl_media.pipeline.engine.hub import Hub, Slot
from spdl_media.pipeline.executors import NOT_OURS, pool_broken
from spdl_media.pipeline.failures import (
    FailureExcess,
    FailureLog,
    FailureRecord,
    describe,
    short_repr,
)
from spdl_media.pipeline.stats import StageCounters

__all__ = (
    "BorrowedThreads",
    "FailureHandler",
    "LoopExecutor",
    "OnFailure",
    "Threads",
    "Worker",
    "WorkerGroup",
    "WorkerThreads",
)

LOG = logging.getLogger("spdl_media.pipeline")

P = ParamSpec("P")
T = TypeVar("T")

OnFailure = Callable[[FailureRecord, Any], object]
Release: TypeAlias = Callable[[Any], None]


class Worker:
    """One thread, as the event loop sees it.

    States: *idle* (``slot`` is ``None``), *in a call* (for ``slot``) and *given up*: the call has
    taken too long, another thread took its place, and it ends when the call returns.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.ident: int | None = None
        self.slot: Slot | None = None
        self.given_up = False
        # Held by both sides to settle who is first when a call returns just as it is given up.
        self.lock = threading.Lock()

    def leave_call(self) -> bool:
        """Say that the call has returned; ``False`` if it had been given up before."""
        with self.lock:
            self.slot = None
            return not self.given_up

    def give_up(self, slot: Slot) -> bool:
        """Give the thread up if it is still in the call that ``slot`` is for."""
        with self.lock:
            self.given_up = self.slot is slot
            return self.given_up

    def stack(self) -> str:
        """The stack of the thread, as text."""
        frame = sys._current_frames().get(self.ident or 0)
        return "".join(traceback.format_stack(frame)) if frame is not None else ""


#: What a thread with a ticket calls: works until there is nothing to do or others wait for the thread.
Serve: TypeAlias = Callable[[Worker], None]


class Threads:
    """A set of threads that several stages may share. They ask for time on them by tickets.

    Attributes:
        workers: The threads at work, and those given up.
    """

    def __init__(self, hub: Hub, name: str) -> None:
        self.name = name
        self.workers: list[Worker] = []
        self._hub = hub

    def issue(self, serve: Serve) -> None:
        """Have one thread call ``serve``, as soon as one is free."""
        raise NotImplementedError

    def others_wait(self) -> bool:
        """Whether a ticket waits for a thread."""
        return False

    def replace(self, worker: Worker) -> None:
        """Go on without a thread that does not come back from a call."""


class WorkerThreads(Threads):
    """Daemon threads of the pipeline: interpreter exit does not wait for them.

    Args:
        hub: Where outcomes go.
        name: Prefix of the threads' names.
        size: Number of threads.
        initializer: Called by each thread first. When it raises, the run ends.
        stage: Name of the stage that they serve alone.
    """

    def __init__(
        self,
        hub: Hub,
        name: str,
        size: int = 0,
        initializer: Callable[[], object] | None = None,
        *,
        stage: str = "",
    ) -> None:
        super().__init__(hub, name)
        self.threads: list[threading.Thread] = []
        self.size = size
        self._stage = stage
        self._initializer = initializer
        self._numbers = itertools.count(1)
        # None ends a thread.
        self._tickets: SimpleQueue[Serve | None] = SimpleQueue()

    def start(self) -> None:
        """Start the threads."""
        for _ in range(self.size):
            self._add_thread()

    def issue(self, serve: Serve) -> None:
        """Have one thread call ``serve``, as soon as one is free."""
        self._tickets.put(serve)

    def others_wait(self) -> bool:
        """Whether a ticket waits for a thread."""
        return not self._tickets.empty()

    def replace(self, worker: Worker) -> None:  # noqa: ARG002  # it ends by itself
        """Put another thread in the place of one that does not come back from a call."""
        self._add_thread()

    def stop(self) -> None:
        """Have each thread end after its current call."""
        for _ in self.threads:
            self._tickets.put(None)

    def _add_thread(self) -> None:
        worker = Worker(f"{self.name}-{next(self._numbers)}")
        thread = threading.Thread(target=self._run, args=(worker,), name=worker.name, daemon=True)
        self.workers.append(worker)
        self.threads.append(thread)
        thread.start()

    def _run(self, worker: Worker) -> None:
        worker.ident = threading.get_ident()
        try:
            if self._initializer is not None:
                self._initializer()
        except BaseException as error:  # noqa: BLE001  # of whatever kind, the run cannot go on
            self._hub.post(self._report_initializer, error)
            return
        while (serve := self._tickets.get()) is not None:
            serve(worker)
            if worker.given_up:
                return
            # The thread may wait for its next ticket for long, and this one may hold an item.
            del serve

    def _report_initializer(self, error: BaseException) -> None:
        message = f"The initializer of stage {self._stage!r} failed: {describe(error)}"
        self._hub.events.fail(self._stage, message, error)


class BorrowedThreads(Threads):
    """The threads of an executor that belongs to the user. It cannot replace a thread.

    Each ticket is a task of the executor, which shares its threads out.
    """

    def __init__(self, hub: Hub, name: str, executor: Executor) -> None:
        super().__init__(hub, name)
        self._executor = executor

    def issue(self, serve: Serve) -> None:
        """Have a thread of the executor call ``serve``, as soon as one is free. On the loop."""
        try:
            ticket = self._executor.submit(self._serve, serve)
        except RuntimeError as error:
            self._report_loss(error)
        else:
            ticket.add_done_callback(self._look_for_loss)

    def _look_for_loss(self, ticket: Future[None]) -> None:
        # Cancelled by who shuts the executor down, or never run because its initializer failed.
        error = CancelledError() if ticket.cancelled() else ticket.exception()
        if error is not None:
            self._hub.post(self._report_loss, error)

    def _report_loss(self, error: BaseException) -> None:
        remedy = NOT_OURS.format("ThreadPoolExecutorConfig")
        broken = pool_broken(self._executor, self.name, error, remedy)
        self._hub.events.fail(self.name, str(broken), broken)

    def _serve(self, serve: Serve) -> None:
        worker = Worker(threading.current_thread().name)
        worker.ident = threading.get_ident()
        self.workers.append(worker)
        try:
            serve(worker)
        finally:
            self.workers.remove(worker)


class WorkerGroup:
    """The threads that work for one stage, at most ``limit`` at once.

    The loop puts slots into ``todo`` and issues a ticket for each thread that may come. A thread
    with a ticket takes one slot after another, so that none is taken while its taker still works on
    another, and hands its ticket back when there are no more. After each slot it looks whether
    other stages wait for threads, and queues up behind them if so.

    Args:
        hub: Where outcomes go.
        threads: Who does the work.
        limit: How many may work at once.
        work: Called by a thread with a slot; returns what the loop calls with the slot afterwards.
        timeout: Seconds that the work may take.
        on_timeout: Called on the loop with a slot that took longer, whose thread was given up.
    """

    def __init__(
        self,
        hub: Hub,
        threads: Threads,
        limit: int,
        work: Callable[[Any], Callable[[Any], None]],
        timeout: float | None,
        on_timeout: Callable[[Any], None],
    ) -> None:
        self.todo: deque[Any] = deque()
        self.threads = threads
        self._hub = hub
        self._limit = limit
        self._tickets = 0
        self._work = work
        self._timeout = timeout
        self._on_timeout = on_timeout
        self._watching = False

    def dispatch(self) -> None:
        """Issue as many tickets as there is work for. On the loop."""
        for _ in range(min(self._limit - self._tickets, len(self.todo))):
            self._tickets += 1
            self.threads.issue(self.serve)
        if self._timeout is not None:
            self._look_again_in(self._timeout)

    def serve(self, worker: Worker) -> None:
        """Work until there is nothing to do or others wait for the thread. In a worker thread."""
        hub, todo, work, timed = self._hub, self.todo, self._work, self._timeout is not None
        post, others_wait = hub.post, self.threads.others_wait
        while not hub.closed:
            try:
                slot = todo.popleft()
            except IndexError:
                break
            slot.started_at = perf_counter()
            worker.slot = slot
            handler = work(slot)
            if not timed:
                worker.slot = None
            elif not worker.leave_call():
                return
            post(handler, slot)
            if others_wait():
                self.threads.issue(self.serve)
                return
        post(self._take_ticket_back, None)

    def _take_ticket_back(self, _: None) -> None:
        self._tickets -= 1
        # The slot may have come after the thread had found none.
        if self.todo:
            self.dispatch()

    def _look_again_in(self, seconds: float) -> None:
        if self._tickets and not self._watching and not self._hub.closed:
            self._watching = True
            self._hub.loop.call_later(seconds, self._look_for_overdue)

    def _look_for_overdue(self) -> None:
        self._watching = False
        timeout = self._timeout
        assert timeout is not None
        now = perf_counter()
        waits = [timeout]
        for worker in list(self.threads.workers):
            slot: Any = worker.slot
            # The thread may be in a call of another stage that shares it.
            if slot is None or getattr(slot.stage, "group", None) is not self:
                continue
            left = slot.started_at + timeout - now
            if left > 0:
                waits.append(left)
            elif not worker.given_up and worker.give_up(slot):
                self._go_on_without(worker, slot)
        self._look_again_in(min(waits))

    def _go_on_without(self, worker: Worker, slot: Slot) -> None:
        LOG.warning(
            "stage %r: a call took longer than timeout=%s s on %s; thread %s is replaced and ends when "
            "the call returns",
            slot.stage.name,
            self._timeout,
            short_repr(slot.item),
            worker.name,
        )
        self.threads.replace(worker)
        self._tickets -= 1
        slot.fail(
            TimeoutError(f"the call took longer than timeout={self._timeout} s"),
            f"The call stood at:\n{worker.stack()}",
        )
        self._on_timeout(slot)
        self.dispatch()


class LoopExecutor(ThreadPoolExecutor):
    """Daemon threads for ``asyncio.to_thread`` in a pipeline, started as they are needed."""

    # By name only: asyncio accepts no other default executor, and interpreter exit waits for its threads.
    def __init__(self) -> None:
        super().__init__(max_workers=1)
        self.threads: list[threading.Thread] = []
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._most = min(32, (os.cpu_count() or 1) + 4)  # as asyncio's own
        self._idle = threading.Semaphore(0)
        self._guard = threading.Lock()
        self._is_shut = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call a function in a thread.

        Raises:
            RuntimeError: The run is ending.
        """
        future: Future[T] = Future()
        with self._guard:
            if self._is_shut:
                raise RuntimeError("the pipeline is stopping, it starts no more calls in threads")
            self._calls.put((future, functools.partial(fn, *args, **kwargs)))
            if not self._idle.acquire(blocking=False) and len(self.threads) < self._most:
                name = f"spdl_media to_thread-{len(self.threads) + 1}"
                self.threads.append(threading.Thread(target=self._serve, name=name, daemon=True))
                self.threads[-1].start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002
        """Have each thread end after its current call. Does not wait."""
        with self._guard:
            self._is_shut = True
            for _ in self.threads:
                self._calls.put(None)

    def _serve(self) -> None:
        while (task := self._calls.get()) is not None:
            future, call = task
            if self._is_shut:
                future.cancel()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:  # noqa: BLE001  # the future carries it to whoever awaits
                    future.set_exception(error)
            # The thread may wait for its next task for long, and would keep this one alive.
            del task, future, call
            self._idle.release()


class FailureHandler:
    """Counts failures, keeps their records, calls ``on_failure``, and ends the run after too many.

    ``on_failure`` is called in a thread of its own, one failure after the other. An item leaves its
    stage only when that is done, so a slow callback slows the pipeline and nothing piles up.

    Attributes:
        threads: The thread for ``on_failure``; ``None`` without a callback.
    """

    def __init__(self, hub: Hub, log: FailureLog, on_failure: OnFailure | None) -> None:
        self.threads: WorkerThreads | None = None
        if on_failure is not None:
            self.threads = WorkerThreads(hub, "spdl_media on_failure", 1)
        self._hub = hub
        self._log = log
        self._on_failure = on_failure

    def report(self, slot: Slot, counters: StageCounters, release: Release) -> None:
        """Count a failure, then let its slot go. On the loop."""
        # Read now: the call of a slot that was given up may fail by itself meanwhile.
        record = slot.record
        assert record is not None
        counters.failures += 1
        self._end_run_after(self._log.note(record))
        if self.threads is None:
            release(slot)
        else:
            self.threads.issue(functools.partial(self._call_back, record, slot, release))

    def check_epoch(self) -> None:
        """End the run if too much of an epoch that has just ended was lost."""
        self._end_run_after(self._log.end_epoch())

    def _end_run_after(self, excess: FailureExcess | None) -> None:
        if excess is not None:
            record = excess.record
            self._hub.events.fail(record.stage, str(excess), record.exception, record.traceback)

    def _call_back(
        self, record: FailureRecord, slot: Slot, release: Release, worker: Worker
    ) -> None:
        worker.slot = slot
        assert self._on_failure is not None
        try:
            self._on_failure(record, slot.item)
        except BaseException as error:  # noqa: BLE001  # of whatever kind, the user must hear of it
            self._hub.post(self._report_callback, error)
        worker.slot = None
        self._hub.post(release, slot)

    def _report_callback(self, error: BaseException) -> None:
        self._hub.events.fail("on_failure", f"on_failure raised {describe(error)}", error)
