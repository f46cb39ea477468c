"""Decoded audio, still in FFmpeg's memory and layout.

Audio is kept as parts of FFmpeg's frames, each with its position on the container's clock: sample k is at
k / sample_rate seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache, lru_cache
from typing import Any, TypeAlias

import av
import numpy as np
from av.audio.plane import AudioPlane

from spdl_media._checks import counted
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
    # Position of the first sample on the container's clock.
    position: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def planes(self) -> tuple[Array, ...]:
        """Read-only views of the samples.

        Planar formats give one array ``(samples,)`` per channel, packed formats one ``(samples, channels)``.
        """
        views = sample_planes(self.frame)
        for view in views:
            # Because threads share frames.
            view.flags.writeable = False
        return tuple(view[self.start : self.stop] for view in views)


class AudioFrames(DecodedFrames):
    """Samples of an audio stream, as returned by :func:`~spdl_media.decode_packets`.

    ``len(frames)`` is the number of samples per channel; ``frames[a:b]`` shares memory, step 1 only. Sample
    rate, channels and format are those of the first sample; if there are no samples, they raise a
    ValueError that names the window.

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
        # The first chunk gives the format and the position of the first sample, so empty ones are removed.
        self._chunks = tuple(chunk for chunk in chunks if len(chunk))
        self._metadata = metadata or FrameMetadata()
        self._first_sample = self._chunks[0].position if self._chunks else first_sample

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
        """Number of samples per channel, the same as ``len(frames)``."""
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
        """Samples per second and channel.

        Raises:
            ValueError: There are no samples; the message names the window.
        """
        return self._first().sample_rate

    @property
    def sample_fmt(self) -> str:
        """FFmpeg's name of the sample format, such as ``"fltp"``; a final ``p`` means planar.

        Raises:
            ValueError: There are no samples; the message names the window.
        """
        return self._first().format.name

    @property
    def pts(self) -> tuple[int | None, ...]:
        """Presentation timestamps of the chunks' FFmpeg frames, before trimming."""
        return tuple(chunk.frame.pts for chunk in self._chunks)

    @property
    def first_sample(self) -> int:
        """Position of the first sample; sample k is at ``k / sample_rate`` on the container's clock."""
        return self._first_sample

    @property
    def timestamp(self) -> float:
        """Time of the first sample in seconds on the container's clock.

        Raises:
            ValueError: There are no samples; the message names the window.
        """
        return self._first_sample / self.sample_rate

    @property
    def timestamps(self) -> tuple[float, ...]:
        """Start times of the :attr:`chunks` in seconds on the container's clock."""
        return tuple(chunk.position / self.sample_rate for chunk in self._chunks)

    @property
    def is_corrupt(self) -> tuple[bool, ...]:
        """Whether the decoder reported each chunk as damaged; ``on_corrupt="keep"`` keeps such chunks."""
        return tuple(bool(chunk.frame.is_corrupt) for chunk in self._chunks)

    def __len__(self) -> int:
        return sum(len(chunk) for chunk in self._chunks)

    def __getitem__(self, key: slice) -> AudioFrames:
        # Chunks are contiguous samples, so another step could not share their memory.
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
        channels = counted(self.num_channels, "channel")
        return (
            f"<AudioFrames: {len(self)} samples of {channels} {self.sample_fmt}, "
            f"{self.sample_rate} Hz, from {self.timestamp:.3f} s>"
        )


Frames: TypeAlias = AudioFrames | VideoFrames | ImageFrames


def sample_planes(frame: av.AudioFrame) -> list[Array]:
    """Return views of samples: one ``(samples,)`` per channel, or one ``(samples, channels)`` if packed."""
    count, channels = frame.samples, frame.layout.nb_channels
    dtype = SAMPLE_DTYPES[frame.format.name.removesuffix("p")]
    # Not frame.planes: of 8 or more channels, PyAV lists too many planes, and for frames of "channelsplit",
    # which have planes of other channels, PyAV 19 raises.
    plane: Any = AudioPlane
    if not frame.format.is_planar:
        return [np.frombuffer(plane(frame, 0), dtype, count * channels).reshape(count, channels)]
    # With a count, because FFmpeg pads planes after the last sample.
    return [np.frombuffer(plane(frame, index), dtype, count) for index in range(channels)]


def new_frame(samples: Array, sample_fmt: str, layout: str, sample_rate: int) -> av.AudioFrame:
    """Make a frame of this format and channel layout with a copy of the samples ``(N, C)``.

    Raises:
        ValueError: ``sample_fmt`` or ``layout`` is unknown, or the layout has another number of channels.
    """
    frame = av.AudioFrame(sample_fmt, layout, len(samples))
    if frame.layout.nb_channels != samples.shape[1]:
        raise ValueError(f"samples of shape {samples.shape} are not of the layout {layout!r}")
    frame.sample_rate = sample_rate
    if len(samples):
        parts = samples.T if frame.format.is_planar else (samples,)
        for plane, part in zip(sample_planes(frame), parts, strict=True):
            plane[...] = part
    return frame


def join_frames(frames: list[av.AudioFrame], change: Callable[[Array], Array]) -> av.AudioFrame:
    """Make one frame of frames, after a change of their samples ``(samples, channels)``."""
    first, planes = frames[0], [sample_planes(one) for one in frames]
    rows = [one[0] if one[0].ndim == 2 else np.stack(one, axis=1) for one in planes]
    samples = change(np.concatenate(rows))
    frame = new_frame(samples, first.format.name, first.layout.name, first.sample_rate)
    frame.pts, frame.time_base = first.pts, first.time_base
    return frame


