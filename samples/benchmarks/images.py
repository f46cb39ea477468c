"""Load JPEGs to batches: this library compared with others, in one run.

Every way gets the same bytes in memory and returns the same result: a batch (B, size, size, 3) uint8 in RGB,
each image stretched to the square with a bicubic kernel; "float32" returns (B, 3, size, size), normalised.
One round measures all ways at each number of threads; the next round runs in reverse order, so that a change
of the machine's speed favours none. The output shows the median of the rounds with the minimum and the
maximum. Images with an EXIF orientation are skipped, because not every library turns them.

    python samples/benchmarks/images.py --images DIR [--json FILE] [--chart FILE.png]

Ways whose library is not installed are skipped with a message. ``--peers none`` measures only this library.

    error     mean absolute difference, in levels of 255, from swscale's bicubic with ACCURATE_RND,
              FULL_CHR_H_INT and FULL_CHR_H_INP, over all images. It includes the effect of kernels without
              antialiasing (OpenCV's) or of another shape (Pillow's)
    x SPDL    ratio to SPDL's images per second, in the same round
    2 / 1     images per second of two threads over those of one
    GIL       microseconds of work that a thread counting in pure Python loses for each image that another
              thread loads, each on its own core. "nothing" is the same next to C code that does not hold the
              GIL: the lower limit of the figure
    beside    images per second of the loading thread meanwhile

For the GIL, Python's switch interval is set to 50 microseconds. With the default of 5 ms, a thread that
returns from C code waits 5 ms for the counting thread, so an image takes tens of milliseconds, and the
counting thread loses hardly anything: it keeps more than 95% of its speed with any library.
"""

from __future__ import annotations

import argparse
import io
import itertools
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import av
import clocks
import numpy as np
from av.video.reformatter import Interpolation, VideoReformatter
from clocks import hash_block, rate
from figures import (
    Spread,
    add_output_options,
    alternating,
    chosen,
    draw_bars,
    machine,
    make_figure,
    over,
    show,
    spread,
    with_range,
    write_json,
)
from processes import MISSING, reason_of

import spdl_media as sm

Load = Callable[[Sequence[bytes]], Any]
Array = np.ndarray[Any, np.dtype[np.uint8]]

ACCURATE = (
    Interpolation.BICUBIC
    | Interpolation.ACCURATE_RND
    | Interpolation.FULL_CHR_H_INT
    | Interpolation.FULL_CHR_H_INP
)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NOTHING = "nothing (C code)"
BASE = "SPDL"


@dataclass(frozen=True)
class Beside:
    """One counting thread next to one loading thread."""

    share: float
    microseconds: float
    images_per_second: float


@dataclass
class Way:
    """One way to load a batch, with its measurements."""

    load: Load
    rates: dict[int, list[float]] = field(default_factory=dict)
    gil: list[Beside] = field(default_factory=list)
    error: float | None = None


# The ways. Each maker imports its library, and takes the side of the images.


def ours(quality: str, size: int) -> Load:
    """Use this library with one call."""

    def load(batch: Sequence[bytes]) -> Any:
        return sm.load_image_batch(batch, width=size, height=size, scale_mode=None, quality=quality)

    return load


def ours_floats(size: int) -> Load:
    """Use this library, to (B, 3, size, size) of normalised float32."""

    def load(batch: Sequence[bytes]) -> Any:
        return sm.load_image_batch(
            batch,
            width=size,
            height=size,
            scale_mode=None,
            layout="NCHW",
            dtype="float32",
            mean=MEAN,
            std=STD,
        )

    return load


def ours_downscaled(size: int) -> Load:
    """Use this library; libjpeg-turbo shrinks large images while it decodes."""
    import simplejpeg  # noqa: F401  # without it this way is left out, not found out later

    config = sm.decode_config(downscale="dct")

    def load(batch: Sequence[bytes]) -> Any:
        return sm.load_image_batch(
            batch, width=size, height=size, scale_mode=None, decode_config=config
        )

    return load


def ours_in_steps(quality: str, size: int) -> Load:
    """Use this library, function by function."""
    desc = sm.get_video_filter_desc(
        scale_width=size, scale_height=size, scale_mode=None, quality=quality
    )

    def load(batch: Sequence[bytes]) -> Any:
        return sm.convert_frames([sm.decode_packets(sm.demux_image(x), desc) for x in batch])

    return load


