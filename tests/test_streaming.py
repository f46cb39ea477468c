"""Streaming in bounded chunks: no packet is lost or repeated, and decoding equals that of the whole."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from effort import each

import spdl_media as sm
from spdl_media.testing import (
    AudioTrack,
    VideoTrack,
    frame_index,
    index_planes,
    index_samples,
    make_audio,
    make_media,
    make_video,
)

FRAMES = index_planes(60, 64, 48)


def indices(chunks: Iterable[sm.VideoFrames]) -> list[int]:
    return [frame_index(frame.planes[0]) for frames in chunks for frame in frames]


def samples(chunks: Iterable[sm.AudioFrames]) -> np.ndarray:
    """Return packed samples, ``(samples, channels)``."""
    blocks = [chunk.planes[0] for frames in chunks for chunk in frames.chunks]
    return np.concatenate(blocks)


def raw_times(packets: Any) -> tuple[float, ...]:
    return packets.get_timestamps(raw=True)


@pytest.fixture(scope="module", params=["matroska", "mpegts", "mov", "nut"])
def both(request: pytest.FixtureRequest) -> bytes:
    """Stream 0: 6 s of video at 10 fps, a key frame every 8. Stream 1: 6 s of audio."""
    codec = "mp2" if request.param == "mpegts" else "pcm_s16le"
    video = VideoTrack(frames=FRAMES, codec="libx265", gop_size=8, max_b_frames=2)
    sound = AudioTrack(samples=index_samples(288000, 2), codec=codec)
    return make_media([video, sound], format=request.param)


@pytest.mark.parametrize("limits", [{"num_packets": 7}, {"duration": 0.9}, {"num_packets": 1}])
def test_chunks_of_one_stream_join_to_the_linear_decode(both: bytes, limits: Any) -> None:
    with sm.Demuxer(both) as demuxer:
        decoder = sm.VideoDecoder(demuxer.video_codec, filter_desc=None)
        chunks = list(demuxer.streaming_demux(0, **limits))
        assert all(isinstance(packets, sm.VideoPackets) for packets in chunks)
        assert len(chunks) > 1
        decoded = [frames for packets in chunks for frames in decoder.decode(packets)]
        decoded += decoder.flush()
        assert indices(decoded) == list(range(60))
        times = tuple(time for frames in decoded for time in frames.timestamps)
        linear = sm.decode_packets(demuxer.demux_video(), None)
        assert times == linear.timestamps


@pytest.mark.parametrize("limits", [{"num_packets": 5}, {"duration": 0.7}])
def test_chunks_of_several_streams_join_to_the_linear_decode(both: bytes, limits: Any) -> None:
    with sm.Demuxer(both) as demuxer:
        video = sm.VideoDecoder(demuxer.video_codec, filter_desc=None)
        audio = sm.AudioDecoder(demuxer.audio_codec, filter_desc="aformat=sample_fmts=s16")
        pictures: list[sm.VideoFrames] = []
        sounds: list[sm.AudioFrames] = []
        for chunk in demuxer.streaming_demux([0, 1], **limits):
            assert isinstance(chunk, dict)
            assert set(chunk) <= {0, 1}
            if 0 in chunk:
                pictures += video.decode(chunk[0])
            if 1 in chunk:
                sounds += audio.decode(chunk[1])
        pictures += video.flush()
        sounds += audio.flush()
        assert indices(pictures) == list(range(60))
        linear = sm.decode_packets(demuxer.demux_audio(), "aformat=sample_fmts=s16")
        assert np.array_equal(samples(sounds), samples([linear]))


def test_packets_are_counted_for_each_stream(both: bytes) -> None:
    with sm.Demuxer(both) as demuxer:
        whole = {0: demuxer.demux_video(), 1: demuxer.demux_audio()}
        chunks = list(demuxer.streaming_demux([0, 1], num_packets=4))
    for chunk in chunks[:-1]:
        assert max(len(packets) for packets in chunk.values()) == 4
    for index, packets in whole.items():
        got = sum(len(chunk[index]) for chunk in chunks if index in chunk)
        assert got == len(packets)


def test_a_chunk_of_one_stream_has_exactly_that_many(both: bytes) -> None:
    with sm.Demuxer(both) as demuxer:
        sizes = [len(packets) for packets in demuxer.streaming_demux(0, num_packets=16)]
    assert sizes == [16, 16, 16, 12]


def test_duration_is_cut_by_pts_on_the_containers_clock(both: bytes) -> None:
    """A frame shown in a chunk's time is in the chunk or, if it is coded later, in the next one."""
    with sm.Demuxer(both) as demuxer:
        chunks = list(demuxer.streaming_demux([0, 1], duration=1))
    assert 6 <= len(chunks) <= 7  # coded audio can be a little longer than the video
    for number, chunk in enumerate(chunks):
        for packets in chunk.values():
            assert max(raw_times(packets)) < number + 1
            # In decoding order, B-frames come after the frame that they refer to, so in the next chunk.
            assert min(raw_times(packets)) >= number - 0.3
    everything = sorted(itertools.chain(*(raw_times(chunk[0]) for chunk in chunks if 0 in chunk)))
    start = everything[0]  # in MPEG-TS, the audio begins 10 ms before the video
    assert 0 <= start < 0.02
    assert everything == pytest.approx([start + k / 10 for k in range(60)])


