"""convert_frames of images and videos: one copy without further allocations; errors name the frames."""

from __future__ import annotations

import gc
import io
import sys
import threading
import time
import tracemalloc
from typing import Any

import av
import numpy as np
import pytest
from effort import each
from plane_oracle import ROWS, frame_of, image, rgb, sound

import spdl_media as sm
from spdl_media.testing import (
    VideoTrack,
    frame_index,
    index_frames,
    index_planes,
    make_image,
    make_media,
    make_video,
)

BY_NAME = {row.pix_fmt: row for row in ROWS}


@pytest.fixture(scope="module")
def clip() -> bytes:
    return make_video(index_planes(20, 64, 48), codec="libx265", frame_rate=10)


def test_frames_of_files_are_what_the_files_hold(clip: bytes) -> None:
    frames = sm.decode_packets(sm.demux_video(clip), filter_desc=None)
    array = sm.convert_frames(frames).array
    assert array.shape == (20, 1, 72, 64)
    assert [frame_index(one[0, :48]) for one in array] == list(range(20))
    pictures = index_frames(3, 32, 24)
    images = [sm.decode_packets(sm.demux_image(make_image(one))) for one in pictures]
    assert np.array_equal(sm.convert_frames(images).array, pictures)


@pytest.mark.parametrize("empty", ["video", "audio"])
def test_a_stream_without_a_frame_is_reported(empty: str) -> None:
    """The file is a fragmented MP4 with two tracks, one of which has no packets."""
    file = io.BytesIO()
    options = {"movflags": "empty_moov+default_base_moof"}
    with av.open(file, "w", format="mp4", options=options) as muxer:
        video, audio = muxer.add_stream("mpeg4", rate=10), muxer.add_stream("aac", rate=8000)
        video.width, video.height, video.pix_fmt = 32, 32, "yuv420p"
        muxer.start_encoding()
        if empty == "audio":
            muxer.mux(video.encode(av.VideoFrame(32, 32, "yuv420p")) + video.encode(None))
        else:
            samples = np.zeros((audio.layout.nb_channels, 4096), np.float32)
            frame = av.AudioFrame.from_ndarray(samples, "fltp", audio.layout)
            frame.sample_rate = 8000
            muxer.mux(audio.encode(frame) + audio.encode(None))
    demux = sm.demux_video if empty == "video" else sm.demux_audio
    frames = sm.decode_packets(demux(file.getvalue()))
    assert len(frames) == 0
    for item in (frames, [frames]):
        with pytest.raises(sm.ConvertError, match=r"there is no (frame|sample) in the stream"):
            sm.convert_frames(item)


def test_frames_are_not_consumed(clip: bytes) -> None:
    frames = sm.decode_packets(sm.demux_video(clip))
    first, second = sm.convert_frames(frames), sm.convert_frames(frames)
    assert np.array_equal(first.array, second.array)
    assert not np.shares_memory(first.array, second.array)


def test_parts_of_a_video(clip: bytes) -> None:
    frames = sm.decode_packets(sm.demux_video(clip), filter_desc=None)
    whole = sm.convert_frames(frames).array
    assert np.array_equal(sm.convert_frames(frames[3]).array, whole[3])
    assert np.array_equal(sm.convert_frames(frames[2:9:3]).array, whole[2:9:3])
    assert np.array_equal(sm.convert_frames(list(frames)).array, whole)
    assert np.array_equal(sm.convert_frames([frames[:5], frames[5:10]]).array[1], whole[5:10])


@pytest.mark.parametrize(
    ("pix_fmt", "layout"),
    [
        *((name, None) for name in ("rgb24", "yuv420p", "gbrp", "nv12", "rgb48be", "gbrp10be")),
        *((name, "NCHW") for name in ("rgb24", "gray", "rgb48be")),
        *((name, "planes") for name in ("rgb24", "yuv420p", "gbrp10be")),
    ],
)
@pytest.mark.parametrize("how", ["images", "video", "fresh"])
def test_nothing_but_the_storage_is_allocated(pix_fmt: str, layout: Any, how: str) -> None:
    row = BY_NAME[pix_fmt]
    planes = row.planes(160, 120, 3)
    frames = [frame_of(planes, pix_fmt, upwards=k % 2 == 1) for k in range(80)]
    items: Any = [sm.ImageFrames((frame,)) for frame in frames]
    if how == "video":
        items = sm.VideoFrames(frames)
    nbytes = 80 * sum(plane.nbytes for plane in planes)

    def peak(storage: sm.CPUStorage | None) -> int:
        gc.collect()
        tracemalloc.start()
        buffer = sm.convert_frames(items, storage, layout=layout)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        del buffer
        return most

    storage = None if how == "fresh" else sm.cpu_storage(nbytes + 256, pin_memory=False)
    peak(storage)  # tables of the format are made once
    allowed = 65536 + (nbytes if storage is None else 0)
    assert peak(storage) <= allowed


