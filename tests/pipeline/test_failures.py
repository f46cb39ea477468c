"""Items that fail: they are dropped, counted and recorded, and too many of them end the run."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import os
import pickle
import re
import sys
import threading
import traceback
import tracemalloc
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from effort import each
from left_behind import wait_until

from spdl_media.pipeline import (
    AggregateConfig,
    PipeConfig,
    PipelineBuilder,
    ThreadPoolExecutorConfig,
)
from spdl_media.pipeline.failures import (
    DEFAULT_MAX_FAILURES,
    FailureLog,
    PipelineFailure,
    record_failure,
)
from spdl_media.pipeline.pipeline import Pipeline
from spdl_media.pipeline.stats import StageCounters

WAIT = 60


def fail_when(condition: Callable[[int], bool], kind: str) -> Any:
    def check(item: int) -> int:
        if condition(item):
            raise ValueError(f"bad {item}")
        return item

    async def check_async(item: int) -> int:
        return check(item)

    def generate(item: int) -> Iterator[int]:
        yield check(item)

    async def generate_async(item: int) -> AsyncIterator[int]:
        yield check(item)

    kinds = {
        "function": check,
        "async": check_async,
        "generator": generate,
        "async generator": generate_async,
    }
    return kinds[kind]


KINDS = ["function", "async", "generator", "async generator"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ["completion", "input"])
def test_a_failing_item_is_dropped_and_recorded(kind: str, order: Any) -> None:
    fn = fail_when(lambda item: item % 100 == 7, kind)
    builder = PipelineBuilder().add_source(range(1000))
    builder.pipe(fn, name="check", concurrency=4, output_order=order)
    pipeline = builder.build(num_threads=4)

    assert sorted(pipeline) == [item for item in range(1000) if item % 100 != 7]
    assert pipeline.failure_counts == {"check": 10}
    records = sorted(pipeline.failures, key=lambda record: int(record.input))
    assert [record.input for record in records] == [str(item) for item in range(7, 1000, 100)]
    first = records[0]
    assert first.stage == "check"
    assert (type(first.exception), str(first.exception)) == (ValueError, "bad 7")
    assert "Traceback (most recent call last)" in first.traceback
    assert 'raise ValueError(f"bad {item}")' in first.traceback
    assert first.exception.__traceback__ is None


def test_counts_are_exact_where_records_are_the_last_thousand() -> None:
    fn = fail_when(lambda item: item % 2 == 0, "function")
    builder = PipelineBuilder().add_source(range(5000)).pipe(fn, name="check", concurrency=4)
    pipeline = builder.build(max_failures=math.inf)

    assert len(list(pipeline)) == 2500
    assert pipeline.failure_counts == {"check": 2500}
    assert len(pipeline.failures) == 1000
    assert pipeline.statistics().stages[0].failures == 2500


def test_failures_of_each_stage_are_counted_apart() -> None:
    builder = PipelineBuilder().add_source(range(1000))
    builder.pipe(fail_when(lambda item: item % 10 == 0, "function"), name="first")
    builder.pipe(fail_when(lambda item: item % 10 == 5, "async"), name="second")
    pipeline = builder.build()

    assert len(list(pipeline)) == 800
    assert pipeline.failure_counts == {"first": 100, "second": 100}


def test_the_default_lets_half_of_the_items_fail() -> None:
    assert DEFAULT_MAX_FAILURES == 0.5
    for bad, ends in ((50, False), (51, True)):
        fn = fail_when(lambda item, bad=bad: item < bad, "function")
        # The good items come first, so that the limit is exceeded only at the end.
        pipeline = PipelineBuilder().add_source(range(99, -1, -1)).pipe(fn).build()
        if ends:
            with pytest.raises(PipelineFailure, match=r"51 of 100 calls failed.*allows 50%"):
                list(pipeline)
        else:
            assert len(list(pipeline)) == 50


@each("kind", KINDS)
@each("count", [1, 3, 100_000])
def test_a_pipeline_in_which_everything_fails_is_an_error(kind: str, count: int) -> None:
    fn = fail_when(lambda _: True, kind)
    builder = PipelineBuilder().add_source(range(count)).pipe(lambda i: i).pipe(fn, name="check")
    pipeline = builder.pipe(lambda i: i).build()

    with pytest.raises(PipelineFailure, match="Stage 'check' failed too often") as caught:
        list(pipeline)

    assert caught.value.stage == "check"
    cause = caught.value.exceptions[0]
    assert isinstance(cause, ValueError)
    assert str(cause).startswith("bad ")
    assert caught.value.exceptions == (cause,)
    assert "raise ValueError" in caught.value.__notes__[0]
    # Ten calls are enough if all fail; calls that were under way at that time count as well.
    assert pipeline.failure_counts["check"] <= 10 + 65


def test_ten_calls_tell_a_stage_that_always_fails_and_a_good_one_among_them_takes_a_hundred() -> (
    None
):
    def ended_by(bad: Callable[[int], bool], **own: Any) -> str:
        builder = PipelineBuilder().add_source(range(1000)).pipe(lambda item: item)
        pipeline = builder.pipe(fail_when(bad, "function"), **own).build(num_threads=1)
        with pytest.raises(PipelineFailure) as caught:
            list(pipeline)
        return str(caught.value)

    # Not failure_counts, which also includes calls that were under way at that time.
    assert "10 of 10 calls failed" in ended_by(lambda _: True)
    assert "10 of 10 calls failed" in ended_by(lambda _: True, max_failures=0.9)
    assert "99 of 100 calls failed" in ended_by(lambda item: item != 9)


def test_the_first_failure_of_a_stage_and_the_counts_of_an_epoch_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    builder = PipelineBuilder().add_source(range(100))
    builder.pipe(fail_when(lambda item: item % 10 == 3, "function"), name="load")
    builder.pipe(fail_when(lambda item: item == 50, "function"), name="crop")
    pipeline = builder.pipe(lambda item: item).build(num_threads=1)
    with pipeline.auto_stop():
        for _ in range(2):
            assert len(list(pipeline)) == 89

    assert {record.levelname for record in caplog.records} == {"WARNING"}
    counts = "failures of this epoch: 10 of 100 in 'load', 1 of 90 in 'crop'"
    assert [record.getMessage() for record in caplog.records] == [
        "first failure of stage 'load': ValueError: bad 3 (input 3)",
        "first failure of stage 'crop': ValueError: bad 50 (input 50)",
        counts,
        counts,
    ]


def test_a_run_without_failures_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    list(PipelineBuilder().add_source(range(9)).pipe(lambda item: item).build())
    assert caplog.records == []


def test_a_failure_prints_the_error_once_with_the_users_lines_alone() -> None:
    pipeline = PipelineBuilder().add_source([1]).pipe(fail_when(lambda _: True, "function")).build()
    printed = []
    for take in (lambda: list(pipeline), pipeline.get_item):
        pipeline.stop()
        with pytest.raises(PipelineFailure) as caught, pipeline.auto_stop():
            take()
        printed.append("".join(traceback.format_exception(caught.value)))

    for text in printed:
        assert "direct cause" not in text
        # Once in the message, because a log may show only that, and once as the member of the group.
        assert text.count("ValueError: bad 1") == 2
        assert text.count("raise ValueError") == 1
        assert len(text.splitlines()) <= 22
        assert f"engine{os.sep}" not in text

    # The generated __init__ of a dataclass is in no file of the package.
    pipeline = PipelineBuilder().add_source([1]).pipe(lambda _: ThreadPoolExecutorConfig(0)).build()
    with pytest.raises(PipelineFailure):
        list(pipeline)
    assert pipeline.failures[0].raised_at.count("File ") == 1


@pytest.mark.parametrize(("limit", "allowed"), [(0, 0), (3, 3), (3.0, None), (math.inf, None)])
def test_a_number_of_failures(limit: float, allowed: int | None) -> None:
    if limit == 3.0 and isinstance(limit, float):
        with pytest.raises(ValueError, match="max_failures"):
            PipelineBuilder().add_source([1]).build(max_failures=limit)
        return
    for bad in (limit, limit + 1) if allowed is not None else (50,):
        fn = fail_when(lambda item, bad=bad: item < bad, "function")
        pipeline = PipelineBuilder().add_source(range(50)).pipe(fn).build(max_failures=limit)
        if allowed is not None and bad > allowed:
            with pytest.raises(PipelineFailure, match=f"{bad} failed, and max_failures={limit}"):
                list(pipeline)
        else:
            assert len(list(pipeline)) == 50 - bad


@pytest.mark.parametrize("of_stage", [False, True])
def test_limits_are_any_real_number_and_minus_one_is_none(*, of_stage: bool) -> None:
    def losing(number: int, limit: Any) -> Pipeline[int]:
        fn = fail_when(lambda item: 1 <= item <= number, "function")
        own, whole = (limit, 0) if of_stage else (None, limit)
        builder = PipelineBuilder().add_source(range(100)).pipe(fn, max_failures=own)
        return builder.build(max_failures=whole)

    assert len(list(losing(10, Fraction(1, 10)))) == 90
    with pytest.raises(PipelineFailure, match=r"11 of 100 calls failed.* allows 10%"):
        list(losing(11, Fraction(1, 10)))
    assert len(list(losing(3, np.int64(3)))) == 97
    with pytest.raises(PipelineFailure, match="4 failed, and max_failures=3 allows 3"):
        list(losing(4, np.int64(3)))
    assert list(losing(100, -1)) == [0]


def test_a_number_counts_the_failures_of_all_stages() -> None:
    builder = PipelineBuilder().add_source(range(100))
    builder.pipe(fail_when(lambda item: item in (10, 20), "function"))
    builder.pipe(fail_when(lambda item: item in (30, 40), "function"))

    assert len(list(builder.build(max_failures=4))) == 96
    with pytest.raises(PipelineFailure, match="4 failed, and max_failures=3 allows 3"):
        list(builder.build(max_failures=3))


def test_a_stage_with_a_limit_of_its_own_is_not_counted_in_the_whole() -> None:
    def build(own: float, whole: float) -> Pipeline[int]:
        builder = PipelineBuilder().add_source(range(100))
        builder.pipe(fail_when(lambda item: 39 <= item < 99, "function"), max_failures=own)
        return builder.pipe(fail_when(lambda item: item == 99, "function")).build(
            max_failures=whole
        )

    assert len(list(build(0.6, 1))) == 39
    with pytest.raises(PipelineFailure, match=r"60 of 100 calls failed, and max_failures=0\.59"):
        list(build(0.59, 1))
    with pytest.raises(PipelineFailure, match="max_failures=0 allows 0"):
        list(build(0.6, 0))


def test_a_rate_of_the_whole_holds_for_each_stage() -> None:
    """The stages lose a third, then half of the rest."""
    builder = PipelineBuilder().add_source(range(90))
    builder.pipe(fail_when(lambda item: item % 3 == 0, "function"))
    builder.pipe(fail_when(lambda item: item % 3 == 1, "function"), name="second")

    assert len(list(builder.build(max_failures=0.5))) == 30
    with pytest.raises(PipelineFailure, match=r"'second' .* 30 of 60 calls failed"):
        list(builder.build(max_failures=0.49))


def with_a_part(kind: str, number: int) -> PipelineBuilder[int]:
    """Return a pipeline that also gives 900 good items, and a part of it that loses all of ``number``."""
    fail = fail_when(lambda _: True, "function")
    if kind == "path":
        builder = PipelineBuilder().add_source(range(900 + number))
        return builder.path_variants(lambda item: item >= 900, [[], [PipeConfig(fail, "bad")]])
    good, bad = (PipelineBuilder().add_source(range(count)) for count in (900, number))
    return PipelineBuilder().merge(good, bad.pipe(fail, name="bad"))


@each("kind", ["path", "merged"])
def test_a_part_that_gets_few_items_is_judged_after_a_hundred(kind: str) -> None:
    """A single damaged item may be all that it gets."""
    assert len(list(with_a_part(kind, 1).build())) == 900
    assert len(list(with_a_part(kind, 99).build(max_failures=0.1))) == 900
    for number, limit in ((1, 0.0), (99, 0.09)):
        with pytest.raises(PipelineFailure, match=rf"'bad' .* {number} of {number} calls failed"):
            list(with_a_part(kind, number).build(max_failures=limit))
    with pytest.raises(PipelineFailure, match=r"'bad' .* 100 of 100 calls failed"):
        list(with_a_part(kind, 200).build())


@each("is_kept", [False, True])
def test_paths_that_together_lose_everything_but_an_item_are_an_error(*, is_kept: bool) -> None:
    lost = fail_when(lambda item: item or not is_kept, "function")
    builder = PipelineBuilder().add_source(range(200)).path_variants(lambda i: i % 10, [lost] * 10)

    with pytest.raises(PipelineFailure, match="20 of 20 calls failed"):
        list(builder.build(max_failures=0.99))


def test_what_a_part_loses_is_compared_to_the_items_of_all_sources() -> None:
    """Batches are fewer than the items that they hold."""
    bad = PipelineBuilder().add_source(range(90)).pipe(fail_when(lambda _: True, "function"))
    good = PipelineBuilder().add_source(range(90)).aggregate(9)
    pipeline = PipelineBuilder().merge(good, bad).build()

    with pipeline.auto_stop():
        assert [len(list(pipeline)) for _ in range(3)] == [10, 10, 10]


def test_an_epoch_of_which_the_parts_lose_all_batches_is_an_error() -> None:
    """Batches are fewer than the items before the paths."""
    fail = PipeConfig(fail_when(lambda _: True, "function"))
    builder = PipelineBuilder().add_source(range(90))
    builder.path_variants(lambda item: item % 2, [[AggregateConfig(9), fail]] * 2)

    with pytest.raises(PipelineFailure, match="5 of 5 calls failed"):
        list(builder.build())


def test_one_failure_of_a_stage_is_not_all_of_its_calls() -> None:
    """The first stage fails nine times of ten; then the second fails at the first item that it gets."""
    builder = PipelineBuilder().add_source(range(100))
    builder.pipe(fail_when(lambda item: item < 9, "function"))
    builder.pipe(fail_when(lambda item: item == 9, "function"))

    assert list(builder.build(max_failures=0.3)) == list(range(10, 100))


def test_what_was_delivered_before_comes_before_the_failure() -> None:
    fn = fail_when(lambda item: item == 5, "function")
    pipeline = PipelineBuilder().add_source(range(100)).pipe(fn).add_sink(10).build(max_failures=0)
    seen: list[int] = []

    with pytest.raises(PipelineFailure, match="bad 5"):
        seen.extend(pipeline)
    assert seen == [0, 1, 2, 3, 4]


def test_what_waits_for_room_before_a_merge_comes_before_the_failure() -> None:
    second = threading.Event()

    def work(item: int) -> int:
        if item == 2:
            second.set()
        return item

    def after_the_second() -> Iterator[int]:
        assert second.wait(WAIT)
        yield 3

    good = PipelineBuilder().add_source([1, 2]).pipe(work)
    bad = (
        PipelineBuilder().add_source(after_the_second()).pipe(fail_when(lambda _: True, "function"))
    )
    # One thread, so that the second item has been passed on when the third one fails.
    pipeline = PipelineBuilder().merge(good, bad).add_sink(1).build(num_threads=1, max_failures=0)
    seen: list[int] = []
    with pipeline.auto_stop():
        wait_until(lambda: bool(pipeline.failures))
        with pytest.raises(PipelineFailure, match="bad 3"):
            seen.extend(pipeline)
    assert seen == [1, 2]


def test_a_run_that_failed_says_so_each_time_it_is_asked() -> None:
    pipeline = PipelineBuilder().add_source([1]).pipe(fail_when(lambda _: True, "function")).build()

    with pipeline.auto_stop():
        for _ in range(2):
            with pytest.raises(PipelineFailure, match="bad 1"):
                pipeline.get_item(timeout=WAIT)
            with pytest.raises(PipelineFailure, match="bad 1"):
                list(pipeline)
    # After stop(), it can be started again.
    with pytest.raises(PipelineFailure, match="bad 1"):
        list(pipeline)


@each("error", [SystemExit(3), KeyboardInterrupt(), StopIteration(), GeneratorExit()])
@each("kind", ["function", "async"])
def test_no_exception_of_a_stage_ends_a_thread_or_the_program(
    error: BaseException, kind: str
) -> None:
    def fail(item: int) -> int:
        if item == 3:
            raise error
        return item

    async def fail_async(item: int) -> int:
        return fail(item)

    fn: Any = fail if kind == "function" else fail_async
    pipeline = PipelineBuilder().add_source(range(10)).pipe(fn).build()

    assert list(pipeline) == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    with pytest.raises(PipelineFailure, match=type(error).__name__):
        list(PipelineBuilder().add_source([3]).pipe(fn).build())


def exit_in_a_task_of_its_own() -> Any:
    async def leave(item: int) -> int:
        await asyncio.sleep(0)
        if item == 3:
            sys.exit("bye")
        return item

    async def gather(item: int) -> int:
        return (await asyncio.gather(leave(item)))[0]

    return gather


def exit_in_a_callback() -> Any:
    async def call_soon(item: int) -> int:
        if item == 3:
            asyncio.get_running_loop().call_soon(sys.exit, "bye")
            await asyncio.sleep(WAIT)
        return item

    return call_soon


def stop_the_loop() -> Any:
    async def stop(item: int) -> int:
        if item == 3:
            asyncio.get_running_loop().stop()
            await asyncio.sleep(WAIT)
        return item

    return stop


@each("where", ["stage", "source"])
@each(
    "make, reason",
    [
        (exit_in_a_task_of_its_own, "SystemExit: bye"),
        (exit_in_a_callback, "SystemExit: bye"),
        (stop_the_loop, "RuntimeError: Event loop stopped before Future completed"),
    ],
)
def test_whoever_stops_the_event_loop_ends_the_run_and_the_consumers_wait(
    make: Callable[[], Any], reason: str, where: str
) -> None:
    fn = make()

    async def source() -> AsyncIterator[int]:
        for item in range(10):
            yield await fn(item)

    builder = PipelineBuilder[int]()
    if where == "source":
        builder.add_source(source())
    else:
        builder.add_source(range(10)).pipe(fn, name="fn")
    seen: list[int] = []

    with pytest.raises(PipelineFailure, match=f"Something stopped the event loop.*{reason}"):
        seen.extend(builder.build().get_iterator(timeout=WAIT))
    # Items that are under way between two turns of the loop may be lost.
    assert seen == [0, 1, 2][: len(seen)]


def test_an_async_generator_that_exits_while_it_is_closed_keeps_nobody_waiting() -> None:
    async def ends_badly() -> AsyncIterator[int]:
        try:
            while True:
                yield 1
        finally:
            sys.exit("bye")

    left: list[AsyncIterator[int]] = []

    async def begin(item: int) -> int:
        left.append(ends_badly())
        return item + await anext(left[0])

    pipeline = PipelineBuilder().add_source([1]).pipe(begin).build()

    assert list(pipeline.get_iterator(timeout=WAIT)) == [2]


def test_a_generator_that_fails_midway_keeps_what_it_yielded() -> None:
    def generate(item: int) -> Iterator[int]:
        yield 2 * item
        if item == 1:
            raise ValueError("midway")
        yield 2 * item + 1

    builder = PipelineBuilder().add_source(range(3)).pipe(generate, output_order="input")
    pipeline = builder.build()

    assert list(pipeline) == [0, 1, 2, 4, 5]
    assert pipeline.failure_counts == {"generate": 1}


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("after", [0, 5])
def test_a_source_that_fails_raises_after_its_items(is_async: bool, after: int) -> None:
    def source() -> Iterator[int]:
        yield from range(after)
        raise OSError("disk gone")

    async def source_async() -> AsyncIterator[int]:
        for item in source():
            yield item

    items = source_async() if is_async else source()
    pipeline = PipelineBuilder().add_source(items).pipe(lambda i: i).aggregate(2).build()
    groups: list[list[int]] = []
    with pytest.raises(PipelineFailure, match="The source failed: OSError: disk gone") as caught:
        groups.extend(pipeline)

    assert [item for group in groups for item in group] == list(range(after))
    assert caught.value.stage == "source"
    assert isinstance(caught.value.exceptions[0], OSError)


def test_an_iterable_that_cannot_be_iterated_is_a_source_that_fails() -> None:
    class Broken:
        def __iter__(self) -> Iterator[int]:
            raise OSError("no index")

    with pytest.raises(PipelineFailure, match="no index"):
        list(PipelineBuilder().add_source(Broken()).build())


def test_a_merged_source_that_fails_does_not_wait_for_the_others() -> None:
    gate = threading.Event()

    def blocked() -> Iterator[int]:
        yield 1
        gate.wait(WAIT)

    def broken() -> Iterator[int]:
        yield 2
        raise OSError("disk gone")

    parts = [PipelineBuilder().add_source(items) for items in (blocked(), broken())]
    pipeline = PipelineBuilder().merge(*parts).build()
    seen: list[int] = []
    with pipeline.auto_stop():
        with pytest.raises(PipelineFailure, match="disk gone"):
            seen.extend(pipeline)
        gate.set()

    assert 2 in seen


def test_on_failure_gets_each_one_with_its_input() -> None:
    got: list[tuple[str, Any]] = []
    threads = set()

    def note(record: Any, item: Any) -> None:
        threads.add(threading.current_thread().name)
        got.append((record.stage, item))

    builder = PipelineBuilder().add_source([{"n": n} for n in range(3000)])
    builder.pipe(lambda item: item["n"])
    builder.pipe(fail_when(lambda item: item % 2 == 1, "function"), name="odd", concurrency=3)
    pipeline = builder.build(max_failures=math.inf, on_failure=note)

    assert sorted(pipeline) == list(range(0, 3000, 2))
    assert sorted(got) == [("odd", n) for n in range(1, 3000, 2)]
    assert threads == {"spdl_media on_failure-1"}


def test_on_failure_holds_the_pipeline_up_rather_than_piling_up() -> None:
    gate = threading.Event()
    entered = threading.Semaphore(0)

    def block(_: object, __: object) -> None:
        entered.release()
        assert gate.wait(WAIT)

    builder = PipelineBuilder().add_source(range(1000)).pipe(fail_when(lambda _: True, "function"))
    pipeline = builder.build(max_failures=math.inf, on_failure=block)
    with pipeline.auto_stop():
        assert entered.acquire(timeout=WAIT)
        with pytest.raises(TimeoutError):
            pipeline.get_item(timeout=0.1)
        assert pipeline.failure_counts["check"] <= 100
        gate.set()
        assert list(pipeline) == []


def test_on_failure_that_raises_ends_the_run() -> None:
    def refuse(record: Any, _: object) -> None:
        raise LookupError(f"no more of {record.input}")

    builder = PipelineBuilder().add_source(range(100)).pipe(fail_when(lambda i: i == 9, "function"))
    pipeline = builder.build(on_failure=refuse)

    with pytest.raises(PipelineFailure, match="on_failure raised LookupError: no more of 9"):
        list(pipeline)


def test_records_keep_nothing_alive() -> None:
    class Big:
        def __repr__(self) -> str:
            return "Big()" + 10_000 * "!"

    references = []

    def fail(item: Big) -> None:
        local = Big()
        references.extend([weakref.ref(item), weakref.ref(local)])
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise ValueError("outer") from error

    pipeline = (
        PipelineBuilder().add_source(Big() for _ in range(3)).pipe(fail).build(max_failures=9)
    )
    assert list(pipeline) == []
    gc.collect()

    assert [one() for one in references] == [None] * 6
    assert all(len(record.input) <= 110 for record in pipeline.failures)
    assert all("KeyError: 'inner'" in record.traceback for record in pipeline.failures)


def decode(number: int) -> object:
    return (number * b"a" + b"\xff").decode()


def encode(number: int) -> object:
    return (number * "a" + "\xff").encode("ascii")


def parse(number: int) -> object:
    return json.loads("[" + number * "1,")


def misname(number: int) -> object:
    return bytearray(number).nope  # type: ignore[attr-defined]


def outer(number: int) -> object:
    try:
        return parse(number)
    except ValueError as error:
        raise LookupError("outer") from error


# Parsing holds the GIL, and begins just after the loop has started the thread.
@pytest.mark.usefixtures("loop_may_block")
@pytest.mark.parametrize("fn", [decode, encode, parse, misname, outer])
def test_exceptions_do_not_keep_the_data_that_they_are_about(fn: Callable[[int], object]) -> None:
    """Python's own exceptions of these kinds do; all records of a long run would then take gigabytes."""
    # The first failure of a process fills the cache of source lines.
    list(PipelineBuilder().add_source([1]).pipe(fn).build(max_failures=1))
    pipeline = PipelineBuilder().add_source([1_000_000]).pipe(fn).build(max_failures=1)
    tracemalloc.start()
    try:
        assert list(pipeline) == []
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < 500_000
    finally:
        tracemalloc.stop()

    (record,) = pipeline.failures
    with pytest.raises(type(record.exception)) as caught:
        fn(1_000_000)
    # Python needs the data to show the byte in the message; the text of the traceback still has it.
    said = re.sub(
        r"(byte|character) \S+ in position (\d+)", r"\1s in position \2-\2", str(caught.value)
    )
    assert str(record.exception) == said
    assert str(caught.value) in record.traceback
    assert pickle.loads(pickle.dumps(record.exception)).args == record.exception.args


