"""The command line as a whole: its commands, and what becomes of their errors."""

from __future__ import annotations

import contextlib
import errno
import importlib
import logging
import os
import shutil
import sys
import traceback
from collections.abc import Sequence

import click

from spdl_media.cli.terminal import write_error
from spdl_media.errors import MediaError

_SETTINGS = {
    "help_option_names": ["-h", "--help"],
    # Click itself writes no help that is narrower than 50 columns.
    "terminal_width": min(shutil.get_terminal_size().columns, 100) - 1,
    "show_default": True,
}
_COMMANDS = ("probe", "check", "bench", "doctor", "contact-sheet")


def run(arguments: Sequence[str] | None) -> int:
    """Run a command line and return its exit status; see :func:`spdl_media.cli.main`."""
    given = [*(sys.argv[1:] if arguments is None else arguments)]
    others = [argument for argument in given if argument != "--debug"] or ["--help"]
    for stream in (sys.stdout, sys.stderr):
        # Names of files are any bytes, and not every terminal takes every letter.
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="backslashreplace")
    # A run that is broken off, or an item that fails, is told of in the report.
    logging.getLogger("spdl_media.pipeline").addHandler(logging.NullHandler())
    try:
        # Each command has a module, and is imported alone: others take longer than its help.
        for name in [one for one in _COMMANDS if one in others] or _COMMANDS:
            module = importlib.import_module(f"spdl_media.cli.{name.replace('-', '_')}")
            _spdl_media.add_command(module.command)
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
    """Write what is left. What cannot be written must not be tried again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
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
