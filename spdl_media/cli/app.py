"""The command line: registration of the commands, handling of their errors, and shared output helpers."""

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

# Width of a pipe. Nothing is wrapped there, because the reader may count lines.
_UNBOUNDED = 100_000
# Minimum width of the last column of a table in a terminal, which is wrapped.
_LAST_COLUMN = 24


_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
FOLDER = click.argument("folder", metavar="DIR", type=_FOLDER)
FILE: dict[str, Any] = {"type": Path, "metavar": "FILE"}
NUMBER: dict[str, Any] = {"type": click.IntRange(min=1), "metavar": "N"}


class Refused(click.ClickException):
    """The command cannot run. The message is one sentence and is shown without a traceback."""


def make_console(stream: TextIO | None = None) -> Console:
    """Make a console for stdout or another stream, without markup: file names may look like markup.

    Raises:
        ValueError: The stream is closed.
    """
    stream = sys.stdout if stream is None else stream
    width = None if stream.isatty() else _UNBOUNDED
    return Console(file=stream, width=width, markup=False, highlight=False, emoji=False)


def printable(name: str | bytes | os.PathLike[str]) -> str:
    """Return a file name with escapes for undecodable bytes, line breaks and terminal control codes."""
    return "".join(
        c if c.isprintable() else repr(c.encode(errors="surrogateescape"))[2:-1]
        for c in os.fsdecode(name)
    )


def show_table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str] = ()
) -> None:
    """Print a table. If the terminal is too narrow, print each row as a paragraph below its first cell.

    Args:
        headers: Headers of the columns; no header line if all are empty.
        rows: The cells, row by row.
        right: Headers of the columns that are aligned to the right.

    Raises:
        OSError: stdout cannot be written.
    """
    # Widths are in terminal cells: a Chinese character takes two.
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
        # As Text, because file names may look like rich markup.
        table.add_row(*map(Text, row))
    with console.capture() as captured:
        console.print(table)
    # Without trailing blanks.
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
    """Write a message to stderr as one line, with control characters escaped.

    Raises:
        OSError: stderr cannot be written.
    """
    line = printable(" ".join(message.split()))
    make_console(sys.stderr).print(Text(f"spdl-media: {line}"))


_SETTINGS = {
    "help_option_names": ["-h", "--help"],
    # Click itself writes help at least 50 columns wide.
    "terminal_width": min(shutil.get_terminal_size().columns, 100) - 1,
    "show_default": True,
}
# The module of each command.
_COMMANDS = {"probe": "show", "check": "check", "bench": "bench", "doctor": "show"}
_COMMANDS["contact-sheet"] = "show"


def run(arguments: Sequence[str] | None) -> int:
    """Run a command line and return its exit status; see :func:`spdl_media.cli.main`.

    Raises:
        OSError: An error cannot be reported, because stderr cannot be written.
    """
    # --debug is not a click option, because click would accept it only before the name of the command.
    given = [*(sys.argv[1:] if arguments is None else arguments)]
    others = [argument for argument in given if argument != "--debug"] or ["--help"]
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # a daemon has none
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  # stays open
    for stream in (sys.stdout, sys.stderr):
        # File names may have any bytes, and not every terminal can show every character.
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="backslashreplace")
    # The commands report interrupts and failures themselves, so the pipeline's log would repeat them.
    logging.getLogger("spdl_media.pipeline").addHandler(logging.NullHandler())
    try:
        # Import only the module of this command: importing all takes longer than showing its help.
        for name in [one for one in _COMMANDS if one in others] or _COMMANDS:
            module = importlib.import_module(f"spdl_media.cli.{_COMMANDS[name]}")
            _spdl_media.add_command(getattr(module, f"{name.replace('-', '_')}_command"))
        status: int = _spdl_media.main(others, prog_name="spdl-media", standalone_mode=False)
        _flush()
    except SystemExit:  # raised by rich when the reader, such as head, has closed the pipe
        status = 1
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  # becomes a message and an exit status
        if "--debug" in given:
            traceback.print_exc()
        status = _report_error(error)
        with contextlib.suppress(OSError):
            _flush()
    return status or 0


def _flush() -> None:
    """Flush stdout.

    Raises:
        OSError: The rest of the output cannot be written, and is dropped.
    """
    try:
        sys.stdout.flush()
    except OSError:
        # Otherwise the interpreter tries again at exit and prints a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def _report_error(error: BaseException) -> int:
    """Write the message of an error to stderr; return the exit status."""
    if isinstance(error, click.Abort | KeyboardInterrupt):
        return 130
    if isinstance(error, BrokenPipeError):  # the reader, such as head, has closed the pipe
        return 1
    message, status = str(error), 2
    if isinstance(error, click.UsageError):
        command = error.ctx.command_path if error.ctx else "spdl-media"
        text = error.format_message()
        message = f"{text}{'' if text.endswith(('.', '?')) else '.'} See: {command} --help"
    elif isinstance(error, OSError) and not isinstance(error, MediaError):
        # Compare error numbers, because the texts of the system are in the user's language.
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "Free some space" if is_full else "Name another file or folder"
        message = f"{os.fsdecode(error.filename or 'the output')}: {error.strerror}. {remedy}"
    elif isinstance(error, MediaError):  # without the option of Python functions that it advises
        message = message.partition(". decode_config(")[0]
    elif not isinstance(error, click.ClickException):
        kind, status = type(error).__name__, 3
        message = f"internal error, {kind}: {error}. Repeat it with --debug for a report"
    write_error(message)
    return status


@click.group(context_settings=_SETTINGS)
@click.version_option(package_name="spdl_media", message="spdl-media %(version)s")
def _spdl_media() -> None:
    """Show media files, check datasets, and measure how fast they load.

    After any command, --debug shows the traceback of an error.
    """
