"""Damaged, malformed and truncated video: kept, dropped and skipped frames, and false alarms."""

from __future__ import annotations

import io
import struct
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from damage import decode_video, packet_spans, pictures

import spdl_media as sm
from spdl_media.testing import make_video

HEVC = {"x265-params": "qp=23:log-level=none:pools=none"}


def modes(source: object) -> dict[str, tuple[int, int, int]]:
    """Return the numbers of frames, of marked frames and of dropped frames, by mode."""
    packets = sm.demux_video(source)
    counts = {}
    for mode in ("keep", "drop"):
        frames = sm.decode_packets(packets, None, sm.decode_config(on_corrupt=mode))
        counts[mode] = (len(frames), sum(frames.is_corrupt), frames.num_dropped)
        assert frames.num_skipped == 0
    return counts


def test_real_stream_damaged_in_the_middle(media_dir: Path) -> None:
    path = media_dir / "video" / "corrupt_middle.ts"
    with pytest.raises(
        sm.DecodeError, match=r"damaged mpeg4 data at 0\.700 s.*on_corrupt"
    ) as caught:
        sm.decode_packets(sm.demux_video(path))
    assert caught.value.source == str(path)
    assert caught.value.pts_seconds == 0.7
    assert caught.value.packet_index == 7
    assert modes(path) == {"keep": (30, 13, 0), "drop": (17, 0, 13)}


def damaged_stream(*, is_odd: bool = False) -> bytes:
    """Make MPEG-4 in a transport stream, with noise in frames 10 to 19 of 30."""
    frames = pictures(30)
    frames = [one[:-1, :-1] for one in frames] if is_odd else frames
    data = make_video(frames, codec="mpeg4", format="mpegts", gop_size=30)
    packets = [data[n : n + 188] for n in range(0, len(data), 188)]
    starts = [n for n, p in enumerate(packets) if p[1] & 0x5F == 0x41 and p[2] == 0]
    assert len(starts) == 30
    rng = np.random.default_rng(5)
    for picture in range(10, 20):
        # Overwrite the packet after the one with the frame's header, except its first 4 bytes.
        place = starts[picture] + 1
        packets[place] = packets[place][:20] + rng.bytes(168)
    return b"".join(packets)


def test_made_stream_damaged_in_the_middle() -> None:
    data = damaged_stream()
    counts = modes(data)
    frames, marked, dropped = counts["keep"]
    assert (frames, dropped) == (30, 0)
    assert 5 <= marked <= 10
    assert counts["drop"] == (30 - marked, 0, marked)
    with pytest.raises(sm.DecodeError, match="the decoder reports that the frame is damaged"):
        decode_video(data)
    kept = decode_video(data, on_corrupt="keep")
    assert all(10 <= n < 20 for n, mark in enumerate(kept.is_corrupt) if mark)
    dropped_times = set(kept.timestamps) - set(decode_video(data, on_corrupt="drop").timestamps)
    assert dropped_times == {
        time for time, mark in zip(kept.timestamps, kept.is_corrupt, strict=True) if mark
    }


def test_marks_pass_through_filters_and_slices() -> None:
    packets = sm.demux_video(damaged_stream())
    config = sm.decode_config(on_corrupt="keep")
    native = sm.decode_packets(packets, None, config)
    scaled = sm.decode_packets(packets, "scale=32:32,format=rgb24", config)
    assert scaled.is_corrupt == native.is_corrupt
    assert native[8:14].is_corrupt == native.is_corrupt[8:14]


def test_marks_pass_through_the_copy_of_an_odd_size() -> None:
    """A row and a column are added for the chroma, in a new frame, which has no flag."""
    packets = sm.demux_video(damaged_stream(is_odd=True))
    config = sm.decode_config(on_corrupt="keep")
    marks = sm.decode_packets(packets, None, config).is_corrupt
    assert any(marks)
    desc = sm.get_video_filter_desc(quality="accurate")
    assert sm.decode_packets(packets, desc, config).is_corrupt == marks


