"""Media made in memory, for tests. Each frame and each sample contains its own index.

So the input is an exact oracle for the output: the pixels reveal a frame that was skipped, duplicated,
shifted, rotated or taken from the wrong stream. Everything is deterministic: the same call returns the same
bytes with the same version of PyAV.

    frames = index_planes(30, 64, 48, "yuv420p")
    data = make_video(frames, codec="libx264", format="mp4", pix_fmt="yuv420p", max_b_frames=2)

A file with several streams is made from a list of tracks: ``make_media([VideoTrack(...), AudioTrack(...)],
format="mp4")``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spdl_media.testing.media import *
from spdl_media.testing.media import plane_shapes

__all__ = (
    "AudioTrack",
    "VideoTrack",
    "frame_index",
    "index_frames",
    "index_planes",
    "index_samples",
    "make_audio",
    "make_image",
    "make_media",
    "make_tone",
    "make_video",
)

_GRID = 5
# Seven cells at the borders of the grid are the same marks in every frame. A blank, rotated or mirrored image
# does not show them. The other cells are the bits of the index.
_MARKS = {(0, 0): 1, (0, 1): 1, (1, 0): 0, (0, 4): 0, (4, 0): 0, (4, 4): 0, (2, 0): 1}
_BITS = [(y, x) for y in range(_GRID) for x in range(_GRID) if (y, x) not in _MARKS]
# Including the ripple, the mean of dark cells is 56 and that of light cells 192; the threshold is 124.
_DARK, _LIGHT, _RIPPLE = 24, 160, 64


def index_frames(num_frames: int, width: int, height: int) -> NDArray[np.uint8]:
    """Draw RGB frames, each with its own index and a pattern that depends on the position.

    A grid of 5 x 5 light and dark cells encodes the index. A ripple on top differs between pixels and between
    channels, so that crops, shifts, rotations and swapped channels are visible.

    Args:
        num_frames: Number of frames, up to 262144.
        width: At least 5.
        height: At least 5.

    Returns:
        New array of uint8, shape ``(num_frames, height, width, 3)``, values 24 to 223.

    Raises:
        ValueError: The frames are too small, or there are more than can be distinguished.
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

    :func:`frame_index` reads the index from the first plane, which is luma, green or gray. Chroma planes have
    near-neutral ripples that depend on the index, so that the index survives a conversion to RGB.

    Args:
        num_frames: Number of frames, up to 262144.
        width: At least 5; odd sizes round chroma up, as FFmpeg does.
        height: At least 5.
        pix_fmt: Any planar integer format: ``gray``, ``yuv420p``, ``yuv444p10le``, ``gbrp``, ...

    Returns:
        For each frame a tuple of new arrays, one per plane, of the plane's own shape ``(h, w)`` and dtype
        uint8, or uint16 for formats of more than 8 bits (values use the full range of the format's depth).

    Raises:
        ValueError: The format is not planar, or the frames are too small or too many.
    """
    _check_index_size(num_frames, width, height)
    shapes, shift = plane_shapes(pix_fmt, width, height)
    dtype = np.uint16 if shift else np.uint8
    frames = []
    for index in range(num_frames):
        planes = []
        for number, (rows, columns) in enumerate(shapes):
            y, x = np.mgrid[:rows, :columns]
            # The ripple of plane 0 is the same in all frames, so they differ only in the grid.
            ripple = (5 * x + 11 * y + number * (13 * index + 17 * x)) % _RIPPLE
            # All planes of GBR are drawn like luma; chroma stays near its neutral value 128.
            full = number == 0 or pix_fmt.startswith("gbr")
            values = _cells(index, columns, rows) + ripple if full else 112 + ripple // 2
            planes.append((values << shift).astype(dtype))
        frames.append(tuple(planes))
    return frames


def frame_index(array: NDArray[Any]) -> int:
    """Read the index that :func:`index_frames` or :func:`index_planes` has drawn.

    It also works on scaled, recompressed or colour-converted images, as long as the grid of 5 x 5 cells is
    recognizable.

    Args:
        array: ``(H, W, 3)`` or ``(H, W, 4)`` RGB, or ``(H, W)`` luma, uint8.

    Raises:
        ValueError: The marks are not at their places, because the image is blank, rotated, mirrored or
            cropped, or the array is not a uint8 image.
    """
    array = np.asarray(array)
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or min(array.shape[:2]) < _GRID:
        raise ValueError(
            f"an image of uint8, (H, W) or (H, W, 3), at least 5 x 5, is needed; "
            f"got shape {array.shape}, dtype {array.dtype}"
        )
    luma = array if array.ndim == 2 else array[..., :3] @ np.array([0.299, 0.587, 0.114])
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
    """Make samples whose value is their own index: a ramp over the range of int16.

    Channel ``c`` at sample ``k`` is ``(k + 7919 * c) mod 65536``, as a signed number. So any 65536
    consecutive samples differ, and no two channels are equal.

    Args:
        num_samples: Number of samples per channel.
        num_channels: Number of channels.
        start: Index of the first sample.

    Returns:
        New array of int16, shape ``(num_samples, num_channels)``.

    Raises:
        TypeError: An argument is not a number.
        MemoryError: The array does not fit in memory.
    """
    ramp = np.arange(start, start + num_samples, dtype=np.int64)[:, None]
    # A prime, so that no likely shift makes one channel equal to another.
    return (ramp + 7919 * np.arange(num_channels)).astype(np.uint16).view(np.int16)


def make_tone(
    num_samples: int, sample_rate: int, frequencies: Sequence[float] = (440.0,)
) -> NDArray[np.int16]:
    """Make sine waves at half of full scale, one per channel, for lossy audio codecs.

    Returns:
        New array of int16, shape ``(num_samples, len(frequencies))``.

    Raises:
        TypeError: An argument is not a number, or ``frequencies`` not a sequence of numbers.
        MemoryError: The array does not fit in memory.
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
    # Whole pixels: the sizes of cells differ by one if the size is not a multiple of 5.
    return [size * cell // _GRID for cell in range(_GRID + 1)]


def _cells(index: int, width: int, height: int) -> NDArray[np.int64]:
    """Draw the grid of an index, without the ripple."""
    light = dict(_MARKS) | {cell: index >> bit & 1 for bit, cell in enumerate(_BITS)}
    grid = np.array([[light[y, x] for x in range(_GRID)] for y in range(_GRID)], np.int64)
    rows, columns = (np.diff(_edges(size)) for size in (height, width))
    return _DARK + (_LIGHT - _DARK) * grid.repeat(rows, axis=0).repeat(columns, axis=1)
