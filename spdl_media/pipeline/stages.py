"""Parts of a pipeline as frozen values: they can be compared, printed, drawn, and pickled.

A definition runs nothing: :class:`~spdl_media.pipeline.Pipeline` runs it, as often as wanted. Each one
checks itself when it is made, so one that exists can be run.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Sequence, Sized
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, SupportsIndex, TypeAlias, get_args, runtime_checkable

from spdl_media._checks import check_callable, check_choice, check_int, check_seconds
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
    "with_unique_names",
)

OutputOrder: TypeAlias = Literal["completion", "input"]


@runtime_checkable
class Aggregator(Protocol):
    """Collects items and says when a group of them is complete. Called by one thread at a time.

    Each run of a pipeline works on its own deep copy, so that one definition serves many runs.
    """

    def accumulate(self, item: Any, /) -> Any | None:
        """Takes an item; returns a complete group, or ``None`` while there is none.

        Raises:
            Exception: Yours. The item counts as failed.
        """

    def flush(self) -> Any | None:
        """Called at the end (of an epoch): returns what was left over, or ``None``.

        Raises:
            Exception: Yours. It counts as a failure like others, but its item is an object that shows itself
                as ``<no item: flush() at the end>``.
        """


@dataclass(frozen=True, slots=True)
class ReadyItems:
    """Items of a source that are there already, or computed in no time: to ask for one never waits."""

    items: Iterable[Any]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


@dataclass(frozen=True, slots=True, repr=False)
class SourceConfig:
    """Where items come from.

    Args:
        source: What is iterated, anew in each epoch.
        continuous: Whether the pipeline reads on into the next epoch without being asked.
    """

    source: Iterable[Any] | AsyncIterable[Any]
    continuous: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.source, str | bytes | bytearray):
            raise TypeError(
                f"A source of items must not be a single {type(self.source).__name__}, which would "
                "be taken apart into characters. For one item, pass a list of it."
            )
        if not isinstance(self.source, Iterable | AsyncIterable) or isinstance(self.source, type):
            if callable(self.source):
                name = getattr(self.source, "__name__", type(self.source).__name__)
                raise TypeError(
                    f"A source must be iterable, and {name} is a function. Write add_source({name}())."
                )
            raise TypeError(
                f"A source must be an iterable or async iterable, not {kind_name(self.source)}"
            )

    @property
    def name(self) -> str:
        """Name of the source in drawings and messages.

        Raises:
            Exception: As :func:`source_length`.
        """
        length = source_length(self.source)
        count = "" if length is None else f" of {length}"
        name = getattr(self.source, "__name__", None) or type(self.source).__name__
        return f"{name}{count}"

    def __repr__(self) -> str:
        # The items themselves may be ten million paths.
        return f"SourceConfig(<{self.name}>, continuous={self.continuous})"


@dataclass(frozen=True, slots=True)
class PipeConfig:
    """A function or generator, synchronous or not, that is applied to each item.

    Args:
        fn: What is called with one item. A ``None`` result drops the item; each value that a
            generator yields becomes an item.
        name: What statistics and errors call the stage; the default is the function's name.
        concurrency: How many calls may run at once.
        executor: Where a synchronous function runs; ``None`` is the pipeline's own threads. An
            executor stays the caller's to shut down.
        output_order: ``"completion"`` hands results on as they come, ``"input"`` in the order of
            the items they were made from.
        max_failures: How many items (``int``) or which part of them (``float`` or ``Fraction`` of at most 1)
            may fail here before the run ends; -1 or ``math.inf`` allows any number; ``None`` leaves it to
            the limit of the whole pipeline.
        timeout: Seconds an item may take. ``None`` is no limit.
        around: For the DataLoader: makes what this process calls with an item, of the function or what has
            the executor call it, and of the node.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of range, or the function cannot run where it should.
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
        check_function(self.fn)
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
    """Groups items into lists of ``aggregator`` items, or as an :class:`Aggregator` wants.

    Args:
        aggregator: Number of items, or an object with ``accumulate`` and ``flush``.
        name: What statistics call the stage.
        drop_last: Whether an incomplete group at the end (of an epoch) is dropped.
    """

    aggregator: int | Aggregator
    name: str = ""
    drop_last: bool = False

    def __post_init__(self) -> None:
        size = self.aggregator
        # A class has the methods as well, but no state to call them on.
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
    """Takes groups apart, item by item."""

    name: str = "disaggregate"

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", _checked_name(self.name, "disaggregate"))


