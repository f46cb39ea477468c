"""Audio keeps its exact sample positions, also after filters and in files with coarse time bases."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import av
import numpy as np
import pytest
from audio_oracle import clip, samples_of

import spdl_media as sm
from spdl_media.frames import placed_chunk

# Time bases: a millisecond, 1/90000 s with a start offset, and a sample.
FILES = [
    ("flac", "matroska", 8000),
    ("flac", "matroska", 44100),
    ("libmp3lame", "mpegts", 44100),
    ("flac", "flac", 48000),
]
WINDOWS = [None, (Fraction(1, 3), None), (0.1001, 1.7)]
FILTERS = [sm.get_audio_filter_desc(), "anull", "volume=1,aformat=sample_fmts=s16"]


@pytest.fixture(scope="module", params=FILES, ids=lambda case: "-".join(map(str, case)))
def packets_of(request: pytest.FixtureRequest) -> Any:
    data = clip(*request.param, 3)
    return lambda window: sm.demux_audio(data, timestamp=window)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("desc", FILTERS)
def test_a_filter_moves_nothing(packets_of: Any, window: Any, desc: str) -> None:
    packets = packets_of(window)
    plain = sm.decode_packets(packets, None)
    filtered = sm.decode_packets(packets, desc)
    assert len(filtered) == len(plain)
    assert filtered.first_sample == plain.first_sample
    assert filtered.timestamps[0] == plain.timestamps[0]
    tail = filtered[1234:]
    assert tail.first_sample == plain.first_sample + 1234


@pytest.mark.parametrize("factor", [2, Fraction(1, 2), Fraction(160, 441)])
def test_another_rate_begins_at_the_same_time(packets_of: Any, factor: Fraction) -> None:
    packets = packets_of((Fraction(1, 3), None))
    plain = sm.decode_packets(packets, None)
    rate = int(plain.sample_rate * factor)
    frames = sm.decode_packets(packets, sm.get_audio_filter_desc(sample_rate=rate))
    # The nearest sample position of the new rate.
    assert abs(frames.timestamp - plain.timestamp) <= 0.5 / rate + 1e-9


def test_a_streaming_decoder_counts_likewise() -> None:
    data = clip("flac", "matroska", 8000, 3)
    packets = sm.demux_audio(data, timestamp=(Fraction(1, 3), None))
    decoder = sm.AudioDecoder(packets.codec)
    frames = [*decoder.decode(packets), *decoder.flush()]
    plain = sm.decode_packets(packets, None)
    assert plain.first_sample == 2667
    assert frames[0].first_sample == 2667


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("decoded", [None, "anull"])
def test_graphs_over_decoded_audio(packets_of: Any, declared: bool, decoded: str | None) -> None:
    packets = packets_of((Fraction(1, 3), 2))
    frames = sm.decode_packets(packets, decoded)
    before = frames.pts, frames.time_base, [id(chunk.frame) for chunk in frames.chunks]
    fmt = frames.sample_fmt
    source = f"{sm.get_abuffer_desc(packets, sample_fmt=fmt)}," if declared else ""
    graph = sm.FilterGraph(f"{source}aformat=sample_fmts={fmt}")
    graph.add_frames(frames[77:5000])
    graph.add_frames(frames[5000:])
    graph.flush()
    result = graph.get_frames()
    assert isinstance(result, sm.AudioFrames)
    assert result.first_sample == frames.first_sample + 77
    assert result.timestamps[0] == result.first_sample / result.sample_rate
    np.testing.assert_array_equal(samples_of(result), samples_of(frames)[:, 77:])
    # Frames are shared, so the input must be unchanged.
    assert before == (frames.pts, frames.time_base, [id(chunk.frame) for chunk in frames.chunks])


def test_a_declared_time_base_is_kept() -> None:
    """The declared time base is a millisecond, so no finer position can be expressed."""
    data = clip("flac", "flac", 48000, 3)
    frames = sm.decode_packets(sm.demux_audio(data, timestamp=(Fraction(1, 3), None)), None)
    graph = sm.FilterGraph(
        "abuffer=time_base=1/1000:sample_rate=48000:sample_fmt=s16:channel_layout=stereo,anull"
    )
    graph.add_frames(frames)
    graph.flush()
    result = graph.get_frames()
    assert isinstance(result, sm.AudioFrames)
    assert (frames.first_sample, result.first_sample) == (16000, 333 * 48)


@pytest.mark.parametrize("unit", ["", "time_base=1/8e3:"])
def test_a_unit_that_the_text_does_not_say_plainly(unit: str) -> None:
    """The default of FFmpeg is a sample, and only FFmpeg evaluates expressions."""
    frames = sm.decode_packets(
        sm.demux_audio(clip("flac", "flac", 8000, 1), timestamp=(Fraction(1, 3), None)), None
    )
    graph = sm.FilterGraph(
        f"abuffer={unit}sample_rate=8000:sample_fmt=s16:channel_layout=stereo,anull"
    )
    graph.add_frames(frames)
    result = graph.get_frames()
    assert isinstance(result, sm.AudioFrames)
    assert result.first_sample == frames.first_sample == 2667


def test_audio_of_two_files_in_one_input() -> None:
    """The files have different time bases, but the graph has only one."""
    first, second = (
        sm.decode_packets(sm.demux_audio(clip("pcm_s16le", format, 8000, 1)), None)
        for format in ("wav", "matroska")
    )
    assert first.time_base != second.time_base
    graph = sm.FilterGraph("anull")
    graph.add_frames(first)
    assert isinstance(graph.get_frames(), sm.AudioFrames)
    graph.add_frames(second[4000:])
    result = graph.get_frames()
    assert isinstance(result, sm.AudioFrames)
    assert result.first_sample == 4000


def test_frames_of_a_graph_keep_their_timestamps() -> None:
    frame = av.AudioFrame.from_ndarray(np.zeros((1, 100), np.int16), "s16p", "mono")
    frame.sample_rate, frame.pts, frame.time_base = 8000, 125, Fraction(1, 1000)
    graph = sm.FilterGraph("anull")
    graph.add_frames(sm.AudioFrames([placed_chunk(frame, Fraction(0))])[40:])
    result = graph.get_frames()
    assert isinstance(result, sm.AudioFrames)
    assert result.first_sample == 1040
    assert (frame.pts, len(result)) == (125, 60)
