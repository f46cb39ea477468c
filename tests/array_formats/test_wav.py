"""load_wav and parse_wav compared with SciPy, the wave module and FFmpeg, and wrong headers."""

from __future__ import annotations

import io
import struct
import wave
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from array_formats.made_files import (
    A_LAW,
    EXTENSIBLE,
    FLOAT,
    GUID_END,
    MU_LAW,
    PCM,
    chunk,
    wav,
    wav_format,
)
from effort import each
from hypothesis import given
from hypothesis import strategies as st

import spdl_media as sm
from spdl_media.testing import make_audio

RATE = 8000


def samples(dtype: Any, num_samples: int = 500, num_channels: int = 2) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(0)
    dtype = np.dtype(dtype)
    shape = (num_samples, num_channels)
    if dtype.kind == "f":
        return rng.uniform(-1, 1, shape).astype(dtype)
    limits = np.iinfo(dtype)
    return rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)


@each("num_channels", [1, 2, 5])
@each("dtype", ["u1", "i2", "i4", "i8", "f4", "f8"])
def test_what_scipy_writes(dtype: str, num_channels: int) -> None:
    wavfile = pytest.importorskip("scipy.io.wavfile")
    original = samples(dtype, num_channels=num_channels)
    file = io.BytesIO()
    wavfile.write(file, RATE, original)
    loaded = sm.load_wav(file.getvalue())
    assert loaded.dtype == original.dtype
    np.testing.assert_array_equal(loaded, original)
    assert sm.parse_wav(file.getvalue()).sample_rate == RATE


