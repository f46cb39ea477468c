"""The rule that chooses the decoder, row by row, and what it reads off headers and packets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from effort import each

import spdl_media as sm
from spdl_media.config import DEFAULT_DECODE_CONFIG
from spdl_media.cuda._nvdec_dali import remux
from spdl_media.cuda._nvdec_rule import (
    DALI_SERVES,
    Clip,
    choose,
    clip_of,
    dali_refusals,
    nvdec_refusal,
)
from spdl_media.cuda._nvdec_sps import may_be_interlaced
from spdl_media.cuda._nvdec_timeline import Timeline
from spdl_media.cuda._nvdec_writer import Output
from spdl_media.testing import index_planes, make_video

PLANES = index_planes(20, 64, 48)


def clip(codec: str = "libx264", format: str = "mp4", **options: Any) -> sm.VideoPackets:
    return sm.demux_video(make_video(PLANES, codec=codec, format=format, gop_size=8, **options))


def good() -> Clip:
    return clip_of(clip(max_b_frames=2), "cuda", Output(), DEFAULT_DECODE_CONFIG)


def changed(**codec: Any) -> Clip:
    return replace(good(), codec=replace(good().codec, **codec))


NO_SUCH_CLIP = {
    "a codec that DALI decodes there": changed(name="av1"),
    "8-bit 4:2:0": changed(pix_fmt="yuv420p10le"),
    "the BT.601 matrix, or none stated": changed(color=(1, 1, 1, 1)),
    "limited range, or none stated": changed(color=(2, 5, 5, 6)),
    "even sides": changed(width=63),
    "progressive pictures": changed(extradata=None),
    "a time of its own for each packet": replace(
        good(), timeline=replace(good().timeline, distinct=False)
    ),
    "closed groups of pictures from a key frame on": replace(good(), continues=True),
    "RGB": replace(good(), pix_fmt="nv12"),
    "frames in their own size": replace(good(), is_scaled=True),
    'decode_config(on_corrupt="raise") without options for FFmpeg\'s decoder': replace(
        good(), config=sm.decode_config(on_corrupt="drop")
    ),
}


def test_a_plain_clip_goes_to_dali_if_it_is_installed() -> None:
    assert dali_refusals(good()) == ()
    assert choose(good(), "auto", may_use_dali=True, source="x") == "dali"
    assert choose(good(), "auto", may_use_dali=False, source="x") == "pyav"
    assert choose(good(), "pyav", may_use_dali=True, source="x") == "pyav"


@pytest.mark.parametrize("row", DALI_SERVES, ids=lambda row: row.needs)
def test_each_row_refuses_alone(row: Any) -> None:
    one = NO_SUCH_CLIP[row.needs]
    (refusal,) = dali_refusals(one)
    assert refusal.startswith(f"it needs {row.needs}, and this is ")
    assert "{" not in refusal
    assert choose(one, "auto", may_use_dali=True, source="x") == "pyav"
    if row.is_hard:
        with pytest.raises(sm.DecodeError, match=r"x: decoder='dali' would not decode .*'auto'"):
            choose(one, "dali", may_use_dali=True, source="x")
    else:
        assert choose(one, "dali", may_use_dali=True, source="x") == "dali"


def test_the_operator_on_the_cpu_takes_other_codecs() -> None:
    packets = clip("libvpx-vp9", "webm")
    assert dali_refusals(clip_of(packets, "cpu", Output(), DEFAULT_DECODE_CONFIG)) == ()
    (refusal,) = dali_refusals(clip_of(packets, "cuda", Output(), DEFAULT_DECODE_CONFIG))
    assert refusal == "it needs a codec that DALI decodes there, and this is vp9"


@pytest.mark.parametrize(
    ("codec", "pix_fmt", "refusal"),
    [
        ("h264", "yuv420p", None),
        ("hevc", "yuv420p10le", None),
        ("av1", None, None),
        ("h264", "yuv444p", "4:2:0 of 8, 10 and 12 bits, and this is yuv444p"),
        ("hevc", "yuv422p10le", "this is yuv422p10le"),
        ("ffv1", "yuv420p", "no decoder for ffv1, but for av1, h264"),
        ("mjpeg", "yuvj420p", "no decoder for mjpeg"),
    ],
)
def test_what_nvdec_decodes(codec: str, pix_fmt: str | None, refusal: str | None) -> None:
    one = changed(name=codec, pix_fmt=pix_fmt)
    found = nvdec_refusal(one.codec)
    assert found is None if refusal is None else refusal in str(found)
    if refusal:
        assert choose(one, "auto", may_use_dali=True, source="x") == "cpu"
        with pytest.raises(sm.DecodeError, match=r"decoder='pyav': NVDEC .*decoder='auto' decodes"):
            choose(one, "pyav", may_use_dali=True, source="x")


@each("format", ["mp4", "mpegts", "matroska"])
@each("profile", ["baseline", "main", "high", "high10", "high444"])
@each("scaling", ["flat", "jvt"])
def test_interlaced_h264_is_told_from_its_header(format: str, profile: str, scaling: str) -> None:
    pix_fmt = {"high10": "yuv420p10le", "high444": "yuv444p"}.get(profile, "yuv420p")
    planes = index_planes(4, 64, 64, pix_fmt)
    for interlaced in (False, True):
        if interlaced and profile == "baseline":
            continue
        options = {
            "profile": profile,
            "preset": "medium",
            "qp": "20",
            "x264-params": f"cqm={scaling}:interlaced={int(interlaced)}",
        }
        data = make_video(planes, codec="libx264", format=format, pix_fmt=pix_fmt, options=options)
        assert may_be_interlaced(sm.demux_video(data).codec) == interlaced


class BitWriter:
    def __init__(self) -> None:
        self.bits = ""

    def put(self, *values: tuple[int, int]) -> BitWriter:
        for value, count in values:
            self.bits += f"{value:0{count}b}"
        return self

    def golomb(self, *codes: int) -> BitWriter:
        for code in codes:
            self.bits += "0" * ((code + 1).bit_length() - 1) + f"{code + 1:b}"
        return self

    def data(self) -> bytes:
        padded = self.bits + "1" + "0" * (-len(self.bits) - 1 & 7)
        return int(padded, 2).to_bytes(len(padded) // 8, "big")


@pytest.mark.parametrize("frames_only", [0, 1])
@pytest.mark.parametrize("chroma", [1, 3])
@pytest.mark.parametrize("order", [0, 1, 2])
def test_headers_with_all_their_parts(frames_only: int, chroma: int, order: int) -> None:
    """Scaling lists and the three ways to number pictures, by ITU-T H.264, 7.3.2.1.1."""
    bits = BitWriter().put((0x67, 8), (100, 8), (0, 8), (40, 8)).golomb(0, chroma)
    if chroma == 3:
        bits.put((0, 1))
    bits.golomb(0, 0).put((0, 1), (1, 1))
    for index in range(12 if chroma == 3 else 8):
        if index % 2:
            bits.put((0, 1))
            continue
        size = 16 if index < 6 else 64
        # A full list of steps of +1, or one that ends with a step to 0 at once.
        bits.put((1, 1)).golomb(*([1] * size if index % 4 else [16]))
    bits.golomb(2, order)
    if order == 0:
        bits.golomb(4)
    if order == 1:
        bits.put((1, 1)).golomb(3, 4, 2, 1, 2)
    bits.golomb(4).put((0, 1)).golomb(19, 10).put((frames_only, 1), (5, 4))
    unit = bits.data().replace(b"\0\0", b"\0\0\3")
    mp4 = b"\1\x64\0\x28\xff\xe1" + len(unit).to_bytes(2, "big") + unit
    for extradata in (b"\0\0\0\1" + unit, mp4):
        codec = replace(good().codec, extradata=extradata)
        assert may_be_interlaced(codec) == (not frames_only)


@pytest.mark.parametrize(
    "extradata", [None, b"", b"\1", b"\1\x64\0\x1f\xff\xe1\xff\xff", b"\0\0\1\x67\0"]
)
def test_a_header_that_is_broken_or_missing_may_be_interlaced(extradata: bytes | None) -> None:
    assert may_be_interlaced(replace(good().codec, extradata=extradata))


def test_other_codecs_have_no_such_header() -> None:
    assert not may_be_interlaced(clip("libx265").codec)


@pytest.mark.parametrize(
    ("codec", "format", "b_frames"),
    [
        ("libx264", "mp4", 2),
        ("libx264", "mpegts", 2),
        ("libx265", "mp4", 2),
        ("libx265", "mpegts", 2),
        ("libvpx-vp9", "webm", 0),
        ("libvpx", "webm", 0),
    ],
)
@pytest.mark.parametrize("window", [None, (0.95, 1.25)])
def test_the_file_that_dali_reads_holds_the_same_frames(
    codec: str, format: str, b_frames: int, window: Any
) -> None:
    data = make_video(PLANES, codec=codec, format=format, gop_size=8, max_b_frames=b_frames)
    packets = sm.demux_video(data, timestamp=window)
    timeline = Timeline.of(packets)
    file = remux(packets, timeline)
    frames = sm.decode_packets(sm.demux_video(file), "format=nv12")
    assert len(frames) == len(packets)
    assert min(frames.pts, default=-1) >= 0  # type: ignore[type-var]  # DALI skips the others
    wanted = sm.convert_frames(sm.decode_packets(packets, "format=nv12")).array
    assert np.array_equal(sm.convert_frames(frames).array[list(timeline.wanted)], wanted)
    assert timeline.closed
    assert timeline.distinct


def test_open_groups_are_seen() -> None:
    packets = clip("libx265", max_b_frames=2, open_gop=True)
    assert not Timeline.of(packets).closed
    assert not Timeline.of(packets[1:]).closed


def test_packets_without_times_are_seen() -> None:
    raw = make_video(PLANES, codec="libx264", format="h264", max_b_frames=2)
    timeline = Timeline.of(sm.demux_video(raw))
    assert not timeline.distinct
    assert not timeline.closed
