"""One array out of an npy file in memory.

The header is a Python dictionary as text. What NumPy writes is read by one pattern, and the same head is read
once; ``ast.literal_eval`` takes 33 us. ``numpy.lib.format`` would do that each time, and copy the data.
"""

from __future__ import annotations

import ast
import math
import re
import reprlib
import struct
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

import numpy as np

from spdl_media.errors import ArrayFormatError
from spdl_media.readers import Content, content_of, name_of

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ("load_npy",)

_MAGIC = b"\x93NUMPY"
# NumPy itself reads no header above 10,000 bytes unless told to; descriptions of records can be longer.
_MAX_HEADER_SIZE = 1 << 20
# As in NumPy 2; NumPy 1.26 has 32, and says so itself. The product of many more sides takes seconds.
_MAX_DIMENSIONS = 64
# Levels of brackets. Records inside records take two each, and each level takes three calls, of the 1000 that
# Python allows in all.
_MAX_DEPTH = 64

_WRITTEN_BY_NUMPY = re.compile(
    r"\{'descr': '(?P<descr>[^'\\]+)', 'fortran_order': (?P<fortran>True|False), "
    r"'shape': \((?P<shape>|[0-9]{1,19},|[0-9]{1,19}(?:, [0-9]{1,19})+)\), \} *\n"
)
_TYPE = re.compile(
    r"[<>|=]?(?:[biufcSUV][0-9]{1,10}"
    r"|[mM]8(?:\[[0-9]{0,10}(?:Y|M|W|D|h|m|s|ms|us|μs|ns|ps|fs|as)\])?|\?)"
)
# Only what these headers are made of, and no escapes that Python would warn about. Python 2 writes 2L.
_ESCAPE = r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|['\"\\nrt])"
_TOKEN = re.compile(
    r"\s*([{}\[\](),:]|-?[0-9]{1,20}(?=L?(?![\w.]))|(?:True|False)\b"
    rf"|u?'(?:[^'\\\n]|{_ESCAPE})*'|u?\"(?:[^\"\\\n]|{_ESCAPE})*\"|\Z)L?|\s*([^\s])"
)
_OPENING, _CLOSING = frozenset("{[("), frozenset("}])")
_KEYS = {"descr", "fortran_order", "shape"}
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
            raise _HeaderError(
                f"is cut short: shape {layout.shape} of {text_of(layout.dtype)} is {layout.nbytes} "
                f"bytes, and {stop - offset} follow the header"
            )
        array = _view(content, offset, layout)
    except _HeaderError as error:
        raise ArrayFormatError(
            str(error),
            source=source or name_of(content),
            member=member,
            offset=start if at is None else at,
        ) from error.__cause__
    return array, offset + layout.nbytes


def _view(content: Content, offset: int, layout: _Layout) -> np.ndarray[Any, Any]:
    shape, dtype, _, order = layout
    try:
        return np.ndarray(shape, dtype, content, offset, None, order)
    except (TypeError, ValueError) as error:  # more dimensions than this NumPy has
        raise _HeaderError(
            f"NumPy has no array of shape {shape} and {text_of(dtype)}: {error}"
        ) from error


def _read_head(content: Content, start: int, stop: int) -> tuple[_Layout, int]:
    """What the head says, and where the data begin."""
    head = bytes(content[start : min(start + _COMMON_HEAD, stop)])
    if (layout := _layout_of_head(head)) is not None:
        return layout, start + _COMMON_HEAD
    text_start, length, encoding = _parse_prefix(head)
    if length > stop - start - text_start:
        raise _HeaderError(
            f"is cut short: the header has {length} bytes, and {stop - start - text_start} follow"
        )
    if length > _MAX_HEADER_SIZE:
        raise _HeaderError(
            f"the header has {length} bytes; more than {_MAX_HEADER_SIZE} are not read"
        )
    offset = start + text_start + length
    try:
        text = str(content[start + text_start : offset], encoding)
    except UnicodeDecodeError as error:
        raise _HeaderError(f"the header is not UTF-8: {error}") from error
    return _parse_header(text), offset


def _parse_prefix(head: bytes) -> tuple[int, int, str]:
    """Where the text begins, its length and its encoding."""
    if not head.startswith(_MAGIC):
        raise _HeaderError(f"is not an npy file: it begins with {head[:6]!r}, not {_MAGIC!r}")
    if len(head) < 8:
        raise _HeaderError(f"is cut short: {len(head)} bytes, less than the head")
    major, minor = head[6], head[7]
    if major not in _LENGTH or minor != 0:
        raise _HeaderError(f"has version {major}.{minor} of the format; 1.0, 2.0 and 3.0 are read")
    field = _LENGTH[major]
    if len(head) < 8 + field.size:
        raise _HeaderError(f"is cut short: {len(head)} bytes, less than the head")
    return 8 + field.size, field.unpack_from(head, 8)[0], "utf-8" if major == 3 else "latin-1"


@lru_cache(maxsize=1024)
def _layout_of_head(head: bytes) -> _Layout | None:
    """The layout behind a head of exactly 128 bytes that is whole and right; ``None`` for all others.

    Types of records are left out, those in a type with a shape too: their names can be changed in place, and
    arrays would share them. So are more dimensions than every NumPy has, for which there may be no array.
    """
    try:
        text_start, length, encoding = _parse_prefix(head)
        if text_start + length != _COMMON_HEAD or len(head) < _COMMON_HEAD:
            return None
        layout = _parse_header(str(head[text_start:], encoding))
    except (_HeaderError, UnicodeDecodeError):
        return None
    num_dimensions = len(layout.shape) + layout.dtype.ndim
    if num_dimensions > _SURE_DIMENSIONS or layout.dtype.base.names is not None:
        return None
    return layout


class _Layout(NamedTuple):
    """What a header says of the data behind it."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    nbytes: int
    order: Literal["C", "F"]


class _HeaderError(Exception):
    """What is wrong with the text, for the error that knows where it stands."""


_REPR = reprlib.Repr()
_REPR.maxlist = _REPR.maxtuple = _REPR.maxdict = 6
_REPR.maxstring = _REPR.maxother = 80


def _short(value: object) -> str:
    """What a message shows of a value, which may fill all of a long header."""
    return _REPR.repr(value)


def text_of(dtype: np.dtype[Any]) -> str:
    """What a message shows of a type, which may have thousands of fields."""
    text = str(dtype)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _parse_header(text: str) -> _Layout:
    """Read the text of a header.

    Raises:
        _HeaderError: It is no such header, its type holds Python objects, or no array has this shape.
    """
    if match := _WRITTEN_BY_NUMPY.fullmatch(text):
        shape = tuple(map(int, match["shape"].replace(",", " ").split()))
        return _layout(_dtype(match["descr"], 0), shape, "F" if match["fortran"] == "True" else "C")
    fields = _literal(text.strip())
    if not isinstance(fields, dict) or set(fields) != _KEYS:
        names = (
            _short(sorted(map(str, fields))) if isinstance(fields, dict) else type(fields).__name__
        )
        raise _HeaderError(f"the header must be a dictionary of {sorted(_KEYS)}, this is {names}")
    if type(fields["fortran_order"]) is not bool:
        raise _HeaderError(f"fortran_order is {_short(fields['fortran_order'])}, not True or False")
    order: Literal["C", "F"] = "F" if fields["fortran_order"] else "C"
    return _layout(_dtype(fields["descr"], 0), _shape(fields["shape"]), order)


def _layout(dtype: np.dtype[Any], shape: tuple[int, ...], order: Literal["C", "F"]) -> _Layout:
    if dtype.hasobject:
        _refuse_objects(text_of(dtype))
    # NumPy's own bound, which counts dimensions of 0 as 1. Below it no product overflows.
    if math.prod(side or 1 for side in shape) * (dtype.itemsize or 1) > sys.maxsize:
        raise _HeaderError(
            f"shape {shape} of {text_of(dtype)} has more bytes than memory has addresses"
        )
    nbytes = math.prod(shape) * dtype.itemsize
    return _Layout(shape, dtype, nbytes, order)


def _shape(value: object) -> tuple[int, ...]:
    if not isinstance(value, tuple) or any(type(side) is not int for side in value):
        raise _HeaderError(f"the shape is {_short(value)}, not a tuple of whole numbers")
    if len(value) > _MAX_DIMENSIONS:
        raise _HeaderError(
            f"NumPy has no array of {len(value)} dimensions; {_MAX_DIMENSIONS} are the most"
        )
    if any(side < 0 for side in value):
        raise _HeaderError(f"shape {value} has a negative side")
    return value


def _refuse_objects(what: str) -> NoReturn:
    raise _HeaderError(
        f"the type {what} holds Python objects, which are stored as a pickle. Nothing is unpickled "
        "here, for a pickle can run any code; store numbers or strings instead"
    )


def _dtype(descr: Any, depth: int) -> np.dtype[Any]:
    """The type that a description means: a string, a list of fields, or (type, shape)."""
    if depth > _MAX_DEPTH:
        raise _HeaderError("the type is nested too deeply")
    try:
        if isinstance(descr, str):
            return _plain_dtype(descr)
        if isinstance(descr, tuple) and len(descr) == 2:
            return np.dtype((_dtype(descr[0], depth + 1), _shape(descr[1])))
        if isinstance(descr, list):
            return _record_dtype(descr, depth)
    except (TypeError, ValueError, OverflowError) as error:
        raise _HeaderError(f"{_short(descr)} is no type of NumPy: {str(error)[:200]}") from error
    raise _HeaderError(f"{_short(descr)} is no description of a type")


def _plain_dtype(descr: str) -> np.dtype[Any]:
    if not _TYPE.fullmatch(descr):
        if "O" in descr.lstrip("<>|=")[:1]:
            _refuse_objects(_short(descr))
        raise _HeaderError(
            f"the type {_short(descr)} is unknown; types are written as '<f4', '|u1', '<U8' or '<M8[ns]'"
        )
    dtype = np.dtype(descr)
    # NumPy 1.26 counts on from 0 where text is too long for it: 'S4294967297' becomes 'S1'.
    if dtype.kind in "SUV" and dtype.str[2:] != descr.lstrip("<>|=")[1:].lstrip("0").zfill(1):
        raise ValueError(f"it would be {dtype.str}")
    return dtype


def _record_dtype(fields: list[Any], depth: int) -> np.dtype[Any]:
    """The type of records. Fields without a name, of plain bytes, are the gaps between the others."""
    names, titles, formats, offsets, size = [], [], [], [], 0
    for field in fields:
        if not (isinstance(field, tuple) and len(field) in (2, 3)):
            raise _HeaderError(f"{_short(field)} is no field: (name, type) or (name, type, shape)")
        dtype = _dtype(field[1], depth + 1)
        if len(field) == 3:
            dtype = np.dtype((dtype, _shape(field[2])))
        title, name = field[0] if isinstance(field[0], tuple) else (None, field[0])
        if not (name == "" and dtype.type is np.void and dtype.names is None):
            names.append(name)
            titles.append(title)
            formats.append(dtype)
            offsets.append(size)
        size += dtype.itemsize
    description: Any = {
        "names": names,
        "formats": formats,
        "titles": titles,
        "offsets": offsets,
        "itemsize": size,
    }
    record: np.dtype[Any] = np.dtype(description)
    return record


def _literal(text: str) -> Any:
    """Evaluate a text made of strings, integers, ``True``, ``False``, lists, tuples and a dictionary."""
    parts, depth = [], 0
    for token in _TOKEN.finditer(text):
        if token[2] is not None:
            rest = text[token.start(2) :]
            raise _HeaderError(f"the header cannot be read from {rest[:20]!r} on")
        depth += (token[1] in _OPENING) - (token[1] in _CLOSING)
        if depth > _MAX_DEPTH:
            raise _HeaderError("the header is nested too deeply")
        parts.append(token[1])
    try:
        tree = ast.parse(" ".join(parts).strip(), mode="eval").body
        value = ast.literal_eval(tree)
    except (SyntaxError, ValueError, TypeError) as error:
        reason = getattr(error, "msg", None) or error
        raise _HeaderError(f"the header is no dictionary of Python: {reason}") from error
    if isinstance(tree, ast.Dict) and len(value) < len(tree.keys):
        raise _HeaderError("the header has one key twice")
    return value
