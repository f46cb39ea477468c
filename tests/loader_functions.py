"""Functions that tests run in processes of a DataLoader, which so need not import pytest."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np


class Dataset:
    """A map-style dataset, of which one item cannot be read."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, key: int) -> int:
        if key == 13:
            raise OSError(f"unreadable {key}")
        return 10 * key


def augment(value: int, rng: np.random.Generator) -> tuple[int, int, int]:
    if value == 50:
        raise ValueError(f"no {value}")
    return value, int(rng.integers(2**40)), os.getpid()


class Negative:
    """A callable that is false in a boolean context, because its table of special cases is empty."""

    def __len__(self) -> int:
        return 0

    def __call__(self, item: Any) -> Any:
        return -item if isinstance(item, int) else [-one for one in item]


def pid_of(item: int) -> int | None:
    return None if item == 3 else os.getpid()


def exit_at_three(item: int) -> int:
    if item == 3:
        os._exit(7)
    return item


def meet(item: int, rng: np.random.Generator) -> dict[str, Any] | None:
    if item == 5:
        raise ValueError(f"no {item}")
    noise = rng.integers(256, size=(20, 300), dtype=np.uint8)
    return {"item": item, "noise": noise, "pid": os.getpid()}


def fail_beside(fifo: Path) -> None:
    """Fail the first call once the second one has begun, which never returns."""
    try:
        Path(f"{fifo}.taken").touch(exist_ok=False)
    except FileExistsError:
        with fifo.open("w"):
            threading.Event().wait()
    with fifo.open():
        raise ValueError("the first")


def sums_of(items: list[int]) -> tuple[int, int]:
    if 7 in items:
        raise LookupError("no 7")
    return sum(items), os.getpid()


def torch_threads(_: int) -> int:
    import torch

    return int(torch.get_num_threads())


def set_torch_threads(count: int) -> None:
    import torch

    torch.set_num_threads(count)


def openmp_threads(_: int) -> str | None:
    return os.environ.get("OMP_NUM_THREADS")
