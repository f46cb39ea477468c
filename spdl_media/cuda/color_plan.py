"""Plans of conversions from YUV to RGB: formats, filter windows and matrices, without the images themselves.

Windows and weights are those of FFmpeg's scaler, including its rounding of positions and its handling of
edges. So results agree with the CPU path within half a level before rounding. Exact positions would differ by
several levels at edges in large images.

See:
    ITU-R BT.601, BT.709, BT.2020 and H.273 (whose numbers are FFmpeg's ``AVColorSpace``).
    FFmpeg ``libswscale/utils.c``, ``initFilter``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from spdl_media.formats import COLORSPACES, Array
from spdl_media.geometry import Size
from spdl_media.rows import Values

ScaleAlgo: TypeAlias = Literal["bicubic", "bilinear"]
SCALE_ALGOS = get_args(ScaleAlgo)


class Samples(NamedTuple):
    """Samples of a format in memory: dtype, number of bits, and number of unused low bits."""

    dtype: str
    bits: int
    shift: int


SEMI_PLANAR = {
    "nv12": Samples("|u1", 8, 0),
    "p010le": Samples("<u2", 10, 6),
    "p012le": Samples("<u2", 12, 4),
}
"""The 4:2:0 formats of NVDEC's frames: a plane of Y, and one of interleaved U and V."""


_CUBIC = 0.6  # FFmpeg's default; Pillow and PyTorch use 0.5
_REACH = {"bicubic": 2, "bilinear": 1}


@dataclass(frozen=True, slots=True, eq=False)
class Taps:
    """The filter windows along one axis.

    Attributes:
        first: int32 ``(size,)``: index of the first input sample of each output pixel's window.
        weights: float32 ``(taps, size)``; each column sums to 1.
    """

    first: Array
    weights: Array

    def part(self, places: slice) -> Taps:
        """Return the windows of some output pixels."""
        return Taps(self.first[places], self.weights[:, places])


