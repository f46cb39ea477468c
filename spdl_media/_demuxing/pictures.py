"""One picture from an opened input: as one packet, or the first of a container."""

from __future__ import annotations

from functools import cache

import av

from spdl_media._demuxing.container import Container, as_video
from spdl_media.codec import VideoCodec, read_video_codec
from spdl_media.config import DemuxConfig
from spdl_media.errors import DemuxError
from spdl_media.inputs import Input, open_input
from spdl_media.packets import ImagePackets, PacketMetadata, make_packet
from spdl_media.stills import (
    HEAD_SIZE,
    STILL_FORMATS,
    container_still,
    read_jpeg_head,
    still_codec,
    still_orientation,
)
from spdl_media.truncation import check_complete


def _still_decoder(input: Input, config: DemuxConfig) -> str | None:
    """The decoder that takes the whole file as one packet; None: a container has to be opened."""
    if config.format is not None:
        return STILL_FORMATS.get(config.format)
    return still_codec(input.head(HEAD_SIZE))


def read_image(input: Input, config: DemuxConfig) -> ImagePackets:
    """Read one picture from an opened input."""
    decoder = _still_decoder(input, config)
    if decoder is not None:
        return _demux_still(input, decoder)
    kind = container_still(input.head(HEAD_SIZE)) if config.format is None else None
    if kind is not None and not input.seekable:
        # It is read twice, by FFmpeg and for what FFmpeg does not tell.
        with open_input(input.read_all(), name=input.name) as whole:
            return read_image(whole, config)
    container = Container(input, config)
    try:
        decoder = container.named_still()
        packets = first_picture(container) if decoder is None else None
        missing = None if kind is None else check_complete(kind, container.content())
    finally:
        container.close()
    if packets is None:
        return _demux_still(input, decoder or "")
    return packets if kind is None else packets.with_metadata(incomplete=missing)


def is_still(input: Input, config: DemuxConfig) -> bool:
    """Whether the source is one picture, coded as one packet or in a container of stills."""
    if _still_decoder(input, config) is not None:
        return True
    head = input.head(HEAD_SIZE)
    return config.format is None and container_still(head) == "avif" and head[8:12] != b"avis"


def _demux_still(input: Input, decoder: str) -> ImagePackets:
    data = input.read_all()
    if not len(data):
        raise DemuxError("is empty (0 bytes)", source=input.name)
    codec = _still_stream(decoder)
    head = read_jpeg_head(data) if decoder == "mjpeg" else None
    facts = PacketMetadata(
        input.name,
        orientation=still_orientation(data) if head is None else head.orientation,
        incomplete=check_complete(decoder, data),
        jpeg=head,
    )
    return ImagePackets([make_packet(data, codec.time_base)], codec, facts)


def first_picture(container: Container) -> ImagePackets:
    """Read the first key frame of the best video stream, as one picture.

    Raises:
        DemuxError: There is no video stream, or no key frame in it.
    """
    stream = as_video(container.stream("video", None))
    index, codec = stream.index, read_video_codec(stream)
    container.rewind()
    for packet in container.packets([index]):
        if packet.is_keyframe:
            orientation = container.orientation(index, [packet])
            facts = PacketMetadata(container.name, container.zero, orientation=orientation)
            return ImagePackets([packet], codec, facts)
    raise container.error("the video stream has no key frame, so there is no first picture")


@cache
def _still_stream(decoder: str) -> VideoCodec:
    return VideoCodec(av.Codec(decoder, "r").canonical_name, decoder)
