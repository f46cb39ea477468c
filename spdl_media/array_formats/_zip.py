"""The directory of a ZIP archive in memory, checked before anything is read through it."""

from __future__ import annotations

import struct
from typing import NamedTuple, NoReturn

from spdl_media.array_formats._content import Content, name_of
from spdl_media.array_formats.errors import ArrayFormatError

STORED, DEFLATED = 0, 8

_END = struct.Struct("<4s4H2LH")
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_EXTRA = struct.Struct("<2H")

_ENCRYPTED = 0x0001 | 0x0040
_UTF8 = 0x0800
_LONGEST_COMMENT = 0xFFFF
_IN_ZIP64 = 0xFFFFFFFF
_METHODS = {
    1: "shrink",
    6: "implode",
    9: "deflate64",
    12: "bzip2",
    14: "lzma",
    93: "zstandard",
    95: "xz",
    99: "AES encryption",
}


class Member(NamedTuple):
    """One file of the archive, as the directory describes it."""

    name: str
    is_deflated: bool
    crc: int
    compressed: int
    size: int
    header_offset: int
    limit: int
    """Where the next member or the directory begins."""


class _Directory(NamedTuple):
    num_entries: int
    offset: int
    stop: int


def read_directory(content: Content) -> list[Member]:
    """The members in the order of the directory.

    Raises:
        ArrayFormatError: It is no ZIP archive, is cut short, in several parts, encrypted, compressed in a way
            that is not read, has members that overlap or two of one name, or sizes that do not fit into it.
    """
    if bytes(content[:4]) not in (b"PK\x03\x04", b"PK\x05\x06"):
        fail(
            content,
            f"is not an npz file (a ZIP archive): it begins with {bytes(content[:4])!r}",
            offset=0,
        )
    directory = _find_directory(content)
    entries, offset = [], directory.offset
    for _ in range(directory.num_entries):
        member, offset = _read_entry(content, offset, directory)
        entries.append(member)
    if offset != directory.stop:
        fail(content, f"its directory has {directory.stop - offset} bytes too many", offset=offset)
    return _with_limits(content, entries, directory)


def data_of(content: Content, member: Member) -> tuple[int, int]:
    """Where the data of a member begin and end in the archive.

    Raises:
        ArrayFormatError: The member's own header is not there, names another one, or its data run into what
            follows.
    """
    start = member.header_offset
    if start + _LOCAL.size > member.limit:
        fail(content, "its header runs into what follows", member.name, start)
    signature, _, flags, method, *_, name_size, extra_size = _LOCAL.unpack_from(content, start)
    if signature != b"PK\x03\x04":
        fail(content, f"has no header: {signature!r} stands there", member.name, start)
    begin = start + _LOCAL.size + name_size + extra_size
    end = begin + member.compressed
    if end > member.limit:
        message = (
            f"its {member.compressed} bytes would begin at {begin} and run into what follows at "
            f"{member.limit}"
        )
        fail(content, message, member.name, start)
    name = content[start + _LOCAL.size : start + _LOCAL.size + name_size]
    _check_flags(content, flags, method, member.name, start)
    if _decode(content, name, flags, start, member.name) != member.name:
        fail(content, f"its own header calls it {bytes(name)!r}", member.name, start)
    if (method == DEFLATED) != member.is_deflated:
        fail(content, "its own header says another compression", member.name, start)
    return begin, end


def fail(
    content: Content, message: str, member: str | None = None, offset: int | None = None
) -> NoReturn:
    """Raise what is wrong with the archive."""
    raise ArrayFormatError(message, source=name_of(content), member=member, offset=offset)


def _find_directory(content: Content) -> _Directory:
    # Most archives have no comment, and are spared a copy of 64 KiB.
    for longest_comment in (0, _LONGEST_COMMENT):
        start = max(0, len(content) - _END.size - longest_comment)
        tail = bytes(content[start:])
        found = len(tail)
        # A comment may hold the signature too: the right one has a comment that ends with the file.
        while (found := tail.rfind(b"PK\x05\x06", 0, found)) >= 0:
            if len(tail) - found >= _END.size:
                fields = _END.unpack_from(tail, found)
                if found + _END.size + fields[7] == len(tail):
                    return _check_end(content, start + found, fields)
    fail(content, "is cut short: the directory of the archive is missing", offset=len(content))


