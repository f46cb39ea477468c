"""A stand-in for CuPy on devices of ``fake_cuda``, whose driver runs the package's kernel on the CPU.

With ``is_eager``, streams run at once, for NumPy functions that do not wait for streams.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from fake_cuda import FREED, Card, FakeCupy, values_of


class LazyCard(Card):
    """A card whose pools do not overwrite a block that is reused, because earlier work may still read it."""

    def allocate(self, nbytes: int, device: int, stream: int) -> int:
        key = device, stream or 1, nbytes
        if free := self.pools.get(key):
            block = free.pop()
            self.blocks[block.ctypes.data] = block, key
            return block.ctypes.data
        return super().allocate(nbytes, device, stream)


class CupyWithKernels(FakeCupy):
    """The parts of CuPy that ``load_*`` use.

    Args:
        card: The devices.
        library: The compiled kernel.
        is_eager: Whether streams run at once.
    """

    def __init__(self, card: Card, library: ctypes.CDLL, *, is_eager: bool = False) -> None:
        super().__init__(card)
        card.driver.library = library
        card.is_eager = is_eager

    @property
    def launches(self) -> list[Any]:
        """The launches of kernels so far."""
        return self.card.driver.launches


def host(buffer: Any) -> np.ndarray:
    """Finish all work, and return a copy of the values of a buffer on a device."""
    buffer.synchronize()
    values = values_of(buffer).copy()
    assert not (values == FREED).all(), "the memory was given to somebody else"
    return values
