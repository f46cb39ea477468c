"""``load_image`` equals demux, decode and convert, with the options of the filter builder."""

from __future__ import annotations

import numpy as np
import pytest
from effort import each

import spdl_media as sm
from spdl_media.testing import index_frames, make_image

PICTURE = index_frames(1, 60, 40)[0]
PNG = make_image(PICTURE)
JPEG = make_image(PICTURE, codec="mjpeg")


def test_a_lossless_image_comes_back() -> None:
    buffer = sm.load_image(PNG)
    assert (buffer.shape, buffer.dtype) == ((40, 60, 3), np.uint8)
    np.testing.assert_array_equal(np.asarray(buffer), PICTURE)


@each("mode", ["pad", "crop", None])
@each("quality", ["accurate", "fast"])
def test_it_is_demux_decode_and_convert(mode: str | None, quality: str) -> None:
    options = {"scale_mode": mode, "scale_algo": "area", "quality": quality}
    desc = sm.get_video_filter_desc(scale_width=32, scale_height=24, **options)
    frames = sm.decode_packets(sm.demux_image(JPEG), desc)
    got = np.asarray(sm.load_image(JPEG, width=32, height=24, **options))
    assert got.shape == (24, 32, 3)
    np.testing.assert_array_equal(got, np.asarray(sm.convert_frames(frames)))


def test_one_side_keeps_the_aspect_ratio() -> None:
    assert sm.load_image(PNG, width=30).shape == (20, 30, 3)
    assert sm.load_image(PNG, height=20).shape == (20, 30, 3)


def test_formats_and_layouts() -> None:
    assert sm.load_image(PNG, width=32, height=32, pix_fmt="yuv420p").shape == (1, 48, 32)
    assert sm.load_image(PNG, pix_fmt="gray").shape == (40, 60, 1)
    planar = sm.load_image(PNG, layout="NCHW")
    np.testing.assert_array_equal(np.asarray(planar), PICTURE.transpose(2, 0, 1))


