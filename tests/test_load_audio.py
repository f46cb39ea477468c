"""``load_audio`` decodes while it reads, with the same results and errors as reading everything first."""

from __future__ import annotations

import io
import math
import pickle
import struct
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby, product
from typing import Any
from unittest import mock

import av
import numpy as np
import pytest
from audio_oracle import clip, samples_of, sound
from av.stream import Disposition
from effort import each

import spdl_media as sm
from spdl_media import filters
from spdl_media.testing import AudioTrack, index_samples, make_audio, make_media

FILES = [
    ("flac", "flac"),
    ("flac", "matroska"),
    ("libmp3lame", "mp3"),
    ("aac", "mp4"),
    ("libopus", "ogg"),
    ("pcm_s16le", "avi"),
]
WINDOWS: list[Any] = [None, (1.01, 1.9), (2, None), (100, 101)]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"sample_fmt": "s16"},
    {"sample_fmt": "dbl"},
    {"sample_rate": 16000, "num_channels": 1},
    {"num_samples": 1000},
    {"num_samples": 1000, "sample_rate": 8000},
    {"filter_desc": None},
    {"filter_desc": "volume=0.5"},
    {"decode_config": sm.decode_config(on_corrupt="drop")},
]


class _Stream(io.BytesIO):
    def seekable(self) -> bool:
        return False


def outcome(load: Any) -> Any:
    """Return the array, or class and text of the error."""
    try:
        return load()
    except sm.MediaError as error:
        return type(error), str(error)


def by_steps(data: Any, window: Any, options: dict[str, Any]) -> Any:
    """Load audio in steps, reading all packets first."""
    options = dict(options)
    steps = {name: options.pop(name, None) for name in ("num_samples", "decode_config")}
    own = {"filter_desc": options["filter_desc"]} if "filter_desc" in options else None
    desc = own["filter_desc"] if own else sm.get_audio_filter_desc(**options)
    packets = sm.demux_audio(data, timestamp=window, name="sound")
    frames = sm.decode_packets(packets, desc, **steps)
    return sm.convert_frames(frames).array


def check(data: bytes, window: Any, options: dict[str, Any]) -> None:
    # FFmpeg does not remove the padding of an MP3 that cannot seek.
    for make in (lambda: data, lambda: _Stream(data)):
        wanted = outcome(lambda make=make: by_steps(make(), window, options))
        found = outcome(
            lambda make=make: sm.load_audio(make(), window, name="sound", **options).array
        )
        if isinstance(wanted, tuple):
            assert found == wanted
        else:
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(("codec", "format"), FILES)
def test_arrays_are_those_of_packets(codec: str, format: str) -> None:
    data = clip(codec, format, seconds=3)
    for window in WINDOWS:
        check(data, window, {})
    for options in OPTIONS[1:]:
        check(data, (1.01, 1.9), options)
    check(data, None, OPTIONS[3])


