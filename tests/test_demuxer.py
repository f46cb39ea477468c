"""A Demuxer: one opened source, many reads, one thread at a time."""

from __future__ import annotations

import gc
import io
import threading
from pathlib import Path
from typing import Any

import pytest

import spdl_media as sm
from spdl_media.testing import (
    AudioTrack,
    VideoTrack,
    frame_index,
    index_planes,
    index_samples,
    make_audio,
    make_image,
    make_media,
    make_video,
)


@pytest.fixture(scope="module")
def movie() -> bytes:
    video = VideoTrack(frames=index_planes(30, 64, 48), codec="libx265", gop_size=8)
    sound = AudioTrack(samples=index_samples(144000, 2), codec="pcm_s16le")
    return make_media([video, sound], format="mov")


def test_it_tells_what_it_holds(movie: bytes) -> None:
    with sm.Demuxer(movie) as demuxer:
        assert demuxer.video_stream_index is not None
        assert demuxer.audio_stream_index is not None
        assert (demuxer.video_stream_index, demuxer.audio_stream_index) == (0, 1)
        codec = demuxer.video_codec
        assert (codec.name, codec.width, codec.height, codec.frame_rate) == ("hevc", 64, 48, 10)
        sound = demuxer.audio_codec
        assert (sound.name, sound.sample_rate, sound.num_channels) == ("pcm_s16le", 48000, 2)


def test_the_windows_of_a_clip_begin_together(movie: bytes) -> None:
    """One pass over the file reads both."""
    with sm.Demuxer(movie) as demuxer:
        with pytest.raises(ValueError, match="timestamp and audio_timestamp begin at one time"):
            demuxer.demux_clip((0.5, 1), audio_timestamp=(0, 1))
        video, audio = demuxer.demux_clip((0.5, 1), audio_timestamp=(0.5, 0.7))
    assert (video.timestamp, audio.timestamp) == ((0.5, 1), (0.5, 0.7))


def test_it_tells_what_it_lacks(movie: bytes) -> None:
    with sm.Demuxer(make_audio(index_samples(4800))) as demuxer:
        assert demuxer.video_stream_index is None
        assert demuxer.video_stream_index is None
        with pytest.raises(sm.DemuxError, match="there is no video stream"):
            _ = demuxer.video_codec
        with pytest.raises(sm.DemuxError, match="there is no video stream"):
            demuxer.demux_video()
        with pytest.raises(sm.DemuxError, match="there is no video stream"):
            demuxer.demux_image()
    silent = make_video(index_planes(5, 64, 48))
    with sm.Demuxer(silent) as demuxer:
        assert demuxer.audio_stream_index is None
        with pytest.raises(sm.DemuxError, match="there is no audio stream"):
            demuxer.demux_audio()


def test_reads_of_all_kinds_do_not_disturb_each_other(movie: bytes) -> None:
    with sm.Demuxer(movie) as demuxer:
        for _ in range(2):
            assert len(sm.decode_packets(demuxer.demux_video((2.5, None)))) == 5
            assert len(sm.decode_packets(demuxer.demux_audio((0.25, 0.5)))) == 12000
            assert frame_index(sm.decode_packets(demuxer.demux_image(), None).planes[0]) == 0
            assert len(sm.decode_packets(demuxer.demux_video((None, 0.5)))) == 5


def test_sound_before_a_late_video_is_read_each_time() -> None:
    video = VideoTrack(frames=index_planes(5, 64, 48), codec="libx264", pts=range(10, 15))
    sound = AudioTrack(samples=index_samples(72000, 2), codec="pcm_s16le")
    with sm.Demuxer(make_media([video, sound], format="mov")) as demuxer:
        for _ in range(2):
            assert len(sm.decode_packets(demuxer.demux_audio())) == 72000
            assert len(sm.decode_packets(demuxer.demux_audio((1, None)))) == 24000


def test_packets_outlive_it(movie: bytes) -> None:
    with sm.Demuxer(movie) as demuxer:
        packets = demuxer.demux_video()
    del demuxer
    gc.collect()
    assert len(sm.decode_packets(packets)) == 30


def test_closed_is_closed(movie: bytes) -> None:
    demuxer = sm.Demuxer(movie, name="clip")
    assert repr(demuxer) == "<Demuxer: clip>"
    demuxer.close()
    demuxer.close()
    assert repr(demuxer) == "<Demuxer: clip, closed>"
    for use in (
        demuxer.demux_video,
        demuxer.demux_audio,
        demuxer.demux_image,
        lambda: demuxer.video_stream_index,
        lambda: demuxer.video_codec,
        lambda: demuxer.streaming_demux(duration=1),
        lambda: demuxer.streaming_demux(0, duration=1),
    ):
        with pytest.raises(ValueError, match="clip: this Demuxer is closed"):
            use()


