"""Worker processes: their start, their errors, and their end, which either side may cause."""

from __future__ import annotations

import atexit
import contextlib
import errno
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
import numpy.random  # here, because a Ctrl-C in an import of compiled modules may get lost

from spdl_media._threads import interrupts_delayed
from spdl_media.pipeline.executors import WHAT_PICKLES, WHERE_TO_WRITE_IT
from spdl_media.pipeline.failures import PipelineError, PoolBroken, WorkerDied, describe
from spdl_media.ring import Ring, begin_to_send, dumps, unpack
from spdl_media.shared_memory import CAN_SHARE

_GRACE_SECONDS: Final = 1.0
"""Seconds that a process has to end by itself before it is killed."""

_parent_ends: set[weakref.ref[Connection]] = set()
"""Our ends of all pipes. A forked process closes its copies, or no process would see a pipe closed."""


Seeds: TypeAlias = tuple[dict[str, int], int]
"""Seeds of the global random generators, by module, and the number of the process."""


def draw_seeds() -> Iterator[Seeds]:
    """Return an iterator over the seeds of processes, drawn from the random generators of this process."""
    words = {"random": random.getrandbits(63), "numpy": int(np.random.randint(1 << 62))}  # noqa: NPY002  # the global generator
    if (torch := sys.modules.get("torch")) is not None:
        words["torch"] = int(torch.randint(1 << 62, ()))
    return zip(itertools.repeat(words), itertools.count(), strict=False)


def _seed(words: dict[str, int], number: int) -> None:
    """Seed the global random generators of this process."""
    seeds = {
        name: int(np.random.SeedSequence((word, number)).generate_state(1, np.uint64)[0])
        for name, word in words.items()
    }
    random.seed(seeds["random"])
    np.random.seed(seeds["numpy"] & 0xFFFFFFFF)  # noqa: NPY002
    if "torch" in seeds and (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seeds["torch"])


