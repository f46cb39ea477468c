"""An opened video whose frames are asked for by number or by time."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cached_property
from typing import Any, NoReturn, Self, Unpack, overload

import numpy as np

from spdl_media.arguments import DeviceLike, FrameArguments, declared
from spdl_media.batch import FrameRequest
from spdl_media.buffer import Buffer, CPUBuffer, CUDABuffer
from spdl_media.codec import configs_by_kind
from spdl_media.config import DecodeConfig, DemuxConfig, as_decode_config, as_demux_config
from spdl_media.decode import DEFAULT_FILTER, Default, picture_filter
from spdl_media.errors import ConvertError
from spdl_media.frame_decoder import FrameDecoder, Route, VideoSource
from spdl_media.frame_index import FrameIndex, save
from spdl_media.geometry import swaps_sides
from spdl_media.image_frames import ImageFrames, VideoFrames, frame_numbers, is_many
from spdl_media.inputs import Source
from spdl_media.load import VIDEO_OPS, frame_request
from spdl_media.packet_table import Ticks
from spdl_media.packets import AudioPackets
from spdl_media.row_plan import FrameRows
from spdl_media.timing import Seconds, Timestamp, Window, parse_window
from spdl_media.window import read_audio

__all__ = ("VideoFile",)

# What decoders keep for frames that refer to them, beside those that wait for their turn.
_KEPT_IMAGES = 5


class VideoFile:
    """An opened video whose frames are asked for by number or by time, in any order.

    A frame is that of the decoding of the whole video, bit for bit. Only the groups of pictures are read and
    decoded in which the frames lie that a call asks for, each once a call, and of these what no other frame
    refers to is left out. The file and its decoder stay open from call to call.

    The index of the frames comes from the tables of an MP4 or MOV, whose coded data is not read for it, and
    of other files from one pass over the packets, without decoding them. Where packets do not tell the frames
    (interlaced H.264 in MPEG-TS, AVI with packed B-frames, raw streams, rare codecs), the video is decoded
    once; if its frames have no times either, each call decodes it from the start. :meth:`save_index` keeps
    the index for the next time.

    Attributes:
        source: Name of the source: a path, a URL, or "bytes of length n".
        width: Width of an upright frame, in pixels.
        height: Height of an upright frame, in pixels.
        frame_rate: Average frames in a second; ``None``: the file does not say.
        codec: The parameters of the coded stream.
        decode_config: How it is decoded.

    Use it as a context manager, or call :meth:`close`; otherwise it closes when it is collected.

    Args:
        src: A path, URL, bytes, uint8 array, CPU tensor or file-like object, which must be able to seek.
        video_stream_index: Index of the stream in its container. The default is FFmpeg's best one.
        index: Path of an index that :meth:`save_index` wrote for this video and stream.
        filter_desc: The graph behind ``video[...]`` and :meth:`at`, as for
            :func:`~spdl_media.decode_packets`: by default upright ``rgb24``, ``None`` for frames as
            decoded. It must give one frame for each.
        demux_config: How to open the source; see :func:`~spdl_media.demux_config`.
        decode_config: How to decode; see :func:`~spdl_media.decode_config`. Frames by number cannot be left
            out, so ``on_corrupt="drop"`` is none of it.
        name: What to call the source in messages.

    Raises:
        SourceError: It cannot be opened or read, or ``index`` is not its index: size, first bytes or stream
            differ from those for which it was saved.
        DemuxError: It is no media, has no such stream or no video, cannot seek, or is an animated image.
        DecodeError: It was cut short in a format that has no index of its packets, or no decoder takes it.
            ``decode_config(on_corrupt="keep")`` opens what is there.
        ValueError: An option is invalid.

    Thread safety: safe; calls wait for each other, so a file for each thread is quicker. A file-like ``src``
    must be used by nothing else.

    Example::

        with sm.VideoFile("movie.mp4") as video:
            frames = video[[10, 400, 10, -1]]                        # VideoFrames
            batch = video.load([10, 400], width=224, height=224)     # (2, 224, 224, 3)
            shown = video.at([1.0, 2.5])
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
        self.decode_config = config = as_decode_config(decode_config)
        if config.on_corrupt == "drop":
            raise ValueError(
                "decode_config(on_corrupt='drop') leaves frames out, and here they are asked for by number. "
                "Take 'keep', or 'raise'"
            )
        # The decoder that it names may be one for the audio of clips.
        for_video, _ = configs_by_kind(config)
        self._lock = threading.RLock()
        self._file = file = VideoSource(
            src, video_stream_index, index, as_demux_config(demux_config), for_video, name
        )
        self._index, self.codec, self.source = file.index, file.codec, file.metadata.source
        self.frame_rate, size = file.codec.frame_rate, (file.codec.width, file.codec.height)
        # Upright, as frames come out.
        self.width, self.height = size[::-1] if swaps_sides(file.metadata.orientation) else size
        self._decoder = FrameDecoder(
            file.codec, file.metadata, file.index, for_video, file.packets_from
        )

    # What it is.

    def __len__(self) -> int:
        """Number of frames."""
        return len(self._index)

    @cached_property
    def timestamps(self) -> tuple[float, ...]:
        """Seconds of each frame on the container's clock, whose 0 is the container's start."""
        return tuple(self._index.seconds(np.arange(len(self))).tolist())

    @cached_property
    def keyframes(self) -> tuple[int, ...]:
        """Numbers of the frames at which decoding can begin."""
        return tuple(self._index.key_frames())

    @property
    def end(self) -> float:
        """Seconds at which the last frame ends, as the file or its frame rate states; 0 without frames."""
        return float(self._index.exact_seconds(self._index.end)) if len(self) else 0.0

    @property
    def nbytes(self) -> int:
        """Bytes that the opened video takes in memory, about: its index, and the images of its decoder."""
        images = self.codec.reorder_depth + _KEPT_IMAGES
        # As images of YUV420 in 8 bits, which most are.
        return self._index.nbytes + self.codec.width * self.codec.height * 3 // 2 * images

    def __repr__(self) -> str:
        size = f"{self.width}x{self.height} {self.codec.name}"
        return f"<VideoFile: {self.source}, {len(self)} frames of {size}>"

    # Frames.

    @overload
    def __getitem__(self, key: int) -> ImageFrames: ...
    @overload
    def __getitem__(self, key: slice | Sequence[int]) -> VideoFrames: ...
    def __getitem__(self, key: int | slice | Sequence[int]) -> ImageFrames | VideoFrames:
        """Frames by number: one, a slice, or a sequence in any order, with repeats; negative ones count back.

        Raises:
            IndexError: There is no such frame.
            DecodeError: It is damaged, or missing from the file.
            TypeError: ``key`` is none of these.
        """
        many = is_many(key)
        frames = self._frames(frame_numbers(key if many else [key], len(self), self.source))
        return frames if many else frames[0]

    def __iter__(self) -> NoReturn:
        # Without it Python would ask for one frame after the other.
        raise TypeError(
            "a VideoFile is not iterated, because each frame by itself would be decoded from a key frame on. "
            "Take slices, such as video[0:64], or load_video and VideoDecoder for all frames"
        )

    def at(self, times: Iterable[Seconds]) -> VideoFrames:
        """The frames that are shown at these times: the last ones that do not begin later.

        Args:
            times: Seconds on the container's clock. Up to one duration behind the time of the last frame they
                mean that one.

        Raises:
            ValueError: A time lies before the first frame or behind the end, or is no number.
            DemuxError: The file's times step back from frame to frame, or there are none.
            DecodeError: A frame is damaged, or missing from the file.
        """
        return self._frames(self.numbers_at(times))

    def numbers_at(self, times: Iterable[Seconds]) -> list[int]:
        """The numbers of the frames that are shown at these times, for :meth:`load`.

        Raises:
            ValueError: A time lies before the first frame or behind the end, or is no number.
            DemuxError: The file's times step back from frame to frame, or there are none.
        """
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
        """Load frames by number into one array, each written as it leaves the filters.

        Args:
            indices: Numbers of frames in any order, with repeats; negative ones count from the end.
            crops: What to cut out of all frames: a box ``(x, y, width, height)`` of the upright frame, or a
                function that chooses one, which is called once.
            flips: Whether to exchange left and right in all frames: a bool, or the probability of it.
            rng: What the function and the probability draw from: a generator of NumPy's, or a seed.
            filter_desc: A whole filter graph of your own that gives one frame for each. It replaces the
                options for size and format, which must keep their defaults.
            cuda: Number of a CUDA device, or a :func:`~spdl_media.cuda_config`: the result lies there. The
                CPU decodes, and the array is copied.

        Returns:
            A buffer in host memory, a copy, or with ``cuda=`` a :class:`CUDABuffer`:
            ``(N, height, width, 3)`` uint8 for ``rgb24``, a row for each index in its place.

        Raises:
            IndexError: There is no such frame.
            DecodeError: A frame is damaged, or missing from the file.
            FilterError: ``filter_desc`` cannot be used, or gives more or fewer frames than it takes.
            ConvertError: ``indices`` are empty, the format makes no array, a crop lies outside, or the
                storage is too small.
            TransferError: With ``cuda=``: there is no CUDA device, or it has no memory left.
            ValueError: An option is invalid.

        Thread safety: safe, if no other thread uses the ``rng``; calls wait for each other.
        """
        rows = np.array(frame_numbers(indices, len(self), self.source), np.int64)
        return load_rows(self, rows, arguments, "VideoFile.load(cuda=)")[0]

    def _decode_rows(self, indices: Ticks, request: FrameRequest, sink: FrameRows) -> None:
        desc, cuts = request.desc, request.cuts
        decoder, targets = self._decoder, defaultdict[int, Any](lambda: defaultdict(list))
        routes: dict[int, Route[list[int]]] = {}
        for row, number in enumerate(indices.ravel().tolist()):
            # -1 stands for a row of zeros.
            if number >= 0:
                # All frames go through one filter, unless each clip is cut at a place of its own.
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

        # Each frame once, however often and in whatever order rows want it.
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
        # The container stands at one place in the file, for video and audio alike.
        with self._lock:
            return read_audio(self._file.opened(), stream_index, window)

    def save_index(self, path: str | os.PathLike[str]) -> None:
        """Write the index to a file, for ``VideoFile(src, index=path)``.

        Raises:
            WriteError: The file cannot be written; then none stands at its path, or the one from before.
            ValueError: The file is closed.
        """
        with self._lock:
            self._file.opened()
            save(path, self._index, self._file.identity)

    def close(self) -> None:
        """Close the source, after the call that is under way. What was loaded stays valid."""
        with self._lock:
            self._file.close()

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._file.container is None

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a VideoFile has an open file, and is not copied or pickled. Open it where it is used, or send a "
            "VideoCache, which opens videos there"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        # PyAV's containers are in cycles, which would hold the file until the collector comes.
        if hasattr(self, "_file"):
            self._file.close()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with self._lock, self._file.opened().reading():
            yield


