"""spdl_media.testing: media are exact and deterministic, and their index can be read back."""

from __future__ import annotations

import io
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import av
import numpy as np
import pytest
from effort import each
from hypothesis import given
from hypothesis import strategies as st

# One frame with a high index; index_frames would also draw all frames before it.
from spdl_media.testing import (
    AudioTrack,
    VideoTrack,
    _cells,
    frame_index,
    index_frames,
    index_planes,
    index_samples,
    make_audio,
    make_image,
    make_media,
    make_tone,
    make_video,
)

W, H, N = 64, 48, 20


def _decode(data: bytes, stream: int = 0) -> list[av.VideoFrame]:
    with av.open(io.BytesIO(data)) as container:
        video = container.streams.video[stream]
        video.codec_context.thread_count = 1
        return list(container.decode(video))


def _planes(frame: av.VideoFrame) -> list[np.ndarray]:
    planes = []
    for plane, component in zip(frame.planes, frame.format.components, strict=True):
        dtype = np.uint16 if component.bits > 8 else np.uint8
        rows = np.frombuffer(plane, dtype).reshape(-1, plane.line_size // np.dtype(dtype).itemsize)
        planes.append(rows[: plane.height, : plane.width])
    return planes


def _seconds(frames: list[av.VideoFrame]) -> list[Fraction]:
    return [frame.pts * Fraction(frame.time_base) for frame in frames]


def _indices(frames: list[av.VideoFrame]) -> list[int]:
    return [frame_index(frame.to_ndarray(format="rgb24")) for frame in frames]


def _samples(data: bytes) -> np.ndarray:
    with av.open(io.BytesIO(data)) as container:
        frames = list(container.decode(audio=0))
    arrays = [frame.to_ndarray() for frame in frames]
    planar = frames[0].format.is_planar
    channels = frames[0].layout.nb_channels
    return np.concatenate([a.T if planar else a.reshape(-1, channels) for a in arrays])


# Frames that contain their index


@given(st.integers(0, 2**18 - 1), st.integers(5, 40), st.integers(5, 40))
def test_index_reads_back_at_every_size(index: int, width: int, height: int) -> None:
    # Drawing all the frames before it would take too long.
    cells = _cells(index, width, height).astype(np.uint8)
    assert frame_index(cells) == index
    assert frame_index(np.repeat(cells[..., None], 3, axis=2) + np.uint8(63)) == index


@pytest.mark.parametrize(("width", "height"), [(5, 5), (64, 48), (33, 17)])
def test_frames_read_back(width: int, height: int) -> None:
    frames = index_frames(40, width, height)
    assert frames.shape == (40, height, width, 3)
    assert frames.dtype == np.uint8
    assert [frame_index(frame) for frame in frames] == list(range(40))
    assert [frame_index(frame[..., 1]) for frame in frames] == list(range(40))


@each(
    "pix_fmt, shapes",
    [
        ("gray", [(17, 33)]),
        ("yuv420p", [(17, 33), (9, 17), (9, 17)]),
        ("yuv422p", [(17, 33), (17, 17), (17, 17)]),
        ("yuv444p10le", [(17, 33)] * 3),
        ("yuva420p", [(17, 33), (9, 17), (9, 17), (17, 33)]),
        ("gbrp", [(17, 33)] * 3),
    ],
)
def test_planes_have_the_shapes_of_the_format(pix_fmt: str, shapes: list[tuple[int, int]]) -> None:
    frames = index_planes(3, 33, 17, pix_fmt)
    assert [[plane.shape for plane in planes] for planes in frames] == [shapes] * 3
    shift = 2 if "10" in pix_fmt else 0
    assert {plane.dtype.name for plane in frames[0]} == {"uint16" if shift else "uint8"}
    assert [frame_index((planes[0] >> shift).astype(np.uint8)) for planes in frames] == [0, 1, 2]


def test_shifted_frames_differ_everywhere() -> None:
    frame = index_frames(1, W, H)[0]
    assert (frame[1:] != frame[:-1]).any(axis=2).all()
    assert (frame[:, 1:] != frame[:, :-1]).any(axis=2).all()


TURNS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "blank": np.zeros_like,
    "white": lambda frame: np.full_like(frame, 255),
    "left to right": lambda frame: frame[:, ::-1],
    "upside down": lambda frame: frame[::-1],
    "half a turn": lambda frame: frame[::-1, ::-1],
    "quarter turn": np.rot90,
    "three quarters": lambda frame: np.rot90(frame, 3),
    "transposed": lambda frame: frame.swapaxes(0, 1),
    "transversed": lambda frame: np.rot90(frame.swapaxes(0, 1), 2),
}


