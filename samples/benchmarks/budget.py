"""Measure the cost of a still image, a video frame and an audio packet beyond a plain PyAV loop.

There are three tasks. Each runs with this library, with SPDL if it is installed, and with the leanest PyAV
loop of the same steps, which writes its results to the rows of one array:

    still     JPEGs to 224x224 rgb24, a batch at a time
    frame     a video to rgb24 at its own size
    packet    an audio file to float samples

    python samples/benchmarks/budget.py --images DIR --video FILE --audio FILE [--json FILE]

    CPU       CPU microseconds of one thread for each still, frame or packet; FFmpeg starts no threads
    beyond    the same, minus that of the lean loop: the library's Python code and additional work
    lost      microseconds that a counting thread loses for each, next to a working thread on another core:
              gaps above 3 us in its own clock, so an upper bound of the time with the GIL held
    gaps      number of such gaps for each: how often the GIL is passed
    2 / 1     work of two threads in some time, over that of one

"nothing" is C code that does not hold the GIL: the lower limit of "lost" and "gaps". The last table compares
one batch with ``num_threads=2`` with one of ``num_threads=1``, and with SPDL's two threads. All figures are
medians of rounds, which run alternately forwards and backwards, so that a change of the machine's speed
favours none.

Expected: "beyond" at most 40 us per still, 10 us per frame and 1.5 us per packet; "2 / 1" at least 0.97 of
SPDL's.
"""

from __future__ import annotations

import argparse
import io
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import av
import numpy as np
from av.video.reformatter import Interpolation, VideoReformatter
from clocks import Beside, hash_block, rate
from figures import add_output_options, alternating, write_json

import spdl_media as sm

Work = Callable[[], object]
SIZE = 224
BATCH = 32
SWITCH_INTERVAL = 200e-6
GAP = 3e-6
OURS, LEAN, BASE, NOTHING = "spdl_media", "PyAV, lean", "SPDL", "nothing"
ACCURATE = int(
    Interpolation.BICUBIC
    | Interpolation.ACCURATE_RND
    | Interpolation.FULL_CHR_H_INT
    | Interpolation.FULL_CHR_H_INP
)


@dataclass
class Case:
    """One task with one library."""

    work: Work
    units: int
    cpu: list[float] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    ratio: list[float] = field(default_factory=list)


# The lean loops. Rows of frames may be padded, so each row is copied without its padding.


def lean_stills(images: Sequence[bytes]) -> Work:
    """Decode stills with one decoder and one scaler per thread."""
    local = threading.local()

    def work() -> object:
        if not hasattr(local, "scaler"):
            local.scaler = VideoReformatter()
            local.decoder = av.CodecContext.create("mjpeg", "r")
            local.decoder.thread_count = 1
        rows = np.empty((len(images), SIZE, SIZE, 3), np.uint8)
        for data, row in zip(images, rows, strict=True):
            frame = local.decoder.decode(av.Packet(data))[0]
            small = local.scaler.reformat(
                frame, SIZE, SIZE, "gbrp", interpolation=ACCURATE, threads=1
            )
            for plane, channel in zip(small.planes, (1, 2, 0), strict=True):
                pixels = np.frombuffer(plane, np.uint8).reshape(SIZE, plane.line_size)
                row[..., channel] = pixels[:, :SIZE]
        return rows

    return work


def lean_video(path: Path, count: int) -> Work:
    """Decode a video with one graph for the stream, copying each frame to its row immediately."""

    def work() -> object:
        with av.open(path) as container:
            stream = container.streams.best("video")
            assert stream is not None
            stream.codec_context.thread_count = 1
            width, height = stream.codec_context.width, stream.codec_context.height
            graph = av.filter.Graph()
            graph.threads = 1
            source = graph.add_buffer(template=stream)
            to_rgb, sink = graph.add("format", "rgb24"), graph.add("buffersink")
            source.link_to(to_rgb)
            to_rgb.link_to(sink)
            graph.configure()
            rows = np.empty((count, height, width, 3), np.uint8)
            for row, frame in zip(rows, container.decode(stream), strict=False):
                graph.push(frame)
                plane = graph.pull().planes[0]
                pixels = np.frombuffer(plane, np.uint8).reshape(height, plane.line_size)
                row.reshape(height, -1)[...] = pixels[:, : 3 * width]
            return rows

    return work


