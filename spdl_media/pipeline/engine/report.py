"""Puts counters together to statistics, and writes them to the log now and then."""

from __future__ import annotations

import asyncio
import logging
from time import perf_counter

from spdl_media.pipeline.engine.graph import Graph
from spdl_media.pipeline.stats import PipelineStatistics, SinkStatistics, StageCounters

__all__ = ("Reporter",)

LOG = logging.getLogger("spdl_media.pipeline")


class Reporter:
    """Reads the counters of a graph. From any thread; each report is of the time since the last."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._since = perf_counter()
        self._source_items = 0
        self._before: dict[str, StageCounters] = {}
        self._sink_before: SinkStatistics | None = None

    def statistics(self, elapsed: float) -> PipelineStatistics:
        """What happened in the last ``elapsed`` seconds, which began with the last report, if any."""
        graph = self._graph
        return PipelineStatistics(
            elapsed=elapsed,
            source_items=sum(source.given for source in graph.sources) - self._source_items,
            stages=tuple(
                stage.counters.statistics(stage.name, elapsed, self._before.get(stage.name))
                for stage in graph.stages
            ),
            sink=graph.sink.statistics(elapsed, self._sink_before),
        )

    def report_every(self, seconds: float, loop: asyncio.AbstractEventLoop) -> None:
        """Write to the log each so many seconds, for as long as the loop runs."""
        loop.call_later(seconds, self._report, seconds, loop)

    def _report(self, seconds: float, loop: asyncio.AbstractEventLoop) -> None:
        now = perf_counter()
        LOG.info("%s", self.statistics(now - self._since))
        self._since = now
        self._source_items = sum(source.given for source in self._graph.sources)
        self._before = {stage.name: stage.counters.copy() for stage in self._graph.stages}
        self._sink_before = self._graph.sink.statistics(0.0)
        self.report_every(seconds, loop)
