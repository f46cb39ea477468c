"""Load JPEG paths to batches of (images, labels): this library compared with SPDL and PyTorch's DataLoader.

Every loader gets the same paths and returns the same results: images (B, size, size, 3) uint8 in RGB, each
stretched to the square with a bicubic kernel, and labels (B,) int64, as PyTorch tensors.

    python samples/benchmarks/dataloader.py --images DIR [--json FILE] [--chart FILE.png] [--markdown]

    images/s   samples of the whole run over its seconds, from the start of the loader to its last batch. It
               includes starting the workers, but neither imports nor stopping the workers
    x Pillow   ratio to the images/s of PyTorch's DataLoader with Pillow, in the same round
    x torchv.  the same, with torchvision
    first      milliseconds from the start of the loader to its first batch
    memory     peak memory (PSS: a page that processes share counts once) of the process and its descendants
               while it loads, sampled every 20 ms in a shorter untimed run, because sampling slows it down.
               In parentheses: the memory after imports. Linux only

Comparability:

- Each figure comes from a fresh process. One round runs all loaders, for each number of workers and each
  batch size; the next round runs in reverse order. The output shows medians with minimum and maximum.
- All read the same files from the page cache: an untimed run before the rounds has read them.
- All may prefetch equally many batches: two per worker. Workers are threads here and in SPDL, and processes
  in PyTorch, with its default start method.
- The main process takes batches and checks their shape, but does not read the pixels. This favours processes,
  whose batches arrive in shared memory that is mapped only when it is read.
- SPDL is used in the three ways of its documentation. Its storage is not used: it has one block, which the
  concurrent stages of its examples overwrite while it is in use. This library leases blocks from a pool.
- Kernels differ in shape (Pillow's and torchvision's bicubic is not swscale's), but all of them antialias.
  ``images.py`` measures the exactness of the images.

A loader whose library is not installed is skipped with a message. ``--peers none`` measures only this
library.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from figures import (
    Spread,
    add_output_options,
    alternating,
    chosen,
    draw_bars,
    machine,
    make_figure,
    over,
    show,
    spread,
    with_range,
    write_json,
)
from loaders import LOADERS, OURS, PEERS, Job, repeated
from processes import MISSING, family_mib, main_or_cell, reason_of, run_fresh

# Column, and the loader that it is compared with.
BASES = {"x Pillow": "torch, Pillow", "x torchv.": "torch, torchvision"}
PACKAGES = "av numpy spdl-io pillow torch torchvision".split()


class Cell(NamedTuple):
    """One row of the table."""

    loader: str
    workers: int
    batch: int


@dataclass
class Found:
    """The measurements of a cell, by round."""

    rates: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)
    imported: list[float] = field(default_factory=list)


# In the fresh process.


def run_cell(cell: dict[str, Any]) -> dict[str, Any]:
    """Run one loader once. ``missing`` names a library that is not installed."""
    samples = repeated(Path(cell["images"]), cell["num_images"])
    job = Job(samples, cell["size"], cell["batch"], cell["workers"], cell["arrays"])
    try:
        loader = LOADERS[cell["loader"]](job)
    except MISSING as error:
        return {"missing": reason_of(error)}
    imported = family_mib(os.getpid())
    print("ready", flush=True)  # memory is sampled from here on
    labels: list[int] = []
    times: list[float] = []
    begin = time.perf_counter()
    for images, batch_labels in loader:
        times.append(time.perf_counter() - begin)
        labels += batch_labels.tolist()
        check_batch(images, len(batch_labels), job)
    if sorted(labels) != sorted(label for _, label in samples):
        raise SystemExit(f"{cell['loader']} gave {len(labels)} samples, not those of the job")
    return {"seconds": times[-1], "first": times[0], "imported_mib": imported}


def check_batch(images: Any, count: int, job: Job) -> None:
    """Raise if a batch differs from what all loaders must return."""
    found, wanted = (tuple(images.shape), str(images.dtype)), (count, job.size, job.size, 3)
    if found[0] != wanted or not found[1].endswith("uint8"):
        raise SystemExit(f"a batch is {found[0]} {found[1]}, not {wanted} uint8")


# In the process that measures.


def cells_of(
    loaders: Sequence[str], workers: Sequence[int], batches: Sequence[int]
) -> Iterator[Cell]:
    """Order the loaders so that compared ones run consecutively."""
    for batch in batches:
        for count in workers:
            for loader in loaders:
                yield Cell(loader, count, batch)


def present(names: Sequence[str], common: dict[str, Any]) -> list[str]:
    """Return the installed loaders, and print the others to stderr."""
    found = []
    for name in names:
        result = run_fresh(__file__, {**common, **Cell(name, 1, 8)._asdict()})
        if "missing" in result:
            print(f"{name} is left out: {result['missing']}", file=sys.stderr)
        else:
            found.append(name)
    return found


def measure(
    cells: Sequence[Cell], common: dict[str, Any], rounds: int, memory_rounds: int
) -> dict[Cell, Found]:
    """Run the rounds, alternately forwards and backwards: first for speed, then for memory."""
    found = {cell: Found() for cell in cells}
    for number, order in enumerate(alternating(cells, rounds + memory_rounds)):
        for_memory = number >= rounds
        print(f"round {number + 1} of {rounds + memory_rounds}", file=sys.stderr)
        for cell in order:
            options = {**common, **cell._asdict()}
            if for_memory:
                options["num_images"] = min(common["num_images"], max(2048, 16 * cell.batch))
            result = run_fresh(__file__, options, watch_memory=0.02 if for_memory else None)
            if "missing" in result:
                raise SystemExit(f"{cell} could be made before, and now not: {result['missing']}")
            if not for_memory:
                found[cell].rates.append(common["num_images"] / result["seconds"])
                found[cell].first.append(result["first"] * 1000)
            elif result["imported_mib"] is not None:
                # A short run may end before the first sample, so the memory at its start counts too.
                found[cell].peaks.append(max(result["peak_mib"] or 0.0, result["imported_mib"]))
                found[cell].imported.append(result["imported_mib"])
    return found


# Output.


def summary(found: dict[Cell, Found]) -> list[dict[str, Any]]:
    """Return the measurements by cell."""
    results = []
    for cell, figures in found.items():
        row: dict[str, Any] = {
            **cell._asdict(),
            "images_per_second": spread(figures.rates),
            "first_batch_ms": spread(figures.first),
        }
        bases = {name: found.get(cell._replace(loader=name)) for name in BASES.values()}
        row["ratio_to"] = {
            name: over(figures.rates, base.rates) for name, base in bases.items() if base
        }
        if figures.peaks:
            row["peak_mib"] = spread(figures.peaks)
            row["imported_mib"] = spread(figures.imported)
        results.append(row)
    return results


def table(results: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return head and rows as text."""
    compared = {text: name for text, name in BASES.items() if name in results[0]["ratio_to"]}
    head = ["loader", "batch", "workers", "images/s", *compared, "first, ms", "memory, MiB"]
    rows = [
        [
            row["loader"],
            str(row["batch"]),
            str(row["workers"]),
            with_range(row["images_per_second"]),
            *(with_range(row["ratio_to"][name], 2) for name in compared.values()),
            with_range(row["first_batch_ms"]),
            memory_of(row),
        ]
        for row in results
    ]
    return head, rows


