"""How the function of a stage is called: its kind, its name, and the hooks around its calls."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from types import CoroutineType
from typing import Any, Literal, NoReturn, TypeAlias

__all__ = (
    "FunctionKind",
    "TaskHook",
    "kind_of",
    "name_of",
    "refuse_coroutine",
)

FunctionKind: TypeAlias = Literal["function", "async", "generator", "async_generator"]


def kind_of(fn: Callable[..., Any]) -> FunctionKind:
    """Tell how a callable has to be called, without calling it.

    A plain function that returns a generator counts as a function: what it returns is an item.
    """
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
    start = perf_counter()
    try:
        yield
    except BaseException as error:
        hook.task_end(item, perf_counter() - start, error)
        raise
    hook.task_end(item, perf_counter() - start, None)
