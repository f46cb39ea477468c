"""The files in a folder, and what is known of each, in a database on disk.

They are found one by one, whatever is there: links, loops, pipes, names that are no text. A million of them
take no more memory than a thousand.
"""

from __future__ import annotations

import itertools
import mimetypes
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from spdl_media.cli.app import Refused, printable

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
    # Inside of a walked folder it is found without the link; around one, files would come twice.
    target = os.path.realpath(link)
    if _is_loop(link) or any(_holds(root, target) or _holds(target, root) for root in roots):
        return False
    roots.append(target)
    return True


def _is_loop(link: bytes) -> bool:
    return _holds(os.path.realpath(link), os.path.realpath(os.path.dirname(link)))


def _holds(folder: bytes, path: bytes) -> bool:
    return os.path.commonpath([folder, path]) == folder


KINDS = ("damaged", "unreadable", "odd", "duplicate")
"""The kinds of what is reported, in order."""

_PAGE = 500
_SECONDS_BETWEEN_COMMITS = 1.0

_SETTINGS = "PRAGMA locking_mode = EXCLUSIVE; PRAGMA synchronous = NORMAL"
# The first table has a name that tells our files from those of other programs and versions.
_SCHEMA = """
CREATE TABLE spdl_media_check_2 (folder BLOB);
CREATE TABLE files (
    id INTEGER PRIMARY KEY, path BLOB UNIQUE, size INTEGER, mtime INTEGER, seen INTEGER,
    kind TEXT, reason TEXT, digest BLOB
);
CREATE VIEW report AS
    SELECT kind, path, reason FROM files WHERE kind IN ('damaged', 'unreadable', 'odd')
    UNION ALL SELECT 'duplicate', path, first FROM (
        SELECT path, first_value(path) OVER (PARTITION BY digest ORDER BY path) AS first
        FROM files WHERE digest IS NOT NULL
    ) WHERE path != first;
"""

# A result stays while the file does; what could not be read is tried again.
_SEE = """
INSERT INTO files (path, size, mtime, kind, reason, seen) VALUES (?, ?, ?, ?, ?, 1)
ON CONFLICT (path) DO UPDATE SET
    seen = 1, size = excluded.size, mtime = excluded.mtime,
    kind = CASE WHEN same THEN kind ELSE excluded.kind END,
    reason = CASE WHEN same THEN reason ELSE excluded.reason END,
    digest = CASE WHEN same THEN digest END
""".replace("same", "size = excluded.size AND mtime = excluded.mtime AND kind IS NOT 'unreadable'")

# Of these sizes there are several files, so they may be duplicates. What is empty is damaged.
_MARK_ALIKE = """
UPDATE files SET seen = 2 WHERE size IN
    (SELECT size FROM files WHERE size > 0 GROUP BY size HAVING count(*) > 1)
"""
# What is no media has no digest.
_PENDING = "(kind IS NULL OR seen = 2 AND digest IS NULL AND kind IN ('sound', 'damaged', 'odd'))"


@contextmanager
def open_state(path: Path | None, folder: Path) -> Iterator[State]:
    """Open the results of a folder, in a file or, for ``None``, in a temporary one.

    Raises:
        Refused: The file is in use by another check, belongs to another folder, or cannot be written.
    """
    name = "the temporary file of results" if path is None else printable(path)
    remedy, place = "name another file by --state", os.fsencode(folder.resolve())
    try:
        with closing(sqlite3.connect(path or "", timeout=0, check_same_thread=False)) as db:
            # The lock is that of the operating system and goes with the process, however that ends.
            db.executescript(f"{_SETTINGS}; BEGIN IMMEDIATE")
            if not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                for statement in _SCHEMA.split(";"):
                    db.execute(statement)
                db.execute("INSERT INTO spdl_media_check_2 VALUES (?)", [place])
            ((known,),) = db.execute("SELECT folder FROM spdl_media_check_2")
            if known != place:
                other = f"the state of {printable(known)}, and not of {printable(place)}"
                raise Refused(f"{name} is {other}. Please {remedy}")
            try:
                yield State(db)
            finally:
                db.commit()
    except sqlite3.Error as error:
        first = "Free some space, or" if "full" in str(error) else "Please"
        problem = f"cannot be used: {error}. {first}"
        if "locked" in str(error):
            problem = "is in use by another check. Wait for it, or"
        raise Refused(f"{name} {problem} {remedy}") from error


class State:
    """The files of a folder with their results; made by :func:`open_state`. Errors are those of SQLite."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        # The pipeline's source reads in a thread of its own.
        self._lock = threading.Lock()
        self._committed = time.monotonic()

    def _write(self, statement: str, rows: Iterable[tuple[Any, ...]] = ((),)) -> None:
        """Write rows, and commit if that is due."""
        with self._lock:
            self._db.executemany(statement, rows)
            if time.monotonic() - self._committed > _SECONDS_BETWEEN_COMMITS:
                self._db.commit()
                self._committed = time.monotonic()

    def see(self, entries: Iterator[Entry]) -> None:
        """Take in the files that there are, and forget those that are gone.

        Raises:
            sqlite3.Error: They cannot be written.
            OSError: The folder cannot be read.
        """
        # In this order: what is not seen again in this run is gone.
        self._write("UPDATE files SET seen = 0 WHERE seen")
        while page := list(itertools.islice(entries, _PAGE)):
            self._write(_SEE, page)
        self._write("DELETE FROM files WHERE NOT seen")
        self._write(_MARK_ALIKE)

    def pending(self) -> Iterator[tuple[int, bytes, bool]]:
        """Number and path of the files without a result, and whether another has the size.

        Raises:
            sqlite3.Error: The database cannot be read.
        """
        query = f"SELECT id, path, seen = 2 FROM files WHERE id > ? AND {_PENDING} ORDER BY id"  # noqa: S608
        last = 0
        while True:
            # Whole pages, since results are written between them.
            with self._lock:
                page = self._db.execute(f"{query} LIMIT {_PAGE}", [last]).fetchall()
            if not page:
                return
            yield from page
            last = page[-1][0]

    def num_pending(self) -> int:
        """How many files have no result.

        Raises:
            sqlite3.Error: The database cannot be read.
        """
        query = f"SELECT count(*) FROM files WHERE {_PENDING}"  # noqa: S608
        return int(self._db.execute(query).fetchone()[0])

    def save(self, kind: str, reason: str | None, digest: bytes | None, number: int) -> None:
        """Keep the result of a file.

        Raises:
            sqlite3.Error: It cannot be written.
        """
        statement = "UPDATE files SET kind = ?, reason = ?, digest = ? WHERE id = ?"
        self._write(statement, [(kind, reason, digest, number)])

    def counts(self) -> dict[str | None, int]:
        """Count files by kind, and duplicates.

        Raises:
            sqlite3.Error: The database cannot be read.
        """
        query = "SELECT kind, count(*) FROM {} GROUP BY kind"
        tables = ("files", "report")
        return dict(row for table in tables for row in self._db.execute(query.format(table)))

    def report(self) -> Iterator[tuple[str, bytes, Any]]:
        """Give kind, path and reason of what is wrong; of duplicates the first file that is like it.

        Raises:
            sqlite3.Error: The database cannot be read.
        """
        query = "SELECT * FROM report WHERE kind = ? ORDER BY path"
        for kind in KINDS:
            yield from self._db.execute(query, [kind])
