"""Read headers and packets for what PyAV or FFmpeg's demuxers do not state, or state wrongly."""

from __future__ import annotations

import io
import itertools
import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

from av.container import InputContainer

from spdl_media import audio_clock
from spdl_media._ffmpeg import CUTS_LAST_FRAME, PYAV, AvPacket, as_fraction
from spdl_media.codec import VideoCodec, muxed_header
from spdl_media.errors import DemuxError
from spdl_media.inputs import Input
from spdl_media.parts import MATROSKA, read_moov
from spdl_media.still_parts import is_animated_webp
from spdl_media.stills import HEAD_SIZE

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
    codec = video.name
    if codec in ("mpeg1video", "mpeg2video"):
        return _SLICE_CODE.search(memoryview(packet)) is None
    if codec not in ("vp8", "vp9") or not packet.size:
        return is_sliceless(packet, video)
    data = memoryview(packet)
    if codec == "vp8":
        return not data[0] & 0x10
    mark = data[-1]
    if mark & 0xE0 == 0xC0:
        size = 2 + ((mark >> 3 & 3) + 1) * ((mark & 7) + 1)
        if size <= len(data) and data[-size] == mark:
            return False
    # Marker and profile (2 bits each, 1 more in profile 3), show_existing_frame, frame_type, show_frame.
    bits = data[0] << 1 if data[0] & 0x30 == 0x30 else data[0]
    return bits & 0x0A == 0


def needs_newer_pyav(packet: AvPacket, codec: VideoCodec) -> bool:
    """Whether a packet is an animated WebP, which FFmpeg 8.0 does not decode."""
    return codec.name == "webp" and PYAV < 19 and is_animated_webp(memoryview(packet))


# Read what demuxers state, but PyAV does not expose.

# Codecs that MP4 supports and QuickTime does not. For ProRes, DV and others, the opposite is true.
_ONLY_IN_MP4 = frozenset({"av1", "ffv1", "vp9"})

