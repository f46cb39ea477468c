"""Windows of audio contain exactly their samples, at any seek position."""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import av
import effort
import numpy as np
import pytest
from audio_oracle import assert_same, clip, expected, linear, samples_of, sound
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ogg_frames import pages, sealed

import spdl_media as sm
from spdl_media.testing import AudioTrack, VideoTrack, index_frames, make_audio, make_media

PCM = "alaw f32le f64le mulaw s16le s24le s32le u8".split()
QUIET_AAC = (("aac_pns", "0"),)  # without it, the decoder adds random noise

# codec, format, sample rate, encoder options, muxer options
EXACT: list[tuple[Any, ...]] = [
    *((f"pcm_{kind}", "wav", 44100) for kind in PCM),
    *((codec, format, rate) for codec, format in [
        ("flac", "flac"), ("flac", "mp4"), ("flac", "matroska"), ("flac", "ogg"),
        ("libmp3lame", "mp3"), ("libmp3lame", "mp4"), ("libmp3lame", "matroska"),
        ("libmp3lame", "mpegts"), ("libmp3lame", "avi"), ("vorbis", "ogg"), ("vorbis", "webm"),
        ("alac", "mp4"), ("wavpack", "wv"), ("tta", "tta"),
        ("pcm_s16le", "matroska"), ("pcm_s16le", "avi"), ("pcm_s16be", "mov"), ("pcm_s16be", "aiff"),
    ] for rate in (48000, 44100)),
    *(("aac", format, rate, QUIET_AAC) for format in ("mp4", "adts", "mpegts", "matroska", "mov")
      for rate in (48000, 44100)),
    *(("libopus", format, 48000) for format in ("ogg", "webm", "mp4", "mpegts")),
    ("libopus", "webm", 48000, (("frame_duration", "2.5"),)),
    ("libmp3lame", "mp3", 44100, (("global_quality", "236"), ("flags", "+qscale"))),
    ("libmp3lame", "mp3", 44100, (), (("write_xing", "0"),)),
    ("adpcm_ms", "wav", 44100), ("adpcm_ima_wav", "wav", 48000), ("adpcm_ima_qt", "aiff", 44100),
    ("adpcm_ima_qt", "mov", 44100),
]  # fmt: skip
# A millisecond has no whole number of samples at 44.1 kHz, so of two rates this one is harder.
USUAL = [case for case in EXACT if case[2] == 44100 or case[0] in ("libopus", "adpcm_ima_wav")]


def _make(
    codec: str, format: str, rate: int, options: Any = (), muxing: Any = (), *, seconds: int = 2
) -> bytes:
    return clip(codec, format, rate, seconds, options, muxing)


def _name(case: tuple[Any, ...]) -> str:
    return "-".join(str(part) for part in case if part != ())


def _decode(data: Any, window: Any) -> sm.AudioFrames:
    return sm.decode_packets(sm.demux_audio(data, timestamp=window), filter_desc=None)


def _check(data: bytes, start: Fraction, length: Fraction, rate: int) -> None:
    packets = sm.demux_audio(data, timestamp=(start, start + length))
    frames = sm.decode_packets(packets, filter_desc=None)
    wanted = expected(linear(data), packets.window, rate)
    assert len(frames) == wanted.shape[1]
    if len(frames):
        assert frames.first_sample == packets.window.samples(rate)[0]
        assert frames.timestamps[0] == frames.first_sample / rate
        assert_same(samples_of(frames), wanted, packets.codec)


@pytest.mark.parametrize("case", EXACT if effort.LONG else USUAL, ids=_name)
def test_windows_equal_the_linear_decode(case: tuple[Any, ...], rng: np.random.Generator) -> None:
    data, rate = _make(*case), case[2]
    end = Fraction(linear(data).shape[1], rate)
    sample = Fraction(1, rate)
    windows = [
        (Fraction(0), end),
        (Fraction(0), sample),
        (Fraction(3, 10), Fraction(1, 2)),  # before half a second: read from the start
        (Fraction(3, 20), Fraction(3, 100)),  # where a seek may land behind the first packet
        (end - sample, sample),
        (end - Fraction(1, 3), Fraction(1)),
        (end, Fraction(1)),
        (end + 1, Fraction(1)),
    ]
    for _ in range(8 if effort.LONG else 2):
        start = Fraction(int(rng.integers(0, end * 10000)), 10000)
        length = rng.choice([sample / 2, sample, Fraction(1, 100), Fraction(1, 4), Fraction(2)])
        windows.append((start, length))
    for start, length in windows:
        _check(data, start, length, rate)


