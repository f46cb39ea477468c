"""The one loop from packets to samples. It ends in a sink: chunks of FFmpeg's frames, or rows of an array."""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from fractions import Fraction
from itertools import chain, islice
from typing import Any, TypeAlias

import av

from spdl_media._ffmpeg import AvPacket, current_log, describe, ffmpeg_log
from spdl_media._picture_decoder import OpenDecoder
from spdl_media.audio_clock import Lead, even_samples, frame_position, vorbis_lateness
from spdl_media.codec import AudioCodec, DecoderAtRest
from spdl_media.config import DEFAULT_DECODE_CONFIG, DecodeConfig
from spdl_media.errors import DecodeError
from spdl_media.filters import FrameFilter
from spdl_media.frame_scan import CodedFrames
from spdl_media.frames import (
    AudioChunk,
    cut_chunks,
    frame_of,
    placed_chunk,
    sample_time_base,
    silent_frame,
)
from spdl_media.operations import SoundOps, sound_ops
from spdl_media.packets import FrameMetadata, PacketMetadata
from spdl_media.sample_rows import SampleRows
from spdl_media.timing import ticks_to_seconds

Put: TypeAlias = Callable[[av.AudioFrame, int, int, int], bool]
"""Takes samples ``start`` to ``stop`` of a frame, and the position of the first; True: it has enough."""

# Samples of silence at a time.
_SILENCE = 16 * 1024

# Packets that are read and then decoded. Few, since the samples that are wanted may end with any.
_AT_ONCE = 64

# Sample numbers stay far below, so this is before the first one.
_BEFORE_ALL = -(2**63)


# Frames of MPEG audio stand alone in their files, and padding and tags (Lyrics3) may follow the last.
_BARE_FRAMES = frozenset({"mp1", "mp2", "mp3"})


def _has_frame(packet: AvPacket) -> bool:
    """Whether a packet begins as a frame of MPEG audio does, with eleven bits set."""
    head = bytes(memoryview(packet)[:2])
    return len(head) == 2 and head[0] == 0xFF and head[1] >= 0xE0


# Opening a decoder takes as long as to decode six frames of MP3, or 20 packets of Vorbis.
_at_rest = DecoderAtRest()

# Flushing a decoder of these makes it as fresh. That of AAC goes on in its noise.
_FRESH_WHEN_FLUSHED = frozenset({"opus", "vorbis"})


