"""Readers through which FFmpeg reads memory and file objects.

The caller's objects are not passed to PyAV directly: it copies whatever ``read`` returns into FFmpeg's
buffer without checking the length.
"""

from __future__ import annotations

import errno
import inspect
import io
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np

from spdl_media.errors import SourceError

__all__ = ()

T = TypeVar("T")

# Largest size of a single read from a file object.
_PIECE = 16 * 1024 * 1024


def memory_of(src: Any) -> bytes | memoryview | None:
    """Return the memory of bytes, buffers, arrays and tensors as flat bytes, without a copy.

    Returns:
        The memory; ``None`` if ``src`` is none of these.

    Raises:
        TypeError: The memory is on a GPU, or not uint8.
        ValueError: The memory is not 1-D, or not contiguous.
    """
    if isinstance(src, bytes):
        return src
    # The attribute of PyTorch's tensors raises AttributeError on the CPU.
    if hasattr(src, "__cuda_array_interface__"):
        raise TypeError(
            f"{type(src).__name__} is in the memory of a GPU; copy it with .cpu() or .get()"
        )
    if hasattr(src, "__array__"):
        return _array_content(src)
    try:
        view = memoryview(src)
    except TypeError:
        return None
    if not view.c_contiguous:
        raise ValueError(
            f"the buffer of {type(src).__name__} is not C-contiguous (shape {view.shape}, strides "
            f"{view.strides}); copy it with bytes(...)"
        )
    return flat(view)


def _array_content(src: Any) -> memoryview:
    try:
        array = np.asarray(src)
    except RuntimeError as error:  # raised by PyTorch for tensors that NumPy cannot view
        raise TypeError(
            f"an encoded file in a tensor is 1-D uint8 on the CPU, this one NumPy cannot view: {error}"
        ) from error
    what = f"{type(src).__name__} of {array.dtype} with shape {array.shape}"
    if array.dtype != np.uint8:
        raise TypeError(f"an encoded file in an array is 1-D uint8, this is a {what}")
    if array.ndim != 1:
        raise ValueError(f"an encoded file in an array is 1-D uint8, this is a {what}")
    if not array.flags.c_contiguous:
        raise ValueError(f"the {what} is not contiguous; copy it with numpy.ascontiguousarray")
    return array.data


def flat(view: memoryview) -> memoryview:
    """Return the bytes of a C-contiguous view of any type.

    Raises:
        BufferError: The view is not C-contiguous.
    """
    # NumPy, because memoryview.cast refuses formats such as "<B".
    return np.frombuffer(view, np.uint8).data if view.nbytes else memoryview(b"")


Content: TypeAlias = bytes | memoryview
"""A whole file in memory: ``bytes``, or a flat view of another buffer."""


def content_of(data: Any, format: str) -> Content:
    """Return the memory of an argument of a public function, without a copy.

    Raises:
        TypeError: The argument is not bytes, a buffer or a uint8 array.
        ValueError: The memory is not contiguous.
    """
    content = None if isinstance(data, str | os.PathLike) else memory_of(data)
    if content is None:
        raise TypeError(
            f"{format} is read from bytes, another contiguous buffer or a 1-D uint8 array, not "
            f"{type(data).__name__}. Read the file first: pathlib.Path(...).read_bytes(), or mmap."
        )
    return content


def name_of(content: Content) -> str:
    """Return the name of content in messages."""
    return f"bytes of length {len(content)}"


