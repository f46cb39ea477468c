"""The command ``spdl-media``, which needs the extra ``cli``: click for options, rich for terminal output.

Click has no dependencies and full type information, and reports errors as exceptions, which become one-line
messages here. Typer would add click, rich and two more packages. ``import spdl_media`` imports none of this.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from spdl_media._optional import require
from spdl_media.errors import MissingDependencyError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: Command-line arguments without the program's name; ``None`` means those of the process.

    Returns:
        The exit status: 0 for success; 1 if something is wrong with the media; 2 if the command line is wrong
        or the command cannot run; 3 for a fault of this program; 130 after Ctrl-C.

    Raises:
        OSError: An error cannot be reported, because stderr cannot be written.
    """
    try:
        for package in ("click", "rich"):
            require(package, "The command spdl-media")
    except MissingDependencyError as missing:
        sys.stderr.write(f"spdl-media: {missing}\n")
        return 2
    from spdl_media.cli.app import run

    return run(arguments)
