"""Packets are values: counted, cut, timed, shown and shared without copying."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from audio_oracle import clip
from decoded import digest

import spdl_media as sm
from spdl_media.packets import make_packet
from spdl_media.testing import index_frames, index_planes, make_image, make_video


@pytest.fixture(scope="module")
def video() -> bytes:
    return make_video(index_planes(20, 64, 48), codec="libx265", format="mp4", max_b_frames=2)


def test_packets_say_which_are_key_frames() -> None:
    data = make_video(index_planes(9, 64, 48), codec="mpeg4", gop_size=4)
    assert sm.demux_video(data).is_key == (True, False, False, False) * 2 + (True,)


def test_len_and_repr(video: bytes) -> None:
    packets = sm.demux_video(video)
    assert len(packets) == 20
    assert repr(packets) == "<VideoPackets: 20 of hevc, 0.000 s to 1.900 s>"
    assert (
        repr(sm.demux_video(video, timestamp=(50, 60)))
        == "<VideoPackets: 10 of hevc, none in [50, 60)>"
    )
    sound = sm.demux_audio(clip("flac", "flac", seconds=1))
    assert repr(sound).startswith("<AudioPackets: 11 of flac, 0.000 s to 0.9")
    image = sm.demux_image(make_image(index_frames(1, 32, 32)[0]))
    assert repr(image) == f"<ImagePackets: 1 of png, {image.nbytes} bytes>"


def test_timestamps_are_in_display_order_and_in_the_window(video: bytes) -> None:
    packets = sm.demux_video(video, timestamp=("0.5", "0.8"))
    assert packets.get_timestamps() == (0.5, 0.6, 0.7)
    assert packets.get_timestamps() == sm.decode_packets(packets).timestamps
    raw = packets.get_timestamps(raw=True)
    assert len(raw) == len(packets)
    assert raw == tuple(sorted(raw))
    assert set(raw) > {0.5, 0.6, 0.7}
    assert packets.timestamp == (0.5, 0.8)


def test_slices_share_packets(video: bytes) -> None:
    packets = sm.demux_video(video)
    head = packets[:5]
    assert isinstance(head, sm.VideoPackets)
    assert (len(head), len(packets[5:]), len(packets[-3:]), len(packets[30:])) == (5, 15, 3, 0)
    assert head.nbytes == sum(packets[k : k + 1].nbytes for k in range(5))
    assert len(sm.decode_packets(head)) == 5
    with pytest.raises(sm.DecodeError, match=r"continue a stream.*VideoDecoder"):
        sm.decode_packets(packets[3:])
    with pytest.raises(TypeError, match=r"a slice of step 1, such as \[10:20\], not 3"):
        packets[3]  # type: ignore[index]


def test_every_second_packet_is_no_run(video: bytes) -> None:
    with pytest.raises(TypeError, match="step 1"):
        sm.demux_video(video)[::2]


def test_a_slice_of_audio_decodes_to_its_own_samples() -> None:
    packets = sm.demux_audio(clip("flac", "flac"))
    whole = sm.decode_packets(packets, filter_desc=None)
    part = sm.decode_packets(packets[10:12], filter_desc=None)
    assert part.first_sample == 10 * 4608
    np.testing.assert_array_equal(
        part.chunks[0].planes[0], whole[46080 : 46080 + 4608].chunks[0].planes[0]
    )


def test_metadata_of_a_stream(video: bytes) -> None:
    packets = sm.demux_video(video)
    assert (packets.width, packets.height, packets.pix_fmt) == (64, 48, "yuv420p")
    assert (packets.frame_rate, packets.rotation, packets.orientation) == (10, 0, 1)
    assert packets.source == f"bytes of length {len(video)}"
    sound = sm.demux_audio(clip("aac", "mp4", 44100), name="voice")
    assert (sound.sample_rate, sound.num_channels, sound.time_base) == (
        44100, 2, Fraction(1, 44100),
    )  # fmt: skip
    assert (sound.source, sound.timestamp) == ("voice", (None, None))


def test_decoding_does_not_consume(video: bytes) -> None:
    for packets in (
        sm.demux_video(video, timestamp=(0.3, 0.9)),
        sm.demux_audio(clip("libmp3lame", "mp3"), timestamp=(1, 2)),
        sm.demux_image(make_image(index_frames(1, 32, 32)[0])),
    ):
        assert digest(packets) == digest(packets) == digest(pickle.loads(pickle.dumps(packets)))


def _address(buffer: object) -> tuple[int, int]:
    array = np.frombuffer(buffer, np.uint8)  # type: ignore[call-overload]
    return array.ctypes.data, array.ctypes.data + array.nbytes


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, np.ndarray])
def test_stills_are_not_copied(kind: type) -> None:
    data = make_image(index_frames(1, 64, 64)[0])
    source = np.frombuffer(data, np.uint8) if kind is np.ndarray else kind(data)
    (packet,) = sm.demux_image(source)._packets
    assert _address(packet) == _address(source)


_GUARDED = """
import ctypes, mmap, os, pathlib, sys
import spdl_media as sm

