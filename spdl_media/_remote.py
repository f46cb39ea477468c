"""Read what is not a local file: URLs through fsspec, memory and file objects.

FFmpeg calls ``read`` and ``seek`` back from its own code, where Python errors cannot pass. PyAV
keeps the error and raises it when FFmpeg returns, but has room for one only, prints a second one on
stderr, and copies whatever ``read`` gives into FFmpeg's buffer without looking at its length. So
nothing of the caller's is handed to PyAV directly.
"""

from __future__ import annotations

import errno
import io
from typing import Any, Protocol

import numpy as np

from spdl_media import _optional
from spdl_media.errors import MissingDependencyError, SourceError

__all__ = ()


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


_MIN_FETCH = 64 * 1024
# Doubling up to half a MiB: a window costs at most that much more than its packets, and 50 MB read
# in a row are some 100 requests.
_MAX_FETCH = 512 * 1024
# The head, the index, and the last two spans of two streams that lie apart in the file.
_NUM_SPANS = 6
# A file of a server that gives no ranges is held whole, up to this many bytes.
_MAX_WHOLE = 1024 * 1024 * 1024


def open_url(url: str, *, name: str) -> memoryview | ReadAhead | Readable:
    """Open a URL with fsspec.

    Args:
        url: The URL, chained ones of fsspec included.
        name: What messages call it.

    Returns:
        The content, if fsspec holds it in memory; a file that can seek; or, of a server without
        sizes and ranges, a stream that cannot. Close what is returned.

    Raises:
        SourceError: There is no such file or server, or fsspec knows no such protocol.
        MissingDependencyError: fsspec, or a package that it uses for this protocol, is not
            installed.
    """
    try:
        fsspec = _optional.require("fsspec", f"the URL {url!r}")
    except MissingDependencyError as error:
        error.source = name
        raise
    try:
        filesystem, path = fsspec.core.url_to_fs(url)
        # Caches of fsspec either read far ahead or make a request for every read: ReadAhead does
        # better.
        file = filesystem.open(path, "rb", cache_type="none")
    except ImportError as error:
        raise MissingDependencyError(
            f"fsspec needs another package for this URL: {error}. Install what it names, such as: "
            "pip install s3fs",
            source=name,
            name=error.name,
        ) from error
    except Exception as error:  # every backend of fsspec has exceptions of its own
        raise SourceError(
            f"cannot be opened: {type(error).__name__}: {error}. Check the address, the access "
            "rights, and that the server can be reached.",
            source=name,
            errno=getattr(error, "errno", None) if isinstance(error, OSError) else None,
        ) from error
    if isinstance(file, io.BytesIO):
        # A file of memory:// is one object for all who open it, position included: share the
        # memory.
        return flat(file.getbuffer())
    # fsspec says of a stream from the server that it can seek, but it cannot. It has no size.
    stream: Readable = file
    return stream if getattr(file, "size", None) is None else ReadAhead(file)


