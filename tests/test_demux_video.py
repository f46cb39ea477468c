"""Demuxing video: selection of streams, kinds of sources, options, and times of packets."""

from __future__ import annotations

import gc
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoded import indices
from left_behind import descriptors

import spdl_media as sm
from spdl_media.testing import (
    AudioTrack,
    VideoTrack,
    index_frames,
    index_planes,
    index_samples,
    make_audio,
    make_media,
    make_tone,
    make_video,
)


@pytest.fixture(scope="module")
def two_pictures() -> bytes:
    """Stream 0: audio. Stream 1: 20 small frames. Stream 2: 30 larger frames, a key frame every 5."""
    small = VideoTrack(frames=index_planes(20, 32, 24), codec="libx265")
    large = VideoTrack(frames=index_planes(30, 64, 48), codec="libx265", gop_size=5, max_b_frames=2)
    sound = AudioTrack(samples=index_samples(144000), codec="aac")
    return make_media([sound, small, large], format="mp4", faststart=True)


class Pipe(io.RawIOBase):
    """A source that can be read only once and cannot seek."""

    def __init__(self, data: bytes) -> None:
        self._file = io.BytesIO(data)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._file.readinto(buffer)


def test_the_best_stream_is_taken_not_the_first(media_dir: Path) -> None:
    packets = sm.demux_video(media_dir / "video" / "nasa_13013.mp4")
    assert (packets.width, packets.height, len(packets)) == (480, 270, 390)
    frames = sm.decode_packets(packets)
    assert (len(frames), frames.width, frames.height, frames.pix_fmt) == (390, 480, 270, "rgb24")


def test_a_stream_can_be_chosen_by_its_index(two_pictures: bytes) -> None:
    for index, (width, count) in {1: (32, 20), 2: (64, 30)}.items():
        packets = sm.demux_video(two_pictures, stream_index=index)
        assert (packets.width, len(packets)) == (width, count)
        assert indices(sm.decode_packets(packets, None)) == list(range(count))
    numpy_index = sm.demux_video(two_pictures, stream_index=np.int64(1))  # type: ignore[arg-type]
    assert numpy_index.width == 32


@pytest.mark.parametrize("index", [3, 99, -1])
def test_no_such_stream(two_pictures: bytes, index: int) -> None:
    with pytest.raises(
        sm.DemuxError,
        match=f"there is no stream {index}; the streams are 0: audio, 1: video, 2: video",
    ):
        sm.demux_video(two_pictures, stream_index=index)


def test_a_stream_of_another_kind(two_pictures: bytes) -> None:
    with pytest.raises(sm.DemuxError, match="stream 0 is audio, not video; the streams are"):
        sm.demux_video(two_pictures, stream_index=0)
    with pytest.raises(sm.DemuxError, match="stream 1 is video, not audio; the streams are"):
        sm.demux_audio(two_pictures, stream_index=1)


def test_no_video_at_all() -> None:
    with pytest.raises(sm.DemuxError, match="there is no video stream; the streams are 0: audio"):
        sm.demux_video(make_audio(index_samples(4800)), name="song.wav")


@pytest.mark.parametrize("index", ["1", 1.0, True])
def test_an_index_is_an_int(two_pictures: bytes, index: Any) -> None:
    with pytest.raises(TypeError, match="stream_index must be an int, not"):
        sm.demux_video(two_pictures, stream_index=index)


