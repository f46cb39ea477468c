"""What the packets of a video stream say of themselves, by the tables of an MP4 or when they are read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from spdl_media._coded_units import coded_units
from spdl_media._container import Container
from spdl_media._ffmpeg import AvPacket
from spdl_media._mp4_tables import Mask, Samples, Ticks, read_samples
from spdl_media.codec import VideoCodec
from spdl_media.packets import is_hidden

NO_TIME = -(1 << 63)
"""Stands for a timestamp that the file does not state."""

_KEY_UNITS = {"h264": (5,), "hevc": range(16, 22)}
"""Types of units at which decoding can begin: ITU-T H.264 and H.265, 7.4.2.2."""

# Packets of MPEG-4 as small as this repeat the frame before, and no frame comes out.
_REPEATS = 16

# No frame is shown so many packets later than it is coded, so what an edit list hides at one end of a video
# is seen in so many packets there.
_EDGE = 32
_NUM_SPOTS = 16


@dataclass(frozen=True, slots=True)
class PacketTable:
    """Packets of a video stream in the order of decoding.

    Attributes:
        pts: Ticks of presentation, or :data:`NO_TIME`.
        dts: Ticks of decoding, likewise.
        is_key: Whether decoding can begin there.
        is_shown: Whether a frame comes out: no edit list hides it, nor does its own header.
        last_duration: Ticks of the packet that is shown last; 0: not stated.
        repeats: Some packets may only repeat the frame before.
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
    """Note what packets say. Their data are read, and not decoded."""
    rows: list[tuple[int, ...]] = []
    kinds = _KEY_UNITS.get(codec.name, ())
    for packet in packets:
        pts = NO_TIME if packet.pts is None else packet.pts
        dts = NO_TIME if packet.dts is None else packet.dts
        units = coded_units(packet, codec) if kinds and packet.is_keyframe else ()
        is_true_key = any(kind in kinds for kind, _ in units)
        is_shown = not packet.is_discard and not is_hidden(packet, codec.name)
        flags = packet.is_keyframe, is_true_key, is_shown
        rows.append((pts, dts, packet.duration or 0, packet.size, *flags))
    all_pts, all_dts, durations, sizes, *columns = np.array(rows, np.int64).reshape(-1, 7).T
    is_key, is_true, shown = (column.astype(np.bool_) for column in columns)
    # Phones write files in which all packets are said to be key frames.
    if is_true.any() and is_key.all():
        is_key = is_true
    # FFmpeg's parser of these says so of every packet.
    if codec.name in ("h261", "h263") and is_key.all():
        is_key[1:] = False
    repeats = codec.name == "mpeg4" and bool((sizes < _REPEATS).any())
    duration = int(durations[np.argmax(all_pts)]) if rows else 0
    return PacketTable(all_pts, all_dts, is_key, shown, duration, repeats)


def mp4_table(
    container: Container, index: int, codec: VideoCodec, read: Any, size: int
) -> PacketTable | None:
    """The same by the tables of an MP4 or MOV, without reading a packet.

    Args:
        container: The open container.
        index: Of the stream.
        codec: Of the stream.
        read: Gives ``(start, size)`` bytes of the file.
        size: Of the file.

    Returns:
        The table; ``None``: it is no such file, or the packets have to be looked at.
    """
    stream = container.av.streams[index]
    # Cameras state key frames of these wrongly, and FFmpeg looks into the packets.
    if not container.format.startswith("mov") or codec.name in ("mpeg4", "h263"):
        return None
    samples = read_samples(read, size, stream.id)
    if samples is None or not len(samples.dts):
        return None
    if codec.name in _KEY_UNITS and len(samples.dts) > 1 and samples.is_key.all():
        return None
    table = _placed(samples, stream)
    if table is None:
        return None
    # FFmpeg knows when a stream starts, from the same tables by its own rules. An edit may begin inside of a
    # frame.
    is_right = not table.is_shown.all() or stream.start_time in (None, int(table.pts.min()))
    # Of frames that are reordered, times of presentation that are those of decoding are none.
    is_unset = codec.reorder_depth > 0 and bool((table.pts == table.dts)[:17].all())
    return table if is_right and not is_unset else None


def _placed(samples: Samples, stream: Any) -> PacketTable | None:
    """Samples on FFmpeg's clock, as edit lists move and hide them; ``None``: FFmpeg has others."""
    entries, total = stream.index_entries, len(samples.dts)
    count = len(entries)
    if not count:
        return None
    # FFmpeg shifts times of decoding so that none is later than that of presentation.
    shifts = samples.offsets + max(0, -int(samples.offsets.min()))
    last = int(samples.durations[np.argmax(samples.dts + samples.offsets)])
    first = entries[0].timestamp - int(samples.dts[0])
    edges = *range(min(_EDGE, count)), *range(max(0, count - _EDGE), count)
    spots = [(i, entries[i]) for i in {*edges, *range(0, count, max(1, count // _NUM_SPOTS))}]
    # Of fragments FFmpeg has listed the first ones alone.
    if (count == total or (count < total and not samples.is_listed)) and all(
        (one.is_discard, one.pos, one.timestamp)
        == (False, samples.places[i], samples.dts[i] + first)
        for i, one in spots
    ):
        dts, shown = samples.dts + first, np.ones(total, np.bool_)
        return PacketTable(dts + shifts, dts, samples.is_key, shown, last)
    if not samples.is_listed:
        return None
    # What an edit list has left of the samples, and what it repeats.
    rows = np.array([(one.timestamp, one.pos, one.is_discard) for one in entries])
    order = np.argsort(samples.places)
    nearest = np.searchsorted(samples.places, rows[:, 1], sorter=order).clip(max=total - 1)
    found = order[nearest]
    if (samples.places[found] != rows[:, 1]).any():
        return None
    dts, is_shown = rows[:, 0], rows[:, 2] == 0
    return PacketTable(dts + shifts[found], dts, samples.is_key[found], is_shown, last)
