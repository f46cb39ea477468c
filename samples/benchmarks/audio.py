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
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import av
import numpy as np
from clocks import rate
from figures import alternating
from routes import BASE, LEAN, Benchmark, Cell, Load, UnsupportedError, cells_of

import spdl_media as sm

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


# The routes. Each maker imports its library.


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


def measured(
    options: argparse.Namespace, path: Path, work: str, peers: Sequence[str]
) -> dict[str, Cell]:
    """Measure the routes of a work on a file, alternately forwards and backwards."""
    task = Task(path, work, tuple(options.window) if work == "window" else None, 0)
    label = f"{path.name}, {work}"
    try:
        task = replace(task, count=ours(task)().shape[-1])
    except sm.MediaError as error:
        print(f"{label}: {error}", file=sys.stderr)
        return {}
    routes = OURS | {name: PEERS[name] for name in peers}
    cells = dict(cells_of(routes, task, label, count=task.count, axis=-1, slack=_SLACK))
    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    for order in alternating(cells.values(), options.rounds):
        for cell in order:
            cell.rates.append(rate([cell.make()], options.seconds, clock))
            if work == "whole":
                one, two = (
                    rate([cell.make() for _ in range(threads)], options.seconds)
                    for threads in (1, 2)
                )
                cell.others.append(two / one)
    return cells


def main() -> None:
    """Measure, print the table, and write the files."""
    benchmark = Benchmark(
        doc=__doc__,
        works=WORKS,
        peers=list(PEERS),
        unit="files",
        other=("2 / 1", "two_over_one"),
        digits=(1, 2),
        packages="av numpy spdl-io torch torchcodec soundfile",
    )
    parser = benchmark.parser()
    parser.add_argument("--window", type=float, nargs=2, default=(1.0, 2.0), metavar="SECONDS")
    parser.add_argument("--seconds", type=float, default=0.1, help="time per route and round")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    benchmark.run(parser, measured)


if __name__ == "__main__":
    main()
