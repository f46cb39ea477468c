"""Random access to the frames of a video by number or by time."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from functools import cached_property
from typing import Any, NoReturn, SupportsIndex, Unpack, overload

import numpy as np

from spdl_media._checks import counted
from spdl_media._container import Container
from spdl_media._threads import ClosedByWith, fork_safe_lock, when_dropped
from spdl_media.arguments import DeviceLike, FrameArguments, declared
from spdl_media.batch import FrameRequest
from spdl_media.buffer import Buffer, CPUBuffer, CUDABuffer
from spdl_media.config import DecodeConfig, DemuxConfig, as_indexing_config
from spdl_media.decode import DEFAULT_FILTER, Default, configs_by_kind, picture_filter
from spdl_media.errors import ConvertError
from spdl_media.frame_decoder import FrameDecoder, Route, VideoSource
from spdl_media.frame_index import FrameIndex, save
from spdl_media.geometry import swaps_sides
from spdl_media.image_frames import ImageFrames, VideoFrames, frame_numbers, is_many
from spdl_media.inputs import Source
from spdl_media.load import VIDEO_OPS, frame_request
from spdl_media.packet_table import Ticks
from spdl_media.packets import AudioPackets
from spdl_media.rows import FrameRows
from spdl_media.timing import Seconds, Timestamp, Window, parse_window
from spdl_media.window import read_audio

__all__ = ("VideoFile",)

# Reference frames that a decoder keeps, besides frames that wait to be reordered.
_KEPT_IMAGES = 5


class VideoFile(ClosedByWith):
    """An open video with random access to its frames by number or by time.

    Frames are the same as from decoding the whole video, bit for bit. A call reads and decodes only the
    groups of pictures with the requested frames, each once, and skips frames that no other frame refers to.
    The file and its decoder stay open between calls.

    The frame index comes from the tables of an MP4 or MOV, without reading its coded data, and for other
    files from one pass over the packets, without decoding them. If packets do not identify the frames
    (interlaced H.264 in MPEG-TS, AVI with packed B-frames, raw streams, rare codecs), the video is decoded
    once; if its frames have no times either, each call decodes it from the start. :meth:`save_index` saves
    the index for the next time.

    Attributes:
        source: Name of the source: a path, a URL, or "bytes of length n".
        width: Width of an upright frame, in pixels.
        height: Height of an upright frame, in pixels.
        frame_rate: Average frames per second; ``None`` if the file does not state it.
        codec: Parameters of the coded stream.
        decode_config: How the video is decoded.

    Use it as a context manager, or call :meth:`close`; otherwise it is closed when it is garbage collected.

    Args:
        src: A path, URL, bytes, uint8 array, CPU tensor or file-like object, which must be seekable.
        video_stream_index: Index of the stream in its container. The default is FFmpeg's best one.
        index: Path of an index that :meth:`save_index` wrote for this video and stream.
        filter_desc: Filters for ``video[...]`` and :meth:`at`, as for :func:`~spdl_media.decode_packets`:
            by default upright ``rgb24``, ``None`` for frames as decoded. They must output one frame for
            each.
        demux_config: How to open the source; see :func:`~spdl_media.demux_config`.
        decode_config: How to decode; see :func:`~spdl_media.decode_config`. ``on_corrupt="drop"`` is not
            allowed, because frames have numbers.
        name: Name of the source in messages.

    Raises:
        SourceError: The source cannot be opened or read, or ``index`` belongs to another video: its size,
            first bytes or stream differ.
        DemuxError: The source is not media, has no such stream or no video, cannot seek, or is an image
            that Pillow reads.
        DecodeError: The source is truncated and its format has no index of packets, or no decoder takes it.
            ``decode_config(on_corrupt="keep")`` opens the available part.
        ValueError: An option is invalid.

    Thread safety: safe; calls wait for each other, so one VideoFile per thread is faster. Nothing else may
    use a file-like ``src``.

    Example:
        >>> with sm.VideoFile("clip.mp4") as video:
        ...     print(video[[385, 10, -1]], video.load([10, 385], width=224, height=224), video.at([1.0]))
        <VideoFrames: 3 of 480x270 rgb24, ...> <CPUBuffer: (2, 224, 224, 3) uint8> <VideoFrames: 1 of ...>
    """

    def __init__(
        self,
        src: Source,
        *,
        video_stream_index: int | None = None,
        index: str | os.PathLike[str] | None = None,
        filter_desc: str | Default | None = DEFAULT_FILTER,
        demux_config: DemuxConfig | None = None,
        decode_config: DecodeConfig | None = None,
        name: str | None = None,
    ) -> None:
        self._desc = picture_filter(filter_desc)
        self.decode_config = config = as_indexing_config(decode_config)
        # A decoder named in the config may be for the audio of clips.
        for_video, _ = configs_by_kind(config)
        self._lock = fork_safe_lock()
        self._file = file = VideoSource(
            src, video_stream_index, index, demux_config, for_video, name
        )
        # PyAV's containers are in reference cycles, which would keep the file open until garbage collection.
        self._end = when_dropped(file.close)
        self._index, self.codec, self.source = file.index, file.codec, file.metadata.source
        self.frame_rate, size = file.codec.frame_rate, (file.codec.width, file.codec.height)
        # The size of upright frames.
        self.width, self.height = size[::-1] if swaps_sides(file.metadata.orientation) else size
        self._decoder = FrameDecoder(
            file.codec, file.metadata, file.index, for_video, file.packets_from
        )

    # Properties.

    def __len__(self) -> int:
        """Number of frames."""
        return len(self._index)

    @cached_property
    def timestamps(self) -> tuple[float, ...]:
        """Time of each frame in seconds since the container's start."""
        return tuple(self._index.seconds(np.arange(len(self))).tolist())

    @cached_property
    def keyframes(self) -> tuple[int, ...]:
        """Numbers of the frames at which decoding can begin."""
        return tuple(self._index.key_frames())

    @property
    def end(self) -> float:
        """End of the last frame in seconds, from the file or its frame rate; 0 without frames."""
        return float(self._index.exact_seconds(self._index.end)) if len(self) else 0.0

    @property
    def nbytes(self) -> int:
        """Approximate size of the open video in memory, in bytes, with its index and decoder."""
        images = self.codec.reorder_depth + _KEPT_IMAGES
        # Assumes 8-bit YUV420, the most common format.
        return self._index.nbytes + self.codec.width * self.codec.height * 3 // 2 * images

    def __repr__(self) -> str:
        size = f"{self.width}x{self.height} {self.codec.name}"
        return f"<VideoFile: {self.source}, {counted(len(self), 'frame')} of {size}>"

    # Frames.

    @overload
    def __getitem__(self, key: slice | Iterable[int]) -> VideoFrames: ...
    @overload
    def __getitem__(self, key: SupportsIndex) -> ImageFrames: ...
    def __getitem__(self, key: Any) -> ImageFrames | VideoFrames:
        """Return frames by number: an int, a slice, or a sequence of ints in any order, with repeats.

        Negative numbers count from the end.

        Raises:
            IndexError: There is no such frame.
            DecodeError: A frame is damaged, or missing from the file.
            TypeError: ``key`` has another type.
        """
        many = is_many(key)
        frames = self._frames(frame_numbers(key if many else [key], len(self), self.source))
        return frames if many else frames[0]

    def __iter__(self) -> NoReturn:
        # Without this method, Python would iterate by __getitem__.
        raise TypeError(
            "a VideoFile is not iterated, because each frame by itself would be decoded from a key frame on. "
            "Take slices, such as video[0:64], or load_video and VideoDecoder for all frames"
        )

    def at(self, times: Iterable[Seconds]) -> VideoFrames:
        """Return the frames that are shown at these times: for each, the last frame that begins no later.

        Args:
            times: Times in seconds on the container's clock. The last frame is shown for its duration.

        Raises:
            TypeError: ``times`` is not a sequence.
            ValueError: A time lies before the first frame or after the end, or is not a number; or the video
                is closed.
            DemuxError: The timestamps in the file decrease, or there are none.
            DecodeError: A frame is damaged, or missing from the file.
        """
        return self._frames(self.numbers_at(times))

    def numbers_at(self, times: Iterable[Seconds]) -> list[int]:
        """Return the numbers of the frames that are shown at these times, for :meth:`load`.

        Raises:
            TypeError: ``times`` is not a sequence.
            ValueError: A time lies before the first frame or after the end, or is not a number.
            DemuxError: The timestamps in the file decrease, or there are none.
        """
        # The characters of a string would be times of their own.
        if isinstance(times, str | bytes) or not isinstance(times, Iterable):
            raise TypeError(f"times must be a sequence of seconds, such as [2.5], not {times!r}")
        return self._index.shown_at(list(times), self.source)

    def _frames(self, numbers: list[int]) -> VideoFrames:
        with self._reading():
            return self._decoder.frames(numbers, self._desc)

    @overload
    def load(
        self, indices: Iterable[int] | slice, **arguments: Unpack[FrameArguments[None]]
    ) -> CPUBuffer: ...
    @overload
    def load(
        self, indices: Iterable[int] | slice, **arguments: Unpack[FrameArguments[DeviceLike]]
    ) -> CUDABuffer: ...
    @declared(FrameArguments, quality="auto")
    def load(
        self, indices: Iterable[int] | slice, **arguments: Unpack[FrameArguments[DeviceLike | None]]
    ) -> Buffer:
        """Load frames by number into one array. Each frame is copied to it as soon as it is filtered.

        Args:
            indices: Frame numbers in any order, with repeats; negative ones count from the end.
            crops: What to crop from all frames: a box ``(x, y, width, height)`` of the upright frame, or a
                function that chooses one, which is called once.
            flips: Whether to mirror all frames left to right: a bool, or the probability of it.
            rng: NumPy generator, or a seed, for random crops and flips.
            filter_desc: A custom filter graph that outputs one frame for each. It replaces the options for
                size and format, which must keep their defaults.
            cuda: Number of a CUDA device, or a :func:`~spdl_media.cuda_config`, for a result on the device.
                The CPU decodes, and the array is copied.

        Returns:
            A buffer in host memory, a copy, or with ``cuda=`` a :class:`CUDABuffer`:
            ``(N, height, width, 3)`` uint8 for ``rgb24``, a row for each index in the given order.

        Raises:
            IndexError: There is no such frame.
            DecodeError: A frame is damaged, or missing from the file.
            FilterError: ``filter_desc`` cannot be used, or outputs more or fewer frames than it takes.
            ConvertError: ``indices`` are empty, the format has no array layout, a crop exceeds the frame, or
                the storage is too small.
            TransferError: With ``cuda=``: there is no CUDA device, or its memory is exhausted.
            ValueError: An option is invalid, or the video is closed.

        Thread safety: safe, if no other thread uses the ``rng``; calls wait for each other.
        """
        rows = np.array(frame_numbers(indices, len(self), self.source), np.int64)
        return load_rows(self, rows, arguments, "VideoFile.load(cuda=)")[0]

    def _decode_rows(self, indices: Ticks, request: FrameRequest, sink: FrameRows) -> None:
        desc, cuts = request.desc, request.cuts
        decoder, targets = self._decoder, defaultdict[int, Any](lambda: defaultdict(list))
        routes: dict[int, Route[list[int]]] = {}
        for row, number in enumerate(indices.ravel().tolist()):
            # -1 is a row of zeros.
            if number >= 0:
                # All frames share a filter, unless each clip has its own crop.
                clip = 0 if cuts is None else row // indices.shape[-1]
                targets[number][clip].append(row)

        def put(rows: list[int], frame: Any) -> None:
            sink.put(rows, frame, self.source)

        def take(number: int, frame: Any) -> None:
            orientation, size = decoder.orientation, (frame.width, frame.height)
            for clip, rows in targets[number].items():
                if clip not in routes:
                    upright = size[::-1] if swaps_sides(orientation) else size
                    own = desc if cuts is None else cuts.filter(clip, upright, desc, self.source)
                    routes[clip] = Route(decoder.filter(own), put, self.source)
                routes[clip].push(frame, orientation, rows)

        # Each frame is decoded once, however often and in whatever order it is requested.
        decoder.decode(sorted(targets), take)
        for one in routes.values():
            one.finish()

    # The file.

    def demux_audio(
        self, timestamp: Timestamp | Window | None = None, *, stream_index: int | None = None
    ) -> AudioPackets:
        """Read the packets of an audio stream of the same file; see :func:`~spdl_media.demux_audio`.

        Raises:
            SourceError: The source cannot be read.
            DemuxError: There is no such stream, or the container is damaged.
            ValueError: The window is empty, or the file is closed.
        """
        window = parse_window(timestamp)
        # Locked, because video and audio share the container's position in the file.
        with self._opened() as container:
            return read_audio(container, stream_index, window)

    def save_index(self, path: str | os.PathLike[str]) -> None:
        """Write the index to a file, for ``VideoFile(src, index=path)``.

        Raises:
            WriteError: The file cannot be written. An existing file at the path is then unchanged.
            ValueError: The video is closed.
        """
        with self._opened():
            save(path, self._index, self._file.identity)

    def close(self) -> None:
        """Close the source, after the call in progress. Loaded frames and arrays stay valid."""
        with self._lock:
            self._file.close()

    @property
    def closed(self) -> bool:
        """Whether the video is closed, or failed to be read, or was opened before a fork of this process.

        A :class:`VideoCache` then opens it again.
        """
        return self._file.container is None or not self._file.is_ours

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a VideoFile has an open file, and is not copied or pickled. Open it where it is used, or send a "
            "VideoCache, which opens videos there"
        )

    @contextmanager
    def _opened(self) -> Iterator[Container]:
        with self._lock:
            try:
                yield self._file.opened()
            finally:
                self._file.close_if_failed()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with self._opened() as container, container.reading():
            yield


