"""Frames into one array: the one copy on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from numbers import Integral
from typing import Any, Final, Literal, TypeAlias, cast, overload

import numpy as np
import numpy.typing as npt

from spdl_media._audio_arrays import convert_audio
from spdl_media._checks import check_choice
from spdl_media._rows import (
    Array,
    SameFormat,
    Shape,
    colors_of,
    copy_frame,
    new_array,
    no_frames,
    plan_of,
)
from spdl_media.buffer import CPUBuffer
from spdl_media.errors import ConvertError
from spdl_media.formats import picture_planes
from spdl_media.frames import AudioFrames, Frames, ImageFrames, VideoFrames, av_frames
from spdl_media.storage import ALIGNMENT, Storage, lease_memory

__all__ = ("convert_array", "convert_frames")

Pictures: TypeAlias = Sequence[VideoFrames | ImageFrames]
Layout: TypeAlias = Literal["NCHW", "NHWC", "planes"]

NUMBER_KINDS: Final = "biufc"
"""NumPy's letters for the kinds of types that buffers hold."""

# As a tuple, because isinstance with A | B makes the union anew at each call.
_KINDS = (AudioFrames, VideoFrames, ImageFrames)


@overload
def convert_frames(
    frames: Frames | Sequence[Frames],
    storage: Storage | None = ...,
    *,
    layout: Literal["planes"],
    pad: bool = ...,
) -> tuple[CPUBuffer, ...]: ...
@overload
def convert_frames(
    frames: Frames | Sequence[Frames],
    storage: Storage | None = ...,
    *,
    layout: Literal["NCHW", "NHWC"] | None = ...,
    pad: bool = ...,
) -> CPUBuffer: ...
def convert_frames(
    frames: Frames | Sequence[Frames],
    storage: Storage | None = None,
    *,
    layout: Layout | None = None,
    pad: bool = False,
) -> CPUBuffer | tuple[CPUBuffer, ...]:
    """Copy decoded frames into one contiguous array, each plane once.

    Args:
        frames: ``ImageFrames``, ``VideoFrames``, ``AudioFrames``, or a sequence of one of these kinds.
            Not consumed. All must have one size (number of frames or samples, too) and format, and YUV
            pictures one matrix and range.
        storage: Memory to fill; fresh memory without one.
        layout: ``"NCHW"`` or ``"NHWC"`` for RGB and gray, whatever the format's own order.
            ``"planes"`` for one array a plane, which every format has.
        pad: Fill shorter audio with silence at its end, to the longest of the sequence.

    Returns:
        A buffer, a copy, with the shape and dtype that the table of :mod:`spdl_media.formats` gives: an
        ``rgb24`` image is ``(H, W, 3)`` uint8, values 0 to 255; ``VideoFrames`` have N in front; audio is
        ``(C, N)`` for planar and ``(N, C)`` for packed formats; a sequence puts B in front. With
        ``layout="planes"``, a tuple of such buffers, one a plane, over one piece of memory.

    Raises:
        ConvertError: Frames differ (both are named), there are none (the window is named), they have no
            pixels, or their format makes no array (a remedy is named).
        StorageTooSmallError: The storage has too few bytes (both sizes are named).
        TypeError: ``frames`` are no frames.
        ValueError: ``layout`` is none of the above or given for audio, or ``pad`` for pictures.

    Thread safety: safe.
    """
    check_choice("layout", layout, ("NCHW", "NHWC", "planes", None))
    items, single = _items(frames)
    if isinstance(items[0], AudioFrames):
        if layout is not None:
            raise ValueError(
                f"layout={layout!r} is for pictures; audio is (C, N) in planar and (N, C) in packed formats, "
                "which get_audio_filter_desc(sample_fmt=) chooses"
            )
        return convert_audio(cast("list[AudioFrames]", items), storage, single=single, pad=pad)
    if pad:
        raise ValueError("pad= is for audio; frames of different sizes are scaled by a filter")
    return _convert_pictures(
        cast("list[VideoFrames | ImageFrames]", items), storage, layout, single=single
    )