def memory_of(row: dict[str, Any]) -> str:
    """Return the peak memory and the memory after imports."""
    if "peak_mib" not in row:
        return "-"
    return f"{row['peak_mib']['median']:.0f} ({row['imported_mib']['median']:.0f})"


def draw(results: Sequence[dict[str, Any]], path: str) -> None:
    """Plot images per second and memory, by batch size."""
    names = list(dict.fromkeys(row["loader"] for row in results))
    sizes = list(dict.fromkeys(row["batch"] for row in results))
    figure = make_figure(12, 1 + 0.55 * len(names) * len(sizes))
    if figure is None:
        return
    kinds = {"images_per_second": "images a second", "peak_mib": "peak memory, MiB"}
    all_axes = figure.subplots(len(sizes), len(kinds), squeeze=False)
    for size, line in zip(sizes, all_axes, strict=True):
        for (key, text), axes in zip(kinds.items(), line, strict=True):
            series = series_of([row for row in results if row["batch"] == size and key in row], key)
            if series:
                draw_bars(axes, names, series)
            axes.set_title(f"batches of {size}")
            axes.set_xlabel(f"{text} (median; lines: lowest to highest)")
    figure.legend(*all_axes[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    figure.savefig(path)


def series_of(rows: Sequence[dict[str, Any]], key: str) -> dict[str, list[Spread]]:
    """Return the bars of one batch size, by number of workers."""
    series: dict[str, list[Spread]] = {}
    for row in rows:
        label = f"{row['workers']} worker{'s' * (row['workers'] > 1)}"
        series.setdefault(label, []).append(row[key])
    return series


def main() -> None:
    """Measure, print the table, and write the files."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--images", type=Path, required=True, help="folder of JPEGs")
    parser.add_argument(
        "--num-images", type=int, default=8192, help="images per run; files are repeated"
    )
    parser.add_argument("--peers", default="all", help="all, none, or names with ';' between them")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batch", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--rounds", type=int, default=5, help="rounds for speed")
    parser.add_argument("--memory-rounds", type=int, default=2)
    parser.add_argument("--size", type=int, default=224, help="side of the images")
    default = "torch" if find_spec("torch") else "numpy"
    parser.add_argument("--arrays", choices=("torch", "numpy"), default=default)
    add_output_options(parser, chart=True, markdown=True)
    options = parser.parse_args()
    try:
        repeated(options.images, 0)
    except OSError as error:
        parser.error(f"--images: {error}")
    common = {
        "images": str(options.images),
        "num_images": options.num_images,
        "size": options.size,
        "arrays": options.arrays,
    }
    names = present([*OURS, *chosen(parser, "--peers", options.peers, PEERS)], common)
    cells = list(cells_of(names, options.workers, options.batch))
    results = summary(measure(cells, common, options.rounds, options.memory_rounds))
    show(*table(results), markdown=options.markdown)
    if options.chart:
        draw(results, options.chart)
    settings = {key: value for key, value in common.items() if key != "images"}
    settings |= {"rounds": options.rounds, "memory_rounds": options.memory_rounds}
    document = {"machine": machine(*PACKAGES), "settings": settings, "results": results}
    write_json(document, options.json)


if __name__ == "__main__":
    main_or_cell(main, run_cell)
