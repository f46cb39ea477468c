"""Frames as rows of an array: what they must have in common, where their planes go, and the one copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from spdl_media.buffer import CPUBuffer
from spdl_media.errors import ConvertError
from spdl_media.formats import (
    COLOR_RANGES,
    COLORSPACES,
    is_yuv,
    pixel_layout,
    plane_views,
)
from spdl_media.frames import frame_metadata
from spdl_media.image_frames import ImageFrames, VideoFrames, av_frames
from spdl_media.packets import VideoPackets
from spdl_media.storage import Storage, lease_memory
from spdl_media.values import Values

Array: TypeAlias = npt.NDArray[Any]
Shape: TypeAlias = tuple[int, ...]
Layout: TypeAlias = Literal["NCHW", "NHWC", "planes"]
Colors: TypeAlias = tuple[str | None, str | None]
"""Matrix and range, by the names of buffers."""


def no_frames(frames: VideoFrames | VideoPackets) -> ConvertError:
    """The error for a window that holds no frame."""
    window = frames.window if isinstance(frames, VideoPackets) else frame_metadata(frames).window
    return ConvertError(f"there is no frame in the window {window}", source=frames.source)


def colors_of(frame: Any) -> Colors:
    """Matrix and range of a frame of FFmpeg's, as buffers name them; ``None`` for what is no YUV."""
    return matrix_and_range(frame) if is_yuv(frame.format.name) else (None, None)


def colors_differ(
    one: tuple[str, Colors],
    other: tuple[str, Colors],
    pix_fmt: str,
    source: str,
) -> ConvertError:
    """The error for two images, each by its name and :func:`colors_of` it."""
    return ConvertError(
        f"{one[0]} has {_colors_in_words(one[1])}, but {other[0]} has {_colors_in_words(other[1])}, so equal "
        f"numbers of {pix_fmt} are different colours. Take RGB, or convert to one kind: pix_fmt='yuvj420p' "
        "is always of full range, and get_video_filter_desc(color_matrix='bt601', color_range='pc') says "
        "both",
        source=source,
    )


def matrix_and_range(frame: Any) -> tuple[str, str]:
    """Matrix and range of a YUV frame, with FFmpeg's defaults where it states none."""
    # BT.601 has two names, and is what images have that don't say.
    name = COLORSPACES.get(int(frame.colorspace), "bt601")
    # The yuvj formats are of full range by their name.
    full = frame.format.name.startswith("yuvj") or COLOR_RANGES.get(int(frame.color_range)) == "pc"
    return "bt601" if name in ("bt470bg", "smpte170m") else name, "pc" if full else "tv"


def _colors_in_words(colors: Colors) -> str:
    return f"{colors[0]} {'full' if colors[1] == 'pc' else 'limited'} range"


def _seen(frame: Any) -> tuple[Any, ...]:
    """What frames must share; different values of the last two may mean the same colours."""
    return frame.width, frame.height, frame.format.name, frame.colorspace, frame.color_range


def _in_words(seen: tuple[Any, ...]) -> str:
    return f"{seen[0]}x{seen[1]} {seen[2]}"


class RowPlan:
    """How frames of one size and format lie in an array, a row each.

    Args:
        frame: The first of FFmpeg's frames.
        layout: As in :func:`~spdl_media.convert_frames`; ``"planes"`` for no array of rows.
        name: What errors call the frame.
        source: What it was decoded from.
        values: The numbers that pixels become; ``None``: they stay as they are.

    Attributes:
        shape: Of a row.
        dtype: NumPy's name of its type.
        nbytes: Of a row.

    Raises:
        ConvertError: The frame has no pixels, or its format makes no array, or not in this layout or of
            these numbers.
    """

    def __init__(
        self,
        frame: Any,
        layout: Layout | None,
        name: str,
        source: str,
        values: Values | None = None,
    ) -> None:
        self._seen = width, height, pix_fmt, *_ = _seen(frame)
        self._name, self._colors = name, colors_of(frame)
        if not (width and height):
            raise ConvertError(f"a frame of {_in_words(self._seen)} has no pixels", source=source)
        if layout == "planes":
            return
        own = pixel_layout(pix_fmt)
        reason = why_no_array(width, height, pix_fmt, layout)
        if own is None or reason is not None:
            raise ConvertError(
                f"{reason}, or one array a plane: convert_frames(layout='planes')", source=source
            )
        if values is not None and (reason := values.refusal(pix_fmt)):
            raise ConvertError(reason, source=source)
        self._own, self._layout = own, layout
        self._floats = values if values is not None and values.is_float else None
        self._bits = frame.format.components[0].bits
        self._planes = [plane.shape for plane in plane_views(frame)]
        self.shape = own.shape(width, height, layout)
        self.dtype = own.dtype if self._floats is None else self._floats.dtype
        self.nbytes = prod(self.shape) * np.dtype(self.dtype).itemsize

    def check(self, frame: Any, name: Callable[[], str], source: str) -> None:
        """Refuse a frame that differs from the first in size, format or meaning of its colours.

        Raises:
            ConvertError: It differs.
        """
        seen = _seen(frame)
        if seen == self._seen:  # nearly always, so that little is done for a frame
            return
        if seen[:3] != self._seen[:3]:
            raise ConvertError(
                f"{self._name} is {_in_words(self._seen)}, but {name()} is {_in_words(seen)}. One array "
                "holds one size and format: give decode_packets a filter that scales and converts",
                source=source,
            )
        # Other numbers of matrix or range may still mean the same colours.
        if (colors := colors_of(frame)) != self._colors:
            raise colors_differ((self._name, self._colors), (name(), colors), seen[2], source)

    def places(self, rows: Array) -> list[Array]:
        """Views of an array of rows: the places for each of FFmpeg's planes."""
        return self._own.places(rows, self._planes, self._layout)

    def copy(self, frame: Any, places: Sequence[Array], row: int) -> None:
        """Write the pixels of a frame of FFmpeg's into a row of its :meth:`places`."""
        if (floats := self._floats) is None:
            copy_frame(frame, places, row)
            return
        for index, (place, plane) in enumerate(zip(places, plane_views(frame), strict=True)):
            channels = range(plane.shape[2]) if plane.ndim == 3 else [self._own.order.index(index)]
            floats.write(place[row], plane, channels, self._bits)

    def buffer(self, array: Array) -> CPUBuffer:
        """The array with what its colours mean."""
        return CPUBuffer(array, colorspace=self._colors[0], color_range=self._colors[1])


