"""What only NVIDIA's driver can say."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from spdl_media._devices.device import PER_THREAD_DEFAULT

_DRIVER = "libcuda.so.1"
_WITHOUT_TIME = 2  # CU_EVENT_DISABLE_TIMING


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
    device = ctypes.c_int()
    with _context_of(driver, address) as is_current:
        failed = not is_current or driver.cuCtxGetDevice(ctypes.byref(device))
    return None if failed else device.value


def make_wait(stream: int, others: Iterable[int], load: Callable[[str], Any] = ctypes.CDLL) -> None:
    """Let later work on a stream wait for what stands on others; the host does not wait.

    Args:
        stream: Address of a ``cudaStream_t`` that is not a default one.
        others: Addresses of streams of the same device.
        load: Opens a shared library.
    """
    driver = load(_DRIVER)
    with _context_of(driver, stream) as is_current:
        if is_current and any(_waits(driver, stream, other) for other in others):
            driver.cuCtxSynchronize()  # a stream is gone, and what stood on it cannot be named


def _waits(driver: Any, stream: int, other: int) -> int:
    """Make one stream wait for another; the driver's error, or 0."""
    event = ctypes.c_void_p()
    if status := driver.cuEventCreate(ctypes.byref(event), _WITHOUT_TIME):
        return int(status)
    status = driver.cuEventRecord(event, ctypes.c_void_p(other)) or driver.cuStreamWaitEvent(
        ctypes.c_void_p(stream), event, 0
    )
    driver.cuEventDestroy_v2(event)  # once it has been reached
    return int(status)


@contextmanager
def _context_of(driver: Any, stream: int) -> Iterator[bool]:
    """A block in which the context of a stream is the current one; False: it is not."""
    context = ctypes.c_void_p()
    if driver.cuStreamGetCtx(ctypes.c_void_p(stream), ctypes.byref(context)):
        yield False
        return
    if driver.cuCtxPushCurrent_v2(context):
        yield False
        return
    try:
        yield True
    finally:
        driver.cuCtxPopCurrent_v2(ctypes.byref(context))
