"""Windows of video contain exactly the frames whose times are in them, in every container."""

from __future__ import annotations

import base64
import io
import math
import random
import re
import struct
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from decoded import indices
from effort import LONG, each, examples
from field_coded import field_coded_file
from hypothesis import given, settings
from hypothesis import strategies as st
from made_clips import NUM_FRAMES, UNEVEN, clip, planes, uneven

import spdl_media as sm
from spdl_media.testing import (
    AudioTrack,
    VideoTrack,
    frame_index,
    index_frames,
    index_planes,
    index_samples,
    make_image,
    make_media,
    make_video,
)

CLIPS = [
    *(
        f"{format}/libx265/{b_frames}/{gop}"
        for format in ("mp4", "mov", "matroska", "mpegts", "nut")
        for b_frames, gop in ((0, "closed"), (2, "closed"), (2, "open"))
    ),
    "mp4/libx264/3/open",
    "matroska/libx264/3/open",
    "mpegts/libx264/3/open",
    "mp4/libx264/0/refresh",
    "matroska/libx264/0/refresh",
    "flv/libx264/0/refresh",
    "mpegts/libx264/0/refresh",
    "avi/libx264/3/closed",
    "avi/libx264/3/open",
    "avi/ffv1/0/closed",
    "flv/libx264/2/closed",
    "mp4/mpeg4/2/closed",
    "mpegts/mpeg4/2/closed",
    "mpegts/mpeg2video/2/closed",
    "webm/libvpx-vp9/0/closed",
    "matroska/ffv1/0/closed",
]

SIDES = st.one_of(
    st.none(),
    st.integers(-3, 40).map(lambda k: 0.1 * k),  # 0.1 * 3 is not 0.3, and means frame 3
    st.integers(-3, 40).map(lambda k: k / 10),
    st.integers(-3, 40).map(lambda k: Fraction(k, 10)),
    st.integers(-3, 40).map(lambda k: f"{k / 10}"),
    st.integers(-3, 40).map(lambda k: Decimal(k) / 10),
    st.floats(-0.5, 4),
    st.fractions(-1, 4),
)


def as_fraction(side: object) -> Fraction | None:
    return None if side is None else Fraction(str(side))


def expected(start: object, end: object, times: list[Fraction]) -> list[int]:
    first, stop = as_fraction(start), as_fraction(end)
    hair = Fraction(1, 10**10)
    return [
        index
        for index, time in enumerate(times)
        if (first is None or time + hair >= first) and (stop is None or time + hair < stop)
    ]


def holds_time(start: object, end: object) -> bool:
    first, stop = as_fraction(start), as_fraction(end)
    return first is None or stop is None or first < stop


@pytest.mark.parametrize("kind", CLIPS)
@settings(max_examples=examples(12))
@given(start=SIDES, end=SIDES)
def test_a_window_holds_its_frames_and_no_others(kind: str, start: object, end: object) -> None:
    if not holds_time(start, end):
        return
    packets = sm.demux_video(clip(kind), timestamp=(start, end))
    frames = sm.decode_packets(packets, filter_desc=None)
    times = [Fraction(k, 10) for k in range(NUM_FRAMES)]
    assert indices(frames) == expected(start, end, times)
    assert frames.timestamps == tuple(float(times[k]) for k in indices(frames))
    assert packets.get_timestamps() == frames.timestamps


@pytest.mark.parametrize("format", ["mp4", "matroska", "mpegts"])
@settings(max_examples=examples(25))
@given(
    start=st.one_of(st.sampled_from(UNEVEN), st.integers(-100, 2100)),
    length=st.integers(1, 700),
)
def test_windows_of_uneven_frames(format: str, start: int, length: int) -> None:
    window = Fraction(start, 1000), Fraction(start + length, 1000)
    frames = sm.decode_packets(sm.demux_video(uneven(format), timestamp=window), filter_desc=None)
    assert indices(frames) == expected(*window, [Fraction(k, 1000) for k in UNEVEN])


def shown(start: Fraction, end: Fraction, rate: Fraction) -> list[tuple[int, Fraction]]:
    """Return the frame of ``uneven`` that is shown at each time of the rate, with the time."""
    times = [Fraction(k, 1000) for k in UNEVEN]
    moments = [start + k / rate for k in range(math.ceil((end - start) * rate))]
    return [
        (max(k for k, time in enumerate(times) if time <= moment), moment)
        for moment in moments
        if moment >= 0
    ]


