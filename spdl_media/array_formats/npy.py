"""Reader of npy files in memory.

Headers that NumPy writes for plain types are read by one regular expression, which takes a twentieth of the
time of ``numpy.lib.format``. All other headers are parsed as Python literals, and NumPy's own function turns
the description of the type into a dtype.
"""

from __future__ import annotations

import ast
import math
import re
from functools import lru_cache
from reprlib import repr as short
from typing import Any, Literal, NamedTuple

import numpy as np

from spdl_media.errors import ArrayFormatError
from spdl_media.inputs import Buffer
from spdl_media.readers import Content, content_of, name_of

__all__ = ("load_npy",)

_MAGIC = b"\x93NUMPY"
# NumPy itself reads headers of at most 10,000 bytes by default; structured dtypes can have longer ones.
_MAX_HEADER_SIZE = 1 << 20
# Checked before the sides are multiplied, because the product of many thousand sides takes seconds.
_MAX_DIMENSIONS = 64

# NumPy pads headers of plain types to 128 bytes; before 1.14 they had 80.
_USUAL_SIZE = 128
_USUAL = re.compile(
    rb"\x93NUMPY\x01\0(?P<length>..)"
    rb"\{'descr': '(?P<descr>[<>|][biufcSUV][0-9]{1,9}|\|b1|[<>][mM]8(?:\[(?:[1-9][0-9]*)?[a-zA-Z]+\])?)', "
    rb"'fortran_order': (?P<fortran>True|False), "
    rb"'shape': \((?P<shape>|[0-9]+,|[0-9]+(?:, [0-9]+)+)\), \} *\n",
    re.DOTALL,
)
# NumPy divides by the numbers in a unit of time. It never writes 0, but a file may: [s/0] crashes the process
# at once, [0s] when the array is converted.
_OTHER_TIME = re.compile(r"(?:[mM]8|(?:datetime|timedelta)64)\[(?!(?:[1-9][0-9]*)?[^\W\d_]+\])")
# Python 2 wrote integers as 2L.
_PYTHON_2_NUMBER = re.compile(r"\b([0-9]+)L(?=[,)])")


class _Layout(NamedTuple):
    """Layout of the data according to the header, and the size of the header."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    order: Literal["C", "F"]
    head_size: int
    nbytes: int


def load_npy(data: Buffer | np.ndarray[Any, Any], *, copy: bool = False) -> np.ndarray[Any, Any]:
    """Read an array that ``numpy.save`` has written.

    Args:
        data: The file's content: bytes, any contiguous buffer, a 1-D uint8 array or CPU tensor. Bytes after
            the array are ignored, as ``numpy.load`` does.
        copy: Whether to copy the array to new memory.

    Returns:
        Array with the shape, dtype (including byte order) and memory order (C or Fortran) of the file. It is
        a view of ``data``, read-only if ``data`` is; with ``copy``, a new and writable array. If ``data`` is
        unaligned, a view may be unaligned for its dtype; NumPy accepts that, other libraries may not.

    Raises:
        ArrayFormatError: The data is not an npy file or is cut short, its header cannot be read, or it is an
            array of Python objects, which is a pickle and never loaded. Sizes are checked before memory is
            allocated.
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
        # Copy as bytes: NumPy copies text only with the GIL, and leaves out the padding of structured dtypes.
        own = np.ndarray((layout.nbytes,), np.uint8, content, offset).copy()
        return _view(own, 0, layout)
    except ArrayFormatError as error:
        error.source, error.offset = name_of(content), 0
        raise


def array_at(content: Content, start: int, stop: int) -> tuple[np.ndarray[Any, Any], int]:
    """View the array of an npy file that begins at the byte ``start`` and ends before ``stop``.

    Returns:
        The array, and the offset of the byte after it.

    Raises:
        ArrayFormatError: As :func:`load_npy`, without the name of the source.
    """
    layout, offset = _read_head(content, start, stop)
    return _view(content, offset, layout), offset + layout.nbytes


def _view(content: Any, offset: int, layout: _Layout) -> np.ndarray[Any, Any]:
    shape, dtype, order, _, _ = layout
    try:
        return np.ndarray(shape, dtype, content, offset, None, order)
    except (TypeError, ValueError) as error:  # more dimensions or bytes than this NumPy supports
        raise ArrayFormatError(
            f"NumPy has no array of shape {shape} and {text_of(dtype)}: {error}"
        ) from error


def _read_head(content: Content, start: int, stop: int) -> tuple[_Layout, int]:
    """Read the header; return the layout and the offset of the data."""
    head = bytes(content[start : start + _USUAL_SIZE])
    layout = _usual_layout(head) or _unusual_layout(content, start, stop)
    offset = start + layout.head_size
    if layout.nbytes > stop - offset:
        raise ArrayFormatError(
            f"is cut short: shape {layout.shape} of {text_of(layout.dtype)} is {layout.nbytes} "
            f"bytes, and {stop - offset} follow the header"
        )
    return layout, offset


