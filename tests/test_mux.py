"""Muxer: frames and packets can be read back from the file, and no incomplete file is left behind."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import os
import pickle
import signal
import stat
import tempfile
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest import mock

import av
import numpy as np
import pytest

import spdl_media as sm
from spdl_media.testing import (
    AudioTrack,
    VideoTrack,
    frame_index,
    index_frames,
    index_planes,
    index_samples,
    make_media,
    make_tone,
    make_video,
)

FRAMES = index_frames(30, 64, 48)
CONFIG: dict[str, Any] = {"width": 64, "height": 48, "frame_rate": 10}


def psnr(one: Any, other: Any) -> float:
    error = np.mean((np.asarray(one, float) - np.asarray(other, float)) ** 2)
    return float("inf") if error == 0 else 10 * np.log10(255**2 / error)


def indices(data: Any) -> list[int]:
    return [frame_index(one) for one in sm.load_video(data).array]


def test_frames_and_samples_written_in_turns_come_back_equal(tmp_path: Path) -> None:
    samples = index_samples(30 * 1600, 2).T
    path = tmp_path / "out.mkv"
    with sm.Muxer(path) as muxer:
        video = muxer.add_encode_stream(
            sm.video_encode_config(**CONFIG, encoder="ffv1", pix_fmt="bgr0")
        )
        audio = muxer.add_encode_stream(
            sm.audio_encode_config(sample_rate=16000, num_channels=2, encoder="flac")
        )
        assert (video, audio) == (0, 1)
        for number in range(0, 30, 5):
            muxer.write(video, sm.frames_from_array(FRAMES[number : number + 5]))
            part = samples[:, number * 1600 : (number + 5) * 1600]
            muxer.write(audio, sm.frames_from_array(part, sample_rate=16000))
        assert not path.exists()
    assert [file.name for file in tmp_path.iterdir()] == ["out.mkv"]
    packets = sm.demux_video(path)
    assert packets.frame_rate == 10
    frames = sm.decode_packets(packets)
    assert frames.timestamps == pytest.approx([k / 10 for k in range(30)])
    assert np.array_equal(sm.convert_frames(frames).array, FRAMES)
    decoded = sm.decode_packets(sm.demux_audio(path), filter_desc=None)
    assert np.array_equal(sm.convert_frames(decoded).array, samples.T)


def test_frames_keep_their_own_times_in_the_units_of_time_base(tmp_path: Path) -> None:
    source = make_video(index_planes(5, 64, 48), pts=[0, 3, 4, 11, 12], time_base=Fraction(1, 50))
    frames = sm.decode_packets(sm.demux_video(source), filter_desc=None)
    path = tmp_path / "out.mp4"
    with sm.Muxer(path) as muxer:
        config = sm.video_encode_config(
            width=64, height=48, frame_rate=None, time_base=Fraction(1, 50)
        )
        muxer.write(muxer.add_encode_stream(config), frames)
    times = sm.decode_packets(sm.demux_video(path)).timestamps
    assert times == pytest.approx([0, 0.06, 0.08, 0.22, 0.24])


@pytest.mark.parametrize("format", ["mp4", "mov", "matroska"])
def test_colours_and_orientation_are_written(format: str) -> None:
    for orientation in (1, 3, 6, 8) if format == "matroska" else range(1, 9):
        file = io.BytesIO()
        with sm.Muxer(file, format=format) as muxer:
            config = sm.video_encode_config(
                **CONFIG,
                orientation=orientation,
                # MOV cannot store the range, but H.264 itself can.
                encoder="libx264" if format == "mov" else "mpeg4",
                colorspace="bt709",
                color_range="pc",
                color_primaries="bt2020",
                color_trc="smpte2084",
            )
            muxer.write(muxer.add_encode_stream(config), sm.frames_from_array(FRAMES[:2]))
        (stream,) = sm.probe(file.getvalue()).streams
        assert isinstance(stream, sm.VideoStreamInfo)
        assert stream.orientation == orientation
        colors = stream.colorspace, stream.color_range, stream.color_primaries, stream.color_trc
        assert colors == ("bt709", "pc", "bt2020", "smpte2084")


def test_frames_are_brought_to_the_colours_of_the_stream() -> None:
    gray = np.repeat(np.arange(40, 220, 3, np.uint8)[:, None, None], 64, 1)[:48]
    rgb = np.concatenate([gray, gray // 2 + 40, 255 - gray], -1)[None]
    for colorspace, color_range in (("bt709", "tv"), ("smpte170m", "pc"), ("bt2020nc", "tv")):
        file = io.BytesIO()
        with sm.Muxer(file, format="mp4") as muxer:
            config = sm.video_encode_config(
                **CONFIG,
                pix_fmt="yuv444p",
                encoder_options={"qp": 0},
                colorspace=colorspace,
                color_range=color_range,
            )
            muxer.write(muxer.add_encode_stream(config), sm.frames_from_array(rgb))
        assert np.abs(sm.load_video(file.getvalue()).array.astype(int) - rgb).max() <= 3


@pytest.mark.parametrize("format", ["mp4", "matroska", "mpegts", "mov"])
def test_packets_are_written_as_they_are(format: str) -> None:
    source = make_media(
        [
            VideoTrack(frames=index_planes(20, 64, 48), codec="libx264", max_b_frames=2),
            AudioTrack(samples=make_tone(32000, 16000), sample_rate=16000, codec="mp2"),
        ],
        format="mpegts",
    )
    file = io.BytesIO()
    with sm.Demuxer(source) as demuxer, sm.Muxer(file, format=format) as muxer:
        streams = {
            demuxer.video_stream_index: muxer.add_remux_stream(demuxer.video_codec),
            demuxer.audio_stream_index: muxer.add_remux_stream(demuxer.audio_codec),
        }
        for chunk in demuxer.streaming_demux([0, 1], num_packets=4):
            before = [packet.nbytes for packet in chunk.values()]
            for index, packets in chunk.items():
                muxer.write(streams[index], packets)
            # What was written is unchanged.
            assert [packet.nbytes for packet in chunk.values()] == before
    copied = file.getvalue()
    assert indices(copied) == list(range(20))
    assert np.array_equal(sm.load_video(copied).array, sm.load_video(source).array)
    # In MP4, FFmpeg treats MP2 as MP3, and decodes it to floats.
    assert np.allclose(sm.load_audio(copied).array, sm.load_audio(source).array, atol=1e-3)


def test_orientation_and_clock_go_with_packets() -> None:
    source = make_video(index_planes(10, 64, 48), format="mp4", orientation=6)
    packets = sm.demux_video(source)
    times = packets.get_timestamps()
    file = io.BytesIO()
    with sm.Muxer(file, format="mp4") as muxer:
        muxer.write(muxer.add_remux_stream(packets), packets)
    assert sm.demux_video(file.getvalue()).orientation == 6
    assert packets.get_timestamps() == times  # the packets are unchanged
    assert np.array_equal(sm.load_video(file.getvalue()).array, sm.load_video(source).array)


def write(dst: Any, count: int = 30, **options: Any) -> None:
    with sm.Muxer(dst, **options) as muxer:
        config = sm.video_encode_config(**CONFIG, encoder="ffv1")
        muxer.write(muxer.add_encode_stream(config), sm.frames_from_array(FRAMES[:count]))


@pytest.mark.parametrize("format", ["matroska", "mp4", "avi"])
def test_a_full_disk_leaves_what_was_there(format: str, tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    path = tmp_path / "out.bin"
    write(path, format=format)
    size = path.stat().st_size
    path.write_bytes(b"before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for allowed in (0, 1, size // 2, size - 4000, size - 1):
        resource.setrlimit(resource.RLIMIT_FSIZE, (allowed, limits[1]))
        try:
            with pytest.raises(sm.WriteError, match=r"out\.bin: cannot be written") as error:
                write(path, format=format)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert error.value.errno == errno.EFBIG
        assert path.read_bytes() == b"before"
        assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_exception_in_the_block_leaves_nothing(
    kind: type[BaseException], tmp_path: Path
) -> None:
    def work() -> None:
        with sm.Muxer(tmp_path / "out.mp4") as muxer:
            index = muxer.add_encode_stream(sm.video_encode_config(**CONFIG))
            muxer.write(index, sm.frames_from_array(FRAMES))
            assert len(list(tmp_path.iterdir())) == 1
            raise kind("stop")

    with pytest.raises(kind, match="stop"):
        work()
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    def frames() -> Iterator[sm.VideoFrames]:
        for _ in range(3):
            yield sm.frames_from_array(FRAMES)
        signal.raise_signal(signal.SIGINT)
        yield sm.frames_from_array(FRAMES)

    path = tmp_path / "out.mp4"
    path.write_bytes(b"before")
    with pytest.raises(KeyboardInterrupt):
        sm.save_video(path, frames(), 30)
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (b"before", [path])


def test_configs_go_to_other_processes() -> None:
    config = sm.video_encode_config(**CONFIG, encoder_options={"crf": 20})
    assert pickle.loads(pickle.dumps(config)) == config
    assert config.frame_rate == Fraction(10)


def test_a_muxer_that_is_dropped_leaves_nothing(tmp_path: Path) -> None:
    muxer = sm.Muxer(tmp_path / "out.mp4")
    index = muxer.add_encode_stream(sm.video_encode_config(**CONFIG))
    muxer.write(index, sm.frames_from_array(FRAMES))
    del muxer
    assert list(tmp_path.iterdir()) == []


class Raw(io.BytesIO):
    """A file object whose ``write`` writes only a part of the data."""

    name = "raw"

    def write(self, data: Any) -> int:
        return super().write(bytes(data)[:1000])


class Failing(Raw):
    """A file object whose ``write`` fails."""

    def __init__(self, error: BaseException, after: int) -> None:
        super().__init__()
        self.error, self.left = error, after

    def write(self, data: Any) -> int:
        self.left -= 1
        if self.left < 0:
            raise self.error
        return super().write(data)


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_failing_file_object(after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for options, error in (({"format": "no"}, ValueError), ({"format_options": 1}, TypeError)):
        with pytest.raises(error):
            sm.Muxer(io.BytesIO(), **options)
    with pytest.raises(sm.WriteError, match="cannot be written: no space") as caught:
        write(Failing(OSError(errno.ENOSPC, "no space"), after), format="matroska")
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(sm.WriteError, match=r"cannot be written: RuntimeError\('closed'\)"):
        write(Failing(RuntimeError("closed"), after), format="matroska")
    file = io.BytesIO()
    write(file, format="matroska")
    with pytest.raises(KeyboardInterrupt):
        write(Failing(KeyboardInterrupt(), after), format="matroska")
    raw = Raw()
    write(raw, format="matroska")
    assert indices(raw.getvalue()) == indices(file.getvalue()) == list(range(30))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("base", "count"), [(object, 0), (object, -1), (io.RawIOBase, None)])
def test_a_file_object_that_writes_nothing(base: type, count: int | None) -> None:
    """It was asked for ever, or its data was lost: a raw file that is not ready returns None."""
    file = type("File", (base,), {"write": lambda *_: count})()
    with pytest.raises(
        sm.WriteError, match=rf"<File>: cannot be written: write\(\) returned {count}"
    ):
        sm.save_image(file, FRAMES[0], format="png")


def test_a_file_object_whose_write_returns_nothing_has_written_all() -> None:
    """Many wrappers do that. Only of a raw file, None means that it was not ready."""
    parts: list[bytes] = []
    file = type("File", (), {"write": lambda _, data: parts.append(bytes(data))})()
    write(file, format="matroska")
    assert indices(b"".join(parts)) == list(range(30))


@pytest.mark.parametrize("mode", [0o600, 0o664])
def test_a_file_that_is_overwritten_keeps_its_permissions(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "out.png"
    path.touch()
    path.chmod(mode)
    sm.save_image(path, FRAMES[0])
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_names_of_file_objects_may_be_long() -> None:
    for name in ("out." + "x" * 300, "https://host/out.mp4?" + "x" * 300, "out.\0"):
        file = Raw()
        file.name = name
        write(file, format="matroska")
        assert indices(file.getvalue()) == list(range(30))


def test_without_room_for_temporary_files_a_file_object_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(sm.WriteError, match="<BytesIO>: cannot be written: No such file") as caught:
        sm.Muxer(io.BytesIO(), format="matroska")
    assert caught.value.errno == errno.ENOENT


@pytest.mark.parametrize("format", ["matroska", "mpegts"])
def test_streams_lie_side_by_side_in_whichever_order_they_are_written(format: str) -> None:
    """FFmpeg itself writes packets at once that are ten seconds ahead of another stream."""
    file = io.BytesIO()
    with sm.Muxer(file, format=format) as muxer:
        audio = muxer.add_encode_stream(
            sm.audio_encode_config(sample_rate=16000, num_channels=1, encoder="mp2")
        )
        video = muxer.add_encode_stream(sm.video_encode_config(**{**CONFIG, "frame_rate": 1}))
        tone = make_tone(30 * 16000, 16000).T / np.float32(2**15)
        muxer.write(audio, sm.frames_from_array(tone.astype(np.float32), sample_rate=16000))
        muxer.write(video, sm.frames_from_array(FRAMES))
    with av.open(io.BytesIO(file.getvalue())) as container:
        times = [
            (packet.stream.index, float(packet.dts * packet.time_base))
            for packet in container.demux()
            if packet.dts is not None
        ]
    heard = [at for index, at in times if index == audio]
    for number, (index, at) in enumerate(times):
        if index == video:
            before = sum(one == audio for one, _ in times[:number])
            assert abs(heard[min(before, len(heard) - 1)] - at) < 3


def test_a_frame_of_another_size_is_refused_and_the_file_is_good_still() -> None:
    file = io.BytesIO()
    with sm.Muxer(file, format="matroska") as muxer:
        index = muxer.add_encode_stream(sm.video_encode_config(**CONFIG, encoder="ffv1"))
        muxer.write(index, sm.frames_from_array(FRAMES[:3]))
        with pytest.raises(sm.EncodeError, match="frame 3 is 48x64, but the stream is 64x48"):
            muxer.write(index, sm.frames_from_array(np.zeros((64, 48, 3), np.uint8)))
        muxer.write(index, sm.frames_from_array(FRAMES[3:5]))
        with pytest.raises(
            TypeError, match=r"stream 0 .*, not ndarray; frames_from_array makes fra"
        ):
            muxer.write(index, FRAMES)
        with pytest.raises(TypeError, match=r"stream 0 takes .*, not VideoPackets$"):
            muxer.write(index, sm.demux_video(make_video(index_planes(2, 64, 48))))
        with pytest.raises(ValueError, match="no stream 1"):
            muxer.write(1, sm.frames_from_array(FRAMES))
        with pytest.raises(RuntimeError, match="before anything is written"):
            muxer.add_encode_stream(sm.video_encode_config(**CONFIG))
        muxer.flush()
        with pytest.raises(RuntimeError, match="flushed or closed"):
            muxer.write(index, sm.frames_from_array(FRAMES))
    assert indices(file.getvalue()) == [0, 1, 2, 3, 4]


def refused(config: Any, frames: Any = None, format: str = "mp4") -> None:
    with sm.Muxer(io.BytesIO(), format=format) as muxer:
        index = muxer.add_encode_stream(config)
        if frames is not None:
            muxer.write(index, frames)


def test_what_cannot_be_encoded_is_reported(tmp_path: Path) -> None:
    make = sm.video_encode_config
    with pytest.raises(ValueError, match=r"no format named 'mkv'\. Did you mean 'matroska'\?"):
        refused(make(**CONFIG), format="mkv")
    with pytest.raises(ValueError, match=r"'image2' is not written.*; save_image writes images"):
        refused(make(**CONFIG), format="image2")
    with pytest.raises(ValueError, match=r"no encoder 'libx26'\. Did you mean 'libx26"):
        refused(make(**CONFIG, encoder="libx26"))
    with pytest.raises(ValueError, match="'aac' encodes audio, not video"):
        refused(make(**CONFIG, encoder="aac"))
    with pytest.raises(ValueError, match="encoder 'libx264' has no option 'presett'"):
        refused(make(**CONFIG, encoder="libx264", encoder_options={"presett": 1}))
    with pytest.raises(ValueError, match=r"pix_fmt of encoder 'ffv1' must be .* not 'rgb24'"):
        refused(make(**CONFIG, encoder="ffv1", pix_fmt="rgb24"), format="matroska")
    with pytest.raises(sm.EncodeError, match="'webm' does not take ffv1"):
        refused(make(**CONFIG, encoder="ffv1"), format="webm")
    with pytest.raises(sm.EncodeError, match="'wav' holds no video"):
        refused(make(**CONFIG), format="wav")
    for encoder in ("libx264", "libx265"):
        with pytest.raises(sm.EncodeError, match=f"{encoder} takes no odd sides in yuv420p"):
            refused(make(width=63, height=48, encoder=encoder))
    with pytest.raises(sm.EncodeError, match="'avi' cannot store the orientation 6"):
        refused(make(**CONFIG, orientation=6), format="avi")
    with pytest.raises(sm.EncodeError, match="nothing was written"):
        refused(make(**CONFIG))
    frames = sm.frames_from_array(FRAMES[:2], frame_rate=10)
    with pytest.raises(sm.EncodeError, match=r"frame 1 is not after .* but 0\.1 s earlier"):
        refused(make(**CONFIG, time_base=Fraction(1, 10)), frames[[1, 0]])
    for format in ("avi", "mov"):
        with pytest.raises(sm.EncodeError, match="raw video needs format='nut'"):
            refused(make(**CONFIG, encoder="rawvideo", pix_fmt="gbrp"), frames, format)
    with pytest.raises(sm.EncodeError, match="cannot state that raw video is p010le"):
        refused(make(**CONFIG, encoder="rawvideo", pix_fmt="p010le"), format="nut")
    sound = sm.frames_from_array(np.zeros((1, 99), np.float32), sample_rate=8000)
    with pytest.raises(sm.EncodeError, match="8000 Hz and 1 channel, but the stream has 16000"):
        refused(sm.audio_encode_config(sample_rate=16000, num_channels=1), sound)
    with pytest.raises(ValueError, match="give format='mp4'"):
        sm.Muxer(tmp_path / "out")
    with pytest.raises(ValueError, match="no format named 'mp5'"):
        sm.Muxer(tmp_path / "out.mp4", format="mp5")
    with pytest.raises(ValueError, match="is a URL"):
        sm.Muxer("s3://bucket/out.mp4")
    for name in ("a\0.wav", "\ud800.wav", "a" * 300 + ".wav"):
        with pytest.raises(sm.WriteError, match="cannot be written"):
            sm.save_audio(name, np.zeros((1, 8), np.int16), 8000)
    with pytest.raises(sm.WriteError, match="folder or a device"):
        sm.Muxer(tmp_path, format="mp4")
    with pytest.raises(sm.WriteError, match="No such file or directory"):
        write(tmp_path / "missing" / "out.mkv")
    with pytest.raises(TypeError, match="file object with write"):
        sm.Muxer(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="frame_rate=, or time_base="):
        make(width=64, height=48, frame_rate=None)


def test_an_encoder_that_cannot_be_opened_is_no_failure_of_the_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NVENC without a driver raises this."""
    opened = mock.Mock(side_effect=av.error.PermissionError(errno.EPERM, "not permitted"))
    monkeypatch.setattr("spdl_media.mux.open_encoder", opened)
    with pytest.raises(sm.EncodeError, match="not permitted"):
        refused(sm.video_encode_config(**CONFIG))


