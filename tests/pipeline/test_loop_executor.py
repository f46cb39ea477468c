"""The threads that asyncio.to_thread uses within a pipeline."""

from __future__ import annotations

import threading
from concurrent.futures import wait

import pytest

from spdl_media.pipeline.engine.workers import LoopExecutor

WAIT = 20


@pytest.fixture
def executor() -> LoopExecutor:
    return LoopExecutor()


def test_results_and_errors_come_back(executor: LoopExecutor) -> None:
    good = executor.submit(divmod, 7, 2)
    bad = executor.submit(divmod, 7, 0)

    assert good.result(WAIT) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        bad.result(WAIT)
    executor.shutdown()


def test_threads_are_used_again_before_others_are_started(executor: LoopExecutor) -> None:
    names = set()
    for _ in range(50):
        names.add(executor.submit(lambda: threading.current_thread().name).result(WAIT))
        # Until the thread is known to be idle.
        while not executor._idle._value:
            pass
    executor.shutdown()

    assert names == {"spdl_media to_thread-1"}


def test_calls_run_at_once(executor: LoopExecutor) -> None:
    together = threading.Barrier(4)
    futures = [executor.submit(together.wait, WAIT) for _ in range(4)]

    assert sorted(future.result(WAIT) for future in futures) == [0, 1, 2, 3]
    executor.shutdown()


def test_shutdown_takes_no_more_and_cancels_what_waits(
    executor: LoopExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "_most", 1)
    inside, gate = threading.Event(), threading.Event()

    def block() -> str:
        inside.set()
        gate.wait(WAIT)
        return "done"

    first = executor.submit(block)
    second = executor.submit(block)
    assert inside.wait(WAIT)
    executor.shutdown()
    with pytest.raises(RuntimeError, match="starts no more calls"):
        executor.submit(block)
    gate.set()
    wait([first, second], WAIT)

    assert first.result() == "done"
    assert second.cancelled()
