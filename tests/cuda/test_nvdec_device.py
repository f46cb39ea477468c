"""Opening a device: what is missing is named, one by one. Nothing here needs one."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import av
import numpy as np
import pytest
from fake_cuda import HISTORY
from nvdec_stand_in import (
    Driver,
    FakeCupy,
    FakeFFmpeg,
    HardwareFrame,
    StandIn,
    Surface,
    loader,
)

import spdl_media as sm
from spdl_media.config import DEFAULT_DECODE_CONFIG
from spdl_media.cuda import _nvdec_hwaccel
from spdl_media.cuda._nvdec_device import VideoDevice, video_device
from spdl_media.cuda._nvdec_hwaccel import device_error, missing_library, open_on_device
from spdl_media.cuda._nvdec_planes import CudaPlane, frame_planes, is_on_device
from spdl_media.cuda.nvdec import decode_packets_nvdec, why_not_nvdec
from spdl_media.packets import av_packets
from spdl_media.testing import index_planes, make_video

PACKETS = sm.demux_video(make_video(index_planes(3, 64, 48), codec="libx264", format="mp4"))


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def test_a_missing_driver_is_named() -> None:
    error = device_error(0, "Operation not permitted", "a.mp4", loader(None, video=False))
    assert isinstance(error, sm.MissingDependencyError)
    assert (error.name, error.source) == ("libcuda.so.1", "a.mp4")
    assert "docker run --gpus all" in str(error)


def test_a_missing_video_library_is_named() -> None:
    error = device_error(0, "", "a.mp4", loader(Driver(1), video=False))
    assert isinstance(error, sm.MissingDependencyError)
    assert error.name == "libnvcuvid.so.1"
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility,video" in str(error)


def test_why_not_nvdec() -> None:
    reason = why_not_nvdec()
    assert (reason is None) == (missing_library() is None)
    assert reason is None or "decoding video on the GPU needs lib" in reason
    assert missing_library(load=loader(Driver(1), video=True)) is None


@pytest.mark.parametrize(("count", "words"), [(1, "is one"), (2, "are 2"), (None, "are 0")])
def test_a_device_that_is_not_there(count: int | None, words: str) -> None:
    error = device_error(3, "", "a.mp4", loader(Driver(count), video=True))
    assert isinstance(error, ValueError)
    assert f"CUDA device 3 was asked for, and there {words}" in str(error)


def test_other_reasons_are_ffmpegs() -> None:
    error = device_error(0, "Cannot allocate memory", "a.mp4", loader(Driver(1), video=True))
    assert isinstance(error, sm.DecodeError)
    assert str(error) == "a.mp4: NVDEC cannot be opened on device 0: Cannot allocate memory"


@pytest.mark.skipif(has_driver(), reason="there is a driver")
def test_ffmpegs_error_without_a_driver_says_what_is_missing() -> None:
    with pytest.raises(
        sm.MissingDependencyError, match=r"needs libcuda\.so\.1: .*cuda=None"
    ) as caught:
        open_on_device(PACKETS.codec, DEFAULT_DECODE_CONFIG, "a.mp4", 0)
    assert isinstance(caught.value.__cause__, av.error.PermissionError)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("active", [None, 0, FakeFFmpeg.BLOCKING_SYNC])
def test_the_decoder_works_in_the_context_that_kernels_run_in(
    monkeypatch: pytest.MonkeyPatch, index: int, active: int | None
) -> None:
    """Whoever made that context, with whatever flags, and though no call of this thread used it yet."""
    cupy = FakeCupy()
    cupy.devices = 2
    ffmpeg = FakeFFmpeg(lambda: cupy.cuda.context, active)
    monkeypatch.setattr(_nvdec_hwaccel, "CodecContext", ffmpeg)
    device = VideoDevice(cupy, index)  # type: ignore[arg-type]  # a stand-in
    config = sm.decode_config(decoder_options={"skip_frame": "default"})
    context = device.open_decoder(PACKETS.codec, config, "a.mp4")
    assert (context.is_open, context.thread_count) == (True, 1)
    assert context.extradata == PACKETS.codec.extradata
    frames = [f for p in (*av_packets(PACKETS), None) for f in context.decode(p)]
    assert len(frames) == 3


def test_the_decoder_gets_no_more_surfaces_than_ffmpeg_gives_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its frames are copies, and more than 32 surfaces are refused by the hardware."""
    monkeypatch.setattr(_nvdec_hwaccel, "CodecContext", FakeFFmpeg(lambda: 0))
    context = open_on_device(PACKETS.codec, DEFAULT_DECODE_CONFIG, "a.mp4", 0)
    assert "extra_hw_frames" not in context.options


