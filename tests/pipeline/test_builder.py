"""Definitions made by the builder, and its error messages with their remedies."""

from __future__ import annotations

import functools
import inspect
import math
import pickle
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from effort import each

from spdl_media.pipeline import (
    AggregateConfig,
    DisaggregateConfig,
    MergeConfig,
    PathVariantsConfig,
    PipeConfig,
    Pipeline,
    PipelineBuilder,
    PipelineConfig,
    PipelineError,
    ProcessPoolExecutorConfig,
    SinkConfig,
    SourceConfig,
    ThreadPoolExecutorConfig,
)
from spdl_media.pipeline.builder import warn_of_idle_concurrency
from spdl_media.pipeline.executors import kind_of, name_of


def double(item: int) -> int:
    return 2 * item


async def double_async(item: int) -> int:
    return 2 * item


def twice(item: int) -> Iterator[int]:
    yield item
    yield item


async def twice_async(item: int) -> AsyncIterator[int]:
    yield item
    yield item


class Pairs:
    def __init__(self) -> None:
        self.items: list[Any] = []

    def accumulate(self, item: Any) -> list[Any] | None:
        self.items.append(item)
        return None

    def flush(self) -> list[Any]:
        return self.items


class Scale:
    def __call__(self, item: int) -> int:
        return item

    def method(self, item: int) -> int:
        return item

    async def later(self, item: int) -> int:
        return item


class ScaleLater:
    async def __call__(self, item: int) -> int:
        return item


def builder() -> PipelineBuilder[Any]:
    return PipelineBuilder().add_source(range(4))


def test_a_chain_becomes_a_definition() -> None:
    chain = (
        PipelineBuilder()
        .add_source(range(4), continuous=True)
        .pipe(double, concurrency=3, name="x2", output_order="input", timeout=2.5, max_failures=7)
        .aggregate(2, drop_last=True)
        .disaggregate()
        .add_sink(5)
    )
    assert chain.get_config() == PipelineConfig(
        SourceConfig(range(4), continuous=True),
        (
            PipeConfig(double, "x2", 3, None, "input", 7, 2.5),
            AggregateConfig(2, "aggregate(2)", drop_last=True),
            DisaggregateConfig("disaggregate"),
        ),
        SinkConfig(5),
    )


def test_calls_may_stand_one_after_the_other() -> None:
    one = PipelineBuilder()
    one.add_source(range(4))
    one.pipe(double)
    one.add_sink()
    assert one.get_config() == builder().pipe(double).add_sink(3).get_config()


def test_a_definition_does_not_change_with_its_builder() -> None:
    one = builder().pipe(double)
    before = one.get_config()
    one.pipe(twice).add_sink()
    assert [stage.name for stage in before.pipes] == ["double"]
    assert before.sink is None


def test_builders_and_subscripts_work_at_run_time() -> None:
    assert PipelineBuilder[int].__origin__ is PipelineBuilder  # type: ignore[attr-defined]
    assert PipelineBuilder[...]  # type: ignore[misc]


def test_numbers_may_be_those_of_numpy() -> None:
    two: Any = np.int64(2)
    built = builder().pipe(double, concurrency=two).aggregate(two).add_sink(two)
    assert (
        built.get_config()
        == builder().pipe(double, concurrency=2).aggregate(2).add_sink(2).get_config()
    )
    assert isinstance(built.get_config().pipes[1].aggregator, int)  # type: ignore[union-attr]


def test_names_come_from_functions_and_are_told_apart() -> None:
    paths = [PipelineBuilder().pipe(double), [PipeConfig(Scale().method)], double]
    merged = PipelineBuilder().add_source([1]).pipe(double)
    config = (
        builder()
        .pipe(double)
        .merge(merged)
        .pipe(functools.partial(double))
        .pipe(lambda item: item)
        .pipe(Scale())
        .path_variants(double, paths)
        .aggregate(3)
        .aggregate(3)
        .aggregate(Pairs())
        .get_config()
    )
    assert [stage.name for stage in config.functions()] == [
        *("double", "double_2", "double_3", "lambda", "Scale"),
        *("double_5", "method", "double_6"),
    ]
    assert [stage.name for stage in config.pipes] == [
        *("double_3", "lambda", "Scale", "double_4", "aggregate(3)", "aggregate(3)_2", "Pairs"),
    ]


