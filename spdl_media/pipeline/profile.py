"""Measures each stage of a pipeline by itself, at several concurrencies, and names the slowest."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from spdl_media._checks import check_int
from spdl_media.pipeline.engine.joints import routed
from spdl_media.pipeline.executors import TaskHook
from spdl_media.pipeline.failures import PipelineError
from spdl_media.pipeline.pipeline import Pipeline
from spdl_media.pipeline.profile_results import PipelineProfile, StageProfile
from spdl_media.pipeline.stages import (
    AggregateConfig,
    MergeConfig,
    PathVariantsConfig,
    PipeConfig,
    PipelineConfig,
    SinkConfig,
    SourceConfig,
    StageConfig,
    with_unique_names,
)
from spdl_media.pipeline.stats import quantile

__all__ = ("profile_pipeline",)

CONCURRENCIES = (1, 2, 4, 8, 16)

_MAX_KEPT: Final = 64
"""Outputs that are kept as inputs of the next stage: batches of videos may be large."""

_WARM_UP_SECONDS: Final = 60.0
"""How long the first calls, in which pools start, are waited for."""


def profile_pipeline(
    config: PipelineConfig,
    num_iterations: int = 100,
    *,
    concurrencies: Sequence[int] = CONCURRENCIES,
    num_threads: int = 8,
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
        show: Print the table.

    Returns:
        Results for each stage and concurrency.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A number is below 1.
        PipelineError: The source or a stage gave nothing, so the stages behind it have no inputs.
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
    result = _Profiler(num_iterations, set(concurrencies)).profile(config, num_threads)
    if show:
        print(result)  # noqa: T201  # what the caller asked for
    return result


class _Inputs(NamedTuple):
    """Inputs of a stage.

    Attributes:
        items: Some inputs, to measure with.
        number: How many inputs there would be for the items that were taken from the source.
    """

    items: list[Any]
    number: float

    @classmethod
    def joined(cls, parts: Sequence[_Inputs]) -> _Inputs:
        """Return the inputs of a stage that several others lead to."""
        return cls(
            [item for part in parts for item in part.items], sum(part.number for part in parts)
        )


class _Profiler:
    """Goes through a pipeline from source to sink."""

    def __init__(self, num_iterations: int, concurrencies: set[int]) -> None:
        self._num_iterations = num_iterations
        self._concurrencies = concurrencies
        self._source_sizes: list[int] = []
        self._profiles: list[StageProfile] = []

    def profile(self, config: PipelineConfig, num_threads: int) -> PipelineProfile:
        """Measure all parts, and then the whole with the items that were taken from its sources.

        Raises:
            PipelineError: A source or a stage gave nothing, or all inputs of a stage failed.
            PipelineFailure: A source failed.
        """
        # Results are told apart by the names.
        config, _ = self._pipeline(with_unique_names(config))
        total = sum(self._source_sizes)
        stages = tuple(
            replace(one, inputs_per_item=one.inputs_per_item / total) for one in self._profiles
        )
        config = replace(config, sink=config.sink or SinkConfig())
        pipeline: Pipeline[Any] = Pipeline(config, num_threads=num_threads, max_failures=math.inf)
        with pipeline.auto_stop():
            for _ in pipeline:
                pass
            return PipelineProfile(stages, pipeline.statistics())

    def _pipeline(self, config: PipelineConfig) -> tuple[PipelineConfig, _Inputs]:
        source: SourceConfig | MergeConfig
        if isinstance(config.src, MergeConfig):
            parts = [self._pipeline(one) for one in config.src.pipeline_configs]
            source = MergeConfig(tuple(part for part, _ in parts))
            inputs = _Inputs.joined([outputs for _, outputs in parts])
        else:
            inputs = self._source(config.src)
            source = SourceConfig(inputs.items)
        return replace(config, src=source), self._stages(config.pipes, inputs)

    def _source(self, source: SourceConfig) -> _Inputs:
        durations: list[float] = []
        timed: Any = _timed if isinstance(source.source, Iterable) else _timed_async
        config = PipelineConfig(
            SourceConfig(timed(source.source, durations), source.continuous), (), SinkConfig()
        )
        pipeline: Pipeline[Any] = Pipeline(config, num_threads=1)
        with pipeline.auto_stop():
            # No more: the source may have no end.
            items = list(itertools.islice(pipeline, self._num_iterations))
        if not items:
            raise PipelineError(
                f"The source {source.name} gave no items, so nothing can be measured"
            )
        self._source_sizes.append(len(items))
        # Numbered only where pipelines are merged.
        name = f"source_{len(self._source_sizes)}" if len(self._source_sizes) > 1 else "source"
        # The pipeline has read ahead of what was taken.
        durations = durations[: len(items)]
        # A source may take no time that the clock can tell, and the rate divides by it.
        calls = _Calls(durations, 0, max(sum(durations), 1e-9))
        self._add(name, 1, calls, len(items), is_configured=True)
        return _Inputs(items, len(items))

    def _stages(self, stages: Sequence[StageConfig], inputs: _Inputs) -> _Inputs:
        for position, stage in enumerate(stages):
            measure = self._paths if isinstance(stage, PathVariantsConfig) else self._stage
            inputs = measure(stage, inputs)
            if not inputs.items and position + 1 < len(stages):
                raise PipelineError(
                    f"Stage {stage.name!r} gave nothing for {self._num_iterations} inputs, so the "
                    "stages behind it cannot be measured. Is num_iterations large enough?"
                )
        return inputs

    def _paths(self, stage: Any, inputs: _Inputs) -> _Inputs:
        taken: list[list[Any]] = [[] for _ in stage.paths]
        path_of = routed(stage.router, len(stage.paths))
        first_failure: Exception | None = None
        for item in inputs.items:
            try:
                index, _ = path_of(item)
            except Exception as error:  # noqa: BLE001  # as in a run, it costs the item
                first_failure = first_failure or error
            else:
                taken[index].append(item)
        _check_some_succeeded(stage, first_failure, any(taken))
        # A path that gets no item is not measured: there is nothing to do it with.
        return _Inputs.joined(
            [
                self._stages(path, _Inputs(items, inputs.number * len(items) / len(inputs.items)))
                for path, items in zip(stage.paths, taken, strict=True)
                if items
            ]
        )

    def _stage(self, stage: Any, inputs: _Inputs) -> _Inputs:
        own = stage.concurrency if isinstance(stage, PipeConfig) else 1
        # Other stages work on one item at a time, whatever is tried.
        others = self._concurrencies if isinstance(stage, PipeConfig) else set()
        outputs = _Inputs([], 0)
        for concurrency in sorted({own, *others}):
            calls, items, items_per_input, first_failure = _run(
                stage, inputs.items, concurrency, self._num_iterations
            )
            is_configured = concurrency == own
            self._add(stage.name, concurrency, calls, inputs.number, is_configured=is_configured)
            if is_configured:
                _check_some_succeeded(stage, first_failure, bool(items))
                outputs = _Inputs(items, inputs.number * items_per_input)
        return outputs

    def _add(
        self, name: str, concurrency: int, calls: _Calls, number: float, *, is_configured: bool
    ) -> None:
        durations = sorted(calls.durations)
        total = sum(durations)
        self._profiles.append(
            StageProfile(
                name=name,
                concurrency=concurrency,
                is_configured=is_configured,
                inputs_per_item=number,
                calls=len(durations),
                failures=calls.failures,
                rate=len(durations) / calls.elapsed,
                average=total / len(durations),
                p90=quantile(durations, 0.90),
                p99=quantile(durations, 0.99),
                occupancy=min(1.0, total / calls.elapsed / concurrency),
            )
        )


def _check_some_succeeded(
    stage: StageConfig,
    first_failure: BaseException | None,
    has_outputs: bool,  # noqa: FBT001
) -> None:
    if first_failure is not None and not has_outputs:
        raise PipelineError(
            f"All inputs of stage {stage.name!r} failed, so it cannot be measured. The first "
            f"failure: {first_failure!r}"
        ) from first_failure


def _timed(items: Iterable[Any], durations: list[float]) -> Iterator[Any]:
    """Take the time of each item, without the time for which the source is kept waiting."""
    start = time.perf_counter()
    for item in items:
        durations.append(time.perf_counter() - start)
        yield item
        start = time.perf_counter()


async def _timed_async(items: AsyncIterable[Any], durations: list[float]) -> AsyncIterator[Any]:
    start = time.perf_counter()
    async for item in items:
        durations.append(time.perf_counter() - start)
        yield item
        start = time.perf_counter()


class _Calls(NamedTuple):
    """Calls that were timed: their seconds, how many failed, and the seconds from first to last."""

    durations: Sequence[float]
    failures: int
    elapsed: float


def _run(
    stage: Any, inputs: Sequence[Any], concurrency: int, number: int
) -> tuple[_Calls, list[Any], float, BaseException | None]:
    """Run a stage by itself.

    Args:
        stage: What is measured.
        inputs: Its inputs, used again from the start when there are too few.
        concurrency: How many calls may run at once.
        number: How many calls are timed, or how many groups are made. As many calls as
            ``concurrency`` come before them, untimed.

    Returns:
        The timed calls, the first outputs, how many outputs there were for each input, and what the
        first call that failed raised.
    """
    is_pipe = isinstance(stage, PipeConfig)
    if is_pipe:
        # Its limit would end the run; that of the pipeline below is infinite.
        stage = replace(stage, concurrency=concurrency, max_failures=None)
    elif isinstance(stage, AggregateConfig) and isinstance(stage.aggregator, int):
        # Of groups no more than are kept: each takes many inputs.
        number = stage.aggregator * min(number, _MAX_KEPT)
    watch = _Watch(inputs, concurrency if is_pipe else 0, number)
    pipeline: Pipeline[Any] = Pipeline(
        PipelineConfig(SourceConfig(watch), (stage,), SinkConfig(8)),
        num_threads=concurrency,
        max_failures=math.inf,
        # There is one stage, so one hook serves.
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
    outputs_per_input = num_outputs / watch.num_inputs
    # As many as the inputs give when used once, so that merged samples keep their proportions.
    outputs = outputs[: max(1, round(outputs_per_input * len(inputs)))]
    return watch.calls_until(end), outputs, outputs_per_input, watch.first_failure


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
        # Several threads end calls at the same time.
        with self._lock:
            self._num_ended += 1
            if error is not None and self.first_failure is None:
                # Without the frames, which would keep the input alive.
                self.first_failure = error.with_traceback(None)
            if self._num_ended > self._num_untimed:
                self._durations.append(seconds)
                self._failures += error is not None
            elif self._num_ended == self._num_untimed:
                self._is_warm.set()

    def calls_until(self, end: float) -> _Calls:
        """Return the timed calls. Groups are not called like functions, so theirs is the mean time."""
        elapsed = end - self._start
        durations = self._durations or [elapsed / self._number] * self._number
        return _Calls(durations, self._failures, elapsed)
