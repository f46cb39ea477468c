"""FFmpeg's hardware decoder, opened through PyAV: packets in, frames that stay on the device out."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import av
from av.codec.context import CodecContext
from av.codec.hwaccel import HWAccel

from spdl_media._devices.device import no_such_device
from spdl_media._ffmpeg import check_codec_options, describe, ffmpeg_log
from spdl_media.codec import VideoCodec, _set_video
from spdl_media.config import DecodeConfig
from spdl_media.errors import DecodeError, MediaError, MissingDependencyError

DRIVER, VIDEO_LIBRARY = (
    ("nvcuda.dll", "nvcuvid.dll")
    if sys.platform == "win32"
    else ("libcuda.so.1", "libnvcuvid.so.1")
)
LIBRARIES = MappingProxyType(
    {
        DRIVER: (
            "NVIDIA's driver is missing ({}). Install the driver; in a container, start it with the GPU "
            "(docker run --gpus all)"
        ),
        VIDEO_LIBRARY: (
            "the video library of NVIDIA's driver is missing ({}). In a container, set "
            "NVIDIA_DRIVER_CAPABILITIES=compute,utility,video; on a host, install the driver's decode "
            "package (libnvidia-decode)"
        ),
    }
)
"""What decoding needs of NVIDIA's driver, and what to say where it is missing."""


def open_on_device(
    codec: VideoCodec, config: DecodeConfig, source: str, device_index: int
) -> CodecContext:
    """Open the hardware decoder of a stream, in the CUDA context that is current in this thread.

    Frames that it gives are copies, which hold none of the decoder's surfaces: FFmpeg makes them unless it
    is told ``hwaccel_flags=unsafe_output``.

    Raises:
        MissingDependencyError: The driver, or its video library, is missing.
        ValueError: There is no device of this index, no decoder option of that name, or ``config`` names
            a decoder of the CPU's.
        DecodeError: The device is there, but does not open.
    """
    # FFmpeg's own decoders alone have hardware support, not libraries such as dav1d.
    name = codec.name
    if config.decoder not in (None, name):
        raise ValueError(
            f"decode_config(decoder={config.decoder!r}) runs on the CPU alone; the decoder on the device is "
            f"{name!r}. Leave it out, or decode with cuda=None"
        )
    check_codec_options(name, config.decoder_options)
    accel = HWAccel(
        "cuda",
        str(device_index),
        allow_software_fallback=True,
        # Kernels run in the device's primary context, and cannot read memory of another. FFmpeg retains that
        # context only with flags that PyTorch, CuPy and DALI do not give it, and takes the current one as it
        # is. PyAV asks for the primary one unless it is told not to, and FFmpeg refuses to be asked for both.
        options={"primary_ctx": "0", "current_ctx": "1"},
        is_hw_owned=True,
    )
    with ffmpeg_log() as lines:
        try:
            context = CodecContext.create(name, "r", hwaccel=accel)
            context.thread_count = 1
            _set_video(context, replace(codec, pix_fmt=None))  # the decoder states its own
            rate = f"{codec.time_base.numerator}/{codec.time_base.denominator}"
            context.options = {"pkt_timebase": rate, **config.decoder_options}
            context.open(strict=False)
        except av.FFmpegError as error:
            raise device_error(device_index, describe(error, lines), source) from error
    return context


def device_error(
    device_index: int,
    text: str,
    source: str | None,
    load: Callable[[str], Any] = ctypes.CDLL,
) -> MediaError | ValueError:
    """Find out why NVDEC does not open: FFmpeg says "Operation not permitted" for whatever is missing.

    Args:
        device_index: The device that was asked for.
        text: FFmpeg's words.
        source: What was to be decoded.
        load: Opens a shared library, or raises OSError.
    """
    missing = missing_library(source, load)
    if missing is not None:
        return missing
    count = _device_count(load(DRIVER))
    if not 0 <= device_index < count:
        return no_such_device(device_index, count)
    return DecodeError(f"NVDEC cannot be opened on device {device_index}: {text}", source=source)


def missing_library(
    source: str | None = None, load: Callable[[str], Any] = ctypes.CDLL
) -> MissingDependencyError | None:
    """The first of the libraries of NVIDIA's driver that decoding needs and that is missing, as an error."""
    for library, text in LIBRARIES.items():
        try:
            load(library)
        except OSError as error:
            return MissingDependencyError(
                f"decoding video on the GPU needs {library}: {text.format(error)}. cuda=None decodes on the "
                "CPU",
                source=source,
                name=library,
            )
    return None


def _device_count(driver: Any) -> int:
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value
