"""What the DataLoader keeps book with."""

from __future__ import annotations

import json
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spdl_media._loader_stages import Tagged, takes_rng
from spdl_media._resume import Intervals, Ledger, Snapshot, State
from spdl_media.crops import random_resized_crop

NUMBERS = st.lists(st.integers(0, 40))


def runs(numbers: set[int]) -> tuple[tuple[int, int], ...]:
    """The model: maximal runs of numbers without a gap."""
    starts = sorted(number for number in numbers if number - 1 not in numbers)
    stops = sorted(number + 1 for number in numbers if number + 1 not in numbers)
    return tuple(zip(starts, stops, strict=True))


@given(NUMBERS, NUMBERS)
def test_intervals_are_a_set(before: list[int], numbers: list[int]) -> None:
    intervals = Intervals(runs(set(before)))
    for number in numbers:
        intervals.add(number)
    expected = {*before, *numbers}
    assert intervals.pairs() == runs(expected)
    assert {number for number in range(45) if number in intervals} == expected
    assert intervals.leading == next(n for n in range(45) if n not in expected)


@given(st.permutations(range(30)))
def test_intervals_of_all_numbers_are_one(numbers: list[int]) -> None:
    intervals = Intervals()
    for number in numbers:
        intervals.add(number)
    assert intervals.pairs() == ((0, 30),)


@given(st.lists(st.integers(0, 4), max_size=8), st.randoms(use_true_random=False))
def test_ledger_knows_when_an_item_with_several_samples_is_done(
    counts: list[int], random: Any
) -> None:
    """Samples are settled and counts told in any order; an item is done when both are complete."""
    events: list[tuple[int, int | None]] = [(position, None) for position in range(len(counts))]
    events += [(position, offset) for position, n in enumerate(counts) for offset in range(n)]
    random.shuffle(events)
    ledger = Ledger(State(epoch=0, seed=0))
    told: set[tuple[int, int | None]] = set()
    for position, offset in events:
        told.add((position, offset))
        if offset is None:
            ledger.count_samples(position, counts[position])
        else:
            ledger.settle([(position, offset)])
        state = ledger.state()
        done = {
            position
            for position, count in enumerate(counts)
            if {(position, None), *((position, n) for n in range(count))} <= told
        }
        assert state.done == runs(done)
        assert dict(state.partly_done) == {
            position: runs(offsets)
            for position in range(len(counts))
            if position not in done
            and (offsets := {o for p, o in told if p == position and o is not None})
        }


def test_a_closed_ledger_stays_as_it_is() -> None:
    ledger = Ledger(State(epoch=0, seed=0))
    ledger.settle([(0, None)])
    ledger.close()
    ledger.settle([(1, None), (2, 0)])
    ledger.count_samples(3, 0)
    assert ledger.state().done == ((0, 1),)
    assert ledger.state().partly_done == ()


def test_ledger_keeps_the_last_snapshot_behind_which_nothing_is_missed() -> None:
    ledger = Ledger(State(epoch=0, seed=0))
    for position in (16, 32, 48):
        ledger.keep_snapshot(Snapshot(position, f"at {position}"))
    assert ledger.state().snapshot is None
    ledger.settle((position, None) for position in range(40))
    assert ledger.state().snapshot == Snapshot(32, "at 32")
    ledger.settle([(45, None)])
    assert ledger.state().snapshot == Snapshot(32, "at 32")
    ledger.settle((position, None) for position in range(40, 48))
    assert ledger.state().snapshot == Snapshot(48, "at 48")


PAIRS = NUMBERS.map(lambda numbers: runs(set(numbers)))
STATES = st.builds(
    State,
    epoch=st.integers(0, 2**40),
    seed=st.integers(0, 2**70),
    done=PAIRS,
    partly_done=st.lists(st.tuples(st.integers(0, 9), PAIRS)).map(tuple),
    snapshot=st.none()
    | st.builds(Snapshot, st.integers(0, 9), st.dictionaries(st.text(), st.integers())),
    source_length=st.none() | st.integers(0, 99),
)


@given(STATES)
def test_states_survive_json(state: State) -> None:
    written = state.to_dict()
    assert State.from_dict(json.loads(json.dumps(written))) == state
    assert State.from_dict(pickle.loads(pickle.dumps(written))) == state


def test_a_state_says_what_is_done() -> None:
    state = State(
        epoch=2, seed=5, done=((0, 7), (9, 10)), partly_done=((8, ((0, 3),)),), source_length=20
    )
    assert state.to_dict() == {
        "version": 1,
        "epoch": 2,
        "seed": 5,
        "num_done": 7,
        "done_beyond": [[9, 10]],
        "partly_done": [[8, [[0, 3]]]],
        "source": None,
        "source_length": 20,
    }


GOOD = State(epoch=0, seed=0, done=((0, 2),)).to_dict()


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        ([1], TypeError, "must be a mapping, as state_dict.. returns, not list"),
        ({}, ValueError, "has version None, and this release reads version 1"),
        ({**GOOD, "version": 2}, ValueError, "has version 2"),
        ({**GOOD, "epoch": -1}, ValueError, "damaged .ValueError: -1 is no count"),
        ({**GOOD, "num_done": "3"}, ValueError, "'3' is no count"),
        ({**GOOD, "done_beyond": [[2, 3]]}, ValueError, "no intervals in order"),
        ({**GOOD, "done_beyond": [[5, 4]]}, ValueError, "no intervals in order"),
        ({"version": 1}, ValueError, "damaged .KeyError: 'num_done'"),
    ],
)
def test_what_is_no_state(state: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        State.from_dict(state)


def test_tagged_values_look_like_the_users() -> None:
    assert repr(Tagged("cat.jpg", [(3, None)])) == "'cat.jpg'"
    assert repr(Tagged(bytes(5000), [(3, None)])) == "<bytes of length 5000>"


def test_which_functions_take_a_generator() -> None:
    def keyword(item: object, *, rng: object) -> None: ...

    def second(item: object, rng: object = None) -> None: ...

    def first(rng: object) -> None: ...

    def swallowing(item: object, **rng: object) -> None: ...

    def positional(item: object, rng: object, /) -> None: ...

    class Callable:
        def __call__(self, item: object, rng: object) -> None: ...

        def method(self, item: object, rng: object) -> None: ...

    for fn in (keyword, second, Callable(), Callable().method, random_resized_crop):
        assert takes_rng(fn)
    for fn in (first, swallowing, positional, dict.get, np.add, str):
        assert not takes_rng(fn)
