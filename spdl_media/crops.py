"""Boxes cut out of pictures: chosen by chance, written as filters, and checked against the picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import TypeAlias, TypeVar

import numpy as np

from spdl_media._checks import as_int

__all__ = ("random_resized_crop",)

Box: TypeAlias = tuple[int, int, int, int]
"""``(x, y, width, height)`` in pixels of the upright picture, from its upper left corner."""

T = TypeVar("T")

_ATTEMPTS = 10


def random_resized_crop(
    size: tuple[int, int],
    rng: np.random.Generator,
    *,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> Box:
    """Choose a box of random area, aspect ratio and place, as recipes for training classifiers do.

    The area is uniform, the logarithm of the aspect ratio is uniform, and so is the place among those inside
    the picture. A box that does not fit is drawn again, ten times at most; then it is the middle of the
    picture, as large as the bounds of the aspect ratio allow. That is the distribution of torchvision's
    ``RandomResizedCrop``; the random numbers are others.

    Args:
        size: ``(width, height)`` of the upright picture.
        rng: NumPy's generator. One seed gives the same boxes each time.
        scale: Least and largest area, as a part of the picture's.
        ratio: Least and largest aspect ratio, width by height.

    Returns:
        ``(x, y, width, height)`` for ``crops=`` of :func:`~spdl_media.load_image_batch`.

    Raises:
        TypeError: ``rng`` is no generator of NumPy's, or ``size``, ``scale`` or ``ratio`` no two numbers.
        ValueError: A size that is not positive, or bounds that are not positive and in order.

    Thread safety: safe, if no other thread uses ``rng``.

    Example:
        >>> random_resized_crop((500, 375), np.random.default_rng(0), scale=(1, 1), ratio=(4 / 3, 4 / 3))
        (0, 0, 500, 375)
    """
    if not isinstance(rng, np.random.Generator):
        raise TypeError(f"rng must be a generator, such as np.random.default_rng(), not {rng!r}")
    width, height = _checked_size(size)
    areas = _checked_bounds("scale", scale)
    ratios = _checked_bounds("ratio", ratio)
    for _ in range(_ATTEMPTS):
        area = width * height * rng.uniform(*areas)
        aspect = math.exp(rng.uniform(math.log(ratios[0]), math.log(ratios[1])))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            x, y = rng.integers(0, width - w + 1), rng.integers(0, height - h + 1)
            return int(x), int(y), w, h
    return _middle(width, height, ratios)


def _middle(width: int, height: int, ratios: tuple[float, float]) -> Box:
    """The largest box in the middle whose aspect ratio is within the bounds."""
    w, h = width, height
    if width / height < ratios[0]:
        h = max(1, round(width / ratios[0]))
    elif width / height > ratios[1]:
        w = max(1, round(height * ratios[1]))
    return (width - w) // 2, (height - h) // 2, w, h


def _checked_size(size: tuple[int, int]) -> tuple[int, int]:
    message = f"size must be (width, height), not {size!r}"
    width, height = (_whole(side, message) for side in _pair(size, message))
    if width < 1 or height < 1:
        raise ValueError(f"size must be (width, height) of at least one pixel each, not {size!r}")
    return width, height


def _checked_bounds(name: str, bounds: tuple[float, float]) -> tuple[float, float]:
    message = f"{name} must be (least, largest), both positive, not {bounds!r}"
    least, largest = _pair(bounds, message)
    if not all(isinstance(bound, Real) for bound in (least, largest)):
        raise TypeError(message)
    if not 0 < least <= largest < math.inf:
        raise ValueError(message)
    return least, largest


def _pair(values: Sequence[T], message: str) -> tuple[T, T]:
    if isinstance(values, str) or not hasattr(values, "__len__") or len(values) != 2:
        raise TypeError(message)
    first, second = values
    return first, second


def _whole(value: object, message: str) -> int:
    number = as_int(value)
    if number is None:
        raise TypeError(message)
    return number


def checked_box(box: object, position: int) -> Box | None:
    """A box as the caller wrote it, as plain ints.

    Raises:
        TypeError: It is not four whole numbers.
        ValueError: It begins outside the picture, or is empty.
    """
    if box is None:
        return None
    message = (
        f"crops[{position}] must be (x, y, width, height) in whole pixels or None, not {box!r}"
    )
    if isinstance(box, str) or not hasattr(box, "__len__") or len(box) != 4:
        raise TypeError(message)
    x, y, w, h = (_whole(value, message) for value in box)  # type: ignore[attr-defined]  # four values
    if x < 0 or y < 0 or w < 1 or h < 1:
        raise ValueError(
            f"crops[{position}] is {(x, y, w, h)}: x and y must be at least 0, width and height at least 1"
        )
    return x, y, w, h
