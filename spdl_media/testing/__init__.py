"""Media made in memory, for tests: pixels and samples that tell their own index.

What goes in is then the exact oracle for what must come out: a frame that was skipped, doubled,
shifted, turned or taken from the wrong stream shows in its pixels. Everything here is
deterministic; the same call gives the same bytes with the same version of PyAV.

    frames = index_planes(30, 64, 48, "yuv420p")
    data = make_video(frames, codec="libx264", format="mp4", pix_fmt="yuv420p", max_b_frames=2)

Files of several streams are lists of tracks: ``make_media([VideoTrack(...), AudioTrack(...)],
format="mp4")``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spdl_media.testing.media import (
    AudioTrack,
    VideoTrack,
    make_audio,
    make_image,
    make_media,
    make_video,
    plane_shapes,
)

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
    shapes, shift = plane_shapes(pix_fmt, width, height)
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
