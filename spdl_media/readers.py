"""Readers for what is no local file: memory and file objects.

Nothing of the caller's is handed to PyAV directly: it copies whatever ``read`` gives into FFmpeg's buffer.
"""

from __future__ import annotations

import errno
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

# What a file is asked for at a time, at most.
_PIECE = 16 * 1024 * 1024


def memory_of(src: Any) -> bytes | memoryview | None:
    """The memory behind bytes, buffers, arrays and tensors, as flat bytes, without a copy.

    Returns:
        ``None`` for what is none of them.

    Raises:
        TypeError: It is memory of a GPU, or not uint8.
        ValueError: It is not 1-D, or not contiguous.
    """
    if isinstance(src, bytes):
        return src
    # PyTorch's CPU tensors raise AttributeError here, those on a GPU do not.
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
    except RuntimeError as error:  # PyTorch's word for tensors that NumPy cannot view
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
    """The bytes of any C-contiguous view.

    Raises:
        BufferError: The view is not C-contiguous.
    """
    # Not memoryview.cast, which refuses formats such as "<B".
    return np.frombuffer(view, np.uint8).data if view.nbytes else memoryview(b"")


Content: TypeAlias = bytes | memoryview
"""A whole file in memory: ``bytes``, or a flat view of another buffer."""


def content_of(data: Any, format: str) -> Content:
    """The memory behind the argument of a public function, without a copy.

    Raises:
        TypeError: It is no memory.
        ValueError: It is not contiguous.
    """
    content = None if isinstance(data, str | os.PathLike) else memory_of(data)
    if content is None:
        raise TypeError(
            f"{format} is read from bytes, another contiguous buffer or a 1-D uint8 array, not "
            f"{type(data).__name__}. Read the file first: pathlib.Path(...).read_bytes(), or mmap."
        )
    return content


def name_of(content: Content) -> str:
    """Name of such a source in messages."""
    return f"bytes of length {len(content)}"


def path_error(name: str, error: OSError | ValueError) -> SourceError:
    """Make the error for a path that cannot be read, with the system's reason and a remedy."""
    if not isinstance(error, OSError):
        return SourceError(f"is not a path: {error}", source=name, errno=errno.EINVAL)
    reason = error.strerror or str(error)
    remedy = {
        errno.ENOENT: f"Check the path; a relative one starts at {str(Path.cwd())!r}",
        errno.EISDIR: "Give one of the files in it",
        errno.EACCES: "Check the owner and mode of the file and of the folders above it",
        errno.EPERM: "Check the owner and mode of the file and of the folders above it",
    }.get(error.errno or 0, "Check the disk, and that the file can be read by other programs")
    return SourceError(f"cannot be read: {reason}. {remedy}.", source=name, errno=error.errno)


class Readable(Protocol):
    """A binary file-like object. ``seek`` is used if it has one; ``tell`` is not needed."""

    def read(self, size: int = ..., /) -> Any:
        """Give up to ``size`` bytes, and none only at the end.

        Raises:
            Exception: Of any class. Whoever reads then gets a SourceError, whose cause it is.
        """
        ...


class Positioned:
    """Base of readers with a known size: keeps the position of the next byte."""

    _position = 0

    def size(self) -> int:
        """Bytes in the file.

        Raises:
            NotImplementedError: The class does not define it.
        """
        raise NotImplementedError

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a byte, as in ``io``; give its position."""
        # SEEK_SET counts from 0.
        origin = self.size() if whence == io.SEEK_END else self._position * (whence == io.SEEK_CUR)
        self._position = max(0, origin + offset)
        return self._position

    def tell(self) -> int:
        return self._position


class ViewReader(Positioned):
    """A flat buffer as a seekable file. ``read`` copies the piece asked for, never the whole."""

    def __init__(self, view: memoryview) -> None:
        self._view = view

    def size(self) -> int:
        return len(self._view)

    def read(self, size: int = -1) -> bytes:
        """Give up to ``size`` bytes, all that are left if it is negative."""
        stop = len(self._view) if size < 0 else self._position + size
        data = bytes(self._view[self._position : stop])
        self._position += len(data)
        return data

    def close(self) -> None:
        """Let go of the buffer, which PyAV's container would keep alive."""
        self._view = memoryview(b"")


