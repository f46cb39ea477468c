"""Reader of npz files (ZIP archives of npy files) in memory.

Directories that NumPy writes are parsed here, in a fourth of the time of :mod:`zipfile`. All other archives
(with a comment, above 4 GiB, or with names in old encodings) are parsed by :mod:`zipfile`. In both cases, a
member that overlaps the next one is an error.
"""

from __future__ import annotations

import functools
import io
import struct
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from spdl_media._checks import check_int
from spdl_media.array_formats.npy import array_at, text_of
from spdl_media.errors import ArrayFormatError
from spdl_media.inputs import Buffer
from spdl_media.readers import Content, ViewReader, content_of, name_of

__all__ = ("NpzFile", "load_npz")

# Maximum compression ratio of Deflate: 258 bytes from two bits.
_MAX_RATIO = 1032

_STORED, _DEFLATED = 0, 8
_ENCRYPTED = 0x0001 | 0x0040
_IN_ZIP64, _COUNT_IN_ZIP64 = 0xFFFFFFFF, 0xFFFF

# Records of the ZIP format, without versions, times and attributes.
_END = struct.Struct("<4s4H2LH")
_ENTRY = struct.Struct("<4s4x2H4x3L3H8xL")
_LOCAL = struct.Struct("<4s2x2H16x2H")


class _Member(NamedTuple):
    """A file of the archive, as described by the directory. ``start`` is the offset of its own header."""

    name: str
    flags: int
    method: int
    crc: int
    compressed: int
    size: int
    start: int


# The corresponding attributes of zipfile.ZipInfo, in the same order.
_MEMBER_OF = attrgetter(
    *("orig_filename", "flag_bits", "compress_type", "CRC"),
    *("compress_size", "file_size", "header_offset"),
)


def load_npz(
    data: Buffer | np.ndarray[Any, Any],
    *,
    max_uncompressed_bytes: int = 1 << 30,
    verify: bool = True,
) -> NpzFile:
    """Open an npz file that ``numpy.savez`` or ``numpy.savez_compressed`` has written.

    Only the directory is read here. Each access to an array checks its CRC-32, unless ``verify=False``, and
    inflates a compressed array. So keep an array that is needed again.

    Args:
        data: The file's content: bytes, any contiguous buffer, a 1-D uint8 array or CPU tensor. It is kept,
            not copied.
        max_uncompressed_bytes: Maximum total size of all compressed members after decompression. Uncompressed
            arrays are views and do not count.
        verify: Whether to check the CRC-32 of each array when it is read. Without the check, uncompressed
            arrays cost almost no time, and damage to their values is not detected.

    Returns:
        A mapping from names to arrays.

    Raises:
        ArrayFormatError: The data is not a ZIP archive or is cut short, or members are encrypted, overlap,
            have the same name, use another compression, have contradictory sizes, or exceed the limit.
        TypeError: ``data`` is not memory (a path, for example).
        ValueError: The limit is negative.

    Thread safety: safe. CRC, decompression and copies of more than 64 KiB run without the GIL. They are
    several times as fast with isal (``pip install ".[isal]"``).

    See:
        https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT
    """
    check_int("max_uncompressed_bytes", max_uncompressed_bytes, at_least=0, unit=" bytes")
    content = content_of(data, "an npz file")
    try:
        members, directory = _read_directory(content)
        limits = _check_members(members, directory, max_uncompressed_bytes)
    except ArrayFormatError as error:
        error.source = name_of(content)
        raise
    return NpzFile(content, members, limits, verify=verify)


