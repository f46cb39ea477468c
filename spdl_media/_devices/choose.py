"""Which library works with devices here, and why none does."""

from __future__ import annotations

from typing import Any

from spdl_media._devices.cupy_device import CupyDevice
from spdl_media._devices.device import Device, no_such_device
from spdl_media._devices.driver import device_of_stream
from spdl_media._devices.forks import HISTORY, REMEDY
from spdl_media._devices.torch_device import TorchDevice
from spdl_media._optional import is_available, require
from spdl_media.config import CUDAConfig
from spdl_media.errors import TransferError

NEITHER = "neither torch nor cupy is installed"
WITHOUT_CUDA = "is built without CUDA"


def cuda_library() -> tuple[str | None, str]:
    """The package that finds a CUDA device here, PyTorch before CuPy; or ``None`` and the reason."""
    if HISTORY.lost:
        return None, f"this process was forked from one that had used CUDA. {REMEDY}"
    reasons = []
    for package, count in (("torch", _torch_count), ("cupy", _cupy_count)):
        if not is_available(package):
            continue
        number, reason = count()
        if number:
            HISTORY.used = True
            return package, ""
        reasons.append(reason)
    return None, " and ".join(reasons) or NEITHER


def _torch_count() -> tuple[int, str]:
    torch: Any = require("torch", "using a CUDA device")
    if torch.cuda.is_available():
        return int(torch.cuda.device_count()), "torch finds no CUDA device"
    if torch.backends.cuda.is_built():
        return 0, "torch finds no CUDA device"
    return 0, f"torch {torch.__version__} {WITHOUT_CUDA}"


def _cupy_count() -> tuple[int, str]:
    try:
        cupy: Any = require("cupy", "using a CUDA device")
        return int(cupy.cuda.runtime.getDeviceCount()), "cupy finds no CUDA device"
    except Exception as error:  # noqa: BLE001  # cupy's error types come from the module that failed
        return 0, f"cupy finds no CUDA device ({error})"


def open_device(config: CUDAConfig, purpose: str) -> Device:
    """A stream of a device, through PyTorch or CuPy.

    Raises:
        TransferError: No device can be used here; the message says why. Or the stream is of another device.
        ValueError: There are devices, but not this one.
    """
    HISTORY.check(purpose)
    package, reason = cuda_library()
    if package is None:
        raise TransferError(
            f"{purpose} needs a CUDA device, and there is none: {reason}. {_hint(reason)}"
        )
    module = require(package, purpose)
    count = _count(package)
    if config.device_index >= count:
        raise no_such_device(config.device_index, count)
    _check_stream(config)
    if package == "torch":
        return TorchDevice(module, config.device_index, config.stream)
    device = CupyDevice(module, config.device_index, config.stream)
    return device if config.stream is not None else device.on_own_stream()


def _hint(reason: str) -> str:
    if reason == NEITHER:
        return (
            'pip install torch brings one, and so does pip install "cupy-cuda12x[ctk]" (or '
            '"cupy-cuda13x[ctk]")'
        )
    if reason.endswith(WITHOUT_CUDA):
        return (
            "Install one that has it (https://pytorch.org/get-started/locally), or beside it CuPy: pip "
            'install "cupy-cuda12x[ctk]" (or "cupy-cuda13x[ctk]", as the driver is)'
        )
    return "nvidia-smi shows whether the driver sees one, and CUDA_VISIBLE_DEVICES whether this process may"


def _count(package: str) -> int:
    return (_torch_count if package == "torch" else _cupy_count)()[0]


def _check_stream(config: CUDAConfig) -> None:
    """Refuse a stream of another device, on which copies would fail or go astray."""
    found = None if config.stream is None else device_of_stream(config.stream)
    if found not in (None, config.device_index):
        raise TransferError(
            f"the stream {config.stream:#x} belongs to CUDA device {found}, and device {config.device_index} "
            "was asked for. Make the stream on the device: torch.cuda.Stream(device="
            f"{config.device_index})"
        )
