"""What is cut out of each image and mirrored: boxes that are given, or drawn once the size is known.

Functions choose boxes; :func:`apply_crop` says where key points and boxes lie afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from spdl_media._checks import as_int, check_int
from spdl_media.errors import ConvertError
from spdl_media.geometry import Box, ScaleMode, Size, fits, place
from spdl_media.operations import PictureOps, picture_ops

__all__ = ("RandomResizedCrop", "ResizeCenterCrop", "apply_crop")


class _SupportsArray(Protocol):
    """A NumPy array, a CPU tensor of PyTorch, and whatever else NumPy can view."""

    def __array__(self) -> npt.NDArray[Any]: ...


Crop: TypeAlias = Callable[[Size, np.random.Generator], Box | None]
"""Chooses a box of an upright image of this size; ``None`` for all of it."""

Crops: TypeAlias = Box | Crop | Sequence[Box | Crop | None]
Flips: TypeAlias = float | Sequence[bool] | _SupportsArray
Rng: TypeAlias = np.random.Generator | int

_ATTEMPTS = 10
_GENERATOR = "a generator, such as np.random.default_rng()"


def check_rng(rng: Rng | None) -> Rng | None:
    """Return a generator, a seed or ``None``, for ``np.random.default_rng``.

    Raises:
        TypeError: It is none of these.
        ValueError: The seed is negative.
    """
    if rng is None or isinstance(rng, np.random.Generator):
        return rng
    if as_int(rng) is None:
        raise TypeError(f"rng must be {_GENERATOR}, or a seed, not {rng!r}")
    return check_int("rng", rng, at_least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomResizedCrop:
    """Boxes of random area, aspect ratio and place for ``crops=``, as in training recipes of classifiers.

    The area is uniform, the logarithm of the aspect ratio is uniform, and so is the place among those inside
    the image. A box that does not fit is drawn again, ten times at most. Then it is the middle of the
    image, as large as the bounds of the aspect ratio allow. That is the distribution of torchvision's
    ``RandomResizedCrop``; the random numbers are others. As there, the box is stretched to the size of the
    result if ``scale_mode=None`` says so.

    Args:
        scale: Least and largest area, as a part of the image's.
        ratio: Least and largest aspect ratio, width by height.

    Raises:
        TypeError: ``scale`` or ``ratio`` is no two numbers.
        ValueError: Bounds are not positive and in order.

    Thread safety: immutable, free to share.

    Example:
        >>> crop = RandomResizedCrop(scale=(1, 1), ratio=(4 / 3, 4 / 3))
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
            rng: NumPy's generator. One seed gives the same boxes each time.

        Raises:
            TypeError: ``rng`` is no generator of NumPy's, or ``size`` no two numbers.
            ValueError: ``size`` is not positive.
        """
        if not isinstance(rng, np.random.Generator):
            raise TypeError(f"rng must be {_GENERATOR}, not {rng!r}")
        width, height = _checked_size(size)
        least, largest = self.scale
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        for _ in range(_ATTEMPTS):
            # At once, because each call takes 3 microseconds.
            by_area, by_aspect, across, down = rng.random(4).tolist()
            area = width * height * (least + by_area * (largest - least))
            # In the logarithm, so that 3:4 is as likely as 4:3.
            aspect = math.exp(low + by_aspect * (high - low))
            w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            # Not below one pixel either: thin boxes of tiny images are rounded to nothing.
            if 0 < w <= width and 0 < h <= height:
                return int(across * (width - w + 1)), int(down * (height - h + 1)), w, h
        return _middle(width, height, self.ratio)


def _middle(width: int, height: int, ratios: tuple[float, float]) -> Box:
    """The largest box in the middle whose aspect ratio is within the bounds."""
    # The whole image, if its own aspect ratio is within the bounds.
    w, h = width, height
    if width / height < ratios[0]:
        h = max(1, round(width / ratios[0]))
    elif width / height > ratios[1]:
        w = max(1, round(height * ratios[1]))
    return (width - w) // 2, (height - h) // 2, w, h


@dataclass(frozen=True, slots=True)
class ResizeCenterCrop:
    """The square in the middle of each image for ``crops=``, as in evaluation recipes of classifiers.

    With ``ResizeCenterCrop(256, 224)`` and ``width=224, height=224`` the result is that of torchvision's
    ``Resize(256)`` and ``CenterCrop(224)``, but for edges that here fall on whole pixels of the image.

    Args:
        resize_size: What the shorter side of the image is scaled to.
        crop_size: Side of the square that is cut out then.

    Raises:
        TypeError: A size is no whole number.
        ValueError: A size is not positive, or ``crop_size`` is larger than ``resize_size``.

    Thread safety: immutable, free to share.
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
        """Say which box ``(x, y, width, height)`` of an upright image of this ``(width, height)`` it is.

        Raises:
            TypeError: ``size`` is no two numbers.
            ValueError: ``size`` is not positive.
        """
        width, height = _checked_size(size)
        (x, w), (y, h) = (self._span(side, min(width, height)) for side in (width, height))
        return x, y, w, h

    def _span(self, side: int, shorter: int) -> tuple[int, int]:
        """Where the square begins along a side, and how long it is there."""
        resized = self.resize_size * side // shorter
        start = round((resized - self.crop_size) / 2)
        first = min(side - 1, round(start * side / resized))
        return first, max(1, round((start + self.crop_size) * side / resized) - first)


