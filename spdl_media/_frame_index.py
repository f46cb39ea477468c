"""Which frames a video has, and where decoding has to begin for each of them."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from spdl_media._checks import as_int
from spdl_media._ffmpeg import AvPacket, ffmpeg_log
from spdl_media._h264_fields import may_have_fields
from spdl_media._mp4_tables import Ticks
from spdl_media._packet_table import NO_TIME, PacketTable
from spdl_media._picture_decoder import PictureDecoder
from spdl_media.codec import VideoCodec, usual_duration
from spdl_media.config import DecodeConfig
from spdl_media.errors import SourceError
from spdl_media.packets import PacketMetadata
from spdl_media.timing import ticks_to_seconds

# Codecs of which each packet is one frame, with the packet's timestamp.
_ONE_EACH = frozenset(
    "av1 dnxhd dvvideo ffv1 ffvhuff h263 h264 hevc huffyuv mjpeg mpeg1video mpeg2video mpeg4 png prores "
    "rawvideo utvideo v210 vp8 vp9".split()
)

# In these FFmpeg finds the ends of packets itself, and gives each field of H.264 as one.
_WITHOUT_PACKETS = ("mpegts", "mpeg", "h264")

Restart = Callable[[], Iterable[AvPacket]]
"""The packets of the stream from its start, once more."""


class Run(NamedTuple):
    """A run of packets that is decoded at one go.

    Attributes:
        first: Number of its first packet, a key frame.
        last: Number of the last packet of which a frame is wanted.
        frames: The frames that are wanted of it, in the order of display.
    """

    first: int
    last: int
    frames: list[int]


@dataclass(frozen=True, slots=True)
class FrameIndex:
    """The frames of a video in the order of display.

    Attributes:
        pts: Ticks of each.
        packets: Number of the packet of each, in the order of decoding.
        keys: Numbers of the packets at which decoding can begin.
        key_pts: Ticks of their frames.
        key_dts: Ticks of decoding, or :data:`NO_TIME`.
        num_packets: Of the stream.
        end: Ticks at which the last frame ends.
        is_exact: Each packet is the frame of its timestamp, so that others can be left out.
        is_counted: Timestamps do not name the frames, which are counted from the start of the stream.
    """

    pts: Ticks
    packets: Ticks
    keys: Ticks
    key_pts: Ticks
    key_dts: Ticks
    num_packets: int
    end: int
    is_exact: bool
    is_counted: bool

    def __len__(self) -> int:
        return len(self.pts)

    @property
    def first(self) -> int:
        """Number of the packet at which the decoding of the stream begins."""
        return 0 if self.is_counted else int(self.keys[0])

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(getattr(self, name).nbytes for name in _ARRAYS)

    def key_frames(self) -> list[int]:
        """Numbers of the frames at which decoding can begin."""
        if self.is_counted:
            return [0] if len(self) else []
        found: list[int] = np.flatnonzero(np.isin(self.packets, self.keys)).tolist()
        return found

    def starts(self, frames: Ticks) -> Ticks:
        """The key frame, as a place in :attr:`keys`, from which each of the frames is decoded."""
        # A frame that is shown before the key frame in front of it may refer to what lies before that one.
        by_packet = np.searchsorted(self.keys, self.packets[frames], "right")
        by_time = np.searchsorted(self.key_pts, self.pts[frames], "right")
        starts: Ticks = np.maximum(np.minimum(by_packet, by_time) - 1, 0)
        return starts

    def runs(self, frames: list[int]) -> list[Run]:
        """What has to be decoded for these frames, which are sorted and distinct."""
        if self.is_counted:
            return [Run(self.first, self.num_packets, frames)] if frames else []
        wanted = np.array(frames, np.int64)
        firsts = self.keys[self.starts(wanted)].tolist()
        runs: list[Run] = []
        for frame, first, packet in zip(frames, firsts, self.packets[wanted].tolist(), strict=True):
            if runs and first <= runs[-1].last:
                runs[-1].frames.append(frame)
                runs[-1] = runs[-1]._replace(last=max(runs[-1].last, packet))
            else:
                runs.append(Run(first, packet, [frame]))
        return runs


def make_index(
    table: PacketTable,
    codec: VideoCodec,
    metadata: PacketMetadata,
    config: DecodeConfig,
    format: str,
    restart: Restart,
) -> FrameIndex:
    """Make the index of a stream. Where packets do not tell its frames, they are decoded.

    Args:
        table: What the packets say.
        codec: Of the stream.
        metadata: Of the packets, for the decoder.
        config: How to decode.
        format: FFmpeg's names of the container's format.
        restart: Called where packets have to be decoded.

    Raises:
        SourceError: The source cannot be read.
        DecodeError: No decoder takes the stream.
    """
    keep = replace(config, on_corrupt="keep")

    def decoder() -> PictureDecoder:
        decoder = PictureDecoder(codec, metadata, keep)
        decoder.needs_key = bool(table.is_key.any())
        return decoder

    if not _is_one_each(table, codec, format):
        return _decoded_index(table, codec, _decoded(restart(), decoder()))
    shown = table.is_shown.copy()
    first_key = int(np.argmax(table.is_key))
    start = int(table.pts[first_key])
    leading = table.pts < start
    leading[:first_key] = True
    if (leading & shown).any():
        # Frames before the first key frame refer to what is not there, or not; the decoder knows.
        found = _decoded(restart(), decoder(), until=start)
        shown &= ~leading | np.isin(table.pts, np.array(found, np.int64))
    packets = np.flatnonzero(shown)
    packets = packets[np.argsort(table.pts[packets])]
    end = int(table.pts.max()) + (table.last_duration or usual_duration(codec))
    return _with_keys(table, table.pts[packets], packets, end, is_exact=True)


def empty_index() -> FrameIndex:
    """The index of a stream without packets."""
    none = np.zeros(0, np.int64)
    return FrameIndex(none, none, none, none, none, 0, 0, is_exact=False, is_counted=True)


def _is_one_each(table: PacketTable, codec: VideoCodec, format: str) -> bool:
    """Whether each packet is the frame of its own timestamp."""
    if codec.name not in _ONE_EACH or table.repeats or not table.is_key.any():
        return False
    if codec.name == "mpeg4" and b"DivX" in (codec.extradata or b""):
        return False  # there may be two frames in a packet
    if codec.name == "h264" and format in _WITHOUT_PACKETS and may_have_fields(codec.extradata):
        return False
    return bool((table.pts != NO_TIME).all()) and len(np.unique(table.pts)) == len(table)


def _with_keys(
    table: PacketTable, pts: Ticks, packets: Ticks, end: int, *, is_exact: bool
) -> FrameIndex:
    keys = np.flatnonzero(table.is_key)
    # One that is shown before an earlier one is no place to begin at.
    rising = table.pts[keys] >= np.maximum.accumulate(table.pts[keys])
    keys = keys[rising]
    return FrameIndex(
        pts,
        packets,
        keys,
        table.pts[keys],
        table.dts[keys],
        len(table),
        end,
        is_exact,
        is_counted=False,
    )


def _decoded(
    packets: Iterable[AvPacket], decoder: PictureDecoder, until: int | None = None
) -> list[int]:
    """Ticks of the frames that come out of packets, up to the first one at or after ``until``."""
    found: list[int] = []
    try:
        with ffmpeg_log():
            for packet in chain(packets, (None,)):
                if packet is not None and packet.is_discard and packet.pts is not None:
                    decoder.discarded |= {packet.pts}
                for frame in decoder.decode(packet):
                    found.append(NO_TIME if frame.pts is None else frame.pts)
                    if until is not None and found[-1] >= until:
                        return found
    finally:
        decoder.close()
    return found


def _decoded_index(table: PacketTable, codec: VideoCodec, found: list[int]) -> FrameIndex:
    """The index of frames that had to be decoded to be known."""
    pts = np.array(found, np.int64)
    end = int(pts.max(initial=0)) + (table.last_duration or usual_duration(codec))
    has_times = bool((np.diff(pts) > 0).all() and (pts != NO_TIME).all() and table.is_key.any())
    stated, first = np.unique(table.pts, return_index=True)
    if has_times and (table.pts != NO_TIME).all() and np.isin(pts, stated).all():
        packets = first[np.searchsorted(stated, pts)]
        return _with_keys(table, pts, packets, end, is_exact=False)
    keys, numbers = np.flatnonzero(table.is_key), np.arange(len(pts))
    return FrameIndex(
        pts,
        numbers,
        keys,
        table.pts[keys],
        table.dts[keys],
        len(table),
        end,
        is_exact=False,
        is_counted=True,
    )


def seconds_of(pts: Ticks, time_base: Fraction, zero: Fraction) -> npt.NDArray[np.float64]:
    """The times of timestamps on the container's clock, as exact as floats are; ``nan`` for none."""
    scale = time_base.denominator * zero.denominator
    factor, shift = time_base.numerator * zero.denominator, zero.numerator * time_base.denominator
    most = max(map(abs, (int(pts.min(initial=0)), int(pts.max(initial=0)))))
    # Of whole numbers that floats hold exactly, the quotient is that of the fractions.
    if max(most * factor + abs(shift), scale) < 1 << 53:
        return (pts * factor - shift) / scale
    exact = [ticks_to_seconds(one, time_base, zero) for one in pts.ravel().tolist()]
    seconds = np.array(exact, np.float64).reshape(pts.shape)
    return np.where(pts == NO_TIME, np.nan, seconds)


