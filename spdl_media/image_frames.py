"""Decoded frames of images and video, still in FFmpeg's memory and layout.

Frames keep the planes that the decoder wrote: a YUV 4:2:0 image takes half the memory of RGB, until a
single copy makes the batch. Frames are immutable values: slicing shares memory, and no function consumes
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from itertools import islice
from typing import Any, NoReturn, SupportsIndex, TypeAlias, overload

import av
import numpy as np
import numpy.typing as npt
from av.video.reformatter import VideoReformatter

from spdl_media._checks import as_int
from spdl_media._ffmpeg import as_fraction
from spdl_media.formats import COLOR_TABLES, Array, picture_planes
from spdl_media.geometry import is_mirrored, rotation
from spdl_media.packets import FrameMetadata
from spdl_media.timing import ticks_to_seconds

__all__ = ("ImageFrames", "VideoFrames")

# Notebooks show so many images of a batch or video, with sides of at most so many pixels.
NUM_SHOWN, LONGEST_SIDE = 8, 160
# Arrays with a shorter side are not shown: they can be audio with up to eight channels.
_SHORTEST_SIDE = 9

_Labelled: TypeAlias = tuple[npt.NDArray[np.uint8], str]


class DecodedFrames:
    """Base of all three kinds of frames."""

    __slots__ = ("_metadata",)
    _metadata: FrameMetadata
    # Returns the first of FFmpeg's frames.
    _first: Callable[[], Any]

    def _no_first(self, noun: str) -> ValueError:
        return ValueError(
            f"{self.source}: there is no {noun} in {self._metadata.window.name}, so nothing is known of "
            "its format"
        )

    @property
    def source(self) -> str:
        """Name of the source, such as a path, a URL, or "bytes of length n"."""
        return self._metadata.source

    @property
    def time_base(self) -> Fraction:
        """Seconds per tick of ``pts``.

        Raises:
            ValueError: There are no frames; the message names the window.
        """
        # Frames that the user created may have no time base.
        return as_fraction(self._first().time_base) or Fraction(1)

    @property
    def num_dropped(self) -> int:
        """Number of damaged packets and frames that ``decode_config(on_corrupt="drop")`` dropped."""
        return self._metadata.num_dropped

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} are not picklable: their planes are FFmpeg's memory. Send the packets "
            "to the other process and decode there, or convert the frames to an array first"
        )

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(f"{type(self).__name__} are no array: convert_frames(frames) makes one")


class _Pictures(DecodedFrames):
    """Base of one image and of many frames. Size and format are those of the first frame."""

    __slots__ = ("_frames",)
    _frames: tuple[av.VideoFrame, ...]

    def __init__(
        self, frames: Sequence[av.VideoFrame], metadata: FrameMetadata | None = None
    ) -> None:
        self._frames = tuple(frames)
        self._metadata = metadata or FrameMetadata()

    def _first(self) -> av.VideoFrame:
        if not self._frames:
            raise self._no_first("frame")
        return self._frames[0]

    @property
    def width(self) -> int:
        """Width of the first frame, in pixels.

        Raises:
            ValueError: There are no frames; the message names the window.
        """
        return self._first().width

    @property
    def height(self) -> int:
        """Height of the first frame, in pixels.

        Raises:
            ValueError: There are no frames; the message names the window.
        """
        return self._first().height

    @property
    def pix_fmt(self) -> str:
        """FFmpeg's name of the pixel format, such as ``"yuv420p"``.

        Raises:
            ValueError: There are no frames; the message names the window.
        """
        return self._first().format.name

    @property
    def num_planes(self) -> int:
        """Number of planes of the pixel format.

        Raises:
            ValueError: There are no frames; the message names the window.
        """
        return len(self._first().planes)

    @property
    def colorspace(self) -> str | None:
        """FFmpeg's name of the matrix between RGB and YUV, such as ``"bt709"``; ``None`` if not stated.

        Raises:
            ValueError: There are no frames; the message names the window.
        """
        return self._color("colorspace")

    @property
    def color_range(self) -> str | None:
        """``"tv"`` (limited), ``"pc"`` (full), or ``None`` if not stated.

        Raises:
            ValueError: There are no frames; the message names the window.
        """
        return self._color("color_range")

    @property
    def color_primaries(self) -> str | None:
        """FFmpeg's name of the primaries, or ``None`` if not stated.

        Raises:
            ValueError: There are no frames; the message names the window.
        """
        return self._color("color_primaries")

    @property
    def color_trc(self) -> str | None:
        """FFmpeg's name of the transfer function (``"smpte2084"`` is PQ), or ``None`` if not stated.

        PQ and HLG are not tone-mapped; use this to detect them.

        Raises:
            ValueError: There are no frames; the message names the window.
        """
        return self._color("color_trc")

    @property
    def orientation(self) -> int:
        """EXIF number of the orientation, 1 to 8; 1 is upright."""
        return self._metadata.orientation

    @property
    def rotation(self) -> int:
        """Degrees clockwise, 0, 90, 180 or 270, by which frames must be turned to be upright."""
        return rotation(self._metadata.orientation)

    @property
    def mirrored(self) -> bool:
        """Whether the frames must be mirrored left to right before they are turned."""
        return is_mirrored(self._metadata.orientation)

    @property
    def metadata(self) -> Mapping[str, str]:
        """Metadata that the decoder attached to the first frame.

        Raises:
            ValueError: There are no frames; the message names the window.
        """
        try:
            return self._first().metadata
        except UnicodeDecodeError:  # PyAV reads it as strict UTF-8, which not all cameras write
            return {}

    def _color(self, name: str) -> str | None:
        return COLOR_TABLES[name].get(int(getattr(self._first(), name)))

    def _seconds(self, frame: av.VideoFrame) -> float:
        if frame.pts is None:
            return float("nan")
        base = as_fraction(frame.time_base) or Fraction(1)
        return float(ticks_to_seconds(frame.pts, base, self._metadata.zero))

    def _describe(self) -> str:
        frame = self._frames[0]
        return f"{frame.width}x{frame.height} {frame.format.name}"


class VideoFrames(_Pictures):
    """Frames of a video in display order, as returned by :func:`~spdl_media.decode_packets`.

    ``frames[3]`` is an :class:`ImageFrames`; ``frames[1:9:2]`` and ``frames[[0, 5]]`` are
    ``VideoFrames`` over the same memory. Iteration yields an :class:`ImageFrames` for each frame.
    Size, pixel format and colour are those of the first frame; if there are no frames, they raise a
    ValueError that names the window.

    Thread safety: immutable, free to share.
    """

    __slots__ = ()

    @property
    def num_frames(self) -> int:
        """Number of frames, the same as ``len(frames)``."""
        return len(self._frames)

    @property
    def num_skipped(self) -> int:
        """Number of frames that were skipped because they refer to frames before the start of the stream."""
        return self._metadata.num_skipped

    @property
    def pts(self) -> tuple[int | None, ...]:
        """FFmpeg's presentation timestamps, in units of :attr:`time_base`."""
        return tuple(frame.pts for frame in self._frames)

    @property
    def timestamps(self) -> tuple[float, ...]:
        """Seconds since the container's start; ``nan`` if the file states no timestamp."""
        return tuple(self._seconds(frame) for frame in self._frames)

    @property
    def is_corrupt(self) -> tuple[bool, ...]:
        """Whether the decoder reported each frame as damaged; ``on_corrupt="keep"`` keeps such frames."""
        # PyAV cannot mark a copied frame as damaged, so the timestamps of those are recorded.
        marked = self._metadata.corrupt_pts
        return tuple(bool(frame.is_corrupt) or frame.pts in marked for frame in self._frames)

    def get_timestamps(self) -> tuple[float, ...]:
        """The same as :attr:`timestamps`, by SPDL's name."""
        return self.timestamps

    def get_pts(self) -> tuple[int | None, ...]:
        """The same as :attr:`pts`, by SPDL's name."""
        return self.pts

    def __len__(self) -> int:
        return len(self._frames)

    def __iter__(self) -> Iterator[ImageFrames]:
        # No copy: each ImageFrames refers to FFmpeg's frame.
        return (ImageFrames((frame,), self._metadata) for frame in self._frames)

    @overload
    def __getitem__(self, key: slice | Iterable[int]) -> VideoFrames: ...
    @overload
    def __getitem__(self, key: SupportsIndex) -> ImageFrames: ...
    def __getitem__(self, key: Any) -> ImageFrames | VideoFrames:
        many = is_many(key)
        numbers = frame_numbers(key if many else [key], len(self), self.source)
        frames = [self._frames[number] for number in numbers]
        return (VideoFrames if many else ImageFrames)(frames, self._metadata)

    def __repr__(self) -> str:
        if not self._frames:
            return f"<VideoFrames: none in {self._metadata.window}>"
        first, last = self.timestamps[0], self.timestamps[-1]
        return f"<VideoFrames: {len(self)} of {self._describe()}, {first:.3f} s to {last:.3f} s>"

    def _repr_html_(self) -> str:
        labels = [f"{seconds:.3f} s" for seconds in self.timestamps]
        return gallery(repr(self), _of_frames(self._frames, labels) if labels else ())


