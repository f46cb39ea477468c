"""The builders of filter descriptions: their text, and the result when FFmpeg runs it."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

import av
import numpy as np
import pytest
from effort import each

from spdl_media import (
    AudioCodec,
    AudioFrames,
    AudioPackets,
    FilterGraph,
    VideoCodec,
    VideoFrames,
    VideoPackets,
    get_abuffer_desc,
    get_audio_filter_desc,
    get_buffer_desc,
    get_filter_desc,
    get_video_filter_desc,
)
from spdl_media.formats import picture_planes
from spdl_media.frames import placed_chunk
from spdl_media.image_frames import av_frames
from spdl_media.operations import picture_ops, sound_ops

FLAGS = "flags=bicubic+accurate_rnd+full_chroma_int+full_chroma_inp"
CONVERT = (
    "scale=flags=bilinear+accurate_rnd+full_chroma_int+full_chroma_inp,format=gbrp,format=rgb24"
)
FORMATS = (
    "yuv420p yuvj420p yuv422p yuv444p yuvj444p rgb24 rgba gray gray16le pal8 yuv420p10le yuva420p gbrp gbrap "
    "nv12 ya8 yuv410p monob rgb48be"
).split()


def picture(
    pix_fmt: str, width: int = 61, height: int = 45, value: int | None = None
) -> av.VideoFrame:
    """Make a coloured pattern or a flat grey, in any pixel format."""
    y, x = np.mgrid[:height, :width]
    rgb = np.stack([x * 4 % 256, y * 5 % 256, (x + y) * 3 % 256], -1).astype(np.uint8)
    if value is not None:
        rgb[:] = value
    frame = av.VideoFrame.from_ndarray(rgb, "rgb24")
    frame.pts, frame.time_base, frame.duration = 0, Fraction(1, 10), 1
    return (
        frame if pix_fmt == "rgb24" else run(f"scale=flags={FLAGS[6:]},format={pix_fmt}", frame)[0]
    )


def run(desc: str | None, *frames: Any) -> list[Any]:
    """Run a graph over frames; return all its output."""
    assert desc is not None
    graph = FilterGraph(desc)
    if isinstance(frames[0], av.VideoFrame):
        graph.add_frames(VideoFrames(list(frames)))
    else:
        graph.add_frames(AudioFrames([placed_chunk(frame, Fraction(0)) for frame in frames]))
    graph.flush()
    result = graph.get_frames()
    if isinstance(result, AudioFrames):
        return [chunk.frame for chunk in result.chunks]
    return [] if result is None else list(av_frames(result))


def clip(count: int) -> list[av.VideoFrame]:
    """Make grey frames at 10 per second, frame k with level k."""
    frames = [picture("gray", 8, 8, k) for k in range(count)]
    for k, frame in enumerate(frames):
        frame.pts = k
    return frames


def levels(frames: list[av.VideoFrame]) -> list[int]:
    return [int(frame.to_ndarray().flat[0]) for frame in frames]


@each(
    "arguments, desc",
    [
        ({}, "format=rgb24"),
        ({"quality": "fast"}, "format=rgb24"),
        ({"quality": "accurate"}, CONVERT),
        ({"pix_fmt": None}, None),
        ({"pix_fmt": "gray"}, f"{CONVERT.split(',', 1)[0]},format=gray"),
        (
            {"scale_width": 224, "scale_height": 112, "scale_mode": None},
            f"scale=224:112:{FLAGS},format=gbrp,format=rgb24",
        ),
        (
            {"scale_width": 224, "pix_fmt": "yuv420p"},
            f"scale=224:'max(1,round(224*ih/iw))':{FLAGS},format=yuv420p",
        ),
        (
            {"scale_width": 8, "scale_height": 6, "pix_fmt": "rgba"},
            (
                f"scale='max(1,min(8,round(6*iw/ih)))':'max(1,min(6,round(8*ih/iw)))':{FLAGS},format=gbrap,"
                "pad=8:6:(8-iw)/2:(6-ih)/2:color=black,format=rgba"
            ),
        ),
        (
            {"scale_width": 8, "scale_height": 6, "scale_mode": "crop"},
            f"scale=8:6:force_original_aspect_ratio=increase:{FLAGS},format=gbrp,crop=8:6,format=rgb24",
        ),
        (
            {
                "pix_fmt": "nv12",
                "color_matrix": "bt601",
                "color_range": "pc",
                "quality": "accurate",
            },
            f"{CONVERT.split(',', 1)[0]}:out_color_matrix=bt601:out_range=pc,format=nv12",
        ),
        (
            {"scale_width": 8, "scale_height": 6, "pix_fmt": "yuv420p", "color_range": "tv"},
            (
                f"scale='max(ohsub,min(floor(8/ohsub),round(6*iw/ih/ohsub))*ohsub)':"
                f"'max(ovsub,min(floor(6/ovsub),round(8*ih/iw/ovsub))*ovsub)':{FLAGS}:out_range=tv,"
                "pad=8:8:(8-iw)/2:(6-ih)/2:color=black,crop=8:6:0:0:exact=1,format=yuv420p"
            ),
        ),
        (
            {"pix_fmt": None, "color_matrix": "bt709"},
            f"{CONVERT.split(',', 1)[0]}:out_color_matrix=bt709",
        ),
        ({"pix_fmt": "rgb48"}, CONVERT.replace("gbrp,format=rgb24", "gbrp16le,format=rgb48")),
        ({"frame_rate": (30000, 1001), "pix_fmt": None}, "fps=30000/1001:round=up"),
        ({"frame_rate": 29.97, "pix_fmt": None}, "fps=2997/100:round=up"),
        ({"timestamp": (0.1, Fraction(1, 3)), "pix_fmt": None}, "trim=start=0.100000:end=0.333333"),
        ({"timestamp": (None, 2), "pix_fmt": None}, "trim=end=2.000000"),
        ({"num_frames": 5, "pix_fmt": None}, "tpad=stop=-1:stop_mode=clone,trim=end_frame=5"),
        (
            {"num_frames": 5, "pad_mode": "red", "pix_fmt": None},
            "tpad=stop=-1:stop_mode=add:color=red,trim=end_frame=5",
        ),
        ({"filter_desc": "hflip", "quality": "accurate"}, f"hflip,{CONVERT}"),
        ({"filter_desc": "hflip"}, "hflip,format=rgb24"),
        ({"filter_desc": "hflip", "pix_fmt": None}, "hflip"),
    ],
)
def test_video_descriptions(arguments: dict[str, Any], desc: str | None) -> None:
    assert get_video_filter_desc(**arguments) == desc


@each(
    "arguments, desc",
    [
        ({}, "aformat=sample_fmts=fltp"),
        ({"sample_fmt": None}, None),
        (
            {"num_channels": 1, "sample_rate": 16000},
            "aformat=channel_layouts=1c,aresample=16000,aformat=sample_fmts=fltp",
        ),
        ({"timestamp": (1, 2), "sample_fmt": None}, "atrim=start=1.000000:end=2.000000"),
        ({"num_frames": 9, "sample_fmt": None}, "apad=whole_len=9,atrim=end_sample=9"),
        ({"filter_desc": "volume=2", "sample_fmt": "s16"}, "volume=2,aformat=sample_fmts=s16"),
    ],
)
def test_audio_descriptions(arguments: dict[str, Any], desc: str | None) -> None:
    assert get_audio_filter_desc(**arguments) == desc


@each(
    "arguments, error, match",
    [
        ({"scale_width": 0}, ValueError, "scale_width must be positive.*not 0"),
        (
            {"scale_width": 8, "scale_height": -2},
            ValueError,
            "scale_height must be positive.*not -2",
        ),
        ({"crop_width": 1.5}, TypeError, "crop_width must be an int, not 1.5"),
        ({"num_frames": True}, TypeError, "num_frames must be an int, not True"),
        ({"scale_mode": "fit"}, ValueError, "scale_mode must be 'pad', 'crop' or None, not 'fit'"),
        ({"scale_algo": "cubic"}, ValueError, "scale_algo must be one of .*bicubic.*not 'cubic'"),
        ({"pix_fmt": "rgb24,hflip"}, ValueError, "pix_fmt must be one of FFmpeg's names"),
        (
            {"pix_fmt": "rgb"},
            ValueError,
            r"pix_fmt must be one of FFmpeg's names, such as 'rgb24', not 'rgb'\. Did you mean 'rgb24', ",
        ),
        ({"pix_fmt": "RGBA"}, ValueError, r"not 'RGBA'\. Did you mean 'rgba', "),
        ({"pix_fmt": "yuv420"}, ValueError, r"not 'yuv420'\. Did you mean 'yuv420p', "),
        ({"pix_fmt": "i420"}, ValueError, r"not 'i420'$"),
        ({"pix_fmt": "none"}, ValueError, r"not 'none'"),
        ({"pix_fmt": 3}, TypeError, "pix_fmt must be a str, such as 'rgb24', not 3"),
        ({"pad_color": "red:x"}, ValueError, "pad_color must be a colour by name"),
        ({"pad_color": "blak"}, ValueError, "pad_color must be a colour by name.*not 'blak'"),
        ({"pad_color": "red@7"}, ValueError, "pad_color must be a colour by name.*not 'red@7'"),
        ({"pad_mode": "whit"}, ValueError, "pad_mode must be a colour by name.*not 'whit'"),
        ({"pad_mode": "#12"}, ValueError, "pad_mode must be a colour by name"),
        ({"frame_rate": 0}, ValueError, "frame_rate must be positive, not 0"),
        ({"frame_rate": "x"}, ValueError, "frame_rate must be a number"),
        ({"frame_rate": (1, 0)}, ValueError, "frame_rate must be a number"),
        ({"timestamp": (2, 1)}, ValueError, "holds no time"),
        ({"filter_desc": 1}, TypeError, "filter_desc must be a str"),
        (
            {"color_matrix": "bt601"},
            ValueError,
            "color_matrix='bt601' is for YUV, .* not for rgb24",
        ),
        ({"color_range": "tv", "pix_fmt": "gbrp"}, ValueError, "color_range='tv' is for YUV"),
        (
            {"color_matrix": "bt470bg", "pix_fmt": "nv12"},
            ValueError,
            "color_matrix must be .*'bt709'.* not 'bt470bg'",
        ),
        (
            {"color_range": "full", "pix_fmt": "nv12"},
            ValueError,
            "color_range must be 'tv', 'pc' or None",
        ),
    ],
)
def test_bad_arguments_are_refused(
    arguments: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        get_video_filter_desc(**arguments)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"sample_rate": 0}, "sample_rate must be positive"),
        ({"num_channels": -1}, "num_channels must be positive"),
        ({"sample_fmt": "f l t"}, "sample_fmt must be one of FFmpeg's names"),
        ({"sample_fmt": "float"}, r"such as 'fltp', not 'float'\. Did you mean .*'fltp'"),
    ],
)
def test_bad_audio_arguments_are_refused(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        get_audio_filter_desc(**arguments)


@each("source", FORMATS)
@each("target", ["rgb24", "rgba", "bgr24"])
def test_planar_rgb_on_the_way_equals_one_accurate_step(source: str, target: str) -> None:
    frame = picture(source)
    small: Any = {"scale_width": 32, "scale_height": 24}
    for size, text in ((small, f"32:24:{FLAGS}"), ({}, "")):
        desc = get_video_filter_desc(**size, scale_mode=None, pix_fmt=target, quality="accurate")
        flags = text or FLAGS.replace("bicubic", "bilinear")
        (ours,), (once,) = run(desc, frame), run(f"scale={flags},format={target}", frame)
        assert ours.format.name == target
        # At some odd widths, one value in a thousand is rounded differently.
        difference = np.abs(ours.to_ndarray().astype(int) - once.to_ndarray())
        assert difference.max() <= 1
        assert difference.mean() < 0.005


@pytest.mark.parametrize("source", ["yuv420p", "nv12", "yuv444p", "yuv420p10le", "rgb24"])
def test_deep_rgb_is_rgb(source: str) -> None:
    # FFmpeg's own bilinear step from 4:2:0 to rgb48 overflows (levels near 0 come out near 65535).
    deep, plain = (
        run(get_video_filter_desc(pix_fmt=pix_fmt, quality="accurate"), picture(source))[0]
        .to_ndarray()
        .astype(int)
        for pix_fmt in ("rgb48le", "rgb24")
    )
    assert np.abs(deep - 257 * plain).max() <= 2 * 257


@each("source", ["yuv420p", "yuvj420p", "rgb24", "gray", "nv12", "yuv410p"])
@each("target", ["rgb24", "yuv420p", "gray", "nv12", None])
@each("mode", ["pad", "crop", None])
def test_sizes_are_exact(source: str, target: str | None, mode: Any) -> None:
    for width, height in ((32, 32), (33, 31), (226, 17), (7, 50)):
        desc = get_video_filter_desc(
            scale_width=width, scale_height=height, scale_mode=mode, pix_fmt=target
        )
        (frame,) = run(desc, picture(source))
        assert (frame.width, frame.height) == (width, height)


@each("source", FORMATS)
def test_borders_are_black_and_the_image_is_in_the_middle(source: str) -> None:
    desc = get_video_filter_desc(scale_width=33, scale_height=33)
    rgb = run(desc, picture(source, 66, 22, 255))[0].to_ndarray()
    assert (rgb[11:22] >= 250).all()  # pal8 has no white of its own
    assert not rgb[:11].any()
    assert not rgb[22:].any()


SAMPLES = {
    "yuv420p": (2, 2),
    "yuvj420p": (2, 2),
    "nv12": (2, 2),
    "yuv422p": (2, 1),
    "yuv440p": (1, 2),
    "yuv411p": (4, 1),
    "yuv410p": (4, 4),
    "yuv444p": (1, 1),
    "gray": (1, 1),
}


@cache
def bright(width: int, height: int) -> np.ndarray:
    pattern = np.arange(width * height * 3).reshape(height, width, 3) ** 2 % 97 + 150
    return pattern.astype(np.uint8)


@each("asked", [True, False])
@each("size", [(640, 427), (427, 640), (101, 33), (500, 375), (61, 61)])
@each("to", [(224, 224), (64, 64), (65, 63)])
@pytest.mark.parametrize("pix_fmt", SAMPLES)
def test_the_whole_image_is_inside_the_border(
    pix_fmt: str, to: tuple[int, int], size: tuple[int, int], asked: bool
) -> None:
    """The inside equals the image scaled to that size bit for bit, and is not a crop of a larger one."""
    frame = av.VideoFrame.from_ndarray(bright(*size), "rgb24")
    if not asked:
        (frame,) = run(f"scale=flags={FLAGS[6:]},format={pix_fmt}", frame)
    format = pix_fmt if asked else None
    padded = planes(
        run(get_video_filter_desc(scale_width=to[0], scale_height=to[1], pix_fmt=format), frame)
    )
    rows, columns = (np.flatnonzero((padded[0] > 90).any(axis)) for axis in (1, 0))
    width, height = len(columns), len(rows)
    inside = planes(
        run(
            get_video_filter_desc(
                scale_width=width, scale_height=height, scale_mode=None, pix_fmt=format
            ),
            frame,
        )
    )
    across, down = SAMPLES[pix_fmt]
    for plane, whole, (right, below) in zip(
        padded, inside, [(1, 1), (across, down), (across, down)], strict=False
    ):
        x, y = columns[0] // right, rows[0] // below
        part = plane[y : y + whole.shape[0], x : x + whole.shape[1]]
        np.testing.assert_array_equal(part, whole)
    # As large as possible with the image's aspect ratio, rounded to whole samples.
    scale = min(to[0] / size[0], to[1] / size[1])
    assert abs(width - size[0] * scale) <= across / 2 + 0.5 * (to[0] % across)
    assert abs(height - size[1] * scale) <= down / 2 + 0.5 * (to[1] % down)


def planes(frames: list[Any]) -> tuple[Any, ...]:
    """Return the planes of the only frame."""
    (frame,) = frames
    return picture_planes(frame)


def test_border_color() -> None:
    desc = get_video_filter_desc(scale_width=16, scale_height=16, pad_color="#ff8000")
    rgb = run(desc, picture("yuv420p", 32, 16, 0))[0].to_ndarray()
    np.testing.assert_array_equal(rgb[0, 0], [255, 128, 0])


def test_crop_takes_the_middle() -> None:
    frame = picture("rgb24", 20, 10)
    desc = get_video_filter_desc(crop_width=4, crop_height=2)
    np.testing.assert_array_equal(run(desc, frame)[0].to_ndarray(), frame.to_ndarray()[4:6, 8:12])


def test_odd_crop_of_subsampled_chroma_is_exact() -> None:
    desc = get_video_filter_desc(crop_width=5, crop_height=7, pix_fmt=None)
    (frame,) = run(desc, picture("yuv420p", 20, 20))
    assert (frame.width, frame.height) == (5, 7)


@each("colorspace, red", [(1, 0.2126), (6, 0.299), (5, 0.299), (2, 0.299), (9, 0.2627)])
@each("full", [False, True])
def test_matrix_and_range_of_the_frame_count(colorspace: int, red: float, full: bool) -> None:
    frame = av.VideoFrame(16, 16, "yuv444p")
    for plane, value in zip(frame.planes, (100, 128, 200), strict=True):
        plane.update(bytes([value]) * plane.buffer_size)
    frame.colorspace, frame.color_range = colorspace, 2 if full else 1
    luma = 100 if full else (100 - 16) * 255 / 219
    wanted = luma + 2 * (1 - red) * (200 - 128) * (1 if full else 255 / 224)
    rgb = run(get_video_filter_desc(quality="accurate"), frame)[0].to_ndarray()
    assert abs(int(rgb[3, 3, 0]) - wanted) <= 1


def test_num_frames_repeats_the_last_frame() -> None:
    desc = get_video_filter_desc(num_frames=5, pix_fmt="gray")
    assert levels(run(desc, *clip(3))) == [0, 1, 2, 2, 2]
    assert levels(run(desc, *clip(9))) == [0, 1, 2, 3, 4]


def test_num_frames_adds_frames_of_a_color() -> None:
    desc = get_video_filter_desc(num_frames=4, pad_mode="white", pix_fmt="gray")
    assert levels(run(desc, *clip(3))) == [0, 1, 2, 255]


def test_window_is_half_open() -> None:
    desc = get_video_filter_desc(timestamp=(0.2, 0.5), pix_fmt="gray")
    assert levels(run(desc, *clip(9))) == [2, 3, 4]


def test_frame_rate() -> None:
    assert levels(run(get_video_filter_desc(frame_rate=20, pix_fmt="gray"), *clip(3))) == [
        0,
        0,
        1,
        1,
        2,
        2,
    ]


def test_audio_filters() -> None:
    frame = av.AudioFrame.from_ndarray(np.full((2, 800), 0.5, np.float32), "fltp", "stereo")
    frame.sample_rate, frame.pts, frame.time_base = 8000, 0, Fraction(1, 8000)
    desc = get_audio_filter_desc(num_channels=1, sample_fmt="s16", num_frames=1000)
    samples = np.concatenate([out.to_ndarray() for out in run(desc, frame)], axis=1)
    np.testing.assert_array_equal(samples, [[16384] * 800 + [0] * 200])
    resampled = run(get_audio_filter_desc(sample_rate=16000), frame)
    assert sum(out.samples for out in resampled) == 1600


@dataclass
class Codec:
    width: int = 64
    height: int = 48
    pix_fmt: str | None = "yuv420p"
    time_base: Fraction = Fraction(1, 90000)
    frame_rate: Fraction | None = Fraction(25)
    sample_aspect_ratio: Fraction | None = None


@dataclass
class Sound:
    sample_rate: int = 44100
    sample_fmt: str | None = "fltp"
    channel_layout: str = "stereo"
    time_base: Fraction = Fraction(1, 44100)


@dataclass
class Packets:
    codec: Any
    orientation: int = 1


VIDEO = VideoPackets([], VideoCodec("h264", "h264"))
AUDIO = AudioPackets([], AudioCodec("flac", "flac", 8000, "mono", 1))


def test_filter_desc_follows_the_packets() -> None:
    assert get_filter_desc(VIDEO) == get_video_filter_desc()
    assert get_filter_desc(AUDIO) == get_audio_filter_desc()
    assert get_filter_desc(AUDIO, num_frames=3) == get_audio_filter_desc(num_frames=3)


def test_filter_desc_without_packets_follows_the_arguments() -> None:
    sizes: Any = {"scale_width": 8, "scale_height": 6}
    assert get_filter_desc(**sizes, pix_fmt="rgb24") == get_video_filter_desc(**sizes)
    colors: dict[str, Any] = {"pix_fmt": "nv12", "color_matrix": "bt709", "color_range": "tv"}
    assert get_filter_desc(**colors) == get_video_filter_desc(**colors)
    assert get_filter_desc(sample_rate=8000) == get_audio_filter_desc(sample_rate=8000)


def test_filter_desc_refuses_a_mixture() -> None:
    with pytest.raises(TypeError, match=r"audio_filter_desc.* unexpected .*'scale_width'"):
        get_filter_desc(scale_width=8, sample_rate=8000)
    with pytest.raises(TypeError, match=r"video_filter_desc.* unexpected .*'num_channels'"):
        get_filter_desc(VIDEO, num_channels=1)
    with pytest.raises(TypeError, match=r"audio_filter_desc.* unexpected .*'pix_fmt'"):
        get_filter_desc(AUDIO, pix_fmt="gray")
    with pytest.raises(TypeError, match="packets must be audio, video or image packets, not 'x'"):
        get_filter_desc("x")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unexpected keyword argument 'fps'"):
        get_filter_desc(fps=3)


def test_buffer_desc() -> None:
    common = "pix_fmt=yuv420p:time_base=1/90000"
    assert get_buffer_desc(Codec(), "a") == (
        f"buffer@a=video_size=64x48:{common}:pixel_aspect=1:frame_rate=25"
    )
    turned = Packets(Codec(sample_aspect_ratio=Fraction(4, 3), frame_rate=None), orientation=6)
    assert get_buffer_desc(turned) == f"buffer=video_size=48x64:{common}:pixel_aspect=3/4"
    assert "pix_fmt=rgb24:" in get_buffer_desc(Codec(), pix_fmt="rgb24")


@pytest.mark.parametrize("pix_fmt", ["rgb48", "gray16", "rgb32", "p010le", "cuda"])
def test_every_name_that_ffmpeg_has_is_taken(pix_fmt: str) -> None:
    assert f"format={pix_fmt}" in (get_video_filter_desc(pix_fmt=pix_fmt) or "")


@each("color", ["White", "#ff8000", "#ff800080", "0xff8000", "red@0.5", "red@0x80", "random"])
def test_every_colour_that_ffmpeg_has_is_taken(color: str) -> None:
    size: dict[str, Any] = {"scale_width": 8, "scale_height": 8}
    assert f":color={color}," in (get_video_filter_desc(**size, pad_color=color) or "")
    assert f":color={color}," in (get_video_filter_desc(num_frames=2, pad_mode=color) or "")


def test_formats_that_frames_enter_by_must_exist() -> None:
    with pytest.raises(ValueError, match=r"pix_fmt must be .*not 'rgb'\. Did you mean 'rgb24'"):
        get_buffer_desc(Codec(), pix_fmt="rgb")
    with pytest.raises(ValueError, match=r"sample_fmt must be .*not 'float'"):
        get_abuffer_desc(Sound(), sample_fmt="float")


def test_names_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments: dict[str, Any] = {"scale_width": 8, "scale_height": 8, "pad_color": "#123456"}
    desc = get_video_filter_desc(**arguments)
    monkeypatch.setattr(av, "VideoFormat", None)
    monkeypatch.setattr(av.filter, "Graph", None)
    assert get_video_filter_desc(**arguments) == desc


def test_buffer_desc_needs_a_known_size_and_a_plain_label() -> None:
    with pytest.raises(ValueError, match="known once a frame is decoded"):
        get_buffer_desc(Codec(width=0))
    with pytest.raises(ValueError, match="label must be made of letters"):
        get_buffer_desc(Codec(), "a=b")


def test_abuffer_desc() -> None:
    text = "time_base=1/44100:sample_rate=44100:sample_fmt={}:channel_layout=stereo"
    assert get_abuffer_desc(Sound(), "a") == f"abuffer@a={text.format('fltp')}"
    assert get_abuffer_desc(Packets(Sound()), sample_fmt="s16") == f"abuffer={text.format('s16')}"
    with pytest.raises(ValueError, match="say it as sample_fmt="):
        get_abuffer_desc(Sound(sample_fmt=None))


def gray_frame(width: int, height: int) -> av.VideoFrame:
    return av.VideoFrame.from_ndarray(np.full((height, width, 3), 128, np.uint8), format="rgb24")


@each("size", [(2000, 3), (3, 2000), (2000, 1), (1, 2000), (1, 1)])
@each("pix_fmt", ["rgb24", "yuv420p", "gray"])
def test_thin_images_are_padded_as_well(size: tuple[int, int], pix_fmt: str) -> None:
    """FFmpeg's own fitting rounds the thin side to 0, and rejects the image."""
    frame = gray_frame(*size)
    desc = get_video_filter_desc(scale_width=224, scale_height=224, pix_fmt=pix_fmt)
    assert desc is not None
    (result,) = run(desc, frame)
    assert (result.width, result.height) == (224, 224)
    assert result.to_ndarray().any()