@pytest.mark.parametrize("turn", TURNS.values(), ids=TURNS)
def test_blank_and_rotated_images_are_detected(turn: Callable[[np.ndarray], np.ndarray]) -> None:
    for frame in index_frames(40, W, H):
        with pytest.raises(ValueError, match="does not show the marks of index_frames"):
            frame_index(turn(frame))


@pytest.mark.parametrize("shape", [(4, 9), (9,), (1, 9, 9, 3)])
def test_other_images_have_no_index(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="an image of uint8"):
        frame_index(np.zeros(shape, np.uint8))
    with pytest.raises(ValueError, match="dtype float64"):
        frame_index(np.zeros((9, 9)))


def test_limits_of_the_index_are_stated() -> None:
    with pytest.raises(ValueError, match="at least 5 x 5, not 4 x 48"):
        index_frames(1, 4, 48)
    with pytest.raises(ValueError, match="num_frames must be 0 to 262144, not 262145"):
        index_planes(262145, 5, 5)
    with pytest.raises(ValueError, match="must be planar, such as 'yuv420p' or 'gbrp', not 'nv12'"):
        index_planes(1, W, H, "nv12")
    with pytest.raises(ValueError, match="integers of 8 to 16 bits, not 'grayf32le'"):
        index_planes(1, W, H, "grayf32le")


# Samples that contain their index


def test_samples_are_their_index() -> None:
    samples = index_samples(70000, 2)
    assert samples.shape == (70000, 2)
    assert samples.dtype == np.int16
    assert np.array_equal(samples[:, 0].astype(np.int64) % 65536, np.arange(70000) % 65536)
    assert np.array_equal((samples[:, 1] - samples[:, 0]).astype(np.uint16), [7919] * 70000)
    assert np.array_equal(index_samples(100, 2, start=500), samples[500:600])


def test_tone_has_its_frequencies() -> None:
    spectrum = np.abs(np.fft.rfft(make_tone(8000, 8000, (440, 1000)), axis=0))
    assert spectrum.argmax(axis=0).tolist() == [440, 1000]


# Video

LOSSLESS = [
    ("ffv1", "matroska", "yuv420p"),
    ("ffv1", "matroska", "yuv420p10le"),
    ("ffv1", "nut", "gray"),
    ("ffv1", "avi", "yuv444p"),
    ("libx264", "mp4", "yuv420p"),
    ("libx264", "matroska", "yuv444p"),
    ("libx264", "mpegts", "yuv420p10le"),
    ("libx265", "mp4", "yuv420p"),
    ("libvpx-vp9", "webm", "yuv420p"),
    ("rawvideo", "nut", "yuv420p"),
    ("utvideo", "avi", "yuv420p"),
]


@pytest.mark.parametrize(("codec", "format", "pix_fmt"), LOSSLESS)
def test_planes_come_back_bit_for_bit(codec: str, format: str, pix_fmt: str) -> None:
    frames = index_planes(N, W, H, pix_fmt)
    decoded = _decode(make_video(frames, codec=codec, format=format, pix_fmt=pix_fmt))
    assert len(decoded) == N
    for frame, planes in zip(decoded, frames, strict=True):
        assert frame.format.name == pix_fmt
        for got, put in zip(_planes(frame), planes, strict=True):
            assert np.array_equal(got, put)