@pytest.mark.parametrize("format", ["mp4", "matroska"])
@settings(max_examples=examples(25))
@given(
    start=st.one_of(
        st.sampled_from([time for time in UNEVEN if time < 1990]), st.integers(-100, 1900)
    ),
    length=st.integers(1, 1900),
    rate=st.sampled_from([Fraction(3), Fraction(10), Fraction(30000, 1001), Fraction(200)]),
)
def test_a_rate_gives_what_is_shown_at_each_of_its_moments(
    format: str, start: int, length: int, rate: Fraction
) -> None:
    # The last frame begins at 2 s, so there are frames after the window.
    window = Fraction(start, 1000), Fraction(min(start + length, 1990), 1000)
    wanted = shown(*window, rate)
    desc = sm.get_video_filter_desc(frame_rate=rate, pix_fmt=None)
    packets = sm.demux_video(uneven(format), timestamp=window)
    frames = sm.decode_packets(packets, desc)
    assert [(k, float(moment)) for k, moment in wanted] == list(
        zip(indices(frames), frames.timestamps, strict=True)
    )
    decoder = sm.VideoDecoder(packets.codec, filter_desc=desc)
    chunks = [chunk for _ in (0, 1) for chunk in decoder.decode(packets)] + list(decoder.flush())
    assert [time for chunk in chunks for time in chunk.timestamps] == 2 * list(frames.timestamps)


@pytest.mark.parametrize(
    ("window", "num_frames"), [(None, 11), ((None, 0.5), 3), ((1.5, None), 3), ((-0.2, 0.2), 1)]
)
def test_a_rate_ends_with_the_window_or_the_last_frame(window: Any, num_frames: int) -> None:
    # The last of 20 frames begins at 1.9 s and is shown until 2 s.
    data = make_video(planes()[:20], codec="libx265", format="mp4", frame_rate=10)
    video = sm.load_video(data, window, frame_rate=5.5)
    assert video.shape[0] == num_frames


def test_the_last_frame_of_flv_is_shown_as_long_after_a_seek() -> None:
    """FFmpeg guesses durations from the packets after a seek: here 1 s of 2."""
    slow: Any = {"codec": "flv", "frame_rate": Fraction(1, 2), "gop_size": 1}
    data = make_video(planes()[:3], format="flv", **slow)
    assert len(sm.load_video(data, (4, None), frame_rate=10)) == 20


@pytest.mark.parametrize("format", ["mp4", "matroska", "mpegts"])
def test_adjacent_windows_lose_and_double_nothing(format: str) -> None:
    data = clip(f"{format}/libx265/2/open")
    with sm.Demuxer(data) as demuxer:
        for step in (0.07, 0.1, 1 / 3, 0.8):
            got: list[int] = []
            for k in range(math.ceil(3 / step)):
                window = (k * Fraction(str(step)), (k + 1) * Fraction(str(step)))
                packets = demuxer.demux_video(window)
                got += indices(sm.decode_packets(packets, filter_desc=None))
            assert got == list(range(NUM_FRAMES)), step


@each("kind", ["mp4/libx265/2/open", "mpegts/libx264/3/open"])
@each(
    "window, want",
    [
        ((None, None), 30),
        ((-math.inf, math.inf), 30),
        ((None, 1), 10),
        ((2, math.inf), 10),
        (("inf", "nan"), None),
        ((-5, -1), 0),
        ((-5, 0.1), 1),
        ((2.95, 9), 0),
        ((1000, 2000), 0),
        ((1000, None), 0),
        ((1.01, 1.02), 0),
    ],
)
def test_ends_and_outsides(kind: str, window: tuple[object, object], want: int | None) -> None:
    if want is None:
        with pytest.raises(ValueError, match="of timestamp must be a number of seconds"):
            sm.demux_video(clip(kind), timestamp=window)  # type: ignore[arg-type]
        return
    packets = sm.demux_video(clip(kind), timestamp=window)  # type: ignore[arg-type]
    frames = sm.decode_packets(packets)
    assert len(frames) == want
    assert packets.get_timestamps() == frames.timestamps


def test_start_before_end_is_asked_for() -> None:
    for window in ((1, 1), (2, 1), (math.inf, None)):
        with pytest.raises(ValueError, match="start must be less than end"):
            sm.demux_video(clip("mp4/libx265/0/closed"), timestamp=window)