def _check_end(content: Content, end: int, fields: tuple[int, ...]) -> _Directory:
    _, disk, directory_disk, num_here, num_entries, size, offset, _ = fields
    locator = end - _END64_LOCATOR.size
    if locator >= 0 and bytes(content[locator : locator + 4]) == b"PK\x06\x07":
        _, disk, end, disks = _END64_LOCATOR.unpack_from(content, locator)
        if disks > 1 or end + _END64.size > locator:
            fail(content, "its ZIP64 end record is not where it should be", offset=locator)
        signature, _, _, _, disk, directory_disk, num_here, num_entries, size, offset = (
            _END64.unpack_from(content, end)
        )
        if signature != b"PK\x06\x06":
            fail(content, f"has no ZIP64 end record: {signature!r} stands there", offset=end)
    if disk or directory_disk or num_here != num_entries:
        fail(content, "is one part of an archive in several", offset=end)
    if offset + size != end:  # less would leave members out without a word
        where = "runs past" if offset + size > end else "ends before"
        fail(content, f"its directory of {size} bytes at {offset} {where} {end}", offset=end)
    if num_entries * _ENTRY.size > size:
        fail(content, f"{num_entries} members do not fit into its directory", offset=end)
    return _Directory(num_entries, offset, offset + size)


def _read_entry(content: Content, offset: int, directory: _Directory) -> tuple[Member, int]:
    if offset + _ENTRY.size > directory.stop:
        fail(content, "is cut short: its directory ends within a member", offset=offset)
    fields = _ENTRY.unpack_from(content, offset)
    signature, _, _, flags, method, _, _, crc, compressed, size, *lengths = fields
    name_size, extra_size, comment_size, disk, _, _, header = lengths
    if signature != b"PK\x01\x02":
        fail(content, f"its directory is damaged: {signature!r} stands there", offset=offset)
    name_stop = offset + _ENTRY.size + name_size
    stop = name_stop + extra_size + comment_size
    if stop > directory.stop:
        fail(content, "is cut short: its directory ends within a member", offset=offset)
    name = _decode(content, content[offset + _ENTRY.size : name_stop], flags, offset)
    _check_flags(content, flags, method, name, offset)
    if _IN_ZIP64 in (size, compressed, header):
        extra = bytes(content[name_stop : name_stop + extra_size])
        size, compressed, header = _read_zip64(
            content, extra, (size, compressed, header), name, offset
        )
    if disk not in (0, 0xFFFF):
        fail(content, "lies in another part of the archive", name, offset)
    if method == STORED and compressed != size:
        message = f"is stored in {compressed} bytes, and is said to have {size}"
        fail(content, message, name, offset)
    return Member(name, method == DEFLATED, crc, compressed, size, header, 0), stop


def _check_flags(content: Content, flags: int, method: int, name: str, offset: int) -> None:
    if flags & _ENCRYPTED:
        fail(content, "is encrypted; write the archive without a password", name, offset)
    if method not in (STORED, DEFLATED):
        what = _METHODS.get(method, "unknown")
        message = f"is compressed by method {method} ({what}); stored and deflated ones are read"
        fail(content, message, name, offset)


def _decode(
    content: Content, name: Content, flags: int, offset: int, member: str | None = None
) -> str:
    try:
        return str(name, "utf-8" if flags & _UTF8 else "cp437")
    except UnicodeDecodeError:
        fail(content, f"has a name that is not UTF-8: {bytes(name)!r}", member, offset)


def _read_zip64(
    content: Content, extra: bytes, values: tuple[int, int, int], name: str, offset: int
) -> list[int]:
    """The values, those that do not fit into 32 bits from the extra field."""
    wanted = sum(value == _IN_ZIP64 for value in values)
    numbers = iter(_zip64_numbers(extra, wanted))
    try:
        return [next(numbers) if value == _IN_ZIP64 else value for value in values]
    except StopIteration:
        fail(content, "its sizes are said to be in a ZIP64 field that is not there", name, offset)


def _zip64_numbers(extra: bytes, wanted: int) -> tuple[int, ...]:
    offset = 0
    while offset + _EXTRA.size <= len(extra):
        kind, size = _EXTRA.unpack_from(extra, offset)
        offset += _EXTRA.size
        if kind == 1 and 8 * wanted <= min(size, len(extra) - offset):
            return struct.unpack_from(f"<{wanted}Q", extra, offset)
        offset += size
    return ()


def _with_limits(content: Content, entries: list[Member], directory: _Directory) -> list[Member]:
    """The members with the ends of their room, once it is clear that none overlaps the next."""
    by_place = sorted(range(len(entries)), key=lambda index: entries[index].header_offset)
    limit = directory.offset
    for index in reversed(by_place):
        member = entries[index]
        # What its own header adds in fields is looked at when it is read.
        least = member.header_offset + _LOCAL.size + member.compressed
        if least > limit:
            message = f"overlaps what follows at {limit}: it would end at {least} or later"
            fail(content, message, member.name, member.header_offset)
        entries[index] = member._replace(limit=limit)
        limit = member.header_offset
    names: set[str] = set()
    for member in entries:
        if member.name in names:
            fail(content, "is there twice", member.name, member.header_offset)
        names.add(member.name)
    return entries
