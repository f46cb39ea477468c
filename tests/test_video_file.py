"""VideoFile: frames by number and time equal those of the whole video, with little reading and decoding."""

from __future__ import annotations

import functools
import io
import os
import pickle
import re
import struct
import threading
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from functools import cache
from itertools import chain, product
from pathlib import Path
from typing import Any

import av
import effort
import numpy as np
import pytest
from decoded import indices
from effort import each, examples
from field_coded import field_coded_file
from forks import check_in_fork, forks, start_fork
from http_server import serve
from hypothesis import given, settings
from hypothesis import strategies as st
from made_clips import NUM_FRAMES, UNEVEN, clip, planes, uneven
from test_windows_video import packed_avi

import spdl_media as sm
from spdl_media import codec, filters, frame_decoder, inputs, packet_table, video_arrays
from spdl_media import frame_index as _frame_index
from spdl_media import window as _window
from spdl_media._picture_decoder import PictureDecoder
from spdl_media.testing import (
    AudioTrack,
    VideoTrack,
    frame_index,
    index_planes,
    index_samples,
    make_audio,
    make_media,
    make_video,
)


def remuxed(data: bytes, change: Callable[[Any], Any], **options: str) -> bytes:
    """Remux a file, with a function that changes each packet."""
    file = io.BytesIO()
    with av.open(io.BytesIO(data)) as source:
        format = source.format.name.partition(",")[0].replace("mov", "mp4")
        with av.open(file, "w", format, options=options) as target:
            stream = target.add_stream_from_template(source.streams.video[0], opaque=True)
            for packet in source.demux(video=0):
                if packet.size:
                    changed = change(packet)
                    changed.stream = stream
                    target.mux(changed)
    return file.getvalue()


@cache
def trimmed() -> bytes:
    """Make a video in which an edit list hides the frames before second 0."""

    def earlier(packet: Any) -> Any:
        shift = 10240 * 11 // 10 + 300
        packet.pts, packet.dts = packet.pts - shift, packet.dts - shift
        return packet

    return remuxed(clip("mp4/libx265/2/open"), earlier, avoid_negative_ts="disabled")


@cache
def edited(gop_size: int = 8, *pieces: tuple[int, int]) -> bytes:
    """Make a video with an edit list: by default two segments, of frames 3 to 12, then 20 to 26.

    Args:
        gop_size: Number of frames from a key frame to the next.
        *pieces: Duration in milliseconds and first frame of each segment.
    """
    data = bytearray(
        make_video(planes(), codec="libx264", format="mp4", gop_size=gop_size, max_b_frames=2)
    )
    delay = 2048  # ticks of 1/10240 s from the first decoded frame to the first shown frame
    pieces = pieces or ((1000, 3), (700, 20))
    table = struct.pack(">II", 0, len(pieces))
    table += b"".join(
        struct.pack(">Iii", time, delay + 1024 * first, 1 << 16) for time, first in pieces
    )
    places = [data.index(name) - 4 for name in (b"moov", b"trak", b"edts", b"elst")]
    (size,) = struct.unpack_from(">I", data, places[-1])
    data[places[-1] + 8 : places[-1] + size] = table
    for place in places:
        (size_of_box,) = struct.unpack_from(">I", data, place)
        struct.pack_into(">I", data, place, size_of_box + 8 + len(table) - size)
    return bytes(data)


@cache
def of_a_phone() -> bytes:
    """Make five frames, of which the last two have the largest reordering; the edit list hides frame 4."""
    options = {"x264-params": "b-adapt=0:b-pyramid=normal:scenecut=0"}
    track = VideoTrack(frames=planes()[:5], codec="libx264", max_b_frames=3, options=options)
    data = make_media([track], format="mp4", options={"movflags": "negative_cts_offsets"})
    whole, shorter = (b"elst" + struct.pack(">3I", 0, 1, duration) for duration in (500, 350))
    assert whole in data
    return data.replace(whole, shorter)


def test_edit_lists_of_several_pieces_lose_no_frame() -> None:
    numbers = [*range(3, 13), *range(20, 27)]
    frames = sm.decode_packets(sm.demux_video(edited()), None)
    assert indices(frames) == numbers
    assert indices(opened("edited")[[16, 0, 9]]) == [26, 3, 12]
    # FFmpeg begins the second segment two frames early.
    times = [round(10 * time) for time in frames.timestamps]
    for first in range(8):
        for stop in range(first + 1, 17):
            window = sm.demux_video(edited(), timestamp=(first / 10, stop / 10))
            shown = indices(sm.decode_packets(window, None))
            assert shown == [
                number for number, time in zip(numbers, times, strict=True) if first <= time < stop
            ]


def test_a_second_segment_whose_hidden_frames_begin_before_the_first_segment() -> None:
    """Seeks by time find the key frame of the second segment first."""
    data, numbers = edited(30, (300, 1), (900, 13)), [1, 2, 3, *range(13, 22)]

    def shown(packets: sm.VideoPackets) -> list[int]:
        return indices(sm.decode_packets(packets, None))

    with sm.Demuxer(data) as demuxer:
        times = sm.decode_packets(demuxer.demux_video(), None).timestamps
        for first, time in enumerate(times):
            assert shown(demuxer.demux_video((time, None))) == numbers[first:]
        assert shown(demuxer.demux_video()) == numbers
    with sm.VideoFile(data) as video:
        assert indices(video[:]) == numbers


def test_the_end_of_a_video_whose_timestamps_are_negative() -> None:
    track = VideoTrack(frames=index_planes(10, 32, 32), codec="mpeg2video", pts=range(-30, -20))
    data = make_media([track], format="mpegts", options={"avoid_negative_ts": "disabled"})
    with sm.VideoFile(data) as video:
        assert (len(video), video.end) == (10, 1.0)


def test_the_end_is_that_of_the_last_frame_that_an_edit_list_shows() -> None:
    with sm.VideoFile(edited(8, (1000, 3))) as video:
        assert (len(video), video.end) == (10, 1.0)
        with pytest.raises(
            ValueError, match=r"at 1\.1 s: 10 frames are shown from 0\.000 s to 1\.000"
        ):
            video.at([1.1])


