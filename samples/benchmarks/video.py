"""Load whole videos to one array: this library compared with others, in one run.

Every route gets the same bytes in memory, decodes them in one thread, and returns all frames in one array: as
RGB at their own size or stretched to a square, or as the decoder's planes. One round measures all routes in
turn; the next round runs in reverse order, so that a change of the machine's speed favours none. The output
shows the median of the rounds with the minimum and the maximum.

    python samples/benchmarks/video.py FILE... [--json FILE] [--chart FILE.png]

Routes whose library is not installed, and tasks that a route does not support, are skipped with a message.

    spdl_media          load_video into a reused StoragePool
    spdl_media, fresh   load_video into new memory, whose pages the system has to clear
    PyAV                the leanest loop: one graph of the same filters, and each frame is copied to its row
                        of a reused array. The limit of Python code over FFmpeg
    SPDL                demux_video, decode_packets and convert_frames; bicubic for both squares, as it has no
                        faster, less exact option
    torchcodec          VideoDecoder, with its own scaler if the size changes
    OpenCV              VideoCapture of the path, cvtColor, and resize with a bicubic kernel
    faults              page faults of the process for each frame
"""

from __future__ import annotations

import argparse
import io
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import av.filter
import numpy as np
from figures import alternating
from routes import BASE, LEAN, Benchmark, Cell, Load, UnsupportedError, cells_of

import spdl_media as sm

SIDE = 224


@dataclass(frozen=True)
class Work:
    """The output of a task."""

    name: str
    options: dict[str, Any]

    @property
    def is_square(self) -> bool:
        """Whether frames are scaled to a square."""
        return "width" in self.options

    @property
    def filter_desc(self) -> str | None:
        """The filters that this library runs for it."""
        if "filter_desc" in self.options:
            return None
        if not self.is_square:
            return sm.get_video_filter_desc(quality=self.options["quality"])
        quality = self.options["quality"]
        return sm.get_video_filter_desc(
            scale_width=SIDE, scale_height=SIDE, scale_mode=None, quality=quality
        )


SQUARE = {"width": SIDE, "height": SIDE, "scale_mode": None}
WORKS = {
    "native": Work("native", {"quality": "auto"}),
    "square": Work("square", {**SQUARE, "quality": "auto"}),
    "square, fast": Work("square, fast", {**SQUARE, "quality": "fast"}),
    "planes": Work("planes", {"filter_desc": None}),
}


@dataclass(frozen=True)
class Task:
    """One task on one file.

    Attributes:
        count: Number of frames.
    """

    path: Path
    data: bytes
    work: Work
    count: int


# The routes. Each maker imports its library.


def ours(task: Task) -> Load:
    """Use this library with reused memory."""
    nbytes = sm.load_video(task.data, **task.work.options).nbytes
    pool = sm.StoragePool(nbytes, 1, pin_memory=False)
    return lambda: sm.load_video(task.data, storage=pool, **task.work.options)


def ours_fresh(task: Task) -> Load:
    """Use this library with new memory."""
    return lambda: sm.load_video(task.data, **task.work.options)


def pyav(task: Task) -> Load:
    """Use a plain PyAV loop with the same filters."""
    rows: list[np.ndarray[Any, Any]] = []
    desc = task.work.filter_desc

    def load() -> Any:
        graph = None
        row = 0
        with av.open(io.BytesIO(task.data)) as container:
            stream = container.streams.best("video")
            stream.codec_context.thread_count = 1
            for packet in container.demux(stream):
                for frame in packet.decode():
                    result = frame
                    if desc is not None:
                        graph = graph or lean_graph(frame, desc)
                        graph[1].push(frame)
                        result = graph[2].pull()
                    planes = [plane_view(plane, result.format.name) for plane in result.planes]
                    if not rows:
                        size = sum(plane.nbytes for plane in planes)
                        rows.append(np.zeros((task.count, size), np.uint8))
                    start = 0
                    for plane in planes:
                        target = rows[0][row, start : start + plane.nbytes]
                        target.reshape(plane.shape)[...] = plane
                        start += plane.nbytes
                    row += 1
        return rows[0][:row]

    return load


def lean_graph(frame: Any, desc: str) -> tuple[Any, Any, Any]:
    """Return a graph of consecutive plain filters, with its source and its sink."""
    graph = av.filter.Graph()
    graph.threads = 1
    source = graph.add(
        "buffer",
        f"video_size={frame.width}x{frame.height}:pix_fmt={frame.format.name}:time_base=1/1000:"
        f"colorspace={int(frame.colorspace)}:range={int(frame.color_range)}",
    )
    last = source
    for text in desc.split(","):
        name, _, args = text.partition("=")
        following = graph.add(name, args)
        last.link_to(following)
        last = following
    sink = graph.add("buffersink")
    last.link_to(sink)
    graph.configure()
    return graph, source, sink


