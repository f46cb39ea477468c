"""A reused JPEG decoder gives the same as a new one, for files whose headers allow the reuse."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from effort import each

import spdl_media as sm

# Private: the idle decoder is shared by all calls, and its reuse is visible otherwise only in the time.
from spdl_media import image_decoder
from spdl_media.still_headers import exif_orientation
from spdl_media.stills import JpegHead, read_jpeg_head
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
def _no_idle_decoder() -> Iterator[None]:
    image_decoder._idle_decoders.clear()
    yield
    image_decoder._idle_decoders.clear()


def decoded(data: bytes) -> tuple[list[Any], tuple[Any, ...]]:
    frames = sm.decode_packets(sm.demux_image(data), None)
    facts = (frames.pix_fmt, frames.colorspace, frames.color_range, frames.color_trc)
    return [plane.copy() for plane in frames.planes], (*facts, frames.pts, frames.orientation)


def stands_alone(data: bytes) -> bool:
    head = read_jpeg_head(data)
    return head is not None and head.stands_alone


def fresh(data: bytes) -> tuple[list[Any], tuple[Any, ...]]:
    image_decoder._idle_decoders.clear()
    result = decoded(data)
    image_decoder._idle_decoders.clear()
    return result


def assert_as_fresh(got: tuple[list[Any], Any], wanted: tuple[list[Any], Any]) -> None:
    assert got[1] == wanted[1]
    for plane, right in zip(got[0], wanted[0], strict=True):
        np.testing.assert_array_equal(plane, right)


def with_segment(data: bytes, marker: int, body: bytes) -> bytes:
    length = (len(body) + 2).to_bytes(2, "big")
    return data[:2] + bytes((0xFF, marker)) + length + body + data[2:]


def without_segments(data: bytes, marker: int) -> bytes:
    """Remove the segments with a marker that come before the scan."""
    result, position = data[:2], 2
    while data[position + 1] != 0xDA:
        end = position + 2 + int.from_bytes(data[position + 2 : position + 4], "big")
        if data[position + 1] != marker:
            result += data[position:end]
        position = end
    return result + data[position:]


def test_the_decoder_stays_open() -> None:
    decoded(PICTURES[0])
    (first,) = image_decoder._idle_decoders
    decoded(PICTURES[1])
    assert list(image_decoder._idle_decoders) == [first]


def test_a_thread_takes_a_decoder_that_another_has_left() -> None:
    decoded(PICTURES[0])
    (first,) = image_decoder._idle_decoders
    thread = threading.Thread(target=decoded, args=(PICTURES[1],))
    thread.start()
    thread.join()
    assert list(image_decoder._idle_decoders) == [first]


def test_images_in_any_order_are_those_of_fresh_decoders() -> None:
    wanted = [fresh(data) for data in PICTURES]
    rng = random.Random(0)  # noqa: S311  # an order, not a secret
    for index in rng.choices(range(len(PICTURES)), k=60):
        assert_as_fresh(decoded(PICTURES[index]), wanted[index])


def test_an_image_that_failed_leaves_no_decoder() -> None:
    wanted = fresh(PICTURES[3])
    cut = PICTURES[0][: len(PICTURES[0]) * 2 // 3] + b"\xff\xd9"
    decoded(PICTURES[0])
    with pytest.raises(sm.DecodeError):
        decoded(cut)
    assert not image_decoder._idle_decoders
    assert_as_fresh(decoded(PICTURES[3]), wanted)


@each(
    "marker, body",
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
    image_decoder._idle_decoders.clear()
    with contextlib.suppress(sm.DecodeError):
        decoded(telling)
    assert not image_decoder._idle_decoders
    assert_as_fresh(decoded(PICTURES[1]), wanted)


@pytest.mark.parametrize("marker", [0xC4, 0xDB])
def test_tables_are_not_taken_from_the_image_before(marker: int) -> None:
    bare = without_segments(PICTURES[0], marker)
    assert len(bare) < len(PICTURES[0])
    assert not stands_alone(bare)


@each("size", range(0, 700, 13))
def test_headers_that_end_early_stand_not_alone(size: int) -> None:
    data = PICTURES[0]
    scan = data.index(b"\xff\xda")
    if size < scan:
        assert not stands_alone(data[:size])


@pytest.mark.parametrize(("marker", "offset", "value"), [(0xC0, 9, 1), (0xC0, 4, 12), (0xDA, 4, 1)])
def test_gray_deep_and_split_images_take_a_fresh_decoder(
    marker: int, offset: int, value: int
) -> None:
    data = bytearray(PICTURES[0])
    data[data.index(bytes((0xFF, marker))) + offset] = value
    assert not stands_alone(data)


def test_progressive_images_take_a_fresh_decoder() -> None:
    assert not stands_alone(PICTURES[0].replace(b"\xff\xc0", b"\xff\xc2"))


def test_large_images_keep_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_decoder, "_MAX_PIXELS", 100)
    decoded(PICTURES[0])
    assert not image_decoder._idle_decoders


def test_threads_do_not_disturb_each_other() -> None:
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


def test_the_walk_reads_what_is_there() -> None:
    assert read_jpeg_head(PICTURES[2]) == JpegHead(
        1, 30, 34, pix_fmt="yuvj444p", has_all=True, is_ycc=True, stands_alone=True
    )


@each("orientation", range(10))
@each("cut", [0, 1, 9, 20])
def test_the_walk_reads_the_orientation(orientation: int, cut: int) -> None:
    block = b"Exif\0\0MM\0*\0\0\0\x08\0\1\x01\x12\0\3\0\0\0\1\0" + bytes([orientation, 0, 0])
    data = with_segment(PICTURES[0], 0xE1, block[: len(block) - cut])
    head = read_jpeg_head(data)
    assert head is not None
    assert head.orientation == exif_orientation(data)
    assert head.stands_alone


def test_only_the_first_exif_counts() -> None:
    def exif(orientation: int) -> bytes:
        return b"Exif\0\0II*\0\x08\0\0\0\1\0\x12\x01\3\0\1\0\0\0" + bytes([orientation, 0, 0, 0])

    data = with_segment(with_segment(PICTURES[0], 0xE1, exif(3)), 0xE1, exif(6))
    head = read_jpeg_head(data)
    assert head is not None
    assert head.orientation == exif_orientation(data) == 6


@each(
    "marker, body, is_ycc",
    [
        (0xEE, b"Adobe\0\x64\0\0\0\0\1", True),
        (0xEE, b"Adobe\0\x64\0\0\0\0\0", False),  # RGB
        (0xEE, b"Adobe", False),
        (0xE2, b"ICC_PROFILE\0\1\1", True),
        (0xFE, b"made by hand", True),
        (0xE1, b"mjpg\0\0\0\0", False),
    ],
)
def test_segments_of_applications(marker: int, body: bytes, is_ycc: bool) -> None:
    head = read_jpeg_head(with_segment(PICTURES[0], marker, body))
    assert head is not None
    assert (head.is_ycc, head.stands_alone) == (is_ycc, is_ycc)


def test_a_table_that_does_not_fill_its_segment_is_none() -> None:
    bare = without_segments(PICTURES[0], 0xDB)
    data = with_segment(bare, 0xDB, bytes(60))
    head = read_jpeg_head(data)
    assert head is not None
    assert head.is_ycc
    assert not head.stands_alone


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"\xff\xd8", b"\x89PNG\r\n", b"\xff\xd8\xff\xda\0\0"]
)
def test_not_a_header(data: bytes) -> None:
    assert read_jpeg_head(data) is None


def test_wishes_of_the_caller_take_a_fresh_decoder() -> None:
    packets = sm.demux_image(PICTURES[0])
    for config in (
        sm.decode_config(decoder="mjpeg"),
        sm.decode_config(decoder_options={"idct": "int"}),
    ):
        sm.decode_packets(packets, None, config)
        assert not image_decoder._idle_decoders


def test_packets_through_a_bitstream_filter_are_looked_at_again() -> None:
    packets = sm.apply_bsf(sm.demux_image(PICTURES[0]), "null")
    assert_as_fresh(
        ([p.copy() for p in sm.decode_packets(packets, None).planes], ()),
        (fresh(PICTURES[0])[0], ()),
    )
    assert not image_decoder._idle_decoders


def test_the_log_is_heard_by_those_who_asked(caplog: pytest.LogCaptureFixture) -> None:
    sm.set_log_level("warning")
    try:
        decoded(PICTURES[0])
        assert not image_decoder._idle_decoders
    finally:
        sm.set_log_level("quiet")
    decoded(PICTURES[0])
    assert image_decoder._idle_decoders


def test_pixels_do_not_change_when_the_decoder_continues() -> None:
    first = sm.decode_packets(sm.demux_image(PICTURES[0]), None)
    before = [plane.copy() for plane in first.planes]
    for data in PICTURES[1:]:
        decoded(data)
    for plane, wanted in zip(first.planes, before, strict=True):
        np.testing.assert_array_equal(plane, wanted)
