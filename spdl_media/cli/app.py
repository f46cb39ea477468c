"""The command line as a whole: its commands, what becomes of their errors, and what they share."""

from __future__ import annotations

import contextlib
import errno
import importlib
import logging
import os
import shutil
import sys
import traceback
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

from spdl_media.errors import MediaError

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

    Raises:
        OSError: stdout cannot be written.
    """
    # Widths are of cells: a letter of Chinese takes two.
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
        # As Text: names of files may hold what rich takes for markup.
        table.add_row(*map(Text, row))
    with console.capture() as captured:
        console.print(table)
    # Without the blanks after its last column.
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
    """Write one line to stderr, whatever is in the message. A terminal wraps it between words.

    Raises:
        OSError: stderr cannot be written.
    """
    line = printable(" ".join(message.split()))
    make_console(sys.stderr).print(Text(f"spdl-media: {line}"))


_SETTINGS = {
    "help_option_names": ["-h", "--help"],
    # Click itself writes no help that is narrower than 50 columns.
    "terminal_width": min(shutil.get_terminal_size().columns, 100) - 1,
    "show_default": True,
}
# Of commands that have no module of their own.
_MODULES = dict.fromkeys(("probe", "doctor", "contact-sheet"), "show")
_COMMANDS = ("probe", "check", "bench", "doctor", "contact-sheet")


def run(arguments: Sequence[str] | None) -> int:
    """Run a command line and return its exit status; see :func:`spdl_media.cli.main`."""
    # Not an option of click's, which would take it before the name of the command alone.
    given = [*(sys.argv[1:] if arguments is None else arguments)]
    others = [argument for argument in given if argument != "--debug"] or ["--help"]
    for stream in (sys.stdout, sys.stderr):
        # Names of files are any bytes, and not every terminal takes every letter.
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="backslashreplace")
    # The report says what was interrupted and what failed; log lines would say it twice.
    logging.getLogger("spdl_media.pipeline").addHandler(logging.NullHandler())
    try:
        # The modules of other commands are not imported: that takes longer than the help of this one.
        for name in [one for one in _COMMANDS if one in others] or _COMMANDS:
            module = importlib.import_module(f"spdl_media.cli.{_MODULES.get(name, name)}")
            _spdl_media.add_command(getattr(module, f"{name.replace('-', '_')}_command"))
        status: int = _spdl_media.main(others, prog_name="spdl-media", standalone_mode=False)
        _flush()
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  # each becomes a line and a status
        if "--debug" in given:
            traceback.print_exc()
        status = _tell(error)
        with contextlib.suppress(OSError):
            _flush()
    return status or 0


def _flush() -> None:
    """Write what is left.

    Raises:
        OSError: It cannot be written, and is dropped.
    """
    try:
        sys.stdout.flush()
    except OSError:
        # The interpreter would try again at exit, and print a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def _tell(error: BaseException) -> int:
    """Write the line for an error; return the exit status."""
    if isinstance(error, click.Abort | KeyboardInterrupt):
        return 130
    if isinstance(error, BrokenPipeError):  # the reader, such as head, has seen enough
        return 1
    message, status = str(error), 2
    if isinstance(error, click.UsageError):
        command = error.ctx.command_path if error.ctx else "spdl-media"
        message = f"{error.format_message()} See: {command} --help"
    elif isinstance(error, OSError) and not isinstance(error, MediaError):
        # Names of the system's numbers, as its texts are in the user's language.
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "Free some space" if is_full else "Name another file or folder"
        message = f"{os.fsdecode(error.filename or 'the output')}: {error.strerror}. {remedy}"
    elif not isinstance(error, click.ClickException | MediaError):
        kind, status = type(error).__name__, 3
        message = f"a fault of this program, {kind}: {error}. Repeat it with --debug for a report"
    write_error(message)
    return status


@click.group(context_settings=_SETTINGS)
@click.version_option(package_name="spdl_media", message="spdl-media %(version)s")
def _spdl_media() -> None:
    """Look at media files, check data sets, and measure how fast they load.

    Behind any command, --debug shows the traceback of an error.
    """