@pytest.mark.parametrize("fn", [decode, encode, parse])
def test_exceptions_keep_data_that_are_small(fn: Callable[[int], object]) -> None:
    pipeline = PipelineBuilder().add_source([100]).pipe(fn).build(max_failures=1)

    assert list(pipeline) == []
    with pytest.raises(ValueError, match=r"ordinal|invalid|Expecting") as caught:
        fn(100)
    assert repr(pipeline.failures[0].exception) == repr(caught.value)
    assert str(pipeline.failures[0].exception) == str(caught.value)


def test_exceptions_that_let_nothing_be_taken_off_do_no_harm() -> None:
    class FixedError(AttributeError):
        @property
        def obj(self) -> str:
            return "fixed"

        @obj.setter
        def obj(self, _: object) -> None:
            raise TypeError("read-only")

    def fail(_: int) -> int:
        raise FixedError("no such thing")

    pipeline = PipelineBuilder().add_source([1]).pipe(fail).build(max_failures=1)

    assert list(pipeline) == []
    assert str(pipeline.failures[0].exception) == "no such thing"


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (bytes(10_000_000), "<bytes of length 10000000>"),
        (memoryview(b"abc"), "<memoryview of length 3>"),
        ({"jpg": bytes(10_000_000)}, "{'jpg': <bytes of length 10000000>}"),
        ("short", "'short'"),
        (list(range(1000)), "[0, 1, 2, 3, 4, 5, ...]"),
    ],
    ids=["bytes", "memoryview", "bytes in a dictionary", "str", "list"],
)
def test_inputs_are_described_in_short(item: object, expected: str) -> None:
    assert record_failure("stage", item, ValueError()).input == expected