def test_the_gil_is_free_while_planes_are_copied() -> None:
    """With a long switch interval, another thread runs only when the GIL is released."""
    frame = sm.ImageFrames((av.VideoFrame(4096, 4096, "gray"),))
    storage = sm.cpu_storage(4096 * 4096, pin_memory=False)
    running, count = True, 0

    def run() -> None:
        nonlocal count
        while running:
            count += 1
            time.sleep(0.0001)  # with 0, it would take the GIL back at once

    thread = threading.Thread(target=run)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        thread.start()
        # A busy machine may have no core for the other thread for a while.
        deadline = time.monotonic() + 20
        before = count
        while count == before:
            sm.convert_frames(frame, storage)
            assert time.monotonic() < deadline, "nobody else ran during copies of 16 MB"
    finally:
        running = False
        sys.setswitchinterval(interval)
        thread.join()


def test_threads_convert_at_the_same_time() -> None:
    pool = sm.StoragePool(32 * 24 * 3 * 8, 4, pin_memory=False, on_exhausted="wait")
    wrong: list[int] = []

    def run(value: int) -> None:
        frames = [rgb(32, 24, value)] * 8
        for _ in range(50):
            array = sm.to_numpy(sm.convert_frames(frames, pool))
            if not (array == value).all():
                wrong.append(value)
            del array  # otherwise each thread would keep one block and wait for another

    threads = [threading.Thread(target=run, args=(value,)) for value in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert pool.num_free == pool.count == 4


def test_images_that_differ_are_both_named() -> None:
    made = [rgb(8, 6), rgb(8, 6), rgb(6, 8)]
    with pytest.raises(
        sm.ConvertError,
        match=r"item 0 \(frames\) is 8x6 rgb24, but item 2 \(frames\) is 6x8 rgb24\..*filter",
    ):
        sm.convert_frames(made)
    planes = BY_NAME["yuv420p"].planes(8, 6, 0)
    with pytest.raises(sm.ConvertError, match=r"item 0 .* 8x6 rgb24, but item 1 .* 8x6 yuv420p"):
        sm.convert_frames([rgb(8, 6), image(planes, "yuv420p")])
    for layout in ("NCHW", "planes"):
        with pytest.raises(sm.ConvertError, match=r"8x6 .* 6x8"):
            sm.convert_frames(made, layout=layout)  # type: ignore[call-overload]


def test_sources_of_images_that_differ_are_named(tmp_path: Any) -> None:
    images = []
    for name, width in (("small.png", 32), ("large.png", 64)):
        (tmp_path / name).write_bytes(make_image(index_frames(1, width, 24)[0]))
        images.append(sm.decode_packets(sm.demux_image(tmp_path / name)))
    with pytest.raises(sm.ConvertError, match=r"small\.png\) is 32x24.*large\.png\) is 64x24"):
        sm.convert_frames(images)


def test_frames_inside_videos_that_differ_are_named() -> None:
    even, odd = [rgb(8, 6)._frames[0]] * 3, [rgb(8, 6)._frames[0], rgb(8, 4)._frames[0]]
    with pytest.raises(
        sm.ConvertError, match=r"frame 0 of item 0 .* 8x6 rgb24, but frame 1 of item 0 .* 8x4 rgb24"
    ):
        sm.convert_frames(sm.VideoFrames(odd))
    with pytest.raises(
        sm.ConvertError, match=r"frame 0 of item 0 .*, but frame 1 of item 1 .* 8x4"
    ):
        sm.convert_frames([sm.VideoFrames(even[:2]), sm.VideoFrames(odd)])
    with pytest.raises(
        sm.ConvertError, match=r"item 0 \(frames\) has 3 frames, but item 1 \(frames\) has 2"
    ):
        sm.convert_frames([sm.VideoFrames(even), sm.VideoFrames(odd)])


def test_kinds_do_not_mix(clip: bytes) -> None:
    video = sm.decode_packets(sm.demux_video(clip))
    with pytest.raises(sm.ConvertError, match="item 0 is VideoFrames, but item 1 is ImageFrames"):
        sm.convert_frames([video, video[0]])


def test_a_window_without_frames_is_named(clip: bytes) -> None:
    frames = sm.decode_packets(sm.demux_video(clip, timestamp=(50.5, 51)))
    assert len(frames) == 0
    for given in (frames, [frames], [frames, frames]):
        with pytest.raises(sm.ConvertError, match=r"bytes of length \d+: .*window .*50\.5.*51"):
            sm.convert_frames(given)
    full = sm.decode_packets(sm.demux_video(clip))
    with pytest.raises(sm.ConvertError, match=r"no frame in the window .*50\.5"):
        sm.convert_frames([full, frames])


@pytest.mark.parametrize("nothing", [[], (), iter([])])
def test_an_empty_sequence_is_named(nothing: Any) -> None:
    with pytest.raises(sm.ConvertError, match="no frames to convert: the sequence is empty"):
        sm.convert_frames(nothing)


@each("width, height", [(0, 0), (0, 4), (4, 0)])
@each("layout", [None, "NCHW", "planes"])
def test_frames_without_pixels(width: int, height: int, layout: Any) -> None:
    frame = sm.ImageFrames((av.VideoFrame(width, height, "rgb24"),))
    with pytest.raises(sm.ConvertError, match=f"{width}x{height} rgb24 has no pixels"):
        sm.convert_frames([frame, frame], layout=layout)


@pytest.mark.parametrize("wrong", [7, None, "photo.jpg", b"bytes", np.zeros((2, 3))])
def test_not_a_frame_is_a_type_error(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"convert_frames takes ImageFrames, .*decode_packets"):
        sm.convert_frames(wrong)
    with pytest.raises(TypeError, match=f"but item 1 is {type(wrong).__name__}"):
        sm.convert_frames([rgb(8, 6), wrong])


def test_options_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match="layout must be 'NCHW', 'NHWC', 'planes' or None, not"):
        sm.convert_frames(rgb(8, 6), layout="nchw")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="pad= is for audio"):
        sm.convert_frames(rgb(8, 6), pad=True)
    with pytest.raises(TypeError, match="storage must be a CPUStorage, a StoragePool or None"):
        sm.convert_frames(rgb(8, 6), 144)  # type: ignore[call-overload]


