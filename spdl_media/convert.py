"""Convert frames to one array; this is the only copy of pixels on the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import prod
from numbers import Integral
from typing import Any, Final, Literal, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from spdl_media._checks import as_numpy, check_choice, counted
from spdl_media.buffer import CPUBuffer
from spdl_media.errors import ConvertError
from spdl_media.formats import SAMPLE_DTYPES, Array, Shape, plane_views
from spdl_media.frames import AudioFrames, Frames, silence_of
from spdl_media.image_frames import ImageFrames, VideoFrames, av_frames, frame_metadata
from spdl_media.packets import VideoPackets
from spdl_media.rows import ArrayLayout, RowOptions, RowPlan
from spdl_media.storage import ALIGNMENT, Storage, lease_memory, new_array
from spdl_media.timing import Window

__all__ = ("convert_array", "convert_frames")

Layout: TypeAlias = ArrayLayout | Literal["planes"]

NUMBER_KINDS: Final = "biufc"
"""NumPy's ``dtype.kind`` letters of the dtypes that a buffer may have."""

# A tuple, because isinstance with A | B would make the union at each call.
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
    """Copy decoded frames into one contiguous array. Each plane is copied once.

    Args:
        frames: ``ImageFrames``, ``VideoFrames``, ``AudioFrames``, or a sequence of one of these kinds.
            They stay usable. All must have the same size (also number of frames or samples) and format, and
            YUV images the same matrix and range.
        storage: Memory for the result; ``None``: fresh memory.
        layout: Order of the axes for RGB and gray, ``"NCHW"`` or ``"NHWC"``; the default is that of the
            format. ``"planes"`` for one array per plane, which works for every format.
        pad: Whether to pad shorter audio with silence at its end, to the longest of the sequence.

    Returns:
        A new buffer with the shape and dtype in the table of :mod:`spdl_media.formats`. An ``rgb24`` image is
        ``(H, W, 3)`` uint8, values 0 to 255. ``VideoFrames`` have a first axis N. Audio is ``(C, N)`` for
        planar and ``(N, C)`` for packed formats. A sequence adds a first axis B. With ``layout="planes"``, a
        tuple of such buffers, one per plane, which share one block of memory.

    Raises:
        ConvertError: Frames differ (the message names both), there are none (it names the window), they have
            no pixels, or their format has no array (it names a remedy).
        StorageTooSmallError: The storage has too few bytes. The message states both sizes.
        TypeError: ``frames`` are not frames.
        ValueError: ``layout`` is invalid, or is given for audio; or ``pad`` is given for images.

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
        return _convert_audio(items, storage, single=single, pad=pad)
    if pad:
        raise ValueError("pad= is for audio; frames of different sizes are scaled by a filter")
    return _convert_pictures(items, storage, layout, single=single)


def _items(frames: Frames | Sequence[Frames]) -> tuple[list[Any], bool]:
    """Return the frames as a list of items of one kind, and whether the argument was a single item."""
    if isinstance(frames, _KINDS):
        return [frames], True
    items: list[Any] = list(frames) if isinstance(frames, Iterable) else [frames]
    if not items:
        raise ConvertError("there are no frames to convert: the sequence is empty")
    kind = type(items[0])
    # Check every item: one of another kind would fail later, with an unclear error.
    for position, item in enumerate(items):
        if not isinstance(item, _KINDS):
            raise TypeError(
                "convert_frames takes ImageFrames, VideoFrames, AudioFrames or a sequence of one of them, "
                f"but item {position} is {type(item).__name__}. decode_packets makes frames"
            )
        if type(item) is not kind:
            raise ConvertError(
                f"item 0 is {kind.__name__}, but item {position} is {type(item).__name__}; one array holds "
                "one kind"
            )
    return items, False


def _convert_pictures(
    items: list[Any], storage: Storage | None, layout: Layout | None, *, single: bool
) -> CPUBuffer | tuple[CPUBuffer, ...]:
    first = items[0]
    # A single item has no axis B, and an image has no axis N.
    front: Shape = () if single else (len(items),)
    if isinstance(first, VideoFrames):
        _check_counts(items)
        front = (*front, len(first))
    frames = [frame for item in items for frame in av_frames(item)]
    # Equal for all items; _check_counts has refused others.
    per_item = len(frames) // len(items)

    def name(row: int, source: str) -> str:
        position, index = divmod(row, per_item)
        part = f"frame {index} of " if isinstance(first, VideoFrames) else ""
        return f"{part}item {position} ({source})"

    options = None if layout == "planes" else RowOptions(layout=layout)
    plan = RowPlan(frames[0], 0, first.source, options, name)
    for row, frame in enumerate(frames):
        # Check all before memory is allocated, so that an error does not use up a block of the storage.
        plan.check(frame, row, items[row // per_item].source)
    if layout == "planes":
        arrays = _plane_arrays(frames[0], front, storage)
        targets = [array.reshape(-1, *array.shape[len(front) :]) for array in arrays]
    else:
        arrays = [new_array((*front, *plan.shape), plan.dtype, storage)]
        targets = plan.places(arrays[0].reshape(-1, *plan.shape))
    for row, frame in enumerate(frames):
        plan.copy(frame, targets, row)
    buffers = tuple(map(plan.buffer, arrays))
    return buffers if layout == "planes" else buffers[0]


def _check_counts(items: Sequence[VideoFrames]) -> None:
    """Raise for videos of unequal length, and for those without frames."""
    first = items[0]
    for position, item in enumerate(items):
        # Test for empty videos first: the error about the window is clearer than one about lengths.
        if not len(item):
            raise no_frames(item)
        if len(item) != len(first):
            raise ConvertError(
                f"item 0 ({first.source}) has {len(first)} frames, but item {position} ({item.source}) has "
                f"{len(item)}. decode_packets(num_frames=) and tpad in the filter make them equal"
            )


def _plane_arrays(frame: Any, front: Shape, storage: Storage | None) -> list[Array]:
    """Allocate one array per plane of an FFmpeg frame, with the axes ``front``, in one block of memory."""
    views = plane_views(frame)
    sizes = [prod(front) * view.nbytes for view in views]
    # Each plane starts at a multiple of ALIGNMENT, as the block does.
    starts = [0, *accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes[:-1])]
    memory = lease_memory(starts[-1] + sizes[-1], storage)
    return [
        # Formats of the other byte order are converted to the native one.
        memory[start : start + size].view(view.dtype.newbyteorder("=")).reshape(*front, *view.shape)
        for view, start, size in zip(views, starts, sizes, strict=True)
    ]


def _convert_audio(
    items: list[AudioFrames], storage: Storage | None, *, single: bool, pad: bool
) -> CPUBuffer:
    # Before memory is allocated, so that an error does not use up a block of the storage.
    _check_audio(items, pad=pad)
    first = items[0]
    # FFmpeg's names of planar formats end in "p".
    planar = first.sample_fmt.endswith("p")
    dtype = SAMPLE_DTYPES[first.sample_fmt.removesuffix("p")]
    length = max(map(len, items))
    one = (first.num_channels, length) if planar else (length, first.num_channels)
    array = new_array(one if single else (len(items), *one), dtype, storage)
    for part, item in zip(array.reshape(len(items), *one), items, strict=True):
        # View the array with samples along the first axis, also in planar formats.
        _copy_samples(part.T if planar else part, item)
    return CPUBuffer(array, sample_rate=first.sample_rate)


def _copy_samples(target: Array, frames: AudioFrames) -> None:
    start = 0
    for chunk in frames.chunks:
        stop = start + len(chunk)
        planes = chunk.planes
        # Packed samples are one 2-D array, planar ones a 1-D array per channel.
        if planes[0].ndim == 2:
            target[start:stop] = planes[0]
        else:
            for channel, samples in enumerate(planes):
                target[start:stop, channel] = samples
        start = stop
    # Not simply zeros: silence of unsigned samples is the middle of their range.
    target[start:] = silence_of(frames.sample_fmt)


def _check_audio(items: list[AudioFrames], *, pad: bool) -> None:
    """Raise for audio that differs in format or, without ``pad``, in length, or that has no samples."""
    expected = None
    for position, item in enumerate(items):
        if not len(item):
            raise no_samples(frame_metadata(item).window, item.source)
        # Check every chunk: the format may change within a stream.
        for chunk in item.chunks:
            frame = chunk.frame
            found = frame.layout.nb_channels, frame.format.name, frame.sample_rate
            expected = expected or found
            if found != expected:
                first, other = _describe(expected), _describe(found)
                what = f"item 0 ({items[0].source}) is {first}, but item {position} ({item.source}) {other}"
                if not position:
                    what = f"{item.source} changes from {first} to {other}"
                remedy = "get_audio_filter_desc(sample_rate=, num_channels=, sample_fmt=)"
                raise ConvertError(f"{what}. One array holds one format: {remedy} converts")
    lengths = {*map(len, items)}
    if len(lengths) > 1 and not pad:
        raise ConvertError(
            f"the items have {min(lengths)} to {max(lengths)} samples. convert_frames(..., pad=True) "
            "fills with silence to the longest; timestamp= and num_samples= cut"
        )


def no_frames(frames: VideoFrames | VideoPackets) -> ConvertError:
    """Make the error for a window without frames."""
    window = frames.window if isinstance(frames, VideoPackets) else frame_metadata(frames).window
    return ConvertError(f"there is no frame in {window.name}", source=frames.source)


def no_samples(window: Window, source: str) -> ConvertError:
    """Return the error for a window that contains no sample."""
    return ConvertError(f"there is no sample in {window.name}", source=source)


def _describe(format: tuple[int, str, int]) -> str:
    return f"{counted(format[0], 'channel')} {format[1]} at {format[2]} Hz"


def convert_array(
    values: npt.ArrayLike, storage: Storage | None = None, *, dtype: npt.DTypeLike | None = None
) -> CPUBuffer:
    """Copy labels, or an array of any kind of numbers, into a buffer.

    Args:
        values: Numbers, nested sequences of them, or an array.
        storage: Memory for the result; ``None``: fresh memory.
        dtype: Dtype of the result. ``None``: that of the values; for Python's numbers int64 (uint64, if they
            need it), float64, complex128 or bool. Values are never truncated: floats do not become integers,
            and numbers outside of the dtype's range are an error. Integers become floats only next to floats,
            or by ``dtype``. In a smaller float dtype, values are rounded to the nearest.

    Returns:
        A new buffer with the shape of the values.

    Raises:
        TypeError: The values are not numbers, the sequences have different lengths, ``dtype`` would truncate
            values, NumPy cannot view a tensor, or neither int64 nor uint64 holds all integers.
        StorageTooSmallError: The storage has too few bytes.

    Thread safety: safe.
    """
    try:
        source = as_numpy(values)
    except ValueError as error:  # sequences of different lengths
        raise TypeError(f"the values do not make one array: {error}") from error
    # NumPy makes float64 of mixed int64 and uint64 numbers, too. Only the first value is tested, because
    # testing all would take longer than the copy.
    if source.dtype == np.float64 and source.size and _first(values).dtype.kind in "iu":
        source = _integers(values, source, dtype)
    wanted = source.dtype if dtype is None else np.dtype(dtype)
    for found in (source.dtype, wanted):
        _check_number(found, source)
    _check_not_cut(source, wanted)
    array = new_array(source.shape, wanted.newbyteorder("=").str, storage)
    array[...] = source
    return CPUBuffer(array)


def _first(values: Any) -> Array:
    while isinstance(values, list | tuple):
        values = values[0]
    return np.asarray(values)


def _integers(values: Any, source: Array, dtype: npt.DTypeLike | None) -> Array:
    """Return integers as uint64 that NumPy has converted to floats because some of them need uint64.

    Other values are returned as they are in ``source``.

    Raises:
        TypeError: Some integers are negative, and ``dtype`` is not one of floats.
    """
    # As Python objects, because float64 loses digits of integers above 2**53.
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


def _check_number(dtype: np.dtype[Any], values: Array) -> None:
    if dtype.kind not in NUMBER_KINDS:
        example = f" such as {values.flat[0]!r}" if values.size else ""
        raise TypeError(
            f"a buffer holds numbers, not {dtype}{example}; convert them to a numeric type of NumPy"
        )


def _check_not_cut(source: Array, wanted: np.dtype[Any]) -> None:
    if not source.size or np.can_cast(source.dtype, wanted, "safe"):
        return
    if source.dtype.kind in "iu" and wanted.kind in "iu":
        # Compare the values, not the ranges of the dtypes.
        limits = np.iinfo(wanted)
        fits = source.min() >= limits.min and source.max() <= limits.max
    elif fits := np.can_cast(source.dtype, wanted, "same_kind"):
        with np.errstate(over="ignore"):
            # Floats may be rounded, but not to infinity.
            fits = not (np.isinf(source.astype(wanted)) & np.isfinite(source)).any()
    if not fits:
        raise TypeError(
            f"{source.dtype} values would be cut by dtype={wanted.name!r}: take a dtype that holds them, or "
            "round and clip them yourself"
        )


def stack_arrays(
    arrays: Sequence[Array], storage: Storage | None, axis: int | None = None
) -> CPUBuffer:
    """Stack arrays of one shape and dtype along a new first axis, in a buffer.

    Along ``axis`` their lengths may differ; shorter arrays are padded with zeros.

    Raises:
        TypeError: The arrays do not hold numbers.
        StorageTooSmallError: The storage has too few bytes.
    """
    first = arrays[0]
    _check_number(first.dtype, first)
    # In native byte order, because other libraries do not accept another one.
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
