"""Images through DALI on a GPU, within the promised limits. The same tests run with DALI on the CPU."""

from __future__ import annotations

import gc
import importlib.util
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from dali_oracle import CLOSE, cpu, differences, jpeg, photo, png_with_wrong_data

import spdl_media as sm
from spdl_media.testing import index_frames, make_image

# Ignore the warning about the fallback to the CPU; tests of the warning expect it explicitly.
pytestmark = pytest.mark.filterwarnings("ignore::spdl_media.CPUFallbackWarning")

has_dali = bool(importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.dali"))
on_gpu = pytest.mark.cuda("nvidia.dali", "torch")

COUNT = 6
PHOTOS = [jpeg(200 - 17 * index, 90 + 23 * index, index) for index in range(COUNT)]
SIZE: dict[str, Any] = {"width": 48, "height": 40}
WANT = cpu(PHOTOS, **SIZE)


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.skipif(not has_dali, reason="DALI is not installed")),
        pytest.param(0, marks=on_gpu, id="gpu"),
    ]
)
def place(request: pytest.FixtureRequest) -> Any:
    return request.param


def decode(srcs: Any, place: Any, **options: Any) -> Any:
    from dali_oracle import decode_image_batch

    return decode_image_batch(srcs, cuda=place, **SIZE, **options)


def host(buffer: Any) -> np.ndarray:
    """Copy a buffer to host memory."""
    on_device = isinstance(buffer, sm.CUDABuffer)
    return np.array(sm.transfer_buffer_cpu(buffer) if on_device else buffer)


@pytest.mark.parametrize("mode", ["pad", "crop", None])
def test_ragged_batches_are_as_on_the_cpu_path(place: Any, mode: Any) -> None:
    buffer = decode(PHOTOS, place, scale_mode=mode)
    assert buffer.device == ("cpu" if place == "cpu" else "cuda:0")
    assert differences(host(buffer), cpu(PHOTOS, **SIZE, scale_mode=mode)).max() <= CLOSE


@pytest.mark.parametrize("pix_fmt", ["yuvj420p", "yuvj422p", "yuvj444p"])
def test_images_in_their_own_size(place: Any, pix_fmt: str) -> None:
    data = jpeg(120, 90, pix_fmt=pix_fmt)
    buffer = sm.decode_image_nvjpeg([data], cuda=place)
    want = cpu([data], layout="NCHW")
    assert buffer.shape == (1, 3, 90, 120)
    assert differences(host(buffer), want).max() <= CLOSE


def test_images_stretched_as_in_spdl(place: Any) -> None:
    buffer = sm.load_image_batch_nvjpeg(PHOTOS, cuda=place, **SIZE)
    want = cpu(PHOTOS, **SIZE, scale_mode=None, layout="NCHW")
    assert differences(host(buffer), want).max() <= CLOSE


@pytest.mark.parametrize("position", range(COUNT))
@pytest.mark.parametrize("kind", ["cut short", "pixels"])
def test_a_bad_image_in_each_position(place: Any, kind: str, position: int) -> None:
    bad = PHOTOS[0][:400] if kind == "cut short" else png_with_wrong_data(photo(40, 30))
    srcs = [*PHOTOS]
    srcs[position] = bad
    with pytest.raises(sm.DecodeError, match=f"input {position} of the batch of {COUNT}: "):
        decode(srcs, place)
    rest = [index for index in range(COUNT) if index != position]
    skipped = decode(srcs, place, on_error="skip")
    assert skipped.indices == tuple(rest)
    assert differences(host(skipped), WANT[rest]).max() <= CLOSE
    filled = decode(srcs, place, on_error="fill")
    assert [failure.index for failure in filled.failures] == [position]
    assert not host(filled)[position].any()
    assert differences(host(filled)[rest], WANT[rest]).max() <= CLOSE


def test_formats_that_dali_lacks_take_their_batch_to_the_cpu(place: Any) -> None:
    frames = index_frames(1, 50, 34)[0]
    srcs = [
        PHOTOS[0],
        make_image(frames, codec="gif"),
        make_image(frames, codec="tiff"),
        PHOTOS[1],
    ]
    np.testing.assert_array_equal(host(decode(srcs, place)), cpu(srcs, **SIZE))


def test_many_threads(place: Any) -> None:
    def work(number: int) -> float:
        order = np.random.default_rng(number).permutation(COUNT)[: 1 + number % COUNT]
        return float(
            differences(host(decode([PHOTOS[i] for i in order], place)), WANT[order]).max()
        )

    with ThreadPoolExecutor(12) as threads:
        assert max(threads.map(work, range(48))) <= CLOSE


def test_a_result_that_is_kept_is_not_written_over(place: Any) -> None:
    kept = [decode([PHOTOS[index % COUNT]], place) for index in range(24)]
    for index, buffer in enumerate(kept):
        row = index % COUNT
        assert differences(host(buffer), WANT[row : row + 1]).max() <= CLOSE


@on_gpu
def test_memory_stays_flat_over_a_thousand_ragged_batches() -> None:
    import torch

    def used() -> int:
        gc.collect()
        free, total = torch.cuda.mem_get_info(0)
        return int(total - free)

    rng = np.random.default_rng(0)
    before = 0
    for number in range(1000):
        if number == 200:  # pools have reached their final size
            before = used()
        order = rng.permutation(COUNT)[: rng.integers(1, COUNT + 1)]
        decode([PHOTOS[index] for index in order], 0)
    assert used() <= before + (64 << 20)


@on_gpu
def test_a_device_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="CUDA device 999 was asked for"):
        decode(PHOTOS, 999)


@on_gpu
def test_a_consumer_on_a_side_stream() -> None:
    import torch

    side = torch.cuda.Stream(device=0)
    with torch.cuda.stream(side):
        copies = [sm.to_torch(decode([PHOTOS[index]], 0)).clone() for index in range(COUNT)]
    side.synchronize()
    for index, tensor in enumerate(copies):
        assert differences(tensor.cpu().numpy(), WANT[index : index + 1]).max() <= CLOSE
