"""Measure the rate of save_video compared with a plain PyAV loop, with the same encoder and options.

Both encode the same RGB array: PyAV's loop is ``from_ndarray``, ``stream.encode``, ``container.mux``. They
run in pairs with alternating order, in one process, and write to a folder in memory if there is one. The
output shows the medians, the median ratio of the pairs with minimum and maximum, and the ratio of the CPU
time of all threads, which is more reliable on a busy machine.

    python samples/benchmarks/encode.py [VIDEO] [--rounds 7] [--frames 120] [--scale 1]

Expected: ratios of about 1, because the encoders take nearly all of the time. They are higher if copying the
array matters, and for JPEG, where this library does not use FFmpeg's slower and biased scaler.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import numpy.typing as npt

import spdl_media as sm

CLIP = Path(__file__).resolve().parent.parent / "media" / "nasa_13013.mp4"
MEMORY = Path("/dev/shm")  # noqa: S108  # a folder for temporary files is made in it

# Encoder, pixel format, file format, options.
ENCODERS: list[tuple[str, str, str, dict[str, str]]] = [
    ("libx264", "yuv420p", "mp4", {"preset": "ultrafast"}),
    ("libx264", "yuv420p", "mp4", {"preset": "medium"}),
    ("mpeg4", "yuv420p", "mp4", {}),
    ("mjpeg", "yuvj420p", "avi", {}),
    ("ffvhuff", "rgb24", "avi", {}),
    ("ffv1", "bgr0", "mkv", {}),
]
RATE = Fraction(30)


def plain_loop(
    path: Path, frames: npt.NDArray[np.uint8], encoder: str, options: dict[str, str], pix_fmt: str
) -> None:
    """Encode with the loop of PyAV's documentation."""
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream(encoder, rate=RATE, options=options)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = pix_fmt
        for array in frames:
            frame = av.VideoFrame.from_ndarray(array, format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def seconds_of(run: Callable[[], None]) -> tuple[float, float]:
    """Return the wall-clock seconds of a call, and its CPU seconds in all threads."""
    start, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - start, time.process_time() - cpu


def main() -> None:
    """Measure each encoder and print a line for it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("video", nargs="?", type=Path, default=CLIP)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--frames", type=int, default=120)
    parser.add_argument("--scale", type=int, default=1, help="factor of the width and height")
    arguments = parser.parse_args()
    info = sm.demux_video(arguments.video)
    size = [side // 2 * 2 * arguments.scale for side in (info.width, info.height)]
    frames = sm.load_video(
        arguments.video, width=size[0], height=size[1], num_frames=arguments.frames
    ).array
    print(f"{len(frames)} frames of {size[0]}x{size[1]} RGB, {arguments.rounds} pairs")
    print(f"{'encoder':20} {'here':>7} {'PyAV':>9}  ratio (smallest to largest)  ratio of CPU time")
    memory = MEMORY if MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        for encoder, pix_fmt, suffix, options in ENCODERS:
            path = Path(folder) / f"out.{suffix}"
            measure(encoder, pix_fmt, path, frames, options, arguments.rounds)


def measure(
    encoder: str,
    pix_fmt: str,
    path: Path,
    frames: npt.NDArray[np.uint8],
    options: dict[str, str],
    rounds: int,
) -> None:
    """Measure one encoder in pairs."""

    def here() -> None:
        sm.save_video(path, frames, RATE, encoder=encoder, encoder_options=options, pix_fmt=pix_fmt)

    def there() -> None:
        plain_loop(path, frames, encoder, dict(options), pix_fmt)

    here()
    there()
    pairs = []
    for number in range(rounds):
        order = (here, there) if number % 2 == 0 else (there, here)
        taken = {run: seconds_of(run) for run in order}
        pairs.append((taken[here], taken[there]))
    ratios = sorted(other[0] / own[0] for own, other in pairs)
    cpu = statistics.median(other[1] / own[1] for own, other in pairs)
    own, other = (len(frames) / statistics.median(one[side][0] for one in pairs) for side in (0, 1))
    name = " ".join([encoder, *options.values()])
    print(
        f"{name:20} {own:5.0f}/s {other:7.0f}/s  {statistics.median(ratios):.2f} "
        f"({ratios[0]:.2f} to {ratios[-1]:.2f})          {cpu:.2f}"
    )


if __name__ == "__main__":
    main()
