"""NVIDIA's video library (NVCUVID) through ctypes: its structures, and calls of its functions.

See:
    NVIDIA Video Codec SDK, "NVDEC Video Decoder API Programming Guide"; ``nvcuvid.h``, ``cuviddec.h``.
"""

from __future__ import annotations

import ctypes
import errno
import os
from ctypes import (
    Structure,
    byref,
    c_char_p,
    c_int,
    c_longlong,
    c_short,
    c_ubyte,
    c_uint,
    c_ulong,
    c_ulonglong,
    c_ushort,
    c_void_p,
)
from functools import lru_cache
from typing import Any

import av

from spdl_media.cuda_driver import error_name
from spdl_media.errors import TransferError

VIDEO_LIBRARY = "nvcuvid.dll" if os.name == "nt" else "libnvcuvid.so.1"

CODECS = {"h264": 4, "hevc": 8, "vp9": 10, "av1": 11}
"""Numbers of the codecs, by FFmpeg's names."""

# CUDA's errors that the video causes: the hardware does not support it, or the data is damaged.
_OF_DATA, _OUT_OF_MEMORY = (1, 801), 2


class NotOnDeviceError(Exception):
    """The hardware, or DALI, does not decode this video or image. The message says why."""


class Format(Structure):
    """``CUVIDEOFORMAT``: what the headers in the data state."""

    _fields_ = (
        ("codec", c_int),
        ("frame_rate", c_uint * 2),
        ("is_progressive", c_ubyte),
        ("luma_depth", c_ubyte),
        ("chroma_depth", c_ubyte),
        ("num_surfaces", c_ubyte),
        ("width", c_uint),
        ("height", c_uint),
        *((side, c_int) for side in ("left", "top", "right", "bottom")),
        ("chroma", c_int),
        ("bitrate", c_uint),
        ("aspect_ratio", c_int * 2),
        ("signal", c_ubyte),
        ("primaries", c_ubyte),
        ("transfer", c_ubyte),
        ("matrix", c_ubyte),
        ("num_more", c_uint),
    )


class ParserParams(Structure):
    """``CUVIDPARSERPARAMS``: what a parser calls."""

    _fields_ = (
        ("codec", c_int),
        ("num_surfaces", c_uint),
        ("clock_rate", c_uint),
        ("error_threshold", c_uint),
        ("delay", c_uint),
        ("flags", c_uint),
        ("reserved", c_uint * 4),
        ("user", c_void_p),
        ("sequence", c_void_p),
        ("decode", c_void_p),
        ("display", c_void_p),
        ("more", c_void_p * 8),
    )


class Packet(Structure):
    """``CUVIDSOURCEDATAPACKET``: data for the parser."""

    _fields_ = (
        ("flags", c_ulong),
        ("size", c_ulong),
        ("data", c_char_p),
        ("timestamp", c_longlong),
    )


class Shown(Structure):
    """``CUVIDPARSERDISPINFO``: a picture that is ready to be shown."""

    _fields_ = (
        ("surface", c_int),
        ("is_progressive", c_int),
        ("top_first", c_int),
        ("repeat", c_int),
        ("timestamp", c_longlong),
    )


class Caps(Structure):
    """``CUVIDDECODECAPS``: what the hardware decodes."""

    _fields_ = (
        ("codec", c_int),
        ("chroma", c_int),
        ("depth", c_uint),
        ("reserved", c_uint * 3),
        ("is_supported", c_ubyte),
        ("num_engines", c_ubyte),
        ("formats", c_ushort),
        ("most_wide", c_uint),
        ("most_high", c_uint),
        ("most_blocks", c_uint),
        ("least_wide", c_ushort),
        ("least_high", c_ushort),
        ("more", c_uint * 11),
    )


