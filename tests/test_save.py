"""save_video, save_audio and cut: equal for lossless codecs, close and complete for lossy ones."""

from __future__ import annotations

import io
import wave
from collections.abc import Iterator
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import av
import numpy as np
import numpy.typing as npt
import pytest
from effort import each
from field_coded import field_coded_file
from test_image_files import drawing
from test_mux import indices, psnr

import spdl_media as sm
from spdl_media.encode import VideoEncoder
from spdl_media.testing import (
    AudioTrack,
    VideoTrack,
    frame_index,
    index_frames,
    index_planes,
    index_samples,
    make_audio,
    make_media,
    make_tone,
    make_video,
)

Array = npt.NDArray[Any]

VIDEO = np.stack([np.roll(drawing(), 3 * shift, 1) for shift in range(12)])
"""Make a moving drawing, whose edge reduces the quality of lossy codecs by some decibels."""


def saved(frames: Any, *, format: str = "matroska", **options: Any) -> bytes:
    file = io.BytesIO()
    sm.save_video(file, frames, format=format, **options)
    return file.getvalue()


@each(
    "format,encoder",
    [
        ("matroska", "ffv1"),
        ("avi", "ffvhuff"),
        ("avi", "huffyuv"),
        ("mov", "png"),
        ("nut", "rawvideo"),
    ],
)
def test_lossless_video_holds_the_same_numbers(format: str, encoder: str) -> None:
    data = saved(VIDEO, frame_rate=25, format=format, encoder=encoder)
    assert np.array_equal(sm.load_video(data).array, VIDEO)
    assert sm.demux_video(data).frame_rate == 25


@each(
    "pix_fmt",
    "gray yuv420p yuv422p yuv444p yuvj444p yuv420p10le gbrp10le gray16le rgba".split(),
)
def test_lossless_codecs_keep_the_format_of_frames(pix_fmt: str, rng: np.random.Generator) -> None:
    shapes = {"rgba": (3, 48, 64, 4), "gray": (3, 48, 64), "yuv420p": (3, 1, 72, 64)}
    shape = shapes.get(pix_fmt, shapes.get(pix_fmt.removesuffix("10le"), (3, 3, 48, 64)))
    if pix_fmt == "yuv422p":
        shape = (3, 1, 96, 64)
    if pix_fmt == "gray16le":
        shape = (3, 1, 48, 64)
    top, dtype = (1023, "u2") if "10" in pix_fmt else (255, "u1")
    array = rng.integers(0, top, shape).astype("u2" if pix_fmt == "gray16le" else dtype)
    frames = sm.frames_from_array(array, pix_fmt)
    decoded = sm.decode_packets(
        sm.demux_video(saved(frames, encoder="ffv1")), sm.get_video_filter_desc(pix_fmt=pix_fmt)
    )
    assert np.array_equal(sm.convert_frames(decoded).array.reshape(array.shape), array)


LOSSY: list[tuple[str, dict[str, Any], float]] = [
    ("mp4", {}, 33),
    ("mp4", {"encoder_options": {"crf": 12}}, 35),
    ("mp4", {"encoder": "libx265"}, 33),
    ("mp4", {"encoder": "libsvtav1"}, 33),
    ("webm", {"encoder_options": {"cpu-used": 8, "deadline": "realtime"}}, 33),
    ("avi", {"encoder_options": {"qmin": 1, "qmax": 2}}, 33),
]


@each("format,options,least", LOSSY)
def test_lossy_video_is_as_near_as_stated(
    format: str, options: dict[str, Any], least: float
) -> None:
    try:
        data = saved(VIDEO, frame_rate=25, format=format, **options)
    except ValueError as error:
        if "has no encoder" in str(error):
            pytest.skip(str(error))
        raise
    loaded = sm.load_video(data).array
    assert loaded.shape == VIDEO.shape
    assert psnr(loaded, VIDEO) > least


def test_frames_of_any_kind_in_any_number() -> None:
    frames = sm.frames_from_array(VIDEO, frame_rate=25)

    def one_by_one() -> Iterator[sm.ImageFrames]:
        yield from frames

    for given in (list(VIDEO), frames, one_by_one(), [frames[:5], frames[5:]], sm.to_numpy(VIDEO)):
        data = saved(given, frame_rate=25, encoder="ffv1")
        assert np.array_equal(sm.load_video(data).array, VIDEO)
    torch = pytest.importorskip("torch")
    tensor = torch.from_numpy(VIDEO).permute(0, 3, 1, 2)
    data = saved(tensor, encoder="ffv1", layout="NCHW")
    assert np.array_equal(sm.load_video(data).array, VIDEO)


