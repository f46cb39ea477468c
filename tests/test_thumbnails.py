"""Notebooks show frames and buffers as small images, which the tests decode."""

from __future__ import annotations

import base64
import re
from typing import Any

import numpy as np
import pytest
from effort import each

import spdl_media as sm
from spdl_media.testing import index_frames, make_video


def shown(value: Any) -> list[np.ndarray]:
    """Decode the images in the HTML of a value."""
    data = re.findall(r"data:image/png;base64,([\w+/=]+)", value._repr_html_())
    return [np.array(sm.load_image(base64.b64decode(one), pix_fmt="rgb24")) for one in data]


def pixels(*shape: int, dtype: type = np.uint8) -> np.ndarray:
    count = int(np.prod(shape))
    return (np.arange(count) % 251).reshape(shape).astype(dtype)


def buffer_of(array: np.ndarray) -> sm.CPUBuffer:
    return sm.CPUBuffer(array)


@each(
    "array, images",
    [
        (pixels(20, 30, 3), [pixels(20, 30, 3)]),
        (pixels(2, 20, 30, 3), list(pixels(2, 20, 30, 3))),
        (pixels(2, 3, 20, 30), list(pixels(2, 3, 20, 30).transpose(0, 2, 3, 1))),
        (pixels(2, 2, 20, 30, 3), list(pixels(4, 20, 30, 3))),
        (pixels(10, 20, 30, 3), list(pixels(10, 20, 30, 3)[:8])),
        # Every other pixel of an image that is larger than a thumbnail.
        (pixels(200, 300, 3), [pixels(200, 300, 3)[::2, ::2]]),
        (pixels(20, 30, 1), [pixels(20, 30, 1).repeat(3, axis=-1)]),
        (pixels(20, 30, 3, dtype=np.uint16) * 257, [pixels(20, 30, 3)]),
    ],
)
def test_a_buffer_shows_its_first_images(array: np.ndarray, images: list[np.ndarray]) -> None:
    np.testing.assert_array_equal(shown(buffer_of(array)), images)


def test_floats_are_shown_from_their_least_to_their_greatest() -> None:
    array = pixels(20, 30, 3).astype(np.float32) / 250 * 4 - 2
    array[0, 0] = (np.nan, np.inf, -np.inf)
    (image,) = shown(buffer_of(array))
    np.testing.assert_array_equal(image[0, 0], [0, 255, 0])
    expected = pixels(20, 30, 3)[1:] * (255 / 250)
    assert np.abs(image[1:] - expected).max() <= 1


@each(
    "array",
    [
        pixels(2, 48000),
        pixels(4, 2, 48000, dtype=np.float32),
        pixels(3, 8, 48000, dtype=np.int16),
        pixels(0, 20, 30, 3),
        pixels(0, 0, 3),
        pixels(7),
        np.zeros((20, 30, 3), np.bool_),
    ],
)
def test_what_holds_no_images_shows_its_description_alone(array: np.ndarray) -> None:
    buffer = buffer_of(array)
    assert shown(buffer) == []
    assert f"CPUBuffer: {array.shape}" in buffer._repr_html_()


def test_an_image_of_a_recipe_is_shown_before_its_array_is_made() -> None:
    image = sm.encode_image(sm.frames_from_array(pixels(40, 60, 3)), "png")
    (one,) = shown(sm.ImageRecipe(32)(image))
    assert one.shape == (32, 32, 3)


def test_a_released_buffer_says_so() -> None:
    buffer = buffer_of(pixels(20, 30, 3))
    buffer.release()
    assert "CPUBuffer: released" in buffer._repr_html_()


@pytest.mark.parametrize("pix_fmt", ["rgb24", "yuv420p", "gray", "yuv420p10le"])
def test_frames_show_some_of_them_with_their_times(pix_fmt: str) -> None:
    data = make_video(index_frames(20, 320, 240), codec="libx265", format="mp4", frame_rate=10)
    filter_desc = sm.get_video_filter_desc(pix_fmt=pix_fmt)
    frames = sm.decode_packets(sm.demux_video(data), filter_desc)
    images = shown(frames)
    assert [image.shape for image in images] == [(120, 160, 3)] * 8
    assert re.findall(r">([\d.]+ s)<", frames._repr_html_())[::7] == ["0.000 s", "1.900 s"]
    (image,) = shown(frames[19])
    np.testing.assert_array_equal(image, images[-1])
    small = sm.load_video(data, width=160, height=120, scale_mode=None).array[19]
    if pix_fmt != "gray":
        # Both scale in one step, but with different kernels.
        assert np.abs(image.astype(int) - small).mean() < 12


def test_no_frames_show_their_window() -> None:
    data = make_video(index_frames(3, 64, 48), frame_rate=10)
    html = sm.decode_packets(sm.demux_video(data, timestamp=(5, 6)))._repr_html_()
    assert "VideoFrames: none in" in html
    assert "<img" not in html