# IDs of Matroska elements. The second one also occurs in names of codecs (such as "vp9"), but there the next
# byte is not the size of an element.
CLUSTER, _PROJECTION = b"\x1f\x43\xb6\x75", re.compile(rb"vp(?![89x])")
# The display matrix of an MP4 track that is not rotated.
_STRAIGHT = struct.pack(">9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)


def display_matrix(stream: Any, format: str, input: Input) -> tuple[int, ...] | None:
    """Return the display matrix of a video stream, read from an MP4 or QuickTime header written for it.

    Args:
        stream: A stream of the open file.
        format: FFmpeg's name of the container's format.
        input: The source.

    Raises:
        SourceError: The source cannot be read.
    """
    if not ("mp4" in format or "matroska" in format) or (input.is_local and _is_straight(input)):
        return None
    # PyAV exposes a stream's side data only on decoded frames. A muxer writes it into the track header
    # (tkhd), which takes about 0.1 ms, while decoding a frame takes up to 10 ms.
    is_in_mov = stream.codec_context.codec.canonical_name not in _ONLY_IN_MP4
    options = {"movflags": "empty_moov", "strict": "-2"}
    written = is_in_mov and muxed_header(stream, "mov", options)
    written = written or muxed_header(stream, "mp4", options)
    start = written.find(b"tkhd") + 4
    if start < 4:
        return None
    fixed = 20 if written[start] == 0 else 32  # times and duration, of 32 or 64 bits by version
    return struct.unpack_from(">9i", written, start + 4 + fixed + 16)


def _is_straight(input: Input) -> bool:
    """Whether the header is short and certainly states no rotation, which is ten times as fast to find out.

    See:
        ISO/IEC 14496-12, 8.2.2 and 8.3.2 (mvhd, tkhd). RFC 9559, 5.1.4.1.28.41 (Projection).
    """
    if input.head(4) == MATROSKA:
        tracks, cluster, _ = bytes(input.head(HEAD_SIZE)).partition(CLUSTER)
        # An index at the start may contain the ID of clusters. Then the part before it has no codec ("V_").
        return bool(cluster) and b"V_" in tracks and not _PROJECTION.search(tracks)
    kinds, moov = read_moov(input.read_at, input.size(), HEAD_SIZE, 8)
    # "meta" may contain an image, which may be rotated.
    if b"meta" in kinds:
        return False
    # In version 1, the times before the matrix have 64 bits.
    headers = [
        header.startswith(_STRAIGHT, place + 12 * (header[:1] == b"\1"))
        for name, place in ((b"mvhd", 36), (b"tkhd", 40))
        for header in moov.split(name)[1:]
    ]
    return len(headers) > 1 and all(headers)


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


# Correct what demuxers state wrongly: times, key frame flags and padding.


def exact_start(container: InputContainer, start: int) -> Fraction:
    """Return the start time of a container in seconds, which FFmpeg states as ``start`` microseconds."""
    # The stream that starts first states the same moment as the rounded start of the container, but exactly,
    # in its own time base. Without that, the edge of a window could miss a frame.
    exact = audio_clock.start_ticks
    starts = [(exact(each), each.start_time, each.time_base) for each in container.streams]
    stated = [(exact, ticks, base) for exact, ticks, base in starts if ticks is not None and base]
    # Differences in microseconds. Integers up to the division: fractions take ten times as long.
    errors = [
        abs(ticks * base.numerator * 1_000_000 - start * base.denominator) / base.denominator
        for _, ticks, base in stated
    ]
    if min(errors, default=2.0) > 1:
        return Fraction(start, 1_000_000)
    # Of streams that begin earlier than FFmpeg states, the exact start counts, too.
    chosen = [stated[errors.index(min(errors))], *(one for one in stated if one[0] != one[1])]
    return min(Fraction(exact * as_fraction(base)) for exact, _, base in chosen)


def mended(packets: Iterator[AvPacket], format: str, streams: Sequence[Any]) -> Iterator[AvPacket]:
    """Correct what FFmpeg states wrongly of the packets of a container.

    Args:
        packets: The packets in file order, from a key frame on or from the start.
        format: FFmpeg's name of the container's format.
        streams: The streams that are read.
    """
    # codec_context is None if this FFmpeg has no decoder for the stream.
    codecs = {stream.index: stream.codec_context for stream in streams if stream.codec_context}
    names = {codec.name for codec in codecs.values()}
    # AVI and raw MPEG have no presentation timestamps. FFmpeg derives them from the decoding order. They are
    # right for MPEG-4, but not for codecs that reorder freely, nor if a packet has two frames.
    moved = [i for i, one in codecs.items() if one.name == "mpeg1video" or _reorders(one)]
    if format in ("avi", "mpegvideo") and moved:
        packets = _without_pts(packets, moved)
    guessed = [i for i, one in codecs.items() if one.name == "flv"]
    if guessed or format in ("h264", "hevc", "vvc"):
        packets = _without_false_durations(packets, guessed)
    tested = {index: codec for index, codec in codecs.items() if codec.name in _KEY_TESTS}
    packets = _with_true_keys(packets, tested) if tested else packets
    if CUTS_LAST_FRAME and format.startswith("mov"):
        packets = _with_late_ends(packets, streams)
    reordered = [i for i, codec in codecs.items() if _reorders(codec)]
    if format != "asf":  # there FFmpeg delays H.264 by a frame even if nothing is reordered
        reordered = [i for i in reordered if codecs[i].has_b_frames]
    if reordered and format.startswith(("mov", "mxf", "asf")):
        return _without_unset_pts(packets, reordered, format)
    if format in ("mpeg", "mpegts"):
        return audio_clock.with_frame_times(packets, codecs)
    if format == "caf" and "alac" in names:
        return audio_clock.without_padding(packets)
    if format == "ogg" and names == {"vorbis"} and len(streams) == 1:
        return audio_clock.with_true_times(packets, streams[0].codec_context)
    return packets


def _with_late_ends(packets: Iterator[AvPacket], streams: Sequence[Any]) -> Iterator[AvPacket]:
    """Correct the ends of audio that begins late: FFmpeg 9 measures its length from second 0."""
    ends: dict[int, int] = {}
    for stream in streams:
        start = stream.start_time or 0
        entries = stream.index_entries if stream.type == "audio" and start > 0 else ()
        # The delay that iTunes states hides packets from second 0 on.
        if entries and (entries[0].timestamp or entries[0].is_discard):
            ends[stream.index] = start + (stream.duration or 0)
    for packet in packets:
        if packet.stream_index in ends and packet.has_sidedata("skip_samples"):
            entry, end = packet.get_sidedata("skip_samples"), ends[packet.stream_index]
            skip, cut, *reasons = audio_clock.SKIPPED.unpack(bytes(entry))
            rest = max((packet.pts or 0) + (packet.duration or 0) - end, 0)
            entry.update(audio_clock.SKIPPED.pack(skip, min(rest, cut), *reasons))
            packet.set_sidedata(entry)
        yield packet


def _with_true_keys(packets: Iterator[AvPacket], codecs: Mapping[int, Any]) -> Iterator[AvPacket]:
    """Clear wrong key frame flags: in files of some phones and in old ASF, all are set."""
    for packet in packets:
        codec = codecs.get(packet.stream_index)
        if codec is not None and packet.is_keyframe and not _KEY_TESTS[codec.name](packet, codec):
            packet.is_keyframe = False
        yield packet


def _is_hevc_key(packet: AvPacket, codec: Any) -> bool:
    """Whether the first picture of a packet is a random access point.

    See:
        ITU-T H.265, 7.4.2.2: NAL unit types 16 to 23; types below 32 are pictures.
    """
    return 16 <= next((kind for kind, _ in _typed_units(packet, codec) if kind < 32), 16) < 24


def _is_mpeg2_key(packet: AvPacket, _: Any) -> bool:
    """Whether a packet of MPEG-1 or MPEG-2 is an I picture: type 1, 10 bits after the start code."""
    found = re.search(rb"(?s)\0\0\x01\0.(.)", memoryview(packet))
    return found is None or found[1][0] >> 3 & 7 == 1


def _is_mpeg4_key(packet: AvPacket, _: Any) -> bool:
    """Whether a packet of MPEG-4 is an I picture: type 0, directly after the start code."""
    found = re.search(rb"(?s)\0\0\x01\xb6(.)", memoryview(packet))
    return found is None or found[1][0] >> 6 == 0


def _is_h263_key(packet: AvPacket, _: Any) -> bool:
    """Whether a packet of H.263 is an I picture.

    See:
        ITU-T H.263, 5.1.3 and 5.1.4 (PTYPE, PLUSPTYPE).
    """
    bits = f"{int.from_bytes(bytes(packet)[:9], 'big'):072b}"
    if bits[35:38] != "111":  # the source format is not "extended PTYPE"
        return bits[38] == "0"
    start = 59 if bits[38:41] == "001" else 41
    return bits[start : start + 3] == "000"


def _is_msmpeg4_key(packet: AvPacket, _: Any) -> bool:
    """Whether a packet of MS-MPEG-4 or WMV 1 is an I picture: type 0, in the first two bits."""
    return memoryview(packet)[0] >> 6 == 0


# For H.264, VP8, VP9 and AV1, FFmpeg reads the packets itself.
_KEY_TESTS: Mapping[str, Callable[[AvPacket, Any], bool]] = (
    {"h263": _is_h263_key, "hevc": _is_hevc_key, "mpeg4": _is_mpeg4_key}
    | dict.fromkeys(("mpeg1video", "mpeg2video"), _is_mpeg2_key)
    | dict.fromkeys(("msmpeg4", "msmpeg4v2", "wmv1"), _is_msmpeg4_key)  # the first is version 3
)


# DivX and Xvid write this for packed B-frames: a P and a B frame in one packet, and an empty one after it.
_PACKED_B_FRAMES = re.compile(rb"DivX\d+(?:b|Build)\d+p")


def _reorders(codec: Any) -> bool:
    if codec.name == "mpeg4":
        return _PACKED_B_FRAMES.search(codec.extradata or b"") is not None
    return codec.name in ("h264", "hevc")


# This many packets of a stream with B-frames show the reordering, because a run of B-frames is shorter.
_ENOUGH_TO_REORDER = 17


def _without_false_durations(
    packets: Iterator[AvPacket], guessed: Sequence[int]
) -> Iterator[AvPacket]:
    # If a raw stream states no rate, FFmpeg gives one tick to the packets after those that it probes. FLV
    # states no durations; after a seek, FFmpeg guesses them from the next packets.
    for packet in packets:
        if packet.duration == 1 or packet.stream_index in guessed:
            packet.duration = 0
        yield packet


def _without_pts(packets: Iterator[AvPacket], indices: Sequence[int]) -> Iterator[AvPacket]:
    for packet in packets:
        if packet.stream_index in indices:
            packet.pts = None
        yield packet


def _without_unset_pts(
    packets: Iterator[AvPacket], indices: Sequence[int], format: str
) -> Iterator[AvPacket]:
    """Drop timestamps of reordered streams that FFmpeg has copied from those of decoding, perhaps delayed.

    Copies equal the decode timestamps in MOV, and increase from packet to packet in MXF and ASF.
    """
    is_mov = format.startswith("mov")
    first: list[AvPacket] = []
    count, last, is_set = 0, -math.inf, False
    for packet in packets:
        first.append(packet)
        if packet.stream_index not in indices:
            continue
        # After a seek, FFmpeg leaves some timestamps unset.
        if (pts := packet.pts) is not None:
            is_set, last = (pts != packet.dts if is_mov else pts < last), pts
        count += 1
        if is_set or count == _ENOUGH_TO_REORDER:
            break
    found: Iterator[AvPacket] = itertools.chain(first, packets)
    if format == "mxf" and not is_set:
        found = map(_with_pts_as_dts, found)  # FFmpeg guesses the dts from these pts
    return found if is_set else _without_pts(found, indices)


def _with_pts_as_dts(packet: AvPacket) -> AvPacket:
    packet.dts = packet.dts if packet.pts is None else packet.pts
    return packet
