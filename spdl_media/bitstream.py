"""FFmpeg's bitstream filters: packets into packets of the same codec, without decoding."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import TypeVar

import av
from av.bitstream import BitStreamFilterContext, bitstream_filters_available

from spdl_media._ffmpeg import AvPacket, TranslatedErrors
from spdl_media.codec import Codec, VideoCodec
from spdl_media.errors import DemuxError
from spdl_media.packets import AudioPackets, ImagePackets, VideoPackets, av_packets, copy_packet

__all__ = ("apply_bsf",)

P = TypeVar("P", AudioPackets, VideoPackets, ImagePackets)


def apply_bsf(packets: P, bsf: str) -> P:
    """Send packets through a bitstream filter, such as ``"h264_mp4toannexb"``.

    Args:
        packets: From ``demux_*``. Not consumed.
        bsf: One filter, or several joined by commas, each with its options as in
            ``"h264_metadata=video_full_range_flag=1"``.

    Returns:
        New packets of the same kind, with data of their own.

    Raises:
        ValueError: There is no filter of that name, or it does not take this codec or these options.
        DemuxError: The filter cannot read the packets.

    Thread safety: safe.

    See:
        FFmpeg's bitstream filters: https://ffmpeg.org/ffmpeg-bitstream-filters.html
    """
    _check_names(bsf)
    context, codec = make_filter(bsf, packets.codec)
    filtered: list[AvPacket] = []
    with TranslatedErrors(
        lambda text: DemuxError(
            f"bitstream filter {bsf!r} cannot read the {packets.codec.name} packets: {text}",
            source=packets.source,
        )
    ):
        # With None the filter gives what it has held back.
        for packet in (*map(copy_packet, av_packets(packets)), None):
            filtered.extend(context.filter(packet))
    for packet in filtered:
        # Filters leave it unset.
        packet.time_base = packets.time_base
    return packets.with_packets(filtered, codec)  # type: ignore[arg-type]  # the kind stays


def make_filter(bsf: str, codec: Codec) -> tuple[BitStreamFilterContext, Codec]:
    """The filter, and the codec's parameters as they are after it.

    Raises:
        ValueError: There is no such filter, or it does not take this codec or these options.
    """
    try:
        if not isinstance(codec, VideoCodec) or codec.name not in _RAW_FORMATS:
            return BitStreamFilterContext(bsf, av.Codec(codec.decoder, "r")), codec
        # These filters read the parameter sets, which PyAV passes on only from a stream.
        before, after = _stream_of(codec), _stream_of(codec)
        context = BitStreamFilterContext(bsf, before, after)
        return context, replace(codec, extradata=after.codec_context.extradata)
    except (av.FFmpegError, ValueError) as error:
        raise ValueError(
            f"bitstream filter {bsf!r} cannot be used on {codec.name} packets: {error}"
        ) from error


# Codecs whose raw stream FFmpeg opens as a format of the same name.
_RAW_FORMATS = frozenset({"h264", "hevc", "vvc"})


def _stream_of(codec: VideoCodec) -> av.VideoStream:
    """A stream with these parameters and no file: made of a raw stream that holds nothing but start codes."""
    empty = av.open(io.BytesIO(b"\0\0\0\1" * 16), format=codec.name)
    target = av.open(io.BytesIO(), "w", format="mov")
    stream = target.add_stream_from_template(empty.streams.video[0], opaque=True)
    context = stream.codec_context
    context.width, context.height = codec.width, codec.height
    context.extradata = codec.extradata
    target.start_encoding()
    return stream


def _check_names(bsf: str) -> None:
    plain = re.sub(r"\\.|'[^']*'", "", bsf)  # commas there do not part filters
    for name in (part.partition("=")[0].strip() for part in plain.split(",")):
        if name not in bitstream_filters_available:
            raise ValueError(f"this FFmpeg has no bitstream filter {name!r}")
