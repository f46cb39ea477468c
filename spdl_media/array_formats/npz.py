"""Arrays by name out of an npz file (a ZIP archive of npy files) in memory.

The directory is checked before anything is read through it. :mod:`zipfile` takes 40 us and more for it, and
would let members overlap.
"""

from __future__ import annotations

import functools
import struct
import zlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from spdl_media.array_formats.npy import array_at, text_of
from spdl_media.errors import ArrayFormatError
from spdl_media.readers import Content, content_of, name_of

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ("NpzFile", "load_npz")

# What one call inflates: each hands the GIL over several times, so not little; nor all at once, which would
# take the memory twice, and a machine that maps it anew each time five times as long.
_PIECE = 1024 * 1024
_LEAST_GIVEN = 4096
# Deflate cannot do better than 258 bytes out of two bits.
_MAX_RATIO = 1032

_STORED, _DEFLATED = 0, 8

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
    9: "deflate64",
    12: "bzip2",
    14: "lzma",
    93: "zstandard",
    95: "xz",
    99: "AES encryption",
}


def load_npz(
    data: Buffer | np.ndarray[Any, Any],
    *,
    max_uncompressed_bytes: int = 1 << 30,
    verify: bool = True,
) -> NpzFile:
    """Open an npz file, as ``numpy.savez`` and ``numpy.savez_compressed`` write it.

    Only the directory is read here. Each access to an array checks its CRC-32, unless ``verify=False``, and
    inflates it if it is deflated: keep the array rather than asking for it again.

    Args:
        data: The file's content: bytes, any contiguous buffer, a 1-D uint8 array or CPU tensor. It is kept,
            not copied.
        max_uncompressed_bytes: How much all deflated members together may inflate to. Arrays that are stored
            take no memory and do not count.
        verify: Compare each array with its CRC-32 when it is read. Without it stored arrays cost next to
            nothing, and damage to their numbers goes unnoticed.

    Returns:
        The arrays by name.

    Raises:
        ArrayFormatError: Not a ZIP archive, cut short, with members that are encrypted, overlap, have one
            name, are compressed otherwise, lie about their sizes, or are larger than allowed.
        TypeError: ``data`` is not memory (a path, for example).
        ValueError: A negative limit.

    Thread safety: safe. CRC, inflating and copying of more than 64 KiB are done without the GIL; with isal
    (``pip install "spdl_media[isal]"``) they take a fraction of the time.

    See:
        https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT
    """
    if max_uncompressed_bytes < 0:
        raise ValueError(
            f"max_uncompressed_bytes must be 0 or more bytes, not {max_uncompressed_bytes}"
        )
    content = content_of(data, "an npz file")
    members = _read_directory(content)
    total = 0
    for member in members:
        total += member.size if member.is_deflated else 0
        if total > max_uncompressed_bytes:
            message = (
                f"with it the deflated members are {total} bytes, and {max_uncompressed_bytes} are "
                "allowed. If the file can be trusted, give max_uncompressed_bytes"
            )
            _fail(content, message, member.name, member.header_offset)
    return NpzFile(content, members, verify=verify)


