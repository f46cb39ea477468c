"""``load_*`` with ``cuda=`` on stand-in devices: the choice of the decoder, and the results.

The kernel is the package's own source, compiled for the CPU. DALI's operators run on the CPU. NVDEC is
replaced by a software decoder with frames in NVDEC's layout.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import color_kernel
import numpy as np
import pytest
from cupy_stand_in import CupyWithKernels, LazyCard, host
from dali_oracle import CLOSE, differences, jpeg
from fake_cuda import HISTORY, FakeTorch, fresh_process, install
from nvdec_stand_in import HardwareDecoder
from still_metadata import exif_block, jpeg_with_exif, png_with_exif

import spdl_media as sm
from spdl_media.batch import Stopped
from spdl_media.cuda import images, video_rows
from spdl_media.cuda.cuvid import NotOnDeviceError
from spdl_media.cuda.nvdec import DecoderPool
from spdl_media.load import _prepare_image_batch
from spdl_media.testing import (
    AudioTrack,
    VideoTrack,
    index_frames,
    index_planes,
    index_samples,
    make_image,
    make_media,
    make_video,
)

SIZES = [(200, 150), (97, 130), (320, 64), (64, 65)]
PHOTOS = [jpeg(*size, seed) for seed, size in enumerate(SIZES)]
OPTIONS: dict[str, Any] = {"width": 48, "height": 40}
BAD = PHOTOS[0][:200]
has_dali = importlib.util.find_spec("nvidia") is not None and (
    importlib.util.find_spec("nvidia.dali") is not None
)
if has_dali:  # before PyTorch is replaced by a stand-in, for which it looks
    importlib.import_module("nvidia.dali.experimental.dynamic")
needs_dali = pytest.mark.skipif(not has_dali, reason="DALI is not installed")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return color_kernel.compiled(color_kernel.shared_folder(tmp_path_factory))


# With DALI, a batch with a bad image is decoded on the CPU, with a warning.
pytestmark = pytest.mark.filterwarnings("ignore:.*The CPU decodes the images")


@pytest.fixture
def card() -> LazyCard:
    return LazyCard(devices=2, nbytes=1 << 24)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """By default, no library finds a device, and DALI is not installed."""
    for name in ("torch", "cupy"):
        monkeypatch.setitem(sys.modules, name, None)
    fresh_process(monkeypatch)
    monkeypatch.setattr(images, "_has_dali", lambda: False)
    yield
    gc.collect()


@pytest.fixture
def torch(card: LazyCard, monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    """Install a stand-in for PyTorch only: finished arrays are copied."""
    return install(monkeypatch, FakeTorch(card))


@pytest.fixture
def cupy(
    card: LazyCard, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> Iterator[CupyWithKernels]:
    """Install a stand-in for CuPy only: planes are copied, and the kernel converts them to RGB."""
    fake = CupyWithKernels(card, library)
    install(monkeypatch, fake)
    yield fake
    card.run()


@pytest.fixture
def dali(torch: FakeTorch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use DALI's operators on the CPU as a stand-in for the device, and PyTorch for everything else."""
    pytest.importorskip("nvidia.dali")
    from spdl_media.cuda import dali

    pool = dali.slot_pool(None)
    monkeypatch.setattr(images, "_has_dali", lambda: True)
    monkeypatch.setattr(images, "check_device", lambda _: None)
    monkeypatch.setattr("spdl_media.cuda.dali_decode.slot_pool", lambda _: pool)


@pytest.fixture(params=["torch", "cupy", pytest.param("dali", marks=needs_dali)])
def way(request: pytest.FixtureRequest) -> str:
    """Each path of images to a device: copied by one of the libraries, or decoded by DALI."""
    request.getfixturevalue(request.param)
    return str(request.param)


@pytest.fixture(params=["torch", "cupy"])
def copying_library(request: pytest.FixtureRequest) -> None:
    """Each of the libraries that copy finished arrays to a device."""
    request.getfixturevalue(request.param)


def rows_of(buffer: Any) -> np.ndarray:
    return host(buffer) if isinstance(buffer, sm.CUDABuffer) else np.asarray(buffer)


# Images


@pytest.mark.parametrize("mode", ["pad", "crop", None])
@pytest.mark.parametrize("algo", ["bicubic", "bilinear"])
def test_batches_are_those_of_the_cpu(way: str, mode: Any, algo: Any) -> None:
    """On each path, the geometry is the same, and the mean difference is at most two levels."""
    options = {**OPTIONS, "scale_mode": mode, "scale_algo": algo}
    buffer = sm.load_image_batch(PHOTOS, cuda=0, **options)
    found = differences(rows_of(buffer), sm.load_image_batch(PHOTOS, **options))
    assert found.max() <= (CLOSE if way == "dali" else 0)
    assert (buffer.shape, buffer.dtype) == ((4, 40, 48, 3), np.uint8)
    assert (buffer.failures, buffer.indices) == ((), (0, 1, 2, 3))