class Child:
    """A worker process, and our ends of the pipes to it.

    Args:
        context: The start method.
        target: Function that the process calls: ``target(*pipes, *arguments)``, with its ends of the pipes.
        arguments: Further arguments of ``target``.
        owner: Name of the object that the process serves, for messages.
        num_pipes: Number of pipes.
        is_daemon: Whether the process is a daemon, which may not start ``multiprocessing`` processes itself.
        seeds: Seeds of its random generators.
        **ring_options: Options of the :class:`Ring` in which it sends. The ring is closed with the process.

    Attributes:
        is_ready: Whether it has sent its first message, by which it tells that it has started.

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
        self._is_asked_to_end = False
        self.is_ready = False
        # Without a lock, only one of several threads would get the exit code of the process.
        self._lock = threading.Lock()
        theirs: list[Connection] = []
        try:
            # On other systems, arrays are pickled.
            if CAN_SHARE:
                self.ring = _make_ring(**ring_options)
            theirs.extend(self._add_pipe(context) for _ in range(num_pipes))
            # mypy knows Process of each start method's context, but not of their base class.
            process: BaseProcess = context.Process(  # type: ignore[attr-defined]
                target=_run,
                args=(target, theirs, arguments, self.ring and self.ring.blocks, seeds),
                name=f"spdl_media {owner}",
                daemon=is_daemon,
            )
            _start(process, context)
            if self.ring is not None:
                self.ring.blocks.close_file()
        except BaseException as error:
            self._free()
            # A PipelineError already names the part of a definition that cannot be pickled.
            if isinstance(error, PipelineError) or not isinstance(error, Exception):
                raise
            # Python's own attribute: whether this process is still importing the script that started it.
            if getattr(multiprocessing.current_process(), "_inheriting", False):
                raise PipelineError(WHERE_TO_WRITE_IT) from None
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

    def _add_pipe(self, context: BaseContext) -> Connection:
        """Make a pipe, keep our end, and return that of the process."""
        ours, theirs = context.Pipe()
        self.pipes.append(ours)
        self._open.append(ours)
        # Not a WeakSet, whose Python code would lose a Ctrl-C when the connection is dropped.
        _parent_ends.add(weakref.ref(ours, _parent_ends.discard))
        return theirs

    def call(self, number: int, item: Any, timeout: float | None) -> Any:
        """Send an item through pipe ``number``, and wait for its result.

        Raises:
            WorkerDied: The process ended while it had the item.
            TimeoutError: There was no result within ``timeout`` seconds. The process was killed.
            BaseException: The exception that the call raised, or the item cannot be pickled.
        """
        # A local reference, because self.ring becomes None when the process ends.
        pipe, ring = self.pipes[number], self.ring
        # "with" frees the item's bytes: the traceback of a failure would keep them with this frame.
        with dumps(item) as data:
            try:
                pipe.send_bytes(data)
            except OSError as error:
                raise self.death() from error.with_traceback(None)
        try:
            answer = self.receive(pipe, timeout)
        except BaseException:
            # A late answer must not be taken for that of the next item.
            self.end(0)
            raise
        succeeded, value, text = unpack(answer, ring)
        if not succeeded:
            raise value from RemoteTraceback(text)
        return value

    def receive(self, pipe: Connection, timeout: float | None = None) -> bytes:
        """Wait for a message.

        Raises:
            WorkerDied: The process ended.
            TimeoutError: There was no message within ``timeout`` seconds. The process was killed.
            PipelineError: This process did not start the child, but was forked from the process that did.
        """
        self._check_process()
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        # The pipe alone would not do: a process forked elsewhere may hold its other end open.
        ends = (pipe, self._sentinel)
        # The pipe is closed when the child has ended, perhaps in the middle of a message.
        with contextlib.suppress(EOFError, OSError):
            # Check each second: a process that the child has forked may hold both ends open.
            while not wait(ends, min(1.0, deadline - time.monotonic())) and self.is_alive():
                if time.monotonic() >= deadline:
                    break
            if pipe.poll():
                data = pipe.recv_bytes()
                self.is_ready = True
                return data
        if time.monotonic() >= deadline and self.is_alive():
            self.end(0)
            raise TimeoutError(f"the call took longer than timeout={timeout} s")
        raise self.death()

    @property
    def is_ours(self) -> bool:
        """Whether this process has started the child, and was not forked from the process that has."""
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
            PipelineError: This process did not start the child, but was forked from the process that did.
        """
        self._check_process()
        with self._lock:
            return self._code is None and self._process.is_alive()

    def death(self) -> WorkerDied | PoolBroken:
        """End the process, and return an error that tells how it ended."""
        self.end()
        code = self._code
        how = f"exit code {code}"
        if code is not None and code < 0:
            how = f"signal {-code}, {signal.strsignal(-code)}"
        kind = PoolBroken if self._is_asked_to_end else WorkerDied
        text = (
            f"{self._what} ended ({how}). Processes end this way when memory runs out, native code crashes "
            "or os._exit() is called."
        )
        if not self.is_ready:
            text += f" This one ended before its first item. {WHERE_TO_WRITE_IT}"
        return kind(text)

    def ask_to_end(self, *, in_call: bool = False) -> None:
        """Ask an idle process to end by closing its pipes, one in a call by a signal. Does not wait."""
        self._is_asked_to_end = True
        if not in_call:
            self._close_pipes()
        elif self.is_ours:
            with self._lock:
                if self._code is None:
                    self._process.terminate()

    def end(self, grace: float = _GRACE_SECONDS) -> None:
        """End the process, killing it after ``grace`` seconds if necessary, and free its resources."""
        self._close_pipes()
        # In a forked process, the child belongs to the parent.
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
        # Dropping the last reference frees the descriptors. It is not closed explicitly, because code that
        # got it from multiprocessing.active_children() may be waiting for it.
        del self._process

    def _close_pipes(self) -> None:
        # pop() gives each pipe to one thread: closing a descriptor twice may close another file. There is no
        # lock, because a process that is forked while a thread holds it would wait forever.
        with contextlib.suppress(IndexError):
            while True:
                self._open.pop().close()

    def _free(self) -> None:
        self._close_pipes()
        # Threads that are about to unpack a message have their own reference.
        ring, self.ring = self.ring, None
        if ring is not None:
            ring.blocks.close_file()


