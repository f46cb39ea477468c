"""Videos by NVDEC on a GPU, held to what is promised of it; the same tests run with a stand-in for it."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from nvdec_stand_in import StandIn

import spdl_media as sm
from spdl_media.cuda.fallback import CPUFallbackWarning
from spdl_media.cuda.nvdec import decode_to_device, streaming_load_video_nvdec
from spdl_media.testing import index_planes, make_video

NVDEC = "libnvcuvid.so.1"
on_gpu = pytest.mark.cuda("cupy", NVDEC)

# NVDEC has a smallest size, which differs by codec and card.
PLANES = index_planes(30, 320, 240)


def clip(codec: str, **options: Any) -> bytes:
    return make_video(PLANES, codec=codec, format="mp4", max_b_frames=2, gop_size=8, **options)


CLIPS = {codec: clip(codec) for codec in ("libx264", "libx265")}


@pytest.fixture(params=["stand-in", pytest.param("gpu", marks=on_gpu)])
def place(request: pytest.FixtureRequest) -> Any:
    return StandIn() if request.param == "stand-in" else 0


def host(found: Any) -> np.ndarray:
    """A copy in host memory."""
    on_device = isinstance(found, sm.CUDABuffer)
    return np.array(sm.transfer_buffer_cpu(found) if on_device else found)


def load(data: bytes, place: Any, window: Any = None, **options: Any) -> Any:
    return decode_to_device(sm.demux_video(data, timestamp=window), cuda=place, **options)


@pytest.mark.parametrize("codec", CLIPS)
def test_planes_are_the_cpus_bit_for_bit(place: Any, codec: str) -> None:
    batches = streaming_load_video_nvdec(CLIPS[codec], place, num_frames=7, decoder="pyav")
    found = np.concatenate([host(batch) for batch in batches])
    want = sm.load_video(CLIPS[codec], pix_fmt="nv12").array[:, 0]
    np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("codec", CLIPS)
@pytest.mark.parametrize("size", [{}, {"width": 96, "height": 80}])
@pytest.mark.parametrize("window", [None, (0.45, 1.75)])
def test_frames_and_their_times_are_those_of_the_cpu(
    place: Any, codec: str, size: Any, window: Any
) -> None:
    found, times = load(CLIPS[codec], place, window, decoder="pyav", **size)
    want = sm.load_video(CLIPS[codec], window, **size, quality="accurate").array
    assert np.abs(host(found).astype(int) - want).max() <= 2
    packets = sm.demux_video(CLIPS[codec], timestamp=window)
    assert times == sm.decode_packets(packets, filter_desc=None).timestamps


@pytest.mark.parametrize("codec", CLIPS)
@pytest.mark.cuda("nvidia.dali", "cupy", NVDEC)
@pytest.mark.parametrize("window", [None, (0.45, 1.75)])
def test_dali_gives_the_frames_of_the_cpu_in_windows(codec: str, window: Any) -> None:
    found, times = load(CLIPS[codec], 0, window, decoder="dali")
    want = sm.load_video(CLIPS[codec], window, quality="accurate").array
    assert np.abs(host(found).astype(int) - want).max() <= 2
    assert len(times) == len(want)


@pytest.mark.cuda("nvidia.dali", "cupy", NVDEC)
def test_dali_gives_the_frames_of_the_cpu() -> None:
    for options in ({"num_frames": 5}, {"frame_rate": 4}, {"layout": "NCHW"}):
        found, _ = load(CLIPS["libx264"], 0, decoder="dali", **options)
        want = sm.load_video(CLIPS["libx264"], **options, quality="accurate").array  # type: ignore[arg-type]
        assert np.abs(host(found).astype(int) - want).max() <= 2


@pytest.mark.parametrize("matrix", ["bt709", "bt2020nc"])
def test_ten_bits_and_their_matrix(place: Any, matrix: str) -> None:
    planes = index_planes(6, 320, 240, "yuv420p10le")
    options = {"colorspace": matrix}
    data = make_video(planes, codec="libx265", pix_fmt="yuv420p10le", options=options)
    found, _ = load(data, place, decoder="pyav")
    assert (
        np.abs(host(found).astype(int) - sm.load_video(data, quality="accurate").array).max() <= 2
    )
    (p010,) = streaming_load_video_nvdec(data, place, num_frames=6, decoder="pyav")
    want = sm.load_video(data, pix_fmt="p010le", quality="accurate").array[:, 0]
    np.testing.assert_array_equal(host(p010), want)


def test_what_nvdec_cannot_decode_is_decoded_by_the_cpu(place: Any) -> None:
    frames = index_planes(5, 320, 240, "yuv444p")
    data = make_video(frames, codec="libx264", pix_fmt="yuv444p")
    with pytest.warns(CPUFallbackWarning, match="yuv444p"):
        found, _ = load(data, place)
    np.testing.assert_array_equal(host(found), sm.load_video(data, quality="accurate").array)
    with pytest.raises(sm.DecodeError, match="yuv444p"):
        load(data, place, decoder="pyav")


@on_gpu
def test_results_are_not_written_over_while_they_are_read() -> None:
    want = sm.load_video(CLIPS["libx264"], quality="accurate").array
    kept = [sm.load_video(CLIPS["libx264"], cuda=0, decoder="pyav") for _ in range(8)]
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
        if number == 20:  # pools and decoders have what they need
            before = used()
        sm.load_video(CLIPS["libx264"], cuda=0, decoder="pyav", num_frames=1 + number % 7)
    assert used() <= before + (64 << 20)


@on_gpu
def test_a_device_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="CUDA device 999 was asked for"):
        sm.load_video(CLIPS["libx264"], cuda=999)
