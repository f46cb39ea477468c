"""Open sources that are no paths: memory, file objects, and URLs through fsspec.

URLs are read in few requests that fetch little more than what is read.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from spdl_media._optional import require
from spdl_media.destination import Draft
from spdl_media.errors import MissingDependencyError, SourceError
from spdl_media.readers import Content, FileReader, Positioned, flat, memory_of, read_file_object

__all__ = ()

T = TypeVar("T")

_MIN_FETCH = 64 * 1024
# Doubling up to half a MiB: a window costs at most that much more than its packets, and 50 MB read
# in a row are some 100 requests.
_MAX_FETCH = 512 * 1024
# The head, the index, and the last two spans of two streams that lie apart in the file.
_NUM_SPANS = 6
# A file of a server that gives no ranges is held whole, up to this many bytes.
_MAX_WHOLE = 1024 * 1024 * 1024
# Seconds before another try.
_PAUSES = (0.5, 2.0)
# The file systems of fsspec that copy others to the disk.
_DISK_CACHES = ("blockcache", "cached", "filecache", "simplecache")


def open_stream(
    src: Any,
    name: str | None = None,
    *,
    forward: bool = False,
    storage_options: Mapping[str, object] | None = None,
) -> Content | FileReader:
    """Open a source that is no path: its memory, or what reads it.

    Args:
        src: A URL, memory, or a file object.
        name: What messages call it, instead of its URL or its own name.
        forward: It is read once, from where it is to its end, and never sought in.
        storage_options: Options of fsspec for a URL.

    Raises:
        TypeError: Not a source.
        ValueError: Memory that is not flat, or a closed file object.
        SourceError: The URL cannot be opened, or the file object fails.
        MissingDependencyError: A URL needs fsspec, or a package that fsspec uses for it.
    """
    if isinstance(src, str):
        return _open_url(src, name or src, storage_options or {}, forward=forward)
    if (content := memory_of(src)) is not None:
        return content
    if callable(getattr(src, "read", None)):
        return read_file_object(src, name, forward=forward)
    raise TypeError(
        f"cannot read media from {type(src).__name__}. A source is a path, a URL, bytes or another "
        "contiguous buffer, a 1-D uint8 array or CPU tensor, or a binary file object."
    )


def _open_url(
    url: str, name: str, storage_options: Mapping[str, object], *, forward: bool
) -> Content | FileReader:
    """Open a URL with fsspec, a chained one included."""
    with _fsspec_errors(name):
        filesystem, path = _filesystem(url, storage_options)
        # Caches of fsspec either read far ahead or make a request for every read: ReadAhead does
        # better. Those on the disk choose for themselves.
        cached = url.partition(":")[0] in _DISK_CACHES
        file = filesystem.open(path, "rb", **({} if cached else {"cache_type": "none"}))
    if isinstance(file, io.BytesIO):
        # A file of memory:// is one object for all who open it, position included: share the
        # memory.
        return flat(file.getbuffer())
    # A server without sizes and ranges gives a stream.
    can_seek = _can_seek(file)
    reader = ReadAhead(file, filesystem, forward=forward) if can_seek else file
    return FileReader(reader, name, seekable=can_seek and not forward, owned=True)


def _filesystem(url: str, storage_options: Mapping[str, object]) -> tuple[Any, str]:
    """Return fsspec's file system of a URL, and the path in it."""
    filesystem, path = require("fsspec", f"the URL {url!r}").core.url_to_fs(url, **storage_options)
    return filesystem, path


@contextmanager
def _fsspec_errors(name: str) -> Iterator[None]:
    try:
        yield
    except MissingDependencyError as error:  # of fsspec itself
        error.source = name
        raise
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
            "rights and options, and that the server can be reached.",
            source=name,
            errno=error.errno if isinstance(error, OSError) else None,
        ) from error


def download(url: str, path: Path, storage_options: Mapping[str, object]) -> None:
    """Copy a remote file to a path.

    Raises:
        SourceError: It cannot be fetched, or written.
        MissingDependencyError: fsspec, or a package that it uses for this protocol, is not installed.
    """
    # fsspec's own caches write to the last name, where another process takes a part for the whole.
    with _fsspec_errors(url), Draft(path) as draft:
        filesystem, remote = _filesystem(url, storage_options)
        filesystem.get_file(remote, str(draft.path))


def retried(call: Callable[[], T]) -> T:
    """Call once more, up to two times and after a pause, what a network or server has failed.

    Raises:
        SourceError: It failed each time, or there is no such file, or no right to read it.
    """
    for seconds in _PAUSES:
        try:
            return call()
        except SourceError as error:
            if isinstance(error.__cause__, FileNotFoundError | PermissionError):
                raise
            time.sleep(seconds)
    return call()


