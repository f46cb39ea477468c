"""Measures each stage of a pipeline by itself, at several concurrencies, and names the slowest."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias, TypedDict

from spdl_media._checks import check_int
from spdl_media._optional import require
from spdl_media.pipeline.engine.nodes import routed
from spdl_media.pipeline.failures import MissingPackageError, PipelineError
from spdl_media.pipeline.functions import TaskHook
from spdl_media.pipeline.pipeline import Pipeline
from spdl_media.pipeline.stages import (
    AggregateConfig,
    DisaggregateConfig,
    MergeConfig,
    PathVariantsConfig,
    PipeConfig,
    PipelineConfig,
    SinkConfig,
    SourceConfig,
    StageConfig,
    with_unique_names,
)
from spdl_media.pipeline.stats import PipelineStatistics

__all__ = (
    "PipelineProfile",
    "StageProfile",
    "profile_pipeline",
)

CONCURRENCIES = (1, 2, 4, 8, 16)


def profile_pipeline(
    config: PipelineConfig,
    num_iterations: int = 100,
    *,
    concurrencies: Sequence[int] = CONCURRENCIES,
    num_threads: int = 8,
    plot: str | Path | None = None,
    show: bool = True,
) -> PipelineProfile:
    """Measure each stage of a pipeline by itself, then the whole, and name the bottleneck.

    Each stage gets the outputs of the one before it, the same ones again when there are too few,
    at each concurrency. So stages must not change their inputs, and a source that can be iterated
    only once is used up. Paths and merged pipelines are measured stage by stage as well.

    Args:
        config: What :meth:`PipelineBuilder.get_config` returns.
        num_iterations: How many items are taken from the source, and how many calls of each stage
            are timed at each concurrency.
        concurrencies: Which ones are tried, beside the one that the stage has.
        num_threads: Threads of the run of the whole pipeline.
        plot: File in which a plot is saved, in the format that its name says. Needs matplotlib.
        show: Print the table.

    Returns:
        Results for each stage and concurrency.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A number is below 1.
        PipelineError: The source or a stage gave nothing, so the stages behind it have no inputs.
        MissingPackageError: A plot is wanted without matplotlib.
    """
    check_int("num_iterations", num_iterations)
    check_int("num_threads", num_threads)
    for concurrency in concurrencies:
        check_int("Each of concurrencies", concurrency)
    if not isinstance(config, PipelineConfig):
        raise TypeError(
            f"profile_pipeline() takes a PipelineConfig, not {type(config).__name__}. "
            "A builder has it in get_config()."
        )
    if plot is not None:
        require("matplotlib", "A plot of a profile", MissingPackageError)
    profiler = _Profiler(num_iterations, sorted(set(concurrencies)))
    sample = profiler.measure(with_unique_names(config))
    result = PipelineProfile(profiler.profiles(), _run_whole(sample, num_threads))
    if plot is not None:
        _save_plot(result, plot)
    if show:
        print(result)  # noqa: T201  # what the caller asked for
    return result


class _Sample(NamedTuple):
    """Items in front of a stage."""

    items: list[Any]
    """Some of them, as inputs to measure with."""

    number: float
    """How many there would be, made from the items that were taken from the source."""


class _Profiler:
    """Goes through a pipeline from source to sink."""

    def __init__(self, num_iterations: int, concurrencies: list[int]) -> None:
        self._num_iterations = num_iterations
        self._concurrencies = concurrencies
        self._num_source_items = 0
        self._num_sources = 0
        self._profiles: list[StageProfile] = []

    def measure(self, config: PipelineConfig) -> PipelineConfig:
        """Measure all parts; give back the pipeline with the items that were taken as its source."""
        return self._pipeline(config)[0]

    def profiles(self) -> tuple[StageProfile, ...]:
        """What was measured, in the order of the pipeline."""
        total = self._num_source_items
        return tuple(
            replace(one, inputs_per_item=one.inputs_per_item / total) for one in self._profiles
        )

    def _pipeline(self, config: PipelineConfig) -> tuple[PipelineConfig, _Sample]:
        if isinstance(config.source, MergeConfig):
            parts = [self._pipeline(one) for one in config.source.pipelines]
            source: SourceConfig | MergeConfig = MergeConfig(tuple(part for part, _ in parts))
            sample = _joined([outputs for _, outputs in parts])
        else:
            sample = self._source(config.source)
            source = SourceConfig(sample.items)
        return replace(config, source=source), self._stages(config.stages, sample)

    def _source(self, source: SourceConfig) -> _Sample:
        timed = _TimedSource(source.items)
        config = PipelineConfig(SourceConfig(timed.items, source.continuous), (), SinkConfig())
        pipeline: Pipeline[Any] = Pipeline(config, num_threads=1)
        with pipeline.auto_stop():
            items = list(itertools.islice(pipeline, self._num_iterations))
        if not items:
            raise PipelineError(
                f"The source {source.name} gave no items, so nothing can be measured"
            )
        self._num_source_items += len(items)
        self._num_sources += 1
        name = "source" if self._num_sources == 1 else f"source_{self._num_sources}"
        self._add(name, 1, timed.calls(len(items)), len(items), is_configured=True)
        return _Sample(items, len(items))

    def _stages(self, stages: tuple[StageConfig, ...], sample: _Sample) -> _Sample:
        for position, stage in enumerate(stages):
            if isinstance(stage, PathVariantsConfig):
                sample = self._paths(stage, sample)
            else:
                sample = self._stage(stage, sample)
            if not sample.items and position + 1 < len(stages):
                raise PipelineError(
                    f"Stage {stage.name!r} gave nothing for {self._num_iterations} inputs, so the "
                    "stages behind it cannot be measured. Is num_iterations large enough?"
                )
        return sample

    def _paths(self, stage: PathVariantsConfig, sample: _Sample) -> _Sample:
        taken: list[list[Any]] = [[] for _ in stage.paths]
        path_of = routed(stage.router, len(stage.paths))
        first_failure: Exception | None = None
        for item in sample.items:
            try:
                index, _ = path_of(item)
            except Exception as error:  # noqa: BLE001  # as in a run, it costs the item
                first_failure = first_failure or error
            else:
                taken[index].append(item)
        if first_failure is not None and not any(taken):
            raise _all_failed(stage, first_failure) from first_failure
        outputs = []
        for path, items in zip(stage.paths, taken, strict=True):
            if items:  # else there is nothing to measure this path with
                number = sample.number * len(items) / len(sample.items)
                outputs.append(self._stages(path, _Sample(items, number)))
        return _joined(outputs)

    def _stage(self, stage: _MeasuredStage, sample: _Sample) -> _Sample:
        own = stage.concurrency if isinstance(stage, PipeConfig) else 1
        others = self._concurrencies if isinstance(stage, PipeConfig) else []
        outputs = _Sample([], 0)
        for concurrency in sorted({own, *others}):
            run = _StageRun(stage, sample.items, concurrency, self._num_iterations)
            self._add(
                stage.name, concurrency, run.calls, sample.number, is_configured=concurrency == own
            )
            if concurrency == own:
                if run.first_failure is not None and not run.outputs:
                    raise _all_failed(stage, run.first_failure) from run.first_failure
                outputs = _Sample(run.outputs, sample.number * run.outputs_per_input)
        return outputs

    def _add(
        self, name: str, concurrency: int, calls: _Calls, number: float, *, is_configured: bool
    ) -> None:
        self._profiles.append(
            StageProfile(
                name=name,
                concurrency=concurrency,
                is_configured=is_configured,
                inputs_per_item=number,
                **calls.figures(concurrency),
            )
        )


def _all_failed(stage: StageConfig, first_failure: BaseException) -> PipelineError:
    return PipelineError(
        f"All inputs of stage {stage.name!r} failed, so it cannot be measured. The first failure: "
        f"{first_failure!r}"
    )


def _joined(samples: list[_Sample]) -> _Sample:
    items = [item for sample in samples for item in sample.items]
    return _Sample(items, sum(sample.number for sample in samples))


def _run_whole(sample: PipelineConfig, num_threads: int) -> PipelineStatistics:
    config = replace(sample, sink=sample.sink or SinkConfig())
    pipeline: Pipeline[Any] = Pipeline(config, num_threads=num_threads, max_failures=math.inf)
    with pipeline.auto_stop():
        for _ in pipeline:
            pass
        return pipeline.statistics()


_COLUMNS = (
    "stage",
    "concurrency",
    "items/s",
    "calls/s",
    "mean ms",
    "p90 ms",
    "p99 ms",
    "busy",
    "failed",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProfile:
    """A stage, measured by itself at one concurrency.

    Attributes:
        name: Name of the stage; ``"source"`` for a source.
        concurrency: How many calls could run at once.
        is_configured: Whether that is the concurrency in the definition.
        inputs_per_item: How many inputs the stage gets for each item of the source: 1 / 32 behind
            ``aggregate(32)``, above 1 behind a generator.
        calls: How many calls were timed.
        failures: How many of them failed.
        rate: Calls a second.
        average: Mean duration of a call, in seconds.
        p90: Nine of ten calls took no longer, in seconds.
        p99: 99 of a hundred calls took no longer, in seconds.
        occupancy: The part of the concurrency that was in use, from 0.0 to 1.0. Low values mean
            that the calls were too short to keep so many workers busy.
    """

    name: str
    concurrency: int
    is_configured: bool
    inputs_per_item: float
    calls: int
    failures: int
    rate: float
    average: float
    p90: float
    p99: float
    occupancy: float

    @property
    def items_per_second(self) -> float:
        """How many items of the source a second the stage would keep up with."""
        return self.rate / self.inputs_per_item


@dataclass(frozen=True, slots=True)
class PipelineProfile:
    """A pipeline, measured stage by stage and as a whole.

    Attributes:
        stages: One for each source, stage and concurrency, in the order of the pipeline.
        overall: Statistics of a run of the whole pipeline over the items that were taken.
    """

    stages: tuple[StageProfile, ...]
    overall: PipelineStatistics

    @property
    def bottleneck(self) -> str:
        """Name of the stage that keeps up with the fewest items a second, as configured."""
        return self._slowest().name

    def of(self, name: str) -> tuple[StageProfile, ...]:
        """All results of a stage, by concurrency.

        Raises:
            KeyError: No stage has that name.
        """
        found = tuple(stage for stage in self.stages if stage.name == name)
        if not found:
            names = sorted({stage.name for stage in self.stages})
            raise KeyError(f"no stage is called {name!r}; there are {names}")
        return found

    def __str__(self) -> str:
        return "\n".join([*_table(self.stages), "", *self._verdict()])

    def _slowest(self) -> StageProfile:
        configured = (stage for stage in self.stages if stage.is_configured)
        return min(configured, key=lambda stage: stage.items_per_second)

    def _verdict(self) -> Iterator[str]:
        slowest = self._slowest()
        yield (
            f"Bottleneck: {slowest.name}, which keeps up with {slowest.items_per_second:.1f} items "
            f"of the source a second at concurrency={slowest.concurrency}."
        )
        best = max(self.of(slowest.name), key=lambda stage: stage.rate)
        if best.concurrency != slowest.concurrency:
            yield (
                f"It was fastest at concurrency={best.concurrency}: {best.items_per_second:.1f} "
                "items a second."
            )
        yield f"The whole pipeline: {self.overall}"


def _save_plot(profile: PipelineProfile, path: str | Path) -> None:
    """Draw the rate of each stage over its concurrency.

    Args:
        profile: What is drawn.
        path: File to write; its name says the format (``.png``, ``.svg``, ``.pdf``).

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    # _Figures of this class need no display, and pyplot would keep them.
    figure = require("matplotlib", "A plot of a profile", MissingPackageError).Figure(
        figsize=(8, 5)
    )
    axes = figure.add_subplot()
    for name, group in groupby(profile.stages, key=lambda stage: stage.name):
        stages = list(group)
        rates = [stage.items_per_second for stage in stages]
        concurrencies = [stage.concurrency for stage in stages]
        configured = [number for number, stage in enumerate(stages) if stage.is_configured]
        label = f"{name} (bottleneck)" if name == profile.bottleneck else name
        axes.plot(concurrencies, rates, marker="o", markevery=configured, label=label)
    axes.set(
        xscale="log", yscale="log", xlabel="concurrency", ylabel="items of the source a second"
    )
    ticks = sorted({stage.concurrency for stage in profile.stages})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_title("Each stage by itself; the dot is the concurrency in the definition")
    axes.legend()
    figure.savefig(path)


