"""Sets of whole numbers that are mostly without gaps, such as the positions that are done."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

__all__ = ("Intervals",)


class Intervals:
    """A set of whole numbers, kept as half-open intervals: small while it has few gaps.

    A slow item at position 5 leaves one gap, however many items overtake it.
    """

    __slots__ = ("_starts", "_stops")

    def __init__(self, intervals: Iterable[tuple[int, int]] = ()) -> None:
        pairs = sorted(intervals)
        self._starts = [start for start, _ in pairs]
        self._stops = [stop for _, stop in pairs]

    def __contains__(self, number: int) -> bool:
        before = bisect_right(self._starts, number) - 1
        return before >= 0 and number < self._stops[before]

    def add(self, number: int) -> None:
        """Put a number in. It may be there already."""
        starts, stops = self._starts, self._stops
        before = bisect_right(starts, number) - 1
        after = before + 1
        if before >= 0 and number < stops[before]:
            return
        joins_before = before >= 0 and stops[before] == number
        joins_after = after < len(starts) and starts[after] == number + 1
        if joins_before and joins_after:
            stops[before] = stops.pop(after)
            del starts[after]
        elif joins_before:
            stops[before] = number + 1
        elif joins_after:
            starts[after] = number
        else:
            starts.insert(after, number)
            stops.insert(after, number + 1)

    @property
    def leading(self) -> int:
        """The first number that is not in the set: how many there are from 0 without a gap."""
        return self._stops[0] if self._starts and self._starts[0] == 0 else 0

    def pairs(self) -> tuple[tuple[int, int], ...]:
        """The intervals, in order: ``start <= number < stop``."""
        return tuple(zip(self._starts, self._stops, strict=True))

    def __len__(self) -> int:
        """How many numbers are in the set."""
        return sum(self._stops) - sum(self._starts)
