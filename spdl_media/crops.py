"""Crops and flips of images: fixed boxes, or boxes that a function chooses when the size is known.

:func:`apply_crop` transforms key points and bounding boxes to the cropped image.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeAlias, Union, cast

import numpy as np
import numpy.typing as npt

from spdl_media._checks import as_int, as_numpy, check_int
from spdl_media.errors import ConvertError
from spdl_media.geometry import Box, ScaleMode, Size, fits, place
from spdl_media.inputs import SupportsArray
from spdl_media.operations import Desc, PictureOps, picture_ops

__all__ = ("RandomResizedCrop", "ResizeCenterCrop", "apply_crop")


Crop: TypeAlias = Callable[[Size, "np.random.Generator"], Box | None]
"""Returns the crop box for an upright image of a size, or ``None`` for the whole image."""

Crops: TypeAlias = Box | Crop | Sequence[Box | Crop | None]
Flips: TypeAlias = float | Sequence[bool] | SupportsArray
# As text, because Python imports np.random at its first use, which takes 10 ms.
Rng: TypeAlias = Union["np.random.Generator", int]

_ATTEMPTS = 10
_GENERATOR = "a generator, such as np.random.default_rng()"


def check_rng(rng: Rng | None) -> Rng | None:
    """Check an argument for ``np.random.default_rng``: a generator, a seed or ``None``.

    Raises:
        TypeError: ``rng`` is none of these.
        ValueError: The seed is negative.
    """
    if rng is None or isinstance(rng, np.random.Generator):
        return rng
    if as_int(rng) is None:
        raise TypeError(f"rng must be {_GENERATOR}, or a seed, not {rng!r}")
    return check_int("rng", rng, at_least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomResizedCrop:
    """Crop boxes of random area, aspect ratio and position for ``crops=``, for training of classifiers.

    The area, the logarithm of the aspect ratio, and the position inside the image are uniformly distributed.
    A box that does not fit into the image is drawn again, up to ten attempts. After that, the box is the
    largest one in the centre of the image whose aspect ratio is within the bounds. This is the distribution
    of torchvision's ``RandomResizedCrop``, but with other random numbers. With ``scale_mode=None`` the box is
    stretched to the size of the result, as in torchvision.

    Args:
        scale: Smallest and largest area, as fractions of the image's area.
        ratio: Smallest and largest aspect ratio, width divided by height.

    Raises:
        TypeError: ``scale`` or ``ratio`` is not a pair of numbers.
        ValueError: The bounds are not positive, or not in order.

    Thread safety: safe; it is immutable.

    Example:
        >>> crop = sm.RandomResizedCrop(scale=(1, 1), ratio=(4 / 3, 4 / 3))
        >>> crop((500, 375), np.random.default_rng(0))
        (0, 0, 500, 375)
    """

    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

    def __post_init__(self) -> None:
        for name in ("scale", "ratio"):
            object.__setattr__(self, name, _checked_bounds(name, getattr(self, name)))

    def __call__(self, size: Size, rng: np.random.Generator) -> Box:
        """Draw a box ``(x, y, width, height)``.

        Args:
            size: ``(width, height)`` of the upright image.
            rng: A NumPy generator. The same seed gives the same boxes.

        Raises:
            TypeError: ``rng`` is not a NumPy generator.
        """
        if not isinstance(rng, np.random.Generator):
            raise TypeError(f"rng must be {_GENERATOR}, not {rng!r}")
        width, height = size
        least, largest = self.scale
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        for _ in range(_ATTEMPTS):
            # Four numbers in one call, because a call takes 3 microseconds.
            by_area, by_aspect, across, down = rng.random(4).tolist()
            area = width * height * (least + by_area * (largest - least))
            # Uniform in the logarithm, so that 3:4 is as likely as 4:3.
            aspect = math.exp(low + by_aspect * (high - low))
            w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            # Sides may also be rounded to 0, for thin boxes in tiny images.
            if 0 < w <= width and 0 < h <= height:
                return int(across * (width - w + 1)), int(down * (height - h + 1)), w, h
        return _middle(width, height, self.ratio)


def _middle(width: int, height: int, ratios: tuple[float, float]) -> Box:
    """Return the largest box in the centre of an image whose aspect ratio is within the bounds."""
    w = min(width, max(1, round(height * ratios[1])))
    h = min(height, max(1, round(width / ratios[0])))
    return (width - w) // 2, (height - h) // 2, w, h


@dataclass(frozen=True, slots=True)
class ResizeCenterCrop:
    """The square crop box in the centre of each image for ``crops=``, for evaluation of classifiers.

    With ``ResizeCenterCrop(256, 224)`` and ``width=224, height=224`` the result is that of torchvision's
    ``Resize(256)`` and ``CenterCrop(224)``, except that the edges of the box are rounded to whole pixels of
    the image.

    Args:
        resize_size: Size to which the shorter side of the image is scaled.
        crop_size: Side of the square that is then cut out of the scaled image.

    Raises:
        TypeError: A size is not a whole number.
        ValueError: A size is not positive, or ``crop_size`` is larger than ``resize_size``.

    Thread safety: safe; it is immutable.
    """

    resize_size: int
    crop_size: int

    def __post_init__(self) -> None:
        for name in ("resize_size", "crop_size"):
            object.__setattr__(self, name, check_int(name, getattr(self, name)))
        if self.crop_size > self.resize_size:
            raise ValueError(
                f"crop_size must be at most resize_size, {self.resize_size}, not {self.crop_size}"
            )

    def __call__(self, size: Size, _rng: np.random.Generator | None = None, /) -> Box:
        """Return the box ``(x, y, width, height)`` for an upright image of size ``(width, height)``."""
        width, height = size
        (x, w), (y, h) = (self._span(side, min(width, height)) for side in (width, height))
        return x, y, w, h

    def _span(self, side: int, shorter: int) -> tuple[int, int]:
        """Return start and length of the square along a side of the image."""
        resized = self.resize_size * side // shorter
        start = round((resized - self.crop_size) / 2)
        first = min(side - 1, round(start * side / resized))
        return first, max(1, round((start + self.crop_size) * side / resized) - first)


def is_random_cut(crops: Crops | None, flips: Flips | None) -> bool:
    """Whether the cut of an image, whose flip is a bool or a float, may differ from call to call."""
    draws = callable(crops) and not isinstance(crops, ResizeCenterCrop)
    return draws or (isinstance(flips, float) and 0 < flips < 1)


def apply_crop(
    coordinates: npt.ArrayLike,
    box: Box,
    size: tuple[int | None, int | None] = (None, None),
    *,
    flip: bool = False,
    scale_mode: ScaleMode | None = "pad",
) -> npt.NDArray[np.float64]:
    """Transform key points or bounding boxes of an upright image to the cropped, scaled and mirrored image.

    Coordinates are continuous: 0 is the left edge of the image, its width is the right edge, and 0.5 is the
    centre of the first pixel. Points outside of the crop box get coordinates outside of the result; limit
    them with ``np.clip``.

    Args:
        coordinates: Points ``(..., 2)`` as x and y, or boxes ``(..., 4)`` as left, top, right and bottom.
        box: The crop box ``(x, y, width, height)``, from ``buffer.boxes``.
        size: ``(width, height)`` of the result, as passed for ``width=`` and ``height=``.
        flip: Whether the image was mirrored, from ``buffer.flips``.
        scale_mode: The ``scale_mode=`` with which the image was loaded.

    Returns:
        A new float64 array of the same shape; ``(0, 4)`` for an empty list, as of an image without objects.

    Raises:
        TypeError: ``box`` is not four whole numbers, or ``size`` is not two.
        ValueError: The last axis has neither 2 nor 4 numbers, or a size is not positive.

    Thread safety: safe.

    Example:
        >>> sm.apply_crop([(30, 25)], (20, 10, 20, 20), (40, 40), flip=True)
        array([[20., 30.]])
    """
    given = np.asarray(coordinates, np.float64)
    if given.shape == (0,):
        given = given.reshape(0, 4)
    if given.shape[-1:] not in ((2,), (4,)):
        raise ValueError(
            f"coordinates must be points (..., 2) or boxes (..., 4), not of shape {given.shape}"
        )
    x, y, w, h = _checked_box(box, "box")
    if not isinstance(size, Iterable) or len(sides := tuple(size)) != 2:
        raise TypeError(f"size must be (width, height), of which one may be None, not {size!r}")
    placement = place((w, h), sides[0], sides[1], scale_mode)
    points = given.reshape(*given.shape[:-1], given.shape[-1] // 2, 2) - (x, y)
    if flip:
        # [::-1], because the right edge of a box becomes its left edge.
        points[..., 0] = w - points[..., ::-1, 0]
    across, down = placement.scaled
    points = points * (across / w, down / h) + (placement.left, placement.top)
    return points.reshape(given.shape)


def _checked_bounds(name: str, bounds: tuple[float, float]) -> tuple[float, float]:
    unit = "fractions of the image's area" if name == "scale" else "both positive"
    message = f"{name} must be (least, largest), {unit}, not {bounds!r}"
    least, largest = bounds if hasattr(bounds, "__len__") and len(bounds) == 2 else ("", "")
    if not (isinstance(least, Real) and isinstance(largest, Real)):
        raise TypeError(message)
    # `not (... < ...)`, so that NaN fails.
    if not 0 < least <= largest < math.inf or (name == "scale" and least >= 1 and largest > 1):
        raise ValueError(message)
    return least, largest


def _checked_box(box: object, name: str, otherwise: str = "") -> Box:
    """Return a crop box of the caller's as a tuple of ints.

    Raises:
        TypeError: The box is not four whole numbers.
        ValueError: The box begins at a negative coordinate, or is empty.
    """
    message = f"{name} must be (x, y, width, height) in whole pixels{otherwise}, not {box!r}"
    numbers = tuple(map(as_int, box)) if isinstance(box, Collection) else ()
    if len(numbers) != 4 or None in numbers:
        raise TypeError(message)
    x, y, w, h = cast("Box", numbers)
    if x < 0 or y < 0 or w < 1 or h < 1:
        raise ValueError(
            f"{name} is {(x, y, w, h)}: x and y must be at least 0, width and height at least 1"
        )
    return x, y, w, h


class CropPlan:
    """Crops and flips of the images of a batch. Random ones are drawn when the size of the image is known.

    Args:
        count: Number of images.
        crops: A box or a function for all images, or a sequence of boxes, functions and ``None``, one per
            image.
        flips: A bool or a probability for all images, or bools as a sequence or a 1-D array or tensor.
        rng: A generator or a seed; ``None``: unpredictable numbers.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: There is not one entry for each image, or a box or probability is invalid.

    Thread safety: threads may draw for different images at the same time.
    """

    def __init__(
        self, count: int, crops: Crops | None, flips: Flips | None, rng: Rng | None
    ) -> None:
        rng = check_rng(rng)
        self._crops = _crop_list(crops, count)
        self._flips = _flip_list(flips, count)
        for name, entries in (("crops", self._crops), ("flips", self._flips)):
            if len(entries) != count:
                raise ValueError(
                    f"{name} must have one entry for each of the {count} inputs, not {len(entries)}"
                )
        # The box, and whether it is mirrored, by the position of the image.
        self._drawn: dict[int, tuple[Box, bool]] = {}
        self._rngs: Any = [rng] * count
        is_random = any(map(is_random_cut, self._crops, self._flips))
        # A seed for each image, so that its numbers do not depend on what is drawn for others, or when.
        if is_random and not (count == 1 and isinstance(rng, np.random.Generator)):
            self._rngs = np.random.default_rng(rng).integers(1 << 63, size=count)

    def filter(self, position: int, size: Size, filter: Desc, source: str) -> PictureOps:
        """Return the filters for the image at a position: its crop and flip, then those of all images.

        Args:
            position: Position of the image in the batch.
            size: Size of the upright image.
            filter: The filters of all images.
            source: Name of the source in messages.

        Raises:
            ConvertError: The box is not inside the image.
            TypeError: A function returns something else than a box or ``None``.
            ValueError: A function returns an empty box, or one that begins at a negative coordinate.
            Exception: A function raises it; a note names the image.
        """
        try:
            box, mirror = self._draw(position, size)
        except Exception as error:
            error.add_note(f"Raised for {source}, {size[0]}x{size[1]}, by crops[{position}]")
            raise
        if not fits(box, *size):
            raise ConvertError(
                f"the crop {box} (x, y, width, height) does not lie inside the image, which is "
                f"{size[0]}x{size[1]}",
                source=source,
            )
        # Make operations even if there is no filter, so that the image is turned upright: boxes are those of
        # upright images. Also for an image without a crop or flip, so that all of the batch are upright.
        ops = picture_ops(filter)
        if ops is None:
            ops = PictureOps(filter_desc=filter if isinstance(filter, str) else None, pix_fmt=None)
        return ops.with_cut(None if box == (0, 0, *size) else box, mirror=mirror)

    def _draw(self, position: int, size: Size) -> tuple[Box, bool]:
        if position not in self._drawn:
            crop, flip = self._crops[position], self._flips[position]
            # Made only if it is used, because that takes 8 microseconds.
            draws = is_random_cut(crop, flip)
            rng: Any = np.random.default_rng(self._rngs[position]) if draws else None
            if callable(crop):
                crop = crop(size, rng)
                if crop is not None:
                    crop = _checked_box(crop, f"what crops[{position}] gives", " or None")
            mirror = rng.random() < flip if isinstance(flip, float) else flip
            self._drawn[position] = crop or (0, 0, *size), mirror
        return self._drawn[position]

    def drawn(
        self, positions: Iterable[int], loaded: Container[int]
    ) -> tuple[tuple[Box | None, ...], tuple[bool, ...]]:
        """Return boxes and flips of these images; ``None`` and False for those that were not loaded."""
        cuts = [self._drawn[at] if at in loaded else (None, False) for at in positions]
        return tuple(box for box, _ in cuts), tuple(mirror for _, mirror in cuts)


def _crop_list(crops: Any, count: int) -> list[Box | Crop | None]:
    """Return one crop per image, from one for all images or from a sequence."""
    if isinstance(crops, type):
        raise TypeError(f"crops is the class {crops.__name__}, so make one: {crops.__name__}()")
    if crops is None or callable(crops):
        return [crops] * count
    if isinstance(crops, str) or not isinstance(crops, Iterable):
        wanted = "a box (x, y, width, height), a function, or a sequence of them, one an image"
        raise TypeError(f"crops must be {wanted}, not {crops!r}")
    # Not list() of an array: the entries of a tensor would be tensors.
    entries = (
        np.atleast_1d(as_numpy(crops)).tolist() if hasattr(crops, "__array__") else list(crops)
    )
    if entries and isinstance(entries[0], Real):
        return [_checked_box(entries, "crops")] * count
    for position, one in enumerate(entries):
        if one is not None and not callable(one):
            entries[position] = _checked_box(one, f"crops[{position}]", ", a function or None")
    return entries


def _flip_list(flips: Any, count: int) -> list[Any]:
    """Return one flip per image, a bool or a probability, from one for all images or from a sequence."""
    if flips is None:
        return [False] * count
    if isinstance(flips, Real | np.bool_):
        probability = float(flips)
        # `not (... <= ...)`, so that NaN fails.
        if not 0 <= probability <= 1:
            raise ValueError(f"flips must be a probability from 0 to 1, not {flips!r}")
        # A bool draws no random number.
        return [probability if 0 < probability < 1 else bool(probability)] * count
    entries = np.atleast_1d(as_numpy(flips))
    if entries.dtype != np.bool_ or entries.ndim != 1:
        raise TypeError(
            f"flips must be a bool, a probability, or True or False for each image, not {flips!r}"
        )
    return list(entries.tolist())
