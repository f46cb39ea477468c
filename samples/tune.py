"""Find the slow stage of a pipeline, and speed it up.

Command::

    python samples/tune.py [OUT.png]

It makes 24 JPEGs in a temporary folder. With OUT.png it also prints the tables, and plots the profile (with
matplotlib).

Output::

    bottleneck by statistics: 'annotate'
    bottleneck by profile: 'annotate'
    'annotate' is faster at concurrency 8 than at 1: True
    in the pipeline with concurrency 8, 'annotate' is faster: True

The stage ``annotate`` waits, like a request to a web service.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from made_media import make_photos

import spdl_media as sm
from spdl_media.pipeline import PipelineBuilder, PipelineStatistics, profile_pipeline


def decode(path: Path) -> np.ndarray:
    """Load a small image."""
    return np.asarray(sm.load_image(path, width=48, height=32))


def annotate(image: np.ndarray) -> tuple[np.ndarray, float]:
    """Simulate a request about an image to a service."""
    time.sleep(0.03)
    return image, float(image.mean())


def builder(paths: list[Path], concurrency: int) -> PipelineBuilder:
    """Build the pipeline to tune."""
    return (
        PipelineBuilder()
        .add_source(paths)
        .pipe(decode, concurrency=2)
        .pipe(annotate, concurrency=concurrency)
        .aggregate(8)
        .pipe(sm.collate)
        .add_sink(2)
    )


def run(paths: list[Path], concurrency: int) -> PipelineStatistics:
    """Run the pipeline once, and return its statistics."""
    pipeline = builder(paths, concurrency).build(num_threads=12)
    with pipeline.auto_stop():
        for _ in pipeline:
            pass
        return pipeline.statistics()


def main(folder: Path, out: str | None) -> None:
    """Run the program; see the module."""
    paths = make_photos(folder, 24) * 2
    before = run(paths, 1)
    print(f"bottleneck by statistics: {before.bottleneck!r}")
    config = builder(paths, 1).get_config()
    profile = profile_pipeline(config, num_iterations=16, concurrencies=(1, 2, 8), show=False)
    print(f"bottleneck by profile: {profile.bottleneck!r}")
    rates = {stage.concurrency: stage.calls.rate for stage in profile.of("annotate")}
    print(f"'annotate' is faster at concurrency 8 than at 1: {rates[8] > rates[1]}")
    after = run(paths, 8)
    faster = after.stages[1].calls.rate > before.stages[1].calls.rate
    print(f"in the pipeline with concurrency 8, 'annotate' is faster: {faster}")
    if out:
        profile.plot(out)
        for table in (before, profile, after):
            print()
            table.show()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder), sys.argv[1] if len(sys.argv) > 1 else None)
