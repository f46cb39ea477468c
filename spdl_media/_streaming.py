"""Cut the packets of one or several streams into chunks, in the order in which the file has them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import TypeAlias

from spdl_media._checks import check_int
from spdl_media._container import Container
from spdl_media._ffmpeg import AvPacket, as_fraction
from spdl_media._window import our_packets
from spdl_media.packets import Packets
from spdl_media.timing import ticks_to_seconds

Duration: TypeAlias = float | Fraction | Decimal | None
_Chunk: TypeAlias = dict[int, list[AvPacket]]

# How far, in seconds, the streams of a file may run apart in it. A stream whose next packet is not found
# within this is taken to have none, so that a chunk stays bounded when a stream ends early or pauses.
_MAX_INTERLEAVE = Fraction(10)


def check_limits(duration: Duration, num_packets: int | None) -> None:
    """Refuse limits of a chunk that are not exactly one positive number."""
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


def read_chunks(
    container: Container, indices: Sequence[int], duration: Duration, num_packets: int | None
) -> Iterator[dict[int, Packets]]:
    """Read an open container from its start, chunk by chunk; each is packets by stream index.

    Raises:
        DemuxError: The container is damaged, or cut short before the first packet.
        RuntimeError: Another reader has moved the place.
    """
    container.rewind()
    codecs = {index: container.codec(index) for index in indices}
    packets = container.packets(indices)
    turn = container.turn
    if num_packets is not None:
        chunks = _by_count(packets, num_packets)
    else:
        chunks = _by_time(packets, _TimeCutter(container, indices, Fraction(str(duration))))
    begun: set[int] = set()
    while True:
        if container.turn != turn:
            raise RuntimeError(
                f"{container.name}: the Demuxer was used for another read while its chunks were "
                "iterated; open a second Demuxer"
            )
        # The log that is captured here is that of the thread, so it must be let go before the yield.
        with container.reading():
            chunk = next(chunks, None)
        if chunk is None:
            break
        yield {
            index: our_packets(
                container, index, codecs[index], chunk[index], continues=index in begun
            )
            for index in chunk
        }
        begun |= chunk.keys()
    # Without a packet, none carries the news that the file was cut short.
    if not begun and (text := container.missing_end(())):
        raise container.error(f"it is cut short: {text}")


def _by_count(packets: Iterator[AvPacket], num_packets: int) -> Iterator[_Chunk]:
    chunk: _Chunk = {}
    for packet in packets:
        # The next packet of a full stream opens a chunk, so that the last one is never empty.
        if len(chunk.get(packet.stream_index, ())) == num_packets:
            yield chunk
            chunk = {}
        chunk.setdefault(packet.stream_index, []).append(packet)
    if chunk:
        yield chunk


def _by_time(packets: Iterator[AvPacket], cutter: _TimeCutter) -> Iterator[_Chunk]:
    for packet in packets:
        yield from cutter.add(packet)
    yield from cutter.rest()


class _TimeCutter:
    """Sorts packets into the chunk that is open and those after it."""

    def __init__(self, container: Container, indices: Sequence[int], duration: Fraction) -> None:
        streams = [container.av.streams[index] for index in indices]
        self._duration = duration
        self._zero = container.zero
        self._time_bases: dict[int, Fraction] = {s.index: as_fraction(s.time_base) for s in streams}
        # Seconds at which each stream ends by its header.
        self._lasts = {
            s.index: self._seconds(s.index, (s.start_time or 0) + s.duration)
            if s.duration
            else None
            for s in streams
        }
        # Raw streams have no timestamps: theirs are counted from second 0.
        self._next = {index: self._ticks(index, Fraction(0)) for index in indices}
        self._chunk: _Chunk = {}
        self._held: dict[int, list[tuple[int, AvPacket]]] = {}
        self._open(duration)

    def _seconds(self, index: int, ticks: int) -> Fraction:
        return ticks_to_seconds(ticks, self._time_bases[index], self._zero)

    def _ticks(self, index: int, seconds: Fraction) -> int:
        return math.ceil((seconds + self._zero) / self._time_bases[index])

    def _open(self, end: Fraction) -> None:
        """Open the chunk that ends at this time."""
        self._end = end
        self._chunk = {}
        # Limits as timestamps of each stream, so that nothing is computed for a packet.
        limits = (end - self._duration - _MAX_INTERLEAVE, end, end + _MAX_INTERLEAVE)
        self._limits = {
            index: tuple(self._ticks(index, seconds) for seconds in limits) for index in self._next
        }
        self._over = {i for i, last in self._lasts.items() if last is not None and last <= end}

    def add(self, packet: AvPacket) -> list[_Chunk]:
        """Chunks that are complete before this packet, or by it."""
        index = packet.stream_index
        ticks = packet.pts if packet.pts is not None else packet.dts
        if ticks is None:
            ticks = self._next[index]
        # A packet without a time follows the one before it.
        self._next[index] = ticks + (packet.duration or 0)
        complete: list[_Chunk] = []
        if ticks < self._limits[index][0]:
            # The clock was set back, as where recordings are joined. Nothing would ever be past the end.
            complete = self.rest()
            self._open((self._seconds(index, ticks) // self._duration + 1) * self._duration)
        self._put(index, ticks, packet)
        while self._held and self._closed(index, ticks):
            self._move_on(complete)
        return complete

    def rest(self) -> list[_Chunk]:
        """Give the rest, chunk by chunk."""
        complete: list[_Chunk] = []
        while self._chunk or self._held:
            self._move_on(complete)
        return complete

    def _put(self, index: int, ticks: int, packet: AvPacket) -> None:
        # Once one packet of a stream is past the chunk's end, the ones after it stay behind it: chunks are
        # cut in decoding order, or the frames that refer to it could not be decoded.
        if index in self._held or ticks >= self._limits[index][1]:
            self._held.setdefault(index, []).append((ticks, packet))
        else:
            self._chunk.setdefault(index, []).append(packet)

    def _closed(self, index: int, ticks: int) -> bool:
        # A stream that has not come by now has paused or ended.
        if ticks >= self._limits[index][2]:
            return True
        return all(each in self._held or each in self._over for each in self._next)

    def _move_on(self, complete: list[_Chunk]) -> None:
        """Close the chunk, and open the next one that has anything in it; times may jump by days."""
        if self._chunk:
            complete.append(self._chunk)
        held, self._held = self._held, {}
        first = min(
            (self._seconds(index, packets[0][0]) for index, packets in held.items()),
            default=self._end,
        )
        self._open(self._end + max(1, (first - self._end) // self._duration + 1) * self._duration)
        for index, packets in held.items():
            for ticks, packet in packets:
                self._put(index, ticks, packet)
