"""Decode a dataset with Ray Data, and list the damaged files.

Command::

    python samples/ray_data.py

It makes 60 JPEGs in a temporary folder, two of them truncated, and starts Ray with one actor on this machine.
On a cluster, use ``ray.init("auto")`` and the URL of the data. It needs Ray, which the extra ``ray``
installs.

Output::

    60 rows, images of (64, 64, 3) uint8, 58 good
    000.jpg: DecodeError
    030.jpg: DecodeError

An actor keeps its decoders, and reuses its memory for each batch. A damaged image keeps its row, with its
error in a column, so no file is lost silently.
"""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

# Must be set before Ray is imported: no usage statistics are sent.
os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled")

import ray
from made_media import cut_short, make_photos

import spdl_media as sm


def main() -> None:
    """Run the program; see the module."""
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.CRITICAL,
        object_store_memory=100 * 2**20,
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as name:
        photos = make_photos(Path(name), 60)
        for photo in photos[::30]:
            cut_short(photo)
        images = ray.data.read_binary_files(name, include_paths=True).map_batches(
            sm.ray.DecodeImages,
            fn_constructor_kwargs={"width": 64, "height": 64},
            batch_size=16,
            compute=ray.data.ActorPoolStrategy(size=1),
        )
        rows = sorted(images.take_all(), key=lambda row: Path(row["path"]).name)
    damaged = [row for row in rows if row["error"]]
    first = rows[0]["image"]
    print(
        f"{len(rows)} rows, images of {first.shape} {first.dtype}, {len(rows) - len(damaged)} good"
    )
    for row in damaged:
        print(f"{Path(row['path']).name}: {row['error'].split(':')[0]}")
    ray.shutdown()


if __name__ == "__main__":
    main()
