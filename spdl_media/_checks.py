"""Checks of arguments, each written once.

Messages say the name, the value and what is allowed.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

T = TypeVar("T")

__all__ = (
    "OneThread",
    "answers_unknown",
    "as_int",
    "check_callable",
    "check_choice",
    "check_int",
    "check_positive",
    "check_seconds",
    "check_weights",
    "did_you_mean",
    "listed",
    "outer_frame",
    "warn_caller",
)


def check_int(
    name: str, value: object, *, at_least: int | None = 1, unit: str = "", remedy: str = ""
) -> int:
    """Return a whole number as an ``int``; NumPy's integers count, ``True`` does not.

    Raises:
        TypeError: ``value`` is no whole number.
        ValueError: ``value`` is below ``at_least``.
    """
    number = as_int(value)
    if number is None:
        raise TypeError(f"{name} must be an int, not {value!r}{_tail(remedy)}")
    if at_least is not None and number < at_least:
        raise ValueError(f"{name} must be at least {at_least}{unit}, not {number}{_tail(remedy)}")
    return number


def check_positive(name: str, value: object) -> int:
    """Return a size, a rate or a count, where ``None`` (checked by the caller) leaves it unchanged.

    Raises:
        TypeError: ``value`` is no whole number.
        ValueError: ``value`` is not positive.
    """
    number = check_int(name, value, at_least=None)
    if number <= 0:
        raise ValueError(f"{name} must be positive, or None to leave it as it is, not {value!r}")
    return number


def as_int(value: object) -> int | None:
    """Return a whole number as an ``int``, or ``None`` for anything else."""
    # A bool is an index for Python, and nearly always a mistake for a count.
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]  # the TypeError is the answer
    except TypeError:
        return None


def check_seconds(name: str, value: object, *, allow_zero: bool = False) -> float:
    """Return a number of seconds as a ``float``; ``None`` stands for no limit and gives infinity.

    Raises:
        TypeError: ``value`` is neither a real number nor ``None``.
        ValueError: ``value`` is negative, NaN, or zero without ``allow_zero``.
    """
    if value is None:
        return math.inf
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number of seconds or None, not {value!r}")
    seconds = float(value)
    # Written so that NaN fails.
    if not (seconds >= 0 if allow_zero else seconds > 0):
        limit = "at least" if allow_zero else "above"
        raise ValueError(f"{name} must be {limit} 0 seconds, not {value}. None means no limit.")
    return seconds


def check_choice(
    name: str, value: object, choices: Sequence[str | None], *, remedy: str = ""
) -> None:
    """Refuse what is none of the choices, and name the similar one.

    Raises:
        ValueError: ``value`` is not among ``choices``.
    """
    # Compared one by one: an array or an unhashable value is a wrong choice, not another error.
    if value is None or isinstance(value, str):
        if value in choices:
            return
        names = [choice for choice in choices if choice is not None]
        remedy = remedy or did_you_mean(value or "", names)
    allowed = listed(choices) if len(choices) <= 4 else f"one of {listed(choices)}"
    raise ValueError(f"{name} must be {allowed}, not {value!r}{_tail(remedy)}")


def check_callable(name: str, value: object, *, remedy: str = "") -> None:
    """Refuse what cannot be called.

    Raises:
        TypeError: ``value`` is not callable.
    """
    if not callable(value):
        kind = type(value).__name__
        raise TypeError(f"{name} must be a function or another callable, not {kind}{_tail(remedy)}")


def check_weights(
    weights: Sequence[float] | npt.NDArray[np.floating], count: int, of_what: str
) -> npt.NDArray[np.float64]:
    """Return one weight for each of ``count`` things, as a new array.

    Raises:
        ValueError: There are more or fewer weights, one is negative or not finite, or their sum is
            zero or not finite.
    """
    # Not at the top: the pipeline runs in sub-interpreters, which cannot import NumPy.
    import numpy as np

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
    # Finite weights may have an infinite sum, with which no draw would be possible.
    with np.errstate(over="ignore"):
        total = np.cumsum(array)[-1]
    if not 0 < total < np.inf:
        raise ValueError(
            f"the sum of weights must be finite and above 0, not {total}; give at least one "
            f"{of_what} a weight, and scale weights that are too large"
        )
    return array


def did_you_mean(name: str, names: Iterable[str], *, likely: str | None = None) -> str:
    """Return "Did you mean ...?", or an empty string. An exact or likely name comes first."""
    # Imported when something is wrong: it takes longer than all other checks together.
    import difflib

    close = difflib.get_close_matches(name, list(names), n=3)
    close.sort(key=lambda found: (found != name, found != likely))
    return f"Did you mean {', '.join(map(repr, close))}?" if close else ""


def answers_unknown(hints: Mapping[str, str]) -> Callable[[type[T]], type[T]]:
    """Decorate a class so that unknown keyword arguments are answered with what to say instead."""

    def decorate(cls: type[T]) -> type[T]:
        init = cls.__init__
        known = inspect.signature(cls).parameters

        @functools.wraps(init)
        def checked(self: T, *args: Any, **given: Any) -> None:
            for name in given:
                if name not in known:
                    hint = hints.get(name) or did_you_mean(name, known)
                    raise TypeError(f"{cls.__name__} takes no argument {name!r}. {hint}".rstrip())
            init(self, *args, **given)

        cls.__init__ = checked  # type: ignore[assignment]  # wraps says less of it
        return cls

    return decorate


def listed(choices: Iterable[object]) -> str:
    """Spell out choices: ``'a', 'b' or None``."""
    *most, last = map(repr, choices)
    return f"{', '.join(most)} or {last}" if most else last


def warn_caller(message: str, category: type[Warning]) -> None:
    """Warn with the stack level of the caller outside of this package."""
    warnings.warn(message, category, stacklevel=outer_frame()[1])


def outer_frame() -> tuple[FrameType, int]:
    """Return the frame outside of this package that led here, and its stack level for the caller."""
    frame, level = sys._getframe(1), 1
    # By the name of the module: code that `dataclass` writes has no file.
    while frame.f_back and str(frame.f_globals.get("__name__")).startswith("spdl_media."):
        frame, level = frame.f_back, level + 1
    return frame, level


class OneThread:
    """A context that a second thread cannot enter while the first is inside.

    FFmpeg's contexts crash the process when two threads use one at once; this turns the mistake
    into an exception. Entering costs a lock that nobody waits for.
    """

    __slots__ = ("_lock", "_what")

    def __init__(self, what: str) -> None:
        self._lock = threading.Lock()
        self._what = what

    def __enter__(self) -> None:
        # Never waits: a second thread is a mistake, which waiting would hide.
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                f"this {self._what} is in use by another thread; it serves one at a time. "
                "Give each thread its own"
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def _tail(remedy: str) -> str:
    return f". {remedy}" if remedy else ""
