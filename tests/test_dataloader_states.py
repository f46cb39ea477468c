"""Saved states: the items that are done, and the samples of partly done items."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from effort import each, examples
from hypothesis import given, settings
from hypothesis import strategies as st

from spdl_media import RandomResizedCrop
from spdl_media._resume import Ledger, State, Tag
from spdl_media.dataloader import DataLoader

N = 30


def runs(numbers: Iterable[int]) -> list[list[int]]:
    """Return the maximal runs of consecutive numbers: the expected result."""
    found = set(numbers)
    starts = sorted(number for number in found if number - 1 not in found)
    stops = sorted(number + 1 for number in found if number + 1 not in found)
    return [list(pair) for pair in zip(starts, stops, strict=True)]


def state_of(done: Iterable[int], partly_done: Any = (), **others: Any) -> dict[str, Any]:
    return {
        "version": 1,
        "epoch": 0,
        "seed": 0,
        "done": runs(done),
        "partly_done": list(partly_done),
        "source": None,
        "source_length": N,
        "order": None,
        "before": [],
        "partly_before": [],
        **others,
    }


@settings(max_examples=examples(60))
@given(st.sets(st.integers(0, N - 1)), st.integers(0, N), st.integers(0, 2**40))
def test_items_fill_the_gaps(done: set[int], count: int, epoch: int) -> None:
    loader = DataLoader(range(N), output_order="input", num_threads=1)
    state = state_of(done, epoch=epoch, seed=2**70)
    loader.load_state_dict(state)
    assert loader.state_dict() == state
    rest = [number for number in range(N) if number not in done]
    # Not beyond the end, where the state is that of the next epoch.
    count = min(count, len(rest))
    iterator = iter(loader)
    assert list(itertools.islice(iterator, count)) == rest[:count]
    expected = state_of({*done, *rest[:count]}, epoch=epoch, seed=2**70)
    assert json.loads(json.dumps(loader.state_dict())) == expected
    assert list(iterator) == rest[count:]


COUNTS = st.lists(st.integers(0, 4), min_size=N, max_size=N)


@settings(max_examples=examples(60))
@given(COUNTS, st.sets(st.tuples(st.integers(0, N - 1), st.integers(0, 3))), st.integers(0, 60))
def test_samples_fill_the_gaps(counts: list[int], told: set[tuple[int, int]], taken: int) -> None:
    """An item is done when all its samples are done; until then, the state lists the done ones."""

    def make(item: int) -> Iterator[tuple[int, int]]:
        return ((item, offset) for offset in range(counts[item]))

    def several(item: int) -> Iterator[tuple[int, int]]:
        yield from make(item)

    samples = [sample for item in range(N) for sample in make(item)]
    done = {sample for sample in samples if sample in told}
    partly_done = [
        [item, runs(offset for position, offset in done if position == item)]
        for item in sorted({item for item, _ in done})
    ]
    loader = DataLoader(range(N), preprocessor=several, output_order="input", num_threads=1)
    loader.load_state_dict(state_of([], partly_done))
    rest = [sample for sample in samples if sample not in done]
    iterator = iter(loader)
    given = list(itertools.islice(iterator, min(taken, len(rest))))
    assert given == rest[:taken]
    if given:
        state = loader.state_dict()
        done |= set(given)
        last = given[-1][0]
        # Those before the last one are done: all their samples were given. Those after it may
        # be, if all theirs were done before.
        assert (state["done"] or [[0, 0]])[0][1] >= last
        for item, offsets in state["partly_done"]:
            assert offsets == runs(offset for position, offset in done if position == item)
    assert given + list(iterator) == rest


def test_a_state_stays_as_it_is_when_the_consumer_has_gone() -> None:
    loader = DataLoader(range(N), preprocessor=lambda item: None if item else 0)
    iterator = iter(loader)
    assert next(iterator) == 0
    del iterator
    state = loader.state_dict()
    assert loader.state_dict() == state


def test_a_state_may_be_taken_while_a_batch_is_settled() -> None:
    """As by a signal handler, which runs in the thread that it interrupts."""
    ledger = Ledger(State(epoch=0, seed=0))
    states: list[State] = []

    def tags() -> Iterator[Tag]:
        yield 0, None
        states.append(ledger.state())
        yield 1, None

    thread = threading.Thread(target=ledger.settle, args=(tags(),), daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert [*states, ledger.state()] == [
        State(epoch=0, seed=0, done=((0, 1),)),
        State(epoch=0, seed=0, done=((0, 2),)),
    ]


GOOD = state_of([0, 1])


@each(
    "state, error, message",
    [
        ([1], TypeError, "must be a mapping, as state_dict.. returns, not int"),
        ({}, ValueError, "has version None, and this release reads version 1"),
        ({**GOOD, "version": 2}, ValueError, "has version 2"),
        ({**GOOD, "done": 3}, ValueError, "damaged .TypeError: .*not iterable"),
        ({**GOOD, "source": {}}, ValueError, "damaged .TypeError: .*'position'"),
        ({"version": 1}, ValueError, "damaged .KeyError: '"),
    ],
)
def test_not_a_state(state: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        DataLoader(range(N)).load_state_dict(state)


def test_records_of_failures_show_the_users_value() -> None:
    def fail(item: object) -> None:
        raise ValueError

    items = ["cat.jpg", bytes(5000)]
    loader = DataLoader(items, preprocessor=fail, max_failures=float("inf"), num_threads=1)
    assert list(loader) == []
    assert {failure.input for failure in loader.failures} == {
        "'cat.jpg'",
        "<bytes of length 5000>",
    }


def test_which_functions_take_a_generator() -> None:
    def keyword(item: object, *, rng: object) -> object:
        return rng

    def second(item: object, rng: object = None) -> object:
        return rng

    def first(rng: object) -> object:
        return rng

    def swallowing(item: object, **rng: object) -> object:
        return rng

    def positional(item: object, rng: object = None, /) -> object:
        return rng or item

    class Callable:
        def __call__(self, item: object, rng: object) -> object:
            return rng

        def method(self, item: object, rng: object) -> object:
            return rng

    for fn in (keyword, second, Callable(), Callable().method):
        (rng,) = DataLoader([(4, 4)], preprocessor=fn)
        assert isinstance(rng, np.random.Generator)
    for fn in (first, swallowing, positional, str):
        (other,) = DataLoader([(4, 4)], preprocessor=fn)
        assert not isinstance(other, np.random.Generator)
    (box,) = DataLoader([(40, 30)], preprocessor=RandomResizedCrop())
    assert len(box) == 4
