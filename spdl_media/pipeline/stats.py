"""Statistics of a running pipeline: frozen values, made of counters that cost little to keep."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from spdl_media.pipeline.tables import Shown, Table

__all__ = (
    "PipelineStatistics",
    "SinkStatistics",
    "StageStatistics",
    "Timing",
)

# Quantiles are those of the last calls: enough for a p99, and recent enough to follow a change.
RECENT = 1000


@dataclass(frozen=True, slots=True)
class Timing:
    """How often something happened and how long it took.

    Attributes:
        number: How often it happened and ended.
        average: Mean duration, in seconds; 0.0 when nothing happened, as for all that follow.
        p90: Nine of ten of the last 1,000 took no longer, in seconds.
        p99: 99 of a hundred of the last 1,000 took no longer, in seconds.
        occupancy: Of the calls of a stage, the part of its concurrency that was in use, from 0.0 to 1.0.
            Of a queue, how many items were in it on average.
        rate: How many a second.
    """

    number: int
    average: float
    p90: float
    p99: float
    occupancy: float
    rate: float


@dataclass(frozen=True, slots=True)
class StageStatistics:
    """Statistics of one stage.

    Attributes:
        name: Name of the stage.
        concurrency: How many calls may run at once.
        calls: Its calls, with those that failed.
        queue: The waits of items between being accepted by the stage and being worked on.
        failures: How many items failed.
        dropped: For how many items there was no result, because it was ``None``.
        outputs: How many results went to the next stage.
    """

    name: str
    concurrency: int
    calls: Timing
    queue: Timing
    failures: int
    dropped: int
    outputs: int


@dataclass(frozen=True, slots=True)
class SinkStatistics:
    """The buffer between the pipeline and its consumer, in the time that the statistics are of.

    Attributes:
        number: How many items were delivered to it.
        rate: How many a second.
        occupancy: How many items were in it on average, when one more came.
        waited: Seconds for which consumers waited for items. Near the elapsed time, the pipeline is
            what is slow; near 0.0, the consumer is.
    """

    number: int
    rate: float
    occupancy: float
    waited: float


_COLUMNS: dict[str, Callable[[StageStatistics], str]] = {
    "stage": lambda stage: stage.name,
    "concurrency": lambda stage: str(stage.concurrency),
    "calls": lambda stage: str(stage.calls.number),
    "calls/s": lambda stage: f"{stage.calls.rate:.1f}",
    "mean ms": lambda stage: f"{stage.calls.average * 1e3:.2f}",
    "p90 ms": lambda stage: f"{stage.calls.p90 * 1e3:.2f}",
    "p99 ms": lambda stage: f"{stage.calls.p99 * 1e3:.2f}",
    "busy": lambda stage: f"{stage.calls.occupancy:.0%}",
    "queued ms": lambda stage: f"{stage.queue.average * 1e3:.2f}",
    "failed": lambda stage: str(stage.failures),
}
# The consumer holds the pipeline up when it waits for less than this part of the time.
_HARDLY_WAITS = 0.1
# Neither half busy nor, on average, with an item that waits, a stage holds nothing up.
_HALF_BUSY, _ONE_WAITS = 0.5, 1.0


@dataclass(frozen=True, slots=True)
class PipelineStatistics(Shown):
    """Statistics of a pipeline since it started; in the log, since the report before.

    ``print`` writes them as a table with the bottleneck marked, notebooks show it, and so does
    ``rich.print``; :meth:`show` takes rich if it is there.

    Attributes:
        elapsed: The seconds that this is of.
        source_items: How many items the source gave.
        stages: One for each stage, in order; those of paths in the order of the paths.
        sink: The buffer at the end.
    """

    elapsed: float
    source_items: int
    stages: tuple[StageStatistics, ...]
    sink: SinkStatistics

    @property
    def bottleneck(self) -> str | None:
        """What seems to hold the pipeline up: the name of a stage, ``"source"`` or ``"consumer"``.

        An estimate of how busy the stages were and what waited for them. ``None``: nothing was delivered.
        :func:`profile_pipeline` measures the stages one by one.
        """
        found = self._find_bottleneck()
        return found.name if isinstance(found, StageStatistics) else found

    def _find_bottleneck(self) -> StageStatistics | Literal["source", "consumer"] | None:
        if not self.sink.number or not self.elapsed:
            return None
        if self.sink.waited < _HARDLY_WAITS * self.elapsed:
            return "consumer"
        # Of stages that share too few threads none is half busy, but items wait for them.
        loaded = [
            stage
            for stage in self.stages
            if stage.calls.occupancy >= _HALF_BUSY or stage.queue.occupancy >= _ONE_WAITS
        ]
        if not loaded:
            return "source"
        slowest: StageStatistics = max(loaded, key=_load)
        return slowest

    def _tables(self) -> tuple[Table, ...]:
        sink, found = self.sink, self._find_bottleneck()
        first = (
            f"{self.elapsed:.1f} s, {self.source_items} items from the source, "
            f"{sink.number} delivered ({sink.rate:.1f}/s), the consumer waited {sink.waited:.1f} s"
        )
        # By the stage itself, for one of them may be called "source".
        is_stage = isinstance(found, StageStatistics)
        table = Table.of(
            self.stages,
            _COLUMNS,
            marked=self.stages.index(found) if isinstance(found, StageStatistics) else None,
            before=(first,),
            after=() if found is None or is_stage else (f"Bottleneck: the {found}",),
        )
        return (table,)


def _load(stage: StageStatistics) -> tuple[bool, float]:
    """What stages are compared by: the part of its concurrency in use or, below half, the threads in use."""
    in_use = stage.calls.occupancy
    is_busy = in_use >= _HALF_BUSY
    return is_busy, in_use if is_busy else in_use * stage.concurrency


@dataclass(slots=True, eq=False)
class StageCounters:
    """Counters of one stage, written in turns of the engine. Other threads may read it at any time.

    Attributes:
        early: Failures that were counted before their calls have ended.
        busy: Seconds of calls that have ended.
        running: Seconds so far of calls that have not. Set by who reads.
        queued: Seconds that items have waited for their calls.
        durations, waits: Of the last calls.
    """

    concurrency: int = 1
    calls: int = 0
    failures: int = 0
    early: int = 0
    dropped: int = 0
    outputs: int = 0
    busy: float = 0.0
    running: float = 0.0
    queued: float = 0.0
    durations: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    waits: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def count_call(self, queued_at: float, started_at: float, ended_at: float) -> None:
        """One more call, by the times of ``time.perf_counter`` at which the item went through."""
        self.calls += 1
        # Sums for the means over all calls, and the last ones for quantiles.
        self.busy += (duration := ended_at - started_at)
        self.durations.append(duration)
        self.queued += (wait := started_at - queued_at)
        self.waits.append(wait)

    def statistics(
        self, name: str, elapsed: float, before: StageCounters | None = None
    ) -> StageStatistics:
        """Return the statistics of the ``elapsed`` seconds since ``before`` was copied, or of all."""
        before = before or StageCounters()
        # Counts only grow, so what happened in between is a difference.
        number = self.calls - before.calls
        busy = self.busy - before.busy
        queued = self.queued - before.queued
        # A call counts for the time in which it ran, not for that in which it ended.
        in_use = busy + self.running - before.running
        return StageStatistics(
            name=name,
            concurrency=self.concurrency,
            # A call that has just ended may for a moment be neither running nor counted.
            calls=_timing(
                number,
                busy,
                self.durations,
                elapsed,
                min(max(in_use, 0.0) / self.concurrency, elapsed),
            ),
            # Waiting has no concurrency, so this occupancy is a mean number of items.
            queue=_timing(number, queued, self.waits, elapsed, queued),
            failures=self.failures - before.failures,
            dropped=self.dropped - before.dropped,
            outputs=self.outputs - before.outputs,
        )

    def copy(self) -> StageCounters:
        """The counts of this moment, without the durations of single calls."""
        return replace(self, durations=deque(), waits=deque())


def _timing(
    number: int,
    total: float,
    recent: deque[float],
    elapsed: float,
    in_use: float,
) -> Timing:
    # The copy is one step of C: the loop cannot append meanwhile.
    durations = sorted(list(recent.copy())[-number:]) if number else []
    return Timing(
        number=number,
        average=total / number if number else 0.0,
        p90=quantile(durations, 0.90),
        p99=quantile(durations, 0.99),
        occupancy=in_use / elapsed if elapsed else 0.0,
        rate=number / elapsed if elapsed else 0.0,
    )


def quantile(ordered: Sequence[float], part: float) -> float:
    """The smallest value that ``part`` of all values do not exceed."""
    # The nearest rank, so the result is a value that was measured.
    return ordered[math.ceil(part * len(ordered)) - 1] if ordered else 0.0


@dataclass(eq=False)
class StageDropRate:
    """The failures of one stage in this epoch.

    Attributes:
        counters: What has been counted since the run began.
        limit: ``max_failures`` of the stage's own.
    """

    counters: StageCounters
    limit: float | None = None
    _calls_before: int = 0
    _failures_before: int = 0

    @property
    def failures(self) -> int:
        """Failures in this epoch."""
        return self.counters.failures - self._failures_before

    @property
    def calls(self) -> int:
        """Calls that have ended in this epoch, or failed so far."""
        return self.counters.calls + self.counters.early - self._calls_before

    def begin_epoch(self) -> None:
        """Count from 0 again: losing all of an epoch is an error, however good those before were."""
        self._calls_before = self.counters.calls + self.counters.early
        self._failures_before = self.counters.failures

    def part_kept(self, min_calls: int) -> float:
        """The part that does not fail; 1.0 while there were too few calls to tell."""
        return 1 - self.failures / self.calls if self.calls >= max(1, min_calls) else 1.0


@dataclass(eq=False)
class Chain:
    """Stages in a row: each loses a part of what the ones before have kept.

    Not all failures over all calls: with three stages that would be a third when the last of them
    fails always, and above one when a stage makes many items of each.
    """

    parts: list[StageDropRate | Branches] = field(default_factory=list)

    def part_kept(self, min_calls: int) -> float:
        """The part of the items that survives all stages that have no limit of their own."""
        return math.prod(
            part.part_kept(min_calls)
            for part in self.parts
            if isinstance(part, Branches) or part.limit is None
        )


@dataclass(eq=False)
class Branches:
    """Chains side by side, each with what tells how many items have gone into it."""

    chains: list[tuple[Callable[[], int], Chain]] = field(default_factory=list)

    def part_kept(self, min_calls: int) -> float:
        """The part of the items that survives the chain into which it went."""
        numbers = [(number(), chain) for number, chain in self.chains]
        if not (total := sum(number for number, _ in numbers)):
            return 1.0
        return sum(number * chain.part_kept(min_calls) for number, chain in numbers) / total
