"""Worker processes of a stage: one thread of ours for each, which hands it items and waits for results.

Unlike :class:`concurrent.futures.ProcessPoolExecutor`, the death of a worker costs the one item it
had, the function is sent once and not with each item, and nothing here is waited for when the
interpreter exits.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import pickle
import queue
import signal
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

from spdl_media.pipeline.executors import (
    CallersPool,
    InterpreterPool,
    InterpreterPoolExecutorConfig,
    ProcessPoolExecutorConfig,
    StagePool,
)
from spdl_media.pipeline.failures import PipelineError, PoolBroken, WorkerDied, describe
from spdl_media.pipeline.stages import PipeConfig

__all__ = ("ProcessPool", "open_pool")

_GRACE_SECONDS: Final = 1.0
"""How long a worker may take to end by itself."""

_MAX_FAILED_STARTS: Final = 3
"""Workers in a row that may die before they take items. One can meet with an accident."""

_parent_ends: weakref.WeakSet[Connection] = weakref.WeakSet()
"""Our ends of all pipes. A forked worker inherits them, and none would ever see a pipe closed."""


def open_pool(stage: PipeConfig) -> StagePool:
    """Start the executor of a stage; to be called before the pipeline starts threads.

    Raises:
        PoolBroken: The caller's executor is broken or was shut down.
    """
    if isinstance(stage.executor, Executor):
        return CallersPool(stage, stage.executor)
    if isinstance(stage.executor, ProcessPoolExecutorConfig):
        return ProcessPool(stage, stage.executor)
    # Threads of a stage's own are no pool: they are threads of the pipeline.
    assert isinstance(stage.executor, InterpreterPoolExecutorConfig)
    return InterpreterPool(stage, stage.executor)


class ProcessPool(StagePool):
    """Processes made from a :class:`ProcessPoolExecutorConfig`; a dead one is replaced."""

    keeps_time = True

    def __init__(self, stage: PipeConfig, config: ProcessPoolExecutorConfig) -> None:
        self._stage = stage
        self._config = config
        self._context = multiprocessing.get_context(config.mp_context or _default_start_method())
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._broken: PoolBroken | None = None
        self._failed_starts = 0
        # The processes start here, before any thread of the pipeline; threads with the first item.
        self._workers = [self._new_worker() for _ in range(config.max_workers or stage.concurrency)]
        self._threads: list[threading.Thread] = []

    def submit(self, item: Any) -> Future[Any]:  # noqa: D102  # see StagePool
        future: Future[Any] = Future()
        with self._lock:
            refused = self._broken
            if self._closed:
                refused = PoolBroken(f"The processes of stage {self._stage.name!r} were shut down")
            if refused is None:
                self._start_threads()
                self._tasks.put((future, item))
        if refused is not None:
            future.set_exception(refused)
        return future

    def shutdown(self) -> None:
        """End the processes; those in a call are terminated. Does not wait."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._cancel_waiting()
            self._start_threads()  # they close the pipes, and wait for the processes
            for worker in self._workers:
                self._tasks.put(None)
                if worker.future is not None:
                    worker.process.terminate()

    def _start_threads(self) -> None:
        if self._threads:
            return
        for number in range(len(self._workers)):
            name = f"spdl_media {self._stage.name} process {number}"
            thread = threading.Thread(target=self._serve, args=(number,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def _cancel_waiting(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                task = self._tasks.get_nowait()
                if task is not None:
                    task[0].cancel()

    def _new_worker(self) -> _Worker:
        return _Worker(self._context, self._stage, self._config)

    def _serve(self, number: int) -> None:
        """What each thread does: one item after the other, by one worker after the other."""
        while (task := self._tasks.get()) is not None:
            future, item = task
            if self._claim(number, future):
                self._run(number, future, item)
            # Else the last item and its result would live until the next one comes.
            del task, future, item
        self._workers[number].end()

    def _claim(self, number: int, future: Future[Any]) -> bool:
        """Mark the worker as busy with an item, unless that was given up meanwhile."""
        with self._lock:
            if self._closed:
                future.cancel()
            if not future.set_running_or_notify_cancel():
                return False
            self._workers[number].future = future
            return True

    def _run(self, number: int, future: Future[Any], item: Any) -> None:
        try:
            succeeded, value = self._ready_worker(number, future).call(item, self._stage.timeout)
        except BaseException as error:  # noqa: BLE001  # whatever it is, it is the item's failure
            # Without its frames, which would keep the item alive.
            succeeded, value = False, error.with_traceback(None)
        worker = self._workers[number]
        with self._lock:
            worker.future = None
        if succeeded:
            future.set_result(value)
        else:
            future.set_exception(value)
        if worker.must_go and not self._is_over():
            self._replace(number)

    def _ready_worker(self, number: int, future: Future[Any]) -> _Worker:
        """The worker, once it has the function; a new one when it died while it waited."""
        while True:
            worker = self._workers[number]
            try:
                worker.wait_until_ready()
            except WorkerDied as error:
                self._count_failed_start(error)
                self._replace(number, future)
            except PoolBroken as error:
                self._broken = error
                raise
            else:
                self._failed_starts = 0
                return worker

    def _count_failed_start(self, error: WorkerDied) -> None:
        self._failed_starts += 1
        if self._broken is not None:
            raise self._broken
        if self._is_over() or self._failed_starts >= _MAX_FAILED_STARTS:
            self._broken = PoolBroken(
                f"{self._failed_starts} worker processes of stage {self._stage.name!r} ended before "
                f"they took an item. A script that starts processes keeps its own work below "
                f'if __name__ == "__main__". The last one: {error}'
            )
            raise self._broken from error

    def _is_over(self) -> bool:
        """Whether workers end because they shall: multiprocessing ends them when the interpreter exits."""
        return self._closed or not threading.main_thread().is_alive()

    def _replace(self, number: int, future: Future[Any] | None = None) -> None:
        """Put a new worker in the place of one. Not under the lock: it waits for the old one."""
        self._workers[number].end()
        worker = self._new_worker()
        with self._lock:
            worker.future = future
            self._workers[number] = worker


class _Worker:
    """A process and our end of the pipe to it. Served by one thread."""

    def __init__(
        self, context: BaseContext, stage: PipeConfig, config: ProcessPoolExecutorConfig
    ) -> None:
        self.future: Future[Any] | None = None
        self._stage = stage
        self.must_go = False
        self._is_ready = False
        self._pipe, theirs = context.Pipe()
        _parent_ends.add(self._pipe)
        arguments = (theirs, stage.fn, config.initializer, config.initargs)
        # mypy knows Process of each start method, not of their base.
        process: BaseProcess = context.Process(  # type: ignore[attr-defined]
            target=_work, args=arguments, name=f"spdl_media {stage.name}", daemon=True
        )
        process.start()
        theirs.close()
        self.process = process

    def wait_until_ready(self) -> None:
        """Wait for the first answer of a new process.

        Raises:
            WorkerDied: It ended instead.
            PoolBroken: It cannot work: the initializer failed.
        """
        if self._is_ready and self.process.is_alive():
            return
        problem = self._receive().decode()
        if problem:
            last_line = problem.rstrip().splitlines()[-1]
            raise PoolBroken(
                f"The worker processes of stage {self._stage.name!r} cannot start, their "
                f"initializer failed: {last_line}"
            ) from _RemoteTraceback(problem)
        self._is_ready = True

    def call(self, item: Any, timeout: float | None) -> tuple[bool, Any]:
        """Have the function applied to an item.

        Returns:
            Whether it succeeded, and its result or what it raised. The traceback over there is
            the cause of an exception.

        Raises:
            WorkerDied: The process ended.
            TimeoutError: The call took longer than ``timeout`` seconds. The process is terminated.
            Exception: The item cannot be pickled, or the answer cannot be unpickled here.
        """
        data = _dumps(item)
        try:
            self._pipe.send_bytes(data)
        except OSError as error:
            raise self._death() from error
        succeeded, value, text = pickle.loads(self._receive(timeout))  # noqa: S301  # our own process
        if not succeeded:
            # Pickle leaves tracebacks out, so that of the worker comes as text.
            value.__cause__ = _RemoteTraceback(text)
        return succeeded, value

    def end(self) -> None:
        """Close the pipe, at which an idle worker ends by itself, and see that it does."""
        self._pipe.close()
        self.process.join(_GRACE_SECONDS)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()

    def _receive(self, timeout: float | None = None) -> bytes:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        try:
            # The pipe alone would do, if no process forked elsewhere could hold its other end open.
            ends = (self._pipe, self.process.sentinel)
            while not (ready := wait(ends, min(1.0, deadline - time.monotonic()))):
                # Asked each second: a process that the worker itself has forked holds both ends open.
                if not self.process.is_alive():
                    break
                if time.monotonic() >= deadline:
                    self.must_go = True
                    self.process.terminate()
                    raise TimeoutError(f"the call took longer than timeout={timeout} s")
            if self._pipe in ready or self._pipe.poll():
                return self._pipe.recv_bytes()
        except (EOFError, ConnectionError):
            pass
        raise self._death()

    def _death(self) -> WorkerDied:
        self.must_go = True
        self.process.join(_GRACE_SECONDS)
        code = self.process.exitcode
        how = f"exit code {code}" if code is None or code >= 0 else _signal_name(-code)
        return WorkerDied(
            f"A worker process of stage {self._stage.name!r} ended ({how}) with this item. "
            "Processes end this way when memory runs out, native code crashes or os._exit() is called."
        )


class _RemoteTraceback(Exception):  # noqa: N818  # no error, but where one came from
    """The traceback of an exception in a worker process, as text. It is that exception's cause."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _work(
    pipe: Connection,
    fn: Callable[[Any], Any],
    initializer: Callable[..., object] | None,
    initargs: tuple[Any, ...],
) -> None:
    """What a worker process does, until its pipe is closed."""
    # Ctrl-C reaches all processes of a terminal; ours end when the pipeline does.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for end in list(_parent_ends):
        end.close()
    threading.Thread(target=_end_with_parent, name="watches the parent", daemon=True).start()
    problem = _initialize(initializer, initargs)
    with contextlib.suppress(EOFError, OSError):  # the pipeline is gone, or its process
        pipe.send_bytes(problem.encode())
        while True:
            data = pipe.recv_bytes()
            pipe.send_bytes(_outcome(fn, data))


def _end_with_parent() -> None:
    """End this process when the one that started it was killed, even in the middle of a call."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _initialize(initializer: Callable[..., object] | None, initargs: tuple[Any, ...]) -> str:
    """Prepare a worker; the traceback when that fails, else nothing."""
    try:
        if initializer is not None:
            initializer(*initargs)
    except BaseException:  # noqa: BLE001  # even SystemExit must be told
        return traceback.format_exc()
    return ""


def _outcome(fn: Callable[[Any], Any], data: bytes) -> memoryview:
    """Result or exception of a call, as the bytes of ``(succeeded, value, traceback)``."""
    try:
        result = fn(pickle.loads(data))  # noqa: S301  # from the process that started this one
        return _dumps((True, result, ""))
    except BaseException as error:  # noqa: BLE001  # even SystemExit fails the item, not the worker
        return _failure(error)


def _failure(error: BaseException) -> memoryview:
    text = "".join(traceback.format_exception(error))
    try:
        data = _dumps((False, error, text))
        pickle.loads(data)  # noqa: S301  # many exceptions can be pickled, but not made again
    except Exception:  # noqa: BLE001  # __reduce__ of a foreign exception may raise anything
        stand_in = PipelineError(
            f"{describe(error)} (raised in a worker process; this stands in for the exception itself, "
            "which cannot be pickled)"
        )
        data = _dumps((False, stand_in, text))
    return data


def _dumps(value: object) -> memoryview:
    # Plain pickle cannot send connections, nor tensors of torch.
    return ForkingPickler.dumps(value, pickle.HIGHEST_PROTOCOL)


def _default_start_method() -> str:
    """How workers start: never as forks, since they may have to be replaced while threads run."""
    methods = multiprocessing.get_all_start_methods()
    return "forkserver" if "forkserver" in methods else "spawn"


def _signal_name(number: int) -> str:
    try:
        return f"killed by {signal.Signals(number).name}"
    except ValueError:
        return f"killed by signal {number}"
