"""Checks of arguments that the sources share."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ("checked_weights", "whole")


def whole(name: str, value: object, *, least: int = 0, remedy: str = "") -> int:
    """A whole number, NumPy's too, as an int."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]  # what is no number is refused
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {value!r}") from None
    if number < least:
        raise ValueError(f"{name} must be at least {least}, not {number}{remedy and '; ' + remedy}")
    return number


def checked_weights(
    weights: Sequence[float] | npt.NDArray[np.floating], count: int, of_what: str
) -> npt.NDArray[np.float64]:
    """One weight for each of ``count`` things, as an array of the caller's own."""
    array = np.array(weights, dtype=np.float64)
    if array.shape != (count,):
        raise ValueError(
            f"weights must have one number for each {of_what}, which are {count}; "
            f"it has the shape {array.shape}"
        )
    wrong = ~(np.isfinite(array) & (array >= 0))
    if wrong.any():
        position = int(wrong.argmax())
        raise ValueError(
            f"weights must be finite and at least 0, but weights[{position}] is {array[position]}"
        )
    with np.errstate(over="ignore"):
        total = np.cumsum(array)[-1]
    if not 0 < total < np.inf:
        raise ValueError(
            f"the sum of weights must be finite and above 0, not {total}; give at least one "
            f"{of_what} a weight, and scale weights that are too large"
        )
    return array
