"""Copy packets to a stream of a file, with decoding times where the source has none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from spdl_media._ffmpeg import AvPacket
from spdl_media.errors import EncodeError
from spdl_media.packets import (
    AudioPackets,
    VideoPackets,
    av_packets,
    discarded_pts,
    metadata_of,
    with_data,
)

# Packets at the start of a stream that may lack a decoding time: H.264 and HEVC reorder at most 16 frames.
MAX_UNDATED = 16


class PacketCopier:
    """Copies packets to an output stream, shifted so that second 0 of their container is at 0.

    It has the methods of an encoder.

    Args:
        stream: PyAV's output stream.
        format: FFmpeg's name of the file format.
        hides: Whether the format has edit lists, which hide packets before second 0.
    """

    def __init__(self, stream: Any, format: str, *, hides: bool) -> None:
        self._stream, self._format, self._hides = stream, format, hides
        self._undated: list[Any] = []
        self._started = False

    def encode(self, packets: VideoPackets | AudioPackets) -> Iterator[AvPacket]:
        """Yield copies of packets.

        Raises:
            EncodeError: Packets have no times, or the file would show packets that an edit list hides.
        """
        hidden = discarded_pts(packets) if isinstance(packets, VideoPackets) else frozenset()
        zero = round(metadata_of(packets).zero / packets.time_base)
        if hidden and not (self._hides and max(hidden) < zero):
            raise EncodeError(
                f"an edit list hides {len(hidden)} of the packets, and {self._format} would show them. "
                "Decode and encode them",
                source=packets.source,
            )
        for packet in av_packets(packets):
            # A copy, because muxers change packets.
            moved = with_data(packet, memoryview(packet))
            moved.stream = self._stream
            if packet.pts is not None:
                moved.pts = packet.pts - zero
            # Matroska states no decoding times, so FFmpeg knows none for the first packets of a video with
            # B-frames: as many as it reorders.
            is_undated = packet.dts is None and not self._started
            if is_undated and packet.pts is not None and len(self._undated) < MAX_UNDATED:
                self._undated.append(moved)
            elif packet.pts is None or packet.dts is None:
                raise EncodeError(
                    f"the {packets.codec.name} packets have no timestamps, which files need. Decode and "
                    "encode them",
                    source=packets.source,
                )
            else:
                moved.dts = packet.dts - zero
                yield from self._dated(moved.dts)
                yield moved

    def flush(self) -> Iterator[AvPacket]:
        """Yield what waits for a decoding time."""
        yield from self._dated(None)

    def _dated(self, end: int | None) -> Iterator[AvPacket]:
        """Yield the first packets, with decoding times before ``end`` and before all their frames."""
        waiting, self._undated, self._started = self._undated, [], True
        if waiting:
            times = [packet.pts for packet in waiting]
            stop, step = (
                min(times if end is None else [*times, end]),
                max(waiting[0].duration or 0, 1),
            )
        for place, packet in enumerate(waiting, -len(waiting)):
            packet.dts = stop + place * step
            yield packet
