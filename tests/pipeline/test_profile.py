"""The profile of a pipeline: each stage by itself at each concurrency, and the bottleneck."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from effort import several_tries
from left_behind import wait_until

from spdl_media.pipeline import (
    MissingPackageError,
    PipeConfig,
    PipelineBuilder,
    PipelineError,
    PipelineProfile,
    ProcessPoolExecutorConfig,
    StageProfile,
    Timing,
    profile_pipeline,
)

TICK = 0.03  # duration of a slow call in seconds


def wait(item: Any) -> Any:
    """Take a while without holding the GIL."""
    threading.Event().wait(TICK)
    return item


async def wait_async(item: Any) -> Any:
    await asyncio.sleep(TICK)
    return item


def pass_on(item: Any) -> Any:
    return item


def three_times(item: int) -> Iterator[int]:
    yield from [item] * 3


def fail(item: int) -> int:
    raise LookupError(f"no item {item}")


def fail_on_odd(item: int) -> int:
    if item % 2:
        raise LookupError(f"no item {item}")
    return item


async def count_to(number: int) -> AsyncIterator[int]:
    for value in range(number):
        yield value


def profile(builder: PipelineBuilder[Any], **options: Any) -> PipelineProfile:
    options = {"num_iterations": 8, "concurrencies": (1, 4), "show": False} | options
    return profile_pipeline(builder.get_config(), **options)


def source(number: int = 100) -> PipelineBuilder[Any]:
    return PipelineBuilder().add_source(range(number))


@pytest.mark.parametrize("made", [tuple, iter])
def test_each_stage_has_a_result_for_each_concurrency(made: Callable[[Any], Any]) -> None:
    builder = source().pipe(pass_on, concurrency=2).aggregate(4).pipe(wait).add_sink(2)
    result = profile(builder, concurrencies=made((1, 4)))
    assert [(one.name, one.concurrency, one.is_configured) for one in result.stages] == [
        ("source", 1, True),
        ("pass_on", 1, False),
        ("pass_on", 2, True),
        ("pass_on", 4, False),
        ("aggregate(4)", 1, True),
        ("wait", 1, True),
        ("wait", 4, False),
    ]
    assert [one.calls.number for one in result.stages] == [8, 8, 8, 8, 4 * 8, 8, 8]
    assert all(one.failures == 0 for one in result.stages)


@pytest.mark.parametrize("fn", [wait, wait_async])
@several_tries
def test_the_slowest_stage_is_the_bottleneck(fn: Any) -> None:
    result = profile(source().pipe(pass_on).pipe(fn, name="slow").pipe(pass_on, name="last"))
    assert result.bottleneck == "slow"
    one, four = result.of("slow")
    assert one.calls.average > 0.9 * TICK
    assert one.calls.p99 >= one.calls.p90 > 0.9 * TICK
    assert one.calls.rate < 1.1 / TICK
    assert one.calls.occupancy > 0.3
    assert four.calls.rate > 1.3 * one.calls.rate
    assert four.items_per_second == four.calls.rate


def test_inputs_are_counted_by_item_of_the_source() -> None:
    result = profile(
        source().pipe(three_times).pipe(pass_on).aggregate(2).pipe(pass_on).disaggregate()
    )
    shares = {one.name: one.inputs_per_item for one in result.stages}
    assert shares == pytest.approx(
        {
            "source": 1,
            "three_times": 1,
            "pass_on": 3,
            "aggregate(2)": 3,
            "pass_on_2": 1.5,
            "disaggregate": 1.5,
        }
    )
    (batches,) = (one for one in result.of("pass_on_2") if one.is_configured)
    assert batches.items_per_second == pytest.approx(batches.calls.rate / 1.5)


def test_a_stage_behind_big_groups_gets_as_many_calls() -> None:
    result = profile(source().aggregate(50, drop_last=True).pipe(pass_on))
    assert result.of("pass_on")[0].calls.number == 8
    assert result.of("pass_on")[0].inputs_per_item == pytest.approx(1 / 50)


def test_merged_pipelines_are_measured_one_by_one_and_paths_together() -> None:
    paths = [PipelineBuilder().pipe(three_times), PipelineBuilder().pipe(wait)]
    builder = (
        source(6)
        .pipe(pass_on)
        .merge(PipelineBuilder().add_source([100, 101]))
        .path_variants(lambda item: item % 2, paths, name="route")
        .pipe(pass_on)
    )
    result = profile(builder)
    shares = {one.name: one.inputs_per_item for one in result.stages}
    assert shares == pytest.approx(
        {
            "source": 6 / 8,
            "pass_on": 6 / 8,
            "source_2": 2 / 8,
            "route": 1,
            "pass_on_2": 2,
        }
    )
    (route,) = result.of("route")
    assert (route.concurrency, route.calls.number, route.failures) == (1, 8, 0)
    assert route.calls.average > 0.4 * TICK


def route(item: int) -> int:
    if item == 0:
        raise LookupError("no path for 0")
    return {1: -1, 2: 2}.get(item, item % 2)


def test_failures_of_routers_and_paths_are_counted() -> None:
    paths = [[PipeConfig(pass_on)], [PipeConfig(fail)]]
    (routed,) = profile(source(8).path_variants(route, paths)).of("route")
    assert routed.failures == 3 + 3


def test_a_source_that_can_be_iterated_once_is_sampled() -> None:
    result = profile(PipelineBuilder().add_source(iter(range(1000))).pipe(pass_on))
    assert [one.calls.number for one in result.stages] == [8, 8, 8]


def test_async_sources_are_sampled() -> None:
    result = profile(PipelineBuilder().add_source(count_to(1000)).pipe(pass_on))
    assert result.of("source")[0].calls.number == 8


def slow_source() -> Iterator[int]:
    for number in range(1000):
        yield wait(number)


def test_the_source_is_closed_by_the_thread_that_opened_it() -> None:
    class Rows:
        def __iter__(self) -> Iterator[int]:
            opener = threading.current_thread()
            try:
                yield from range(1000)
            finally:
                closed.append(threading.current_thread() is opener)

    closed: list[bool] = []
    profile_pipeline(PipelineBuilder().add_source(Rows()).get_config(), 10, show=False)
    wait_until(lambda: bool(closed))
    assert closed == [True]


@several_tries
def test_a_slow_source_is_the_bottleneck() -> None:
    result = profile(PipelineBuilder().add_source(slow_source()).pipe(pass_on))
    assert result.bottleneck == "source"
    assert 0.1 / TICK < result.of("source")[0].calls.rate < 1.1 / TICK


@several_tries
def test_the_start_of_a_run_does_not_count_for_the_source() -> None:
    result = profile(source().pipe(wait), concurrencies=())
    assert result.of("source")[0].calls.average < TICK / 5


def test_one_epoch_of_a_continuous_source_is_sampled() -> None:
    result = profile(PipelineBuilder().add_source([1, 2, 3], continuous=True).pipe(pass_on))
    assert result.of("source")[0].calls.number == 3
    assert result.of("pass_on")[0].calls.number == 8


@several_tries
def test_processes_are_measured_without_their_start() -> None:
    executor = ProcessPoolExecutorConfig(1)
    result = profile(source().pipe(abs, executor=executor), concurrencies=())
    (one,) = result.of("abs")
    assert one.calls.number == 8
    assert one.calls.average < 0.05  # starting takes longer


def test_failures_are_counted() -> None:
    result = profile(source().pipe(fail_on_odd).pipe(pass_on), concurrencies=[1])
    # One call is a warm-up, so the timed calls begin with item 1.
    assert result.of("fail_on_odd")[0].failures == 4
    assert result.of("pass_on")[0].inputs_per_item == pytest.approx(4 / 8)


@pytest.mark.parametrize(
    ("builder", "message"),
    [
        (source().pipe(fail), r"All inputs of stage 'fail' failed.*LookupError\('no item 0'\)"),
        (
            source(1).path_variants(route, [[], []]),
            r"All inputs of stage 'route' failed.*LookupError\('no path for 0'\)",
        ),
        (source(0).pipe(pass_on), r"The source range of 0 gave no items"),
        (
            source().pipe(lambda item: None, name="drop").pipe(pass_on),
            r"Stage 'drop' gave nothing for 8 inputs",
        ),
    ],
)
def test_stages_without_inputs_are_reported(builder: PipelineBuilder[Any], message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        profile(builder)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_iterations": 0}, ValueError, "num_iterations must be at least 1, not 0"),
        ({"concurrencies": (1, 0)}, ValueError, "Each of concurrencies must be at least 1, not 0"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        profile(source().pipe(pass_on), **options)


def test_a_builder_is_not_a_definition() -> None:
    with pytest.raises(
        TypeError, match=r"must be a PipelineConfig, not PipelineBuilder.*get_config"
    ):
        profile_pipeline(source())  # type: ignore[arg-type]


def test_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    result = profile_pipeline(source().pipe(wait).get_config(), num_iterations=5)
    printed = capsys.readouterr().out
    assert printed == f"{result}\n"
    assert "Bottleneck: wait, which keeps up with" in printed
    assert printed.splitlines()[0].split() == [
        *("stage", "concurrency", "items/s", "calls/s", "mean", "ms", "p90", "ms", "p99", "ms"),
        *("busy", "failed"),
    ]


def made_up() -> PipelineProfile:
    def stage(name: str, concurrency: int, rate: float, *, is_configured: bool) -> StageProfile:
        calls = Timing(number=10, average=0.5, p90=0.6, p99=0.75, occupancy=0.25, rate=rate)
        return StageProfile(name, concurrency, is_configured, 0.5, calls, failures=1)

    stages = (
        stage("load", 1, 2.0, is_configured=True),
        stage("load", 8, 9.0, is_configured=False),
        stage("batch", 1, 5.0, is_configured=True),
    )
    return PipelineProfile(stages)


def test_a_table_reads_well() -> None:
    assert str(made_up()).splitlines() == [
        "stage  concurrency  items/s  calls/s  mean ms   p90 ms   p99 ms  busy  failed",
        "load           1 *      4.0      2.0  500.000  600.000  750.000   25%       1  <- bottleneck",
        "load           8       18.0      9.0  500.000  600.000  750.000   25%       1",
        "batch          1 *     10.0      5.0  500.000  600.000  750.000   25%       1",
        "* as configured",
        "",
        "Bottleneck: load, which keeps up with 4.0 items of the source a second at concurrency=1.",
        "It was fastest at concurrency=8: 18.0 items a second.",
    ]


def test_a_plot_without_matplotlib_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(MissingPackageError, match=r"A plot of a profile needs matplotlib, .*: pip"):
        made_up().plot()


def test_a_plot_is_saved(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    profile(source().pipe(wait)).plot(tmp_path / "profile.svg")
    drawing = (tmp_path / "profile.svg").read_text()
    assert drawing.count("wait (bottleneck)") == 1


def test_a_plot_of_a_result_has_a_line_for_each_stage(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = made_up().plot(tmp_path / "profile.pdf")
    (axes,) = figure.axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}
    assert lines == {"load (bottleneck)": [[1, 4], [8, 18]], "batch": [[1, 10]]}
    assert (tmp_path / "profile.pdf").read_bytes().startswith(b"%PDF")
    assert made_up().plot().axes
