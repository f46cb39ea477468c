"""Whole Ogg files load the same samples and errors in FFmpeg's graph as packet by packet."""

from __future__ import annotations

import os
import signal
import struct
from collections.abc import Iterator
from functools import cache
from typing import Any
from unittest import mock

import av
import numpy as np
import pytest
from audio_oracle import clip, outcome, sound

import spdl_media as sm
from spdl_media import audio_arrays, coded_audio
from spdl_media.testing import AudioTrack, make_media

CODECS = {"vorbis": ("vorbis", 44100), "opus": ("libopus", 48000)}


@cache
def ogg(codec: str, channels: int = 2, seconds: int = 3) -> bytes:
    name, rate = CODECS[codec]
    samples = sound(seconds * rate + 777, rate, channels)
    track = AudioTrack(samples=samples, sample_rate=rate, codec=name)
    return make_media([track], format="ogg")


def pages(data: bytes) -> Iterator[bytearray]:
    while data:
        sizes = data[27 : 27 + data[26]]
        size = 27 + len(sizes) + sum(sizes)
        yield bytearray(data[:size])
        data = data[size:]


def checksum(page: bytes) -> int:
    """Compute the checksum of a page whose own is zero: RFC 3533, section 6."""
    value = 0
    for byte in page:
        value ^= byte << 24
        for _ in range(8):
            value = (value << 1 ^ 0x04C11DB7 * (value >> 31)) & 0xFFFFFFFF
    return value


def sealed(page: bytearray) -> bytes:
    page[22:26] = bytes(4)
    page[22:26] = struct.pack("<I", checksum(page))
    return bytes(page)


def without_page(data: bytes) -> bytes:
    first, second, third, _, *rest = pages(data)
    return b"".join((first, second, third, *rest))


def moved(data: bytes, samples: int) -> bytes:
    """State all positions later, as in a part of a broadcast."""
    parts = list(pages(data))
    for page in parts[2:]:
        (position,) = struct.unpack_from("<q", page, 6)
        struct.pack_into("<q", page, 6, position + samples)
    return b"".join(map(sealed, parts))


def ended(data: bytes) -> bytes:
    """Clear the flag of the last page."""
    *parts, last = pages(data)
    last[5] = 0
    return b"".join(map(bytes, parts)) + sealed(last)


def emptied(data: bytes) -> bytes:
    """Add a packet without a byte to the last page."""
    *parts, last = pages(data)
    last[26] += 1
    last.insert(26 + last[26], 0)
    return b"".join(map(bytes, parts)) + sealed(last)


def unplaced(data: bytes) -> bytes:
    """State of the first page of samples that no packet ends in it."""
    *parts, last = pages(data)
    struct.pack_into("<q", parts[2], 6, -1)
    return b"".join([*map(sealed, parts), bytes(last)])


def unsealed(data: bytes) -> bytes:
    """Falsify the checksum of the first page."""
    return data[:22] + bytes(4) + data[26:]


FILES = {
    "vorbis": lambda: ogg("vorbis"),
    "opus": lambda: ogg("opus"),
    "mono": lambda: ogg("opus", 1),
}
# They are read packet by packet.
OTHERS = {
    "chained": lambda: ogg("vorbis") + ogg("vorbis"),
    "another codec": lambda: clip("flac", "ogg"),
    "a page is missing": lambda: without_page(ogg("opus")),
    "of a broadcast": lambda: moved(ogg("opus"), 10**7),
    "never finished": lambda: ended(ogg("vorbis")),
    "one page": lambda: make_media(
        [AudioTrack(samples=sound(3000), sample_rate=48000, codec="vorbis")], format="ogg"
    ),
    "a page without position": lambda: unplaced(ogg("opus")),
    "more bytes": lambda: ogg("opus") + b"OggS, not",
    "with video": lambda: make_media(
        [AudioTrack(samples=sound(30000), sample_rate=48000, codec="vorbis")] * 2, format="ogg"
    ),
}
# FFmpeg's graph fails, or gives another number of samples than the last page states.
WRONG = {
    "damaged header": lambda: unsealed(ogg("vorbis")),
    "empty packet": lambda: emptied(ogg("vorbis")),
    "a little later": lambda: moved(ogg("vorbis"), 500),
}
CASES: list[dict[str, Any]] = [
    {},
    {"sample_rate": 16000, "num_channels": 1},
    {"sample_fmt": "s16"},
    {"filter_desc": None},
    {"decode_config": sm.decode_config(gaps="fill")},
    {"timestamp": (0.5, 1.25)},
    {"num_samples": 5000},
]


def by_packets(data: bytes, **options: Any) -> Any:
    with mock.patch.dict(audio_arrays._FINDERS):
        del audio_arrays._FINDERS[b"O"]
        return outcome(data, **options)


