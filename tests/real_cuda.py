"""Tests with the mark ``cuda`` need a GPU: skipped where there is none, or failed if one was promised."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os

import pytest

REQUIRE = "SPDL_MEDIA_REQUIRE_CUDA"


def check(*packages: str) -> None:
    """Skip the test, or fail it under ``SPDL_MEDIA_REQUIRE_CUDA=1``, without a device for these."""
    reason = why_not(*packages)
    if reason and os.environ.get(REQUIRE) == "1":
        pytest.fail(f"{REQUIRE}=1, and {reason}", pytrace=False)
    if reason:
        pytest.skip(reason)


def why_not(*packages: str) -> str | None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "there is no NVIDIA driver"
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return "the driver finds no device"
    for package in packages:
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
        if not importlib.import_module(package).cuda.is_available():
            return f"{package} finds no device"
    return None
