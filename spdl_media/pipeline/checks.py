"""Checks of arguments, and questions about them, that several definitions share."""

from __future__ import annotations

import multiprocessing.reduction
from collections.abc import Sized
from typing import Any

__all__ = (
    "check_callable",
    "check_choice",
    "check_count",
    "check_seconds",
    "pickling_error",
    "source_length",
)


def check_count(what: str, value: object, *, at_least: int = 1, remedy: str = "") -> None:
    """Refuse what is not a whole number of at least so much. ``True`` is not a number here."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} must be an int, not {value!r}")
    if value < at_least:
        raise ValueError(f"{what} must be at least {at_least}, not {value}{_tail(remedy)}")


def check_seconds(what: str, value: object) -> None:
    """Refuse what is not a time above zero; ``None`` stands for no limit."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{what} must be a number of seconds or None, not {value!r}")
    if not value > 0:
        raise ValueError(f"{what} must be above 0 seconds, not {value}. None means no limit.")


def check_choice(what: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuse what is none of the choices."""
    if value not in choices:
        raise ValueError(f"{what} must be one of {choices}, not {value!r}")


def check_callable(what: str, value: object, *, remedy: str = "") -> None:
    """Refuse what cannot be called."""
    if not callable(value):
        raise TypeError(
            f"{what} must be a function or another callable, not {type(value).__name__}{_tail(remedy)}"
        )


def source_length(items: object) -> int | None:
    """The items of an epoch, if the source knows it."""
    try:
        return len(items) if isinstance(items, Sized) else None
    # Of a wrapper around something without length, or of a class that leaves it to those that derive from it.
    except (TypeError, NotImplementedError):
        return None


def pickling_error(value: object) -> Exception | None:
    """What goes wrong when a value is pickled for another process, or ``None``."""
    try:
        # Knows what multiprocessing can send beyond plain pickle, such as connections.
        multiprocessing.reduction.ForkingPickler(_Nowhere()).dump(value)
    except Exception as error:  # noqa: BLE001  # __reduce__ of a user's object may raise anything
        return error
    return None


class _Nowhere:
    """Takes bytes and forgets them: whether pickling works is asked, not what comes of it."""

    def write(self, data: Any, /) -> int:
        return len(memoryview(data))


def _tail(remedy: str) -> str:
    return f". {remedy}" if remedy else ""