def spdl(size: int) -> Load:
    """Use SPDL, function by function, as in its documentation."""
    import spdl.io

    desc = spdl.io.get_video_filter_desc(
        scale_width=size, scale_height=size, scale_algo="bicubic", scale_mode=None
    )

    def load(batch: Sequence[bytes]) -> Any:
        frames = [spdl.io.decode_packets(spdl.io.demux_image(x), filter_desc=desc) for x in batch]
        return spdl.io.to_numpy(spdl.io.convert_frames(frames))

    return load


def opencv(size: int) -> Load:
    """Use OpenCV, whose bicubic kernel does not antialias."""
    import cv2

    cv2.setNumThreads(1)

    def one(data: bytes) -> Array:
        picture = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
        small = cv2.resize(picture, (size, size), interpolation=cv2.INTER_CUBIC)
        return cv2.cvtColor(small, cv2.COLOR_BGR2RGB)

    return lambda batch: np.stack([one(data) for data in batch])


def pillow(size: int) -> Load:
    """Use Pillow."""
    from PIL import Image

    def one(data: bytes) -> Array:
        picture = Image.open(io.BytesIO(data)).convert("RGB")
        return np.asarray(picture.resize((size, size), Image.Resampling.BICUBIC))

    return lambda batch: np.stack([one(data) for data in batch])


def pillow_draft(size: int) -> Load:
    """Use Pillow; libjpeg shrinks the image while it decodes, to at least twice the side."""
    from PIL import Image

    def one(data: bytes) -> Array:
        picture = Image.open(io.BytesIO(data))
        picture.draft("RGB", (2 * size, 2 * size))
        small = picture.convert("RGB").resize((size, size), Image.Resampling.BICUBIC)
        return np.asarray(small)

    return lambda batch: np.stack([one(data) for data in batch])


def simplejpeg(size: int) -> Load:
    """Decode with libjpeg-turbo, and scale with Pillow."""
    from PIL import Image
    from simplejpeg import decode_jpeg

    def one(data: bytes) -> Array:
        picture = Image.fromarray(decode_jpeg(data))
        return np.asarray(picture.resize((size, size), Image.Resampling.BICUBIC))

    return lambda batch: np.stack([one(data) for data in batch])


def simplejpeg_downscale(size: int) -> Load:
    """Shrink with libjpeg-turbo while it decodes, to at least 1.25 times the side; swscale does the rest."""
    from simplejpeg import decode_jpeg

    local = threading.local()
    least = size * 5 // 4

    def one(data: bytes, target: Array) -> None:
        if not hasattr(local, "steps"):
            local.steps = VideoReformatter(), VideoReformatter()
        picture = decode_jpeg(data, min_width=least, min_height=least)
        frame = av.VideoFrame.from_numpy_buffer(picture, format="rgb24")
        planar = local.steps[0].reformat(
            frame, size, size, "gbrp", interpolation=int(ACCURATE), threads=1
        )
        packed = local.steps[1].reformat(planar, format="rgb24", interpolation=4, threads=1)
        plane = np.frombuffer(packed.planes[0], np.uint8).reshape(size, -1)
        target[...] = plane[:, : 3 * size].reshape(size, size, 3)

    def load(batch: Sequence[bytes]) -> Array:
        result = np.empty((len(batch), size, size, 3), np.uint8)
        for data, target in zip(batch, result, strict=True):
            one(data, target)
        return result

    return load


def torchvision(size: int) -> Load:
    """Use torchvision with antialiased bicubic scaling."""
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg
    from torchvision.transforms.v2.functional import resize

    torch.set_num_threads(1)

    def one(data: bytes) -> Any:
        coded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        picture = decode_jpeg(coded, mode=ImageReadMode.RGB)
        return resize(picture, [size, size], interpolation=3, antialias=True)

    return lambda batch: torch.stack([one(data) for data in batch]).permute(0, 2, 3, 1)


