"""Timestamps and flags of the packets of a video stream, from the tables of an MP4 or from reading packets.

FFmpeg's index of an MP4 has only decode timestamps, and for a fragmented file only the first fragments, so
its own tables are used. No packet is read for that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from spdl_media._container import Container
from spdl_media._ffmpeg import AvPacket
from spdl_media.codec import VideoCodec
from spdl_media.coded_units import is_hidden
from spdl_media.mp4_tables import Mask, Samples, Ticks, read_samples

NO_TIME = -(1 << 63)
"""Value for a timestamp that the file does not state."""

# For these codecs some writers omit the list of key frames, which means that all are. The packets then tell.
_TOLD_BY_PACKETS = frozenset("av1 h264 hevc mpeg1video mpeg2video vp8 vp9".split())

# MPEG-4 packets below this size repeat the previous frame and output none.
_REPEATS = 16

# Frames are reordered by fewer than this many packets, so an edit list that hides frames at one end of the
# video shows in so many packets there.
_EDGE = 32
_NUM_SPOTS = 16


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
        is_shown = not packet.is_discard and not is_hidden(packet, codec.name)
        rows.append((pts, dts, packet.duration or 0, packet.size, packet.is_keyframe, is_shown))
    all_pts, all_dts, durations, sizes, *columns = np.array(rows, np.int64).reshape(-1, 6).T
    is_key, shown = (column.astype(np.bool_) for column in columns)
    # FFmpeg's parser marks every packet of H.261 as a key frame.
    if codec.name == "h261":
        is_key[1:] = False
    repeats = codec.name == "mpeg4" and bool((sizes < _REPEATS).any())
    duration = int(durations[np.argmax(all_pts)]) if rows else 0
    return PacketTable(all_pts, all_dts, is_key, shown, duration, repeats)


def mp4_table(
    container: Container, index: int, codec: VideoCodec, read: Any, size: int
) -> PacketTable | None:
    """Make the table of packets from the tables of an MP4 or MOV, without reading a packet.

    Args:
        container: The open container.
        index: Index of the stream.
        codec: Codec of the stream.
        read: Called as ``read(start, size)``; returns bytes of the file.
        size: Size of the file.

    Returns:
        The table; ``None``: the file is not MP4 or MOV, or its packets have to be read.

    Raises:
        SourceError: ``read`` cannot read the file.
    """
    stream = container.av.streams[index]
    # Cameras mark key frames of these codecs wrongly; FFmpeg parses the packets instead.
    if not container.format.startswith("mov") or codec.name in ("mpeg4", "h263"):
        return None
    samples = read_samples(read, size, stream.id)
    if samples is None or not len(samples.dts):
        return None
    if codec.name in _TOLD_BY_PACKETS and len(samples.dts) > 1 and samples.is_key.all():
        return None
    table = _on_ffmpeg_clock(samples, stream)
    if table is None:
        return None
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
    last = int(samples.durations[np.argmax(samples.dts + samples.offsets)])
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
    return PacketTable(dts + shifts[found], dts, samples.is_key[found], is_shown, last)
