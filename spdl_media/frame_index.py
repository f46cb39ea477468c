"""Index of a video: its frames, and the key frame at which decoding of each has to begin."""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from spdl_media._ffmpeg import AvPacket, ffmpeg_log
from spdl_media._picture_decoder import PictureDecoder
from spdl_media.codec import VideoCodec, needs_first_packet, usual_duration
from spdl_media.coded_headers import may_have_fields
from spdl_media.coded_units import is_gradual
from spdl_media.config import DecodeConfig
from spdl_media.destination import write_whole
from spdl_media.errors import DemuxError, SourceError
from spdl_media.packet_table import NO_TIME, PacketTable, Ticks
from spdl_media.packets import PacketMetadata
from spdl_media.timing import Seconds, parse_time, seconds_of, tick_at, ticks_to_seconds

# Codecs whose packets are one frame each, with the packet's timestamp.
_ONE_EACH = frozenset(
    "av1 dnxhd dvvideo ffv1 ffvhuff h263 h264 hevc huffyuv mjpeg mpeg1video mpeg2video mpeg4 png prores "
    "rawvideo utvideo v210 vp8 vp9".split()
)

# Formats without packet boundaries.
_WITHOUT_PACKETS = ("mpegts", "mpeg", "h264")

Restart = Callable[[], Iterable[AvPacket]]
"""Returns the packets of the stream from its start again."""


class Run(NamedTuple):
    """A run of consecutive packets to decode.

    Attributes:
        first: Number of its first packet, a key frame.
        last: Number of the last packet with a wanted frame.
        frames: Numbers of the wanted frames, in display order.
    """

    first: int
    last: int
    frames: list[int]


