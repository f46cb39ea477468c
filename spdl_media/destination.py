"""Write files atomically: under a temporary name until they are complete."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
from pathlib import Path
from reprlib import repr as short
from typing import Any, Protocol, Self, TypeAlias

from spdl_media.errors import WriteError, without_password


class Writable(Protocol):
    """A binary file object."""

    def write(self, data: bytes, /) -> Any:
        """Write data; may return the number of bytes written, if it is less than all.

        Raises:
            Exception: Any class. The function that writes to the destination raises WriteError from it.
        """


Target: TypeAlias = str | os.PathLike[str] | Writable
"""A path, or a binary file object with ``write``."""

_CHUNK = 1 << 20


class WriteErrors:
    """Turn exceptions of the operating system or a file object in a ``with`` block into WriteErrors."""

    # Not a generator: on CPython 3.12 and 3.13, its frame and the error form a cycle, which keeps the data.

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception):
            text = getattr(error, "strerror", None) or repr(error)
            raise WriteError(
                f"cannot be written: {text}", source=self._name, errno=getattr(error, "errno", None)
            ) from error


def check_target(dst: object) -> None:
    """Raise unless a destination is a path or a file object, before anything is done with the data.

    Raises:
        TypeError: ``dst`` is neither.
    """
    if not isinstance(dst, str | os.PathLike) and not callable(getattr(dst, "write", None)):
        raise TypeError(
            f"dst, the first argument, must be a path or a binary file object with write, not {short(dst)}"
        )


def write_whole(dst: Target, data: bytes) -> None:
    """Write a file from its whole content. If it fails, no file is left.

    Raises:
        TypeError: ``dst`` is neither a path nor a file object.
        WriteError: The destination cannot be written.
    """
    with Draft(dst) as draft, WriteErrors(draft.name):
        draft.path.write_bytes(data)


class Draft:
    """A file that is being written: in the folder of its destination, or a temporary file for a file object.

    Use it in a ``with`` block. If the block ends without an error, the file is moved to its destination;
    otherwise it is removed.

    Attributes:
        name: Name of the destination in messages.
        path: Path of the file to write.

    Raises:
        TypeError: The destination is neither a path nor a file object.
        ValueError: The destination is a URL.
        WriteError: The destination is a folder or a device, its name is not that of a file, or a temporary
            file cannot be created.
    """

    def __init__(self, dst: Target) -> None:
        check_target(dst)
        self._dst: Any = dst
        self._final: Path | None = None
        if isinstance(dst, str | os.PathLike):
            self.name = os.fsdecode(dst)
            if "://" in self.name:
                raise ValueError(
                    f"{without_password(self.name)} is a URL; write to fsspec.open(url, 'wb') or another "
                    "file object"
                )
            # Resolved, so that a link stays and its target is replaced. Also, FFmpeg could mistake a relative
            # path with a colon for a protocol.
            # A name may be too long, or have characters that no name has.
            with WriteErrors(self.name):
                self._final = final = Path(self.name).resolve()
                is_other = final.exists() and not final.is_file()
            if is_other:
                text = "this is a folder or a device; give the path of a file"
                raise WriteError(text, source=self.name)
            # Shortened, because names are limited, nearly everywhere to 255 bytes. The suffix is kept,
            # because it tells the file format.
            self.path = final.with_name(f".{final.stem[:40]}.{os.urandom(6).hex()}{final.suffix}")
        else:
            self.name = str(getattr(dst, "name", f"<{type(dst).__name__}>"))
            # The name may be a URL, so keep only a plausible suffix: no file format has a longer one, or one
            # with other characters.
            suffix = Path(self.name).suffix[:16]
            import tempfile

            with WriteErrors(self.name):
                number, path = tempfile.mkstemp(suffix=suffix if suffix[1:].isalnum() else "")
            os.close(number)
            self.path = Path(path)

    def complete(self) -> None:
        """Rename the file to its destination, or write its content to the file object.

        Raises:
            WriteError: The file cannot be renamed or read, or the file object fails.
        """
        with WriteErrors(self.name):
            if self._final is not None:
                if self._final.exists():
                    self.path.chmod(stat.S_IMODE(self._final.stat().st_mode))
                self.path.replace(self._final)
                return
            with self.path.open("rb") as file:
                while rest := memoryview(file.read(_CHUNK)):
                    while rest:
                        count = self._dst.write(rest)
                        # A raw file that is not ready returns None; other objects may always return None.
                        if count is None and not isinstance(self._dst, io.RawIOBase):
                            count = len(rest)
                        if not count or count < 0:
                            raise BlockingIOError(errno.EAGAIN, f"write() returned {count}")
                        rest = rest[count:]

    def remove(self) -> None:
        """Remove the file; without effect after :meth:`complete`."""
        with contextlib.suppress(OSError):
            self.path.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self.complete()
        finally:
            self.remove()