@pytest.mark.parametrize("name", [*FILES, *OTHERS, *WRONG])
def test_samples_equal_those_by_packets(name: str) -> None:
    data = (FILES | OTHERS | WRONG)[name]()
    for number, case in enumerate(CASES):
        with (
            mock.patch.object(coded_audio, "Graph", wraps=coded_audio.Graph) as graph,
            mock.patch.object(av, "open", wraps=av.open) as opened,
        ):
            found = outcome(data, **case)
        # The last cases are not of whole files.
        assert graph.called is (name not in OTHERS and number < 4)
        assert opened.called is (name not in FILES or number >= 4)
        np.testing.assert_array_equal(found, by_packets(data, **case), err_msg=str(case))


def test_short_files_are_resampled_as_packet_by_packet() -> None:
    # FFmpeg alone gives another number of samples.
    for num_samples, rate in ((33, 44100), (66, 44100), (67, 44100), (320, 4801)):
        track = AudioTrack(samples=sound(num_samples), sample_rate=48000, codec="libopus")
        data = make_media([track], format="ogg")
        found, wanted = (load(data, sample_rate=rate) for load in (outcome, by_packets))
        np.testing.assert_array_equal(found, wanted, f"{num_samples} to {rate}")


@pytest.mark.parametrize("codec", CODECS)
def test_damage_gives_the_same_errors(codec: str, rng: np.random.Generator) -> None:
    parts = list(pages(ogg(codec, 2, 1)))
    outcomes = set()
    for number in range(60):
        damaged = [*map(bytearray, parts)]
        page = damaged[int(rng.integers(2, len(parts)))]
        place = int(rng.integers(0 if number % 4 else 27 + page[26], len(page)))
        page[place] ^= int(rng.integers(1, 256))
        # With a right checksum, it is the decoder that finds the damage, or does not.
        data = b"".join(map(sealed if number % 2 else bytes, damaged))
        options = {} if number % 3 else {"sample_rate": 16000, "num_channels": 1}
        found, wanted = outcome(data, **options), by_packets(data, **options)
        outcomes.add(type(wanted))
        np.testing.assert_array_equal(found, wanted)
    assert outcomes == {str, np.ndarray}


def test_truncated_files_give_the_same_errors() -> None:
    data = ogg("vorbis", 2, 1)
    for length in (*range(1, 60), *range(60, len(data), len(data) // 40), len(data) - 1):
        np.testing.assert_array_equal(outcome(data[:length]), by_packets(data[:length]))


@pytest.mark.parametrize("fault", ["no memfd", "no descriptor", "no proc"])
def test_a_system_without_files_in_memory_reads_packets(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = ogg("opus")
    wanted = by_packets(data)
    if fault == "no memfd":
        monkeypatch.delattr(coded_audio.os, "memfd_create")
    else:
        made = {"no descriptor": OSError("too many open files"), "no proc": None}[fault]
        monkeypatch.setattr(
            coded_audio.os, "memfd_create", mock.Mock(side_effect=made, return_value=1 << 20)
        )
        monkeypatch.setattr(coded_audio.os, "write", lambda _, content: len(content))
        monkeypatch.setattr(coded_audio.os, "close", lambda _: None)
    np.testing.assert_array_equal(outcome(data), wanted)


def test_ctrl_c_leaves_no_file_in_memory_open() -> None:
    create, made = os.memfd_create, []

    def interrupted(name: str) -> int:
        made.append(create(name))
        signal.raise_signal(signal.SIGINT)
        return made[-1]

    with (
        mock.patch.object(coded_audio.os, "memfd_create", interrupted),
        pytest.raises(KeyboardInterrupt),
    ):
        sm.load_audio(ogg("opus"))
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(made[0])


def test_a_window_of_opus_with_more_to_drop_than_the_lead_in() -> None:
    # A program that cuts a file states so much that the decoder drops, wherever it starts.
    head, *parts = pages(ogg("opus", seconds=6))
    struct.pack_into("<H", head, 28 + 10, 65535)
    data = sealed(head) + b"".join(map(bytes, parts))
    whole = sm.load_audio(data).array
    part = sm.load_audio(data, timestamp=(3, 3.5)).array
    np.testing.assert_allclose(part, whole[:, 144000:168000], atol=2**-15)


def test_more_channels_than_pyav_gives() -> None:
    # Each of the 65 channels is the one coded channel.
    first, *parts = pages(ogg("opus", 1))
    head = b"OpusHead" + struct.pack("<BBHIhBBB", 1, 65, 312, 48000, 0, 255, 1, 0) + bytes(65)
    data = sealed(first[:26] + bytes((1, len(head))) + head) + b"".join(map(bytes, parts))
    assert sm.probe(data).audio.num_channels == 65  # type: ignore[union-attr]
    for options in CASES:
        with pytest.raises(sm.DecodeError, match=r"opus of 65 channels: .* at most 64"):
            sm.load_audio(data, **options)
