"""Whether the frames of an H.264 stream may be coded as two fields, which the header of the stream says."""

from __future__ import annotations

import re
from itertools import islice

# Profiles whose header has the format of chroma, the depth of bits and tables for scaling.
_HIGH_PROFILES = frozenset({44, 83, 86, 100, 110, 118, 122, 128, 134, 135, 138, 139, 244})

_HEADER = re.compile(rb"\x00\x00\x01[\x07\x27\x47\x67](.{8,})", re.DOTALL)


def may_have_fields(extradata: bytes | None) -> bool:
    """Whether fields are allowed; True as well where no header behind a start code tells.

    See:
        ITU-T H.264, 7.3.2.1.1 (sequence parameter set), 9.1 (numbers of variable length).
    """
    found = _HEADER.search(extradata or b"")
    if found is None:
        return True
    # Bytes that were put in so that no start code appears are taken out.
    data = found[1].replace(b"\0\0\3", b"\0\0")
    bits = iter(f"{int.from_bytes(data, 'big'):0{8 * len(data)}b}")

    def take(count: int) -> int:
        return int("0" + "".join(islice(bits, count)), 2)

    def numbers(count: int) -> int:
        """Read so many numbers, and return the last."""
        for _ in range(count):
            zeros = next(size for size, bit in enumerate(bits) if bit == "1")
            last = (1 << zeros) - 1 + take(zeros)
        return last

    try:
        take(24)  # profile, constraints, level
        numbers(1)
        if data[0] in _HIGH_PROFILES:
            take(numbers(1) == 3)
            numbers(2)
            if take(2) & 1:
                return True  # tables for scaling, of any length
        order = (numbers(1), numbers(1))[1]
        if order == 1:
            return True  # a table of offsets, which no encoder in use writes
        numbers(2 if order == 0 else 1)
        take(1)
        numbers(2)
        return not take(1)
    except StopIteration:
        return True
