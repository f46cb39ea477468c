"""The one loop from packets to samples. It ends in a sink: chunks of FFmpeg's frames, or rows of bytes."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import cache
from typing import Any, TypeAlias

import av
import numpy as np
import numpy.typing as npt

from spdl_media._ffmpeg import AvPacket, describe, ffmpeg_log
from spdl_media._frame_filter import (
    FrameFilter,
    exact_pts,
    place_frame,
    placed_chunk,
    sample_time_base,
    whole_frame,
)
from spdl_media._window import frame_position, vorbis_lateness
from spdl_media.codec import AudioCodec, close_decoder, make_decoder
from spdl_media.config import DecodeConfig
from spdl_media.errors import DecodeError
from spdl_media.filter_desc import sound_ops
from spdl_media.formats import SAMPLE_DTYPES
from spdl_media.frames import AudioChunk, FrameMetadata, cut_chunks
from spdl_media.operations import SoundOps
from spdl_media.packets import PacketMetadata
from spdl_media.timing import ticks_to_seconds

Put: TypeAlias = Callable[[av.AudioFrame, int, int, int], bool]
"""Takes samples ``start`` to ``stop`` of a frame, and the position of the first; True: it has enough."""

# Sample numbers stay far below, so this is before the first one.
_BEFORE_ALL = -(2**63)

# Rows are made for as many samples as the packets state, which may be anything, but not for more bytes than
# this. Only what is filled takes memory.
_MOST_EXPECTED = 2**30

# Samples in a frame for a graph. Each frame costs 25 us, and frames that leave the cache take four times
# as long (104,448 stereo samples from 8 to 16 kHz: of 1024 4.3 ms, of 16 Ki 1.2 ms, of 64 Ki 5.5 ms).
_BLOCK = 16 * 1024


class SampleDecoder:
    """Decodes packets in order and gives the samples that lie in the window.

    Sample ``k`` of the stream stands at ``k / sample_rate`` on the container's clock. The first frame's
    timestamp tells which sample it begins with; from there on samples are counted, so that timestamps
    that are rounded or jitter do not open gaps. A timestamp that jumps ahead of the one before by half
    a frame or more is a real gap: packets are missing.
    """

    def __init__(
        self,
        codec: AudioCodec,
        metadata: PacketMetadata,
        config: DecodeConfig,
        discarded: frozenset[int] = frozenset(),
    ) -> None:
        self._codec = codec
        self._config = config
        self._discarded: frozenset[int] = frozenset()
        self.num_dropped = 0
        self._packet_index = -1
        self._position: int | None = None
        self._is_second = False
        self._late = 2 * vorbis_lateness(codec)
        self._expected = 0
        self.follow(metadata, discarded)
        self._context = make_decoder(codec, config, metadata.source)

    def close(self) -> None:
        """Stop the decoder; needed only where it has threads of its own."""
        close_decoder(self._context, self._config)

    def __del__(self) -> None:
        if hasattr(self, "_context"):  # else it could not be opened
            self.close()

    @property
    def has_started(self) -> bool:
        """Whether it has been given any packet."""
        return self._packet_index >= 0

    def follow(self, metadata: PacketMetadata, discarded: frozenset[int]) -> None:
        """Take the window and the clock of the packets that come next, and the frames that they hide."""
        self._metadata = metadata
        self._discarded |= discarded
        self._finished = False
        self._set_rate(0)

    def take_metadata(self) -> FrameMetadata:
        """What is to be said of the samples that came out since the last call."""
        metadata, dropped = self._metadata, self.num_dropped
        self.num_dropped = 0
        return FrameMetadata(metadata.source, metadata.zero, metadata.window, num_dropped=dropped)

    def decode(self, packets: Iterable[AvPacket | None], put: Put) -> bool:
        """Hand over what comes out for these packets, and for a final ``None`` what is held back.

        Returns:
            Whether ``put`` has had enough, which ends the loop.
        """
        decode, unit = self._context.decode, self._codec.time_base.denominator  # type: ignore[attr-defined]  # audio
        with ffmpeg_log() as lines:
            for packet in packets:
                if packet is not None:
                    if self._finished:
                        continue
                    self._packet_index += 1
                said = len(lines)
                try:
                    frames = decode(packet)
                except av.FFmpegError as error:
                    self._judge(packet, error, describe(error, lines[said:]))
                    continue
                # In one body: calls would cost as much as small frames.
                for frame in frames:
                    samples, pts = frame.samples, frame.pts
                    if frame.sample_rate != self._rate:
                        self._set_rate(frame.sample_rate)
                    # In whole numbers, ticks times self._scale: fractions would take longer than small
                    # frames take to decode, and hold the GIL meanwhile.
                    ticks = self._expected if pts is None else pts * self._scale
                    position = self._position
                    if position is None or ticks > self._expected or self._is_second:
                        position = self._locate(frame, position, ticks)
                    self._position = end = position + samples
                    self._expected = ticks + samples * unit
                    if pts in self._discarded or (frame.is_corrupt and not self._accepts(frame)):
                        continue
                    if packet is None:  # PyAV leaves it out of the frames held back
                        frame.time_base = self._codec.time_base
                    start, stop = 0, samples
                    if position < self._first or end >= self._stop:
                        self._finished = end >= self._stop
                        start = max(self._first - position, 0)
                        stop = min(self._stop - position, samples)
                    if start < stop and put(frame, start, stop, position + start):
                        return True
        return False

    def _set_rate(self, rate: int) -> None:
        """Compute what depends on the sample rate, which may change in a stream."""
        self._rate, self._scale = rate, self._codec.time_base.numerator * rate
        window = self._metadata.window
        first, stop = window.samples(rate)
        # Without a window, what lies before second 0 is kept, too.
        self._first = first if window else _BEFORE_ALL
        self._stop = sys.maxsize if stop is None else stop

    def _judge(self, packet: AvPacket | None, error: av.FFmpegError, text: str) -> None:
        """A packet cannot be decoded: raise the error, count it, or let it pass."""
        if packet is not None and self._is_preroll(packet):
            return  # an MP3 frame that takes bits from one before the place that was sought
        if self._config.on_corrupt == "raise":
            raise self._error(text, None if packet is None else packet.pts) from error
        self.num_dropped += 1

    def _is_preroll(self, packet: AvPacket) -> bool:
        start = self._metadata.window.start
        if start is None or packet.pts is None:
            return False
        # Without a duration it may reach into the window, unless nothing came out so far.
        if not packet.duration and self._position is not None:
            return False
        end_pts = packet.pts + (packet.duration or 0)
        return ticks_to_seconds(end_pts, self._codec.time_base, self._metadata.zero) <= start

    def _accepts(self, frame: av.AudioFrame) -> bool:
        """Whether a damaged frame is kept."""
        if self._config.on_corrupt == "raise":
            raise self._error("the decoder reports that the frame is damaged", frame.pts)
        self.num_dropped += self._config.on_corrupt == "drop"
        return self._config.on_corrupt == "keep"

    def _locate(self, frame: av.AudioFrame, position: int | None, ticks: int) -> int:
        """Position of the first sample of a frame, the first one or one whose time is ahead of the count."""
        unit, jitter = self._codec.time_base.denominator, 4 * self._scale
        ahead = 2 * (ticks - self._expected)
        is_second, self._is_second = self._is_second, position is None
        # Rounded timestamps jitter by a tick or two; half a frame and more is a gap.
        if position is not None and ahead <= max(jitter + self._late * unit, frame.samples * unit):
            if not (is_second and self._late and ahead < -jitter):
                return position
            position = None  # the first frame was the late one: it lies before the window
        stated = frame_position(self._codec, frame.pts or 0, frame.samples, self._metadata.zero)
        if position is None:
            return stated
        if stated > position:
            self._check_gap(position, stated, frame)
        return max(stated, position)

    def _check_gap(self, position: int, stated: int, frame: av.AudioFrame) -> None:
        """Take a gap for damage where there can be none: in FLAC's own files, and in Ogg.

        Their frames number themselves. FFmpeg's parser takes a damaged frame for a part of the one before,
        and the decoder ignores it without a word.
        """
        codec = self._codec
        if codec.name != "flac" or codec.codec_tag or codec.time_base != Fraction(1, self._rate):
            return  # other containers may leave sound out
        if stated <= max(self._first, 0) or position >= self._stop:
            return
        if self._config.on_corrupt == "raise":
            raise self._error(f"{stated - position} samples before it are missing", frame.pts)
        self.num_dropped += 1

    def _error(self, text: str, pts: int | None) -> DecodeError:
        seconds = None
        if pts is not None:
            seconds = float(ticks_to_seconds(pts, self._codec.time_base, self._metadata.zero))
        at = "" if seconds is None else f" at {seconds:.3f} s"
        return DecodeError(
            f"damaged {self._codec.name} data{at} (packet {self._packet_index}): {text}. "
            "decode_config(on_corrupt='drop') leaves damaged packets out",
            source=self._metadata.source,
            pts_seconds=seconds,
            packet_index=self._packet_index,
        )


class SampleChunks:
    """A sink: chunks of frames, which pass through a filter graph first unless they are as it gives them.

    Args:
        codec: Of the packets.
        zero: Second 0 of the container on the stream's own clock.
        filter_desc: The graph; ``None`` for none.
        limit: This many samples are enough.
    """

    def __init__(
        self, codec: AudioCodec, zero: Fraction, filter_desc: str | None, limit: int | None = None
    ) -> None:
        self.chunks: list[AudioChunk] = []
        self.count = 0
        self.zero = zero
        self._limit = math.inf if limit is None else limit
        ops = sound_ops(filter_desc)
        # The format that the graph would leave as it is.
        keeps = ops is not None and ops == SoundOps(sample_fmt=ops.sample_fmt)
        self._same_fmt = ops.sample_fmt if ops is not None and keeps else None
        self._graph = None
        if filter_desc is not None and ops != SoundOps(sample_fmt=None):
            self._graph = FrameFilter(filter_desc, kind="audio", time_base=codec.time_base)
        # Of a sample rate and a start, because fractions are slow to make.
        self._unit = (0, zero, zero)

    def put(self, frame: av.AudioFrame, start: int, stop: int, position: int) -> bool:
        """Take samples of a frame; True: there are enough."""
        chunk = AudioChunk(frame, start, stop, position)
        if self._graph is None or frame.format.name == self._same_fmt:
            self.chunks.append(chunk)
            self.count += stop - start
            return self.count >= self._limit
        # A frame of the decoder's is shared with nobody yet.
        frame, unit = whole_frame(chunk), self._unit
        if unit[:2] != (frame.sample_rate, self.zero):
            time_base = sample_time_base(frame.sample_rate, self.zero)
            unit = self._unit = (frame.sample_rate, self.zero, time_base)
        place_frame(frame, exact_pts(chunk, unit[2], self.zero), unit[2])
        return self._append(self._graph.push(frame))

    def flush(self) -> None:
        """Take what the graph holds back."""
        if self._graph is not None:
            self._append(self._graph.flush())

    def _append(self, frames: list[av.AudioFrame]) -> bool:
        self.chunks += [placed_chunk(frame, self.zero) for frame in frames]
        self.count += sum(frame.samples for frame in frames)
        return self.count >= self._limit

    def take(self, size: int) -> list[AudioChunk]:
        """Take the first samples out, at most this many."""
        if size >= self.count:
            taken, self.chunks = self.chunks, []
        else:
            taken = list(cut_chunks(self.chunks, 0, size))
            self.chunks = list(cut_chunks(self.chunks, size, None))
        self.count = max(self.count - size, 0)
        return taken


class SampleRows:
    """A sink: the samples of frames of one format end to end, a row of bytes for each plane.

    Args:
        allocate: Gives memory of so many bytes.
        end: Where the last sample is expected, in seconds on the container's clock; a hint.
        limit: This many samples are enough.

    Attributes:
        first: Position of the first sample.
        count: Samples of each channel.
        format: Sample format, channel layout and sample rate; ``None``: nothing came.
        mixed: A frame of another format came, so these rows are not all.
    """

    def __init__(
        self, allocate: Callable[[int], npt.NDArray[np.uint8]], end: Fraction, limit: int | None
    ) -> None:
        self.first = self.count = 0
        self.format: tuple[str, str, int] | None = None
        self.mixed = False
        self._allocate = allocate
        self._end = end
        self._limit = sys.maxsize if limit is None else limit
        self._key: tuple[str, int, int] | None = None
        self._size = self._room = 0
        self._memory = np.empty(0, np.uint8)
        self._rows: list[memoryview] = []

    def put(self, frame: av.AudioFrame, start: int, stop: int, position: int) -> bool:
        """Copy samples of a frame; True: there are enough, or the format has changed."""
        if (frame.format.name, frame.layout.nb_channels, frame.sample_rate) != self._key:
            if self._key is not None:
                self.mixed = True
                return True
            self._begin(frame, position)
        begin, size = self.count, self._size
        end = begin + stop - start
        if end > self._room:
            end = min(end, self._limit)
            stop = start + end - begin
            if end > self._room:
                self._grow(begin, min(2 * end, self._limit))
        self.count = end
        begin, end, start, stop = begin * size, end * size, start * size, stop * size
        # Rows first: of more than 8 channels PyAV gives planes that are none.
        for row, plane in zip(self._rows, frame.planes, strict=False):
            row[begin:end] = memoryview(plane)[start:stop]
        return self.count >= self._limit

    def _begin(self, frame: av.AudioFrame, position: int) -> None:
        name, channels, rate = frame.format.name, frame.layout.nb_channels, frame.sample_rate
        self._key, self.format = (name, channels, rate), (name, frame.layout.name, rate)
        self.first = position
        planes = channels if frame.format.is_planar else 1
        self._size = frame.format.bytes * channels // planes
        self._rows = [memoryview(b"")] * planes
        expected = min(math.ceil(self._end * rate) - position, self._limit)
        most = _MOST_EXPECTED // (self._size * planes)
        self._grow(0, min(max(expected, frame.samples), most, self._limit))

    def _grow(self, filled: int, room: int) -> None:
        size, old = self._size, self._rows
        self._memory, self._room = self._allocate(room * size * len(old)), room
        self._rows = _split(self._memory, room * size, len(old))
        for row, other in zip(self._rows, old, strict=True):
            row[: filled * size] = other[: filled * size]

    def array(self) -> npt.NDArray[Any]:
        """The samples: ``(channels, samples)`` in planar formats, ``(samples, channels)`` in packed ones."""
        assert self._key is not None, "only where samples came"
        name, channels, _ = self._key
        planes, used = len(self._rows), self.count * self._size
        if planes > 1 and self.count < self._room:  # close the gaps behind the rows
            rows = _split(self._memory, used, planes)
            for row, other in zip(rows, self._rows, strict=True):
                row[:] = other[:used]
        values = self._memory[: used * planes].view(SAMPLE_DTYPES[name.removesuffix("p")])
        shape = (channels, self.count) if name.endswith("p") else (self.count, channels)
        return values.reshape(shape)


def _split(memory: npt.NDArray[np.uint8], size: int, count: int) -> list[memoryview]:
    return [memory.data[start : start + size] for start in range(0, count * size, size)]


@cache
def layout_name(text: str) -> str:
    """FFmpeg's name of a channel layout, which it reads from a name, a mask of speakers or a number."""
    return av.AudioLayout(text).name


