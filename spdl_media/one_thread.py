"""A guard for objects that serve one thread at a time."""

from __future__ import annotations

import threading
from types import TracebackType


class OneThread:
    """A context that a second thread cannot enter while the first is inside.

    FFmpeg's contexts crash the process when two threads use one at once; this turns the mistake
    into an exception. Entering costs a lock that nobody waits for.
    """

    __slots__ = ("_lock", "_what")

    def __init__(self, what: str) -> None:
        self._lock = threading.Lock()
        self._what = what

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                f"this {self._what} is in use by another thread; it serves one at a time. "
                "Give each thread its own"
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._lock.release()
