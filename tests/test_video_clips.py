"""Clips: their frames and audio, the cache of opened videos, and frames from packets."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections import Counter
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from effort import each
from left_behind import descriptors

import spdl_media as sm
from spdl_media.testing import (
    AudioTrack,
    VideoTrack,
    frame_index,
    index_planes,
    index_samples,
    make_media,
    make_video,
)

NUM_FRAMES, RATE = 60, 10
SAMPLE_RATE = 8000


@cache
def movie(audio_start: int = 0, audio_end: int = NUM_FRAMES * SAMPLE_RATE // RATE) -> bytes:
    """Make six seconds of frames and samples that contain their index."""
    samples = index_samples(audio_end, 2)[audio_start:]
    return make_media(
        [
            VideoTrack(frames=index_planes(NUM_FRAMES, 64, 48), codec="libx265", max_b_frames=2),
            AudioTrack(samples=samples, sample_rate=SAMPLE_RATE, codec="flac", start=audio_start),
        ]
    )


@cache
def opened() -> sm.VideoFile:
    return sm.VideoFile(movie())


def numbers(video: Any) -> list[list[int]]:
    """Return the indices of frames, read from the pixels of clips."""
    return [[frame_index(frame[..., 0]) for frame in clip] for clip in np.asarray(video)]


def check(clips: sm.VideoClips, expected: list[list[int]]) -> None:
    assert clips.indices.tolist() == expected
    # RGB pixels differ by about a level from the planes with the index.
    whole = np.asarray(opened().load(range(NUM_FRAMES)))
    found = np.asarray(clips.video)
    assert found.shape == (*clips.indices.shape, 48, 64, 3)
    for row, number in zip(found.reshape(-1, 48, 64, 3), clips.indices.ravel(), strict=True):
        np.testing.assert_array_equal(row, whole[number] if number >= 0 else 0)


def test_uniform_clips_lie_in_the_middle_of_equal_parts() -> None:
    clips = sm.sample_clips(opened(), num_clips=3, num_frames=4, step=2, sampler="uniform")
    # Parts of 20 frames. A clip covers 7 of them, so 6.5 frames of its part are before it.
    check(clips, [[6, 8, 10, 12], [26, 28, 30, 32], [46, 48, 50, 52]])
    np.testing.assert_allclose(clips.timestamps, clips.indices / RATE)
    assert (clips.audio, clips.sample_rate) == (None, None)
    # A clip that does not fit is moved inside.
    clips = sm.sample_clips(opened(), num_clips=2, num_frames=50, sampler="uniform")
    assert clips.indices[:, 0].tolist() == [0, 10]


def test_regular_clips_begin_every_stride() -> None:
    clips = sm.sample_clips(opened(), num_frames=2, step=3, sampler="regular", stride=25)
    check(clips, [[0, 3], [25, 28], [50, 53]])
    back_to_back = sm.sample_clips(opened(), num_frames=16, sampler="regular")
    assert back_to_back.indices[:, 0].tolist() == [0, 16, 32]
    with pytest.raises(sm.ConvertError, match="4 clips were requested, but 3 of 16 frames fit"):
        sm.sample_clips(opened(), num_frames=16, num_clips=4, sampler="regular")


def test_random_starts_are_equally_likely_and_those_of_the_seed() -> None:
    rng = np.random.default_rng(7)
    drawn = Counter[int]()
    for _ in range(20):
        clips = sm.sample_clips(
            opened(), num_clips=100, num_frames=2, step=50, rng=rng, width=8, height=8
        )
        drawn.update(clips.indices[:, 0].tolist())
    # 2,000 draws give about 200 each; three standard deviations of 13 are 40.
    assert sorted(drawn) == list(range(10))
    assert min(drawn.values()) > 150 and max(drawn.values()) < 250  # noqa: PT018
    one, other = (
        sm.sample_clips(opened(), num_clips=5, num_frames=2, rng=3).indices for _ in range(2)
    )
    assert one.tolist() == other.tolist()


@pytest.mark.parametrize(
    ("on_short", "expected"),
    [
        ("repeat_last", [0, 25, 50, 50, 50]),
        ("wrap", [0, 25, 50, 0, 25]),
        ("zeros", [0, 25, 50, -1, -1]),
    ],
)
def test_a_video_that_is_too_short(on_short: Any, expected: list[int]) -> None:
    clips = sm.sample_clips(opened(), num_frames=5, step=25, on_short=on_short)
    check(clips, [expected])
    seconds = [k / RATE if k >= 0 else np.nan for k in expected]
    np.testing.assert_allclose(clips.timestamps, [seconds])
    with pytest.raises(
        sm.ConvertError, match="a clip has 5 frames, but the video is long enough for 3 of them"
    ):
        sm.sample_clips(opened(), num_frames=5, step=25)


def test_a_rate_shows_the_frames_of_its_moments() -> None:
    clips = sm.sample_clips(
        opened(), num_frames=4, sampler="regular", frame_rate=4, stride=2.5, on_short="zeros"
    )
    check(clips, [[0, 2, 5, 7], [25, 27, 30, 32], [50, 52, 55, 57]])
    np.testing.assert_allclose(clips.timestamps[1], [2.5, 2.75, 3, 3.25])
    uneven = [0, 40, 80, 81, 83, 120, 500, 533, 566, 600]
    data = make_video(
        index_planes(10, 64, 48),
        codec="libx265",
        format="mp4",
        pts=uneven,
        time_base=Fraction(1, 1000),
    )
    with sm.VideoFile(data) as video:
        found = sm.sample_clips(video, num_frames=5, frame_rate=10, sampler="uniform").indices
        start = (video.end - 0.5) / 2
        moments = [start + k / 10 for k in range(5)]
        assert found.tolist() == [video.numbers_at(moments)]
        clips = sm.sample_clips(video, num_frames=3, num_clips=50, frame_rate=30, rng=0)
        for row, times in zip(clips.indices, clips.timestamps, strict=True):
            assert row.tolist() == video.numbers_at(times)
            np.testing.assert_allclose(np.diff(times), 1 / 30)
            assert 0 <= times[0] < video.end - 3 / 30
        long = sm.sample_clips(video, num_frames=20, frame_rate=20, on_short="repeat_last")
        assert long.indices[0, -1] == 9
        # Times up to 0.65 s are within the video; the last frame is repeated.
        np.testing.assert_allclose(long.timestamps[0, 12:], [0.6] + [0.65] * 7)


def test_audio_begins_with_each_clip_and_has_one_length() -> None:
    samples = index_samples(NUM_FRAMES * SAMPLE_RATE // RATE, 2)
    clips = sm.sample_clips(
        opened(), num_clips=4, num_frames=3, step=2, rng=1, audio=True, sample_fmt="s16p"
    )
    length = 6 * SAMPLE_RATE // RATE
    assert clips.sample_rate == SAMPLE_RATE
    assert np.asarray(clips.audio).shape == (4, 2, length)
    for clip, first in zip(np.asarray(clips.audio), clips.indices[:, 0], strict=True):
        start = first * SAMPLE_RATE // RATE
        np.testing.assert_array_equal(clip.T, samples[start : start + length])
    # All clips have one length, for any rates.
    clips = sm.sample_clips(
        opened(), num_clips=7, num_frames=5, frame_rate=7, rng=1, audio=True, sample_rate=11025
    )
    assert np.asarray(clips.audio).shape == (7, 2, round(5 / 7 * 11025))


def test_where_there_is_no_audio_is_silence() -> None:
    first, end = 2 * SAMPLE_RATE, 5 * SAMPLE_RATE
    samples = index_samples(end, 2)
    with sm.VideoFile(movie(first, end)) as video:
        clips = sm.sample_clips(
            video, num_frames=10, sampler="regular", audio=True, sample_fmt="s16"
        )
    whole = np.concatenate(
        [samples * (np.arange(end)[:, None] >= first), samples[:SAMPLE_RATE] * 0]
    )
    np.testing.assert_array_equal(
        np.asarray(clips.audio).reshape(-1, 2), whole[: 6 * SAMPLE_RATE].astype(np.int16)
    )


def test_real_audio_is_that_of_load_audio(media_dir: Path) -> None:
    source = media_dir / "video" / "nasa_13013.mp4"
    whole = np.asarray(sm.load_audio(source))
    with sm.VideoFile(source) as video:
        clips = sm.sample_clips(video, num_clips=4, num_frames=16, rng=2, audio=True, width=64)
    for clip, times in zip(np.asarray(clips.audio), clips.timestamps, strict=True):
        start = int(np.ceil(times[0] * 16000 - 1e-6))
        assert clip.shape == (2, round(16 / Fraction(30000, 1001) * 16000))
        # AAC decodes noise with random numbers, so seeks change it.
        assert np.abs(clip - whole[:, start : start + clip.shape[1]]).mean() < 1e-3


def test_clips_are_cut_each_at_a_place_of_its_own() -> None:
    crop = sm.RandomResizedCrop()
    clips = sm.sample_clips(
        opened(),
        num_clips=3,
        num_frames=2,
        sampler="uniform",
        crops=crop,
        flips=[True, False, True],
        rng=5,
        width=16,
        height=16,
        layout="NCHW",
        dtype="float32",
    )
    assert np.asarray(clips.video).shape == (3, 2, 3, 16, 16)
    boxes = clips.video.boxes or ()
    assert len({*boxes}) == 3
    for clip, box, flip, indices in zip(
        np.asarray(clips.video), boxes, (True, False, True), clips.indices, strict=True
    ):
        alone = opened().load(
            indices, crops=box, flips=flip, width=16, height=16, layout="NCHW", dtype="float32"
        )
        np.testing.assert_array_equal(clip, np.asarray(alone))


@each(
    "options, error, match",
    [
        ({"sampler": "first"}, ValueError, "sampler must be"),
        ({"stride": 3}, ValueError, "stride= is for sampler='regular', not 'random'"),
        ({"num_clips": 0}, ValueError, "num_clips must be at least 1"),
        ({"step": 0}, ValueError, "step must be at least 1"),
        ({"on_short": None, "num_frames": 99}, ValueError, "on_short must be"),
        ({"frame_rate": 0}, ValueError, "frame_rate must be positive"),
        ({"sampler": "regular", "stride": 0}, ValueError, "stride must be at least 1"),
        *(
            ({"sampler": "regular", "stride": stride, "frame_rate": 10}, error, match)
            for stride, error, match in (
                (float("nan"), ValueError, "stride must be a number of seconds, not nan"),
                (float("inf"), ValueError, "stride must be finite"),
                (-0.1, ValueError, "stride must be above 0 seconds, not -0.1$"),
                (True, TypeError, "stride must be a number of seconds"),
            )
        ),
        ({"audio": True}, sm.DemuxError, "there is no audio stream"),
    ],
)
def test_wrong_options(options: Any, error: type[Exception], match: str) -> None:
    video = sm.VideoFile(make_video(index_planes(10, 64, 48), codec="ffv1"))
    with pytest.raises(error, match=match):
        sm.sample_clips(video, **{"num_frames": 2, **options})


def test_failed_clips_leave_nothing_leased() -> None:
    """Also while the error, whose traceback has the frames of the calls, is kept."""
    pool = sm.StoragePool(1 << 20, 1, pin_memory=False, on_exhausted="raise")
    video = sm.VideoFile(make_video(index_planes(10, 64, 48), codec="ffv1"))
    with pytest.raises(sm.DemuxError, match="there is no audio stream") as kept:
        sm.sample_clips(video, num_frames=2, audio=True, storage=pool)
    assert pool.num_free == 1, f"{kept} holds a buffer"


# The cache of opened videos.


def paths(folder: Path, count: int) -> list[Path]:
    found = [folder / f"{number}.mkv" for number in range(count)]
    for path in found:
        path.write_bytes(make_video(index_planes(4, 64, 48), codec="ffv1"))
    return found


def test_a_cache_keeps_the_videos_last_used(tmp_path: Path) -> None:
    first, second, third = paths(tmp_path, 3)
    cache = sm.VideoCache(2, filter_desc=None)
    video = cache.open(first)
    assert video[0].pix_fmt == "yuv420p"
    second_video = weakref.ref(cache.open(second))
    assert cache.open(str(first)) is video
    cache.open(third)
    gc.collect()
    assert (len(cache), second_video()) == (2, None)
    cache.open(second)
    # The first video was removed from the cache, but can still be used.
    assert cache.open(first) is not video
    assert frame_index(video[2].planes[0]) == 2
    with pytest.raises(TypeError, match="a VideoFile has an open file, and is not copied or pickl"):
        pickle.dumps(video)
    with pytest.raises(TypeError, match="a VideoCache opens paths and URLs, not bytes"):
        cache.open(first.read_bytes())  # type: ignore[arg-type]
    with cache.open(first) as closed:
        assert not closed.closed
    assert closed.closed
    assert frame_index(cache.open(first)[2].planes[0]) == 2
    copy = pickle.loads(pickle.dumps(cache))
    assert len(copy) == 0
    assert copy.open(first)[0].pix_fmt == "yuv420p"
    cache.clear()
    assert (len(cache), cache.nbytes) == (0, 0)


def test_a_video_that_nobody_holds_is_closed_at_once(tmp_path: Path) -> None:
    if not descriptors():
        pytest.skip("there is no /proc")
    cache, files = sm.VideoCache(1), paths(tmp_path, 5)
    gc.disable()
    try:
        for path in files:
            assert cache.open(path)[1].width == 64
        links = {Path(name) for _, name in descriptors()}
    finally:
        gc.enable()
    assert links & {*files} == {files[-1]}


def test_a_cache_keeps_so_many_bytes(tmp_path: Path) -> None:
    first, second, third = paths(tmp_path, 3)
    size = sm.VideoFile(first).nbytes
    assert size > 64 * 48 * 3 // 2
    cache = sm.VideoCache(max_bytes=2 * size)
    cache.open(first), cache.open(second), cache.open(third)
    assert (len(cache), cache.nbytes) == (2, 2 * size)
    small = sm.VideoCache(max_bytes=1)
    assert small.open(first) is small.open(first)
    with pytest.raises(ValueError, match="max_videos must be at least 1"):
        sm.VideoCache(0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'filter'"):
        sm.VideoCache(filter="hflip")
    with pytest.raises(sm.SourceError, match=r"No such file"):
        cache.open(tmp_path / "none.mkv")


# Packets.


def test_frames_of_packets_are_those_of_the_decoded_window() -> None:
    for codec, format in (("libx265", "mp4"), ("libx264", "mpegts"), ("libx264", "avi")):
        data = make_video(
            index_planes(40, 64, 48), codec=codec, format=format, max_b_frames=2, gop_size=8
        )
        for window in (None, (1.1, 2.6)):
            packets = pickle.loads(pickle.dumps(sm.demux_video(data, timestamp=window)))
            whole = sm.decode_packets(packets, None)
            wanted = [3, 14, 0, 3, -1]
            found = sm.sample_decode_video(packets, wanted, filter_desc=None)
            assert [frame.timestamp for frame in found] == [whole[k].timestamp for k in wanted]
            for frame, k in zip(found, wanted, strict=True):
                assert all(map(np.array_equal, frame.planes, whole[k].planes))
            with pytest.raises(IndexError, match=rf"no frame {len(whole)} among {len(whole)} "):
                sm.sample_decode_video(packets, [len(whole)])
    assert sm.sample_decode_video(packets, [0])[0].pix_fmt == "rgb24"
    with pytest.raises(sm.DecodeError, match="these packets continue a stream"):
        sm.sample_decode_video(packets[3:], [0])
    with pytest.raises(TypeError, match="takes VideoPackets, not bytes"):
        sm.sample_decode_video(data, [0])  # type: ignore[arg-type]


def test_a_path_in_place_of_a_video_is_answered_with_what_opens_it() -> None:
    with pytest.raises(TypeError, match=r"takes a VideoFile, not str; open it by sm\.VideoFile"):
        sm.sample_clips("movie.mp4", num_frames=2)  # type: ignore[arg-type]
