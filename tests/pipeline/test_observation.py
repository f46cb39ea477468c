"""Statistics, their reports in the log, and task hooks."""

from __future__ import annotations

import dataclasses
import logging
import multiprocessing
import re
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from effort import each
from left_behind import wait_until

from spdl_media.pipeline import PipelineBuilder, ProcessPoolExecutorConfig
from spdl_media.pipeline.executors import TaskHook
from spdl_media.pipeline.failures import PipelineFailure
from spdl_media.pipeline.pipeline import Pipeline
from spdl_media.pipeline.stats import StageCounters

WAIT = 60


def test_statistics_count_what_happened() -> None:
    def odd(item: int) -> int | None:
        if item % 10 == 0:
            raise ValueError(item)
        return item if item % 2 else None

    def twice(item: int) -> Iterator[int]:
        yield from (item, item)

    builder = PipelineBuilder().add_source(range(100)).pipe(odd, concurrency=2).pipe(twice)
    pipeline = builder.aggregate(10).build()
    assert len(list(pipeline)) == 10
    found = pipeline.statistics()
    first, second, third = found.stages

    assert found.source_items == 100
    assert (first.name, first.concurrency, second.name, third.name) == (
        "odd",
        2,
        "twice",
        "aggregate(10)",
    )
    assert (first.calls.number, first.failures, first.dropped, first.outputs) == (100, 10, 40, 50)
    assert (second.calls.number, second.outputs) == (50, 100)
    assert third.outputs == found.sink.number == 10
    assert first.calls.rate == pytest.approx(100 / found.elapsed)
    assert found.sink.rate == pytest.approx(10 / found.elapsed)
    assert re.search(r"^odd +2 +100 .* 10", str(found), re.MULTILINE)


def test_statistics_are_frozen() -> None:
    pipeline = PipelineBuilder().add_source([1]).build()
    list(pipeline)
    found = pipeline.statistics()

    assert pipeline.statistics() == found
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.elapsed = 0.0  # type: ignore[misc]


def test_quantiles_are_those_of_the_last_calls() -> None:
    counters = StageCounters(2)
    # First calls of 9 s that did not wait, then calls of 1 to 1000 ms that waited 1 s each.
    counters.count_call(0.0, 0.0, 9.0)
    for number in range(1, 1001):
        counters.count_call(0.0, 1.0, 1.0 + number / 1000)
    found = counters.statistics("stage", elapsed=1000.0)

    assert found.calls.number == 1001
    assert found.calls.average == pytest.approx((9 + 500.5) / 1001)
    assert (found.calls.p90, found.calls.p99) == pytest.approx((0.9, 0.99))
    assert found.calls.occupancy == pytest.approx((9 + 500.5) / 2000)
    assert found.calls.rate == pytest.approx(1.001)
    assert found.queue.average == pytest.approx(1000 / 1001)
    assert found.queue.occupancy == pytest.approx(1.0)


def test_statistics_of_a_time_span() -> None:
    counters = StageCounters()
    counters.count_call(0.0, 0.0, 5.0)
    before = counters.copy()
    counters.count_call(0.0, 0.0, 1.0)
    counters.failures = 1
    found = counters.statistics("stage", 2.0, before)

    assert (found.calls.number, found.calls.average, found.calls.p99) == (1, 1.0, 1.0)
    assert (found.calls.occupancy, found.failures) == (0.5, 1)


def test_statistics_of_nothing() -> None:
    found = StageCounters().statistics("stage", 0.0)

    assert dataclasses.astuple(found.calls) == (0, 0.0, 0.0, 0.0, 0.0, 0.0)


def test_the_time_that_consumers_wait_is_counted() -> None:
    gate = threading.Event()

    def slow(item: int) -> int:
        gate.wait(0.1)
        # On a busy machine, the consumer may begin to wait after that.
        while pipeline.statistics().sink.waited < 0.05:
            gate.wait(0.001)
        return item

    pipeline = PipelineBuilder().add_source([1]).pipe(slow).build()
    list(pipeline)
    found = pipeline.statistics()

    assert 0.05 < found.sink.waited <= found.elapsed
    assert found.stages[0].calls.average >= 0.09
    assert found.stages[0].calls.occupancy == pytest.approx(
        found.stages[0].calls.average / found.elapsed
    )


