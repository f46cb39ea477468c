"""Open media from paths, URLs, memory and file objects as one kind of input.

FFmpeg opens local paths itself, without the GIL. It reads everything else through
:mod:`spdl_media._remote`, and may then open nothing further: a playlist among the bytes of a data set
cannot reach the disk or the network.
"""

from __future__ import annotations

import collections.abc
import io
import os
import re
import stat
import struct
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeAlias

import av
import av.container
import numpy as np

from spdl_media import _ffmpeg
from spdl_media._remote import open_stream
from spdl_media.config import DEFAULT_DEMUX_CONFIG, DemuxConfig, as_demux_config
from spdl_media.errors import DemuxError, SourceError
from spdl_media.parts import (
    Bytes,
    boxes,
    describing_boxes,
    index_is_last,
    missing_end,
    refusal,
)
from spdl_media.readers import FileReader, Readable, ViewReader, name_of, path_error
from spdl_media.stills import HEAD_SIZE, container_still, unread_kind

__all__ = ("Input", "Source", "open_input")

if TYPE_CHECKING:
    import typing_extensions

    Buffer: TypeAlias = typing_extensions.Buffer
else:  # CPython 3.11 has no such class
    Buffer = getattr(collections.abc, "Buffer", bytes | bytearray | memoryview)


class SupportsArray(Protocol):
    """A NumPy array, a CPU tensor of PyTorch, or another object that NumPy can view."""

    def __array__(self) -> np.ndarray[Any, Any]: ...


Source: TypeAlias = str | os.PathLike[str] | Buffer | SupportsArray | Readable
"""A path, a URL (a ``str`` with ``://``), bytes or another contiguous buffer, a 1-D uint8 array or
CPU tensor, or a binary file object."""


def open_input(
    src: Source,
    config: DemuxConfig | None = None,
    *,
    name: str | None = None,
    at: int = 0,
    forward: bool = False,
) -> Input:
    """Open a source of any kind.

    Args:
        src: A path (``PathLike``, or a ``str`` without ``://``), a URL for fsspec, or content: bytes,
            any C-contiguous buffer, a 1-D uint8 array or CPU tensor (none of them is copied), or a
            binary file object. A seekable file object is read from byte 0, and closing the input
            restores its position; other file objects are read from their current position.
        config: Options of opening it with FFmpeg. Its ``storage_options`` are passed to fsspec.
        name: Name of the source in messages, instead of its path, URL or size.
        at: Offset that is read first, of a URL.
        forward: Read a file object from its current position, and a URL once, without seeking.

    Returns:
        The input. Close it, or use it in ``with``; this does not close the caller's file object.

    Raises:
        TypeError: ``src`` is not a source, such as a text file, an array that is not uint8, or GPU memory; or
            ``config`` is not a config.
        ValueError: An array or buffer is not 1-D or not contiguous, or a file object is closed.
        SourceError: The path or URL cannot be opened, or the file object fails.
        MissingDependencyError: A URL needs fsspec, or a package that fsspec uses for it.

    Thread safety: safe; the input serves one thread at a time.
    """
    config = DEFAULT_DEMUX_CONFIG if config is None else as_demux_config(config)
    if (path := local_path(src)) is not None:
        return _open_path(path, name or path, config)
    stream: Any = src
    if not isinstance(src, bytes):
        options = config.storage_options
        stream = open_stream(src, name, forward=forward, at=at, storage_options=options)
    if isinstance(stream, FileReader):
        return Input(stream.label, config, reader=stream)
    label = name or (src if isinstance(src, str) else name_of(stream))
    return Input(label, config, content=stream)


def local_path(src: Any) -> str | None:
    """Return a source's path without ``file://``; ``None`` if it is a URL or not a path."""
    if isinstance(src, str) and "://" in src and not src.startswith("file://"):
        return None
    is_path = isinstance(src, str | os.PathLike)
    return os.fsdecode(os.fspath(src)).removeprefix("file://") if is_path else None


