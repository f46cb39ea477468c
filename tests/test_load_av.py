"""``load_video``, ``load_audio`` and ``load_clip``: windows, exact to the frame and to the sample."""

from __future__ import annotations

import io
import math
from fractions import Fraction
from typing import Any

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
    make_audio,
    make_media,
    make_tone,
    make_video,
)

FRAMES = index_frames(40, 32, 24)
VIDEO = make_video(FRAMES, codec="ffv1", pix_fmt="bgr0")
SAMPLES = index_samples(32000, 2)
FLAC = make_audio(SAMPLES, 8000, codec="flac", format="flac")


def clip_media(format: str, video: str, audio: str, **options: Any) -> bytes:
    sound = make_tone(5 * 48000, 48000, (440.0, 1000.0))
    sound[::7] //= 2
    return make_media(
        [
            VideoTrack(frames=index_planes(50, 64, 48), codec=video, gop_size=8, max_b_frames=2),
            AudioTrack(samples=sound, sample_rate=48000, codec=audio, **options),
        ],
        format=format,
    )


CLIPS = {
    "mp4-aac": ("mp4", "libx264", "aac"),
    "mp4-alac": ("mp4", "libx264", "alac"),
    "mkv-opus": ("matroska", "libx264", "libopus"),
    "mkv-flac": ("matroska", "libx264", "flac"),
    "mkv-pcm": ("matroska", "libx264", "pcm_s16le"),
    "mkv-vorbis": ("matroska", "libx264", "vorbis"),
    "ts-mp2": ("mpegts", "libx264", "mp2"),
    "ts-ac3": ("mpegts", "libx264", "ac3"),
    "mov-adpcm": ("mov", "libx264", "adpcm_ima_qt"),
}
INTERVALS = [(0, 0.5), (1.03, 0.6), (2.5, 1), (3.95, 0.12), (4.2, 2)]


@pytest.fixture(scope="module")
def clips() -> dict[str, bytes]:
    return {name: clip_media(*form) for name, form in CLIPS.items()}


def test_a_whole_video() -> None:
    buffer = sm.load_video(VIDEO)
    np.testing.assert_array_equal(np.asarray(buffer), FRAMES)


@pytest.mark.parametrize("window", [(0.5, 1.2), (None, 0.3), ("3.5", None), (Fraction(1, 3), 0.7)])
def test_a_window_of_a_video(window: Any) -> None:
    start, end = (None if side is None else float(Fraction(str(side))) for side in window)
    expected = [i for i in range(40) if (start or 0) <= i / 10 and (end is None or i / 10 < end)]
    buffer = sm.load_video(VIDEO, window)
    assert [frame_index(frame) for frame in np.asarray(buffer)] == expected


@pytest.mark.parametrize("color_range", ["tv", "pc"])
def test_vp9_in_webm_is_what_its_packets_decode_to(color_range: str) -> None:
    # FFmpeg finds pixel format and range by decoding only if the format is named.
    frames = VideoTrack(
        frames=index_planes(10, 64, 48), codec="libvpx-vp9", options={"color_range": color_range}
    )
    audio = AudioTrack(samples=SAMPLES, sample_rate=8000, codec="libopus")
    data = make_media([frames, audio], format="webm")
    plain = sm.demux_config(format="matroska")
    packets = sm.demux_video(data, timestamp=(0.2, 0.8), demux_config=plain)
    expected = sm.convert_frames(sm.decode_packets(packets))
    np.testing.assert_array_equal(sm.load_video(data, (0.2, 0.8)), expected)


def test_options_of_a_video() -> None:
    small = sm.load_video(VIDEO, (0, 1), width=16, height=16, pix_fmt="yuv420p")
    assert small.shape == (10, 1, 24, 16)
    assert sm.load_video(VIDEO, (0, 1), frame_rate=5).shape[0] == 5
    assert sm.load_video(VIDEO, num_frames=3, layout="NCHW").shape == (3, 3, 24, 32)
    assert sm.load_video(VIDEO, filter_desc="hflip,format=gray", stream_index=0).shape[0] == 40


def test_audio_is_float_by_channel() -> None:
    wave = np.asarray(sm.load_audio(FLAC, timestamp=(0.5, 1.5)))
    assert (wave.shape, wave.dtype) == ((2, 8000), np.float32)
    np.testing.assert_array_equal(wave, SAMPLES[4000:12000].T / np.float32(32768))