page = mmap.PAGESIZE
protect = ctypes.CDLL(None, use_errno=True).mprotect
protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
kept = []
for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    print(path.name, flush=True)
    data = path.read_bytes()
    size = -(-len(data) // page) * page
    area = mmap.mmap(-1, size + page)
    kept.append(area)
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    area[size - len(data) : size] = data
    assert protect(address + size, page, 0) == 0
    packets = sm.demux_image(memoryview(area)[size - len(data) : size])
    print(sm.decode_packets(packets).width, flush=True)
os._exit(0)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mprotect")
def test_stills_at_the_end_of_memory(tmp_path: Path) -> None:
    # FFmpeg reads beyond the end of the data that it decodes; no memory follows this data.
    codecs = ["bmp", "jpeg2000", "libwebp", "mjpeg", "png", "tiff"]
    for codec in codecs:
        (tmp_path / codec).write_bytes(make_image(index_frames(1, 64, 64)[0], codec=codec))
    command = [sys.executable, "-c", _GUARDED, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wanted = [word for codec in codecs for word in (codec, "64")]
    assert (done.returncode, done.stdout.split()) == (0, wanted), done.stderr[-500:]


def test_unpickled_packets_have_zeros_behind_them() -> None:
    # Without padding, MPEG-4 reported damage in every other run.
    data = make_video(index_planes(12, 96, 80), codec="mpeg4", format="avi", frame_rate=25)
    packets = sm.demux_video(data)
    wanted = digest(packets)
    for _ in range(10):
        assert digest(pickle.loads(pickle.dumps(packets))) == wanted


def test_packets_hold_no_reference_to_the_source_file(tmp_path: Path, video: bytes) -> None:
    path = tmp_path / "clip.mp4"
    path.write_bytes(video)
    packets = sm.demux_video(path)
    path.unlink()
    assert len(sm.decode_packets(packets)) == 20


def test_make_packet_keeps_its_memory_alive() -> None:
    packet = make_packet(bytes(range(200)), Fraction(1, 25))
    assert bytes(packet) == bytes(range(200))


@pytest.mark.parametrize("profile", [0, 3])
def test_frames_of_vp9_that_are_not_shown_have_no_timestamp(profile: int) -> None:
    packets = sm.demux_video(make_video(index_planes(4, 64, 48), codec="libvpx-vp9", format="webm"))
    # The first byte: two bits of marker, two of profile, one more in profile 3, and flags: whether it shows a
    # frame again, is no key frame, is shown.
    hidden, shown = (0b10_00_0100, 0b10_00_0110) if profile == 0 else (0b10_11_0010, 0b10_11_0011)
    both = bytes([0xC1, 1, 1, 0xC1])  # a superframe of two frames of one byte
    contents = [bytes([shown]), bytes([hidden]), bytes([hidden, shown]) + both, bytes([shown])]
    coded = [make_packet(content, packets.time_base) for content in contents]
    for number, packet in enumerate(coded):
        packet.pts = 100 * number
    assert packets.with_packets(coded, packets.codec).get_timestamps() == (0.0, 0.2, 0.3)


@pytest.mark.parametrize(
    ("codec", "place", "frame", "parameters"),
    [("libx264", 4, b"\x41\x9a\x07", b"\x67\x41\x41"), ("libx265", 21, b"\2\1\x42", b"\x42\1\2")],
)
def test_units_behind_lengths_of_two_bytes_are_told_apart(
    codec: str, place: int, frame: bytes, parameters: bytes
) -> None:
    """Such files come from old cameras. The third byte of each unit stands where the first one is usual."""
    packets = sm.demux_video(make_video(index_planes(3, 64, 48), codec=codec, format="mp4"))
    assert packets.codec.extradata is not None
    extradata = bytearray(packets.codec.extradata)
    extradata[place] ^= 0b10
    coded = [make_packet(b"\0\3" + unit, packets.time_base) for unit in (frame, parameters, frame)]
    for number, packet in enumerate(coded):
        packet.pts = number * (packets.codec.time_base.denominator // 10)
    changed = dataclasses.replace(packets.codec, extradata=bytes(extradata))
    assert packets.with_packets(coded, changed).get_timestamps() == (0.0, 0.2)


def test_a_small_key_frame_behind_its_parameter_sets_is_a_frame() -> None:
    """A packet of parameter sets alone, as the last one of some streams, is none."""
    frames = [np.full((32, 32, 3), level, np.uint8) for level in range(0, 80, 10)]
    packets = sm.demux_video(make_video(frames, codec="libx264", format="mpegts", gop_size=2))
    assert packets[4:5].is_key == (True,)
    assert packets[4:5].nbytes < 1024
    assert len(packets.get_timestamps()) == 8
