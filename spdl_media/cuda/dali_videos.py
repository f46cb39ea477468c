"""DALI's video operator, for those who ask for it: frames as it gives them, of videos that it reads right.

It takes whole files, knows frames by their number among the packets, converts by BT.601 without asking the
stream, and reports no damage. Packets go in as a file made in memory; what it would get wrong is refused.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import av
import numpy as np

from spdl_media._batch import TimedFrames
from spdl_media._h264_fields import may_have_fields
from spdl_media._rows import no_frames
from spdl_media.bitstream import make_filter
from spdl_media.config import DEFAULT_DECODE_CONFIG
from spdl_media.cuda.dali import ready_buffer
from spdl_media.cuda.nvdec import has_lengths
from spdl_media.cuda.slots import DALI_ERRORS, SlotDevice, slot_pool
from spdl_media.decode import cut_short_error
from spdl_media.devices import is_out_of_memory
from spdl_media.errors import DecodeError, TransferError
from spdl_media.packets import VideoPackets, av_packets, copy_packet, discarded_pts, metadata_of
from spdl_media.timing import ticks_to_seconds

# Times that Matroska keeps exactly, in its milliseconds. The real ones may be negative, which DALI skips, or
# closer together than that.
_STEP, _TIME_BASE = 40, Fraction(1, 1000)

# The operator takes each frame that is decoded for one that is shown. AV1 and VP9 show frames again without
# decoding anything, and MPEG-4 in AVI packs two frames into a packet.
_CODECS = MappingProxyType({"gpu": ("h264", "hevc"), "cpu": ("vp8", "vp9")})

# Without "none", DALI fills up with black what the file does not have.
_DECODE = MappingProxyType({"affine": False, "pad_mode": "none"})


def load_by_dali(
    packets: VideoPackets, device: SlotDevice, num_frames: int | None = None
) -> TimedFrames:
    """Decode packets by DALI's operator, to RGB in their own size.

    Args:
        packets: Of a window.
        device: Where DALI works.
        num_frames: At most so many frames; ``None``: all.

    Raises:
        DecodeError: It would not decode the video right, or cannot.
        ConvertError: No frame lies in the window.
        TransferError: The device has too little memory.
    """
    if refusals := list(_refusals(packets, device)):
        raise DecodeError(
            f"decoder='dali' would not decode this video right: it needs {'; '.join(refusals)}. "
            "decoder='auto' takes PyAV's decoder for such a video, or the CPU",
            source=packets.source,
        )
    if missing := cut_short_error(packets, DEFAULT_DECODE_CONFIG):
        raise missing
    base, zero, window = packets.time_base, metadata_of(packets).zero, packets.window
    hidden = discarded_pts(packets)
    times = {
        number: float(seconds)
        for number, pts in enumerate(sorted(packet.pts or 0 for packet in av_packets(packets)))
        if pts not in hidden and (seconds := ticks_to_seconds(pts, base, zero)) in window
    }
    numbers = list(times)[:num_frames]
    if not numbers:
        raise no_frames(packets)
    return _decoded(packets, numbers, device), lambda: tuple(times[one] for one in numbers)


def _decoded(packets: VideoPackets, numbers: Sequence[int], device: SlotDevice) -> Any:
    encoded, codec = np.frombuffer(remux(packets), np.uint8), packets.codec
    with slot_pool(device).borrow() as slot:
        try:
            wanted = {"frames": [np.array(numbers, np.int32)]}
            frames = slot.first(slot.run("decoders.Video", [encoded], _DECODE, wanted))
        except DALI_ERRORS as error:
            kind = TransferError if is_out_of_memory(error) else DecodeError
            what = f"{len(numbers)} frames of this {codec.width}x{codec.height} {codec.name} video"
            raise kind(
                f"DALI cannot decode {what} on {device}: {error}. Load fewer frames at a time, or take "
                "decoder='pyav', another way to the same hardware",
                source=packets.source,
            ) from error
        return ready_buffer(frames, slot.stream)


def _refusals(packets: VideoPackets, device: SlotDevice) -> Iterator[str]:
    """What the operator needs, and the video does not have."""
    codec, codecs = packets.codec, _CODECS[device.kind]
    coded: Sequence[Any] = av_packets(packets)
    if codec.name not in codecs:
        yield f"{' or '.join(codecs)}, and this is {codec.name}"
    if codec.pix_fmt not in ("yuv420p", "nv12"):
        yield f"8-bit 4:2:0, and this is {codec.pix_fmt}"
    # By FFmpeg's numbers: limited range and a matrix of BT.601, or none stated.
    if codec.color[0] not in (0, 1) or codec.color[1] not in (2, 5, 6):
        yield f"limited range and BT.601, and this states {codec.color[:2]} (range and matrix in H.273)"
    if codec.width % 2 or codec.height % 2:
        yield f"even sides, and this is {codec.width}x{codec.height}"
    headers = codec.extradata
    if codec.name == "h264" and has_lengths(codec):
        headers = make_filter("h264_mp4toannexb", codec)[1].extradata
    if codec.name == "h264" and may_have_fields(headers):
        yield "progressive pictures, and this H.264 may have fields"
    if len({packet.pts for packet in coded} - {None}) != len(coded):
        yield "a time of its own for each packet"
    # None is shown before a key frame that it follows.
    keys: Iterator[Any] = accumulate(coded, lambda key, one: one if one.is_keyframe else key)
    if any(
        not k.is_keyframe or (p.pts or 0) < (k.pts or 0) for k, p in zip(keys, coded, strict=True)
    ):
        yield "closed groups of pictures, from a key frame on"
    if metadata_of(packets).orientation != 1:
        yield "pictures that stand upright"


def remux(packets: VideoPackets) -> bytes:
    """Write packets with distinct times into a Matroska file whose times are made up: their order counts."""
    coded, sink = av_packets(packets), io.BytesIO()
    rank = {pts: number for number, pts in enumerate(sorted(one.pts or 0 for one in coded))}
    ranks = [rank[packet.pts or 0] for packet in coded]
    delay = max(position - place for position, place in enumerate(ranks))
    format, content = _EMPTY_FILES[packets.codec.name]
    with (
        # PyAV passes a codec's parameters on only from a stream that it has read.
        av.open(io.BytesIO(content), format=format) as empty,
        av.open(sink, "w", format="matroska") as container,
    ):
        stream = container.add_stream_from_template(empty.streams.video[0], opaque=True)
        context = stream.codec_context
        context.width, context.height = packets.codec.width, packets.codec.height
        context.extradata = packets.codec.extradata
        for position, (packet, place) in enumerate(
            zip(map(copy_packet, coded), ranks, strict=True)
        ):
            packet.time_base, packet.stream = _TIME_BASE, stream
            packet.pts, packet.dts = (place + delay) * _STEP, position * _STEP
            packet.duration = _STEP
            container.mux(packet)
    return sink.getvalue()


def _ivf(tag: bytes) -> bytes:
    """The header of a file that holds a stream and no frames."""
    words = (1).to_bytes(4, "little") * 2 + bytes(8)
    return b"DKIF\0\0\x20\0" + tag + (16).to_bytes(2, "little") * 2 + words


_START_CODES = b"\0\0\0\1" * 16
_EMPTY_FILES: Mapping[str, tuple[str, bytes]] = MappingProxyType(
    {
        "h264": ("h264", _START_CODES),
        "hevc": ("hevc", _START_CODES),
        "vp8": ("ivf", _ivf(b"VP80")),
        "vp9": ("ivf", _ivf(b"VP90")),
    }
)
