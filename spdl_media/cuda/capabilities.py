"""What can be used of a GPU here, and why the rest cannot: each part is looked for by itself."""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, SupportsIndex

from spdl_media._optional import INSTALL, is_available, require
from spdl_media.config import as_cuda_config
from spdl_media.cuda.dali import check_device
from spdl_media.cuda.nvdec import LIBRARIES, VIDEO_LIBRARY
from spdl_media.cuda_driver import HISTORY, LIBRARY
from spdl_media.devices import WITHOUT_CUDA, open_device

__all__ = ("CUDACapabilities", "Capability", "cuda_capabilities")


@dataclass(frozen=True, slots=True)
class Capability:
    """Whether one thing can be used.

    Attributes:
        available: Whether it can.
        reason: Why it cannot, and what helps; empty if it can.
        missing: Names of the parts that are missing for it.
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
    """What can be used of a CUDA device. ``print`` shows it line by line, and each reason once.

    Attributes:
        pinned_memory: Page-locked host memory: ``cpu_storage``, ``StoragePool``.
        transfer: Copies: ``transfer_buffer``, ``transfer_tensor``.
        kernels: Colour: ``nv12_to_rgb``, ``nv12_to_bgr``.
        dali: DALI's operators.
        nvjpeg: Pictures: ``decode_image_nvjpeg``, ``load_image_batch_nvjpeg``.
        nvdec: Videos: ``decode_packets_nvdec``, ``streaming_load_video_nvdec``, ``load_video(cuda=)``.
        parts: What they need, by name, each looked for without the others: ``"driver"`` (NVIDIA's, with a
            device), ``"torch"`` (built with CUDA), ``"cupy"``, ``"nvcuvid"`` (the driver's library for
            NVDEC), ``"dali"`` (with its dynamic API), and ``"nvimgcodec"`` (looks at the images that DALI
            decodes).
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
            # Reasons stand with the parts below, so that each is said once.
            lines.append(f"{name}: no: {missing} missing" if missing else f"{name}: {one}")
        parts = (f"  {name}: {part}" for name, part in self.parts.items())
        return "\n".join([*lines, "parts:", *parts])


def cuda_capabilities(device_index: SupportsIndex = 0) -> CUDACapabilities:
    """Find out what can be used of a CUDA device. A part that is missing takes no other with it.

    Libraries are opened and devices asked for, and nothing is decoded or copied: NVDEC's list of codecs, for
    one, depends on the card.

    Args:
        device_index: Number of the device.

    Returns:
        What is there, and of what is not, every reason at once.

    Raises:
        TypeError: It is not a number.
        ValueError: It is negative. A number that no device has is a reason, not an error.

    Thread safety: safe.
    """
    index = as_cuda_config(device_index).device_index
    parts = {name: _tried(find) for name, find in _PARTS.items()}
    found = {name: _capability(name, parts, index) for name in _NEEDS}
    return CUDACapabilities(**found, parts=parts)


def _capability(name: str, parts: Mapping[str, Capability], index: int) -> Capability:
    """Whether all is there that it needs, and then whether the device opens."""
    # One part of each group is enough: PyTorch or CuPy.
    missing = [one for one in _NEEDS[name] if not any(parts[part] for part in one)]
    if missing:
        reasons = [" and ".join(parts[part].reason for part in one) for one in missing]
        names = tuple(" or ".join(one) for one in missing)
        return Capability(available=False, reason="; ".join(reasons), missing=names)
    # All parts are there, and the device may still be none of those that there are.
    if name in ("dali", "nvjpeg"):
        return _tried(lambda: check_device(index))
    return _tried(lambda: open_device(as_cuda_config(index), "transfer"))


def _tried(find: Callable[[], object]) -> Capability:
    try:
        find()
    except Exception as error:  # noqa: BLE001  # whatever a library raises is the reason that it cannot be used
        return Capability(available=False, reason=str(error) or type(error).__name__)
    return Capability(available=True)


def _library(name: str) -> Any:
    """A library of NVIDIA's driver, or what to do where it is missing."""
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
            f"NVIDIA's driver is there and finds no device (error {status}). nvidia-smi shows whether it "
            "sees one, and CUDA_VISIBLE_DEVICES whether this process may"
        )
    # This has started the driver, which a child that is forked now does not get.
    HISTORY.used = True


def _torch() -> None:
    torch: Any = _package("torch")
    # Not is_available: whether there is a device is a question for the driver.
    if not torch.backends.cuda.is_built():
        raise RuntimeError(
            f"torch {torch.__version__} {WITHOUT_CUDA}. Install one that has it, as "
            "https://pytorch.org/get-started/locally says: pip install --force-reinstall torch"
        )


def _package(name: str) -> Any:
    """An optional package, or in few words that it is missing, and its ``pip`` line."""
    # In few words, where the error of require has a sentence about its purpose.
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
"""How each part is looked for."""

_NEEDS: dict[str, tuple[tuple[str, ...], ...]] = {
    **dict.fromkeys(("pinned_memory", "transfer", "kernels"), (("driver",), ("torch", "cupy"))),
    "dali": (("driver",), ("dali",)),
    "nvjpeg": (("driver",), ("dali",), ("nvimgcodec",)),
    "nvdec": (("driver",), ("nvcuvid",), ("torch", "cupy")),
}
"""What each capability needs: one part of every group."""
