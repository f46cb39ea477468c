"""Iterables and functions that tests run in another process, which so need not import pytest."""

from __future__ import annotations

import errno
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from spdl_media.pipeline import shared_empty


class Batches:
    """An iterable that gives the same items in each iteration."""

    def __init__(self, count: int = 5) -> None:
        self.count = count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for index in range(self.count):
            rows = shared_empty((50, 100))
            rows[:] = index
            yield {"index": index, "pid": os.getpid(), "rows": rows, "made": [rows[0] + 100]}


class Draws:
    def __init__(self, loaded: Any) -> None:
        self.loaded = loaded

    def __iter__(self) -> Iterator[Any]:
        torch = sys.modules.get("torch")
        of_torch = [float(torch.rand(()))] if torch is not None else []
        yield random.random(), np.random.rand(), *of_torch  # noqa: NPY002, S311  # global generators


def same(items: Any) -> Any:
    return items


class Dataset:
    """A dataset whose ``__getitem__`` fails at the third item, in one of several ways."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        if index == 2:
            if self.how == "raise":
                raise LookupError("no third item")
            if self.how == "exit":
                os._exit(3)
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "leave":
                raise GeneratorExit("left")
            if self.how == "memory":
                raise MemoryError("none left")
            if self.how == "unpicklable":
                return threading.Lock()
            if self.how == "large":
                return np.zeros(1 << 20, np.uint8)
            if self.how == "hang":
                time.sleep(1000)
        return index


def each_of(dataset: Dataset) -> Iterator[Any]:
    return (dataset[index] for index in range(len(dataset)))


class Items:
    """Iterates over a dataset any number of times."""

    def __init__(self, how: str) -> None:
        self.dataset = Dataset(how)

    def __iter__(self) -> Iterator[Any]:
        return each_of(self.dataset)


def square(number: int) -> int:
    if number < 0:
        raise ValueError(f"no root of {number}")
    return number * number


def pid_with(item: object) -> tuple[object, int]:
    return item, os.getpid()


def refuse_memory() -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    os.posix_fallocate = refuse


def fail_to_start() -> None:
    raise LookupError("no licence")


def one() -> int:
    return 1


class Faulty:
    """An iterable of which each iteration fails in another way."""

    def __init__(self, *hows: str) -> None:
        self.hows = iter([*hows, "not"])

    def __iter__(self) -> Iterator[Any]:
        return iter(Items(next(self.hows)))
