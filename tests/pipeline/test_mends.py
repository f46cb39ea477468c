"""Regression tests of faults that occurred under load: hangs, leaks and lost items."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import io
import itertools
import logging
import math
import multiprocessing.connection
import os
import pickle
import re
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import BrokenExecutor, CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from effort import several_tries

from spdl_media.pipeline import (
    PipelineBuilder,
    PipelineFailure,
    PipelineStopped,
    ProcessPoolExecutorConfig,
    TaskHook,
    WorkerDied,
)
from spdl_media.ring import Ring

WAIT = 60


def resident_size() -> int:
    """Return the resident memory of this process in bytes; 0 if the system does not tell."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return 0
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def die_if_negative(number: int) -> int:
    return number if number >= 0 else os._exit(3)


def test_what_the_user_passes_is_not_emptied_at_the_end_of_a_run() -> None:
    """A source or function that is a deque or dictionary was emptied, as if it held items of the run."""

    class Table(dict[str, int]):
        __call__ = dict.__getitem__

    table = Table(a=1, b=2)
    for source in (deque("ab"), {"a": 3, "b": 4}):
        pipeline = PipelineBuilder().add_source(source).pipe(table).build()
        assert [list(pipeline) for _ in range(2)] == [[1, 2]] * 2
        assert list(source) == list(table) == ["a", "b"]


def test_a_frozen_exception_fails_its_item() -> None:
    @dataclasses.dataclass(frozen=True)
    class FrozenError(Exception):
        code: int

    class NotesError(Exception):
        @property
        def __notes__(self) -> list[str]:
            raise RuntimeError("no notes")

    def fail(item: int) -> int:
        if item < 2:
            raise (FrozenError(item), NotesError(item))[item]
        return item

    pipeline = PipelineBuilder().add_source(range(6)).pipe(fail).build()
    assert list(pipeline.get_iterator(timeout=WAIT)) == [2, 3, 4, 5]
    assert [type(record.exception) for record in pipeline.failures] == [FrozenError, NotesError]


def test_a_worker_that_cannot_be_replaced_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = []

    def start(*args: Any, **options: Any) -> Any:
        if started:
            raise OSError(24, "Too many open files")
        started.append(Ring(*args, **options))
        return started[-1]

    monkeypatch.setattr("spdl_media.pipeline.children.Ring", start)
    builder = PipelineBuilder().add_source([-1, 1, 2])
    pipeline = builder.pipe(die_if_negative, executor=ProcessPoolExecutorConfig()).build()
    with pytest.raises(PipelineFailure, match="Too many open files"):
        list(pipeline.get_iterator(timeout=WAIT))


