"""Tables of pixel and sample formats, and views of FFmpeg's planes.

==================================================  =======================  =======
pixel format                                        shape                    dtype
==================================================  =======================  =======
rgb24 bgr24                                         (H, W, 3)                uint8
rgba bgra argb abgr                                 (H, W, 4)                uint8
rgb48 / rgba64                                      (H, W, 3) / (H, W, 4)    uint16
gray / ya8                                          (H, W, 1) / (H, W, 2)    uint8
gray9 to gray16 / grayf32                           (1, H, W)                uint16 / float32
ya16                                                (H, W, 2)                uint16
yuv444p yuvj444p gbrp                               (3, H, W)                uint8
yuva444p gbrap                                      (4, H, W)                uint8
yuv420p yuvj420p nv12 nv21, even W                  (1, H + ceil(H/2), W)    uint8
yuv422p yuvj422p, even W                            (1, 2H, W)               uint8
9 to 16 bit variants of the above, p010 p012 p016   the same                 uint16
==================================================  =======================  =======

Planes of the ``gbr`` formats are reordered to R, G, B. Deep formats are in native byte order with FFmpeg's
values: 0 to 2**bits - 1, in ``p010`` and ``p012`` multiplied by 2**(16 - bits).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from math import prod
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import av
import numpy as np
import numpy.typing as npt

from spdl_media._checks import did_you_mean
from spdl_media._ffmpeg import is_pixel_format, is_sample_format

Array: TypeAlias = npt.NDArray[Any]
Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PixelLayout:
    """How the planes of a pixel format are stored in an array.

    Attributes:
        kind: ``"packed"``: one plane, (H, W, C). ``"planar"``: C planes of equal size, (C, H, W).
            ``"tiled"``: a luma plane and below it the smaller chroma planes, (1, rows, W).
        channels: C; 1 for ``"tiled"``.
        dtype: NumPy's name of the type, in native byte order.
        order: Index of FFmpeg's plane for each channel of the array.
        chroma_rows: For ``"tiled"``: the chroma planes fill ``ceil(H / chroma_rows)`` rows of the array.
    """

    kind: Literal["packed", "planar", "tiled"]
    channels: int
    dtype: str = "uint8"
    order: tuple[int, ...] = (0, 1, 2, 3)
    chroma_rows: int = 1

    def shape(self, width: int, height: int, layout: str | None = None) -> Shape:
        """Return the shape of one frame; ``layout`` is ``"NCHW"`` or ``"NHWC"`` for RGB and gray."""
        if self.kind == "tiled":
            # Luma, then the rows that both chroma planes fill together.
            return 1, height + -(-height // self.chroma_rows), width
        if self._channels_first(layout):
            return self.channels, height, width
        return height, width, self.channels

    def tiles(self, width: int) -> bool:
        """Whether the planes of a frame of this width fill a rectangle."""
        return self.kind != "tiled" or width % 2 == 0

    def places(self, frames: Array, planes: Sequence[Shape], layout: str | None) -> list[Array]:
        """Return a view of an array of frames for each of FFmpeg's planes, which have these shapes.

        Raises:
            ValueError: The planes do not fill a rectangle; see :meth:`tiles`.
        """
        if self.kind == "tiled":
            flat, ends = frames.reshape(len(frames), -1), accumulate(map(prod, planes))
            tiles = (flat[:, end - prod(one) : end] for end, one in zip(ends, planes, strict=True))
            return [tile.reshape(-1, *shape) for tile, shape in zip(tiles, planes, strict=True)]
        last = np.moveaxis(frames, 1, -1) if self._channels_first(layout) else frames
        if self.kind == "packed":
            # FFmpeg's plane has no channel axis if there is one component.
            return [last[..., 0] if self.channels == 1 else last]
        return [last[..., self.order.index(plane)] for plane in range(self.channels)]

    def _channels_first(self, layout: str | None) -> bool:
        return self.kind == "planar" if layout is None else layout == "NCHW"


_RGB = (2, 0, 1, 3)
_TABLE = {
    "rgb24 bgr24": PixelLayout("packed", 3),
    "rgba bgra argb abgr": PixelLayout("packed", 4),
    "gray gray8": PixelLayout("packed", 1),
    "ya8": PixelLayout("packed", 2),
    "yuv444p yuvj444p": PixelLayout("planar", 3),
    "yuva444p": PixelLayout("planar", 4),
    "gbrp": PixelLayout("planar", 3, order=_RGB),
    "gbrap": PixelLayout("planar", 4, order=_RGB),
    "yuv420p yuvj420p nv12 nv21": PixelLayout("tiled", 1, chroma_rows=2),
    "yuv422p yuvj422p": PixelLayout("tiled", 1),
    "rgb48 bgr48": PixelLayout("packed", 3, "uint16"),
    "rgba64 bgra64": PixelLayout("packed", 4, "uint16"),
    "ya16": PixelLayout("packed", 2, "uint16"),
    "p010 p012 p016": PixelLayout("tiled", 1, "uint16", chroma_rows=2),
    "grayf32": PixelLayout("planar", 1, "float32"),
}
_DEEP = re.compile(r"(gray|yuv420p|yuv422p|yuv444p|yuva444p|gbrp|gbrap)(9|10|12|14|16)")

PIXEL_LAYOUTS: Mapping[str, PixelLayout] = MappingProxyType(
    {name: layout for names, layout in _TABLE.items() for name in names.split()}
)
"""The layouts by name of format, most deep formats left out: :func:`pixel_layout` finds those, too."""


@lru_cache(maxsize=256)
def pixel_layout(pix_fmt: str) -> PixelLayout | None:
    """Return the layout of a pixel format; ``None`` if it is not in the table."""
    # Arrays are in native byte order, whatever that of the format is.
    name = re.sub(r"(?<=\d)(le|be)$", "", pix_fmt)
    deep = _DEEP.fullmatch(name)
    if deep is None:
        return PIXEL_LAYOUTS.get(name)
    if deep[1] == "gray":
        return PixelLayout("planar", 1, "uint16")
    return replace(PIXEL_LAYOUTS[deep[1]], dtype="uint16")


_SAMPLE_FORMATS = ("u8", "s16", "s32", "s64", "flt", "dbl")
_SAMPLE_TYPES = ("uint8", "int16", "int32", "int64", "float32", "float64")

SAMPLE_DTYPES: Mapping[str, str] = MappingProxyType(
    dict(zip(_SAMPLE_FORMATS, _SAMPLE_TYPES, strict=True))
)
"""NumPy types of FFmpeg's packed sample formats. Planar formats append a ``p`` and give (C, N)."""

