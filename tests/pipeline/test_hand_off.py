"""Distribution of items to threads: the fast hand-off keeps all promises of concurrency and fairness."""

from __future__ import annotations

import asyncio
import hashlib
import resource
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from effort import each, several_tries

from spdl_media.pipeline import PipelineBuilder, ThreadPoolExecutorConfig
from spdl_media.pipeline.engine.hub import Node
from spdl_media.pipeline.engine.workers import WorkerThreads

WAIT = 60


class Meter:
    """Context manager that counts how many threads or tasks are inside at once."""

    def __init__(self) -> None:
        self.inside = 0
        self.most = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self.inside += 1
            self.most = max(self.most, self.inside)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.inside -= 1


@each("where", ["shared", "own", "callers"])
@each("order", ["completion", "input"])
@each("concurrency", [1, 3, 8])
def test_as_many_calls_run_at_once_as_were_asked_for(
    where: str, order: Any, concurrency: int
) -> None:
    """Each call waits until all others are inside; with one fewer call at once, the test would hang."""
    together = threading.Barrier(concurrency)
    meter = Meter()

    def call(item: int) -> int:
        with meter:
            together.wait(WAIT)
            return item

    mine = ThreadPoolExecutor(concurrency + 2)
    executor = {"shared": None, "own": ThreadPoolExecutorConfig(), "callers": mine}[where]
    builder = PipelineBuilder().add_source(range(5 * concurrency))
    builder.pipe(call, concurrency=concurrency, output_order=order, executor=executor)
    with mine:
        result = list(builder.build(num_threads=concurrency))

    assert sorted(result) == list(range(5 * concurrency))
    assert meter.most == concurrency


@pytest.mark.parametrize("kind", ["generator", "async", "async generator"])
def test_other_kinds_run_as_many_at_once(kind: str) -> None:
    together: Any = threading.Barrier(4)
    async_together: list[Any] = []
    meter = Meter()

    def generate(item: int) -> Iterator[int]:
        with meter:
            together.wait(WAIT)
            yield item

    async def call(item: int) -> int:
        with meter:
            if not async_together:
                async_together.append(asyncio.Condition())
                async_together.append(0)
            condition = async_together[0]
            async with condition:
                async_together[1] += 1
                condition.notify_all()
                target = (async_together[1] + 3) // 4 * 4
                await asyncio.wait_for(
                    condition.wait_for(lambda: async_together[1] >= target), WAIT
                )
            return item

    async def generate_async(item: int) -> AsyncIterator[int]:
        yield await call(item)

    fn: Any = {"generator": generate, "async": call, "async generator": generate_async}[kind]
    builder = PipelineBuilder().add_source(range(20)).pipe(fn, concurrency=4)

    assert sorted(builder.build(num_threads=4)) == list(range(20))
    assert meter.most == 4


@several_tries
def test_slow_items_take_as_long_as_their_share() -> None:
    """16 items of 250 ms by 8 threads: two rounds take 0.5 s, one after the other 4 s."""

    def slow(item: int) -> int:
        time.sleep(0.25)
        return item

    pipeline = PipelineBuilder().add_source(range(16)).pipe(slow, concurrency=8).build()
    with pipeline.auto_stop():
        begin = time.monotonic()
        assert len(list(pipeline)) == 16
        took = time.monotonic() - begin

    assert 0.5 <= took < 2


def test_no_worker_takes_a_second_item_while_another_idles() -> None:
    """While other calls are blocked, each new item is taken by the one free thread."""
    gates = [threading.Event() for _ in range(4)]
    entered = [threading.Event() for _ in range(4)]
    feed: Any = [threading.Event() for _ in range(4)]

    def source() -> Iterator[int]:
        for number in range(4):
            assert feed[number].wait(WAIT)
            yield number

    def block(item: int) -> int:
        entered[item].set()
        assert gates[item].wait(WAIT)
        return item

    pipeline = (
        PipelineBuilder().add_source(source()).pipe(block, concurrency=4).build(num_threads=4)
    )
    with pipeline.auto_stop():
        for number in range(4):
            feed[number].set()
            assert entered[number].wait(WAIT)
        for number in (2, 0, 3, 1):
            gates[number].set()
            assert pipeline.get_item(timeout=WAIT) == number


