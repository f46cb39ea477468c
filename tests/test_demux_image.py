"""One image from containers: videos, animations, AVIF, and grids of tiles."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from heif_grid import make_grid

import spdl_media as sm
from spdl_media.testing import (
    AudioTrack,
    VideoTrack,
    frame_index,
    index_frames,
    index_planes,
    index_samples,
    make_audio,
    make_image,
    make_media,
    make_video,
)


@pytest.mark.parametrize("format", ["mp4", "matroska", "mpegts", "avi", "nut", "mov"])
def test_the_first_image_of_a_video(format: str) -> None:
    planes = index_planes(20, 64, 48)
    data = make_video(planes, codec="libx264", format=format, gop_size=5)
    packets = sm.demux_image(data)
    assert isinstance(packets, sm.ImagePackets)
    assert len(packets) == 1
    image = sm.decode_packets(packets, None)
    assert isinstance(image, sm.ImageFrames)
    for got, want in zip(image.planes, planes[0], strict=True):
        assert np.array_equal(got, want)
    assert sm.decode_packets(packets).pix_fmt == "rgb24"


def test_the_first_image_of_the_best_stream(media_dir: Path) -> None:
    image = sm.decode_packets(sm.demux_image(media_dir / "video" / "nasa_13013.mp4"))
    assert (image.width, image.height) == (480, 270)


def test_a_stream_cut_in_mid_group_gives_its_first_key_frame() -> None:
    data = make_video(index_planes(20, 64, 48), codec="libx264", format="mpegts", gop_size=8)
    sizes = [start for start in range(0, len(data), 188) if data[start + 1] & 0x40]
    cut = data[sizes[8] :]
    assert frame_index(sm.decode_packets(sm.demux_image(cut), None).planes[0]) == 8


def test_gif() -> None:
    pictures = index_planes(3, 64, 48, "gray")
    data = make_video(pictures, codec="gif", format="gif", pix_fmt="gray")
    image = sm.decode_packets(sm.demux_image(data))
    assert (image.pix_fmt, image.width, image.height) == ("rgb24", 64, 48)
    assert frame_index(image.planes[0]) == 0
    assert np.array_equal(image.planes[0][..., 0], pictures[0][0])
    frames = sm.decode_packets(sm.demux_video(data))
    assert [frame_index(frame.planes[0]) for frame in frames] == [0, 1, 2]


def test_avif() -> None:
    rgb = index_frames(1, 128, 96)[0]
    packets = sm.demux_image(make_image(rgb, codec="libsvtav1"))
    image = sm.decode_packets(packets)
    assert (image.width, image.height) == (128, 96)
    assert frame_index(image.planes[0]) == 0
    assert np.abs(image.planes[0].astype(int) - rgb).mean() < 20


def test_an_avif_sequence_gives_its_first_image() -> None:
    data = make_video(index_planes(3, 64, 64), codec="libsvtav1", format="avif")
    assert frame_index(sm.decode_packets(sm.demux_image(data), None).planes[0]) == 0
    assert len(sm.decode_packets(sm.demux_video(data))) == 3


@pytest.mark.parametrize(("columns", "meta_is_last"), [(2, False), (4, True)])
def test_a_grid_of_tiles_is_joined_by_pillow(columns: int, meta_is_last: bool) -> None:
    """FFmpeg presents each tile as a stream, but one tile is not the whole image.

    Some phones write the metadata, which states the tiles, behind the coded data.
    """
    data = make_grid(index_frames(1, 256, 128)[0], columns, meta_is_last=meta_is_last)
    with av.open(io.BytesIO(data)) as file:
        assert len(file.streams.video) == columns, "as FFmpeg shows it today"
    tiles = [sm.decode_packets(sm.demux_video(data, stream_index=i)) for i in range(columns)]
    joined = np.concatenate([tile[0].planes[0] for tile in tiles], axis=1)
    # Chroma is scaled differently.
    assert np.abs(sm.load_image(data).array.astype(int) - joined).mean() < 3
    assert np.abs(sm.load_video(data).array[0].astype(int) - joined).mean() < 3
    assert (sm.probe(data).video.width, sm.probe(data).is_still) == (256, True)  # type: ignore[union-attr]
    with pytest.raises(sm.DemuxError, match=f"split into {columns} tiles, and joining them"):
        sm.demux_image(data, demux_config=sm.demux_config(format="mov"))
    tile = sm.decode_packets(sm.demux_video(data, stream_index=1))
    assert (tile.width, tile.height) == (256 // columns, 128)


def test_no_image_in_audio() -> None:
    with pytest.raises(sm.DemuxError, match="there is no video stream"):
        sm.demux_image(make_audio(index_samples(4800)))


def test_a_video_without_a_key_frame() -> None:
    data = make_video(index_planes(20, 64, 48), codec="libx264", format="mpegts", gop_size=30)
    headless = io.BytesIO()
    with av.open(io.BytesIO(data)) as file, av.open(headless, "w", format="mpegts") as sink:
        stream = sink.add_stream_from_template(file.streams.video[0])
        for packet in file.demux(video=0):
            if packet.size and not packet.is_keyframe:
                packet.stream = stream
                sink.mux(packet)
    with pytest.raises(sm.DemuxError, match="no key frame, so there is no first image"):
        sm.demux_image(headless.getvalue())


def test_a_file_without_any_image_says_so() -> None:
    """As FITS files of tables."""
    cards = (
        "SIMPLE  =                    T",
        "BITPIX  =                    8",
        "NAXIS   =                    0",
    )
    tables = "".join(card.ljust(80) for card in (*cards, "END")).ljust(2880).encode()
    with pytest.raises(sm.DemuxError, match="the video stream is empty, so there is no image"):
        sm.load_image(tables)


def test_images_in_a_file_of_audio_and_video() -> None:
    tracks = [
        AudioTrack(samples=index_samples(48000), codec="aac"),
        VideoTrack(frames=index_planes(10, 64, 48), codec="libx265"),
    ]
    with sm.Demuxer(make_media(tracks, format="mp4")) as demuxer:
        for _ in range(2):
            image = sm.decode_packets(demuxer.demux_image(), None)
            assert frame_index(image.planes[0]) == 0


class Pipe(io.RawIOBase):
    """A source that can be read only once and cannot seek."""

    def __init__(self, data: bytes) -> None:
        self._file = io.BytesIO(data)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._file.readinto(buffer)


@pytest.mark.parametrize("codec", ["png", "mjpeg", "libwebp", "gif", "libsvtav1", "bmp"])
def test_sources_of_every_kind(codec: str, tmp_path: Path) -> None:
    data = make_image(index_planes(1, 64, 48, "gray")[0][0], codec=codec)
    path = tmp_path / "picture"
    path.write_bytes(data)
    want = sm.decode_packets(sm.demux_image(data)).planes[0]
    for source in (path, io.BytesIO(data), bytearray(data), Pipe(data)):
        image = sm.decode_packets(sm.demux_image(source))
        assert np.array_equal(image.planes[0], want), source
