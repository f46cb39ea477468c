"""Tests of FFmpeg's NVDEC code on the stand-in driver. ``cuda/test_nvdec_driver.py`` runs them."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from driver_build import Part
from nvdec_stand_in import StandIn, clip_of

import spdl_media as sm
from spdl_media.config import DecodeConfig
from spdl_media.cuda.nvdec import DECODERS, DecoderPool, NotOnDeviceError, open_on_device
from spdl_media.cuda.videos import decode_packets_nvdec, streaming_load_video_nvdec
from spdl_media.packets import av_packets, make_packet
from spdl_media.testing import index_planes, make_video

CUDA, CUVID = Part("cuda"), Part("cuvid")


class Device(StandIn):
    """A device in host memory, with FFmpeg's decoder on the stand-in driver."""

    def open_decoder(self, codec: Any, config: DecodeConfig, source: str) -> Any:
        self.opened.append(codec.name)
        return open_on_device(codec, config, source, self.index)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Check that each test frees all decoders and memory, and restore the settings."""
    yield
    CUDA.memory, CUDA.gone, CUVID.create_error, CUVID.sessions = 1 << 40, 0, 0, 1 << 20
    CUVID.session_error, CUVID.decode_error, CUVID.good_pictures, CUVID.supported = 2, 0, 0, 1
    CUVID.least = 16
    gc.collect()
    assert CUVID.created == CUVID.destroyed
    assert CUDA.allocations == CUDA.frees
    assert (CUDA.used, CUVID.mapped) == (0, 0)


def packets_of(
    codec: str, format: str = "mp4", size: Any = (64, 64), count: int = 12, **options: Any
) -> sm.VideoPackets:
    planes = index_planes(count, *size, options.get("pix_fmt", "yuv420p"))
    return sm.demux_video(make_video(planes, codec=codec, format=format, gop_size=6, **options))


CODECS = [
    ("libx264", "mp4", "yuv420p", 2),
    ("libx264", "mpegts", "yuv420p", 2),
    ("libx265", "mp4", "yuv420p", 2),
    ("libx265", "matroska", "yuv420p10le", 2),
    ("libx265", "mp4", "yuv420p12le", 0),
    ("libsvtav1", "mp4", "yuv420p", 0),
    ("libsvtav1", "matroska", "yuv420p10le", 0),
    ("libvpx", "webm", "yuv420p", 0),
    ("libvpx-vp9", "webm", "yuv420p", 0),
    ("mpeg1video", "mpegts", "yuv420p", 0),
    ("mpeg2video", "mpegts", "yuv420p", 1),
    ("mpeg4", "avi", "yuv420p", 0),
]


@pytest.mark.parametrize(("codec", "format", "pix_fmt", "b_frames"), CODECS)
def test_every_codec_gives_the_frames_of_the_cpu_and_is_served_again(
    codec: str, format: str, pix_fmt: str, b_frames: int
) -> None:
    """Frames agree in number and times, also in a window; the second clip opens no new decoder."""
    device = Device()
    data = make_video(
        index_planes(12, 64, 64, pix_fmt),
        codec=codec,
        format=format,
        gop_size=6,
        pix_fmt=pix_fmt,
        max_b_frames=b_frames,
        frame_rate=25,
    )
    for window in (None, (0.15, 0.41), None):
        packets = sm.demux_video(data, timestamp=window)
        want = sm.decode_packets(packets, None)
        found = clip_of(packets, device, pix_fmt="nv12")
        assert (found.pts, found.timestamps) == (want.pts, want.timestamps)
        assert len(found.buffer) == len(want)  # type: ignore[arg-type]  # an array of NumPy
    (buffer,) = streaming_load_video_nvdec(data, device, num_frames=50)
    assert len(buffer) == 12  # type: ignore[arg-type]
    assert CUVID.created - CUVID.destroyed == 1
    assert len(device.opened) == 1


@pytest.mark.parametrize(("codec", "pix_fmt"), [("libx264", "yuv420p"), ("libx265", "yuv420p10le")])
def test_frames_are_put_in_order_and_none_is_taken_for_another(codec: str, pix_fmt: str) -> None:
    """The stamp of each picture is its index in decoding order."""
    packets = packets_of(codec, count=40, max_b_frames=3, pix_fmt=pix_fmt)
    planes = np.asarray(clip_of(packets, Device(), pix_fmt="nv12").buffer)
    if planes.dtype == np.uint16:
        planes = (planes >> 8).astype(np.uint8)
    coded = [packet.pts or 0 for packet in av_packets(packets)]
    numbers = np.array([coded.index(pts) for pts in sorted(coded)])
    luma, chroma = planes[:, :64], planes[:, 64:].reshape(40, 32, 32, 2)
    assert (luma == (16 + numbers)[:, None, None]).all()
    assert (chroma[..., 0] == (80 + numbers)[:, None, None]).all()
    assert (chroma[..., 1] == (160 + numbers)[:, None, None]).all()


SMALL = [("libvpx", "webm"), ("libvpx-vp9", "webm"), ("mpeg4", "avi"), ("mpeg2video", "mpegts")]


@pytest.mark.parametrize(("codec", "format"), [*SMALL, ("libsvtav1", "mp4")])
def test_an_odd_width_is_cut(codec: str, format: str) -> None:
    packets = packets_of(codec, format, (67, 66))
    found = np.asarray(clip_of(packets, Device(), pix_fmt="nv12").buffer)
    assert found.shape == (12, 99, 68)
    assert (found[:, :66, :67] >= 16).all()
    assert (found[:, :66, :67] < 40).all()  # the stamps, and nothing beside them
    assert not found[:, :66, 67].any()
    assert (found[:, 66:] >= 80).all()
    assert clip_of(packets, Device()).buffer.shape == (12, 66, 67, 3)


@pytest.mark.parametrize(("codec", "format"), [*SMALL, ("libsvtav1", "mp4")])
@pytest.mark.parametrize("width", [66, 67])
def test_an_odd_height_is_for_the_cpu(codec: str, format: str, width: int) -> None:
    packets = packets_of(codec, format, (width, 65))
    words = (
        rf"chroma of frames with an odd height, here {width}x65, lies where FFmpeg does not look"
    )
    with pytest.raises(NotOnDeviceError, match=words):
        clip_of(packets, Device())


FAILURES = [
    (2, "cuvidCreateDecoder says CUDA_ERROR_OUT_OF_MEMORY .*decode in fewer threads"),
    (100, "cuvidCreateDecoder says CUDA_ERROR_NO_DEVICE .*nvidia-smi shows"),
    (999, "cuvidCreateDecoder says CUDA_ERROR_UNKNOWN"),
]


@pytest.mark.parametrize("codec", ["libx264", "libsvtav1", "libvpx-vp9"])
@pytest.mark.parametrize(("error", "words"), FAILURES)
def test_a_decoder_that_cannot_be_made_is_an_error_and_not_a_decode_on_the_cpu(
    codec: str, error: int, words: str
) -> None:
    format = "webm" if codec == "libvpx-vp9" else "mp4"
    packets, device = packets_of(codec, format), Device()
    CUVID.create_error = error
    with pytest.raises(sm.TransferError, match=f"NVDEC failed on CUDA device 0: {words}"):
        decode_packets_nvdec(packets, cuda=device)
    CUVID.create_error = 0
    assert len(decode_packets_nvdec(packets, cuda=device)) == 12  # type: ignore[arg-type]


def test_a_codec_that_the_hardware_does_not_know_is_for_the_cpu() -> None:
    packets, device = packets_of("libx265"), Device()
    for setting, value in (("supported", 0), ("create_error", 801)):
        setattr(CUVID, setting, value)
        with pytest.raises(sm.DecodeError, match="this hevc stream: FFmpeg gave yuv420p frames"):
            decode_packets_nvdec(packets, cuda=device)
        CUVID.supported, CUVID.create_error = 1, 0
    CUVID.supported = 0
    with pytest.raises(NotOnDeviceError, match="this av1 stream: FFmpeg gave no frames"):
        clip_of(packets_of("libsvtav1"), device)


@pytest.mark.parametrize("codec", ["libx264", "libsvtav1"])
def test_a_size_that_the_hardware_does_not_take_is_named(codec: str) -> None:
    CUVID.least = 144
    words = r"not on the device \(Video width 64 not within range from 144 to 8192\)"
    with pytest.raises(sm.DecodeError, match=words):
        decode_packets_nvdec(packets_of(codec), cuda=Device())


def test_decoders_that_wait_make_room_for_one_that_is_needed() -> None:
    device = Device()
    CUVID.sessions = 1
    for codec in ("libx264", "libx265", "libx264"):
        assert len(clip_of(packets_of(codec), device).pts) == 12
    assert CUVID.created - CUVID.destroyed == 1


def test_too_many_sessions_are_an_error() -> None:
    CUVID.sessions, one, other = 1, Device(), Device()
    packets = packets_of("libx264")
    clip_of(packets, one)
    with pytest.raises(
        sm.TransferError, match=r"OUT_OF_MEMORY .*Its memory or its decoders are used up"
    ):
        clip_of(packets, other)
    one.decoders.clear()
    assert len(clip_of(packets, other).pts) == 12


@pytest.mark.parametrize("room", [0, 20_000, 60_000])
def test_a_device_that_is_nearly_full_is_an_error(room: int) -> None:
    packets, device = packets_of("libx264", count=20), Device()
    CUDA.memory = room
    with pytest.raises(sm.TransferError, match="says CUDA_ERROR_OUT_OF_MEMORY"):
        clip_of(packets, device)
    CUDA.memory = 1 << 40
    assert len(clip_of(packets, device).pts) == 20


@pytest.mark.parametrize("pictures", [0, 5])
def test_a_device_that_disappears_is_an_error(pictures: int) -> None:
    packets, device = packets_of("libx264", max_b_frames=2), Device()
    CUVID.good_pictures, CUVID.decode_error = CUVID.pictures + pictures, 999
    with pytest.raises(sm.TransferError, match=r"CUDA_ERROR_UNKNOWN .*whether the device is still"):
        clip_of(packets, device)
    CUVID.decode_error = 0
    CUDA.gone = 46
    with pytest.raises((sm.TransferError, NotOnDeviceError, ValueError)):
        clip_of(packets, device)
    CUDA.gone = 0
    assert len(clip_of(packets, device).pts) == 12


def test_damage_is_not_taken_for_a_device_that_fails() -> None:
    packets, device = packets_of("libx264"), Device()
    CUVID.good_pictures, CUVID.decode_error = CUVID.pictures + 3, 1
    with pytest.raises(sm.DecodeError, match="damaged h264 data"):
        clip_of(packets, device)


@pytest.mark.parametrize(
    ("codec", "format"), [("libx264", "mp4"), ("libx265", "mp4"), ("libvpx-vp9", "webm")]
)
def test_damage_is_raised_kept_and_dropped_as_on_the_cpu(codec: str, format: str) -> None:
    packets, device = packets_of(codec, format, count=30), Device()
    coded = list(av_packets(packets))
    cut = make_packet(bytes(coded[5])[:7], packets.time_base)
    cut.pts, cut.dts, cut.is_keyframe = coded[5].pts, coded[5].dts, False
    damaged = packets.with_packets([*coded[:5], cut, *coded[6:]], packets.codec)
    with pytest.raises(sm.DecodeError, match=r"damaged \w+ data at 0\..*\(packet 5\)"):
        clip_of(damaged, device)
    for on_corrupt in ("keep", "drop"):
        config = sm.decode_config(on_corrupt=on_corrupt)  # type: ignore[arg-type]  # a valid choice
        want = sm.decode_packets(damaged, None, config)
        assert clip_of(damaged, device, decode_config=config).pts == want.pts
        assert len(want) == 29
    assert clip_of(packets, device).pts == sm.decode_packets(packets, None).pts


@pytest.mark.parametrize("options", [{"threads": 4}, {"flags": "low_delay"}])
def test_options_of_the_decoder_have_decoders_of_their_own(options: Any) -> None:
    packets, device = packets_of("libx264", max_b_frames=2), Device()
    config = sm.decode_config(decoder_options=options)
    for _ in range(3):
        assert len(clip_of(packets, device, decode_config=config).pts) == 12
    assert len(device.opened) == 1
    clip_of(packets, device)
    assert len(device.opened) == 2


def test_clips_in_many_threads_share_the_decoders() -> None:
    clips = [packets_of(codec, count=20) for codec in ("libx264", "libx265")]
    device = Device()
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda n: clip_of(clips[n % 2], device).pts, range(40)):
            assert len(found) == 20
    assert len(device.opened) <= 8


def test_the_pool_is_bounded() -> None:
    device = Device()
    device.decoders = DecoderPool(3)
    for side in range(48, 48 + 16 * 6, 16):
        clip_of(packets_of("libx264", size=(side, 64), count=2), device)
    assert CUVID.created - CUVID.destroyed == 3


def test_large_decoders_are_kept_in_smaller_numbers() -> None:
    device = Device()
    device.decoders = DecoderPool(8, 3 * 40 * 2 * 128 * 64)
    for side in range(48, 128 + 16, 16):
        clip_of(packets_of("libx264", size=(side, 64), count=2), device)
    assert 1 < CUVID.created - CUVID.destroyed <= 4


def test_a_forked_process_leaves_the_decoders_of_its_parent_alone() -> None:
    device, packets = Device(), packets_of("libx264")
    device.decoders = DECODERS
    clip_of(packets, device)
    destroyed = CUVID.destroyed
    child = os.fork()
    if not child:
        found = DECODERS.clear() or CUVID.destroyed - destroyed
        gc.collect()
        os._exit(1 if found or CUVID.destroyed != destroyed else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert DECODERS.clear()


def test_a_stream_makes_room_as_a_clip_does() -> None:
    device, data = Device(), make_video(index_planes(12, 64, 64), codec="libx265", format="mp4")
    CUVID.sessions = 1
    clip_of(packets_of("libx264"), device)
    batches = list(streaming_load_video_nvdec(data, device, num_frames=5))
    assert [len(batch) for batch in batches] == [5, 5, 2]  # type: ignore[arg-type]
    CUVID.create_error = 2
    device.decoders.clear()
    with pytest.raises(sm.TransferError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        next(streaming_load_video_nvdec(data, device, num_frames=5))


def test_damaged_headers_are_damage() -> None:
    packets = packets_of("libx264")
    codec = replace(packets.codec, extradata=b"\1\x64\0\x1f\xff\xe1\xff\xff")
    broken = packets.with_packets(list(av_packets(packets)), codec)
    with pytest.raises(sm.DecodeError, match="damaged h264 headers"):
        clip_of(broken, Device())


def test_a_decoder_says_nothing_of_the_clip_before() -> None:
    """Colours and reorder depth are those of the clip itself."""
    device = Device()
    stated = packets_of("libx264", "matroska", options={"colorspace": "bt709", "color_range": "pc"})
    plain = packets_of("libx264", max_b_frames=3)
    for packets, colors in ((stated, ("bt709", "pc")), (plain, ("bt601", "tv"))) * 2:
        found = clip_of(packets, device, pix_fmt="nv12")
        assert device.colors[-1] == colors
        assert found.pts == sm.decode_packets(packets, None).pts
