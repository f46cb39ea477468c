"""Detects processes and shared memory that a test has left behind, and waits for threads."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

WAIT = 60


def wait_for_threads(before: set[threading.Thread]) -> None:
    """Wait until all threads that are not in ``before`` have ended. The timeout of the test ends a hang."""
    while left := set(threading.enumerate()) - before:
        for thread in left:
            with contextlib.suppress(RuntimeError):  # another thread is just starting it
                thread.join()


def descendants() -> set[int]:
    """Return the pids of all descendants of this process."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        # Zombies have ended, and only wait for their parent.
        if fields[0] != "Z":
            parents[int(stat.parent.name)] = int(fields[1])
    found, size = {os.getpid()}, 0
    while len(found) > size:
        size = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return found - {os.getpid()}


def descriptors() -> set[tuple[str, str]]:
    """Return the open descriptors of this process, each with the name of its file; none without /proc.

    Look for new ones, and do not compare counts: another thread may close what an earlier test opened.
    """
    found = set()
    for link in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):
            found.add((link.name, str(link.readlink())))
    return found


def segments() -> list[str]:
    """Return the shared memory files that this process has opened or mapped."""
    found = [name for _, name in descriptors()]
    maps = Path("/proc/self/maps").read_text().splitlines()
    found += [fields[5] for line in maps if len(fields := line.split(None, 5)) == 6]
    return sorted(name for name in found if "memfd:" in name or "/dev/shm" in name)  # noqa: S108


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until a condition is true, for a minute at most."""
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def watch() -> Iterator[None]:
    """Fail a test after which there are new processes or shared memory."""
    if not Path("/proc").is_dir():
        yield
        return
    # Processes of multiprocessing itself live as long as the interpreter.
    resource_tracker.ensure_running()
    forkserver.ensure_running()
    gc.collect()
    before, memory = descendants(), segments()
    yield
    gc.collect()
    wait_until(lambda: descendants() <= before)
    # Tests that run at the same time may have some for a moment.
    wait_until(lambda: set(segments()) <= set(memory))
