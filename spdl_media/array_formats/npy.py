"""One array out of an npy file in memory.

Headers as NumPy writes them for plain types are read by one pattern, in a twentieth of the time that
``numpy.lib.format`` takes for them. All others are literals of Python, and go through NumPy's own function
from the text of a type to the type.
"""

from __future__ import annotations

import ast
import math
import re
import struct
from functools import lru_cache
from reprlib import repr as short
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from spdl_media.errors import ArrayFormatError
from spdl_media.readers import Content, content_of, name_of

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ("load_npy",)

_MAGIC = b"\x93NUMPY"
# The length of the header's text, by the version of the format.
_LENGTHS = {1: struct.Struct("<H"), 2: struct.Struct("<I"), 3: struct.Struct("<I")}
# NumPy itself reads no header above 10,000 bytes unless told to; descriptions of records can be longer.
_MAX_HEADER_SIZE = 1 << 20
# Before they are multiplied: the product of many thousand sides takes seconds.
_MAX_DIMENSIONS = 64

# NumPy pads heads of plain types to 128 bytes; before 1.14 they had 80.
_USUAL_SIZE = 128
_USUAL = re.compile(
    rb"\x93NUMPY\x01\0(?P<length>..)"
    rb"\{'descr': '(?P<descr>[<>|][biufcSUV][0-9]{1,9}|\|b1|[<>][mM]8(?:\[(?:[1-9][0-9]*)?[a-zA-Z]+\])?)', "
    rb"'fortran_order': (?P<fortran>True|False), "
    rb"'shape': \((?P<shape>|[0-9]+,|[0-9]+(?:, [0-9]+)+)\), \} *\n",
    re.DOTALL,
)
# NumPy divides by the numbers in a unit of time, and those that it writes are never 0: of [s/0] it ends the
# process at once, of [0s] when the array is converted.
_OTHER_TIME = re.compile(r"(?:[mM]8|(?:datetime|timedelta)64)\[(?!(?:[1-9][0-9]*)?[^\W\d_]+\])")
# Python 2 wrote whole numbers as 2L.
_PYTHON_2_NUMBER = re.compile(r"\b([0-9]+)L(?=[,)])")