def test_a_source_that_fails_to_open_is_released(tmp_path: Path) -> None:
    path = tmp_path / "junk.mp4"
    path.write_bytes(b"junk" * 500)
    file = io.BytesIO(b"junk" * 500)
    file.seek(7)
    for source in (path, file, b"junk" * 500, bytearray(b"junk" * 500)):
        with pytest.raises(sm.DemuxError):
            sm.Demuxer(source)
    assert file.tell() == 7


def test_a_bytearray_can_be_resized_afterwards(movie: bytes) -> None:
    data = bytearray(movie)
    with sm.Demuxer(data) as demuxer:
        packets = demuxer.demux_video((1, 2))
    data.extend(b"more")
    data[:] = bytes(len(data))
    assert len(sm.decode_packets(packets)) == 10


def test_an_image_is_a_video_of_one_frame() -> None:
    with sm.Demuxer(make_image(index_planes(1, 64, 48, "gray")[0][0], codec="png")) as demuxer:
        assert len(demuxer.demux_video()) == 1
        assert sm.decode_packets(demuxer.demux_image()).width == 64


def test_a_second_thread_gets_an_error_not_a_crash(movie: bytes) -> None:
    inside, leave = threading.Event(), threading.Event()

    class Slow(io.BytesIO):
        slow = False

        def _wait(self) -> None:
            if self.slow:
                inside.set()
                leave.wait(10)

        def read(self, size: int | None = -1, /) -> bytes:
            self._wait()
            return super().read(size)

        def readinto(self, buffer: Any, /) -> int:
            self._wait()
            return super().readinto(buffer)

    file = Slow(movie)
    demuxer = sm.Demuxer(file, demux_config=sm.demux_config(buffer_size=4096))
    file.slow = True
    results: list[sm.VideoPackets] = []
    thread = threading.Thread(target=lambda: results.append(demuxer.demux_video((1, 2))))
    thread.start()
    assert inside.wait(10)
    for use in (
        demuxer.demux_video,
        demuxer.demux_audio,
        demuxer.demux_image,
        demuxer.close,
        lambda: demuxer.audio_stream_index,
        lambda: demuxer.video_codec,
        lambda: demuxer.audio_codec,
        lambda: demuxer.streaming_demux(0, num_packets=1),
    ):
        with pytest.raises(RuntimeError, match="this Demuxer is in use by another thread"):
            use()
    leave.set()
    thread.join(10)
    assert len(sm.decode_packets(results[0])) == 10
    assert len(sm.decode_packets(demuxer.demux_video((0, 1)))) == 10
    demuxer.close()


def test_it_may_move_from_thread_to_thread(movie: bytes) -> None:
    with sm.Demuxer(movie) as demuxer:
        chunks = demuxer.streaming_demux(0, num_packets=10)
        sizes: list[int] = []
        for _ in range(3):
            thread = threading.Thread(target=lambda: sizes.append(len(next(chunks))))
            thread.start()
            thread.join()
    assert sizes == [10, 10, 10]


def test_a_failing_source_is_a_source_error(movie: bytes) -> None:
    class Failing(io.BytesIO):
        failing = False

        def read(self, size: int | None = -1, /) -> bytes:
            if self.failing:
                raise ConnectionResetError("the line is dead")
            return super().read(size)

        def readinto(self, buffer: Any, /) -> int:
            data = self.read(len(buffer))
            buffer[: len(data)] = data
            return len(data)

    file = Failing(movie)
    with sm.Demuxer(file, name="far") as demuxer:
        file.failing = True
        with pytest.raises(sm.SourceError, match=r"far: .*the line is dead") as raised:
            demuxer.demux_video((2, None))
        causes = []
        error: BaseException | None = raised.value
        while error is not None:
            causes.append(type(error))
            error = error.__cause__
        assert ConnectionResetError in causes


@pytest.mark.parametrize(
    "use",
    [lambda data: sm.load_audio(data, stream_index=0), lambda data: sm.Demuxer(data).codec(0)],
)
def test_an_audio_stream_without_any_frame_has_no_sample_rate(use: Any) -> None:
    sound = make_audio(index_samples(4800, 1), 48000, codec="aac", format="mpegts")
    with pytest.raises(sm.DemuxError, match="stream 0 is damaged: it has no sample rate"):
        use(sound.replace(b"\xff\xf1", bytes(2)))  # the syncword of each frame


def test_a_stream_of_unknown_codec_does_not_prevent_a_second_read() -> None:
    tracks = [
        VideoTrack(frames=index_planes(9, 64, 48), codec=c) for c in ("libx264", "libvpx-vp9")
    ]
    data = make_media(tracks, format="mp4").replace(b"vp09", b"none")
    with sm.Demuxer(data) as demuxer:
        assert [len(demuxer.demux_video()) for _ in range(2)] == [9, 9]
