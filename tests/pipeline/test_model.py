"""Random chains against a sequential model: same results, same order where it is promised, no thread left.

``PYTHONPATH=tests python tests/pipeline/test_model.py 20000`` runs 20,000 chains, and counts their features.
"""

from __future__ import annotations

import asyncio
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
from effort import examples
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from spdl_media.pipeline import (
    PipelineBuilder,
    PipelineStopped,
    ProcessPoolExecutorConfig,
    ThreadPoolExecutorConfig,
)
from spdl_media.pipeline.pipeline import Pipeline

WAIT = 60


class BadItemError(Exception):
    """The exception of random failures."""


@dataclass(frozen=True)
class Work:
    """The work of a stage on an item. It depends on the item only, so that the model computes the same.

    Groups from earlier stages are mapped, but never fail and are never dropped or multiplied, because their
    members may depend on the order of completion.
    """

    seed: int
    fail_each: int
    drop_each: int
    fan_out: bool

    def __call__(self, item: Any) -> list[Any]:
        if isinstance(item, list):
            return [self._mapped(item)]
        chance = hash((self.seed, item)) % 1000
        if self.fail_each and chance % self.fail_each == 0:
            raise BadItemError(item)
        if self.drop_each and chance % self.drop_each == 1:
            return []
        number = chance % 4 if self.fan_out else 1
        return [3 * item + copy for copy in range(number)]

    def _mapped(self, item: Any) -> Any:
        return [self._mapped(one) for one in item] if isinstance(item, list) else 3 * item


@dataclass(frozen=True)
class Call:
    """The work as a callable that can be pickled for processes."""

    work: Work

    def __call__(self, item: Any) -> Any:
        result = self.work(item)
        return result[0] if result else None


def as_callable(work: Work, kind: str) -> Callable[[Any], Any]:
    """Return the work as a function or generator of the given kind."""
    call = Call(work)

    async def call_async(item: Any) -> Any:
        if work.seed % 2:
            await asyncio.sleep(0)
        return call(item)

    def generate(item: Any) -> Iterator[Any]:
        yield from work(item)

    async def generate_async(item: Any) -> AsyncIterator[Any]:
        for value in work(item):
            if work.seed % 2:
                await asyncio.sleep(0)
            yield value

    kinds = {
        "function": call,
        "async": call_async,
        "generator": generate,
        "async generator": generate_async,
    }
    return kinds[kind]


@dataclass(frozen=True)
class Pipe:
    kind: str
    pool: str
    work: Work
    concurrency: int
    order: Any

    def add(self, builder: PipelineBuilder[Any], callers: Executor) -> None:
        fn = as_callable(self.work, self.kind)
        executor = {
            "own": ThreadPoolExecutorConfig(max_workers=2),
            "callers": callers,
            "processes": ProcessPoolExecutorConfig(max_workers=1),
        }.get(self.pool)
        used[f"{self.kind} {self.pool}".rstrip()] += 1
        builder.pipe(fn, concurrency=self.concurrency, output_order=self.order, executor=executor)

    def run(self, model: Model) -> None:
        results = []
        for item in model.items:
            try:
                results += self.work(item)
            except BadItemError:
                model.failures += 1
        model.items = results
        model.is_ordered &= self.concurrency == 1 or self.order == "input"


@dataclass(frozen=True)
class Aggregate:
    size: int
    drop_last: bool

    def add(self, builder: PipelineBuilder[Any], callers: Executor) -> None:
        used["aggregate"] += 1
        builder.aggregate(self.size, drop_last=self.drop_last)

    def run(self, model: Model) -> None:
        items, size = model.items, self.size
        model.items = [items[start : start + size] for start in range(0, len(items), size)]
        if self.drop_last and model.items and len(model.items[-1]) < size:
            if not model.is_ordered:
                model.is_exact = False  # the members of the last group are not known
            model.items.pop()


@dataclass(frozen=True)
class Disaggregate:
    def add(self, builder: PipelineBuilder[Any], callers: Executor) -> None:
        used["disaggregate"] += 1
        builder.pipe(lambda item: item if isinstance(item, list) else [item]).disaggregate()

    def run(self, model: Model) -> None:
        if not model.is_ordered and any(isinstance(item, list) for item in model.items):
            # Members of groups become single items for later stages.
            model.is_ordered = False
        model.items = [
            value for item in model.items for value in (item if isinstance(item, list) else [item])
        ]


@dataclass(frozen=True)
class Paths:
    first: Pipe
    second: Pipe

    def add(self, builder: PipelineBuilder[Any], callers: Executor) -> None:
        used["paths"] += 1
        # The last path stays empty.
        paths = [PipelineBuilder[Any]() for _ in range(3)]
        self.first.add(paths[0], callers)
        self.second.add(paths[1], callers)
        builder.path_variants(self.route, paths)

    @staticmethod
    def route(item: Any) -> int:
        return 0 if isinstance(item, list) else item % 3

    def run(self, model: Model) -> None:
        results = [item for item in model.items if self.route(item) == 2]
        for index, path in enumerate((self.first, self.second)):
            part = Model([item for item in model.items if self.route(item) == index])
            path.run(part)
            results += part.items
            model.failures += part.failures
        model.items = results
        model.is_ordered = False


