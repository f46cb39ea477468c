"""Where a stage runs: descriptions of executors, which can be pickled, and the pools made of them.

Each run of a pipeline makes its own pool from a description, and shuts it down when it ends.
"""

from __future__ import annotations

import importlib
import multiprocessing
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import (
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    ProcessPoolExecutor,
)
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from spdl_media._checks import check_callable, check_choice, check_int
from spdl_media.pipeline.failures import PipelineError, PoolBroken

if TYPE_CHECKING:
    from spdl_media.pipeline.stages import PipeConfig

__all__ = (
    "ExecutorConfig",
    "InterpreterPoolExecutorConfig",
    "ProcessPoolExecutorConfig",
    "ThreadPoolExecutorConfig",
)


@dataclass(frozen=True, slots=True)
class ThreadPoolExecutorConfig:
    """Threads of a stage's own.

    Args:
        max_workers: How many; the default is the stage's concurrency.
        initializer: Called with ``initargs`` by each thread before its first item.
        initargs: What it is called with.
    """

    max_workers: int | None = None
    initializer: Callable[..., object] | None = None
    initargs: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        _check_pool(self)


@dataclass(frozen=True, slots=True)
class ProcessPoolExecutorConfig:
    """Processes of a stage's own.

    The stage's function is sent to each worker once, when it starts; inputs and results are
    pickled item by item.

    Args:
        max_workers: How many; the default is the stage's concurrency.
        mp_context: How they start: ``"forkserver"``, ``"spawn"`` or ``"fork"``. The default is
            ``"forkserver"`` where the system has it, else ``"spawn"``: workers may have to be
            replaced while threads run, and a fork then copies locks that nobody will open.
        initializer: Called with ``initargs`` by each process before its first item.
        initargs: What it is called with.
    """

    max_workers: int | None = None
    mp_context: str | None = None
    initializer: Callable[..., object] | None = None
    initargs: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        _check_pool(self)
        if self.mp_context is not None:
            methods = tuple(multiprocessing.get_all_start_methods())
            check_choice("mp_context of ProcessPoolExecutorConfig", self.mp_context, methods)


@dataclass(frozen=True, slots=True)
class InterpreterPoolExecutorConfig:
    """Sub-interpreters of a stage's own, each with a GIL of its own. CPython 3.14 and later.

    For functions in pure Python: NumPy, PyAV and most other extension modules cannot be imported
    in a sub-interpreter.

    Args:
        max_workers: How many; the default is the stage's concurrency.
        initializer: Called with ``initargs`` in each interpreter before its first item.
        initargs: What it is called with.

    Raises:
        RuntimeError: This Python has no sub-interpreters.
    """

    max_workers: int | None = None
    initializer: Callable[..., object] | None = None
    initargs: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        _check_pool(self)
        if sys.version_info < (3, 14):
            version = ".".join(map(str, sys.version_info[:2]))
            raise RuntimeError(
                f"InterpreterPoolExecutorConfig needs CPython 3.14 or later, this is {version}. "
                "ProcessPoolExecutorConfig does the same with processes."
            )


ExecutorConfig: TypeAlias = (
    ThreadPoolExecutorConfig | ProcessPoolExecutorConfig | InterpreterPoolExecutorConfig
)


def _check_pool(config: ExecutorConfig) -> None:
    kind = type(config).__name__
    if config.max_workers is not None:
        check_int(f"max_workers of {kind}", config.max_workers)
    if config.initializer is not None:
        check_callable(f"initializer of {kind}", config.initializer)
    if not isinstance(config.initargs, tuple):
        raise TypeError(f"initargs of {kind} must be a tuple, not {config.initargs!r}")


