"""What sort of callable a stage was given, and what to call it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import CoroutineType
from typing import Any, Literal, NoReturn, TypeAlias

__all__ = ("FunctionKind", "kind_of", "name_of", "refuse_coroutine")

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
