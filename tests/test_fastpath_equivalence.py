"""Each fast path equals the general path, bit for bit or within its bound."""

from __future__ import annotations

import io
import re
import threading
import weakref
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import Any, get_args

import av
import numpy as np
import pytest
from av.video.reformatter import Interpolation, VideoReformatter
from effort import each, examples
from hypothesis import given, settings
from hypothesis import strategies as st

import spdl_media as sm

# Private: these tests are about whether an image uses a filter graph, which no public function shows.
from spdl_media import fast_images, get_video_filter_desc, image_decoder
from spdl_media.codec import VideoCodec
from spdl_media.config import DEFAULT_DECODE_CONFIG
from spdl_media.errors import FilterError
from spdl_media.fast_images import fast_chain, without_graph
from spdl_media.filter_desc import FilterDesc
from spdl_media.filter_graph import FilterGraph
from spdl_media.filters import PictureFilter
from spdl_media.formats import picture_planes
from spdl_media.image_frames import VideoFrames, av_frames
from spdl_media.operations import PictureOps, ScaleAlgo, picture_ops
from spdl_media.testing import make_image, make_video

SOURCES = (
    "yuvj420p yuvj422p yuvj440p yuvj411p yuvj444p yuv444p yuva444p yuv444p10le gray gray10le gray16be "
    "ya8 rgb24 bgr24 rgba argb gbrp gbrap gbrp10le rgb48le rgb48be rgba64be pal8"
).split()
TARGETS = ("rgb24", "bgr24", "rgba", "bgra", "argb", "abgr")
SIDES = st.integers(2, 70)


def noise(pix_fmt: str, width: int, height: int, seed: int = 0) -> av.VideoFrame:
    """Make an image of random values that are valid in the format."""
    rng = np.random.default_rng(seed)
    frame = av.VideoFrame(width, height, pix_fmt)
    for plane in frame.planes:
        values = rng.integers(0, 256, plane.buffer_size, dtype=np.uint8)
        if "10le" in pix_fmt:
            values.view("<u2")[:] &= 1023
        plane.update(values.tobytes())
    return frame


def through_graph(desc: str, frame: av.VideoFrame) -> av.VideoFrame:
    graph = FilterGraph(desc)
    graph.add_frames(VideoFrames([frame]))
    graph.flush()
    (result,) = av_frames(graph.get_frames())  # type: ignore[arg-type]  # of a graph of video
    return result


def cut(desc: str, box: Any, *, mirror: bool = False) -> FilterDesc:
    """Return the same filters after a crop and an optional mirror."""
    ops = picture_ops(desc)
    assert ops is not None
    return FilterDesc(replace(ops, box=box, mirror=mirror))


def facts(frame: av.VideoFrame) -> tuple[Any, ...]:
    return (
        (frame.width, frame.height, frame.format.name),
        (frame.pts, frame.time_base, frame.duration, frame.is_corrupt, frame.metadata),
        (frame.colorspace, frame.color_range, frame.color_primaries, frame.color_trc),
    )


def scaled_alone(desc: str | None, frame: av.VideoFrame) -> av.VideoFrame | None:
    """Convert a frame, which is given away, by the scaler without a graph; ``None`` if it needs a graph."""
    ops = picture_ops(desc)
    assert ops is not None, desc
    assert fast_chain(ops.uncut) is not None, desc
    return without_graph(frame, ops)


def accepts(desc: str | None, frame: av.VideoFrame) -> bool:
    return scaled_alone(desc, frame) is not None


def assert_same(desc: str | None, frame: av.VideoFrame) -> None:
    assert is_same(desc, frame)


