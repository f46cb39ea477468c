"""Collate a list of items into one batch, field by field."""

from __future__ import annotations

import numbers
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias, Unpack

import numpy as np

from spdl_media._checks import as_int, as_numpy
from spdl_media.arrays import Key, fields_of, rebuilt
from spdl_media.buffer import BufferMetadata, CPUBuffer
from spdl_media.convert import NUMBER_KINDS, convert_array, convert_frames, stack_arrays
from spdl_media.errors import ConvertError
from spdl_media.formats import Array
from spdl_media.frames import AudioFrames
from spdl_media.image_frames import ImageFrames, VideoFrames
from spdl_media.rows import FrameRows, RowOptions
from spdl_media.storage import Storage, StoragePool

__all__ = ("Padded", "collate")

ByField: TypeAlias = Mapping[Any, Any]


class Padded(NamedTuple):
    """Arrays of different lengths padded to one batch. Made by :func:`collate`.

    Attributes:
        data: The arrays, stacked along a new first axis B and padded with zeros (audio frames with silence)
            to the length of the longest.
        lengths: Length of each array before padding, ``(B,)`` int64.
    """

    data: CPUBuffer
    lengths: CPUBuffer


def collate(
    items: Sequence[Any], *, storage: Storage | ByField | None = None, pad: bool | ByField = False
) -> Any:
    """Collate items into one batch: the frames, numbers or arrays of each field become one buffer.

    Args:
        items: Tuples, lists, dictionaries or dataclasses of one structure, nested to any depth, or plain
            values. A value is frames, a number, an array (a NumPy array, or an object that NumPy can view,
            such as a CPU tensor or a buffer), or any other object.
        storage: Memory for the buffers. For plain values, one storage. For items with fields, a mapping from
            a field's name, key or index to its storage, or to another mapping if the field has fields
            itself. Fields that are left out get fresh memory.
        pad: ``True``: arrays may differ in length along their last axis, such as audio
            ``(channels, samples)`` or tokens ``(tokens,)``, and audio frames may differ in their number of
            samples. Each field of such values becomes a :class:`Padded`, even if all lengths are equal;
            zero-dimensional arrays do not. A mapping, as for ``storage``, gives the fields to pad and their
            axes: ``{"audio": -1, "mel": 0}``.

    Returns:
        An object of the same structure as an item (a dataclass is rebuilt without running its ``__init__``)
        with a :class:`~spdl_media.CPUBuffer` in place of each field. Frames are converted as by
        :func:`~spdl_media.convert_frames`. Numbers become ``(B,)`` with the dtype that
        :func:`~spdl_media.convert_array` chooses. Arrays keep their dtype and get B as first axis; a batch of
        buffers has the sample rate and colours that all of them have. A list of :class:`~spdl_media.Clip`
        becomes one clip of batches. All other values (strings and dates, NumPy's too, ``None``) become lists,
        unchanged.

    Raises:
        ConvertError: There are no items, their structure differs, a field has values of two kinds (such as
            numbers and ``None``), or the frames or arrays of a field differ in more than the length of the
            axis that ``pad`` gives.
        TypeError: ``items`` is not a sequence, no array dtype holds the numbers, an array does not hold
            numbers, NumPy cannot view a tensor, or a storage is neither a storage nor a pool.
        ValueError: ``storage`` or ``pad`` names a field that does not exist.

    Thread safety: safe.

    Example:
        >>> sm.collate([{"label": 3, "name": "cat"}, {"label": 5, "name": "dog"}])
        {'label': <CPUBuffer: (2,) int64>, 'name': ['cat', 'dog']}
        >>> sm.collate([np.ones(3, np.float32), np.ones(5, np.float32)], pad=True)
        Padded(data=<CPUBuffer: (2, 5) float32>, lengths=<CPUBuffer: (2,) int64>)
    """
    # Strings and mappings are iterable, but are not a batch.
    if isinstance(items, str | bytes | Mapping) or not isinstance(items, Iterable):
        raise TypeError(
            f"collate takes a sequence of items, not {type(items).__name__}; as the aggregator of a "
            "DataLoader it needs batch_size="
        )
    # A list, because an iterator is accepted as well and the items are iterated several times.
    values = list(items)
    if not values:
        raise ConvertError("there are no items to collate: the sequence is empty")
    return _collate(values, storage, pad, "")


