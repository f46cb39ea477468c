"""How the function of a stage is called: its kind, the hook around it, and the executor it runs in.

Each run of a pipeline makes its own pool from the description of an executor, and shuts it down.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import multiprocessing
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import (
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    ProcessPoolExecutor,
)
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias

from spdl_media._checks import check_callable, check_choice, check_int
from spdl_media.pipeline.failures import PipelineError, PoolBroken

if TYPE_CHECKING:
    from spdl_media.pipeline.stages import PipeConfig

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
    """Say that a plain function returned what nobody will await.

    Raises:
        TypeError: Always.
    """
    # Closed, or the interpreter warns that nobody awaited it.
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
    """What is called around the tasks of one stage. Override what is wanted; each does nothing by itself.

    ``task_hook_factory`` makes one for each stage. The methods of tasks are called in the thread that
    makes the call, so by several threads at once when the stage's concurrency is above one; of an
    asynchronous stage, and of one in processes, on the event loop, where they must not block. An
    exception that they raise fails the item.
    """

    def stage_start(self) -> None:
        """Called once, before the first item of a run."""

    def task_start(self, item: Any) -> None:
        """Called before the stage's function is called with ``item``."""

    def task_end(self, item: Any, seconds: float, error: BaseException | None) -> None:
        """Called after the call: how long it took, and what it raised.

        Of a generator once, when it has ended or failed; ``seconds`` has the time in which it was paused.
        """

    def stage_end(self) -> None:
        """Called once, when the run ends."""


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
    pickled item by item.

    Args:
        max_workers: How many; the default is the stage's concurrency.
        mp_context: How they start: ``"forkserver"``, ``"spawn"`` or ``"fork"``. The default is
            ``"forkserver"`` where the system has it, else ``"spawn"``: workers may have to be
            replaced while threads run, and a fork then copies locks that nobody will open.
        initializer: Called with ``initargs`` by each process before its first item.
        initargs: What it is called with.
    """

    max_workers: int | None = None
    mp_context: str | None = None
    initializer: Callable[..., object] | None = None
    initargs: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        _check_pool(self)
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


class StagePool(ABC):
    """Runs a stage's function on items somewhere else.

    Attributes:
        keeps_time: Whether it sees to the timeout of the stage itself: such a pool counts from the
            moment at which a call begins, and knows how to end it.

    Thread safety: all methods may be called from any thread.
    """

    keeps_time = False

    @abstractmethod
    def submit(self, item: Any) -> Future[Any]:
        """Hand over an item, without waiting. What it raises, an executor of the caller's, fails the item.

        Returns:
            A future of the result. It fails as the function failed, with
            :class:`~spdl_media.pipeline.WorkerDied` when a worker of ours ended with the item,
            and with :class:`~spdl_media.pipeline.PoolBroken` when no item can be handed over any
            more. It can be cancelled while the call has not begun.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """End what is ours, without waiting: running calls are cut short where that is possible."""


NOT_OURS = (
    "It is not the pipeline's to replace; for one that is, use a description such as {}(...)."
)


def pool_broken(executor: Executor, stage: str, error: BaseException, remedy: str) -> PoolBroken:
    """Make the failure of an executor that takes no more items."""
    broken = PoolBroken(
        f"The {type(executor).__name__} of stage {stage!r} takes no more items: "
        f"{str(error) or type(error).__name__}. {remedy}"
    )
    broken.__cause__ = error
    return broken


class CallersPool(StagePool):
    """An executor that belongs to the caller, who alone may shut it down."""

    _remedy = NOT_OURS.format("ProcessPoolExecutorConfig")

    def __init__(self, stage: PipeConfig, executor: Executor) -> None:
        self._stage = stage
        self._executor = executor
        if isinstance(executor, ProcessPoolExecutor):
            # Its workers start with the first items it gets: better now than as forks of a process
            # with threads, or while the event loop waits.
            try:
                for _ in range(stage.concurrency):
                    executor.submit(int)
            except (BrokenExecutor, RuntimeError) as error:
                raise self._broken(error) from error

    def submit(self, item: Any) -> Future[Any]:  # see StagePool
        outer: Future[Any] = Future()
        try:
            inner = self._executor.submit(self._stage.fn, item)
        except (BrokenExecutor, RuntimeError) as error:
            outer.set_exception(self._broken(error))
        else:
            outer.add_done_callback(lambda done: inner.cancel() if done.cancelled() else None)
            inner.add_done_callback(lambda done: self._hand_on(done, outer))
        return outer

    def shutdown(self) -> None:
        """Nothing: the caller shuts it down."""

    def _hand_on(self, inner: Future[Any], outer: Future[Any]) -> None:
        if not outer.set_running_or_notify_cancel():
            return
        # Not by inner.result(), which raises: the frames in the traceback would keep the item alive.
        error = CancelledError() if inner.cancelled() else inner.exception()
        if error is None:
            outer.set_result(inner.result())
        elif isinstance(error, BrokenExecutor | CancelledError):
            outer.set_exception(self._broken(error))
        else:
            outer.set_exception(self._translated(error))

    def _translated(self, error: BaseException) -> BaseException:
        return error

    def _broken(self, error: BaseException) -> PoolBroken:
        return pool_broken(self._executor, self._stage.name, error, self._remedy)


class InterpreterPool(CallersPool):
    """Sub-interpreters of our own. A call in one cannot be cut short."""

    _remedy = "Its initializer must work in each sub-interpreter."

    def __init__(self, stage: PipeConfig, config: InterpreterPoolExecutorConfig) -> None:
        # By name, because only CPython 3.14 and its type stubs have it.
        executor: Executor = importlib.import_module("concurrent.futures").InterpreterPoolExecutor(
            config.max_workers or stage.concurrency,
            thread_name_prefix=f"spdl_media {stage.name}",
            initializer=config.initializer,
            initargs=config.initargs,
        )
        super().__init__(stage, executor)

    def shutdown(self) -> None:  # see StagePool
        # Not waited for: a call in a sub-interpreter may take for ever.
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _translated(self, error: BaseException) -> BaseException:
        # By name as well, because only CPython 3.14 has the class.
        if not isinstance(error, ImportError) and type(error).__name__ != "NotShareableError":
            return error
        translated = PipelineError(
            f"Stage {self._stage.name!r} cannot run in a sub-interpreter: {_reason(error)}. Only "
            "pure Python can: NumPy, PyAV and most other extension modules cannot be imported "
            "there, nor can modules that import them. Use ProcessPoolExecutorConfig, or threads."
        )
        translated.__cause__ = error
        return translated


def _reason(error: BaseException) -> str:
    """The line that says which import or value it was. It may be deep in the text of a cause."""
    lines = [line.strip() for text in _chain(error) for line in str(text).splitlines()]
    lines = [line for line in lines if line]
    # CPython's words for an extension module that one interpreter at a time can have.
    telling = [line for line in lines if "does not support" in line]
    return (telling or lines or [type(error).__name__])[0][:300]


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