@lru_cache(maxsize=512)
def line_taps(length: int, size: int, sub: int, algo: ScaleAlgo, *, stretch: bool = True) -> Taps:
    """Compute the windows that scale a line of a plane to a line of the result.

    Args:
        length: Pixels in a line of the image.
        size: Pixels in a line of the result.
        sub: Number of pixels per sample, which lies in their middle; 1 for luma.
        algo: The filter. For downscaling, it is widened to cover all samples.
        stretch: Whether the last sample counts in full even if it covers fewer than ``sub`` pixels, as in
            FFmpeg's scaler. The CPU path does so when it scales, and corrects it when the size stays the
            same.

    Raises:
        KeyError: There is no such ``algo``.
    """
    samples = -(-length // sub)
    if sub == 1 and length == size:
        return _frozen(np.arange(size), np.ones((1, size)))
    # FFmpeg counts positions in steps of 2**-16.
    step = ((samples << 16) + size // 2) // size / 65536 if stretch else length / (sub * size)
    centers = (np.arange(size) + 0.5) * step - 0.5
    reach = _REACH[algo]
    width = 1 + (2 * reach if step <= 1 else math.ceil(2 * reach * samples / size))
    # As in FFmpeg, whose filters are at least two samples shorter than a line.
    width = max(1, min(width, samples - 2))
    # Rounded towards zero as in FFmpeg, so that windows left of the first sample begin one sample late.
    first = np.trunc(centers - (width - 2) / 2).astype(np.int64)
    places = first[:, None] + np.arange(width)
    weights = _kernel(algo, (places - centers[:, None]) / max(1.0, step))
    # Between samples, the weights of the kernel do not sum to 1.
    weights /= weights.sum(1, keepdims=True)
    return _clamped(places, weights, samples)


def _kernel(algo: ScaleAlgo, distance: Array) -> Array:
    d, a = np.abs(distance), _CUBIC
    if algo == "bilinear":
        return np.where(d < 1, 1 - d, 0)
    near = (2 - a) * d**3 + (a - 3) * d**2 + 1
    far = a * (-(d**3) + 5 * d**2 - 8 * d + 4)
    return np.where(d < 1, near, np.where(d < 2, far, 0))


def _clamped(places: Array, weights: Array, samples: int) -> Taps:
    """Move windows inside the line; weights outside of it are added to the outermost sample."""
    size, width = places.shape
    first = np.clip(places[:, 0], 0, samples - width)
    moved = np.zeros((width, size))
    columns = np.broadcast_to(np.arange(size)[:, None], places.shape)
    # Not moved[...] += weights, which adds only one of several weights for the same sample.
    np.add.at(moved, (np.clip(places, 0, samples - 1) - first[:, None], columns), weights)
    return _frozen(first, moved)


def _frozen(first: Array, weights: Array) -> Taps:
    taps = Taps(np.ascontiguousarray(first, np.int32), np.ascontiguousarray(weights, np.float32))
    # Read-only, because plans share them through the cache.
    taps.first.flags.writeable = taps.weights.flags.writeable = False
    return taps


# FFmpeg's scaler stores the samples of a scaled row in 15 bits, 7 of them fractional for 8-bit samples. It
# clips overshoots beyond white there.
_CEILING = 32767 / 128


_BT601, _BT2020 = (0.299, 0.114), (0.2627, 0.0593)
# Weights of red and blue in luma.
_WEIGHTS = {
    "bt709": (0.2126, 0.0722),
    "fcc": (0.30, 0.11),
    "bt470bg": _BT601,
    "smpte170m": _BT601,
    "bt601": _BT601,
    "smpte240m": (0.212, 0.087),
    "bt2020nc": _BT2020,
    "bt2020": _BT2020,
}
MATRICES = (*_WEIGHTS, "ycgco")
COEFFICIENTS = {
    **{number: name for number, name in COLORSPACES.items() if name in MATRICES},
    10: "bt2020nc",
}
"""The numbers of H.273 that ``coeff=`` accepts, as in SPDL.

10 means constant luminance, which is not a matrix conversion. SPDL uses the matrix of 9 for it; FFmpeg's
scale filter rejects such frames, and so do the frames and buffers of this library.
"""


def rgb_matrix(matrix: str, *, full_range: bool, bits: int) -> Array:
    """Return the matrix from YUV samples to R, G and B from 0 to 255.

    Returns:
        float64 array ``(3, 4)``: weights of Y, U and V, and a constant.

    Raises:
        ValueError: The matrix is unknown.
    """
    if matrix not in MATRICES:
        raise ValueError(f"matrix must be one of {', '.join(MATRICES)} or None, not {matrix!r}")
    # Samples of more bits are 8-bit values with fractional bits. In full range, H.273 would have white at
    # 2**bits - 1, but FFmpeg's scaler does not.
    unit = 2.0 ** (bits - 8)
    zero, luma, chroma = (0.0, 255.0, 255.0) if full_range else (16.0, 219.0, 224.0)
    weights = _difference_weights(matrix) * (255 / unit) / [luma, chroma, chroma]
    constant = -weights @ (unit * np.array([zero, 128, 128]))
    return np.column_stack([weights, constant])


def _difference_weights(matrix: str) -> Array:
    """Return the matrix to R, G and B from Y (0 to 1) and U and V (-1/2 to 1/2)."""
    if matrix == "ycgco":  # U is green, V is orange
        return np.array([[1.0, -1, 1], [1, 1, 0], [1, -1, -1]])
    red, blue = _WEIGHTS[matrix]
    green = 1 - red - blue
    u, v = 2 * (1 - blue), 2 * (1 - red)
    return np.array([[1, 0, v], [1, -u * blue / green, -v * red / green], [1, u, 0]])


# Compared by identity: it is a key of caches, and its arrays have no hash.
@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A conversion of images of one size and format.

    Attributes:
        luma: Horizontal and vertical windows of Y.
        chroma: Horizontal and vertical windows of U and V.
        matrix: float32 ``(3, 4)``: weights of Y, U and V, and a constant, for each channel from 0 to 255.
        scale: float32 ``(3,)``: factor of each channel of a float result.
        bias: float32 ``(3,)``: summand of each channel after that.
        ceiling: Maximum of the weighted sum of a row's samples.
        shift: Number of unused low bits of a sample.
        dtype: Type of the result, ``"uint8"`` or ``"float32"``; ``"samples"`` means the samples of one plane.
    """

    luma: tuple[Taps, Taps]
    chroma: tuple[Taps, Taps]
    matrix: Array
    scale: Array
    bias: Array
    ceiling: float
    shift: int
    dtype: str

    @property
    def height(self) -> int:
        """Number of rows of the result."""
        return len(self.luma[1].first)

    @property
    def width(self) -> int:
        """Number of pixels in a row of the result."""
        return len(self.luma[0].first)

    def part(self, left: int, top: int, width: int, height: int) -> Plan:
        """Return the conversion to a part of the result."""
        columns, rows = slice(left, left + width), slice(top, top + height)
        luma, chroma = (
            (across.part(columns), down.part(rows)) for across, down in (self.luma, self.chroma)
        )
        return replace(self, luma=luma, chroma=chroma)


@lru_cache(maxsize=256)
def make_plan(
    pix_fmt: str,
    source: Size,
    size: Size,
    matrix: str | None = None,
    color_range: str | None = None,
    *,
    algo: ScaleAlgo | None = None,
    values: Values | None = None,
    bgr: bool = False,
) -> Plan:
    """Plan the conversion of images of one size to RGB.

    Args:
        pix_fmt: One of :data:`SEMI_PLANAR`.
        source: Width and height of the images.
        size: Width and height of the result.
        matrix: Matrix as in ``frames.colorspace``; ``None`` means BT.601, FFmpeg's default.
        color_range: ``"tv"`` (limited) or ``"pc"`` (full); ``None`` means limited.
        algo: The scaling filter, which is also applied if the size stays the same, as FFmpeg does. ``None``
            means that the image keeps its size, and chroma is upsampled bilinearly.
        values: Normalisation of the levels.
        bgr: Whether blue comes first.

    Raises:
        ValueError: The matrix is unknown.
    """
    samples, (scale, bias) = SEMI_PLANAR[pix_fmt], normalization(values)
    rgb = rgb_matrix(matrix or "bt601", full_range=color_range == "pc", bits=samples.bits)
    return Plan(
        luma=_windows(source, size, algo or "bilinear"),
        chroma=_windows(source, size, algo or "bilinear", 2, stretch=algo is not None),
        matrix=np.ascontiguousarray(rgb[::-1] if bgr else rgb, np.float32),
        scale=scale,
        bias=bias,
        ceiling=_CEILING * 2 ** (samples.bits - 8),
        shift=samples.shift,
        dtype="float32" if values is not None and values.is_float else "uint8",
    )


@lru_cache(maxsize=256)
def plane_plan(pix_fmt: str, source: Size, size: Size, algo: ScaleAlgo) -> Plan:
    """Plan the scaling or copy of one plane, without colour conversion.

    Args:
        pix_fmt: One of :data:`SEMI_PLANAR`. Unused bits are zero in the result.
        source: Number of samples in a row, and of rows.
        size: The same of the result.
        algo: The scaling filter.

    Raises:
        KeyError: ``pix_fmt`` is none of :data:`SEMI_PLANAR`, or there is no such ``algo``.
    """
    largest = np.full(3, (1 << SEMI_PLANAR[pix_fmt].bits) - 1, np.float32)
    # For one plane, the kernel does not read the matrix and the chroma windows.
    return replace(make_plan(pix_fmt, source, size, algo=algo), scale=largest, dtype="samples")


def _windows(
    source: Size, size: Size, algo: ScaleAlgo, sub: int = 1, *, stretch: bool = True
) -> tuple[Taps, Taps]:
    """Return the horizontal and vertical windows of a plane with one sample per ``sub`` x ``sub`` pixels."""
    across, down = (
        line_taps(length, short, sub, algo, stretch=stretch)
        for length, short in zip(source, size, strict=True)
    )
    return across, down


def normalization(values: Values | None) -> tuple[Array, Array]:
    """Return ``(level / 255 - mean) / std`` as factor and summand of each channel, float32 ``(3,)``.

    Raises:
        ValueError: ``mean`` or ``std`` has neither one number nor three.
    """
    numbers = ((0.0,), (1.0,)) if values is None else (values.mean, values.std)
    mean, std = (np.broadcast_to(np.array(one), 3) for one in numbers)
    return (1 / (255 * std)).astype(np.float32), (-mean / std).astype(np.float32)
