"""Lifetimes: objects are kept alive as long as needed and not longer."""

from __future__ import annotations

import ctypes
import gc
import io
import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from effort import each, examples
from left_behind import descriptors

import spdl_media as sm
from spdl_media.testing import (
    AudioTrack,
    VideoTrack,
    frame_index,
    index_frames,
    index_planes,
    index_samples,
    make_audio,
    make_image,
    make_media,
    make_video,
)

FRAMES = index_planes(20, 64, 48)


class Memory(np.ndarray):
    """An array that supports weak references."""


class File(io.BytesIO):
    """A file object that supports weak references."""


@pytest.fixture(scope="module", params=["mp4", "matroska", "mpegts"])
def movie(request: pytest.FixtureRequest) -> bytes:
    video = VideoTrack(frames=FRAMES, codec="libx265", gop_size=5, max_b_frames=2)
    sound = AudioTrack(samples=index_samples(96000, 2), codec="mp2")
    return make_media([video, sound], format=request.param)


def memory_of(data: bytes) -> Memory:
    return np.frombuffer(bytearray(data), np.uint8).view(Memory)


@pytest.mark.parametrize("make", [memory_of, File], ids=["array", "file object"])
@pytest.mark.parametrize("read", [sm.demux_video, sm.demux_audio])
def test_packets_do_not_keep_the_source(
    movie: bytes, make: Callable[[bytes], Any], read: Callable[..., Any]
) -> None:
    source = make(movie)
    watch = weakref.ref(source)
    packets = read(source, timestamp=(0.5, 1.5))
    del source
    gc.collect()
    assert watch() is None
    assert len(sm.decode_packets(packets)) > 9


@pytest.mark.parametrize("make", [memory_of, File], ids=["array", "file object"])
def test_chunks_do_not_keep_the_source(movie: bytes, make: Callable[[bytes], Any]) -> None:
    source = make(movie)
    watch = weakref.ref(source)
    with sm.Demuxer(source) as demuxer:
        chunk = next(demuxer.streaming_demux([0, 1], num_packets=5))
    del source, demuxer
    gc.collect()
    assert watch() is None
    assert len(sm.decode_packets(chunk[0])) == len(chunk[0]) >= 2


