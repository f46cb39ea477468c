"""Compare the settings found by ``spdl-media bench`` with the best of a whole grid.

Command::

    python samples/benchmarks/tuning.py [--seconds 1] [--rounds 3]

There are three workloads: decoding images (which releases the GIL), a Python loop (which holds it), and
waiting, as for remote storage. For each, the search runs once. Then all settings of the grid and the found
one are measured in turn, so that other programs affect all of them. The last column is the rate of the found
setting over the best of the grid.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import spdl_media as sm
from spdl_media.cli.bench import Setting, best_of, measure, search
from spdl_media.pipeline.executors import usable_cores

COUNTS = {False: (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64), True: (1, 2, 3, 4, 8)}
GRID = [Setting(count, kind) for kind, counts in COUNTS.items() for count in counts]
BATCH_SIZE = 16


def decode(path: Path) -> sm.CPUBuffer:
    """Do work that releases the GIL."""
    return sm.load_image(path, width=224, height=224)


def compute(path: Path) -> int:
    """Do work that holds the GIL."""
    return sum(ord(letter) * number for number in range(600) for letter in path.name)


def wait(path: Path) -> int:
    """Wait as for storage that answers after 20 ms."""
    time.sleep(0.02)
    return len(path.name)


def compare(function: Callable[[Path], Any], paths: list[Path], seconds: float, rounds: int) -> str:
    """Return a row of the table."""
    options = {"preprocessor": function, "batch_size": BATCH_SIZE, "to": "numpy"}

    def run(setting: Setting) -> Any:
        return measure(paths, options, setting, seconds)

    found = best_of(search(run, usable_cores()))
    rates = defaultdict(list)
    for _ in range(rounds):
        for setting in {*GRID, found}:
            rates[setting].append(run(setting).rate)
    medians = {setting: median(values) for setting, values in rates.items()}
    best = max(GRID, key=lambda setting: medians[setting])
    reached = medians[found] / medians[best]
    return (
        f"{function.__name__:10}{found!s:>17}{medians[found]:10.1f}"
        f"{best!s:>17}{medians[best]:10.1f}{reached:9.2f}"
    )


def main() -> None:
    """Run the program; see the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="time per measurement")
    parser.add_argument("--rounds", type=int, default=3, help="number of measurements of the grid")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{number}.jpg") for number in range(32)]
        rng = np.random.default_rng(0)
        for path in paths:
            sm.save_image(
                path,
                np.kron(rng.integers(0, 255, (60, 80, 3)), np.ones((8, 8, 1))).astype(np.uint8),
            )
        print(
            f"{'':10}{'found':>17}{'items/s':>10}{'of the grid':>17}{'items/s':>10}{'reached':>9}"
        )
        for function in (decode, compute, wait):
            print(compare(function, paths, options.seconds, options.rounds), flush=True)


if __name__ == "__main__":
    main()