def test_frames_keep_their_times_unless_a_rate_is_given() -> None:
    source = make_video(index_planes(40, 64, 48), frame_rate=10)
    frames = sm.decode_packets(sm.demux_video(source, timestamp=(1, 3)), filter_desc=None)
    kept = saved(frames[::4], encoder="ffv1")
    times = sm.decode_packets(sm.demux_video(kept)).timestamps
    assert times == pytest.approx([0, 0.4, 0.8, 1.2, 1.6])
    even = saved(frames[[10, 3, 3]], frame_rate=5, encoder="ffv1")
    assert indices(even) == [20, 13, 13]
    assert sm.decode_packets(sm.demux_video(even)).timestamps == pytest.approx([0, 0.2, 0.4])
    with pytest.raises(sm.EncodeError, match=r"frame 1 is not after .* but 0\.7 s earlier"):
        saved(frames[[10, 3, 3]])
    # FFmpeg makes decoding times for it.
    odd = make_video(index_planes(9, 64, 48), codec="mpeg2video", format="asf", max_b_frames=2)
    remedy = "place them evenly: frame_rate= of save_video"
    with pytest.raises(sm.EncodeError, match=remedy):
        sm.cut(odd, io.BytesIO(), None, None, format="matroska", encoder="ffv1")


def test_rates_as_floats_are_those_that_they_stand_for() -> None:
    for rate in (30000 / 1001, 29.97002997, (30000, 1001)):
        assert sm.demux_video(saved(VIDEO, frame_rate=rate, format="mp4")).frame_rate == Fraction(
            30000, 1001
        )
    for value, match in ((2**31, "below 2"), (1e-320, "positive"), (float("nan"), "a number")):
        for name in ("frame_rate", "time_base", "sample_aspect_ratio"):
            with pytest.raises(ValueError, match=f"{name} must be {match}"):
                sm.video_encode_config(width=64, height=48, **{name: value})


@each(
    "format,encoder",
    [
        *(("mp4", "libx264"), ("matroska", "ffv1"), ("avi", "mpeg4"), ("mov", "mpeg4")),
        *(("matroska", "libvpx"), ("matroska", "mjpeg")),
    ],
)
def test_colours_of_frames_are_kept(format: str, encoder: str) -> None:
    """If the file cannot state BT.709 or full range, the values are converted."""
    graph = sm.FilterGraph("scale=out_color_matrix=bt709:out_range=pc,format=yuv420p")
    graph.add_frames(sm.frames_from_array(VIDEO))
    graph.flush()
    frames = graph.get_frames()
    assert isinstance(frames, sm.VideoFrames)
    assert (frames.colorspace, frames.color_range) == ("bt709", "pc")
    best = {"libx264": {"qp": 1}, "ffv1": {}, "libvpx": {"crf": 4, "b": 10**8}}
    options = best.get(encoder, {"qmin": 1, "qmax": 1})
    data = saved(frames, format=format, encoder=encoder, encoder_options=options)
    assert psnr(sm.load_video(data).array, VIDEO) > 34


def test_orientation_of_frames_is_written() -> None:
    source = make_video(index_planes(3, 64, 48), format="mp4", codec="libx264", orientation=6)
    config = sm.decode_config(orient=False)
    frames = sm.decode_packets(sm.demux_video(source), "null", decode_config=config)
    assert (frames.width, frames.orientation) == (64, 6)
    data = saved(frames, format="mp4", encoder_options={"qp": 0})
    assert np.array_equal(sm.load_video(data).array, sm.load_video(source).array)
    upright = sm.decode_packets(sm.demux_video(source), "null")
    data = saved(upright, format="mp4", encoder_options={"qp": 0})
    assert sm.demux_video(data).orientation == 1
    assert np.array_equal(sm.load_video(data).array, sm.load_video(source).array)


def test_audio_goes_beside_video_and_lies_beside_it() -> None:
    samples = index_samples(12 * 4000, 2).T
    data = saved(VIDEO, frame_rate=4, encoder="ffv1", audio=(samples / 2**15, 16000))
    assert sm.load_audio(data).shape == pytest.approx((2, 48000), abs=1024)
    with sm.Demuxer(data) as demuxer:
        chunks = list(demuxer.streaming_demux([0, 1], duration=0.5))
    assert all(len(chunk) == 2 for chunk in chunks[:-1])