def index_of(video: VideoFile) -> FrameIndex:
    """The index of an opened video."""
    return video._index


def load_rows(
    video: VideoFile, indices: Ticks, arguments: Any, purpose: str
) -> tuple[Buffer, Callable[[CPUBuffer], Buffer]]:
    """Decode frames into one array, those of one clip, or of several with a crop each.

    Args:
        video: The opened video.
        indices: Numbers of the frames, of each clip if there is a second axis; -1: zeros.
        arguments: Of ``FrameArguments``.
        purpose: What is asked for, for messages.

    Returns:
        The array, and what moves another one to the same device.

    Raises:
        ConvertError: There is no frame among them.
        ValueError: An option is invalid.
        TypeError: An option has the wrong type.
        TransferError: There is no device.
    """
    count = len(indices) if indices.ndim > 1 else 1
    finish, request = frame_request(arguments, VIDEO_OPS, purpose, count).staged()
    # Size and format of zeros are those of a frame, so there must be one.
    if (indices < 0).all():
        raise ConvertError("no frame is asked for: the indices are empty", source=video.source)
    with closing(FrameRows(indices.size, request)) as sink:
        with video._reading():
            video._decode_rows(indices, request, sink)
        buffer = sink.take(zeros=np.flatnonzero(indices < 0).tolist(), shape=indices.shape)
    if request.cuts is not None:
        buffer.boxes, buffer.flips = request.cuts.drawn(range(count), range(count))
    return finish(buffer), finish
