"""Load audio files to one array: this library compared with others, in one run.

Every route opens the same file by its path, decodes it in one thread, and returns float samples: all samples,
those of a window of one second, or all as 16 kHz mono. One round measures all routes in turn; the next round
runs in reverse order, so that a change of the machine's speed favours none. The output shows the median of
the rounds with the minimum and the maximum.

    python samples/benchmarks/audio.py FILE... [--json FILE] [--chart FILE.png]

Routes whose library is not installed, and tasks that a route does not support, are skipped with a message.

    spdl_media    load_audio
    PyAV          the leanest loop of demuxing and decoding: it copies the bytes of each frame to reused rows,
                  in the decoder's format. The limit of Python code over FFmpeg
    SPDL          demux_audio, decode_packets and convert_frames
    torchcodec    AudioDecoder
    soundfile     SoundFile of libsndfile, without resampling
    2 / 1         files per second of two threads over those of one

``--clock cpu`` counts files per second of CPU time, for a machine that runs other programs. It does not
affect 2 / 1.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import av
import numpy as np
from figures import (
    draw_bars,
    machine,
    make_figure,
    markdown_table,
    over,
    plain_table,
    spread,
    with_range,
    write_json,
)

import spdl_media as sm

Load = Callable[[], Any]

BASE, LEAN = "SPDL", "PyAV"
WORKS = ("whole", "window", "16 kHz mono")
RATE = 16000


@dataclass(frozen=True)
class Task:
    """One task on one file.

    Attributes:
        window: Seconds, or ``None`` for the whole file.
        count: Number of resulting samples.
    """

    path: Path
    work: str
    window: tuple[float, float] | None
    count: int


class UnsupportedError(Exception):
    """The route does not support the task."""


@dataclass
class Cell:
    """One task on one file by one route, with its measurements."""

    make: Callable[[], Load]
    rates: list[float] = field(default_factory=list)
    rates_of_one: list[float] = field(default_factory=list)
    rates_of_two: list[float] = field(default_factory=list)


# The routes. Each maker imports its library, and is called in the loading thread.


def ours(task: Task) -> Load:
    """Use this library with one call."""
    options = {"sample_rate": RATE, "num_channels": 1} if task.work == "16 kHz mono" else {}
    return lambda: sm.load_audio(task.path, task.window, **options).array


def pyav(task: Task) -> Load:
    """Use a plain PyAV loop."""
    if task.work != "whole":
        raise UnsupportedError("it is the loop for whole files")
    rows: list[memoryview] = []

    def load() -> Any:
        end = 0
        with av.open(str(task.path)) as container:
            stream = container.streams.best("audio")
            stream.codec_context.thread_count = 1
            for packet in container.demux(stream):
                for frame in packet.decode():
                    planes = frame.planes
                    size = frame.samples * frame.format.bytes
                    if not frame.format.is_planar:
                        size *= frame.layout.nb_channels
                    if not rows:
                        # Twice the samples: some decoders return more than the file's duration.
                        room = size // frame.samples * 2 * task.count
                        rows.extend(memoryview(bytearray(room)) for _ in planes)
                    for row, plane in zip(rows, planes, strict=False):
                        row[end : end + size] = memoryview(plane)[:size]
                    end += size
        # As many as this library's route, to which the others are compared.
        return np.empty((1, task.count)) if end else np.empty((1, 0))

    return load


def spdl(task: Task) -> Load:
    """Use SPDL, function by function, as in its documentation."""
    import spdl.io

    desc = spdl.io.get_audio_filter_desc()
    if task.work == "16 kHz mono":
        desc = spdl.io.get_audio_filter_desc(sample_rate=RATE, num_channels=1)

    def load() -> Any:
        packets = spdl.io.demux_audio(str(task.path), timestamp=task.window)
        frames = spdl.io.decode_packets(packets, filter_desc=desc)
        return spdl.io.to_numpy(spdl.io.convert_frames(frames))

    return load


def torchcodec(task: Task) -> Load:
    """Use torchcodec, which opens the file each time, as the other routes do."""
    from torchcodec.decoders import AudioDecoder

    options = {"sample_rate": RATE, "num_channels": 1} if task.work == "16 kHz mono" else {}

    def load() -> Any:
        decoder = AudioDecoder(task.path, **options)
        if task.window is None:
            return decoder.get_all_samples().data
        return decoder.get_samples_played_in_range(*task.window).data

    return load


def soundfile(task: Task) -> Load:
    """Use libsndfile, which returns ``(samples, channels)``."""
    import soundfile

    if task.work == "16 kHz mono":
        raise UnsupportedError("it does not resample")

    def load() -> Any:
        with soundfile.SoundFile(task.path) as file:
            if task.window is None:
                return file.read(dtype="float32", always_2d=True).T
            start, stop = (round(seconds * file.samplerate) for seconds in task.window)
            file.seek(start)
            return file.read(stop - start, dtype="float32", always_2d=True).T

    return load


OURS = {"spdl_media": ours, LEAN: pyav}
PEERS = {BASE: spdl, "torchcodec": torchcodec, "soundfile": soundfile}

# Decoders differ in how much of the encoder's delay and padding they leave out, and SPDL gives whole packets.
_SLACK = 0.15


def make_cells(
    path: Path,
    work: str,
    window: tuple[float, float],
    peers: Sequence[str],
    told: set[tuple[str, str]],
) -> dict[str, Cell]:
    """Return the routes that support the task, and print why others do not. ``told`` has the printed ones."""
    task = Task(path, work, window if work == "window" else None, 0)
    try:
        count = ours(task)().shape[-1]
    except sm.MediaError as error:
        print(f"{path.name}, {work}: {error}", file=sys.stderr)
        return {}
    task = Task(path, work, task.window, count)
    cells = {}
    for name, make in (OURS | {name: PEERS[name] for name in peers}).items():
        try:
            found = make(task)().shape[-1]
            if abs(found - count) > _SLACK * count:
                raise UnsupportedError(f"it gives {found} samples of {count}")
        # Any exception of another library is a reason.
        except Exception as error:  # noqa: BLE001
            reason = str(error).strip().partition("\n")[0]
            if (name, reason) not in told:
                print(f"{path.name}, {work}: {name} is left out: {reason}", file=sys.stderr)
            told.add((name, reason))
        else:
            cells[name] = Cell(lambda make=make: make(task))  # type: ignore[misc]  # bound now
    return cells


def files_a_second(cell: Cell, threads: int, seconds: float) -> tuple[float, float]:
    """Measure the rate of all threads together. Each thread loads the file until the time is over.

    Returns:
        Files per second, and files per second of the process's CPU time, which is valid for one thread.
    """
    rates, rates_of_cpu = [0.0] * threads, [0.0] * threads
    start = threading.Barrier(threads)

    def work(index: int) -> None:
        load = cell.make()
        load()
        start.wait()
        begin, cpu = time.perf_counter(), time.process_time()
        now, count = begin, 0
        while count == 0 or now - begin < seconds:
            load()
            count, now = count + 1, time.perf_counter()
        rates[index] = count / (now - begin)
        rates_of_cpu[index] = count / (time.process_time() - cpu)

    workers = [threading.Thread(target=work, args=(index,)) for index in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(rates), sum(rates_of_cpu)


def measure(cells: dict[str, Cell], options: argparse.Namespace, *, threads: bool) -> None:
    """Run the rounds, alternately forwards and backwards."""
    order = list(cells.values())
    for number in range(options.rounds):
        for cell in order if number % 2 == 0 else order[::-1]:
            rate, rate_of_cpu = files_a_second(cell, 1, options.seconds)
            cell.rates.append(rate_of_cpu if options.clock == "cpu" else rate)
            cell.rates_of_one.append(rate)
            if threads:
                cell.rates_of_two.append(files_a_second(cell, 2, options.seconds)[0])


def summary(cells: dict[str, Cell]) -> dict[str, Any]:
    """Return the measurements by route."""
    results: dict[str, Any] = {}
    for name, cell in cells.items():
        row: dict[str, Any] = {"files_per_second": spread(cell.rates)}
        for key, other in (("ratio_to_spdl", BASE), ("ratio_to_pyav", LEAN)):
            if other in cells:
                row[key] = over(cell.rates, cells[other].rates)
        if cell.rates_of_two:
            row["two_over_one"] = over(cell.rates_of_two, cell.rates_of_one)
        results[name] = row
    return results


HEAD = ("file", "work", "route", "files/s", "x SPDL", "x PyAV", "2 / 1")


def table_rows(results: dict[str, dict[str, dict[str, Any]]]) -> list[list[str]]:
    """Return the results as cells of a table."""
    rows = []
    for file, works in results.items():
        for work, routes in works.items():
            for name, row in routes.items():
                ratios = [
                    with_range(row[key], 2) if key in row else "-"
                    for key in ("ratio_to_spdl", "ratio_to_pyav", "two_over_one")
                ]
                rows.append([file, work, name, with_range(row["files_per_second"], 1), *ratios])
    return rows


def draw(results: dict[str, dict[str, dict[str, Any]]], path: str) -> None:
    """Plot the rate of this library over SPDL's as bars."""
    figure = make_figure(9, 1 + 0.5 * len(results))
    if figure is None:
        return
    works = list(next(iter(results.values())))
    missing = spread([0.0])
    series = {
        work: [
            found[work].get("spdl_media", {}).get("ratio_to_spdl", missing)
            for found in results.values()
        ]
        for work in works
    }
    axes = figure.subplots()
    draw_bars(axes, list(results), series)
    axes.axvline(1, color="black", linewidth=0.5)
    axes.set_xscale("log")
    axes.set_xlabel("files a second over SPDL's (median; lines: lowest to highest)")
    figure.legend(loc="outside upper center", ncols=len(works))
    figure.savefig(path)


