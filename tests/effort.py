"""The effort of property tests, and decorators for many rows in one test and for measured times."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

LONG = False
"""Whether ``--long`` was given; ``conftest.py`` sets it before any test module is imported."""


def examples(count: int) -> int:
    """Return the number of examples for ``@settings(max_examples=examples(count))``."""
    return count if LONG else max(count // 4, 5)


def each(names: str, rows: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run one test for each row, to the end, and report all rows that failed.

    Use it instead of ``pytest.mark.parametrize`` for many rows of a millisecond each: pytest takes longer
    than that to collect, set up and report a case. All rows share the fixtures of the test.
    """
    keys = names.replace(" ", "").split(",")
    values = list(rows)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        def run(**fixtures: Any) -> None:
            failures = []
            for row in values:
                arguments = dict(zip(keys, [row] if len(keys) == 1 else row, strict=True))
                try:
                    test(**fixtures, **arguments)
                except (Exception, BaseExceptionGroup, pytest.fail.Exception) as error:  # noqa: BLE001
                    error.add_note(", ".join(f"{key}={one!s}" for key, one in arguments.items()))
                    failures.append(error)
            if failures:
                message = f"{len(failures)} of {len(values)} rows failed"
                raise BaseExceptionGroup(message, failures)

        functools.update_wrapper(run, test)
        del run.__wrapped__  # type: ignore[attr-defined]  # pytest would read its signature
        signature = inspect.signature(test)
        fixtures = [one for name, one in signature.parameters.items() if name not in keys]
        run.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return run

    return decorate


def several_tries(test: Callable[..., None]) -> Callable[..., None]:
    """Repeat a test of durations until it passes, five times at most.

    A busy machine may suspend a process or thread for a second at any place. A fault in the code fails each
    try.
    """

    @functools.wraps(test)
    def run(*args: Any, **fixtures: Any) -> None:
        for _ in range(4):
            with contextlib.suppress(Exception):
                return test(*args, **fixtures)
        return test(*args, **fixtures)

    return run
