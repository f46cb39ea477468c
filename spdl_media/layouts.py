"""How the planes of FFmpeg's formats make one array: tables, and the shapes that follow from them.

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

The ``gbr`` formats come in the order R, G, B. Deep formats come in native byte order, with the values that
FFmpeg has: 0 to 2**bits - 1, in ``p010`` and ``p012`` multiplied by 2**(16 - bits).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Literal, TypeAlias

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PixelLayout:
    """How the planes of a pixel format lie in an array.

    Attributes:
        kind: ``"packed"``: one plane, (H, W, C). ``"planar"``: C planes of equal size, (C, H, W).
            ``"tiled"``: a luma plane and smaller chroma planes one below the other, (1, rows, W).
        channels: C; for ``"tiled"`` 1.
        dtype: NumPy's name of the type, in native byte order.
        order: Plane of FFmpeg's frame at each place of the array.
        chroma_rows: For ``"tiled"``: rows of chroma for every row of luma, as the divisor of the height.
    """

    kind: Literal["packed", "planar", "tiled"]
    channels: int
    dtype: str = "uint8"
    order: tuple[int, ...] = (0,)
    chroma_rows: int = 1

    def shape(self, width: int, height: int) -> Shape:
        """Shape of the array of one frame."""
        if self.kind == "packed":
            return height, width, self.channels
        if self.kind == "planar":
            return self.channels, height, width
        return 1, height + -(-height // self.chroma_rows), width

    def tiles(self, width: int) -> bool:
        """Whether the planes of a frame this wide make one rectangle."""
        return self.kind != "tiled" or width % 2 == 0


_RGB, _RGBA = (2, 0, 1), (2, 0, 1, 3)

_EIGHT_BIT = {
    **dict.fromkeys(("rgb24", "bgr24"), PixelLayout("packed", 3)),
    **dict.fromkeys(("rgba", "bgra", "argb", "abgr"), PixelLayout("packed", 4)),
    **dict.fromkeys(("gray", "gray8"), PixelLayout("packed", 1)),
    "ya8": PixelLayout("packed", 2),
    **dict.fromkeys(("yuv444p", "yuvj444p"), PixelLayout("planar", 3, order=(0, 1, 2))),
    "yuva444p": PixelLayout("planar", 4, order=(0, 1, 2, 3)),
    "gbrp": PixelLayout("planar", 3, order=_RGB),
    "gbrap": PixelLayout("planar", 4, order=_RGBA),
    **dict.fromkeys(
        ("yuv420p", "yuvj420p"), PixelLayout("tiled", 1, order=(0, 1, 2), chroma_rows=2)
    ),
    **dict.fromkeys(("nv12", "nv21"), PixelLayout("tiled", 1, order=(0, 1), chroma_rows=2)),
    **dict.fromkeys(("yuv422p", "yuvj422p"), PixelLayout("tiled", 1, order=(0, 1, 2))),
}
_SIXTEEN_BIT = {
    **dict.fromkeys(("rgb48", "bgr48"), PixelLayout("packed", 3, "uint16")),
    **dict.fromkeys(("rgba64", "bgra64"), PixelLayout("packed", 4, "uint16")),
    "ya16": PixelLayout("packed", 2, "uint16"),
    **dict.fromkeys(("p010", "p012", "p016"), PixelLayout("tiled", 1, "uint16", (0, 1), 2)),
    "grayf32": PixelLayout("planar", 1, "float32"),
}
_DEEP = re.compile(r"(gray|yuv420p|yuv422p|yuv444p|yuva444p|gbrp|gbrap)(9|10|12|14|16)")

PIXEL_LAYOUTS: Mapping[str, PixelLayout] = MappingProxyType(_EIGHT_BIT | _SIXTEEN_BIT)
"""The formats that have a name of their own; :func:`pixel_layout` knows their deep variants too."""


@lru_cache(maxsize=256)
def pixel_layout(pix_fmt: str) -> PixelLayout | None:
    """The layout of a pixel format; ``None``: it has no row in the table."""
    name = re.sub(r"(?<=\d)(le|be)$", "", pix_fmt)
    if name in PIXEL_LAYOUTS:
        return PIXEL_LAYOUTS[name]
    deep = _DEEP.fullmatch(name)
    if deep is None:
        return None
    if deep[1] == "gray":
        return PixelLayout("planar", 1, "uint16")
    base = PIXEL_LAYOUTS[deep[1]]
    return PixelLayout(base.kind, base.channels, "uint16", base.order, base.chroma_rows)


SAMPLE_DTYPES: Mapping[str, str] = MappingProxyType(
    {
        "u8": "uint8",
        "s16": "int16",
        "s32": "int32",
        "s64": "int64",
        "flt": "float32",
        "dbl": "float64",
    }
)
"""FFmpeg's packed sample formats as NumPy types. Planar ones have a ``p`` behind, and give (C, N)."""