def test_audio_that_the_decoder_marks() -> None:
    """That of E-AC-3 gives damaged frames without an error."""
    file, rng = io.BytesIO(), np.random.default_rng(3)
    sm.save_audio(file, rng.uniform(-0.5, 0.5, (1, 24000)), 48000, format="eac3")
    whole, kinds = sm.load_audio(file.getvalue()).array, ("keep", "drop", "raise")
    keep, drop, fail = (sm.decode_config(on_corrupt=kind) for kind in kinds)
    for place in range(5000, 8000, 7):
        data = bytearray(file.getvalue())
        data[place : place + 8] = rng.bytes(8)
        packets = sm.demux_audio(bytes(data))
        kept = sm.decode_packets(packets, None, keep)
        if any(kept.is_corrupt):
            break
    assert (len(kept), sum(kept.is_corrupt)) == (whole.shape[1], 1)
    frames = sm.decode_packets(packets, None, drop)
    assert (whole.shape[1] - len(frames), frames.num_dropped) == (1536, 1)
    with pytest.raises(sm.DecodeError, match="the decoder reports that the frame is damaged"):
        sm.decode_packets(packets, None, fail)


def test_window_before_the_damage_is_complete() -> None:
    packets = sm.demux_video(damaged_stream(), timestamp=(0, 0.9))
    assert len(sm.decode_packets(packets, None)) == 9


def test_a_window_that_ends_at_the_damage_by_a_sum_of_floats_is_complete() -> None:
    data = damaged_stream()
    damaged = decode_video(data, on_corrupt="keep").is_corrupt.index(True)
    end = Fraction(damaged, 10) + Fraction(1, 10**12)
    packets = sm.demux_video(data, timestamp=(0, end))
    assert len(sm.decode_packets(packets, None)) == damaged


def test_streaming_decoder_keeps_and_drops_alike() -> None:
    data = damaged_stream()
    for mode, (count, marked, dropped) in modes(data).items():
        with sm.Demuxer(data) as demuxer:
            decoder = sm.VideoDecoder(
                demuxer.video_codec,
                filter_desc=None,
                decode_config=sm.decode_config(on_corrupt=mode),
            )
            chunks = [
                frames
                for packets in demuxer.streaming_demux(num_packets=4)
                for frames in decoder.decode(packets)
            ]
            chunks += decoder.flush()
        assert sum(map(len, chunks)) == count
        assert sum(sum(frames.is_corrupt) for frames in chunks) == marked
        assert sum(frames.num_dropped for frames in chunks) == dropped


# A recovery point whose payload claims 200 bytes and has one.
MALFORMED_SEI = b"\x06\x06\xc8\xff\x80"


def with_malformed_sei(data: bytes) -> bytes:
    """Insert the message before each picture of an H.264 stream in Annex B format."""
    output = io.BytesIO()
    with av.open(io.BytesIO(data)) as source, av.open(output, "w", format="mpegts") as sink:
        stream = sink.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if not packet.size:
                continue
            changed = av.Packet(b"\0\0\0\1" + MALFORMED_SEI + bytes(packet))
            changed.pts, changed.dts, changed.time_base = packet.pts, packet.dts, packet.time_base
            changed.is_keyframe, changed.stream = packet.is_keyframe, stream
            sink.mux(changed)
    return output.getvalue()


def test_malformed_sei_in_every_image_is_no_damage() -> None:
    """Real cameras send such messages; every frame decodes."""
    clean = make_video(
        pictures(40) * 10, codec="libx264", format="mpegts", max_b_frames=2, options={"qp": "30"}
    )
    data = with_malformed_sei(clean)
    assert data.count(MALFORMED_SEI) == 400
    frames = decode_video(data)
    assert len(frames) == 400
    assert not any(frames.is_corrupt)
    assert (frames.num_skipped, frames.num_dropped) == (0, 0)