def test_statistics_can_be_read_while_it_runs() -> None:
    builder = PipelineBuilder().add_source(iter(int, 1)).pipe(lambda i: i, concurrency=4)
    pipeline = builder.build()
    with pipeline.auto_stop():
        numbers = []
        for number, _ in enumerate(pipeline):
            if number % 100 == 0:
                numbers.append(pipeline.statistics().stages[0].calls.number)
            if number == 2000:
                break

    assert numbers == sorted(numbers)
    assert numbers[-1] >= 2000


def test_no_reports_go_to_the_log_by_default_nor_with_minus_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="spdl_media.pipeline")
    for options in ({}, {"report_stats_interval": -1}):
        pipeline = PipelineBuilder().add_source(range(10)).build(**options)
        assert list(pipeline) == list(range(10))
    assert not caplog.records


def test_reports_go_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="spdl_media.pipeline")
    reports = threading.Semaphore(0)
    caplog.handler.addFilter(lambda _: reports.release() or True)
    builder = PipelineBuilder().add_source(range(10)).pipe(lambda i: i, name="same")
    with builder.build(report_stats_interval=0.1).auto_stop() as pipeline:
        list(pipeline)
        while reports.acquire(blocking=False):
            pass
        # The first of these may have begun before the end of the epoch.
        for _ in range(2):
            assert reports.acquire(timeout=WAIT)

    pattern = r"(\d+) items from the source, (\d+) delivered.*?^same +1 +(\d+) "
    found = re.findall(pattern, caplog.text, re.DOTALL | re.MULTILINE)
    counts = [[int(number) for number in report] for report in found]
    # Each report covers the time since the last one.
    assert [sum(column) for column in zip(*counts, strict=True)] == [10, 10, 10]
    assert counts[-1] == [0, 0, 0]


