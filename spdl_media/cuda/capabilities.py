"""What can be used of a GPU here, and why the rest cannot: each part is tried by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, SupportsIndex

from spdl_media._backends import require
from spdl_media._devices.choose import cuda_library, open_device
from spdl_media.config import as_cuda_config
from spdl_media.cuda._color_device import open_device as open_color_device
from spdl_media.cuda.nvdec import why_not_nvdec
from spdl_media.cuda.slots import SlotDevice, check_device

__all__ = ("CUDACapabilities", "Capability", "cuda_capabilities")


@dataclass(frozen=True, slots=True)
class Capability:
    """Whether one part can be used.

    Attributes:
        available: Whether it can.
        reason: Why it cannot, and what helps; empty if it can.
    """

    available: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.available

    def __str__(self) -> str:
        return "yes" if self.available else f"no: {self.reason}"


@dataclass(frozen=True, slots=True)
class CUDACapabilities:
    """What can be used of a CUDA device. ``print`` shows it line by line.

    Attributes:
        pinned_memory: Page-locked host memory: ``cpu_storage``, ``StoragePool``.
        transfer: Copies: ``transfer_buffer``, ``transfer_tensor``.
        kernels: Colour: ``yuv_to_rgb``, ``nv12_to_rgb``, ``nv12_to_bgr``.
        dali: DALI's operators.
        nvjpeg: Pictures: ``decode_image_nvjpeg``, ``load_image_batch_nvjpeg``.
        nvdec: Videos: ``decode_packets_nvdec``, ``streaming_load_video_nvdec``, ``load_video(cuda=)``.
    """

    pinned_memory: Capability
    transfer: Capability
    kernels: Capability
    dali: Capability
    nvjpeg: Capability
    nvdec: Capability

    def __str__(self) -> str:
        return "\n".join(f"{field.name}: {getattr(self, field.name)}" for field in fields(self))


def cuda_capabilities(device_index: SupportsIndex = 0) -> CUDACapabilities:
    """Find out what can be used of a CUDA device, part by part. A part that fails takes no other with it.

    Libraries are opened and devices asked for, and nothing is decoded or copied: NVDEC's list of codecs, for
    one, depends on the card.

    Args:
        device_index: Number of the device.

    Raises:
        TypeError: It is not a number.
        ValueError: It is negative. A number that no device has is a reason, not an error.

    Thread safety: safe.
    """
    index = as_cuda_config(device_index).device_index
    probes: dict[str, Callable[[int], object]] = {
        "pinned_memory": _pinned_memory,
        "transfer": lambda index: open_device(as_cuda_config(index), "transfer"),
        "kernels": _kernels,
        "dali": _dali,
        "nvjpeg": _nvjpeg,
        "nvdec": _nvdec,
    }
    return CUDACapabilities(**{name: _tried(probe, index) for name, probe in probes.items()})


def _tried(probe: Callable[[int], object], index: int) -> Capability:
    try:
        probe(index)
    except Exception as error:  # noqa: BLE001  # whatever a library raises is the reason that it cannot be used
        return Capability(available=False, reason=str(error) or type(error).__name__)
    return Capability(available=True)


def _pinned_memory(_: int) -> None:
    package, reason = cuda_library()
    if package is None:
        raise RuntimeError(f"memory cannot be pinned: {reason}")


def _kernels(index: int) -> None:
    open_color_device(None, index)
    # It compiles the kernels, and is a wheel of its own for CuPy.
    cupy: Any = require("cupy", "converting colours on a CUDA device")
    cupy.cuda.nvrtc.getVersion()


def _dali(index: int) -> None:
    check_device(SlotDevice("gpu", index))


def _nvjpeg(index: int) -> None:
    require("nvimgcodec", "decoding pictures with DALI")
    _dali(index)


def _nvdec(index: int) -> None:
    if missing := why_not_nvdec():
        raise RuntimeError(missing)
    open_color_device(None, index)
