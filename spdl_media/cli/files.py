"""The files in a folder, one by one, whatever is in it: links, loops, pipes, names that are no text."""

from __future__ import annotations

import mimetypes
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# Files of media that Python's table of file types lacks, or takes for something else.
_MORE_SUFFIXES = {
    **dict.fromkeys((".avif", ".heic", ".jxl"), "image"),
    **dict.fromkeys((".m2ts", ".mkv", ".nut", ".ts"), "video"),
    **dict.fromkeys((".flac", ".opus"), "audio"),
}
_LOOP = "a link to a folder that it lies in; not followed"


class Entry(NamedTuple):
    """A file, or what cannot be one.

    Attributes:
        path: Below the folder.
        size: Its bytes.
        mtime: When it was changed, in nanoseconds.
        kind: ``"unreadable"`` or ``"odd"``, for what is not to be opened.
        reason: Why not.
    """

    path: bytes
    size: int = 0
    mtime: int = 0
    kind: str | None = None
    reason: str | None = None


def named_kind(path: str | Path) -> str | None:
    """``"image"``, ``"video"`` or ``"audio"``, by the name alone."""
    suffix = Path(path).suffix.lower()
    # Of the suffix alone: a name may look like a URL.
    guess = mimetypes.guess_type(f"name{suffix}")[0] or ""
    kind = _MORE_SUFFIXES.get(suffix) or guess.split("/")[0]
    return kind if kind in ("image", "video", "audio") else None


def find_files(folder: Path) -> Iterator[Entry]:
    """All files of a folder that are not hidden, in the order in which the file system gives them.

    Links to files are files. Links to folders outside are followed, each folder once; what links lead to
    inside is found without them, and a link to a folder that it lies in is odd. Memory is that of the folders
    on the way to a file, and of links.

    Raises:
        OSError: The folder itself cannot be read.
    """
    top = os.fsencode(folder)
    yield from _below(os.scandir(top), b"", [os.path.realpath(top)])


def _below(
    entries: Iterator[os.DirEntry[bytes]], prefix: bytes, roots: list[bytes]
) -> Iterator[Entry]:
    """Walk a folder whose entries are read as they are needed; ``roots`` are those that are walked."""
    stack = [(entries, prefix)]
    while stack:
        entries, prefix = stack[-1]
        try:
            entry = next(entries, None)
        except OSError as error:
            entry = None
            yield _unreadable(prefix, error)
        if entry is None:
            stack.pop()
            continue
        if entry.name.startswith(b"."):
            continue
        path = os.path.join(prefix, entry.name)
        try:
            if not entry.is_dir():
                yield _file(path, entry)
            elif not entry.is_symlink() or _leads_out(entry.path, roots):
                stack.append((os.scandir(entry.path), path))
            elif _is_loop(entry.path):
                yield Entry(path, kind="odd", reason=_LOOP)
        except OSError as error:
            yield _unreadable(path, error)


def _file(path: bytes, entry: os.DirEntry[bytes]) -> Entry:
    status = entry.stat()
    if stat.S_ISREG(status.st_mode):
        return Entry(path, status.st_size, status.st_mtime_ns)
    # A pipe or a device could keep us waiting for ever.
    return Entry(path, kind="odd", reason="neither a file nor a folder; not opened")


def _unreadable(path: bytes, error: OSError) -> Entry:
    reason = error.strerror or str(error)
    if isinstance(error, FileNotFoundError):
        reason = "a link that leads nowhere, or a file that was removed meanwhile"
    return Entry(path, kind="unreadable", reason=reason)


def _leads_out(link: bytes, roots: list[bytes]) -> bool:
    """Whether a link leads to a folder that is not walked yet, which is noted."""
    target = os.path.realpath(link)
    if _is_loop(link) or any(_holds(root, target) or _holds(target, root) for root in roots):
        return False
    roots.append(target)
    return True


def _is_loop(link: bytes) -> bool:
    return _holds(os.path.realpath(link), os.path.realpath(os.path.dirname(link)))


def _holds(folder: bytes, path: bytes) -> bool:
    return os.path.commonpath([folder, path]) == folder
