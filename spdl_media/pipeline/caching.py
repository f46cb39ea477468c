"""An iterator that gives the same items again, to measure how much a faster loader would help."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import TypeVar

from spdl_media._checks import check_int

__all__ = ("cache_iterator",)

T = TypeVar("T")


def cache_iterator(
    src: Iterable[T],
    num_caches: int,
    *,
    return_caches_after: int | None = None,
    stop_after: int | None = None,
    delete_src: bool = True,
) -> Iterator[T]:
    """Give the items of a loader, and from some point on the first ones of them again and again.

    So a training loop shows what it would gain by a loader that takes no time at all.

    Args:
        src: The loader, or another iterable.
        num_caches: How many items to keep, the first ones.
        return_caches_after: How many items come from the loader; as many as are kept unless given.
        stop_after: How many items come in all; ``None``: there is no end, if the loader gives enough to get
            there. A loader that ends before is the end.
        delete_src: Let go of the loader when it is not needed any more, so that its threads end.

    Returns:
        An iterator. What it gives again is the same object, which nobody should change.

    Raises:
        TypeError: A number is no whole number, or ``src`` cannot be iterated.
        ValueError: A number is below 1, or more items are to be kept than come from the loader.

    Example:
        >>> list(cache_iterator(range(9), 2, return_caches_after=3, stop_after=6))
        [0, 1, 2, 0, 1, 0]
    """
    num_caches = check_int("num_caches", num_caches)
    after = num_caches
    if return_caches_after is not None:
        after = check_int("return_caches_after", return_caches_after)
    if after < num_caches:
        raise ValueError(
            f"num_caches={num_caches} items cannot be kept of the return_caches_after={after} that come from "
            "the loader"
        )
    if stop_after is not None:
        stop_after = check_int("stop_after", stop_after)
    # Here, so that arguments are checked by the call and not by the first item.
    return itertools.islice(
        _items(None if delete_src else src, iter(src), num_caches, after), stop_after
    )


def _items(kept: object, iterator: Iterator[T] | None, num_caches: int, after: int) -> Iterator[T]:
    caches: list[T] = []
    num_given = 0
    for item in itertools.islice(iterator, after):  # type: ignore[arg-type]  # not None yet
        if num_given < num_caches:
            caches.append(item)
        num_given += 1
        yield item
    if num_given < after:
        return
    if kept is None:
        # That of a loader is what runs.
        iterator = None
    yield from itertools.cycle(caches)
