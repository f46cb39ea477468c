"""What FFmpeg's demuxers state wrongly of packets, put right: times, key frames and padding."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from spdl_media._ffmpeg import AvPacket

__all__ = ()


def mended(packets: Iterator[AvPacket], format: str, streams: Sequence[Any]) -> Iterator[AvPacket]:
    """Put right what FFmpeg states wrongly of the packets of a container.

    Args:
        packets: As they are read, from a key frame on or from the start.
        format: FFmpeg's names of the container's format.
        streams: Those that are read.
    """
    by_index = {stream.index: stream.codec_context for stream in streams}
    codecs = [codec for codec in by_index.values() if codec is not None]
    # AVI has no presentation times. FFmpeg makes them up in the order of decoding: it finds the right
    # ones for MPEG-4, but not for codecs that reorder as they like, nor where packets hold two frames.
    if format == "avi" and any(_reorders(codec) or codec.name == "mpeg1video" for codec in codecs):
        return _without_pts(packets)
    if format.startswith("mov"):
        names = {index: codec.name for index, codec in by_index.items() if codec is not None}
        tests = {index: _KEY_TESTS[name] for index, name in names.items() if name in _KEY_TESTS}
        packets = _with_true_keys(packets, tests) if tests else packets
    reordered = [
        index
        for index, codec in by_index.items()
        if codec is not None and _reorders(codec) and codec.has_b_frames
    ]
    if reordered and format.startswith(("mov", "mxf", "asf")):
        return _without_unset_pts(packets, reordered, delay=format == "asf")
    if format == "caf" and any(codec.name == "alac" for codec in codecs):
        return _without_padding(packets)
    return packets


def _with_true_keys(
    packets: Iterator[AvPacket], tests: Mapping[int, Callable[[bytes], bool]]
) -> Iterator[AvPacket]:
    """Take the mark of a key frame off those that are none: phones leave out the list of key frames."""
    for packet in packets:
        test = tests.get(packet.stream_index)
        if test is not None and packet.is_keyframe and not test(bytes(packet)):
            packet.is_keyframe = False
        yield packet


def _is_mpeg4_key(data: bytes) -> bool:
    """Whether the first picture of MPEG-4 refers to no other: type 0, behind its start code."""
    start = data.find(b"\0\0\1\xb6") + 4
    return start < 4 or start >= len(data) or data[start] >> 6 == 0


def _is_h263_key(data: bytes) -> bool:
    """The same for H.263.

    See:
        ITU-T H.263, 5.1.3 and 5.1.4 (PTYPE, PLUSPTYPE).
    """
    bits = f"{int.from_bytes(data[:9], 'big'):072b}"
    if bits[35:38] != "111":  # the format of the source: what follows is extended
        return bits[38] == "0"
    start = 59 if bits[38:41] == "001" else 41
    return bits[start : start + 3] == "000"


_KEY_TESTS = {"mpeg4": _is_mpeg4_key, "h263": _is_h263_key}


# What DivX and Xvid write into streams with a P and a B frame in one packet, and an empty packet behind it.
_PACKED_B_FRAMES = re.compile(rb"DivX\d+(?:b|Build)\d+p")


def _reorders(codec: Any) -> bool:
    if codec.name == "mpeg4":
        return _PACKED_B_FRAMES.search(codec.extradata or b"") is not None
    return codec.name in ("h264", "hevc")


# A group of B-frames is shorter.
_ENOUGH_TO_REORDER = 17


def _without_pts(packets: Iterator[AvPacket]) -> Iterator[AvPacket]:
    for packet in packets:
        packet.pts = None
        yield packet


def _without_unset_pts(
    packets: Iterator[AvPacket], indices: Sequence[int], *, delay: bool
) -> Iterator[AvPacket]:
    """Drop presentation times that are those of decoding, of streams whose frames change their order.

    Args:
        packets: As they are read.
        indices: Of these streams.
        delay: FFmpeg has added a delay to them.
    """
    first: list[AvPacket] = []
    coded: list[AvPacket] = []
    for packet in packets:
        first.append(packet)
        if packet.stream_index in indices:
            coded.append(packet)
        if len(coded) == _ENOUGH_TO_REORDER:
            break
    # Behind a seek FFmpeg leaves some out.
    times = [(packet.pts, packet.dts) for packet in coded if packet.pts is not None]
    stated = [pts for pts, _ in times]
    is_unset = stated == (sorted(stated) if delay else [dts for _, dts in times])
    found = itertools.chain(first, packets)
    return _without_pts(found) if is_unset else found


_ALAC_STATES_LENGTH = 0x10  # in the third byte of a packet


def _without_padding(packets: Iterator[AvPacket]) -> Iterator[AvPacket]:
    """Let the last packet of ALAC be as long as it says: FFmpeg would cut its padding off it once more."""
    for packet in packets:
        if packet.has_sidedata("skip_samples") and bytes(packet)[2] & _ALAC_STATES_LENGTH:
            entry = packet.get_sidedata("skip_samples")
            entry.update(bytes(entry.buffer_size))
            packet.set_sidedata(entry)
        yield packet
