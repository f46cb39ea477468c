"""A run of a pipeline, from its first thread to its last."""

from __future__ import annotations

import asyncio
import atexit
import functools
import itertools
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from time import perf_counter
from typing import Any

from spdl_media._checks import abridged
from spdl_media._threads import interrupts_delayed
from spdl_media.pipeline.engine.graph import Graph, RunOptions
from spdl_media.pipeline.engine.hub import Hub, Slot, wake
from spdl_media.pipeline.engine.workers import LoopExecutor, Worker, WorkerThreads
from spdl_media.pipeline.executors import TaskHook
from spdl_media.pipeline.failures import (
    FailureLog,
    FailureRecord,
    PipelineError,
    PipelineFailure,
    PipelineStopped,
    describe,
    pipeline_failure,
)
from spdl_media.pipeline.stages import PipelineConfig
from spdl_media.pipeline.stats import PipelineStatistics

LOG = logging.getLogger("spdl_media.pipeline")

Release = Callable[[Any], None]

# Seconds that cancelled tasks have to clean up. stop() promises to return within one second.
CANCEL_SECONDS = 0.4

EXIT_SECONDS = 0.6
"""Seconds for which interpreter exit waits for all pipelines together."""

# Maximum number of calls or threads that one log message names.
MOST_NAMED = 10

LIVE: set[Run] = set()
"""Runs that have been started and have not ended."""


