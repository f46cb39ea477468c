"""Files at a URL, through fsspec, in few requests that fetch little more than what is read."""

from __future__ import annotations

import io
from typing import Any

from spdl_media import _optional
from spdl_media._inputs.memory import flat
from spdl_media._inputs.readers import Readable
from spdl_media.errors import MissingDependencyError, SourceError

__all__ = ("FromStartToEnd", "ReadAhead", "open_url")

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
