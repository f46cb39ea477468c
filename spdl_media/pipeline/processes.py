"""Worker processes of a stage: a thread of ours hands an item to one of them and waits for the result.

Unlike :class:`concurrent.futures.ProcessPoolExecutor`, the death of a worker costs the one item it
had, the function is sent once and not with each item, and nothing here is waited for when the
interpreter exits.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import threading
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Final

from spdl_media.pipeline.children import (
    Child,
    RemoteTraceback,
    draw_seeds,
    end_soon,
    failure,
    not_started,
)
from spdl_media.pipeline.executors import ProcessPoolExecutorConfig
from spdl_media.pipeline.failures import PoolBroken, WorkerDied
from spdl_media.pipeline.stages import PipeConfig
from spdl_media.ring import dumps, pack, ring_or_none, unpack

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
        self._closed = False
        self._broken: PoolBroken | None = None
        self._failed_starts = 0
        # Forks would all draw the numbers of this process.
        self._seeds = draw_seeds()
        self._processes: list[_Process] = []
        self._idle: deque[_Worker] = deque()
        self._busy: set[_Worker] = set()
        try:
            while len(self._processes) < num_processes:
                self._processes.append(_Process(self._start()))
        except BaseException as error:
            self.shutdown()
            if isinstance(error, (OSError, EOFError)):  # there are no descriptors left, for one
                raise not_started(f"stage {stage.name!r}", error) from error
            raise
        # The first threads of all of them, then the second ones.
        for number in range(config.num_threads):
            self._idle.extend(_Worker(process, number) for process in self._processes)

    def call(self, item: Any) -> Any:
        """Apply the function to an item in one of the processes, and wait for it.

        Raises:
            WorkerDied: The process ended with the item.
            PoolBroken: No process can be started any more, or they were shut down.
            TimeoutError: The call took longer than the stage's timeout. The process was killed.
            BaseException: What the function raised, or the item or the result cannot be pickled.
        """
        # There are as many as threads, so one is idle.
        worker = self._idle.popleft()
        self._busy.add(worker)
        try:
            return _call(self._child_of(worker), worker.number, item, self._stage.timeout)
        finally:
            self._busy.discard(worker)
            self._idle.append(worker)

    def shutdown(self) -> None:
        """End the processes; those in a call are terminated. Does not wait."""
        self._closed = True
        in_call = {worker.process for worker in self._busy.copy()}
        for process in self._processes:
            process.child.ask_to_end(in_call=process in in_call)
        end_soon([process.child for process in self._processes])

    def _child_of(self, worker: _Worker) -> Child:
        """The child that a worker is in, which has the function; a new one in the place of one that died."""
        while True:
            child = self._live_child(worker.process)
            if worker.ready_in is child:
                return child
            try:
                problem = child.receive(child.pipes[worker.number]).decode()
            except WorkerDied:
                continue
            if problem:
                last_line = problem.rstrip().splitlines()[-1]
                self._broken = PoolBroken(
                    f"The worker processes of stage {self._stage.name!r} cannot start, their "
                    f"initializer failed: {last_line}"
                )
                raise self._broken from RemoteTraceback(problem)
            worker.ready_in, worker.process.has_started = child, True
            self._failed_starts = 0

    def _live_child(self, process: _Process) -> Child:
        # Others of the same process wait for the new one, too.
        with process.lock:
            self._check()
            while not process.child.is_alive():
                death = process.child.death()
                if not process.has_started:
                    self._count_failed_start(death)
                try:
                    process.child, process.has_started = self._start(), False
                except OSError as error:
                    # No descriptors or no memory, perhaps for a moment.
                    self._count_failed_start(error)
                if self._closed:
                    process.child.end(0)
                self._check()
            return process.child

    def _check(self) -> None:
        if self._broken is not None:
            raise self._broken
        if self._closed:
            raise PoolBroken(f"The processes of stage {self._stage.name!r} were shut down")

    def _start(self) -> Child:
        stage, config = self._stage, self._config
        options = {"num_sent": config.num_threads, "num_views": _NUM_VIEWS}
        return Child(
            self._context,
            _work,
            (stage.fn, config.initializer, config.initargs),
            name=f"spdl_media {stage.name}",
            what=f"A worker process of stage {stage.name!r}",
            ring=ring_or_none(self._context, _BLOCK_SIZE, **options),
            num_pipes=config.num_threads,
            seeds=next(self._seeds),
        )

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


@dataclass(eq=False)
class _Process:
    """One of several, whatever child it is at the time.

    Attributes:
        has_started: Whether the child has come to take items.
    """

    child: Child
    has_started: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(eq=False)
class _Worker:
    """A thread of a process. Served by one thread of ours.

    Attributes:
        ready_in: The child whose first answer was received.
    """

    process: _Process
    number: int
    ready_in: Child | None = None


def _call(child: Child, number: int, item: Any, timeout: float | None) -> Any:
    """Have the function applied to an item; see :meth:`WorkerProcesses.call`."""
    # Held here: the child lets go of it when it ends.
    pipe, ring = child.pipes[number], child.ring
    # Released here: the traceback of a failure holds this frame, and so would hold the item's bytes.
    with dumps(item) as data:
        try:
            pipe.send_bytes(data)
        except OSError as error:
            raise child.death() from error.with_traceback(None)
    try:
        answer = child.receive(pipe, timeout)
    except BaseException:
        # What comes later is no answer to the next item.
        child.end(0)
        raise
    succeeded, value, text = unpack(answer, ring)
    if not succeeded:
        value.__cause__ = RemoteTraceback(text)
        raise value
    return value


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
