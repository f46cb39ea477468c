"""AAC in MP4 loads the same samples with and without FFmpeg's demuxer, and damaged frames the same errors."""

from __future__ import annotations

import struct
from functools import cache
from typing import Any
from unittest import mock

import av
import numpy as np
import pytest
from audio_oracle import clip, outcome, sound

import spdl_media as sm
from spdl_media import audio_arrays
from spdl_media.testing import AudioTrack, VideoTrack, index_planes, make_media

RATE = 44100


@cache
def movie(
    *, format: str = "mp4", video: bool = False, channels: int = 2, movflags: str = ""
) -> bytes:
    # Without noise substitution, whose noise depends on all frames before.
    audio = AudioTrack(
        samples=sound(3 * RATE, RATE, channels),
        sample_rate=RATE,
        codec="aac",
        options={"aac_pns": "0"},
    )
    tracks: list[Any] = [audio]
    if video:
        tracks.insert(
            0, VideoTrack(frames=index_planes(30, 64, 48), codec="libx264", frame_rate=10)
        )
    return make_media(tracks, format=format, options={"movflags": movflags} if movflags else None)


def replaced(old: bytes, new: bytes) -> bytes:
    assert movie().count(old) == 1
    return movie().replace(old, new)


def patched(box: bytes, offset: int, number: int) -> bytes:
    """Change a number in the first box of a kind; offsets count from the name of the box."""
    place = movie().index(box) + offset
    return movie()[:place] + struct.pack(">I", number) + movie()[place + 4 :]


def edited(data: bytes, **fields: int) -> bytes:
    """Change the first entry of the edit list."""
    place = data.index(b"elst") + 12
    names = ("duration", "media_time", "rate")
    entry = dict(zip(names, struct.unpack_from(">Iii", data, place), strict=True)) | fields
    return data[:place] + struct.pack(">Iii", *entry.values()) + data[place + 12 :]


def longer(data: bytes, change: int) -> bytes:
    (duration,) = struct.unpack_from(">I", data, data.index(b"elst") + 12)
    return edited(data, duration=duration + change)


