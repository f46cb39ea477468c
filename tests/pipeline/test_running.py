"""Starting, iterating, continuing and stopping a pipeline."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spdl_media.pipeline import PipelineBuilder, PipelineError, PipelineStopped
from spdl_media.pipeline.pipeline import Pipeline

CHECKOUT = Path(__file__).resolve().parent.parent.parent


def add_one(item: int) -> int:
    return item + 1


def build(source: Any = range(10), **options: Any) -> Pipeline[int]:
    return PipelineBuilder().add_source(source).pipe(add_one).add_sink(3).build(**options)


def pipeline_threads() -> list[str]:
    # Without those that free the memory of devices, "spdl_media (device, stream)", which stay.
    return [one.name for one in threading.enumerate() if re.match(r"spdl_media(?! \()", one.name)]


def endless() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1


def test_an_iteration_starts_and_stops_the_pipeline() -> None:
    pipeline = build()

    assert pipeline_threads() == []
    for _ in range(3):
        assert list(pipeline) == list(range(1, 11))
        assert pipeline_threads() == []


def test_a_broken_off_iteration_stops_what_it_started() -> None:
    pipeline = build(endless())

    for item in pipeline:
        assert item == 1
        break
    assert pipeline_threads() == []


def test_an_iterable_is_read_again_after_a_break() -> None:
    pipeline = build()

    assert next(iter(pipeline)) == 1
    assert list(pipeline) == list(range(1, 11))


def test_auto_stop_lets_an_iteration_be_continued() -> None:
    pipeline = build()
    with pipeline.auto_stop() as entered:
        assert entered is pipeline
        seen = []
        for item in pipeline:
            seen.append(item)
            if item == 4:
                break
        assert seen == [1, 2, 3, 4]
        assert list(pipeline) == [5, 6, 7, 8, 9, 10]
        assert list(pipeline) == list(range(1, 11))
    assert pipeline_threads() == []


def test_an_exception_of_the_consumer_ends_the_threads() -> None:
    pipeline = build(endless())

    def consume() -> None:
        with pipeline.auto_stop():
            for item in pipeline:
                raise KeyError(item)

    with pytest.raises(KeyError, match="1"):
        consume()
    assert pipeline_threads() == []


def test_what_runs_cannot_be_pickled() -> None:
    with pytest.raises(PipelineError, match=r"pickle its definition, pipeline\.config"):
        pickle.dumps(build())


def test_two_pipelines_of_one_builder_are_independent() -> None:
    builder = PipelineBuilder().add_source(range(5)).pipe(add_one)
    first, second = builder.build(), builder.build()

    with first.auto_stop(), second.auto_stop():
        assert first.get_item() == 1
        assert list(second) == [1, 2, 3, 4, 5]
        assert list(first) == [2, 3, 4, 5]


def test_get_item_until_the_end() -> None:
    pipeline = build(range(3))
    pipeline.start()

    assert [pipeline.get_item() for _ in range(3)] == [1, 2, 3]
    for _ in range(2):
        with pytest.raises(PipelineStopped, match="no more items"):
            pipeline.get_item()
        with pytest.raises(EOFError):
            pipeline.get_item()
    pipeline.stop()
    with pytest.raises(PipelineStopped):
        pipeline.get_item()


def test_what_must_be_started_says_so() -> None:
    pipeline = build()

    with pytest.raises(PipelineError, match="was not started; call start"):
        pipeline.get_item()
    with pytest.raises(PipelineError, match="no statistics before"):
        pipeline.statistics()
    pipeline.stop()


def test_a_second_start_is_refused_while_it_runs() -> None:
    pipeline = build()

    with pipeline.auto_stop(), pytest.raises(PipelineError, match="is running; stop it"):
        pipeline.start()
    with pipeline.auto_stop():
        assert list(pipeline) == list(range(1, 11))


def test_stop_twice_and_from_several_threads() -> None:
    pipeline = build(endless())
    pipeline.start()
    threads = [threading.Thread(target=pipeline.stop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(15)
    pipeline.stop()

    assert pipeline_threads() == []


@pytest.mark.parametrize("timeout", [math.inf, 1e15])
def test_stop_takes_any_timeout(timeout: float) -> None:
    pipeline = build(endless())
    with pipeline.auto_stop(timeout=timeout):
        assert pipeline.get_item(timeout=timeout) == 1
    assert pipeline_threads() == []


def test_stop_ends_the_wait_of_a_consumer() -> None:
    gate = threading.Event()

    def wait(item: int) -> int:
        gate.wait(10)
        return item

    pipeline = PipelineBuilder().add_source([1]).pipe(wait).build()
    outcome: list[BaseException] = []

    def consume() -> None:
        try:
            pipeline.get_item()
        except PipelineStopped as error:
            outcome.append(error)

    pipeline.start()
    consumer = threading.Thread(target=consume)
    consumer.start()
    stopper = threading.Thread(target=pipeline.stop)
    stopper.start()
    consumer.join(15)
    gate.set()
    stopper.join(15)

    assert "was stopped" in str(outcome[0])


@pytest.mark.parametrize("kind", ["function", "async"])
def test_a_stage_may_stop_its_own_pipeline(kind: str) -> None:
    is_started = threading.Event()

    def stop(item: int) -> int:
        if item == 3 and is_started.is_set():
            pipeline.stop()
        return item

    async def stop_async(item: int) -> int:
        return stop(item)

    fn: Any = stop if kind == "function" else stop_async
    # The same four items again and again: the first round may be over before start() has returned.
    pipeline = PipelineBuilder().add_source(range(4), continuous=True).pipe(fn).build()
    pipeline.start()
    is_started.set()

    def consume() -> None:
        while True:
            list(pipeline)

    with pytest.raises(PipelineStopped):
        consume()


def test_a_stop_during_start() -> None:
    """``start`` blocks in a hook; ``stop`` returns at once, and ``start`` raises."""
    starting, go_on = threading.Event(), threading.Event()

    def slow_factory(_: str) -> None:
        starting.set()
        assert go_on.wait(20)

    pipeline = build(task_hook_factory=slow_factory)
    outcome: list[BaseException] = []

    def start() -> None:
        try:
            pipeline.start()
        except PipelineStopped as error:
            outcome.append(error)

    starter = threading.Thread(target=start)
    starter.start()
    assert starting.wait(10)
    begin = time.monotonic()
    pipeline.stop()
    assert time.monotonic() - begin < 15
    go_on.set()
    starter.join(15)

    assert "stopped while it was being started" in str(outcome[0])
    assert list(pipeline) == list(range(1, 11))


def test_what_is_reported_during_start() -> None:
    starting, go_on = threading.Event(), threading.Event()

    def slow_factory(_: str) -> None:
        starting.set()
        assert go_on.wait(20)

    pipeline = build(task_hook_factory=slow_factory)
    starter = threading.Thread(target=pipeline.start)
    starter.start()
    try:
        assert starting.wait(10)
        with pytest.raises(PipelineError, match="has no statistics before it is started"):
            pipeline.statistics()
        assert pipeline.failures == ()
        assert pipeline.failure_counts == {}
    finally:
        go_on.set()
        starter.join(15)
    assert pipeline.statistics().stages[0].name == "add_one"
    pipeline.stop()


def test_time_outs() -> None:
    gate = threading.Event()

    def source() -> Iterator[int]:
        yield 1
        gate.wait(10)
        yield 2

    pipeline = build(source())
    # float32 is no float, and too coarse to be added to a clock.
    with pipeline.auto_stop(timeout=np.float32(10)):
        assert pipeline.get_item(timeout=10) == 2
        with pytest.raises(TimeoutError, match=r"gave no item within 0\.015625 s"):
            pipeline.get_item(timeout=np.float32(2**-6))
        with pytest.raises(TimeoutError, match="gave no item within 0 s"):
            next(pipeline.get_iterator(timeout=0))
        gate.set()
        assert list(pipeline.get_iterator(timeout=10)) == [3]


def test_a_continuous_source_marks_the_ends_of_its_epochs() -> None:
    pipeline = PipelineBuilder().add_source(range(5), continuous=True).aggregate(2).build()

    with pipeline.auto_stop():
        for _ in range(4):
            assert list(pipeline) == [[0, 1], [2, 3], [4]]
        for expected in ([0, 1], [2, 3], [4]):
            assert pipeline.get_item() == expected
        with pytest.raises(PipelineStopped, match="epoch has ended"):
            pipeline.get_item()
        assert pipeline.get_item() == [0, 1]


@pytest.mark.parametrize("continuous", [False, True])
def test_a_source_that_yields_nothing(continuous: bool) -> None:
    pipeline = PipelineBuilder().add_source([], continuous=continuous).pipe(add_one).build()

    with pipeline.auto_stop():
        for _ in range(3):
            assert list(pipeline) == []


def test_async_iteration_leaves_the_callers_loop_free() -> None:
    async def main() -> list[int]:
        beats = 0

        async def beat() -> None:
            nonlocal beats
            while True:
                beats += 1
                await asyncio.sleep(0.001)  # 0 would compete for the GIL

        def wait(item: int) -> int:
            # If the consumer's loop did not run meanwhile, this would never end.
            before = beats
            deadline = time.monotonic() + 10
            while beats < before + 3 and time.monotonic() < deadline:
                time.sleep(0.001)
            return item

        heart = asyncio.create_task(beat())
        pipeline = PipelineBuilder().add_source(range(5)).pipe(wait).build()
        result = [item async for item in pipeline]
        heart.cancel()
        return result

    begin = time.monotonic()
    assert asyncio.run(main()) == list(range(5))
    assert time.monotonic() - begin < 40


def test_async_iteration_that_is_broken_off_has_stopped() -> None:
    pipeline = build(range(10**6))

    async def consume() -> None:
        async for item in pipeline:
            assert item == 1
            break
        # It stops without another iteration of this loop.
        with pipeline.auto_stop():
            assert pipeline.get_item(timeout=10) == 1

    asyncio.run(consume())


def test_async_iteration_ends_while_the_threads_of_its_loop_are_busy() -> None:
    release = threading.Event()

    async def main() -> list[int]:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        busy = loop.run_in_executor(None, release.wait, 60)
        result = [item async for item in build(range(3))]
        release.set()
        assert await busy
        return result

    assert asyncio.run(main()) == [1, 2, 3]


def test_a_consumer_whose_loop_is_closed_keeps_nobody_from_the_items() -> None:
    first, second = threading.Event(), threading.Event()

    def source() -> Iterator[int]:
        for number, gate in enumerate((first, second)):
            gate.wait(20)
            yield number

    pipeline = build(source())
    with pipeline.auto_stop():
        loop = asyncio.new_event_loop()
        lost = loop.create_task(anext(aiter(pipeline)))  # type: ignore[arg-type]  # it is a coroutine
        loop.run_until_complete(asyncio.wait({lost}, timeout=0.01))
        loop.close()
        first.set()
        assert pipeline.get_item(timeout=10) == 1
        second.set()
        assert pipeline.get_item(timeout=10) == 2
    lost._log_destroy_pending = False  # type: ignore[attr-defined]  # the test needs it


def test_async_iteration_that_is_cancelled() -> None:
    gate = threading.Event()

    def wait(item: int) -> int:
        gate.wait(10)
        return item

    pipeline = PipelineBuilder().add_source([1, 2]).pipe(wait).build()

    async def take_one() -> int:
        async for item in pipeline:
            return item
        return -1

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(take_one(), 0.02)
        gate.set()
        assert await take_one() == 1

    with pipeline.auto_stop():
        asyncio.run(main())


def test_several_threads_share_the_items() -> None:
    pipeline = build(range(2000))
    results: list[list[int]] = [[] for _ in range(4)]

    together = threading.Barrier(4)

    def consume(index: int) -> None:
        items = iter(pipeline)
        results[index].append(next(items))
        # A thread that begins after the others have ended begins another epoch.
        together.wait(10)
        results[index].extend(items)

    with pipeline.auto_stop():
        threads = [threading.Thread(target=consume, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()

    assert sorted(item for part in results for item in part) == list(range(1, 2001))


def test_threads_that_iterate_a_pipeline_which_nobody_started() -> None:
    pipeline = build(range(500))
    results: list[list[int]] = [[] for _ in range(3)]
    together = threading.Barrier(3)

    def consume(index: int) -> None:
        together.wait(10)
        results[index].extend(pipeline)

    threads = [threading.Thread(target=consume, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()

    taken = sorted(item for part in results for item in part)
    # A thread that comes after the others have ended starts a new run.
    assert len(taken) % 500 == 0
    assert sorted(set(taken)) == list(range(1, 501))


def test_a_pipeline_that_nobody_has_ends() -> None:
    pipeline = build(endless())
    pipeline.start()
    assert pipeline.get_item() == 1
    reference = weakref.ref(pipeline)
    assert pipeline_threads()
    del pipeline
    gc.collect()

    assert reference() is None
    deadline = time.monotonic() + 10
    while pipeline_threads() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert pipeline_threads() == []


def test_an_iterator_keeps_its_pipeline() -> None:
    items = iter(build())
    gc.collect()

    assert list(items) == list(range(1, 11))


@pytest.mark.parametrize("kind", ["function", "async"])
def test_items_are_not_kept_by_threads_and_tasks_that_wait(kind: str) -> None:
    class Big:
        pass

    references = []

    def make(_: int) -> Big:
        references.append(weakref.ref(big := Big()))
        return big

    async def make_async(_: int) -> Big:
        return make(_)

    fn: Any = make if kind == "function" else make_async
    pipeline = PipelineBuilder().add_source(range(3)).pipe(fn).pipe(lambda big: big).build()
    with pipeline.auto_stop():
        for big in pipeline:
            del big
        deadline = time.monotonic() + 15
        while any(one() is not None for one in references) and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.001)
        assert [one() for one in references] == [None] * 3


def test_a_normal_run_prints_nothing(caplog: pytest.LogCaptureFixture, capfd: Any) -> None:
    caplog.set_level(logging.DEBUG, logger="spdl_media")

    async def slow(item: int) -> int:
        await asyncio.sleep(10)
        return item

    async def source() -> AsyncIterator[int]:
        try:
            for item in range(1000):
                yield item
        finally:
            await asyncio.sleep(0)

    with build(endless()).auto_stop() as pipeline:
        pipeline.get_item()
    with PipelineBuilder().add_source(source()).pipe(slow, concurrency=4).build().auto_stop():
        pass
    gc.collect()

    assert [record for record in caplog.records if record.name != "asyncio"] == []
    # Below that, asyncio's debug mode says which callbacks a busy machine delayed.
    assert [r for r in caplog.records if r.levelno > logging.WARNING] == []
    assert capfd.readouterr() == ("", "")


def run_script(code: str, **options: Any) -> subprocess.Popen[str]:
    head = """
        import asyncio, os, sys, threading, time
        from spdl_media.pipeline import PipelineBuilder
    """
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(head) + textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # On a busy machine, asyncio's debug mode reports slow calls.
        env={**os.environ, "PYTHONPATH": str(CHECKOUT), "PYTHONASYNCIODEBUG": ""},
        **options,
    )


def test_interpreter_exit_ends_a_running_pipeline() -> None:
    process = run_script(
        """
        from spdl_media.pipeline.engine import run
        # A busy machine may need longer than usual to cancel the calls.
        run.EXIT_SECONDS = 50
        started = []
        async def slow(item):
            started.append(item)
            try:
                await asyncio.sleep(60)
            finally:
                print("cancelled", flush=True)
        pipeline = PipelineBuilder().add_source(range(10**9)).pipe(slow, concurrency=2).build()
        pipeline.start()
        while len(started) < 2:
            time.sleep(0.001)
        print("exit", time.time(), flush=True)
        """
    )
    out, err = process.communicate(timeout=500)
    ended = time.time()
    first, *rest = out.splitlines()

    assert ended - float(first.split()[1]) < 40
    assert rest == ["cancelled", "cancelled"]
    assert (process.returncode, err) == (0, "")


def test_interpreter_exit_does_not_wait_for_a_blocked_stage() -> None:
    process = run_script(
        """
        inside = threading.Event()
        def block(item):
            inside.set()
            time.sleep(60)
        pipeline = PipelineBuilder().add_source([7]).pipe(block).build()
        pipeline.start()
        inside.wait()
        print(time.time(), flush=True)
        """
    )
    out, err = process.communicate(timeout=500)

    assert time.time() - float(out) < 40
    assert process.returncode == 0
    assert "block has run for" in err
    assert "on 7 in thread spdl_media worker-1" in err


def test_interpreter_exit_does_not_report_twice() -> None:
    process = run_script(
        """
        inside = threading.Event()
        def block(item):
            inside.set()
            time.sleep(60)
        pipeline = PipelineBuilder().add_source([7]).pipe(block).build()
        pipeline.start()
        inside.wait()
        pipeline.stop(timeout=0.01)
        """
    )
    _, err = process.communicate(timeout=500)

    assert process.returncode == 0
    assert err.count("block has run for") == 1


def test_control_c_in_the_consumer() -> None:
    process = run_script(
        """
        import signal
        # Ignored, where the tests run in the background of a shell.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        called = []
        def wait(item):
            if not called:
                called.append(print("ready", flush=True))
            time.sleep(0.01)
        pipeline = PipelineBuilder().add_source(iter(int, 1)).pipe(wait).build()
        try:
            with pipeline.auto_stop():
                for _ in pipeline:
                    pass
        except KeyboardInterrupt:
            print([t.name for t in threading.enumerate() if t.name.startswith("spdl")], flush=True)
        """
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.2)  # until it waits for an item that never comes, which cannot be observed
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=500)

    assert out == "[]\n"
    assert (process.returncode, err) == (0, "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_does_not_inherit_a_running_pipeline() -> None:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    pipeline = build(endless())

    def child() -> None:
        outcome = []
        for action in (pipeline.get_item, lambda: next(iter(pipeline))):
            try:
                action()
            except PipelineError as error:
                outcome.append(str(error))
        pipeline.stop()
        # A pipeline of the child's own does run.
        outcome.append(str(list(build())))
        sender.send(outcome)

    with pipeline.auto_stop():
        assert pipeline.get_item() == 1
        process = context.Process(target=child)
        process.start()
        assert receiver.poll(20)
        first, second, own = receiver.recv()
        process.join(10)
        assert pipeline.get_item() == 2

    assert f"runs in process {os.getpid()}, from which this process was forked" in first
    assert second == first
    assert own == str(list(range(1, 11)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_threads": 0}, "num_threads"),
        ({"report_stats_interval": -2}, "report_stats_interval .* not -2. None turns it off"),
        ({"max_failures": 1.5}, "max_failures"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Pipeline(PipelineBuilder().add_source([1]).get_config(), **options)


@pytest.mark.parametrize("option", ["on_failure", "task_hook_factory"])
def test_options_that_cannot_be_called_are_refused(option: str) -> None:
    options: dict[str, Any] = {option: 3}
    with pytest.raises(
        TypeError, match=f"{option} must be a function or another callable, not int"
    ):
        build(**options)
