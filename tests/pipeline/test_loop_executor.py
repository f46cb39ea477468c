"""The executor for asyncio.to_thread within a pipeline."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import wait
from typing import Any

import pytest

from spdl_media.pipeline.engine.workers import LoopExecutor, WorkerThreads

WAIT = 60


class FakeHub:
    closed = False

    def __init__(self) -> None:
        self.threads: list[WorkerThreads] = []


@pytest.fixture
def executor() -> Iterator[LoopExecutor]:
    hub: Any = FakeHub()
    threads = WorkerThreads(hub, "to_thread", 4)
    yield LoopExecutor(hub, threads)
    hub.closed = True
    threads.stop()


def test_results_and_errors_come_back(executor: LoopExecutor) -> None:
    good = executor.submit(divmod, 7, 2)
    bad = executor.submit(divmod, 7, 0)

    assert good.result(WAIT) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        bad.result(WAIT)


def test_threads_are_used_again_before_others_are_started(executor: LoopExecutor) -> None:
    names = set()
    for _ in range(50):
        names.add(executor.submit(lambda: threading.current_thread().name).result(WAIT))
        # Wait until the thread is idle.
        while not executor._workers._idle:
            pass

    assert names == {"to_thread-1"}


def test_calls_run_at_once(executor: LoopExecutor) -> None:
    together = threading.Barrier(4)
    futures = [executor.submit(together.wait, WAIT) for _ in range(4)]

    assert sorted(future.result(WAIT) for future in futures) == [0, 1, 2, 3]


def test_at_the_end_no_more_are_taken_and_what_waits_is_cancelled(executor: LoopExecutor) -> None:
    gate, together = threading.Event(), threading.Barrier(5)

    def run() -> bool:
        together.wait(WAIT)
        return gate.wait(WAIT)

    running = [executor.submit(run) for _ in range(4)]
    together.wait(WAIT)
    waiting = executor.submit(gate.wait, WAIT)
    executor._hub.closed = True
    with pytest.raises(RuntimeError, match="starts no more calls"):
        executor.submit(gate.wait)
    gate.set()
    wait([*running, waiting], WAIT)

    assert [future.result() for future in running] == [True] * 4
    assert waiting.cancelled()
