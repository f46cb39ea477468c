"""Functions that tests run in workers of pools, which so need not import pytest."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np


class UnpicklableError(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def square(number: int) -> int:
    return number * number


async def awaited(number: int) -> int:
    return number


def give_coroutine(number: int) -> Any:
    return awaited(number)


def pid_of_worker(_: object) -> int:
    return os.getpid()


def die(how: str) -> None:
    if how == "exit":
        os._exit(3)
    os.kill(os.getpid(), signal.SIGKILL)


def die_if_negative(number: int) -> int:
    return number if number >= 0 else os._exit(3)


def fail(number: int) -> None:
    raise ValueError(f"no {number}")


def fail_unpicklably(_: int) -> None:
    raise UnpicklableError(1, 2)


def leave(_: int) -> None:
    sys.exit(4)


def make_lock(_: int) -> object:
    return threading.Lock()


def wait_for_file(path: str) -> int:
    """Create a file to show that the call has begun, then run longer than any test."""
    Path(path).touch()
    time.sleep(1000)
    return 0


def sleep_unless_zero(seconds: int) -> int:
    time.sleep(seconds)
    return seconds


def remember(value: int) -> None:
    global remembered  # noqa: PLW0603  # as initializers do
    remembered = value


def recall(_: int) -> int:
    return remembered


meeting = threading.Barrier(3)


def meet(_: object) -> int:
    meeting.wait()
    return os.getpid()


def make_rows(number: int) -> Any:
    return np.full(10_000, number, np.uint8)


def fail_to_start() -> None:
    raise LookupError("no licence")


def die_at_start() -> None:
    os._exit(5)


class Dataset:
    """Counts how often it is pickled."""

    num_pickled = 0

    def __getstate__(self) -> dict[str, Any]:
        type(self).num_pickled += 1
        return {}

    def load(self, number: int) -> int:
        return -number


def fan_out(item: int) -> Iterator[int]:
    yield from (item, item)


def drawn(_: int) -> tuple[int, float]:
    return os.getpid(), float(np.random.rand())  # noqa: NPY002  # the global ones are meant


def double(item: int) -> int:
    return 2 * item


def die_at_three(item: int) -> int:
    return item if item != 3 else os._exit(1)


def twice(item: int) -> Iterator[int]:
    yield item
    yield item


def sleep_if_zero(item: int) -> int:
    if item == 0:
        time.sleep(1000)
    return item
