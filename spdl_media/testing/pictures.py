"""Arrays and planes as frames for an encoder, bit for bit where the format allows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import av
import numpy as np
from numpy.typing import NDArray

Picture: TypeAlias = "NDArray[Any] | Sequence[NDArray[Any]]"
"""One picture: RGB ``(H, W, 3)``, RGBA ``(H, W, 4)``, luma ``(H, W)``, or a sequence of planes."""


def plane_shapes(pix_fmt: str, width: int, height: int) -> tuple[list[tuple[int, int]], int]:
    """The shape of each plane, and the bits that each value has beyond 8."""
    format = av.VideoFormat(pix_fmt, width, height)
    components = sorted(format.components, key=lambda component: component.plane)
    if [component.plane for component in components] != list(range(len(components))):
        raise ValueError(f"pix_fmt must be planar, such as 'yuv420p' or 'gbrp', not {pix_fmt!r}")
    if not 8 <= components[0].bits <= 16:
        raise ValueError(f"pix_fmt must have integers of 8 to 16 bits, not {pix_fmt!r}")
    shapes = [(component.height, component.width) for component in components]
    return shapes, components[0].bits - 8


def find_encoder(name: str, kind: str) -> av.Codec:
    """An encoder of this FFmpeg, for "video" or "audio"."""
    try:
        encoder = av.Codec(name, "w")
    except ValueError as error:
        raise ValueError(f"this FFmpeg has no encoder {name!r}") from error
    if encoder.type != kind:
        raise ValueError(f"{name!r} encodes {encoder.type}, not {kind}")
    return encoder


def best_pix_fmt(codec: str, picture: Picture) -> str:
    """The pixel format of an encoder that loses least of a picture."""
    formats = [format.name for format in find_encoder(codec, "video").video_formats or ()]
    given = _given_format(picture)
    if given is None:
        raise ValueError("planes need a pix_fmt that says what they are")
    if codec == "mjpeg":
        return "yuvj444p"
    likes = {
        "rgb24": ("rgb24", "bgr24", "bgra", "gbrp", "rgb8"),
        "rgba": ("rgba", "bgra"),
        "gray": ("gray",),
        "rgb48le": ("rgb48be", "rgb48le"),
        "rgba64le": ("rgba64be", "rgba64le"),
        "gray16le": ("gray16be", "gray16le"),
    }[given]
    for like in likes:
        if like in formats:
            return like
    return formats[0]


def _given_format(picture: Picture) -> str | None:
    """The pixel format that an array has as it stands; None for planes."""
    if not isinstance(picture, np.ndarray):
        return None
    depth = 0 if picture.ndim == 2 else picture.shape[-1] if picture.ndim == 3 else -1
    names = {
        (0, "uint8"): "gray",
        (3, "uint8"): "rgb24",
        (4, "uint8"): "rgba",
        (0, "uint16"): "gray16le",
        (3, "uint16"): "rgb48le",
        (4, "uint16"): "rgba64le",
    }
    if (depth, picture.dtype.name) not in names:
        raise ValueError(
            "a picture must be (H, W), (H, W, 3) or (H, W, 4) of uint8 or uint16, or planes, "
            f"not {picture.shape} of {picture.dtype}"
        )
    return names[depth, picture.dtype.name]


def video_frame(picture: Picture, pix_fmt: str) -> av.VideoFrame:
    """A picture as a frame of ``pix_fmt``; luma and planes go in as they are."""
    given = _given_format(picture)
    if given is None or not isinstance(picture, np.ndarray):
        return _frame_of_planes(list(picture), pix_fmt)
    if given == "gray" and pix_fmt.startswith("yuv"):
        return _frame_of_luma(picture, pix_fmt)
    frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format=given)
    return frame if pix_fmt == given else frame.reformat(format=pix_fmt)


def _frame_of_luma(luma: NDArray[Any], pix_fmt: str) -> av.VideoFrame:
    shapes, shift = plane_shapes(pix_fmt, luma.shape[1], luma.shape[0])
    dtype = np.dtype(np.uint16 if shift else np.uint8)
    chroma = [np.full(shape, 128 << shift, dtype) for shape in shapes[1:]]
    scaled = (luma.astype(np.uint16) << shift).astype(dtype)
    return _frame_of_planes([scaled, *chroma], pix_fmt)


def _frame_of_planes(planes: Sequence[NDArray[Any]], pix_fmt: str) -> av.VideoFrame:
    height, width = planes[0].shape
    shapes, shift = plane_shapes(pix_fmt, width, height)
    dtype = np.dtype(np.uint16 if shift else np.uint8)
    if [plane.shape for plane in planes] != shapes or any(p.dtype != dtype for p in planes):
        given = ", ".join(f"{plane.shape} {plane.dtype}" for plane in planes)
        raise ValueError(f"{pix_fmt} planes must be {shapes} of {dtype}, not {given}")
    frame = av.VideoFrame(width, height, pix_fmt)
    for plane, values in zip(frame.planes, planes, strict=True):
        padded = np.zeros((plane.buffer_size // plane.line_size, plane.line_size), np.uint8)
        rows = np.ascontiguousarray(values).view(np.uint8)
        padded[: rows.shape[0], : rows.shape[1]] = rows
        plane.update(padded.tobytes())
    return frame