@cache
def layout_name(text: str) -> str:
    """Return FFmpeg's name of a channel layout, given as a name, a mask of speakers or a number.

    Raises:
        ValueError: FFmpeg does not know the layout.
    """
    return av.AudioLayout(text).name


@cache
def channels_of(layout: str) -> int:
    """Return the number of channels of a layout.

    Raises:
        ValueError: FFmpeg does not know the layout.
    """
    return av.AudioLayout(layout).nb_channels


@cache
def usual_channels(layout: str) -> int | None:
    """Return the number of channels if it implies this layout: the default one, the only one, or no names.

    Raises:
        ValueError: FFmpeg does not know the layout.
    """
    count = channels_of(layout)
    if layout == f"{count} channels":
        return count
    try:
        return count if layout == layout_name(f"{count}c") else None
    except ValueError:  # some numbers, such as 9, have no default layout
        return count


def silent_frame(like: av.AudioFrame, count: int) -> av.AudioFrame:
    """Make a frame of ``count`` silent samples in the format of another frame."""
    name, shape = like.format.name, (count, like.layout.nb_channels)
    samples = np.full(shape, silence_of(name), SAMPLE_DTYPES[name.removesuffix("p")])
    frame = new_frame(samples, name, like.layout.name, like.sample_rate)
    frame.time_base = time_base_of(like)
    return frame


def silence_of(sample_fmt: str) -> int:
    """Return the sample value of silence: half of the range for unsigned formats, 0 for all others."""
    return 128 if sample_fmt.startswith("u8") else 0


def cut_chunks(chunks: Sequence[AudioChunk], start: int, stop: int | None) -> Iterator[AudioChunk]:
    """Yield the samples ``start`` to ``stop`` of chunks, counted from their first sample."""
    position = 0
    for chunk in chunks:
        first = max(start - position, 0)
        last = len(chunk) if stop is None else min(stop - position, len(chunk))
        if first < last:
            begin, end = chunk.start + first, chunk.start + last
            yield AudioChunk(chunk.frame, begin, end, chunk.position + first)
        position += len(chunk)


@lru_cache(maxsize=16)  # because fractions are slow to make
def sample_time_base(sample_rate: int, zero: Fraction) -> Fraction:
    """Return a time base in which each sample of the container's clock has an integer timestamp.

    Time bases of files can be coarser (Matroska counts milliseconds), which would round the output of
    filters. If the exact time base exceeds what FFmpeg can represent, the result is one sample.
    """
    unit = math.lcm(sample_rate, zero.denominator)
    # FFmpeg's AVRational is a pair of signed 32-bit numbers.
    return Fraction(1, unit if unit < 2**31 else sample_rate)


def frame_of(
    chunk: AudioChunk, time_base: Fraction, zero: Fraction, *, is_shared: bool = False
) -> av.AudioFrame:
    """Return a chunk as a whole frame for filters, with the chunk's start as its timestamp.

    Args:
        chunk: The samples.
        time_base: Time base of the result.
        zero: Second 0 of the container on the stream's own clock.
        is_shared: The chunk's frame may be in use elsewhere: copy it instead of changing it.
    """
    frame, pts = chunk.frame, _exact_pts(chunk, time_base, zero)
    is_whole = len(chunk) == frame.samples
    if is_shared and is_whole and (pts, time_base) == (frame.pts, time_base_of(frame)):
        return frame
    if is_shared or not is_whole:
        # PyAV cannot cut a frame, so its samples are copied into a new one.
        frame = av.AudioFrame(frame.format.name, frame.layout.name, len(chunk))
        frame.sample_rate = chunk.frame.sample_rate
        for target, samples in zip(sample_planes(frame), chunk.planes, strict=True):
            target[...] = samples
    frame.time_base, frame.pts = time_base, pts
    return frame


def _exact_pts(chunk: AudioChunk, time_base: Fraction, zero: Fraction) -> int:
    """Return the chunk's start on the stream's own clock, rounded to this time base."""
    rate = chunk.frame.sample_rate
    # In integers: fractions would take longer than filtering a small frame.
    ticks = chunk.position * zero.denominator + zero.numerator * rate
    divisor = zero.denominator * rate * time_base.numerator
    # Halves are rounded up, as in nearest_sample.
    return (2 * ticks * time_base.denominator + divisor) // (2 * divisor)


def time_base_of(frame: av.AudioFrame) -> Fraction:
    """Return the time base of a frame; one sample if it has none."""
    return as_fraction(frame.time_base) or Fraction(1, frame.sample_rate)


def placed_chunk(frame: av.AudioFrame, zero: Fraction) -> AudioChunk:
    """Make a chunk of a filter's output frame, with its position on the container's clock."""
    base = frame.time_base or Fraction(1, frame.sample_rate)
    position = nearest_sample(frame.pts or 0, base, zero, frame.sample_rate)
    return AudioChunk(frame, 0, frame.samples, position)


@dataclass(eq=False)
class FrameList:
    """A sink that appends frames to a list.

    Args:
        limit: Number of frames at which the sink is full; ``None``: no limit.
    """

    limit: int | None = None
    frames: list[av.VideoFrame] = field(default_factory=list)

    def put(self, frame: av.VideoFrame) -> bool:
        """Append a frame. Return whether the list has reached the limit."""
        self.frames.append(frame)
        return len(self.frames) == self.limit

    @property
    def count(self) -> int:
        """Number of frames in the list."""
        return len(self.frames)

    def take(self, size: int) -> list[av.VideoFrame]:
        """Remove the first ``size`` frames from the list, and return them."""
        taken, self.frames = self.frames[:size], self.frames[size:]
        return taken
