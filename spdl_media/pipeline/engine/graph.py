"""Builds the linked nodes of a run from a definition, and reads their statistics and running calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeAlias

from spdl_media._checks import check_callable, check_int, check_seconds
from spdl_media.pipeline.engine.ends import Sink, Source
from spdl_media.pipeline.engine.hub import QUICK_ITEMS, Hub, Node, Slot
from spdl_media.pipeline.engine.joints import (
    Aggregate,
    CustomAggregate,
    EmptyPath,
    Switch,
    routed,
)
from spdl_media.pipeline.engine.nodes import FanOut, Stage
from spdl_media.pipeline.engine.workers import LOG, TaskRunner, Worker, WorkerThreads
from spdl_media.pipeline.executors import (
    InterpreterPoolExecutorConfig,
    ProcessPoolExecutorConfig,
    TaskHook,
    ThreadPoolExecutorConfig,
    hooked,
    kind_of,
)
from spdl_media.pipeline.failures import (
    FailureLimit,
    FailureLog,
    FailureRecord,
    failure_limit,
    short_repr,
)
from spdl_media.pipeline.pools import AwaitedPool, DaskPool, WorkerProcesses, is_dask
from spdl_media.pipeline.stages import (
    AggregateConfig,
    DisaggregateConfig,
    PathVariantsConfig,
    PipeConfig,
    PipelineConfig,
    SinkConfig,
    SourceConfig,
    StageConfig,
)
from spdl_media.pipeline.stats import PipelineStatistics, SinkStatistics, StageCounters

# The counts of all sources and stages at one moment, and those of the sink.
Totals: TypeAlias = tuple[list[StageCounters], SinkStatistics]
OnFailure = Callable[[FailureRecord, Any], object]
TaskHookFactory = Callable[[str], TaskHook | None]

# Seconds without an item after which the log names the running calls.
SILENCE = 60.0


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of a run, documented at :class:`~spdl_media.pipeline.Pipeline`.

    Raises:
        TypeError: An option has the wrong type.
        ValueError: An option is out of range.
    """

    num_threads: int = 8
    max_failures: FailureLimit | None = None
    on_failure: OnFailure | None = None
    report_stats_interval: float | None = None
    task_hook_factory: TaskHookFactory | None = None
    progress: bool | str = False

    def __post_init__(self) -> None:
        check_int("num_threads", self.num_threads, remedy="1 runs one call at a time.")
        failure_limit("max_failures", self.max_failures)
        # SPDL uses -1 for "no reports".
        if self.report_stats_interval == -1:
            object.__setattr__(self, "report_stats_interval", None)
        check_seconds("report_stats_interval", self.report_stats_interval)
        check_callable("on_failure", self.on_failure, optional=True)
        check_callable("task_hook_factory", self.task_hook_factory, optional=True)
        if not isinstance(self.progress, bool | str):
            raise TypeError(
                f"progress must be True, False or a label for the bar, not {self.progress!r}"
            )