@pytest.mark.parametrize("order", ["<", ">"])
def test_gray_of_floats_has_its_brightness_in_every_format(order: str) -> None:
    """FFmpeg's scaler takes it for limited range: 0.1 of white would be 0.04, and white a border's."""
    levels = np.arange(11, dtype=np.float32).repeat(8) / 10
    values = np.tile(levels, (12, 1))
    head = b"Pf\n88 12\n-1.0\n" if order == "<" else b"Pf\n88 12\n1.0\n"
    pfm = head + values[::-1].astype(f"{order}f4").tobytes()
    found = {}
    for pix_fmt, white in {
        "rgb24": 255, "gray": 255, "rgba": 255, "yuv444p": 255, "gray16": 65535, "rgb48": 65535,
        "grayf32le": 1, None: 1,
    }.items():  # fmt: skip
        for size in (
            {},
            {"width": 88, "height": 14},
            {"width": 44, "height": 6, "scale_mode": None},
        ):
            got = sm.load_image(pfm, pix_fmt=pix_fmt, **size).array / white
            row = got[0, 3] if got.shape[0] < 5 else got[3, :, 0]
            step = row.shape[0] // 11
            found[pix_fmt, *size.values()] = np.abs(row[step // 2 :: step] - levels[::8]).max()
    # Between pixels of two levels, a scaled one has a share of both.
    assert {key: error for key, error in found.items() if error > 0.005} == {}


@pytest.mark.parametrize("source", ["rgb24", "rgba", "gray", "gray16be", "yuvj444p"])
def test_images_become_gray_of_floats_between_0_and_1(source: str) -> None:
    """FFmpeg's scaler would give RGB limited range: 0.06 to 0.92."""
    ramp = np.rint(np.linspace(0, 255, 16)).astype(np.uint8)
    pixels = np.tile(ramp[None, :, None], (16, 1, 3))
    codec = "mjpeg" if source == "yuvj444p" else "png"
    data = make_image(pixels, codec=codec, pix_fmt=source)
    for size in ({}, {"width": 16, "height": 20}):
        ((*_, row, _),) = sm.load_image(data, pix_fmt="grayf32", **size).array[:, :17]
        assert np.abs(row - ramp / 255).max() < (0.02 if codec == "mjpeg" else 0.003), size


def test_a_filter_of_ones_own() -> None:
    np.testing.assert_array_equal(
        np.asarray(sm.load_image(PNG, filter_desc="hflip")), PICTURE[:, ::-1]
    )
    np.testing.assert_array_equal(np.asarray(sm.load_image(PNG, filter_desc=None)), PICTURE)


@pytest.mark.parametrize("data", [PNG, JPEG])
def test_a_still_has_no_time_and_is_the_same_at_any_rate(data: bytes) -> None:
    at_rate = sm.get_video_filter_desc(frame_rate=5)
    np.testing.assert_array_equal(sm.load_image(data, filter_desc=at_rate), sm.load_image(data))


def test_a_filter_beside_what_it_replaces_is_refused() -> None:
    with pytest.raises(
        ValueError, match="filter_desc= is the whole filter graph, so width=8 would"
    ):
        sm.load_image(PNG, width=8, filter_desc="hflip")
    # A default that is passed explicitly counts as not given.
    assert sm.load_image(PNG, pix_fmt="rgb24", filter_desc="format=gray").shape == (40, 60, 1)


def test_without_conversion_images_are_still_turned(media_dir) -> None:
    turned = media_dir / "images_odd" / "exif_orientation_6.jpg"
    upright = sm.load_image(turned)
    raw = sm.load_image(turned, filter_desc=None)
    assert raw.shape[1:] != upright.shape[:2]
    kept = sm.decode_packets(sm.demux_image(turned), "null")
    assert (kept.height, kept.width) == upright.shape[:2]


def test_storage_is_filled() -> None:
    storage = sm.cpu_storage(PICTURE.nbytes, pin_memory=False)
    buffer = sm.load_image(PNG, storage=storage)
    np.testing.assert_array_equal(np.asarray(buffer), PICTURE)
    small = sm.cpu_storage(100, pin_memory=False)
    with pytest.raises(sm.StorageTooSmallError, match=r"7200 bytes.* 100"):
        sm.load_image(PNG, storage=small)


@each(
    "options, error, match",
    [
        ({"widht": 8}, TypeError, "widht.*Did you mean 'width'"),
        ({"size": 8}, TypeError, "'size'. Did you mean 'width'"),
        ({"width": 0}, ValueError, "^width must be positive, or None to leave it as it is, not 0"),
        ({"height": -1}, ValueError, "^height must be positive.*not -1"),
        ({"height": 1.5}, TypeError, r"^height must be an int, not 1\.5"),
        ({"layout": "planes"}, ValueError, r"convert_frames\(layout='planes'\)"),
        ({"quality": "best"}, ValueError, "quality must be "),
        ({"scale_mode": "fit"}, ValueError, "scale_mode must be"),
        ({"pix_fmt": "rgb99"}, ValueError, "pix_fmt must be one of .*, not 'rgb99'"),
        ({"pix_fmt": "pal8"}, ValueError, "pal8"),
    ],
)
def test_invalid_options(options: dict[str, object], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        sm.load_image(PNG, **options)


def test_errors_name_the_source() -> None:
    with pytest.raises(sm.SourceError, match=r"/no/such.png"):
        sm.load_image("/no/such.png")
    with pytest.raises(sm.DecodeError, match=r"mine: .*cut short"):
        sm.load_image(JPEG[: len(JPEG) // 2], name="mine")
    with pytest.raises(sm.DecodeError, match=r"mine: the filters drop the image: .* no time"):
        sm.load_image(JPEG, name="mine", filter_desc="fps=5")
