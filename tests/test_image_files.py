"""Writing image files: equal for lossless codecs, close for lossy ones."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from effort import each
from test_mux import psnr

import spdl_media as sm

Array = npt.NDArray[Any]


def drawing(width: int = 128, height: int = 96) -> Array:
    """Make smooth colours, which lossy codecs compress well."""
    y, x = np.mgrid[:height, :width]
    red = 128 + 100 * np.sin(x / 20) * np.cos(y / 15)
    green, blue = 128 + 90 * np.sin((x + y) / 25), 128 + 80 * np.cos(x / 30 - y / 10)
    return np.stack([red, green, blue], -1).round().astype(np.uint8)


LOSSLESS = [
    *("png", "bmp", "tiff", "qoi", "ppm", "apng", "jpegls", "pam"),
]


@each("format", LOSSLESS)
def test_lossless_files_hold_the_same_numbers(format: str) -> None:
    image = drawing(61, 47)
    assert np.array_equal(sm.load_image(sm.encode_image(image, format)).array, image)


def test_jpeg2000_keeps_alpha_and_depth() -> None:
    image = np.dstack([drawing(), drawing()[..., :1]])
    for dtype, pix_fmt in (("u1", "rgba"), ("u2", "rgba64")):
        wide = image.astype(dtype) * (257 if dtype == "u2" else 1)
        loaded = sm.load_image(sm.encode_image(wide, "jpeg2000"), pix_fmt=pix_fmt)
        assert np.abs(loaded.array.astype(int) - wide).max() <= 20


@each(
    "format,pix_fmt", [("png", "rgba"), ("png", "rgba64le"), ("png", "gray"), ("png", "gray16le")]
)
def test_png_keeps_alpha_and_depth(format: str, pix_fmt: str, rng: np.random.Generator) -> None:
    channels = 4 if "rgba" in pix_fmt else 1
    dtype = np.uint16 if pix_fmt.endswith("le") else np.uint8
    image = rng.integers(0, np.iinfo(dtype).max, (47, 61, channels), dtype, endpoint=True)
    image = image if channels == 4 else image[..., 0]
    loaded = sm.load_image(sm.encode_image(image, format), pix_fmt=pix_fmt).array
    assert np.array_equal(loaded.reshape(image.shape), image)


def test_webp_without_loss() -> None:
    image = np.dstack([drawing(61, 47), np.full((47, 61), 200, np.uint8)])
    data = sm.encode_image(image, "webp", encoder_options={"lossless": 1})
    assert np.array_equal(sm.load_image(data, pix_fmt="rgba").array, image)


SMALLEST = """
import numpy as np, spdl_media as sm
for height, width in ((1, 1), (16, 8), (16, 16), (1, 64)):
    for dtype in (np.uint8, np.uint16):
        image = np.full((height, width, 3), np.array([40, 120, 200]) << 8 * (dtype == np.uint16), dtype)
        for _ in range(9):
            loaded = sm.load_image(sm.encode_image(image, "jpeg")).array.astype(int)
        assert abs(loaded - [40, 120, 200]).max() <= 3, loaded
"""
# Of SVT-AV1, which waited forever, and x265, which crashed.
NARROW = """
import io, numpy as np, spdl_media as sm
for height, width, encoder in ((16, 130, "libsvtav1"), (300, 24, "libsvtav1"), (32, 34, "libx265")):
    frames = np.zeros((6, height, width, 3), np.uint8)
    for _ in range(9):
        file = io.BytesIO()
        sm.save_video(file, frames, format="matroska", encoder=encoder)
    assert sm.load_video(file.getvalue()).shape == frames.shape
"""


@pytest.mark.parametrize("program", [SMALLEST, NARROW], ids=["smallest", "narrow"])
def test_sizes_at_which_encoders_and_scalers_fail(program: str) -> None:
    """Run in a new process, because it would crash or hang."""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


# Measured PSNR of the drawing in decibels, minus one.
LOSSY: list[tuple[str, dict[str, Any], float]] = [
    ("jpeg", {}, 42),
    ("jpeg", {"quality": 100, "pix_fmt": "yuvj444p"}, 47),
    ("jpeg", {"quality": 30}, 33),
    ("webp", {}, 41),
    ("avif", {}, 44),
    ("jpeg2000", {}, 55),
]


@each("format,options,least", LOSSY)
def test_lossy_files_are_as_near_as_stated(
    format: str, options: dict[str, Any], least: float
) -> None:
    image = drawing()
    loaded = sm.load_image(sm.encode_image(image, format, **options)).array
    assert loaded.shape == image.shape
    assert least < psnr(image, loaded) < least + 6


def test_quality_is_size() -> None:
    for format in ("jpeg", "webp", "avif"):
        sizes = [len(sm.encode_image(drawing(), format, quality=q)) for q in (20, 60, 95)]
        assert sizes == sorted(set(sizes))


def test_flat_colours_are_not_shifted() -> None:
    """FFmpeg's scaler rounds chroma of full range down, which tints a whole image."""
    for color in ((200, 30, 60), (10, 120, 240), (128, 128, 128)):
        image = np.full((64, 64, 3), color, np.uint8)
        loaded = sm.load_image(sm.encode_image(image, quality=100)).array.astype(int)
        assert np.abs(loaded - image).max() <= 1


