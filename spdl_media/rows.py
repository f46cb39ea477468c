"""Frames in an array: what they must have in common, where their planes go, and what fills missing rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from spdl_media._checks import check_choice, check_int
from spdl_media.buffer import CPUBuffer
from spdl_media.errors import ConvertError
from spdl_media.formats import (
    COLOR_RANGES,
    COLORSPACES,
    Array,
    Shape,
    is_yuv,
    pixel_layout,
    plane_views,
)
from spdl_media.image_frames import ImageFrames, VideoFrames, av_frames, frame_metadata
from spdl_media.packets import VideoPackets
from spdl_media.storage import Storage, lease_memory
from spdl_media.timing import Window
from spdl_media.values import Values

Layout: TypeAlias = Literal["NCHW", "NHWC", "planes"]
OnShort: TypeAlias = Literal["error", "repeat_last", "wrap", "zeros"]
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


def new_array(shape: Shape, dtype: str, storage: Storage | None) -> Array:
    """An array in memory of the storage or, without one, in fresh memory; its values are not set.

    Raises:
        StorageTooSmallError: It does not fit into the storage.
    """
    nbytes = prod(shape) * np.dtype(dtype).itemsize
    return lease_memory(nbytes, storage)[:nbytes].view(dtype).reshape(shape)


@dataclass(eq=False)
class FrameRows:
    """One array for frames that come one by one, so that none has to be kept until the last.

    Memory is taken with the first frame, and let go of by :meth:`take` or :meth:`release`.

    Args:
        count: Number of rows.
        storage: Memory to fill; fresh memory without one.
        layout: As in :func:`~spdl_media.convert_frames`, without ``"planes"``.
        values: The numbers that pixels become; ``None``: they stay as they are.

    Thread safety: threads may put different rows at the same time, once the first was put.
    """

    count: int
    storage: Storage | None
    layout: Literal["NCHW", "NHWC"] | None
    values: Values | None = None
    _array: Array | None = field(default=None, init=False)

    def put(self, rows: Sequence[int], frame: Any, source: str) -> None:
        """Copy a frame of FFmpeg's into rows.

        Raises:
            ConvertError: It differs from the first in size or format, or its format makes no array, or the
                storage is too small.
        """
        if self._array is None:
            name = f"the frame of row {rows[0]}"
            plan = self._plan = RowPlan(frame, self.layout, name, source, self.values)
            self._array = new_array((self.count, *plan.shape), plan.dtype, self.storage)
            self._places: Sequence[Array] = plan.places(self._array)
        self._plan.check(frame, lambda: f"that of row {rows[0]}", source)
        for row in rows:
            self._plan.copy(frame, self._places, row)

    def put_image(self, row: int, image: ImageFrames) -> None:
        """Copy an image into a row; see :meth:`put`."""
        (frame,) = av_frames(image)
        self.put([row], frame, image.source)

    def take(
        self,
        rows: Sequence[int] | None = None,
        zeros: Sequence[int] = (),
        shape: Shape | None = None,
    ) -> CPUBuffer:
        """All rows, or these, moved together; some become zeros. ``shape`` stands for their number."""
        array = self._array
        assert array is not None, "a frame was put into a row"
        self.release()
        if rows is not None:
            for target, row in enumerate(rows):
                # Rows only move towards the start, so none is overwritten before it has moved.
                if target != row:
                    array[target] = array[row]
            array = array[: len(rows)]
        if zeros:
            array[list(zeros)] = 0
        return self._plan.buffer(
            array if shape is None else array.reshape(*shape, *array.shape[1:])
        )

    def release(self) -> None:
        """Let go of the memory."""
        self._array, self._places = None, ()


def check_length(name: str, count: int | None, on_short: str | None) -> None:
    """Check a number of frames or samples by the name of its argument, and what becomes of too few.

    Raises:
        TypeError: The number is no whole one.
        ValueError: It is not positive, the policy is unknown, or there is no number that could be missed.
    """
    check_choice("on_short", on_short, (*get_args(OnShort), None))
    if count is not None:
        check_int(name, count)
    elif on_short is not None:
        raise ValueError(
            f"on_short={on_short!r} says what becomes of too few, so it needs {name}=, which says how many"
        )


def check_enough(
    found: int, wanted: int, on_short: OnShort | None, what: str, window: Window, source: str
) -> None:
    """Refuse too few frames or samples where the policy says so.

    Raises:
        ConvertError: They are too few.
    """
    if found < wanted and on_short == "error":
        remedy = "on_short='repeat_last', 'wrap' or 'zeros' fills up"
        if what == "samples":
            remedy += "; decode_config(gaps='fill') puts silence where the file leaves audio out"
        raise ConvertError(
            f"{wanted} {what} are asked for, and there are {found} in the window {window}. {remedy}",
            source=source,
        )


def fill_up(
    rows: npt.NDArray[Any], found: int, on_short: OnShort, zero: int = 0
) -> npt.NDArray[np.intp] | None:
    """Fill an array behind its first rows, of which there is one at least unless zeros fill it.

    Returns:
        Which rows stand there now; ``None``: zeros do.
    """
    missing = np.arange(found, len(rows))
    if on_short == "zeros":
        rows[found:] = zero
        return None
    places = missing % found if on_short == "wrap" else np.full_like(missing, found - 1)
    rows[found:] = rows[places]
    return places
