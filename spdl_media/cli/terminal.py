"""What the commands write: names of files, lines, tables that fit, errors of one line."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import click
from rich.console import Console
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

# Of a pipe. Nothing is wrapped there: who reads it counts lines.
_UNBOUNDED = 100_000


class Refused(click.ClickException):
    """The command cannot do its work, for a reason of one sentence."""

    exit_code = 2


def make_console(stream: TextIO | None = None) -> Console:
    """Make a console for stdout or another stream; names of files hold what rich would take for markup."""
    stream = sys.stdout if stream is None else stream
    width = None if stream.isatty() else _UNBOUNDED
    return Console(file=stream, width=width, markup=False, highlight=False, emoji=False)


def printable(name: str | bytes | os.PathLike[str]) -> str:
    """Write a name with escapes for bytes that are no text, line breaks and codes for the terminal."""
    return "".join(c if c.isprintable() else _escaped(c) for c in os.fsdecode(name))


def _escaped(character: str) -> str:
    # Python's stand-ins for bytes that are no UTF-8 lie at U+DC00 and above.
    code = ord(character)
    return f"\\x{code - 0xDC00:02x}" if code & ~0xFF == 0xDC00 else repr(character)[1:-1]


def show_table(
    console: Console,
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Collection[str] = (),
) -> None:
    """Print a table; where the terminal is too narrow, each row as a paragraph below its first cell."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for header in headers:
        table.add_column(header, justify="right" if header in right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    # Its own idea of a maximum ends at the width of the console.
    unbounded = console.options.update(max_width=_UNBOUNDED)
    if Measurement.get(console, unbounded, table).maximum <= console.width:
        print_stripped(console, table)
        return
    previous = None
    for first, *others in rows:
        if first != previous:
            console.print(Text(first, style="bold"), overflow="fold")
        previous = first
        pairs = zip(headers[1:], others, strict=True)
        cells = (f"{name} {cell}" for name, cell in pairs if cell not in ("", "-"))
        console.print(indented(", ".join(cells)))


def print_stripped(console: Console, table: Table) -> None:
    """Print a table without the blanks behind its last column."""
    with console.capture() as captured:
        console.print(table)
    console.file.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def indented(text: str, style: str = "", by: int = 2) -> Padding:
    """Make a paragraph that stands to the right of the left edge in all of its lines."""
    return Padding(Text(text, style=style, overflow="fold"), (0, 0, 0, by), expand=False)


def write_error(message: str) -> None:
    """Write one line to stderr, whatever is in the message. A terminal wraps it between words."""
    line = printable(" ".join(message.split()))
    make_console(sys.stderr).print(Text(f"spdl-media: {line}"))


@contextmanager
def writing(where: str | Path) -> Iterator[None]:
    """Turn the failure to write a file or stream into a sentence that says what to do.

    Raises:
        Refused: It failed.
        BrokenPipeError: The reader has seen enough.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "Free some space" if is_full else "Choose another file"
        raise Refused(f"cannot write {where}: {error.strerror or error}. {remedy}") from error