@pytest.mark.parametrize(
    ("codec", "format", "pix_fmt"),
    [
        ("libx264rgb", "mp4", "rgb24"),
        ("libx264rgb", "matroska", "rgb24"),
        ("png", "mov", "rgb24"),
        ("huffyuv", "avi", "rgb24"),
        ("ffv1", "matroska", "bgr0"),
    ],
)
def test_rgb_comes_back_bit_for_bit(codec: str, format: str, pix_fmt: str) -> None:
    frames = index_frames(N, W, H)
    decoded = _decode(make_video(frames, codec=codec, format=format, pix_fmt=pix_fmt))
    assert np.array_equal([frame.to_ndarray(format="rgb24") for frame in decoded], frames)


def test_luma_goes_in_as_it_is_with_neutral_chroma() -> None:
    luma = index_frames(N, 33, 17)[..., 1]
    for frame, put in zip(_decode(make_video(luma)), luma, strict=True):
        y, u, v = _planes(frame)
        assert np.array_equal(y, put)
        assert np.unique([u, v]).tolist() == [128]


@pytest.mark.parametrize("codec", ["mpeg4", "mpeg2video"])
def test_lossy_video_keeps_its_index(codec: str) -> None:
    frames = index_planes(N, W, H)
    data = make_video(frames, codec=codec, format="mpegts", frame_rate=25, max_b_frames=2)
    assert _indices(_decode(data)) == list(range(N))


@pytest.mark.parametrize("format", ["mp4", "matroska", "mpegts"])
@pytest.mark.parametrize(("codec", "tolerance"), [("libx265", 0), ("libx264", 2)])
@pytest.mark.parametrize("open_gop", [False, True])
def test_b_frames_and_gops(codec: str, tolerance: int, format: str, open_gop: bool) -> None:
    frames = index_planes(N, W, H)
    data = make_video(
        frames, codec=codec, format=format, max_b_frames=2, gop_size=8, open_gop=open_gop
    )
    decoded = _decode(data)
    assert [frame.pts for frame in decoded] == sorted(frame.pts for frame in decoded)
    for frame, planes in zip(decoded, frames, strict=True):
        error = _planes(frame)[0].astype(int) - planes[0]
        assert np.abs(error).max() <= tolerance
    kinds = "".join("?IPB"[int(frame.pict_type)] for frame in decoded)
    # In an open GOP, B-frames are shown before the next key frame and refer to it.
    assert kinds == ("IBBPBBPBIBBPBBPBIBBP" if open_gop else "IBBPBBPPIBBPBBPPIBBP")


@pytest.mark.parametrize("format", ["mp4", "matroska", "mpegts"])
def test_irregular_times(format: str) -> None:
    pts = [3, 5, 10, 11, 40]
    track = VideoTrack(
        frames=index_planes(5, W, H), codec="libx264", pts=pts, time_base=Fraction(1, 100)
    )
    decoded = _decode(make_media([track], format=format))
    assert _seconds(decoded) == [Fraction(value, 100) for value in pts]
    assert _indices(decoded) == list(range(5))


def test_index_of_mp4_stands_where_it_was_asked() -> None:
    frames = index_planes(N, W, H)
    last = make_video(frames, codec="libx264", format="mp4")
    first = make_video(frames, codec="libx264", format="mp4", faststart=True)
    assert last.index(b"mdat") < last.index(b"moov")
    assert first.index(b"moov") < first.index(b"mdat")
    assert _indices(_decode(first)) == _indices(_decode(last)) == list(range(N))


