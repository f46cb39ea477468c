"""What the commands share: arguments, names of files, tables that fit, errors of one line."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, TextIO

import click
from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

# Of a pipe. Nothing is wrapped there: who reads it counts lines.
_UNBOUNDED = 100_000
# Of a terminal, so many columns must be left for the last column of a table, which is wrapped.
_LAST_COLUMN = 24

FOLDER = click.argument(
    "folder", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path)
)
FILE: dict[str, Any] = {"type": Path, "metavar": "FILE"}
NUMBER: dict[str, Any] = {"type": click.IntRange(min=1), "metavar": "N"}


class Refused(click.ClickException):
    """The command cannot do its work, for a reason of one sentence."""


def make_console(stream: TextIO | None = None) -> Console:
    """Make a console for stdout or another stream; names of files hold what rich would take for markup."""
    stream = sys.stdout if stream is None else stream
    width = None if stream.isatty() else _UNBOUNDED
    return Console(file=stream, width=width, markup=False, highlight=False, emoji=False)


def printable(name: str | bytes | os.PathLike[str]) -> str:
    """Write a name with escapes for bytes that are no text, line breaks and codes for the terminal."""
    return "".join(
        c if c.isprintable() else repr(c.encode(errors="surrogateescape"))[2:-1]
        for c in os.fsdecode(name)
    )


def show_table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str] = ()
) -> None:
    """Print a table; where the terminal is too narrow, each row as a paragraph below its first cell.

    Args:
        headers: What stands above the columns; nothing if all are empty.
        rows: The cells.
        right: Headers of the columns of numbers.
    """
    console = make_console()
    columns = zip(headers, *rows, strict=True)
    *widths, last = (max(map(cell_len, column)) + 2 for column in columns)
    if sum(widths) + min(last, _LAST_COLUMN) > console.width + 2:
        _show_paragraphs(console, headers, rows)
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=any(headers))
    for number, header in enumerate(headers, 1):
        side: Literal["left", "right"] = "right" if header in right else "left"
        table.add_column(header, justify=side, no_wrap=number < len(headers))
    for row in rows:
        table.add_row(*map(Text, row))
    with console.capture() as captured:
        console.print(table)
    # Without the blanks behind its last column.
    console.file.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def _show_paragraphs(
    console: Console, headers: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    for first, group in groupby(rows, key=itemgetter(0)):
        console.print(Text(first, style="bold"), overflow="fold")
        for _, *others in group:
            pairs = zip(headers[1:], others, strict=True)
            cells = (f"{name} {cell}".strip() for name, cell in pairs if cell not in ("", "-"))
            text = Text(", ".join(cells), overflow="fold")
            console.print(Padding(text, (0, 0, 0, 2), expand=False))


def write_error(message: str) -> None:
    """Write one line to stderr, whatever is in the message. A terminal wraps it between words."""
    line = printable(" ".join(message.split()))
    make_console(sys.stderr).print(Text(f"spdl-media: {line}"))
