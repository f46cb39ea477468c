"""From a definition to nodes that are linked with each other, and what can be read of them."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import threading
from collections.abc import AsyncIterable, Callable, Iterable, Iterator
from concurrent.futures import Executor
from itertools import zip_longest
from time import perf_counter
from typing import Any, TypeAlias

from spdl_media.pipeline.engine.ends import AsyncSource, Sink, Source, ThreadSource
from spdl_media.pipeline.engine.fan_out import AsyncFanOut, Disaggregate, ThreadFanOut
from spdl_media.pipeline.engine.hub import Hub, Node, Slot
from spdl_media.pipeline.engine.nodes import (
    Aggregate,
    AsyncCalls,
    CallSpec,
    CustomAggregate,
    Join,
    Switch,
    ThreadCalls,
    call_in_pool,
    routed,
)
from spdl_media.pipeline.engine.workers import (
    BorrowedThreads,
    FailureHandler,
    Threads,
    WorkerThreads,
)
from spdl_media.pipeline.executors import (
    StagePool,
    TaskHook,
    ThreadPoolExecutorConfig,
    hooked,
    kind_of,
)
from spdl_media.pipeline.failures import Branches, Chain, FailureLog, short_repr
from spdl_media.pipeline.processes import open_pool
from spdl_media.pipeline.stages import (
    AggregateConfig,
    DisaggregateConfig,
    MergeConfig,
    PathVariantsConfig,
    PipeConfig,
    PipelineConfig,
    SinkConfig,
    SourceConfig,
    StageConfig,
)
from spdl_media.pipeline.stats import PipelineStatistics, SinkStatistics, StageCounters

__all__ = ("Graph", "Reporter", "TaskHookFactory", "Watchdog")

LOG = logging.getLogger("spdl_media.pipeline")

TaskHookFactory = Callable[[str], TaskHook | None]

# How many items may be on their way beyond what buffers and concurrencies add up to. Threads, the
# loop and the consumer hand each other several items at a time because of it. Groups count for what
# is in them: a batch may be big, and behind one there is little to gain.
SLACK = 64

# Seconds without an item after which the log says what runs.
SILENCE = 60.0

Outlet: TypeAlias = Node | Join


class Graph:
    """The nodes of a run, and the threads, pools and hooks that they use.

    Making it opens the pools of the stages, and may block while processes start. When it raises, no
    pool is left open.

    Args:
        hub: Where nodes and threads meet.
        config: The definition.
        num_threads: Threads that all stages share.
        log: Where stages are watched for failures.
        handler: What happens to failures.
        hook_factory: Makes the hook of each stage.
    """

    def __init__(
        self,
        hub: Hub,
        config: PipelineConfig,
        *,
        num_threads: int,
        log: FailureLog,
        handler: FailureHandler,
        hook_factory: TaskHookFactory | None,
    ) -> None:
        self.sources: list[Source] = []
        self.stages: list[Node] = []
        self.hooks: list[TaskHook] = []
        self._threads: list[Threads] = []
        self._pools: list[StagePool] = []
        self._hub = hub
        self._log = log
        # Where the stages are that come next, for those who count what is lost.
        self._drop_rates = log.chain
        self._hook_factory = hook_factory
        # One of the items is the one that a source is being asked for.
        self._share = (SLACK - 1) // (_count_nodes(config) + 1)
        # How many items make a group of what comes out of the last node that was made, for groups
        # within groups the inner ones first.
        self._group_sizes: tuple[int, ...] = ()
        self._shared = WorkerThreads(hub, "spdl_media worker")
        self._threads.append(self._shared)
        if handler.threads is not None:
            self._threads.append(handler.threads)
        try:
            self._build(config)
        except BaseException:
            self.close_pools()
            raise
        # Each stage has added what it can use, and threads beyond that would idle.
        self._shared.size = min(num_threads, self._shared.size)

    def start(self) -> None:
        """Start threads and sources. On the loop."""
        for threads in self._own_threads():
            threads.start()
        for source in self.sources:
            source.start()

    def wake_threads(self) -> None:
        """Have threads that wait look whether the run is over. From any thread, and as often as wanted."""
        for source in self.sources:
            source.stop()
        for threads in self._own_threads():
            threads.stop()

    def close_pools(self) -> None:
        """Shut down the pools that are the pipeline's own."""
        for pool in self._pools:
            pool.shutdown()

    def all_threads(self) -> list[threading.Thread]:
        """All threads of the run but the one of the loop."""
        sources = [source.thread for source in self.sources if isinstance(source, ThreadSource)]
        # Borrowed threads belong to an executor of the user's, who waits for them.
        return sources + [thread for threads in self._own_threads() for thread in threads.threads]

    def running_calls(self) -> Iterator[str]:
        """Describe all calls of functions and sources that have not returned. From any thread."""
        for source in self.sources:
            if (since := source.asking_since) is not None:
                yield _running("source", since, thread=getattr(source, "thread", None))
        for threads in self._threads:
            for worker in list(threads.workers):
                if (slot := worker.slot) is not None:
                    yield _running_slot(slot, worker)
        for stage in self.stages:
            yield from map(_running_slot, stage.running())

    def generators(self) -> Iterator[Iterator[Any]]:
        """Synchronous generators that are open."""
        for stage in self.stages:
            if isinstance(stage, ThreadFanOut):
                yield from stage.generators()

    @property
    def _slack(self) -> int:
        """The share of the next node, in groups if items have been grouped."""
        return self._share // math.prod(self._group_sizes)

    def _own_threads(self) -> list[WorkerThreads]:
        return [threads for threads in self._threads if isinstance(threads, WorkerThreads)]

    def _build(self, config: PipelineConfig) -> None:
        tail = self._chain(config)
        buffer_size = (config.sink or SinkConfig()).buffer_size
        continuous = isinstance(config.source, SourceConfig) and config.source.continuous
        self.sink = Sink(self._hub, buffer_size, self._slack, continuous=continuous)
        tail.connect(self.sink)

    def _chain(self, config: PipelineConfig) -> Outlet:
        """Make the nodes of a pipeline without its sink; returns the last."""
        if isinstance(config.source, SourceConfig):
            # What can be iterated both ways is most often asynchronous with a fallback.
            is_async = isinstance(config.source.items, AsyncIterable)
            kind = AsyncSource if is_async else ThreadSource
            source: Source = kind(self._hub, config.source, max(1, self._slack))
            self.sources.append(source)
            return self._stages(config.stages, source)
        parts = [functools.partial(self._merged, part) for part in config.source.pipelines]
        return self._stages(config.stages, self._branches(parts))

    def _merged(self, config: PipelineConfig) -> tuple[Outlet, Callable[[], int]]:
        num_before = len(self.sources)
        tail = self._chain(config)
        # A merged pipeline may itself be a merge, with several sources.
        sources = self.sources[num_before:]
        return tail, lambda: sum(source.given for source in sources)

    def _stages(self, stages: Iterable[StageConfig], tail: Outlet) -> Outlet:
        for config in stages:
            if isinstance(config, PathVariantsConfig):
                tail = self._paths(config, tail)
            else:
                node = self._stage(config)
                tail.connect(node)
                tail = node
        return tail

    def _paths(self, config: PathVariantsConfig, tail: Outlet) -> Join:
        num_paths = len(config.paths)
        router = routed(self._hooked(config.router, config.name), num_paths)
        spec = CallSpec(router, config.name, slack=self._slack, ordered=True)
        switch = Switch(self._hub, spec, self._share_threads(1), num_paths)
        self._add(switch)
        tail.connect(switch)

        def path(index: int) -> tuple[Outlet, Callable[[], int]]:
            return self._stages(config.paths[index], switch), lambda: switch.num_sent[index]

        return self._branches(functools.partial(path, index) for index in range(num_paths))

    def _branches(self, branches: Iterable[Callable[[], tuple[Outlet, Callable[[], int]]]]) -> Join:
        """Make chains side by side that meet in a join.

        Each function makes one; it returns the last node and what counts the items that go into it.
        """
        join = Join()
        self._drop_rates.parts.append(rates := Branches())
        rates_before, sizes_before = self._drop_rates, self._group_sizes
        sizes = []
        for make in branches:
            self._drop_rates, self._group_sizes = Chain(), sizes_before
            tail, number = make()
            tail.connect(join.add_inlet())
            rates.chains.append((number, self._drop_rates))
            sizes.append(self._group_sizes)
        self._drop_rates = rates_before
        # The largest group of each level. Outer groups are last.
        levels = zip_longest(*(reversed(one) for one in sizes), fillvalue=1)
        self._group_sizes = tuple(map(max, levels))[::-1]
        return join

    def _stage(self, config: StageConfig) -> Node:
        if isinstance(config, PipeConfig):
            return self._add(self._pipe(config), config.max_failures)
        slack = self._slack
        spec = CallSpec(iter, config.name, slack=slack, ordered=True)
        if not isinstance(config, AggregateConfig):
            assert isinstance(config, DisaggregateConfig)
            # As they were put together: nobody knows what a function in between has made of a group.
            self._group_sizes = self._group_sizes[:-1]
            threads = self._share_threads(1)
            return self._add(Disaggregate(self._hub, spec, threads, ahead=max(1, self._slack)))
        size, drop_last = config.aggregator, config.drop_last
        # Nobody knows how many items are in the groups of an Aggregator.
        self._group_sizes += (size if isinstance(size, int) else SLACK,)
        if isinstance(size, int):
            return self._add(Aggregate(self._hub, config.name, size, drop_last=drop_last))
        threads = self._share_threads(1)
        return self._add(CustomAggregate(self._hub, spec, threads, size, drop_last=drop_last))

    def _pipe(self, config: PipeConfig) -> Node:
        fn, kind, timeout = config.fn, kind_of(config.fn), config.timeout
        if kind == "function" and not isinstance(config.executor, ThreadPoolExecutorConfig | None):
            pool = open_pool(config)
            self._pools.append(pool)
            # For the event loop, a call in a pool is something to await.
            fn, kind = call_in_pool(self._hub, config.name, pool), "async"
            # Our processes are killed when it is over; awaiting less would leave them at work.
            timeout = None if pool.keeps_time else timeout
        spec = CallSpec(
            self._hooked(fn, config.name),
            config.name,
            concurrency=config.concurrency,
            slack=self._slack,
            ordered=config.output_order == "input",
            timeout=timeout,
        )
        if kind == "async":
            return AsyncCalls(self._hub, spec)
        if kind == "async_generator":
            return AsyncFanOut(self._hub, spec)
        threaded = ThreadFanOut if kind == "generator" else ThreadCalls
        return threaded(self._hub, spec, self._threads_of(config))

    def _threads_of(self, config: PipeConfig) -> Threads:
        executor, name = config.executor, config.name
        if executor is None:
            return self._share_threads(config.concurrency)
        threads: Threads
        if isinstance(executor, Executor):
            threads = BorrowedThreads(self._hub, name, executor)
        else:
            assert isinstance(executor, ThreadPoolExecutorConfig)
            initializer = None
            if executor.initializer is not None:
                initializer = functools.partial(executor.initializer, *executor.initargs)
            size = executor.max_workers or config.concurrency
            threads = WorkerThreads(self._hub, f"spdl_media {name}", size, initializer, stage=name)
        self._threads.append(threads)
        return threads

    def _share_threads(self, concurrency: int) -> WorkerThreads:
        # No more threads than all stages together can use.
        self._shared.size += concurrency
        return self._shared

    def _hooked(self, fn: Callable[[Any], Any], name: str) -> Callable[[Any], Any]:
        hook = self._hook_factory(name) if self._hook_factory is not None else None
        if hook is None:
            return fn
        # A hook of another class would fail at the first item, in a thread.
        if not isinstance(hook, TaskHook):
            raise TypeError(
                f"task_hook_factory must return a TaskHook or None, and for stage {name!r} it returned "
                f"{short_repr(hook)}. Derive its class from TaskHook"
            )
        self.hooks.append(hook)
        return hooked(fn, hook)

    def _add(self, node: Node, max_failures: float | None = None) -> Node:
        self.stages.append(node)
        self._log.watch(node.name, node.counters, max_failures, chain=self._drop_rates)
        return node


