"""Stages of a DataLoader: check of its arguments, and the pipeline of one iteration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Iterator, Mapping
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from spdl_media._checks import check_callable, check_choice, check_int, check_seconds, warn_caller
from spdl_media._collate import collate
from spdl_media._resume import Ledger, State
from spdl_media.crops import is_random_cut
from spdl_media.epochs import place_maker
from spdl_media.loader_ends import CONVERTERS
from spdl_media.loader_items import (
    AsyncItemCall,
    ItemCall,
    Load,
    OneResult,
    SeveralSamples,
    StandIns,
    Tagged,
    is_final,
    sample_rng,
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
from spdl_media.pipeline.executors import (
    FunctionKind,
    ProcessPoolExecutorConfig,
    check_function,
    kind_of,
    name_of,
    refuse_coroutine,
    usable_cores,
    within,
)
from spdl_media.pipeline.failures import failure_limit
from spdl_media.pipeline.stages import StageConfig

if TYPE_CHECKING:
    from spdl_media.pipeline.engine.hub import Node

OnError: TypeAlias = Literal["skip", "raise", "replace"] | Callable[[Any, BaseException], Any]


def executor_of(loader: Any) -> Any:
    """Return the executor for the calls of a loader, or its config; ``None``: threads of this process."""
    if loader.num_processes is None:
        return loader.executor
    # As many threads in all processes as there are cores, but at least one in each.
    threads = loader.num_threads or -(-usable_cores() // loader.num_processes)
    return ProcessPoolExecutorConfig(loader.num_processes, num_threads=threads)


def _parameters(fn: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(fn).parameters
    except (TypeError, ValueError):  # no signature, as some functions of C
        return {}


def takes_rng(fn: Callable[..., Any]) -> bool:
    """Whether a function has a parameter ``rng`` that is not bound; the first one is the item."""
    # A bound keyword of a partial is still in its signature.
    if isinstance(fn, partial) and "rng" in fn.keywords:
        return False
    others = [*_parameters(fn).values()][1:]
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return any(one.name == "rng" and one.kind in by_name for one in others)


def check_arguments(loader: Any) -> None:
    """Check the arguments of a DataLoader and their combinations, and convert its numbers to ``int``.

    Raises:
        TypeError: An argument has the wrong type, or a function is of a kind that its stage cannot run.
        ValueError: An argument is out of range, or cannot be combined with another one.
        PipelineError: The preprocessor has to be pickled and cannot be.
    """
    for name in ("preprocessor", "aggregator", "transfer_fn"):
        if (fn := getattr(loader, name)) is not None:
            _check_function(name, fn)
    fn = loader.preprocessor
    rng = fn.keywords.get("rng") if isinstance(fn, partial) else None
    if rng is not None and _draws(fn):
        warn_caller(
            f"preprocessor binds rng={rng!r}, which all items share: a seed gives them equal random numbers, "
            "a generator some that depend on threads. Leave rng= out, for one per item and epoch",
            UserWarning,
        )
    for name in ("batch_size", "buffer_size", "num_threads", "num_processes", "cache"):
        if name == "buffer_size" or getattr(loader, name) is not None:
            # Kept as an int, because ranks compare some of these numbers as JSON.
            setattr(loader, name, check_int(name, getattr(loader, name)))
    if loader.batch_size is None and loader.drop_last:
        raise ValueError("drop_last=True leaves out a small last batch, so it needs batch_size")
    # Checked here, because the pipeline would check them only at the first iteration.
    check_seconds("timeout", loader.timeout)
    check_choice("output_order", loader.output_order, ("completion", "input"))
    failure_limit("max_failures", loader.max_failures)
    check_callable("on_failure", loader.on_failure, optional=True)
    on_error = loader.on_error
    if callable(on_error):
        _check_function("on_error", on_error)
    else:
        choices, remedy = ("skip", "raise", "replace"), "A function does as well"
        check_choice("on_error", on_error, choices, remedy=remedy)
    if on_error == "raise" and loader.max_failures is not None:
        raise ValueError(
            "on_error='raise' ends the epoch with the first failure, so "
            f"max_failures={loader.max_failures!r} has no meaning; leave one of them out"
        )
    if loader.executor is not None and loader.num_processes is not None:
        raise ValueError(
            "executor= and num_processes= both say where calls run; leave one of them out"
        )
    _check_calls(loader)
    if loader.to is not None:
        check_choice("to", loader.to, tuple(CONVERTERS))
        # Raises here if the package is missing, before anything is loaded.
        CONVERTERS[loader.to](())


def _check_function(name: str, fn: Callable[..., Any]) -> None:
    check_function(name, fn)
    # One result per batch, because the tags of its samples are attached to it.
    kinds = {"preprocessor": [*get_args(FunctionKind)], "aggregator": ["function", "async"]}.get(
        name, ["function"]
    )
    if (kind := kind_of(fn)) not in kinds:
        wanted = "plain or coroutine" if "async" in kinds else "plain"
        given = "generator" if "generator" in kind else "coroutine function"
        raise TypeError(
            f"{name} must be a {wanted} function, and {name_of(fn)} is a {given}; only the preprocessor may "
            "be of any kind"
        )


def _check_calls(loader: Any) -> None:
    """Check the combinations of ``on_error``, ``executor``, ``num_processes`` and ``cache``."""
    # With num_processes, the aggregator runs there if there is no other function to run.
    executor = executor_of(loader)
    fetch, preprocessor, cache = loader._source.fetch, loader.preprocessor, loader.cache
    replaces = loader.on_error == "replace" or callable(loader.on_error)
    # These options cache, move or replace the sample of an item, so an item must have exactly one.
    is_single = replaces or executor is not None or cache is not None
    if is_single and preprocessor is not None and "generator" in kind_of(preprocessor):
        raise ValueError(
            "executor=, num_processes=, cache=, on_error='replace' and on_error=function need one sample "
            f"per item, but {name_of(preprocessor)} is a generator; use a function, or leave them out"
        )
    if executor is not None:
        called = fetch if preprocessor is None else preprocessor
        if called is None and loader.num_processes is not None:
            called = loader.aggregator
        if called is None:
            raise ValueError(
                "executor= is for a preprocessor or a dataset, num_processes= for these or an aggregator; "
                "there is neither"
            )
        # Not checked for a dataset: it is pickled with the call when an epoch begins.
        PipeConfig(int if called is fetch else called, executor=executor)
    if cache is not None and fetch is preprocessor is None:
        raise ValueError("cache= is for a preprocessor or a dataset; there is neither")
    draws = preprocessor is not None and takes_rng(preprocessor) and _draws(preprocessor)
    if cache is not None and draws:
        raise ValueError(
            f"cache= keeps one sample of an item for all epochs, and {name_of(preprocessor)} draws "
            "another in each; leave one of them out, or draw in the aggregator"
        )


def _draws(fn: Callable[..., Any]) -> bool:
    """Whether a function with a parameter ``rng`` may draw from it."""
    options = _parameters(fn)
    if not {"crops", "flips"} <= options.keys():
        return getattr(fn, "is_random", True)
    # load_image and the like draw for these alone. A partial binds them as defaults.
    crops, flips = options["crops"].default, options["flips"].default
    flip = float(flips) if isinstance(flips, Real) else None
    each = crops if isinstance(crops, list | tuple) else [crops]
    return any(is_random_cut(crop, flip) for crop in each)


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
        draws = preprocessor is not None and takes_rng(preprocessor)
        # Maps a position to that among the samples of all ranks, so that ranks draw different numbers.
        self._place = place_maker(source.source, start.before) if draws else int
        self._rng_key = (start.seed, start.epoch) if draws else None
        self._functions = source.fetch, preprocessor
        self._steps = [fn for fn in self._functions if fn is not None]
        self._executor = executor_of(loader)
        self._stand_ins: StandIns | None = None
        if callable(loader.on_error):
            self._stand_ins = StandIns(loader.on_error, None, ledger)
        elif loader.on_error == "replace":
            items = source.begin_by_position(start)
            if items is None:
                raise ValueError(
                    "on_error='replace' takes another item by its position, and the source, a "
                    f"{type(source.source).__name__}, can only be read from its start; pass a sequence, a "
                    "sampler or MapIterator(dataset, sampler), or a function as on_error"
                )
            self._stand_ins = StandIns(None, items, ledger)
            # After a change of the number of ranks, the items are only what was left then.
            if not start.before:
                ledger.source_length = len(items)

    def pipeline(self) -> Pipeline[Any]:
        """Build the pipeline from the source to finished batches.

        Raises:
            PipelineError: The dataset has to be pickled for other processes, and cannot be.
        """
        loader, ledger = self._loader, self._ledger
        stages: list[StageConfig] = [*self._item_stages()]
        items = None if self._stand_ins is None else self._stand_ins.items
        feed = loader._source.feed(self._start, ledger, items)
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

        def around(fn: Callable[..., Any], node: Node) -> Callable[[Any], Any]:
            kind = kind_of(fn)

            def call(tagged: Any) -> Any:
                if draws and self._rng_key:
                    # Seeded by the position, so that numbers do not depend on threads or other items.
                    rng = sample_rng(*self._rng_key, self._place(tagged.tags[0][0]))
                    value = fn(tagged.value, rng=rng)
                else:
                    value = fn(value_of(tagged))
                return refuse_coroutine(value, node.name) if kind == "function" else value

            context = SeveralSamples if "generator" in kind else OneResult
            return within(partial(context, self._ledger), call, kind)

        return PipeConfig(fn, name, around=around, **options)

    def _item_stages(self) -> Iterator[PipeConfig]:
        """Make the stages for items: a single one if replacements, an executor or a cache need one call."""
        loader, (fetch, preprocessor) = self._loader, self._functions
        if self._stand_ins or self._executor or loader._samples:
            if self._steps:
                yield self._single_stage()
            return
        if fetch is not None:
            # Also in threads, because reading an item of a dataset often takes most of the time.
            yield self._tagged(fetch, "dataset", **self._parallel(fetch))
        if preprocessor is not None:
            yield self._tagged(preprocessor, draws=True, **self._parallel(preprocessor))

    def _single_stage(self) -> PipeConfig:
        steps, preprocessor = self._steps, self._loader.preprocessor
        call: Callable[..., Any] = steps[0]
        # A function alone is passed as it is, because a sub-interpreter could not import the class.
        if len(steps) > 1 or self._rng_key:
            # An instance, not a closure, because it is pickled for processes.
            kind = AsyncItemCall if "async" in map(kind_of, steps) else ItemCall
            call = kind(steps, self._rng_key)
        name = "dataset" if preprocessor is None else name_of(preprocessor)
        return PipeConfig(call, name, around=self._around, **self._parallel(call, self._executor))

    def _around(self, call: Callable[..., Any], node: Node) -> Callable[[Any], Any]:
        """Wrap a call, which an executor may run elsewhere, in the cache and the handling of failures."""
        kind, cache, stand_ins = kind_of(call), self._loader._samples, self._stand_ins

        async def make(item: Any, position: int) -> Any:
            result = call((item, self._place(position)) if self._rng_key else item)
            return await result if kind == "async" else refuse_coroutine(result, node.name)

        load: Load = make if cache is None else partial(cache.sample, make)

        async def sample(tagged: Tagged) -> Any:
            try:
                return await load(tagged.value, tagged.tags[0][0])
            except BaseException as error:
                if stand_ins is None or is_final(error):
                    raise
                failure = error
            # Outside of the handler, otherwise `error` would be the context of all later errors.
            return await stand_ins.find(tagged, failure, load, node)

        fn = sample if kind == "async" else lambda tagged: _result_of(sample(tagged))
        return within(partial(OneResult, self._ledger), fn, kind)


def _result_of(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    # Each `await` above is of a coroutine of this package, or of a result that is ready.
    raise AssertionError("it waited")
