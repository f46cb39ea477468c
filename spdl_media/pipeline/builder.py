"""The builder of pipelines, and the drawing of a definition as a Mermaid chart."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from itertools import count
from typing import Any, Generic, SupportsIndex, TypeVar, Unpack

from spdl_media._checks import warn_caller
from spdl_media.pipeline.executors import ExecutorConfig, kind_of
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

__all__ = ("PipelineBuilder", "mermaid", "warn_of_idle_concurrency")

T_co = TypeVar("T_co", covariant=True)


class PipelineBuilder(Generic[T_co]):
    """Build a pipeline step by step.

    Each method adds to this builder and returns it, so calls can be chained or written one after the other.
    Each call checks its arguments and raises when the stage cannot work. The type parameter is the type of
    the items that the pipeline delivers, for annotations such as ``def make() -> PipelineBuilder[Batch]``.

    Thread safety: for one thread at a time. The results of :meth:`get_config` and :meth:`build` are
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
        """Set the source of items.

        Args:
            source: Iterable or async iterable. Each epoch iterates over it again. A synchronous source runs
                in a thread of its own, where it may block; a list, tuple or range needs no thread. If the
                run is left, that thread closes the generator that the source's ``__iter__`` returned. A
                source that is a generator itself stays open.
            continuous: Start the next epoch as soon as one ends, instead of when the consumer begins it.

        Raises:
            TypeError: ``source`` is not iterable, or is a single string.
            ValueError: There is already a source.
        """
        if self._source is not None:
            raise ValueError(
                "The pipeline has a source already. Use one PipelineBuilder for each source and "
                "join them with merge()."
            )
        self._source = SourceConfig(source, continuous)
        return self

    def merge(self, *pipelines: PipelineBuilder[Any] | PipelineConfig) -> PipelineBuilder[Any]:
        """Merge the items of several pipelines, in order of completion.

        The source and stages of this builder, if it has any, are one of the merged pipelines. On a new
        builder, ``merge`` replaces ``add_source``.

        Args:
            *pipelines: Builders or definitions, each with a source. Their own sinks are ignored.

        Raises:
            TypeError: An argument is not a pipeline.
            ValueError: No pipeline was given, a pipeline has no source or a continuous one, or there is
                already a sink.
        """
        self._refuse_after_sink("merge()")
        # Definitions are frozen, so later changes of those builders have no effect here.
        merged = [
            one.get_config() if isinstance(one, PipelineBuilder) else one for one in pipelines
        ]
        if self._source is not None or self._stages:
            # First, because it came first in the chain: names are made unique in this order.
            merged.insert(0, self.get_config())
        # The stages so far now belong to the first merged pipeline.
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
            fn: Called with one item. Its result is the input of the next stage; ``None`` drops the item. Each
                value that a generator yields becomes an item. Async functions run on the event loop, others
                in threads.
            concurrency: Maximum number of calls at once.
            executor: Where a synchronous function runs instead of the pipeline's threads: a
                ``concurrent.futures.Executor``, which the caller has to shut down, or a description such as
                :class:`ProcessPoolExecutorConfig`, from which each run makes its own executor.
            name: Name of the stage in statistics and errors; the default is the function's name.
            output_order: ``"completion"`` passes results on as calls complete, ``"input"`` in the order of
                the inputs.
            timeout: Maximum seconds of a call; a call that takes longer fails its item. An async call is
                cancelled. A synchronous call cannot be interrupted: its thread is replaced, and ends when the
                call returns.
            max_failures: Number (``int``) or rate (``float`` or ``Fraction``) of items that may fail in this
                stage before the run ends with :class:`PipelineFailure`. -1 or ``math.inf`` allows any number.
                ``None`` counts the stage's failures under the limit of the whole pipeline.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: An argument is out of range, the executor cannot run a function of this kind, or there
                is already a sink.
            PipelineError: The executor needs a function that can be pickled, and this one cannot.
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
            size: Number of items per list, or an :class:`Aggregator` that forms the groups itself.
            drop_last: Drop an incomplete group at the end of an epoch, instead of passing it on.

        Raises:
            TypeError: ``size`` is neither a whole number nor an aggregator.
            ValueError: ``size`` is below 1, or there is already a sink.
        """
        return self._add("aggregate()", AggregateConfig(size, drop_last=drop_last))

    def disaggregate(self) -> PipelineBuilder[Any]:
        """Split lists (or other iterables) into their items.

        Raises:
            ValueError: There is already a sink.
        """
        return self._add("disaggregate()", DisaggregateConfig())

    def path_variants(
        self,
        router: Callable[[Any], SupportsIndex],
        paths: Sequence[PipelineBuilder[Any] | Sequence[StageConfig] | Callable[[Any], Any]],
        *,
        name: str | None = None,
    ) -> PipelineBuilder[Any]:
        """Send each item through one of several paths. The next stage gets the results of all paths.

        Items of different paths may overtake each other.

        Args:
            router: A quick synchronous function that returns the index of an item's path.
            paths: Each is a builder without source and sink, a sequence of stages, or a function.
            name: Name of the router in statistics and errors; the default is the function's name.

        Raises:
            TypeError: The router is not callable, or a path is none of the three.
            ValueError: The router is asynchronous or a generator, there is no path, a path has a source or a
                sink, or there is already a sink.
        """
        stages = tuple(_as_path(path) for path in paths)
        return self._add("path_variants()", PathVariantsConfig(router, stages, name or ""))

    def add_sink(self, buffer_size: int = 3) -> PipelineBuilder[Any]:
        """End the chain of stages with a buffer for the consumer.

        Args:
            buffer_size: Maximum number of finished items in the buffer.

        Raises:
            TypeError: ``buffer_size`` is not an integer.
            ValueError: ``buffer_size`` is below 1, or there is already a sink.
        """
        self._refuse_after_sink("A second add_sink()")
        self._sink = SinkConfig(buffer_size)
        return self

    def get_config(self) -> PipelineConfig:
        """Return the definition so far. It is frozen and independent of later changes of the builder.

        A numeric suffix makes the names of stages unique: ``decode``, ``decode_2``.

        Raises:
            ValueError: There is no source.
        """
        if self._source is None:
            raise ValueError(
                "The pipeline has no source. Call add_source(...) first, or merge(...) pipelines "
                "that have one."
            )
        # Statistics and failures are stored by name, so names must be unique.
        return with_unique_names(PipelineConfig(self._source, tuple(self._stages), self._sink))

    @shows_run_options
    def build(self, **options: Unpack[PipelineOptions]) -> Pipeline[T_co]:
        """Return a new, independent pipeline, which starts when it is iterated.

        Args:
            **options: ``num_threads``, ``max_failures``, ``on_failure``, ``report_stats_interval``,
                ``task_hook_factory`` and ``progress`` of :class:`Pipeline`.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: There is no source, or an argument is out of range.
            MissingPackageError: ``progress`` is set and tqdm is not installed.
        """
        config = self.get_config()
        pipeline: Pipeline[T_co] = Pipeline(
            replace(config, sink=config.sink or SinkConfig()), **options
        )
        # After Pipeline(...) has checked that num_threads is an integer.
        warn_of_idle_concurrency(config, options.get("num_threads", 8))
        return pipeline

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
    """Warn when the concurrency of a stage exceeds the pipeline's number of threads."""
    starved = [
        stage
        for stage in config.functions()
        if stage.executor is None
        and stage.concurrency > num_threads
        # Coroutines run on the event loop and need no threads.
        and kind_of(stage.fn) in ("function", "generator")
    ]
    if starved:
        most = max(stage.concurrency for stage in starved)
        stages = ", ".join(f"{stage.name!r} (concurrency={stage.concurrency})" for stage in starved)
        warn_caller(
            f"No more than num_threads={num_threads} synchronous calls can run at once, fewer than "
            f"requested: {stages}. Use build(num_threads={most}), or give such a stage threads of "
            f"its own by executor=ThreadPoolExecutorConfig().",
            UserWarning,
        )


