"""Finds the files of a folder, and stores their check results in a database on disk.

The search handles links, loops of links, pipes, and names that are not valid text. Memory does not grow with
the number of files.
"""

from __future__ import annotations

import itertools
import mimetypes
import os
import sqlite3
import stat
import threading
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from spdl_media.cli.app import Refused, printable

# Suffixes of media files that Python's table of file types lacks, or assigns to another type.
_MORE_SUFFIXES = {
    **dict.fromkeys((".avif", ".heic", ".jxl"), "image"),
    **dict.fromkeys((".m2ts", ".mkv", ".nut", ".ts"), "video"),
    **dict.fromkeys((".flac", ".opus"), "audio"),
}
_LOOP = "a link to a folder that it lies in; not followed"


class Entry(NamedTuple):
    """A file, or another directory entry that cannot be opened as one.

    Attributes:
        path: Path relative to the folder.
        size: Size in bytes.
        mtime: Time of the last change, in nanoseconds.
        kind: ``"unreadable"`` or ``"odd"`` for an entry that must not be opened; otherwise ``None``.
        reason: Why it must not be opened.
    """

    path: bytes
    size: int = 0
    mtime: int = 0
    kind: str | None = None
    reason: str | None = None


def named_kind(path: str | Path) -> str | None:
    """Return ``"image"``, ``"video"`` or ``"audio"`` by the file's suffix, or ``None``."""
    suffix = Path(path).suffix.lower()
    # Guess by the suffix only, because a whole name may look like a URL.
    guess = mimetypes.guess_type(f"name{suffix}")[0] or ""
    kind = _MORE_SUFFIXES.get(suffix) or guess.split("/")[0]
    return kind if kind in ("image", "video", "audio") else None


def find_files(folder: Path) -> Iterator[Entry]:
    """Iterate over all files of a folder that are not hidden, in the order of the file system.

    Links to files count as files. Links to folders outside of this folder are followed, each folder once.
    Links to folders inside are ignored, because those are found anyway. A link to a folder that contains it
    is reported as odd. Memory is used only for the folders on the path to the current file, and for links.

    Raises:
        OSError: The folder itself cannot be read.
    """
    top = os.fsencode(folder)
    os.scandir(top).close()  # raises here if the folder cannot be read; folders in it are reported
    yield from _walk(top, b"", [os.path.realpath(top)])


def _walk(folder: bytes, prefix: bytes, roots: list[bytes]) -> Iterator[Entry]:
    """Walk a folder, reading its entries lazily; ``roots`` are the folders that are walked."""
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith(b"."):
                    continue
                path = os.path.join(prefix, entry.name)
                try:
                    if not entry.is_dir():
                        yield _file(path, entry)
                    elif not entry.is_symlink() or _leads_out(entry.path, roots):
                        yield from _walk(entry.path, path, roots)
                    elif _is_loop(entry.path):
                        yield Entry(path, kind="odd", reason=_LOOP)
                except OSError as error:
                    yield _unreadable(path, error)
    except OSError as error:
        yield _unreadable(prefix, error)


def _file(path: bytes, entry: os.DirEntry[bytes]) -> Entry:
    status = entry.stat()
    if stat.S_ISREG(status.st_mode):
        return Entry(path, status.st_size, status.st_mtime_ns)
    # Opening a pipe or a device could block forever.
    return Entry(path, kind="odd", reason="neither a file nor a folder; not opened")


def _unreadable(path: bytes, error: OSError) -> Entry:
    reason = error.strerror or str(error)
    if isinstance(error, FileNotFoundError):
        reason = "a link that leads nowhere, or a file that was removed meanwhile"
    return Entry(path, kind="unreadable", reason=reason)


def _leads_out(link: bytes, roots: list[bytes]) -> bool:
    """Whether a link leads to a folder that is not walked yet; it is then added to ``roots``."""
    # A target inside a walked folder is found anyway; one that contains it would give files twice.
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
"""The kinds of problems in a report, in the order of the report."""

_PAGE = 500

# With a write-ahead log, a commit does not wait for the disk, so there is one for each result.
_SETTINGS = (
    "PRAGMA locking_mode = EXCLUSIVE; PRAGMA synchronous = NORMAL; PRAGMA journal_mode = WAL"
)
# The name of the first table identifies files of this program and version.
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

# The result of an unchanged file is kept, but unreadable files are tried again.
_SEE = """
INSERT INTO files (path, size, mtime, kind, reason, seen) VALUES (?, ?, ?, ?, ?, 1)
ON CONFLICT (path) DO UPDATE SET
    seen = 1, size = excluded.size, mtime = excluded.mtime,
    kind = CASE WHEN same THEN kind ELSE excluded.kind END,
    reason = CASE WHEN same THEN reason ELSE excluded.reason END,
    digest = CASE WHEN same THEN digest END
""".replace("same", "size = excluded.size AND mtime = excluded.mtime AND kind IS NOT 'unreadable'")