def _table(stages: tuple[StageProfile, ...]) -> Iterator[str]:
    rows = [_COLUMNS, *(_row(stage) for stage in stages)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    for row in rows:
        first = row[0].ljust(widths[0])
        others = (text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True))
        yield "  ".join([first, *others])
    yield "* as configured"


def _row(stage: StageProfile) -> tuple[str, ...]:
    return (
        stage.name,
        f"{stage.concurrency} {'*' if stage.is_configured else ' '}",
        f"{stage.items_per_second:.1f}",
        f"{stage.rate:.1f}",
        f"{stage.average * 1e3:.3f}",
        f"{stage.p90 * 1e3:.3f}",
        f"{stage.p99 * 1e3:.3f}",
        f"{stage.occupancy:.0%}",
        str(stage.failures),
    )


_MeasuredStage: TypeAlias = PipeConfig | AggregateConfig | DisaggregateConfig

_MAX_KEPT: Final = 64
"""Outputs that are kept as inputs of the next stage: batches of videos may be large."""

_WARM_UP_SECONDS: Final = 60.0
"""How long the first calls, in which pools start, are waited for."""


class _Figures(TypedDict):
    """What is told of the calls of a stage."""

    calls: int
    failures: int
    rate: float
    average: float
    p90: float
    p99: float
    occupancy: float