@each(
    "format,dtype",
    [("wav", d) for d in ("u1", "i2", "i4", "f4", "f8")] + [("aiff", "i2"), ("flac", "i2")],
)
def test_lossless_audio_holds_the_same_numbers(format: str, dtype: str) -> None:
    samples = (index_samples(9000, 3).T.astype("i8") >> (8 if dtype == "u1" else 0)).astype("i8")
    samples = (samples + 128 if dtype == "u1" else samples).astype(dtype)
    samples = samples / 2**15 if dtype.startswith("f") else samples
    file = io.BytesIO()
    sm.save_audio(file, samples.astype(dtype), 8000, format=format)
    decoded = sm.decode_packets(sm.demux_audio(file.getvalue()), filter_desc=None)
    array = sm.convert_frames(decoded).array
    assert decoded.sample_rate == 8000
    assert np.array_equal(array if decoded.sample_fmt.endswith("p") else array.T, samples)


def test_loaded_audio_is_saved_at_its_rate() -> None:
    """A rate that had to be given could be another one than that of the samples."""
    loaded = sm.load_audio(
        make_audio(index_samples(9000, 2), 8000), sample_rate=16000, sample_fmt="s16p"
    )
    file = io.BytesIO()
    sm.save_audio(file, loaded, format="wav")
    movie = saved(VIDEO, format="matroska", audio=loaded)
    for data in (file.getvalue(), movie):
        assert sm.load_audio(data).sample_rate == 16000


def test_lossy_audio_is_near(tmp_path: Path) -> None:
    tone = (make_tone(48000, 48000, (440, 1000)).T / 2**15).astype(np.float32)
    for name in ("a.m4a", "a.mp3", "a.opus"):
        sm.save_audio(tmp_path / name, tone, 48000, bit_rate=128_000)
        loaded = sm.load_audio(tmp_path / name).array
        assert 48000 <= loaded.shape[1] < 48000 + 1152
        assert np.abs(loaded[:, 4800:43200] - tone[:, 4800:43200]).mean() < 0.02


@each(
    "encoder,size,num_frames",
    [("aac", 1024, 3 + 1 / 1024), ("mp2", 1152, 4), ("ac3", 1536, 3), ("eac3", 1536, 3)],
)
def test_the_last_samples_of_an_mp4_are_written(encoder: str, size: int, num_frames: float) -> None:
    """The edit list was too short for a last frame of few samples, and MP2 and AC-3 lacked their delay."""
    count, file = round(size * num_frames), io.BytesIO()
    tone = np.sin(np.arange(count) / 9).astype(np.float32)[None] / 2
    sm.save_audio(file, tone, 48000, format="mp4", encoder=encoder)
    loaded = sm.load_audio(file.getvalue()).array
    assert count <= loaded.shape[1] < count + size
    assert np.abs(loaded[:, count - 256 : count] - tone[:, -256:]).mean() < 0.05


@each("size", [1, 671, 1151])
def test_short_mp2_is_read_again_and_whole(size: int) -> None:
    """A single frame was written, of which readers do not tell the format, without the last samples."""
    file, tone = io.BytesIO(), np.sin(np.arange(size) / 9).astype(np.float32)[None] / 2
    sm.save_audio(file, tone, 48000, format="mp2")
    loaded = sm.load_audio(file.getvalue()).array[:, 481:]  # behind the encoder's delay
    assert np.abs(loaded[:, :size] - tone).mean() < 0.01
    assert np.abs(loaded[:, size + 32 :]).max() < 0.05


@each("format,size", [("mp4", 50000), ("mp4", 500), ("mov", 49153)])
def test_aac_of_an_mp4_has_the_samples_that_were_saved(format: str, size: int) -> None:
    # The encoder's padding at the end is not decoded, and the duration is that of the samples.
    file = io.BytesIO()
    samples = np.sin(np.arange(size, dtype=np.float32) / 9)
    sm.save_audio(file, samples, 44100, format=format, encoder="aac")
    data, audio = file.getvalue(), sm.probe(file.getvalue()).audio
    assert audio is not None
    assert audio.duration == pytest.approx(size / 44100)
    assert sm.load_audio(data).shape == sm.load_audio(data, (0, 9)).shape == (1, size)
    assert len(sm.decode_packets(sm.demux_audio(data))) == size


@each("peak", [float("nan"), float("inf"), 32768.0])
def test_samples_that_are_no_audio_are_refused(peak: float) -> None:
    """LAME aborts the process for such samples."""
    samples = np.zeros((2, 9000), np.float32)
    samples[1, 5000:] = peak
    for format in ("mp3", "flac", "ogg"):
        with pytest.raises(
            sm.EncodeError, match=rf"reach {peak:g}, but floats must be from -1 to 1"
        ):
            sm.save_audio(io.BytesIO(), samples, 48000, format=format)
    file = io.BytesIO()
    sm.save_audio(file, samples, 48000, format="wav")
    assert np.array_equal(sm.load_audio(file.getvalue()).array, samples, equal_nan=True)


