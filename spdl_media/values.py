"""Convert pixel values to floats: types, means and standard deviations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from spdl_media._checks import check_choice
from spdl_media.formats import Array, is_yuv, pixel_layout

DType: TypeAlias = Literal["uint8", "float16", "float32"]
PerChannel: TypeAlias = float | Sequence[float] | npt.NDArray[Any]
"""A number for each channel, or one for all."""

# Largest difference of float32 values from PyTorch's.
_MAX_ERROR = 1e-6


@dataclass(frozen=True, slots=True)
class Values:
    """Conversion of pixel values.

    Attributes:
        dtype: Type of the result; ``"uint8"`` keeps the values.
        mean: Mean of each channel, or one for all.
        std: Standard deviation of each channel, or one for all.
    """

    dtype: DType
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    @property
    def is_float(self) -> bool:
        """Whether values become floats."""
        return self.dtype != "uint8"

    def refusal(self, pix_fmt: str) -> str | None:
        """Return why pixels of this format cannot be converted, and a remedy; ``None``: they can."""
        layout = pixel_layout(pix_fmt)
        if layout is None:  # has no array layout, which raises elsewhere
            return None
        is_whole = layout.dtype.startswith("uint")
        if self.is_float and (is_yuv(pix_fmt) or not is_whole):
            return (
                f"dtype={self.dtype!r} is for RGB and gray of whole numbers, and not for {pix_fmt}. Take "
                "pix_fmt='rgb24'"
            )
        if not self.is_float and layout.dtype != "uint8":
            return f"dtype='uint8' is not for {pix_fmt}, which has {layout.dtype}. Take pix_fmt='rgb24'"
        for name, numbers in (("mean", self.mean), ("std", self.std)):
            if len(numbers) not in (1, layout.channels):
                return (
                    f"{name} must have one number, or one for each channel of {pix_fmt}, which are "
                    f"{layout.channels}, not {len(numbers)}"
                )
        return None

    def write(self, row: Array, plane: Array, channels: Sequence[int], bits: int) -> None:
        """Convert the values of a plane and write them to a row.

        Args:
            row: Floats ``(height, width)`` or ``(height, width, channels)``.
            plane: Integers of the same shape.
            channels: Indices of the plane's channels in the array.
            bits: Bits per value of the plane.
        """
        # Microseconds for 224x224 RGB in planes (in one plane, to NCHW), where a copy of uint8 takes 15 (50):
        #     copied, multiplied and added in place     70 (110)
        #     np.multiply(plane, ..., out=row) first    110 (150)
        #     np.take                                   190 (150)
        # NumPy releases the GIL in all of them.
        scale, offset, table = _tables(self, max(channels) + 1, bits)
        if table is None:
            row[...] = plane
            if row.ndim == 3 and row.flags.c_contiguous:
                # All channels of a row at once: NumPy's inner loop over three channels would be slow.
                width = row.shape[1]
                row = row.reshape(len(row), -1)
                row *= np.tile(scale, width)
                row += np.tile(offset, width)
                return
        for index, channel in enumerate(channels):
            target = row[..., index] if row.ndim == 3 else row
            if table is None:
                target *= scale[channel]
                target += offset[channel]
            else:
                levels = plane[..., index] if row.ndim == 3 else plane
                # mode="clip", because the default mode would write to a buffer first.
                np.take(table[channel], levels, out=target, mode="clip")


@lru_cache(maxsize=64)
def _tables(values: Values, count: int, bits: int) -> tuple[Array, Array, Array | None]:
    """Return scale and offset of each channel, and a table of results if those are not exact enough."""
    largest = (1 << bits) - 1
    levels = np.arange(largest + 1, dtype=np.float32)
    # One number for all channels is repeated.
    mean, std = (np.array([*one, *one * count])[:count] for one in (values.mean, values.std))
    # Values beyond float16 become infinite, as in PyTorch.
    with np.errstate(all="ignore"):
        # In the order of torchvision's ToTensor and Normalize, so that results are equal.
        centred = levels / np.float32(largest) - mean.astype(np.float32)[:, None]
        table = centred / std.astype(np.float32)[:, None]
        scale, offset = (1 / (largest * std)).astype(np.float32), (-mean / std).astype(np.float32)
        difference = np.abs(levels * scale[:, None] + offset[:, None] - table).max()
        is_near = values.dtype == "float32" and difference < _MAX_ERROR
        return scale, offset, None if is_near else table.astype(values.dtype)


def parse_values(dtype: Any, mean: Any, std: Any, *, pix_fmt: str | None) -> Values:
    """Check the options ``dtype``, ``mean`` and ``std``, of which at least one is given.

    Args:
        dtype: Type of the result, if given.
        mean: A number, or a sequence, array or tensor of numbers, if given.
        std: A number, or a sequence, array or tensor of numbers, if given.
        pix_fmt: Format of the pixels, if it is known.

    Raises:
        TypeError: ``mean`` or ``std`` are not numbers.
        ValueError: The type is unknown, numbers are not finite or do not match the channels, ``std`` is not
            positive, ``mean`` or ``std`` are given without a float type, or the format cannot be converted.
    """
    check_choice("dtype", dtype, (*get_args(DType), None))
    if dtype in (None, "uint8"):
        for name, given in (("mean", mean), ("std", std)):
            if given is not None:
                remedy = "give dtype='float32' or 'float16' beside it"
                raise ValueError(f"{name}= is for floats: {remedy}")
        values = Values(dtype)
    else:
        means = (0.0,) if mean is None else _numbers("mean", mean)
        values = Values(dtype, means, (1.0,) if std is None else _numbers("std", std, above=0))
    if pix_fmt is not None and (reason := values.refusal(pix_fmt)):
        raise ValueError(reason)
    return values


def _numbers(name: str, given: Any, above: float = -inf) -> tuple[float, ...]:
    try:
        array = np.asarray(given)
        numbers = tuple(array.astype(np.float64).ravel().tolist())
        if array.dtype.kind not in "iuf" or array.ndim > 1:
            raise TypeError  # gets its message below
    # PyTorch raises RuntimeError for tensors on a GPU.
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{name} must be a number, or one for each channel, not {given!r}"
        ) from error
    with np.errstate(over="ignore"):
        rounded = array.astype(np.float32).ravel().tolist()
    # Not `number <= above or ...`, which NaN would pass.
    if not numbers or not all(above < number < inf for number in rounded):
        wanted = "finite and above 0" if above == 0 else "finite"
        raise ValueError(f"{name} must be numbers that are {wanted}, not {given!r}")
    return numbers
