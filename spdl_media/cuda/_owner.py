"""How arrays on a device are handed to the caller."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from spdl_media._devices.cupy_device import CupyDevice
from spdl_media._devices.device import one_name
from spdl_media._devices.driver import make_wait
from spdl_media._devices.forks import HISTORY
from spdl_media._devices.handover import Handover
from spdl_media._devices.memory import Block
from spdl_media.buffer import Buffer, CPUBuffer, CUDABuffer, Failure


class DaliArray:
    """A finished array of DALI's, whose memory goes back only after the streams that read it.

    DALI gives memory to whoever asks next in the order of the stream that it was made on, and knows of no
    other. So that stream waits for theirs before the memory goes, without PyTorch or CuPy, which need not be
    there.

    Args:
        tensor: Of DALI.
        stream: The stream that it was made on.

    Thread safety: safe.
    """

    __slots__ = ("__weakref__", "_readers", "_tensor")

    stream = None
    """Nobody needs to wait: the array is complete."""

    def __init__(self, tensor: Any, stream: int) -> None:
        self._tensor = tensor
        self._readers: set[int] = set()
        # Runs before the reference to the tensor goes. At exit nobody waits, and the driver may be gone.
        weakref.finalize(self, _after_readers, stream, self._readers).atexit = False

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        interface: dict[str, Any] = self._tensor.__cuda_array_interface__
        return interface

    def __dlpack__(self, **options: Any) -> Any:
        return self._tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, index = self._tensor.__dlpack_device__()
        return int(kind), int(index)

    def hand_to(self, stream: int) -> None:
        """Keep the memory for work on this stream."""
        self._readers.add(one_name(stream))

    keep_for = hand_to

    def synchronize(self) -> None:
        """Nothing: the array is complete."""


def _after_readers(stream: int, readers: set[int]) -> None:
    others = readers - {stream}
    if others and not HISTORY.lost:
        make_wait(stream, others)


def ready_buffer(
    tensor: Any,
    stream: int | None = None,
    *,
    failures: tuple[Failure, ...] = (),
    indices: tuple[int, ...] | None = None,
) -> Buffer:
    """The buffer over an array that is ready, of DALI or of a stand-in in host memory.

    Args:
        tensor: The array.
        stream: The stream that it was made on; ``None``: in host memory.
        failures: Of the buffer.
        indices: Of the buffer.
    """
    if stream is None or not hasattr(tensor, "__cuda_array_interface__"):
        return CPUBuffer(np.asarray(tensor), failures=failures, indices=indices)
    array = DaliArray(tensor, stream)
    interface = array.__cuda_array_interface__
    _, index = array.__dlpack_device__()
    return CUDABuffer(
        array,
        tuple(interface["shape"]),
        interface["typestr"],
        index,
        ready=array,
        failures=failures,
        indices=indices,
    )


def buffer_on_stream(
    block: Block,
    device: CupyDevice,
    *,
    failures: tuple[Failure, ...] = (),
    indices: tuple[int, ...] | None = None,
    colorspace: str | None = None,
    color_range: str | None = None,
) -> CUDABuffer:
    """The buffer over an array that is ready when the device's stream gets where it is now."""
    interface = block.array.__cuda_array_interface__
    stream = device.on(device.stream)  # not whichever is CuPy's current one later
    return CUDABuffer(
        block.array,
        tuple(interface["shape"]),
        interface["typestr"],
        device.index,
        ready=Handover(stream, stream.record(), block.used_on),
        failures=failures,
        indices=indices,
        colorspace=colorspace,
        color_range=color_range,
    )
