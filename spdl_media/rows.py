"""Copy frames into the rows of one array, as they are or as floats, and fill missing rows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

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
from spdl_media.storage import Storage, new_array
from spdl_media.timing import Window

ArrayLayout: TypeAlias = Literal["NCHW", "NHWC"]
OnShort: TypeAlias = Literal["error", "repeat_last", "wrap", "zeros"]
Colors: TypeAlias = tuple[str | None, str | None]
"""Names of matrix and range, as in buffers."""


DType: TypeAlias = Literal["uint8", "float16", "float32"]
ValueType: TypeAlias = DType | type[np.generic] | np.dtype[Any]
PerChannel: TypeAlias = float | Sequence[float] | npt.NDArray[Any]
"""A number for each channel, or one for all."""

# Largest difference of float32 values from PyTorch's.
_MAX_ERROR = 1e-6


@dataclass(frozen=True, slots=True)
class Values:
    """Conversion of pixel values.

    Attributes:
        dtype: Type of the result; ``"uint8"`` keeps the values.
        mean: Mean of each channel, or one for all.
        std: Standard deviation of each channel, or one for all.
    """

    dtype: DType
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    @property
    def is_float(self) -> bool:
        """Whether values become floats."""
        return self.dtype != "uint8"

    def refusal(self, pix_fmt: str) -> str | None:
        """Return why pixels of this format cannot be converted, and a remedy; ``None``: they can."""
        layout = pixel_layout(pix_fmt)
        if layout is None:  # has no array layout, which raises elsewhere
            return None
        is_whole = layout.dtype.startswith("uint")
        if self.is_float and (is_yuv(pix_fmt) or not is_whole):
            return (
                f"dtype={self.dtype!r} is for RGB and gray of whole numbers, and not for {pix_fmt}. Take "
                "pix_fmt='rgb24'"
            )
        if not self.is_float and layout.dtype != "uint8":
            return f"dtype='uint8' is not for {pix_fmt}, which has {layout.dtype}. Take pix_fmt='rgb24'"
        for name, numbers in (("mean", self.mean), ("std", self.std)):
            if len(numbers) not in (1, layout.channels):
                return (
                    f"{name} must have one number, or one for each channel of {pix_fmt}, which are "
                    f"{layout.channels}, not {len(numbers)}"
                )
        return None

    def write(self, row: Array, plane: Array, channels: Sequence[int], bits: int) -> None:
        """Convert the values of a plane and write them to a row.

        Args:
            row: Floats ``(height, width)`` or ``(height, width, channels)``.
            plane: Integers of the same shape.
            channels: Indices of the plane's channels in the array.
            bits: Bits per value of the plane.
        """
        # Microseconds for 224x224 RGB in planes (in one plane, to NCHW), where a copy of uint8 takes 15 (50):
        #     copied, multiplied and added in place     70 (110)
        #     np.multiply(plane, ..., out=row) first    110 (150)
        #     np.take                                   190 (150)
        # NumPy releases the GIL in all of them.
        scale, offset, table = _tables(self, max(channels) + 1, bits)
        if table is None:
            row[...] = plane
            if row.ndim == 3 and row.flags.c_contiguous:
                # All channels of a row at once: NumPy's inner loop over three channels would be slow.
                width = row.shape[1]
                row = row.reshape(len(row), -1)
                row *= np.tile(scale, width)
                row += np.tile(offset, width)
                return
        for index, channel in enumerate(channels):
            target = row[..., index] if row.ndim == 3 else row
            if table is None:
                target *= scale[channel]
                target += offset[channel]
            else:
                levels = plane[..., index] if row.ndim == 3 else plane
                # mode="clip", because the default mode would write to a buffer first.
                np.take(table[channel], levels, out=target, mode="clip")


@lru_cache(maxsize=64)
def _tables(values: Values, count: int, bits: int) -> tuple[Array, Array, Array | None]:
    """Return scale and offset of each channel, and a table of results if those are not exact enough."""
    largest = (1 << bits) - 1
    levels = np.arange(largest + 1, dtype=np.float32)
    # One number for all channels is repeated.
    mean, std = (np.array([*one, *one * count])[:count] for one in (values.mean, values.std))
    # Values beyond float16 become infinite, as in PyTorch.
    with np.errstate(all="ignore"):
        # In the order of torchvision's ToTensor and Normalize, so that results are equal.
        centred = levels / np.float32(largest) - mean.astype(np.float32)[:, None]
        table = centred / std.astype(np.float32)[:, None]
        scale, offset = (1 / (largest * std)).astype(np.float32), (-mean / std).astype(np.float32)
        difference = np.abs(levels * scale[:, None] + offset[:, None] - table).max()
        is_near = values.dtype == "float32" and difference < _MAX_ERROR
        return scale, offset, None if is_near else table.astype(values.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOptions:
    """How frames are converted to rows.

    Attributes:
        storage: Memory to fill; ``None`` allocates new memory.
        layout: Order of the axes of RGB and gray; ``None``: that of the format.
        values: Conversion of pixel values; ``None`` keeps them.
        num_frames: Maximum number of rows.
        on_short: How to fill up to ``num_frames``; ``None`` does not.
    """

    storage: Storage | None = None
    layout: ArrayLayout | None = None
    values: Values | None = None
    num_frames: int | None = None
    on_short: OnShort | None = None


class FrameKind(NamedTuple):
    """Properties that all frames of one array share."""

    width: int
    height: int
    pix_fmt: str
    colors: Colors = (None, None)

    @classmethod
    def of(cls, frame: Any) -> FrameKind:
        """Return the kind of a frame."""
        pix_fmt = frame.format.name
        colors = matrix_and_range(frame) if is_yuv(pix_fmt) else (None, None)
        return cls(frame.width, frame.height, pix_fmt, colors)


def kinds_differ(
    one: tuple[str, FrameKind], other: tuple[str, FrameKind], source: str | None = None
) -> ConvertError:
    """Make the error for two frames that do not fit in one array, each given by name and kind."""
    size, other_size = (f"{kind.width}x{kind.height} {kind.pix_fmt}" for _, kind in (one, other))
    if size != other_size:
        return ConvertError(
            f"{one[0]} is {size}, but {other[0]} is {other_size}. One array holds one size and format: give "
            "width=, height= and pix_fmt=, or decode_packets a filter that scales and converts",
            source=source,
        )
    colors, other_colors = (
        f"{matrix} {'full' if range == 'pc' else 'limited'} range"
        for matrix, range in (one[1].colors, other[1].colors)
    )
    return ConvertError(
        f"{one[0]} has {colors}, but {other[0]} has {other_colors}, so equal numbers of {one[1].pix_fmt} are "
        "different colours. Take RGB, or convert to one kind: pix_fmt='yuvj420p' is always of full range, "
        "and get_video_filter_desc(color_matrix='bt601', color_range='pc') says both",
        source=source,
    )


def matrix_and_range(frame: Any) -> tuple[str, str]:
    """Return matrix and range of a YUV frame, with FFmpeg's defaults if it states none."""
    # BT.601 has two names in FFmpeg, and is the default.
    name = COLORSPACES.get(int(frame.colorspace), "bt601")
    # The yuvj formats have full range by definition.
    full = frame.format.name.startswith("yuvj") or COLOR_RANGES.get(int(frame.color_range)) == "pc"
    return "bt601" if name in ("bt470bg", "smpte170m") else name, "pc" if full else "tv"