@pytest.mark.parametrize("layout", [None, "NHWC", "NCHW"])
@pytest.mark.parametrize("pix_fmt", ["rgb24", "bgr24", "gray"])
def test_layout_and_order_of_colours(way: str, layout: Any, pix_fmt: str) -> None:
    options = {**OPTIONS, "layout": layout, "pix_fmt": pix_fmt}
    buffer = sm.load_image_batch(PHOTOS, cuda=0, **options)
    want = sm.load_image_batch(PHOTOS, **options)
    assert buffer.shape == want.shape
    assert differences(rows_of(buffer), want).max() <= CLOSE


def test_one_size_without_a_size(way: str) -> None:
    buffer = sm.load_image_batch([PHOTOS[1]] * 2, cuda=0)
    assert buffer.shape == (2, 130, 97, 3)
    with pytest.raises(sm.ConvertError, match=r"is 200x150 .*97x130"):
        sm.load_image_batch(PHOTOS[:2], cuda=0)


def test_work_waits_on_the_stream_that_was_asked_for(cupy: CupyWithKernels, card: LazyCard) -> None:
    card.runs_by_itself = False
    config = sm.cuda_config(1, stream=0x4400)
    buffer = sm.load_image_batch(PHOTOS, cuda_config=config, **OPTIONS)
    assert buffer.device == "cuda:1"
    assert {line.partition(" on ")[2] for line in card.log if " on " in line} == {
        "stream 0x4400 of device 1"
    }
    assert card.stream(1, 0x4400).work, "nothing is done before the stream runs"
    other = card.new_stream(1)
    buffer.wait_on(other.address)
    card.run()
    assert not other.work
    want = sm.load_image_batch(PHOTOS, **OPTIONS)
    assert differences(host(buffer), want).max() <= 1


def test_many_threads(cupy: CupyWithKernels) -> None:
    want = sm.load_image_batch(PHOTOS, **OPTIONS)
    with ThreadPoolExecutor(4) as pool:
        batches = pool.map(lambda _: sm.load_image_batch(PHOTOS, cuda=0, **OPTIONS), range(12))
        for batch in batches:
            assert differences(host(batch), want).max() <= 1


def test_memory_of_a_device_stays_as_it_is(cupy: CupyWithKernels, card: LazyCard) -> None:
    used = []
    for round in range(20):
        buffer = sm.load_image_batch(PHOTOS[: 1 + round % 4], cuda=0, **OPTIONS)
        buffer.synchronize()
        del buffer
        used.append(card.used[0])
    assert used[3] == used[-1]


@pytest.mark.parametrize("position", range(4))
@pytest.mark.parametrize("bad", [BAD, b"no picture", "no such file"], ids=["cut", "none", "path"])
def test_a_bad_image_at_each_position(way: str, position: int, bad: Any) -> None:
    srcs: list[Any] = [*PHOTOS]
    srcs[position] = bad
    kind = sm.SourceError if bad == "no such file" else (sm.DecodeError, sm.DemuxError)
    with pytest.raises(kind, match=f"input {position} of the batch of 4"):
        sm.load_image_batch(srcs, cuda=0, **OPTIONS)
    want = sm.load_image_batch(srcs, on_error="fill", **OPTIONS)
    filled = sm.load_image_batch(srcs, cuda=0, on_error="fill", **OPTIONS)
    assert differences(rows_of(filled), want).max() <= CLOSE
    assert not rows_of(filled)[position].any()
    assert filled.indices == (0, 1, 2, 3)
    assert [f.index for f in filled.failures] == [position]
    assert isinstance(filled.failures[0].error, kind)
    assert filled.failures[0].source == want.failures[0].source
    assert list(filled.valid) == [index != position for index in range(4)]
    skipped = sm.load_image_batch(srcs, cuda=0, on_error="skip", **OPTIONS)
    assert skipped.indices == tuple(index for index in range(4) if index != position)
    rest = rows_of(filled)[list(skipped.indices)]
    np.testing.assert_array_equal(rows_of(skipped), rest)


def test_nothing_but_bad_images(way: str) -> None:
    with pytest.raises(sm.ConvertError, match="none of the 2 inputs could be loaded"):
        sm.load_image_batch([BAD, BAD], cuda=0, on_error="skip", **OPTIONS)
    with pytest.raises(sm.ConvertError, match="gives zeros if width="):
        sm.load_image_batch([BAD, BAD], cuda=0, on_error="fill")
    buffer = sm.load_image_batch([BAD, BAD], cuda=0, on_error="fill", **OPTIONS)
    assert buffer.shape == (2, 40, 48, 3)
    assert not rows_of(buffer).any()
    assert not buffer.valid.any()


@pytest.mark.usefixtures("copying_library")
def test_crops_and_flips_are_finished_on_the_cpu() -> None:
    cuts: dict[str, Any] = {
        "crops": [(3, 5, 50, 31), None, (0, 0, 64, 64), (1, 1, 9, 9)],
        "flips": [True, False, False, True],
    }
    buffer = sm.load_image_batch(PHOTOS, cuda=0, **cuts, **OPTIONS)
    np.testing.assert_array_equal(host(buffer), sm.load_image_batch(PHOTOS, **cuts, **OPTIONS))
    drawn: dict[str, Any] = {"crops": sm.RandomResizedCrop(), "flips": 0.5, "rng": 0}
    buffer = sm.load_image_batch(PHOTOS, cuda=0, **drawn, **OPTIONS)
    expected = sm.load_image_batch(PHOTOS, **drawn, **OPTIONS)
    np.testing.assert_array_equal(host(buffer), expected)
    assert (buffer.boxes, buffer.flips) == (expected.boxes, expected.flips)


