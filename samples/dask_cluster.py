"""Decode on a Dask cluster of two worker processes, one of which is killed during the run.

Command::

    python samples/dask_cluster.py

It makes 60 JPEGs in a temporary folder, one of them truncated, and starts two workers on this machine. With
an address, ``Client("tcp://scheduler:8786")``, the same program runs on a cluster. It needs ``distributed``,
which the extra ``dask`` installs.

Output::

    15 batches of 4 in order, 59 images, one worker killed
    000.jpg: DecodeError

Dask's executor runs the calls of a stage, ``concurrency`` at a time. If a worker dies, its calls run on
another one, so each image comes once and in order. A damaged image fails alone.
"""

from __future__ import annotations

import logging
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from distributed import Client
from made_media import cut_short, make_photos

import spdl_media as sm
from spdl_media.pipeline import PipelineBuilder


def decode(path: str) -> tuple[str, int, Any]:
    """Decode an image on a worker. ``path`` and the result are pickled."""
    image = sm.load_image(path, width=64, height=64)
    return Path(path).name, os.getpid(), sm.to_numpy(image)


def main() -> None:
    """Run the program; see the module."""
    logging.getLogger("spdl_media.pipeline").setLevel(logging.ERROR)
    with (
        tempfile.TemporaryDirectory() as folder,
        # Otherwise Dask logs the death of the worker at length.
        Client(
            n_workers=2,
            threads_per_worker=1,
            dashboard_address=None,
            silence_logs=logging.CRITICAL,
        ) as client,
    ):
        paths = make_photos(Path(folder), 60)
        cut_short(paths[0])
        pipeline = (
            PipelineBuilder()
            .add_source([str(path) for path in paths])
            .pipe(decode, executor=client.get_executor(), concurrency=16, output_order="input")
            .aggregate(4)
            .build()
        )
        batches: list[Any] = []
        with pipeline.auto_stop():
            for batch in pipeline:
                batches.append(batch)
                if len(batches) == 5:
                    _, worker, _ = batch[0]
                    os.kill(worker, signal.SIGKILL)
        names = [name for batch in batches for name, _, _ in batch]
        assert names == [path.name for path in paths[1:]]
        images = np.stack([image for batch in batches for _, _, image in batch])
        print(
            f"{len(batches)} batches of {len(batches[0])} in order, {len(images)} images, one worker killed"
        )
        for failure in pipeline.failures:
            print(f"{paths[0].name}: {type(failure.exception).__name__}")


if __name__ == "__main__":
    main()