@dataclass(frozen=True, slots=True)
class FrameIndex:
    """The frames of a video in display order. Times are ticks of the stream's time base.

    Attributes:
        pts: Presentation timestamp of each frame.
        packets: Number of each frame's packet, in decoding order.
        keys: Numbers of the packets at which decoding can begin.
        key_pts: Presentation timestamps of these packets.
        key_dts: Decode timestamps of these packets, or :data:`NO_TIME`.
        end: Time at which the last frame ends.
        is_exact: Each packet is the frame of its timestamp, so packets that are not needed can be skipped.
        is_counted: Timestamps do not identify frames, so frames are counted from the start of the stream.
        time_base: Seconds per tick.
        zero: Second 0 of the container on FFmpeg's clock.
    """

    pts: Ticks
    packets: Ticks
    keys: Ticks
    key_pts: Ticks
    key_dts: Ticks
    end: int
    is_exact: bool
    is_counted: bool
    time_base: Fraction = Fraction(1)
    zero: Fraction = Fraction(0)

    def __len__(self) -> int:
        return len(self.pts)

    @property
    def first(self) -> int:
        """Number of the packet at which decoding of the whole stream begins."""
        return 0 if self.is_counted else int(self.keys[0])

    @property
    def nbytes(self) -> int:
        """Size of all arrays in bytes."""
        return sum(getattr(self, name).nbytes for name in _ARRAYS)

    def exact_seconds(self, ticks: int) -> Fraction:
        """Convert a timestamp to exact seconds on the container's clock."""
        return ticks_to_seconds(ticks, self.time_base, self.zero)

    def seconds(self, frames: Ticks) -> npt.NDArray[np.float64]:
        """Return the times of frames by number, rounded once; ``nan`` for frame -1 and without a time.

        Raises:
            IndexError: There is no such frame.
        """
        pts = self.pts[frames]
        exact = np.array(seconds_of(pts.ravel().tolist(), self.time_base, self.zero))
        return np.where((frames < 0) | (pts == NO_TIME), np.nan, exact.reshape(pts.shape))

    def check_times(self, source: str) -> None:
        """Check that the timestamps tell which frame is shown at a time.

        Raises:
            DemuxError: The timestamps decrease, or there are none.
        """
        back = np.flatnonzero(np.diff(self.pts, prepend=self.pts[:1]) < 0)
        if len(back) or NO_TIME in self.pts[:1]:
            where = f"step back at frame {back[0]}" if len(back) else "are not stated"
            raise DemuxError(
                f"the times of the frames {where}, so the frame at a time is unknown. Use frames by index, "
                "or write the file again with times: save_video(frame_rate=)",
                source=source,
            )

    def shown_at(self, times: Sequence[Seconds], source: str) -> list[int]:
        """Return the numbers of the frames that are shown at these times.

        Raises:
            DemuxError: The timestamps of the frames decrease, or there are none.
            ValueError: A time lies before the first frame or after the end, or is not a number.
        """
        self.check_times(source)
        ticks = [tick_at(parse_time(time), self.time_base, self.zero) for time in times]
        found: list[int] = (np.searchsorted(self.pts, ticks, "right") - 1).tolist()
        for time, tick, number in zip(times, ticks, found, strict=True):
            if number < 0 or tick > self.end:
                limits = (int(self.pts[0]), self.end) if len(self) else (0, 0)
                start, end = map(float, map(self.exact_seconds, limits))
                raise ValueError(
                    f"{source}: no frame is shown at {time} s: {len(self)} frames are shown from "
                    f"{start:.3f} s to {end:.3f} s"
                )
        return found

    def key_frames(self) -> list[int]:
        """Return the numbers of the frames at which decoding can begin."""
        if self.is_counted:
            return [0] if len(self) else []
        return np.flatnonzero(np.isin(self.packets, self.keys)).tolist()

    def runs(self, frames: list[int]) -> list[Run]:
        """Return the runs of packets to decode for these frame numbers, which are sorted and distinct.

        Raises:
            IndexError: There is no such frame. Not checked if the frames are counted.
        """
        if self.is_counted:
            return [Run(self.first, -1, frames)] if frames else []
        wanted = np.array(frames, np.int64)
        packets = self.packets[wanted]
        # A frame that follows a key frame but is shown before it may refer to frames before that key frame.
        by_packet = np.searchsorted(self.keys, packets, "right")
        by_time = np.searchsorted(self.key_pts, self.pts[wanted], "right")
        firsts = self.keys[np.maximum(np.minimum(by_packet, by_time) - 1, 0)].tolist()
        runs: list[Run] = []
        for frame, first, packet in zip(frames, firsts, packets.tolist(), strict=True):
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
    """Make the index of a stream. If packets do not identify its frames, the stream is decoded.

    Args:
        table: Timestamps and flags of the packets.
        codec: Codec of the stream.
        metadata: Metadata of the packets, for the decoder.
        config: How to decode.
        format: FFmpeg's names of the container's format.
        restart: Called if packets have to be decoded.

    Raises:
        SourceError: The source cannot be read.
        DecodeError: No decoder takes the stream.
    """

    def decoded(until: float = math.inf) -> list[int]:
        """Decode the stream; return the pts of its frames, up to the first at or after ``until``.

        Raises:
            SourceError: The source cannot be read.
        """
        decoder = PictureDecoder(codec, metadata, replace(config, on_corrupt="keep"))
        decoder.needs_key = bool(table.is_key.any())
        found: list[int] = []
        with ffmpeg_log():
            for frame in chain.from_iterable(map(decoder.decode, chain(restart(), (None,)))):
                found.append(NO_TIME if frame.pts is None else frame.pts)
                if found[-1] >= until:
                    break
        return found

    if needs_first_packet(codec):
        table.is_key[1:] = False
    if not _is_one_each(table, codec, format):
        return _decoded_index(table, codec, decoded())
    shown = table.is_shown.copy()
    first_key = int(np.argmax(table.is_key))
    start, *second = table.pts[first_key : first_key + 2].tolist()
    # In MP4 and MKV, too, a packet may be a field. That of a key frame is followed by the other one.
    if may_have_fields(codec) and second > [start]:
        found = decoded(*second)
        if start in found and second[0] not in found:
            return _decoded_index(table, codec, decoded())
    leading = (table.pts < start) & ~table.is_key
    leading[:first_key] = True
    packets_again = restart() if codec.name == "h264" else ()
    first = next(filter(attrgetter("is_keyframe"), packets_again), None)
    if (leading & shown).any() or (first is not None and is_gradual(first, codec)):
        # Frames shown before the first key frame, or until a first refresh is complete, may refer to
        # missing frames; only decoding tells.
        found = decoded(start)
        shown &= np.isin(table.pts, found) | (table.pts >= max([start, *found]))
    packets = np.flatnonzero(shown)
    packets = packets[np.argsort(table.pts[packets])]
    pts = table.pts[packets]
    end = int(pts[-1] if len(pts) else 0) + (table.last_duration or usual_duration(codec))
    return _with_keys(table, pts, packets, end, is_exact=True, counted=False)


def _is_one_each(table: PacketTable, codec: VideoCodec, format: str) -> bool:
    """Whether each packet is the frame of its own timestamp."""
    if codec.name not in _ONE_EACH or table.repeats or not table.is_key.any():
        return False
    if format in _WITHOUT_PACKETS and may_have_fields(codec):
        return False  # FFmpeg's parser may make each field of a frame a packet
    if _goes_back(table) or _is_joined(table):
        return False
    return len(np.unique(table.pts)) == len(table) and bool((table.pts != NO_TIME).all())