STREAMS = {
    "h264": ("libx264", {"qp": "23"}),
    "hevc": ("libx265", HEVC),
    "mpeg2": ("mpeg2video", {}),
    "mpeg4": ("mpeg4", {}),
}


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("mode", ["raise", "keep", "drop"])
def test_transport_stream_that_begins_in_mid_group(name: str, mode: str) -> None:
    codec, options = STREAMS[name]
    data = make_video(
        pictures(),
        codec=codec,
        format="mpegts",
        gop_size=8,
        max_b_frames=2,
        frame_rate=25,
        options=options,
    )
    whole = decode_video(data)
    skipped = 0
    for packet in (8, 20, 44):
        frames = decode_video(data[188 * packet :], on_corrupt=mode)
        assert 8 <= len(frames) <= 16
        skipped += frames.num_skipped
        assert len(frames) + frames.num_skipped <= 24
        assert frames.num_dropped == 0
        assert not any(frames.is_corrupt)
        # The remaining frames are the last ones of the whole stream, bit for bit.
        tail = whole[len(whole) - len(frames) :]
        assert all(same(one, other) for one, other in zip(frames, tail, strict=True))
    assert skipped > 0


def same(one: sm.ImageFrames, other: sm.ImageFrames) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one.planes, other.planes, strict=True))


@pytest.mark.parametrize("format", ["mp4", "matroska", "mpegts"])
@pytest.mark.parametrize("codec", ["libx264", "libx265"])
def test_leading_pictures_after_a_seek_into_an_open_group(codec: str, format: str) -> None:
    options = HEVC if codec == "libx265" else {"qp": "23"}
    data = make_video(
        pictures(40),
        codec=codec,
        format=format,
        gop_size=9,
        max_b_frames=2,
        open_gop=True,
        options=options,
    )
    whole = decode_video(data)
    assert len(whole) == 40
    for start in (0.3, 0.7, 0.8, 0.9, 1.0, 1.7, 1.8, 2.6):
        frames = sm.decode_packets(sm.demux_video(data, timestamp=(start, None)), None)
        expected = [n for n, time in enumerate(whole.timestamps) if time >= start - 1e-6]
        assert len(frames) == len(expected)
        assert not any(frames.is_corrupt)
        assert all(same(frames[k], whole[n]) for k, n in enumerate(expected))


@pytest.mark.parametrize("codec", ["libx264", "libx265"])
def test_stream_that_begins_with_an_open_group_skips_its_leading_pictures(codec: str) -> None:
    options = HEVC if codec == "libx265" else {"qp": "23"}
    data = make_video(
        pictures(40),
        codec=codec,
        format="mpegts",
        gop_size=9,
        max_b_frames=2,
        open_gop=True,
        options=options,
    )
    packets = sm.demux_video(data)
    av_keys = [n for n, packet in enumerate(packets._packets) if packet.is_keyframe]
    first = av_keys[1]
    leading = sum(packet.pts < packets._packets[first].pts for packet in packets._packets[first:])
    assert leading > 0, "the group must be open"
    frames = sm.decode_packets(packets[first:], None)
    assert len(frames) + frames.num_skipped == len(packets) - first
    assert frames.num_skipped == leading
    assert not any(frames.is_corrupt)


def test_packets_of_damaged_streams_are_decoded_alike_each_time() -> None:
    packets = sm.demux_video(damaged_stream())
    config = sm.decode_config(on_corrupt="keep")
    first = sm.decode_packets(packets, None, config)
    assert first.is_corrupt == sm.decode_packets(packets, None, config).is_corrupt


def test_spans_are_those_of_the_coded_data() -> None:
    data = make_video(pictures(3), codec="ffv1")
    (start, end), *_ = packet_spans(data, "video")
    assert data[start:end] == bytes(sm.demux_video(data)._packets[0])
    assert struct.unpack_from(">I", data)[0] == 0x1A45DFA3


def test_one_frame_says_of_itself_what_the_video_says_of_it() -> None:
    """FFmpeg's frame does not show that a checksum failed; frames of this library do, also single ones."""
    data = bytearray(make_video(pictures(3), codec="ffv1"))
    _, (start, end), _ = packet_spans(bytes(data), "video")
    data[(start + end) // 2] ^= 1
    packets, keep = sm.demux_video(data), sm.decode_config(on_corrupt="keep")
    frames = sm.decode_packets(packets, None, keep)
    assert frames.is_corrupt == (False, True, False)
    assert [frame.is_corrupt for frame in frames] == [False, True, False]
    assert [frames[index].is_corrupt for index in range(3)] == [False, True, False]
    # Each frame is shown twice.
    twice = sm.decode_packets(packets, sm.get_video_filter_desc(frame_rate=20), keep)
    assert twice.is_corrupt == (False, False, True, True, False, False)
