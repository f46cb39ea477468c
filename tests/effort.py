"""How much the tests try: a quarter of the examples by default, all of them with ``--long``."""

from __future__ import annotations

LONG = False
"""Whether ``--long`` was given; ``conftest.py`` sets it before any test module is imported."""


def examples(count: int) -> int:
    """Return the number of examples for ``@settings(max_examples=examples(count))``."""
    return count if LONG else max(count // 4, 5)