class RowPlan:
    """Layout of frames of one size and format in an array with a row per frame.

    Args:
        frame: The first frame.
        row: Its row.
        source: Name of its source.
        options: Axis order and values of the array; ``None``: frames are only checked, not copied.
        name: Returns the name of a frame for errors, by its row and source.

    Attributes:
        shape: Shape of a row.
        dtype: NumPy's name of its type.
        nbytes: Size of a row in bytes.

    Raises:
        ConvertError: The frame has no pixels, or its format has no array layout, or does not support the
            requested layout or values.
    """

    def __init__(
        self,
        frame: Any,
        row: int,
        source: str,
        options: RowOptions | None,
        name: Callable[[int, str], str],
    ) -> None:
        self._first, self._name = (row, source), name
        self._kind = width, height, pix_fmt, _ = FrameKind.of(frame)
        if not (width and height):
            raise ConvertError(
                f"a frame of {width}x{height} {pix_fmt} has no pixels", source=source
            )
        self._floats: Values | None = None
        if options is None:
            return
        layout, values = options.layout, options.values
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
        self._bits = frame.format.components[0].bits if self._floats else 0
        self._planes = [view.shape for view in plane_views(frame)]
        self.shape = own.shape(width, height, layout)
        self.dtype = own.dtype if self._floats is None else self._floats.dtype
        self.nbytes = prod(self.shape) * np.dtype(self.dtype).itemsize

    def check(self, frame: Any, row: int, source: str) -> None:
        """Check that a frame has the size, format and colours of the first one.

        Raises:
            ConvertError: The frame differs.
        """
        if (kind := FrameKind.of(frame)) != self._kind:
            # Sorted by row, so that the message does not depend on which thread was first.
            pair = sorted([(*self._first, self._kind), (row, source, kind)])
            one, other = ((self._name(at, origin), found) for at, origin, found in pair)
            raise kinds_differ(one, other, source)

    def places(self, rows: Array) -> list[Array]:
        """Return a view of an array of rows for each of FFmpeg's planes."""
        return self._own.places(rows, self._planes, self._layout)

    def copy(self, frame: Any, places: Sequence[Array], row: int) -> None:
        """Copy the pixels of a frame to a row of :meth:`places`."""
        for index, (place, plane) in enumerate(zip(places, plane_views(frame), strict=True)):
            if self._floats is None:
                place[row] = plane  # NumPy releases the GIL for each plane
                continue
            channels = range(plane.shape[2]) if plane.ndim == 3 else [self._own.order.index(index)]
            self._floats.write(place[row], plane, channels, self._bits)

    def buffer(self, array: Array) -> CPUBuffer:
        """Return the array as a buffer with matrix and range."""
        colorspace, color_range = self._kind.colors
        return CPUBuffer(array, colorspace=colorspace, color_range=color_range)


