"""Windows of MP3 and FLAC files are read without FFmpeg's demuxers; they are those of the whole file."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import av
import numpy as np
import pytest
from audio_oracle import linear, sound
from effort import each, examples
from test_load_audio import by_steps, outcome

import spdl_media as sm
from spdl_media.testing import AudioTrack, make_media

SECONDS = 7
WINDOWS = 100


def _made(format: str, rate: int, channels: int, muxing: Any = None, **options: str) -> bytes:
    codec = "libmp3lame" if format == "mp3" else format
    samples = sound(SECONDS * rate + 77, rate, channels)
    if "bits" in options:
        del options["bits"]
        samples = samples.astype(np.int32) * 65536 + 256 * 77
    track = AudioTrack(samples=samples, sample_rate=rate, codec=codec, options=options)
    return make_media([track], format=format, options=muxing or {})


def _with_block(data: bytes, kind: int, content: bytes) -> bytes:
    """A FLAC file with one more block of metadata behind STREAMINFO."""
    return data[:42] + bytes([kind]) + len(content).to_bytes(3, "big") + content + data[42:]


def _seek_table(rate: int) -> bytes:
    # Of a point that stands and one that is left free.
    return struct.pack(">QQH", 0, 0, 4096) + struct.pack(">QQH", 2**64 - 1, 0, 0)


VARIABLE = {"global_quality": "236", "flags": "+qscale"}
BARE = {"write_xing": "0", "id3v2_version": "0"}
FLAC = _made("flac", 16000, 1, frame_size="4096")
FILES: dict[str, bytes] = {
    "MP3, 16 kHz": _made("mp3", 16000, 1),
    "MP3, 8 kHz, few bits": _made("mp3", 8000, 1, b="8000"),
    "MP3, 44.1 kHz, few bits": _made("mp3", 44100, 1, b="32000"),
    "MP3, 48 kHz stereo": _made("mp3", 48000, 2, b="320000"),
    "MP3 that varies": _made("mp3", 44100, 2, **VARIABLE),
    "MP3 that varies and does not say so": _made("mp3", 22050, 2, BARE, **VARIABLE),
    "MP3 without reservoir": _made("mp3", 32000, 2, BARE, reservoir="0"),
    "MP3 behind a large tag": b"ID3\4\0\0\0\1\0\0" + bytes(1 << 14) + _made("mp3", 24000, 1, BARE),
    "MP3 before a tag": _made("mp3", 16000, 1) + b"TAG" + bytes(125),
    "FLAC, 16 kHz": FLAC,
    "FLAC, 44.1 kHz stereo": _made("flac", 44100, 2),
    "FLAC, 24 bits": _made("flac", 48000, 2, bits="24"),
    "FLAC, small blocks": _made("flac", 22050, 1, frame_size="256"),
    "FLAC, one block": _made("flac", 8000, 1, frame_size="65535"),
    "FLAC, silence": make_media(
        [AudioTrack(samples=np.zeros((160_000, 1), np.int16), sample_rate=16000, codec="flac")],
        format="flac",
    ),
    "FLAC with a seek table": _with_block(FLAC, 3, _seek_table(16000)),
    "FLAC with a picture": _with_block(FLAC, 6, bytes(100_000)),
}  # fmt: skip


@pytest.fixture
def no_demuxer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """FFmpeg's demuxers fail, so what is loaded was read without them."""

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("a demuxer was opened")

    with monkeypatch.context() as patch:
        patch.setattr(av, "open", fail)
        yield


WHOLE = {name: (linear(data), sm.probe(data).audio) for name, data in FILES.items()}


