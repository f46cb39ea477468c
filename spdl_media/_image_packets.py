"""From an opened source to the packet of an image: the whole file, or the first key frame of a container."""

from __future__ import annotations

from contextlib import closing
from functools import cache

import av

from spdl_media._container import Container
from spdl_media.codec import VideoCodec
from spdl_media.config import DemuxConfig
from spdl_media.errors import DemuxError
from spdl_media.inputs import Input, open_input
from spdl_media.packets import ImagePackets, PacketMetadata, VideoPackets, make_packet
from spdl_media.pillow_images import TIME_BASE as PILLOW_TIME_BASE
from spdl_media.pillow_images import is_unsupported, pillow_reason
from spdl_media.stills import (
    HEAD_SIZE,
    STILL_FORMATS,
    container_still,
    read_jpeg_head,
    still_codec,
    still_orientation,
)
from spdl_media.timing import Window
from spdl_media.truncation import check_complete


def read_image(input: Input, config: DemuxConfig) -> ImagePackets:
    """Read one image from an opened input; raises what :func:`demux_image` does.

    Raises:
        SourceError: The source cannot be read.
        DemuxError: It is no media file, or has no image.
        ValueError: ``config`` has a format or an option that FFmpeg does not know.
    """
    decoder = still_decoder(input, config)
    if decoder is not None:
        return _whole_file(input, decoder)
    if config.format is None and (reason := pillow_reason(input.head(HEAD_SIZE))):
        return _pillow_file(input, reason)
    kind = container_still(input.head(HEAD_SIZE)) if config.format is None else None
    if kind is not None and not input.seekable:
        # It is read twice, by FFmpeg and for what FFmpeg does not tell.
        with open_input(input.read_all(), name=input.name) as whole:
            return read_image(whole, config)
    try:
        opened = Container(input, config)
    except DemuxError as error:
        if kind is None or not is_unsupported(error):
            raise
        return _pillow_file(input, "an image that FFmpeg does not know")
    with closing(opened) as container:
        # Known by its name alone (TGA, PCX ...), the file is one packet after all.
        decoder = container.named_still()
        if decoder is None:
            packets = first_image(container)
            if kind is None:
                return packets
            # FFmpeg makes a packet of these however short the file is.
            return packets.with_metadata(incomplete=check_complete(kind, container.content()))
    return _whole_file(input, decoder)


def still_decoder(input: Input, config: DemuxConfig) -> str | None:
    """The decoder that takes the whole file as one packet; ``None``: a container has to be opened.

    Raises:
        SourceError: The start of the source cannot be read.
    """
    if config.format is not None:
        return STILL_FORMATS.get(config.format)
    return still_codec(input.head(HEAD_SIZE))


def _whole_file(input: Input, decoder: str) -> ImagePackets:
    data = input.read_all()
    if not len(data):
        raise DemuxError("is empty (0 bytes)", source=input.name)
    codec = _still_stream(decoder)
    # One walk over the segments gives the orientation, and what a faster decoder asks before it
    # takes the image.
    head = read_jpeg_head(data) if decoder == "mjpeg" else None
    # All that is wrong with JPEGs is wrong with those of four components.
    if not (head and head.is_ycc) and (reason := pillow_reason(data, decoder)):
        return _pillow_file(input, reason)
    metadata = PacketMetadata(
        input.name,
        orientation=still_orientation(data) if head is None else head.orientation,
        incomplete=check_complete(decoder, data),
        jpeg=head,
    )
    # The packet holds the caller's memory. Decoding copies it, for the padding that decoders want.
    return ImagePackets([make_packet(data, codec.time_base)], codec, metadata)


_PILLOW_CODEC = VideoCodec("pillow", "pillow", time_base=PILLOW_TIME_BASE)


def _pillow_file(input: Input, reason: str) -> ImagePackets:
    """The whole file as one packet, which Pillow decodes."""
    metadata = PacketMetadata(input.name, pillow=reason)
    packet = make_packet(input.read_all(), PILLOW_TIME_BASE)
    return ImagePackets([packet], _PILLOW_CODEC, metadata)


def pillow_video(
    data: bytes | memoryview, source: str, window: Window, reason: str
) -> VideoPackets:
    """An animation as one packet. FFmpeg loses frames of PNG, and before version 8.1 has none of WebP."""
    metadata = PacketMetadata(source, window=window, pillow=reason)
    return VideoPackets([make_packet(data, PILLOW_TIME_BASE)], _PILLOW_CODEC, metadata)


@cache
def _still_stream(decoder: str) -> VideoCodec:
    # A still has no stream to copy these from. YUV of JPEG 2000 is of full range (ISO 15444-1, annex M),
    # of which FFmpeg says nothing.
    color = (2, 2, 2, 2) if decoder == "jpeg2000" else (0, 2, 2, 2)
    return VideoCodec(av.Codec(decoder, "r").canonical_name, decoder, color=color)


def first_image(container: Container) -> ImagePackets:
    """Read the first key frame of the best video stream."""
    index, codec = container.video()
    container.rewind()
    with container.reading():
        # What stands before the first key frame cannot be decoded alone.
        key = next((p for p in container.packets([index]) if p.is_keyframe), None)
    if key is None:
        raise container.error("the video stream has no key frame, so there is no first image")
    orientation = container.orientation(index, [key])
    metadata = PacketMetadata(container.name, container.zero, orientation=orientation)
    return ImagePackets([key], codec, metadata)
