"""Statistics of a running pipeline, made of counters that cost little to keep, and how they are shown.

People read them as aligned text, as a table of rich in a terminal, or as HTML in a notebook.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import Any, Literal

from spdl_media._optional import is_available, require

__all__ = (
    "PipelineStatistics",
    "SinkStatistics",
    "StageStatistics",
    "Timing",
)

# Quantiles are those of the last calls: enough for a p99, and recent enough to follow a change.
RECENT = 1000


_MARK = "<- bottleneck"
# Translucent, so that it suits light and dark notebooks, whose own styles do the rest.
_MARKED = ' style="font-weight:bold;background:rgba(230,120,0,.25)" title="bottleneck"'


@dataclass(frozen=True, slots=True)
class Table:
    """A table with a row for each of several things.

    Attributes:
        columns: What makes the text of each column, by heading. The first has names, the others numbers.
        things: What the rows are of.
        marked: Index of the row of the bottleneck, if it has one.
        before: Lines above the table.
        after: Lines below it.
    """

    columns: Mapping[str, Callable[[Any], str]]
    things: Sequence[Any]
    marked: int | None = None
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    @property
    def _rows(self) -> list[list[str]]:
        """The text of all cells, row by row."""
        return [[cell(thing) for cell in self.columns.values()] for thing in self.things]

    def text(self) -> str:
        """The table as lines of aligned columns."""
        if not self.things:
            return "\n".join([*self.before, *self.after])
        lines = [[*self.columns], *self._rows]
        first, *widths = (max(map(len, column)) for column in zip(*lines, strict=True))
        aligned = [
            "  ".join([row[0].ljust(first), *map(str.rjust, row[1:], widths)]) for row in lines
        ]
        if self.marked is not None:
            aligned[self.marked + 1] += f"  {_MARK}"
        return "\n".join([*self.before, *aligned, *self.after])

    def html(self) -> str:
        """The table as HTML that needs no style sheet."""
        rows = _html_row("th", self.columns)
        for index, row in enumerate(self._rows):
            rows += _html_row("td", row, _MARKED if index == self.marked else "")
        texts = (self.before, self.after)
        before, after = (f"<p>{'<br>'.join(map(escape, lines))}</p>" for lines in texts)
        # A table that is wider than its place scrolls by itself.
        return f'{before}<div style="overflow-x:auto"><table>{rows}</table></div>{after}'

    def rich(self) -> Any:
        """The table as something that rich prints.

        Raises:
            MissingPackageError: rich is not installed.
        """
        rich = require("rich-table", "A table in colour")
        # Names of stages are any text, so none of it is markup.
        plain = rich.Text
        title, caption = (plain("\n".join(lines)) for lines in (self.before, self.after))
        left = {"title_justify": "left", "caption_justify": "left"}
        table = rich.Table(title=title, caption=caption, **left)
        for number, column in enumerate(self.columns):
            table.add_column(plain(column), justify="right" if number else "left")
        for index, row in enumerate(self._rows):
            table.add_row(*map(plain, row), style="bold yellow" if index == self.marked else None)
        return table


def _html_row(tag: str, cells: Iterable[str], style: str = "") -> str:
    return f"<tr{style}>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"


class Shown:
    """Base of what shows itself as a table: in a log, a terminal and a notebook."""

    __slots__ = ()

    def _tables(self) -> tuple[Table, ...]:
        raise NotImplementedError

    def show(self) -> None:
        """Print the table: in colour if rich is installed and this is a terminal, else as plain text."""
        printed: Callable[[object], object] = print
        if sys.stdout.isatty() and is_available("rich"):
            printed = require("rich", "A table in colour").Console().print
        printed(self)

    def __str__(self) -> str:
        return "\n".join(table.text() for table in self._tables())

    def __rich_console__(self, console: object, options: object) -> Iterator[Any]:
        return map(Table.rich, self._tables())

    def _repr_html_(self) -> str:
        return "".join(table.html() for table in self._tables())


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
        return self.stages[found].name if isinstance(found, int) else found

    def _find_bottleneck(self) -> int | Literal["source", "consumer"] | None:
        """A stage is told by its index, for one of them may be called "source"."""
        if not self.sink.number or not self.elapsed:
            return None
        if self.sink.waited < _HARDLY_WAITS * self.elapsed:
            return "consumer"
        # Of stages that share too few threads none is half busy, but items wait for them.
        loaded = [
            index
            for index, stage in enumerate(self.stages)
            if stage.calls.occupancy >= _HALF_BUSY or stage.queue.occupancy >= _ONE_WAITS
        ]
        if not loaded:
            return "source"
        slowest: int = max(loaded, key=lambda index: _load(self.stages[index]))
        return slowest

    def _tables(self) -> tuple[Table, ...]:
        sink, found = self.sink, self._find_bottleneck()
        first = (
            f"{self.elapsed:.1f} s, {self.source_items} items from the source, "
            f"{sink.number} delivered ({sink.rate:.1f}/s), the consumer waited {sink.waited:.1f} s"
        )
        marked = found if isinstance(found, int) else None
        after = (f"Bottleneck: the {found}",) if isinstance(found, str) else ()
        return (Table(_COLUMNS, self.stages, marked, (first,), after),)


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
        running: Seconds so far of calls that have not. Set by the reader.
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
            calls=timing(
                number,
                busy,
                self.durations,
                elapsed,
                min(max(in_use, 0.0) / self.concurrency, elapsed),
            ),
            # Waiting has no concurrency, so this occupancy is a mean number of items.
            queue=timing(number, queued, self.waits, elapsed, queued),
            failures=self.failures - before.failures,
            dropped=self.dropped - before.dropped,
            outputs=self.outputs - before.outputs,
        )

    def copy(self) -> StageCounters:
        """The counts of this moment, without the durations of single calls."""
        return replace(self, durations=deque(), waits=deque())


def timing(
    number: int, total: float, recent: deque[float], elapsed: float, in_use: float
) -> Timing:
    """Sum up what happened ``number`` times in ``elapsed`` seconds, of which ``recent`` are the last."""
    # The copy is one step of C: the loop cannot append meanwhile.
    durations = sorted(list(recent.copy())[-number:]) if number else []
    # Groups are counted and not timed.
    durations = durations or [0.0]
    # The nearest rank, so a quantile is a value that was measured.
    p90, p99 = (durations[math.ceil(part * len(durations)) - 1] for part in (0.90, 0.99))
    return Timing(
        number=number,
        average=total / number if number else 0.0,
        p90=p90,
        p99=p99,
        occupancy=in_use / elapsed if elapsed else 0.0,
        rate=number / elapsed if elapsed else 0.0,
    )