def lean_audio(path: Path, count: int) -> Work:
    """Copy the decoder's samples, which must be planar float, directly to their places."""

    def work() -> object:
        with av.open(path) as container:
            stream = container.streams.best("audio")
            assert stream is not None
            stream.codec_context.thread_count = 1
            channels = stream.codec_context.layout.nb_channels
            rows, position = np.empty((channels, count), np.float32), 0
            for frame in container.decode(stream):
                size = min(frame.samples, count - position)
                for row, plane in zip(rows, frame.planes, strict=True):
                    row[position : position + size] = np.frombuffer(plane, np.float32)[:size]
                position += size
            return rows

    return work


def make_cases(images: Sequence[bytes], video: Path, audio: Path) -> dict[str, dict[str, Case]]:
    """Return all tasks by unit and library."""
    num_frames = len(sm.load_video(video))
    num_samples = sm.load_audio(audio).shape[1]
    num_packets = len(sm.demux_audio(audio))
    size: dict[str, Any] = {"width": SIZE, "height": SIZE, "scale_mode": None}
    cases = {
        "still": {
            OURS: Case(lambda: sm.load_image_batch(images, **size), len(images)),
            LEAN: Case(lean_stills(images), len(images)),
        },
        "frame": {
            OURS: Case(lambda: sm.load_video(video), num_frames),
            LEAN: Case(lean_video(video, num_frames), num_frames),
        },
        "packet": {
            OURS: Case(lambda: sm.load_audio(audio), num_packets),
            LEAN: Case(lean_audio(audio, num_samples), num_packets),
        },
    }
    try:
        import spdl.io as other
    except (ImportError, RuntimeError, OSError) as error:
        print(f"{BASE} is left out: {error}", file=sys.stderr)
        return cases
    desc = other.get_video_filter_desc(
        scale_width=SIZE, scale_height=SIZE, scale_algo="bicubic", scale_mode=None
    )

    def stills() -> object:
        decoded = [other.decode_packets(other.demux_image(x), filter_desc=desc) for x in images]
        return other.to_numpy(other.convert_frames(decoded))

    cases["still"][BASE] = Case(stills, len(images))
    cases["frame"][BASE] = Case(lambda: other.to_numpy(other.load_video(str(video))), num_frames)
    cases["packet"][BASE] = Case(lambda: other.to_numpy(other.load_audio(str(audio))), num_packets)
    return cases


# Measurements.


def cpu_time(case: Case, seconds: float) -> float:
    """Return the CPU microseconds of this thread for each unit: the minimum of several runs."""
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin = time.thread_time()
        case.work()
        best = min(best, time.thread_time() - begin)
    return best / case.units * 1e6


def gaps_beside(case: Case, seconds: float) -> tuple[float, float]:
    """Return the microseconds that a counting thread loses for each unit, and the number of gaps."""

    def work() -> int:
        case.work()
        return case.units

    lost, gaps = 0.0, 0
    with Beside(work, seconds, SWITCH_INTERVAL) as loading:
        loading.start()
        last = time.perf_counter()
        while loading.is_alive():
            now = time.perf_counter()
            if now - last > GAP:
                lost, gaps = lost + now - last, gaps + 1
            last = now
    return lost / loading.done * 1e6, gaps / loading.done


def two_over_one(work: Work, seconds: float, *, backwards: bool) -> float:
    """Return the work of two threads over that of one."""
    rates = {n: rate([work] * n, seconds) for n in ((2, 1) if backwards else (1, 2))}
    return rates[2] / rates[1]