def _collate(values: list[Any], storage: Any, axis: Any, where: str) -> Any:
    """Collate the values of all items at one place, such as ``['image']``; "" for the items themselves."""
    fields = fields_of(values[0])
    axis = None if axis is False else axis
    if fields is None:
        return _collate_values(values, storage, -1 if axis is True else axis, where)
    rows = []
    for position, value in enumerate(values):
        # The class must be the same, because the result is an object of the first item's class.
        row = fields_of(value) if type(value) is type(values[0]) else None
        if row is None or row.keys() != fields.keys():
            raise _structures_differ(values[0], value, position, where)
        rows.append(row)
    storages = _by_field("storage", storage, fields, where)
    axes = dict.fromkeys(fields, axis) if axis is True else _by_field("pad", axis, fields, where)
    collated = {
        # Without a storage, a field gets fresh memory.
        key: _collate(
            [row[key] for row in rows], storages.get(key), axes.get(key), f"{where}[{key!r}]"
        )
        for key in fields
    }
    return rebuilt(values[0], collated)


def _structures_differ(first: Any, value: Any, position: int, where: str) -> ConvertError:
    is_list = isinstance(first, list) and isinstance(value, list)
    remedy = ". Make it an array, as by np.array(tokens), and pass pad=True" if is_list else ""
    return ConvertError(
        f"the items differ in structure: items[0]{where} is {_describe(first)}, items[{position}]{where} "
        f"{_describe(value)}{remedy}"
    )


def _describe(value: Any) -> str:
    fields, name = fields_of(value), type(value).__name__
    if fields is None:
        return name
    # A list may have thousands of values, whose indices say nothing.
    is_named = isinstance(value, Mapping) or not isinstance(value, Sequence)
    return f"{name} of {list(fields) if is_named else len(fields)}"