def path_error(name: str, error: OSError | ValueError) -> SourceError:
    """Make the error for a path that cannot be read, with the operating system's reason and a remedy."""
    if not isinstance(error, OSError):
        return SourceError(f"is not a path: {error}", source=name, errno=errno.EINVAL)
    start = f"a relative one starts at {str(Path.cwd())!r}"
    if name.startswith("~"):
        start = "'~' is not expanded: os.path.expanduser does that"
    elif name.startswith(("http:/", "https:/")):
        start = "a URL is a str with '://', of which pathlib removes a slash"
    remedy = {
        errno.ENOENT: f"Check the path; {start}",
        errno.EISDIR: "Give one of the files in it",
        errno.EACCES: "Check the owner and mode of the file and of the folders above it",
        errno.EPERM: "Check the owner and mode of the file and of the folders above it",
    }.get(error.errno or 0, "Check the disk, and that the file can be read by other programs")
    reason = error.strerror or str(error)
    return SourceError(f"cannot be read: {reason}. {remedy}.", source=name, errno=error.errno)


class Readable(Protocol):
    """A binary file-like object. ``seek`` is used if present; ``tell`` is not needed."""

    def read(self, size: int = ..., /) -> Any:
        """Return up to ``size`` bytes; empty only at the end.

        Raises:
            Exception: Any class. The function that reads the source raises SourceError from it.
        """
        ...


class Positioned:
    """Base of readers with a known size: keeps the read position."""

    # Returns the size of the file in bytes.
    size: Callable[[], int]
    _position = 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position, as in ``io``, and return it."""
        # The origin of SEEK_SET is 0.
        origin = self.size() if whence == io.SEEK_END else self._position * (whence == io.SEEK_CUR)
        self._position = max(0, origin + offset)
        return self._position

    def tell(self) -> int:
        return self._position


class ViewReader(Positioned):
    """A flat buffer as a seekable file. ``read`` copies only the requested bytes."""

    def __init__(self, view: memoryview) -> None:
        self._view = view

    def size(self) -> int:
        return len(self._view)

    def read(self, size: int = -1) -> bytes:
        """Return up to ``size`` bytes, or all remaining bytes if it is negative."""
        stop = len(self._view) if size < 0 else self._position + size
        data = bytes(self._view[self._position : stop])
        self._position += len(data)
        return data

    def close(self) -> None:
        """Release the buffer, because PyAV's container keeps this object alive."""
        self._view = memoryview(b"")


