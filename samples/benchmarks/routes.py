"""Compare ways to load files to arrays: the parts that ``audio.py`` and ``video.py`` share.

A *route* loads a file with one library. A *work* is a kind of result, such as a window or a square. Each
route of a work is a :class:`Cell`; ratios compare cells in the same round.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from figures import (
    add_output_options,
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
from processes import reason_of

Load = Callable[[], Any]
Routes = Mapping[str, Callable[[Any], Load]]
"""Makers of routes by name. Each takes a task and imports its library."""

BASE, LEAN = "SPDL", "PyAV"
RATIOS = {"ratio_to_spdl": BASE, "ratio_to_pyav": LEAN}


class UnsupportedError(Exception):
    """The route does not support the task."""


@dataclass
class Cell:
    """One work on one file by one route.

    Attributes:
        make: Returns the function that loads the file; it serves one thread.
        rates: Units per second, by round.
        others: Another figure, by round; empty if it is not measured.
    """

    make: Callable[[], Load]
    rates: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)


def cells_of(
    routes: Routes, task: Any, label: str, *, count: int, axis: int, slack: float = 0.0
) -> Iterator[tuple[str, Cell]]:
    """Yield the routes that give the wanted result, and print why others do not.

    Args:
        routes: The routes.
        task: The argument of their makers.
        label: The task in messages.
        count: Wanted length of the result.
        axis: Axis of this length.
        slack: Share of ``count`` by which the length may differ.
    """
    for name, make in routes.items():
        try:
            load = make(task)
            found = load().shape[axis]
            if abs(found - count) > slack * count:
                raise UnsupportedError(f"it gives {found} of {count}")
        # Any exception of another library is a reason.
        except Exception as error:  # noqa: BLE001
            print(f"{label}: {name} is left out: {reason_of(error)}", file=sys.stderr)
        else:
            yield name, Cell(lambda make=make: make(task))  # type: ignore[misc]  # bound now


@dataclass(frozen=True)
class Benchmark:
    """What a script measures.

    Attributes:
        doc: Docstring of the script.
        works: Names of the works.
        peers: Names of the routes that may be left out.
        unit: Unit of the rates.
        other: Name of the other figure, in the table and in the file.
        digits: Digits of the rates and of the other figure.
        packages: Packages whose versions matter.
    """

    doc: str | None
    works: Sequence[str]
    peers: Sequence[str]
    unit: str
    other: tuple[str, str]
    digits: tuple[int, int]
    packages: str

    def parser(self) -> argparse.ArgumentParser:
        """Make the parser of the options that both scripts have."""
        parser = argparse.ArgumentParser(description=(self.doc or "").partition("\n")[0])
        parser.add_argument("files", type=Path, nargs="+", help="the media files")
        for option in ("--works", "--peers"):
            text = "all, none, or names with ';' between them"
            parser.add_argument(option, default="all", help=text)
        parser.add_argument("--rounds", type=int, default=7)
        add_output_options(parser, chart=True, markdown=True)
        return parser

    def run(
        self,
        parser: argparse.ArgumentParser,
        measured: Callable[[argparse.Namespace, Path, str, Sequence[str]], dict[str, Cell]],
    ) -> None:
        """Measure, print the table, and write the files.

        Args:
            parser: The parser.
            measured: Measures the routes of a work on a file, with those of these peers.
        """
        options = parser.parse_args()
        peers = chosen(parser, "--peers", options.peers, self.peers)
        works = chosen(parser, "--works", options.works, self.works)
        results = {
            path.name: {work: self.summary(measured(options, path, work, peers)) for work in works}
            for path in options.files
        }
        show(*self.table(results), markdown=options.markdown)
        if options.chart:
            self.draw(results, options.chart)
        left_out = ("files", "works", "peers", "json", "chart", "markdown")
        settings = {name: value for name, value in vars(options).items() if name not in left_out}
        found = {"machine": machine(*self.packages.split()), "settings": settings}
        write_json({**found, "results": results}, options.json)

    def summary(self, cells: dict[str, Cell]) -> dict[str, Any]:
        """Return the measurements by route."""
        results: dict[str, Any] = {}
        for name, cell in cells.items():
            row = {f"{self.unit}_per_second": spread(cell.rates)}
            for key, other in RATIOS.items():
                if other in cells:
                    row[key] = over(cell.rates, cells[other].rates)
            if cell.others:
                row[self.other[1]] = spread(cell.others)
            results[name] = row
        return results

    def table(self, results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
        """Return head and rows as text."""
        head = ["file", "work", "route", f"{self.unit}/s", "x SPDL", "x PyAV", self.other[0]]
        digits = {f"{self.unit}_per_second": self.digits[0], **dict.fromkeys(RATIOS, 2)}
        digits[self.other[1]] = self.digits[1]
        rows = []
        for file, works in results.items():
            for work, routes in works.items():
                for name, row in routes.items():
                    cells = [with_range(row[k], n) if k in row else "-" for k, n in digits.items()]
                    rows.append([file, work, name, *cells])
        return head, rows

    def draw(self, results: dict[str, Any], path: str) -> None:
        """Plot the rate of this library over SPDL's as bars."""
        figure = make_figure(9, 1 + 0.6 * len(results))
        if figure is None:
            return
        missing = spread([0.0])
        series = {
            work: [
                found[work].get("spdl_media", {}).get("ratio_to_spdl", missing)
                for found in results.values()
            ]
            for work in next(iter(results.values()))
        }
        axes = figure.subplots()
        draw_bars(axes, list(results), series)
        axes.axvline(1, color="black", linewidth=0.5)
        axes.set_xscale("log")
        axes.set_xlabel(f"{self.unit} a second over SPDL's (median; lines: lowest to highest)")
        figure.legend(loc="outside upper center", ncols=len(series))
        figure.savefig(path)
