"""Memory of a device that goes back only after the work that reads it.

Pools give a freed block to whoever asks for memory on the stream that it was made on, at once: work queued on
that stream comes later. Work on other streams is not known to them. PyTorch can be told for its own pool
(``record_stream``); for all other memory the block below makes its own stream wait for theirs before it goes.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


class Event(Protocol):
    """A point in the work of a stream; PyTorch's and CuPy's both have this."""

    def synchronize(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Block:
    """An array on a device, and how it learns of the streams that read it.

    Attributes:
        array: Of the library that the device works with.
        used_on: To be called with the address of each stream that is going to read it.
    """

    array: Any
    used_on: Callable[[int], object]


class Guard:
    """Memory with an address, given back once nothing is over it and the streams that read it are waited for.

    Arrays are made over it through ``__cuda_array_interface__``, and keep it.

    Args:
        address: Of its first byte.
        shape: Of the array that it is.
        dtype: Of the same.
        free: Called once with the streams that were named, after which the memory may be used again.
    """

    __slots__ = ("__cuda_array_interface__", "__weakref__", "_streams")

    def __init__(
        self,
        address: int,
        shape: Sequence[int],
        dtype: np.dtype[Any],
        free: Callable[[set[int]], object],
        strides: tuple[int, ...] | None = None,
    ) -> None:
        self._streams: set[int] = set()
        self.__cuda_array_interface__ = {
            "shape": tuple(shape),
            "typestr": dtype.str,
            "data": (address, False),
            "strides": strides,
            # Whoever reads it has been made to wait already, so nobody is to wait on the host.
            "stream": None,
            "version": 3,
        }
        # At exit nobody waits for the memory, and the driver may be gone.
        weakref.finalize(self, free, self._streams).atexit = False

    def used_on(self, stream: int) -> None:
        """Say that work on this stream reads the memory."""
        self._streams.add(stream)


def size_of(shape: Sequence[int], dtype: np.dtype[Any]) -> int:
    """Bytes of an array."""
    return math.prod(shape) * dtype.itemsize
