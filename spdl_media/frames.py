"""Decoded samples, still in FFmpeg's memory and layout.

Parts of FFmpeg's audio frames are cut and placed on the container's clock: its sample k stands at
k / sample_rate seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, TypeAlias

import av
import numpy as np

from spdl_media._ffmpeg import as_fraction
from spdl_media.formats import SAMPLE_DTYPES, Array
from spdl_media.image_frames import DecodedFrames, ImageFrames, VideoFrames
from spdl_media.packets import FrameMetadata
from spdl_media.timing import nearest_sample

__all__ = ("AudioFrames", "Frames")


@dataclass(frozen=True, slots=True)
class AudioChunk:
    """The samples ``start`` to ``stop`` of one of FFmpeg's audio frames."""

    frame: av.AudioFrame
    start: int
    stop: int
    position: int | None = None
    """Where the first of them stands among the samples of the stream, if known."""

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def planes(self) -> tuple[Array, ...]:
        """Read-only views of the samples.

        Planar formats give one array ``(samples,)`` a channel, packed ones one ``(samples, channels)``.
        """
        frame = self.frame
        name, count, channels = frame.format.name, frame.samples, frame.layout.nb_channels
        is_planar, views = name.endswith("p"), []
        if _hides_planes(frame):
            (samples,) = AudioChunk(_interleaved(frame), self.start, self.stop).planes
            return tuple(samples.T)
        dtype = SAMPLE_DTYPES[name.removesuffix("p")]
        planes: tuple[Any, ...] = frame.planes
        for plane in planes:
            # FFmpeg pads planes behind the last sample.
            view = np.frombuffer(plane, dtype, count if is_planar else count * channels)
            # Frames are shared between threads.
            view.flags.writeable = False
            shaped = view if is_planar else view.reshape(count, channels)
            views.append(shaped[self.start : self.stop])
        return tuple(views)