# Packed RGB -> planar RGB of the same depth, with alpha if the packed format has it. FFmpeg's scaler is exact
# and fast for planar RGB, inexact and slower for packed RGB; interleaving costs little. 500x375 4:2:0 to
# 224x224, bicubic, microseconds and mean (largest) difference in levels:
#     scale to rgb24, FFmpeg's default flags    316    3.4-3.7 (76)
#     scale to rgb24, accurate flags            671    0
#     scale to gbrp, accurate flags, rgb24      195    0
PLANAR = {
    **dict.fromkeys("rgb24 bgr24 rgb0 bgr0 0rgb 0bgr".split(), "gbrp"),
    **dict.fromkeys("rgba bgra argb abgr".split(), "gbrap"),
    **dict.fromkeys("rgb48le rgb48be bgr48le bgr48be rgb48 bgr48".split(), "gbrp16le"),
    **dict.fromkeys("rgba64le rgba64be bgra64le bgra64be rgba64 bgra64".split(), "gbrap16le"),
}

RGB_8BIT = frozenset("rgb24 bgr24 rgba bgra argb abgr gbrp gbrap".split())
"""8-bit RGB formats: packed without padding, and planar."""


def _by_number(table: str) -> Mapping[int, str]:
    pairs = (entry.split() for entry in table.split(","))
    return MappingProxyType({int(number): name for number, name in pairs})


