"""A chain of calls that becomes a definition, checked as it grows, and definitions as text and charts."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from itertools import count
from typing import Any, Generic, SupportsIndex, TypeVar, Unpack

from spdl_media._checks import warn_caller
from spdl_media.pipeline.executors import ExecutorConfig, kind_of, name_of
from spdl_media.pipeline.failures import FailureLimit
from spdl_media.pipeline.pipeline import Pipeline, PipelineOptions, shows_run_options
from spdl_media.pipeline.stages import (
    AggregateConfig,
    Aggregator,
    DisaggregateConfig,
    MergeConfig,
    OutputOrder,
    PathVariantsConfig,
    PipeConfig,
    PipelineConfig,
    SinkConfig,
    SourceConfig,
    StageConfig,
    with_unique_names,
)

__all__ = ("PipelineBuilder", "mermaid", "outline", "warn_of_idle_concurrency")

T_co = TypeVar("T_co", covariant=True)


class PipelineBuilder(Generic[T_co]):
    """Put a pipeline together, step by step.

    Each method adds to this builder and returns it, so calls can be chained or written one after
    the other. What cannot work is refused by the call that adds it. The parameter is the type of
    the items that come out, for annotations: ``def make() -> PipelineBuilder[Batch]``.

    Thread safety: for one thread at a time. What :meth:`get_config` and :meth:`build` return is
    independent of the builder.

    Example:
        >>> pipeline = PipelineBuilder().add_source(range(6)).pipe(str).aggregate(4).build()
        >>> with pipeline.auto_stop():
        ...     list(pipeline)
        [['0', '1', '2', '3'], ['4', '5']]
    """

    def __init__(self: PipelineBuilder[Any]) -> None:
        self._source: SourceConfig | MergeConfig | None = None
        self._stages: list[StageConfig] = []
        self._sink: SinkConfig | None = None

    def add_source(
        self, source: Iterable[Any] | AsyncIterable[Any], *, continuous: bool = False
    ) -> PipelineBuilder[Any]:
        """Say where items come from.

        Args:
            source: Iterable or async iterable. It is iterated anew for each epoch; a synchronous
                one in a thread of its own, where it may block. A list, tuple or range needs none.
            continuous: Start the next epoch as soon as one ends, instead of when it is asked for.

        Raises:
            TypeError: ``source`` cannot be iterated, or is a single string.
            ValueError: There is a source already.
        """
        if self._source is not None:
            raise ValueError(
                "The pipeline has a source already. Use one PipelineBuilder for each source and "
                "join them with merge()."
            )
        self._source = SourceConfig(source, continuous)
        return self

    def merge(self, *pipelines: PipelineBuilder[Any] | PipelineConfig) -> PipelineBuilder[Any]:
        """Go on with the items of several pipelines, each as soon as it is ready.

        What this builder holds so far is one of them; on a new builder, ``merge`` takes the place
        of ``add_source``.

        Args:
            *pipelines: Builders or definitions, with a source. Their own sinks are not used.

        Raises:
            TypeError: One of them is no pipeline.
            ValueError: None was given, or one of them has a continuous source, or none.
        """
        self._refuse_after_sink("merge()")
        # Definitions, so that what is added to the builders later changes nothing here.
        merged = [_as_config(pipeline) for pipeline in pipelines]
        if self._source is not None or self._stages:
            # First, as it was first in the chain: names are made unique in this order.
            merged.insert(0, self.get_config())
        # The stages so far belong to the first of the merged pipelines.
        self._source = MergeConfig(tuple(merged))
        self._stages = []
        return self

    def pipe(
        self,
        fn: Callable[[Any], Any],
        /,
        *,
        concurrency: int = 1,
        executor: Executor | ExecutorConfig | None = None,
        name: str | None = None,
        output_order: OutputOrder = "completion",
        timeout: float | None = None,
        max_failures: FailureLimit | None = None,
    ) -> PipelineBuilder[Any]:
        """Apply a function or generator, synchronous or not, to each item.

        Args:
            fn: Takes one item. Its result is the next stage's item, and ``None`` drops the item.
                Of a generator each value becomes an item. Async functions run on the event loop,
                others in threads.
            concurrency: How many calls may run at once.
            executor: Where a synchronous function runs instead of the pipeline's threads: a
                ``concurrent.futures.Executor``, which stays yours to shut down, or a description
                such as :class:`ProcessPoolExecutorConfig`, from which each run makes its own.
            name: What statistics and errors call the stage; the default is the function's name.
            output_order: ``"completion"`` hands results on as they come, ``"input"`` in the order
                of the items they were made from.
            timeout: Seconds an item may take before it fails. An async call is cancelled; a
                synchronous one cannot be, so its thread is replaced and left to end by itself.
            max_failures: How many items (``int``) or which part of them (``float``, ``Fraction``) may
                fail here before the run ends with :class:`PipelineFailure`; -1 or ``math.inf`` allows any
                number. ``None`` leaves it to the limit of the whole pipeline.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: An argument is out of range, or the function cannot run where it should.
            PipelineError: The function cannot be pickled, and would have to be.
        """
        config = PipeConfig(
            fn, name or "", concurrency, executor, output_order, max_failures, timeout
        )
        return self._add("pipe()", config)

    def aggregate(
        self, size: int | Aggregator, /, *, drop_last: bool = False
    ) -> PipelineBuilder[Any]:
        """Group items into lists.

        Args:
            size: Number of items of a list, or an :class:`Aggregator` that decides by itself.
            drop_last: Drop an incomplete group at the end, instead of handing it on.

        Raises:
            TypeError: ``size`` is neither a whole number nor an aggregator.
            ValueError: ``size`` is below 1.
        """
        return self._add("aggregate()", AggregateConfig(size, drop_last=drop_last))

    def disaggregate(self) -> PipelineBuilder[Any]:
        """Take lists (or other iterables) apart, item by item.

        Raises:
            ValueError: There is a sink already, as for all stages.
        """
        return self._add("disaggregate()", DisaggregateConfig())

    def path_variants(
        self,
        router: Callable[[Any], SupportsIndex],
        paths: Sequence[PipelineBuilder[Any] | Sequence[StageConfig] | Callable[[Any], Any]],
        *,
        name: str | None = None,
    ) -> PipelineBuilder[Any]:
        """Send each item down one of several paths, which meet again behind them.

        Items of different paths may overtake each other.

        Args:
            router: A quick plain function from an item to the index of its path.
            paths: Each is a builder without source and sink, a sequence of stages, or a function.
            name: What statistics and errors call the router; the default is its name.

        Raises:
            TypeError: The router cannot be called, or a path is none of the three.
            ValueError: There is no path, or one of them has a source or a sink.
        """
        stages = tuple(_as_path(path) for path in paths)
        return self._add("path_variants()", PathVariantsConfig(router, stages, name or ""))

    def add_sink(self, buffer_size: int = 3) -> PipelineBuilder[Any]:
        """End the chain with a buffer for the consumer.

        Args:
            buffer_size: How many finished items may wait.

        Raises:
            TypeError: ``buffer_size`` is not a whole number.
            ValueError: It is below 1, or there is a sink already.
        """
        self._refuse_after_sink("A second add_sink()")
        self._sink = SinkConfig(buffer_size)
        return self

    def get_config(self) -> PipelineConfig:
        """The definition so far: frozen, and independent of what is added later.

        Stages of one name are told apart by a number behind it: ``decode``, ``decode_2``.

        Raises:
            ValueError: There is no source.
        """
        if self._source is None:
            raise ValueError(
                "The pipeline has no source. Call add_source(...) first, or merge(...) pipelines "
                "that have one."
            )
        # Statistics and failures are kept by name.
        return with_unique_names(PipelineConfig(self._source, tuple(self._stages), self._sink))

    @shows_run_options
    def build(self, **options: Unpack[PipelineOptions]) -> Pipeline[T_co]:
        """Make a pipeline, which starts when it is iterated. Each call makes an independent one.

        Args:
            **options: ``num_threads``, ``max_failures``, ``on_failure``, ``report_stats_interval``,
                ``task_hook_factory`` and ``progress`` of :class:`Pipeline`.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: There is no source, or an argument is out of range.
            MissingPackageError: A progress bar was asked for without tqdm.
        """
        config = self.get_config()
        pipeline: Pipeline[T_co] = Pipeline(
            replace(config, sink=config.sink or SinkConfig()), **options
        )
        # After the pipeline, which has checked that it is a number.
        warn_of_idle_concurrency(config, options.get("num_threads", 8))
        return pipeline

    def __repr__(self) -> str:
        calls = [stage.name for stage in self._stages]
        source = "no source" if self._source is None else self._source.name
        sink = "no sink" if self._sink is None else f"sink of {self._sink.buffer_size}"
        return f"<PipelineBuilder: {' -> '.join([source, *calls, sink])}>"

    def _add(self, call: str, stage: StageConfig) -> PipelineBuilder[Any]:
        self._refuse_after_sink(call)
        self._stages.append(stage)
        return self

    def _refuse_after_sink(self, call: str) -> None:
        if self._sink is not None:
            raise ValueError(
                f"{call} cannot follow add_sink(), which ends the chain. Move add_sink() to the end."
            )


def warn_of_idle_concurrency(config: PipelineConfig, num_threads: int) -> None:
    """Warn when stages want more threads at once than the pipeline has for all of them."""
    starved = [
        stage
        for stage in config.functions()
        if stage.executor is None
        and stage.concurrency > num_threads
        # Coroutines take no thread.
        and kind_of(stage.fn) in ("function", "generator")
    ]
    if starved:
        most = max(stage.concurrency for stage in starved)
        stages = ", ".join(f"{stage.name!r} (concurrency={stage.concurrency})" for stage in starved)
        warn_caller(
            f"No more than num_threads={num_threads} synchronous calls can run at once, fewer than "
            f"asked for: {stages}. Use build(num_threads={most}), or give such a stage threads of "
            f"its own by executor=ThreadPoolExecutorConfig().",
            UserWarning,
        )


def _as_config(pipeline: object) -> PipelineConfig:
    if isinstance(pipeline, PipelineBuilder):
        return pipeline.get_config()
    if isinstance(pipeline, PipelineConfig):
        return pipeline
    raise TypeError(
        f"merge() takes PipelineBuilder or PipelineConfig, not {type(pipeline).__name__}. "
        "For a list of items, use PipelineBuilder().add_source(items)."
    )


def _as_path(path: object) -> tuple[StageConfig, ...]:
    if isinstance(path, PipelineBuilder):
        # Its items come from the router, and go where the paths meet.
        if path._source is not None or path._sink is not None:
            raise ValueError(
                "A path of path_variants() has stages alone. Leave out its add_source(), merge() "
                "and add_sink()."
            )
        return tuple(path._stages)
    if callable(path):
        return (PipeConfig(path),)
    # A string is a sequence as well, and surely the name of something.
    if isinstance(path, Sequence) and not isinstance(path, str):
        return tuple(path)
    raise TypeError(
        "A path of path_variants() must be a PipelineBuilder, a sequence of stages or a function, "
        f"not {type(path).__name__}"
    )


# What would end a label or be taken for markup. A label in backticks would be Markdown.
_ENTITIES = str.maketrans(
    {"#": "#35;", "&": "#amp;", '"': "#quot;", "<": "#lt;", ">": "#gt;", "`": "#96;"}
)


def outline(config: PipelineConfig) -> str:
    """One line for each part of a pipeline, those of paths and merged pipelines indented.

    Raises:
        Exception: As :func:`source_length`.
    """
    return "\n".join(_outline(config))


def mermaid(config: PipelineConfig) -> str:
    """A Mermaid flowchart, from top to bottom.

    Raises:
        Exception: As :func:`source_length`.
    """
    chart = _Chart()
    chart.add_pipeline(config)
    return "\n".join(chart.lines)


def _outline(config: PipelineConfig) -> Iterator[str]:
    if isinstance(config.src, MergeConfig):
        yield "merge"
        for number, pipeline in enumerate(config.src.pipeline_configs):
            yield f"  pipeline {number}"
            # Indented here, so that the recursion needs no depth.
            yield from (f"    {line}" for line in _outline(pipeline))
    else:
        yield f"source: {_source_text(config.src)}"
    yield from _stage_lines(config.pipes)
    if config.sink is not None:
        yield f"sink: buffer of {config.sink.buffer_size}"


def _stage_lines(stages: Sequence[StageConfig]) -> Iterator[str]:
    for stage in stages:
        details = _details(stage)
        # A name may have line breaks, and a stage has one line.
        yield " ".join(stage.name.split()) + (f" ({details})" if details else "")
        for number, path in enumerate(_paths_of(stage)):
            yield f"  path {number}" + ("" if path else ": as it is")
            yield from (f"    {line}" for line in _stage_lines(path))


class _Chart:
    """Lines of a flowchart. Each part adds its nodes and returns those that lead to the next part."""

    def __init__(self) -> None:
        self.lines = ["flowchart TD"]
        self._numbers = count()

    def add_pipeline(self, config: PipelineConfig) -> list[str]:
        if isinstance(config.src, MergeConfig):
            parts = [self.add_pipeline(pipeline) for pipeline in config.src.pipeline_configs]
            ends = self._node('{{"merge"}}', [end for part in parts for end in part])
        else:
            ends = self._node(f'(["{_escaped(_source_text(config.src))}"])', [])
        ends = self._stages(config.pipes, ends)
        if config.sink is not None:
            ends = self._node(f'(["sink: buffer of {config.sink.buffer_size}"])', ends)
        return ends

    def _stages(self, stages: Sequence[StageConfig], ends: list[str]) -> list[str]:
        for stage in stages:
            paths = _paths_of(stage)
            opening, closing = "{}" if paths else "[]"
            label = "<br/>".join(map(_escaped, filter(None, (stage.name, _details(stage)))))
            ends = self._node(f'{opening}"{label}"{closing}', ends)
            if paths:
                # From here on the ends are those of the paths.
                (router,), ends = ends, []
            for number, path in enumerate(paths):
                # A point for each path: it carries the number at the arrow, and an empty path ends in it.
                point = self._node("(( ))", [])
                self.lines.append(f"    {router} -->|{number}| {point[0]}")
                ends += self._stages(path, point)
        return ends

    def _node(self, shape: str, ends: list[str]) -> list[str]:
        name = f"n{next(self._numbers)}"
        self.lines += [f"    {name}{shape}", *(f"    {end} --> {name}" for end in ends)]
        return [name]


def _paths_of(stage: StageConfig) -> tuple[tuple[StageConfig, ...], ...]:
    return stage.paths if isinstance(stage, PathVariantsConfig) else ()


def _source_text(source: SourceConfig) -> str:
    return source.name + (", continuous" if source.continuous else "")


def _details(stage: StageConfig) -> str:
    """List the options of a stage that differ from the defaults."""
    if isinstance(stage, PathVariantsConfig):
        return f"{len(stage.paths)} paths"
    if isinstance(stage, AggregateConfig):
        return "drop_last" if stage.drop_last else ""
    return ", ".join(_pipe_details(stage)) if isinstance(stage, PipeConfig) else ""


def _pipe_details(stage: PipeConfig) -> Iterator[str]:
    if stage.name != (function := name_of(stage.fn)):
        yield function
    if (kind := kind_of(stage.fn)) != "function":
        yield kind.replace("_", " ")
    yield f"concurrency={stage.concurrency}"
    if stage.executor is not None:
        yield type(stage.executor).__name__
    if stage.output_order != "completion":
        yield f"order of {stage.output_order}"
    if stage.timeout is not None:
        yield f"timeout={stage.timeout:g} s"
    if stage.max_failures is not None:
        yield f"max_failures={stage.max_failures}"


def _escaped(text: str) -> str:
    # A line break would end the node.
    return " ".join(text.translate(_ENTITIES).split())
