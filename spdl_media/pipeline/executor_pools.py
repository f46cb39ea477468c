"""Executors of :mod:`concurrent.futures` as pools of a stage: the caller's, and sub-interpreters."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import (
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    ProcessPoolExecutor,
)
from typing import Any

from spdl_media.pipeline.executors import InterpreterPoolExecutorConfig
from spdl_media.pipeline.failures import PipelineError, PoolBroken
from spdl_media.pipeline.stages import PipeConfig

__all__ = ("CallersPool", "InterpreterPool", "StagePool")


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
            for _ in range(stage.concurrency):
                self._start_a_worker(executor)

    def submit(self, item: Any) -> Future[Any]:  # noqa: D102  # see StagePool
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

    def _start_a_worker(self, executor: Executor) -> None:
        try:
            executor.submit(int)
        except (BrokenExecutor, RuntimeError) as error:
            raise self._broken(error) from error

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

    def shutdown(self) -> None:  # noqa: D102  # see StagePool
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
