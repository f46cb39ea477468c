"""Pickled packets decode to the same frames in another process."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from audio_oracle import clip, samples_of
from decoded import digest, digest_all

import spdl_media as sm
from spdl_media.packets import metadata_of
from spdl_media.testing import (
    VideoTrack,
    index_frames,
    index_planes,
    make_audio,
    make_image,
    make_media,
    make_tone,
    make_video,
)

VIDEO = {
    "ffv1": "matroska", "huffyuv": "avi", "libsvtav1": "matroska", "libvpx": "webm",
    "libvpx-vp9": "webm", "libx264": "mp4", "libx265": "mp4", "mjpeg": "avi", "mpeg1video": "mpeg",
    "mpeg2video": "mpegts", "mpeg4": "avi", "prores_ks": "mov",
    "rawvideo": "avi", "gif": "gif",
    "flv": "flv", "msmpeg4": "avi", "wmv2": "asf",
    "png": "mov", "qtrle": "mov", "h263p": "avi", "utvideo": "avi",
}  # fmt: skip
VIDEO_FORMATS = {
    "prores_ks": "yuv422p10le", "huffyuv": "yuv422p", "mjpeg": "yuvj420p", "gif": "gray",
    "png": "rgb24", "qtrle": "rgb24", "msmpeg4": "yuv420p",
}  # fmt: skip
AUDIO = {
    "aac": "mp4", "ac3": "ac3", "adpcm_ima_wav": "wav", "adpcm_ms": "wav", "adpcm_ima_qt": "mov",
    "adpcm_swf": "flv", "adpcm_yamaha": "wav", "alac": "mp4", "eac3": "mpegts", "flac": "flac",
    "libmp3lame": "mp3", "libopus": "ogg", "mp2": "mpegts", "pcm_alaw": "wav", "pcm_f32be": "mov",
    "pcm_f64le": "wav", "pcm_mulaw": "au", "pcm_s16le": "wav", "pcm_s24be": "aiff",
    "pcm_s32le": "avi", "pcm_u8": "wav", "tta": "matroska", "vorbis": "webm", "wavpack": "wv",
    "wmav1": "asf", "wmav2": "asf", "g722": "wav", "g726": "wav", "g726le": "au",
}  # fmt: skip


BIT_RATES = {"wmav1": 128000, "wmav2": 128000, "g726": 32000, "g726le": 32000}
SAMPLE_RATES = {"adpcm_swf": 44100, "g722": 16000, "g726": 8000, "g726le": 8000}


@pytest.fixture(scope="module")
def other_process() -> Iterator[ProcessPoolExecutor]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        yield pool


def _encoders(names: dict[str, str]) -> dict[str, str]:
    import av

    return {name: format for name, format in names.items() if name in av.codecs_available}


@cache
def _video(codec: str, format: str) -> bytes:
    pix_fmt = VIDEO_FORMATS.get(codec, "yuv420p")
    frames: Any = (
        index_frames(12, 96, 80)
        if pix_fmt in ("rgb24", "gray")
        else index_planes(12, 96, 80, pix_fmt)
    )
    if codec == "gif":
        frames = [frame[..., 0] for frame in frames]
    if codec == "h263p":
        frames = index_planes(12, 176, 144, pix_fmt)
    return make_video(frames, codec=codec, format=format, pix_fmt=pix_fmt, frame_rate=25)


@cache
def _audio(codec: str, rate: int) -> bytes:
    tone = make_tone(2 * rate, rate, (440.0,) if codec.startswith("g7") else (440.0, 997.0))
    return make_audio(tone, rate, codec=codec, format=AUDIO[codec], bit_rate=BIT_RATES.get(codec))


def _both(other_process: ProcessPoolExecutor, packets: list[Any]) -> None:
    here = digest_all(packets)
    assert here == digest_all(packets)  # they are not consumed
    assert other_process.submit(digest_all, packets).result() == here


@pytest.mark.parametrize("codec", _encoders(VIDEO))
def test_video_codecs(codec: str, other_process: ProcessPoolExecutor) -> None:
    data = _video(codec, VIDEO[codec])
    _both(other_process, [sm.demux_video(data), sm.demux_video(data, timestamp=(0.2, 0.31))])
    assert len(sm.decode_packets(sm.demux_video(data))) >= 11


@pytest.mark.parametrize("codec", _encoders(AUDIO))
def test_audio_codecs(codec: str, other_process: ProcessPoolExecutor) -> None:
    rate = SAMPLE_RATES.get(codec, 48000)
    data = _audio(codec, rate)
    whole, part = sm.demux_audio(data), sm.demux_audio(data, timestamp=(0.8, 0.93))
    _both(other_process, [whole, part])
    assert len(sm.decode_packets(part, filter_desc=None)) == round(0.13 * rate)


def _real(media_dir: Path, folder: str) -> list[Path]:
    return sorted(path for path in (media_dir / folder).iterdir() if "truncated" not in path.name)


def test_real_video(media_dir: Path, other_process: ProcessPoolExecutor) -> None:
    packets = [
        sm.demux_video(path, timestamp=window)
        for path in _real(media_dir, "video")
        for window in ((0, 0.2), (0.5, 0.7))
        if "corrupt" not in path.name
    ]
    assert len(packets) >= 18
    _both(other_process, packets)


def test_real_audio(media_dir: Path, other_process: ProcessPoolExecutor) -> None:
    paths = [*_real(media_dir, "audio"), media_dir / "video" / "nasa_13013.mp4"]
    _both(other_process, [sm.demux_audio(p, timestamp=w) for p in paths for w in (None, (1, 1.5))])


def test_real_stills(media_dir: Path, other_process: ProcessPoolExecutor) -> None:
    packets = []
    for path in _real(media_dir, "images_odd"):
        try:
            one = sm.demux_image(path)
            sm.decode_packets(one, filter_desc=None)
        except sm.MediaError:  # damaged on purpose
            continue
        packets.append(one)
    assert len(packets) > 20
    _both(other_process, packets)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_display_matrix(orientation: int, other_process: ProcessPoolExecutor) -> None:
    track = VideoTrack(frames=index_frames(3, 32, 24), codec="libx264", orientation=orientation)
    packets = sm.demux_video(make_media([track], format="mp4"))
    assert packets.orientation == orientation
    _both(other_process, [packets])
    copy = pickle.loads(pickle.dumps(packets))
    assert (copy.orientation, copy.width) == (packets.orientation, packets.width)


@pytest.mark.parametrize("codec", ["aac", "libopus", "libmp3lame"])
@pytest.mark.parametrize("format", ["mp4", "matroska"])
def test_priming_is_left_out_in_the_other_process_too(codec: str, format: str) -> None:
    packets = sm.demux_audio(clip(codec, format, seconds=1))
    copy = pickle.loads(pickle.dumps(packets))
    here, there = (sm.decode_packets(p, filter_desc=None) for p in (packets, copy))
    assert here.first_sample == there.first_sample == 0
    np.testing.assert_array_equal(samples_of(here), samples_of(there))


def test_chunks_of_a_stream(other_process: ProcessPoolExecutor) -> None:
    data = _video("libx264", "mp4")
    with sm.Demuxer(data) as demuxer:
        chunks = list(demuxer.streaming_demux(num_packets=5))
    copies = pickle.loads(pickle.dumps(chunks))
    decoder = sm.VideoDecoder(chunks[0].codec, filter_desc=None)
    frames = [frame for chunk in copies for part in decoder.decode(chunk) for frame in part]
    frames += [frame for part in decoder.flush() for frame in part]
    assert len(frames) == 12
    with pytest.raises(sm.DecodeError, match=r"do not start with a key frame.*VideoDecoder"):
        digest(copies[1])


def test_what_is_known_of_a_jpeg_goes_along() -> None:
    packets = sm.demux_image(make_image(index_frames(1, 64, 48)[0], codec="mjpeg"))
    head = metadata_of(packets).jpeg
    assert head is not None
    assert (head.width, head.height, head.is_ycc, head.stands_alone) == (64, 48, True, True)
    copy = pickle.loads(pickle.dumps(packets))
    assert metadata_of(copy).jpeg == head
    assert type(metadata_of(copy).jpeg) is type(head)
    assert digest(copy) == digest(packets)


def test_pickles_are_about_as_large_as_the_data() -> None:
    image = sm.demux_image(make_image(index_frames(1, 400, 300)[0]))
    assert image.nbytes < len(pickle.dumps(image)) < image.nbytes + 1500
    video = sm.demux_video(_video("rawvideo", "avi"))
    assert len(pickle.dumps(video)) < video.nbytes + 1500 + 150 * len(video)