def test_no_item_waits_behind_a_blocked_one_while_a_thread_is_free() -> None:
    """Many items arrive at once; one of them blocks, and the other thread works on all others."""
    gate = threading.Event()

    def block_first(item: int) -> int:
        if item == 0:
            assert gate.wait(WAIT)
        return item

    builder = PipelineBuilder().add_source(range(200)).pipe(block_first, concurrency=2)
    pipeline = builder.build(num_threads=2)
    with pipeline.auto_stop():
        assert [pipeline.get_item(timeout=WAIT) for _ in range(199)] == list(range(1, 200))
        gate.set()
        assert pipeline.get_item(timeout=WAIT) == 0


@pytest.mark.parametrize("kind", ["sync", "async", "generator"])
def test_each_result_leaves_when_it_is_done(kind: str) -> None:
    """The second call does not return before the consumer has the first result."""
    gates = [threading.Event() for _ in range(5)]
    gates[0].set()

    def call(item: int) -> int:
        assert gates[item].wait(WAIT)
        return item

    async def call_async(item: int) -> int:
        return await asyncio.to_thread(call, item)

    def generate(_: int) -> Iterator[int]:
        for number in range(5):
            yield call(number)

    fn: Any = {"sync": call, "async": call_async, "generator": generate}[kind]
    source = [0] if kind == "generator" else range(5)
    pipeline = PipelineBuilder().add_source(source).pipe(fn).build()
    with pipeline.auto_stop():
        for number in range(5):
            gates[number].set()
            assert pipeline.get_item(timeout=WAIT) == number


CHAINS: dict[str, Callable[[PipelineBuilder[Any]], int]] = {}


def _chain(fn: Callable[[PipelineBuilder[Any]], int]) -> Callable[[PipelineBuilder[Any]], int]:
    CHAINS[fn.__name__] = fn
    return fn


@_chain
def no_stages(_: PipelineBuilder[Any]) -> int:
    return 0


@_chain
def one_stage(builder: PipelineBuilder[Any]) -> int:
    builder.pipe(lambda i: i, concurrency=4)
    return 4


@_chain
def five_stages(builder: PipelineBuilder[Any]) -> int:
    for _ in range(5):
        builder.pipe(lambda i: i, concurrency=2, output_order="input")
    return 10


@_chain
def generators(builder: PipelineBuilder[Any]) -> int:
    builder.pipe(lambda i: i, concurrency=3)
    builder.pipe(_one, concurrency=2)
    return 5


@_chain
def coroutines(builder: PipelineBuilder[Any]) -> int:
    async def call(item: int) -> int:
        return item

    builder.pipe(call, concurrency=16)
    return 16


@_chain
def many_stages(builder: PipelineBuilder[Any]) -> int:
    for _ in range(70):
        builder.pipe(lambda i: i)
    return 70


@_chain
def paths(builder: PipelineBuilder[Any]) -> int:
    ways = [PipelineBuilder[Any]().pipe(lambda i: i, concurrency=2) for _ in range(3)]
    builder.path_variants(lambda item: item % 3, ways)
    return 1 + 6


def _one(item: int) -> Iterator[int]:
    yield item


