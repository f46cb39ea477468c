"""Whether this process is the child of one that has used CUDA, in which CUDA cannot work."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

from spdl_media.errors import TransferError

REMEDY = (
    "Start processes with the method 'spawn' or 'forkserver' (multiprocessing.get_context), or use CUDA "
    "first in the children"
)

_DRIVER = "libcuda.so.1"
_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED


class CUDAHistory:
    """What this process, and the one that it was forked from, have done with CUDA.

    Attributes:
        used: CUDA was used in this process.
        lost: This process was forked after its parent had used CUDA, so it has neither.
        parents: Kept, for its end would ask the driver: events of the parent's, in a child that has none.
    """

    def __init__(self) -> None:
        self.used = False
        self.lost = False
        self.parents: list[object] = []

    def check(self, purpose: str, or_else: str = "") -> None:
        """Refuse to use CUDA after a fork.

        Args:
            purpose: What is going to use it.
            or_else: What can be done without it, for the message.

        Raises:
            TransferError: It cannot be used.
        """
        if self.lost:
            raise TransferError(
                f"{purpose} cannot use CUDA in this process: it was forked from one that had used CUDA, and "
                f"no driver survives that. {REMEDY}{or_else}"
            )

    def use(self, purpose: str) -> None:
        """Say that CUDA is about to be used.

        Raises:
            TransferError: It cannot be, after a fork.
        """
        self.check(purpose)
        self.used = True

    def before_fork(self) -> None:
        """Called in the parent, which may have used CUDA without this package."""
        self.used = self.used or driver_is_up()

    def after_fork(self) -> None:
        """Called in the child."""
        self.lost, self.used = self.used or self.lost, False


def driver_is_up(load: Callable[..., Any] = ctypes.CDLL) -> bool:
    """Whether anything in this process has started NVIDIA's driver, whichever library it was.

    Args:
        load: Opens a shared library.
    """
    if not hasattr(os, "RTLD_NOLOAD"):
        return False
    try:
        driver = load(_DRIVER, mode=os.RTLD_NOLOAD)
    except OSError:  # nobody has loaded it
        return False
    return int(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) != _NOT_INITIALIZED


HISTORY = CUDAHistory()

if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(before=HISTORY.before_fork, after_in_child=HISTORY.after_fork)
