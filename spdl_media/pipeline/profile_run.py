"""Runs one stage by itself and takes the time of its calls."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias, TypedDict

from spdl_media.pipeline.functions import TaskHook
from spdl_media.pipeline.pipeline import Pipeline
from spdl_media.pipeline.stages import (
    AggregateConfig,
    DisaggregateConfig,
    PipeConfig,
    PipelineConfig,
    SinkConfig,
    SourceConfig,
)

__all__ = ("Calls", "Figures", "MeasuredStage", "StageRun", "TimedSource")

MeasuredStage: TypeAlias = PipeConfig | AggregateConfig | DisaggregateConfig

_MAX_KEPT: Final = 64
"""Outputs that are kept as inputs of the next stage: batches of videos may be large."""

_WARM_UP_SECONDS: Final = 60.0
"""How long the first calls, in which pools start, are waited for."""


class Figures(TypedDict):
    """What is told of the calls of a stage."""

    calls: int
    failures: int
    rate: float
    average: float
    p90: float
    p99: float
    occupancy: float


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls that were timed.

    Attributes:
        durations: Seconds that each took.
        failures: How many failed.
        elapsed: Seconds from the first to the end of the last.
    """

    durations: Sequence[float]
    failures: int
    elapsed: float

    def figures(self, concurrency: int) -> Figures:
        """Rates, averages and quantiles."""
        ordered = sorted(self.durations)
        total = sum(ordered)
        return Figures(
            calls=len(ordered),
            failures=self.failures,
            rate=len(ordered) / self.elapsed,
            average=total / len(ordered),
            p90=ordered[math.ceil(0.90 * len(ordered)) - 1],
            p99=ordered[math.ceil(0.99 * len(ordered)) - 1],
            occupancy=min(1.0, total / self.elapsed / concurrency),
        )


class StageRun:
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
        self, stage: MeasuredStage, inputs: Sequence[Any], concurrency: int, number: int
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


class TimedSource:
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

    def calls(self, number: int) -> Calls:
        """The first items as calls."""
        durations = self._durations[:number]
        return Calls(durations, 0, max(sum(durations), 1e-9))

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


def _alone(stage: MeasuredStage, concurrency: int) -> MeasuredStage:
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

    def calls_until(self, end: float) -> Calls:
        """What was timed. Groups are not called like functions, so theirs is the mean time."""
        elapsed = end - self._start
        durations = self._durations or [elapsed / self._number] * self._number
        return Calls(durations, self._failures, elapsed)