def apply_crop(
    coordinates: npt.ArrayLike,
    box: Box,
    size: tuple[int | None, int | None] = (None, None),
    *,
    flip: bool = False,
    scale_mode: ScaleMode | None = "pad",
) -> npt.NDArray[np.float64]:
    """Say where key points or boxes of an upright image lie in what was cut out of it and scaled.

    Coordinates are continuous: the image's left edge is 0, its right edge its width, and the middle of the
    first pixel 0.5. What lies outside of the box comes out outside of the result; ``np.clip`` cuts it.

    Args:
        coordinates: Points ``(..., 2)`` as x and y, or boxes ``(..., 4)`` as left, top, right and bottom.
        box: What was cut out, ``(x, y, width, height)``: one of ``buffer.boxes``.
        size: ``(width, height)`` of the result, as ``width=`` and ``height=`` said it.
        flip: Whether it was mirrored: one of ``buffer.flips``.
        scale_mode: As it was loaded.

    Returns:
        float64 of the same shape, a copy.

    Raises:
        TypeError: ``box`` is no four whole numbers, or ``size`` no two.
        ValueError: The last axis has neither 2 nor 4 numbers, or a size is not positive.

    Thread safety: safe.

    Example:
        >>> apply_crop([(30, 25)], (20, 10, 20, 20), (40, 40), flip=True)
        array([[20., 30.]])
    """
    given = np.asarray(coordinates, np.float64)
    if given.shape[-1:] not in ((2,), (4,)):
        raise ValueError(
            f"coordinates must be points (..., 2) or boxes (..., 4), not of shape {given.shape}"
        )
    x, y, w, h = _checked_box(box, "box")
    if not isinstance(size, Iterable) or len(sides := tuple(size)) != 2:
        raise TypeError(f"size must be (width, height), either of them perhaps None, not {size!r}")
    placement = place((w, h), sides[0], sides[1], scale_mode)
    points = given.reshape(*given.shape[:-1], given.shape[-1] // 2, 2) - (x, y)
    if flip:
        # The right edge of a box becomes its left one.
        points[..., 0] = w - points[..., ::-1, 0]
    across, down = placement.scaled
    points = points * (across / w, down / h) + (placement.left, placement.top)
    return points.reshape(given.shape)


def _whole_numbers(values: Any, count: int, message: str) -> tuple[Any, ...]:
    """So many numbers, as ints.

    Raises:
        TypeError: They are others.
    """
    if type(values) is tuple and [*map(type, values)] == [int] * count:
        return values  # nearly always
    numbers = tuple(map(as_int, values)) if hasattr(values, "__len__") else ()
    if len(numbers) != count or None in numbers:
        raise TypeError(message)
    return numbers


def _checked_size(size: Any) -> Size:
    width, height = _whole_numbers(size, 2, f"size must be (width, height), not {size!r}")
    if width < 1 or height < 1:
        raise ValueError(f"size must be (width, height) of at least one pixel each, not {size!r}")
    return width, height


def _checked_bounds(name: str, bounds: tuple[float, float]) -> tuple[float, float]:
    message = f"{name} must be (least, largest), both positive, not {bounds!r}"
    least, largest = bounds if hasattr(bounds, "__len__") and len(bounds) == 2 else ("", "")
    if not (isinstance(least, Real) and isinstance(largest, Real)):
        raise TypeError(message)
    # Written so that NaN fails.
    if not 0 < least <= largest < math.inf:
        raise ValueError(message)
    return least, largest


def _checked_box(box: object, name: str, otherwise: str = "") -> Box:
    """A box as the caller wrote it, as plain ints.

    Raises:
        TypeError: It is not four whole numbers.
        ValueError: It begins outside the image, or is empty.
    """
    message = f"{name} must be (x, y, width, height) in whole pixels{otherwise}, not {box!r}"
    x, y, w, h = _whole_numbers(box, 4, message)
    if x < 0 or y < 0 or w < 1 or h < 1:
        raise ValueError(
            f"{name} is {(x, y, w, h)}: x and y must be at least 0, width and height at least 1"
        )
    return x, y, w, h


class CropPlan:
    """Crops and flips of the images of a batch. What is random is drawn when the size of its image is known.

    Args:
        count: Number of images.
        crops: A box or a function for all images, or a sequence of them, or of ``None``, one an image.
        flips: A bool or a probability for all images, or bools as a sequence or a 1-D array or tensor.
        rng: A generator or a seed; ``None``: other numbers each time.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: There is not one entry for each image, or no such box or probability.

    Thread safety: threads may draw for different images at the same time.
    """

    def __init__(
        self,
        count: int,
        crops: Crops | None,
        flips: Flips | None,
        rng: Rng | None,
    ) -> None:
        rng = check_rng(rng)
        self._crops = _crop_list(crops, count)
        self._flips = _flip_list(flips, count)
        for name, entries in (("crops", self._crops), ("flips", self._flips)):
            if len(entries) != count:
                raise ValueError(
                    f"{name} must have one entry for each of the {count} inputs, not {len(entries)}"
                )
        # Boxes, and whether they were mirrored.
        self._drawn: dict[int, tuple[Box, bool]] = {}
        self._rngs: Any = [rng] * count
        is_random = any(map(callable, self._crops)) or float in map(type, self._flips)
        # One of its own for each image: what others draw, and in which order, makes no difference to it.
        if is_random and not (count == 1 and isinstance(rng, np.random.Generator)):
            self._rngs = np.random.default_rng(rng).integers(1 << 63, size=count)

    def filter(
        self, position: int, size: Size, filter: str | PictureOps | None, source: str
    ) -> PictureOps:
        """The filters of the image at a position, its cut before those of all.

        Args:
            position: Of the image.
            size: Of the upright image.
            filter: The filters of all.
            source: What it is read from, for messages.

        Raises:
            ConvertError: Its box does not lie inside it.
            TypeError: A function gives what is no box.
            ValueError: A function gives an empty box, or one that begins outside the image.
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
        # Boxes are those of upright images, and without any filter none would be turned. Images without a
        # box or a flip are turned, too: otherwise the orientations of one batch would differ.
        ops = picture_ops(filter)
        if ops is None:
            own = filter if isinstance(filter, str) else None
            ops = PictureOps(filter_desc=own, pix_fmt=None)
        return ops.with_cut(None if box == (0, 0, *size) else box, mirror=mirror)

    def _draw(self, position: int, size: Size) -> tuple[Box, bool]:
        if position not in self._drawn:
            crop, flip = self._crops[position], self._flips[position]
            # A generator takes 8 microseconds to make, and this function takes none.
            draws = callable(crop) and not isinstance(crop, ResizeCenterCrop)
            rng: Any = None
            if draws or isinstance(flip, float):
                rng = np.random.default_rng(self._rngs[position])
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
        """Boxes and flips of these images, ``None`` and False for those that were not loaded."""
        cuts = [self._drawn[at] if at in loaded else (None, False) for at in positions]
        return tuple(box for box, _ in cuts), tuple(mirror for _, mirror in cuts)


def _crop_list(crops: Any, count: int) -> list[Box | Crop | None]:
    """One entry for each image, of one for all or of as many."""
    if crops is None or callable(crops):
        return [crops] * count
    wanted = "must be a box (x, y, width, height), a function, or a sequence of them, one an image"
    if isinstance(crops, str) or not isinstance(crops, Iterable):
        raise TypeError(f"crops {wanted}, not {crops!r}")
    entries = list(crops)
    if entries and isinstance(entries[0], Real):
        return [_checked_box(entries, "crops")] * count
    return [
        one
        if one is None or callable(one)
        else _checked_box(one, f"crops[{position}]", ", a function or None")
        for position, one in enumerate(entries)
    ]


def _flip_list(flips: Any, count: int) -> list[Any]:
    """The same for flips."""
    if flips is None or isinstance(flips, bool | np.bool_):
        return [bool(flips)] * count
    if not isinstance(flips, Real):
        return _flags(flips)
    chance = float(flips)
    # Written so that NaN fails.
    if not 0 <= chance <= 1:
        raise ValueError(f"flips must be a probability from 0 to 1, not {flips!r}")
    return [chance] * count


def _flags(flips: Any) -> list[bool]:
    """One bool each, of whatever NumPy makes a 1-D array of bools of."""
    message = "flips must be one True or False for each image, not"
    is_array = hasattr(flips, "__array__")
    try:
        # Tensors one by one would be as many arrays of no dimension.
        values = np.asarray(flips if is_array else list(flips))
    # RuntimeError: PyTorch's, for tensors on a GPU
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{message} {flips!r}: {error}") from error
    if values.shape == (0,):
        return []
    if values.dtype != np.bool_ or values.ndim != 1:
        for position, value in enumerate([] if is_array or values.ndim != 1 else flips):
            if np.asarray(value).dtype != np.bool_:
                raise TypeError(f"flips[{position}] must be True or False, not {value!r}")
        raise TypeError(f"{message} {values.dtype} of shape {values.shape}")
    return [bool(value) for value in values]
