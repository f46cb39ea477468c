"""Fit, pad, crop and place images: sizes, offsets and boxes as numbers, for the CPU and the GPU alike.

The numbers are those that the filters of :mod:`spdl_media.filter_desc` give.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from spdl_media._checks import as_int, check_choice, check_positive
from spdl_media.filter_desc import picture_ops
from spdl_media.operations import PictureOps, ScaleMode
from spdl_media.orientation import Box

__all__ = ("random_resized_crop",)

Size: TypeAlias = tuple[int, int]
"""Width and height."""

CHROMA_GRID = 4
"""Chroma is stored for at most 4x4 pixels, so multiples of it are whole samples in every format."""


@dataclass(frozen=True, slots=True)
class Placement:
    """How an image fills its place in the result, upright.

    Attributes:
        scaled: Size to which it is scaled.
        canvas: Size of the result; what the image does not cover is border.
        left: Where the image's first column lies; negative: that many are cut off.
        top: Where its first row lies.
    """

    scaled: Size
    canvas: Size
    left: int = 0
    top: int = 0

    @property
    def is_inside(self) -> bool:
        """Whether nothing of the image is cut off."""
        return self.scaled[0] <= self.canvas[0] and self.scaled[1] <= self.canvas[1]

    @property
    def has_border(self) -> bool:
        """Whether the image leaves part of the canvas uncovered."""
        return self.scaled[0] < self.canvas[0] or self.scaled[1] < self.canvas[1]

    def part_of(self, canvas: Any, axis: int = 0, step: Size = (1, 1)) -> Any:
        """The view of a canvas ``(..., H, W, ...)`` that the image fills.

        Args:
            canvas: An array.
            axis: Its axis of rows.
            step: Pixels across and down for each of its values, as in a plane of chroma.
        """
        return _cut(canvas, axis, (max(0, self.left), max(0, self.top)), self._shown(), step)

    def visible(self, image: Any, axis: int = 0, step: Size = (1, 1)) -> Any:
        """The view of a scaled image ``(..., H, W, ...)`` that the canvas shows, as :meth:`part_of`."""
        return _cut(image, axis, (max(0, -self.left), max(0, -self.top)), self._shown(), step)

    def _shown(self) -> Size:
        return min(self.scaled[0], self.canvas[0]), min(self.scaled[1], self.canvas[1])


def _cut(array: Any, axis: int, start: Size, length: Size, step: Size) -> Any:
    columns, rows = (
        # A sample of chroma at the edge belongs to the image, even where only a part of it is covered.
        slice(first // pixels, -(-(first + count) // pixels))
        for first, count, pixels in zip(start, length, step, strict=True)
    )
    return array[(*[slice(None)] * axis, rows, columns)]


def place(
    size: Size,
    width: int | None,
    height: int | None,
    mode: ScaleMode | None = None,
    *,
    sample: Size = (1, 1),
    grid: int = 1,
) -> Placement:
    """Fit an image into a size.

    Args:
        size: Size of the upright image.
        width: Width that is asked for; without ``height`` the aspect ratio is kept, without both the size.
        height: Height that is asked for.
        mode: ``"pad"`` fits all of it inside, ``"crop"`` covers all of it, ``None`` stretches.
        sample: Pixels across and down for a sample of chroma; an image with a border has whole samples.
        grid: Offsets are multiples of it.

    Raises:
        ValueError: A size that is not positive, or an unknown mode.
    """
    check_choice("scale_mode", mode, ("pad", "crop", None))
    width = width if width is None else check_positive("width", width)
    height = height if height is None else check_positive("height", height)
    w, h = size
    canvas = (
        width or (max(1, _round(height * w, h)) if height else w),
        height or (max(1, _round(width * h, w)) if width else h),
    )
    if mode is None or width is None or height is None:
        return Placement(canvas, canvas)
    if mode == "pad":
        # FFmpeg's pad filter rounds sizes and offsets to whole samples of chroma, so both are multiples.
        x, y = sample
        across = min(width // x, _round(height * w, h * x)) * x
        down = min(height // y, _round(width * h, w * y)) * y
        scaled = max(x, across), max(y, down)
        # Rounded down, as FFmpeg's pad filter does with (ow-iw)/2.
        left, top = (width - scaled[0]) // 2, (height - scaled[1]) // 2
        return Placement(scaled, canvas, left - left % x, top - top % y)
    # Rounded down, the longer side could leave a line of the canvas uncovered.
    scaled = max(width, _round(height * w, h)), max(height, _round(width * h, w))
    return middle(scaled, canvas, grid)


def middle(size: Size, canvas: Size, grid: int = 1) -> Placement:
    """Cut the middle out of an image that is at least as large as the canvas."""
    left, top = (
        # FFmpeg's crop filter rounds halves to even, as Python's round does; its pad filter rounds down.
        round(rest / 2) if grid == 1 else rest // (2 * grid) * grid
        for rest in (size[0] - canvas[0], size[1] - canvas[1])
    )
    return Placement(size, canvas, -left, -top)


def fits(box: Box, width: int, height: int) -> bool:
    x, y, w, h = box
    return x + w <= width and y + h <= height


def _round(numerator: int, denominator: int) -> int:
    """To the nearest, halves upwards."""
    # In whole numbers: Python's round takes halves to the even side, FFmpeg's upwards.
    return (2 * numerator + denominator) // (2 * denominator)


class _SupportsArray(Protocol):
    """A NumPy array, a CPU tensor of PyTorch, and whatever else NumPy can view."""

    def __array__(self) -> npt.NDArray[Any]: ...


Flips: TypeAlias = Sequence[bool] | _SupportsArray
"""One bool for each image; an array or a tensor of them is 1-D."""

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
    the image. A box that does not fit is drawn again, ten times at most. Then it is the middle of the
    image, as large as the bounds of the aspect ratio allow. That is the distribution of torchvision's
    ``RandomResizedCrop``; the random numbers are others.

    Args:
        size: ``(width, height)`` of the upright image.
        rng: NumPy's generator. One seed gives the same boxes each time.
        scale: Least and largest area, as a part of the image's.
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
    width, height = _numbers(size, 2, f"size must be (width, height), not {size!r}", whole=True)
    if width < 1 or height < 1:
        raise ValueError(f"size must be (width, height) of at least one pixel each, not {size!r}")
    areas = _checked_bounds("scale", scale)
    ratios = _checked_bounds("ratio", ratio)
    for _ in range(_ATTEMPTS):
        area = width * height * rng.uniform(*areas)
        # In the logarithm, so that 3:4 is as likely as 4:3.
        aspect = math.exp(rng.uniform(math.log(ratios[0]), math.log(ratios[1])))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        # Not below one pixel either: thin boxes of tiny images are rounded to nothing.
        if 0 < w <= width and 0 < h <= height:
            # The upper bound of integers() is exclusive.
            x, y = rng.integers(0, width - w + 1), rng.integers(0, height - h + 1)
            return int(x), int(y), w, h
    return _middle(width, height, ratios)


def _middle(width: int, height: int, ratios: tuple[float, float]) -> Box:
    """The largest box in the middle whose aspect ratio is within the bounds."""
    # The whole image, if its own aspect ratio is within the bounds.
    w, h = width, height
    if width / height < ratios[0]:
        h = max(1, round(width / ratios[0]))
    elif width / height > ratios[1]:
        w = max(1, round(height * ratios[1]))
    return (width - w) // 2, (height - h) // 2, w, h


def _numbers(values: Any, count: int, message: str, *, whole: bool = False) -> tuple[Any, ...]:
    """So many numbers, as they are or as ints.

    Raises:
        TypeError: They are others.
    """
    if isinstance(values, str) or not hasattr(values, "__len__") or len(values) != count:
        raise TypeError(message)
    numbers = tuple(map(as_int, values)) if whole else tuple(values)
    if not all(isinstance(number, Real) for number in numbers):
        raise TypeError(message)
    return numbers


def _checked_bounds(name: str, bounds: tuple[float, float]) -> tuple[float, float]:
    message = f"{name} must be (least, largest), both positive, not {bounds!r}"
    least, largest = _numbers(bounds, 2, message)
    # Written so that NaN fails.
    if not 0 < least <= largest < math.inf:
        raise ValueError(message)
    return least, largest


def _checked_box(box: object, position: int) -> Box | None:
    """A box as the caller wrote it, as plain ints.

    Raises:
        TypeError: It is not four whole numbers.
        ValueError: It begins outside the image, or is empty.
    """
    if box is None:
        return None
    message = (
        f"crops[{position}] must be (x, y, width, height) in whole pixels or None, not {box!r}"
    )
    x, y, w, h = _numbers(box, 4, message, whole=True)
    if x < 0 or y < 0 or w < 1 or h < 1:
        raise ValueError(
            f"crops[{position}] is {(x, y, w, h)}: x and y must be at least 0, width and height at least 1"
        )
    return x, y, w, h


class CropPlan:
    """Crops and flips of the images of a batch.

    Args:
        crops: A box or ``None`` for each image; ``None`` for none.
        flips: A bool for each image, as a sequence or a 1-D array or tensor; ``None`` for none.
    """

    def __init__(
        self, crops: Sequence[Box | None] | None = None, flips: Flips | None = None
    ) -> None:
        self._boxes = (
            None if crops is None else [_checked_box(box, i) for i, box in enumerate(crops)]
        )
        self._flips = None if flips is None else _flags(flips)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is cut or mirrored."""
        return self._boxes is None and self._flips is None

    def check(self, count: int) -> None:
        """Refuse plans for another number of images.

        Raises:
            ValueError: There is not one entry for each image.
        """
        for name, values in (("crops", self._boxes), ("flips", self._flips)):
            if values is not None and len(values) != count:
                raise ValueError(
                    f"{name} must have one entry for each of the {count} inputs, not {len(values)}"
                )

    def box(self, position: int) -> Box | None:
        return None if self._boxes is None else self._boxes[position]

    def filter(self, position: int, filter: str | PictureOps | None) -> str | PictureOps | None:
        """The filters of the image at this position, its own before those of all."""
        if self.is_empty:
            return filter
        mirror = self._flips is not None and self._flips[position]
        # Boxes are those of upright images, and without any filter none would be turned. Images without a
        # box or a flip are turned, too: otherwise the orientations of one batch would differ.
        ops = picture_ops(filter)
        if ops is None:
            own = filter if isinstance(filter, str) else None
            ops = PictureOps(filter_desc=own, pix_fmt=None)
        return ops.with_cut(self.box(position), mirror=mirror)


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
