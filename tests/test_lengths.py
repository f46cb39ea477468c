"""Fixed numbers of frames and samples: short sources, clips of one shape, gaps in audio."""

from __future__ import annotations

import io
import math
from fractions import Fraction
from functools import cache
from typing import Any

import av
import numpy as np
import pytest
from effort import each

import spdl_media as sm
from spdl_media.frames import AudioChunk, new_frame, silent_frame
from spdl_media.testing import (
    AudioTrack,
    VideoTrack,
    frame_index,
    index_frames,
    index_planes,
    index_samples,
    make_audio,
    make_media,
    make_video,
)

RATE = 8000
SAMPLES = index_samples(2 * RATE, 2)
SOUND = make_audio(SAMPLES, RATE, codec="flac", format="flac")
VIDEO = make_video(index_frames(20, 32, 24), codec="ffv1", pix_fmt="bgr0")
# Expected indices at positions 0 to 7 if there are only five.
FILLED: dict[Any, list[int | None]] = {
    "repeat_last": [0, 1, 2, 3, 4, 4, 4, 4],
    "wrap": [0, 1, 2, 3, 4, 0, 1, 2],
    "zeros": [0, 1, 2, 3, 4, None, None, None],
}


def rows_of(rows: np.ndarray[Any, Any], places: list[int | None]) -> np.ndarray[Any, Any]:
    return np.stack([np.zeros_like(rows[0]) if place is None else rows[place] for place in places])


@cache
def movie(format: str = "matroska", missing: tuple[int, int] = (0, 0), seconds: int = 2) -> bytes:
    """Make a file of frames and samples that contain their index, at 10 fps and 8000 Hz.

    Args:
        format: Container format.
        missing: Begin and end of a gap in the audio, in packets of 512 samples.
        seconds: Length of the video; the audio has 2 seconds.
    """
    tracks = [
        VideoTrack(frames=index_planes(10 * seconds, 64, 48), codec="libx265", gop_size=5),
        AudioTrack(samples=SAMPLES, sample_rate=RATE, codec="flac", options={"frame_size": "512"}),
    ]
    made, written = io.BytesIO(make_media(tracks, format=format)), io.BytesIO()
    with av.open(made) as source, av.open(written, "w", format=format) as target:
        copies = [target.add_stream_from_template(stream) for stream in source.streams]
        for packet in source.demux():
            position = round((packet.pts or 0) * packet.time_base * RATE)
            if packet.size and not (packet.stream_index and missing[0] <= position < missing[1]):
                packet.stream = copies[packet.stream_index]
                target.mux(packet)
    return written.getvalue()


def test_what_fills_up_frames() -> None:
    whole = np.asarray(sm.load_video(VIDEO, (1.5, None)))

    for on_short, places in FILLED.items():
        for options in ({}, {"storage": sm.cpu_storage(8 * whole[0].nbytes, pin_memory=False)}):
            filled = sm.load_video(VIDEO, (1.5, None), num_frames=8, on_short=on_short, **options)
            np.testing.assert_array_equal(np.asarray(filled), rows_of(whole, places))
        floats = sm.load_video(
            VIDEO, (1.5, None), num_frames=8, on_short=on_short, layout="NCHW", dtype="float32"
        )
        wanted = rows_of(whole.transpose(0, 3, 1, 2) / np.float32(255), places)
        np.testing.assert_allclose(np.asarray(floats), wanted, atol=1e-6)
    assert len(sm.load_video(VIDEO, (1.5, None), num_frames=8)) == 5
    assert len(sm.load_video(VIDEO, num_frames=8, on_short="error")) == 8
    with pytest.raises(
        sm.ConvertError, match=r"8 frames were requested, but .* has 5\. .*on_short="
    ):
        sm.load_video(VIDEO, (1.5, None), num_frames=8, on_short="error")
    with pytest.raises(sm.ConvertError, match="there is no frame in the window"):
        sm.load_video(VIDEO, (5, 6), num_frames=8, on_short="zeros")
    small = sm.cpu_storage(6 * whole[0].nbytes, pin_memory=False)
    with pytest.raises(sm.StorageTooSmallError):
        sm.load_video(VIDEO, (1.5, None), num_frames=8, on_short="wrap", storage=small)


