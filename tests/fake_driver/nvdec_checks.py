"""Tests of decoding on the stand-in driver. ``cuda/test_nvdec_driver.py`` runs them."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import gpu_check
import numpy as np
import pytest
from driver_build import Part
from nvdec_stand_in import StandIn, clip_of

import spdl_media as sm
from spdl_media.cuda import session, surfaces
from spdl_media.cuda.cuvid import NotOnDeviceError, library
from spdl_media.cuda.nvdec import (
    DECODERS,
    GATE,
    DecoderPool,
    DeviceDecoder,
    has_lengths,
    stream_headers,
)
from spdl_media.cuda.session import Session
from spdl_media.cuda.videos import decode_packets_nvdec, streaming_load_video_nvdec
from spdl_media.cuda_driver import driver
from spdl_media.packets import av_packets, with_data
from spdl_media.testing import index_planes, make_video

CUDA, CUVID = Part("cuda"), Part("cuvid")


class Device(StandIn):
    """A device in host memory, with decoders of the stand-in driver."""

    def open_decoder(self, codec: Any) -> Any:
        self.opened.append(codec.name)
        CUVID.wide, CUVID.high = codec.width, codec.height
        CUVID.depth = {"p10": 2, "p12": 4}.get(codec.pix_fmt[7:10], 0)
        return Session(codec.name, self.index)


SETTINGS = (
    "create_error",
    "sessions",
    "session_error",
    "decode_error",
    "good_pictures",
    "supported",
)
SETTINGS += (
    "least",
    "left",
    "below",
    "chroma",
    "matrix",
    "delay",
    "surfaces",
    "late",
    "damaged",
    "map_error",
    "interrupted",
    "caps_error",
    "parser_error",
    "parse_error",
    "shows",
)
BEFORE = {name: getattr(CUVID, name) for name in SETTINGS}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Check that each test frees all decoders and surfaces, and restore the settings."""
    yield
    CUDA.gone = 0
    for name, value in BEFORE.items():
        setattr(CUVID, name, value)
    gc.collect()
    assert CUVID.created == CUVID.destroyed
    misused, held, CUVID.misused, CUVID.held = CUVID.misused, CUVID.held, 0, 0
    assert (CUVID.mapped, CUVID.parsers, misused, held) == (0, 0, 0, 0)


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
    ("libvpx-vp9", "webm", "yuv420p", 0),
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


