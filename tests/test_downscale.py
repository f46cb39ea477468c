"""``decode_config(downscale="dct")``: close to the full decode where it is used, otherwise equal to it."""

from __future__ import annotations

import sys
from typing import Any, get_args

import effort
import numpy as np
import pytest

import spdl_media as sm

# Private: that a JPEG was downscaled during decoding is visible otherwise only in time and rounding.
from spdl_media import image_decoder
from spdl_media.operations import ScaleAlgo
from spdl_media.testing import make_image

DCT = sm.decode_config(downscale="dct")


def picture(width: int, height: int) -> np.ndarray:
    """Make a smooth image that differs at every position and in every direction."""
    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    channels = (255 * x, 255 * y * y, 127 + 120 * np.sin(9 * x + 5 * y))
    return np.stack(channels, axis=-1).astype(np.uint8)


def jpeg(width: int, height: int, pix_fmt: str = "yuvj420p") -> bytes:
    options = {"qmin": "2", "qmax": "2"}
    return make_image(picture(width, height), codec="mjpeg", pix_fmt=pix_fmt, options=options)


def turned(data: bytes, orientation: int) -> bytes:
    """Add an orientation to a JPEG."""
    block = b"Exif\0\0II*\0\x08\0\0\0\1\0\x12\x01\3\0\1\0\0\0" + bytes([orientation, 0, 0, 0])
    return data[:2] + b"\xff\xe1" + (len(block) + 2).to_bytes(2, "big") + block + data[2:]


