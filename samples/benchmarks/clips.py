"""Load clips and single frames of videos: this library compared with others, in one run.

    python samples/benchmarks/clips.py FILE [--more FILE...] [--json FILE] [--chart FILE.png]

    clips      eight random clips of FILE, each 16 frames, every other one, to 224x224 rgb24 (bicubic,
               stretched), including opening the file
    opened     the same with an open file and decoder
    spread     eight frames evenly spread over a generated video of 100 s, 320x240, to 224x224
    training   clips for video classification: two random clips of each file, of FILE and --more,
               including opening
    long       one clip from the middle of FILE repeated to 10 minutes, and one of its first 10 seconds, in ms
    index      the index of FILE as Matroska and as MPEG-TS: loaded from disk, and made by reading all
               packets, in ms, without opening

Times are CPU times over all threads of the process, so that other programs on the machine matter less. All
routes decode in one thread, from the page cache. Rates are clips (for "spread", frames) per second of it. One
round measures all routes of a task in turn; the next round runs in reverse order. The output shows medians
with minimum and maximum; ratios are taken within a round. Libraries that are not installed are skipped with a
message.

    SPDL                     demux_video of the window of each clip, and sample_decode_video
    torchcodec, a clip       one decoder, and get_frames_at for each clip
    torchcodec, one call     get_frames_at with the sorted frames of all clips
    torchcodec, sampler      clips_at_random_indices
    OpenCV                   VideoCapture, with a seek to each clip, then read in order
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from figures import (
    add_output_options,
    alternating,
    draw_bars,
    machine,
    make_figure,
    over,
    show,
    spread,
    with_range,
    write_json,
)
from processes import reason_of

import spdl_media as sm
from spdl_media import frame_index
from spdl_media.config import DecodeConfig, DemuxConfig
from spdl_media.frame_decoder import VideoSource
from spdl_media.testing import make_video

NUM_CLIPS, NUM_FRAMES, STEP, SIDE = 8, 16, 2, 224
SQUARE: dict[str, Any] = {"width": SIDE, "height": SIDE, "scale_mode": None}
OURS = "spdl_media"

Route = Callable[[list[list[int]]], Any]
"""Loads clips, each given by the numbers of its frames."""


# The routes. Each maker imports its library, and opens a file.


def ours(path: Path) -> Route:
    """Load all clips with one call."""
    video = sm.VideoFile(path)
    return lambda clips: video.load(np.concatenate(clips), **SQUARE)


def spdl(path: Path) -> Route:
    """Use SPDL over the window of each clip; frames are numbered from its start."""
    import spdl.io

    with sm.VideoFile(path) as video:
        times = video.timestamps
    desc = spdl.io.get_video_filter_desc(
        scale_width=SIDE, scale_height=SIDE, scale_mode=None, scale_algo="bicubic"
    )

    def load(clips: list[list[int]]) -> Any:
        found = []
        for clip in clips:
            window = times[clip[0]] - 1e-4, times[clip[-1]] + 1e-4
            packets = spdl.io.demux_video(str(path), timestamp=window)
            numbers = [frame - clip[0] for frame in clip]
            found += spdl.io.sample_decode_video(packets, numbers, filter_desc=desc)
        return spdl.io.to_numpy(spdl.io.convert_frames(found))

    return load


def _torchcodec(path: Path) -> Any:
    from torchcodec.decoders import VideoDecoder
    from torchcodec.transforms import Resize

    return VideoDecoder(
        str(path),
        dimension_order="NHWC",
        num_ffmpeg_threads=1,
        seek_mode="approximate",
        transforms=[Resize((SIDE, SIDE))],
    )


def torchcodec_by_clip(path: Path) -> Route:
    """Load each clip with one call."""
    decoder = _torchcodec(path)
    return lambda clips: [decoder.get_frames_at(clip).data for clip in clips]


def torchcodec_in_one(path: Path) -> Route:
    """Load all frames with one call, in order, each once."""
    decoder = _torchcodec(path)
    return lambda clips: decoder.get_frames_at(sorted({k for clip in clips for k in clip})).data


def opencv(path: Path) -> Route:
    """Seek by frame number, which goes to the key frame before, and read."""
    import cv2

    cv2.setNumThreads(1)
    capture = cv2.VideoCapture(str(path), cv2.CAP_FFMPEG, [cv2.CAP_PROP_N_THREADS, 1])

    def load(clips: list[list[int]]) -> Any:
        rows = np.empty((len(clips) * len(clips[0]), SIDE, SIDE, 3), np.uint8)
        row = 0
        for clip in clips:
            capture.set(cv2.CAP_PROP_POS_FRAMES, clip[0])
            for frame in range(clip[0], clip[-1] + 1):
                capture.grab()
                if frame in clip:
                    image = cv2.resize(
                        capture.retrieve()[1], (SIDE, SIDE), interpolation=cv2.INTER_CUBIC
                    )
                    cv2.cvtColor(image, cv2.COLOR_BGR2RGB, dst=rows[row])
                    row += 1
        return rows

    return load


ROUTES: dict[str, Callable[[Path], Route]] = {
    OURS: ours,
    "SPDL": spdl,
    "torchcodec, a clip": torchcodec_by_clip,
    "torchcodec, one call": torchcodec_in_one,
    "OpenCV": opencv,
}


def ours_sampled(path: Path, rng: np.random.Generator) -> Any:
    """Load two random clips with this library's sampler."""
    with sm.VideoFile(path) as video:
        clips = sm.sample_clips(
            video,
            num_clips=2,
            num_frames=NUM_FRAMES,
            step=STEP,
            rng=rng,
            on_short="repeat_last",
            **SQUARE,
        )
    return clips.video