@dataclass(frozen=True, slots=True)
class PathVariantsConfig:
    """Sends each item down the path whose index ``router`` gives for it.

    Args:
        router: A quick, synchronous function from an item to the index of a path.
        paths: Stages of each path; a path without stages hands items on as they are.
        name: What statistics and errors call the router.
    """

    router: Callable[[Any], SupportsIndex]
    paths: tuple[tuple[StageConfig, ...], ...]
    name: str = ""

    def __post_init__(self) -> None:
        check_callable("The router of path_variants()", self.router)
        if (kind := kind_of(self.router)) != "function":
            raise ValueError(
                f"The router of path_variants() must be a plain function, not an {kind} function. "
                "Call that one in a pipe() before it, which hands on (index, item): "
                ".path_variants(lambda pair: pair[0], ...)."
            )
        if not self.paths:
            raise ValueError("path_variants() needs at least one path, got none")
        for path in self.paths:
            _check_stages("A path of path_variants()", path)
        object.__setattr__(self, "name", _checked_name(self.name, name_of(self.router)))


@dataclass(frozen=True, slots=True)
class MergeConfig:
    """A source: the items of several pipelines, in order of completion."""

    pipeline_configs: Sequence[PipelineConfig]

    @property
    def name(self) -> str:
        """Name of the source in drawings and messages."""
        return f"merge of {len(self.pipeline_configs)}"

    def __post_init__(self) -> None:
        _make_tuple(self, "pipeline_configs")
        if not self.pipeline_configs:
            raise ValueError("merge() needs at least one pipeline, got none")
        for pipeline in self.pipeline_configs:
            if not isinstance(pipeline, PipelineConfig):
                raise TypeError(f"merge() takes pipelines' definitions, not {kind_name(pipeline)}")
            if isinstance(pipeline.src, SourceConfig) and pipeline.src.continuous:
                raise ValueError(
                    "A continuous source cannot be merged: its epochs would end at different "
                    "times. Leave out continuous=True."
                )
        # The sink of the whole takes what theirs would.
        without_sinks = tuple(replace(pipeline, sink=None) for pipeline in self.pipeline_configs)
        object.__setattr__(self, "pipeline_configs", without_sinks)


@dataclass(frozen=True, slots=True)
class SinkConfig:
    """The last buffer: how many items may wait for the consumer."""

    buffer_size: int = 3

    def __post_init__(self) -> None:
        check_int("buffer_size of the sink", self.buffer_size, remedy="1 is the smallest buffer.")


StageConfig: TypeAlias = PipeConfig | AggregateConfig | DisaggregateConfig | PathVariantsConfig


