"""Open sources that are not local paths: memory, file objects, and URLs through fsspec.

Remote files are read with few requests, which fetch little more than is needed.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from spdl_media._optional import require
from spdl_media.destination import Draft
from spdl_media.errors import MissingDependencyError, SourceError, without_password
from spdl_media.readers import Content, FileReader, Positioned, flat, memory_of, read_file_object

T = TypeVar("T")

_MIN_FETCH = 64 * 1024
# Requests double in size up to this. A window then fetches at most 512 KiB more than its packets, and 50 MB
# read sequentially take about 100 requests.
_MAX_FETCH = 512 * 1024
# One span for the head, one for the index, and two for each of two streams that are not interleaved.
_NUM_SPANS = 6
# If a server does not support range requests, a file of up to this many bytes is held in memory.
_MAX_WHOLE = 1024 * 1024 * 1024
# Seconds to wait before each retry.
_PAUSES = (0.5, 2.0)
# fsspec protocols that cache another file system on disk.
_DISK_CACHES = ("blockcache", "cached", "filecache", "simplecache")


def open_stream(
    src: Any,
    name: str | None = None,
    *,
    forward: bool = False,
    at: int = 0,
    storage_options: Mapping[str, object] | None = None,
) -> Content | FileReader:
    """Open a source that is not a path: return its memory, or a reader.

    Args:
        src: A URL, memory, or a file object.
        name: Name in messages, instead of the URL or the file object's own name.
        forward: Whether the source is read only once, from its current position to the end, without seeking.
        at: Offset that is read first.
        storage_options: Options of fsspec for a URL.

    Raises:
        TypeError: ``src`` is not a source.
        ValueError: The memory is not one-dimensional, or the file object is closed.
        SourceError: The URL cannot be opened, or the file object fails.
        MissingDependencyError: A URL needs fsspec, or a package that fsspec uses for it.
    """
    if isinstance(src, str):
        name = without_password(name or src)
        return _open_url(src, name, storage_options or {}, forward=forward, at=at)
    if (content := memory_of(src)) is not None:
        return content
    if callable(getattr(src, "read", None)):
        return read_file_object(src, name, forward=forward)
    hint = ""
    if isinstance(src, tuple | list | dict):
        hint = " Of an item with several fields, pass the source alone, or use ImageRecipe(field=)."
    elif hasattr(src, "__array_interface__"):
        hint = (
            " This is an image that is decoded already. Pass its file or bytes, which Image(decode=False) "
            "of Hugging Face's datasets gives."
        )
    elif callable(getattr(src, "open", None)):
        hint = " Pass what its open() returns."
    raise TypeError(
        f"cannot read media from {type(src).__name__}. A source is a path, a URL, bytes or another "
        f"contiguous buffer, a 1-D uint8 array or CPU tensor, or a binary file object.{hint}"
    )


def _open_url(
    url: str, name: str, storage_options: Mapping[str, object], *, forward: bool, at: int
) -> Content | FileReader:
    """Open a URL with fsspec. Chained URLs are supported."""
    with _fsspec_errors(name):
        filesystem, path = _filesystem(url, storage_options)
        # fsspec's in-memory caches either read far ahead or make a request for every read; ReadAhead does
        # neither. Disk caches choose a cache type themselves.
        cached = url.partition(":")[0] in _DISK_CACHES
        options: dict[str, Any] = {} if cached else {"cache_type": "none"}
        session: _CheckedSession | None = None
        spans: list[_Span] = []
        if type(filesystem).__name__ == "HTTPFileSystem":
            sync = require("fsspec", url).asyn.sync
            session, spans = sync(filesystem.loop, _first_part, filesystem, path, at)
            options["size"] = session.size
        file = filesystem.open(path, "rb", **options)
        if type(file).__name__ == "HTTPFile":
            file.session = session or _CheckedSession(file.session)
            file.session.size = file.size
    if isinstance(file, io.BytesIO):
        # memory:// gives everyone the same file object with one position, so read its memory instead.
        return flat(file.getbuffer())
    # From a server that states no size and supports no ranges, fsspec gives a stream that cannot seek.
    can_seek = _can_seek(file)
    reader = ReadAhead(file, filesystem, forward=forward, spans=spans) if can_seek else file
    return FileReader(reader, name, seekable=can_seek and not forward, owned=True)


def _filesystem(url: str, storage_options: Mapping[str, object]) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the path in it."""
    fsspec = require("fsspec", f"the URL {url!r}")
    options: dict[str, Any] = dict(storage_options)
    if url.startswith(("http://", "https://")):
        # Not a chain, although an IPv6 address or a query may have "::", at which fsspec would split it.
        scheme = url.partition(":")[0]
        options |= options.pop(scheme, {})
        return fsspec.filesystem(scheme, **options), url
    for scheme in ("http", "https"):
        # By default fsspec would fetch 5 MB for each part of a zip archive.
        if "zip://" in url and f"::{scheme}://" in url:
            options[scheme] = {"block_size": _MAX_FETCH} | options.get(scheme, {})
    filesystem, path = fsspec.core.url_to_fs(url, **options)
    return filesystem, path