def _can_seek(file: Any) -> bool:
    # fsspec says of a stream from the server that it can seek, but it cannot. It has no size, nor has
    # the local file of a cache.
    if getattr(file, "size", None) is not None:
        return True
    try:
        file.seek(0, io.SEEK_END)
    except Exception:  # noqa: BLE001  # every backend of fsspec has exceptions of its own
        return False
    return True


class _Span(NamedTuple):
    """Bytes of a file from ``start`` on; ``fetched`` is what was asked for to get them."""

    start: int
    data: bytes
    fetched: int


class ReadAhead(Positioned):
    """A remote file, fetched in few requests but not far beyond what is asked for.

    Each place that is read in a row (the head, the index, the packets) has spans of its own, so
    that going to and fro between them fetches nothing twice. The first fetch of a span is 64 KiB,
    each next one twice the last, up to 512 KiB.

    Some web servers give no ranges and do not say so before the second one. Of these the file is fetched in
    one more request.

    Args:
        file: A seekable file that fetches exactly what it is asked for, without a cache of its own.
        filesystem: The one of fsspec that opened it. An archive closes its files when it is forgotten.
        forward: It is read once, from its first byte to its last: of a server without ranges nothing is kept.
            Otherwise such a file is held in memory. (Ranges are tried first even so: a request lasts
            some minutes at most, and reading may take hours.)
    """

    def __init__(self, file: Any, filesystem: Any = None, *, forward: bool = False) -> None:
        self._file = file
        self._filesystem = filesystem
        self._forward = forward
        self._in_one: Any = None
        self._spans: list[_Span] = []

    def size(self) -> int:
        """Bytes in the file."""
        size = getattr(self._file, "size", None)
        return int(self._file.seek(0, io.SEEK_END) if size is None else size)

    def read(self, size: int = -1) -> bytes:
        """Give up to ``size`` bytes, and none only at the end.

        Raises:
            ValueError: The server gives no ranges, and the file is too large to be held.
        """
        try:
            data = self._read(size)
        except ValueError:  # what fsspec raises where there are no ranges
            if self._in_one is not None or not self._fetch_in_one():
                raise
            data = self._read(size)
        self._position += len(data)
        return data

    def _read(self, size: int) -> bytes:
        if self._in_one is not None:
            if not self._forward:
                self._in_one.seek(self._position)
            return bytes(self._in_one.read(size))
        if size < 0:
            return self._fetch(self._position, size)
        span = self._span(self._position, size)
        offset = self._position - span.start
        return span.data[offset : offset + size]

    def close(self) -> None:
        """Close the remote file, and forget what was fetched."""
        self._spans.clear()
        for file in (self._in_one, self._file):
            if file is not None:
                file.close()

    def _span(self, position: int, size: int) -> _Span:
        before = None
        for span in self._spans:
            stop = span.start + len(span.data)
            if span.start <= position < stop:
                self._spans.remove(span)
                break
            before = span if stop == position else before
        else:
            # A sequential read will go on; a new position may be read once only.
            ahead = min(before.fetched * 2, _MAX_FETCH) if before else _MIN_FETCH
            fetched = max(size, ahead)
            span = _Span(position, self._fetch(position, fetched), fetched)
            # The first is the one that was not used for longest.
            if len(self._spans) >= _NUM_SPANS:
                del self._spans[0]
        self._spans.append(span)  # the last used is the last to go
        return span

    def _fetch(self, position: int, size: int) -> bytes:
        self._file.seek(position)
        return bytes(self._file.read() if size < 0 else self._file.read(size))

    def _fetch_in_one(self) -> bool:
        """Fetch the file anew from a server that gives no ranges, if it can be one."""
        filesystem = self._filesystem
        # Other file systems raise ValueError for reasons of their own.
        if "http" not in filesystem.protocol:
            return False
        if not self._forward and self.size() > _MAX_WHOLE:
            raise ValueError(
                f"the server gives no ranges, and no more than {_MAX_WHOLE} of the file's {self.size()} "
                "bytes can be held in memory. Download the file first"
            )
        stream = filesystem.open(self._file.path, "rb", block_size=0)
        if self._forward:
            self._in_one = stream
            left = self._position
            while left and (data := stream.read(min(left, _MAX_FETCH))):
                left -= len(data)
        else:
            with stream:
                self._in_one = io.BytesIO(b"".join(iter(lambda: stream.read(_MAX_FETCH), b"")))
        return True