def _items(frames: Frames | Sequence[Frames]) -> tuple[list[Frames], bool]:
    """The frames, all of one kind, in a list, and whether it is one item, not a sequence, that was given."""
    if isinstance(frames, _KINDS):
        return [frames], True
    try:
        items = list(frames)
    except TypeError:
        raise TypeError(_not_frames(f"not {type(frames).__name__}")) from None
    if not items:
        raise ConvertError("there are no frames to convert: the sequence is empty")
    kind = type(items[0])
    for position, item in enumerate(items):
        if not isinstance(item, _KINDS):
            raise TypeError(_not_frames(f"but item {position} is {type(item).__name__}"))
        if type(item) is not kind:
            raise ConvertError(
                f"item 0 is {kind.__name__}, but item {position} is {type(item).__name__}; one array holds "
                "one kind"
            )
    return items, False


def _not_frames(found: str) -> str:
    return (
        f"convert_frames takes ImageFrames, VideoFrames, AudioFrames or a sequence of one of them, {found}. "
        "decode_packets makes frames"
    )


def _check_counts(items: Pictures) -> None:
    """Refuse videos of unequal length, and those without frames."""
    first = items[0]
    if not isinstance(first, VideoFrames):
        return
    for position, item in enumerate(cast("Sequence[VideoFrames]", items)):
        if not len(item):
            raise no_frames(item)
        if len(item) != len(first):
            raise ConvertError(
                f"item 0 ({first.source}) has {len(first)} frames, but item {position} ({item.source}) has "
                f"{len(item)}. decode_packets(num_frames=) and tpad in the filter make them equal"
            )


def _check_formats(items: Pictures) -> None:
    """Refuse images that no array holds together, or without pixels."""
    same = SameFormat()
    for position, item in enumerate(items):
        for index, frame in enumerate(av_frames(item)):
            row = f"frame {index} of " if isinstance(item, VideoFrames) else ""
            same.takes(frame, f"{row}item {position} ({item.source})", item.source)


def _copy_frames(items: Pictures, targets: Sequence[Array]) -> None:
    """Copy the planes of all frames, row by row."""
    for row, frame in enumerate(frame for item in items for frame in av_frames(item)):
        copy_frame(frame, targets, row)


def _convert_pictures(
    items: Pictures, storage: Storage | None, layout: Layout | None, *, single: bool
) -> CPUBuffer | tuple[CPUBuffer, ...]:
    _check_counts(items)
    _check_formats(items)
    first = items[0]
    front: Shape = () if single else (len(items),)
    if isinstance(first, VideoFrames):
        front = (*front, len(first))
    if layout == "planes":
        return _convert_planes(items, storage, front)
    plan = plan_of(av_frames(first)[0], layout, first.source)
    array = new_array((*front, *plan.shape), plan.dtype, storage)
    _copy_frames(items, plan.targets(array.reshape(-1, *plan.shape)))
    colorspace, color_range = colors_of(av_frames(first)[0])
    return CPUBuffer(array, colorspace=colorspace, color_range=color_range)


def _convert_planes(
    items: Pictures, storage: Storage | None, front: Shape
) -> tuple[CPUBuffer, ...]:
    views = picture_planes(av_frames(items[0])[0])
    sizes = [prod(front) * view.nbytes for view in views]
    # Each plane starts as aligned as the memory does.
    steps = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    memory = lease_memory(sum(steps[:-1]) + sizes[-1], storage)
    arrays, start = [], 0
    for view, size, step in zip(views, sizes, steps, strict=True):
        part = memory[start : start + size].view(view.dtype.newbyteorder("="))
        arrays.append(part.reshape(*front, *view.shape))
        start += step
    _copy_frames(
        items, [array.reshape(-1, *view.shape) for array, view in zip(arrays, views, strict=True)]
    )
    colorspace, color_range = colors_of(av_frames(items[0])[0])
    return tuple(
        CPUBuffer(array, colorspace=colorspace, color_range=color_range) for array in arrays
    )