class AudioFrames(DecodedFrames):
    """Samples of an audio stream. Made by :func:`~spdl_media.decode_packets`.

    ``len(frames)`` counts samples of one channel; ``frames[a:b]`` shares memory, step 1 only. Rate,
    channels and format are those of the first sample; without any sample they raise a ValueError
    that names the window.

    Thread safety: immutable, free to share.
    """

    __slots__ = ("_chunks", "_first_sample")

    def __init__(
        self,
        chunks: Iterable[AudioChunk],
        metadata: FrameMetadata | None = None,
        *,
        first_sample: int = 0,
    ) -> None:
        # The first chunk tells the format and the place of the first sample, so none may be empty.
        self._chunks = tuple(chunk for chunk in chunks if len(chunk))
        self._metadata = metadata or FrameMetadata()
        # A chunk that knows its place counts the gaps before it.
        stated = self._chunks[0].position if self._chunks else None
        self._first_sample = first_sample if stated is None else stated

    def _first(self) -> av.AudioFrame:
        if not self._chunks:
            raise self._no_first("sample")
        return self._chunks[0].frame

    @property
    def chunks(self) -> tuple[AudioChunk, ...]:
        """The samples as FFmpeg holds them, frame by frame."""
        return self._chunks

    @property
    def num_frames(self) -> int:
        """Samples of one channel, the same as ``len(frames)``."""
        return len(self)

    @property
    def num_channels(self) -> int:
        """Number of channels.

        Raises:
            ValueError: There are no samples; the message names the window.
        """
        return self._first().layout.nb_channels

    @property
    def channel_layout(self) -> str:
        """FFmpeg's name of the channel layout, such as ``"stereo"``.

        Raises:
            ValueError: There are no samples; the message names the window.
        """
        return self._first().layout.name

    @property
    def sample_rate(self) -> int:
        """Samples of one channel in a second.

        Raises:
            ValueError: There are no samples; the message names the window.
        """
        return self._first().sample_rate

    @property
    def sample_fmt(self) -> str:
        """FFmpeg's name of the sample format, such as ``"fltp"``; a final ``p``: one plane a channel.

        Raises:
            ValueError: There are no samples; the message names the window.
        """
        return self._first().format.name

    @property
    def pts(self) -> tuple[int | None, ...]:
        """Presentation timestamps of the chunks as FFmpeg has them, before any cutting."""
        return tuple(chunk.frame.pts for chunk in self._chunks)

    @property
    def first_sample(self) -> int:
        """Position of the first sample: sample k of the container's clock stands at k / sample_rate."""
        return self._first_sample

    @property
    def timestamp(self) -> float:
        """Seconds on the container's clock at which the first sample stands.

        Raises:
            ValueError: There are no samples; the message names the window.
        """
        return self._first_sample / self.sample_rate

    @property
    def timestamps(self) -> tuple[float, ...]:
        """Seconds on the container's clock at which each of the :attr:`chunks` begins."""
        position, times = self._first_sample, []
        for chunk in self._chunks:
            # Where the file leaves audio out, or damage was dropped, a chunk does not follow on.
            position = position if chunk.position is None else chunk.position
            times.append(position / self.sample_rate)
            position += len(chunk)
        return tuple(times)

    @property
    def is_corrupt(self) -> tuple[bool, ...]:
        """Which chunks the decoder reported as damaged; only with ``on_corrupt="keep"`` can one be."""
        return tuple(bool(chunk.frame.is_corrupt) for chunk in self._chunks)

    def __len__(self) -> int:
        return sum(len(chunk) for chunk in self._chunks)

    def __getitem__(self, key: slice) -> AudioFrames:
        # Chunks are runs of samples, which no other step could share.
        if not isinstance(key, slice) or key.step not in (None, 1):
            raise TypeError(
                f"audio frames are cut by a slice with step 1, such as [:16000], not {key!r}"
            )
        start, stop, _ = key.indices(len(self))
        chunks = cut_chunks(self._chunks, start, max(start, stop))
        return AudioFrames(chunks, self._metadata, first_sample=self._first_sample + start)

    def __repr__(self) -> str:
        if not self._chunks:
            return f"<AudioFrames: none in {self._metadata.window}>"
        return (
            f"<AudioFrames: {len(self)} samples of {self.num_channels} channels {self.sample_fmt}, "
            f"{self.sample_rate} Hz, from {self.timestamp:.3f} s>"
        )


Frames: TypeAlias = AudioFrames | VideoFrames | ImageFrames


def _hides_planes(frame: av.AudioFrame) -> bool:
    """Whether the planes cannot be listed: of 8 and more, PyAV reads behind the end of FFmpeg's array."""
    return frame.format.is_planar and frame.layout.nb_channels >= 8


def _interleaved(frame: av.AudioFrame) -> av.AudioFrame:
    """The same samples in one plane."""
    resampler = av.AudioResampler(frame.format.packed.name, frame.layout, frame.sample_rate)
    (result,) = resampler.resample(frame)
    return result


def new_frame(samples: Array, sample_fmt: str, layout: str, sample_rate: int) -> av.AudioFrame:
    """A frame of this format and channel layout with a copy of the samples ``(N, C)``."""
    frame = av.AudioFrame(sample_fmt.removesuffix("p"), layout, len(samples))
    np.frombuffer(memoryview(frame.planes[0]), samples.dtype, samples.size)[:] = samples.reshape(-1)
    frame.sample_rate = sample_rate
    if sample_fmt.endswith("p"):
        # PyAV cannot list the planes of eight and more channels, but FFmpeg's resampler writes them.
        (frame,) = av.AudioResampler(sample_fmt, frame.layout, sample_rate).resample(frame)
    return frame


def silent_frame(like: av.AudioFrame, count: int) -> av.AudioFrame:
    """A frame of so many samples of silence, in the format of another one."""
    name, shape = like.format.name, (count, like.layout.nb_channels)
    samples = np.full(shape, silence_of(name), SAMPLE_DTYPES[name.removesuffix("p")])
    frame = new_frame(samples, name, like.layout.name, like.sample_rate)
    frame.time_base = time_base_of(like)
    return frame