class ReadAhead:
    """A remote file, fetched in few requests but not far beyond what is asked for.

    Each place that is read in a row (the head, the index, the packets) has spans of its own, so
    that going to and fro between them fetches nothing twice. The first fetch of a span is 64 KiB,
    each next one twice the last, up to 512 KiB.

    Some web servers give no ranges and do not say so beforehand. Of these the file is fetched whole, in one
    more request, and held in memory.

    Args:
        file: A seekable file that fetches exactly what it is asked for, without a cache of its own.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self._whole: memoryview | None = None
        self._position = 0
        self._spans: list[_Span] = []

    def read(self, size: int = -1) -> bytes:
        """Give up to ``size`` bytes, and none only at the end.

        Raises:
            ValueError: The server gives no ranges, and the file is too large to be held.
        """
        try:
            return self.read_by_ranges(size)
        except ValueError:  # what fsspec raises where there are no ranges
            if not self._fetch_whole():
                raise
            return self.read_by_ranges(size)

    def read_by_ranges(self, size: int = -1) -> bytes:
        """The same, but a server without ranges is a ``ValueError`` whatever the size of the file."""
        if size < 0:
            self._file.seek(self._position)
            data = bytes(self._file.read())
            self._position += len(data)
            return data
        span = self._holding(self._position) or self._fetch(self._position, size)
        offset = self._position - span.start
        data = span.data[offset : offset + size]
        self._position += len(data)
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a byte, as in ``io``; give its position."""
        if whence == io.SEEK_END:
            whence, offset = io.SEEK_SET, offset + int(self._file.size)
        origin = self._position if whence == io.SEEK_CUR else 0
        self._position = max(0, origin + offset)
        return self._position

    def tell(self) -> int:
        """The position of the next byte."""
        return self._position

    def close(self) -> None:
        """Close the remote file, and forget what was fetched."""
        self._spans.clear()
        self._whole = None
        self._file.close()

    def as_stream(self) -> Readable | None:
        """The same file anew, as a stream in one request, from a server that gives no ranges."""
        filesystem = self._file.fs
        if "http" not in filesystem.protocol:
            return None
        stream: Readable = filesystem.open(self._file.path, "rb", block_size=0)
        return stream

    def _holding(self, position: int) -> _Span | None:
        for span in self._spans:
            if span.start <= position < span.stop:
                self._spans.remove(span)
                self._spans.append(span)  # the last used is the last to go
                return span
        return None

    def _fetch(self, position: int, size: int) -> _Span:
        before = next((span for span in self._spans if span.stop == position), None)
        ahead = min(before.fetched * 2, _MAX_FETCH) if before else _MIN_FETCH
        fetched = max(size, ahead)
        span = _Span(position, self._fetch_bytes(position, fetched), fetched)
        if len(self._spans) >= _NUM_SPANS:
            del self._spans[0]
        self._spans.append(span)
        return span

    def _fetch_bytes(self, position: int, size: int) -> bytes:
        if self._whole is not None:
            return bytes(self._whole[position : position + size])
        self._file.seek(position)
        return bytes(self._file.read(size))

    def _fetch_whole(self) -> bool:
        size = int(self._file.size)
        if size > _MAX_WHOLE:
            raise ValueError(
                f"the server gives no ranges, and no more than {_MAX_WHOLE} of the file's {size} bytes "
                "can be held in memory. Download the file first"
            )
        stream = self.as_stream() if self._whole is None else None
        if stream is None:
            return False
        self._whole = memoryview(b"".join(iter(lambda: stream.read(_MAX_FETCH), b"")))
        stream.close()  # type: ignore[attr-defined]  # all of fsspec's files can
        return True


class FromStartToEnd:
    """A remote file that is only read on: by ranges, or, of a server without them, in one request.

    fsspec cannot tell such a server before the second range. Ranges are tried first all the same: one request
    lasts no more than some minutes, and whoever reads may take hours.

    Args:
        file: The file, at its first byte.
    """

    def __init__(self, file: ReadAhead) -> None:
        self._file: ReadAhead | Readable = file
        self._position = 0

    def read(self, size: int) -> bytes:
        """Give up to ``size`` bytes, and none only at the end."""
        try:
            data = self._read(size)
        except ValueError:  # what fsspec raises where there are no ranges
            if not self._begin_again():
                raise
            data = self._read(size)
        self._position += len(data)
        return data

    def _read(self, size: int) -> bytes:
        file = self._file
        return file.read_by_ranges(size) if isinstance(file, ReadAhead) else file.read(size)

    def close(self) -> None:
        """Close the remote file."""
        self._file.close()  # type: ignore[union-attr]  # all of fsspec's files can

    def _begin_again(self) -> bool:
        stream = self._file.as_stream() if isinstance(self._file, ReadAhead) else None
        if stream is None:
            return False
        self.close()
        self._file = stream
        left = self._position
        while left and (data := stream.read(min(left, _MAX_FETCH))):
            left -= len(data)
        return True


class _Span:
    """Bytes of a file from ``start`` to ``stop``; ``fetched`` is what was asked for to get them."""

    __slots__ = ("data", "fetched", "start", "stop")

    def __init__(self, start: int, data: bytes, fetched: int) -> None:
        self.start = start
        self.stop = start + len(data)
        self.data = data
        self.fetched = fetched


def flat(view: memoryview) -> memoryview:
    """The bytes of any C-contiguous view."""
    # Not memoryview.cast, which refuses formats such as "<B".
    return np.frombuffer(view, np.uint8).data if view.nbytes else memoryview(b"")