@each("name", FILES)
def test_any_window_is_that_of_the_whole_file(
    name: str, no_demuxer: None, rng: np.random.Generator
) -> None:
    data, (whole, audio) = FILES[name], WHOLE[name]
    assert audio is not None
    rate, end = audio.sample_rate, whole.shape[1]
    windows: list[tuple[int, int | None]] = [
        (0, None),
        (0, end),
        (0, 1),
        (end - 1, end),
        (end - 500, end + 10**6),
    ]
    starts, lengths = rng.integers((0, 1), (end, rate), (examples(WINDOWS), 2)).T.tolist()
    windows += [(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    for start, stop in windows:
        window = None if stop is None else (Fraction(start, rate), Fraction(stop, rate))
        array = sm.load_audio(data, window, sample_fmt=None).array
        found = array if audio.sample_fmt in ("fltp", "s16p", "s32p") else array.T
        np.testing.assert_array_equal(found, whole[:, start:stop], err_msg=str((start, stop)))


def _without_counts(error: tuple[type, str]) -> tuple[type, str]:
    return error[0], re.sub(r"packet \d+", "packet", error[1])


def _check_as_by_packets(data: bytes, window: Any) -> bool:
    """An array or an error, the same as by FFmpeg's demuxer; False: an error."""
    wanted = outcome(lambda: by_steps(data, window, {}))
    found = outcome(lambda: sm.load_audio(data, window, name="sound").array)
    if isinstance(wanted, tuple):
        # Of FLAC, FFmpeg finds another place when it seeks once more, and packets are counted from it.
        assert _without_counts(found) == _without_counts(wanted)
        return False
    np.testing.assert_array_equal(found, wanted)
    return True


@pytest.mark.parametrize(
    "name", ["MP3, 16 kHz", "MP3, 48 kHz stereo", "MP3 that varies", "FLAC, 16 kHz"]
)
def test_damage_is_told_as_by_packets(name: str, rng: np.random.Generator) -> None:
    clean = FILES[name]
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
    """An MP3 whose tag states other numbers."""
    data = bytearray(FILES["MP3, 16 kHz"])
    place = data.index(b"Info") + 8
    for offset, name in enumerate(("frames", "bytes")):
        if name in changes:
            struct.pack_into(">I", data, place + 4 * offset, changes[name])
    if "delays" in changes:
        at = data.index(b"Lavf", place) + 21
        data[at : at + 3] = changes["delays"].to_bytes(3, "big")
    return bytes(data)


MP3 = FILES["MP3, 16 kHz"]
ODD: dict[str, bytes] = {
    "a tag of fewer frames": _tagged(frames=100),
    "a tag of more frames": _tagged(frames=1000),
    "a tag of more bytes": _tagged(bytes=10**6),
    "a tag of fewer bytes": _tagged(bytes=1000),
    "no delay and no padding": _tagged(delays=0),
    "a long delay and padding": _tagged(delays=0x7FF << 12 | 0x7FF),
    "a tag of another encoder": MP3.replace(b"Lavf", b"Here"),
    "two files": MP3 + MP3,
    "two files without tags": MP3 + FILES["MP3 that varies and does not say so"],
    "another rate behind": MP3 + FILES["MP3, 8 kHz, few bits"],
    "two channels behind": MP3 + _made("mp3", 16000, 2),
    "an APE tag behind": MP3 + b"APETAGEX" + struct.pack("<4I8x", 2000, 32, 0, 0),
    "two tags in front": b"ID3\4\0\0\0\0\0\x10" + bytes(16) + MP3,
    "a tag with a footer": b"ID3\4\0\x10\0\0\0\x10" + bytes(16) + b"3DI\4\0\x10\0\0\0\x10" + MP3,
    "junk in front": bytes(500) + MP3,
    "MP3 cut short": MP3[: len(MP3) // 2 + 33],
    "FLAC cut short": FLAC[: len(FLAC) // 2],
    "FLAC before a tag": FLAC + b"TAG" + bytes(125),
    "FLAC of no stated length": FLAC[:21] + bytes([FLAC[21] & 0xF0]) + bytes(4) + FLAC[26:],
    "FLAC with a mask of channels": _with_block(
        FLAC, 4, b"\0\0\0\0" + b"\1\0\0\0" + struct.pack("<I", 37)
        + b"WAVEFORMATEXTENSIBLE_CHANNEL_MASK=0x1"
    ),
    "FLAC without the first frames": FLAC[:42] + FLAC[FLAC.index(FLAC[-1:], 40_000) :],
    "a signature": b"fLaC" + bytes(10),
    "a header": MP3[MP3.index(b"Info") - 20 :][:30],
}  # fmt: skip


@each("name", ODD)
def test_odd_files_are_read_as_by_packets(name: str) -> None:
    for window in [None, (0, 1), (2.5, 3.1), (6.5, 7), (6.9, 9), (9, 14)]:
        _check_as_by_packets(ODD[name], window)


FORK = """
import os, signal, sys, threading, warnings
import spdl_media as sm
from spdl_media._sample_decoder import _turn

data = sys.stdin.buffer.read()
before = sm.load_audio(data, (1, 2)).array
held, done = threading.Event(), threading.Event()

def hold():
    with _turn:
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
    subprocess.run([sys.executable, "-c", FORK], input=MP3, timeout=100, check=True)
