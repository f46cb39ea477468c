"""Random chains against a sequential model: same results, same order where it is promised, no thread left."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
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

from spdl_media.pipeline import PipelineBuilder, PipelineStopped
from spdl_media.pipeline.pipeline import Pipeline

WAIT = 20


class BadItemError(Exception):
    """What random failures raise."""


@dataclass(frozen=True)
class Work:
    """What a stage does with an item: decided by the item alone, so that the model decides the same.

    Groups of items that an earlier stage made are mapped and never fail, are never dropped, and are never
    multiplied: what is in them may depend on the order of completion.
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


def as_callable(work: Work, kind: str) -> Callable[[Any], Any]:
    """The work as a function or generator of a kind."""

    def call(item: Any) -> Any:
        result = work(item)
        return result[0] if result else None

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
    work: Work
    concurrency: int
    order: Any

    def add(self, builder: PipelineBuilder[Any]) -> None:
        fn = as_callable(self.work, self.kind)
        builder.pipe(fn, concurrency=self.concurrency, output_order=self.order)

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

    def add(self, builder: PipelineBuilder[Any]) -> None:
        builder.aggregate(self.size, drop_last=self.drop_last)

    def run(self, model: Model) -> None:
        items, size = model.items, self.size
        model.items = [items[start : start + size] for start in range(0, len(items), size)]
        if self.drop_last and model.items and len(model.items[-1]) < size:
            if not model.is_ordered:
                model.is_exact = False  # which items the last group had is not told
            model.items.pop()


@dataclass(frozen=True)
class Disaggregate:
    def add(self, builder: PipelineBuilder[Any]) -> None:
        builder.pipe(lambda item: item if isinstance(item, list) else [item]).disaggregate()

    def run(self, model: Model) -> None:
        if not model.is_ordered and any(isinstance(item, list) for item in model.items):
            # Members of groups become items of their own, which later stages treat as such.
            model.is_ordered = False
        model.items = [
            value for item in model.items for value in (item if isinstance(item, list) else [item])
        ]


@dataclass(frozen=True)
class Paths:
    first: Pipe
    second: Pipe

    def add(self, builder: PipelineBuilder[Any]) -> None:
        paths = [PipelineBuilder[Any](), PipelineBuilder[Any]()]
        self.first.add(paths[0])
        self.second.add(paths[1])
        builder.path_variants(self.route, paths)

    @staticmethod
    def route(item: Any) -> int:
        return 0 if isinstance(item, list) else item % 2

    def run(self, model: Model) -> None:
        results: list[Any] = []
        for index, path in enumerate((self.first, self.second)):
            part = Model([item for item in model.items if self.route(item) == index])
            path.run(part)
            results += part.items
            model.failures += part.failures
        model.items = results
        model.is_ordered = False


class Model:
    """What comes out of a chain, one stage after the other."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self.failures = 0
        self.is_ordered = True
        self.is_exact = True


def flattened(items: Any) -> Counter[Any]:
    """The members of all groups, however they are grouped."""
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
calls = st.builds(Pipe, st.sampled_from(["function", "async"]), works, st.integers(1, 5), orders)
fan_outs = st.builds(
    Pipe,
    st.sampled_from(["generator", "async generator"]),
    works.map(lambda work: Work(work.seed, work.fail_each, work.drop_each, fan_out=True)),
    st.integers(1, 4),
    orders,
)
stages = st.one_of(
    calls,
    calls,
    fan_outs,
    st.builds(Aggregate, st.integers(1, 7), st.booleans()),
    st.builds(Disaggregate),
    st.builds(Paths, calls, fan_outs),
)


class PipelineMachine(RuleBasedStateMachine):
    """A pipeline that is started, read, broken off, continued and stopped, and what should come of it."""

    pipeline: Pipeline[Any] | None = None

    @initialize(
        chain=st.lists(stages, max_size=5),
        length=st.sampled_from([0, 1, 5, 40, 150]),
        buffer_size=st.integers(1, 5),
        num_threads=st.integers(1, 4),
        is_async=st.booleans(),
    )
    def build(
        self, chain: list[Any], length: int, buffer_size: int, num_threads: int, is_async: bool
    ) -> None:
        class Numbers:
            async def __aiter__(self) -> AsyncIterator[int]:
                for number in range(length):
                    yield number

        builder = PipelineBuilder[Any]().add_source(Numbers() if is_async else range(length))
        self.model = Model(list(range(length)))
        for stage in chain:
            stage.add(builder)
            stage.run(self.model)
        config = builder.add_sink(buffer_size).get_config()
        self.pipeline = Pipeline(config, num_threads=num_threads, max_failures=float("inf"))
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

    def end_epoch(self) -> None:
        self.check_all(self.taken)
        if not self.ended:
            self.ended = True
            self.epochs += 1
        if self.counts_are_told():
            assert self.num_failures() == self.epochs * self.model.failures

    def num_failures(self) -> int:
        assert self.pipeline is not None
        return sum(self.pipeline.failure_counts.values())

    def counts_are_told(self) -> bool:
        return self.model.is_exact

    def check_all(self, items: list[Any]) -> None:
        if self.model.is_ordered:
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
        assert pipeline_threads() == []


def pipeline_threads() -> list[str]:
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        names = [one.name for one in threading.enumerate() if one.name.startswith("spdl_media")]
        if not names:
            break
    return names


@pytest.mark.timeout(180)
def test_random_pipelines_do_as_the_model_does() -> None:
    run_state_machine_as_test(
        PipelineMachine,
        settings=settings(
            max_examples=examples(80), stateful_step_count=12, deadline=None, print_blob=True
        ),
    )