class FileReader:
    """A file object as FFmpeg needs it: from byte 0, in ``bytes`` of at most the size asked for.

    FFmpeg calls ``read`` and ``seek`` back from its own code, where Python errors cannot pass. So the first
    error is kept in ``failure`` (a :class:`SourceError`, if the file raised it), and after it there is only
    the end of the file: a source that has lost bytes is not to be trusted any more.

    Args:
        file: What is read. If it can seek, it is used from its first byte, otherwise from where it is.
        name: What messages call it.
        seekable: Whether it can seek.
        restore: The position to leave it at.
        owned: Close it when it is let go of.

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
        # Not "name": PyAV would give it to FFmpeg, which reads more at a time from an address of HTTP.
        self.label = name
        self._file = file
        self._restore = restore
        self._owned = owned
        self._seekable = seekable
        self._head = b""
        self._position = 0
        self.failure: BaseException | None = None

    def seekable(self) -> bool:
        """PyAV asks, and FFmpeg cannot seek where it is False."""
        return self._seekable

    def head(self, size: int) -> bytes:
        """The first bytes of the file. Those of a file that cannot seek are kept and read again.

        Raises:
            ValueError: More of them than before, of a file that cannot seek and was read on.
        """
        if len(self._head) < size:
            # What was read past the head is gone.
            if not self._seekable and self._position > len(self._head):
                raise ValueError(
                    f"{self.label}: {size} bytes of its head were asked for after it was read "
                    f"past {len(self._head)}, and it cannot seek. Ask before opening it."
                )
            self._head += self.peek(len(self._head), size - len(self._head))
        return self._head[:size]

    def peek(self, start: int, size: int) -> bytes:
        """Up to ``size`` bytes, joined from short reads. A file that can seek keeps its position.

        Raises:
            SourceError: They cannot be read.
        """
        pieces = []
        if self._seekable:
            self._move(start)
        # Sockets and pipes give what they have, but a signature must be read whole. Pieces: a size that a
        # damaged header states costs no more memory than one of them, and what the file gives.
        while size > 0 and (data := self._pull(min(size, _PIECE), start)):
            pieces.append(data)
            size -= len(data)
            start += len(data)
        if self._seekable:
            self._move(self._position)
        return b"".join(pieces)

    def size(self) -> int:
        """Bytes in a file that can seek; the position stays.

        Raises:
            SourceError: The file cannot tell.
        """
        size = self._move(0, io.SEEK_END)
        self._move(self._position)
        return size

    def read_all(self) -> bytes:
        """The whole content: a new ``bytes`` object, and not a copy of what the file gave.

        Raises:
            ValueError: It cannot seek, and some of it has been read.
        """
        if self._seekable:
            self._move(0)
            data = self._pull(None, 0)
            self._move(self._position)
            return data
        if self._position:
            raise ValueError(f"{self.label}: it cannot seek, and some of it has been read")
        rest = self._pull(None, len(self._head))
        self._position = len(self._head) + len(rest)
        return self._head + rest

    def rewind(self) -> None:
        """Go back to the first byte, for the next one who reads.

        Raises:
            ValueError: It cannot seek, and more than its head has been read.
        """
        if self._seekable:
            self._move(0)
        elif self._position > len(self._head):
            raise ValueError(
                f"{self.label}: it cannot seek, so it can be opened only once. "
                "Read it into bytes to use it again."
            )
        self._position = 0

    def detach(self) -> None:
        """Let go of the file, which PyAV's container would keep alive."""
        if self._restore is not None:
            # It may be closed or broken by now, and the caller asked nothing of it here.
            with suppress(Exception):
                self._file.seek(self._restore)
        if self._owned and self._file is not None:
            self._file.close()
        self._file = self._restore = None
        self._head = b""
        self.failure = None

    def check(self) -> None:
        """Raise the error that has stopped the reading, if there was one.

        Raises:
            SourceError: A read or seek failed.
        """
        if self.failure is not None:
            raise self.failure

    def read(self, size: int) -> bytes:
        """Give up to ``size`` bytes, and none only at the end.

        Raises:
            SourceError: The file cannot be read; it is kept in ``failure``.
            TypeError: The file gives something else than bytes, likewise.
        """
        # The head of a file that cannot seek is given a second time.
        kept = b"" if self._seekable else self._head[self._position : self._position + size]
        data = kept or self._called(b"", self._pull, size, self._position)
        self._position += len(data)
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a byte, as in ``io``; give its position, or FFmpeg's code of an error.

        Raises:
            SourceError: The file cannot seek there; it is kept in ``failure``.
        """
        position = self._called(-errno.EIO, self._move, offset, whence)
        if position >= 0:
            self._position = position
        return position

    def tell(self) -> int:
        return self._position

    def _called(self, otherwise: T, call: Callable[..., T], *args: int) -> T:
        """Call, and keep the first failure; after it give something else."""
        if self.failure is not None:
            return otherwise
        try:
            return call(*args)
        except BaseException as error:
            # PyAV raises the first exception when FFmpeg returns, but has room for one only, and prints a
            # second one on stderr. Ctrl-C does not pass through it at all; check() raises it.
            self.failure = error
            if isinstance(error, Exception):
                raise
            return otherwise

    def _move(self, offset: int, whence: int = io.SEEK_SET) -> int:
        try:
            position = self._file.seek(offset, whence)
            # Some file-like objects return nothing from seek().
            return int(self._file.tell() if position is None else position)
        except Exception as error:  # whatever a caller's own file object may raise
            raise self._source_error("seek", error, self._position) from error

    def _pull(self, size: int | None, position: int) -> bytes:
        """Read from a position at which the file is."""
        try:
            data = self._file.read() if size is None else self._file.read(size)
        except Exception as error:  # whatever a caller's own file object may raise
            raise self._source_error("read", error, position) from error
        if data is None:
            none_yet = BlockingIOError(errno.EAGAIN, "no data yet (None)")
            raise self._source_error("read", none_yet, position)
        if not isinstance(data, bytes | bytearray | memoryview):
            raise TypeError(
                f"{self.label}: a file object must give bytes from read(), this one gave "
                f"{type(data).__name__}. Open the file in binary mode ('rb')."
            )
        if size is not None and len(data) > size:
            # PyAV would write them past the end of its buffer, whose length it does not look at.
            too_many = ValueError(f"read({size}) gave {len(data)} bytes")
            raise self._source_error("read", too_many, position)
        # A view may be of memory that the file uses again for its next read.
        return data if type(data) is bytes else bytes(data)

    def _source_error(self, verb: str, error: Exception, position: int) -> SourceError:
        return SourceError(
            f"its {verb}() failed at byte {position}: {type(error).__name__}: {error}. "
            "Nothing after that byte was used; open the source anew to try again.",
            source=self.label,
            errno=error.errno if isinstance(error, OSError) else None,
        )


def read_file_object(file: Any, name: str | None, *, forward: bool = False) -> FileReader:
    """Take a caller's file object. One that can seek is put back to where it was on ``detach``.

    Args:
        file: The file object.
        name: What messages call it, instead of its own name.
        forward: Read it from where it is, and never seek in it.

    Raises:
        TypeError: It is open in text mode, or for writing.
        ValueError: It is closed.
        SourceError: Its position cannot be told.
    """
    if name is None:
        # The name of a file that was opened by its descriptor is a number.
        label, kind = getattr(file, "name", None), type(file).__name__
        name = f"{kind} {label!r}" if isinstance(label, str | int) else f"{kind} object"
    if isinstance(file, io.TextIOBase):
        raise TypeError(f"{name} is open in text mode. Open it in binary mode ('rb').")
    if getattr(file, "closed", False):
        raise ValueError(f"{name} is closed. Give it open, or give its path.")
    if callable(getattr(file, "readable", None)) and not file.readable():
        raise TypeError(f"{name} is not open for reading. Open it in mode 'rb'.")
    position = None if forward else _position(file, name)
    return FileReader(file, name, seekable=position is not None, restore=position)


def _position(file: Any, name: str) -> int | None:
    """Where a file object is, or ``None`` if it cannot seek."""
    if not callable(getattr(file, "seek", None)):
        return None
    try:
        # A pipe has seek() and tell() too, and only seekable() says that they fail.
        says = callable(getattr(file, "seekable", None))
        if says and not file.seekable():
            return None
        has_tell = callable(getattr(file, "tell", None))
        position = int(file.tell() if has_tell else file.seek(0, io.SEEK_CUR))
        # Of an object without seekable(), only trying tells.
        if not says:
            file.seek(position)
        return position
    except io.UnsupportedOperation:
        return None
    except Exception as error:  # whatever a caller's own file object may raise
        raise SourceError(
            f"its position cannot be told: {type(error).__name__}: {error}", source=name
        ) from error
