"""Frames into one array: the one copy on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from numbers import Integral
from typing import Any, Final, Literal, TypeAlias, cast, overload

import numpy as np
import numpy.typing as npt

from spdl_media._checks import check_choice
from spdl_media.buffer import CPUBuffer
from spdl_media.errors import ConvertError
from spdl_media.formats import SAMPLE_DTYPES, Array, Shape, plane_views
from spdl_media.frames import AudioFrames, Frames, silence_of
from spdl_media.image_frames import ImageFrames, VideoFrames, av_frames, frame_metadata
from spdl_media.row_plan import (
    ArrayLayout,
    RowOptions,
    RowPlan,
)
from spdl_media.rows import no_frames
from spdl_media.storage import ALIGNMENT, Storage, lease_memory, new_array
from spdl_media.timing import Window

__all__ = ("convert_array", "convert_frames")

Layout: TypeAlias = ArrayLayout | Literal["planes"]
Pictures: TypeAlias = Sequence[VideoFrames | ImageFrames]

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
            images one matrix and range.
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
        ValueError: ``layout`` is none of the above or given for audio, or ``pad`` for images.

    Thread safety: safe.
    """
    check_choice("layout", layout, ("NCHW", "NHWC", "planes", None))
    items, single = _items(frames)
    if isinstance(items[0], AudioFrames):
        if layout is not None:
            raise ValueError(
                f"layout={layout!r} is for images; audio is (C, N) in planar and (N, C) in packed formats, "
                "which get_audio_filter_desc(sample_fmt=) chooses"
            )
        return _convert_audio(cast("list[AudioFrames]", items), storage, single=single, pad=pad)
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
    # One of another kind may stand anywhere, and would fail late and unclearly.
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


