"""Threads that call the functions of stages, and the hand-off between them and the event loop."""

from __future__ import annotations

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
from typing import Any, Generic, ParamSpec, Protocol, TypeAlias, TypeVar

from spdl_media.pipeline.engine.hub import Hub, Slot
from spdl_media.pipeline.failures import (
    FailureExcess,
    FailureLog,
    FailureRecord,
    PoolBroken,
    describe,
    short_repr,
)
from spdl_media.pipeline.stats import StageCounters

__all__ = (
    "BorrowedThreads",
    "Crew",
    "FailureDesk",
    "LoopExecutor",
    "OnFailure",
    "Threads",
    "Worker",
    "WorkerThreads",
)

S = TypeVar("S", bound=Slot)

LOG = logging.getLogger("spdl_media.pipeline")


class _Served(Protocol):
    """What a thread with a ticket does."""

    def serve(self, worker: Worker) -> None:
        """Work until there is nothing to do or others wait for the thread."""


class Threads(Protocol):
    """A set of threads that several stages may share. It gives each of them tickets' worth of time."""

    @property
    def workers(self) -> list[Worker]:
        """Those at work, and those given up."""

    def issue(self, served: _Served) -> None:
        """Have one thread serve, as soon as one is free."""

    def others_wait(self) -> bool:
        """Whether a ticket waits for a thread."""

    def give_up(self, worker: Worker, /) -> None:
        """Go on without a thread that does not come back from a call."""


class Worker:
    """One thread, as the event loop sees it.

    States: *idle* (``slot`` is ``None``), *in a call* (``slot`` is what it works on) and *given up*: the
    call has taken too long, somebody else has the thread's place, and it ends when the call returns.
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
        """Where the thread stands, as text."""
        frame = sys._current_frames().get(self.ident or 0)
        return "".join(traceback.format_stack(frame)) if frame is not None else ""


class WorkerThreads:
    """Daemon threads of a pipeline's own: interpreter exit does not wait for them.

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
        size: int,
        initializer: Callable[[], object] | None = None,
        *,
        stage: str = "",
    ) -> None:
        self.name = name
        self._stage = stage
        self.workers: list[Worker] = []
        self.threads: list[threading.Thread] = []
        self._hub = hub
        self.size = size
        self._initializer = initializer
        self._numbers = itertools.count(1)
        # Tickets; None ends a thread.
        self._tickets: SimpleQueue[_Served | None] = SimpleQueue()

    def start(self) -> None:
        """Start the threads."""
        for _ in range(self.size):
            self._add_thread()

    def issue(self, served: _Served) -> None:
        """Have one thread serve, as soon as one is free."""
        self._tickets.put(served)

    def others_wait(self) -> bool:
        """Whether a ticket waits for a thread."""
        return not self._tickets.empty()

    def give_up(self, _: Worker) -> None:
        """Go on without a thread that does not come back from a call: another takes its place."""
        self._add_thread()

    def stop(self) -> None:
        """Have each thread end after the call in which it is."""
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
        if not self._initialize():
            return
        while (served := self._tickets.get()) is not None:
            served.serve(worker)
            if worker.given_up:
                return

    def _initialize(self) -> bool:
        if self._initializer is None:
            return True
        try:
            self._initializer()
        except BaseException as error:  # noqa: BLE001  # of whatever kind, the run cannot go on
            self._hub.post(self._report_initializer, error)
            return False
        return True

    def _report_initializer(self, error: BaseException) -> None:
        message = f"The initializer of stage {self._stage!r} failed: {describe(error)}"
        self._hub.events.fail(self._stage, message, error)


