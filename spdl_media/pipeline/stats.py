"""Statistics of a running pipeline, computed from cheap counters, and their display.

They are shown as aligned text, as a rich table in a terminal, or as HTML in a notebook.
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

__all__ = ("PipelineStatistics", "SinkStatistics", "StageStatistics", "Timing")

# Quantiles cover this many last calls: enough for a p99, and recent enough to follow a change.
RECENT = 1000


_MARK = "<- bottleneck"
# Translucent, to suit both light and dark notebooks.
_MARKED = ' style="font-weight:bold;background:rgba(230,120,0,.25)" title="bottleneck"'


@dataclass(frozen=True, slots=True)
class Table:
    """A table with one row per object.

    Attributes:
        columns: By heading, the function that returns the text of an object's cell. The first column has
            names, the others numbers.
        things: The objects, one per row.
        marked: Index of the row that is marked as the bottleneck, or ``None``.
        before: Lines of text above the table.
        after: Lines of text below the table.
    """

    columns: Mapping[str, Callable[[Any], str]]
    things: Sequence[Any]
    marked: int | None = None
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    @property
    def _rows(self) -> list[list[str]]:
        """The texts of all cells, row by row."""
        return [[cell(thing) for cell in self.columns.values()] for thing in self.things]

    def text(self) -> str:
        """Return the table as plain text with aligned columns."""
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
        """Return the table as HTML that needs no style sheet."""
        rows = _html_row("th", self.columns)
        for index, row in enumerate(self._rows):
            rows += _html_row("td", row, _MARKED if index == self.marked else "")
        texts = (self.before, self.after)
        before, after = (f"<p>{'<br>'.join(map(escape, lines))}</p>" for lines in texts)
        # A table that is wider than the notebook scrolls horizontally.
        return f'{before}<div style="overflow-x:auto"><table>{rows}</table></div>{after}'

    def rich(self) -> Any:
        """Return the table as a ``rich.table.Table``.

        Raises:
            MissingPackageError: rich is not installed.
        """
        rich = require("rich-table", "A table in colour")
        # Names of stages may be any text, so rich must not read it as markup.
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
    """Base of classes that are displayed as a table, in a log, a terminal or a notebook."""

    __slots__ = ()
    _table: Callable[[], Table]

    def show(self) -> None:
        """Print the table: in colour if rich is installed and stdout is a terminal, else as plain text.

        Raises:
            OSError: stdout cannot be written.
            ValueError: stdout is closed.
        """
        printed: Callable[[object], object] = print
        if sys.stdout.isatty() and is_available("rich"):
            printed = require("rich", "A table in colour").Console().print
        printed(self)

    def __str__(self) -> str:
        return self._table().text()

    def __rich_console__(self, console: object, options: object) -> Iterator[Any]:
        yield self._table().rich()

    def _repr_html_(self) -> str:
        return self._table().html()


@dataclass(frozen=True, slots=True)
class Timing:
    """Number and durations of the calls of a stage, or of the waits in its queue.

    All values are 0 if there were none.

    Attributes:
        number: Number of calls or waits that have ended.
        average: Mean duration, in seconds.
        p90: 90% quantile of the last 1,000 durations, in seconds.
        p99: 99% quantile of the last 1,000 durations, in seconds.
        occupancy: For calls, the part of the stage's concurrency that was in use, from 0.0 to 1.0. For a
            queue, the mean number of items in it.
        rate: Number per second.
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
        concurrency: Maximum number of calls at once.
        calls: The calls, including those that failed.
        queue: The waits of items from acceptance by the stage to the start of their calls.
        failures: Number of items that failed.
        dropped: Number of items that were dropped, because their result was ``None`` or by ``drop_last``.
        outputs: Number of results that went to the next stage.
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
    """Statistics of the buffer between the pipeline and its consumer.

    Attributes:
        number: Number of items that were delivered to the buffer.
        rate: Items per second.
        occupancy: Mean number of items in the buffer when another one arrived.
        waited: Seconds for which consumers waited for items. If it is close to the elapsed time, the pipeline
            is the slow part; if it is close to 0.0, the consumer is.
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
# The consumer is the bottleneck when it waits for less than this part of the time.
_HARDLY_WAITS = 0.1
# A stage can be the bottleneck only if it is half busy, or if on average at least one item waits for it.
_HALF_BUSY, _ONE_WAITS = 0.5, 1.0


@dataclass(frozen=True, slots=True)
class PipelineStatistics(Shown):
    """Statistics of a pipeline since its start, or since the last report in case of the log.

    ``print``, ``rich.print`` and notebooks show a table in which the bottleneck is marked; :meth:`show` uses
    rich if it is installed.

    Attributes:
        elapsed: Seconds that the statistics cover.
        source_items: Number of items that the source gave.
        stages: Statistics of each stage, in order; stages of paths in the order of the paths.
        sink: Statistics of the buffer at the end.
    """

    elapsed: float
    source_items: int
    stages: tuple[StageStatistics, ...]
    sink: SinkStatistics

    @property
    def bottleneck(self) -> str | None:
        """Name of the stage that probably limits the throughput, ``"source"`` or ``"consumer"``.

        It is estimated from how busy the stages were and how many items waited for them. ``None`` if nothing
        was delivered. :func:`profile_pipeline` measures the stages one by one.
        """
        found = self._find_bottleneck()
        return self.stages[found].name if isinstance(found, int) else found

    def _find_bottleneck(self) -> int | Literal["source", "consumer"] | None:
        """Return a stage by its index, because a stage may be named "source"."""
        if not self.sink.number or not self.elapsed:
            return None
        if self.sink.waited < _HARDLY_WAITS * self.elapsed:
            return "consumer"
        # When stages share too few threads, none of them is half busy, but items wait for them.
        loaded = [
            index
            for index, stage in enumerate(self.stages)
            if stage.calls.occupancy >= _HALF_BUSY or stage.queue.occupancy >= _ONE_WAITS
        ]
        if not loaded:
            return "source"
        return max(loaded, key=lambda index: _load(self.stages[index]))

    def _table(self) -> Table:
        sink, found = self.sink, self._find_bottleneck()
        first = (
            f"{self.elapsed:.1f} s, {self.source_items} items from the source, "
            f"{sink.number} delivered ({sink.rate:.1f}/s), the consumer waited {sink.waited:.1f} s"
        )
        marked = found if isinstance(found, int) else None
        after = (f"Bottleneck: the {found}",) if isinstance(found, str) else ()
        return Table(_COLUMNS, self.stages, marked, (first,), after)


def _load(stage: StageStatistics) -> tuple[bool, float]:
    """Return the sort key of a stage: the part of its concurrency in use or, below half, the calls in use."""
    in_use = stage.calls.occupancy
    is_busy = in_use >= _HALF_BUSY
    return is_busy, in_use if is_busy else in_use * stage.concurrency


@dataclass(slots=True, eq=False)
class StageCounters:
    """Counters of one stage. Written in turns of the engine only; any thread may read them at any time.

    Attributes:
        early: Number of failures that were counted before their calls ended.
        busy: Total seconds of the calls that have ended.
        running: Total seconds so far of the calls that are running. Set by the reader.
        queued: Total seconds for which items have waited for their calls.
        durations, waits: Seconds of the last calls, and of the waits before them.
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
        """Count a call. The times are those of ``time.perf_counter``, in seconds."""
        self.calls += 1
        # The sums give means over all calls, the deques quantiles of the last ones.
        self.busy += (duration := ended_at - started_at)
        self.durations.append(duration)
        self.queued += (wait := started_at - queued_at)
        self.waits.append(wait)

    def statistics(
        self, name: str, elapsed: float, before: StageCounters | None = None
    ) -> StageStatistics:
        """Return the statistics of the ``elapsed`` seconds since ``before`` was copied, or since start."""
        before = before or StageCounters()
        # Counts only grow, so the difference is what happened in between.
        number = self.calls - before.calls
        busy = self.busy - before.busy
        queued = self.queued - before.queued
        # A long call counts in each interval in which it ran, not only in the one in which it ended. For a
        # moment, a call that has just ended is neither running nor counted: the sum may be negative.
        in_use = max(busy + self.running - before.running, 0.0) / self.concurrency
        calls = timing(number, busy, self.durations, elapsed, min(in_use, elapsed))
        # A queue has no concurrency, so its occupancy is the mean number of items in it.
        queue = timing(number, queued, self.waits, elapsed, queued)
        failures, dropped = self.failures - before.failures, self.dropped - before.dropped
        outputs = self.outputs - before.outputs
        return StageStatistics(name, self.concurrency, calls, queue, failures, dropped, outputs)

    def copy(self) -> StageCounters:
        """Return a copy of the current counts, without the durations of single calls."""
        return replace(self, durations=deque(), waits=deque())


def timing(
    number: int, total: float, recent: deque[float], elapsed: float, in_use: float
) -> Timing:
    """Return the timing of ``number`` calls in ``elapsed`` seconds.

    Args:
        number: Number of calls or waits.
        total: Sum of their durations, in seconds.
        recent: Durations of the last ones.
        elapsed: Seconds in which they happened.
        in_use: Seconds in use, to divide by ``elapsed`` for the occupancy.
    """
    # The copy is one step in C, so the engine cannot append meanwhile.
    durations = sorted(list(recent.copy())[-number:]) if number else []
    # The groups of Aggregate are counted but not timed.
    durations = durations or [0.0]
    # By nearest rank, so a quantile is always a measured value.
    p90, p99 = (durations[math.ceil(part * len(durations)) - 1] for part in (0.90, 0.99))
    average = total / number if number else 0.0
    occupancy = in_use / elapsed if elapsed else 0.0
    rate = number / elapsed if elapsed else 0.0
    return Timing(number, average, p90, p99, occupancy, rate)
