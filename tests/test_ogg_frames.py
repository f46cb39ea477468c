"""Ogg files, and windows of them, load the same samples and errors without PyAV's demuxer as with it."""

from __future__ import annotations

import io
import os
import signal
import struct
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import av
import numpy as np
import pytest
from audio_oracle import clip, outcome, sound
from effort import examples

import spdl_media as sm
from spdl_media import audio_arrays, ogg_audio
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


# zlib computes the same CRC from bytes whose bits are in reverse order.
REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


def checksum(page: bytes) -> int:
    """Compute the checksum of a page whose own is zero: RFC 3533, section 6."""
    value = ~zlib.crc32(page.translate(REVERSED), 0xFFFFFFFF) & 0xFFFFFFFF
    return int(f"{value:032b}"[::-1], 2)


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


def split(data: bytes) -> bytes:
    """Move the first bytes of samples to a page of their own, in which no packet ends."""
    first, second, page, *rest = pages(data)
    assert page[27] == 255  # the length of those bytes
    start = 27 + page[26]
    head = page[:6] + struct.pack("<q", -1) + page[14:26] + b"\1\xff" + page[start : start + 255]
    page[5] |= 1  # it begins in a packet
    page[start : start + 255], page[26:28] = b"", bytes((page[26] - 1,))
    return b"".join([bytes(first), bytes(second), *map(sealed, (head, page)), *map(bytes, rest)])


def numbered(data: bytes, serial: int) -> bytes:
    parts = list(pages(data))
    for page in parts:
        struct.pack_into("<I", page, 14, serial)
    return b"".join(map(sealed, parts))


def louder(data: bytes) -> bytes:
    """State that the decoder must double the samples of an Opus file."""
    head, *parts = pages(data)
    struct.pack_into("<h", head, 28 + 16, 1541)
    return sealed(head) + b"".join(map(bytes, parts))


def unsealed(data: bytes) -> bytes:
    """Falsify the checksum of the first page."""
    return data[:22] + bytes(4) + data[26:]


LARGE_PACKETS = AudioTrack(
    samples=sound(60000), sample_rate=48000, codec="libopus", options={"b": "500000"}
)
FILES = {
    "vorbis": lambda: ogg("vorbis"),
    "opus": lambda: ogg("opus"),
    "mono": lambda: ogg("opus", 1),
    "with a gain": lambda: louder(ogg("opus")),
}
# They are read by PyAV's demuxer.
OTHERS = {
    "another codec": lambda: clip("flac", "ogg"),
    "two streams": lambda: ogg("vorbis") + numbered(ogg("vorbis", seconds=4), 7),
    "of a broadcast": lambda: moved(ogg("opus"), 10**7),
    "a little later": lambda: moved(ogg("vorbis"), 500),
    "never finished": lambda: ended(ogg("vorbis")),
    "one page": lambda: make_media(
        [AudioTrack(samples=sound(3000), sample_rate=48000, codec="vorbis")], format="ogg"
    ),
    "a page without position": lambda: unplaced(ogg("opus")),
    "a packet on two pages first": lambda: split(make_media([LARGE_PACKETS], format="ogg")),
    "damaged header": lambda: unsealed(ogg("vorbis")),
    "more bytes": lambda: ogg("opus") + b"OggS, not",
    "with video": lambda: make_media(
        [AudioTrack(samples=sound(30000), sample_rate=48000, codec="vorbis")] * 2, format="ogg"
    ),
}
# FFmpeg's graph gives another number of samples than the last page states.
WRONG = {
    "chained": lambda: ogg("vorbis") + ogg("vorbis"),
    "another stream inside": lambda: (
        ogg("vorbis") + numbered(ogg("vorbis", seconds=4), 7) + ogg("vorbis")
    ),
    "a page is missing": lambda: without_page(ogg("opus")),
    "empty packet": lambda: emptied(ogg("vorbis")),
}
CASES: list[dict[str, Any]] = [
    {},
    {"sample_rate": 16000, "num_channels": 1},
    {"sample_fmt": "s16"},
    {"filter_desc": None},
    {"decode_config": sm.decode_config(gaps="fill")},
]
WINDOWS: list[dict[str, Any]] = [
    {"num_samples": 1},
    {"timestamp": (0, 0.1)},
    {"timestamp": ("0.50001", "1.25")},
    {"timestamp": (1, 2), "sample_rate": 16000, "num_channels": 1},
    {"timestamp": (1.5, None), "num_samples": 9000, "sample_rate": 8000},
    {"timestamp": (2.5, 9)},
    {"timestamp": (3.5, 9), "num_samples": 9, "on_short": "zeros"},
    {"timestamp": (3.5, 9)},
]


def by_packets(data: Any, **options: Any) -> Any:
    with mock.patch.dict(audio_arrays._FINDERS):
        del audio_arrays._FINDERS[b"O"]
        return outcome(data, **options)


@pytest.mark.parametrize("name", [*FILES, *OTHERS, *WRONG])
def test_samples_equal_those_by_packets(name: str) -> None:
    data = (FILES | OTHERS | WRONG)[name]()
    # Others are read by packets in any case, which few cases show.
    for case in CASES[:2] if name in OTHERS else CASES:
        with (
            mock.patch.object(ogg_audio, "Graph", wraps=ogg_audio.Graph) as graph,
            mock.patch.object(av, "open", wraps=av.open) as opened,
        ):
            found = outcome(data, **case)
        fills = "decode_config" in case
        assert graph.called is (name not in OTHERS and not fills)
        assert opened.called is (name not in FILES or fills)
        np.testing.assert_array_equal(found, by_packets(data, **case), err_msg=str(case))
    for case in WINDOWS[:3] if name in OTHERS else WINDOWS:
        np.testing.assert_array_equal(
            outcome(data, **case), by_packets(data, **case), err_msg=str(case)
        )


