"""Graphs that are built from text and run over frames."""

from __future__ import annotations

import io
import threading
import wave
from fractions import Fraction
from functools import lru_cache
from typing import Any

import av
import numpy as np
import pytest
from effort import each

import spdl_media as sm
from spdl_media import AudioFrames, FilterError, FilterGraph, ImageFrames, VideoFrames, filters
from spdl_media.filters import FrameFilter
from spdl_media.frames import placed_chunk
from spdl_media.graph import build, push_frame
from spdl_media.image_frames import av_frames
from spdl_media.testing import index_planes, make_video

TENTH = Fraction(1, 10)


def frame(
    level: int = 0, *, pts: int = 0, size: tuple[int, int] = (16, 8), fmt: str = "gray"
) -> Any:
    width, height = size
    flat = av.VideoFrame.from_ndarray(np.full((height, width), level, np.uint8), "gray")
    flat = flat if fmt == "gray" else flat.reformat(format=fmt, threads=1)
    flat.pts, flat.time_base, flat.duration = pts, TENTH, 1
    return flat


def video(*levels: int, **shape: Any) -> VideoFrames:
    return VideoFrames([frame(level, pts=pts, **shape) for pts, level in enumerate(levels)])


def sound(count: int = 1000, *, rate: int = 8000, layout: str = "mono", pts: int = 0) -> Any:
    channels = av.AudioLayout(layout).nb_channels
    ramp = np.tile(np.arange(pts, pts + count, dtype=np.int16), (channels, 1))
    chunk = av.AudioFrame.from_ndarray(ramp, "s16p", layout)
    chunk.sample_rate, chunk.pts, chunk.time_base = rate, pts, Fraction(1, rate)
    return chunk


def audio(*chunks: Any) -> AudioFrames:
    return AudioFrames([placed_chunk(chunk, Fraction(0)) for chunk in chunks])


def levels(frames: Any) -> list[int]:
    return [int(frame.to_ndarray().flat[0]) for frame in av_frames(frames)]


def samples(frames: AudioFrames) -> np.ndarray[Any, Any]:
    return np.concatenate([np.stack(chunk.planes) for chunk in frames.chunks], axis=1)


# --- FrameFilter ---


def test_frames_keep_their_times_and_facts() -> None:
    source = frame(7, pts=3)
    source.colorspace, source.color_range = 1, 2
    (result,) = FrameFilter("null", kind="video").push(source)
    assert (result.pts, Fraction(result.time_base.numerator, result.time_base.denominator)) == (
        3,
        TENTH,
    )
    assert (result.colorspace, result.color_range, result.format.name) == (1, 2, "gray")


def test_frames_that_filters_hold_come_with_the_flush() -> None:
    filter = FrameFilter("reverse", kind="video")
    assert [filter.push(frame(level, pts=level)) for level in range(3)] == [[], [], []]
    assert [int(out.to_ndarray()[0, 0]) for out in filter.flush()] == [2, 1, 0]
    assert filter.push(frame(9)) == []
    assert filter.flush() == []


def test_another_size_drains_the_graph_and_makes_a_new_one() -> None:
    filter = FrameFilter("reverse", kind="video")
    filter.push(frame(1, size=(16, 8)))
    filter.push(frame(2, pts=1, size=(16, 8)))
    first = filter.push(frame(3, pts=2, size=(32, 8)))
    assert [(out.width, int(out.to_ndarray()[0, 0])) for out in first] == [(16, 2), (16, 1)]
    assert [out.width for out in filter.flush()] == [32]


def test_another_matrix_is_followed() -> None:
    filter = FrameFilter("scale=flags=accurate_rnd,format=gbrp", kind="video")
    reds = []
    for colorspace in (1, 6):
        source = av.VideoFrame(16, 16, "yuv444p")
        for plane, value in zip(source.planes, (100, 128, 200), strict=True):
            plane.update(bytes([value]) * plane.buffer_size)
        source.colorspace, source.color_range = colorspace, 2
        reds += [int(np.asarray(out.to_ndarray())[0, 0, 0]) for out in filter.push(source)]
    reds += [int(np.asarray(out.to_ndarray())[0, 0, 0]) for out in filter.flush()]
    assert reds == [round(100 + 72 * 1.5748), round(100 + 72 * 1.402)]