def test_a_smaller_qscale_is_a_better_quality() -> None:
    rng = np.random.default_rng(1)
    noise = sm.frames_from_array(rng.integers(0, 256, (4, 48, 64, 3), np.uint8))
    sound = sm.frames_from_array(rng.uniform(-0.5, 0.5, (1, 8000)), sample_rate=16000)
    sizes: dict[str, list[int]] = {"mpeg4": [], "libmp3lame": []}
    for qscale in (1, 9):
        for encoder, found in sizes.items():
            given: Any = {"encoder": encoder, "qscale": qscale}
            config = sm.audio_encode_config(sample_rate=16000, num_channels=1, **given)
            if encoder == "mpeg4":
                config = sm.video_encode_config(**CONFIG, **given)
            file = io.BytesIO()
            with sm.Muxer(file, format="matroska") as muxer:
                muxer.write(muxer.add_encode_stream(config), noise if encoder == "mpeg4" else sound)
            found.append(len(file.getvalue()))
    assert all(better > 1.4 * worse for better, worse in sizes.values()), sizes


def test_numbers_of_a_config_are_those_of_ffmpeg() -> None:
    for name in ("width", "height", "gop_size", "max_b_frames", "qscale"):
        with pytest.raises(ValueError, match=rf"{name} must be below 2\*\*31"):
            sm.video_encode_config(**{**CONFIG, name: 2**31})
    with pytest.raises(ValueError, match=r"bit_rate must be below 2\*\*62"):
        sm.video_encode_config(**CONFIG, bit_rate=2**62)
    with pytest.raises(TypeError, match="num_channels must be an int, not None"):
        sm.audio_encode_config(sample_rate=8000, num_channels=None)  # type: ignore[arg-type]
    sound = sm.frames_from_array(np.zeros((1, 99), np.float32), sample_rate=8000)
    with sm.Muxer(io.BytesIO(), format="wav") as muxer:
        config = sm.audio_encode_config(sample_rate=np.int64(8000), num_channels=np.int64(1))  # type: ignore[arg-type]
        muxer.write(muxer.add_encode_stream(config), sound)


