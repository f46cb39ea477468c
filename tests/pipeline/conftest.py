"""Fixtures that check every pipeline test: no event loop is blocked, and no thread is left running."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import time
from collections.abc import Iterator

import pytest

# A callback of the loop takes microseconds. On a busy machine its thread may wait longer, above all while
# processes are started, for which CPython holds the GIL. Calls that tests block wait for 10 s or longer.
BLOCKED_SECONDS = 9.0
GRACE_SECONDS = 9.0


class _BlockedLoops(logging.Filter):
    """Collects asyncio's debug messages about slow callbacks, and hides them: tests count other messages."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def filter(self, record: logging.LogRecord) -> bool:
        if not str(record.msg).startswith("Executing %s took"):
            return True
        assert isinstance(record.args, tuple)
        seconds = record.args[-1]
        assert isinstance(seconds, float)
        if seconds > BLOCKED_SECONDS:
            self.found.append(record.getMessage())
        return False


@pytest.fixture(autouse=True, scope="module")
def what_other_tests_left_is_not_collected() -> Iterator[None]:
    """Freeze existing objects: otherwise one garbage collection may stop all threads for half a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def loop_may_block() -> None:
    """Use this fixture in tests that block the event loop on purpose."""


@pytest.fixture(autouse=True)
def event_loop_is_not_blocked(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Fail a test in which something blocked an event loop.

    In debug mode, asyncio also raises an error when another thread calls methods that are not thread-safe.
    """
    monkeypatch.setenv("PYTHONASYNCIODEBUG", "1")
    blocked = _BlockedLoops()
    logger = logging.getLogger("asyncio")
    logger.addFilter(blocked)
    yield
    logger.removeFilter(blocked)
    if "loop_may_block" not in request.fixturenames:
        assert not blocked.found, f"the event loop was blocked: {blocked.found}"


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Fail a test that leaves a thread running."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + GRACE_SECONDS
    started = [thread for thread in threading.enumerate() if thread not in before]
    for thread in started:
        with contextlib.suppress(RuntimeError):  # another thread is just starting it
            thread.join(max(0.0, deadline - time.monotonic()))
    left = [thread.name for thread in started if thread.is_alive()]
    assert not left, f"threads are left: {left}"
