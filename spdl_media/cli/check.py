"""``spdl-media check``: a data set decoded in a pipeline, and what is wrong with it."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task
from rich.text import Text

from spdl_media._loader_arguments import usable_cores
from spdl_media.cli.decoding import check_file
from spdl_media.cli.files import find_files
from spdl_media.cli.state import State
from spdl_media.cli.terminal import (
    Refused,
    indented,
    make_console,
    printable,
    write_error,
    writing,
)
from spdl_media.pipeline import PipelineBuilder, PipelineFailure, PipelineStopped

_STYLES = {"damaged": "red", "unreadable": "red", "odd": "yellow", "duplicate": "cyan"}
"""The kinds of what is reported, in order."""

_NARROW = 70  # columns of a terminal that has no room for a bar
_SAVED_AT_ONCE, _SECONDS_UNSAVED = 256, 0.5


def check_folder(
    *, folder: Path, form: str | None, output: Path | None, state: Path | None, threads: int | None
) -> int:
    """Check all files and write the report; return the exit status.

    Raises:
        Refused: There is no media, the state cannot be used, or the report cannot be written.
    """
    form = form or {".json": "json", ".csv": "csv"}.get(output.suffix if output else "", "text")
    if output is not None:
        # Better now than after hours of work. What is there stays until the end.
        with writing(output), output.open("a", encoding="utf-8"):
            pass
    start, interrupted = time.monotonic(), False
    with State(state, folder) as files:
        try:
            with _make_progress(make_console(sys.stderr)) as progress:
                _check(folder, files, threads or usable_cores(), progress)
        except KeyboardInterrupt:
            interrupted = True
        report = _Report(folder, files, interrupted=interrupted, seconds=time.monotonic() - start)
        if not (interrupted or report.num_found or report.counts["sound"]):
            raise Refused(
                f"no media in {printable(folder)}, which has {report.counts['other']:,} other files. (Hidden "
                "files are left out, and archives are not opened)"
            )
        report.write(form, output)
    if interrupted:
        left = f"{report.counts['unchecked']} files are found and not checked"
        more = "Run it again to go on" if state else "With --state FILE another run can go on"
        write_error(f"interrupted: {left}, and not all duplicates are known. {more}")
        return 130
    return int(report.num_found > 0)


class _Status(ProgressColumn):
    """How far it is: items, rate, failures and the time left, as far as there is room."""

    max_refresh = 0.2

    def __init__(self, *, is_narrow: bool) -> None:
        super().__init__()
        self._is_narrow = is_narrow

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text(f"{task.completed:,.0f} files")
        done = f"{task.completed:,.0f}/{task.total:,.0f}"
        left = "-:--" if task.time_remaining is None else _minutes(task.time_remaining)
        how_far = f"{task.percentage:.0f}%" if self._is_narrow else done
        speed = task.speed or 0
        rate = f"{speed:,.1f}/s" if speed < 100 else f"{speed:,.0f}/s"
        return Text("  ".join([how_far, rate, f"{task.fields['bad']} bad", f"{left} left"]))


def _minutes(seconds: float) -> str:
    minutes, seconds = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _make_progress(console: Console) -> Progress:
    is_narrow = console.width < _NARROW
    columns: list[str | ProgressColumn] = (
        [] if is_narrow else ["{task.description}", BarColumn(None)]
    )
    # Room for the ^C that terminals show: behind a full line it would begin another, which would stay.
    console.width -= 3
    # Nothing at all where nobody watches.
    is_hidden = not console.is_terminal
    status = _Status(is_narrow=is_narrow)
    return Progress(
        *columns, status, console=console, transient=True, disable=is_hidden, expand=True
    )


def _check(folder: Path, files: State, threads: int, progress: Progress) -> None:
    """Find, decode and compare the files, and keep what comes out."""
    task = progress.add_task("finding", total=None, bad=0)
    files.see(find_files(folder), lambda number: progress.update(task, completed=number))
    progress.remove_task(task)

    def decode(item: tuple[int, bytes]) -> tuple[str, str | None, int]:
        number, path = item
        verdict = check_file(Path(folder, os.fsdecode(path)))
        return verdict.kind, verdict.reason, number

    def digest(item: tuple[int, bytes]) -> tuple[bytes | None, int]:
        number, path = item
        # What cannot be read any more is no duplicate that anybody could use.
        with suppress(OSError), Path(folder, os.fsdecode(path)).open("rb") as file:
            return hashlib.file_digest(
                file, lambda: hashlib.blake2b(digest_size=16)
            ).digest(), number
        return None, number

    work("decoding", files.unchecked(), decode, files.save_results, threads, progress)
    work("comparing", files.unhashed(), digest, files.save_digests, threads, progress)


def work(
    name: str,
    items: tuple[int, Iterator[tuple[int, bytes]]],
    function: Callable[[tuple[int, bytes]], tuple[Any, ...]],
    save: Callable[[list[Any]], None],
    threads: int,
    progress: Progress,
) -> None:
    """Call a function of all files in a pipeline, and save what it gives, also when it is interrupted."""
    task = progress.add_task(name, total=items[0], bad=0)
    builder = PipelineBuilder().add_source(items[1]).pipe(function, concurrency=threads)
    pipeline = builder.add_sink(threads).build(num_threads=threads, max_failures=0)
    unsaved: list[Any] = []
    saved, bad = time.monotonic(), 0
    try:
        with pipeline.auto_stop():
            while True:
                # Not for long: what came before a long video is to be safe while that is decoded.
                with suppress(TimeoutError):
                    unsaved.append(pipeline.get_item(timeout=_SECONDS_UNSAVED))
                    bad += unsaved[-1][0] in _STYLES
                    progress.update(task, advance=1, bad=bad)
                if len(unsaved) >= _SAVED_AT_ONCE or time.monotonic() - saved > _SECONDS_UNSAVED:
                    save(unsaved)
                    unsaved, saved = [], time.monotonic()
    except PipelineStopped:
        pass
    except PipelineFailure as failure:
        raise failure.exceptions[0] from failure
    finally:
        save(unsaved)
        progress.remove_task(task)


class _Report:
    """What was found, read from the state as it is written."""

    def __init__(self, folder: Path, files: State, *, interrupted: bool, seconds: float) -> None:
        self._folder, self._files, self._seconds = folder, files, seconds
        counts = files.counts()
        names = ("sound", "damaged", "unreadable", "odd", "other")
        self.counts = {name: counts.get(name, 0) for name in names}
        self.counts["duplicate"] = sum(1 for _ in files.duplicates())
        self.counts["unchecked"] = counts.get(None, 0)
        self._is_complete = not interrupted
        self.num_found = sum(self.counts[name] for name in _STYLES)

    def _rows(self) -> Iterator[tuple[str, str, str]]:
        """Kind, path and reason of each file that is reported."""
        for kind in _STYLES:
            if kind == "duplicate":
                for path, first in self._files.duplicates():
                    yield kind, self._path(path), f"the same bytes as {self._path(first)}"
            else:
                for path, reason in self._files.found(kind):
                    yield kind, self._path(path), reason

    def _path(self, path: bytes) -> str:
        return str(self._folder / os.fsdecode(path))

    def write(self, form: str, output: Path | None) -> None:
        """Write it to a file, with a summary to stdout, or all to stdout.

        Raises:
            Refused: The file cannot be written. Then all is on stdout.
        """
        if output is None:
            if form == "csv" and isinstance(sys.stdout, io.TextIOWrapper):
                # The bytes of names, whatever they are.
                sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")
            with writing("the report"):
                self._write(form, sys.stdout)
            return
        try:
            with (
                writing(output),
                output.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file,
            ):
                self._write(form, file)
        except Refused:
            self._write("text", sys.stdout)
            raise
        make_console().print(self._summary())

    def _write(self, form: str, stream: TextIO) -> None:
        if form == "json":
            head = {"folder": str(self._folder), "complete": self._is_complete, **self.counts}
            stream.write(json.dumps(head)[:-1] + ', "files": [')
            for number, row in enumerate(self._rows()):
                line = json.dumps(dict(zip(("kind", "path", "reason"), row, strict=True)))
                stream.write(f"{',' if number else ''}\n  {line}")
            stream.write("\n]}\n")
        elif form == "csv":
            writer = csv.writer(stream, lineterminator="\n")
            writer.writerow(("kind", "path", "reason"))
            writer.writerows(self._rows())
        else:
            self._write_text(stream)

    def _write_text(self, stream: TextIO) -> None:
        console = make_console(stream)
        for kind, path, reason in self._rows():
            if console.is_terminal:
                console.print(Text.assemble((kind, _STYLES[kind]), " ", printable(path)))
                console.print(indented(printable(reason)))
            else:
                stream.write(f"{kind}: {printable(path)}: {printable(reason)}\n")
        console.print(self._summary())

    def _summary(self) -> str:
        counts = self.counts
        num_checked = sum(counts[kind] for kind in ("sound", "damaged", "unreadable", "odd"))
        found = ", ".join(f"{counts[kind]:,} {kind}" for kind in ("sound", *_STYLES))
        others = f"; not media: {counts['other']:,}" if counts["other"] else ""
        files = "file" if num_checked == 1 else "files"
        return f"{num_checked:,} {files} in {self._seconds:.1f} s: {found}{others}"
