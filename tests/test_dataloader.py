"""The DataLoader: order, batches, threads, epochs, failures."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import gc
import inspect
import itertools
import os
import pickle
import re
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from effort import each, examples
from hypothesis import given, settings
from hypothesis import strategies as st
from left_behind import wait_for_threads, wait_until

import spdl_media as sm
from spdl_media.dataloader import DataLoader, MapIterator, Pipeline, PipelineBuilder, sample_rng
from spdl_media.pipeline import PipelineError, PipelineFailure
from spdl_media.pipeline.engine.run import Run
from spdl_media.source import DistributedRandomSampler, MergeIterator, repeat_source

ORDERS = ["completion", "input"]
NO_LIMIT = float("inf")


def double(item: int) -> int:
    return 2 * item


async def double_async(item: int) -> int:
    await asyncio.sleep(0)
    return 2 * item


def twice(item: int) -> Iterator[tuple[int, int]]:
    yield item, 0
    yield item, 1


async def twice_async(item: int) -> AsyncIterator[tuple[int, int]]:
    for offset in range(2):
        await asyncio.sleep(0)
        yield item, offset


async def arange(stop: int) -> AsyncIterator[int]:
    for number in range(stop):
        yield number


def loader_that_waits(proceed: threading.Event) -> DataLoader:
    """Make a loader of three items, of which all but the first wait for the event."""

    def wait(item: int) -> int:
        assert not item or proceed.wait(20)
        return item

    return DataLoader(range(3), preprocessor=wait, output_order="input")


class Numbers:
    """Like ``range``, but it can only be iterated from its start."""

    def __init__(self, stop: int) -> None:
        self.stop = stop

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.stop))


def flat(batches: Iterable[Iterable[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(batches))


def test_it_is_where_users_look_for_it() -> None:
    assert sm.DataLoader is DataLoader is sm.dataloader.DataLoader
    assert sm.dataloader.PipelineBuilder is PipelineBuilder is sm.pipeline.PipelineBuilder
    assert sm.dataloader.Pipeline is Pipeline
    assert sm.dataloader.MapIterator is MapIterator is sm.source.MapIterator
    assert dir(sm) == sorted(sm.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Dataloader'"):
        sm.Dataloader  # noqa: B018


def test_parameters_of_the_documentation() -> None:
    parameters = inspect.signature(DataLoader).parameters
    assert next(iter(parameters)) == "src"
    defaults = {name: parameters[name].default for name in list(parameters)[1:11]}
    assert defaults == {
        "preprocessor": None,
        "batch_size": None,
        "drop_last": False,
        "aggregator": None,
        "transfer_fn": None,
        "to": None,
        "buffer_size": 3,
        "num_threads": None,
        "timeout": None,
        "output_order": "completion",
    }


def model(n: int, batch_size: int | None, *, drop_last: bool) -> list[Any]:
    samples = [2 * item for item in range(n)]
    if batch_size is None:
        return samples
    batches = [samples[start : start + batch_size] for start in range(0, n, batch_size)]
    return [batch for batch in batches if len(batch) == batch_size or not drop_last]


@pytest.mark.parametrize("preprocessor", [double, double_async])
@pytest.mark.parametrize("make_source", [range, arange, Numbers])
@settings(max_examples=examples(15))
@given(n=st.integers(0, 20), batch_size=st.none() | st.integers(1, 6), drop_last=st.booleans())
def test_gives_what_a_loop_would(
    preprocessor: Callable[[int], Any],
    make_source: Callable[[int], Any],
    n: int,
    batch_size: int | None,
    drop_last: bool,
) -> None:
    drop_last = drop_last and batch_size is not None
    expected = model(n, batch_size, drop_last=drop_last)
    arguments: dict[str, Any] = {
        "preprocessor": preprocessor,
        "batch_size": batch_size,
        "drop_last": drop_last,
        "num_threads": 3,
    }
    in_order = DataLoader(make_source(n), output_order="input", **arguments)
    assert list(in_order) == expected
    loader = DataLoader(make_source(n), output_order="completion", **arguments)
    given = list(loader)
    if batch_size is None:
        assert sorted(given) == expected
    else:
        assert [len(batch) for batch in given] == [len(batch) for batch in expected]
        assert set(flat(given)) <= set(range(0, 2 * n, 2))
        assert len(set(flat(given))) == len(flat(expected))
    if make_source is range:
        assert len(loader) == len(expected)


@pytest.mark.parametrize("preprocessor", [twice, twice_async])
def test_generators_give_several_samples(preprocessor: Callable[[int], Any]) -> None:
    loader = DataLoader(range(5), preprocessor=preprocessor, batch_size=4, output_order="input")
    expected = [(item, offset) for item in range(5) for offset in range(2)]
    assert list(loader) == [expected[:4], expected[4:8], expected[8:]]
    unordered = DataLoader(range(5), preprocessor=preprocessor)
    assert sorted(unordered) == expected


def test_without_preprocessor() -> None:
    # As in a pipeline, only a result is dropped if it is None.
    assert list(DataLoader([3, None, 5], batch_size=2)) == [[3, None], [5]]
    dataset = MapIterator([3, None, 5])
    assert list(DataLoader(dataset, batch_size=2, output_order="input")) == [[3, 5]]
    assert list(DataLoader(range(3), aggregator=str)) == ["0", "1", "2"]


@pytest.mark.parametrize(("name", "value"), [("src", [4]), ("cache", 99), ("on_error", "riase")])
def test_the_arguments_stay(name: str, value: Any) -> None:
    items = [1, 2]
    loader = DataLoader(items, batch_size=3, output_order="input")
    with pytest.raises(AttributeError, match=f"{name}= of a DataLoader .* make another loader"):
        setattr(loader, name, value)
    items.append(3)
    assert list(loader) == [[1, 2, 3]]


def test_a_batch_size_of_numpy() -> None:
    size: Any = np.int64(2)
    assert list(DataLoader(range(3), batch_size=size)) == [[0, 1], [2]]


@pytest.mark.parametrize("is_async", [False, True])
def test_aggregators_keep_the_order(is_async: bool) -> None:
    """The first batch is delayed until the second one is done."""
    second_is_done = threading.Event()

    def aggregate(samples: list[int]) -> int:
        if samples[0] == 0:
            assert second_is_done.wait(20)
        else:
            second_is_done.set()
        return samples[0]

    async def aggregate_async(samples: list[int]) -> int:
        return await asyncio.to_thread(aggregate, samples)

    loader = DataLoader(
        range(8),
        preprocessor=double,
        batch_size=4,
        aggregator=aggregate_async if is_async else aggregate,
        num_threads=2,
        output_order="input",
    )
    assert list(loader) == [0, 8]
    assert second_is_done.is_set()


def test_preprocessors_run_at_the_same_time() -> None:
    barrier = threading.Barrier(4)

    def meet(item: int) -> int:
        barrier.wait(20)
        return item

    assert sorted(DataLoader(range(8), preprocessor=meet, num_threads=4)) == list(range(8))


def test_the_transfer_has_one_thread_of_its_own() -> None:
    preprocessing: set[int] = set()
    transferring: list[int] = []
    busy = threading.Lock()

    def preprocess(item: int) -> int:
        preprocessing.add(threading.get_ident())
        return item

    def transfer(batch: list[int]) -> int:
        assert busy.acquire(blocking=False)
        transferring.append(threading.get_ident())
        busy.release()
        return sum(batch)

    loader = DataLoader(
        range(40), preprocessor=preprocess, batch_size=2, transfer_fn=transfer, output_order="input"
    )
    assert list(loader) == [4 * n + 1 for n in range(20)]
    assert len(set(transferring)) == 1
    assert set(transferring).isdisjoint({*preprocessing, threading.get_ident()})


def test_none_drops_at_each_stage() -> None:
    loader = DataLoader(
        range(12),
        preprocessor=lambda item: None if item % 3 == 0 else item,
        batch_size=2,
        aggregator=lambda batch: None if 4 in batch else batch,
        transfer_fn=lambda batch: None if 7 in batch else batch,
        output_order="input",
    )
    assert list(loader) == [[1, 2], [10, 11]]


@each("is_async", [False, True])
@each("step", ["preprocessor", "aggregator", "transfer_fn"])
def test_an_epoch_of_which_all_is_dropped_says_so(step: str, is_async: bool) -> None:
    """A forgotten ``return`` gave an empty loop without a word."""
    loader = DataLoader(range(6), **{step: lambda _: None})

    async def iterate() -> list[Any]:
        return [batch async for batch in loader]

    with pytest.warns(UserWarning, match="gave nothing.*'lambda' returned None for all its inputs"):
        assert (asyncio.run(iterate()) if is_async else list(loader)) == []


def test_the_thread_of_a_source_has_its_name() -> None:
    class Names:
        def __iter__(self) -> Iterator[str]:
            yield threading.current_thread().name

    assert list(DataLoader(Names())) == ["spdl_media source Names-1"]


def test_a_small_last_batch_that_is_dropped_is_no_forgotten_return() -> None:
    """Of three samples, as many are dropped as there are batches."""
    for aggregator, expected in ((None, [[0, 1]]), (lambda _: 1 // 0, [])):
        loader = DataLoader(
            range(3), batch_size=2, drop_last=True, aggregator=aggregator, max_failures=-1
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert list(loader) == expected


def test_what_can_be_iterated_both_ways_is_asynchronous() -> None:
    class Both:
        def __iter__(self) -> Iterator[str]:
            return iter(["sync"])

        async def __aiter__(self) -> AsyncIterator[str]:
            yield "async"

    pipeline = PipelineBuilder().add_source(Both()).add_sink().build()
    assert list(DataLoader(Both())) == list(pipeline) == ["async"]


class TestEpochs:
    def test_each_iteration_is_one(self) -> None:
        loader = DataLoader(range(5), preprocessor=double, output_order="input")
        assert [list(loader) for _ in range(3)] == [[0, 2, 4, 6, 8]] * 3
        assert loader.epoch == 3

    def test_those_of_a_sampler(self) -> None:
        def sampler() -> DistributedRandomSampler:
            return DistributedRandomSampler(30, rank=0, world_size=1)

        alone = sampler()
        epochs = [list(alone) for _ in range(6)]
        shared = sampler()
        loader = DataLoader(shared, output_order="input")
        assert [list(loader), list(loader)] == epochs[:2]
        loader.set_epoch(5)
        assert (loader.epoch, list(loader)) == (5, epochs[5])
        # Set at the sampler, as users of PyTorch do.
        shared.set_epoch(3)
        assert (loader.epoch, list(loader), loader.epoch) == (3, epochs[3], 4)
        # Begun before, so it continues from there.
        shared.set_epoch(2)
        assert list(DataLoader(shared, output_order="input")) == epochs[2]

    def test_those_of_a_sampler_in_a_mapping(self) -> None:
        sampler = DistributedRandomSampler(9, rank=0, world_size=1)
        expected = [[index * 10 for index in sampler] for _ in range(2)]
        sampler.set_epoch(0)
        source = MapIterator([index * 10 for index in range(9)], sampler)
        loader = DataLoader(source, output_order="input")
        assert [list(loader), list(loader)] == expected

    def test_those_of_pytorch(self) -> None:
        distributed = pytest.importorskip("torch.utils.data.distributed")

        def sampler() -> Any:
            return distributed.DistributedSampler(range(20), num_replicas=2, rank=1)

        alone = sampler()
        expected = []
        for epoch in range(3):
            alone.set_epoch(epoch)
            expected.append(list(alone))
        shared = sampler()
        loader = DataLoader(shared, output_order="input")
        assert [list(loader), list(loader)] == expected[:2]
        for epoch in (0, 2):
            shared.set_epoch(epoch)
            assert list(loader) == expected[epoch]
        # The epoch is the current one, so nothing changes, but the loader must notice the call.
        shared.set_epoch(2)
        assert loader.epoch == 3
        loader.set_epoch(2)
        assert list(loader) == expected[2]

    def test_two_at_a_time(self) -> None:
        sampler = DistributedRandomSampler(20, rank=0, world_size=1)
        epochs = [list(sampler), list(sampler)]
        sampler.set_epoch(0)
        loader = DataLoader(sampler, output_order="input")
        assert [
            list(items) for items in zip(*zip(loader, loader, strict=True), strict=True)
        ] == epochs

    def test_a_generator_can_be_read_once(self) -> None:
        loader = DataLoader(iter(range(3)), output_order="input")
        assert list(loader) == [0, 1, 2]
        with pytest.warns(UserWarning, match="range_iterator, can be read only once.*Pass a list"):
            assert list(loader) == []

    def test_an_endless_source_continues(self) -> None:
        loader = DataLoader(repeat_source([1, 2, 3]), batch_size=2, output_order="input")
        first = list(itertools.islice(loader, 4))
        second = list(itertools.islice(loader, 2))
        assert first + second == [[1, 2], [3, 1], [2, 3], [1, 2], [3, 1], [2, 3]]


class TestCoroutines:
    @pytest.mark.parametrize("stage", ["preprocessor", "aggregator", "transfer_fn"])
    def test_one_that_a_plain_function_returns_fails_with_the_remedy(self, stage: str) -> None:
        async def load(item: Any) -> Any:
            return item

        def call(item: Any) -> Any:
            return load(item)

        loader = DataLoader([1, 2], **{stage: call}, max_failures=float("inf"))
        assert list(loader) == []
        assert loader.failure_counts["call"] == 2
        assert "stage 'call' returned a coroutine" in str(loader.failures[0].exception)


class TestStopping:
    def test_breaking_off_ends_the_threads(self) -> None:
        before = set(threading.enumerate())
        for _ in DataLoader(itertools.count(), preprocessor=double):
            assert set(threading.enumerate()) - before
            break
        gc.collect()
        wait_for_threads(before)

    def test_breaking_off_closes_what_the_source_has_opened(self) -> None:
        class Files:
            def __iter__(self) -> Iterator[int]:
                opened.append(self)
                try:
                    yield from itertools.count()
                finally:
                    opened.remove(self)

        opened: list[Files] = []
        files = Files()
        for source in (files, MergeIterator([files]), MapIterator(range(10**9), files)):
            # The loader is kept, as for a next epoch.
            loader = DataLoader(source)
            for _ in loader:
                assert opened
                break
            wait_until(lambda: not opened)

    def test_so_does_the_end(self) -> None:
        before = set(threading.enumerate())
        iterator = iter(DataLoader(range(10), preprocessor=double))
        assert len(list(iterator)) == 10
        wait_for_threads(before)
        with pytest.raises(StopIteration):
            next(iterator)

    @pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="signals reach no thread")
    def test_a_signal_handler_may_close_an_iterator_that_waits(self) -> None:
        proceed = threading.Event()
        loader = loader_that_waits(proceed)
        iterator: Any = iter(loader)
        assert next(iterator) == 0
        pipeline: Any = loader._pipeline

        def interrupt() -> None:
            wait_until(lambda: bool(pipeline._run.graph.sink._waiters))
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

        def close(*_: object) -> None:
            proceed.set()
            iterator.close()

        before = signal.signal(signal.SIGUSR1, close)
        thread = threading.Thread(target=interrupt)
        thread.start()
        try:
            assert list(iterator) == []
        finally:
            thread.join(60)
            signal.signal(signal.SIGUSR1, before)
        # Otherwise the rest of the epoch would be lost.
        state = loader.state_dict()
        assert (state["epoch"], state["done"]) == (0, [[0, 1]])

    def test_after_a_timeout_iteration_continues(self) -> None:
        proceed = threading.Event()

        def wait(item: int) -> int:
            assert proceed.wait(20)
            return item

        iterator = iter(DataLoader(range(2), preprocessor=wait, timeout=0.05, output_order="input"))
        with pytest.raises(TimeoutError):
            next(iterator)
        proceed.set()
        assert list(retried(iterator)) == [0, 1]

    def test_the_source_is_not_read_far_ahead(self) -> None:
        given = 0

        def source() -> Iterator[int]:
            nonlocal given
            while True:
                given += 1
                yield given

        iterator = iter(DataLoader(source(), preprocessor=double, num_threads=2, buffer_size=2))
        next(iterator)
        del iterator
        assert given < 200

    def test_no_more_batches_are_made_than_the_buffer_and_the_threads_hold(self) -> None:
        made = 0

        def count(batch: list[int]) -> list[int]:
            nonlocal made
            made += 1
            return batch

        loader = DataLoader(
            itertools.count(), batch_size=64, aggregator=count, num_threads=2, buffer_size=3
        )
        iterator = iter(loader)
        next(iterator)
        until_still(lambda: made)
        del iterator
        # One batch that was taken, the buffer, and those in the stage: its concurrency and one that waits.
        assert made <= 1 + 3 + 2 + 1


def until_still(value: Callable[[], int]) -> None:
    """Wait until a value is above zero and has stopped changing."""
    still, last = 0, 0
    while still < 20:
        time.sleep(0.001)
        still = still + 1 if value() == last > 0 else 0
        last = value()


def retried(iterator: Iterator[Any]) -> Iterator[Any]:
    """Retry after a TimeoutError: on a busy machine, the short timeout of the test may expire."""
    while True:
        try:
            yield next(iterator)
        except TimeoutError:
            continue
        except StopIteration:
            return


class TestFailures:
    @pytest.mark.parametrize("order", ORDERS)
    def test_are_dropped_and_recorded(self, order: Any) -> None:
        def fragile(item: int) -> int:
            if item % 4 == 1:
                raise ValueError(f"no {item}")
            return item

        told: list[tuple[str, Any]] = []
        loader = DataLoader(
            range(12),
            preprocessor=fragile,
            batch_size=3,
            output_order=order,
            on_failure=lambda record, item: told.append((record.stage, item)),
        )
        assert loader.failures == ()
        with pytest.raises(PipelineError, match="no statistics before its first iteration"):
            loader.statistics()
        batches = list(loader)
        assert sorted(flat(batches)) == [0, 2, 3, 4, 6, 7, 8, 10, 11]
        assert [len(batch) for batch in batches] == [3, 3, 3]
        assert sorted(told) == [("fragile", 1), ("fragile", 5), ("fragile", 9)]
        assert sorted(str(failure.exception) for failure in loader.failures) == [
            "no 1",
            "no 5",
            "no 9",
        ]
        assert {failure.input for failure in loader.failures} == {"1", "5", "9"}
        assert loader.failure_counts["fragile"] == 3

    def test_of_an_aggregator_lose_the_batch(self) -> None:
        def picky(batch: list[int]) -> int:
            if 3 in batch:
                raise ValueError("three")
            return sum(batch)

        told: list[Any] = []
        loader = DataLoader(
            range(8),
            batch_size=2,
            aggregator=picky,
            output_order="input",
            on_failure=lambda record, batch: told.append(batch),
        )
        assert list(loader) == [1, 9, 13]
        assert told == [[2, 3]]
        assert loader.failures[0].input == "[2, 3]"

    def test_what_on_failure_raises_ends_the_epoch(self) -> None:
        def fragile(item: int) -> int:
            raise ValueError(f"no {item}")

        def complain(record: object, item: int) -> None:
            raise KeyError(item)

        loader = DataLoader(
            range(5), preprocessor=fragile, on_failure=complain, max_failures=NO_LIMIT
        )
        with pytest.raises(PipelineFailure, match="on_failure raised KeyError"):
            list(loader)

    def test_in_the_consumer_end_the_threads(self) -> None:
        before = set(threading.enumerate())

        def train() -> None:
            for _ in DataLoader(itertools.count(), preprocessor=double):
                assert set(threading.enumerate()) - before
                raise ZeroDivisionError("loss is zero")

        with pytest.raises(ZeroDivisionError, match="loss is zero"):
            train()
        wait_for_threads(before)

    def test_of_everything_are_an_error(self) -> None:
        def broken(item: int) -> int:
            raise ValueError(f"no {item}")

        loader = DataLoader(range(5), preprocessor=broken)
        with pytest.raises(PipelineFailure, match="broken") as caught:
            list(loader)
        assert isinstance(caught.value.exceptions[0], ValueError)

    def test_are_summed_up_where_an_epoch_ends_early(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fragile(item: int) -> int:
            if item == 0:
                raise ValueError("zero")
            return item

        for _ in DataLoader(range(1000), preprocessor=fragile, num_threads=1):
            break
        (line,) = (record.getMessage() for record in caplog.records if "epoch" in record.msg)
        assert re.fullmatch(
            r"failures of this epoch, which ended early: 1 of \d+ in 'fragile'", line
        )

    def test_up_to_a_limit(self) -> None:
        def fragile(item: int) -> int:
            if item >= 5:
                raise ValueError("too large")
            return item

        limited = DataLoader(range(20), preprocessor=fragile, max_failures=3, output_order="input")
        given = []
        with pytest.raises(PipelineFailure, match="fragile"):
            given.extend(limited)
        loader = DataLoader(range(20), preprocessor=fragile, max_failures=NO_LIMIT)
        assert sorted(loader) == [0, 1, 2, 3, 4]

    def test_of_the_source_come_after_what_was_made(self) -> None:
        def source() -> Iterator[int]:
            yield from range(4)
            raise OSError("connection lost")

        iterator = iter(DataLoader(source(), preprocessor=double, output_order="input"))
        assert list(itertools.islice(iterator, 4)) == [0, 2, 4, 6]
        with pytest.raises(PipelineFailure, match="source") as caught:
            next(iterator)
        assert isinstance(caught.value.exceptions[0], OSError)
        with pytest.raises(StopIteration):
            next(iterator)


class TestChance:
    def test_depends_on_the_item_alone(self) -> None:
        def draw(item: int, rng: np.random.Generator) -> tuple[int, int]:
            return item, int(rng.integers(2**60))

        async def draw_async(item: int, *, rng: np.random.Generator) -> tuple[int, int]:
            return draw(item, rng)

        def draw_twice(item: int, *, rng: np.random.Generator) -> Iterator[tuple[int, int]]:
            yield draw(item, rng)
            yield draw(item, rng)

        for epoch in (0, 1):
            expected = [(n, int(sample_rng(3, epoch, n).integers(2**60))) for n in range(30)]
            for preprocessor, num_threads in itertools.product((draw, draw_async), (1, 8)):
                loader = DataLoader(
                    range(30), preprocessor=preprocessor, num_threads=num_threads, seed=3
                )
                loader.set_epoch(epoch)
                assert sorted(loader) == expected
            fanned_out = DataLoader(
                range(30), preprocessor=draw_twice, seed=3, output_order="input"
            )
            fanned_out.set_epoch(epoch)
            assert list(fanned_out)[::2] == expected

    @pytest.mark.parametrize("uses_mapping", [False, True])
    def test_does_not_depend_on_the_number_of_ranks(self, uses_mapping: bool) -> None:
        def draw(item: int, rng: np.random.Generator) -> tuple[int, int]:
            return item, int(rng.integers(2**60))

        def of_rank(rank: int, world_size: int) -> list[tuple[int, int]]:
            sampler = DistributedRandomSampler(12, rank=rank, world_size=world_size)
            source = MapIterator(range(12), sampler) if uses_mapping else sampler
            return list(DataLoader(source, preprocessor=draw))

        assert sorted(of_rank(0, 2) + of_rank(1, 2)) == sorted(of_rank(0, 1))

    def test_one_that_is_bound_already_stays(self) -> None:
        def draw(item: int, rng: int) -> tuple[int, int]:
            return item, rng

        with pytest.warns(UserWarning, match="preprocessor binds rng=7, which all items share"):
            loader = DataLoader([1], preprocessor=functools.partial(draw, rng=7))
        assert list(loader) == [(1, 7)]

    def test_never_changes(self) -> None:
        """Fixed expected values: random numbers of a training must not change with a release."""
        raw = [int(sample_rng(*key).bit_generator.random_raw()) for key in KEYS]
        assert raw == RAW

    def test_bad_keys(self) -> None:
        with pytest.raises(ValueError, match="position must be at least 0, not -1"):
            sample_rng(0, 0, -1)


KEYS = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (2**70, 5, 2**40)]
RAW = [
    8358101727642175730,
    16455085314981476920,
    18076242073582295704,
    16610969353919836395,
    13876229966123295010,
]


def labelled(index: int) -> tuple[sm.CPUBuffer, int, str]:
    return sm.convert_array(np.full((2, 3), index, np.float32)), index, "cat"


class TestArrays:
    @pytest.mark.parametrize("to", ["torch", "jax", "numpy"])
    def test_batches_are_of_the_library_that_was_asked_for(self, to: Any) -> None:
        library = pytest.importorskip(to)
        loader = DataLoader(
            range(5), preprocessor=labelled, batch_size=3, to=to, output_order="input"
        )
        array = {"torch": "Tensor", "jax": "Array", "numpy": "ndarray"}[to]
        for (images, labels, names), expected in zip(loader, ([0, 1, 2], [3, 4]), strict=True):
            assert isinstance(images, getattr(library, array))
            assert tuple(images.shape) == (len(expected), 2, 3)
            assert labels.tolist() == images[:, 0, 0].tolist() == expected
            assert names == ["cat"] * len(expected)

    def test_the_default_collate_of_torch_takes_the_samples(self) -> None:
        torch = pytest.importorskip("torch")
        samples = list(DataLoader(range(3), preprocessor=labelled, to="torch"))
        images, labels, _ = torch.utils.data.default_collate(samples)
        assert images[:, 1, 2].tolist() == labels.tolist()
        assert sorted(labels.tolist()) == [0, 1, 2]

    def test_an_aggregator_of_the_users_own_and_plain_values(self) -> None:
        assert list(DataLoader([3], to="numpy")) == [3]
        loader = DataLoader([3, 4], batch_size=2, aggregator=np.array, to="numpy")
        assert [batch.tolist() for batch in loader] == [[3, 4]]

    def test_what_the_library_refuses_ends_the_iteration(self) -> None:
        pytest.importorskip("jax")
        iterator = iter(DataLoader([2**40], batch_size=1, to="jax"))
        with pytest.raises(TypeError, match="JAX would cut int64"):
            next(iterator)
        assert list(iterator) == []

    def test_a_missing_library_is_reported_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "torch", None)
        with pytest.raises(sm.MissingDependencyError, match="pip install"):
            DataLoader([1], to="torch")


class TestLength:
    def test_is_that_of_the_epoch(self) -> None:
        assert len(DataLoader(range(10))) == 10
        assert len(DataLoader(range(10), batch_size=4)) == 3
        assert len(DataLoader(range(10), batch_size=4, drop_last=True)) == 2
        assert (
            len(DataLoader(DistributedRandomSampler(10, rank=0, world_size=2), batch_size=2)) == 3
        )

    def test_may_be_unknown(self) -> None:
        with pytest.raises(TypeError, match="no length, because its source, a Numbers, has none"):
            len(DataLoader(Numbers(3)))
        with pytest.raises(TypeError, match="preprocessor is a generator"):
            len(DataLoader(range(3), preprocessor=twice))
        with pytest.raises(TypeError, match="its source, a MapIterator, has none"):
            len(DataLoader(MapIterator([1], iter([0]))))
        with pytest.raises(TypeError, match="its source, a MergeIterator, has none"):
            len(DataLoader(MergeIterator([[1]])))


class Endless:
    def __getitem__(self, index: int) -> int:
        return index


class MapStyle(Endless):
    def __len__(self) -> int:
        return 30


class TestMapStyleDatasets:
    @pytest.mark.parametrize("sampler", [None, [4, 2, 9]])
    def test_are_read_in_the_threads(self, sampler: list[int] | None) -> None:
        together = threading.Barrier(3, timeout=20)

        class Waiting(MapStyle):
            def __getitem__(self, index: int) -> int:
                together.wait()
                return index

        src = Waiting() if sampler is None else MapIterator(Waiting(), sampler)
        loader = DataLoader(src, num_threads=3, preprocessor=double, output_order="input")
        keys = range(30) if sampler is None else sampler
        assert len(loader) == len(keys)
        assert list(loader) == [2 * key for key in keys]

    def test_a_map_iterator_that_iterates_otherwise(self) -> None:
        class Backwards(MapIterator[int]):
            def __iter__(self) -> Iterator[int]:
                return reversed(list(super().__iter__()))

        assert list(DataLoader(Backwards([3, 4]), output_order="input")) == [4, 3]

    def test_what_cannot_be_read_fails_alone(self) -> None:
        class Damaged(MapStyle):
            def __getitem__(self, index: int) -> int:
                if index == 7:
                    raise OSError("damaged")
                return index

        loader = DataLoader(Damaged(), output_order="input")
        assert list(loader) == [index for index in range(30) if index != 7]
        assert loader.failure_counts == {"dataset": 1}


async def transfer_async(batch: Any) -> Any:
    return batch


@each(
    "arguments, error, message",
    [
        (
            {"src": "train"},
            TypeError,
            "not 'train'. For the files of a folder, use ImageFolder or ",
        ),
        ({"src": Path("train")}, TypeError, "not .*Path.'train'.*LocalDirectory"),
        ({"src": 5}, TypeError, "an async iterable or a map-style dataset, not 5"),
        ({"src": twice}, TypeError, r"not <function.*\. Call it: twice\(\)"),
        ({"src": list}, TypeError, r"not <class 'list'>\. Call it: list\(\)"),
        ({"src": Endless()}, TypeError, "Endless has neither keys.. nor a length; pass a sampler"),
        ({"on_failure": 5}, TypeError, "on_failure must be a function"),
        ({"preprocessor": 5}, TypeError, "preprocessor must be a function.*not int"),
        ({"preprocessor": sm.ImageRecipe}, TypeError, r"the class .*an object: ImageRecipe\("),
        ({"preprocessor": twice(1)}, TypeError, "preprocessor must be .* callable, not generator"),
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1, not 0"),
        ({"batch_size": 2.0}, TypeError, "batch_size must be an int, not 2.0"),
        ({"drop_last": True}, ValueError, "drop_last=True.*needs batch_size"),
        (
            {"aggregator": twice},
            TypeError,
            "plain or coroutine function, and twice is a generator; only the prep",
        ),
        (
            {"transfer_fn": twice},
            TypeError,
            "transfer_fn must be a plain function, and twice is a gen",
        ),
        (
            {"transfer_fn": transfer_async},
            TypeError,
            "must be a plain function, .* is a coroutine function",
        ),
        ({"buffer_size": 0}, ValueError, "buffer_size must be at least 1"),
        ({"num_threads": 0}, ValueError, "num_threads must be at least 1"),
        ({"timeout": 0}, ValueError, "timeout must be above 0 seconds"),
        ({"to": "tensor"}, ValueError, "to must be 'torch', 'numpy' or 'jax', not 'tensor'"),
        ({"output_order": "random"}, ValueError, "output_order must be .*not 'random'"),
        ({"seed": -1}, ValueError, "seed must be at least 0"),
        ({"max_failures": -2}, ValueError, "max_failures"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        DataLoader(**{"src": [1], **arguments})


def test_unknown_arguments_are_answered_with_ours() -> None:
    for name, answer in {
        "collate_fn": "Use aggregator=collate_fn",
        "num_workers": "Use num_threads=",
        "shuffle": r".*ImageFolder\(shuffle=True\).*DistributedRandomSampler",
        "sampler": r".*MapIterator\(dataset, sampler\)",
        "in_order": "Use output_order='input'",
        "transform": "Use preprocessor=transform",
        "generator": "Use seed= of the source for its order",
        "pin_memory": "Use transfer_fn=transfer_tensor",
        "batchsize": "Did you mean 'batch_size'?",
        "xyz": "$",
    }.items():
        with pytest.raises(TypeError, match=f"DataLoader.* argument '{name}'.? *{answer}"):
            DataLoader([1], **{name: 1})
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        DataLoader()  # type: ignore[call-arg]
    assert "collate_fn" not in inspect.signature(DataLoader).parameters


@pytest.mark.parametrize(
    ("limit", "cores"),
    [("max 100000", 6), ("150000 100000", 2), ("20000 100000", 1), ("900000 100000", 6), (None, 6)],
)
def test_threads_are_as_many_as_the_cores_that_this_process_may_use(
    limit: str | None, cores: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "cpu.max"
    if limit is not None:
        file.write_text(limit)
    monkeypatch.setattr("spdl_media.pipeline.executors._CPU_LIMIT", file)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    monkeypatch.setattr(os, "process_cpu_count", lambda: 6, raising=False)
    loader = DataLoader(range(3), preprocessor=double, aggregator=transfer_async)
    assert sorted(loader) == [0, 2, 4]
    concurrency = {stage.name: stage.concurrency for stage in loader.statistics().stages}
    assert concurrency == {"double": cores, "transfer_async": 8}


class TestPickling:
    def test_a_loader_is_no_collection_of_its_arguments(self) -> None:
        # Lightning maps over the fields of dataclasses that it sends to processes, and sets them.
        assert not dataclasses.is_dataclass(DataLoader(range(3)))

    def test_a_copy_continues_where_the_loader_is(self) -> None:
        source = MapIterator(list(range(20)), DistributedRandomSampler(20, seed=4))
        loader = DataLoader(
            source, preprocessor=double, batch_size=3, output_order="input", seed=5, num_threads=3
        )
        fresh = pickle.loads(pickle.dumps(loader))
        assert (fresh.batch_size, fresh.seed, fresh.num_threads, fresh.epoch) == (3, 5, 3, 0)
        first = list(loader)
        assert list(fresh) == first
        assert (second := list(loader)) == list(pickle.loads(pickle.dumps(fresh)))
        iterator = iter(loader)
        begun = [next(iterator), next(iterator)]
        copy = pickle.loads(pickle.dumps(loader))
        rest = list(iterator)
        assert list(copy) == rest
        assert begun + rest not in (first, second)
        assert copy.epoch == loader.epoch == 3
        assert list(copy) == list(loader)

    def test_the_epoch_that_the_user_chose_is_kept(self) -> None:
        loader = DataLoader(DistributedRandomSampler(9, seed=1), batch_size=9)
        loader.set_epoch(7)
        assert pickle.loads(pickle.dumps(loader)).epoch == 7

    def test_what_cannot_be_pickled_is_reported(self) -> None:
        with pytest.raises(TypeError, match="generator"):
            pickle.dumps(DataLoader(item for item in range(3)))


class TestTasks:
    def test_async_for_gives_what_for_does(self) -> None:
        loader = DataLoader(
            range(10), preprocessor=double, batch_size=4, to="numpy", output_order="input"
        )

        async def consume() -> list[Any]:
            return [batch.tolist() async for batch in loader]

        for _ in range(2):
            assert asyncio.run(consume()) == [[0, 2, 4, 6], [8, 10, 12, 14], [16, 18]]
        assert loader.epoch == 2
        assert [batch.tolist() for batch in loader][2] == [16, 18]

    def test_another_task_may_close_an_iterator_that_waits(self) -> None:
        proceed = threading.Event()
        loader = loader_that_waits(proceed)

        async def take() -> list[int]:
            iterator: Any = aiter(loader)
            taken = [await anext(iterator)]
            waits = asyncio.create_task(anext(iterator, None))
            await asyncio.sleep(0)
            iterator.close()
            proceed.set()
            return [*taken, await waits, *[item async for item in iterator]]

        assert asyncio.run(take()) == [0, None]
        assert loader.state_dict()["done"] == [[0, 1]]

    @pytest.mark.parametrize("count", [2, 9])
    def test_a_loader_is_freed_after_its_iteration(self, count: int) -> None:
        async def take() -> weakref.ref[DataLoader]:
            loader = DataLoader(range(4), preprocessor=double)
            iterator = aiter(loader)
            for _ in range(count):
                await anext(iterator, None)
            return weakref.ref(loader)

        before = set(threading.enumerate())
        reference = asyncio.run(take())
        gc.collect()
        wait_for_threads(before)
        gc.collect()
        assert reference() is None

    def test_the_state_of_an_iteration_that_is_broken_off(self) -> None:
        loader = DataLoader(range(10), batch_size=4, output_order="input")

        async def take_one() -> Any:
            iterator = aiter(loader)
            return await anext(iterator)

        before = set(threading.enumerate())
        assert asyncio.run(take_one()) == [0, 1, 2, 3]
        gc.collect()
        wait_for_threads(before)
        assert loader.state_dict()["done"] == [[0, 4]]
        resumed = DataLoader(range(10), batch_size=4, output_order="input")
        resumed.load_state_dict(loader.state_dict())
        assert list(resumed) == [[4, 5, 6, 7], [8, 9]]

    def test_an_iterator_that_is_dropped_does_not_block_the_event_loop(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stops: SimpleQueue[threading.Thread] = SimpleQueue()
        stop = Run.stop

        def noted(self: Run, timeout: float) -> None:
            stops.put(threading.current_thread())
            stop(self, timeout)

        async def take_one() -> None:
            await anext(aiter(loader))

        loader = DataLoader(range(10))
        monkeypatch.setattr(Run, "stop", noted)
        asyncio.run(take_one())
        assert stops.get(timeout=20) is not threading.current_thread()

    def test_it_may_be_closed_again(self) -> None:
        async def consume() -> None:
            iterator = aiter(DataLoader(range(3)))
            assert [item async for item in iterator] == [0, 1, 2]
            iterator.close()
            assert await anext(iterator, None) is None

        asyncio.run(consume())

    def test_other_tasks_continue_meanwhile(self) -> None:
        gate = threading.Event()
        loader = DataLoader([1], preprocessor=lambda item: gate.wait(20) and item)

        async def consume() -> list[int]:
            return [item async for item in loader]

        async def both() -> list[int]:
            task = asyncio.create_task(consume())
            await asyncio.sleep(0)
            gate.set()
            return await task

        assert asyncio.run(both()) == [1]

    def test_failures_end_it(self) -> None:
        async def consume(loader: DataLoader) -> None:
            iterator = aiter(loader)
            with pytest.raises(PipelineFailure):
                await anext(iterator)
            with pytest.raises(StopAsyncIteration):
                await anext(iterator)
            assert loader.epoch == 1

        asyncio.run(consume(DataLoader([1], preprocessor=fail_always)))

    @pytest.mark.parametrize("timeout", [None, 0.01])
    def test_it_continues_after_a_timeout(self, timeout: float | None) -> None:
        """With the loader's own timeout, and with one of the caller, which cancels the call."""
        gate = threading.Event()

        def wait(item: int) -> int:
            gate.wait(20)
            return item

        async def consume() -> list[int]:
            iterator = aiter(loader)
            for _ in range(2):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(iterator), None if timeout else 0.01)
            gate.set()
            items = []
            while len(items) < 5:
                # A busy machine may take longer than the loader's timeout.
                with contextlib.suppress(TimeoutError):
                    items.append(await anext(iterator))
                    assert loader.state_dict()["done"] == [[0, len(items)]]
            return items

        loader = DataLoader(range(5), preprocessor=wait, output_order="input", timeout=timeout)
        assert asyncio.run(consume()) == list(range(5))

    def test_a_task_that_is_cancelled_ends_the_threads(self) -> None:
        before = set(threading.enumerate())
        gate = threading.Event()

        def wait(item: int) -> int:
            gate.wait(20)
            return item

        async def consume() -> None:
            async for _ in DataLoader(range(5), preprocessor=wait):
                pass

        async def cancel() -> None:
            task = asyncio.create_task(consume())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(cancel())
        gate.set()
        gc.collect()
        wait_for_threads(before)


def fail_always(item: int) -> int:
    raise ValueError(item)
