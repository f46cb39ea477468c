"""What the event loop does when an item fails."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeAlias

from spdl_media.pipeline.engine.hub import Hub
from spdl_media.pipeline.engine.node import Slot
from spdl_media.pipeline.engine.workers import Worker, WorkerThreads
from spdl_media.pipeline.errors import describe
from spdl_media.pipeline.failures import FailureExcess, FailureLog, FailureRecord
from spdl_media.pipeline.stats import StageCounters

__all__ = ("FailureDesk", "OnFailure")

OnFailure = Callable[[FailureRecord, Any], object]

# With the record that was counted: the call of a slot that was given up may fail by itself meanwhile.
_Waiting: TypeAlias = tuple[FailureRecord, Slot, Callable[[Slot], None]]


class FailureDesk:
    """Counts failures, keeps their records, calls ``on_failure``, and ends the run after too many.

    ``on_failure`` is called in a thread of its own, one failure after the other. An item leaves its stage
    only when that is done, so a slow callback slows the pipeline and nothing piles up.
    """

    def __init__(self, hub: Hub, log: FailureLog, on_failure: OnFailure | None) -> None:
        self.threads: WorkerThreads | None = None
        self._hub = hub
        self._log = log
        self._on_failure = on_failure
        self._waiting: SimpleQueue[_Waiting] = SimpleQueue()
        if on_failure is not None:
            self.threads = WorkerThreads(hub, "spdl_media on_failure", 1)

    def report(self, slot: Slot, counters: StageCounters, release: Callable[[Slot], None]) -> None:
        """Take note of a failure, then let its slot go. On the loop."""
        record = slot.record
        assert record is not None
        counters.failures += 1
        if (excess := self._log.note(record)) is not None:
            self._end_run(excess)
        if self.threads is None:
            release(slot)
        else:
            self._waiting.put((record, slot, release))
            self.threads.issue(self)

    def check_epoch(self) -> None:
        """End the run if too much of an epoch that has just ended was lost."""
        if (excess := self._log.end_epoch()) is not None:
            self._end_run(excess)

    def _end_run(self, excess: FailureExcess) -> None:
        record = excess.record
        self._hub.events.fail(record.stage, str(excess), record.exception, record.traceback)

    def serve(self, worker: Worker) -> None:
        """Call ``on_failure`` for one failure. In its thread."""
        record, slot, release = self._waiting.get()
        worker.slot = slot
        assert self._on_failure is not None
        try:
            self._on_failure(record, slot.item)
        except BaseException as error:  # noqa: BLE001  # of whatever kind, the caller must hear of it
            self._hub.post(self._blame_callback, error)
        worker.slot = None
        self._hub.post(release, slot)

    def _blame_callback(self, error: BaseException) -> None:
        self._hub.events.fail("on_failure", f"on_failure raised {describe(error)}", error)
