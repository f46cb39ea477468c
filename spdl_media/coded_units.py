"""What the packets and headers of H.264 and HEVC say: their units, the messages in them, and fields."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from itertools import islice, pairwise

from spdl_media._ffmpeg import AvPacket
from spdl_media.codec import VideoCodec

_RECOVERY_POINT, _DISPLAY_ORIENTATION = 6, 47
_START_CODE = re.compile(rb"\x00\x00\x01")

# Of each codec: bytes of a unit's header, how its first byte tells the type, the type of messages.
_UNITS = {"h264": (1, 0, 31, 6), "hevc": (2, 1, 63, 39)}


def states_orientation(packet: AvPacket, codec: VideoCodec) -> bool:
    """Whether a packet carries a message of display orientation.

    See:
        ITU-T H.264 and H.265, annex D.
    """
    if codec.name not in _UNITS:
        return False
    return any(True for _ in _messages(packet, codec, _DISPLAY_ORIENTATION))


def is_gradual(packet: AvPacket, codec: VideoCodec) -> bool:
    """Whether a packet of H.264 is a key frame whose image is whole only some frames later.

    See:
        ITU-T H.264, D.2.8 (recovery point): a number of frames, of which 0 is the single bit 1.
    """
    if codec.name != "h264":
        return False
    return any(
        not content[:1] or content[0] < 128 for content in _messages(packet, codec, _RECOVERY_POINT)
    )


def _messages(packet: AvPacket, codec: VideoCodec, wanted: int) -> Iterator[bytes]:
    """The messages of a type in a packet.

    See:
        ITU-T H.264 and H.265, 7.3.2.3 (messages).
    """
    header, _, _, message = _UNITS[codec.name]
    for unit_kind, unit in coded_units(packet, codec):
        if unit_kind != message:
            continue
        # Bytes that were put in so that no start code appears are taken out.
        content = bytes(unit[header:]).replace(b"\0\0\3", b"\0\0")
        stream = io.BytesIO(content)
        # Each is a type, a size and so many bytes.
        while stream.tell() + 2 <= len(content):
            kind, size = _number(stream), _number(stream)
            data = stream.read(size)
            if kind == wanted:
                yield data


def coded_units(packet: AvPacket, codec: VideoCodec) -> Iterator[tuple[int, memoryview]]:
    """The units of a packet of H.264 or HEVC, each with its type.

    See:
        ITU-T H.264 and H.265, 7.3.1 (units), annex B (start codes).
    """
    header, shift, mask, _ = _UNITS[codec.name]
    for unit in _units(memoryview(packet), codec.extradata or b""):
        if len(unit) > header:
            yield unit[0] >> shift & mask, unit


def _units(data: memoryview, extradata: bytes) -> Iterator[memoryview]:
    """The units of a packet, behind start codes as in MPEG-TS or behind their lengths as in MP4."""
    if extradata[:1] != b"\1":  # the version of MP4's decoder configuration
        starts = [match.end() for match in _START_CODE.finditer(data)]
        for start, end in pairwise([*starts, len(data)]):
            yield data[start:end]
        return
    position = 0
    while position + 4 <= len(data):  # lengths of fewer bytes are allowed, and not in use
        start = position + 4
        position = start + int.from_bytes(data[position:start], "big")
        yield data[start:position]


def _number(stream: io.BytesIO) -> int:
    """The next number, to which each byte of 255 adds."""
    value = 0
    while (byte := stream.read(1)) == b"\xff":
        value += 255
    return value + int.from_bytes(byte, "big")


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
