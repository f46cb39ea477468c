"""Sample clips of videos for training, as one array and with their audio; cache open videos."""

from __future__ import annotations

import inspect
import math
import os
from collections import OrderedDict
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, Unpack, get_args

import numpy as np
import numpy.typing as npt

from spdl_media._checks import check_choice, check_int
from spdl_media._threads import fork_safe_lock
from spdl_media.arguments import ClipSampleArguments, DeviceLike, audio_options, declared
from spdl_media.audio_arrays import AudioRequest, decode_audio_array
from spdl_media.buffer import Buffer, CPUBuffer
from spdl_media.clips import RESAMPLED
from spdl_media.crops import check_rng
from spdl_media.decode import configs_by_kind
from spdl_media.errors import ConvertError
from spdl_media.frames import silence_of
from spdl_media.operations import SoundOps
from spdl_media.rows import OnShort, fill_up
from spdl_media.timing import Rate, Window, parse_duration, parse_rate
from spdl_media.video_file import VideoFile, index_of, load_rows

__all__ = ("VideoCache", "VideoClips", "sample_clips")

Sampler: TypeAlias = Literal["random", "uniform", "regular"]


class VideoClips(NamedTuple):
    """Clips of one video, as returned by :func:`sample_clips`.

    Attributes:
        video: ``(num_clips, num_frames, height, width, 3)`` uint8 for ``rgb24``.
        audio: ``(num_clips, channels, samples)`` float32 for ``fltp``; ``None`` if it was not requested.
        timestamps: Time of each frame in seconds, ``(num_clips, num_frames)`` float64; with ``frame_rate``
            the requested times. ``nan`` for a frame of zeros.
        indices: Number of each frame in the video, ``(num_clips, num_frames)`` int64; -1 for a frame of
            zeros.
        sample_rate: Samples per second and channel; ``None`` without audio.
    """

    video: Buffer
    audio: Buffer | None
    timestamps: npt.NDArray[np.float64]
    indices: npt.NDArray[np.int64]
    sample_rate: int | None


