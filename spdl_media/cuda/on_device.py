"""What all functions with ``cuda=`` share: which device is asked for, and the copy of what the CPU made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spdl_media._arguments import ArrayLayout
from spdl_media._audio_arrays import Samples
from spdl_media._devices.choose import open_device
from spdl_media._devices.cupy_device import CupyDevice, check_headers
from spdl_media._devices.device import Device
from spdl_media._optional import require
from spdl_media.buffer import Buffer, CPUBuffer, CUDABuffer
from spdl_media.config import CUDAConfig
from spdl_media.convert import convert_frames
from spdl_media.frames import Frames
from spdl_media.storage import PinnedMemory, Storage
from spdl_media.transfer import to_device


def staging(storage: Storage | None) -> Storage:
    """The memory that arrays pass through on their way: the caller's, or pinned memory."""
    return PinnedMemory() if storage is None else storage


def on_its_way(
    config: CUDAConfig | None, storage: Storage | None, purpose: str
) -> tuple[Callable[[CPUBuffer], Buffer], Storage | None]:
    """What brings an array in host memory to where it is asked for, and the memory that it is made in.

    Raises:
        TransferError: There is no device.
        ValueError: There are devices, but not this one.
    """
    if config is None:
        return lambda buffer: buffer, storage
    device = open_device(config, purpose)
    return lambda buffer: copied(buffer, device, config), staging(storage)


def into_array(
    config: CUDAConfig | None, storage: Storage | None, layout: ArrayLayout | None, purpose: str
) -> Callable[[Frames | Samples], Buffer]:
    """What puts frames into an array, in host memory or on the device, which is opened now.

    Raises:
        TransferError: There is no device.
        ValueError: There are devices, but not this one.
    """
    finish, memory = on_its_way(config, storage, purpose)

    def convert(frames: Frames | Samples) -> Buffer:
        if isinstance(frames, Samples):
            return finish(frames.convert(memory))
        return finish(convert_frames(frames, memory, layout=layout))

    return convert


def copied(buffer: CPUBuffer, device: Device, config: CUDAConfig) -> CUDABuffer:
    """The buffer on the device. Its memory in the host goes back when the copy is done."""
    with buffer:
        return to_device(
            buffer.array,
            device,
            config,
            failures=buffer.failures,
            indices=buffer.indices,
            colorspace=buffer.colorspace,
            color_range=buffer.color_range,
        )


def cupy_device(config: CUDAConfig, purpose: str) -> CupyDevice:
    """The stream of a config under CuPy, in the thread that asks: its own, if the config has none.

    Raises:
        MissingDependencyError: CuPy is not installed.
    """
    device = CupyDevice(require("cupy", purpose), config.device_index, config.stream)
    return device if config.stream is not None else device.on_own_stream()


def why_no_kernels(index: int) -> str | None:
    """Why CuPy cannot run kernels on a device, and how that is mended; ``None``: it can."""
    from spdl_media.cuda._color_device import open_device as open_color_device

    try:
        open_color_device(None, index)
    except Exception as error:  # noqa: BLE001  # whatever CuPy raises is the reason
        return str(error) or type(error).__name__
    cupy: Any = require("cupy", "converting colours on a CUDA device")
    try:
        cupy.cuda.nvrtc.getVersion()
    except Exception as error:  # noqa: BLE001  # likewise
        return (
            f"CuPy cannot compile kernels without NVIDIA's NVRTC ({error}). Install it: pip install "
            "nvidia-cuda-nvrtc-cu12 (or nvidia-cuda-nvrtc for CUDA 13, as CuPy is)"
        )
    try:
        check_headers(cupy)
    except RuntimeError as error:
        return str(error)
    return None