# All chains with all buffer sizes; the kind of the source alternates, because stages do not depend on it.
@pytest.mark.parametrize(
    ("name", "buffer_size", "is_async"),
    [
        (name, buffer_size, (row + column) % 2 == 1)
        for row, name in enumerate(CHAINS)
        for column, buffer_size in enumerate([1, 10])
    ],
)
def test_the_source_is_never_far_ahead(name: str, buffer_size: int, is_async: bool) -> None:
    made = taken = most = 0
    idle = threading.Event()

    def source() -> Iterator[int]:
        nonlocal made, most
        for number in range(500):
            made += 1
            most = max(most, made - taken)
            idle.set()
            yield number

    async def async_source() -> AsyncIterator[int]:
        for number in source():
            yield number

    builder = PipelineBuilder[Any]().add_source(async_source() if is_async else source())
    concurrencies = CHAINS[name](builder)
    pipeline = builder.add_sink(buffer_size).build(num_threads=4)
    with pipeline.auto_stop():
        _until_still(lambda: made)
        for _ in pipeline:
            # Counted after the item was taken, so the count may be one too high, but never too low.
            taken += 1
            if taken % 150 == 1:
                _until_still(lambda: made)

    assert taken == 500
    # Each stage has one item that waits for a thread.
    assert most <= buffer_size + 2 * concurrencies + 64 + 2
    assert most >= buffer_size + concurrencies


class Counted:
    """A source of numbers that counts how many it has given."""

    def __init__(self) -> None:
        self.made = 0

    def __iter__(self) -> Iterator[int]:
        for _ in range(10_000):
            self.made += 1
            yield self.made


class InSixteens:
    """A custom aggregator, whose group size the engine does not know."""

    def __init__(self) -> None:
        self.group: list[int] = []

    def accumulate(self, item: int) -> list[int] | None:
        self.group.append(item)
        if len(self.group) < 16:
            return None
        group, self.group = self.group, []
        return group

    def flush(self) -> list[int]:
        return self.group


@each("own", [False, True])
@each("where", ["stages", "paths", "merged"])
def test_of_groups_all_items_count(own: bool, where: str) -> None:
    """Beyond buffers and concurrencies, 64 items may be under way, not 64 groups."""
    source = Counted()

    def grouped(builder: PipelineBuilder[Any]) -> PipelineBuilder[Any]:
        builder.pipe(lambda item: item, concurrency=2).aggregate(InSixteens() if own else 16)
        return builder.pipe(list, concurrency=3)

    builder = PipelineBuilder[Any]()
    if where == "merged":
        builder.merge(grouped(PipelineBuilder[Any]().add_source(source)))
    elif where == "paths":
        builder.add_source(source).path_variants(lambda _: 0, [grouped(PipelineBuilder[Any]())])
    else:
        grouped(builder.add_source(source))
    router = where == "paths"
    pipeline = builder.add_sink(2).build(num_threads=4)
    with pipeline.auto_stop():
        assert len(pipeline.get_item(timeout=WAIT)) == 16
        _until_still(lambda: source.made, 16 + router + 2 + (3 + 2) * 16)
        ahead = source.made - 16
    assert ahead <= router + 2 + 16 + (3 + 2) * 16 + 64 + 1


def test_of_groups_taken_apart_each_item_counts_once() -> None:
    source = Counted()
    builder = PipelineBuilder[Any]().add_source(source).aggregate(16).pipe(list).disaggregate()
    pipeline = builder.add_sink(2).build()
    with pipeline.auto_stop():
        assert pipeline.get_item(timeout=WAIT) == 1
        _until_still(lambda: source.made, 1 + 2 * 16 + 2)
        assert source.made - 1 <= 3 * 16 + 2 + 64 + 1


