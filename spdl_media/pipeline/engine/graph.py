"""From a definition to nodes that are linked with each other."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import threading
from collections.abc import AsyncIterable, Callable, Iterable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from time import perf_counter
from typing import Any, TypeAlias

from spdl_media.pipeline.engine.ends import AsyncSource, Sink, Source, ThreadSource
from spdl_media.pipeline.engine.fan_out import AsyncFanOut, Disaggregate, FanOut, ThreadFanOut
from spdl_media.pipeline.engine.hub import Hub, Node, Slot
from spdl_media.pipeline.engine.nodes import (
    Aggregate,
    AsyncCalls,
    CallSpec,
    CallStage,
    CustomAggregate,
    Join,
    JoinInlet,
    PoolCalls,
    Switch,
    ThreadCalls,
)
from spdl_media.pipeline.engine.workers import (
    BorrowedThreads,
    FailureDesk,
    Threads,
    Worker,
    WorkerThreads,
)
from spdl_media.pipeline.executors import StagePool, ThreadPoolExecutorConfig
from spdl_media.pipeline.failures import Branches, Chain, FailureLog, short_repr
from spdl_media.pipeline.functions import TaskHook, hooked, kind_of
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

__all__ = (
    "Graph",
    "Reporter",
    "RunningCall",
    "TaskHookFactory",
    "Watchdog",
    "build_graph",
    "running_calls",
)

TaskHookFactory = Callable[[str], TaskHook | None]

# How many items may be on their way beyond what buffers and concurrencies add up to. Threads, the loop and
# the consumer hand each other several items at a time because of it. Groups count for what is in them: a
# batch may be big, and behind one there is little to gain.
SLACK = 64

Outlet: TypeAlias = Node | Source | Join
Entrance: TypeAlias = Node | Sink | JoinInlet


@dataclass
class Graph:
    """The nodes of a run, and what they use."""

    sink: Sink = field(init=False)
    sources: list[Source] = field(default_factory=list)
    stages: list[Node] = field(default_factory=list)
    threads: list[WorkerThreads] = field(default_factory=list)
    borrowed: list[BorrowedThreads] = field(default_factory=list)
    pools: list[StagePool] = field(default_factory=list)
    hooks: list[TaskHook] = field(default_factory=list)

    def start(self) -> None:
        """Start threads and sources. On the loop."""
        for threads in self.threads:
            threads.start()
        for source in self.sources:
            source.start()

    def stop(self) -> None:
        """Have threads and sources end after what they are doing. On the loop; waits for nothing."""
        self.wake_threads()
        self.close_pools()

    def wake_threads(self) -> None:
        """Have threads that wait look whether the run is over. From any thread, and as often as wanted."""
        for source in self.sources:
            source.stop()
        for threads in self.threads:
            threads.stop()

    def close_pools(self) -> None:
        """Shut down the pools that are the pipeline's own."""
        for pool in self.pools:
            pool.shutdown()

    def all_threads(self) -> Iterator[threading.Thread]:
        """All threads of the run but the one of the loop."""
        for source in self.sources:
            if isinstance(source, ThreadSource):
                yield source.thread
        for threads in self.threads:
            yield from threads.threads

    def workers(self) -> Iterator[Worker]:
        """All worker threads, borrowed ones included."""
        everyone: list[Threads] = [*self.threads, *self.borrowed]
        for threads in everyone:
            yield from list(threads.workers)

    def generators(self) -> Iterator[Iterator[Any]]:
        """Synchronous generators that are open."""
        for stage in self.stages:
            if isinstance(stage, ThreadFanOut):
                yield from stage.generators()


def build_graph(
    hub: Hub,
    config: PipelineConfig,
    *,
    num_threads: int,
    log: FailureLog,
    desk: FailureDesk,
    hook_factory: TaskHookFactory | None,
) -> Graph:
    """Make the nodes of a pipeline, link them, and open the pools of its stages.

    May block while processes start. When it raises, no pool is left open.
    """
    builder = _Builder(hub, config, num_threads, log, desk, hook_factory)
    try:
        builder.build(config)
    except BaseException:
        builder.graph.close_pools()
        raise
    return builder.graph


