"""Measures each stage of a pipeline by itself, at several concurrencies, and finds the slowest."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from spdl_media._checks import check_int
from spdl_media._optional import require
from spdl_media.pipeline.failures import MissingPackageError, PipelineError
from spdl_media.pipeline.pipeline import Pipeline
from spdl_media.pipeline.stages import (
    AggregateConfig,
    MergeConfig,
    OwnSource,
    PipeConfig,
    PipelineConfig,
    SinkConfig,
    SourceConfig,
    with_unique_names,
)
from spdl_media.pipeline.stats import Shown, Table, Timing, timing

__all__ = ("PipelineProfile", "StageProfile", "profile_pipeline")

CONCURRENCIES = (1, 2, 4, 8, 16)

# Maximum number of outputs that are kept as inputs of the next stage. Batches of videos may be large.
_MAX_KEPT: Final = 64


_COLUMNS: dict[str, Callable[[StageProfile], str]] = {
    "stage": lambda stage: stage.name,
    "concurrency": lambda stage: f"{stage.concurrency} {'*' if stage.is_configured else ' '}",
    "items/s": lambda stage: f"{stage.items_per_second:.1f}",
    "calls/s": lambda stage: f"{stage.calls.rate:.1f}",
    "mean ms": lambda stage: f"{stage.calls.average * 1e3:.3f}",
    "p90 ms": lambda stage: f"{stage.calls.p90 * 1e3:.3f}",
    "p99 ms": lambda stage: f"{stage.calls.p99 * 1e3:.3f}",
    "busy": lambda stage: f"{stage.calls.occupancy:.0%}",
    "failed": lambda stage: str(stage.failures),
}


@dataclass(frozen=True, slots=True)
class StageProfile:
    """A stage, measured by itself at one concurrency.

    Attributes:
        name: Name of the stage; ``"source"`` for a source.
        concurrency: Maximum number of calls at once in this measurement.
        is_configured: Whether that is the concurrency in the definition.
        inputs_per_item: Number of inputs of the stage per item of the source: 1 / 32 after ``aggregate(32)``,
            more than 1 after a generator.
        calls: The calls. Of a source, and of stages that call no function, only the mean duration is
            measured. A low occupancy means that they were too short to keep so many workers busy.
        failures: Number of calls that failed.
    """

    name: str
    concurrency: int
    is_configured: bool
    inputs_per_item: float
    calls: Timing
    failures: int = 0

    @property
    def items_per_second(self) -> float:
        """Number of items of the source per second that the stage can process."""
        return self.calls.rate / self.inputs_per_item


@dataclass(frozen=True, slots=True)
class PipelineProfile(Shown):
    """A pipeline, measured stage by stage.

    ``print`` and notebooks show a table in which the bottleneck is marked, and :meth:`plot` draws the rates.

    Attributes:
        stages: One profile for each source, and for each stage and concurrency, in the order of the pipeline.
    """

    stages: tuple[StageProfile, ...]

    @property
    def bottleneck(self) -> str:
        """Name of the stage with the lowest ``items_per_second`` at its configured concurrency."""
        return self._slowest().name

    def of(self, name: str) -> tuple[StageProfile, ...]:
        """Return all profiles of the stage with this name, by concurrency."""
        return tuple(stage for stage in self.stages if stage.name == name)

    def plot(self, path: str | Path | None = None) -> Any:
        """Plot the rate of each stage against its concurrency.

        Args:
            path: File to save the plot in as well. Its suffix selects the format.

        Returns:
            A ``matplotlib.figure.Figure``.

        Raises:
            MissingPackageError: matplotlib is not installed.
        """
        # matplotlib.figure.Figure needs no display, and pyplot would keep a reference to the figure.
        library = require("matplotlib", "A plot of a profile", MissingPackageError)
        figure = library.Figure(figsize=(8, 5))
        axes = figure.add_subplot()
        for name, group in itertools.groupby(self.stages, key=lambda stage: stage.name):
            stages = list(group)
            numbers = [stage.concurrency for stage in stages]
            rates = [stage.items_per_second for stage in stages]
            configured = [number for number, stage in enumerate(stages) if stage.is_configured]
            label = f"{name} (bottleneck)" if name == self.bottleneck else name
            axes.plot(numbers, rates, marker="o", markevery=configured, label=label)
        axes.set(xscale="log", yscale="log", xlabel="concurrency", ylabel="items a second")
        ticks = sorted({stage.concurrency for stage in self.stages})
        axes.set_xticks(ticks, ticks)
        axes.minorticks_off()
        axes.set_title("Each stage by itself; the dot is the concurrency in the definition")
        axes.legend()
        if path is not None:
            figure.savefig(path)
        return figure

    def _table(self) -> Table:
        after = ("* as configured", "", *self._verdict())
        return Table(_COLUMNS, self.stages, self.stages.index(self._slowest()), after=after)

    def _slowest(self) -> StageProfile:
        configured = (stage for stage in self.stages if stage.is_configured)
        # Only as configured: it does not matter that a stage is slow at other concurrencies.
        return min(configured, key=lambda stage: stage.items_per_second)

    def _verdict(self) -> Iterator[str]:
        slowest = self._slowest()
        yield (
            f"Bottleneck: {slowest.name}, which keeps up with {slowest.items_per_second:.1f} items "
            f"of the source a second at concurrency={slowest.concurrency}."
        )
        best = max(self.of(slowest.name), key=lambda stage: stage.calls.rate)
        if best.concurrency != slowest.concurrency:
            yield (
                f"It was fastest at concurrency={best.concurrency}: {best.items_per_second:.1f} "
                "items a second."
            )


def profile_pipeline(
    config: PipelineConfig,
    num_iterations: int = 100,
    *,
    concurrencies: Sequence[int] = CONCURRENCIES,
    show: bool = True,
) -> PipelineProfile:
    """Measure each stage of a pipeline by itself, and find the bottleneck.

    Each stage is run at each concurrency with outputs of the stage before it, which are repeated if there are
    too few. So stages must not modify their inputs. A source that can be iterated only once is used up.
    Merged pipelines are measured stage by stage; all paths of ``path_variants`` together, by the name of the
    router.

    Args:
        config: The definition, from :meth:`PipelineBuilder.get_config`.
        num_iterations: Number of items to take from the source, and number of calls of each stage to time at
            each concurrency.
        concurrencies: Concurrencies to measure, in addition to the configured one of each stage.
        show: Whether to print the table.

    Returns:
        Profiles of each stage and concurrency.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A number is below 1.
        PipelineError: The source or a stage gave nothing, so that later stages have no inputs.
        PipelineFailure: The source failed.
    """
    check_int("num_iterations", num_iterations)
    wanted = {check_int("Each of concurrencies", concurrency) for concurrency in concurrencies}
    result = _Profiler(num_iterations, wanted).profile(config)
    if show:
        print(result)  # noqa: T201  # show=True asks for it
    return result


class _Inputs(NamedTuple):
    """Inputs of a stage.

    Attributes:
        items: Sample of the inputs, with which the stage is measured.
        number: Number of inputs that all items taken from the source would lead to.
    """

    items: list[Any]
    number: float


class _Profiler:
    """Measures a pipeline stage by stage, from source to sink."""

    def __init__(self, num_iterations: int, concurrencies: set[int]) -> None:
        self._num_iterations = num_iterations
        self._concurrencies = concurrencies
        self._source_sizes: list[int] = []
        self._profiles: list[StageProfile] = []

    def profile(self, config: PipelineConfig) -> PipelineProfile:
        """Measure all stages.

        Raises:
            PipelineError: A source or a stage gave nothing, or all inputs of a stage failed.
            PipelineFailure: A source failed.
        """
        # Profiles are looked up by name, so names must be unique.
        self._pipeline(with_unique_names(config))
        total = sum(self._source_sizes)
        return PipelineProfile(
            tuple(
                replace(one, inputs_per_item=one.inputs_per_item / total) for one in self._profiles
            )
        )

    def _pipeline(self, config: PipelineConfig) -> _Inputs:
        if isinstance(config.src, MergeConfig):
            parts = [self._pipeline(one) for one in config.src.pipeline_configs]
            items = [item for part in parts for item in part.items]
            inputs = _Inputs(items, sum(part.number for part in parts))
        else:
            inputs = self._source(config.src)
        for position, stage in enumerate(config.pipes):
            inputs = self._stage(stage, inputs)
            if not inputs.items and position + 1 < len(config.pipes):
                raise PipelineError(
                    f"Stage {stage.name!r} gave nothing for {self._num_iterations} inputs, so the "
                    "stages behind it cannot be measured. Is num_iterations large enough?"
                )
        return inputs

    def _source(self, source: SourceConfig) -> _Inputs:
        config = PipelineConfig(SourceConfig(source.source), (), SinkConfig())
        pipeline: Pipeline[Any] = Pipeline(config, num_threads=1)
        with pipeline.auto_stop():
            # Take only so many items: the source may be infinite.
            taken = itertools.islice(pipeline, self._num_iterations)
            # The time of the first item includes the start of the run.
            items = list(itertools.islice(taken, 1))
            start = time.perf_counter()
            items += taken
            elapsed = time.perf_counter() - start
        if not items:
            raise PipelineError(
                f"The source {source.name} gave no items, so nothing can be measured"
            )
        self._source_sizes.append(len(items))
        # Sources are numbered only if pipelines are merged.
        name = f"source_{len(self._source_sizes)}" if len(self._source_sizes) > 1 else "source"
        # The time may be below the resolution of the clock, and the rate divides by it.
        calls = _of_mean(len(items), max(elapsed / max(1, len(items) - 1), 1e-9))
        profile = StageProfile(name, 1, is_configured=True, inputs_per_item=len(items), calls=calls)
        self._profiles.append(profile)
        return _Inputs(items, len(items))

    def _stage(self, stage: Any, inputs: _Inputs) -> _Inputs:
        if not isinstance(stage, PipeConfig):
            # Other stages always work on one item at a time.
            return self._measure(stage, inputs, 1, is_configured=True)
        outputs = _Inputs([], 0)
        # In ascending order, as the table and the plot show them.
        for concurrency in sorted({stage.concurrency, *self._concurrencies}):
            is_configured = concurrency == stage.concurrency
            # The stage's own limit could end the run; the pipeline that measures it has none.
            tried = replace(stage, concurrency=concurrency, max_failures=None)
            found = self._measure(tried, inputs, concurrency, is_configured=is_configured)
            outputs = found if is_configured else outputs
        return outputs

    def _measure(
        self, stage: Any, inputs: _Inputs, concurrency: int, *, is_configured: bool
    ) -> _Inputs:
        """Run a stage by itself, and return its outputs."""
        is_pipe = isinstance(stage, PipeConfig)
        number = self._num_iterations
        if isinstance(stage, AggregateConfig) and isinstance(stage.aggregator, int):
            # Make no more groups than are kept, because each takes many inputs.
            number = stage.aggregator * min(number, _MAX_KEPT)
        # The first epoch starts the pools and is not timed.
        sizes = (concurrency if is_pipe else 0, number)
        numbers, repeated = iter(sizes), itertools.cycle(inputs.items)
        source = OwnSource(lambda: itertools.islice(repeated, next(numbers)), stage.name)
        pipeline: Pipeline[Any] = Pipeline(
            # A larger buffer, so that the loop below does not slow the stage down.
            PipelineConfig(SourceConfig(source), (stage,), SinkConfig(8)),
            # More than the concurrency serve the stages of paths alone.
            num_threads=max(8, concurrency),
            max_failures=math.inf,
        )
        with pipeline.auto_stop():
            # Read the engine's counters, because statistics() would include the calls of the first epoch.
            counters = pipeline._running().graph.stages[0].counters
            for _ in sizes:
                outputs: list[Any] = []
                num_outputs, num_failed = 0, sum(pipeline.failure_counts.values())
                before, start = counters.copy(), time.perf_counter()
                for output in pipeline:
                    num_outputs += 1
                    if num_outputs <= _MAX_KEPT:
                        outputs.append(output)
                elapsed = time.perf_counter() - start
        if is_configured and pipeline.failures and not outputs:
            first_failure = pipeline.failures[0].exception
            raise PipelineError(
                f"All inputs of stage {stage.name!r} failed, so it cannot be measured. The first failure: "
                f"{first_failure!r}"
            ) from first_failure
        calls = (
            counters.statistics(stage.name, elapsed, before).calls
            if is_pipe
            else _of_mean(number, elapsed / number)
        )
        num_failed = sum(pipeline.failure_counts.values()) - num_failed
        self._profiles.append(
            StageProfile(stage.name, concurrency, is_configured, inputs.number, calls, num_failed)
        )
        # Keep as many as one pass over the inputs gives, so that merged samples keep their proportions.
        kept = outputs[: max(1, round(num_outputs / number * len(inputs.items)))]
        return _Inputs(kept, inputs.number * num_outputs / number)


def _of_mean(number: int, mean: float) -> Timing:
    """Return the timing of calls that were not timed one by one."""
    total = number * mean
    return timing(number, total, deque([mean]), total, total)