def test_streams_keep_their_order_and_content() -> None:
    tracks = [
        VideoTrack(frames=index_planes(N, W, H), codec="libx264"),
        VideoTrack(frames=index_planes(2 * N, 32, 32)[N:], codec="libx264", orientation=6),
        AudioTrack(samples=make_tone(48000, 48000, (440, 660)), codec="aac"),
    ]
    data = make_media(tracks, format="mp4")
    with av.open(io.BytesIO(data)) as container:
        assert [stream.type for stream in container.streams] == ["video", "video", "audio"]
        # Packets of all streams are interleaved; otherwise the file cannot be streamed.
        first = [packet.stream_index for packet in container.demux()][: 2 * N]
    assert set(first) == {0, 1, 2}
    assert _indices(_decode(data, 0)) == list(range(N))
    assert _indices(_decode(data, 1)) == list(range(N, 2 * N))
    assert [_decode(data, stream)[0].rotation for stream in (0, 1)] == [0, -90]


# The first two rows of FFmpeg's display matrix.
MATRICES = {
    2: [-1, 0, 0, 0, 1, 0],
    3: [-1, 0, 0, 0, -1, 0],
    4: [1, 0, 0, 0, -1, 0],
    5: [0, 1, 0, 1, 0, 0],
    6: [0, 1, 0, -1, 0, 0],
    7: [0, -1, 0, -1, 0, 0],
    8: [0, -1, 0, 1, 0, 0],
}


@each("orientation", MATRICES)
@each("format", ["mp4", "mov"])
def test_orientation_is_written_as_a_display_matrix(orientation: int, format: str) -> None:
    track = VideoTrack(frames=index_planes(2, W, H), codec="libx264", orientation=orientation)
    frame = _decode(make_media([track], format=format))[0]
    matrix = np.frombuffer(bytes(frame.side_data[0]), np.int32)
    assert (matrix[:6] / 65536).tolist() == MATRICES[orientation]
    # Stored unchanged; the reader has to rotate.
    assert (frame.width, frame.height) == (W, H)


# Audio


@pytest.mark.parametrize(
    ("codec", "format"),
    [
        ("pcm_s16le", "wav"),
        ("pcm_s16be", "aiff"),
        ("pcm_s16le", "matroska"),
        ("flac", "flac"),
        ("flac", "ogg"),
        ("alac", "mov"),
        ("wavpack", "wv"),
    ],
)
@pytest.mark.parametrize("num_channels", [1, 2, 6])
def test_samples_come_back_bit_for_bit(codec: str, format: str, num_channels: int) -> None:
    samples = index_samples(70000, num_channels)
    decoded = _samples(make_audio(samples, 48000, codec=codec, format=format))
    assert decoded.dtype == np.int16
    assert np.array_equal(decoded, samples)


@pytest.mark.parametrize(
    ("dtype", "codec"), [("uint8", "pcm_u8"), ("int32", "pcm_s32le"), ("float32", "pcm_f32le")]
)
def test_other_sample_types_come_back(dtype: str, codec: str, rng: np.random.Generator) -> None:
    samples = rng.integers(0, 200, (5000, 2)).astype(dtype)
    assert np.array_equal(_samples(make_audio(samples, 8000, codec=codec)), samples)


@pytest.mark.parametrize(
    ("codec", "format"),
    [
        ("libmp3lame", "mp3"),
        ("aac", "adts"),
        ("aac", "mp4"),
        ("ac3", "ac3"),
        ("mp2", "mpegts"),
        ("libopus", "ogg"),
        ("vorbis", "ogg"),
    ],
)
def test_lossy_audio_keeps_its_tones(codec: str, format: str) -> None:
    data = make_audio(make_tone(48000, 48000, (440, 1000)), 48000, codec=codec, format=format)
    decoded = _samples(data)
    assert len(decoded) >= 48000
    spectrum = np.abs(np.fft.rfft(decoded[:48000], axis=0))
    assert np.abs(spectrum.argmax(axis=0) - [440, 1000]).max() <= 1


def test_audio_may_start_later() -> None:
    tracks = [
        VideoTrack(frames=index_planes(5, W, H), codec="libx264"),
        AudioTrack(samples=index_samples(8000), sample_rate=8000, codec="flac", start=1600),
    ]
    with av.open(io.BytesIO(make_media(tracks, format="matroska"))) as container:
        frame = next(container.decode(audio=0))
        assert frame.pts * Fraction(frame.time_base) == Fraction(1, 5)