SOUNDS = [
    (
        "mp3",
        12345,
        1,
        r"rate 12345 is not supported .* encoder\. Supported sample rates: 44100, 48000, .*8000\)",
    ),
    ("mp3", 48000, 6, r"'5\.1' is not supported .* Supported channel layouts: mono, stereo\)"),
]


@each("format,sample_rate,channels,message", SOUNDS)
def test_sound_that_a_format_does_not_take(
    format: str, sample_rate: int, channels: int, message: str
) -> None:
    samples = np.zeros((channels, 999), np.float32)
    with pytest.raises(sm.EncodeError, match=message):
        sm.save_audio(io.BytesIO(), samples, sample_rate, format=format)


@each("sample_rate,num_channels", [(8000, 1), (48000, 6)])
def test_audio_that_mp2_does_not_take_is_aac(sample_rate: int, num_channels: int) -> None:
    file = io.BytesIO()
    silence = np.zeros((num_channels, sample_rate), np.float32)
    sm.save_audio(file, silence, sample_rate, format="mpegts")
    frames = sm.decode_packets(sm.demux_audio(file.getvalue()))
    assert sm.probe(file.getvalue()).streams[0].codec == "aac"
    assert (frames.sample_rate, frames.num_channels) == (sample_rate, num_channels)


@pytest.mark.parametrize("sample_rate", [8000, 22050, 48000])
def test_flac_in_avi_may_end_in_a_short_frame(sample_rate: int) -> None:
    for count in (4800, 48000, 2 * sample_rate):
        file, samples = io.BytesIO(), np.arange(count, dtype=np.int16)
        sm.save_audio(file, samples, sample_rate, encoder="flac", format="avi")
        loaded = sm.load_audio(file.getvalue(), filter_desc=None).array
        np.testing.assert_array_equal(loaded.ravel(), samples)


def test_a_file_of_ac3_holds_ac3() -> None:
    file = io.BytesIO()
    sm.save_audio(file, np.zeros((2, 4800), np.float32), 48000, format="ac3")
    assert sm.probe(file.getvalue()).streams[0].codec == "ac3"