@pytest.mark.parametrize(("width", "height"), [(67, 66), (66, 67)])
@pytest.mark.parametrize(("codec", "format"), [("libvpx-vp9", "webm"), ("libsvtav1", "mp4")])
def test_odd_sizes_are_cut(codec: str, format: str, width: int, height: int) -> None:
    packets = packets_of(codec, format, (width, height))
    found = np.asarray(clip_of(packets, Device(), pix_fmt="nv12").buffer)
    assert found.shape == (12, height + -(-height // 2), width + width % 2)
    assert (found[:, :height, :width] >= 16).all()
    assert (found[:, :height, :width] < 40).all()  # the stamps, and nothing beside them
    assert (found[:, height:] >= 80).all()
    assert clip_of(packets, Device()).buffer.shape == (12, height, width, 3)


def test_what_a_stream_cuts_on_the_left_is_cut() -> None:
    CUVID.left = 2
    packets = packets_of("libx264")
    found = np.asarray(clip_of(packets, Device(), pix_fmt="nv12").buffer)
    assert found.shape == (12, 96, 64)
    assert (found[:, :64] < 40).all()


@pytest.mark.parametrize(("stated", "matrix"), [(1, "bt709"), (2, "bt601"), (0, "bt601")])
def test_the_matrix_is_that_of_the_data_if_it_states_one(stated: int, matrix: str) -> None:
    CUVID.matrix, device = stated, Device()
    clip_of(packets_of("libx264"), device, pix_fmt="nv12")
    assert device.colors == [(matrix, "tv")]


def test_frames_wait_for_a_launch_in_the_number_that_can_be_mapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It depends on the coded size, of which these frames are a part."""
    monkeypatch.setattr(surfaces, "_BYTES", 16 * 512 * 70 * 3 // 2)
    CUVID.below, device = 16, Device()
    assert len(clip_of(packets_of("libx264", size=(512, 64), count=40), device).pts) == 40
    assert device.launches == [8] * 5


@pytest.mark.parametrize("delay", [3, 26])
def test_a_stream_that_needs_many_surfaces(delay: int) -> None:
    """With the long delay, the end of the stream gives more frames than can be mapped at a time."""
    CUVID.surfaces, CUVID.delay = 28, delay
    assert len(clip_of(packets_of("libx265", count=40), Device()).pts) == 40


@pytest.mark.parametrize("late", [7, 333333])
def test_a_hidden_frame_that_takes_the_time_of_its_packet(late: int) -> None:
    """NVIDIA's parser then invents one for the frame that is shown, and it may be that of a later packet."""
    packets = packets_of("libsvtav1", frame_rate=60)
    CUVID.late = late
    assert clip_of(packets, Device()).pts == sm.decode_packets(packets, None).pts


@pytest.mark.parametrize(("codec", "format"), [("libx264", "mp4"), ("libvpx-vp9", "webm")])
def test_times_that_start_again_are_those_of_the_cpu(codec: str, format: str) -> None:
    """As where recordings were joined."""
    packets = packets_of(codec, format)
    coded = [with_data(packet, bytes(packet)) for packet in av_packets(packets)]
    for packet in coded[6:]:
        packet.pts = packet.dts = (packet.pts or 0) - (coded[4].pts or 0)
    packets = packets.with_packets(coded, packets.codec)
    assert clip_of(packets, Device()).pts == sm.decode_packets(packets, None).pts


def test_times_of_packets_without_a_frame_of_their_own_are_forgotten() -> None:
    """As of the second of two fields."""
    one = Session("h264", 0)
    one._times = {time: (time, 1) for time in range(1000)}
    assert one.time_of(990) == (990, 1)
    assert len(one._times) == 9


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


UNSUPPORTED = [
    ({"supported": 0}, "NVDEC of this device does not decode hevc of 8 bits"),
    ({"create_error": 801}, "cuvidCreateDecoder says CUDA_ERROR_NOT_SUPPORTED"),
    ({"caps_error": 801}, "cuvidGetDecoderCaps says CUDA_ERROR_NOT_SUPPORTED"),
    ({"parser_error": 1}, "cuvidCreateVideoParser says CUDA_ERROR_INVALID_VALUE"),
    ({"least": 144}, "NVDEC of this device decodes hevc from 144x144 to 8192x8192, not 64x64"),
    ({"chroma": 3}, "NVDEC decodes 4:2:0 of 8, 10 and 12 bits, and this is 4:4:4 of 8 bits"),
]


@pytest.mark.parametrize(("settings", "words"), UNSUPPORTED)
def test_what_the_hardware_does_not_decode_is_for_the_cpu(settings: Any, words: str) -> None:
    packets, device = packets_of("libx265"), Device()
    for name, value in settings.items():
        setattr(CUVID, name, value)
    with pytest.raises(NotOnDeviceError, match=words):
        clip_of(packets, device)
    with pytest.raises(sm.DecodeError, match=rf"{words}.*decoder='auto'"):
        decode_packets_nvdec(packets, cuda=device)
    assert not device.decoders.clear()  # it is not kept


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


@pytest.mark.parametrize("error", [1, 2, 999])
def test_a_frame_that_cannot_be_mapped_is_an_error_of_the_device(error: int) -> None:
    CUVID.map_error, device = error, Device()
    with pytest.raises(sm.TransferError, match="cuvidMapVideoFrame64 says CUDA_ERROR"):
        clip_of(packets_of("libx264"), device)


@pytest.mark.parametrize("setting", ["decode_error", "parse_error"])
def test_damage_is_not_taken_for_a_device_that_fails(setting: str) -> None:
    packets, device = packets_of("libx264"), Device()
    CUVID.good_pictures = CUVID.pictures + 3
    setattr(CUVID, setting, 1)
    with pytest.raises(sm.DecodeError, match=r"damaged h264 data.*says CUDA_ERROR_INVALID_VALUE"):
        clip_of(packets, device)


def test_data_without_a_frame_is_damaged() -> None:
    CUVID.shows = 0
    with pytest.raises(sm.DecodeError, match=r"damaged vp9 data.*NVIDIA's parser finds no frame"):
        clip_of(packets_of("libvpx-vp9", "webm"), Device())


def test_a_length_beyond_the_data_is_damage() -> None:
    packets = packets_of("libx264")
    coded = list(av_packets(packets))
    coded[5] = with_data(coded[5], b"\0\0\1\0" + bytes(coded[5])[4:9])
    with pytest.raises(sm.DecodeError, match="a NAL unit exceeds its packet"):
        clip_of(packets.with_packets(coded, packets.codec), Device())


@pytest.mark.parametrize(
    ("codec", "format"), [("libx264", "mpegts"), ("libx264", "mp4"), ("libvpx-vp9", "webm")]
)
@pytest.mark.parametrize("is_empty", [True, False])
def test_packets_without_data_or_with_some_zeros_more(
    codec: str, format: str, is_empty: bool
) -> None:
    packets = packets_of(codec, format)
    coded = list(av_packets(packets))
    coded[5] = with_data(coded[5], b"" if is_empty else bytes(coded[5]) + b"\0\0")
    packets = packets.with_packets(coded, packets.codec)
    assert len(clip_of(packets, Device()).pts) == 12 - is_empty


def test_damage_that_the_hardware_finds_is_raised_kept_or_dropped() -> None:
    packets, device = packets_of("libx264", count=30), Device()
    CUVID.damaged = 5
    with pytest.raises(sm.DecodeError, match=r"damaged h264 data at 0\..*the frame is damaged"):
        clip_of(packets, device)
    for on_corrupt, count in (("keep", 30), ("drop", 29)):
        device.decoders.clear()
        config = sm.decode_config(on_corrupt=on_corrupt)  # type: ignore[arg-type]  # a valid choice
        assert len(clip_of(packets, device, decode_config=config).pts) == count
    CUVID.damaged = -1
    assert len(device.opened) == 3
    assert clip_of(packets, device).pts == sm.decode_packets(packets, None).pts


def test_errors_that_are_kept_hold_no_frames_of_their_decoder() -> None:
    packets, device, kept = packets_of("libx264"), Device(), []
    before = CUVID.pictures
    for _ in range(12):
        CUVID.damaged = CUVID.pictures - before + 5
        with pytest.raises(sm.DecodeError, match="the frame is damaged") as found:
            clip_of(packets, device)
        kept.append(found)
    CUVID.damaged = -1
    clip_of(packets, device)
    assert len(device.opened) == 1


def test_an_error_of_the_device_frees_its_decoder_at_once() -> None:
    packets, device = packets_of("libx264"), Device()
    CUVID.good_pictures, CUVID.decode_error = CUVID.pictures + 5, 999
    gc.disable()
    with pytest.raises(sm.TransferError) as found:
        clip_of(packets, device)
    del found
    gc.enable()
    assert CUVID.created == CUVID.destroyed


def test_what_a_device_that_is_gone_held_is_freed_in_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packets, said = packets_of("libx264"), []
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    one = DeviceDecoder(Device().open_decoder(packets.codec))
    one.begin(packets.codec, "x", 1)
    frames = [f for p in av_packets(packets) for f in one.decode(p) if f.planes]
    CUDA.gone = 46
    del frames, one
    assert not said
    CUDA.gone = 0
    # The driver frees them with the process.
    CUVID.destroyed, CUVID.mapped, CUVID.parsers = CUVID.created, 0, 0


def test_a_cycle_of_frames_and_their_decoder_is_freed() -> None:
    packets = packets_of("libx264")
    one = DeviceDecoder(Device().open_decoder(packets.codec))
    one.begin(packets.codec, "x", 1)
    cycle: list[Any] = [f for p in av_packets(packets) for f in one.decode(p) if f.planes]
    cycle.append(cycle)
    del cycle, one
    gc.collect()
    assert CUVID.created == CUVID.destroyed


@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_a_ctrl_c_in_the_driver_is_not_lost_and_loses_no_surface(call: int) -> None:
    packets, device = packets_of("libx264"), Device()
    CUVID.interrupted = call
    with pytest.raises(KeyboardInterrupt):
        clip_of(packets, device)
    CUVID.interrupted = 0
    assert len(clip_of(packets, device).pts) == 12
    assert CUVID.mapped == 0


def test_options_of_decoders_on_the_cpu_are_refused() -> None:
    for config in (
        sm.decode_config(decoder="h264"),
        sm.decode_config(decoder_options={"threads": 4}),
    ):
        with pytest.raises(
            ValueError, match=r"are for FFmpeg's decoders, on the CPU\. Leave them out"
        ):
            decode_packets_nvdec(packets_of("libx264"), cuda=Device(), decode_config=config)


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


def test_decoders_of_16_threads_are_kept_while_all_of_them_wait() -> None:
    pool, decoders = DecoderPool(), [SimpleNamespace(nbytes=1 << 20) for _ in range(16)]
    for one in decoders:
        pool.give("key", one)  # type: ignore[arg-type]  # has what the pool reads
    assert all(pool.take("key") for _ in decoders)


def test_large_decoders_are_kept_in_smaller_numbers() -> None:
    device = Device()
    clip_of(packets_of("libx264", size=(48, 64), count=2), device)
    device.decoders = DecoderPool(8, 3 * device.decoders._idle[0][1].nbytes)
    for side in range(48, 128 + 16, 16):
        clip_of(packets_of("libx264", size=(side, 64), count=2), device)
    assert 1 <= CUVID.created - CUVID.destroyed <= 2


def test_a_clip_waits_for_the_stream_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event is recorded by the thread of that clip: stream 2 is another one in each thread."""
    device, calls = Device(), []

    class Event:
        def __init__(self, *stream: int) -> None:
            calls.append(stream)

        def delay(self, stream: int) -> None:
            calls.append((stream,))

    monkeypatch.setattr(session, "Event", Event)
    for device.stream in (0, 2, 2):
        clip_of(packets_of("libx264"), device)
    assert calls == [(0, 0), (2,), (0, 2), (2,), (0, 2)]


def test_a_forked_process_leaves_the_decoders_of_its_parent_alone() -> None:
    device, packets = Device(), packets_of("libx264")
    device.decoders = DECODERS
    clip_of(packets, device)
    destroyed = CUVID.destroyed
    GATE.__enter__()  # as a thread has, which the child does not have
    child = os.fork()
    if not child:
        found = GATE._count or DECODERS.clear() or CUVID.destroyed - destroyed
        gc.collect()
        os._exit(1 if found or CUVID.destroyed != destroyed else 0)
    GATE.__exit__()
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


@pytest.mark.parametrize("version", [0, 1])
def test_headers_of_hevc_of_both_versions(version: int) -> None:
    """Files from before the standard state version 0."""
    packets = packets_of("libx265")
    headers = bytes([version]) + (packets.codec.extradata or b"")[1:]
    codec = replace(packets.codec, extradata=headers)
    assert has_lengths(codec)
    assert stream_headers(codec) == stream_headers(packets.codec)


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


def test_calls_are_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And two in each frame release the GIL."""
    packets, device = packets_of("libx264", count=4), Device()

    def load() -> Any:
        shape = np.shape(clip_of(packets, device).buffer)
        return SimpleNamespace(shape=shape, synchronize=lambda: None)

    monkeypatch.setattr(gpu_check, "load", load)
    gpu_check.threads(1)
    said = capsys.readouterr().out
    assert (
        re.findall(r"^(\d+) threads: \d+ frames/s", said, re.MULTILINE) == "1 2 4 8 16 1 8".split()
    )
    without = re.findall(r"cuvid(\w+) without the GIL: .* ([\d.]+) times a frame", said)
    calls = [name for name, share in without if share == "1.00"]
    assert sorted(calls) == ["DecodePicture"] * 2 + ["MapVideoFrame64"] * 2
    for cached in (library, driver):  # which have the calls that are timed
        cached.cache_clear()
