"""Demux a source to packets, and pass packets through FFmpeg's bitstream filters.

The packet of an image is the whole file, or the first key frame of a container. An image that FFmpeg decodes
wrongly or not at all becomes one packet for Pillow, or for pillow-heif if it is HEIC. Both are the optional
extra ``stills``; without it, such a file raises an error.
"""

from __future__ import annotations

import io
import re
from contextlib import closing
from dataclasses import replace
from functools import cache
from typing import TypeVar

import av
from av.bitstream import BitStreamFilterContext

from spdl_media import stills
from spdl_media._container import Container
from spdl_media._ffmpeg import AvPacket, TranslatedErrors, describe
from spdl_media.codec import Codec, VideoCodec
from spdl_media.config import DemuxConfig
from spdl_media.demuxer import Demuxer, first_image
from spdl_media.errors import DemuxError, MediaError
from spdl_media.inputs import Input, Source, open_input
from spdl_media.packets import (
    AudioPackets,
    ImagePackets,
    PacketMetadata,
    VideoPackets,
    av_packets,
    copy_packet,
    make_packet,
)
from spdl_media.still_headers import exif_orientation
from spdl_media.still_parts import check_complete
from spdl_media.timing import Timestamp, Window, parse_window
from spdl_media.window import pillow_packets

__all__ = ("apply_bsf", "demux_audio", "demux_image", "demux_video")

P = TypeVar("P", AudioPackets, VideoPackets, ImagePackets)


def demux_image(
    src: Source, *, demux_config: DemuxConfig | None = None, name: str | None = None
) -> ImagePackets:
    """Read one image.

    For JPEG, PNG, WebP, BMP, TIFF, PNM, JPEG 2000 and similar formats, the packet is the whole file: no
    container is opened, and the bytes are not copied. For GIF, AVIF and videos, it is that of the first
    image.

    Args:
        src: A path, a URL for fsspec, bytes or another C-contiguous buffer, a 1-D uint8 array or CPU
            tensor, or a binary file-like object.
        demux_config: Options of opening the source. Its ``format`` may also be the name of a still format,
            such as ``"tga"``; the content is then not examined.
        name: Name of the source in messages.

    Returns:
        One packet. For a still in bytes, a buffer or an array, the packet refers to that memory: do not write
        to it while the packet is in use.

    Raises:
        SourceError: The source cannot be opened or read.
        MissingDependencyError: The source is a URL, and fsspec is not installed.
        DemuxError: The source has no image.
        ValueError: ``demux_config`` has a format or an option that FFmpeg does not know.

    Thread safety: safe, if no other thread uses a file-like ``src``.
    """
    with open_input(src, demux_config, name=name) as input:
        return read_image(input)


def read_image(input: Input) -> ImagePackets:
    """Read one image from an opened input; see :func:`demux_image`.

    Raises:
        SourceError: The source cannot be read.
        DemuxError: The source is not a media file, or has no image.
        ValueError: The config has a format or an option that FFmpeg does not know.
    """
    decoder = still_decoder(input)
    if decoder is not None:
        return _whole_file(input, decoder)
    any_format = input.config.format is None
    if any_format and (reason := stills.pillow_reason(input.image_head())):
        return pillow_packets(ImagePackets, input.read_all(), input.name, reason)
    kind = stills.container_still(input.head(stills.HEAD_SIZE)) if any_format else None
    if kind is not None and not input.seekable:
        # The file is read twice: by FFmpeg, and to check whether it is complete.
        with open_input(input.read_all(), input.config, name=input.name) as whole:
            return read_image(whole)
    try:
        opened = Container(input, audio=False)
    except DemuxError as error:
        if kind is None or not is_unsupported(error):
            raise
        reason = "an image that FFmpeg does not know"
        return pillow_packets(ImagePackets, input.read_all(), input.name, reason)
    with closing(opened) as container:
        # FFmpeg has detected a still by the file name alone (PCX, XBM ...): the packet is the whole file.
        decoder = container.named_still()
        if decoder is None:
            packets = first_image(container)
            if kind is None:
                return packets
            # FFmpeg makes a packet even of a truncated file, so check the end.
            return packets.with_metadata(incomplete=check_complete(kind, input.read_all()))
    return _whole_file(input, decoder)


