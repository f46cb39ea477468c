"""probe: streams of a source, without decoding it."""

from __future__ import annotations

import dataclasses
import importlib
import io
import math
import pickle
import struct
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from effort import each
from oriented import oriented_clip

import spdl_media as sm

# Private: that a frame is decoded by probe is visible otherwise only in the time. Some streams have no
# matrix.
from spdl_media.testing import (
    AudioTrack,
    VideoTrack,
    index_frames,
    index_planes,
    index_samples,
    make_audio,
    make_image,
    make_media,
    make_video,
)

# The package has a function of the same name.
probe_module = importlib.import_module("spdl_media._probe")


class Pipe(io.RawIOBase):
    """A source that can be read only once and cannot seek."""

    def __init__(self, data: bytes) -> None:
        self._file = io.BytesIO(data)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._file.readinto(buffer)


@pytest.fixture(scope="module")
def movie() -> bytes:
    video = VideoTrack(frames=index_planes(30, 64, 48), codec="libx265", frame_rate=25)
    sound = AudioTrack(samples=index_samples(57600, 2), codec="flac")
    return make_media([video, sound], format="mp4", faststart=True)


def test_a_movie(movie: bytes) -> None:
    info = sm.probe(movie)
    assert "mp4" in info.format
    assert info.duration == pytest.approx(1.2, abs=0.001)
    assert (info.best_video, info.best_audio, info.is_still) == (0, 1, False)
    assert info.streams == (info.video, info.audio)
    video, audio = info.video, info.audio
    assert video is not None
    assert audio is not None
    assert (video.codec, video.width, video.height) == ("hevc", 64, 48)
    assert (video.pix_fmt, video.frame_rate, video.num_frames) == ("yuv420p", 25, 30)
    assert isinstance(video.frame_rate, Fraction)
    assert video.duration == pytest.approx(1.2)
    assert (video.orientation, video.rotation, video.mirrored) == (1, 0, False)
    assert (audio.codec, audio.sample_rate, audio.num_channels) == ("flac", 48000, 2)
    assert (audio.channel_layout, audio.sample_fmt) == ("stereo", "s16")
    assert audio.duration == pytest.approx(1.2)


def test_values_are_frozen_hashable_and_picklable(movie: bytes) -> None:
    info = sm.probe(movie)
    assert pickle.loads(pickle.dumps(info)) == info == sm.probe(io.BytesIO(movie))
    assert hash(info) == hash(sm.probe(movie))
    with pytest.raises(dataclasses.FrozenInstanceError):
        info.duration = 3.0  # type: ignore[misc]


@each("format", ["mov", "matroska", "mpegts", "avi", "nut", "flv"])
def test_containers(format: str) -> None:
    data = make_video(index_planes(20, 64, 48), codec="libx264", format=format)
    info = sm.probe(data)
    video = info.video
    assert video is not None
    assert (video.codec, video.width, video.height, video.pix_fmt) == ("h264", 64, 48, "yuv420p")
    assert video.frame_rate == 10
    assert (info.best_audio, info.audio) == (None, None)
    assert info.duration is not None
    assert math.isclose(info.duration, 2, abs_tol=0.25)


def test_the_duration_of_opus_in_ogg_is_that_of_its_samples() -> None:
    """FFmpeg counts the samples that decoders skip at the start, so sample_windows would exceed the end."""
    file = io.BytesIO()
    sm.save_audio(file, np.zeros((1, 48000), np.float32), 48000, format="ogg", encoder="libopus")
    audio = sm.probe(file.getvalue()).audio
    assert audio is not None
    assert audio.duration == 1


@pytest.mark.parametrize("format", ["matroska", "webm"])
def test_streams_of_matroska_say_how_long_they_are(format: str) -> None:
    tracks = [
        VideoTrack(frames=index_planes(20, 64, 48), codec="libvpx-vp9"),
        AudioTrack(samples=index_samples(48000, 1), sample_rate=48000, codec="libopus"),
    ]
    data = make_media(tracks, format=format)
    info = sm.probe(data)
    assert info.video is not None
    assert info.audio is not None
    assert (info.video.duration, info.audio.duration) == (2, pytest.approx(1, abs=0.002))
    # Without tags of the streams, it is that of the file.
    bare = sm.probe(data.replace(b"DURATION", b"DURATIOM"))
    assert bare.video is not None
    assert bare.video.duration == info.duration
    alone = make_media(tracks[1:], format=format).replace(b"DURATION", b"DURATIOM")
    assert sm.probe(alone).audio.duration == pytest.approx(1, abs=0.002)


