"""Running what the builder has built: options, and executors in a running pipeline."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pool_functions import die_at_three, double, sleep_if_zero, twice

from spdl_media.pipeline import (
    FailureRecord,
    InterpreterPoolExecutorConfig,
    PathVariantsConfig,
    PipeConfig,
    Pipeline,
    PipelineBuilder,
    PipelineConfig,
    PipelineError,
    PipelineFailure,
    PoolBroken,
    ProcessPoolExecutorConfig,
    SinkConfig,
    SourceConfig,
    TaskHook,
    ThreadPoolExecutorConfig,
    WorkerDied,
)


def fail(item: int) -> int:
    raise LookupError(f"no item {item}")


def source(number: int = 10) -> PipelineBuilder[Any]:
    return PipelineBuilder().add_source(range(number))


def run(builder: PipelineBuilder[Any], **options: Any) -> list[Any]:
    pipeline = builder.build(**options)
    with pipeline.auto_stop():
        return list(pipeline)


def get_pipeline(src: Iterable[Any], num_workers: int, mode: str) -> Pipeline[...]:  # type: ignore[misc]
    """Annotate with ``Pipeline[...]``, as an SPDL program does that evaluates annotations at run time."""
    executor: Any = ThreadPoolExecutor(num_workers)
    if mode == "mp":
        executor = ProcessPoolExecutor(num_workers, mp_context=get_context("spawn"))
    return (
        PipelineBuilder()
        .add_source(src)
        .pipe(double, concurrency=num_workers, executor=executor)
        .add_sink(buffer_size=1)
        .build(num_threads=1)
    )


@pytest.mark.parametrize("mode", ["mt", "mp"])
def test_stages_with_executors_do_not_count_for_num_threads(mode: str) -> None:
    assert Pipeline[...] is not None  # type: ignore[misc]
    pipeline = get_pipeline(range(20), 2, mode)
    with pipeline.auto_stop():
        assert sorted(pipeline) == list(range(0, 40, 2))
    (stage,) = pipeline.config.pipes
    assert isinstance(stage, PipeConfig)
    stage.executor.shutdown()  # type: ignore[union-attr]


def test_building_twice_gives_two_pipelines() -> None:
    builder = source(100).pipe(double).aggregate(10)
    one, two = builder.build(), builder.build()
    with one.auto_stop(), two.auto_stop():
        both = list(zip(one, two, strict=True))
    assert both == [(batch, batch) for batch, _ in both]
    assert len(both) == 10


def test_a_pipeline_is_printed_and_drawn_as_its_definition() -> None:
    builder = source().pipe(double)
    pipeline = builder.build()
    config = builder.add_sink(3).get_config()
    assert str(pipeline) == str(config)
    assert pipeline.to_mermaid() == config.to_mermaid()


def test_the_warning_of_too_few_threads_points_at_the_caller() -> None:
    with pytest.warns(UserWarning, match=r"num_threads=2.*'double' \(concurrency=3\)") as caught:
        source().pipe(double, concurrency=3).build(num_threads=2)
    assert Path(caught[0].filename).samefile(__file__)


def test_options_of_build_reach_the_run() -> None:
    failed: list[tuple[str, int]] = []
    made: list[str] = []

    def remember(record: FailureRecord, item: int) -> None:
        failed.append((record.stage, item))

    def make_hook(stage: str) -> TaskHook:
        made.append(stage)
        return TaskHook()

    builder = source(3).pipe(fail).pipe(double)
    options: dict[str, Any] = {"on_failure": remember, "task_hook_factory": make_hook}
    assert run(builder, max_failures=math.inf, **options) == []
    assert failed == [("fail", 0), ("fail", 1), ("fail", 2)]
    assert made == ["fail", "double"]
    with pytest.raises(PipelineFailure, match="fail"):
        run(builder, max_failures=0)


@pytest.mark.parametrize("limit", [-2, 1.5, "1", True])
def test_a_bad_limit_of_failures_is_refused(limit: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="max_failures"):
        source().build(max_failures=limit)


def test_definitions_by_hand_may_have_equal_names() -> None:
    paths = [[PipeConfig(double)], [PipeConfig(double)]]
    stages = [PipeConfig(double), PathVariantsConfig(lambda item: item % 2, paths)]
    config = PipelineConfig(SourceConfig(range(4)), stages, SinkConfig(3))
    pipeline: Pipeline[int] = Pipeline(config)
    with pipeline.auto_stop():
        assert sorted(pipeline) == [0, 4, 8, 12]
    assert set(pipeline.failure_counts) >= {"double", "double_2", "double_3"}


@pytest.mark.parametrize("order", ["completion", "input"])
def test_processes_of_ours_keep_order_and_share_nothing(order: Any) -> None:
    executor = ProcessPoolExecutorConfig()
    builder = source(50).pipe(double, concurrency=2, executor=executor, output_order=order)
    for _ in range(2):
        items = run(builder)
        assert sorted(items) == list(range(0, 100, 2))
        assert order == "completion" or items == sorted(items)


def test_the_death_of_a_worker_costs_one_item() -> None:
    builder = source(20).pipe(die_at_three, concurrency=2, executor=ProcessPoolExecutorConfig())
    pipeline = builder.build()
    with pipeline.auto_stop():
        items = list(pipeline)
    assert sorted(items) == [item for item in range(20) if item != 3]
    (record,) = pipeline.failures
    assert isinstance(record.exception, WorkerDied)
    assert record.input == "3"
    assert pipeline.failure_counts["die_at_three"] == 1


def test_a_callers_pool_that_breaks_ends_the_run() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        pipeline = source(20).pipe(die_at_three, executor=executor).build()
        with (
            pipeline.auto_stop(),
            pytest.raises(PipelineFailure, match=r"die_at_three") as info,
        ):
            list(pipeline)
    assert isinstance(info.value.exceptions[0], PoolBroken)
    assert "takes no more items" in str(info.value.exceptions[0])
    assert info.value.stage == "die_at_three"


def test_a_callers_pool_that_was_shut_down_ends_the_run() -> None:
    executor = ThreadPoolExecutor(1)
    executor.shutdown()
    with pytest.raises(PipelineFailure, match=r"'double'") as info:
        run(source().pipe(double, executor=executor))
    assert "cannot schedule new futures" in str(info.value.exceptions[0])


def test_an_initializer_that_fails_ends_the_run() -> None:
    executor = ProcessPoolExecutorConfig(initializer=fail, initargs=(7,))
    with pytest.raises(PipelineFailure, match="'double'") as info:
        run(source().pipe(double, executor=executor), max_failures=math.inf)
    assert isinstance(info.value.exceptions[0], PoolBroken)
    assert "initializer failed: LookupError: no item 7" in str(info.value.exceptions[0])


def test_a_timeout_in_a_process_kills_its_worker(tmp_path: Path) -> None:
    executor = ProcessPoolExecutorConfig(1)
    builder = source(2).pipe(sleep_if_zero, executor=executor, timeout=2.0)
    pipeline = builder.build(max_failures=1)
    with pipeline.auto_stop():
        assert list(pipeline) == [1]
    assert [type(record.exception) for record in pipeline.failures] == [TimeoutError]


def test_generators_run_in_threads_of_their_own_and_of_the_caller() -> None:
    with ThreadPoolExecutor(2) as executor:
        for threads in (executor, ThreadPoolExecutorConfig()):
            builder = source(5).pipe(twice, executor=threads, output_order="input")
            assert run(builder) == [item for item in range(5) for _ in range(2)]


@pytest.mark.skipif(sys.version_info < (3, 14), reason="came with CPython 3.14")
def test_sub_interpreters_run_pure_python_and_say_what_they_cannot() -> None:
    executor = InterpreterPoolExecutorConfig()
    assert run(source(5).pipe(math.factorial, executor=executor)) == [1, 1, 2, 6, 24]
    with pytest.raises(PipelineFailure, match="sqrt") as info:
        run(source(5).pipe(np.sqrt, executor=executor), max_failures=0)
    assert type(info.value.exceptions[0]) is PipelineError
    assert "cannot run in a sub-interpreter" in str(info.value.exceptions[0])