def still_decoder(input: Input) -> str | None:
    """Return the decoder for which the whole file is one packet; ``None`` if a container must be opened.

    Raises:
        SourceError: The start of the source cannot be read.
    """
    if input.config.format is not None:
        return stills.STILL_FORMATS.get(input.config.format)
    return stills.still_codec(input.head(stills.HEAD_SIZE))


def _whole_file(input: Input, decoder: str) -> ImagePackets:
    data = input.read_all()
    if not len(data):
        raise DemuxError("is empty (0 bytes)", source=input.name)
    if decoder == "hdr":  # FFmpeg takes Radiance files with only one of their two first lines
        data = b"#?RADIANCE" + bytes(data[len("#?RGBE") :])
    codec = _still_stream(decoder)
    # One pass over the segments finds the orientation, and what decides whether a faster decoder can be used.
    head = stills.read_jpeg_head(data) if decoder == "mjpeg" else None
    # Among JPEGs, FFmpeg decodes only some of RGB and of four components wrongly.
    if not (head and head.is_ycc) and (reason := stills.pillow_reason(data, decoder)):
        return pillow_packets(ImagePackets, data, input.name, reason)
    # Coded data cannot contain the end marker, so most JPEGs are known to be complete by their last two
    # bytes.
    is_whole = head is not None and head.has_all and data[-2:] == b"\xff\xd9"
    turn = exif_orientation(data) if head is None else head.orientation
    missing = None if is_whole else check_complete(decoder, data)
    metadata = PacketMetadata(input.name, orientation=turn, incomplete=missing, jpeg=head)
    # The packet refers to the caller's memory. Decoding copies it, because decoders need padding behind it.
    return ImagePackets([make_packet(data, codec.time_base)], codec, metadata, frozenset())


@cache
def _still_stream(decoder: str) -> VideoCodec:
    # Without a container, there is no stream to copy parameters from. YUV of JPEG 2000 has full range, which
    # FFmpeg does not state. See: ISO 15444-1, annex M.
    color = (2, 2, 2, 2) if decoder == "jpeg2000" else (0, 2, 2, 2)
    return VideoCodec(av.Codec(decoder, "r").canonical_name, decoder, color=color)


def is_unsupported(error: MediaError) -> bool:
    """Whether an error of FFmpeg's means that the kind of image is unsupported, not that it is damaged."""
    return _UNSUPPORTED.search(error.message) is not None


# FFmpeg's log says whether a feature is unsupported; the error code often does not.
_UNSUPPORTED = re.compile(
    r"not yet implemented|not supported|unsupported|unknown pixel format", re.IGNORECASE
)


def demux_video(
    src: Source,
    *,
    timestamp: Timestamp | Window | None = None,
    stream_index: int | None = None,
    demux_config: DemuxConfig | None = None,
    name: str | None = None,
) -> VideoPackets:
    """Read the packets of a video stream: all of them, or those that a window needs.

    Args:
        src: As for :func:`demux_image`.
        timestamp: Half-open window ``(start, end)`` in seconds on the container's clock, whose 0 is the
            container's start time; ``None`` leaves a side open. Decoding gives exactly the frames with
            ``start <= t < end``.
        stream_index: Index of the stream in its container. The default is the one that FFmpeg finds best.
        demux_config: Options of opening the source.
        name: Name of the source in messages.

    Returns:
        The packets in decoding order, from the one at which decoding has to begin. They do not refer to the
        source.

    Raises:
        SourceError: The source cannot be opened or read.
        MissingDependencyError: The source is a URL, and fsspec is not installed.
        DemuxError: The source is not a media file, or has no such stream.
        ValueError: The window is empty, or ``demux_config`` has a format or an option that FFmpeg
            does not know.

    Thread safety: safe, if no other thread uses a file-like ``src``.
    """
    window = parse_window(timestamp)
    with Demuxer(src, demux_config=demux_config, name=name) as demuxer:
        return demuxer.demux_video(window, stream_index=stream_index)