class Graph:
    """The nodes of a run, and the threads, pools and hooks that they use.

    The constructor opens the pools of the stages, and may block while processes start. If it raises, no pool
    is left open.

    Args:
        hub: Hub of the run.
        config: Definition of the pipeline.
        options: Options of the run.
        log: Failure log of the run, to which the stages are added.
    """

    def __init__(
        self, hub: Hub, config: PipelineConfig, options: RunOptions, log: FailureLog
    ) -> None:
        self.sources: list[Source] = []
        self.stages: list[Node] = []
        self.hooks: list[TaskHook] = []
        self._shared = WorkerThreads(hub, "spdl_media worker")
        self._pools: list[AwaitedPool | WorkerProcesses] = []
        self._hub = hub
        self._log = log
        self._hook_factory = options.task_hook_factory
        # Begin of the last quiet time that was logged.
        self._logged_since = 0.0
        # The nodes that get no groups. Groups may be large, so other nodes have no slack.
        self._quick: list[Node | Sink] = []
        try:
            tails = self._chain(config)
        except BaseException:
            # Otherwise the processes of the stages before would be left running.
            self.close_pools()
            raise
        # The stages have added up the threads that they can use; more threads would be idle.
        self._shared.size = min(options.num_threads, self._shared.size)
        continuous = isinstance(config.src, SourceConfig) and config.src.continuous
        self.sink = Sink(hub, (config.sink or SinkConfig()).buffer_size, continuous=continuous)
        for tail in tails:
            tail.connect(self.sink)
        if not self.sink.depth:
            self._quick.append(self.sink)
        # Minus one, because one item is the one that the source is just making.
        share = (QUICK_ITEMS - 1) // (len(self.sources) + len(self.stages) + 1)
        for node in self._quick:
            node.slack = share

    def stop(self) -> None:
        """Ask all threads to end after their current call. From any thread, any number of times."""
        for threads in self._hub.threads:
            threads.stop()

    def close_pools(self) -> None:
        """Shut down the pools that belong to the pipeline."""
        for pool in self._pools:
            pool.shutdown()

    def all_threads(self) -> list[Worker]:
        """Return all threads of the run except the loop's."""
        return [worker for threads in self._hub.threads for worker in threads.workers.copy()]

    def running_calls(self) -> Iterator[str]:
        """Describe all running calls of functions and sources. From any thread."""
        for worker in self.all_threads():
            if (slot := worker.slot) is not None:
                yield _describe_call(slot, f" in thread {worker.name}")
        for stage in [*self.sources, *self.stages]:
            if isinstance(stage, Stage) and isinstance(stage.runner, TaskRunner):
                yield from map(_describe_call, stage.runner.running())

    def look_out(self) -> float:
        """Log the running calls if consumers have waited for ``SILENCE`` seconds. From any thread.

        The event loop calls this from time to time, and so do waiting consumers, because the loop itself may
        be blocked. Returns the seconds until the next call.
        """
        since = self.sink.quiet_since
        quiet = perf_counter() - since
        if not self.sink.is_awaited():
            return SILENCE
        if quiet < SILENCE:
            return SILENCE - quiet
        # The loop and consumers find the same quiet time; log it once.
        if self._logged_since != since:
            self._logged_since = since
            calls = "; ".join(self.running_calls()) or "no call runs"
            LOG.warning("the pipeline has delivered nothing for %.0f s: %s", quiet, calls)
        return SILENCE

    def totals(self) -> Totals:
        """Return the counts so far."""
        nodes = (*self.sources, *self.stages)
        return [node.counters.copy() for node in nodes], self.sink.statistics(0.0)

    def statistics(self, elapsed: float, before: Totals | None = None) -> PipelineStatistics:
        """Return the statistics of the last ``elapsed`` seconds. ``before`` are the totals at their begin."""
        nodes, number = (*self.sources, *self.stages), len(self.sources)
        counters, sink = before or ([StageCounters()] * len(nodes), None)
        now = perf_counter()
        found = []
        for node, one in zip(nodes, counters, strict=True):
            node.counters.running = node.running_seconds(now)
            found.append(node.counters.statistics(node.name, elapsed, one))
        source_items = sum(source.outputs for source in found[:number])
        delivered = self.sink.statistics(elapsed, sink)
        return PipelineStatistics(elapsed, source_items, tuple(found[number:]), delivered)

    def close_generators(self) -> None:
        """Close the open synchronous generators of stages. Sources close theirs in their own threads."""
        for stage in self.stages:
            if isinstance(stage, FanOut):
                stage.close_generators()

    def _chain(self, config: PipelineConfig, *, gets_all: bool = True) -> list[Node]:
        """Make the nodes of a pipeline without its sink; return the last ones."""
        if isinstance(config.src, SourceConfig):
            source = Source(self._hub, config.src)
            self.sources.append(source)
            self._quick.append(source)
            return self._stages(config.pipes, [source], gets_all=gets_all)
        parts = config.src.pipeline_configs
        tails = [tail for part in parts for tail in self._chain(part, gets_all=False)]
        return self._stages(config.pipes, tails, gets_all=gets_all)

    def _stages(
        self, stages: Iterable[StageConfig], tails: list[Node], *, gets_all: bool
    ) -> list[Node]:
        for config in stages:
            node = self._stage(config)
            self.stages.append(node)
            for tail in tails:
                tail.connect(node)
            # One level less after Disaggregate. That is an assumption: a function in between may have
            # replaced the groups.
            node.depth = max(0, node.depth - isinstance(config, DisaggregateConfig))
            if not node.depth:
                self._quick.append(node)
            node.depth += isinstance(config, AggregateConfig)
            limit = config.max_failures if isinstance(config, PipeConfig) else None
            self._log.watch(node.name, node.counters, limit, gets_all=gets_all)
            tails = [node]
            if isinstance(config, PathVariantsConfig):
                tails = [tail for path in config.paths for tail in self._path(path, node)]
        return tails

    def _path(self, stages: Sequence[StageConfig], router: Node) -> list[Node]:
        if stages:
            return self._stages(stages, [router], gets_all=False)
        router.connect(path := EmptyPath(self._hub, ""))
        return [path]

    def _stage(self, config: StageConfig) -> Node:
        if isinstance(config, PipeConfig):
            return self._pipe(config)
        hub, name = self._hub, config.name
        if isinstance(config, AggregateConfig):
            size, drop_last = config.aggregator, config.drop_last
            if isinstance(size, int):
                return Aggregate(hub, name, size, drop_last=drop_last)
            return CustomAggregate(hub, size, name, self._share_threads(1), drop_last=drop_last)
        if isinstance(config, PathVariantsConfig):
            fn = routed(self._hooked(config.router, name), len(config.paths))
            return Switch(hub, fn, name, self._share_threads(1), ordered=True)
        assert isinstance(config, DisaggregateConfig)
        return FanOut(hub, iter, name, self._share_threads(1), ordered=True)

    def _pipe(self, config: PipeConfig) -> Node:
        fn, kind, name, timeout = config.fn, kind_of(config.fn), config.name, config.timeout
        threads = None
        executor = config.executor
        if isinstance(executor, ProcessPoolExecutorConfig):
            pool = WorkerProcesses(config, executor)
            self._pools.append(pool)
            # Each thread waits for a process. At the end of the run the processes are killed, which ends the
            # wait. The pool handles the timeout, because it can kill a process, unlike a call in a thread.
            fn, timeout = pool.call, None
            threads = WorkerThreads(self._hub, f"spdl_media {name}", pool.size)
        elif isinstance(executor, Executor | InterpreterPoolExecutorConfig):
            awaited = (DaskPool if is_dask(executor) else AwaitedPool)(self._hub, config)
            self._pools.append(awaited)
            # The event loop awaits the calls in the pool.
            fn = awaited.generate if kind == "generator" else awaited.call
        elif isinstance(executor, ThreadPoolExecutorConfig):
            size = executor.max_workers or config.concurrency
            threads = WorkerThreads(self._hub, f"spdl_media {name}", size)
        elif kind in ("function", "generator"):
            threads = self._share_threads(config.concurrency)
        node = (FanOut if kind in ("generator", "async_generator") else Stage)(
            self._hub,
            self._hooked(fn, name),
            name,
            threads,
            concurrency=config.concurrency,
            ordered=config.output_order == "input",
            timeout=timeout,
        )
        if config.around is not None:
            node.fn = config.around(node.fn, node)
        return node

    def _share_threads(self, concurrency: int) -> WorkerThreads:
        # The sum over all stages: they cannot use more threads.
        self._shared.size += concurrency
        return self._shared

    def _hooked(self, fn: Callable[[Any], Any], name: str) -> Callable[[Any], Any]:
        hook = self._hook_factory(name) if self._hook_factory is not None else None
        if hook is None:
            return fn
        # Check now: a hook of another class would fail only at the first item, in a thread.
        if not isinstance(hook, TaskHook):
            raise TypeError(
                f"task_hook_factory must return a TaskHook or None, and for stage {name!r} it returned "
                f"{short_repr(hook)}. Derive its class from TaskHook"
            )
        # Hooks for SPDL define these methods, which this library does not call.
        if foreign := [method for method in ("task_hook", "stage_hook") if hasattr(hook, method)]:
            raise TypeError(
                f"the hook of stage {name!r} has {' and '.join(foreign)}, which nothing calls. Override "
                "task_start, task_end, stage_start and stage_end instead"
            )
        self.hooks.append(hook)
        return hooked(fn, hook)


def _describe_call(slot: Slot, where: str = "") -> str:
    # The item of a source's slot is the source itself, so it says nothing.
    item = "" if isinstance(slot.stage, Source) else f" on {short_repr(slot.item)}"
    return f"{slot.stage.name} has run for {perf_counter() - slot.started_at:.1f} s{item}{where}"
