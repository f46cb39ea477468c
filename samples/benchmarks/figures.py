"""Shared functions of the benchmarks: medians with ranges, tables, charts and files."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

Spread = dict[str, float]


def add_output_options(parser: argparse.ArgumentParser, *, chart: bool, markdown: bool) -> None:
    """Add the options of files and of the form of the table."""
    parser.add_argument("--json", metavar="FILE", help="write the figures here; - is stdout")
    if chart:
        parser.add_argument("--chart", metavar="FILE", help="draw the figures; needs matplotlib")
    if markdown:
        parser.add_argument("--markdown", action="store_true", help="print the table for a page")


def chosen(
    parser: argparse.ArgumentParser, option: str, text: str, names: Iterable[str]
) -> list[str]:
    """Return the names in the text of an option: all, none, or names with ';' between them."""
    if text in ("all", "none"):
        return list(names) if text == "all" else []
    found = [name.strip() for name in text.split(";")]
    if unknown := [name for name in found if name not in names]:
        parser.error(f"{option}: {unknown[0]!r} is none of {'; '.join(names)}")
    return found


def alternating(items: Iterable[Any], rounds: int) -> Iterator[list[Any]]:
    """Yield the items of each round: in order, and in every other round backwards."""
    order = list(items)
    for number in range(rounds):
        yield order if number % 2 == 0 else order[::-1]


def spread(values: Sequence[float]) -> Spread:
    """Return the median, the minimum and the maximum."""
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def over(first: Sequence[float], second: Sequence[float]) -> Spread:
    """Return ratios within each round, which changes of the machine's speed hardly affect."""
    return spread([one / other for one, other in zip(first, second, strict=True)])


def with_range(value: Spread, digits: int = 0) -> str:
    """Format the median, with the minimum and the maximum in parentheses."""
    median, lowest, highest = (f"{value[k]:.{digits}f}" for k in ("median", "lowest", "highest"))
    return f"{median} ({lowest}-{highest})"


def plain_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format columns for a terminal, the first one left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = []
    for row in (head, *rows):
        first, *others = zip(row, widths, strict=True)
        cells = [f"{first[0]:<{first[1]}}", *(f"{cell:>{width}}" for cell, width in others)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table."""
    rule = ["---", *("---:" for _ in head[1:])]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))


def show(head: Sequence[str], rows: Sequence[Sequence[str]], *, markdown: bool = False) -> None:
    """Print a table for a terminal or a page."""
    print((markdown_table if markdown else plain_table)(head, rows), flush=True)


def machine(*packages: str) -> dict[str, Any]:
    """Return the number of cores, and the versions of Python and of the installed ``packages``."""
    found: dict[str, Any] = {"cores": os.cpu_count(), "python": platform.python_version()}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def write_json(document: dict[str, Any], path: str | None) -> None:
    """Write to a file, to stdout for ``-``, or not at all for None."""
    text = json.dumps(document, indent=1)
    if path == "-":
        print(text)
    elif path is not None:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text + "\n")


def make_figure(width: float, height: float) -> Any:
    """Make an empty figure. Without matplotlib, return None and print a line to stderr."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no chart: it needs matplotlib (pip install matplotlib)", file=sys.stderr)
        return None
    return Figure(figsize=(width, height), layout="constrained")


def draw_bars(axes: Any, names: Sequence[str], series: Mapping[str, Sequence[Spread]]) -> None:
    """Draw horizontal bars with ranges, one per series and name, the first name on top."""
    height = 0.8 / len(series)
    for place, (label, spreads) in enumerate(series.items()):
        medians = [value["median"] for value in spreads]
        below = [value["median"] - value["lowest"] for value in spreads]
        above = [value["highest"] - value["median"] for value in spreads]
        positions = [index + (place + 0.5) * height - 0.4 for index in range(len(names))]
        axes.barh(positions, medians, height, xerr=[below, above], label=label)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
