"""Damage, gaps and changes in audio: missing parts are reported, and the rest keeps its position."""

from __future__ import annotations

import io
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from audio_oracle import clip, linear, samples_of, sound

import spdl_media as sm
from spdl_media.packets import AudioPackets, av_packets
from spdl_media.testing import AudioTrack, index_samples, make_audio, make_media


def _without(packets: AudioPackets, *missing: int) -> AudioPackets:
    kept = [p for k, p in enumerate(av_packets(packets)) if k not in missing]
    return packets.with_packets(kept, packets.codec)


def _hit(data: bytes, place: float, count: int = 40) -> bytes:
    """Return the bytes with some of them inverted, at about the part ``place`` of the file."""
    damaged = bytearray(data)
    first = int(len(data) * place)
    for k in range(first, first + count):
        damaged[k] ^= 0xFF
    return bytes(damaged)


def test_an_order_of_channels_at_which_pyav_crashes_is_refused() -> None:
    """PyAV frees the list of channels twice, which ends the process some files later."""
    usual = make_audio(index_samples(99, 6), 8000, codec="pcm_s16be", format="caf")
    data = usual.replace(
        b"\0\x79\0\6", b"\0\x7c\0\6", 1
    )  # Apple's MPEG_5_1_D instead of MPEG_5_1_A
    for _ in range(9):
        info = sm.probe(data).audio
        assert info is not None
        assert info.channel_layout == "6 channels (FC+FL+FR+SL+SR+LFE)"
        with pytest.raises(sm.DecodeError, match=r"it has 6 channels \(FC\+FL.* PyAV crashes"):
            sm.load_audio(data)
        with (
            pytest.raises(sm.EncodeError, match=r"PyAV crashes at the order of 6 channels \(FC"),
            sm.Muxer(io.BytesIO(), format="mov") as muxer,
        ):
            muxer.add_remux_stream(sm.demux_audio(data))
    assert sm.load_audio(usual).shape == (6, 99)


@pytest.mark.parametrize(
    ("codec", "format"), [("flac", "matroska"), ("libopus", "webm"), ("aac", "mp4")]
)
def test_a_gap_shifts_nothing(codec: str, format: str) -> None:
    packets = sm.demux_audio(clip(codec, format))
    step = len(sm.decode_packets(packets[10:11], filter_desc=None))
    if codec == "libopus":
        step = 960  # a decoder that starts here drops its delay
    gap = _without(packets, 20, 21).with_metadata(window=sm.timing.parse_window((1.5, 1.6)))
    whole = packets.with_metadata(window=sm.timing.parse_window((1.5, 1.6)))
    a, b = (sm.decode_packets(p, filter_desc=None) for p in (whole, gap))
    assert step in (960, 1024, 4608)
    assert a.first_sample == b.first_sample == 72000
    assert len(a) == len(b) == 4800
    if codec == "flac":
        np.testing.assert_array_equal(samples_of(a), samples_of(b))


def test_damage_raises_with_its_place() -> None:
    data = _hit(clip("flac", "flac"), 0.5)
    with pytest.raises(sm.DecodeError, match=r"damaged flac data at \d\.\d+ s .*drop") as caught:
        sm.decode_packets(sm.demux_audio(data, name="voice"))
    assert caught.value.source == "voice"
    assert caught.value.pts_seconds == pytest.approx(2, abs=0.2)
    assert caught.value.packet_index == pytest.approx(20, abs=3)


def test_damage_can_be_dropped() -> None:
    clean = clip("flac", "flac")
    config = sm.decode_config(on_corrupt="drop")
    frames = sm.decode_packets(
        sm.demux_audio(_hit(clean, 0.5)), filter_desc=None, decode_config=config
    )
    missing = linear(clean).shape[1] - len(frames)
    assert frames.num_dropped >= 1
    assert missing >= 4608
    np.testing.assert_array_equal(samples_of(frames)[:, :48000], linear(clean)[:, :48000])
    np.testing.assert_array_equal(samples_of(frames)[:, -48000:], linear(clean)[:, -48000:])


def test_damage_outside_the_window_is_not_met() -> None:
    data = _hit(clip("flac", "flac"), 0.9)
    frames = sm.decode_packets(sm.demux_audio(data, timestamp=(1, 2)), filter_desc=None)
    np.testing.assert_array_equal(
        samples_of(frames), linear(clip("flac", "flac"))[:, 48000:96000]
    )  # fmt: skip