def test_a_graph_that_has_ended_says_so() -> None:
    filter = FrameFilter("trim=end_frame=1", kind="video")
    got = [len(filter.push(frame(pts=pts))) for pts in range(3)]
    assert sum(got) == 1
    assert filter.finished


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The descriptions of the graphs that are built from now on."""
    found: list[Any] = []
    idle = lru_cache(16)(filters._idle_graphs.__wrapped__)
    monkeypatch.setattr(filters, "_idle_graphs", idle)
    monkeypatch.setattr(
        filters, "build", lambda wiring, args: found.append(wiring.desc) or build(wiring, args)
    )
    return found


def test_a_graph_serves_videos_of_one_kind_unless_the_caller_keeps_its_frames(
    built: list[Any],
) -> None:
    """Frames come from the graph's memory, and a kept graph would keep as much as its largest video."""
    desc = sm.get_video_filter_desc(scale_width=24, scale_height=16)
    one, other = (make_video(index_planes(count, 64, 48), codec="libx264") for count in (9, 5))
    packets = sm.demux_video(other)
    expected = np.asarray(sm.convert_frames(sm.decode_packets(packets, filter_desc=desc)))
    assert built == [desc]
    for video, count in ((one, 9), (other, 5), (one, 9)):
        found = np.asarray(sm.load_video(video, width=24, height=16))
        assert len(found) == count
        np.testing.assert_array_equal(found[:5], expected)
    sm.load_video(one, width=600, height=600)  # larger than what is kept
    sm.load_video(one, width=600, height=600)
    assert len(built) == 4