def _convert_pictures(
    items: Pictures, storage: Storage | None, layout: Layout | None, *, single: bool
) -> CPUBuffer | tuple[CPUBuffer, ...]:
    first = items[0]
    # A single item has no axis B, and an image has no axis N.
    front: Shape = () if single else (len(items),)
    if isinstance(first, VideoFrames):
        _check_counts(cast("Sequence[VideoFrames]", items))
        front = (*front, len(first))
    frames = [frame for item in items for frame in av_frames(item)]
    # All items have as many: _check_counts refuses others.
    per_item = len(frames) // len(items)

    def name(row: int, source: str) -> str:
        position, index = divmod(row, per_item)
        part = f"frame {index} of " if isinstance(first, VideoFrames) else ""
        return f"{part}item {position} ({source})"

    options = None if layout == "planes" else RowOptions(layout=layout)
    plan = RowPlan(frames[0], 0, first.source, options, name)
    for row, frame in enumerate(frames):
        # All are checked before memory is taken, so that an error costs no block of the storage.
        plan.check(frame, row, items[row // per_item].source)
    if layout == "planes":
        arrays = _plane_arrays(frames[0], front, storage)
        places = [array.reshape(-1, *array.shape[len(front) :]) for array in arrays]
    else:
        arrays = [new_array((*front, *plan.shape), plan.dtype, storage)]
        places = plan.places(arrays[0].reshape(-1, *plan.shape))
    for row, frame in enumerate(frames):
        plan.copy(frame, places, row)
    buffers = tuple(map(plan.buffer, arrays))
    return buffers if layout == "planes" else buffers[0]


def _check_counts(items: Sequence[VideoFrames]) -> None:
    """Refuse videos of unequal length, and those without frames."""
    first = items[0]
    for position, item in enumerate(items):
        # Empty ones first: the window explains more than the difference in length.
        if not len(item):
            raise no_frames(item)
        if len(item) != len(first):
            raise ConvertError(
                f"item 0 ({first.source}) has {len(first)} frames, but item {position} ({item.source}) has "
                f"{len(item)}. decode_packets(num_frames=) and tpad in the filter make them equal"
            )


def _plane_arrays(frame: Any, front: Shape, storage: Storage | None) -> list[Array]:
    """An array for each plane of frames like this one of FFmpeg's, over one piece of memory."""
    views = plane_views(frame)
    sizes = [prod(front) * view.nbytes for view in views]
    # Each plane starts as aligned as the memory does.
    starts = [0, *accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes[:-1])]
    memory = lease_memory(starts[-1] + sizes[-1], storage)
    return [
        # Formats of the other byte order come out in the machine's own.
        memory[start : start + size].view(view.dtype.newbyteorder("=")).reshape(*front, *view.shape)
        for view, start, size in zip(views, starts, sizes, strict=True)
    ]


def _convert_audio(
    items: list[AudioFrames], storage: Storage | None, *, single: bool, pad: bool
) -> CPUBuffer:
    # Before memory is taken, so that an error costs no block of the storage.
    _check_audio(items, pad=pad)
    first = items[0]
    # FFmpeg marks planar formats by a final p.
    planar = first.sample_fmt.endswith("p")
    dtype = SAMPLE_DTYPES[first.sample_fmt.removesuffix("p")]
    length = max(map(len, items))
    one = (first.num_channels, length) if planar else (length, first.num_channels)
    array = new_array(one if single else (len(items), *one), dtype, storage)
    for part, item in zip(array.reshape(len(items), *one), items, strict=True):
        # Samples along the first axis, whichever way the array has them.
        _copy_samples(part.T if planar else part, item)
    return CPUBuffer(array)


def _copy_samples(target: Array, frames: AudioFrames) -> None:
    start = 0
    for chunk in frames.chunks:
        stop = start + len(chunk)
        planes = chunk.planes
        # Packed samples are one array, planar ones an array for each channel.
        if planes[0].ndim == 2:
            target[start:stop] = planes[0]
        else:
            for channel, samples in enumerate(planes):
                target[start:stop, channel] = samples
        start = stop
    # Not zeros: unsigned samples are silent in the middle of their range.
    target[start:] = silence_of(frames.sample_fmt)


def _check_audio(items: list[AudioFrames], *, pad: bool) -> None:
    """Refuse audio that differs in format or, without ``pad``, in length, and audio without samples."""
    expected = None
    for position, item in enumerate(items):
        if not len(item):
            raise no_samples(frame_metadata(item).window, item.source)
        # A stream may change in its middle.
        for chunk in item.chunks:
            frame = chunk.frame
            found = frame.layout.nb_channels, frame.format.name, frame.sample_rate
            expected = expected or found
            if found != expected:
                raise ConvertError(
                    f"item 0 ({items[0].source}) is {_sound(expected)}, but item {position} "
                    f"({item.source}) is {_sound(found)}. One array holds one format: "
                    "get_audio_filter_desc(sample_rate=, num_channels=, sample_fmt=) converts"
                )
    lengths = [len(item) for item in items]
    if len(set(lengths)) > 1 and not pad:
        raise ConvertError(
            f"the items have different lengths: {_some(lengths)} samples. convert_frames(..., pad=True) "
            "fills with silence to the longest; timestamp= and num_samples= cut"
        )


def no_samples(window: Window, source: str) -> ConvertError:
    """The error for audio of which nothing lies in its window."""
    return ConvertError(f"there is no sample in the window {window}", source=source)


def _sound(format: tuple[int, str, int]) -> str:
    return f"{format[0]} channels {format[1]} at {format[2]} Hz"


def _some(lengths: list[int]) -> str:
    """At most eight of them, and the span of the rest."""
    shown = ", ".join(map(str, lengths[:8]))
    if len(lengths) <= 8:
        return shown
    return f"{shown}, ... ({len(lengths)} items of {min(lengths)} to {max(lengths)})"


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
    # A list of floats is told by its first: to look at each would take longer than the copy.
    if source.dtype == np.float64 and source.size and _first(values).dtype.kind in "iu":
        source = _integers(values, source, dtype)
    wanted = source.dtype if dtype is None else np.dtype(dtype)
    for found in (source.dtype, wanted):
        _check_number(found, type(values))
    _check_not_cut(source, wanted)
    array = new_array(source.shape, wanted.newbyteorder("=").str, storage)
    array[...] = source
    return CPUBuffer(array)


def as_numpy(values: Any) -> Array:
    """Make a NumPy array of values, or of an array or tensor without a copy.

    Raises:
        TypeError: It does not take such a tensor, for which PyTorch's word may be RuntimeError.
        ValueError: Their lengths differ.
    """
    try:
        return np.asarray(values)
    # PyTorch raises TypeError for a tensor on a GPU, RuntimeError for one that requires gradients.
    except (TypeError, RuntimeError) as error:
        raise TypeError(
            f"NumPy takes no such {type(values).__name__}: {error}. A tensor such as "
            "tensor.detach().cpu().float() is one that it takes"
        ) from error


def _first(values: Any) -> Array:
    while isinstance(values, list | tuple):
        values = values[0]
    return np.asarray(values)


def _integers(values: Any, source: Array, dtype: npt.DTypeLike | None) -> Array:
    """The values themselves, where NumPy makes floats of integers: of some that need uint64 among others.

    Raises:
        TypeError: There are negative ones, too, and ``dtype`` does not ask for floats.
    """
    # Objects, because float64 has lost digits of integers above 2**53.
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
        # By the values that are there, not by all that their type could hold.
        limits = np.iinfo(wanted)
        fits = source.min() >= limits.min and source.max() <= limits.max
        reason = f"it holds {limits.min} to {limits.max}, and the values are others"
    elif fits:
        largest = np.finfo(wanted).max
        # As floats: the least integer has no absolute value of its type.
        fits = not (np.abs(1.0 * source[np.isfinite(source)]) > largest).any()
        reason = f"it holds {-largest:g} to {largest:g}, and the values are others"
    if not fits:
        raise TypeError(f"{source.dtype} values would be cut by dtype={wanted.name!r}: {reason}")


def stack_arrays(
    arrays: Sequence[Array], storage: Storage | None, axis: int | None = None
) -> CPUBuffer:
    """Copy arrays of one shape and type into a buffer, each once, with their number in front.

    Along ``axis`` they may differ, and are filled up with zeros to the longest.

    Raises:
        TypeError: The arrays hold no numbers.
        StorageTooSmallError: The storage has too few bytes.
    """
    first = arrays[0]
    _check_number(first.dtype, type(first))
    # Other libraries take no arrays of the other byte order.
    native = first.dtype.newbyteorder("=").str
    shape = list(first.shape)
    if axis is not None:
        shape[axis] = max(array.shape[axis] for array in arrays)
    result = new_array((len(arrays), *shape), native, storage)
    for position, array in enumerate(arrays):
        if axis is None:
            result[position] = array
        else:
            rows, found = np.moveaxis(result[position], axis, 0), array.shape[axis]
            rows[:found], rows[found:] = np.moveaxis(array, axis, 0), 0
    return CPUBuffer(result)
