"""A pipeline as text: an outline to print, and a Mermaid flowchart."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from spdl_media.pipeline.functions import kind_of, name_of
from spdl_media.pipeline.stages import (
    AggregateConfig,
    DisaggregateConfig,
    MergeConfig,
    PathVariantsConfig,
    PipeConfig,
    PipelineConfig,
    SourceConfig,
    StageConfig,
)

__all__ = ("mermaid", "outline")

_INDENT = "  "

# "#" first, because it is a part of the other entities. A label in backticks would be Markdown.
_ENTITIES = (
    ("#", "#35;"),
    ("&", "#amp;"),
    ('"', "#quot;"),
    ("<", "#lt;"),
    (">", "#gt;"),
    ("`", "#96;"),
)


def outline(config: PipelineConfig) -> str:
    """One line for each part of a pipeline, those of paths and merged pipelines indented."""
    return "\n".join(_outline_lines(config, ""))


def mermaid(config: PipelineConfig) -> str:
    """A Mermaid flowchart, from top to bottom."""
    return "\n".join(["flowchart TD", *(f"    {line}" for line in _Chart().pipeline(config))])


def _details_of(stage: StageConfig) -> str:
    """Return what differs from the defaults of a stage."""
    if isinstance(stage, PipeConfig):
        return ", ".join(_pipe_details(stage))
    if isinstance(stage, AggregateConfig):
        return "drop_last" if stage.drop_last else ""
    return "" if isinstance(stage, DisaggregateConfig) else f"{len(stage.paths)} paths"


def _pipe_details(stage: PipeConfig) -> Iterator[str]:
    kind = kind_of(stage.fn).replace("_", " ")
    function = name_of(stage.fn)
    if stage.name != function:
        yield function
    if kind != "function":
        yield kind
    yield f"concurrency={stage.concurrency}"
    if stage.executor is not None:
        yield type(stage.executor).__name__
    if stage.output_order != "completion":
        yield f"order of {stage.output_order}"
    if stage.timeout is not None:
        yield f"timeout={stage.timeout:g} s"
    if stage.max_failures is not None:
        yield f"max_failures={stage.max_failures}"


def _outline_lines(config: PipelineConfig, indent: str) -> Iterator[str]:
    if isinstance(config.source, MergeConfig):
        yield f"{indent}merge"
        for number, pipeline in enumerate(config.source.pipelines):
            yield f"{indent}{_INDENT}pipeline {number}"
            yield from _outline_lines(pipeline, indent + 2 * _INDENT)
    else:
        yield f"{indent}source: {_source_text(config.source)}"
    yield from _stage_lines(config.stages, indent)
    if config.sink is not None:
        yield f"{indent}sink: buffer of {config.sink.buffer_size}"


def _stage_lines(stages: tuple[StageConfig, ...], indent: str) -> Iterator[str]:
    for stage in stages:
        yield f"{indent}{_stage_text(stage)}"
        if isinstance(stage, PathVariantsConfig):
            for number, path in enumerate(stage.paths):
                yield f"{indent}{_INDENT}path {number}" + ("" if path else ": as it is")
                yield from _stage_lines(path, indent + 2 * _INDENT)


def _source_text(source: SourceConfig) -> str:
    return source.name + (", continuous" if source.continuous else "")


def _stage_text(stage: StageConfig) -> str:
    details = _details_of(stage)
    name = " ".join(stage.name.split())
    return f"{name} ({details})" if details else name


class _Chart:
    """Lines of a flowchart. Each part adds its nodes and returns those that lead to the next part."""

    def __init__(self) -> None:
        self._numbers = count()

    def pipeline(self, config: PipelineConfig) -> list[str]:
        lines, ends = self._chain(config)
        if config.sink is not None:
            sink = self._node(f'(["sink: buffer of {config.sink.buffer_size}"])', lines)
            lines += self._arrows(ends, sink)
        return lines

    def _chain(self, config: PipelineConfig) -> tuple[list[str], list[str]]:
        lines: list[str] = []
        if isinstance(config.source, MergeConfig):
            branches = [self._chain(pipeline) for pipeline in config.source.pipelines]
            lines = [line for branch, _ in branches for line in branch]
            merge = self._node('{{"merge"}}', lines)
            lines += self._arrows([end for _, ends in branches for end in ends], merge)
            first = merge
        else:
            first = self._node(f'(["{_escaped(_source_text(config.source))}"])', lines)
        ends = self._stages(config.stages, [first], lines)
        return lines, ends

    def _stages(
        self, stages: tuple[StageConfig, ...], ends: list[str], lines: list[str]
    ) -> list[str]:
        for stage in stages:
            opening, closing = ("{", "}") if isinstance(stage, PathVariantsConfig) else ("[", "]")
            node = self._node(f'{opening}"{_label(stage)}"{closing}', lines)
            lines += self._arrows(ends, node)
            ends = [node]
            if isinstance(stage, PathVariantsConfig):
                ends = self._paths(stage, node, lines)
        return ends

    def _paths(self, stage: PathVariantsConfig, router: str, lines: list[str]) -> list[str]:
        ends = []
        for number, path in enumerate(stage.paths):
            # A point for each path: it carries the number at the arrow, and an empty path ends in it.
            point = self._node("(( ))", lines)
            lines.append(f"{router} -->|{number}| {point}")
            ends += self._stages(path, [point], lines)
        return ends

    def _node(self, shape: str, lines: list[str]) -> str:
        name = f"n{next(self._numbers)}"
        lines.append(f"{name}{shape}")
        return name

    @staticmethod
    def _arrows(ends: list[str], node: str) -> list[str]:
        return [f"{end} --> {node}" for end in ends]


def _label(stage: StageConfig) -> str:
    details = _details_of(stage)
    return _escaped(stage.name) + (f"<br/>{_escaped(details)}" if details else "")


def _escaped(text: str) -> str:
    """Text for a quoted label: what would end it or be taken for markup, as Mermaid's entities."""
    for character, entity in _ENTITIES:
        text = text.replace(character, entity)
    return " ".join(text.split())
