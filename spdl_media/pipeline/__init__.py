"""Concurrent pipelines: a source, stages that run at the same time, and a buffer for the consumer.

:class:`PipelineBuilder` builds a :class:`Pipeline`. The package is generic and knows nothing of media.
"""

from __future__ import annotations

from typing import Any

from spdl_media.pipeline import executors, failures, profile, remote, stages, stats
from spdl_media.pipeline.builder import PipelineBuilder
from spdl_media.pipeline.executors import *
from spdl_media.pipeline.failures import *
from spdl_media.pipeline.pipeline import Pipeline
from spdl_media.pipeline.profile import *
from spdl_media.pipeline.remote import *
from spdl_media.pipeline.stages import *
from spdl_media.pipeline.stats import *
from spdl_media.ring import shared_empty

__all__: tuple[str, ...] = ("Pipeline", "PipelineBuilder", "shared_empty")
__all__ += executors.__all__
__all__ += failures.__all__
__all__ += profile.__all__
__all__ += remote.__all__
__all__ += stages.__all__
__all__ += stats.__all__


def __getattr__(name: str) -> Any:
    if name in ("iterate_in_subinterpreter", "run_pipeline_in_subinterpreter"):
        raise ImportError(
            f"there is no {name}: NumPy, PyAV and most other extension modules cannot be imported in a "
            f"sub-interpreter. Use {name.replace('interpreter', 'process')}, or for stages in pure Python "
            "executor=InterpreterPoolExecutorConfig()"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
