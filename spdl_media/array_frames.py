"""Make frames from arrays, for filter graphs, conversions and encoders.

The frames share the array's memory where FFmpeg supports its memory layout, and are copies otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Literal

import av
import numpy as np
import numpy.typing as npt

from spdl_media._checks import as_numpy, check_choice, check_int, check_positive, listed
from spdl_media._ffmpeg import is_pixel_format
from spdl_media.formats import COLOR_TABLES, SAMPLE_DTYPES, chroma_steps, pixel_layout, plane_views
from spdl_media.frames import AudioChunk, AudioFrames, new_frame
from spdl_media.image_frames import ImageFrames, VideoFrames
from spdl_media.timing import Rate, parse_rate

__all__ = ("create_reference_audio_frame", "create_reference_video_frame", "frames_from_array")

# The default pixel format of an array, by its dtype and number of channels.
_PIXEL_FORMATS = {
    ("uint8", 1): "gray",
    ("uint8", 3): "rgb24",
    ("uint8", 4): "rgba",
    ("uint16", 1): "gray16",
    ("uint16", 3): "rgb48",
    ("uint16", 4): "rgba64",
}
# Packed formats whose memory PyAV can share. It can also share planes of one component each.
_SHARED_PACKED = frozenset(
    av.VideoFormat(name, 16, 16).name  # adds the machine's byte order, such as "rgb48le"
    for name in "rgb24 bgr24 rgba bgra argb abgr rgb48 bgr48 rgba64 bgra64 gray gray16 grayf32".split()
)
_SHARED_PAIRS = frozenset({"nv12", "p010le", "p016le"})
# FFmpeg's SIMD code reads up to 64 bytes past the end of a plane. These must not reach an unmapped page.
_READ_BEHIND, _PAGE = 64, 4096
_MAX_CHANNELS = 64  # of FFmpeg's resampler


def frames_from_array(
    array: Any,
    pix_fmt: str | None = None,
    *,
    frame_rate: Rate = 30,
    pts: int = 0,
    layout: Literal["NCHW", "NHWC"] | None = None,
    colorspace: str | None = None,
    color_range: Literal["tv", "pc"] | None = None,
    sample_rate: int | None = None,
    sample_fmt: str | None = None,
) -> ImageFrames | VideoFrames | AudioFrames:
    """Make frames from an array: an image, a video or, with ``sample_rate=``, audio.

    Images and videos share the array's memory if FFmpeg supports its layout: packed RGB and gray, planar YUV
    and GBR, and NV12, if rows are contiguous and, with subsampled chroma, width and height even. Do not write
    to the array while such frames are in use. Other images, and audio, are copied.

    Args:
        array: NumPy array, CPU tensor, :class:`~spdl_media.CPUBuffer` or any other object that NumPy can
            view. An image has the shape and dtype that :func:`~spdl_media.convert_frames` gives for
            ``pix_fmt``: ``rgb24`` is ``(H, W, 3)`` uint8, 0 to 255, ``yuv420p`` is ``(1, H + H / 2, W)``. A
            video has a first axis N. The axis of a single channel may be left out. In any format, a tuple or
            list of arrays gives the planes one by one. Audio is ``(C, N)`` in planar formats, ``(N, C)`` in
            packed ones, or ``(N,)``.
        pix_fmt: FFmpeg's name of the pixel format. The default depends on dtype and channels: 8- or 16-bit
            gray, RGB or RGBA.
        frame_rate: Frames per second; ``frames.time_base`` is its inverse.
        pts: Timestamp of the first frame, in frames; for audio, in samples.
        layout: ``"NCHW"`` or ``"NHWC"`` for RGB and gray, if the order of the array's axes is not that of the
            format. An ``"NCHW"`` array for a packed format is copied; ``pix_fmt="gbrp"`` shares R, G, B
            planes.
        colorspace: FFmpeg's name of the YUV matrix, such as ``"bt709"``. The default is that of the buffer,
            or unspecified, which is treated as BT.601.
        color_range: ``"pc"`` (full) or ``"tv"`` (limited) for YUV. The default is that of the buffer, else
            full in the ``yuvj`` formats, else unspecified, which is treated as limited.
        sample_rate: Sample rate in Hz. Passing it means that the array is audio.
        sample_fmt: FFmpeg's name of the sample format. The default is the planar format of the array's dtype,
            such as ``"fltp"`` for float32.

    Returns:
        ``ImageFrames``, ``VideoFrames`` or ``AudioFrames``, which keep the array alive.

    Raises:
        ValueError: The shape does not fit the format, there is no frame, a name is unknown, or ``pts`` or
            ``sample_rate`` exceeds what FFmpeg can keep.
        TypeError: The dtype does not fit the format, or ``array`` is not an array in host memory.

    Thread safety: safe.

    Example:
        >>> sm.frames_from_array(np.zeros((30, 48, 64, 3), np.uint8), frame_rate=30)
        <VideoFrames: 30 of 64x48 rgb24, 0.000 s to 0.967 s>
        >>> sm.frames_from_array(np.zeros((2, 16000), np.float32), sample_rate=16000)
        <AudioFrames: ...>
    """
    first = limited("pts", check_int("pts", pts, at_least=None), 62)
    if sample_rate is not None:
        sample_rate = check_positive("sample_rate", sample_rate)
        return _audio(array, sample_fmt, sample_rate, first)
    rate = parse_rate(frame_rate)
    space = color_number("colorspace", colorspace or getattr(array, "colorspace", None))
    usual = "pc" if pix_fmt and pix_fmt.startswith("yuvj") else None
    given = color_range or getattr(array, "color_range", None) or usual
    levels = color_number("color_range", given)
    planes, like, single = _planes(array, pix_fmt, layout)
    frames = [_frame([plane[i] for plane in planes], like) for i in range(len(planes[0]))]
    for number, frame in enumerate(frames, start=first):
        frame.pts, frame.time_base, frame.duration = number, 1 / rate, 1
        frame.colorspace, frame.color_range = space, levels
    return ImageFrames(frames) if single else VideoFrames(frames)


def create_reference_video_frame(
    array: Any, pix_fmt: str, frame_rate: Rate, pts: int
) -> VideoFrames:
    """Make video frames from an array, as :func:`frames_from_array` does. The name is that of SPDL.

    Args:
        array: N frames: ``(N, H, W, 3)`` for ``rgb24``, ``(N, H, W)`` for ``gray8``.
        pix_fmt: FFmpeg's name of the pixel format.
        frame_rate: Frames per second; a tuple is ``(numerator, denominator)``.
        pts: Timestamp of the first frame, in frames.

    Raises:
        ValueError: The shape does not fit the format, or a name is unknown.
        TypeError: The dtype does not fit the format.

    Thread safety: safe.
    """
    values = _numpy(array)
    own = _layout_of(pix_fmt)
    # SPDL's gray frames have no channel axis. frames_from_array would take a 3-D array for one image.
    if own.channels == 1 and values.ndim == 3:
        values = np.expand_dims(values, -1 if own.kind == "packed" else -3)
    if values.ndim != 4:
        raise ValueError(f"a video is an array (N, ...) of frames, not of shape {values.shape}")
    frames = frames_from_array(values, pix_fmt, frame_rate=frame_rate, pts=pts)
    assert isinstance(frames, VideoFrames)
    return frames


def create_reference_audio_frame(
    array: Any, sample_fmt: str, sample_rate: int, pts: int
) -> AudioFrames:
    """Make audio frames from an array, as :func:`frames_from_array` does. The name is that of SPDL.

    Args:
        array: ``(C, N)`` for planar formats, ``(N, C)`` for packed ones, of the format's dtype. It is copied.
        sample_fmt: FFmpeg's name of the sample format, such as ``"fltp"``.
        sample_rate: Sample rate in Hz.
        pts: Timestamp of the first sample, in samples.

    Raises:
        ValueError: The shape does not fit the format, or the format is unknown.
        TypeError: The dtype does not fit the format.

    Thread safety: safe.
    """
    return _audio(array, sample_fmt, check_positive("sample_rate", sample_rate), pts)


def _numpy(array: Any) -> npt.NDArray[Any]:
    values = as_numpy(array)
    if values.dtype.kind not in "uif":
        raise TypeError(
            f"an array of numbers in host memory is needed, not {type(array).__name__} ({values.dtype}). "
            "Convert it, array.astype(np.uint8), or copy it to the CPU: tensor.cpu(), "
            "transfer_buffer_cpu(buffer)"
        )
    return values.astype(values.dtype.newbyteorder("="), copy=False)


def color_number(argument: str, name: str | None) -> int:
    """Return FFmpeg's number of a matrix, range, primaries or transfer; ``None`` is "unspecified".

    Raises:
        ValueError: FFmpeg has none of this name.
    """
    numbers = {known: number for number, known in COLOR_TABLES[argument].items()}
    numbers |= {"bt601": 6} if argument == "colorspace" else {}
    check_choice(argument, name, [*numbers, None])
    return numbers[name] if name else 0 if argument == "color_range" else 2


def _layout_of(pix_fmt: str) -> Any:
    own = pixel_layout(pix_fmt)
    if own is None:
        known = "makes no array" if is_pixel_format(pix_fmt) else "is unknown to this FFmpeg"
        raise ValueError(
            f"pixel format {pix_fmt!r} {known}. Take 'rgb24', 'gray', 'yuv420p' or another of the table of "
            "spdl_media.formats, or give a tuple with an array for each plane"
        )
    return own


def _planes(
    array: Any, pix_fmt: str | None, layout: Literal["NCHW", "NHWC"] | None
) -> tuple[list[npt.NDArray[Any]], av.VideoFrame, bool]:
    """Return the planes of all frames, a frame of their size and format, and whether it is one image."""
    check_choice("layout", layout, ("NCHW", "NHWC", None))
    if isinstance(array, tuple | list):
        return _given_planes([_numpy(plane) for plane in array], pix_fmt)
    values = _numpy(array)
    if pix_fmt is None:
        layout = layout or "NHWC"  # also for gray16, whose own layout is "NCHW"
        channels = 1 if values.ndim < 3 else values.shape[-3 if layout == "NCHW" else -1]
        if values.dtype.name not in ("uint8", "uint16"):
            raise TypeError(
                f"an image must be uint8 or uint16, not {values.dtype}: scale and convert the array, or "
                "state its format, such as pix_fmt='grayf32'"
            )
        pix_fmt = _PIXEL_FORMATS.get((values.dtype.name, channels))
        if pix_fmt is None:
            raise ValueError(
                f"an array of shape {values.shape} is neither gray (H, W), RGB (H, W, 3) nor RGBA (H, W, 4), "
                "nor N of these, (N, H, W, 1) if gray. Move its axes, or state them: layout='NCHW', "
                "pix_fmt='yuv420p'"
            )
    own = _layout_of(pix_fmt)
    first = (own.kind != "packed") if layout is None else layout == "NCHW"
    axis = -3 if first else -1
    if own.channels == 1 and (values.ndim == 2 or (values.ndim == 3 and values.shape[axis] != 1)):
        values = np.expand_dims(values, axis)
    height, width = (0, 0, *(values.shape[-2:] if first else values.shape[-3:-1]))[-2:]
    if own.kind == "tiled":  # the rows of luma, followed by those of both chroma planes
        height = height * own.chroma_rows // (own.chroma_rows + 1)
    if values.ndim not in (3, 4) or values.shape[-3:] != own.shape(width, height, layout):
        sides = "(1, rows of all planes, W)" if own.kind == "tiled" else f"(H, W, {own.channels})"
        shape = f"({own.channels}, H, W)" if first and own.kind != "tiled" else sides
        raise ValueError(
            f"an image of {pix_fmt} has the shape {shape}, and a video N in front, not {values.shape}"
        )
    if not own.tiles(width):
        raise ValueError(
            f"{pix_fmt} of an odd width, {width}, makes no rectangle: give a tuple of planes"
        )
    _check_dtype(values, np.dtype(own.dtype), pix_fmt)
    batch = values if values.ndim == 4 else values[None]
    like = _checked_frame(len(batch), width, height, pix_fmt)
    shapes = [view.shape for view in plane_views(like)]
    return own.places(batch, shapes, layout), like, values.ndim == 3


def _given_planes(
    planes: list[npt.NDArray[Any]], pix_fmt: str | None
) -> tuple[list[npt.NDArray[Any]], av.VideoFrame, bool]:
    if pix_fmt is None or not is_pixel_format(pix_fmt):
        raise ValueError(f"planes need the name of their format as pix_fmt=, not {pix_fmt!r}")
    axes = [view.ndim for view in plane_views(av.VideoFrame(16, 16, pix_fmt))]
    if len(axes) != len(planes):
        raise ValueError(f"{pix_fmt} has {len(axes)} planes, not {len(planes)}")
    single = planes[0].ndim == axes[0]
    planes = [plane[None] for plane in planes] if single else planes
    count, height, width = (*planes[0].shape, 0, 0, 0)[:3]
    like = _checked_frame(count, width, height, pix_fmt)
    shapes = [(count, *view.shape) for view in plane_views(like)]
    if (given := [plane.shape for plane in planes]) != shapes:
        raise ValueError(
            f"planes of {width}x{height} {pix_fmt} have the shapes {shapes}, not {given}"
        )
    for plane, view in zip(planes, plane_views(like), strict=True):
        _check_dtype(plane, view.dtype.newbyteorder("="), pix_fmt)
    return planes, like, single


def _checked_frame(count: int, width: int, height: int, pix_fmt: str) -> av.VideoFrame:
    """Return a frame of this size and format, after a check that no number is 0."""
    if not (count and width and height):
        raise ValueError(f"{count} frames of {width}x{height} have no pixels")
    return av.VideoFrame(width, height, pix_fmt)


def _check_dtype(values: npt.NDArray[Any], wanted: np.dtype[Any], format: str) -> None:
    if values.dtype != wanted:
        raise TypeError(f"{format} takes {wanted}, not {values.dtype}: scale and convert the array")


def _frame(planes: Sequence[npt.NDArray[Any]], like: av.VideoFrame) -> av.VideoFrame:
    """Return an FFmpeg frame that shares the planes' memory if PyAV can, else a copy."""
    name, size = like.format.name, (like.width, like.height)
    if all(map(_has_whole_rows, planes)):
        if len(planes) == 1 and name in _SHARED_PACKED:
            return av.VideoFrame.from_numpy_buffer(planes[0], name)
        is_even = all(side % step == 0 for side, step in zip(size, chroma_steps(name), strict=True))
        # PyAV shares no palette.
        single = name != "pal8" and all(
            plane.ndim == 2 and plane.dtype.kind == "u" for plane in planes
        )
        writable = all(plane.flags.writeable for plane in planes)  # NumPy's DLPack export needs it
        if len(planes) > 1 and is_even and writable and (single or name in _SHARED_PAIRS):
            return av.VideoFrame.from_dlpack(tuple(planes), name)
    frame = av.VideoFrame(*size, name)
    for view, plane in zip(plane_views(frame), planes, strict=True):
        view[...] = plane
    return frame


