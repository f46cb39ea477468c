"""Pools of a stage: its own worker processes or sub-interpreters, and the user's executors, including Dask's.

The pool of processes differs from that of ``concurrent.futures``: when a worker dies, only its item fails;
the function is sent once and not with each item; and interpreter exit waits for nothing.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import multiprocessing
import os
import pickle
import threading
import traceback
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Final

from spdl_media._optional import require
from spdl_media.pipeline.children import Child, RemoteTraceback, draw_seeds, end_soon, failure
from spdl_media.pipeline.engine.hub import Hub, wake
from spdl_media.pipeline.executors import (
    InterpreterPoolExecutorConfig,
    ProcessPoolExecutorConfig,
    name_of,
    refuse_coroutine,
)
from spdl_media.pipeline.failures import MissingPackageError, PipelineError, PoolBroken, describe
from spdl_media.pipeline.stages import PipeConfig
from spdl_media.ring import dumps, pack, unpack

# The process that has imported this module, from which this one may be forked.
_PID: Final = os.getpid()
# The pool is broken when this many workers in a row died before they took an item. One may die by accident.
_MAX_FAILED_STARTS: Final = 3
# Maximum bytes of a result's arrays in shared memory.
_BLOCK_SIZE: Final = 1 << 28


class WorkerProcesses:
    """The worker processes of a stage. Threads of this process send them items and wait for the results.

    The constructor starts them, before the pipeline starts threads. A dead one is replaced at its next item.

    Attributes:
        size: Number of calls at once: the threads of all processes.

    Raises:
        PipelineError: No process can be started.

    Thread safety: all methods may be called from any thread.
    """

    def __init__(self, stage: PipeConfig, config: ProcessPoolExecutorConfig) -> None:
        num_processes = config.max_workers or -(-stage.concurrency // config.num_threads)
        self.size = num_processes * config.num_threads
        self._stage = stage
        self._config = config
        methods = multiprocessing.get_all_start_methods()
        # The default is never "fork", because workers may have to be replaced while threads run. A process
        # that was forked cannot ask the fork server of its parent.
        method = "forkserver" if "forkserver" in methods and os.getpid() == _PID else "spawn"
        self._context = multiprocessing.get_context(config.mp_context or method)
        self._closed = False
        self._broken: PoolBroken | None = None
        self._failed_starts = 0
        # Without seeds, forked processes would all draw the same random numbers.
        self._seeds = draw_seeds()
        self._processes: list[_Process] = []
        # A worker is a thread of a process: the process and the number of the thread's pipe.
        self._idle: deque[tuple[_Process, int]] = deque()
        try:
            while len(self._processes) < num_processes:
                self._processes.append(_Process(self._start()))
        except BaseException:
            # Otherwise the processes that have started would be left running.
            self.shutdown()
            raise
        # The first threads of all processes, then the second ones, to spread items over processes.
        numbers = range(config.num_threads)
        self._idle.extend((process, number) for number in numbers for process in self._processes)

    def call(self, item: Any) -> Any:
        """Apply the function to an item in one of the processes, and wait for it.

        Raises:
            WorkerDied: The process ended while it had the item.
            PoolBroken: No process can be started any more, or the pool was shut down.
            TimeoutError: The call took longer than the stage's timeout. The process was killed.
            BaseException: What the function raised, or the item or the result cannot be pickled.
        """
        # There are as many workers as calling threads, so one is idle.
        process, number = worker = self._idle.popleft()
        try:
            return self._child_of(process).call(number, item, self._stage.timeout)
        finally:
            self._idle.append(worker)

    def shutdown(self) -> None:
        """End the processes without waiting; those in a call are terminated."""
        self._closed = True
        idle = [process for process, _ in self._idle.copy()]
        for process in self._processes:
            process.child.ask_to_end(in_call=idle.count(process) < self._config.num_threads)
        end_soon([process.child for process in self._processes])

    def _child_of(self, process: _Process) -> Child:
        """Return the child of a process when it is ready; one that has died is replaced."""
        # Other threads with the same process wait here for the new child, too.
        with process.lock:
            self._check()
            while not ((child := process.child).is_ready and child.is_alive()):
                try:
                    if not child.is_alive():
                        child.end()
                        child = process.child = self._start()
                    # shutdown() may have run before this child was started.
                    if self._closed:
                        child.end(0)
                    answer = child.receive(child.pipes[0])
                except PipelineError as error:
                    self._check()
                    self._count_failed_start(error)
                    continue
                succeeded, problem, text = unpack(answer, None)
                if not succeeded:
                    self._broken = PoolBroken(
                        f"The worker processes of stage {self._stage.name!r} cannot start, their "
                        f"initializer failed: {describe(problem)}"
                    )
                    raise self._broken from RemoteTraceback(text)
                self._failed_starts = 0
            return child

    def _check(self) -> None:
        # Every item fails with the first error of the pool.
        if self._broken is not None:
            raise self._broken
        if self._closed:
            raise PoolBroken(f"The processes of stage {self._stage.name!r} were shut down")

    def _start(self) -> Child:
        stage, config = self._stage, self._config
        return Child(
            self._context,
            _work,
            (stage.name, stage.fn, config.initializer, config.initargs),
            owner=f"stage {stage.name!r}",
            num_pipes=config.num_threads,
            seeds=next(self._seeds),
            block_size=_BLOCK_SIZE,
            num_sent=config.num_threads,
        )

    def _count_failed_start(self, error: Exception) -> None:
        """Count a worker that died before it took an item, or could not be started."""
        # Descriptors or memory may be short for a moment, so one failure does not break the pool.
        self._failed_starts += 1
        # multiprocessing ends workers when the interpreter exits.
        is_exiting = not threading.main_thread().is_alive()
        if is_exiting or self._failed_starts >= _MAX_FAILED_STARTS:
            self._broken = PoolBroken(
                f"{self._failed_starts} worker processes of stage {self._stage.name!r} ended before "
                f"they took an item. The last one: {error}"
            )
            raise self._broken from error


@dataclass(eq=False)
class _Process:
    """A place for a worker process. Its child is replaced when it dies."""

    child: Child
    lock: threading.Lock = field(default_factory=threading.Lock)


def _work(*arguments: Any) -> None:
    """Serve calls in a worker process, in one thread per pipe, until the pipes are closed."""
    *pipes, name, fn, initializer, initargs = arguments

    def initialize() -> None:
        if initializer is not None:
            initializer(*initargs)

    pipes[0].send_bytes(_outcome(initialize))
    threads = [
        threading.Thread(target=_serve, args=(pipe, name, fn), daemon=True) for pipe in pipes[1:]
    ]
    for thread in threads:
        thread.start()
    _serve(pipes[0], name, fn)
    for thread in threads:
        thread.join()


def _serve(pipe: Connection, name: str, fn: Callable[[Any], Any]) -> None:
    def call() -> Any:
        # The data is from the process that started this one.
        return refuse_coroutine(fn(pickle.loads(data)), name)  # noqa: S301

    with contextlib.suppress(EOFError, OSError):  # the parent has ended, or closed the pipe
        while True:
            data = pipe.recv_bytes()
            pipe.send_bytes(_outcome(call))


def _outcome(call: Callable[[], Any]) -> bytes | memoryview:
    """Return the outcome of a call as bytes: ``(succeeded, result or exception, traceback)``."""
    try:
        # Arrays that the function itself keeps must not be shared with the parent.
        return pack([(True, call(), "")], is_alone=True)
    except BaseException as error:  # noqa: BLE001  # even SystemExit fails the item, not the worker
        return dumps((False, *failure(error)))


END: Any = object()


class AwaitedPool:
    """The executor of one stage, whose calls the event loop awaits. Only the pipeline's own is shut down.

    Raises:
        PoolBroken: The executor is broken or was shut down.
    """

    # The remedy in the error when an executor of the caller's takes no more items.
    remedy = (
        "It is not the pipeline's to replace; for one that is, use a description such as "
        "ProcessPoolExecutorConfig(...) or ThreadPoolExecutorConfig(...)."
    )
    # What its submit() raises if it takes no more calls, and options of submit().
    refusals: type[Exception] = RuntimeError
    options: Mapping[str, Any] = {}

    def __init__(self, hub: Hub, stage: PipeConfig) -> None:
        self._hub = hub
        self._stage = stage
        config: Any = stage.executor
        self._executor: Executor = config
        self._is_own = isinstance(config, InterpreterPoolExecutorConfig)
        if self._is_own:
            # Imported by name, because only CPython 3.14 and its type stubs have the class.
            kind = importlib.import_module("concurrent.futures").InterpreterPoolExecutor
            self._executor = kind(
                config.max_workers or stage.concurrency,
                thread_name_prefix=f"spdl_media {stage.name}",
                initializer=config.initializer,
                initargs=config.initargs,
            )
        if isinstance(self._executor, ProcessPoolExecutor):
            # It starts workers at its first calls. Start them now, so that they are not forked from a process
            # with threads and do not delay the event loop.
            for _ in range(stage.concurrency):
                self._submit(int)

    async def call(self, item: Any) -> Any:
        """Call the function of the stage.

        Raises:
            PoolBroken: The executor takes no more items.
            PipelineError: The function cannot run in a sub-interpreter.
            TypeError: The function returned a coroutine.
            BaseException: What the function raised.
        """
        return refuse_coroutine(await self._outcome(self._stage.fn, item), self._stage.name)

    async def generate(self, item: Any) -> AsyncIterator[Any]:
        """Step a generator, each time in one of the executor's threads.

        Raises:
            PoolBroken: The executor takes no more items.
            BaseException: What the generator raised.
        """
        generator = self._stage.fn(item)

        def step() -> Any:
            value = next(generator, END)
            if self._hub.closed:
                # No other thread can close a running generator.
                generator.close()
            return value

        try:
            while (value := await self._outcome(step)) is not END:
                yield value
        finally:
            if not generator.gi_running:
                generator.close()

    def shutdown(self) -> None:
        """Shut down the pipeline's own executor, without waiting: a call may take forever."""
        if self._is_own:
            self._executor.shutdown(wait=False, cancel_futures=True)

    def _submit(self, fn: Callable[..., Any], *args: Any) -> Future[Any]:
        try:
            return self._executor.submit(fn, *args, **self.options)
        except self.refusals as error:
            raise self._broken(error) from error

    async def _outcome(self, fn: Callable[..., Any], *args: Any) -> Any:
        future = self._submit(fn, *args)
        done = self._hub.loop.create_future()
        # Not asyncio.wrap_future(), which wakes the loop for each result; the hub wakes it once for many.
        future.add_done_callback(lambda _: self._hub.post_to_loop(wake, done))
        try:
            await done
        finally:
            # For a timeout or the end of the run. It has no effect on a future that is done.
            future.cancel()
        if future.cancelled():
            # The executor was shut down.
            raise self._broken(CancelledError()) from None
        # Not result(), which raises: the frames in the traceback would keep the item alive.
        if (error := future.exception()) is None:
            return future.result()
        if isinstance(error, BrokenExecutor):
            # Raises if the executor is broken; otherwise the function itself has raised the error.
            self._submit(int)
        # By name as well, because only CPython 3.14 has the class.
        is_refusal = isinstance(error, ImportError) or type(error).__name__ == "NotShareableError"
        if self._is_own and is_refusal:
            raise PipelineError(
                f"Stage {self._stage.name!r} cannot run in a sub-interpreter: {_reason(error)}. Only "
                "pure Python can: NumPy, PyAV and most other extension modules cannot be imported "
                "there, nor can modules that import them. Use ProcessPoolExecutorConfig, or threads."
            ) from error
        raise error

    def _broken(self, error: BaseException) -> PoolBroken:
        own = "Its initializer must work in each sub-interpreter."
        remedy = own if self._is_own else self.remedy
        return PoolBroken(
            f"The {type(self._executor).__name__} of stage {self._stage.name!r} takes no more items: "
            f"{str(error) or type(error).__name__}. {remedy}"
        )