@dataclass(frozen=True, slots=True)
class _Calls:
    """Calls that were timed.

    Attributes:
        durations: Seconds that each took.
        failures: How many failed.
        elapsed: Seconds from the first to the end of the last.
    """

    durations: Sequence[float]
    failures: int
    elapsed: float

    def figures(self, concurrency: int) -> _Figures:
        """Rates, averages and quantiles."""
        ordered = sorted(self.durations)
        total = sum(ordered)
        return _Figures(
            calls=len(ordered),
            failures=self.failures,
            rate=len(ordered) / self.elapsed,
            average=total / len(ordered),
            p90=ordered[math.ceil(0.90 * len(ordered)) - 1],
            p99=ordered[math.ceil(0.99 * len(ordered)) - 1],
            occupancy=min(1.0, total / self.elapsed / concurrency),
        )


class _StageRun:
    """A stage that was run alone.

    Args:
        stage: What is measured.
        inputs: Its inputs, used again from the start when there are too few.
        concurrency: How many calls may run at once.
        number: How many calls are timed, or how many groups are made. As many calls as
            ``concurrency`` come before them, untimed.

    Attributes:
        calls: The timed calls.
        outputs: The first outputs.
        outputs_per_input: How many there were, by input.
        first_failure: What the first call that failed raised.
    """

    def __init__(
        self, stage: _MeasuredStage, inputs: Sequence[Any], concurrency: int, number: int
    ) -> None:
        if isinstance(stage, AggregateConfig) and isinstance(stage.aggregator, int):
            number = stage.aggregator * min(number, _MAX_KEPT)
        watch = _Watch(inputs, concurrency if isinstance(stage, PipeConfig) else 0, number)
        config = PipelineConfig(SourceConfig(watch), (_alone(stage, concurrency),), SinkConfig(8))
        pipeline: Pipeline[Any] = Pipeline(
            config,
            num_threads=concurrency,
            max_failures=math.inf,
            task_hook_factory=lambda _: watch,
        )
        outputs: list[Any] = []
        num_outputs = 0
        with pipeline.auto_stop():
            for output in pipeline:
                num_outputs += 1
                if len(outputs) < _MAX_KEPT:
                    outputs.append(output)
            end = time.perf_counter()
        self.outputs_per_input = num_outputs / watch.num_inputs
        # As many as the inputs give when used once, so that merged samples keep their proportions.
        self.outputs = outputs[: max(1, round(self.outputs_per_input * len(inputs)))]
        self.first_failure = watch.first_failure
        self.calls = watch.calls_until(end)