class NpzFile(Mapping[str, np.ndarray[Any, Any]]):
    """Arrays by name. Made by :func:`load_npz`.

    A mapping: ``len``, ``in``, ``keys()``, ``values()``, ``items()``. Names are those given to
    ``numpy.savez``; with ``.npy`` behind them they are found as well.

    Attributes:
        files: The names, in the order of the archive's directory.

    Thread safety: safe.
    """

    files: list[str]

    def __init__(self, content: Content, members: list[_Member], *, verify: bool = True) -> None:
        self._content = content
        self._verify = verify
        self._members = {member.name.removesuffix(".npy"): member for member in members}
        if len(self._members) < len(members):
            # "a" beside "a.npy", which NumPy does not write: each is known by its whole name.
            self._members = {member.name: member for member in members}
        self.files = list(self._members)
        for member in members:
            name = member.name.removesuffix(".npy")
            self._members.setdefault(name, member)
            self._members.setdefault(f"{name}.npy", member)

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        """Read an array.

        Returns:
            Array of the shape, dtype and memory order that the file says. Of a stored member a view of the
            archive's memory, read-only if that is, and most often not aligned for its type; of a
            deflated one a new and writable array.

        Raises:
            KeyError: There is no such name.
            ArrayFormatError: The member is damaged (by its CRC, or its own headers), is not an npy file, or
                holds Python objects.
        """
        member = self._members.get(name)
        if member is None:
            raise KeyError(f"{name!r}; there are {', '.join(map(repr, self.files)) or 'none'}")
        begin, end = _data_of(self._content, member)
        content, start, stop, crc = self._content, begin, end, None
        if member.is_deflated:
            content, crc = self._inflate(member, begin, end)
            start, stop = 0, member.size
        elif self._verify:
            crc = _library().crc32(memoryview(content)[start:stop])
        if self._verify and crc != member.crc:
            message = f"is damaged: its CRC-32 is {crc:08x}, not {member.crc:08x}"
            _fail(self._content, message, member.name, begin)
        source = name_of(self._content)
        array, used = array_at(content, start, stop, source=source, member=member.name, at=begin)
        if used != stop:
            message = (
                f"has {stop - used} bytes behind an array of {array.shape} {text_of(array.dtype)}"
            )
            _fail(self._content, message, member.name, begin)
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)

    def __contains__(self, name: object) -> bool:
        return name in self._members

    def __repr__(self) -> str:
        return f"<NpzFile: {', '.join(self.files) or 'empty'}>"

    def _inflate(self, member: _Member, begin: int, end: int) -> tuple[memoryview, int]:
        try:
            return _inflate(memoryview(self._content)[begin:end], member.size, checked=self._verify)
        except _InflateError as error:
            _fail(self._content, str(error), member.name, begin)


class _InflateError(Exception):
    """The stream is damaged, or does not have the size that was said."""


@functools.cache
def _library() -> Any:
    """The module with ``crc32`` and ``decompressobj``, chosen at first use.

    isal computes a CRC nine times as fast as zlib and inflates two to five times as fast.
    """
    try:
        from isal import isal_zlib
    except ImportError:
        return zlib
    return isal_zlib


