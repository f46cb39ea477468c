"""Times, key frames and places of the packets of a stream, from the tables of an MP4 or from reading packets.

FFmpeg's index of an MP4 has only decode timestamps, and for a fragmented file only the first fragments, so
its own tables are used. No packet is read for that.

See:
    ISO/IEC 14496-12, 8.6 (times, sync samples), 8.7 (sizes and offsets), 8.8 (fragments).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import av
import numpy as np
import numpy.typing as npt

from spdl_media._ffmpeg import AvPacket
from spdl_media.codec import VideoCodec
from spdl_media.coded_units import is_hidden
from spdl_media.parts import Read, boxes, read_boxes

Ticks: TypeAlias = npt.NDArray[np.int64]
Mask: TypeAlias = npt.NDArray[np.bool_]

NO_TIME = -(1 << 63)
"""Value for a timestamp that the file does not state."""

# For these codecs some writers omit the list of key frames, which means that all are. The packets then tell.
_TOLD_BY_PACKETS = frozenset("av1 h264 hevc mpeg1video mpeg2video vp8 vp9".split())

# MPEG-4 packets below this size repeat the previous frame and output none.
_REPEATS = 16

# Frames are reordered by fewer than this many packets, so an edit list that hides frames at one end of the
# video shows in so many packets there.
_EDGE = 32
_NUM_SPOTS = 16  # further entries of FFmpeg's index that are compared with the tables

_MOST_HEADERS = 1024  # bytes


@dataclass(frozen=True, slots=True)
class PacketTable:
    """Packets of a video stream in decoding order.

    Attributes:
        pts: Presentation timestamps in ticks, or :data:`NO_TIME`.
        dts: Decode timestamps in ticks, or :data:`NO_TIME`.
        is_key: Whether decoding can begin at the packet.
        is_shown: Whether the packet outputs a frame, hidden neither by an edit list nor by its header.
        last_duration: Duration in ticks of the packet that is shown last; 0: not stated.
        repeats: Some packets may only repeat the previous frame.
    """

    pts: Ticks
    dts: Ticks
    is_key: Mask
    is_shown: Mask
    last_duration: int = 0
    repeats: bool = False

    def __len__(self) -> int:
        return len(self.pts)


def read_table(codec: VideoCodec, packets: Iterable[AvPacket]) -> PacketTable:
    """Make the table of packets by reading them. They are not decoded.

    Raises:
        SourceError: The source of the packets cannot be read.
    """
    rows: list[tuple[int, ...]] = []
    for packet in packets:
        pts = NO_TIME if packet.pts is None else packet.pts
        dts = NO_TIME if packet.dts is None else packet.dts
        is_shown = not packet.is_discard and not is_hidden(packet, codec)
        rows.append((pts, dts, packet.duration or 0, packet.size, packet.is_keyframe, is_shown))
    all_pts, all_dts, durations, sizes, *columns = np.array(rows, np.int64).reshape(-1, 6).T
    is_key, shown = (column.astype(np.bool_) for column in columns)
    repeats = codec.name == "mpeg4" and bool((sizes < _REPEATS).any())
    duration = int(durations[_last(all_pts, shown)]) if rows else 0
    return PacketTable(all_pts, all_dts, is_key, shown, duration, repeats)


def mp4_table(
    stream: Any, format: str, codec: VideoCodec, read: Read, size: int
) -> PacketTable | None:
    """Make the table of packets from the tables of an MP4 or MOV, without reading a packet.

    Args:
        stream: The stream of the open file.
        format: FFmpeg's names of the container's format.
        codec: Codec of the stream.
        read: Called as ``read(start, size)``; returns bytes of the file.
        size: Size of the file.

    Returns:
        The table; ``None``: the file is not MP4 or MOV, or its packets have to be read.

    Raises:
        SourceError: ``read`` cannot read the file.
    """
    # Cameras mark key frames of these codecs wrongly; FFmpeg parses the packets instead.
    if not format.startswith("mov") or codec.name in ("mpeg4", "h263"):
        return None
    samples = read_samples(read, size, stream.id)
    if samples is None or not len(samples.dts):
        return None
    if codec.name in _TOLD_BY_PACKETS and len(samples.dts) > 1 and samples.is_key.all():
        return None
    table = _on_ffmpeg_clock(samples, stream)
    if table is None:
        return None
    # Cameras may stop after the headers of a frame. Packets without a frame are small.
    place, last = int(samples.places[-1]), int(samples.sizes[-1])
    if last <= _MOST_HEADERS and len(table) == len(samples.dts):
        table.is_shown[-1] &= not is_hidden(av.Packet(bytes(read(place, last))), codec)
    # FFmpeg computes the start time from the same tables. It must lie in the first frame, where an edit may
    # begin; otherwise FFmpeg has shifted the timestamps differently.
    start = stream.start_time
    is_right = start is None or np.count_nonzero(table.pts[table.is_shown] <= start) == 1
    # If frames are reordered, pts that equal dts are not valid.
    is_unset = codec.reorder_depth > 0 and bool((table.pts == table.dts)[:17].all())
    return table if is_right and not is_unset else None


def _on_ffmpeg_clock(samples: Samples, stream: Any) -> PacketTable | None:
    """Put samples on FFmpeg's clock, with edit lists applied; ``None`` if FFmpeg's index disagrees."""
    entries, total = stream.index_entries, len(samples.dts)
    count = len(entries)
    if not count:
        return None
    # FFmpeg shifts timestamps so that no dts is later than its pts.
    shifts = samples.offsets + max(0, -int(samples.offsets.min()))
    first = entries[0].timestamp - int(samples.dts[0])
    edges = *range(min(_EDGE, count)), *range(max(0, count - _EDGE), count)
    spots = [(i, entries[i]) for i in {*edges, *range(0, count, max(1, count // _NUM_SPOTS))}]
    # For a fragmented file, FFmpeg's index has only the first fragments.
    if (count == total or (count < total and not samples.is_listed)) and all(
        (one.is_discard, one.pos, one.timestamp)
        == (False, samples.places[i], samples.dts[i] + first)
        for i, one in spots
    ):
        dts, shown = samples.dts + first, np.ones(total, np.bool_)
        last = int(samples.durations[np.argmax(dts + shifts)])
        return PacketTable(dts + shifts, dts, samples.is_key, shown, last)
    if not samples.is_listed:
        return None
    # An edit list was applied: find the sample of each entry, as samples may be left out or repeated.
    rows = np.array([(one.timestamp, one.pos, one.is_discard) for one in entries])
    order = np.argsort(samples.places)
    nearest = np.searchsorted(samples.places, rows[:, 1], sorter=order).clip(max=total - 1)
    found = order[nearest]
    if (samples.places[found] != rows[:, 1]).any():
        return None
    dts, is_shown = rows[:, 0], rows[:, 2] == 0
    pts = dts + shifts[found]
    last = int(samples.durations[found[_last(pts, is_shown)]])
    return PacketTable(pts, dts, samples.is_key[found], is_shown, last)


def _last(pts: Ticks, is_shown: Mask) -> np.intp:
    """Return the number of the packet that is shown last."""
    return np.argmax(np.where(is_shown, pts, NO_TIME))


# The tables of an MP4: where its samples lie in the file, and when they are decoded and shown.

# For comparison: a file of many hours in fragments of a second has some ten thousand of them.
_MAX_FRAGMENTS = 1 << 18

# Flags of a sample in a fragment: not a sync sample, or it depends on others.
_IS_NO_KEY = 0x01010000


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of a track in decoding order, before edit lists.

    Attributes:
        dts: Decode timestamps in ticks, counted from the first sample, or as fragments state them.
        offsets: Presentation minus decode timestamps.
        durations: Ticks to the next sample in decoding order.
        places: Offset of each sample in the file, in bytes.
        sizes: Number of bytes of each sample.
        is_key: Whether decoding can begin at the sample.
        is_listed: The samples are from the tables of the track, not from fragments.
    """

    dts: Ticks
    offsets: Ticks
    durations: Ticks
    places: Ticks
    sizes: Ticks
    is_key: Mask
    is_listed: bool = True


