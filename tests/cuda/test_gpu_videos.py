"""Videos decoded by NVDEC on a GPU, within the promised limits. The same tests run with a stand-in."""

from __future__ import annotations

import gc
from functools import cache
from typing import Any

import numpy as np
import pytest
from nvdec_stand_in import StandIn, clip_of

import spdl_media as sm
from spdl_media.cuda.images import CPUFallbackWarning
from spdl_media.cuda.videos import _video_device, decode_packets_nvdec, streaming_load_video_nvdec
from spdl_media.testing import index_planes, make_video

NVDEC = "libnvcuvid.so.1"
on_gpu = pytest.mark.cuda("cupy", NVDEC)

# NVDEC has a minimum size, which depends on codec and GPU.
SIZE = (320, 240)
CODECS = ("libx264", "libx265")


@cache
def clip(codec: str) -> bytes:
    planes = index_planes(30, *SIZE)
    return make_video(planes, codec=codec, format="mp4", max_b_frames=2, gop_size=8)


@pytest.fixture(params=["stand-in", pytest.param("gpu", marks=on_gpu)])
def place(request: pytest.FixtureRequest) -> Any:
    return StandIn() if request.param == "stand-in" else 0


def host(found: Any) -> np.ndarray:
    """Copy a buffer or array to host memory."""
    on_device = isinstance(found, sm.CUDABuffer)
    return np.array(sm.transfer_buffer_cpu(found) if on_device else found)


def load(data: bytes, place: Any, window: Any = None, **options: Any) -> Any:
    found = clip_of(sm.demux_video(data, timestamp=window), _video_device(place), **options)
    return found.buffer, found.timestamps


@pytest.mark.parametrize("codec", CODECS)
def test_planes_are_the_cpus_bit_for_bit(place: Any, codec: str) -> None:
    batches = streaming_load_video_nvdec(clip(codec), place, num_frames=7)
    found = np.concatenate([host(batch) for batch in batches])
    want = sm.load_video(clip(codec), pix_fmt="nv12").array[:, 0]
    np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("size", "window"), [({}, None), ({"width": 96, "height": 80}, (0.45, 1.75))]
)
def test_frames_and_their_times_are_those_of_the_cpu(
    place: Any, codec: str, size: Any, window: Any
) -> None:
    found, times = load(clip(codec), place, window, **size)
    want = sm.load_video(clip(codec), window, **size, quality="accurate").array
    assert np.abs(host(found).astype(int) - want).max() <= 2
    packets = sm.demux_video(clip(codec), timestamp=window)
    assert times == sm.decode_packets(packets, filter_desc=None).timestamps


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.cuda("nvidia.dali", NVDEC)
@pytest.mark.parametrize("options", [{}, {"timestamp": (0.45, 1.75)}, {"num_frames": 5}])
def test_dali_gives_the_frames_of_the_cpu(codec: str, options: Any) -> None:
    found = sm.load_video(clip(codec), cuda=0, decoder="dali", **options)
    want = sm.load_video(clip(codec), **options, quality="accurate").array
    assert np.abs(host(found).astype(int) - want).max() <= 2


@pytest.mark.parametrize("matrix", ["bt709", "bt2020nc"])
def test_ten_bits_and_their_matrix(place: Any, matrix: str) -> None:
    planes = index_planes(6, 320, 240, "yuv420p10le")
    options = {"colorspace": matrix}
    data = make_video(planes, codec="libx265", pix_fmt="yuv420p10le", options=options)
    found, _ = load(data, place)
    assert (
        np.abs(host(found).astype(int) - sm.load_video(data, quality="accurate").array).max() <= 2
    )
    (p010,) = streaming_load_video_nvdec(data, place, num_frames=6)
    want = sm.load_video(data, pix_fmt="p010le", quality="accurate").array[:, 0]
    np.testing.assert_array_equal(host(p010), want)


