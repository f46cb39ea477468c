"""Frames of a hardware decoder agree with the CPU path in number, times and pixels."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import numpy as np
import pytest
from effort import each
from nvdec_stand_in import HardwareFrame, StandIn, clip_of, load_video_nvdec
from oriented import FRAMES, oriented_clip, upright

import spdl_media as sm
from spdl_media.cuda.nvdec import DeviceDecoder
from spdl_media.cuda.video_rows import DeviceRows, Output, Shown
from spdl_media.cuda.videos import decode_packets_nvdec, streaming_load_video_nvdec
from spdl_media.operations import PictureOps
from spdl_media.packets import av_packets
from spdl_media.testing import index_frames, index_planes, make_video

SIDES = (64, 48)

EXACT = sm.get_video_filter_desc(quality="accurate")


@cache
def clip(codec: str = "libx264", format: str = "mp4", encoder: Any = (), **options: Any) -> bytes:
    planes = index_planes(20, *SIDES, options.get("pix_fmt", "yuv420p"))
    return make_video(
        planes, codec=codec, format=format, gop_size=8, options=dict(encoder), **options
    )


def decode(packets: sm.VideoPackets, **options: Any) -> Any:
    options.setdefault("pix_fmt", "nv12")
    return clip_of(packets, StandIn(), **options)


def check_close(got: Any, want: Any, most: int = 1) -> None:
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape
    assert got.dtype == want.dtype == np.uint8
    assert np.abs(got.astype(int) - want).max() <= most


def tiled(luma: np.ndarray, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    chroma = np.stack([u, v], 2)
    return np.concatenate([luma, chroma.reshape(len(u), -1)])


@pytest.mark.parametrize(
    ("codec", "format", "b_frames"),
    [
        ("libx264", "mp4", 2),
        ("libx264", "mpegts", 2),
        ("libx265", "matroska", 2),
        ("libvpx-vp9", "webm", 0),
        ("libsvtav1", "mp4", 0),
        ("libx264", "h264", 0),
    ],
)
@pytest.mark.parametrize("window", [None, (0.55, 1.35)])
def test_planes_and_times_are_those_of_the_cpu(
    codec: str, format: str, b_frames: int, window: tuple[float, float] | None
) -> None:
    data = clip(codec, format, max_b_frames=b_frames)
    packets = sm.demux_video(data, timestamp=window)
    want = sm.decode_packets(packets, "format=nv12")
    got = decode(packets)
    assert np.array_equal(got.buffer, sm.convert_frames(want).array[:, 0])
    assert (got.pts, got.time_base) == (want.pts, want.time_base)
    assert got.timestamps == want.timestamps


@pytest.mark.parametrize(("pix_fmt", "shift"), [("yuv420p10le", 6), ("yuv420p12le", 4)])
def test_deep_planes_have_their_values_in_the_high_bits(pix_fmt: str, shift: int) -> None:
    planes = index_planes(6, *SIDES, pix_fmt)
    data = make_video(planes, codec="libx265", format="mp4", pix_fmt=pix_fmt)
    got = load_video_nvdec(data, cuda=StandIn(), pix_fmt="nv12")
    assert got.dtype == np.uint16
    assert np.array_equal(got, [tiled(*frame) << shift for frame in planes])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"width": 40, "height": 40},
        {"width": 40, "height": 43},
        {"width": 33, "height": 30, "scale_mode": "crop"},
        {"width": 41, "height": 30, "scale_mode": "crop"},
        {"width": 30, "height": 41, "scale_mode": "crop"},
        {"width": 31, "height": 90, "scale_mode": None},
        {"width": 33},
        {"height": 17},
        {"width": 40, "height": 40, "scale_algo": "bilinear"},
        {"pix_fmt": "bgr24", "width": 40, "height": 40},
        {"layout": "NCHW", "width": 40, "height": 40},
        {"timestamp": (0.35, 1.2)},
        {"num_frames": 3},
        {"frame_rate": 7},
        {"frame_rate": "30000/1001", "timestamp": (0.35, 1.2)},
        {"frame_rate": 25, "num_frames": 4, "timestamp": (0.35, None)},
    ],
)
@pytest.mark.parametrize("pix_fmt", ["yuv420p", "yuv420p10le"])
def test_rgb_is_within_one_level_of_the_cpu(options: dict[str, Any], pix_fmt: str) -> None:
    data = clip("libx265", max_b_frames=2, pix_fmt=pix_fmt)
    got = load_video_nvdec(data, cuda=StandIn(), **options)
    check_close(got, sm.load_video(data, **options, quality="accurate"))


@pytest.mark.parametrize("rate", [3, 10, "24000/1001", 60])
@pytest.mark.parametrize("window", [None, (0.35, 1.2)])
def test_times_at_another_rate(rate: Any, window: tuple[float, float] | None) -> None:
    packets = sm.demux_video(clip(), timestamp=window)
    want = sm.decode_packets(packets, sm.get_video_filter_desc(frame_rate=rate, quality="accurate"))
    got = decode(packets, frame_rate=rate)
    assert got.pts == want.pts
    assert got.timestamps == want.timestamps


@pytest.mark.parametrize("colour", [(1, 1), (2, 5), (1, 9), (2, 7), (0, 2)])
def test_matrix_and_range_are_those_that_the_stream_states(colour: tuple[int, int]) -> None:
    metadata = f"h264_metadata=video_full_range_flag={int(colour[0] == 2)}"
    metadata += f":matrix_coefficients={colour[1]}"
    packets = sm.apply_bsf(sm.demux_video(clip()), metadata)
    want = sm.convert_frames(sm.decode_packets(packets, EXACT))
    check_close(decode_packets_nvdec(packets, cuda=StandIn(), layout="NHWC"), want)


def odd(width: int, height: int) -> bytes:
    planes = index_planes(3, width, height)
    return make_video(planes, codec="libvpx-vp9", format="webm", options={"lossless": "1"})


@pytest.mark.parametrize(("width", "height"), [(63, 48), (33, 46), (62, 47), (63, 47)])
def test_odd_sizes_lose_nothing(width: int, height: int) -> None:
    data = odd(width, height)
    check_close(load_video_nvdec(data, cuda=StandIn()), sm.load_video(data, quality="accurate"))
    got = load_video_nvdec(data, cuda=StandIn(), pix_fmt="nv12")
    assert got.shape == (3, height + -(-height // 2), width + width % 2)
    stored = [frame.planes for frame in sm.decode_packets(sm.demux_video(data), None)]
    for array, (luma, u, v) in zip(got, stored, strict=True):
        assert np.array_equal(array[:height, :width], luma)
        assert not array[:height, width:].any()
        assert np.array_equal(array[height:, ::2], u)
        assert np.array_equal(array[height:, 1::2], v)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_all_eight_orientations(orientation: int) -> None:
    data = oriented_clip(orientation)
    got = load_video_nvdec(data, cuda=StandIn(), pix_fmt="nv12")
    turned = [tiled(*(upright(plane, orientation) for plane in frame)) for frame in FRAMES]
    assert np.array_equal(got, turned)
    check_close(load_video_nvdec(data, cuda=StandIn()), sm.load_video(data, quality="accurate"))
    size = {"width": 30, "height": 50}
    for mode in ("pad", "crop", None):
        want = sm.load_video(data, scale_mode=mode, **size, quality="accurate")
        check_close(load_video_nvdec(data, cuda=StandIn(), scale_mode=mode, **size), want, 1)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("mirror", [False, True])
@pytest.mark.parametrize("box", [None, (4, 6, 20, 16), (3, 5, 21, 13)])
def test_cut_and_mirrored_frames_are_those_of_the_cpu(
    orientation: int, mirror: bool, box: Any
) -> None:
    data = oriented_clip(orientation)
    options: dict[str, Any] = {"crops": box and [box], "flips": mirror, "quality": "accurate"}
    got = load_video_nvdec(data, cuda=StandIn(), box=box, mirror=mirror)
    check_close(got, sm.load_video(data, **options), 1)
    # With two boxes and eight orientations, each mode meets each of both.
    mode = ("pad", "crop", None)[(orientation + mirror) % 3]
    size: dict[str, Any] = {"width": 18, "height": 30, "scale_mode": mode}
    got = load_video_nvdec(data, cuda=StandIn(), box=box, mirror=mirror, **size)
    check_close(got, sm.load_video(data, **size, **options), 1)


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("algo", ["bicubic", "bilinear"])
@pytest.mark.parametrize("box", [None, (4, 6, 20, 16), (3, 5, 21, 13)])
def test_a_size_that_frames_have_already_is_scaled_to_as_on_the_cpu(
    orientation: int, algo: Any, box: Any
) -> None:
    data = oriented_clip(orientation)
    width, height = box[2:] if box else (64, 48) if orientation == 1 else (48, 64)
    options = {"scale_algo": algo, "width": width, "height": height}
    got = load_video_nvdec(data, cuda=StandIn(), box=box, **options)
    crops = box and [box]
    check_close(got, sm.load_video(data, crops=crops, quality="accurate", **options), 1)
    options["width"] += 10  # a border on both sides
    got = load_video_nvdec(data, cuda=StandIn(), box=box, **options)
    check_close(got, sm.load_video(data, crops=crops, quality="accurate", **options), 1)


def test_a_crop_outside_of_a_frame_is_an_error() -> None:
    words = r"the crop \(50, 0, 20, 20\) .* does not lie inside the frame, which is 64x48"
    with pytest.raises(sm.ConvertError, match=words):
        load_video_nvdec(clip(), cuda=StandIn(), box=(50, 0, 20, 20))


def test_orientation_can_be_left_alone() -> None:
    data, config = oriented_clip(6), sm.decode_config(orient=False)
    got = load_video_nvdec(data, cuda=StandIn(), pix_fmt="nv12", decode_config=config)
    assert np.array_equal(got, [tiled(*frame) for frame in FRAMES])


@each("orientation", range(1, 9))
def test_crop_is_of_the_upright_image(orientation: int) -> None:
    packets = sm.demux_video(oriented_clip(orientation))
    sides = {"crop_left": 2, "crop_top": 4, "crop_right": 6, "crop_bottom": 8}
    got = decode_packets_nvdec(packets, cuda=StandIn(), layout="NHWC", **sides)
    whole = sm.convert_frames(sm.decode_packets(packets, EXACT)).array
    want = whole[:, 4:-8, 2:-6]
    assert got.shape == want.shape
    # Chroma at the cropped edges has one neighbour less.
    check_close(got[:, 2:-2, 2:-2], want[:, 2:-2, 2:-2])


def test_packets_give_nchw_and_scale_without_borders() -> None:
    packets = sm.demux_video(clip())
    got = decode_packets_nvdec(
        packets, cuda=StandIn(), pix_fmt="bgr", scale_width=40, scale_height=20
    )
    filter = sm.get_video_filter_desc(
        scale_width=40, scale_height=20, scale_mode=None, pix_fmt="bgr24"
    )
    want = sm.convert_frames(sm.decode_packets(packets, filter), layout="NCHW")
    check_close(got, want)
    assert got.shape == (20, 3, 20, 40)


def test_packets_are_not_consumed_and_can_be_cut() -> None:
    packets = sm.demux_video(clip())
    first = decode_packets_nvdec(packets, cuda=StandIn())
    assert np.array_equal(first, decode_packets_nvdec(packets, cuda=StandIn()))
    tail = packets[8:]  # from the second key frame on
    assert np.array_equal(first[8:], decode_packets_nvdec(tail, cuda=StandIn()))
    with pytest.raises(sm.DecodeError, match=r"do not start with a key frame.*VideoDecoder"):
        decode_packets_nvdec(packets[3:], cuda=StandIn())


def test_num_frames_decodes_no_more_than_it_needs() -> None:
    device = StandIn()
    assert len(decode_packets_nvdec(sm.demux_video(clip()), cuda=device, num_frames=2)) == 2
    assert device.launches == [2]


@pytest.mark.parametrize("count", [1, 15, 16, 17, 40])
def test_frames_are_converted_and_let_go_sixteen_at_a_time(count: int) -> None:
    before, alive = HardwareFrame.alive, []

    class Counting(StandIn):
        def convert(self, planes: Any, plan: Any, out: Any) -> None:
            alive.append(HardwareFrame.alive - before)
            super().convert(planes, plan, out)

    planes = index_planes(count, *SIDES)
    data, device = make_video(planes, codec="libx264", format="mp4"), Counting()
    check_close(load_video_nvdec(data, cuda=device), sm.load_video(data, quality="accurate"))
    whole, rest = divmod(count, 16)
    assert device.launches == [16] * whole + [rest] * bool(rest)
    assert max(alive) <= 17  # one that the decoder is about to return
    assert HardwareFrame.alive == before


def test_large_frames_are_converted_eight_at_a_time() -> None:
    class Huge(StandIn):
        def open_decoder(self, *args: Any) -> Any:
            decoder = super().open_decoder(*args)
            give = decoder.decode

            def decode(packet: Any, data: bytes) -> Any:
                frames = give(packet, data)
                for frame in frames:
                    frame.per_launch = 8
                return frames

            object.__setattr__(decoder, "decode", decode)
            return decoder

    class Counted(Huge):
        def convert(self, planes: Any, plan: Any, out: Any) -> None:
            self.launches.append(len(planes))

    device = Counted()
    load_video_nvdec(clip(), cuda=device)
    assert device.launches == [8, 8, 4]


def test_a_window_without_frames_is_named() -> None:
    with pytest.raises(sm.ConvertError, match=r"no frame in the window \[10, 11\)"):
        load_video_nvdec(clip(), (10, 11), cuda=StandIn())


@pytest.mark.parametrize("options", [{}, {"pix_fmt": "nv12"}, {"width": 40, "height": 40}])
def test_there_is_room_for_more_frames_than_packets(options: Any) -> None:
    output = Output(PictureOps(**options))
    packets, device = sm.demux_video(clip()), StandIn()
    frames: list[Any] = []
    decoder = DeviceDecoder(device.open_decoder(packets.codec))
    decoder.begin(packets.codec, "x", 1)
    for packet in (*av_packets(packets), None):
        frames += decoder.decode(packet)
    want, got = (DeviceRows(device, output, room, "x") for room in (len(frames), 1))
    for rows in (want, got):
        for frame in frames:
            rows.put(Shown(frame, frame.pts, 1, packets.time_base))
    assert np.array_equal(got.take(), want.take())  # type: ignore[arg-type]  # arrays of NumPy


def test_files_that_are_cut_short() -> None:
    data = clip(faststart=True)
    short = data[: len(data) * 2 // 3]
    with pytest.raises(sm.DecodeError, match=r"cut short|damaged") as found:
        sm.load_video(short, quality="accurate")
    with pytest.raises(sm.DecodeError, match=re.escape(str(found.value.args[0]))):
        load_video_nvdec(short, cuda=StandIn())
    got = load_video_nvdec(short, cuda=StandIn(), num_frames=3)
    check_close(got, sm.load_video(short, num_frames=3, quality="accurate"))


def two_sizes() -> bytes:
    small = make_video(index_planes(4, 32, 16), codec="libx264", format="h264")
    return make_video(index_planes(4, 64, 48), codec="libx264", format="h264") + small


def test_headers_that_change_are_used_from_their_packet_on() -> None:
    """MP4 and FLV have them beside the data of the first packet that needs them."""
    one, other = (
        sm.demux_video(make_video(index_planes(4, *size), codec="libx264", format="mp4"))
        for size in (SIDES, (32, 16))
    )
    first, *rest = av_packets(other)
    headers = [("new_extradata", other.codec.extradata or b"")]
    for number, packet in enumerate((first, *rest)):
        packet.pts = packet.dts = (av_packets(one)[-1].pts or 0) * (number + 4) // 3
    values = [getattr(first, name) for name in sm.packets._FIELDS]
    changed = sm.packets._from_row((bytes(first), values, headers), one.time_base)
    both = one.with_packets([*av_packets(one), changed, *rest], one.codec)
    want = sm.decode_packets(
        both, sm.get_video_filter_desc(scale_width=24, scale_height=24, quality="accurate")
    )
    got = clip_of(both, StandIn(), width=24, height=24)
    assert got.pts == want.pts
    check_close(got.buffer, sm.convert_frames(want))


def test_frames_of_two_sizes_make_one_array_when_scaled_alone() -> None:
    data = two_sizes()
    with pytest.raises(
        sm.ConvertError, match=r"frame 0 is 64x48 rgb24, but frame 4 is 32x16 rgb24.*width="
    ):
        load_video_nvdec(data, cuda=StandIn())
    size = {"width": 24, "height": 24}
    got = load_video_nvdec(data, cuda=StandIn(), **size)
    check_close(got, sm.load_video(data, **size, quality="accurate"))


def test_real_videos(media_dir: Any) -> None:
    for name in ("nasa_13013.mp4", "rotated90_320x240.mp4", "vfr_320x240.mp4", "h264_10bits.mp4"):
        path = media_dir / "video" / name
        got = load_video_nvdec(path, cuda=StandIn(), num_frames=3)
        check_close(got, sm.load_video(path, num_frames=3, quality="accurate"))


@pytest.mark.parametrize(
    ("codec", "words"),
    [
        ("libx264", "this is yuv444p"),
        ("ffv1", "is used for av1, h264, hevc, vp9, and this is ffv1"),
    ],
)
def test_what_the_hardware_does_not_decode_is_an_error_that_names_who_does(
    codec: str, words: str
) -> None:
    format = "mp4" if codec == "libx264" else "matroska"
    data, device = clip(codec, format, pix_fmt="yuv444p"), StandIn()
    words = rf"NVDEC .*{words}.*load_video\(cuda=, decoder='auto'\) decodes it on the CPU"
    with pytest.raises(sm.DecodeError, match=words):
        decode_packets_nvdec(sm.demux_video(data), cuda=device)
    with pytest.raises(sm.DecodeError, match=words):
        next(streaming_load_video_nvdec(data, device, num_frames=7))
    assert device.opened == []


def test_one_decoder_serves_one_clip_after_another() -> None:
    """Clips of one codec and size share a decoder, whatever else differs; each is decoded as if alone."""
    device = StandIn()
    clips = [
        clip(max_b_frames=2),
        clip(),
        clip("libx264", "matroska", encoder=(("colorspace", "bt709"), ("preset", "fast"))),
        clip("libx264", "mp4", frame_rate=50, max_b_frames=3),
    ]
    for data in (*clips, *clips):
        for window in (None, (0.3, 0.7)):
            got = load_video_nvdec(data, window, cuda=device)
            check_close(got, sm.load_video(data, window, quality="accurate"))
    assert device.opened == ["h264"]


def test_a_decoder_that_met_damage_or_was_left_early_serves_the_next_clip() -> None:
    device, data = StandIn(), clip(max_b_frames=2)
    want = sm.load_video(data, quality="accurate")
    load_video_nvdec(data, cuda=device, num_frames=2)
    batches = streaming_load_video_nvdec(data, device, num_frames=3)
    next(batches)
    batches.close()  # type: ignore[attr-defined]  # a generator
    packets = sm.demux_video(data)
    broken = [sm.packets.make_packet(b"\0\0\xff\4junk", packets.time_base)]
    damaged = packets.with_packets(broken, packets.codec)
    with pytest.raises(sm.DecodeError, match="damaged h264 data"):
        clip_of(damaged, device)
    check_close(load_video_nvdec(data, cuda=device), want)
    assert len(device.opened) <= 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale_mode": "fit", "width": 8, "height": 8}, r"scale_mode must be .*not 'fit'"),
        ({"width": 0}, "width must be positive.*not 0"),
        ({"frame_rate": -1}, "frame_rate must be positive, not -1"),
    ],
)
def test_misuse(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_video_nvdec(clip(), cuda=StandIn(), **options)


def test_misuse_of_packets() -> None:
    packets = sm.demux_video(clip())
    with pytest.raises(ValueError, match="pix_fmt must be 'rgb' or 'bgr', not 'rgb24'"):
        decode_packets_nvdec(packets, cuda=StandIn(), pix_fmt="rgb24")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_frames must be at least 1, not 0"):
        decode_packets_nvdec(packets, cuda=StandIn(), num_frames=0)
    with pytest.raises(ValueError, match=r"layout must be 'NCHW', 'NHWC'.*not 'HWC'"):
        decode_packets_nvdec(packets, cuda=StandIn(), layout="HWC")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"scale_algo must be .*not 'lanczos'"):
        decode_packets_nvdec(packets, cuda=StandIn(), scale_algo="lanczos")  # type: ignore[arg-type]
    for name in ("scale_width", "crop_top"):
        with pytest.raises(ValueError, match=f"{name} must be even.*not 7"):
            streaming_load_video_nvdec("no such file", StandIn(), num_frames=1, **{name: 7})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"crop_left must be even.*not 3"):
        decode_packets_nvdec(packets, cuda=StandIn(), crop_left=3)
    with pytest.raises(ValueError, match=r"crop_top must be at least 0, not -2"):
        decode_packets_nvdec(packets, cuda=StandIn(), crop_top=-2)
    with pytest.raises(TypeError, match=r"crop_top must be an int, not 2.0"):
        decode_packets_nvdec(packets, cuda=StandIn(), crop_top=2.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"crop_left=0.*leave nothing of a frame of 64x48"):
        decode_packets_nvdec(packets, cuda=StandIn(), crop_top=24, crop_bottom=24)
    with pytest.raises(TypeError, match="takes VideoPackets, not ImagePackets"):
        decode_packets_nvdec(
            sm.demux_image(sm.testing.make_image(index_frames(1, 8, 8)[0])), cuda=StandIn()
        )
