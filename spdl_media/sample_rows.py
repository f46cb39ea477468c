"""Sinks for decoded audio: its frames, or one array in the requested format."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, TypeAlias

import av
import numpy as np
import numpy.typing as npt

from spdl_media._ffmpeg import unheard_log
from spdl_media.codec import AudioCodec
from spdl_media.filter_desc import FilterDesc
from spdl_media.filters import FrameFilter, frame_key
from spdl_media.formats import SAMPLE_DTYPES
from spdl_media.frames import (
    AudioChunk,
    channels_of,
    cut_chunks,
    frame_of,
    join_frames,
    new_frame,
    placed_chunk,
    sample_planes,
    sample_time_base,
    usual_channels,
)
from spdl_media.operations import SoundOps, filter_text, sound_ops
from spdl_media.timing import most_combined

# Limit in bytes of the memory reserved by a header, which may be wrong. Only filled memory is occupied.
_MOST_EXPECTED = 2**30

# Samples per frame for a graph. A frame costs 25 us. Beyond a megabyte of frames, the allocator gives memory
# back each time (104,448 stereo samples, 8 to 16 kHz: frames of 1024 4.3 ms, 16 Ki 1.2 ms, 64 Ki 5.5 ms).
_BLOCK = 16 * 1024

# Numbers of a WAV file that are read at a time. With memory for all, 20 s of 5.1 take 24 ms instead of 4 ms.
_MOST_READ = 1 << 20

Format: TypeAlias = tuple[str, str, int]  # sample format, channel layout, sample rate


def ops_on_samples(desc: object) -> SoundOps | None:
    """Return the operations of a description; ``None``: the result may depend on where frames begin."""
    ops = desc if isinstance(desc, SoundOps) else sound_ops(desc)
    return None if ops and (ops.window or ops.num_frames or ops.filter_desc) else ops


class _SoundFilter(FrameFilter):
    """A graph that also resamples audio of fewer samples than the resampler combines.

    FFmpeg gives none of them, or too few. So they are continued by their mirror image, as FFmpeg does itself
    at the end of longer audio.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        ops = ops_on_samples(self.desc)
        self._rate = (ops and ops.sample_rate) or 0  # 0: the sample rate stays
        self._format: object = None
        # Frames of the current format until they suffice; None: they need not wait.
        self._held: list[Any] | None = None

    def push(self, frame: Any, *, is_alike: bool = False) -> list[Any]:
        done: list[Any] = []
        resamples = self._rate not in (0, frame.sample_rate)
        if not (is_alike or self.finished) and (format := frame_key(frame)) != self._format:
            done, self._format = self._end_format(), format
            self._graph, self.finished = None, False
            self._held = [] if resamples else None
        frames = [frame]
        if self._held is not None:
            self._held.append(frame)
            count = sum(one.samples for one in self._held)
            if count <= most_combined(frame.sample_rate, self._rate):
                return done
            frames, self._held = self._held, None
        for one in frames:
            done += super().push(one, is_alike=True)
        # A graph that does not resample holds nothing back, so it serves other audio, too.
        self._may_stay = self.gives_one and not resamples
        return done

    def flush(self) -> list[Any]:
        return self._end_format() + super().flush()

    def _end_format(self) -> list[Any]:
        """Return the rest of the frames of one format."""
        held, self._held = self._held, None
        if not held:
            return self._drain()
        count, rate = sum(one.samples for one in held), held[0].sample_rate
        wanted, more = -(-count * self._rate // rate), 2 * most_combined(rate, self._rate)
        edges = (0, more), (0, 0)
        longer = join_frames(held, lambda samples: np.pad(samples, edges, "symmetric"))
        frames = super().push(longer, is_alike=True) + self._drain()
        return [join_frames(frames, lambda samples: samples[:wanted])]


class SampleChunks:
    """A sink that keeps chunks of frames, after a filter graph unless the graph would not change them.

    Args:
        codec: Codec of the packets.
        zero: Second 0 of the container on the stream's own clock.
        filter_desc: The filter graph; ``None``: no graph.
        limit: Number of samples at which the sink is full; ``None``: no limit.

    Attributes:
        has_graph: Whether the sink has a filter graph.
    """

    def __init__(
        self, codec: AudioCodec, zero: Fraction, filter_desc: str | None, limit: int | None = None
    ) -> None:
        self.chunks: list[AudioChunk] = []
        self.count = 0
        self.zero = zero
        self._limit = math.inf if limit is None else limit
        ops = sound_ops(filter_desc)
        # Frames of this format skip the graph, because it only converts to the format.
        keeps = ops is not None and ops == SoundOps(sample_fmt=ops.sample_fmt)
        self._same_fmt = ops.sample_fmt if ops is not None and keeps else None
        self._graph = None
        if filter_desc is not None and ops != SoundOps(sample_fmt=None):
            self._graph = _SoundFilter(filter_desc, kind="audio", time_base=codec.time_base)
        self.has_graph = self._graph is not None

    def put(self, frame: av.AudioFrame, start: int, stop: int, position: int) -> bool:
        """Take samples of a frame. Return whether the sink is full.

        Raises:
            FilterError: The graph does not accept the samples.
        """
        chunk = AudioChunk(frame, start, stop, position)
        if self._graph is None or frame.format.name == self._same_fmt:
            self.chunks.append(chunk)
            self.count += stop - start
            return self.count >= self._limit
        # frame_of may set the frame's time, because nothing else refers to a frame just decoded.
        time_base = sample_time_base(frame.sample_rate, self.zero)
        return self._append(self._graph.push(frame_of(chunk, time_base, self.zero)))

    def flush(self) -> None:
        """Flush the filter graph.

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
        """Remove and return the first samples, at most ``size``."""
        if size >= self.count:
            taken, self.chunks = self.chunks, []
        else:
            taken = list(cut_chunks(self.chunks, 0, size))
            self.chunks = list(cut_chunks(self.chunks, size, None))
        self.count = max(self.count - size, 0)
        return taken


class SampleRows:
    """A sink that collects the samples of frames of one format in one array, in the requested format.

    FFmpeg's FIFO gathers frames into blocks, because copying each frame from Python would take a third of the
    decoding time. A block is converted or filtered, and copied to the array, while it is in the CPU cache.

    Args:
        ops: Operations on the samples, without filters whose result may depend on where frames begin.
        allocate: Allocates memory of a given size in bytes.
        zero: Second 0 of the container on the stream's own clock.
        end: Expected end of the audio, in seconds on the container's clock, if known.
        limit: Maximum number of samples of the result.

    Attributes:
        first: Position of the first sample of the result.
        sample_rate: Sample rate of the result; 0 if there are no samples.
        sample_fmt: Sample format of the result.
        mixed: A frame of another format arrived, so the array is incomplete.
    """

    def __init__(
        self,
        ops: SoundOps,
        allocate: Callable[[int], npt.NDArray[np.uint8]],
        *,
        zero: Fraction = Fraction(0),
        end: Fraction | float | None = None,
        limit: int | None = None,
    ) -> None:
        self.first = self.sample_rate = 0
        self.mixed = False
        self._ops, self._allocate = ops, allocate
        self._zero, self._end = zero, end
        # Limits: of input samples still to take, and of output samples.
        self._wanted = self._limit = sys.maxsize if limit is None else limit
        self._channels = self._position = self._waiting = self._filled = 0
        self._graph: FrameFilter | None = None
        self._fifo = av.AudioFifo()
        self.sample_fmt = ""
        # Samples are along the first axis, whatever the layout in memory.
        self._rows: npt.NDArray[Any] | None = None

    def put(self, frame: av.AudioFrame, start: int, stop: int, position: int) -> bool:
        """Add samples of a frame. Return True when there are enough samples, or the format has changed.

        Raises:
            FilterError: The filters do not take the samples.
        """
        layout = frame.layout
        if layout.nb_channels != self._channels:
            if self._channels:
                self.mixed = True
                return True
            self._begin((frame.format.name, layout.name, frame.sample_rate), position)
        frame.pts = None  # otherwise the FIFO refuses frames after a gap
        try:
            self._fifo.write(frame)
        except ValueError:  # another sample format or rate
            self.mixed = True
            return True
        if start:
            # The FIFO takes only whole frames, so unwanted samples are read and discarded.
            self._fifo.read(start)
        self._waiting += stop - start
        # Most frames do not complete a block, so there is nothing more to do.
        if self._waiting < _BLOCK and self._waiting < self._wanted:
            return False
        return self._take_blocks()

    def put_frames(
        self,
        frames: Sequence[av.AudioFrame],
        num_samples: int,
        part: tuple[int, int],
        position: int,
    ) -> bool:
        """Add samples of consecutive frames.

        The loop is short, because decoding an MP3 frame takes only four microseconds.

        Args:
            frames: The frames.
            num_samples: The number of samples that they must have together.
            part: Samples to take: ``(start, stop)``. ``start`` is 0 unless these are the first frames.
            position: Position of the first sample that is taken of all frames.

        Returns:
            False if the frames have another number of samples, or different formats.

        Raises:
            FilterError: The filters do not take the samples.
        """
        if frames and not self._channels:
            first = frames[0]
            self._begin((first.format.name, first.layout.name, first.sample_rate), position)
        channels, write, before = self._channels, self._fifo.write, self._fifo.samples
        try:
            for frame in frames:
                if frame.layout.nb_channels != channels:
                    return False
                frame.pts = None
                write(frame)
        except ValueError:
            return False
        if self._fifo.samples - before != num_samples:
            return False
        start, stop = part
        if start:
            self._fifo.read(start)
        self._waiting += max(stop - start, 0)
        self._take_blocks()
        return True

    @property
    def count(self) -> int:
        """Number of output samples per channel."""
        return min(self._filled, self._limit)

    def resamples(self, rate: int) -> bool:
        """Whether audio of this sample rate is resampled."""
        return self._ops.sample_rate not in (None, rate)

    def filters(self, format: Format) -> list[str]:
        """Return the filters that samples of this format, channel layout and sample rate need, if any."""
        name, layout, rate = format
        ops, packed = self._ops, name.removesuffix("p")
        into = (ops.sample_fmt or name).removesuffix("p")
        is_plain = (
            not self.resamples(rate)
            and ops.num_channels in (None, usual_channels(layout))
            and (packed == into or into in ("flt", "dbl"))
        )
        return [] if is_plain else filter_text(ops)

    def put_range(
        self, read: Callable[[int, int], npt.NDArray[Any]], part: tuple[int, int], format: Format
    ) -> None:
        """Add all samples, which are stored as arrays, and flush the filters.

        Args:
            read: Returns the samples ``(N, C)`` between two positions: the result, if nothing is converted.
            part: Positions of the first sample and of the one after the last.
            format: Their format, which is packed.

        Raises:
            FilterError: The filters do not take the samples. The reason in FFmpeg's log is not read.
        """
        self._begin(format, part[0])
        start, stop = part
        if self._graph is None and self.sample_fmt == format[0]:
            self._rows, self._filled = read(start, stop), stop - start
        elif self._graph is None:
            step = _MOST_READ // self._channels
            for begin in range(start, stop, step):
                self._copy([read(begin, min(begin + step, stop))])
        else:
            step = _BLOCK if self._channels > 2 else 2 * _BLOCK  # without the frames of a decoder
            with unheard_log():
                for begin in range(start, stop, step):
                    self._take(new_frame(read(begin, min(begin + step, stop)), *format))
                self.flush()

    def flush(self) -> None:
        """Take the samples that are still in the FIFO and in the filters.

        Raises:
            FilterError: A filter fails.
        """
        if self._waiting:
            self._take_waiting(self._waiting)
        if self._graph is not None:
            self.put_filtered(self._graph.flush())
            self._graph.release()

    def array(self) -> npt.NDArray[Any] | None:
        """Return the samples: ``(channels, samples)`` if planar, ``(samples, channels)`` if packed."""
        rows, count = self._rows, self.count
        if rows is None:
            return None
        if not self.sample_fmt.endswith("p"):
            return rows[:count]
        channels, room = rows.T.shape
        # The flat memory: one channel after the other.
        values = rows.T.reshape(-1)
        if count < room:  # close the gaps between the channels
            for channel in range(1, channels):
                start = channel * room
                values[channel * count : (channel + 1) * count] = values[start : start + count]
        return values[: channels * count].reshape(channels, count)

    def _begin(self, format: Format, position: int) -> None:
        name, layout, rate = format
        self.first, self.sample_rate, self._position = position, rate, position
        self._channels = channels_of(layout)
        ops, self.sample_fmt = self._ops, self._ops.sample_fmt or name
        if self.resamples(rate):
            # Only the resampler knows how many input samples the output needs.
            self._wanted = sys.maxsize
        if self.filters(format):
            self._time_base = sample_time_base(rate, self._zero)
            self._graph = _SoundFilter(
                FilterDesc(ops), kind="audio", time_base=self._time_base, gives_one=True
            )

    def _take_blocks(self) -> bool:
        """Process the complete blocks. Return whether there are enough samples."""
        self._waiting = min(self._waiting, self._wanted)
        while self._waiting >= _BLOCK:
            self._wanted -= _BLOCK
            self._take_waiting(_BLOCK)
        return self._waiting >= self._wanted or self._filled >= self._limit

    def _take_waiting(self, count: int) -> None:
        self._waiting -= count
        block = self._fifo.read(count)
        assert block is not None, "so many were written"
        self._take(block)

    def _take(self, block: av.AudioFrame) -> None:
        """Filter a block, if needed, and append it."""
        if self._graph is None:
            self._copy(sample_planes(block))
            return
        chunk = AudioChunk(block, 0, block.samples, self._position)
        self._position += block.samples
        self.put_filtered(self._graph.push(frame_of(chunk, self._time_base, self._zero)))

    def put_filtered(self, frames: Sequence[av.AudioFrame]) -> None:
        """Add samples to which the operations were applied."""
        for frame in frames:
            if self._rows is None:
                self.first = placed_chunk(frame, self._zero).position
                self.sample_rate, self.sample_fmt = frame.sample_rate, frame.format.name
            self._copy(sample_planes(frame))

    def _copy(self, planes: Sequence[npt.NDArray[Any]]) -> None:
        """Append one array ``(samples, channels)``, or an array ``(samples,)`` for each channel."""
        begin, end = self._filled, self._filled + len(planes[0])
        self._filled = end
        if self._rows is None or end > len(self._rows):
            channels = len(planes) if planes[0].ndim == 1 else planes[0].shape[1]
            self._rows = self._reserve(channels, begin, end)
        part, dtype = self._rows[begin:end], planes[0].dtype
        with np.errstate(over="ignore"):  # doubles beyond the range of floats become infinite
            if planes[0].ndim == 2:
                part[...] = planes[0]
            else:
                for source, target in zip(planes, part.T, strict=True):
                    target[...] = source
        if dtype.kind != part.dtype.kind:
            # Integers that become floats are scaled to -1 to 1, as FFmpeg does.
            if dtype == np.uint8:
                part -= 128  # unsigned samples are centred there
            # A power of two is exact, so values are rounded only once, in the conversion to float.
            part *= part.dtype.type(2.0 ** (1 - 8 * dtype.itemsize))

    def _reserve(self, channels: int, filled: int, needed: int) -> npt.NDArray[Any]:
        """Allocate memory for the expected samples, or later for twice the current number."""
        dtype = np.dtype(SAMPLE_DTYPES[self.sample_fmt.removesuffix("p")])
        size, room = channels * dtype.itemsize, 2 * needed
        if self._rows is None:
            # Limited, because the header may be wrong; untouched memory takes only address space.
            end = min(float(self._end or 0) * self.sample_rate, _MOST_EXPECTED)
            # Without rounding errors of floats, the product would be a whole number of samples.
            room = max(needed, min(math.ceil(end - 1e-4) - self.first, _MOST_EXPECTED // size))
        memory = self._allocate(room * size)[: room * size].view(dtype)
        planar = self.sample_fmt.endswith("p")
        rows = memory.reshape(-1, room).T if planar else memory.reshape(room, -1)
        if self._rows is not None:
            rows[:filled] = self._rows[:filled]
        return rows