class Pipe:
    """A file object that cannot seek."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> int:
        self.data += data
        return len(data)


def test_formats_that_go_back_are_written_where_nothing_can_seek(tmp_path: Path) -> None:
    samples = index_samples(900, 8).T
    for format in ("wav", "aiff", "caf", "w64"):
        pipe = Pipe()
        sm.save_audio(pipe, samples, 8000, format=format)
        assert np.array_equal(sm.load_audio(pipe.data, filter_desc=None).array, samples.T)
    pipe = Pipe()
    sm.save_video(pipe, VIDEO, format="mp4")
    sm.save_video(tmp_path / "out.mp4", VIDEO)
    assert pipe.data == (tmp_path / "out.mp4").read_bytes()


@each("name", ["a.flv", "a.3gp", "a.3g2", "a.wmv", "a.wma", "a.mpg", "a.vob", "a.mxf"])
def test_formats_that_ffmpeg_does_not_write_well_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"/{name}: .* is not written\. Take MP4, "):
        sm.save_video(tmp_path / name, VIDEO)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_saved_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "out.mp4"
    for frames, message in (([], "no frames to save"), ([VIDEO, VIDEO[:, :40]], "is 128x40")):
        with pytest.raises(ValueError, match=message):
            sm.save_video(path, frames)
    samples = np.zeros(8, np.float32)
    for unrated in (samples, sm.convert_array(samples)):
        with pytest.raises(TypeError, match="an array has no sample rate: pass sample_rate="):
            sm.save_audio(tmp_path / "out.wav", unrated)
    on_device = sm.CUDABuffer(object(), (1, 8), np.float32, 0, sample_rate=8000)
    with pytest.raises(TypeError, match=r"copy it to the CPU: .*transfer_buffer_cpu"):
        sm.save_audio(tmp_path / "out.wav", on_device)
    sound = sm.frames_from_array(samples, sample_rate=8000)
    for wrong in ((), (samples,), (samples, 8000, 1), (sound, 8000)):
        with pytest.raises(TypeError, match=r"no sample rate|has a sample rate; pass it"):
            saved(VIDEO, audio=wrong)
    with pytest.raises(TypeError, match="has a sample rate; pass it without 8000"):
        sm.save_audio(tmp_path / "out.wav", sound, 8000)
    with pytest.raises(sm.EncodeError, match="'wav' holds no video"):
        sm.save_video(tmp_path / "out.wav", VIDEO)
    assert list(tmp_path.iterdir()) == []


def test_data_in_the_place_of_the_destination_is_named(tmp_path: Path) -> None:
    # Other libraries take the data first.
    message = "dst, the first argument, must be a path or a binary file object with write"
    saves: list[Any] = [sm.save_video, sm.save_image, partial(sm.save_audio, sample_rate=8000)]
    for save in saves:
        with pytest.raises(TypeError, match=message):
            save(VIDEO, tmp_path / "out")


@pytest.fixture(scope="module")
def long() -> bytes:
    """Make ten seconds with one key frame per second, and samples that contain their position."""
    video = VideoTrack(frames=index_planes(100, 64, 48), codec="libx264", gop_size=10)
    audio = AudioTrack(samples=index_samples(80000), sample_rate=8000)
    return make_media([video, audio], format="mov")


@each(
    "start,end,copied",
    [
        (2, 5, True),
        (2, 4.75, True),
        (1.55, 4, False),
        (None, 3, True),
        (7, None, True),
        (None, None, True),
    ],
)
def test_a_cut_holds_exactly_the_window(
    start: float | None, end: float | None, copied: bool, long: bytes
) -> None:
    file = io.BytesIO()
    assert sm.cut(long, file, start, end, format="mov") is copied
    first, stop = np.ceil((start or 0) * 10), np.ceil((10 if end is None else end) * 10)
    assert indices(file.getvalue()) == list(range(int(first), int(stop)))
    wanted = sm.load_audio(long, timestamp=(start, end)).array
    assert np.array_equal(sm.load_audio(file.getvalue()).array, wanted)
    times = sm.decode_packets(sm.demux_video(file.getvalue())).timestamps
    assert times[0] == pytest.approx(first / 10 - (start or 0))


def test_a_cut_of_rounded_times_between_two_ticks_of_the_encoder_keeps_all_frames() -> None:
    """Matroska states milliseconds: of 3.5 ticks it makes 3.495, and of 2.5 2.505."""
    data = make_video(
        index_planes(30, 64, 48), codec="mpeg2video", frame_rate=15, format="matroska"
    )
    file = io.BytesIO()
    assert not sm.cut(data, file, 0.5, 1.5, format="matroska")
    assert indices(file.getvalue()) == list(range(8, 23))


def test_a_cut_from_the_start_has_silence_where_audio_begins_after_the_video() -> None:
    audio = AudioTrack(samples=index_samples(8000), sample_rate=8000, start=4000)
    video = VideoTrack(frames=index_planes(20, 64, 48), codec="libx264")
    file = io.BytesIO()
    sm.cut(make_media([video, audio], format="mov"), file, None, 1, format="mov")
    wanted = np.concatenate([np.zeros((4000, 1), np.int16), audio.samples[:4000]])
    found = sm.decode_packets(sm.demux_audio(file.getvalue()), filter_desc=None)
    assert np.array_equal(sm.convert_frames(found).array, wanted)


def test_a_cut_is_exact_in_a_lossless_mode(long: bytes) -> None:
    file = io.BytesIO()
    assert not sm.cut(long, file, 2.35, 5.05, format="matroska", encoder="ffv1")
    loaded = sm.load_video(file.getvalue()).array
    assert np.array_equal(loaded, sm.load_video(long, timestamp=(2.35, 5.05)).array)


def test_a_cut_of_mpegts_copies_packets(tmp_path: Path) -> None:
    source, piece = tmp_path / "long.ts", tmp_path / "piece.ts"
    frames = index_planes(100, 64, 48)
    source.write_bytes(
        make_video(frames, codec="libx264", gop_size=10, frame_rate=10, format="mpegts")
    )
    whole = sm.load_video(source).array
    assert sm.cut(source, piece, 2, 5)
    assert np.array_equal(sm.load_video(piece).array, whole[20:50])
    assert not sm.cut(source, piece, 2.5, 5)
    assert sm.probe(piece).streams[0].codec == "h264"


def test_a_cut_of_matroska_copies_b_frames(tmp_path: Path) -> None:
    frames = index_planes(40, 64, 48)
    source = make_video(
        frames, codec="libx264", gop_size=10, frame_rate=10, max_b_frames=2, format="matroska"
    )
    assert sm.cut(source, tmp_path / "piece.mp4", 1, 3)
    assert np.array_equal(
        sm.load_video(tmp_path / "piece.mp4").array, sm.load_video(source).array[10:30]
    )
    assert sm.VideoFile(tmp_path / "piece.mp4").timestamps[0] == 0


@pytest.mark.parametrize(
    ("codec", "source", "format"),
    [
        ("libx264", "mp4", "mpegts"),
        ("libx264", "matroska", "mpegts"),
        ("libx264", "matroska", "avi"),
        ("mpeg4", "mp4", "mpegts"),
    ],
)
def test_a_cut_to_a_format_without_headers_has_them_in_its_packets(
    codec: str, source: str, format: str
) -> None:
    """FFmpeg's muxers add them to IDR frames of H.264 alone, and the window begins at another key frame."""
    options: dict[str, Any] = {"max_b_frames": 2, "open_gop": True} if codec == "libx264" else {}
    data = make_video(
        index_planes(40, 64, 48), codec=codec, gop_size=10, frame_rate=10, format=source, **options
    )
    file = io.BytesIO()
    assert sm.cut(data, file, 2, 3, format=format)
    assert np.array_equal(sm.load_video(file.getvalue()).array, sm.load_video(data).array[20:30])


