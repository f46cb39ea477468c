"""``spdl-media check``: decode a data set in a pipeline, and report what is wrong with it."""

from __future__ import annotations

import csv
import functools
import hashlib
import json
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.text import Text

from spdl_media._probe import AudioStreamInfo, MediaInfo, VideoStreamInfo, probe
from spdl_media.cli.app import FILE, FOLDER, NUMBER, Refused, make_console, printable, write_error
from spdl_media.cli.files import KINDS, State, find_files, named_kind, open_state
from spdl_media.decode import decode_packets
from spdl_media.decoders import AudioDecoder, VideoDecoder
from spdl_media.demux import demux_image
from spdl_media.demuxer import Demuxer
from spdl_media.errors import DemuxError, MediaError, MissingDependencyError, SourceError
from spdl_media.image_frames import VideoFrames
from spdl_media.pipeline import PipelineBuilder, PipelineFailure
from spdl_media.pipeline.executors import usable_cores
from spdl_media.stills import STILL_FORMATS

_STYLES = dict(zip(KINDS, ("red", "red", "yellow", "cyan"), strict=True))
_COLUMNS = ("kind", "path", "reason")
# Maximum number of packets and decoded frames of a video in memory at a time.
_PACKETS, _FRAMES = 64, 8

# Formats of still images by suffix.
_FORMATS = {**STILL_FORMATS, "gif": "gif"}

_STREAMS = (VideoStreamInfo, AudioStreamInfo)

# FFmpeg reads text files as images of these formats.
_NO_MEDIA = frozenset({"tty"})
# File names may have any bytes.
_NAMES: dict[str, Any] = {"encoding": "utf-8", "errors": "surrogateescape", "newline": ""}


@click.command("check", short_help="Find damaged files and duplicates.")
@FOLDER
@click.option("--json", "as_json", is_flag=True, help="Write the report as JSON.")
@click.option("--csv", "as_csv", is_flag=True, help="Write it as CSV: kind, path, reason.")
@click.option("-o", "--output", **FILE, help="File to write; .json or .csv choose the format.")
@click.option("--state", **FILE, help="Keep results; the next run decodes what is new.")
@click.option("--threads", **NUMBER, default=usable_cores(), help="Files to decode at a time.")
def check_command(
    *,
    folder: Path,
    as_json: bool,
    as_csv: bool,
    output: Path | None,
    state: Path | None,
    threads: int,
) -> int:
    """Decode all media in a folder, and report damaged, unreadable, odd and duplicate files.

    Hidden files, and files with neither media nor a media suffix, are skipped. The exit status is 1 if
    anything is reported.

    \b
    Examples:
      spdl-media check train/
      spdl-media check train/ --state train.state   # continues after Ctrl-C
      spdl-media check train/ --csv -o damaged.csv

    \f
    Raises:
        Refused: The folder holds no media, or the file of ``state`` cannot be used for it.
        OSError: The folder cannot be read, or the output cannot be written.
        click.UsageError: Two formats are given.
    """
    if as_json and as_csv:
        raise click.UsageError("Give --json or --csv, not both")
    form = "json" if as_json else "csv" if as_csv else None
    if output is not None:
        # Fail now rather than after hours of work. Appending keeps an existing file unchanged until the end.
        output.open("a", encoding="utf-8").close()
        form = form or output.suffix[1:].lower()
    start, is_complete = time.monotonic(), False
    # Pillow's warnings name no file, and would disturb the progress bar.
    warnings.filterwarnings("ignore", module="PIL")
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
                # Do not lose the results, which may have taken hours.
                write("text", sys.stdout)
                error.filename = error.filename or output
            raise
        if output is not None or form not in ("json", "csv"):
            make_console().print(_summary(counts, time.monotonic() - start))
    if not is_complete:
        who = "Run it again to" if state else "With --state FILE, another run can"
        write_error(f"interrupted: {counts[None]} files were found but not checked. {who} continue")
        return 130
    return int(num_found > 0)


def _make_progress() -> Progress:
    console = make_console(sys.stderr)
    # Leave room for the ^C that terminals show: after a full line, it would leave a second line behind.
    console.width -= 3
    texts = ("{task.fields[rate]}/s", "{task.fields[bad]} bad")
    columns = (BarColumn(None), MofNCompleteColumn(), *texts, TimeRemainingColumn(compact=True))
    # No progress bar if stderr is not a terminal.
    is_hidden = not console.is_terminal
    return Progress(*columns, console=console, transient=True, disable=is_hidden, expand=True)


def check_folder(folder: Path, files: State, threads: int, progress: Progress) -> None:
    """Find the files, decode and hash them in a pipeline, and save each result at once.

    Raises:
        OSError: The folder cannot be read.
        sqlite3.Error: A result cannot be saved.
    """
    # Find all files first: the progress bar needs their number, and their sizes show possible duplicates.
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
    # check_file() never raises, so the source has failed, which reads the database.
    except PipelineFailure as failure:
        raise failure.exceptions[0] from failure


