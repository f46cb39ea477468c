"""One picture of a batch, cut and mirrored as its place in the batch says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spdl_media.config import DecodeConfig, DemuxConfig
from spdl_media.crops import Box, checked_box, crop_filters, fits
from spdl_media.decode import decode_packets
from spdl_media.demux import demux_image
from spdl_media.errors import ConvertError, FilterError
from spdl_media.frames import ImageFrames
from spdl_media.packets import ImagePackets


class CropPlan:
    """What is done to each picture of a batch before its filters.

    Args:
        crops: A box or ``None`` for each picture; ``None`` for none.
        flips: A bool for each picture; ``None`` for none.
    """

    __slots__ = ("_boxes", "_flips")

    def __init__(self, crops: Sequence[Box | None] | None, flips: Sequence[bool] | None) -> None:
        self._boxes = (
            None if crops is None else [checked_box(box, i) for i, box in enumerate(crops)]
        )
        self._flips = None if flips is None else [_flag(flip, i) for i, flip in enumerate(flips)]

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
        flip = self._flips is not None and self._flips[position]
        own = crop_filters(self.box(position), flip=flip)
        # Boxes are those of upright pictures, and without any filter none would be turned.
        return ",".join([*own, desc or "null"])


def _flag(value: object, position: int) -> bool:
    # NumPy's bool is what rng.random(n) < 0.5 gives.
    if type(value).__name__ not in ("bool", "bool_"):
        raise TypeError(f"flips[{position}] must be True or False, not {value!r}")
    return bool(value)


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