def batch_ratio(images: Sequence[bytes], seconds: float, *, backwards: bool) -> float:
    """Return batches per second with ``num_threads=2`` over those with ``num_threads=1``, from one thread."""

    def load(num_threads: int) -> Work:
        return lambda: sm.load_image_batch(
            images, width=SIZE, height=SIZE, scale_mode=None, num_threads=num_threads
        )

    rates = {n: rate([load(n)], seconds) for n in ((2, 1) if backwards else (1, 2))}
    return rates[2] / rates[1]


def measure(
    cases: dict[str, dict[str, Case]], images: Sequence[bytes], rounds: int, seconds: float
) -> list[float]:
    """Run the rounds. Return the ratio of batches in two threads."""
    ratios: list[float] = []
    every = [case for libraries in cases.values() for case in libraries.values()]
    for order in alternating(every, rounds):
        backwards = order[0] is not every[0]
        for case in order:
            case.cpu.append(cpu_time(case, seconds))
            lost, gaps = gaps_beside(case, seconds)
            case.lost.append(lost)
            case.gaps.append(gaps)
            if case is not every[-1]:
                case.ratio.append(two_over_one(case.work, seconds, backwards=backwards))
        ratios.append(batch_ratio(images, seconds, backwards=backwards))
    return ratios


def report(cases: dict[str, dict[str, Case]], batch: Sequence[float]) -> dict[str, Any]:
    """Print the tables, and return their contents for a file."""
    median = statistics.median
    result: dict[str, Any] = {}
    print(f"{'':8}{'':14}{'CPU':>9}{'beyond':>9}{'lost':>8}{'gaps':>7}{'2 / 1':>8}")
    for unit, libraries in cases.items():
        lean = median(libraries[LEAN].cpu) if LEAN in libraries else None
        for name, case in libraries.items():
            cpu, lost, gaps = median(case.cpu), median(case.lost), median(case.gaps)
            row = {"cpu_us": cpu, "lost_us": lost, "gaps": gaps}
            beyond = ""
            if lean is not None and name != LEAN:
                row["beyond_us"] = cpu - lean
                beyond = f"{cpu - lean:.1f}"
            ratio = ""
            if case.ratio:
                row["two_over_one"] = median(case.ratio)
                ratio = f"{row['two_over_one']:.2f}"
            print(f"{unit:8}{name:14}{cpu:9.1f}{beyond:>9}{lost:8.1f}{gaps:7.1f}{ratio:>8}")
            result.setdefault(unit, {})[name] = row
    print(f"\nOne batch, num_threads=2 over num_threads=1: {median(batch):.2f}", end="")
    result["batch_two_over_one"] = median(batch)
    if BASE in cases["still"]:
        print(f" ({BASE}'s two threads: {median(cases['still'][BASE].ratio):.2f})", end="")
    print()
    return result


def main() -> None:
    """Measure, print, and write the requested files."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--images", type=Path, required=True, help="a folder of JPEGs")
    parser.add_argument("--video", type=Path, required=True)
    parser.add_argument(
        "--audio",
        type=Path,
        required=True,
        help="an audio file whose codec decodes to planar float",
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0, help="time of each measurement")
    add_output_options(parser, chart=False, markdown=False)
    options = parser.parse_args()
    files = sorted(options.images.glob("*.jpg"))[:BATCH]
    images = [data for data in map(Path.read_bytes, files) if _is_plain(data)]
    if not images:
        parser.error(f"{options.images} holds no upright JPEG of planar YUV")
    cases = make_cases(images, options.video, options.audio)
    cases[NOTHING] = {"": Case(hash_block, 1)}
    ratios = measure(cases, images, options.rounds, options.seconds)
    write_json(report(cases, ratios), options.json)


def _is_plain(data: bytes) -> bool:
    """Return whether the lean loop gives the same image: upright, and decoded by FFmpeg's JPEG decoder."""
    with av.open(io.BytesIO(data)) as container:
        frame = next(container.decode(video=0))
    return frame.format.name.startswith("yuv") and sm.demux_image(data).orientation == 1


if __name__ == "__main__":
    main()
