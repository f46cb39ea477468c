"""Flat colours come out as the colours they are, whatever matrix and range the file states."""

from __future__ import annotations

import io
import itertools
from typing import Any

import av
import numpy as np
import pytest
from av.video.reformatter import ColorRange, Colorspace, Interpolation, VideoReformatter

import spdl_media as sm
from spdl_media.testing import make_image, make_video

# Weights of red and blue in luma, from the standards' own text.
WEIGHTS = {"bt709": (0.2126, 0.0722), "smpte170m": (0.299, 0.114), "bt470bg": (0.299, 0.114)}
KINDS = list(itertools.product(("bt709", "smpte170m"), (False, True)))
COLORS = list(itertools.product((0, 90, 255), repeat=3))
# What users ask for, and the levels that a flat colour may be off.
WAYS: dict[str, tuple[dict[str, Any], float]] = {
    "same size": ({}, 1),
    "scaled": ({"width": 32, "height": 24}, 1),
    "cropped": ({"width": 20, "height": 20, "scale_mode": "crop"}, 1),
    "stretched": ({"width": 33, "height": 17, "scale_mode": None}, 1),
    "bgr24": ({"width": 32, "height": 24, "pix_fmt": "bgr24"}, 1),
    "planar": ({"pix_fmt": "gbrp", "layout": "NHWC"}, 1),
    "channels first": ({"width": 32, "height": 24, "layout": "NCHW"}, 1),
    "deep": ({"pix_fmt": "rgb48"}, 1.5),
    # Without accurate rounding, which may be 2.7 off in a component.
    "fast": ({"width": 32, "height": 24, "quality": "fast"}, 3),
}


def to_yuv(rgb: tuple[int, ...], matrix: str, full: bool) -> tuple[int, int, int]:
    red, blue = WEIGHTS[matrix]
    r, g, b = (value / 255 for value in rgb)
    y = red * r + (1 - red - blue) * g + blue * b
    u, v = (b - y) / (2 * (1 - blue)), (r - y) / (2 * (1 - red))
    luma, chroma, start = (255, 255, 0) if full else (219, 224, 16)
    values = (start + luma * y, 128 + chroma * u, 128 + chroma * v)
    return tuple(min(255, round(value)) for value in values)  # type: ignore[return-value]


def to_rgb(yuv: tuple[int, int, int], matrix: str, full: bool) -> np.ndarray:
    """What the numbers of a picture mean, which rounding has moved a little from where they came from."""
    red, blue = WEIGHTS[matrix]
    luma, chroma, start = (255, 255, 0) if full else (219, 224, 16)
    y, u, v = (yuv[0] - start) / luma, (yuv[1] - 128) / chroma, (yuv[2] - 128) / chroma
    r, b = y + 2 * (1 - red) * v, y + 2 * (1 - blue) * u
    return np.clip(255 * np.array([r, (y - red * r - blue * b) / (1 - red - blue), b]), 0, 255)