def test_windows_hold_frames_that_are_stated_to_be_decoded_after_they_are_shown() -> None:
    # With negative offsets and an edit list, FFmpeg's decode timestamps are later than the frames are shown.
    frames = sm.decode_packets(sm.demux_video(of_a_phone()), None)
    times = [*frames.timestamps, None]
    assert len(frames) == 4
    for first in range(4):
        for stop in range(first + 1, 5):
            window = sm.demux_video(of_a_phone(), timestamp=(times[first], times[stop]))
            shown = indices(sm.decode_packets(window, None))
            assert shown == indices(frames[first:stop])


def of_another_process(packets: sm.VideoPackets) -> sm.VideoPackets:
    return pickle.loads(pickle.dumps(packets))


def test_a_time_that_one_piece_hides_and_another_one_shows_is_shown_once() -> None:
    numbers = [*range(3, 13), *range(20, 27)]
    whole = of_another_process(sm.demux_video(edited()))
    assert indices(sm.decode_packets(whole, None)) == numbers
    chosen = sm.sample_decode_video(whole, [16, 0, 9], filter_desc=None)
    assert indices(chosen) == [26, 3, 12]
    for num_packets, change in product((1, 4, 100), (lambda chunk: chunk, of_another_process)):
        with sm.Demuxer(edited()) as demuxer:
            decoder = sm.VideoDecoder(demuxer.video_codec, filter_desc=None)
            chunks = map(change, demuxer.streaming_demux(0, num_packets=num_packets))
            parts = [*chain.from_iterable(map(decoder.decode, chunks)), *decoder.flush()]
        assert [frame_index(frame.planes[0]) for part in parts for frame in part] == numbers


def test_every_frame_has_the_palette_that_only_the_first_packet_has() -> None:
    file, palette = io.BytesIO(), np.zeros((1, 256), np.uint32)
    palette[0, :3] = 0xFFFF0000, 0xFF00FF00, 0xFF0000FF
    with av.open(file, "w", "avi") as container:
        stream = container.add_stream("rawvideo", 10, pix_fmt="pal8", width=16, height=16)
        for number in range(6):
            frame = av.VideoFrame(16, 16, "pal8")
            frame.planes[0].update(bytes([number % 3]) * 256)
            frame.planes[1].update(palette.tobytes())
            frame.pts = number
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    colors = [[255, 0, 0], [0, 255, 0], [0, 0, 255]] * 2
    data = file.getvalue()
    with sm.Demuxer(data) as demuxer:
        for window in ((0.3, 0.6), (0.0, 0.6), (0.5, 0.6)):
            frames = sm.convert_frames(sm.decode_packets(demuxer.demux_video(window)))
            assert np.array(frames)[:, 0, 0].tolist() == colors[round(10 * window[0]) :]
    with sm.VideoFile(data) as video:
        for numbers in ([4, 2], [5], [0, 1]):
            assert video.load(numbers).array[:, 0, 0].tolist() == [colors[n] for n in numbers]


def test_a_key_frame_that_is_shown_before_an_earlier_one_is_a_frame() -> None:
    def swap(packet: Any) -> Any:
        frame = packet.duration
        packet.pts += {0: 2, frame: 0}.get(packet.pts, 1) * frame
        return packet

    data = make_video(planes()[:9], codec="libx264", format="mp4", gop_size=1)
    # FFmpeg gives it in the order of the file.
    with sm.VideoFile(remuxed(data, swap, use_editlist="0")) as video:
        assert indices(video[:]) == [*range(9)]


# The first time in ticks, between and after the times of the second file; and the key frames of that.
@pytest.mark.parametrize(("start", "gop_size"), [(7, 6), (100, 6), (7, 1)])
def test_frames_of_joined_files_whose_times_go_back_are_in_order(start: int, gop_size: int) -> None:
    """As of a recorder whose clock is set: no time is stated twice."""
    frames, unit = planes()[:24], Fraction(1, 50)
    files = [
        make_media(
            [
                VideoTrack(
                    frames=frames[first : first + 12],
                    codec="libx264",
                    gop_size=gop_size,
                    frame_rate=25,
                    time_base=unit,
                    pts=[begin + 2 * number for number in range(12)],
                )
            ],
            format="mpegts",
        )
        for first, begin in ((0, start), (12, 0))
    ]
    with sm.VideoFile(b"".join(files)) as video:
        assert indices(video[:]) == [*range(24)]
        assert frame_index(video[20].planes[0]) == 20
        with pytest.raises(sm.DemuxError, match="the times of the frames step back at frame 12,"):
            video.at([0])


def test_the_first_chapter_image_of_an_m4a_is_one_frame() -> None:
    """FFmpeg gives it twice. The reference of the audio to the track of images makes them chapter images."""
    audio = AudioTrack(samples=np.zeros((24000, 1), np.int16), sample_rate=8000)
    images = VideoTrack(frames=planes()[:3], codec="mjpeg", pix_fmt="yuvj420p", frame_rate=1)
    data = bytearray(make_media([audio, images], format="mov"))
    reference = b"\0\0\0\x14tref\0\0\0\x0cchap\0\0\0\2"
    places = [data.index(name) - 4 for name in (b"moov", b"trak")]
    for place in places:
        (size,) = struct.unpack_from(">I", data, place)
        struct.pack_into(">I", data, place, size + len(reference))
    data[place + 8 : place + 8] = reference
    with sm.VideoFile(data, filter_desc=None) as video:
        assert video.timestamps == sm.demux_video(data).get_timestamps() == (0, 1, 2)
        assert indices(video[[2, 1]]) == [2, 1]
    with sm.VideoFile(data) as video:
        np.testing.assert_array_equal(sm.load_video(data).array, video.load(slice(None)).array)


@cache
def hidden() -> bytes:
    """Make VP8 with hidden frames, which are only references of other frames."""

    def hide(packet: Any) -> Any:
        data = bytearray(packet)
        if packet.pts % 400 == 300:
            data[0] &= ~0x10
        copy = av.Packet(bytes(data))
        copy.pts, copy.dts, copy.time_base = packet.pts, packet.dts, packet.time_base
        copy.is_keyframe = packet.is_keyframe
        return copy

    return remuxed(clip("webm/libvpx/0/closed"), hide)


@cache
def two_streams() -> bytes:
    other = VideoTrack(frames=index_planes(20, 32, 32)[::-1], codec="ffv1", gop_size=1)
    return make_media([VideoTrack(frames=planes(), codec="ffv1"), other])


@cache
def mpeg1_in_avi() -> bytes:
    return make_video(planes(), codec="mpeg1video", format="avi", frame_rate=25, max_b_frames=2)


