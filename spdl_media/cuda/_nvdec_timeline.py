"""When the packets of a video are shown, and which of their frames are asked for, without decoding."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

from spdl_media.codec import usual_duration
from spdl_media.operations import Rate, parse_rate
from spdl_media.packets import VideoPackets, av_packets, discarded_pts, metadata_of
from spdl_media.timing import ConstantRate, ticks_to_seconds

ChosenFrames: TypeAlias = tuple[Fraction, list[tuple[int, int]]]
"""The unit of timestamps, and of each frame its number and its timestamp."""


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


def at_rate(packets: VideoPackets, timeline: Timeline, rate: Rate) -> ChosenFrames:
    """Choose frames for a constant rate, as the CPU path does.

    Returns:
        Seconds in one unit of the timestamps, and for each frame that comes out its number in display order,
        and its own timestamp.

    Raises:
        ValueError: ``rate`` is no positive number.
    """
    facts, hidden = metadata_of(packets), discarded_pts(packets)
    clock: ConstantRate[int] = ConstantRate(
        parse_rate(rate), facts.window, packets.time_base, facts.zero
    )
    usual = usual_duration(packets.codec)
    _, stop = facts.window.ticks(packets.time_base, facts.zero)
    chosen: list[tuple[int, int]] = []
    for number, (pts, duration) in enumerate(timeline.times):
        # Frames before the window as well: one of them is shown when it starts.
        if pts not in hidden and (stop is None or pts < stop):
            chosen += clock.push(number, pts, duration or usual)
    chosen += clock.flush(goes_on=facts.goes_on)
    return clock.time_base, chosen