@pytest.mark.parametrize(
    ("format", "num_packets"), [("mp4", 7), ("mp4", 1), ("matroska", 7), ("mpegts", 7)]
)
def test_b_frames_of_matroska_are_copied(format: str, num_packets: int) -> None:
    """Matroska states no decoding times, and FFmpeg computes none for the first packets."""
    frames = index_planes(20, 64, 48)
    source = make_video(frames, codec="libx264", format="matroska", frame_rate=10, max_b_frames=2)
    file = io.BytesIO()
    with sm.Demuxer(source) as demuxer, sm.Muxer(file, format=format) as muxer:
        index = muxer.add_remux_stream(demuxer.video_codec)
        stream = demuxer.video_stream_index
        for packets in demuxer.streaming_demux(stream, num_packets=num_packets):
            muxer.write(index, packets)
    assert np.array_equal(sm.load_video(file.getvalue()).array, sm.load_video(source).array)
    times = sm.VideoFile(file.getvalue()).timestamps
    assert np.diff(times) == pytest.approx(0.1)
    assert format == "mpegts" or times[0] == 0


def test_a_single_frame_of_matroska_is_copied() -> None:
    packets = sm.demux_video(
        make_video(index_planes(1, 64, 48), codec="libx264", format="matroska")
    )
    file = io.BytesIO()
    with sm.Muxer(file, format="mp4") as muxer:
        muxer.write(muxer.add_remux_stream(packets), packets)
    assert indices(file.getvalue()) == [0]


