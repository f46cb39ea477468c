"""Names that differ: statistics, failures and limits go by the names of stages."""

from __future__ import annotations

from dataclasses import replace

from spdl_media.pipeline.stages import (
    MergeConfig,
    PathVariantsConfig,
    PipelineConfig,
    StageConfig,
)

__all__ = ("with_unique_names",)


def with_unique_names(config: PipelineConfig) -> PipelineConfig:
    """The same pipeline, in which a name that came before has a number behind it.

    Merged pipelines come first, then the stages in order, a router before the stages of its paths.
    """
    return _pipeline(config, set())


def _pipeline(config: PipelineConfig, taken: set[str]) -> PipelineConfig:
    source = config.source
    if isinstance(source, MergeConfig):
        source = MergeConfig(tuple(_pipeline(one, taken) for one in source.pipelines))
    return replace(config, source=source, stages=_stages(config.stages, taken))


def _stages(stages: tuple[StageConfig, ...], taken: set[str]) -> tuple[StageConfig, ...]:
    return tuple(_stage(stage, taken) for stage in stages)


def _stage(stage: StageConfig, taken: set[str]) -> StageConfig:
    name = _free_name(stage.name, taken)
    taken.add(name)
    if name != stage.name:
        stage = replace(stage, name=name)
    if isinstance(stage, PathVariantsConfig):
        return replace(stage, paths=tuple(_stages(path, taken) for path in stage.paths))
    return stage


def _free_name(name: str, taken: set[str]) -> str:
    candidates = (name, *(f"{name}_{number}" for number in range(2, len(taken) + 3)))
    return next(candidate for candidate in candidates if candidate not in taken)