def frame_numbers(indices: Iterable[object], count: int, source: str) -> list[int]:
    """Numbers of frames, of which negative ones count back from the end.

    Raises:
        IndexError: There is no such frame.
        TypeError: One is no number, or they are no sequence.
    """
    if isinstance(indices, str) or not isinstance(indices, Iterable):
        raise TypeError(f"frames are asked for by int, slice or a sequence of int, not {indices!r}")
    numbers = []
    for index in indices:
        number = as_int(index)
        if number is None:
            raise TypeError(f"a frame is asked for by an int, not {index!r}")
        if not -count <= number < count:
            raise IndexError(f"{source}: there is no frame {number} among {count} frames")
        numbers.append(number % count)
    return numbers


# The file of an index: this, a line of JSON, and the arrays one behind the other.
_MAGIC = b"spdl_media frame index 1\n"
_ARRAYS = ("pts", "packets", "keys", "key_pts", "key_dts")
_VALUES = ("num_packets", "end", "is_exact", "is_counted")

_HEADER = 1 << 16
"""Bytes at the start of a video by which its index knows it, beside its size."""


def checksum(head: bytes | memoryview) -> int:
    """The checksum of the first bytes of a video."""
    return zlib.crc32(head[:_HEADER])


def save(path: str | os.PathLike[str], index: FrameIndex, **belongs_to: int) -> None:
    """Write an index, and what it belongs to, so that no half file stands at the path.

    Raises:
        OSError: It cannot be written.
    """
    target = Path(path)
    lengths = {name: len(getattr(index, name)) for name in _ARRAYS}
    values = {name: getattr(index, name) for name in _VALUES}
    body = b"".join(getattr(index, name).astype("<i8").tobytes() for name in _ARRAYS)
    header = {"of": belongs_to, "arrays": lengths, "values": values, "checksum": zlib.crc32(body)}
    beside = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        beside.write_bytes(_MAGIC + json.dumps(header).encode() + b"\n" + body)
        beside.replace(target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def load(path: str | os.PathLike[str], source: str, **belongs_to: int) -> FrameIndex:
    """Read the index of a video.

    Args:
        path: Of the index.
        source: The video, for messages.
        **belongs_to: What the index must have been saved with.

    Raises:
        SourceError: It cannot be read, is none, is damaged, or belongs to another video.
    """
    name = os.fspath(path)
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        text = f"the index cannot be read: {error.strerror or error}"
        raise SourceError(text, source=name) from error
    if not data.startswith(_MAGIC):
        raise SourceError(
            "this is no index of a video, or one of another version. Write it anew: "
            "VideoFile(src).save_index(path)",
            source=name,
        )
    try:
        end = data.index(b"\n", len(_MAGIC)) + 1
        header: dict[str, Any] = json.loads(data[len(_MAGIC) : end])
        if zlib.crc32(memoryview(data)[end:]) != header["checksum"]:
            raise ValueError("its checksum is wrong")
        arrays: dict[str, Any] = {}
        for key in _ARRAYS:
            arrays[key] = np.frombuffer(data, "<i8", header["arrays"][key], end)
            end += arrays[key].nbytes
        index = FrameIndex(**arrays, **{key: header["values"][key] for key in _VALUES})
        of = header["of"]
    except (KeyError, TypeError, ValueError) as error:
        raise SourceError(f"the index is damaged: {error}", source=name) from error
    for key, found in belongs_to.items():
        if of.get(key) != found:
            raise SourceError(
                f"the index is not that of {source}: it was made for {key.replace('_', ' ')} "
                f"{of.get(key)}, and that is {found}. If the video has changed, write the index anew: "
                "VideoFile(src).save_index(path)",
                source=name,
            )
    return index
