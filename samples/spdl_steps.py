"""Migrate from PyTorch's DataLoader step by step: the programs of SPDL's guides, with the modules renamed.

Command::

    python samples/spdl_steps.py

It makes 24 JPEGs in a temporary folder. It needs PyTorch.

Output::

    a dataset in threads           24 of (3, 64, 64) torch.uint8
    batches by PyTorch             3 batches of (8, 3, 64, 64) torch.uint8
    batches by convert_frames      3 batches of (8, 3, 64, 64) torch.uint8
    downloads, batch decoding      3 batches of (8, 64, 64, 3) torch.uint8

First, threads read an unchanged dataset. Then PyTorch makes the batches. Then the dataset returns frames,
which keep the decoder's planes until ``convert_frames`` makes the batch. The last program downloads files and
decodes batches.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import torch
from made_media import make_photos

import spdl_media as sm
from spdl_media.pipeline import PipelineBuilder

NUM_WORKERS, PREFETCH_FACTOR, BATCH_SIZE, SIZE = 2, 3, 8, 64


class Folder:
    """A stand-in for ``torchvision.datasets.ImageFolder(root, loader=...)``."""

    def __init__(self, root: Path, loader: Callable[[str], Any]) -> None:
        self.samples = sm.ImageFolder(root).samples
        self.loader = loader

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, label = self.samples[index]
        return self.loader(str(path)), label


def load_tensor(path: str) -> torch.Tensor:
    """Load a tensor of one image, as Pillow, ``Resize`` and ``PILToTensor`` do."""
    return sm.to_torch(sm.load_image(path, width=SIZE, height=SIZE, layout="NCHW"))


FILTER_DESC = sm.get_video_filter_desc(scale_width=SIZE, scale_height=SIZE)


def decode_image(path: str) -> sm.ImageFrames:
    """Decode and scale, without making an array."""
    packets = sm.demux_image(path)
    return sm.decode_packets(packets, filter_desc=FILTER_DESC)


def convert(items: list[tuple[sm.ImageFrames, int]]) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Make the batch, with a single copy."""
    frames, classes = zip(*items, strict=True)
    buffer = sm.convert_frames(frames)
    tensor = sm.to_torch(buffer).permute(0, 3, 1, 2)
    return tensor, classes


def threads(dataset: Folder) -> PipelineBuilder:
    """Read a dataset in threads, in its own order."""
    return (
        PipelineBuilder()
        .add_source(range(len(dataset)))
        .pipe(dataset.__getitem__, concurrency=NUM_WORKERS, output_order="input")
    )


def run(builder: PipelineBuilder) -> list[Any]:
    """Return all results of a pipeline."""
    pipeline = builder.add_sink(PREFETCH_FACTOR).build(num_threads=NUM_WORKERS)
    with pipeline.auto_stop():
        return list(pipeline)


def report(what: str, images: list[torch.Tensor], unit: str = "batches of ") -> None:
    """Print a line of the output."""
    shape = tuple(images[0].shape)
    print(f"{what:29}  {len(images)} {unit}{shape} {images[0].dtype}")


def main(root: Path) -> None:
    """Run the program; see the module."""
    paths = make_photos(root, 24)
    tensors = Folder(root, load_tensor)
    report("a dataset in threads", [image for image, _ in run(threads(tensors))], "of ")

    collated = threads(tensors).aggregate(BATCH_SIZE).pipe(torch.utils.data.default_collate)
    report("batches by PyTorch", [images for images, _ in run(collated)])

    frames = threads(Folder(root, decode_image)).aggregate(BATCH_SIZE).pipe(convert)
    report("batches by convert_frames", [images for images, _ in run(frames)])

    async def source() -> AsyncIterator[str]:
        for path in paths:
            yield str(path)

    async def download(url: str) -> bytes:
        return await asyncio.to_thread(Path(url).read_bytes)

    async def process(data: list[bytes]) -> torch.Tensor:
        buffer = await sm.async_load_image_batch(data, width=SIZE, height=SIZE)
        return sm.to_torch(buffer)

    pipeline = (
        PipelineBuilder()
        .add_source(source())
        .pipe(download, concurrency=4)
        .aggregate(BATCH_SIZE)
        .pipe(process)
    )
    report("downloads, batch decoding", run(pipeline))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
