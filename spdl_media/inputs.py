"""Where media come from: one kind of input out of paths, URLs, memory and file objects.

Local paths are opened by FFmpeg itself, without the GIL. Everything else is read by it through
:mod:`spdl_media._remote`, and may not open anything further: a playlist among the bytes of a data
set reaches neither the disk nor the network.
"""

from __future__ import annotations

import errno
import io
import os
import re
import stat
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeAlias

import av
import av.container
import av.format
import numpy as np

from spdl_media import _ffmpeg
from spdl_media._checks import did_you_mean
from spdl_media._remote import FileReader, Readable, ReadAhead, ViewReader, flat, open_url
from spdl_media.config import DemuxConfig
from spdl_media.errors import DemuxError, SourceError
from spdl_media.truncation import missing_end

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ("Input", "Source", "open_input")


class _SupportsArray(Protocol):
    """A NumPy array, a CPU tensor of PyTorch, and whatever else NumPy can view."""

    def __array__(self) -> np.ndarray[Any, Any]: ...


Source: TypeAlias = "str | os.PathLike[str] | Buffer | _SupportsArray | Readable"
"""A path, a URL (a ``str`` with ``://``), bytes or another contiguous buffer, a 1-D uint8 array or
CPU tensor, or a binary file object."""

_ALLOWED = (
    "A source is a path, a URL, bytes or another contiguous buffer, a 1-D uint8 array or CPU "
    "tensor, or a binary file object"
)

# Protocols that FFmpeg may open on its own, for playlists and scripts. There is no protocol "none".
_LOCAL = "file"
_NOTHING = "none"

_MP4_HEAD_SIZE = 4096
_PYAV_MAJOR = int(av.__version__.partition(".")[0])


