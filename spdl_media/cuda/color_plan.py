"""Everything that a conversion needs to know but the images themselves: formats, windows, matrices.

Windows and weights are the filters of FFmpeg's scaler, its rounding of positions and its treatment of edges
included, so that images come out as the CPU path makes them: within half a level before the result is
rounded, where exact positions would be off by several levels at edges in large images.

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
from spdl_media.values import Values

ScaleAlgo: TypeAlias = Literal["bicubic", "bilinear"]
SCALE_ALGOS = get_args(ScaleAlgo)


class Samples(NamedTuple):
    """How the samples of a format lie in memory: their type, bits, and unused bits below them."""

    dtype: str
    bits: int
    shift: int


_DEEP = Samples("<u2", 12, 4)
SEMI_PLANAR = {
    "nv12": Samples("|u1", 8, 0),
    "p010le": Samples("<u2", 10, 6),
    "p012le": _DEEP,
    "p016le": _DEEP,
}
"""The formats in which NVDEC gives frames: Y, and U and V in turn, for two pixels each way.

12 bits are P012, which FFmpeg 8.0 calls P016.
"""


_CUBIC = 0.6  # FFmpeg's default; Pillow and PyTorch take 0.5
_REACH = {"bicubic": 2, "bilinear": 1}


@dataclass(frozen=True, slots=True, eq=False)
class Taps:
    """The windows along one axis.

    Attributes:
        first: int32 ``(size,)``: the sample at which the window of each place begins.
        weights: float32 ``(taps, size)``; each column adds up to 1.
    """

    first: Array
    weights: Array

    def part(self, places: slice) -> Taps:
        """The windows of some of the places."""
        return Taps(self.first[places], self.weights[:, places])


@lru_cache(maxsize=512)
def line_taps(length: int, size: int, sub: int, algo: ScaleAlgo, *, stretch: bool = True) -> Taps:
    """The windows from a line of a plane to one of the result.

    Args:
        length: Pixels in a line of the image.
        size: Pixels in a line of the result.
        sub: Pixels for one sample, which stands amid them; 1 for luma.
        algo: The filter. It is as wide as needed to take in all samples where the line becomes shorter.
        stretch: The last sample counts in full, also where it stands for fewer than ``sub`` pixels. FFmpeg's
            scaler has it so; the CPU path scales so, and mends it where the size stays the same.
    """
    samples = -(-length // sub)
    if sub == 1 and length == size:
        return _frozen(np.arange(size), np.ones((1, size)))
    # FFmpeg counts positions in steps of 2**-16.
    step = ((samples << 16) + size // 2) // size / 65536 if stretch else length / (sub * size)
    centers = (np.arange(size) + 0.5) * step - 0.5
    reach = _REACH[algo]
    width = 1 + (2 * reach if step <= 1 else math.ceil(2 * reach * samples / size))
    # As in FFmpeg, whose filters leave two samples of a line out at least.
    width = max(1, min(width, samples - 2))
    # Towards zero: left of the first sample, the window begins one sample later than it should.
    first = np.trunc(centers - (width - 2) / 2).astype(np.int64)
    places = first[:, None] + np.arange(width)
    weights = _kernel(algo, (places - centers[:, None]) / max(1.0, step))
    # Between samples the kernel does not add up to 1.
    weights /= weights.sum(1, keepdims=True)
    return _inside(places, weights, samples)


def _kernel(algo: ScaleAlgo, distance: Array) -> Array:
    d, a = np.abs(distance), _CUBIC
    if algo == "bilinear":
        return np.where(d < 1, 1 - d, 0)
    near = (2 - a) * d**3 + (a - 3) * d**2 + 1
    far = a * (-(d**3) + 5 * d**2 - 8 * d + 4)
    return np.where(d < 1, near, np.where(d < 2, far, 0))


def _inside(places: Array, weights: Array, samples: int) -> Taps:
    """Move windows inside the line; what lay beyond it counts for the outermost sample."""
    size, width = places.shape
    first = np.clip(places[:, 0], 0, samples - width)
    moved = np.zeros((width, size))
    columns = np.broadcast_to(np.arange(size)[:, None], places.shape)
    # Not moved[...] += weights, which counts a sample once where it stands for several.
    np.add.at(moved, (np.clip(places, 0, samples - 1) - first[:, None], columns), weights)
    return _frozen(first, moved)


def _frozen(first: Array, weights: Array) -> Taps:
    taps = Taps(np.ascontiguousarray(first, np.int32), np.ascontiguousarray(weights, np.float32))
    # Plans share them through the cache.
    taps.first.flags.writeable = taps.weights.flags.writeable = False
    return taps


# FFmpeg's scaler keeps the samples of a row in 15 bits, 7 of them behind the point of 8 bit samples. What
# overshoots beyond white next to an edge is cut off there.
_CEILING = 32767 / 128


_BT601, _BT2020 = (0.299, 0.114), (0.2627, 0.0593)
# What red and blue weigh in luma.
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
"""The numbers of H.273 that ``coeff=`` takes, as SPDL has them.

