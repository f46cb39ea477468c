"""The command ``spdl-media``, which needs the extra ``cli``: click for its options, rich for the terminal.

Click has no dependencies and full type information, and its errors are exceptions that become one line here;
Typer would bring click, rich and two more. Nothing of this is imported by ``import spdl_media``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from spdl_media._optional import require
from spdl_media.errors import MissingDependencyError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: What follows its name; ``None`` for those of the process.

    Returns:
        The exit status: 0; 1 if something was found to be wrong with the media; 2 if the command is wrong or
        cannot do its work; 3 for a fault of the program; 130 after Ctrl-C.
    """
    try:
        for package in ("click", "rich"):
            require(package, "The command spdl-media")
    except MissingDependencyError as missing:
        sys.stderr.write(f"spdl-media: {missing}\n")
        return 2
    from spdl_media.cli.app import run

    return run(arguments)