def open_input(src: Source, *, name: str | None = None) -> Input:
    """Take a source of any kind, so that the rest of the package needs to know only one.

    Args:
        src: A path (``PathLike``, or a ``str`` without ``://``), a URL for fsspec, or content:
            bytes, any C-contiguous buffer, a 1-D uint8 array or CPU tensor (none of them is
            copied), or a binary file object. A file object that can seek is used from byte 0, and
            put back to where it was on close; another one is read from where it is.
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
    if isinstance(src, str) and "://" in src and not src.startswith("file://"):
        return _open_url(src, name or src)
    if isinstance(src, str | os.PathLike):
        path = os.fsdecode(os.fspath(src)).removeprefix("file://")
        return _open_path(path, name or path)
    if (content := memory_of(src)) is not None:
        return Input(name or f"bytes of length {len(content)}", content=content)
    if callable(getattr(src, "read", None)):
        return _open_file_object(src, name or _file_object_name(src))
    raise TypeError(f"cannot read media from {type(src).__name__}. {_ALLOWED}.")


class Input:
    """An opened source. Made by :func:`open_input`.

    Attributes:
        name: What messages call it: the path, the URL, "bytes of length n", or the file object.
        seekable: Whether FFmpeg can go to and fro in it.
        checksum_failed: Whether FFmpeg has left out damaged pages when it opened the source.

    Thread safety: one thread at a time.
    """

    def __init__(
        self,
        name: str,
        *,
        path: str | None = None,
        file: io.FileIO | None = None,
        content: bytes | memoryview | None = None,
        reader: FileReader | None = None,
        owned: Any = None,
        restore: tuple[Any, int] | None = None,
    ) -> None:
        self.name = name
        self.seekable = reader is None or reader.seekable()
        self.checksum_failed = False
        self._path = path
        self._file = file
        self._content = content
        self._reader = reader
        self._owned = owned
        self._restore = restore
        self._memory_reader: io.BytesIO | ViewReader | None = None
        self._container: av.container.InputContainer | None = None

    def head(self, size: int) -> bytes:
        """The first ``size`` bytes (a copy), or all if there are less. They are not consumed.

        Raises:
            SourceError: They cannot be read.
            ValueError: More of them than before, from a source that cannot seek and has been
                opened.
        """
        if self._path is not None:
            return self._read_path(self._path, size)
        if self._content is not None:
            return bytes(self._content[:size])
        return self._stream().head(size)

    def read_all(self) -> bytes | memoryview:
        """The whole content.

        Returns:
            Of bytes, the same object; of other memory, a flat uint8 memoryview of it (no copy, and
            the memory cannot be resized while this view lives); of all else, new bytes.

        Raises:
            SourceError: It cannot be read.
        """
        if self._path is not None:
            return self._read_path(self._path, -1)
        if self._content is not None:
            content = self._content
            return content if isinstance(content, bytes) else memoryview(content)
        return self._stream().read_all()

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
            _check_format(config.format)
            _ffmpeg.check_format_options(config.format, config.format_options)
        self._close_container()
        target = self._target(config)
        container = self._open_container(target, config)
        self._container = container
        if config.format is None and config.format_options:
            self._check_detected(container, config)
        return container

    def missing_end(self) -> str | None:
        """Say what is missing from the end, where the format states its size and the source can seek.

        Raises:
            SourceError: It cannot be read.
        """
        if self._path is not None:
            try:
                file = self._local_file(self._path)
                return missing_end(partial(_read_at, file), file.seek(0, io.SEEK_END))
            except OSError as error:
                raise _os_error(self.name, error) from error
        if self._content is not None:
            content = self._content
            return missing_end(
                lambda start, size: bytes(content[start : start + size]), len(content)
            )
        reader = self._stream()
        return missing_end(reader.peek, reader.size()) if self.seekable else None

    def check(self) -> None:
        """Raise what stopped a read inside FFmpeg, if something did.

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
        if self._restore is not None:
            file, position = self._restore
            # It may be closed or broken by now, and the caller asked nothing of it here.
            with suppress(Exception):
                file.seek(position)
        for mine in (self._owned, self._file):
            if mine is not None:
                mine.close()
        self._file = None
        self._path = self._content = self._reader = self._restore = self._owned = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

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

    def _read_path(self, path: str, size: int) -> bytes:
        try:
            return _read_at(self._local_file(path), 0, size)
        except OSError as error:
            raise _os_error(self.name, error) from error

    def _local_file(self, path: str) -> io.FileIO:
        """The file, opened once. If that has failed, it fails again here, where the error is of use."""
        if self._file is None:
            self._file = io.FileIO(path)
        return self._file

    def _target(self, config: DemuxConfig) -> Any:
        """What PyAV is given to open: a path, or something to read from."""
        if self._path is not None:
            # FFmpeg opens an empty file as raw data without a word.
            if self._file is not None and self._file.seek(0, io.SEEK_END) == 0:
                raise self._empty()
            # The file protocol has no escapes, so this holds for every path, and "a:b.mp4" is a
            # file.
            return f"file:{self._path}"
        if self._content is not None:
            if not len(self._content):
                raise self._empty()
            # BytesIO shares bytes until it is written to, and reads them faster than Python can.
            content = self._content
            reading = io.BytesIO(content) if isinstance(content, bytes) else ViewReader(content)
            self._memory_reader = reading
            return reading
        reader = self._stream()
        reader.rewind()
        if not reader.head(1):
            raise self._empty()
        if not self.seekable and _may_be_mp4(config.format):
            self._check_index(reader.head(_MP4_HEAD_SIZE))
        return reader

    def _check_index(self, head: bytes) -> None:
        if _index_is_last(head):
            raise DemuxError(
                "this MP4 has its index (moov) at the end, and the source cannot seek to it. Give "
                "it as a path, bytes or a seekable file object, or write the file anew with the "
                "index in front: ffmpeg -i IN -c copy -movflags +faststart OUT",
                source=self.name,
            )

    def _open_container(self, target: Any, config: DemuxConfig) -> av.container.InputContainer:
        try:
            with _ffmpeg.ffmpeg_errors(self._not_media) as lines:
                container: av.container.InputContainer = av.open(
                    target,
                    "r",
                    format=config.format,
                    options=self._options(config),
                    buffer_size=config.buffer_size,
                    **_METADATA,
                )
        except DemuxError as error:
            self._raise_better(error, config)
            raise
        self.checksum_failed = _ffmpeg.says_checksum_failed(lines)
        # Reading may have been broken off without an error that FFmpeg passes on.
        if self._reader is not None and self._reader.failure is not None:
            container.close()
            self._reader.check()
        return container

    def _options(self, config: DemuxConfig) -> dict[str, str]:
        options = {"protocol_whitelist": _LOCAL if self._path is not None else _NOTHING}
        if self._path is not None:
            # A name such as "img%03d.jpg" would otherwise mean img001.jpg and its neighbours.
            options["pattern_type"] = "none"
        return {**options, **config.format_options}

    def _not_media(self, text: str) -> DemuxError:
        # FFmpeg takes whatever is called .mp4 for one.
        if "moov atom not found" in text and self.seekable and self.head(8)[4:] == b"ftyp":
            return DemuxError(
                f"this MP4 has no index: {text}. It was cut short, or never finished; fetch or "
                "record it anew",
                source=self.name,
            )
        return DemuxError(
            f"FFmpeg cannot open it as media: {text}. If it is raw data, or of a format without a "
            "signature, name the format: demux_config(format=...)",
            source=self.name,
        )

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
            self._check_path(self._path, cause)

    def _check_path(self, path: str, cause: BaseException | None) -> None:
        """Ask the operating system, whose words are clearer than FFmpeg's."""
        try:
            self._local_file(path).read(1)
        except OSError as os_error:
            raise _os_error(self.name, os_error) from cause

    def _check_detected(self, container: av.container.InputContainer, config: DemuxConfig) -> None:
        try:
            _ffmpeg.check_format_options(container.format.name, config.format_options)
        except ValueError:
            self._close_container()
            raise

    def _empty(self) -> DemuxError:
        return DemuxError("the source is empty (0 bytes)", source=self.name)


