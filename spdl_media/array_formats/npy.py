"""One array out of an npy file in memory."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from spdl_media.array_formats import _npy_header
from spdl_media.array_formats._content import Content, content_of, name_of
from spdl_media.array_formats._npy_header import HeaderError, Layout, text_of
from spdl_media.array_formats.errors import ArrayFormatError

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ("load_npy",)

# NumPy pads the head to a multiple of 64 bytes; of arrays of plain numbers it is almost always this long.
_COMMON_HEAD = 128
# What every NumPy has: 1.26 has no more, from 2.0 on there are 64.
_SURE_DIMENSIONS = 32
_LENGTH = {1: struct.Struct("<H"), 2: struct.Struct("<I"), 3: struct.Struct("<I")}


def load_npy(data: Buffer | np.ndarray[Any, Any], *, copy: bool = False) -> np.ndarray[Any, Any]:
    """Read an array as ``numpy.save`` writes it.

    Args:
        data: The file's content: bytes, any contiguous buffer, a 1-D uint8 array or CPU tensor. Bytes behind
            the array are ignored, as ``numpy.load`` does.
        copy: Give the array memory of its own.

    Returns:
        Array of the shape, dtype (byte order included) and memory order (C or Fortran) that the file says.
        A view of ``data``, read-only if ``data`` is; or, with ``copy``, a new and writable array. A view
        may be unaligned for its type if ``data`` is; NumPy takes that, other consumers may not.

    Raises:
        ArrayFormatError: Not an npy file, cut short, a header that cannot be read, or an array of Python
            objects, which is a pickle and never loaded. No memory is allocated for the data before the
            sizes are checked.
        TypeError: ``data`` is not memory (a path, for example).

    Thread safety: safe. A copy of more than 64 KiB is made without the GIL.

    See:
        https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
    """
    # One look-up instead of parsing: 0.6 us for the whole call, where reading the header takes 2 more.
    if type(data) is bytes and (layout := _layout_of_head(data[:_COMMON_HEAD])) is not None:
        shape, dtype, nbytes, order = layout
        if len(data) - _COMMON_HEAD >= nbytes:
            array = np.ndarray(shape, dtype, data, _COMMON_HEAD, None, order)
            return _copy(array, data, _COMMON_HEAD + nbytes) if copy else array
    content = content_of(data, "an npy file")
    array, stop = array_at(content, 0, len(content))
    return _copy(array, content, stop) if copy else array


def _copy(array: np.ndarray[Any, Any], content: Content, stop: int) -> np.ndarray[Any, Any]:
    """Copy an array that views the bytes up to ``stop``."""
    if not array.nbytes:
        # NumPy would give text of no characters one each, and headers may speak of any number of them.
        return np.ndarray(array.shape, array.dtype, bytearray())
    if array.dtype.kind not in "SUV":
        return array.copy("K")
    # NumPy copies bytes without the GIL, but text with it, and of records not what lies between the fields.
    own = np.ndarray((array.nbytes,), np.uint8, content, stop - array.nbytes).copy()
    return np.ndarray(array.shape, array.dtype, own, 0, array.strides)


def array_at(
    content: Content,
    start: int,
    stop: int,
    *,
    source: str | None = None,
    member: str | None = None,
    at: int | None = None,
) -> tuple[np.ndarray[Any, Any], int]:
    """View the array whose npy file begins at a byte and ends before another.

    Returns:
        The array, and the byte behind its last one.

    Raises:
        ArrayFormatError: As :func:`load_npy`, with these names. Its offset is ``at``, else ``start``.
    """
    try:
        layout, offset = _read_head(content, start, stop)
        if layout.nbytes > stop - offset:
            raise HeaderError(
                f"is cut short: shape {layout.shape} of {text_of(layout.dtype)} is {layout.nbytes} "
                f"bytes, and {stop - offset} follow the header"
            )
        array = _view(content, offset, layout)
    except HeaderError as error:
        raise ArrayFormatError(
            str(error),
            source=source or name_of(content),
            member=member,
            offset=start if at is None else at,
        ) from error.__cause__
    return array, offset + layout.nbytes


def _view(content: Content, offset: int, layout: Layout) -> np.ndarray[Any, Any]:
    shape, dtype, _, order = layout
    try:
        return np.ndarray(shape, dtype, content, offset, None, order)
    except (TypeError, ValueError) as error:  # more dimensions than this NumPy has
        raise HeaderError(
            f"NumPy has no array of shape {shape} and {text_of(dtype)}: {error}"
        ) from error


def _read_head(content: Content, start: int, stop: int) -> tuple[Layout, int]:
    """What the head says, and where the data begin."""
    head = bytes(content[start : min(start + _COMMON_HEAD, stop)])
    if (layout := _layout_of_head(head)) is not None:
        return layout, start + _COMMON_HEAD
    text_start, length, encoding = _parse_prefix(head)
    if length > stop - start - text_start:
        raise HeaderError(
            f"is cut short: the header has {length} bytes, and {stop - start - text_start} follow"
        )
    if length > _npy_header.MAX_HEADER_SIZE:
        raise HeaderError(
            f"the header has {length} bytes; more than {_npy_header.MAX_HEADER_SIZE} are not read"
        )
    offset = start + text_start + length
    try:
        text = str(content[start + text_start : offset], encoding)
    except UnicodeDecodeError as error:
        raise HeaderError(f"the header is not UTF-8: {error}") from error
    return _npy_header.parse_header(text), offset


def _parse_prefix(head: bytes) -> tuple[int, int, str]:
    """Where the text begins, its length and its encoding."""
    if not head.startswith(_npy_header.MAGIC):
        raise HeaderError(
            f"is not an npy file: it begins with {head[:6]!r}, not {_npy_header.MAGIC!r}"
        )
    if len(head) < 8:
        raise HeaderError(f"is cut short: {len(head)} bytes, less than the head")
    major, minor = head[6], head[7]
    if major not in _LENGTH or minor != 0:
        raise HeaderError(f"has version {major}.{minor} of the format; 1.0, 2.0 and 3.0 are read")
    field = _LENGTH[major]
    if len(head) < 8 + field.size:
        raise HeaderError(f"is cut short: {len(head)} bytes, less than the head")
    return 8 + field.size, field.unpack_from(head, 8)[0], "utf-8" if major == 3 else "latin-1"


@lru_cache(maxsize=1024)
def _layout_of_head(head: bytes) -> Layout | None:
    """The layout behind a head of exactly 128 bytes that is whole and right; ``None`` for all others.

    Types of records are left out, those in a type with a shape too: their names can be changed in place, and
    arrays would share them. So are more dimensions than every NumPy has, for which there may be no array.
    """
    try:
        text_start, length, encoding = _parse_prefix(head)
        if text_start + length != _COMMON_HEAD or len(head) < _COMMON_HEAD:
            return None
        layout = _npy_header.parse_header(str(head[text_start:], encoding))
    except (HeaderError, UnicodeDecodeError):
        return None
    num_dimensions = len(layout.shape) + layout.dtype.ndim
    if num_dimensions > _SURE_DIMENSIONS or layout.dtype.base.names is not None:
        return None
    return layout
