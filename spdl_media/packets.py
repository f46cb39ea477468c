"""Coded packets as plain values that can be decoded twice, shared between threads, and pickled.

They reference FFmpeg's buffers without copying, and hold everything else that decoding needs: codec
parameters, side data, orientation, window and clock. No file stays open.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Generic, Self, TypeAlias, TypeVar, get_args

import av
from av.packet import PacketSideData, PktSideDataT

from spdl_media._ffmpeg import AvPacket
from spdl_media.codec import STILL_CODECS, AudioCodec, Codec, VideoCodec, usual_duration
from spdl_media.coded_units import is_hidden
from spdl_media.config import DecodeConfig
from spdl_media.errors import DecodeError
from spdl_media.geometry import rotation, swaps_sides
from spdl_media.still_headers import StillHeader, still_header
from spdl_media.stills import JpegHead
from spdl_media.timing import Window, seconds_of

__all__ = ("AudioPackets", "ImagePackets", "Packets", "VideoPackets")

C = TypeVar("C", VideoCodec, AudioCodec)


@dataclass(frozen=True, slots=True)
class _Metadata:
    source: str = "packets"
    zero: Fraction = Fraction(0)
    window: Window = Window()
    orientation: int = 1


@dataclass(frozen=True, slots=True)
class PacketMetadata(_Metadata):
    """Metadata of packets besides the codec.

    Attributes:
        source: Name of the source, for messages.
        zero: Second 0 of the container on the stream's own clock.
        window: The requested window; earlier packets are included because decoding needs them.
        orientation: EXIF orientation of the coded frames.
        continues: The packets follow others, so the first one need not be a key frame.
        goes_on: The stream has packets after the end of the window.
        incomplete: What is missing from a truncated file, or is wrong in it, where the decoder would not
            notice; ``None`` if nothing is known to be.
        jpeg: Header of a still JPEG; ``None``: not a JPEG, or not a plain one.
        pillow: Why Pillow has to decode the image; ``None``: FFmpeg decodes it.
    """

    continues: bool = False
    goes_on: bool = False
    incomplete: str | None = None
    jpeg: JpegHead | None = None
    pillow: str | None = None

    def span(self, time_base: Fraction) -> tuple[float, float]:
        """Return the window as timestamps ``(first, stop)``; an open side is an infinity."""
        return self.window.ticks(time_base, self.zero)


@dataclass(frozen=True, slots=True)
class FrameMetadata(_Metadata):
    """Metadata of frames that FFmpeg's frames do not hold.

    Attributes:
        orientation: EXIF orientation of the frames, 1 once they are upright.
        num_skipped: Number of frames skipped at the start of a stream that begins inside a group of pictures.
        num_dropped: Number of damaged packets and frames that ``on_corrupt`` dropped.
        is_corrupt: The data has damage that FFmpeg's frame does not report.
        corrupt_pts: Timestamps of video frames with such damage.
    """

    source: str = "frames"
    num_skipped: int = 0
    num_dropped: int = 0
    is_corrupt: bool = False
    corrupt_pts: frozenset[int | None] = frozenset()

    @classmethod
    def of(cls, packets: PacketMetadata, **more: Any) -> FrameMetadata:
        """Make the metadata of frames from that of their packets."""
        return cls(packets.source, packets.zero, packets.window, **more)


class _Packets(Generic[C]):
    """Base of all three kinds of packets."""

    __slots__ = ("_codec", "_discarded", "_metadata", "_packets")
    _codec: C

    def __init__(
        self,
        packets: Sequence[AvPacket],
        codec: C,
        metadata: PacketMetadata | None = None,
        discarded: frozenset[int] | None = None,
    ) -> None:
        self._packets = tuple(packets)
        self._codec = codec
        self._metadata = metadata or PacketMetadata()
        # Timestamps that an edit list hides: packets of another process lack FFmpeg's flag.
        if discarded is None:
            hidden = {p.pts for p in self._packets if p.is_discard and p.pts is not None}
            # A list of several edits can hide one frame and show another one at the same time.
            discarded = frozenset(hidden and hidden - {p.pts for p in packets if not p.is_discard})
        self._discarded = discarded

    @property
    def codec(self) -> C:
        """The parameters of the coded stream."""
        return self._codec

    @property
    def source(self) -> str:
        """Name of the source, such as a path, a URL, or "bytes of length n"."""
        return self._metadata.source

    @property
    def window(self) -> Window:
        """The requested window, in seconds on the container's clock."""
        return self._metadata.window

    @property
    def timestamp(self) -> tuple[float | None, float | None]:
        """The window as a pair of seconds; ``None`` is an open side."""
        start, end = self._metadata.window.start, self._metadata.window.end
        return (None if start is None else float(start), None if end is None else float(end))

    @property
    def time_base(self) -> Fraction:
        """Seconds per tick of the packets' timestamps."""
        return self._codec.time_base

    @property
    def nbytes(self) -> int:
        """Size of the coded data in bytes."""
        return sum(packet.size for packet in self._packets)

    @property
    def is_key(self) -> tuple[bool, ...]:
        """For each packet, whether the file marks it as a key frame."""
        return tuple(packet.is_keyframe for packet in self._packets)

    def get_timestamps(self, *, raw: bool = False) -> tuple[float, ...]:
        """Return the presentation times of the packets in seconds on the container's clock, in display order.

        Packets without any time in the file are omitted, and so are hidden frames of VP8 and VP9. Times of
        raw streams follow from the stated frame rate. If each field is a packet (H.264 in MPEG-TS), each
        field has its time.

        Args:
            raw: Include packets that an edit list hides, and those outside the window, which are present
                because decoding needs them.
        """
        stated = self._shown_at([p for p in self._packets if raw or not p.is_discard])
        pts = sorted(ticks for ticks in stated if ticks is not None)
        if not raw:
            # In ticks, because integers compare faster than fractions.
            first, stop = self._metadata.span(self.time_base)
            pts = [ticks for ticks in pts if first <= ticks < stop and ticks not in self._discarded]
        return seconds_of(pts, self.time_base, self._metadata.zero)

    def _shown_at(self, packets: list[AvPacket]) -> list[int | None]:
        """Return the timestamps of the frames of packets, in the order of the packets."""
        # If the file has no presentation times (H.264 in AVI), decode times are the same set of times.
        return [p.dts if p.pts is None else p.pts for p in packets]

    def __len__(self) -> int:
        """Number of packets, including those before the window that decoding needs.

        ``len(packets.get_timestamps())`` counts only packets in the window.
        """
        return len(self._packets)

    def __getitem__(self, key: slice) -> Self:
        """Slice the packets in decoding order; the result shares their memory."""
        if not isinstance(key, slice) or key.step not in (None, 1):
            raise TypeError(f"packets are cut by a slice of step 1, such as [10:20], not {key!r}")
        start, stop, _ = key.indices(len(self))
        return self._with(
            self._packets[key],
            self._codec,
            continues=self._metadata.continues or start > 0,
            goes_on=self._metadata.goes_on and stop == len(self),
            # The missing data follows the last packet.
            incomplete=self._metadata.incomplete if stop == len(self) else None,
        )

    def _with(self, packets: Sequence[AvPacket], codec: C, **changes: Any) -> Self:
        return type(self)(packets, codec, replace(self._metadata, **changes), self._discarded)

    def with_metadata(self, **changes: Any) -> Self:
        """Return the same packets with other metadata. Used within this package."""
        return self._with(self._packets, self._codec, **changes)

    def with_packets(self, packets: Sequence[AvPacket], codec: C) -> Self:
        """Return other packets with the same metadata. Used within this package."""
        # The JPEG header described the old data.
        return self._with(packets, codec, jpeg=None)

    def __reduce__(self) -> tuple[Any, ...]:
        # PyAV's packets cannot be pickled. Without FFmpeg's flag, only its time tells a hidden packet.
        rows, discarded = [_to_row(packet) for packet in self._packets], set(self._discarded)
        for packet, (_, fields, _) in zip(self._packets, rows, strict=True):
            if packet.is_discard and packet.pts not in self._discarded:
                fields[0] = (packet.pts or 0) - (1 << 40)  # apart from one that is shown
                discarded.add(fields[0])
        return _unpickle, (type(self), rows, self._codec, self._metadata, frozenset(discarded))

    def __repr__(self) -> str:
        span = f"none in {self.window}" if self.window else f"{self.nbytes} bytes"
        if times := self.get_timestamps():
            span = f"{times[0]:.3f} s to {times[-1]:.3f} s"
        return f"<{type(self).__name__}: {len(self)} of {self._codec.name}, {span}>"


