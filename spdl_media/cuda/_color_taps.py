"""Which samples of a line make each sample of a line of another length, and with which weights.

These are the filters of FFmpeg's scaler, its rounding of positions and its treatment of edges included, so
that images come out as the CPU path makes them: within half a level before the result is rounded, where
exact positions would be off by several levels at edges in large images.

See:
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

Array: TypeAlias = npt.NDArray[Any]
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