def why_no_array(width: int, height: int, pix_fmt: str, layout: ArrayLayout | None) -> str | None:
    """Return why images of this size and format have no array layout, and a remedy; ``None``: they have."""
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


class FrameRows:
    """One array into which frames are copied one by one, so that no frame has to be kept.

    Memory is leased with the first frame, and released by :meth:`take` or :meth:`close`.

    Args:
        count: Number of rows.
        options: Memory, axis order and values of the array.
        what: Name of a row in errors.

    Thread safety: threads may put different rows at the same time.
    """

    def __init__(self, count: int, options: RowOptions, what: str = "row") -> None:
        self._count, self._options = count, options
        self._name = f"{what} {{}} ({{}})".format
        self._lock = threading.Lock()
        self._array: Array | None = None

    def put(self, rows: Sequence[int], frame: Any, source: str) -> None:
        """Copy a frame to rows.

        Raises:
            ConvertError: The frame differs from the first in size or format, its format has no array layout,
                or the storage is too small.
        """
        # Locked, because only one thread may lease the memory, with the first frame.
        with self._lock:
            if self._array is None:
                plan = RowPlan(frame, rows[0], source, self._options, self._name)
                array = new_array((self._count, *plan.shape), plan.dtype, self._options.storage)
                self._plan, self._places, self._array = plan, plan.places(array), array
        self._plan.check(frame, rows[0], source)
        for row in rows:
            self._plan.copy(frame, self._places, row)

    def take(
        self,
        rows: Sequence[int] | None = None,
        zeros: Sequence[int] = (),
        shape: Shape | None = None,
    ) -> CPUBuffer:
        """Return the array, and release it here.

        Args:
            rows: Rows to keep, in increasing order, moved to the start; ``None`` keeps all.
            zeros: Rows of the result to fill with zeros.
            shape: Replaces the first axis of the result by several.
        """
        array = self._array
        assert array is not None, "a frame was put into a row"
        self.close()
        if rows is not None:
            for target, row in enumerate(rows):
                # Rows move only towards the start, so none is overwritten before it is moved.
                if target != row:
                    array[target] = array[row]
            array = array[: len(rows)]
        if zeros:
            array[list(zeros)] = 0
        return self._plan.buffer(
            array if shape is None else array.reshape(*shape, *array.shape[1:])
        )

    def close(self) -> None:
        """Release the memory."""
        self._array, self._places = None, []


def check_length(name: str, count: int | None, on_short: str | None) -> int | None:
    """Check a number of frames or samples, given as the argument ``name``, and ``on_short``.

    Returns:
        The number as an ``int``, because products of a narrow NumPy integer overflow.

    Raises:
        TypeError: The number is not an integer.
        ValueError: The number is not positive, ``on_short`` is unknown, or is given without a number.
    """
    if on_short is not None:
        check_choice("on_short", on_short, (*get_args(OnShort), None))
    if count is not None:
        return check_int(name, count)
    if on_short is not None:
        raise ValueError(
            f"on_short={on_short!r} handles too few, so it needs {name}=, the number that is enough"
        )
    return None


def check_enough(
    found: int, wanted: int, on_short: OnShort | None, what: str, window: Window, source: str
) -> None:
    """Check that there are enough frames or samples, if ``on_short`` is ``"error"``.

    Raises:
        ConvertError: There are too few.
    """
    if found < wanted and on_short == "error":
        remedy = "on_short='repeat_last', 'wrap' or 'zeros' adds the rest"
        if what == "samples":
            remedy += "; decode_config(gaps='fill') puts silence where the file leaves audio out"
        raise ConvertError(
            f"{wanted} {what} were requested, but {window.name} has {found}. {remedy}",
            source=source,
        )


def fill_up(
    rows: npt.NDArray[Any], found: int, on_short: OnShort, zero: int = 0
) -> npt.NDArray[np.intp] | None:
    """Fill the rows of an array after the first ``found``, which is at least 1 unless zeros fill it.

    Returns:
        The rows that were copied there; ``None`` for zeros.
    """
    missing = np.arange(found, len(rows))
    if on_short == "zeros":
        rows[found:] = zero
        return None
    places = missing % found if on_short == "wrap" else np.full_like(missing, found - 1)
    rows[found:] = rows[places]
    return places