def read_samples(read: Read, size: int, track_id: int) -> Samples | None:
    """Read the tables of a track.

    Args:
        read: Called as ``read(start, size)``; returns bytes of the file.
        size: Size of the file.
        track_id: ID in the header of the track.

    Returns:
        The samples; ``None``: there is no such track or more than one, its tables contradict each other, or
        it has samples both in tables and in fragments.

    Raises:
        SourceError: ``read`` cannot read the file.
    """
    try:
        moov, runs, defaults = memoryview(b""), [], b""
        # Walking the boxes reads only their headers; a fragment is two boxes.
        for kind, start, end in read_boxes(read, 0, size, 2 * _MAX_FRAGMENTS):
            if kind == b"moov":
                moov = memoryview(read(start, end - start))
                if next(boxes_at(moov, "mvex"), None) is None:
                    break  # no fragments follow, so the rest of the file is not walked
                settings = {
                    bytes(one[4:8]): bytes(one[12:24]) for one in boxes_at(moov, "mvex/trex")
                }
                # Default duration, size and flags of a sample.
                defaults = settings.get(track_id.to_bytes(4, "big"), b"")
            elif kind == b"moof":
                view = memoryview(read(start, end - start))
                runs += _fragment(view, start - 8, track_id, defaults, size)
        samples = track_samples(track_with_id(moov, track_id), size)
        if not runs:
            return samples
        return None if len(samples.dts) else _join_runs(runs)
    # Boxes are missing, too short, or have impossible values.
    except (StopIteration, struct.error, ValueError, IndexError, OverflowError):
        return None


