"""Build the pipeline of one iteration of a DataLoader: stages that call the user's functions with values."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from spdl_media._collate import collate
from spdl_media._resume import Ledger, State
from spdl_media.epochs import place_maker
from spdl_media.loader_arguments import executor_of, rng_parameter, usable_cores
from spdl_media.loader_items import (
    StandIns,
    Tagged,
    ends_with_run,
    is_final,
    sample_rng,
    tag_result,
    tags_of,
    value_of,
)
from spdl_media.pipeline import (
    AggregateConfig,
    PipeConfig,
    Pipeline,
    PipelineConfig,
    SinkConfig,
    SourceConfig,
    ThreadPoolExecutorConfig,
)
from spdl_media.pipeline.executors import kind_of, name_of, refuse_coroutine
from spdl_media.pipeline.stages import StageConfig

if TYPE_CHECKING:
    from spdl_media.pipeline.engine.hub import Node

# Applies the user's function to the value of a tagged item.
_Call: TypeAlias = Callable[[Any], Any]


class _SingleResult:
    """Context of a call with one result: tags it, or marks its samples as done if there is no result."""

    def __init__(self, tagged: Any, ledger: Ledger) -> None:
        self._tags = tags_of(tagged)
        self._ledger = ledger

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, _traceback: object) -> None:
        if error is not None and not ends_with_run(error):
            self._ledger.settle(self._tags)

    def tag(self, value: Any) -> Tagged | None:
        """Return the result, or ``None`` if it is dropped."""
        return tag_result(value, self._tags, self._ledger)


class _SeveralResults(_SingleResult):
    """Context of a call with several samples of one item, which are tagged with their offsets."""

    def __init__(self, tagged: Tagged, ledger: Ledger) -> None:
        super().__init__(tagged, ledger)
        ((self._position, _),) = tagged.tags
        self._done = ledger.done_offsets(self._position)
        self._count = 0

    def __exit__(self, _: object, error: BaseException | None, _traceback: object) -> None:
        if error is None or not ends_with_run(error):
            self._ledger.count_samples(self._position, self._count)

    def tag(self, value: Any) -> Tagged | None:
        """Return the next sample, tagged; ``None`` if it is dropped or was done before the resume."""
        # Counted even if it is dropped, so that offsets are the same after a resume.
        offset, self._count = self._count, self._count + 1
        if offset in self._done:
            return None
        return tag_result(value, ((self._position, offset),), self._ledger)


def _function(call: _Call, ledger: Ledger) -> _Call:
    # Without the context manager of the others, which would double the time of this function.
    def stage(tagged: Any) -> Tagged | None:
        try:
            value = call(tagged)
        except BaseException:
            ledger.settle(tags_of(tagged))
            raise
        return tag_result(value, tags_of(tagged), ledger)

    return stage


def _coroutine_function(call: _Call, ledger: Ledger) -> _Call:
    async def stage(tagged: Any) -> Tagged | None:
        with _SingleResult(tagged, ledger) as one:
            return one.tag(await call(tagged))

    return stage


def _generator_function(call: _Call, ledger: Ledger) -> _Call:
    def stage(item: Tagged) -> Iterator[Tagged]:
        with _SeveralResults(item, ledger) as several:
            yield from filter(None, map(several.tag, call(item)))

    return stage


def _async_generator_function(call: _Call, ledger: Ledger) -> _Call:
    async def stage(item: Tagged) -> AsyncIterator[Tagged]:
        with _SeveralResults(item, ledger) as several:
            async with aclosing(call(item)) as values:
                async for value in values:
                    if sample := several.tag(value):
                        yield sample

    return stage


_KINDS = {
    "function": _function,
    "async": _coroutine_function,
    "generator": _generator_function,
    "async_generator": _async_generator_function,
}


@dataclass(frozen=True)
class ItemCall:
    """Reads an item of a dataset and preprocesses it. Picklable if its functions are.

    Attributes:
        steps: The function that reads the item, the preprocessor, or both.
        rng_key: Seed and epoch, if the preprocessor takes ``rng``.
    """

    steps: Sequence[Callable[..., Any]]
    rng_key: tuple[int, int] | None

    def __call__(self, request: tuple[Any, int]) -> Any:
        """Make the sample of an item. ``request`` is the item and the position for its random numbers."""
        value, place = request
        for step in self._steps(place):
            value = step(value)
            if value is None:
                break
        return value

    def _steps(self, place: int) -> Iterator[Callable[..., Any]]:
        # The preprocessor is the last step, and the only one that takes `rng`.
        *first, last = self.steps
        yield from first
        yield last if self.rng_key is None else partial(last, rng=sample_rng(*self.rng_key, place))


class AsyncItemCall(ItemCall):
    """An ItemCall with a step that is a coroutine function; other steps run in a thread."""

    async def __call__(self, request: tuple[Any, int]) -> Any:
        """Make the sample of an item. ``request`` is the item and the position for its random numbers."""
        value, place = request
        for step in self._steps(place):
            # This call runs on the event loop and must not block it.
            is_async = kind_of(step) == "async"
            value = await (step(value) if is_async else asyncio.to_thread(step, value))
            if value is None:
                break
        return value


class LoaderStages:
    """Builds the pipeline of one iteration.

    Args:
        loader: The loader, a :class:`~spdl_media.DataLoader`.
        start: Where the iteration starts.
        ledger: Records which samples are done.

    Raises:
        ValueError: ``on_error="replace"`` with a source whose items cannot be accessed by position.
    """

    def __init__(self, loader: Any, start: State, ledger: Ledger) -> None:
        source, preprocessor = loader._source, loader.preprocessor
        self._loader, self._start, self._ledger = loader, start, ledger
        draws = preprocessor is not None and rng_parameter(preprocessor)
        # Maps a position to that among the samples of all ranks, so that ranks draw different numbers.
        self._place = place_maker(source.source, start.before) if draws else int
        self._rng_key = (start.seed, start.epoch) if draws else None
        self._fetch, self._preprocessor = source.fetch, preprocessor
        self._steps = [fn for fn in (source.fetch, preprocessor) if fn is not None]
        self._executor, self._cache = executor_of(loader), loader._samples
        self._stand_ins: StandIns | None = None
        if callable(loader.on_error):
            self._stand_ins = StandIns(loader.on_error, None, ledger)
        elif loader.on_error == "replace":
            self._stand_ins = StandIns(None, source.positions_to_replace(start), ledger)

    def pipeline(self) -> Pipeline[Any]:
        """Build the pipeline from the source to finished batches."""
        loader, ledger = self._loader, self._ledger
        stages: list[StageConfig] = [*self._item_stages()]
        items = None if self._stand_ins is None else self._stand_ins.items
        # Without a stage for items, the source has to drop items that are None.
        feed = loader._source.feed(self._start, ledger, items, drops_none=not stages)
        if loader.batch_size is not None:
            stages.append(AggregateConfig(loader.batch_size, drop_last=loader.drop_last))
        aggregator = loader.aggregator
        # Batches stay lists of samples unless `to` requests arrays.
        if aggregator is None and loader.batch_size is not None and loader.to is not None:
            aggregator = collate
        if aggregator is not None:
            # Processes run the calls for items if there are any, because those take most of the time.
            is_elsewhere = loader.num_processes is not None and not self._steps
            options = self._parallel(aggregator, self._executor if is_elsewhere else None)
            stages.append(self._tagged(aggregator, **options))
        if loader.transfer_fn is not None:
            # One thread, because each thread has its own CUDA stream and copies must stay in order.
            one_thread = ThreadPoolExecutorConfig(max_workers=1)
            stages.append(self._tagged(loader.transfer_fn, executor=one_thread))
        on_failure = loader.on_failure
        return Pipeline(
            PipelineConfig(SourceConfig(feed), stages, SinkConfig(loader.buffer_size)),
            num_threads=loader.num_threads or usable_cores(),
            max_failures=0 if loader.on_error == "raise" else loader.max_failures,
            on_failure=None
            if on_failure is None
            else lambda record, tagged: on_failure(record, value_of(tagged)),
        )

    def _parallel(self, fn: Callable[..., Any], executor: Any = None) -> dict[str, Any]:
        """Return the options of a stage with as many concurrent calls as there are threads or workers."""
        loader = self._loader
        concurrency = loader.num_threads or usable_cores()
        # Coroutines wait rather than compute, so more of them than cores may run.
        if loader.num_threads is None and "async" in kind_of(fn):
            concurrency = max(8, concurrency)
        # 0 if the executor does not state its number of workers.
        workers = (getattr(executor, "max_workers", 0) or 0) * getattr(executor, "num_threads", 1)
        order = loader.output_order
        return {"concurrency": workers or concurrency, "output_order": order, "executor": executor}

    def _tagged(
        self, fn: Callable[..., Any], name: str = "", *, draws: bool = False, **options: Any
    ) -> PipeConfig:
        """Make a stage of a function of any kind. It gets plain values; the ledger records what is done."""

        def around(fn: Callable[..., Any], _: Node) -> _Call:
            kind = kind_of(fn)

            def call(tagged: Any) -> Any:
                if draws and self._rng_key:
                    # Seeded by the position, so that numbers do not depend on threads or other items.
                    rng = sample_rng(*self._rng_key, self._place(tagged.tags[0][0]))
                    value = fn(tagged.value, rng=rng)
                else:
                    value = fn(value_of(tagged))
                if kind == "function" and isinstance(value, CoroutineType):
                    refuse_coroutine(value, name_of(fn))
                return value

            return _KINDS[kind](call, self._ledger)

        return PipeConfig(fn, name, around=around, **options)

    def _item_stages(self) -> Iterator[PipeConfig]:
        """Make the stages for items: a single one if replacements, an executor or a cache need one call."""
        if self._stand_ins or self._executor or self._cache:
            if self._steps:
                yield self._single_stage()
            return
        if self._fetch is not None:
            # Also in threads, because reading an item of a dataset often takes most of the time.
            yield self._tagged(self._fetch, "dataset", **self._parallel(self._fetch))
        if self._preprocessor is not None:
            options = self._parallel(self._preprocessor)
            yield self._tagged(self._preprocessor, draws=True, **options)

    def _single_stage(self) -> PipeConfig:
        # An instance, not a closure, because it is pickled for processes.
        kind = AsyncItemCall if "async" in map(kind_of, self._steps) else ItemCall
        call: Callable[..., Any] = kind(self._steps, self._rng_key)
        options = self._parallel(call, self._executor)
        is_bare = self._executor is not None and self._fetch is None and self._rng_key is None
        if is_bare:
            # A sub-interpreter could not import the class above.
            call = self._steps[0]
        name = "dataset" if self._preprocessor is None else name_of(self._preprocessor)
        return PipeConfig(call, name, around=partial(self._around, is_bare=is_bare), **options)

    def _around(self, call: Callable[..., Any], node: Node, *, is_bare: bool) -> _Call:
        """Wrap a call, which an executor may run elsewhere, in the cache and the handling of failures."""
        is_async, stand_ins = kind_of(call) == "async", self._stand_ins

        async def make(item: Any, position: int) -> Any:
            result = call(item if is_bare else (item, self._place(position)))
            if is_async:
                return await result
            if isinstance(result, CoroutineType):
                refuse_coroutine(result, name_of(self._preprocessor or call))
            return result

        async def load(item: Any, position: int) -> Any:
            if self._cache is None:
                return await make(item, position)
            return await self._cache.sample(item, partial(make, item, position))

        async def stage(tagged: Tagged) -> Tagged | None:
            with _SingleResult(tagged, self._ledger) as one:
                try:
                    return one.tag(await load(tagged.value, tagged.tags[0][0]))
                except BaseException as error:
                    if stand_ins is None or is_final(error):
                        raise
                    failure = error
                # Outside of the handler, otherwise `error` would be the context of all later errors.
                return await stand_ins.find(tagged, failure, load, node) or one.tag(None)

        return stage if is_async else lambda tagged: _result_of(stage(tagged))


def _result_of(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    # Each `await` above is of a coroutine of this module, or of a result that is ready.
    raise AssertionError("it waited")