def torchcodec_sampled(path: Path, _rng: np.random.Generator) -> Any:
    """Load two random clips with torchcodec's sampler."""
    from torchcodec.samplers import clips_at_random_indices

    return clips_at_random_indices(
        _torchcodec(path),
        num_clips=2,
        num_frames_per_clip=NUM_FRAMES,
        num_indices_between_frames=STEP,
    )


SAMPLERS = {OURS: ours_sampled, "torchcodec, sampler": torchcodec_sampled}


# The tasks: for each route, the function that is timed in one round.

Cells = dict[str, Callable[[], Any]]


def random_clips(path: Path, rng: np.random.Generator) -> list[list[int]]:
    """Return the frame numbers of eight clips."""
    with sm.VideoFile(path) as video:
        last = len(video) - (NUM_FRAMES - 1) * STEP - 1
    starts = rng.integers(last + 1, size=NUM_CLIPS).tolist()
    return [list(range(start, start + NUM_FRAMES * STEP, STEP)) for start in starts]


def clip_cells(path: Path, clips: list[list[int]], *, is_open: bool) -> Cells:
    """Return the routes for the same clips."""
    if is_open:
        opened = {name: make(path) for name, make in ROUTES.items()}
        return {name: lambda load=load: load(clips) for name, load in opened.items()}
    return {name: lambda make=make: make(path)(clips) for name, make in ROUTES.items()}


def sampled_cells(paths: list[Path]) -> Cells:
    """Return the routes for clips of all files, by samplers."""
    rng = np.random.default_rng(0)
    return {
        name: lambda sample=sample: [sample(path, rng) for path in paths]
        for name, sample in SAMPLERS.items()
    }