@pytest.mark.parametrize("sample_fmt", ["fltp", "s16", "u8p", None])
@pytest.mark.parametrize("source", ["wav", "flac"])
def test_what_fills_up_samples(source: str, sample_fmt: str | None) -> None:
    codec = "pcm_s16le" if source == "wav" else "flac"
    data = make_audio(SAMPLES[:5], RATE, codec=codec, format=source)
    axis = int((sample_fmt or "s16").endswith("p"))
    whole = np.moveaxis(np.asarray(sm.load_audio(data, sample_fmt=sample_fmt)), axis, 0)

    for on_short, places in FILLED.items():
        wanted = rows_of(whole, places)
        if sample_fmt == "u8p" and on_short == "zeros":
            wanted[5:] = 128
        for storage in (None, sm.cpu_storage(wanted.nbytes, pin_memory=False)):
            filled = sm.load_audio(
                data, sample_fmt=sample_fmt, num_samples=8, on_short=on_short, storage=storage
            )
            np.testing.assert_array_equal(np.moveaxis(np.asarray(filled), axis, 0), wanted)
    with pytest.raises(
        sm.ConvertError, match=r"8 samples were requested, but .* has 5\. .*gaps='fill'"
    ):
        sm.load_audio(data, num_samples=8, on_short="error")


@pytest.mark.parametrize("format", ["wav", "flac", "matroska"])
def test_a_single_resampled_sample_is_filled_up(format: str) -> None:
    data = make_audio(
        SAMPLES, RATE, codec="pcm_s16le" if format == "wav" else "flac", format=format
    )
    last = (Fraction(2 * RATE - 1, RATE), None)
    filled = sm.load_audio(data, last, sample_rate=16000, num_samples=100, on_short="zeros").array
    count = -(-16000 // RATE)
    assert filled.shape == (2, 100)
    assert filled[:, :count].all()
    assert not filled[:, count:].any()


def test_lengths_that_say_nothing() -> None:
    with pytest.raises(ValueError, match=r"on_short='zeros' .* needs num_samples="):
        sm.load_audio(SOUND, on_short="zeros")
    with pytest.raises(ValueError, match=r"needs num_frames="):
        sm.load_video(VIDEO, on_short="wrap")
    with pytest.raises(ValueError, match=r"on_short must be .*not 'loop'"):
        sm.load_clip(movie(), 0, num_frames=1, num_samples=1, on_short="loop")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"on_short must be .*not 'loop'"):
        sm.load_clip(movie(), 0, duration=1, on_short="loop")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the clip has no length: give duration="):
        sm.load_clip(movie(), 0, num_frames=3)
    with pytest.raises(TypeError, match="num_samples= for audio, and these are AudioPackets"):
        sm.decode_packets(sm.demux_audio(SOUND), num_frames=3)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"num_frames= is for images .* VideoPackets"):
        sm.decode_packets(sm.demux_video(VIDEO), num_samples=3)  # type: ignore[call-overload]


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int16])
def test_lengths_of_narrow_numpy_integers(kind: Any) -> None:
    # A product with one of them would overflow.
    count = kind(100)
    video = sm.load_video(VIDEO, num_frames=count, on_short="wrap")
    assert np.array_equal(video, sm.load_video(VIDEO, num_frames=100, on_short="wrap"))
    sound = sm.load_audio(SOUND, num_samples=count)
    assert np.array_equal(sound, sm.load_audio(SOUND, num_samples=100))
    options: Any = {"frame_rate": 100, "num_samples": count}
    clip = sm.load_clip(movie(), 0, num_frames=count, **options)
    assert (len(clip.video), clip.audio.shape) == (100, (2, 100))
    with sm.VideoFile(movie()) as file:
        clips = sm.sample_clips(file, num_frames=count, step=2, on_short="wrap", audio=True, rng=0)
    assert clips.video.shape[1] == 100
    assert clips.audio is not None
    assert clips.audio.shape[2] == 20 * RATE


def test_another_rate_still_ends_early() -> None:
    """num_samples counts samples of the new rate, and returns the first ones."""
    whole = np.asarray(sm.load_audio(SOUND, sample_rate=16000))
    some = np.asarray(sm.load_audio(SOUND, sample_rate=16000, num_samples=20000))
    np.testing.assert_array_equal(some, whole[:, :20000])
    exact = sm.load_audio(SOUND, (1, None), sample_rate=16000, num_samples=16001, on_short="zeros")
    assert exact.shape == (2, 16001)
    # At the file's own rate, only the number counts.
    same = sm.load_audio(SOUND, sample_rate=RATE, num_samples=100)
    np.testing.assert_array_equal(np.asarray(same), SAMPLES[:100].T / np.float32(32768))


