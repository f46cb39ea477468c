"""Wrong arguments are reported at once, by name."""

from __future__ import annotations

import asyncio
import io
import pickle
import re
from typing import Any

import av
import numpy as np
import pytest

import spdl_media as sm
from spdl_media.testing import (
    AudioTrack,
    VideoTrack,
    index_planes,
    make_audio,
    make_media,
    make_tone,
    make_video,
)


@pytest.fixture(scope="module")
def movie() -> bytes:
    tracks = [
        VideoTrack(frames=index_planes(20, 64, 48), codec="libx264", pix_fmt="yuv420p"),
        AudioTrack(samples=make_tone(16000, 8000), sample_rate=8000, codec="flac"),
    ]
    return make_media(tracks, format="mp4")


def test_numbers_of_more_than_31_bits_are_refused_and_not_cut(movie: bytes) -> None:
    for width in (2**31, 10**30):
        with pytest.raises(ValueError, match=r"^width must be below 2\*\*31, not "):
            sm.load_video(movie, width=width, height=8)
    with pytest.raises(ValueError, match=r"^num_channels must be below 2\*\*31, not 4294967297"):
        sm.load_audio(movie, num_channels=2**32 + 1)


def test_frames_are_no_array_by_themselves(movie: bytes) -> None:
    """NumPy would make an array of Python objects of them, or take the samples one by one."""
    video = sm.decode_packets(sm.demux_video(movie))
    for frames in (video, video[0], sm.decode_packets(sm.demux_audio(movie))):
        for convert in (np.asarray, sm.convert_array, lambda one: np.stack([one, one])):
            with pytest.raises(
                TypeError, match=r"Frames are no array: convert_frames\(frames\) makes one$"
            ):
                convert(frames)


def test_names_of_other_libraries_are_answered_with_ours(movie: bytes) -> None:
    codec = sm.demux_audio(movie).codec
    cases: list[tuple[Any, str]] = [
        (lambda: sm.load_image(b"", device="cuda"), "'device'. Did you mean 'cuda'"),
        (lambda: sm.load_image_batch([b""], strict=True), "'strict'. Did you mean 'on_error'"),
        (lambda: sm.load_audio(b"", mono=True), "'mono'. Did you mean 'num_channels'"),
        (
            lambda: asyncio.run(sm.async_load_image_batch([b""], executer=None)),
            "async_load_image_batch() got an unexpected keyword argument 'executer'. Did you mean 'executor'",
        ),
        (lambda: sm.decode_config(threads=4), "'threads'. Use decoder_options={'threads': n}"),
        (lambda: sm.ImageFolder(".", transform=len), "'transform'. Use preprocessor= of the"),
        (lambda: sm.Shards("a.tar", shuffle=True), "'shuffle'. Did you mean 'shuffle_shards'"),
        (lambda: sm.AudioDecoder(codec, num_samples=9), "'num_samples'. Use num_frames="),
        (lambda: sm.VideoDecoder(codec, num_frame=9), "'num_frame'. Did you mean 'num_frames'"),
    ]
    for call, message in cases:
        with pytest.raises(TypeError, match=re.escape(message)):
            call()


@pytest.mark.parametrize("config", ["mp4", {"format": "mp4"}, sm.decode_config()])
def test_demux_config_is_made_by_its_function(movie: bytes, config: Any) -> None:
    for function in (sm.demux_video, sm.demux_audio, sm.demux_image, sm.probe, sm.Demuxer):
        with pytest.raises(
            TypeError, match=r"demux_config must be made by spdl_media.demux_config\(\)"
        ):
            function(movie, demux_config=config)


@pytest.mark.parametrize("config", ["keep", {"on_corrupt": "keep"}, sm.demux_config()])
def test_decode_config_is_made_by_its_function(movie: bytes, config: Any) -> None:
    packets = sm.demux_video(movie)
    with pytest.raises(
        TypeError, match=r"decode_config must be made by spdl_media.decode_config\(\)"
    ):
        sm.decode_packets(packets, None, config)
    with pytest.raises(
        TypeError, match=r"decode_config must be made by spdl_media.decode_config\(\)"
    ):
        sm.VideoDecoder(packets.codec, decode_config=config)


@pytest.mark.parametrize("start", [10**18, "1e300"])
def test_a_window_where_no_file_can_be_is_empty(movie: bytes, start: Any) -> None:
    assert len(sm.decode_packets(sm.demux_video(movie, timestamp=(start, None)))) == 0
    assert len(sm.decode_packets(sm.demux_audio(movie, timestamp=(start, None)))) == 0


def test_sources_of_another_kind_are_named(movie: bytes) -> None:
    video, audio = sm.demux_video(movie), sm.demux_audio(movie)
    with pytest.raises(TypeError, match=r"must be of type VideoCodec .*, not AudioPackets"):
        sm.get_buffer_desc(audio)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"must be of type AudioCodec .*, not VideoPackets"):
        sm.get_abuffer_desc(video)  # type: ignore[arg-type]
    frames: Any = sm.decode_packets(video)
    with pytest.raises(TypeError, match="apply_bsf takes packets, not VideoFrames"):
        sm.apply_bsf(frames, "null")


