"""Opens the pool of a stage that does not run in the pipeline's own threads."""

from __future__ import annotations

from concurrent.futures import Executor

from spdl_media.pipeline.executor_pools import CallersPool, InterpreterPool, StagePool
from spdl_media.pipeline.executors import InterpreterPoolExecutorConfig, ProcessPoolExecutorConfig
from spdl_media.pipeline.processes import ProcessPool
from spdl_media.pipeline.stages import PipeConfig

__all__ = ("open_pool",)


def open_pool(stage: PipeConfig) -> StagePool:
    """Start the executor of a stage; to be called before the pipeline starts threads.

    Threads of a stage's own are not made here: they are threads of the pipeline.

    Raises:
        PoolBroken: The caller's executor is broken or was shut down.
    """
    if isinstance(stage.executor, Executor):
        return CallersPool(stage, stage.executor)
    if isinstance(stage.executor, ProcessPoolExecutorConfig):
        return ProcessPool(stage, stage.executor)
    if isinstance(stage.executor, InterpreterPoolExecutorConfig):
        return InterpreterPool(stage, stage.executor)
    raise TypeError(f"Stage {stage.name!r} runs in threads, it has no pool. Please report this.")
