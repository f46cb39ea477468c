"""Pools of a stage: where calls run, what fails when a worker dies, and who shuts a pool down."""

from __future__ import annotations

import concurrent.futures
import errno
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from effort import several_tries
from pool_functions import (
    Dataset,
    die,
    die_at_start,
    die_if_negative,
    drawn,
    fail,
    fail_to_start,
    fail_unpicklably,
    fan_out,
    give_coroutine,
    leave,
    make_lock,
    make_rows,
    meet,
    pid_of_worker,
    recall,
    remember,
    sleep_unless_zero,
    square,
    wait_for_file,
)

import spdl_media
from spdl_media import shared_memory
from spdl_media.pipeline import (
    InterpreterPoolExecutorConfig,
    PipeConfig,
    PipelineBuilder,
    PipelineError,
    PipelineFailure,
    PoolBroken,
    ProcessPoolExecutorConfig,
    WorkerDied,
    children,
)
from spdl_media.pipeline.pools import WorkerProcesses
from spdl_media.ring import Ring

pytestmark = pytest.mark.usefixtures("nothing_is_left")

WAIT = 60  # seconds; no test should take as long


def wait_until_made(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


class Pool:
    """The worker processes of a stage, and as many calling threads."""

    def __init__(self, stage: PipeConfig) -> None:
        assert isinstance(stage.executor, ProcessPoolExecutorConfig)
        self.processes = WorkerProcesses(stage, stage.executor)
        self.threads = ThreadPoolExecutor(self.processes.size)

    def submit(self, item: Any) -> Future[Any]:
        return self.threads.submit(self.processes.call, item)

    def shutdown(self) -> None:
        self.processes.shutdown()

    def worker(self) -> Any:
        """The process of the first idle worker."""
        return self.processes._idle[0][0].child


@pytest.fixture
def pools() -> Iterator[list[Pool]]:
    """A list of pools, which are shut down after the test. Fails if a process is left."""
    opened: list[Pool] = []
    yield opened
    for pool in opened:
        pool.shutdown()
        pool.threads.shutdown()
    deadline = time.monotonic() + WAIT
    while [p for p in multiprocessing.active_children() if p.name.startswith("spdl_media")]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def processes(fn: Any, pools: list[Pool], **options: Any) -> Pool:
    concurrency = options.pop("concurrency", 1)
    timeout = options.pop("timeout", None)
    config = ProcessPoolExecutorConfig(**options)
    pools.append(Pool(PipeConfig(fn, "work", concurrency, executor=config, timeout=timeout)))
    return pools[-1]


def results(futures: list[Future[Any]]) -> list[Any]:
    return [future.exception(WAIT) or future.result(WAIT) for future in futures]


@pytest.mark.parametrize("mp_context", [None, "spawn", "fork"])
def test_processes_apply_the_function(mp_context: str | None, pools: list[Pool]) -> None:
    if mp_context == "fork" and sys.version_info >= (3, 12):
        pytest.skip("CPython warns of forks where there are threads, and pytest-timeout has one")
    pool = processes(square, pools, mp_context=mp_context, max_workers=2)
    assert results([pool.submit(n) for n in range(20)]) == [n * n for n in range(20)]


def test_there_are_as_many_processes_as_concurrency(pools: list[Pool]) -> None:
    pool = processes(pid_of_worker, pools, concurrency=2)
    assert pool.processes.size == 2
    pids = set(results([pool.submit(n) for n in range(100)]))
    assert len(pids) <= 2
    assert os.getpid() not in pids


def test_the_function_is_sent_once_a_worker_and_not_with_each_item(pools: list[Pool]) -> None:
    dataset = Dataset()
    config = PipeConfig(dataset.load, executor=ProcessPoolExecutorConfig())
    checked = Dataset.num_pickled
    pools.append(Pool(config))
    assert results([pools[0].submit(n) for n in range(10)]) == [-n for n in range(10)]
    assert Dataset.num_pickled - checked == 1


def test_initializer_runs_in_each_worker_before_the_first_item(pools: list[Pool]) -> None:
    pool = processes(recall, pools, initializer=remember, initargs=(7,), max_workers=2)
    assert results([pool.submit(n) for n in range(10)]) == [7] * 10


def test_exceptions_arrive_with_their_traceback_as_cause(pools: list[Pool]) -> None:
    error = processes(fail, pools).submit(5).exception(WAIT)
    assert isinstance(error, ValueError)
    assert str(error) == "no 5"
    assert "in fail\n" in str(error.__cause__)
    assert "raise ValueError" in str(error.__cause__)


def test_a_failure_does_not_hold_the_bytes_of_its_item(pools: list[Pool]) -> None:
    error = processes(fail, pools).submit(5).exception(WAIT)
    assert error is not None
    names = [
        (frame.f_code.co_name, frame.f_locals)
        for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    sent = [view for name, found in names if name == "call" for view in found.values()]
    for view in sent:
        if isinstance(view, memoryview):
            with pytest.raises(ValueError, match="released memoryview"):
                view.tobytes()
    assert any(isinstance(view, memoryview) for view in sent)


def test_an_exception_that_cannot_be_pickled_is_described(pools: list[Pool]) -> None:
    pool = processes(fail_unpicklably, pools)
    with pytest.raises(
        PipelineError, match=r"^UnpicklableError: 1 and 2 \(raised in a worker process"
    ):
        pool.submit(0).result(WAIT)
    with pytest.raises(PipelineError, match="1 and 2"):
        pool.submit(0).result(WAIT)


def test_a_result_that_cannot_be_pickled_fails_its_item(pools: list[Pool]) -> None:
    with pytest.raises(TypeError, match=r"cannot pickle '_thread.lock' object"):
        processes(make_lock, pools).submit(0).result(WAIT)


def test_a_function_that_returns_a_coroutine_is_refused_as_in_threads(pools: list[Pool]) -> None:
    with pytest.raises(TypeError, match="the function of stage 'work' returned a coroutine"):
        processes(give_coroutine, pools).submit(0).result(WAIT)


def test_an_item_that_cannot_be_pickled_fails_alone(pools: list[Pool]) -> None:
    pool = processes(square, pools)
    futures = [pool.submit(2), pool.submit(threading.Lock()), pool.submit(3)]
    assert futures[0].result(WAIT) == 4
    with pytest.raises(TypeError, match=r"cannot pickle '_thread.lock' object"):
        futures[1].result(WAIT)
    assert futures[2].result(WAIT) == 9


def test_sys_exit_fails_the_item_and_not_the_worker(pools: list[Pool]) -> None:
    pool = processes(leave, pools)
    with pytest.raises(SystemExit, match="4"):
        pool.submit(0).result(WAIT)
    assert pool.worker().is_alive()


@pytest.mark.parametrize(("how", "said"), [("exit", "exit code 3"), ("kill", "signal 9, Killed")])
def test_a_death_fails_the_item_and_says_how(how: str, said: str, pools: list[Pool]) -> None:
    pool = processes(die, pools)
    for _ in range(2):  # the second item dies in a worker that replaced the first
        with pytest.raises(WorkerDied, match=rf"worker process of stage 'work' ended \({said}\)"):
            pool.submit(how).result(WAIT)


def test_items_not_yet_sent_run_in_the_new_worker(pools: list[Pool]) -> None:
    pool = processes(die_if_negative, pools, max_workers=2)
    outcomes = results([pool.submit(n) for n in [1, 2, -1, 3, 4, -1, 5, 6]])
    died = [outcome for outcome in outcomes if isinstance(outcome, WorkerDied)]
    assert len(died) == 2
    assert [outcome for outcome in outcomes if outcome not in died] == [1, 2, 3, 4, 5, 6]


def test_a_worker_that_died_while_idle_is_replaced_before_the_next_item(
    pools: list[Pool],
) -> None:
    pool = processes(pid_of_worker, pools)
    pid = pool.submit(0).result(WAIT)
    os.kill(pid, signal.SIGKILL)
    pool.worker()._process.join(WAIT)
    assert pool.submit(0).result(WAIT) != pid


def test_an_initializer_that_fails_breaks_the_pool(pools: list[Pool]) -> None:
    pool = processes(square, pools, initializer=fail_to_start)
    for _ in range(2):
        with pytest.raises(PoolBroken, match="initializer failed: LookupError: no licence") as info:
            pool.submit(1).result(WAIT)
        assert "in fail_to_start" in str(info.value.__cause__)


def test_workers_that_never_start_break_the_pool(pools: list[Pool]) -> None:
    pool = processes(square, pools, initializer=die_at_start)
    with pytest.raises(
        PoolBroken, match=r"3 worker processes .* an item.*code 5.* and their functions above;"
    ):
        pool.submit(1).result(WAIT)


def test_shutdown_ends_a_worker_in_a_call_without_waiting(
    pools: list[Pool], tmp_path: Path
) -> None:
    pool = processes(wait_for_file, pools)
    futures = [pool.submit(str(tmp_path / "runs")) for _ in range(2)]
    wait_until_made(tmp_path / "runs")
    start = time.monotonic()
    pool.shutdown()
    assert time.monotonic() - start < 15
    with pytest.raises(PoolBroken, match="signal 15, Terminated"):
        futures[0].result(WAIT)
    with pytest.raises(PoolBroken, match="processes of stage 'work' were shut down"):
        futures[1].result(WAIT)


@several_tries
def test_a_call_that_takes_too_long_is_killed_and_the_next_item_runs(pools: list[Pool]) -> None:
    pool = processes(sleep_unless_zero, pools, timeout=0.2)
    # The start of a worker does not count, although it takes several times the timeout.
    assert pool.submit(0).result(WAIT) == 0
    with pytest.raises(TimeoutError, match=r"the call took longer than timeout=0\.2 s"):
        pool.submit(1000).result(WAIT)
    assert pool.submit(0).result(WAIT) == 0


def test_a_pool_that_never_got_an_item_ends_its_processes(pools: list[Pool]) -> None:
    assert processes(square, pools).worker().is_alive()


def test_forked_workers_see_the_end_of_their_pipe(pools: list[Pool]) -> None:
    if sys.version_info >= (3, 12):
        pytest.skip("CPython warns of forks where there are threads, and pytest-timeout has one")
    pool = processes(pid_of_worker, pools, mp_context="fork", max_workers=3)
    worker = pool.worker()
    worker.pipes[0].close()
    worker._process.join(WAIT)
    assert worker._process.exitcode == 0


def test_threads_of_a_process_call_at_once_and_share_its_fate(pools: list[Pool]) -> None:
    pool = processes(meet, pools, max_workers=2, num_threads=3)
    assert pool.processes.size == 6
    # Each call waits for two others in its process.
    pids = results([pool.submit("meet") for _ in range(6)])
    assert sorted(pids.count(pid) for pid in pids) == [3] * 6
    # The calls wait for others that do not come, until their process dies. Then all threads work again.
    futures = [pool.submit("meet") for _ in range(2)]
    while len(pool.processes._idle) > 4:
        time.sleep(0.01)
    children = [process.child._process for process in pool.processes._processes]
    for pid in set(pids):
        os.kill(pid, signal.SIGKILL)
    for child in children:
        # An item that was sent to a process about to die is lost.
        child.join(WAIT)
    assert all(isinstance(error, WorkerDied) for error in results(futures))
    again = results([pool.submit("meet") for _ in range(6)])
    assert sorted(again.count(pid) for pid in again) == [3] * 6
    assert not set(again) & set(pids)


def test_processes_that_were_started_end_when_the_next_cannot(
    pools: list[Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = children._children.copy()
    started: set[Any] = set()

    def refuse_third(*args: Any, **options: Any) -> Any:
        started.update(children._children - before)
        if len(started) == 2:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return Ring(*args, **options)

    monkeypatch.setattr(children, "Ring", refuse_third)
    with pytest.raises(PipelineError, match=r"no process can be started .* Too many open files"):
        processes(square, pools, max_workers=3)
    while any(child._code is None for child in started):
        time.sleep(0.01)


def test_arrays_of_results_cross_in_shared_memory(pools: list[Pool]) -> None:
    pool = processes(make_rows, pools)
    rows = [pool.submit(number).result(WAIT) for number in range(100)]
    for number, array in enumerate(rows):
        np.testing.assert_array_equal(array, number)
    ring = pool.worker().ring
    # Some arrays are views of shared memory; those beyond the limit were copied.
    assert [ring.blocks.place(array) is None for array in rows] == [False] * 64 + [True] * 36


def test_arrays_are_pickled_where_the_address_space_is_limited(
    pools: list[Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(shared_memory.mmap, "mmap", refuse)
    pool = processes(make_rows, pools)
    np.testing.assert_array_equal(pool.submit(7).result(WAIT), 7)


def test_a_callers_pool_is_used_and_left_running() -> None:
    with ThreadPoolExecutor(1, thread_name_prefix="callers") as executor:
        builder = PipelineBuilder().add_source([0])
        builder.pipe(lambda _: threading.current_thread().name, executor=executor)
        assert next(iter(builder.build())).startswith("callers")
        assert executor.submit(square, 3).result(WAIT) == 9


def test_a_callers_process_pool_that_breaks_stays_broken() -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as executor:
        builder = PipelineBuilder().add_source(["exit"]).pipe(die, executor=executor)
        with pytest.raises(PipelineFailure, match=r"terminated abruptly.*is not the pipeline's"):
            list(builder.build())
        with pytest.raises(PoolBroken, match="ProcessPoolExecutor of stage 'die'"):
            list(builder.build())


needs_interpreters = pytest.mark.skipif(
    sys.version_info < (3, 14), reason="sub-interpreters came with CPython 3.14"
)


def interpreters(fn: Any, items: list[Any], **options: Any) -> Any:
    """Run items in sub-interpreters; return the results and the first failure."""
    builder = PipelineBuilder().add_source(items)
    builder.pipe(fn, executor=InterpreterPoolExecutorConfig(**options))
    pipeline = builder.build(max_failures=math.inf)
    return list(pipeline), [record.exception for record in pipeline.failures]


@needs_interpreters
def test_sub_interpreters_apply_pure_python() -> None:
    found, (error,) = interpreters(math.factorial, [0, 1, 2, 3, 4, -1])
    assert found == [1, 1, 2, 6, 24]
    assert "not defined for negative" in str(error)


@needs_interpreters
def test_a_function_whose_imports_fail_there_gets_told() -> None:
    _, (error,) = interpreters(np.sqrt, [3])
    assert type(error) is PipelineError
    assert "'sqrt' cannot run in a sub-interpreter: " in str(error)
    assert "does not support" in str(error)
    _, (error,) = interpreters(lambda _: __import__("numpy"), [3])
    assert "'lambda' cannot run in a sub-interpreter" in str(error)


@needs_interpreters
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_initializer_that_fails_breaks_interpreters() -> None:
    with pytest.raises(PipelineFailure, match="initializer must work in each sub-interpreter"):
        interpreters(square, [3], initializer=math.sqrt, initargs=(-1,))


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="there are sub-interpreters")
def test_sub_interpreters_are_refused_by_older_pythons() -> None:
    with pytest.raises(
        RuntimeError, match=r"needs CPython 3.14 or later, this is 3\.\d+\. Process"
    ):
        InterpreterPoolExecutorConfig()
    assert not hasattr(concurrent.futures, "InterpreterPoolExecutor")


SCRIPT = """
import os, sys, time
from pathlib import Path

from spdl_media.pipeline import PipelineBuilder, ProcessPoolExecutorConfig


def wait(path):
    Path(path).write_text(str(os.getpid()))
    time.sleep(1000)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    builder = PipelineBuilder().add_source([str(path)])
    pipeline = builder.pipe(wait, executor=ProcessPoolExecutorConfig()).build()
    pipeline.start()
    while not path.exists() or not path.read_text():
        time.sleep(0.01)
    {end}
"""


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat")
        return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")
    except (ProcessLookupError, FileNotFoundError):
        return False


@pytest.mark.parametrize(("end", "code"), [("pass", 0), ("os.kill(os.getpid(), 9)", -9)])
def test_a_blocked_worker_ends_with_its_interpreter(end: str, code: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(end=end))
    package = Path(spdl_media.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, script, tmp_path / "pid"],
        # On a busy machine, asyncio's debug mode reports slow calls.
        env=os.environ | {"PYTHONPATH": str(package), "PYTHONASYNCIODEBUG": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + WAIT
    while is_running(pid):  # a process that was killed does not wait for its workers
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_generators_end_with_a_callers_pool_that_is_shut_down() -> None:
    """Their calls wait behind a call of another user of the pool, and are cancelled."""
    gate = threading.Event()
    executor = ThreadPoolExecutor(1)
    executor.submit(gate.wait, 20)
    pipeline = PipelineBuilder().add_source([1]).pipe(fan_out, executor=executor).build()
    with pipeline.auto_stop():
        with pytest.raises(TimeoutError):
            pipeline.get_item(timeout=0.05)
        executor.shutdown(wait=False, cancel_futures=True)
        with pytest.raises(PipelineFailure, match="of stage 'fan_out' takes no more items") as info:
            pipeline.get_item(timeout=10)
        gate.set()
    assert isinstance(info.value.exceptions[0], PoolBroken)
    executor.shutdown()


def test_generators_end_with_a_callers_pool_that_cannot_start() -> None:
    with ThreadPoolExecutor(1, initializer=fail_to_start) as executor:
        builder = PipelineBuilder().add_source([1]).pipe(fan_out, executor=executor)
        with pytest.raises(PipelineFailure, match="ThreadPoolExecutor of stage 'fan_out' takes no"):
            list(builder.build().get_iterator(timeout=10))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_each_process_has_random_numbers_of_its_own(pools: list[Pool], method: str) -> None:
    if method == "fork" and sys.version_info >= (3, 12):
        pytest.skip("CPython warns of forks where there are threads, and pytest-timeout has one")
    runs = []
    for _ in range(2):
        np.random.seed(0)  # noqa: NPY002
        pool = processes(drawn, pools, mp_context=method, max_workers=2)
        firsts: dict[int, float] = {}
        while len(firsts) < 2:
            for pid, number in results([pool.submit(0) for _ in range(4)]):
                firsts.setdefault(pid, number)
        runs.append(set(firsts.values()))
    assert len(runs[0]) == 2
    # The same seeds give the same numbers.
    assert runs[0] == runs[1]


class _Pipe:
    """Records whether two threads close it at once."""

    def __init__(self) -> None:
        self.both = threading.Barrier(2)
        self.was_closed_twice = False

    def close(self) -> None:
        with suppress(threading.BrokenBarrierError):
            self.both.wait(0.3)
            self.was_closed_twice = True


def test_threads_that_find_their_process_dead_close_its_pipes_one_at_a_time(
    pools: list[Pool],
) -> None:
    # A descriptor that is closed twice may belong to another file the second time.
    child = processes(abs, pools, max_workers=1).worker()
    pipe: Any = _Pipe()
    child._open.append(pipe)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda _: child.end(), range(2)))
    assert not pipe.was_closed_twice