@pytest.mark.usefixtures("copying_library")
def test_frames_by_number_and_clips_are_copied() -> None:
    data = make_media(
        [
            VideoTrack(frames=index_planes(12, 64, 48), codec="libx265", max_b_frames=2),
            AudioTrack(samples=index_samples(9600, 2), sample_rate=8000, codec="flac"),
        ]
    )
    options: dict[str, Any] = {"width": 32, "height": 24, "crops": (8, 8, 40, 30), "flips": True}
    with sm.VideoFile(data) as video:
        buffer = video.load([7, 2, 7], cuda=0, **options)
        # On a device, arrays are those of the exact conversion, with any decoder.
        want = video.load([7, 2, 7], quality="accurate", **options)
        np.testing.assert_array_equal(host(buffer), want)
        assert (buffer.boxes, buffer.flips) == (want.boxes, want.flips)
        number = {"num_clips": 2, "num_frames": 3, "rng": 0, "audio": True, "width": 32}
        clips = sm.sample_clips(video, cuda=0, **number)
        on_cpu = sm.sample_clips(video, quality="accurate", **number)
        np.testing.assert_array_equal(host(clips.video), on_cpu.video)
        assert on_cpu.audio is not None
        np.testing.assert_array_equal(host(clips.audio), on_cpu.audio)


@needs_dali
def test_crops_and_flips_with_dali_installed(dali: None) -> None:
    flips = [True, False, False, True]
    buffer = sm.load_image_batch(PHOTOS, cuda=0, flips=flips, **OPTIONS)
    expected = sm.load_image_batch(PHOTOS, flips=flips, **OPTIONS)
    assert 0 < differences(rows_of(buffer), expected).max() <= CLOSE


@pytest.mark.parametrize("dtype", ["float16", "float32", "uint8"])
def test_numbers_are_those_of_the_cpu(way: str, dtype: Any) -> None:
    numbers: dict[str, Any] = {"dtype": dtype}
    if dtype != "uint8":
        numbers |= {"mean": (0.485, 0.456, 0.406), "std": 0.25}
    for layout in ("NHWC", "NCHW"):
        options = {**OPTIONS, **numbers, "layout": layout}
        buffer = sm.load_image_batch(PHOTOS, cuda=0, **options)
        expected = sm.load_image_batch(PHOTOS, **options)
        assert (buffer.dtype, buffer.shape) == (dtype, expected.shape)
        if way == "dali":
            found = np.abs(rows_of(buffer).astype(float) - expected.array)
            assert found.mean() <= CLOSE / (1 if dtype == "uint8" else 255 * 0.25)
        else:
            np.testing.assert_array_equal(host(buffer), expected)
    one = sm.load_image(PHOTOS[0], cuda=0, **options)
    np.testing.assert_array_equal(host(one), sm.load_image(PHOTOS[0], **options))


def test_yuv_and_its_colours_arrive(torch: FakeTorch) -> None:
    options = {**OPTIONS, "pix_fmt": "yuv420p"}
    buffer = sm.load_image_batch(PHOTOS, cuda=0, **options)
    want = sm.load_image_batch(PHOTOS, **options)
    np.testing.assert_array_equal(host(buffer), want)
    assert (buffer.colorspace, buffer.color_range) == (want.colorspace, want.color_range)
    assert buffer.color_range == "pc"


@pytest.mark.parametrize("orientation", [1, 3, 6, 7])
@pytest.mark.parametrize("codec", ["mjpeg", "png"])
def test_a_still_loaded_as_a_video_is_upright(
    nvdec: CupyWithKernels, codec: str, orientation: int
) -> None:
    put = {"mjpeg": jpeg_with_exif, "png": png_with_exif}[codec]
    stored = index_frames(1, 96, 64)[0]
    data = put(make_image(stored, codec=codec), exif_block(orientation))
    with warnings.catch_warnings(action="ignore", category=sm.CPUFallbackWarning):
        for layout in (None, "NCHW"):
            got = host(sm.load_video(data, cuda=0, layout=layout))  # type: ignore[arg-type]
            want = sm.load_video(data, layout=layout, quality="accurate").array  # type: ignore[arg-type]
            assert got.shape == want.shape
            assert np.abs(got.astype(int) - want).max() <= 2
    upright_height = 96 if orientation > 4 else 64
    assert sm.load_video(data, cuda=0, decoder="cpu").shape == (
        1,
        upright_height,
        160 - upright_height,
        3,
    )


