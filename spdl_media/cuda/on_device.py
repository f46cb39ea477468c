"""CuPy on the device of a config, and whether it can run kernels there."""

from __future__ import annotations

from typing import Any

from spdl_media._devices.cupy_device import CupyDevice, check_headers
from spdl_media._optional import require
from spdl_media.config import CUDAConfig


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