def _by_field(name: str, given: Any, fields: dict[Key, Any], where: str) -> Mapping[Any, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        kind, example = ("storages", "pool") if name == "storage" else ("axes", -1)
        raise TypeError(
            f"item{where} has the fields {list(fields)}, so {name}= must map them to {kind}, such as "
            f"{{{next(iter(fields), 0)!r}: {example}}}, not {given!r}"
        )
    if unknown := [key for key in given if key not in fields]:
        raise ValueError(f"{name}= names {unknown}, but item{where} has the fields {list(fields)}")
    return given


def _collate_values(values: list[Any], storage: Any, axis: Any, where: str) -> Any:
    if axis is not None and as_int(axis) is None:
        raise TypeError(
            f"item{where} has no fields, so pad= must be a bool or an axis, not {axis!r}"
        )
    if storage is not None and not isinstance(storage, StoragePool):
        raise TypeError(f"item{where} takes a CPUStorage or a StoragePool, not {storage!r}")
    first = values[0]
    kind = _kind_of(first)
    # Check the first value of each type only: most fields have values of one type.
    firsts = {type(value): position for position, value in reversed([*enumerate(values)])}
    for position in sorted(firsts.values()):
        value = values[position]
        if fields_of(value) is not None:
            raise _structures_differ(first, value, position, where)
        if _kind_of(value) != kind:
            raise ConvertError(
                f"items[0]{where} is {type(first).__name__}, items[{position}]{where} "
                f"{type(value).__name__}; one field holds one kind"
            )
    if kind is not None:
        try:
            return _convert(kind, values, storage, axis, where)
        except TypeError as error:  # add the name of the field
            raise TypeError(f"item{where}: {error}") from error
    if storage is not None:
        raise ValueError(
            f"item{where} is {type(first).__name__}, which stays a list and needs no storage"
        )
    return values


def _kind_of(value: Any) -> str | None:
    """Return how a value is collated: "frames", "numbers", "arrays", or ``None`` for a plain list."""
    if isinstance(value, AudioFrames | VideoFrames | ImageFrames):
        return "frames"
    # NumPy scalars are tested before arrays, because they have the array interface. The dtype decides:
    # strings are NumPy scalars too, and so is timedelta64, which `numbers` takes for an integer.
    if isinstance(value, np.generic):
        return "numbers" if value.dtype.kind in NUMBER_KINDS else None
    if isinstance(value, numbers.Number):
        return "numbers"
    is_array = hasattr(value, "__array__") or hasattr(value, "__array_interface__")
    return "arrays" if is_array else None


def _convert(
    kind: str, values: list[Any], storage: Storage | None, axis: int | None, where: str
) -> CPUBuffer | Padded:
    if kind == "frames":
        if axis is None or not isinstance(values[0], AudioFrames):
            return convert_frames(values, storage)
        lengths = convert_array([len(value) for value in values])
        return Padded(convert_frames(values, storage, pad=True), lengths)
    if kind == "numbers":
        return convert_array(values, storage)
    if axis is None and (buffer := _collate_images(values, storage)) is not None:
        return buffer
    arrays = [as_numpy(value) for value in values]
    first = arrays[0]
    if axis == -1 and not first.ndim:
        axis = None  # pad=True applies to all fields, and labels may be zero-dimensional tensors
    if axis is not None and not -first.ndim <= axis < first.ndim:
        raise ConvertError(f"item{where} has shape {first.shape}, without the axis {axis} of pad=")
    along = None if axis is None else axis % first.ndim
    common = _shape_except(first, along)
    for position, array in enumerate(arrays):
        if _shape_except(array, along) != common:
            rule = "one buffer holds one shape and type"
            if axis is None and array.dtype == first.dtype:
                rule += (
                    ". Load images with one width= and height=, audio with one num_channels= and "
                    "num_samples=; or pad arrays along one axis: collate(items, pad=True)"
                )
            raise ConvertError(
                f"items[0]{where} has shape {first.shape} and type {first.dtype}, items[{position}]{where} "
                f"{array.shape} and {array.dtype}; {rule}"
            )
    data = stack_arrays(arrays, storage, axis)
    _share_metadata(values, data)
    if axis is None:
        return data
    return Padded(data, convert_array([array.shape[axis] for array in arrays]))


def _share_metadata(values: list[Any], batch: CPUBuffer) -> None:
    """Give a batch of buffers the metadata that is equal in all of them."""
    if all(isinstance(value, CPUBuffer) for value in values):
        for name in ("colorspace", "color_range", "sample_rate"):
            found = {getattr(value, name) for value in values}
            setattr(batch, name, found.pop() if len(found) == 1 else None)


def _shape_except(array: Array, axis: int | None) -> tuple[Any, ...]:
    """Return dtype and shape without the length along ``axis``; equal for all arrays of one buffer."""
    shape = array.shape
    return array.dtype, len(shape), shape if axis is None else shape[:axis] + shape[axis + 1 :]


class ImageBuffer(CPUBuffer):
    """A buffer of a decoded image whose array is made at first access.

    :func:`collate` does not access the array, but writes the image directly into its row of the batch. So
    the normalised floats are written once, and until then the image takes a quarter of their size, as uint8.

    Thread safety: safe.
    """

    __slots__ = ("_frame", "_lock", "_options", "_source")

    def __init__(
        self, frame: Any, source: str, options: RowOptions, **metadata: Unpack[BufferMetadata]
    ) -> None:
        # A placeholder for the array; None would mean a released buffer.
        super().__init__((), **metadata)
        # An FFmpeg frame; None after the array was made.
        self._frame: Any = frame
        self._source, self._options = source, options
        self._lock = threading.Lock()

    def _alive(self) -> Any:
        with self._lock:
            if self._frame is not None:
                rows = FrameRows(1, self._options)
                rows.put([0], self._frame, self._source)
                self._array, self._frame = rows.take().array[0], None
        return super()._alive()

    def __reduce__(self) -> tuple[Any, ...]:
        # FFmpeg's planes cannot be pickled, so the copy gets the array.
        return partial(CPUBuffer, self.array, **self.metadata), ()

    def release(self) -> None:
        """Release the memory, as :meth:`CPUBuffer.release` does."""
        with self._lock:
            self._frame = None
            super().release()


def _collate_images(buffers: Sequence[Any], storage: Storage | None) -> CPUBuffer | None:
    """Write images of :class:`ImageBuffer` directly into the rows of one buffer.

    Returns:
        The buffer; ``None`` if a buffer is no :class:`ImageBuffer` or has made its array already, or if the
        images differ in size, format or options.
    """
    images = [(one, one._frame) for one in buffers if type(one) is ImageBuffer]
    # one._frame is read only once: another thread may make the array and clear it meanwhile.
    pending = [(one, frame) for one, frame in images if frame is not None]
    kinds = {
        (frame.width, frame.height, frame.format.name, one._options.layout, one._options.values)
        for one, frame in pending
    }
    if len(pending) < len(buffers) or len(kinds) != 1:
        return None
    rows = FrameRows(len(buffers), replace(buffers[0]._options, storage=storage))
    for row, (one, frame) in enumerate(pending):
        rows.put([row], frame, one._source)
    buffer: CPUBuffer = rows.take()
    if buffers[0].boxes is not None:
        buffer.boxes = tuple(box for one in buffers for box in one.boxes)
        buffer.flips = tuple(flip for one in buffers for flip in one.flips)
    return buffer
