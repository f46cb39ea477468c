"""``spdl-media check``: a data set decoded in a pipeline, and what is wrong with it."""

from __future__ import annotations

import csv
import functools
import hashlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.text import Text

from spdl_media.cli.decoding import check_file
from spdl_media.cli.files import find_files
from spdl_media.cli.state import KINDS, State, open_state
from spdl_media.cli.terminal import (
    FILE,
    FOLDER,
    NUMBER,
    Refused,
    make_console,
    printable,
    write_error,
)
from spdl_media.loader_arguments import usable_cores
from spdl_media.pipeline import PipelineBuilder, PipelineFailure

_STYLES = dict(zip(KINDS, ("red", "red", "yellow", "cyan"), strict=True))
_COLUMNS = ("kind", "path", "reason")
# Names of files are any bytes.
_NAMES: dict[str, Any] = {"encoding": "utf-8", "errors": "surrogateescape", "newline": ""}


@click.command("check", short_help="Find damaged files and duplicates.")
@FOLDER
@click.option("--json", "form", flag_value="json", help="Write the report as JSON.")
@click.option("--csv", "form", flag_value="csv", help="Write it as CSV: kind, path, reason.")
@click.option("-o", "--output", **FILE, help="Write it to this file, in the form of its suffix.")
@click.option("--state", **FILE, help="Keep results; the next run decodes what is new.")
@click.option("--threads", **NUMBER, default=usable_cores(), help="Files to decode at a time.")
def command(
    *, folder: Path, form: str | None, output: Path | None, state: Path | None, threads: int
) -> int:
    """Decode all media in a folder, and report damaged, unreadable, odd and duplicate files.

    Hidden files are left out, and so is what holds no media and is not named as if it did. The exit
    status is 1 if anything is reported.

    \b
    Examples:
      spdl-media check train/
      spdl-media check train/ --state train.state   # again after Ctrl-C: goes on
      spdl-media check train/ --csv -o damaged.csv
    """
    if output is not None:
        # Better now than after hours of work. What is there stays until the end.
        output.open("a", encoding="utf-8").close()
        form = form or output.suffix[1:]
    start, is_complete = time.monotonic(), False
    with open_state(state, folder) as files:
        with suppress(KeyboardInterrupt), _make_progress() as progress:
            check_folder(folder, files, threads, progress)
            is_complete = True
        counts = Counter(files.counts())
        num_found = sum(counts[kind] for kind in KINDS)
        if is_complete and not num_found and not counts["sound"]:
            raise Refused(
                f"no media in {printable(folder)}, which has {counts['other']:,} other files. (Hidden "
                "files are left out, and archives are not opened)"
            )
        head = {"folder": str(folder), "complete": is_complete, "unchecked": counts[None]}
        head |= {kind: counts[kind] for kind in ("sound", *KINDS, "other")}
        write = functools.partial(_write, head, functools.partial(_rows, folder, files))
        try:
            with open(output or sys.stdout.fileno(), "w", closefd=bool(output), **_NAMES) as stream:
                write(form, stream)
        except OSError as error:
            if output is not None:
                # They may be the results of hours.
                write("text", sys.stdout)
                error.filename = error.filename or output
            raise
        if output is not None or form not in ("json", "csv"):
            make_console().print(_summary(counts, time.monotonic() - start))
    if not is_complete:
        more = "Run it again to go on" if state else "With --state FILE another run can go on"
        write_error(f"interrupted: {counts[None]} files are found and not checked. {more}")
        return 130
    return int(num_found > 0)


def _make_progress() -> Progress:
    console = make_console(sys.stderr)
    # Room for the ^C that terminals show: behind a full line it would begin another, which would stay.
    console.width -= 3
    texts = ("{task.fields[rate]}/s", "{task.fields[bad]} bad")
    columns = (BarColumn(None), MofNCompleteColumn(), *texts, TimeRemainingColumn(compact=True))
    # Nothing at all where nobody watches.
    is_hidden = not console.is_terminal
    return Progress(*columns, console=console, transient=True, disable=is_hidden, expand=True)


def check_folder(folder: Path, files: State, threads: int, progress: Progress) -> None:
    """Find the files, decode and compare them in a pipeline, and save each result when it comes."""
    task = progress.add_task("finding", total=None, bad=0, rate="-")
    files.see(iter(progress.track(find_files(folder), task_id=task)))
    progress.remove_task(task)
    task = progress.add_task("decoding", total=files.num_pending(), bad=0, rate="-")
    check_one = functools.partial(_check_one, folder)
    builder = PipelineBuilder().add_source(files.pending()).pipe(check_one, concurrency=threads)
    pipeline = builder.add_sink(threads).build(num_threads=threads, max_failures=0)
    start, bad = time.monotonic(), 0
    try:
        with pipeline.auto_stop():
            for number, result in enumerate(pipeline, 1):
                files.save(*result)
                bad += result[0] in KINDS
                rate = round(number / (time.monotonic() - start))
                progress.update(task, advance=1, bad=bad, rate=f"{rate:,}")
    except PipelineFailure as failure:
        raise failure.exceptions[0] from failure


def _check_one(folder: Path, item: tuple[int, bytes, bool]) -> tuple[Any, ...]:
    """Kind, reason, digest of the bytes, and number of a file, as ``State.save`` takes them."""
    number, name, is_alike = item
    path = Path(folder, os.fsdecode(name))
    kind, reason = check_file(path)
    digest = None
    if is_alike and kind in ("sound", "damaged", "odd"):
        # What cannot be read any more is no duplicate that anybody could use.
        with suppress(OSError), path.open("rb") as file:
            found = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
            digest = found.digest()
    return kind, reason, digest, number


def _rows(folder: Path, files: State) -> Iterator[tuple[str, str, str]]:
    for kind, path, found in files.report():
        is_path = kind == "duplicate"
        reason = f"the same bytes as {folder / os.fsdecode(found)}" if is_path else found
        yield kind, str(folder / os.fsdecode(path)), reason


def _write(
    head: Mapping[str, Any], rows: Callable[[], Iterator[Any]], form: str | None, stream: TextIO
) -> None:
    if form == "json":
        stream.write(json.dumps(head)[:-1] + ', "files": [')
        for number, row in enumerate(rows()):
            line = json.dumps(dict(zip(_COLUMNS, row, strict=True)))
            stream.write(f"{',' if number else ''}\n  {line}")
        stream.write("\n]}\n")
    elif form == "csv":
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(_COLUMNS)
        writer.writerows(rows())
    else:
        console = make_console(stream)
        for kind, path, reason in rows():
            rest = f": {printable(path)}: {printable(reason)}"
            console.print(Text.assemble((kind, _STYLES[kind]), rest), overflow="fold")


def _summary(counts: Counter[str | None], seconds: float) -> str:
    num_checked = sum(counts[kind] for kind in ("sound", "damaged", "unreadable", "odd"))
    found = ", ".join(f"{counts[kind]:,} {kind}" for kind in ("sound", *KINDS))
    others = f"; not media: {counts['other']:,}" if counts["other"] else ""
    files = "file" if num_checked == 1 else "files"
    return f"{num_checked:,} {files} in {seconds:.1f} s: {found}{others}"