class _Builder:
    def __init__(
        self,
        hub: Hub,
        config: PipelineConfig,
        num_threads: int,
        log: FailureLog,
        desk: FailureDesk,
        hook_factory: TaskHookFactory | None,
    ) -> None:
        self._hub = hub
        self._log = log
        # Where the stages are that come next, for those who count what is lost.
        self._losses = log.chain
        self._desk = desk
        self._hook_factory = hook_factory
        # One of the items is the one that a source is being asked for.
        self._share = (SLACK - 1) // (_count_nodes(config) + 1)
        # How many items make a group of what comes out of the last node that was made, for groups within
        # groups the inner ones first.
        self._group_sizes: tuple[int, ...] = ()
        self.graph = Graph()
        self._shared = WorkerThreads(hub, "spdl_media worker", num_threads)
        self._num_threads = num_threads
        self._shared_concurrency = 0

    @property
    def _slack(self) -> int:
        """The share of the next node, in groups if items have been grouped."""
        return self._share // math.prod(self._group_sizes)

    def build(self, config: PipelineConfig) -> None:
        tail = self._chain(config)
        buffer_size = (config.sink or SinkConfig()).buffer_size
        continuous = isinstance(config.source, SourceConfig) and config.source.continuous
        self.graph.sink = Sink(self._hub, buffer_size, self._slack, continuous=continuous)
        _connect(tail, self.graph.sink)
        self._shared.size = min(self._num_threads, self._shared_concurrency)
        self.graph.threads.append(self._shared)
        if self._desk.threads is not None:
            self.graph.threads.append(self._desk.threads)

    def _chain(self, config: PipelineConfig) -> Outlet:
        """The nodes of a pipeline without its sink; returns the last."""
        if isinstance(config.source, MergeConfig):
            join = Join()
            sizes = []
            branches = self._branch_losses()
            for part in config.source.pipelines:
                self._group_sizes = ()
                sources: list[Source] = []
                with self._losses_in(branches.add(functools.partial(_num_given, sources))):
                    before = len(self.graph.sources)
                    _connect(self._chain(part), join.add_inlet())
                    sources += self.graph.sources[before:]
                sizes.append(self._group_sizes)
            self._group_sizes = _largest(sizes)
            return self._stages(config.stages, join)
        return self._stages(config.stages, self._source(config.source))

    def _source(self, config: SourceConfig) -> Source:
        ahead = max(1, self._slack)
        items = config.items
        # What can be iterated both ways is most often asynchronous with a fallback.
        kind: Any = AsyncSource if isinstance(items, AsyncIterable) else ThreadSource
        source: Source = kind(
            self._hub,
            items,
            continuous=config.continuous,
            ahead=ahead,
            name=f"spdl_media source {config.name}",
        )
        self.graph.sources.append(source)
        return source

    def _stages(self, stages: Iterable[StageConfig], tail: Outlet) -> Outlet:
        for stage in stages:
            if isinstance(stage, PathVariantsConfig):
                tail = self._paths(stage, tail)
            else:
                node = self._stage(stage)
                _connect(tail, node)
                tail = node
        return tail

    def _paths(self, config: PathVariantsConfig, tail: Outlet) -> Join:
        name = config.name
        router, _ = self._hooked(config.router, name)
        num_paths = len(config.paths)
        switch = Switch(
            self._hub, name, router, num_paths, self._slack, self._desk, self._shared_threads(1)
        )
        self._add(switch)
        _connect(tail, switch)
        join = Join()
        before, sizes = self._group_sizes, []
        branches = self._branch_losses()
        for index, path in enumerate(config.paths):
            self._group_sizes = before
            with self._losses_in(branches.add(functools.partial(switch.num_sent, index))):
                _connect(self._stages(path, switch), join.add_inlet())
            sizes.append(self._group_sizes)
        self._group_sizes = _largest(sizes)
        return join

    def _branch_losses(self) -> Branches:
        """Have what follows in branches counted by the part of the items that goes into each."""
        self._losses.parts.append(branches := Branches())
        return branches

    @contextmanager
    def _losses_in(self, chain: Chain) -> Iterator[None]:
        before, self._losses = self._losses, chain
        yield
        self._losses = before

    def _stage(self, config: StageConfig) -> Node:
        if isinstance(config, PipeConfig):
            return self._pipe(config)
        if isinstance(config, AggregateConfig):
            return self._aggregate(config)
        assert isinstance(config, DisaggregateConfig)
        spec = CallSpec(iter, config.name, slack=self._slack, ordered=True)
        # As they were put together: nobody knows what a function in between has made of a group.
        self._group_sizes = self._group_sizes[:-1]
        return self._add(
            Disaggregate(
                self._hub, spec, self._desk, self._shared_threads(1), ahead=max(1, self._slack)
            )
        )

    def _aggregate(self, config: AggregateConfig) -> Node:
        name, slack = config.name, self._slack
        if isinstance(config.aggregator, int):
            self._group_sizes += (config.aggregator,)
            return self._add(
                Aggregate(self._hub, name, config.aggregator, drop_last=config.drop_last)
            )
        # Nobody knows how many items are in its groups.
        self._group_sizes += (SLACK,)
        return self._add(
            CustomAggregate(
                self._hub,
                name,
                config.aggregator,
                drop_last=config.drop_last,
                slack=slack,
                desk=self._desk,
                threads=self._shared_threads(1),
            )
        )

    def _pipe(self, config: PipeConfig) -> Node:
        name = config.name
        kind = kind_of(config.fn)
        fn, hook = self._hooked(config.fn, name)
        spec = CallSpec(
            fn,
            name,
            concurrency=config.concurrency,
            slack=self._slack,
            ordered=config.output_order == "input",
            timeout=config.timeout,
        )
        hub, desk = self._hub, self._desk
        node: CallStage | FanOut
        if kind == "async":
            node = AsyncCalls(hub, spec, desk)
        elif kind == "async_generator":
            node = AsyncFanOut(hub, spec, desk)
        elif kind == "generator":
            node = ThreadFanOut(hub, spec, desk, self._threads(config, name))
        elif config.executor is None or isinstance(config.executor, ThreadPoolExecutorConfig):
            node = ThreadCalls(hub, spec, desk, self._threads(config, name))
        else:
            pool = open_pool(config)
            self.graph.pools.append(pool)
            if pool.keeps_time:
                spec = replace(spec, timeout=None)
            node = PoolCalls(hub, spec, desk, pool, hook)
        return self._add(node, config.max_failures)

    def _threads(self, config: PipeConfig, name: str) -> Threads:
        executor = config.executor
        if executor is None:
            return self._shared_threads(config.concurrency)
        if isinstance(executor, Executor):
            borrowed = BorrowedThreads(self._hub, executor, name)
            self.graph.borrowed.append(borrowed)
            return borrowed
        assert isinstance(executor, ThreadPoolExecutorConfig)
        initializer = None
        if executor.initializer is not None:
            initializer = functools.partial(executor.initializer, *executor.initargs)
        size = executor.max_workers or config.concurrency
        threads = WorkerThreads(self._hub, f"spdl_media {name}", size, initializer, stage=name)
        self.graph.threads.append(threads)
        return threads

    def _shared_threads(self, concurrency: int) -> WorkerThreads:
        self._shared_concurrency += concurrency
        return self._shared

    def _hooked(
        self, fn: Callable[[Any], Any], name: str
    ) -> tuple[Callable[[Any], Any], TaskHook | None]:
        hook = self._hook_factory(name) if self._hook_factory is not None else None
        if hook is None:
            return fn, None
        if not isinstance(hook, TaskHook):
            raise TypeError(
                f"task_hook_factory must return a TaskHook or None, and for stage {name!r} it returned "
                f"{short_repr(hook)}. Derive its class from TaskHook"
            )
        self.graph.hooks.append(hook)
        return hooked(fn, kind_of(fn), hook), hook

    def _add(self, node: Node, max_failures: float | None = None) -> Node:
        self.graph.stages.append(node)
        self._log.watch(node.name, node.counters, max_failures, chain=self._losses)
        return node


def _connect(tail: Outlet, inlet: Entrance) -> None:
    if isinstance(tail, Switch):
        tail.paths.append(inlet)
    else:
        tail.next = inlet
    inlet.upstream = tail


def _largest(sizes: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """The sizes of groups that come by several ways, the largest of each level. Outer groups are last."""
    levels = zip_longest(*(reversed(one) for one in sizes), fillvalue=1)
    return tuple(map(max, levels))[::-1]


def _num_given(sources: list[Source]) -> int:
    return sum(source.given for source in sources)


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
