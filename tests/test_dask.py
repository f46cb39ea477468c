"""Stages on a Dask cluster of two processes: deaths, closed clients, and items that cannot be sent."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spdl_media as sm
from spdl_media.pipeline import PipelineBuilder, PipelineError, PipelineFailure, PoolBroken
from spdl_media.testing import make_image

distributed = pytest.importorskip("distributed")
psutil = pytest.importorskip("psutil")

# Each test waits for processes to start, which is slow on a busy machine.
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("default")]


def local_cluster(n_workers: int, **options: Any) -> Any:
    options = {"threads_per_worker": 1, "dashboard_address": None, "host": "127.0.0.1"} | options
    return distributed.LocalCluster(n_workers=n_workers, **options)


def workers() -> set[Any]:
    found = set()
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended
            if "spawn_main" in " ".join(one.cmdline()):
                found.add(one)
    return found


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    # Dask logs long tracebacks of the errors that the tests provoke.
    logging.disable(logging.ERROR)
    before = workers()
    with local_cluster(2) as cluster:
        yield cluster
    logging.disable(logging.NOTSET)
    # No process is left, including replacements.
    assert psutil.wait_procs(workers() - before, timeout=30)[1] == []


@pytest.fixture
def executor(cluster: Any) -> Iterator[Executor]:
    with distributed.Client(cluster) as client:
        yield client.get_executor()


def on(executor: Executor, fn: Callable[[Any], Any], items: Any, **options: Any) -> Any:
    options = {"output_order": "input", "concurrency": 16} | options
    builder = PipelineBuilder().add_source(items).pipe(fn, executor=executor, **options)
    return builder.build(num_threads=1, max_failures=-1)


def failures_of(pipeline: Any) -> list[str]:
    return [str(record) for record in pipeline.failures]


def with_pid(number: int) -> tuple[int, int]:
    time.sleep(0.005)
    return number, os.getpid()


def end_at_7(number: int) -> int:
    return number if number != 7 else os._exit(3)


def lock_at_3(number: int) -> Any:
    return number if number != 3 else threading.Lock()


def read_nowhere() -> None:
    raise ValueError("this machine has no such model")


class OfAnotherMachine:
    """An object that can be pickled on the cluster, but not unpickled here."""

    def __reduce__(self) -> Any:
        return read_nowhere, ()


class NotMadeAgainError(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def fail_oddly(number: int) -> Any:
    if number == 3:
        raise NotMadeAgainError(1, 2)
    return number if number != 4 else OfAnotherMachine()


def note(path: Path) -> int:
    with path.open("a") as file:
        file.write("called\n")
    return os.getpid()


class Decoder:
    """A callable that opens something at its first call and keeps it, like a model or a reader."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, number: int) -> tuple[int, int]:
        self.num_calls += 1
        return os.getpid(), self.num_calls


def test_a_worker_killed_in_the_middle_costs_no_item(executor: Executor) -> None:
    pipeline = on(executor, with_pid, range(400), concurrency=64)
    numbers, pids = [], set()
    with pipeline.auto_stop():
        for number, pid in pipeline:
            numbers.append(number)
            pids.add(pid)
            if len(numbers) == 100:
                os.kill(pid, signal.SIGKILL)
    assert numbers == list(range(400))
    assert os.getpid() not in pids
    assert len(pids) >= 2
    assert not pipeline.failures