def test_packets_without_times_are_refused() -> None:
    raw = make_video(index_planes(3, 64, 48), codec="libx264", format="h264")
    packets = sm.demux_video(raw)
    with (
        pytest.raises(sm.EncodeError, match="packets have no timestamps"),
        sm.Muxer(io.BytesIO(), format="mp4") as muxer,
    ):
        muxer.write(muxer.add_remux_stream(packets), packets)


def test_formats_take_no_codec_that_readers_do_not_find(tmp_path: Path) -> None:
    frames = np.zeros((60, 48, 64, 3), np.uint8)
    source, target = tmp_path / "vp9.webm", tmp_path / "out.ts"
    sm.save_video(source, frames, encoder="libvpx-vp9")
    for format in ("flac", "aiff"):
        with sm.Muxer(io.BytesIO(), format=format) as muxer:
            with pytest.raises(sm.EncodeError, match=f"'{format}' does not take vp9"):
                muxer.add_remux_stream(sm.demux_video(source))
            muxer.add_encode_stream(sm.audio_encode_config(sample_rate=48000, num_channels=2))
            muxer.write(0, sm.frames_from_array(np.zeros((2, 4800), np.float32), sample_rate=48000))
    with sm.Muxer(io.BytesIO(), format="mpegts") as muxer:
        for encoder in ("ffv1", "jpeg2000"):
            with pytest.raises(sm.EncodeError, match=f"'mpegts' does not take {encoder}"):
                muxer.add_encode_stream(
                    sm.video_encode_config(width=64, height=48, encoder=encoder)
                )
        with pytest.raises(sm.EncodeError, match="'mpegts' does not take vp9"):
            muxer.add_remux_stream(sm.demux_video(source))
        index = muxer.add_encode_stream(sm.video_encode_config(width=64, height=48))
        muxer.write(index, sm.frames_from_array(frames))
    assert not sm.cut(source, target, 0, None)
    assert len(sm.demux_video(target)) == 60