def test_what_nvdec_cannot_decode_is_decoded_by_the_cpu(place: Any) -> None:
    frames = index_planes(5, 320, 240, "yuv444p")
    data = make_video(frames, codec="libx264", pix_fmt="yuv444p")
    with pytest.raises(sm.DecodeError, match="yuv444p"):
        decode_packets_nvdec(sm.demux_video(data), cuda=place)
    if place == 0:
        with pytest.warns(CPUFallbackWarning, match="yuv444p"):
            found = sm.load_video(data, cuda=0)
        np.testing.assert_array_equal(host(found), sm.load_video(data, quality="accurate").array)


def by_nvdec(data: bytes) -> np.ndarray:
    """Load a video by NVDEC, or skip the test on a device whose NVDEC does not decode AV1."""
    try:
        return host(sm.load_video(data, cuda=0, decoder="nvdec")).astype(int)
    except sm.DecodeError as error:
        if "NVDEC of this device does not decode av1" not in str(error):
            raise
        pytest.skip(str(error))


@on_gpu
@pytest.mark.parametrize(
    ("codec", "format", "pix_fmt", "size"),
    [
        ("libsvtav1", "mp4", "yuv420p", (320, 240)),
        ("libsvtav1", "mp4", "yuv420p10le", (320, 240)),
        ("libvpx-vp9", "webm", "yuv420p", (320, 240)),
        ("libvpx-vp9", "webm", "yuv420p", (319, 239)),
        ("libx264", "mpegts", "yuv420p", (322, 242)),
    ],
)
def test_other_codecs_and_odd_sizes(codec: str, format: str, pix_fmt: str, size: Any) -> None:
    planes = index_planes(12, *size, pix_fmt)
    data = make_video(planes, codec=codec, format=format, pix_fmt=pix_fmt, gop_size=6)
    want = sm.load_video(data, quality="accurate").array.astype(int)
    assert np.abs(by_nvdec(data) - want).max() <= 2


@on_gpu
def test_grain_of_av1_film_is_put_on_as_the_cpu_puts_it_on() -> None:
    data = make_video(
        index_planes(30, *SIZE), codec="libsvtav1", options={"svtav1-params": "film-grain=20"}
    )
    want = sm.load_video(data, quality="accurate").array
    assert np.abs(by_nvdec(data) - want).mean() <= 0.5


@on_gpu
def test_windows_of_vp9_with_hidden_frames() -> None:
    """A packet with a hidden frame has another time in NVIDIA's parser than it was given."""
    options = {"auto-alt-ref": "1", "lag-in-frames": "16"}
    data = make_video(
        index_planes(50, *SIZE), codec="libvpx-vp9", format="webm", frame_rate=30, options=options
    )
    for window in ((0.3, 0.9), (0.5, 1.2)):
        found, times = load(data, 0, window)
        want = sm.load_video(data, window, quality="accurate").array
        assert np.abs(host(found).astype(int) - want).max() <= 2
        packets = sm.demux_video(data, timestamp=window)
        assert times == sm.decode_packets(packets, filter_desc=None).timestamps


@on_gpu
def test_results_are_not_written_over_while_they_are_read() -> None:
    want = sm.load_video(clip("libx264"), quality="accurate").array
    kept = [sm.load_video(clip("libx264"), cuda=0, decoder="nvdec") for _ in range(8)]
    for buffer in kept:
        assert np.abs(host(buffer).astype(int) - want).max() <= 2


@on_gpu
def test_memory_stays_flat_over_many_videos() -> None:
    import cupy

    def used() -> int:
        gc.collect()
        free, total = cupy.cuda.runtime.memGetInfo()
        return int(total - free)

    before = 0
    for number in range(60):
        if number == 20:  # pools and decoders have reached their final size
            before = used()
        sm.load_video(clip("libx264"), cuda=0, decoder="nvdec", num_frames=1 + number % 7)
    assert used() <= before + (64 << 20)


@on_gpu
def test_a_device_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="CUDA device 999 was asked for"):
        sm.load_video(clip("libx264"), cuda=999)
