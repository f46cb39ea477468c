"""JPEGs that are shrunk while they are decoded, by libjpeg."""

from __future__ import annotations

from typing import Any, NamedTuple

import av
import numpy as np
import numpy.typing as npt

from spdl_media._optional import require
from spdl_media.config import DecodeConfig
from spdl_media.fast_images import FULL_RANGE, GBR, FastChain, Plan, fast_chain
from spdl_media.geometry import Box, fits, stored_box, stored_flips, swaps_sides
from spdl_media.operations import PictureOps, picture_ops
from spdl_media.packets import ImagePackets, coded_image, metadata_of

# Eighths of a side, the smallest first. The others take longer than the next larger one here.
_EIGHTHS = (1, 2, 4)
# What is left is so many times as large as the result at least: the higher frequencies of those are wanted.
_MARGIN = 1.2
# Edges fall on whole pixels of the smaller image. They may move by so much of a pixel of the result.
_MAX_SHIFT = 0.125


class _Part(NamedTuple):
    """A box of the shrunk image, as it is stored, and how much it was shrunk."""

    eighths: int
    left: int
    top: int
    right: int
    bottom: int


def decode_downscaled(
    packets: ImagePackets, filter: str | PictureOps | None, config: DecodeConfig
) -> av.VideoFrame | None:
    """Decode a JPEG at less than its size, turn it upright, and filter it.

    Returns:
        The frame; ``None``, if it has to be decoded whole: no YCbCr JPEG, cut short or damaged, too small,
        a filter that does not scale first, or a crop whose edges would move.

    Raises:
        MissingDependencyError: simplejpeg is not installed.
    """
    simplejpeg = require("simplejpeg", "decode_config(downscale='dct')")
    metadata = metadata_of(packets)
    ops = picture_ops(filter)
    if ops is None or metadata.incomplete is not None or len(packets) != 1:
        return None
    chain = fast_chain(ops.uncut)
    if chain is None or not chain.scales_first:
        return None
    head = metadata.jpeg
    if head is None or not head.is_ycc or config.decoder is not None or config.decoder_options:
        return None
    orientation = metadata.orientation if config.orient else 1
    plan = _plan(head.width, head.height, orientation, chain, ops.box)
    if plan is None:
        return None
    part, sizes = plan
    small = _shrunk(head.width, part), _shrunk(head.height, part)
    pixels = _decode_small(simplejpeg, packets, *small)
    if pixels is None:
        return None
    upright = _upright(pixels, part, orientation)
    frame = av.VideoFrame.from_numpy_buffer(upright, "rgb24")
    # PyAV leaves both unset for an array.
    frame.colorspace, frame.color_range = GBR, FULL_RANGE
    frame.time_base = packets.codec.time_base
    # The result is mirrored, for it is the smaller one.
    return chain.from_rgb().run(frame, sizes._replace(mirror=ops.mirror))


def _plan(
    width: int, height: int, orientation: int, chain: FastChain, box: Box | None
) -> tuple[_Part, Plan] | None:
    """The part of a stored image to decode, and the sizes after each step of the chain."""
    swaps = swaps_sides(orientation)
    upright = (height, width) if swaps else (width, height)
    box = box or (0, 0, *upright)
    sizes = chain.plan(box[2:]) if fits(box, *upright) else None
    if sizes is None:
        return None
    scaled = sizes.placement.scaled
    # Everything from here on is in the image as it is stored.
    target = scaled[::-1] if swaps else scaled
    part = _smallest_part(stored_box(box, orientation, width, height), *target)
    return None if part is None else (part, sizes)


def _smallest_part(box: Box, width: int, height: int) -> _Part | None:
    """The part of the smallest image that is as good for a result of this size as the whole one."""
    x, y, w, h = box
    for eighths in _EIGHTHS:
        left, right = round(x * eighths / 8), round((x + w) * eighths / 8)
        top, bottom = round(y * eighths / 8), round((y + h) * eighths / 8)
        if right - left < _MARGIN * width or bottom - top < _MARGIN * height:
            continue
        shift_x = max(abs(x * eighths / 8 - left), abs((x + w) * eighths / 8 - right))
        shift_y = max(abs(y * eighths / 8 - top), abs((y + h) * eighths / 8 - bottom))
        shifts = shift_x * width / (right - left), shift_y * height / (bottom - top)
        if max(shifts) <= _MAX_SHIFT:
            return _Part(eighths, left, top, right, bottom)
    return None


def _shrunk(side: int, part: _Part) -> int:
    # libjpeg rounds the shrunk size up.
    return -(-side * part.eighths // 8)


def _decode_small(
    simplejpeg: Any, packets: ImagePackets, width: int, height: int
) -> npt.NDArray[np.uint8] | None:
    try:
        pixels: npt.NDArray[np.uint8] = simplejpeg.decode_jpeg(
            coded_image(packets), colorspace="RGB", min_width=width, min_height=height
        )
    except ValueError:  # anything the matter, even if it could be helped: FFmpeg is to say what
        return None
    # libjpeg picks the factor by the least size, so another one shows in the shape.
    return pixels if pixels.shape == (height, width, 3) else None


def _upright(pixels: npt.NDArray[np.uint8], part: _Part, orientation: int) -> npt.NDArray[np.uint8]:
    view = pixels[part.top : part.bottom, part.left : part.right]
    backwards, upwards = stored_flips(orientation)
    view = view[:: -1 if upwards else 1, :: -1 if backwards else 1]
    if swaps_sides(orientation):
        view = view.swapaxes(0, 1)
    # A copy where rows run upwards, or pixels of a row do not follow each other.
    return view if orientation == 1 else np.ascontiguousarray(view)
