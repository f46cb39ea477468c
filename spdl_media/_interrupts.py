"""Ctrl-C where Python would only print it: in finalizers, handlers of forks, and callbacks of C code."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # no stub
import _thread
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from time import sleep
from types import FrameType

__all__ = ("interrupts_delayed", "when_dropped")


# Seconds between two looks whether the finalizer that caught a Ctrl-C has returned.
_INTERRUPT_DELAY = 0.002


@contextmanager
def interrupts_delayed() -> Iterator[None]:
    """Delay a Ctrl-C to the end of a ``with`` block, inside which Python would lose it."""
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
        # Again if a Ctrl-C arrives before the delay begins.
        while ends:
            try:
                with interrupts_delayed():
                    ends.pop()()
            except KeyboardInterrupt:
                # Not a Timer, whose start() waits.
                _thread.start_new_thread(_interrupt_after, (sys._getframe(),))


def _interrupt_after(finalizer: FrameType) -> None:
    """Raise a Ctrl-C again when the finalizer that caught it has returned."""
    main = threading.main_thread().ident or 0
    is_running = True
    while is_running:
        stack = traceback.walk_stack(sys._current_frames().get(main))
        is_running = any(frame is finalizer for frame, _ in stack)
        # Once more after it has returned, because a weak reference's callback has another frame.
        sleep(_INTERRUPT_DELAY)
    _thread.interrupt_main()
