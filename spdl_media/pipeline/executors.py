"""Kinds of stage functions, hooks around their calls, descriptions of executors, and the cores they may use.

Each run of a pipeline makes its own pool from such a description, and shuts it down (:mod:`pools`).
"""

from __future__ import annotations

import concurrent.futures
import functools
import inspect
import math
import multiprocessing
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor
from contextlib import AbstractContextManager, aclosing, closing, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from time import perf_counter
from types import CoroutineType
from typing import Any, Literal, TypeAlias, TypeVar

from spdl_media._checks import check_callable, check_choice, check_int
from spdl_media.pipeline.failures import PipelineError

__all__ = (
    "ExecutorConfig",
    "InterpreterPoolExecutorConfig",
    "ProcessPoolExecutorConfig",
    "TaskHook",
    "ThreadPoolExecutorConfig",
)

T = TypeVar("T")

_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")

FunctionKind: TypeAlias = Literal["function", "async", "generator", "async_generator"]


def kind_of(fn: Callable[..., Any]) -> FunctionKind:
    """Return the kind of a callable, which decides how it has to be called.

    A plain function that returns a generator counts as a function: the generator object is one item.
    """
    # inspect looks into functools.partial, but not at __call__ of an instance.
    fn = _innermost(fn)
    if inspect.isasyncgenfunction(fn):
        return "async_generator"
    if inspect.iscoroutinefunction(fn):
        return "async"
    return "generator" if inspect.isgeneratorfunction(fn) else "function"


WHERE_TO_WRITE_IT = (
    'A script that starts processes keeps its own work below if __name__ == "__main__" and their functions '
    "above; a function of a notebook belongs in a module."
)
"""The remedy if a process ends before it has answered, mostly because it cannot import the function."""


def name_of(fn: Callable[..., Any]) -> str:
    """Return the name of a function, or the class name of another callable.

    A lambda is called ``lambda``, a nested function by its own name without that of the outer function.
    """
    while isinstance(fn, functools.partial):
        fn = fn.func
    return str(getattr(fn, "__name__", None) or type(fn).__name__).strip("<>")


def refuse_coroutine(result: T, stage: str) -> T:
    """Return the result of a plain function.

    Raises:
        TypeError: It is a coroutine, which nothing would await.
    """
    if isinstance(result, CoroutineType):
        # Close it, or the interpreter warns that it was never awaited.
        result.close()
        raise TypeError(
            f"the function of stage {stage!r} returned a coroutine, so the call was not made. A function is "
            'awaited when it is defined by "async def"; write one that awaits what this one returns'
        )
    return result