def test_the_repr_of_a_record_is_one_short_line() -> None:
    def fail(_: str) -> None:
        raise ValueError("no\nsuch " + 999 * "thing ")

    pipeline = PipelineBuilder().add_source(["a.jpg"]).pipe(fail).build(max_failures=1)
    assert list(pipeline) == []
    text = repr(pipeline.failures[0])
    assert text.startswith("<FailureRecord of 'fail': ValueError: no such thing thing")
    assert text.endswith("thing (input 'a.jpg')>")
    assert len(text) < 600
    # The messages of this library, with a URL or a path of usual length, stay whole.
    assert "a" * 400 in str(record_failure("stage", 0, ValueError("a" * 400)))
    assert str(record_failure("stage", 0, AssertionError())) == "'stage': AssertionError (input 0)"


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_a_repr_that_raises_does_no_harm(error: type[BaseException]) -> None:
    class Odd:
        def __repr__(self) -> str:
            raise error("no repr")

    short = record_failure("stage", Odd(), ValueError()).input

    # reprlib itself handles an Exception.
    assert short.startswith(
        "<Odd instance" if error is RuntimeError else "<Odd, whose repr raises Sys"
    )


def test_an_exception_that_cannot_be_printed_does_no_harm() -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no str")

    def fail(_: int) -> int:
        raise MuteError

    def source() -> Iterator[int]:
        yield 1
        raise MuteError

    with pytest.raises(PipelineFailure, match=r"'fail' failed too often.*was MuteError: <") as info:
        list(PipelineBuilder().add_source([1]).pipe(fail).build())
    assert isinstance(info.value.exceptions[0], MuteError)
    with pytest.raises(PipelineFailure, match="The source failed: MuteError: <"):
        list(PipelineBuilder().add_source(source()).build())