@pytest.mark.usefixtures("copying_library")
def test_leases_come_back_when_the_copy_is_done(card: LazyCard) -> None:
    card.runs_by_itself = False
    pool = sm.StoragePool(200_000, 1, pin_memory=False, on_exhausted="wait", timeout=10)
    buffer = sm.load_image_batch(PHOTOS, cuda=0, storage=pool, **OPTIONS)
    assert pool.num_free == 0
    card.run()
    # Wait until the thread that watches the copy has dropped its reference.
    again = sm.load_image_batch(PHOTOS, storage=pool, **OPTIONS)
    assert differences(host(buffer), again).max() <= 1


@pytest.mark.usefixtures("copying_library")
def test_a_storage_for_the_result_will_do() -> None:
    """Planes have the size of the files, so they need more memory."""
    pool = sm.StoragePool(4 * 40 * 48 * 3, 1, pin_memory=False, on_exhausted="raise")
    buffer = sm.load_image_batch(PHOTOS, cuda=0, storage=pool, **OPTIONS)
    assert differences(host(buffer), sm.load_image_batch(PHOTOS, **OPTIONS)).max() <= 1


@pytest.mark.usefixtures("copying_library")
def test_leases_come_back_after_an_error() -> None:
    pool = sm.StoragePool(200_000, 1, pin_memory=False, on_exhausted="raise")
    with pytest.raises(sm.DecodeError, match="input 3 of the batch of 4") as kept:
        sm.load_image_batch([*PHOTOS[:3], BAD], cuda=0, storage=pool, **OPTIONS)
    assert pool.num_free == 1, f"{kept} holds it"


@pytest.mark.usefixtures("copying_library")
def test_a_full_device_is_an_error_with_sizes(card: LazyCard) -> None:
    card.total = 20_000
    pool = sm.StoragePool(200_000, 1, pin_memory=False, on_exhausted="wait", timeout=10)
    with pytest.raises(
        sm.TransferError, match=r"\d+ bytes do not fit .*20000 bytes and \d+"
    ) as kept:
        sm.load_image_batch(PHOTOS, cuda=0, storage=pool, **OPTIONS)
    card.total = 1 << 24
    del kept
    buffer = sm.load_image_batch(PHOTOS, cuda=0, storage=pool, **OPTIONS)
    assert differences(host(buffer), sm.load_image_batch(PHOTOS, **OPTIONS)).max() <= 1


def test_one_image(way: str) -> None:
    buffer = sm.load_image(PHOTOS[0], cuda=0, **OPTIONS)
    assert buffer.shape == (40, 48, 3)
    # A single image is copied, although DALI is installed.
    np.testing.assert_array_equal(host(buffer), sm.load_image(PHOTOS[0], **OPTIONS))
    if way == "dali":
        forced = sm.load_image(PHOTOS[0], cuda=0, decoder="dali", **OPTIONS)
        assert 0 < differences(rows_of(forced)[None], host(buffer)[None]).max() <= CLOSE
    for src in (BAD, b"no picture"):
        with pytest.raises(sm.MediaError, match=r"^mine: (?!input)"):
            sm.load_image(src, cuda=0, name="mine", **OPTIONS)


def test_batches_as_awaitables(way: str) -> None:
    async def load() -> tuple[Any, Any]:
        return await asyncio.gather(
            sm.async_load_image_batch(PHOTOS, cuda=0, **OPTIONS),
            sm.async_load_image(PHOTOS[0], cuda=0, **OPTIONS),
        )

    batch, one = asyncio.run(load())
    assert differences(rows_of(batch), sm.load_image_batch(PHOTOS, **OPTIONS)).max() <= CLOSE
    assert one.shape == (40, 48, 3)


