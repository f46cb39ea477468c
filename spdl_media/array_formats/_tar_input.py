"""What a tar archive is read from: memory that is shared, or a stream that is never sought in."""

from __future__ import annotations

import io
import os
import stat
from typing import Any, TypeAlias

from spdl_media._remote import open_url
from spdl_media.errors import SourceError
from spdl_media.readers import Content, FileReader, memory_of, name_of

# What is asked of a stream at a time: a header that lies about its size costs no more memory than this, and
# what the stream gives.
_PIECE = 16 * 1024 * 1024
_BUFFER = 256 * 1024


def open_tar_input(src: Any) -> TarInput:
    """Take a source of any kind.

    Raises:
        SourceError: It cannot be opened.
        MissingDependencyError: A URL needs fsspec, or a package that fsspec uses for it.
        TypeError: Not a source.
    """
    if isinstance(src, str) and "://" in src and not src.startswith("file://"):
        remote = open_url(src, name=src, forward=True)
        if isinstance(remote, memoryview):
            return _Memory(remote, src)
        return _Stream(FileReader(remote, src, seekable=False), src, owned=remote)
    if isinstance(src, str | os.PathLike):
        return _open_path(os.fsdecode(os.fspath(src)).removeprefix("file://"))
    if (content := memory_of(src)) is not None:
        return _Memory(content, name_of(content))
    if isinstance(src, io.TextIOBase):
        raise TypeError(
            f"{type(src).__name__} is open in text mode. Open it in binary mode ('rb')."
        )
    if callable(getattr(src, "read", None)):
        label = getattr(src, "name", None)
        name = f"{type(src).__name__} {label!r}" if label else f"{type(src).__name__} object"
        is_file = _status_of(src) is not None
        return _Stream(FileReader(src, name, seekable=False), name, read_ahead=is_file)
    raise TypeError(
        f"cannot read an archive from {type(src).__name__}. Give a path, a URL, bytes or another "
        "contiguous buffer, or a binary file object"
    )


def _open_path(path: str) -> TarInput:
    try:
        file = open(path, "rb", buffering=0)  # noqa: SIM115  # closed with the input
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SourceError(
            f"cannot be read: {reason}. Check the path and the rights to read it.",
            source=path,
            errno=getattr(error, "errno", None),
        ) from error
    status = _status_of(file)
    return _Stream(
        FileReader(file, path, seekable=False),
        path,
        owned=file,
        size=None if status is None else status.st_size,
        read_ahead=status is not None,
    )


def _status_of(file: Any) -> os.stat_result | None:
    """What the system says of a regular file; ``None`` for pipes and whatever has no descriptor."""
    if not isinstance(file, io.FileIO | io.BufferedReader):
        return None
    try:
        status = os.fstat(file.fileno())
    # No file behind it (tarfile and zipfile give such ones), or closed: reading will tell.
    except (OSError, ValueError, AttributeError, TypeError):
        return None
    return status if stat.S_ISREG(status.st_mode) else None


class _Memory:
    """Members are views of the memory."""

    def __init__(self, content: Content, name: str) -> None:
        self.name = name
        self.offset = 0
        self._view = memoryview(content)

    def read(self, size: int) -> memoryview:
        data = self._view[self.offset : self.offset + size]
        self.offset += len(data)
        return data

    def skip(self, size: int) -> int:
        return len(self.read(size))

    def left(self) -> int:
        return len(self._view) - self.offset

    def close(self) -> None:
        """Nothing was opened. Members keep the memory."""


class _Stream:
    """Members are new ``bytes``.

    Args:
        reader: What is read.
        name: What messages call it.
        owned: What is closed with this.
        size: Bytes of a file, if known.
        read_ahead: Read blocks. Else no more is asked for than what must be there, so that no pipe blocks.
    """

    def __init__(
        self,
        reader: FileReader,
        name: str,
        *,
        owned: Any = None,
        size: int | None = None,
        read_ahead: bool = False,
    ) -> None:
        self.name = name
        self.offset = 0
        self._reader = reader
        self._owned = owned
        self._size = size
        self._block_size = _BUFFER if read_ahead else 0
        self._block = b""
        self._position = 0

    def read(self, size: int) -> bytes:
        start = self._position
        stop = start + size
        if stop > len(self._block):
            return self._read_on(size)
        self._position = stop
        self.offset += size
        # With the GIL, some 10 us for all of a block. Members above 64 KiB by os.pread, which lets it go,
        # took 1.15 times as long in one thread and in two.
        return self._block[start:stop]

    def skip(self, size: int) -> int:
        left = size
        while left and (data := self.read(min(left, _BUFFER))):
            left -= len(data)
        return size - left

    def left(self) -> int | None:
        return None if self._size is None else max(0, self._size - self.offset)

    def close(self) -> None:
        if self._owned is not None:
            self._owned.close()

    def _read_on(self, size: int) -> bytes:
        """Give what is left of the block and what follows it."""
        if (left := self.left()) is not None:
            size = min(size, left)  # no memory is asked for that the file cannot fill
        data = self._block[self._position :]
        missing = size - len(data)
        self._block, self._position = b"", 0
        pieces = [data] if data else []
        while missing > 0 and (data := self._pull(missing)):
            pieces.append(data)
            missing -= len(data)
        if missing < 0:
            self._block, self._position = data, len(data) + missing
            pieces[-1] = data[:missing]
        joined = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self.offset += len(joined)
        return joined

    def _pull(self, missing: int) -> bytes:
        data = self._reader.read(min(max(missing, self._block_size), _PIECE))
        if not data:
            self._reader.check()  # an interrupt ends the reading without an exception
        return data


TarInput: TypeAlias = _Memory | _Stream
"""Bytes one after the other: ``read`` gives less than asked for only at the end."""