def _has_whole_rows(plane: npt.NDArray[Any]) -> bool:
    # Whether FFmpeg can read the plane in place: contiguous rows, 64 readable bytes behind the last one.
    row: npt.NDArray[Any] = plane[0]
    end = plane.__array_interface__["data"][0] + (len(plane) - 1) * plane.strides[0] + row.nbytes
    # NumPy's flag ignores the stride of an axis of length 1, PyAV does not.
    is_dense = row.strides == (row[0].nbytes, row.itemsize)[-row.ndim :]
    is_whole = is_dense and row.nbytes <= plane.strides[0] < 2**31
    return bool(is_whole and -end % _PAGE >= _READ_BEHIND)


def channel_layout(channels: int) -> str:
    """Return FFmpeg's name of the default layout of a number of channels; above eight, an unordered one."""
    return f"{channels}c" if channels <= 8 else f"{channels} channels"


def limited(name: str, number: int, bits: int) -> int:
    """Return a number that FFmpeg can keep.

    Raises:
        ValueError: It needs more bits.
    """
    if abs(number) >= 1 << bits:
        raise ValueError(f"{name} must be below 2**{bits}, not {number}")
    return number


def _audio(array: Any, sample_fmt: str | None, sample_rate: int, pts: int) -> AudioFrames:
    values = _numpy(array)
    packed = {dtype: name for name, dtype in SAMPLE_DTYPES.items()}
    if sample_fmt is None:
        if values.dtype.name not in packed:
            raise TypeError(f"audio must be {listed(packed)}, not {values.dtype}")
        sample_fmt = f"{packed[values.dtype.name]}p"
    check_choice("sample_fmt", sample_fmt, [*SAMPLE_DTYPES, *(f"{one}p" for one in SAMPLE_DTYPES)])
    planar = sample_fmt.endswith("p")
    _check_dtype(values, np.dtype(SAMPLE_DTYPES[sample_fmt.removesuffix("p")]), sample_fmt)
    samples = values[:, None] if values.ndim == 1 else values.T if planar else values
    order = "(C, N)" if planar else "(N, C)"
    if samples.ndim != 2 or 0 in samples.shape:
        raise ValueError(f"{sample_fmt} audio has the shape {order} or (N,), not {values.shape}")
    count, channels = samples.shape
    if channels > _MAX_CHANNELS:
        raise ValueError(
            f"audio of at most {_MAX_CHANNELS} channels is {order}, not {values.shape}; array.T swaps "
            "the axes"
        )
    frame = new_frame(samples, sample_fmt, channel_layout(channels), sample_rate)
    frame.pts = pts
    frame.time_base = Fraction(1, sample_rate)
    return AudioFrames([AudioChunk(frame, 0, count, pts)])