class Run:
    """One run of a pipeline: the thread of an event loop, the nodes, and the threads that these use.

    Whatever ends the run (the consumer, a failure, garbage collection, interpreter exit) asks the loop to
    stop. The loop then ends everything in a fixed order, in :meth:`_wind_down`.

    A run has no reference to its ``Pipeline``, so that an unused pipeline is garbage-collected although
    threads of its run are alive.
    """

    def __init__(self, config: PipelineConfig, options: RunOptions) -> None:
        self.log = FailureLog(self.fail, options.max_failures)
        self.graph: Graph
        self.was_stopped = False
        self.has_reported = False
        self._config = config
        self._options = options
        # Makes the exception for the consumer, a new one each time, because each raise adds to its traceback.
        self._failure: Callable[[], PipelineFailure] | None = None
        self._source_error: BaseException | None = None
        self._started_at = perf_counter()
        self._ended_at: float | None = None
        self._started_hooks: list[TaskHook] = []
        self._loop: asyncio.AbstractEventLoop
        self._hub = Hub(self)
        # As many threads as asyncio would use for to_thread(), but interpreter exit does not wait for these.
        size = min(32, (os.cpu_count() or 1) + 4)
        self._to_thread = WorkerThreads(self._hub, "spdl_media to_thread", size)
        # Calls on_failure, one failure after the other.
        self._reporter = WorkerThreads(self._hub, "spdl_media on_failure", 1)
        self._stop: asyncio.Future[None]
        self._thread = threading.Thread(
            target=self._main, name=f"spdl_media pipeline {next(_NUMBERS)}", daemon=True
        )

    @property
    def has_begun(self) -> bool:
        """Whether the thread of the event loop has been started."""
        return self._thread.ident is not None

    # Called by the user's threads.

    def start(self) -> None:
        """Open pools, start threads, and begin the first epoch.

        Raises:
            PipelineStopped: Another thread stopped the run while it was starting.
        """
        try:
            # A Ctrl-C would leave a half-made loop, and collecting that raises an error.
            with interrupts_delayed():
                self._loop = self._hub.loop = asyncio.new_event_loop()
            self.graph = Graph(self._hub, self._config, self._options, self.log)
            self._start_thread()
        except BaseException:
            # A thread that has begun ends everything itself.
            if self.has_begun:
                self.stop(EXIT_SECONDS)
            else:
                self._undo_start()
            raise
        if self.was_stopped:
            self.request_stop()
            raise PipelineStopped("the pipeline was stopped while it was being started")

    def _start_thread(self) -> None:
        self.graph.sink.look_out = self.graph.look_out
        self._stop = self._loop.create_future()
        self._started_at = perf_counter()
        for hook in self.graph.hooks:
            hook.stage_start()
            self._started_hooks.append(hook)
        LIVE.add(self)
        # After a Ctrl-C within Thread.start(), nothing tells whether the thread begins.
        with interrupts_delayed():
            self._thread.start()

    def _undo_start(self) -> None:
        LIVE.discard(self)
        # A Graph whose constructor raised has closed its pools.
        if hasattr(self, "graph"):
            self.graph.close_pools()
        self._end_hooks()
        if hasattr(self, "_loop"):
            self._loop.close()

    def request_epoch(self) -> None:
        """Begin another epoch."""
        # After a Ctrl-C between the two steps, the next consumer would wait for ever.
        with interrupts_delayed():
            self.graph.sink.begin_epoch()
            self._hub.post(self._begin_epoch, None)

    def request_stop(self) -> None:
        """Ask the run to end, without waiting. From any thread, any number of times."""
        self.was_stopped = True
        # Threads see this after their current call, even if the loop is blocked.
        self._hub.closed = True
        # Before the begin, start() will see the request.
        if self.has_begun:
            self._hub.post(self._end, None)

    def stop(self, timeout: float) -> None:
        """End the run, and wait at most ``timeout`` seconds until its threads have ended.

        Threads that are still in a call then are named in the log.
        """
        deadline = perf_counter() + float(timeout)
        self.request_stop()
        # A thread must not wait for itself: the garbage collector may end an iteration in a thread that takes
        # a turn.
        own = (self._thread.ident, self._hub.taker)
        if not self.has_begun or threading.get_ident() in own:
            return
        self.graph.stop()
        # The loop's thread first: it may be just starting other threads.
        _join([self._thread], deadline)
        # List the threads now, because the loop may have started more of them.
        threads = [self._thread, *self.graph.all_threads()]
        if names := _join(threads, deadline):
            self.has_reported = True
            LOG.warning(
                "the pipeline was stopped while calls run that cannot be interrupted: %s. Threads %s are "
                "daemons and end when those return",
                abridged(list(self.graph.running_calls()), "; ", MOST_NAMED) or "of unknown kind",
                abridged(names, ", ", MOST_NAMED),
            )

    def statistics(self) -> PipelineStatistics:
        """Return the statistics of the run so far."""
        return self.graph.statistics((self._ended_at or perf_counter()) - self._started_at)

    def disown(self) -> None:
        """In a forked process, which has none of the threads: make ``take`` raise an error that says so."""
        self._hub.abandon()
        parent = os.getppid()
        self.graph.sink.close(
            lambda: PipelineError(
                f"this pipeline runs in process {parent}, from which this process was forked; threads "
                "are not forked. Build a pipeline of its own in each process"
            ),
            keep=False,
        )

    # Called by nodes, in turns.

    def fail(self, stage: str, message: str, error: BaseException, raised_at: str = "") -> None:
        """End the run because of a failure, unless it has failed or was stopped before."""
        if self._failure is None and not self.was_stopped:
            self._failure = functools.partial(pipeline_failure, message, error, stage, raised_at)
            # Deliver all results that exist, even if the buffer has no room for them.
            self.graph.sink.accept_all()
            self._end(None)

    def item_failed(self, slot: Slot, release: Release) -> None:
        """Count a failure, report it, and then release its slot.

        The item stays in its stage until then, so a slow ``on_failure`` slows the pipeline down and failures
        do not pile up.
        """
        # Read now: a call that was given up may fail by itself later and set another record.
        record, counters = slot.record, slot.stage.counters
        assert record is not None
        counters.failures += 1
        # Not of workers that the stop itself has ended.
        if counters.failures == 1 and not self.was_stopped:
            LOG.warning("first failure of stage %s", record)
        self.log.note(record)
        if self._options.on_failure is None:
            release(slot)
        else:
            self._reporter.issue(functools.partial(self._report, record, slot, release))

    def _report(self, record: FailureRecord, slot: Slot, release: Release, worker: Worker) -> bool:
        worker.slot = slot
        assert self._options.on_failure is not None
        try:
            self._options.on_failure(record, slot.item)
        except BaseException as error:  # noqa: BLE001  # whatever it is, the user must see it
            message = f"on_failure raised {describe(error)}"
            self._hub.post(functools.partial(self.fail, "on_failure", message), error)
        worker.slot = None
        self._hub.post(release, slot)
        return False

    def source_failed(self, error: BaseException) -> None:
        """End the run after the items that the source gave before its failure have been delivered."""
        self._source_error = self._source_error or error
        for source in self.graph.sources:
            source.cut_short()

    def epoch_ended(self) -> None:
        """Log and check the failures of an epoch whose items have all been delivered."""
        if summary := self.log.summary():
            LOG.warning("failures of this epoch: %s", summary)
        num_items = sum(source.counters.outputs for source in self.graph.sources)
        self.log.end_epoch(num_items, self.graph.sink.delivered)
        if (error := self._source_error) is not None:
            self.fail("source", f"The source failed: {describe(error)}", error)

    # In the loop's thread.

    def _main(self) -> None:
        try:
            self._run_to_its_end(self._live())
            self._run_to_its_end(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()
            self._hub.let_go()
            for node in (*self.graph.sources, *self.graph.stages):
                node.let_go()
            LIVE.discard(self)

    def _run_to_its_end(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run the loop until a coroutine has ended, even if user code stops the loop meanwhile.

        A ``SystemExit`` in a task that the user created passes through the loop. The run then ends as after
        any other failure, for which the loop has to run again.
        """
        task = self._loop.create_task(coroutine)
        while not task.done():
            try:
                self._loop.run_until_complete(task)
            except BaseException as error:
                if task.done():
                    raise
                message = (
                    f"Something stopped the event loop of the pipeline ({describe(error)}): a task or "
                    "callback that an asynchronous stage or source started called sys.exit(), or "
                    "loop.stop(). Raise an exception instead"
                )
                with self._hub.turn:
                    self.fail("pipeline", message, error)
                    self._end(None)

    async def _live(self) -> None:
        self._hub.loop_thread = threading.get_ident()
        # Before any user code runs on the loop.
        self._loop.set_default_executor(LoopExecutor(self._hub, self._to_thread))
        try:
            self._hub.post(self._begin_epoch, None)
            self._look_out()
            if (interval := self._options.report_stats_interval) is not None:
                self._hub.spawn(self._report_every(interval), "statistics")
            await self._stop
        finally:
            await self._wind_down()

    async def _wind_down(self) -> None:
        self._hub.closed = True
        # Wait for a turn of another thread. Later turns change nothing, because the hub is closed.
        with self._hub.turn:
            self._ended_at = perf_counter()
            if summary := self.log.summary():
                LOG.warning("failures of this epoch, which ended early: %s", summary)
            self.graph.stop()
            self.graph.close_pools()
            # Before the steps that may take long, so that consumers need not wait for them.
            self.graph.sink.close(self._why_over, keep=self._failure is not None)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            # Including tasks that the user's stages have started on this loop.
            task.cancel()
        stubborn = await _wait_for(tasks, CANCEL_SECONDS)
        self.graph.close_generators()
        self._end_hooks()
        # Tasks that ignore their cancellation are handled like threads in a call: stop() names them, and the
        # run ends when they return.
        await _wait_for(stubborn, None)

    def _end_hooks(self) -> None:
        for hook in self._started_hooks:
            try:
                # Call each hook, even if the one before has raised.
                hook.stage_end()
            except BaseException:
                LOG.exception("a task hook raised at the end of its stage")

    def _begin_epoch(self, _: None) -> None:
        # Between epochs no items are expected, so the quiet time begins with the epoch.
        self.graph.sink.quiet_since = perf_counter()
        for source in self.graph.sources:
            source.request_epoch()

    def _end(self, _: None) -> None:
        self._hub.closed = True
        self._hub.post_to_loop(wake, self._stop)

    def _look_out(self) -> None:
        self._loop.call_later(self.graph.look_out(), self._look_out)

    async def _report_every(self, seconds: float) -> None:
        since, before = perf_counter(), None
        while True:
            await asyncio.sleep(seconds)
            now = perf_counter()
            LOG.info("%s", self.graph.statistics(now - since, before))
            since, before = now, self.graph.totals()

    def _why_over(self) -> BaseException:
        if self._failure is not None:
            return self._failure()
        return PipelineStopped("the pipeline was stopped; build or start it again for more items")


async def _wait_for(tasks: set[asyncio.Task[Any]], seconds: float | None) -> set[asyncio.Task[Any]]:
    """Wait for tasks that were cancelled; return those that have not ended."""
    if not tasks:
        return set()
    done, pending = await asyncio.wait(tasks, timeout=seconds)
    for task in done:
        # Retrieve exceptions, or asyncio prints those of tasks that failed while they were cancelled.
        if not task.cancelled() and (error := task.exception()) is not None:
            LOG.warning("%s raised while it was cancelled: %s", task.get_name(), describe(error))
    return pending


def _join(threads: list[threading.Thread], deadline: float) -> list[str]:
    """Wait for threads; return the names of those that are still alive."""
    others = [thread for thread in threads if thread is not threading.current_thread()]
    for thread in others:
        if thread.ident is not None:
            # join() raises OverflowError for a timeout above TIMEOUT_MAX, such as infinity.
            thread.join(min(max(0.0, deadline - perf_counter()), threading.TIMEOUT_MAX))
    return [thread.name for thread in others if thread.is_alive()]


_NUMBERS = itertools.count(1)


def _stop_all() -> None:
    """Stop all live runs at interpreter exit, while their threads can still run."""
    # The copy is one step: other threads may start and end runs meanwhile.
    runs = LIVE.copy()
    # Ask all runs first, so that many pipelines take no longer than one.
    for run in runs:
        run.request_stop()
    deadline = perf_counter() + EXIT_SECONDS
    for run in runs:
        if not run.has_reported:
            run.stop(max(0.0, deadline - perf_counter()))


def _disown_all() -> None:
    """In a forked process, make the runs that were live raise an error."""
    while LIVE:
        LIVE.pop().disown()


# Registered after the imports: exit handlers run in reverse order, so those of the imported modules, such as
# the end of worker processes, run after this one.
atexit.register(_stop_all)
if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(after_in_child=_disown_all)
