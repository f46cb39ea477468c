"""The audio of an MP4 begins and ends as its edit list says; several edits are refused."""

from __future__ import annotations

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
    "after silence": ((250, -1), (600, 0.4), (500, 2.1)),
    "silence between": ((500, 0.4), (1300, -1), (700, 1.5)),
    "silence after": ((500, 0.4), (200, -1)),
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
def test_several_edits_are_refused(codec: str) -> None:
    for name, pieces in PIECES.items():
        data = edited(codec, pieces)
        for load in (sm.demux_audio, sm.load_audio, lambda src: sm.load_audio(src, (0.1, 0.2))):
            with pytest.raises(
                sm.DemuxError, match=r"edit list of its audio has \d parts"
            ) as caught:
                load(data)  # type: ignore[operator]  # functions of different types
            assert "ignore_editlist" in str(caught.value), name


@pytest.mark.parametrize("codec", ["aac", "alac"])
def test_audio_of_several_edits_is_read_without_them(codec: str) -> None:
    data = edited(codec, PIECES["three"], video=True)
    whole = sm.demux_config(format_options={"ignore_editlist": "1"})
    found = sm.load_audio(data, demux_config=whole, decode_config=config(codec)).array
    delay = found.shape[1] - without_edits(codec).shape[1]
    assert 0 <= delay <= 2048 + 1024  # those of the encoder
    assert len(sm.load_video(data)) == 30  # the audio is not read


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


def test_several_edits_of_a_movie_without_ticks_are_refused() -> None:
    data = bytearray(edited("alac", PIECES["three"]))
    struct.pack_into(">I", data, data.index(b"mvhd") + 16, 0)
    with pytest.raises(sm.DemuxError, match="edit list of its audio has 3 parts"):
        sm.load_audio(bytes(data))


def test_an_empty_edit_list_changes_nothing() -> None:
    data = bytearray(recorded("alac"))
    place = data.rindex(b"elst") - 4
    (size,) = struct.unpack_from(">I", data, place)
    struct.pack_into(">I4sI4s", data, place, 8, b"elst", size - 8, b"free")
    # 9 packets that state a shorter duration, as in a recording with gaps.
    place = data.rindex(b"stts") + 12
    count, ticks, *_ = struct.unpack_from(">4I", data, place)
    struct.pack_into(">4I", data, place, count - 9, ticks, 1 + 9, ticks - 2)
    assert sm.load_audio(bytes(data)).array.shape == (2, 3 * RATES["alac"])


@pytest.mark.parametrize("codec", ["alac", "flac"])
def test_lossless_audio_that_begins_late_is_whole(codec: str) -> None:
    samples = np.arange(2 * 51234, dtype=np.int16).reshape(-1, 2)
    track = AudioTrack(samples=samples, sample_rate=44100, codec=codec, start=7000)
    data = make_media([track], format="mp4")
    assert np.array_equal(samples_of(sm.decode_packets(sm.demux_audio(data), None)).T, samples)
