"""Flat colours are decoded to the right RGB values, for all matrices and ranges that a file may state."""

from __future__ import annotations

import io
import itertools
from functools import cache
from typing import Any

import av
import numpy as np
import pytest
from av.video.reformatter import ColorRange, Colorspace, Interpolation, VideoReformatter
from effort import each

import spdl_media as sm
from spdl_media.testing import make_image, make_video

# Weights of red and blue in luma, from the texts of the standards.
WEIGHTS = {"bt709": (0.2126, 0.0722), "smpte170m": (0.299, 0.114), "bt470bg": (0.299, 0.114)}
KINDS = list(itertools.product(("bt709", "smpte170m"), (False, True)))
COLORS = list(itertools.product((0, 90, 255), repeat=3))
# Options of users, and the allowed difference of a flat colour in levels.
WAYS: dict[str, tuple[dict[str, Any], float]] = {
    "same size": ({}, 1),
    "accurate": ({"quality": "accurate"}, 1),
    "scaled": ({"width": 32, "height": 24}, 1),
    "cropped": ({"width": 20, "height": 20, "scale_mode": "crop"}, 1),
    "stretched": ({"width": 33, "height": 17, "scale_mode": None}, 1),
    "bgr24": ({"width": 32, "height": 24, "pix_fmt": "bgr24"}, 1),
    "planar": ({"pix_fmt": "gbrp", "layout": "NHWC"}, 1),
    "channels first": ({"width": 32, "height": 24, "layout": "NCHW"}, 1),
    "deep": ({"pix_fmt": "rgb48"}, 1.5),
    # Without accurate rounding, a component may differ by 2.7.
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
    """Convert stored YUV values, which were rounded, to RGB by the standard."""
    red, blue = WEIGHTS[matrix]
    luma, chroma, start = (255, 255, 0) if full else (219, 224, 16)
    y, u, v = (yuv[0] - start) / luma, (yuv[1] - 128) / chroma, (yuv[2] - 128) / chroma
    r, b = y + 2 * (1 - red) * v, y + 2 * (1 - blue) * u
    return np.clip(255 * np.array([r, (y - red * r - blue * b) / (1 - red - blue), b]), 0, 255)


def flat(yuv: tuple[int, int, int], width: int, height: int) -> tuple[np.ndarray, ...]:
    half = -(-height // 2), -(-width // 2)
    shapes = [(height, width), half, half]
    return tuple(np.full(*pair, np.uint8) for pair in zip(shapes, yuv, strict=True))


@cache
def flat_video(matrix: str, full: bool, size: tuple[int, int], *, stated: bool = True) -> bytes:
    frames = [flat(to_yuv(color, matrix, full), *size) for color in COLORS]
    options = {"colorspace": matrix, "color_range": "pc" if full else "tv"} if stated else {}
    return make_video(frames, pix_fmt="yuv420p", options=options)


def pixels(way: str, buffer: sm.CPUBuffer) -> np.ndarray:
    """Return the pixels as ``(N, H, W, 3)``, R, G and B from 0 to 255."""
    array = np.asarray(buffer)
    options = WAYS[way][0]
    if options.get("layout") == "NCHW":
        array = np.moveaxis(array, 1, -1)
    if options.get("pix_fmt") == "bgr24":
        array = array[..., ::-1]
    return array / (257 if array.dtype == np.uint16 else 1)


@each("way", WAYS)
@each("matrix", WEIGHTS)
@each("full", [False, True])
@each("size", [(64, 48), (63, 47)])
def test_matrix_and_range_of_a_video(
    way: str, matrix: str, full: bool, size: tuple[int, int]
) -> None:
    options, allowed = WAYS[way]
    if way == "same size":  # FFmpeg's own conversion rounds less exactly
        allowed = 3
    got = pixels(way, sm.load_video(flat_video(matrix, full, size), **options))
    if options.get("scale_mode", "pad") == "pad":  # 64x48 and 63x47 differ in shape
        got = got[:, 2:-2, 2:-2]
    wanted = np.array([to_rgb(to_yuv(color, matrix, full), matrix, full) for color in COLORS])
    assert np.abs(got - wanted[:, None, None, :]).max() <= allowed


def test_what_is_not_stated_is_bt601_of_limited_range() -> None:
    data = flat_video("smpte170m", False, (64, 48), stated=False)
    got = np.asarray(sm.load_video(data, quality="accurate"))
    wanted = np.array(
        [to_rgb(to_yuv(one, "smpte170m", False), "smpte170m", False) for one in COLORS]
    )
    assert np.abs(got - wanted[:, None, None, :]).max() <= 1


def test_frames_of_a_video_are_what_the_default_conversion_gives() -> None:
    """Quality ``"auto"`` and ``"fast"`` at the video's own size, bit for bit, also for odd sizes."""
    for size in ((64, 48), (63, 47)):
        data = flat_video("bt709", False, size)
        wanted = np.asarray(sm.load_video(data, filter_desc="format=rgb24"))
        for quality in ("auto", "fast"):
            got = np.asarray(sm.load_video(data, quality=quality))
            np.testing.assert_array_equal(got, wanted)
        packets = sm.demux_video(data)
        got = np.asarray(sm.convert_frames(sm.decode_packets(packets)))
        np.testing.assert_array_equal(got, wanted)


def test_the_matrices_and_ranges_of_these_tests_are_told_apart() -> None:
    made = [to_rgb(to_yuv((0, 90, 255), "bt709", False), *kind) for kind in KINDS]
    assert all(np.abs(a - b).max() > 2 for a, b in itertools.combinations(made, 2))


@pytest.mark.parametrize(("matrix", "full"), KINDS)
def test_it_is_what_the_accurate_scaler_gives(matrix: str, full: bool) -> None:
    """The reference is swscale itself, with matrix and range set by hand, without this library's code."""
    accurate = Interpolation.BILINEAR | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INT
    got = np.asarray(sm.load_video(flat_video(matrix, full, (64, 48)), quality="accurate"))
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


@each("subsampling", [0, 1, 2])
@each("size", [(64, 48), (63, 47)])
@each("way", ["same size", "scaled", "bgr24", "planar", "fast"])
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


@each("pix_fmt", ["yuv420p", "nv12", "yuv444p"])
@each("layout", [None, "planes"])
def test_images_whose_numbers_mean_other_colours_do_not_mix(pix_fmt: str, layout: Any) -> None:
    """JPEG has full range, and YUV made from RGB has limited range: white is 255 and 235."""
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
    limited = [sm.get_video_filter_desc(pix_fmt="yuv420p"), "format=yuv420p"]
    for desc in limited:
        with pytest.raises(sm.ConvertError, match="equal numbers of yuv420p are different colours"):
            sm.load_image_batch(sources, filter_desc=desc)
    options: list[dict[str, Any]] = [
        {"pix_fmt": "yuvj420p"},
        {"pix_fmt": "yuv420p"},
        {"filter_desc": "scale=out_color_matrix=bt601:out_range=pc,format=yuv420p"},
        {
            "filter_desc": sm.get_video_filter_desc(
                pix_fmt="yuv420p", color_matrix="bt601", color_range="pc"
            )
        },
    ]
    for option in options:
        array = np.asarray(sm.load_image_batch(sources, **option))
        assert (array[:, 0, :48] == 255).all()


FLAT = (200, 40, 90)
GRAY = (93, 93, 93)


def saved(kind: str) -> tuple[bytes, tuple[int, int, int]]:
    """Make a file of one flat colour; return it with the colour that it contains."""
    if kind.startswith("limited"):
        matrix = kind.removeprefix("limited ")
        video = make_video([flat(to_yuv(FLAT, matrix, False), 64, 48)], pix_fmt="yuv420p")
        stated = make_video(
            [flat(to_yuv(FLAT, matrix, False), 64, 48)],
            pix_fmt="yuv420p",
            options={"colorspace": matrix, "color_range": "tv"},
        )
        return (stated if matrix == "bt709" else video), FLAT
    image = pytest.importorskip("PIL.Image")
    mode, format, options = {
        "JPEG": ("RGB", "JPEG", {"quality": 95}),
        "JPEG 4:4:4": ("RGB", "JPEG", {"quality": 95, "subsampling": 0}),
        "JPEG gray": ("L", "JPEG", {"quality": 95}),
        "JPEG CMYK": ("CMYK", "JPEG", {"quality": 98}),
        "PNG": ("RGB", "PNG", {}),
        "PNG gray": ("L", "PNG", {}),
        "PNG palette": ("P", "PNG", {}),
        "PNG alpha": ("RGBA", "PNG", {}),
        "WebP": ("RGB", "WEBP", {"quality": 100}),
        "WebP lossless": ("RGB", "WEBP", {"lossless": True}),
        "GIF": ("P", "GIF", {}),
        "BMP": ("RGB", "BMP", {}),
    }[kind]
    color = GRAY if mode == "L" else FLAT
    picture = image.new("RGB", (64, 48), color)
    # With a palette of its own, because the common palette has other colours and dithers.
    converted = picture.quantize(2) if mode == "P" else picture.convert(mode)
    target = io.BytesIO()
    converted.save(target, format, **options)
    return target.getvalue(), color


WILD = (
    "JPEG",
    "JPEG 4:4:4",
    "JPEG gray",
    "JPEG CMYK",
    "PNG",
    "PNG gray",
    "PNG palette",
    "PNG alpha",
    "WebP",
    "WebP lossless",
    "GIF",
    "BMP",
    "limited bt709",
    "limited smpte170m",
)
YUV_WAYS: dict[str, dict[str, Any]] = {
    "same size": {},
    "padded": {"width": 40, "height": 40},
    "cropped": {"width": 40, "height": 40, "scale_mode": "crop"},
    "stretched": {"width": 32, "height": 20, "scale_mode": None, "quality": "fast"},
    "one side": {"width": 32},
}


def planes_of(pix_fmt: str, array: np.ndarray) -> list[np.ndarray]:
    """Return the three planes of one image, each in its own size."""
    if pix_fmt.startswith("yuv444"):
        return [plane / (4 if plane.dtype == np.uint16 else 1) for plane in array]
    rows = array.shape[1] * 2 // 3
    luma, rest = array[0, :rows], array[0, rows:]
    if pix_fmt == "nv12":
        pairs = rest.reshape(rows // 2, -1, 2)
        return [luma, pairs[..., 0], pairs[..., 1]]
    halves = rest.reshape(2, rows // 2, -1)
    return [luma, halves[0], halves[1]]


@pytest.mark.parametrize("kind", WILD)
def test_yuv_of_images_is_bt601_of_full_range_whatever_the_file(kind: str) -> None:
    failed = []
    for way in YUV_WAYS:
        for pix_fmt in ("yuv420p", "yuvj420p", "nv12", "yuv444p", "yuv444p10le"):
            try:
                check_yuv(kind, way, pix_fmt)
            except AssertionError as error:
                failed.append(f"{way}, {pix_fmt}: {error}")
    assert not failed


def check_yuv(kind: str, way: str, pix_fmt: str) -> None:
    source, color = saved(kind)
    options = {"pix_fmt": pix_fmt, **YUV_WAYS[way]}
    wanted = to_yuv(color, "smpte170m", True)
    one = sm.load_image(source, **options)
    batch = sm.load_image_batch([source, source], **options)
    for buffer in (one, batch):
        assert (buffer.colorspace, buffer.color_range) == ("bt601", "pc")
    np.testing.assert_array_equal(np.asarray(batch)[1], np.asarray(one))
    for plane, value in zip(planes_of(pix_fmt, np.asarray(one)), wanted, strict=True):
        middle = plane[plane.shape[0] // 4 : -(plane.shape[0] // 4)]
        assert np.abs(middle.astype(float) - value).max() <= 2
    if way == "padded":  # the border is black in full range
        border = [plane[0, 0] for plane in planes_of(pix_fmt, np.asarray(one))]
        assert border == [0, 128, 128]


# Different routes: without a filter graph, with one, and with operations before it.
FAST_WAYS: dict[str, dict[str, Any]] = {
    "padded": {"width": 40, "height": 40},
    "cropped": {"width": 40, "height": 40, "scale_mode": "crop"},
    "stretched": {"width": 32, "height": 20, "scale_mode": None},
    "one side": {"width": 32},
    "its own size": {"width": 64, "height": 48},
    "cut and mirrored": {"width": 40, "crops": [(3, 5, 41, 31)], "flips": [True]},
    "bgr24": {"width": 32, "height": 24, "pix_fmt": "bgr24"},
    "by hand": {"filter_desc": "scale=32:20:flags=bicublin,format=yuv420p,format=rgb24"},
    "by hand, in a graph": {
        "filter_desc": "copy,scale=32:20:flags=area,format=yuv444p,format=rgb24"
    },
}


@pytest.mark.parametrize("kind", [*WILD, "PNG deep", "QOI"])
def test_colours_of_the_fast_quality_whatever_the_file(kind: str) -> None:
    if kind in ("PNG deep", "QOI"):
        picture = np.broadcast_to(np.array(FLAT, np.uint8), (48, 64, 3))
        codec, pix_fmt = ("png", "rgb48be") if kind == "PNG deep" else ("qoi", "rgb24")
        source, color = make_image(picture, codec=codec, pix_fmt=pix_fmt), FLAT
    else:
        source, color = saved(kind)
    failed = {}
    for way, options in FAST_WAYS.items():
        quality = {} if "filter_desc" in options else {"quality": "fast"}
        got = np.asarray(sm.load_image_batch([source], **quality, **options))[0]
        got = got[..., ::-1] if way == "bgr24" else got
        middle = got[got.shape[0] // 4 : -(got.shape[0] // 4), 2:-2].astype(int)
        # Without accurate rounding; 16 bits are dithered, and JPEG in CMYK itself differs by a level.
        if (farthest := np.abs(middle - color).max()) > 4:
            failed[way] = farthest
    assert not failed


@pytest.mark.parametrize("pix_fmt", ["yuv420p", "nv12"])
@pytest.mark.parametrize("crops", [None, (8, 6, 40, 30)])
def test_a_folder_from_the_wild_makes_one_yuv_batch(pix_fmt: str, crops: Any) -> None:
    sources = [saved(kind)[0] for kind in WILD if "gray" not in kind]
    options: dict[str, Any] = {"width": 32, "height": 24, "pix_fmt": pix_fmt}
    if crops:
        options |= {"crops": [crops] * len(sources), "flips": [True] * len(sources)}
    batch = sm.load_image_batch(sources, **options)
    for picture in np.asarray(batch):
        for plane, value in zip(
            planes_of(pix_fmt, picture), to_yuv(FLAT, "smpte170m", True), strict=True
        ):
            assert np.abs(plane.astype(float) - value).max() <= 2
    assert (batch.colorspace, batch.color_range) == ("bt601", "pc")


def test_rgb_and_gray_are_what_they_were() -> None:
    """The rule applies only to YUV."""
    source, _ = saved("JPEG")
    for options in ({}, {"pix_fmt": "gray"}, {"width": 32, "height": 32, "pix_fmt": "gbrp"}):
        desc = sm.get_video_filter_desc(
            quality="accurate",
            **{
                {"width": "scale_width", "height": "scale_height"}.get(k, k): v
                for k, v in options.items()
            },
        )
        buffer = sm.load_image(source, **options)
        np.testing.assert_array_equal(
            np.asarray(buffer), np.asarray(sm.load_image(source, filter_desc=desc))
        )
        assert (buffer.colorspace, buffer.color_range) == (None, None)


def test_buffers_of_yuv_say_what_their_numbers_mean() -> None:
    clip = sm.demux_video(flat_video("bt709", False, (64, 48)))
    frames = sm.decode_packets(clip, None)
    buffer = sm.convert_frames(frames)
    assert (buffer.colorspace, buffer.color_range) == ("bt709", "tv")
    for plane in sm.convert_frames(frames, layout="planes"):
        assert (plane.colorspace, plane.color_range) == ("bt709", "tv")
    unstated = sm.decode_packets(
        sm.demux_video(flat_video("smpte170m", False, (64, 48), stated=False)), None
    )
    assert (unstated.colorspace, unstated.color_range) == (None, None)
    buffer = sm.convert_frames(unstated)
    assert (buffer.colorspace, buffer.color_range) == ("bt601", "tv")
    jpeg = sm.load_image(make_image(np.zeros((8, 8, 3), np.uint8), codec="mjpeg"), filter_desc=None)
    assert (jpeg.colorspace, jpeg.color_range) == ("bt601", "pc")
    rgb = sm.convert_frames(sm.decode_packets(clip))
    assert (rgb.colorspace, rgb.color_range) == (None, None)


def test_clips_of_two_matrices_do_not_mix_unless_in_rgb() -> None:
    clips = [sm.demux_video(flat_video(matrix, False, (64, 48))) for matrix in ("bt709", "bt470bg")]
    with pytest.raises(
        sm.ConvertError,
        match=r"frame 0 of item 0 .* has bt709 limited range, but frame 0 of item 1 .* has bt601 limited",
    ):
        sm.convert_frames([sm.decode_packets(clip, None) for clip in clips])
    one, other = np.asarray(sm.convert_frames([sm.decode_packets(clip) for clip in clips]))
    assert np.abs(one.astype(int) - other).max() <= 2
    # Unspecified means BT.601, which has two names.
    same = [flat_video("smpte170m", False, (64, 48), stated=stated) for stated in (True, False)]
    same.append(flat_video("bt470bg", False, (64, 48)))
    frames = [sm.decode_packets(sm.demux_video(clip), None) for clip in same]
    assert sm.convert_frames(frames).shape[0] == 3