class _CheckedSession:
    """The session of an HTTP file, whose answers are parts of one version of the file, where requested.

    fsspec takes any part of any version for the requested one, and any short page for a part.

    Attributes:
        size: Size of the file; ``None``: not known yet.
    """

    def __init__(self, session: Any) -> None:
        self.size: int | None = None
        self._session = session
        self._versions: dict[str, tuple[str, str]] = {}

    async def get(
        self, url: Any, *, headers: Mapping[str, str] | None = None, **options: Any
    ) -> Any:
        """Send a request; fsspec calls this.

        Raises:
            OSError: The answer is neither the requested range nor the file, or the file has changed.
        """
        # Parts of compressed data could not be decompressed.
        headers = {"Accept-Encoding": "identity", **(headers or {})}
        answer = await self._session.get(url, headers=headers, **options)
        requested, text = headers.get("Range", "").replace("=", " "), ""
        is_part = requested and answer.ok
        part = answer.headers.get("Content-Range", requested) if is_part else requested
        stated = part.replace("=", " ").lower()  # some write "bytes=0-9/10" or "Bytes 0-9/10"
        start, _, last = requested.removeprefix("bytes ").partition("-")
        if stated.partition("-")[0] != requested.partition("-")[0]:
            text = f"the server sent {part} when {requested} was requested"
        elif last and part == requested and answer.status == 200 and self.size is not None:
            # The whole file, or from servers that do not say so, the range. fsspec takes what is shorter.
            sent, wanted = answer.content_length, int(last) + 1 - int(start)
            if "Content-Encoding" not in answer.headers and sent not in (None, self.size, wanted):
                text = f"the answer has {sent} bytes, not {wanted}, or {self.size} as the file"
        # Servers behind one address may differ in the ETag of the same version, but not in its date. A weak
        # ETag (W/) does not identify the bytes.
        tag, date = (answer.headers.get(name, "") for name in ("ETag", "Last-Modified"))
        if answer.ok and tag.startswith('"'):
            first, was = self._versions.setdefault(answer.url.host, (tag, date))
            if tag != first and not (date and date == was):
                text = f"the file has changed on the server: its ETag was {first}, now {tag}"
        if text:
            answer.close()
            raise OSError(text)
        return answer


class _Span(NamedTuple):
    """Bytes of a file from ``start`` on; ``fetched`` is the size that was requested for them."""

    start: int
    data: bytes
    fetched: int


async def _first_part(filesystem: Any, url: str, at: int) -> tuple[_CheckedSession, list[_Span]]:
    """Request the bytes of a web file that are read first, because the answer mostly tells its size, too.

    Returns:
        The session, and the bytes, if the answer tells the size.
    """
    session, options = _CheckedSession(await filesystem.set_session()), dict(filesystem.kwargs)
    headers = {**options.pop("headers", {}), "Range": f"bytes={at}-{at + _MIN_FETCH - 1}"}
    async with await session.get(filesystem.encode_url(url), headers=headers, **options) as answer:
        if answer.status == 404:
            raise FileNotFoundError(url)
        # Of a server that is asked too often, fsspec would tell that there is no such file.
        if answer.status == 429:
            answer.raise_for_status()
        told = answer.headers
        is_part = answer.status == 206 or "Content-Range" in told
        # Servers without ranges send the whole file, from its beginning.
        size = told.get("Content-Range" if is_part else "Content-Length", "").rpartition("/")[2]
        is_plain = told.get("Content-Encoding", "identity") == "identity"
        if answer.status not in (200, 206) or not size.isdigit() or not is_plain:
            return session, []
        most = min(int(size), _MIN_FETCH)
        data = await (answer.read() if is_part else answer.content.readexactly(most))
    span = _Span(at * is_part, data, _MIN_FETCH)
    if 0 < len(data) <= int(size) - span.start:
        session.size = int(size)
        return session, [span]
    return session, []