def test_merge_takes_the_place_of_a_source_or_joins_what_there_is() -> None:
    one, two = builder().pipe(double), builder().pipe(twice)
    expected = MergeConfig((one.get_config(), two.get_config()))
    assert PipelineBuilder().merge(one, two.get_config()).get_config().src == expected
    joined = builder().pipe(double).merge(two).add_sink().get_config()
    assert joined == PipelineConfig(expected, (), SinkConfig(3))


def test_merge_leaves_out_the_sinks_of_what_it_merges() -> None:
    one, two = builder().pipe(double).add_sink(2), builder().pipe(twice)
    merged = PipelineBuilder().merge(one, two)
    assert merged.get_config() == PipelineBuilder().merge(builder().pipe(double), two).get_config()
    assert sorted(merged.build()) == sorted([*one.build(), *two.build()])


def test_definitions_take_the_keywords_and_lists_of_spdl() -> None:
    src = SourceConfig(source=range(3))
    config = PipelineConfig(src=src, pipes=[PipeConfig(double)], sink=SinkConfig(buffer_size=2))
    assert config.pipes == (PipeConfig(double),)
    assert config == pickle.loads(pickle.dumps(config))
    whole = PipelineConfig(src=MergeConfig(pipeline_configs=[config]), sink=SinkConfig(3))
    assert list(Pipeline(whole)) == [0, 2, 4]


def test_paths_are_builders_stages_or_functions() -> None:
    config = builder().path_variants(
        lambda item: item % 3, [PipelineBuilder().pipe(str), [PipeConfig(int)], float], name="by 3"
    )
    (stage,) = config.get_config().pipes
    assert isinstance(stage, PathVariantsConfig)
    assert stage.name == "by 3"
    assert stage.paths == ((PipeConfig(str),), (PipeConfig(int),), (PipeConfig(float),))


@each(
    "fn, kind",
    [
        (double, "function"),
        (double_async, "async"),
        (twice, "generator"),
        (twice_async, "async_generator"),
        (functools.partial(functools.partial(twice)), "generator"),
        (functools.partial(double_async), "async"),
        (Scale(), "function"),
        (ScaleLater(), "async"),
        (Scale().method, "function"),
        (Scale().later, "async"),
        (functools.partial(ScaleLater()), "async"),
        (len, "function"),
        (str, "function"),
        (functools.lru_cache(double), "function"),
    ],
)
def test_kinds_of_functions(fn: Callable[..., Any], kind: str) -> None:
    assert kind_of(fn) == kind


