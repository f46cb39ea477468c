"""Cut the packets of one or several streams into chunks, in the order in which the file has them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction

import av

from spdl_media._checks import check_int
from spdl_media._demuxing.container import Container, as_video
from spdl_media._ffmpeg import AvPacket, as_fraction
from spdl_media.codec import AudioCodec, read_audio_codec, read_video_codec
from spdl_media.packets import AudioPackets, PacketMetadata, VideoPackets

Chunk = dict[int, list[AvPacket]]

# How far, in seconds, the streams of a file may run apart in it. A stream whose next packet is not found
# within this is taken to have none, so that a chunk stays bounded when a stream ends early or pauses.
_MAX_INTERLEAVE = Fraction(10)


def check_limits(duration: float | Fraction | Decimal | None, num_packets: int | None) -> None:
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
    container: Container,
    indices: Sequence[int],
    *,
    duration: float | Fraction | Decimal | None,
    num_packets: int | None,
) -> Iterator[Chunk]:
    """Chunks of packets by stream index; exactly one of the two limits is given."""
    packets = container.packets(indices)
    if num_packets is not None:
        return _by_count(packets, num_packets)
    return _by_time(packets, _Clock(container, indices), Fraction(str(duration)))


def _by_count(packets: Iterator[AvPacket], num_packets: int) -> Iterator[Chunk]:
    chunk: Chunk = {}
    for packet in packets:
        if len(chunk.get(packet.stream_index, ())) == num_packets:
            yield chunk
            chunk = {}
        chunk.setdefault(packet.stream_index, []).append(packet)
    if chunk:
        yield chunk


class _Clock:
    """Where packets stand on the container's clock, and when each stream ends by its header."""

    def __init__(self, container: Container, indices: Sequence[int]) -> None:
        streams = [container.av.streams[index] for index in indices]
        self.zero = container.zero
        self.time_bases = {stream.index: as_fraction(stream.time_base) for stream in streams}
        self.ends = {stream.index: self._end(stream) for stream in streams}
        self._next: dict[int, Fraction] = {}

    def _end(self, stream: av.stream.Stream) -> Fraction | None:
        if not stream.duration:
            return None
        ticks = (stream.start_time or 0) + stream.duration
        end: Fraction = ticks * self.time_bases[stream.index] - self.zero
        return end

    def place(self, packet: AvPacket) -> Fraction:
        """Time of the stream's next packet, in seconds."""
        index = packet.stream_index
        time_base, ticks = (
            self.time_bases[index],
            packet.pts if packet.pts is not None else packet.dts,
        )
        if ticks is not None:
            time: Fraction = ticks * time_base - self.zero
        else:  # raw streams have no timestamps
            time = self._next.get(index, Fraction(0))
        self._next[index] = time + (packet.duration or 0) * time_base
        return time


_Placed = tuple[Fraction, AvPacket]


class _TimeCutter:
    """Sorts packets into the chunk that is open and those after it.

    Once one packet of a stream is past the chunk's end, the ones after it stay behind it: chunks are cut in
    decoding order, or the frames that refer to it could not be decoded.
    """

    def __init__(self, clock: _Clock, duration: Fraction) -> None:
        self._clock = clock
        self._duration = duration
        self._end = duration
        self._chunk: Chunk = {}
        self._held: dict[int, list[_Placed]] = {}

    def add(self, packet: AvPacket) -> Iterator[Chunk]:
        """Chunks that are complete before this packet, or by it."""
        time = self._clock.place(packet)
        if time < self._end - self._duration - _MAX_INTERLEAVE:
            # The clock was set back, as where recordings are joined. Nothing would ever be past the end.
            yield from self.rest()
            self._end = (time // self._duration + 1) * self._duration
        self._put(time, packet)
        while self._held and self._closed(time):
            if self._chunk:
                yield self._chunk
            self._move_on()

    def rest(self) -> Iterator[Chunk]:
        """What is left, chunk by chunk."""
        while self._chunk or self._held:
            if self._chunk:
                yield self._chunk
            self._move_on()

    def _put(self, time: Fraction, packet: AvPacket) -> None:
        index = packet.stream_index
        if index in self._held or time >= self._end:
            self._held.setdefault(index, []).append((time, packet))
        else:
            self._chunk.setdefault(index, []).append(packet)

    def _closed(self, now: Fraction) -> bool:
        if now >= self._end + _MAX_INTERLEAVE:
            return True
        return all(
            index in self._held or (last is not None and last <= self._end)
            for index, last in self._clock.ends.items()
        )

    def _move_on(self) -> None:
        """Open the next chunk that has anything in it; timestamps may jump by days."""
        held, self._held, self._chunk = self._held, {}, {}
        first = min((packets[0][0] for packets in held.values()), default=self._end)
        self._end += max(1, (first - self._end) // self._duration + 1) * self._duration
        for packets in held.values():
            for time, packet in packets:
                self._put(time, packet)


def _by_time(packets: Iterator[AvPacket], clock: _Clock, duration: Fraction) -> Iterator[Chunk]:
    cutter = _TimeCutter(clock, duration)
    for packet in packets:
        yield from cutter.add(packet)
    yield from cutter.rest()


class ChunkMaker:
    """Makes packets of ours from the chunks of one stream."""

    def __init__(self, container: Container, index: int) -> None:
        stream = container.av.streams[index]
        self._container = container
        self._index = index
        self._codec = (
            read_audio_codec(stream)
            if isinstance(stream, av.AudioStream)
            else read_video_codec(as_video(stream))
        )
        self.continues = False

    def __call__(self, packets: list[AvPacket]) -> AudioPackets | VideoPackets:
        container = self._container
        facts = PacketMetadata(
            container.name,
            container.zero,
            continues=self.continues,
            incomplete=container.missing_end(packets),
        )
        self.continues = True
        if isinstance(self._codec, AudioCodec):
            return AudioPackets(packets, self._codec, facts)
        orientation = container.orientation(self._index, packets)
        return VideoPackets(packets, self._codec, replace(facts, orientation=orientation))