@each(
    "codec, name, pix_fmt",
    [
        ("png", "png", "rgb24"),
        ("bmp", "bmp", "bgr24"),
        ("tiff", "tiff", "rgb24"),
        ("ppm", "ppm", "rgb24"),
        ("qoi", "qoi", "rgb24"),
        ("mjpeg", "mjpeg", None),
        ("libwebp", "webp", None),
        ("jpeg2000", "jpeg2000", "rgb24"),
        ("libsvtav1", "av1", None),
    ],
)
def test_stills(codec: str, name: str, pix_fmt: str | None) -> None:
    data = make_image(index_frames(1, 64, 48)[0], codec=codec)
    info = sm.probe(data)
    video = info.video
    assert video is not None
    assert (info.is_still, info.format, info.duration) == (True, name, None)
    assert (info.best_video, info.best_audio, len(info.streams)) == (0, None, 1)
    assert (video.codec, video.width, video.height) == (name, 64, 48)
    assert (video.num_frames, video.frame_rate, video.duration) == (1, None, None)
    if pix_fmt is not None:
        assert video.pix_fmt == pix_fmt


def test_moving_images_are_no_stills() -> None:
    gif = make_video(index_planes(3, 64, 48, "gray"), codec="gif", format="gif", pix_fmt="gray")
    avis = make_video(index_planes(3, 64, 64), codec="libsvtav1", format="avif")
    mpeg4 = make_video(index_planes(3, 64, 48), codec="mpeg4", format="m4v")
    # As many files of MPEG-4, it may begin like an icon, but states no number of images.
    for data in (gif, avis, mpeg4[mpeg4.index(b"\0\0\1\0") :]):
        info = sm.probe(data)
        assert not info.is_still
        assert info.video is not None
        assert info.video.width == 64
    assert sm.probe(avis).video.num_frames == 3  # type: ignore[union-attr]


def test_the_size_of_an_animated_webp() -> None:
    options: Any = {"codec": "libwebp_anim", "format": "webp", "pix_fmt": "yuv420p"}
    info = sm.probe(make_video(index_planes(3, 64, 276), **options))
    assert (info.video.width, info.video.height) == (64, 276)  # type: ignore[union-attr]
    assert not info.is_still


@pytest.mark.parametrize(
    ("codec", "format"),
    [
        *(("pcm_s16le", "wav"), ("flac", "flac"), ("libmp3lame", "mp3"), ("libopus", "ogg")),
        ("mp2", "mp2"),  # which FFmpeg takes for MP3 at first
    ],
)
def test_audio(codec: str, format: str) -> None:
    data = make_audio(index_samples(96000, 2), codec=codec, format=format)
    info = sm.probe(data)
    assert info.audio.sample_fmt == sm.decode_packets(sm.demux_audio(data), None).sample_fmt
    assert info.video is None
    assert info.best_video is None
    assert info.audio is not None
    assert (info.audio.sample_rate, info.audio.num_channels) == (48000, 2)
    assert info.duration == pytest.approx(2, abs=0.1)


def test_other_streams_are_listed(media_dir: Path) -> None:
    info = sm.probe(media_dir / "video" / "nasa_13013.mp4")
    kinds = [type(stream).__name__ for stream in info.streams]
    assert kinds.count("VideoStreamInfo") == 2
    assert kinds.count("AudioStreamInfo") == 2
    assert [stream.index for stream in info.streams] == list(range(len(info.streams)))
    assert info.video is not None
    assert (info.video.width, info.video.height, info.video.num_frames) == (480, 270, 390)


def test_a_stream_that_cannot_be_decoded_is_listed() -> None:
    # FFV1 has no code in MPEG-TS, and is read as a data stream.
    info = sm.probe(make_video(index_planes(5, 64, 48), codec="ffv1", format="mpegts"))
    assert info.streams == (sm.OtherStreamInfo(0, "data"),)
    assert info.video is None


def test_every_real_file_can_be_probed(media_dir: Path) -> None:
    for path in sorted((media_dir / "video").iterdir()):
        if path.name != "truncated.mp4":
            assert sm.probe(path).video is not None, path.name
    for path in sorted((media_dir / "audio").iterdir()):
        assert sm.probe(path).audio is not None, path.name


