"""WAV files read by the library's own parser equal those decoded by FFmpeg."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from effort import each

import spdl_media as sm

GUID_END = bytes.fromhex("000000001000800000aa00389b71")
# Code of the format, bits, channels, mask of speakers (for the extensible format).
KINDS = [
    (1, 8, 1, None),
    (1, 12, 2, None),
    (1, 16, 1, None),
    (1, 16, 2, None),
    (1, 16, 3, None),
    (1, 16, 5, 0x37),
    (1, 16, 2, 0),
    (1, 20, 2, 3),
    (1, 24, 2, None),
    (1, 32, 2, None),
    (1, 64, 1, None),
    (3, 32, 6, 0x3F),
    (3, 64, 2, None),
    (6, 8, 2, None),
    (7, 8, 1, None),
]
FORMATS = ("fltp", "flt", "dblp", "s16", "s16p", "s32", "u8", "s64p", None)
OPTIONS: list[dict[str, Any]] = [
    {"timestamp": (0.01, 0.05)},
    {"timestamp": (None, 0.02), "sample_fmt": "s16"},
    {"timestamp": (0.09, None), "sample_rate": 16000},
    {"num_samples": 7},
    {"num_channels": 1},
    {"num_channels": 2, "sample_rate": 8000},
    {"num_samples": 100, "sample_rate": 8000},
    {"filter_desc": "volume=0.5"},
    {"filter_desc": None},
]


def make_wav(
    code: int,
    bits: int,
    channels: int,
    mask: int | None = None,
    *,
    before: bytes = b"",
    samples: bytes | None = None,
) -> bytes:
    """Make a WAV file of a tenth of a second at 11025 Hz."""
    size = (bits + 7) // 8
    if samples is None:
        rng = np.random.default_rng(bits)
        if code == 3:
            samples = rng.uniform(-1, 1, 1102 * channels).astype(f"<f{size}").tobytes()
        else:
            samples = rng.bytes(1102 * channels * size)
    tag = code if mask is None else 0xFFFE
    head = struct.pack(
        "<HHIIHH", tag, channels, 11025, 11025 * channels * size, channels * size, bits
    )
    if mask is not None:
        head = head[:-2] + struct.pack("<HHHIH", 8 * size, 22, bits, mask, code) + GUID_END
    body = b"WAVEfmt " + struct.pack("<I", len(head)) + head + before
    body += b"data" + struct.pack("<I", len(samples)) + samples
    return b"RIFF" + struct.pack("<I", len(body)) + body


def by_ffmpeg(data: bytes, options: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Load audio in steps, which read every file by FFmpeg."""
    options = dict(options)
    timestamp, count = options.pop("timestamp", None), options.pop("num_samples", None)
    desc = (
        options["filter_desc"] if "filter_desc" in options else sm.get_audio_filter_desc(**options)
    )
    packets = sm.demux_audio(data, timestamp=timestamp)
    return sm.convert_frames(sm.decode_packets(packets, desc, num_samples=count)).array


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_arrays_are_those_of_ffmpeg(kind: tuple[int, int, int, int | None], tmp_path: Path) -> None:
    data = make_wav(*kind)
    path = tmp_path / "a.wav"
    path.write_bytes(data)
    wrong = []
    for options in (*({"sample_fmt": name} for name in FORMATS), *OPTIONS):
        wanted = by_ffmpeg(data, options)
        loaded = [sm.load_audio(source, **options).array for source in (path, data)]
        wrong += [
            options
            for found in loaded
            if found.dtype != wanted.dtype or not np.array_equal(found, wanted)
        ]
    assert not wrong


@each(
    "change",
    [
        lambda data: data[:-1],
        lambda data: data[:-500],
        lambda data: data.replace(b"data" + struct.pack("<I", 4408), b"data" + b"\xff" * 4),
        lambda data: data.replace(b"data" + struct.pack("<I", 4408), b"data" + bytes(4)),
        lambda data: data.replace(b"fmt ", b"fmx "),
        lambda data: data[:30],
        lambda data: data.replace(struct.pack("<I", 11025), struct.pack("<I", 1 << 31)),
    ],
)
@each("on_corrupt", ["raise", "keep"])
def test_errors_are_those_of_ffmpeg(change: Callable[[bytes], bytes], on_corrupt: str) -> None:
    data, config = change(make_wav(1, 16, 2)), sm.decode_config(on_corrupt=on_corrupt)  # type: ignore[arg-type]

    def outcome(load: Callable[[], Any]) -> Any:
        try:
            return load().array.tolist()
        except sm.MediaError as error:
            return type(error), str(error)

    def steps() -> Any:
        return sm.convert_frames(sm.decode_packets(sm.demux_audio(data), decode_config=config))

    assert outcome(lambda: sm.load_audio(data, decode_config=config)) == outcome(steps)


