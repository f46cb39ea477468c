"""Pictures as rows of an array: what they must have in common, where their planes go, and the copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from spdl_media.buffer import CPUBuffer
from spdl_media.errors import ConvertError
from spdl_media.formats import (
    COLOR_RANGES,
    COLORSPACES,
    PixelLayout,
    is_yuv,
    picture_planes,
    pixel_layout,
)
from spdl_media.frames import ImageFrames, VideoFrames, av_frames, frame_metadata
from spdl_media.storage import Storage, lease_memory

Pictures: TypeAlias = Sequence[VideoFrames | ImageFrames]


def check_counts(items: Pictures) -> None:
    """Refuse videos of unequal length, and those without frames."""
    first = items[0]
    if not isinstance(first, VideoFrames):
        return
    for position, item in enumerate(cast("Sequence[VideoFrames]", items)):
        if not len(item):
            raise ConvertError(
                f"there is no frame in the window {frame_metadata(item).window}", source=item.source
            )
        if len(item) != len(first):
            raise ConvertError(
                f"item 0 ({first.source}) has {len(first)} frames, but item {position} ({item.source}) has "
                f"{len(item)}. decode_packets(num_frames=) and tpad in the filter make them equal"
            )


def check_formats(items: Pictures) -> None:
    """Refuse pictures that differ in size, format or meaning of their colours, and those without pixels."""
    expected = None
    for position, item in enumerate(items):
        for index, frame in enumerate(av_frames(item)):
            found = frame.width, frame.height, frame.format.name
            expected = expected or found
            if found != expected:
                raise ConvertError(
                    f"{_where(items, 0, 0)} is {_in_words(expected)}, but "
                    f"{_where(items, position, index)} is {_in_words(found)}. One array holds one size and "
                    "format: give decode_packets a filter that scales and converts",
                    source=items[position].source,
                )
    width, height, pix_fmt = expected or (0, 0, "")
    if not (width and height):
        raise ConvertError(
            f"a frame of {width}x{height} {pix_fmt} has no pixels", source=items[0].source
        )
    if is_yuv(pix_fmt):
        _check_colors(items)


def colors_of(frame: Any) -> tuple[str | None, str | None]:
    """Matrix and range of a frame of FFmpeg's, as buffers name them; ``None`` for what is no YUV."""
    return matrix_and_range(frame) if is_yuv(frame.format.name) else (None, None)


def _check_colors(items: Pictures) -> None:
    """Refuse YUV numbers that mean different colours: nobody could tell them apart in one array."""
    expected = None
    for position, item in enumerate(items):
        for index, frame in enumerate(av_frames(item)):
            found = matrix_and_range(frame)
            expected = expected or found
            if found != expected:
                raise colors_differ(
                    (_where(items, 0, 0), expected),
                    (_where(items, position, index), found),
                    frame.format.name,
                    items[position].source,
                )


def colors_differ(
    one: tuple[str, tuple[str | None, str | None]],
    other: tuple[str, tuple[str | None, str | None]],
    pix_fmt: str,
    source: str,
) -> ConvertError:
    """The error for two pictures, each by its name and :func:`colors_of` it."""
    return ConvertError(
        f"{one[0]} has {_colors_in_words(one[1])}, but {other[0]} has {_colors_in_words(other[1])}, so equal "
        f"numbers of {pix_fmt} are different colours. Take RGB, or convert to one kind: pix_fmt='yuvj420p' "
        "is always of full range, and get_video_filter_desc(color_matrix='bt601', color_range='pc') says "
        "both",
        source=source,
    )


def matrix_and_range(frame: Any) -> tuple[str, str]:
    """What the numbers of a YUV frame of FFmpeg's mean, also if it does not say."""
    # BT.601 has two names, and is what pictures have that don't say.
    name = COLORSPACES.get(int(frame.colorspace), "bt601")
    full = frame.format.name.startswith("yuvj") or COLOR_RANGES.get(int(frame.color_range)) == "pc"
    return "bt601" if name in ("bt470bg", "smpte170m") else name, "pc" if full else "tv"


def _colors_in_words(colors: tuple[str | None, str | None]) -> str:
    return f"{colors[0]} {'full' if colors[1] == 'pc' else 'limited'} range"


def _where(items: Pictures, position: int, index: int) -> str:
    frame = f"frame {index} of " if isinstance(items[position], VideoFrames) else ""
    return f"{frame}item {position} ({items[position].source})"


def _in_words(format: tuple[int, int, str]) -> str:
    return f"{format[0]}x{format[1]} {format[2]}"


Array: TypeAlias = npt.NDArray[Any]
Shape: TypeAlias = tuple[int, ...]
Layout: TypeAlias = Literal["NCHW", "NHWC", "planes"]