def test_an_interrupt_while_a_run_starts_passes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C may arrive when the thread of the loop is already running."""
    start = threading.Thread.start

    def interrupted(self: threading.Thread) -> None:
        start(self)
        if self.name.startswith("spdl_media pipeline"):
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    pipeline = PipelineBuilder().add_source(range(3)).pipe(abs).build()
    with pytest.raises(KeyboardInterrupt):
        list(pipeline)
    monkeypatch.undo()
    assert list(pipeline) == [0, 1, 2]


@pytest.mark.parametrize(
    ("owner", "name", "fails"),
    [
        (asyncio.BaseEventLoop, "create_task", lambda *_, name="", **__: name == "same"),
        (asyncio.BaseEventLoop, "call_soon_threadsafe", lambda *_, **__: not in_main_thread()),
        (threading, "get_ident", lambda: sys._getframe(2).f_code.co_name == "_take_turns"),
    ],
)
def test_a_run_that_has_no_memory_for_its_own_steps_ends(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, fails: Any
) -> None:
    """It waited for ever: for a task or message that was lost, or a lock that was never released."""
    original, started = getattr(owner, name), threading.Event()

    def call(*args: Any, **options: Any) -> Any:
        if started.is_set() and fails(*args, **options):
            started.clear()
            for coroutine in filter(asyncio.iscoroutine, args):
                coroutine.close()  # or Python warns that it was never awaited
            raise MemoryError
        return original(*args, **options)

    async def same(item: int) -> int:
        return item

    def first(item: int) -> int:
        if item == 1:
            started.set()
        return item

    monkeypatch.setattr(owner, name, call)
    pipeline = PipelineBuilder().add_source(range(200)).pipe(first).pipe(same).build()
    # The last items may have been delivered before.
    with contextlib.suppress(PipelineFailure):
        assert list(pipeline.get_iterator(timeout=WAIT)) == list(range(200))
    assert not started.is_set()


@pytest.mark.parametrize("number", [100, pytest.param(10_000, marks=pytest.mark.long)])
def test_a_callers_executor_keeps_no_item(number: int) -> None:
    """Items are freed without a garbage collection."""
    alive = most = 0

    class Big:
        def __init__(self, _: object) -> None:
            nonlocal alive
            alive += 1

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    with ThreadPoolExecutor(1) as executor:
        builder = PipelineBuilder().add_source(range(number)).pipe(Big, executor=executor)
        gc.disable()
        try:
            with builder.add_sink(1).build().auto_stop() as pipeline:
                before = len(gc.get_objects())
                for big in pipeline:
                    most = max(most, alive)
                    del big
                assert len(gc.get_objects()) - before < 500
        finally:
            gc.enable()
    assert alive == 0
    # One item that is being made, and the slack while items pass quickly.
    assert most <= 70


@pytest.mark.parametrize(
    ("number", "num_threads"),
    [
        (10, 1),
        # Ends well before faulthandler_timeout: its report crashes CPython while threads come and go.
        pytest.param(12_000, 8, marks=pytest.mark.long),
    ],
)
def test_threads_of_calls_that_took_too_long_are_not_kept(
    number: int, num_threads: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, logger="spdl_media.pipeline")
    builder = PipelineBuilder().add_source(range(number))
    builder.pipe(lambda _: time.sleep(0.03), timeout=0.002, concurrency=num_threads)
    sizes = []
    with builder.build(num_threads=num_threads, max_failures=math.inf).auto_stop() as pipeline:
        reader = threading.Thread(target=list, args=(pipeline,))
        reader.start()
        run: Any = pipeline._run
        while reader.is_alive():
            reader.join(3)
            sizes.append((len(run.graph.all_threads()), resident_size()))
        # On a busy machine, some calls return before they are found to be overdue.
        assert sum(pipeline.failure_counts.values()) >= number / 4
        deadline = time.monotonic() + WAIT
        # Only the threads of the stage and the source are left, and none is in a call.
        while len(run.graph.all_threads()) > num_threads + 1:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert max(threads for threads, _ in sizes) < 10 * num_threads + 10
    # 170 bytes a call. The thousand records that are kept stand before the first size is taken.
    assert sizes[-1][1] - sizes[0][1] < 2e6


@pytest.mark.parametrize("kind", ["function", "async", "generator"])
def test_no_more_items_wait_than_the_buffer_and_the_calls_hold(kind: str) -> None:
    made = 0

    def make(item: int) -> int:
        nonlocal made
        time.sleep(0.001)
        made += 1
        return item

    async def make_async(item: int) -> int:
        await asyncio.sleep(0)
        return make(item)

    def generate(item: int) -> Iterator[int]:
        yield make(item)

    fn: Any = {"function": make, "async": make_async, "generator": generate}[kind]
    builder = PipelineBuilder().add_source(range(200)).pipe(fn, concurrency=2)
    with builder.add_sink(1).build().auto_stop() as pipeline:
        for number in range(1, 21):
            pipeline.get_item(timeout=WAIT)
            time.sleep(0.01)
            # In the buffer, in calls, and one item that waits for a thread.
            assert made - number <= 1 + 2 + 1


def test_big_items_behind_quick_ones_wait_as_few() -> None:
    """Even after quick items, only two stages, the sink and the consumer hold a few items that take long."""
    alive = 0

    class Big:
        def __init__(self, item: int) -> None:
            nonlocal alive
            alive += 1
            if item < 0:
                time.sleep(0.01)

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    items = [*range(1000), *[-1] * 30]
    builder = PipelineBuilder().add_source(items).pipe(Big).pipe(lambda big: big).add_sink(2)
    numbers = []
    with builder.build().auto_stop() as pipeline:
        for position, big in enumerate(pipeline.get_iterator(timeout=WAIT)):
            if position >= 1000:
                time.sleep(0.02)
            # Slow items before these may have been made while the quick ones passed.
            if position >= 1015:
                numbers.append(alive)
            del big
    # The median: on a busy machine, a thread may be suspended before it drops the item that it passed on.
    assert statistics.median(numbers) <= 1 + 2 + 2 * 2


@pytest.mark.parametrize("repetition", range(3))
def test_what_was_made_before_a_failure_is_delivered(repetition: int) -> None:
    bad = 60 + repetition

    def fail(item: int) -> int:
        if item == bad:
            raise ValueError(item)
        return item

    pipeline = PipelineBuilder().add_source(range(200)).pipe(fail).build(max_failures=0)
    seen: list[int] = []
    with pytest.raises(PipelineFailure):
        seen.extend(time.sleep(0.001) or item for item in pipeline)
    assert seen == list(range(bad))


def test_the_end_of_an_epoch_ends_no_other() -> None:
    """At each step in which one consumer handles the end of an epoch, another one begins the next epoch."""
    gate = threading.Event()

    def numbers() -> Iterator[int]:
        yield 0
        assert gate.wait(WAIT)
        yield 1

    class Numbers:
        def __iter__(self) -> Iterator[int]:
            return numbers()

    for number in itertools.count(1):
        seen: list[int] = []
        steps = itertools.count(1)
        gate.set()
        with PipelineBuilder().add_source(Numbers()).build().auto_stop() as pipeline:
            assert list(pipeline.get_iterator(timeout=WAIT)) == [0, 1]
            gate.clear()

            def step(*_: object, number: int = number) -> None:
                if next(steps) == number:  # noqa: B023  # called in this round alone
                    sys.setprofile(None)
                    with contextlib.suppress(TimeoutError):
                        seen.append(next(pipeline.get_iterator(timeout=0)))  # noqa: B023

            sys.setprofile(step)
            with contextlib.suppress(PipelineStopped, TimeoutError):
                seen.append(pipeline.get_item(timeout=0))
            sys.setprofile(None)
            if next(steps) <= number:
                break
            if not seen:
                seen.append(pipeline.get_item(timeout=WAIT))
            with pytest.raises(TimeoutError):
                pipeline.get_item(timeout=0)
            gate.set()
            assert [*seen, *pipeline.get_iterator(timeout=WAIT)] == [0, 1]
    assert number > 10


@pytest.mark.parametrize("error", [CancelledError, BrokenExecutor])
def test_what_an_item_raises_does_not_end_a_callers_pool(error: type[Exception]) -> None:
    def fail_at_one(item: int) -> int:
        if item == 1:
            raise error("of the item")
        return item

    with ThreadPoolExecutor(1) as executor:
        pipeline = (
            PipelineBuilder().add_source(range(4)).pipe(fail_at_one, executor=executor).build()
        )
        assert list(pipeline) == [0, 2, 3]


def test_a_pipe_that_breaks_while_it_is_read_is_a_death(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connection = multiprocessing.connection.Connection
    receive = connection.recv_bytes

    def receive_half(self: Any, *args: Any) -> bytes:
        data = receive(self, *args)
        if data.startswith(b"\x80") and pickle.loads(data) == (True, 2, ""):
            raise OSError("got end of file during message")
        return data

    monkeypatch.setattr(connection, "recv_bytes", receive_half)
    builder = PipelineBuilder().add_source([1, 2, 3])
    builder.pipe(die_if_negative, executor=ProcessPoolExecutorConfig())
    pipeline = builder.build(max_failures=math.inf)
    assert list(pipeline.get_iterator(timeout=WAIT)) == [1, 3]
    assert [type(record.exception) for record in pipeline.failures] == [WorkerDied]


def test_a_stage_that_cancels_its_own_task_loses_nothing() -> None:
    async def cancel(item: int) -> int:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        return item

    pipeline = PipelineBuilder().add_source(range(4)).pipe(cancel).build()
    with pipeline.auto_stop():
        # The cancellation arrives while the task waits for the next epoch.
        for _ in range(2):
            assert list(pipeline.get_iterator(timeout=WAIT)) == [0, 1, 2, 3]


@several_tries
def test_pauses_of_a_generator_do_not_count_as_waits_of_its_item() -> None:
    def generate(_: int) -> Iterator[int]:
        yield from range(300)

    pipeline = PipelineBuilder().add_source([0]).pipe(generate).add_sink(1).build()
    with pipeline.auto_stop():
        for item in pipeline:
            if item == 20:
                time.sleep(0.5)
        (stage,) = pipeline.statistics().stages
    assert stage.calls.average < 0.25
    assert stage.queue.average < 0.25


def test_a_wait_counts_before_it_ends() -> None:
    gate = threading.Event()
    pipeline = PipelineBuilder().add_source([1]).pipe(lambda _: gate.wait(WAIT)).build()
    with pipeline.auto_stop():
        consumer = threading.Thread(target=pipeline.get_item)
        consumer.start()
        deadline = time.monotonic() + WAIT
        while pipeline.statistics().sink.waited < 0.05:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        gate.set()
        consumer.join(WAIT)


@pytest.mark.parametrize("kind", ["function", "async", "generator", "async generator"])
def test_a_call_occupies_its_stage_while_it_runs(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And not more: once, a call over three reports counted as 300% in the last one."""
    reports = threading.Semaphore(0)
    caplog.set_level(logging.INFO, logger="spdl_media.pipeline")
    caplog.handler.addFilter(lambda _: reports.release() or True)

    earlier = []

    def wait() -> int:
        while reports.acquire(blocking=False):
            earlier.append("on a busy machine")
        for _ in range(4):
            assert reports.acquire(timeout=WAIT)
        return 1

    async def wait_async(_: int) -> int:
        return await asyncio.to_thread(wait)

    def generate(_: int) -> Iterator[int]:
        yield wait()

    async def generate_async(_: int) -> AsyncIterator[int]:
        yield await asyncio.to_thread(wait)

    kinds: dict[str, Any] = {
        "function": lambda _: wait(),
        "async": wait_async,
        "generator": generate,
        "async generator": generate_async,
    }
    builder = PipelineBuilder().add_source([1]).pipe(kinds[kind], name="waits")
    with builder.build(report_stats_interval=0.1).auto_stop() as pipeline:
        assert list(pipeline) == [1]
        assert reports.acquire(timeout=WAIT)
    found = re.findall(r"waits .* (\d+)%", caplog.text)
    # Two reports may begin before the call, and the last one ends after it.
    during = found[len(earlier) + 2 :][:2]
    assert [int(part) > 70 for part in during] == [True, True]
    assert all(int(part) <= 100 for part in found)


