"""What a conversion needs of a device."""

from __future__ import annotations

from typing import Any

from spdl_media import _optional
from spdl_media._devices.cupy_device import CupyDevice
from spdl_media._devices.device import no_such_device
from spdl_media._devices.forks import HISTORY
from spdl_media.config import as_cuda_config
from spdl_media.cuda._streams import check_stream


def device_of(array: Any) -> int | None:
    """Number of the CUDA device that an array lies on; ``None``: in host memory.

    Arrays with ``__cuda_array_interface__`` alone do not say, and are taken to lie on CuPy's current device.
    """
    if callable(getattr(array, "__dlpack_device__", None)):
        kind, index = array.__dlpack_device__()
        # kDLCUDA and kDLCUDAManaged; pinned memory (3) is host memory.
        return int(index) if int(kind) in (2, 13) else None
    if hasattr(array, "__cuda_array_interface__"):
        cupy = _optional.require("cupy", "converting colours on a CUDA device")
        return int(cupy.asarray(array).device.id)
    return None


def open_device(cuda_config: Any, index: int) -> CupyDevice:
    """The device that a configuration or a number names, or the one with this index.

    Raises:
        MissingDependencyError: CuPy is not installed.
        TransferError: CUDA cannot be used in this process, or the stream is of another device.
        ValueError: There is no such device.
    """
    purpose = "converting colours on a CUDA device"
    cupy: Any = _optional.require("cupy", purpose)
    config = as_cuda_config(index if cuda_config is None else cuda_config)
    HISTORY.use(purpose)
    count = cupy.cuda.runtime.getDeviceCount()
    if config.device_index >= count:
        raise no_such_device(config.device_index, count)
    check_stream(config, purpose)
    return CupyDevice(cupy, config.device_index, config.stream)