def _inflate(data: memoryview, size: int, *, checked: bool) -> tuple[memoryview, int]:
    """Inflate a raw deflate stream of known size into new memory, and compute the CRC-32 of each piece.

    Raises:
        _InflateError: The stream is damaged or cut short, or holds more or less than ``size`` bytes. Nothing
            is allocated if so many bytes cannot come out of the stream.
    """
    if size > _MAX_RATIO * len(data):
        most = _MAX_RATIO * len(data)
        raise _InflateError(f"{len(data)} deflated bytes cannot hold {size}: the most is {most}")
    out, library = np.empty(size, np.uint8).data, _library()
    stream = library.decompressobj(-15)
    filled = taken = crc = 0
    given: bytes | memoryview = b""
    # About what makes one piece: of more the rest is copied after each call, of less two threads get in each
    # other's way (0.8 instead of 1.4 times one, where data that cannot be compressed are only copied).
    step = min(max(_PIECE * len(data) // max(size, 1), _LEAST_GIVEN), _PIECE)
    while not stream.eof:
        if not given:
            given = data[taken : taken + step]
            taken += len(given)
        # One byte more than there is room for, so that a stream that goes on shows.
        try:
            piece = stream.decompress(given, min(_PIECE, size - filled + 1))
        except library.error as error:
            raise _InflateError(f"the deflated data are damaged: {error}") from error
        given = stream.unconsumed_tail
        if len(piece) > size - filled:
            raise _InflateError(f"the deflated data hold more than the {size} bytes stated")
        if checked:
            crc = library.crc32(piece, crc)
        out[filled : filled + len(piece)] = piece
        filled += len(piece)
        # isal holds back output with all input taken: only a call that gives nothing is the last.
        if taken == len(data) and not (piece or given or stream.eof):
            break
    else:
        if stream.unused_data or taken < len(data):
            raise _InflateError("the deflated data end before the bytes that are said to be theirs")
    if filled < size or not stream.eof:
        raise _InflateError(f"the deflated data end after {filled} of {size} bytes")
    return out, crc


class _Member(NamedTuple):
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


def _read_directory(content: Content) -> list[_Member]:
    """The members in the order of the directory.

    Raises:
        ArrayFormatError: It is no ZIP archive, is cut short, in several parts, encrypted, compressed in a way
            that is not read, has members that overlap or two of one name, or sizes that do not fit into it.
    """
    if bytes(content[:4]) not in (b"PK\x03\x04", b"PK\x05\x06"):
        _fail(
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
        _fail(content, f"its directory has {directory.stop - offset} bytes too many", offset=offset)
    return _with_limits(content, entries, directory)


def _data_of(content: Content, member: _Member) -> tuple[int, int]:
    """Where the data of a member begin and end in the archive.

    Raises:
        ArrayFormatError: The member's own header is not there, names another one, or its data run into what
            follows.
    """
    start = member.header_offset
    if start + _LOCAL.size > member.limit:
        _fail(content, "its header runs into what follows", member.name, start)
    signature, _, flags, method, *_, name_size, extra_size = _LOCAL.unpack_from(content, start)
    if signature != b"PK\x03\x04":
        _fail(content, f"has no header: {signature!r} stands there", member.name, start)
    begin = start + _LOCAL.size + name_size + extra_size
    end = begin + member.compressed
    if end > member.limit:
        message = (
            f"its {member.compressed} bytes would begin at {begin} and run into what follows at "
            f"{member.limit}"
        )
        _fail(content, message, member.name, start)
    name = content[start + _LOCAL.size : start + _LOCAL.size + name_size]
    _check_flags(content, flags, method, member.name, start)
    if _decode(content, name, flags, start, member.name) != member.name:
        _fail(content, f"its own header calls it {bytes(name)!r}", member.name, start)
    if (method == _DEFLATED) != member.is_deflated:
        _fail(content, "its own header says another compression", member.name, start)
    return begin, end


def _fail(
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
    _fail(content, "is cut short: the directory of the archive is missing", offset=len(content))


def _check_end(content: Content, end: int, fields: tuple[int, ...]) -> _Directory:
    _, disk, directory_disk, num_here, num_entries, size, offset, _ = fields
    locator = end - _END64_LOCATOR.size
    if locator >= 0 and bytes(content[locator : locator + 4]) == b"PK\x06\x07":
        _, disk, end, disks = _END64_LOCATOR.unpack_from(content, locator)
        if disks > 1 or end + _END64.size > locator:
            _fail(content, "its ZIP64 end record is not where it should be", offset=locator)
        signature, _, _, _, disk, directory_disk, num_here, num_entries, size, offset = (
            _END64.unpack_from(content, end)
        )
        if signature != b"PK\x06\x06":
            _fail(content, f"has no ZIP64 end record: {signature!r} stands there", offset=end)
    if disk or directory_disk or num_here != num_entries:
        _fail(content, "is one part of an archive in several", offset=end)
    if offset + size != end:  # less would leave members out without a word
        where = "runs past" if offset + size > end else "ends before"
        _fail(content, f"its directory of {size} bytes at {offset} {where} {end}", offset=end)
    if num_entries * _ENTRY.size > size:
        _fail(content, f"{num_entries} members do not fit into its directory", offset=end)
    return _Directory(num_entries, offset, offset + size)


def _read_entry(content: Content, offset: int, directory: _Directory) -> tuple[_Member, int]:
    if offset + _ENTRY.size > directory.stop:
        _fail(content, "is cut short: its directory ends within a member", offset=offset)
    fields = _ENTRY.unpack_from(content, offset)
    signature, _, _, flags, method, _, _, crc, compressed, size, *lengths = fields
    name_size, extra_size, comment_size, disk, _, _, header = lengths
    if signature != b"PK\x01\x02":
        _fail(content, f"its directory is damaged: {signature!r} stands there", offset=offset)
    name_stop = offset + _ENTRY.size + name_size
    stop = name_stop + extra_size + comment_size
    if stop > directory.stop:
        _fail(content, "is cut short: its directory ends within a member", offset=offset)
    name = _decode(content, content[offset + _ENTRY.size : name_stop], flags, offset)
    _check_flags(content, flags, method, name, offset)
    if _IN_ZIP64 in (size, compressed, header):
        extra = bytes(content[name_stop : name_stop + extra_size])
        size, compressed, header = _read_zip64(
            content, extra, (size, compressed, header), name, offset
        )
    if disk not in (0, 0xFFFF):
        _fail(content, "lies in another part of the archive", name, offset)
    if method == _STORED and compressed != size:
        message = f"is stored in {compressed} bytes, and is said to have {size}"
        _fail(content, message, name, offset)
    return _Member(name, method == _DEFLATED, crc, compressed, size, header, 0), stop


def _check_flags(content: Content, flags: int, method: int, name: str, offset: int) -> None:
    if flags & _ENCRYPTED:
        _fail(content, "is encrypted; write the archive without a password", name, offset)
    if method not in (_STORED, _DEFLATED):
        what = _METHODS.get(method, "unknown")
        message = f"is compressed by method {method} ({what}); stored and deflated ones are read"
        _fail(content, message, name, offset)


def _decode(
    content: Content, name: Content, flags: int, offset: int, member: str | None = None
) -> str:
    raw = bytes(name)
    # Python's codec of cp437 takes 6 us, as long as all else that a stored array costs.
    if raw.isascii():
        return raw.decode("ascii")
    try:
        return raw.decode("utf-8" if flags & _UTF8 else "cp437")
    except UnicodeDecodeError:
        _fail(content, f"has a name that is not UTF-8: {raw!r}", member, offset)


def _read_zip64(
    content: Content, extra: bytes, values: tuple[int, int, int], name: str, offset: int
) -> list[int]:
    """The values, those that do not fit into 32 bits from the extra field."""
    wanted = sum(value == _IN_ZIP64 for value in values)
    numbers = iter(_zip64_numbers(extra, wanted))
    try:
        return [next(numbers) if value == _IN_ZIP64 else value for value in values]
    except StopIteration:
        _fail(content, "its sizes are said to be in a ZIP64 field that is not there", name, offset)


def _zip64_numbers(extra: bytes, wanted: int) -> tuple[int, ...]:
    offset = 0
    while offset + _EXTRA.size <= len(extra):
        kind, size = _EXTRA.unpack_from(extra, offset)
        offset += _EXTRA.size
        if kind == 1 and 8 * wanted <= min(size, len(extra) - offset):
            return struct.unpack_from(f"<{wanted}Q", extra, offset)
        offset += size
    return ()


def _with_limits(content: Content, entries: list[_Member], directory: _Directory) -> list[_Member]:
    """The members with the ends of their room, once it is clear that none overlaps the next."""
    by_place = sorted(range(len(entries)), key=lambda index: entries[index].header_offset)
    limit = directory.offset
    for index in reversed(by_place):
        member = entries[index]
        # What its own header adds in fields is looked at when it is read.
        least = member.header_offset + _LOCAL.size + member.compressed
        if least > limit:
            message = f"overlaps what follows at {limit}: it would end at {least} or later"
            _fail(content, message, member.name, member.header_offset)
        entries[index] = member._replace(limit=limit)
        limit = member.header_offset
    names: set[str] = set()
    for member in entries:
        if member.name in names:
            _fail(content, "is there twice", member.name, member.header_offset)
        names.add(member.name)
    return entries