@pytest.mark.parametrize(
    "case",
    [("flac", "mp4", 44100), ("libopus", "webm", 48000), ("libmp3lame", "mp3", 44100)],
    ids=_name,
)
@settings(max_examples=examples(40))
@given(data=st.data())
def test_any_window(case: tuple[Any, ...], data: st.DataObject) -> None:
    rate, file = case[2], _make(*case)
    start = data.draw(st.fractions(-1, 5, max_denominator=10**6))
    length = data.draw(st.fractions(Fraction(1, 2 * rate), 1, max_denominator=10**6))
    _check(file, start, length, rate)


@pytest.mark.parametrize("duration", ["20", "60"])
def test_windows_of_opus_for_speech_are_within_a_step_of_16_bits(duration: str) -> None:
    # Its predictors carry differences of one bit for many seconds, and larger ones for a third of a second.
    options = (("b", "16000"), ("application", "voip"), ("frame_duration", duration))
    data = _make("libopus", "webm", 48000, options, seconds=4)
    for start in np.arange(1, 3.5, 0.0917):
        packets = sm.demux_audio(data, timestamp=(start, start + 0.3))
        assert len(packets) <= (0.3 + 0.5) * 1000 / int(duration) + 4
        _check(data, Fraction(start), Fraction(3, 10), 48000)


@pytest.mark.parametrize("codec", ["ac3", "eac3", "mp2"])
@pytest.mark.parametrize("format", ["mp4", "matroska", "mpegts", "raw"])
@pytest.mark.parametrize("rate", [48000, 44100] if effort.LONG else [44100])
def test_counts_are_exact_where_decoders_add_dither(codec: str, format: str, rate: int) -> None:
    data = clip(codec, codec if format == "raw" else format, rate)
    for start in (0, 0.2, 0.7, 1.234, 3.9):
        packets = sm.demux_audio(data, timestamp=(start, start + 0.25))
        frames = sm.decode_packets(packets, filter_desc=None)
        wanted = expected(linear(data), packets.window, rate)
        assert samples_of(frames).shape == wanted.shape
        assert frames.first_sample == packets.window.samples(rate)[0]
        # With a shift of one sample, the noise in the signal would differ much more.
        scale = 32768 if wanted.dtype.kind == "i" else 1
        difference = np.abs(samples_of(frames).astype(float) - wanted).mean() / scale
        assert difference < 0.04
        if codec == "mp2":  # dither of its last bit
            assert np.abs(samples_of(frames).astype(int) - wanted.astype(int)).max() <= 1


@pytest.mark.parametrize("codec", ["ac3", "eac3", "mp2"])
def test_a_sound_of_one_packet_begins_and_ends_where_the_edit_list_says(codec: str) -> None:
    data = clip(codec, "mp4", 48000, seconds=0)
    packets = sm.demux_audio(data)
    assert len(packets) == 1
    with av.open(io.BytesIO(data)) as container:
        length = container.streams.audio[0].duration
    assert len(sm.decode_packets(packets, None)) == sm.load_audio(data).array.shape[1] == length


def _wavering(codec: str, format: str, missing: int | None = None) -> bytes:
    """Shift the time of each packet but the first by up to 9 ms, as phones do; one may be missing."""
    chance, written = np.random.default_rng(1), io.BytesIO()
    options = QUIET_AAC if codec == "aac" else ()
    made = io.BytesIO(clip(codec, format, 48000, 4, options))
    with av.open(made) as source, av.open(written, "w", format=format) as target:
        copy = target.add_stream_from_template(source.streams.audio[0])
        for number, packet in enumerate(source.demux(source.streams.audio[0])):
            packet.stream = copy
            if number and packet.size:
                packet.pts += round(int(chance.integers(-9, 10)) / 1000 / packet.time_base)
                packet.dts = packet.pts
            if packet.size and number != missing:
                target.mux(packet)
    return written.getvalue()


WAVERING = [
    (codec, format)
    for codec in ("aac", "libmp3lame")
    for format in ("mp4", "matroska", "mpegts", "nut")
]
WAVERING += [("mp2", "mp4"), ("mp2", "nut"), ("ac3", "matroska"), ("ac3", "mpegts")]


@pytest.mark.parametrize(("codec", "format"), WAVERING)
def test_wavering_timestamps_move_no_sample(codec: str, format: str) -> None:
    data = _wavering(codec, format)
    whole = _decode(data, None)
    assert np.array_equal(samples_of(whole), linear(data))
    ends = [chunk.position + len(chunk) for chunk in whole.chunks]
    assert [chunk.position for chunk in whole.chunks[1:]] == ends[:-1]
    for start in (0.2, 1.234, 3.9):
        frames = _decode(data, (start, start + 0.25))
        first, stop = sm.timing.parse_window((start, start + 0.25)).samples(48000)
        at = first - whole.first_sample
        wanted = samples_of(whole)[:, at : at + (stop or 0) - first]
        assert frames.first_sample == first
        loaded = sm.load_audio(data, (start, start + 0.25), filter_desc=None).array
        assert samples_of(frames).shape == loaded.shape == wanted.shape
        if codec in ("aac", "libmp3lame"):  # the others add dither
            np.testing.assert_array_equal(samples_of(frames), wanted)
            np.testing.assert_array_equal(loaded, wanted)