def test_ogg_takes_frames_and_packets_of_video() -> None:
    """FFmpeg's default for Ogg is Theora, of which it has no encoder."""
    packets, file = sm.demux_video(make_video(FRAMES, codec="libvpx", format="webm")), io.BytesIO()
    with sm.Muxer(file, format="ogg") as muxer:
        muxer.write(muxer.add_remux_stream(packets), packets)
    assert np.array_equal(
        sm.load_video(file.getvalue()).array,
        sm.convert_frames(sm.decode_packets(packets)).array,
    )
    sm.save_video(file := io.BytesIO(), sm.decode_packets(packets), format="ogg")
    assert len(sm.load_video(file.getvalue()).array) == len(packets)


def test_avi_takes_no_packets_that_are_read_back_as_raw_video() -> None:
    packets = sm.demux_video(make_video(FRAMES[:3], codec="libx265", format="mov"))
    animation = dataclasses.replace(packets.codec, name="pillow", decoder="pillow")
    with sm.Muxer(io.BytesIO(), format="avi") as muxer:
        with pytest.raises(sm.EncodeError, match="'avi' does not take hevc"):
            muxer.add_remux_stream(packets)
        with pytest.raises(sm.EncodeError, match="'avi' does not take pillow"):
            muxer.add_remux_stream(animation)
        index = muxer.add_encode_stream(sm.video_encode_config(**CONFIG))
        muxer.write(index, sm.frames_from_array(FRAMES[:2]))


