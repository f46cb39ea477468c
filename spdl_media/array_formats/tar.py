"""Reader of tar archives, one member after the other, without seeking.

:mod:`tarfile` reads the same archives at a fifth of the speed, and treats some damage as the end of the
archive.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import NoReturn

from spdl_media.errors import ArrayFormatError
from spdl_media.inputs import Input, Source, local_path, open_input
from spdl_media.readers import Content

__all__ = ("iter_tarfile",)

_BLOCK = 512
_NO_BLOCK = bytes(_BLOCK)

_FIELDS = struct.Struct("<100s24x12s12x8s1s100x6s82x155s12x")
_CHECKSUM_AT_SPACES = 8 * 0x20
_WANTED = (b"path", b"size")
_SPARSE_KEYS = b"GNU.sparse."
_SPARSE_NAME = b"GNU.sparse.name"

_REGULAR = frozenset({b"0", b"\0", b"7"})
# Links, devices, directories and FIFOs: no data follows them, even if their size is not 0.
_WITHOUT_DATA = frozenset({b"1", b"2", b"3", b"4", b"5", b"6"})
_LONG_NAME, _LONG_LINK = b"L", b"K"
_PAX, _PAX_GLOBAL, _PAX_SOLARIS = b"x", b"g", b"X"
_SPECIAL = frozenset({_LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL, _PAX_SOLARIS})
_REFUSED = {
    b"S": "is a sparse file, which is not read; write it again with tar without --sparse",
    b"M": "goes on from another volume; write one archive, without --multi-volume",
}
# Longer names and pax headers count as damage.
_MAX_HEADER_SIZE = 1 << 20
_PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\xfd7zXZ": "lzma", b"\x28\xb5\x2f\xfd": "zstd"}

_BLOCK_SIZE = 256 * 1024


def iter_tarfile(src: Source) -> Generator[tuple[str, bytes | memoryview], None, None]:
    """Iterate over the regular files of a tar archive: ustar, GNU and pax.

    Args:
        src: The archive: bytes, any contiguous buffer, a 1-D uint8 array; a path; a URL; or a file object
            with ``read``, such as a pipe or the file of a socket. A file object is read from its current
            position, never seeked, and no read requests more bytes than the archive must still have. Data
            after the end of the archive is ignored.

    Yields:
        ``(name, content)``, in the order of the archive. ``content`` is a view of the given memory (read-only
        if that is), and new ``bytes`` for all other sources. Names are unchanged: they may contain ``..`` or
        a leading ``/``, and bytes that are not UTF-8 become surrogates, as in :mod:`tarfile`. Nothing is
        extracted to disk. Directories, links and devices are skipped.

    Raises:
        ArrayFormatError: The source is not a tar archive; it is damaged (each header has a checksum, the
            contents have none); it has a sparse file or the rest of a file from another volume; or it is cut
            short, also between two members: an archive ends with a block of zeros. The error has the name of
            the member and the offset.
        SourceError: The source cannot be opened or read.
        TypeError: ``src`` is not a source.

    Errors are raised when the iteration reaches them, and errors of opening at the first step.

    Thread safety: one thread at a time, as any generator. Files are read without the GIL. Members are copied
    from blocks of up to 256 KiB with the GIL, which takes some microseconds.

    See:
        https://pubs.opengroup.org/onlinepubs/9799919799/utilities/pax.html
    """
    with closing(Archive(src)) as archive:
        yield from archive.members()


class _HeaderError(ValueError):
    """A header is damaged, or of an unknown form."""


def _in_blocks(read: Callable[[int, int], Content]) -> Callable[[int, int], Content]:
    """Return a function that reads the members of a local file one after the other, many at a time."""
    place, block = 0, b""

    def read_part(start: int, size: int) -> Content:
        nonlocal place, block
        if size > _BLOCK_SIZE:
            return read(start, size)
        if not place <= start <= start + size <= place + len(block):
            place, block = start, bytes(read(start, _BLOCK_SIZE))
        return block[start - place : start - place + size]

    return read_part


class Archive:
    """An archive that is read from beginning to end.

    Args:
        src: The archive. Of an :class:`~spdl_media.inputs.Input`, only the headers are read, and all contents
            are empty.

    Attributes:
        name: Name of the archive in messages.
        offset: Offset of the last header that was read.
        member_offset: Offset of the last member, including the extra headers that belong to it.

    Raises:
        SourceError: The source cannot be opened.
        MissingDependencyError: A URL needs fsspec, or a package that fsspec uses for it.
        TypeError: ``src`` is not a source.
    """

    def __init__(self, src: Source | Input) -> None:
        self._headers_only = isinstance(src, Input)
        self._input = src if isinstance(src, Input) else open_input(src, forward=True)
        self.name, read = self._input.name, self._input.read_at
        is_file = self._input.is_local and local_path(src) is not None
        self._read = _in_blocks(read) if is_file else read
        # The size of a stream is not known.
        self._size = self._input.size() if self._input.seekable else None
        self.offset = self.member_offset = 0
        # Offset of the next byte to read.
        self._position = 0
        self._member: str | None = None
        # Records of "g" headers, for all later members, and of "L" and "x" headers, for the next member only.
        self._global_records: dict[bytes, bytes] = {}
        self._next_records: dict[bytes, bytes] = {}

    def close(self) -> None:
        """Close the source, unless the caller owns it. An ``Input`` is closed by its owner."""
        if not self._headers_only:
            self._input.close()

    def members(self) -> Iterator[tuple[str, bytes | memoryview]]:
        """Iterate over names and contents of the regular files.

        Raises:
            ArrayFormatError: The archive is damaged or cut short, or has a member of an unsupported kind.
            SourceError: The source cannot be read.
            TypeError: ``read`` of a file object does not return bytes.
        """
        padding = 0
        while True:
            # Read the padding of the last member and the next header at once.
            self.offset = self._position + padding
            block = bytes(self._read(self._position, padding + _BLOCK)[padding:])
            self._position = self.offset + _BLOCK
            if block == _NO_BLOCK:
                if self._next_records:
                    where = "behind it " if self._member is not None else ""
                    self.fail(f"the pax header or long name {where}belongs to no member")
                return
            if not self._next_records:
                self.member_offset = self.offset
            size, kind = self._next_header(block)
            padding = 0 if kind in _WITHOUT_DATA else -size % _BLOCK
            if kind in _REGULAR:
                yield self._member or "", self._take(size)
            elif kind in _SPECIAL:
                self._read_special(size, kind)
            elif kind not in _WITHOUT_DATA:
                self._take(size)

    def fail(self, message: str, cause: Exception | None = None) -> NoReturn:
        """Raise an error about the current member.

        Raises:
            ArrayFormatError: Always.
        """
        raise ArrayFormatError(
            message, source=self.name, member=self._member, offset=self.offset
        ) from cause

    def _next_header(self, block: bytes) -> tuple[int, bytes]:
        """Parse a header and set the name of the member; return size and kind."""
        try:
            if not block and self.offset:
                raise _HeaderError("is missing: the archive is cut short, without an end mark")
            if len(block) < _BLOCK:
                raise _HeaderError(f"is cut short after {len(block)} bytes")
            name, size, kind = _parse_header(block)
            if kind in _SPECIAL:
                return size, kind
            if self._next_records or self._global_records:
                records, self._next_records = {**self._global_records, **self._next_records}, {}
                name, size, kind = _with_pax(records, name, size, kind)
        except _HeaderError as error:
            if self.offset == 0:
                for magic, packer in _PACKED.items():
                    if block.startswith(magic):
                        text = f"is packed by {packer}; unpack it on the way in, as with {packer}.open(...)"
                        self.fail(text)
                text = f"is not a tar archive: its header {error}; it begins with {block[:16]!r}"
                self.fail(text, error)
            self._fail_at_header(str(error), error)
        self._member = str(name, "utf-8", "surrogateescape")
        if kind in _REFUSED:
            self.fail(_REFUSED[kind])
        return size, kind

    def _take(self, size: int) -> Content:
        """Read the content of a member."""
        # Check before reading: a damaged size may exceed the memory.
        left = size if self._size is None else max(0, self._size - self._position)
        if left < size:
            self.fail(f"is cut short: {left} of {size} bytes are there")
        if self._headers_only:
            if self._global_records:
                self.fail(
                    "stands behind a pax header that renames or resizes all members, so it is not read by "
                    "its position. Write the archive again, or read it by iter_samples"
                )
            self._position += size
            return b""
        data = self._read(self._position, size)
        if len(data) < size:
            self.fail(f"is cut short: {len(data)} of {size} bytes are there")
        self._position += size
        return data

    def _read_special(self, size: int, kind: bytes) -> None:
        """Read an extra header, which describes the next member or all later ones."""
        what = "a pax header or long name"
        if size > _MAX_HEADER_SIZE:
            self._fail_at_header(f"has {what} of {size} bytes, above the limit {_MAX_HEADER_SIZE}")
        data = bytes(self._read(self._position, size))
        if len(data) < size:
            self._fail_at_header(f"is cut short: {len(data)} of {size} bytes of {what} are there")
        self._position += size
        if kind == _LONG_NAME:
            self._next_records[b"path"] = data.partition(b"\0")[0]
        elif kind != _LONG_LINK:
            try:
                records = _parse_pax(data)
            except _HeaderError as error:
                self._fail_at_header(str(error), error)
            (self._global_records if kind == _PAX_GLOBAL else self._next_records).update(records)

    def _fail_at_header(self, message: str, cause: Exception | None = None) -> NoReturn:
        """Raise an error about the header that is being read. The message names the member before it."""
        what = "a header" if self._member is None else "the header behind it"
        self.fail(f"{what} {message}", cause)


def _parse_header(block: bytes) -> tuple[bytes, int, bytes]:
    """Parse name, size and kind of a header of ustar, GNU tar or the older V7 tar.

    Raises:
        _HeaderError: The checksum is wrong, or the size cannot be read.
    """
    name, size_field, checksum_field, kind, magic, prefix = _FIELDS.unpack(block)
    # The lower half of Adler-32 is 1 + the sum of the bytes, exact for 256 bytes. It takes 0.3 us for both
    # parts, sum() 1.5 us, of about 2 us for a whole member.
    total = (zlib.adler32(block[:256]) & 0xFFFF) + (zlib.adler32(block[256:]) & 0xFFFF) - 2
    try:
        stored = _parse_number(checksum_field)
    except _HeaderError:
        stored = -1  # never equal to a sum
    if total - sum(checksum_field) + _CHECKSUM_AT_SPACES != stored:
        raise _HeaderError("has a wrong checksum, so it is damaged, or no header of tar")
    name = name.partition(b"\0")[0]
    if magic == b"ustar\0" and prefix[0]:
        name = prefix.partition(b"\0")[0] + b"/" + name
    if kind == b"\0" and name.endswith(b"/"):
        kind = b"5"  # old archives mark directories by a slash only
    return name, _parse_number(size_field), kind


def _parse_number(field: bytes) -> int:
    """Parse a number in octal digits or, as GNU tar writes large ones, in binary with the first bit set."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    # After the terminating zero there may be digits of an older number, from programs that reuse a buffer.
    digits = field.partition(b"\0")[0].strip(b" ") or b"0"
    if not digits.isdigit() or b"8" in digits or b"9" in digits:
        raise _HeaderError(f"has {field!r} where a number of octal digits is due")
    return int(digits, 8)


