"""Host memory that is kept until a device has read it.

A copy in the background reads its source after the call that started it has returned. So the source is kept,
and with it the lease of its pool, until the event behind the copy is done: a thread waits for that, one for
each stream that copies, which ends when nothing is left. Polling at the next copy would leave the last block
of a pool taken for ever, and a pool that waits for a block would wait for ever too.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import TypeAlias

from spdl_media._devices.forks import HISTORY

Waiting: TypeAlias = "deque[tuple[Callable[[], object], object]]"


class Keeper:
    """Keeps objects until what is to be waited for is over.

    Thread safety: safe.
    """

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[Hashable, Waiting] = {}

    def keep(self, stream: Hashable, wait: Callable[[], object], kept: object) -> None:
        """Keep an object until ``wait`` returns. Waits of one stream end in their order."""
        with self._lock:
            is_new = stream not in self._waiting
            self._waiting.setdefault(stream, deque()).append((wait, kept))
        if is_new:
            name = f"spdl_media transfer on {stream}"
            threading.Thread(target=self._run, args=(stream,), name=name, daemon=True).start()

    @property
    def num_kept(self) -> int:
        """Objects that are kept at this moment, but for those that are being waited for."""
        with self._lock:
            return sum(map(len, self._waiting.values()))

    def _run(self, stream: Hashable) -> None:
        while self._wait_for_first(stream):
            pass

    def _wait_for_first(self, stream: Hashable) -> bool:
        with self._lock:
            queue = self._waiting[stream]
            if not queue:
                del self._waiting[stream]
                return False
            wait, kept = queue.popleft()
        # A device that has failed reads nothing any more, and whoever uses it next is told. The thread goes
        # on: nobody else would let go of what follows.
        with suppress(Exception):
            wait()
        del kept  # before the next wait, not after it
        return True

    def after_fork(self) -> None:
        """Called in the child, which has none of the threads, and a device neither."""
        # What waits holds an event. The rest is let go: leases of pools go back.
        HISTORY.parents += [wait for queue in self._waiting.values() for wait, _ in queue]
        self._start()


KEEPER = Keeper()

if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(after_in_child=KEEPER.after_fork)