@dataclass(frozen=True, slots=True)
class Plan:
    """Where the planes of a frame go in its part of the array."""

    shape: Shape
    dtype: str
    layout: PixelLayout
    transposed: bool
    planes: tuple[Shape, ...]

    def targets(self, frames: Array) -> list[Array]:
        """Views of an array of frames, one for each of FFmpeg's planes: the frames' places for it."""
        if self.layout.kind == "tiled":
            return self._tiles(frames.reshape(len(frames), -1))
        last = np.moveaxis(frames, 1, -1) if self._channels_first else frames
        if self.layout.kind == "packed":
            # A plane of one component has no axis for it.
            return [last[..., 0] if self.layout.channels == 1 else last]
        return [last[..., self.layout.order.index(plane)] for plane in range(self.layout.channels)]

    @property
    def _channels_first(self) -> bool:
        return (self.layout.kind == "planar") != self.transposed

    def _tiles(self, frames: Array) -> list[Array]:
        start, tiles = 0, []
        for shape in self.planes:
            stop = start + prod(shape)
            tiles.append(frames[:, start:stop].reshape(-1, *shape))
            start = stop
        return tiles


def plan_of(frames: VideoFrames | ImageFrames, layout: Layout | None) -> Plan:
    """Where the planes of frames like these go.

    Raises:
        ConvertError: Their format makes no array, or not in this layout.
    """
    width, height, pix_fmt = frames.width, frames.height, frames.pix_fmt
    own = pixel_layout(pix_fmt)
    reason = why_no_array(width, height, pix_fmt, layout)
    if own is None or reason is not None:
        raise ConvertError(
            f"{reason}, or one array a plane: convert_frames(layout='planes')", source=frames.source
        )
    shape = own.shape(width, height)
    transposed = layout is not None and (layout == "NCHW") == (own.kind == "packed")
    if transposed:
        shape = (own.channels, height, width) if layout == "NCHW" else (height, width, own.channels)
    planes = tuple(plane.shape for plane in picture_planes(av_frames(frames)[0]))
    return Plan(shape, own.dtype, own, transposed, planes)


def why_no_array(width: int, height: int, pix_fmt: str, layout: Layout | None) -> str | None:
    """Why pictures of such a size and format make no array, and what helps; ``None``: they do."""
    own = pixel_layout(pix_fmt)
    if own is None:
        return (
            f"pixel format {pix_fmt!r} makes no array. Take another, such as pix_fmt='rgb24' (of load_image "
            "and get_video_filter_desc)"
        )
    if layout is None and not own.tiles(width):
        return (
            f"the planes of {width}x{height} {pix_fmt} do not make one rectangle: the width is odd. Scale to "
            "an even width, or take pix_fmt='rgb24'"
        )
    if layout is not None and own.kind == "tiled":
        return (
            f"layout={layout!r} is for RGB and gray; {pix_fmt} has chroma planes of another size. Leave "
            "layout out, or take pix_fmt='rgb24'"
        )
    return None


def copy_planes(items: Pictures, targets: Sequence[Array]) -> None:
    """Copy the planes of all frames; NumPy lets go of the GIL for each."""
    for position, frame in enumerate(_all_frames(items)):
        for target, plane in zip(targets, picture_planes(frame), strict=True):
            target[position] = plane


def _all_frames(items: Pictures) -> Iterator[Any]:
    return (frame for item in items for frame in av_frames(item))


class PictureRows:
    """One array for pictures that come one by one, so that none has to be kept until the last.

    Memory is taken with the first picture, and let go of by :meth:`take` or :meth:`release`.

    Args:
        count: Number of rows.
        storage: Memory to fill; fresh memory without one.
        layout: As in :func:`~spdl_media.convert_frames`, without ``"planes"``.

    Thread safety: threads may put different rows at the same time, once the first was put.
    """

    __slots__ = ("_array", "_colors", "_count", "_layout", "_storage", "_targets")

    def __init__(
        self, count: int, storage: Storage | None, layout: Literal["NCHW", "NHWC"] | None
    ) -> None:
        self._count = count
        self._storage = storage
        self._layout = layout
        self._array: Array | None = None
        self._targets: list[Array] = []
        self._colors: tuple[str | None, str | None] = (None, None)

    def put(self, row: int, picture: ImageFrames) -> None:
        """Copy a picture, which has the size and format of the first, into a row.

        Raises:
            ConvertError: The first one's format makes no array, or the storage is too small.
        """
        if self._array is None:
            plan = plan_of(picture, self._layout)
            self._array = new_array((self._count, *plan.shape), plan.dtype, self._storage)
            self._targets = plan.targets(self._array)
            self._colors = colors_of(av_frames(picture)[0])
        copy_planes([picture], [target[row : row + 1] for target in self._targets])

    def take(self, rows: Sequence[int], zeros: Sequence[int] = ()) -> CPUBuffer:
        """These rows, moved together, of which some become zeros."""
        if self._array is None:
            raise ValueError("no picture was put into a row; please report this")
        array = self._array
        self.release()
        for target, row in enumerate(rows):
            if target != row:
                array[target] = array[row]
        array = array[: len(rows)]
        if zeros:
            array[list(zeros)] = 0
        return CPUBuffer(array, colorspace=self._colors[0], color_range=self._colors[1])

    def release(self) -> None:
        """Let go of the memory."""
        self._array = None
        self._targets = []


def new_array(shape: Shape, dtype: str, storage: Storage | None) -> Array:
    """An array in memory of the storage or, without one, in fresh memory; its values are not set."""
    nbytes = prod(shape) * np.dtype(dtype).itemsize
    return lease_memory(nbytes, storage)[:nbytes].view(dtype).reshape(shape)
