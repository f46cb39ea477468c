"""Measure in fresh processes: start one, read its result, and sample its memory.

Memory is read from ``/proc``, which exists only on Linux; elsewhere it is None.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

PROC = Path("/proc")
MIB = 1 << 20

MISSING = (ImportError, RuntimeError, OSError)
"""What the import of a library raises that is not installed, or that cannot load another one."""


def reason_of(error: Exception) -> str:
    """Return the first line of an error."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def main_or_cell(main: Callable[[], object], run_cell: Callable[[Any], Any]) -> None:
    """Run a script, or a cell of it in the process of :func:`run_fresh`."""
    if sys.argv[1:2] != ["--cell"]:
        sys.exit(main())
    print(json.dumps(run_cell(json.loads(sys.argv[2]))), flush=True)
    # Skips the interpreter's exit, where PyTorch briefly takes 100 MiB more.
    os._exit(0)


def run_fresh(
    script: str, options: dict[str, Any], *, watch_memory: float | None = None
) -> dict[str, Any]:
    """Run ``script --cell OPTIONS`` and parse the last line of its output as JSON.

    Args: script: A Python script, run by this Python. options: Options of the script, passed as JSON.
    watch_memory: Seconds between samples of the memory of the process and its descendants, from its first
    line of output on. The result then has ``peak_mib``, the highest sum. None: memory is not sampled, which
    would slow the process down.

    Raises:
        RuntimeError: The process failed; the message has the end of its stderr.
    """
    command = [sys.executable, script, "--cell", json.dumps(options)]
    with TemporaryFile("w+") as errors:
        process = subprocess.Popen(  # noqa: S603  # this Python, and a script of this folder
            command, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        # Not communicate(), which misses lines that readline() has already buffered.
        with process, process.stdout or StringIO() as output:
            first, peak = "", None
            if watch_memory is not None:
                first = output.readline()
                peak = _watch(process, watch_memory)
            lines = (first + output.read()).splitlines()
        errors.seek(0)
        end = "\n".join(errors.read().strip().splitlines()[-15:])
    if process.returncode:
        raise RuntimeError(f"{options} ended with status {process.returncode}:\n{end}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found | ({} if watch_memory is None else {"peak_mib": peak})


def _watch(process: subprocess.Popen[str], interval: float) -> float | None:
    """Return the highest sum until the process ends. Its pipes are not read, so it must write little."""
    peak: float | None = None
    while process.poll() is None:
        now = family_mib(process.pid)
        if now is not None:
            peak = max(peak or 0.0, now)
        time.sleep(interval)
    return peak


def family_mib(pid: int) -> float | None:
    """Return the memory of a process and its descendants (sum of PSS: a shared page counts once)."""
    shares = [share for member in _family(pid) if (share := _pss(member)) is not None]
    return sum(shares) / MIB if shares else None


def resident_mib() -> float | None:
    """Return the resident size of this process (VmRSS), or :func:`family_mib` if it has children."""
    me = os.getpid()
    if len(list(_family(me))) > 1:
        return family_mib(me)
    size = _field(PROC / str(me) / "status", "VmRSS:")
    return None if size is None else size / MIB


def _pss(pid: int) -> int | None:
    return _field(PROC / str(pid) / "smaps_rollup", "Pss:")


def _field(path: Path, name: str) -> int | None:
    """Return the bytes in one line, or None without such a file or line, as for ended processes."""
    try:
        text = path.read_text()
    except OSError:
        return None
    values = [line.split()[1] for line in text.splitlines() if line.startswith(name)]
    return int(values[0]) * 1024 if values else None


def _family(pid: int) -> Iterator[int]:
    """Return the process and its descendants."""
    children: dict[int, list[int]] = {}
    for member, parent in _parents():
        children.setdefault(parent, []).append(member)
    waiting = [pid]
    while waiting:
        member = waiting.pop()
        yield member
        waiting += children.get(member, ())


def _parents() -> Iterator[tuple[int, int]]:
    for path in PROC.glob("[0-9]*/stat"):
        try:
            # The name of the program is in parentheses, and may contain any character.
            after_name = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        yield int(path.parent.name), int(after_name[1])