class VideoPackets(_Packets[VideoCodec]):
    """Packets of a video stream, as returned by :func:`~spdl_media.demux_video`.

    Picklable and reusable; ``packets[a:b]`` shares memory.

    Thread safety: immutable, free to share.
    """

    __slots__ = ()

    def _shown_at(self, packets: list[AvPacket]) -> list[int | None]:
        shown = [p for p in packets if not is_hidden(p, self._codec)]
        stated = super()._shown_at(shown)
        step = usual_duration(self._codec)
        if step and stated.count(None) == len(stated) and self._codec.name not in STILL_CODECS:
            # Raw streams have no times: frames are counted at the frame rate, as when decoding.
            start = round(self._metadata.zero / self._codec.time_base)
            return [start + number * (shown[0].duration or step) for number in range(len(shown))]
        return stated

    @property
    def pix_fmt(self) -> str | None:
        """FFmpeg's name of the coded pixel format; ``None`` if it is known only once a frame is decoded."""
        return self._stated.pix_fmt

    @property
    def width(self) -> int:
        """Width of an upright frame, in pixels."""
        return self._stated.height if swaps_sides(self.orientation) else self._stated.width

    @property
    def height(self) -> int:
        """Height of an upright frame, in pixels."""
        return self._stated.width if swaps_sides(self.orientation) else self._stated.height

    @property
    def _stated(self) -> VideoCodec | StillHeader:
        """The object that states size and pixel format."""
        return self._codec

    @property
    def frame_rate(self) -> Fraction | None:
        """Average frames per second; ``None`` if the file does not state it."""
        return self._codec.frame_rate

    @property
    def orientation(self) -> int:
        """EXIF orientation of the coded frames, 1 to 8."""
        return self._metadata.orientation

    @property
    def rotation(self) -> int:
        """Degrees clockwise, 0, 90, 180 or 270, that turn the coded frames upright."""
        return rotation(self._metadata.orientation)