class BorrowedThreads:
    """The threads of an executor that belongs to the caller."""

    def __init__(self, hub: Hub, executor: Executor, name: str) -> None:
        self.workers: list[Worker] = []
        self._hub = hub
        self._executor = executor
        self._name = name

    def issue(self, served: _Served) -> None:
        """Have a thread of the executor serve, as soon as one is free. On the loop."""
        try:
            ticket = self._executor.submit(self._serve, served)
        except RuntimeError as error:
            self._lost(error)
        else:
            ticket.add_done_callback(self._look_for_loss)

    def _look_for_loss(self, ticket: Future[None]) -> None:
        # Cancelled by who shuts the executor down, or never run because its initializer failed.
        error = CancelledError() if ticket.cancelled() else ticket.exception()
        if error is not None:
            self._hub.post(self._lost, error)

    def _lost(self, error: BaseException) -> None:
        broken = PoolBroken(
            f"The {type(self._executor).__name__} of stage {self._name!r} takes no more items: "
            f"{describe(error)}. It is not the pipeline's to replace; for one that is, use a description "
            "such as ThreadPoolExecutorConfig(...)."
        )
        broken.__cause__ = error
        self._hub.events.fail(self._name, str(broken), broken)

    def others_wait(self) -> bool:
        """Never: each ticket is a task of the executor, which shares its threads out."""
        return False

    def give_up(self, _: Worker) -> None:
        """The executor cannot replace a thread, so it has one less until the call returns."""

    def _serve(self, served: _Served) -> None:
        worker = Worker(threading.current_thread().name)
        worker.ident = threading.get_ident()
        self.workers.append(worker)
        try:
            served.serve(worker)
        finally:
            self.workers.remove(worker)


class Crew(Generic[S]):
    """The threads that work for one stage, at most ``limit`` at once.

    The loop puts slots into ``todo`` and issues a ticket for each thread that may come. A thread with a
    ticket takes one slot after another, so that none is taken while its taker still works on another, and
    hands its ticket back when there are no more. After each slot it looks whether other stages wait for
    threads, and queues up behind them if so.

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
        work: Callable[[S], Callable[[S], None]],
        *,
        timeout: float | None = None,
        on_timeout: Callable[[S], None] | None = None,
    ) -> None:
        self.todo: deque[S] = deque()
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
            self.threads.issue(self)
        if self._timeout is not None and self._tickets and not self._watching:
            self._watching = True
            self._hub.loop.call_later(self._timeout, self._look_for_overdue)

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
                self.threads.issue(self)
                return
        post(self._take_ticket_back, None)

    def _take_ticket_back(self, _: None) -> None:
        self._tickets -= 1
        # The slot may have come after the thread had found none.
        if self.todo:
            self.dispatch()

    def _look_for_overdue(self) -> None:
        self._watching = False
        assert self._timeout is not None
        now = perf_counter()
        waits = [self._timeout]
        for worker in list(self.threads.workers):
            slot: Any = worker.slot
            if slot is None or getattr(slot.stage, "crew", None) is not self:
                continue
            left = slot.started_at + self._timeout - now
            if left > 0:
                waits.append(left)
            elif not worker.given_up and worker.give_up(slot):
                self._go_on_without(worker, slot)
        if self._tickets and not self._hub.closed and not self._watching:
            self._watching = True
            self._hub.loop.call_later(min(waits), self._look_for_overdue)

    def _go_on_without(self, worker: Worker, slot: S) -> None:
        assert self._on_timeout is not None
        LOG.warning(
            "stage %r: a call took longer than timeout=%s s on %s; thread %s is replaced and ends when "
            "the call returns",
            slot.stage.name,
            self._timeout,
            short_repr(slot.item),
            worker.name,
        )
        self.threads.give_up(worker)
        self._tickets -= 1
        slot.fail(
            TimeoutError(f"the call took longer than timeout={self._timeout} s"),
            f"The call stood at:\n{worker.stack()}",
        )
        self._on_timeout(slot)
        self.dispatch()


P = ParamSpec("P")
T = TypeVar("T")

Task = tuple["Future[Any]", Callable[[], Any]]


class LoopExecutor(ThreadPoolExecutor):
    """A pool of daemon threads, started as they are needed.

    asyncio accepts no default executor but a ``ThreadPoolExecutor``, and the threads of that one are
    waited for at interpreter exit. This is one by name only: neither threads nor queue are the base's.
    """

    def __init__(self) -> None:
        super().__init__(max_workers=1)
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._most = min(32, (os.cpu_count() or 1) + 4)  # as asyncio's own
        self._daemons: list[threading.Thread] = []
        self._idle = 0
        self._guard = threading.Lock()
        self._is_shut = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call a function in a thread."""
        future: Future[T] = Future()
        with self._guard:
            if self._is_shut:
                raise RuntimeError("the pipeline is stopping, it starts no more calls in threads")
            self._tasks.put((future, lambda: fn(*args, **kwargs)))
            if self._idle:
                self._idle -= 1
            elif len(self._daemons) < self._most:
                self._add_thread()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002
        """Have threads end after the call in which they are. Does not wait."""
        with self._guard:
            self._is_shut = True
            for _ in self._daemons:
                self._tasks.put(None)

    def threads(self) -> list[threading.Thread]:
        """Those that were started."""
        return list(self._daemons)

    def _add_thread(self) -> None:
        name = f"spdl_media to_thread-{len(self._daemons) + 1}"
        thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._daemons.append(thread)
        thread.start()

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, call = task
            if self._is_shut:
                future.cancel()
            if future.set_running_or_notify_cancel():
                _carry_out(future, call)
            # The thread may wait for its next task for long, and would keep this one alive.
            del task, future, call
            with self._guard:
                self._idle += 1


