"""Pixel formats of YUV: where their samples lie, and planes of their own made of any form of array.

Arrays may be of NumPy or of CuPy: only slices and reshapes that copy nothing are used.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import av

Planes: TypeAlias = tuple[Any, Any, Any]
"""Y, U, V of several frames, each ``(frames, rows, samples)``. Without chroma, U and V are Y."""


@dataclass(frozen=True, slots=True)
class YUVFormat:
    """How the samples of a pixel format lie in its planes.

    Attributes:
        name: FFmpeg's name of the format, without byte order.
        sub_x: Pixels across for one sample of chroma; 0: there is no chroma.
        sub_y: Pixels down for one sample of chroma.
        pairs: Where U and V alternate in one plane, their places in a pair, else ``None``.
        bits: Bits of a sample.
        shift: Unused bits below them.
        full_range: The name itself says full range (``yuvj``, ``gray``).
    """

    name: str
    sub_x: int
    sub_y: int
    pairs: tuple[int, int] | None = None
    bits: int = 8
    shift: int = 0
    full_range: bool = False

    @property
    def dtype(self) -> str:
        """NumPy's name of the type of a sample."""
        return "uint8" if self.bits == 8 else "uint16"

    @property
    def num_planes(self) -> int:
        """Number of planes that the format has."""
        return 1 if not self.sub_x else 2 if self.pairs else 3

    def chroma_shape(self, height: int, width: int) -> tuple[int, int]:
        """Rows and samples in a row of U."""
        return -(-height // self.sub_y), -(-width // self.sub_x)


@lru_cache(maxsize=256)
def yuv_format(pix_fmt: str) -> YUVFormat:
    """The format of this name; its byte order is that of the arrays.

    Raises:
        ValueError: It is no YUV format that is known here.
    """
    try:
        parts = av.VideoFormat(pix_fmt, 16, 16).components
    except ValueError:
        parts = ()
    # The arrays have their byte order in their type.
    name = re.sub(r"(?<=[\db])(le|be)$", "", pix_fmt)
    planes, bits = [part.plane for part in parts], parts[0].bits if parts else 0
    if 8 <= bits <= 16 and planes == [0] and name.startswith("gray"):
        return YUVFormat(name, 0, 0, bits=bits, full_range=True)
    if 8 <= bits <= 16 and planes in ([0, 1, 1], [0, 1, 2]):
        sub = 16 // parts[1].width, 16 // parts[1].height
        order = (1, 0) if name in ("nv21", "nv42") else (0, 1)
        is_high = name.startswith("p") or name.endswith("msb")
        shift = 16 - bits if is_high else 0
        pairs = order if planes[2] == 1 else None
        return YUVFormat(name, *sub, pairs, bits, shift, name.startswith("yuvj"))
    raise ValueError(
        f"pix_fmt {pix_fmt!r} is not known here. It may be nv12, nv21, nv16, nv24, nv42, p010, p012, p016 "
        "and their kin (p210, p410), yuv420p, yuvj420p, yuv422p, yuv444p, yuv440p, yuv411p, yuv410p, their "
        "deep variants (yuv420p10, yuv444p12msb), or gray. decode_packets converts others on the CPU"
    )


def planes_of(arrays: Any, format: YUVFormat) -> tuple[Planes, bool]:
    """Make Y, U and V, all views, of one array with all planes or of one array for each.

    Returns:
        The planes, and whether the arrays have a dimension of frames.

    Raises:
        ValueError: Shapes that do not fit each other or the format.
        TypeError: Another type than the format's samples.
    """
    parts = tuple(arrays) if isinstance(arrays, list | tuple) else _untiled(arrays, format)
    if len(parts) != format.num_planes:
        raise ValueError(
            f"{format.name} has {format.num_planes} planes, not {len(parts)}: pass an array for each, or one "
            "array with all of them as convert_frames makes it"
        )
    for part in parts:
        if part.dtype.kind != "u" or f"uint{8 * part.dtype.itemsize}" != format.dtype:
            raise TypeError(f"planes of {format.name} must be {format.dtype}, not {part.dtype}")
    return _checked(parts, format)


def _checked(parts: Sequence[Any], format: YUVFormat) -> tuple[Planes, bool]:
    luma = parts[0]
    if luma.ndim not in (2, 3) or not all(luma.shape):
        raise ValueError(
            f"the luma plane must be (height, width) or (frames, height, width), not {luma.shape}"
        )
    *frames, height, width = luma.shape
    if not format.sub_x:
        chroma = [luma, luma]
    else:
        rows, samples = format.chroma_shape(height, width)
        shape = (*frames, rows, samples)
        chroma = _pairs(parts[1], shape, format) if format.pairs else list(parts[1:])
        if found := [part.shape for part in chroma if part.shape != shape]:
            raise ValueError(
                f"chroma of {format.name} for luma of shape {luma.shape} must be {shape}, not {found[0]}"
            )
    planes = [part if frames else part[None] for part in (luma, *chroma)]
    return (planes[0], planes[1], planes[2]), bool(frames)


def _pairs(plane: Any, shape: tuple[int, ...], format: YUVFormat) -> list[Any]:
    """U and V of a plane in which they alternate."""
    assert format.pairs is not None
    wide = (*shape[:-1], 2 * shape[-1])
    if plane.shape == (*shape, 2):
        return [plane[..., place] for place in format.pairs]
    if plane.shape == wide:
        return [plane[..., place::2] for place in format.pairs]
    raise ValueError(
        f"chroma of {format.name} must be {(*shape, 2)} or {wide} here, not {plane.shape}"
    )


def _untiled(array: Any, format: YUVFormat) -> tuple[Any, ...]:
    """The planes of an array in which they lie one below the other, as in :mod:`spdl_media.formats`."""
    if not format.sub_x:
        return (array,)
    if format.sub_x == format.sub_y == 1 and not format.pairs:
        if array.ndim < 3 or array.shape[-3] != 3:
            raise ValueError(
                f"one array of {format.name} must be (..., 3, H, W), not {array.shape}"
            )
        return tuple(array[..., index, :, :] for index in range(3))
    if array.ndim < 2 or (array.ndim > 2 and array.shape[-3] != 1):
        raise ValueError(
            f"one array of {format.name} must be (rows, W) or (..., 1, rows, W), not {array.shape}. Pass a "
            "list with an array for each plane otherwise"
        )
    tiles = array if array.ndim == 2 else array[..., 0, :, :]
    rows, width = tiles.shape[-2:]
    height = _luma_rows(rows, width, format)
    luma, chroma = tiles[..., :height, :], tiles[..., height:, :]
    return (luma, chroma) if format.pairs else (luma, *_halves(chroma, format, height, width))


def _luma_rows(rows: int, width: int, format: YUVFormat) -> int:
    """Height of an image whose planes lie in so many rows."""
    # Chroma has 2 * rows / sub_y rows of width / sub_x samples.
    height = rows * format.sub_x * format.sub_y // (format.sub_x * format.sub_y + 2)
    for candidate in (height, height + 1):
        down, across = format.chroma_shape(candidate, width)
        if candidate * width + 2 * down * across == rows * width and width % format.sub_x == 0:
            return candidate
    raise ValueError(
        f"no {format.name} picture fills {rows} rows of {width}: its width must be a multiple of "
        f"{format.sub_x}, and its chroma must lie right below its luma. Pass a list with an array for each "
        "plane"
    )


def _halves(chroma: Any, format: YUVFormat, height: int, width: int) -> list[Any]:
    """U and V of chroma planes that follow each other without gaps."""
    if chroma.strides[-2:] != (width * chroma.itemsize, chroma.itemsize):
        raise ValueError(
            f"the rows of one array of {format.name} must follow each other without gaps, as its chroma "
            "does. Pass a list with an array for each plane"
        )
    down, across = format.chroma_shape(height, width)
    both = chroma.reshape((*chroma.shape[:-2], 2, down, across))
    return [both[..., 0, :, :], both[..., 1, :, :]]
