"""frames_from_array: frames have the values of the array, and share its memory if FFmpeg allows it."""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from effort import each

import spdl_media as sm
from spdl_media.formats import PIXEL_LAYOUTS
from spdl_media.image_frames import av_frames

Array = npt.NDArray[Any]

# Format, shape of a video of three frames, dtype, and which frames share its memory.
FORMATS: list[tuple[str, tuple[int, ...], str, bool]] = [
    ("rgb24", (3, 46, 64, 3), "uint8", True),
    ("bgra", (3, 46, 64, 4), "uint8", True),
    ("rgb48", (3, 46, 64, 3), "uint16", True),
    ("gray", (3, 46, 63, 1), "uint8", True),
    ("gray16", (3, 1, 46, 63), "uint16", True),
    ("grayf32", (3, 1, 46, 64), "float32", True),
    ("ya8", (3, 46, 64, 2), "uint8", False),
    ("gbrp", (3, 3, 45, 63), "uint8", True),
    ("yuv444p", (3, 3, 45, 63), "uint8", True),
    ("yuv420p", (3, 1, 69, 64), "uint8", True),
    ("yuv420p", (3, 1, 71, 64), "uint8", False),  # 47 rows of luma: chroma is rounded up
    ("yuv422p10le", (3, 1, 94, 64), "uint16", True),
    ("nv12", (3, 1, 69, 64), "uint8", True),
    ("nv21", (3, 1, 69, 64), "uint8", False),
    ("p010le", (3, 1, 69, 64), "uint16", True),
]


def shared_frames(frames: sm.VideoFrames, array: Array) -> list[bool]:
    """Return for each frame whether it shares the memory of an array."""
    start = array.__array_interface__["data"][0]
    stop = start + array.nbytes
    return [
        all(start <= plane.buffer_ptr < stop for plane in frame.planes)
        for frame in av_frames(frames)
    ]


@each("pix_fmt,shape,dtype,shared", FORMATS)
def test_frames_hold_the_numbers_and_where_possible_the_memory_of_the_array(
    pix_fmt: str, shape: tuple[int, ...], dtype: str, shared: bool, rng: np.random.Generator
) -> None:
    array = rng.integers(0, 250, shape).astype(dtype)
    frames = sm.frames_from_array(array, pix_fmt, frame_rate=25, pts=7)
    assert isinstance(frames, sm.VideoFrames)
    assert np.array_equal(sm.convert_frames(frames).array, array)
    assert (frames.pts, frames.timestamps) == ((7, 8, 9), (7 / 25, 8 / 25, 9 / 25))
    # A frame that ends at the end of a memory page is copied.
    assert any(shared_frames(frames, array)) == shared
    image = sm.frames_from_array(array[1], pix_fmt)
    assert isinstance(image, sm.ImageFrames)
    assert np.array_equal(sm.convert_frames(image).array, array[1])


def test_format_and_missing_axes_follow_from_the_array() -> None:
    rows: list[tuple[tuple[int, ...], str, dict[str, Any], str]] = [
        ((48, 64), "uint8", {}, "<ImageFrames: 64x48 gray>"),
        ((48, 64, 4), "uint8", {}, "<ImageFrames: 64x48 rgba>"),
        ((3, 48, 64), "uint8", {"layout": "NCHW"}, "<ImageFrames: 64x48 rgb24>"),
        ((48, 64), "uint16", {}, "<ImageFrames: 64x48 gray16le>"),
        ((48, 64, 1), "uint16", {}, "<ImageFrames: 64x48 gray16le>"),
        (
            (2, 48, 64, 1),
            "uint16",
            {},
            "<VideoFrames: 2 of 64x48 gray16le, 0.000 s to 0.033 s>",
        ),
        ((72, 64), "uint8", {"pix_fmt": "yuv420p"}, "<ImageFrames: 64x48 yuv420p>"),
        (
            (2, 48, 64),
            "uint8",
            {"pix_fmt": "gray"},
            "<VideoFrames: 2 of 64x48 gray, 0.000 s to 0.033 s>",
        ),
    ]
    for shape, dtype, options, text in rows:
        assert repr(sm.frames_from_array(np.zeros(shape, dtype), **options)) == text