@cache
def num_channels(layout: str) -> int:
    """Number of channels of a layout."""
    return av.AudioLayout(layout).nb_channels


def filter_samples(
    samples: npt.NDArray[Any],
    format: tuple[str, str, int],
    position: int,
    zero: Fraction,
    filter_desc: str,
) -> list[AudioChunk]:
    """What a filter graph makes of an array of samples.

    Args:
        samples: ``(samples, channels)``.
        format: Sample format, channel layout and sample rate of the samples.
        position: Of the first sample on the container's clock.
        zero: Second 0 of the container on the stream's own clock.
        filter_desc: The graph.
    """
    name, layout, rate = format
    time_base = sample_time_base(rate, zero)
    graph, frames = FrameFilter(filter_desc, kind="audio", time_base=time_base), []
    for start in range(0, len(samples), _BLOCK):
        part = samples[start : start + _BLOCK]
        frame = av.AudioFrame(name, layout, len(part))
        frame.sample_rate = rate
        planes = part.T if name.endswith("p") else [part.reshape(-1)]
        for plane, values in zip(frame.planes, planes, strict=False):
            target = np.frombuffer(memoryview(plane), values.dtype, values.size)
            target[:] = values
        chunk = AudioChunk(frame, 0, len(part), position + start)
        place_frame(frame, exact_pts(chunk, time_base, zero), time_base)
        frames += graph.push(frame)
    return [placed_chunk(frame, zero) for frame in (*frames, *graph.flush())]