# O_BINARY, because Windows would otherwise translate line ends.
_READ_ONLY = os.O_RDONLY | getattr(os, "O_BINARY", 0)


def _open_path(path: str, name: str, config: DemuxConfig) -> Input:
    try:
        # os.open, because io.FileIO makes nine system calls for a small file where four suffice.
        file = os.open(path, _READ_ONLY)
    except (OSError, ValueError) as error:
        raise path_error(name, error) from error
    status = os.fstat(file)
    if stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode):
        return Input(name, config, file=_File(path, file, status.st_size))
    # A pipe cannot be read twice, but head() must not consume; FileReader buffers it.
    pipe = FileReader(io.FileIO(file), name, seekable=False, owned=True)
    return Input(name, config, reader=pipe)


# Files up to this size are read whole when their head is read. For larger files, which take milliseconds to
# decode, it does not matter.
_SMALL = 256 * 1024


class _File:
    """Path, descriptor and size of an open local file, which is closed when nothing refers to this object."""

    __slots__ = ("__del__", "number", "path", "size")

    def __init__(self, path: str, number: int, size: int) -> None:
        self.path, self.number, self.size = path, number, size
        # A Python function would lose a Ctrl-C.
        self.__del__ = partial(os.close, number)


# Bytes that hold the boxes before the index or the samples.
_MP4_HEAD_SIZE = 4096

# Metadata that is not UTF-8 must not make a file unreadable. PyAV 18 raises by default, PyAV 19 replaces
# such bytes and has no option for it.
_METADATA: dict[str, Any] = {"metadata_errors": "replace"} if _ffmpeg.PYAV < 19 else {}