def _parse_pax(data: bytes) -> dict[bytes, bytes]:
    """Parse the records ``length keyword=value`` of a pax header, and keep those about the data.

    Raises:
        _HeaderError: A record has another form, or is longer than the header.
    """
    records: dict[bytes, bytes] = {}
    offset = 0
    while offset < len(data) and data[offset]:
        space = data.find(b" ", offset, offset + 20)
        digits = data[offset:space] if space >= 0 else b""
        stop = offset + int(digits) if digits.isdigit() else 0
        key, equals, value = data[space + 1 : stop].partition(b"=")
        if stop > len(data) or not (equals and key and value.endswith(b"\n")):
            raise _HeaderError(
                f"has a pax header that cannot be read from {data[offset:][:20]!r} on"
            )
        if key in _WANTED or key.startswith(_SPARSE_KEYS):
            records[key] = value[:-1]
        offset = stop
    return records


def _with_pax(
    records: dict[bytes, bytes], name: bytes, size: int, kind: bytes
) -> tuple[bytes, int, bytes]:
    """Return name, size and kind of a member, as overridden by pax records."""
    if any(key.startswith(_SPARSE_KEYS) for key in records):
        kind = b"S"
    size_text = records.get(b"size", b"")
    if size_text and not (size_text.isdigit() and len(size_text) <= 20):
        raise _HeaderError(f"has a pax header with the size {size_text!r}")
    name = records.get(_SPARSE_NAME) or records.get(b"path") or name
    return name, int(size_text) if size_text else size, kind
