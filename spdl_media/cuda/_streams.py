"""Streams of the caller's that a decoder takes at their word."""

from __future__ import annotations

from spdl_media._devices.choose import cuda_library, open_device
from spdl_media.config import CUDAConfig


def check_stream(config: CUDAConfig, purpose: str) -> None:
    """Refuse a stream of another device, on which work would fail or go astray.

    Raises:
        TransferError: It is of another device, or CUDA cannot be used in this process.
    """
    # Without either library there is nobody to make streams but the caller's own bindings.
    if config.stream is not None and cuda_library()[0] is not None:
        open_device(config, purpose)