class _Layout(NamedTuple):
    """Layout of the data by the header, and the header's own size."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    order: Literal["C", "F"]
    head_size: int
    nbytes: int


def _layout(
    shape: tuple[int, ...], dtype: np.dtype[Any], order: Literal["C", "F"], head_size: int
) -> _Layout:
    return _Layout(shape, dtype, order, head_size, math.prod(shape) * dtype.itemsize)


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
    content = data if type(data) is bytes else content_of(data, "an npy file")
    try:
        layout, offset = _read_head(content, 0, len(content))
        if not copy:
            return _view(content, offset, layout)
        # NumPy copies bytes without the GIL, but text with it, and of records not the gaps.
        own = np.ndarray((layout.nbytes,), np.uint8, content, offset).copy()
        return _view(own, 0, layout)
    except ArrayFormatError as error:
        error.source, error.offset = name_of(content), 0
        raise


def array_at(content: Content, start: int, stop: int) -> tuple[np.ndarray[Any, Any], int]:
    """View the array whose npy file begins at a byte and ends before another.

    Returns:
        The array, and the byte behind its last one.

    Raises:
        ArrayFormatError: As :func:`load_npy`, without the name of the source.
    """
    layout, offset = _read_head(content, start, stop)
    return _view(content, offset, layout), offset + layout.nbytes


def _view(content: Any, offset: int, layout: _Layout) -> np.ndarray[Any, Any]:
    shape, dtype, order, _, _ = layout
    try:
        return np.ndarray(shape, dtype, content, offset, None, order)
    except (
        TypeError,
        ValueError,
    ) as error:  # more dimensions, or more bytes, than this NumPy can count
        raise ArrayFormatError(
            f"NumPy has no array of shape {shape} and {text_of(dtype)}: {error}"
        ) from error


def _read_head(content: Content, start: int, stop: int) -> tuple[_Layout, int]:
    """Read the header; return the layout and where the data begin."""
    head = bytes(content[start : start + _USUAL_SIZE])
    layout = _usual_layout(head) or _unusual_layout(content, start, stop)
    offset = start + layout.head_size
    if layout.nbytes > stop - offset:
        raise ArrayFormatError(
            f"is cut short: shape {layout.shape} of {text_of(layout.dtype)} is {layout.nbytes} "
            f"bytes, and {stop - offset} follow the header"
        )
    return layout, offset


# The files of a data set share few heads: a look-up takes 0.1 us, where the pattern takes 2.
@lru_cache(maxsize=1024)
def _usual_layout(head: bytes) -> _Layout | None:
    """The layout behind a head that NumPy has written for a plain type; ``None`` for all others.

    Types of records are not among these: their names can be changed in place, and arrays would share them.
    """
    match = _USUAL.match(head)
    if match is None or match.end() != 10 + int.from_bytes(match["length"], "little"):
        return None
    try:
        dtype = np.dtype(match["descr"].decode())
        shape = tuple(map(int, match["shape"].replace(b",", b" ").split()))
    except (TypeError, ValueError):
        return None
    return _layout(shape, dtype, "F" if match["fortran"] == b"True" else "C", match.end())


def _unusual_layout(content: Content, start: int, stop: int) -> _Layout:
    head = bytes(content[start : min(start + 12, stop)])
    if not head.startswith(_MAGIC):
        raise ArrayFormatError(f"is not an npy file: it begins with {head[:6]!r}, not {_MAGIC!r}")
    if len(head) < 12:
        raise ArrayFormatError(f"is cut short: {len(head)} bytes, less than the head")
    major, minor = head[6], head[7]
    if major not in _LENGTHS or minor:
        raise ArrayFormatError(
            f"has version {major}.{minor} of the format; 1.0, 2.0 and 3.0 are read"
        )
    (length,) = _LENGTHS[major].unpack_from(head, 8)
    text_start = start + 8 + _LENGTHS[major].size
    if length > stop - text_start:
        raise ArrayFormatError(
            f"is cut short: the header has {length} bytes, and {stop - text_start} follow"
        )
    if length > _MAX_HEADER_SIZE:
        raise ArrayFormatError(
            f"the header has {length} bytes; more than {_MAX_HEADER_SIZE} are not read"
        )
    try:
        # Version 3 differs from 2 in this alone.
        text = str(content[text_start : text_start + length], "utf-8" if major == 3 else "latin-1")
    except UnicodeDecodeError as error:
        raise ArrayFormatError(f"the header is not UTF-8: {error}") from error
    return _parse_header(text, text_start + length - start)


# What Python's parser and NumPy raise for text and types that they do not take, or nested too deeply.
_READ_ERRORS = (
    *(ValueError, TypeError, SyntaxError, OverflowError, LookupError),
    *(RecursionError, MemoryError),
)


def _parse_header(text: str, head_size: int) -> _Layout:
    """Read any header: a dictionary of three entries, in the syntax of Python."""
    try:
        fields = _literal(text.strip())
    except _READ_ERRORS as error:
        raise ArrayFormatError(f"the header cannot be read: {str(error)[:200]}") from error
    if not isinstance(fields, dict) or set(fields) != {"descr", "fortran_order", "shape"}:
        raise ArrayFormatError(
            f"the header must be a dictionary of descr, fortran_order and shape, not {short(fields)}"
        )
    shape, fortran = fields["shape"], fields["fortran_order"]
    if type(fortran) is not bool:
        raise ArrayFormatError(f"fortran_order is {short(fortran)}, not True or False")
    # Exact types: True is an int as well.
    if type(shape) is not tuple or any(type(side) is not int or side < 0 for side in shape):
        raise ArrayFormatError(f"the shape is {short(shape)}, not a tuple of whole numbers from 0")
    if len(shape) > _MAX_DIMENSIONS:
        raise ArrayFormatError(
            f"NumPy has no array of {len(shape)} dimensions; {_MAX_DIMENSIONS} are the most"
        )
    return _layout(shape, _dtype(fields["descr"]), "F" if fortran else "C", head_size)


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except SyntaxError:
        return ast.literal_eval(_PYTHON_2_NUMBER.sub(r"\1", text))


def _dtype(descr: Any) -> np.dtype[Any]:
    try:
        # A type can stand in any place of a description, and be written with escapes in the header.
        if _OTHER_TIME.search(repr(descr)):
            raise ValueError("a unit of time is a name, or a number above 0 and a name")
        dtype: np.dtype[Any] = np.lib.format.descr_to_dtype(descr)
        # NumPy 1.26 counts on from 0 where text is too long for it: 'S4294967297' becomes 'S1'.
        if isinstance(descr, str) and dtype.kind in "SUV" and not descr.endswith(dtype.str[2:]):
            raise ValueError(f"it would be {dtype.str}")
    except _READ_ERRORS as error:
        raise ArrayFormatError(f"{short(descr)} is no type of NumPy: {str(error)[:200]}") from error
    if dtype.hasobject:
        raise ArrayFormatError(
            f"the type {text_of(dtype)} holds Python objects, which are stored as a pickle. Nothing is "
            "unpickled here, for a pickle can run any code; store numbers or strings instead"
        )
    return dtype


def text_of(dtype: np.dtype[Any]) -> str:
    """Shorten a type for a message; it may have thousands of fields."""
    text = str(dtype)
    return text if len(text) <= 200 else f"{text[:200]}..."
