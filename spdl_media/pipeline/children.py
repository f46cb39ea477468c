"""Processes that serve this one: how they start, how they fail, and how both sides see an end."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import math
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any, Final, TypeAlias

import numpy as np

from spdl_media.pipeline.executors import WHAT_PICKLES
from spdl_media.pipeline.failures import PipelineError, WorkerDied, describe
from spdl_media.ring import Ring, begin_to_send, dumps, unpack
from spdl_media.shared_memory import CAN_SHARE

__all__ = ("Child", "RemoteTraceback", "draw_seeds", "end_soon", "failure")

_GRACE_SECONDS: Final = 1.0
"""How long a process may take to end by itself."""

_parent_ends: weakref.WeakSet[Connection] = weakref.WeakSet()
"""Our ends of all pipes. A forked process inherits them, and none would ever see a pipe closed."""


Seeds: TypeAlias = tuple[dict[str, int], int]
"""What the global generators of random numbers are seeded with, by module, and the number of the process."""


def draw_seeds() -> Iterator[Seeds]:
    """Seeds of one process after the other, drawn from the generators of this process."""
    words = {"random": random.getrandbits(63), "numpy": int(np.random.randint(1 << 62))}  # noqa: NPY002  # the global generator
    if (torch := sys.modules.get("torch")) is not None:
        words["torch"] = int(torch.randint(1 << 62, ()))
    return zip(itertools.repeat(words), itertools.count(), strict=False)


def _seed(words: dict[str, int], number: int) -> None:
    """Seed the generators of this process."""
    seeds = {
        name: int(np.random.SeedSequence((word, number)).generate_state(1, np.uint64)[0])
        for name, word in words.items()
    }
    random.seed(seeds["random"])
    np.random.seed(seeds["numpy"] & 0xFFFFFFFF)  # noqa: NPY002
    if "torch" in seeds and (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seeds["torch"])


class Child:
    """A process of ours, and our ends of the pipes to it.

    Args:
        context: How it starts.
        target: What it runs: ``target(*pipes, *arguments)``, where it has the other ends.
        arguments: Further arguments.
        owner: What it serves, as messages name it.
        num_pipes: How many there are.
        is_daemon: Whether it may not start processes by ``multiprocessing`` itself.
        seeds: For its random numbers.
        **ring_options: Of the :class:`Ring` in which it sends, which is closed with the process.

    Raises:
        PipelineError: There are no descriptors or no memory left, or an argument cannot be pickled.
    """

    def __init__(
        self,
        context: BaseContext,
        target: Callable[..., None],
        arguments: tuple[Any, ...],
        *,
        owner: str,
        seeds: Seeds,
        num_pipes: int = 1,
        is_daemon: bool = True,
        **ring_options: Any,
    ) -> None:
        self.ring: Ring | None = None
        self.pipes: list[Connection] = []
        self._open: list[Connection] = []
        self._what = f"A worker process of {owner}"
        self._pid = os.getpid()
        self._code: int | None = None
        # Of threads that ask at once how a process ended, one would be told.
        self._lock = threading.Lock()
        theirs: list[Connection] = []
        try:
            # Elsewhere arrays are pickled.
            if CAN_SHARE:
                self.ring = Ring(context, **ring_options)
            for _ in range(num_pipes):
                ours, other = context.Pipe()
                self.pipes.append(ours)
                self._open.append(ours)
                theirs.append(other)
                _parent_ends.add(ours)
            # mypy knows Process of each start method, not of their base.
            process: BaseProcess = context.Process(  # type: ignore[attr-defined]
                target=_run,
                args=(target, theirs, arguments, self.ring and self.ring.other_end, seeds),
                name=f"spdl_media {owner}",
                daemon=is_daemon,
            )
            with _interrupts_blocked(context):
                process.start()
            if self.ring is not None:
                self.ring.hand_over()
        except BaseException as error:
            self._free()
            # One of ours says already which part of a definition cannot be pickled.
            if isinstance(error, PipelineError) or not isinstance(error, Exception):
                raise
            raise PipelineError(
                f"no process can be started for {owner}: {error}. It needs memory, descriptors and what can "
                f"be pickled. {WHAT_PICKLES}"
            ) from error
        finally:
            for pipe in theirs:
                pipe.close()
        self._process = process
        self._sentinel = process.sentinel
        _children.add(self)

    def call(self, number: int, item: Any, timeout: float | None) -> Any:
        """Send an item by a pipe, and wait for the result or exception that it leads to.

        Raises:
            WorkerDied: The process ended with the item.
            TimeoutError: Nothing came for so many seconds. The process was killed.
            BaseException: What comes back, or the item cannot be pickled.
        """
        # Held here: it is let go of when the process ends.
        pipe, ring = self.pipes[number], self.ring
        # Released here: the traceback of a failure holds this frame, and so would hold the item's bytes.
        with dumps(item) as data:
            try:
                pipe.send_bytes(data)
            except OSError as error:
                raise self.death() from error.with_traceback(None)
        try:
            answer = self.receive(pipe, timeout)
        except BaseException:
            # What comes later is no answer to the next item.
            self.end(0)
            raise
        succeeded, value, text = unpack(answer, ring)
        if not succeeded:
            value.__cause__ = RemoteTraceback(text)
            raise value
        return value

    def receive(self, pipe: Connection, timeout: float | None = None) -> bytes:
        """Wait for a message.

        Raises:
            WorkerDied: The process ended instead.
            TimeoutError: Nothing came for so many seconds. The process was killed.
            PipelineError: It is another's: this process was forked from the one that started it.
        """
        self._check_process()
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        # The pipe alone would do, if no process forked elsewhere could hold its other end open.
        ends = (pipe, self._sentinel)
        # Closed when it has ended, or cut short.
        with contextlib.suppress(EOFError, OSError):
            # Asked each second: a process that the child itself has forked holds both ends open.
            while not wait(ends, min(1.0, deadline - time.monotonic())) and self.is_alive():
                if time.monotonic() >= deadline:
                    break
            if pipe.poll():
                return pipe.recv_bytes()
        if time.monotonic() >= deadline and self.is_alive():
            self.end(0)
            raise TimeoutError(f"the call took longer than timeout={timeout} s")
        raise self.death()

    @property
    def is_ours(self) -> bool:
        """Whether this process has started it, and was not merely forked from the one that has."""
        return os.getpid() == self._pid

    def _check_process(self) -> None:
        if not self.is_ours:
            raise PipelineError(
                f"{self._what} serves the process that started it, and this one was forked from that. Make "
                "another pipeline or loader here"
            )

    def is_alive(self) -> bool:
        """Whether the process has not ended.

        Raises:
            PipelineError: As in :meth:`receive`.
        """
        self._check_process()
        with self._lock:
            return self._code is None and self._process.is_alive()

    def death(self) -> WorkerDied:
        """How the process ended, as an error."""
        self.end()
        code = self._code
        how = f"exit code {code}" if code is None or code >= 0 else _signal_name(-code)
        return WorkerDied(
            f"{self._what} ended ({how}). Processes end this way when memory runs out, native code crashes "
            "or os._exit() is called."
        )

    def ask_to_end(self, *, in_call: bool = False) -> None:
        """Have an idle process end by itself, or one that is in a call end by a signal. Does not wait."""
        if not in_call:
            self._close_pipes()
        elif self.is_ours:
            with self._lock:
                if self._code is None:
                    self._process.terminate()

    def end(self, grace: float = _GRACE_SECONDS) -> None:
        """See that the process ends: one that has not after so many seconds is killed. Frees what it took."""
        self._close_pipes()
        # In a process that was forked meanwhile it is another's.
        if not self.is_ours:
            return
        with self._lock:
            if self._code is not None:
                return
            self._process.join(grace)
            if self._process.is_alive():
                self._process.kill()
                self._process.join()
            self._code = self._process.exitcode
        _children.discard(self)
        self._free()
        # The last reference frees its descriptors. It is not closed, because code that has it from
        # multiprocessing.active_children() may be waiting for it.
        del self._process

    def _close_pipes(self) -> None:
        # Each by one thread: two would close a descriptor twice, and the second time it may be another's. Not
        # under a lock: a process that is forked while a thread holds one would wait for it forever.
        with contextlib.suppress(IndexError):
            while True:
                self._open.pop().close()

    def _free(self) -> None:
        self._close_pipes()
        # Threads that are about to unpack what came hold it by themselves.
        ring, self.ring = self.ring, None
        if ring is not None:
            ring.close()


_children: set[Child] = set()
"""Those that have not been seen to end."""


def _end_all(children: Iterable[Child]) -> None:
    """End processes that were asked to. All together have the time that one has."""
    deadline = time.monotonic() + _GRACE_SECONDS
    for child in children:
        child.end(max(0.0, deadline - time.monotonic()))


def end_soon(children: list[Child]) -> None:
    """Do so without waiting."""
    try:
        threading.Thread(
            target=_end_all, args=(children,), name="spdl_media ends processes", daemon=True
        ).start()
    except RuntimeError:  # no thread is to be had
        _end_all(children)


@atexit.register
def _end_at_exit() -> None:
    """End all processes. At exit, multiprocessing would wait for them forever."""
    children = list(_children)
    for child in children:
        child.ask_to_end()
    _end_all(children)


@contextlib.contextmanager
def _interrupts_blocked(context: BaseContext) -> Iterator[None]:
    """Have a process that starts meanwhile never see Ctrl-C, which else ends its imports with a traceback."""
    # Not a fork server: it would pass the mask on to processes that are not ours.
    if context.get_start_method() == "forkserver" or not hasattr(signal, "pthread_sigmask"):
        yield
        return
    # Started by the first process otherwise, and it resets the mask.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class RemoteTraceback(Exception):  # noqa: N818  # no error, but where one came from
    """The traceback of an exception in another process, as text: its cause here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _run(
    target: Callable[..., None],
    pipes: list[Connection],
    arguments: tuple[Any, ...],
    end_of_ring: Any,
    seeds: Seeds,
) -> None:
    """Prepare a process, and run what it is for."""
    # Ctrl-C reaches all processes of a terminal; ours end when the pipeline does.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for end in list(_parent_ends):
        end.close()
    threading.Thread(target=_end_with_parent, name="watches the parent", daemon=True).start()
    begin_to_send(end_of_ring)
    _give_torch_one_thread()
    _seed(*seeds)
    with contextlib.suppress(EOFError, OSError):  # the other process is gone, or wants no more
        target(*pipes, *arguments)


def _end_with_parent() -> None:
    """End this process when the one that started it was killed, even in the middle of a call."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _give_torch_one_thread() -> None:
    """Keep each process from computing in as many threads as there are cores, unless it is told to."""
    if "OMP_NUM_THREADS" in os.environ:
        return
    # Of what is imported from now on, also by the user's function.
    os.environ["OMP_NUM_THREADS"] = "1"
    # The function may have come with it.
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


def failure(error: BaseException) -> tuple[BaseException, str]:
    """An exception of this process as another one can have it, and its traceback as text."""
    text = "".join(traceback.format_exception(error))
    try:
        # Many exceptions can be pickled, but not made again.
        pickle.loads(dumps(error))  # noqa: S301
    except Exception:  # noqa: BLE001  # __reduce__ of a foreign exception may raise anything
        error = PipelineError(
            f"{describe(error)} (raised in a worker process; this stands in for the exception itself, "
            "which cannot be pickled)"
        )
    return error, text


def _signal_name(number: int) -> str:
    try:
        return f"killed by {signal.Signals(number).name}"
    except ValueError:
        return f"killed by signal {number}"