@pytest.mark.parametrize("format", ["flac", "mp4", "matroska"])
def test_damage_inside_the_window_is_always_met(format: str) -> None:
    data, clean = _hit(clip("flac", format), 0.5), linear(clip("flac", format))
    raised = 0
    for start in range(150, 250, 5):
        window = (Fraction(start, 100), Fraction(start + 5, 100))
        packets = sm.demux_audio(data, timestamp=window)
        try:
            frames = sm.decode_packets(packets, filter_desc=None)
        except (sm.DecodeError, sm.DemuxError):
            raised += 1
        else:
            assert len(frames) == 2400
            first = 480 * start
            np.testing.assert_array_equal(samples_of(frames), clean[:, first : first + 2400])
    assert 1 <= raised <= 10


def _concatenated(first: Any, second: Any) -> bytes:
    """Join two ADTS streams; such files come from radio streams."""
    return b"".join(
        make_audio(samples, rate, codec="aac", format="adts") for samples, rate in (first, second)
    )


def test_a_change_of_rate_and_channels() -> None:
    data = _concatenated((sound(48000), 48000), (sound(22050, 22050, 1), 22050))
    desc = sm.get_audio_filter_desc(sample_rate=48000, num_channels=2)
    frames = sm.decode_packets(sm.demux_audio(data), desc)
    assert {chunk.frame.sample_rate for chunk in frames.chunks} == {48000}
    assert {chunk.frame.layout.name for chunk in frames.chunks} == {"stereo"}
    assert len(frames) == pytest.approx(2 * 48000, abs=5000)


@pytest.mark.parametrize("rate", [8000, 11025, 44100, 96000])
def test_rates(rate: int) -> None:
    data = clip("flac", "flac", rate, 1)
    frames = sm.decode_packets(sm.demux_audio(data, timestamp=(0.1, 0.3)), filter_desc=None)
    assert frames.sample_rate == rate
    assert len(frames) == math.ceil(rate * 0.3) - math.ceil(round(rate * 0.1, 6))


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "float32"])
@pytest.mark.parametrize("channels", [1, 2, 6, 8])
def test_sample_formats_and_channels(dtype: str, channels: int, rng: np.random.Generator) -> None:
    if dtype == "float32":
        samples = rng.uniform(-1, 1, (5000, channels)).astype(dtype)
    else:
        info = np.iinfo(dtype)
        samples = rng.integers(info.min, info.max, (5000, channels), dtype, endpoint=True)
    codec = {"uint8": "pcm_u8", "int16": "pcm_s16le", "int32": "pcm_s32le", "float32": "pcm_f32le"}
    data = make_audio(samples, 16000, codec=codec[dtype])
    frames = sm.decode_packets(sm.demux_audio(data), filter_desc=None)
    assert (frames.num_channels, frames.sample_rate, len(frames)) == (channels, 16000, 5000)
    np.testing.assert_array_equal(samples_of(frames), samples.T)


def test_the_default_filter_gives_float_planes() -> None:
    data = make_audio(np.array([[-32768, 0], [16384, 32767]], np.int16))
    frames = sm.decode_packets(sm.demux_audio(data))
    assert frames.sample_fmt == "fltp"
    np.testing.assert_allclose(samples_of(frames), [[-1, 0.5], [0, 32767 / 32768]])


def test_one_of_several_audio_streams() -> None:
    tracks = [AudioTrack(samples=sound(48000) // k, codec="flac") for k in (1, 2)]
    data = make_media(tracks, format="matroska")
    for index, divisor in enumerate((1, 2)):
        frames = sm.decode_packets(sm.demux_audio(data, stream_index=index), filter_desc=None)
        np.testing.assert_array_equal(samples_of(frames), (sound(48000) // divisor).T)


def test_images_are_no_audio() -> None:
    data = clip("flac", "flac")
    with pytest.raises(sm.DemuxError, match="no video stream; the streams are 0: audio"):
        sm.demux_video(data)
    with pytest.raises(TypeError, match="decode_packets takes AudioPackets"):
        sm.decode_packets(b"")  # type: ignore[call-overload]