def _goes_back(table: PacketTable) -> bool:
    """Whether an edit list of several pieces goes back in time, so that a time may mean several packets."""
    return not table.is_shown.all() and bool((np.diff(table.dts) < 0).any())


def _is_joined(table: PacketTable) -> bool:
    """Whether a frame is shown before one that precedes its key frame, as in joined files."""
    keys, latest = np.flatnonzero(table.is_key), np.maximum.accumulate(table.pts)
    after = np.flatnonzero(np.cumsum(table.is_key) > 1)
    last_key = keys[np.searchsorted(keys, after, "right") - 1]
    return bool((table.pts[after] < latest[last_key - 1]).any())


def _with_keys(
    table: PacketTable, pts: Ticks, packets: Ticks, end: int, *, is_exact: bool, counted: bool
) -> FrameIndex:
    keys = np.flatnonzero(table.is_key)
    # Decoding cannot begin at a key frame that is shown before an earlier key frame.
    keys = keys[table.pts[keys] >= np.maximum.accumulate(table.pts[keys])]
    times = table.pts[keys], table.dts[keys]
    return FrameIndex(pts, packets, keys, *times, end, is_exact, counted)


def _decoded_index(table: PacketTable, codec: VideoCodec, found: list[int]) -> FrameIndex:
    """Make the index from the pts of decoded frames."""
    pts = np.array(found, np.int64)
    end = int(pts.max(initial=0)) + (table.last_duration or usual_duration(codec))
    has_times = bool((np.diff(pts) > 0).all() and (pts != NO_TIME).all() and table.is_key.any())
    stated, first = np.unique(table.pts, return_index=True)
    # If two fields of H.264 are two packets, the second one has no timestamp.
    has_times &= codec.name == "h264" or bool((table.pts != NO_TIME).all())
    has_times &= not _goes_back(table)
    if has_times and np.isin(pts, stated).all():
        packets = first[np.searchsorted(stated, pts)]
        return _with_keys(table, pts, packets, end, is_exact=False, counted=False)
    return _with_keys(table, pts, np.arange(len(pts)), end, is_exact=False, counted=True)


# An index file is this signature, a checksum of the rest, and 64-bit integers: the identity of the video, the
# scalar fields, the lengths of the arrays, and the arrays.
_MAGIC = b"spdlidx1"
_ARRAYS = ("pts", "packets", "keys", "key_pts", "key_dts")

HEADER = 1 << 16
"""Bytes at the start of a video whose checksum, with the file's size, ties an index to the video."""


Identity: TypeAlias = dict[str, int]
"""The video of an index, by name: the file's size, the checksum of its first bytes, the stream's index."""


def save(path: str | os.PathLike[str], index: FrameIndex, identity: Identity) -> None:
    """Write an index with the identity of its video. The file appears only once it is complete.

    Raises:
        WriteError: The file cannot be written.
    """
    arrays = [getattr(index, name) for name in _ARRAYS]
    head = [*identity.values(), index.end, index.is_exact, index.is_counted, *map(len, arrays)]
    body = np.concatenate([np.array(head, np.int64), *arrays]).astype("<i8").tobytes()
    write_whole(path, _MAGIC + zlib.crc32(body).to_bytes(8, "little") + body)


def load(path: str | os.PathLike[str], source: str, identity: Identity) -> FrameIndex:
    """Read the index of a video.

    Args:
        path: Path of the index file.
        source: Name of the video, for messages.
        identity: The identity that the index must have been saved with.

    Raises:
        SourceError: The file cannot be read, is not an index, is damaged, or belongs to another video.
    """

    def refused(text: str) -> SourceError:
        remedy = "Write it again: VideoFile(src).save_index(path)"
        return SourceError(f"{text}. {remedy}", source=os.fspath(path))

    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise refused(f"the index cannot be read: {error.strerror or error}") from error
    body = memoryview(data)[16:]
    if data[:16] != _MAGIC + zlib.crc32(body).to_bytes(8, "little") or not body:
        raise refused("this is not an index of a video, or it is damaged")
    values = np.frombuffer(body, "<i8").astype(np.int64)
    stated = dict(zip(identity, values.tolist(), strict=False))
    if stated != identity:
        raise refused(f"the index is not that of {source}: it is for {stated}, not {identity}")
    end, is_exact, is_counted, *lengths = values[3:11].tolist()
    arrays = np.split(values[11:], np.cumsum(lengths)[:-1])
    fields: dict[str, Any] = dict(zip(_ARRAYS, arrays, strict=True))
    return FrameIndex(**fields, end=end, is_exact=bool(is_exact), is_counted=bool(is_counted))
