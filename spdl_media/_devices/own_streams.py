"""Streams that belong to a thread for as long as it lives."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any


class OwnStreams:
    """Lends each thread a stream of each device.

    No stream is ever destroyed: buffers know streams by their address, and may outlive the thread that made
    them. When a thread ends, its streams go to the next one that needs some, so that there are as many as
    threads work at once.

    Thread safety: safe.
    """

    def __init__(self) -> None:
        self._local = threading.local()
        self._idle: dict[int, deque[Any]] = {}

    def of_thread(self, index: int, make: Callable[[], Any]) -> Any:
        """The calling thread's stream.

        Args:
            index: Number of the device.
            make: Makes a stream of it.
        """
        lent: dict[int, _Lent] = self._local.__dict__.setdefault("lent", {})
        if index not in lent:
            idle = self._idle.setdefault(index, deque())
            lent[index] = _Lent(_taken_or_made(idle, make), idle)
        return lent[index].stream


def _taken_or_made(idle: deque[Any], make: Callable[[], Any]) -> Any:
    try:
        return idle.pop()
    except IndexError:  # no look beforehand would hold among threads
        return make()


class _Lent:
    """A stream that goes back when the thread, which alone holds this, has ended."""

    __slots__ = ("_idle", "stream")

    def __init__(self, stream: Any, idle: deque[Any]) -> None:
        self.stream = stream
        self._idle = idle

    def __del__(self) -> None:
        self._idle.append(self.stream)