@pytest.mark.parametrize(("codec", "format"), FILES)
def test_damage_is_told_as_by_packets(codec: str, format: str) -> None:
    data = clip(codec, format, seconds=3)
    damaged = bytearray(data)
    for k in range(len(data) // 2, len(data) // 2 + 60):
        damaged[k] ^= 0x5A
    for content in (bytes(damaged), data[: len(data) * 2 // 3], bytes(damaged)[: -len(data) // 5]):
        for options in ({}, {"num_samples": 1000}, OPTIONS[-1]):
            check(content, None, options)


def test_a_change_of_format_is_reported_as_by_packets() -> None:
    rng = np.random.default_rng(5)
    parts = [
        make_audio(
            rng.integers(-9000, 9000, (rate, channels), np.int16),
            rate,
            format="mp3",
            codec="libmp3lame",
        )
        for channels, rate in ((1, 44100), (2, 48000))
    ]
    for options in ({}, {"sample_rate": 16000, "num_channels": 1}):
        check(b"".join(parts), None, options)


def test_many_blocks_and_none_to_spare() -> None:
    rng = np.random.default_rng(6)
    samples = rng.integers(-30000, 30000, (100_001, 2), np.int16)
    data = make_audio(samples, 44100, format="flac", codec="flac")
    array = sm.load_audio(data).array
    np.testing.assert_array_equal(array, samples.T.astype(np.float32) / 32768)
    assert array.flags.c_contiguous


@pytest.mark.parametrize("head", [b"fLaC", b"OggS", b"\0\0\0\x20ftypisom", b"\x1aE\xdf\xa3"])
def test_a_signature_alone_is_no_media(head: bytes) -> None:
    with pytest.raises(sm.DemuxError):
        sm.load_audio(head + bytes(5000))


def test_an_mp3_behind_a_tag_is_found() -> None:
    data = clip("libmp3lame", "mp3", seconds=1)
    assert data[:3] == b"ID3"
    size = 10 + sum((data[6 + k] & 127) << 7 * (3 - k) for k in range(4))
    bare = data[size:]
    padded = b"ID3\4\0\0" + bytes([0, 1, 0, 0]) + bytes(1 << 14) + bare
    arrays = [sm.load_audio(each).array for each in (data, bare, padded)]
    assert {sm.probe(each).format for each in (data, bare, padded)} == {"mp3"}
    np.testing.assert_array_equal(arrays[0], arrays[1])
    np.testing.assert_array_equal(arrays[0], arrays[2])


@pytest.mark.parametrize("channels", [8, 9, 16, 24])
@pytest.mark.parametrize("format", ["WAV", "AU"])
def test_many_channels(format: str, channels: int, rng: np.random.Generator) -> None:
    """PyAV lists one plane too many for 8 channels, and for more it reads beyond FFmpeg's array."""
    soundfile = pytest.importorskip("soundfile")
    file = io.BytesIO()
    written = rng.integers(-(2**15), 2**15, (4410, channels), np.int16)
    soundfile.write(file, written, 44100, format=format)
    wanted = written.T / np.float32(32768)
    np.testing.assert_array_equal(sm.load_audio(file.getvalue()).array, wanted)
    frames = sm.decode_packets(sm.demux_audio(file.getvalue()))  # fltp: a plane for each channel
    assert {len(chunk.planes) for chunk in frames.chunks} == {channels}
    np.testing.assert_array_equal(sm.convert_frames(frames).array, wanted)
    np.testing.assert_array_equal(sm.convert_frames(frames[100:5000]).array, wanted[:, 100:])
    for options in ({}, {"num_channels": channels}):
        loaded = sm.load_audio(file.getvalue(), (0.01, 0.05), sample_rate=22050, **options)
        assert loaded.shape == (channels, 882)


@pytest.mark.parametrize("num_channels", [None, 9])
def test_named_channels_whose_number_has_no_default_layout(num_channels: int | None) -> None:
    speakers, pcm = 0x1FF, bytes.fromhex("0100000000001000800000aa00389b71")
    numbers = 0xFFFE, 9, 8000, 144000, 18, 16, 22, 16, speakers, pcm
    written = np.arange(-18, 18, dtype=np.int16).reshape(4, 9) * 1000
    head = struct.pack("<4sI4s4sI", b"RIFF", 60 + written.nbytes, b"WAVE", b"fmt ", 40)
    head += struct.pack("<HHIIHHHHI16s", *numbers) + struct.pack("<4sI", b"data", written.nbytes)
    data = head + written.tobytes()
    wanted = written.T / np.float32(32768)
    np.testing.assert_array_equal(sm.load_audio(data, num_channels=num_channels).array, wanted)


@pytest.mark.parametrize(
    "tail", [b"\0", b"\n", bytes(1000), b"LYRICSBEGININD0000200000029LYRICS200", b"no frame" * 40]
)
def test_what_stands_behind_the_last_frame_of_an_mp3_is_no_damage(tail: bytes) -> None:
    data = make_audio(index_samples(44100, 2), 44100, codec="libmp3lame", format="mp3")
    whole = sm.load_audio(data).array
    np.testing.assert_array_equal(sm.load_audio(data + tail).array, whole)
    frames = sm.decode_packets(sm.demux_audio(data + tail))
    assert len(frames) == whole.shape[1]


def test_what_stands_between_frames_of_an_mp3_is_damage() -> None:
    data = make_audio(index_samples(44100, 2), 44100, codec="libmp3lame", format="mp3")
    broken = data[: len(data) // 2] + b"no frame" * 400 + data[len(data) // 2 :]
    with pytest.raises(sm.DecodeError, match="damaged mp3 data at"):
        sm.load_audio(broken)
    config = sm.decode_config(on_corrupt="drop")
    assert sm.load_audio(broken, decode_config=config).shape[0] == 2


def test_alac_in_caf_keeps_the_end_of_a_short_last_packet() -> None:
    samples = index_samples(4096 + 2624)
    data = make_audio(samples, 16000, codec="alac", format="caf")
    np.testing.assert_array_equal(sm.load_audio(data, sample_fmt="s16").array, samples)
    frames = sm.decode_packets(sm.demux_audio(data, timestamp=(0.25, None)), filter_desc=None)
    assert sum(len(chunk) for chunk in frames.chunks) == 4096 + 2624 - 4000
    broken = io.BytesIO()
    with av.open(io.BytesIO(data)) as file, av.open(broken, "w", format="caf") as sink:
        stream = sink.add_stream_from_template(file.streams.audio[0])
        *complete, last = (packet for packet in file.demux(audio=0) if packet.size)
        short = av.Packet(bytes(last)[:2])
        short.pts, short.dts, short.duration, short.time_base = (
            last.pts,
            last.dts,
            last.duration,
            last.time_base,
        )
        for packet in (*complete, short):
            packet.stream = stream
            sink.mux(packet)
    with pytest.raises(sm.DecodeError, match="damaged alac data"):
        sm.load_audio(broken.getvalue())


@pytest.mark.parametrize(
    ("codec", "format", "rate"),
    [("vorbis", "ogg", 44100), ("libopus", "ogg", 48000), ("aac", "mp4", 44100), ("aac", "mp4", 22050),
     ("alac", "mp4", 44100), ("flac", "ogg", 44100), ("libmp3lame", "mp4", 44100)],
)  # fmt: skip
@each("timestamp", [None, (0.5, 1.25), (1.0, 9.0)])
@each("options", [{}, {"filter_desc": None}, {"filter_desc": "volume=0.5"}])
def test_loading_without_packets_changes_no_sample(
    codec: str, format: str, rate: int, timestamp: Any, options: Any
) -> None:
    data = clip(codec, format, rate, 2, (("aac_pns", "0"),) if codec == "aac" else ())
    packets = sm.demux_audio(data, timestamp=timestamp)
    wanted = sm.convert_frames(sm.decode_packets(packets, **options))
    found = sm.load_audio(data, timestamp, **options)
    np.testing.assert_array_equal(found.array, wanted.array)


@pytest.mark.parametrize("timestamp", [None, (0.5, 1.25)])
def test_opus_in_mp4_has_its_own_rate_whatever_the_header_states(timestamp: Any) -> None:
    data = clip("libopus", "mp4", 48000, 2)
    place = data.index(b"Opus") + 28  # in the entry of the stream
    assert data[place : place + 4] == (48000 << 16).to_bytes(4, "big")
    of_source = (16000 << 16).to_bytes(4, "big")
    data = data[:place] + of_source + data[place + 4 :]
    wanted = sm.convert_frames(sm.decode_packets(sm.demux_audio(data, timestamp=timestamp)))
    np.testing.assert_array_equal(sm.load_audio(data, timestamp).array, wanted.array)


def test_opus_in_mp4_loads_the_same_again_where_only_the_decoder_knows_of_the_delay() -> None:
    data = clip("libopus", "mp4", 48000, 1).replace(b"edts", b"free")
    first, second = (sm.load_audio(data).array for _ in range(2))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("timestamp", [None, (0.5, 1.25)])
def test_aac_whose_header_does_not_deny_a_doubled_rate(timestamp: Any) -> None:
    data = clip("aac", "mp4", 22050, 2, (("aac_pns", "0"),))
    assert data.count(b"\x56\xe5\x00") == 1  # says that it does not
    data = data.replace(b"\x56\xe5\x00", b"\x00\x00\x00")
    wanted = sm.convert_frames(sm.decode_packets(sm.demux_audio(data, timestamp=timestamp)))
    np.testing.assert_array_equal(sm.load_audio(data, timestamp).array, wanted.array)


def two_streams(dispositions: tuple[Disposition, Disposition]) -> bytes:
    """Make an MP4 with two AAC streams, of which the second has a higher bit rate."""
    sources = [av.open(io.BytesIO(clip("aac", "mp4", rate, 1))) for rate in (32000, 48000)]
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as muxer:
        streams = [muxer.add_stream_from_template(one.streams[0]) for one in sources]
        for stream, disposition in zip(streams, dispositions, strict=True):
            stream.disposition = disposition
        for source, stream in zip(sources, streams, strict=True):
            for packet in source.demux():
                if packet.size:
                    packet.stream = stream
                    muxer.mux(packet)
    return out.getvalue()


def test_the_audio_is_that_of_the_stream_that_ffmpeg_finds_best() -> None:
    usual, deaf = Disposition.default, Disposition.hearing_impaired
    none = Disposition(0)
    pairs = (usual, none), (none, usual), (usual, deaf), (usual | deaf, usual), (usual | deaf, none)
    wrong = []
    for pair in (*pairs, (usual, usual)):
        data = two_streams(pair)
        best = av.open(io.BytesIO(data)).streams.best("audio")
        wanted = sm.load_audio(data, stream_index=getattr(best, "index", None)).array
        if not np.array_equal(sm.load_audio(data).array, wanted):
            wrong.append(pair)
    assert not wrong


def test_audio_that_ffmpeg_cannot_decode_is_not_the_best() -> None:
    data = two_streams((Disposition.default, Disposition(0)))
    first = data.index(b"mp4a", data.index(b"stsd"))
    data = data[:first] + b"apac" + data[first + 4 :].replace(b"esds", b"free", 1)
    assert sm.probe(data).best_audio == 1
    with sm.Demuxer(data) as demuxer:
        assert demuxer.audio_stream_index == 1
    wanted = sm.load_audio(data, stream_index=1).array
    np.testing.assert_array_equal(sm.load_audio(data).array, wanted)
    with pytest.raises(sm.DemuxError, match="no decoder for audio stream 0"):
        sm.load_audio(data, stream_index=0)


@pytest.mark.parametrize(
    ("codec", "format"), [("vorbis", "ogg"), ("libopus", "ogg"), ("aac", "mp4")]
)
def test_windows_behind_the_end_have_the_dtype_of_the_decoder(codec: str, format: str) -> None:
    data = clip(codec, format, 48000, 1)
    empty = {"num_samples": 10, "on_short": "zeros", "filter_desc": None}
    found = sm.load_audio(data, (5, 6), **empty).array
    assert found.dtype == np.float32
    assert not found.any()


@pytest.mark.parametrize("codec", ["vorbis", "libopus"])
def test_a_decoder_that_is_used_again_is_as_fresh(codec: str, rng: np.random.Generator) -> None:
    # With one encoder, so that both files have the same headers.
    noise = rng.integers(-9000, 9000, (2, 96000, 2)).astype("i2")
    files = [make_audio(sound, 48000, codec=codec, format="ogg") for sound in noise]
    for _ in range(20):
        file, start = files[rng.integers(2)], float(rng.uniform(0, 1.5))
        again = sm.load_audio(file, (start, start + 0.25)).array
        with ThreadPoolExecutor(1) as pool:  # a thread has its own
            fresh = pool.submit(sm.load_audio, file, (start, start + 0.25)).result().array
        np.testing.assert_array_equal(again, fresh)


def test_opus_without_a_stated_delay_has_one_length() -> None:
    """The decoder skips the delay that the header of Opus states, once. IAMF files are of this kind."""
    data = bytearray(clip("libopus", "matroska", 48000, 1))
    # See: RFC 9559, 5.1.4.1.28 (CodecDelay).
    size = data.index(b"\x56\xaa") + 2
    data[size + 1 : size + 1 + (data[size] & 0x7F)] = bytes(data[size] & 0x7F)
    assert sm.demux_audio(data).codec.delay == 0
    assert len({sm.load_audio(data).array.shape for _ in range(2)}) == 1


def test_samples_beyond_the_range_of_floats_become_infinite() -> None:
    samples = np.array([[0.5], [0.25]], np.float32)
    data = make_audio(samples, 48000, codec="pcm_f64le")
    data = data.replace(struct.pack("<d", 0.25), struct.pack("<d", 1e39))
    assert sm.load_audio(data).array.tolist() == [[0.5, np.inf]]


def test_audio_shorter_than_the_filter_of_the_resampler_is_resampled(
    rng: np.random.Generator,
) -> None:
    for num_samples, rate, out in product((1, 2, 20, 99), (8000, 48000), (8000, 16000, 44100)):
        samples = rng.integers(7960, 8041, (num_samples, 2)).astype(np.int16)
        wav, track = io.BytesIO(), AudioTrack(samples=samples, sample_rate=rate, codec="flac")
        sm.save_audio(wav, samples.T, rate, format="wav")
        coded = make_media([track], format="matroska")
        desc = sm.get_audio_filter_desc(sample_rate=out, sample_fmt="s16")
        frames = sm.decode_packets(sm.demux_audio(coded), desc)
        wanted = sm.convert_frames(frames).array
        assert wanted.shape == (math.ceil(num_samples * out / rate), 2), (num_samples, rate, out)
        assert np.abs(wanted.astype(int) - 8000).max() < 80, (num_samples, rate, out)
        for source in (wav.getvalue(), coded):
            array = sm.load_audio(source, sample_rate=out, sample_fmt="s16").array
            np.testing.assert_array_equal(array, wanted, f"{num_samples}, {rate} to {out}")


def test_a_result_states_its_sample_rate() -> None:
    """Without it, samples of a file of unknown rate could not be saved or resampled."""
    samples = index_samples(4000, 1)
    wav, flac = (
        make_audio(samples, 8000, **kind) for kind in ({}, {"codec": "flac", "format": "flac"})
    )
    frames = sm.decode_packets(sm.demux_audio(flac))
    loads = [
        sm.load_audio(wav),
        sm.load_audio(flac),
        sm.load_audio(flac, num_samples=9, on_short="zeros"),
    ]
    results = [*loads, sm.convert_frames(frames), sm.convert_frames([frames, frames])]
    assert [result.sample_rate for result in results] == [8000] * 5
    assert sm.load_audio(flac, sample_rate=16000).sample_rate == 16000
    assert pickle.loads(pickle.dumps(loads[0])).sample_rate == 8000
    assert sm.load_image(sm.encode_image(np.zeros((8, 8, 3), np.uint8))).sample_rate is None


def test_audio_of_several_sample_rates_is_resampled_in_order() -> None:
    """A part that is shorter than the filter of the resampler does not come after the next one."""
    parts = [
        make_audio(sound(5000, rate), rate, codec="aac", format="adts") for rate in (48000, 16000)
    ]
    data = b"".join((*parts, parts[0]))
    length = sm.load_audio(parts[0]).array.shape[1]
    for left in (1, 99, 100, 1000):
        packets = sm.demux_audio(data, timestamp=((length - left) / 48000, None))
        chunks = sm.decode_packets(packets, None).chunks
        wanted = []
        for rate, group in groupby(chunks, lambda chunk: chunk.frame.sample_rate):
            samples = np.concatenate([np.stack(one.planes, axis=1) for one in group])
            wav = make_audio(samples, rate, codec="pcm_f32le", format="wav")
            wanted.append(sm.load_audio(wav, sample_rate=16000).array)
        desc = sm.get_audio_filter_desc(sample_rate=16000)
        found = samples_of(sm.decode_packets(packets, desc))
        np.testing.assert_array_equal(found, np.concatenate(wanted, axis=1), f"{left} samples")


def test_a_graph_that_mixes_serves_other_files() -> None:
    desc = sm.get_audio_filter_desc(num_channels=1, sample_fmt="s16")
    for number in range(3):
        samples = index_samples(40000 + number, 2)[::-1] if number % 2 else index_samples(40000, 2)
        data = make_audio(samples, 44100, codec="flac", format="flac")
        wanted = sm.convert_frames(sm.decode_packets(sm.demux_audio(data), desc)).array
        with mock.patch.object(filters, "build", wraps=filters.build) as build:
            found = sm.load_audio(data, num_channels=1, sample_fmt="s16").array
        assert not (number and build.called)
        np.testing.assert_array_equal(found, wanted)