def test_decoders_that_are_forced(
    dali: None, card: LazyCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the arguments decide which decoder is used."""
    taken: list[str] = []
    for name in ("_load_by_dali", "copied"):
        real = getattr(images, name)
        monkeypatch.setattr(
            images,
            name,
            lambda *args, real=real, name=name: (taken.append(name), real(*args))[1],
        )
    for decoder in ("auto", "dali", "cpu"):
        sm.load_image_batch(PHOTOS, cuda=0, decoder=decoder, **OPTIONS)  # type: ignore[arg-type]
    assert taken == ["_load_by_dali", "_load_by_dali", "copied"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"filter_desc": "scale=8:8"}, r"filter_desc=. decoder='auto' takes the CPU"),
        ({"pix_fmt": "yuv420p"}, r"decoder='dali': DALI makes pix_fmt .*not 'yuv420p'"),
        (
            {"decode_config": sm.decode_config(decoder="mjpeg")},
            r"decoder='dali': decode_config\(decoder=, decoder_options=\) is for FFmpeg's decoders",
        ),
        ({"scale_algo": "lanczos"}, r"decoder='dali': DALI scales with .*not with 'lanczos'"),
    ],
)
def test_dali_is_forced_to_what_it_cannot(options: dict[str, Any], message: str) -> None:
    """The error is raised before a device is opened."""
    with pytest.raises(ValueError, match=message):
        sm.load_image_batch(PHOTOS, cuda=0, decoder="dali", **options)


def test_dali_is_forced_and_not_there(torch: FakeTorch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    for call in (sm.load_image_batch, lambda srcs, **o: sm.load_image(srcs[0], **o)):
        with pytest.raises(sm.MissingDependencyError, match="pip install nvidia-dali-cuda120"):
            call(PHOTOS, cuda=0, decoder="dali", **OPTIONS)


@pytest.mark.parametrize(
    "error", [sm.TransferError("DALI finds no CUDA device"), sm.MissingDependencyError("too old")]
)
def test_dali_that_cannot_be_used_is_reported(
    torch: FakeTorch, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(_: object) -> None:
        raise error

    monkeypatch.setattr(images, "_has_dali", lambda: True)
    monkeypatch.setattr("spdl_media.cuda.images.check_device", fails)
    with pytest.warns(sm.CPUFallbackWarning, match=rf"{error}. The CPU decodes the images") as told:
        buffer = sm.load_image_batch(PHOTOS, cuda=0, **OPTIONS)
    assert told[0].filename == __file__
    np.testing.assert_array_equal(host(buffer), sm.load_image_batch(PHOTOS, **OPTIONS))
    with pytest.raises(type(error), match=str(error)):
        sm.load_image_batch(PHOTOS, cuda=0, decoder="dali", **OPTIONS)


def test_zeros_have_the_size_of_the_others(way: str) -> None:
    srcs = [BAD, PHOTOS[1], PHOTOS[1]]
    buffer = sm.load_image_batch(srcs, cuda=0, on_error="fill")
    assert buffer.shape == (3, 130, 97, 3)
    assert not rows_of(buffer)[0].any()
    want = sm.load_image_batch(srcs, on_error="fill")
    assert differences(rows_of(buffer), want).max() <= 1


def test_memory_of_the_callers_own_allocator(cupy: CupyWithKernels, card: LazyCard) -> None:
    given, taken = [], []

    def allocate(nbytes: int, device: int, stream: int) -> int:
        given.append(card.allocate(nbytes, device, stream))
        return given[-1]

    def free(address: int) -> None:
        taken.append(address)
        card.free(address)

    config = sm.cuda_config(0, allocator=(allocate, free))
    buffer = sm.load_image_batch(PHOTOS, cuda=config, **OPTIONS)
    assert differences(host(buffer), sm.load_image_batch(PHOTOS, **OPTIONS)).max() <= 1
    assert (len(given), taken) == (1, [])
    del buffer
    gc.collect()
    assert taken == given


def test_a_batch_for_which_nobody_waits_ends(way: str) -> None:
    asked: list[int] = []
    steps = _prepare_image_batch(PHOTOS, width=48, height=40, cuda=0)
    with pytest.raises(Stopped):
        steps(lambda: bool(asked.append(1)) or len(asked) > 2)
    assert len(asked) == 3


# Videos

PLANES = index_planes(20, 64, 48)
CLIP = make_video(PLANES, codec="libx264", format="mp4", max_b_frames=2, gop_size=8)


@pytest.fixture
def nvdec(cupy: CupyWithKernels, monkeypatch: pytest.MonkeyPatch) -> CupyWithKernels:
    """A stand-in driver with its video library: a software decoder, with frames in NVDEC's layout."""
    cupy.card.is_eager = True
    monkeypatch.setattr("spdl_media.cuda.videos.missing_library", lambda: None)
    monkeypatch.setattr(video_rows.VideoDevice, "decoders", DecoderPool())
    monkeypatch.setattr(video_rows.VideoDevice, "open_decoder", lambda *_: HardwareDecoder())
    return cupy


def test_a_video_that_turns_out_not_to_be_for_the_hardware(
    nvdec: CupyWithKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(*_: object) -> Any:
        raise NotOnDeviceError("NVDEC of this device does not decode it")

    monkeypatch.setattr(HardwareDecoder, "decode", decode)
    said = "NVDEC of this device does not decode it"
    with pytest.warns(sm.CPUFallbackWarning, match=said):
        buffer = sm.load_video(CLIP, cuda=1)
    np.testing.assert_array_equal(host(buffer), sm.load_video(CLIP, quality="accurate"))
    with pytest.raises(sm.DecodeError, match=rf"{said}.*decoder='auto'"):
        sm.load_video(CLIP, cuda=1, decoder="nvdec")


@pytest.mark.parametrize("codec", ["libx264", "libx265"])
@pytest.mark.parametrize(
    "options", [{}, {"width": 30, "height": 40}, {"frame_rate": 5}, {"num_frames": 3}]
)
def test_videos_are_those_of_the_cpu(
    nvdec: CupyWithKernels, codec: str, options: dict[str, Any]
) -> None:
    data = make_video(PLANES, codec=codec, format="mp4", max_b_frames=2, gop_size=8)
    for layout in (None, "NCHW"):
        buffer = sm.load_video(data, (0.3, 1.5), cuda=0, layout=layout, **options)  # type: ignore[arg-type]
        want = sm.load_video(data, (0.3, 1.5), layout=layout, **options, quality="accurate")  # type: ignore[arg-type]
        assert buffer.shape == want.shape
        assert np.abs(host(buffer).astype(int) - want.array).max() <= 2
        assert buffer.device == "cuda:0"
    assert nvdec.launches, "nothing was made on the device"


def test_lengths_are_those_of_the_cpu(nvdec: CupyWithKernels) -> None:
    for on_short in ("error", "repeat_last", "wrap", "zeros"):
        count = 15 if on_short == "error" else 18
        options: Any = {"num_frames": count, "on_short": on_short, "quality": "accurate"}
        buffer = sm.load_video(CLIP, (0.5, None), cuda=0, **options)
        want = sm.load_video(CLIP, (0.5, None), **options)
        assert buffer.shape[0] == count
        assert np.abs(host(buffer).astype(int) - want.array).max() <= 2
        assert bool(nvdec.launches) is (on_short == "error")
        nvdec.launches.clear()
    with pytest.raises(sm.ConvertError, match=r"18 frames were requested, but .* has 15"):
        sm.load_video(CLIP, (0.5, None), cuda=0, num_frames=18, on_short="error")
    with pytest.raises(ValueError, match=r"decoder='nvdec': on_short='wrap' is for the CPU"):
        sm.load_video(CLIP, cuda=0, num_frames=18, on_short="wrap", decoder="nvdec")
    sound = make_media([AudioTrack(samples=index_samples(500, 2), sample_rate=8000, codec="flac")])
    audio = sm.load_audio(sound, cuda=0, num_samples=800, on_short="wrap")
    want = sm.load_audio(sound, num_samples=800, on_short="wrap")
    np.testing.assert_array_equal(host(audio), want)


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_videos_are_cut_mirrored_and_normalised_on_the_device(
    nvdec: CupyWithKernels, layout: Any
) -> None:
    """Borders are black before normalisation, as on the CPU."""
    options: Any = {"crops": (3, 5, 21, 11), "flips": True, "quality": "accurate"}
    options |= {"width": 30, "height": 30, "layout": layout}
    levels = sm.load_video(CLIP, **options)
    buffer = sm.load_video(CLIP, cuda=0, **options)
    assert np.abs(host(buffer).astype(int) - levels.array).max() <= 2
    numbers: Any = {"dtype": "float32", "mean": (0.5, 0.4, 0.3), "std": (0.25, 0.5, 1)}
    buffer = sm.load_video(CLIP, cuda=0, decoder="nvdec", **options, **numbers)
    want = sm.load_video(CLIP, **options, **numbers).array
    assert (buffer.boxes, buffer.flips) == (((3, 5, 21, 11),), (True,))
    assert buffer.dtype == np.float32
    assert np.abs(host(buffer) - want).max() <= 2.5 / 255 / 0.25
    border = (levels.array == 0).all(1 if layout == "NCHW" else -1).all(0)
    assert border.any()
    axis = 1 if layout == "NCHW" else -1
    np.testing.assert_allclose(
        np.moveaxis(host(buffer), axis, -1)[:, border],
        np.moveaxis(want, axis, -1)[:, border],
        atol=1e-6,
    )
    assert nvdec.launches
    with pytest.raises(ValueError, match=r"decoder='nvdec': dtype='float16' is for the CPU"):
        sm.load_video(CLIP, cuda=0, decoder="nvdec", dtype="float16")


def test_planes_of_a_video_are_the_cpus_bit_for_bit(nvdec: CupyWithKernels) -> None:
    want = sm.load_video(CLIP, pix_fmt="nv12").array[:, 0]
    batches = [host(batch) for batch in sm.streaming_load_video_nvdec(CLIP, 0, num_frames=8)]
    assert [len(batch) for batch in batches] == [8, 8, 4]
    np.testing.assert_array_equal(np.concatenate(batches), want)


@pytest.mark.parametrize(
    ("stated", "colors"),
    [
        ({}, ("bt601", "tv")),
        ({"colorspace": "bt709"}, ("bt709", "tv")),
        ({"colorspace": "bt2020nc", "color_range": "pc"}, ("bt2020nc", "pc")),
    ],
)
def test_planes_of_a_video_say_their_colours_and_are_converted_by_them(
    nvdec: CupyWithKernels, stated: dict[str, str], colors: tuple[str, str]
) -> None:
    data = make_video(PLANES[:4], codec="libx264", options=stated)
    (nv12,) = sm.streaming_load_video_nvdec(data, 0, num_frames=4)
    assert (nv12.colorspace, nv12.color_range) == colors
    want = sm.load_video(data, layout="NCHW", quality="accurate").array.astype(int)
    assert np.abs(host(sm.nv12_to_rgb(nv12)).astype(int) - want).max() <= 2
    assert np.abs(host(sm.nv12_to_bgr([nv12]))[:, ::-1].astype(int) - want).max() <= 2


def test_layouts_of_the_functions_that_spdl_has(nvdec: CupyWithKernels) -> None:
    packets = sm.demux_video(CLIP)
    assert sm.decode_packets_nvdec(packets, cuda=0).shape == (20, 3, 48, 64)
    assert sm.decode_packets_nvdec(packets, cuda_config=0, layout="NHWC").shape == (20, 48, 64, 3)
    (nv12,) = sm.streaming_load_video_nvdec(CLIP, cuda_config=0, num_frames=20)
    rgb = sm.nv12_to_rgb(nv12, coeff=5)
    assert rgb.shape == (20, 3, 48, 64)
    want = sm.load_video(CLIP, layout="NCHW", quality="accurate").array.astype(int)
    assert np.abs(host(rgb).astype(int) - want).max() <= 2
    bgr = sm.nv12_to_bgr([nv12], coeff=5)
    np.testing.assert_array_equal(host(bgr)[:, ::-1], host(rgb))
    for wrong in ({}, {"cuda": 0, "cuda_config": 0}):
        with pytest.raises(ValueError, match="give one of "):
            sm.decode_packets_nvdec(packets, **wrong)
        with pytest.raises(ValueError, match="give one of "):
            sm.streaming_load_video_nvdec(CLIP, num_frames=1, **wrong)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"codec": "libx264", "pix_fmt": "yuv444p"}, "yuv444p"),
        (
            {"codec": "ffv1", "format": "matroska"},
            "NVDEC is used for av1, h264, hevc, vp9, and this is ffv1",
        ),
    ],
)
def test_what_nvdec_cannot_decode(
    nvdec: CupyWithKernels, options: dict[str, Any], words: str
) -> None:
    planes = index_planes(4, 64, 48, options.get("pix_fmt", "yuv420p"))
    data = make_video(planes, **{"format": "mp4", **options})
    with pytest.warns(
        sm.CPUFallbackWarning, match=rf"{words}.* The CPU decodes this video"
    ) as told:
        buffer = sm.load_video(data, cuda=0)
    assert told[0].filename == __file__
    np.testing.assert_array_equal(host(buffer), sm.load_video(data, quality="accurate"))
    for decoder in ("nvdec", "dali"):
        with pytest.raises(sm.DecodeError, match=r"decoder='auto'"):
            sm.load_video(data, cuda=0, decoder=decoder)  # type: ignore[arg-type]
    with warnings.catch_warnings(action="error"):
        sm.load_video(data, cuda=0, decoder="cpu")