@pytest.mark.parametrize(("source", "format"), [("matroska", "mp4"), ("mp4", "avi")])
def test_a_cut_of_fields_as_packets_has_the_times_of_frames(source: str, format: str) -> None:
    """In Matroska their decoding times go back, and AVI shows each packet for the time of a frame."""
    data = field_coded_file(index_planes(12, 64, 64), source, is_split=True)
    file = io.BytesIO()
    assert not sm.cut(data, file, 0, None, format=format)
    frames = sm.decode_packets(sm.demux_video(file.getvalue()), None)
    assert [frame_index(frame.planes[0]) for frame in frames] == list(range(12))
    assert frames.timestamps == sm.decode_packets(sm.demux_video(data), None).timestamps


@pytest.mark.parametrize(
    ("codec", "source", "format"),
    [("mpeg4", "avi", "mp4"), ("mpeg2video", "mpegts", "mpegts")],
)
def test_a_cut_between_frames_that_are_counted_keeps_all(
    codec: str, source: str, format: str
) -> None:
    """AVI and this encoder count frames. Half a frame was rounded to even, so two had one time."""
    data = make_video(index_planes(20, 64, 48), codec=codec, frame_rate=25, format=source)
    file = io.BytesIO()
    assert not sm.cut(data, file, 0.1, 0.7, format=format)
    packets = sm.demux_video(file.getvalue())
    frames = sm.decode_packets(packets, None)
    assert [frame_index(frame.planes[0]) for frame in frames] == list(range(3, 18))
    assert np.diff(frames.timestamps) == pytest.approx(1 / 25)
    assert packets.frame_rate == 25
    if format == "mp4":  # the first frame is shown 0.02 s after the start of the window
        assert frames.pts[0] * frames.time_base == Fraction(1, 50)


def test_b_frames_across_an_end_are_not_lost() -> None:
    frames = index_planes(60, 64, 48)
    for options in ({"max_b_frames": 3}, {"max_b_frames": 3, "open_gop": True}):
        source = make_video(frames, codec="libx265", gop_size=16, format="mp4", **options)
        for end in (2, 2.1, 2.2, 3.2, 4.8):
            file = io.BytesIO()
            sm.cut(source, file, 1.6, end, format="mp4")
            assert indices(file.getvalue()) == list(range(16, round(end * 10)))


def test_a_cut_takes_another_codec_where_the_format_does_not_take_that_of_the_source(
    long: bytes,
) -> None:
    file = io.BytesIO()
    options = {"cpu-used": 8, "deadline": "realtime"}
    sm.cut(long, file, 2, 2.5, format="webm", encoder_options=options)
    (video, audio) = sm.probe(file.getvalue()).streams
    assert (video.codec, audio.codec) == ("vp9", "opus")
    assert indices(file.getvalue()) == [20, 21, 22, 23, 24]
    vp8 = io.BytesIO()
    sm.cut(long, vp8, 2, 2.5, format="webm", encoder="libvpx", encoder_options=options)
    for made in (file, vp8):
        again = io.BytesIO()
        sm.cut(made.getvalue(), again, 0, 0.3, format="mov")
        assert sm.probe(again.getvalue()).streams[0].codec == "h264"
        assert indices(again.getvalue()) == [20, 21, 22]


def test_files_of_other_kinds_are_cut(media_dir: Path, tmp_path: Path) -> None:
    for name in ("rotated90_320x240.mp4", "vfr_320x240.mp4", "mpeg4_320x240.ts", "av1_video.mkv"):
        path = media_dir / "video" / name
        sm.cut(path, tmp_path / "cut.mp4", 0.3, 0.8)
        frames = sm.load_video(path, timestamp=(0.3, 0.8)).array
        loaded = sm.load_video(tmp_path / "cut.mp4").array
        assert loaded.shape == frames.shape
        assert psnr(loaded, frames) > 36