class ImagePackets(VideoPackets):
    """The packet of one image, as returned by :func:`~spdl_media.demux_image`.

    Size and pixel format come from the container, or from the header of a JPEG, PNG, WebP or BMP, which is
    parsed on access. For other formats without a container they are 0 and ``None``.

    Thread safety: immutable, free to share.
    """

    __slots__ = ()

    @property
    def _stated(self) -> VideoCodec | StillHeader:
        codec = self._codec
        if codec.width or not self._packets:
            return codec
        return still_header(coded_image(self), codec.decoder) or codec


class AudioPackets(_Packets[AudioCodec]):
    """Packets of an audio stream, as returned by :func:`~spdl_media.demux_audio`.

    Picklable and reusable; ``packets[a:b]`` shares memory.

    Thread safety: immutable, free to share.
    """

    __slots__ = ()

    @property
    def sample_rate(self) -> int:
        """Samples per second and channel."""
        return self._codec.sample_rate

    @property
    def num_channels(self) -> int:
        """Number of channels."""
        return self._codec.num_channels


Packets: TypeAlias = AudioPackets | VideoPackets | ImagePackets


def av_packets(packets: Packets) -> tuple[AvPacket, ...]:
    """Return PyAV's packets. Threads share them, so decoders must only read them."""
    # An image is the caller's memory without the padding that decoders need. It is copied, which takes 1% of
    # the time of decoding.
    if isinstance(packets, ImagePackets):
        return tuple(with_data(packet, padded(packet)) for packet in packets._packets)
    return packets._packets


def coded_image(packets: ImagePackets) -> memoryview:
    """Return the data of the first packet of an image, without a copy and without padding.

    Raises:
        IndexError: There are no packets.
    """
    return memoryview(packets._packets[0])


def padded_image(packets: ImagePackets) -> AvPacket:
    """Return the first packet of an image with padding for decoders, without times."""
    return av.Packet(padded(packets._packets[0]))  # type: ignore[arg-type]  # any buffer will do