def _make_ring(**options: Any) -> Ring | None:
    """Make a ring; ``None``: a limited address space (``ulimit -v``) has no room for its blocks."""
    try:
        return Ring(**options)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
    return None


_children: set[Child] = set()
"""All children that have not been found to have ended."""


def _end_all(children: Iterable[Child]) -> None:
    """End processes that were asked to end. All of them together have ``_GRACE_SECONDS``."""
    deadline = time.monotonic() + _GRACE_SECONDS
    for child in children:
        child.end(max(0.0, deadline - time.monotonic()))


def end_soon(children: list[Child]) -> None:
    """End processes that were asked to end, without waiting."""
    try:
        threading.Thread(
            target=_end_all, args=(children,), name="spdl_media ends processes", daemon=True
        ).start()
    except RuntimeError:  # no thread can be started
        _end_all(children)


@atexit.register
def _end_at_exit() -> None:
    """End all processes. At exit, multiprocessing would wait for them forever."""
    children = list(_children)
    for child in children:
        child.ask_to_end()
    _end_all(children)


def _start(process: BaseProcess, context: BaseContext) -> None:
    """Start a process. Ctrl-C does not disturb the start."""
    # Python loses a Ctrl-C in its handlers of forks, and keeps their locks.
    is_fork = context.get_start_method() == "fork"
    delay = interrupts_delayed() if is_fork else contextlib.nullcontext()
    with delay, _interrupts_blocked(context):
        process.start()


@contextlib.contextmanager
def _interrupts_blocked(context: BaseContext) -> Iterator[None]:
    """Block SIGINT in processes started meanwhile, whose imports Ctrl-C would end with a traceback."""
    # Not for a fork server, which would pass the mask on to other libraries' processes.
    if context.get_start_method() == "forkserver" or not hasattr(signal, "pthread_sigmask"):
        yield
        return
    # Otherwise the first process starts the tracker, which resets the mask.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class RemoteTraceback(Exception):  # noqa: N818  # not an error, but the origin of one
    """The traceback of an exception in another process, as text. It is the exception's cause here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _run(
    target: Callable[..., None],
    pipes: list[Connection],
    arguments: tuple[Any, ...],
    end_of_ring: Any,
    seeds: Seeds,
) -> None:
    """Prepare a worker process, and call its target."""
    # Ctrl-C reaches all processes of a terminal; ours end with the pipeline.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for ref in list(_parent_ends):
        if (end := ref()) is not None:
            end.close()
    threading.Thread(target=_end_with_parent, name="watches the parent", daemon=True).start()
    begin_to_send(end_of_ring)
    _give_torch_one_thread()
    _seed(*seeds)
    with contextlib.suppress(EOFError, OSError):  # the other process has ended, or closed the pipe
        target(*pipes, *arguments)


def _end_with_parent() -> None:
    """End this process when its parent has ended, even in the middle of a call."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _give_torch_one_thread() -> None:
    """Limit NumPy and torch to one thread, unless ``OMP_NUM_THREADS`` is set: each would use all cores."""
    if "OMP_NUM_THREADS" in os.environ:
        return
    # For libraries that are imported from now on.
    os.environ["OMP_NUM_THREADS"] = "1"
    # Unpickling the function may have imported torch already.
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


def failure(error: BaseException) -> tuple[BaseException, str]:
    """Return an exception in a form that can be sent to another process, and its traceback as text."""
    text = "".join(traceback.format_exception(error))
    try:
        # Many exceptions can be pickled, but not unpickled.
        pickle.loads(dumps(error))  # noqa: S301
    except Exception:  # noqa: BLE001  # __reduce__ of a foreign exception may raise anything
        error = PipelineError(
            f"{describe(error)} (raised in a worker process; this stands in for the exception itself, "
            "which cannot be pickled)"
        )
    return error, text