def plane_view(plane: Any, pix_fmt: str) -> np.ndarray[Any, Any]:
    """Return the bytes of a plane without the padding of its rows."""
    wide = 2 if pix_fmt.endswith("le") else 1
    width = plane.width * (3 if pix_fmt == "rgb24" else wide)
    return np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size)[: plane.height, :width]


def spdl(task: Task) -> Load:
    """Use SPDL, function by function, as in its documentation."""
    import spdl.io

    if task.work.is_square:
        desc = spdl.io.get_video_filter_desc(
            scale_width=SIDE, scale_height=SIDE, scale_mode=None, scale_algo="bicubic"
        )
    else:
        desc = task.work.filter_desc and spdl.io.get_video_filter_desc(pix_fmt="rgb24")

    def load() -> Any:
        frames = spdl.io.decode_packets(spdl.io.demux_video(task.data), filter_desc=desc)
        return spdl.io.to_numpy(spdl.io.convert_frames(frames))

    return load


def torchcodec(task: Task) -> Load:
    """Use torchcodec, only for RGB."""
    from torchcodec.decoders import VideoDecoder

    options: dict[str, Any] = {}
    if task.work.filter_desc is None or task.work.name == "square, fast":
        raise UnsupportedError("it has no such work")
    if task.work.is_square:
        from torchcodec.transforms import Resize

        options["transforms"] = [Resize((SIDE, SIDE))]

    def load() -> Any:
        decoder = VideoDecoder(
            task.data,
            dimension_order="NHWC",
            num_ffmpeg_threads=1,
            seek_mode="approximate",
            **options,
        )
        return decoder.get_frames_in_range(0, len(decoder)).data

    return load


def opencv(task: Task) -> Load:
    """Use OpenCV, which takes paths, only for RGB."""
    import cv2

    if task.work.filter_desc is None or task.work.name == "square, fast":
        raise UnsupportedError("it has no such work")
    cv2.setNumThreads(1)
    rows: list[np.ndarray[Any, Any]] = []

    def load() -> Any:
        capture = cv2.VideoCapture(str(task.path), cv2.CAP_FFMPEG, [cv2.CAP_PROP_N_THREADS, 1])
        row = 0
        while row < task.count:
            found, frame = capture.read()
            if not found:
                break
            if task.work.is_square:
                frame = cv2.resize(frame, (SIDE, SIDE), interpolation=cv2.INTER_CUBIC)
            if not rows:
                rows.append(np.zeros((task.count, *frame.shape), np.uint8))
            cv2.cvtColor(frame, cv2.COLOR_BGR2RGB, dst=rows[0][row])
            row += 1
        return rows[0][:row]

    return load


OURS = {"spdl_media": ours, "spdl_media, fresh": ours_fresh, LEAN: pyav}
PEERS = {BASE: spdl, "torchcodec": torchcodec, "OpenCV": opencv}


def measured(
    options: argparse.Namespace, path: Path, work: str, peers: Sequence[str]
) -> dict[str, Cell]:
    """Measure the routes of a work on a file, alternately forwards and backwards."""
    data, label = path.read_bytes(), f"{path.name}, {work}"
    wanted = np.asarray(sm.load_video(data, **WORKS[work].options))
    task, count = Task(path, data, WORKS[work], len(wanted)), len(wanted)
    routes = OURS | {name: PEERS[name] for name in peers}
    cells = dict(cells_of(routes, task, label, count=count, axis=0))
    loads = {name: cell.make() for name, cell in cells.items()}
    for name, load in loads.items():
        pixels = np.asarray(load()).reshape(-1)  # also makes the memory that is used again
        if name == LEAN and not np.array_equal(pixels, wanted.reshape(-1).view(np.uint8)):
            print(f"{label}: {LEAN} gives other pixels", file=sys.stderr)
    for order in alternating(cells, options.rounds):
        for name in order:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            begin = now = time.perf_counter()
            frames = 0
            while frames == 0 or now - begin < options.seconds:
                loads[name]()
                frames, now = frames + count, time.perf_counter()
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
            cells[name].rates.append(frames / (now - begin))
            cells[name].others.append(faults / frames)
    return cells


def main() -> None:
    """Measure, print the table, and write the files."""
    benchmark = Benchmark(
        doc=__doc__,
        works=list(WORKS),
        peers=list(PEERS),
        unit="frames",
        other=("faults", "faults_per_frame"),
        digits=(0, 1),
        packages="av numpy spdl-io opencv-python-headless torch torchcodec",
    )
    parser = benchmark.parser()
    text = "minimum time per route and round"
    parser.add_argument("--seconds", type=float, default=0.0, help=text)
    benchmark.run(parser, measured)


if __name__ == "__main__":
    main()