@pytest.mark.usefixtures("copying_library")
def test_without_nvdec_a_warning_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = sm.StoragePool(200_000, 1, pin_memory=False, on_exhausted="wait", timeout=10)
    missing = sm.MissingDependencyError("needs libnvcuvid.so.1")
    monkeypatch.setattr("spdl_media.cuda.videos.missing_library", lambda: missing)
    want = sm.load_video(CLIP, quality="accurate")
    with pytest.warns(sm.CPUFallbackWarning, match="libnvcuvid.so.1"):
        buffer = sm.load_video(CLIP, cuda=0, storage=pool)
    np.testing.assert_array_equal(host(buffer), want)
    with warnings.catch_warnings(action="error"):
        buffer = sm.load_video(CLIP, cuda=0, decoder="cpu", storage=pool)
    np.testing.assert_array_equal(host(buffer), want)


@pytest.mark.parametrize(
    "options",
    [
        {"filter_desc": "scale=16:16,format=rgb24"},
        {"quality": "fast"},
        {"pix_fmt": "gray"},
        {"scale_algo": "lanczos", "width": 16, "height": 16},
        {"decode_config": sm.decode_config(decoder="h264")},
        {"decode_config": sm.decode_config(decoder_options={"threads": 2})},
    ],
)
def test_options_that_are_for_the_cpu(nvdec: CupyWithKernels, options: dict[str, Any]) -> None:
    buffer = sm.load_video(CLIP, cuda=0, **options)
    exact: Any = {} if "filter_desc" in options else {"quality": "accurate"}
    np.testing.assert_array_equal(host(buffer), sm.load_video(CLIP, **{**exact, **options}))
    assert not nvdec.launches
    for decoder in ("nvdec", "dali"):
        with pytest.raises(ValueError, match=rf"decoder='{decoder}': .* takes the CPU for it"):
            sm.load_video(CLIP, cuda=0, decoder=decoder, **options)


