"""Descriptions of executors, which a definition may hold where an executor itself could not be pickled.

Each run of a pipeline makes its own pool from them, and shuts it down when it ends.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from spdl_media._checks import check_callable, check_choice, check_int

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
