"""The blocks of 512 bytes that stand before each member of a tar archive."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from typing import NamedTuple

BLOCK = 512
NO_BLOCK = bytes(BLOCK)

_FIELDS = struct.Struct("<100s24x12s12x8s1s100x6s82x155s12x")
_NUMBER_PADDING = b" \0"
_CHECKSUM_AT_SPACES = 8 * 0x20
_WANTED = (b"path", b"size")
_SPARSE_KEYS = b"GNU.sparse."

REGULAR = frozenset({b"0", b"\0", b"7"})
SPARSE = b"S"
LONG_NAME, LONG_LINK = b"L", b"K"
PAX, PAX_GLOBAL, PAX_SOLARIS = b"x", b"g", b"X"
# Links, devices, directories and FIFOs: nothing follows them, whatever their size says.
WITHOUT_DATA = frozenset({b"1", b"2", b"3", b"4", b"5", b"6"})


class HeaderError(Exception):
    """What is wrong with a block, for the error that knows where it stands."""


class Header(NamedTuple):
    """One member: its name as bytes, its size, and its kind."""

    name: bytes
    size: int
    kind: bytes


def parse_header(block: bytes) -> Header:
    """Read a header of ustar, GNU tar or the tar before them.

    Raises:
        HeaderError: Its checksum is wrong, or a number cannot be read.
    """
    name, size_field, checksum_field, kind, magic, prefix = _FIELDS.unpack(block)
    # The lower half of Adler-32 is 1 + the sum of the bytes, exact for 256 of them: 0.3 us for both parts,
    # where sum() takes 1.5, and all of a member 2.
    total = (zlib.adler32(block[:256]) & 0xFFFF) + (zlib.adler32(block[256:]) & 0xFFFF) - 2
    try:
        stored = parse_number(checksum_field)
    except HeaderError:
        stored = -1  # that is no sum
    if total - sum(checksum_field) + _CHECKSUM_AT_SPACES != stored and not _signed_sum_is(
        block, stored
    ):
        raise HeaderError("is no header of tar, or a damaged one: its checksum is wrong")
    name = name.partition(b"\0")[0]
    if magic == b"ustar\0" and prefix[0]:
        name = prefix.partition(b"\0")[0] + b"/" + name
    if kind == b"\0" and name.endswith(b"/"):
        kind = b"5"  # directories of the time before there was a kind for them
    return Header(name, parse_number(size_field), kind)


def _signed_sum_is(block: bytes, stored: int) -> bool:
    """Some old programs added up bytes as signed numbers."""
    fields = struct.unpack("<148b8x356b", block)
    return bool(sum(fields) + _CHECKSUM_AT_SPACES == stored)


def parse_number(field: bytes) -> int:
    """A number in octal digits, or, as GNU tar writes large ones, in binary with the first bit set.

    Raises:
        HeaderError: It is neither, or negative.
    """
    digits = field.strip(_NUMBER_PADDING)
    if digits.isdigit():
        try:
            return int(digits, 8)
        except ValueError:
            pass
    elif not digits:
        return 0
    elif field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    raise HeaderError(f"has {field!r} where a number of octal digits is due")


def parse_pax(data: bytes) -> dict[bytes, bytes]:
    """Those records ``length keyword=value`` of a pax header that say something of the data.

    Raises:
        HeaderError: A record is not of this form, or longer than what there is.
    """
    records: dict[bytes, bytes] = {}
    offset = 0
    while offset < len(data) and data[offset]:
        space = data.find(b" ", offset, offset + 20)
        digits = data[offset:space] if space >= 0 else b""
        stop = offset + int(digits) if digits.isdigit() else 0
        key, equals, value = data[space + 1 : stop].partition(b"=")
        if stop > len(data) or not (equals and key and value.endswith(b"\n")):
            raise HeaderError(
                f"has a pax header that cannot be read from {data[offset:][:20]!r} on"
            )
        if key in _WANTED or key.startswith(_SPARSE_KEYS):
            records[key] = value[:-1]
        offset = stop
    return records


def with_pax(header: Header, records: Mapping[bytes, bytes]) -> Header:
    """The header with what the pax records say instead.

    Raises:
        HeaderError: The size is no number, or the file is sparse.
    """
    if any(key.startswith(_SPARSE_KEYS) for key in records):
        header = header._replace(kind=SPARSE)
    size = records.get(b"size", b"")
    if size and not (size.isdigit() and len(size) <= 20):
        raise HeaderError(f"has a pax header with the size {size!r}")
    return Header(
        records.get(b"path") or header.name, int(size) if size else header.size, header.kind
    )
