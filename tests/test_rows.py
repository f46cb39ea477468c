"""``load_video`` writes each frame directly to its row, with the same result as converting all frames."""

from __future__ import annotations

import gc
import io
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import av
import numpy as np
import pytest
from damage import packet_spans
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import spdl_media as sm
from spdl_media import video_arrays
from spdl_media.formats import PIXEL_LAYOUTS
from spdl_media.testing import VideoTrack, index_frames, index_planes, make_media, make_video

COUNT = 9
FORMATS = ("yuv420p", "yuv422p", "yuv444p", "yuv420p10le", "gray", "gbrp10le")
DEEP = ("gray10", "gray16le", "yuv420p10le", "yuv422p12le", "yuv444p16le", "gbrp10le", "gbrap12le")


@cache
def stored(pix_fmt: str, width: int, height: int) -> bytes:
    return make_video(index_planes(COUNT, width, height, pix_fmt), pix_fmt=pix_fmt)


@cache
def turned(orientation: int, width: int, height: int) -> bytes:
    frames = index_frames(COUNT, width, height)
    track = VideoTrack(
        frames=frames, codec="libx264rgb", pix_fmt="rgb24", orientation=orientation, frame_rate=10
    )
    return make_media([track], format="mp4")


def outcome(make: Callable[[], Any]) -> Any:
    """Return an array with its metadata, or an error."""
    try:
        buffer = make()
    except (sm.MediaError, ValueError) as error:
        return type(error), str(error)
    array = np.asarray(buffer)
    return array.dtype, array.shape, array.tobytes(), buffer.colorspace, buffer.color_range


def check(
    source: bytes,
    desc: str | None,
    *,
    window: Any = None,
    num_frames: int | None = None,
    layout: Any = None,
    make_storage: Callable[[], Any] = lambda: None,
) -> None:
    def kept() -> Any:
        packets = sm.demux_video(source, timestamp=window)
        frames = sm.decode_packets(packets, desc, num_frames=num_frames)
        return sm.convert_frames(frames, make_storage(), layout=layout)

    def rows() -> Any:
        return sm.load_video(
            source,
            window,
            filter_desc=desc,
            num_frames=num_frames,
            layout=layout,
            storage=make_storage(),
        )

    assert outcome(rows) == outcome(kept)


STORAGES: tuple[Callable[[], Any], ...] = (
    lambda: None,
    lambda: sm.cpu_storage(1 << 20, pin_memory=False),
    lambda: sm.StoragePool(1 << 20, 1, pin_memory=False),
    lambda: sm.cpu_storage(3000, pin_memory=False),  # too small for most
)
DESCS = st.one_of(
    st.just(None),
    st.sampled_from(["format=rgb24", "hflip,format=gray", "fps=25,format=rgb24", "tpad=stop=3"]),
    st.builds(
        sm.get_video_filter_desc,
        pix_fmt=st.sampled_from(["rgb24", "bgr24", "gray", "yuv420p", "gbrp", None]),
        scale_width=st.sampled_from([None, 16, 21]),
        scale_height=st.sampled_from([None, 16]),
        frame_rate=st.sampled_from([None, 4, 25]),
        quality=st.sampled_from(["accurate", "auto", "fast"]),
    ),
)


@settings(max_examples=examples(160), deadline=None)
@given(
    pix_fmt=st.sampled_from(FORMATS),
    size=st.sampled_from([(32, 24), (33, 25), (48, 17)]),
    orientation=st.sampled_from([None, None, 1, 3, 6, 8]),
    desc=DESCS,
    window=st.sampled_from([None, (0.2, 0.5), (0.35, None), (None, 0.4), (50, 60)]),
    num_frames=st.sampled_from([None, 1, 4, 50]),
    layout=st.sampled_from([None, None, "NCHW", "NHWC"]),
    make_storage=st.sampled_from(STORAGES),
)
def test_rows_equal_frames_that_are_converted(
    pix_fmt: str,
    size: tuple[int, int],
    orientation: int | None,
    desc: str | None,
    window: Any,
    num_frames: int | None,
    layout: Any,
    make_storage: Callable[[], Any],
) -> None:
    source = stored(pix_fmt, *size) if orientation is None else turned(orientation, 32, 24)
    check(
        source,
        desc,
        window=window,
        num_frames=num_frames,
        layout=layout,
        make_storage=make_storage,
    )


def test_rows_of_every_format() -> None:
    source = stored("yuv444p", 32, 24)
    for pix_fmt in (*PIXEL_LAYOUTS, *DEEP, "pal8", "yuv410p"):
        check(source, f"format={pix_fmt}")


def test_more_frames_than_can_be_expected() -> None:
    for stop in (7, 60, 500, 3000):  # within the reserved memory, and beyond it
        check(stored("gray", 32, 24), f"tpad=stop_mode=clone:stop={stop}")
    check(stored("gray", 32, 24), sm.get_video_filter_desc(frame_rate=1000))