@pytest.mark.parametrize("format", ["mp4", "matroska"])
def test_a_packet_missing_among_wavering_ones_is_a_gap(format: str) -> None:
    whole = _decode(_wavering("aac", format), None)
    gap = _decode(_wavering("aac", format, missing=100), None)
    assert len(whole) - len(gap) == 1024
    # Later samples keep their positions within the jitter of the timestamps.
    assert abs(_last(whole) - _last(gap)) <= 2 * 9 * 48


def _copied(codec: str, format: str, rate: int, earlier: int) -> bytes:
    """Copy packets of Matroska, whose times are in milliseconds, so many seconds earlier."""
    written, made = io.BytesIO(), io.BytesIO(clip(codec, "matroska", rate))
    with av.open(made) as source, av.open(written, "w", format=format) as target:
        copy = target.add_stream_from_template(source.streams.audio[0])
        for packet in source.demux(source.streams.audio[0]):
            packet.stream = copy
            if packet.size:
                packet.pts = packet.dts = packet.pts - earlier * 1000
                target.mux(packet)
    return written.getvalue()


COPIED = [
    *((codec, "mp4", 44100, 0) for codec in ("alac", "flac", "vorbis")),
    *(("libopus", format, 48000, 0) for format in ("mp4", "mpegts", "nut")),
    ("flac", "nut", 44100, 0),
    *(("vorbis", "ogg", 44100, earlier) for earlier in (0, 1, 2)),
]


@pytest.mark.parametrize("case", COPIED, ids=_name)
def test_windows_of_packets_copied_from_matroska_are_parts_of_the_whole(case: Any) -> None:
    data, rate = _copied(*case), case[2]
    whole = _decode(data, None)
    before, samples = whole.first_sample, samples_of(whole)
    assert len(whole) > 3.9 * rate
    for start in np.arange(0.013, (before + len(whole)) / rate - 0.1, 0.5137):
        frames = _decode(data, (start, start + 0.09))
        loaded = sm.load_audio(data, (start, start + 0.09), filter_desc=None).array
        first, stop = sm.timing.parse_window((start, start + 0.09)).samples(rate)
        wanted = samples[:, max(first - before, 0) : (stop or 0) - before]
        assert_same(samples_of(frames), wanted, sm.demux_audio(data).codec)
        np.testing.assert_array_equal(samples_of(frames), loaded if len(loaded) == 2 else loaded.T)


def test_windows_that_begin_shortly_before_a_packet() -> None:
    """In Matroska, the timestamp of the packet may be rounded down to before the window."""
    data, rate = clip("flac", "matroska", 88200), 88200
    (frame, *_) = _decode(data, None).chunks
    for number in range(1, 20):
        start = Fraction(number * len(frame) - 30, rate)
        _check(data, start, Fraction(40, rate), rate)


def _laced(codec: str, format: str) -> bytes:
    """Write Matroska with a tick of nearly a sample, and the timestamps of eight packets in each block."""
    ticks, written = Fraction(10**9, 20832 * 48000), io.BytesIO()
    made = io.BytesIO(clip(codec, format, 48000, 8 if effort.LONG else 4))
    with av.open(made) as source, av.open(written, "w", format="matroska") as target:
        copy = target.add_stream_from_template(source.streams.audio[0])
        for number, packet in enumerate(source.demux(source.streams.audio[0])):
            if packet.size:
                if number % 8 == 0:
                    block = Fraction(round(packet.pts * ticks))
                # FFmpeg rounds down the duration of a block, then each timestamp in it.
                packet.pts = packet.dts = math.floor(block)
                block += Fraction(math.floor(8 * packet.duration * ticks), 8)
                packet.stream, packet.time_base = copy, Fraction(1, 1000)
                target.mux(packet)
    key = b"\x2a\xd7\xb1\x83"  # TimestampScale, of three bytes
    return written.getvalue().replace(key + b"\x0f\x42\x40", key + (20832).to_bytes(3, "big"))