# FFmpeg's numbers for matrix, range, primaries and transfer function, which are those of ITU-T H.273.
# Unspecified has no name; FFmpeg then takes BT.601 and limited range (full for JPEG).
COLORSPACES = _by_number(
    "0 gbr, 1 bt709, 4 fcc, 5 bt470bg, 6 smpte170m, 7 smpte240m, 8 ycgco, 9 bt2020nc, 10 bt2020c, "
    "11 smpte2085, 12 chroma-derived-nc, 13 chroma-derived-c, 14 ictcp, 15 ipt-c2, 16 ycgco-re, "
    "17 ycgco-ro"
)
COLOR_RANGES = _by_number("1 tv, 2 pc")
# The keys are attributes of FFmpeg's frames and codec contexts.
COLOR_TABLES: Mapping[str, Mapping[int, str]] = {
    "color_range": COLOR_RANGES,
    "colorspace": COLORSPACES,
    "color_primaries": _by_number(
        "1 bt709, 4 bt470m, 5 bt470bg, 6 smpte170m, 7 smpte240m, 8 film, 9 bt2020, 10 smpte428, "
        "11 smpte431, 12 smpte432, 22 ebu3213"
    ),
    "color_trc": _by_number(
        "1 bt709, 4 bt470m, 5 bt470bg, 6 smpte170m, 7 smpte240m, 8 linear, 9 log100, 10 log316, "
        "11 iec61966-2-4, 12 bt1361e, 13 iec61966-2-1, 14 bt2020-10, 15 bt2020-12, 16 smpte2084, "
        "17 smpte428, 18 arib-std-b67"
    ),
}


@lru_cache(maxsize=256)
def is_yuv(pix_fmt: str) -> bool:
    """Whether the values of a pixel format need a matrix and a range; False for unknown names."""
    try:
        format = av.VideoFormat(pix_fmt, 16, 16)
    except ValueError:
        return False
    # XYZ has three components and no matrix.
    return not format.is_rgb and len(format.components) > 2 and not pix_fmt.startswith("xyz")


def picture_planes(frame: av.VideoFrame) -> tuple[Array, ...]:
    """Return read-only views of the planes of an image, in the order of its pixel format.

    Returns:
        Arrays ``(height, width)``, or ``(height, width, components)`` if a plane has several components, in
        the format's type and byte order; ``(height, bytes)`` uint8 if components are not whole bytes.
    """
    views = plane_views(frame)
    for view in views:
        view.flags.writeable = False
    return views


def plane_views(frame: av.VideoFrame) -> tuple[Array, ...]:
    """Return writable views of the planes, for frames that only the caller uses."""
    name, views = frame.format.name, list[Array]()
    planes: Any = frame.planes
    for index, plane in enumerate(planes):
        size = plane.width, plane.height, plane.line_size
        shape, dtype, start, strides = _geometry(name, index, *size)
        # One call instead of frombuffer, reshape and a slice halves the time.
        views.append(np.ndarray(shape, dtype, plane, start, strides))
    return tuple(views)


def like_frame(frame: av.VideoFrame, width: int, height: int) -> av.VideoFrame:
    """Return a new frame of this size with uninitialised pixels and the other metadata of ``frame``.

    Raises:
        ValueError: FFmpeg takes no frame as large as this.
    """
    result = av.VideoFrame(width, height, frame.format.name)
    result.pts, result.dts = frame.pts, frame.dts
    if frame.time_base:
        result.time_base = frame.time_base
    result.duration = frame.duration
    result.colorspace, result.color_range = frame.colorspace, frame.color_range
    result.color_primaries, result.color_trc = frame.color_primaries, frame.color_trc
    return result