def convert_array(
    values: npt.ArrayLike, storage: Storage | None = None, *, dtype: npt.DTypeLike | None = None
) -> CPUBuffer:
    """Copy labels, or an array of any kind of numbers, into a buffer.

    Args:
        values: Numbers, nested sequences of them, or an array.
        storage: Memory to fill; fresh memory without one.
        dtype: Type of the result; ``None``: the values' own, which for Python's numbers is int64 (uint64,
            where they need it), float64, complex128 or bool. Values are never cut: not floats to integers,
            nor numbers to a range that lacks them. Integers become floats only beside floats, or by
            ``dtype``; floats of fewer bits hold the nearest that they have.

    Returns:
        A buffer, a copy, of the values' shape and type.

    Raises:
        TypeError: The values are no numbers, or are of different lengths, or ``dtype`` would cut them, or
            they are a tensor that NumPy cannot take, or integers that neither int64 nor uint64 holds.
        StorageTooSmallError: The storage has too few bytes.

    Thread safety: safe.
    """
    try:
        source = as_numpy(values)
    except ValueError as error:  # ragged
        raise TypeError(f"the values do not make one array: {error}") from error
    if source.dtype == np.float64 and _starts_with_integer(values):
        source = _integers(values, source, dtype)
    wanted = source.dtype if dtype is None else np.dtype(dtype)
    for found in (source.dtype, wanted):
        _check_number(found, type(values))
    _check_not_cut(source, wanted)
    array = new_array(source.shape, wanted.newbyteorder("=").str, storage)
    array[...] = source
    return CPUBuffer(array)


def as_numpy(values: Any) -> Array:
    """What NumPy makes of values, or of an array or tensor without a copy.

    Raises:
        TypeError: It does not take such a tensor, for which PyTorch's word may be RuntimeError.
        ValueError: Their lengths differ.
    """
    try:
        return np.asarray(values)
    except (TypeError, RuntimeError) as error:
        raise TypeError(
            f"NumPy takes no such {type(values).__name__}: {error}. A tensor such as "
            "tensor.detach().cpu().float() is one that it takes"
        ) from error


def _starts_with_integer(values: Any) -> bool:
    while isinstance(values, list | tuple) and values:
        values = values[0]
    return bool(np.asarray(values).dtype.kind in "iu")


def _integers(values: Any, source: Array, dtype: npt.DTypeLike | None) -> Array:
    """The values themselves, where NumPy makes floats of integers: of some that need uint64 among others.

    Raises:
        TypeError: There are negative ones, too, and ``dtype`` does not ask for floats.
    """
    exact = np.asarray(values, dtype=object)
    if not all(isinstance(value, Integral) for value in exact.flat):
        return source
    least, largest = exact.min(), exact.max()
    if least >= 0:
        return exact.astype(np.uint64)
    if dtype is None or np.dtype(dtype).kind in "iu":
        raise TypeError(
            f"the values are integers from {least} to {largest}: neither int64 nor uint64 holds all of them. "
            "convert_array(dtype='float64') takes the nearest numbers"
        )
    return source


def _check_number(dtype: np.dtype[Any], owner: type) -> None:
    if dtype.kind not in NUMBER_KINDS:
        raise TypeError(f"a buffer holds numbers, not {dtype} of {owner.__name__}")


def _check_not_cut(source: Array, wanted: np.dtype[Any]) -> None:
    if not source.size or np.can_cast(source.dtype, wanted, "safe"):
        return
    reason = "round the values yourself, or leave dtype out"
    fits = np.can_cast(source.dtype, wanted, "same_kind")
    if source.dtype.kind in "iu" and wanted.kind in "iu":
        limits = np.iinfo(wanted)
        fits = source.min() >= limits.min and source.max() <= limits.max
        reason = f"it holds {limits.min} to {limits.max}, and the values are others"
    elif fits:
        largest = np.finfo(wanted).max
        finite = (
            1.0 * source[np.isfinite(source)]
        )  # the least integer has no absolute value of its type
        fits = not (np.abs(finite) > largest).any()
        reason = f"it holds {-largest:g} to {largest:g}, and the values are others"
    if not fits:
        raise TypeError(f"{source.dtype} values would be cut by dtype={wanted.name!r}: {reason}")


def stack_arrays(arrays: Sequence[Array], storage: Storage | None) -> CPUBuffer:
    """Copy arrays of one shape and type into a buffer, each once, with their number in front.

    Raises:
        TypeError: The arrays hold no numbers.
        StorageTooSmallError: The storage has too few bytes.
    """
    first = arrays[0]
    _check_number(first.dtype, type(first))
    native = first.dtype.newbyteorder("=").str
    result = new_array((len(arrays), *first.shape), native, storage)
    for position, array in enumerate(arrays):
        result[position] = array
    return CPUBuffer(result)
