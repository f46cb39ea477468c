"""Decode media files and tell what came out, one row for each stream and picture.

Command::

    python samples/decode_media.py [PATH ...]

PATH is a file or a folder, which is searched with the folders in it. The default is the folder
``media`` beside this file.

Output (the milliseconds differ)::

    file                   kind     codec  size        format    seconds  frames  orient.    ms
    mirror.webp            image    webp   240x135     argb            -       1  upright   0.7
    mirror_gray.png        image    png    480x270     gray            -       1  upright   0.9
    nasa_13013.mp4         video 0  h264   320x180     yuv420p    13.000     325  upright  29.7
                           audio 1  aac    8000Hz x2   fltp       13.056  104448  -         7.1
                           video 3  h264   480x270     yuv420p    13.013     390  upright  51.6
                           audio 4  aac    16000Hz x2  fltp       13.056  208896  -         9.5
    technician.jpg         image    mjpeg  480x270     yuvj420p        -       1  upright   0.4
    technician_odd.webp    image    webp   239x135     yuv420p         -       1  upright   0.4
    technician_turned.jpg  image    mjpeg  270x480     yuvj420p        -       1  turn 90   0.4
    9 of 9 streams and pictures decoded from 6 files in 103 ms

A row describes the frames as the decoder gave them, before they are turned upright or converted:
width x height or rate x channels; pixel or sample format; number of pictures, or samples of one
channel; how they have to be turned (clockwise) and mirrored to stand upright. The milliseconds are
for reading and decoding with one thread. What is damaged is a row that says why. Files in a searched
folder that hold no media are left out; hidden ones, whose name begins with a dot, are not opened.

Exit status: 0; 1 if nothing at all could be decoded; 2 if the command is wrong; 130 after Ctrl-C,
when the rows so far are printed.
"""

from __future__ import annotations

import argparse
import mimetypes
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import spdl_media as sm

SAMPLE_MEDIA = Path(__file__).resolve().parent / "media"
NARROWEST, WIDEST = 80, 120
# Of a long video, only so many packets and decoded frames are in memory at a time.
PACKETS_AT_A_TIME, FRAMES_AT_A_TIME = 64, 16
# Video files that Python's table of file types lacks, or takes for something else.
MORE_SUFFIXES = frozenset({".avif", ".flac", ".heic", ".m2ts", ".mkv", ".nut", ".opus", ".ts"})

HEADER = ("file", "kind", "codec", "size", "format", "seconds", "frames", "orient.", "ms")
RIGHT_ALIGNED = frozenset({"seconds", "frames", "ms"})
# A narrower column of files would not tell them apart.
NARROWEST_FILE = 16


@dataclass(frozen=True)
class Row:
    """A line of the table: what was decoded, or why not."""

    file: str
    cells: tuple[str, ...] = ()
    error: str | None = None
    milliseconds: float = 0.0


@dataclass(frozen=True)
class Found:
    """A file to decode.

    Attributes:
        path: Where it is.
        label: What the table calls it.
        named: Whether the user named it, rather than the folder it is in.
    """

    path: Path
    label: str
    named: bool


def find_files(paths: Sequence[Path]) -> Iterator[Found | Row]:
    """The named files, and those in the named folders; a row for a folder that cannot be read."""
    for path in paths:
        if path.is_dir():
            yield from search(path, prefix="" if len(paths) == 1 else path.name)
        else:
            yield Found(path, printable(path), named=True)


def search(top: Path, prefix: str) -> Iterator[Found | Row]:
    """All files below a folder, in the order of their names."""
    refused: list[OSError] = []
    for folder, subfolders, names in os.walk(top, onerror=refused.append):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for name in sorted(names):
            file = Path(folder, name)
            # A pipe or a device could keep us waiting for ever.
            if not name.startswith(".") and file.is_file():
                yield Found(file, printable(prefix / file.relative_to(top)), named=False)
    for error in refused:
        yield Row(printable(error.filename), ("error",), error.strerror or "cannot be read")