@declared(ClipSampleArguments, quality="auto")
def sample_clips(
    video: VideoFile,
    *,
    num_frames: int,
    num_clips: int | None = None,
    step: int = 1,
    sampler: Sampler = "random",
    stride: float | Fraction | None = None,
    frame_rate: Rate | None = None,
    on_short: OnShort = "error",
    audio: bool = False,
    audio_stream_index: int | None = None,
    **arguments: Unpack[ClipSampleArguments[DeviceLike | None]],
) -> VideoClips:
    """Load clips of a video into one array, with the audio of the same time.

    Frames that several clips share are decoded once.

    Args:
        video: The open video.
        num_frames: Frames per clip.
        num_clips: Number of clips; by default one, and with ``sampler="regular"`` as many as fit.
        step: Distance between frames of a clip: 2 takes every other frame.
        sampler: ``"random"``: all starts are equally likely. ``"uniform"``: at the centre of each of
            ``num_clips`` equal parts, as for evaluation. ``"regular"``: one clip every ``stride``.
        stride: Distance between starts of clips, in frames, or with ``frame_rate`` in seconds. The default is
            the length of a clip.
        frame_rate: Frames per second, independent of the video's own rate, which may vary: frame ``k`` is the
            one shown at ``start + k * step / frame_rate``. Clips then begin at any time.
        on_short: What to do if the video is too short for a clip: ``"error"`` raises a ConvertError,
            ``"repeat_last"`` repeats the last frame, ``"wrap"`` continues with the first frame of the clip,
            ``"zeros"`` adds zeros.
        audio: Load audio from the start of each clip, with the duration of ``num_frames * step`` frames at
            ``frame_rate``, else at the video's average rate: equally many samples for all clips. Parts
            without audio in the file, as after its end, are silent.
        audio_stream_index: Index of the audio stream. The default is FFmpeg's best one.
        crops: What to crop from the frames of a clip: a box ``(x, y, width, height)`` of the upright frame,
            or a function that chooses one, called once per clip. Or a sequence of these, one per clip.
        flips: Whether to mirror all frames of a clip left to right: a bool, the probability of it, or a
            sequence of bools, one per clip.
        rng: NumPy generator, or a seed, for random starts, crops and flips. ``None`` draws different ones at
            each call.
        filter_desc: A custom filter graph that outputs one frame for each. It replaces the options for size
            and format, which must keep their defaults.
        cuda: Number of a CUDA device, or a :func:`~spdl_media.cuda_config`, for results on the device. The
            CPU decodes, and the arrays are copied.

    Returns:
        Arrays, in new memory or that of ``storage``, with number and time of each frame.

    Raises:
        SourceError: The source cannot be read.
        DemuxError: There is no such audio stream.
        DecodeError: A frame or the audio is damaged, or missing from the file.
        FilterError: ``filter_desc`` cannot be used, or outputs more or fewer frames than it takes.
        ConvertError: The video is too short for a clip or for the number of regular clips, or has no frames;
            or :meth:`VideoFile.load` raises it.
        TransferError: With ``cuda=``: there is no CUDA device, or its memory is exhausted.
        ValueError: An option is invalid, or the video is closed.
        TypeError: ``video`` is not a :class:`VideoFile`.

    Thread safety: safe, if no other thread uses the ``rng``; calls with one ``video`` wait for each other.

    Example:
        >>> with sm.VideoFile("clip.mp4") as video:
        ...     clips = sm.sample_clips(video, num_clips=4, num_frames=16, step=2, width=112, height=112)
        >>> clips.video
        <CPUBuffer: (4, 16, 112, 112, 3) uint8>
    """
    if not isinstance(video, VideoFile):
        raise TypeError(
            f"sample_clips takes a VideoFile, not {type(video).__name__}; open it by sm.VideoFile(...), or "
            "by VideoCache.open(...) for many clips of one"
        )
    num_frames = check_int("num_frames", num_frames)
    check_choice("on_short", on_short, get_args(OnShort))
    check_choice("sampler", sampler, get_args(Sampler))
    step = check_int("step", step)
    # One generator for starts, crops and flips, so that a seed determines all three.
    rng = np.random.default_rng(check_rng(arguments["rng"]))
    draw = _Starts(num_clips, sampler, stride, rng)
    rate = None if frame_rate is None else parse_rate(frame_rate)
    starts, indices, times = _places(video, num_frames, step, rate, on_short, draw)
    arguments["rng"] = rng
    loaded, finish = load_rows(video, indices, arguments, "sample_clips(cuda=)")
    if not audio:
        return VideoClips(loaded, None, times, indices, None)
    try:
        index = index_of(video)
        # If the file states no frame rate, the average of its frames.
        length = index.exact_seconds(index.end) - index.exact_seconds(int(index.pts[0]))
        seconds = num_frames * step / (rate or video.frame_rate or len(video) / length)
        samples = _audio(video, starts, seconds, audio_options(arguments), audio_stream_index)
        return VideoClips(loaded, finish(samples), times, indices, samples.sample_rate)
    except BaseException:
        # Released explicitly, because the traceback would keep the memory until it is deleted.
        loaded.release()
        raise


