"""The user's functions as stages: they see plain values, and the ledger learns what became of them."""

from __future__ import annotations

import inspect
from asyncio import CancelledError, current_task
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from types import CoroutineType
from typing import Any, TypeAlias

from spdl_media._dataloading.intervals import Intervals
from spdl_media._dataloading.ledger import Ledger
from spdl_media._dataloading.tagged import Batch, Item, Sample, tags_of, value_of
from spdl_media.pipeline.functions import FunctionKind, kind_of, name_of, refuse_coroutine

__all__ = ("batch_stage", "item_stage", "takes_rng")

Extra: TypeAlias = Callable[[int], dict[str, Any]]
"""Further arguments for the item at a position."""


def takes_rng(fn: Callable[..., Any]) -> bool:
    """Whether a function has a parameter named ``rng``, apart from its first, which is the item."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):  # some functions of C have no signature
        return False
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return any(
        parameter.name == "rng" and parameter.kind in by_name
        for place, parameter in enumerate(parameters)
        if place > 0
    )


def item_stage(fn: Callable[..., Any], ledger: Ledger, extra: Extra) -> Callable[[Item], Any]:
    """The preprocessor as a stage from items to samples, of the same kind as the function."""
    stage: Callable[[Item], Any] = _ITEM_STAGES[kind_of(fn)](fn, ledger, extra)
    return stage


def _of_function(fn: Callable[..., Any], ledger: Ledger, extra: Extra) -> Callable[[Item], Any]:
    def preprocess(item: Item) -> Sample | None:
        try:
            value = fn(item.value, **extra(item.position))
            if isinstance(value, CoroutineType):
                refuse_coroutine(value, name_of(fn))
        except BaseException:
            ledger.settle([(item.position, None)])
            raise
        return _sample(item.position, None, value, ledger)

    return preprocess


def _of_async(fn: Callable[..., Any], ledger: Ledger, extra: Extra) -> Callable[[Item], Any]:
    async def preprocess(item: Item) -> Sample | None:
        try:
            value = await fn(item.value, **extra(item.position))
        except BaseException as error:
            if not _ends_with_run(error):
                ledger.settle([(item.position, None)])
            raise
        return _sample(item.position, None, value, ledger)

    return preprocess


def _of_generator(fn: Callable[..., Any], ledger: Ledger, extra: Extra) -> Callable[[Item], Any]:
    def preprocess(item: Item) -> Iterator[Sample]:
        done = Intervals(item.done)
        count = 0
        try:
            for value in fn(item.value, **extra(item.position)):
                offset, count = count, count + 1
                sample = None if offset in done else _sample(item.position, offset, value, ledger)
                if sample is not None:
                    yield sample
        except GeneratorExit:
            # The run has ended, and the item is made again in the next one.
            raise
        except BaseException:
            ledger.count_samples(item.position, count)
            raise
        ledger.count_samples(item.position, count)

    return preprocess


def _of_async_generator(
    fn: Callable[..., Any], ledger: Ledger, extra: Extra
) -> Callable[[Item], Any]:
    async def preprocess(item: Item) -> AsyncIterator[Sample]:
        done = Intervals(item.done)
        count = 0
        try:
            async with aclosing(fn(item.value, **extra(item.position))) as values:
                async for value in values:
                    offset, count = count, count + 1
                    sample = (
                        None if offset in done else _sample(item.position, offset, value, ledger)
                    )
                    if sample is not None:
                        yield sample
        except BaseException as error:
            if not _ends_with_run(error):
                ledger.count_samples(item.position, count)
            raise
        ledger.count_samples(item.position, count)

    return preprocess


def _ends_with_run(error: BaseException) -> bool:
    """Whether a call did not end by itself: what it was given is then made again in the next run."""
    if isinstance(error, CancelledError):
        # The function may raise it as well, and has failed then.
        task = current_task()
        return task is not None and task.cancelling() > 0
    return isinstance(error, GeneratorExit)


_ITEM_STAGES: dict[FunctionKind, Callable[[Callable[..., Any], Ledger, Extra], Any]] = {
    "function": _of_function,
    "async": _of_async,
    "generator": _of_generator,
    "async_generator": _of_async_generator,
}


def _sample(position: int, offset: int | None, value: Any, ledger: Ledger) -> Sample | None:
    if value is None:
        ledger.settle([(position, offset)])
        return None
    return Sample(position, offset, value)


def batch_stage(fn: Callable[[Any], Any], ledger: Ledger) -> Callable[[Any], Any]:
    """The aggregator or the transfer as a stage: from samples or a batch to a batch."""
    if kind_of(fn) == "async":
        return _of_async_on_batches(fn, ledger)

    def convert(tagged: Any) -> Batch | None:
        try:
            value = fn(value_of(tagged))
            if isinstance(value, CoroutineType):
                refuse_coroutine(value, name_of(fn))
        except BaseException:
            ledger.settle(tags_of(tagged))
            raise
        return _batch(tagged, value, ledger)

    return convert


def _of_async_on_batches(fn: Callable[[Any], Any], ledger: Ledger) -> Callable[[Any], Any]:
    async def convert(tagged: Any) -> Batch | None:
        try:
            value = await fn(value_of(tagged))
        except BaseException as error:
            if not _ends_with_run(error):
                ledger.settle(tags_of(tagged))
            raise
        return _batch(tagged, value, ledger)

    return convert


def _batch(tagged: Any, value: Any, ledger: Ledger) -> Batch | None:
    tags = tags_of(tagged)
    if value is None:
        ledger.settle(tags)
        return None
    return Batch(tags, value)
