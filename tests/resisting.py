"""Functions that test_left_behind runs in other processes, which so need not import pytest."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spdl_media.pipeline import shared_empty


def resist() -> None:
    """Keep this process from ending by itself, and from ending by SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=threading.Event().wait).start()


def same(item: Any) -> Any:
    return item


def wait_for_ever(path: str) -> None:
    Path(path).touch()
    threading.Event().wait()


def wait_if_negative(number: int) -> int:
    if number < 0:
        threading.Event().wait()
    return number


class Numbers:
    def __init__(self, end: int = 3) -> None:
        self.end = end

    def __iter__(self) -> Iterator[int]:
        yield from range(3)
        if self.end < 0:
            threading.Event().wait()


def rows_of(number: int) -> Any:
    rows = shared_empty((100, 1000))
    rows[:] = number
    return rows
