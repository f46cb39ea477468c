"""Checks of arguments, texts of messages, and warnings, shared by all modules.

Error messages state the argument's name, its value and what is allowed.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from numbers import Real
from reprlib import repr as short
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

T = TypeVar("T")


def check_int(
    name: str, value: object, *, at_least: int | None = 1, unit: str = "", remedy: str = ""
) -> int:
    """Return ``value`` as an ``int``; NumPy integers are accepted, bools are not.

    Raises:
        TypeError: ``value`` is not a whole number.
        ValueError: ``value`` is below ``at_least``.
    """
    number = as_int(value)
    if number is None:
        # Shortened, because it may be the whole dataset.
        raise TypeError(f"{name} must be an int, not {short(value)}{_tail(remedy)}")
    if at_least is not None and number < at_least:
        raise ValueError(f"{name} must be at least {at_least}{unit}, not {number}{_tail(remedy)}")
    return number


def check_positive(name: str, value: object) -> int:
    """Return ``value`` as a positive ``int``; the caller handles ``None``, which means "unchanged".

    Raises:
        TypeError: ``value`` is not a whole number.
        ValueError: ``value`` is not positive, or has more than 31 bits, of which FFmpeg cuts some.
    """
    number = check_int(name, value, at_least=None)
    if number <= 0:
        raise ValueError(f"{name} must be positive, or None to leave it as it is, not {value!r}")
    if number >= 1 << 31:
        raise ValueError(f"{name} must be below 2**31, not {value!r}")
    return number


def as_int(value: object) -> int | None:
    """Return ``value`` as an ``int`` if it is a whole number, else ``None``."""
    # Python and torch accept a bool as an index, but where a number is expected it is mostly a mistake.
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]  # a TypeError means: no integer
    except TypeError:
        return None


def int_in_environment(variable: str, what: str = "a whole number") -> int | None:
    """Return the number in an environment variable, such as those that ``torchrun`` sets; ``None`` if unset.

    Raises:
        ValueError: The variable has another value.
    """
    text = os.environ.get(variable, "").strip()
    if text and not text.isdecimal():
        raise ValueError(f"the environment variable {variable} must be {what}, not {text!r}")
    return int(text) if text else None


def check_seconds(name: str, value: object, *, allow_zero: bool = False) -> float:
    """Return a number of seconds as a ``float``; ``None`` becomes infinity.

    Raises:
        TypeError: ``value`` is neither a real number nor ``None``.
        ValueError: ``value`` is negative, NaN, or zero without ``allow_zero``.
    """
    if value is None:
        return math.inf
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number of seconds or None, not {value!r}")
    seconds = float(value)
    # `not (x > 0)` instead of `x <= 0`, so that NaN fails.
    if not (seconds >= 0 if allow_zero else seconds > 0):
        limit = "at least" if allow_zero else "above"
        raise ValueError(f"{name} must be {limit} 0 seconds, not {value}. None turns it off.")
    return seconds


def check_choice(
    name: str, value: object, choices: Sequence[str | None], *, remedy: str = ""
) -> None:
    """Raise unless ``value`` is one of the choices, and suggest a similar choice.

    Raises:
        ValueError: ``value`` is not among ``choices``.
    """
    # Tested for its type first: comparing an array would raise an unrelated error.
    if value is None or isinstance(value, str):
        if value in choices:
            return
        names = [choice for choice in choices if choice is not None]
        remedy = remedy or did_you_mean(value or "", names)
    allowed = listed(choices) if len(choices) <= 4 else f"one of {listed(choices)}"
    raise ValueError(f"{name} must be {allowed}, not {value!r}{_tail(remedy)}")


def check_callable(name: str, value: object, *, optional: bool = False, remedy: str = "") -> None:
    """Raise unless ``value`` is callable, or ``None`` if that is allowed.

    Raises:
        TypeError: ``value`` is not callable.
    """
    if not callable(value) and not (optional and value is None):
        kind = type(value).__name__
        raise TypeError(f"{name} must be a function or another callable, not {kind}{_tail(remedy)}")


def check_floats(name: str, values: object, *, allow_zero: bool = False) -> npt.NDArray[np.float64]:
    """Return finite positive numbers as a new float64 array.

    Raises:
        TypeError: ``values`` is no array or sequence of numbers.
        ValueError: A number is negative, not finite, or zero without ``allow_zero``.
    """
    # Imported here: the pipeline runs in sub-interpreters, which cannot import NumPy.
    import numpy as np

    try:
        array = np.array(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        kind = type(values).__name__
        raise TypeError(f"{name} must be a sequence of numbers, not {kind}: {error}") from error
    wrong = ~(np.isfinite(array) & ((array >= 0) if allow_zero else (array > 0)))
    if wrong.any():
        position, least = int(wrong.argmax()), "at least" if allow_zero else "above"
        raise ValueError(
            f"{name} must be finite and {least} 0, but {name}[{position}] is {array.flat[position]}"
        )
    return array


def check_weights(
    weights: Sequence[float] | npt.NDArray[np.floating], count: int, of_what: str
) -> npt.NDArray[np.float64]:
    """Return one weight for each of ``count`` items, as a new float64 array.

    Raises:
        TypeError: ``weights`` is no array or sequence of numbers.
        ValueError: The number of weights is not ``count``, a weight is negative or not finite, or the
            sum is zero or not finite.
    """
    import numpy as np

    array = check_floats("weights", weights, allow_zero=True)
    if array.shape != (count,):
        raise ValueError(
            f"weights must have one number for each {of_what}, which are {count}; "
            f"it has the shape {array.shape}"
        )
    # The sum of finite weights can overflow to infinity, and then nothing could be drawn.
    with np.errstate(over="ignore"):
        total = np.cumsum(array)[-1]
    if not 0 < total < np.inf:
        raise ValueError(
            f"the sum of weights must be finite and above 0, not {total}; give at least one "
            f"{of_what} a weight, and scale weights that are too large"
        )
    return array


def as_numpy(values: Any) -> npt.NDArray[Any]:
    """Convert values to a NumPy array; view an array or tensor without a copy.

    Raises:
        TypeError: NumPy cannot view the tensor (for which PyTorch may raise ``RuntimeError``).
        ValueError: Nested sequences have different lengths.
    """
    import numpy as np

    try:
        return np.asarray(values)
    # PyTorch raises TypeError for a tensor on a GPU, RuntimeError for one that requires gradients.
    except (TypeError, RuntimeError) as error:
        remedy = ". Convert a tensor first, such as by tensor.detach().cpu().float()"
        reason = f"{error}{remedy}" if hasattr(values, "detach") else error
        raise TypeError(f"NumPy cannot view this {type(values).__name__}: {reason}") from error


def did_you_mean(name: str, names: Iterable[str], *, likely: str | None = None) -> str:
    """Return "Did you mean ...?" with similar names, or an empty string.

    An exact match is listed first, then ``likely``.
    """
    # Imported only after an error: the import takes longer than all other checks together.
    import difflib

    close = difflib.get_close_matches(name, list(names), n=3)
    close.sort(key=lambda found: (found != name, found != likely))
    return f"Did you mean {', '.join(map(repr, close))}?" if close else ""


# Names of other libraries. By their letters, "fps" is most like "flips", and "sr" like "src".
_OTHER_NAMES = {
    "device": "cuda",
    "fps": "frame_rate",
    "mono": "num_channels",
    "size": "width",
    "sr": "sample_rate",
    "start": "timestamp",
    "strict": "on_error",
}


def with_defaults(
    function: Callable[..., T], defaults: Mapping[str, Any], names: Iterable[str]
) -> Callable[..., T]:
    """Return a function of ``**arguments`` that gets those with defaults, too, and no others than ``names``.

    An unknown argument raises a ``TypeError`` that suggests a similar one.
    """
    known = set(names)

    @functools.wraps(function)
    def call(*args: Any, **given: Any) -> T:
        # Python does not check them, because the function takes **arguments.
        if not given.keys() <= known:
            raise unknown_argument(function.__name__, given, known, {})
        return function(*args, **{**defaults, **given})

    return call


def unknown_argument(
    function: str, given: Iterable[str], known: Collection[str], hints: Mapping[str, str]
) -> TypeError:
    """Return the error for arguments of a function that are not all known."""
    name = next(name for name in given if name not in known)
    hint = hints.get(name) or did_you_mean(_OTHER_NAMES.get(name, name), known)
    return TypeError(f"{function}() got an unexpected keyword argument {name!r}{_tail(hint)}")


def with_argument_hints(hints: Mapping[str, str]) -> Callable[[type[T]], type[T]]:
    """Make a class decorator that adds a hint to the ``TypeError`` of an unknown keyword argument."""

    def decorate(cls: type[T]) -> type[T]:
        init = cls.__init__
        known = inspect.signature(cls).parameters.keys()

        @functools.wraps(init)
        def checked(self: T, *args: Any, **given: Any) -> None:
            if not given.keys() <= known:
                raise unknown_argument(cls.__name__, given, known, hints)
            init(self, *args, **given)

        cls.__init__ = checked  # type: ignore[assignment]  # functools.wraps has a wider type
        return cls

    return decorate


def listed(choices: Iterable[object]) -> str:
    """Format choices for a message: ``'a', 'b' or None``."""
    *most, last = map(repr, choices)
    return f"{', '.join(most)} or {last}" if most else last


def counted(count: int, noun: str) -> str:
    """Return a number and its noun for a message: ``1 channel`` or ``2 channels``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def abridged(texts: Sequence[str], separator: str = ", ", most: int = 5) -> str:
    """Join the first ``most`` texts for a message, and state how many more there are."""
    if len(texts) <= most:
        return separator.join(texts)
    return separator.join([*texts[:most], f"and {len(texts) - most} more"])


def warn_caller(message: str, category: type[Warning]) -> None:
    """Warn with the stack level of the caller outside of this package."""
    warnings.warn(message, category, stacklevel=outer_frame()[1])


def warn_once(topic: str, message: str) -> None:
    """Warn the caller outside of this package, once per process and topic."""
    own = object()
    # One step, because other threads may warn of the same.
    if warned_of.setdefault(topic, own) is own:
        warn_caller(message, UserWarning)


warned_of: dict[str, object] = {}
"""The topics of :func:`warn_once` that this process was warned of, each with an object of that call."""


def outer_frame() -> tuple[FrameType, int]:
    """Return the nearest frame outside of this package, and its stack level seen from the caller."""
    frame, level = sys._getframe(1), 1
    # Told by the module's name: code that `dataclass` generates has no file.
    while frame.f_back and str(frame.f_globals.get("__name__")).startswith("spdl_media."):
        frame, level = frame.f_back, level + 1
    return frame, level


def _tail(remedy: str) -> str:
    return f". {remedy}" if remedy else ""