def _as_path(path: Any) -> Sequence[StageConfig]:
    if isinstance(path, PipelineBuilder):
        # The items of a path come from the router, and its results go to the next stage.
        if path._source is not None or path._sink is not None:
            raise ValueError(
                "A path of path_variants() has stages alone. Leave out its add_source(), merge() "
                "and add_sink()."
            )
        return tuple(path._stages)
    # PathVariantsConfig checks the stages.
    return (PipeConfig(path),) if callable(path) else path


# Characters that would end a label or count as markup. Mermaid reads a label in backticks as Markdown.
_ENTITIES = str.maketrans(
    {"#": "#35;", "&": "#amp;", '"': "#quot;", "<": "#lt;", ">": "#gt;", "`": "#96;"}
)


def mermaid(config: PipelineConfig) -> str:
    """Return a Mermaid flowchart that runs from top to bottom.

    Raises:
        Exception: The source's ``__len__`` raised another error than ``TypeError`` or
            ``NotImplementedError``, which mean that it has no length.
    """
    chart = _Chart()
    chart.add_pipeline(config)
    return "\n".join(chart.lines)


class _Chart:
    """Lines of a flowchart. Each method adds nodes and returns the names of those without a successor."""

    def __init__(self) -> None:
        self.lines = ["flowchart TD"]
        self._numbers = count()

    def add_pipeline(self, config: PipelineConfig) -> list[str]:
        if isinstance(config.src, MergeConfig):
            parts = [self.add_pipeline(pipeline) for pipeline in config.src.pipeline_configs]
            ends = self._node('{{"merge"}}', [end for part in parts for end in part])
        else:
            text = config.src.name + (", continuous" if config.src.continuous else "")
            ends = self._node(f'(["{_escaped(text)}"])', [])
        ends = self._stages(config.pipes, ends)
        if config.sink is not None:
            ends = self._node(f'(["sink: buffer of {config.sink.buffer_size}"])', ends)
        return ends

    def _stages(self, stages: Sequence[StageConfig], ends: list[str]) -> list[str]:
        for stage in stages:
            paths = stage.paths if isinstance(stage, PathVariantsConfig) else ()
            opening, closing = "{}" if paths else "[]"
            label = "<br/>".join(map(_escaped, filter(None, (stage.name, _details(stage)))))
            ends = self._node(f'{opening}"{label}"{closing}', ends)
            if paths:
                # The next stage follows the ends of the paths, not the router.
                (router,), ends = ends, []
            for number, path in enumerate(paths):
                # Each path begins with a point: the arrow to it shows the path's number, and an empty path
                # consists of the point alone.
                point = self._node("(( ))", [])
                self.lines.append(f"    {router} -->|{number}| {point[0]}")
                ends += self._stages(path, point)
        return ends

    def _node(self, shape: str, ends: list[str]) -> list[str]:
        name = f"n{next(self._numbers)}"
        self.lines += [f"    {name}{shape}", *(f"    {end} --> {name}" for end in ends)]
        return [name]


def _details(stage: StageConfig) -> str:
    if not isinstance(stage, PipeConfig):
        return ""
    where = "" if stage.executor is None else f", {type(stage.executor).__name__}"
    return f"concurrency={stage.concurrency}{where}"


def _escaped(text: str) -> str:
    # A line break would end the definition of the node.
    return " ".join(text.translate(_ENTITIES).split())