@pytest.mark.parametrize(
    ("given", "wanted"), [("scale_width", (8, 1)), ("scale_height", (5333, 8))]
)
def test_one_side_of_a_thin_image(given: str, wanted: tuple[int, int]) -> None:
    desc = get_video_filter_desc(**{given: 8})  # type: ignore[arg-type]  # the name is the parameter
    assert desc is not None
    (result,) = run(desc, gray_frame(2000, 3))
    assert (result.width, result.height) == wanted


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"scale_width": 8, "quality": "accurate", "scale_algo": "area"},
        {"scale_width": 8, "scale_height": 6, "pad_color": "red", "filter_desc": "hflip"},
        {"frame_rate": "30000/1001", "timestamp": (Fraction(1, 3), None), "num_frames": 3},
        {"pix_fmt": "nv12", "color_matrix": "bt709", "color_range": "pc", "crop_width": 5},
    ],
)
def test_descriptions_carry_their_values(arguments: dict[str, Any]) -> None:
    desc = get_video_filter_desc(**arguments)
    assert desc is not None
    ops = picture_ops(desc)
    assert ops is not None
    assert ops.width == arguments.get("scale_width")
    for other in (pickle.loads(pickle.dumps(desc)), copy.copy(desc), copy.deepcopy(desc)):
        assert (other, picture_ops(other)) == (desc, ops)
    assert sound_ops(desc) is None
    for text in (f"{desc}", desc + "", desc[:], ",".join([desc]), desc.replace("x", "x")):
        assert picture_ops(text) is None
        assert text == desc