def long_cells(path: Path, folder: Path) -> Cells:
    """Return one clip of a long and of a short video with the same frames."""
    files = {
        name: repeated(path, folder / f"{name}.mp4", seconds)
        for name, seconds in (("10 s", 10), ("10 minutes", 600))
    }
    cells: Cells = {}
    for name, file in files.items():
        with sm.VideoFile(file) as video:
            keys = [key for key in video.keyframes if key + 20 + NUM_FRAMES * STEP <= len(video)]
        # The same distance from a key frame in both.
        start = keys[len(keys) // 2] + 10
        clip = list(range(start, start + NUM_FRAMES * STEP, STEP))
        cells[name] = lambda file=file, clip=clip: ours(file)([clip])
    return cells


def index_cells(path: Path, folder: Path) -> Cells:
    """Return the tasks that load and make an index."""
    cells: Cells = {}
    for name, format in (("Matroska", "matroska"), ("MPEG-TS", "mpegts")):
        file, saved = folder / f"copy.{format}", folder / f"{format}.idx"
        repeated(path, file, 0, format)
        with sm.VideoFile(file) as video:
            video.save_index(saved)
        source = VideoSource(file, None, saved, DemuxConfig(), DecodeConfig(), None)
        container = source.opened()
        cells[f"{name}, read"] = lambda source=source, container=container: source._make_index(
            container
        )
        cells[f"{name}, loaded"] = lambda saved=saved, source=source: frame_index.load(
            saved, "it", source.identity
        )
    return cells


def repeated(path: Path, target: Path, seconds: float, format: str = "mp4") -> Path:
    """Repeat the packets of a video up to a length, or write them once for 0."""
    with av.open(path) as source, av.open(target, "w", format) as out:
        stream = source.streams.best("video")
        assert stream is not None
        packets = [packet for packet in source.demux(stream) if packet.size]
        copied = out.add_stream_from_template(stream, opaque=True)
        length = sum(packet.duration or 0 for packet in packets)
        stop, shift = round(seconds / Fraction(stream.time_base)) or length, 0
        while shift < stop:
            for packet in packets:
                if packet.dts + shift < stop:
                    data = av.Packet(bytes(packet))
                    data.pts, data.dts = packet.pts + shift, packet.dts + shift
                    data.time_base, data.is_keyframe = packet.time_base, packet.is_keyframe
                    data.stream = copied
                    out.mux(data)
            shift += length
    return target


def made(folder: Path) -> Path:
    """Make a video of 100 s with a moving pattern."""
    rows, columns = np.mgrid[:240, :320]
    pattern = (128 + 90 * np.sin(rows / 17) * np.cos(columns / 23)).astype(np.uint8)
    frames = [np.roll(pattern, (k, 3 * k), (0, 1)) for k in range(2500)]
    path = folder / "made.mp4"
    options = {"qp": "24", "preset": "veryfast", "x264-params": "keyint=100"}
    path.write_bytes(
        make_video(
            frames,
            codec="libx264",
            format="mp4",
            frame_rate=25,
            gop_size=100,
            max_b_frames=2,
            options=options,
        )
    )
    return path


def works(options: argparse.Namespace, folder: Path) -> dict[str, tuple[int, Cells]]:
    """Return the routes of each task and its number of clips or frames, or 0 if times are printed."""
    clips = random_clips(options.file, np.random.default_rng(options.seed))
    files = [options.file, *options.more]
    found: dict[str, Callable[[], tuple[int, Cells]]] = {
        "clips": lambda: (NUM_CLIPS, clip_cells(options.file, clips, is_open=False)),
        "opened": lambda: (NUM_CLIPS, clip_cells(options.file, clips, is_open=True)),
        "spread": lambda: (
            8,
            clip_cells(made(folder), [[150 + 300 * k for k in range(8)]], is_open=True),
        ),
        "training": lambda: (2 * len(files), sampled_cells(files)),
        "long": lambda: (0, long_cells(options.file, folder)),
        "index": lambda: (0, index_cells(options.file, folder)),
    }
    return {name: make() for name, make in found.items() if name in options.works.split(",")}


def measure(cells: Cells, rounds: int) -> dict[str, list[float]]:
    """Return the CPU seconds of each round by route, alternately forwards and backwards."""
    seconds: dict[str, list[float]] = {name: [] for name in cells}
    for order in alternating(cells, rounds):
        for name in order:
            begin = time.process_time()
            cells[name]()
            seconds[name].append(time.process_time() - begin)
    return seconds


def summary(count: int, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Return rates or milliseconds, and the ratio to the first route."""
    first = next(iter(seconds.values()))
    return {
        name: {
            "rate": spread([count / one for one in found]) if count else None,
            "ms": spread([1000 * one for one in found]),
            "ratio": over(found, first),
        }
        for name, found in seconds.items()
    }


def table_rows(results: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Return the results as cells of a table."""
    return [
        [
            work,
            name,
            with_range(row["rate"], 1) if row["rate"] else "-",
            with_range(row["ms"], 2 if row["rate"] is None else 0),
            with_range(row["ratio"], 2),
        ]
        for work, routes in results.items()
        for name, row in routes.items()
    ]


def leave_out_missing() -> None:
    """Print the routes whose library is not installed, and remove them."""
    for name, package in (
        ("SPDL", "spdl.io"),
        ("torchcodec, a clip", "torchcodec.decoders"),
        ("torchcodec, one call", "torchcodec.decoders"),
        ("OpenCV", "cv2"),
        ("torchcodec, sampler", "torchcodec.samplers"),
    ):
        try:
            __import__(package)
        # Any exception of another library is a reason.
        except Exception as error:  # noqa: BLE001
            print(f"{name} is left out: {reason_of(error)}", file=sys.stderr)
            ROUTES.pop(name, None)
            SAMPLERS.pop(name, None)


def draw(results: dict[str, dict[str, Any]], path: str) -> None:
    """Plot the time of each route over this library's as bars."""
    figure = make_figure(9, 5)
    if figure is None:
        return
    shown = {work: rows for work, rows in results.items() if OURS in rows}
    names = [f"{work}: {name}" for work, rows in shown.items() for name in rows if name != OURS]
    ratios = [row["ratio"] for rows in shown.values() for name, row in rows.items() if name != OURS]
    axes = figure.subplots()
    draw_bars(axes, names, {"times as long as spdl_media": ratios})
    axes.axvline(1, color="black", linewidth=0.5)
    axes.set_xlabel("time over that of spdl_media (median; lines: lowest to highest)")
    figure.savefig(path)


def main() -> None:
    """Measure, print the table, and write the files."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path, help="a video of 10 seconds or more")
    parser.add_argument("--more", type=Path, nargs="*", default=[], help="videos for training")
    parser.add_argument("--works", default="clips,opened,spread,training,long,index")
    parser.add_argument("--peers", choices=("all", "none"), default="all")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0, help="seed of the random clips")
    add_output_options(parser, chart=True, markdown=True)
    options = parser.parse_args()
    if options.peers == "none":
        for routes in (ROUTES, SAMPLERS):
            for name in [name for name in routes if name != OURS]:
                del routes[name]  # type: ignore[attr-defined]  # of either type
    leave_out_missing() if options.peers == "all" else None
    with tempfile.TemporaryDirectory() as folder:
        results = {
            name: summary(count, measure(cells, options.rounds))
            for name, (count, cells) in works(options, Path(folder)).items()
        }
    head = ("work", "route", "a second", "ms", "x time of the first")
    show(head, table_rows(results), markdown=options.markdown)
    if options.chart:
        draw(results, options.chart)
    packages = "av numpy spdl-io opencv-python-headless torch torchcodec".split()
    settings = {"rounds": options.rounds, "seed": options.seed, "file": options.file.name}
    write_json(
        {"machine": machine(*packages), "settings": settings, "results": results}, options.json
    )


if __name__ == "__main__":
    main()
