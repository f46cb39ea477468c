"""Images with ``cuda=``: the route of each batch to the device.

``decoder="auto"`` takes the first route that can make what is asked for:

``dali``    the file goes to DALI's operators, which decode and scale it on the device
``planes``  FFmpeg's planes are copied, and a kernel scales and colours them on the device
``copied``  the finished array is copied

``decoder="cpu"`` leaves the first out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from spdl_media._batch import ImageRequest
from spdl_media._devices.choose import open_device
from spdl_media._optional import is_available
from spdl_media.buffer import Buffer, CPUBuffer
from spdl_media.config import CUDAConfig, as_decode_config
from spdl_media.cuda.on_device import cupy_device, why_no_kernels
from spdl_media.errors import MissingDependencyError, TransferError
from spdl_media.inputs import Source
from spdl_media.transfer import copied, staging

Steps: TypeAlias = Callable[[Callable[[], bool]], Buffer]


def device_steps(
    srcs: Sequence[Source],
    request: ImageRequest,
    config: CUDAConfig,
    on_cpu: Callable[[Callable[[], bool]], CPUBuffer],
) -> Steps:
    """Check the request, and give what loads images to a device.

    Args:
        srcs: The images.
        request: How to load them.
        config: The device.
        on_cpu: Loads them to host memory.

    Raises:
        ValueError: The decoder that is asked for cannot make such images.
    """
    if request.decoder == "dali" and (refusal := _dali_refusal(request)):
        raise ValueError(f"decoder='dali': {refusal}. decoder='auto' takes the CPU for it")
    # The device is opened in the thread that does the work, whose own stream it is.
    return lambda stopped: _to_device(srcs, request, config, on_cpu, stopped)


def _to_device(
    srcs: Sequence[Source],
    request: ImageRequest,
    config: CUDAConfig,
    on_cpu: Callable[[Callable[[], bool]], CPUBuffer],
    stopped: Callable[[], bool],
) -> Buffer:
    """Load images by the first route that can make what is asked for."""
    is_for_dali = _dali_refusal(request) is None and (request.decoder == "dali" or _has_dali())
    unusable = _why_dali_fails(request, config) if is_for_dali else None
    if is_for_dali and unusable is None:
        return _by_dali(srcs, request, config, stopped)
    device = open_device(config, request.purpose)
    if unusable is not None:
        from spdl_media.cuda.fallback import warn_of_fallback

        warn_of_fallback(str(unusable), "the pictures")
    if _takes_planes(request, config):
        return _by_planes(srcs, request, config, stopped)
    return copied(on_cpu(stopped), device, config)


def _dali_refusal(request: ImageRequest) -> str | None:
    """Why DALI is not to make such images, or cannot; ``None``: it can."""
    if request.decoder == "cpu":
        return "decoder='cpu'"
    if not request.is_plain:
        return "DALI's operators take no crops=, flips= or filter_desc="
    from spdl_media.cuda.nvjpeg import why_not_dali

    return why_not_dali(request.ops.pix_fmt, request.ops.scale_algo)


def _has_dali() -> bool:
    return is_available("dali") and is_available("nvimgcodec")


def _why_dali_fails(request: ImageRequest, config: CUDAConfig) -> Exception | None:
    """Why DALI, which is installed, cannot be used on the device.

    Raises:
        MissingDependencyError: It is asked for, and is not installed or too old.
        TransferError: It is asked for, and finds no device.
        ValueError: There are devices, but not this one.
    """
    from spdl_media.cuda.slots import SlotDevice, check_device

    try:
        check_device(SlotDevice("gpu", config.device_index))
    except (MissingDependencyError, TransferError) as error:
        if request.decoder == "dali":
            raise
        return error
    return None


def _takes_planes(request: ImageRequest, config: CUDAConfig) -> bool:
    """Whether the kernel makes such images from planes."""
    options = request.ops
    return (
        request.is_plain
        and not request.is_single
        and options.pix_fmt in ("rgb24", "bgr24")
        and options.scale_algo in ("bicubic", "bilinear")
        and options.quality != "fast"
        and as_decode_config(request.decode_config).downscale is None
        and is_available("cupy")
        and why_no_kernels(config.device_index) is None
    )


def _by_dali(
    srcs: Sequence[Source], request: ImageRequest, config: CUDAConfig, stopped: Callable[[], bool]
) -> Buffer:
    from spdl_media.cuda.nvjpeg import decode_image_batch

    return decode_image_batch(
        srcs,
        cuda=config,
        width=request.ops.width,
        height=request.ops.height,
        pix_fmt=request.ops.pix_fmt or "",
        scale_mode=request.ops.scale_mode,
        scale_algo=request.ops.scale_algo,
        demux_config=request.demux_config,
        decode_config=request.decode_config,
        layout=request.layout,
        on_error=request.on_error,
        stopped=stopped,
        is_single=request.is_single,
        name=request.name,
    )


def _by_planes(
    srcs: Sequence[Source], request: ImageRequest, config: CUDAConfig, stopped: Callable[[], bool]
) -> Buffer:
    from spdl_media.cuda._planes_batch import load_planes

    return load_planes(
        srcs,
        cupy_device(config, request.purpose),
        config,
        request.ops,
        request.demux_config,
        request.decode_config,
        staging(request.storage),
        request.layout,
        request.on_error,
        stopped,
    )
