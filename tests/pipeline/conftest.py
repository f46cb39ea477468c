"""What every test of pipelines is checked for: the event loop was not blocked, and no thread is left."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Iterator

import pytest

# A callback of the loop takes microseconds. A busy machine may keep its thread from running for longer, above
# all while processes are started, for which CPython holds the GIL.
BLOCKED_SECONDS = 2.0
GRACE_SECONDS = 1.5


class _BlockedLoops(logging.Handler):
    """Collects what asyncio says, in debug mode, of callbacks that took long."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if str(record.msg).startswith("Executing %s took"):
            assert isinstance(record.args, tuple)
            seconds = record.args[-1]
            assert isinstance(seconds, float)
            if seconds > BLOCKED_SECONDS:
                self.found.append(record.getMessage())


@pytest.fixture(autouse=True, scope="module")
def what_other_tests_left_is_not_collected() -> Iterator[None]:
    """In a process that has imported much, one collection of garbage stops all threads for half a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def loop_may_block() -> None:
    """For tests that block the event loop on purpose."""


@pytest.fixture(autouse=True)
def event_loop_is_not_blocked(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Fail a test in which something kept an event loop from its work.

    In debug mode asyncio also raises when a thread calls what is for the loop's own.
    """
    monkeypatch.setenv("PYTHONASYNCIODEBUG", "1")
    handler = _BlockedLoops()
    logger = logging.getLogger("asyncio")
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
    if "loop_may_block" not in request.fixturenames:
        assert not handler.found, f"the event loop was blocked: {handler.found}"


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Fail a test after which a thread lives on that it started."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + GRACE_SECONDS
    started = [thread for thread in threading.enumerate() if thread not in before]
    for thread in started:
        thread.join(max(0.0, deadline - time.monotonic()))
    left = [thread.name for thread in started if thread.is_alive()]
    assert not left, f"threads are left: {left}"
