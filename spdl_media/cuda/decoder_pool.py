"""Keeps idle NVDEC decoders, and ends the decoding when the process ends.

Opening a decoder takes longer than decoding a short clip (0.3 s), so it is kept for other clips of the same
codec and size.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Hashable

from spdl_media.cuda.nvdec import DeviceDecoder


class DecoderPool:
    """Idle decoders, kept for further clips. If there are too many, the longest idle one is closed.

    Args:
        most: Maximum number of idle decoders.
        room: Maximum bytes of surfaces of all idle decoders.

    Thread safety: safe.
    """

    def __init__(self, most: int = 16, room: int = 1 << 30) -> None:
        self._most, self._room = most, room
        self.after_fork()

    def after_fork(self) -> None:
        """Start with an empty pool. In a forked process, the driver keeps the parent's decoders."""
        self._idle: list[tuple[Hashable, DeviceDecoder]] = []
        self._lock = threading.Lock()

    def take(self, key: Hashable) -> DeviceDecoder | None:
        """Remove and return an idle decoder with this key, or ``None``."""
        with self._lock:
            found = next((one for one in self._idle if one[0] == key), None)
            if found is not None:
                self._idle.remove(found)
        return found and found[1]

    def give(self, key: Hashable, decoder: DeviceDecoder) -> None:
        """Add a flushed decoder."""
        gone = []  # freed after the lock is released, because freeing takes a while
        with self._lock:
            self._idle.append((key, decoder))
            # Remove the longest idle decoder first.
            while len(self._idle) > self._most or sum(d.nbytes for _, d in self._idle) > self._room:
                gone.append(self._idle.pop(0))

    def clear(self) -> bool:
        """Free all idle decoders; return whether there were any."""
        with self._lock:
            idle, self._idle = self._idle, []
        return bool(idle)


class Gate:
    """Counts the threads that decode, and ends others than the main thread there when the process ends.

    Python ends a daemon thread wherever it next asks for the GIL, and a C++ library that stands on its stack
    aborts the process then.

    Thread safety: safe.
    """

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._change = threading.Condition()
        self._count, self._is_closed = 0, False

    def __enter__(self) -> None:
        with self._change:
            if self._is_closed and threading.current_thread() is not threading.main_thread():
                raise SystemExit  # ends the thread without a message; an exit handler may wait for it
            self._count += 1

    def __exit__(self, *_: object) -> None:
        with self._change:
            self._count -= 1
            self._change.notify_all()

    def close(self) -> None:
        """Wait for the threads that decode, at most 10 seconds, and let no other in."""
        with self._change:
            self._is_closed = True
            self._change.wait_for(lambda: not self._count, timeout=10)


DECODERS, GATE = DecoderPool(), Gate()
# Free decoders at exit while the driver still exists. The last function that is registered runs first.
atexit.register(DECODERS.clear)
atexit.register(GATE.close)

if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(after_in_child=DECODERS.after_fork)
    # The child process does not have the threads that decode.
    os.register_at_fork(after_in_child=GATE._start)
