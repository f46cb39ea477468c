"""Videos through DALI's operator on the CPU, which is the same class as on a GPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from oriented import oriented_clip

import spdl_media as sm
from spdl_media.cuda import dali
from spdl_media.cuda.dali_decode import load_video_by_dali, remux
from spdl_media.packets import make_packet
from spdl_media.testing import index_planes, make_video

pytest.importorskip("nvidia.dali", reason="DALI is not installed")

CPU, GPU = None, 0
PLANES = index_planes(20, 64, 48)


def clip(codec: str = "libvpx-vp9", format: str = "webm", **options: Any) -> bytes:
    return make_video(PLANES, codec=codec, format=format, gop_size=8, **options)


CLIP = clip()
# The options with which FFmpeg's conversion equals DALI's bit for bit.
BILINEAR = "scale=flags=bilinear+full_chroma_int+accurate_rnd,format=rgb24"


@pytest.mark.parametrize("codec", ["libvpx-vp9", "libvpx"])
@pytest.mark.parametrize("window", [None, (0.55, 1.35)])
@pytest.mark.parametrize("num_frames", [None, 3])
def test_frames_and_times_are_those_of_the_cpu(codec: str, window: Any, num_frames: Any) -> None:
    packets = sm.demux_video(clip(codec), timestamp=window)
    buffer, times = load_video_by_dali(packets, CPU, num_frames)
    want = sm.decode_packets(packets, BILINEAR, num_frames=num_frames)
    assert np.array_equal(np.asarray(buffer), sm.convert_frames(want).array)
    assert times() == want.timestamps


def test_many_threads() -> None:
    packets = sm.demux_video(CLIP)
    want = np.asarray(load_video_by_dali(packets, CPU)[0])
    with ThreadPoolExecutor(4) as pool:
        results = pool.map(lambda _: np.asarray(load_video_by_dali(packets, CPU)[0]), range(12))
        assert all(np.array_equal(result, want) for result in results)


def test_results_outlive_the_next_call() -> None:
    packets = sm.demux_video(CLIP)
    first = np.asarray(load_video_by_dali(packets, CPU)[0])
    before = np.array(first)
    load_video_by_dali(packets, CPU, 5)
    assert np.array_equal(first, before)


def test_what_dali_cannot_decode_is_an_error_and_harms_no_later_call() -> None:
    packets = sm.demux_video(CLIP)
    noise = [make_packet(bytes(range(256)), packets.time_base) for _ in range(4)]
    for number, packet in enumerate(noise):
        packet.pts = packet.dts = number
    with pytest.raises(
        sm.DecodeError,
        match=r"(?s)DALI cannot decode 4 frames of this 64x48 vp9 video on the CPU: .*'nvdec'",
    ):
        load_video_by_dali(packets.with_packets(noise, packets.codec), CPU)
    assert load_video_by_dali(packets, CPU)[0].shape == (20, 48, 64, 3)


def test_a_window_without_frames_is_named() -> None:
    with pytest.raises(sm.ConvertError, match=r"no frame in the window \[10, 11\)"):
        load_video_by_dali(sm.demux_video(CLIP, timestamp=(10, 11)), CPU)


@pytest.mark.parametrize("error", [MemoryError("std::bad_alloc"), RuntimeError("out of memory")])
def test_a_full_device_is_reported_with_sizes(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(dali.Slot, "run", fails)
    words = r"DALI cannot decode 20 frames of this 64x48 vp9 video on the CPU: .*Load fewer"
    with pytest.raises(sm.TransferError, match=words):
        load_video_by_dali(sm.demux_video(CLIP), CPU)


def h264(**options: Any) -> sm.VideoPackets:
    return sm.demux_video(clip("libx264", "mp4", **options))


def changed(**codec: Any) -> sm.VideoPackets:
    packets = h264()
    return packets.with_packets(
        list(sm.packets.av_packets(packets)), replace(packets.codec, **codec)
    )


@pytest.mark.parametrize(
    ("make", "needs"),
    [
        (lambda: sm.demux_video(CLIP), "h264 or hevc, and this is vp9"),
        (lambda: changed(pix_fmt="yuv420p10le"), "8-bit 4:2:0, and this is yuv420p10le"),
        (
            lambda: changed(color=(1, 1, 1, 1)),
            r"limited range and BT.601, and this states \(1, 1\)",
        ),
        (
            lambda: changed(color=(2, 5, 5, 6)),
            r"limited range and BT.601, and this states \(2, 5\)",
        ),
        (lambda: changed(width=63), "even sides, and this is 63x48"),
        (lambda: changed(extradata=None), "progressive frames, and this H.264 may have fields"),
        (
            lambda: h264(options={"x264-params": "interlaced=1"}),
            "progressive frames, and this H.264 may have fields",
        ),
        (lambda: h264()[3:], "closed groups of pictures, from a key frame on"),
        (
            lambda: sm.demux_video(clip("libx265", "mp4", max_b_frames=2, open_gop=True)),
            "closed groups of pictures, from a key frame on",
        ),
        (lambda: sm.demux_video(oriented_clip(6, codec="libx264")), "upright frames"),
        (
            lambda: sm.demux_video(make_video(PLANES, codec="libx264", format="h264")),
            "a time of its own for each packet",
        ),
    ],
)
def test_videos_that_the_operator_would_get_wrong_are_refused(make: Any, needs: str) -> None:
    with pytest.raises(sm.DecodeError, match=f"it needs (.*; )?{needs}.*decoder='auto'"):
        load_video_by_dali(make(), GPU)


@pytest.mark.parametrize(
    ("codec", "format"),
    [
        ("libx264", "mp4"),
        ("libx264", "mpegts"),
        ("libx265", "mp4"),
        ("libx265", "mpegts"),
        ("libvpx-vp9", "webm"),
        ("libvpx", "webm"),
    ],
)
def test_the_file_that_dali_reads_holds_the_same_frames(codec: str, format: str) -> None:
    b_frames = 0 if format == "webm" else 2
    packets = sm.demux_video(clip(codec, format, max_b_frames=b_frames), timestamp=(0.95, 1.25))
    frames = sm.decode_packets(sm.demux_video(remux(packets)), "format=nv12")
    assert len(frames) == len(packets)
    assert min(frames.pts, default=-1) >= 0  # type: ignore[type-var]  # DALI skips the others
    want = sm.decode_packets(packets, "format=nv12")
    order = sorted(packet.pts or 0 for packet in sm.packets.av_packets(packets))
    numbers = [order.index(pts or 0) for pts in want.pts]
    found = sm.convert_frames(frames).array[numbers]
    assert np.array_equal(found, sm.convert_frames(want).array)


def test_missing_dali_and_options_that_it_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dali, "check_device", lambda device: None)
    for options in (
        {"width": 8},
        {"layout": "NCHW"},
        {"pix_fmt": "bgr24"},
        {"frame_rate": 3},
        {"crops": (0, 0, 8, 8)},
        {"dtype": "float32"},
    ):
        with pytest.raises((ValueError, sm.TransferError), match=r"DALI gives frames as they|CUDA"):
            sm.load_video(CLIP, cuda=0, decoder="dali", **options)  # type: ignore[call-overload]