def test_a_bad_filter_is_reported_where_no_frame_comes(movie: bytes) -> None:
    packets = sm.demux_video(movie, timestamp=(100, 101))
    with pytest.raises(sm.FilterError, match="nope"):
        sm.decode_packets(packets, "nope")
    with pytest.raises(sm.FilterError, match="nope"):
        sm.VideoDecoder(packets.codec, filter_desc="nope")


def test_a_bad_value_of_a_decoder_option_is_not_the_fault_of_the_file(movie: bytes) -> None:
    config = sm.decode_config(decoder_options={"threads": "abc"})
    with pytest.raises(
        ValueError, match="option 'threads' of decoder 'h264' does not take the value 'abc'"
    ) as e:
        sm.decode_packets(sm.demux_video(movie), None, config)
    assert not isinstance(e.value, sm.MediaError)


def test_packets_of_another_codec_are_refused_by_a_decoder(movie: bytes) -> None:
    other = sm.demux_video(make_video(index_planes(3, 64, 48)))
    decoder = sm.VideoDecoder(sm.demux_video(movie).codec)
    with pytest.raises(ValueError, match="was made for h264, but the packets are ffv1"):
        decoder.decode(other)
    sound = sm.AudioDecoder(sm.demux_audio(make_audio(make_tone(8000, 16000), 16000)).codec)
    slow = sm.demux_audio(make_audio(make_tone(8000, 8000), 8000))
    with pytest.raises(ValueError, match="pcm_s16le at 16000 Hz with 1 channel, but the packets"):
        sound.decode(slow)


def test_integers_and_arrays_of_numpy_count(movie: bytes) -> None:
    frames = sm.decode_packets(sm.demux_video(movie), None, num_frames=np.int64(7))  # type: ignore[call-overload]
    assert len(frames) == 7
    assert frames[np.array([1, 5])].pts == (frames.pts[1], frames.pts[5])  # type: ignore[index]
    assert frames[np.int64(3)].pts == frames.pts[3]  # type: ignore[index]


def test_a_graph_with_another_time_base_than_its_frames_is_refused(movie: bytes) -> None:
    packets = sm.demux_video(movie)
    graph = sm.FilterGraph(sm.get_buffer_desc(packets) + ",buffersink")
    with pytest.raises(sm.FilterError, match="time_base"):
        graph.add_frames(sm.decode_packets(packets, "fps=5"))


def test_a_tensor_that_numpy_cannot_view_is_a_type_error() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match="1-D uint8"):
        sm.demux_image(torch.zeros(4, requires_grad=True))


def test_audio_with_a_gap_says_where_its_chunks_stand() -> None:
    """Matroska may have gaps in audio; samples after a gap keep their times."""
    whole = make_audio(make_tone(8000, 8000), 8000, codec="flac", format="matroska")
    target = io.BytesIO()
    with av.open(io.BytesIO(whole)) as source, av.open(target, "w", format="matroska") as sink:
        stream = sink.add_stream_from_template(source.streams.audio[0])
        for packet in source.demux(source.streams.audio[0]):
            if packet.size and not 0.4 <= packet.pts * packet.time_base < 0.7:
                packet.stream = stream
                sink.mux(packet)
    frames = sm.decode_packets(sm.demux_audio(target.getvalue()), None)
    times = [pts * float(frames.time_base) for pts in frames.pts if pts is not None]
    np.testing.assert_allclose(frames.timestamps, times, atol=1e-3)
    assert max(np.diff(frames.timestamps)) > 0.25


def test_each_of_several_outputs_without_a_label_can_be_had(movie: bytes) -> None:
    frames = sm.decode_packets(sm.demux_video(movie), None)
    graph = sm.FilterGraph("split,hflip")
    assert graph.outputs == ("out0", "out1")
    graph.add_frames(frames)
    graph.flush()
    for key in graph.outputs:
        got = graph.get_frames(key=key)
        assert got is not None
        assert len(got) == len(frames)


def test_what_cannot_be_pickled_is_named(movie: bytes) -> None:
    pool = sm.StoragePool(8, pin_memory=False)
    with sm.Demuxer(movie) as demuxer, sm.Muxer(io.BytesIO(), format="mp4") as muxer:
        muxer.write(muxer.add_remux_stream(demuxer.video_codec), demuxer.demux_video())
        owners = demuxer, muxer, sm.AudioDecoder(demuxer.audio_codec), sm.FilterGraph("null"), pool
        for owner in owners:
            with pytest.raises(
                TypeError, match=f"^{type(owner).__name__} objects are not picklable: the"
            ):
                pickle.dumps(owner)
