"""Opening a device: errors name the missing part. No test here needs a GPU."""

from __future__ import annotations

import errno
import sys
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
from fake_cuda import HISTORY, Card, FakeCupy, FakeTorch
from nvdec_stand_in import FakeFFmpeg, HardwareFrame, StandIn, Surface

import spdl_media as sm
from spdl_media.config import DEFAULT_DECODE_CONFIG
from spdl_media.cuda import nvdec
from spdl_media.cuda.nvdec import DecoderPool, missing_library, open_on_device
from spdl_media.cuda.video_rows import Shown, VideoDevice, frame_planes
from spdl_media.cuda.videos import _video_device, decode_packets_nvdec
from spdl_media.packets import av_packets
from spdl_media.testing import index_planes, make_video

PACKETS = sm.demux_video(make_video(index_planes(3, 64, 48), codec="libx264", format="mp4"))


@pytest.mark.parametrize(
    ("there", "missing", "words"),
    [
        ((), "libcuda.so.1", "docker run --gpus all"),
        (("libcuda.so.1",), "libnvcuvid.so.1", "NVIDIA_DRIVER_CAPABILITIES=compute,utility,video"),
    ],
)
def test_a_missing_library_is_named(there: tuple[str, ...], missing: str, words: str) -> None:
    def load(name: str) -> None:
        if name not in there:
            raise OSError(f"{name}: cannot open shared object file")

    error = missing_library(load)
    assert error is not None
    assert error.name == missing
    assert f"needs {missing}: " in str(error)
    assert words in str(error)
    assert missing_library(lambda name: None) is None


def test_reasons_are_ffmpegs(monkeypatch: pytest.MonkeyPatch) -> None:
    def create(*_: object, **__: object) -> Any:
        raise av.FFmpegError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(nvdec, "CodecContext", SimpleNamespace(create=create))
    words = r"^a\.mp4: NVDEC cannot be opened on device 0: Cannot allocate memory$"
    with pytest.raises(sm.DecodeError, match=words):
        open_on_device(PACKETS.codec, DEFAULT_DECODE_CONFIG, "a.mp4", 0)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("active", [None, 0, FakeFFmpeg.BLOCKING_SYNC])
def test_the_decoder_works_in_the_context_that_kernels_run_in(
    monkeypatch: pytest.MonkeyPatch, index: int, active: int | None
) -> None:
    """Whichever library made the context, with any flags, also if this thread has not used it yet."""
    cupy = FakeCupy(Card(devices=2))
    driver = cupy.card.driver
    ffmpeg = FakeFFmpeg(lambda: driver.contexts[-1] if driver.contexts else None, active)
    monkeypatch.setattr(nvdec, "CodecContext", ffmpeg)
    device = VideoDevice(None, index)
    config = sm.decode_config(decoder_options={"skip_frame": "default"})
    context = device.open_decoder(PACKETS.codec, config, "a.mp4")
    assert (context.is_open, context.thread_count) == (True, 1)
    assert context.extradata == PACKETS.codec.extradata
    frames = [f for p in (*av_packets(PACKETS), None) for f in context.decode(p)]
    assert len(frames) == 3


def test_the_decoder_gets_no_more_surfaces_than_ffmpeg_gives_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its frames are copies, and the hardware rejects more than 32 surfaces."""
    monkeypatch.setattr(nvdec, "CodecContext", FakeFFmpeg(lambda: 0))
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


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    monkeypatch.setattr("spdl_media.cuda.videos.missing_library", lambda: None)
    fake = FakeTorch(Card(devices=1))
    monkeypatch.setitem(sys.modules, "torch", fake)  # type: ignore[arg-type]  # a stand-in
    monkeypatch.setitem(sys.modules, "cupy", None)
    return fake


def test_neither_library_names_the_pip_line(
    torch: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(
        sm.TransferError, match=r"on the GPU needs a CUDA device.*neither torch nor cupy.*pip inst"
    ):
        decode_packets_nvdec(PACKETS, cuda=0)


def test_a_device_by_its_number(torch: FakeTorch) -> None:
    assert (_video_device(0).index, _video_device(np.int64(0)).index) == (0, 0)
    with pytest.raises(ValueError, match="CUDA device 1 was asked for, and there is one"):
        _video_device(1)
    with pytest.raises(ValueError, match="-1"):
        _video_device(-1)
    for wrong in (True, "0", 0.0):
        with pytest.raises(TypeError, match="must be the number of a device"):
            _video_device(wrong)  # type: ignore[arg-type]
    torch.card.devices = 0
    with pytest.raises(sm.TransferError, match="torch finds no CUDA device"):
        _video_device(0)


@pytest.mark.usefixtures("torch")
def test_a_forked_child_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HISTORY, "lost", True)
    with pytest.raises(RuntimeError, match=r"decoding video on the GPU cannot use CUDA.*forked"):
        _video_device(0)


def frame(stored: str, *planes: np.ndarray) -> HardwareFrame:
    height, width = planes[0].shape
    return HardwareFrame(av.VideoFrame(width, height, "gray"), Surface(list(planes)), stored)


@pytest.mark.parametrize(
    ("stored", "dtype"), [("nv12", np.uint8), ("p010le", np.uint16), ("p016le", np.uint16)]
)
@pytest.mark.parametrize("width", [8, 7])
def test_planes_are_views_of_padded_rows(stored: str, dtype: Any, width: int) -> None:
    luma = np.arange(48, dtype=dtype).reshape(6, 8)
    chroma = np.arange(24, dtype=dtype).reshape(3, 4, 2)
    one = frame(stored, luma, chroma)
    y, u, v = frame_planes(Shown(one, 0, 1, width, Fraction(1, 25)))
    assert np.array_equal(y[0], luma[:, :width])
    assert np.array_equal(u[0], chroma[:, :, 0])
    assert np.array_equal(v[0], chroma[:, :, 1])
    assert y.strides[1] == u.strides[1] == one.planes[0].line_size
    assert not y.flags.writeable


def test_a_view_keeps_the_frame_alive() -> None:
    luma, chroma = np.full((4, 4), 7, np.uint8), np.full((2, 2, 2), 8, np.uint8)
    view, _, _ = frame_planes(Shown(frame("nv12", luma, chroma), 0, 1, 4, Fraction(1, 25)))
    del _
    assert (view == 7).all()  # a released surface is overwritten


def test_the_stand_in_is_a_device() -> None:
    device = StandIn()
    assert _video_device(device) is device


def test_the_pool_keeps_so_many_and_lets_the_oldest_go() -> None:
    pool, decoders = DecoderPool(2), [nvdec.DeviceDecoder(None, 0) for _ in range(3)]
    assert pool.take("a") is None
    for key, decoder in zip("aab", decoders, strict=True):
        pool.give(key, decoder)
    assert pool.take("b") is decoders[2]
    assert pool.take("a") is decoders[1]
    assert pool.take("a") is None
    pool.give("a", decoders[0])
    assert pool.clear()
    assert not pool.clear()
