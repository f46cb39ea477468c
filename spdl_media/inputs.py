"""Where media come from: one kind of input out of paths, URLs, memory and file objects.

Local paths are opened by FFmpeg itself, without the GIL. Everything else is read by it through
:mod:`spdl_media._remote`, and may not open anything further: a playlist among the bytes of a data
set reaches neither the disk nor the network.
"""

from __future__ import annotations

import io
import os
import re
import stat
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeAlias

import av
import av.container
import numpy as np

from spdl_media import _ffmpeg
from spdl_media._remote import open_stream
from spdl_media.config import DEFAULT_DEMUX_CONFIG, DemuxConfig
from spdl_media.errors import DemuxError, SourceError
from spdl_media.parts import index_is_last, missing_end
from spdl_media.readers import FileReader, Readable, ViewReader, name_of, path_error
from spdl_media.stills import unread_kind

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ("Input", "Source", "open_input")


class _SupportsArray(Protocol):
    """A NumPy array, a CPU tensor of PyTorch, and whatever else NumPy can view."""

    def __array__(self) -> np.ndarray[Any, Any]: ...


Source: TypeAlias = "str | os.PathLike[str] | Buffer | _SupportsArray | Readable"
"""A path, a URL (a ``str`` with ``://``), bytes or another contiguous buffer, a 1-D uint8 array or
CPU tensor, or a binary file object."""


def open_input(
    src: Source | Input, config: DemuxConfig = DEFAULT_DEMUX_CONFIG, *, name: str | None = None
) -> Input:
    """Open a source of any kind.

    Args:
        src: A path (``PathLike``, or a ``str`` without ``://``), a URL for fsspec, or content:
            bytes, any C-contiguous buffer, a 1-D uint8 array or CPU tensor (none of them is
            copied), or a binary file object. A file object that can seek is used from byte 0, and
            put back to where it was on close; another one is read from where it is. What is open
            already is given back as it is.
        config: Says how fsspec opens a URL.
        name: What messages call the source, instead of its path, URL or size.

    Returns:
        The input. Close it, or use it in ``with``; this does not close a file object of the
        caller's.

    Raises:
        TypeError: Not a source: a text file, an array that is not uint8, memory of a GPU.
        ValueError: An array or buffer that is not 1-D or not contiguous, a closed file object.
        SourceError: The URL cannot be opened, or the file object fails.
        MissingDependencyError: A URL needs fsspec, or a package that fsspec uses for it.

    Thread safety: safe; the input serves one thread at a time.
    """
    if isinstance(src, Input):
        return src
    if (path := local_path(src)) is not None:
        return _open_path(path, name or path)
    stream = open_stream(src, name, storage_options=config.storage_options)
    if isinstance(stream, FileReader):
        return Input(stream.label, reader=stream)
    url = src if isinstance(src, str) else None
    return Input(name or url or name_of(stream), content=stream)


def local_path(src: Any) -> str | None:
    """The path, if a source is one and not a URL; without ``file://``."""
    if isinstance(src, str) and "://" in src and not src.startswith("file://"):
        return None
    is_path = isinstance(src, str | os.PathLike)
    return os.fsdecode(os.fspath(src)).removeprefix("file://") if is_path else None


# Windows would change line ends.
_READ_ONLY = os.O_RDONLY | getattr(os, "O_BINARY", 0)


def _open_path(path: str, name: str) -> Input:
    try:
        # The system's own calls: io.FileIO makes nine of them for a small file, where four will do.
        file = os.open(path, _READ_ONLY)
    except OSError:
        # It may be a pattern; this asks again when FFmpeg has failed.
        return Input(name, path=path)
    except ValueError as error:
        raise path_error(name, error) from error
    status = os.fstat(file)
    if stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode):
        return Input(name, path=path, file=(file, status.st_size))
    # What was read from a pipe cannot be read again, and head() must be.
    pipe = io.FileIO(file)
    return Input(name, reader=FileReader(pipe, name, seekable=False, owned=True))


# A file of so many bytes is read by one call, head and all. A larger one takes milliseconds to decode.
_SMALL = 256 * 1024
# The boxes before the index or the samples.
_MP4_HEAD_SIZE = 4096

# Metadata that is not UTF-8 must not make a file unreadable. PyAV 18 raises unless told otherwise,
# 19 replaces such bytes and has no option for it.
_METADATA: dict[str, Any] = (
    {"metadata_errors": "replace"} if int(av.__version__.partition(".")[0]) < 19 else {}
)


