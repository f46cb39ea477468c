"""Where files are written: under a name of their own until they are complete, or into a file object."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from spdl_media.errors import WriteError


class Writable(Protocol):
    """A binary file object."""

    def write(self, data: bytes, /) -> Any:
        """Write the data; return how much of it was written, if not all."""


Target: TypeAlias = "str | os.PathLike[str] | Writable"
"""A path, or a binary file object with ``write`` and, for formats that go back, ``seek`` and ``tell``."""


def path_of(dst: Target) -> Path | None:
    """The path of a destination; ``None``: it is a file object.

    Raises:
        TypeError: It is neither.
        ValueError: It is a URL.
        WriteError: There is a folder or a device of this name.
    """
    if not isinstance(dst, str | os.PathLike):
        if not callable(getattr(dst, "write", None)):
            raise TypeError(f"dst must be a path or a binary file object with write, not {dst!r}")
        return None
    name = os.fspath(dst)
    if "://" in name:
        raise ValueError(f"{name} is a URL; write to fsspec.open(url, 'wb') or another file object")
    # A link stays, and what it leads to is replaced. With a root, FFmpeg takes no name for a protocol's.
    path = Path(name).resolve()
    if path.exists() and not path.is_file():
        raise WriteError("this is a folder or a device; give the path of a file", source=name)
    return path


def beside(path: Path) -> Path:
    """A name in the same folder, with the same suffix, for a file that is not complete yet."""
    # Names have a limit, nearly everywhere of 255 bytes.
    return path.with_name(f".{path.stem[:40]}.{secrets.token_hex(6)}{path.suffix}")


def remove(path: Path) -> None:
    """Remove a file that was not completed, if it was begun."""
    with contextlib.suppress(OSError):
        path.unlink()


@contextlib.contextmanager
def write_errors(name: str) -> Iterator[None]:
    """Turn errors of the operating system in a block into WriteErrors."""
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        text = f"cannot be written: {error.strerror or error}"
        raise WriteError(text, source=name, errno=error.errno) from error


def write_whole(dst: Target, data: bytes) -> None:
    """Write a file of which all content is known, or none of it.

    Raises:
        TypeError: ``dst`` is neither a path nor a file object.
        WriteError: It cannot be written.
    """
    path = path_of(dst)
    if path is None:
        FileSink(dst).write(data)
        return
    hidden = beside(path)
    try:
        with write_errors(str(dst)):
            hidden.write_bytes(data)
            hidden.replace(path)
    finally:
        remove(hidden)


class FileSink:
    """A file object of the caller's, as FFmpeg writes to it.

    Attributes:
        name: What messages call it.
        failure: What writing to it raised first.
        closed: Nothing more is to be written.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self.name = str(getattr(file, "name", f"<{type(file).__name__}>"))
        self.failure: BaseException | None = None
        self.closed = False
        can_seek = getattr(file, "seekable", lambda: hasattr(file, "seek"))
        if can_seek():
            self.seek, self.tell = self._seek, file.tell

    def write(self, data: bytes) -> int:
        """Write all of the data; raw files take a part.

        Raises:
            WriteError: The file object fails.
        """
        rest = memoryview(data)
        try:
            while rest:
                count = self._file.write(rest)
                rest = rest[len(rest) if count is None else count :]
        except BaseException as error:
            raise self._failed(error) from error
        return len(data)

    def _seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        try:
            position: int = self._file.seek(offset, whence)
        except BaseException as error:
            raise self._failed(error) from error
        return position

    def _failed(self, error: BaseException) -> WriteError:
        # FFmpeg's callbacks pass on no KeyboardInterrupt, so it is kept for the Muxer.
        self.failure = self.failure or error
        number = getattr(error, "errno", None)
        return WriteError(f"writing to it failed: {error!r}", source=self.name, errno=number)
