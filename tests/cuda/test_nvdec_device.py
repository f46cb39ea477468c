"""Opening a device: errors name the missing part. No test here needs a GPU."""

from __future__ import annotations

import sys
from fractions import Fraction
from threading import Thread
from typing import Any

import av
import numpy as np
import pytest
from effort import each
from fake_cuda import HISTORY, Card, FakeTorch
from nvdec_stand_in import HardwareDecoder, HardwareFrame, StandIn, Surface

import spdl_media as sm
from spdl_media.cuda import nvdec
from spdl_media.cuda.nvdec import DecoderPool, Gate, missing_library
from spdl_media.cuda.session import shows_frame
from spdl_media.cuda.video_rows import Shown, frame_planes
from spdl_media.cuda.videos import _video_device, decode_packets_nvdec
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


HIDDEN, SHOWN, AGAIN = b"\x84hid", b"\x86shown", b"\x88"


def superframe(*frames: bytes) -> bytes:
    mark = bytes([0b11000000 | 1 << 3 | len(frames) - 1])  # lengths of 2 bytes
    lengths = b"".join(len(one).to_bytes(2, "little") for one in frames)
    return b"".join(frames) + mark + lengths + mark


@each(
    "data, is_shown",
    [
        (HIDDEN, False),
        (SHOWN, True),
        (AGAIN, True),
        (b"\xb1third profile", True),
        (b"\xb2third profile", False),
        (superframe(HIDDEN, SHOWN), True),
        (superframe(HIDDEN, HIDDEN), False),
        (HIDDEN + b"\xc9", False),  # no index, although it ends like one
        (HIDDEN + b"\xc9\xff\xff\xff\xff\xc9", False),  # a length beyond the data
    ],
)
def test_frames_of_vp9_that_are_hidden(data: bytes, is_shown: bool) -> None:
    assert shows_frame(data) is is_shown


def frame(stored: str, *planes: np.ndarray, width: int) -> HardwareFrame:
    height = len(planes[0])
    return HardwareFrame(av.VideoFrame(width, height, "gray"), Surface(list(planes)), stored)


@each("stored, dtype", [("nv12", np.uint8), ("p010le", np.uint16), ("p012le", np.uint16)])
@each("width", [8, 7])
def test_planes_are_views_of_padded_rows(stored: str, dtype: Any, width: int) -> None:
    luma = np.arange(48, dtype=dtype).reshape(6, 8)
    chroma = np.arange(24, dtype=dtype).reshape(3, 4, 2)
    one = frame(stored, luma, chroma, width=width)
    y, u, v = frame_planes(Shown(one, 0, 1, Fraction(1, 25)))
    assert np.array_equal(y[0], luma[:, :width])
    assert np.array_equal(u[0], chroma[:, :, 0])
    assert np.array_equal(v[0], chroma[:, :, 1])
    assert y.strides[1] == u.strides[1] == one.planes[0].line_size
    assert not y.flags.writeable


def test_a_view_keeps_the_frame_alive() -> None:
    luma, chroma = np.full((4, 4), 7, np.uint8), np.full((2, 2, 2), 8, np.uint8)
    view, _, _ = frame_planes(Shown(frame("nv12", luma, chroma, width=4), 0, 1, Fraction(1, 25)))
    del _
    assert (view == 7).all()  # a released surface is overwritten


def test_the_stand_in_is_a_device() -> None:
    device = StandIn()
    assert _video_device(device) is device


IDLE = HardwareDecoder()


def test_the_pool_keeps_so_many_and_lets_the_oldest_go() -> None:
    pool, decoders = DecoderPool(2), [nvdec.DeviceDecoder(IDLE) for _ in range(3)]
    assert pool.take("a") is None
    for key, decoder in zip("aab", decoders, strict=True):
        pool.give(key, decoder)
    assert pool.take("b") is decoders[2]
    assert pool.take("a") is decoders[1]
    assert pool.take("a") is None
    pool.give("a", decoders[0])
    assert pool.clear()
    assert not pool.clear()


def test_a_thread_that_decodes_when_the_process_ends_is_ended() -> None:
    """It does not wait: an exit handler may wait for it."""
    gate, ends = Gate(), []
    gate.close()

    def decode() -> None:
        with pytest.raises(SystemExit):
            gate.__enter__()
        ends.append(1)

    thread = Thread(target=decode, daemon=True)
    thread.start()
    thread.join(5)
    assert ends
    with gate:  # the main thread is let in
        pass
