"""Helpers of the tests of DALI's images: files, results as NumPy arrays, and the allowed differences."""

from __future__ import annotations

import inspect
import zlib
from typing import Any

import numpy as np

import spdl_media as sm
from spdl_media import load
from spdl_media.arguments import as_list
from spdl_media.config import as_cuda_config
from spdl_media.cuda.images import _load_by_dali
from spdl_media.testing import make_image

# Allowed mean difference between GPU and CPU path, in levels of 255.
CLOSE = 2.0


def photo(width: int, height: int, seed: int = 0) -> np.ndarray:
    """Make an image with the statistics of a photograph: smooth, with a few edges and a little noise."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    waves = [
        np.sin(x / rng.uniform(8, 40) + rng.uniform(0, 6)) * np.cos(y / rng.uniform(8, 40))
        for _ in range(3)
    ]
    picture = 128 + 60 * np.stack(waves, -1)
    picture[height // 3 : height // 2, width // 4 : width // 2] += 50
    picture += rng.normal(0, 2, picture.shape)
    return picture.clip(0, 255).astype(np.uint8)


def jpeg(width: int, height: int, seed: int = 0, *, pix_fmt: str = "yuvj420p") -> bytes:
    return make_image(
        photo(width, height, seed),
        codec="mjpeg",
        pix_fmt=pix_fmt,
        options={"qmin": "2", "qmax": "2"},
    )


def host(array: Any) -> np.ndarray:
    """Convert a CPU array of DALI to NumPy."""
    return np.asarray(array)


def differences(array: Any, other: Any) -> np.ndarray:
    """Return the mean absolute difference of each image, in levels."""
    one, two = host(array).astype(int), np.asarray(other).astype(int)
    assert one.shape == two.shape
    return np.abs(one - two).reshape(len(one), -1).mean(1)


def _exif(orientation: int) -> bytes:
    entry = bytes.fromhex("0112 0003 00000001") + orientation.to_bytes(2, "big") + b"\0\0"
    return b"MM\0*\0\0\0\x08\0\x01" + entry + bytes(4)


def with_orientation(data: bytes, orientation: int) -> bytes:
    """Add an Exif orientation to a JPEG."""
    exif = b"Exif\0\0" + _exif(orientation)
    return data[:2] + b"\xff\xe1" + (len(exif) + 2).to_bytes(2, "big") + exif + data[2:]


def _chunk(body: bytes) -> bytes:
    return (len(body) - 4).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")


def png_with_wrong_data(picture: np.ndarray) -> bytes:
    """Make a complete PNG with a valid header and damaged pixel data."""
    data = make_image(picture)
    start = data.index(b"IDAT") - 4
    size = int.from_bytes(data[start : start + 4], "big")
    return data[:start] + _chunk(b"IDAT" + bytes(size)) + data[start + size + 12 :]


def png_header(data: bytes, side: int) -> bytes:
    """Replace the size in the header of a PNG."""
    header = data[12:16] + side.to_bytes(4, "big") * 2 + data[24:29]
    return data[:8] + _chunk(header) + data[33:]


def cpu(srcs: Any, **options: Any) -> np.ndarray:
    """Load a batch by the CPU path."""
    return np.asarray(sm.load_image_batch(srcs, **options))


def decode_image_batch(
    srcs: Any,
    *,
    cuda: Any = "cpu",
    cuda_config: Any = None,
    hw_decoder_load: float | None = 1.0,
    stopped: Any = lambda: False,
    **options: Any,
) -> Any:
    """Do what ``load_image_batch(cuda=, decoder="dali")`` does, also on the CPU."""
    inputs = as_list(srcs)
    given = {**_DEFAULTS, **options}
    request = load._image_request(given, len(inputs))
    config = None if cuda_config is None and cuda == "cpu" else as_cuda_config(cuda_config or cuda)
    return _load_by_dali(inputs, request, config, stopped, hw_decoder_load)


# The defaults that declared() uses for arguments that are not given.
_DEFAULTS = {
    name: one.default
    for name, one in inspect.signature(sm.load_image_batch).parameters.items()
    if one.default is not one.empty
}
