"""The exception classes of this package.

    MediaError                          any failure of this package that is not misuse
    ├── SourceError (OSError)           the source cannot be opened or read
    ├── DemuxError (ValueError)         opened, but not media, no such stream, broken container
    ├── DecodeError (ValueError)        damaged or unsupported data
    │   └── ArrayFormatError            damaged or unsupported npy, npz, wav or tar (``array_formats``)
    ├── FilterError (ValueError)        the filter description cannot be used
    │   └── PictureSizeError            the filters cannot scale an image of this size
    ├── ConvertError (ValueError)       frames that cannot form one array
    │   └── StorageTooSmallError        the array does not fit into the storage
    ├── EncodeError (ValueError)        frames that the encoder or the file format does not accept
    ├── WriteError (OSError)            the destination cannot be created or written
    ├── TransferError (RuntimeError)    allocating on a CUDA device, or copying to or from it, fails
    └── MissingDependencyError (ImportError)   an optional package is not installed

Each class also derives from the builtin in parentheses, so that code that does not know this package can
catch it. Misuse (a wrong type, a window that ends before it starts) raises plain ``TypeError`` and
``ValueError``.

A message says what was requested, the value, what is allowed, and the remedy. The original error of
FFmpeg, the file system or fsspec is the ``__cause__``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

__all__ = (
    "ArrayFormatError",
    "ConvertError",
    "DecodeError",
    "DemuxError",
    "EncodeError",
    "FilterError",
    "MediaError",
    "MissingDependencyError",
    "PictureSizeError",
    "SourceError",
    "StorageTooSmallError",
    "TransferError",
    "WriteError",
)


def without_password(text: str) -> str:
    """Replace the passwords of URLs in a text, because messages are logged and stored."""
    return re.sub(r"(://[^/?#:\s]*):[^/?#\s]*@", r"\1:***@", text)


@dataclass(eq=False, repr=False)
class MediaError(Exception):
    """Base class of all errors that media cause.

    Attributes:
        message: What was requested, what was found, and the remedy.
        source: What was being read: a path, a URL without its password, or "bytes of length n".
    """

    message: str = ""
    source: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self.message = without_password(self.message)
        self.source = self.source and without_password(self.source)
        # The generated __init__ of a dataclass does not call the base's.
        super().__init__(self.message)

    def __str__(self) -> str:
        return f"{self.source}: {self.message}" if self.source else self.message

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception.__reduce__ calls cls(*args), which loses keyword-only fields. An exception that cannot
        # be unpickled breaks a process pool, so the state of every subclass is pickled here.
        return _rebuild, (type(self), self.__dict__)


def _rebuild(cls: type[MediaError], state: dict[str, Any]) -> MediaError:
    error = cls(state["message"])
    # Also restores notes and attributes that were set after construction.
    error.__dict__.update(state)
    return error


def with_message(error: MediaError, message: str) -> MediaError:
    """Return a copy of an error, of the same class and with the same fields, with another message."""
    return _rebuild(type(error), {**error.__dict__, "message": message})


@dataclass(eq=False, repr=False, kw_only=True)
class SourceError(MediaError, OSError):
    """The source cannot be opened or read: missing, a directory, no permission, a failed request.

    ``errno`` is the operating system's error number, or ``None`` if there is none.
    """

    errno: int | None = None


class DemuxError(MediaError, ValueError):
    """The source was opened but cannot be demuxed: not media, broken, or without the requested stream."""


@dataclass(eq=False, repr=False, kw_only=True)
class DecodeError(MediaError, ValueError):
    """The data is damaged, or this FFmpeg has no decoder for it.

    Attributes:
        pts_seconds: Time of the packet or frame in question on the file's clock, in seconds, if
            known.
        packet_index: Its index among the packets that were being decoded, if known.
    """

    pts_seconds: float | None = None
    packet_index: int | None = None


@dataclass(eq=False, repr=False, kw_only=True)
class ArrayFormatError(DecodeError):
    """An array file or archive is damaged, truncated, states wrong sizes, or is of an unsupported kind.

    Attributes:
        member: Name of the array or file inside the archive that is concerned, if any.
        offset: Position of the fault in the source, in bytes from its start, if known.
    """

    member: str | None = None
    offset: int | None = None

    def __str__(self) -> str:
        member = None if self.member is None else f"member {self.member!r}"
        text = ": ".join(filter(None, (self.source, member, self.message)))
        return text if self.offset is None else f"{text} (at byte {self.offset})"


@dataclass(eq=False, repr=False, kw_only=True)
class FilterError(MediaError, ValueError):
    """The filter description has a syntax error, names an unknown filter, or does not fit the frames.

    Attributes:
        filter_desc: The description as it was passed.
    """

    filter_desc: str | None = None


class PictureSizeError(FilterError):
    """The filters do not work on an image of this size: scaled, it would be larger than FFmpeg allows."""


class ConvertError(MediaError, ValueError):
    """The frames cannot form one array: they differ, there are none, or their format has no array."""


class StorageTooSmallError(ConvertError):
    """The array needs more bytes than the storage has. The message states both sizes."""


class EncodeError(MediaError, ValueError):
    """The encoder or the file format does not accept the frames or packets. The message says why."""


@dataclass(eq=False, repr=False, kw_only=True)
class WriteError(MediaError, OSError):
    """The destination cannot be created or written: a full disk, no permission, a failing file object.

    No partial file is left under the destination's name. ``errno`` is the operating system's error number,
    or ``None`` if there is none.
    """

    errno: int | None = None


class TransferError(MediaError, RuntimeError):
    """No CUDA device is usable, the device is out of memory, or a copy fails. The message says why."""


@dataclass(eq=False, repr=False, kw_only=True)
class MissingDependencyError(MediaError, ImportError):
    """A needed optional package is not installed. The message has the ``pip`` command that installs it."""

    name: str | None = None
