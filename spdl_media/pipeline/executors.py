"""How the function of a stage is called: its kind, the hook around it, and descriptions of executors.

Each run of a pipeline makes its own pool from such a description, and shuts it down (:mod:`pools`).
"""

from __future__ import annotations

import concurrent.futures
import functools
import inspect
import multiprocessing
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from time import perf_counter
from types import CoroutineType
from typing import Any, Literal, NoReturn, TypeAlias

from spdl_media._checks import check_callable, check_choice, check_int
from spdl_media.pipeline.failures import PipelineError

__all__ = (
    "ExecutorConfig",
    "FunctionKind",
    "InterpreterPoolExecutorConfig",
    "ProcessPoolExecutorConfig",
    "TaskHook",
    "ThreadPoolExecutorConfig",
    "kind_of",
    "name_of",
    "refuse_coroutine",
)

FunctionKind: TypeAlias = Literal["function", "async", "generator", "async_generator"]


def kind_of(fn: Callable[..., Any]) -> FunctionKind:
    """Tell how a callable has to be called, without calling it.

    A plain function that returns a generator counts as a function: what it returns is an item.
    """
    # inspect looks into functools.partial, but not at __call__ of an instance.
    fn = _innermost(fn)
    if inspect.isasyncgenfunction(fn):
        return "async_generator"
    if inspect.iscoroutinefunction(fn):
        return "async"
    return "generator" if inspect.isgeneratorfunction(fn) else "function"


def name_of(fn: Callable[..., Any]) -> str:
    """The name a reader knows a callable by: of the function, else of its class.

    Lambdas are called ``lambda``, functions within functions by their last name alone.
    """
    while isinstance(fn, functools.partial):
        fn = fn.func
    name = getattr(fn, "__name__", None) or type(fn).__name__
    return str(name).strip("<>")


def refuse_coroutine(coroutine: CoroutineType[Any, Any, Any], stage: str) -> NoReturn:
    """Say that a plain function returned a coroutine, which nothing awaits.

    Raises:
        TypeError: Always.
    """
    # Closed, or the interpreter warns that it was never awaited.
    coroutine.close()
    raise TypeError(
        f"the function of stage {stage!r} returned a coroutine, so the call was not made. A function is "
        'awaited when it is defined by "async def"; write one that awaits what this one returns'
    )