class Recorder(TaskHook):
    """Records the calls of its methods."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[tuple[Any, ...]] = []

    def stage_start(self) -> None:
        self.calls.append(("stage start",))

    def task_start(self, item: Any) -> None:
        self.calls.append(("start", item, threading.current_thread().name.split("-")[0]))

    def task_end(self, item: Any, seconds: float, error: BaseException | None) -> None:
        assert 0 <= seconds < WAIT
        self.calls.append(("end", item, error))

    def stage_end(self) -> None:
        self.calls.append(("stage end",))


def function(item: int) -> int:
    if item == 1:
        raise ValueError("one")
    return item


async def coroutine(item: int) -> int:
    return function(item)


def generator(item: int) -> Iterator[int | None]:
    yield function(item)
    yield None


async def async_generator(item: int) -> AsyncIterator[int | None]:
    yield function(item)
    yield None


def endless(item: int) -> Iterator[int]:
    try:
        while True:
            yield item
    finally:
        raise ValueError("left")


@pytest.mark.parametrize("fn", [function, coroutine, generator, async_generator, "pool"])
def test_hooks_are_called_around_each_task(fn: Any) -> None:
    hooks: dict[str, Recorder] = {}

    def make(name: str) -> Recorder:
        return hooks.setdefault(name, Recorder(name))

    with ThreadPoolExecutor(1) as executor:
        builder = PipelineBuilder().add_source(range(3))
        if fn == "pool":
            builder.pipe(function, name="it", executor=executor)
        else:
            builder.pipe(fn, name="it")
        pipeline: Pipeline[int] = builder.build(task_hook_factory=make)
        assert list(pipeline) == [0, 2]

    assert pipeline.statistics().stages[0].dropped == 2 * (fn in (generator, async_generator))
    (hook,) = hooks.values()
    where = "spdl_media worker" if fn in (function, generator) else "spdl_media pipeline 0"
    first, *calls, last = hook.calls
    assert (hook.name, first, last) == ("it", ("stage start",), ("stage end",))
    assert [call[:2] for call in calls] == [
        (what, item) for item in range(3) for what in ("start", "end")
    ]
    assert {call[2].rstrip("0123456789 ") for call in calls[::2]} == {where.rstrip("0 ")}
    errors = [call[2] for call in calls[1::2]]
    assert (errors[0], str(errors[1]), errors[2]) == (None, "one", None)


def test_the_call_of_a_generator_that_is_left_ends_before_its_stage() -> None:
    hook = Recorder("it")
    builder = PipelineBuilder().add_source([1]).pipe(endless)
    for _ in builder.build(task_hook_factory=lambda _: hook):
        break
    wait_until(lambda: len(hook.calls) == 4)
    assert [call[0] for call in hook.calls] == ["stage start", "start", "end", "stage end"]
    assert str(hook.calls[2][2]) == "left"


def test_stages_may_go_without_a_hook() -> None:
    hook = Recorder("second")
    builder = PipelineBuilder().add_source(range(2))
    builder.pipe(lambda i: i, name="first").pipe(lambda i: i, name="second").aggregate(2)
    pipeline = builder.build(task_hook_factory=lambda name: hook if name == "second" else None)

    assert list(pipeline) == [[0, 1]]
    assert len(hook.calls) == 2 + 4


def pass_on(item: int) -> int:
    return item


async def pass_on_async(item: int) -> int:
    return item


@each("fn", [pass_on, pass_on_async, "pool"])
@each("method", ["task_start", "task_end"])
@each("error", [LookupError, SystemExit])
def test_a_hook_that_raises_fails_the_item(fn: Any, method: str, error: Any) -> None:
    def refuse(item: Any, *_: object) -> None:
        if item == 1:
            raise error("no span")

    def make(_: str) -> TaskHook:
        hook = TaskHook()
        setattr(hook, method, refuse)
        return hook

    builder = PipelineBuilder().add_source(range(3))
    if fn == "pool":
        builder.pipe(abs, executor=ProcessPoolExecutorConfig(1))
    else:
        builder.pipe(fn)
    pipeline = builder.build(task_hook_factory=make)

    assert list(pipeline.get_iterator(timeout=WAIT)) == [0, 2]
    assert repr(pipeline.failures[0].exception) == f"{error.__name__}('no span')"


def test_a_hook_that_raises_at_the_start_leaves_nothing_behind() -> None:
    class Refuse(TaskHook):
        def stage_start(self) -> None:
            raise LookupError("no tracer")

    builder = PipelineBuilder().add_source(range(3)).pipe(lambda i: i)
    pipeline = builder.build(task_hook_factory=lambda _: Refuse())

    for _ in range(2):
        with pytest.raises(LookupError, match="no tracer"):
            list(pipeline)


def test_a_hook_that_raises_at_the_start_leaves_no_process() -> None:
    class Hook(TaskHook):
        ended = 0

        def __init__(self, name: str) -> None:
            self.name = name

        def stage_start(self) -> None:
            if self.name == "fails":
                raise RuntimeError("no start")

        def stage_end(self) -> None:
            Hook.ended += 1

    before = set(multiprocessing.active_children())
    builder = PipelineBuilder().add_source([1])
    builder.pipe(abs, executor=ProcessPoolExecutorConfig(1)).pipe(function, name="fails")
    with pytest.raises(RuntimeError, match="no start"):
        builder.build(task_hook_factory=Hook).start()

    for process in set(multiprocessing.active_children()) - before:
        process.join(10)
    assert set(multiprocessing.active_children()) <= before
    assert Hook.ended == 1


def test_a_factory_that_makes_something_else_is_reported() -> None:
    pipeline = PipelineBuilder().add_source([1]).pipe(function).build(task_hook_factory=len)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must return a TaskHook or None, and for stage 'function'"):
        pipeline.start()


def test_hooks_end_with_a_run_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    class Refuse(Recorder):
        def stage_end(self) -> None:
            super().stage_end()
            raise LookupError("no collector")

    hook = Refuse("it")
    builder = PipelineBuilder().add_source([1]).pipe(function)
    with pytest.raises(PipelineFailure):
        list(builder.build(task_hook_factory=lambda _: hook))

    assert hook.calls[-1] == ("stage end",)
    assert "a task hook raised at the end of its stage" in caplog.text