@pytest.mark.parametrize("format", ["mp4", "mov", "matroska", "mpegts", "avi", "nut"])
def test_many_windows_of_one_demuxer_equal_fresh_ones(format: str) -> None:
    data = clip(f"{format}/libx264/2/open")
    chance = random.Random(7)  # noqa: S311
    windows = [None, (None, 0.5)]
    for _ in range(examples(48)):
        start = chance.uniform(-0.3, 3.2)
        windows.append((start, start + chance.choice((0.05, 0.3, 1.5))))
    chance.shuffle(windows)
    with sm.Demuxer(data) as demuxer:
        for window in windows:
            shared = demuxer.demux_video(window)
            fresh = sm.demux_video(data, timestamp=window)
            assert shared.get_timestamps(raw=True) == fresh.get_timestamps(raw=True), window
            assert indices(sm.decode_packets(shared, None)) == indices(
                sm.decode_packets(fresh, None)
            )


def test_raw_timestamps_show_the_lead_in() -> None:
    packets = sm.demux_video(clip("mp4/libx265/2/closed"), timestamp=(1.25, 1.45))
    assert packets.get_timestamps() == (1.3, 1.4)
    raw = packets.get_timestamps(raw=True)
    assert raw[0] == 0.8, "the key frame before the window"
    assert set(raw) > set(packets.get_timestamps())
    assert list(raw) == sorted(raw)
    assert len(raw) == len(packets) < 10, "the rest of the file is not kept"


@pytest.mark.parametrize("format", ["mp4", "matroska", "mpegts", "nut"])
def test_second_zero_is_the_start_of_the_container(format: str) -> None:
    track = VideoTrack(
        frames=planes(),
        codec="libx265",
        max_b_frames=2,
        gop_size=8,
        pts=[50 + k for k in range(NUM_FRAMES)],
    )
    data = make_media([track], format=format)
    frames = sm.decode_packets(sm.demux_video(data, timestamp=(1, 1.3)), None)
    assert indices(frames) == [10, 11, 12]
    assert frames.timestamps == (1.0, 1.1, 1.2)


@pytest.mark.parametrize("format", ["mp4", "matroska", "mpegts"])
def test_streams_share_one_zero(format: str) -> None:
    sound = AudioTrack(samples=index_samples(48000 * 4), codec="aac")
    late = VideoTrack(
        frames=planes(), codec="libx265", gop_size=8, pts=[13 + k for k in range(NUM_FRAMES)]
    )
    if format == "mpegts":
        sound = AudioTrack(samples=index_samples(48000 * 4), codec="mp2")
    data = make_media([sound, late], format=format)
    whole = sm.decode_packets(sm.demux_video(data), None)
    assert indices(whole) == list(range(NUM_FRAMES))
    # AAC in Matroska begins with 1024 samples of priming, which count as the start.
    assert whole.timestamps[0] == pytest.approx(1.3, abs=0.025)
    first = Fraction(str(whole.timestamps[0]))
    early = sm.decode_packets(sm.demux_video(data, timestamp=(0, first)), None)
    assert len(early) == 0
    frames = sm.decode_packets(sm.demux_video(data, timestamp=(first, first + 1)), None)
    assert indices(frames) == list(range(10))


@pytest.mark.parametrize("format", ["mp4", "matroska", "mpegts"])
def test_two_images_with_different_starts(format: str) -> None:
    early = VideoTrack(frames=planes(), codec="libx265", max_b_frames=2, gop_size=8)
    late = VideoTrack(
        frames=planes()[:20],
        codec="libx265",
        gop_size=8,
        pts=[20 + k for k in range(20)],
    )
    data = make_media([early, late], format=format)
    with sm.Demuxer(data) as demuxer:
        for window in ((2.1, 2.4), (0.5, 0.6), (2.9, None)):
            for index, offset, count in ((0, 0, 30), (1, 20, 20)):
                packets = demuxer.demux_video(window, stream_index=index)
                times = [Fraction(k + offset, 10) for k in range(count)]
                got = indices(sm.decode_packets(packets, None))
                assert got == expected(*window, times), (window, index)


