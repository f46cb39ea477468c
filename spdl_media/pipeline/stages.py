"""Definitions of pipelines: frozen values that can be compared, printed, drawn and pickled.

A definition runs nothing by itself: :class:`~spdl_media.pipeline.Pipeline` runs it, any number of times. Each
constructor checks its arguments, so every definition that exists can be run.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Sequence, Sized
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, SupportsIndex, TypeAlias, get_args, runtime_checkable

from spdl_media._checks import as_int, check_callable, check_choice, check_int, check_seconds
from spdl_media.pipeline.executors import (
    ExecutorConfig,
    check_executor,
    check_function,
    check_pickles,
    kind_name,
    kind_of,
    name_of,
)
from spdl_media.pipeline.failures import FailureLimit, PipelineError, failure_limit

__all__ = (
    "AggregateConfig",
    "Aggregator",
    "DisaggregateConfig",
    "MergeConfig",
    "OutputOrder",
    "PathVariantsConfig",
    "PipeConfig",
    "PipelineConfig",
    "SinkConfig",
    "SourceConfig",
    "StageConfig",
)

OutputOrder: TypeAlias = Literal["completion", "input"]


@runtime_checkable
class Aggregator(Protocol):
    """Collects items into groups and decides when a group is complete. Called by one thread at a time.

    Each run of a pipeline uses its own deep copy, so that one definition serves many runs.
    """

    def accumulate(self, item: Any, /) -> Any | None:
        """Add an item. Return a complete group, or ``None`` while there is none.

        Raises:
            Exception: Raised by the implementation. The item counts as failed.
        """

    def flush(self) -> Any | None:
        """Return the incomplete group at the end of an epoch, or ``None``.

        Raises:
            Exception: Raised by the implementation. It counts as a failure; the ``input`` of its record is
                ``<no item: flush() at the end>``.
        """


@dataclass(frozen=True, slots=True)
class OwnSource:
    """A source of the library that makes a generator for each epoch, so that the engine closes it.

    The engine leaves a generator open that is the source itself, because it is usually the user's.

    Attributes:
        generate: Makes a generator.
        name: Name of the source in messages, and of its thread.
        is_ready: Whether items exist already or are computed at once, so taking one never blocks.
    """

    generate: Callable[[], Iterator[Any]]
    name: str
    is_ready: bool = False

    def __iter__(self) -> Iterator[Any]:
        return self.generate()


@dataclass(frozen=True, slots=True, repr=False)
class SourceConfig:
    """The source of items.

    Args:
        source: Iterable or async iterable. Each epoch iterates over it again.
        continuous: Whether the next epoch starts as soon as one ends, instead of when the consumer begins it.

    Raises:
        TypeError: ``source`` is not iterable, or is a single string.
    """

    source: Iterable[Any] | AsyncIterable[Any]
    continuous: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.source, str | bytes | bytearray):
            raise TypeError(
                f"A source must be an iterable of items, not a {type(self.source).__name__}. Pass a "
                "single item in a list: [item]."
            )
        if not isinstance(self.source, Iterable | AsyncIterable) or isinstance(self.source, type):
            remedy = f". Call it: {name_of(self.source)}()" if callable(self.source) else ""
            kind = kind_name(self.source)
            raise TypeError(f"A source must be an iterable or async iterable, not {kind}{remedy}")

    @property
    def name(self) -> str:
        """Name of the source in drawings and messages.

        Raises:
            Exception: The source's ``__len__`` raised another error than ``TypeError`` or
                ``NotImplementedError``, which mean that it has no length.
        """
        if isinstance(self.source, OwnSource):
            return self.source.name
        length = source_length(self.source)
        name = getattr(self.source, "__name__", None) or type(self.source).__name__
        return name if length is None else f"{name} of {length}"

    def __repr__(self) -> str:
        # Without the items, which may be ten million paths.
        return f"SourceConfig(<{self.name}>, continuous={self.continuous})"


@dataclass(frozen=True, slots=True)
class PipeConfig:
    """A stage that applies a function or generator, synchronous or not, to each item.

    Args:
        fn: Called with one item. A ``None`` result drops the item; each value that a generator yields becomes
            an item.
        name: Name of the stage in statistics and errors; the default is the function's name.
        concurrency: Maximum number of calls at once.
        executor: Where a synchronous function runs; ``None`` means the pipeline's own threads. The caller has
            to shut down an ``Executor`` object.
        output_order: ``"completion"`` passes results on as calls complete, ``"input"`` in the order of the
            inputs.
        max_failures: Number (``int``) or rate (``float`` or ``Fraction`` of at most 1) of items that may fail
            in this stage before the run ends. -1 or ``math.inf`` allows any number. ``None`` counts the
            stage's failures under the limit of the whole pipeline.
        timeout: Maximum seconds of a call. ``None`` means no limit.
        around: Used by the DataLoader. Called with the function that this process calls for each item (with
            an executor, the one that submits the call) and the node of the stage; returns the function to
            call instead.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of range, or the executor cannot run a function of this kind.
        PipelineError: The executor needs a function that can be pickled, and this one cannot.
    """

    fn: Callable[[Any], Any]
    name: str = ""
    concurrency: int = 1
    executor: Executor | ExecutorConfig | None = None
    output_order: OutputOrder = "completion"
    max_failures: FailureLimit | None = None
    timeout: float | None = None
    around: Callable[[Callable[[Any], Any], Any], Callable[[Any], Any]] | None = None

    def __post_init__(self) -> None:
        check_function("The function of pipe()", self.fn)
        object.__setattr__(self, "name", _checked_name(self.name, name_of(self.fn)))
        what = f"of stage {self.name!r}"
        check_int(f"concurrency {what}", self.concurrency, remedy="1 runs one call at a time.")
        check_choice(f"output_order {what}", self.output_order, get_args(OutputOrder))
        check_seconds(f"timeout {what}", self.timeout)
        failure_limit(f"max_failures {what}", self.max_failures)
        if self.executor is not None:
            check_executor(self.name, self.fn, self.executor)


@dataclass(frozen=True, slots=True)
class AggregateConfig:
    """A stage that groups items into lists of equal size, or by an :class:`Aggregator`.

    Args:
        aggregator: Number of items per list, or an object with ``accumulate`` and ``flush``.
        name: Name of the stage in statistics and errors.
        drop_last: Whether to drop an incomplete group at the end of an epoch.

    Raises:
        TypeError: ``aggregator`` is neither a whole number nor an aggregator.
        ValueError: The number is below 1.
    """

    aggregator: int | Aggregator
    name: str = ""
    drop_last: bool = False

    def __post_init__(self) -> None:
        # NumPy's integers, too. A bool stays one, which is refused below.
        if (number := as_int(self.aggregator)) is not None:
            object.__setattr__(self, "aggregator", number)
        size = self.aggregator
        # A class has the methods as well, but only an instance has the state that they need.
        if isinstance(size, type) or not isinstance(size, int | Aggregator):
            raise TypeError(
                "aggregate() takes a number of items, or an object with the methods "
                f"accumulate(item) and flush(), not {kind_name(size)}"
            )
        if isinstance(size, int):
            check_int("The number of items to aggregate", size, remedy="1 makes lists of one.")
        default = f"aggregate({size})" if isinstance(size, int) else type(size).__name__
        object.__setattr__(self, "name", _checked_name(self.name, default))


@dataclass(frozen=True, slots=True)
class DisaggregateConfig:
    """A stage that splits lists (or other iterables) into their items."""

    name: str = "disaggregate"

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", _checked_name(self.name, "disaggregate"))


@dataclass(frozen=True, slots=True)
class PathVariantsConfig:
    """A stage that sends each item through the path whose index ``router`` returns for it.

    Args:
        router: A quick synchronous function that returns the index of an item's path.
        paths: Stages of each path; a path without stages passes items on unchanged.
        name: Name of the router in statistics and errors.

    Raises:
        TypeError: The router is not callable, or a path has something else than stages.
        ValueError: The router is asynchronous or a generator, or there is no path.
    """

    router: Callable[[Any], SupportsIndex]
    paths: Sequence[Sequence[StageConfig]]
    name: str = ""

    def __post_init__(self) -> None:
        check_callable("The router of path_variants()", self.router)
        if (kind := kind_of(self.router)) != "function":
            raise ValueError(
                f"The router of path_variants() must be a plain function, not of kind {kind!r}. Call that "
                "one in a pipe() before, which returns (index, item): "
                ".path_variants(lambda pair: pair[0], ...)."
            )
        paths = tuple(_checked_stages("A path of path_variants()", path) for path in self.paths)
        if not paths:
            raise ValueError("path_variants() needs at least one path, got none")
        object.__setattr__(self, "paths", paths)
        object.__setattr__(self, "name", _checked_name(self.name, name_of(self.router)))


@dataclass(frozen=True, slots=True)
class MergeConfig:
    """A source that merges the items of several pipelines, in order of completion.

    Args:
        pipeline_configs: The pipelines. Their sinks are not used.

    Raises:
        TypeError: One of them is not a :class:`PipelineConfig`.
        ValueError: There is none, or one has a continuous source.
    """

    pipeline_configs: Sequence[PipelineConfig]

    @property
    def name(self) -> str:
        """Name of the source in drawings and messages."""
        return f"merge of {len(self.pipeline_configs)}"

    def __post_init__(self) -> None:
        if not self.pipeline_configs:
            raise ValueError("merge() needs at least one pipeline, got none")
        for pipeline in self.pipeline_configs:
            if not isinstance(pipeline, PipelineConfig):
                raise TypeError(
                    f"merge() takes builders, and MergeConfig their definitions, not {kind_name(pipeline)}. "
                    "Make a pipeline of a list by PipelineBuilder().add_source(items)"
                )
            if isinstance(pipeline.src, SourceConfig) and pipeline.src.continuous:
                raise ValueError(
                    "A continuous source cannot be merged: its epochs would end at different "
                    "times. Leave out continuous=True."
                )
        # Only the merged pipeline has a sink.
        without_sinks = tuple(replace(pipeline, sink=None) for pipeline in self.pipeline_configs)
        object.__setattr__(self, "pipeline_configs", without_sinks)


@dataclass(frozen=True, slots=True)
class SinkConfig:
    """The buffer at the end, which holds at most ``buffer_size`` items for the consumer.

    Raises:
        TypeError: ``buffer_size`` is not an integer.
        ValueError: ``buffer_size`` is below 1.
    """

    buffer_size: int = 3

    def __post_init__(self) -> None:
        check_int("buffer_size of the sink", self.buffer_size, remedy="1 is the smallest buffer.")


StageConfig: TypeAlias = PipeConfig | AggregateConfig | DisaggregateConfig | PathVariantsConfig


@dataclass(frozen=True, slots=True)
class PipelineConfig:
    """The definition of a whole pipeline.

    Args:
        src: The source of items.
        pipes: The stages, in order.
        sink: The buffer at the end. A pipeline that is merged into another needs none, and its sink is not
            used.

    Raises:
        TypeError: The source, a stage or the sink is something else.
    """

    src: SourceConfig | MergeConfig
    pipes: Sequence[StageConfig] = ()
    sink: SinkConfig | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.src, SourceConfig | MergeConfig):
            raise TypeError(
                f"The source of a pipeline must be a SourceConfig or MergeConfig, not {kind_name(self.src)}"
            )
        object.__setattr__(self, "pipes", _checked_stages("The chain of stages", self.pipes))
        if not isinstance(self.sink, SinkConfig | None):
            raise TypeError(
                f"The sink of a pipeline must be a SinkConfig, not {kind_name(self.sink)}"
            )

    def functions(self) -> Iterator[PipeConfig]:
        """Iterate over all stages that call a function, including those of merged pipelines and of paths."""
        return (stage for stage in self._all_stages() if isinstance(stage, PipeConfig))

    def _all_stages(self) -> Iterator[StageConfig]:
        if isinstance(self.src, MergeConfig):
            for pipeline in self.src.pipeline_configs:
                yield from pipeline._all_stages()
        waiting = list(self.pipes)
        while waiting:
            yield (stage := waiting.pop(0))
            if isinstance(stage, PathVariantsConfig):
                # In front of the remaining stages, to keep the order of the definition.
                waiting[:0] = [one for path in stage.paths for one in path]

    def to_mermaid(self) -> str:
        """Draw the pipeline as a Mermaid flowchart, which Markdown viewers render.

        Raises:
            Exception: The source's ``__len__`` raised another error than ``TypeError`` or
                ``NotImplementedError``, which mean that it has no length.
        """
        from spdl_media.pipeline.builder import mermaid  # which imports this module

        return mermaid(self)

    def __str__(self) -> str:
        return self.to_mermaid()

    def __reduce__(self) -> tuple[Any, ...]:
        # Check part by part, because the errors of pickle do not name the part that fails.
        if isinstance(self.src, SourceConfig):
            check_pickles("The source of the pipeline", self.src.source)
        for stage in self._all_stages():
            if isinstance(executor := getattr(stage, "executor", None), Executor):
                raise PipelineError(
                    f"Stage {stage.name!r} cannot be pickled, because it holds a running "
                    f"{type(executor).__name__}. Give executor= a description of one, such as "
                    "ProcessPoolExecutorConfig(...)."
                )
            for field in ("fn", "executor", "aggregator", "router"):
                what = "function" if field == "fn" else field
                check_pickles(f"The {what} of stage {stage.name!r}", getattr(stage, field, None))
        return type(self), (self.src, self.pipes, self.sink)


def source_length(items: object) -> int | None:
    """Return the number of items of an epoch, or ``None`` if the source has no length.

    Raises:
        Exception: The source's ``__len__`` raised an error other than ``TypeError`` or
            ``NotImplementedError``, which mean that it has no length.
    """
    try:
        return len(items) if isinstance(items, Sized) else None
    # Raised by a wrapper of an object without length, or by a base class that leaves __len__ to subclasses.
    except (TypeError, NotImplementedError):
        return None


def _checked_stages(what: str, stages: object) -> tuple[StageConfig, ...]:
    if not isinstance(stages, list | tuple):
        raise TypeError(f"{what} must be a sequence of stages, not {kind_name(stages)}")
    for stage in stages:
        if not isinstance(stage, StageConfig):
            remedy = f". Write PipeConfig({name_of(stage)})" if callable(stage) else ""
            raise TypeError(f"{what} must consist of stages, not {kind_name(stage)}{remedy}")
    return tuple(stages)


def _checked_name(name: object, default: str) -> str:
    if not isinstance(name, str):
        raise TypeError(f"The name of a stage must be a str, not {name!r}")
    return name or default


def with_unique_names(config: PipelineConfig, taken: set[str] | None = None) -> PipelineConfig:
    """Make the names of stages unique by a numeric suffix: merged pipelines first, then the stages in order.

    Raises:
        TypeError: ``config`` is not a :class:`PipelineConfig`.
    """
    if not isinstance(config, PipelineConfig):
        raise TypeError(
            f"the definition of a pipeline must be a PipelineConfig, not {kind_name(config)}. Pass the "
            "result of builder.get_config()"
        )
    taken = set() if taken is None else taken
    src = config.src
    if isinstance(src, MergeConfig):
        src = MergeConfig([with_unique_names(one, taken) for one in src.pipeline_configs])
    return replace(config, src=src, pipes=_with_suffixes(config.pipes, taken))


def _with_suffixes(stages: Sequence[StageConfig], taken: set[str]) -> tuple[StageConfig, ...]:
    named: list[StageConfig] = []
    for stage in stages:
        # There is one suffix more than there are names taken, so at least one name is free.
        suffixes = ("", *(f"_{number}" for number in range(2, len(taken) + 3)))
        name = next(name for suffix in suffixes if (name := stage.name + suffix) not in taken)
        taken.add(name)
        changes: dict[str, Any] = {"name": name}
        if isinstance(stage, PathVariantsConfig):
            changes["paths"] = tuple(_with_suffixes(path, taken) for path in stage.paths)
        named.append(replace(stage, **changes))
    return tuple(named)