def test_an_open_file_that_a_source_gives_stays_open() -> None:
    file = io.StringIO("a\nb\n")

    class Lines:
        def __iter__(self) -> Iterator[str]:
            file.seek(0)
            return file

    pipeline = PipelineBuilder().add_source(Lines()).build()
    with pipeline.auto_stop():
        for _ in range(2):
            assert list(pipeline) == ["a\n", "b\n"]


def test_a_timeout_error_has_no_cause() -> None:
    gate = threading.Event()
    pipeline = PipelineBuilder().add_source([1]).pipe(lambda _: gate.wait(WAIT)).build()
    with pipeline.auto_stop():
        with pytest.raises(TimeoutError) as caught:
            pipeline.get_item(timeout=0.01)
        gate.set()
    assert caught.value.__context__ is None


def test_threads_start_when_they_are_needed() -> None:
    pipeline = PipelineBuilder().add_source([1, 2]).pipe(abs, concurrency=64).build(num_threads=64)
    with pipeline.auto_stop():
        assert sorted(pipeline) == [1, 2]
        run: Any = pipeline._run
        assert len(run.graph.all_threads()) <= 3


def test_a_hook_in_the_style_of_spdl_is_refused() -> None:
    class Hook(TaskHook):
        def task_hook(self) -> None: ...

        def stage_hook(self) -> None: ...

    pipeline = PipelineBuilder().add_source([1]).pipe(abs).build(task_hook_factory=lambda _: Hook())
    with pytest.raises(TypeError, match="has task_hook and stage_hook, which nothing calls"):
        list(pipeline)