class FileReader:
    """Adapts a file object for FFmpeg: reads from byte 0 and returns ``bytes`` of at most the requested size.

    FFmpeg calls ``read`` and ``seek`` from C code, through which Python errors cannot pass. So the first
    error is kept in ``failure`` (a :class:`SourceError`, if the file raised it), and all further reads
    report the end of the file, because a source that has lost bytes cannot be trusted.

    Args:
        file: The file object. If it is seekable, it is read from its first byte, else from its position.
        name: Name in messages.
        seekable: Whether the file can seek.
        restore: Position to restore when it is released.
        owned: Close the file when it is released.

    Thread safety: one thread at a time.
    """

    def __init__(
        self,
        file: Any,
        name: str,
        *,
        seekable: bool,
        restore: int | None = None,
        owned: bool = False,
    ) -> None:
        # Not "name", which PyAV would pass to FFmpeg: it reads larger pieces if the name is an HTTP URL.
        self.label = name
        self._file = file
        self._restore = restore
        self._owned = owned
        self._seekable = seekable
        self._head, self._position, self._ended = b"", 0, False
        self.failure: BaseException | None = None

    def seekable(self) -> bool:
        """Whether FFmpeg may seek; PyAV calls this."""
        return self._seekable

    def head(self, size: int) -> bytes:
        """Return the first bytes of the file. If it cannot seek, they are kept and read again by FFmpeg.

        Raises:
            ValueError: The file cannot seek, was read past its head, and more bytes are requested.
        """
        if len(self._head) < size:
            # Bytes read past the head are not kept.
            if not self._seekable and self._position > len(self._head):
                raise ValueError(
                    f"{self.label}: {size} bytes of its head were asked for after it was read "
                    f"past {len(self._head)}, and it cannot seek. Ask before opening it."
                )
            self._head += self.peek(len(self._head), size - len(self._head))
        return self._head[:size]

    def peek(self, start: int, size: int) -> bytes:
        """Return up to ``size`` bytes, joined from short reads. A seekable file keeps its position.

        Raises:
            SourceError: The file cannot be read.
        """
        pieces = []
        if self._seekable:
            self._move(start)
        # In a loop, because sockets and pipes return short reads; in pieces, because a header may be wrong.
        while size > 0 and (data := self._pull(min(size, _PIECE), start)):
            pieces.append(data)
            size -= len(data)
            start += len(data)
        if self._seekable:
            self._move(self._position)
        return b"".join(pieces)

    def size(self) -> int:
        """Return the size in bytes of a seekable file, whose position is kept.

        Raises:
            SourceError: The file cannot seek to its end.
        """
        size = self._move(0, io.SEEK_END)
        self._move(self._position)
        return size

    def read_all(self) -> bytes:
        """Return the whole content. It is not copied if a seekable file returns it as ``bytes``.

        Raises:
            ValueError: The file cannot seek, and some of it has been read.
        """
        if self._seekable:
            self._move(0)
            data = self._pull(None, 0)
            missing = self.size() - len(data)  # some classes return less than all
            return data + self.peek(len(data), missing) if missing > 0 else data
        if self._position:
            raise ValueError(f"{self.label}: it cannot seek, and some of it has been read")
        rest = self._pull(None, len(self._head))
        self._position = len(self._head) + len(rest)
        return self._head + rest

    def rewind(self) -> None:
        """Go back to the first byte.

        Raises:
            ValueError: The file cannot seek, and more than its head has been read.
        """
        if self._seekable:
            self._move(0)
        elif self._position > len(self._head):
            text = "it cannot seek, so it can be opened only once. Read it into bytes instead"
            raise ValueError(f"{self.label}: {text}.")
        self._position = 0

    def detach(self) -> None:
        """Release the file, because PyAV's container keeps this object alive."""
        if self._restore is not None:
            # The file may be closed or broken by now, which is not an error of this call.
            with suppress(Exception):
                self._file.seek(self._restore)
        if self._owned and self._file is not None:
            self._file.close()
        self._file = self._restore = None
        self._head, self.failure = b"", None

    def check(self) -> None:
        """Raise the error that stopped reading, if there was one.

        Raises:
            SourceError: A read or seek failed.
        """
        if self.failure is not None:
            raise self.failure

    def read(self, size: int) -> bytes:
        """Return up to ``size`` bytes; empty only at the end. An error is also kept in ``failure``.

        Raises:
            SourceError: The file cannot be read.
            TypeError: The file returns something else than bytes.
        """
        # The kept head of a file that cannot seek comes first.
        kept = b"" if self._seekable else self._head[self._position : self._position + size]
        data = kept or self._called(b"", self._pull, size, self._position)
        self._position += len(data)
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position, as in ``io``. Return it, or FFmpeg's error code after an earlier failure.

        Raises:
            SourceError: The file cannot seek there. The error is also kept in ``failure``.
        """
        position = self._called(-errno.EIO, self._move, offset, whence)
        if position >= 0:
            self._position = position
        return position

    def tell(self) -> int:
        return self._position

    def _called(self, otherwise: T, call: Callable[..., T], *args: int) -> T:
        """Call a function and keep its first failure; after a failure, return ``otherwise``."""
        if self.failure is not None:
            return otherwise
        try:
            return call(*args)
        except BaseException as error:
            # PyAV raises an exception when FFmpeg returns, but stores only one and prints a second one to
            # stderr. It does not pass on KeyboardInterrupt; check() raises that.
            self.failure = error
            if isinstance(error, Exception):
                raise
            return otherwise

    def _move(self, offset: int, whence: int = io.SEEK_SET) -> int:
        try:
            position = self._file.seek(offset, whence)
            # Some file-like objects return nothing from seek().
            return int(self._file.tell() if position is None else position)
        except Exception as error:  # a file object may raise any class
            raise self._source_error("seek", error, self._position) from error

    def _pull(self, size: int | None, position: int) -> bytes:
        """Read from the file, whose position is ``position``."""
        if self._ended:  # a stream may wait for another writer, or warn of an endless loop
            return b""
        try:
            data = self._file.read() if size is None else self._file.read(size)
        except Exception as error:  # a file object may raise any class
            raise self._source_error("read", error, position) from error
        if data is None:
            raise self._source_error("read", BlockingIOError(errno.EAGAIN, "no data yet"), position)
        if not isinstance(data, bytes | bytearray | memoryview):
            raise TypeError(
                f"{self.label}: a file object must give bytes from read(), this one gave "
                f"{type(data).__name__}. Open the file in binary mode ('rb')."
            )
        if size is not None and len(data) > size:
            # PyAV would write them past the end of its buffer, because it does not check the length.
            too_many = ValueError(f"read({size}) gave {len(data)} bytes")
            raise self._source_error("read", too_many, position)
        self._ended = not (self._seekable or data or size == 0)
        if self._ended and type(self._file).__module__ == "http.client" and self._file.length:
            # Its read() returns nothing at the end, but also if the connection broke.
            raise self._source_error("read", ConnectionError("it broke off"), position)
        # Copied, because a view may refer to memory that the file reuses for its next read.
        return data if type(data) is bytes else bytes(data)

    def _source_error(self, verb: str, error: Exception, position: int) -> SourceError:
        return SourceError(
            f"its {verb}() failed at byte {position}: {type(error).__name__}: {error}. "
            "Nothing after that byte was used; reopen the source to try again.",
            source=self.label,
            errno=error.errno if isinstance(error, OSError) else None,
        )


def read_file_object(file: Any, name: str | None, *, forward: bool = False) -> FileReader:
    """Wrap a caller's file object. ``detach`` restores the position of a seekable one.

    Args:
        file: The file object.
        name: Name in messages, instead of the file's own name.
        forward: Read from the current position, and never seek.

    Raises:
        TypeError: The file is open in text mode or not for reading, or asynchronous.
        ValueError: The file is closed.
        SourceError: The position of the file cannot be determined.
    """
    if name is None:
        # The name of a file opened by descriptor is an int.
        label, kind = getattr(file, "name", None), type(file).__name__
        name = f"{kind} {label!r}" if isinstance(label, str | int) else f"{kind} object"
    if isinstance(file, io.TextIOBase):
        raise TypeError(f"{name} is open in text mode. Open it in binary mode ('rb').")
    if getattr(file, "closed", False):
        raise ValueError(f"{name} is closed. Give it open, or give its path.")
    if callable(getattr(file, "readable", None)) and not file.readable():
        raise TypeError(f"{name} is not open for reading. Open it in mode 'rb'.")
    if inspect.iscoroutinefunction(file.read):
        raise TypeError(f"{name}: its read() is asynchronous. Pass the content: await file.read().")
    position = None if forward else _position(file, name)
    return FileReader(file, name, seekable=position is not None, restore=position)


def _position(file: Any, name: str) -> int | None:
    """Return the position of a file object; ``None`` if it cannot seek."""
    if not callable(getattr(file, "seek", None)):
        return None
    try:
        # A pipe has seek() and tell(), too; only seekable() tells that they fail.
        says = callable(getattr(file, "seekable", None))
        if says and not file.seekable():
            return None
        has_tell = callable(getattr(file, "tell", None))
        position = int(file.tell() if has_tell else file.seek(0, io.SEEK_CUR))
        # Without seekable(), only an attempt tells whether seek() works.
        if not says:
            file.seek(position)
        return position
    except io.UnsupportedOperation:
        return None
    except Exception as error:  # a file object may raise any class
        raise SourceError(
            f"its tell() failed: {type(error).__name__}: {error}", source=name
        ) from error
