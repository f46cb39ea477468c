"""Coded packets as plain values: decode them twice, share them, send them to another process.

They hold FFmpeg's own buffers without copying, and beside them everything that decoding needs as values of
ours: the codec's parameters, side data, orientation, window and clock. Nothing of the file stays open.
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
from spdl_media.timing import Window, ticks_to_seconds

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
    """Metadata of packets, beside the codec.

    Attributes:
        source: What they were read from, for messages.
        zero: Second 0 of the container on the stream's own clock.
        window: What the user asked for; the packets before it are there because decoding needs them.
        orientation: EXIF number of the coded frames' orientation.
        continues: The packets follow others, so the first need not be a key frame.
        goes_on: The stream has packets behind the end of the window.
        incomplete: What is missing from a file that is cut short, or wrong in it, where its decoder would
            not notice.
        jpeg: What the header of a still JPEG says; ``None``: it is no such file, or not a plain one.
        pillow: Why Pillow decodes it and FFmpeg does not; ``None``: FFmpeg does.
    """

    continues: bool = False
    goes_on: bool = False
    incomplete: str | None = None
    jpeg: JpegHead | None = None
    pillow: str | None = None


@dataclass(frozen=True, slots=True)
class FrameMetadata(_Metadata):
    """Metadata of frames that FFmpeg's own structures do not hold, beside that of their packets.

    Attributes:
        orientation: EXIF number of the frames' orientation, 1 once they are upright.
        num_skipped: Frames that could not be decoded yet, at the start of a stream cut in mid-group.
        num_dropped: Damaged packets and frames that ``on_corrupt`` left out.
        is_corrupt: The data is damaged in a way that FFmpeg's frame does not say.
        corrupt_pts: Timestamps of video frames of which the same is true.
    """

    source: str = "frames"
    num_skipped: int = 0
    num_dropped: int = 0
    is_corrupt: bool = False
    corrupt_pts: frozenset[int | None] = frozenset()

    @classmethod
    def of(cls, packets: PacketMetadata, **more: Any) -> FrameMetadata:
        """Metadata of frames of packets with this metadata."""
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
        # An edit list hides these. FFmpeg marks the packets so, but the mark cannot be set again on a
        # copy in another process, so their pts are kept and the frames left out by pts.
        if discarded is None:
            hidden = {p.pts for p in self._packets if p.is_discard and p.pts is not None}
            # Lists of several edits hide frames at times at which they show others.
            shown = {p.pts for p in self._packets if not p.is_discard} if hidden else set()
            discarded = frozenset(hidden - shown)
        self._discarded = discarded

    @property
    def codec(self) -> C:
        """The parameters of the coded stream."""
        return self._codec

    @property
    def source(self) -> str:
        """Name of the source: a path, a URL, or "bytes of length n"."""
        return self._metadata.source

    @property
    def window(self) -> Window:
        """The window that was asked for, in seconds on the container's clock."""
        return self._metadata.window

    @property
    def timestamp(self) -> tuple[float | None, float | None]:
        """The window as a pair of seconds; ``None`` is an open side."""
        start, end = self._metadata.window.start, self._metadata.window.end
        return (None if start is None else float(start), None if end is None else float(end))

    @property
    def time_base(self) -> Fraction:
        """Seconds in one unit of the packets' timestamps."""
        return self._codec.time_base

    @property
    def nbytes(self) -> int:
        """Bytes of coded data."""
        return sum(packet.size for packet in self._packets)

    @property
    def is_key(self) -> tuple[bool, ...]:
        """Of each packet, whether the file says that decoding can begin there."""
        return tuple(packet.is_keyframe for packet in self._packets)

    def get_timestamps(self, *, raw: bool = False) -> tuple[float, ...]:
        """Presentation times of the packets in seconds on the container's clock, in display order.

        Packets to which the file gives no time at all are left out, and so are frames of VP8 and VP9 that are
        not shown. Those of raw streams are counted at the stated rate. Where each field is a packet (H.264 in
        MPEG-TS), each has its time.

        Args:
            raw: Also those that an edit list hides, and those outside the window, which are there
                because decoding needs them.
        """
        stated = self._shown_at([p for p in self._packets if raw or not p.is_discard])
        # Whole numbers compare faster than fractions.
        first, stop = self.window.ticks(self.time_base, self._metadata.zero)
        return tuple(
            float(ticks_to_seconds(ticks, self.time_base, self._metadata.zero))
            for ticks in sorted(ticks for ticks in stated if ticks is not None)
            if raw or (ticks not in self._discarded and first <= ticks < stop)
        )

    def _shown_at(self, packets: list[AvPacket]) -> list[int | None]:
        """Timestamps of what packets decode to, in their order."""
        # Where the file has no presentation times (H.264 in AVI), those of decoding are the same
        # moments in another order.
        return [p.dts if p.pts is None else p.pts for p in packets]

    def __len__(self) -> int:
        """Number of packets, of a window with those before it that decoding needs.

        ``len(packets.get_timestamps())`` leaves these out.
        """
        return len(self._packets)

    def __getitem__(self, key: slice) -> Self:
        """A run of the packets in decoding order, sharing their memory."""
        if not isinstance(key, slice):
            raise TypeError(f"packets are cut by a slice, such as [10:20], not {key!r}")
        if key.step not in (None, 1):
            raise TypeError(
                f"packets need those before them, so a slice has step 1, not {key.step}"
            )
        start, stop, _ = key.indices(len(self))
        return self._with(
            self._packets[key],
            self._codec,
            continues=self._metadata.continues or start > 0,
            goes_on=self._metadata.goes_on and stop == len(self),
            # What is missing is missing behind the last packet.
            incomplete=self._metadata.incomplete if stop == len(self) else None,
        )

    def _with(self, packets: Sequence[AvPacket], codec: C, **changes: Any) -> Self:
        metadata = replace(self._metadata, **changes)
        return type(self)(packets, codec, metadata, self._discarded)

    def with_metadata(self, **changes: Any) -> Self:
        """The same packets with other metadata, for modules of this package."""
        return self._with(self._packets, self._codec, **changes)

    def with_packets(self, packets: Sequence[AvPacket], codec: C) -> Self:
        """Other packets with the same metadata, for modules of this package."""
        # The header of the JPEG was that of other data.
        return self._with(packets, codec, jpeg=None)

    def __reduce__(self) -> tuple[Any, ...]:
        # Packets of PyAV cannot be pickled.
        rows = [_to_row(packet) for packet in self._packets]
        return _unpickle, (type(self), rows, self._codec, self._metadata, self._discarded)

    def __repr__(self) -> str:
        span = f"none in {self.window}" if self.window else f"{self.nbytes} bytes"
        if times := self.get_timestamps():
            span = f"{times[0]:.3f} s to {times[-1]:.3f} s"
        return f"<{type(self).__name__}: {len(self)} of {self._codec.name}, {span}>"


