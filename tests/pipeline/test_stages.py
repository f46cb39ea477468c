"""Results of each kind of stage, and their order."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from effort import each

from spdl_media.pipeline import (
    PipelineBuilder,
    PipelineError,
)


def double(item: int) -> int:
    return 2 * item


async def double_async(item: int) -> int:
    await asyncio.sleep(0)
    return 2 * item


def thrice(item: int) -> Iterator[int]:
    yield from (3 * item, 3 * item + 1, 3 * item + 2)


async def thrice_async(item: int) -> AsyncIterator[int]:
    for value in thrice(item):
        await asyncio.sleep(0)
        yield value


def run(source: Any, *stages: Callable[[PipelineBuilder[Any]], object]) -> list[Any]:
    builder = PipelineBuilder[Any]().add_source(source)
    for stage in stages:
        stage(builder)
    return list(builder.add_sink(3).build(num_threads=4))


@pytest.mark.parametrize("fn", [double, double_async])
@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize("order", ["completion", "input"])
def test_a_function_gives_one_result_an_item(fn: Any, concurrency: int, order: Any) -> None:
    result = run(range(200), lambda b: b.pipe(fn, concurrency=concurrency, output_order=order))

    expected = [2 * item for item in range(200)]
    if concurrency > 1 and order == "completion":
        result.sort()
    assert result == expected


@pytest.mark.parametrize("fn", [thrice, thrice_async])
@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize("order", ["completion", "input"])
def test_a_generator_gives_several(fn: Any, concurrency: int, order: Any) -> None:
    result = run(range(100), lambda b: b.pipe(fn, concurrency=concurrency, output_order=order))

    if concurrency > 1 and order == "completion":
        result.sort()
    assert result == list(range(300))


def test_completion_order_lets_quick_items_pass_slow_ones() -> None:
    quick_is_out = threading.Event()

    def call(item: str) -> str:
        if item == "slow":
            assert quick_is_out.wait(10)
        return item

    pipeline = PipelineBuilder().add_source(["slow", "quick"]).pipe(call, concurrency=2).build()
    with pipeline.auto_stop():
        assert pipeline.get_item(timeout=10) == "quick"
        quick_is_out.set()
        assert pipeline.get_item(timeout=10) == "slow"


@pytest.mark.parametrize("kind", ["function", "generator"])
def test_input_order_keeps_quick_items_behind_slow_ones(kind: str) -> None:
    second_is_done = threading.Event()

    def call(item: int) -> int:
        if item == 0:
            assert second_is_done.wait(10)
        else:
            second_is_done.set()
        return item

    def generate(item: int) -> Iterator[int]:
        yield 10 * item
        yield 10 * item + call(item)

    fn: Any = call if kind == "function" else generate
    result = run(range(3), lambda b: b.pipe(fn, concurrency=2, output_order="input"))

    assert result == ([0, 1, 2] if kind == "function" else [0, 0, 10, 11, 20, 22])


def test_none_drops_the_item() -> None:
    assert run(range(6), lambda b: b.pipe(lambda i: i if i % 2 else None)) == [1, 3, 5]


def test_none_of_a_generator_is_dropped() -> None:
    def generate(item: int) -> Iterator[int | None]:
        yield item
        yield None

    assert run(range(3), lambda b: b.pipe(generate)) == [0, 1, 2]


def test_none_of_the_source_is_an_item() -> None:
    assert run([None, 1], lambda b: b.pipe(repr)) == ["None", "1"]
    assert run([None, 1]) == [None, 1]


def test_falsy_results_are_results() -> None:
    assert run([0, "", False]) == [0, "", False]
    assert run([1, 2], lambda b: b.pipe(lambda _: 0)) == [0, 0]


def test_a_coroutine_that_a_plain_function_returns_fails_with_the_remedy() -> None:
    def load(item: int) -> Any:
        return double_async(item)

    builder = PipelineBuilder().add_source([1, 2]).pipe(load)
    pipeline = builder.build(max_failures=math.inf)

    assert list(pipeline) == []
    assert pipeline.failure_counts == {"load": 2}
    error = pipeline.failures[0].exception
    assert isinstance(error, TypeError)
    assert "stage 'load' returned a coroutine" in str(error)
    assert "async def" in str(error)


def test_an_exception_that_is_returned_is_a_result() -> None:
    error = ValueError("a value")

    assert run([1], lambda b: b.pipe(lambda _: error)) == [error]


@pytest.mark.parametrize(
    ("drop_last", "expected"), [(False, [[0, 1], [2, 3], [4]]), (True, [[0, 1], [2, 3]])]
)
def test_aggregate_makes_lists(drop_last: bool, expected: list[list[int]]) -> None:
    assert run(range(5), lambda b: b.aggregate(2, drop_last=drop_last)) == expected


class ByWeight:
    """An aggregator that completes a group when its sum is ten or more."""

    def __init__(self) -> None:
        self.group: list[int] = []

    def accumulate(self, item: int) -> list[int] | None:
        self.group.append(item)
        return self.flush() if sum(self.group) >= 10 else None

    def flush(self) -> list[int] | None:
        group, self.group = self.group, []
        return group or None


@pytest.mark.parametrize("drop_last", [False, True])
def test_an_aggregator_of_the_callers_decides_itself(drop_last: bool) -> None:
    aggregator = ByWeight()
    builder = PipelineBuilder().add_source(range(1, 8)).aggregate(aggregator, drop_last=drop_last)
    pipeline = builder.build()

    assert list(pipeline) == [[1, 2, 3, 4], [5, 6], [7]][: 2 if drop_last else 3]
    assert aggregator.group == []
    # An item that waits in its group is not dropped.
    assert pipeline.statistics().stages[0].dropped == (1 if drop_last else 0)


def test_an_aggregator_that_cannot_be_copied_is_refused() -> None:
    class Locked(ByWeight):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()

    pipeline = PipelineBuilder().add_source([1]).aggregate(Locked()).build()
    with pytest.raises(PipelineError, match=r"'Locked' cannot be copied.*each run.*__deepcopy__"):
        list(pipeline)


def test_an_aggregator_flushes_in_each_epoch() -> None:
    builder = PipelineBuilder().add_source(range(1, 8)).aggregate(ByWeight())
    pipeline = builder.build()

    with pipeline.auto_stop():
        for _ in range(3):
            assert list(pipeline) == [[1, 2, 3, 4], [5, 6], [7]]


def test_an_aggregator_whose_flush_raises_fails_no_item() -> None:
    class Full(ByWeight):
        def flush(self) -> list[int] | None:
            raise OSError("the disk is full")

    told = []
    builder = PipelineBuilder().add_source([1, 2]).aggregate(Full())
    pipeline = builder.build(max_failures=1, on_failure=lambda _, item: told.append(repr(item)))

    assert list(pipeline) == []
    (record,) = pipeline.failures
    assert str(record.exception) == "the disk is full"
    assert [record.input, *told] == 2 * ["<no item: flush() at the end>"]


@pytest.mark.parametrize("kind", [list, tuple, iter, set])
def test_disaggregate_takes_groups_apart(kind: Any) -> None:
    groups = [[1, 2], [], [3], [4, 5, 6]]

    assert run(map(kind, groups), lambda b: b.disaggregate()) == [1, 2, 3, 4, 5, 6]


def test_disaggregate_keeps_groups_of_different_kinds_in_order() -> None:
    assert run([iter([1, 2]), [3, 4], iter([5])], lambda b: b.disaggregate()) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("base", [list, tuple])
def test_groups_of_a_class_of_the_callers_are_iterated_in_threads(base: Any) -> None:
    names = set()

    class Lazy(base):  # type: ignore[misc]  # the base class is a parameter
        def __iter__(self) -> Iterator[int]:
            names.add(threading.current_thread().name)
            if len(self) == 1:
                raise OSError("the disk is gone")
            return super().__iter__()  # type: ignore[no-any-return]

    groups = [[1, 2], Lazy([3]), Lazy([4, 5])]
    pipeline = PipelineBuilder().add_source(groups).disaggregate().build(num_threads=1)

    assert list(pipeline) == [1, 2, 4, 5]
    assert str(pipeline.failures[0].exception) == "the disk is gone"
    assert names == {"spdl_media worker-1"}


def test_what_cannot_be_taken_apart_fails_alone() -> None:
    pipeline = PipelineBuilder().add_source([[1], 2, [3], [4]]).disaggregate().build()

    assert list(pipeline) == [1, 3, 4]
    assert pipeline.failure_counts == {"disaggregate": 1}


def test_merge_takes_from_all_pipelines() -> None:
    parts = [PipelineBuilder().add_source(range(n, n + 50)).pipe(double) for n in (0, 100, 200)]

    result = list(PipelineBuilder().merge(*parts).pipe(double).build())

    assert sorted(result) == [4 * i for n in (0, 100, 200) for i in range(n, n + 50)]
    assert [i for i in result if i < 400] == [4 * i for i in range(50)]


def test_merged_pipelines_run_in_several_epochs() -> None:
    parts = [PipelineBuilder().add_source([n]) for n in range(3)]
    pipeline = PipelineBuilder().merge(*parts).build()

    with pipeline.auto_stop():
        for _ in range(3):
            assert sorted(pipeline) == [0, 1, 2]


def test_items_go_down_the_path_that_the_router_names() -> None:
    paths = [PipelineBuilder().pipe(double), PipelineBuilder().pipe(thrice), PipelineBuilder()]

    result = run(range(9), lambda b: b.path_variants(lambda item: item % 3, paths))

    assert sorted(result) == sorted(
        [0, 6, 12] + [v for i in (1, 4, 7) for v in (3 * i, 3 * i + 1, 3 * i + 2)] + [2, 5, 8]
    )


def test_paths_keep_epochs_apart() -> None:
    paths = [PipelineBuilder().pipe(double).aggregate(2), PipelineBuilder().pipe(thrice)]
    pipeline = PipelineBuilder().add_source(range(6)).path_variants(lambda i: i % 2, paths).build()

    with pipeline.auto_stop():
        for _ in range(3):
            result = list(pipeline)
            assert [one for one in result if isinstance(one, list)] == [[0, 4], [8]]
            assert len(result) == 2 + 9


@pytest.mark.parametrize("kind", [int, bool, np.int64, np.uint8])
def test_a_router_may_return_any_kind_of_integer(kind: Any) -> None:
    paths = [PipelineBuilder(), PipelineBuilder().pipe(double)]

    result = run(range(6), lambda b: b.path_variants(lambda item: kind(item % 2), paths))

    assert sorted(result) == [0, 2, 2, 4, 6, 10]


@each("index", [2, -1, "0", None, 1.0, np.int64(2)])
def test_a_router_must_name_a_path(index: Any) -> None:
    paths = [PipelineBuilder(), PipelineBuilder()]
    pipeline = (
        PipelineBuilder()
        .add_source(range(10))
        .path_variants(lambda item: index if item == 5 else 0, paths, name="route")
        .build()
    )

    assert len(list(pipeline)) == 9
    (record,) = pipeline.failures
    assert record.stage == "route"
    assert isinstance(record.exception, IndexError)
    assert str(record.exception) == (
        f"the router returned {index!r}; it must return the index of one of the 2 paths, from 0 to 1"
    )


def test_an_executor_of_the_callers_runs_functions_and_generators() -> None:
    names = []

    def note(item: int) -> int:
        names.append(threading.current_thread().name)
        return item

    def generate(item: int) -> Iterator[int]:
        for value in thrice(item):
            yield note(value)

    with ThreadPoolExecutor(2, thread_name_prefix="mine") as executor:
        result = run(
            range(50),
            lambda b: b.pipe(note, executor=executor, output_order="input", concurrency=2),
            lambda b: b.pipe(generate, executor=executor, output_order="input", concurrency=2),
        )

        assert result == list(range(150))
        assert all(name.startswith("mine") for name in names)
        assert executor.submit(double, 3).result() == 6


def test_an_executor_that_was_shut_down_ends_the_run() -> None:
    executor = ThreadPoolExecutor(1)

    def shut_down(item: int) -> Iterator[int]:
        executor.shutdown(wait=False)
        yield item

    pipeline = PipelineBuilder().add_source(range(100)).pipe(shut_down, executor=executor).build()

    with pytest.raises(
        RuntimeError, match="ThreadPoolExecutor of stage 'shut_down' takes no more items"
    ):
        list(pipeline)


def test_coroutines_may_use_threads() -> None:
    async def call(item: int) -> int:
        return await asyncio.to_thread(double, item)

    assert run(range(50), lambda b: b.pipe(call, concurrency=8, output_order="input")) == [
        2 * item for item in range(50)
    ]


def test_many_stages() -> None:
    result = run(range(50), *[lambda b: b.pipe(lambda i: i + 1)] * 80)

    assert result == list(range(80, 130))


def test_a_quick_path_does_not_run_ahead_into_the_next_epoch() -> None:
    gate = threading.Event()

    def slow(item: int) -> int:
        assert gate.wait(20)
        return item

    paths = [PipelineBuilder().pipe(slow), PipelineBuilder()]
    builder = PipelineBuilder().add_source([1, 3, 0, 2], continuous=True)
    pipeline = builder.path_variants(lambda item: item % 2, paths).build()
    with pipeline.auto_stop():
        assert [pipeline.get_item(timeout=100) for _ in range(2)] == [1, 3]
        with pytest.raises(TimeoutError):
            pipeline.get_item(timeout=0.1)
        gate.set()
        assert list(pipeline) == [0, 2]
        assert sorted(pipeline) == [0, 1, 2, 3]
