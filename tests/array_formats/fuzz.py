"""Damages files of every format at random and reads them: the result must be arrays or an ArrayFormatError.

    python tests/array_formats/fuzz.py --inputs 120000 [--seed 0]

Each input is a good file with up to six changes: flipped bits, numbers overwritten with extreme ones, pieces
cut out, duplicated, moved or replaced, and corrected checksums. It is read to the end, with these checks:

- only ``ArrayFormatError`` is raised, and its message names the source;
- no more memory is allocated than the limit for decompression, the size of the input, and Python's overhead;
- every array is a view of the input, or has no more bytes than could be in it.

An input that fails is printed with its format and bytes, for a regression test. Otherwise the last line shows
the number of inputs, and how many of them could be read.
"""

from __future__ import annotations

import argparse
import random
import struct
import sys
import tarfile
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from array_formats import made_files as made

import spdl_media as sm

# Limits in bytes: for decompressed data, and for allocations of Python and NumPy, including error messages.
MAX_UNCOMPRESSED = 1 << 20
ROOM = 1 << 20

NUMBERS = (
    0,
    1,
    2,
    7,
    127,
    128,
    255,
    0x7FFF,
    0xFFFF,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFE,
    0xFFFFFFFF,
)
LONG_NUMBERS = (2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1)
WORDS = (
    b"0", b"-1", b"9999999999999999999", b"(", b"((((((((", b"[('a', '<i2')]", b"'|O'", b"'<U9999999'",
    b"'|V2147483647'", b"()", b"True", b",", b"\\x00", b"\\U00110000", b"PK\x05\x06", b"PK\x01\x02",
    b"PK\x06\x07", b"\xff" * 8, b"\0" * 8, b"data", b"fmt ", b"ds64", b"77777777777\0",
    b"\x80" + b"\xff" * 11,
    b"12 path=abcd\n", b"20 size=99999999999\n", b"\0" * 512,
)  # fmt: skip


def good_files() -> dict[str, list[bytes]]:
    """Return small files of most kinds, by format."""
    rng = np.random.default_rng(0)
    arrays = {
        "a": rng.integers(0, 255, (3, 8, 8), np.uint8),
        "b": np.asfortranarray(rng.normal(size=(4, 5)).astype(">f4")),
        "t": np.array(["x", "größe"]),
        "r": np.zeros(3, [("a", "<i4"), ("b", "<f8", (2,))]),
        "s": np.float64(2.0),
        "z": np.zeros(5000, np.uint8),
    }
    codes = bytes(range(60))
    members = {"0001.jpg": b"x" * 600, "0001.cls": b"7", "dir/0002.npy": made.npy(arrays["a"])}
    long = {**members, "n" * 200 + ".txt": b"long", "größe.txt": b"name"}
    return {
        "npy": [made.npy(a, (v, 0)) for a in arrays.values() for v in (1, 2, 3)],
        "npz": [
            made.npz(arrays),
            made.npz(arrays, compressed=True),
            made.npz({"a": arrays["a"]}),
            made.npz({"z": arrays["z"]}, compressed=True),
        ],
        "wav": [
            made.wav(made.wav_format(1, 2, 16), codes),
            made.wav(made.wav_format(1, 1, 24), codes, before=made.chunk(b"LIST", b"odd")),
            made.wav(made.wav_format(6, 1, 8), codes),
            made.wav(made.wav_format(0xFFFE, 1, 32, sub_code=3), codes),
            made.wav(
                made.wav_format(1, 1, 8),
                codes,
                kind=b"RF64",
                size=0xFFFFFFFF,
                before=made.chunk(b"ds64", struct.pack("<QQQI", 0, 60, 60, 0)),
            ),
        ],
        "tar": [
            made.tar(members),
            made.tar(long, tarfile.GNU_FORMAT),
            made.tar(long, tarfile.PAX_FORMAT),
        ],
    }  # fmt: skip


# Functions that make one change to a file.


def flip(data: bytearray, rng: random.Random) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def overwrite(data: bytearray, rng: random.Random) -> None:
    formats = {1: "B", 2: "<H", 4: "<I", 8: "<Q"}
    size = rng.choice([size for size in formats if size <= len(data)])
    value = rng.choice(NUMBERS + LONG_NUMBERS) & ((1 << 8 * size) - 1)
    struct.pack_into(formats[size], data, rng.randrange(len(data) - size + 1), value)


def insert(data: bytearray, rng: random.Random) -> None:
    place = rng.randrange(len(data) + 1)
    data[place:place] = rng.choice(WORDS)


def replace(data: bytearray, rng: random.Random) -> None:
    word = rng.choice(WORDS)
    place = rng.randrange(len(data))
    data[place : place + len(word)] = word


def cut(data: bytearray, rng: random.Random) -> None:
    if rng.random() < 0.5:
        del data[rng.randrange(len(data)) :]
    else:
        place = rng.randrange(len(data))
        del data[place : place + rng.choice((1, 4, 64, 512, 1000))]


def double(data: bytearray, rng: random.Random) -> None:
    place, size = rng.randrange(len(data)), rng.choice((4, 30, 64, 512, 2000))
    target = rng.randrange(len(data))
    data[target:target] = data[place : place + size]


