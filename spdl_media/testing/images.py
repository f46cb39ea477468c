"""Images and samples that tell their own index, and arrays as frames for an encoder, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import av
import numpy as np
from av.codec.codec import find_best_pix_fmt_of_list
from numpy.typing import NDArray

from spdl_media.array_frames import frames_from_array
from spdl_media.encode import find_encoder
from spdl_media.image_frames import av_frames

__all__ = ("frame_index", "index_frames", "index_planes", "index_samples", "make_tone")

_GRID = 5
# The first column and row of the grid hold the same seven marks in every frame; a blank image,
# and one that was turned or mirrored, does not show them. The other cells are the bits of the
# index.
_MARKS = {(0, 0): 1, (0, 1): 1, (1, 0): 0, (0, 4): 0, (4, 0): 0, (4, 4): 0, (2, 0): 1}
_BITS = [(y, x) for y in range(_GRID) for x in range(_GRID) if (y, x) not in _MARKS]
# With the ripple, dark cells average 56 and light ones 192; 124 is half way between them.
_DARK, _LIGHT, _RIPPLE = 24, 160, 64


def index_frames(num_frames: int, width: int, height: int) -> NDArray[np.uint8]:
    """Draw RGB frames, each of which holds its own index and a pattern of positions.

    A grid of 5 x 5 light and dark cells spells the index; a ripple over it differs from pixel to
    pixel and from channel to channel, so that crops, shifts, turns and swapped channels show.

    Args:
        num_frames: Number of frames, up to 262144.
        width: At least 5.
        height: At least 5.

    Returns:
        New array of uint8, shape ``(num_frames, height, width, 3)``, values 24 to 223.

    Raises:
        ValueError: The frames are too small, or too many to be told apart.
    """
    _check_index_size(num_frames, width, height)
    y, x = np.mgrid[:height, :width]
    ripple = np.stack([5 * x + 11 * y, 7 * x + 3 * y, 3 * x + 13 * y], axis=-1) % _RIPPLE
    cells = [_cells(index, width, height)[..., None] + ripple for index in range(num_frames)]
    return np.array(cells, np.uint8).reshape(num_frames, height, width, 3)


def index_planes(
    num_frames: int, width: int, height: int, pix_fmt: str = "yuv420p"
) -> list[tuple[NDArray[Any], ...]]:
    """Draw frames as :func:`index_frames` does, but plane by plane in a planar pixel format.

    The first plane is the luma (or green, or gray) that :func:`frame_index` reads; the others hold
    ripples that move with the index, near neutral, so that the index survives a conversion to RGB.

    Args:
        num_frames: Number of frames, up to 262144.
        width: At least 5; odd sizes round chroma up, as FFmpeg does.
        height: At least 5.
        pix_fmt: Any planar format of integers: ``gray``, ``yuv420p``, ``yuv444p10le``, ``gbrp``,
            ...

    Returns:
        For each frame a tuple of new arrays, one a plane, each of the plane's own shape ``(h, w)``,
        uint8, or uint16 for formats of more than 8 bits (full scale of the format's own depth).

    Raises:
        ValueError: The format is not planar, or the frames are too small or too many.
    """
    _check_index_size(num_frames, width, height)
    shapes, shift = _plane_shapes(pix_fmt, width, height)
    dtype = np.uint16 if shift else np.uint8
    frames = []
    for index in range(num_frames):
        planes = []
        for number, (rows, columns) in enumerate(shapes):
            y, x = np.mgrid[:rows, :columns]
            # The ripple of plane 0 is the same in all frames, so that the grid alone tells them
            # apart.
            ripple = (5 * x + 11 * y + number * (13 * index + 17 * x)) % _RIPPLE
            # The planes of GBR are all as luma is; chroma stays near its neutral 128.
            full = number == 0 or pix_fmt.startswith("gbr")
            values = _cells(index, columns, rows) + ripple if full else 112 + ripple // 2
            planes.append((values << shift).astype(dtype))
        frames.append(tuple(planes))
    return frames


def frame_index(array: NDArray[Any]) -> int:
    """Read back the index that :func:`index_frames` or :func:`index_planes` drew.

    Works on exact pixels, and on scaled, recompressed or colour-converted ones as long as the grid
    of 5 x 5 cells can be told.

    Args:
        array: ``(H, W, 3)`` or ``(H, W, 4)`` RGB, or ``(H, W)`` luma, uint8.

    Raises:
        ValueError: No such image: the marks are not where they should be (blank, turned,
            mirrored, cropped), or the array is no image of uint8.
    """
    array = np.asarray(array)
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or min(array.shape[:2]) < _GRID:
        raise ValueError(
            f"an image of uint8, (H, W) or (H, W, 3), at least 5 x 5, is needed; "
            f"got shape {array.shape}, dtype {array.dtype}"
        )
    luma = array if array.ndim == 2 else _luma(array)
    height, width = luma.shape
    rows, columns = _edges(height), _edges(width)
    light = {
        (y, x): bool(luma[rows[y] : rows[y + 1], columns[x] : columns[x + 1]].mean() >= 124)
        for y in range(_GRID)
        for x in range(_GRID)
    }
    if any(light[cell] != bool(mark) for cell, mark in _MARKS.items()):
        raise ValueError("the image does not show the marks of index_frames: blank or turned?")
    return sum(light[cell] << bit for bit, cell in enumerate(_BITS))


def index_samples(num_samples: int, num_channels: int = 1, *, start: int = 0) -> NDArray[np.int16]:
    """Make samples whose value is their own index: a ramp over all of int16.

    Channel ``c`` at sample ``k`` is ``(k + 7919 * c) mod 65536``, as a signed number, so any 65536
    successive samples differ and no two channels are alike.

    Args:
        num_samples: Number of samples a channel.
        num_channels: Number of channels.
        start: Index of the first sample.

    Returns:
        New array of int16, shape ``(num_samples, num_channels)``.
    """
    ramp = np.arange(start, start + num_samples, dtype=np.int64)[:, None]
    # A prime: channels stay apart for any shift that a mistake could make.
    return (ramp + 7919 * np.arange(num_channels)).astype(np.uint16).view(np.int16)


def make_tone(
    num_samples: int, sample_rate: int, frequencies: Sequence[float] = (440.0,)
) -> NDArray[np.int16]:
    """Make sine waves at half of full scale, one a channel, for codecs made for audio.

    Returns:
        New array of int16, shape ``(num_samples, len(frequencies))``.
    """
    phase = 2 * np.pi * np.arange(num_samples)[:, None] / sample_rate
    wave: NDArray[np.float64] = np.sin(phase * np.asarray(frequencies))
    return np.round(16384 * wave).astype(np.int16)


def _check_index_size(num_frames: int, width: int, height: int) -> None:
    if width < _GRID or height < _GRID:
        raise ValueError(f"frames must be at least {_GRID} x {_GRID}, not {width} x {height}")
    if not 0 <= num_frames <= 1 << len(_BITS):
        raise ValueError(f"num_frames must be 0 to {1 << len(_BITS)}, not {num_frames}")


def _edges(size: int) -> list[int]:
    # Whole pixels: cells differ by one where the size is no multiple of 5.
    return [size * cell // _GRID for cell in range(_GRID + 1)]


def _cells(index: int, width: int, height: int) -> NDArray[np.int64]:
    """An image of the index alone, without the ripple."""
    light = dict(_MARKS) | {cell: index >> bit & 1 for bit, cell in enumerate(_BITS)}
    grid = np.array([[light[y, x] for x in range(_GRID)] for y in range(_GRID)], np.int64)
    rows, columns = (np.diff(_edges(size)) for size in (height, width))
    return _DARK + (_LIGHT - _DARK) * grid.repeat(rows, axis=0).repeat(columns, axis=1)


def _luma(rgb: NDArray[Any]) -> NDArray[np.float64]:
    return np.asarray(rgb[..., :3] @ np.array([0.299, 0.587, 0.114]))


# One image: RGB ``(H, W, 3)``, RGBA ``(H, W, 4)``, luma ``(H, W)``, or a sequence of planes.
Image: TypeAlias = "NDArray[Any] | Sequence[NDArray[Any]]"


def _plane_shapes(pix_fmt: str, width: int, height: int) -> tuple[list[tuple[int, int]], int]:
    """The shape of each plane, and the bits that each value has beyond 8."""
    format = av.VideoFormat(pix_fmt, width, height)
    components = sorted(format.components, key=lambda component: component.plane)
    # Packed formats have several components in one plane.
    if [component.plane for component in components] != list(range(len(components))):
        raise ValueError(f"pix_fmt must be planar, such as 'yuv420p' or 'gbrp', not {pix_fmt!r}")
    if not 8 <= components[0].bits <= 16:
        raise ValueError(f"pix_fmt must have integers of 8 to 16 bits, not {pix_fmt!r}")
    shapes = [(component.height, component.width) for component in components]
    return shapes, components[0].bits - 8


def best_pix_fmt(codec: str, image: Image) -> str:
    """The pixel format of an encoder that loses least of an image.

    Raises:
        ValueError: The image is given as planes, which do not say what they are.
    """
    if not isinstance(image, np.ndarray):
        raise ValueError("planes need a pix_fmt that says what they are")
    encoder, given = find_encoder(codec, "video"), _frame_of(image).format.name
    # Its list begins with 4:2:0, which loses most of the chroma.
    if codec == "mjpeg":
        return "yuvj444p"
    formats = [format.name for format in encoder.video_formats or ()]
    best, _ = find_best_pix_fmt_of_list(formats, given, True)  # noqa: FBT003  # alpha counts
    return str(best and best.name)


def video_frame(image: Image, pix_fmt: str) -> av.VideoFrame:
    """An image as a frame of ``pix_fmt``; luma and planes go in as they are.

    Raises:
        ValueError: Its shape or type does not fit.
    """
    if not isinstance(image, np.ndarray):
        return _frame_of(tuple(image), pix_fmt)
    frame = _frame_of(image)
    if frame.format.name == "gray" and pix_fmt.startswith("yuv"):
        shapes, shift = _plane_shapes(pix_fmt, frame.width, frame.height)
        dtype = np.uint16 if shift else np.uint8
        neutral = [np.full(shape, 128 << shift, dtype) for shape in shapes[1:]]
        return _frame_of((np.left_shift(image, shift, dtype=dtype), *neutral), pix_fmt)
    return frame if pix_fmt == frame.format.name else frame.reformat(format=pix_fmt)


def _frame_of(image: Any, pix_fmt: str | None = None) -> av.VideoFrame:
    """One of FFmpeg's frames.

    Raises:
        ValueError: It is several, or its shape or type does not fit.
    """
    (frame,) = av_frames(frames_from_array(image, pix_fmt))  # type: ignore[arg-type]
    return frame