# Metadata that is not UTF-8 must not make a file unreadable. PyAV 18 raises unless told otherwise,
# 19 replaces such bytes and has no option for it.
_METADATA: dict[str, Any] = {"metadata_errors": "replace"} if _PYAV_MAJOR < 19 else {}


def _open_path(path: str, name: str) -> Input:
    try:
        file = io.FileIO(path)
    except OSError:
        # A folder, or none at all. It may be a pattern; open() asks again when FFmpeg has failed.
        return Input(name, path=path)
    except ValueError as error:
        raise SourceError(f"is not a path: {error}", source=name, errno=errno.EINVAL) from error
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return Input(name, path=path, file=file)
    # What was read from a pipe cannot be read again, and head() must be.
    return Input(name, reader=FileReader(file, name, seekable=False), owned=file)


def _read_at(file: io.FileIO, start: int, size: int) -> bytes:
    file.seek(start)
    return file.read(size)  # all, if negative


def _os_error(name: str, error: OSError) -> SourceError:
    reason = error.strerror or str(error)
    remedy = {
        errno.ENOENT: f"Check the path; a relative one starts at {str(Path.cwd())!r}",
        errno.EISDIR: "Give one of the files in it",
        errno.EACCES: "Check the owner and mode of the file and of the folders above it",
        errno.EPERM: "Check the owner and mode of the file and of the folders above it",
    }.get(error.errno or 0, "Check the disk, and that the file can be read by other programs")
    return SourceError(f"cannot be read: {reason}. {remedy}.", source=name, errno=error.errno)


def _open_url(url: str, name: str) -> Input:
    file = open_url(url, name=name)
    if isinstance(file, memoryview):
        return Input(name, content=file)
    seekable = isinstance(file, ReadAhead)
    return Input(name, reader=FileReader(file, name, seekable=seekable), owned=file)


def _file_object_name(file: object) -> str:
    name = getattr(file, "name", None)
    kind = type(file).__name__
    return f"{kind} {name!r}" if isinstance(name, str | int) else f"{kind} object"


def _open_file_object(file: Any, name: str) -> Input:
    if isinstance(file, io.TextIOBase):
        raise TypeError(f"{name} is open in text mode. Open it in binary mode ('rb').")
    if getattr(file, "closed", False):
        raise ValueError(f"{name} is closed. Give it open, or give its path.")
    if callable(getattr(file, "readable", None)) and not file.readable():
        raise TypeError(f"{name} is not open for reading. Open it in mode 'rb'.")
    position = _position(file, name)
    reader = FileReader(file, name, seekable=position is not None)
    return Input(name, reader=reader, restore=None if position is None else (file, position))


def _position(file: Any, name: str) -> int | None:
    """Where a file object is, or ``None`` if it cannot seek."""
    if not (callable(getattr(file, "seek", None)) and callable(getattr(file, "tell", None))):
        return None
    try:
        if callable(getattr(file, "seekable", None)):
            return int(file.tell()) if file.seekable() else None
        position = int(file.tell())
        file.seek(position)
        return position
    except io.UnsupportedOperation:
        return None
    except Exception as error:  # whatever a caller's own file object may raise
        raise SourceError(
            f"its position cannot be told: {type(error).__name__}: {error}", source=name
        ) from error


def memory_of(src: Any) -> bytes | memoryview | None:
    """The memory behind bytes, buffers, arrays and tensors; ``None`` for what is none of them."""
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


_MP4_NAMES = frozenset({"mov", "mp4", "m4a", "3gp", "3g2", "mj2"})
_BEFORE_INDEX = frozenset({b"ftyp", b"free", b"skip", b"wide", b"uuid", b"pnot"})


def _check_format(format: str) -> None:
    """Refuse the name of a format that FFmpeg cannot read, which PyAV in part would ignore.

    Raises:
        ValueError: FFmpeg has no demuxer of this name.
    """
    if not _is_demuxer(format):
        names = {part for name in av.format.formats_available for part in name.split(",")}
        hint = did_you_mean(format, sorted(filter(_is_demuxer, names)))
        raise ValueError(
            f"this FFmpeg cannot read a format named {format!r}. {hint and hint + ' '}"
            "See https://ffmpeg.org/ffmpeg-formats.html#Demuxers"
        )


@lru_cache(maxsize=1024)
def _is_demuxer(format: str) -> bool:
    try:
        av.format.ContainerFormat(format, "r")
    except ValueError:
        return False
    return True


def _may_be_mp4(format: str | None) -> bool:
    """Whether a format as given by the user (or not) allows for an MP4 or QuickTime file."""
    return format is None or not _MP4_NAMES.isdisjoint(format.split(","))


def _index_is_last(head: bytes) -> bool:
    """Whether an MP4 or QuickTime file that begins so has its samples before its index."""
    position = 0
    while position + 8 <= len(head):
        size, kind = (
            int.from_bytes(head[position : position + 4]),
            head[position + 4 : position + 8],
        )
        if kind == b"mdat":
            return True
        if kind not in _BEFORE_INDEX or size < 8:
            return False
        position += size
    return False