def test_jpeg_has_full_range_bt601_and_opens_in_pillow() -> None:
    data = sm.encode_image(drawing())
    (stream,) = sm.probe(data).streams
    assert isinstance(stream, sm.VideoStreamInfo)
    assert (stream.codec, stream.pix_fmt, stream.color_range) == ("mjpeg", "yuvj420p", "pc")
    assert data[6:10] == b"JFIF"
    pillow = pytest.importorskip("PIL.Image")
    image = np.asarray(pillow.open(io.BytesIO(data)).convert("RGB"))
    assert psnr(image, drawing()) > 42


def test_images_of_any_layout_and_library() -> None:
    image = drawing()
    data = sm.encode_image(image, "png")
    assert sm.encode_image(image.transpose(2, 0, 1), "png", layout="NCHW") == data
    assert sm.encode_image(sm.frames_from_array(image), "png") == data
    # Decoded frames are written without a conversion to RGB.
    planes = sm.decode_packets(sm.demux_image(sm.encode_image(image)), filter_desc=None)
    again = sm.decode_packets(
        sm.demux_image(sm.encode_image(planes, quality=100)), filter_desc=None
    )
    assert all(psnr(*pair) > 50 for pair in zip(planes.planes, again.planes, strict=True))


def test_files(tmp_path: Path) -> None:
    image = drawing()
    for name in ("a.png", "a.jpg", "a.JPEG", "a.tif", "a.webp"):
        (tmp_path / name).touch()
    for entry in [*os.scandir(bytes(tmp_path))]:
        sm.save_image(entry, image)  # type: ignore[arg-type]  # its path is of bytes
        name = os.fsdecode(entry.name)
        assert sm.load_image(tmp_path / name).shape == image.shape
    assert np.array_equal(sm.load_image(tmp_path / "a.png").array, image)
    file = io.BytesIO()
    sm.save_image(file, image, format="webp", encoder_options={"lossless": 1})
    assert np.array_equal(sm.load_image(file.getvalue()).array, image)
    assert len(list(tmp_path.iterdir())) == 5


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    path = tmp_path / "out.png"
    path.write_bytes(b"before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(sm.WriteError, match=r"out\.png: cannot be written") as error:
            sm.save_image(path, drawing())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error.value.errno == errno.EFBIG
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (b"before", [path])


MISUSE: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (drawing(), {"format": "jpg3000"}, ValueError, "no encoder 'jpg3000'"),
    (drawing(), {"quality": 101}, ValueError, "1 to 100, not 101"),
    (drawing(), {"format": "png", "quality": 90}, ValueError, "quality= is for lossy"),
    (drawing()[None], {}, ValueError, r"takes one image, not 1; pass images\[0\]"),
    (drawing().astype(float), {}, TypeError, "not float64"),
    (np.zeros((9, 9, 4), "u1"), {}, sm.EncodeError, "alpha channel, which jpeg"),
    (drawing(), {"format": "pgm"}, sm.EncodeError, "colours, which pgm .* pix_fmt='gray'"),
    (drawing(), {"encoder_options": {"qmim": 1}}, ValueError, "no option 'qmim'"),
    (drawing(), {"pix_fmt": "rgb24"}, ValueError, "pix_fmt of encoder 'mjpeg'"),
]


@each("image,options,kind,message", MISUSE)
def test_wrong_arguments_are_reported(
    image: Any, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        sm.encode_image(image, **options)


@pytest.mark.parametrize("name", ["out", "out.heic", "out.mkv", "out.flv"])
def test_a_name_without_a_suffix_of_images_needs_a_format(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no suffix of an image .* format='png'"):
        sm.save_image(tmp_path / name, drawing())


@pytest.mark.parametrize("format", ["png", "webp", "tiff", "ppm"])
def test_gray_of_floats_keeps_its_brightness(format: str) -> None:
    """FFmpeg's scaler takes it for limited range: 0.1 of white would be 0.04."""
    levels = np.arange(11, dtype=np.float32).repeat(16) / 10
    frames = sm.frames_from_array(np.tile(levels, (16, 1)), pix_fmt="grayf32")
    found = sm.load_image(sm.encode_image(frames, format=format), pix_fmt="gray").array[8, ..., 0]
    assert np.abs(found[8::16] / 255 - levels[8::16]).max() < 0.01


def test_colours_in_a_pfm_of_gray_are_not_of_limited_range() -> None:
    pixels = np.tile(np.arange(0, 256, 15, np.uint8)[:, None], (16, 1, 3))
    data = sm.encode_image(pixels, format="pfm", pix_fmt="grayf32le")
    (found,) = sm.load_image(data, pix_fmt="grayf32").array
    np.testing.assert_allclose(found, pixels[..., 0] / 255, atol=0.003)