@each("duration", [1, 0.5, Fraction(1, 3), Decimal("0.25"), 100])
def test_durations(both: bytes, duration: Any) -> None:
    with sm.Demuxer(both) as demuxer:
        sizes = [len(packets) for packets in demuxer.streaming_demux(0, duration=duration)]
    assert sum(sizes) == 60
    assert max(sizes) <= max(1, 10 * float(duration)) + 3


def test_the_default_is_the_best_stream(both: bytes) -> None:
    with sm.Demuxer(both) as demuxer:
        assert sum(len(packets) for packets in demuxer.streaming_demux(duration=2)) == 60
    with sm.Demuxer(make_audio(index_samples(96000))) as demuxer:
        chunks = list(demuxer.streaming_demux(duration=0.5))
        assert all(isinstance(packets, sm.AudioPackets) for packets in chunks)
        decoder = sm.AudioDecoder(demuxer.audio_codec, filter_desc=None)
        decoded = [frames for packets in chunks for frames in decoder.decode(packets)]
        decoded += decoder.flush()
    assert np.array_equal(samples(decoded), index_samples(96000))


def test_a_stream_that_ends_early_does_not_hold_the_others_up() -> None:
    short = VideoTrack(frames=FRAMES[:10], codec="libx265", gop_size=8)
    sound = AudioTrack(samples=index_samples(8000 * 60), sample_rate=8000, codec="pcm_s16le")
    for format in ("mov", "matroska"):
        with sm.Demuxer(make_media([short, sound], format=format)) as demuxer:
            chunks = list(demuxer.streaming_demux([0, 1], duration=2))
        assert [len(chunk[0]) for chunk in chunks if 0 in chunk] == [10]
        assert len(chunks) == 30
        for number, chunk in enumerate(chunks):
            times = raw_times(chunk[1])
            assert 2 * number <= times[0] <= times[-1] < 2 * number + 2


def test_reading_stops_within_ten_seconds_of_a_chunk_that_waits() -> None:
    """One stream pauses: it cannot be known that its next packet is far away, but reading is bounded."""
    pause = VideoTrack(frames=FRAMES[:4], codec="libx265", pts=[0, 1, 2, 590])
    sound = AudioTrack(samples=index_samples(8000 * 60), sample_rate=8000, codec="pcm_s16le")
    data = make_media([pause, sound], format="matroska")
    file = io.BytesIO(data)
    with sm.Demuxer(file) as demuxer:
        chunks = demuxer.streaming_demux([0, 1], duration=1)
        next(chunks)
        assert file.tell() < len(data) * 0.3
        assert max(max(raw_times(chunk[1])) for chunk in [next(chunks)]) < 2
        rest = list(chunks)
    assert sum(len(chunk[0]) for chunk in rest if 0 in chunk) == 1
    assert len(rest) == 58


