"""Worker processes of a stage: a thread of ours hands an item to one of them and waits for the result.

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
import signal
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

from spdl_media.pipeline.executors import ProcessPoolExecutorConfig
from spdl_media.pipeline.failures import PipelineError, PoolBroken, WorkerDied, describe
from spdl_media.pipeline.stages import PipeConfig

__all__ = ("WorkerProcesses",)

_GRACE_SECONDS: Final = 1.0
"""How long a worker may take to end by itself."""

_MAX_FAILED_STARTS: Final = 3
"""Workers in a row that may die before they take items. One can meet with an accident."""

_parent_ends: weakref.WeakSet[Connection] = weakref.WeakSet()
"""Our ends of all pipes. A forked worker inherits them, and none would ever see a pipe closed."""


class WorkerProcesses:
    """The processes of a stage. A dead one is replaced when an item comes for it.

    They start here, before any thread of the pipeline does.

    Attributes:
        size: How many there are, and threads that may call at once.

    Thread safety: all methods may be called from any thread.
    """

    def __init__(self, stage: PipeConfig, config: ProcessPoolExecutorConfig) -> None:
        self.size = config.max_workers or stage.concurrency
        self._stage = stage
        self._config = config
        self._context = multiprocessing.get_context(config.mp_context or _default_start_method())
        self._lock = threading.Lock()
        self._closed = False
        self._broken: PoolBroken | None = None
        self._failed_starts = 0
        # None stands for one that has to be started.
        self._idle: deque[_Worker | None] = deque()
        self._busy: set[_Worker] = set()
        for _ in range(self.size):
            self._idle.append(_Worker(self._context, stage, config))

    def call(self, item: Any) -> Any:
        """Apply the function to an item in one of the processes, and wait for it.

        Raises:
            WorkerDied: The process ended with the item.
            PoolBroken: No process can be started any more, or they were shut down.
            TimeoutError: The call took longer than the stage's timeout. The process was killed.
            BaseException: What the function raised, or the item or the result cannot be pickled.
        """
        worker = self._ready_worker()
        try:
            return worker.call(item, self._stage.timeout)
        finally:
            self._let_go(worker)

    def shutdown(self) -> None:
        """End the processes; those in a call are terminated. Does not wait."""
        with self._lock:
            self._closed = True
            while self._idle:
                if (worker := self._idle.popleft()) is not None:
                    # At which it ends by itself.
                    worker.pipe.close()
            for worker in self._busy:
                worker.process.terminate()

    def _ready_worker(self) -> _Worker:
        """One that has the function; a new one in the place of one that died while it waited."""
        while True:
            worker = self._take()
            try:
                worker.wait_until_ready()
            except WorkerDied as error:
                self._let_go(worker)
                self._count_failed_start(error)
            except PoolBroken as error:
                self._let_go(worker)
                self._broken = error
                raise
            else:
                self._failed_starts = 0
                return worker

    def _take(self) -> _Worker:
        with self._lock:
            if self._broken is not None:
                raise self._broken
            if self._closed:
                raise PoolBroken(f"The processes of stage {self._stage.name!r} were shut down")
            # There are as many as threads, so one is idle.
            worker = self._idle.popleft()
            if worker is not None:
                self._busy.add(worker)
                return worker
        try:
            worker = _Worker(self._context, self._stage, self._config)
        except OSError as error:
            # No descriptors or no memory, perhaps for a moment.
            self._idle.append(None)
            self._count_failed_start(error)
            return self._take()
        except BaseException:
            self._idle.append(None)
            raise
        with self._lock:
            self._busy.add(worker)
            if self._closed:
                worker.process.terminate()
        return worker

    def _let_go(self, worker: _Worker) -> None:
        with self._lock:
            self._busy.discard(worker)
            is_over = worker.must_go or self._closed
            if not is_over:
                self._idle.append(worker)
        if is_over:
            # Not under the lock: it waits for the process.
            worker.end()
            self._idle.append(None)

    def _count_failed_start(self, error: Exception) -> None:
        self._failed_starts += 1
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


class _Worker:
    """A process and our end of the pipe to it. Served by one thread."""

    def __init__(
        self, context: BaseContext, stage: PipeConfig, config: ProcessPoolExecutorConfig
    ) -> None:
        self.must_go = False
        self._stage = stage
        self._is_ready = False
        self.pipe, theirs = context.Pipe()
        _parent_ends.add(self.pipe)
        arguments = (theirs, stage.fn, config.initializer, config.initargs)
        # mypy knows Process of each start method, not of their base.
        process: BaseProcess = context.Process(  # type: ignore[attr-defined]
            target=_work, args=arguments, name=f"spdl_media {stage.name}", daemon=True
        )
        with _interrupts_blocked(context):
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

    def call(self, item: Any, timeout: float | None) -> Any:
        """Have the function applied to an item; see :meth:`WorkerProcesses.call`.

        Raises:
            WorkerDied: The process ended with the item.
            TimeoutError: The call took longer than ``timeout``. The process was killed.
            BaseException: What the function raised, or the item or the result cannot be pickled.
        """
        # Released here: the traceback of a failure holds this frame, and so would hold the item's bytes.
        with _dumps(item) as data:
            try:
                self.pipe.send_bytes(data)
            except OSError as error:
                raise self._death() from error.with_traceback(None)
        succeeded, value, text = pickle.loads(self._receive(timeout))  # noqa: S301  # our own process
        if not succeeded:
            # Pickle leaves tracebacks out, so that of the worker comes as text.
            value.__cause__ = _RemoteTraceback(text)
            raise value
        return value

    def end(self) -> None:
        """Close the pipe, at which an idle worker ends by itself, and see that it does."""
        self.pipe.close()
        self.process.join(_GRACE_SECONDS)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        # Its descriptors, which else wait for the garbage collector. Not at exit, when multiprocessing still
        # ends those that it knows.
        if threading.main_thread().is_alive():
            self.process.close()

    def _receive(self, timeout: float | None = None) -> bytes:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        # The pipe alone would do, if no process forked elsewhere could hold its other end open.
        ends = (self.pipe, self.process.sentinel)
        while not wait(ends, min(1.0, deadline - time.monotonic())):
            # Asked each second: a process that the worker itself has forked holds both ends open.
            if not self.process.is_alive():
                break
            if time.monotonic() >= deadline:
                self.must_go = True
                self.process.terminate()
                raise TimeoutError(f"the call took longer than timeout={timeout} s")
        try:
            if self.pipe.poll():
                return self.pipe.recv_bytes()
        except (EOFError, OSError):
            # It was killed, perhaps while it wrote.
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


@contextlib.contextmanager
def _interrupts_blocked(context: BaseContext) -> Iterator[None]:
    """Have a process that starts meanwhile never see Ctrl-C, which else ends its imports with a traceback."""
    # Not a fork server: it would pass the mask on to processes that are not ours.
    if context.get_start_method() == "forkserver" or not hasattr(signal, "pthread_sigmask"):
        yield
        return
    # Started by the first process otherwise, and it resets the mask.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
    """Serve calls in a worker process until its pipe is closed."""
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
        _give_torch_one_thread()
        if initializer is not None:
            initializer(*initargs)
    except BaseException:  # noqa: BLE001  # even SystemExit must be told
        return traceback.format_exc()
    return ""


def _give_torch_one_thread() -> None:
    """Keep each worker from computing in as many threads as there are cores, unless it is told to."""
    if "OMP_NUM_THREADS" in os.environ:
        return
    # Of what is imported from now on, also by the user's function.
    os.environ["OMP_NUM_THREADS"] = "1"
    # The function may have come with it.
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


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
