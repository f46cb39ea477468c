"""Decoding video: complete windows, chunks of exact length, and no unnecessary work."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import av
import numpy as np
import pytest
from decoded import indices

import spdl_media as sm

# Private: which packets are decoded for a window is visible otherwise only in the time.
from spdl_media._picture_decoder import PictureDecoder
from spdl_media.testing import (
    VideoTrack,
    index_frames,
    index_planes,
    index_samples,
    make_audio,
    make_media,
    make_video,
)

FRAMES = index_planes(40, 64, 48)


def joined(chunks: Iterable[sm.VideoFrames]) -> list[int]:
    return [index for frames in chunks for index in indices(frames)]


@pytest.fixture(scope="module")
def clip() -> bytes:
    return make_video(FRAMES, codec="libx265", format="mp4", gop_size=8, max_b_frames=2)


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int | None]]:
    """Return a list to which the pts of each decoded packet is added."""
    given: list[int | None] = []
    decode = PictureDecoder.decode

    def spy(self: PictureDecoder, packet: Any) -> Iterator[av.VideoFrame]:
        if packet is not None:
            given.append(packet.pts)
        return decode(self, packet)

    monkeypatch.setattr(PictureDecoder, "decode", spy)
    return given  # type: ignore[return-value]


@pytest.mark.parametrize("pix_fmt", ["yuv420p", "yuv444p", "gray", "yuv420p10le", "gbrp10le"])
def test_native_planes_are_what_was_encoded(pix_fmt: str) -> None:
    planes = index_planes(12, 62, 46, pix_fmt)
    data = make_video(planes, codec="ffv1", pix_fmt=pix_fmt)
    frames = sm.decode_packets(sm.demux_video(data), None)
    assert (frames.pix_fmt, frames.width, frames.height) == (pix_fmt, 62, 46)
    for got, want in zip(frames, planes, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(got.planes, want, strict=True))


def test_the_default_is_rgb24() -> None:
    rgb = index_frames(5, 64, 48)
    data = make_video(rgb, codec="libx264rgb", pix_fmt="rgb24")
    frames = sm.decode_packets(sm.demux_video(data))
    assert frames.pix_fmt == "rgb24"
    assert np.array_equal(np.stack([frame.planes[0] for frame in frames]), rgb)


def test_packets_are_not_consumed(clip: bytes) -> None:
    packets = sm.demux_video(clip, timestamp=(0.5, 2))
    for _ in range(3):
        assert indices(sm.decode_packets(packets, None)) == list(range(5, 20))
    small = sm.get_video_filter_desc(scale_width=32, scale_height=24, pix_fmt="yuv420p")
    frames = sm.decode_packets(packets, filter_desc=small)
    assert (len(frames), frames.width, frames.height, frames.pix_fmt) == (15, 32, 24, "yuv420p")


def test_the_window_is_cut_before_the_filter(clip: bytes) -> None:
    packets = sm.demux_video(clip, timestamp=(0.5, 2.5))
    halved = sm.decode_packets(packets, "fps=5,format=yuv420p")
    assert len(halved) == 10
    assert halved.timestamps[0] == pytest.approx(0.5, abs=0.11)
    reverse = sm.decode_packets(packets, "reverse,format=yuv420p")
    assert indices(reverse) == list(range(24, 4, -1))


@pytest.mark.parametrize("count", [1, 2, 7, 40, 41, 1000])
def test_num_frames_gives_at_most_as_many(clip: bytes, count: int) -> None:
    packets = sm.demux_video(clip)
    assert indices(sm.decode_packets(packets, None, num_frames=count)) == list(
        range(min(count, 40))
    )
    cut = sm.demux_video(clip, timestamp=(1, 3))
    assert indices(sm.decode_packets(cut, None, num_frames=count)) == list(
        range(10, 10 + min(count, 20))
    )


def test_num_frames_decodes_no_more_than_it_needs(clip: bytes, handed: list[int]) -> None:
    packets = sm.demux_video(clip)
    sm.decode_packets(packets, None, num_frames=4)
    assert len(handed) <= 4 + packets.codec.reorder_depth + 1
    handed.clear()
    sm.decode_packets(sm.demux_video(clip, timestamp=(1.6, None)), num_frames=1)
    assert len(handed) <= 4 + 1, "one key frame, and the frames that the decoder waits for"


def test_num_frames_does_not_touch_what_lies_behind(clip: bytes) -> None:
    packets = pickle.loads(pickle.dumps(sm.demux_video(clip)))
    broken = av.Packet(b"\xff" * 500)
    good = packets._packets
    damaged = packets.with_packets([*good[:20], *[broken] * 20], packets.codec)
    assert indices(sm.decode_packets(damaged, None, num_frames=12)) == list(range(12))
    with pytest.raises(sm.DecodeError):
        sm.decode_packets(damaged, None)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (0, ValueError, "num_frames must be at least 1, not 0"),
        (-3, ValueError, "num_frames must be at least 1, not -3"),
        (1.0, TypeError, "num_frames must be an int, not 1.0"),
        (True, TypeError, "num_frames must be an int, not True"),
    ],
)
def test_num_frames_is_checked(clip: bytes, value: Any, error: Any, message: str) -> None:
    packets = sm.demux_video(clip)
    with pytest.raises(error, match=message):
        sm.decode_packets(packets, num_frames=value)
    with pytest.raises(error, match=message):
        sm.VideoDecoder(packets.codec, num_frames=value)


def test_a_window_without_frames_gives_empty_frames(clip: bytes) -> None:
    frames = sm.decode_packets(sm.demux_video(clip, timestamp=(100, 200)))
    assert len(frames) == 0
    assert frames.timestamps == ()
    with pytest.raises(ValueError, match=r"no frame in the window \[100, 200\)"):
        _ = frames.width


@pytest.mark.parametrize("num_frames", [1, 3, 8, 40, 64])
def test_chunks_hold_exactly_num_frames(clip: bytes, num_frames: int) -> None:
    with sm.Demuxer(clip) as demuxer:
        decoder = sm.VideoDecoder(demuxer.video_codec, filter_desc=None, num_frames=num_frames)
        chunks = [
            frames
            for packets in demuxer.streaming_demux(num_packets=7)
            for frames in decoder.decode(packets)
        ]
        assert all(len(frames) == num_frames for frames in chunks)
        rest = list(decoder.flush())
    assert all(len(frames) == num_frames for frames in rest[:-1])
    assert joined(chunks + rest) == list(range(40))


@pytest.mark.parametrize("num_frames", [None, 5])
def test_abandoned_iterations_lose_nothing(clip: bytes, num_frames: int | None) -> None:
    packets = sm.demux_video(clip)
    decoder = sm.VideoDecoder(packets.codec, filter_desc=None, num_frames=num_frames)
    got: list[sm.VideoFrames] = []
    for start in range(0, 40, 10):
        part = packets[start : start + 10]
        if start == 10:
            decoder.decode(part)  # not iterated at all
            continue
        for frames in decoder.decode(part):
            got.append(frames)
            break
    rest = decoder.flush()
    got.append(next(rest))
    got += decoder.flush()
    assert joined(got) == list(range(40))


def test_packets_are_taken_when_decode_is_called(clip: bytes) -> None:
    packets = sm.demux_video(clip)
    decoder = sm.VideoDecoder(packets.codec, filter_desc=None, num_frames=10)
    first = decoder.decode(packets[:20])
    second = decoder.decode(packets[20:])
    assert joined([*second, *first, *decoder.flush()]) == list(range(40))


def test_only_what_is_asked_for_is_decoded(clip: bytes, handed: list[int]) -> None:
    packets = sm.demux_video(clip)
    decoder = sm.VideoDecoder(packets.codec, num_frames=4)
    chunks = decoder.decode(packets)
    assert handed == []
    assert len(next(chunks)) == 4
    assert len(handed) <= 4 + packets.codec.reorder_depth + 1


def test_a_decoder_serves_another_stream_after_flush(clip: bytes) -> None:
    packets = sm.demux_video(clip)
    decoder = sm.VideoDecoder(packets.codec, filter_desc=None, num_frames=16)
    for _ in range(3):
        chunks = [*decoder.decode(packets), *decoder.flush()]
        assert [len(frames) for frames in chunks] == [16, 16, 8]
        assert joined(chunks) == list(range(40))
        assert list(decoder.flush()) == []


def test_a_stream_in_which_no_packet_is_a_key_frame_is_reported(clip: bytes) -> None:
    packets = sm.demux_video(clip)
    decoder = sm.VideoDecoder(packets.codec)
    deltas = packets.with_packets(packets._packets[1:5], packets.codec)
    assert not any(packet.is_keyframe for packet in deltas._packets)
    assert list(decoder.decode(deltas)) == []
    with pytest.raises(sm.DecodeError, match="none of the 4 packets is marked as a key frame"):
        list(decoder.flush())
    assert joined([*decoder.decode(packets), *decoder.flush()]) == list(range(40))


def test_windows_one_after_the_other_do_not_cut_each_other(clip: bytes) -> None:
    """Frames that the decoder still holds belong to the window before and are cut at its end."""
    with sm.Demuxer(clip) as demuxer:
        decoder = sm.VideoDecoder(demuxer.video_codec, filter_desc=None)
        windows = ((0.3, 0.9), (2.1, 2.5), (2.5, 2.8), (0, 0.2))
        got = [f for window in windows for f in decoder.decode(demuxer.demux_video(window))]
        got += decoder.flush()
    assert joined(got) == [*range(3, 9), *range(21, 25), *range(25, 28), 0, 1]


def test_the_filter_serves_the_whole_stream(clip: bytes) -> None:
    packets = sm.demux_video(clip)
    decoder = sm.VideoDecoder(packets.codec, filter_desc="fps=5,format=yuv420p", num_frames=6)
    parts = [packets[start : start + 9] for start in range(0, 40, 9)]
    chunks = [frames for part in parts for frames in decoder.decode(part)]
    chunks += decoder.flush()
    linear = sm.decode_packets(packets, "fps=5,format=yuv420p")
    assert joined(chunks) == indices(linear)
    assert [len(frames) for frames in chunks] == [6, 6, 6, 2]


def test_decoders_take_their_own_kind(clip: bytes) -> None:
    packets = sm.demux_video(clip)
    sound = sm.demux_audio(make_audio(index_samples(4800)))
    with pytest.raises(TypeError, match="VideoDecoder takes the codec of video packets, not"):
        sm.VideoDecoder(sound.codec)  # type: ignore[arg-type]
    decoder = sm.VideoDecoder(packets.codec)
    with pytest.raises(TypeError, match="VideoDecoder decodes VideoPackets, not AudioPackets"):
        decoder.decode(sound)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="decode_packets takes AudioPackets, VideoPackets or"):
        sm.decode_packets(b"bytes")  # type: ignore[call-overload]


def test_damage_is_said_once_and_the_rest_can_be_had(clip: bytes) -> None:
    packets = sm.demux_video(clip)
    good = packets._packets
    broken = av.Packet(b"\xff" * 500)
    broken.pts, broken.dts, broken.time_base = good[20].pts, good[20].dts, packets.time_base
    damaged = packets.with_packets([*good[:20], broken, *good[24:]], packets.codec)
    with pytest.raises(sm.DecodeError, match=r"damaged hevc data .*\(packet 20\)") as raised:
        sm.decode_packets(damaged)
    assert raised.value.packet_index == 20
    assert raised.value.pts_seconds is not None
    decoder = sm.VideoDecoder(packets.codec, filter_desc=None)
    with pytest.raises(sm.DecodeError, match="packet 20"):
        list(decoder.decode(damaged))
    rest = [*decoder.decode(packets[:0]), *decoder.flush()]
    # Neither frames before the damage nor those after it are lost.
    assert set(range(16)) | set(range(24, 40)) <= set(joined(rest))


def test_a_change_of_size_in_mid_stream() -> None:
    small = make_video(index_planes(5, 64, 48), codec="libx264", format="h264")
    large = make_video(index_planes(5, 96, 80), codec="libx264", format="h264")
    packets = sm.demux_video(small + large)
    sizes = [(frame.width, frame.height) for frame in sm.decode_packets(packets, None)]
    assert sizes == [(64, 48)] * 5 + [(96, 80)] * 5
    scaled = sm.decode_packets(packets, sm.get_video_filter_desc(scale_width=32, scale_height=32))
    assert [(frame.width, frame.height) for frame in scaled] == [(32, 32)] * 10


def test_leading_pictures_of_an_open_group_are_no_damage() -> None:
    for format in ("mp4", "matroska", "mpegts"):
        data = make_video(
            FRAMES, codec="libx265", format=format, gop_size=8, max_b_frames=2, open_gop=True
        )
        packets = sm.demux_video(data)
        keys = [k for k, packet in enumerate(packets._packets) if packet.is_keyframe]
        cut = packets[keys[2] :]
        decoder = sm.VideoDecoder(packets.codec, filter_desc=None)
        chunks = [*decoder.decode(cut), *decoder.flush()]
        first = joined(chunks)[0]
        assert joined(chunks) == list(range(first, 40))
        assert 10 <= first <= 17


def test_a_stream_cut_in_mid_group_counts_what_it_skips() -> None:
    data = make_video(FRAMES, codec="libx264", format="mpegts", gop_size=8)
    packets = sm.demux_video(data)
    frames = sm.decode_packets(packets.with_packets(packets._packets[3:], packets.codec), None)
    assert indices(frames) == list(range(8, 40))
    assert frames.num_skipped == 5


def test_timestamps_survive_two_clocks() -> None:
    """``frames.pts`` are FFmpeg's; ``timestamps`` are relative to the container's start."""
    track = VideoTrack(frames=FRAMES, codec="libx264", pts=[100 + k for k in range(40)], gop_size=8)
    packets = sm.demux_video(make_media([track], format="mpegts"), timestamp=(1, 1.2))
    frames = sm.decode_packets(packets, None)
    assert frames.timestamps == (1.0, 1.1)
    assert [pts * frames.time_base for pts in frames.pts if pts] == [11, pytest.approx(11.1)]


def test_two_threads_in_one_decoder(clip: bytes) -> None:
    inside, leave = threading.Event(), threading.Event()
    packets = sm.demux_video(clip)
    decoder = sm.VideoDecoder(packets.codec)
    push = decoder._push

    def slow(packet: Any) -> None:
        inside.set()
        leave.wait(10)
        push(packet)

    decoder._push = slow  # type: ignore[method-assign]
    results: list[int] = []
    thread = threading.Thread(
        target=lambda: results.append(sum(len(f) for f in decoder.decode(packets)))
    )
    thread.start()
    assert inside.wait(10)
    with pytest.raises(RuntimeError, match="this VideoDecoder is in use by another thread"):
        decoder.decode(packets)
    with pytest.raises(RuntimeError, match="this VideoDecoder is in use by another thread"):
        next(decoder.flush())
    leave.set()
    thread.join(10)
    assert results[0] + sum(len(frames) for frames in decoder.flush()) == 40


def test_reserved_numbers_of_colours_mean_nothing() -> None:
    """ProRes encoders write the reserved number 0 for unknown colours."""
    pictures = [
        tuple(planes[0].astype(np.uint16) * 4 for _ in range(3))
        for planes in index_planes(3, 64, 48)
    ]
    data = make_video(pictures, codec="prores", format="mov", pix_fmt="yuv444p10le")
    stated, reserved = b"\xc0\x00\x02\x02\x02", b"\xc0\x00\x00\x03\x02"
    assert data.count(stated) == len(pictures)
    found, expected = (sm.load_video(file) for file in (data.replace(stated, reserved), data))
    assert np.array_equal(found.array, expected.array)