def test_every_kind_of_source_gives_the_same(two_pictures: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a:b.mp4"
    path.write_bytes(two_pictures)
    want = sm.demux_video(two_pictures, timestamp=(1, 2)).get_timestamps(raw=True)
    with path.open("rb") as file:
        sources = (
            path,
            str(path),
            bytearray(two_pictures),
            memoryview(two_pictures),
            np.frombuffer(two_pictures, np.uint8),
            io.BytesIO(two_pictures),
            file,
        )
        for source in sources:
            packets = sm.demux_video(source, timestamp=(1, 2))
            assert packets.get_timestamps(raw=True) == want, source


def test_the_position_of_a_seekable_object_is_left_as_found(two_pictures: bytes) -> None:
    file = io.BytesIO(two_pictures)
    file.seek(123)
    sm.demux_video(file, timestamp=(1, 2))
    assert file.tell() == 123
    with sm.Demuxer(file) as demuxer:
        demuxer.demux_video((2, None))
        demuxer.demux_audio((0, 1))
    assert file.tell() == 123
    with pytest.raises(sm.DemuxError, match="there is no stream 9"):
        sm.demux_video(file, stream_index=9)
    assert file.tell() == 123
    assert not file.closed


def test_a_source_that_cannot_seek_serves_one_read(two_pictures: bytes) -> None:
    packets = sm.demux_video(Pipe(two_pictures), timestamp=(1, 2))
    assert indices(sm.decode_packets(packets, None)) == list(range(10, 20))
    with sm.Demuxer(Pipe(two_pictures)) as demuxer:
        assert len(demuxer.demux_video(stream_index=2)) == 30
        with pytest.raises(
            sm.DemuxError, match="cannot seek, so it can be read once; open it again, or read it"
        ):
            demuxer.demux_audio()


@pytest.mark.parametrize("format", ["matroska", "mpegts", "avi", "nut"])
def test_windows_of_sources_that_cannot_seek(format: str) -> None:
    data = make_video(index_planes(30, 64, 48), codec="libx264", format=format, gop_size=8)
    packets = sm.demux_video(Pipe(data), timestamp=(1.7, 2.2))
    assert indices(sm.decode_packets(packets, None)) == [17, 18, 19, 20, 21]


def test_format_can_be_named() -> None:
    data = make_video(index_planes(5, 64, 48), codec="rawvideo", format="rawvideo")
    config = sm.demux_config(
        format="rawvideo", format_options={"video_size": "64x48", "framerate": 10}
    )
    frames = sm.decode_packets(sm.demux_video(data, demux_config=config), None)
    assert indices(frames) == list(range(5))
    assert frames.timestamps == (0.0, 0.1, 0.2, 0.3, 0.4)
    cut = sm.demux_video(data, demux_config=config, timestamp=(0.2, 0.4))
    assert indices(sm.decode_packets(cut, None)) == [2, 3]


def test_unknown_formats_and_options(two_pictures: bytes) -> None:
    for config, message in (
        (sm.demux_config(format="mp5"), "mp5"),
        (sm.demux_config(format="mov", format_options={"no_such": 1}), "no option 'no_such'"),
        (sm.demux_config(format_options={"no_such": 1}), "no option 'no_such'"),
    ):
        with pytest.raises(ValueError, match=message):
            sm.demux_video(two_pictures, demux_config=config)


@pytest.mark.parametrize("size", [1024, 5000, 1 << 20])
def test_buffer_size_is_what_is_asked_for_at_a_time(two_pictures: bytes, size: int) -> None:
    asked = []

    class Counted(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            asked.append(size)
            return super().read(size)

        def readinto(self, buffer: Any, /) -> int:
            asked.append(len(buffer))
            return super().readinto(buffer)

    packets = sm.demux_video(
        Counted(two_pictures), stream_index=2, demux_config=sm.demux_config(buffer_size=size)
    )
    assert len(packets) == 30
    assert max(asked) <= max(size, 65536)


def test_name_stands_in_messages_and_packets(two_pictures: bytes) -> None:
    packets = sm.demux_video(two_pictures, name="clip 7")
    assert packets.source == "clip 7"
    assert sm.decode_packets(packets).source == "clip 7"
    assert sm.demux_video(two_pictures).source == f"bytes of length {len(two_pictures)}"
    with pytest.raises(sm.DemuxError, match=r"^clip 7: there is no stream 5") as raised:
        sm.demux_video(two_pictures, name="clip 7", stream_index=5)
    assert raised.value.source == "clip 7"


def test_damage_of_the_container_names_the_source(tmp_path: Path) -> None:
    path = tmp_path / "text.mp4"
    path.write_text("this is no video " * 100)
    with pytest.raises(sm.DemuxError, match=r"text\.mp4: .*demux_config\(format="):
        sm.demux_video(path)


@pytest.mark.parametrize("b_frames", [0, 2])
@pytest.mark.parametrize("format", ["mp4", "matroska", "mpegts", "mov", "nut"])
def test_packets_tell_the_times_of_their_frames(format: str, b_frames: int) -> None:
    frames = index_planes(25, 64, 48)
    data = make_video(frames, codec="libx265", format=format, max_b_frames=b_frames, gop_size=6)
    for window in (None, (0.35, 1.95)):
        packets = sm.demux_video(data, timestamp=window)
        assert packets.get_timestamps() == sm.decode_packets(packets).timestamps
        assert len(packets.get_timestamps(raw=True)) == len(packets)


def test_packets_of_real_media_tell_the_times_of_their_frames(media_dir: Path) -> None:
    for name in ("vfr_320x240.mp4", "h265_video.mp4", "h264_10bits.mp4", "vp9_320x240.webm"):
        packets = sm.demux_video(media_dir / "video" / name)
        assert packets.get_timestamps() == sm.decode_packets(packets, None).timestamps, name


def test_only_what_the_window_needs_is_kept(two_pictures: bytes) -> None:
    packets = sm.demux_video(two_pictures, timestamp=(1.5, 1.6), stream_index=2)
    assert len(packets) <= 4
    assert packets.get_timestamps(raw=True)[0] == 1.5, "a key frame stands at 1.5 s"


def test_missing_files_are_source_errors(tmp_path: Path) -> None:
    with pytest.raises(sm.SourceError, match="Check the path"):
        sm.demux_video(tmp_path / "none.mp4")
    with pytest.raises(sm.SourceError, match="Give one of the files in it"):
        sm.demux_video(tmp_path)


def test_file_descriptors_are_closed(two_pictures: bytes, tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    path.write_bytes(two_pictures)
    gc.collect()
    before = descriptors()
    for _ in range(5):
        sm.demux_video(path, timestamp=(1, 2))
        with pytest.raises(sm.DemuxError):
            sm.demux_video(path, stream_index=7)
    assert descriptors() <= before


@pytest.mark.parametrize("size", [256, 512])
def test_an_mp4_that_begins_with_the_bytes_of_an_icon_or_a_cursor(size: int) -> None:
    """Its first box, the list of brands, has as many bytes as their signatures say."""
    plain = make_media([VideoTrack(frames=index_planes(3, 64, 48))], format="mp4")
    before = int.from_bytes(plain[:4], "big")
    data = bytearray(plain)
    # The offsets of the chunks count from the start of the file.
    table = plain.index(b"stco") + 8
    for at in range(table + 4, table + 4 + 4 * int.from_bytes(plain[table : table + 4], "big"), 4):
        moved = int.from_bytes(plain[at : at + 4], "big") + size - before
        data[at : at + 4] = moved.to_bytes(4, "big")
    data[:before] = size.to_bytes(4, "big") + plain[4:before] + b"isom" * ((size - before) // 4)
    assert indices(sm.decode_packets(sm.demux_video(bytes(data)), None)) == [0, 1, 2]
    assert np.array_equal(sm.load_video(bytes(data)), sm.load_video(plain))


def test_a_stream_that_comes_up_on_the_way_is_ignored() -> None:
    """FFmpeg makes a stream of captions of the first one, however late it is in an FLV."""
    frames = VideoTrack(frames=index_frames(60, 32, 32), codec="flv", frame_rate=25)
    tone = AudioTrack(
        samples=make_tone(66150, 22050, (440.0,)), sample_rate=22050, codec="libmp3lame"
    )
    data = make_media([frames, tone], format="flv")
    text = b"\x02\0\x0aonTextData\x03\0\x04text\x02\0\x01x\0\0\x09"
    size = len(text).to_bytes(3, "big")
    caption = b"\x12" + size + bytes(7) + text + (11 + len(text)).to_bytes(4, "big")
    assert sm.load_video(data + caption).shape[0] == 60


def test_jpegs_behind_other_data_need_the_name_of_their_format() -> None:
    """As the message says: FFmpeg finds JPEGs anywhere, also in archives."""
    frames = index_planes(5, 32, 32)
    data = bytes(64) + make_video(frames, codec="mjpeg", format="mjpeg", pix_fmt="yuvj420p")
    with pytest.raises(sm.DemuxError, match=r"begins with other data.*demux_config\(format="):
        sm.demux_video(data)
    assert len(sm.demux_video(data, demux_config=sm.demux_config(format="mjpeg"))) == 5