def _reason(error: BaseException) -> str:
    """Return the line of the traceback, with causes, that names the import or value that was refused."""
    lines = [line.strip() for line in "".join(traceback.format_exception(error)).splitlines()]
    # Part of CPython's message about an extension module that supports only one interpreter.
    telling = (line for line in lines if "does not support" in line)
    return next(telling, str(error) or type(error).__name__)[:300]


# Compared by name, so that Dask need not be imported. Dask also has executors of threads.
_DASK = ("distributed.cfexecutor", "ClientExecutor")


def is_dask(executor: object) -> bool:
    """Whether an executor submits calls to a Dask cluster."""
    return any((kind.__module__, kind.__name__) == _DASK for kind in type(executor).__mro__)


class DaskPool(AwaitedPool):
    """The executor of a stage whose calls run on a Dask cluster.

    Raises:
        PipelineError: The function cannot be pickled.
    """

    remedy = (
        "The client was closed, or its scheduler does not answer. Make a new client and run the pipeline "
        "again; a DataLoader goes on from its state_dict()."
    )
    # Whatever it raises: the arguments are bytes, so the item cannot be the cause.
    refusals = Exception
    # Otherwise Dask makes one task of equal calls, and cancels all of them with the first.
    options: Mapping[str, Any] = {"pure": False}

    def __init__(self, hub: Hub, stage: PipeConfig) -> None:
        super().__init__(hub, stage)
        try:
            self._sent = _Sent(stage.fn)
        except Exception as error:  # whatever __reduce__ of a user's object raises
            raise PipelineError(
                f"The function of stage {stage.name!r} cannot be pickled, which a Dask cluster needs: "
                f"{error}. Have it open files and make locks when it is first called"
            ) from error

    async def call(self, item: Any) -> Any:
        """Call the function of the stage on the cluster.

        Raises:
            PoolBroken: The client takes no more items.
            BaseException: What the function raised, or the item or the result cannot be pickled.
        """
        data: bytes = await self._outcome(self._sent, _dumps(item))
        return pickle.loads(data)  # noqa: S301  # from a worker of the user's own cluster


class _Sent:
    """The function that is sent to the cluster: pickled once, with a name for Dask's dashboard."""

    def __init__(self, fn: Callable[[Any], Any]) -> None:
        self.__name__ = name_of(fn)
        self._fn = _dumps(fn)

    def __call__(self, item: bytes) -> bytes:
        return _dumps(_unpickled(self._fn)(pickle.loads(item)))  # noqa: S301  # from the user's client


# Unpickles a function once per worker, so that a callable object can keep files open.
_unpickled = functools.lru_cache(maxsize=16)(pickle.loads)


def _dumps(value: object) -> bytes:
    # Plain pickle cannot send functions that are defined in a notebook or script.
    return bytes(require("cloudpickle", "a Dask cluster", MissingPackageError).dumps(value))