def repair(data: bytearray, _: random.Random) -> None:
    """Correct the checksums of tar headers and stored ZIP members, so that other checks see the damage."""
    for start in range(0, len(data) - 511, 512):
        if data[start + 257 : start + 262] == b"ustar":
            data[start + 148 : start + 156] = b" " * 8
            data[start + 148 : start + 156] = b"%06o\0 " % sum(data[start : start + 512])
    entry = data.find(b"PK\x01\x02")
    while 0 <= entry <= len(data) - 46:
        size, name_size = struct.unpack_from("<L", data, entry + 20)[0], data[entry + 28]
        start = struct.unpack_from("<L", data, entry + 42)[0] + 30 + name_size + 20
        struct.pack_into("<L", data, entry + 16, zlib.crc32(data[start : start + size]))
        entry = data.find(b"PK\x01\x02", entry + 4)


Change = Callable[[bytearray, random.Random], None]
CHANGES: Sequence[Change] = (flip, overwrite, insert, replace, cut, double, repair)
# Headers are short, but most faults are there.
HEAD = 600


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Return a file with some changes, half of them near its beginning or end."""
    for _ in range(rng.randint(1, 6)):
        if not data:
            break
        change = rng.choice(CHANGES)
        start, stop = 0, len(data)
        if change is not repair and rng.random() < 0.6:
            start, stop = rng.choice([(0, HEAD), (max(0, stop - HEAD), stop), (0, 128)])
        part = bytearray(data[start:stop])
        change(part, rng)
        data = data[:start] + bytes(part) + data[stop:]
    return data


# The readers, by format; each reads a file completely.


def read_npy(data: bytes) -> None:
    array = sm.load_npy(data)
    assert array.nbytes <= len(data)
    assert sm.load_npy(data, copy=True).nbytes == array.nbytes


def read_npz(data: bytes) -> None:
    loaded = sm.load_npz(data, max_uncompressed_bytes=MAX_UNCOMPRESSED)
    for name in loaded:
        with suppress(sm.ArrayFormatError):
            assert loaded[name].nbytes <= max(len(data), MAX_UNCOMPRESSED)


def read_wav(data: bytes) -> None:
    header = sm.parse_wav(data)
    assert header.data_size >= 0
    array = sm.load_wav(data)
    assert array.nbytes <= 2 * len(data)
    assert array.shape == (header.num_samples, header.num_channels)
    half = sm.load_wav(data, header.num_samples // 2 / header.sample_rate)
    assert len(half) == header.num_samples - header.num_samples // 2


def read_tar(data: bytes) -> None:
    sizes = []
    with suppress(sm.ArrayFormatError):
        sizes = [len(content) for _, content in sm.iter_tarfile(data)]
        assert sum(sizes) <= len(data)
    for sample in sm.iter_samples(data):
        assert sample["__key__"]


READERS: dict[str, Callable[[bytes], None]] = {
    "npy": read_npy,
    "npz": read_npz,
    "wav": read_wav,
    "tar": read_tar,
}


class WrongReadError(AssertionError):
    """A reader has handled an input wrongly."""


@contextmanager
def watched_memory() -> Iterator[None]:
    started = not tracemalloc.is_tracing()
    if started:
        tracemalloc.start()
    try:
        yield
    finally:
        if started:
            tracemalloc.stop()


def check(format: str, data: bytes) -> bool:
    """Read one input; return whether it could be read.

    Raises:
        WrongReadError: Another exception was raised, or too much memory was allocated.
    """
    is_good, taken = read_watched(format, data)
    if taken > (most := MAX_UNCOMPRESSED + 4 * len(data) + ROOM):
        # Other threads allocate memory, too. So read again: only the reader's own allocations happen again.
        _, taken = read_watched(format, data)
    if taken > most:
        raise WrongReadError(f"{format}: {taken} bytes were allocated, from {data!r}")
    return is_good


def read_watched(format: str, data: bytes) -> tuple[bool, int]:
    """Read one input; return whether it could be read, and the peak of allocated bytes."""
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    try:
        READERS[format](data)
        is_good = True
    except sm.ArrayFormatError as error:
        is_good = False
        if not str(error).startswith(f"bytes of length {len(data)}: "):
            raise WrongReadError(f"{format}: {error!r} names no source, from {data!r}") from error
    except Exception as error:
        raise WrongReadError(f"{format}: {type(error).__name__}: {error}, from {data!r}") from error
    _, peak = tracemalloc.get_traced_memory()
    return is_good, peak - before


def run(count: int, seed: int) -> Counter[str]:
    """Check ``count`` inputs, equally many of each format; count those that could be read."""
    files = good_files()
    good: Counter[str] = Counter()
    with watched_memory():
        for number in range(count):
            format = list(READERS)[number % len(READERS)]
            # Each input has its own random generator, so that it can be made again by itself.
            rng = random.Random(f"{seed}/{number}")  # noqa: S311  # no secrets
            good[format] += check(format, damaged(rng.choice(files[format]), rng))
    return good


def main(arguments: Sequence[Any] | None = None) -> None:
    """Run the fuzzer as a program, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=120_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    good = run(options.inputs, options.seed)
    readable = ", ".join(f"{format} {good[format]}" for format in READERS)
    print(f"{options.inputs} inputs, no failure; could be read all the same: {readable}")  # noqa: T201  # a program


if __name__ == "__main__":
    main()