# Files whose size occurs several times may be duplicates. Empty files are damaged anyway.
_MARK_ALIKE = """
UPDATE files SET seen = 2 WHERE size IN
    (SELECT size FROM files WHERE size > 0 GROUP BY size HAVING count(*) > 1)
"""
# Files that are not media need no digest.
_PENDING = "(kind IS NULL OR seen = 2 AND digest IS NULL AND kind IN ('sound', 'damaged', 'odd'))"


@contextmanager
def open_state(path: Path | None, folder: Path) -> Iterator[State]:
    """Open the results of a folder, stored in a file or, if ``path`` is ``None``, in a temporary one.

    Raises:
        Refused: The file is in use by another check, belongs to another folder, or cannot be written.
    """
    name = "the temporary file of results" if path is None else printable(path)
    remedy, place = "name another file by --state", os.fsencode(folder.resolve())
    try:
        with closing(sqlite3.connect(path or "", timeout=0, check_same_thread=False)) as db:
            # The operating system holds the lock, and releases it when the process ends in any way.
            db.executescript(f"{_SETTINGS}; BEGIN IMMEDIATE")
            if not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                for statement in _SCHEMA.split(";"):
                    db.execute(statement)
                db.execute("INSERT INTO spdl_media_check_2 VALUES (?)", [place])
            ((known,),) = db.execute("SELECT folder FROM spdl_media_check_2")
            if known != place:
                other = f"the state of {printable(known)}, and not of {printable(place)}"
                raise Refused(f"{name} is {other}. Please {remedy}")
            db.commit()
            yield State(db)
    except sqlite3.Error as error:
        first = "Free some space, or" if "full" in str(error) else "Please"
        problem = f"cannot be used: {error}. {first}"
        if "locked" in str(error):
            problem = "is in use by another check. Wait for it, or"
        raise Refused(f"{name} {problem} {remedy}") from error


class State:
    """The files of a folder with their results. Made by :func:`open_state`. Errors are those of SQLite."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        # The pipeline's source reads in a thread of its own.
        self._lock = threading.Lock()

    def _write(self, statement: str, rows: Iterable[tuple[Any, ...]] = ((),)) -> None:
        """Execute a statement for each row, and commit."""
        with self._lock, self._db:
            self._db.executemany(statement, rows)

    def see(self, entries: Iterator[Entry]) -> None:
        """Add new and changed files, and remove those that no longer exist.

        Raises:
            sqlite3.Error: The database cannot be written.
            OSError: The folder cannot be read.
        """
        # Files that are not marked as seen again below do not exist any more.
        self._write("UPDATE files SET seen = 0 WHERE seen")
        while page := list(itertools.islice(entries, _PAGE)):
            self._write(_SEE, page)
        self._write("DELETE FROM files WHERE NOT seen")
        self._write(_MARK_ALIKE)

    def pending(self) -> Iterator[tuple[int, bytes, bool]]:
        """Iterate over the files without a result: id, path, and whether another file has the same size.

        Raises:
            sqlite3.Error: The database cannot be read.
        """
        query = f"SELECT id, path, seen = 2 FROM files WHERE id > ? AND {_PENDING} ORDER BY id"  # noqa: S608
        last = 0
        while True:
            # Read whole pages, because results are written in between.
            with self._lock:
                page = self._db.execute(f"{query} LIMIT {_PAGE}", [last]).fetchall()
            if not page:
                return
            yield from page
            last = page[-1][0]

    def num_pending(self) -> int:
        """Return the number of files without a result.

        Raises:
            sqlite3.Error: The database cannot be read.
        """
        query = f"SELECT count(*) FROM files WHERE {_PENDING}"  # noqa: S608
        return int(self._db.execute(query).fetchone()[0])

    def save(self, kind: str, reason: str | None, digest: bytes | None, number: int) -> None:
        """Store the result of the file with the id ``number``.

        Raises:
            sqlite3.Error: The database cannot be written.
        """
        statement = "UPDATE files SET kind = ?, reason = ?, digest = ? WHERE id = ?"
        self._write(statement, [(kind, reason, digest, number)])

    def counts(self) -> dict[str | None, int]:
        """Return the number of files by kind, including duplicates.

        Raises:
            sqlite3.Error: The database cannot be read.
        """
        query = "SELECT kind, count(*) FROM {} GROUP BY kind"
        tables = ("files", "report")
        return dict(row for table in tables for row in self._db.execute(query.format(table)))

    def report(self) -> Iterator[tuple[str, bytes, Any]]:
        """Iterate over all problems: kind, path, and reason or, of a duplicate, the first equal file.

        Raises:
            sqlite3.Error: The database cannot be read.
        """
        query = "SELECT * FROM report WHERE kind = ? ORDER BY path"
        for kind in KINDS:
            yield from self._db.execute(query, [kind])
