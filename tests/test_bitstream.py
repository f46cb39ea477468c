"""Bitstream filters rewrite packets as FFmpeg's own tools do, and do not modify their input."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from audio_oracle import clip, samples_of
from av.bitstream import BitStreamFilterContext
from effort import each

import spdl_media as sm
from spdl_media.testing import index_planes, make_image, make_video


def _clip(codec: str, format: str = "mp4") -> bytes:
    frames = index_planes(20, 64, 48)
    return make_video(frames, codec=codec, format=format, max_b_frames=2, gop_size=8)


CASES = [("libx264", "h264_mp4toannexb"), ("libx265", "hevc_mp4toannexb")]


def _data(packets: Any) -> list[tuple[bytes, int | None, int | None, bool]]:
    return [(bytes(p), p.pts, p.dts, p.is_keyframe) for p in packets._packets]


def _filtered_by_pyav(data: Any, bsf: str) -> list[tuple[bytes, int | None, int | None, bool]]:
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.best("video")
        context = BitStreamFilterContext(bsf, stream)
        packets = [
            out
            for packet in container.demux(stream)
            if packet.size
            for out in context.filter(packet)
        ]
        return [(bytes(p), p.pts, p.dts, p.is_keyframe) for p in packets]


def _planes(packets: Any) -> list[bytes]:
    frames = sm.decode_packets(packets, filter_desc=None)
    return [plane.tobytes() for frame in frames for plane in frame.planes]


@pytest.mark.parametrize("format", ["mp4", "matroska"])
@pytest.mark.parametrize(("codec", "bsf"), CASES)
def test_annex_b_equals_pyav(codec: str, bsf: str, format: str) -> None:
    data = _clip(codec, format)
    packets = sm.demux_video(data)
    before = _data(packets)
    filtered = sm.apply_bsf(packets, bsf)
    assert _data(filtered) == _filtered_by_pyav(data, bsf)
    assert bytes(filtered._packets[0])[:4] == b"\0\0\0\1"
    assert filtered.codec.extradata is not None
    assert filtered.codec.extradata[:3] in (b"\0\0\0", b"\0\0\1")
    assert _planes(filtered) == _planes(packets)
    assert _data(packets) == before
    assert filtered.get_timestamps() == packets.get_timestamps()


def test_real_h264(media_dir: Path) -> None:
    for name in ("nasa_13013.mp4", "h265_video.mp4"):
        data = (media_dir / "video" / name).read_bytes()
        packets = sm.demux_video(data)
        bsf = "hevc_mp4toannexb" if packets.codec.name == "hevc" else "h264_mp4toannexb"
        filtered = sm.apply_bsf(packets, bsf)
        assert _data(filtered) == _filtered_by_pyav(data, bsf)
        assert _planes(filtered[:40]) == _planes(packets[:40])


def test_filtered_packets_are_packets() -> None:
    packets = sm.apply_bsf(
        sm.demux_video(_clip("libx264"), timestamp=(0.9, 1.3)), "h264_mp4toannexb"
    )
    frames = sm.decode_packets(packets)
    np.testing.assert_allclose(frames.timestamps, (0.9, 1.0, 1.1, 1.2))
    assert isinstance(packets, sm.VideoPackets)
    assert _planes(pickle.loads(pickle.dumps(packets))) == _planes(packets)


def _address(packet: Any) -> int:
    return np.frombuffer(packet, np.uint8).ctypes.data


def test_filters_that_write_into_data_do_not_touch_what_they_are_given() -> None:
    packets = sm.demux_video(make_video(index_planes(6, 64, 48), codec="libx264", format="mp4"))
    before = [bytes(packet) for packet in packets._packets]
    noisy = sm.apply_bsf(packets, "noise=amount=10")
    assert [bytes(packet) for packet in packets._packets] == before
    assert [bytes(packet) for packet in noisy._packets] != before
    assert len(sm.decode_packets(packets)) == 6


def test_priming_and_edit_lists_survive() -> None:
    packets = sm.demux_audio(clip("aac", "mp4", seconds=1))
    same = sm.apply_bsf(packets, "null")
    for a, b in zip(
        sm.decode_packets(packets, filter_desc=None).chunks,
        sm.decode_packets(same, filter_desc=None).chunks,
        strict=True,
    ):
        np.testing.assert_array_equal(a.planes[0], b.planes[0])


def test_commas_in_quotes_do_not_part_filters() -> None:
    packets = sm.demux_audio(clip("libmp3lame", "mp4", seconds=1))
    chopped = sm.apply_bsf(packets, "noise=drop='eq(n,3)'")
    assert len(chopped) == len(packets) - 1
    assert len(sm.decode_packets(chopped, filter_desc=None)) > 0
    whole = sm.decode_packets(packets, filter_desc=None)
    # Missing packets are a gap, and later packets keep their times.
    late = sm.decode_packets(chopped, filter_desc=None)
    np.testing.assert_array_equal(samples_of(late)[:, -1152:], samples_of(whole)[:, -1152:])


def test_several_filters_and_options() -> None:
    packets = sm.demux_video(_clip("libx264"))
    filtered = sm.apply_bsf(packets, "h264_mp4toannexb,h264_metadata=video_full_range_flag=1")
    assert sm.decode_packets(packets, filter_desc=None).color_range != "pc"
    assert sm.decode_packets(filtered, filter_desc=None).color_range == "pc"


@each(
    "bsf, said",
    [
        ("h264_mp4toannexx", "'h264_mp4toannexx' cannot be used .*: Bitstream filter not found"),
        ("null,nothing", "'null,nothing' cannot be used .*: Bitstream filter not found"),
        ("", "bitstream filter '' cannot be used"),
        ("hevc_mp4toannexb", "'hevc_mp4toannexb' cannot be used on h264 packets"),
        ("aac_adtstoasc", "'aac_adtstoasc' cannot be used on h264 packets"),
        ("h264_metadata=no_such_option=1", "cannot be used on h264 packets"),
    ],
)
def test_bad_filters(bsf: str, said: str) -> None:
    packets = sm.demux_video(_clip("libx264"))
    with pytest.raises(ValueError, match=said):
        sm.apply_bsf(packets, bsf)


def test_a_still() -> None:
    image = sm.demux_image(make_image(np.zeros((16, 16, 3), np.uint8), codec="mjpeg"))
    same = sm.apply_bsf(image, "null")
    assert isinstance(same, sm.ImagePackets)
    assert sm.decode_packets(same).width == 16