class Model:
    """Computes the expected output of a chain, one stage after the other."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self.failures = 0
        self.is_ordered = True
        self.is_exact = True


def flattened(items: Any) -> Counter[Any]:
    """Count the members of all groups, independent of the grouping."""
    if not isinstance(items, list):
        return Counter([items])
    return sum((flattened(item) for item in items), Counter())


works = st.builds(
    Work,
    seed=st.integers(0, 9),
    fail_each=st.sampled_from([0, 0, 2, 3, 10]),
    drop_each=st.sampled_from([0, 0, 3]),
    fan_out=st.just(False),
)
orders = st.sampled_from(["completion", "input"])


def pipes(
    kinds: list[tuple[str, str]], works: st.SearchStrategy[Work], most: int
) -> st.SearchStrategy[Pipe]:
    """Draw a function stage of one of some kinds, with its executor."""
    return st.sampled_from(kinds).flatmap(
        lambda kind: st.builds(
            Pipe, st.just(kind[0]), st.just(kind[1]), works, st.integers(1, most), orders
        )
    )


calls = pipes(
    [
        *[("function", ""), ("async", ""), ("function", ""), ("async", "")],
        *[("function", "own"), ("function", "callers")],
    ],
    works,
    5,
)
in_processes = pipes([("function", "processes")], works, 2)
fan_outs = pipes(
    [("generator", ""), ("async generator", ""), ("generator", "own"), ("generator", "callers")],
    works.map(lambda work: Work(work.seed, work.fail_each, work.drop_each, fan_out=True)),
    4,
)
stages = st.one_of(
    calls,
    calls,
    fan_outs,
    # Rarely: a process takes as long to start as all else in a program.
    st.integers(0, 63).flatmap(lambda number: calls if number else in_processes),
    st.builds(Aggregate, st.integers(1, 7), st.booleans()),
    st.builds(Disaggregate),
    st.builds(Paths, calls, fan_outs),
)


class PipelineMachine(RuleBasedStateMachine):
    """Starts, reads, leaves, continues and stops a pipeline at random, and checks the items."""

    pipeline: Pipeline[Any] | None = None

    @initialize(
        chain=st.lists(stages, max_size=5),
        length=st.sampled_from([0, 1, 5, 40, 150]),
        buffer_size=st.integers(1, 5),
        num_threads=st.integers(1, 4),
        source=st.sampled_from(["sync", "sync", "async", "merge"]),
        on_failure=st.booleans(),
    )
    def build(
        self,
        chain: list[Any],
        length: int,
        buffer_size: int,
        num_threads: int,
        source: str,
        on_failure: bool,
    ) -> None:
        class Numbers:
            async def __aiter__(self) -> AsyncIterator[int]:
                for number in range(length):
                    yield number

        used["programs"] += 1
        used[f"{source} source"] += 1
        self.model = Model(list(range(length)))
        if source == "merge":
            odd_and_even = [range(start, length, 2) for start in (0, 1)]
            parts = [PipelineBuilder[Any]().add_source(part) for part in odd_and_even]
            builder = PipelineBuilder[Any]().merge(*parts)
            self.model.is_ordered = False
        else:
            numbers: Any = Numbers() if source == "async" else range(length)
            builder = PipelineBuilder[Any]().add_source(numbers)
        self.callers = ThreadPoolExecutor(2)
        for stage in chain:
            stage.add(builder, self.callers)
            stage.run(self.model)
        config = builder.add_sink(buffer_size).get_config()
        self.reported: list[Any] | None = [] if on_failure else None
        self.pipeline = Pipeline(
            config,
            num_threads=num_threads,
            max_failures=float("inf"),
            on_failure=(lambda record, item: self.reported.append(item)) if on_failure else None,
        )
        self.running = False

    @precondition(lambda self: not self.running)
    @rule()
    def start(self) -> None:
        assert self.pipeline is not None
        self.pipeline.start()
        self.running, self.taken, self.epochs, self.ended = True, [], 0, False

    @precondition(lambda self: self.running)
    @rule()
    def stop(self) -> None:
        assert self.pipeline is not None
        self.pipeline.stop()
        self.running = False

    @precondition(lambda self: self.running)
    @rule(count=st.integers(1, 30))
    def take(self, count: int) -> None:
        assert self.pipeline is not None
        for _ in range(count):
            try:
                self.taken.append(self.pipeline.get_item(timeout=WAIT))
            except PipelineStopped:
                self.end_epoch()
                return
        self.check_part(self.taken)

    @precondition(lambda self: self.running)
    @rule(count=st.integers(1, 30))
    def iterate_and_break(self, count: int) -> None:
        assert self.pipeline is not None
        self.begin_epoch()
        for number, item in enumerate(self.pipeline.get_iterator(timeout=WAIT), 1):
            self.taken.append(item)
            if number == count:
                self.check_part(self.taken)
                return
        self.end_epoch()

    @precondition(lambda self: self.running)
    @rule()
    def iterate_to_the_end(self) -> None:
        assert self.pipeline is not None
        self.begin_epoch()
        self.taken.extend(self.pipeline.get_iterator(timeout=WAIT))
        self.end_epoch()

    @precondition(lambda self: self.running)
    @rule()
    def iterate_asynchronously(self) -> None:
        async def collect() -> None:
            self.taken.extend([item async for item in self.pipeline])

        used["consumed by a task"] += 1
        self.begin_epoch()
        asyncio.run(asyncio.wait_for(collect(), WAIT))
        self.end_epoch()

    @precondition(lambda self: self.running)
    @rule(number=st.integers(2, 4))
    def take_by_several(self, number: int) -> None:
        pipeline = self.pipeline
        assert pipeline is not None
        parts: list[list[Any]] = [[] for _ in range(number)]

        def consume(part: list[Any]) -> None:
            try:
                while True:
                    part.append(pipeline.get_item(timeout=WAIT))
            except PipelineStopped:
                part.append(PipelineStopped)

        used["several consumers"] += 1
        self.begin_epoch()
        # The first iteration begins an epoch if the last one has ended; each later one would begin another.
        for item in pipeline.get_iterator(timeout=WAIT):
            self.taken.append(item)
            break
        else:
            self.end_epoch()
            return
        threads = [threading.Thread(target=consume, args=(part,)) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(part.pop() is PipelineStopped for part in parts)
        self.end_epoch(parts)

    @precondition(lambda self: not self.running)
    @rule()
    def iterate_alone(self) -> None:
        assert self.pipeline is not None
        self.check_all(list(self.pipeline.get_iterator(timeout=WAIT)))
        assert self.num_failures() == self.model.failures or not self.counts_are_told()

    @precondition(lambda self: not self.running)
    @rule(count=st.integers(1, 10))
    def break_off_alone(self, count: int) -> None:
        assert self.pipeline is not None
        seen = []
        for item in self.pipeline.get_iterator(timeout=WAIT):
            seen.append(item)
            if len(seen) == count:
                break
        self.check_part(seen)

    @invariant()
    def has_no_threads_unless_it_runs(self) -> None:
        if self.pipeline is not None and not self.running:
            assert pipeline_threads() == []

    def begin_epoch(self) -> None:
        if self.ended:
            self.ended, self.taken = False, []

    def end_epoch(self, parts: list[list[Any]] | None = None) -> None:
        if parts is None:
            self.check_all(self.taken)
        else:
            # Each item went to exactly one consumer, in order.
            for part in parts:
                in_order = iter(self.model.items)
                assert not self.model.is_ordered or all(item in in_order for item in part)
            self.taken.extend(item for part in parts for item in part)
            self.check_all(self.taken, is_ordered=False)
            if self.model.is_ordered:
                # The order of the same epoch for later checks, as the consumers have divided it.
                self.taken = list(self.model.items)
        if not self.ended:
            self.ended = True
            self.epochs += 1
        if self.counts_are_told():
            assert self.num_failures() == self.epochs * self.model.failures
            assert self.reported is None or len(self.reported) >= self.num_failures()

    def num_failures(self) -> int:
        assert self.pipeline is not None
        return sum(self.pipeline.failure_counts.values())

    def counts_are_told(self) -> bool:
        return self.model.is_exact

    def check_all(self, items: list[Any], *, is_ordered: bool = True) -> None:
        if self.model.is_ordered and is_ordered:
            assert items == self.model.items
        elif self.model.is_exact:
            assert flattened(items) == flattened(self.model.items)
            assert len(items) == len(self.model.items)

    def check_part(self, items: list[Any]) -> None:
        if self.model.is_ordered:
            assert items == self.model.items[: len(items)]
        elif self.model.is_exact:
            assert flattened(items) <= flattened(self.model.items)

    def teardown(self) -> None:
        if self.pipeline is not None:
            self.pipeline.stop()
            self.callers.shutdown()
        assert pipeline_threads() == []


def pipeline_threads() -> list[str]:
    # On a busy machine, killing a process may take this long.
    deadline = time.monotonic() + WAIT
    while time.monotonic() < deadline:
        # Without those that free the memory of devices, "spdl_media (device, stream)", which stay.
        found = [one.name for one in threading.enumerate()]
        names = [name for name in found if re.match(r"spdl_media(?! \()", name)]
        if not names:
            break
        time.sleep(0.001)
    return names


#: How often each feature was part of a program.
used: Counter[str] = Counter()


def try_programs(count: int) -> None:
    run_state_machine_as_test(
        PipelineMachine,
        settings=settings(
            max_examples=count, stateful_step_count=12, deadline=None, print_blob=True
        ),
    )


def test_random_pipelines_do_as_the_model_does() -> None:
    try_programs(examples(60))


if __name__ == "__main__":
    start = time.monotonic()
    try_programs(int(sys.argv[1]))
    print(f"{time.monotonic() - start:.0f} s, {dict(used.most_common())}")