@pytest.mark.parametrize(
    ("code", "bits"),
    [(PCM, 8), (PCM, 16), (PCM, 24), (PCM, 32), (PCM, 64), (FLOAT, 32), (FLOAT, 64)],
)
@pytest.mark.parametrize("extensible", [False, True])
def test_as_scipy_reads(code: int, bits: int, extensible: bool) -> None:
    wavfile = pytest.importorskip("scipy.io.wavfile")
    data = (
        np.random.default_rng(0)
        .uniform(-1, 1, 600)
        .astype(f"<f{bits // 8}" if code == FLOAT else "f4")
    )
    format = (
        wav_format(EXTENSIBLE, 2, bits, sub_code=code) if extensible else wav_format(code, 2, bits)
    )
    file = wav(format, data.tobytes()[: 2400 // (2 * bits // 8) * (2 * bits // 8)])
    rate, expected = wavfile.read(io.BytesIO(file))
    loaded = sm.load_wav(file)
    assert loaded.dtype == expected.dtype
    np.testing.assert_array_equal(loaded, expected)
    assert sm.parse_wav(file).sample_rate == rate


@each("width", [1, 2, 3, 4])
@each("num_channels", [1, 2])
def test_what_the_wave_module_writes(width: int, num_channels: int) -> None:
    frames = bytes(range(256)) * 3 * num_channels
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((num_channels, width, RATE, 0, "NONE", "not compressed"))
        writer.writeframes(frames)
    data = file.getvalue()
    loaded = sm.load_wav(data)
    # Samples of three bytes are in the upper three bytes of int32.
    stored = loaded.astype(f"<{loaded.dtype.kind}{loaded.itemsize}").reshape(-1).view(np.uint8)
    np.testing.assert_array_equal(
        stored.reshape(-1, loaded.itemsize)[:, loaded.itemsize - width :].reshape(-1),
        np.frombuffer(frames, np.uint8),
    )
    with wave.open(io.BytesIO(data)) as reader:
        header = sm.parse_wav(data)
        assert header.num_samples == reader.getnframes() == len(loaded)
        assert header.num_channels == reader.getnchannels()
        assert header.block_align == width * num_channels


@each(
    "codec",
    [
        "pcm_u8",
        "pcm_s16le",
        "pcm_s24le",
        "pcm_s32le",
        "pcm_f32le",
        "pcm_f64le",
        "pcm_alaw",
        "pcm_mulaw",
    ],
)
@each("num_channels", [1, 6])
def test_as_ffmpeg_writes_and_decodes(codec: str, num_channels: int) -> None:
    data = make_audio(samples("i2", num_channels=num_channels), RATE, codec=codec)
    expected = np.asarray(sm.load_audio(data, filter_desc=None))
    loaded = sm.load_wav(data)
    assert loaded.dtype == expected.dtype
    np.testing.assert_array_equal(loaded, expected.reshape(loaded.shape))


@pytest.mark.parametrize("code", [A_LAW, MU_LAW])
def test_every_code_of_a_law_and_mu_law_as_ffmpeg_decodes_it(code: int) -> None:
    data = wav(wav_format(code, 1, 8), bytes(range(256)))
    expected = np.asarray(sm.load_audio(data, filter_desc=None)).reshape(-1, 1)
    loaded = sm.load_wav(data)
    assert loaded.dtype == np.int16
    np.testing.assert_array_equal(loaded, expected)


@each("num_samples", [0, 1, 2, 7, 524_288, 524_289, 600_001])
def test_codes_are_looked_up_in_pairs_piece_by_piece(num_samples: int) -> None:
    codes = samples("u1", num_samples, 1)
    table = sm.load_wav(wav(wav_format(MU_LAW, 1, 8), bytes(range(256))))
    loaded = sm.load_wav(wav(wav_format(MU_LAW, 1, 8), codes.tobytes()))
    np.testing.assert_array_equal(loaded, table.reshape(-1)[codes])


@pytest.mark.parametrize("num_samples", [0, 1, 2, 1000])
def test_24_bits_are_at_the_top_of_32(num_samples: int) -> None:
    codes = samples("u1", num_samples * 2, 3)
    wide = np.zeros((num_samples * 2, 4), np.uint8)
    wide[:, 1:] = codes
    loaded = sm.load_wav(wav(wav_format(PCM, 2, 24), codes.tobytes()))
    np.testing.assert_array_equal(loaded, wide.view("<i4").reshape(-1, 2))


def test_fewer_bits_in_wider_samples() -> None:
    format = struct.pack("<HHIIHH", PCM, 1, RATE, RATE * 2, 2, 12)
    values = np.arange(10, dtype="<i2") << 4
    np.testing.assert_array_equal(sm.load_wav(wav(format, values.tobytes()))[:, 0], values)


@each("dtype, code", [("u1", 1), ("<i2", 1), ("<i4", 1), ("<f4", 3), ("<f8", 3)])
@each("kind", [bytes, bytearray])
def test_views_share_the_memory_and_its_mutability(dtype: str, code: int, kind: Any) -> None:
    bits = 8 * np.dtype(dtype).itemsize
    source = kind(wav(wav_format(code, 2, bits), samples(dtype).tobytes()))
    loaded = sm.load_wav(source, 0.01)
    assert np.shares_memory(loaded, np.frombuffer(source, np.uint8))
    assert loaded.flags.writeable is (kind is bytearray)


def with_room(code: int, num_channels: int, bits: int, block_align: int) -> bytes:
    """Make a file whose samples have more or fewer bytes than their bits need."""
    return struct.pack("<HHIIHH", code, num_channels, RATE, RATE * block_align, block_align, bits)


@pytest.mark.parametrize(
    ("bits", "size", "dtype"), [(20, 3, "<i4"), (24, 4, "<i4"), (20, 4, None), (25, 4, "<i4"), (7, 1, "u1")]
)  # fmt: skip
def test_room_for_more_bits(bits: int, size: int, dtype: str | None) -> None:
    data = wav(with_room(PCM, 2, bits, 2 * size), bytes(12 * size))
    if dtype is not None:
        assert sm.load_wav(data).dtype == dtype
        return
    with pytest.raises(sm.ArrayFormatError, match="8 bytes for 2 channels of 20 bits, which do"):
        sm.load_wav(data)


@each(
    "code, bits, block_align",
    [
        *(
            (FLOAT, 0, 4),
            (FLOAT, 16, 4),
            (FLOAT, 24, 4),
            (FLOAT, 32, 8),
            (A_LAW, 0, 1),
            (MU_LAW, 4, 1),
        ),
        *((PCM, 0, 1), (PCM, 0, 4), (PCM, 8, 2), (PCM, 16, 4), (PCM, 24, 8), (PCM, 32, 8)),
    ],
)
def test_room_that_contradicts_the_bits(code: int, bits: int, block_align: int) -> None:
    data = wav(with_room(code, 1, bits, block_align), bytes(16))
    match = f"says {block_align} bytes for 1 channel of {bits} bits, which do not fit"
    for function in (sm.load_wav, sm.parse_wav):
        with pytest.raises(sm.ArrayFormatError, match=match) as caught:
            function(data)
        assert caught.value.offset is not None


@pytest.mark.parametrize(
    ("codec", "code"), [("libmp3lame", 0x55), ("adpcm_ms", 2), ("adpcm_ima_wav", 0x11)]
)
def test_formats_in_packets_are_named(codec: str, code: int) -> None:
    data = make_audio(samples("i2", 4000), RATE, codec=codec, format="wav")
    header = sm.parse_wav(data)
    assert (header.sample_format, header.num_channels, header.sample_rate) == (code, 2, RATE)
    match = (
        f"holds {header.bits_per_sample} bits of format {code}; PCM .* load_audio reads what FFmpeg"
    )
    for window in ((), (0.1, 0.1), (1000,)):
        with pytest.raises(sm.ArrayFormatError, match=match):
            sm.load_wav(data, *window)


STEREO = wav(wav_format(PCM, 2, 16), samples("<i2", RATE).tobytes())


@each(
    "offset, duration, first, stop",
    [
        (None, None, 0, RATE),
        (0, None, 0, RATE),
        (0.1, None, 800, RATE),
        (0.3, 0.3, 2400, 4800),
        (0.7, 0.1, 5600, 6400),
        (0.7, 100, 5600, RATE),
        (None, 0.5, 0, 4000),
        (None, 1e-9, 0, 1),
        (0.5, 0, 4000, 4000),
        (1, None, RATE, RATE),
        (1.0, 1, RATE, RATE),
        (0.00001, 0.00001, 1, 1),
        ("0.25", Fraction(1, 4), 2000, 4000),
    ],
)
def test_windows(offset: Any, duration: Any, first: int, stop: int) -> None:
    loaded = sm.load_wav(STEREO, offset, duration)
    assert loaded.shape == (stop - first, 2)
    np.testing.assert_array_equal(loaded, sm.load_wav(STEREO)[first:stop])


@given(st.integers(0, RATE), st.integers(0, RATE))
def test_windows_begin_at_the_sample_that_a_float_means(first: int, count: int) -> None:
    loaded = sm.load_wav(STEREO, time_offset_seconds=first / RATE)
    assert len(loaded) == RATE - first
    window = sm.load_wav(STEREO, 0, count / RATE)
    assert len(window) == count


@given(st.floats(0, 1), st.floats(0, 1))
def test_windows_that_touch_lose_nothing(one: float, two: float) -> None:
    middle, end = sorted((one, two))
    parts = [
        sm.load_wav(STEREO, 0, middle),
        sm.load_wav(STEREO, middle, Fraction(str(end)) - Fraction(str(middle))),
        sm.load_wav(STEREO, end),
    ]
    np.testing.assert_array_equal(np.concatenate(parts), sm.load_wav(STEREO))


@pytest.mark.parametrize(
    ("rate", "count"),
    [(8000, 1024), (11025, 512), (22050, 1024), (44100, 1024), (44100, 441), (48000, 1000)],
)
def test_windows_computed_in_floats_share_no_sample(rate: int, count: int) -> None:
    original = np.arange(300 * count, dtype="<i4").reshape(-1, 1)
    data = wav(wav_format(PCM, 1, 32, rate=rate), original.tobytes())
    duration, added = count / rate, 0.0
    for index in range(300):
        window = original[index * count : (index + 1) * count]
        np.testing.assert_array_equal(sm.load_wav(data, index * count / rate, duration), window)
        np.testing.assert_array_equal(sm.load_wav(data, added, duration), window)
        added += duration


@each(
    "offset, duration, match",
    [
        (-0.1, None, "time_offset_seconds must be 0 or more, not -0.1"),
        (float("-inf"), None, "time_offset_seconds must be finite, not -inf"),
        (1.001, None, "time_offset_seconds=1.001 is past the end, at 1 s"),
        (0, -1, "duration_seconds must be 0 or more, not -1"),
        (float("nan"), None, "time_offset_seconds must be a number of seconds, not nan"),
        (0, float("nan"), "duration_seconds must be a number of seconds, not nan"),
        (float("inf"), None, "time_offset_seconds must be finite, not inf"),
        (0, float("-inf"), "duration_seconds must be finite, not -inf"),
    ],
)
def test_invalid_windows(offset: Any, duration: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match) as caught:
        sm.load_wav(STEREO, offset, duration)
    assert not isinstance(caught.value, sm.MediaError)


@pytest.mark.parametrize("value", [True, 1j, b"1", [1], (0, 1)])
def test_times_that_are_no_numbers(value: Any) -> None:
    with pytest.raises(
        TypeError, match="time_offset_seconds must be a number of seconds or a numeric string, not"
    ):
        sm.load_wav(STEREO, value)
    with pytest.raises(
        TypeError, match="duration_seconds must be a number of seconds or a numeric string, not"
    ):
        sm.load_wav(STEREO, None, value)


@pytest.mark.parametrize("value", ["x.wav", None, io.BytesIO(STEREO)])
def test_what_is_not_memory(value: Any) -> None:
    for function in (sm.load_wav, sm.parse_wav):
        with pytest.raises(TypeError, match="a WAV file is read from bytes"):
            function(value)


def test_parse_wav_says_what_stands_there() -> None:
    header = sm.parse_wav(STEREO)
    assert header == sm.WAVHeader(1, 2, RATE, RATE * 4, 4, 16, RATE * 4, 44, 1)
    assert header.num_samples == RATE
    assert sm.parse_wav(STEREO[:44]) == header
    header = sm.parse_wav(wav(wav_format(EXTENSIBLE, 2, 32, sub_code=FLOAT), bytes(8)))
    assert (header.audio_format, header.sample_format) == (EXTENSIBLE, FLOAT)


def test_chunks_in_between_may_be_odd() -> None:
    data = wav(
        wav_format(PCM, 1, 8),
        bytes(range(7)),
        before=chunk(b"LIST", b"odd") + chunk(b"JUNK", b""),
        after=chunk(b"LIST", b"behind"),
    )
    np.testing.assert_array_equal(sm.load_wav(data)[:, 0], np.arange(7))


@pytest.mark.parametrize("kind", [b"RF64", b"BW64"])
def test_rf64(kind: bytes) -> None:
    sizes = chunk(b"ds64", struct.pack("<QQQI", 0, 20, 10, 0))
    data = wav(wav_format(PCM, 1, 16), bytes(20), kind=kind, before=sizes, size=0xFFFFFFFF)
    data += chunk(b"LIST", b"behind")
    assert sm.load_wav(data).shape == (10, 1)
    assert sm.parse_wav(data).data_size == 20
    short = data[: data.index(b"data") + 8 + 19]
    with pytest.raises(sm.ArrayFormatError, match="1 of 20 bytes of samples are missing"):
        sm.load_wav(short)


def test_rf64_of_ffmpeg() -> None:
    original = samples("i2")
    from spdl_media.testing import AudioTrack, make_media

    data = make_media(
        [AudioTrack(samples=original, sample_rate=RATE, codec="pcm_s16le")],
        format="wav",
        options={"rf64": "always"},
    )
    assert data.startswith(b"RF64")
    np.testing.assert_array_equal(sm.load_wav(data), original)


def test_a_size_that_was_not_known_means_all_there_is() -> None:
    data = wav(wav_format(PCM, 2, 16), bytes(21), size=0xFFFFFFFF)
    assert sm.parse_wav(data).data_size == 20
    assert sm.load_wav(data).shape == (5, 2)


def unfinished(riff_size: int, *, kind: bytes = b"RIFF", before: bytes = b"") -> bytes:
    """Make a file whose writer could not go back to fill in the sizes in the header."""
    body = before + chunk(b"fmt ", wav_format(PCM, 2, 16))
    size = 0 if kind == b"RIFF" else 0xFFFFFFFF
    return (
        kind + struct.pack("<I", riff_size) + b"WAVE" + body + chunk(b"data", bytes(20), size=size)
    )


@pytest.mark.parametrize(
    "data",
    [
        unfinished(0),
        unfinished(36),
        unfinished(0xFFFFFFFF),
        unfinished(0xFFFFFFFF, kind=b"RF64", before=chunk(b"ds64", bytes(28))),
        unfinished(0xFFFFFFFF, kind=b"RF64", before=chunk(b"ds64", b"\xff" * 16 + bytes(12))),
    ],
)
def test_a_header_that_was_never_finished_means_all_there_is(data: bytes) -> None:
    assert sm.parse_wav(data).data_size == 20
    assert sm.load_wav(data).shape == (5, 2)


@pytest.mark.parametrize("stand_in", [0x7FFFF000, 0x7FFFFFFF, 0x80000000])
@pytest.mark.parametrize("num_channels", [1, 2, 3, 5])
def test_what_is_written_into_a_pipe_means_all_there_is(stand_in: int, num_channels: int) -> None:
    """SoX writes 0x7ffff000 rounded down to whole samples, arecord 0x80000000 into the last file."""
    wavfile = pytest.importorskip("scipy.io.wavfile")
    original = samples("i2", 120, num_channels)
    size = stand_in - stand_in % original[0].nbytes
    data = bytearray(wav(wav_format(PCM, num_channels, 16), original.tobytes(), size=size))
    data[4:8] = struct.pack("<I", size + 36)
    with pytest.warns(wavfile.WavFileWarning, match="Reached EOF prematurely"):
        _, expected = wavfile.read(io.BytesIO(data))
    loaded = sm.load_wav(bytes(data))
    np.testing.assert_array_equal(loaded, expected.reshape(-1, num_channels))
    np.testing.assert_array_equal(loaded, original)
    assert sm.parse_wav(bytes(data)).data_size == original.nbytes


@pytest.mark.parametrize("size", [0x7FFFF000 - 4, 0x7FFFF004, 0x7FFFFFF8, 0x80000004])
def test_other_large_sizes_are_sizes(size: int) -> None:
    data = wav(wav_format(PCM, 2, 16), bytes(8), size=size)
    with pytest.raises(sm.ArrayFormatError, match=f"{size - 8} of {size} bytes of samples are"):
        sm.load_wav(data)


@pytest.mark.parametrize("behind", [b"", chunk(b"LIST", b"behind")])
def test_no_samples_are_no_unfinished_header(behind: bytes) -> None:
    assert sm.load_wav(wav(wav_format(PCM, 2, 16), b"", after=behind)).shape == (0, 2)
    sizes = chunk(b"ds64", struct.pack("<QQQI", 80 + len(behind), 0, 0, 0))
    data = wav(
        wav_format(PCM, 2, 16), b"", after=behind, before=sizes, kind=b"RF64", size=2**32 - 1
    )
    assert sm.load_wav(data).shape == (0, 2)


def test_long_sizes_are_those_of_rf64_alone() -> None:
    sizes = chunk(b"ds64", struct.pack("<QQQI", 0, 8, 2, 0))
    data = wav(wav_format(PCM, 2, 16), bytes(20), before=sizes, size=0xFFFFFFFF)
    assert sm.load_wav(data).shape == (5, 2)


def test_every_cut_is_noticed() -> None:
    sizes = chunk(b"ds64", struct.pack("<QQQI", 0, 60, 10, 0))
    format = wav_format(EXTENSIBLE, 2, 24, sub_code=PCM)
    data = wav(
        format, bytes(60), kind=b"RF64", before=sizes + chunk(b"LIST", b"odd"), size=0xFFFFFFFF
    )
    assert sm.load_wav(data).shape == (10, 2)
    for size in range(len(data)):
        with pytest.raises(
            sm.ArrayFormatError, match=r"is not a WAV file|is cut short|has 0 bytes"
        ):
            sm.load_wav(data[:size])


def extensible(guid_end: bytes) -> bytes:
    return wav_format(EXTENSIBLE, 1, 16, sub_code=1).replace(GUID_END, guid_end)


@each("data, match", [
        (b"", "is not a WAV file: it begins with b''"),
        (b"RIFF", "is not a WAV file"),
        (b"RIFF\0\0\0\0AVI " + bytes(100), "is not a WAV file"),
        (b"RIFX\0\0\0\0WAVE" + bytes(100), "is not a WAV file: it begins with b.RIFX"),
        (STEREO[:12], "there is no chunk 'data'"),
        (STEREO[:43], "there is no chunk 'data'"),
        (STEREO[:45], "31999 of 32000 bytes of samples are missing"),
        (STEREO[:-1], "is cut short: 1 of 32000 bytes of samples are missing"),
        (wav(wav_format(PCM, 2, 16), bytes(9)), "has 9 bytes of samples, not a multiple of 4"),
        (wav(wav_format(PCM, 2, 16), bytes(8), size=2**32 - 4), "bytes of samples are missing"),
        (wav(wav_format(PCM, 2, 16)[:-1], bytes(8)), "'fmt ' of 15 bytes is cut short"),
        (wav(wav_format(PCM, 0, 16), b""), "has 0 channels, 8000 Hz"),
        (wav(wav_format(PCM, 1, 16, rate=0), b""), "has 1 channel, 0 Hz"),
        (wav(wav_format(PCM, 1, 0), b""), "0 bytes a sample"),
        (wav(struct.pack("<HHIIHH", 1, 2, 8000, 0, 3, 8), b""), "says 3 bytes for 2 channels of 8 bits"),
        (wav(struct.pack("<HHIIHH", 1, 2, 8000, 0, 4, 17), b""), "channels of 17 bits"),
        (wav(wav_format(2, 1, 8), b""), "holds 8 bits of format 2; PCM"),
        (wav(wav_format(PCM, 1, 40), b""), "holds 40 bits of format 1"),
        (wav(wav_format(FLOAT, 1, 16), b""), "holds 16 bits of format 3"),
        (wav(extensible(bytes(14)), b""), "extensible format is none of the known ones"),
        (wav(wav_format(EXTENSIBLE, 1, 16), b""), "its chunk has only 16 bytes"),
        (b"RIFF\0\0\0\0WAVE" + chunk(b"data", b"") + chunk(b"fmt ", wav_format(1, 1, 8)),
         "has samples before the chunk 'fmt '"),
        (wav(wav_format(1, 1, 8), b"", kind=b"RF64", before=chunk(b"ds64", bytes(8))),
         "'ds64' has 8 bytes, less than 28"),
        (wav(wav_format(1, 1, 8), b"", kind=b"RF64", size=0xFFFFFFFF,
             before=chunk(b"ds64", bytes(8) + b"\xfe" * 20)), "of 18374403900871474942 bytes of samples"),
    ])  # fmt: skip
def test_invalid_files(data: bytes, match: str) -> None:
    with pytest.raises(sm.ArrayFormatError, match=match) as caught:
        sm.load_wav(data)
    assert caught.value.source == f"bytes of length {len(data)}"
    assert caught.value.offset is not None
