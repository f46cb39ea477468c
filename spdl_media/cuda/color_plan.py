"""Everything that a conversion needs to know but the images themselves, as numbers.

Windows and weights are the filters of FFmpeg's scaler, its rounding of positions and its treatment of edges
included, so that images come out as the CPU path makes them: within half a level before the result is
rounded, where exact positions would be off by several levels at edges in large images.

See:
    ITU-R BT.601, BT.709, BT.2020 and H.273 (whose numbers are FFmpeg's ``AVColorSpace``).
    FFmpeg ``libswscale/utils.c``, ``initFilter``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from spdl_media._checks import check_choice, check_int
from spdl_media.cuda.color_formats import YUVFormat
from spdl_media.formats import COLORSPACES
from spdl_media.values import Values

Array: TypeAlias = npt.NDArray[Any]
RGBLayout: TypeAlias = Literal["NHWC", "NCHW"]
Size: TypeAlias = tuple[int, int]

ScaleAlgo: TypeAlias = Literal["bicubic", "bilinear"]
SCALE_ALGOS = get_args(ScaleAlgo)

# Places of chroma samples, from the first to the last pixel that each stands for.
CHROMA_PLACES = MappingProxyType(
    {
        "left": (0.0, 0.5),
        "center": (0.5, 0.5),
        "topleft": (0.0, 0.0),
        "top": (0.5, 0.0),
        "bottomleft": (0.0, 1.0),
        "bottom": (0.5, 1.0),
    }
)
"""FFmpeg's names of chroma locations, and the place across and down."""

_CUBIC = 0.6  # FFmpeg's default; Pillow and PyTorch take 0.5
_REACH = MappingProxyType({"bicubic": 2, "bilinear": 1})


@dataclass(frozen=True, slots=True, eq=False)
class Taps:
    """The windows along one axis.

    Attributes:
        first: int32 ``(size,)``: the sample at which the window of each place begins.
        weights: float32 ``(taps, size)``; each column adds up to 1. Without taps: there are no samples.
    """

    first: Array
    weights: Array

    def part(self, places: slice) -> Taps:
        """The windows of some of the places."""
        return Taps(self.first[places], self.weights[:, places])