def test_an_item_that_ends_its_workers_fails_alone(
    executor: Executor, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # By default, Dask retries an item until four workers have died, which takes seconds each.
    monkeypatch.setattr(cluster.scheduler, "allowed_failures", 0)
    pipeline = on(executor, end_at_7, range(20), concurrency=1)
    with pipeline.auto_stop():
        assert list(pipeline) == [number for number in range(20) if number != 7]
    (failure,) = failures_of(pipeline)
    assert "KilledWorker: Attempted to run task 'end_at_7-" in failure
    assert "(input 7)" in failure


def test_results_and_errors_that_cannot_be_sent_fail_their_items(executor: Executor) -> None:
    pipeline = on(executor, lock_at_3, range(6))
    with pipeline.auto_stop():
        assert list(pipeline) == [0, 1, 2, 4, 5]
    assert "cannot pickle '_thread.lock' object (input 3)" in failures_of(pipeline)[0]
    pipeline = on(executor, fail_oddly, range(6))
    with pipeline.auto_stop():
        assert list(pipeline) == [0, 1, 2, 5]
    raised, unread = sorted(failures_of(pipeline), key=lambda text: text[-9:])
    assert "1 and 2" in raised
    assert "ValueError: this machine has no such model (input 4)" in unread


def test_items_that_cannot_be_sent_fail_alone(executor: Executor) -> None:
    pipeline = on(executor, str, [1, threading.Lock(), 3])
    with pipeline.auto_stop():
        assert list(pipeline) == ["1", "3"]
    assert "TypeError: cannot pickle '_thread.lock' object" in failures_of(pipeline)[0]


def test_a_function_that_cannot_be_sent_is_refused(executor: Executor) -> None:
    lock = threading.Lock()
    with pytest.raises(
        PipelineError, match=r"function of stage 'held' cannot be pickled, which a Da"
    ):
        list(on(executor, lambda _: lock, [1], name="held"))


def test_equal_items_are_calls_of_their_own(executor: Executor, tmp_path: Path) -> None:
    path = tmp_path / "calls"
    with on(executor, note, [path] * 5).auto_stop() as pipeline:
        assert len(list(pipeline)) == 5
    assert path.read_text() == "called\n" * 5


def test_objects_are_unpickled_once_in_each_worker(executor: Executor) -> None:
    with on(executor, Decoder(), range(40)).auto_stop() as pipeline:
        calls = list(pipeline)
    assert len(calls) == len(set(calls)) == 40
    assert max(number for _, number in calls) >= 20


def close_at_20(pipeline: Any, what: Any) -> None:
    with pipeline.auto_stop():
        for number, _ in pipeline:
            if number == 20:
                what.close()


@pytest.mark.parametrize("what", ["client", "cluster"])
def test_what_is_closed_in_the_middle_ends_the_run(what: str) -> None:
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(local_cluster(1))
        client = stack.enter_context(distributed.Client(cluster, timeout=20))
        pipeline = on(client.get_executor(), with_pid, range(1000))
        with pytest.raises(PipelineFailure) as info:
            close_at_20(pipeline, client if what == "client" else cluster)
        (error,) = info.value.exceptions
        assert isinstance(error, PoolBroken)
        assert "The client was closed, or its scheduler does not answer" in str(error)
        client.close()
        with pytest.raises(PipelineFailure, match=r"Client is closed.*The client was closed, or"):
            list(on(client.get_executor(), with_pid, [1]))


def fill_memory_at_3(number: int) -> int:
    kept = []
    while number == 3:
        kept.append(os.urandom(2**20) * 20)
        time.sleep(0.02)
    return number


def test_an_item_that_fills_the_memory_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with local_cluster(1, memory_limit="500MiB") as cluster, distributed.Client(cluster) as client:
        monkeypatch.setattr(cluster.scheduler, "allowed_failures", 0)
        pipeline = on(client.get_executor(), fill_memory_at_3, range(6), concurrency=1)
        with pipeline.auto_stop():
            assert list(pipeline) == [0, 1, 2, 4, 5]
    assert "KilledWorker: " in failures_of(pipeline)[0]


def test_a_scheduler_that_hangs_fails_items_by_their_timeout_and_holds_nobody(
    tmp_path: Path,
) -> None:
    address = tmp_path / "scheduler.json"
    command = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--host=127.0.0.1"]
    command += ["--port=0", "--no-dashboard", f"--scheduler-file={address}"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    scheduler = subprocess.Popen(command, **quiet)
    try:
        while not address.exists():
            assert scheduler.poll() is None
            time.sleep(0.05)
        client = distributed.Client(json.loads(address.read_text())["address"], timeout=60)
        os.kill(scheduler.pid, signal.SIGSTOP)
        pipeline = on(client.get_executor(), with_pid, range(4), timeout=0.2)
        with pipeline.auto_stop():
            assert list(pipeline) == []
        assert [type(one.exception) for one in pipeline.failures] == [TimeoutError] * 4
        os.kill(scheduler.pid, signal.SIGCONT)
        client.close()
    finally:
        scheduler.kill()
        scheduler.wait()


def test_dasks_own_threads_are_an_executor_like_others() -> None:
    from distributed.threadpoolexecutor import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as threads:
        assert list(on(threads, lock_at_3, range(3))) == [0, 1, 2]


@pytest.mark.usefixtures("nothing_is_left")
def test_a_cluster_that_does_not_answer_is_reported_before_any_item(
    silent_port: int,
) -> None:
    address = f"tcp://127.0.0.1:{silent_port}"
    with pytest.raises(OSError, match=f"Timed out trying to connect to {address}"):
        distributed.Client(address, timeout=1)


@pytest.fixture
def silent_port() -> Iterator[int]:
    # Bound but not listened on, so that no other program can take the port.
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def with_noise(path: Path, rng: np.random.Generator) -> Any:
    return sm.to_numpy(sm.load_image(path, width=8, height=8)), rng.integers(1000)


def test_a_dataloader_gives_the_same_batches_from_a_cluster(
    executor: Executor, tmp_path: Path
) -> None:
    paths = []
    for number in range(12):
        paths.append(tmp_path / f"{number}.png")
        pixels = np.full((16, 16, 3), 20 * number, np.uint8)
        paths[-1].write_bytes(make_image(pixels, codec="png"))
    paths[5].write_bytes(b"damaged")

    def batches(**options: Any) -> list[Any]:
        loader = sm.DataLoader(
            paths,
            preprocessor=with_noise,
            batch_size=4,
            output_order="input",
            to="numpy",
            **options,
        )
        return [(images.tolist(), noise.tolist()) for images, noise in loader]

    assert batches(executor=executor) == batches(num_threads=1)
