"""Runners, which make the calls of stages: in threads, in tasks of the event loop, or in the turn itself."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from time import perf_counter
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar

from spdl_media.pipeline.engine.hub import Hub, Slot, wake
from spdl_media.pipeline.failures import describe, short_repr

if TYPE_CHECKING:
    from spdl_media.pipeline.engine.nodes import Stage


LOG = logging.getLogger("spdl_media.pipeline")

P = ParamSpec("P")
T = TypeVar("T")


class Worker(threading.Thread):
    """A daemon thread: interpreter exit does not wait for it.

    States: *idle* (``slot`` is ``None``), *in a call* (for ``slot``) and *given up*: the call took too long,
    another thread replaces this one, and this one ends when the call returns.
    """

    def __init__(self, threads: WorkerThreads, name: str) -> None:
        super().__init__(target=threads.serve, args=(self,), name=name, daemon=True)
        self.slot: Slot | None = None
        self.given_up = False
        # Decides which comes first when a call returns while it is being given up.
        self._guard = threading.Lock()

    def leave_call(self) -> bool:
        """Note that the call has returned. Return ``False`` if it was given up before."""
        with self._guard:
            self.slot = None
            return not self.given_up

    def give_up(self, slot: Slot) -> bool:
        """Give up the thread if it is still in the call of ``slot``. Return whether it is."""
        with self._guard:
            self.given_up = self.slot is slot
            return self.given_up


#: A ticket: a thread calls it once, and it works until there is nothing to do or other tickets wait. It
#: returns whether it has queued itself again.
Serve: TypeAlias = Callable[[Worker], bool]


class WorkerThreads:
    """A thread pool that several stages may share. Threads are started when they are needed.

    Args:
        hub: Hub of the run.
        name: Prefix of the threads' names.
        size: Maximum number of threads.

    Attributes:
        workers: The threads that have not ended.
        at_end: Called by each thread last.
    """

    def __init__(self, hub: Hub, name: str, size: int = 0) -> None:
        self.workers: list[Worker] = []
        self.size = size
        self.at_end: Callable[[], object] = lambda: None
        self._hub = hub
        self._name = name
        self._numbers = itertools.count(1)
        # Not counting threads that replaced others.
        self._num_started = 0
        # A thread that gets None ends.
        self._tickets: SimpleQueue[Serve | None] = SimpleQueue()
        # A counter of idle threads: one entry each, because append and pop of a list are atomic.
        self._idle: list[None] = []
        hub.threads.append(self)

    def issue(self, serve: Serve) -> None:
        """Have one thread call ``serve``, as soon as a thread is free."""
        self._tickets.put(serve)
        if self._idle:
            self._idle.pop()
        elif self._num_started < self.size and not self._hub.closed:
            self._num_started += 1
            self.add_thread()

    def requeue(self, serve: Serve) -> bool:
        """Put ``serve`` behind waiting tickets; return whether there were any. In a worker thread."""
        if self._tickets.empty():
            return False
        self._tickets.put(serve)
        return True

    def add_thread(self) -> None:
        """Start one more thread, for example to replace one whose call does not return."""
        worker = Worker(self, f"{self._name}-{next(self._numbers)}")
        self.workers.append(worker)
        try:
            worker.start()
        # The system has no more threads, or the interpreter is exiting.
        except RuntimeError as error:
            self.workers.remove(worker)
            message = f"The pipeline cannot start its threads: {error}"
            self._hub.events.fail("pipeline", message, error)

    def stop(self) -> None:
        """Have each thread end after its current call."""
        # A copy, because each thread takes one None and then removes itself.
        for _ in self.workers.copy():
            self._tickets.put(None)

    def serve(self, worker: Worker) -> None:
        """Call tickets until the thread has to end. This is the main function of each thread."""
        try:
            while (serve := self._tickets.get()) is not None:
                is_requeued = serve(worker)
                # Another thread has replaced this one.
                if worker.given_up:
                    break
                # The thread may wait long for its next ticket, and this one may hold an item in memory.
                del serve
                # A requeued ticket still needs this thread, which therefore does not count as idle.
                if not is_requeued:
                    self._idle.append(None)
            self.at_end()
        except BaseException as error:  # noqa: BLE001  # whatever it is, the run cannot continue
            message = f"A thread of the pipeline failed: {describe(error)}"
            self._hub.post(functools.partial(self._hub.events.fail, "pipeline", message), error)
        self.workers.remove(worker)


class ThreadRunner:
    """Makes the calls of a stage in threads.

    The stage issues one ticket per thread that it can use. A thread with a ticket takes one slot after
    another, each only when the call before has ended, and returns its ticket when there are no more slots.
    After each slot, it checks whether tickets of other stages wait, and if so queues its own behind them.
    """

    def __init__(self, stage: Stage, threads: WorkerThreads) -> None:
        self._stage = stage
        self._threads = threads
        self._tickets = 0
        self._watching = False

    def dispatch(self) -> None:
        """Issue as many tickets as there is work for."""
        for _ in range(min(self._stage.concurrency - self._tickets, len(self._stage.todo))):
            self._tickets += 1
            self._threads.issue(self._serve)
        if self._stage.timeout is not None:
            self._check_again_in(self._stage.timeout)

    def running(self) -> list[Slot]:
        """Return the slots whose calls are running, without those that were given up."""
        found = [(worker.slot, worker.given_up) for worker in self._threads.workers.copy()]
        return [
            slot for slot, is_lost in found if slot and slot.stage is self._stage and not is_lost
        ]

    def _serve(self, worker: Worker) -> bool:
        stage, hub, requeue = self._stage, self._stage.hub, self._threads.requeue
        todo, call, deliver, timed = stage.todo, stage.call, hub.deliver, stage.timeout is not None
        while not hub.closed:
            try:
                slot = todo.popleft()
            except IndexError:
                break
            slot.started_at = perf_counter()
            worker.slot = slot
            try:
                handler = call(slot)
            # Not even SystemExit may end the thread: the item would get lost.
            except BaseException as error:  # noqa: BLE001
                stage.note_failure(slot, error)
                handler = stage.settle
            slot.ended_at = perf_counter()
            if not timed:
                worker.slot = None
            # The call was given up meanwhile, and the slot has been settled.
            elif not worker.leave_call():
                return False
            deliver(handler, slot)
            if requeue(self._serve):
                return True
        deliver(self._take_ticket_back, None)
        return False

    def _take_ticket_back(self, _: None) -> None:
        self._tickets -= 1
        # A slot may have arrived after the thread had found none.
        if self._stage.todo:
            self.dispatch()

    def _check_again_in(self, seconds: float) -> None:
        hub = self._stage.hub
        if self._tickets and not self._watching and not hub.closed:
            self._watching = True
            check = functools.partial(hub.post, self._check_overdue, None)
            hub.post_to_loop(lambda _: hub.loop.call_later(seconds, check), None)

    def _check_overdue(self, _: None) -> None:
        self._watching = False
        timeout = self._stage.timeout
        assert timeout is not None
        now = perf_counter()
        waits = [timeout]
        for worker in self._threads.workers.copy():
            slot = worker.slot
            if slot is None or slot.stage is not self._stage or worker.given_up:
                continue
            left = slot.started_at + timeout - now
            if left > 0:
                waits.append(left)
            elif worker.give_up(slot):
                self._replace_thread(worker, slot)
        self._check_again_in(min(waits))

    def _replace_thread(self, worker: Worker, slot: Slot) -> None:
        timeout = self._stage.timeout
        LOG.warning(
            "stage %r: a call took longer than timeout=%s s on %s; thread %s is replaced and ends when "
            "the call returns",
            self._stage.name,
            timeout,
            short_repr(slot.item),
            worker.name,
        )
        self._threads.add_thread()
        self._tickets -= 1
        self._stage.note_failure(
            slot,
            TimeoutError(f"the call took longer than timeout={timeout} s"),
        )
        slot.ended_at = perf_counter()
        self._stage.settle(slot)
        self.dispatch()


class TurnRunner:
    """Makes the calls in the turn itself, for functions that never block."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def dispatch(self) -> None:
        """Make the calls of all slots in ``todo``."""
        stage = self._stage
        while stage.todo:
            slot = stage.todo.popleft()
            slot.started_at = perf_counter()
            try:
                handler = stage.call(slot)
            except BaseException as error:  # noqa: BLE001  # as for threads
                stage.note_failure(slot, error)
                handler = stage.settle
            slot.ended_at = perf_counter()
            handler(slot)

    def running(self) -> list[Slot]:
        """Return no slots: a call ends within the turn that makes it."""
        return []


