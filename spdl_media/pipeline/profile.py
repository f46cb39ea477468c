"""Measures each stage of a pipeline by itself, at several concurrencies, and names the slowest."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from spdl_media._checks import check_int
from spdl_media._optional import require
from spdl_media.pipeline.engine.nodes import routed
from spdl_media.pipeline.failures import MissingPackageError, PipelineError
from spdl_media.pipeline.pipeline import Pipeline
from spdl_media.pipeline.profile_report import PipelineProfile, StageProfile, save_plot
from spdl_media.pipeline.profile_run import Calls, MeasuredStage, StageRun, TimedSource
from spdl_media.pipeline.stages import (
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

__all__ = ("profile_pipeline",)

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
        save_plot(result, plot)
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
        timed = TimedSource(source.items)
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

    def _stage(self, stage: MeasuredStage, sample: _Sample) -> _Sample:
        own = stage.concurrency if isinstance(stage, PipeConfig) else 1
        others = self._concurrencies if isinstance(stage, PipeConfig) else []
        outputs = _Sample([], 0)
        for concurrency in sorted({own, *others}):
            run = StageRun(stage, sample.items, concurrency, self._num_iterations)
            self._add(
                stage.name, concurrency, run.calls, sample.number, is_configured=concurrency == own
            )
            if concurrency == own:
                if run.first_failure is not None and not run.outputs:
                    raise _all_failed(stage, run.first_failure) from run.first_failure
                outputs = _Sample(run.outputs, sample.number * run.outputs_per_input)
        return outputs

    def _add(
        self, name: str, concurrency: int, calls: Calls, number: float, *, is_configured: bool
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
