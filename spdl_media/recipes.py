"""Preprocessing of images for training and evaluating classifiers."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np

from spdl_media._checks import check_int
from spdl_media._collate import ImageBuffer
from spdl_media.arrays import Key, fields_of, rebuilt
from spdl_media.batch import decode_cut
from spdl_media.buffer import CPUBuffer
from spdl_media.config import DecodeConfig
from spdl_media.crops import Crop, CropPlan, RandomResizedCrop, ResizeCenterCrop, Rng
from spdl_media.geometry import Box, Size
from spdl_media.load import image_request
from spdl_media.operations import Quality, ScaleAlgo
from spdl_media.rows import ArrayLayout, PerChannel, ValueType

__all__ = ("IMAGENET_MEAN", "IMAGENET_STD", "ImageRecipe")

IMAGENET_MEAN: Final = (0.485, 0.456, 0.406)
"""Mean of ImageNet's red, green and blue, for ``mean=``."""

IMAGENET_STD: Final = (0.229, 0.224, 0.225)
"""Standard deviation of ImageNet's red, green and blue, for ``std=``."""


# Fields that are passed to load_image unchanged.
_OPTIONS = "dtype mean std layout scale_algo quality decode_config".split()


def _on_grid(crop: Crop, least: int, size: Size, rng: np.random.Generator) -> Box | None:
    """Return the box of a crop function; edges of a large box are rounded to the blocks of a JPEG."""
    box = crop(size, rng)
    if box is None or min(box[2:]) < least:
        return box
    x, y, w, h = box
    left, top = round(x / 8) * 8, round(y / 8) * 8
    # At most the last whole block: the image may end inside a block.
    ends = zip((x + w, y + h), size, strict=True)
    right, bottom = (min(round(end / 8), side // 8) * 8 for end, side in ends)
    return left, top, right - left, bottom - top


@dataclass(frozen=True, eq=False)
class ImageRecipe:
    """A preprocessor of images for classifiers: crops, scales, mirrors and normalises in one pass.

    For training, with ``random_crop``, a random box is stretched to a square. For evaluation, the shorter
    side is scaled and the centre square cropped, as by torchvision's ``Resize`` and ``CenterCrop``. The
    images are buffers for :func:`~spdl_media.collate`, which converts each to floats while it copies it to
    the batch. ``boxes`` and ``flips`` of the batch are the random crops and flips.

    Args:
        size: Side of the square.
        random_crop: True for ``RandomResizedCrop()``, or another function for ``crops=``.
        flip: Probability of mirroring left to right.
        dtype: Type of the values, as for :func:`~spdl_media.load_image`; the default is uint8.
        mean: Subtracted from values: a number per channel, or one for all, such as ``IMAGENET_MEAN``.
        std: Values are divided by it: a number per channel, or one for all, such as ``IMAGENET_STD``.
        layout: ``"NCHW"`` or ``"NHWC"``.
        resize_size: Size of the shorter side before the centre crop. ``None``: ``size * 256 / 224``.
        scale_algo: FFmpeg's scaling algorithm, such as ``"bicubic"``, ``"bilinear"`` or ``"area"``.
        quality: How exact scaling and conversion are; see :func:`~spdl_media.get_video_filter_desc`.
        decode_config: How to decode. With ``decode_config(downscale="dct")``, random boxes at least twice as
            large as ``size`` get edges at multiples of 8 pixels, so that they can be cropped from a reduced
            image.
        field: Key of the image's source in items that are tuples, lists, dictionaries or dataclasses.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An option is invalid, or ``resize_size`` is given with ``random_crop``.

    Thread safety: immutable, free to share. Picklable.

    Example:
        >>> recipe = sm.ImageRecipe(224, random_crop=True, flip=0.5)
        >>> recipe(("photo.jpg", 3), rng=np.random.default_rng(0))
        (<ImageBuffer: (3, 224, 224) uint8>, 3)
    """

    size: int
    _: KW_ONLY
    random_crop: bool | Crop = False
    flip: float = 0.0
    dtype: ValueType | None = None
    mean: PerChannel | None = None
    std: PerChannel | None = None
    layout: ArrayLayout = "NCHW"
    resize_size: int | None = None
    scale_algo: ScaleAlgo = "bicubic"
    quality: Quality = "accurate"
    decode_config: DecodeConfig | None = None
    field: Key = 0

    def __post_init__(self) -> None:
        size, crop = check_int("size", self.size), self.random_crop
        if isinstance(self.flip, bool | np.bool_) and self.flip:
            raise ValueError("flip must be a probability, such as 0.5 (1.0 mirrors all), not True")
        if not crop:
            # The ratio of most published recipes for evaluation.
            resized = size * 256 // 224 if self.resize_size is None else self.resize_size
            crop = ResizeCenterCrop(resized, size)
        elif self.resize_size is not None:
            raise ValueError(
                f"resize_size={self.resize_size} is for evaluation, random_crop for training; leave one out"
            )
        crop = RandomResizedCrop() if crop is True else crop
        if self.random_crop and self.decode_config is not None and self.decode_config.downscale:
            # A JPEG decoded at a reduced size can be cropped only at edges of its blocks.
            crop = partial(_on_grid, crop, 2 * size)
        cuts: Any = {"crops": crop, "flips": self.flip}
        options = {name: getattr(self, name) for name in _OPTIONS}
        request = image_request(width=size, height=size, scale_mode=None, **options, **cuts)
        # Prepared once, so that the options are not checked for each image.
        object.__setattr__(self, "_prepared", (request, cuts))

    @property
    def is_random(self) -> bool:
        """Whether calls with the same image can give different crops or flips."""
        return self.random_crop is not False or self.flip not in (0, 1)

    def __call__(self, item: Any, rng: Rng | None = None) -> Any:
        """Load the image of an item; other fields of the item are kept.

        Args:
            item: A source as for :func:`~spdl_media.load_image`, or an item with a source in ``field``.
            rng: NumPy generator, or a seed, for random crops and flips. ``None`` draws different ones at each
                call.

        Returns:
            A buffer ``(3, size, size)`` or ``(size, size, 3)``; for an item, the item with the buffer in
            place of the source.

        Raises:
            MediaError: The image cannot be loaded, as for :func:`~spdl_media.load_image`.
            KeyError: The item has no such field.
        """
        fields = fields_of(item)
        if fields is None:
            return self._load(item, rng, None)
        # Fields of a named tuple can be given by index, too.
        indices: dict[Key, Key] = dict(enumerate(fields)) if isinstance(item, tuple) else {}
        field = indices.get(self.field, self.field)
        if field not in fields:
            raise KeyError(
                f"the item has no field {self.field!r}, only {list(fields)}. State the field of the image: "
                "ImageRecipe(field=...)"
            )
        # Errors name the shard and the member of a sample of Shards.
        is_sample = {"__url__", "__key__"} <= fields.keys()
        name = f"{fields['__url__']}: {fields['__key__']}.{field}" if is_sample else None
        return rebuilt(item, {**fields, field: self._load(fields[field], rng, name)})

    def _load(self, src: Any, rng: Rng | None, name: str | None) -> CPUBuffer:
        request, cuts = self._prepared  # type: ignore[attr-defined]  # set above
        request = replace(request, cuts=CropPlan(1, rng=rng, **cuts), name=name)
        frame, source = decode_cut(src, 0, request)
        boxes, flips = request.cuts.drawn([0], [0])
        return ImageBuffer(frame, source, request, boxes=boxes, flips=flips)