def index_of(video: VideoFile) -> FrameIndex:
    """Return the frame index of an open video."""
    return video._index


def load_rows(
    video: VideoFile, indices: Ticks, arguments: Any, purpose: str
) -> tuple[Buffer, Callable[[CPUBuffer], Buffer]]:
    """Decode frames into one array: frames of one clip, or of several clips with a crop each.

    Args:
        video: The open video.
        indices: Frame numbers ``(frames,)`` or ``(clips, frames)``; -1 gives zeros.
        arguments: Complete ``FrameArguments``.
        purpose: The calling function, for messages.

    Returns:
        The array, and a function that moves another buffer to the same device.

    Raises:
        ConvertError: There are no frames in ``indices``.
        ValueError: An option is invalid.
        TypeError: An option has the wrong type.
        TransferError: There is no device.
    """
    count = len(indices) if indices.ndim > 1 else 1
    finish, request = frame_request(arguments, VIDEO_OPS, purpose, count).staged()
    # At least one frame is needed for the size and format of rows of zeros.
    if (indices < 0).all():
        raise ConvertError("no frame was requested: the indices are empty", source=video.source)
    with closing(FrameRows(indices.size, request)) as sink:
        with video._reading():
            video._decode_rows(indices, request, sink)
        buffer = sink.take(zeros=np.flatnonzero(indices < 0).tolist(), shape=indices.shape)
    if request.cuts is not None:
        buffer.boxes, buffer.flips = request.cuts.drawn(range(count), range(count))
    return finish(buffer), finish
