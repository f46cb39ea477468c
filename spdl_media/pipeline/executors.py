"""How the function of a stage is called: its kind, the hook around it, and the executor it runs in.

Each run of a pipeline makes its own pool from the description of an executor, and shuts it down.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import multiprocessing
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias

from spdl_media._checks import check_callable, check_choice, check_int
from spdl_media.pipeline.engine.hub import Hub, wake
from spdl_media.pipeline.failures import PipelineError, PoolBroken

if TYPE_CHECKING:
    from spdl_media.pipeline.stages import PipeConfig

__all__ = (
    "AwaitedPool",
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


END: Any = object()


class AwaitedPool:
    """The executor of one stage. Only one of ours is shut down here.

    Attributes:
        remedy: What to do when an executor of the caller's takes no more items.

    Raises:
        PoolBroken: The executor is broken or was shut down.
    """

    remedy = (
        "It is not the pipeline's to replace; for one that is, use a description such as "
        "ProcessPoolExecutorConfig(...) or ThreadPoolExecutorConfig(...)."
    )

    def __init__(self, hub: Hub, stage: PipeConfig) -> None:
        self._hub = hub
        self._stage = stage
        self._executor, self._is_own = _executor_of(stage)
        if isinstance(self._executor, ProcessPoolExecutor):
            # Its workers start with the first items it gets: better now than as forks of a process
            # with threads, or while the event loop waits.
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
        result = await self._outcome(self._stage.fn, item)
        if isinstance(result, CoroutineType):
            refuse_coroutine(result, self._stage.name)
        return result

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
                # Nobody else can while the generator runs.
                generator.close()
            return value

        try:
            while (value := await self._outcome(step)) is not END:
                yield value
        finally:
            if not generator.gi_running:
                generator.close()

    def shutdown(self) -> None:
        """End what is ours, without waiting: a call in a sub-interpreter may take for ever."""
        if self._is_own:
            self._executor.shutdown(wait=False, cancel_futures=True)

    def _submit(self, fn: Callable[..., Any], *args: Any) -> Future[Any]:
        try:
            return self._executor.submit(fn, *args)
        except (BrokenExecutor, RuntimeError) as error:
            raise self._broken(error) from error

    async def _outcome(self, fn: Callable[..., Any], *args: Any) -> Any:
        future = self._submit(fn, *args)
        done = self._hub.loop.create_future()
        # Not asyncio.wrap_future(): the hub wakes the loop once for many results.
        future.add_done_callback(lambda _: self._hub.post_to_loop(wake, done))
        try:
            await done
        finally:
            # It took too long, or the run is over. After its end this does nothing.
            future.cancel()
        if future.cancelled():
            # By who shuts the executor down.
            raise self._broken(CancelledError())
        # Not result(), which raises: the frames in the traceback would keep the item alive.
        if (error := future.exception()) is None:
            return future.result()
        if isinstance(error, BrokenExecutor):
            # Raises, unless the item itself has raised it.
            self._submit(int)
        raise self._translated(error)

    def _broken(self, error: BaseException) -> PoolBroken:
        own = "Its initializer must work in each sub-interpreter."
        remedy = own if self._is_own else self.remedy
        broken = PoolBroken(
            f"The {type(self._executor).__name__} of stage {self._stage.name!r} takes no more items: "
            f"{str(error) or type(error).__name__}. {remedy}"
        )
        broken.__cause__ = error
        return broken

    def _translated(self, error: BaseException) -> BaseException:
        # By name as well, because only CPython 3.14 has the class.
        is_refusal = isinstance(error, ImportError) or type(error).__name__ == "NotShareableError"
        if not (self._is_own and is_refusal):
            return error
        translated = PipelineError(
            f"Stage {self._stage.name!r} cannot run in a sub-interpreter: {_reason(error)}. Only "
            "pure Python can: NumPy, PyAV and most other extension modules cannot be imported "
            "there, nor can modules that import them. Use ProcessPoolExecutorConfig, or threads."
        )
        translated.__cause__ = error
        return translated


def _executor_of(stage: PipeConfig) -> tuple[Executor, bool]:
    config = stage.executor
    if isinstance(config, Executor):
        return config, False
    assert isinstance(config, InterpreterPoolExecutorConfig)
    # By name, because only CPython 3.14 and its type stubs have it.
    kind = importlib.import_module("concurrent.futures").InterpreterPoolExecutor
    executor: Executor = kind(
        config.max_workers or stage.concurrency,
        thread_name_prefix=f"spdl_media {stage.name}",
        initializer=config.initializer,
        initargs=config.initargs,
    )
    return executor, True


def _reason(error: BaseException) -> str:
    """The line that says which import or value it was. It may be deep in the text of a cause."""
    lines = [line.strip() for line in "".join(traceback.format_exception(error)).splitlines()]
    # CPython's words for an extension module that one interpreter at a time can have.
    telling = (line for line in lines if "does not support" in line)
    return next(telling, str(error) or type(error).__name__)[:300]