def boxes_at(view: memoryview, path: str) -> Iterator[memoryview]:
    """Yield the contents of the boxes at a path below this one, such as ``"mdia/minf/stbl"``.

    Raises:
        struct.error: The data ends inside the header of a box.
    """
    name, _, rest = path.partition("/")
    for kind, start, end in boxes(view):
        if kind == name.encode():
            content = view[start:end]
            yield from boxes_at(content, rest) if rest else (content,)


def table_at(view: memoryview, path: str, dtype: str, skip: int = 0) -> Any:
    """Return the rows of a table, which follow its version and count; empty if the table is missing.

    Raises:
        struct.error: The box is too short for a count.
        ValueError: It holds fewer rows than it states.
    """
    content = next(boxes_at(view, path), None)
    if content is None:
        return np.empty(0, dtype)
    (count,) = struct.unpack_from(">I", content, 4 + skip)
    return np.frombuffer(content, dtype, count, 8 + skip)


def number_at(view: memoryview, path: str) -> int:
    """Return the number behind the two times in a header: a track's ID, or ticks in a second.

    Raises:
        StopIteration, struct.error: The header is missing, or too short.
    """
    header = next(boxes_at(view, path))
    (number,) = struct.unpack_from(">I", header, 20 if header[0] == 1 else 12)
    return int(number)


def track_with_id(moov: memoryview, track_id: int) -> memoryview:
    """Return the box of the track with an ID in the index of an MP4.

    Raises:
        ValueError: There is none, or more than one.
        StopIteration, struct.error: A header of a track is missing, or too short.
    """
    (track,) = [one for one in boxes_at(moov, "trak") if number_at(one, "tkhd") == track_id]
    return track


def track_samples(track: memoryview, size: int) -> Samples:
    """Return the samples in the tables of a track, in a file of this size.

    Raises:
        StopIteration: A table is missing.
        struct.error: A table is too short.
        ValueError: The tables contradict each other, or the size of the file.
        IndexError: A key frame has a number that no sample has.
    """
    stbl = next(boxes_at(track, "mdia/minf/stbl"))
    same, count = struct.unpack_from(">II", next(boxes_at(stbl, "stsz")), 4)
    _check_fits(count, same, size)
    sizes = np.full(count, same) if same else table_at(stbl, "stsz", ">u4", 4).astype(np.int64)
    steps = table_at(stbl, "stts", ">u4,>u4")
    deltas = _repeated(steps["f1"], steps["f0"], count)
    shifts = table_at(stbl, "ctts", ">u4,>i4")
    offsets = _repeated(shifts["f1"], shifts["f0"], count) if len(shifts) else deltas * 0
    is_key = np.full(count, next(boxes_at(stbl, "stss"), None) is None)
    is_key[table_at(stbl, "stss", ">u4").astype(np.int64) - 1] = True
    return Samples(np.cumsum(deltas) - deltas, offsets, deltas, _places(stbl, sizes), sizes, is_key)


def _check_fits(count: int, sample_size: int, size: int) -> None:
    # Called before arrays of so many samples are made: a damaged count could request any amount of memory.
    if count * sample_size > size:
        raise ValueError("more samples than the file can hold")


def _repeated(values: Any, counts: Any, total: int) -> Ticks:
    if counts.sum(dtype=np.int64) != total:
        raise ValueError("tables of different lengths")
    return np.repeat(values.astype(np.int64), counts)


