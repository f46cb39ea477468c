"""A JPEG decoder that stays open gives what a fresh one gives."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import spdl_media as sm
from spdl_media._decoding import reuse
from spdl_media._stills.jpeg_header import stands_alone
from spdl_media.testing import make_image

COLORS = ("yuvj420p", "yuvj422p", "yuvj444p")


def jpeg(seed: int, width: int, height: int, pix_fmt: str, quality: int) -> bytes:
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (8, 8, 3), np.uint8)
    picture = small.repeat(-(-height // 8), axis=0).repeat(-(-width // 8), axis=1)
    options = {"qmin": str(quality), "qmax": str(quality)}
    return make_image(picture[:height, :width], codec="mjpeg", pix_fmt=pix_fmt, options=options)


PICTURES = [
    jpeg(seed, 16 + 7 * seed, 40 - 3 * seed, COLORS[seed % 3], 2 + 3 * seed) for seed in range(9)
]


@pytest.fixture(autouse=True)
def _no_decoder_at_rest() -> Iterator[None]:
    reuse.take_decoder()
    yield
    reuse.take_decoder()


def decoded(data: bytes) -> tuple[list[Any], tuple[Any, ...]]:
    frames = sm.decode_packets(sm.demux_image(data), None)
    facts = (frames.pix_fmt, frames.colorspace, frames.color_range, frames.color_trc)
    return [plane.copy() for plane in frames.planes], (*facts, frames.pts, frames.orientation)


def fresh(data: bytes) -> tuple[list[Any], tuple[Any, ...]]:
    reuse.take_decoder()
    return decoded(data)


def assert_as_fresh(got: tuple[list[Any], Any], wanted: tuple[list[Any], Any]) -> None:
    assert got[1] == wanted[1]
    for plane, right in zip(got[0], wanted[0], strict=True):
        np.testing.assert_array_equal(plane, right)


def with_segment(data: bytes, marker: int, body: bytes) -> bytes:
    length = (len(body) + 2).to_bytes(2, "big")
    return data[:2] + bytes((0xFF, marker)) + length + body + data[2:]


def without_segments(data: bytes, marker: int) -> bytes:
    """Without the segments of a marker, of those before the scan."""
    result, position = data[:2], 2
    while data[position + 1] != 0xDA:
        end = position + 2 + int.from_bytes(data[position + 2 : position + 4], "big")
        if data[position + 1] != marker:
            result += data[position:end]
        position = end
    return result + data[position:]


def test_the_decoder_stays_open() -> None:
    decoded(PICTURES[0])
    first = reuse._local.context
    assert first is not None
    decoded(PICTURES[1])
    assert reuse._local.context is first


def test_pictures_in_any_order_are_those_of_fresh_decoders() -> None:
    wanted = [fresh(data) for data in PICTURES]
    rng = random.Random(0)  # noqa: S311  # an order, not a secret
    for index in rng.choices(range(len(PICTURES)), k=60):
        assert_as_fresh(decoded(PICTURES[index]), wanted[index])


def test_a_picture_that_failed_leaves_no_decoder() -> None:
    wanted = fresh(PICTURES[3])
    cut = PICTURES[0][: len(PICTURES[0]) * 2 // 3] + b"\xff\xd9"
    with pytest.raises(sm.DecodeError):
        decoded(cut)
    assert reuse._local.context is None
    assert_as_fresh(decoded(PICTURES[3]), wanted)


@pytest.mark.parametrize(
    ("marker", "body"),
    [
        (0xE0, b"AVI1\1\0\0\0\0\0\0\0\0\0"),
        (0xE0, b"LJIF\0\0\0\0\0\0\0\0\2\0"),
        (0xE3, b"_JPSJPS_\0\0\0\0\0\0"),
        (0xE7, b"unknown to all"),
        (0xFE, b"CS=ITU601\0"),
        (0xFE, b"MULTISCOPE II\0"),
    ],
)
def test_what_a_decoder_would_remember_is_given_a_fresh_one(marker: int, body: bytes) -> None:
    telling = with_segment(PICTURES[0], marker, body)
    assert stands_alone(PICTURES[0])
    assert not stands_alone(telling)
    wanted = fresh(PICTURES[1])
    reuse.take_decoder()
    with contextlib.suppress(sm.DecodeError):
        decoded(telling)
    assert reuse._local.context is None
    assert_as_fresh(decoded(PICTURES[1]), wanted)


@pytest.mark.parametrize("marker", [0xC4, 0xDB])
def test_tables_are_not_taken_from_the_picture_before(marker: int) -> None:
    bare = without_segments(PICTURES[0], marker)
    assert len(bare) < len(PICTURES[0])
    assert not stands_alone(bare)


@pytest.mark.parametrize("size", range(0, 700, 13))
def test_headers_that_end_early_stand_not_alone(size: int) -> None:
    data = PICTURES[0]
    scan = data.index(b"\xff\xda")
    if size < scan:
        assert not stands_alone(data[:size])


@pytest.mark.parametrize(("marker", "offset", "value"), [(0xC0, 9, 1), (0xC0, 4, 12), (0xDA, 4, 1)])
def test_gray_deep_and_split_pictures_take_a_fresh_decoder(
    marker: int, offset: int, value: int
) -> None:
    data = bytearray(PICTURES[0])
    data[data.index(bytes((0xFF, marker))) + offset] = value
    assert not stands_alone(data)


def test_progressive_pictures_take_a_fresh_decoder() -> None:
    assert not stands_alone(PICTURES[0].replace(b"\xff\xc0", b"\xff\xc2"))


def test_large_pictures_keep_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse, "_MAX_PIXELS", 100)
    decoded(PICTURES[0])
    assert reuse._local.context is None


def test_each_thread_has_its_own() -> None:
    wanted = [fresh(data) for data in PICTURES]
    failures: list[BaseException] = []

    def work(shift: int) -> None:
        try:
            for turn in range(40):
                index = (turn + shift) % len(PICTURES)
                assert_as_fresh(decoded(PICTURES[index]), wanted[index])
        except BaseException as error:  # noqa: BLE001  # handed to the test
            failures.append(error)

    threads = [threading.Thread(target=work, args=(shift,)) for shift in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