@pytest.mark.parametrize("jump", [100_000, 36])
def test_a_timestamp_that_jumps_ahead(jump: int) -> None:
    pts = [k if k < 30 else k + jump for k in range(60)]
    video = VideoTrack(frames=FRAMES, codec="libx265", gop_size=8, max_b_frames=2, pts=pts)
    with sm.Demuxer(make_media([video], format="matroska")) as demuxer:
        chunks = list(demuxer.streaming_demux(duration=1))
        decoder = sm.VideoDecoder(demuxer.video_codec, filter_desc=None)
        decoded = [frames for packets in chunks for frames in decoder.decode(packets)]
        decoded += decoder.flush()
    assert all(len(packets) <= 14 for packets in chunks)
    assert len(chunks) <= 8, "no chunk for each second of the gap"
    assert indices(decoded) == list(range(60))


@pytest.mark.parametrize("indices_", [0, [0, 1]])
def test_a_clock_that_is_set_back(indices_: Any) -> None:
    """Two recordings in sequence, of which the second starts at 0 again.

    If it starts more than a minute before the first one, FFmpeg takes that for an overflow and goes ahead.
    """
    late = VideoTrack(frames=FRAMES, codec="libx265", gop_size=8, pts=[k + 300 for k in range(60)])
    sound = AudioTrack(samples=index_samples(288000), codec="mp2", start=48000 * 30)
    early = VideoTrack(frames=FRAMES, codec="libx265", gop_size=8)
    first_sound = AudioTrack(samples=index_samples(288000), codec="mp2")
    data = make_media([late, sound], format="mpegts")
    data += make_media([early, first_sound], format="mpegts")
    with sm.Demuxer(data) as demuxer:
        chunks = list(demuxer.streaming_demux(indices_, duration=1))
    if indices_ == 0:
        assert sum(len(chunk) for chunk in chunks) == 120
        assert max(len(chunk) for chunk in chunks) <= 14
    else:
        assert sum(len(chunk[0]) for chunk in chunks if 0 in chunk) == 120
        assert max(len(chunk[0]) for chunk in chunks if 0 in chunk) <= 14
        assert max(len(chunk[1]) for chunk in chunks if 1 in chunk) <= 60


def test_streams_without_timestamps() -> None:
    data = make_video(FRAMES, codec="libx264", format="h264", gop_size=8, max_b_frames=2)
    with sm.Demuxer(data) as demuxer:
        chunks = list(demuxer.streaming_demux(duration=1))
        decoder = sm.VideoDecoder(demuxer.video_codec, filter_desc=None)
        decoded = [frames for packets in chunks for frames in decoder.decode(packets)]
        decoded += decoder.flush()
    assert [len(packets) for packets in chunks] == [10] * 6
    assert indices(decoded) == list(range(60))
    times = [time for frames in decoded for time in frames.timestamps]
    assert times == pytest.approx([k / 10 for k in range(60)])


def test_a_chunk_in_mid_group_is_for_video_decoder(both: bytes) -> None:
    with sm.Demuxer(both) as demuxer:
        first, second, *_ = demuxer.streaming_demux(0, num_packets=8)
        third = first[3:6]
    assert indices([sm.decode_packets(first, None)]) == list(range(8))
    with pytest.raises(sm.DecodeError, match="Give the chunks of a stream, in order, to one Video"):
        sm.decode_packets(third)
    if not second._packets[0].is_keyframe:  # muxers may shift key frames by the frames before
        with pytest.raises(sm.DecodeError, match="do not start with a key frame"):
            sm.decode_packets(second)


def test_chunks_that_start_with_a_key_frame_decode_alone(both: bytes) -> None:
    with sm.Demuxer(both) as demuxer:
        groups = list(demuxer.streaming_demux(0, num_packets=8))
        assert indices(sm.decode_packets(packets, None) for packets in groups) == list(range(60))


def test_another_read_ends_the_chunks(both: bytes) -> None:
    with sm.Demuxer(both) as demuxer:
        chunks = demuxer.streaming_demux(0, num_packets=5)
        next(chunks)
        demuxer.demux_video((1, 2))
        with pytest.raises(RuntimeError, match="used for another read while its chunks"):
            next(chunks)
        first, second = (demuxer.streaming_demux(0, num_packets=5) for _ in range(2))
        next(first)
        next(second)
        with pytest.raises(RuntimeError, match="open a second Demuxer"):
            next(first)