def flat(yuv: tuple[int, int, int], width: int, height: int) -> tuple[np.ndarray, ...]:
    half = -(-height // 2), -(-width // 2)
    shapes = [(height, width), half, half]
    return tuple(np.full(*pair, np.uint8) for pair in zip(shapes, yuv, strict=True))


def flat_video(matrix: str, full: bool, size: tuple[int, int], *, stated: bool = True) -> bytes:
    frames = [flat(to_yuv(color, matrix, full), *size) for color in COLORS]
    options = {"colorspace": matrix, "color_range": "pc" if full else "tv"} if stated else {}
    return make_video(frames, pix_fmt="yuv420p", options=options)


def pixels(way: str, buffer: sm.CPUBuffer) -> np.ndarray:
    """As (N, H, W, 3) in R, G, B of 0 to 255."""
    array = np.asarray(buffer)
    options = WAYS[way][0]
    if options.get("layout") == "NCHW":
        array = np.moveaxis(array, 1, -1)
    if options.get("pix_fmt") == "bgr24":
        array = array[..., ::-1]
    return array / (257 if array.dtype == np.uint16 else 1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("matrix", WEIGHTS)
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("size", [(64, 48), (63, 47)])
def test_matrix_and_range_of_a_video(
    way: str, matrix: str, full: bool, size: tuple[int, int]
) -> None:
    options, allowed = WAYS[way]
    got = pixels(way, sm.load_video(flat_video(matrix, full, size), **options))
    if options.get("scale_mode", "pad") == "pad":  # 64x48 and 63x47 differ in shape
        got = got[:, 2:-2, 2:-2]
    wanted = np.array([to_rgb(to_yuv(color, matrix, full), matrix, full) for color in COLORS])
    assert np.abs(got - wanted[:, None, None, :]).max() <= allowed


def test_what_is_not_stated_is_bt601_of_limited_range() -> None:
    got = np.asarray(sm.load_video(flat_video("smpte170m", False, (64, 48), stated=False)))
    wanted = np.array(
        [to_rgb(to_yuv(one, "smpte170m", False), "smpte170m", False) for one in COLORS]
    )
    assert np.abs(got - wanted[:, None, None, :]).max() <= 1


def test_the_matrices_and_ranges_of_these_tests_are_told_apart() -> None:
    made = [to_rgb(to_yuv((0, 90, 255), "bt709", False), *kind) for kind in KINDS]
    assert all(np.abs(a - b).max() > 2 for a, b in itertools.combinations(made, 2))


@pytest.mark.parametrize(("matrix", "full"), KINDS)
def test_it_is_what_the_accurate_scaler_gives(matrix: str, full: bool) -> None:
    """The reference is swscale itself, told matrix and range by hand, and no line of ours."""
    accurate = Interpolation.BILINEAR | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INT
    got = np.asarray(sm.load_video(flat_video(matrix, full, (64, 48))))
    for picture, color in zip(got, COLORS, strict=True):
        frame = av.VideoFrame(64, 48, "yuv420p")
        for plane, values in zip(
            frame.planes, flat(to_yuv(color, matrix, full), 64, 48), strict=True
        ):
            padded = np.full((plane.height, plane.line_size), values[0, 0], np.uint8)
            plane.update(padded.tobytes())
        wanted = VideoReformatter().reformat(
            frame,
            format="rgb24",
            src_colorspace=Colorspace.ITU709 if matrix == "bt709" else Colorspace.ITU601,
            dst_colorspace=Colorspace.ITU709 if matrix == "bt709" else Colorspace.ITU601,
            src_color_range=ColorRange.JPEG if full else ColorRange.MPEG,
            interpolation=accurate,
        )
        assert np.abs(picture.astype(int) - wanted.to_ndarray()).max() <= 1


@pytest.mark.parametrize("subsampling", [0, 1, 2], ids=["4:4:4", "4:2:2", "4:2:0"])
@pytest.mark.parametrize("size", [(64, 48), (63, 47)])
@pytest.mark.parametrize("way", ["same size", "scaled", "bgr24", "planar", "fast"])
def test_jpeg_is_what_pillow_gives(subsampling: int, size: tuple[int, int], way: str) -> None:
    image = pytest.importorskip("PIL.Image")
    allowed = 3 if way == "fast" else 2
    for color in COLORS:
        target = io.BytesIO()
        image.new("RGB", size, color).save(target, "JPEG", quality=95, subsampling=subsampling)
        wanted = np.asarray(image.open(target).convert("RGB"))[0, 0].astype(int)
        loaded = sm.load_image_batch([target.getvalue()], **WAYS[way][0])
        got = pixels(way, loaded)[:, 2:-2, 2:-2]
        assert np.abs(got - wanted).max() <= allowed, color


@pytest.mark.parametrize("pix_fmt", ["yuv420p", "nv12", "yuv444p"])
@pytest.mark.parametrize("layout", [None, "planes"])
def test_pictures_whose_numbers_mean_other_colours_do_not_mix(pix_fmt: str, layout: Any) -> None:
    """JPEG is of full range, and what is made from RGB of limited: white is 255 and 235."""
    white = np.full((48, 64, 3), 255, np.uint8)
    sources = [make_image(white, codec="mjpeg"), make_image(white)]
    desc = sm.get_video_filter_desc(pix_fmt=pix_fmt)
    frames = [sm.decode_packets(sm.demux_image(source), desc) for source in sources]
    with pytest.raises(
        sm.ConvertError,
        match=rf"item 0 \(bytes .*\) has bt601 full range, but item 1 \(bytes .*\) has bt601 limited "
        rf"range.*{pix_fmt}.*'yuvj420p'",
    ):
        sm.convert_frames(frames, layout=layout)
    for frame in frames:
        sm.convert_frames([frame, frame], layout=layout)


def test_what_the_error_names_makes_them_one() -> None:
    white = np.full((48, 64, 3), 255, np.uint8)
    sources = [make_image(white, codec="mjpeg"), make_image(white)]
    with pytest.raises(sm.ConvertError, match="equal numbers of yuv420p are different colours"):
        sm.load_image_batch(sources, pix_fmt="yuv420p")
    options: list[dict[str, Any]] = [
        {"pix_fmt": "yuvj420p"},
        {"filter_desc": "scale=out_color_matrix=bt601:out_range=pc,format=yuv420p"},
    ]
    for option in options:
        array = np.asarray(sm.load_image_batch(sources, **option))
        assert (array[:, 0, :48] == 255).all()


def test_clips_of_two_matrices_do_not_mix_unless_in_rgb() -> None:
    clips = [sm.demux_video(flat_video(matrix, False, (64, 48))) for matrix in ("bt709", "bt470bg")]
    with pytest.raises(
        sm.ConvertError,
        match=r"frame 0 of item 0 .* has bt709 limited range, but frame 0 of item 1 .* has bt601 limited",
    ):
        sm.convert_frames([sm.decode_packets(clip, None) for clip in clips])
    one, other = np.asarray(sm.convert_frames([sm.decode_packets(clip) for clip in clips]))
    assert np.abs(one.astype(int) - other).max() <= 2
    # What says nothing is BT.601, which has two names.
    same = [flat_video("smpte170m", False, (64, 48), stated=stated) for stated in (True, False)]
    same.append(flat_video("bt470bg", False, (64, 48)))
    frames = [sm.decode_packets(sm.demux_video(clip), None) for clip in same]
    assert sm.convert_frames(frames).shape[0] == 3