def _carry_out(future: Future[Any], call: Callable[[], Any]) -> None:
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001  # the future carries it to whoever awaits
        future.set_exception(error)
    else:
        future.set_result(result)


OnFailure = Callable[[FailureRecord, Any], object]

# With the record that was counted: the call of a slot that was given up may fail by itself meanwhile.
_Waiting: TypeAlias = tuple[FailureRecord, Slot, Callable[[Slot], None]]


class FailureDesk:
    """Counts failures, keeps their records, calls ``on_failure``, and ends the run after too many.

    ``on_failure`` is called in a thread of its own, one failure after the other. An item leaves its stage
    only when that is done, so a slow callback slows the pipeline and nothing piles up.
    """

    def __init__(self, hub: Hub, log: FailureLog, on_failure: OnFailure | None) -> None:
        self.threads: WorkerThreads | None = None
        self._hub = hub
        self._log = log
        self._on_failure = on_failure
        self._waiting: SimpleQueue[_Waiting] = SimpleQueue()
        if on_failure is not None:
            self.threads = WorkerThreads(hub, "spdl_media on_failure", 1)

    def report(self, slot: Slot, counters: StageCounters, release: Callable[[Slot], None]) -> None:
        """Take note of a failure, then let its slot go. On the loop."""
        record = slot.record
        assert record is not None
        counters.failures += 1
        if (excess := self._log.note(record)) is not None:
            self._end_run(excess)
        if self.threads is None:
            release(slot)
        else:
            self._waiting.put((record, slot, release))
            self.threads.issue(self)

    def check_epoch(self) -> None:
        """End the run if too much of an epoch that has just ended was lost."""
        if (excess := self._log.end_epoch()) is not None:
            self._end_run(excess)

    def _end_run(self, excess: FailureExcess) -> None:
        record = excess.record
        self._hub.events.fail(record.stage, str(excess), record.exception, record.traceback)

    def serve(self, worker: Worker) -> None:
        """Call ``on_failure`` for one failure. In its thread."""
        record, slot, release = self._waiting.get()
        worker.slot = slot
        assert self._on_failure is not None
        try:
            self._on_failure(record, slot.item)
        except BaseException as error:  # noqa: BLE001  # of whatever kind, the caller must hear of it
            self._hub.post(self._blame_callback, error)
        worker.slot = None
        self._hub.post(release, slot)

    def _blame_callback(self, error: BaseException) -> None:
        self._hub.events.fail("on_failure", f"on_failure raised {describe(error)}", error)
