"""The audio of an MP4 with several edits is that of its edits in order, whatever the codec."""

from __future__ import annotations

import math
import pickle
import struct
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import pytest
from audio_oracle import samples_of, sound

import spdl_media as sm
from spdl_media.testing import AudioTrack, VideoTrack, index_planes, make_media

RATES = {
    "aac": 44100,
    "ac3": 48000,
    "alac": 44100,
    "eac3": 48000,
    "flac": 44100,
    "libmp3lame": 44100,
    "libopus": 48000,
    "pcm_s16be": 48000,
}
# Duration in milliseconds, and the second in the media at which an edit begins.
PIECES = {
    "forward": ((1000, 0.5), (700, 2.0)),
    "back": ((700, 2.0), (1003, 0.5)),
    "three": ((501, 0.0), (500, 1.2), (398, 0.7)),
    "inside of a packet": ((600, 0.4), (2, 1.5), (500, 2.1)),
    "without a jump": ((400, 0.4), (20, 0.8), (20, 0.82), (700, 0.84)),
    "after silence": ((250, -1), (600, 0.4), (500, 2.1)),
    # No packet of ALAC begins in the third one, and the fourth one needs the packets that follow.
    "without a packet": ((18, 1.9), (210, 0.92), (8, 0.171), (905, 1.2)),
    # In AC-3, at the time of the second one.
    "a hidden packet at an edit": ((500, 0.4), (160, 2.0), (500, (40 * 1536 - 256) / 48000)),
}


@cache
def recorded(codec: str, *, video: bool = False, late: int = 0) -> bytes:
    rate, options = RATES[codec], {"aac_pns": "0"} if codec == "aac" else {}
    track = AudioTrack(
        samples=sound(3 * rate, rate), sample_rate=rate, codec=codec, options=options
    )
    pictures = VideoTrack(
        frames=index_planes(30, 32, 32),
        codec="libx264",
        time_base=Fraction(1, 1000),
        pts=range(late, late + 3000, 100),
    )
    options = {"movie_timescale": "1000"}  # by default, FFmpeg 9 writes the sample rate
    return make_media([pictures, track] if video else [track], format="mp4", options=options)


def edited(
    codec: str, pieces: tuple[tuple[int, float], ...], *, video: bool = False, late: int = 0
) -> bytes:
    """Replace the edit list, which hides the encoder's delay, by one of these pieces."""
    data, rate = bytearray(recorded(codec, video=video, late=late)), RATES[codec]
    places = [data.rindex(name) - 4 for name in (b"moov", b"trak", b"edts", b"elst")]
    (size,) = struct.unpack_from(">I", data, places[-1])
    (delay,) = struct.unpack_from(">i", data, places[-1] + 20)
    table = struct.pack(">II", 0, len(pieces))
    for duration, second in pieces:
        media = -1 if second < 0 else delay + round(second * rate)
        table += struct.pack(">Iii", duration, media, 1 << 16)
    data[places[-1] + 8 : places[-1] + size] = table
    for place in places:
        (size_of_box,) = struct.unpack_from(">I", data, place)
        struct.pack_into(">I", data, place, size_of_box + 8 + len(table) - size)
    return bytes(data)


def config(codec: str) -> sm.DecodeConfig:
    """Without the option, the noise of AC-3 depends on all frames before."""
    options = {"cons_noisegen": "1"} if codec in ("ac3", "eac3") else {}
    return sm.decode_config(decoder_options=options)


@cache
def without_edits(codec: str) -> np.ndarray[Any, Any]:
    return sm.load_audio(recorded(codec), decode_config=config(codec)).array