@pytest.mark.parametrize(
    "case", [("flac", "flac"), ("libopus", "ogg"), ("pcm_s16le", "wav"), ("vorbis", "ogg")]
)
def test_ticks_of_nearly_a_sample(case: tuple[str, str]) -> None:
    """mkvmerge writes them unless there is video."""
    data = _laced(*case)
    whole, codec = _decode(data, None), sm.demux_audio(data).codec
    assert codec.time_base == Fraction(20832, 10**9)
    for first in range(
        max(whole.first_sample, 0), len(whole) - 2000, 9973 if effort.LONG else 29927
    ):
        frames = _decode(data, (Fraction(first, 48000), Fraction(first + 2000, 48000)))
        begin = first - whole.first_sample
        assert_same(samples_of(frames), samples_of(whole)[:, begin : begin + 2000], codec)


def test_a_packet_of_wma_may_state_the_time_of_its_third_frame(rng: np.random.Generator) -> None:
    # Those of WMA Pro do: the first frames that they give began in the packet before.
    written = io.BytesIO()
    with av.open(written, "w", format="asf") as target:
        stream = target.add_stream("wmav2", 48000, layout="mono", bit_rate=128000)
        for number in range(90):
            noise = rng.uniform(-0.5, 0.5, (1, 2048)).astype(np.float32)
            frame = av.AudioFrame.from_ndarray(noise, "fltp", "mono")
            frame.sample_rate, frame.pts = 48000, 2048 * number + 4080 * (number > 3)
            target.mux(stream.encode(frame))
    whole = _decode(written.getvalue(), None)
    window = _decode(written.getvalue(), (1, 1.5))
    first = 48000 - whole.first_sample
    np.testing.assert_array_equal(samples_of(window), samples_of(whole)[:, first : first + 24000])


class _Counted(io.BytesIO):
    nbytes = 0

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self.nbytes += len(data)
        return data


def test_a_window_of_a_matroska_video_is_found_by_the_index_of_the_video(
    rng: np.random.Generator,
) -> None:
    """FFmpeg would read everything before a place in the audio, which the index does not list."""
    samples = rng.integers(-9999, 9999, (8000 * 20, 1), np.int16)
    frames = list(rng.integers(0, 256, (40, 320, 320), np.uint8))
    video = VideoTrack(frames=frames, frame_rate=2, gop_size=1)
    data = make_media([video, AudioTrack(samples=samples, sample_rate=8000, codec="flac")])
    file = _Counted(data)
    window = sm.load_audio(file, (15, 16), sample_fmt="s16")
    np.testing.assert_array_equal(window, samples[8000 * 15 : 8000 * 16])
    assert file.nbytes < len(data) / 2


def test_vorbis_in_matroska_is_read_once_from_its_start() -> None:
    """None of its timestamps tells a sample, so no place in the file has to be tried."""
    file = _Counted(clip("vorbis", "matroska", 44100, 20))
    sm.load_audio(file, (18, 19))
    assert file.nbytes < len(file.getvalue()) + 150_000


def test_windows_of_mp3_in_avi_are_read_from_their_lead_in() -> None:
    """A tick of AVI may be a packet, and then tells the sample as well as a fine one."""
    packets = sm.demux_audio(_make("libmp3lame", "avi", 44100, seconds=4), timestamp=(3, 3.1))
    assert len(packets) < 30  # of 155, each 26 ms; the lead-in is half a second


def test_opus_in_webm_that_states_too_short_a_delay_begins_behind_that_of_its_header() -> None:
    """Old FFmpeg takes the 312 samples of it for ticks of 16 kHz, so decoders skip 104 of them."""
    data = _make("libopus", "webm", 16000)
    delay = b"\x56\xaa\x83%b"
    old = data.replace(delay % b"\x63\x2e\xa0", delay % b"\x21\x0f\x8b")  # in nanoseconds
    assert old != data
    wanted = samples_of(_decode(data, None))
    for window, first, count in ((None, 0, wanted.shape[1]), ((1.5, 1.75), 72000, 12000)):
        found = _decode(old, window)
        assert (found.first_sample, len(found)) == (first, count)
        expected_samples = wanted[:, first : first + count]
        np.testing.assert_allclose(samples_of(found), expected_samples, atol=2**-15)


def test_opus_in_mp4_of_another_rate_begins_behind_the_delay_of_the_encoder() -> None:
    """FFmpeg counts the 312 samples of it in ticks of the encoder's rate, and left 208 in front."""
    whole = _decode(_make("libopus", "mp4", 16000), None)
    in_webm = samples_of(_decode(_make("libopus", "webm", 16000), None))
    assert whole.first_sample == 0
    np.testing.assert_array_equal(samples_of(whole)[:, : in_webm.shape[1]], in_webm)


def test_a_video_that_begins_after_opus_of_8_khz_hides_none_of_it() -> None:
    """FFmpeg states that the audio begins 32 ms later than it does, so the video seemed the first."""
    samples = np.zeros((8000, 1), np.int16)
    video = VideoTrack(frames=index_frames(20, 32, 32), pts=range(1, 21), frame_rate=40)
    audio = AudioTrack(samples=samples, sample_rate=8000, codec="libopus")
    frames = _decode(make_media([video, audio]), (0, None))
    assert (frames.first_sample, len(frames)) == (0, 48000)