def test_frames_that_change_their_format() -> None:
    small, large = stored("yuv420p", 32, 24), stored("yuv420p", 48, 17)
    first, second = (sm.demux_video(data) for data in (small, large))
    assert len(first) == len(second) == COUNT
    for desc in ("scale=w='if(lt(n,3),32,16)':h=24:eval=frame", "null"):
        check(small, desc)


@pytest.mark.parametrize("desc", [None, "format=rgb24"])
def test_a_storage_that_is_too_small_gets_its_block_back(desc: str | None) -> None:
    pool = sm.StoragePool(3 * 32 * 24 * 2, 1, pin_memory=False)
    source = stored("yuv420p", 32, 24)
    needed = COUNT * 32 * 24 * (3 if desc else 1.5)
    with pytest.raises(sm.StorageTooSmallError, match=f"takes {needed:.0f} bytes") as caught:
        sm.load_video(source, filter_desc=desc, storage=pool)
    assert pool.num_free == 1
    assert caught.value


def test_damage_in_the_middle_frees_all() -> None:
    checked = {"level": "3", "slicecrc": "1"}
    data = bytearray(make_video(index_frames(COUNT, 64, 48), gop_size=1, options=checked))
    start, stop = packet_spans(bytes(data), "video")[COUNT - 2]
    data[(start + stop) // 2] ^= 0xFF
    pool = sm.StoragePool(1 << 20, 1, pin_memory=False)
    with pytest.raises(sm.DecodeError) as caught:
        sm.load_video(bytes(data), storage=pool)
    assert caught.value.packet_index == COUNT - 2
    assert pool.num_free == 1  # while the error and its traceback are held


def test_a_frame_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one frame more than the decoder holds lives at any time."""
    from spdl_media.rows import RowPlan

    alive: list[int] = []
    copy = RowPlan.copy

    def spy(plan: Any, frame: Any, places: Any, row: int) -> None:
        copy(plan, frame, places, row)
        alive.append(sum(isinstance(o, type(frame)) for o in gc.get_objects()))

    monkeypatch.setattr(RowPlan, "copy", spy)
    sm.load_video(stored("yuv420p", 32, 24))
    assert len(alive) == COUNT
    assert 1 <= max(alive) <= alive[0] + 1


@pytest.mark.parametrize("part", [1, 9000])
def test_a_long_video_that_is_cut_short_says_so(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last packet is always in the last part, for all sizes of parts."""
    monkeypatch.setattr(video_arrays, "_PART_BYTES", part)
    whole = make_video(index_frames(COUNT, 64, 48), gop_size=1)
    start, stop = packet_spans(whole, "video")[-1]
    data = whole[: (start + stop) // 2]
    expected = outcome(lambda: sm.convert_frames(sm.decode_packets(sm.demux_video(data))))
    assert expected[0] is sm.DecodeError
    assert outcome(lambda: sm.load_video(data)) == expected
    assert len(sm.load_video(data, num_frames=COUNT - 2)) == COUNT - 2


@pytest.mark.parametrize("part", [video_arrays._PART_BYTES, 2000])
def test_a_video_that_begins_between_key_frames_is_read_up_to_one(
    part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packets without any key frame would be decoded as intra refresh."""
    monkeypatch.setattr(video_arrays, "_PART_BYTES", part)
    whole = make_video(index_frames(60, 64, 48), codec="mpeg4", format="mp4", gop_size=40)
    cut = io.BytesIO()
    with av.open(io.BytesIO(whole)) as file, av.open(cut, "w", format="mp4") as sink:
        stream = sink.add_stream_from_template(file.streams.video[0])
        for number, packet in enumerate(list(file.demux(video=0))[:-1]):
            packet.stream = stream
            packet.is_keyframe &= number > 0
            sink.mux(packet)
    expected = sm.convert_frames(sm.decode_packets(sm.demux_video(cut.getvalue()))).array
    assert len(expected) == 20
    for num_frames in (1, 5, None):
        found = sm.load_video(cut.getvalue(), num_frames=num_frames).array
        assert np.array_equal(found, expected[:num_frames])


MEASURE = """
import sys
import spdl_media as sm
def memory(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name)) * 1024
before = memory("VmRSS")
buffer = sm.load_video(sys.argv[1], width=int(sys.argv[2]))
# Not getrusage(), whose peak is also that of the process that started this one.
print(buffer.nbytes, memory("VmHWM") - before)
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="the resident size is read from /proc")
def test_peak_memory_is_the_array_and_little_more(tmp_path: Any) -> None:
    frame = np.full((480, 640, 3), 90, np.uint8)
    path = tmp_path / "made.nut"
    # One has a large array, the other a large file.
    for codec, width in (("mpeg4", 640), ("rawvideo", 32)):
        path.write_bytes(make_video([frame] * 240, codec=codec, format="nut"))
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, str(path), str(width)],
            capture_output=True,
            text=True,
            check=True,
        )
        nbytes, peak = map(int, done.stdout.split())
        assert nbytes == 240 * 3 * width * (width * 3 // 4)
        assert peak <= nbytes + (96 << 20)
