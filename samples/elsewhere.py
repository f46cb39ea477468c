"""Load in other environments: processes of each kind, PyTorch's workers, asyncio, and ``datasets.map``.

Command::

    python samples/elsewhere.py

It makes 8 JPEGs in a temporary folder. It needs PyTorch and Hugging Face's datasets.

Output::

    multiprocessing, spawn        equal results: True
    multiprocessing, forkserver   equal results: True
    multiprocessing, fork         equal results: True
    packets sent to a process     equal results: True
    PyTorch's DataLoader          equal results: True
    asyncio                       equal results: True
    a pickled loader              equal results: True
    datasets.map                  equal results: True

Windows has no fork. ``docs/howto/everywhere.md`` lists what can be sent to another process.
"""

from __future__ import annotations

import asyncio
import functools
import multiprocessing
import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from made_media import make_photos

import spdl_media as sm

load = functools.partial(sm.load_image, width=64, height=48)


def load_array(source: Any) -> np.ndarray:
    """Load an image as an array, which a process can return."""
    return np.asarray(load(source))


def decode(packets: sm.ImagePackets) -> np.ndarray:
    """Decode packets that another process has read."""
    desc = sm.get_video_filter_desc(scale_width=64, scale_height=48)
    return np.asarray(sm.convert_frames(sm.decode_packets(packets, desc)))


def in_processes(method: str, function: Callable[[Any], Any], items: list[Any]) -> list[Any]:
    """Return the results of two processes."""
    with multiprocessing.get_context(method).Pool(2) as pool:
        return pool.map(function, items)


class Photos(torch.utils.data.Dataset[torch.Tensor]):
    """Images for PyTorch's DataLoader, which starts processes."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return sm.to_torch(load(self.paths[index]))


async def gather(paths: list[str]) -> list[np.ndarray]:
    """Load all images concurrently in an event loop."""
    images = await asyncio.gather(
        *(sm.async_load_image(path, width=64, height=48) for path in paths)
    )
    return [np.asarray(image) for image in images]


def main(folder: Path) -> None:
    """Run the program; see the module."""
    paths = [str(path) for path in make_photos(folder, 8)]
    expected = [load_array(path) for path in paths]

    def report(what: str, images: Any) -> None:
        same = np.array_equal(np.stack([np.asarray(one) for one in images]), np.stack(expected))
        print(f"{what:29} equal results: {same}")

    for method in ("spawn", "forkserver", "fork"):
        report(f"multiprocessing, {method}", in_processes(method, load_array, paths))
    packets = [sm.demux_image(path) for path in paths]
    report("packets sent to a process", in_processes("spawn", decode, packets))
    workers = torch.utils.data.DataLoader(
        Photos(paths), num_workers=2, batch_size=None, multiprocessing_context="forkserver"
    )
    report("PyTorch's DataLoader", workers)
    report("asyncio", asyncio.run(gather(paths)))
    loader = sm.DataLoader(paths, preprocessor=load, output_order="input", to="numpy")
    report("a pickled loader", pickle.loads(pickle.dumps(loader)))  # noqa: S301  # its own
    table = datasets.Dataset.from_dict({"path": paths}).map(
        lambda row: {"image": load_array(row["path"])}
    )
    report("datasets.map", table.with_format("numpy")["image"])


if __name__ == "__main__":
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