def test_windows_behind_an_empty_chunk_of_avi_have_the_samples_of_the_file() -> None:
    """FFmpeg writes one after the first packet of FLAC that begins after the video."""
    file = io.BytesIO()
    with (
        av.open(io.BytesIO(_make("flac", "flac", 44100, seconds=3))) as src,
        av.open(file, "w", "avi") as dst,
    ):
        stream = dst.add_stream("flac", 44100)
        for frame in (*src.decode(audio=0), None):
            for packet in stream.encode(frame):
                if packet.size:  # the last one is a new header
                    packet.pts = packet.dts = packet.pts + 4608 * (packet.pts > 0)
                    dst.mux_one(packet)
    _check(file.getvalue(), Fraction(2), Fraction(1, 2), 44100)


def _last(frames: sm.AudioFrames) -> int:
    return frames.chunks[-1].position or 0


@pytest.mark.parametrize(
    "case",
    [
        ("libopus", "ogg", 48000),
        # FFmpeg states that it begins 13 ms later than it does.
        ("libopus", "webm", 16000),
        ("aac", "mp4", 44100, QUIET_AAC),
    ],
    ids=_name,
)
def test_windows_that_touch_share_no_sample_and_lose_none(case: tuple[Any, ...]) -> None:
    data = _make(*case, seconds=4)
    edges = [None, 0.1, "0.3000001", 1, 1.00001, 1.9999, 3.3, None]
    parts = [_decode(data, (a, b)) for a, b in pairwise(edges)]
    assert [part.first_sample for part in parts[1:]] == list(
        np.cumsum([len(part) for part in parts[:-1]])
    )
    together = np.concatenate([samples_of(part) for part in parts], axis=1)
    assert_same(together, linear(data), sm.demux_audio(data).codec)


@pytest.mark.parametrize("case", [*EXACT[9:38:3], ("libopus", "webm", 48000)], ids=_name)
def test_one_demuxer_gives_the_same_again(case: tuple[Any, ...]) -> None:
    # Matroska and Ogg report the samples to skip at the start only once, right after opening.
    data, rate = _make(*case), case[2]
    with sm.Demuxer(data) as demuxer:
        for window in [None, (1.5, 2), (0, 0.1), None, (1, 1.1)]:
            packets = demuxer.demux_audio(window)
            frames = sm.decode_packets(packets, filter_desc=None)
            wanted = expected(linear(data), packets.window, rate)
            assert_same(samples_of(frames), wanted, packets.codec)


@pytest.mark.parametrize("codec", ["flac", "alac", "pcm_s16le", "aac"])
def test_audio_that_begins_soon_after_the_video_ends_where_the_file_states(codec: str) -> None:
    """FFmpeg 9 cuts as many samples, as in many recordings of phones. Without that, there is padding."""
    data = _delayed("mp4" if codec != "pcm_s16le" else "mov", codec, audio=1200, video=0)
    frames = sm.decode_packets(sm.demux_audio(data), None)
    assert abs(frames.first_sample + len(frames) - (3 * 48000 + 1200)) <= 48
    np.testing.assert_array_equal(samples_of(frames)[:, :1000], linear(data)[:, :1000])


def _delayed(format: str, codec: str, *, audio: int, video: int, rate: int = 48000) -> bytes:
    """Make a file whose audio starts after ``audio`` samples, its video after ``video`` frames at 30 fps."""
    pictures = index_frames(60, 16, 16)
    pts = list(range(video, video + 60))
    return make_media(
        [
            VideoTrack(frames=pictures, codec="libx264", frame_rate=30, pts=pts),
            AudioTrack(samples=sound(3 * rate, rate), sample_rate=rate, codec=codec, start=audio),
        ],
        format=format,
        options={"avoid_negative_ts": "disabled"} if format != "mpegts" else {},
    )


