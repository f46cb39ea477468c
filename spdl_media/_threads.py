"""Calls in threads, locks in forks, objects that serve one thread or block, and Ctrl-C that Python may lose.

Python only prints what is raised in finalizers, handlers of forks, and callbacks of C code.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # no stub
import _thread
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from time import sleep
from typing import Any, NoReturn, Self


def in_threads(call: Callable[[int], object], count: int, num_threads: int) -> None:
    """Call a function with each number below ``count``, in this thread and in ``num_threads - 1`` others.

    After an error no more calls begin. The other threads have ended when this returns or raises, except after
    a Ctrl-C: they are daemons, because Ctrl-C and the end of the program must not wait for a server that does
    not answer.

    Raises:
        BaseException: An interrupt of this thread, or of the calls' errors that of the lowest number.
    """
    left = deque(range(count))
    errors: dict[int, BaseException] = {}

    def work() -> None:
        with suppress(IndexError):  # no number is left
            while True:
                number = left.popleft()
                try:
                    call(number)
                except BaseException as error:  # noqa: BLE001  # raised below, in the calling thread
                    errors[number] = error
                    # Each thread ends after its current call.
                    left.clear()

    # Started anew, which costs 0.1 ms, because a lasting pool would not survive forks.
    threads: list[threading.Thread] = []
    try:
        with suppress(RuntimeError):  # the system has no more threads; those that run do the work
            while len(threads) < min(num_threads, count) - 1:
                thread = threading.Thread(target=work, daemon=True)
                thread.start()
                threads.append(thread)
        work()
        while threads and all(isinstance(error, Exception) for error in errors.copy().values()):
            threads.pop().join()
    finally:
        left.clear()
    if errors:
        # Prefer an interrupt of this thread to the failure of a call, which would hide it.
        worst = min(errors, key=lambda number: (isinstance(errors[number], Exception), number))
        error = errors[worst]
        errors.clear()
        try:
            raise error
        finally:
            # Break the cycle of error, traceback and this frame, which would keep the inputs alive.
            del error


def has_gil() -> bool:
    """Return whether one thread at a time runs Python code. Free-threaded CPython tells since 3.13."""
    return bool(getattr(sys, "_is_gil_enabled", lambda: True)())


class OneThread:
    """A context that a second thread cannot enter while the first is inside.

    FFmpeg's contexts crash the process when two threads use one at once; this raises a
    ``RuntimeError`` instead. Entering costs one uncontended lock.
    """

    __slots__ = ("_lock", "_what")

    def __init__(self, what: str) -> None:
        self._lock = threading.Lock()
        self._what = what

    def __enter__(self) -> None:
        # Non-blocking: a second thread is a mistake, which waiting would hide.
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                f"this {self._what} is in use by another thread; it serves one at a time. "
                "Give each thread its own"
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> NoReturn:
        # Called when its owner is pickled.
        raise TypeError(
            f"{self._what} objects are not picklable: they hold FFmpeg's state. Make one where it is used"
        )


# Not a WeakSet: its callback, in Python, would lose a Ctrl-C.
_locks: set[weakref.ref[Any]] = set()


def fork_safe_lock() -> Any:
    """Return a reentrant lock that is free in a fork, which lacks the thread that may hold it."""
    lock = threading.RLock()
    _locks.add(weakref.ref(lock, _locks.discard))
    return lock


# Also not a WeakSet.
_owners: set[weakref.ref[Any]] = set()
_of_parents: list[Any] = []


def never_freed_in_forks(owner: object) -> None:
    """Keep an object alive in forks: to free it, FFmpeg would wait for its threads, which a fork lacks."""
    _owners.add(weakref.ref(owner, _owners.discard))


def _after_fork() -> None:
    _of_parents.extend([reference() for reference in list(_owners)])
    for reference in list(_locks):
        if (lock := reference()) is not None:
            lock._at_fork_reinit()


class ClosedByWith:
    """Something that a ``with`` block closes."""

    close: Callable[[], None]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# Seconds between two looks whether the finalizer that caught a Ctrl-C has returned.
_INTERRUPT_DELAY = 0.002


@contextmanager
def interrupts_delayed() -> Iterator[None]:
    """Delay a Ctrl-C to the end of a ``with`` block, whose steps must not be interrupted."""
    is_main = threading.get_ident() == threading.main_thread().ident
    # None: a handler that Python did not set, and cannot set again.
    before = _signal.getsignal(_signal.SIGINT) if is_main else None
    if before is None:
        yield
        return
    came: list[int] = []
    # Not signal.signal(), which takes 5 us to look for enums.
    _signal.signal(_signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        _signal.signal(_signal.SIGINT, before)
        for number in came[:1]:
            _signal.raise_signal(number)


def when_dropped(end: Callable[..., object], *args: object) -> Generator[None]:
    """Return an object that calls ``end(*args)`` when nothing refers to it, except at interpreter exit.

    A Ctrl-C meanwhile is delayed until then. A ``__del__`` would lose it: Python looks for signals before the
    first statement, and only prints what they raise. It does not look when it closes a generator.
    """
    finalizer = _finalizer([lambda: sys.is_finalizing() or end(*args)])
    next(finalizer)
    return finalizer


def _finalizer(ends: list[Callable[[], object]]) -> Generator[None]:
    try:
        yield
    except GeneratorExit:
        running = {None}  # exists while this runs; not made by a call, which would look for signals
        try:
            # Again if a Ctrl-C arrives before the delay begins.
            while ends:
                try:
                    with interrupts_delayed():
                        ends.pop()()
                except KeyboardInterrupt:
                    # Not a Timer, whose start() waits.
                    _thread.start_new_thread(_interrupt_after, (weakref.ref(running),))
        finally:
            # A traceback may keep the frame. Python does not look for signals from here to the return.
            del running


def _interrupt_after(running: weakref.ref[set[None]]) -> None:
    """Raise a Ctrl-C again when the finalizer that caught it has returned."""
    is_running = True
    while is_running:
        # Not by the thread's frames: reading those of a running thread crashes free-threaded CPython.
        is_running = running() is not None
        # Once more after it has returned, because a weak reference's callback has another frame.
        sleep(_INTERRUPT_DELAY)
    _thread.interrupt_main()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    # As a finalizer, so that a Ctrl-C is raised after it, not in it, where Python would only print it.
    os.register_at_fork(after_in_child=partial(when_dropped, _after_fork))
