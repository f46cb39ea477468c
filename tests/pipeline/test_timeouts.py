"""Timeouts of stages."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from effort import several_tries

from spdl_media.pipeline import FailureRecord, PipelineBuilder, ThreadPoolExecutorConfig
from spdl_media.pipeline.engine import nodes, workers
from spdl_media.pipeline.failures import PipelineFailure

WAIT = 60


class Gate(threading.Event):
    """An event for which slow calls wait. The time of calls in threads passes only in these waits.

    On a busy machine, quick calls would take longer than their timeouts, too.
    """

    now = 1.0

    def wait(self, timeout: float | None = None) -> bool:
        self.now += timeout or 0.0
        return super().wait(timeout)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Replace the clock of calls in threads. The gate is set at the end, so that slow calls end."""
    gate = Gate()
    for module in (nodes, workers):
        monkeypatch.setattr(module, "perf_counter", lambda: gate.now)
    yield gate
    gate.set()


@pytest.mark.parametrize("executor", [None, ThreadPoolExecutorConfig(1)])
@pytest.mark.parametrize("kind", ["function", "generator"])
def test_a_slow_call_fails_and_its_thread_is_replaced(
    gate: Gate, caplog: pytest.LogCaptureFixture, executor: Any, kind: str
) -> None:
    names: dict[int, str] = {}

    def call(item: int) -> int:
        names[item] = threading.current_thread().name
        if item == 2:
            gate.wait(WAIT)
        return item

    def generate(item: int) -> Iterator[int]:
        yield call(item)

    fn: Any = call if kind == "function" else generate
    builder = PipelineBuilder().add_source(range(6))
    builder.pipe(fn, name="slow", timeout=0.05, executor=executor, output_order="input")
    pipeline = builder.build(num_threads=1)

    assert list(pipeline) == [0, 1, 3, 4, 5]
    (record,) = pipeline.failures
    assert (record.stage, record.input) == ("slow", "2")
    assert isinstance(record.exception, TimeoutError)
    assert "longer than timeout=0.05 s" in str(record.exception)
    assert names[3] != names[2]
    assert f"thread {names[2]} is replaced" in caplog.text
    assert "took longer than timeout=0.05 s on 2" in caplog.text
    gate.set()
    (thread,) = [one for one in threading.enumerate() if one.name == names[2]]
    thread.join(15)
    assert not thread.is_alive()


def test_a_call_that_comes_back_late_changes_nothing(gate: Gate) -> None:
    late = threading.Event()

    def call(item: int) -> int:
        if item == 0:
            gate.wait(WAIT)
            late.set()
        elif item == 1:
            gate.set()
            assert late.wait(WAIT)
        return item

    pipeline = PipelineBuilder().add_source(range(3)).pipe(call, timeout=0.1).build(num_threads=1)

    assert list(pipeline) == [1, 2]
    assert pipeline.statistics().stages[0].calls.number == 3


def test_a_generator_that_continues_late_is_closed_and_its_values_are_dropped(
    gate: Gate,
) -> None:
    """Also while ``on_failure`` runs and the item has not left its stage."""
    closed = threading.Event()
    made = []

    def generate(item: int) -> Iterator[tuple[int, int]]:
        try:
            for value in range(4):
                if (item, value) == (1, 1):
                    gate.wait(WAIT)
                made.append((item, value))
                yield item, value
        finally:
            if item == 1:
                closed.set()

    def let_it_go_on(_: object, item: int) -> None:
        assert item == 1
        gate.set()
        assert closed.wait(WAIT)

    builder = PipelineBuilder().add_source(range(3)).pipe(generate, timeout=0.2)
    pipeline = builder.build(num_threads=1, on_failure=let_it_go_on)

    seen = list(pipeline)
    assert [one for one in seen if one[0] == 1] == [(1, 0)]
    assert len(seen) == 4 + 1 + 4
    assert [one for one in made if one[0] == 1] == [(1, 0), (1, 1)]
    assert pipeline.failure_counts == {"generate": 1}