def test_chunks_after_close(both: bytes) -> None:
    with sm.Demuxer(both) as demuxer:
        begun, waiting = (demuxer.streaming_demux(0, num_packets=5) for _ in range(2))
        packets = next(begun)
    for chunks in (begun, waiting):
        with pytest.raises(ValueError, match="this Demuxer is closed"):
            next(chunks)
    assert len(packets) == 5
    assert sm.decode_packets(packets, num_frames=1).width == 64


def test_a_loop_left_half_way_leaves_the_demuxer_free(both: bytes) -> None:
    with sm.Demuxer(both) as demuxer:
        for _ in demuxer.streaming_demux(0, num_packets=3):
            break
        assert len(demuxer.demux_video()) == 60
        assert sum(len(p) for p in demuxer.streaming_demux(0, num_packets=3)) == 60


@each(
    "arguments, error, message",
    [
        ({}, ValueError, "exactly one of duration"),
        ({"duration": 1, "num_packets": 1}, ValueError, "exactly one of duration"),
        ({"duration": 0}, ValueError, "duration must be above 0 seconds, not 0"),
        ({"duration": float("nan")}, ValueError, "duration must be a number of seconds, not nan"),
        ({"duration": float("inf")}, ValueError, "duration must be finite, not inf"),
        ({"duration": [1]}, TypeError, "must be a number of seconds or a numeric string"),
        ({"num_packets": 0}, ValueError, "num_packets must be at least 1, not 0"),
        ({"num_packets": 2.0}, TypeError, "num_packets must be an int, not 2.0"),
        ({"num_packets": True}, TypeError, "num_packets must be an int, not True"),
        ({"indices": [], "duration": 1}, ValueError, "at least one stream index"),
        ({"indices": 7, "duration": 1}, sm.DemuxError, "there is no stream 7; the streams are"),
        ({"indices": [0, 7], "duration": 1}, sm.DemuxError, "there is no stream 7"),
        ({"indices": "0", "duration": 1}, TypeError, "a stream index must be an int, not '0'"),
        ({"indices": [0, 1.5], "duration": 1}, TypeError, "must be an int, not 1.5"),
        ({"indices": 1.5, "duration": 1}, TypeError, "must be an int, not 1.5"),
    ],
)
def test_arguments_are_checked_at_the_call(
    both: bytes, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with sm.Demuxer(both) as demuxer, pytest.raises(error, match=message):
        demuxer.streaming_demux(**arguments)


def test_another_stream_follows_a_flush_that_was_left_or_failed() -> None:
    video = make_video(index_planes(20, 64, 48), codec="libx264", format="mpegts", max_b_frames=2)
    audio = make_audio(index_samples(9000), codec="libopus", format="ogg", sample_rate=48000)
    for decoder_type, packets in (
        (sm.VideoDecoder, sm.demux_video(video)),
        (sm.AudioDecoder, sm.demux_audio(audio)),
    ):
        whole = len(sm.decode_packets(packets))
        decoder: Any = decoder_type(packets.codec, num_frames=whole - 1)
        found = sum(map(len, decoder.decode(packets)))
        found += len(next(decoder.flush()))
        found += sum(map(len, decoder.decode(packets))) + sum(map(len, decoder.flush()))
        assert found == 2 * whole
    cut, packets = sm.demux_video(video[: len(video) * 2 // 3]), sm.demux_video(video)
    for end in ("flush", "decode"):
        decoder = sm.VideoDecoder(cut.codec)
        list(decoder.decode(cut))
        # Packets that do not continue the last ones flush those first.
        frames = decoder.flush() if end == "flush" else decoder.decode(packets[:10])
        with pytest.raises(sm.DecodeError, match="the frame is damaged"):
            list(frames)
        rest = packets[10:] if end == "decode" else packets
        assert sum(map(len, decoder.decode(rest))) + sum(map(len, decoder.flush())) == 20