def test_planes_of_an_odd_size(rng: np.random.Generator) -> None:
    planes = [rng.integers(0, 256, shape, np.uint8) for shape in ((5, 7), (3, 4), (3, 4))]
    image = sm.frames_from_array(tuple(planes), "yuv420p", color_range="pc", colorspace="bt709")
    assert isinstance(image, sm.ImageFrames)
    assert all(map(np.array_equal, image.planes, planes))
    assert (image.color_range, image.colorspace) == ("pc", "bt709")


def test_planes_of_a_palette_are_copied_wherever_numpy_put_them(rng: np.random.Generator) -> None:
    """PyAV shares no memory of a palette, and raised where there were enough bytes behind both planes."""
    memory = np.frombuffer(bytearray(3 * mmap.PAGESIZE), np.uint8)
    pages = memory[-memory.__array_interface__["data"][0] % mmap.PAGESIZE :]
    numbers = pages[: 48 * 64].reshape(48, 64)
    palette = pages[mmap.PAGESIZE :][:1024].view(np.uint32).reshape(1, 256)
    numbers[:], palette[:] = (
        rng.integers(0, 256, (48, 64)),
        rng.integers(0xFF000000, 2**32, (1, 256)),
    )
    mask = sm.encode_image(sm.frames_from_array((numbers, palette), "pal8"), "png")
    planes = sm.decode_packets(sm.demux_image(mask), filter_desc=None).planes
    assert all(map(np.array_equal, planes, (numbers, palette)))


def test_frames_keep_the_array_alive(rng: np.random.Generator) -> None:
    # With 46 rows, one frame at most ends at the end of a memory page, wherever NumPy puts them.
    array = rng.integers(0, 256, (2, 46, 64, 3), np.uint8)
    expected, users = array.copy(), sys.getrefcount(array)
    frames = sm.frames_from_array(array)
    assert any(shared_frames(frames, array))
    del frames
    gc.collect()
    assert sys.getrefcount(array) == users
    frames = sm.frames_from_array(array)
    del array
    gc.collect()
    assert np.array_equal(sm.convert_frames(frames).array, expected)


def test_arrays_that_cannot_be_shared_are_copied(rng: np.random.Generator) -> None:
    array = rng.integers(0, 256, (2, 3, 48, 64), np.uint8)
    array.flags.writeable = False
    for view, options in (
        (array, {"pix_fmt": "yuv444p"}),
        (array[:, :, ::-1], {"pix_fmt": "gbrp"}),
        (array[..., ::2], {"pix_fmt": "yuv444p"}),
    ):
        frames = sm.frames_from_array(view, **options)
        assert np.array_equal(sm.convert_frames(frames).array, view)
        assert shared_frames(frames, array) == [False, False]
    frames = sm.frames_from_array(array, "rgb24", layout="NCHW")
    assert np.array_equal(sm.convert_frames(frames, layout="NCHW").array, array)


def test_arrays_of_either_byte_order(rng: np.random.Generator) -> None:
    """Readers of TIFF and FITS give big-endian arrays."""
    image, samples = rng.integers(0, 2**16, (48, 64, 3), np.uint16), rng.random((2, 100))
    for order in "<>":
        frames = sm.frames_from_array(image.astype(f"{order}u2"))
        assert np.array_equal(sm.convert_frames(frames).array, image)
        audio = sm.frames_from_array(samples.astype(f"{order}f8"), sample_rate=8000)
        assert np.array_equal(sm.convert_frames(audio).array, samples)