def why_no_array(width: int, height: int, pix_fmt: str, layout: Layout | None) -> str | None:
    """Why images of such a size and format make no array, and what helps; ``None``: they do."""
    own = pixel_layout(pix_fmt)
    if own is None:
        return (
            f"pixel format {pix_fmt!r} makes no array. Take another, such as pix_fmt='rgb24' (of load_image "
            "and get_video_filter_desc)"
        )
    if layout is None and not own.tiles(width):
        return (
            f"the planes of {width}x{height} {pix_fmt} do not make one rectangle: the width is odd. Scale or "
            "crop to an even width, or take pix_fmt='rgb24'"
        )
    if layout is not None and own.kind == "tiled":
        return (
            f"layout={layout!r} is for RGB and gray; {pix_fmt} has chroma planes of another size. Leave "
            "layout out, or take pix_fmt='rgb24'"
        )
    return None


def copy_frame(frame: Any, targets: Sequence[Array], row: int) -> None:
    """Copy the planes of a frame of FFmpeg's into a row; NumPy lets go of the GIL for each."""
    for target, plane in zip(targets, plane_views(frame), strict=True):
        target[row] = plane


class PictureRows:
    """One array for images that come one by one, so that none has to be kept until the last.

    Memory is taken with the first image, and let go of by :meth:`take` or :meth:`release`.

    Args:
        count: Number of rows.
        storage: Memory to fill; fresh memory without one.
        layout: As in :func:`~spdl_media.convert_frames`, without ``"planes"``.
        values: The numbers that pixels become; ``None``: they stay as they are.

    Thread safety: threads may put different rows at the same time, once the first was put.
    """

    def __init__(
        self,
        count: int,
        storage: Storage | None,
        layout: Literal["NCHW", "NHWC"] | None,
        values: Values | None = None,
    ) -> None:
        self._count = count
        self._storage = storage
        self._layout, self._values = layout, values
        self._array: Array | None = None
        self._places: list[Array] = []

    def put(self, row: int, picture: ImageFrames) -> None:
        """Copy an image, which has the size and format of the first, into a row.

        Raises:
            ConvertError: The first one's format makes no array, or the storage is too small.
        """
        (frame,) = av_frames(picture)
        if self._array is None:
            args = frame, self._layout, "the image", picture.source, self._values
            plan = self._plan = RowPlan(*args)
            self._array = new_array((self._count, *plan.shape), plan.dtype, self._storage)
            self._places = plan.places(self._array)
        self._plan.copy(frame, self._places, row)

    def take(self, rows: Sequence[int], zeros: Sequence[int] = ()) -> CPUBuffer:
        """These rows, moved together, of which some become zeros."""
        if self._array is None:
            raise ValueError("no image was put into a row; please report this")
        array = self._array
        self.release()
        for target, row in enumerate(rows):
            # Rows only move towards the start, so none is overwritten before it has moved.
            if target != row:
                array[target] = array[row]
        array = array[: len(rows)]
        array[list(zeros)] = 0
        return self._plan.buffer(array)

    def release(self) -> None:
        """Let go of the memory."""
        self._array, self._places = None, []


def new_array(shape: Shape, dtype: str, storage: Storage | None) -> Array:
    """An array in memory of the storage or, without one, in fresh memory; its values are not set."""
    nbytes = prod(shape) * np.dtype(dtype).itemsize
    return lease_memory(nbytes, storage)[:nbytes].view(dtype).reshape(shape)
