"""The operators of DALI that a batch of images goes through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spdl_media._arguments import ArrayLayout
from spdl_media.cuda._nvjpeg_batch import Rows
from spdl_media.cuda._nvjpeg_inputs import Encoded, black
from spdl_media.cuda.slots import DaliBatch, Settings, Slot, dali_types
from spdl_media.errors import ConvertError
from spdl_media.geometry import Placement, place
from spdl_media.operations import PictureOps

COLORS = {"rgb24": "RGB", "bgr24": "BGR", "gray": "GRAY"}
"""Pixel formats, and what DALI calls them."""

FILTERS = {"bicubic": "INTERP_CUBIC", "bilinear": "INTERP_LINEAR"}
"""Scaling algorithms, and what DALI calls them."""

DALI_ERRORS = (RuntimeError, MemoryError)
"""What DALI raises; the types do not tell bad data from a device that is full."""

_MAX_LISTED = 5


class Operators:
    """The operators that a batch goes through: decode, scale, take the window, change the layout.

    Args:
        options: How images are to come out.
        layout: Of the result.
        hw_decoder_load: Share of the GPU's JPEG engine; ``None``: DALI's own.
        orient: Whether images are turned upright.
        is_single: The result is the only image of the batch, and not an array of one.
    """

    def __init__(
        self,
        options: PictureOps,
        layout: ArrayLayout,
        hw_decoder_load: float | None,
        *,
        orient: bool,
        is_single: bool = False,
    ) -> None:
        types = dali_types()
        self._options = options
        self._layout = layout
        self._is_single = is_single
        self._channels = 1 if options.pix_fmt == "gray" else 3
        self._decoder: Settings = {
            "output_type": getattr(types, COLORS[options.pix_fmt or ""]),
            "adjust_orientation": orient,
            # Threads belong to whoever runs many slots, not to a core.
            "affine": False,
            # As the CPU decoder does, or edges between colours would differ.
            "jpeg_fancy_upsampling": True,
            **({} if hw_decoder_load is None else {"hw_decoder_load": float(hw_decoder_load)}),
        }
        self._scaler: Settings = {
            "interp_type": getattr(types, FILTERS[options.scale_algo]),
            "antialias": True,
        }
        self._window: Settings = {
            "axes": (0, 1),
            "out_of_bounds_policy": "pad",
            "fill_values": (0.0,),
        }

    def run(self, slot: Slot, rows: Rows[Encoded]) -> Any:
        """Make the array of a batch."""
        files = [one or black(self._channels) for one in rows.values()]
        pictures = slot.run("decoders.Image", [file.data for file in files], self._decoder)
        sizes = [(int(shape[1]), int(shape[0])) for shape in pictures.shape]
        places = self._places(rows, sizes)
        return self._placed(slot, pictures, sizes, places)

    def fail_alone(self, slot: Slot, rows: Rows[Encoded]) -> list[int]:
        """Positions of the images that DALI does not decode one at a time either."""
        return [
            position
            for position, one in rows.items()
            if one is not None and not one.is_finished and not self._decodes(slot, one)
        ]

    def _decodes(self, slot: Slot, one: Encoded) -> bool:
        try:
            slot.run("decoders.Image", [one.data], self._decoder)
        except DALI_ERRORS:
            return False
        return True

    def _places(self, rows: Rows[Encoded], sizes: Sequence[tuple[int, int]]) -> list[Placement]:
        options = self._options
        places = [
            None if one is None else place(size, options.width, options.height, options.scale_mode)
            for one, size in zip(rows.values(), sizes, strict=True)
        ]
        out = one_size(rows, places) or self._known_size()
        zeros = Placement(out, out)
        return [one or zeros for one in places]

    def _known_size(self) -> tuple[int, int]:
        return self._options.width or 1, self._options.height or 1

    def _placed(
        self,
        slot: Slot,
        pictures: DaliBatch,
        sizes: Sequence[tuple[int, int]],
        places: Sequence[Placement],
    ) -> Any:
        scaled = [one.scaled for one in places]
        if scaled != list(sizes):
            size = [np.array([height, width], np.float32) for width, height in scaled]
            pictures = slot.run("Resize", pictures, self._scaler, {"size": size})
        if any(one.scaled != one.canvas for one in places):
            # The window in the scaled image; where it begins outside, there is a border.
            window = {
                "start": [np.array([-one.top, -one.left], np.int32) for one in places],
                "shape": [np.array(one.canvas[::-1], np.int32) for one in places],
            }
            pictures = slot.run("Slice", pictures, self._window, window)
        if self._layout == "NCHW":
            pictures = slot.run("Transpose", pictures, {"perm": (2, 0, 1)})
        return slot.first(pictures) if self._is_single else slot.as_array(pictures)


def one_size(rows: Mapping[int, Any], places: Sequence[Placement | None]) -> tuple[int, int] | None:
    """The size of all rows that are images; ``None`` if there are none.

    Raises:
        ConvertError: They differ.
    """
    first: dict[tuple[int, int], str] = {}
    for (position, one), placed in zip(rows.items(), places, strict=True):
        if one is not None and placed is not None:
            size = placed.canvas
            first.setdefault(size, f"{size[0]}x{size[1]} (input {position}, {one.source})")
    if len(first) > 1:
        more = f" and {len(first) - _MAX_LISTED} more" if len(first) > _MAX_LISTED else ""
        raise ConvertError(
            f"the images differ: {', '.join(list(first.values())[:_MAX_LISTED])}{more}. One array holds "
            "one size: give width= and height="
        )
    return next(iter(first), None)
