"""Which settings of a DataLoader are the best here: measured, from few to many, until more gain nothing."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from spdl_media.dataloader import DataLoader
from spdl_media.pipeline import PipelineError

TIMEOUT = 120
"""Seconds after which a loader that gives nothing is given up."""

_MOST_THREADS = 64
# A setting that gains less than this is not worth its threads, and is within the noise of a measurement.
_GAIN = 1.04
_CANDIDATES, _ROUNDS = 4, 2


class Setting(NamedTuple):
    """How many calls run at a time, and where: ``num_threads=`` or ``num_processes=`` of the loader."""

    number: int
    is_processes: bool = False

    @property
    def option(self) -> str:
        """Its argument of the loader."""
        return "num_processes" if self.is_processes else "num_threads"

    def __str__(self) -> str:
        return f"{self.option}={self.number}"


@dataclass(frozen=True)
class Measured:
    """A run with one setting.

    Attributes:
        items: Samples that were made.
        seconds: In which time.
        cpu: Seconds of this process's cores in that time.
        stages: Seconds in each function, for one sample, by its name.
    """

    items: int
    seconds: float
    cpu: float
    stages: Mapping[str, float]

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.items / self.seconds

    def __add__(self, other: Measured) -> Measured:
        """Two runs as one."""
        seconds, cpu = self.seconds + other.seconds, self.cpu + other.cpu
        return Measured(self.items + other.items, seconds, cpu, self.stages)


def measure(
    paths: Sequence[Path], options: Mapping[str, Any], setting: Setting, seconds: float
) -> Measured:
    """Run a loader for some seconds behind its first batches.

    Raises:
        PipelineFailure: More than half of the files cannot be loaded.
        PipelineError: The preprocessor cannot be pickled, and processes need that.
    """
    number: dict[str, Any] = {setting.option: setting.number}
    loader = DataLoader(itertools.cycle(paths), timeout=TIMEOUT, **number, **options)
    begin, start, at_start, cpu = time.monotonic(), 0.0, 0, 0.0
    for _ in loader:
        now = time.monotonic()
        statistics = loader.statistics()
        assert statistics is not None
        stages = [stage for stage in statistics.stages if not stage.name.startswith("aggregate(")]
        # Of the first stage: batches come in bursts.
        items = stages[0].calls.number - stages[0].failures
        if not start and now - begin >= seconds / 4:
            start, at_start, cpu = now, items, time.process_time()
        elif start and now - start >= seconds and items > at_start:
            break
    sizes = [1, *[options["batch_size"]] * len(stages)]
    per_item = {
        one.name: one.calls.average / size for one, size in zip(stages, sizes, strict=False)
    }
    return Measured(items - at_start, now - start, time.process_time() - cpu, per_item)


def search(run: Callable[[Setting], Measured], cores: int) -> dict[Setting, Measured]:
    """Measure settings until the best is found; see :func:`best_of`.

    Args:
        run: Measures a setting; for processes it may raise a PipelineError.
        cores: How many there are.

    Returns:
        What was measured: threads before processes, few before many.
    """
    found: dict[Setting, Measured] = {}

    def rate(setting: Setting) -> float:
        if setting not in found:
            found[setting] = run(setting)
        return found[setting].rate

    _climb(rate)
    with suppress(PipelineError):
        # Beyond the cores, processes only cost memory.
        rate(Setting(cores, is_processes=True))
    for _ in range(_ROUNDS):
        # One after the other, so that what else this machine does meets all of them.
        for setting in sorted(found, key=rate, reverse=True)[:_CANDIDATES]:
            found[setting] += run(setting)
    return dict(sorted(found.items(), key=lambda item: item[0][::-1]))


def _climb(rate: Callable[[Setting], float]) -> None:
    """Double the number of threads until that gains nothing twice, and look beside the best one."""
    number, top, best, misses = 1, 1, 0.0, 0
    while number <= _MOST_THREADS and misses < 2:
        this = rate(Setting(number))
        misses = 0 if this > best * _GAIN else misses + 1
        best, top = max((best, top), (this, number))
        number *= 2
    for beside in {max(1, top * 3 // 4), min(math.ceil(top * 1.5), _MOST_THREADS)}:
        rate(Setting(beside))


def best_of(found: Mapping[Setting, Measured]) -> Setting:
    """The first setting that is as fast as any."""
    most = max(one.rate for one in found.values())
    return next(setting for setting, one in found.items() if one.rate * _GAIN >= most)
