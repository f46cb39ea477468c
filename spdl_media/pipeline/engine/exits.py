"""What becomes of the runs that are live when the interpreter exits, or when the process is forked."""

from __future__ import annotations

import contextlib
import weakref
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spdl_media.pipeline.engine.run import Run

__all__ = ("EXIT_SECONDS", "LIVE", "disown_all", "stop_all")

EXIT_SECONDS = 0.6
"""How long interpreter exit waits for all pipelines together."""

LIVE: weakref.WeakSet[Run] = weakref.WeakSet()
"""Runs that have been started. One that has ended goes with its pipeline."""


def _runs() -> list[Run]:
    while True:
        # Another thread may start a run, or end one, in the middle. No lock: a fork might copy it locked.
        with contextlib.suppress(RuntimeError):
            return list(LIVE)


def stop_all() -> None:
    """Stop them: interpreter exit would wait for their threads."""
    # Asked all together first, so that many pipelines take no longer than one.
    for run in _runs():
        if run.is_live:
            run.request_stop()
    deadline = perf_counter() + EXIT_SECONDS
    for run in _runs():
        if run.has_reported:
            continue
        run.stop(max(0.0, deadline - perf_counter()))


def disown_all() -> None:
    """In a forked child, have them hand out nothing."""
    for run in _runs():
        if run.is_live:
            with contextlib.suppress(RuntimeError):
                run.disown()
