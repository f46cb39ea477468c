"""A DataLoader continues where another one was stopped: no sample is repeated or lost."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import runpy
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from effort import each, examples
from hypothesis import given, settings
from hypothesis import strategies as st
from left_behind import wait_until
from programs import run_python

from spdl_media.dataloader import DataLoader, MapIterator, sample_rng
from spdl_media.pipeline import PipelineFailure, PoolBroken
from spdl_media.source import (
    DistributedRandomSampler,
    LocalDirectory,
    MergeIterator,
    embed_shuffle,
    repeat_source,
)

NO_LIMIT = float("inf")


class Rereadable:
    """Can be iterated any number of times, but only from its start."""

    def __init__(self, items: list[int]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[int]:
        return iter(self.items)


class RereadableAsync(Rereadable):
    async def _iterate(self) -> AsyncIterator[int]:
        for item in self.items:
            await asyncio.sleep(0)
            yield item

    __iter__ = None  # type: ignore[assignment]

    def __aiter__(self) -> AsyncIterator[int]:
        return self._iterate()


class Stateful(Rereadable):
    """Knows its position, like the datasets of torchdata, and counts the items that are read."""

    def __init__(self, items: list[int]) -> None:
        super().__init__(items)
        self.position = 0
        self.num_read = 0

    def __iter__(self) -> Iterator[int]:
        while self.position < len(self.items):
            item = self.items[self.position]
            self.position += 1
            self.num_read += 1
            yield item
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


SOURCES: dict[str, Callable[[int], Any]] = {
    "list": lambda n: list(range(n)),
    "sampler": lambda n: DistributedRandomSampler(n, rank=0, world_size=1, seed=n) if n else [],
    "mapping": lambda n: MapIterator(
        list(range(n)), DistributedRandomSampler(n, rank=0, world_size=1) if n else []
    ),
    "merged": lambda n: MergeIterator([range(n // 2), range(n // 2, n)], weights=[1, 2]),
    "rereadable": lambda n: Rereadable(list(range(n))),
    "rereadable_async": lambda n: RereadableAsync(list(range(n))),
    "stateful": lambda n: Stateful(list(range(n))),
    "generator": lambda n: (item for item in range(n)),
}


def num_samples(item: int) -> int:
    return item % 4


def check(item: int) -> None:
    if item % 7 == 3:
        raise ValueError(f"no {item}")


def function(item: int) -> tuple[int, int] | None:
    check(item)
    return None if item % 5 == 1 else (item, 0)


async def coroutine(item: int) -> tuple[int, int] | None:
    await asyncio.sleep(0)
    return function(item)


def generator(item: int) -> Iterator[tuple[int, int] | None]:
    """Yield several samples, some of which are dropped, and fail after some of them."""
    for offset in range(num_samples(item)):
        yield None if (item + offset) % 5 == 1 else (item, offset)
    check(item)


async def async_generator(item: int) -> AsyncIterator[tuple[int, int] | None]:
    for sample in generator(item):
        await asyncio.sleep(0)
        yield sample


PREPROCESSORS = {
    "function": function,
    "coroutine": coroutine,
    "generator": generator,
    "async_generator": async_generator,
}


def samples_of(preprocessor: str, items: list[int]) -> list[tuple[int, int]]:
    """Return the samples of the items, one after the other: the expected result."""
    samples: list[tuple[int, int] | None] = []
    for item in items:
        values = generator(item) if "generator" in preprocessor else map(function, [item])
        with contextlib.suppress(ValueError):
            # Samples before a failure are kept.
            for sample in values:
                samples.append(sample)  # noqa: PERF402
    return [sample for sample in samples if sample is not None]


def order_of(make_source: Callable[[int], Any], n: int, epoch: int) -> list[int]:
    source = make_source(n)
    if hasattr(source, "set_epoch"):
        source.set_epoch(epoch)
    return list(source.items if isinstance(source, RereadableAsync) else source)


def flat(batches: list[Any], batch_size: int | None) -> list[Any]:
    return batches if batch_size is None else list(itertools.chain.from_iterable(batches))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("preprocessor", PREPROCESSORS)
@settings(max_examples=examples(20))
@given(
    n=st.integers(0, 40),
    batch_size=st.none() | st.integers(1, 5),
    drop_last=st.booleans(),
    order=st.sampled_from(["completion", "input"]),
    epoch=st.integers(0, 3),
    num_threads=st.integers(1, 4),
    stops=st.lists(st.integers(0, 12), min_size=1, max_size=3),
)
def test_the_rest_comes_once(
    source: str,
    preprocessor: str,
    n: int,
    batch_size: int | None,
    drop_last: bool,
    order: Any,
    epoch: int,
    num_threads: int,
    stops: list[int],
) -> None:
    drop_last = drop_last and batch_size is not None

    def make_loader() -> DataLoader:
        return DataLoader(
            SOURCES[source](n),
            preprocessor=PREPROCESSORS[preprocessor],
            batch_size=batch_size,
            drop_last=drop_last,
            output_order=order,
            num_threads=num_threads,
            max_failures=NO_LIMIT,
        )

    loader = make_loader()
    loader.set_epoch(epoch)
    batches: list[Any] = []
    for stop in stops:
        batches += itertools.islice(loader, stop)
        state = json.loads(json.dumps(loader.state_dict()))
        if state["epoch"] > epoch:
            break
        loader = make_loader()
        loader.load_state_dict(state)
        assert loader.epoch == epoch
        assert loader.state_dict() == state
    else:
        batches += loader

    expected = samples_of(preprocessor, order_of(SOURCES[source], n, epoch))
    kept = len(expected) // batch_size * batch_size if drop_last and batch_size else len(expected)
    given = flat(batches, batch_size)
    if order == "input":
        assert given == expected[:kept]
        whole = batch_size is None or all(len(batch) == batch_size for batch in batches[:-1])
        assert whole
    else:
        assert len(given) == kept
        assert not Counter(given) - Counter(expected)
    after = loader.state_dict()
    assert (after["epoch"], after["done"]) == (epoch + 1, [])


def test_a_state_is_taken_between_any_two_batches() -> None:
    loader = DataLoader(list(range(10)), batch_size=3, output_order="input")
    fresh = loader.state_dict()
    states = [loader.state_dict() for _ in loader]
    assert [state["done"] for state in states] == [[[0, n]] for n in (3, 6, 9, 10)]
    assert {state["epoch"] for state in (fresh, *states)} == {0}
    assert loader.state_dict() == {**fresh, "epoch": 1}
    rests = []
    for state in states:
        loader.load_state_dict(state)
        rests.append(list(loader))
    assert rests == [[[3, 4, 5], [6, 7, 8], [9]], [[6, 7, 8], [9]], [[9]], []]


def test_the_next_epoch_follows_the_rest() -> None:
    def sampler() -> DistributedRandomSampler:
        return DistributedRandomSampler(12, rank=0, world_size=1)

    alone = sampler()
    epochs = [list(alone) for _ in range(4)]
    loader = DataLoader(sampler(), output_order="input")
    loader.set_epoch(1)
    first = list(itertools.islice(loader, 5))
    source = sampler()
    resumed = DataLoader(source, output_order="input")
    resumed.load_state_dict(loader.state_dict())
    assert first + list(resumed) == epochs[1]
    assert (resumed.epoch, source.epoch) == (2, 2)
    assert [list(resumed), list(resumed)] == epochs[2:4]
    # After a break, the next iteration of the same loader is still the next epoch.
    assert list(itertools.islice(loader, 2)) == epochs[2][:2]
    assert list(loader) == epochs[3]


def test_setting_an_epoch_forgets_where_it_was() -> None:
    loader = DataLoader(range(6), output_order="input")
    list(itertools.islice(loader, 2))
    loader.set_epoch(4)
    assert loader.state_dict()["done"] == []
    assert list(loader) == list(range(6))
    assert loader.state_dict()["epoch"] == 5


def test_a_loop_that_sets_each_epoch_goes_on_from_a_loaded_state() -> None:
    loader = DataLoader(range(6), output_order="input")
    list(itertools.islice(loader, 2))
    resumed = DataLoader(range(6), output_order="input")
    resumed.load_state_dict(loader.state_dict())
    given = []
    for epoch in (resumed.epoch, 1, 1):
        resumed.set_epoch(epoch)
        given.append(list(resumed))
    assert given == [[2, 3, 4, 5], list(range(6)), list(range(6))]


def test_an_item_in_the_middle_of_its_samples() -> None:
    made: list[int] = []

    def five(item: int) -> Iterator[tuple[int, int]]:
        for offset in range(5):
            made.append(item)
            yield item, offset

    def make_loader() -> DataLoader:
        return DataLoader(["a", "b"], preprocessor=five, batch_size=3, output_order="input")

    loader = make_loader()
    iterator = iter(loader)
    assert next(iterator) == [("a", 0), ("a", 1), ("a", 2)]
    state = loader.state_dict()
    assert (state["done"], state["partly_done"]) == ([], [[0, [[0, 3]]]])
    assert next(iterator) == [("a", 3), ("a", 4), ("b", 0)]
    resumed = make_loader()
    resumed.load_state_dict(state)
    assert list(resumed) == [
        [("a", 3), ("a", 4), ("b", 0)],
        [("b", 1), ("b", 2), ("b", 3)],
        [("b", 4)],
    ]


def test_what_overtook_others_is_not_made_again() -> None:
    """The first item is still being processed while the others are delivered."""
    proceed = threading.Event()

    def slow(item: int) -> int:
        if item == 0:
            assert proceed.wait(20)
        return item

    loader = DataLoader(range(6), preprocessor=slow, num_threads=2)
    iterator = iter(loader)
    assert sorted(itertools.islice(iterator, 4)) == [1, 2, 3, 4]
    state = loader.state_dict()
    assert state["done"] == [[1, 5]]
    proceed.set()
    del iterator
    resumed = DataLoader(range(6), preprocessor=slow)
    resumed.load_state_dict(state)
    assert sorted(resumed) == [0, 5]


def test_done_items_are_neither_fetched_nor_processed() -> None:
    fetched: list[int] = []
    processed: list[int] = []

    class Table(dict[int, int]):
        def __getitem__(self, key: int) -> int:
            fetched.append(key)
            return key * 10

    def process(item: int) -> int:
        processed.append(item)
        return item

    def make_loader() -> DataLoader:
        source = MapIterator(Table(), sampler=list(range(20)))
        return DataLoader(source, preprocessor=process, output_order="input", num_threads=1)

    loader = make_loader()
    list(itertools.islice(loader, 15))
    fetched.clear()
    processed.clear()
    resumed = make_loader()
    resumed.load_state_dict(loader.state_dict())
    assert list(resumed) == [150, 160, 170, 180, 190]
    assert fetched == [15, 16, 17, 18, 19]
    assert processed == [150, 160, 170, 180, 190]


def test_a_source_with_state_is_asked_for_it() -> None:
    loader = DataLoader(Stateful(list(range(1000))), output_order="input")
    first = list(itertools.islice(loader, 700))
    state = loader.state_dict()
    source = Stateful(list(range(1000)))
    resumed = DataLoader(source, output_order="input")
    resumed.load_state_dict(json.loads(json.dumps(state)))
    assert first + list(resumed) == list(range(1000))
    # At most the items between two copies of the state are read again.
    assert source.num_read <= 300 + 16
    assert list(resumed) == list(range(1000))


def test_an_endless_source() -> None:
    def make_loader() -> DataLoader:
        source = repeat_source(DistributedRandomSampler(7, rank=0, world_size=1))
        return DataLoader(source, batch_size=4, output_order="input")

    expected = list(itertools.islice(make_loader(), 30))
    loader = make_loader()
    batches = list(itertools.islice(loader, 11))
    for _ in range(2):
        resumed = make_loader()
        resumed.load_state_dict(loader.state_dict())
        batches += itertools.islice(resumed, 5)
        loader = resumed
    assert batches == expected[:21]


def test_a_shuffled_folder(tmp_path: Path) -> None:
    for index in range(12):
        (tmp_path / f"{index}.jpg").touch()

    def make_loader() -> DataLoader:
        source = embed_shuffle(LocalDirectory(tmp_path, "*.jpg"))
        return DataLoader(source, preprocessor=lambda path: path.name, output_order="input")

    loader = make_loader()
    epochs = [list(loader), list(loader), list(loader)]
    loader.set_epoch(1)
    first = list(itertools.islice(loader, 5))
    resumed = make_loader()
    resumed.load_state_dict(loader.state_dict())
    assert first + list(resumed) == epochs[1]
    assert list(resumed) == epochs[2]


def test_chance_is_that_of_the_item() -> None:
    def draw(item: int, rng: np.random.Generator) -> int:
        return int(rng.integers(2**60))

    loader = DataLoader(range(20), preprocessor=draw, seed=9, output_order="input")
    loader.set_epoch(2)
    first = list(itertools.islice(loader, 8))
    # The seed is part of the state.
    resumed = DataLoader(range(20), preprocessor=draw, output_order="input")
    resumed.load_state_dict(loader.state_dict())
    expected = [int(sample_rng(9, 2, position).integers(2**60)) for position in range(20)]
    assert first + list(resumed) == expected


def test_failed_batches_are_not_made_again() -> None:
    calls: list[list[int]] = []

    def picky(batch: list[int]) -> int:
        calls.append(batch)
        if 2 in batch:
            raise ValueError("two")
        return sum(batch)

    def make_loader() -> DataLoader:
        return DataLoader(
            range(8), batch_size=2, aggregator=picky, output_order="input", num_threads=1
        )

    loader = make_loader()
    assert list(itertools.islice(loader, 2)) == [1, 9]
    state = loader.state_dict()
    assert state["done"][0][1] >= 6
    calls.clear()
    resumed = make_loader()
    resumed.load_state_dict({**state, "done": [[0, 6]]})
    assert list(resumed) == [13]
    assert calls == [[6, 7]]


def exits(item: int) -> int:
    if item == 3:
        sys.exit(1)
    return item


async def cancels(item: int) -> int:
    if item == 3:
        raise asyncio.CancelledError
    return item


def exits_in_generator(item: int) -> Iterator[int]:
    yield exits(item)


async def cancels_in_generator(item: int) -> AsyncIterator[int]:
    yield await cancels(item)


@each(
    "place, fn",
    [
        *itertools.product(["preprocessor", "aggregator"], [exits, cancels]),
        *itertools.product(["preprocessor"], [exits_in_generator, cancels_in_generator]),
    ],
)
def test_what_failed_by_whatever_error_is_not_made_again(place: str, fn: Any) -> None:
    options: Any = {place: fn}
    loader = DataLoader(range(9), output_order="input", num_threads=8, **options)
    iterator = iter(loader)
    assert list(itertools.islice(iterator, 4)) == [0, 1, 2, 4]
    assert loader.failure_counts[fn.__name__] == 1
    # A generator may end after its sample was taken.
    wait_until(lambda: not loader.state_dict()["partly_done"])
    assert loader.state_dict()["done"] == [[0, 5]]


@pytest.mark.parametrize("is_generator", [False, True])
def test_what_a_failed_run_cancels_is_made_again(is_generator: bool) -> None:
    """When the failure of another item ends a run, calls that are under way are cancelled."""
    others = asyncio.Event()
    was_cancelled = threading.Event()

    async def wait(item: int) -> int:
        if item == 2:
            others.set()
            try:
                await asyncio.Event().wait()
            finally:
                was_cancelled.set()
        await others.wait()
        if item == 1:
            raise ValueError("one")
        return item

    async def wait_in_generator(item: int) -> AsyncIterator[int]:
        yield await wait(item)

    loader = DataLoader(
        range(3), preprocessor=wait_in_generator if is_generator else wait, max_failures=0
    )
    iterator = iter(loader)
    assert was_cancelled.wait(20)
    with pytest.raises(PipelineFailure, match="one"):
        list(iterator)
    state = loader.state_dict()
    done = {*itertools.chain(*itertools.starmap(range, state["done"]))}
    assert 1 in done
    assert 2 not in done


def test_an_item_whose_generator_raised_when_it_was_left_is_not_done() -> None:
    has_come = threading.Event()

    def many(item: int) -> Iterator[int]:
        if item == 1:
            assert has_come.wait(20)
            raise ValueError("one")
        try:
            yield from itertools.count()
        finally:
            raise LookupError("left")

    loader = DataLoader(
        range(2), preprocessor=many, output_order="completion", num_threads=2, max_failures=0
    )
    iterator = iter(loader)
    assert next(iterator) == 0
    has_come.set()
    with pytest.raises(PipelineFailure, match="one"):
        list(iterator)
    assert loader.state_dict()["done"] == [[1, 2]]


def test_a_state_outlives_an_iteration_that_cannot_start() -> None:
    loader = DataLoader(range(6), preprocessor=str, output_order="input")
    assert list(itertools.islice(loader, 2)) == ["0", "1"]
    state = loader.state_dict()
    with ProcessPoolExecutor(1) as pool:
        pass
    resumed = DataLoader(range(6), preprocessor=str, output_order="input", executor=pool)
    resumed.load_state_dict(state)
    with pytest.raises(PoolBroken, match="takes no more items"):
        iter(resumed)
    assert resumed.epoch == 0
    assert resumed.state_dict() == state


PROGRAM = """
import json, sys
import numpy as np
from spdl_media.dataloader import DataLoader
from spdl_media.source import DistributedRandomSampler

