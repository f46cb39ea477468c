"""From Y, U and V to R, G and B: matrices and ranges as numbers.

See:
    ITU-R BT.601, BT.709, BT.2020 and H.273 (whose numbers are FFmpeg's ``AVColorSpace``).
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]

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
COEFFICIENTS = MappingProxyType(
    {
        1: "bt709",
        4: "fcc",
        5: "bt470bg",
        6: "smpte170m",
        7: "smpte240m",
        8: "ycgco",
        9: "bt2020nc",
        10: "bt2020nc",
    }
)
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
