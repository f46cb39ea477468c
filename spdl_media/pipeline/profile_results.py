"""What :func:`profile_pipeline` finds: frozen values that show and draw themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from spdl_media._optional import require
from spdl_media.pipeline.failures import MissingPackageError
from spdl_media.pipeline.stats import PipelineStatistics
from spdl_media.pipeline.tables import Shown, Table

__all__ = ("PipelineProfile", "StageProfile")

_COLUMNS: dict[str, Callable[[StageProfile], str]] = {
    "stage": lambda stage: stage.name,
    "concurrency": lambda stage: f"{stage.concurrency} {'*' if stage.is_configured else ' '}",
    "items/s": lambda stage: f"{stage.items_per_second:.1f}",
    "calls/s": lambda stage: f"{stage.rate:.1f}",
    "mean ms": lambda stage: f"{stage.average * 1e3:.3f}",
    "p90 ms": lambda stage: f"{stage.p90 * 1e3:.3f}",
    "p99 ms": lambda stage: f"{stage.p99 * 1e3:.3f}",
    "busy": lambda stage: f"{stage.occupancy:.0%}",
    "failed": lambda stage: str(stage.failures),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProfile:
    """A stage, measured by itself at one concurrency.

    Attributes:
        name: Name of the stage; ``"source"`` for a source.
        concurrency: How many calls could run at once.
        is_configured: Whether that is the concurrency in the definition.
        inputs_per_item: How many inputs the stage gets for each item of the source: 1 / 32 behind
            ``aggregate(32)``, above 1 behind a generator.
        calls: How many calls were timed.
        failures: How many of them failed.
        rate: Calls a second.
        average: Mean duration of a call, in seconds.
        p90: Nine of ten calls took no longer, in seconds.
        p99: 99 of a hundred calls took no longer, in seconds.
        occupancy: The part of the concurrency that was in use, from 0.0 to 1.0. Low values mean
            that the calls were too short to keep so many workers busy.
    """

    name: str
    concurrency: int
    is_configured: bool
    inputs_per_item: float
    calls: int
    failures: int
    rate: float
    average: float
    p90: float
    p99: float
    occupancy: float

    @property
    def items_per_second(self) -> float:
        """How many items of the source a second the stage would keep up with."""
        return self.rate / self.inputs_per_item


@dataclass(frozen=True, slots=True)
class PipelineProfile(Shown):
    """A pipeline, measured stage by stage and as a whole.

    ``print`` writes it as a table with the bottleneck marked, notebooks show it, and :meth:`plot` draws it.

    Attributes:
        stages: One for each source, stage and concurrency, in the order of the pipeline.
        overall: Statistics of a run of the whole pipeline over the items that were taken.
    """

    stages: tuple[StageProfile, ...]
    overall: PipelineStatistics

    @property
    def bottleneck(self) -> str:
        """Name of the stage that keeps up with the fewest items a second, as configured."""
        return self._slowest().name

    def of(self, name: str) -> tuple[StageProfile, ...]:
        """All results of a stage, by concurrency.

        Raises:
            KeyError: No stage has that name.
        """
        found = tuple(stage for stage in self.stages if stage.name == name)
        if not found:
            names = sorted({stage.name for stage in self.stages})
            raise KeyError(f"no stage is called {name!r}; there are {names}")
        return found

    def plot(self, path: str | Path | None = None) -> Any:
        """Draw the rate of each stage over its concurrency.

        Args:
            path: A file to save it in as well, in the format that its name says.

        Returns:
            A ``matplotlib.figure.Figure``.

        Raises:
            MissingPackageError: matplotlib is not installed.
        """
        # Figures of this class need no display, and pyplot would keep them.
        library = require("matplotlib", "A plot of a profile", MissingPackageError)
        figure = library.Figure(figsize=(8, 5))
        axes = figure.add_subplot()
        for name, group in groupby(self.stages, key=lambda stage: stage.name):
            stages = list(group)
            numbers = [stage.concurrency for stage in stages]
            rates = [stage.items_per_second for stage in stages]
            configured = [number for number, stage in enumerate(stages) if stage.is_configured]
            label = f"{name} (bottleneck)" if name == self.bottleneck else name
            axes.plot(numbers, rates, marker="o", markevery=configured, label=label)
        axes.set(xscale="log", yscale="log", xlabel="concurrency", ylabel="items a second")
        ticks = sorted({stage.concurrency for stage in self.stages})
        axes.set_xticks(ticks, ticks)
        axes.minorticks_off()
        axes.set_title("Each stage by itself; the dot is the concurrency in the definition")
        axes.legend()
        if path is not None:
            figure.savefig(path)
        return figure

    def _tables(self) -> tuple[Table, ...]:
        stages = Table.of(
            self.stages,
            _COLUMNS,
            marked=self.stages.index(self._slowest()),
            after=("* as configured", "", *self._verdict()),
        )
        (overall,) = self.overall._tables()
        # One bottleneck is enough: that which was measured.
        before = (f"The whole pipeline: {overall.before[0]}",)
        return stages, replace(overall, before=before, marked=None, after=())

    def _slowest(self) -> StageProfile:
        configured = (stage for stage in self.stages if stage.is_configured)
        # As configured: a stage that is slow at other concurrencies holds nothing up.
        return min(configured, key=lambda stage: stage.items_per_second)

    def _verdict(self) -> Iterator[str]:
        slowest = self._slowest()
        yield (
            f"Bottleneck: {slowest.name}, which keeps up with {slowest.items_per_second:.1f} items "
            f"of the source a second at concurrency={slowest.concurrency}."
        )
        best = max(self.of(slowest.name), key=lambda stage: stage.rate)
        if best.concurrency != slowest.concurrency:
            yield (
                f"It was fastest at concurrency={best.concurrency}: {best.items_per_second:.1f} "
                "items a second."
            )
