"""What is known of each file, in a database on disk: a million files take no more memory than a thousand."""

from __future__ import annotations

import itertools
import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from spdl_media.cli.files import Entry
from spdl_media.cli.terminal import Refused, printable

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
        """Take in the files that there are, and forget those that are gone."""
        self._write("UPDATE files SET seen = 0 WHERE seen")
        while page := list(itertools.islice(entries, _PAGE)):
            self._write(_SEE, page)
        self._write("DELETE FROM files WHERE NOT seen")
        self._write(_MARK_ALIKE)

    def pending(self) -> Iterator[tuple[int, bytes, bool]]:
        """Number and path of the files without a result, and whether another has the size."""
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
        """How many files have no result."""
        query = f"SELECT count(*) FROM files WHERE {_PENDING}"  # noqa: S608
        return int(self._db.execute(query).fetchone()[0])

    def save(self, kind: str, reason: str | None, digest: bytes | None, number: int) -> None:
        """Keep the result of a file."""
        statement = "UPDATE files SET kind = ?, reason = ?, digest = ? WHERE id = ?"
        self._write(statement, [(kind, reason, digest, number)])

    def counts(self) -> dict[str | None, int]:
        """Count files by kind, and duplicates."""
        query = "SELECT kind, count(*) FROM {} GROUP BY kind"
        tables = ("files", "report")
        return dict(row for table in tables for row in self._db.execute(query.format(table)))

    def report(self) -> Iterator[tuple[str, bytes, Any]]:
        """Give kind, path and reason of what is wrong; of duplicates the first file that is like it."""
        query = "SELECT * FROM report WHERE kind = ? ORDER BY path"
        for kind in KINDS:
            yield from self._db.execute(query, [kind])
