"""Whether the frames of an H.264 stream may be coded as two fields, which the header of the stream says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice

# Profiles whose header has the format of chroma, the depth of bits and tables for scaling.
_HIGH_PROFILES = frozenset({44, 83, 86, 100, 110, 118, 122, 128, 134, 135, 138, 139, 244})

_HEADER = re.compile(rb"\x00\x00\x01[\x07\x27\x47\x67](.{8,})", re.DOTALL)


def may_have_fields(extradata: bytes | None) -> bool:
    """Whether fields are allowed; True as well where there is no header behind a start code.

    See:
        ITU-T H.264, 7.3.2.1.1 (sequence parameter set), 9.1 (numbers of variable length).
    """
    found = _HEADER.search(extradata or b"")
    if found is None:
        return True
    # Bytes that were put in so that no start code appears are taken out.
    data = found[1].replace(b"\0\0\3", b"\0\0")
    bits = iter(f"{int.from_bytes(data, 'big'):0{8 * len(data)}b}")
    try:
        return not _allows_frames_alone(data[0], bits)
    except StopIteration:
        return True


def _allows_frames_alone(profile: int, bits: Iterator[str]) -> bool:
    _number(bits, 24)  # profile, constraints, level
    _unsigned(bits)
    if profile in _HIGH_PROFILES:
        chroma = _unsigned(bits)
        _number(bits, chroma == 3)
        _unsigned(bits)
        _unsigned(bits)
        _number(bits, 1)
        if _number(bits, 1):
            return False  # tables for scaling, whose length is another story
    _unsigned(bits)
    order = _unsigned(bits)
    if order == 0:
        _unsigned(bits)
    elif order == 1:
        return False  # a table of offsets, which no encoder in use writes
    _unsigned(bits)
    _number(bits, 1)
    _unsigned(bits)
    _unsigned(bits)
    return bool(_number(bits, 1))


def _number(bits: Iterator[str], count: int) -> int:
    return int("0" + "".join(islice(bits, count)), 2)


def _unsigned(bits: Iterator[str]) -> int:
    zeros = 0
    while next(bits) == "0":
        zeros += 1
    return (1 << zeros) - 1 + _number(bits, zeros)
