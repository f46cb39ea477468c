"""Where files are written: under a name of their own until they are complete."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, Self, TypeAlias

from spdl_media.errors import WriteError


class Writable(Protocol):
    """A binary file object."""

    def write(self, data: bytes, /) -> Any:
        """Write the data; return how much of it was written, if not all."""


Target: TypeAlias = "str | os.PathLike[str] | Writable"
"""A path, or a binary file object with ``write``."""

_CHUNK = 1 << 20


@contextlib.contextmanager
def write_errors(name: str) -> Iterator[None]:
    """Turn what the operating system or a file object raises in a block into WriteErrors.

    Raises:
        WriteError: Something was raised.
    """
    try:
        yield
    except Exception as error:
        text = getattr(error, "strerror", None) or repr(error)
        number = getattr(error, "errno", None)
        raise WriteError(f"cannot be written: {text}", source=name, errno=number) from error


def write_whole(dst: Target, data: bytes) -> None:
    """Write a file of which all content is known, or none of it.

    Raises:
        TypeError: ``dst`` is neither a path nor a file object.
        WriteError: It cannot be written.
    """
    with Draft(dst) as draft, write_errors(draft.name):
        draft.path.write_bytes(data)


class Draft:
    """A file that is not complete yet: beside its destination, or a temporary one for a file object.

    A ``with`` block that ends without an error completes it, and any other leaves nothing behind.

    Attributes:
        name: What messages call the destination.
        path: Where to write.

    Raises:
        TypeError: The destination is neither a path nor a file object.
        ValueError: It is a URL.
        WriteError: There is a folder or a device of this name, or no room for a temporary file.
    """

    def __init__(self, dst: Target) -> None:
        self._dst: Any = dst
        self._final: Path | None = None
        if isinstance(dst, str | os.PathLike):
            self.name = os.fspath(dst)
            if "://" in self.name:
                raise ValueError(
                    f"{self.name} is a URL; write to fsspec.open(url, 'wb') or another file object"
                )
            # A link stays, and what it leads to is replaced. With a root, FFmpeg takes no name for a
            # protocol's.
            self._final = final = Path(self.name).resolve()
            if final.exists() and not final.is_file():
                text = "this is a folder or a device; give the path of a file"
                raise WriteError(text, source=self.name)
            # Names have a limit, nearly everywhere of 255 bytes. The suffix tells the file format.
            hidden = f".{final.stem[:40]}.{secrets.token_hex(6)}{final.suffix}"
            self.path = final.with_name(hidden)
        elif callable(getattr(dst, "write", None)):
            self.name = str(getattr(dst, "name", f"<{type(dst).__name__}>"))
            # What it is called may be a URL. No file format has a longer suffix, or other signs in it.
            suffix = Path(self.name).suffix[:16]
            with write_errors(self.name):
                number, path = tempfile.mkstemp(suffix=suffix if suffix[1:].isalnum() else "")
            os.close(number)
            self.path = Path(path)
        else:
            raise TypeError(f"dst must be a path or a binary file object with write, not {dst!r}")

    def complete(self) -> None:
        """Give the file its name, or its content to the file object.

        Raises:
            WriteError: The file cannot be renamed or read, or the file object fails.
        """
        with write_errors(self.name):
            if self._final is not None:
                self.path.replace(self._final)
                return
            with self.path.open("rb") as file:
                while rest := memoryview(file.read(_CHUNK)):
                    # Raw files take a part, and say how much; others may say nothing.
                    while rest:
                        count = self._dst.write(rest)
                        rest = rest[len(rest) if count is None else count :]

    def remove(self) -> None:
        """Leave nothing behind; without effect on a file that is complete."""
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