class NpzFile(Mapping[str, np.ndarray[Any, Any]]):
    """Arrays of an npz file by name. Made by :func:`load_npz`.

    It is a mapping with ``len``, ``in``, ``keys()``, ``values()`` and ``items()``. Names are those that were
    given to ``numpy.savez``; names with the suffix ``.npy`` work as well.

    Attributes:
        files: The names, in the order of the archive's directory.

    Thread safety: safe.
    """

    files: list[str]

    def __init__(
        self, content: Content, members: list[_Member], limits: list[int], *, verify: bool
    ) -> None:
        self._content = content
        self._limits = limits
        self._verify = verify
        self._members = {member.name.removesuffix(".npy"): member for member in members}
        if len(self._members) < len(members):
            # An archive with "a" and "a.npy", which NumPy does not write: use the full names.
            self._members = {member.name: member for member in members}
        self.files = list(self._members)

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        """Read an array.

        Returns:
            Array with the shape, dtype and memory order of the file. For an uncompressed member, it is a view
            of the archive's memory, read-only if that is, and often not aligned for its dtype. For a
            compressed member, it is a new and writable array.

        Raises:
            KeyError: There is no array with this name.
            ArrayFormatError: The member is damaged (by its CRC or its own headers), is not an npy file, or
                contains Python objects.
        """
        member = self._find(name)
        if member is None:
            raise KeyError(f"{name!r}; there are {', '.join(map(repr, self.files)) or 'none'}")
        begin = member.start
        try:
            begin, end = self._place_of(member)
            return self._read(member, begin, end)
        except ArrayFormatError as error:
            error.source, error.member, error.offset = name_of(self._content), member.name, begin
            raise

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)

    def __contains__(self, name: object) -> bool:
        return self._find(name) is not None

    def __repr__(self) -> str:
        return f"<NpzFile: {', '.join(self.files) or 'empty'}>"

    def _find(self, name: Any) -> _Member | None:
        if (member := self._members.get(name)) is not None or not isinstance(name, str):
            return member
        bare = name.removesuffix(".npy")
        return self._members.get(bare) or self._members.get(f"{bare}.npy")

    def _place_of(self, member: _Member) -> tuple[int, int]:
        """Return begin and end of a member's data by its own header, which must agree with the directory."""
        # Offset of the next member or of the directory.
        limit = self._limits[bisect_right(self._limits, member.start)]
        signature, flags, method, name_size, extra_size = _LOCAL.unpack_from(
            self._content, member.start
        )
        if signature != b"PK\x03\x04":
            raise ArrayFormatError(f"has no header: {signature!r} stands there")
        # By the member's own header, because its extra fields may differ from those in the directory.
        begin = member.start + _LOCAL.size + name_size + extra_size
        end = begin + member.compressed
        if end > limit:
            raise ArrayFormatError(
                f"its {member.compressed} bytes would begin at {begin} and run into what follows at {limit}"
            )
        if flags & _ENCRYPTED or method != member.method:
            raise ArrayFormatError(f"its own header says otherwise: {method=}, {flags=:#x}")
        return begin, end

    def _read(self, member: _Member, begin: int, end: int) -> np.ndarray[Any, Any]:
        content = self._content
        if member.method == _DEFLATED:
            content = _inflate(memoryview(content)[begin:end], member.size)
            begin, end = 0, member.size
        if self._verify:
            crc = _library().crc32(memoryview(content)[begin:end])
            if crc != member.crc:
                raise ArrayFormatError(f"is damaged: its CRC-32 is {crc:08x}, not {member.crc:08x}")
        array, used = array_at(content, begin, end)
        if used != end:
            raise ArrayFormatError(
                f"has {end - used} bytes behind an array of {array.shape} {text_of(array.dtype)}"
            )
        return array


@functools.cache
def _library() -> Any:
    """Return the module with ``crc32`` and ``decompressobj``: isal if it is installed, otherwise zlib.

    isal computes a CRC nine times as fast as zlib and inflates two to five times as fast.
    """
    try:
        from isal import isal_zlib
    except ImportError:
        return zlib
    return isal_zlib


def _inflate(data: memoryview, size: int) -> memoryview:
    """Inflate a raw deflate stream of known size into new and writable memory.

    Raises:
        ArrayFormatError: The stream is damaged or cut short, or does not have exactly ``size`` bytes. No
            memory is allocated if a stream of this length cannot have so many bytes.
    """
    most = _MAX_RATIO * len(data)
    if size > most:
        raise ArrayFormatError(f"{len(data)} deflated bytes cannot hold {size}: the most is {most}")
    library = _library()
    # Negative window bits: the stream has no zlib header.
    stream = library.decompressobj(-15)
    try:
        # Allow one byte more, to detect a stream that is too long. Decompress all at once: each call releases
        # the GIL and copies the input that is left.
        out = stream.decompress(data, size + 1)
        # isal may hold back output after it has read all input, so call it until it returns nothing.
        while not stream.eof and len(out) <= size:
            more = stream.decompress(stream.unconsumed_tail, size + 1 - len(out))
            if not more:
                break
            out += more
    except library.error as error:
        raise ArrayFormatError(f"the deflated data are damaged: {error}") from error
    if len(out) > size:
        raise ArrayFormatError(f"the deflated data hold more than the {size} bytes stated")
    if len(out) < size or not stream.eof:
        raise ArrayFormatError(f"the deflated data end after {len(out)} of {size} bytes")
    if stream.unused_data:
        raise ArrayFormatError("the deflated data end before the bytes that are said to be theirs")
    # No other reference to these bytes exists, so a writable array can share their memory without a copy.
    address, _ = np.frombuffer(out, np.uint8).__array_interface__["data"]
    interface = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}
    # The namespace keeps the bytes alive as long as the array exists.
    return np.asarray(SimpleNamespace(bytes=out, __array_interface__=interface)).data


