"""Measure the rate of batches from another process: this library, PyTorch's DataLoader and SPDL.

There are three cases. *Landed*: rows of 1 MB are made one after the other, as decoders do; here in the memory
of the batch (``shared_empty``), in PyTorch's worker as separate rows for its ``default_collate``. *Collated*:
existing rows become a batch, by ``collate`` here and by ``default_collate`` in PyTorch, each directly in the
memory that crosses. In both cases SPDL copies the result of ``np.stack``, because it has no such function.
*Copied*: the batch is an existing ordinary array. The consumer reads a byte of each page. One round runs all
cases, in an order that alternates from round to round; the time starts with the third batch.

The last case is a preprocessor in pure Python: items per second of ``DataLoader(num_processes=2)``, and of
two processes that only call it in a loop.

    python samples/benchmarks/ipc.py [--rounds 5] [--batches 40] [--megabytes 64] [--json FILE]

PyTorch and SPDL are skipped with a message if they are not installed.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from figures import add_output_options, alternating, machine, write_json

import spdl_media as sm
from spdl_media.pipeline import iterate_in_subprocess, shared_empty

ROW = 1 << 20
PAGE = 4096
WARM = 2
CASES = ("landed", "collated", "copied")


def row() -> Any:
    """Make a row, as a decoder does."""
    return np.full(ROW, 7, np.uint8)


class Batches:
    """The batches of one epoch."""

    def __init__(self, case: str, num_rows: int, count: int) -> None:
        self.case = case
        self.num_rows = num_rows
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        rows = [row() for _ in range(self.num_rows)]
        batch = np.stack(rows)
        for _ in range(self.count):
            yield batch if self.case == "copied" else self.made(rows)

    def made(self, rows: list[Any]) -> Any:
        """Return a batch of existing rows, or of new ones."""
        if self.case == "collated":
            return sm.collate(rows)
        batch = shared_empty((self.num_rows, ROW))
        for place in batch:
            place.fill(7)
        return batch


class Stacked(Batches):
    """The same for SPDL, without this library."""

    def made(self, rows: list[Any]) -> Any:
        """Return a batch, as ``Batches.made`` does."""
        return np.stack(rows if self.case == "collated" else [row() for _ in rows])


class Rows:
    """The same as a PyTorch dataset: rows for ``default_collate``, or whole batches without collation."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._made: list[Any] = []
        self._batch: Any = None

    def __len__(self) -> int:
        is_copied = self._batches.case == "copied"
        return self._batches.count * (1 if is_copied else self._batches.num_rows)

    def __getitem__(self, number: int) -> Any:
        torch = importlib.import_module("torch")
        if self._batches.case == "landed":
            return torch.from_numpy(row())
        if not self._made:
            self._made = [row() for _ in range(self._batches.num_rows)]
            self._batch = np.stack(self._made)
        if self._batches.case == "collated":
            return torch.from_numpy(self._made[number % self._batches.num_rows])
        # A new tensor each time: PyTorch keeps a sent tensor in shared memory, so sending it again is free.
        return torch.from_numpy(self._batch)


def ours(batches: Batches) -> Iterator[Any]:
    """Return batches through this library."""
    with iterate_in_subprocess(functools.partial(_same, batches)) as iterable:
        yield from iterable


def _same(batches: Batches) -> Batches:
    return batches


def with_torch(num_workers: int, batches: Batches) -> Iterable[Any]:
    """Return batches through PyTorch's DataLoader."""
    data: Any = importlib.import_module("torch.utils.data")
    size = None if batches.case == "copied" else batches.num_rows
    return data.DataLoader(  # type: ignore[no-any-return]
        Rows(batches), batch_size=size, num_workers=num_workers, prefetch_factor=3
    )


def with_spdl(batches: Batches) -> Iterable[Any]:
    """Return batches through SPDL's pool of segments, whose arrays are views; its ring copies once more."""
    spdl: Any = importlib.import_module("spdl.pipeline")
    pool = spdl.SharedMemorySegmentPool((batches.num_rows + 1) * ROW, 7)
    stacked = Stacked(batches.case, batches.num_rows, batches.count)
    # Its locks use the default start method.
    return spdl.iterate_in_subprocess(  # type: ignore[no-any-return]
        functools.partial(_same, stacked), arena=pool
    )


