"""Stages that work at the same time: sources, functions, groups, a buffer for the consumer.

:class:`PipelineBuilder` puts a :class:`Pipeline` together. It is generic, it knows nothing of media.
"""

from __future__ import annotations

from spdl_media.pipeline.builder import PipelineBuilder
from spdl_media.pipeline.executors import (
    ExecutorConfig,
    InterpreterPoolExecutorConfig,
    ProcessPoolExecutorConfig,
    TaskHook,
    ThreadPoolExecutorConfig,
)
from spdl_media.pipeline.failures import (
    FailureRecord,
    MissingPackageError,
    PipelineError,
    PipelineFailure,
    PipelineStopped,
    PoolBroken,
    WorkerDied,
)
from spdl_media.pipeline.pipeline import Pipeline
from spdl_media.pipeline.profile import profile_pipeline
from spdl_media.pipeline.stages import (
    AggregateConfig,
    Aggregator,
    DisaggregateConfig,
    MergeConfig,
    OutputOrder,
    PathVariantsConfig,
    PipeConfig,
    PipelineConfig,
    SinkConfig,
    SourceConfig,
    StageConfig,
)
from spdl_media.pipeline.stats import (
    PipelineProfile,
    PipelineStatistics,
    SinkStatistics,
    StageProfile,
    StageStatistics,
    Timing,
)

__all__ = (
    "AggregateConfig",
    "Aggregator",
    "DisaggregateConfig",
    "ExecutorConfig",
    "FailureRecord",
    "InterpreterPoolExecutorConfig",
    "MergeConfig",
    "MissingPackageError",
    "OutputOrder",
    "PathVariantsConfig",
    "PipeConfig",
    "Pipeline",
    "PipelineBuilder",
    "PipelineConfig",
    "PipelineError",
    "PipelineFailure",
    "PipelineProfile",
    "PipelineStatistics",
    "PipelineStopped",
    "PoolBroken",
    "ProcessPoolExecutorConfig",
    "SinkConfig",
    "SinkStatistics",
    "SourceConfig",
    "StageConfig",
    "StageProfile",
    "StageStatistics",
    "TaskHook",
    "ThreadPoolExecutorConfig",
    "Timing",
    "WorkerDied",
    "profile_pipeline",
)