def _read_directory(content: Content) -> tuple[list[_Member], int]:
    """Return the members in the order of the directory, and the offset of the directory."""
    if (begin := bytes(content[:4])) not in (b"PK\x03\x04", b"PK\x05\x06"):
        raise ArrayFormatError(
            f"is not an npz file (a ZIP archive): it begins with {begin!r}", offset=0
        )
    end = len(content) - _END.size
    if end < 0 or bytes(content[end : end + 4]) != b"PK\x05\x06":
        return _read_by_zipfile(content)  # an archive with a comment, or no archive
    _, *parts, count, size, start, _ = _END.unpack_from(content, end)
    if _IN_ZIP64 in (size, start) or count == _COUNT_IN_ZIP64:
        return _read_by_zipfile(content)
    # Both disk numbers are 0 in an archive of one file.
    if start + size != end or parts != [0, 0, count]:
        raise _damaged(f"{count} members in {size} bytes at {start} are not all before {end}", end)
    members = _read_entries(content, start, end, count)
    return (members, start) if members is not None else _read_by_zipfile(content)


def _read_entries(content: Content, offset: int, stop: int, count: int) -> list[_Member] | None:
    """Parse the entries of a directory; ``None`` if one has a name in cp437 or 64-bit sizes."""
    members = []
    for _ in range(count):
        if offset + _ENTRY.size > stop:
            raise _damaged("it ends within a member", offset)
        signature, flags, method, crc, compressed, size, *lengths, start = _ENTRY.unpack_from(
            content, offset
        )
        if signature != b"PK\x01\x02":
            raise _damaged(f"{signature!r} stands there", offset)
        name_start = offset + _ENTRY.size
        offset = name_start + sum(lengths)
        if offset > stop:
            raise _damaged("it ends within a member", stop)
        raw_name = bytes(content[name_start : name_start + lengths[0]])
        if _IN_ZIP64 in (compressed, size, start) or not raw_name.isascii():
            return None
        members.append(_Member(raw_name.decode(), flags, method, crc, compressed, size, start))
    if offset != stop:
        raise _damaged(f"its {count} members end at {offset}, and it at {stop}", stop)
    return members


def _damaged(what: str, offset: int) -> ArrayFormatError:
    return ArrayFormatError(f"is cut short, or its directory is damaged: {what}", offset=offset)


def _read_by_zipfile(content: Content) -> tuple[list[_Member], int]:
    """Read the directory by :mod:`zipfile`."""
    import zipfile

    file: Any = io.BytesIO(content) if isinstance(content, bytes) else ViewReader(content)
    try:
        archive = zipfile.ZipFile(file)
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error) as error:
        raise _damaged(str(error), len(content)) from error
    return [_Member(*_MEMBER_OF(info)) for info in archive.infolist()], archive.start_dir


def _check_members(members: list[_Member], directory: int, allowed: int) -> list[int]:
    """Check the members; return the sorted offsets of members and directory."""
    names: set[str] = set()
    limits = sorted([member.start for member in members])
    limits.append(directory)
    if limits[0] != 0:  # a damaged directory may omit members
        raise _damaged(f"the member at 0 is not in it, but the one at {limits[0]}", directory)
    total = 0
    for member in members:
        total += member.size if member.method == _DEFLATED else 0
        # The extra fields of its own header are checked when the member is read.
        least = member.start + _LOCAL.size + member.compressed
        limit = limits[min(bisect_right(limits, member.start), len(members))]
        message = None
        if member.name in names:
            message = "is there twice"
        elif member.flags & _ENCRYPTED:
            message = "is encrypted; write the archive without a password"
        elif member.method not in (_STORED, _DEFLATED):
            message = f"is compressed by method {member.method}; stored and deflated ones (0 and 8) are read"
        elif member.method == _STORED and member.compressed != member.size:
            message = f"is stored in {member.compressed} bytes, and is said to have {member.size}"
        elif least > limit:
            message = f"overlaps what follows at {limit}: it would end at {least} or later"
        elif total > allowed:
            message = (
                f"with it the deflated members are {total} bytes, and {allowed} are "
                "allowed. If the file can be trusted, give max_uncompressed_bytes"
            )
        if message is not None:
            raise ArrayFormatError(message, member=member.name, offset=member.start)
        names.add(member.name)
    return limits
