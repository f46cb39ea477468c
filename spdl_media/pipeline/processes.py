"""Worker processes of a stage: a thread of ours hands an item to one of them and waits for the result.

Unlike :class:`concurrent.futures.ProcessPoolExecutor`, the death of a worker costs the one item it
had, the function is sent once and not with each item, and nothing here is waited for when the
interpreter exits.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import pickle
import threading
import traceback
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Final

from spdl_media._ring import dumps, pack, ring_or_none, unpack
from spdl_media.pipeline.children import Child, RemoteTraceback, Seeds, failure, not_started
from spdl_media.pipeline.executors import ProcessPoolExecutorConfig
from spdl_media.pipeline.failures import PoolBroken, WorkerDied
from spdl_media.pipeline.stages import PipeConfig

__all__ = ("WorkerProcesses", "default_start_method")

_MAX_FAILED_STARTS: Final = 3
"""Workers in a row that may die before they take items. One can meet with an accident."""

_BLOCK_SIZE: Final = 1 << 28
"""Bytes of a result that cross in shared memory."""

_NUM_VIEWS: Final = 64
"""Results of a process that may be kept without a copy."""


class WorkerProcesses:
    """The processes of a stage. A dead one is replaced when an item comes for it.

    They start here, before any thread of the pipeline does.

    Attributes:
        size: Threads that may call at once: those of all processes.

    Thread safety: all methods may be called from any thread.
    """

    def __init__(self, stage: PipeConfig, config: ProcessPoolExecutorConfig) -> None:
        num_processes = config.max_workers or -(-stage.concurrency // config.num_threads)
        self.size = num_processes * config.num_threads
        self._stage = stage
        self._config = config
        self._context = multiprocessing.get_context(config.mp_context or default_start_method())
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._closed = False
        self._broken: PoolBroken | None = None
        self._failed_starts = 0
        # The last one that ended before it was ready.
        self._failed_child: Child | None = None
        # None stands for one that has to be started.
        self._idle: deque[_Worker | None] = deque()
        # Of processes that were started anew, or are being started.
        self._spare: list[_Worker] = []
        self._num_coming = 0
        self._busy: set[_Worker] = set()
        # Forks would all draw the numbers of this process.
        self._seeds, self._numbers = Seeds.draw(), itertools.count()
        processes: list[list[_Worker]] = []
        try:
            while len(processes) < num_processes:
                processes.append(self._start())
        except BaseException as error:
            for worker in itertools.chain.from_iterable(processes):
                worker.leave()
            if isinstance(error, (OSError, EOFError)):  # there are no descriptors left, for one
                raise not_started(f"stage {stage.name!r}", error) from error
            raise
        # The first threads of all of them, then the second ones.
        self._idle.extend(itertools.chain.from_iterable(zip(*processes, strict=True)))

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
                    # At which its process ends by itself.
                    worker.leave()
            while self._spare:
                self._spare.pop().leave()
            for worker in self._busy:
                worker.child.terminate()

    def _ready_worker(self) -> _Worker:
        """One that has the function; a new one in the place of one that died while it waited."""
        while True:
            worker = self._take()
            try:
                worker.wait_until_ready()
            except WorkerDied as error:
                is_new = not worker.is_ready and worker.child is not self._failed_child
                self._let_go(worker)
                if is_new:
                    self._failed_child = worker.child
                    self._count_failed_start(error)
            except PoolBroken as error:
                self._let_go(worker)
                self._broken = error
                raise
            else:
                self._failed_starts = 0
                return worker

    def _take(self) -> _Worker:
        with self._changed:
            if self._broken is not None:
                raise self._broken
            if self._closed:
                raise PoolBroken(f"The processes of stage {self._stage.name!r} were shut down")
            # There are as many as threads, so one is idle.
            worker = self._idle.popleft()
            if worker is None:
                # Others start a process, which has a thread for this item, too.
                self._changed.wait_for(lambda: self._spare or not self._num_coming)
                worker = self._spare.pop() if self._spare else None
            if worker is not None:
                self._busy.add(worker)
                return worker
            self._num_coming += self._config.num_threads - 1
        started: list[_Worker] = []
        try:
            started = self._start()
        except OSError as error:
            # No descriptors or no memory, perhaps for a moment.
            self._count_failed_start(error)
        finally:
            with self._changed:
                self._num_coming -= self._config.num_threads - 1
                self._spare += started[1:]
                self._changed.notify_all()
            if not started:
                self._idle.append(None)
        if not started:
            return self._take()
        worker = started[0]
        with self._lock:
            self._busy.add(worker)
            if self._closed:
                worker.child.terminate()
        return worker

    def _start(self) -> list[_Worker]:
        """Start a process; its threads."""
        stage, config = self._stage, self._config
        options = {"num_sent": config.num_threads, "num_views": _NUM_VIEWS}
        child = Child(
            self._context,
            _work,
            (stage.fn, config.initializer, config.initargs),
            name=f"spdl_media {stage.name}",
            what=f"A worker process of stage {stage.name!r}",
            ring=ring_or_none(self._context, _BLOCK_SIZE, **options),
            num_pipes=config.num_threads,
            seeds=self._seeds.of_process(next(self._numbers)),
        )
        return [_Worker(child, pipe, stage) for pipe in child.pipes]

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
    """A thread of a process, and the pipe to it. Served by one thread of ours."""

    def __init__(self, child: Child, pipe: Connection, stage: PipeConfig) -> None:
        self.must_go = False
        self.child = child
        self.pipe = pipe
        self._stage = stage
        self.is_ready = False

    def wait_until_ready(self) -> None:
        """Wait for the first answer of a new process.

        Raises:
            WorkerDied: It ended instead.
            PoolBroken: It cannot work: the initializer failed.
        """
        if self.is_ready and self.child.is_alive():
            return
        problem = self._receive().decode()
        if problem:
            last_line = problem.rstrip().splitlines()[-1]
            raise PoolBroken(
                f"The worker processes of stage {self._stage.name!r} cannot start, their "
                f"initializer failed: {last_line}"
            ) from RemoteTraceback(problem)
        self.is_ready = True

    def call(self, item: Any, timeout: float | None) -> Any:
        """Have the function applied to an item; see :meth:`WorkerProcesses.call`.

        Raises:
            WorkerDied: The process ended with the item.
            TimeoutError: The call took longer than ``timeout``. The process was killed.
            BaseException: What the function raised, or the item or the result cannot be pickled.
        """
        # Released here: the traceback of a failure holds this frame, and so would hold the item's bytes.
        with dumps(item) as data:
            try:
                self.pipe.send_bytes(data)
            except OSError as error:
                self.must_go = True
                raise self.child.death() from error.with_traceback(None)
        succeeded, value, text = unpack(self._receive(timeout), self.child.ring)
        if not succeeded:
            value.__cause__ = RemoteTraceback(text)
            raise value
        return value

    def end(self) -> None:
        """Close the pipe, at which an idle worker ends by itself, and see that it does."""
        self.child.end(self.pipe)

    def leave(self) -> None:
        """Close the pipe without waiting."""
        self.child.leave(self.pipe)

    def _receive(self, timeout: float | None = None) -> bytes:
        try:
            return self.child.receive(self.pipe, timeout)
        except BaseException:
            self.must_go = True
            raise


def _work(*arguments: Any) -> None:
    """Serve calls in a worker process, in a thread for each of its pipes, until they are closed."""
    *pipes, fn, initializer, initargs = arguments
    problem = _initialize(initializer, initargs)
    others = [
        threading.Thread(target=_serve, args=(pipe, fn, problem), daemon=True) for pipe in pipes[1:]
    ]
    for thread in others:
        thread.start()
    _serve(pipes[0], fn, problem)
    for thread in others:
        thread.join()


def _serve(pipe: Connection, fn: Callable[[Any], Any], problem: str) -> None:
    with contextlib.suppress(EOFError, OSError):  # the pipeline is gone, or its process
        pipe.send_bytes(problem.encode())
        while True:
            data = pipe.recv_bytes()
            pipe.send_bytes(_outcome(fn, data))


def _initialize(initializer: Callable[..., object] | None, initargs: tuple[Any, ...]) -> str:
    """Prepare a worker; the traceback when that fails, else nothing."""
    try:
        if initializer is not None:
            initializer(*initargs)
    except BaseException:  # noqa: BLE001  # even SystemExit must be told
        return traceback.format_exc()
    return ""


def _outcome(fn: Callable[[Any], Any], data: bytes) -> bytes | memoryview:
    """Result or exception of a call, as the bytes of ``(succeeded, value, traceback)``."""
    try:
        item = pickle.loads(data)  # noqa: S301  # from the process that started this one
        # What the function keeps stays its own, as if all were pickled.
        return pack([(True, fn(item), "")], is_alone=True)
    except BaseException as error:  # noqa: BLE001  # even SystemExit fails the item, not the worker
        return dumps((False, *failure(error)))


def default_start_method() -> str:
    """How workers start: never as forks, since they may have to be replaced while threads run."""
    methods = multiprocessing.get_all_start_methods()
    return "forkserver" if "forkserver" in methods else "spawn"