# The files of a data set share few headers: a cache hit takes 0.1 us, the regular expression 2 us.
@lru_cache(maxsize=1024)
def _usual_layout(head: bytes) -> _Layout | None:
    """Return the layout of a header that NumPy has written for a plain type; ``None`` for all others.

    Structured dtypes are never cached: their field names can be changed in place, and arrays would share
    them.
    """
    match = _USUAL.match(head)
    if match is None or match.end() != 10 + int.from_bytes(match["length"], "little"):
        return None
    try:
        dtype = np.dtype(match["descr"].decode())
        shape = tuple(map(int, match["shape"].replace(b",", b" ").split()))
    except (TypeError, ValueError):
        return None
    order: Literal["C", "F"] = "F" if match["fortran"] == b"True" else "C"
    return _Layout(shape, dtype, order, match.end(), math.prod(shape) * dtype.itemsize)


def _unusual_layout(content: Content, start: int, stop: int) -> _Layout:
    head = bytes(content[start : min(start + 12, stop)])
    if not head.startswith(_MAGIC):
        raise ArrayFormatError(f"is not an npy file: it begins with {head[:6]!r}, not {_MAGIC!r}")
    if len(head) < 12:
        raise ArrayFormatError(f"is cut short: {len(head)} bytes, less than the head")
    major, minor = head[6:8]
    if major not in (1, 2, 3) or minor:
        raise ArrayFormatError(
            f"has version {major}.{minor} of the format; 1.0, 2.0 and 3.0 are read"
        )
    text_start = 10 if major == 1 else 12
    length = int.from_bytes(head[8:text_start], "little")
    text_start += start
    if length > stop - text_start:
        raise ArrayFormatError(
            f"is cut short: the header has {length} bytes, and {stop - text_start} follow"
        )
    if length > _MAX_HEADER_SIZE:
        raise ArrayFormatError(
            f"the header has {length} bytes; more than {_MAX_HEADER_SIZE} are not read"
        )
    try:
        # This is the only difference between versions 2 and 3.
        text = str(content[text_start : text_start + length], "utf-8" if major == 3 else "latin-1")
    except UnicodeDecodeError as error:
        raise ArrayFormatError(f"the header is not UTF-8: {error}") from error
    shape, dtype, fortran = _parse_header(text.strip())
    head_size = text_start + length - start
    nbytes = math.prod(shape) * dtype.itemsize
    return _Layout(shape, dtype, "F" if fortran else "C", head_size, nbytes)


def _parse_header(text: str) -> tuple[tuple[int, ...], np.dtype[Any], bool]:
    """Parse a header: a Python literal of a dictionary with three entries."""
    try:
        try:
            fields = ast.literal_eval(text)
        except SyntaxError:
            fields = ast.literal_eval(_PYTHON_2_NUMBER.sub(r"\1", text))
    except Exception as error:  # Python's parser raises many classes, also for too deep nesting
        raise ArrayFormatError(f"the header cannot be read: {str(error)[:200]}") from error
    is_header = isinstance(fields, dict) and set(fields) == {"descr", "fortran_order", "shape"}
    shape, fortran = (fields["shape"], fields["fortran_order"]) if is_header else ((), None)
    # Exact types: True is an int as well.
    is_shape = type(shape) is tuple and all(type(side) is int and side >= 0 for side in shape)
    if type(fortran) is not bool or not is_shape or len(shape) > _MAX_DIMENSIONS:
        raise ArrayFormatError(
            "the header must be a dictionary of descr, fortran_order (True or False) and shape (at most "
            f"{_MAX_DIMENSIONS} whole numbers from 0), not {short(fields)}"
        )
    return shape, _dtype(fields["descr"]), fortran


def _dtype(descr: Any) -> np.dtype[Any]:
    try:
        # Search the parsed description: a type may be at any place in it, and be written with escapes.
        if _OTHER_TIME.search(repr(descr)):
            raise ValueError("a unit of time is a name, or a number above 0 and a name")
        dtype: np.dtype[Any] = np.lib.format.descr_to_dtype(descr)
        # In NumPy 1.26, the size of a text type overflows: 'S4294967297' becomes 'S1'.
        if isinstance(descr, str) and dtype.kind in "SUV" and not descr.endswith(dtype.str[2:]):
            raise ValueError(f"it would be {dtype.str}")
    except Exception as error:  # NumPy, too, raises many classes
        raise ArrayFormatError(f"{short(descr)} is not a NumPy type: {str(error)[:200]}") from error
    if dtype.hasobject:
        raise ArrayFormatError(
            f"the type {text_of(dtype)} holds Python objects, which are stored as a pickle. Nothing is "
            "unpickled here, for a pickle can run any code; store numbers or strings instead"
        )
    return dtype


def text_of(dtype: np.dtype[Any]) -> str:
    """Return a dtype as text for a message, shortened, because it may have thousands of fields."""
    text = str(dtype)
    return text if len(text) <= 200 else f"{text[:200]}..."