@dataclass(frozen=True, slots=True)
class PipelineConfig:
    """A whole pipeline.

    Args:
        src: Where items come from.
        pipes: The stages, in their order.
        sink: The last buffer. One that is merged into another needs none, and its own is not used.
    """

    src: SourceConfig | MergeConfig
    pipes: Sequence[StageConfig] = ()
    sink: SinkConfig | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.src, SourceConfig | MergeConfig):
            raise TypeError(
                f"The source of a pipeline must be a SourceConfig or MergeConfig, not {kind_name(self.src)}"
            )
        _make_tuple(self, "pipes")
        _check_stages("The chain of stages", self.pipes)
        if not isinstance(self.sink, SinkConfig | None):
            raise TypeError(
                f"The sink of a pipeline must be a SinkConfig, not {kind_name(self.sink)}"
            )

    def functions(self) -> Iterator[PipeConfig]:
        """All stages that call a function, those of merged pipelines and of paths included."""
        return (stage for stage in self._all_stages() if isinstance(stage, PipeConfig))

    def _all_stages(self) -> Iterator[StageConfig]:
        if isinstance(self.src, MergeConfig):
            for pipeline in self.src.pipeline_configs:
                yield from pipeline._all_stages()
        waiting = list(self.pipes)
        while waiting:
            yield (stage := waiting.pop(0))
            if isinstance(stage, PathVariantsConfig):
                # In front of what waits, which keeps the order of the definition.
                waiting[:0] = [one for path in stage.paths for one in path]

    def to_mermaid(self) -> str:
        """Draw the pipeline as a Mermaid flowchart, which Markdown viewers render.

        Raises:
            Exception: As :func:`source_length`.
        """
        from spdl_media.pipeline.builder import mermaid  # which imports this module

        return mermaid(self)

    def __str__(self) -> str:
        from spdl_media.pipeline.builder import outline

        return outline(self)

    def __reduce__(self) -> tuple[Any, ...]:
        # Part by part, because pickle's errors do not say which part they are about.
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
    """The items of an epoch, if the source knows it.

    Raises:
        Exception: The source's ``__len__`` raises another error than those that say it has no length.
    """
    try:
        return len(items) if isinstance(items, Sized) else None
    # Of a wrapper around something without length, or of a class that leaves it to those that derive from it.
    except (TypeError, NotImplementedError):
        return None


def _check_stages(what: str, stages: object) -> None:
    if not isinstance(stages, tuple):
        raise TypeError(f"{what} must be a sequence of stages, not {kind_name(stages)}")
    for stage in stages:
        if not isinstance(stage, StageConfig):
            remedy = f". Write PipeConfig({name_of(stage)})" if callable(stage) else ""
            raise TypeError(f"{what} must consist of stages, not {kind_name(stage)}{remedy}")


def _make_tuple(config: object, field: str) -> None:
    """Freeze a list of a definition."""
    # Other types are left as they are, for the check that follows.
    if isinstance(value := getattr(config, field), list):
        object.__setattr__(config, field, tuple(value))


def _checked_name(name: object, default: str) -> str:
    if not isinstance(name, str):
        raise TypeError(f"The name of a stage must be a str, not {name!r}")
    return name or default


def with_unique_names(config: PipelineConfig, taken: set[str] | None = None) -> PipelineConfig:
    """Make the names of stages unique by a numeric suffix: those of merged pipelines first, then in order.

    Raises:
        TypeError: ``config`` is no definition.
    """
    if not isinstance(config, PipelineConfig):
        raise TypeError(
            f"what runs a pipeline takes a PipelineConfig, not {kind_name(config)}. A builder gives one by "
            "get_config()"
        )
    taken = set() if taken is None else taken
    src = config.src
    if isinstance(src, MergeConfig):
        src = MergeConfig([with_unique_names(one, taken) for one in src.pipeline_configs])
    return replace(config, src=src, pipes=_named_apart(config.pipes, taken))


def _named_apart(stages: Sequence[StageConfig], taken: set[str]) -> tuple[StageConfig, ...]:
    named: list[StageConfig] = []
    for stage in stages:
        # One more than there are names taken, so one of them is free.
        suffixes = ("", *(f"_{number}" for number in range(2, len(taken) + 3)))
        name = next(name for suffix in suffixes if (name := stage.name + suffix) not in taken)
        taken.add(name)
        changes: dict[str, Any] = {"name": name}
        if isinstance(stage, PathVariantsConfig):
            changes["paths"] = tuple(_named_apart(path, taken) for path in stage.paths)
        named.append(replace(stage, **changes))
    return tuple(named)
