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
from types import SimpleNamespace
from typing import Any

import click

from spdl_media.cli.terminal import write_error, writing
from spdl_media.errors import MediaError

_SETTINGS = {
    "help_option_names": ["-h", "--help"],
    # Click itself writes no help that is narrower than 50 columns.
    "terminal_width": min(shutil.get_terminal_size().columns, 100) - 1,
    "show_default": True,
}
_INTERRUPTED = 130


def run(arguments: Sequence[str] | None) -> int:
    """Run a command line and return its exit status; see :func:`spdl_media.cli.main`."""
    options = SimpleNamespace(debug=False)
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
_file: dict[str, Any] = {"type": click.Path(path_type=Path), "metavar": "FILE"}
_folder = click.Path(exists=True, file_okay=False, path_type=Path)
_number: dict[str, Any] = {"type": click.IntRange(min=1), "metavar": "N"}


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
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--json", "as_json", is_flag=True, help="Write JSON: an object for each file.")
def probe(files: tuple[str, ...], *, as_json: bool) -> int:
    """Show what is in media files: streams, codecs, sizes, rates, durations, colour.

    A FILE may be a URL, where fsspec is installed. The exit status is 1 if a file cannot be read.
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
@click.option("--csv", "form", flag_value="csv", help="Write it as CSV: kind, path, reason.")
@click.option("-o", "--output", **_file, help="Write it to this file.")
@click.option("--state", **_file, help="Keep results; the next run decodes what is new.")
@click.option("--threads", **_number, help="Files to decode at a time; else the cores.")
def check(**options: Any) -> int:
    """Decode all media in a folder, and report damaged, unreadable, odd and duplicate files.

    Hidden files are left out, and so is what holds no media and is not named as if it did. The exit
    status is 1 if anything is reported.
    """
    from spdl_media.cli.check import check_folder

    return check_folder(**options)


@_command(
    "Find settings for a DataLoader.",
    "spdl-media bench train/",
    "spdl-media bench clips/ --kind video --size 112 --chart clips.svg",
    "spdl-media bench train/ --preprocessor mypackage.data:load",
)
@click.argument("folder", metavar="DIR", type=_folder)
@click.option("--kind", type=click.Choice(["image", "video", "audio"]), help="Else the most.")
@click.option("--size", **_number, default=224, help="Side of images and frames.")
@click.option("--batch-size", **_number, help="Else 32, and of videos 8.")
@click.option("--preprocessor", metavar="M:F", help="Module and function, from path to sample.")
@click.option("--seconds", type=float, metavar="S", default=1.0, help="Time of each run.")
@click.option("--chart", **_file, default="spdl-media-bench.svg", help="The chart to write.")
def bench(**options: Any) -> int:
    """Measure loading here, name the bottleneck, and print a DataLoader with settings that fit."""
    from spdl_media.cli.bench import bench_folder

    return bench_folder(**options)


@_command("Show what is missing here.", "spdl-media doctor", "spdl-media doctor --json")
@click.option("--json", "as_json", is_flag=True, help="Write JSON: an object for each row.")
def doctor(*, as_json: bool) -> int:
    """Show what is there and what is missing, and the line that gets it."""
    from spdl_media.cli.doctor import show

    return show(as_json=as_json)


@_command(
    "Put frames into one image.",
    "spdl-media contact-sheet movie.mp4",
    "spdl-media contact-sheet movie.mp4 -o sheet.png --columns 6 --rows 5",
)
@click.argument("video", metavar="VIDEO", type=_file["type"])
@click.option("-o", "--output", **_file, default="sheet.jpg", help="The image to write.")
@click.option("--columns", **_number, default=4)
@click.option("--rows", **_number, default=4)
@click.option("--width", type=click.IntRange(min=48), metavar="N", default=320, help="Of a frame.")
def contact_sheet(**options: Any) -> int:
    """Put frames of a video at regular times, with their times, into one image."""
    from spdl_media.cli.contact_sheet import write_sheet

    return write_sheet(**options)
