"""Checks of what a DataLoader is given. Messages say the value, what is allowed, and what helps."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable

from spdl_media._checks import check_callable, check_int
from spdl_media._dataloading.feed import AnySource
from spdl_media.pipeline.functions import kind_of, name_of

__all__ = ("check_batching", "check_functions", "checked_source")


def checked_source(source: AnySource) -> AnySource:
    """A source that can be iterated, one way or the other."""
    if isinstance(source, str | bytes | bytearray):
        raise TypeError(
            f"src must be an iterable of items, not a single {type(source).__name__}, which would be "
            "taken apart into characters; pass a list of one"
        )
    if not isinstance(source, Iterable | AsyncIterable):
        if hasattr(source, "__getitem__"):
            raise TypeError(
                f"src must be an iterable, and {type(source).__name__} is a map-style dataset; pass "
                "MapIterator(dataset, sampler) of spdl_media.source"
            )
        raise TypeError(f"src must be an iterable or an async iterable, not {source!r}")
    return source


def check_functions(
    preprocessor: object | None, aggregator: object | None, transfer_fn: object | None
) -> None:
    """Refuse what cannot be called, or not in the place where it was given."""
    for name, fn in (
        ("preprocessor", preprocessor),
        ("aggregator", aggregator),
        ("transfer_fn", transfer_fn),
    ):
        if fn is None:
            continue
        check_callable(name, fn)
        assert callable(fn)
        kind = kind_of(fn)
        if name != "preprocessor" and "generator" in kind:
            raise TypeError(
                f"{name} must return one batch, and {name_of(fn)} is a generator; do what gives several "
                "samples in the preprocessor"
            )
        if name == "transfer_fn" and kind == "async":
            raise TypeError(
                "transfer_fn must be a plain function, which runs in a thread of its own, and "
                f"{name_of(fn)} is a coroutine function; await in the aggregator"
            )


def check_batching(batch_size: int | None, *, drop_last: bool) -> None:
    """Refuse batches of no size, and ``drop_last`` without batches."""
    if batch_size is not None:
        check_int("batch_size", batch_size)
    elif drop_last:
        raise ValueError("drop_last=True leaves out a small last batch, so it needs batch_size")
