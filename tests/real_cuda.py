"""Tests with the mark ``cuda`` are skipped without a GPU, or fail if the environment requires one."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
from collections.abc import Iterator

import pytest

REQUIRE = "SPDL_MEDIA_REQUIRE_CUDA"


def check(*packages: str) -> None:
    """Without a device for these packages, skip the test, or fail it if ``SPDL_MEDIA_REQUIRE_CUDA=1``."""
    reason = why_not(*packages)
    if reason and os.environ.get(REQUIRE) == "1":
        pytest.fail(f"{REQUIRE}=1, and {reason}", pytrace=False)
    if reason:
        pytest.skip(reason)


@contextlib.contextmanager
def turn() -> Iterator[None]:
    """Wait until no other process is in such a block."""
    import fcntl  # Windows has none

    with open(__file__) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def why_not(*packages: str) -> str | None:
    """Return why these packages or driver libraries (``"lib..."``) have no device, or ``None``."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "there is no NVIDIA driver"
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return "the driver finds no device"
    reasons = (
        _why_not_library(one) if one.startswith("lib") else _why_not(one) for one in packages
    )
    return next(filter(None, reasons), None)


def _why_not(package: str) -> str | None:
    parent = package.partition(".")[0]
    if not (importlib.util.find_spec(parent) and importlib.util.find_spec(package)):
        return f"{package} is not installed"
    if package == "nvidia.dali":
        found = importlib.import_module("nvidia.dali.backend").GetCUDADeviceCount()
    else:
        found = importlib.import_module(package).cuda.is_available()
    return None if found else f"{package} finds no device"


def _why_not_library(name: str) -> str | None:
    try:
        ctypes.CDLL(name)
    except OSError:
        return f"the driver has no {name}"
    return None