class ImageFrames(_Pictures):
    """One image, from :func:`~spdl_media.decode_packets` or from indexing :class:`VideoFrames`.

    Thread safety: immutable, free to share.
    """

    __slots__ = ()

    @property
    def pts(self) -> int | None:
        """FFmpeg's presentation timestamp, ``None`` for a still."""
        return self._frames[0].pts

    @property
    def timestamp(self) -> float:
        """Seconds since the container's start; ``nan`` if the file states no timestamp."""
        return self._seconds(self._frames[0])

    @property
    def is_corrupt(self) -> bool:
        """Whether the decoder reported damage, or the file is truncated."""
        frame = self._frames[0]
        marked = self._metadata.is_corrupt or frame.pts in self._metadata.corrupt_pts
        return marked or bool(frame.is_corrupt)

    @property
    def planes(self) -> tuple[Array, ...]:
        """Read-only views of FFmpeg's memory, one array per plane, in the order of the pixel format.

        A plane has shape ``(height, width)``, or ``(height, width, components)`` if it has several
        components; chroma planes have their own, smaller size. The dtype is uint8, uint16, uint32,
        float16 or float32, by the depth and byte order of the format (``gray10be`` is ``>u2``). The
        range follows from the format and :attr:`color_range`. Planes whose components differ in width or
        are not whole bytes (``yuyv422``, ``rgb565le``, ``monob``) are rows of bytes, ``(height, bytes)``.
        The second plane of ``pal8`` is its palette, ``(1, 256)`` of uint32 ARGB. Views can be strided,
        because rows may be padded or stored bottom-up.

        The views keep the memory alive after the frames are deleted.
        """
        return picture_planes(self._frames[0])

    def __repr__(self) -> str:
        return f"<ImageFrames: {self._describe()}>"

    def _repr_html_(self) -> str:
        return gallery(repr(self), _of_frames(self._frames, [""]))


