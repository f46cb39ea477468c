"""Copy packets to an output stream, with decoding times where the source has none."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import av
from av.bitstream import BitStreamFilterContext

from spdl_media._ffmpeg import AvPacket
from spdl_media.codec import Codec, VideoCodec
from spdl_media.demux import make_filter
from spdl_media.encode import set_all
from spdl_media.errors import EncodeError
from spdl_media.formats import COLOR_TABLES
from spdl_media.packets import (
    AudioPackets,
    VideoPackets,
    av_packets,
    discarded_pts,
    metadata_of,
    with_data,
)

# Packets at the start of a stream that may lack a decoding time: H.264 and HEVC reorder at most 16 frames.
MAX_UNDATED = 16

# What decoders need before the first packet, if it is not in the packets of MP4 and Matroska.
_HEADERS_FIRST = ("h264", "mpeg4")

# Attributes that PyAV's codec context and our codec classes have under the same name.
_COPIED = "width", "height", "pix_fmt", "sample_aspect_ratio", "sample_rate", "bit_rate"


class PacketCopier:
    """Copies packets to an output stream, shifted so that second 0 of their container is at 0.

    It has the methods of an encoder.

    Args:
        codec: Codec of the packets.
        format: FFmpeg's name of the file format.
        hides: Whether the format has edit lists, which hide packets before second 0.
        keeps_headers: Whether the format has a place for headers outside of the packets.

    Attributes:
        codec: Codec of the copies.
        stream: PyAV's output stream, once it is added.
    """

    stream: Any

    def __init__(self, codec: Codec, format: str, *, hides: bool, keeps_headers: bool) -> None:
        self.codec, self._format, self._hides = codec, format, hides
        self._filter: Any = None
        self._headers = b""
        if not keeps_headers and codec.name in _HEADERS_FIRST:
            # MP4 and Matroska have lengths of units in place of start codes.
            if codec.name == "h264" and (codec.extradata or b"")[:1] == b"\1":
                self._filter, self.codec = make_filter("h264_mp4toannexb", codec)
            self._headers = self.codec.extradata or b""
        self._undated: list[Any] = []
        self._started = False

    def add_stream(self, container: Any, usual: str, refused: EncodeError) -> None:
        """Add the output stream to a container.

        Args:
            container: PyAV's container.
            usual: The default codec of its format for this kind of stream.
            refused: Raised if the format does not take the codec.

        Raises:
            EncodeError: ``refused``.
        """
        # PyAV can copy a stream only from a template stream. So one of the default codec is the template, a
        # "null" bitstream filter replaces its codec, and the context, never opened, holds the parameters.
        model = av.open(io.BytesIO(), "w", format="nut").add_stream(usual)
        try:
            self.stream = stream = container.add_stream_from_template(model, opaque=True)
        except ValueError as error:
            raise refused from error
        codec = self.codec
        BitStreamFilterContext("null", av.Codec(codec.decoder, "r"), stream)
        context, stream.time_base = stream.codec_context, codec.time_base
        context.extradata = codec.extradata
        values: dict[str, Any] = {name: getattr(codec, name, None) for name in _COPIED}
        if isinstance(codec, VideoCodec):
            colors = dict(zip(COLOR_TABLES, codec.color, strict=True))
            values |= {"framerate": codec.frame_rate, **colors}
        else:
            values |= {"layout": codec.channel_layout, "format": codec.sample_fmt}
        set_all(context, **values)

    def encode(self, packets: VideoPackets | AudioPackets) -> Iterator[AvPacket]:
        """Yield copies of packets.

        Raises:
            EncodeError: Packets have no times, or the file would show packets that an edit list hides.
        """
        hidden = discarded_pts(packets) if isinstance(packets, VideoPackets) else frozenset()
        zero = round(metadata_of(packets).zero / packets.time_base)
        if hidden and not (self._hides and max(hidden) < zero):
            raise EncodeError(
                f"an edit list hides {len(hidden)} of the packets, and {self._format} would show them. "
                "Decode and encode them",
                source=packets.source,
            )
        for packet in av_packets(packets):
            moved = self._copy(packet)
            if packet.pts is not None:
                moved.pts = packet.pts - zero
            # Matroska states no decoding times, so FFmpeg knows none for the first packets of a video with
            # B-frames: as many as it reorders.
            is_undated = packet.dts is None and not self._started
            if is_undated and packet.pts is not None and len(self._undated) < MAX_UNDATED:
                self._undated.append(moved)
            elif packet.pts is None or packet.dts is None:
                raise EncodeError(
                    f"the {packets.codec.name} packets have no timestamps, which files need. Decode and "
                    "encode them",
                    source=packets.source,
                )
            else:
                moved.dts = packet.dts - zero
                yield from self._dated(moved.dts)
                yield moved

    def _copy(self, packet: AvPacket) -> Any:
        """Return a copy, because muxers change packets, with the headers that the format has no place for."""
        copy = with_data(packet, memoryview(packet))
        if self._filter is not None:
            (copy,) = self._filter.filter(copy)
        # FFmpeg's filter adds them to IDR frames alone, and other key frames may come first.
        if self._headers and packet.is_keyframe and self._headers not in bytes(copy):
            copy = with_data(copy, memoryview(self._headers + bytes(copy)))
        copy.stream = self.stream
        return copy

    def flush(self) -> Iterator[AvPacket]:
        """Yield what waits for a decoding time."""
        yield from self._dated(None)

    def _dated(self, end: int | None) -> Iterator[AvPacket]:
        """Yield the first packets, with decoding times before ``end`` and before all their frames."""
        waiting, self._undated, self._started = self._undated, [], True
        if waiting:
            times = [packet.pts for packet in waiting]
            stop = min(times if end is None else [*times, end])
            step = max(waiting[0].duration or 0, 1)
        for place, packet in enumerate(waiting, -len(waiting)):
            packet.dts = stop + place * step
            yield packet