def test_options_of_audio() -> None:
    assert sm.load_audio(FLAC, (0, 1), sample_rate=4000, num_channels=1).shape == (1, 4000)
    exact = sm.load_audio(FLAC, sample_fmt=None)
    np.testing.assert_array_equal(np.asarray(exact), SAMPLES)
    assert sm.load_audio(FLAC, num_samples=100, filter_desc="volume=0").shape[0] in (100, 2)
    storage = sm.cpu_storage(SAMPLES.nbytes * 2, pin_memory=False)
    assert sm.load_audio(FLAC, storage=storage).shape == (2, 32000)


@pytest.mark.parametrize("load", [sm.load_video, sm.load_audio])
def test_what_cannot_be_loaded(load: Any) -> None:
    source = VIDEO if load is sm.load_video else FLAC
    with pytest.raises(sm.ConvertError, match=r"in the window \[100, 101\)"):
        load(source, (100, 101))
    with pytest.raises(ValueError, match="holds no time"):
        load(source, (2, 1))
    with pytest.raises(TypeError, match="widht"):
        load(source, widht=3)
    with pytest.raises(sm.DemuxError, match="mine"):
        load(b"nothing", name="mine")
    with pytest.raises(ValueError, match="filter_desc= is the whole filter graph"):
        load(
            source,
            filter_desc="null",
            **{"pix_fmt": "gray"} if load is sm.load_video else {"sample_rate": 5},
        )


@pytest.mark.parametrize("name", CLIPS)
@pytest.mark.parametrize("window", [None, (0.5, 1.25), (0, 0.1), (4.5, 9)])
def test_audio_beside_a_video_is_what_its_packets_decode_to(
    clips: dict[str, bytes], name: str, window: tuple[float, float] | None
) -> None:
    packets = sm.demux_audio(clips[name], timestamp=window)
    wanted = sm.convert_frames(sm.decode_packets(packets))
    np.testing.assert_array_equal(sm.load_audio(clips[name], window).array, wanted.array)


@pytest.mark.parametrize("name", CLIPS)
@pytest.mark.parametrize(("start", "duration"), INTERVALS)
def test_a_clip_is_what_the_two_streams_give_alone(
    clips: dict[str, bytes], name: str, start: float, duration: float
) -> None:
    window = (str(start), Fraction(str(start)) + Fraction(str(duration)))
    with sm.Demuxer(clips[name]) as demuxer:
        pictures, sound = demuxer.demux_clip(window)
        frames, samples = map(sm.decode_packets, (pictures, sound))
        alone = (
            sm.decode_packets(demuxer.demux_video(window)),
            sm.decode_packets(demuxer.demux_audio(window)),
        )
    assert frames.pts == alone[0].pts
    assert len(frames)
    np.testing.assert_array_equal(
        np.asarray(sm.convert_frames(frames)), np.asarray(sm.convert_frames(alone[0]))
    )
    assert samples.first_sample == alone[1].first_sample
    got, wanted = (np.asarray(sm.convert_frames(item)) for item in (samples, alone[1]))
    np.testing.assert_array_equal(got, wanted)
    clip = sm.load_clip(clips[name], start, duration)
    np.testing.assert_array_equal(np.asarray(clip.audio), wanted)
    assert clip.timestamps.tolist() == [*frames.timestamps]
    assert (clip.audio_timestamp, clip.sample_rate) == (samples.timestamp, samples.sample_rate)


@pytest.mark.parametrize(
    ("format", "codec", "start"), [("mp4", "alac", 0.5), ("avi", "pcm_s16le", 0)]
)
def test_a_clip_has_all_audio_beside_a_single_frame(format: str, codec: str, start: float) -> None:
    # FFmpeg's presentation times of reordered frames are dropped, of which one frame has only a copy.
    frame = VideoTrack(frames=index_planes(1, 64, 48), codec="libx264", max_b_frames=2, pts=(10,))
    data = make_media(
        [frame, AudioTrack(samples=SAMPLES, sample_rate=16000, codec=codec)], format=format
    )
    clip = sm.load_clip(data, start, 1, sample_fmt="s16p")
    first = int(start * 16000)
    np.testing.assert_array_equal(np.asarray(clip.audio), SAMPLES[first : first + 16000].T)
    with sm.Demuxer(data) as demuxer:
        sound = demuxer.demux_clip((start, start + 0.1))[1]
        assert len(sound) < len(demuxer.demux_audio())


