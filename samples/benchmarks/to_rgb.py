"""Compare the exact conversion to RGB with FFmpeg's plain one: time and difference.

It decodes frames of a video once, then converts them repeatedly with a filter graph, alternating between the
library's default description and ``format=rgb24``. It prints microseconds per frame (the minimum of the
rounds), and the difference of the plain conversion from the exact one, in levels of 255.

    python samples/benchmarks/to_rgb.py [VIDEO ...] [--rounds 5] [--frames 24]

Expected: the plain conversion is five to six times faster, and differs by about one level on average.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

import spdl_media as sm

CLIP = Path(__file__).resolve().parent.parent / "media" / "nasa_13013.mp4"


def convert(frames: sm.VideoFrames, desc: str) -> tuple[float, sm.VideoFrames]:
    """Return the seconds for all frames, and the result."""
    graph = sm.FilterGraph(desc)
    start = time.perf_counter()
    graph.add_frames(frames)
    graph.flush()
    result = graph.get_frames()
    seconds = time.perf_counter() - start
    assert isinstance(result, sm.VideoFrames), "pictures went in"
    return seconds / len(frames), result


def main() -> None:
    """Measure each video and print a line for it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("videos", nargs="*", type=Path, default=[CLIP])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--frames", type=int, default=24)
    arguments = parser.parse_args()
    exact = sm.get_video_filter_desc(quality="accurate") or ""
    print(f"{'video':24} {'size':>10} {'exact us':>9} {'plain us':>9} {'mean':>6} {'max':>4}")
    for path in arguments.videos:
        frames = sm.decode_packets(sm.demux_video(path), None, num_frames=arguments.frames)
        times: dict[str, list[float]] = {exact: [], "format=rgb24": []}
        results = {}
        for _ in range(arguments.rounds):
            for desc, seconds in times.items():
                taken, results[desc] = convert(frames, desc)
                seconds.append(taken)
        pairs = zip(*results.values(), strict=True)
        differences = [np.abs(a.planes[0].astype(int) - b.planes[0]) for a, b in pairs]
        best = [min(seconds) * 1e6 for seconds in times.values()]
        size = f"{frames.width}x{frames.height}"
        mean, most = np.mean(differences), np.max(differences)
        print(f"{path.name:24.24} {size:>10} {best[0]:9.0f} {best[1]:9.0f} {mean:6.2f} {most:4}")


if __name__ == "__main__":
    main()