def _innermost(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function that runs in the end: within ``partial``, or ``__call__`` of an instance."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    # A class is called to make an instance, whatever calling that one does.
    if inspect.isroutine(fn) or isinstance(fn, type):
        return fn
    return _innermost(type(fn).__call__) if callable(fn) else fn


class TaskHook:
    """Hooks around the tasks of one stage. Override those you want; each does nothing by itself.

    ``task_hook_factory`` makes one for each stage. The methods of tasks are called in the thread that
    makes or awaits the call, so by several threads at once when the stage's concurrency is above one; of an
    asynchronous stage, and of one in an executor of yours, on the event loop, where they must not block.
    An exception that they raise fails the item.
    """

    def stage_start(self) -> None:
        """Called once, before the first item of a run.

        Raises:
            BaseException: Yours. The run does not start, and whoever starts it gets the exception.
        """

    def task_start(self, item: Any) -> None:
        """Called before the stage's function is called with ``item``.

        Raises:
            Exception: Yours. The item fails.
        """

    def task_end(self, item: Any, seconds: float, error: BaseException | None) -> None:
        """Called after the call: how long it took, and what it raised.

        Of a generator once, when it has ended or failed; ``seconds`` has the time in which it was paused.

        Raises:
            Exception: Yours. The item fails.
        """

    def stage_end(self) -> None:
        """Called once, when the run ends.

        Raises:
            BaseException: Yours. It is logged, and changes nothing.
        """


def hooked(fn: Callable[..., Any], hook: TaskHook) -> Callable[..., Any]:
    """Wrap a function of any kind so that the hook is called around each call."""

    def call(item: Any) -> Any:
        with _around_task(hook, item):
            return fn(item)

    async def call_async(item: Any) -> Any:
        with _around_task(hook, item):
            return await fn(item)

    def generate(item: Any) -> Iterator[Any]:
        with _around_task(hook, item):
            yield from fn(item)

    async def generate_async(item: Any) -> AsyncIterator[Any]:
        with _around_task(hook, item):
            async for value in fn(item):
                yield value

    # One of each kind, because the kind decides who makes the call: a thread, or the event loop.
    wrappers: dict[FunctionKind, Callable[..., Any]] = {
        "function": call,
        "async": call_async,
        "generator": generate,
        "async_generator": generate_async,
    }
    return functools.wraps(fn)(wrappers[kind_of(fn)])


@contextmanager
def _around_task(hook: TaskHook, item: Any) -> Iterator[None]:
    hook.task_start(item)
    # After the hook, whose own time is not the call's.
    start = perf_counter()
    try:
        yield
    except BaseException as error:
        hook.task_end(item, perf_counter() - start, error)
        raise
    hook.task_end(item, perf_counter() - start, None)


@dataclass(frozen=True, slots=True)
class ThreadPoolExecutorConfig:
    """Threads of a stage's own.

    Args:
        max_workers: How many; the default is the stage's concurrency.
        initializer: Called with ``initargs`` by each thread before its first item.
        initargs: What it is called with.
    """

    max_workers: int | None = None
    initializer: Callable[..., object] | None = None
    initargs: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        _check_pool(self)


@dataclass(frozen=True, slots=True)
class ProcessPoolExecutorConfig:
    """Processes of a stage's own.

    The stage's function is sent to each worker once, when it starts; inputs and results are
    pickled item by item. Arrays of results cross in shared memory where the system has files without
    a name (Linux, macOS).

    Args:
        max_workers: How many; the default is the stage's concurrency, divided by ``num_threads``.
        mp_context: How they start: ``"forkserver"``, ``"spawn"`` or ``"fork"``. The default is
            ``"forkserver"`` where the system has it, else ``"spawn"``: workers may have to be
            replaced while threads run, and a fork then copies locks that nobody will open.
        initializer: Called with ``initargs`` by each process before its first item.
        initargs: What it is called with.
        num_threads: Threads of each process, and items that it has at a time. They share its fate.
    """

    max_workers: int | None = None
    mp_context: str | None = None
    initializer: Callable[..., object] | None = None
    initargs: tuple[Any, ...] = ()
    num_threads: int = 1

    def __post_init__(self) -> None:
        _check_pool(self)
        check_int("num_threads of ProcessPoolExecutorConfig", self.num_threads)
        # Which there are depends on the system: Windows has "spawn" alone.
        if self.mp_context is not None:
            methods = tuple(multiprocessing.get_all_start_methods())
            check_choice("mp_context of ProcessPoolExecutorConfig", self.mp_context, methods)


@dataclass(frozen=True, slots=True)
class InterpreterPoolExecutorConfig:
    """Sub-interpreters of a stage's own, each with a GIL of its own. CPython 3.14 and later.

    For functions in pure Python: NumPy, PyAV and most other extension modules cannot be imported
    in a sub-interpreter.

    Args:
        max_workers: How many; the default is the stage's concurrency.
        initializer: Called with ``initargs`` in each interpreter before its first item.
        initargs: What it is called with.

    Raises:
        RuntimeError: This Python has no sub-interpreters.
    """

    max_workers: int | None = None
    initializer: Callable[..., object] | None = None
    initargs: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        _check_pool(self)
        # Told when the definition is made, not when it is run.
        if sys.version_info < (3, 14):
            version = ".".join(map(str, sys.version_info[:2]))
            raise RuntimeError(
                f"InterpreterPoolExecutorConfig needs CPython 3.14 or later, this is {version}. "
                "ProcessPoolExecutorConfig does the same with processes."
            )


ExecutorConfig: TypeAlias = (
    ThreadPoolExecutorConfig | ProcessPoolExecutorConfig | InterpreterPoolExecutorConfig
)


def _check_pool(config: ExecutorConfig) -> None:
    kind = type(config).__name__
    if config.max_workers is not None:
        check_int(f"max_workers of {kind}", config.max_workers)
    if config.initializer is not None:
        check_callable(f"initializer of {kind}", config.initializer)
    if not isinstance(config.initargs, tuple):
        raise TypeError(f"initargs of {kind} must be a tuple, not {config.initargs!r}")


WHAT_PICKLES = (
    "Functions at the top of a module and objects of plain values can be pickled; lambdas, functions within "
    "functions, locks and open files cannot."
)


def check_function(fn: object) -> None:
    """Refuse what cannot be called with items.

    Raises:
        TypeError: It is no function.
    """
    if inspect.iscoroutine(fn) or inspect.isasyncgen(fn) or inspect.isgenerator(fn):
        raise TypeError(
            f"pipe() takes a function, not what calling {fn.__name__}() gave. "
            f"Write .pipe({fn.__name__}), without the brackets."
        )
    check_callable("What pipe() applies to each item", fn)


def check_executor(name: str, fn: Callable[..., Any], executor: object) -> None:
    """Refuse an executor in which the function of a stage cannot run.

    Raises:
        TypeError: It is no executor.
        ValueError: The function is asynchronous, or a generator that would have to run elsewhere.
        PipelineError: The function cannot be pickled, and would have to be.
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
    # It is stepped value by value, and cannot be sent elsewhere between two of them.
    if kind == "generator" and not _shares_memory(executor):
        raise ValueError(
            f"Stage {name!r} is a generator, which cannot run in a {where}: only finished "
            "values come back from there. Make it a function that returns a list, followed by "
            ".disaggregate(), or leave out executor=."
        )
    # Sub-interpreters take lambdas as well, and a user's executor may pickle by other means.
    if isinstance(executor, ProcessPoolExecutorConfig):
        check_pickles(f"The function of stage {name!r}", fn, where)


def _shares_memory(executor: Executor | ExecutorConfig) -> bool:
    """Whether calls run in threads of this interpreter, where a generator can be stepped."""
    if isinstance(executor, concurrent.futures.ThreadPoolExecutor):
        # InterpreterPoolExecutor derives from it.
        return "Interpreter" not in type(executor).__name__
    return isinstance(executor, ThreadPoolExecutorConfig)


def check_pickles(what: str, value: object, where: str = "") -> None:
    """Refuse what cannot be sent to another process, and say what it is.

    Raises:
        PipelineError: It cannot be pickled.
    """
    try:
        # Knows what multiprocessing can send beyond plain pickle, such as connections.
        ForkingPickler.dumps(value)
    except Exception as error:  # whatever __reduce__ of a user's object raises
        needed = f", which a {where} needs" if where else ""
        raise PipelineError(f"{what} cannot be pickled{needed}: {error}. {WHAT_PICKLES}") from error


def kind_name(value: object) -> str:
    """Name the class of a value, or the value itself if it is a class."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
