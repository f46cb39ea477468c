"""The header of an npy file: a Python dictionary as text, read by a grammar of its own.

Not ``ast.literal_eval``: it takes 33 us a header, can exhaust the stack on hostile text, and accepts more
than these headers are made of: strings, whole numbers, ``True``, ``False``, lists, tuples, one dictionary.
"""

from __future__ import annotations

import math
import re
import reprlib
import sys
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np

MAGIC = b"\x93NUMPY"
# NumPy itself reads no header above 10,000 bytes unless told to; descriptions of records can be longer.
MAX_HEADER_SIZE = 1 << 20
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
_TOKEN = re.compile(
    r"\s*(?:(?P<mark>[{}\[\](),:])|(?P<number>-?[0-9]{1,20})L?(?![\w.])|(?P<word>True|False)\b"
    r"|u?'(?P<single>(?:[^'\\\n]|\\.)*)'|u?\"(?P<double>(?:[^\"\\\n]|\\.)*)\"|(?P<end>\Z))"
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(['\"\\nrt]))")
_PLAIN_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}
_KEYS = {"descr", "fortran_order", "shape"}


class Layout(NamedTuple):
    """What a header says of the data behind it."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    nbytes: int
    order: Literal["C", "F"]


class HeaderError(Exception):
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


def parse_header(text: str) -> Layout:
    """Read the text of a header.

    Raises:
        HeaderError: It is no such header, its type holds Python objects, or no array has this shape.
    """
    if match := _WRITTEN_BY_NUMPY.fullmatch(text):
        shape = tuple(map(int, match["shape"].replace(",", " ").split()))
        return _layout(_dtype(match["descr"], 0), shape, "F" if match["fortran"] == "True" else "C")
    fields = _Literal(text).parse()
    if not isinstance(fields, dict) or set(fields) != _KEYS:
        names = _short(sorted(fields)) if isinstance(fields, dict) else type(fields).__name__
        raise HeaderError(f"the header must be a dictionary of {sorted(_KEYS)}, this is {names}")
    if type(fields["fortran_order"]) is not bool:
        raise HeaderError(f"fortran_order is {_short(fields['fortran_order'])}, not True or False")
    order: Literal["C", "F"] = "F" if fields["fortran_order"] else "C"
    return _layout(_dtype(fields["descr"], 0), _shape(fields["shape"]), order)


def _layout(dtype: np.dtype[Any], shape: tuple[int, ...], order: Literal["C", "F"]) -> Layout:
    if dtype.hasobject:
        _refuse_objects(text_of(dtype))
    # NumPy's own bound, which counts dimensions of 0 as 1. Below it no product overflows.
    if math.prod(side or 1 for side in shape) * (dtype.itemsize or 1) > sys.maxsize:
        raise HeaderError(
            f"shape {shape} of {text_of(dtype)} has more bytes than memory has addresses"
        )
    nbytes = math.prod(shape) * dtype.itemsize
    return Layout(shape, dtype, nbytes, order)


def _shape(value: object) -> tuple[int, ...]:
    if not isinstance(value, tuple) or any(type(side) is not int for side in value):
        raise HeaderError(f"the shape is {_short(value)}, not a tuple of whole numbers")
    if len(value) > _MAX_DIMENSIONS:
        raise HeaderError(
            f"NumPy has no array of {len(value)} dimensions; {_MAX_DIMENSIONS} are the most"
        )
    if any(side < 0 for side in value):
        raise HeaderError(f"shape {value} has a negative side")
    return value


def _refuse_objects(what: str) -> NoReturn:
    raise HeaderError(
        f"the type {what} holds Python objects, which are stored as a pickle. Nothing is unpickled "
        "here, for a pickle can run any code; store numbers or strings instead"
    )


def _dtype(descr: Any, depth: int) -> np.dtype[Any]:
    """The type that a description means: a string, a list of fields, or (type, shape)."""
    if depth > _MAX_DEPTH:
        raise HeaderError("the type is nested too deeply")
    try:
        if isinstance(descr, str):
            return _plain_dtype(descr)
        if isinstance(descr, tuple) and len(descr) == 2:
            return np.dtype((_dtype(descr[0], depth + 1), _shape(descr[1])))
        if isinstance(descr, list):
            return _record_dtype(descr, depth)
    except (TypeError, ValueError, OverflowError) as error:
        raise HeaderError(f"{_short(descr)} is no type of NumPy: {str(error)[:200]}") from error
    raise HeaderError(f"{_short(descr)} is no description of a type")


def _plain_dtype(descr: str) -> np.dtype[Any]:
    if not _TYPE.fullmatch(descr):
        if "O" in descr.lstrip("<>|=")[:1]:
            _refuse_objects(_short(descr))
        raise HeaderError(
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
            raise HeaderError(f"{_short(field)} is no field: (name, type) or (name, type, shape)")
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


class _Literal:
    """One literal out of the few kinds that headers hold."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0
        self._token = self._next()

    def parse(self) -> Any:
        value = self._value(0)
        if self._token["end"] is None:
            self._fail("nothing more")
        return value

    def _next(self) -> re.Match[str]:
        match = _TOKEN.match(self._text, self._position)
        if match is None:
            rest = self._text[self._position :].lstrip()
            raise HeaderError(f"the header cannot be read from {rest[:20]!r} on")
        self._position = match.end()
        return match

    def _fail(self, wanted: str) -> NoReturn:
        at = self._token.start()
        found = self._text[at : at + 20].strip()
        raise HeaderError(f"the header has {found!r} at character {at}, where {wanted} is due")

    def _take(self, marks: str) -> str:
        mark = self._token["mark"]
        if mark is None or mark not in marks:
            self._fail(" or ".join(marks))
        self._token = self._next()
        return mark

    def _value(self, depth: int) -> Any:
        token = self._token
        if depth > _MAX_DEPTH:
            raise HeaderError("the header is nested too deeply")
        if token["mark"] is not None:
            return self._container(self._take("{[("), depth)
        if token["end"] is not None:
            self._fail("a value")
        self._token = self._next()
        if (number := token["number"]) is not None:
            return int(number)
        if (word := token["word"]) is not None:
            return word == "True"
        return _unescape(token["single"] if token["single"] is not None else token["double"])

    def _container(self, opening: str, depth: int) -> Any:
        closing = {"{": "}", "[": "]", "(": ")"}[opening]
        items: list[Any] = []
        has_comma = False
        while self._token["mark"] != closing:
            items.append(self._item(opening, depth))
            has_comma = self._token["mark"] == ","
            if not has_comma:
                break
            self._take(",")
        self._take(closing)
        if opening == "{":
            return self._dictionary(items)
        if opening == "(" and (len(items) != 1 or has_comma):
            return tuple(items)
        return items if opening == "[" else items[0]

    def _item(self, opening: str, depth: int) -> Any:
        value = self._value(depth + 1)
        if opening != "{":
            return value
        self._take(":")
        return value, self._value(depth + 1)

    def _dictionary(self, items: list[tuple[Any, Any]]) -> dict[str, Any]:
        if not all(isinstance(key, str) for key, _ in items):
            raise HeaderError("the header has a key that is not a string")
        fields = dict(items)
        if len(fields) < len(items):
            raise HeaderError("the header has one key twice")
        return fields


def _unescape(text: str) -> str:
    return _ESCAPE.sub(_character, text) if "\\" in text else text


def _character(match: re.Match[str]) -> str:
    digits = match[1] or match[2] or match[3]
    if digits is None:
        return _PLAIN_ESCAPES.get(match[4], match[4])
    if int(digits, 16) > sys.maxunicode:
        raise HeaderError(f"the header has {match[0]!r}, which is no character")
    return chr(int(digits, 16))
