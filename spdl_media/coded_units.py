"""Read from coded packets what FFmpeg's demuxers do not state: messages, hidden frames, types of pictures."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from spdl_media._ffmpeg import PYAV, AvPacket
from spdl_media.codec import VideoCodec
from spdl_media.errors import DemuxError
from spdl_media.still_parts import is_animated_webp

__all__ = ()

_RECOVERY_POINT, _DISPLAY_ORIENTATION = 6, 47
_START_CODE = re.compile(rb"\x00\x00\x01")

# By codec: size of a NAL unit's header in bytes, shift and mask of the type in its first byte, type of SEI,
# the byte of MP4's decoder configuration that states the size of lengths.
_UNITS = {"h264": (1, 0, 31, 6, 4), "hevc": (2, 1, 63, 39, 21)}


def states_orientation(packet: AvPacket, codec: VideoCodec) -> bool:
    """Whether a packet has an SEI message of display orientation.

    See:
        ITU-T H.264 and H.265, annex D.
    """
    return codec.name in _UNITS and any(
        True for _ in _messages(packet, codec, _DISPLAY_ORIENTATION)
    )


def is_gradual(packet: AvPacket, codec: VideoCodec) -> bool:
    """Whether an H.264 packet is a recovery point from which frames are complete only some frames later.

    See:
        ITU-T H.264, D.2.8 (recovery point): a number of frames; 0 is coded as the single bit 1.
    """
    return codec.name == "h264" and any(
        content[:1] < b"\x80" for content in _messages(packet, codec, _RECOVERY_POINT)
    )


def has_checksum(packet: AvPacket, codec: VideoCodec) -> bool:
    """Whether an HEVC packet has a hash of its picture (unit 40), or metadata of Dolby Vision (62)."""
    return any(kind in (40, 62) for kind, _ in _typed_units(packet, codec))


def _messages(packet: AvPacket, codec: VideoCodec, wanted: int) -> Iterator[bytes]:
    """Yield the payloads of the SEI messages of a type in a packet.

    See:
        ITU-T H.264 and H.265, 7.3.2.3 (messages).
    """
    header, _, _, message, _ = _UNITS[codec.name]
    for unit_kind, unit in _typed_units(packet, codec):
        if unit_kind != message:
            continue
        # Remove the emulation prevention bytes.
        content = bytes(unit[header:]).replace(b"\0\0\3", b"\0\0")
        stream = io.BytesIO(content)
        # Each message is a type, a size and a payload of that size.
        while stream.tell() + 2 <= len(content):
            kind, size = _number(stream), _number(stream)
            data = stream.read(size)
            if kind == wanted:
                yield data


def _typed_units(packet: AvPacket, codec: Any) -> Iterator[tuple[int, memoryview]]:
    """Yield type and bytes of each NAL unit in a packet of H.264 or HEVC.

    See:
        ITU-T H.264 and H.265, 7.3.1 (units), annex B (start codes).
    """
    header, shift, mask, *_ = _UNITS[codec.name]
    data, size = memoryview(packet), _length_size(codec)
    starts = [] if size else [match.end() for match in _START_CODE.finditer(data)]
    marked = (data[start:end] for start, end in pairwise([*starts, len(data)]))
    for unit in length_units(data, size) if size else marked:
        if len(unit) >= header:
            yield unit[0] >> shift & mask, unit


def _length_size(codec: Any) -> int:
    """Return the size of the lengths before NAL units, as in MP4; 0: start codes, as in MPEG-TS.

    See:
        ISO/IEC 14496-15, 5.3.3 and 8.3.3 (decoder configurations, whose version is 1).
    """
    extradata, place = codec.extradata or b"", _UNITS[codec.name][-1]
    return 1 + (extradata[place] & 3) if extradata[:1] == b"\1" and place < len(extradata) else 0


def length_units(data: memoryview, size: int = 4) -> Iterator[memoryview]:
    """Yield the NAL units that follow lengths of ``size`` bytes."""
    position = 0
    while position + size <= len(data):
        start = position + size
        position = start + int.from_bytes(data[position:start], "big")
        yield data[start:position]


def _number(stream: io.BytesIO) -> int:
    """Read a number of an SEI message: the sum of bytes up to the first that is not 255."""
    value = 0
    while (byte := stream.read(1)) == b"\xff":
        value += 255
    return value + int.from_bytes(byte, "big")


# By codec: types of units of parameter sets and of ends of sequences and streams, and those of slices.
_FRAMELESS = {"h264": {7, 8, 10, 11}, "hevc": {32, 33, 34, 36, 37}}
_SLICES = {"h264": range(6), "hevc": range(32)}


def is_sliceless(packet: AvPacket | None, codec: VideoCodec) -> bool:
    """Whether a packet has only parameter sets or the end of a sequence, as the last one of some streams.

    See:
        ITU-T H.264, table 7-1, and H.265, table 7-1 (types of units).
    """
    # Such units are small. The first unit is behind a length or a start code of usually 4 bytes.
    if packet is None or codec.name not in _UNITS or not 4 < packet.size <= 1024:
        return False
    slices, (_, shift, mask, *_) = _SLICES[codec.name], _UNITS[codec.name]
    if memoryview(packet)[_length_size(codec) or 4] >> shift & mask in slices:
        return False  # most packets, after 0.4 us instead of 1.4
    kinds = {kind for kind, _ in _typed_units(packet, codec)}
    return not kinds.isdisjoint(_FRAMELESS[codec.name]) and kinds.isdisjoint(slices)


# In MPEG-1 and MPEG-2, the start code of a slice.
_SLICE_CODE = re.compile(rb"\x00\x00\x01[\x01-\xaf]")


def is_hidden(packet: AvPacket, video: VideoCodec) -> bool:
    """Whether a packet gives no frame: one of VP8 or VP9 is only a reference, or others have no slice.

    See:
        RFC 6386, 9.1 (frame header of VP8). VP9 bitstream specification, 7.2 (uncompressed header), annex B
        (superframes, in which one frame is shown). ITU-T H.262, 6.2.1 (start codes).
    """
    codec, data = video.name, memoryview(packet)
    if codec in ("mpeg1video", "mpeg2video"):
        return _SLICE_CODE.search(data) is None
    if codec not in ("vp8", "vp9") or not data:
        return is_sliceless(packet, video)
    if codec == "vp8":
        return not data[0] & 0x10
    mark = data[-1]
    if mark & 0xE0 == 0xC0:  # the index of a superframe, which ends as it begins
        size = 2 + ((mark >> 3 & 3) + 1) * ((mark & 7) + 1)
        if size <= len(data) and data[-size] == mark:
            return False
    # Marker and profile (2 bits each, 1 more in profile 3), show_existing_frame, frame_type, show_frame.
    bits = data[0] << 1 if data[0] & 0x30 == 0x30 else data[0]
    return bits & 0x0A == 0


def needs_newer_pyav(packet: AvPacket, codec: VideoCodec) -> bool:
    """Whether a packet is an animated WebP, which FFmpeg 8.0 does not decode."""
    return codec.name == "webp" and PYAV < 19 and is_animated_webp(memoryview(packet))


# By codec: where a picture states its type, in bits of a byte: the byte, shift, mask, and the type I.
_PICTURE_TYPES = {
    # 10 bits after the start code
    **dict.fromkeys(("mpeg1video", "mpeg2video"), (re.compile(rb"(?s)\0\0\x01\0.(.)"), 3, 7, 1)),
    "mpeg4": (re.compile(rb"(?s)\0\0\x01\xb6(.)"), 6, 3, 0),
    # MS-MPEG-4, whose version 3 has no number in its name, and WMV 1
    **dict.fromkeys(("msmpeg4", "msmpeg4v2", "wmv1"), (re.compile(rb"(?s)\A(.)"), 6, 3, 0)),
}

STATE_PICTURE_TYPE = frozenset({"h263", "hevc", *_PICTURE_TYPES})
"""Codecs of :func:`is_intra`. Of H.264, VP8, VP9 and AV1, FFmpeg finds the key frames itself."""


def is_intra(packet: AvPacket, codec: Any) -> bool:
    """Whether decoding can begin at the first picture of a packet.

    See:
        ITU-T H.265, 7.4.2.2: NAL units of types below 32 are pictures, 16 to 23 random access points. ITU-T
        H.263, 5.1.3 and 5.1.4: PTYPE and PLUSPTYPE.
    """
    if codec.name == "hevc":
        return 16 <= next((kind for kind, _ in _typed_units(packet, codec) if kind < 32), 16) < 24
    if codec.name == "h263":
        bits = f"{int.from_bytes(bytes(packet)[:9], 'big'):072b}"
        if bits[35:38] != "111":  # the source format is not "extended PTYPE"
            return bits[38] == "0"
        start = 59 if bits[38:41] == "001" else 41
        return bits[start : start + 3] == "000"
    pattern, shift, mask, intra = _PICTURE_TYPES[codec.name]
    found = pattern.search(memoryview(packet))
    return found is None or found[1][0] >> shift & mask == intra


def check_clear(packet: AvPacket, error: Callable[[str], DemuxError]) -> None:
    """Refuse an encrypted packet of an MP4 or a WebM, which a decoder may take for an image or for samples.

    Raises:
        DemuxError: The packet is encrypted.
    """
    if packet.has_sidedata("encryption_info"):
        raise error(
            "the data is encrypted (Common Encryption). Decrypt the file, or give its key in hexadecimal "
            "digits: demux_config(format_options={'decryption_key': '...'})"
        )
    if "enc_key_id" in packet.stream.metadata:  # FFmpeg's name for the ID of the key in a WebM
        raise error("the data is encrypted, and FFmpeg cannot decrypt WebM. Decrypt the file")