def is_same(desc: str | None, frame: av.VideoFrame) -> bool:
    """Return whether the scaler alone converts the frame, and check that the result equals the graph's."""
    # The graph runs first, because the scaler may temporarily write to the frame's fields.
    wanted, got = through_graph(f"{desc}", frame), scaled_alone(desc, frame)
    if got is None:
        return False
    assert facts(got) == facts(wanted)
    for ours, theirs in zip(picture_planes(got), picture_planes(wanted), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    return True


@given(
    source=st.sampled_from(SOURCES),
    target=st.sampled_from(TARGETS),
    size=st.tuples(SIDES, SIDES),
    to=st.tuples(SIDES, SIDES),
    algo=st.sampled_from(get_args(ScaleAlgo)),
    mode=st.sampled_from(["pad", "crop", None]),
    colors=st.tuples(st.sampled_from([1, 2, 5, 6, 7, 9]), st.sampled_from([0, 1, 2])),
    seed=st.integers(0, 99),
)
def test_scaling_without_a_graph(
    source: str,
    target: str,
    size: tuple[int, int],
    to: tuple[int, int],
    algo: Any,
    mode: Any,
    colors: tuple[int, int],
    seed: int,
) -> None:
    frame = noise(source, *size, seed)
    frame.pts, frame.time_base, frame.duration = 7, Fraction(1, 10), 1
    if not (frame.format.is_rgb or source == "pal8"):
        frame.colorspace, frame.color_range = colors
    desc = get_video_filter_desc(
        scale_width=to[0], scale_height=to[1], scale_algo=algo, scale_mode=mode, pix_fmt=target
    )
    assert_same(desc, frame)


YUV = "yuv420p yuv422p yuv444p yuvj420p yuvj422p yuvj444p nv12".split()


@given(
    source=st.sampled_from(["yuvj420p", "yuvj422p", "yuvj440p", "yuvj444p", "rgb24", "gbrp"]),
    target=st.sampled_from(YUV),
    size=st.tuples(SIDES, SIDES),
    to=st.tuples(st.none() | SIDES, st.none() | SIDES),
    algo=st.sampled_from(["bicubic", "bilinear", "area", "lanczos"]),
    mode=st.sampled_from(["pad", "crop", None]),
    quality=st.sampled_from(["accurate", "auto", "fast"]),
    matrix=st.sampled_from([1, 2, 5, 6, 9]),
    crop=st.sampled_from([None, 1, 2, 3]),
    seed=st.integers(0, 99),
)
@settings(max_examples=examples(100))
def test_yuv_without_a_graph(
    source: str,
    target: str,
    size: tuple[int, int],
    to: tuple[int | None, int | None],
    algo: Any,
    mode: Any,
    quality: Any,
    matrix: int,
    crop: int | None,
    seed: int,
) -> None:
    """Stills as YUV with the colours of JPEG, as ``load_image`` converts them."""
    if not any(to):  # odd sizes are made whole first: tests/test_odd_sizes.py
        size = 2 * size[0], 2 * size[1]
    frame = noise(source, *size, seed)
    frame.time_base = Fraction(1, 10)
    if not frame.format.is_rgb:
        frame.colorspace, frame.color_range = matrix, 2
    ops = PictureOps(
        *to,
        target,
        mode,
        algo,
        quality,
        crop_width=crop if any(to) else None,
        color_matrix="bt601",
        color_range="pc",
    )
    desc = FilterDesc(ops)
    try:
        accepted = is_same(desc, frame)
    except FilterError:
        accepted = False
    if not accepted:  # one sample of chroma is larger than the canvas, or nothing is left
        width, height = size
        kept = ((to[1] or 99) * width / height, (to[0] or 99) * height / width)
        assert min(side or 99 for side in (*to, *size, *kept)) <= 4


@pytest.mark.parametrize("quality", ["auto", "fast"])
@pytest.mark.parametrize("target", TARGETS)
def test_the_default_conversion_without_a_graph(target: str, quality: Any) -> None:
    desc = get_video_filter_desc(pix_fmt=target, quality=quality)
    assert desc == f"format={target}"
    for source in SOURCES:
        for size in ((64, 48), (63, 47), (1, 1)):
            frame = noise(source, *size)
            frame.time_base = Fraction(1, 25)
            assert_same(desc, frame)


QUICK = ["yuvj420p", "yuvj422p", "yuvj440p", "yuvj444p", "rgb24", "gbrp", "rgba"]


@given(
    source=st.sampled_from(QUICK),
    size=st.tuples(SIDES, SIDES),
    to=st.tuples(SIDES, SIDES),
    algo=st.sampled_from(get_args(ScaleAlgo)),
    mode=st.sampled_from(["pad", "crop", None]),
    target=st.sampled_from(["rgb24", "bgr24"]),
    matrix=st.sampled_from([1, 2, 5, 6, 7, 9]),
    said=st.sampled_from([0, 1, 2]),
    seed=st.integers(0, 99),
)
def test_the_fast_quality_without_a_graph(
    source: str,
    size: tuple[int, int],
    to: tuple[int, int],
    algo: Any,
    mode: Any,
    target: str,
    matrix: int,
    said: int,
    seed: int,
) -> None:
    frame = noise(source, *size, seed)
    frame.time_base = Fraction(1, 10)
    if frame.format.is_rgb:
        frame.color_range = said  # PNG says 2, BMP 0
    else:
        frame.colorspace, frame.color_range = matrix, 2
    desc = get_video_filter_desc(
        scale_width=to[0],
        scale_height=to[1],
        scale_algo=algo,
        scale_mode=mode,
        pix_fmt=target,
        quality="fast",
    )
    assert_same(desc, frame)


def test_the_fast_quality_takes_a_graph_where_ranges_are_agreed_on() -> None:
    desc = get_video_filter_desc(scale_width=8, scale_height=8, quality="fast")
    for source in ("gray", "ya8", "yuvj420p"):
        frame = noise(source, 16, 16)
        frame.color_range = 1
        assert not accepts(desc, frame)


@given(
    source=st.sampled_from([name for name in SOURCES if not re.search(r"le|be|pal8|411|ya", name)]),
    edges=st.tuples(*[st.integers(0, 40)] * 4).map(
        lambda e: (sorted([e[0], e[1] + 1]), sorted([e[2], e[3] + 1]))
    ),
    flip=st.booleans(),
    quality=st.sampled_from(["accurate", "fast"]),
    seed=st.integers(0, 99),
)
def test_cuts_without_a_graph(
    source: str, edges: tuple[list[int], list[int]], flip: bool, quality: Any, seed: int
) -> None:
    (left, right), (top, bottom) = edges
    box = (left, top, max(right - left, 1), max(bottom - top, 1))
    frame = noise(source, 41, 41, seed)
    frame.time_base = Fraction(1, 10)
    if source.startswith("yuvj"):
        frame.color_range = 2
    scale = get_video_filter_desc(scale_width=20, scale_height=17, quality=quality) or ""
    desc = cut(scale, box, mirror=flip)
    if quality == "fast" and source in ("gray", "yuv444p", "yuva444p"):
        assert not accepts(desc, frame)
    elif source != "yuva444p":
        assert_same(desc, frame)


def test_a_cut_that_does_not_fit_is_refused_either_way() -> None:
    frame = noise("yuvj420p", 16, 16)
    frame.time_base = Fraction(1, 10)
    scale = get_video_filter_desc(scale_width=8, scale_height=8, scale_mode=None) or ""
    desc = cut(scale, (1, 1, 16, 15))
    assert not accepts(desc, frame)
    with pytest.raises(FilterError):
        through_graph(desc, frame)


@each("source", SOURCES)
@each("target", TARGETS)
def test_conversion_without_a_graph(source: str, target: str) -> None:
    desc = get_video_filter_desc(pix_fmt=target, quality="accurate")
    for size in ((64, 48), (63, 47), (1, 1)):
        frame = noise(source, *size)
        # Of less chroma, odd sizes are made whole first: tests/test_odd_sizes.py.
        if size[0] % 2 and frame.format.chroma_width(64) * frame.format.chroma_height(64) < 64 * 64:
            continue
        frame.time_base = Fraction(1, 25)
        assert_same(desc, frame)


@each(
    "options",
    [
        {"frame_rate": 5},
        {"timestamp": (0, 1)},
        {"num_frames": 1},
        {"filter_desc": "hflip"},
        {"scale_width": 8, "scale_height": 8, "pad_color": "red"},
        {"crop_width": 8},
        {"pix_fmt": "rgb48"},
        {"pix_fmt": "gray"},
        {"pix_fmt": "yuv420p"},
        {"pix_fmt": None, "scale_width": 8},
    ],
)
def test_what_takes_a_graph(options: dict[str, Any]) -> None:
    ops = picture_ops(get_video_filter_desc(**options))
    assert ops is not None
    assert fast_chain(ops) is None


def test_an_edited_text_is_a_graph() -> None:
    desc = get_video_filter_desc(scale_width=8, scale_height=8)
    assert picture_ops(desc) is not None
    assert picture_ops(f"{desc}") is None


@pytest.mark.parametrize("pix_fmt", ["yuv420p", "yuv422p", "nv12", "yuva420p", "yuv420p10le"])
def test_video_formats_take_a_graph(pix_fmt: str) -> None:
    # The chroma location is a field of the frame, which only the scale filter reads.
    for quality in ("accurate", "auto", "fast"):
        desc = get_video_filter_desc(quality=quality)  # type: ignore[arg-type]
        assert not accepts(desc, av.VideoFrame(16, 16, pix_fmt))


@each("source", ["yuv420p", "yuvj420p", "yuv422p", "yuvj422p"])
@each("target", ["rgb24", "bgr24"])
@each("size", [(64, 48), (33, 18), (7, 2), (34, 17)])
def test_video_is_converted_by_the_scaler_alone(source: str, target: str, size: Any) -> None:
    ops = picture_ops(get_video_filter_desc(pix_fmt=target, quality="auto"))
    filter = PictureFilter(VideoCodec("h264", "h264"), ops, DEFAULT_DECODE_CONFIG)
    for matrix, said in ((1, 1), (2, 0), (5, 2), (6, 1), (9, 1)):
        frame = noise(source, *size, seed=matrix)
        frame.colorspace, frame.color_range, frame.time_base = matrix, said, Fraction(1, 25)
        wanted = through_graph(f"format={target}", frame)
        (got,) = filter.push(frame, 1)
        assert facts(got) == facts(wanted)
        for ours, theirs in zip(picture_planes(got), picture_planes(wanted), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    assert (filter._graph._graph is None) == (size[1] % 2 == 0)  # type: ignore[union-attr]  # it has one


def test_interlaced_video_takes_a_graph(rng: np.random.Generator) -> None:
    """The scaler alone would convert the fields one by one. Sizes and kinds of the frames change."""
    frames = [
        av_frames(sm.decode_packets(sm.demux_video(data), None))[0]
        for size, flags in (((64, 48), "+ildct+ilme"), ((32, 32), "0"), ((32, 32), "+ildct+ilme"))
        for pixels in [rng.integers(0, 256, (1, *size, 3), np.uint8)]
        for data in [make_video(pixels, codec="mpeg2video", options={"flags": flags})]
    ]
    assert [frame.interlaced_frame for frame in frames] == [True, False, True]
    wanted = [through_graph("format=rgb24", frame).to_ndarray() for frame in frames]
    filter = PictureFilter(
        VideoCodec("mpeg2video", ""), PictureOps(quality="auto"), DEFAULT_DECODE_CONFIG
    )
    for frame, pixels in zip(frames, wanted, strict=True):
        (got,) = filter.push(frame, 1)
        np.testing.assert_array_equal(got.to_ndarray(), pixels)


@each("pix_fmt", ["rgb24", "gray", "rgba", "monob"])
@each("size", [(33, 21), (5, 1)])
def test_the_rows_of_an_interlaced_png_are_not_scaled_as_fields(
    size: tuple[int, int], pix_fmt: str, rng: np.random.Generator
) -> None:
    pixels = rng.integers(0, 256, (*size[::-1], 3), np.uint8)
    data = [
        make_image(pixels, codec="png", pix_fmt=pix_fmt, options=options)
        for options in ({}, {"flags": "+ildct"})
    ]
    for options in (
        {},
        {"width": 20, "height": 14},
        {"width": 20, "height": 14, "quality": "fast"},
    ):
        plain, interlaced = (sm.load_image(each, **options).array for each in data)
        assert np.array_equal(interlaced, plain)


@each("pix_fmt", ["monob", "monow", "rgb555be", "rgb555le", "bgr565be"])
@each("options", [{}, {"width": 16, "height": 12}, {"width": 16, "height": 12, "quality": "fast"}])
def test_formats_below_a_byte_are_scaled_from_bytes(
    pix_fmt: str, options: dict[str, Any], rng: np.random.Generator
) -> None:
    """FFmpeg's scaler alone would change their brightness by up to 28 levels, or swap their bytes."""
    pixels = rng.choice(np.array([0, 255], np.uint8), (48, 64, 1), p=[0.3, 0.7]).repeat(3, 2)
    few, whole = (
        sm.load_video(make_video([pixels], codec="rawvideo", pix_fmt=name, format="nut"), **options)
        for name in (pix_fmt, "gray" if pix_fmt.startswith("mono") else "rgb24")
    )
    assert np.array_equal(few.array, whole.array)


def test_what_the_graph_refuses_is_not_accepted() -> None:
    too_big = get_video_filter_desc(scale_width=8, scale_height=8, crop_width=9)
    assert not accepts(too_big, av.VideoFrame(16, 16, "rgb24"))


def test_rgb_of_the_right_size_is_passed_on() -> None:
    frame = noise("rgb24", 9, 7)
    assert scaled_alone(get_video_filter_desc(quality="accurate"), frame) is frame


def test_stills_of_real_files(media_dir: Any) -> None:
    desc = get_video_filter_desc(scale_width=65, scale_height=33)
    for path in sorted((media_dir / "photos").iterdir())[:8]:
        with av.open(str(path)) as container:
            frame = next(container.decode(video=0))
        assert_same(desc, frame)


def test_scalers_are_kept_for_some_sizes_only() -> None:
    desc = get_video_filter_desc(scale_width=16, scale_height=16, scale_mode=None) or ""
    for width in [*range(20, 100, 2), 20, 98, 20]:
        frame = noise("yuvj420p", width, 24, width)
        frame.time_base = Fraction(1, 25)
        assert_same(desc, frame)


@pytest.fixture
def scalers(monkeypatch: pytest.MonkeyPatch) -> weakref.WeakSet[Any]:
    """Return a set of the living scalers, of those that are made from now on."""
    alive: weakref.WeakSet[Any] = weakref.WeakSet()

    class Counted:
        def __init__(self) -> None:
            alive.add(self)
            self.reformat = VideoReformatter().reformat

    monkeypatch.setattr(fast_images, "VideoReformatter", Counted)
    idle = lru_cache(fast_images._MAX_SCALERS)(fast_images._idle_scalers.__wrapped__)
    monkeypatch.setattr(fast_images, "_idle_scalers", idle)
    return alive


def test_a_bounded_number_of_scalers_is_kept_over_all_targets(
    scalers: weakref.WeakSet[Any],
) -> None:
    """A training with several scales needs scalers for each."""
    counts = []
    for side in range(20, 60):
        desc = get_video_filter_desc(scale_width=side, scale_height=side, scale_mode=None) or ""
        for width in (24, 30, 36):
            for text in (desc, cut(desc, (0, 0, 20 + side % 3, 20))):
                assert accepts(text, noise("yuvj420p", width, 24))
        counts.append(len(scalers) // 2)  # one scales to planar RGB, one interleaves
    assert counts[0] == 4  # the cuts are of one size
    assert max(counts) == counts[-1] == fast_images._MAX_SCALERS


def test_threads_take_scalers_that_others_have_left(scalers: weakref.WeakSet[Any]) -> None:
    """A batch decoded in several threads starts new ones, which would build all tables again."""

    def in_thread() -> None:
        accepts(get_video_filter_desc(scale_width=16), noise("yuvj420p", 40, 24))

    for _ in range(3):
        thread = threading.Thread(target=in_thread)
        thread.start()
        thread.join()
    assert len(scalers) == 2


# From here on, whole files: made ones and, if available, photographs.

FILES = (
    "noise 4:2:0",
    "noise 4:2:2",
    "noise 4:4:4",
    "odd",
    "tiny",
    "photos",
    "photos_hd",
    "images_odd",
)


@pytest.fixture(scope="module", params=FILES)
def files(request: pytest.FixtureRequest) -> list[bytes]:
    """JPEGs of one kind that decode."""
    kind = request.param
    if kind in ("photos", "photos_hd", "images_odd"):
        paths = sorted((request.getfixturevalue("media_dir") / kind).glob("*.jp*g"))
        return [path.read_bytes() for path in paths[:6] if _decodes(path)]
    width, height = {"odd": (63, 47), "tiny": (1, 3)}.get(kind, (96, 64))
    pix_fmt = {"noise 4:2:2": "yuvj422p", "noise 4:4:4": "yuvj444p"}.get(kind, "yuvj420p")
    rng = np.random.default_rng(len(kind))
    pictures = [rng.integers(0, 256, (height, width, 3), np.uint8) for _ in range(4)]
    return [
        make_image(picture, codec="mjpeg", pix_fmt=pix_fmt, options={"qmin": "3", "qmax": "3"})
        for picture in pictures
    ]


def _decodes(path: Any) -> bool:
    try:
        sm.decode_packets(sm.demux_image(path), None)
    except sm.MediaError:
        return False
    return True


def planes(data: bytes, **options: Any) -> list[Any]:
    frames = sm.decode_packets(sm.demux_image(data), None, sm.decode_config(**options))
    return [plane.copy() for plane in frames.planes]


def by_container(data: bytes, options: dict[str, str] | None = None) -> av.VideoFrame:
    with av.open(io.BytesIO(data), format="jpeg_pipe") as container:
        container.streams[0].codec_context.options = options or {}
        frame: av.VideoFrame = next(container.decode(video=0))
    return frame


def assert_equal(got: list[Any], wanted: list[Any], within: int = 0) -> None:
    for plane, right in zip(got, wanted, strict=True):
        assert plane.shape == right.shape
        assert np.abs(plane.astype(int) - right).max() <= within


def test_the_decoder_without_a_container(files: list[bytes]) -> None:
    idct = sm.codec._STILL_JPEG_OPTIONS
    for data in files:
        frame = by_container(data, idct)
        assert_equal(planes(data), list(sm.ImageFrames((frame,)).planes))


def test_the_quick_inverse_dct_is_one_level_off_at_most(files: list[bytes]) -> None:
    for data in files:
        assert_equal(planes(data), planes(data, decoder_options={"idct": "auto"}), within=1)


def test_a_decoder_that_stays_open(files: list[bytes]) -> None:
    image_decoder._idle_decoders.clear()
    fresh = []
    for data in files:
        fresh.append(planes(data))
        image_decoder._idle_decoders.clear()
    for index in [*range(len(files)), *reversed(range(len(files)))]:
        assert_equal(planes(files[index]), fresh[index])


def test_scaling_in_two_steps(files: list[bytes]) -> None:
    """Compared with swscale's most exact single step: one level, in a few values."""
    flags = Interpolation.BICUBIC | Interpolation.ACCURATE_RND
    flags |= Interpolation.FULL_CHR_H_INT | Interpolation.FULL_CHR_H_INP
    for data in files:
        for width, height in ((224, 224), (64, 48), (33, 65)):
            frame = sm.image_frames.av_frames(sm.decode_packets(sm.demux_image(data), None))[0]
            wanted = VideoReformatter().reformat(
                frame, width, height, "rgb24", interpolation=int(flags), threads=1
            )
            got = sm.load_image(data, width=width, height=height, scale_mode=None)
            if sm.demux_image(data).orientation != 1:
                continue
            difference = np.abs(np.asarray(got).astype(int) - wanted.to_ndarray())
            assert difference.max() <= 1
            assert difference.mean() <= 0.01


def test_the_whole_way_is_that_through_a_graph(files: list[bytes]) -> None:
    for data in files:
        for options in ({}, {"quality": "fast"}, {"scale_mode": "crop"}):
            desc = get_video_filter_desc(scale_width=64, scale_height=48, **options)
            # "copy" does nothing, but needs a graph.
            plain, graph = (
                np.asarray(sm.convert_frames(sm.decode_packets(sm.demux_image(data), text)))
                for text in (desc, f"copy,{desc}")
            )
            np.testing.assert_array_equal(plain, graph)


def test_decoding_at_less_than_the_size(
    files: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within one level for photographs; noise consists of the frequencies that are dropped."""
    pytest.importorskip("simplejpeg")
    used = []
    run = image_decoder._decode_small
    monkeypatch.setattr(
        image_decoder, "_decode_small", lambda *args: used.append(args) or run(*args)
    )
    large = [data for data in files if min(_size(data)) >= 600]
    for data in files:
        small, whole = (
            np.asarray(sm.load_image(data, width=224, height=224, decode_config=config))
            for config in (sm.decode_config(downscale="dct"), None)
        )
        difference = np.abs(small.astype(int) - whole).mean()
        assert difference <= (1 if data in large else 0)
    assert len(used) == len(large)


def _size(data: bytes) -> tuple[int, int]:
    frames = sm.decode_packets(sm.demux_image(data), None)
    return frames.width, frames.height


def test_memory_from_pools(files: list[bytes]) -> None:
    options: dict[str, Any] = {"width": 40, "height": 30}
    wanted = np.asarray(sm.load_image_batch(files, **options))
    pool = sm.StoragePool(wanted.nbytes, count=2, pin_memory=False)
    kept = [sm.load_image_batch(files, **options, storage=pool) for _ in range(2)]
    for batch in kept:
        np.testing.assert_array_equal(np.asarray(batch), wanted)
    del kept, batch
    for _ in range(4):  # in blocks that were used before
        other = sm.load_image_batch(files[::-1], **options, storage=pool)
        np.testing.assert_array_equal(np.asarray(other), wanted[::-1])
    assert pool.count == 2
