"""Packets of a video or a still to frames: damage told from lead-in, cut to the window, filtered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import chain
from typing import Any, Protocol

import av

from spdl_media._ffmpeg import (
    AvPacket,
    LogLine,
    current_log,
    describe,
    ffmpeg_log,
    frame_matrix,
    says_checksum_failed,
)
from spdl_media.codec import (
    STILL_CODECS,
    Codec,
    VideoCodec,
    close_decoder,
    make_decoder,
    usual_duration,
)
from spdl_media.coded_units import states_orientation
from spdl_media.config import DecodeConfig
from spdl_media.errors import DecodeError
from spdl_media.filters import PictureFilter
from spdl_media.geometry import matrix_orientation
from spdl_media.operations import PictureOps
from spdl_media.packets import FrameMetadata, PacketMetadata
from spdl_media.timing import ticks_to_seconds


class Sink(Protocol):
    """Where decoded frames end: a list of frames, or the rows of an array."""

    def put(self, frame: av.VideoFrame, /) -> bool:
        """Take a frame, which is the sink's from now on. True: no more are wanted.

        Raises:
            ConvertError: It does not go with the frames before it.
        """
        ...


@dataclass(eq=False)
class FrameList:
    """A sink that keeps frames as they come.

    Args:
        limit: How many are wanted; ``None``: all.
    """

    limit: int | None = None
    frames: list[av.VideoFrame] = field(default_factory=list)

    def put(self, frame: av.VideoFrame) -> bool:
        """Keep a frame."""
        self.frames.append(frame)
        return len(self.frames) == self.limit

    @property
    def count(self) -> int:
        """How many frames there are."""
        return len(self.frames)

    def take(self, size: int) -> list[av.VideoFrame]:
        """The first frames, which are no longer kept."""
        taken, self.frames = self.frames[:size], self.frames[size:]
        return taken


class OpenDecoder:
    """An open decoder of FFmpeg's, and what becomes of damage in its packets.

    Args:
        codec: Parameters of the stream.
        metadata: Of the packets.
        config: How to decode.
        context: An open decoder in place of FFmpeg's own.

    Attributes:
        metadata: Of the packets that are decoded now.
        discarded: Timestamps of frames that an edit list hides.
    """

    # What helps against damage, as the end of a message.
    _remedy: str

    def __init__(
        self, codec: Codec, metadata: PacketMetadata, config: DecodeConfig, context: Any = None
    ) -> None:
        self._codec: Any = codec
        self._config = config
        self.metadata = metadata
        self.discarded: frozenset[int] = frozenset()
        self.num_dropped = 0
        self._packet_index = -1
        self._context: Any = context or make_decoder(codec, config, metadata.source)

    def close(self) -> None:
        """Stop the decoder; needed only where it has threads of its own."""
        close_decoder(self._context, self._config)

    def __del__(self) -> None:
        if hasattr(self, "_context"):  # else it could not be opened
            self.close()

    def _lose(self, error: DecodeError, cause: BaseException | None = None) -> None:
        """Raise the error of what cannot be decoded, or count it, as ``on_corrupt`` says."""
        if self._config.on_corrupt == "raise":
            raise error from cause
        self.num_dropped += 1

    def _error(self, text: str, pts: int | None) -> DecodeError:
        codec, seconds, at = self._codec, None, ""
        if pts is not None:
            seconds = float(ticks_to_seconds(pts, codec.time_base, self.metadata.zero))
            at = f" at {seconds:.3f} s"
        return DecodeError(
            f"damaged {codec.name} data{at} (packet {self._packet_index}): {text}{self._remedy}",
            source=self.metadata.source,
            pts_seconds=seconds,
            packet_index=self._packet_index,
        )


class PictureDecoder(OpenDecoder):
    """Decodes packets in order and gives the frames that lie in the window.

    Three things are kept apart. Lead-in cannot be decoded yet, because the stream was cut in mid-group: it is
    skipped and counted. Frames before the window are there for those in it: they are left out. Damage is
    what the decoder reports: it is raised, kept or dropped as ``config.on_corrupt`` says.

    FFmpeg's log is read from the block of :func:`ffmpeg_log` around the loop over the packets.

    Args:
        codec: Parameters of the stream.
        metadata: Of the packets.
        config: How to decode.
        context: An open decoder in place of FFmpeg's own.
    """

    def __init__(
        self, codec: VideoCodec, metadata: PacketMetadata, config: DecodeConfig, context: Any = None
    ) -> None:
        super().__init__(codec, metadata, config, context)
        self._remedy = ""
        if codec.frame_rate is not None:
            self._remedy = _KEEPS_FRAMES
        elif codec.name in _PARTLY_DECODED:
            self._remedy = ". decode_config(on_corrupt='keep') decodes what can be decoded"
        self.needs_key, self.gives_lead_in = True, False
        self.orientation, self.num_skipped = 1, 0
        self.corrupt_pts: frozenset[int | None] = frozenset()
        self._first_key_pts: int | None = None
        self._leading: set[int | None] = set()
        self._next_pts: int | None = None
        # Times of decoding whose frames have not come, while no packet has a time of presentation.
        self._moments: list[int] | None = []
        # Ticks from frame to frame where packets do not tell; 0: unknown.
        self._step = usual_duration(codec)
        self._started = self._skips = self._states_orientation = False
        self.follow(metadata)

    def follow(self, metadata: PacketMetadata, discarded: frozenset[int] = frozenset()) -> None:
        """Take the window and the clock of the packets that come next, and the frames that they hide."""
        self.metadata = metadata
        # Frames of earlier packets may still be in the decoder.
        self.discarded |= discarded
        if self.orientation == 1:
            self.orientation = metadata.orientation
        # Whole numbers, because a comparison of fractions takes 3 microseconds a frame.
        self._first, self._stop = metadata.window.ticks(self._codec.time_base, metadata.zero)

    def decode(self, packet: AvPacket | None) -> Iterator[av.VideoFrame]:
        """Frames that are ready after this packet; ``None`` gives those that are still held back.

        Raises:
            DecodeError: The data is damaged, with ``on_corrupt="raise"``.
        """
        if packet is not None and not self._takes(packet):
            return
        for frame in self._send(packet):
            frame.time_base = self._codec.time_base  # PyAV leaves it out of frames held back
            # FFmpeg passes on what ProRes states, and its scaler refuses numbers without a meaning.
            if frame.color_primaries in _RESERVED:
                frame.color_primaries = _UNSPECIFIED
            if frame.color_trc in _RESERVED:
                frame.color_trc = _UNSPECIFIED
            if self._wanted(frame):
                yield frame
        if packet is None:
            # Most decoders leave frames out that refer to what is not there, without a word.
            for pts in self._leading - self.discarded:
                self._skip(pts)
            self._leading.clear()

    def _takes(self, packet: AvPacket) -> bool:
        """Note what a packet says; False: the decoder shall not get it."""
        pts = packet.pts
        self._packet_index += 1
        self._step = packet.duration or self._step
        if not self._started and self.orientation == 1:
            # PyAV's frame and its side data hold each other, until the garbage collector comes: look at
            # it only if there is something to see.
            self._states_orientation |= states_orientation(packet, self._codec)
        if self.needs_key:
            # It refers to frames that are not there.
            if not packet.is_keyframe:
                self._skip(pts)
                return False
            self.needs_key, self._first_key_pts = False, pts
        elif self._is_lead_in(pts):
            self._leading.add(pts)
        if pts is not None:
            self._moments = None
        elif self._moments is not None and packet.dts is not None:
            heappush(self._moments, packet.dts)
        return True

    def drain(self) -> Iterator[av.VideoFrame]:
        """Frames that are held back, before packets that do not continue these; then it is as new.

        Raises:
            DecodeError: As for :meth:`decode`.
        """
        if self._packet_index < 0:
            return
        yield from self.decode(None)
        self.restart()

    def restart(self, packet: int = 0) -> None:
        """Forget what came before, for packets that do not continue it, the first of this number."""
        # A drained decoder takes no packets until it is flushed.
        self._context.flush_buffers()
        self.needs_key, self._first_key_pts, self._next_pts = True, None, None
        self.discarded, self._moments = frozenset(), []
        self._leading.clear()
        self._packet_index = packet - 1

    def skip_unreferenced(self, *, skip: bool) -> None:
        """Leave out the next packets that no other frame refers to."""
        # Threads of the decoder's own may still be at earlier packets.
        if skip != self._skips and "threads" not in self._config.decoder_options:
            self._skips = skip
            self._context.skip_frame = "NONREF" if skip else "DEFAULT"

    def _send(self, packet: AvPacket | None) -> list[av.VideoFrame]:
        log = current_log()
        assert log is not None, "the loop over the packets stands in a block of ffmpeg_log"
        start = len(log)
        try:
            frames: list[av.VideoFrame] = self._context.decode(packet)
        except av.FFmpegError as error:
            self._failed(packet, error, log[start:])
            return []
        if len(log) > start and packet is not None and says_checksum_failed(log[start:]):
            # FFV1 and HEVC may carry checksums; FFmpeg logs that one is wrong, and goes on.
            self.corrupt_pts |= {packet.pts}
        return frames

    def _failed(self, packet: AvPacket | None, cause: av.FFmpegError, lines: list[LogLine]) -> None:
        """Raise the decoder's error, or count it, as ``on_corrupt`` says."""
        pts = None if packet is None else packet.pts
        if self._is_lead_in(pts):
            return  # counted at the end, as those are that fail without an error
        if packet is not None and _needs_newer_pyav(packet, self._codec):
            raise DecodeError(
                f"animated WebP is decoded from PyAV 19 on, and this is {av.__version__}, the last for "
                "CPython 3.11. Use CPython 3.12 or newer with PyAV 19",
                source=self.metadata.source,
            ) from cause
        self._lose(self._error(describe(cause, lines), pts), cause)

    def _wanted(self, frame: av.VideoFrame) -> bool:
        pts = frame.pts
        if pts is None:
            pts = self._assign_pts(frame)
        else:
            self._next_pts = pts + self._step
        is_corrupt = frame.is_corrupt
        if self._leading and not (is_corrupt and self._is_lead_in(pts)):
            self._leading.discard(pts)
        if not self._started:
            self._started = True
            if self._states_orientation:
                matrix = frame_matrix(frame)
                self.orientation = matrix_orientation(matrix) if matrix else 1
        if pts in self.discarded:
            return False
        if (is_corrupt or pts in self.corrupt_pts) and not self._keeps_corrupt(pts):
            return False
        is_early = pts is not None and pts < self._first
        return (not is_early or self.gives_lead_in) and (pts is None or pts < self._stop)

    def _keeps_corrupt(self, pts: int | None) -> bool:
        # Damage before the window is told, because frames in it may refer to it; behind it is not.
        if self._is_lead_in(pts) or (pts is not None and pts >= self._stop):
            return False
        if self._config.on_corrupt == "raise":
            raise self._error("the decoder reports that the frame is damaged", pts)
        if self._config.on_corrupt == "drop":
            # What comes before the window is not missing from it.
            self.num_dropped += pts is None or pts >= self._first
            return False
        return True

    def _is_lead_in(self, pts: int | None) -> bool:
        """Whether it is shown before the first key frame, and so refers to a group that is not there."""
        return pts is not None and self._first_key_pts is not None and pts < self._first_key_pts

    def _skip(self, pts: int | None) -> None:
        self.num_skipped += pts is None or self._first <= pts < self._stop

    def _assign_pts(self, frame: av.VideoFrame) -> int | None:
        """The time of a frame that states none."""
        # A still has no time, although FFmpeg states a rate for it.
        if not self._step or self._codec.name in STILL_CODECS:
            return None
        pts = self._next_pts
        if self._moments:
            # H.264 in AVI has times of decoding alone: the same moments in another order.
            pts = heappop(self._moments)
        # Raw streams have none at all: count frames at the stated rate, as players do.
        elif pts is None:
            # The first frame stands at second 0 of the container.
            pts = round(self.metadata.zero / self._codec.time_base)
        frame.pts = pts
        self._next_pts = pts + self._step
        return pts


