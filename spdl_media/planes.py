"""FFmpeg's memory as NumPy arrays: one view a plane, whatever the padding and the direction of its rows."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeAlias

import av
import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]

_PALETTE = np.dtype("u4")


@lru_cache(maxsize=256)
def is_yuv(pix_fmt: str) -> bool:
    """Whether the numbers of a pixel format are colours only with a matrix and a range; no: unknown names."""
    try:
        format = av.VideoFormat(pix_fmt, 16, 16)
    except ValueError:
        return False
    return not format.is_rgb and len(format.components) > 2 and not pix_fmt.startswith("xyz")


def picture_planes(frame: av.VideoFrame) -> tuple[Array, ...]:
    """Read-only views of the planes of a picture, in the order of its pixel format.

    Returns:
        Arrays ``(height, width)``, or ``(height, width, components)`` where a plane has several, of the
        format's own type and byte order; ``(height, bytes)`` uint8 where its pixels are not whole values.
    """
    name = frame.format.name
    return tuple(_view(plane, name, index) for index, plane in enumerate(frame.planes))


def _view(plane: Any, pix_fmt: str, index: int) -> Array:
    shape, dtype, start, strides = _geometry(
        pix_fmt, index, plane.width, plane.height, plane.line_size
    )
    # One call instead of frombuffer, reshape and a slice halves what a view costs.
    view: Array = np.ndarray(shape, dtype, plane, start, strides)
    view.flags.writeable = False
    return view


@lru_cache(maxsize=1024)
def _geometry(
    pix_fmt: str, index: int, width: int, height: int, line_size: int
) -> tuple[tuple[int, ...], np.dtype[Any], int, tuple[int, ...]]:
    """Shape, type, first byte and strides of a plane."""
    dtype, samples, bits = _plane_type(pix_fmt, index)
    if dtype is _PALETTE:
        return (height, width), _PALETTE, 0, (width * _PALETTE.itemsize, _PALETTE.itemsize)
    # A picture that runs upwards has its first row last in memory.
    start = (height - 1) * -line_size if line_size < 0 else 0
    if dtype is None:
        return (height, -(-width * bits // 8)), np.dtype("u1"), start, (line_size, 1)
    size = dtype.itemsize
    if samples == 1:
        return (height, width), dtype, start, (line_size, size)
    return (height, width, samples), dtype, start, (line_size, samples * size, size)


@lru_cache(maxsize=1024)
def _plane_type(pix_fmt: str, index: int) -> tuple[np.dtype[Any] | None, int, int]:
    """Type of a value, values of a pixel, and bits of a pixel; no type: pixels are not whole values."""
    format = av.VideoFormat(pix_fmt, 64, 64)
    bits = format.padded_bits_per_pixel
    components = [part for part in format.components if part.plane == index]
    if not components:  # the palette of pal8: 256 colours in native-endian ARGB
        return _PALETTE, 1, 32
    depth = max(part.bits for part in components)
    size = 4 if depth > 16 else 2 if depth > 8 else 1
    if any(part.plane != 0 for part in format.components):
        samples, whole = len(components), True
    else:  # one plane; padding such as the 0 of rgb0 counts
        samples, rest = divmod(bits, 8 * size)
        whole = rest == 0 and samples >= len(components)
    if not whole or len({part.width for part in components}) > 1:
        return None, 0, bits
    kind = "f" if "f32" in pix_fmt or "f16" in pix_fmt else "u"
    return np.dtype(f"{'>' if format.is_big_endian else '<'}{kind}{size}"), samples, bits


def read_only(plane: Any, dtype: str, count: int) -> Array:
    """View the first ``count`` values of a plane of FFmpeg's."""
    view = np.frombuffer(plane, dtype=dtype, count=count)
    view.flags.writeable = False
    return view