@pytest.mark.parametrize("where", ["stages", "paths", "merged"])
def test_of_groups_of_groups_taken_apart_all_items_count(where: str) -> None:
    source = Counted()

    def grouped(builder: PipelineBuilder[Any]) -> PipelineBuilder[Any]:
        return builder.aggregate(4).aggregate(8)

    builder = PipelineBuilder[Any]()
    if where == "merged":
        other = PipelineBuilder[Any]().add_source([]).aggregate(32)
        builder.merge(grouped(PipelineBuilder[Any]().add_source(source)), other)
    elif where == "paths":
        ways = [grouped(PipelineBuilder[Any]()), PipelineBuilder[Any]().aggregate(32)]
        builder.add_source(source).path_variants(lambda _: 0, ways)
    else:
        grouped(builder.add_source(source))
    builder.disaggregate().pipe(list).pipe(list)
    router = where == "paths"
    pipeline = builder.add_sink(2).build(num_threads=4)
    with pipeline.auto_stop():
        assert len(pipeline.get_item(timeout=WAIT)) == 4
        _until_still(lambda: source.made, 4 + router + 2 * 32)
        ahead = source.made - 4
    assert ahead <= router + 4 + 2 * 32 + (2 + 2) * 4 + 64 + 1


def _until_still(value: Callable[[], int], at_least: int = 1) -> None:
    """Wait until a value has reached a number and has stopped changing."""
    deadline = time.monotonic() + WAIT
    still, last = 0, 0
    while still < 5:
        assert time.monotonic() < deadline, f"{last} are fewer than {at_least}"
        time.sleep(0.001)
        still = still + 1 if value() == last >= at_least else 0
        last = value()


@pytest.mark.parametrize("is_async", [False, True])
def test_a_generator_pauses_when_nobody_takes_its_values(is_async: bool) -> None:
    made = 0

    def count(_: int) -> Iterator[int]:
        nonlocal made
        while True:
            made += 1
            yield made

    async def count_async(item: int) -> AsyncIterator[int]:
        for value in count(item):
            yield value

    fn: Any = count_async if is_async else count
    pipeline = PipelineBuilder().add_source([0]).pipe(fn).add_sink(2).build()
    with pipeline.auto_stop():
        _until_still(lambda: made)
        assert made <= 2 + 1 + 64
        for expected in range(1, 500):
            assert pipeline.get_item(timeout=WAIT) == expected


def test_a_paused_generator_lets_go_of_its_thread() -> None:
    """The second stage needs the only thread, while the generator of the first stage never ends."""

    def count(_: int) -> Iterator[int]:
        number = 0
        while True:
            yield number
            number += 1

    builder = PipelineBuilder().add_source([0]).pipe(count).pipe(lambda i: i)
    pipeline = builder.build(num_threads=1)
    with pipeline.auto_stop():
        assert [pipeline.get_item(timeout=WAIT) for _ in range(300)] == list(range(300))


def test_stages_share_the_threads_fairly() -> None:
    """One thread, three stages: late stages do not have to wait until the source has ended."""
    entered: Counter[str] = Counter()
    last: list[int] = []

    def stage(name: str) -> Callable[[int], int]:
        def call(item: int) -> int:
            entered[name] += 1
            if name == "third" and item == 0:
                last.append(entered["first"])
            return item

        return call

    builder = PipelineBuilder().add_source(range(10_000))
    for name in ("first", "second", "third"):
        builder.pipe(stage(name), name=name)
    assert len(list(builder.build(num_threads=1))) == 10_000

    assert last[0] <= 100
    assert entered == {"first": 10_000, "second": 10_000, "third": 10_000}


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_no_more_threads_work_than_there_are_for_all_stages(num_threads: int) -> None:
    meter = Meter()

    def call(item: int) -> int:
        with meter:
            time.sleep(0.001)
            return item

    builder = PipelineBuilder().add_source(range(100))
    for _ in range(3):
        builder.pipe(call, concurrency=num_threads)
    assert len(list(builder.build(num_threads=num_threads))) == 100

    assert meter.most == num_threads


