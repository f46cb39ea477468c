"""What becomes of frames and samples that are too few: one policy, with one spelling everywhere."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from spdl_media._checks import check_choice, check_int
from spdl_media.errors import ConvertError
from spdl_media.timing import Window

OnShort: TypeAlias = Literal["error", "repeat_last", "wrap", "zeros"]


def check_length(name: str, count: int | None, on_short: str | None) -> None:
    """Check a number of frames or samples by the name of its argument, and what becomes of too few.

    Raises:
        TypeError: The number is no whole one.
        ValueError: It is not positive, the policy is unknown, or there is no number that could be missed.
    """
    check_choice("on_short", on_short, (*get_args(OnShort), None))
    if count is not None:
        check_int(name, count)
    elif on_short is not None:
        raise ValueError(
            f"on_short={on_short!r} says what becomes of too few, so it needs {name}=, which says how many"
        )


def check_enough(
    found: int, wanted: int, on_short: OnShort | None, what: str, window: Window, source: str
) -> None:
    """Refuse too few frames or samples where the policy says so.

    Raises:
        ConvertError: They are too few.
    """
    if found < wanted and on_short == "error":
        remedy = "on_short='repeat_last', 'wrap' or 'zeros' fills up"
        if what == "samples":
            remedy += "; decode_config(gaps='fill') puts silence where the file leaves audio out"
        raise ConvertError(
            f"{wanted} {what} are asked for, and there are {found} in the window {window}. {remedy}",
            source=source,
        )


def fill_up(
    rows: npt.NDArray[Any], found: int, on_short: OnShort, zero: int = 0
) -> npt.NDArray[np.intp] | None:
    """Fill an array behind its first rows, of which there is one at least unless zeros fill it.

    Returns:
        Which rows stand there now; ``None``: zeros do.
    """
    missing = np.arange(found, len(rows))
    if on_short == "zeros":
        rows[found:] = zero
        return None
    places = missing % found if on_short == "wrap" else np.full_like(missing, found - 1)
    rows[found:] = rows[places]
    return places