class _TimedSource:
    """A source that takes the time of each item, without the time for which it is kept waiting.

    Args:
        items: The source.

    Attributes:
        items: The same items, timed.
    """

    def __init__(self, items: Iterable[Any] | AsyncIterable[Any]) -> None:
        self._durations: list[float] = []
        self.items: Iterable[Any] | AsyncIterable[Any] = (
            self._timed(items) if isinstance(items, Iterable) else self._timed_async(items)
        )

    def calls(self, number: int) -> _Calls:
        """The first items as calls."""
        durations = self._durations[:number]
        return _Calls(durations, 0, max(sum(durations), 1e-9))

    def _timed(self, items: Iterable[Any]) -> Iterator[Any]:
        start = time.perf_counter()
        for item in items:
            self._durations.append(time.perf_counter() - start)
            yield item
            start = time.perf_counter()

    async def _timed_async(self, items: AsyncIterable[Any]) -> AsyncIterator[Any]:
        start = time.perf_counter()
        async for item in items:
            self._durations.append(time.perf_counter() - start)
            yield item
            start = time.perf_counter()


def _alone(stage: _MeasuredStage, concurrency: int) -> _MeasuredStage:
    if isinstance(stage, PipeConfig):
        return replace(stage, concurrency=concurrency, max_failures=None)
    return stage