def torchcodec(size: int) -> Load:
    """Decode with torchcodec, and scale with torchvision's antialiased bicubic."""
    import torch
    from torchcodec.decoders import decode_image
    from torchvision.transforms.v2.functional import resize

    torch.set_num_threads(1)

    def one(data: bytes) -> Any:
        picture = decode_image(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return resize(picture, [size, size], interpolation=3, antialias=True)

    return lambda batch: torch.stack([one(data) for data in batch]).permute(0, 2, 3, 1)


OURS: dict[str, Callable[[int], Load]] = {
    "spdl_media": lambda size: ours("accurate", size),
    "spdl_media, fast": lambda size: ours("fast", size),
    "spdl_media, float32": ours_floats,
    "spdl_media, downscale": ours_downscaled,
    "spdl_media, in steps": lambda size: ours_in_steps("accurate", size),
}
PEERS: dict[str, Callable[[int], Load]] = {
    BASE: spdl,
    "OpenCV": opencv,
    "Pillow": pillow,
    "Pillow, draft": pillow_draft,
    "simplejpeg + Pillow": simplejpeg,
    "simplejpeg, downscale": simplejpeg_downscale,
    "torchvision": torchvision,
    "torchcodec": torchcodec,
}


def make_ways(peers: Sequence[str], size: int) -> dict[str, Way]:
    """Return the installed ways, and print the others to stderr."""
    ways = {}
    for name, make in (OURS | {name: PEERS[name] for name in peers}).items():
        try:
            ways[name] = Way(make(size))
        except MISSING as error:
            print(f"{name} is left out: {reason_of(error)}", file=sys.stderr)
    return ways


# Measurements.


def is_upright(data: bytes) -> bool:
    """Return whether the image is shown as it is stored."""
    return sm.demux_image(data).orientation == 1


def reference(data: bytes, size: int) -> Array:
    """Return the image from FFmpeg's own decoder and its scaler's most exact conversion."""
    with av.open(io.BytesIO(data)) as container:
        frame = next(container.decode(video=0))
    scaled = VideoReformatter().reformat(
        frame, size, size, "rgb24", interpolation=int(ACCURATE), threads=1
    )
    return scaled.to_ndarray()


def mean_error(load: Load, images: Sequence[bytes], wanted: Sequence[Array]) -> float:
    """Return the mean absolute difference in levels."""
    errors = [
        np.abs(levels(np.asarray(load([data]))[0]) - right).mean()
        for data, right in zip(images, wanted, strict=True)
    ]
    return float(np.mean(errors))


def levels(picture: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an image (size, size, 3) in levels of 255, also from normalised floats (3, size, size)."""
    if picture.dtype == np.uint8:
        return picture.astype(np.int16)
    return 255 * (np.moveaxis(picture, 0, -1) * STD + MEAN)


def images_a_second(
    load: Load, batches: Sequence[Sequence[bytes]], threads: int, seconds: float
) -> float:
    """Measure the rate of all threads together, which load whole batches of one size."""

    def loading(index: int) -> Callable[[], object]:
        turns = itertools.cycle([*batches[index:], *batches[:index]])
        return lambda: load(next(turns))

    return rate([loading(index) for index in range(threads)], seconds) * len(batches[0])


def count_until(stop: Callable[[float], bool]) -> float:
    """Return how many times per second this thread counts, until it is stopped."""
    count, begin = 0, time.perf_counter()
    while True:
        for _ in range(200):
            count += 1
        now = time.perf_counter() - begin
        if stop(now):
            return count / now


def count_beside(load: Load, images: Sequence[bytes], seconds: float) -> Beside:
    """Return what a counting thread loses while another thread loads these images, and the loading rate."""
    chunks = itertools.cycle([images[k : k + 4] for k in range(0, len(images), 4)])

    def work() -> int:
        chunk = next(chunks)
        load(chunk)
        return len(chunk)

    with clocks.Beside(work, seconds, SWITCH_INTERVAL) as loading:
        alone = count_until(lambda now: now >= seconds)
        loading.start()
        counted = count_until(lambda _: not loading.is_alive())
    share, done, elapsed = 1 - counted / alone, loading.done, loading.elapsed
    return Beside(share, share * elapsed / done * 1e6, done / elapsed)


SWITCH_INTERVAL = 50e-6


def measure(
    ways: dict[str, Way],
    batches: Sequence[Sequence[bytes]],
    threads: Sequence[int],
    rounds: int,
    seconds: float,
) -> None:
    """Run the rounds, alternately forwards and backwards."""
    for way in ways.values():
        way.load(batches[0])
    turns = zip(alternating(ways.values(), rounds), alternating(threads, rounds), strict=True)
    for order, counts in turns:
        for way in order:
            for count in counts:
                images = images_a_second(way.load, batches, count, seconds)
                way.rates.setdefault(count, []).append(images)
        for way in order:
            way.gil.append(count_beside(way.load, batches[0], seconds / 2))


# Output.


def summary(ways: dict[str, Way]) -> dict[str, dict[str, Any]]:
    """Return the measurements by way."""
    base = ways.get(BASE)
    results = {}
    for name, way in ways.items():
        row: dict[str, Any] = {
            "images_per_second": {str(n): spread(rates) for n, rates in way.rates.items()},
            "mean_error": way.error,
            "gil_loss": spread([beside.share for beside in way.gil]),
            "gil_microseconds": spread([beside.microseconds for beside in way.gil]),
            "beside_per_second": spread([beside.images_per_second for beside in way.gil]),
        }
        if base is not None:
            row["ratio_to_spdl"] = {
                str(n): over(rates, base.rates[n]) for n, rates in way.rates.items()
            }
            row["gil_ratio_to_spdl"] = over(
                [beside.microseconds for beside in way.gil],
                [beside.microseconds for beside in base.gil],
            )
        if {1, 2} <= set(way.rates):
            row["two_over_one"] = over(way.rates[2], way.rates[1])
        results[name] = row
    return results


def table(
    results: dict[str, dict[str, Any]], threads: Sequence[int]
) -> tuple[list[str], list[list[str]]]:
    """Return head and rows as text."""
    head = ["way", "error"]
    for count in threads:
        head += [f"images/s, {count} thr.", "x SPDL"]
    head += ["2 / 1", "GIL", "x SPDL", "beside"]
    rows = []
    for name, row in results.items():
        cells = [name, "-" if row["mean_error"] is None else f"{row['mean_error']:.2f}"]
        for count in map(str, threads):
            cells.append(with_range(row["images_per_second"][count]))
            cells.append(ratio(row.get("ratio_to_spdl", {}).get(count)))
        cells.append(ratio(row.get("two_over_one")))
        cells.append(f"{row['gil_microseconds']['median']:.0f}")
        cells.append(ratio(row.get("gil_ratio_to_spdl")))
        cells.append(f"{row['beside_per_second']['median']:.0f}")
        rows.append(cells)
    return head, rows


def ratio(found: Spread | None) -> str:
    """Return the median as text."""
    return "-" if found is None else f"{found['median']:.2f}"


def draw(results: dict[str, dict[str, Any]], threads: Sequence[int], path: str) -> None:
    """Plot images per second as bars."""
    names = [name for name in results if name != NOTHING]
    figure = make_figure(8, 1 + 0.5 * len(names))
    if figure is None:
        return
    series = {
        f"{count} thread{'s' * (count > 1)}": [
            results[name]["images_per_second"][str(count)] for name in names
        ]
        for count in threads
    }
    axes = figure.subplots()
    draw_bars(axes, names, series)
    axes.set_xlabel("images a second (median; lines: lowest to highest)")
    figure.legend(loc="outside upper center", ncols=len(threads))
    figure.savefig(path)


def main() -> None:
    """Measure, print the table, and write the files."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--images", type=Path, required=True, help="folder of JPEGs")
    parser.add_argument("--peers", default="all", help="all, none, or names with ';' between them")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="time per way and round")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--size", type=int, default=224, help="side of the images")
    add_output_options(parser, chart=True, markdown=False)
    options = parser.parse_args()
    paths = sorted(p for p in options.images.iterdir() if p.suffix.lower() in (".jpg", ".jpeg"))
    if not paths:
        parser.error(f"there is no .jpg or .jpeg file in {options.images}")
    peers = chosen(parser, "--peers", options.peers, PEERS)
    images = [data for path in paths if is_upright(data := path.read_bytes())]
    if not images:
        parser.error(f"every JPEG in {options.images} is turned by its EXIF tag")
    ways = make_ways(peers, options.size)
    wanted = [reference(data, options.size) for data in images]
    for way in ways.values():
        way.error = mean_error(way.load, images, wanted)
    ways[NOTHING] = Way(lambda batch: [hash_block() for _ in batch])
    size = min(options.batch, len(images))
    batches = [images[k : k + size] for k in range(0, len(images) - size + 1, size)]
    measure(ways, batches, options.threads, options.rounds, options.seconds)
    results = summary(ways)
    show(*table(results, options.threads))
    if options.chart:
        draw(results, options.threads, options.chart)
    packages = "av numpy spdl-io opencv-python-headless pillow simplejpeg".split()
    names = "size batch rounds seconds".split()
    document = {
        "machine": machine(*packages, "torch", "torchvision", "torchcodec"),
        "settings": {"images": len(images), **{name: getattr(options, name) for name in names}},
        "results": results,
    }
    write_json(document, options.json)


if __name__ == "__main__":
    main()