def main() -> None:
    """Measure, print the table, and write the files."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", type=Path, nargs="+", help="audio files, or videos with audio")
    parser.add_argument("--works", default="all", help="all, or names with ';' between them")
    parser.add_argument("--peers", default="all", help="all, none, or names with ';' between them")
    parser.add_argument("--window", type=float, nargs=2, default=(1.0, 2.0), metavar="SECONDS")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.1, help="time per route and round")
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: for a machine that runs other programs",
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures here; - is stdout")
    parser.add_argument("--chart", metavar="FILE", help="draw the figures here; needs matplotlib")
    parser.add_argument("--markdown", action="store_true", help="print the table for a page")
    options = parser.parse_args()
    peers = chosen(parser, "--peers", options.peers, PEERS)
    works = chosen(parser, "--works", options.works, WORKS)
    told: set[tuple[str, str]] = set()
    results: dict[str, dict[str, dict[str, Any]]] = {}
    for path in options.files:
        results[path.name] = {}
        for work in works:
            cells = make_cells(path, work, tuple(options.window), peers, told)
            measure(cells, options, threads=work == "whole")
            results[path.name][work] = summary(cells)
    table = markdown_table if options.markdown else plain_table
    print(table(HEAD, table_rows(results)))
    if options.chart:
        draw(results, options.chart)
    document = {
        "machine": machine(*"av numpy spdl-io torch torchcodec soundfile".split()),
        "settings": {
            "rounds": options.rounds,
            "seconds": options.seconds,
            "window": options.window,
            "clock": options.clock,
        },
        "results": results,
    }
    write_json(document, options.json)


def chosen(
    parser: argparse.ArgumentParser, option: str, text: str, names: Sequence[str] | dict[str, Any]
) -> list[str]:
    """Return the selected names."""
    if text in ("all", "none"):
        return list(names) if text == "all" else []
    found = [name.strip() for name in text.split(";")]
    if unknown := [name for name in found if name not in names]:
        parser.error(f"{option}: {unknown[0]!r} is none of {'; '.join(names)}")
    return found


if __name__ == "__main__":
    main()
