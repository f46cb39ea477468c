"""Examples of SPDL's documentation, with the module renamed and errors in them corrected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spdl_media
from spdl_media import CPUBuffer, ImageFrames
from spdl_media.testing import index_frames, make_image

PICTURES = index_frames(6, 64, 48)


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    """Write six images as JPEG."""
    for index, picture in enumerate(PICTURES):
        (tmp_path / f"{index}.JPEG").write_bytes(make_image(picture, codec="mjpeg"))
    return [str(path) for path in sorted(tmp_path.iterdir())]


def test_migrating_from_the_dataloader_of_pytorch(paths: list[str]) -> None:
    torch = pytest.importorskip("torch")
    filter_desc = spdl_media.get_video_filter_desc(
        scale_width=224,
        scale_height=224,
    )

    def decode_image(path: str) -> ImageFrames:
        packets = spdl_media.demux_image(path)
        return spdl_media.decode_packets(packets, filter_desc=filter_desc)

    def convert(items: list[tuple[ImageFrames, int]]) -> tuple[Any, Any]:
        frames, clsses = list(zip(*items, strict=True))
        buffer = spdl_media.convert_frames(frames)
        tensor = spdl_media.to_torch(buffer).permute(0, 3, 1, 2)
        return tensor, clsses

    tensor, classes = convert([(decode_image(path), index) for index, path in enumerate(paths)])
    assert (tensor.shape, tensor.dtype) == ((6, 3, 224, 224), torch.uint8)
    assert classes == tuple(range(6))
    expected = spdl_media.load_image_batch(paths, width=224, height=224, layout="NCHW")
    np.testing.assert_array_equal(tensor.numpy(), np.asarray(expected))


@pytest.mark.filterwarnings("ignore:memory cannot be pinned")
def test_the_dataloader(paths: list[str]) -> None:
    width, height, batch_size = 224, 224, 3

    # Filter description that scales the image and convert to RGB
    filter_desc = spdl_media.get_filter_desc(
        scale_width=width, scale_height=height, pix_fmt="rgb24"
    )

    def decode_image(path: str) -> ImageFrames:
        # Decode image and resize
        packets = spdl_media.demux_image(path)
        return spdl_media.decode_packets(packets, filter_desc=filter_desc)

    size = width * height * batch_size * 3
    storage = spdl_media.cpu_storage(size, pin_memory=True)

    def batchify(data: list[ImageFrames]) -> CPUBuffer:
        # Merge the decoded frames into the pre-allocated pinned-memory.
        return spdl_media.convert_frames(data, storage=storage)

    batches = []
    for start in (0, 3):
        buffer = batchify([decode_image(path) for path in paths[start : start + 3]])
        batches.append(np.array(buffer))
        del buffer
    expected = spdl_media.load_image_batch(paths, width=width, height=height)
    np.testing.assert_array_equal(np.concatenate(batches), np.asarray(expected))


def test_pipeline_stages(paths: list[str]) -> None:
    torch = pytest.importorskip("torch")

    async def source() -> AsyncIterator[str]:
        for path in paths:
            yield path

    async def download(url: str) -> bytes:
        return await asyncio.to_thread(Path(url).read_bytes)

    async def process(data: list[bytes]) -> Any:
        """Given raw image data, decode, resize, batch"""
        buffer = await spdl_media.async_load_image_batch(
            data,
            width=224,
            height=224,
        )
        return spdl_media.to_torch(buffer)

    async def run() -> Any:
        return await process([await download(url) async for url in source()])

    tensor = asyncio.run(run())
    assert (tensor.shape, tensor.dtype) == ((6, 224, 224, 3), torch.uint8)
