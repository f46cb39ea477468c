"""How arrays on a device are handed to the caller."""

from __future__ import annotations

from typing import Any

import numpy as np

from spdl_media._devices.cupy_device import CupyDevice
from spdl_media._devices.handover import Handover
from spdl_media._devices.memory import Block
from spdl_media.buffer import CPUBuffer, Failure
from spdl_media.cuda_buffer import Buffer, CUDABuffer


def ready_buffer(
    owner: Any,
    *,
    failures: tuple[Failure, ...] = (),
    indices: tuple[int, ...] | None = None,
) -> Buffer:
    """The buffer over an array that is ready, of DALI or of a stand-in in host memory."""
    if not hasattr(owner, "__cuda_array_interface__"):
        return CPUBuffer(np.asarray(owner), failures=failures, indices=indices)
    interface = owner.__cuda_array_interface__
    _, index = owner.__dlpack_device__()
    return CUDABuffer(
        owner,
        tuple(interface["shape"]),
        interface["typestr"],
        int(index),
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