class StagePool(ABC):
    """Runs a stage's function on items somewhere else.

    Attributes:
        keeps_time: Whether it sees to the timeout of the stage itself: such a pool counts from the
            moment at which a call begins, and knows how to end it.

    Thread safety: all methods may be called from any thread.
    """

    keeps_time = False

    @abstractmethod
    def submit(self, item: Any) -> Future[Any]:
        """Hand over an item, without waiting. What it raises, an executor of the caller's, fails the item.

        Returns:
            A future of the result. It fails as the function failed, with
            :class:`~spdl_media.pipeline.WorkerDied` when a worker of ours ended with the item,
            and with :class:`~spdl_media.pipeline.PoolBroken` when no item can be handed over any
            more. It can be cancelled while the call has not begun.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """End what is ours, without waiting: running calls are cut short where that is possible."""


class CallersPool(StagePool):
    """An executor that belongs to the caller, who alone may shut it down."""

    _remedy = (
        "It is not the pipeline's to replace; for one that is, use a description such as "
        "ProcessPoolExecutorConfig(...)."
    )

    def __init__(self, stage: PipeConfig, executor: Executor) -> None:
        self._stage = stage
        self._executor = executor
        if isinstance(executor, ProcessPoolExecutor):
            # Its workers start with the first items it gets: better now than as forks of a process
            # with threads, or while the event loop waits.
            try:
                for _ in range(stage.concurrency):
                    executor.submit(int)
            except (BrokenExecutor, RuntimeError) as error:
                raise self._broken(error) from error

    def submit(self, item: Any) -> Future[Any]:  # see StagePool
        outer: Future[Any] = Future()
        try:
            inner = self._executor.submit(self._stage.fn, item)
        except (BrokenExecutor, RuntimeError) as error:
            outer.set_exception(self._broken(error))
        else:
            outer.add_done_callback(lambda done: inner.cancel() if done.cancelled() else None)
            inner.add_done_callback(lambda done: self._hand_on(done, outer))
        return outer

    def shutdown(self) -> None:
        """Nothing: the caller shuts it down."""

    def _hand_on(self, inner: Future[Any], outer: Future[Any]) -> None:
        if not outer.set_running_or_notify_cancel():
            return
        # Not by inner.result(), which raises: the frames in the traceback would keep the item alive.
        error = CancelledError() if inner.cancelled() else inner.exception()
        if error is None:
            outer.set_result(inner.result())
        elif isinstance(error, BrokenExecutor | CancelledError):
            outer.set_exception(self._broken(error))
        else:
            outer.set_exception(self._translated(error))

    def _translated(self, error: BaseException) -> BaseException:
        return error

    def _broken(self, error: BaseException) -> PoolBroken:
        broken = PoolBroken(
            f"The {type(self._executor).__name__} of stage {self._stage.name!r} takes no more "
            f"items: {str(error) or type(error).__name__}. {self._remedy}"
        )
        broken.__cause__ = error
        return broken


class InterpreterPool(CallersPool):
    """Sub-interpreters of our own. A call in one cannot be cut short."""

    _remedy = "Its initializer must work in each sub-interpreter."

    def __init__(self, stage: PipeConfig, config: InterpreterPoolExecutorConfig) -> None:
        # By name, because only CPython 3.14 and its type stubs have it.
        executor: Executor = importlib.import_module("concurrent.futures").InterpreterPoolExecutor(
            config.max_workers or stage.concurrency,
            thread_name_prefix=f"spdl_media {stage.name}",
            initializer=config.initializer,
            initargs=config.initargs,
        )
        super().__init__(stage, executor)

    def shutdown(self) -> None:  # see StagePool
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _translated(self, error: BaseException) -> BaseException:
        if not isinstance(error, ImportError) and type(error).__name__ != "NotShareableError":
            return error
        translated = PipelineError(
            f"Stage {self._stage.name!r} cannot run in a sub-interpreter: {_reason(error)}. Only "
            "pure Python can: NumPy, PyAV and most other extension modules cannot be imported "
            "there, nor can modules that import them. Use ProcessPoolExecutorConfig, or threads."
        )
        translated.__cause__ = error
        return translated


def _reason(error: BaseException) -> str:
    """The line that says which import or value it was. It may be deep in the text of a cause."""
    lines = [line.strip() for text in _chain(error) for line in str(text).splitlines()]
    lines = [line for line in lines if line]
    telling = [line for line in lines if "does not support" in line]
    return (telling or lines or [type(error).__name__])[0][:300]


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
