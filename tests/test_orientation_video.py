"""Videos are decoded upright, for all eight orientations and all ways to store them."""

from __future__ import annotations

import concurrent.futures
import io
import multiprocessing
import pickle
from pathlib import Path

import av
import numpy as np
import pytest
from av.bitstream import BitStreamFilterContext
from oriented import FRAMES, oriented_clip, remux, upright

import spdl_media as sm

# Remove the matrix from the file: only AV1 files have none, and not every FFmpeg can encode AV1.
from spdl_media.testing import make_video

KEEP = "format=yuv420p"


def planes(frames: sm.VideoFrames) -> list[tuple[np.ndarray, ...]]:
    return [frame.planes for frame in frames]


def check_upright(frames: sm.VideoFrames, orientation: int) -> None:
    assert len(frames) == len(FRAMES)
    for got, stored in zip(planes(frames), FRAMES, strict=True):
        for plane, want in zip(got, stored, strict=True):
            assert np.array_equal(plane, upright(want, orientation)), orientation
    assert (frames.rotation, frames.mirrored, frames.orientation) == (0, False, 1)


def check_stored(frames: sm.VideoFrames, orientation: int) -> None:
    for got, stored in zip(planes(frames), FRAMES, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(got, stored, strict=True))
    assert frames.orientation == orientation
    assert (
        frames.rotation == {1: 0, 2: 0, 3: 180, 4: 180, 5: 270, 6: 90, 7: 90, 8: 270}[orientation]
    )
    assert frames.mirrored == (orientation in (2, 4, 5, 7))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(
    ("format", "codec"),
    [
        ("mp4", "libx265"),
        ("mov", "libx264"),
        ("matroska", "libx264"),
        ("matroska", "ffv1"),
        ("matroska", "libvpx-vp9"),
    ],
)
def test_all_eight(format: str, codec: str, orientation: int) -> None:
    packets = sm.demux_video(oriented_clip(orientation, codec=codec, format=format))
    assert packets.orientation == orientation
    swapped = orientation >= 5
    assert (packets.width, packets.height) == ((48, 64) if swapped else (64, 48))
    check_upright(sm.decode_packets(packets, KEEP), orientation)
    check_stored(sm.decode_packets(packets, None), orientation)
    config = sm.decode_config(orient=False)
    check_stored(sm.decode_packets(packets, KEEP, config), orientation)
    check_upright(sm.decode_packets(pickle.loads(pickle.dumps(packets)), KEEP), orientation)


@pytest.mark.parametrize("orientation", [1, 5, 6])
def test_av1(orientation: int) -> None:
    packets = sm.demux_video(oriented_clip(orientation, codec="libsvtav1"))
    frames = sm.decode_packets(packets)
    assert packets.orientation == orientation
    assert (frames.width, frames.height) == ((48, 64) if orientation > 4 else (64, 48))


def _decode_shape(packets: sm.VideoPackets) -> tuple[int, int, int]:
    frames = sm.decode_packets(packets)
    return frames.width, frames.height, packets.rotation


def test_after_a_trip_to_another_process() -> None:
    packets = sm.demux_video(oriented_clip(6, codec="ffv1", format="matroska"))
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        assert pool.submit(_decode_shape, packets).result() == (48, 64, 90)


def test_streaming_decoders_turn_as_well() -> None:
    with sm.Demuxer(oriented_clip(7)) as demuxer:
        decoder = sm.VideoDecoder(demuxer.video_codec, filter_desc=KEEP, num_frames=2)
        chunks = [
            frames
            for packets in demuxer.streaming_demux(num_packets=1)
            for frames in decoder.decode(packets)
        ]
        chunks += decoder.flush()
    for k, frames in enumerate(chunks):
        for got, stored in zip(planes(frames), FRAMES[2 * k :], strict=False):
            assert np.array_equal(got[0], upright(stored[0], 7))
    assert len(chunks) == 3


def test_a_filter_comes_after_the_turn() -> None:
    packets = sm.demux_video(oriented_clip(6))
    frames = sm.decode_packets(packets, "crop=16:32:4:8,format=yuv420p")
    want = upright(FRAMES[0][0], 6)[8:40, 4:20]
    assert np.array_equal(frames[0].planes[0], want)


def test_the_first_image_of_a_video_is_turned() -> None:
    image = sm.decode_packets(sm.demux_image(oriented_clip(5)), KEEP)
    assert np.array_equal(image.planes[0], upright(FRAMES[0][0], 5))


@pytest.mark.parametrize(
    ("insert", "orientation"),
    [
        ("rotate=90", 8),
        ("rotate=180", 3),
        ("rotate=270", 6),
        ("flip=horizontal", 2),
        ("flip=vertical", 4),
    ],
)
@pytest.mark.parametrize("format", ["mpegts", "mp4", "h264"])
def test_a_message_in_the_bitstream(insert: str, orientation: int, format: str) -> None:
    """H.264 itself can contain the orientation, in a "display orientation" SEI message."""
    base = "mp4" if format == "mp4" else "mpegts"
    data = make_video(FRAMES, codec="libx264", format=base, gop_size=3)
    result = io.BytesIO()
    with (
        av.open(io.BytesIO(data)) as source,
        av.open(result, "w", format=format) as sink,
    ):
        stream = source.streams.video[0]
        copy = sink.add_stream_from_template(stream)
        bsf = BitStreamFilterContext(
            f"h264_metadata=display_orientation=insert:{insert}", stream, copy
        )
        for packet in source.demux(stream):
            for changed in bsf.filter(packet if packet.size else None):
                changed.stream = copy
                sink.mux(changed)
    packets = sm.demux_video(result.getvalue())
    check_upright(sm.decode_packets(packets, KEEP), orientation)
    check_stored(sm.decode_packets(packets, None), orientation)
    check_upright(sm.decode_packets(pickle.loads(pickle.dumps(packets)), KEEP), orientation)


def test_a_container_that_cannot_say_it_is_upright() -> None:
    data = remux(oriented_clip(6, codec="ffv1"), "nut")
    packets = sm.demux_video(data)
    assert packets.orientation == 1
    check_stored(sm.decode_packets(packets, None), 1)


def test_real_media(media_dir: Path) -> None:
    packets = sm.demux_video(media_dir / "video" / "rotated90_320x240.mp4")
    frames = sm.decode_packets(packets)
    assert packets.rotation in (90, 270)
    assert (frames.width, frames.height) == (240, 320)
    native = sm.decode_packets(packets, None)
    assert (native.width, native.height, native.rotation) == (320, 240, packets.rotation)