def test_windows_computed_in_floats_share_no_frame_and_no_sample() -> None:
    fps, rate, num_frames = 30, 44100, 90
    size = rate // fps
    samples = index_samples(num_frames * size, 1)
    data = make_media(
        [
            VideoTrack(
                frames=index_frames(num_frames, 32, 24),
                codec="png",
                pix_fmt="rgb24",
                frame_rate=fps,
            ),
            AudioTrack(samples=samples, sample_rate=rate, codec="pcm_s16le"),
        ],
        format="mov",
    )
    for index in range(num_frames):
        start, wanted = index / fps, samples[index * size : (index + 1) * size].reshape(-1)
        clip = sm.load_clip(data, start, 1 / fps)
        assert len(clip.video) == len(sm.load_video(data, (start, start + 1 / fps))) == 1
        sound = sm.load_audio(data, (start, start + 1 / fps), filter_desc=None)
        np.testing.assert_array_equal(np.asarray(sound).reshape(-1), wanted)
        assert np.asarray(clip.audio).size == size


def test_a_clip_has_its_options(clips: dict[str, bytes]) -> None:
    storages = [sm.cpu_storage(1 << 20, pin_memory=False) for _ in range(2)]
    clip = sm.load_clip(
        clips["mkv-flac"],
        "0.5",
        Fraction(1),
        width=16,
        height=16,
        frame_rate=5,
        sample_rate=8000,
        num_channels=1,
        sample_fmt="s16p",
        layout="NCHW",
        video_storage=storages[0],
        audio_storage=storages[1],
    )
    assert (clip.video.shape, clip.audio.shape) == ((5, 3, 16, 16), (1, 8000))
    assert (clip.audio.dtype, clip.sample_rate) == (np.int16, 8000)


@pytest.mark.parametrize(
    ("decoder", "options"), [("h264", {"enable_er": 0}), ("libopus", {"apply_phase_inv": 0})]
)
def test_the_decoder_of_a_clip_is_that_of_its_kind(
    clips: dict[str, bytes], decoder: str, options: dict[str, Any]
) -> None:
    config = sm.decode_config(decoder=decoder, decoder_options=options)
    clip = sm.load_clip(clips["mkv-opus"], 1, 0.5, decode_config=config)
    for_video, for_audio = (config, None) if decoder == "h264" else (None, config)
    video = sm.load_video(clips["mkv-opus"], (1, 1.5), decode_config=for_video)
    audio = sm.load_audio(clips["mkv-opus"], (1, 1.5), decode_config=for_audio)
    np.testing.assert_array_equal(np.asarray(clip.video), np.asarray(video))
    np.testing.assert_array_equal(np.asarray(clip.audio), np.asarray(audio))
    # The requested decoder was used: FFmpeg's own decoder of Opus gives different samples.
    own = sm.load_audio(clips["mkv-opus"], (1, 1.5))
    assert np.array_equal(np.asarray(own), np.asarray(audio)) == (decoder == "h264")


def test_other_options_of_a_clip_are_for_both_streams(clips: dict[str, bytes]) -> None:
    config = sm.decode_config(decoder_options={"err_detect": "nope"})
    for load in (sm.load_video, sm.load_audio):
        with pytest.raises(ValueError, match="does not take the value 'nope'"):
            load(clips["mkv-flac"], decode_config=config)
    with pytest.raises(ValueError, match="decoder 'h264' does not take the value 'nope'"):
        sm.load_clip(clips["mkv-flac"], 0, 1, decode_config=config)


