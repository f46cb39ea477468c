"""What a running pipeline tells of itself: frozen values, made of counters that cost little to keep."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ("PipelineStatistics", "SinkStatistics", "StageStatistics", "Timing")

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
    """What one stage has done in the time that the statistics are of.

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


@dataclass(frozen=True, slots=True)
class PipelineStatistics:
    """What a pipeline has done since it started; in the log, since the report before.

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

    def __str__(self) -> str:
        first = (
            f"{self.elapsed:.1f} s, {self.source_items} items from the source, "
            f"{self.sink.number} delivered ({self.sink.rate:.1f}/s), "
            f"the consumer waited {self.sink.waited:.1f} s"
        )
        lines = [
            f"  {stage.name}: {stage.calls.number} calls ({stage.calls.rate:.1f}/s), "
            f"average {stage.calls.average * 1e3:.2f} ms, p90 {stage.calls.p90 * 1e3:.2f} ms, "
            f"p99 {stage.calls.p99 * 1e3:.2f} ms, busy {stage.calls.occupancy:.0%} of "
            f"{stage.concurrency}, queued {stage.queue.average * 1e3:.2f} ms, "
            f"{stage.failures} failed"
            for stage in self.stages
        ]
        return "\n".join([first, *lines])


class StageCounters:
    """What the event loop counts of one stage. Other threads may read it at any time."""

    __slots__ = (
        "busy",
        "calls",
        "concurrency",
        "dropped",
        "durations",
        "failures",
        "outputs",
        "queued",
        "waits",
    )

    def __init__(self, concurrency: int = 1) -> None:
        self.concurrency = concurrency
        self.calls = self.failures = self.dropped = self.outputs = 0
        self.busy = self.queued = 0.0
        self.durations: deque[float] = deque(maxlen=RECENT)
        self.waits: deque[float] = deque(maxlen=RECENT)

    def count_call(self, queued_at: float, started_at: float, ended_at: float) -> None:
        """One more call, by the times of ``time.perf_counter`` at which the item went through."""
        self.calls += 1
        self.busy += (duration := ended_at - started_at)
        self.durations.append(duration)
        self.queued += (wait := started_at - queued_at)
        self.waits.append(wait)

    def statistics(
        self, name: str, elapsed: float, before: StageCounters | None = None
    ) -> StageStatistics:
        """What was counted in the ``elapsed`` seconds since ``before`` was copied, or in all."""
        before = before or StageCounters()
        number = self.calls - before.calls
        return StageStatistics(
            name=name,
            concurrency=self.concurrency,
            calls=_timing(
                number, self.busy - before.busy, self.durations, elapsed, self.concurrency
            ),
            queue=_timing(number, self.queued - before.queued, self.waits, elapsed, 1),
            failures=self.failures - before.failures,
            dropped=self.dropped - before.dropped,
            outputs=self.outputs - before.outputs,
        )

    def copy(self) -> StageCounters:
        """The counts of this moment, without the durations of single calls."""
        other = StageCounters(self.concurrency)
        for name in ("calls", "failures", "dropped", "outputs", "busy", "queued"):
            setattr(other, name, getattr(self, name))
        return other


def _timing(
    number: int, total: float, recent: deque[float], elapsed: float, concurrency: int
) -> Timing:
    # The copy is one step of C: the loop cannot append meanwhile.
    durations = sorted(list(recent.copy())[-number:]) if number else []
    return Timing(
        number=number,
        average=total / number if number else 0.0,
        p90=_quantile(durations, 0.90),
        p99=_quantile(durations, 0.99),
        occupancy=total / elapsed / concurrency if elapsed else 0.0,
        rate=number / elapsed if elapsed else 0.0,
    )


def _quantile(ordered: Sequence[float], part: float) -> float:
    """The smallest value that ``part`` of all values do not exceed."""
    return ordered[math.ceil(part * len(ordered)) - 1] if ordered else 0.0
