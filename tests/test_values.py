"""Normalised floats equal torchvision's formula, for all formats, layouts and paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from effort import each

import spdl_media as sm
from spdl_media.testing import index_frames, index_planes, make_image, make_video

PICTURE = index_frames(1, 61, 47)[0]
PNG = make_image(PICTURE)
JPEG = make_image(PICTURE, codec="mjpeg", pix_fmt="yuvj420p")
IMAGENET: dict[str, Any] = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
# All levels occur, so that every value is tested.
GRADIENT = make_image(np.arange(256, dtype=np.uint8).repeat(3).reshape(16, 16, 3))
# A std so small that one factor and one summand alone would be less accurate.
NARROW: dict[str, Any] = {"mean": 0.5, "std": 0.001}


def formula(levels: Any, mean: Any = 0.0, std: Any = 1.0, axis: int = -1) -> np.ndarray:
    """Compute the formula in float32, in the order of ToTensor and Normalize."""
    values = np.asarray(levels)
    largest = np.float32(np.iinfo(values.dtype).max)
    shape = np.ones(values.ndim, int)
    shape[axis] = values.shape[axis]
    mean, std = (
        np.broadcast_to(np.float32(one), values.shape[axis]).reshape(shape) for one in (mean, std)
    )
    return (values.astype(np.float32) / largest - mean) / std


@each("options", [{}, {"mean": 0.5, "std": [0.25]}, {"mean": -0.5, "std": 1}])
@each("layout", ["NCHW", "NHWC"])
@each("pix_fmt", ["rgb24", "bgr24", "rgba", "gray", "ya8", "gbrp", "gray16le", "rgb48be"])
def test_formats_and_layouts(pix_fmt: str, layout: Any, options: dict[str, Any]) -> None:
    size: dict[str, Any] = {"pix_fmt": pix_fmt, "layout": layout, "width": 20, "height": 16}
    levels = sm.load_image(JPEG, **size)
    expected = formula(levels, axis=0 if layout == "NCHW" else 2, **options)
    floats = sm.load_image(JPEG, dtype="float32", **options, **size)
    assert (floats.dtype, floats.shape) == (np.float32, levels.shape)
    assert np.abs(np.asarray(floats) - expected).max() <= 1e-6
    halves = sm.load_image(JPEG, dtype="float16", **options, **size)
    np.testing.assert_array_equal(np.asarray(halves), expected.astype(np.float16))


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_each_channel_has_its_own_numbers(layout: Any) -> None:
    axis = 1 if layout == "NCHW" else 3
    levels = sm.load_image_batch([GRADIENT, PNG], width=16, height=16, layout=layout)
    for numbers in (IMAGENET, {name: np.array(one) for name, one in IMAGENET.items()}):
        got = sm.load_image_batch(
            [GRADIENT, PNG], width=16, height=16, layout=layout, dtype="float32", **numbers
        )
        assert np.abs(np.asarray(got) - formula(levels, **numbers, axis=axis)).max() <= 1e-6


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_numbers_of_a_narrow_range_are_equal(layout: Any) -> None:
    levels = sm.load_image(GRADIENT, layout=layout)
    got = sm.load_image(GRADIENT, layout=layout, dtype="float32", **NARROW)
    np.testing.assert_array_equal(np.asarray(got), formula(levels, **NARROW))


def test_numbers_are_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    mean, std = (torch.tensor(one)[:, None, None] for one in IMAGENET.values())
    levels = torch.from_dlpack(sm.load_image(GRADIENT, layout="NCHW"))
    for dtype, most in ((torch.float32, 1e-6), (torch.float16, 0)):
        expected = ((levels.float() / 255 - mean) / std).to(dtype)
        name = str(dtype).removeprefix("torch.")
        got = sm.load_image(GRADIENT, layout="NCHW", dtype=name, **IMAGENET)  # type: ignore[arg-type]
        assert (torch.from_dlpack(got) - expected).abs().max() <= most


@each("quality", ["accurate", "auto", "fast"])
@each("scale_mode", ["pad", "crop", None])
@each("source", [JPEG, PNG])
def test_planes_are_those_of_packed_pixels(source: bytes, scale_mode: Any, quality: Any) -> None:
    """Planar RGB of the scaler is used without a copy."""
    options = {"width": 33, "height": 18, "scale_mode": scale_mode, "quality": quality}
    packed = sm.load_image_batch([source], crops=(3, 1, 52, 41), flips=True, **options)
    planes = sm.load_image_batch(
        [source], crops=(3, 1, 52, 41), flips=True, layout="NCHW", **options
    )
    np.testing.assert_array_equal(np.moveaxis(np.asarray(planes), 1, -1), np.asarray(packed))


def test_rows_in_threads_and_those_that_fail() -> None:
    options: dict[str, Any] = {"width": 16, "height": 16, "dtype": "float32", **IMAGENET}
    pool = sm.StoragePool(4 * 16 * 16 * 3 * 4, count=1, pin_memory=False)
    with sm.load_image_batch(
        [PNG, b"no image", JPEG, PNG], storage=pool, num_threads=3, on_error="fill", **options
    ) as batch:
        assert pool.num_free == 0
        for row, source in ((0, PNG), (2, JPEG), (3, PNG)):
            np.testing.assert_array_equal(
                np.asarray(batch)[row], np.asarray(sm.load_image(source, **options))
            )
        assert not np.asarray(batch)[1].any()
    none = sm.load_image_batch([b"no image"], on_error="fill", **options)
    assert (none.dtype, none.shape) == (np.float32, (1, 16, 16, 3))
    small = sm.cpu_storage(4 * 16 * 16 * 3, pin_memory=False)
    with pytest.raises(sm.StorageTooSmallError, match="12288"):
        sm.load_image_batch([PNG] * 4, storage=small, **options)


def test_videos() -> None:
    data = make_video(index_planes(6, 64, 48), codec="libx265", format="mp4")
    levels = sm.load_video(data, layout="NCHW")
    floats = sm.load_video(data, layout="NCHW", dtype="float32", **IMAGENET)
    assert np.abs(np.asarray(floats) - formula(levels, **IMAGENET, axis=1)).max() <= 1e-6
    halves = sm.load_video(data, dtype="float16")
    expected = formula(sm.load_video(data)).astype(np.float16)
    np.testing.assert_array_equal(np.asarray(halves), expected)


@each(
    "options, error, match",
    [
        ({"dtype": "float64"}, ValueError, "dtype must be 'uint8', 'float16', 'float32' or None"),
        (
            {"mean": 0.5},
            ValueError,
            "mean= and std= are for floats: give dtype='float32' or 'float16'",
        ),
        ({"dtype": "uint8", "std": 0.5}, ValueError, "std= are for floats"),
        (
            {"dtype": "float32", "mean": (0, 1)},
            ValueError,
            "mean must have one number, or one for each channel of rgb24, which are 3, not 2",
        ),
        (
            {"dtype": "float32", "std": (1, 1, 1), "pix_fmt": "gray"},
            ValueError,
            "std .* are 1, not 3",
        ),
        (
            {"dtype": "float32", "std": (1, 0, 1)},
            ValueError,
            "std must be above 0 and at most 1, .*not",
        ),
        ({"dtype": "float32", "std": 1e-50}, ValueError, "std .* above 0 .*not 1e-50"),
        ({"dtype": "float32", "mean": 1e300}, ValueError, "mean must be from -1 to 1.*not 1e.300"),
        ({"dtype": "float32", "std": ()}, ValueError, "std must be above 0 and at most 1"),
        (
            {"dtype": "float32", "mean": float("nan")},
            ValueError,
            "mean must be from -1 to 1, .*not nan",
        ),
        (
            {"dtype": "float32", "mean": (123, 117, 104)},
            ValueError,
            r"pixels become 0 to 1, not \(123, 117, 104\)\. Divide .* by 255",
        ),
        (
            {"dtype": "float32", "std": [58, 57, 57]},
            ValueError,
            r"std must be above 0 and at most 1",
        ),
        ({"dtype": float}, ValueError, "dtype must be .*not 'float'"),
        ({"dtype": "float32", "mean": "0.5"}, TypeError, "mean must be a number, or one for each"),
        ({"dtype": "float32", "mean": [[1]]}, TypeError, "mean must be a number, or one for each"),
        ({"dtype": "float32", "mean": [1, [2]]}, TypeError, "mean must be a number, or one for"),
        ({"dtype": "float32", "pix_fmt": "yuv444p"}, ValueError, "RGB and gray .* not for yuv444p"),
        (
            {"dtype": "float32", "pix_fmt": "grayf32le"},
            ValueError,
            "whole numbers, and not for gray",
        ),
        ({"dtype": "uint8", "pix_fmt": "rgb48le"}, ValueError, "not for rgb48le, which has uint16"),
    ],
)
def test_invalid_numbers(options: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        sm.load_image_batch([Path("not read")], **options)


def test_dtypes_of_libraries() -> None:
    torch = pytest.importorskip("torch")
    expected = np.asarray(sm.load_image(PNG, dtype="float16"))
    for dtype in (np.float16, np.dtype("float16"), torch.float16):
        np.testing.assert_array_equal(np.asarray(sm.load_image(PNG, dtype=dtype)), expected)
        assert sm.collate([sm.ImageRecipe(8, dtype=dtype)(PNG)]).dtype == np.float16


def test_formats_that_show_when_they_are_decoded() -> None:
    with pytest.raises(sm.ConvertError, match="RGB and gray of whole numbers, and not for yuv444p"):
        sm.load_image(PNG, filter_desc="format=yuv444p", dtype="float32")
    with pytest.raises(sm.ConvertError, match=r"mean must have .* of gray, which are 1, not 3"):
        sm.load_image(PNG, filter_desc="format=gray", dtype="float32", mean=(0, 0, 0))
    assert sm.load_image(PNG, pix_fmt=None, dtype="uint8").dtype == np.uint8
