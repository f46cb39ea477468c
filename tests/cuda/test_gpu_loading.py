"""Public functions with ``cuda=`` on a GPU. Where possible, the same tests run with a stand-in for CuPy."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

import color_kernel
import numpy as np
import pytest
from cupy_stand_in import CupyWithKernels, LazyCard
from dali_oracle import CLOSE, differences, jpeg

import spdl_media as sm
from spdl_media.cuda import images
from spdl_media.testing import AudioTrack, VideoTrack, index_planes, index_samples, make_media

NVDEC = "libnvcuvid.so.1"
PHOTOS = [jpeg(200 - 17 * index, 90 + 23 * index, index) for index in range(6)]
SIZE: dict[str, Any] = {"width": 48, "height": 40}
CLIP = make_media(
    [
        VideoTrack(frames=index_planes(30, 320, 240), codec="libx264"),
        AudioTrack(samples=index_samples(24000, 2), sample_rate=24000, codec="flac"),
    ]
)


@pytest.fixture(params=["stand-in", pytest.param("gpu", marks=pytest.mark.cuda("cupy"))])
def new_stream(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Any]:
    """Use CuPy only; return a function that makes a stream on the first device and returns its address."""
    for name in ("torch", "nvidia.dali"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(images, "_has_dali", lambda: False)
    kept: list[Any] = []
    if request.param == "gpu":
        import cupy

        def new() -> int:
            kept.append(cupy.cuda.Stream(non_blocking=True))
            return int(kept[-1].ptr)

        yield new
        return
    library = color_kernel.compiled(color_kernel.shared_folder(tmp_path_factory))
    card = LazyCard(devices=1, nbytes=1 << 25)
    monkeypatch.setitem(sys.modules, "cupy", CupyWithKernels(card, library, is_eager=True))
    yield lambda: card.new_stream(0).address
    card.run()
    gc.collect()


def host(buffer: Any) -> np.ndarray:
    """Copy a buffer to host memory."""
    assert isinstance(buffer, sm.CUDABuffer)
    return np.array(sm.transfer_buffer_cpu(buffer))


def test_images_on_a_stream_of_the_users(new_stream: Any) -> None:
    config = sm.cuda_config(0, stream=new_stream())
    for layout in ("NHWC", "NCHW"):
        options: dict[str, Any] = {**SIZE, "layout": layout}
        buffer = sm.load_image_batch(PHOTOS, cuda_config=config, decoder="cpu", **options)
        buffer.wait_on(new_stream())
        np.testing.assert_array_equal(host(buffer), sm.load_image_batch(PHOTOS, **options))


def test_single_images_audio_and_copies_are_equal(new_stream: Any) -> None:
    image = sm.load_image(PHOTOS[0], cuda=0, **SIZE)
    np.testing.assert_array_equal(host(image), sm.load_image(PHOTOS[0], **SIZE))
    sound = sm.load_audio(CLIP, (0.25, 0.75), cuda=0)
    np.testing.assert_array_equal(host(sound), sm.load_audio(CLIP, (0.25, 0.75)))
    frames = sm.load_video(CLIP, cuda=0, decoder="cpu", num_frames=4)
    np.testing.assert_array_equal(
        host(frames), sm.load_video(CLIP, num_frames=4, quality="accurate")
    )


def test_frames_and_audio_of_a_clip(new_stream: Any) -> None:
    found = sm.load_clip(CLIP, 0.2, 0.8, cuda=0, decoder="cpu")
    want = sm.load_clip(CLIP, 0.2, 0.8, quality="accurate")
    np.testing.assert_array_equal(host(found.video), want.video)
    np.testing.assert_array_equal(host(found.audio), want.audio)
    np.testing.assert_array_equal(found.timestamps, want.timestamps)
    assert found.audio_timestamp == want.audio_timestamp


# --- tests that need a real GPU


@pytest.mark.cuda("torch")
def test_batches_by_whichever_way_is_first() -> None:
    found = host(sm.load_image_batch(PHOTOS, cuda=0, **SIZE))
    assert differences(found, sm.load_image_batch(PHOTOS, **SIZE)).max() <= CLOSE


@pytest.mark.cuda("cupy", NVDEC)
def test_a_clip_by_whichever_decoder_is_first() -> None:
    found, want = (
        sm.load_clip(CLIP, 0.2, 0.8, cuda=0),
        sm.load_clip(CLIP, 0.2, 0.8, quality="accurate"),
    )
    assert np.abs(host(found.video).astype(int) - np.asarray(want.video)).max() <= 2
    assert found.timestamps == want.timestamps
    np.testing.assert_array_equal(host(found.audio), want.audio)


@pytest.mark.cuda("torch", "cupy", NVDEC)
def test_nvdec_opens_where_pytorch_has_used_the_device() -> None:
    import torch

    assert float(torch.ones(8, device="cuda:0").sum()) == 8
    found = sm.load_video(CLIP, cuda=0, decoder="nvdec", num_frames=5)
    want = sm.load_video(CLIP, num_frames=5, quality="accurate").array
    assert np.abs(host(found).astype(int) - want).max() <= 2


@pytest.mark.cuda("torch")
def test_tensors_go_and_come_back() -> None:
    import torch

    batch = {
        "image": torch.arange(1 << 20, dtype=torch.int32),
        "pair": (torch.ones(3), ["text", torch.zeros((2, 0))]),
        "buffer": sm.convert_array(np.arange(7)),
    }
    there = sm.transfer_tensor(batch, cuda_config=0)
    assert [there["image"].device.type, there["pair"][0].device.index] == ["cuda", 0]
    assert there["buffer"].device == "cuda:0"
    assert bool((there["image"] == batch["image"].cuda()).all()), "on the default stream"
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        doubled = there["image"] * 2
    event = side.record_event()
    back = sm.transfer_tensor_d2h({**there, "image": doubled}, event=event)
    assert bool((back["image"] == batch["image"] * 2).all())
    assert back["image"].is_pinned()
    assert back["pair"][1][0] == "text"
    assert back["pair"][1][1].shape == (2, 0)
    np.testing.assert_array_equal(back["buffer"], np.arange(7))


@pytest.mark.cuda("torch")
def test_tensors_stay_while_they_are_read() -> None:
    import torch

    results = []
    for value in range(32):
        there = sm.transfer_tensor(torch.full((1 << 20,), value))
        square = torch.ones((2048, 2048), device="cuda:0")
        for _ in range(4):
            square = square @ square * 1e-4
        results.append(there + 0)  # after that one, while the next copy is already under way
        del there
    assert [(int(one.min()), int(one.max())) for one in results] == [(v, v) for v in range(32)]


@pytest.mark.cuda("torch")
def test_jax_takes_a_buffer() -> None:
    jax = pytest.importorskip("jax")
    if not any(device.platform == "gpu" for device in jax.devices()):
        pytest.skip("jax finds no device")
    buffer = sm.transfer_buffer(sm.convert_array(np.arange(9, dtype=np.int32)), cuda_config=0)
    np.testing.assert_array_equal(np.asarray(sm.to_jax(buffer)), np.arange(9))


@pytest.mark.cuda("torch")
def test_numba_takes_a_buffer() -> None:
    cuda = pytest.importorskip("numba.cuda")
    if not cuda.is_available():
        pytest.skip("numba finds no device")
    buffer = sm.transfer_buffer(sm.convert_array(np.arange(9)), cuda_config=0)
    np.testing.assert_array_equal(sm.to_numba(buffer).copy_to_host(), np.arange(9))


@pytest.fixture
def second() -> int:
    """Return a device that is not the current one, or skip the test."""
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("there is one device")  # it may be another one
    return 1


@pytest.mark.cuda("torch")
def test_a_buffer_of_another_device_is_taken(second: int) -> None:
    import torch

    buffer = sm.transfer_buffer(sm.convert_array(np.arange(9)), cuda_config=second)
    assert torch.cuda.current_device() == 0
    for tensor in (torch.from_dlpack(buffer), sm.to_torch(buffer)):
        assert tensor.device.index == second
        assert tensor.tolist() == list(range(9))
    np.testing.assert_array_equal(host(buffer), np.arange(9))
    moved = sm.transfer_tensor(torch.arange(5), cuda_config=second)
    assert moved.device.index == second
    assert sm.transfer_tensor_d2h(moved, cuda_config=second).tolist() == list(range(5))
    assert torch.cuda.current_device() == 0


@pytest.mark.cuda("torch")
def test_images_on_another_device(second: int) -> None:
    want = sm.load_image_batch(PHOTOS, **SIZE)
    buffer = sm.load_image_batch(PHOTOS, cuda=second, **SIZE)
    assert buffer.device == f"cuda:{second}"
    assert differences(host(buffer), want).max() <= CLOSE
    planes = sm.load_image_batch(PHOTOS, cuda=second, decoder="cpu", **SIZE)
    assert differences(host(planes), want).max() <= 1


@pytest.mark.cuda("torch", "cupy", NVDEC)
def test_videos_on_another_device(second: int) -> None:
    buffer = sm.load_video(CLIP, cuda=second, decoder="nvdec", num_frames=5)
    assert buffer.device == f"cuda:{second}"
    want = sm.load_video(CLIP, num_frames=5, quality="accurate").array
    assert np.abs(host(buffer).astype(int) - want).max() <= 2


@pytest.mark.cuda("nvidia.dali", "torch")
def test_an_image_of_dali_that_is_dropped_while_it_is_read_is_not_written_over() -> None:
    import torch

    side = torch.cuda.Stream()
    want = [np.asarray(sm.load_image_batch([one], **SIZE)) for one in PHOTOS]
    results = []
    with torch.cuda.stream(side):
        square = torch.ones((4096, 4096), device="cuda:0")
        for number in range(24):
            for _ in range(8):
                square = square @ square * 1e-4
            photo = PHOTOS[number % len(PHOTOS)]
            buffer = sm.load_image_batch([photo], cuda=0, decoder="dali", **SIZE)
            results.append(sm.to_torch(buffer).clone())
            del buffer
    side.synchronize()
    for number, result in enumerate(results):
        assert differences(result.cpu().numpy(), want[number % len(PHOTOS)]).max() <= CLOSE
