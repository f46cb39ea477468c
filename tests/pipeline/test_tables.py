"""Statistics as tables: the bottleneck, and the display as text, in terminals and in notebooks."""

from __future__ import annotations

import io
import os
import pickle
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from effort import each, several_tries

from spdl_media.pipeline import (
    PipelineBuilder,
    PipelineStatistics,
    SinkStatistics,
    StageStatistics,
    Timing,
)

NAME = "a <b>bold</b> [red]name"


def stage(name: str, busy: float, waiting: float = 0.0, concurrency: int = 2) -> StageStatistics:
    calls = Timing(100, 0.5, 0.6, 0.75, busy, 10.0)
    queue = Timing(100, 0.001, 0.002, 0.003, waiting, 10.0)
    return StageStatistics(name, concurrency, calls, queue, failures=3, dropped=0, outputs=97)


def made_up(*stages: StageStatistics, waited: float = 9.0, number: int = 97) -> PipelineStatistics:
    return PipelineStatistics(10.0, 100, stages, SinkStatistics(number, 9.7, 0.0, waited))


@each(
    "statistics, bottleneck",
    [
        (made_up(stage("one", 0.6), stage("two", 0.9)), "two"),
        (made_up(stage("one", 0.9), stage("two", 0.6, waiting=3)), "one"),
        # Eight calls may run at once, but there are only two threads.
        (made_up(stage("one", 0.05, 7, 8), stage("two", 0.2, 4, 8)), "two"),
        (made_up(stage("one", 0.1, 0.3), stage("two", 0.2)), "source"),
        (made_up(), "source"),
        (made_up(stage("one", 0.9), waited=0.9), "consumer"),
        (made_up(stage("one", 0.9), number=0), None),
    ],
)
def test_the_bottleneck(statistics: PipelineStatistics, bottleneck: str | None) -> None:
    assert statistics.bottleneck == bottleneck


def test_text_has_a_row_for_each_stage_and_marks_the_bottleneck() -> None:
    text = str(made_up(stage("load", 0.9), stage("aggregate(32)", 0.01)))
    first, head, load, aggregate = text.splitlines()
    assert first == (
        "10.0 s, 100 items from the source, 97 delivered (9.7/s), the consumer waited 9.0 s"
    )
    columns = "concurrency  calls  calls/s  mean ms  p90 ms  p99 ms  busy  queued ms  failed"
    numbers = "          2    100     10.0   500.00  600.00  750.00   {}%       1.00       3"
    assert head == f"stage          {columns}"
    assert load == f"load           {numbers.format(90)}  <- bottleneck"
    assert aggregate == f"aggregate(32)  {numbers.format(' 1')}"
    assert str(made_up(waited=0)).splitlines()[-1] == "Bottleneck: the consumer"
    *_, row, last = str(made_up(stage("consumer", 0.9), waited=0)).splitlines()
    assert row.endswith("3")
    assert last == "Bottleneck: the consumer"


def test_statistics_can_be_sent_to_another_process() -> None:
    statistics = made_up(stage("load", 0.9))
    assert pickle.loads(pickle.dumps(statistics)) == statistics


def test_html_marks_the_row_and_holds_names_as_text() -> None:
    html = made_up(stage("first", 0.1), stage(NAME, 0.9))._repr_html_()
    assert html.count("<tr") == 3
    rows = html.split("<tr")[2:]
    assert ["bottleneck" in row for row in rows] == [False, True]
    assert "a &lt;b&gt;bold&lt;/b&gt; [red]name" in rows[1]


def test_rich_prints_names_as_they_are() -> None:
    console = pytest.importorskip("rich.console").Console(
        file=io.StringIO(), width=140, force_terminal=True, no_color=False
    )
    console.print(made_up(stage("first", 0.1), stage(NAME, 0.9)))
    (row,) = (line for line in console.file.getvalue().splitlines() if NAME in line)
    assert "\x1b[1;33m" in row
    assert "90%" in row


def rest_of(master: int) -> str:
    """Return what was written to a pseudo-terminal whose other end is closed, and close this end."""
    # One read may return a part: the kernel moves the bytes from end to end in the background.
    parts = []
    with suppress(OSError):  # Linux ends such a file with EIO
        while part := os.read(master, 65536):
            parts.append(part)
    os.close(master)
    return b"".join(parts).decode()


@pytest.mark.parametrize("has_rich", [True, False])
def test_show_takes_rich_in_a_terminal(
    has_rich: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    if has_rich:
        pytest.importorskip("rich")
    else:
        for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "rich", None)
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "140"}.items():
        monkeypatch.setenv(name, value)
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    statistics = made_up(stage("load", 0.9))

    master, slave = os.openpty()
    with monkeypatch.context() as patch, open(slave, "w", encoding="utf-8") as terminal:
        patch.setattr(sys, "stdout", terminal)
        statistics.show()
    shown = rest_of(master)
    assert "load" in shown
    assert ("\x1b[" in shown) is has_rich
    assert ("<- bottleneck" in shown) is not has_rich

    with (
        monkeypatch.context() as patch,
        open(tmp_path / "log", "w+", encoding="utf-8") as file,
    ):
        patch.setattr(sys, "stdout", file)
        statistics.show()
        file.seek(0)
        assert file.read() == f"{statistics}\n"


@several_tries
def test_a_slow_consumer_and_a_slow_stage_are_told_apart() -> None:
    pause = threading.Event()

    def slow(item: int) -> int:
        pause.wait(0.01)
        return item

    def run(consumer_waits: float, **options: Any) -> PipelineStatistics:
        builder = PipelineBuilder().add_source(range(20)).pipe(slow, concurrency=4, **options)
        pipeline = builder.build(num_threads=4)
        with pipeline.auto_stop():
            for _ in pipeline:
                pause.wait(consumer_waits)
            return pipeline.statistics()

    assert run(0.05).bottleneck == "consumer"
    assert run(0).bottleneck == "slow"