class _Starts(NamedTuple):
    """Options for choosing the starts of clips."""

    num_clips: int | None
    sampler: Sampler
    stride: float | Fraction | None
    rng: np.random.Generator

    def choose(self, total: Any, length: Any, source: str, *, in_frames: bool) -> list[Any]:
        """Choose the starts of clips, counted from 0.

        Args:
            total: Length of the video, in frames or seconds.
            length: Length of a clip, in the same unit.
            source: Name of the source, for messages.
            in_frames: Whether the unit is frames, so that starts are whole numbers, or seconds.

        Raises:
            ConvertError: The number of regular clips does not fit.
            ValueError: The stride is not positive, or is given for another sampler.
        """
        last = max(total - length, 0)
        count = 1 if self.num_clips is None else check_int("num_clips", self.num_clips)
        if self.sampler == "regular":
            return self._regular(last, length, source, in_frames=in_frames)
        if self.stride is not None:
            raise ValueError(f"stride= is for sampler='regular', not {self.sampler!r}")
        if self.sampler == "uniform":
            # A clip longer than its part may begin before the part, but not before the video.
            middles = [(2 * part + 1) * Fraction(total) / (2 * count) for part in range(count)]
            exact = [min(max(middle - Fraction(length) / 2, 0), last) for middle in middles]
        else:
            # For whole frames, the last start is included by adding 1, because random() is below 1.
            exact = [Fraction(one) * (last + in_frames) for one in self.rng.random(count).tolist()]
        return [int(one) for one in exact] if in_frames else exact

    def _regular(self, last: Any, length: Any, source: str, *, in_frames: bool) -> list[Any]:
        stride: Any = length
        if self.stride is not None and in_frames:
            stride = check_int("stride", self.stride)
        elif self.stride is not None:
            stride = parse_duration(self.stride, "stride")
        fitting = int(last / stride) + 1
        count = fitting if self.num_clips is None else self.num_clips
        if count > fitting:
            what = "frames" if in_frames else "s"
            raise ConvertError(
                f"{count} clips were requested, but {fitting} of {float(length):g} {what} fit, one each "
                f"{float(stride):g} {what}. Take a smaller stride=, or sampler='uniform'",
                source=source,
            )
        return [number * stride for number in range(count)]