class VideoPackets(_Packets[VideoCodec]):
    """Packets of a video stream. Made by :func:`~spdl_media.demux_video`.

    Picklable and reusable; ``packets[a:b]`` shares memory.

    Thread safety: immutable, free to share.
    """

    __slots__ = ()

    def _shown_at(self, packets: list[AvPacket]) -> list[int | None]:
        shown = [p for p in packets if not is_hidden(p, self._codec.name)]
        stated = [p.dts if p.pts is None else p.pts for p in shown]
        step = usual_duration(self._codec)
        if step and stated.count(None) == len(stated) and self._codec.name not in STILL_CODECS:
            # Raw streams have no times. Their frames are counted, as those are that they decode to.
            start = round(self._metadata.zero / self._codec.time_base)
            return [start + number * (shown[0].duration or step) for number in range(len(shown))]
        return stated

    @property
    def pix_fmt(self) -> str | None:
        """FFmpeg's name of the pixel format as coded; ``None``: known once a frame is decoded."""
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
        """What states size and pixel format."""
        return self._codec

    @property
    def frame_rate(self) -> Fraction | None:
        """Average frames in a second; ``None``: the file does not say."""
        return self._codec.frame_rate

    @property
    def orientation(self) -> int:
        """EXIF number, 1 to 8, of the coded frames' orientation."""
        return self._metadata.orientation

    @property
    def rotation(self) -> int:
        """Degrees clockwise, 0, 90, 180 or 270, that turn the coded frames upright."""
        return rotation(self._metadata.orientation)


class ImagePackets(VideoPackets):
    """The packet of one image. Made by :func:`~spdl_media.demux_image`.

    Size and pixel format are those of the container, or of the header of a JPEG, PNG, WebP or BMP, which is
    read when they are asked for. Of other formats that open no container they are 0 and ``None``.

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
    """Packets of an audio stream. Made by :func:`~spdl_media.demux_audio`.

    Picklable and reusable; ``packets[a:b]`` shares memory.

    Thread safety: immutable, free to share.
    """

    __slots__ = ()

    @property
    def sample_rate(self) -> int:
        """Samples of one channel in a second."""
        return self._codec.sample_rate

    @property
    def num_channels(self) -> int:
        """Number of channels."""
        return self._codec.num_channels


Packets: TypeAlias = AudioPackets | VideoPackets | ImagePackets


def av_packets(packets: Packets) -> tuple[AvPacket, ...]:
    """FFmpeg's packets behind ours. They are shared between threads: decoders read them only."""
    # A still is the caller's own memory, without the padding that decoders need; it is copied, which takes
    # one part in a hundred of the time that decoding does.
    if isinstance(packets, ImagePackets):
        return tuple(with_data(packet, _padded(packet)) for packet in packets._packets)
    return packets._packets