def test_a_graph_in_which_a_frame_was_left_is_not_used_again(
    built: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make_video(index_planes(5, 64, 48), codec="libx264")
    expected = np.asarray(sm.load_video(data, width=24))
    pushed = []

    def push_interrupted(source: Any, frame: Any) -> bool:
        pushed.append(push_frame(source, frame))
        if len(pushed) == 3:
            raise KeyboardInterrupt
        return pushed[-1]

    with monkeypatch.context() as patch:
        patch.setattr(filters, "push_frame", push_interrupted)
        with pytest.raises(KeyboardInterrupt):
            sm.load_video(data, width=24)
    np.testing.assert_array_equal(sm.load_video(data, width=24), expected)
    assert len(built) == 2


def test_audio_runs_through() -> None:
    filter = FrameFilter("asetnsamples=300", kind="audio")
    sizes = [out.samples for out in filter.push(sound(1000))]
    assert [*sizes, *(out.samples for out in filter.flush())] == [300, 300, 300, 300]


@each(
    "desc, kind, match",
    [
        ("scael=8:8", "video", "this FFmpeg has no filter 'scael'. Did you mean 'scale'"),
        (
            "scale=nosuch=3",
            "video",
            "scale refuses 'nosuch=3': Option not found .No such option: nosuch",
        ),
        ("format=nosuch", "video", "format refuses 'nosuch': .*Invalid pixel format 'nosuch'"),
        ("split", "video", "has 1 open inputs and 2 open outputs; decoding needs one input"),
        ("[a][b]hstack", "video", "has 2 open inputs"),
        ("nullsink", "video", "has 1 open inputs and 0 open outputs"),
        ("volume=2", "video", "takes audio, but the packets are video"),
        ("hflip", "audio", "takes video, but the packets are audio"),
        ("showwaves", "audio", "gives video, but the packets are audio"),
        ("null[a][b]", "video", "has 2 output labels, but the filter has 1 outputs"),
        ("buffer=video_size=1x1:pix_fmt=gray:time_base=1/1,null", "video", "declares buffer"),
        ("null,", "video", "a filter is missing"),
    ],
)
def test_bad_descriptions(desc: str, kind: Any, match: str) -> None:
    with pytest.raises(FilterError, match=match) as caught:
        FrameFilter(desc, kind=kind)
    assert caught.value.filter_desc == desc


def test_frames_that_do_not_fit() -> None:
    with pytest.raises(FilterError, match="'crop=99:99': it cannot be set up for video_size=16x8"):
        FrameFilter("crop=99:99", kind="video").push(frame())


# --- FilterGraph ---


def test_open_ends_need_no_key() -> None:
    graph = FilterGraph("hflip")
    assert graph.get_frames() is None
    graph.add_frames(video(1, 2))
    graph.add_frames(video(3)[0])
    frames = graph.get_frames()
    assert isinstance(frames, VideoFrames)
    assert levels(frames) == [1, 2, 3]
    assert graph.get_frames() is None


def test_several_inputs_join_when_all_have_frames() -> None:
    graph = FilterGraph("[left][right]hstack")
    assert (graph.inputs, graph.outputs) == (("left", "right"), ("",))
    graph.add_frames(video(10, 20), key="left")
    assert graph.get_frames() is None
    graph.add_frames(video(30, 40), key="right")
    graph.flush()
    frames = graph.get_frames()
    assert isinstance(frames, VideoFrames)
    rows = [out.to_ndarray()[0, [0, 31]].tolist() for out in av_frames(frames)]
    assert rows == [[10, 30], [20, 40]]


def test_images_without_a_time_follow_each_other_from_second_0() -> None:
    still = ImageFrames([frame(7)])
    av_frames(still)[0].pts = None
    graph = FilterGraph("[left][right]hstack")
    for _ in range(2):
        graph.add_frames(still, key="left")
        graph.add_frames(still, key="right")
    assert (both := graph.get_frames()) is not None
    assert (both.timestamps, levels(both)) == ((0.0, 0.1), [7, 7])
    assert still.pts is None

    over = FilterGraph("[main][logo]overlay=x=8")
    over.add_frames(video(1, 2, 3), key="main")
    over.add_frames(still, key="logo")
    over.flush()
    assert (result := over.get_frames()) is not None
    assert result.timestamps == (0.0, 0.1, 0.2)
    # overlay makes YUV of limited range: 16 + 7 * 219 / 255.
    assert [int(image.planes[0][0, 12]) for image in result] == [22, 22, 22]


def test_several_outputs() -> None:
    graph = FilterGraph("split[a][b]")
    graph.add_frames(video(5))
    for key in ("a", "b"):
        frames = graph.get_frames(key=key)
        assert isinstance(frames, VideoFrames)
        assert levels(frames) == [5]


def test_unlabelled_outputs_feed_the_next_filter() -> None:
    graph = FilterGraph("split,hstack")
    graph.add_frames(video(5))
    graph.flush()
    frames = graph.get_frames()
    assert isinstance(frames, VideoFrames)
    assert frames.width == 32


def test_declared_ends_go_by_their_name() -> None:
    source = "buffer@x=video_size=16x8:pix_fmt=gray:time_base=1/10:pixel_aspect=1/1"
    graph = FilterGraph(f"{source},vflip,buffersink@y")
    assert (graph.inputs, graph.outputs) == (("x",), ("y",))
    graph.add_frames(video(1), key="buffer@x")
    graph.add_frames(video(2), key="x")
    graph.add_frames(video(3))
    frames = graph.get_frames(key="buffersink@y")
    assert isinstance(frames, VideoFrames)
    assert levels(frames) == [1, 2, 3]


def test_audio_and_a_part_of_it() -> None:
    graph = FilterGraph("anull")
    whole = audio(sound(1000), sound(1000, pts=1000))
    graph.add_frames(whole[500:1500])
    frames = graph.get_frames()
    assert isinstance(frames, AudioFrames)
    assert frames.first_sample == 500
    np.testing.assert_array_equal(samples(frames), [np.arange(500, 1500)])


def test_audio_of_several_inputs_mixes() -> None:
    graph = FilterGraph("[a][b]amix=inputs=2:normalize=0,aformat=sample_fmts=s16p")
    graph.add_frames(audio(sound(1000)), key="a")
    graph.add_frames(audio(sound(1000)), key="b")
    graph.flush()
    frames = graph.get_frames()
    assert isinstance(frames, AudioFrames)
    np.testing.assert_allclose(samples(frames), [np.arange(1000) * 2], atol=1)


def test_audio_becomes_images() -> None:
    graph = FilterGraph("showwaves=size=32x16:rate=10")
    graph.add_frames(audio(sound(8000)))
    graph.flush()
    frames = graph.get_frames()
    assert isinstance(frames, VideoFrames)
    assert (frames.width, frames.height) == (32, 16)


def test_images_go_in_and_stay_as_they_are() -> None:
    image = ImageFrames([frame(9)])
    graph = FilterGraph("negate")
    graph.add_frames(image)
    frames = graph.get_frames()
    assert isinstance(frames, VideoFrames)
    assert (levels(frames), levels(image)) == ([246], [9])


def test_dump_draws_nodes_and_links() -> None:
    graph = FilterGraph("[a]null[n];[n][b]hstack=inputs=2,scale@s=8:8[out]")
    graph.add_frames(video(1), key="a")
    assert graph.dump().splitlines() == [
        "a (16x8 gray)",
        "b (video)",
        "a -> null",
        "b -> hstack=inputs=2",
        "null -> hstack=inputs=2",
        "hstack=inputs=2 -> scale@s=8:8",
        "scale@s=8:8 -> out",
    ]
    assert FilterGraph("hflip,hflip").dump().splitlines()[2] == "hflip #0 -> hflip #1"


@pytest.mark.parametrize(
    ("frames", "match"),
    [
        (video(1, size=(8, 8)), "the input buffer@x takes 16x8 gray, but the frames are 8x8 gray"),
        (video(1, fmt="yuv420p"), "takes 16x8 gray, but the frames are 16x8 yuv420p"),
        (audio(sound()), "the input buffer@x takes video, but the frames are audio"),
    ],
)
def test_frames_must_fit_a_declared_input(frames: Any, match: str) -> None:
    graph = FilterGraph("buffer@x=video_size=16x8:pix_fmt=gray:time_base=1/10,null")
    with pytest.raises(FilterError, match=match):
        graph.add_frames(frames)


def test_later_frames_must_fit_the_first() -> None:
    graph = FilterGraph("[v]null")
    graph.add_frames(video(1))
    with pytest.raises(
        FilterError, match="the input v takes 16x8 gray, but the frames are 8x8 gray"
    ):
        graph.add_frames(video(1, size=(8, 8)))


def test_audio_must_fit_a_declared_input() -> None:
    graph = FilterGraph(
        "abuffer@x=sample_rate=8000:sample_fmt=s16p:channel_layout=mono:time_base=1/8000,anull"
    )
    with pytest.raises(
        FilterError, match="takes s16p mono 8000 Hz, but the frames are s16p stereo 8000"
    ):
        graph.add_frames(audio(sound(layout="stereo")))


@pytest.mark.parametrize(
    ("desc", "match"),
    [
        ("nosuch", "this FFmpeg has no filter 'nosuch'"),
        ("color=red,nullsink", "has no input"),
        ("nullsink", "has no output"),
        ("[a]null[b];[b]volume", "its filters cannot be joined"),
    ],
)
def test_bad_graphs(desc: str, match: str) -> None:
    with pytest.raises(FilterError, match=match):
        FilterGraph(desc).add_frames(video(1))


def test_keys_are_checked() -> None:
    graph = FilterGraph("[a][b]hstack")
    with pytest.raises(FilterError, match="no key was given; its inputs are 'a', 'b'"):
        graph.add_frames(video(1))
    with pytest.raises(FilterError, match="there is no input 'c'; its inputs are 'a', 'b'"):
        graph.add_frames(video(1), key="c")
    with pytest.raises(FilterError, match="there is no output 'x'"):
        graph.get_frames(key="x")


def test_flush_needs_frames_and_ends_the_graph() -> None:
    graph = FilterGraph("[a][b]hstack")
    graph.add_frames(video(1), key="a")
    with pytest.raises(FilterError, match=r"the inputs \['b'\] have had no frame"):
        graph.flush()
    graph.add_frames(video(1), key="b")
    graph.flush()
    graph.flush()
    with pytest.raises(RuntimeError, match="was flushed; make a new one"):
        graph.add_frames(video(1), key="a")


def test_only_frames_go_in() -> None:
    with pytest.raises(TypeError, match="frames must be AudioFrames, VideoFrames or ImageFrames"):
        FilterGraph("null").add_frames([1])  # type: ignore[arg-type]


def test_a_second_thread_is_turned_away() -> None:
    graph = FilterGraph("null")
    inside, leave = threading.Event(), threading.Event()

    class SlowFrames(VideoFrames):
        """Frames whose access takes long, so that the graph is busy."""

        @property
        def _frames(self) -> Any:
            inside.set()
            assert leave.wait(10)
            return (frame(1),)

        @_frames.setter
        def _frames(self, value: Any) -> None:
            pass

    worker = threading.Thread(target=graph.add_frames, args=(SlowFrames([]),))
    worker.start()
    try:
        assert inside.wait(10)
        with pytest.raises(RuntimeError, match="this FilterGraph is in use by another thread"):
            graph.get_frames()
    finally:
        leave.set()
        worker.join()
    assert graph.get_frames() is not None


def test_channels_that_a_filter_splits_have_one_plane_each() -> None:
    # FFmpeg leaves the planes of the other channels in the first frame.
    graph = FilterGraph("channelsplit[left][right]")
    graph.add_frames(audio(sound(100, layout="stereo")))
    for key in ("left", "right"):
        frames = graph.get_frames(key=key)
        assert isinstance(frames, AudioFrames)
        assert samples(frames).shape == np.asarray(sm.convert_frames(frames)).shape == (1, 100)


def test_audio_whose_layout_has_no_name() -> None:
    """``wave`` writes no speakers, and FFmpeg calls the layout "2 channels"."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((2, 2, 8000, 0, "NONE", ""))
        writer.writeframes(bytes(3200))
    packets = sm.demux_audio(file.getvalue())
    assert packets.codec.channel_layout == "2 channels"
    graph = sm.FilterGraph(sm.get_abuffer_desc(packets.codec) + ",anull,abuffersink")
    graph.add_frames(sm.decode_packets(packets, filter_desc=None))
    graph.flush()
    assert len(graph.get_frames()) == 800