def av_frames(frames: VideoFrames | ImageFrames) -> tuple[av.VideoFrame, ...]:
    """Return PyAV's frames. Threads may share them, so they must not be changed."""
    return frames._frames


def frame_metadata(frames: DecodedFrames) -> FrameMetadata:
    return frames._metadata


def is_many(key: object) -> bool:
    """Whether an index selects several frames. Arrays count as several, even of one element."""
    return isinstance(key, slice | Iterable) and getattr(key, "ndim", 1) != 0


def frame_numbers(indices: object, count: int, source: str) -> list[int]:
    """Return the numbers of frames for a slice or indices; negative indices count from the end.

    Raises:
        IndexError: There is no such frame.
        TypeError: An index is not an int, or ``indices`` is not a sequence.
    """
    if isinstance(indices, slice):
        return list(range(*indices.indices(count)))
    if isinstance(indices, str) or not isinstance(indices, Iterable):
        raise TypeError(
            f"frames are indexed by an int, a slice or a sequence of int, not {indices!r}"
        )
    numbers = []
    for index in indices:
        number = as_int(index)
        if number is None:
            raise TypeError(f"the index of a frame must be an int, not {index!r}")
        if not -count <= number < count:
            raise IndexError(f"{source}: there is no frame {number} among {count} frames")
        numbers.append(number % count)
    return numbers