# Of primaries and transfer functions: ITU-T H.273, tables 2 and 3.
_RESERVED, _UNSPECIFIED = (0, 3), 2

_KEEPS_FRAMES = ". decode_config(on_corrupt='keep') keeps such frames, 'drop' leaves them out"

# Stills of which FFmpeg gives a part; of the others it gives the whole or nothing.
_PARTLY_DECODED = frozenset({"mjpeg", "gif", "qoi"})


def _needs_newer_pyav(packet: AvPacket, codec: VideoCodec) -> bool:
    """Whether it is an animated WebP (the flag 2 of its VP8X chunk), which FFmpeg 8.0 does not decode."""
    if codec.name != "webp" or int(av.__version__.partition(".")[0]) >= 19:
        return False
    head = bytes(memoryview(packet)[:21])
    return head[12:16] == b"VP8X" and bool(head[20] & 2)


class PicturePath:
    """Packets to frames: decoded, cut to the window, turned upright, and filtered, in this order."""

    def __init__(
        self,
        codec: VideoCodec,
        metadata: PacketMetadata,
        filter_desc: str | PictureOps | None,
        config: DecodeConfig,
        *,
        is_still: bool = False,
    ) -> None:
        self.decoder = PictureDecoder(codec, metadata, config)
        self._filter = PictureFilter(codec, filter_desc, config, None if is_still else metadata)
        self.decoder.gives_lead_in = self._filter.has_rate

    def follow(self, metadata: PacketMetadata, discarded: frozenset[int], sink: Sink) -> None:
        """Take the metadata of packets whose data come next, and the frames that they hide.

        Raises:
            DecodeError: As for :meth:`push`, as is FilterError.
        """
        if not metadata.continues:
            # They do not follow on what came before (a window of its own, say): the frames that are held
            # back have to come out first, and none of them is a reference for what comes.
            for frame in chain(self._filtered(self.decoder.drain()), self._filter.end_run()):
                sink.put(frame)
        self.decoder.follow(metadata, discarded)
        self._filter.follow(metadata)

    def _filtered(self, frames: Iterable[av.VideoFrame]) -> Iterator[av.VideoFrame]:
        # One by one, so that a frame that became a row is in FFmpeg's pool for the next.
        decoder, filter = self.decoder, self._filter
        for frame in frames:
            is_corrupt = filter.has_rate and frame.pts in decoder.corrupt_pts
            yield from filter.push(frame, decoder.orientation, is_corrupt=is_corrupt)

    def push(self, packet: AvPacket | None, sink: Sink) -> bool:
        """Put the frames of this packet into a sink, and with ``None`` those held back.

        Returns:
            Whether the sink wants no more.

        Raises:
            DecodeError: The data is damaged, with ``on_corrupt="raise"``.
            FilterError: The filters do not take the frames.
        """
        if any(map(sink.put, self._filtered(self.decoder.decode(packet)))):
            return True
        return packet is None and any(map(sink.put, self._filter.flush()))

    def run(self, packets: Iterable[AvPacket], sink: Sink) -> bool:
        """Put the frames of all packets into a sink, and let the decoder's threads come to rest.

        Returns:
            Whether the sink had enough before the packets ended.

        Raises:
            DecodeError: As :meth:`push`, as is FilterError.
        """
        try:
            with ffmpeg_log():  # one for all packets; see current_log
                # None flushes the decoder and the filters.
                return any(self.push(packet, sink) for packet in chain(packets, (None,)))
        finally:
            self.close()

    def take_metadata(self) -> FrameMetadata:
        """Return the metadata of the frames that came out since the last call."""
        decoder = self.decoder
        metadata = FrameMetadata.of(
            decoder.metadata,
            orientation=self._filter.orientation or decoder.orientation,
            num_skipped=decoder.num_skipped,
            num_dropped=decoder.num_dropped,
            corrupt_pts=self._filter.copied_corrupt
            | (frozenset() if self._filter.has_rate else decoder.corrupt_pts),
        )
        decoder.num_skipped = decoder.num_dropped = 0
        return metadata

    def close(self) -> None:
        """Let the decoder's threads come to rest."""
        self.decoder.close()