def _places(stbl: memoryview, sizes: Ticks) -> Ticks:
    """Return the file offsets of samples, which are contiguous in chunks."""
    chunks = table_at(stbl, "stco", ">u4")
    if not len(chunks):
        chunks = table_at(stbl, "co64", ">u8")
    runs = table_at(stbl, "stsc", ">u4,>u4,>u4")
    lengths = np.diff(runs["f0"].astype(np.int64) - 1, append=len(chunks))
    counts = np.repeat(runs["f1"].astype(np.int64), lengths)
    if len(counts) != len(chunks) or counts.sum() != len(sizes):
        raise ValueError("chunks that do not hold the samples")
    return _starts(sizes, chunks.astype(np.int64), counts)


def _starts(lengths: Ticks, starts: Ticks, counts: Ticks) -> Ticks:
    """Return the start of each item: runs of ``counts`` consecutive items begin at ``starts``."""
    # Starts without gaps between the runs, and the gap before each run.
    closed = np.cumsum(lengths) - lengths
    gaps = starts - closed[np.cumsum(counts) - counts]
    places: Ticks = closed + np.repeat(gaps, counts)
    return places


# Stated decode timestamp of the first sample; duration, size, flags and offset of each sample; file offset.
_Run: TypeAlias = tuple[int | None, Any, int]


def _fragment(view: memoryview, moof: int, track_id: int, defaults: bytes, size: int) -> list[_Run]:
    """Return the runs of samples of a track in a box ``moof`` at this offset of a file of this size."""
    runs: list[_Run] = []
    for traf in boxes_at(view, "traf"):
        header = next(boxes_at(traf, "tfhd"))
        flags, number = struct.unpack_from(">II", header)
        if number != track_id:
            continue
        words = iter(np.frombuffer(header, ">u4", offset=8).tolist())
        base = next(words) << 32 | next(words) if flags & 1 else moof
        if flags & 2:
            next(words)
        stated = zip((0x8, 0x10, 0x20), struct.unpack(">3I", defaults), strict=True)
        usual = [next(words) if flags & flag else default for flag, default in stated]
        tfdt = next(boxes_at(traf, "tfdt"), None)
        start = None if tfdt is None else struct.unpack_from(">Q" if tfdt[0] else ">I", tfdt, 4)[0]
        end = base
        for run in boxes_at(traf, "trun"):
            rows, position = _run_rows(run, usual, size)
            end = end if position is None else base + position
            if len(rows):
                runs.append((start, rows, end))
                start, end = None, end + int(rows[:, 1].sum())
    return runs


def _run_rows(run: memoryview, usual: list[int], size: int) -> tuple[Any, int | None]:
    """Return duration, size, flags and offset of each sample, and the position of the first, if stated."""
    flags, count = struct.unpack_from(">II", run)
    start, position, first = 8, None, None
    if flags & 1:
        ((position,), start) = struct.unpack_from(">i", run, start), start + 4
    if flags & 4:
        ((first,), start) = struct.unpack_from(">I", run, start), start + 4
    columns = [column for column in range(4) if flags & 0x100 << column]
    # Without a column of sizes, all samples have the default size, and at least one byte.
    _check_fits(count, 4 * len(columns) if 1 in columns else max(usual[1], 1), size)
    rows = np.empty((count, 4), np.int64)
    rows[:] = [*usual, 0]
    if columns:
        rows[:, columns] = np.frombuffer(run, ">u4", count * len(columns), start).reshape(count, -1)
        # Offsets of version 0 are unsigned in the standard, but files have negative ones.
        rows[:, 3] = rows[:, 3].astype(np.int32)
    if first is not None and count and not flags & 0x400:
        rows[0, 2] = first
    return rows, position


def _join_runs(runs: list[_Run]) -> Samples:
    """Concatenate the samples of all runs, in the order of the file."""
    starts, now = [], 0
    for start, rows, _ in runs:
        starts.append(now if start is None else start)
        now = starts[-1] + int(rows[:, 0].sum())
    counts = np.array([len(rows) for _, rows, _ in runs])
    places = np.array([place for _, _, place in runs], np.int64)
    durations, sizes, flags, offsets = np.concatenate([rows for _, rows, _ in runs]).T
    dts = _starts(durations, np.array(starts, np.int64), counts)
    if (np.diff(dts) < 0).any():
        raise ValueError("fragments that overlap, of which FFmpeg leaves some out")
    is_key = flags & _IS_NO_KEY == 0
    return Samples(
        dts, offsets, durations, _starts(sizes, places, counts), sizes, is_key, is_listed=False
    )