def test_packets_do_not_keep_the_container(movie: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    from spdl_media.inputs import Input

    open_container = Input.open

    def spy(self: Input, config: Any) -> Any:
        opened.append(self)
        return open_container(self, config)

    monkeypatch.setattr(Input, "open", spy)
    packets = sm.demux_video(movie)
    watch = weakref.ref(opened.pop())
    gc.collect()
    assert watch() is None
    assert all(packet.stream is None for packet in packets._packets)


def test_the_packet_of_a_still_keeps_the_memory_it_shows() -> None:
    """The data of stills is not copied, so the source lives as long as the packet."""
    source = memory_of(make_image(index_frames(1, 64, 48)[0]))
    watch = weakref.ref(source)
    packets = sm.demux_image(source)
    del source
    gc.collect()
    image = sm.decode_packets(packets)
    assert frame_index(image.planes[0]) == 0
    del packets
    gc.collect()
    assert watch() is None, "frames do not keep the coded data"
    assert frame_index(image.planes[0]) == 0


def test_frames_outlive_packets(movie: bytes) -> None:
    packets = sm.demux_video(movie)
    watches = [weakref.ref(packets)] if hasattr(packets, "__weakref__") else []
    frames = sm.decode_packets(packets, None)
    del packets
    gc.collect()
    assert all(watch() is None for watch in watches)
    assert [frame_index(frame.planes[0]) for frame in frames] == list(range(20))


def test_planes_outlive_frames(movie: bytes) -> None:
    planes = sm.decode_packets(sm.demux_video(movie), None)[7].planes
    gc.collect()
    # Freed memory would be overwritten by the next frames.
    others = [sm.decode_packets(sm.demux_video(movie), None) for _ in range(3)]
    assert all(np.array_equal(a, b) for a, b in zip(planes, FRAMES[7], strict=True))
    assert len(others) == 3
    with pytest.raises(ValueError, match="read-only"):
        planes[0][0, 0] = 1


def test_slices_share_memory(movie: bytes) -> None:
    frames = sm.decode_packets(sm.demux_video(movie), None)
    part = frames[5:9]
    assert np.shares_memory(part[0].planes[0], frames[5].planes[0])
    del frames
    gc.collect()
    assert [frame_index(frame.planes[0]) for frame in part] == [5, 6, 7, 8]


def test_a_slice_lets_the_other_frames_go(movie: bytes) -> None:
    before = _count_frames()
    frames = sm.decode_packets(sm.demux_video(movie), None)
    assert _count_frames() - before >= len(frames)
    one = frames[3]
    del frames
    assert _count_frames() - before <= 1
    assert frame_index(one.planes[0]) == 3


def _count_frames() -> int:
    gc.collect()
    return sum(type(obj) is av.VideoFrame for obj in gc.get_objects())


def test_decoded_frames_outlive_the_decoder(movie: bytes) -> None:
    packets = sm.demux_video(movie)
    decoder = sm.VideoDecoder(packets.codec, filter_desc=None)
    chunks = [*decoder.decode(packets), *decoder.flush()]
    del decoder, packets
    gc.collect()
    got = [frame_index(frame.planes[0]) for frames in chunks for frame in frames]
    assert got == list(range(20))


def test_a_bytearray_is_free_after_demuxing(movie: bytes) -> None:
    data = bytearray(movie)
    packets = sm.demux_video(data)
    data.clear()
    assert len(sm.decode_packets(packets)) == 20


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def one_round(path: Path, damaged: bytes) -> None:
    with sm.Demuxer(path) as demuxer:
        sm.decode_packets(demuxer.demux_video((0.5, 1.2)), num_frames=5)
        sm.decode_packets(demuxer.demux_audio((0.5, 0.7)))
        for chunk in demuxer.streaming_demux([0, 1], num_packets=4):
            decoder = sm.VideoDecoder(chunk[0].codec, num_frames=2)  # type: ignore[arg-type]
            next(decoder.decode(chunk[0]), None)  # type: ignore[arg-type]
            break
    sm.probe(path)
    for bad in (
        lambda: sm.demux_video(path, stream_index=9),
        lambda: sm.demux_video(b"no media at all, but text"),
        lambda: sm.demux_video(path.parent / "none"),
        lambda: sm.decode_packets(sm.demux_video(path), "no_such_filter"),
        lambda: sm.decode_packets(sm.demux_image(damaged)),
    ):
        with pytest.raises(sm.MediaError):
            bad()


def test_nothing_grows(movie: bytes, tmp_path: Path) -> None:
    """Memory, open files and objects do not grow, also with errors in every round."""
    if not Path("/proc/self/statm").exists():
        pytest.skip("no /proc here")
    path = tmp_path / "movie"
    path.write_bytes(movie)
    damaged = make_image(index_frames(1, 640, 480)[0], codec="mjpeg")[:-9000]
    rounds = examples(96)
    for _ in range(rounds // 3):
        one_round(path, damaged)
    gc.collect()
    before, files, objects = (
        resident(),
        descriptors(),
        len(gc.get_objects()),
    )
    for _ in range(rounds):
        one_round(path, damaged)
    gc.collect()
    assert descriptors() <= files
    assert len(gc.get_objects()) - objects < 5 * rounds
    # A frame a round would be 22 MB; the allocator itself moves by some megabytes, where others ran before.
    assert resident() - before < 8 << 20


class Mallinfo(ctypes.Structure):
    """What the C library tells of its memory; the eighth number is that of allocated bytes."""

    _fields_ = (("numbers", ctypes.c_size_t * 10),)


def test_a_video_that_is_read_in_part_leaves_nothing_allocated(movie: bytes) -> None:
    """PyAV's iterator over packets lost 150 bytes whenever it was dropped before its end."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None) if sys.platform == "linux" else None
    if mallinfo2 is None:
        pytest.skip("no malloc here that tells what is allocated")
    mallinfo2.restype = Mallinfo
    before = 0
    for number in range(300):
        sm.demux_video(movie, timestamp=(0, 0.2))
        if number == 50:
            before = mallinfo2().numbers[7]
    assert mallinfo2().numbers[7] - before < 250 * 50


def test_references_to_none_of_ours_are_left(movie: bytes) -> None:
    """FFmpeg's packets and frames are freed with their owners, without a garbage collection."""
    gc.collect()
    gc.disable()
    try:
        before = _count_ours()
        sm.decode_packets(sm.demux_video(movie, timestamp=(0.3, 1.1)))
        with sm.Demuxer(movie) as demuxer:
            demuxer.demux_video()
        del demuxer
        assert _count_ours() == before
    finally:
        gc.enable()


def _count_ours() -> int:
    kinds = (av.VideoFrame, av.Packet, sm.VideoPackets, sm.VideoFrames, sm.Demuxer)
    # Not isinstance(), which asks foreign objects for their class, and some of them then warn.
    return sum(type(obj) in kinds for obj in gc.get_objects())


def test_a_reader_left_half_way_holds_no_log(movie: bytes) -> None:
    """FFmpeg's messages are collected only while FFmpeg works, even if an unfinished iterator is kept."""
    demuxer = sm.Demuxer(movie)
    chunks = demuxer.streaming_demux(0, num_packets=2)
    next(chunks)
    with av.logging.Capture() as lines:
        av.logging.log(av.logging.ERROR, "test", "said outside")
    assert not lines
    assert sys.getrefcount(demuxer) >= 2
    demuxer.close()


def cut_short(data: bytes) -> bytes:
    return data[: len(data) * 2 // 3]


def damaged(data: bytes) -> bytes:
    flipped = bytearray(data)
    flipped[len(data) * 3 // 4] ^= 255
    return bytes(flipped)


def decode_in_chunks(packets: sm.VideoPackets) -> None:
    decoder = sm.VideoDecoder(packets.codec)
    list(decoder.decode(packets))
    list(decoder.flush())


PICTURE = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
SOUND = np.random.default_rng(0).integers(-9999, 9999, (48000, 1), np.int16)


def cut_video() -> bytes:
    return cut_short(make_video(FRAMES, codec="ffv1", format="matroska"))


def cut_audio() -> bytes:
    return cut_short(make_audio(SOUND, 48000, codec="flac", format="matroska"))


CLOSED = io.BytesIO()
CLOSED.close()

FAILING: dict[str, tuple[Callable[[], bytes], Callable[[Any], object], str]] = {
    "image, damaged": (
        lambda: damaged(make_image(PICTURE, codec="png")),
        sm.load_image,
        "damaged png data",
    ),
    "image, cut": (
        lambda: cut_short(make_image(PICTURE, codec="png")),
        sm.load_image,
        "cut short",
    ),
    "audio, damaged": (
        lambda: damaged(make_audio(SOUND, 48000, codec="flac", format="flac")),
        sm.load_audio,
        "damaged flac data",
    ),
    "audio, cut": (
        cut_audio,
        sm.load_audio,
        "cut short",
    ),
    "video, cut": (
        cut_video,
        sm.load_video,
        "cut short",
    ),
    "video, cut before the frames that are asked for": (
        cut_video,
        lambda source: sm.load_video(source, num_frames=900),
        "cut short",
    ),
    "audio, cut before the samples that are asked for": (
        cut_audio,
        lambda source: sm.load_audio(source, num_samples=900_000),
        "cut short",
    ),
    "frames, cut": (
        cut_video,
        sm.VideoFile,
        "cut short",
    ),
    "chunks, cut": (
        cut_video,
        lambda source: decode_in_chunks(sm.demux_video(source)),
        "cut short",
    ),
    "filter": (
        lambda: make_video(FRAMES, codec="libx264", format="matroska"),
        lambda source: sm.load_video(source, filter_desc="crop=9999:9999"),
        "crop",
    ),
    "written": (
        lambda: bytes(8 * 64 * 64 * 3),
        lambda source: sm.save_video(
            Path(os.devnull, "a.mp4"), np.frombuffer(source, np.uint8).reshape(8, 64, 64, 3), 8
        ),
        "cannot be written",
    ),
    "written to a file object": (
        lambda: bytes(64 * 64 * 3),
        lambda source: sm.save_image(
            CLOSED, np.frombuffer(source, np.uint8).reshape(64, 64, 3), format="png"
        ),
        "cannot be written: ValueError",
    ),
}


@each("name", FAILING)
def test_a_failed_call_keeps_nothing_until_a_garbage_collection(name: str) -> None:
    """A cycle of the error and a frame keeps what the frames hold: the source, decoded frames, leases."""
    make, load, text = FAILING[name]
    source = memory_of(make())
    gone = weakref.ref(source)
    gc.disable()
    try:
        try:
            load(source)
        except sm.MediaError as error:
            message = str(error)
        del source
        assert text in message
        assert gone() is None
    finally:
        gc.enable()
