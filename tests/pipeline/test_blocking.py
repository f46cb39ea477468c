"""Calls that block: stop() returns anyway, and the log names them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from left_behind import wait_until

from spdl_media.pipeline import PipelineBuilder, PipelineFailure
from spdl_media.pipeline.engine import graph


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """An event for which blocked calls wait. It is set at the end, so that their threads end."""
    event = threading.Event()
    yield event
    event.set()


def test_stop_returns_while_a_stage_blocks(
    gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    inside = threading.Event()

    def block(item: str) -> str:
        inside.set()
        gate.wait(20)
        return item

    pipeline = PipelineBuilder().add_source(["the input"]).pipe(block).build()
    pipeline.start()
    assert inside.wait(10)
    begin = time.monotonic()
    pipeline.stop()

    assert time.monotonic() - begin < 15
    (record,) = [one for one in caplog.records if one.name == "spdl_media.pipeline"]
    assert "block has run for" in record.getMessage()
    assert "on 'the input' in thread spdl_media worker-1" in record.getMessage()
    (thread,) = [one for one in threading.enumerate() if one.name == "spdl_media worker-1"]
    assert thread.daemon
    gate.set()
    thread.join(15)
    assert not thread.is_alive()


def test_stop_returns_while_the_source_blocks(
    gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    inside = threading.Event()

    def source() -> Iterator[int]:
        yield 1
        inside.set()
        gate.wait(20)

    pipeline = PipelineBuilder().add_source(source()).build()
    pipeline.start()
    assert pipeline.get_item() == 1
    assert inside.wait(10)
    begin = time.monotonic()
    pipeline.stop()

    assert time.monotonic() - begin < 15
    assert "source has run for" in caplog.text
    assert "in thread spdl_media source source" in caplog.text


@pytest.mark.usefixtures("loop_may_block")
def test_stop_returns_while_a_coroutine_blocks_the_loop(
    gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    inside = threading.Event()

    async def block(item: int) -> int:
        inside.set()
        gate.wait(20)  # noqa: ASYNC251, RUF100  # the mistake in question
        return item

    pipeline = PipelineBuilder().add_source([5]).pipe(block).build()
    pipeline.start()
    assert inside.wait(10)
    begin = time.monotonic()
    pipeline.stop()

    assert time.monotonic() - begin < 15
    assert "block has run for" in caplog.text


def test_stop_returns_while_a_coroutine_ignores_that_it_is_cancelled(
    gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    inside = threading.Event()

    async def ignore(item: int) -> int:
        inside.set()
        while not gate.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)
        return item

    pipeline = PipelineBuilder().add_source([5]).pipe(ignore).build()
    pipeline.start()
    assert inside.wait(10)
    begin = time.monotonic()
    pipeline.stop()

    assert time.monotonic() - begin < 15
    assert "ignore has run for" in caplog.text
    assert "on 5. Threads spdl_media pipeline" in caplog.text


def test_a_source_that_blocks_does_not_stall_what_it_gave(gate: threading.Event) -> None:
    def source() -> Iterator[int]:
        yield from range(5)
        gate.wait(20)
        yield 5

    pipeline = PipelineBuilder().add_source(source()).pipe(lambda i: i).build()
    with pipeline.auto_stop():
        assert [pipeline.get_item(timeout=10) for _ in range(5)] == [0, 1, 2, 3, 4]
        gate.set()
        assert list(pipeline) == [5]


@pytest.mark.parametrize("waiting", [True, False])
def test_the_log_says_what_runs_when_nothing_is_delivered(
    gate: threading.Event,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    waiting: bool,
) -> None:
    monkeypatch.setattr(graph, "SILENCE", 0.05)
    told, runs = threading.Event(), threading.Event()
    caplog.handler.addFilter(lambda record: told.set() or True)
    look = graph.Graph.look_out
    # On a busy machine, the call may not have begun by then.
    monkeypatch.setattr(graph.Graph, "look_out", lambda one: look(one) if runs.is_set() else 0.01)

    def block(item: str) -> str:
        runs.set()
        gate.wait(20)
        return item

    pipeline = PipelineBuilder().add_source(["slow one"]).pipe(block).build()
    with pipeline.auto_stop():
        if waiting:
            with pytest.raises(TimeoutError):
                pipeline.get_item(timeout=0.3)
        assert told.wait(10)
        # On a busy machine, what follows may take as long as the silence.
        monkeypatch.setattr(graph, "SILENCE", 60.0)
        gate.set()
        assert list(pipeline) == ["slow one"]

    lines = [one.getMessage() for one in caplog.records if one.name == "spdl_media.pipeline"]
    assert len(lines) == 1
    assert "has delivered nothing for" in lines[0]
    assert "block has run for" in lines[0]
    assert "on 'slow one' in thread spdl_media worker-1" in lines[0]


def test_the_log_says_nothing_of_a_consumer_that_takes_its_time(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph, "SILENCE", 0.02)
    caplog.set_level(logging.INFO)
    looked = threading.Semaphore(0)
    look = graph.Graph.look_out

    def counted(self: graph.Graph) -> float:
        result = look(self)
        looked.release()
        return result

    def look_three_times() -> None:
        # Without earlier looks. The first of these may have begun before, while the consumer waited.
        while looked.acquire(blocking=False):
            pass
        assert looked.acquire(timeout=10)
        caplog.clear()
        for _ in range(3):
            assert looked.acquire(timeout=10)
        assert [one for one in caplog.records if one.name == "spdl_media.pipeline"] == []

    monkeypatch.setattr(graph.Graph, "look_out", counted)
    pipeline = PipelineBuilder().add_source(range(3)).build()
    with pipeline.auto_stop():
        pipeline.get_item()
        while pipeline.statistics().sink.number < 2:
            assert looked.acquire(timeout=10)
        look_three_times()
        assert len(list(pipeline)) == 2
        look_three_times()


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [one.getMessage() for one in caplog.records if one.name == "spdl_media.pipeline"]
    return [line for line in lines if not line.startswith(("first failure", "failures of"))]


def test_a_thread_of_to_thread_that_blocks_is_named(
    gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    inside = threading.Event()

    def block() -> None:
        inside.set()
        gate.wait(20)

    async def call(item: int) -> int:
        await asyncio.to_thread(block)
        return item

    pipeline = PipelineBuilder().add_source([5]).pipe(call).build()
    pipeline.start()
    assert inside.wait(10)
    pipeline.stop()

    (line,) = lines_of(caplog)
    assert "Threads spdl_media to_thread-1 are daemons" in line


def test_an_on_failure_that_blocks_is_reported_with_its_input(
    gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    inside = threading.Event()

    def fail(item: str) -> None:
        raise ValueError(item)

    def block(*_: object) -> None:
        inside.set()
        gate.wait(20)

    pipeline = PipelineBuilder().add_source(["bad one"]).pipe(fail).build(on_failure=block)
    pipeline.start()
    assert inside.wait(10)
    pipeline.stop()

    (line,) = lines_of(caplog)
    assert "on 'bad one' in thread spdl_media on_failure-1" in line


def test_of_many_threads_that_block_some_are_named(
    gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    inside = threading.Semaphore(0)

    def block(_: int) -> None:
        inside.release()
        gate.wait(20)

    pipeline = PipelineBuilder().add_source(range(12)).pipe(block, concurrency=12)
    with pipeline.build(num_threads=12).auto_stop():
        for _ in range(12):
            assert inside.acquire(timeout=10)

    (line,) = lines_of(caplog)
    assert line.count("block has run for") == 10
    assert line.count("and 2 more") == 2


@pytest.mark.parametrize("of_caller", [False, True])
def test_a_generator_is_closed_by_the_thread_that_is_in_it(
    of_caller: bool, gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    pool = ThreadPoolExecutor(1)
    inside, closed = threading.Event(), threading.Event()

    def generate(item: int) -> Iterator[int]:
        try:
            yield item
            inside.set()
            gate.wait(20)
            yield item
        finally:
            closed.set()

    executor = pool if of_caller else None
    pipeline = PipelineBuilder().add_source([1]).pipe(generate, executor=executor).build()
    pipeline.start()
    assert pipeline.get_item(timeout=10) == 1
    assert inside.wait(10)
    stopping = threading.Thread(target=pipeline.stop)
    stopping.start()
    loop_threads = [one for one in threading.enumerate() if "spdl_media pipeline" in one.name]
    for thread in loop_threads:
        thread.join(15)
    gate.set()
    stopping.join(15)

    assert closed.wait(10)
    pool.shutdown()
    assert lines_of(caplog) == []


def test_a_source_is_closed_by_the_thread_that_opened_it() -> None:
    """Connections to SQLite refuse any other thread. Several runs, because two threads race at the end."""

    class Rows:
        def __iter__(self) -> Iterator[int]:
            opener = threading.current_thread()
            try:
                yield from range(1000)
            finally:
                threads.append((opener, threading.current_thread()))

    threads: list[tuple[threading.Thread, threading.Thread]] = []
    pipeline = PipelineBuilder().add_source(Rows()).build()
    for number in range(1, 41):
        for _ in pipeline:
            break
        wait_until(lambda number=number: len(threads) == number)
    assert all(opener is closer for opener, closer in threads)


def test_an_iterator_is_dropped_at_the_end_of_its_epoch() -> None:
    class Rows:
        def __iter__(self) -> Iterator[int]:
            rows = iter_rows()
            dropped.append(weakref.ref(rows))
            return rows

    def iter_rows() -> Iterator[int]:
        yield from range(3)

    dropped: list[weakref.ref[Iterator[int]]] = []
    pipeline = PipelineBuilder().add_source(Rows()).build()
    with pipeline.auto_stop():
        assert list(pipeline) == [0, 1, 2]
        wait_until(lambda: dropped[0]() is None)


def test_the_callers_loop_continues_while_a_run_is_stopped(
    gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    """stop() waits for a thread that ends only when this loop runs."""

    def call(item: int) -> int:
        if item == 1:
            raise ValueError("bad")
        gate.wait(20)
        return item

    builder = PipelineBuilder().add_source([0, 1]).pipe(call, concurrency=2)
    pipeline = builder.build(max_failures=0)

    async def open_gate() -> None:
        while pipeline._run is None or not pipeline._run.was_stopped:  # noqa: ASYNC110, RUF100
            await asyncio.sleep(0.001)  # without a pause, this loop would take the GIL all the time
        gate.set()

    async def consume() -> None:
        opening = asyncio.create_task(open_gate())
        with pytest.raises(PipelineFailure, match="bad"):
            async for _ in pipeline:
                pass
        await opening

    asyncio.run(consume())
    assert lines_of(caplog) == []