class _Watch(TaskHook):
    """Both ends of a stage: the source that feeds it, and the hook that times its calls.

    The first calls are not timed, and the others wait until these are done: pools start in them.
    """

    def __init__(self, inputs: Sequence[Any], num_untimed: int, number: int) -> None:
        self.first_failure: BaseException | None = None
        self.num_inputs = num_untimed + number
        self._inputs = inputs
        self._num_untimed = num_untimed
        self._number = number
        self._lock = threading.Lock()
        self._is_warm = threading.Event()
        self._num_ended = 0
        self._durations: list[float] = []
        self._failures = 0
        self._start = 0.0

    def __iter__(self) -> Iterator[Any]:
        inputs = itertools.cycle(self._inputs)
        yield from itertools.islice(inputs, self._num_untimed)
        if self._num_untimed:
            self._is_warm.wait(_WARM_UP_SECONDS)
        self._start = time.perf_counter()
        yield from itertools.islice(inputs, self._number)

    def task_end(self, item: Any, seconds: float, error: BaseException | None) -> None:  # noqa: ARG002
        """Take the time of a call."""
        with self._lock:
            self._num_ended += 1
            if error is not None and self.first_failure is None:
                self.first_failure = error.with_traceback(None)
            if self._num_ended > self._num_untimed:
                self._durations.append(seconds)
                self._failures += error is not None
            elif self._num_ended == self._num_untimed:
                self._is_warm.set()

    def calls_until(self, end: float) -> _Calls:
        """What was timed. Groups are not called like functions, so theirs is the mean time."""
        elapsed = end - self._start
        durations = self._durations or [elapsed / self._number] * self._number
        return _Calls(durations, self._failures, elapsed)
