"""Run Python programs in processes of their own, with the package of this checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
SAMPLES = CHECKOUT / "samples"
BENCHMARKS = SAMPLES / "benchmarks"


def run_python(
    *arguments: object, status: int = 0, path: Iterable[object] = (), cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program, and assert its exit status.

    Args:
        *arguments: Arguments of Python, such as a script and its arguments.
        status: Expected exit status.
        path: Folders in which the program finds further modules.
        cwd: Working folder.
    """
    folders = os.pathsep.join(map(str, (CHECKOUT, *path)))
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": folders},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stderr
    return done


def run_code(code: str, *arguments: object, status: int = 0) -> subprocess.CompletedProcess[str]:
    """Run code that may also import what this process can import."""
    return run_python("-c", code, *arguments, status=status, path=sys.path)