def test_a_callable_without_a_name_is_called_like_its_class() -> None:
    assert name_of(functools.partial(Scale())) == "Scale"
    assert name_of(functools.lru_cache(double)) == "double"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "a.jpg",
            r"must be an iterable of items, not a str\. Pass a single item in a list: \[item\]",
        ),
        (b"data", r"must be an iterable of items, not a bytes"),
        (twice, r"must be an iterable or async iterable, not function\. Call it: twice\(\)"),
        (7, r"must be an iterable or async iterable, not int"),
        (list, r"not the class list\. Call it: list\(\)"),
    ],
)
def test_sources_that_cannot_be_iterated(source: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        PipelineBuilder().add_source(source)


def test_async_iterables_are_sources() -> None:
    source = twice_async(1)
    assert PipelineBuilder().add_source(source).get_config().src == SourceConfig(source)


@each(
    "build, message",
    [
        (lambda: PipelineBuilder().get_config(), r"has no source. Call add_source\(\.\.\.\) first"),
        (lambda: PipelineBuilder().pipe(double).build(), r"has no source"),
        (lambda: builder().add_source([1]), r"has a source already.*join them with merge\(\)"),
        (lambda: builder().add_sink().add_sink(), r"A second add_sink\(\) cannot follow"),
        (
            lambda: builder().add_sink().pipe(double),
            r"pipe\(\) cannot follow add_sink\(\).*to the end",
        ),
        (lambda: builder().add_sink().aggregate(2), r"aggregate\(\) cannot follow"),
        (lambda: builder().add_sink().disaggregate(), r"disaggregate\(\) cannot follow"),
        (lambda: builder().add_sink().merge(builder()), r"merge\(\) cannot follow"),
        (lambda: builder().add_sink(0), r"buffer_size of the sink must be at least 1, not 0"),
        (lambda: PipelineBuilder().merge(), r"merge\(\) needs at least one pipeline, got none"),
        (lambda: builder().merge(PipelineBuilder()), r"has no source"),
        (
            lambda: builder().merge(PipelineBuilder().add_source([1], continuous=True)),
            r"continuous source cannot be merged.*Leave out continuous=True",
        ),
        (lambda: builder().aggregate(0), r"number of items to aggregate must be at least 1, not 0"),
        (lambda: builder().path_variants(double, []), r"needs at least one path, got none"),
        (lambda: builder().path_variants(double, [builder()]), r"Leave out its add_source\(\)"),
        (
            lambda: builder().path_variants(double, [PipelineBuilder().add_sink()]),
            r"Leave out its add_source\(\), merge\(\) and add_sink\(\)",
        ),
        (
            lambda: builder().path_variants(double_async, [double]),
            r"must be a plain function, not of kind 'async'. Call that one in a pipe\(\) before, which",
        ),
        (lambda: builder().build(num_threads=0), r"num_threads must be at least 1, not 0"),
    ],
)
def test_bad_chains_are_refused_with_the_remedy(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


@each(
    "options, error, message",
    [
        (
            {"concurrency": 0},
            ValueError,
            "concurrency of stage 'double' must be at least 1, not 0. 1 runs",
        ),
        (
            {"concurrency": True},
            TypeError,
            "concurrency of stage 'double' must be an int, not True",
        ),
        ({"concurrency": 2.0}, TypeError, "must be an int, not 2.0"),
        ({"output_order": "random"}, ValueError, r"must be 'completion' or 'input', not 'random'"),
        ({"timeout": 0}, ValueError, "timeout of stage 'double' must be above 0 seconds, not 0"),
        ({"timeout": math.nan}, ValueError, "must be above 0 seconds, not nan"),
        ({"timeout": "1"}, TypeError, "must be a number of seconds or None, not '1'"),
        (
            {"max_failures": -2},
            ValueError,
            r"max_failures of stage 'double' .*not -2\. -1 or math.inf allows",
        ),
        ({"max_failures": 1.5}, ValueError, r"rate from 0.0 to 1.0, not 1.5"),
        ({"max_failures": math.nan}, ValueError, r"rate from 0.0 to 1.0, not nan"),
        ({"max_failures": "5%"}, TypeError, r"a float or Fraction \(a rate\) or None, not '5%'"),
        ({"name": 3}, TypeError, "name of a stage must be a str, not 3"),
        (
            {"executor": 4},
            TypeError,
            r"executor of stage 'double' must be .*Executor or one of.*not int",
        ),
        ({"executor": ThreadPoolExecutor}, TypeError, "not the class ThreadPoolExecutor"),
    ],
)
def test_bad_options_of_a_stage(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        builder().pipe(double, **options)


@each("limit", [0, 5, 0.0, 0.05, 1.0, math.inf])
def test_limits_of_failures_that_are_allowed(limit: float) -> None:
    assert PipeConfig(double, max_failures=limit).max_failures == limit


@each(
    "call, message",
    [
        (
            lambda: builder().pipe(5),
            r"The function of pipe\(\) must be a function or another callable, not int",
        ),
        (
            lambda: builder().pipe(twice(1)),  # type: ignore[arg-type]
            r"must be a function or another callable, not generator",
        ),
        (lambda: builder().aggregate(2.0), r"aggregate\(\) takes a number of items, or.*not float"),
        (lambda: builder().aggregate(Pairs), r"not the class Pairs"),
        (lambda: builder().aggregate(True), r"must be an int, not True"),
        (
            lambda: builder().path_variants(3, [double]),
            r"router of path_variants\(\) must be a function",
        ),
        (
            lambda: builder().path_variants(double, ["double"]),
            r"a sequence of stages, not str",
        ),
        (
            lambda: builder().path_variants(double, [[double]]),
            r"must consist of stages, not function",
        ),
        (lambda: builder().path_variants(double, [3]), r"a sequence of stages, not int"),
        (lambda: builder().merge([1, 2]), r"merge\(\) takes builders, .*not list\. Make a pipe"),
        (lambda: builder().add_sink("3"), r"buffer_size of the sink must be an int, not '3'"),
        (lambda: builder().build(num_threads=1.5), r"num_threads must be an int, not 1.5"),
        (
            lambda: builder().build(num_thread=2),
            r"argument 'num_thread'. Did you mean 'num_threads'\?",
        ),
        (lambda: PipelineConfig([1]), r"source of a pipeline must be a SourceConfig or.*not list"),
        (
            lambda: PipelineConfig(SourceConfig([]), "double"),
            r"must be a sequence of stages, not str",
        ),
        (
            lambda: PipelineConfig(SourceConfig([]), (), 3),
            r"sink of a pipeline must be a SinkConfig",
        ),
        (lambda: MergeConfig((builder(),)), r"MergeConfig their definitions, not PipelineBuilder"),
        (lambda: ProcessPoolExecutorConfig(initargs=[1]), r"initargs of Proc.* must be a tuple"),
        (
            lambda: ProcessPoolExecutorConfig(initializer=1),
            r"initializer of Process.*function.*not int",
        ),
    ],
)
def test_values_of_the_wrong_type(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


def test_coroutines_are_refused_as_stages() -> None:
    coroutine = double_async(1)
    with pytest.raises(TypeError, match="must be a function or another callable, not coroutine"):
        builder().pipe(coroutine)  # type: ignore[arg-type]
    coroutine.close()


@pytest.fixture
def process_pool() -> Iterator[Executor]:
    with ProcessPoolExecutor(1) as executor:  # starts no process before its first task
        yield executor


@pytest.mark.parametrize("fn", [twice, functools.partial(twice)])
def test_generators_do_not_run_in_processes(fn: Any, process_pool: Executor) -> None:
    message = (
        r"'twice' is a generator, which cannot run in a ProcessPoolExecutor.*\.disaggregate\(\)"
    )
    for executor in (process_pool, ProcessPoolExecutorConfig()):
        with pytest.raises(ValueError, match=message):
            builder().pipe(fn, executor=executor)


def test_generators_run_in_threads_of_any_pool() -> None:
    with ThreadPoolExecutor(1) as executor:
        for threads in (executor, ThreadPoolExecutorConfig()):
            assert builder().pipe(twice, executor=threads).get_config()


@pytest.mark.parametrize("fn", [double_async, twice_async])
def test_async_functions_take_no_executor(fn: Any) -> None:
    with pytest.raises(ValueError, match=r"asynchronous, so it runs on the event loop.*Leave out"):
        builder().pipe(fn, executor=ThreadPoolExecutorConfig())


def test_a_function_for_processes_that_cannot_be_pickled() -> None:
    with pytest.raises(
        PipelineError,
        match=r"The function of stage 'lambda' cannot be pickled, which a ProcessPoolExecutorConfig "
        r"needs: .*lambdas, functions within functions",
    ):
        builder().pipe(lambda item: item, executor=ProcessPoolExecutorConfig())


def test_process_pools_are_checked() -> None:
    with pytest.raises(ValueError, match=r"mp_context of Process.* .*'spawn'.*, not 'thread'"):
        ProcessPoolExecutorConfig(mp_context="thread")
    with pytest.raises(ValueError, match=r"max_workers of Process.* at least 1, not 0"):
        ProcessPoolExecutorConfig(max_workers=0)


def test_concurrency_above_the_number_of_threads_warns_with_both() -> None:
    config = (
        builder()
        .pipe(double, concurrency=16)
        .pipe(twice, concurrency=3)
        .pipe(double_async, concurrency=32)
        .pipe(str, concurrency=32, executor=ThreadPoolExecutorConfig())
        .pipe(int, concurrency=2)
        .get_config()
    )
    with pytest.warns(
        UserWarning,
        match=r"No more than num_threads=2 .*'double' \(concurrency=16\), 'twice' \(concurrency=3\)\. "
        r"Use build\(num_threads=16\), or .*ThreadPoolExecutorConfig\(\)",
    ) as caught:
        warn_of_idle_concurrency(config, 2)
    assert len(caught) == 1
    assert Path(caught[0].filename).samefile(__file__)


def test_enough_threads_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_idle_concurrency(builder().pipe(double, concurrency=8).get_config(), 8)


@pytest.mark.parametrize("function", [PipelineBuilder.build, Pipeline])
def test_the_options_of_a_run_are_listed(function: Any) -> None:
    options = list(inspect.signature(function).parameters.values())[1:]
    assert {option.name: option.default for option in options} == {
        "num_threads": 8,
        "max_failures": None,
        "on_failure": None,
        "report_stats_interval": None,
        "task_hook_factory": None,
        "progress": False,
    }
