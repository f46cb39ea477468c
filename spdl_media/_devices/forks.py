"""Whether this process is the child of one that has used CUDA, in which CUDA cannot work."""

from __future__ import annotations

import os

from spdl_media.errors import TransferError

REMEDY = (
    "Start processes with the method 'spawn' or 'forkserver' (multiprocessing.get_context), or use CUDA "
    "first in the children"
)


class CUDAHistory:
    """What this process, and the one that it was forked from, have done with CUDA.

    Attributes:
        used: CUDA was used in this process.
        lost: This process was forked after its parent had used CUDA, so it has neither.
    """

    def __init__(self) -> None:
        self.used = False
        self.lost = False

    def check(self, purpose: str) -> None:
        """Refuse to use CUDA after a fork.

        Raises:
            TransferError: It cannot be used.
        """
        if self.lost:
            raise TransferError(
                f"{purpose} cannot use CUDA in this process: it was forked from one that had used CUDA, and "
                f"no driver survives that. {REMEDY}"
            )

    def use(self, purpose: str) -> None:
        """Say that CUDA is about to be used.

        Raises:
            TransferError: It cannot be, after a fork.
        """
        self.check(purpose)
        self.used = True

    def after_fork(self) -> None:
        """Called in the child."""
        self.lost, self.used = self.used or self.lost, False


HISTORY = CUDAHistory()

if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(after_in_child=HISTORY.after_fork)
