"""The conversion in NumPy: the reference of ``yuv_to_rgb.cu``, operation by operation.

All arithmetic is float32, each product and each sum rounded on its own, in the order of the kernel.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from spdl_media.cuda._color_formats import Planes
from spdl_media.cuda._color_plan import Plan
from spdl_media.cuda._color_taps import Taps

Array: TypeAlias = npt.NDArray[Any]


def convert(planes: Planes, plan: Plan, out: Array) -> None:
    """Convert frames one after the other.

    Args:
        planes: Y, U and V, each ``(frames, rows, samples)``.
        plan: What to do.
        out: Filled with the result, ``(frames, height, width, 3)`` in any strides.
    """
    for frame in range(len(out)):
        if plan.dtype == "samples":
            value = np.rint(np.clip(_resample(planes[0][frame], plan.luma, plan), 0, plan.scale[0]))
            out[frame, :, :, 0] = value.astype(out.dtype) << plan.shift
            continue
        y = _resample(planes[0][frame], plan.luma, plan)
        u = _resample(planes[1][frame], plan.chroma, plan)
        v = _resample(planes[2][frame], plan.chroma, plan)
        for channel, weights in enumerate(plan.matrix):
            value = weights[0] * y + weights[1] * u + weights[2] * v + weights[3]
            value = np.clip(value, np.float32(0), np.float32(255))
            if plan.dtype == "uint8":
                out[frame, :, :, channel] = np.rint(value)
            else:
                out[frame, :, :, channel] = value * plan.scale[channel] + plan.bias[channel]


def _resample(plane: Array, taps: tuple[Taps, Taps], plan: Plan) -> Array:
    """Weighted sums of windows of samples, rows first."""
    across, down = taps
    samples = (plane >> plan.shift).astype(np.float32)
    lines = np.zeros((len(samples), len(across.first)), np.float32)
    for tap, weights in enumerate(across.weights):
        lines += weights * samples[:, across.first + tap]
    np.minimum(lines, np.float32(plan.ceiling), out=lines)
    result = np.zeros((len(down.first), lines.shape[1]), np.float32)
    for tap, weights in enumerate(down.weights):
        result += weights[:, None] * lines[down.first + tap]
    return result
