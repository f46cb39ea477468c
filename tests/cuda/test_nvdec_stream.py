"""streaming_load_video_nvdec: a video batch by batch, as the decoder's planes."""

from __future__ import annotations

import io
from itertools import pairwise

import numpy as np
import pytest
from nvdec_stand_in import StandIn
from oriented import FRAMES, oriented_clip, upright

import spdl_media as sm
from spdl_media.cuda.videos import streaming_load_video_nvdec
from spdl_media.testing import AudioTrack, VideoTrack, index_planes, make_media, make_video

PLANES = index_planes(90, 32, 16)
CLIP = make_video(PLANES, codec="libx265", format="mp4", max_b_frames=2, gop_size=16)
WANT = sm.load_video(CLIP, pix_fmt="nv12").array[:, 0]


@pytest.mark.parametrize("num_frames", [1, 7, 45, 200])
def test_batches_are_the_frames_in_order(num_frames: int) -> None:
    batches = list(streaming_load_video_nvdec(CLIP, StandIn(), num_frames=num_frames))
    assert [len(batch) for batch in batches[:-1]] == [num_frames] * (len(batches) - 1)
    assert np.array_equal(np.concatenate(batches), WANT)


def test_batches_are_memory_of_their_own() -> None:
    batches = list(streaming_load_video_nvdec(CLIP, StandIn(), num_frames=30))
    assert not any(np.shares_memory(a, b) for a, b in pairwise(batches))


def test_the_source_is_read_as_batches_are_asked_for() -> None:
    class Counted(io.BytesIO):
        total = 0

        def read(self, size: int | None = -1) -> bytes:
            data = super().read(size)
            self.total += len(data)
            return data

    # FFmpeg reads ahead when it opens a file: it probes at most 5 MB.
    data = make_video(index_planes(300, 320, 240), codec="libx264", format="matroska", gop_size=16)
    source = Counted(data)
    assert len(data) > 10_000_000
    batches = streaming_load_video_nvdec(source, StandIn(), num_frames=4)
    next(batches)
    assert source.total < len(data) / 2


def test_scaled_planes_are_those_of_the_cpu() -> None:
    size = {"width": 24, "height": 10, "scale_mode": None}
    want = sm.load_video(CLIP, pix_fmt="nv12", **size).array[:, 0]
    got = np.concatenate(
        list(
            streaming_load_video_nvdec(
                CLIP, StandIn(), num_frames=50, scale_width=24, scale_height=10
            )
        )
    )
    assert got.shape == want.shape
    assert np.abs(got.astype(int) - want).max() <= 1


@pytest.mark.parametrize(("pix_fmt", "unused"), [("yuv420p10le", 6), ("yuv420p12le", 4)])
def test_scaled_deep_planes_have_nothing_in_the_low_bits(pix_fmt: str, unused: int) -> None:
    planes = index_planes(6, 32, 16, pix_fmt)
    data = make_video(planes, codec="libx265", format="mp4", pix_fmt=pix_fmt)
    size = {"scale_width": 24, "scale_height": 10}
    (buffer,) = streaming_load_video_nvdec(data, StandIn(), num_frames=6, **size)
    got = np.asarray(buffer)
    assert got.dtype == np.uint16
    assert not (got & ((1 << unused) - 1)).any()
    want = sm.load_video(data, pix_fmt="p010le", width=24, height=10, scale_mode=None).array[:, 0]
    # In levels of 10 bits.
    assert np.abs((got >> 6).astype(int) - (want >> 6)).max() <= 2


def test_cropped_planes() -> None:
    (got,) = streaming_load_video_nvdec(
        CLIP, StandIn(), num_frames=90, crop_left=4, crop_top=2, crop_right=2, crop_bottom=6
    )
    for array, (luma, u, v) in zip(got, PLANES, strict=True):
        assert np.array_equal(array[:8], luma[2:-6, 4:-2])
        assert np.array_equal(array[8:, ::2], u[1:-3, 2:-1])
        assert np.array_equal(array[8:, 1::2], v[1:-3, 2:-1])


@pytest.mark.parametrize("orientation", [3, 5, 6])
def test_planes_are_upright(orientation: int) -> None:
    (got,) = streaming_load_video_nvdec(oriented_clip(orientation), StandIn(), num_frames=9)
    for array, (luma, _, _) in zip(got, FRAMES, strict=True):
        turned = upright(luma, orientation)
        assert np.array_equal(array[: len(turned)], turned)


def test_the_stream_that_is_asked_for() -> None:
    other = index_planes(6, 48, 32)
    data = make_media(
        [
            VideoTrack(frames=PLANES[:5], codec="libx264"),
            AudioTrack(samples=np.zeros((4800, 1), np.int16), sample_rate=48000),
            VideoTrack(frames=other, codec="libx264"),
        ],
        format="matroska",
    )
    (got,) = streaming_load_video_nvdec(data, StandIn(), num_frames=9, stream_index=2)
    assert got.shape == (6, 48, 48)
    with pytest.raises((sm.DemuxError, TypeError), match=r"audio|AudioPackets"):
        next(streaming_load_video_nvdec(data, StandIn(), num_frames=9, stream_index=1))


def test_a_file_that_is_cut_short_gives_its_frames_and_then_an_error() -> None:
    data = make_video(PLANES, codec="libx264", format="mp4", gop_size=16, faststart=True)
    short = data[: len(data) * 2 // 3]
    batches = streaming_load_video_nvdec(short, StandIn(), num_frames=8)
    got: list[np.ndarray] = []
    with pytest.raises(sm.MediaError, match=r"cut short|damaged"):
        got.extend(batches)
    assert np.array_equal(
        np.concatenate(got), sm.load_video(data, pix_fmt="nv12").array[: 8 * len(got), 0]
    )


def two_matrices(pix_fmt: str = "yuv420p") -> bytes:
    return b"".join(
        make_video(
            index_planes(4, 32, 16, pix_fmt),
            codec="libx264",
            format="h264",
            pix_fmt=pix_fmt,
            options={"colorspace": matrix},
        )
        for matrix in ("bt709", "smpte170m")
    )


def test_a_batch_has_one_matrix() -> None:
    device = StandIn()
    batches = list(streaming_load_video_nvdec(two_matrices(), device, num_frames=4))
    assert [len(batch) for batch in batches] == [4, 4]
    assert device.colors == [("bt709", "tv"), ("bt601", "tv")]
    words = "frame 0 has bt709 limited range, but frame 4 has bt601 limited range.*of nv12"
    with pytest.raises(sm.ConvertError, match=words):
        list(streaming_load_video_nvdec(two_matrices(), StandIn(), num_frames=5))


def test_misuse() -> None:
    with pytest.raises(ValueError, match="num_frames must be at least 1, not 0"):
        streaming_load_video_nvdec(CLIP, StandIn(), num_frames=0)
    with pytest.raises(ValueError, match=r"scale_width must be even.*not 7"):
        streaming_load_video_nvdec(CLIP, StandIn(), num_frames=1, scale_width=7)