def test_a_failed_batch_leaves_nothing_leased() -> None:
    pool = sm.StoragePool(100, 2, pin_memory=False, on_exhausted="raise")
    for given in ([rgb(8, 6)], [rgb(4, 2), rgb(2, 4)], []):
        with pytest.raises(sm.ConvertError):
            sm.convert_frames(given, pool)
        assert pool.num_free == 2


@pytest.mark.parametrize("nbytes", [143, 1])
def test_a_storage_too_small_says_both_sizes(nbytes: int) -> None:
    for storage in (
        sm.cpu_storage(nbytes, pin_memory=False),
        sm.StoragePool(nbytes, pin_memory=False),
    ):
        with pytest.raises(
            sm.StorageTooSmallError, match=rf"takes 144 bytes, but the storage has {nbytes}\."
        ):
            sm.convert_frames(rgb(8, 6), storage)


def test_a_storage_that_just_fits() -> None:
    storage = sm.cpu_storage(144, pin_memory=False)
    assert sm.convert_frames(rgb(8, 6, 5), storage).array.tolist() == [[[5] * 3] * 8] * 6
    planes = BY_NAME["yuv420p"].planes(16, 8, 0)
    exact = sm.cpu_storage(128 + 64 + 32, pin_memory=False)
    assert len(sm.convert_frames(image(planes, "yuv420p"), exact, layout="planes")) == 3


def test_audio_takes_no_memory_beside_the_storage() -> None:
    samples = np.zeros((40_000, 2), np.float32)
    for sample_fmt in ("fltp", "flt"):
        items = [
            sound(samples, sample_fmt, cuts=range(0, 40_000, 1000)),
            sound(samples[:30_000], sample_fmt),
        ]
        storage = sm.cpu_storage(2 * samples.nbytes, pin_memory=False)
        sm.convert_frames(items, storage, pad=True).release()
        gc.collect()
        tracemalloc.start()
        buffer = sm.convert_frames(items, storage, pad=True)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert buffer.nbytes == storage.nbytes
        assert most <= 65536
        del buffer


def test_frames_of_different_streams() -> None:
    """Two streams of one file may differ in every property that an array needs."""
    small, large = index_planes(4, 64, 48), index_planes(4, 32, 24)
    tracks = [VideoTrack(frames=one, codec="libx265") for one in (small, large)]
    movie = make_media(tracks, format="matroska")
    frames = [
        sm.decode_packets(sm.demux_video(movie, stream_index=index, name=f"stream {index}"), None)
        for index in (0, 1)
    ]
    with pytest.raises(
        sm.ConvertError,
        match=r"frame 0 of item 0 \(stream 0\) is 64x48 yuv420p, but frame 0 of item 1 \(stream 1\) is "
        "32x24 yuv420p",
    ):
        sm.convert_frames(frames)
