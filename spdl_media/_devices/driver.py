"""What only NVIDIA's driver can say."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from spdl_media._devices.device import PER_THREAD_DEFAULT

_DRIVER = "libcuda.so.1"


def device_of_stream(address: int, load: Callable[[str], Any] = ctypes.CDLL) -> int | None:
    """Number of the device that a stream was made for; ``None``: any, or the driver does not say.

    Args:
        address: Of a ``cudaStream_t``. The driver takes it at its word.
        load: Opens a shared library.
    """
    if address <= PER_THREAD_DEFAULT:
        return None
    try:
        driver = load(_DRIVER)
    except OSError:
        return None
    context, device = ctypes.c_void_p(), ctypes.c_int()
    if driver.cuStreamGetCtx(ctypes.c_void_p(address), ctypes.byref(context)):
        return None
    if driver.cuCtxPushCurrent_v2(context):
        return None
    failed = driver.cuCtxGetDevice(ctypes.byref(device))
    driver.cuCtxPopCurrent_v2(ctypes.byref(context))
    return None if failed else device.value
