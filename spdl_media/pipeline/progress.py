"""A progress bar over the items that a pipeline delivers, drawn by tqdm."""

from __future__ import annotations

from typing import Any

from spdl_media._optional import require
from spdl_media.pipeline.failures import MissingPackageError
from spdl_media.pipeline.functions import kind_of
from spdl_media.pipeline.stages import (
    AggregateConfig,
    MergeConfig,
    PathVariantsConfig,
    PipeConfig,
    PipelineConfig,
    StageConfig,
    source_length,
)

__all__ = ("ProgressBar", "check_progress", "number_of_outputs")


def check_progress(progress: object) -> None:
    """Refuse a progress bar that could not be shown, before anything runs.

    Raises:
        TypeError: ``progress`` is neither a flag nor a label.
        MissingPackageError: A bar is wanted, and tqdm is not installed.
    """
    if not isinstance(progress, bool | str):
        raise TypeError(f"progress must be True, False or a label for the bar, not {progress!r}")
    if progress is not False:
        _tqdm()


class ProgressBar:
    """A bar for one epoch.

    Args:
        label: What stands before the bar; ``True`` for nothing.
        total: How many items are expected, or ``None``.

    Thread safety: for one thread at a time.
    """

    def __init__(self, label: bool | str, total: int | None) -> None:  # noqa: FBT001
        desc = label if isinstance(label, str) else None
        # Looks at the clock with each item (miniters): tqdm would else leave that to a thread of
        # its own, which never ends.
        self._bar = _tqdm()(desc=desc, total=total, unit="item", miniters=1)

    def update(self, number: int = 1) -> None:
        """Count items that were delivered."""
        self._bar.update(number)

    def close(self) -> None:
        """Leave the bar as it stands. May be called twice."""
        self._bar.close()


def number_of_outputs(config: PipelineConfig) -> int | None:
    """How many items an epoch delivers if none is dropped or fails; ``None`` when that depends on them."""
    source = config.source
    number: int | None
    if isinstance(source, MergeConfig):
        parts = [number_of_outputs(pipeline) for pipeline in source.pipelines]
        number = None if None in parts else sum(part or 0 for part in parts)
    else:
        number = source_length(source.items)
    for stage in config.stages:
        if number is not None:
            number = _outputs(stage, number)
    return number


def _outputs(stage: StageConfig, number: int) -> int | None:
    if isinstance(stage, PipeConfig):
        return number if kind_of(stage.fn) in ("function", "async") else None
    if isinstance(stage, AggregateConfig) and isinstance(stage.aggregator, int):
        return (number if stage.drop_last else number + stage.aggregator - 1) // stage.aggregator
    if isinstance(stage, PathVariantsConfig):
        kept = all(_outputs(one, 1) == 1 for path in stage.paths for one in path)
        one_each = all(isinstance(one, PipeConfig) for path in stage.paths for one in path)
        return number if kept and one_each else None
    return None


def _tqdm() -> Any:
    """The class of bars: tqdm's own for the terminal or notebook, without its thread."""
    base = require("tqdm", "A progress bar", MissingPackageError).tqdm
    return type("tqdm", (base,), {"monitor_interval": 0})
