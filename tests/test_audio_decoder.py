"""AudioDecoder: chunks of exact length equal the decode of the whole stream."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from audio_oracle import clip, linear, samples_of

import spdl_media as sm


def _stream(data: bytes, num_packets: int = 7) -> list[sm.AudioPackets]:
    with sm.Demuxer(data) as demuxer:
        index = demuxer.audio_stream_index
        return list(demuxer.streaming_demux(index, num_packets=num_packets))  # type: ignore[arg-type]


def _chunks(data: bytes, num_frames: int | None, desc: str | None = None) -> list[sm.AudioFrames]:
    stream = _stream(data)
    decoder = sm.AudioDecoder(stream[0].codec, filter_desc=desc, num_frames=num_frames)
    chunks = [frames for packets in stream for frames in decoder.decode(packets)]
    return [*chunks, *decoder.flush()]


@pytest.mark.parametrize("num_frames", [1000, 1024, 4800, 48000, 10**6])
@pytest.mark.parametrize(
    ("codec", "format"),
    [("flac", "flac"), ("libmp3lame", "mp3"), ("aac", "mp4"), ("libopus", "ogg"),
     ("vorbis", "webm"), ("pcm_s16le", "wav"), ("ac3", "mpegts")],
)  # fmt: skip
def test_chunks_of_exact_length(codec: str, format: str, num_frames: int) -> None:
    data = clip(codec, format, seconds=2)
    chunks = _chunks(data, num_frames)
    wanted = linear(data)
    assert {len(chunk) for chunk in chunks[:-1]} <= {num_frames}
    assert 0 < len(chunks[-1]) <= num_frames
    assert [c.first_sample for c in chunks] == list(range(0, wanted.shape[1], num_frames))
    np.testing.assert_array_equal(np.concatenate([samples_of(c) for c in chunks], 1), wanted)


def test_without_a_length_all_that_is_ready_comes() -> None:
    data = clip("flac", "flac", seconds=2)
    chunks = _chunks(data, None)
    assert len(chunks) > 1
    np.testing.assert_array_equal(
        np.concatenate([samples_of(c) for c in chunks], 1), linear(data)
    )  # fmt: skip


@pytest.mark.parametrize("desc", ["aresample=16000,aformat=sample_fmts=fltp", "atempo=1.5"])
def test_one_graph_serves_the_whole_stream(desc: str) -> None:
    data = clip("pcm_s16le", "wav", seconds=3)
    whole = sm.decode_packets(sm.demux_audio(data), desc)
    chunks = _chunks(data, 1600, desc)
    assert {len(chunk) for chunk in chunks[:-1]} == {1600}
    np.testing.assert_array_equal(
        np.concatenate([samples_of(c) for c in chunks], 1), samples_of(whole)
    )
    assert [c.first_sample for c in chunks][1:4] == [1600, 3200, 4800]


def test_the_default_gives_float_planes() -> None:
    stream = _stream(clip("pcm_s16le", "wav", seconds=1))
    decoder = sm.AudioDecoder(stream[0].codec, num_frames=480)
    frames = next(decoder.decode(stream[0]))
    assert (frames.sample_fmt, len(frames)) == ("fltp", 480)


def test_an_unfinished_loop_loses_nothing() -> None:
    data = clip("flac", "flac", seconds=2)
    stream = _stream(data)
    decoder = sm.AudioDecoder(stream[0].codec, filter_desc=None, num_frames=1000)
    chunks = []
    for packets in stream:
        for frames in decoder.decode(packets):
            chunks.append(frames)
            break
    chunks += decoder.flush()
    np.testing.assert_array_equal(
        np.concatenate([samples_of(c) for c in chunks], 1), linear(data)
    )  # fmt: skip


def test_a_flushed_decoder_takes_another_stream() -> None:
    data = clip("aac", "mp4", seconds=1)
    stream = _stream(data)
    decoder = sm.AudioDecoder(stream[0].codec, filter_desc=None, num_frames=5000)
    for _ in range(2):
        chunks = [frames for packets in stream for frames in decoder.decode(packets)]
        chunks += decoder.flush()
        np.testing.assert_array_equal(
            np.concatenate([samples_of(c) for c in chunks], 1), linear(data)
        )
    assert list(decoder.flush()) == []


def test_slices_of_chunks_share_memory() -> None:
    frames = sm.decode_packets(sm.demux_audio(clip("flac", "flac", seconds=1)), filter_desc=None)
    part = frames[5000:20000][100:9000]
    assert (len(part), part.first_sample, part.timestamp) == (8900, 5100, 5100 / 48000)
    np.testing.assert_array_equal(samples_of(part), samples_of(frames)[:, 5100:14000])
    assert np.shares_memory(part.chunks[0].planes[0], frames.chunks[1].planes[0])
    assert len(frames[::]) == len(frames)
    assert len(frames[9:3]) == 0
    with pytest.raises(TypeError, match="slice with step 1"):
        frames[::2]


def test_views_are_read_only_and_outlive_frames() -> None:
    frames = sm.decode_packets(sm.demux_audio(clip("flac", "flac", seconds=1)), filter_desc=None)
    view = frames.chunks[0].planes[0]
    copy = view.copy()
    del frames
    np.testing.assert_array_equal(view, copy)
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


def test_wrong_arguments() -> None:
    packets = sm.demux_audio(clip("flac", "flac", seconds=1))
    with pytest.raises(ValueError, match="num_frames must be at least 1, not 0"):
        sm.AudioDecoder(packets.codec, num_frames=0)
    with pytest.raises(TypeError, match=r"num_frames must be an int, not 1.5"):
        sm.AudioDecoder(packets.codec, num_frames=1.5)  # type: ignore[arg-type]
    decoder: Any = sm.AudioDecoder(packets.codec)
    with pytest.raises(TypeError, match="AudioDecoder decodes AudioPackets, not bytes"):
        decoder.decode(b"")


def test_a_second_thread_gets_an_error() -> None:
    stream = _stream(clip("flac", "flac", seconds=2), 1000)
    decoder = sm.AudioDecoder(stream[0].codec, num_frames=100)
    errors: list[Exception] = []

    def other() -> None:
        try:
            next(decoder.flush())
        except RuntimeError as error:
            errors.append(error)

    with decoder._guard:  # as if another thread were inside
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert "AudioDecoder is in use by another thread" in str(errors[0])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("desc", [None, "aresample=8000,aformat=sample_fmts=fltp"])
def test_windows_that_do_not_continue_start_again(order: tuple[int, int], desc: str | None) -> None:
    data = clip("flac", "flac", seconds=3)
    windows = [(0.5, 1.0), (2.0, 2.5)]
    parts = [sm.demux_audio(data, timestamp=windows[index]) for index in order]
    decoder = sm.AudioDecoder(parts[0].codec, filter_desc=desc)
    got = [frames for part in parts for frames in decoder.decode(part)] + [*decoder.flush()]
    wanted = [samples_of(sm.decode_packets(part, desc)) for part in parts]
    np.testing.assert_array_equal(
        np.concatenate([samples_of(frames) for frames in got], 1), np.concatenate(wanted, 1)
    )
