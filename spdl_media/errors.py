"""Everything that can go wrong with media, as a small tree.

    MediaError                          any failure of this package that is not misuse
    ├── SourceError (OSError)           the source cannot be opened or read
    ├── DemuxError (ValueError)         opened, but not media, no such stream, broken container
    ├── DecodeError (ValueError)        damaged or unsupported data
    │   └── ArrayFormatError            the same of npy, npz, wav and tar (in ``array_formats``)
    ├── FilterError (ValueError)        the filter description cannot be used
    │   └── PictureSizeError            one image is too thin or too large for it
    ├── ConvertError (ValueError)       frames that cannot form one array
    │   └── StorageTooSmallError        the array does not fit into the storage
    ├── EncodeError (ValueError)        frames that the encoder or the file format does not take
    ├── WriteError (OSError)            the destination cannot be created or written
    ├── TransferError (RuntimeError)    memory cannot be had on a CUDA device, or not be copied there
    └── MissingDependencyError (ImportError)   an optional package is not installed

Each is also the builtin in parentheses, so code that knows nothing of this package catches it as
well. Misuse (a wrong type, a window that ends before it starts) stays ``TypeError`` and
``ValueError``.

A message says what was asked, the value, what is allowed, and what helps. The original error of
FFmpeg, of the file system or of fsspec is the ``__cause__``.
"""

from __future__ import annotations

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


@dataclass(eq=False, repr=False)
class MediaError(Exception):
    """Base of all errors that media cause.

    Attributes:
        message: What was asked, what was found, what helps.
        source: What was being read: a path, a URL, or "bytes of length n".
    """

    message: str = ""
    source: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        # The __init__ of a dataclass does not call that of its base.
        super().__init__(self.message)

    def __str__(self) -> str:
        return f"{self.source}: {self.message}" if self.source else self.message

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception.__reduce__ calls cls(*args), which cannot give back keyword-only fields. A process
        # pool dies of an exception that cannot be rebuilt, so all subclasses are rebuilt here.
        return _rebuild, (type(self), self.__dict__)


def _rebuild(cls: type[MediaError], state: dict[str, Any]) -> MediaError:
    error = cls(state["message"])
    # Notes and fields that a caller has set come along.
    error.__dict__.update(state)
    return error


def with_message(error: MediaError, message: str) -> MediaError:
    """An error of the same kind and with the same fields that says something else."""
    return _rebuild(type(error), {**error.__dict__, "message": message})


@dataclass(eq=False, repr=False, kw_only=True)
class SourceError(MediaError, OSError):
    """The source cannot be opened or read: missing, a directory, no permission, a failed request.

    ``errno`` is the operating system's number where it gave one, else ``None``.
    """

    errno: int | None = None


class DemuxError(MediaError, ValueError):
    """The source was opened but cannot be taken apart: not media, broken, or without the stream asked for."""


@dataclass(eq=False, repr=False, kw_only=True)
class DecodeError(MediaError, ValueError):
    """The data is damaged, or no decoder of this FFmpeg takes it.

    Attributes:
        pts_seconds: Time of the packet or frame in question on the file's clock, in seconds, if
            known.
        packet_index: Its position among the packets that were being decoded, if known.
    """

    pts_seconds: float | None = None
    packet_index: int | None = None


@dataclass(eq=False, repr=False, kw_only=True)
class ArrayFormatError(DecodeError):
    """An array file or archive is damaged, cut short, lies about its sizes, or is of a kind that is not read.

    Attributes:
        member: The name of the array or file inside the archive, if one is concerned.
        offset: Where in the source, in bytes from its start, if known.
    """

    member: str | None = None
    offset: int | None = None

    def __str__(self) -> str:
        member = None if self.member is None else f"member {self.member!r}"
        text = ": ".join(filter(None, (self.source, member, self.message)))
        return text if self.offset is None else f"{text} (at byte {self.offset})"


@dataclass(eq=False, repr=False, kw_only=True)
class FilterError(MediaError, ValueError):
    """The filter description does not parse, names no filter of this FFmpeg, or does not fit the frames.

    Attributes:
        filter_desc: The description as it was given.
    """

    filter_desc: str | None = None


class PictureSizeError(FilterError):
    """The filters take images, but none of this size: scaled, it would be larger than FFmpeg allows."""


class ConvertError(MediaError, ValueError):
    """The frames cannot form one array: they differ, there are none, or their format has no array."""


class StorageTooSmallError(ConvertError):
    """The array takes more bytes than the storage has. The message says both sizes."""


class EncodeError(MediaError, ValueError):
    """The encoder or the file format does not take the frames or packets. The message says why."""


@dataclass(eq=False, repr=False, kw_only=True)
class WriteError(MediaError, OSError):
    """The destination cannot be created or written: a full disk, no permission, a failing file object.

    Nothing was left under its name. ``errno`` is the operating system's number where it gave one, else
    ``None``.
    """

    errno: int | None = None


class TransferError(MediaError, RuntimeError):
    """No CUDA device can be used here, or it has no memory left, or a copy fails. The message says why."""


@dataclass(eq=False, repr=False, kw_only=True)
class MissingDependencyError(MediaError, ImportError):
    """An optional package is needed and not installed. The message has the ``pip`` line."""

    name: str | None = None
