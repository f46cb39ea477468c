"""The Python objects through which FFmpeg reads what is not a local file.

FFmpeg calls ``read`` and ``seek`` back from its own code, where Python errors cannot pass. PyAV
keeps the error and raises it when FFmpeg returns, but has room for one only, prints a second one on
stderr, and copies whatever ``read`` gives into FFmpeg's buffer without looking at its length. So
nothing of the caller's is handed to PyAV directly.
"""

from __future__ import annotations

import errno
import io
from typing import Any, Protocol

from spdl_media.errors import SourceError

__all__ = ("FileReader", "Readable", "ViewReader")


class Readable(Protocol):
    """A binary file-like object. ``seek`` and ``tell`` are used if it has them."""

    def read(self, size: int = ..., /) -> Any:
        """Give up to ``size`` bytes, and none only at the end."""
        ...


class ViewReader:
    """A flat buffer as a seekable file. ``read`` copies the piece asked for, never the whole."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._position = 0

    def read(self, size: int) -> bytes:
        """Give up to ``size`` bytes, and none only at the end."""
        data = bytes(self._view[self._position : self._position + size])
        self._position += len(data)
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a byte, as in ``io``; give its position."""
        origin = (0, self._position, len(self._view))[whence]
        self._position = max(0, origin + offset)
        return self._position

    def tell(self) -> int:
        """The position of the next byte."""
        return self._position

    def close(self) -> None:
        """Let go of the buffer, which PyAV's container would keep alive."""
        self._view = memoryview(b"")


class FileReader:
    """A file object as FFmpeg needs it: from byte 0, in ``bytes`` of at most the size asked for.

    The first error is kept in ``failure`` (a :class:`SourceError`, if the file raised it) and goes
    through PyAV to whoever called FFmpeg. After it there is only the end of the file: a source that
    has lost bytes is not to be trusted any more.

    Args:
        file: What is read. If it can seek, it is used from its first byte, otherwise from where it
            is.
        name: What messages call it.
        seekable: Whether it can seek.

    Thread safety: one thread at a time.
    """

    def __init__(self, file: Any, name: str, *, seekable: bool) -> None:
        self._file = file
        self._name = name
        self._seekable = seekable
        self._head = b""
        self._position = 0
        self.failure: BaseException | None = None

    def seekable(self) -> bool:
        """PyAV asks, and gives FFmpeg no way to seek where it is False."""
        return self._seekable

    def head(self, size: int) -> bytes:
        """The first bytes of the file. Those of a file that cannot seek are kept and read again."""
        if len(self._head) < size:
            if not self._seekable and self._position > len(self._head):
                raise ValueError(
                    f"{self._name}: {size} bytes of its head were asked for after it was read "
                    f"past {len(self._head)}, and it cannot seek. Ask before opening it."
                )
            self._head += self._read_exactly(size - len(self._head), len(self._head))
        return self._head[:size]

    def peek(self, start: int, size: int) -> bytes:
        """Bytes from anywhere in a file that can seek; the place of reading stays."""
        return self._read_exactly(size, start)

    def size(self) -> int:
        """Bytes in a file that can seek; the place of reading stays."""
        size = self._move(0, io.SEEK_END)
        self._move(self._position)
        return size

    def read_all(self) -> bytes:
        """The whole content: a new ``bytes`` object, and not a copy of what the file gave.

        In a file that can seek, the place of reading stays.
        """
        if self._seekable:
            self._move(0)
            data = self._pull(None)
            self._move(self._position)
            return data
        if self._position:
            raise ValueError(f"{self._name}: it cannot seek, and some of it has been read")
        rest = self._pull(None)
        self._position = len(self._head) + len(rest)
        return self._head + rest

    def rewind(self) -> None:
        """Go back to the first byte, for the next one who reads."""
        if self._seekable:
            self._move(0)
        elif self._position > len(self._head):
            raise ValueError(
                f"{self._name}: it cannot seek, so it can be opened only once. "
                "Read it into bytes to use it again."
            )
        self._position = 0

    def detach(self) -> None:
        """Let go of the file, which PyAV's container would keep alive. It is not closed."""
        self._file = None
        self._head = b""
        self.failure = None

    def check(self) -> None:
        """Raise the error that has stopped the reading, if there was one."""
        if self.failure is not None:
            raise self.failure

    def read(self, size: int) -> bytes:
        """Give up to ``size`` bytes, and none only at the end."""
        if self.failure is not None:
            return b""
        try:
            data = self._replay(size) or self._pull(size)
        except BaseException as error:
            self.failure = error
            if isinstance(error, Exception):
                raise
            return b""  # Ctrl-C does not pass through PyAV; check() raises it
        self._position += len(data)
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a byte, as in ``io``; give its position, or FFmpeg's code of an error."""
        if self.failure is not None:
            return -errno.EIO
        try:
            self._position = self._move(offset, whence)
        except BaseException as error:
            self.failure = error
            if isinstance(error, Exception):
                raise
            return -errno.EIO
        return self._position

    def tell(self) -> int:
        """The position of the next byte."""
        return self._position

    def _replay(self, size: int) -> bytes:
        return b"" if self._seekable else self._head[self._position : self._position + size]

    def _read_exactly(self, size: int, start: int) -> bytes:
        """``size`` bytes from ``start``, less at the end of the file; joins short reads."""
        pieces = []
        if self._seekable:
            self._move(start)
        while size > 0 and (data := self._pull(size)):
            pieces.append(data)
            size -= len(data)
        if self._seekable:
            self._move(self._position)
        return b"".join(pieces)

    def _move(self, offset: int, whence: int = io.SEEK_SET) -> int:
        try:
            position = self._file.seek(offset, whence)
            return int(self._file.tell() if position is None else position)
        except Exception as error:  # whatever a caller's own file object may raise
            raise self._source_error("seek", error) from error

    def _pull(self, size: int | None) -> bytes:
        try:
            data = self._file.read() if size is None else self._file.read(size)
        except Exception as error:  # whatever a caller's own file object may raise
            raise self._source_error("read", error) from error
        if data is None:
            raise self._source_error("read", BlockingIOError(errno.EAGAIN, "no data yet (None)"))
        if not isinstance(data, bytes | bytearray | memoryview):
            raise TypeError(
                f"{self._name}: a file object must give bytes from read(), this one gave "
                f"{type(data).__name__}. Open the file in binary mode ('rb')."
            )
        if size is not None and len(data) > size:
            # PyAV would write them past the end of its buffer.
            raise self._source_error("read", ValueError(f"read({size}) gave {len(data)} bytes"))
        return data if type(data) is bytes else bytes(data)

    def _source_error(self, verb: str, error: Exception) -> SourceError:
        return SourceError(
            f"its {verb}() failed at byte {self._position}: {type(error).__name__}: {error}. "
            "Nothing after that byte was used; open the source anew to try again.",
            source=self._name,
            errno=error.errno if isinstance(error, OSError) else None,
        )
