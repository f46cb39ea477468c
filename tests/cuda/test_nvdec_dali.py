"""Videos through DALI's operator, on the CPU: the same class with another name of the device."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from nvdec_stand_in import StandIn, load_video_nvdec
from oriented import oriented_clip

import spdl_media as sm
from spdl_media.config import DEFAULT_DECODE_CONFIG
from spdl_media.cuda import slots
from spdl_media.cuda._nvdec_clip import Request, decode_clip
from spdl_media.cuda._nvdec_writer import Output
from spdl_media.packets import make_packet
from spdl_media.testing import index_planes, make_video

pytest.importorskip("nvidia.dali", reason="DALI is not installed")


def clip(codec: str = "libvpx-vp9", count: int = 20) -> bytes:
    return make_video(index_planes(count, 64, 48), codec=codec, format="webm", gop_size=8)


CLIP = clip()
# What DALI's converter is, bit for bit.
BILINEAR = "scale=flags=bilinear+full_chroma_int+accurate_rnd,format=rgb24"


@pytest.mark.parametrize("codec", ["libvpx-vp9", "libvpx"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"timestamp": (0.55, 1.35)},
        {"num_frames": 3},
        {"frame_rate": 7},
        {"frame_rate": 25, "num_frames": 9, "timestamp": (0.35, None)},
        {"pix_fmt": "bgr24"},
        {"layout": "NCHW"},
    ],
)
def test_frames_are_within_one_level_of_the_cpu(codec: str, options: dict[str, Any]) -> None:
    data = clip(codec)
    got = np.asarray(load_video_nvdec(data, cuda=StandIn(), decoder="dali", **options))
    want = sm.load_video(data, **options, quality="accurate").array
    assert got.shape == want.shape
    assert np.abs(got.astype(int) - want).max() <= 1


@pytest.mark.parametrize("rate", [None, 3, "30000/1001"])
@pytest.mark.parametrize("window", [None, (0.55, 1.35)])
def test_times_are_those_of_the_cpu(rate: Any, window: Any) -> None:
    packets = sm.demux_video(CLIP, timestamp=window)
    request = Request(Output(), DEFAULT_DECODE_CONFIG, frame_rate=rate, may_use_dali=True)
    got = decode_clip(packets, StandIn(), request)
    want = sm.decode_packets(packets, sm.get_video_filter_desc(frame_rate=rate, quality="accurate"))
    assert got.way == "dali"
    assert (got.pts, got.timestamps) == (want.pts, want.timestamps)
    if rate is None:
        exact = sm.convert_frames(sm.decode_packets(packets, BILINEAR))
        assert np.array_equal(np.asarray(got.array), exact.array)


def test_auto_takes_dali_for_frames_in_their_own_size_alone() -> None:
    packets, config = sm.demux_video(CLIP), DEFAULT_DECODE_CONFIG
    for output, way in (
        (Output(), "dali"),
        (Output(width=32), "pyav"),
        (Output("nv12"), "pyav"),
    ):
        device = StandIn()
        got = decode_clip(packets, device, Request(output, config, may_use_dali=True))
        assert got.way == way
        assert device.opened == ([] if way == "dali" else ["vp9"])


SIZES: list[dict[str, int]] = [{}, {"width": 30, "height": 50}, {"width": 31}]


# All orientations, and all sizes of one that keeps the sides and of one that swaps them.
@pytest.mark.parametrize(
    ("orientation", "size"),
    [
        *((orientation, SIZES[orientation % 3]) for orientation in (2, 3, 4, 5, 7, 8)),
        *((orientation, size) for orientation in (1, 6) for size in SIZES),
    ],
)
def test_orientation_and_size(orientation: int, size: dict[str, int]) -> None:
    data = oriented_clip(orientation, codec="libvpx-vp9", format="matroska")
    for mode in ("pad", "crop"):
        got = load_video_nvdec(data, cuda=StandIn(), decoder="dali", scale_mode=mode, **size)
        want = sm.load_video(data, scale_mode=mode, **size, quality="accurate").array
        assert got.shape == want.shape
        difference = np.abs(np.asarray(got).astype(int) - want)
        # It scales what was converted, with a softer filter; the test pictures are noise.
        assert difference.mean() <= (5 if size else 0.1)
        assert ((want == 0) <= (np.asarray(got) < 60)).all()


def test_many_threads() -> None:
    want = load_video_nvdec(CLIP, cuda=StandIn(), decoder="dali")
    with ThreadPoolExecutor(4) as pool:
        results = pool.map(
            lambda _: load_video_nvdec(CLIP, cuda=StandIn(), decoder="dali"), range(12)
        )
        assert all(np.array_equal(result, want) for result in results)


def test_results_outlive_the_next_call() -> None:
    first = load_video_nvdec(CLIP, cuda=StandIn(), decoder="dali")
    before = np.array(first)
    load_video_nvdec(clip(count=5), cuda=StandIn(), decoder="dali")
    assert np.array_equal(first, before)


def test_other_videos_are_refused_or_go_another_way() -> None:
    data = make_video(index_planes(4, 64, 48), codec="libx264", format="mp4")
    with pytest.raises(sm.DecodeError, match=r"a codec that DALI decodes there, and this is h264"):
        load_video_nvdec(data, cuda=StandIn(), decoder="dali")
    device = StandIn()
    load_video_nvdec(data, cuda=device)
    assert device.opened == ["h264"]


def test_what_dali_cannot_decode_is_an_error_and_harms_no_later_call() -> None:
    packets, device = sm.demux_video(CLIP), StandIn()
    noise = [make_packet(bytes(range(256)), packets.time_base) for _ in range(4)]
    for number, packet in enumerate(noise):
        packet.pts = packet.dts = number
    request = Request(Output(), DEFAULT_DECODE_CONFIG, decoder="dali")
    with pytest.raises(sm.DecodeError, match=r"(?s)DALI cannot decode this vp9 video: .*'pyav'"):
        decode_clip(packets.with_packets(noise, packets.codec), device, request)
    assert len(decode_clip(packets, device, request).array) == 20


def test_a_window_without_frames_is_named() -> None:
    with pytest.raises(sm.ConvertError, match=r"no frame in the window \[10, 11\)"):
        load_video_nvdec(CLIP, (10, 11), cuda=StandIn(), decoder="dali")


def test_missing_dali(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    with pytest.raises(sm.MissingDependencyError, match=r"needs dali.*pip install nvidia-dali"):
        load_video_nvdec(CLIP, cuda=StandIn(), decoder="dali")
    device = StandIn()
    load_video_nvdec(CLIP, cuda=device)
    assert device.opened == ["vp9"]


@pytest.mark.parametrize("error", [MemoryError("std::bad_alloc"), RuntimeError("out of memory")])
def test_a_full_device_is_told_with_sizes(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(slots.Slot, "run", fails)
        with pytest.raises(
            sm.TransferError, match=r"20 frames of 64x48, 0\.2 MB of RGB, do not fit .*the CPU"
        ):
            load_video_nvdec(CLIP, cuda=StandIn(), decoder="dali")
    assert load_video_nvdec(CLIP, cuda=StandIn(), decoder="dali").shape == (20, 48, 64, 3)
