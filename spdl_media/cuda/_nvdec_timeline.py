"""When the packets of a video are shown, and which of their frames are asked for, without decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

import av

from spdl_media._graph import FrameFilter
from spdl_media.operations import Rate, parse_rate
from spdl_media.packets import VideoPackets, av_packets, discarded_pts, metadata_of
from spdl_media.timing import ticks_to_seconds

FrameTime: TypeAlias = tuple[int | None, int]
"""Timestamp and duration of a frame; a duration of 0 is not known."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """The frames that packets hold, by the packets' own timestamps.

    Attributes:
        times: Times of all frames in display order; fewer than the packets if some have none.
        ranks: For each packet, in decoding order, the number of its frame in display order.
        wanted: Numbers of the frames that lie in the window and that no edit list hides.
        distinct: Each packet has a timestamp, and no two have the same.
        closed: The first packet is a key frame, and none is shown before a key frame that it follows.
    """

    times: tuple[tuple[int, int], ...]
    ranks: tuple[int, ...]
    wanted: tuple[int, ...]
    distinct: bool
    closed: bool

    @classmethod
    def of(cls, packets: VideoPackets) -> Timeline:
        """Read the timeline off packets."""
        coded = av_packets(packets)
        known = [(packet.pts, packet.duration or 0) for packet in coded if packet.pts is not None]
        shown = sorted(known)
        rank = {pts: number for number, (pts, _) in enumerate(shown)}
        facts, hidden = metadata_of(packets), discarded_pts(packets)
        wanted = [
            number
            for number, (pts, _) in enumerate(shown)
            if pts not in hidden
            and ticks_to_seconds(pts, packets.time_base, facts.zero) in facts.window
        ]
        return cls(
            tuple(shown),
            tuple(rank[pts] for pts, _ in known),
            tuple(wanted),
            # Equal times share a rank, and a packet without one has none.
            len(rank) == len(coded),
            _is_closed(packets),
        )


def _is_closed(packets: VideoPackets) -> bool:
    key: int | None = None
    for packet in av_packets(packets):
        if packet.is_keyframe:
            key = packet.pts
        if key is None or packet.pts is None or packet.pts < key:
            return False
    return True


def at_rate(
    times: Sequence[FrameTime], time_base: Fraction, rate: Rate, source_rate: Fraction | None
) -> tuple[Fraction, list[tuple[int, int]]]:
    """Choose frames for a constant rate, as FFmpeg's ``fps`` filter does: by running it over tiny frames.

    Args:
        times: Timestamps and durations of the frames, in display order.
        time_base: Seconds in one unit of both.
        rate: Frames in a second that come out.
        source_rate: Frames in a second that go in, where it is known.

    Returns:
        The rate, and for each frame that comes out the position in ``times`` of the one that it repeats,
        and its own timestamp in units of ``1 / rate`` seconds.

    Raises:
        ValueError: ``rate`` is no positive number.
    """
    exact_rate = parse_rate(rate)
    desc = f"fps={exact_rate.numerator}/{exact_rate.denominator}"
    filter = FrameFilter(desc, kind="video", time_base=time_base, frame_rate=source_rate)
    chosen: list[tuple[int, int]] = []
    for position, (pts, duration) in enumerate(times):
        frame = av.VideoFrame(_MARK_SIZE, _MARK_SIZE, "gray")
        frame.pts, frame.time_base, frame.duration = pts, time_base, duration
        _write_number(frame, position)
        chosen.extend(map(_number_and_pts, filter.push(frame)))
    chosen.extend(map(_number_and_pts, filter.flush()))
    return exact_rate, chosen


# A row of eight pixels of gray holds a number of eight bytes.
_MARK_SIZE = 8


def _write_number(frame: av.VideoFrame, number: int) -> None:
    """Put a number into the pixels, which the filter passes on; all else of a frame is its own to change."""
    memoryview(frame.planes[0])[:8] = number.to_bytes(8, "little")


def _number_and_pts(frame: av.VideoFrame) -> tuple[int, int]:
    if frame.pts is None:
        raise RuntimeError("FFmpeg's fps filter gave a frame without a timestamp; please report it")
    return int.from_bytes(memoryview(frame.planes[0])[:8], "little"), frame.pts
