"""Taking items from several iterators, in turn or by chance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from spdl_media._sources.chance import weighted_choice

__all__ = ("in_turn", "weighted")

T = TypeVar("T")


def in_turn(iterators: list[Iterator[T]], *, until_one_ends: bool) -> Iterator[T]:
    """One item of each, over and over. Those that have ended are passed over."""
    while iterators:
        remaining = []
        for iterator in iterators:
            try:
                item = next(iterator)
            except StopIteration:
                if until_one_ends:
                    return
                continue
            remaining.append(iterator)
            yield item
        iterators = remaining


def weighted(
    iterators: list[Iterator[T]],
    weights: npt.NDArray[np.float64],
    chances: Iterator[float],
    *,
    until_one_ends: bool,
) -> Iterator[T]:
    """One item at a time, each of one that is chosen by weight among those that have not ended."""
    cumulative = np.cumsum(weights)
    while cumulative.size:
        chosen = int(weighted_choice(cumulative, np.array([next(chances)]))[0])
        try:
            item = next(iterators[chosen])
        except StopIteration:
            if until_one_ends:
                return
            del iterators[chosen]
            weights = np.delete(weights, chosen)
            cumulative = np.cumsum(weights)
        else:
            yield item