def box(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I4s", 8 + len(content), kind) + content


def by_itunes(data: bytes, padding: int = 448, total: int = 1 << 17) -> bytes:
    """State the encoder's delay and padding as iTunes does, not by an edit list, in the last box."""
    text = b" 00000000 00000840 %08X %016X" % (padding, total)
    parts = box(b"mean", bytes(4) + b"com.apple.iTunes") + box(b"name", bytes(4) + b"iTunSMPB")
    parts += box(b"data", bytes((0, 0, 0, 1)) + bytes(4) + text)
    return with_item(data.replace(b"edts", b"free"), box(b"----", parts))


def with_item(data: bytes, item: bytes) -> bytes:
    """Add metadata in the last box."""
    handler = box(b"hdlr", bytes(8) + b"mdirappl" + bytes(10))
    meta = box(b"meta", bytes(4) + handler + box(b"ilst", item))
    added, start = box(b"udta", meta), data.index(b"moov") - 4
    (length,) = struct.unpack_from(">I", data, start)
    end = start + length
    assert end == len(data) or b"moof" in data  # no offset in the file changes
    moov = struct.pack(">I", length + len(added)) + data[start + 4 : end] + added
    return data[:start] + moov + data[end:]


FILES = {
    "edit list": movie,
    "no edit list": lambda: replaced(b"edts", b"free"),
    "longer delay": lambda: edited(movie(), media_time=2112),
    "delay of a packet and a sample": lambda: edited(movie(), media_time=1025),
    "mono": lambda: movie(channels=1),
    "with video": lambda: movie(video=True),
    "index in front": lambda: movie(video=True, movflags="faststart"),
    "no unit": lambda: patched(b"mvhd", 16, 0),
}
# FFmpeg's demuxer reads these.
OTHERS = {
    "end hidden": lambda: edited(movie(), duration=1500),
    "slower": lambda: edited(movie(), rate=1 << 15),
    "later": lambda: edited(movie(), media_time=-1),
    "QuickTime": lambda: movie(format="mov"),
    "fragments": lambda: movie(movflags="frag_keyframe+empty_moov"),
    "iTunes": lambda: by_itunes(movie()),
    "iTunes and video": lambda: by_itunes(movie(video=True)),
    "other codec": lambda: replaced(b"\x17\x40\x15", b"\x17\x67\x15"),
    "channels in a list": lambda: replaced(b"\x05\x12\x10", b"\x05\x12\x00"),
    "other description": lambda: patched(b"stsc", 20, 2),
    "many boxes": lambda: movie() + struct.pack(">I4s", 8, b"free") * 70,
    "metadata of the file": lambda: movie() + struct.pack(">I4s", 8, b"udta"),
    "iTunes in lower case": lambda: by_itunes(movie()).replace(b"00000840", b"0000084a"),
    "padded": lambda: movie() + b"more bytes than a box begins with",
}
CASES: list[dict[str, Any]] = [
    {},
    {"timestamp": (0.5, 1.25)},
    {"timestamp": (0.01, 0.02)},
    {"timestamp": (None, 0.7)},
    {"timestamp": (2.9, None)},
    {"num_samples": 5000},
    {"timestamp": (0.3, None), "num_samples": 2048},
    {"sample_rate": 16000, "num_channels": 1},
    {"timestamp": (1, 2), "sample_rate": 48000, "sample_fmt": "s16"},
    {"filter_desc": None},
    {"sample_rate": 50, "num_samples": 10},
]


def by_ffmpeg(data: bytes, **options: Any) -> Any:
    with mock.patch.object(audio_arrays, "find_aac", return_value=None):
        return outcome(data, **options)


@pytest.mark.parametrize("name", [*FILES, *OTHERS])
def test_samples_equal_those_by_ffmpegs_demuxer(name: str) -> None:
    data = (FILES | OTHERS)[name]()
    # Of the others, only who reads them may differ.
    for case in CASES if name in FILES else CASES[:3]:
        with mock.patch.object(av, "open", wraps=av.open) as opened:
            found = outcome(data, **case)
        assert opened.called is (name in OTHERS)
        np.testing.assert_array_equal(found, by_ffmpeg(data, **case), err_msg=str(case))


@pytest.mark.parametrize("video", [False, True])
@pytest.mark.parametrize(
    ("padding", "total", "cut"),
    [
        (1, 1, 1),
        (448, 1, 448),
        (5000, 1, 5000),
        (448, 3 * RATE + 1024, 0),
        (448, 3 * RATE + 1023, 448),
        (0xFFFFFFFF, 1, 0),
    ],
)
def test_padding_that_itunes_states_is_left_out(
    *, video: bool, padding: int, total: int, cut: int
) -> None:
    """A file with fewer samples than stated, such as a part of another, keeps the end that it has."""
    data = by_itunes(movie(video=video), padding, total)
    # FFmpeg's encoder begins with a frame.
    kept = 3 * RATE + 1024 - 2112 - cut
    assert sm.load_audio(data).array.shape == (2, kept)
    assert sm.probe(data).audio.duration == kept / RATE
    frames = sm.decode_packets(sm.demux_audio(data, timestamp=(2.5, None)), None)
    assert frames.first_sample + len(frames) == kept + (2112 if video else 0)


def test_fragments_keep_the_padding_that_itunes_states() -> None:
    data = by_itunes(movie(movflags="frag_keyframe+empty_moov+default_base_moof"), padding=300)
    stated, count = round(sm.probe(data).audio.duration * RATE), sm.load_audio(data).array.shape[1]
    assert stated <= count < stated + 1024  # the last frame is whole


def test_streams_whose_rate_a_decoder_may_double_end_where_the_edit_list_does() -> None:
    data = clip("aac", "mp4", rate=16000, seconds=1)
    # The extension that says that nothing doubles the rate.
    assert data.count(b"\x56\xe5\0") == 1
    data = data.replace(b"\x56\xe5\0", bytes(3))
    # The edit list of FFmpeg 8 states 1.049 s, up to seven samples later.
    assert sm.load_audio(data).array.shape == (2, 16777)
    # FFmpeg 9 writes it in samples.
    assert sm.load_audio(longer(data, -1)).array.shape[1] in (16768, 16776)


@pytest.mark.parametrize("video", [False, True])
def test_an_edit_list_in_milliseconds_that_ends_after_the_samples_adds_none(*, video: bool) -> None:
    data = movie(video=video)
    # The last edit list is that of the sound.
    start = data.rindex(b"elst")
    data = data[:start] + longer(data[start:], 10)
    assert sm.load_audio(data).array.shape == (2, 3 * RATE)
    assert len(sm.decode_packets(sm.demux_audio(data), None)) == 3 * RATE


@pytest.mark.parametrize("hidden", [1024, 1100, 1500])
def test_sound_that_starts_in_the_last_packet_ends_with_its_duration(hidden: int) -> None:
    data = edited(clip("aac", "mp4", RATE, seconds=0), media_time=hidden, duration=1000)
    # The edit ends after the sound.
    assert sm.load_audio(data).array.shape == (2, 1024 + 777 - hidden)
    assert len(sm.decode_packets(sm.demux_audio(data), None)) == 1024 + 777 - hidden


def test_windows_of_usac_are_read_from_the_start() -> None:
    """Its frames depend on those before, so the decoder would find damage."""
    data = replaced(b"\x12\x10\x56\xe5\0", b"\xf9\x48\x24\x21\x1c")
    packets = sm.demux_audio(data, timestamp=(2, 2.5))
    assert packets.get_timestamps(raw=True)[0] < 0


def test_a_window_that_gives_no_sample_is_filled() -> None:
    # It lies between two samples.
    options = {"sample_rate": 100, "sample_fmt": None, "num_samples": 3, "on_short": "zeros"}
    found = outcome(movie(), timestamp=(0.50001, 0.50002), **options)
    assert found.tolist() == [[0.0] * 3] * 2


def test_windows_equal_the_whole(rng: np.random.Generator) -> None:
    data = movie(video=True)
    whole = sm.load_audio(data).array
    for start in rng.integers(0, whole.shape[1] - 9000, 30).tolist():
        window = sm.load_audio(data, (start / RATE, (start + 8000) / RATE)).array
        np.testing.assert_array_equal(window, whole[:, start : start + 8000])


def test_damage_gives_the_same_errors(rng: np.random.Generator) -> None:
    data = movie(channels=1)
    start, stop = data.index(b"mdat"), data.index(b"moov")
    errors = 0
    for number in range(60):
        damaged = bytearray(data)
        place = int(rng.integers(start, len(data) if number % 3 else stop))
        damaged[place : place + number % 5 + 1] = rng.bytes(number % 5 + 1)
        found, wanted = outcome(bytes(damaged)), by_ffmpeg(bytes(damaged))
        errors += isinstance(wanted, str)
        np.testing.assert_array_equal(found, wanted)
    assert errors > 20


@pytest.mark.parametrize("name", ["mono", "index in front"])
def test_truncated_files_give_the_same_errors(name: str) -> None:
    data = FILES[name]()
    for length in (*range(1, 60), *range(60, len(data), len(data) // 40), len(data) - 1):
        assert outcome(data[:length]) == by_ffmpeg(data[:length])
        assert isinstance(outcome(data[:length]), str)


def test_audio_that_claims_to_be_video_is_an_error() -> None:
    with pytest.raises(sm.DecodeError, match="the header says that this audio is mpeg2video"):
        sm.load_audio(replaced(b"\x17\x40\x15", b"\x17\x61\x15"))


def test_an_index_that_states_many_frames_costs_no_memory() -> None:
    data = movie()
    place = data.index(b"stsz") + 12
    broken = data[:place] + b"\xff" * 4 + data[place + 4 :]
    assert outcome(broken) == by_ffmpeg(broken)