10 is constant luminance, whose equations are no matrix. SPDL takes the matrix of 9 for it; FFmpeg's scale
filter refuses such pictures, and so do frames and buffers that state it.
"""


def rgb_matrix(matrix: str, *, full_range: bool, bits: int) -> Array:
    """The matrix from samples to R, G and B of 0 to 255.

    Returns:
        float64 array ``(3, 4)``: weights of Y, U and V, and a constant.

    Raises:
        ValueError: An unknown matrix.
    """
    if matrix not in MATRICES:
        raise ValueError(f"matrix must be one of {', '.join(MATRICES)} or None, not {matrix!r}")
    # Deep samples are those of 8 bits with more digits, in full range too, where H.273 would put white at
    # 2**bits - 1: so does FFmpeg's scaler.
    unit = 2.0 ** (bits - 8)
    zero, luma, chroma = (0.0, 255.0, 255.0) if full_range else (16.0, 219.0, 224.0)
    weights = _difference_weights(matrix) * (255 / unit) / [luma, chroma, chroma]
    constant = -weights @ (unit * np.array([zero, 128, 128]))
    return np.column_stack([weights, constant])


def _difference_weights(matrix: str) -> Array:
    """R, G and B out of Y of 0 to 1 and U and V of -1/2 to 1/2."""
    if matrix == "ycgco":  # U is green, V is orange
        return np.array([[1.0, -1, 1], [1, 1, 0], [1, -1, -1]])
    red, blue = _WEIGHTS[matrix]
    green = 1 - red - blue
    u, v = 2 * (1 - blue), 2 * (1 - red)
    return np.array([[1, 0, v], [1, -u * blue / green, -v * red / green], [1, u, 0]])


# Equal to itself alone: it is a key of caches, and its arrays have no hash.
@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A conversion of images of one size and format.

    Attributes:
        luma: Windows across and down.
        chroma: The same for U and V.
        matrix: float32 ``(3, 4)``: the weights of Y, U, V and a constant for each channel, in levels of 255.
        scale: float32 ``(3,)``: what channels of a float result are multiplied by.
        bias: float32 ``(3,)``: what is added to them then.
        ceiling: The largest value of a row of weighted samples.
        shift: Unused bits below those of a sample.
        dtype: Type of the result, ``"uint8"`` or ``"float32"``; ``"samples"``: those of the one plane.
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
        """Rows of the result."""
        return len(self.luma[1].first)

    @property
    def width(self) -> int:
        """Pixels in a row of the result."""
        return len(self.luma[0].first)

    def part(self, left: int, top: int, width: int, height: int) -> Plan:
        """The conversion to a part of the result."""
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
    """Work out how images of one size are converted.

    Args:
        pix_fmt: One of :data:`SEMI_PLANAR`.
        source: Their width and height.
        size: Those of the result.
        matrix: As ``frames.colorspace`` has it; ``None``: BT.601, as FFmpeg takes it.
        color_range: ``"tv"`` or ``"pc"``; ``None``: limited.
        algo: The filter, which also scales an image to its own size, as FFmpeg's filter does. ``None``: the
            image keeps its size, and chroma becomes as large bilinearly.
        values: The numbers that levels become.
        bgr: Blue comes first.

    Raises:
        ValueError: An unknown matrix.
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
    """How one plane of a format is scaled, or copied, without a change of its values.

    Args:
        pix_fmt: One of :data:`SEMI_PLANAR`. Unused bits are zero in the result.
        source: Samples in a row, and rows.
        size: Those of the result.
        algo: The filter.
    """
    largest = np.full(3, (1 << SEMI_PLANAR[pix_fmt].bits) - 1, np.float32)
    # The kernel reads neither its matrix nor its windows of chroma.
    return replace(make_plan(pix_fmt, source, size, algo=algo), scale=largest, dtype="samples")


def _windows(
    source: Size, size: Size, algo: ScaleAlgo, sub: int = 1, *, stretch: bool = True
) -> tuple[Taps, Taps]:
    """The windows across and down, for planes with a sample for so many pixels each way."""
    across, down = (
        line_taps(length, short, sub, algo, stretch=stretch)
        for length, short in zip(source, size, strict=True)
    )
    return across, down


def normalization(values: Values | None) -> tuple[Array, Array]:
    """``(level / 255 - mean) / std`` of each channel as a factor and a summand, float32."""
    numbers = ((0.0,), (1.0,)) if values is None else (values.mean, values.std)
    mean, std = (np.broadcast_to(np.array(one), 3) for one in numbers)
    return (1 / (255 * std)).astype(np.float32), (-mean / std).astype(np.float32)