def test_a_full_device_while_decoding(nvdec: CupyWithKernels, card: LazyCard) -> None:
    card.total = 10_000
    with pytest.raises(sm.TransferError, match=r"184320 bytes do not fit .* 10000 bytes and"):
        sm.load_video(CLIP, cuda=0)
    card.total = 1 << 24
    assert sm.load_video(CLIP, cuda=0).shape == (20, 48, 64, 3)


def test_videos_and_clips_as_awaitables(nvdec: CupyWithKernels) -> None:
    video = VideoTrack(frames=PLANES, codec="libx264")
    sound = AudioTrack(samples=index_samples(16000, 2), sample_rate=8000, codec="flac")
    data = make_media([video, sound])

    async def load() -> Any:
        # One after the other, because these streams run at once, unlike real ones.
        return (
            await sm.async_load_video(data, cuda=0),
            await sm.async_load_audio(data, cuda=0),
            await sm.async_load_clip(data, 0, 1, cuda=0),
        )

    frames, audio, clip = asyncio.run(load())
    want = sm.load_clip(data, 0, 1, quality="accurate")
    assert (
        np.abs(host(frames).astype(int) - sm.load_video(data, quality="accurate").array).max() <= 2
    )
    np.testing.assert_array_equal(host(audio), sm.load_audio(data))
    assert np.abs(host(clip.video).astype(int) - want.video.array).max() <= 2
    np.testing.assert_array_equal(host(clip.audio), want.audio)
    assert (clip.timestamps.tolist(), clip.audio_timestamp, clip.sample_rate) == (
        want.timestamps.tolist(),
        want.audio_timestamp,
        want.sample_rate,
    )