def _check_one(folder: Path, item: tuple[int, bytes, bool]) -> tuple[Any, ...]:
    """Check a file; return kind, reason, digest of its bytes and id: the arguments of ``State.save``."""
    number, name, is_alike = item
    path = Path(folder, os.fsdecode(name))
    kind, reason = check_file(path)
    digest = None
    if is_alike and kind in ("sound", "damaged", "odd"):
        # A file that cannot be read any more is not reported as a duplicate.
        with suppress(OSError), path.open("rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).digest()
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
        # Write row by row, to keep memory small for a million rows.
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


def check_file(path: Path) -> tuple[str, str | None]:
    """Decode all streams of a file completely.

    Returns:
        The kind, ``"sound"``, ``"damaged"``, ``"unreadable"``, ``"odd"`` or ``"other"`` (not media), and the
        reason, or ``None``.
    """
    try:
        info = probe(path)
        is_media = any(isinstance(stream, _STREAMS) for stream in info.streams)
        if not named_kind(path) and (info.format in _NO_MEDIA or not is_media):
            return "other", None
        oddity = _check_still(path, info) if info.is_still else _check_streams(path, info)
        oddity = oddity or _oddity_of_name(path, info)
    except DemuxError as error:
        # Files without a media suffix, such as files of labels, are not media.
        return ("damaged", error.message) if named_kind(path) else ("other", None)
    except (SourceError, MissingDependencyError) as error:
        return "unreadable", error.message
    except MediaError as error:
        return "damaged", error.message
    except Exception as error:  # noqa: BLE001  # one file must not end the whole check
        return "unreadable", f"the check failed: {type(error).__name__}: {error}"
    return ("odd", oddity) if oddity else ("sound", None)


def _check_still(path: Path, info: MediaInfo) -> str | None:
    frames = decode_packets(demux_image(path), filter_desc=None)
    if max(frames.width, frames.height) == 1:
        return "an image of one pixel"
    # Several suffixes may mean one format, and unknown suffixes are not checked.
    expected = _FORMATS.get(path.suffix[1:].lower(), info.format)
    if expected != info.format and {expected, info.format} <= set(_FORMATS.values()):
        return f"an image of the format {info.format}, and named {path.suffix}"
    return None


class _Stream:
    """A stream that is being checked: its decoder, and what it has given so far."""

    def __init__(self, info: VideoStreamInfo | AudioStreamInfo) -> None:
        self.info, self.count, self.skipped = info, 0, ""
        self.sizes: set[tuple[int, int]] = set()
        self.decoder: Any = None

    def take(self, packets: Any) -> None:
        """Decode packets.

        Raises:
            DecodeError: The packets are damaged.
        """
        # Made at the first packets, because they have the parameters of the decoder.
        if self.decoder is None:
            is_video = isinstance(self.info, VideoStreamInfo)
            kind = functools.partial(VideoDecoder, num_frames=_FRAMES) if is_video else AudioDecoder
            self.decoder = kind(packets.codec, filter_desc=None)
        self._count(self.decoder.decode(packets))

    def _count(self, chunks: Iterator[Any]) -> None:
        for frames in chunks:
            self.count += len(frames)
            if isinstance(frames, VideoFrames):
                self.sizes.add((frames.width, frames.height))
                if frames.num_skipped:
                    self.skipped = f"begins with {frames.num_skipped} frames that cannot be decoded"

    def finish(self) -> str | None:
        """Flush the decoder; return what is odd about the stream, or ``None``.

        Raises:
            DecodeError: The stream is cut short.
        """
        if self.decoder is not None:
            self._count(self.decoder.flush())
        name = "video" if isinstance(self.info, VideoStreamInfo) else "audio"
        oddity = self.skipped or self._shortfall()
        return f"{name} stream {self.info.index} {oddity}" if oddity else None

    def _shortfall(self) -> str:
        if not self.count:
            return "is empty"
        if len(self.sizes) > 1:
            return "changes the size of its frames"
        if isinstance(self.info, AudioStreamInfo):
            seconds, stated = self.count / self.info.sample_rate, self.info.duration or 0
            # Headers are often slightly wrong; a truncated file differs much more.
            if seconds < 0.9 * stated - 1:
                return f"lasts {seconds:.1f} s, and the file states {stated:.1f} s"
        elif self.count < 0.9 * (self.info.num_frames or 0) - 2:
            return f"has {self.count} frames, and the file states {self.info.num_frames}"
        return ""


def _check_streams(path: Path, info: MediaInfo) -> str | None:
    streams = {one.index: _Stream(one) for one in info.streams if isinstance(one, _STREAMS)}
    if not streams:
        return "holds no image, video or audio that can be decoded"
    with Demuxer(path) as demuxer:
        for chunk in demuxer.streaming_demux([*streams], num_packets=_PACKETS):
            for index, packets in chunk.items():
                streams[index].take(packets)
    oddities = [stream.finish() for stream in streams.values()]
    return next(filter(None, oddities), None)


def _oddity_of_name(path: Path, info: MediaInfo) -> str | None:
    has = {"audio": info.audio is not None, "video": info.video is not None and not info.is_still}
    named = named_kind(path)
    if named in has and not has[named]:
        return f"has no {named}, and is named {path.suffix}"
    if named == "image" and not info.is_still and has["audio"]:
        return f"has audio, and is named {path.suffix}"
    return None