def demux_audio(
    src: Source,
    *,
    timestamp: Timestamp | Window | None = None,
    stream_index: int | None = None,
    demux_config: DemuxConfig | None = None,
    name: str | None = None,
) -> AudioPackets:
    """Read the packets of an audio stream: all of them, or those that a window needs.

    Args:
        src: As for :func:`demux_image`.
        timestamp: Half-open window ``(start, end)`` in seconds on the container's clock. Decoding gives
            exactly the samples from ``ceil(start * rate)`` up to ``ceil(end * rate)``.
        stream_index: Index of the stream in its container. The default is the one that FFmpeg finds best.
        demux_config: Options of opening the source.
        name: Name of the source in messages.

    Returns:
        The packets in decoding order, from the one at which decoding has to begin. They do not refer to the
        source.

    Raises:
        SourceError: The source cannot be opened or read.
        MissingDependencyError: The source is a URL, and fsspec is not installed.
        DemuxError: The source is not a media file, or has no such stream.
        ValueError: The window is empty, or ``demux_config`` has a format or an option that FFmpeg
            does not know.

    Thread safety: safe, if no other thread uses a file-like ``src``.
    """
    window = parse_window(timestamp)
    with Demuxer(src, demux_config=demux_config, name=name) as demuxer:
        return demuxer.demux_audio(window, stream_index=stream_index)


def apply_bsf(packets: P, bsf: str) -> P:
    """Pass packets through a bitstream filter, such as ``"h264_mp4toannexb"``.

    Args:
        packets: Packets from ``demux_*``. They stay usable.
        bsf: One filter, or several separated by commas, each with its options as in
            ``"h264_metadata=video_full_range_flag=1"``.

    Returns:
        New packets of the same kind, with a copy of the data.

    Raises:
        TypeError: ``packets`` are not packets.
        ValueError: There is no filter of that name, or it does not support this codec or these options.
        DemuxError: The filter cannot read the packets.

    Thread safety: safe.

    See:
        FFmpeg's bitstream filters: https://ffmpeg.org/ffmpeg-bitstream-filters.html
    """
    if not isinstance(packets, AudioPackets | VideoPackets | ImagePackets):
        raise TypeError(f"apply_bsf takes packets, not {type(packets).__name__}")
    context, codec = make_filter(bsf, packets.codec)
    filtered: list[AvPacket] = []
    what = f"bitstream filter {bsf!r} cannot read the {packets.codec.name} packets"
    with TranslatedErrors(lambda text, _: DemuxError(f"{what}: {text}", source=packets.source)):
        # None flushes the filter.
        for packet in (*map(copy_packet, av_packets(packets)), None):
            filtered.extend(context.filter(packet))
    return packets.with_packets(filtered, codec)  # type: ignore[arg-type]  # the kind stays


def make_filter(bsf: str, codec: Codec) -> tuple[BitStreamFilterContext, Codec]:
    """Return a bitstream filter, and the codec's parameters after it.

    Raises:
        ValueError: There is no such filter, or it does not support this codec or these options.
    """
    try:
        if not isinstance(codec, VideoCodec) or codec.name not in _RAW_FORMATS:
            return BitStreamFilterContext(bsf, av.Codec(codec.decoder, "r")), codec
        # Filters of these codecs read the parameter sets, which PyAV takes only from a stream.
        before, after = _stream_of(codec), _stream_of(codec)
        context = BitStreamFilterContext(bsf, before, after)
        return context, replace(codec, extradata=after.codec_context.extradata)
    except (av.FFmpegError, ValueError) as error:
        what = f"bitstream filter {bsf!r} cannot be used on {codec.name} packets"
        raise ValueError(f"{what}: {describe(error, [])}") from error


# Codecs whose raw streams are an FFmpeg format of the same name.
_RAW_FORMATS = frozenset({"h264", "hevc", "vvc"})


def _stream_of(codec: VideoCodec) -> av.VideoStream:
    """Make a stream with these parameters and without a file, from a raw stream of start codes only."""
    empty = av.open(io.BytesIO(b"\0\0\0\1" * 16), format=codec.name)
    target = av.open(io.BytesIO(), "w", format="mov")
    stream = target.add_stream_from_template(empty.streams.video[0], opaque=True)
    context = stream.codec_context
    context.width, context.height = codec.width, codec.height
    context.extradata = codec.extradata
    target.start_encoding()
    return stream
