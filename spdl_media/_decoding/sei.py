"""Messages in the bitstream of H.264 and HEVC (SEI) that say how the pictures stand."""

from __future__ import annotations

import re
from collections.abc import Iterator

from spdl_media._ffmpeg import AvPacket
from spdl_media.codec import VideoCodec

_DISPLAY_ORIENTATION = 47
_START_CODE = re.compile(rb"\x00\x00\x01")

# Of each codec: bytes of a unit's header, how its first byte tells the type, the type of messages.
_UNITS = {"h264": (1, 0, 31, 6), "hevc": (2, 1, 63, 39)}


def states_orientation(packet: AvPacket, codec: VideoCodec) -> bool:
    """Whether a packet carries a message of display orientation.

    See:
        ITU-T H.264 and H.265, 7.3.2.3 (messages), annex D (display orientation), annex B (start codes).
    """
    if codec.name not in _UNITS:
        return False
    header, shift, mask, message = _UNITS[codec.name]
    return any(
        len(unit) > header
        and unit[0] >> shift & mask == message
        and _DISPLAY_ORIENTATION in _message_types(bytes(unit[header:]))
        for unit in _units(memoryview(packet), codec.extradata or b"")
    )


def _units(data: memoryview, extradata: bytes) -> Iterator[memoryview]:
    """The units of a packet, behind start codes as in MPEG-TS or behind their lengths as in MP4."""
    if extradata[:1] != b"\1":  # the version of MP4's decoder configuration
        starts = [match.end() for match in _START_CODE.finditer(data)]
        for start, end in zip(starts, [*starts[1:], len(data)], strict=True):
            yield data[start:end]
        return
    position = 0
    while position + 4 <= len(data):  # lengths of fewer bytes are allowed, and not in use
        size = int.from_bytes(data[position : position + 4], "big")
        yield data[position + 4 : position + 4 + size]
        position += 4 + size


def _message_types(content: bytes) -> Iterator[int]:
    content = content.replace(b"\0\0\3", b"\0\0")  # bytes put in so that no start code appears
    position = 0
    while position + 2 <= len(content):
        kind, position = _number(content, position)
        size, position = _number(content, position)
        yield kind
        position += size


def _number(content: bytes, position: int) -> tuple[int, int]:
    """A number and what follows it; each byte 255 adds to the next."""
    value = 0
    while position < len(content):
        byte = content[position]
        value, position = value + byte, position + 1
        if byte != 255:
            break
    return value, position
