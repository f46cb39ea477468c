"""A still has the same orientation when it is opened as image, as video, in chunks, or by probe."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from effort import each
from oriented import oriented_clip, remux, upright
from still_metadata import (
    box,
    exif_block,
    gray_tiff,
    imir,
    irot,
    jpeg_with_exif,
    png_with_exif,
    riff_chunk,
    turned_avif,
    webp_form,
    webp_with_exif,
)

import spdl_media as sm
from spdl_media.testing import index_frames, index_planes, make_image, make_video

RGB = index_frames(1, 64, 48)[0]
ALL = range(1, 9)


@cache
def stored(codec: str) -> bytes:
    return make_image(RGB, codec=codec)


TURNS = {
    1: [],
    2: [imir(1)],
    3: [irot(2)],
    4: [imir(0)],
    5: [irot(1), imir(0)],
    6: [irot(3)],
    7: [irot(1), imir(1)],
    8: [irot(1)],
}
MAKERS: dict[str, Callable[[int], bytes]] = {
    "jpg": lambda n: jpeg_with_exif(stored("mjpeg"), exif_block(n)),
    "png": lambda n: png_with_exif(stored("png"), exif_block(n), after_pixels=True),
    "webp": lambda n: webp_with_exif(stored("libwebp"), exif_block(n), 64, 48),
    "tiff": lambda n: gray_tiff(RGB[..., 0], orientation=n),
    "avif": lambda n: turned_avif(stored("libsvtav1"), TURNS[n]),
}


def in_chunks(src: Any) -> sm.VideoFrames:
    with sm.Demuxer(src) as demuxer:
        decoder = sm.VideoDecoder(demuxer.video_codec, filter_desc=EXACT)
        parts = [*map(decoder.decode, demuxer.streaming_demux(num_packets=4))]
        frames = [frames for part in (*parts, decoder.flush()) for frames in part]
    assert len(frames) == 1
    return frames[0]


def from_demuxer(src: Any, kind: str) -> sm.ImagePackets | sm.VideoPackets:
    with sm.Demuxer(src) as demuxer:
        return demuxer.demux_image() if kind == "image" else demuxer.demux_video()


# The default for videos is faster, but not bit-exact.
EXACT = sm.get_video_filter_desc(quality="accurate")
PACKETS: dict[str, Callable[[Any], Any]] = {
    "demux_image": sm.demux_image,
    "demux_video": sm.demux_video,
    "a window": lambda src: sm.demux_video(src, timestamp=(0, 9)),
    "Demuxer.demux_image": lambda src: from_demuxer(src, "image"),
    "Demuxer.demux_video": lambda src: from_demuxer(src, "video"),
}


def picture(frames: sm.VideoFrames | sm.ImageFrames) -> np.ndarray:
    first = frames[0] if isinstance(frames, sm.VideoFrames) else frames
    return first.planes[0]


def check(got: np.ndarray, want: np.ndarray, suffix: str) -> None:
    # JPEG stills are decoded with another inverse DCT than Motion JPEG.
    np.testing.assert_allclose(got.astype(int), want, rtol=0, atol=2 if suffix == "jpg" else 0)


REFUSED_EXIF = {
    "nothing where the header points to": (b"II*\0\x63\0\0\0", 1),
    "text of Exif 3.0": (struct.pack("<4sIHHHI8x", b"II*\0", 8, 1, 0x010E, 129, 4), 1),
    "begins as in a JPEG": (b"Exif\0\0" + exif_block(6), 6),
}


@each("after_pixels", [False, True])
@each("exif, turn", REFUSED_EXIF.values())
def test_exif_that_ffmpeg_cannot_read_is_no_reason_to_refuse_a_png(
    exif: bytes, turn: int, after_pixels: bool
) -> None:
    png = png_with_exif(stored("png"), exif, after_pixels=after_pixels)
    want = upright(RGB, turn)
    np.testing.assert_array_equal(sm.load_image(png).array, want)
    np.testing.assert_array_equal(sm.load_video(png).array, want[None])
    assert (sm.probe(png).video.height, sm.probe(png).video.width) == want.shape[:2]  # type: ignore[union-attr]


@pytest.mark.parametrize("by", ["path", "bytes", "file object"])
@pytest.mark.parametrize("suffix", MAKERS)
def test_every_way_is_upright(suffix: str, by: str, tmp_path: Path) -> None:
    failed = []
    # Of the others, one that is turned, and one that is mirrored as well.
    for orientation in ALL if by == "bytes" else (6, 7):
        try:
            check_orientation(orientation, suffix, by, tmp_path)
        except AssertionError as error:
            failed.append(f"{orientation}: {error}")
    assert not failed


def check_orientation(orientation: int, suffix: str, by: str, tmp_path: Path) -> None:
    data = MAKERS[suffix](orientation)
    path = tmp_path / f"picture.{suffix}"
    path.write_bytes(data)
    src: Any = {"path": path, "bytes": data, "file object": io.BytesIO(data)}[by]
    want = upright(picture(sm.decode_packets(sm.demux_image(MAKERS[suffix](1)))), orientation)
    height, width = want.shape[:2]
    for name, demux in PACKETS.items():
        packets = demux(src)
        assert packets.orientation == orientation, name
        if packets.width:  # that of a still is known where a container is opened for it
            assert (packets.width, packets.height) == (width, height), name
        check(picture(sm.decode_packets(packets, EXACT)), want, suffix)
    check(picture(in_chunks(src)), want, suffix)
    check(np.asarray(sm.load_video(src, quality="accurate"))[0], want, suffix)
    check(np.asarray(sm.load_image(src)), want, suffix)
    info = sm.probe(src).video
    assert info is not None
    assert (info.orientation, info.width, info.height) == (orientation, width, height)


@pytest.mark.parametrize("name", ["jpg", "png", "webp"])
def test_a_source_that_cannot_seek(name: str) -> None:
    for demux in PACKETS.values():
        assert demux(Pipe(MAKERS[name](6))).orientation == 6


class Pipe(io.BytesIO):
    def seekable(self) -> bool:
        return False


@pytest.mark.parametrize("options", [{"format": "image2"}, {"format": "jpeg_pipe"}])
def test_a_format_that_is_named(options: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "picture.jpg"
    path.write_bytes(MAKERS["jpg"](6))
    config = sm.demux_config(**options)
    assert sm.demux_image(path, demux_config=config).orientation == 6
    assert sm.demux_video(path, demux_config=config).orientation == 6
    info = sm.probe(path, demux_config=config).video
    assert info is not None
    assert (info.orientation, info.width, info.height) == (6, 48, 64)


@pytest.mark.parametrize(
    ("properties", "orientation"),
    [([imir(0), irot(1)], 5), ([imir(1), irot(1)], 7)],
)
def test_an_avif_turns_before_it_mirrors_in_whatever_order_it_says_so(
    properties: list[bytes], orientation: int
) -> None:
    data = turned_avif(stored("libsvtav1"), properties)
    assert {name: demux(data).orientation for name, demux in PACKETS.items()} == dict.fromkeys(
        PACKETS, orientation
    )
    assert sm.probe(data).video.orientation == orientation  # type: ignore[union-attr]


def test_an_avif_sequence_stands_as_its_track_says() -> None:
    data = remux(oriented_clip(6, codec="libsvtav1"), "avif")
    assert {name: demux(data).orientation for name, demux in PACKETS.items()} == dict.fromkeys(
        PACKETS, 6
    )


def animated(suffix: str) -> bytes:
    """Make an animation with the Exif orientation 6."""
    pix_fmt = "yuv420p" if suffix == "webp" else "gray"
    codec = "libwebp_anim" if suffix == "webp" else suffix
    data = make_video(index_planes(3, 64, 48, pix_fmt), codec=codec, format=suffix, pix_fmt=pix_fmt)
    if suffix == "apng":
        return png_with_exif(data, exif_block(6))
    if suffix == "gif":
        return data
    extended = data[:20] + bytes([data[20] | 8]) + data[21:]
    return webp_form(extended[12:], riff_chunk(b"EXIF", exif_block(6)))


@pytest.mark.parametrize("suffix", ["gif", "apng", "webp"])
def test_animations_are_left_as_they_are(suffix: str) -> None:
    data = animated(suffix)
    for demux in PACKETS.values():
        assert demux(data).orientation == 1
    assert sm.probe(data).video.orientation == 1  # type: ignore[union-attr]


def test_the_images_of_a_motion_jpeg_are_left_as_they_are() -> None:
    """Exif of the single images does not apply to the video."""
    data = remux(MAKERS["jpg"](6), "avi")
    assert b"Exif" in data
    assert {demux(data).orientation for demux in PACKETS.values()} == {1}


def test_each_image_behind_another_stands_as_its_own_file_says() -> None:
    pair = MAKERS["png"](6) + MAKERS["png"](1)
    with sm.Demuxer(pair) as demuxer:
        chunks = list(demuxer.streaming_demux(num_packets=1))
    assert [chunk.orientation for chunk in chunks] == [6, 1]


class Counting(io.BytesIO):
    count = 0

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self.count += len(data)
        return data


@pytest.mark.parametrize("suffix", ["jpg", "png", "avif"])
def test_the_orientation_costs_no_further_reading(suffix: str, rng: np.random.Generator) -> None:
    noise = rng.integers(0, 256, (500, 700, 3), dtype=np.uint8)
    data = {
        "jpg": lambda: make_image(noise, codec="mjpeg"),
        "png": lambda: make_image(noise, codec="png"),
        "avif": lambda: MAKERS["avif"](6) + box(b"free", bytes(1 << 20)),
    }[suffix]()
    # FFmpeg reads the file, and this library checks what FFmpeg does not report, such as a missing end.
    for demux in (sm.demux_image, sm.demux_video):
        file = Counting(data)
        demux(file)
        assert file.count < 2.5 * len(data)


@pytest.mark.parametrize("suffix", ["jpg", "avif"])
def test_the_memory_of_a_still_is_given_back(suffix: str) -> None:
    data = bytearray(MAKERS[suffix](6))
    for demux in (PACKETS["demux_video"], PACKETS["Demuxer.demux_image"], sm.probe):
        kept = demux(data)
        data.extend(b"more")
        del data[-4:], kept


def test_real_photographs(media_dir: Path) -> None:
    folder = media_dir / "images_odd"
    for n in ALL:
        path = folder / f"exif_orientation_{n}.jpg"
        assert [demux(path).orientation for demux in PACKETS.values()] == [n] * len(PACKETS)