def gallery(caption: str, images: Iterable[_Labelled]) -> str:
    """Return the HTML with which notebooks show a caption and labelled images."""
    import base64
    from html import escape

    shown = "".join(
        '<figure style="display:inline-block;margin:4px;text-align:center">'
        f'<img alt="{escape(label)}" src="data:image/png;base64,'
        f'{base64.b64encode(_png(image)).decode()}"><figcaption>{escape(label)}</figcaption></figure>'
        for image, label in images
    )
    return f"<div><code>{escape(caption)}</code><div>{shown}</div></div>"


def _of_frames(frames: Sequence[av.VideoFrame], labels: Sequence[str]) -> Iterable[_Labelled]:
    """Yield thumbnails (H, W, 3) of frames from first to last, except frames that FFmpeg cannot convert."""
    # Not frame.reformat(): its reformatter belongs to the frame, which other threads may use.
    reformatter = VideoReformatter()
    for index in np.unique(np.linspace(0, len(frames) - 1, NUM_SHOWN).astype(int)):
        frame = frames[index]
        scale = min(1.0, LONGEST_SIDE / max(frame.width, frame.height))
        width, height = (max(1, round(side * scale)) for side in (frame.width, frame.height))
        with suppress(av.error.FFmpegError, ValueError):
            small: Any = reformatter.reformat(frame, width, height, "rgb24").to_ndarray()
            yield small, labels[index]


def of_array(array: npt.NDArray[Any]) -> Iterable[_Labelled]:
    """Yield thumbnails of the first images of an array, channels last or first; none of other arrays."""
    if array.ndim < 3 or array.dtype.kind not in "uif":
        return
    if array.shape[-1] not in (1, 3, 4):
        # Try channels first. Arrays without a channel axis are filtered out below.
        array = np.moveaxis(array, -3, -1)
    height, width, channels = array.shape[-3:]
    if channels not in (1, 3, 4) or min(height, width) < _SHORTEST_SIDE:
        return
    step = -(-max(height, width) // LONGEST_SIDE)
    for place in islice(np.ndindex(array.shape[:-3]), NUM_SHOWN):
        yield _levels(array[place][::step, ::step]), ", ".join(map(str, place))


def _levels(image: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Convert an image to uint8. Floats are stretched from minimum to maximum, as they may be normalised."""
    values = image.astype(np.float64)
    finite = values[np.isfinite(values)]
    low, high = (finite.min(), finite.max()) if finite.size else (0.0, 0.0)
    if image.dtype.kind != "f":
        low, high = 0.0, float(np.iinfo(image.dtype).max)
    scaled = (values - low) * (255 / (high - low or 1.0))
    return np.clip(np.nan_to_num(scaled), 0, 255).astype(np.uint8)


def _png(image: npt.NDArray[np.uint8]) -> bytes:
    """Encode an array (H, W, C) with 1, 3 or 4 channels as PNG."""
    pix_fmt = {1: "gray", 3: "rgb24", 4: "rgba"}[image.shape[-1]]
    frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(image), pix_fmt, channel_last=True)
    encoder = av.VideoCodecContext.create("png", "w")
    encoder.width, encoder.height, encoder.pix_fmt = frame.width, frame.height, pix_fmt
    encoder.time_base = Fraction(1)
    return b"".join(bytes(packet) for packet in [*encoder.encode(frame), *encoder.encode(None)])