def rate(batches: Iterable[Any], count: int, nbytes: int) -> float:
    """Return batches per second, from the third to the last, without the time that processes take to exit."""
    total, last, begin, end = 0, 0, 0.0, 0.0
    for number, batch in enumerate(batches, 1):
        flat = np.asarray(batch).reshape(-1)
        total += flat.nbytes
        last = int(flat[::PAGE].max())
        # Returns the memory to its owner.
        del batch, flat
        end = time.perf_counter()
        if number == WARM:
            begin = end
    assert total == count * nbytes, (total, count, nbytes)
    assert last == 7
    return (count - WARM) / (end - begin)


def compute(item: int) -> int:
    """Compute for some milliseconds in Python, holding the GIL."""
    total = item
    for number in range(100_000):
        total = (total * 31 + number) & 0xFFFFFF
    return total


def loop(barrier: Any, results: Any, count: int) -> None:
    """Run the computation in a bare process."""
    barrier.wait()
    begin = time.perf_counter()
    for item in range(count):
        compute(item)
    results.put(time.perf_counter() - begin)


def bare(count: int) -> float:
    """Return items per second of two bare processes."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    both = [context.Process(target=loop, args=(barrier, results, count // 2)) for _ in range(2)]
    for process in both:
        process.start()
    seconds = max(results.get() for _ in both)
    for process in both:
        process.join()
    return count / seconds


def in_loader(count: int) -> float:
    """Return items per second of a DataLoader with two processes, when both are running."""
    warm = 8
    loader = sm.DataLoader(
        range(count + warm), preprocessor=compute, num_processes=2, num_threads=1
    )
    begin = 0.0
    for number, _ in enumerate(loader, 1):
        if number == warm:
            begin = time.perf_counter()
    return count / (time.perf_counter() - begin)


def compare(sides: dict[str, Callable[[], float]], rounds: int) -> dict[str, Any]:
    """Return median rates, and median ratios of the rounds to the first side."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for names in alternating(sides, rounds):
        for name in names:
            rates[name].append(sides[name]())
    first = next(iter(rates.values()))
    return {
        name: {
            "rate": round(statistics.median(values), 2),
            "ratio": round(statistics.median(a / b for a, b in zip(first, values, strict=True)), 3),
        }
        for name, values in rates.items()
    }


def makers() -> dict[str, Callable[[Batches], Iterable[Any]]]:
    """Return the installed libraries."""
    found: dict[str, Callable[[Batches], Iterable[Any]]] = {"spdl_media": ours}
    for name, package in (("PyTorch", "torch"), ("SPDL", "spdl.pipeline")):
        try:
            importlib.import_module(package)
        except ImportError:
            print(f"{name} is left out: it is not installed", file=sys.stderr)
            continue
        if package == "torch":
            for workers in (1, 2):
                found[f"PyTorch, num_workers={workers}"] = functools.partial(with_torch, workers)
        else:
            found[name] = with_spdl
    return found


def main() -> None:
    """Measure, print the table, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument(
        "--items", type=int, default=400, help="items for the preprocessor in pure Python"
    )
    add_output_options(parser, chart=False, markdown=False)
    options = parser.parse_args()
    results = {}
    for case in CASES:
        batches = Batches(case, options.megabytes, options.batches)
        sides = {
            name: functools.partial(_rate_of, make, batches) for name, make in makers().items()
        }
        results[case] = compare(sides, options.rounds)
    loaders = {
        "DataLoader, num_processes=2": functools.partial(in_loader, options.items),
        "two bare processes": functools.partial(bare, options.items),
    }
    results["GIL held"] = compare(loaders, options.rounds)
    print(f"{'case':10}{'':30}{'a second':>10}{'first / it':>12}")
    for case, rows in results.items():
        for name, row in rows.items():
            print(f"{case:10}{name:30}{row['rate']:>10.1f}{row['ratio']:>12.2f}")
    settings = {key: value for key, value in vars(options).items() if key != "json"}
    write_json({"machine": machine(), "settings": settings, "results": results}, options.json)


def _rate_of(make: Callable[[Batches], Iterable[Any]], batches: Batches) -> float:
    return rate(make(batches), batches.count, batches.num_rows * ROW)


if __name__ == "__main__":
    main()