class Input:
    """An open source, as returned by :func:`open_input`.

    Attributes:
        name: Name in messages: the path, the URL, "bytes of length n", or the file object.
        config: Options of opening it with FFmpeg.
        seekable: Whether FFmpeg can seek in the source.
        checksum_failed: Whether FFmpeg skipped damaged pages when it opened the source.

    Thread safety: one thread at a time.
    """

    def __init__(
        self,
        name: str,
        config: DemuxConfig,
        *,
        file: _File | None = None,
        content: bytes | memoryview | None = None,
        reader: FileReader | None = None,
    ) -> None:
        self.name, self.config = name, config
        self.seekable = reader is None or reader.seekable()
        self.checksum_failed = False
        self._file = file
        self._content = None if content is None else memoryview(content)
        self._reader = reader
        self._memory_reader: io.BytesIO | ViewReader | None = None
        self._container: av.container.InputContainer | None = None

    def head(self, size: int) -> bytes | memoryview:
        """Return the first ``size`` bytes, or all if there are fewer, without consuming them.

        Raises:
            SourceError: They cannot be read.
            ValueError: The source cannot seek, FFmpeg has opened it, and these are more bytes than before.
        """
        if self._content is None:
            if self._file is None:
                return self._stream().head(size)
            if self._file.size > _SMALL:
                return self.read_at(0, size)
            self._content = memoryview(self.read_at(0, _SMALL))
        return self._content[:size]

    def image_head(self) -> Bytes:
        """Return the part that tells how an image is coded: the start, or the boxes ftyp, meta and moov.

        Some phones write the box meta of a HEIC behind the coded data.

        Raises:
            SourceError: The file cannot be read.
        """
        head = self.head(HEAD_SIZE)
        if not self.seekable or container_still(head) != "avif":
            return head
        with suppress(struct.error):  # truncated: FFmpeg's error is more precise
            found = boxes(memoryview(head))
            if not any(kind == b"meta" and end <= len(head) for kind, _, end in found):
                return describing_boxes(self.read_at, self.size())
        return head

    def read_all(self) -> bytes | memoryview:
        """Return the whole content.

        Returns:
            For bytes, the same object. For other memory, a flat uint8 memoryview without a copy; the
            memory cannot be resized while the view exists. For all other sources, new bytes.

        Raises:
            SourceError: The source cannot be read.
        """
        content = self._content
        if content is not None:
            return content.obj if isinstance(content.obj, bytes) else memoryview(content)
        return self._stream().read_all() if self._file is None else self.read_at(0, self.size())

    def open(self, config: DemuxConfig) -> av.container.InputContainer:
        """Open the source with FFmpeg. A container that was opened before is closed.

        Returns:
            PyAV's container. It is closed with this input.

        Raises:
            ValueError: The format, an option or its value is unknown, or a source that cannot seek is opened
                a second time.
            SourceError: The source cannot be read.
            DemuxError: The source is empty, not media, or an MP4 that cannot seek to its index at the end.
        """
        if config.format is not None:
            _ffmpeg.check_format(config.format)
            _ffmpeg.check_format_options(config.format, config.format_options)
        self._close_container()
        self._container = container = self._open_container(self._target(config), config)
        # Checked after opening, when the format is known: FFmpeg ignores options that it does not have.
        if config.format is None and config.format_options:
            _ffmpeg.check_format_options(container.format.name, config.format_options)
        return container

    def missing_end(self) -> str | None:
        """Describe what is missing at the end; ``None`` if nothing is, or the format does not tell.

        Raises:
            SourceError: The source cannot be read.
        """
        return missing_end(self.read_at, self.size()) if self.seekable else None

    def check(self) -> None:
        """Raise the error that stopped a read inside FFmpeg, if there was one.

        Call this when FFmpeg reports the end of the source, so that a partial result is not taken for a
        complete one. Where PyAV can, it raises the error itself.

        Raises:
            SourceError: A read or seek of the source failed.
        """
        if self._reader is not None:
            self._reader.check()

    def close(self) -> None:
        """Close what this input opened, and restore the position of the caller's file object."""
        self._close_container()
        if self._content is not None:
            # A packet may still use the memory through this view, which is then released with the packet.
            with suppress(BufferError):
                self._content.release()
        if self._reader is not None:
            self._reader.detach()
        self._content = self._reader = self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _stream(self) -> FileReader:
        if self._reader is None:
            raise ValueError(f"{self.name}: the input is closed")
        return self._reader

    def _close_container(self) -> None:
        if self._container is not None:
            self._container.close()
            self._container = None
        if self._memory_reader is not None:
            # PyAV's container keeps a reference to its file object, even when it is closed.
            self._memory_reader.close()
            self._memory_reader = None

    @property
    def is_local(self) -> bool:
        """Whether reads at any offset take microseconds: the input is memory or a local file."""
        return self._reader is None

    def in_memory(self, limit: int) -> bool:
        """Whether no read waits for a disk: of memory, or a file of at most ``limit`` bytes, read here.

        Raises:
            SourceError: The file cannot be read.
        """
        if self._file is None or self._content is not None:
            return self._reader is None
        return self._file.size <= limit and len(self.read_at(0, limit)) > 0

    def size(self) -> int:
        """Return the size of the content in bytes. The source must be seekable.

        Raises:
            SourceError: The source cannot be read.
        """
        if self._content is not None:
            return len(self._content)
        return self._stream().size() if self._file is None else self._file.size

    def read_at(self, start: int, size: int) -> bytes | memoryview:
        """Return up to ``size`` bytes from offset ``start``; fewer at the end.

        Raises:
            SourceError: The source cannot be read.
            ValueError: The input is closed.
        """
        if self._content is not None:
            return self._content[start : start + size]
        if (file := self._file) is None:
            return self._stream().peek(start, size)
        try:
            os.lseek(file.number, start, os.SEEK_SET)
            missing = max(0, min(size, file.size - start))
            data = os.read(file.number, missing)
            # One call reads at most 2 GiB, and less if a signal interrupts it.
            while len(data) < missing and (more := os.read(file.number, missing - len(data))):
                data += more
        except OSError as error:
            raise path_error(self.name, error) from error
        return data

    def _target(self, config: DemuxConfig) -> Any:
        """Return what PyAV opens: a path, or an object to read from."""
        if (file := self._file) is not None:
            # FFmpeg opens the path itself, and again for each rewind.
            try:
                opened, found = os.fstat(file.number), Path(file.path).stat()
            except OSError as error:
                raise path_error(self.name, error) from error
            # Some network file systems do not keep the number of a file.
            if opened.st_mtime_ns != found.st_mtime_ns and not os.path.samestat(opened, found):
                raise SourceError(
                    "it was replaced while it was open. Open it again", source=self.name
                )
            # The file protocol has no escapes, so this works for every path, "a:b.mp4" included.
            return f"file:{file.path}"
        content = self._content
        if content is not None:
            # BytesIO shares bytes until it is written to, and reads them faster than Python can.
            whole = content.obj
            reading = io.BytesIO(whole) if isinstance(whole, bytes) else ViewReader(content)
            self._memory_reader = reading
            return reading
        reader = self._stream()
        # The head may have been read before, to tell stills from other media.
        reader.rewind()
        names = _MP4_NAMES if config.format is None else config.format.split(",")
        if (
            not self.seekable
            and not _MP4_NAMES.isdisjoint(names)
            and index_is_last(reader.head(_MP4_HEAD_SIZE))
        ):
            raise DemuxError(
                "this MP4 has its index (moov) at the end, and the source cannot seek to it. Give "
                "it as a path, bytes or a seekable file object, or write the file again with the "
                "index in front: ffmpeg -i IN -c copy -movflags +faststart OUT",
                source=self.name,
            )
        return reader

    def _open_container(self, target: Any, config: DemuxConfig) -> av.container.InputContainer:
        head = self.head(16)
        # FFmpeg would open an empty file as raw data.
        if text := refusal(head, config.format) if head else "the source is empty (0 bytes)":
            raise DemuxError(text, source=self.name)
        # Protocols that FFmpeg may open itself, for playlists and scripts. "none" matches no protocol.
        options = {"protocol_whitelist": "none"}
        if self._file is not None:
            # pattern_type, because "img%03d.jpg" would otherwise mean img001.jpg and the following files.
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
            self.check()  # FFmpeg reports a failed read of the source as invalid data
            bad = re.search(r"Error setting option (\S+) to value", str(error))
            if bad and bad[1] in config.format_options:
                raise ValueError(
                    f"format option {bad[1]!r} does not take the value "
                    f"{config.format_options[bad[1]]!r}. "
                    "See https://ffmpeg.org/ffmpeg-formats.html"
                ) from error.__cause__
            raise
        self.checksum_failed = _ffmpeg.says_damaged(lines[mark:])
        self.check()  # a Ctrl-C may have ended a read without an error from FFmpeg
        return container

    def _not_media(self, text: str, _: object) -> DemuxError:
        head: bytes | memoryview = b""
        with suppress(SourceError):
            head = self.head(12) if self.seekable else b""
        if kind := unread_kind(head):
            text = (
                f"it begins as {kind}, but FFmpeg cannot open it: {text}. It is damaged, or of a kind that "
                "FFmpeg does not read; convert it with another program"
            )
        # Only with the signature of MP4: FFmpeg assumes MP4 for every file named .mp4.
        elif "moov atom not found" in text and head[4:8] == b"ftyp":
            text = (
                f"this MP4 has no index: {text}. It was cut short, or never finished; fetch or "
                "record it again"
            )
        else:
            text = (
                f"FFmpeg cannot open it as media: {text}. If it is raw data, or of a format without a "
                "signature, name the format: demux_config(format=...)"
            )
        return DemuxError(text, source=self.name)


_MP4_NAMES = frozenset({"mov", "mp4", "m4a", "3gp", "3g2", "mj2"})