class DecoderParams(Structure):
    """``CUVIDDECODECREATEINFO``: what a decoder decodes."""

    _fields_ = (
        ("width", c_ulong),
        ("height", c_ulong),
        ("num_surfaces", c_ulong),
        ("codec", c_int),
        ("chroma", c_int),
        ("flags", c_ulong),
        ("depth", c_ulong),
        ("intra_only", c_ulong),
        ("most_wide", c_ulong),
        ("most_high", c_ulong),
        ("reserved", c_ulong),
        ("area", c_short * 4),
        ("format", c_int),
        ("deinterlace", c_int),
        ("out_width", c_ulong),
        ("out_height", c_ulong),
        ("num_outputs", c_ulong),
        ("lock", c_void_p),
        ("target", c_short * 4),
        ("more", c_ulong * 5),
    )


class MapParams(Structure):
    """``CUVIDPROCPARAMS``: how a surface is mapped."""

    _fields_ = (
        ("is_progressive", c_int),
        ("second_field", c_int),
        ("top_first", c_int),
        ("unpaired", c_int),
        ("raw", c_ulonglong * 5),
        ("stream", c_void_p),
        ("more", c_ulonglong * 25),
    )


class Status(Structure):
    """``CUVIDGETDECODESTATUS``: how the decoding of a picture went."""

    _fields_ = (("status", c_int), ("reserved", c_uint * 31), ("more", c_void_p * 8))


@lru_cache(maxsize=1)
def library() -> tuple[Any, Any]:
    """Return the library twice: its functions release the GIL, or keep it because they return soon.

    With many threads, to get the GIL back takes longer than most functions.
    """
    return ctypes.CDLL(VIDEO_LIBRARY), ctypes.PyDLL(VIDEO_LIBRARY)


def call(index: int, name: str, *arguments: Any) -> None:
    """Call a function of the library for a device, without the GIL, as it may wait for the hardware.

    Raises:
        NotOnDeviceError: The hardware does not decode this video.
        av.InvalidDataError: The data of a picture is damaged.
        TransferError: The device failed: it has no memory or no decoder left, or is gone.
    """
    status = getattr(library()[0], name)(*arguments)
    if not status:
        return
    said = f"{name} says {error_name(status)}"
    if status in _OF_DATA and name == "cuvidDecodePicture":
        raise av.error.InvalidDataError(errno.EINVAL, said)
    if status in _OF_DATA and name != "cuvidMapVideoFrame64":
        raise NotOnDeviceError(f"NVDEC does not decode this video: {said}")
    remedy = (
        "Its memory or its decoders are used up: decode in fewer threads, load fewer frames at a time, or "
        "drop buffers earlier"
        if status == _OUT_OF_MEMORY
        else "nvidia-smi shows whether the device is still there"
    )
    raise TransferError(f"NVDEC failed on CUDA device {index}: {said}. {remedy}")


def check_support(index: int, name: str, format: Format) -> None:
    """Check that the hardware decodes this format.

    Raises:
        NotOnDeviceError: It does not.
        TransferError: The device fails.
    """
    depth = format.luma_depth
    if format.chroma != 1 or depth not in (0, 2, 4) or format.chroma_depth != depth:
        chroma = ("4:0:0", "4:2:0", "4:2:2", "4:4:4")[format.chroma]
        raise NotOnDeviceError(
            f"NVDEC decodes 4:2:0 of 8, 10 and 12 bits, and this is {chroma} of {8 + depth} bits"
        )
    caps = Caps(codec=format.codec, chroma=format.chroma, depth=depth)
    call(index, "cuvidGetDecoderCaps", byref(caps))
    if not caps.is_supported:
        raise NotOnDeviceError(f"NVDEC of this device does not decode {name} of {8 + depth} bits")
    width, height = format.width, format.height
    least, most = (caps.least_wide, caps.least_high), (caps.most_wide, caps.most_high)
    if not (
        least[0] <= width <= most[0]
        and least[1] <= height <= most[1]
        and -(-width // 16) * -(-height // 16) <= caps.most_blocks
    ):
        raise NotOnDeviceError(
            f"NVDEC of this device decodes {name} from {least[0]}x{least[1]} to {most[0]}x{most[1]}, not "
            f"{width}x{height}"
        )