class SampleDecoder(OpenDecoder):
    """Decodes packets in order and gives the samples that lie in the window.

    Sample ``k`` of the stream stands at ``k / sample_rate`` on the container's clock. The first frame's
    timestamp tells which sample it begins with; from there on samples are counted, so that timestamps
    that are rounded or jitter do not open gaps. A timestamp that jumps ahead of the one before by half
    a frame or more (a whole one, where all are of one size) is a real gap: packets are missing.
    """

    _remedy = ". decode_config(on_corrupt='drop') leaves damaged packets out"

    def __init__(
        self,
        codec: AudioCodec,
        metadata: PacketMetadata,
        config: DecodeConfig,
        discarded: frozenset[int] = frozenset(),
    ) -> None:
        # A decoder of Opus in MP4 leaves out the encoder's delay itself, once, even if the header states
        # none. In Ogg and Matroska, which give it no tag, packets say so.
        is_flushed = codec.name in _FRESH_WHEN_FLUSHED and not codec.codec_tag
        self._may_rest = is_flushed and config == DEFAULT_DECODE_CONFIG
        context = _at_rest.take(codec, config, metadata.source) if self._may_rest else None
        super().__init__(codec, metadata, config, context)
        self.last_packet: AvPacket | None = None
        self._position: int | None = None
        self._is_second = False
        self._fills = config.gaps == "fill"
        self._filled_to: int | None = None
        self._tail: DecodeError | None = None
        self._late = 2 * vorbis_lateness(codec)
        self._even = even_samples(codec)
        self._lead, self._origin = Lead(0), 0
        self._expected = 0
        self.follow(metadata, discarded)

    @property
    def has_started(self) -> bool:
        """Whether it has been given any packet."""
        return self._packet_index >= 0

    def follow(self, metadata: PacketMetadata, discarded: frozenset[int]) -> None:
        """Take the window and the clock of the packets that come next, and the frames that they hide."""
        self.metadata = metadata
        self.discarded |= discarded
        self._finished = False
        self._rate = 0  # the first frame tells it

    def take_metadata(self) -> FrameMetadata:
        """Return the metadata of the samples that came out since the last call."""
        metadata = FrameMetadata.of(self.metadata, num_dropped=self.num_dropped)
        self.num_dropped = 0
        return metadata

    def decode(  # noqa: C901  # one body, because calls would cost as much as small frames
        self, packets: Iterable[AvPacket | None], put: Put
    ) -> bool:
        """Hand over what comes out for these packets, and for a final ``None`` what is held back.

        Call it in a block of :func:`~spdl_media._ffmpeg.ffmpeg_log`, which is entered once for many packets.

        Returns:
            Whether ``put`` has had enough, which ends the loop.

        Raises:
            DecodeError: The data is damaged, with ``on_corrupt="raise"``.
        """
        decode, unit = self._context.decode, self._codec.time_base.denominator
        put = self._filling(put) if self._fills else put
        lines = current_log()
        assert lines is not None, "decode in a block of ffmpeg_log()"
        for packet in packets:
            if packet is not None:
                if self._finished:
                    continue
                self._packet_index += 1
                self.last_packet = packet
            said = len(lines)
            try:
                frames = decode(packet)
            except av.FFmpegError as error:
                self._judge(packet, error, describe(error, lines[said:]))
                continue
            if self._tail is not None and frames:
                # Bytes without a frame had frames behind them: they are damage, and no tag at the end.
                tail, self._tail = self._tail, None
                self._lose(tail, tail.__cause__)
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
                if pts in self.discarded or (frame.is_corrupt and not self._accepts(frame)):
                    continue
                if packet is None:  # PyAV leaves it out of the frames held back
                    frame.time_base = self._codec.time_base
                start, stop = 0, samples
                if position < self._first or end >= self._stop:
                    self._finished = end >= self._stop
                    start = max(self._first - position, 0)
                    stop = min(self._stop - position, samples)
                # What lies past the window shows where a gap in it ends.
                is_part = start < stop or (self._fills and position >= self._stop)
                if is_part and put(frame, start, stop, position + start):
                    return True
        return False

    def run(self, packets: Iterable[AvPacket], sink: SampleChunks | SampleRows) -> None:
        """Put the samples of all packets into a sink, as they are read, and let the decoder come to rest.

        Call it in a block of :func:`~spdl_media._ffmpeg.ffmpeg_log`.

        Raises:
            DecodeError: The data is damaged, with ``on_corrupt="raise"``.
            FilterError: The filters do not take the samples.
        """
        # Filters of the caller's own may run long without the GIL.
        is_filtered = isinstance(sink, SampleChunks) and sink.filters
        turn = nullcontext() if is_filtered else in_turn(self._codec)
        # None flushes the decoder.
        left = chain(packets, (None,))
        try:
            # Read before it is this thread's turn: a source may be slow.
            while part := list(islice(left, _AT_ONCE)):
                with turn:
                    if self.decode(part, sink.put):
                        break
            if self._may_rest:
                self._context.flush_buffers()
                _at_rest.put_back(self._codec, self._context)
            sink.flush()
        finally:
            self.close()

    def _filling(self, put: Put) -> Put:
        """The same sink, which gets silence for what is missing before the samples that it is given."""

        def fill(frame: av.AudioFrame, start: int, stop: int, position: int) -> bool:
            begin = self._filled_to
            if begin is None:
                begin = position if self.metadata.window.start is None else self._first
            position = min(position, self._stop)
            while begin < position:
                count = min(position - begin, _SILENCE)
                if put(silent_frame(frame, count), 0, count, begin):
                    return True
                begin += count
            self._filled_to = position + max(stop - start, 0)
            return start < stop and put(frame, start, stop, position)

        return fill

    def _set_rate(self, rate: int) -> None:
        """Compute what depends on the sample rate, which may change in a stream."""
        self._rate, self._scale = rate, self._codec.time_base.numerator * rate
        window = self.metadata.window
        first, stop = window.samples(rate)
        # Without a window, what lies before second 0 is kept, too.
        self._first = first if window else _BEFORE_ALL
        self._stop = sys.maxsize if stop is None else stop

    def _judge(self, packet: AvPacket | None, error: av.FFmpegError, text: str) -> None:
        """A packet cannot be decoded: raise the error, count it, or let it pass."""
        if packet is not None and self._is_preroll(packet):
            return  # an MP3 frame that takes bits from one before the place that was sought
        if packet is not None and self._codec.name in _BARE_FRAMES and not _has_frame(packet):
            self._tail = self._tail or self._error(text, packet.pts)
            self._tail.__cause__ = error
            return
        self._lose(self._error(text, None if packet is None else packet.pts), error)

    def _is_preroll(self, packet: AvPacket) -> bool:
        start = self.metadata.window.start
        if start is None or packet.pts is None:
            return False
        # Without a duration it may reach into the window, unless nothing came out so far.
        if not packet.duration and self._position is not None:
            return False
        end_pts = packet.pts + (packet.duration or 0)
        return ticks_to_seconds(end_pts, self._codec.time_base, self.metadata.zero) <= start

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
        if position is not None and 0 < self._even <= frame.samples:
            if not self._lead.is_gap(ticks - position * unit - self._origin):
                return position
        elif position is not None and ahead <= max(
            jitter + self._late * unit, frame.samples * unit
        ):
            if not (is_second and self._late and ahead < -jitter):
                return position
            position = None  # the first frame was the late one: it lies before the window
        stated = frame_position(self._codec, frame.pts or 0, frame.samples, self.metadata.zero)
        if position is None:
            size = max(jitter, self._even * unit - jitter // 2)
            self._lead, self._origin = Lead(size), ticks - stated * unit
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
            return  # other containers may leave audio out
        if stated <= max(self._first, 0) or position >= self._stop:
            return
        self._lose(self._error(f"{stated - position} samples before it are missing", frame.pts))


# Short frames are decoded by one thread at a time. FFmpeg takes 4 microseconds for one of MP3, 20 for one of
# AAC or Vorbis, and PyAV lets go of the GIL four times for each. Four threads that hand it to each other take
# up to four times the CPU, and give half as many files a second as one. A signal handler may enter again.
_turn: Any = threading.RLock()
if not getattr(sys, "_is_gil_enabled", lambda: True)():
    _turn = nullcontext()
elif hasattr(os, "register_at_fork"):
    # It may be held by a thread that is not there in the child.
    os.register_at_fork(after_in_child=_turn._at_fork_reinit)

_IN_TURN = frozenset({"aac", "mp3", "vorbis"})


def in_turn(codec: AudioCodec) -> AbstractContextManager[object]:
    """A block in which packets in memory are decoded, in one thread at a time where frames are short."""
    return _turn if codec.name in _IN_TURN else nullcontext()


def decode_frames(found: CodedFrames, config: DecodeConfig, rows: SampleRows, source: str) -> bool:
    """Decode frames that follow each other, many at a time, and put those of their window into rows.

    Returns:
        False: they do not give the samples that they should, or are of several formats.

    Raises:
        DecodeError: This FFmpeg has no decoder for the codec.
    """
    decoder = _at_rest.take(found.codec, config, source)
    (first, last), position = found.window, found.position
    # A resampler runs long without the GIL, so in several threads at once.
    is_alone = not rows.resamples(found.codec.sample_rate)
    with in_turn(found.codec) if is_alone else nullcontext(), ffmpeg_log():
        for packet, num_samples in found.packets():
            try:
                frames = decoder.decode(packet)
            except av.FFmpegError:
                return False
            start, stop = max(first - position, 0), last - position
            part = min(start, num_samples), min(stop, num_samples)
            # PyAV keeps an error to itself that comes behind good frames, and an MP3 decoder drops bad ones.
            if not rows.put_frames(frames, num_samples, part, first):
                return False
            position += num_samples
    # After an error its state might not be that of a fresh one.
    decoder.flush_buffers()
    _at_rest.put_back(found.codec, decoder)
    return True


class SampleChunks:
    """A sink: chunks of frames, which pass through a filter graph first unless they are as it gives them.

    Args:
        codec: Of the packets.
        zero: Second 0 of the container on the stream's own clock.
        filter_desc: The graph; ``None`` for none.
        limit: This many samples are enough.

    Attributes:
        filters: Whether frames pass through a graph.
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
        self.filters = filter_desc is not None and ops != SoundOps(sample_fmt=None)
        if filter_desc is not None and self.filters:
            self._graph = FrameFilter(filter_desc, kind="audio", time_base=codec.time_base)
        # Of a sample rate and a start, because fractions are slow to make.
        self._unit = (0, zero, zero)

    def put(self, frame: av.AudioFrame, start: int, stop: int, position: int) -> bool:
        """Take samples of a frame; True: there are enough.

        Raises:
            FilterError: The graph does not take them.
        """
        chunk = AudioChunk(frame, start, stop, position)
        if self._graph is None or frame.format.name == self._same_fmt:
            self.chunks.append(chunk)
            self.count += stop - start
            return self.count >= self._limit
        unit = self._unit
        if unit[:2] != (frame.sample_rate, self.zero):
            time_base = sample_time_base(frame.sample_rate, self.zero)
            unit = self._unit = (frame.sample_rate, self.zero, time_base)
        # A frame of the decoder's is shared with nobody yet.
        return self._append(self._graph.push(frame_of(chunk, unit[2], self.zero)))

    def flush(self) -> None:
        """Take what the graph holds back.

        Raises:
            FilterError: A filter fails.
        """
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