@pytest.mark.skipif(sys.platform == "win32", reason="there is no mprotect")
def test_nothing_is_read_behind_the_last_page_of_an_array() -> None:
    """FFmpeg's SIMD code reads beyond the end of rows; no memory follows this array."""
    page, size = mmap.PAGESIZE, 4 * 48 * 64 * 3
    memory = mmap.mmap(-1, (size // page + 2) * page)
    whole = np.frombuffer(memory, np.uint8)
    end = (size // page + 1) * page
    address = ctypes.c_void_p(whole.__array_interface__["data"][0] + end)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(address, ctypes.c_size_t(page), 0) == 0
    array = whole[end - size : end].reshape(4, 48, 64, 3)
    frames = sm.frames_from_array(array)
    assert shared_frames(frames, array) == [True, True, True, False]
    graph = sm.FilterGraph("scale=63:47,format=yuv420p")
    graph.add_frames(frames)
    graph.flush()
    assert len(graph.get_frames() or ()) == 4


def test_filter_graphs_take_them(rng: np.random.Generator) -> None:
    array = rng.integers(0, 256, (3, 48, 64, 3), np.uint8)
    graph = sm.FilterGraph("hflip")
    graph.add_frames(sm.frames_from_array(array))
    graph.flush()
    frames = graph.get_frames()
    assert frames is not None
    assert np.array_equal(sm.convert_frames(frames).array, array[:, :, ::-1])
    waveform = rng.standard_normal((2, 1000), np.float32)
    graph = sm.FilterGraph("volume=0.5:precision=float")
    graph.add_frames(sm.frames_from_array(waveform, sample_rate=8000))
    graph.flush()
    sound = graph.get_frames()
    assert sound is not None
    assert np.array_equal(sm.convert_frames(sound).array, waveform / 2)


@pytest.mark.parametrize("channels", [1, 2, 6, 8, 9])
def test_audio(channels: int, rng: np.random.Generator) -> None:
    for dtype, name in (("float32", "flt"), ("int16", "s16"), ("uint8", "u8"), ("float64", "dbl")):
        waveform = rng.integers(0, 100, (channels, 500)).astype(dtype)
        planar = sm.frames_from_array(waveform, sample_rate=16000, pts=80)
        assert isinstance(planar, sm.AudioFrames)
        assert (planar.sample_fmt, planar.num_channels) == (f"{name}p", channels)
        assert (planar.sample_rate, planar.timestamp) == (16000, 80 / 16000)
        assert np.array_equal(sm.convert_frames(planar).array, waveform)
        packed = sm.create_reference_audio_frame(waveform.T, name, 16000, 0)
        assert np.array_equal(sm.convert_frames(packed).array, waveform.T)


def test_spdl_names_make_videos_of_single_frames() -> None:
    frames = sm.create_reference_video_frame(
        np.zeros((1, 48, 64), np.uint8), "gray8", (30000, 1001), pts=3
    )
    assert (len(frames), frames.pix_fmt, frames.pts) == (1, "gray", (3,))
    assert frames.timestamps == (3 * 1001 / 30000,)


def test_buffers_say_their_colours() -> None:
    planes = np.full((1, 72, 64), 100, np.uint8)
    buffer = sm.CPUBuffer(planes, colorspace="bt709", color_range="pc")
    frames = sm.frames_from_array(buffer, "yuv420p")
    assert (frames.colorspace, frames.color_range) == ("bt709", "pc")


def test_what_numpy_cannot_view_is_a_type_error() -> None:
    torch = pytest.importorskip("torch")
    wanted = [torch.zeros(4, 4, 3, requires_grad=True), torch.zeros(4, 4, 3, dtype=torch.bfloat16)]
    for given in (*wanted, sm.frames_from_array(np.zeros((2, 9), "f4"), sample_rate=8000)):
        with pytest.raises(TypeError, match=r"NumPy cannot view this .*: "):
            sm.frames_from_array(given)


def test_tensors_share_their_memory() -> None:
    torch = pytest.importorskip("torch")
    # With 50 rows, the planes of one frame at most end at the end of a memory page, wherever torch puts them.
    tensor = torch.arange(2 * 3 * 50 * 64, dtype=torch.uint8).reshape(2, 3, 50, 64)
    frames = sm.frames_from_array(tensor, "gbrp")
    assert any(shared_frames(frames, tensor.numpy()))
    assert np.array_equal(sm.convert_frames(frames).array, tensor.numpy())


@each("layout", ["NCHW", "NHWC"])
@each("pix_fmt", ["rgb24", "rgba", "gray", "gbrp", "yuv444p"])
def test_one_column_of_a_larger_array(pix_fmt: str, layout: Any) -> None:
    kind = PIXEL_LAYOUTS[pix_fmt]
    larger = np.arange(2 * 48 * 48 * 4).reshape(2, 48, 48, 4).astype(kind.dtype)
    column = larger[:, :, :1, : kind.channels]
    column = column if layout == "NHWC" else column.transpose(0, 3, 1, 2)
    frames = sm.frames_from_array(column, pix_fmt, layout=layout)
    assert np.array_equal(sm.convert_frames(frames, layout=layout).array, column)


MISUSE: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (np.zeros((5, 6, 3)), {}, TypeError, "must be uint8 or uint16, not float64: scale and convert"),
    (np.zeros((3, 5, 6), "u1"), {}, ValueError, r"\(3, 5, 6\) is neither gray .* layout='NCHW'"),
    (np.zeros((5, 6, 3), "f4"), {"pix_fmt": "rgb24"}, TypeError, "rgb24 takes uint8, not float32"),
    (np.zeros((3, 5, 6), "u1"), {"pix_fmt": "rgb24"}, ValueError, r"\(H, W, 3\), .* not \(3, 5, 6"),
    (np.zeros((5, 6, 3), "u1"), {"pix_fmt": "rgb25"}, ValueError, "'rgb25' is unknown"),
    (np.zeros((1, 9, 5), "u1"), {"pix_fmt": "yuv420p"}, ValueError, "odd width, 5, .* of planes"),
    (np.zeros((0, 5, 6, 3), "u1"), {}, ValueError, "0 frames of 6x5 have no pixels"),
    ((np.zeros((4, 4), "u1"),), {"pix_fmt": "yuv420p"}, ValueError, "3 planes, not 1"),
    ((np.zeros((4, 4), "u1"),), {}, ValueError, "planes need the name of their format"),
    (np.zeros((5, 6, 3), "u1"), {"colorspace": "bt70"}, ValueError, "Did you mean 'bt709'"),
    (np.zeros(5, "c8"), {"sample_rate": 8000}, TypeError, "host memory is needed"),
    (np.zeros(5, "f2"), {"sample_rate": 8000}, TypeError, "not float16"),
    (
        np.zeros((65, 2), "f4"),
        {"sample_rate": 8000},
        ValueError,
        r"64 channels.* \(C, N\), not \(65, 2\); array.T swaps",
    ),
    (np.zeros((5, 0), "f4"), {"sample_rate": 8000}, ValueError, r"\(C, N\)"),
    (np.zeros(5, "f4"), {"sample_rate": 8000, "sample_fmt": "fltq"}, ValueError, "not 'fltq'"),
    (np.zeros(5, "f4"), {"sample_rate": 8000, "sample_fmt": True}, ValueError, "not True"),
    (np.zeros(5, "f4"), {"sample_rate": 2**31}, ValueError, "sample_rate must be below"),
    (np.zeros(5, "f4"), {"sample_rate": 8000, "pts": 2**63}, ValueError, "pts must be below"),
    (np.zeros((5, 6, 3), "u1"), {"pts": -(2**64)}, ValueError, "pts must be below"),
]


@each("array,options,kind,message", MISUSE)
def test_wrong_arguments_are_reported(
    array: Any, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        sm.frames_from_array(array, **options)
