"""Says what a pipeline is doing when it gives nothing, or does not end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter

from spdl_media.pipeline.engine.calls import CallStage
from spdl_media.pipeline.engine.fan_out import FanOut
from spdl_media.pipeline.engine.graph import Graph
from spdl_media.pipeline.engine.node import Slot
from spdl_media.pipeline.failures import short_repr

__all__ = ("RunningCall", "Watchdog", "running_calls")

LOG = logging.getLogger("spdl_media.pipeline")

#: Seconds without an item after which the log says what runs.
SILENCE = 60.0


@dataclass(frozen=True, slots=True)
class RunningCall:
    """A call that has not returned.

    Attributes:
        stage: Name of the stage, or ``"source"``.
        started_at: When it began, on the clock of ``time.perf_counter``.
        input: A short ``repr`` of the stage's input; empty for a source.
        thread: Name of the thread, where one makes the call.
    """

    stage: str
    started_at: float
    input: str = ""
    thread: str = ""

    def __str__(self) -> str:
        seconds = perf_counter() - self.started_at
        where = f" in thread {self.thread}" if self.thread else ""
        on = f" on {self.input}" if self.input else ""
        return f"{self.stage} has run for {seconds:.1f} s{on}{where}"


def running_calls(graph: Graph) -> Iterator[RunningCall]:
    """All calls of functions and sources that have not returned. From any thread."""
    for source in graph.sources:
        if (since := source.asking_since) is not None:
            thread = getattr(source, "thread", None)
            yield RunningCall("source", since, thread=thread.name if thread else "")
    for worker in graph.workers():
        if (slot := worker.slot) is not None:
            yield _describe(slot, worker.name)
    for stage in graph.stages:
        if isinstance(stage, CallStage | FanOut):
            for slot in stage.running():
                yield _describe(slot)


def _describe(slot: Slot, thread: str = "") -> RunningCall:
    return RunningCall(slot.stage.name, slot.started_at, short_repr(slot.item), thread)


class Watchdog:
    """Writes one line to the log when consumers wait and nothing has been delivered for a time.

    The event loop looks now and then, and so do consumers while they wait, since what blocks may be
    the loop itself.
    """

    def __init__(self, graph: Graph, silence: float | None = None) -> None:
        self.silence = SILENCE if silence is None else silence
        self._graph = graph
        self._awake_since = perf_counter()
        self._told_of = 0.0
        self._lock = threading.Lock()

    def rouse(self) -> None:
        """An epoch begins, so items are expected from now on."""
        self._awake_since = perf_counter()

    def look(self) -> float:
        """Write the line if it is due. Returns after how many seconds to look again."""
        sink = self._graph.sink
        last = max(sink.delivered_at, self._awake_since)
        quiet = perf_counter() - last
        if not sink.is_empty or sink.has_ended:
            return self.silence
        if quiet < self.silence:
            return self.silence - quiet
        with self._lock:
            if self._told_of != last:
                self._told_of = last
                calls = "; ".join(map(str, running_calls(self._graph))) or "no call runs"
                LOG.warning("the pipeline has delivered nothing for %.0f s: %s", quiet, calls)
        return self.silence