@lru_cache(maxsize=512)
def line_taps(
    length: int, size: int, sub: int, place: float, algo: ScaleAlgo, *, stretch: bool
) -> Taps:
    """The windows from a line of a plane to one of the result.

    Args:
        length: Pixels in a line of the image.
        size: Pixels in a line of the result.
        sub: Pixels for one sample; 1 for luma.
        place: Where among these the sample stands, from 0, the first, to 1, the last.
        algo: The filter. It is as wide as needed to take in all samples where the line becomes shorter.
        stretch: The last sample counts in full, also where it stands for fewer than ``sub`` pixels. FFmpeg's
            scaler has it so; the CPU path scales so, and mends it where the size stays the same.
    """
    samples = -(-length // sub)
    if sub == 1 and length == size:
        return _frozen(np.arange(size), np.ones((1, size)))
    # FFmpeg counts positions in steps of 2**-16.
    step = ((samples << 16) + size // 2) // size / 65536 if stretch else length / (sub * size)
    centers = (np.arange(size) + 0.5) * step - (0.5 + place * (sub - 1)) / sub
    reach = _REACH[algo]
    width = 1 + (2 * reach if step <= 1 else math.ceil(2 * reach * samples / size))
    width = max(1, min(width, samples - 2))
    # Towards zero: left of the first sample, the window begins one sample later than it should.
    first = np.trunc(centers - (width - 2) / 2).astype(np.int64)
    places = first[:, None] + np.arange(width)
    weights = _kernel(algo, (places - centers[:, None]) / max(1.0, step))
    weights /= weights.sum(1, keepdims=True)
    return _inside(places, weights, samples)


def no_taps(size: int) -> Taps:
    """Windows of nothing, for images without chroma."""
    return _frozen(np.zeros(size), np.zeros((0, size)))


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
    np.add.at(moved, (np.clip(places, 0, samples - 1) - first[:, None], columns), weights)
    return _frozen(first, moved)


def _frozen(first: Array, weights: Array) -> Taps:
    taps = Taps(np.ascontiguousarray(first, np.int32), np.ascontiguousarray(weights, np.float32))
    taps.first.flags.writeable = taps.weights.flags.writeable = False
    return taps


# FFmpeg's scaler keeps the samples of a row in 15 bits, 7 of them behind the point of 8 bit samples. What
# overshoots beyond white next to an edge is cut off there.
_CEILING = 32767 / 128


_BT601, _BT2020 = (0.299, 0.114), (0.2627, 0.0593)
# What red and blue weigh in luma.
_WEIGHTS = MappingProxyType(
    {
        "bt709": (0.2126, 0.0722),
        "fcc": (0.30, 0.11),
        "bt470bg": _BT601,
        "smpte170m": _BT601,
        "bt601": _BT601,
        "smpte240m": (0.212, 0.087),
        "bt2020nc": _BT2020,
        "bt2020": _BT2020,
    }
)
MATRICES = (*_WEIGHTS, "ycgco")
COEFFICIENTS = {
    **{number: name for number, name in COLORSPACES.items() if name in MATRICES},
    10: "bt2020nc",
}
"""The numbers of H.273 that ``coeff=`` takes, as SPDL has them.

10 is constant luminance, whose equations are no matrix. SPDL takes the matrix of 9 for it; FFmpeg's scale
filter refuses such pictures, and so does ``matrix=``.
"""

DEFAULT_MATRIX = "bt601"


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


@dataclass(frozen=True, slots=True)
class Look:
    """Colour metadata of planes, and output options. See ``yuv_to_rgb``."""

    matrix: str | None = None
    color_range: str | None = None
    chroma_location: str | None = None
    width: int | None = None
    height: int | None = None
    scale_algo: ScaleAlgo | None = None
    values: Values | None = None
    is_scaled: bool = False  # though the size is the same, as by FFmpeg's filter
    bgr: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (
            ("color_range", ("tv", "pc")),
            ("chroma_location", tuple(CHROMA_PLACES)),
            ("scale_algo", SCALE_ALGOS),
        ):
            check_choice(name, getattr(self, name), (*allowed, None))
        for name in ("width", "height"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name))


@lru_cache(maxsize=256)
def make_plan(format: YUVFormat, look: Look, width: int, height: int) -> Plan:
    """Work out how images of one size are converted.

    Raises:
        ValueError: An unknown matrix, or a range that contradicts the format.
    """
    size = (look.width or width, look.height or height)
    algo = look.scale_algo or ("bilinear" if size == (width, height) else "bicubic")
    matrix = _matrix(format, look)
    is_float = look.values is not None and look.values.is_float
    scale, bias = normalization(look.values)
    return Plan(
        luma=(
            line_taps(width, size[0], 1, 0.0, algo, stretch=True),
            line_taps(height, size[1], 1, 0.0, algo, stretch=True),
        ),
        chroma=_chroma_taps(format, look, (width, height), size, algo),
        matrix=np.ascontiguousarray(matrix[::-1] if look.bgr else matrix, np.float32),
        scale=scale,
        bias=bias,
        ceiling=_CEILING * 2 ** (format.bits - 8),
        shift=format.shift,
        dtype="float32" if is_float else "uint8",
    )


@lru_cache(maxsize=256)
def plane_plan(source: Size, size: Size, algo: ScaleAlgo, bits: int, shift: int) -> Plan:
    """How one plane is scaled, or copied, without a change of its values.

    Args:
        source: Samples in a row, and rows.
        size: Those of the result.
        algo: The filter.
        bits: Bits of a sample.
        shift: Unused bits below them, which are zero in the result.
    """
    across, down = (
        line_taps(length, to, 1, 0.0, algo, stretch=True)
        for length, to in zip(source, size, strict=True)
    )
    return Plan(
        luma=(across, down),
        chroma=(no_taps(size[0]), no_taps(size[1])),
        matrix=np.zeros((3, 4), np.float32),
        scale=np.full(3, (1 << bits) - 1, np.float32),
        bias=np.zeros(3, np.float32),
        ceiling=_CEILING * 2 ** (bits - 8),
        shift=shift,
        dtype="samples",
    )


def _matrix(format: YUVFormat, look: Look) -> Array:
    if not format.sub_x:
        # Gray has full range in FFmpeg, whatever it states, and is gray in every matrix.
        matrix = rgb_matrix(DEFAULT_MATRIX, full_range=True, bits=format.bits)
        return np.column_stack([matrix[:, 0], np.zeros((3, 3))])
    if format.full_range and look.color_range == "tv":
        raise ValueError(
            f"color_range='tv' contradicts {format.name}, which always has full range. Leave it out, or name "
            "the format without its j"
        )
    full_range = format.full_range or look.color_range == "pc"
    return rgb_matrix(look.matrix or DEFAULT_MATRIX, full_range=full_range, bits=format.bits)


def _chroma_taps(
    format: YUVFormat, look: Look, source: Size, size: Size, algo: ScaleAlgo
) -> tuple[Taps, Taps]:
    if not format.sub_x:
        return no_taps(size[0]), no_taps(size[1])
    across, down = CHROMA_PLACES[look.chroma_location or "center"]
    scaled = look.is_scaled or size != source
    return (
        line_taps(source[0], size[0], format.sub_x, across, algo, stretch=scaled),
        line_taps(source[1], size[1], format.sub_y, down, algo, stretch=scaled),
    )


def normalization(values: Values | None) -> tuple[Array, Array]:
    """``(level / 255 - mean) / std`` of each channel as a factor and a summand, float32."""
    numbers = ((0.0,), (1.0,)) if values is None else (values.mean, values.std)
    mean, std = (np.broadcast_to(np.array(one), 3) for one in numbers)
    return (1 / (255 * std)).astype(np.float32), (-mean / std).astype(np.float32)