def test_what_is_said_to_be_pcm_and_is_dts_goes_to_ffmpeg() -> None:
    frames = (b"\x7f\xfe\x80\x01" + bytes(1020)) * 20
    data = make_wav(1, 16, 2, samples=frames)
    assert np.array_equal(sm.load_audio(data).array, by_ffmpeg(data, {}))


def test_a_window_of_a_long_file_reads_little(tmp_path: Path) -> None:
    path = tmp_path / "long.wav"
    path.write_bytes(make_wav(1, 16, 1, samples=bytes(20_000_000)))
    reads = []

    class Recorded:
        def __init__(self) -> None:
            self.file = path.open("rb")

        def read(self, size: int = -1) -> bytes:
            data = self.file.read(size)
            reads.append(len(data))
            return data

        def seek(self, offset: int, whence: int = 0) -> int:
            return self.file.seek(offset, whence)

        def tell(self) -> int:
            return self.file.tell()

    source = Recorded()
    with source.file:
        assert sm.load_audio(source, (400, 401)).shape == (1, 11025)
    assert sum(reads) < 200_000


@pytest.mark.parametrize(("bits", "channels"), [(24, 2), (16, 5)])
def test_long_files_are_read_in_pieces(bits: int, channels: int, tmp_path: Path) -> None:
    samples = np.random.default_rng(0).bytes(600_001 * channels * bits // 8)
    (path := tmp_path / "long.wav").write_bytes(make_wav(1, bits, channels, samples=samples))
    for options in ({}, {"timestamp": (1, 20)}, {"sample_fmt": "s16p"}, {"sample_rate": 8000}):
        found = sm.load_audio(path, **options).array
        assert np.array_equal(found, by_ffmpeg(path.read_bytes(), options)), options


def test_long_files_are_read_from_file_objects_at_once() -> None:
    # A compressed one is decompressed from its start after each step back.
    class Recorded(io.BytesIO):
        steps_back = 0

        def seek(self, offset: int, whence: int = 0) -> int:
            before, place = self.tell(), super().seek(offset, whence)
            self.steps_back += place < before
            return place

    short, long = (Recorded(make_wav(1, 16, 2, samples=bytes(size))) for size in (1 << 10, 1 << 23))
    for file in (short, long):
        sm.load_audio(file, sample_rate=8000)
    assert long.steps_back <= short.steps_back


def test_storage_and_writable_memory() -> None:
    data = make_wav(3, 32, 2)
    pool = sm.cpu_storage(20_000, pin_memory=False)
    buffer = sm.load_audio(data, sample_fmt="flt", storage=pool)
    assert buffer.array.flags.writeable
    assert buffer.shape == (1102, 2)
    buffer.array[...] = 0
    assert sm.load_audio(data, sample_fmt="flt").array.any(), "the source keeps its samples"


def test_silence_and_empty_windows() -> None:
    data = make_wav(1, 16, 2)
    with pytest.raises(sm.ConvertError, match=r"no sample in the window \[5, 6\)"):
        sm.load_audio(data, (5, 6))
    with pytest.raises(ValueError, match="num_samples must be at least 1"):
        sm.load_audio(data, num_samples=0)


def test_probe_says_what_ffmpeg_says() -> None:
    info = b"INFOISFT\x05\0\0\0Lavf\0\0INAM\x03\0\0\0ab\0\0"
    listed = b"LIST" + struct.pack("<I", len(info)) + info
    files = [make_wav(*kind) for kind in KINDS]
    files += [make_wav(1, 16, 2, before=listed), make_wav(1, 16, 2) + listed]
    files += [make_wav(1, 16, 2, before=b"fact" + struct.pack("<2I", 4, n)) for n in (1102, 1000)]
    files += [make_wav(1, 16, 2, before=b"junk\x03\0\0\0abc\0"), make_wav(1, 16, 2)[:-9]]
    named = sm.demux_config(format="wav")  # which FFmpeg handles
    wrong = [data[:80] for data in files if sm.probe(data) != sm.probe(data, demux_config=named)]
    assert not wrong


def test_big_endian_wav_is_refused() -> None:
    """FFmpeg would read its samples as little-endian."""
    header = b"RIFX" + struct.pack(">I", 36 + 200) + b"WAVEfmt "
    header += (
        struct.pack(">IHHIIHH", 16, 1, 1, 8000, 16000, 2, 16) + b"data" + struct.pack(">I", 200)
    )
    with pytest.raises(sm.DemuxError, match=r"a WAV of big-endian numbers \(RIFX\)"):
        sm.load_audio(header + bytes(200))