def _innermost(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that runs in the end: inside ``partial``, or ``__call__`` of an instance."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    # Calling a class makes an instance; the kind of the instance's __call__ does not matter.
    if inspect.isroutine(fn) or isinstance(fn, type):
        return fn
    return _innermost(type(fn).__call__) if callable(fn) else fn


class TaskHook:
    """Hooks around the calls of one stage. Override any of the methods; by default they do nothing.

    ``task_hook_factory`` makes one hook for each stage. ``task_start`` and ``task_end`` are called in the
    thread that makes or awaits the call, so by several threads at once when the stage's concurrency is above
    one. For an asynchronous stage, and for one in an executor of the caller's, they are called on the event
    loop and must not block. An exception that they raise fails the item.
    """

    def stage_start(self) -> None:
        """Called once, before the first item of a run.

        Raises:
            BaseException: Raised by the hook. The run does not start, and the code that starts it gets the
                exception.
        """

    def task_start(self, item: Any) -> None:
        """Called before the stage's function is called with ``item``.

        Raises:
            Exception: Raised by the hook. The item fails.
        """

    def task_end(self, item: Any, seconds: float, error: BaseException | None) -> None:
        """Called after the call with its duration and the exception that it raised, if any.

        For a generator it is called once, when the generator has ended or failed; ``seconds`` includes the
        time in which the generator was paused.

        Raises:
            Exception: Raised by the hook. The item fails.
        """

    def stage_end(self) -> None:
        """Called once, when the run ends.

        Raises:
            BaseException: Raised by the hook. It is logged and has no other effect.
        """


def hooked(fn: Callable[..., Any], hook: TaskHook) -> Callable[..., Any]:
    """Wrap a function of any kind so that the hook is called around each call."""
    return functools.wraps(fn)(within(functools.partial(_around_task, hook), fn, kind_of(fn)))


def within(
    begin: Callable[[Any], AbstractContextManager[Callable[[Any], Any]]],
    fn: Callable[[Any], Any],
    kind: FunctionKind,
) -> Callable[[Any], Any]:
    """Wrap a function that is called as one of this kind, so that a context manager is around each call.

    Args:
        begin: Makes the context manager for an item. Its value is a function of a result, or of each value of
            a generator, that returns the item to pass on. ``None`` drops it; the stage counts it as dropped
            only if the generator gave ``None`` itself.
        fn: The function.
        kind: How to call it. The wrapper is of the same kind, which decides whether a thread or the loop
            calls it.
    """

    def call(item: Any) -> Any:
        with begin(item) as result_of:
            return result_of(fn(item))

    async def call_async(item: Any) -> Any:
        with begin(item) as result_of:
            return result_of(await fn(item))

    def generate(item: Any) -> Iterator[Any]:
        with begin(item) as result_of, closing(fn(item)) as values:
            for value in values:
                if (result := result_of(value)) is not None or value is None:
                    yield result

    async def generate_async(item: Any) -> AsyncIterator[Any]:
        with begin(item) as result_of:
            async with aclosing(fn(item)) as values:
                async for value in values:
                    if (result := result_of(value)) is not None or value is None:
                        yield result

    wrappers: dict[FunctionKind, Callable[..., Any]] = {
        "function": call,
        "async": call_async,
        "generator": generate,
        "async_generator": generate_async,
    }
    return wrappers[kind]


@contextmanager
def _around_task(hook: TaskHook, item: Any) -> Iterator[Callable[[T], T]]:
    hook.task_start(item)
    # After the hook, whose own time does not count as part of the call.
    start = perf_counter()
    try:
        yield lambda result: result
    except BaseException as error:
        hook.task_end(item, perf_counter() - start, error)
        raise
    hook.task_end(item, perf_counter() - start, None)


@dataclass(frozen=True, slots=True)
class ThreadPoolExecutorConfig:
    """A thread pool for one stage.

    Args:
        max_workers: Number of threads; the default is the stage's concurrency.

    Raises:
        TypeError: ``max_workers`` is not an integer.
        ValueError: ``max_workers`` is below 1.
    """

    max_workers: int | None = None

    def __post_init__(self) -> None:
        if self.max_workers is not None:
            check_int("max_workers of ThreadPoolExecutorConfig", self.max_workers)


@dataclass(frozen=True, slots=True)
class ProcessPoolExecutorConfig:
    """A process pool for one stage.

    The stage's function is sent to each worker process once, when the process starts. Inputs and results are
    pickled item by item. Arrays in results are passed in shared memory on systems with anonymous shared files
    (Linux, macOS).

    Args:
        max_workers: Number of processes; the default is the stage's concurrency, divided by ``num_threads``.
        mp_context: Start method: ``"forkserver"``, ``"spawn"`` or ``"fork"``. The default is ``"forkserver"``
            where the system has it, else, and in a process that was forked itself, ``"spawn"``: a worker may
            have to be replaced while threads run, and a fork then copies locks that no thread will ever
            release.
        initializer: Called with ``initargs`` by each process before its first item.
        initargs: Arguments of ``initializer``.
        num_threads: Threads of each process, and so the number of items that it works on at a time. When the
            process dies, all of them fail.

    Raises:
        TypeError: A number is not an integer, or ``initializer`` not callable.
        ValueError: A number is below 1, or this system does not have the start method.
    """

    max_workers: int | None = None
    mp_context: str | None = None
    initializer: Callable[..., object] | None = None
    initargs: tuple[Any, ...] = ()
    num_threads: int = 1

    def __post_init__(self) -> None:
        _check_pool(self)
        check_int("num_threads of ProcessPoolExecutorConfig", self.num_threads)
        # The start methods depend on the system: Windows has "spawn" alone.
        if self.mp_context is not None:
            methods = tuple(multiprocessing.get_all_start_methods())
            check_choice("mp_context of ProcessPoolExecutorConfig", self.mp_context, methods)


@dataclass(frozen=True, slots=True)
class InterpreterPoolExecutorConfig:
    """A pool of sub-interpreters for one stage, each with its own GIL. Needs CPython 3.14 or later.

    For functions in pure Python: NumPy, PyAV and most other extension modules cannot be imported in a
    sub-interpreter.

    Args:
        max_workers: Number of interpreters; the default is the stage's concurrency.
        initializer: Called with ``initargs`` in each interpreter before its first item.
        initargs: Arguments of ``initializer``.

    Raises:
        TypeError: ``max_workers`` is not an integer, or ``initializer`` not callable.
        ValueError: ``max_workers`` is below 1.
        RuntimeError: This Python has no sub-interpreters.
    """

    max_workers: int | None = None
    initializer: Callable[..., object] | None = None
    initargs: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        _check_pool(self)
        # Report this when the definition is made, not when it is run.
        if sys.version_info < (3, 14):
            version = ".".join(map(str, sys.version_info[:2]))
            raise RuntimeError(
                f"InterpreterPoolExecutorConfig needs CPython 3.14 or later, this is {version}. "
                "ProcessPoolExecutorConfig does the same with processes."
            )


ExecutorConfig: TypeAlias = (
    ThreadPoolExecutorConfig | ProcessPoolExecutorConfig | InterpreterPoolExecutorConfig
)


def _check_pool(config: ProcessPoolExecutorConfig | InterpreterPoolExecutorConfig) -> None:
    kind = type(config).__name__
    if config.max_workers is not None:
        check_int(f"max_workers of {kind}", config.max_workers)
    check_callable(f"initializer of {kind}", config.initializer, optional=True)
    if not isinstance(config.initargs, tuple):
        raise TypeError(f"initargs of {kind} must be a tuple, not {config.initargs!r}")


WHAT_PICKLES = (
    "Functions at the top of a module and objects of plain values can be pickled; lambdas, functions within "
    "functions, locks and open files cannot."
)


def check_function(name: str, fn: object) -> None:
    """Check that an argument can be called with items.

    Raises:
        TypeError: ``fn`` is not callable, or is a class whose objects are meant to be called.
    """
    check_callable(name, fn)
    # Other classes may make samples of items.
    if isinstance(fn, type) and inspect.isfunction(fn.__call__):
        raise TypeError(
            f"{name} must not be the class {fn.__name__}. Pass an object: {fn.__name__}(...)"
        )


def check_executor(name: str, fn: Callable[..., Any], executor: object) -> None:
    """Check that the function of a stage can run in an executor.

    Raises:
        TypeError: ``executor`` is not an executor or a description of one.
        ValueError: The function is asynchronous, or a generator and the executor has no threads of this
            interpreter.
        PipelineError: The function cannot be pickled, and ``executor`` describes a process pool.
    """
    if not isinstance(executor, Executor | ExecutorConfig):
        raise TypeError(
            f"executor of stage {name!r} must be a concurrent.futures.Executor or one of "
            "ThreadPoolExecutorConfig, ProcessPoolExecutorConfig and InterpreterPoolExecutorConfig, "
            f"not {kind_name(executor)}"
        )
    kind = kind_of(fn)
    where = type(executor).__name__
    if kind in ("async", "async_generator"):
        raise ValueError(
            f"Stage {name!r} is asynchronous, so it runs on the event loop and not in a "
            f"{where}. Leave out executor=, or make it a plain function."
        )
    # A generator object cannot be pickled, so it has to be stepped in this interpreter.
    if kind == "generator" and not _shares_memory(executor):
        raise ValueError(
            f"Stage {name!r} is a generator, which cannot run in a {where}: only finished "
            "values come back from there. Make it a function that returns a list, followed by "
            ".disaggregate(), or leave out executor=."
        )
    # Sub-interpreters accept lambdas as well, and the caller's executor may not use plain pickle.
    if isinstance(executor, ProcessPoolExecutorConfig):
        check_pickles(f"The function of stage {name!r}", fn, where)


def _shares_memory(executor: Executor | ExecutorConfig) -> bool:
    """Whether calls run in threads of this interpreter, which can step a generator."""
    if isinstance(executor, concurrent.futures.ThreadPoolExecutor):
        # InterpreterPoolExecutor derives from it.
        return "Interpreter" not in type(executor).__name__
    return isinstance(executor, ThreadPoolExecutorConfig)


def check_pickles(what: str, value: object, where: str = "") -> None:
    """Check that a value can be sent to another process; ``what`` names it in the error.

    Raises:
        PipelineError: The value cannot be pickled.
    """
    try:
        # ForkingPickler also pickles what only multiprocessing can send, such as connections.
        ForkingPickler.dumps(value)
    except Exception as error:  # whatever __reduce__ of a user's object raises
        needed = f", which a {where} needs" if where else ""
        raise PipelineError(f"{what} cannot be pickled{needed}: {error}. {WHAT_PICKLES}") from error


def kind_name(value: object) -> str:
    """Return the class name of a value, or ``the class X`` if the value is the class X."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def usable_cores() -> int:
    """Return the number of cores this process may use, by its affinity and its container's cgroup 2 limit."""
    # Not `os.cpu_count`, which ignores the affinity that taskset or a scheduler sets.
    if hasattr(os, "process_cpu_count"):  # CPython 3.13
        count = os.process_cpu_count()
    else:
        count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    limit = math.inf
    # Without a limit the file says "max", which is not an int. Without cgroup 2 there is no such file.
    with suppress(OSError, ValueError):
        quota, period = _CPU_LIMIT.read_text(encoding="ascii").split()
        limit = max(1, math.ceil(int(quota) / int(period)))
    return int(min(count or 1, limit))