def test_colour_is_reported() -> None:
    options = {"colorspace": "bt709", "color_primaries": "bt709", "color_trc": "bt709"}
    track = VideoTrack(
        frames=index_planes(3, 64, 48), codec="libx264", options={**options, "color_range": "pc"}
    )
    for format in ("mp4", "matroska", "mpegts"):
        info = sm.probe(make_media([track], format=format)).video
        assert info is not None
        assert (info.colorspace, info.color_primaries, info.color_trc) == ("bt709",) * 3
        assert info.color_range == "pc"
    plain = sm.probe(make_video(index_planes(3, 64, 48), codec="mpeg4", format="mp4")).video
    assert plain is not None
    assert (plain.colorspace, plain.color_primaries, plain.color_trc) == (None, None, None)


@each("orientation", range(1, 9))
@each("codec, format", [("libx264", "mp4"), ("libvpx-vp9", "matroska")])
def test_size_is_that_of_the_upright_image(codec: str, format: str, orientation: int) -> None:
    info = sm.probe(oriented_clip(orientation, codec=codec, format=format)).video
    assert info is not None
    assert info.orientation == orientation
    assert (info.width, info.height) == ((48, 64) if orientation > 4 else (64, 48))
    assert info.mirrored == (orientation in (2, 4, 5, 7))


def test_a_source_that_cannot_seek(movie: bytes) -> None:
    assert sm.probe(Pipe(movie), name="x").streams == sm.probe(movie, name="x").streams
    gray = np.zeros((48, 64), np.uint8)
    for codec in ("png", "mjpeg", "tiff", "gif"):
        still = make_image(gray, codec=codec)
        assert sm.probe(Pipe(still)) == sm.probe(still)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of the stills that probe decodes."""
    calls: list[str] = []
    decode = probe_module.decode_packets

    def frame(packets: sm.ImagePackets, *options: Any) -> Any:
        calls.append("still")
        return decode(packets, *options)

    monkeypatch.setattr(probe_module, "decode_packets", frame)
    return calls


def test_movies_are_not_decoded(movie: bytes, decoded: list[str]) -> None:
    sm.probe(movie)
    sm.probe(oriented_clip(6))
    for format in ("matroska", "mpegts", "avi"):
        sm.probe(make_video(index_planes(20, 64, 48), codec="libx264", format=format))
    assert decoded == []


def test_a_rare_still_is_decoded(decoded: list[str]) -> None:
    sm.probe(make_image(index_frames(1, 64, 48)[0], codec="tiff"))
    assert decoded == ["still"]


def test_data_behind_the_first_frame_do_not_matter() -> None:
    data = bytearray(make_video(index_planes(30, 64, 48), codec="libx264", format="matroska"))
    info = sm.probe(bytes(data))
    noise = np.random.default_rng(1).integers(0, 256, len(data) * 3 // 5, np.uint8)
    data[-len(noise) :] = noise.tobytes()
    assert sm.probe(bytes(data)).streams == info.streams


@pytest.mark.parametrize(("channels", "sample_fmt"), [(0, None), (1, "s16p")])
def test_an_ape_file_of_no_channels(channels: int, sample_fmt: str | None) -> None:
    # Written by hand, because FFmpeg has no encoder.
    head = struct.pack("<4sHH7I16s", b"MAC ", 3990, 0, 52, 24, 4, 0, 64, 0, 0, bytes(16))
    head += struct.pack("<HHIIIHHI", 2000, 0, 73728, 100, 1, 16, channels, 44100)
    stream = sm.probe(head + struct.pack("<I", 80) + bytes(64)).streams[0]
    assert isinstance(stream, sm.AudioStreamInfo)
    assert (stream.num_channels, stream.sample_fmt) == (channels, sample_fmt)


def test_sources_that_are_not_media() -> None:
    with pytest.raises(sm.DemuxError, match="cannot open it as media"):
        sm.probe(b"this is text, and nothing else " * 50)
    with pytest.raises(sm.DemuxError, match="is empty"):
        sm.probe(b"")
    with pytest.raises(sm.SourceError, match="Check the path"):
        sm.probe("/no/such/file.mp4")
    with pytest.raises(sm.DecodeError, match=r"^photo: "):
        sm.probe(make_image(index_frames(1, 64, 48)[0])[:60], name="photo")
