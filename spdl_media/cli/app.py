"""The commands with their options and help, and what becomes of errors."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from spdl_media.cli.terminal import write_error, writing
from spdl_media.errors import MediaError

_SETTINGS = {
    "help_option_names": ["-h", "--help"],
    # Click itself writes no help that is narrower than 50 columns.
    "terminal_width": min(shutil.get_terminal_size().columns, 100) - 1,
}
_INTERRUPTED = 130


class _Options:
    """What holds for the whole run."""

    debug = False


def run(arguments: Sequence[str] | None) -> int:
    """Run a command line and return its exit status; see :func:`spdl_media.cli.main`."""
    options = _Options()
    for stream in (sys.stdout, sys.stderr):
        # Names of files are any bytes, and not every terminal takes every letter.
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="backslashreplace")
    # A run that is broken off, or an item that fails, is told of in the report.
    logging.getLogger("spdl_media.pipeline").addHandler(logging.NullHandler())
    try:
        status: int = spdl_media.main(
            args=None if arguments is None else list(arguments),
            prog_name="spdl-media",
            standalone_mode=False,
            obj=options,
        )
        _flush()
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  # each becomes a line and a status
        if options.debug and not isinstance(error, BrokenPipeError):
            traceback.print_exc()
        status = _tell(error)
        with contextlib.suppress(click.ClickException, BrokenPipeError):
            _flush()
    return status or 0


def _flush() -> None:
    """Write what is left. What cannot be written must not be tried again at exit."""
    try:
        with writing("the output"):
            sys.stdout.flush()
    except BaseException:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def _tell(error: BaseException) -> int:
    """Write the line for an error; return the exit status."""
    if isinstance(error, click.Abort | KeyboardInterrupt):
        return _INTERRUPTED
    if isinstance(error, click.UsageError):
        command = error.ctx.command_path if error.ctx else "spdl-media"
        write_error(f"{error.format_message()} See: {command} --help")
        return 2
    if isinstance(error, click.ClickException):
        write_error(error.format_message())
        return error.exit_code
    if isinstance(error, BrokenPipeError):
        return 1
    if isinstance(error, MediaError):
        write_error(str(error))
        return 2
    if isinstance(error, OSError):
        write_error(f"{os.fsdecode(error.filename or 'the output')}: {error.strerror}")
        return 2
    write_error(
        f"a fault of this program, {type(error).__name__}: {error}. Repeat it with --debug for a report"
    )
    return 3


def _set_debug(context: click.Context, _: click.Parameter, value: bool) -> None:  # noqa: FBT001  # of click
    if value:
        context.obj.debug = True


_debug = click.option(
    *("--debug", "_debug"),
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_set_debug,
    help="Show tracebacks of errors.",
)
_file = click.Path(path_type=Path)
_folder = click.Path(exists=True, file_okay=False, path_type=Path)
_count = click.IntRange(min=1)


@click.group(context_settings=_SETTINGS, invoke_without_command=True)
@click.version_option(package_name="spdl_media", message="spdl-media %(version)s")
@_debug
@click.pass_context
def spdl_media(context: click.Context) -> None:
    """Look at media files, check data sets, and measure how fast they load."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def _command(summary: str, *examples: str) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a command whose help ends with examples; the summary stands in the list of commands."""
    lines = "\n".join(f"  {example}" for example in examples)

    def decorate(function: Callable[..., Any]) -> click.Command:
        name = function.__name__.replace("_", "-")
        epilog = f"\b\nExamples:\n{lines}"
        return spdl_media.command(name, short_help=summary, epilog=epilog)(_debug(function))

    return decorate


@_command(
    "Show what is in files.",
    "spdl-media probe photo.jpg movie.mp4",
    "spdl-media probe *.mp4 --json | jq '.[].duration'",
)
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=_file)
@click.option(
    "--json", "as_json", is_flag=True, help="Write JSON: a list with an object for each file."
)
def probe(files: tuple[Path, ...], *, as_json: bool) -> int:
    """Show what is in media files: streams, codecs, sizes, rates, durations, colour.

    The exit status is 1 if a file cannot be read.
    """
    from spdl_media.cli.probe import show

    return show(files, as_json=as_json)


@_command(
    "Find damaged files and duplicates.",
    "spdl-media check train/",
    "spdl-media check train/ --state train.state   # again after Ctrl-C: goes on",
    "spdl-media check train/ --csv -o damaged.csv",
)
@click.argument("folder", metavar="DIR", type=_folder)
@click.option("--json", "form", flag_value="json", help="Write the report as JSON.")
@click.option(
    "--csv", "form", flag_value="csv", help="Write the report as CSV: kind, path, reason."
)
@click.option("-o", "--output", type=_file, metavar="FILE", help="Write the report to this file.")
@click.option(
    "--state",
    type=_file,
    metavar="FILE",
    help="Keep results in this file; a later run decodes what is new.",
)
@click.option(
    "--threads", type=_count, metavar="N", help="Files to decode at a time.  [default: the cores]"
)
def check(**options: Any) -> int:
    """Decode all media in a folder, and report damaged, unreadable, odd and duplicate files.

    Hidden files are left out, and so is what holds no media and is not named as if it did. The exit
    status is 1 if anything is reported.
    """
    from spdl_media.cli.check import check_folder

    return check_folder(**options)


@_command("Show what is missing here.", "spdl-media doctor", "spdl-media doctor --json")
@click.option(
    "--json", "as_json", is_flag=True, help="Write JSON: a list with an object for each row."
)
def doctor(*, as_json: bool) -> int:
    """Show what is there and what is missing, and the line that gets it."""
    from spdl_media.cli.doctor import show

    return show(as_json=as_json)


@_command(
    "Put frames into one image.",
    "spdl-media contact-sheet movie.mp4",
    "spdl-media contact-sheet movie.mp4 -o sheet.png --columns 6 --rows 5",
)
@click.argument("video", metavar="VIDEO", type=_file)
@click.option(
    "-o",
    "--output",
    type=_file,
    metavar="FILE",
    default="sheet.jpg",
    show_default=True,
    help="The image to write.",
)
@click.option("--columns", type=_count, metavar="N", default=4, show_default=True)
@click.option("--rows", type=_count, metavar="N", default=4, show_default=True)
@click.option(
    "--width",
    type=click.IntRange(min=48),
    metavar="N",
    default=320,
    show_default=True,
    help="Width of a frame.",
)
def contact_sheet(**options: Any) -> int:
    """Put frames of a video at regular times, with their times, into one image."""
    from spdl_media.cli.contact_sheet import write_sheet

    return write_sheet(**options)