def test_frames_hidden_by_an_edit_list_stay_hidden() -> None:
    """Cut an MP4 by its edit list alone: the frames before the cut are decoded, never shown."""
    data = bytearray(clip("mp4/libx265/0/closed"))
    elst = data.index(b"elst") + 4
    # version and flags, one entry: duration (movie ticks of 1 ms), media time, rate
    scale = int.from_bytes(data[(mdhd := data.index(b"mdhd") + 16) : mdhd + 4], "big")
    data[elst + 8 : elst + 12] = (2500).to_bytes(4, "big")
    data[elst + 12 : elst + 16] = (scale // 2).to_bytes(4, "big")
    packets = sm.demux_video(bytes(data))
    frames = sm.decode_packets(packets, None)
    assert indices(frames) == list(range(5, NUM_FRAMES))
    assert packets.get_timestamps() == frames.timestamps
    assert frames.timestamps[0] == 0.0
    cut = sm.decode_packets(sm.demux_video(bytes(data), timestamp=(0.2, 0.5)), None)
    assert indices(cut) == [7, 8, 9]
    assert indices(sm.decode_packets(packets, None, num_frames=2)) == [5, 6]


@pytest.mark.parametrize(
    "name", ["nasa_13013.mp4", "vfr_320x240.mp4", "mpeg4_320x240.ts", "av1_video.mkv"]
)
def test_windows_of_real_media(media_dir: Path, name: str) -> None:
    data = (media_dir / "video" / name).read_bytes()
    whole = sm.decode_packets(sm.demux_video(data), None)
    times = whole.timestamps
    with sm.Demuxer(io.BytesIO(data)) as demuxer:
        for first, last in ((0, 3), (len(times) // 2, len(times) // 2 + 5), (-3, -1)):
            packets = demuxer.demux_video((times[first], times[last]))
            frames = sm.decode_packets(packets, None)
            want = whole[first:last]
            assert frames.timestamps == want.timestamps
            for a, b in zip(frames, want, strict=True):
                assert all(np.array_equal(x, y) for x, y in zip(a.planes, b.planes, strict=True))


def test_raw_streams_without_a_rate_count_frames_at_25_a_second() -> None:
    # FFmpeg states a duration for the first 50 packets, by which it looks for the rate, and then one tick.
    options = {"x265-params": "log-level=none:pools=none:vui-timing-info=0"}
    frames = index_planes(60, 64, 48)
    data = make_video(frames, codec="libx265", format="hevc", gop_size=8, options=options)
    packets = sm.demux_video(data, timestamp=("2.1", None))
    wanted = tuple(number / 25 for number in range(53, 60))
    assert sm.decode_packets(packets, None).timestamps == packets.get_timestamps() == wanted
    with sm.VideoFile(data) as video:
        assert (video.timestamps[53:], video.end) == (wanted, 2.4)


@pytest.mark.parametrize("b_frames", [0, 2])
def test_raw_streams_count_frames(b_frames: int) -> None:
    """An elementary stream has no timestamps; times of frames follow from the rate in its headers."""
    data = make_video(planes(), codec="libx264", format="h264", max_b_frames=b_frames, gop_size=8)
    packets = sm.demux_video(data, timestamp=(1, 1.5))
    frames = sm.decode_packets(packets, None)
    assert indices(frames) == [10, 11, 12, 13, 14]
    assert frames.timestamps == packets.get_timestamps() == (1.0, 1.1, 1.2, 1.3, 1.4)


def test_raw_h261_whose_packets_all_claim_to_be_key_frames() -> None:
    data = make_video(
        index_frames(30, 176, 144), codec="h261", format="h261", frame_rate=25, gop_size=8
    )
    whole = sm.decode_packets(sm.demux_video(data), None)
    window = sm.decode_packets(sm.demux_video(data, timestamp=(whole.timestamps[12], None)), None)
    assert window.timestamps == whole.timestamps[12:]
    for got, want in zip(window, whole[12:], strict=True):
        assert all(map(np.array_equal, got.planes, want.planes))


@pytest.mark.parametrize("window", [(20, 30), (44, 58), (10, 15), (0, 3), (59, 60)])
def test_program_streams_state_few_times_and_are_exact_all_the_same(
    window: tuple[int, int],
) -> None:
    frames = index_frames(60, 64, 48)
    data = make_video(frames, codec="mpeg2video", format="mpeg", frame_rate=25, gop_size=12)
    first = sm.decode_packets(sm.demux_video(data)).timestamps[0]
    start, end = (first + index / 25 - 0.01 for index in window)
    packets = sm.demux_video(data, timestamp=(start, end))
    got = sm.decode_packets(packets)
    assert indices(got) == list(range(*window))
    # FFmpeg reads them from the start, but what precedes the last key frame is not decoded.
    assert len(packets) < window[1] - window[0] + 12 + 17


def test_a_source_that_cannot_seek_is_decoded_from_the_last_key_frame(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first part that load_video decodes begins there, too, however small the parts are."""
    monkeypatch.setattr("spdl_media.video_arrays._PART_BYTES", 1 << 10)
    data = clip("matroska/libx264/2/open")
    times = sm.demux_video(data).get_timestamps()

    def source() -> io.BytesIO:
        file = io.BytesIO(data)
        file.seekable = lambda: False  # type: ignore[method-assign]
        return file

    for number in (7, 8, 9, 17, 25):
        window = times[number], times[number] + 0.25
        assert len(sm.demux_video(source(), timestamp=window)) < 3 + 8 + 17
        video = sm.load_video(source(), window)
        assert [frame_index(frame) for frame in video.array] == [number, number + 1, number + 2]


def test_mp4_that_states_decoding_times_alone_stands_in_order() -> None:
    coded = io.BytesIO(
        make_video(planes(), codec="libx264", format="mp4", max_b_frames=2, gop_size=12)
    )
    file = io.BytesIO()
    with av.open(coded) as source, av.open(file, "w", "mp4") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        for number, packet in enumerate(p for p in source.demux(video=0) if p.size):
            packet.stream, packet.time_base = stream, Fraction(1, 10)
            packet.dts = packet.pts = number
            packet.duration = 1
            target.mux(packet)
    data = file.getvalue()
    whole = sm.decode_packets(sm.demux_video(data), filter_desc=None)
    assert indices(whole) == list(range(NUM_FRAMES))
    assert whole.timestamps == pytest.approx([number / 10 for number in range(NUM_FRAMES)])
    window = sm.demux_video(data, timestamp=(1.49, 1.71))
    assert indices(sm.decode_packets(window, filter_desc=None)) == [15, 16, 17]


@pytest.mark.parametrize("b_frames", [0, 2])
def test_h264_in_avi_has_the_times_of_its_chunks(b_frames: int) -> None:
    """AVI has empty chunks for dropped frames, as in captures; H.264 in AVI has no other times."""
    times = [number + 7 * (number > 10) + 20 * (number > 17) for number in range(NUM_FRAMES)]
    base = Fraction(1, 10)
    options = {"codec": "libx264", "max_b_frames": b_frames, "gop_size": 8}
    track = VideoTrack(frames=planes(), pts=times, time_base=base, **options)
    data = make_media([track], format="avi")
    packets = sm.demux_video(data)
    whole = sm.decode_packets(packets, filter_desc=None)
    assert indices(whole) == list(range(NUM_FRAMES))
    assert whole.timestamps == packets.get_timestamps()
    if not b_frames:  # otherwise the file has decoding times, which differ
        assert whole.timestamps == pytest.approx([time / 10 for time in times])
    for start in range(0, 60, 1 if LONG else 3):
        window = sm.demux_video(data, timestamp=(start / 10, start / 10 + 1))
        expected = [
            k for k, time in enumerate(whole.timestamps) if start <= round(time * 10) < start + 10
        ]
        assert indices(sm.decode_packets(window, filter_desc=None)) == expected
    with sm.VideoFile(data) as video:
        assert video.timestamps == whole.timestamps


@pytest.mark.parametrize("max_b_frames", [0, 2])
def test_windows_of_asf_have_the_times_of_the_whole(max_b_frames: int) -> None:
    """FFmpeg delays times by the assumed reorder depth, which it estimates while it reads."""
    options: dict[str, Any] = {"gop_size": 4, "max_b_frames": max_b_frames}
    data = make_video(planes(), codec="libx264", format="asf", frame_rate=25, **options)
    whole = sm.decode_packets(sm.demux_video(data), filter_desc=None)
    assert whole.timestamps == pytest.approx([k / 25 for k in range(len(whole))])
    for start in range(0, 1200, 30 if LONG else 70):
        window = sm.demux_video(data, timestamp=(start / 1000, start / 1000 + 0.1))
        times = [round(time * 1000) for time in whole.timestamps]
        expected = [k for k, time in enumerate(times) if start <= time < start + 100]
        assert indices(sm.decode_packets(window, filter_desc=None)) == expected


@pytest.mark.parametrize("kind", ["webm/libvpx", "vob/mpeg2video", "mpegts/libx264", "mp4/libx264"])
def test_files_that_begin_before_second_0_of_their_clock(kind: str) -> None:
    format, codec = kind.split("/")
    coded = make_video(planes(), codec=codec, format="matroska", frame_rate=25, gop_size=6)
    file, options = io.BytesIO(), {"avoid_negative_ts": "disabled", "use_editlist": "0"}
    if format != "mp4":
        del options["use_editlist"]
    with (
        av.open(io.BytesIO(coded)) as source,
        av.open(file, "w", format, options=options) as target,
    ):
        stream = target.add_stream_from_template(source.streams.video[0], opaque=True)
        for packet in source.demux(video=0):
            if packet.size:
                early = round(Fraction(1, 25) / packet.time_base)
                packet.pts, packet.dts = packet.pts - early, packet.dts - early
                packet.stream = stream
                target.mux(packet)
    data = file.getvalue()
    whole = sm.decode_packets(sm.demux_video(data), filter_desc=None)
    assert indices(whole) == list(range(NUM_FRAMES))
    # Matroska has no negative times: two frames are at second 0.
    # Five steps meet each place of the groups of six.
    for first in range(2 if format == "webm" else 0, NUM_FRAMES, 1 if LONG else 5):
        time = whole.timestamps[first]
        window = sm.demux_video(data, timestamp=(time - 0.02, time + 0.02))
        assert indices(sm.decode_packets(window, filter_desc=None)) == [first]
    with sm.VideoFile(data, filter_desc=None) as video:
        assert video.timestamps == whole.timestamps
        for number in (17, 0, 29, 3):
            assert frame_index(video[number].planes[0]) == number


def test_windows_of_two_frames_in_obus() -> None:
    frames = index_planes(2, 64, 48)
    data = make_video(frames, codec="libsvtav1", format="obu", frame_rate=25)
    for start in (0, 0.04):
        window = sm.decode_packets(sm.demux_video(data, timestamp=(start, start + 0.02)))
        assert window.timestamps == pytest.approx((start,))


MXF_INDEX = bytes.fromhex("060e2b34025301010d01020101100100")


@pytest.mark.parametrize("max_b_frames", [1, 2])
@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("codec", ["libx264", "mpeg2video"])
def test_mxf_states_decoding_times_alone(codec: str, indexed: bool, max_b_frames: int) -> None:
    options: Any = {"max_b_frames": max_b_frames, "gop_size": 8}
    data = make_video(planes(), codec=codec, format="mxf", frame_rate=25, **options)
    if not indexed:  # the key of the index becomes that of a filler
        assert data.count(MXF_INDEX) == 1
        data = data.replace(MXF_INDEX, bytes.fromhex("060e2b34010101020301021001000000"))
    whole = sm.decode_packets(sm.demux_video(data), filter_desc=None)
    assert indices(whole) == list(range(NUM_FRAMES))
    assert list(whole.timestamps) == sorted(whole.timestamps)
    # Three steps meet each place of the groups of eight.
    for first in range(0, NUM_FRAMES - 1, 1 if LONG else 3):
        time = whole.timestamps[first]
        window = time - 0.02, time + 0.06
        frames = sm.decode_packets(sm.demux_video(data, timestamp=window), filter_desc=None)
        assert indices(frames) == [first, first + 1]


def all_keys(data: bytes, format: str) -> bytes:
    """Remux the packets, all marked as key frames."""
    if format in ("mp4", "3gp"):
        return data.replace(b"stss", b"skip")
    file = io.BytesIO()
    with av.open(io.BytesIO(data)) as source, av.open(file, "w", format) as target:
        stream = target.add_stream_from_template(source.streams.video[0], opaque=True)
        for packet in source.demux(video=0):
            if packet.size:
                packet.is_keyframe, packet.stream = True, stream
                target.mux(packet)
    return file.getvalue()


@pytest.mark.parametrize(
    "kind",
    [
        *("3gp/mpeg4/0", "3gp/h263/0", "mp4/mpeg1video/2", "mp4/mpeg2video/2", "mp4/libvpx-vp9/0"),
        *("mp4/libx264/3", "mp4/libx265/0", "mp4/libx265/2", "matroska/libx265/2"),
        *("asf/msmpeg4v2/0", "asf/msmpeg4/0", "asf/wmv1/0"),
    ],
)
def test_frames_that_are_no_key_frames_although_the_file_says_so(kind: str) -> None:
    format, codec, b_frames = kind.split("/")
    pictures = index_planes(NUM_FRAMES, 176, 144)
    options = {"max_b_frames": int(b_frames), "frame_rate": 25, "gop_size": 8}
    data = make_video(pictures, codec=codec, format=format, **options)
    without = all_keys(data, format)
    assert without != data
    keys = sum(sm.demux_video(data).is_key)
    assert keys <= NUM_FRAMES // 4
    assert sum(sm.demux_video(without).is_key) == keys
    # Each place in a group of pictures is the first one of some window.
    for first in range(0, NUM_FRAMES, 1 if LONG else 3):
        window = Fraction(first, 25), Fraction(first + 1, 25)
        one, other = (
            sm.decode_packets(sm.demux_video(file, timestamp=window), filter_desc=None)
            for file in (data, without)
        )
        assert indices(other) == [first]
        assert np.array_equal(one[0].planes[0], other[0].planes[0])
    with sm.VideoFile(without) as video:
        assert len(video.keyframes) == keys


def test_windows_of_h264_444_of_old_x264_are_decoded_as_such() -> None:
    """Before version 151 of x264, some bits had another meaning. Only the first packet has the version."""
    noise = np.random.default_rng(0).integers(0, 255, (120, 160))
    smooth = np.mean([np.roll(noise, (k // 5, k % 5), (0, 1)) for k in range(25)], axis=0)
    parts = [smooth[n : n + 64, 2 * n : 2 * n + 96].astype(np.uint8) for n in range(24)]
    pictures = [(part, part[::-1], part[:, ::-1]) for part in parts]
    options = {"qp": "10", "preset": "slow"}
    data = make_video(pictures, codec="libx264", pix_fmt="yuv444p", gop_size=8, options=options)
    old = re.sub(rb"x264 - core \d+", b"x264 - core 142", data)
    # Made by a new version, so pixels differ if it is treated as one of the old version.
    keep = sm.decode_config(on_corrupt="keep")
    whole = sm.decode_packets(sm.demux_video(old), None, keep)[8:16]
    found, new = (
        sm.decode_packets(sm.demux_video(file, timestamp=(0.8, 1.6)), None, keep)
        for file in (old, data)
    )
    # Only that packet is read before the window.
    assert len(sm.demux_video(old, timestamp=(0.8, 1.6))) < 16
    with sm.VideoFile(old) as video:
        assert video.keyframes == (0, 8, 16)
    assert len(found) == len(whole) == len(new)
    for one, other, unlike in zip(found, whole, new, strict=True):
        assert all(map(np.array_equal, one.planes, other.planes))
        assert not all(map(np.array_equal, one.planes, unlike.planes))


def packed_avi() -> bytes:
    """Make MPEG-4 in AVI as DivX writes it: a P- and a B-frame in one packet, then an empty packet."""
    coded = io.BytesIO(
        make_video(planes(), codec="mpeg4", format="avi", max_b_frames=1, gop_size=8)
    )
    file = io.BytesIO()
    with av.open(coded) as source, av.open(file, "w", "avi") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        packets = [bytes(packet) for packet in source.demux(video=0) if packet.size]
        stream.codec_context.extradata += b"\0\0\1\xb2DivX503b1393p"
        for number, data in enumerate(_packed(packets)):
            packet = av.Packet(data)
            packet.stream, packet.dts, packet.pts = stream, number, number
            packet.time_base, packet.is_keyframe = stream.time_base, _frame_type(data) == 0
            target.mux(packet)
    return file.getvalue()


def _frame_type(data: bytes) -> int:
    """Return 0, 1 or 2 for I, P or B: the first two bits after the start code of a frame."""
    return data[data.index(b"\0\0\1\xb6") + 4] >> 6


def _packed(packets: list[bytes]) -> Iterator[bytes]:
    waiting = None
    for data in packets:
        if _frame_type(data) == 2:
            assert waiting is not None
            yield waiting + data
            # A frame that is not coded: type P, no new second, a time of four bits, the flag "not coded".
            waiting = b"\0\0\1\xb6\x50\x47"
        else:
            if waiting is not None:
                yield waiting
            waiting = data
    if waiting is not None:
        yield waiting


def test_packed_b_frames_of_avi_stand_in_order() -> None:
    data = packed_avi()
    whole = sm.decode_packets(sm.demux_video(data), filter_desc=None)
    assert indices(whole) == list(range(NUM_FRAMES))
    assert whole.timestamps == pytest.approx([number / 10 for number in range(NUM_FRAMES)])
    for start in range(NUM_FRAMES - 3):
        window = (start / 10 - 0.01, start / 10 + 0.21)
        found = sm.decode_packets(sm.demux_video(data, timestamp=window), filter_desc=None)
        assert indices(found) == [start, start + 1, start + 2]


def test_a_window_of_the_cover_in_an_ogg_file() -> None:
    """FFmpeg ends the process when it is to seek in such a picture."""
    cover = make_image(np.full((2, 3, 3), 7, np.uint8))
    head = struct.pack(">II9s6I", 3, 9, b"image/png", 0, 3, 2, 24, 0, len(cover))
    samples = av.AudioFrame(format="s16", layout="mono", samples=960)
    samples.sample_rate = 48000
    file = io.BytesIO()
    with av.open(file, "w", format="ogg") as muxer:
        stream = muxer.add_stream("libopus", rate=48000, layout="mono")
        stream.metadata["METADATA_BLOCK_PICTURE"] = base64.b64encode(head + cover).decode()
        for part in (samples, None):
            muxer.mux(stream.encode(part))
    frames = sm.load_video(file.getvalue(), timestamp=(0.01, 1)).array
    np.testing.assert_array_equal(frames, np.full((1, 2, 3, 3), 7))


def test_windows_of_an_avi_of_a_frame_every_ten_seconds() -> None:
    """A tick of its clock is longer than the second by which each further seek goes back."""
    planes = index_planes(12, 32, 32, "yuv420p")
    options: Any = {"format": "avi", "pix_fmt": "yuv420p", "frame_rate": Fraction(1, 10)}
    data = make_video(planes, codec="libx264", gop_size=4, **options)
    assert indices(sm.decode_packets(sm.demux_video(data, timestamp=(25, 60)), None)) == [3, 4, 5]


@pytest.mark.parametrize("max_b_frames", [0, 2])
def test_frames_of_raw_mpeg1_have_the_times_of_their_order(max_b_frames: int) -> None:
    options: Any = {"format": "mpeg1video", "max_b_frames": max_b_frames, "gop_size": 6}
    data = make_video(planes()[:12], codec="mpeg1video", frame_rate=25, **options)
    times = tuple(number / 25 for number in range(12))
    with sm.VideoFile(data, filter_desc=None) as video:
        assert sm.decode_packets(sm.demux_video(data)).timestamps == video.timestamps == times
        assert indices(video[:]) == [*range(12)]


@pytest.mark.parametrize("codec", ["mpeg4", "msmpeg4v3"])
def test_windows_of_an_avi_with_dropped_frames_and_audio(codec: str) -> None:
    """FFmpeg goes on from audio before the frame, and counts the chunks of dropped frames once more.

    So it takes the wrong times, and of codecs without a parser the wrong key frames, from the index.
    """
    pts = [0, 5, 10, 15, 20, 25, 26, 27, 28, 36, 40, 41]
    video = VideoTrack(frames=planes()[: len(pts)], codec=codec, gop_size=5, pts=pts)
    audio = AudioTrack(samples=np.zeros((40_000, 1), np.int16), sample_rate=8000)
    data = make_media([video, audio], format="avi")
    for first, start in enumerate(pts):
        frames = sm.decode_packets(sm.demux_video(data, timestamp=(start / 10, None)), None)
        assert frames.timestamps == tuple(time / 10 for time in pts[first:])
        assert indices(frames) == [*range(first, len(pts))]
        with sm.VideoFile(data, filter_desc=None) as file:
            assert all(map(np.array_equal, file[first].planes, frames[0].planes))


@pytest.mark.parametrize("reorder", [False, True])
@pytest.mark.parametrize("format", ["mpegts", "matroska", "mp4"])
def test_the_last_frame_has_a_field_after_the_window(format: str, reorder: bool) -> None:
    """In MPEG-TS of camcorders each field is a packet with a time, in MP4 and Matroska it may be."""
    drawn = index_planes(12, 64, 64)
    data = field_coded_file(drawn, format, is_split=True, reorder=reorder)
    for stop in range(2, 13):
        window = (0, (stop - Fraction(3, 4)) / 25)
        frames = sm.decode_packets(sm.demux_video(data, timestamp=window), filter_desc=None)
        assert len(frames) == stop
        for frame, wanted in zip(frames, drawn, strict=False):
            assert all(map(np.array_equal, frame.planes, wanted))