# Stills


@each("codec", ["png", "bmp", "tiff", "ppm", "qoi", "jpeg2000", "libwebp", "apng"])
def test_rgb_stills_come_back_bit_for_bit(codec: str) -> None:
    picture = index_frames(8, 33, 17)[7]
    (frame,) = _decode(make_image(picture, codec=codec))
    assert np.array_equal(frame.to_ndarray(format="rgb24"), picture)


@pytest.mark.parametrize("codec", ["targa", "pam"])
def test_stills_without_a_container_come_back_bit_for_bit(codec: str) -> None:
    picture = index_frames(8, 33, 17)[7]
    decoder: Any = av.CodecContext.create(codec, "r")
    packet = av.Packet(make_image(picture, codec=codec))
    (frame,) = [*decoder.decode(packet), *decoder.decode(None)]
    assert np.array_equal(frame.to_ndarray(format="rgb24"), picture)


@pytest.mark.parametrize("codec", ["png", "tiff", "pgm", "jpeg2000", "gif"])
def test_gray_stills_come_back_bit_for_bit(codec: str) -> None:
    picture = index_frames(8, 33, 17)[7, ..., 0]
    (frame,) = _decode(make_image(picture, codec=codec))
    assert np.array_equal(frame.to_ndarray(format="rgb24"), np.stack([picture] * 3, axis=2))


@pytest.mark.parametrize("codec", ["png", "tiff", "libwebp"])
def test_alpha_comes_back(codec: str) -> None:
    picture = np.dstack([index_frames(8, 33, 17)[7], np.full((17, 33), 77, np.uint8)])
    (frame,) = _decode(make_image(picture, codec=codec))
    assert np.array_equal(frame.to_ndarray(format="rgba"), picture)


@pytest.mark.parametrize("codec", ["png", "tiff"])
def test_deep_stills_come_back(codec: str) -> None:
    picture = index_frames(8, 33, 17)[7].astype(np.uint16) * 257
    (frame,) = _decode(make_image(picture, codec=codec))
    assert np.array_equal(frame.to_ndarray(format="rgb48le"), picture)


def test_jpeg_is_close_and_its_quality_can_be_chosen() -> None:
    picture = index_frames(8, W, H)[7]
    good = make_image(picture, codec="mjpeg")
    poor = make_image(picture, codec="mjpeg", options={"qmin": "31", "qmax": "31"})
    assert len(poor) < len(good) / 5
    (frame,) = _decode(good)
    # Measured 1.9; the ripple is very hard to compress for JPEG.
    assert np.abs(frame.to_ndarray(format="rgb24").astype(int) - picture).mean() < 3
    assert _indices(_decode(poor)) == [7]


def test_avif_keeps_its_index() -> None:
    data = make_image(index_frames(8, W, H)[7], codec="libsvtav1")
    assert data[4:12] == b"ftypavif"
    assert _indices(_decode(data)) == [7]


def test_planes_of_a_still_need_their_format() -> None:
    planes = index_planes(3, W, H, "yuvj420p")[2]
    (frame,) = _decode(make_image(planes, codec="mjpeg", pix_fmt="yuvj420p"))
    assert frame.format.name == "yuvj420p"
    with pytest.raises(ValueError, match="planes need a pix_fmt"):
        make_image(planes, codec="mjpeg")


# Deterministic bytes


@pytest.mark.parametrize(
    "make",
    [
        lambda: make_video(index_planes(N, W, H), codec="libx264", format="mp4", max_b_frames=2),
        lambda: make_video(index_planes(N, W, H), codec="libx265", format="mpegts"),
        lambda: make_video(index_planes(N, W, H)),
        lambda: make_audio(make_tone(9000, 48000), codec="libopus", format="ogg"),
        lambda: make_image(index_frames(1, W, H)[0], codec="libwebp"),
    ],
)
def test_deterministic(make: Callable[[], bytes]) -> None:
    assert make() == make()


