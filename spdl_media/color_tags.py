"""FFmpeg's names for the numbers that say what the values of a picture mean.

A stream states four things: the matrix from RGB to YUV, the range, the primaries, and the transfer
function. Unspecified is ``None`` here; FFmpeg then takes BT.601 and limited range (full for JPEG).

See:
    FFmpeg ``libavutil/pixfmt.h`` (``AVColorSpace``, ``AVColorRange``, ``AVColorPrimaries``,
    ``AVColorTransferCharacteristic``), whose numbers are those of ITU-T H.273.
"""

from __future__ import annotations

from types import MappingProxyType

COLORSPACES = MappingProxyType(
    {
        0: "gbr",
        1: "bt709",
        4: "fcc",
        5: "bt470bg",
        6: "smpte170m",
        7: "smpte240m",
        8: "ycgco",
        9: "bt2020nc",
        10: "bt2020c",
        11: "smpte2085",
        12: "chroma-derived-nc",
        13: "chroma-derived-c",
        14: "ictcp",
        15: "ipt-c2",
        16: "ycgco-re",
        17: "ycgco-ro",
    }
)
COLOR_RANGES = MappingProxyType({1: "tv", 2: "pc"})
COLOR_PRIMARIES = MappingProxyType(
    {
        1: "bt709",
        4: "bt470m",
        5: "bt470bg",
        6: "smpte170m",
        7: "smpte240m",
        8: "film",
        9: "bt2020",
        10: "smpte428",
        11: "smpte431",
        12: "smpte432",
        22: "ebu3213",
    }
)
COLOR_TRCS = MappingProxyType(
    {
        1: "bt709",
        4: "bt470m",
        5: "bt470bg",
        6: "smpte170m",
        7: "smpte240m",
        8: "linear",
        9: "log100",
        10: "log316",
        11: "iec61966-2-4",
        12: "bt1361e",
        13: "iec61966-2-1",
        14: "bt2020-10",
        15: "bt2020-12",
        16: "smpte2084",
        17: "smpte428",
        18: "arib-std-b67",
    }
)