def augment(index, rng):
    for part in range(index % 3):
        yield [index, part, int(rng.integers(1000))]

def make_loader(order):
    sampler = DistributedRandomSampler(60, rank=1, world_size=2, seed=5)
    return DataLoader(sampler, preprocessor=augment, batch_size=4, seed=8, output_order=order)

if __name__ == "__main__":
    order, count, state = json.loads(sys.argv[1])
    loader = make_loader(order)
    if state:
        loader.load_state_dict(state)
    batches = []
    for batch in loader:
        batches.append(batch)
        if len(batches) == count:
            break
    print(json.dumps([batches, loader.state_dict()]))
"""


@pytest.mark.parametrize("order", [pytest.param("completion", marks=pytest.mark.long), "input"])
def test_another_process_continues(order: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)

    def run(count: int, state: Any) -> Any:
        arguments = json.dumps([order, count, state])
        done = run_python(script, arguments, path=sys.path)
        assert done.stderr == ""
        return json.loads(done.stdout)

    loader = runpy.run_path(str(script))["make_loader"](order)
    whole, after = list(loader), loader.state_dict()
    first, state = run(3, None)
    rest, after_rest = run(0, state)
    assert after == after_rest
    assert len(first) == 3
    if order == "input":
        assert first + rest == whole
    else:
        assert sorted(flat(first + rest, 4)) == sorted(flat(whole, 4))


class TestWhatDoesNotFit:
    def state(self, source: Any, count: int = 3) -> dict[str, Any]:
        loader = DataLoader(source, output_order="input")
        list(itertools.islice(loader, count))
        return loader.state_dict()

    def test_another_length(self) -> None:
        with pytest.raises(ValueError, match="a source of 10 items, and this one has 9; make the"):
            DataLoader(range(9)).load_state_dict(self.state(range(10)))

    @pytest.mark.parametrize(
        "other", [{"seed": 1}, {"rank": 1}, {"world_size": 4, "num_draws": 20}]
    )
    @pytest.mark.parametrize("is_mapped", [False, True])
    def test_another_order(self, other: dict[str, Any], is_mapped: bool) -> None:
        def make(**others: Any) -> DataLoader:
            arguments = {"rank": 0, "world_size": 2, "num_draws": 10, **others}
            sampler = DistributedRandomSampler(20, **arguments)
            return DataLoader(MapIterator(range(20), sampler) if is_mapped else sampler)

        state = json.loads(json.dumps(make().state_dict()))
        make().load_state_dict(state)
        with pytest.raises(ValueError, match="the sampler, its seed, rank and world size"):
            make(**other).load_state_dict(state)

    def test_a_sampler_does_not_go_on_from_the_state_of_a_list(self) -> None:
        sampler = DistributedRandomSampler(10, rank=0, world_size=1)
        with pytest.raises(ValueError, match=r"the order of None, and this one has .*Random"):
            DataLoader(sampler).load_state_dict(self.state(range(10)))

    def test_a_source_without_state(self) -> None:
        state = self.state(Stateful(list(range(40))), 33)
        assert state["source"] == {"position": 32, "state": {"position": 32}}
        with pytest.raises(ValueError, match=r"load_state_dict\(\), which Rereadable lacks"):
            DataLoader(Rereadable([1])).load_state_dict(state)

    def test_a_generator_that_was_read(self) -> None:
        loader = DataLoader(iter(range(9)), output_order="input")
        list(itertools.islice(loader, 3))
        loader.load_state_dict(loader.state_dict())
        with pytest.raises(ValueError, match="range_iterator, can be read only once, and was read"):
            iter(loader)