@pytest.mark.parametrize("format", ["mp4", "matroska"])
def test_clips_have_one_shape_wherever_they_start(format: str, rng: np.random.Generator) -> None:
    data = movie(format)
    starts = [Fraction(int(n), 9973) for n in rng.integers(0, 9973 + 4000, 12)]
    for start in [Fraction(0), Fraction(1, 3), *starts]:
        clip = sm.load_clip(data, start, num_frames=4, num_samples=1000, sample_fmt="s16p")
        first, sample = math.ceil(start * 10), math.ceil(start * RATE)
        assert [frame_index(frame) for frame in np.asarray(clip.video)] == [
            *range(first, first + 4)
        ]
        np.testing.assert_array_equal(np.asarray(clip.audio), SAMPLES[sample : sample + 1000].T)
        assert len(clip.timestamps) == 4
        strided = sm.load_clip(
            data, start, num_frames=3, frame_rate=5, num_samples=2205, sample_rate=22050
        )
        assert (strided.video.shape[0], strided.audio.shape) == (3, (2, 2205))
    # One number gives the length of both streams.
    clip = sm.load_clip(data, 0.2, num_frames=3, frame_rate=5)
    assert (clip.video.shape[0], clip.audio.shape) == (3, (2, 3 * RATE // 5))
    clip = sm.load_clip(data, 0.2, num_samples=RATE // 5)
    assert (clip.video.shape[0], clip.audio.shape) == (2, (2, RATE // 5))
    # Windows drawn by duration have these lengths as well.
    clip = sm.load_clip(data, "0.05", "0.4", num_frames=4, num_samples=3200, sample_rate=8000)
    assert (clip.video.shape[0], clip.audio.shape) == (4, (2, 3200))


def test_clips_at_the_end_of_a_file() -> None:
    options: Any = {"num_frames": 8, "num_samples": 6400, "pix_fmt": "gray", "sample_fmt": "s16p"}
    with pytest.raises(
        sm.ConvertError, match=r"8 frames were requested, but the window \[1.5.* has 5"
    ):
        sm.load_clip(movie(), 1.5, **options)
    with pytest.raises(sm.ConvertError, match=r"6400 samples were requested, but .* has 4000"):
        sm.load_clip(movie(seconds=4), 1.5, **options)

    for on_short, places in FILLED.items():
        clip = sm.load_clip(movie(), 1.5, on_short=on_short, **options)
        whole = np.asarray(sm.load_video(movie(), (1.5, None), pix_fmt="gray"))
        np.testing.assert_array_equal(np.asarray(clip.video), rows_of(whole, places))
        seconds = [math.nan if place is None else 1.5 + place / 10 for place in places]
        np.testing.assert_allclose(clip.timestamps, seconds)
        rest = SAMPLES[12000:]
        added = {"repeat_last": rest[-1:].repeat(2400, 0), "wrap": rest[:2400]}.get(
            on_short, 0 * rest[:2400]
        )
        np.testing.assert_array_equal(np.asarray(clip.audio), np.concatenate([rest, added]).T)
    # The audio has ended before: silence is added, but there is nothing to repeat.
    clip = sm.load_clip(movie(seconds=4), 3, on_short="zeros", **options)
    assert (clip.audio.shape, np.asarray(clip.audio).any()) == ((2, 6400), False)
    with pytest.raises(sm.ConvertError, match="there is no sample in the window"):
        sm.load_clip(movie(seconds=4), 3, on_short="wrap", **options)


def test_a_clip_reads_no_more_than_it_needs() -> None:
    data = movie(seconds=60)
    reads = []

    class Counting(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            reads.append(part := super().read(size))
            return part

    sm.load_clip(Counting(data), 1, num_frames=4, num_samples=100)
    assert sum(map(len, reads)) < len(data) / 2


@pytest.mark.parametrize("on_corrupt", ["raise", "drop"])
def test_gaps_are_silence_where_asked(on_corrupt: Any) -> None:
    data = movie(missing=(4096, 6144))
    config = sm.decode_config(gaps="fill", on_corrupt=on_corrupt)
    wanted = SAMPLES.copy()
    wanted[4096:6144] = 0
    options: Any = {"sample_fmt": "s16p", "decode_config": config}
    # Without the option, samples after the gap follow directly.
    assert sm.load_audio(data).shape[1] == len(wanted) - 2048

    # Windows around the gap, from and to its middle, within it, and outside of it.
    for first, stop in [(0, 16000), (5000, 9000), (1000, 5000), (4500, 5500), (8000, 9000)]:
        window = (Fraction(first, RATE), Fraction(stop, RATE))
        loaded = sm.load_audio(data, window, **options)
        np.testing.assert_array_equal(np.asarray(loaded), wanted[first:stop].T)
        frames = sm.decode_packets(
            sm.demux_audio(data, timestamp=window), "volume=1,aformat=sample_fmts=s16p", config
        )
        np.testing.assert_array_equal(np.asarray(sm.convert_frames(frames)), wanted[first:stop].T)
        assert frames.first_sample == first
    clip = sm.load_clip(data, "0.6", num_frames=2, num_samples=1600, **options)
    np.testing.assert_array_equal(np.asarray(clip.audio), wanted[4800:6400].T)
    assert clip.audio_timestamp == 0.6
    with pytest.raises(sm.ConvertError, match=r"1600 samples were requested, but .* has 256"):
        sm.load_clip(data, "0.6", num_frames=2, num_samples=1600)


def test_a_gap_of_hours_is_damage_and_not_silence_that_fills_the_memory() -> None:
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as container:
        stream: Any = container.add_stream("pcm_s16le", rate=RATE, layout="stereo")
        for start in (0, 3601 * RATE):
            frame = new_frame(SAMPLES[:1000], "s16", "stereo", RATE)
            frame.pts, frame.time_base = start, Fraction(1, RATE)
            container.mux(stream.encode(frame))
    with pytest.raises(
        sm.DecodeError, match=r"at 3601.000 s .*: more than an hour before it has no"
    ):
        sm.load_audio(file.getvalue(), decode_config=sm.decode_config(gaps="fill"))
    config = sm.decode_config(gaps="fill", on_corrupt="drop")
    frames = sm.decode_packets(sm.demux_audio(file.getvalue()), None, config)
    assert (len(frames), frames.num_dropped) == (2000, 1)
    window = sm.load_audio(file.getvalue(), (3600, None), decode_config=config)
    assert window.shape == (2, RATE + 1000)


def test_a_gap_of_hours_is_not_filled_with_copies_of_a_frame_until_the_memory_is_full() -> None:
    pts = [0, 1, 2, 3, 72_002, 72_003]  # a gap of two hours
    data = make_video(index_planes(6, 32, 32), codec="ffv1", format="nut", pts=pts, frame_rate=10)
    with pytest.raises(
        sm.FilterError,
        match=r"frame_rate=30 would repeat a frame 215997 times, from 0\.300 s on: .*gap",
    ):
        sm.load_video(data, frame_rate=30)
    for window in (None, 1), (7000, None), (7000, 8000):
        assert len(sm.load_video(data, window, frame_rate=10)) > 9
    assert len(sm.load_video(data, frame_rate="1/60")) == 121


@each("layout", ["mono", "7.1"])
@each("fmt", ["u8", "u8p", "s16", "s32p", "fltp", "dbl"])
def test_silence_of_any_format(fmt: str, layout: str) -> None:
    like = av.AudioFrame(fmt, layout, 10)
    like.sample_rate, like.pts = RATE, 123
    frame = silent_frame(like, 1000)
    assert (frame.format.name, frame.layout.name, frame.samples) == (fmt, layout, 1000)
    assert frame.sample_rate == RATE
    for plane in AudioChunk(frame, 0, 1000, 0).planes:
        assert set(np.unique(plane)) == {128 if fmt.startswith("u8") else 0}


@pytest.mark.parametrize("fmt", ["s16", "fltp"])
def test_silence_of_no_samples(fmt: str) -> None:
    like = av.AudioFrame(fmt, "stereo", 10)
    like.sample_rate = RATE
    frame = silent_frame(like, 0)
    assert (frame.format.name, frame.layout.name, frame.samples) == (fmt, "stereo", 0)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_frame_has_the_channels_of_its_layout(channels: int) -> None:
    with pytest.raises(ValueError, match=r"shape \(10, [13]\) are not of the layout 'stereo'"):
        new_frame(np.zeros((10, channels), np.int16), "s16", "stereo", RATE)


def test_silence_is_read_from_the_start_of_a_window() -> None:
    """The audio begins later than the video."""
    tracks = [
        VideoTrack(frames=index_planes(20, 64, 48), codec="libx265", gop_size=5),
        AudioTrack(samples=SAMPLES, sample_rate=RATE, codec="flac"),
    ]
    made, written = io.BytesIO(make_media(tracks, format="matroska")), io.BytesIO()
    with av.open(made) as source, av.open(written, "w", format="matroska") as target:
        copies = [target.add_stream_from_template(stream) for stream in source.streams]
        for packet in source.demux():
            if packet.size:
                if packet.stream_index:
                    packet.pts += round(Fraction(1, 4) / packet.time_base)
                    packet.dts = packet.pts
                packet.stream = copies[packet.stream_index]
                target.mux(packet)
    config = sm.decode_config(gaps="fill")
    clip = sm.load_clip(
        written.getvalue(),
        0,
        num_frames=5,
        num_samples=4000,
        sample_fmt="s16p",
        decode_config=config,
    )
    silence = np.zeros((2, 2000), np.int16)
    np.testing.assert_array_equal(np.asarray(clip.audio), np.hstack([silence, SAMPLES[:2000].T]))
    assert clip.audio_timestamp == 0