# Wrong arguments


@each(
    "arguments, message",
    [
        ({"codec": "nope"}, "this FFmpeg has no encoder 'nope'"),
        ({"codec": "libdav1"}, "no encoder 'libdav1'. (?!.*'libdav1d')"),  # which decodes
        ({"codec": "flac"}, "'flac' encodes audio, not video"),
        ({"format": "nope"}, "cannot make nope with ffv1"),
        ({"format": "webm"}, "'webm' format does not support 'ffv1'"),
        ({"pix_fmt": "nope"}, "planes need the name of their format .* not 'nope'"),
        ({"pix_fmt": "yuv444p"}, r"yuv444p have the shapes \[\(1, 48, 64\), .* not .*24, 32"),
        ({"options": {"crf9": "1"}}, "encoder 'ffv1' has no option 'crf9'"),
        ({"codec": "libx264", "options": {"qp": "zz"}}, "cannot make matroska with libx264"),
        ({"frame_rate": 0}, "frame_rate must be above 0, not 0"),
        ({"open_gop": True}, "open_gop needs codec"),
        ({"faststart": True}, "need format 'mp4' or 'mov', not 'matroska'"),
    ],
)
def test_wrong_arguments_of_video(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_video(index_planes(2, W, H), **arguments)


def test_planes_of_another_depth_are_refused() -> None:
    with pytest.raises(TypeError, match="yuv420p10le takes uint16, not uint8"):
        make_video(index_planes(2, W, H), pix_fmt="yuv420p10le")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"frames": []}, "frames is empty"),
        ({"pts": [1]}, "2 frames need as many pts, got 1"),
        ({"pts": [1, 1]}, r"pts must rise from frame to frame, not \[1, 1\]"),
        ({"orientation": 9}, "orientation must be one of 1 to 8, as in Exif, not 9"),
    ],
)
def test_wrong_arguments_of_a_video_track(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VideoTrack(**{"frames": index_planes(2, W, H), **arguments})


def test_frames_of_two_sizes() -> None:
    frames = [*index_planes(1, W, H), *index_planes(1, 32, 32)]
    with pytest.raises(ValueError, match="frame 1 is 32 x 32, the first one 64 x 48"):
        make_video(frames)


@each(
    "samples, arguments, message",
    [
        (np.zeros((5, 9), np.int16), {}, "with 1 to 8 channels, not of shape"),
        (np.zeros(5, np.int16), {}, "with 1 to 8 channels, not of shape"),
        (np.zeros((5, 1)), {}, "samples must be one of .*, not float64"),
        (index_samples(5), {"sample_rate": 0}, "sample_rate must be above 0"),
        (index_samples(5), {"codec": "ffv1"}, "'ffv1' encodes video, not audio"),
        (index_samples(5), {"codec": "flac", "options": {"nope": "1"}}, "has no option 'nope'"),
        (index_samples(5), {"sample_rate": 44100, "codec": "libopus", "format": "ogg"}, "libopus"),
    ],
)
def test_wrong_arguments_of_audio(
    samples: np.ndarray, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_audio(samples, **arguments)


@pytest.mark.parametrize(
    ("picture", "codec", "kind", "message"),
    [
        (np.zeros((9, 9, 3)), "png", TypeError, "uint8 or uint16, not float64"),
        (np.zeros((9, 9, 2), np.uint8), "png", ValueError, r"shape \(9, 9, 2\) is neither"),
        (np.zeros((9, 9, 3), np.uint8), "nope", ValueError, "this FFmpeg has no encoder 'nope'"),
    ],
)
def test_wrong_arguments_of_a_still(
    picture: np.ndarray, codec: str, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        make_image(picture, codec=codec)


def test_a_file_needs_a_stream() -> None:
    with pytest.raises(ValueError, match="tracks is empty"):
        make_media([])