@pytest.mark.parametrize(
    ("format", "codec"),
    [("mp4", "flac"), ("matroska", "flac"), ("mpegts", "libmp3lame"), ("mov", "pcm_s16le"),
     ("matroska", "libopus"), ("mp4", "libopus")],
)  # fmt: skip
@pytest.mark.parametrize(("audio", "video"), [(16001, 0), (0, 20), (4800, 20)])
def test_one_zero_for_audio_and_images(format: str, codec: str, audio: int, video: int) -> None:
    rate = 48000
    data = _delayed(format, codec, audio=audio, video=video)
    whole = sm.decode_packets(sm.demux_audio(data), filter_desc=None)
    np.testing.assert_array_equal(samples_of(whole), linear(data))
    # Encoder priming may come before the given start; milliseconds are rounded.
    late = audio - min(audio, video * rate // 30)
    assert abs(whole.first_sample - late) <= (1200 if codec in ("libmp3lame", "libopus") else 48)
    for start, end in [(0, 0.1), (0, 0.52), (0.4, 0.8), (1.2, 1.3), (2, 2.0001), (3, None)]:
        packets = sm.demux_audio(data, timestamp=(start, end))
        frames = sm.decode_packets(packets, filter_desc=None)
        wanted = expected(linear(data), packets.window, rate, whole.first_sample)
        wanted = wanted.reshape(samples_of(frames).shape)
        assert_same(samples_of(frames), wanted, packets.codec)
        if len(frames):
            first = max(packets.window.samples(rate)[0], whole.first_sample)
            assert frames.first_sample == first


@pytest.mark.parametrize("rate", [44100, 48000, 22050])
def test_a_start_between_two_samples_does_not_waver(rate: int) -> None:
    # Time zero is a frame at 1/3 s, so audio samples are at fractional sample positions.
    data = make_media(
        [
            VideoTrack(
                frames=index_frames(30, 16, 16),
                codec="libx264",
                time_base=Fraction(1, 90000),
                pts=[1 + 3000 * k for k in range(30)],
            ),
            AudioTrack(samples=sound(3 * rate, rate), sample_rate=rate, codec="flac", start=1000),
        ],
        format="mp4",
        options={"avoid_negative_ts": "disabled"},
    )
    whole = sm.decode_packets(sm.demux_audio(data), filter_desc=None)
    for start in (0.7, 1.1, 1.7001, 2.3):
        packets = sm.demux_audio(data, timestamp=(start, start + 0.1))
        frames = sm.decode_packets(packets, filter_desc=None)
        wanted = expected(linear(data), packets.window, rate, whole.first_sample)
        np.testing.assert_array_equal(samples_of(frames), wanted)


@pytest.mark.parametrize("byte_rate", [0, 1000, 96000, 192001, 10**6])
def test_a_wav_header_that_states_a_wrong_rate_of_bytes(byte_rate: int) -> None:
    data = bytearray(clip("pcm_s16le", "wav"))
    struct.pack_into("<I", data, data.index(b"fmt ") + 8 + 8, byte_rate)
    for window in [(1, 1.1), (3.2, 3.3), (3.9, 5)]:
        packets = sm.demux_audio(bytes(data), timestamp=window)
        wanted = expected(linear(clip("pcm_s16le", "wav")), packets.window, 48000)
        frames = sm.decode_packets(packets, filter_desc=None)
        np.testing.assert_array_equal(samples_of(frames), wanted)


def test_real_sounds(media_dir: Path, rng: np.random.Generator) -> None:
    for path in sorted((media_dir / "audio").iterdir()):
        data = path.read_bytes()
        whole = sm.decode_packets(sm.demux_audio(path), filter_desc=None)
        np.testing.assert_array_equal(samples_of(whole), linear(data), err_msg=path.name)
        duration = len(whole) / whole.sample_rate
        for _ in range(6):
            start = round(float(rng.uniform(0, duration)), 4)
            _check(data, Fraction(str(start)), Fraction(1, 5), whole.sample_rate)


def test_vorbis_of_short_and_long_blocks(rng: np.random.Generator) -> None:
    # FFmpeg reports frames between long and short blocks late. Its own encoder never makes short blocks.
    soundfile = pytest.importorskip("soundfile")
    clicks = sound(4 * 44100, 44100) * 0.05
    clicks[rng.integers(0, len(clicks), 20)] = 30000
    file = io.BytesIO()
    soundfile.write(file, clicks.astype(np.int16), 44100, format="OGG", subtype="VORBIS")
    data = file.getvalue()
    frames = sm.decode_packets(sm.demux_audio(data), filter_desc=None)
    assert {len(chunk) for chunk in frames.chunks} >= {128, 576, 1024}
    np.testing.assert_array_equal(samples_of(frames), linear(data))
    for start in rng.integers(0, 3 * 44100, 20):
        _check(data, Fraction(int(start), 44100), Fraction(1, 2), 44100)


@pytest.mark.parametrize(("rate", "size"), [(16000, 4000), (44100, 8000), (22050, 300)])
def test_vorbis_of_one_page(rate: int, size: int) -> None:
    # Short sounds are one page of Ogg. FFmpeg states its times a packet late, and cuts no padding.
    soundfile = pytest.importorskip("soundfile")
    file = io.BytesIO()
    soundfile.write(file, sound(size, rate), rate, format="OGG", subtype="VORBIS")
    data = file.getvalue()
    wanted, _ = soundfile.read(io.BytesIO(data), dtype="float32")
    frames = sm.decode_packets(sm.demux_audio(data), filter_desc=None)
    assert frames.first_sample == 0
    np.testing.assert_allclose(samples_of(frames), wanted.T, atol=1e-6)
    np.testing.assert_array_equal(sm.load_audio(data).array, samples_of(frames))
    window = Fraction(size // 4, rate), Fraction(size // 2, rate)
    part = sm.load_audio(data, timestamp=window).array
    np.testing.assert_allclose(part, wanted[size // 4 : size // 2].T, atol=1e-6)


@pytest.mark.parametrize(("rate", "size"), [(16000, 4000), (44100, 8000), (22050, 300)])
def test_vorbis_of_one_page_that_ends_after_its_samples(rate: int, size: int) -> None:
    """Its samples begin as much later. FFmpeg lets them begin a packet late, and cuts the rest at the end."""
    soundfile = pytest.importorskip("soundfile")
    file = io.BytesIO()
    soundfile.write(file, sound(size, rate), rate, format="OGG", subtype="VORBIS")
    *headers, page = pages(file.getvalue())
    for later in (0, 16, 112, 300, 2000):
        page[6:14] = struct.pack(
            "<q", 1 << 20
        )  # to decode also what the encoder added to fill a block
        whole, _ = soundfile.read(io.BytesIO(b"".join((*headers, sealed(page)))), dtype="float32")
        page[6:14] = struct.pack("<q", len(whole) + later)
        data = b"".join((*headers, sealed(page)))
        frames = sm.decode_packets(sm.demux_audio(data), filter_desc=None)
        assert frames.first_sample == later
        np.testing.assert_allclose(samples_of(frames), whole.T, atol=1e-6)
        window = Fraction(len(whole) + later - 200, rate), None
        part = sm.load_audio(data, timestamp=window).array
        np.testing.assert_allclose(part, whole[-200:].T, atol=1e-6)


# In these files, the audio has only a last page, or one page before it.
@pytest.mark.parametrize(
    ("codec", "rate", "seconds"),
    [("libopus", 48000, 2), ("vorbis", 16000, 2), ("vorbis", 44100, 3)],
)
def test_a_last_page_of_ogg_beside_another_stream(codec: str, rate: int, seconds: int) -> None:
    size = seconds * rate + 777
    track = AudioTrack(samples=sound(size, rate), sample_rate=rate, codec=codec, bit_rate=48000)
    beside = [
        VideoTrack(frames=index_frames(30, 32, 32), codec="libvpx", frame_rate=30),
        AudioTrack(samples=sound(32777, 8000, 1), sample_rate=8000, codec="flac"),
    ]
    for tracks, index in ([beside[0], track], 1), ([track, beside[1]], 0):
        data = make_media(tracks, format="ogg", options={"page_duration": "20000000"})
        with sm.Demuxer(data) as demuxer:
            # Twice, because FFmpeg knows more of a file once it has read its end.
            for tenth in (*range(3, 10 * seconds, 7), *range(4, 10 * seconds, 8)):
                whole = demuxer.demux_audio(stream_index=index)
                part = demuxer.demux_audio((tenth / 10, None), stream_index=index)
                wanted = expected(samples_of(sm.decode_packets(whole, None)), part.window, rate)
                assert_same(samples_of(sm.decode_packets(part, None)), wanted, part.codec)


def _cut_by_pes(offset: int) -> bytes:
    """Write AC-3 to MPEG-TS. Each PES packet begins ``offset`` bytes after the start of a 20th frame."""
    coded = sm.demux_audio(_make("ac3", "ac3", 48000, seconds=12))
    frames = [bytes(packet) for packet in coded._packets]
    data, size = b"".join(frames), len(frames[0])
    starts = [0, *range(20 * size + offset, len(data), 20 * size)]
    file = io.BytesIO()
    with av.open(file, "w", format="mpegts") as container:
        stream = container.add_stream("ac3", rate=48000, layout="stereo")
        for start, stop in pairwise([*starts, len(data)]):
            packet = av.Packet(data[start:stop])
            packet.stream, packet.time_base = stream, Fraction(1, 90000)
            packet.pts = packet.dts = -(-start // size) * 1536 * 90000 // 48000
            container.mux(packet)
    return file.getvalue()


# FFmpeg gives the time of a PES packet to the rest of a frame before, after a seek; and always to a frame
# whose header, of 7 bytes, is cut. Writers of HLS and DVDs cut frames anywhere.
@pytest.mark.parametrize(
    "make",
    [
        lambda: _cut_by_pes(-100),
        lambda: _cut_by_pes(3),
        lambda: _make("ac3", "vob", 48000, seconds=12),
    ],
    ids=["rest", "header", "dvd"],
)
def test_frames_that_pes_packets_cut(make: Callable[[], bytes], rng: np.random.Generator) -> None:
    data = make()
    whole = linear(data)
    for start in rng.integers(24000, 11 * 48000, 20):
        window = Fraction(int(start), 48000), Fraction(int(start) + 4800, 48000)
        part = sm.load_audio(data, timestamp=window).array
        # The decoder adds dither.
        assert np.abs(part - whole[:, start : start + 4800]).mean() < 0.02


@pytest.mark.parametrize(
    ("codec", "format"),
    [("libmp3lame", "matroska"), ("flac", "mp4"), ("pcm_s16le", "wav"), ("pcm_f32le", "wav"),
     ("pcm_s16be", "mov"), ("pcm_s24be", "aiff"), ("aac", "adts"), ("vorbis", "ogg")],
)  # fmt: skip
def test_long_files_are_not_read_from_their_start(codec: str, format: str) -> None:
    data = clip(codec, format, 44100, 4)
    part = sm.demux_audio(data, timestamp=(3.5, 3.6))
    assert part.nbytes < sm.demux_audio(data).nbytes / 3


# FFmpeg's encoder states at the end of a stream's five bytes that there is no replication. Others leave three
# of them out; then low sample rates may be doubled by it, and it knows what came before.
@pytest.mark.parametrize("says_no", [True, False])
@pytest.mark.parametrize(("rate", "most"), [(44100, 5), (48000, 5), (22050, 5), (8000, 5)])
def test_aac_reads_three_packets_before_a_window(rate: int, most: int, says_no: bool) -> None:
    data = _make("aac", "mp4", rate, QUIET_AAC)
    if not says_no:
        assert data.count(b"\x56\xe5\x00") == 1
        # Replace the tag by an unknown one.
        data = data.replace(b"\x56\xe5\x00", b"\x00\x00\x00")
        most = most if rate > 24000 else 3 + math.ceil(rate / 1024 / 2)
    packets = sm.demux_audio(data, timestamp=(1, 2))
    assert most - 2 <= len(packets) - rate / 1024 <= most + 1


def test_num_samples_counts_samples_of_the_window() -> None:
    data = clip("flac", "flac")
    packets = sm.demux_audio(data, timestamp=(1, 2))
    frames = sm.decode_packets(packets, filter_desc=None, num_samples=1234)
    assert (len(frames), frames.first_sample) == (1234, 48000)
    np.testing.assert_array_equal(samples_of(frames), linear(data)[:, 48000 : 48000 + 1234])


@pytest.mark.parametrize("num_samples", [0, -1])
def test_num_samples_must_be_positive(num_samples: int) -> None:
    packets = sm.demux_audio(clip("flac", "flac"))
    with pytest.raises(ValueError, match=f"num_samples must be at least 1, not {num_samples}"):
        sm.decode_packets(packets, num_samples=num_samples)


def test_the_window_is_cut_before_the_filter() -> None:
    data = clip("pcm_s16le", "wav")
    frames = sm.decode_packets(
        sm.demux_audio(data, timestamp=(1, 1.5)), "volume=0.5,aformat=sample_fmts=s16"
    )
    assert (len(frames), frames.first_sample) == (24000, 48000)
    alone = make_audio(np.ascontiguousarray(linear(data)[:, 48000:72000].T), 48000)
    np.testing.assert_array_equal(
        samples_of(frames),
        samples_of(sm.decode_packets(sm.demux_audio(alone), "volume=0.5,aformat=sample_fmts=s16")),
    )


@pytest.mark.parametrize("window", [(0, 1), (1, 1.5), (0.123, 2.5)])
def test_resampling_keeps_length_and_place(window: tuple[float, float]) -> None:
    data = clip("pcm_s16le", "wav")
    desc = sm.get_audio_filter_desc(sample_rate=16000, num_channels=1, sample_fmt="s16")
    frames = sm.decode_packets(sm.demux_audio(data, timestamp=window), desc)
    assert (frames.sample_rate, frames.num_channels, frames.sample_fmt) == (16000, 1, "s16")
    assert len(frames) == pytest.approx((window[1] - window[0]) * 16000, abs=1)
    assert frames.first_sample == pytest.approx(window[0] * 16000, abs=1)


@pytest.mark.parametrize(
    ("make", "kind"),
    [(lambda: clip("pcm_s16le", "wav"), "wav"), (lambda: clip("aac", "mp4"), "mp4")],
)
def test_an_empty_window_gives_empty_frames(make: Callable[[], bytes], kind: str) -> None:
    frames = _decode(make(), (100, 101))
    assert len(frames) == 0
    assert frames.timestamps == ()
    with pytest.raises(ValueError, match=r"no sample in the window \[100, 101\)"):
        _ = frames.sample_rate
