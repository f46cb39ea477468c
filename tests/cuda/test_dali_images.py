"""Images through DALI's operators on the CPU: they agree with the CPU path within the promised limits."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dali_oracle import (
    CLOSE,
    cpu,
    decode_image_batch,
    differences,
    host,
    jpeg,
    photo,
    with_orientation,
)

import spdl_media as sm
from spdl_media.testing import index_frames, make_image, make_video

pytest.importorskip("nvidia.dali")

from spdl_media.cuda import dali
from spdl_media.cuda.dali_decode import load_video_by_dali
from spdl_media.cuda.images import decode_image_nvjpeg, load_image_batch_nvjpeg

# Ignore the warning about the fallback to the CPU; tests of the warning expect it explicitly.
pytestmark = pytest.mark.filterwarnings("ignore::spdl_media.CPUFallbackWarning")

SIZES = [(200, 150), (97, 130), (320, 64), (64, 65)]
PHOTOS = [jpeg(*size, seed) for seed, size in enumerate(SIZES)]


@pytest.mark.parametrize("mode", ["pad", "crop", None])
@pytest.mark.parametrize("algo", ["bicubic", "bilinear"])
def test_ragged_batch_is_as_on_the_cpu_path(mode: Any, algo: Any) -> None:
    options: dict[str, Any] = {"width": 48, "height": 40, "scale_mode": mode, "scale_algo": algo}
    batch = decode_image_batch(PHOTOS, cuda="cpu", **options)
    assert host(batch.array).dtype == np.uint8
    assert host(batch.array).shape == (4, 40, 48, 3)
    assert differences(batch.array, cpu(PHOTOS, **options)).max() <= CLOSE
    assert (batch.failures, batch.indices) == ((), (0, 1, 2, 3))


@pytest.mark.parametrize("mode", ["pad", "crop", None])
def test_real_photos_are_as_on_the_cpu_path(media_dir: Path, mode: Any) -> None:
    paths = sorted((media_dir / "photos").iterdir())[:16]
    options: dict[str, Any] = {"width": 224, "height": 224, "scale_mode": mode}
    found = differences(
        decode_image_batch(paths, cuda="cpu", **options).array, cpu(paths, **options)
    )
    assert found.max() <= CLOSE
    assert found.mean() <= 0.7


def test_border_is_black_to_the_pixel() -> None:
    rows = host(decode_image_batch([PHOTOS[2]], cuda="cpu", width=60, height=60).array)
    inside = np.zeros((60, 60), bool)
    inside[24:36] = True
    assert not rows[0][~inside].any()
    assert rows[0][inside].any(-1).all()


@pytest.mark.parametrize("pix_fmt", ["rgb24", "bgr24", "gray"])
@pytest.mark.parametrize("layout", [None, "NHWC", "NCHW"])
def test_pixel_formats_and_layouts(pix_fmt: str, layout: Any) -> None:
    options: dict[str, Any] = {"width": 48, "height": 40, "pix_fmt": pix_fmt, "layout": layout}
    found = differences(decode_image_batch(PHOTOS, **options).array, cpu(PHOTOS, **options))
    assert found.max() <= CLOSE


PICTURE = index_frames(2, 64, 64)[1]
CODECS = ("png", "bmp", "jpeg2000", "libwebp", "gif", "libsvtav1", "tiff", "ppm", "qoi")
LEFT = {codec: make_image(PICTURE, codec=codec) for codec in CODECS}


@pytest.mark.parametrize("name", LEFT)
def test_files_left_to_ffmpeg_are_exactly_those_of_the_cpu_path(name: str) -> None:
    srcs = [LEFT[name], make_image(PICTURE)]
    options: dict[str, Any] = {"width": 24, "height": 32, "scale_mode": "pad"}
    words = (
        f"bytes of length {len(srcs[0])}: DALI is used for whole JPEGs without .* The CPU decodes "
    )
    with pytest.warns(sm.CPUFallbackWarning, match=words + "the images, and the result"):
        batch = decode_image_batch(srcs, cuda="cpu", **options)
    np.testing.assert_array_equal(host(batch.array), cpu(srcs, **options))


def test_sources_that_can_be_read_once_go_by_the_cpu_too() -> None:
    """A source that was read for DALI is not read again."""
    gif = make_image(photo(20, 20), codec="gif")
    srcs = [io.BytesIO(PHOTOS[0]), io.BytesIO(b"no picture"), io.BytesIO(gif)]
    batch = decode_image_batch(srcs, width=20, height=20, on_error="skip")
    oracle = cpu([PHOTOS[0], gif], width=20, height=20)
    np.testing.assert_array_equal(host(batch.array), oracle)
    ((index, why),) = [(failure.index, str(failure.error)) for failure in batch.failures]
    assert index == 1
    assert "FFmpeg cannot open it as media" in why


@pytest.mark.parametrize("name", ["cmyk.jpg", "gray.jpg"])
def test_colour_types_are_as_on_the_cpu_path(media_dir: Path, name: str) -> None:
    path = media_dir / "images_odd" / name
    assert differences(decode_image_batch([path], cuda="cpu").array, cpu([path])).max() <= 1


def test_dali_decodes_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """JPEGs are really decoded by DALI and not by FFmpeg."""

    def refuse(*_: object) -> None:
        raise AssertionError("decoded without DALI")

    monkeypatch.setattr("spdl_media.cuda.images.load_rows", refuse)
    decode_image_batch(PHOTOS, cuda="cpu", width=16, height=16)
    with pytest.raises(AssertionError, match="without DALI"):
        decode_image_batch([make_image(photo(20, 20), codec="tiff")], cuda="cpu")


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_upright(orientation: int) -> None:
    data = with_orientation(jpeg(96, 64), orientation)
    upright = decode_image_batch([data], cuda="cpu").array
    assert host(upright).shape[1:3] == ((64, 96) if orientation < 5 else (96, 64))
    assert differences(upright, cpu([data])).max() <= 1
    config = sm.decode_config(orient=False)
    as_stored = decode_image_batch([data], cuda="cpu", decode_config=config).array
    assert host(as_stored).shape[1:3] == (64, 96)
    assert differences(as_stored, cpu([data], decode_config=config)).max() <= 1


def test_jpegs_whose_orientation_stands_in_xmp_are_left_to_ffmpeg() -> None:
    data = jpeg(96, 64)
    xmp = b'http://ns.adobe.com/xap/1.0/\0<rdf:Description tiff:Orientation="6"/>'
    data = data[:2] + b"\xff\xe1" + (len(xmp) + 2).to_bytes(2, "big") + xmp + data[2:]
    rows = decode_image_batch([data], cuda="cpu").array
    assert host(rows).shape[1:3] == (96, 64)
    np.testing.assert_array_equal(host(rows), cpu([data]))


def test_animations_are_left_to_ffmpeg(media_dir: Path) -> None:
    path = media_dir / "images_odd" / "animated.webp"
    try:
        oracle = cpu([path])
    except sm.DecodeError:  # before PyAV 19
        with pytest.raises(sm.DecodeError, match="animated WebP is decoded from PyAV 19 on"):
            decode_image_batch([path], cuda="cpu")
    else:
        np.testing.assert_array_equal(host(decode_image_batch([path], cuda="cpu").array), oracle)


def test_decoding_equals_pillow_bit_for_bit() -> None:
    image = pytest.importorskip("PIL.Image")
    for data in (*PHOTOS, jpeg(33, 21, pix_fmt="yuvj444p"), jpeg(33, 21, pix_fmt="yuvj422p")):
        oracle = np.asarray(image.open(io.BytesIO(data)))
        np.testing.assert_array_equal(host(decode_image_batch([data], cuda="cpu").array)[0], oracle)


def test_size_of_its_own_and_one_side() -> None:
    batch = decode_image_batch([PHOTOS[0]] * 2, cuda="cpu", height=75)
    assert host(batch.array).shape == (2, 75, 100, 3)
    assert host(decode_image_batch([PHOTOS[0]], cuda="cpu").array).shape == (1, 150, 200, 3)


def test_sources_of_every_kind(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(PHOTOS[0])
    kinds: list[Any] = [
        tmp_path / "a.jpg",
        str(tmp_path / "a.jpg"),
        bytearray(PHOTOS[0]),
        memoryview(PHOTOS[0]),
        np.frombuffer(PHOTOS[0], np.uint8),
        io.BytesIO(PHOTOS[0]),
    ]
    rows = host(decode_image_batch((kind for kind in kinds), cuda="cpu", width=20, height=20).array)
    assert (rows == rows[0]).all()
    assert rows[0].any()


def test_spdl_functions_stretch_and_give_nchw() -> None:
    rows = load_image_batch_nvjpeg(PHOTOS, cuda="cpu", width=40, height=32)
    oracle = cpu(PHOTOS, width=40, height=32, scale_mode=None, layout="NCHW")
    assert differences(rows.array, oracle).max() <= CLOSE
    blue_first = load_image_batch_nvjpeg(
        PHOTOS, cuda_config="cpu", width=40, height=32, pix_fmt="bgr", layout="NHWC"
    )
    np.testing.assert_array_equal(
        host(blue_first.array), host(rows.array)[:, ::-1].transpose(0, 2, 3, 1)
    )


def test_one_image_and_a_list_of_images() -> None:
    one = host(decode_image_nvjpeg(PHOTOS[0], cuda="cpu"))
    assert one.shape == (3, 150, 200)
    assert host(decode_image_nvjpeg([PHOTOS[0]], cuda="cpu")).shape == (1, 3, 150, 200)
    batch = decode_image_nvjpeg(PHOTOS, cuda="cpu", scale_width=20, scale_height=10, layout="NHWC")
    assert host(batch).shape == (4, 10, 20, 3)
    np.testing.assert_array_equal(
        host(decode_image_batch(PHOTOS[:1], cuda="cpu", layout="NCHW").array)[0], one
    )
    assert host(decode_image_nvjpeg(PHOTOS[0], cuda="cpu", scale_width=100)).shape == (3, 75, 100)


def test_larger_batches_after_smaller_ones() -> None:
    srcs = [jpeg(40, 30, seed) for seed in range(40)]
    options: dict[str, Any] = {"cuda": "cpu", "width": 20, "height": 15}
    rows = host(decode_image_batch(srcs, **options).array)
    for count in (1, 17, 40, 3):
        np.testing.assert_array_equal(
            host(decode_image_batch(srcs[:count], **options).array), rows[:count]
        )


def test_array_outlives_the_batches_after_it() -> None:
    first = decode_image_batch(PHOTOS, cuda="cpu", width=30, height=30)
    before = host(first.array).copy()
    for _ in range(5):
        decode_image_batch(PHOTOS[::-1], cuda="cpu", width=30, height=30)
    np.testing.assert_array_equal(host(first.array), before)


def test_arrays_of_other_libraries_share_the_memory() -> None:
    batch = decode_image_batch(PHOTOS, cuda="cpu", width=30, height=30)
    shared = np.from_dlpack(batch.array)
    assert shared.flags.c_contiguous
    np.testing.assert_array_equal(shared, host(batch.array))
    torch = pytest.importorskip("torch")
    tensor = torch.from_dlpack(batch.array)
    assert tensor.is_contiguous()
    assert tensor.data_ptr() == shared.ctypes.data


def test_share_of_the_jpeg_engine_is_accepted() -> None:
    rows = decode_image_batch(PHOTOS, cuda="cpu", width=30, height=30, hw_decoder_load=0.9)
    np.testing.assert_array_equal(
        host(rows.array), host(decode_image_batch(PHOTOS, cuda="cpu", width=30, height=30).array)
    )


CUTS: dict[str, Any] = {
    "crops": [(3, 5, 151, 131), None, (0, 0, 64, 64), (1, 1, 39, 49)],
    "flips": [True, False, False, True],
}


@pytest.mark.parametrize("mode", ["pad", "crop", None])
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_crops_and_flips_are_as_on_the_cpu_path(mode: Any, layout: Any) -> None:
    options: dict[str, Any] = {"width": 47, "height": 40, "scale_mode": mode, "layout": layout}
    batch = decode_image_batch(PHOTOS, **CUTS, **options)
    assert differences(batch.array, cpu(PHOTOS, **CUTS, **options)).max() <= CLOSE
    assert (batch.boxes, batch.flips) == (
        (CUTS["crops"][0], (0, 0, 97, 130), *CUTS["crops"][2:]),
        (True, False, False, True),
    )


def test_crops_of_images_that_ffmpeg_decodes_join_them() -> None:
    picture = photo(60, 50)
    srcs = [make_image(picture, codec=codec) for codec in ("tiff", "png", "gif")]
    options: dict[str, Any] = {"crops": (7, 3, 33, 41), "flips": True}
    rows = host(decode_image_batch(srcs, **options).array)
    expected = cpu(srcs, **options)
    np.testing.assert_array_equal(rows, expected)
    np.testing.assert_array_equal(rows[0], picture[3:44, 7:40][:, ::-1])


@pytest.mark.parametrize("orientation", range(1, 9))
def test_boxes_are_of_upright_images(orientation: int) -> None:
    data = with_orientation(jpeg(96, 64), orientation)
    options: dict[str, Any] = {"crops": (5, 9, 40, 50), "flips": True}
    assert (
        differences(decode_image_batch([data], **options).array, cpu([data], **options)).max() <= 1
    )
    options = {"crops": (5, 9, 70, 50), "decode_config": sm.decode_config(orient=False)}
    assert (
        differences(decode_image_batch([data], **options).array, cpu([data], **options)).max() <= 1
    )


def test_random_crops_are_those_of_the_cpu_path() -> None:
    options: dict[str, Any] = {"width": 32, "height": 32, "scale_mode": None}
    drawn: dict[str, Any] = {"crops": sm.RandomResizedCrop(), "flips": 0.5, "rng": 3}
    batch = decode_image_batch(PHOTOS, **drawn, **options)
    expected = sm.load_image_batch(PHOTOS, **drawn, **options)
    assert (batch.boxes, batch.flips) == (expected.boxes, expected.flips)
    assert differences(batch.array, expected).max() <= 4  # some crops are enlarged


def test_a_crop_outside_of_its_image_is_that_images_failure() -> None:
    crops = [(0, 0, 90, 60), None, None, None]
    crops[2] = (0, 0, 10, 65)
    options: dict[str, Any] = {"width": 20, "height": 20, "crops": crops}
    with pytest.raises(sm.ConvertError, match=r"input 2 of the batch of 4: .*does not lie inside"):
        decode_image_batch(PHOTOS, **options)
    filled = decode_image_batch(PHOTOS, on_error="fill", **options)
    assert [failure.index for failure in filled.failures] == [2]
    assert not host(filled.array)[2].any()
    assert filled.boxes[2] is None


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("pix_fmt", ["rgb24", "bgr24", "gray"])
def test_normalised_floats_are_those_of_the_levels(dtype: Any, layout: Any, pix_fmt: str) -> None:
    count = 1 if pix_fmt == "gray" else 3
    mean, std = (0.485, 0.456, 0.406)[:count], (0.229, 0.224, 0.225)[:count]
    options: dict[str, Any] = {"width": 48, "height": 30, "layout": layout, "pix_fmt": pix_fmt}
    numbers: dict[str, Any] = {"dtype": dtype, "mean": mean, "std": std}
    got = host(decode_image_batch(PHOTOS, **numbers, **options).array)
    levels = host(decode_image_batch(PHOTOS, **options).array).astype(np.float64)
    shape = (-1, 1, 1) if layout == "NCHW" else (-1,)
    expected = (levels / 255 - np.reshape(mean, shape)) / np.reshape(std, shape)
    assert got.dtype == dtype
    tolerance = {"float32": 2e-6, "float16": 2e-3}[dtype]
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)


def test_one_number_for_all_channels_and_flips_of_floats() -> None:
    options: dict[str, Any] = {"width": 48, "height": 30, "flips": True}
    got = host(decode_image_batch(PHOTOS, dtype="float32", mean=0.5, std=0.25, **options).array)
    levels = host(decode_image_batch(PHOTOS, **options).array)
    np.testing.assert_allclose(got, (levels / 255 - 0.5) / 0.25, rtol=2e-6, atol=2e-6)


def test_a_slot_keeps_the_operators_that_were_used_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dali, "_MAX_OPERATORS", 3)
    slot = dali.Slot(None)
    pool = dali.SlotPool(lambda: slot, 1)
    monkeypatch.setattr("spdl_media.cuda.dali_decode.slot_pool", lambda _: pool)
    options: dict[str, Any] = {"width": 20, "height": 20}
    for algo in ("bicubic", "bilinear", "bicubic"):
        for pix_fmt in ("rgb24", "bgr24", "gray"):
            rows = host(
                decode_image_batch(PHOTOS, scale_algo=algo, pix_fmt=pix_fmt, **options).array
            )
            expected = cpu(PHOTOS, scale_algo=algo, pix_fmt=pix_fmt, **options)
            assert differences(rows, expected).max() <= CLOSE
    assert len(slot._operators) == 3


def test_operators_serve_videos_and_images_in_turn() -> None:
    """An operator object of DALI rejects inputs of another kind than its first ones."""
    options: dict[str, Any] = {"width": 32, "height": 24}
    rows = host(decode_image_batch(PHOTOS, cuda="cpu", **options).array)
    film = make_video(index_frames(4, 64, 48), codec="libvpx-vp9", format="webm", gop_size=2)
    frames, _ = load_video_by_dali(sm.demux_video(film), None)
    assert np.asarray(frames).shape == (4, 48, 64, 3)
    np.testing.assert_array_equal(
        host(decode_image_batch(PHOTOS, cuda="cpu", **options).array), rows
    )
