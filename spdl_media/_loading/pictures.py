"""One picture of a batch, cut and mirrored as its place in the batch says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from spdl_media._filters.cuts import fits
from spdl_media.config import DecodeConfig, DemuxConfig
from spdl_media.crops import Box, checked_box
from spdl_media.decode import decode_packets
from spdl_media.demux import demux_image
from spdl_media.errors import ConvertError, FilterError
from spdl_media.filter_desc import FilterDesc, picture_ops
from spdl_media.frames import ImageFrames
from spdl_media.operations import PictureOps
from spdl_media.packets import ImagePackets


class _SupportsArray(Protocol):
    """A NumPy array, a CPU tensor of PyTorch, and whatever else NumPy can view."""

    def __array__(self) -> npt.NDArray[Any]: ...


Flips: TypeAlias = Sequence[bool] | _SupportsArray
"""One bool for each picture; an array or a tensor of them is 1-D."""


class CropPlan:
    """What is done to each picture of a batch before its filters.

    Args:
        crops: A box or ``None`` for each picture; ``None`` for none.
        flips: A bool for each picture, as a sequence or a 1-D array or tensor; ``None`` for none.
    """

    __slots__ = ("_boxes", "_flips")

    def __init__(self, crops: Sequence[Box | None] | None, flips: Flips | None) -> None:
        self._boxes = (
            None if crops is None else [checked_box(box, i) for i, box in enumerate(crops)]
        )
        self._flips = None if flips is None else _flags(flips)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is cut or mirrored."""
        return self._boxes is None and self._flips is None

    def check(self, count: int) -> None:
        """Refuse plans for another number of pictures."""
        for name, values in (("crops", self._boxes), ("flips", self._flips)):
            if values is not None and len(values) != count:
                raise ValueError(
                    f"{name} must have one entry for each of the {count} inputs, not {len(values)}"
                )

    def box(self, position: int) -> Box | None:
        """The box of the picture at this position."""
        return None if self._boxes is None else self._boxes[position]

    def desc(self, position: int, desc: str | None) -> str | None:
        """The filters of the picture at this position, its own before those of all."""
        if self.is_empty:
            return desc
        mirror = self._flips is not None and self._flips[position]
        # Boxes are those of upright pictures, and without any filter none would be turned. Those without a
        # box or a flip are turned with the others, or chance would say how each picture of a batch stands.
        ops = picture_ops(desc) or PictureOps(filter_desc=desc, pix_fmt=None)
        return FilterDesc(replace(ops, box=self.box(position), mirror=mirror))


def _flags(flips: Any) -> list[bool]:
    """One bool each, of whatever NumPy makes a 1-D array of bools of."""
    try:
        # Tensors one by one would be as many arrays of no dimension.
        values = np.asarray(flips if hasattr(flips, "__array__") else list(flips))
    except (
        TypeError,
        ValueError,
        RuntimeError,
    ) as error:  # RuntimeError: PyTorch's, for tensors on a GPU
        raise TypeError(
            f"flips must be one True or False for each picture, not {flips!r}: {error}"
        ) from error
    if values.shape == (0,):
        return []
    if values.dtype != np.bool_ or values.ndim != 1:
        raise TypeError(_wrong_flips(flips, values))
    return [bool(value) for value in values]


def _wrong_flips(flips: Any, values: npt.NDArray[Any]) -> str:
    if values.ndim == 1 and not hasattr(flips, "__array__"):
        for position, value in enumerate(flips):
            if np.asarray(value).dtype != np.bool_:
                return f"flips[{position}] must be True or False, not {value!r}"
    return f"flips must be one True or False for each picture, not {values.dtype} of shape {values.shape}"


def decode_picture(
    src: Any,
    position: int,
    *,
    desc: str | None,
    cuts: CropPlan,
    demux_config: DemuxConfig | None,
    decode_config: DecodeConfig | None,
) -> ImageFrames:
    """Demux and decode one input of a batch.

    Raises:
        ConvertError: Its crop does not lie inside it.
    """
    packets = demux_image(src, demux_config=demux_config)
    try:
        return decode_packets(packets, cuts.desc(position, desc), decode_config)
    except FilterError as error:
        if box := cuts.box(position):
            _check_inside(box, packets, decode_config, error)
        raise


def _check_inside(
    box: Box, packets: ImagePackets, decode_config: DecodeConfig | None, cause: FilterError
) -> None:
    """Say so if it is the crop that the filters failed for."""
    upright = decode_packets(packets, "null", decode_config)
    if not fits(box, upright.width, upright.height):
        raise ConvertError(
            f"the crop {box} (x, y, width, height) does not lie inside the picture, which is "
            f"{upright.width}x{upright.height}",
            source=packets.source,
        ) from cause