LARGE = jpeg(640, 512)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return a list of the sizes of images that were downscaled during decoding."""
    pytest.importorskip("simplejpeg")
    sizes: list[tuple[int, int]] = []
    decode = image_decoder._decode_small

    def note(*args: Any) -> Any:
        pixels = decode(*args)
        if pixels is not None:
            sizes.append((pixels.shape[1], pixels.shape[0]))
        return pixels

    monkeypatch.setattr(image_decoder, "_decode_small", note)
    return sizes


def load(data: bytes, config: sm.DecodeConfig | None = None, **options: Any) -> np.ndarray:
    options = {"width": 64, "height": 48, "scale_mode": None, **options}
    return np.asarray(sm.load_image_batch([data], decode_config=config, **options))[0]


def difference(data: bytes, **options: Any) -> float:
    """Return the mean absolute difference from the full decode, in levels."""
    small, whole = load(data, DCT, **options), load(data, **options)
    assert small.shape == whole.shape
    return float(np.abs(small.astype(int) - whole).mean())


@pytest.mark.parametrize(
    ("sides", "shrunk"),
    [((60, 48), (80, 64)), ((120, 60), (160, 128)), ((200, 160), (320, 256))],
)
def test_it_is_the_smallest_that_is_large_enough(
    sides: tuple[int, int], shrunk: tuple[int, int], used: list[tuple[int, int]]
) -> None:
    assert difference(LARGE, width=sides[0], height=sides[1]) <= 1
    assert used == [shrunk]


@pytest.mark.parametrize("pix_fmt", ["yuvj420p", "yuvj422p", "yuvj444p"])
@pytest.mark.parametrize("mode", ["pad", "crop", None])
def test_every_sampling_and_way_to_fit(
    pix_fmt: str, mode: Any, used: list[tuple[int, int]]
) -> None:
    assert difference(jpeg(640, 512, pix_fmt), scale_mode=mode) <= 1
    assert len(used) == 1


@pytest.mark.parametrize("size", [(643, 517), (1001, 999), (330, 331), (641, 512)])
def test_sizes_that_do_not_divide(size: tuple[int, int], used: list[tuple[int, int]]) -> None:
    assert difference(jpeg(*size)) <= 1


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("box", [None, (64, 32, 384, 448)])
def test_orientation_crops_and_flips(
    orientation: int, flip: bool, box: Any, used: list[tuple[int, int]]
) -> None:
    data = turned(LARGE, orientation)
    assert difference(data, crops=[box], flips=[flip]) <= 1
    assert len(used) == 1
    # A wrong orientation would be a difference of tens of levels.
    assert difference(data, crops=[box], flips=[flip]) < 0.1 * float(
        np.abs(load(data, flips=[flip]).astype(int) - load(data, flips=[not flip])).mean()
    )


def test_images_that_are_not_to_be_turned(used: list[tuple[int, int]]) -> None:
    data = turned(LARGE, 6)
    config = sm.decode_config(downscale="dct", orient=False)
    small, whole = load(data, config), load(data, sm.decode_config(orient=False))
    assert np.abs(small.astype(int) - whole).mean() <= 1
    assert len(used) == 1


def test_crops_whose_edges_would_move_are_decoded_whole(used: list[tuple[int, int]]) -> None:
    assert difference(LARGE, crops=[(3, 3, 333, 333)]) == 0
    assert used == []
    assert difference(LARGE, crops=[(8, 8, 320, 320)]) <= 1
    assert len(used) == 1


def test_the_facts_are_those_of_the_whole_decode(used: list[tuple[int, int]]) -> None:
    packets = sm.demux_image(turned(LARGE, 3), name="a.jpg")
    desc = sm.get_video_filter_desc(scale_width=64, scale_height=48)
    small, whole = (sm.decode_packets(packets, desc, config) for config in (DCT, None))
    assert len(used) == 1
    for name in (
        "width height pix_fmt colorspace color_range color_primaries color_trc orientation pts source "
        "is_corrupt metadata"
    ).split():
        assert getattr(small, name) == getattr(whole, name), name


def test_the_fast_quality_does_not_go_by_way_of_less_chroma(used: list[tuple[int, int]]) -> None:
    accurate, fast = load(LARGE, DCT), load(LARGE, DCT, quality="fast")
    assert np.abs(accurate.astype(int) - fast).mean() < 0.3
    assert len(used) == 2


@pytest.mark.parametrize("pix_fmt", ["bgr24", "rgba", "bgra", "argb"])
def test_other_orders_of_channels(pix_fmt: str, used: list[tuple[int, int]]) -> None:
    assert difference(LARGE, pix_fmt=pix_fmt) <= 1
    assert len(used) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"pix_fmt": "yuv420p"},
        {"pix_fmt": "gray"},
        {"width": 600, "height": 500},
        {"width": None, "height": None},
        {"scale_algo": "neighbor"},
        {"scale_algo": "fast_bilinear"},
        {"filter_desc": "hflip", "width": None, "height": None, "scale_mode": "pad"},
    ],
)
def test_what_does_not_scale_to_less_rgb_is_decoded_whole(
    options: dict[str, Any], used: list[tuple[int, int]]
) -> None:
    assert difference(LARGE, **options) == 0
    assert used == []


@pytest.mark.parametrize("kind", ["gray", "png", "adobe rgb", "decoder", "option"])
def test_what_is_not_ycc_or_has_its_own_wishes_is_decoded_whole(
    kind: str, used: list[tuple[int, int]]
) -> None:
    data, wishes = LARGE, {}
    if kind == "gray":
        simplejpeg = pytest.importorskip("simplejpeg")
        data = simplejpeg.encode_jpeg(picture(640, 512)[:, :, :1].copy(), colorspace="GRAY")
    elif kind == "png":
        data = make_image(picture(640, 512), codec="png")
    elif kind == "adobe rgb":
        data = LARGE[:2] + b"\xff\xee\0\x0eAdobe\0\x64\0\0\0\0\0" + LARGE[2:]
    else:
        wishes = {"decoder": "mjpeg"} if kind == "decoder" else {"decoder_options": {"idct": "int"}}
    small = load(data, sm.decode_config(downscale="dct", **wishes))
    np.testing.assert_array_equal(small, load(data, sm.decode_config(**wishes)))
    assert used == []


def damaged(kind: str) -> bytes:
    scan = LARGE.index(b"\xff\xda")
    middle = (scan + len(LARGE)) // 2
    if kind == "cut short":
        return LARGE[:middle]
    return LARGE[:middle] + b"\xff\xd9"


@pytest.mark.parametrize("kind", ["cut short", "end in the middle"])
def test_damage_is_for_the_whole_decode_to_judge(kind: str, used: list[tuple[int, int]]) -> None:
    errors = []
    for config in (DCT, None):
        with pytest.raises(sm.DecodeError) as caught:
            load(damaged(kind), config)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]
    assert used == []
    keep = {"on_corrupt": "keep"}
    small = load(damaged(kind), sm.decode_config(downscale="dct", **keep))  # type: ignore[arg-type]
    whole = load(damaged(kind), sm.decode_config(**keep))  # type: ignore[arg-type]
    np.testing.assert_array_equal(small, whole)


def test_a_truncated_image_is_called_so_also_if_its_crop_does_not_fit(
    used: list[tuple[int, int]],
) -> None:
    with pytest.raises(sm.DecodeError, match="cut short"):
        sm.load_image(LARGE[:-2], width=32, height=32, crops=(0, 0, 9999, 5), decode_config=DCT)
    assert used == []


def test_a_header_that_lies_about_the_size(used: list[tuple[int, int]]) -> None:
    data = bytearray(LARGE)
    data[data.index(b"\xff\xc0") + 5] = 3  # 768 rows instead of 512
    with pytest.raises(sm.DecodeError):
        load(bytes(data), DCT)
    assert used == []


def test_without_simplejpeg_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    with pytest.raises(sm.MissingDependencyError, match=r"downscale='dct'.*\.\[jpeg\]"):
        load(LARGE, DCT)
    load(LARGE)


@pytest.mark.parametrize("value", ["DCT", "lowres", True, 2])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="downscale must be 'dct' or None"):
        sm.decode_config(downscale=value)


def test_audio_and_video_are_as_ever(index_clips: dict[str, bytes]) -> None:
    whole, small = (sm.load_video(index_clips["mp4"], decode_config=c) for c in (None, DCT))
    np.testing.assert_array_equal(np.asarray(whole), np.asarray(small))


def test_real_photographs(media_dir: Any, used: list[tuple[int, int]]) -> None:
    paths = sorted((media_dir / "photos_hd").iterdir())
    options = {"width": 224, "height": 224}
    differences = [difference(path, **options) for path in paths]
    assert len(used) == len(paths)
    assert np.mean(differences) <= 0.5
    assert max(differences) <= 1


@pytest.mark.parametrize("algo", get_args(ScaleAlgo))
def test_real_photographs_by_each_kernel(media_dir: Any, algo: str) -> None:
    pytest.importorskip("simplejpeg")
    options = {"width": 224, "height": 224, "scale_algo": algo}
    paths = sorted((media_dir / "photos_hd").iterdir())
    assert max(difference(path, **options) for path in paths[:: 1 if effort.LONG else 3]) <= 3


def test_odd_files(media_dir: Any, used: list[tuple[int, int]]) -> None:
    for path in sorted((media_dir / "images_odd").iterdir()):
        try:
            whole = load(path, width=32, height=32)
        except sm.MediaError as error:
            with pytest.raises(type(error)):
                load(path, DCT, width=32, height=32)
            continue
        small = load(path, DCT, width=32, height=32)
        # At this size, the image consists of edges only.
        assert np.abs(small.astype(int) - whole).mean() <= 2, path.name
    assert used