def test_a_cut_does_not_replace_its_source(long: bytes, tmp_path: Path) -> None:
    """The rest of the file would be lost."""
    path, link = tmp_path / "long.mov", tmp_path / "link.mov"
    path.write_bytes(long)
    link.symlink_to(path)
    for dst in (path, link):
        with pytest.raises(
            ValueError, match=r"long.mov is the source, and the cut would replace it"
        ):
            sm.cut(str(path), dst, 0, 1)
    assert path.read_bytes() == long
    assert sorted(tmp_path.iterdir()) == [link, path]


def test_a_window_without_anything_leaves_nothing(long: bytes, tmp_path: Path) -> None:
    with pytest.raises(sm.DemuxError, match=r"no frame and no sample in \[20, 30\)"):
        sm.cut(long, tmp_path / "cut.mp4", 20, 30)
    with pytest.raises(sm.DemuxError, match=r"no frame and no sample in \[-inf, 0\)"):
        sm.cut(long, tmp_path / "cut.mp4", None, 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("format", ["mp3", "flac", "wav"])
def test_a_cut_of_audio_leaves_its_cover_out(format: str) -> None:
    source, file = io.BytesIO(), io.BytesIO()
    with sm.Muxer(source, format="mp3") as muxer:
        config = sm.video_encode_config(width=64, height=48, encoder="png", pix_fmt="rgb24")
        cover = muxer.add_encode_stream(config)
        audio = muxer.add_encode_stream(sm.audio_encode_config(sample_rate=16000, num_channels=1))
        muxer.write(cover, sm.frames_from_array(np.zeros((1, 48, 64, 3), np.uint8)))
        tone = make_tone(32000, 16000).T / np.float32(2**15)
        muxer.write(audio, sm.frames_from_array(tone.astype(np.float32), sample_rate=16000))
    assert [stream.codec for stream in sm.probe(source.getvalue()).streams] == ["mp3", "png"]
    assert not sm.cut(source.getvalue(), file, None, 1, format=format)
    assert len(sm.probe(file.getvalue()).streams) == 1
    assert sm.load_audio(file.getvalue()).shape[1] >= 16000


@pytest.mark.parametrize("format", ["mp3", "flac", "wav"])
def test_video_is_not_cut_to_a_file_of_audio(format: str, long: bytes, tmp_path: Path) -> None:
    """MP3 got the first frame as its cover, and FLAC none."""
    with pytest.raises(sm.EncodeError, match=f"format '{format}' holds no video"):
        sm.cut(long, tmp_path / f"cut.{format}", 2, 3)


def test_only_audio_is_cut_of_audio(tmp_path: Path) -> None:
    samples = index_samples(16000, 2)
    sm.save_audio(tmp_path / "a.flac", samples.T, 8000)
    assert not sm.cut(tmp_path / "a.flac", tmp_path / "b.flac", 0.5, 1)
    decoded = sm.decode_packets(sm.demux_audio(tmp_path / "b.flac"), filter_desc=None)
    assert np.array_equal(sm.convert_frames(decoded).array, samples[4000:8000])


@each("source,encoder", [("mp3", None), ("mp4", "aac")])
def test_a_cut_of_compressed_audio_to_wav_holds_the_samples_of_the_window(
    source: str, encoder: str | None, tmp_path: Path
) -> None:
    """MP3 in a WAV would begin 1105 samples late, and nothing could decode AAC in one."""
    tone = np.sin(np.arange(32000) / 9).astype(np.float32)[None]
    file = io.BytesIO()
    sm.save_audio(file, tone, 16000, format=source, encoder=encoder)
    sm.cut(file.getvalue(), tmp_path / "piece.wav", 0.5, 1)
    wanted = sm.load_audio(file.getvalue(), timestamp=(0.5, 1)).array
    assert np.array_equal(sm.load_audio(tmp_path / "piece.wav").array, wanted)


def test_a_cut_of_flac_to_wav_is_pcm(tmp_path: Path) -> None:
    """FFmpeg writes FLAC into WAV, too, but other readers take PCM alone."""
    samples = index_samples(16000, 2)
    sm.save_audio(tmp_path / "a.flac", samples.T, 8000)
    sm.cut(tmp_path / "a.flac", tmp_path / "b.wav", 0.5, 1)
    with wave.open(str(tmp_path / "b.wav")) as file:
        assert file.readframes(4000) == samples[4000:8000].astype("<i2").tobytes()


def test_a_cut_to_another_codec_of_audio_does_not_take_the_bit_rate_of_the_source() -> None:
    """Opus does not take the 512 kb/s of float samples at 16 kHz."""
    source, file = io.BytesIO(), io.BytesIO()
    sm.save_audio(source, np.zeros((1, 16000), np.float32), 16000, format="wav")
    sm.cut(source.getvalue(), file, 0.5, 1, format="webm")
    assert sm.probe(file.getvalue()).streams[0].codec == "opus"


def test_a_cut_resamples_audio_whose_rate_the_encoder_does_not_take() -> None:
    source, file = io.BytesIO(), io.BytesIO()
    tone = np.sin(np.arange(44100) / 9).astype(np.float32)[None]
    sm.save_audio(source, tone, 44100, format="mp4")
    sm.cut(source.getvalue(), file, 0.25, 0.75, format="webm")
    found = sm.load_audio(file.getvalue(), sample_rate=44100).array
    wanted = sm.load_audio(source.getvalue(), timestamp=(0.25, 0.75)).array
    assert found.shape == wanted.shape
    assert np.corrcoef(found[0], wanted[0])[0, 1] > 0.99


@each("format", ["mp4", "ipod"])
def test_audio_that_a_format_does_not_take_is_cut_to_aac(format: str) -> None:
    made, file = io.BytesIO(), io.BytesIO()
    tone = (np.sin(np.arange(8000) / 9)[None] * 2**14).astype(np.int16)
    sm.save_audio(made, tone, 8000, format="mp3")
    sm.cut(made.getvalue(), file, 0.5, 1, format=format)
    assert sm.probe(file.getvalue()).streams[0].codec == "aac"
    assert sm.load_audio(file.getvalue()).sample_rate == 8000


@each("format,orientation", [("avi", 6), ("matroska", 2)])
def test_a_cut_is_upright_where_the_format_stores_no_orientation(
    format: str, orientation: int, long: bytes
) -> None:
    turned, file = io.BytesIO(), io.BytesIO()
    with sm.Demuxer(long) as demuxer, sm.Muxer(turned, format="mp4") as muxer:
        packets = demuxer.demux_video((0, 3))
        muxer.write(muxer.add_remux_stream(packets, orientation=orientation), packets)
    source = turned.getvalue()
    assert not sm.cut(source, file, 1, 2, format=format)
    loaded = sm.load_video(file.getvalue()).array
    assert psnr(loaded, sm.load_video(source, timestamp=(1, 2)).array) > 25


def test_the_start_of_wma_is_not_lost() -> None:
    """FFmpeg's decoder leaves out the first 2048 samples of what its encoder makes."""
    tone = np.sin(np.arange(48000) ** 1.7 / 3e4).astype(np.float32)[:, None] / 2
    source, file = make_audio(tone, codec="wmav2", format="asf", bit_rate=128000), io.BytesIO()
    sm.cut(source, file, 0.25, 0.75, format="matroska")
    found = sm.load_audio(file.getvalue()).array[:, :24000]
    wanted = sm.load_audio(source, timestamp=(0.25, 0.75)).array
    assert np.abs(found[:, 500:-500] - wanted[:, 500:-500]).mean() < 0.02


def test_videos_of_one_and_two_frames() -> None:
    frames = index_frames(2, 128, 128)
    for encoder in ("libx264", "libx265", "mpeg4", "ffv1"):
        for count in (1, 2, 2, 2):
            data = saved(frames[:count], encoder=encoder)
            assert indices(data) == list(range(count))


def test_the_second_of_two_frames_of_mpeg1_keeps_its_time_in_avi(tmp_path: Path) -> None:
    """AVI counts decoding times, which begin before second 0 for encoders with a delay."""
    sm.save_video(
        tmp_path / "clip.avi", index_frames(2, 64, 48), frame_rate=25, encoder="mpeg1video"
    )
    with sm.VideoFile(tmp_path / "clip.avi") as video:
        assert list(video.timestamps) == [0, 1 / 25]


def test_decoding_times_that_libx265_leaves_uninitialized_are_not_used() -> None:
    context = av.CodecContext.create("libx265", "w")
    config = sm.video_encode_config(width=64, height=64, frame_rate=30, encoder="libx265")

    class Uninitialized:  # with a value of the memory that FFmpeg refuses
        codec_context = context

        def encode(self, frame: av.VideoFrame | None) -> Iterator[Any]:
            for packet in context.encode(frame):
                packet.dts = packet.pts + 1
                yield packet

    encoder = VideoEncoder(Uninitialized(), config)
    assert list(encoder.encode(sm.frames_from_array(index_frames(2, 64, 64), frame_rate=30))) == []
    assert [(packet.pts, packet.dts) for packet in encoder.flush()] == [(0, 0), (1, 1)]


def test_index_frames_survive_the_default_encoder(tmp_path: Path) -> None:
    sm.save_video(tmp_path / "out.mp4", index_frames(40, 160, 120), frame_rate=10)
    assert indices(tmp_path / "out.mp4") == list(range(40))