def test_a_rate_is_not_judged_by_the_first_calls() -> None:
    counters = StageCounters()
    failed: list[Any] = []
    log = FailureLog(lambda *what: failed.append(what), 0.1)
    log.watch("stage", counters, None, gets_all=True)
    record = record_failure("stage", 1, ValueError("bad"))
    counters.calls, counters.failures = 99, 98

    log.note(record)
    assert not failed
    counters.calls = 100
    log.note(record)
    assert "98 of 100 calls failed, and max_failures=0.1 allows 10%" in str(failed)


def test_the_stage_that_loses_most_of_the_items_is_named() -> None:
    """Two batches are more than three items."""
    builder = PipelineBuilder().add_source(range(20))
    builder.pipe(fail_when(lambda item: item < 3, "function"), name="items").aggregate(10)
    builder.pipe(fail_when(lambda _: True, "function"), name="batches")

    with pytest.raises(PipelineFailure, match="Stage 'batches' failed too often: 2 of 2"):
        list(builder.build())


def test_one_failed_batch_is_not_everything() -> None:
    """The stages before have had a hundred calls at that time, this one only one."""
    builder = PipelineBuilder().add_source(range(1280)).pipe(lambda item: item).aggregate(128)
    builder.pipe(fail_when(lambda batch: batch[0] == 0, "function"))

    assert len(list(builder.build())) == 9
    with pytest.raises(PipelineFailure, match=r"1 of 10 calls failed, .* max_failures=0\.05"):
        list(builder.build(max_failures=0.05))