@lru_cache(maxsize=1024)
def _geometry(
    pix_fmt: str, index: int, width: int, height: int, line_size: int
) -> tuple[tuple[int, ...], np.dtype[Any], int, tuple[int, ...]]:
    """Return shape, type, offset of the first row in bytes, and strides of a plane."""
    dtype, samples, bits = _plane_type(pix_fmt, index)
    # With a negative line size, the first row is the last one in memory.
    start = (height - 1) * -line_size if line_size < 0 else 0
    if dtype is None:
        return (height, -(-width * bits // 8)), np.dtype("u1"), start, (line_size, 1)
    size = dtype.itemsize
    if samples == 1:
        return (height, width), dtype, start, (line_size, size)
    return (height, width, samples), dtype, start, (line_size, samples * size, size)


@lru_cache(maxsize=1024)
def _plane_type(pix_fmt: str, index: int) -> tuple[np.dtype[Any] | None, int, int]:
    """Return type of a value, values per pixel and bits per pixel; the type is None for partial bytes."""
    format = av.VideoFormat(pix_fmt, 64, 64)
    bits = format.padded_bits_per_pixel
    components = [part for part in format.components if part.plane == index]
    if not components:  # the palette of pal8: 256 colours in native-endian ARGB
        return np.dtype("u4"), 1, 32
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


@lru_cache(maxsize=256)
def plane_steps(pix_fmt: str) -> tuple[tuple[int, int], ...]:
    """Return the pixels across and down per sample, for each plane; empty if a plane mixes sample sizes.

    Raises:
        ValueError: FFmpeg has no pixel format of this name.
    """
    parts = av.VideoFormat(pix_fmt, 16, 16).components
    planes: list[tuple[int, int]] = []
    for plane in range(1 + max((part.plane for part in parts), default=-1)):
        sizes = {(16 // part.width, 16 // part.height) for part in parts if part.plane == plane}
        if len(sizes) > 1:
            return ()
        planes.append(sizes.pop())
    return tuple(planes)


@lru_cache(maxsize=256)
def chroma_steps(pix_fmt: str) -> tuple[int, int]:
    """Return the pixels across and down that one chroma sample covers.

    Raises:
        ValueError: FFmpeg has no pixel format of this name.
    """
    steps = plane_steps(pix_fmt) or ((1, 1),)
    return max(across for across, _ in steps), max(down for _, down in steps)


_LIMITED = 1
# Gray formats of video codecs, which may have limited range.
_LIMITED_GRAY = frozenset({"gray", "gray9le", "gray10le", "gray12le", "gray14le"})


def has_limited_gray(frame: av.VideoFrame) -> bool:
    """Whether a frame is gray of limited range, which FFmpeg's scaler takes for full."""
    return frame.color_range == _LIMITED and frame.format.name in _LIMITED_GRAY


def full_range_gray(frame: av.VideoFrame) -> av.VideoFrame:
    """Expand a gray frame of limited range (16 to 235 in 8 bits) to full range, in a copy."""
    unit = 1 << frame.format.components[0].bits - 8
    levels = np.arange(256 * unit, dtype=np.float64)
    spread = (levels - 16 * unit) * (256 * unit - 1) / (219 * unit)
    result = like_frame(frame, frame.width, frame.height)
    result.color_range = 2  # AVCOL_RANGE_JPEG
    (source,), (target,) = plane_views(frame), plane_views(result)
    target[...] = np.clip(np.rint(spread), 0, len(levels) - 1).astype(target.dtype)[source]
    return result


def has_cut_chroma(pix_fmt: str, width: int, height: int) -> bool:
    """Whether the last row or column of chroma covers fewer pixels than the others.

    Raises:
        ValueError: FFmpeg has no pixel format of this name.
    """
    across, down = chroma_steps(pix_fmt)
    return width % across != 0 or height % down != 0


# In 4:2:0, the last chroma sample of an odd row covers one pixel, not two. FFmpeg's scaler stretches the row
# of chroma over the row of pixels all the same, so colour drifts by up to a pixel across the image: 4 levels
# of 255 on average for a photograph, and 40 at edges. One more column of pixels, a copy of the last, avoids
# that. For images that are scaled as well, the drift is below a fifth of a pixel at common sizes (0.2 levels
# at 224x224) and is not corrected.
def whole_samples(frame: av.VideoFrame, box: tuple[int, int, int, int]) -> av.VideoFrame:
    """Copy a box, repeating its last row and column where a chroma sample would be incomplete.

    Args:
        frame: The image.
        box: The part to copy; its corner lies on a whole chroma sample.

    Returns:
        The copy, or ``frame`` itself if the box covers it and no chroma sample is incomplete.
    """
    name = frame.format.name
    if box == (0, 0, frame.width, frame.height) and not has_cut_chroma(name, *box[2:]):
        return frame
    across, down = chroma_steps(name)
    x, y, w, h = box
    part = like_frame(frame, -(-w // across) * across, -(-h // down) * down)
    planes = plane_views(part), plane_views(frame), plane_steps(name)
    for target, whole, (right, below) in zip(*planes, strict=True):
        width, height = -(-w // right), -(-h // below)
        source = whole[y // below :, x // right :][:height, :width]
        target[:height, :width] = source
        target[:height, width:] = source[:, -1:]
        target[height:] = target[height - 1 : height]
    return part


FLOAT_GRAY = "grayf32"
"""How the names of gray formats of floats begin."""

# The scaler takes gray of floats for limited range, so a conversion to limited range keeps the numbers.
_FLOATS_TO_GRAY = "scale=out_range=limited,format=yuv444p16le,extractplanes=y"

TO_INTEGERS: Mapping[str, str] = {
    "monob": "format=gray",
    "monow": "format=gray",
    "grayf32le": _FLOATS_TO_GRAY,
    "grayf32be": f"format=grayf32le,{_FLOATS_TO_GRAY}",
} | {
    f"{order}{bits}{end}": ("" if end == "le" else f"format={order}{bits}le,") + "format=rgb24"
    for order in ("rgb", "bgr")
    for bits in ("555", "565")
    for end in ("le", "be")
}
"""Filters to a format that FFmpeg's scaler reads right, by those that it reads wrongly.

It scales 1-bit gray and gray of floats as if these had limited range, and 5 bits to at most 248; it reads
big-endian ones in the wrong byte order.
"""


def to_ints(pix_fmt: str, target: str | None, *, is_scaled: bool) -> str:
    """Return the filters that come first for frames of a format, if the scaler would read it wrongly.

    Args:
        pix_fmt: Format of the frames.
        target: Format of the result; ``None``: that of the frames.
        is_scaled: Whether their size changes.
    """
    is_float = pix_fmt.startswith(FLOAT_GRAY)
    if (target or pix_fmt).startswith(FLOAT_GRAY) and not (is_float and is_scaled):
        # The scaler also writes floats of limited range, but not from gray.
        return "" if is_float else "format=gray16le"
    return "" if pix_fmt == target and not is_float else TO_INTEGERS.get(pix_fmt, "")


_FORMAT_NAME = re.compile(r"[a-z0-9]+\Z")


def format_name(argument: Literal["pix_fmt", "sample_fmt"], name: str) -> str:
    """Check that FFmpeg has a format of this name, and return the name.

    Raises:
        TypeError: The name is not a ``str``.
        ValueError: FFmpeg has no such format.
    """
    is_pixel = argument == "pix_fmt"
    example, exists = ("rgb24", is_pixel_format) if is_pixel else ("fltp", is_sample_format)
    if not isinstance(name, str):
        raise TypeError(f"{argument} must be a str, such as {example!r}, not {name!r}")
    # The pattern comes first, because the name goes into the text of a graph.
    if not (_FORMAT_NAME.match(name) and exists(name)):
        # 16-bit names are left out of the hint: they would crowd out the 8-bit names that users mean.
        usual = [one for one, layout in PIXEL_LAYOUTS.items() if layout.dtype == "uint8"]
        names = usual if is_pixel else [*SAMPLE_DTYPES, *(f"{one}p" for one in SAMPLE_DTYPES)]
        hint = did_you_mean(name.lower(), names, likely=example)
        raise ValueError(
            f"{argument} must be one of FFmpeg's names, such as {example!r}, not {name!r}"
            f"{hint and '. ' + hint}"
        )
    return name
