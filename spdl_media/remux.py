"""Which codecs file formats take, and copies of packets, with decoding times where the source has none."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from spdl_media._ffmpeg import AvPacket
from spdl_media.codec import Codec
from spdl_media.demux import make_filter
from spdl_media.errors import EncodeError
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

# FFmpeg's defaults of these formats take few sample rates, channels or sizes, or lose the start (WMA).
_POOR = {"matroska": "ac3", "mpegts": "mp2", "flv": "mp3", "3gp": "amr_nb", "3g2": "amr_nb"}
_BETTER = dict.fromkeys(_POOR.items(), "aac") | {
    ("3gp", "h263"): "h264",
    ("3g2", "h263"): "h264",
    ("asf", "msmpeg4v3"): "wmv2",  # the first is not in FFmpeg's own list of the format
    ("asf", "wmav2"): "mp3",
}
# Codecs that FFmpeg refuses for MOV, but only when it writes the header.
_MP4_ONLY = frozenset({"av1", "flac", "opus", "truehd", "vp8", "vp9"})
# The codecs that readers find in these formats. FFmpeg writes others without an error.
_IN_MPEGTS = (
    "aac aac_latm ac3 cavs dirac dts eac3 h264 hevc mp2 mp3 mpeg1video mpeg2video mpeg4 opus s302m truehd "
    "vc1 vvc"
)
_IN_MPEG = "ac3 dts h264 mp1 mp2 mp3 mpeg1video mpeg2video mpeg4 pcm_dvd pcm_s16be"
_IN_FORMATS = {
    **dict.fromkeys(("mpeg", "vob", "svcd", "dvd", "vcd"), _IN_MPEG.split()),
    "mpegts": _IN_MPEGTS.split(),
    "flac": ["flac"],
}
# Codecs that FFmpeg writes to FLV at a wrong rate or in the wrong byte order, or refuses only at the header.
_NOT_IN_FLV = frozenset({"mpeg4", "pcm_s16be", "pcm_s16le", "pcm_u8"})
# Sample rates of MP3 that formats take, if not all.
_MPEG_RATES = 16000, 22050, 24000, 32000, 44100, 48000
_MP3_RATES: Mapping[str, Sequence[int]] = dict.fromkeys(
    ("mp4", "ipod", "3gp", "3g2"), _MPEG_RATES
) | {"flv": (11025, 22050, 44100, 48000)}


def better_codec(format: str, codec: str) -> str:
    """Return the codec that is written to a file format by default, from FFmpeg's default."""
    return _BETTER.get((format, codec), codec)


def is_lost(codec: str, format: str, listed: Collection[str]) -> bool:
    """Whether FFmpeg writes a codec to a file format so that readers do not find it, or find noise.

    Args:
        codec: Name of the codec.
        format: FFmpeg's name of the file format.
        listed: The codecs that FFmpeg lists for the format.
    """
    if codec == "pillow" or format in _IN_FORMATS:  # "pillow" stands for a whole animation
        return codec not in _IN_FORMATS.get(format, ())
    # FFmpeg would write packets of other codecs as raw video.
    is_raw = format in ("avi", "asf") and codec not in listed
    return is_raw or (format == "flv" and codec in _NOT_IN_FLV)


def takes(codec: Any, format: str, listed: Collection[str]) -> bool:
    """Whether a file format takes packets of a codec, as far as FFmpeg knows; see :func:`is_lost`."""
    if is_lost(codec.name, format, listed) or (format == "mov" and codec.name in _MP4_ONLY):
        return False
    if codec.name == "mp3" and format in _MP3_RATES and codec.sample_rate not in _MP3_RATES[format]:
        return False
    return format == "mpegts" or not listed or codec.name in listed


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
        stream: PyAV's output stream, set before the first packet.
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