def printable(path: Path | str) -> str:
    """A name may hold line breaks and bytes that are no text."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(path))


def looks_like_media(path: Path) -> bool:
    """By its name alone."""
    kind = mimetypes.guess_type(path.name)[0] or ""
    return kind.startswith(("image/", "video/", "audio/")) or path.suffix.lower() in MORE_SUFFIXES


def decode_file(file: Found) -> Iterator[Row]:
    """Rows for one file, none for a file of a searched folder that holds no media."""
    try:
        info = sm.probe(file.path)
    except sm.DemuxError as error:
        if file.named or looks_like_media(file.path):
            yield failed(file, "error", error)
        return
    except sm.MediaError as error:
        yield failed(file, "error", error)
        return
    streams = [s for s in info.streams if isinstance(s, sm.VideoStreamInfo | sm.AudioStreamInfo)]
    for stream in streams:
        if info.is_still:
            yield decode_image(file)
        else:
            yield decode_stream(file, stream, stream.duration or info.duration)
    if not streams and file.named:
        yield Row(file.label, ("error",), "holds no picture, video or sound that can be decoded")


def failed(file: Found, kind: str, error: sm.MediaError) -> Row:
    """The file stands in the first column already, so the message goes without it."""
    return Row(file.label, (kind,), str(error.args[0]))


def decode_image(file: Found) -> Row:
    """Decode a still."""
    start = time.perf_counter()
    try:
        packets = sm.demux_image(file.path)
        frames = sm.decode_packets(packets, filter_desc=None)
    except sm.MediaError as error:
        return failed(file, "image", error)
    milliseconds = (time.perf_counter() - start) * 1000
    cells = (*picture_cells("image", packets.codec.name, frames), "-", "1", turn(frames))
    return Row(file.label, cells, milliseconds=milliseconds)


def decode_stream(
    file: Found, stream: sm.VideoStreamInfo | sm.AudioStreamInfo, seconds: float | None
) -> Row:
    """Decode a stream from its start to its end, without holding more than a few frames."""
    kind = f"{'video' if isinstance(stream, sm.VideoStreamInfo) else 'audio'} {stream.index}"
    start = time.perf_counter()
    first: sm.VideoFrames | sm.AudioFrames | None = None
    count = 0
    try:
        for frames in stream_frames(file.path, stream.index):
            first = first or frames[:1]
            count += len(frames)
    except sm.MediaError as error:
        return failed(file, kind, error)
    milliseconds = (time.perf_counter() - start) * 1000
    if first is None:
        return Row(file.label, (kind, stream.codec), "holds no frame")
    if isinstance(first, sm.VideoFrames):
        length = f"{seconds:.3f}" if seconds else "-"
        cells = (*picture_cells(kind, stream.codec, first), length, str(count), turn(first))
    else:
        size = f"{first.sample_rate}Hz x{first.num_channels}"
        length = f"{seconds or count / first.sample_rate:.3f}"
        cells = (kind, stream.codec, size, first.sample_fmt, length, str(count), "-")
    return Row(file.label, cells, milliseconds=milliseconds)


def stream_frames(path: Path, index: int) -> Iterator[sm.VideoFrames | sm.AudioFrames]:
    """The frames of a stream, a few at a time, as the decoder gives them."""
    decoder: sm.VideoDecoder | sm.AudioDecoder | None = None
    with sm.Demuxer(path) as demuxer:
        for packets in demuxer.streaming_demux(index, num_packets=PACKETS_AT_A_TIME):
            if isinstance(packets, sm.VideoPackets):
                if not isinstance(decoder, sm.VideoDecoder):
                    decoder = sm.VideoDecoder(
                        packets.codec, filter_desc=None, num_frames=FRAMES_AT_A_TIME
                    )
                yield from decoder.decode(packets)
            else:
                if not isinstance(decoder, sm.AudioDecoder):
                    decoder = sm.AudioDecoder(packets.codec, filter_desc=None)
                yield from decoder.decode(packets)
        if decoder is not None:
            yield from decoder.flush()


def picture_cells(kind: str, codec: str, frames: sm.Frames) -> tuple[str, ...]:
    """The cells that stills and videos have alike."""
    assert not isinstance(frames, sm.AudioFrames)
    return (kind, codec, f"{frames.width}x{frames.height}", frames.pix_fmt)


def turn(frames: sm.ImageFrames | sm.VideoFrames) -> str:
    """What has to be done to the frames so that they stand upright."""
    steps = ["flip"] if frames.mirrored else []
    if frames.rotation:
        steps.append(f"{'' if steps else 'turn '}{frames.rotation}")
    return " ".join(steps) or "upright"


def print_table(rows: Sequence[Row]) -> None:
    """Write the rows, as wide as the terminal or a little narrower."""
    width = min(max(shutil.get_terminal_size((WIDEST, 24)).columns, NARROWEST), WIDEST)
    lines = [all_cells(row) for row in rows if row.error is None]
    columns = [max(map(len, column)) for column in zip(HEADER, *lines, strict=True)]
    columns[0] = max(len(row.file) for row in rows)
    columns[1] = max([columns[1], *(len(row.cells[0]) for row in rows)])
    gap = 2 if sum(columns) + 2 * (len(columns) - 1) <= width else 1
    room = width - sum(columns[1:]) - gap * (len(columns) - 1)
    # Where there is no room for a column of files, each is a line above its rows.
    above = room < min(columns[0], NARROWEST_FILE)
    columns[0] = 1 if above else min(columns[0], room)
    print_line(HEADER, columns, gap, above=above)
    previous = None
    for row in rows:
        # Streams of one file stand under its name.
        file = "" if row.file == previous else row.file
        previous = row.file
        if row.error is None:
            print_line((file, *all_cells(row)[1:]), columns, gap, above=above)
        else:
            start = columns[0] + columns[1] + 2 * gap
            first, *more = textwrap.wrap(row.error, width - start, break_on_hyphens=False)
            print_line((file, row.cells[0], first), columns, gap, above=above)
            print(textwrap.indent("\n".join(more), " " * start), end="\n" if more else "")


def all_cells(row: Row) -> tuple[str, ...]:
    """The cells of a row of something that was decoded."""
    return (row.file, *row.cells, f"{row.milliseconds:.1f}")


def print_line(cells: Sequence[str], columns: Sequence[int], gap: int, *, above: bool) -> None:
    """Write one line of the table; fewer cells than columns if the last is a message."""
    file, *others = cells
    if above and file:
        print(shorten(file, NARROWEST))
    line = [("" if above else shorten(file, columns[0])).ljust(columns[0])]
    for name, cell, width in zip(HEADER[1:], others, columns[1:], strict=False):
        line.append(cell.rjust(width) if name in RIGHT_ALIGNED else cell.ljust(width))
    print((" " * gap).join(line).rstrip())


def shorten(text: str, width: int) -> str:
    """Cut out of the middle: the end of a path tells most."""
    if len(text) <= width:
        return text
    tail = (width - 2) * 2 // 3
    return f"{text[: width - 2 - tail]}..{text[len(text) - tail :]}"


def print_summary(rows: Sequence[Row]) -> None:
    """Count what was decoded and what was not."""
    decoded = [row for row in rows if row.error is None]
    num_files = len({row.file for row in rows})
    files = "1 file" if num_files == 1 else f"{num_files} files"
    total = sum(row.milliseconds for row in decoded)
    print(
        f"{len(decoded)} of {len(rows)} streams and pictures decoded from {files} in {total:.0f} ms"
    )


def show_progress(label: str) -> None:
    """Say in a terminal what is being decoded; the table comes when all is done."""
    if sys.stderr.isatty():
        text = f"decoding {shorten(label, NARROWEST - 10)}" if label else ""
        print(f"\r{text:<{NARROWEST - 1}}\r", end="", file=sys.stderr, flush=True)


def collect(paths: Sequence[Path], rows: list[Row]) -> None:
    """Decode everything and append to ``rows``, which the caller has even after Ctrl-C."""
    try:
        for found in find_files(paths):
            if isinstance(found, Row):
                rows.append(found)
                continue
            show_progress(found.label)
            rows.extend(decode_file(found))
    finally:
        show_progress("")


def main() -> int:
    """Decode what the command line names."""
    parser = argparse.ArgumentParser(
        description="Decode media files and tell what came out, one row for each stream and picture."
    )
    parser.add_argument(
        "paths",
        metavar="PATH",
        nargs="*",
        type=Path,
        default=[SAMPLE_MEDIA],
        help="a file, or a folder to search; the default is the media beside this file",
    )
    paths = parser.parse_args().paths
    rows: list[Row] = []
    status = 0
    try:
        collect(paths, rows)
    except KeyboardInterrupt:
        status = 130
    if rows:
        print_table(rows)
        print_summary(rows)
    elif status == 0:
        print(f"no media in {', '.join(map(str, paths))}", file=sys.stderr)
    return status or int(all(row.error is not None for row in rows))


if __name__ == "__main__":
    try:
        exit_status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        exit_status = 1
    sys.exit(exit_status)