def metadata_of(packets: Packets) -> PacketMetadata:
    return packets._metadata


def check_complete(packets: Packets, config: DecodeConfig) -> None:
    """Check that packets are all of their file or window, unless ``config`` asks to keep truncated ones.

    Raises:
        DecodeError: The file is truncated or damaged.
    """
    clause = packets._metadata.incomplete
    if clause is None or config.on_corrupt != "raise":
        return
    kinds = {"the data ends": "cut short", "FFmpeg": "unsupported"}
    how = next((how for start, how in kinds.items() if clause.startswith(start)), "damaged")
    raise DecodeError(
        f"the {packets.codec.name} data is {how}: {clause}. decode_config(on_corrupt='keep') decodes what is "
        "there, as far as the decoder can",
        source=packets.source,
    )


def discarded_pts(packets: Packets) -> frozenset[int]:
    """Return the timestamps of frames that an edit list hides, except those whose samples are all cut."""
    hidden, coded = packets._discarded, packets._packets
    return hidden and hidden & {p.pts for p in coded if not p.has_sidedata("skip_samples")}


# FFmpeg's decoders read up to 64 bytes past the end of a packet and expect zeros there. PyAV adds no padding
# to memory that it wraps: MPEG-4 then reports damage at random, and lossless WebP crashes if it ends at the
# end of a memory page.
_PADDING = bytes(64)


def padded(data: AvPacket | bytes) -> memoryview:
    """Copy a packet's data to memory with zeros after its end."""
    return memoryview(b"".join((data, _PADDING)))[: -len(_PADDING)]


# Fields of a packet besides its data, its side data, and its time base, which is that of the stream.
_FIELDS = ("pts", "dts", "duration", "is_keyframe", "is_corrupt")

# One picklable row per packet: data, the fields above, side data by type.
_Row: TypeAlias = tuple[bytes, list[Any], list[tuple[str, bytes]]]

# PyAV lists the names in the order of FFmpeg's numbers.
_SIDE_DATA_TYPES = get_args(PktSideDataT)


def _to_row(packet: AvPacket) -> _Row:
    side_data = [(entry.data_type, bytes(entry)) for entry in packet.iter_sidedata()]
    return bytes(packet), [getattr(packet, name) for name in _FIELDS], side_data


def _from_row(row: _Row, time_base: Fraction) -> AvPacket:
    data, values, side_data = row
    packet = make_packet(padded(data), time_base)
    for name, value in zip(_FIELDS, values, strict=True):
        setattr(packet, name, value)
    # Decoders need side data such as palettes and skipped samples.
    for kind, content in side_data:
        set_side_data(packet, kind, content)
    return packet


def set_side_data(packet: AvPacket, kind: str, content: bytes) -> None:
    """Set the side data of a type, named as PyAV names it."""
    entry = PacketSideData(_SIDE_DATA_TYPES.index(kind), len(content))  # type: ignore[call-arg]  # stubs lack it
    entry.update(content)
    packet.set_sidedata(entry)


def make_packet(data: bytes | memoryview, time_base: Fraction) -> AvPacket:
    """Make a packet over the given memory, which it keeps alive and does not copy."""
    packet: AvPacket = av.Packet(data)  # type: ignore[arg-type]  # any buffer will do
    packet.time_base = time_base
    packet.is_keyframe = True
    return packet


def copy_packet(packet: AvPacket) -> AvPacket:
    """Copy a packet for a bitstream filter, which takes the packet's data away and may write to it."""
    return with_data(packet, bytes(packet))


def with_data(packet: AvPacket, data: bytes | memoryview) -> AvPacket:
    """Return a packet with other data, which it keeps alive and does not copy."""
    copy = make_packet(data, packet.time_base)
    for name in _FIELDS:
        setattr(copy, name, getattr(packet, name))
    for entry in packet.iter_sidedata():
        copy.set_sidedata(entry)
    return copy


def _unpickle(cls: type[_Packets[Any]], rows: Iterable[_Row], codec: Codec, *rest: Any) -> Any:
    return cls([_from_row(row, codec.time_base) for row in rows], codec, *rest)
