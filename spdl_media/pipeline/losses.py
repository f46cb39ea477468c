"""Which part of the items a pipeline loses, by the failures of its stages and by how those are linked."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from spdl_media.pipeline.stats import StageCounters

__all__ = ("Branches", "Chain", "StageLoss")


@dataclass(eq=False)
class StageLoss:
    """The failures of one stage in this epoch.

    Attributes:
        counters: What has been counted since the run began.
        limit: ``max_failures`` of the stage's own.
    """

    counters: StageCounters
    limit: float | None = None
    _calls_before: int = 0
    _failures_before: int = 0

    @property
    def calls(self) -> int:
        """Calls in this epoch."""
        return self.counters.calls - self._calls_before

    @property
    def failures(self) -> int:
        """Failures in this epoch."""
        return self.counters.failures - self._failures_before

    def begin_epoch(self) -> None:
        """Count from 0 again: an epoch of which all is lost is an error, however good those before were."""
        self._calls_before = self.counters.calls
        self._failures_before = self.counters.failures

    def part_kept(self, min_calls: int) -> float:
        """The part that does not fail; 1.0 while there were too few calls to tell."""
        calls = self.calls
        return 1 - self.failures / calls if calls >= max(1, min_calls) else 1.0


@dataclass(eq=False)
class Chain:
    """Stages in a row: each loses a part of what the ones before have kept.

    Not all failures over all calls: with three stages that would be a third when the last of them fails
    always, and above one when a stage makes many items of each.
    """

    parts: list[Part] = field(default_factory=list)

    def part_kept(self, min_calls: int) -> float:
        """The part of the items that survives all stages that have no limit of their own."""
        return math.prod(
            part.part_kept(min_calls)
            for part in self.parts
            if isinstance(part, Branches) or part.limit is None
        )


@dataclass(eq=False)
class Branches:
    """Chains side by side: each counts as much as it gets of the items."""

    chains: list[Chain] = field(default_factory=list)
    numbers: list[Callable[[], int]] = field(default_factory=list)

    def add(self, number: Callable[[], int]) -> Chain:
        """One more chain. ``number`` tells how many items have gone into it."""
        self.chains.append(chain := Chain())
        self.numbers.append(number)
        return chain

    def part_kept(self, min_calls: int) -> float:
        """The part of the items that survives the chain into which it went."""
        numbers = [number() for number in self.numbers]
        if not (total := sum(numbers)):
            return 1.0
        kept = zip(numbers, self.chains, strict=True)
        return sum(number * chain.part_kept(min_calls) for number, chain in kept) / total


Part: TypeAlias = StageLoss | Branches
