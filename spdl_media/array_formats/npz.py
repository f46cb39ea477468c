"""Arrays by name out of an npz file (a ZIP archive of npy files) in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from spdl_media.array_formats import _zip
from spdl_media.array_formats._checked import InflateError, crc32, inflate
from spdl_media.array_formats._content import Content, content_of, name_of
from spdl_media.array_formats._zip import Member
from spdl_media.array_formats.npy import array_at

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ("NpzFile", "load_npz")


def load_npz(
    data: Buffer | np.ndarray[Any, Any], *, max_uncompressed_bytes: int = 1 << 30
) -> NpzFile:
    """Open an npz file, as ``numpy.savez`` and ``numpy.savez_compressed`` write it.

    Only the directory is read here. Each access to an array checks its CRC-32, and inflates it if it is
    deflated: keep the array rather than asking for it again.

    Args:
        data: The file's content: bytes, any contiguous buffer, a 1-D uint8 array or CPU tensor. It is kept,
            not copied.
        max_uncompressed_bytes: How much all deflated members together may inflate to. Arrays that are stored
            take no memory and do not count.

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
    members = _zip.read_directory(content)
    total = 0
    for member in members:
        total += member.size if member.is_deflated else 0
        if total > max_uncompressed_bytes:
            message = (
                f"with it the deflated members are {total} bytes, and {max_uncompressed_bytes} are "
                "allowed. If the file can be trusted, give max_uncompressed_bytes"
            )
            _zip.fail(content, message, member.name, member.header_offset)
    return NpzFile(content, members)


class NpzFile(Mapping[str, np.ndarray[Any, Any]]):
    """Arrays by name. Made by :func:`load_npz`.

    A mapping: ``len``, ``in``, ``keys()``, ``values()``, ``items()``. Names are those given to
    ``numpy.savez``; with ``.npy`` behind them they are found as well.

    Attributes:
        files: The names, in the order of the archive's directory.

    Thread safety: safe.
    """

    files: list[str]

    def __init__(self, content: Content, members: list[Member]) -> None:
        self._content = content
        self._members = {member.name.removesuffix(".npy"): member for member in members}
        if len(self._members) < len(members):
            # "a" beside "a.npy"; the one without an ending is found by its whole name alone.
            self._members = {member.name: member for member in members}
        self.files = list(self._members)

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
        member = self._find(name)
        begin, end = _zip.data_of(self._content, member)
        content, start, stop = self._content, begin, end
        if member.is_deflated:
            content, start, stop = self._inflate(member, begin, end), 0, member.size
        if (crc := crc32(memoryview(content)[start:stop])) != member.crc:
            message = f"is damaged: its CRC-32 is {crc:08x}, not {member.crc:08x}"
            _zip.fail(self._content, message, member.name, begin)
        source = name_of(self._content)
        array, used = array_at(content, start, stop, source=source, member=member.name, at=begin)
        if used != stop:
            message = f"has {stop - used} bytes behind an array of {array.shape} {array.dtype}"
            _zip.fail(self._content, message, member.name, begin)
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)

    def __contains__(self, name: object) -> bool:
        return name in self._members or (
            isinstance(name, str) and name.removesuffix(".npy") in self._members
        )

    def __repr__(self) -> str:
        return f"<NpzFile: {', '.join(self.files) or 'empty'}>"

    def _find(self, name: str) -> Member:
        member = self._members.get(name) or self._members.get(name.removesuffix(".npy"))
        if member is None:
            raise KeyError(f"{name!r}; there are {', '.join(map(repr, self.files)) or 'none'}")
        return member

    def _inflate(self, member: Member, begin: int, end: int) -> memoryview:
        try:
            return inflate(memoryview(self._content)[begin:end], member.size).data
        except InflateError as error:
            _zip.fail(self._content, str(error), member.name, begin)