@cache
def raw_mpeg1(max_b_frames: int) -> bytes:
    """Make a raw stream of MPEG-1 with zeros after its end, which FFmpeg makes a packet."""
    options: Any = {"format": "mpeg1video", "frame_rate": 25, "max_b_frames": max_b_frames}
    return make_video(planes(), codec="mpeg1video", **options) + b"\0\0\1\xb7" + bytes(99)


@cache
def raw_h263() -> bytes:
    return make_video(index_planes(20, 176, 144), codec="h263", format="h263")


@cache
def damaged() -> bytes:
    """Flip some bits in the middle third, so that decoders conceal parts of frames."""
    data = bytearray(clip("matroska/mpeg4/2/closed"))
    for place in range(len(data) * 4 // 10, len(data) * 6 // 10, 999):
        data[place] ^= 0x10
    return bytes(data)


# How frames of each video are numbered: by packets, by decoding once, or by decoding in each call.
BY_PACKETS = [
    *(
        f"{format}/libx265/{b_frames}"
        for format in ("mp4", "matroska", "mpegts")
        for b_frames in ("0/closed", "2/closed", "2/open")
    ),
    *(
        "mp4/libx264/3/open",
        "mov/libx264/3/open",
        "matroska/libx264/3/open",
        "mpegts/libx264/3/open",
    ),
    *(
        "mp4/libx264/2/fragments",
        "mp4/libx264/2/dash",
        "mp4/libx264/2/negative",
        "mp4/libx264/2/hybrid",
    ),
    *("flv/libx264/2/closed", "nut/libx265/2/open", "mpegts/libx264/3/cut", "mpegts/libx265/3/cut"),
    *("mp4/libx264/0/refresh", "matroska/libx264/0/refresh", "matroska/libx264/2/interlaced"),
    *("mp4/mpeg4/2/closed", "mpegts/mpeg4/2/closed", "mpegts/mpeg2video/2/closed"),
    *(
        "webm/libvpx-vp9/0/closed",
        "webm/libvpx/0/closed",
        "matroska/ffv1/0/closed",
        "avi/ffv1/0/closed",
        "avi/h263p/0/closed",
    ),
]
ONCE = ["mpegts/libx264/2/interlaced"]
EACH_TIME = [
    *("avi/libx264/3/open", "h264/libx264/2/closed"),
    *(
        "asf/libx264/0/closed",
        "asf/libx264/2/closed",
        "asf/mpeg2video/2/closed",
        "wtv/msmpeg4v2/0/closed",
    ),
]
OTHERS = {
    "uneven": lambda: uneven("mp4"),
    "trimmed": trimmed,
    "two streams": two_streams,
    "damaged": damaged,
    "hidden": hidden,
    "edited": edited,
    "of a phone": of_a_phone,
    "MPEG-1 in AVI": mpeg1_in_avi,
    "recording that began within a refresh": lambda: clip("mpegts/libx264/2/refresh")[188 * 40 :],
    "raw H.263": raw_h263,
    "raw MPEG-1": lambda: raw_mpeg1(0),
    "raw MPEG-1 with B-frames": lambda: raw_mpeg1(2),
    "packed B-frames": packed_avi,
}


def file_of(kind: str) -> bytes:
    return OTHERS[kind]() if kind in OTHERS else clip(kind)


@cache
def options_of(kind: str) -> dict[str, Any]:
    return {"decode_config": sm.decode_config(on_corrupt="keep")} if kind == "damaged" else {}


@cache
def decoded(kind: str) -> sm.VideoFrames:
    return sm.decode_packets(sm.demux_video(file_of(kind)), None, **options_of(kind))


@cache
def opened(kind: str) -> sm.VideoFile:
    return sm.VideoFile(file_of(kind), filter_desc=None, **options_of(kind))


@pytest.mark.parametrize("kind", [*BY_PACKETS, *ONCE, *EACH_TIME, *OTHERS])
@settings(max_examples=examples(12))
@given(data=st.data())
def test_frames_are_those_of_the_whole_video(kind: str, data: st.DataObject) -> None:
    whole, video = decoded(kind), opened(kind)
    assert video.timestamps == whole.timestamps
    if kind == "hidden":
        assert sm.demux_video(file_of(kind)).get_timestamps() == video.timestamps
        assert len(video) < NUM_FRAMES
    count = len(whole)
    assert len(video) == count
    wanted = data.draw(st.lists(st.integers(-count, count - 1), min_size=1, max_size=8))
    found = video[wanted]
    assert found.timestamps == tuple(whole.timestamps[k] for k in wanted)
    for frame, k in zip(found, wanted, strict=True):
        assert all(map(np.array_equal, frame.planes, whole[k].planes))


@pytest.mark.parametrize("kind", [*BY_PACKETS[:3], *ONCE, *EACH_TIME, *OTHERS])
def test_load_video_reads_long_videos_in_parts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each packet is a part here; parts of real videos are larger than all these files."""
    monkeypatch.setattr(video_arrays, "_PART_BYTES", 1)
    source, options, whole = file_of(kind), options_of(kind), decoded(kind)

    def loaded(window: Any = None, **more: Any) -> Any:
        return sm.load_video(source, window, filter_desc="format=gray", **options, **more).array

    def expected(window: Any = None) -> Any:
        packets = sm.demux_video(source, timestamp=window)
        return sm.convert_frames(sm.decode_packets(packets, "format=gray", **options)).array

    assert np.array_equal(loaded(), expected())
    assert np.array_equal(loaded(num_frames=3), expected()[:3])
    # More frames than fit into memory, and than exist.
    assert np.array_equal(loaded(num_frames=10**12), expected())
    window = whole.timestamps[2], whole.timestamps[-2]
    if window[0] < window[1]:
        assert np.array_equal(loaded(window), expected(window))


@pytest.mark.parametrize("kind", ["edited", "trimmed", "cut", *EACH_TIME])
def test_parts_for_a_few_frames_hold_what_these_need(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part may end before frames that an edit list hides, or begin far before the first key frame."""
    file = clip("mpegts/libx264/2/closed")[188 * 40 :] if kind == "cut" else file_of(kind)
    whole = sm.convert_frames(sm.decode_packets(sm.demux_video(file), "format=gray")).array
    fill = _window._VideoRun.fill
    for size in range(1, 30, 2 if effort.LONG else 4):
        monkeypatch.setattr(
            _window._VideoRun, "fill", lambda *args, size=size: fill(*args[:-1], size)
        )
        for count in (1, 5, len(whole), 99):
            found = sm.load_video(file, filter_desc="format=gray", num_frames=count).array
            assert np.array_equal(found, whole[:count]), (size, count)


def test_load_video_reads_no_more_than_a_few_frames_need() -> None:
    class Counted(io.BytesIO):
        count = 0

        def readinto(self, buffer: Any) -> int:
            size = super().readinto(buffer)
            self.count += size
            return size

        def read(self, size: int | None = -1) -> bytes:
            data = super().read(size)
            self.count += len(data)
            return data

    frame = np.zeros((480, 640, 3), np.uint8)
    source = Counted(make_video([frame] * 60, codec="rawvideo", pix_fmt="rgb24", format="nut"))
    assert len(source.getvalue()) > 50 << 20
    assert len(sm.load_video(source, num_frames=3)) == 3
    assert source.count < 8 << 20


SHORT = """h265_video.mp4 av1_video.mkv h264_10bits.mp4 corrupt_middle.ts mpeg4_320x240.ts nasa_13013.mp4
odd_size_ffv1.mkv rotated90_320x240.mp4 vfr_320x240.mp4 vp9_320x240.webm""".split()
LONG = [pytest.param(f"street_{size}.mp4", marks=pytest.mark.long) for size in ("768x576", "1080p")]


@pytest.mark.parametrize("name", [*SHORT, *LONG])
def test_real_media(media_dir: Path, rng: np.random.Generator, name: str) -> None:
    source, config = media_dir / "video" / name, sm.decode_config(on_corrupt="keep")
    whole = sm.decode_packets(sm.demux_video(source), None, config)
    with sm.VideoFile(source, filter_desc=None, decode_config=config) as video:
        assert video.timestamps == whole.timestamps
        for _ in range(3):
            wanted = rng.integers(-len(video), len(video), size=6)
            for frame, k in zip(video[wanted], wanted, strict=True):
                assert all(map(np.array_equal, frame.planes, whole[k].planes))


def test_a_real_file_without_its_tables_is_refused(media_dir: Path) -> None:
    with pytest.raises(sm.DemuxError, match="this MP4 has no index"):
        sm.VideoFile(media_dir / "video" / "truncated.mp4")


def test_how_frames_are_numbered() -> None:
    for kinds, kind in ((BY_PACKETS, "packets"), (ONCE, "decoding"), (EACH_TIME, "counting")):
        for name in kinds:
            index = opened(name)._index
            found = "counting" if index.is_counted else "packets" if index.is_exact else "decoding"
            assert found == kind, name


def test_key_frames_and_rate() -> None:
    video = opened("mp4/libx265/2/closed")
    assert video.keyframes == (0, 8, 16, 24)
    assert opened("avi/libx264/3/open").keyframes == (0,)  # from which frames are counted
    assert video.frame_rate == 10
    assert (video.width, video.height, video.end) == (64, 48, 3.0)
    assert re.search("30 frames of 64x48 hevc", repr(video))
    single = make_video(index_planes(1, 64, 48), codec="libx264", format="mp4")
    assert ", 1 frame of 64x48 h264>" in repr(sm.VideoFile(single))


def test_one_frame_a_slice_and_arrays_of_indices() -> None:
    video = opened("mp4/libx265/2/closed")

    assert frame_index(video[-1].planes[0]) == 29
    assert frame_index(video[np.int64(3)].planes[0]) == 3
    assert indices(video[20:4:-7]) == [20, 13, 6]
    assert indices(video[np.array([9, 2, 9])]) == [9, 2, 9]
    assert (len(video[[]]), len(video[30:])) == (0, 0)
    with pytest.raises(
        TypeError, match="a VideoFile is not iterated, because each frame by itself"
    ):
        list(video)


def test_times_show_the_frame_that_began_last() -> None:
    video = sm.VideoFile(uneven("mp4"), filter_desc=None)
    seconds = [pts / 1000 for pts in UNEVEN]
    assert video.numbers_at(seconds) == list(range(len(UNEVEN)))
    assert video.numbers_at([0.05, "0.499", 0.5, Fraction(1, 2), 1.99]) == [1, 5, 6, 6, 15]
    # Sums of floats differ slightly from the exact time.
    assert opened("mp4/libx265/2/closed").numbers_at([0.1 + 0.2]) == [3]
    assert video.at([1.42]).timestamps == (1.401,)
    # Up to the end of the last frame, whose duration the file states; it is not the last in the file.
    assert video.end == pytest.approx(UNEVEN[-1] / 1000 + 0.032)
    assert video.numbers_at([video.end]) == [len(UNEVEN) - 1]
    for one in (0.5, "01", None):
        with pytest.raises(TypeError, match=r"times must be a sequence of seconds, .* not "):
            video.at(one)  # type: ignore[arg-type]
    for time in (-0.01, video.end + 0.01):
        match = (
            f"no frame is shown at {time} s: 18 frames are shown from 0.000 s to {video.end:.3f}"
        )
        with pytest.raises(ValueError, match=match):
            video.at([0.5, time])
    with pytest.raises(ValueError, match="a time must be finite, not inf"):
        video.at([float("inf")])


@pytest.mark.skipif(os.name == "nt", reason="Windows does not replace open files")
def test_frames_are_not_taken_from_a_file_that_replaced_the_opened_one(tmp_path: Path) -> None:
    """FFmpeg opens an AVI again for frames before those that were read."""
    path, other = tmp_path / "clip.avi", tmp_path / "other.avi"
    path.write_bytes(clip("avi/libx264/3/open"))
    other.write_bytes(clip("avi/ffv1/0/closed"))
    os.utime(other, (1, 1))
    with sm.VideoFile(path, filter_desc=None) as video, sm.Demuxer(path) as demuxer:
        packets = demuxer.demux_video()
        assert frame_index(video[20].planes[0]) == 20
        other.replace(path)
        for read_again in (lambda: video[3], demuxer.demux_video):
            with pytest.raises(
                sm.SourceError, match=r"clip.avi: it was replaced while it was open"
            ):
                read_again()
    assert len(sm.decode_packets(packets, None)) == NUM_FRAMES


def test_times_are_right_where_a_format_has_those_of_decoding_alone() -> None:
    for kind in ("asf/libx264/2/closed", "avi/libx264/3/open"):
        assert opened(kind).timestamps == tuple(k / 10 for k in range(NUM_FRAMES))
        found = sm.decode_packets(sm.demux_video(clip(kind), timestamp=(0.5, 0.9)), None)
        assert indices(found) == [5, 6, 7, 8]
    assert opened("MPEG-1 in AVI").timestamps == tuple(k / 25 for k in range(NUM_FRAMES))


def test_times_that_step_back_are_refused() -> None:
    """MPEG-2 in ASF has decoding times; after a segment of an edit list, FFmpeg continues too early."""
    for kind, number in (("asf/mpeg2video/2/closed", 3), ("edited", 10)):
        video = opened(kind)
        assert video.timestamps[number] < video.timestamps[number - 1]
        match = f"the times of the frames step back at frame {number}, so the frame at a time is unknown"
        with pytest.raises(sm.DemuxError, match=match):
            video.at([0.5])
        with pytest.raises(sm.DemuxError, match=match):
            sm.sample_clips(video, num_frames=2, frame_rate=5)
        assert len(sm.sample_clips(sm.VideoFile(file_of(kind)), num_frames=2).indices) == 1


def test_the_other_stream_is_numbered_too() -> None:
    video = sm.VideoFile(two_streams(), video_stream_index=1, filter_desc=None)
    assert indices(video[[0, 19]]) == [19, 0]
    with pytest.raises(sm.DemuxError, match="there is no stream 2"):
        sm.VideoFile(two_streams(), video_stream_index=2)


def test_load_is_load_video_by_number() -> None:
    data = clip("mp4/libx265/2/closed")
    with sm.VideoFile(data) as video:
        for options in (
            {},
            {"width": 32, "height": 32},
            {
                "width": 33,
                "layout": "NCHW",
                "dtype": "float32",
                "mean": 0.5,
                "std": (0.1, 0.2, 0.3),
            },
            {"pix_fmt": "yuv420p"},
            {"filter_desc": "hflip,format=rgb24"},
            # This decoder delays frames.
            {"filter_desc": "tmix=frames=1,reverse,reverse,format=gray"},
        ):
            whole = np.asarray(sm.load_video(data, **options))
            found = video.load([7, 3, -1, 7], **options)
            np.testing.assert_array_equal(np.asarray(found), whole[[7, 3, -1, 7]])
        storage = sm.cpu_storage(4 * 64 * 48 * 3, pin_memory=False)
        assert np.asarray(video.load(slice(4), storage=storage)).shape == (4, 48, 64, 3)
        with pytest.raises(sm.StorageTooSmallError):
            video.load(slice(5), storage=storage)


def test_all_frames_of_a_load_are_cut_alike(rng: np.random.Generator) -> None:
    video = sm.VideoFile(clip("mp4/libx265/2/closed"))
    whole = np.asarray(video.load([5, 20]))
    cut = video.load([5, 20], crops=(8, 4, 32, 24), flips=True)
    np.testing.assert_array_equal(np.asarray(cut), whole[:, 4:28, 8:40][:, :, ::-1])
    assert (cut.boxes, cut.flips) == (((8, 4, 32, 24),), (True,))
    drawn = video.load([5, 20], width=16, height=16, crops=sm.RandomResizedCrop(), rng=rng)
    assert len(drawn.boxes or ()) == 1
    with pytest.raises(sm.ConvertError, match="does not lie inside the image, which is 64x48"):
        video.load([0], crops=(60, 0, 8, 8))


def test_filters_that_leave_frames_out_are_refused() -> None:
    data = clip("mp4/libx265/2/closed")
    with pytest.raises(sm.FilterError, match="the filters output fewer frames than they take"):
        sm.VideoFile(data, filter_desc="select='not(mod(n,2))'")[[1, 2, 3]]
    with pytest.raises(sm.FilterError, match="the filters output more frames than they take"):
        sm.VideoFile(data).load([1, 9], filter_desc="loop=2:1,format=rgb24")
    with pytest.raises(ValueError, match=r"a filter_desc with frame_rate=.* chooses frames itself"):
        sm.VideoFile(data, filter_desc=sm.get_video_filter_desc(frame_rate=5))[0]


# Amount of work.


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list of the numbers of all decoded frames."""
    frames: list[int] = []
    send = PictureDecoder._send

    def counted(self: Any, packet: Any) -> Any:
        found = send(self, packet)
        frames.extend(frame_index(np.asarray(frame.to_ndarray()[:48])) for frame in found)
        return found

    monkeypatch.setattr(PictureDecoder, "_send", counted)
    return frames


def test_groups_are_decoded_once_without_what_nobody_needs(sent: list[int]) -> None:
    with sm.VideoFile(clip("mp4/libx264/3/open"), filter_desc=None) as video:
        assert video.keyframes == (0, 8, 16, 24)
        video[[9, 25, 9, 10]]
        assert sorted(set(sent)) == sorted(sent)
        # Frames 8 and 24, and those before 9, 10 and 25 in decoding order; B-frames that other B frames refer
        # to are needed, other ones are not.
        assert set(sent) <= {8, 9, 10, 11, 12, 24, 25, 26, 27, 28, 29}
        sent.clear()
        # There are three B-frames in a row, of which the middle one is a reference of the other two.
        video[[0, 4]]
        assert 1 not in sent
        assert 3 not in sent


@pytest.mark.parametrize("reorder", [False, True])
@pytest.mark.parametrize("format", ["h264", "mpegts", "matroska", "mp4"])
def test_frames_of_two_fields_each(
    format: str, reorder: bool, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In raw streams and MPEG-TS, FFmpeg returns each field as a packet, the second without a time."""
    drawn = index_planes(20, 64, 64)
    data = field_coded_file(drawn, format, gop_size=6, reorder=reorder)
    with av.open(io.BytesIO(data), format=format) as container:
        packets = sum(packet.size > 0 for packet in container.demux(video=0))
        assert packets == (40 if format in ("h264", "mpegts") else 20)
    count, send = 0, PictureDecoder._send

    def counted(self: Any, packet: Any) -> Any:
        nonlocal count
        found = send(self, packet)
        count += len(found)
        return found

    monkeypatch.setattr(PictureDecoder, "_send", counted)
    with sm.VideoFile(data, filter_desc=None) as video:
        assert len(video) == 20
        assert list(video.timestamps) == [number / 25 for number in range(20)] or format == "h264"
        for _ in range(5):
            numbers = rng.integers(-20, 20, 4).tolist()
            for number, frame in zip(numbers, video[numbers], strict=True):
                assert all(map(np.array_equal, frame.planes, drawn[number]))
        count = 0
        video[[13, 19]]
        # Frames 12 to 19, and the packets that are needed to output them.
        assert count <= (20 if format == "h264" else 10)


@pytest.mark.parametrize("format", ["matroska", "mp4"])
def test_fields_that_are_packets_of_their_own(format: str) -> None:
    drawn = index_planes(20, 64, 64)
    data = field_coded_file(drawn, format, is_split=True)
    with sm.VideoFile(data, filter_desc=None) as video:
        assert video.timestamps == sm.decode_packets(sm.demux_video(data)).timestamps
        for number, frame in zip((19, 7), video[[19, 7]], strict=True):
            assert all(map(np.array_equal, frame.planes, drawn[number]))


def test_one_file_and_decoder_serve_call_after_call(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def count(patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            made.append(name)
            return original(*args, **kwargs)

        patch.setattr(owner, name, counted)

    for kind in ("mp4/libx264/3/open", "matroska/libx265/2/open", "mpegts/libx264/3/open"):
        with sm.VideoFile(clip(kind)) as video:
            video.load([3, 20], width=32, height=32)
            with monkeypatch.context() as patch:
                count(patch, inputs.Input, "open")
                count(patch, codec, "make_decoder")
                count(patch, frame_decoder, "PictureFilter")
                count(patch, filters, "FrameFilter")
                for wanted in ([1, 2, 3], [29], [0], [17, 4]):
                    video.load(wanted, width=32, height=32)
    assert made == []


class Counting(io.BytesIO):
    """A file object that records reads."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.count = 0

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self.count += len(data)
        return data


@cache
def long_video(format: str) -> bytes:
    """Make two megabytes with 20 GOPs that differ."""
    noise = np.random.default_rng(0).integers(0, 256, (100, 96, 128), np.uint8)
    return make_video(list(noise), codec="libx264", format=format, gop_size=5, pix_fmt="gray")


@pytest.mark.parametrize("format", ["mp4", "matroska"])
def test_only_the_bytes_of_the_groups_are_read(format: str, tmp_path: Path) -> None:
    data = long_video(format)
    path = tmp_path / "index"
    sm.VideoFile(data).save_index(path)
    file = Counting(data)
    with sm.VideoFile(file, index=path) as video:
        file.count = 0
        video[52]
        assert len(data) / 50 < file.count < len(data) / 10
        file.count = 0
        video[[2, 97]]
        assert file.count < len(data) / 5


def test_a_url_is_read_in_the_ranges_of_the_groups() -> None:
    pytest.importorskip("fsspec")
    pytest.importorskip("aiohttp")
    data = long_video("mp4")
    with serve({"long.mp4": data}) as server, sm.VideoFile(f"{server.url}/long.mp4") as video:
        # The tables are at the end; reads before them are those with which FFmpeg opens the file.
        assert server.bytes_sent["long.mp4"] < len(data) / 2
        server.reset()
        assert video[52].timestamp == 5.2
        # 64 KiB for each GOP of about 100 KB, and one that is read ahead.
        assert server.bytes_sent["long.mp4"] < len(data) / 6


def test_the_index_of_an_mp4_reads_no_coded_data() -> None:
    for kind in ("mp4/libx264/3/open", "mp4/libx264/2/fragments", "mp4/libx264/2/dash"):
        data, read = clip(kind), []

        def read_at(start: int, size: int, data: bytes = data, read: list[Any] = read) -> bytes:
            read.append((start, size))
            return data[start : start + size]

        samples = packet_table.read_samples(read_at, len(data), 1)
        assert samples is not None
        assert len(samples.dts) == NUM_FRAMES
        # 16 bytes are read of each other box, whose header has 8 or 16 bytes.
        for start, size in read:
            inside = (samples.places >= start) & (samples.places < start + size)
            assert size == 16 or not inside.any(), (kind, start, size)


@each("kind", ["open", "negative", "fragments", "dash", "two tracks", "a gap"])
def test_the_tables_of_an_mp4_say_what_its_packets_do(kind: str) -> None:
    """A table that is read wrongly is often not used, so that all packets are read instead."""
    if kind == "two tracks":  # places are counted from the start of the file here
        video = VideoTrack(frames=planes(), codec="libx264", gop_size=8, max_b_frames=2)
        sound = AudioTrack(samples=index_samples(144000), codec="aac")
        options = {"movflags": "frag_keyframe+empty_moov+negative_cts_offsets"}
        data = make_media([sound, video], format="mp4", options=options)
    elif kind == "a gap":  # without the second fragment
        data = clip("mp4/libx264/2/fragments")
        _, start, end, *_ = (found.start() - 4 for found in re.finditer(b"moof", data))
        data = data[:start] + data[end:]
    else:
        data = clip(f"mp4/libx264/2/{kind}")
    with av.open(io.BytesIO(data)) as file:
        stream = file.streams.video[0]
        packets = [packet for packet in file.demux(stream) if packet.size]
        number = stream.id
    samples = packet_table.read_samples(functools.partial(part_of, data), len(data), number)
    assert samples is not None
    rows = [(p.pos, p.size, p.is_keyframe, p.duration, p.dts, p.pts) for p in packets]
    kept = samples.places, samples.sizes, samples.is_key, samples.durations
    found = np.stack([*kept, samples.dts, samples.dts + samples.offsets], axis=1)
    # FFmpeg shifts all times.
    found[:, -2:] += np.array(rows[0][-2:]) - found[0, -2:]
    assert found.tolist() == [list(map(int, row)) for row in rows]


# Errors.


def part_of(data: bytes, start: int, size: int) -> bytes:
    return data[start : start + size]


def test_damaged_tables_of_an_mp4_ask_for_no_memory() -> None:
    """The tables claim four billion entries, in a file of some kilobytes."""
    most = b"\xff\xff\xff\xff"
    for kind, box, at in (
        ("mp4/libx264/3/open", b"stts", 12),
        ("mp4/libx264/3/open", b"ctts", 12),
        ("mp4/libx264/3/open", b"stsz", 12),
        ("mp4/libx264/2/fragments", b"trun", 8),
    ):
        data = bytearray(clip(kind))
        start = data.index(box)
        data[start + at : start + at + 4] = most
        if box == b"stsz":
            data[start + 8 : start + 12] = b"\0\0\0\1"
        if box == b"trun":
            data[start + 5 : start + 8] = b"\0\0\0"  # no columns: the header applies to all samples
        read = functools.partial(part_of, bytes(data))
        tracemalloc.start()
        try:
            assert packet_table.read_samples(read, len(data), 1) is None
            assert tracemalloc.get_traced_memory()[1] < 1 << 24
        finally:
            tracemalloc.stop()


def test_tables_that_an_mp4_lacks_are_no_table() -> None:
    for kind, box in (
        *(("mp4/libx264/3/open", box) for box in (b"tkhd", b"stbl", b"stsz")),
        ("mp4/libx264/2/fragments", b"tfhd"),
    ):
        data = clip(kind).replace(box, b"free")
        assert packet_table.read_samples(functools.partial(part_of, data), len(data), 1) is None


def test_key_frames_beyond_the_last_sample_are_no_table() -> None:
    data = bytearray(clip("mp4/libx264/3/open"))
    first = data.index(b"stss") + 12
    assert data[first : first + 4] == b"\0\0\0\1"
    data[first + 3] = NUM_FRAMES + 1
    assert packet_table.read_samples(functools.partial(part_of, bytes(data)), len(data), 1) is None
    with sm.VideoFile(bytes(data), filter_desc=None) as video:
        assert frame_index(video[0].planes[0]) == 0


def test_packets_without_units_are_damaged() -> None:
    """With another version, the header does not define lengths, and there are no start codes."""
    data = clip("mp4/libx264/3/open").replace(b"avcC\1", b"avcC\3")
    with pytest.raises(sm.DecodeError):
        sm.decode_packets(sm.demux_video(data))
    with pytest.raises(sm.DecodeError):
        sm.VideoFile(data)[0]


def test_indices_that_there_are_not() -> None:
    video = opened("mp4/libx265/2/closed")
    for index in (30, -31):
        with pytest.raises(IndexError, match=rf"there is no frame {index} among 30 frames"):
            video[[0, index]]
    for wrong in ("3", 1.5, [1.0], [True]):
        with pytest.raises(TypeError, match=r"must be an int|are indexed by an int"):
            video[wrong]  # type: ignore[call-overload]
    with pytest.raises(sm.ConvertError, match="the indices are empty"):
        video.load([])


def test_an_index_is_saved_and_serves_its_own_file_alone(tmp_path: Path) -> None:
    for kind in ("matroska/libx265/2/open", "mpegts/libx264/2/interlaced", "avi/libx264/3/open"):
        path = tmp_path / "saved"
        opened(kind).save_index(path)
        assert [one.name for one in tmp_path.iterdir()] == ["saved"]
        with sm.VideoFile(clip(kind), index=path, filter_desc=None) as video:
            assert video.timestamps == decoded(kind).timestamps
            found = indices(video[[9, 2]])
            assert found == [frame_index(decoded(kind)[k].planes[0]) for k in (9, 2)]
    data = clip("avi/libx264/3/open")
    for other, what in (
        (data + b"\0", f"'size': {len(data)}, .* not .*'size': {len(data) + 1}"),
        (data[:40] + b"\1" + data[41:], "checksum of header"),
    ):
        with pytest.raises(sm.SourceError, match=rf"the index is not that of bytes.*{what}"):
            sm.VideoFile(other, index=path)
    saved = path.read_bytes()
    for wrong in (
        b"frames",
        saved[:-8],
        saved[:8],
        saved[:-1] + b"\7",
    ):
        path.write_bytes(wrong)
        with pytest.raises(sm.SourceError, match="not an index of a video, or it is damaged"):
            sm.VideoFile(data, index=path)
    with pytest.raises(sm.SourceError, match="the index cannot be read: No such file"):
        sm.VideoFile(data, index=tmp_path / "none")


def test_threads_save_an_index_at_one_path(tmp_path: Path) -> None:
    video, path = opened("mp4/libx265/2/closed"), tmp_path / ("n" * 250)
    index, identity = video._index, video._file.identity
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: _frame_index.save(path, index, identity), range(400)))
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
    with pytest.raises(sm.WriteError, match="cannot be written: No such file or directory"):
        video.save_index(tmp_path / "none" / "saved")


def test_a_video_that_was_cut_short_names_its_first_missing_frame() -> None:
    data = make_video(planes(), codec="libx264", format="mp4", gop_size=4, faststart=True)
    video = sm.VideoFile(data[: len(data) * 2 // 3], filter_desc=None)
    assert len(video) == NUM_FRAMES
    assert frame_index(video[9].planes[0]) == 9
    with pytest.raises(
        sm.DecodeError,
        match=r"frame (\d+) of 30, at 2\.\d00 s, is missing: the data ends before it",
    ) as info:
        video[[9, 29, 22]]
    assert info.value.packet_index == 22
    assert info.value.pts_seconds == 2.2
    # A file whose packets are in no table makes no promise.
    cut = clip("matroska/ffv1/0/closed")[:-4000]
    with pytest.raises(
        sm.DecodeError, match=r"cut short: the data ends after.*decodes what is there"
    ):
        sm.VideoFile(cut)
    keep = sm.decode_config(on_corrupt="keep")
    assert 0 < len(sm.VideoFile(cut, decode_config=keep)) < NUM_FRAMES


def test_a_packet_that_is_cut_short_is_no_frame() -> None:
    """FFmpeg makes a frame of a part of a VP9 packet without an error."""
    data = make_video(planes(), codec="libvpx-vp9", format="mp4", faststart=True)
    with av.open(io.BytesIO(data)) as file:
        packet = next(
            packet for packet in file.demux(video=0) if packet.pts == packet.duration * 12
        )
        cut = data[: packet.pos + packet.size * 9 // 10]
    with pytest.raises(sm.DecodeError, match=r"frame 12 of 30.*missing: the data ends before it"):
        sm.VideoFile(cut)[12]
    keep = sm.decode_config(on_corrupt="keep")
    assert sm.VideoFile(cut, decode_config=keep)[12].timestamp == 1.2


def test_a_video_whose_frames_are_not_found_is_an_error() -> None:
    whole = clip("mp4/libx264/3/open")
    count = NUM_FRAMES.to_bytes(4, "big")
    start = whole.index(b"stsz") + 12
    data = bytearray(whole)
    assert data[start : start + 4] == count
    data[start : start + 4] = bytes(4)
    with pytest.raises(sm.DecodeError, match="the file has no frames, but its header stat"):
        sm.VideoFile(bytes(data))
    keep = sm.decode_config(on_corrupt="keep")
    with sm.VideoFile(bytes(data), decode_config=keep) as video:
        assert (len(video), video.timestamps, video.keyframes, video.end) == (0, (), (), 0)
        with pytest.raises(IndexError, match="there is no frame 0 among 0 frames"):
            video[0]
        with pytest.raises(ValueError, match="no frame is shown at 0 s: 0 frames"):
            video.at([0])
        with pytest.raises(sm.ConvertError, match="the video has no frames, so there is no clip"):
            sm.sample_clips(video, num_frames=1)


@pytest.mark.parametrize("codec", ["libx264", "libx265"])
def test_a_frame_that_is_wrongly_listed_as_a_key_frame(codec: str) -> None:
    """The decoder of H.264 gives no frame from there on, that of HEVC an error."""
    data = bytearray(make_video(planes(), codec=codec, format="mp4", gop_size=15))
    second = data.index(b"stss") + 16
    assert data[second : second + 4] == bytes((0, 0, 0, 16))
    data[second + 3] = 8
    with sm.VideoFile(bytes(data), filter_desc=None) as video:
        assert video.keyframes == (0, 7)
        assert frame_index(video[10].planes[0]) == 10


def test_damage_is_an_error() -> None:
    with pytest.raises(sm.DecodeError, match=r"damaged mpeg4 data at .* \(packet \d+\)"):
        sm.VideoFile(damaged())[:]
    assert sm.VideoFile(damaged(), filter_desc=None)[0].timestamp == 0


def test_sources_that_have_no_numbered_frames() -> None:
    with pytest.raises(sm.DemuxError, match="there is no video stream"):
        sm.VideoFile(make_audio(index_samples(1000, 1)))
    with pytest.raises(sm.DemuxError, match="the source cannot seek"):
        sm.VideoFile(_Pipe(clip("matroska/ffv1/0/closed")))
    with pytest.raises(ValueError, match=r"on_corrupt='drop'.* would change the indices"):
        sm.VideoFile(
            clip("matroska/ffv1/0/closed"), decode_config=sm.decode_config(on_corrupt="drop")
        )
    video = sm.VideoFile(clip("matroska/ffv1/0/closed"))
    frames = video[[3]]
    video.close()
    assert frame_index(frames[0].planes[0][..., 0]) == 3
    for call in (lambda: video[3], lambda: video.save_index("index"), video.demux_audio):
        with pytest.raises(ValueError, match="this VideoFile is closed"):
            call()


class _Pipe(io.RawIOBase):
    def __init__(self, data: bytes) -> None:
        super().__init__()
        self._file = io.BytesIO(data)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._file.readinto(buffer)


def test_threads_wait_for_each_other() -> None:
    video, found = sm.VideoFile(clip("mp4/libx265/2/open"), filter_desc=None), {}

    def read(start: int) -> None:
        wanted = [(start + 7 * k) % NUM_FRAMES for k in range(12)]
        frames = [video[k] for k in wanted]
        found[start] = wanted == indices(frames)

    threads = [threading.Thread(target=read, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(4), True)


def test_a_mask_of_torch_is_refused_as_other_masks_are() -> None:
    """Its elements are valid indices of Python: 0 and 1."""
    torch = pytest.importorskip("torch")
    with sm.VideoFile(clip("mp4/libx265/2/open")) as video:
        assert len(video[torch.tensor([3, 1])]) == 2
        with pytest.raises(TypeError, match=r"must be an int, not tensor\(False\)"):
            video[torch.zeros(NUM_FRAMES, dtype=torch.bool)]


@forks
def test_a_fork_opens_the_file_anew_by_a_cache(tmp_path: Path) -> None:
    """Processes share the position in an open file: frames were missing, or those of another place."""
    images = np.random.default_rng(0).integers(0, 256, (30, 320, 320, 3), np.uint8)
    path = tmp_path / "noise.avi"
    path.write_bytes(make_video(images, codec="ffv1", pix_fmt="bgr0", gop_size=1, format="avi"))
    cache = sm.VideoCache()
    with sm.VideoFile(path) as video:
        cache.open(path).load([0])

        def check() -> None:
            np.testing.assert_array_equal(cache.open(path).load([20]).array[0], images[20])
            assert video.closed
            with pytest.raises(ValueError, match=r"opened before the fork .* Open it in each"):
                video[20]

        check_in_fork(check)
        np.testing.assert_array_equal(video.load([1]).array[0], images[1])


@forks
def test_a_fork_does_not_wait_for_threads_of_the_decoder() -> None:
    """It also drops and closes the decoders of its parent, and exits, without waiting."""
    data = make_video(planes(), codec="libx264", format="mp4")
    config = sm.decode_config(decoder_options={"threads": 2})
    packets = sm.demux_video(data)
    videos = [sm.VideoFile(data, decode_config=config) for _ in range(3)]
    decoders = [sm.VideoDecoder(packets.codec, decode_config=config)]
    for number in range(3):
        videos[number].load([3])
    next(decoders[0].decode(packets))

    def check() -> None:
        decoders.clear()
        del videos[0]
        videos[0].close()

    finish = start_fork(check)
    for video in videos:
        video.close()
    finish()


@forks
def test_a_fork_does_not_wait_for_a_thread_that_it_lacks(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (30, 64, 64, 3), np.uint8)
    data = make_video(images, codec="ffv1", pix_fmt="bgr0", gop_size=10, format="avi")
    (tmp_path / "noise.avi").write_bytes(data)
    decoding, forked = threading.Event(), threading.Event()

    def wait(*_: object) -> tuple[int, int, int, int]:
        decoding.set()
        assert forked.wait(60)
        return 0, 0, 64, 64

    cache = sm.VideoCache()
    video = cache.open(tmp_path / "noise.avi")
    thread = threading.Thread(target=video.load, args=([5],), kwargs={"crops": wait})
    thread.start()
    assert decoding.wait(60)

    def check() -> None:
        video.close()
        again = cache.open(tmp_path / "noise.avi")
        np.testing.assert_array_equal(again.load([24]).array[0], images[24])

    finish = start_fork(check)
    forked.set()
    thread.join()
    finish()
