"""DataLoader(executor=): preprocessors in worker processes behave as in threads."""

from __future__ import annotations

import functools
import itertools
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from loader_functions import (
    Dataset,
    Negative,
    augment,
    exit_at_three,
    fail_beside,
    meet,
    openmp_threads,
    pid_of,
    set_torch_threads,
    sums_of,
    torch_threads,
)

import spdl_media as sm
from spdl_media.dataloader import sample_rng
from spdl_media.pipeline import (
    InterpreterPoolExecutorConfig,
    PipelineError,
    PipelineFailure,
    ProcessPoolExecutorConfig,
    ThreadPoolExecutorConfig,
    WorkerDied,
)
from spdl_media.source import DistributedRandomSampler, MapIterator

pytestmark = pytest.mark.usefixtures("nothing_is_left")

POOL = ProcessPoolExecutorConfig(max_workers=2)


def make_loader(**options: Any) -> sm.DataLoader:
    sampler = DistributedRandomSampler(24, rank=1, world_size=2, seed=1)
    source = MapIterator(Dataset(), sampler)
    arguments = {"batch_size": 4, "seed": 3, "output_order": "input", "executor": POOL}
    return sm.DataLoader(source, preprocessor=augment, **arguments | options)


def test_processes_give_what_threads_do() -> None:
    """Random numbers, replacements, counts and states are the same; the dataset is read in the workers."""
    told: list[Any] = []
    options = {"on_error": "replace", "on_failure": lambda record, item: told.append(item)}
    loader = make_loader(**options)
    batches, replaced, states = [], [], []
    for batch in loader:
        batches.append([sample[:2] for sample in batch])
        assert os.getpid() not in {sample[2] for sample in batch}
        replaced.append(loader.replaced)
        states.append(json.dumps(loader.state_dict()))
    threads = make_loader(executor=None, **{**options, "on_failure": None})
    again = [([sample[:2] for sample in batch], threads.replaced) for batch in threads]
    assert list(zip(batches, replaced, strict=True)) == again
    share = list(DistributedRandomSampler(24, rank=1, world_size=2, seed=1))
    assert sorted(told) == sorted(set(share) & {5, 13})
    assert len(told) == loader.failure_counts["augment"] > 0
    flat = list(itertools.chain.from_iterable(batches))
    position = share.index(flat[0][0] // 10)
    assert flat[0][1] == sample_rng(3, 0, 1 + 2 * position).integers(2**40)
    resumed = make_loader(**options)
    resumed.load_state_dict(json.loads(states[0]))
    assert [[sample[:2] for sample in batch] for batch in resumed] == batches[1:]


def test_an_executor_of_the_users_serves_several_epochs() -> None:
    with ProcessPoolExecutor(1) as processes, ThreadPoolExecutor(1) as threads:
        for executor, is_here in [(processes, False), (threads, True)]:
            loader = sm.DataLoader(range(8), preprocessor=pid_of, executor=executor)
            for _ in range(2):
                pids = list(loader)
                # None was dropped.
                assert len(pids) == 7
                assert {pid == os.getpid() for pid in pids} == {is_here}
    threads_of_its_own = ThreadPoolExecutorConfig(max_workers=1)
    assert len(list(sm.DataLoader(range(8), preprocessor=pid_of, executor=threads_of_its_own))) == 7


def test_a_worker_that_dies_costs_one_item() -> None:
    loader = sm.DataLoader(
        range(6),
        preprocessor=exit_at_three,
        executor=ProcessPoolExecutorConfig(max_workers=1),
        on_error="replace",
        output_order="input",
    )
    assert list(loader) == [0, 1, 2, 4, 4, 5]
    assert isinstance(loader.failures[0].exception, WorkerDied)


def make_parallel(**options: Any) -> sm.DataLoader:
    source = MapIterator(range(40), DistributedRandomSampler(40, rank=0, world_size=1, seed=5))
    arguments = {"batch_size": 4, "seed": 3, "output_order": "input", "to": "numpy"}
    return sm.DataLoader(source, preprocessor=meet, num_threads=2, **arguments | options)


def plain(batch: dict[str, Any]) -> list[Any]:
    return [batch["item"].tolist(), batch["noise"].tolist()]


def test_what_an_executor_refuses_is_made_after_a_resume() -> None:
    pool = ThreadPoolExecutor(1)
    numbers = range(200)

    def make(**options: Any) -> sm.DataLoader:
        return sm.DataLoader(numbers, preprocessor=str, output_order="input", **options)

    loader = make(executor=pool, buffer_size=1)
    iterator = iter(loader)
    taken = [next(iterator)]
    pool.shutdown()
    with pytest.raises(PipelineFailure, match="takes no more items"):
        taken.extend(iterator)
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    assert taken + list(resumed) == [str(number) for number in numbers]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_what_a_failed_run_ends_in_a_process_is_made_after_a_resume(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    loader = sm.DataLoader(
        [fifo, fifo], preprocessor=fail_beside, num_processes=2, num_threads=1, on_error="raise"
    )
    iterator = iter(loader)
    # The run ends before the consumer asks for its first sample.
    run: Any = loader._pipeline and loader._pipeline._run
    run._thread.join(30)
    for thread in run.graph.all_threads():
        thread.join(30)
    with pytest.raises(PipelineFailure, match="the first"):
        next(iterator)
    state = loader.state_dict()
    assert sum(stop - start for start, stop in state["done"]) == 1


def test_processes_of_threads_give_what_threads_do() -> None:
    threads = make_parallel()
    expected = [plain(batch) for batch in threads]
    loader = make_parallel(num_processes=2)
    found, states, pids = [], [], set()
    for batch in loader:
        found.append(plain(batch))
        states.append(json.dumps(loader.state_dict()))
        pids |= set(batch["pid"].tolist())
    assert found == expected
    assert len(pids) == 2
    assert os.getpid() not in pids
    # Failures and statistics are those of all processes together.
    assert loader.failure_counts["meet"] == threads.failure_counts["meet"] == 1
    assert "in meet" in loader.failures[0].traceback
    counts = [
        {stage.name: stage.outputs for stage in one.statistics().stages}
        for one in (loader, threads)
    ]
    assert counts[0]["meet"] == counts[1]["meet"]
    # States of threads and processes are interchangeable.
    for options in ({"num_processes": 1}, {}):
        resumed = make_parallel(**options)
        resumed.load_state_dict(json.loads(states[3]))
        assert [plain(batch) for batch in resumed] == expected[4:]


def test_processes_run_the_aggregator_where_nothing_else_is_to_run() -> None:
    loader = sm.DataLoader(
        range(12), batch_size=3, aggregator=sums_of, num_processes=1, output_order="input"
    )
    for _ in range(2):
        sums = list(loader)
        assert [total for total, _ in sums] == [3, 12, 30]
        assert {pid for _, pid in sums}.isdisjoint({os.getpid()})
        assert loader.failure_counts["sums_of"] == 1


def test_a_process_of_threads_that_dies_costs_the_items_it_has() -> None:
    loader = sm.DataLoader(range(6), preprocessor=exit_at_three, num_processes=1, num_threads=2)
    found = list(loader)
    assert set(found) <= {0, 1, 2, 4, 5}
    # One of the two threads has the item that ends the process.
    assert 1 <= loader.failure_counts["exit_at_three"] == 6 - len(found) <= 2
    assert all(isinstance(failure.exception, WorkerDied) for failure in loader.failures)


# A forked process has torch from the beginning; a spawned one imports it in the function.
@pytest.mark.parametrize(
    ("mp_context", "initializer", "expected"),
    [
        ("fork", None, 1),
        ("fork", functools.partial(set_torch_threads, 3), 3),
        pytest.param("spawn", None, 1, marks=pytest.mark.long),  # a process that imports torch
    ],
)
def test_torch_has_one_thread_in_each_worker_unless_it_is_told(
    mp_context: str, initializer: Any, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    if mp_context == "fork" and sys.version_info >= (3, 12):
        pytest.skip("CPython warns of forks where there are threads, and pytest-timeout has one")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(5)
    try:
        pool = ProcessPoolExecutorConfig(1, mp_context, initializer)
        loader = sm.DataLoader([0], preprocessor=torch_threads, executor=pool)
        assert list(loader) == [expected]
    finally:
        torch.set_num_threads(before)


def test_the_environment_says_how_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    pool = ProcessPoolExecutorConfig(1, "spawn")
    assert list(sm.DataLoader([0], preprocessor=openmp_threads, executor=pool)) == ["3"]


@pytest.mark.skipif(sys.version_info < (3, 14), reason="sub-interpreters came with CPython 3.14")
def test_sub_interpreters_run_what_is_pure_python() -> None:
    executor = InterpreterPoolExecutorConfig(max_workers=1)
    loader = sm.DataLoader(
        ["3", "x", "5"],
        preprocessor=int,
        executor=executor,
        output_order="input",
        on_error="replace",
    )
    assert list(loader) == [3, 5, 5]


def generate(item: int) -> Any:
    yield item


async def later(item: int) -> int:
    return item


@pytest.mark.parametrize(
    ("preprocessor", "executor", "error", "message"),
    [
        (generate, POOL, ValueError, "generate is a generator"),
        (later, POOL, ValueError, "'later' is asynchronous"),
        (lambda item: item, POOL, PipelineError, "cannot be pickled"),
        (abs, 4, TypeError, "executor of stage 'abs' must be"),
    ],
)
def test_what_no_executor_can_run_is_refused(
    preprocessor: Any, executor: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        sm.DataLoader(range(3), preprocessor=preprocessor, executor=executor)


def test_a_function_of_no_length_is_called_as_any_other() -> None:
    negative, source = Negative(), range(3)
    with ThreadPoolExecutor(1) as pool:
        for options in (
            {"executor": pool},
            {"num_processes": 1},
            {"cache": 99},
            {"on_error": "replace"},
        ):
            loader = sm.DataLoader(source, preprocessor=negative, output_order="input", **options)
            assert list(loader) == [0, -1, -2]
    options = {"batch_size": 3, "num_processes": 1, "output_order": "input"}
    assert list(sm.DataLoader(source, aggregator=negative, **options)) == [[0, -1, -2]]
    # Only the preprocessor runs there, so other functions need not be picklable.
    total = lambda items: sum(items, 0)  # noqa: E731
    assert list(sm.DataLoader(source, preprocessor=negative, aggregator=total, **options)) == [-3]


def test_there_must_be_something_to_run() -> None:
    with pytest.raises(ValueError, match="there is neither"):
        sm.DataLoader(range(3), executor=POOL)
    with pytest.raises(ValueError, match="there is neither"):
        sm.DataLoader(range(3), num_processes=2, batch_size=2)
    with pytest.raises(ValueError, match="leave one of them out"):
        sm.DataLoader(range(3), preprocessor=abs, num_processes=2, executor=POOL)
    with pytest.raises(ValueError, match="num_processes must be at least 1"):
        sm.DataLoader(range(3), preprocessor=abs, num_processes=0)
    with pytest.raises(PipelineError, match="cannot be pickled"):
        sm.DataLoader(range(3), batch_size=1, aggregator=lambda items: items, num_processes=1)