@pytest.mark.parametrize(
    ("decoder", "match"),
    [
        ("h265x", r"decoder='h265x'\): this FFmpeg has no decoder of that name"),
        ("vp9", r"decoder='vp9'\) decodes vp9, but the stream is h264"),
        ("aac", r"decoder='aac'\) decodes aac, but the stream is flac"),
        ("ass", r"decoder='ass'\) decodes ass, but the stream is h264"),
    ],
)
def test_a_decoder_for_neither_stream_of_a_clip(
    clips: dict[str, bytes], decoder: str, match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        sm.load_clip(clips["mkv-flac"], 0, 1, decode_config=sm.decode_config(decoder=decoder))


class Counting(io.BytesIO):
    """A file object that counts the bytes that are read."""

    total = 0

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self.total += len(data)
        return data


def test_a_clip_reads_the_file_once(clips: dict[str, bytes]) -> None:
    once, twice = Counting(clips["mkv-pcm"]), Counting(clips["mkv-pcm"])
    sm.load_clip(once, 1.5, 2)
    window = (1.5, 3.5)
    with sm.Demuxer(twice) as demuxer:
        opened = twice.total
        demuxer.demux_video(window)
        demuxer.demux_audio(window)
    assert once.total - opened < 0.7 * (twice.total - opened)


def test_packets_that_are_not_needed_are_left_out(clips: dict[str, bytes]) -> None:
    with sm.Demuxer(clips["mov-adpcm"]) as demuxer:  # read from the start for its sound
        pictures, sound = demuxer.demux_clip((4.2, 4.4))
        assert len(pictures) <= 16
        assert sound.get_timestamps(raw=True)[0] < 0.1


@pytest.mark.parametrize(
    ("start", "duration", "error", "match"),
    [
        (None, 1, TypeError, "start must be a number of seconds or a numeric string, not None"),
        (float("inf"), 1, ValueError, "start must be finite, not inf"),
        (0, None, ValueError, "the clip has no length"),
        (0, 0, ValueError, "duration must be above 0 seconds, not 0"),
        (0, float("inf"), ValueError, "duration must be finite, not inf"),
    ],
)
def test_invalid_intervals(start: Any, duration: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        sm.load_clip(VIDEO, start, duration)


def test_a_clip_needs_both_streams() -> None:
    with pytest.raises(sm.DemuxError, match="there is no audio stream"):
        sm.load_clip(VIDEO, 0, 1)
    with pytest.raises(sm.DemuxError, match="there is no video stream"):
        sm.load_clip(FLAC, 0, 1)


@pytest.mark.parametrize("format", ["mp4", "matroska"])
def test_audio_of_a_clip_is_exact_to_the_sample(format: str) -> None:
    """Compared with the encoded samples, for starts and lengths between samples."""
    samples = index_samples(16000, 2)
    pictures = index_planes(20, 64, 48)
    movie = make_media(
        [
            VideoTrack(frames=pictures, codec="libx265", gop_size=5, max_b_frames=2),
            AudioTrack(samples=samples, sample_rate=8000, codec="flac"),
        ],
        format=format,
    )
    for start, duration in ((0, 0.5), ("0.25", "0.3001"), (Fraction(1, 3), 0.2), (1.0001, 5)):
        clip = sm.load_clip(movie, start, duration, sample_fmt="s16p", pix_fmt="gray")
        first = Fraction(str(start))
        last = first + Fraction(str(duration))
        cut = samples[math.ceil(first * 8000) : math.ceil(last * 8000)]
        np.testing.assert_array_equal(np.asarray(clip.audio), cut.T)
        # Also in Matroska, whose time base is a millisecond, which is 8 samples.
        assert clip.audio_timestamp == math.ceil(first * 8000) / 8000
        shown = [index for index in range(20) if first <= Fraction(index, 10) < last]
        assert len(clip.timestamps) == len(shown)
        assert clip.timestamps.tolist() == pytest.approx([index / 10 for index in shown])


def test_a_clip_of_chosen_streams() -> None:
    sounds = [index_samples(8000, channels) for channels in (1, 2)]
    tracks = [
        *(VideoTrack(frames=index_planes(20, 64, 48)[::way], codec="ffv1") for way in (1, -1)),
        *(AudioTrack(samples=one, sample_rate=4000, codec="flac") for one in sounds),
    ]
    data = make_media(tracks, format="matroska")
    for video, audio in ((0, 2), (1, 3), (1, 2)):
        streams = {"video_stream_index": video, "audio_stream_index": audio}
        for length in ({"duration": 0.4}, {"num_frames": 4, "num_samples": 1600}):
            clip = sm.load_clip(data, 0.5, pix_fmt="gray", sample_fmt="s16", **length, **streams)
            numbers = [frame_index(frame[..., 0]) for frame in np.asarray(clip.video)]
            assert numbers == [k if video == 0 else 19 - k for k in range(5, 9)]
            np.testing.assert_array_equal(np.asarray(clip.audio), sounds[audio - 2][2000:3600])
        with sm.Demuxer(data) as demuxer:
            found = demuxer.demux_clip((0.5, 0.9), **streams)
            assert demuxer.codec(audio) == found[1].codec
            assert demuxer.duration == 2
    for wrong in ({"video_stream_index": 2}, {"audio_stream_index": 1}):
        match = "stream 2 is audio, not video" if 2 in wrong.values() else "stream 1 is video, not"
        for length in ({"duration": 0.4}, {"num_frames": 4, "num_samples": 1600}):
            with pytest.raises(sm.DemuxError, match=match):
                sm.load_clip(data, 0.5, **length, **wrong)


def test_a_failed_clip_leaves_nothing_leased(clips: dict[str, bytes]) -> None:
    pools = [sm.StoragePool(n, 1, pin_memory=False, on_exhausted="raise") for n in (1 << 20, 8)]
    with pytest.raises(sm.StorageTooSmallError, match="the storage has 8") as kept:
        sm.load_clip(clips["mkv-pcm"], 0, 0.5, video_storage=pools[0], audio_storage=pools[1])
    assert [pool.num_free for pool in pools] == [1, 1], f"{kept} holds a buffer"
