"""The default executor of the pipeline's event loop: what ``asyncio.to_thread`` runs in."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

__all__ = ("LoopExecutor",)

P = ParamSpec("P")
T = TypeVar("T")

Task = tuple["Future[Any]", Callable[[], Any]]


class LoopExecutor(ThreadPoolExecutor):
    """A pool of daemon threads, started as they are needed.

    asyncio accepts no default executor but a ``ThreadPoolExecutor``, and the threads of that one are
    waited for at interpreter exit. This is one by name only: neither threads nor queue are the base's.
    """

    def __init__(self) -> None:
        super().__init__(max_workers=1)
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._most = min(32, (os.cpu_count() or 1) + 4)  # as asyncio's own
        self._daemons: list[threading.Thread] = []
        self._idle = 0
        self._guard = threading.Lock()
        self._is_shut = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call a function in a thread."""
        future: Future[T] = Future()
        with self._guard:
            if self._is_shut:
                raise RuntimeError("the pipeline is stopping, it starts no more calls in threads")
            self._tasks.put((future, lambda: fn(*args, **kwargs)))
            if self._idle:
                self._idle -= 1
            elif len(self._daemons) < self._most:
                self._add_thread()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002
        """Have threads end after the call in which they are. Does not wait."""
        with self._guard:
            self._is_shut = True
            for _ in self._daemons:
                self._tasks.put(None)

    def threads(self) -> list[threading.Thread]:
        """Those that were started."""
        return list(self._daemons)

    def _add_thread(self) -> None:
        name = f"spdl_media to_thread-{len(self._daemons) + 1}"
        thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._daemons.append(thread)
        thread.start()

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, call = task
            if self._is_shut:
                future.cancel()
            if future.set_running_or_notify_cancel():
                _carry_out(future, call)
            # The thread may wait for its next task for long, and would keep this one alive.
            del task, future, call
            with self._guard:
                self._idle += 1


def _carry_out(future: Future[Any], call: Callable[[], Any]) -> None:
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001  # the future carries it to whoever awaits
        future.set_exception(error)
    else:
        future.set_result(result)