def test_decoders_of_the_cpu_and_unknown_options_are_refused() -> None:
    config = sm.decode_config(decoder="h264_v4l2m2m")
    with pytest.raises(
        ValueError, match=r"runs on the CPU alone; the decoder on the device is 'h264'"
    ):
        open_on_device(PACKETS.codec, config, "a.mp4", 0)
    config = sm.decode_config(decoder_options={"sorcery": 1})
    with pytest.raises(ValueError, match="decoder 'h264' has no option 'sorcery'"):
        open_on_device(PACKETS.codec, config, "a.mp4", 0)


def test_missing_cupy_names_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(
        sm.MissingDependencyError, match=r"on the GPU needs cupy.*pip install \"cupy"
    ):
        decode_packets_nvdec(PACKETS, cuda=0)


def test_a_device_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)  # type: ignore[arg-type]  # a stand-in
    assert (video_device(0).kind, video_device(np.int64(0)).index) == ("cuda", 0)
    with pytest.raises(ValueError, match="CUDA device 1 was asked for, and there is one"):
        video_device(1)
    with pytest.raises(ValueError, match="CUDA device -1 was asked for"):
        video_device(-1)
    for wrong in (True, "0", None, 0.0):
        with pytest.raises(TypeError, match="cuda must be the number of a device"):
            video_device(wrong)  # type: ignore[arg-type]
    cupy.devices = 0
    with pytest.raises((sm.MissingDependencyError, ValueError), match=r"driver is missing|are 0"):
        video_device(0)


def test_a_forked_child_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", FakeCupy())  # type: ignore[arg-type]  # a stand-in
    monkeypatch.setattr(HISTORY, "lost", True)
    with pytest.raises(RuntimeError, match=r"decoding video on the GPU cannot use CUDA.*forked"):
        video_device(0)


def frame(stored: str, *planes: np.ndarray) -> HardwareFrame:
    height, width = planes[0].shape
    return HardwareFrame(av.VideoFrame(width, height, "gray"), Surface(list(planes)), stored)


@pytest.mark.parametrize(
    ("stored", "dtype"), [("nv12", np.uint8), ("p010le", np.uint16), ("p016le", np.uint16)]
)
@pytest.mark.parametrize(("height", "width"), [(6, 8), (5, 7)])
def test_planes_are_views_of_padded_rows(stored: str, dtype: Any, height: int, width: int) -> None:
    luma = np.arange(height * width, dtype=dtype).reshape(height, width)
    rows, columns = -(-height // 2), -(-width // 2)
    chroma = np.arange(rows * columns * 2, dtype=dtype).reshape(rows, columns, 2)
    one = frame(stored, luma, chroma)
    for kind, device in (("cpu", VideoDevice(np)), ("cuda", VideoDevice(FakeCupy()))):
        first, second = frame_planes(one, kind)  # type: ignore[arg-type]  # a literal
        assert isinstance(first, CudaPlane) == (kind == "cuda")
        views = device.view(first), device.view(second)
        assert np.array_equal(views[0], luma)
        assert np.array_equal(views[1], chroma)
        assert views[0].strides[0] == one.planes[0].line_size
        assert not views[0].flags.writeable


def test_a_view_keeps_the_frame_alive() -> None:
    luma, chroma = np.full((4, 4), 7, np.uint8), np.full((2, 2, 2), 8, np.uint8)
    view = VideoDevice(np).view(frame_planes(frame("nv12", luma, chroma), "cpu")[0])
    assert (view == 7).all()  # a surface that is let go is overwritten


def test_frames_in_host_memory_or_in_other_formats_are_not_on_the_device() -> None:
    planes = np.zeros((4, 4), np.uint8), np.zeros((2, 2, 2), np.uint8)
    assert is_on_device(frame("nv12", *planes))
    assert not is_on_device(frame("yuv444p", *planes))
    assert not is_on_device(av.VideoFrame(16, 16, "yuv420p"))


def test_the_stand_in_is_a_device() -> None:
    device = StandIn()
    assert video_device(device) is device
    assert (device.kind, device.slots.kind) == ("cpu", "cpu")
    assert str(VideoDevice(FakeCupy(), 0).slots) == "CUDA device 0"
