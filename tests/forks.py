"""Checks in forked children of the test's process."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from typing import TypeVar

import pytest

Test = TypeVar("Test", bound=Callable[..., object])


def forks(test: Test) -> Test:
    """Mark a test that forks: not on Windows, and without CPython's warning of forks beside threads."""
    warning = "ignore:.*multi-threaded, use of fork:DeprecationWarning"
    test = pytest.mark.filterwarnings(warning)(test)
    return pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks")(test)


def start_fork(check: Callable[[], object]) -> Callable[[], None]:
    """Run a check in a forked child, for at most 20 seconds; the result asserts that it has passed."""
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)  # ends the process
        try:
            check()
            os._exit(7)
        except BaseException:  # noqa: BLE001  # reported here, and by the exit status
            traceback.print_exc()
        finally:
            os._exit(9)

    def finish() -> None:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7

    return finish


def check_in_fork(check: Callable[[], object]) -> None:
    """Assert that a check passes in a forked child."""
    start_fork(check)()
