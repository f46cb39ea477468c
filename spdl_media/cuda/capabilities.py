"""Detects which GPU features can be used here, and why others cannot. Each part is checked by itself."""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, SupportsIndex

from spdl_media._optional import INSTALL, is_available, require
from spdl_media.config import as_cuda_config
from spdl_media.cuda.cuvid import VIDEO_LIBRARY
from spdl_media.cuda.dali import check_device
from spdl_media.cuda.nvdec import LIBRARIES
from spdl_media.cuda_driver import HISTORY, LIBRARY
from spdl_media.devices import SEES_NO_DEVICE, WITHOUT_CUDA, open_device

__all__ = ("CUDACapabilities", "Capability", "cuda_capabilities")


@dataclass(frozen=True, slots=True)
class Capability:
    """Whether a feature can be used.

    Attributes:
        available: Whether the feature can be used.
        reason: Why it cannot be used, and a remedy; empty if it can.
        missing: Names of the parts that it needs and that are missing.
    """

    available: bool
    reason: str = ""
    missing: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.available

    def __str__(self) -> str:
        return "yes" if self.available else f"no: {self.reason}"


@dataclass(frozen=True, slots=True)
class CUDACapabilities:
    """The usable features of a CUDA device. ``print`` shows one line per feature, and each reason once.

    Attributes:
        pinned_memory: Pinned host memory: ``cpu_storage``, ``StoragePool``.
        transfer: Copies: ``transfer_buffer``, ``transfer_tensor``.
        kernels: Colour conversion: ``nv12_to_rgb``, ``nv12_to_bgr``.
        dali: DALI's operators.
        nvjpeg: Images: ``decode_image_nvjpeg``, ``load_image_batch_nvjpeg``.
        nvdec: Videos: ``decode_packets_nvdec``, ``streaming_load_video_nvdec``, ``load_video(cuda=)``.
        parts: The parts that features need, by name, each checked by itself: ``"driver"`` (NVIDIA's, with a
            device), ``"torch"`` (built with CUDA), ``"cupy"``, ``"nvcuvid"`` (the driver's library for
            NVDEC), ``"dali"`` (with its dynamic API), and ``"nvimgcodec"`` (reads the headers of images for
            DALI).
    """

    pinned_memory: Capability
    transfer: Capability
    kernels: Capability
    dali: Capability
    nvjpeg: Capability
    nvdec: Capability
    parts: Mapping[str, Capability]

    def __str__(self) -> str:
        lines = []
        for name in _NEEDS:
            one: Capability = getattr(self, name)
            missing = ", ".join(one.missing)
            # Reasons are shown with the parts below, so that each appears once.
            lines.append(f"{name}: no: {missing} missing" if missing else f"{name}: {one}")
        parts = (f"  {name}: {part}" for name, part in self.parts.items())
        return "\n".join([*lines, "parts:", *parts])


def cuda_capabilities(device_index: SupportsIndex = 0) -> CUDACapabilities:
    """Detect which features of a CUDA device can be used. A missing part does not hide other parts.

    Libraries are opened and devices are queried, but nothing is decoded or copied. So a decoder may still
    reject a codec, because NVDEC's codecs depend on the GPU.

    Args:
        device_index: Number of the device.

    Returns:
        The features, with all reasons of those that cannot be used.

    Raises:
        TypeError: ``device_index`` is not an integer.
        ValueError: ``device_index`` is negative. A number without a device is a reason, not an error.

    Thread safety: safe.
    """
    index = as_cuda_config(device_index).device_index
    parts = {name: _check(find) for name, find in _PARTS.items()}
    found = {name: _capability(name, parts, index) for name in _NEEDS}
    return CUDACapabilities(**found, parts=parts)


def _capability(name: str, parts: Mapping[str, Capability], index: int) -> Capability:
    """Check whether all parts of a feature exist, then whether the device can be opened."""
    # One part of each group is enough: PyTorch or CuPy.
    missing = [one for one in _NEEDS[name] if not any(parts[part] for part in one)]
    if missing:
        reasons = [" and ".join(parts[part].reason for part in one) for one in missing]
        names = tuple(" or ".join(one) for one in missing)
        return Capability(available=False, reason="; ".join(reasons), missing=names)
    # All parts exist, but there may be no device with this number.
    if name in ("dali", "nvjpeg"):
        return _check(lambda: check_device(index))
    return _check(lambda: open_device(as_cuda_config(index), "transfer"))


def _check(find: Callable[[], object]) -> Capability:
    try:
        find()
    except Exception as error:  # noqa: BLE001  # whatever a library raises is the reason
        return Capability(available=False, reason=str(error) or type(error).__name__)
    return Capability(available=True)


def _library(name: str) -> Any:
    """Load a library of NVIDIA's driver, or raise an error with the remedy."""
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise RuntimeError(LIBRARIES[name].format(error)) from error


def _driver() -> None:
    HISTORY.check("looking for devices")
    driver, count = _library(LIBRARY), ctypes.c_int()
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if status or not count.value:
        raise RuntimeError(
            f"NVIDIA's driver is there and finds no device (error {status}). {SEES_NO_DEVICE}"
        )
    # The driver is initialised now, and does not work in a process that is forked later.
    HISTORY.used = True


def _torch() -> None:
    torch: Any = _package("torch")
    # Not torch.cuda.is_available(): the driver is checked as a part of its own.
    if not torch.backends.cuda.is_built():
        raise RuntimeError(
            f"torch {torch.__version__} {WITHOUT_CUDA}. Install one that has it, as "
            "https://pytorch.org/get-started/locally says: pip install --force-reinstall torch"
        )


def _package(name: str) -> Any:
    """Import an optional package, or raise a short error with its ``pip`` command."""
    # Shorter than the error of require(), which also states the purpose.
    if not is_available(name):
        raise RuntimeError(f"{name} is not installed: {INSTALL[name][1]}")
    return require(name, f"using {name}")


def _dali() -> None:
    _package("dali")
    check_device(None)


_PARTS: dict[str, Callable[[], object]] = {
    "driver": _driver,
    "torch": _torch,
    "cupy": lambda: _package("cupy"),
    "nvcuvid": lambda: _library(VIDEO_LIBRARY),
    "dali": _dali,
    "nvimgcodec": lambda: _package("nvimgcodec"),
}
"""The functions that check the parts."""

_NEEDS: dict[str, tuple[tuple[str, ...], ...]] = {
    **dict.fromkeys(("pinned_memory", "transfer", "kernels"), (("driver",), ("torch", "cupy"))),
    "dali": (("driver",), ("dali",)),
    "nvjpeg": (("driver",), ("dali",), ("nvimgcodec",)),
    "nvdec": (("driver",), ("nvcuvid",), ("torch", "cupy")),
}
"""The parts that each feature needs: one of every group."""