class Input:
    """An opened source. Made by :func:`open_input`.

    Attributes:
        name: What messages call it: the path, the URL, "bytes of length n", or the file object.
        seekable: Whether FFmpeg can seek in it.
        checksum_failed: Whether FFmpeg has left out damaged pages when it opened the source.

    Thread safety: one thread at a time.
    """

    # The descriptor and size of a local file: none yet where there is no such file.
    _file: tuple[int, int] | None = None

    def __init__(
        self,
        name: str,
        *,
        path: str | None = None,
        file: tuple[int, int] | None = None,
        content: bytes | memoryview | None = None,
        reader: FileReader | None = None,
    ) -> None:
        self.name = name
        self.seekable = reader is None or reader.seekable()
        self.checksum_failed = False
        self._path = path
        self._file = file
        self._content = content
        self._reader = reader
        self._memory_reader: io.BytesIO | ViewReader | None = None
        self._container: av.container.InputContainer | None = None

    def head(self, size: int) -> bytes | memoryview:
        """The first ``size`` bytes, or all if there are less. They are not consumed.

        Raises:
            SourceError: They cannot be read.
            ValueError: More of them than before, from a source that cannot seek and has been
                opened.
        """
        if self._content is None and self._path is None:
            return self._stream().head(size)
        if self._content is None and self.size() <= _SMALL:
            self._content = self.read_at(0, _SMALL)
        return self.read_at(0, size)

    def read_all(self) -> bytes | memoryview:
        """The whole content.

        Returns:
            Of bytes, the same object; of other memory, a flat uint8 memoryview of it (no copy, and
            the memory cannot be resized while this view lives); of all else, new bytes.

        Raises:
            SourceError: It cannot be read.
        """
        content = self._content
        if content is not None:
            return content if isinstance(content, bytes) else memoryview(content)
        return self._stream().read_all() if self._path is None else self.read_at(0, self.size())

    def open(self, config: DemuxConfig) -> av.container.InputContainer:
        """Let FFmpeg find out what the source holds. A container opened before from it is closed.

        Returns:
            PyAV's container. It is closed with this input.

        Raises:
            ValueError: FFmpeg has no such format, the format no such option, or the option not this
                value; or a source that cannot seek is opened a second time.
            SourceError: The source cannot be read.
            DemuxError: It is empty, not media, or an MP4 that needs seeking in a source that
                cannot.
        """
        if config.format is not None:
            _ffmpeg.check_format(config.format)
            _ffmpeg.check_format_options(config.format, config.format_options)
        self._close_container()
        target = self._target(config)
        self._container = container = self._open_container(target, config)
        # FFmpeg has only now found out which format it is, and ignores options that the format does
        # not have.
        if config.format is None and config.format_options:
            try:
                _ffmpeg.check_format_options(container.format.name, config.format_options)
            except ValueError:
                self._close_container()
                raise
        return container

    def missing_end(self) -> str | None:
        """Say what is missing from the end, where the format states its size and the source can seek.

        Raises:
            SourceError: It cannot be read.
        """
        return missing_end(self.read_at, self.size()) if self.seekable else None

    def check(self) -> None:
        """Raise the error that stopped a read inside FFmpeg, if there was one.

        PyAV raises such an error by itself where it can. Call this where FFmpeg says that the
        source has ended, so that no partial result is taken for a whole one.

        Raises:
            SourceError: A read or seek of the source failed.
        """
        if self._reader is not None:
            self._reader.check()

    def close(self) -> None:
        """Close what was opened here, and put the caller's file object back to where it was."""
        self._close_container()
        if isinstance(self._content, memoryview):
            # Someone may hold the memory through this view (a packet); then it is theirs to let go.
            with suppress(BufferError):
                self._content.release()
        if self._reader is not None:
            self._reader.detach()
        self._close_file()
        self._path = self._content = self._reader = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # A descriptor is a plain number: nothing else would close it.
    def __del__(self) -> None:
        self._close_file()

    def __repr__(self) -> str:
        return f"<Input {self.name}{'' if self.seekable else ', not seekable'}>"

    def _stream(self) -> FileReader:
        if self._reader is None:
            raise ValueError(f"{self.name}: the input is closed")
        return self._reader

    def _close_container(self) -> None:
        if self._container is not None:
            self._container.close()
            self._container = None
        if self._memory_reader is not None:
            # PyAV's container keeps what it read from, even when it is closed.
            self._memory_reader.close()
            self._memory_reader = None

    def _close_file(self) -> None:
        if self._file is not None:
            os.close(self._file[0])
            self._file = None

    def _local_file(self, path: str) -> tuple[int, int]:
        """The file, opened once. If that has failed, it fails again here, where the error is of use."""
        if self._file is None:
            descriptor = os.open(path, _READ_ONLY)
            self._file = descriptor, os.fstat(descriptor).st_size
        return self._file

    @property
    def has_size(self) -> bool:
        """Whether any place of it can be read: it is memory, a regular file, or a reader that can seek."""
        return self.seekable and (self._path is None or os.path.isfile(self._path))  # noqa: PTH113  # half the time

    def size(self) -> int:
        """Bytes of the content, of a source that can seek.

        Raises:
            SourceError: It cannot be read.
        """
        if self._content is not None:
            return len(self._content)
        if self._path is None:
            return self._stream().size()
        try:
            return self._local_file(self._path)[1]
        except OSError as error:
            raise path_error(self.name, error) from error

    def read_at(self, start: int, size: int) -> bytes | memoryview:
        """Up to ``size`` bytes from ``start``; less at the end.

        Raises:
            SourceError: They cannot be read.
            ValueError: The input is closed.
        """
        if self._content is not None:
            return memoryview(self._content)[start : start + size]
        if self._path is None:
            return self._stream().peek(start, size)
        try:
            file, file_size = self._local_file(self._path)
            os.lseek(file, start, os.SEEK_SET)
            missing = max(0, min(size, file_size - start))
            data = os.read(file, missing)
            # One call gives at most 2 GiB, and less if a signal comes in.
            while len(data) < missing and (more := os.read(file, missing - len(data))):
                data += more
        except OSError as error:
            raise path_error(self.name, error) from error
        return data

    def _target(self, config: DemuxConfig) -> Any:
        """Return what PyAV opens: a path, or an object to read from."""
        if self._path is not None:
            # FFmpeg opens an empty file as raw data without a word.
            if self._file is not None and self._file[1] == 0:
                raise self._empty()
            # The file protocol has no escapes, so this holds for every path, and "a:b.mp4" is a
            # file.
            return f"file:{self._path}"
        content = self._content
        if content is not None:
            if not len(content):
                raise self._empty()
            # BytesIO shares bytes until it is written to, and reads them faster than Python can.
            reading = io.BytesIO(content) if isinstance(content, bytes) else ViewReader(content)
            self._memory_reader = reading
            return reading
        reader = self._stream()
        # The head may have been read, to tell stills from other media.
        reader.rewind()
        if not reader.head(1):
            raise self._empty()
        names = _MP4_NAMES if config.format is None else config.format.split(",")
        if (
            not self.seekable
            and not _MP4_NAMES.isdisjoint(names)
            and index_is_last(reader.head(_MP4_HEAD_SIZE))
        ):
            raise DemuxError(
                "this MP4 has its index (moov) at the end, and the source cannot seek to it. Give "
                "it as a path, bytes or a seekable file object, or write the file anew with the "
                "index in front: ffmpeg -i IN -c copy -movflags +faststart OUT",
                source=self.name,
            )
        return reader

    def _empty(self) -> DemuxError:
        return DemuxError("the source is empty (0 bytes)", source=self.name)

    def _open_container(self, target: Any, config: DemuxConfig) -> av.container.InputContainer:
        # What FFmpeg may open on its own, for playlists and scripts. There is no protocol "none".
        options = {"protocol_whitelist": "none"}
        if self._path is not None:
            # A name such as "img%03d.jpg" would otherwise mean img001.jpg and its neighbours.
            options = {"protocol_whitelist": "file", "pattern_type": "none"}
        try:
            with _ffmpeg.ffmpeg_log() as lines, _ffmpeg.TranslatedErrors(self._not_media):
                mark = len(lines)
                container: av.container.InputContainer = av.open(
                    target,
                    "r",
                    format=config.format,
                    options={**options, **config.format_options},
                    buffer_size=config.buffer_size,
                    **_METADATA,
                )
        except DemuxError as error:
            # FFmpeg takes the failure of a source for bad data.
            self._raise_better(error, config)
            raise
        self.checksum_failed = _ffmpeg.says_checksum_failed(lines[mark:])
        # Reading may have been broken off without an error that FFmpeg passes on.
        if self._reader is not None and self._reader.failure is not None:
            container.close()
            self._reader.check()
        return container

    def _not_media(self, text: str) -> DemuxError:
        head: bytes | memoryview = b""
        with suppress(SourceError):
            head = self.head(12) if self.seekable else b""
        # FFmpeg takes whatever is called .mp4 for one.
        if "moov atom not found" in text and head[4:8] == b"ftyp":
            text = (
                f"this MP4 has no index: {text}. It was cut short, or never finished; fetch or "
                "record it anew"
            )
        elif kind := unread_kind(head):
            text = (
                f"it begins as {kind}, but FFmpeg cannot open it: {text}. It is damaged, or of a kind that "
                "FFmpeg does not read; convert it with another program"
            )
        else:
            text = (
                f"FFmpeg cannot open it as media: {text}. If it is raw data, or of a format without a "
                "signature, name the format: demux_config(format=...)"
            )
        return DemuxError(text, source=self.name)

    def _raise_better(self, error: DemuxError, config: DemuxConfig) -> None:
        """Raise an error that says more, if the failure has another reason than the content."""
        cause = error.__cause__
        self.check()
        bad = re.search(r"Error setting option (\S+) to value", str(error))
        if bad and bad[1] in config.format_options:
            raise ValueError(
                f"format option {bad[1]!r} does not take the value "
                f"{config.format_options[bad[1]]!r}. "
                "See https://ffmpeg.org/ffmpeg-formats.html"
            ) from cause
        if self._path is not None and "pattern_type" not in config.format_options:
            # Ask the operating system, whose words are clearer than FFmpeg's.
            try:
                self.read_at(0, 1)
            except SourceError as os_error:
                raise os_error from cause


_MP4_NAMES = frozenset({"mov", "mp4", "m4a", "3gp", "3g2", "mj2"})
