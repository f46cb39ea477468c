"""What is known of each file, in a database on disk: a million files take no more memory than a thousand."""

from __future__ import annotations

import itertools
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from spdl_media.cli.files import Entry
from spdl_media.cli.terminal import Refused, printable

# Tells our files from those of other programs: "spdl" in ASCII.
_APPLICATION, _VERSION = 0x7370646C, 1
_PAGE = 500
_SECONDS_BETWEEN_COMMITS = 1.0

_SCHEMA = f"""
PRAGMA application_id = {_APPLICATION};
PRAGMA user_version = {_VERSION};
CREATE TABLE folder (path BLOB);
CREATE TABLE files (
    id INTEGER PRIMARY KEY, path BLOB UNIQUE, size INTEGER, mtime INTEGER, seen INTEGER,
    kind TEXT, reason TEXT, digest BLOB
);
CREATE INDEX sizes ON files (size);
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

_DUPLICATES = """
SELECT path, first FROM (
    SELECT path, first_value(path) OVER (PARTITION BY digest ORDER BY path) AS first
    FROM files WHERE digest IS NOT NULL
) WHERE path != first ORDER BY path
"""

# What is empty is damaged, and what is no media does not matter.
_MEDIA = "size > 0 AND kind IN ('sound', 'damaged', 'odd')"
_MARK_ALIKE = f"""
UPDATE files SET seen = 2 WHERE digest IS NULL AND {_MEDIA} AND size IN
    (SELECT size FROM files WHERE {_MEDIA} GROUP BY size HAVING count(*) > 1)
"""  # noqa: S608  # of constants, as are the queries below


class State:
    """The files of a folder with their results. Use it as a context manager.

    Args:
        path: File to keep them in; ``None``: a temporary one, which is gone at the end.
        folder: Whose files they are.

    Raises:
        Refused: The file is in use by another check, belongs to another folder, or cannot be written.
    """

    def __init__(self, path: Path | None, folder: Path) -> None:
        self._name = "the temporary file of results" if path is None else printable(path)
        # The pipeline's source reads in a thread of its own.
        self._lock = threading.Lock()
        self._committed = time.monotonic()
        with self._sentences():
            self._db = sqlite3.connect(
                path or "", timeout=0, isolation_level=None, check_same_thread=False
            )
        try:
            with self._sentences():
                self._open(os.fsencode(folder.resolve()))
        except BaseException:
            self._db.close()
            raise

    def _open(self, folder: bytes) -> None:
        # The lock is that of the operating system and goes with the process, however that ends.
        self._db.executescript("PRAGMA locking_mode = EXCLUSIVE; PRAGMA synchronous = NORMAL;")
        self._db.execute("BEGIN IMMEDIATE")
        if not self._number("SELECT count(*) FROM sqlite_master"):
            for statement in _SCHEMA.split(";"):
                self._db.execute(statement)
            self._db.execute("INSERT INTO folder VALUES (?)", [folder])
        marks = [self._number(f"PRAGMA {name}") for name in ("application_id", "user_version")]
        if marks != [_APPLICATION, _VERSION]:
            raise Refused(
                f"{self._name} is not a state of this version. Name another file by --state"
            )
        ((known,),) = self._db.execute("SELECT path FROM folder")
        if known != folder:
            raise Refused(
                f"{self._name} is the state of {printable(known)}, and not of {printable(folder)}. Name "
                "another file by --state"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            # After an error, the disk is perhaps full, and that was told.
            with self._lock, self._sentences() if kind is None else suppress(sqlite3.Error):
                self._db.execute("COMMIT")
        finally:
            self._db.close()

    @contextmanager
    def _sentences(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            if "locked" in str(error):
                problem = "is in use by another check. Wait for it"
            else:
                problem = f"cannot be used: {error}. Free some space"
            raise Refused(f"{self._name} {problem}, or name another file by --state") from error

    def _number(self, query: str) -> int:
        return int(self._db.execute(query).fetchone()[0])

    def _write(self, statement: str, rows: Iterable[tuple[Any, ...]] = ((),)) -> None:
        """Write rows, and commit if that is due."""
        with self._lock, self._sentences():
            self._db.executemany(statement, rows)
            if time.monotonic() - self._committed > _SECONDS_BETWEEN_COMMITS:
                self._db.execute("COMMIT")
                self._db.execute("BEGIN")
                self._committed = time.monotonic()

    def see(self, entries: Iterable[Entry], progress: Callable[[int], object]) -> None:
        """Take in the files that there are, and forget those that are gone."""
        self._write("UPDATE files SET seen = 0 WHERE seen")
        for number in itertools.count(1):
            page = list(itertools.islice(entries := iter(entries), _PAGE))
            if not page:
                break
            self._write(_SEE, page)
            progress((number - 1) * _PAGE + len(page))
        self._write("DELETE FROM files WHERE NOT seen")

    def unchecked(self) -> tuple[int, Iterator[tuple[int, bytes]]]:
        """Count and give the numbers and paths of the files without a result."""
        return self._those("kind IS NULL")

    def unhashed(self) -> tuple[int, Iterator[tuple[int, bytes]]]:
        """Count and give the numbers and paths of media whose size another has."""
        self._write(_MARK_ALIKE)
        return self._those("seen = 2 AND digest IS NULL")

    def _those(self, which: str) -> tuple[int, Iterator[tuple[int, bytes]]]:
        with self._lock, self._sentences():
            count = self._number(f"SELECT count(*) FROM files WHERE {which}")  # noqa: S608
        return count, self._pages(which)

    def counts(self) -> dict[str | None, int]:
        """Count files by kind."""
        with self._lock, self._sentences():
            return dict(self._db.execute("SELECT kind, count(*) FROM files GROUP BY kind"))

    def _pages(self, which: str) -> Iterator[tuple[int, bytes]]:
        last = 0
        while True:
            # Whole pages, since results are written between them.
            with self._lock, self._sentences():
                query = f"SELECT id, path FROM files WHERE id > ? AND {which} ORDER BY id"  # noqa: S608
                page = self._db.execute(f"{query} LIMIT {_PAGE}", [last]).fetchall()
            if not page:
                return
            yield from page
            last = page[-1][0]

    def save_results(self, results: Iterable[tuple[str, str | None, int]]) -> None:
        """Keep kind and reason by number."""
        self._write("UPDATE files SET kind = ?, reason = ? WHERE id = ?", results)

    def save_digests(self, results: Iterable[tuple[bytes | None, int]]) -> None:
        """Keep digests by number."""
        self._write("UPDATE files SET digest = ? WHERE id = ?", results)

    def duplicates(self) -> Iterator[tuple[bytes, bytes]]:
        """Give files whose bytes are those of another, and the first one of these, by path."""
        with self._sentences():
            yield from self._db.execute(_DUPLICATES)

    def found(self, kind: str) -> Iterator[tuple[bytes, str]]:
        """Give the files of a kind with the reason, by path."""
        with self._sentences():
            query = "SELECT path, reason FROM files WHERE kind = ? ORDER BY path"
            yield from self._db.execute(query, [kind])
