"""Windows of MP3 and FLAC files, which are read without FFmpeg's demuxers, equal those of the whole file."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Any
from unittest import mock

import av
import numpy as np
import pytest
from audio_oracle import linear, sound
from effort import each, examples
from test_load_audio import by_steps, outcome

import spdl_media as sm
from spdl_media.testing import AudioTrack, make_media

SECONDS = 7
WINDOWS = 60


def _made(format: str, rate: int, channels: int, muxing: Any = None, **options: str) -> bytes:
    codec = "libmp3lame" if format == "mp3" else format
    samples = sound(SECONDS * rate + 77, rate, channels)
    if "bits" in options:
        del options["bits"]
        samples = samples.astype(np.int32) * 65536 + 256 * 77
    track = AudioTrack(samples=samples, sample_rate=rate, codec=codec, options=options)
    return make_media([track], format=format, options=muxing or {})


def _with_block(data: bytes, kind: int, content: bytes) -> bytes:
    """Insert a metadata block after STREAMINFO in a FLAC file."""
    return data[:42] + bytes([kind]) + len(content).to_bytes(3, "big") + content + data[42:]


def _seek_table(rate: int) -> bytes:
    # A seek table with a used point and a placeholder.
    return struct.pack(">QQH", 0, 0, 4096) + struct.pack(">QQH", 2**64 - 1, 0, 0)


VARIABLE = {"global_quality": "236", "flags": "+qscale"}
BARE = {"write_xing": "0", "id3v2_version": "0"}
# Encoded on demand, because each worker of pytest-xdist imports this module.
FILES: dict[str, Callable[[], bytes]] = {
    "MP3, 16 kHz": lambda: _made("mp3", 16000, 1),
    "MP3, 8 kHz, few bits": lambda: _made("mp3", 8000, 1, b="8000"),
    "MP3, 44.1 kHz, few bits": lambda: _made("mp3", 44100, 1, b="32000"),
    "MP3, 48 kHz stereo": lambda: _made("mp3", 48000, 2, b="320000"),
    "MP3 that varies": lambda: _made("mp3", 44100, 2, **VARIABLE),
    "MP3 that varies and does not say so": lambda: _made("mp3", 22050, 2, BARE, **VARIABLE),
    "MP3 without reservoir": lambda: _made("mp3", 32000, 2, BARE, reservoir="0"),
    "MP3 behind a large tag": lambda: (
        b"ID3\4\0\0\0\1\0\0" + bytes(1 << 14) + _made("mp3", 24000, 1, BARE)
    ),
    "MP3 before a tag": lambda: file("MP3, 16 kHz") + b"TAG" + bytes(125),
    "FLAC, 16 kHz": lambda: _made("flac", 16000, 1, frame_size="4096"),
    "FLAC, 44.1 kHz stereo": lambda: _made("flac", 44100, 2),
    "FLAC, 24 bits": lambda: _made("flac", 48000, 2, bits="24"),
    "FLAC, small blocks": lambda: _made("flac", 22050, 1, frame_size="256"),
    "FLAC, one block": lambda: _made("flac", 8000, 1, frame_size="65535"),
    "FLAC, silence": lambda: make_media(
        [AudioTrack(samples=np.zeros((160_000, 1), np.int16), sample_rate=16000, codec="flac")],
        format="flac",
    ),
    "FLAC with a seek table": lambda: _with_block(file("FLAC, 16 kHz"), 3, _seek_table(16000)),
    "FLAC with a picture": lambda: _with_block(file("FLAC, 16 kHz"), 6, bytes(100_000)),
}


@cache
def file(name: str) -> bytes:
    return FILES[name]()


def _no_demuxer(*_: Any, **__: Any) -> None:
    raise AssertionError("a demuxer was opened")


@each("name", FILES)
def test_any_window_is_that_of_the_whole_file(name: str, rng: np.random.Generator) -> None:
    data = file(name)
    whole, audio = linear(data), sm.probe(data).audio
    assert audio is not None
    rate, end = audio.sample_rate, whole.shape[1]
    windows: list[tuple[int, int | None]] = [
        (0, None),
        (0, end),
        (0, 1),
        (end - 1, end),
        (end - 500, end + 100),  # into the padding of an MP3
        (end - 500, end + 10**6),
    ]
    starts, lengths = rng.integers((0, 1), (end, rate), (examples(WINDOWS), 2)).T.tolist()
    windows += [(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    for start, stop in windows:
        window = None if stop is None else (Fraction(start, rate), Fraction(stop, rate))
        with mock.patch.object(av, "open", _no_demuxer):
            array = sm.load_audio(data, window, sample_fmt=None).array
        found = array if audio.sample_fmt in ("fltp", "s16p", "s32p") else array.T
        np.testing.assert_array_equal(found, whole[:, start:stop], err_msg=str((start, stop)))


def _without_counts(error: tuple[type, str]) -> tuple[type, str]:
    return error[0], re.sub(r"packet \d+", "packet", error[1])


def _check_as_by_packets(data: bytes, window: Any, **options: Any) -> bool:
    """Check that the array or error equals that by FFmpeg's demuxer; return whether it was an array."""
    wanted = outcome(lambda: by_steps(data, window, options))
    found = outcome(lambda: sm.load_audio(data, window, name="sound", **options).array)
    if isinstance(wanted, tuple):
        # In FLAC, FFmpeg finds another position at a second seek, from which packets are counted.
        assert _without_counts(found) == _without_counts(wanted)
        return False
    np.testing.assert_array_equal(found, wanted)
    return True