# Codec, options of the encoder, and microseconds per page.
STREAMS = [
    ("vorbis", {}, 1000000),
    ("vorbis", {}, 50000),
    ("libopus", {}, 30000),
    ("libopus", {"frame_duration": "2.5"}, 200000),
    ("libopus", {"frame_duration": "60", "b": "64000"}, 1),
    # Its encoder leaves out zeros at the end of packets.
    ("libopus", {"b": "9000", "application": "voip"}, 500000),
    # Modes vary.
    ("libopus", {"b": "30000", "application": "voip"}, 1000000),
]


@pytest.mark.parametrize(("codec", "options", "page"), STREAMS)
def test_windows_are_read_without_a_demuxer(
    codec: str, options: dict[str, str], page: int, rng: np.random.Generator, tmp_path: Path
) -> None:
    path, rate = tmp_path / "file", 48000
    track = AudioTrack(samples=sound(6 * rate), sample_rate=rate, codec=codec, options=options)
    path.write_bytes(make_media([track], format="ogg", options={"page_duration": str(page)}))
    for start in np.round(rng.uniform(0, 6, examples(20)), 3):
        case = {"timestamp": (start, start + 0.75)}
        with mock.patch.object(av, "open") as opened:
            found = outcome(path, **case)
        assert not opened.called
        np.testing.assert_array_equal(found, by_packets(path, **case), err_msg=str(case))


def test_a_cover_before_the_audio_leaves_windows_as_short_as_they_are() -> None:
    plain, covered = ogg("vorbis", seconds=6), io.BytesIO()
    with av.open(io.BytesIO(plain)) as source, av.open(covered, "w", format="ogg") as target:
        (stream,) = source.streams
        copy = target.add_stream_from_template(stream)
        target.metadata["METADATA_BLOCK_PICTURE"] = "A" * 200_000
        for packet in source.demux(stream):
            if packet.dts is not None:
                packet.stream = copy
                target.mux(packet)
    assert len(covered.getvalue()) > len(plain) + 200_000
    first, second = (
        sm.demux_audio(data, timestamp=(5, 5.5)) for data in (plain, covered.getvalue())
    )
    assert len(first) == len(second) < 100


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
    for number in range(examples(120)):
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


@pytest.mark.parametrize("codec", CODECS)
def test_damage_outside_of_a_window_may_go_unnoticed(codec: str, rng: np.random.Generator) -> None:
    whole = ogg(codec, seconds=4)
    parts, fails = list(pages(whole)), set()
    for number in range(examples(120)):
        damaged, place = list(parts), int(rng.integers(len(parts)))
        page = bytearray(parts[place])
        page[int(rng.integers(len(page)))] ^= int(rng.integers(1, 256))
        damaged[place] = bytearray(sealed(page)) if number % 2 else page
        data = b"".join(damaged)
        start = round(float(rng.uniform(0, 4)), 2)
        case = {"timestamp": (start, start + 0.2)}
        found, wanted = outcome(data, **case), by_packets(data, **case)
        if not np.array_equal(found, wanted):
            np.testing.assert_array_equal(found, by_packets(whole, **case))
        fails.add(isinstance(found, str))
    assert fails == {False, True}


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
        monkeypatch.delattr(ogg_audio.os, "memfd_create")
    else:
        made = {"no descriptor": OSError("too many open files"), "no proc": None}[fault]
        monkeypatch.setattr(
            ogg_audio.os, "memfd_create", mock.Mock(side_effect=made, return_value=1 << 20)
        )
        monkeypatch.setattr(ogg_audio.os, "write", lambda _, content: len(content))
        monkeypatch.setattr(ogg_audio.os, "close", lambda _: None)
    np.testing.assert_array_equal(outcome(data), wanted)


def test_ctrl_c_leaves_no_file_in_memory_open() -> None:
    create, made = os.memfd_create, []

    def interrupted(name: str) -> int:
        made.append(create(name))
        signal.raise_signal(signal.SIGINT)
        return made[-1]

    with (
        mock.patch.object(ogg_audio.os, "memfd_create", interrupted),
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


def test_a_window_of_narrowband_opus_with_more_to_drop_than_a_packet() -> None:
    # The first packet that is decoded gives 24 samples too few.
    samples, options = sound(5 * 8000, 8000), {"b": "9000", "application": "voip"}
    track = AudioTrack(samples=samples, sample_rate=8000, codec="libopus", options=options)
    head, *parts = pages(make_media([track], format="ogg"))
    struct.pack_into("<H", head, 28 + 10, 5000)
    data = sealed(head) + b"".join(map(bytes, parts))
    part, whole = sm.load_audio(data, timestamp=(3, 3.5)).array, sm.load_audio(data).array
    np.testing.assert_allclose(part, whole[:, 144000:168000], atol=1e-3)


def test_more_channels_than_the_resampler_takes() -> None:
    # Each of the 65 channels is the one coded channel.
    mono = ogg("opus", 1)
    first, *parts = pages(mono)
    head = b"OpusHead" + struct.pack("<BBHIhBBB", 1, 65, 312, 48000, 0, 255, 1, 0) + bytes(65)
    data = sealed(first[:26] + bytes((1, len(head))) + head) + b"".join(map(bytes, parts))
    assert sm.probe(data).audio.num_channels == 65  # type: ignore[union-attr]
    np.testing.assert_array_equal(
        sm.load_audio(data).array, np.tile(sm.load_audio(mono).array, (65, 1))
    )
    with pytest.raises(
        sm.FilterError, match=r"65 channels.*Failed to configure output pad on aresample"
    ):
        sm.load_audio(data, sample_rate=16000)