@pytest.mark.parametrize("own", [None, 0.5])
def test_an_epoch_that_is_lost_is_an_error_however_good_those_before_were(
    own: float | None,
) -> None:
    is_gone = False

    def fail(item: int) -> int:
        if is_gone:
            raise OSError("the disk is gone")
        return item

    pipeline = PipelineBuilder().add_source(range(50)).pipe(fail, max_failures=own).build()
    with pipeline.auto_stop():
        for _ in range(2):
            assert len(list(pipeline)) == 50
        is_gone = True
        with pytest.raises(PipelineFailure, match="10 of 10 calls failed") as info:
            list(pipeline)
    assert isinstance(info.value.exceptions[0], OSError)


def test_a_failure_survives_pickling() -> None:
    pipeline = PipelineBuilder().add_source([1]).pipe(fail_when(lambda _: True, "function")).build()
    with pytest.raises(PipelineFailure) as caught:
        list(pipeline)

    copy = pickle.loads(pickle.dumps(caught.value))

    assert (str(copy), copy.stage, copy.__notes__) == (
        str(caught.value),
        "check",
        caught.value.__notes__,
    )
    assert isinstance(copy.exceptions[0], ValueError)


def test_a_failure_can_be_taken_apart_by_except_star() -> None:
    pipeline = PipelineBuilder().add_source([1]).pipe(fail_when(lambda _: True, "function")).build()
    groups = []
    try:
        list(pipeline)
    except* ValueError as group:
        groups.append(group)

    assert [(type(group), group.stage) for group in groups] == [(PipelineFailure, "check")]


def test_a_merged_source_that_fails_in_a_later_epoch() -> None:
    class FailsAtSecond:
        times = 0

        def __iter__(self) -> Iterator[int]:
            self.times += 1
            yield 1
            if self.times == 2:
                raise OSError("disk gone")

    parts = [PipelineBuilder().add_source(items) for items in (FailsAtSecond(), [2, 3])]
    pipeline = PipelineBuilder().merge(*parts).build()
    with pipeline.auto_stop():
        assert sorted(pipeline) == [1, 2, 3]
        with pytest.raises(PipelineFailure, match="disk gone"):
            list(pipeline.get_iterator(timeout=WAIT))