@contextmanager
def _fsspec_errors(name: str) -> Iterator[None]:
    try:
        yield
    except MissingDependencyError as error:  # fsspec itself is missing
        error.source = name
        raise
    except ImportError as error:
        raise MissingDependencyError(
            f"fsspec needs another package for this URL: {error}. Install what it names with pip install",
            source=name,
            name=error.name,
        ) from error
    except Exception as error:  # each fsspec backend raises its own exception classes
        # fsspec takes a file for a missing one if the server fails; the cause is what the server said.
        causes = [cause for cause in (error, error.__cause__) if cause]
        for cause in causes:  # a traceback shows them, too
            cause.args = tuple(without_password(x) if isinstance(x, str) else x for x in cause.args)
        reason = ": ".join(f"{type(cause).__name__}: {cause}" for cause in causes)
        raise SourceError(
            f"cannot be opened: {reason}. Check the address, the access rights and options, and that the "
            "server can be reached.",
            source=name,
            errno=error.errno if isinstance(error, OSError) else None,
        ) from error


def download(url: str, path: Path, storage_options: Mapping[str, object]) -> None:
    """Copy a remote file to a path.

    Raises:
        SourceError: The file cannot be fetched or written.
        MissingDependencyError: fsspec, or a package that it uses for this protocol, is not installed.
    """
    # Through a Draft, because fsspec writes to the final name, where another process could read a part.
    with _fsspec_errors(url), Draft(path) as draft:
        filesystem, remote = _filesystem(url, storage_options)
        filesystem.get_file(remote, str(draft.path))


def retried(call: Callable[[], T]) -> T:
    """Call a function, and retry it up to two times, after a pause, if a network or server fails.

    Raises:
        SourceError: All three calls failed, the file does not exist, or access is denied.
    """
    for seconds in _PAUSES:
        try:
            return call()
        except SourceError as error:
            if _is_refusal(error.__cause__):
                raise
            time.sleep(seconds)
    return call()


def _is_refusal(error: BaseException | None) -> bool:
    """Whether a file does not exist or may not be read, rather than that a server fails."""
    if not isinstance(error, FileNotFoundError | PermissionError):
        return False
    cause = error.__cause__
    return _is_refusal(cause) if isinstance(cause, OSError) else getattr(cause, "status", 404) < 500


def _can_seek(file: Any) -> bool:
    # Try, because fsspec's stream of a server claims to be seekable, but is not.
    try:
        # Not to the end, to which a member of an archive would be decompressed.
        file.seek(1)
        file.seek(0)
    except Exception:  # noqa: BLE001  # each fsspec backend raises its own exception classes
        return False
    return True