def silence_of(sample_fmt: str) -> int:
    """The number that is silence in a format: half of the range in unsigned samples, and 0 in all others."""
    return 128 if sample_fmt.startswith("u8") else 0


def cut_chunks(chunks: Sequence[AudioChunk], start: int, stop: int | None) -> Iterator[AudioChunk]:
    """The samples ``start`` to ``stop`` of a run of chunks, counted from its first sample."""
    position = 0
    for chunk in chunks:
        first = max(start - position, 0)
        last = len(chunk) if stop is None else min(stop - position, len(chunk))
        if first < last:
            place = None if chunk.position is None else chunk.position + first
            yield AudioChunk(chunk.frame, chunk.start + first, chunk.start + last, place)
        position += len(chunk)


def sample_time_base(sample_rate: int, zero: Fraction) -> Fraction:
    """The unit of time in which each sample of the container's clock stands at a whole number.

    Files count in units of their own, in Matroska in milliseconds, and what filters give would stand at
    such a place. Where there is none that FFmpeg can count in, one sample is the unit.
    """
    unit = math.lcm(sample_rate, zero.denominator)
    # FFmpeg's AVRational is a pair of signed 32-bit numbers.
    return Fraction(1, unit if unit < 2**31 else sample_rate)


def frame_of(
    chunk: AudioChunk, time_base: Fraction, zero: Fraction, *, is_shared: bool = False
) -> av.AudioFrame:
    """The chunk as a whole frame, as filters take it, which begins at the chunk's place.

    Args:
        chunk: The samples.
        time_base: Unit of time of the frame.
        zero: Second 0 of the container on the stream's own clock.
        is_shared: Others may use the chunk's frame: where it is not right as it is, it is copied.
    """
    if _hides_planes(chunk.frame):
        chunk = replace(chunk, frame=_interleaved(chunk.frame))
    frame, pts = chunk.frame, _exact_pts(chunk, time_base, zero)
    is_whole = len(chunk) == frame.samples
    if is_shared and is_whole and (pts, time_base) == (frame.pts, time_base_of(frame)):
        return frame
    if is_shared or not is_whole:
        # PyAV cannot cut a frame, so its samples are copied into a new one.
        frame = av.AudioFrame(frame.format.name, frame.layout.name, len(chunk))
        frame.sample_rate = chunk.frame.sample_rate
        for plane, samples in zip(frame.planes, chunk.planes, strict=True):
            target = np.frombuffer(memoryview(plane), samples.dtype, samples.size)
            target[:] = samples.reshape(-1)
    frame.time_base, frame.pts = time_base, pts
    return frame


def _exact_pts(chunk: AudioChunk, time_base: Fraction, zero: Fraction) -> int | None:
    """Where the chunk begins on the stream's own clock, in this unit, rounded; ``None``: no one knows."""
    frame, rate = chunk.frame, chunk.frame.sample_rate
    # In whole numbers: fractions would take longer than small frames take to filter.
    if chunk.position is not None:
        ticks = chunk.position * zero.denominator + zero.numerator * rate
        unit = zero.denominator * rate
    elif frame.pts is not None:
        base = time_base_of(frame)
        ticks = frame.pts * base.numerator * rate + chunk.start * base.denominator
        unit = base.denominator * rate
    else:
        return None
    divisor = unit * time_base.numerator
    # Halves go up, as in nearest_sample.
    return (2 * ticks * time_base.denominator + divisor) // (2 * divisor)


def time_base_of(frame: av.AudioFrame) -> Fraction:
    """The unit of time of a frame; of one without, a sample."""
    return as_fraction(frame.time_base) or Fraction(1, frame.sample_rate)


def placed_chunk(frame: av.AudioFrame, zero: Fraction) -> AudioChunk:
    """A frame that came out of a filter, with its place on the container's clock."""
    base = frame.time_base or Fraction(1, frame.sample_rate)
    position = nearest_sample(frame.pts or 0, base, zero, frame.sample_rate)
    return AudioChunk(frame, 0, frame.samples, position)