@pytest.mark.parametrize("num_stages", [1, 10, 80])
def test_the_cost_grows_with_items_times_stages_and_no_faster(
    num_stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    advances = 0
    advance = Node.advance

    def counted(self: Node) -> None:
        nonlocal advances
        advances += 1
        advance(self)

    monkeypatch.setattr(Node, "advance", counted)
    builder = PipelineBuilder().add_source(range(1000))
    for _ in range(num_stages):
        builder.pipe(lambda i: i)
    assert len(list(builder.build(num_threads=2))) == 1000

    assert advances <= 5 * 1000 * num_stages


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere switches are counted otherwise")
@several_tries
def test_a_thread_goes_from_item_to_item_without_being_woken() -> None:
    """Waiting for the loop's or source's thread would be voluntary context switches, two to four per item."""
    data = bytes(6 << 20)

    def call(item: int) -> int:
        # Some milliseconds without the GIL, as in a decoder.
        hashlib.sha256(data)
        return item

    builder = PipelineBuilder().add_source(range(150)).pipe(call, output_order="input")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    assert sum(map(len, builder.aggregate(50).build(num_threads=1))) == 150

    assert resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before < 110


def test_a_source_that_may_wait_blocks_no_other_work() -> None:
    gate = threading.Event()

    class Slow(list[int]):
        def __iter__(self) -> Iterator[int]:
            yield 1
            assert gate.wait(WAIT)
            yield 2

    pipeline = PipelineBuilder().add_source(Slow([0])).pipe(lambda i: i).add_sink(5).build()
    with pipeline.auto_stop():
        assert pipeline.get_item(timeout=WAIT) == 1
        gate.set()
        assert pipeline.get_item(timeout=WAIT) == 2


def test_items_that_are_there_take_no_thread() -> None:
    pipeline = PipelineBuilder().add_source(range(10)).pipe(lambda i: i).add_sink(1).build()
    with pipeline.auto_stop():
        assert pipeline.get_item(timeout=WAIT) == 0
        names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if "source" in name]


def test_an_iteration_that_ends_in_a_turn_waits_for_no_thread() -> None:
    """The garbage collector may end an iteration within a turn; it must not wait for threads then."""
    pipeline = PipelineBuilder().add_source(range(10)).pipe(lambda i: i).add_sink(1).build()
    took: list[float] = []
    ended = threading.Event()

    def stop(_: None) -> None:
        begin = time.monotonic()
        pipeline.stop(timeout=WAIT)
        took.append(time.monotonic() - begin)
        ended.set()

    with pipeline.auto_stop():
        run: Any = pipeline._run
        run._hub.post(stop, None)
        assert ended.wait(2 * WAIT)
    assert took[0] < WAIT / 2


def test_a_busy_synchronous_stage_does_not_keep_the_loop_from_its_tasks() -> None:
    async def call(item: int) -> int:
        await asyncio.sleep(0)
        return item

    builder = PipelineBuilder().add_source(range(5000)).pipe(lambda i: i, concurrency=4)
    builder.pipe(call, concurrency=4).pipe(lambda i: i, output_order="input")
    assert sorted(builder.build(num_threads=4)) == list(range(5000))


@pytest.mark.parametrize("num_quick", [5, 10, 20])
def test_a_stage_whose_first_items_are_quick_uses_all_of_its_threads(num_quick: int) -> None:
    """A thread that queued its ticket behind another counted as idle, so too few threads were started."""
    together = threading.Barrier(8)

    def call(item: int) -> int:
        if item >= num_quick:
            together.wait(WAIT)
        return item

    items = range(num_quick + 64)
    pipeline = PipelineBuilder().add_source(items).pipe(call, concurrency=8).build()
    assert sorted(pipeline) == list(items)


def test_all_threads_are_told_to_end_although_some_end_meanwhile() -> None:
    hub: Any = SimpleNamespace(threads=[])
    threads = WorkerThreads(hub, "pool", 4)
    workers: Any = threads.workers
    workers += range(4)
    told: list[None] = []

    class Tickets:
        def put(self, end: None) -> None:
            told.append(end)
            workers.pop(0)

    tickets: Any = Tickets()
    threads._tickets = tickets
    threads.stop()
    assert told == [None] * 4