def wanted(codec: str, pieces: tuple[tuple[int, float], ...]) -> np.ndarray[Any, Any]:
    whole, rate = without_edits(codec), RATES[codec]
    spans = [
        (round(second * rate), (2 * duration * rate + 1000) // 2000) for duration, second in pieces
    ]
    return np.concatenate(
        [whole[:, start : start + count] for start, count in spans if start >= 0], axis=1
    )


def decoded(codec: str, data: bytes) -> dict[str, np.ndarray[Any, Any]]:
    """Return all samples by each way of the library."""
    options = config(codec)
    packets = pickle.loads(pickle.dumps(sm.demux_audio(data)))
    with sm.Demuxer(data) as demuxer:
        decoder = sm.AudioDecoder(demuxer.audio_codec, decode_config=options)
        parts = demuxer.streaming_demux(duration=0.2)
        chunks = [*(frames for part in parts for frames in decoder.decode(part)), *decoder.flush()]
    return {
        "load_audio": sm.load_audio(data, decode_config=options).array,
        "decode_packets": samples_of(sm.decode_packets(packets, decode_config=options)),
        "in chunks": np.concatenate([samples_of(frames) for frames in chunks], axis=1),
    }


@pytest.mark.parametrize("codec", RATES)
def test_each_edit_gives_its_samples(codec: str) -> None:
    rate = RATES[codec]
    # After a jump, Opus differs by a step of 16 bits from the decode without one.
    tolerance = 2**-15 if codec == "libopus" else 0
    # The packets of these are as those of another codec.
    step = {"eac3": 3, "flac": 3, "libmp3lame": 3, "libopus": 2, "pcm_s16be": 2}.get(codec, 1)
    for name, pieces in list(PIECES.items())[::step]:
        data, samples = edited(codec, pieces), wanted(codec, pieces)
        for way, found in decoded(codec, data).items():
            assert found.shape == samples.shape, (name, way)
            np.testing.assert_allclose(
                found, samples, rtol=0, atol=tolerance, err_msg=f"{name}, {way}"
            )
        for start, stop in ((0, 0.625), (0.625, 0.75), (1, 1.125)):
            first, last = (-int(-time * rate // 1) for time in (start, stop))
            window = sm.load_audio(data, (start, stop), decode_config=config(codec)).array
            np.testing.assert_allclose(
                window,
                samples[:, first:last],
                rtol=0,
                atol=tolerance,
                err_msg=f"{name}, {start} to {stop}",
            )


# Those of PCM are cut only between packets.
@pytest.mark.parametrize("codec", [codec for codec in RATES if not codec.startswith("pcm")])
def test_one_edit_gives_its_samples(codec: str) -> None:
    tolerance = 2**-15 if codec == "libopus" else 0
    for pieces in (((503, 1.0),), ((3, 1.0),)):
        data, samples = edited(codec, pieces), wanted(codec, pieces)
        for way, found in decoded(codec, data).items():
            assert found.shape == samples.shape, (pieces, way)
            np.testing.assert_allclose(found, samples, rtol=0, atol=tolerance, err_msg=way)
    packets = sm.demux_audio(edited(codec, ((500, 5.0),)))  # behind the end
    for each in (packets, pickle.loads(pickle.dumps(packets))):
        assert len(sm.decode_packets(each)) == 0


def test_opus_ends_as_in_ogg() -> None:
    data = recorded("libopus")
    assert sm.load_audio(data).array.shape == (2, 3 * 48000)
    assert len(sm.decode_packets(sm.demux_audio(data, timestamp=(2.5, None)))) == 24000


def test_a_window_has_the_first_sample_of_audio_that_begins_between_two_samples() -> None:
    """The video begins 44.1 samples earlier, which are rounded to 44."""
    pieces = ((250, -1), (1500, 0.517))
    frames = sm.decode_packets(
        sm.demux_audio(edited("alac", pieces, video=True, late=249), timestamp=(0, 0.3)), None
    )
    assert (frames.first_sample, len(frames)) == (44, 13230 - 44)


@pytest.mark.parametrize("codec", ["aac", "alac"])
def test_windows_that_begin_before_the_only_edit_have_none_of_what_it_hides(codec: str) -> None:
    pieces, rate = ((250, -1), (1500, 0.517)), RATES[codec]
    data, samples = edited(codec, pieces, video=True), wanted(codec, pieces)
    window = sm.load_audio(data, (0.2, 0.5), decode_config=config(codec)).array
    np.testing.assert_allclose(window, samples[:, : rate // 4], rtol=0, atol=0)


@pytest.mark.parametrize("codec", ["alac", "flac"])
def test_silence_shorter_than_a_packet_is_a_gap(codec: str) -> None:
    """It was taken for jitter of timestamps, so that windows behind it had later samples."""
    for milliseconds in (10, 30):
        pieces, rate = ((500, 0.4), (milliseconds, -1), (700, 1.5)), RATES[codec]
        data, samples = edited(codec, pieces), wanted(codec, pieces)
        silence = rate * milliseconds // 1000
        window = sm.load_audio(data, (0.75, 1), decode_config=config(codec)).array
        first, last = (-int(-time * rate // 1) - silence for time in (0.75, 1))
        np.testing.assert_array_equal(window, samples[:, first:last])
        filled = sm.decode_config(gaps="fill")
        assert sm.load_audio(data, decode_config=filled).shape[1] == samples.shape[1] + silence


@pytest.mark.parametrize("codec", ["alac", "pcm_s16be"])
def test_silence_between_and_after_edits_is_a_gap(codec: str) -> None:
    """In its place, FFmpeg gives the start of the media."""
    pieces, rate = ((500, 0.4), (1300, -1), (700, 1.5), (200, -1)), RATES[codec]
    data, samples = edited(codec, pieces), wanted(codec, pieces)
    for way, found in decoded(codec, data).items():
        np.testing.assert_array_equal(found, samples, way)
    gap = np.zeros((2, rate * 13 // 10), samples.dtype)
    filled = np.concatenate([samples[:, : rate // 2], gap, samples[:, rate // 2 :]], axis=1)
    # Windows may end in the silence.
    for end in (0.6, 1, 1.5, 3):
        found = sm.load_audio(data, (0, end), decode_config=sm.decode_config(gaps="fill")).array
        np.testing.assert_array_equal(found, filled[:, : math.ceil(end * rate)], str(end))


def test_packets_of_edited_audio_are_not_taken_for_those_of_the_video() -> None:
    data = edited("aac", PIECES["forward"], video=True)
    with sm.Demuxer(data) as demuxer:
        video, audio = demuxer.demux_clip()
        chunks = list(demuxer.streaming_demux([0, 1], duration=0.5))
        alone = list(demuxer.streaming_demux(1, num_packets=10))
    assert (
        len(video)
        == len(sm.demux_video(data))
        == sum(len(chunk[0]) for chunk in chunks if 0 in chunk)
    )
    assert len(audio) == len(sm.demux_audio(data)) == sum(map(len, alone))
    assert len(audio) == sum(len(chunk[1]) for chunk in chunks if 1 in chunk)
    wanted = sm.load_audio(data).array
    np.testing.assert_array_equal(samples_of(sm.decode_packets(audio)), wanted)


def test_a_demuxer_reads_edited_audio_beside_video_repeatedly() -> None:
    """FFmpeg seeks in all streams, but where edits go back in time, it finds the wrong place."""
    data, pieces = edited("flac", PIECES["three"], video=True), PIECES["three"]
    with sm.Demuxer(data) as demuxer:
        for start in (0, 0.25, 0.5):
            packets = demuxer.demux_audio(timestamp=(start, start + 0.25))
            first, last = (round(time * 44100) for time in (start, start + 0.25))
            samples = samples_of(sm.decode_packets(packets))
            np.testing.assert_array_equal(samples, wanted("flac", pieces)[:, first:last])