@pytest.mark.parametrize(
    "name", ["MP3, 16 kHz", "MP3, 48 kHz stereo", "MP3 that varies", "FLAC, 16 kHz"]
)
def test_damage_is_told_as_by_packets(name: str, rng: np.random.Generator) -> None:
    clean = file(name)
    fine = 0
    for _ in range(examples(120)):
        damaged = bytearray(clean)
        place = int(rng.integers(2000, len(clean) - 2000))
        size = int(rng.choice([1, 4, 40, 1500]))
        kind = int(rng.integers(5))
        noise = rng.integers(0, 256, size, np.uint8).tobytes()
        if kind < 3:
            damaged[place : place + size] = noise
        elif kind == 3:
            damaged[place:place] = noise
        else:
            del damaged[place : place + size]
        middle = SECONDS * place / len(clean)
        fine += _check_as_by_packets(bytes(damaged), (max(middle - 1, 0), middle + 0.8))
    assert fine < examples(120)


def _tagged(**changes: int) -> bytes:
    """Make an MP3 whose tag has other numbers."""
    data = bytearray(file("MP3, 16 kHz"))
    place = data.index(b"Info") + 8
    for offset, name in enumerate(("frames", "bytes")):
        if name in changes:
            struct.pack_into(">I", data, place + 4 * offset, changes[name])
    if "delays" in changes:
        at = data.index(b"Lavf", place) + 21
        data[at : at + 3] = changes["delays"].to_bytes(3, "big")
    return bytes(data)


# For an MP3 and a FLAC file.
ODD: dict[str, Callable[[bytes, bytes], bytes]] = {
    "a tag of fewer frames": lambda mp3, flac: _tagged(frames=100),
    "a tag of more frames": lambda mp3, flac: _tagged(frames=1000),
    "a tag of more bytes": lambda mp3, flac: _tagged(bytes=10**6),
    "a tag of fewer bytes": lambda mp3, flac: _tagged(bytes=1000),
    "no delay and no padding": lambda mp3, flac: _tagged(delays=0),
    "a long delay and padding": lambda mp3, flac: _tagged(delays=0x7FF << 12 | 0x7FF),
    "a tag of another encoder": lambda mp3, flac: mp3.replace(b"Lavf", b"Here"),
    "two files": lambda mp3, flac: mp3 + mp3,
    "two files without tags": lambda mp3, flac: mp3 + file("MP3 that varies and does not say so"),
    "another rate behind": lambda mp3, flac: mp3 + file("MP3, 8 kHz, few bits"),
    "two channels behind": lambda mp3, flac: mp3 + _made("mp3", 16000, 2),
    "an APE tag behind": lambda mp3, flac: mp3 + b"APETAGEX" + struct.pack("<4I8x", 2000, 32, 0, 0),
    "two tags in front": lambda mp3, flac: b"ID3\4\0\0\0\0\0\x10" + bytes(16) + mp3,
    "a tag with a footer": lambda mp3, flac: (
        b"ID3\4\0\x10\0\0\0\x10" + bytes(16) + b"3DI\4\0\x10\0\0\0\x10" + mp3
    ),
    "junk in front": lambda mp3, flac: bytes(500) + mp3,
    "MP3 cut short": lambda mp3, flac: mp3[: len(mp3) // 2 + 33],
    "FLAC cut short": lambda mp3, flac: flac[: len(flac) // 2],
    "FLAC before a tag": lambda mp3, flac: flac + b"TAG" + bytes(125),
    "FLAC of no stated length": lambda mp3, flac: (
        flac[:21] + bytes([flac[21] & 0xF0]) + bytes(4) + flac[26:]
    ),
    "FLAC of centre and bass": lambda mp3, flac: _with_block(
        file("FLAC, 44.1 kHz stereo"),
        4,
        struct.pack("<3I", 0, 1, 37) + b"WAVEFORMATEXTENSIBLE_CHANNEL_MASK=0xc",
    ),
    "FLAC without the first frames": lambda mp3, flac: (
        flac[:42] + flac[flac.index(flac[-1:], 40_000) :]
    ),
    "a signature": lambda mp3, flac: b"fLaC" + bytes(10),
    "a header": lambda mp3, flac: mp3[mp3.index(b"Info") - 20 :][:30],
}


@each("name", ODD)
def test_odd_files_are_read_as_by_packets(name: str) -> None:
    data = ODD[name](file("MP3, 16 kHz"), file("FLAC, 16 kHz"))
    for window in [None, (0, 1), (2.5, 3.1), (6.5, 7), (6.9, 9), (9, 14)]:
        _check_as_by_packets(data, window)
    _check_as_by_packets(data, (2.5, 3.1), num_channels=1)  # bass is left out


FORK = """
import os, signal, sys, threading, warnings
import spdl_media as sm
from spdl_media._sample_decoder import _short_locks

data = sys.stdin.buffer.read()
before = sm.load_audio(data, (1, 2)).array
held, done = threading.Event(), threading.Event()

def hold():
    with _short_locks[0], _short_locks[1]:
        held.set()
        done.wait()

thread = threading.Thread(target=hold)
thread.start()
held.wait()
warnings.simplefilter("ignore", DeprecationWarning)  # CPython's, of forking beside threads
child = os.fork()
if not child:
    signal.alarm(60)
    os._exit(not (sm.load_audio(data, (1, 2)).array == before).all())
status = os.waitpid(child, 0)[1]
done.set()
thread.join()
sys.exit(status != 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
def test_a_forked_child_waits_for_no_thread_of_its_parent() -> None:
    subprocess.run([sys.executable, "-c", FORK], input=file("MP3, 16 kHz"), check=True)
