"""Measure whether memory stays constant while 10,000 images are loaded.

The JPEGs of a folder, repeated, are loaded in batches of 32 into blocks of a StoragePool, and the resident
size of the process (VmRSS) is read after each batch. The first 1,000 images may fill pools and caches. The
rest is divided into windows of 1,000 images, and each window has a median:

    rise    difference between the highest of these medians and the first, in MiB
    flat    yes, if the rise is at most the tolerance

    python samples/benchmarks/memory.py --images DIR [--json FILE] [--chart FILE.png] [--markdown]

The exit status is 0 if the memory of this library stayed constant, else 1. The tolerance of 4 MiB is 8,000
times 524 bytes (from the first measured window to the last): a leak of one packet, frame or graph per image
exceeds it, and fragmentation of the heap does not. ``--peers all`` also runs the other loaders of
``dataloader.py``, each in its own process. For a loader with worker processes, the memory of all is read
(PSS: a page that processes share counts once). Linux only.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from figures import add_output_options, machine, make_figure, show, write_json
from loaders import LOADERS, OURS, PEERS, Job, repeated
from processes import MISSING, main_or_cell, reason_of, resident_mib, run_fresh

PACKAGES = "av numpy spdl-io pillow torch torchvision".split()
MAIN = next(iter(OURS))
HEAD = ("loader", "after the first, MiB", "at the end", "highest", "rise", "flat")


# In the fresh process.


def run_cell(cell: dict[str, Any]) -> dict[str, Any]:
    """Load everything once. ``sizes`` has the number of images loaded so far, and MiB."""
    samples = repeated(Path(cell["images"]), cell["num_images"])
    job = Job(samples, cell["size"], cell["batch"], cell["workers"], "numpy")
    try:
        loader = LOADERS[cell["loader"]](job)
    except MISSING as error:
        return {"missing": reason_of(error)}
    count = 0
    sizes = []
    for _, labels in loader:
        count += len(labels)
        size = resident_mib()
        if size is None:
            raise SystemExit("this benchmark reads /proc, which Linux alone has")
        sizes.append((count, size))
    if count != len(samples):
        raise SystemExit(f"{cell['loader']} gave {count} samples of {len(samples)}")
    return {"sizes": sizes}


# In the process that evaluates.


def judge(sizes: Sequence[tuple[int, float]], settle: int, tolerance: float) -> dict[str, Any]:
    """Evaluate the sizes in windows of as many images as the first ones, which do not count."""
    windows: dict[int, list[float]] = {}
    for count, size in sizes:
        # A batch belongs to the window of its last image.
        windows.setdefault((count - 1) // settle, []).append(size)
    last = sizes[-1][0] // settle  # an incomplete last window is dropped
    medians = [statistics.median(windows[number]) for number in range(1, last)]
    rise = max(medians) - medians[0]
    return {
        "after_the_first_mib": medians[0],
        "end_mib": medians[-1],
        "highest_mib": max(size for count, size in sizes if count > settle),
        "rise_mib": rise,
        "flat": rise <= tolerance,
    }


def rows_of(results: dict[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return the cells of the table as text."""
    keys = ("after_the_first_mib", "end_mib", "highest_mib", "rise_mib")
    return [
        (name, *(f"{row[key]:.1f}" for key in keys), "yes" if row["flat"] else "no")
        for name, row in results.items()
    ]


def draw(results: dict[str, dict[str, Any]], settle: int, path: str) -> None:
    """Plot the resident size over the number of images loaded."""
    figure = make_figure(8, 4.5)
    if figure is None:
        return
    axes = figure.subplots()
    for name, row in results.items():
        axes.plot(*zip(*row["sizes"], strict=True), label=name)
    axes.axvline(settle, color="gray", linestyle=":")
    highest = max(size for row in results.values() for _, size in row["sizes"])
    axes.set_ylim(0, 1.2 * highest)
    axes.set_xlabel(f"pictures loaded (dotted: the first {settle})")
    axes.set_ylabel("resident size, MiB")
    axes.legend()
    figure.savefig(path)


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--images", type=Path, required=True, help="folder of JPEGs")
    parser.add_argument("--num-images", type=int, default=10_000, help="files are repeated")
    parser.add_argument(
        "--settle", type=int, default=1000, help="number of first images that do not count"
    )
    parser.add_argument("--tolerance", type=float, default=4.0, help="MiB")
    parser.add_argument("--peers", choices=("all", "none"), default="none")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--size", type=int, default=224, help="side of the images")
    add_output_options(parser, chart=True, markdown=True)
    return parser


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exit with a message if an option is invalid."""
    try:
        repeated(options.images, 0)
    except OSError as error:
        parser.error(f"--images: {error}")
    if not 0 < options.batch <= options.settle:
        parser.error(f"--batch must be 1 to {options.settle} (--settle), not {options.batch}")
    if options.num_images < 3 * options.settle:
        least = 3 * options.settle
        parser.error(
            f"--num-images must be at least {least} (3 x --settle): two windows that count"
        )


def main() -> int:
    """Measure, print the table, write the files, and evaluate this library."""
    parser = make_parser()
    options = parser.parse_args()
    check_options(parser, options)
    keys = ("num_images", "size", "batch", "workers")
    settings = {key: getattr(options, key) for key in keys}
    results = {}
    for name in [MAIN, *(PEERS if options.peers == "all" else ())]:
        found = run_fresh(__file__, {**settings, "images": str(options.images), "loader": name})
        if "missing" in found:
            print(f"{name} is left out: {found['missing']}", file=sys.stderr)
            continue
        verdict = judge(found["sizes"], options.settle, options.tolerance)
        results[name] = {**verdict, **found}
    show(HEAD, rows_of(results), markdown=options.markdown)
    if options.chart:
        draw(results, options.settle, options.chart)
    settings |= {"settle": options.settle, "tolerance_mib": options.tolerance}
    document = {"machine": machine(*PACKAGES), "settings": settings, "results": results}
    write_json(document, options.json)
    return 0 if results[MAIN]["flat"] else 1


if __name__ == "__main__":
    main_or_cell(main, run_cell)