def _real_time_threads() -> list[str]:
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # the thread has ended
            if os.sched_getscheduler(int(task.name)) != os.SCHED_OTHER:
                found.append(task.name)
    return found


@pytest.mark.skipif(
    not hasattr(os, "sched_getscheduler") or os.geteuid() != 0,
    reason="SVT-AV1 changes the threads of root on Linux",
)
@pytest.mark.parametrize(
    "make",
    [
        lambda: sm.encode_image(FRAMES[0], format="avif"),
        lambda: make_media([VideoTrack(frames=FRAMES, codec="libsvtav1")], format="mp4"),
    ],
    ids=["encode_image", "make_media"],
)
def test_the_av1_encoder_makes_no_thread_of_the_process_real_time(make: Any) -> None:
    # SVT-AV1 does so in processes of root: a computing thread would block its core for all others.
    assert not _real_time_threads()
    make()
    assert not _real_time_threads()


@pytest.mark.skipif(
    not hasattr(os, "sched_getscheduler") or os.geteuid() != 0,
    reason="SVT-AV1 changes the threads of root on Linux",
)
def test_the_av1_encoders_own_threads_give_way_to_others() -> None:
    with sm.Muxer(io.BytesIO(), format="mp4") as muxer:
        video = muxer.add_encode_stream(sm.video_encode_config(**CONFIG, encoder="libsvtav1"))
        assert not _real_time_threads()
        muxer.write(video, sm.frames_from_array(FRAMES))
        assert not _real_time_threads()