class ReadAhead(Positioned):
    """A remote file that is fetched with few requests, and little more than is read.

    Each part that is read sequentially, but for short gaps (the head, the index, the packets), has spans of
    its own, so that switching between them fetches nothing twice. The first request of a part is for 64 KiB,
    each further one for twice as much as the last, up to 512 KiB.

    Some web servers do not support ranges, which shows only at the second request. Then the whole file is
    fetched with one more request.

    Args:
        file: A seekable file that fetches exactly the bytes that are read, without a cache of its own.
        filesystem: The fsspec file system that opened the file. Kept alive, because an archive closes its
            files when it is garbage-collected.
        forward: Whether the file is read once, from its first byte to its last. Without range requests it is
            then streamed; otherwise it is held in memory. (Ranges are tried first in either case: a single
            request times out after some minutes, and reading may take hours.)
        spans: Parts that are fetched already.
    """

    def __init__(
        self,
        file: Any,
        filesystem: Any = None,
        *,
        forward: bool = False,
        spans: Sequence[_Span] = (),
    ) -> None:
        self._file = file
        self._stated_size = getattr(file, "size", None)
        self._filesystem = filesystem
        self._forward = forward
        self._whole: Any = None
        self._spans = list(spans)

    def size(self) -> int:
        """Return the size of the file in bytes."""
        size = self._stated_size
        return int(self._file.seek(0, io.SEEK_END) if size is None else size)

    def read(self, size: int = -1) -> bytes:
        """Return up to ``size`` bytes; empty only at the end of the file.

        Raises:
            ValueError: The server does not support ranges, and the file is too large to be held in memory.
        """
        try:
            data = self._read(size)
        except ValueError:  # fsspec raises it if the server does not support ranges
            if self._whole is not None or not self._fetch_whole():
                raise
            data = self._read(size)
        self._position += len(data)
        return data

    def _read(self, size: int) -> bytes:
        if self._whole is not None:
            if not self._forward:
                self._whole.seek(self._position)
            data = bytes(self._whole.read(size))
            if not data and size and self._position < self.size():
                raise OSError(f"the answer ended at byte {self._position} of {self.size()}")
            return data
        if size < 0:
            # Without a span, this is one request without a range. Otherwise only the rest is fetched.
            start = self._read(_MIN_FETCH) if self._spans else b""
            return start + self._fetch(self._position + len(start), size)
        span = self._span(self._position, size)
        offset = self._position - span.start
        return span.data[offset : offset + size]

    def close(self) -> None:
        """Close the remote file, and free the fetched bytes."""
        self._spans.clear()
        for file in (self._whole, self._file):
            if file is not None:
                file.close()

    def _span(self, position: int, size: int) -> _Span:
        before = None
        for span in self._spans:
            stop = span.start + len(span.data)
            if span.start <= position < stop:
                self._spans.remove(span)
                break
            # A reader of headers skips what is between them, if that is short.
            before = span if 0 <= position - stop < _MIN_FETCH else before
        else:
            # A sequential read probably goes on, so fetch more; a new position may be read only once.
            ahead = min(before.fetched * 2, _MAX_FETCH) if before else _MIN_FETCH
            fetched = max(size, ahead)
            span = _Span(position, self._fetch(position, fetched), fetched)
            # Drop the least recently used span, which is the first.
            if len(self._spans) >= _NUM_SPANS:
                del self._spans[0]
        self._spans.append(span)  # most recently used last
        return span

    def _fetch(self, position: int, size: int) -> bytes:
        """Fetch bytes; fewer than ``size`` only at the end of the file.

        Raises:
            OSError: Fewer or more bytes arrived than the file has there.
        """
        self._file.seek(position)
        data = bytes(self._file.read() if size < 0 else self._file.read(size))
        if self._stated_size is None:
            return data
        left = max(0, self.size() - position)
        left = left if size < 0 else min(size, left)
        # A server may answer with a part of the range. An empty answer before the end is an error, below.
        while len(data) < left and (more := self._file.read(left - len(data))):
            data += more
        if len(data) != left:
            raise OSError(
                f"{left} bytes were requested from byte {position} on, but {len(data)} arrived"
            )
        return data

    def _fetch_whole(self) -> bool:
        """Fetch the whole file with one request without a range. Return False if this is not HTTP."""
        # Other file systems raise ValueError for other reasons than missing ranges.
        if "http" not in self._filesystem.protocol:
            return False
        if not self._forward and self.size() > _MAX_WHOLE:
            raise ValueError(
                f"the server gives no ranges, and no more than {_MAX_WHOLE} of the file's {self.size()} "
                "bytes can be held in memory. Download the file first"
            )
        stream = self._filesystem.open(self._file.path, "rb", block_size=0)
        if self._forward:
            self._whole = stream
            # Skip what has been read already.
            left = self._position
            while left and (data := stream.read(min(left, _MAX_FETCH))):
                left -= len(data)
        else:
            with stream:
                data = b"".join(iter(lambda: stream.read(_MAX_FETCH), b""))
            # It may be a page that asks for a login.
            if len(data) != self.size():
                raise OSError(f"the answer has {len(data)} bytes, not {self.size()}")
            self._whole = io.BytesIO(data)
        return True