def _places(
    video: VideoFile,
    num_frames: int,
    step: int,
    rate: Fraction | None,
    on_short: OnShort,
    draw: _Starts,
) -> tuple[list[Fraction], npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Choose the clips: return their start times, and number and time of each frame."""
    if not len(video):
        raise ConvertError("the video has no frames, so there is no clip", source=video.source)
    index = index_of(video)
    first, end = map(index.exact_seconds, (int(index.pts[0]), index.end))
    if rate is None:
        length = (num_frames - 1) * step + 1
        starts = draw.choose(len(video), length, video.source, in_frames=True)
        found = [list(range(start, min(start + length, len(video)), step)) for start in starts]
        begins = [index.exact_seconds(int(index.pts[start])) for start in starts]
    else:
        # Times are looked up by bisection, which needs increasing timestamps.
        index.check_times(video.source)
        interval = step / rate
        seconds = num_frames * interval
        offsets = draw.choose(end - first, seconds, video.source, in_frames=False)
        begins = [first + offset for offset in offsets]
        # No frame is shown after the end of the video; on_short fills these.
        moments = [
            [at for k in range(num_frames) if (at := begin + k * interval) < end]
            for begin in begins
        ]
        found = [video.numbers_at(one) for one in moments]
    # For each clip, positions in the list of its frames; -1 for zeros.
    rows = [_filled(len(one), num_frames, on_short, video.source) for one in found]
    indices = np.array(
        [[-1 if k < 0 else one[k] for k in row] for one, row in zip(found, rows, strict=True)]
    )
    if rate is None:
        return begins, indices, index.seconds(indices)
    # Repeated frames have the time of the frame that they repeat.
    times = np.array([[float(begin)] for begin in begins]) + np.array(rows) * float(step / rate)
    return begins, indices, np.where(indices < 0, np.nan, times)


def _filled(found: int, wanted: int, on_short: OnShort, source: str) -> npt.NDArray[np.intp]:
    if found < wanted and on_short == "error":
        raise ConvertError(
            f"a clip has {wanted} frames, but the video is long enough for {found} of them. "
            "on_short='repeat_last', 'wrap' or 'zeros' adds the rest",
            source=source,
        )
    # A start is inside the video, so at least one frame was found.
    rows = np.arange(wanted)
    fill_up(rows, found, on_short, -1)
    return rows


def _audio(
    video: VideoFile, starts: list[Fraction], seconds: Fraction, ops: SoundOps, stream: int | None
) -> CPUBuffer:
    """Load the audio of clips from their starts, all of the same length."""
    # Gaps are filled, otherwise samples after a gap would be too early.
    config = replace(configs_by_kind(video.decode_config)[1], gaps="fill")
    array: Any = None
    for clip, start in enumerate(starts):
        packets = video.demux_audio(Window(start, start + seconds + RESAMPLED), stream_index=stream)
        rate = ops.sample_rate or packets.sample_rate
        # Computed from the duration, so that rounding of starts and ends does not change the length.
        count = max(round(seconds * rate), 1)
        one, first = decode_audio_array(packets, AudioRequest(ops, None, config, count, "zeros"))
        samples, fmt = one.array, ops.sample_fmt or packets.codec.sample_fmt or "fltp"
        if array is None:
            array = np.full((len(starts), *samples.shape), silence_of(fmt), samples.dtype)
        # Audio may begin later than the clip. A single sample is rounding of the resampler.
        late = round(first * rate) - Window(start, None).samples(rate)[0]
        late = late if late > 1 else 0
        # Samples along the first axis, for planar and packed formats.
        rows = (array[clip].T, samples.T) if fmt.endswith("p") else (array[clip], samples)
        rows[0][late:] = rows[1][: count - late]
    return CPUBuffer(array, sample_rate=rate)


class VideoCache:
    """LRU cache of open videos, so that loading further clips of a video does not open it again.

    A video that was evicted stays usable while references to it exist, and is closed with the last one. A
    closed video is opened again, and in a fork each. Changes of a file are not detected: the cache may keep
    the old video.

    Args:
        max_videos: Maximum number of videos.
        max_bytes: Maximum of their total :attr:`VideoFile.nbytes`; ``None``: no limit. The latest video is
            always kept.
        **options: Options for each :class:`VideoFile`.

    Raises:
        TypeError: :class:`VideoFile` has no such option.
        ValueError: A limit is below 1.

    Thread safety: safe. Threads that open the same path share a video, and their calls wait for each other.
    A copy in another process begins empty.

    Example:
        >>> cache = sm.VideoCache(64)
        >>> clips = sm.sample_clips(cache.open("clip.mp4"), num_clips=4, num_frames=16)
    """

    def __init__(
        self, max_videos: int = 16, *, max_bytes: int | None = None, **options: Any
    ) -> None:
        self._max_videos = check_int("max_videos", max_videos)
        self._max_bytes = None if max_bytes is None else check_int("max_bytes", max_bytes)
        inspect.signature(VideoFile).bind("", **options)  # raises for unknown names
        self._options = options
        self._videos: OrderedDict[str, VideoFile] = OrderedDict()
        self._lock = fork_safe_lock()

    def open(self, src: str | os.PathLike[str]) -> VideoFile:
        """Return the open video of a path or URL, from the cache or newly opened.

        Raises:
            SourceError: The source cannot be opened. :class:`VideoFile` may raise further errors.
            TypeError: ``src`` is not a path or URL.
        """
        key = os.fspath(src)
        if not isinstance(key, str):
            raise TypeError(f"a VideoCache opens paths and URLs, not {type(key).__name__}")
        with self._lock:
            video = self._videos.pop(key, None)
            # A user may have closed it.
            if video is not None and not video.closed:
                self._videos[key] = video
                return video
        # Without the lock, because opening may take long and other threads may need other videos.
        opened = VideoFile(src, **self._options)
        with self._lock:
            video = self._videos.setdefault(key, opened)
            self._videos.move_to_end(key)
            most = math.inf if self._max_bytes is None else self._max_bytes
            # The latest video stays, whatever its size.
            while len(self) > 1 and (len(self) > self._max_videos or self.nbytes > most):
                self._videos.popitem(last=False)
        return video

    @property
    def nbytes(self) -> int:
        """Approximate size of the cached videos in bytes."""
        with self._lock:
            return sum(video.nbytes for video in self._videos.values())

    def clear(self) -> None:
        """Remove all videos from the cache."""
        with self._lock:
            self._videos.clear()

    def __repr__(self) -> str:
        return f"<VideoCache: {len(self)} open, at most {self._max_videos}>"

    def __len__(self) -> int:
        """Return the number of cached videos."""
        return len(self._videos)

    def __reduce__(self) -> tuple[Any, ...]:
        # Open files cannot be sent to another process.
        return partial(VideoCache, max_bytes=self._max_bytes, **self._options), (self._max_videos,)
