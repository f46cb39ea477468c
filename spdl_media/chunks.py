"""Where the packets of long streams are cut into chunks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import TypeAlias

from spdl_media._checks import check_int
from spdl_media._container import Container
from spdl_media._ffmpeg import AvPacket, as_fraction

Duration: TypeAlias = float | Fraction | Decimal | None
_Chunk: TypeAlias = dict[int, list[AvPacket]]

# How far, in seconds, the streams of a file may run apart in it. A stream whose next packet is not found
# within this is taken to have none, so that a chunk stays bounded when a stream ends early or pauses.
_MAX_INTERLEAVE = Fraction(10)


def check_limits(duration: Duration, num_packets: int | None) -> None:
    """Refuse limits of a chunk that are not exactly one positive number.

    Raises:
        ValueError: They are none or both, or not positive.
        TypeError: One is no number.
    """
    if (duration is None) == (num_packets is None):
        raise ValueError(
            "streaming_demux takes exactly one of duration (seconds) and num_packets, got "
            f"duration={duration!r}, num_packets={num_packets!r}"
        )
    if num_packets is not None:
        check_int("num_packets", num_packets)
    elif isinstance(duration, bool) or not isinstance(duration, int | float | Fraction | Decimal):
        raise TypeError(f"duration must be a number of seconds, not {duration!r}")
    elif not 0 < duration < float("inf"):
        raise ValueError(f"duration must be a positive number of seconds, not {duration!r}")


def by_count(packets: Iterator[AvPacket], num_packets: int) -> Iterator[_Chunk]:
    """Packets as they are read, in chunks of so many of a stream."""
    chunk: _Chunk = {}
    for packet in packets:
        # The next packet of a full stream opens a chunk, so that the last one is never empty.
        if len(chunk.get(packet.stream_index, ())) == num_packets:
            yield chunk
            chunk = {}
        chunk.setdefault(packet.stream_index, []).append(packet)
    if chunk:
        yield chunk


def by_time(
    packets: Iterator[AvPacket], container: Container, indices: Sequence[int], duration: Fraction
) -> Iterator[_Chunk]:
    """Packets as they are read, in chunks of so many seconds."""
    clocks = {index: _Clock(container, index, duration) for index in indices}
    chunks: dict[int, _Chunk] = {}  # those that are open, by their number
    current, reached = 0, dict.fromkeys(indices, 0)
    for packet in packets:
        index = packet.stream_index
        earliest, number, latest = clocks[index].numbers(packet)
        if latest < current:
            # The clock was set back, as where recordings are joined. Nothing would ever be past the end.
            yield from (chunks.pop(each) for each in sorted(chunks))
            current, reached = number, dict.fromkeys(indices, number)
        # Once one packet of a stream is past the chunk's end, the ones after it stay behind it: chunks are
        # cut in decoding order, or the frames that refer to it could not be decoded.
        reached[index] = max(reached[index], number)
        chunks.setdefault(reached[index], {}).setdefault(index, []).append(packet)
        while max(chunks) > current and (
            # A stream that has not come by now has paused or ended.
            earliest > current
            or all(reached[i] > current or clocks[i].last <= current for i in indices)
        ):
            if current in chunks:
                yield chunks.pop(current)
            # Times may jump by days.
            current = min(chunks)
    yield from (chunks[number] for number in sorted(chunks))


class _Clock:
    """Says in which chunk the packets of a stream lie."""

    def __init__(self, container: Container, index: int, duration: Fraction) -> None:
        stream = container.av.streams[index]
        time_base: Fraction = as_fraction(stream.time_base)
        # In whole numbers, so that no fraction is computed for a packet: of parts, so many a chunk.
        factor, shift = time_base / duration, -container.zero / duration
        slack = _MAX_INTERLEAVE / duration
        self._parts = math.lcm(factor.denominator, shift.denominator, slack.denominator)
        self._factor, self._shift, self._slack = (
            int(number * self._parts) for number in (factor, shift, slack)
        )
        # Raw streams have no timestamps: theirs are counted from second 0.
        self._next = math.ceil(container.zero / time_base)
        end = stream.duration and ((stream.start_time or 0) + stream.duration) * factor + shift
        # The last chunk by the header.
        self.last = math.ceil(end) - 1 if end else math.inf

    def numbers(self, packet: AvPacket) -> tuple[int, int, int]:
        """The chunk of a packet, between those of the times around it at which other streams may be."""
        ticks = packet.dts if packet.pts is None else packet.pts
        if ticks is None:
            ticks = self._next
        # A packet without a time follows the one before it.
        self._next = ticks + (packet.duration or 0)
        place, parts = ticks * self._factor + self._shift, self._parts
        return (place - self._slack) // parts, place // parts, (place + self._slack) // parts