def _count_nodes(config: PipelineConfig) -> int:
    """How many nodes share the slack, without the sink."""
    stages = _count_stages(config.stages)
    if isinstance(config.source, MergeConfig):
        return stages + sum(map(_count_nodes, config.source.pipelines))
    return stages + 1


def _count_stages(stages: Iterable[StageConfig]) -> int:
    return sum(
        1 + sum(map(_count_stages, stage.paths)) if isinstance(stage, PathVariantsConfig) else 1
        for stage in stages
    )


def _running_slot(slot: Slot, thread: Any = None) -> str:
    return _running(slot.stage.name, slot.started_at, short_repr(slot.item), thread)


def _running(stage: str, started_at: float, item: str = "", thread: Any = None) -> str:
    seconds = perf_counter() - started_at
    on = f" on {item}" if item else ""
    where = f" in thread {thread.name}" if thread is not None else ""
    return f"{stage} has run for {seconds:.1f} s{on}{where}"


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


class Watchdog:
    """Writes one line to the log when consumers wait and nothing has been delivered for a time.

    The event loop looks now and then, and so do consumers while they wait, since what blocks may be
    the loop itself.
    """

    def __init__(self, graph: Graph) -> None:
        self.silence = SILENCE
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
        if not sink.is_awaited():
            return self.silence
        if quiet < self.silence:
            return self.silence - quiet
        with self._lock:
            # Loop and consumers may both come to tell it.
            if self._told_of != last:
                self._told_of = last
                calls = "; ".join(self._graph.running_calls()) or "no call runs"
                LOG.warning("the pipeline has delivered nothing for %.0f s: %s", quiet, calls)
        return self.silence