def coded_image(packets: ImagePackets) -> memoryview:
    """The data of the first packet of an image, without a copy and without padding."""
    return memoryview(packets._packets[0])


def padded_image(packets: ImagePackets) -> AvPacket | None:
    """The data of an image as decoders may read it, without times; ``None``: it is not one packet."""
    if len(packets._packets) != 1:
        return None
    return av.Packet(_padded(packets._packets[0]))  # type: ignore[arg-type]  # any buffer will do


def metadata_of(packets: Packets) -> PacketMetadata:
    return packets._metadata


def cut_short_error(packets: Packets, config: DecodeConfig) -> DecodeError | None:
    """The error for packets whose file is known to be cut short, if these options call for one."""
    clause = packets._metadata.incomplete
    if clause is None or config.on_corrupt != "raise":
        return None
    how = "cut short" if clause.startswith("the data ends") else "damaged"
    return DecodeError(
        f"the {packets.codec.name} data is {how}: {clause}. decode_config(on_corrupt='keep') decodes what is "
        "there, as far as the decoder can",
        source=packets.source,
    )


def discarded_pts(packets: Packets) -> frozenset[int]:
    """Timestamps of frames that an edit list hides."""
    return packets._discarded


# FFmpeg's decoders read up to 64 bytes past the end of a packet and want zeros there. PyAV adds none to
# the memory that it is given: MPEG-4 then reports damage in one run and not in the next, and lossless
# WebP that ends with a page of memory crashes.
_PADDING = bytes(64)


def _padded(data: AvPacket | bytes) -> memoryview:
    """A copy of a packet's data that can be read past its end."""
    return memoryview(b"".join((data, _PADDING)))[: -len(_PADDING)]


# What a packet has beside its data and side data, and its time base, which is that of the stream.
_FIELDS = ("pts", "dts", "duration", "is_keyframe", "is_corrupt")

# One picklable row a packet: data, the fields above, side data by type.
_Row: TypeAlias = tuple[bytes, list[Any], list[tuple[str, bytes]]]

# PyAV lists their names in the order of FFmpeg's numbers.
_SIDE_DATA_TYPES = get_args(PktSideDataT)


def _to_row(packet: AvPacket) -> _Row:
    side_data = [(entry.data_type, bytes(entry)) for entry in packet.iter_sidedata()]
    return bytes(packet), [getattr(packet, name) for name in _FIELDS], side_data


def _from_row(row: _Row, time_base: Fraction) -> AvPacket:
    data, values, side_data = row
    packet = make_packet(_padded(data), time_base)
    for name, value in zip(_FIELDS, values, strict=True):
        setattr(packet, name, value)
    # Palettes, skipped samples and the like come with packets, and decoders need them.
    for kind, content in side_data:
        entry = PacketSideData(_SIDE_DATA_TYPES.index(kind), len(content))  # type: ignore[call-arg]  # stubs lack it
        entry.update(content)
        packet.set_sidedata(entry)
    return packet


def make_packet(data: bytes | memoryview, time_base: Fraction) -> AvPacket:
    """One packet over the given memory, which it keeps alive and does not copy."""
    packet: AvPacket = av.Packet(data)  # type: ignore[arg-type]  # any buffer will do
    packet.time_base = time_base
    packet.is_keyframe = True
    return packet


def copy_packet(packet: AvPacket) -> AvPacket:
    """A packet of its own: filters move the data out of what they are given, and some write into it."""
    return with_data(packet, bytes(packet))


def with_data(packet: AvPacket, data: bytes | memoryview) -> AvPacket:
    """A packet that differs in its data alone, which it keeps alive and does not copy."""
    copy = make_packet(data, packet.time_base)
    for name in _FIELDS:
        setattr(copy, name, getattr(packet, name))
    for entry in packet.iter_sidedata():
        copy.set_sidedata(entry)
    return copy


def _unpickle(
    cls: type[_Packets[Any]],
    rows: Iterable[_Row],
    codec: Codec,
    metadata: PacketMetadata,
    discarded: frozenset[int],
) -> _Packets[Any]:
    packets = [_from_row(row, codec.time_base) for row in rows]
    return cls(packets, codec, metadata, discarded)