def test_values_without_effect_are_not_in_the_text() -> None:
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {"quality": "fast", "scale_algo": "area", "scale_mode": "crop", "pad_color": "red"}),
        ({"pix_fmt": None, "num_frames": 1}, {"pix_fmt": None, "num_frames": 1, "quality": "fast"}),
        ({"scale_width": 8}, {"scale_width": 8, "quality": "accurate", "pad_mode": "red"}),
        ({"timestamp": (Fraction(1, 3), 1)}, {"timestamp": ("0.333333", 1.0)}),
        ({"frame_rate": 29.97}, {"frame_rate": (2997, 100), "filter_desc": " "}),
    ]
    for one, other in pairs:
        assert get_video_filter_desc(**one) == get_video_filter_desc(**other)
    sound = get_audio_filter_desc(sample_rate=8000)
    assert sound is not None
    assert sound_ops(sound) == sound_ops(copy.copy(sound))
    assert picture_ops(sound) is None


def test_the_fast_quality() -> None:
    desc = get_video_filter_desc(scale_width=8, scale_height=6, scale_mode=None, quality="fast")
    assert desc == "scale=8:6:flags=bicublin,format=yuv420p,format=rgb24,format=rgb24"
    padded = get_video_filter_desc(scale_width=8, scale_height=6, quality="fast")
    assert padded is not None
    assert "format=rgb24,pad=8:6:" in padded
    alpha = get_filter_desc(scale_width=8, pix_fmt="rgba", quality="fast")
    assert alpha is not None
    assert "yuv420p" not in alpha
    # Without scaling, FFmpeg's own conversion is the fastest.
    assert get_video_filter_desc(quality="fast") == get_video_filter_desc(quality="auto")
    with pytest.raises(ValueError, match="quality must be "):
        get_video_filter_desc(quality="best")
