"""Decode packets to audio samples, into a sink: chunks of FFmpeg's frames, or rows of an array."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from fractions import Fraction
from itertools import chain, count, islice
from typing import Any, TypeAlias

import av

from spdl_media._ffmpeg import AvPacket, current_log, describe, unheard_log
from spdl_media._threads import fork_safe_lock, has_gil
from spdl_media.audio_clock import GapDetector, even_samples, frame_position, vorbis_pts_error
from spdl_media.codec import AudioCodec, OpenDecoder, SpareDecoder, make_decoder
from spdl_media.config import DEFAULT_DECODE_CONFIG, DecodeConfig
from spdl_media.errors import DecodeError
from spdl_media.frame_scan import CodedFrames
from spdl_media.frames import silent_frame
from spdl_media.packets import FrameMetadata, PacketMetadata, make_packet
from spdl_media.sample_rows import SampleChunks, SampleRows
from spdl_media.timing import nearest_sample, ticks_to_seconds

Put: TypeAlias = Callable[[av.AudioFrame, int, int, int], bool]
"""Method of a sink: ``put(frame, start, stop, position)``.

Takes the samples ``start`` to ``stop`` of a frame, of which the first is sample ``position`` of the stream.
Returns whether the sink is full.
"""

# Silence for a gap is made in frames of at most this many samples.
_SILENCE = 16 * 1024

# The longest gap in seconds. A damaged timestamp could ask for more silence than there is memory.
_MOST_SILENCE = 3600

# Number of packets that are read before they are decoded. Small, because the window may end at any packet.
_AT_ONCE = 64

# Whole files up to this size in bytes are read into the system's cache first, so that a thread never decodes
# while another one reads packets: with two threads, that takes 1.2 to 1.4 times as long for Vorbis.
READ_FIRST = 16 << 20

# A position before all samples.
_BEFORE_ALL = -(2**63)


# Files of MPEG audio are bare frames. Padding or tags (Lyrics3) may follow the last one.
_BARE_FRAMES = frozenset({"mp1", "mp2", "mp3"})


def _has_frame(packet: AvPacket) -> bool:
    """Whether a packet begins with the sync word of MPEG audio, eleven set bits."""
    head = bytes(memoryview(packet)[:2])
    return len(head) == 2 and head[0] == 0xFF and head[1] >= 0xE0


# An open decoder for reuse: opening one takes as long as decoding six frames of MP3, or 20 packets of Vorbis.
_spare = SpareDecoder()

# Flushing fully resets the decoders of these. That of AAC keeps the state of its noise generator.
_FRESH_WHEN_FLUSHED = frozenset({"opus", "vorbis"})


class SampleDecoder(OpenDecoder):
    """Decodes packets in order and gives the samples inside the window.

    Sample ``k`` of the stream is at ``k / sample_rate`` seconds on the container's clock. The position of the
    first sample follows from the first frame's timestamp. From there on samples are counted, so that rounded
    or jittering timestamps do not make gaps. A timestamp that is ahead of the count by half a frame or more
    (a whole frame, if all frames have one size) is a real gap: packets are missing.
    """

    _remedy = ". decode_config(on_corrupt='drop') leaves damaged packets out"

    def __init__(
        self,
        codec: AudioCodec,
        metadata: PacketMetadata,
        config: DecodeConfig,
        discarded: frozenset[int] = frozenset(),
    ) -> None:
        # A decoder of Opus in MP4 skips the encoder's delay itself, but only once, even if the header states
        # none. In Ogg and Matroska (which have no codec_tag) the packets state what to skip, if the container
        # states a delay.
        is_flushed = codec.name in _FRESH_WHEN_FLUSHED and not codec.codec_tag
        is_flushed = is_flushed and (codec.name != "opus" or codec.delay > 0)
        self._is_reusable = is_flushed and config == DEFAULT_DECODE_CONFIG
        context = _spare.take(codec, config, metadata.source) if self._is_reusable else None
        super().__init__(codec, metadata, config, context)
        self.last_packet: AvPacket | None = None
        self._position: int | None = None
        self._is_second = False
        self._fills = config.gaps == "fill"
        self._filled_to: int | None = None
        self._tail: DecodeError | None = None
        self._late = 2 * vorbis_pts_error(codec)
        self._is_flac_file = codec.name == "flac" and not codec.codec_tag
        self._even = even_samples(codec)
        # Twice the number of frames by which a timestamp may be ahead of the samples without a gap. Packets
        # of WMA state the time of the first frame that begins in them, which may be the third that they give.
        self._most_ahead = 6 if codec.name.startswith("wma") else 1
        self._gaps, self._origin = GapDetector(0), 0
        self._expected = 0
        self.follow(metadata, discarded)

    def follow(self, metadata: PacketMetadata, discarded: frozenset[int]) -> None:
        """Use the window and the clock of the next packets, and the timestamps of the frames they hide."""
        self.metadata: PacketMetadata = metadata
        self.discarded |= discarded
        self._finished = False
        self._rate = 0  # set from the next frame

    def take_metadata(self) -> FrameMetadata:
        """Return the metadata of the samples that came out since the last call, and reset the count."""
        metadata = FrameMetadata.of(self.metadata, num_dropped=self.num_dropped)
        self.num_dropped = 0
        return metadata

    def decode(  # noqa: C901  # one body, because calls would cost as much as small frames
        self, packets: Iterable[AvPacket | None], put: Put
    ) -> bool:
        """Decode packets and pass their samples to ``put``; a final ``None`` flushes the decoder.

        Call it in a :func:`~spdl_media._ffmpeg.ffmpeg_log` block, which is entered once for many packets.

        Returns:
            Whether the sink is full, which ends the loop.

        Raises:
            DecodeError: The data is damaged, with ``on_corrupt="raise"``.
        """
        decode, unit = self._context.decode, self._codec.time_base.denominator
        put = self._filling(put) if self._fills else put
        lines = current_log.lines
        assert lines is not None, "decode in a block of ffmpeg_log()"
        for packet in packets:
            if packet is not None:
                if self._finished:
                    continue
                self.last_packet = packet
                self._packet_index += 1
            said = len(lines)
            try:
                frames = decode(packet)
            except av.FFmpegError as error:
                self._judge(packet, error, describe(error, lines[said:]))
                continue
            if len(frames) > 1 and self._position is None and self._is_flac_file:
                # If the third or fourth frame of a file is damaged, FFmpeg gives it and those before it as
                # one packet, at the timestamp of the last one, and second 0 is there.
                self._lose(self._error("FFmpeg takes several frames for one", frames[0].pts))
            if self._tail is not None and frames:
                # Frames follow the bytes without a frame. So those are damage, not a tag at the end.
                tail, self._tail = self._tail, None
                self._lose(tail, tail.__cause__)
            # Inlined, because calls would take as long as small frames.
            for frame in frames:
                samples, pts = frame.samples, frame.pts
                if frame.sample_rate != self._rate:
                    self._set_rate(frame.sample_rate)
                # Times are integers: ticks times self._scale. Fractions would take longer than decoding a
                # small frame, and hold the GIL meanwhile.
                ticks = self._expected if pts is None else pts * self._scale
                position = self._position
                if position is None or ticks > self._expected or self._is_second:
                    position = self._locate(frame, position, ticks)
                self._position = end = position + samples
                self._expected = ticks + samples * unit
                if pts in self.discarded or (frame.is_corrupt and not self._accepts(frame)):
                    continue
                if packet is None:  # PyAV does not set it on flushed frames
                    frame.time_base = self._codec.time_base
                start, stop = 0, samples
                if position < self._first or end >= self._stop:
                    self._finished = end >= self._stop
                    start = max(self._first - position, 0)
                    stop = min(self._stop - position, samples)
                # A frame past the window is passed on if gaps are filled: it ends a gap in the window.
                is_part = start < stop or (self._fills and position >= self._stop)
                if is_part and put(frame, start, stop, position + start):
                    return True
        return False

    def push(self, packet: AvPacket | None, sink: SampleChunks) -> None:
        """Put the samples of this packet into a sink; ``None`` flushes the decoder and the sink's filters.

        Raises:
            DecodeError: As for :meth:`decode`.
            FilterError: The filters do not accept the samples.
        """
        self.decode((packet,), sink.put)
        if packet is None:
            sink.flush()

    def run(
        self, packets: Iterable[AvPacket], sink: SampleChunks | SampleRows, *, in_memory: bool
    ) -> None:
        """Read packets, put their samples into a sink, and close the decoder or keep it for reuse.

        Call it in a :func:`~spdl_media._ffmpeg.ffmpeg_log` block.

        Args:
            packets: The packets; iterated as they are needed.
            sink: Where the samples go.
            in_memory: Reading a packet does not wait for a disk or a network.

        Raises:
            DecodeError: The data is damaged, with ``on_corrupt="raise"``.
            FilterError: The filters do not accept the samples.
        """
        # Without the lock for a filter graph, which may run long without the GIL.
        is_filtered = isinstance(sink, SampleChunks) and sink.has_graph
        needs_lock = self._codec.name in _SHORT_FRAMES and not is_filtered
        lock: Any = _short_locks[0] if needs_lock else nullcontext()
        # None flushes the decoder.
        left = chain(packets, (None,))
        # A slow source is read outside of the lock.
        with lock if in_memory else nullcontext():
            while part := list(islice(left, _AT_ONCE)):
                with lock:
                    if self.decode(part, sink.put):
                        break
        if self._is_reusable:
            self._context.flush_buffers()
            _spare.put_back(self._codec, self._context)
        sink.flush()

    def _filling(self, put: Put) -> Put:
        """Wrap ``put`` so that silence fills gaps between samples, and at the window's start."""

        def fill(frame: av.AudioFrame, start: int, stop: int, position: int) -> bool:
            begin = self._filled_to
            if begin is None:
                begin = position if self.metadata.window.start is None else self._first
            position = min(position, self._stop)
            if position - begin > _MOST_SILENCE * self._rate:
                text = "more than an hour before it has no audio, which is not filled"
                self._lose(self._error(text, frame.pts))
                begin = position
            while begin < position:
                count = min(position - begin, _SILENCE)
                if put(silent_frame(frame, count), 0, count, begin):
                    return True
                begin += count
            self._filled_to = position + max(stop - start, 0)
            return start < stop and put(frame, start, stop, position)

        return fill

    def _set_rate(self, rate: int) -> None:
        """Set the values that depend on the sample rate, which may change within a stream."""
        self._rate, self._scale = rate, self._codec.time_base.numerator * rate
        codec, window = self._codec, self.metadata.window
        first, self._stop = window.sample_range(rate)
        # Without a window, samples before second 0 are kept, too. Those of Opus are the encoder's delay, of
        # which FFmpeg skips too few in MP4, where it takes ticks for samples, and in Matroska.
        is_exact = window or (codec.name == "opus" and codec.delay)
        self._first = first if is_exact else _BEFORE_ALL
        if codec.codec_tag and codec.delay and codec.start_pts and codec.time_base * rate == 1:
            # After a seek, FFmpeg shows what the edit list of an MP4 hides before the first sample.
            start = nearest_sample(codec.start_pts, codec.time_base, self.metadata.zero, rate)
            self._first = max(self._first, start)

    def _judge(self, packet: AvPacket | None, error: av.FFmpegError, text: str) -> None:
        """Handle a packet that cannot be decoded: raise the error, count the packet, or ignore it."""
        if packet is not None and self._is_preroll(packet):
            return  # after a seek, an MP3 frame may need bits of frames before the position
        # A tag or padding, if no frame follows: see decode.
        if packet is not None and self._codec.name in _BARE_FRAMES and not _has_frame(packet):
            if self._tail is None:
                self._tail = self._error(text, packet.pts)
                self._tail.__cause__ = error
            return
        self._lose(self._error(text, None if packet is None else packet.pts), error)

    def _is_preroll(self, packet: AvPacket) -> bool:
        start = self.metadata.window.start
        if start is None or packet.pts is None:
            return False
        # A packet without a duration may reach into the window, unless no samples came out so far.
        if not packet.duration and self._position is not None:
            return False
        end_pts = packet.pts + (packet.duration or 0)
        return ticks_to_seconds(end_pts, self._codec.time_base, self.metadata.zero) <= start

    def _accepts(self, frame: av.AudioFrame) -> bool:
        """Whether to keep a damaged frame; raises, or counts it as dropped, by ``on_corrupt``."""
        if self._config.on_corrupt == "raise":
            raise self._error("the decoder reports that the frame is damaged", frame.pts)
        self.num_dropped += self._config.on_corrupt == "drop"
        return self._config.on_corrupt == "keep"

    def _locate(self, frame: av.AudioFrame, position: int | None, ticks: int) -> int:
        """Return the position of a frame's first sample, for a first frame or one ahead of the count."""
        unit, jitter = self._codec.time_base.denominator, 4 * self._scale
        ahead = 2 * (ticks - self._expected)
        is_second, self._is_second = self._is_second, position is None
        # Rounded timestamps jitter by a tick or two; half a frame or more is a gap.
        most_ahead = max(jitter + self._late * unit, self._most_ahead * frame.samples * unit)
        if position is not None:
            if 0 < self._even <= frame.samples:
                if not self._gaps.is_gap(ticks - position * unit - self._origin):
                    return position
            elif ahead <= most_ahead:
                if not (is_second and self._late and ahead < -max(jitter, self._late * unit // 2)):
                    return position
                position = None  # the first frame, which is before the window, was stated too late
        stated = frame_position(self._codec, frame.pts or 0, frame.samples, self.metadata.zero)
        if position is None:
            size = max(jitter, self._even * unit - jitter // 2)
            self._gaps, self._origin = GapDetector(size), ticks - stated * unit
            return stated
        if stated > position:
            self._check_gap(position, stated, frame)
        return max(stated, position)

    def _check_gap(self, position: int, stated: int, frame: av.AudioFrame) -> None:
        """Treat a gap as damage in formats that cannot have gaps: FLAC files, and FLAC in Ogg.

        Their frames are numbered. FFmpeg's parser appends a damaged frame to the one before it, and the
        decoder silently ignores it.
        """
        if not self._is_flac_file or self._codec.time_base != Fraction(1, self._rate):
            return  # other containers may have real gaps
        if stated <= max(self._first, 0) or position >= self._stop:
            return
        self._lose(self._error(f"{stated - position} samples before it are missing", frame.pts))


# Codecs with short frames are decoded by one thread at a time. FFmpeg takes 4 microseconds for a frame of
# MP3, 20 for one of AAC or Vorbis, and PyAV releases the GIL four times for each. Four threads that pass the
# GIL to each other use up to four times the CPU, and decode half as many files a second as one thread. With
# many frames per packet, they need the GIL less: two threads decode 1.3 times as many files as one, but four
# no more than one. The locks are reentrant, because a signal handler may decode, too.
_short_locks = [fork_safe_lock() if has_gil() else nullcontext() for _ in range(2)]

_SHORT_FRAMES = frozenset({"aac", "mp3", "vorbis"})


class _ThreadLock(threading.local):
    """The lock under which a thread decodes packets of many frames. Threads get the locks alternately."""

    numbers = count()

    def __init__(self) -> None:
        self.lock = _short_locks[next(self.numbers) % len(_short_locks)]


_thread_lock = _ThreadLock()


_SMALL = 4096  # samples


def decode_frames(found: CodedFrames, config: DecodeConfig, rows: SampleRows, source: str) -> bool:
    """Decode consecutive frames, many per packet, put the samples of their window into rows, and flush those.

    Returns:
        False if the frames give another number of samples than expected, or differ in format.

    Raises:
        DecodeError: This FFmpeg has no decoder for the codec.
        FilterError: The filters do not take the samples.
    """
    # The decoder of AAC keeps the state of its noise generator when it is flushed.
    is_reusable = found.codec.name != "aac"
    make = _spare.take if is_reusable else make_decoder
    decoder: Any = make(found.codec, config, source)
    (first, last), places, count = found.window, found.positions, len(found.packets)
    decode, unit = decoder.decode, found.codec.time_base
    # Decode a few small packets before their samples are copied, but no more than the CPU cache holds.
    step = 1 + _SMALL * count // (places[-1] - places[0])
    # Without a lock for a resampler, which runs long without the GIL.
    needs_lock = found.codec.name in _SHORT_FRAMES and not rows.resamples(found.codec.sample_rate)
    with _thread_lock.lock if needs_lock else nullcontext(), unheard_log():
        for number in range(0, count, step):
            packets = found.packets[number : number + step]
            position, end = places[number], places[min(number + step, count)]
            try:
                frames = [frame for one in packets for frame in decode(make_packet(one, unit))]
            except av.FFmpegError:
                return False
            part = min(max(first, position), end) - position, min(last, end) - position
            # Also catches errors that raise nothing: PyAV hides one that follows good frames, and MP3
            # decoders drop bad frames.
            if not rows.put_frames(frames, end - position, part, first):
                return False
        rows.flush()
    # Kept for reuse only here: after an error, flushing might not fully reset the decoder.
    if is_reusable:
        decoder.flush_buffers()
        _spare.put_back(found.codec, decoder)
    return True
