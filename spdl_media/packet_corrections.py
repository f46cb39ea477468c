"""Correct what FFmpeg's demuxers state wrongly of packets: timestamps, key frame flags and padding."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple, TypeAlias

from spdl_media._ffmpeg import AvPacket
from spdl_media.audio_clock import vorbis_blocks
from spdl_media.coded_units import STATE_PICTURE_TYPE, is_intra
from spdl_media.packets import set_side_data


def corrected(
    packets: Iterator[AvPacket], format: str, streams: Sequence[Any]
) -> Iterator[AvPacket]:
    """Correct what FFmpeg states wrongly of the packets of a container.

    Args:
        packets: The packets in file order, from a key frame on or from the start.
        format: FFmpeg's name of the container's format.
        streams: The streams that are read.
    """
    # codec_context is None if this FFmpeg has no decoder for the stream.
    codecs = {stream.index: stream.codec_context for stream in streams if stream.codec_context}
    reordered = [index for index, codec in codecs.items() if _reorders(codec)]

    def of(name: str) -> list[int]:
        return [index for index, codec in codecs.items() if codec.name == name]

    # AVI and raw MPEG have no presentation timestamps. FFmpeg derives them from the decoding order. They are
    # right for MPEG-4, but not for codecs that reorder freely, nor if a packet has two frames.
    if format in ("avi", "mpegvideo") and (moved := [*reordered, *of("mpeg1video")]):
        packets = _changed(packets, partial(_clear_pts, moved))
    # FLV states no durations; after a seek, FFmpeg guesses them from the next packets.
    if of("flv") or format in ("h264", "hevc", "vvc"):
        packets = _changed(packets, partial(_clear_false_duration, of("flv")))
    if tested := {i: codec for i, codec in codecs.items() if codec.name in STATE_PICTURE_TYPE}:
        packets = _changed(packets, partial(_clear_false_key, tested))
    if format == "caf" and of("alac"):
        packets = _changed(packets, _clear_repeated_padding)
    if format != "asf":  # there FFmpeg delays H.264 by a frame even if nothing is reordered
        reordered = [index for index in reordered if codecs[index].has_b_frames]
    if reordered and format.startswith(("mov", "mxf", "asf")):
        return _without_unset_pts(packets, reordered, format)
    if format in ("mpeg", "mpegts"):
        return _with_frame_times(packets, codecs)
    if format == "ogg" and len(streams) == 1 and of("vorbis"):
        return _with_page_time(packets, streams[0].codec_context)
    return packets


def _changed(packets: Iterator[AvPacket], change: Callable[[AvPacket], None]) -> Iterator[AvPacket]:
    for packet in packets:
        change(packet)
        yield packet


# DivX and Xvid write this for packed B-frames: a P and a B frame in one packet, and an empty one after it.
_PACKED_B_FRAMES = re.compile(rb"DivX\d+(?:b|Build)\d+p")


def _reorders(codec: Any) -> bool:
    if codec.name == "mpeg4":
        return _PACKED_B_FRAMES.search(codec.extradata or b"") is not None
    return codec.name in ("h264", "hevc")


def _clear_pts(indices: Sequence[int], packet: AvPacket) -> None:
    if packet.stream_index in indices:
        packet.pts = None


def _clear_false_duration(guessed: Sequence[int], packet: AvPacket) -> None:
    # If a raw stream states no rate, FFmpeg gives one tick to the packets after those that it probes.
    if packet.duration == 1 or packet.stream_index in guessed:
        packet.duration = 0


def _clear_false_key(codecs: Mapping[int, Any], packet: AvPacket) -> None:
    # In files of some phones and in old ASF, all packets are marked as key frames.
    codec = codecs.get(packet.stream_index)
    if codec is not None and packet.is_keyframe and not is_intra(packet, codec):
        packet.is_keyframe = False


_ALAC_STATES_LENGTH = 0x10  # in the third byte of a packet


def _clear_repeated_padding(packet: AvPacket) -> None:
    # FFmpeg would cut the padding of a last ALAC packet that states its own length twice.
    states_length = packet.size > 2 and bytes(packet)[2] & _ALAC_STATES_LENGTH
    if states_length and packet.has_sidedata("skip_samples"):
        _set_skipped(packet, 0, 0)


# Samples to skip at the start and at the end of a packet, and why.
_SKIPPED = struct.Struct("<IIBB")


def _skipped(packet: AvPacket) -> tuple[int, int]:
    start, end, *_ = _SKIPPED.unpack(bytes(packet.get_sidedata("skip_samples")))
    return start, end


def _set_skipped(packet: AvPacket, start: int, end: int) -> None:
    set_side_data(packet, "skip_samples", _SKIPPED.pack(start, end, 0, 0))


# This many packets of a stream with B-frames show the reordering, because a run of B-frames is shorter.
_ENOUGH_TO_REORDER = 17


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
    found: Iterator[AvPacket] = chain(first, packets)
    if is_set:
        return found
    if format == "mxf":  # FFmpeg guesses the dts from these pts
        found = _changed(found, _set_dts_to_pts)
    return _changed(found, partial(_clear_pts, indices))


def _set_dts_to_pts(packet: AvPacket) -> None:
    packet.dts = packet.dts if packet.pts is None else packet.pts


def reindexed(packets: Iterator[Any], streams: Any) -> Iterator[Any]:
    """Correct the times and key frames of video after a seek in AVI, by the index.

    An empty chunk extends the frame before it. FFmpeg goes on from audio that lies before the frame that it
    seeks, and counts the empty chunks in between once more.
    """
    shifts: dict[int, int] = {}
    for packet in packets:
        index, dts = packet.stream_index, packet.dts
        entries = streams[index].index_entries
        if index not in shifts:
            shifts[index] = 0
            is_video = dts is not None and streams[index].type == "video"
            place = entries.search_timestamp(dts, any_frame=True) if is_video else -1
            # The index has the places of the headers of chunks, which have 8 bytes.
            while place > 0 and entries[place].pos + 8 > packet.pos:
                place -= 1
            if place >= 0 and entries[place].pos + 8 == packet.pos:
                shifts[index] = dts - entries[place].timestamp
        if shift := shifts[index]:
            packet.dts = dts - shift
            packet.pts = None if packet.pts is None else packet.pts - shift
            place = entries.search_timestamp(packet.dts, any_frame=True)
            packet.is_keyframe = entries[place].is_keyframe
        yield packet


# How frames begin whose rest FFmpeg's parser gives as a packet: the bits to compare, and their values.
_FRAME_STARTS = {"aac": (0xFFF6, 0xFFF0), "ac3": (0xFFFF, 0x0B77), "eac3": (0xFFFF, 0x0B77)}


def _with_frame_times(packets: Iterator[AvPacket], codecs: Mapping[int, Any]) -> Iterator[AvPacket]:
    """Correct the times of frames that PES packets, of MPEG-TS or MPEG-PS, cut.

    The timestamp of a PES packet is that of the first frame that begins in it. FFmpeg also gives it to the
    frame before, if its header is cut; and after a seek to the rest of that frame, so that the frames after
    it are late, up to the next PES packet.

    Args:
        packets: The packets from a PES packet on.
        codecs: Codec contexts of the streams, by index.
    """
    starts = {i: _FRAME_STARTS[one.name] for i, one in codecs.items() if one.name in _FRAME_STARTS}
    held: dict[int, AvPacket] = {}
    late: dict[int, int] = {}
    for packet in packets:
        index = packet.stream_index
        if index not in starts:
            yield packet
            continue
        last, held[index] = held.get(index), packet
        if last is None:
            mask, value = starts[index]
            is_rest = int.from_bytes(bytes(packet)[:2], "big") & mask != value
            late[index] = (packet.duration or 0) if is_rest else 0
        elif packet.pos is not None:  # the first frame of a PES packet
            late[index] = 0
            if packet.pos == last.pos and last.pts is not None:
                last.pts -= last.duration or 0
        if packet.pts is not None:
            packet.pts -= late[index]
        if last is not None:
            yield last
    yield from held.values()


# Packets in an Ogg page, at most.
_MOST_IN_PAGE = 255


def _with_page_time(packets: Iterator[AvPacket], codec: Any) -> Iterator[AvPacket]:
    """Correct the times of an Ogg Vorbis of one page.

    FFmpeg gives the first packet, which holds no sample, the time 0. But the page states the position of its
    end. If that is more than its samples, they begin so much later than 0; if less, so many are padding.

    Args:
        packets: The packets of one stream.
        codec: Codec context of the stream.
    """
    page = list(islice(packets, 1))
    if page and page[0].pts == 0:
        page += islice(packets, _MOST_IN_PAGE)
        if len(page) > 1 and page[0].pos == page[-1].pos:
            _set_page_time(page, codec)
    return chain(page, packets)


def _set_page_time(page: list[AvPacket], codec: Any) -> None:
    late, last = page[0].duration or 0, page[-1]
    if last.has_sidedata("skip_samples"):
        skipped, cut = _skipped(last)
        # FFmpeg also counts the first packet. This may exceed the last packet, so that the decoder cuts none.
        padding = cut - late
        _set_skipped(last, skipped, max(padding, 0))
    else:
        # FFmpeg makes the last packet longer. In usual streams, the second bit tells the size of a block.
        blocks = vorbis_blocks(codec)
        before, own = (blocks[memoryview(one)[0] >> 1 & 1] for one in page[-2:])
        padding = (before + own) // 4 - (last.duration or 0) - late
    shift = late + min(padding, 0)
    # FFmpeg has computed a negative duration of 32 bits.
    last.duration = ((last.duration or 0) + shift) % (1 << 32)
    for packet in page:
        if packet.pts is not None:
            packet.pts = packet.dts = packet.pts - shift


class ExactTime(NamedTuple):
    """The exact time of a packet, and what the decoder has to cut of it.

    Attributes:
        pts: The timestamp.
        skipped: Number of samples to cut at the start; ``None``: FFmpeg states what to cut.
        rest: Number of samples to cut at the end.
        last_size: Number of samples of the last packet, which may state a shorter duration; 0: another one.
    """

    pts: int
    skipped: int | None = None
    rest: int = 0
    last_size: int = 0


PacketKey: TypeAlias = tuple[int, int]
"""A packet's offset in the file, and its timestamp as FFmpeg states it."""

PacketTimes: TypeAlias = Mapping[PacketKey, ExactTime]


class ExactTimes(NamedTuple):
    """Exact times of the packets of a stream.

    Attributes:
        packets: Times of the packets of which FFmpeg states something wrongly.
        only_from_start: After a seek, times are wrong, so packets are read from the start of the file.
    """

    packets: PacketTimes
    only_from_start: bool = False


def with_times(packets: Iterator[AvPacket], times: Mapping[int, PacketTimes]) -> Iterator[AvPacket]:
    """Set the times of packets, and what the decoder cuts of them, from tables by stream index."""
    for packet in packets:
        exact = times.get(packet.stream_index, {}).get((packet.pos or 0, packet.pts or 0))
        if exact is not None:
            packet.pts = exact.pts
            if exact.skipped is not None:
                rest = max(exact.rest, exact.last_size - (packet.duration or exact.last_size))
                _set_skipped(packet, exact.skipped, rest)
        yield packet
