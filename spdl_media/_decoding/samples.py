"""One audio decoder: packets in, samples of the window out, cut exactly."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import av

from spdl_media._demuxing.sample_clock import frame_position
from spdl_media._ffmpeg import AvPacket, describe, ffmpeg_log
from spdl_media.codec import AudioCodec, close_decoder, make_decoder
from spdl_media.config import DecodeConfig
from spdl_media.errors import DecodeError
from spdl_media.frames import AudioChunk
from spdl_media.packets import PacketMetadata
from spdl_media.timing import Window, ticks_to_seconds


class SampleDecoder:
    """Decodes packets in order and gives the samples that lie in the window.

    Sample ``k`` of the stream stands at ``k / sample_rate`` on the container's clock. The first frame's
    timestamp tells which sample it begins with; from there on samples are counted, so that timestamps
    that are rounded or jitter do not open gaps. A timestamp that jumps ahead of the one before by half
    a frame or more is a real gap: packets are missing.
    """

    def __init__(self, codec: AudioCodec, facts: PacketMetadata, config: DecodeConfig) -> None:
        self._codec = codec
        self._config = config
        self.facts = facts
        self.discarded: frozenset[int] = frozenset()
        self.num_dropped = 0
        self.finished = False
        self._context = make_decoder(codec, config, facts.source)
        self._packet_index = -1
        self._position: int | None = None
        self._expected_pts = 0
        self._window_key: tuple[Window, int] | None = None
        self._window_samples: tuple[int, int | None] = (0, None)

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

    def decode(self, packet: AvPacket | None) -> Iterator[tuple[int, AudioChunk]]:
        """Chunks that are ready after this packet, each with the position of its first sample."""
        if packet is not None:
            self._packet_index += 1
        for frame in self._send(packet):
            frame.time_base = self._codec.time_base  # PyAV leaves it out of the frames held back
            position = self._locate(frame)
            if frame.pts in self.discarded or not self._accepts(frame):
                continue
            first, stop = self._window(frame.sample_rate)
            if not self.facts.window:
                first = position
            self.finished = stop is not None and position + frame.samples >= stop
            start = max(first - position, 0)
            end = frame.samples if stop is None else min(stop - position, frame.samples)
            if start < end:
                yield position + start, AudioChunk(frame, start, end, position + start)

    def _send(self, packet: AvPacket | None) -> list[av.AudioFrame]:
        with ffmpeg_log() as lines:
            try:
                frames: list[av.AudioFrame] = self._context.decode(packet)  # type: ignore[attr-defined]  # audio
                return frames
            except av.FFmpegError as error:
                cause, text = error, describe(error, lines)
        if packet is not None and self._is_preroll(packet):
            return []  # an MP3 frame that takes bits from one before the place that was sought
        if self._config.on_corrupt == "raise":
            raise self._error(text, None if packet is None else packet.pts) from cause
        self.num_dropped += 1
        return []

    def _is_preroll(self, packet: AvPacket) -> bool:
        start = self.facts.window.start
        if start is None or packet.pts is None:
            return False
        # Without a duration it may reach into the window, unless nothing came out so far.
        if not packet.duration and self._position is not None:
            return False
        end_pts = packet.pts + (packet.duration or 0)
        return ticks_to_seconds(end_pts, self._codec.time_base, self.facts.zero) <= start

    def _accepts(self, frame: av.AudioFrame) -> bool:
        if not frame.is_corrupt or self._config.on_corrupt == "keep":
            return True
        if self._config.on_corrupt == "raise":
            raise self._error("the decoder reports that the frame is damaged", frame.pts)
        self.num_dropped += 1
        return False

    def _locate(self, frame: av.AudioFrame) -> int:
        """Position of the frame's first sample on the container's clock."""
        # In whole numbers, pts and durations times this: fractions would take longer than small frames take
        # to decode, and hold the GIL meanwhile.
        scale = self._codec.time_base.numerator * frame.sample_rate
        duration = frame.samples * self._codec.time_base.denominator
        pts = self._expected_pts if frame.pts is None else frame.pts * scale
        position = self._position
        if position is None or 2 * (pts - self._expected_pts) > max(4 * scale, duration):
            stated = frame_position(self._codec, frame.pts or 0, frame.samples, self.facts.zero)
            if position is not None and stated > position:
                self._check_gap(position, stated, frame)
            position = max(stated, position or stated)
        self._position = position + frame.samples
        self._expected_pts = pts + duration
        return position

    def _window(self, sample_rate: int) -> tuple[int, int | None]:
        """First sample of the window, and the one after its last."""
        key = (self.facts.window, sample_rate)
        if key != self._window_key:
            self._window_key, self._window_samples = key, key[0].samples(sample_rate)
        return self._window_samples

    def _check_gap(self, position: int, stated: int, frame: av.AudioFrame) -> None:
        """Take a gap for damage where there can be none: in FLAC's own files, and in Ogg.

        Their frames number themselves. FFmpeg's parser takes a damaged frame for a part of the one before,
        and the decoder ignores it without a word.
        """
        codec, rate = self._codec, frame.sample_rate
        if codec.name != "flac" or codec.codec_tag or codec.time_base != Fraction(1, rate):
            return  # other containers may leave sound out
        first, stop = self.facts.window.samples(rate)
        if stated <= first or (stop is not None and position >= stop):
            return
        if self._config.on_corrupt == "raise":
            raise self._error(f"{stated - position} samples before it are missing", frame.pts)
        self.num_dropped += 1

    def _error(self, text: str, pts: int | None) -> DecodeError:
        seconds = None
        if pts is not None:
            seconds = float(ticks_to_seconds(pts, self._codec.time_base, self.facts.zero))
        at = "" if seconds is None else f" at {seconds:.3f} s"
        return DecodeError(
            f"damaged {self._codec.name} data{at} (packet {self._packet_index}): {text}. "
            "decode_config(on_corrupt='drop') leaves damaged packets out",
            source=self.facts.source,
            pts_seconds=seconds,
            packet_index=self._packet_index,
        )
