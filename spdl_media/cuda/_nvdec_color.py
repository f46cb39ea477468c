"""Colour and size of one decoded frame on its device."""

from __future__ import annotations

from typing import Any

import numpy as np

from spdl_media.cuda._color_taps import ScaleAlgo, line_taps
from spdl_media.cuda._nvdec_device import VideoDevice
from spdl_media.cuda._nvdec_planes import HardwareFrame, format_name
from spdl_media.cuda.color import yuv_to_rgb
from spdl_media.formats import COLOR_RANGES, COLORSPACES


def to_rgb(
    planes: tuple[Any, Any], frame: HardwareFrame, out: Any, *, scale_algo: ScaleAlgo
) -> None:
    """Convert a frame by the matrix and range that it states, scaled to the size of the target.

    Args:
        planes: Luma and chroma, on the device.
        frame: What states the colour.
        out: ``(H, W, 3)`` uint8 in any strides, on the device.
        scale_algo: The filter, where the size changes.
    """
    height, width = out.shape[:2]
    same = planes[0].shape == (height, width)
    yuv_to_rgb(
        planes,
        format_name(frame),
        matrix=COLORSPACES.get(int(frame.colorspace)),
        color_range=COLOR_RANGES.get(int(frame.color_range)),
        width=width,
        height=height,
        scale_algo=None if same else scale_algo,
        out=out,
    )


def scale_plane(device: VideoDevice, plane: Any, shape: tuple[int, int], algo: ScaleAlgo) -> Any:
    """Scale a plane as FFmpeg's scaler does, by one product with a matrix for each axis.

    Returns:
        A new array of this shape and the plane's type, on the device.
    """
    rows, columns = (
        device.upload(_weights(length, size, algo))
        for length, size in zip(plane.shape, shape, strict=True)
    )
    return device.rounded(rows @ device.floats(plane) @ columns.T, plane.dtype)


def _weights(length: int, size: int, algo: ScaleAlgo) -> np.ndarray[Any, Any]:
    """What each of ``length`` samples counts for each of ``size``, ``(size, length)`` float32."""
    taps = line_taps(length, size, 1, 0.0, algo, stretch=True)
    matrix = np.zeros((size, length), np.float32)
    places = taps.first[None] + np.arange(len(taps.weights))[:, None]
    np.add.at(matrix, (np.broadcast_to(np.arange(size), places.shape), places), taps.weights)
    return matrix