class TaskRunner:
    """Makes the calls of a stage in tasks of the event loop.

    One task is woken at a time, and it wakes the next one if slots are left. If the calls never wait, a
    single task makes all of them.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._idle: deque[asyncio.Future[None]] = deque()
        self._num_tasks = 0
        # Whether the loop was asked to wake a task, or a task is about to look for slots.
        self._is_waking = False
        self._running: dict[asyncio.Task[None], Any] = {}

    def dispatch(self) -> None:
        """Have the loop wake a task, or start one, unless one is about to look for slots."""
        if not self._is_waking:
            self._is_waking = True
            self._stage.hub.post_to_loop(self._wake_task, None)

    def _wake_task(self, _: None) -> None:
        stage = self._stage
        # Reset first, so that slots that arrive from now on cause another call.
        self._is_waking = False
        # Other tasks are in calls, and look for slots after these.
        if stage.todo and (self._idle or self._num_tasks < stage.concurrency):
            self._is_waking = True
            if self._idle:
                wake(self._idle.popleft())
            else:
                self._num_tasks += 1
                stage.hub.spawn(self._work(), stage.name)

    def running(self) -> list[Slot]:
        """Return the slots whose calls are awaited, without paused generators."""
        return [slot for slot in list(self._running.values()) if not getattr(slot, "paused", False)]

    async def _work(self) -> None:
        task: Any = asyncio.current_task()
        stage, hub, todo = self._stage, self._stage.hub, self._stage.todo
        self._is_waking = False
        # A task makes one call after another, so a function that never waits costs no switch of tasks.
        while not hub.closed:
            if not todo:
                await self._wait(task)
                continue
            slot = todo.popleft()
            if todo and not self._is_waking:
                self._wake_task(None)
            self._running[task] = slot
            slot.started_at = perf_counter()
            try:
                slot.result = await stage.call_async(slot)
                if task.cancelling():
                    # The call cancelled its own task and returned. The cancellation must not hit the next
                    # item.
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.sleep(0)
                    task.uncancel()
            except BaseException as error:  # as for threads
                if hub.closed:
                    raise
                # The run is not ending, so the function cancelled itself, which fails the item only.
                task.uncancel()
                stage.note_failure(slot, error)
            slot.ended_at = perf_counter()
            del self._running[task]
            # This task is about to look for slots, so no other has to be woken.
            was_waking, self._is_waking = self._is_waking, True
            hub.deliver(stage.settle, slot)
            self._is_waking = was_waking
            # The task may wait long for its next slot, and would keep this one alive.
            del slot

    async def _wait(self, task: Any) -> None:
        hub = self._stage.hub
        self._idle.append(idle := hub.loop.create_future())
        try:
            await idle
        except asyncio.CancelledError:
            # Otherwise this task would be woken instead of one that waits.
            if idle in self._idle:
                self._idle.remove(idle)
            if hub.closed:
                raise
            task.uncancel()
        finally:
            self._is_waking = False


async def limited(awaitable: Awaitable[Any], seconds: float, what: str) -> Any:
    """Await something for at most ``seconds``; ``what`` names it in the error.

    Raises:
        TimeoutError: It took longer.
    """
    try:
        async with asyncio.timeout(seconds) as limit:
            return await awaitable
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise TimeoutError(f"{what} took longer than timeout={seconds} s") from error


class LoopExecutor(ThreadPoolExecutor):
    """Makes the calls of ``asyncio.to_thread`` in worker threads of the engine."""

    # It never starts threads of ThreadPoolExecutor, for which interpreter exit would wait. It derives from
    # that class because asyncio accepts no other default executor.
    def __init__(self, hub: Hub, threads: WorkerThreads) -> None:
        super().__init__(max_workers=1)
        self._hub = hub
        self._workers = threads

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Have a worker thread call a function.

        Raises:
            RuntimeError: The run is ending.
        """
        if self._hub.closed:
            raise RuntimeError("the pipeline is stopping, it starts no more calls in threads")
        future: Future[T] = Future()
        call = functools.partial(fn, *args, **kwargs)
        self._workers.issue(lambda _: self._run(future, call))
        return future

    def _run(self, future: Future[T], call: Callable[[], T]) -> bool:
        if self._hub.closed:
            future.cancel()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001  # the future passes it to the caller
                future.set_exception(error)
        return False
