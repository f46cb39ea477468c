"""Members of a tar archive, one after the other, without seeking."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import NoReturn

from spdl_media.array_formats import _tar_header
from spdl_media.array_formats._tar_header import BLOCK, ChecksumError, Header, HeaderError
from spdl_media.array_formats._tar_input import TarInput, open_tar_input
from spdl_media.array_formats.errors import ArrayFormatError
from spdl_media.inputs import Source

__all__ = ("iter_tarfile",)

# Names and pax headers longer than this are taken for damage.
_MAX_HEADER_SIZE = 1 << 20
# Members above this are compared with what is left before they are read. A short read of smaller ones takes
# no memory worth the look, which is 2 % of the time of those of 10 KB.
_LARGE = 64 * 1024
_PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\xfd7zXZ": "lzma", b"\x28\xb5\x2f\xfd": "zstd"}


def iter_tarfile(src: Source) -> Generator[tuple[str, bytes | memoryview], None, None]:
    """Iterate over the regular files of a tar archive: ustar, GNU and pax.

    Args:
        src: The archive: bytes, any contiguous buffer, a 1-D uint8 array; a path; a URL; or a file object
            with ``read``, which is read from where it is and never sought in (a pipe, a socket's file). What
            follows the end of the archive is left out. Of a regular file some of it may have been read, in
            blocks of 256 KiB; of all else nothing.

    Yields:
        ``(name, content)``, in the order of the archive. ``content`` is a view of memory that was given
        (read-only if that is), or new ``bytes`` of all other sources. Names are as they stand there,
        ``..`` and a leading ``/`` included, and bytes that are not UTF-8 come as surrogates, as in
        :mod:`tarfile`: nothing is written anywhere. Directories, links and devices are left out.

    Raises:
        ArrayFormatError: Not a tar archive, damaged (each header has a checksum; the files themselves have
            none), a sparse file, the rest of a file from another volume, or cut short, also between two
            members: an archive ends with a block of zeros. The error names the member and the place.
        SourceError: The source cannot be opened or read.
        TypeError: Not a source.

    All errors come when the iteration reaches them, those of opening at the first step.

    Thread safety: one thread at a time, as any generator. Files are read without the GIL; members are cut out
    of the blocks of up to 256 KiB with it, which takes some microseconds.

    See:
        https://pubs.opengroup.org/onlinepubs/9799919799/utilities/pax.html
    """
    source = open_tar_input(src)
    try:
        yield from Archive(source).members()
    finally:
        source.close()


class Archive:
    """The headers of an archive, and what those before a member say of it."""

    def __init__(self, source: TarInput) -> None:
        self._source = source
        self._member: str | None = None
        self._header_offset = 0
        # What "g" headers say of all members after them, and "L" and "x" headers of the next one.
        self._of_all: dict[bytes, bytes] = {}
        self._of_next: dict[bytes, bytes] = {}
        self._long_name: bytes | None = None

    def members(self) -> Iterator[tuple[str, bytes | memoryview]]:
        source = self._source
        padding = 0
        while True:
            # The rest of the last member's blocks and the next header, in one read.
            self._header_offset = source.offset + padding
            block = bytes(source.read(padding + BLOCK)[padding:])
            if block == _tar_header.NO_BLOCK:
                self._check_end()
                return
            header = self._next_header(block)
            size = header.size
            padding = -size % BLOCK
            if header.kind in _tar_header.REGULAR:
                if size > _LARGE:
                    self._check_left(size)
                data = source.read(size)
                if len(data) < size:
                    self._fail_cut(size, len(data))
                yield self._member or "", data
            elif header.kind in _tar_header.WITHOUT_DATA:
                padding = 0
            else:
                self._read_special(header)

    def _next_header(self, block: bytes) -> Header:
        if len(block) < BLOCK:
            self._fail_end(block)
        try:
            header = _tar_header.parse_header(block)
            is_special = header.kind in _SPECIAL
            if not is_special and (self._of_next or self._of_all or self._long_name):
                header = self._apply(header)
        except HeaderError as error:
            self._fail_header(block, error)
        if not is_special:
            self._member = str(header.name, "utf-8", "surrogateescape")
        if header.kind == _tar_header.SPARSE:
            self.fail(
                "is a sparse file, which is not read; write it anew with tar without --sparse"
            )
        if header.kind == _tar_header.CONTINUED:
            self.fail("goes on from another volume; write one archive, without --multi-volume")
        return header

    def _apply(self, header: Header) -> Header:
        if self._long_name:
            header = header._replace(name=self._long_name)
        header = _tar_header.with_pax(header, {**self._of_all, **self._of_next})
        self._of_next, self._long_name = {}, None
        return header

    def _read_special(self, header: Header) -> None:
        """Read a header that says something of the next member; leave out all others."""
        if header.kind not in _SPECIAL:
            if (there := self._source.skip(header.size)) < header.size:
                self._fail_cut(header.size, there)
            return
        if header.size > _MAX_HEADER_SIZE:
            what = f"has a pax header or long name of {header.size} bytes"
            self.fail(f"{self._behind()}{what}; {_MAX_HEADER_SIZE} are the most read")
        data = bytes(self._source.read(header.size))
        if len(data) < header.size:
            found = f"{len(data)} of {header.size} bytes of a pax header or long name are there"
            self.fail(f"{self._behind()}is cut short: {found}")
        if header.kind == _tar_header.LONG_NAME:
            self._long_name = data.partition(b"\0")[0]
        elif header.kind != _tar_header.LONG_LINK:
            self._read_pax(header, data)

    def _read_pax(self, header: Header, data: bytes) -> None:
        try:
            records = _tar_header.parse_pax(data)
        except HeaderError as error:
            self.fail(f"{self._behind()}{error}", error)
        (self._of_all if header.kind == _tar_header.PAX_GLOBAL else self._of_next).update(records)

    def _check_end(self) -> None:
        if self._of_next or self._long_name:
            where = "behind it " if self._member is not None else ""
            self.fail(f"the pax header or long name {where}belongs to no member")

    def _fail_header(self, block: bytes, error: HeaderError) -> NoReturn:
        message = f"{self._behind()}{error}"
        if self._header_offset == 0 and isinstance(error, ChecksumError):
            message = f"is not a tar archive: it begins with {block[:16]!r}"
        self._check_unpacked(block)
        self.fail(message, error)

    def _check_unpacked(self, block: bytes) -> None:
        for magic, name in _PACKED.items():
            if self._header_offset == 0 and block.startswith(magic):
                self.fail(f"is packed by {name}; unpack it on the way in, as with {name}.open(...)")

    def _behind(self) -> str:
        """What begins a message about the header that is being read: the last member is named before it."""
        return "the header behind it " if self._member is not None else ""

    def _fail_end(self, block: bytes) -> NoReturn:
        self._check_unpacked(block)
        if self._header_offset == 0:
            self.fail(f"is not a tar archive: it has {len(block)} bytes, less than a header")
        where = "within the header behind it" if block else "behind it: there is no end mark"
        self.fail(f"the archive is cut short {where}")

    def _check_left(self, size: int) -> None:
        left = self._source.left()
        if left is not None and left < size:
            self._fail_cut(size, left)

    def _fail_cut(self, size: int, there: int) -> NoReturn:
        self.fail(f"is cut short: {there} of {size} bytes are there")

    def fail(self, message: str, cause: Exception | None = None) -> NoReturn:
        """Raise what is wrong with the member that was read last, or stands here."""
        raise ArrayFormatError(
            message, source=self._source.name, member=self._member, offset=self._header_offset
        ) from cause


_SPECIAL = frozenset(
    {
        _tar_header.LONG_NAME,
        _tar_header.LONG_LINK,
        _tar_header.PAX,
        _tar_header.PAX_GLOBAL,
        _tar_header.PAX_SOLARIS,
    }
)