# Wrong arguments, the same for all

CALLS: dict[str, Any] = {
    "load_image": lambda **o: sm.load_image(PHOTOS[0], **o),
    "load_image_batch": lambda **o: sm.load_image_batch(PHOTOS, width=8, height=8, **o),
    "load_video": lambda **o: sm.load_video(CLIP, **o),
    "load_audio": lambda **o: sm.load_audio(CLIP, **o),
    "load_clip": lambda **o: sm.load_clip(CLIP, 0, 1, **o),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_invalid_devices(call: Any, torch: FakeTorch, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="cuda= and cuda_config= are one argument with two names"):
        call(cuda=0, cuda_config=sm.cuda_config(0))
    with pytest.raises(TypeError, match="'0'"):
        call(cuda="0")
    with pytest.raises(ValueError, match=r"-1"):
        call(cuda=-1)
    with pytest.raises(ValueError, match=r"CUDA device 2 was asked for, and there are 2"):
        call(cuda=2)
    monkeypatch.setattr("spdl_media.devices.device_of_stream", lambda _: 1)
    with pytest.raises(sm.TransferError, match="the stream 0x4400 belongs to CUDA device 1"):
        call(cuda=sm.cuda_config(0, stream=0x4400))
    HISTORY.lost = True
    with pytest.raises(sm.TransferError, match=r"forked from one that had used CUDA.*'spawn'"):
        call(cuda=0)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_without_any_device(call: Any) -> None:
    with pytest.raises(
        sm.TransferError, match="needs a CUDA device, and there is none: neither torch"
    ):
        call(cuda=0)


@pytest.mark.parametrize("name", ["load_image", "load_image_batch", "load_video", "load_clip"])
def test_invalid_decoders(name: str) -> None:
    with pytest.raises(ValueError, match=r"decoder must be .*'auto', 'cpu'.*not 'nvjpeg'"):
        CALLS[name](cuda=0, decoder="nvjpeg")
    with pytest.raises(
        ValueError, match=r"decoder='dali' decodes on a CUDA device, so it needs one"
    ):
        CALLS[name](decoder="dali")
    if "image" in name:
        with pytest.raises(ValueError, match="decoder must be 'auto', 'cpu' or 'dali', not"):
            CALLS[name](cuda=0, decoder="nvdec")


@needs_dali
def test_dali_needs_neither_pytorch_nor_cupy(dali: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    config = sm.cuda_config(0, stream=0x4400)
    rows = rows_of(sm.load_image_batch(PHOTOS, cuda=config, **OPTIONS))
    assert differences(rows, sm.load_image_batch(PHOTOS, **OPTIONS)).max() <= CLOSE


@needs_dali
def test_a_stream_of_another_device_is_noticed_where_dali_decodes(
    dali: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spdl_media.devices.device_of_stream", lambda _: 1)
    with pytest.raises(sm.TransferError, match="belongs to CUDA device 1"):
        sm.load_image_batch(PHOTOS, cuda=sm.cuda_config(0, stream=0x4400), **OPTIONS)


def test_a_stream_of_another_device_is_noticed_by_decoders_and_kernels(
    nvdec: CupyWithKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    nv12 = sm.transfer_buffer(sm.convert_array(np.zeros((6, 4), np.uint8)), cuda_config=0)
    monkeypatch.setattr("spdl_media.devices.device_of_stream", lambda _: 1)
    config = sm.cuda_config(0, stream=0x4400)
    for call in (
        lambda: sm.decode_packets_nvdec(sm.demux_video(CLIP), cuda=config),
        lambda: sm.streaming_load_video_nvdec(CLIP, config, num_frames=2),
        lambda: sm.nv12_to_rgb(nv12, cuda_config=config),
        lambda: sm.decode_image_nvjpeg(PHOTOS[0], cuda=config),
    ):
        with pytest.raises(sm.TransferError, match="belongs to CUDA device 1"):
            call()


def test_srcs_that_are_no_sequence(torch: FakeTorch) -> None:
    for wrong in ("photo.jpg", b"bytes", 3, None):
        with pytest.raises(TypeError, match="a batch is a sequence of sources"):
            sm.load_image_batch(wrong, cuda=0)  # type: ignore[arg-type]
    buffer = sm.load_image_batch((photo for photo in PHOTOS), cuda=0, **OPTIONS)
    assert buffer.shape == (4, 40, 48, 3)
    with pytest.raises(sm.ConvertError, match="the sequence is empty"):
        sm.load_image_batch([], cuda=0)