def test_on_failure_gets_the_record_that_was_counted(gate: Gate) -> None:
    """The overdue call raises its own error while its timeout waits for ``on_failure``."""
    slow_threads = []
    is_next = threading.Event()
    told = []

    def call(item: str) -> str:
        if item == "quick":
            raise ValueError("quick")
        if item == "slow":
            slow_threads.append(threading.current_thread())
            gate.wait(WAIT)
            raise ValueError("late")
        is_next.set()
        return item

    def tell(record: FailureRecord, item: str) -> None:
        if item == "quick":
            assert is_next.wait(WAIT)
            gate.set()
            slow_threads[0].join(WAIT)
        told.append(record)

    builder = PipelineBuilder().add_source(["quick", "slow", "next"])
    # One thread, and room for one item besides the two that failed.
    builder.pipe(call, timeout=0.2, concurrency=2, executor=ThreadPoolExecutorConfig(1))
    pipeline = builder.build(max_failures=2, on_failure=tell)

    assert list(pipeline) == ["next"]
    assert [type(record.exception) for record in told] == [ValueError, TimeoutError]
    assert tuple(told) == pipeline.failures


def test_quick_calls_of_a_stage_with_a_timeout_are_left_alone() -> None:
    builder = PipelineBuilder().add_source(range(500))
    builder.pipe(lambda i: i, timeout=10, concurrency=3, output_order="input")

    assert list(builder.build()) == list(range(500))


def test_all_calls_that_are_slow_at_once_fail(gate: Gate) -> None:
    together = threading.Barrier(4)

    def call(item: int) -> int:
        if item < 4:
            together.wait(WAIT)
            gate.wait(WAIT)
        return item

    builder = PipelineBuilder().add_source(range(10)).pipe(call, concurrency=4, timeout=0.05)

    assert sorted(builder.build(num_threads=4)) == list(range(4, 10))


def test_time_in_the_queue_does_not_count(gate: Gate) -> None:
    def call(item: int) -> int:
        gate.wait(0.05)
        return item

    builder = PipelineBuilder().add_source(range(8)).pipe(call, timeout=0.25)

    assert list(builder.build(num_threads=1)) == list(range(8))


@pytest.mark.parametrize("kind", ["function", "generator"])
def test_a_slow_coroutine_is_cancelled(kind: str) -> None:
    cancelled = []

    async def call(item: int) -> int:
        if item == 2:
            try:
                await asyncio.sleep(WAIT)
            except asyncio.CancelledError:
                cancelled.append(item)
                raise
        return item

    async def generate(item: int) -> AsyncIterator[int]:
        yield 10 * item
        yield 10 * item + await call(item)

    fn: Any = call if kind == "function" else generate
    builder = PipelineBuilder().add_source(range(4))
    pipeline = builder.pipe(fn, name="slow", timeout=0.05, output_order="input").build()

    assert list(pipeline) == ([0, 1, 3] if kind == "function" else [0, 0, 10, 11, 20, 30, 33])
    assert cancelled == [2]
    (record,) = pipeline.failures
    assert "longer than timeout=0.05 s" in str(record.exception)


def test_a_generator_has_the_time_for_each_value_and_not_while_it_is_paused() -> None:
    async def generate(_: int) -> AsyncIterator[int]:
        for value in range(200):
            yield value

    pipeline = PipelineBuilder().add_source([0]).pipe(generate, timeout=0.2).add_sink(1).build()
    pause = threading.Event()
    with pipeline.auto_stop():
        assert pipeline.get_item() == 0
        pause.wait(0.3)
        assert list(pipeline) == list(range(1, 200))


@pytest.mark.parametrize("kind", ["own", "raised"])
def test_errors_of_the_callers_stay_as_they_are(kind: str) -> None:
    async def call(item: int) -> int:
        if item == 1:
            if kind == "raised":
                raise TimeoutError("of the server")
            raise asyncio.CancelledError("by the client")
        return item

    pipeline = PipelineBuilder().add_source(range(4)).pipe(call, timeout=5).build()

    assert list(pipeline) == [0, 2, 3]
    assert str(pipeline.failures[0].exception) in ("of the server", "by the client")


@several_tries
def test_a_slow_call_of_the_callers_executor() -> None:
    gate = threading.Event()

    def call(item: int) -> int:
        if item == 1:
            gate.wait(WAIT)
        return item

    with ThreadPoolExecutor(2) as executor:
        builder = PipelineBuilder().add_source(range(4))
        builder.pipe(call, executor=executor, timeout=0.5, output_order="input")
        pipeline = builder.build()
        found = list(pipeline)
        gate.set()
    assert found == [0, 2, 3]
    assert "longer than timeout=0.5 s" in str(pipeline.failures[0].exception)


def test_timeouts_count_as_failures(gate: Gate) -> None:
    pipeline = (
        PipelineBuilder().add_source([1]).pipe(lambda _: gate.wait(WAIT), timeout=0.02).build()
    )

    with pytest.raises(PipelineFailure, match="TimeoutError: the call took longer than"):
        list(pipeline)
