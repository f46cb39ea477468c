"""Crops and flips cut the upright picture exactly; the boxes have torchvision's distribution."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from oriented import upright
from still_metadata import exif_block, png_with_exif

import spdl_media as sm
from spdl_media.testing import index_frames, make_image

WIDTH, HEIGHT = 37, 29
PICTURE = index_frames(1, WIDTH, HEIGHT)[0]
PNG = make_image(PICTURE)
BOXES = [(0, 0, 37, 29), (1, 1, 36, 28), (3, 5, 7, 9), (36, 28, 1, 1), (2, 7, 10, 11)]


@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize("flip", [False, True])
def test_rgb_is_cut_and_mirrored(box: tuple[int, int, int, int], flip: bool) -> None:
    x, y, w, h = box
    batch = sm.load_image_batch([PNG], crops=[box], flips=[flip])
    expected = PICTURE[y : y + h, x : x + w]
    np.testing.assert_array_equal(np.asarray(batch)[0], expected[:, ::-1] if flip else expected)


@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize("flip", [False, True])
def test_planes_of_420_are_cut_at_odd_places_too(
    box: tuple[int, int, int, int], flip: bool
) -> None:
    jpeg = make_image(PICTURE, codec="mjpeg", pix_fmt="yuvj420p")
    whole = sm.decode_packets(sm.demux_image(jpeg), None)
    x, y, w, h = box
    desc = sm.decode_packets(
        sm.demux_image(jpeg),
        f"crop={w}:{h}:{x}:{y}:exact=1" + (",hflip" if flip else ""),
    )
    for index, (plane, cut) in enumerate(zip(whole.planes, desc.planes, strict=True)):
        step = 2 if index else 1
        part = plane[y // step :, x // step :][: -(-h // step), : -(-w // step)]
        np.testing.assert_array_equal(cut, part[:, ::-1] if flip else part)
    # What the batch scales is the same picture, on its short way and on that of the graph.
    size: dict[str, Any] = {"width": 16, "height": 12, "scale_mode": None}
    batch = sm.load_image_batch([jpeg], crops=[box], flips=[flip], **size)
    filters = sm.get_video_filter_desc(scale_width=16, scale_height=12, scale_mode=None)
    slow = sm.decode_packets(
        sm.demux_image(jpeg),
        # A second chain makes it a graph.
        f"crop={w}:{h}:{x}:{y}:exact=1,{'hflip,' if flip else ''}{filters}[out];color,nullsink",
    )
    np.testing.assert_array_equal(np.asarray(batch)[0], np.asarray(sm.convert_frames(slow)))


def test_the_box_is_one_of_the_upright_picture(media_dir) -> None:
    turned = media_dir / "images_odd" / "exif_orientation_6.jpg"
    upright = np.asarray(sm.load_image(turned, filter_desc="scale,format=yuvj444p"))
    cut = sm.load_image_batch([turned], crops=[(5, 3, 20, 10)], filter_desc="scale,format=yuvj444p")
    difference = np.abs(np.asarray(cut)[0].astype(int) - upright[:, 3:13, 5:25])
    assert difference[0].max() <= 1  # luma; chroma was scaled up over another edge


def test_without_a_filter_cut_pictures_are_upright(media_dir) -> None:
    turned = media_dir / "images_odd" / "exif_orientation_6.jpg"
    upright = sm.decode_packets(sm.demux_image(turned), "null")
    whole = (0, 0, upright.width, upright.height)
    # All of them, or it would be left to chance which pictures have one size.
    for crops in (None, [None, None], [whole, None]):
        for flips in (None, [False, False], [True, False]):
            if crops or flips:
                batch = sm.load_image_batch(
                    [turned] * 2, crops=crops, flips=flips, filter_desc=None
                )
                luma = np.asarray(sm.convert_frames(upright))[0]
                np.testing.assert_array_equal(np.asarray(batch)[1][0], luma)
    raw = sm.load_image_batch([turned] * 2, filter_desc=None)
    assert raw.shape[-1] == upright.height


def test_each_picture_has_its_own_box_and_flip() -> None:
    boxes = [None, (0, 0, 20, 20), (17, 9, 20, 20)]
    batch = sm.load_image_batch(
        [PNG] * 3,
        crops=boxes,
        flips=np.array([True, False, True]),
        width=37,
        height=29,
        scale_mode=None,
    )
    np.testing.assert_array_equal(np.asarray(batch)[0], PICTURE[:, ::-1])
    alone = [
        np.asarray(
            sm.load_image_batch(
                [PNG], crops=[box], flips=[flip], width=37, height=29, scale_mode=None
            )
        )[0]
        for box, flip in zip(boxes, [True, False, True], strict=True)
    ]
    np.testing.assert_array_equal(np.asarray(batch), alone)


def test_flips_may_be_any_array_of_bools() -> None:
    torch = pytest.importorskip("torch")
    wanted = np.asarray(sm.load_image_batch([PNG] * 2, flips=[True, False]))
    np.testing.assert_array_equal(wanted[0], PICTURE[:, ::-1])
    given = [
        (True, np.False_),
        np.array([True, False]),
        torch.tensor([True, False]),
        [torch.tensor(True), torch.tensor(False)],
    ]
    for flips in given:
        got = np.asarray(sm.load_image_batch([PNG] * 2, flips=flips))
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("box", [(1, 0, 37, 29), (0, 1, 37, 29), (37, 0, 1, 1), (0, 0, 99, 9)])
def test_boxes_that_reach_out_of_the_picture(box: tuple[int, int, int, int]) -> None:
    with pytest.raises(
        sm.ConvertError, match=r"input 1 of the batch of 2: the crop .* does not lie inside .*37x29"
    ):
        sm.load_image_batch([PNG, PNG], crops=[None, box], width=8, height=8)
    filled = sm.load_image_batch([PNG, PNG], crops=[None, box], width=8, height=8, on_error="fill")
    assert filled.valid.tolist() == [True, False]


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"crops": [(0, 0, 0, 4)]}, ValueError, r"crops\[0\] is \(0, 0, 0, 4\)"),
        ({"crops": [(-1, 0, 4, 4)]}, ValueError, r"crops\[0\] is \(-1, 0, 4, 4\)"),
        ({"crops": [(0, 0, 4)]}, TypeError, r"crops\[0\] must be \(x, y, width, height\)"),
        ({"crops": [(0, 0, 4, 4.5)]}, TypeError, "whole pixels"),
        ({"crops": ["0044"]}, TypeError, "whole pixels"),
        ({"crops": []}, ValueError, "crops must have one entry for each of the 1 inputs, not 0"),
        ({"flips": [True, False]}, ValueError, "flips must have one entry .* 1 inputs, not 2"),
        ({"flips": [1]}, TypeError, r"flips\[0\] must be True or False, not 1"),
        ({"flips": [None]}, TypeError, r"flips\[0\] must be True or False, not None"),
        (
            {"flips": True},
            TypeError,
            "one True or False for each image, not True: .*not iterable",
        ),
        ({"flips": np.ones(1)}, TypeError, r"one True or False .*, not float64 of shape \(1,\)"),
        ({"flips": np.ones((1, 1), bool)}, TypeError, r"not bool of shape \(1, 1\)"),
        ({"flips": [[True], [True, False]]}, TypeError, "flips must be one True or False"),
        ({"flips": []}, ValueError, "flips must have one entry for each of the 1 inputs, not 0"),
    ],
)
def test_plans_that_cannot_be(options: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        sm.load_image_batch([PNG], **options)


def test_a_bad_filter_is_not_blamed_on_the_crop() -> None:
    with pytest.raises(sm.FilterError, match="nosuchfilter"):
        sm.load_image_batch([PNG], crops=[(0, 0, 4, 4)], filter_desc="nosuchfilter")


def test_one_seed_gives_the_same_boxes() -> None:
    one, two = np.random.default_rng(5), np.random.default_rng(5)
    boxes = [sm.random_resized_crop((500, 375), one) for _ in range(20)]
    assert boxes == [sm.random_resized_crop((500, 375), two) for _ in range(20)]
    assert len(set(boxes)) > 15
    assert all(type(value) is int for box in boxes for value in box)


def reference_boxes(size: tuple[int, int], count: int, rng: np.random.Generator) -> np.ndarray:
    """The published procedure, drawn for all boxes at once: scale 0.08 to 1, ratio 3/4 to 4/3."""
    width, height = size
    result = np.zeros((count, 4), int)
    todo = np.arange(count)
    for _ in range(10):
        area = rng.uniform(0.08, 1, len(todo)) * width * height
        ratio = np.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3), len(todo)))
        w, h = np.rint(np.sqrt(area * ratio)), np.rint(np.sqrt(area / ratio))
        fits = (w <= width) & (h <= height)
        x = np.floor(rng.random(len(todo)) * (width - w + 1))
        y = np.floor(rng.random(len(todo)) * (height - h + 1))
        result[todo[fits]] = np.stack([x, y, w, h], 1)[fits]
        todo = todo[~fits]
    return result[result[:, 2] > 0]


@pytest.mark.parametrize("size", [(500, 375), (333, 500), (224, 224)])
def test_boxes_have_the_usual_distribution(size: tuple[int, int], rng: np.random.Generator) -> None:
    count = 20_000
    boxes = np.array([sm.random_resized_crop(size, rng) for _ in range(count)])
    expected = reference_boxes(size, count, rng)
    # Largest distance of the empirical distributions (Kolmogorov and Smirnov); chance exceeds 0.02 once
    # in ten thousand runs, and the seed is fixed.
    for field in range(4):
        grid = np.unique(np.concatenate([boxes[:, field], expected[:, field]]))
        ours, theirs = (
            np.searchsorted(np.sort(values[:, field]), grid, side="right") / len(values)
            for values in (boxes, expected)
        )
        assert np.abs(ours - theirs).max() < 0.02
    assert (boxes[:, 0] + boxes[:, 2] <= size[0]).all()
    assert (boxes[:, 1] + boxes[:, 3] <= size[1]).all()
    assert boxes.min(axis=0)[:2].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("size", "expected"),
    [((1000, 10), (493, 0, 13, 10)), ((10, 1000), (0, 493, 10, 13)), ((1, 1), (0, 0, 1, 1))],
)
def test_thin_pictures_give_their_middle(
    size: tuple[int, int], expected: tuple[int, int, int, int], rng: np.random.Generator
) -> None:
    assert sm.random_resized_crop(size, rng, scale=(1, 1)) == expected


@pytest.mark.parametrize(
    ("size", "options", "error", "match"),
    [
        ((0, 5), {}, ValueError, "at least one pixel"),
        ((5.5, 5), {}, TypeError, "size must be"),
        ((5, 5), {"scale": (0, 1)}, ValueError, r"scale must be \(least, largest\)"),
        ((5, 5), {"ratio": (2, 1)}, ValueError, r"ratio must be \(least, largest\)"),
        (500, {}, TypeError, r"size must be \(width, height\), not 500"),
        ((5, 5, 3), {}, TypeError, r"size must be \(width, height\), not \(5, 5, 3\)"),
        ((True, 5), {}, TypeError, "size must be"),
        ((5, 5), {"scale": 0.5}, TypeError, r"scale must be \(least, largest\)"),
        ((5, 5), {"scale": (0.1, 0.2, 1)}, TypeError, r"scale must be \(least, largest\)"),
        ((5, 5), {"ratio": ("a", "b")}, TypeError, r"ratio must be \(least, largest\)"),
        ((5, 5), {"scale": (math.nan, 1)}, ValueError, r"scale must be \(least, largest\)"),
    ],
)
def test_boxes_of_nothing(size: Any, options: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        sm.random_resized_crop(size, np.random.default_rng(0), **options)


def test_random_boxes_load() -> None:
    rng = np.random.default_rng(0)
    boxes = [sm.random_resized_crop((WIDTH, HEIGHT), rng) for _ in range(16)]
    batch = sm.load_image_batch([PNG] * 16, crops=boxes, width=24, height=24, scale_mode=None)
    assert batch.shape == (16, 24, 24, 3)


@pytest.mark.parametrize("mode", ["pad", "crop", None])
def test_scale_mode_is_that_of_the_cut_picture(mode: Any) -> None:
    """The box is twice as wide as high, and white; what else there is would show."""
    picture = np.zeros((40, 60, 3), np.uint8)
    picture[10:20, 20:40] = 255
    (row,) = np.asarray(
        sm.load_image_batch(
            [make_image(picture)], crops=[(20, 10, 20, 10)], width=24, height=24, scale_mode=mode
        )
    )
    expected = np.full((24, 24, 3), 255)
    if mode == "pad":
        expected[:6] = expected[18:] = 0
    np.testing.assert_array_equal(row, expected)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("flip", [False, True])
def test_boxes_of_each_orientation(orientation: int, flip: bool) -> None:
    stored = png_with_exif(PNG, exif_block(orientation))
    turned = upright(PICTURE, orientation)
    x, y, w, h = 3, 5, 17, 11
    batch = sm.load_image_batch([stored], crops=[(x, y, w, h)], flips=[flip])
    expected = turned[y : y + h, x : x + w]
    np.testing.assert_array_equal(np.asarray(batch)[0], expected[:, ::-1] if flip else expected)


@pytest.mark.parametrize("rng", [5, None, np.random, np.random.RandomState(0), random])
def test_what_is_no_generator(rng: Any) -> None:
    with pytest.raises(
        TypeError, match=r"rng must be a generator, such as np.random.default_rng\(\)"
    ):
        sm.random_resized_crop((5, 5), rng)
