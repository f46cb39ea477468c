"""An epoch is resumed with another number of ranks: each remaining sample is delivered exactly once."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from effort import each, examples
from hypothesis import given, settings
from hypothesis import strategies as st

from spdl_media.dataloader import DataLoader, MapIterator, sample_rng
from spdl_media.source import DistributedDeterministicSampler, DistributedRandomSampler, Uneven

EPOCH = 3
KINDS: dict[str, Callable[..., Any]] = {
    "random": lambda n, **place: DistributedRandomSampler(n, seed=5, **place),
    "in order": lambda n, **place: DistributedDeterministicSampler(
        n, **{"uneven": "keep", **place}
    ),
    "mapping": lambda n, **place: MapIterator(range(n), DistributedRandomSampler(n, **place)),
}


def with_number(item: int, rng: Any) -> tuple[int, int]:
    return item, int(rng.integers(2**60))


def several(item: int) -> Iterator[tuple[int, int]]:
    for offset in range(item % 4):
        yield item, offset


def run(loader: DataLoader, state: Any, count: int | None) -> tuple[list[Any], Any]:
    """Take some samples after a state; return them, and the new state after a round trip through JSON."""
    if state is None:
        loader.set_epoch(EPOCH)
    else:
        loader.load_state_dict(state)
    taken = list(itertools.islice(iter(loader), count))
    return taken, json.loads(json.dumps(loader.state_dict()))


@settings(max_examples=examples(60))
@given(
    st.sampled_from(sorted(KINDS)),
    st.sampled_from([with_number, several]),
    st.integers(4, 40),
    st.lists(st.integers(1, 4), min_size=2, max_size=4),
    st.sampled_from(["drop", "pad", "keep"]),
    st.data(),
)
def test_worlds_share_an_epoch(
    kind: str, preprocessor: Any, n: int, worlds: list[int], uneven: Uneven, data: st.DataObject
) -> None:
    """Several world sizes in sequence, each stopped somewhere; the last one finishes the epoch."""
    expected = {
        item: sample_rng(0, EPOCH, place).integers(2**60)
        for place, item in enumerate(order_of(KINDS[kind](n, rank=0, world_size=1)))
    }
    given: list[tuple[int, int]] = []
    states = None
    # Take all at once: which sample is the last of an epoch depends on the threads.
    stops: list[list[int | None]] = [
        [data.draw(st.integers(0, 12)) for _ in range(world_size)] for world_size in worlds[:-1]
    ]
    stops.append([None] * worlds[-1])
    orders = [data.draw(st.permutations(range(world_size))) for world_size in worlds]
    for number, world_size in enumerate(worlds):
        saved = []
        for rank in range(world_size):
            source = KINDS[kind](n, rank=rank, world_size=world_size, uneven=uneven)
            loader = DataLoader(source, preprocessor=preprocessor, num_threads=2)
            count = stops[number][rank]
            samples, state = run(loader, states, count)
            given += samples
            saved.append(state)
        states = [saved[rank] for rank in orders[number]]
        if all(state["epoch"] > EPOCH for state in states):
            break
    counts = Counter(given)
    if preprocessor is several:
        every = Counter(sample for item in range(n) for sample in several(item))
    else:
        every = Counter((item, int(number)) for item, number in expected.items())
    if uneven == "keep":
        assert counts == every
    if uneven == "drop":
        assert counts <= every
        assert len({item for item, _ in (every - counts)}) < world_size
    if uneven == "pad":
        # Repeated samples have random numbers of their own.
        assert {item for item, _ in counts} == {item for item, _ in every}
        assert len({item for item, _ in (counts - every)}) < sum(worlds)


def test_samples_of_an_item_that_a_world_drops_are_not_given_again() -> None:
    def loader(rank: int, world_size: int) -> DataLoader:
        # Items 1 to 3 give as many samples.
        source = DistributedDeterministicSampler(4, rank=rank, world_size=world_size, uneven="drop")
        return DataLoader(source, preprocessor=several, num_threads=1, output_order="input")

    first, state = run(loader(0, 1), None, 4)
    # Item 3 is left, of which one sample is done. Two ranks drop it.
    states = [run(loader(rank, 2), [state], 0)[1] for rank in range(2)]
    rest, _ = run(loader(0, 1), states, None)
    assert (first[-1], rest) == ((3, 0), [(3, 1), (3, 2)])


def order_of(source: Any) -> list[int]:
    source.set_epoch(EPOCH)
    return list(source)


def states_of(world_size: int, **options: Any) -> list[Any]:
    sources = (
        DistributedRandomSampler(20, rank=rank, world_size=world_size, **options)
        for rank in range(world_size)
    )
    return [run(DataLoader(source), None, 2)[1] for source in sources]


@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_a_state_after_the_change_resumes_by_itself(on_error: Any) -> None:
    first = states_of(3)
    sampler = DistributedRandomSampler(20, rank=0, world_size=1)
    options: dict[str, Any] = {"output_order": "input", "on_error": on_error}
    whole, other = (DataLoader(sampler, preprocessor=abs, **options) for _ in range(2))
    head, state = run(whole, first, 4)
    assert state["before"]
    tail, _ = run(other, state, None)
    assert head + tail == run(whole, first, None)[0]
    assert len(head + tail) == 14
    assert len(list(other)) == 20  # the next epoch is a whole one


def test_ranks_without_items_have_a_state_too() -> None:
    def make(rank: int, world_size: int) -> DataLoader:
        place = {"rank": rank, "world_size": world_size}
        return DataLoader(DistributedRandomSampler(2, uneven="keep", **place))

    loaders = [make(rank, 3) for rank in range(3)]
    assert list(loaders[2]) == []
    alone = make(0, 1)
    alone.load_state_dict([loader.state_dict() for loader in loaders])
    assert sorted(alone) == [0, 1]


def test_what_padding_has_given_is_not_left() -> None:
    def make(rank: int, world_size: int) -> DataLoader:
        sampler = DistributedRandomSampler(5, rank=rank, world_size=world_size, uneven="pad")
        return DataLoader(sampler, output_order="input")

    order = order_of(DistributedRandomSampler(5, rank=0, world_size=1))
    _, fresh = run(make(0, 2), None, 0)
    given, ended = run(make(1, 2), None, None)
    assert given == [order[1], order[3], order[0]]
    assert run(make(0, 1), [fresh, ended], None)[0] == [order[2], order[4]]


def test_what_padding_gives_again_after_the_change_has_other_random_numbers() -> None:
    def make(rank: int, world_size: int) -> DataLoader:
        sampler = DistributedRandomSampler(7, rank=rank, world_size=world_size, uneven="pad")
        return DataLoader(sampler, preprocessor=with_number, output_order="input")

    states = [run(make(rank, 2), None, 1)[1] for rank in range(2)]
    given = [item for rank in range(3) for item in run(make(rank, 3), states, None)[0]]
    assert len(given) == 6
    assert len({item for item, _ in given}) == 5
    assert len({number for _, number in given}) == 6


@each(
    "states, error, message",
    [
        (list, ValueError, r"pass one state of each former rank.*of epochs \[\]"),
        (
            lambda: states_of(4)[::2],
            ValueError,
            "one state of each former rank.*'world_size': 4",
        ),
        (
            lambda: states_of(2) + states_of(2),
            ValueError,
            "pass one state of each former rank",
        ),
        (
            lambda: [states_of(2)[0], {**DataLoader(range(10)).state_dict(), "epoch": EPOCH}],
            ValueError,
            "pass one state of each former rank.*orders .*None",
        ),
        (lambda: states_of(2, seed=1), ValueError, "same sampler and seed.*'seed': 0.*'seed': 1"),
        (lambda: [*states_of(2)[:1], 3], TypeError, "must be a mapping"),
        (
            lambda: [states_of(2)[0], {**states_of(2)[1], "epoch": EPOCH + 1}],
            ValueError,
            r"saved after the same batch.*of epochs \[3, 4\]",
        ),
        (
            lambda: [{**state, "source_length": 11} for state in states_of(2)],
            ValueError,
            "rank 0 of 2 had 11 items, and would have 10 of this source",
        ),
    ],
)
def test_values_that_are_not_states_of_all_ranks(
    states: Callable[[], list[Any]], error: type[Exception], message: str
) -> None:
    loader = DataLoader(DistributedRandomSampler(20, rank=0, world_size=1))
    with pytest.raises(error, match=message):
        loader.load_state_dict(states())


def test_a_source_that_is_not_shared_out_has_no_ranks_to_change() -> None:
    with pytest.raises(TypeError, match="split the rest again; list cannot"):
        DataLoader([1, 2]).load_state_dict([DataLoader([1, 2]).state_dict()])


def test_one_state_of_another_world_says_what_to_pass() -> None:
    loader = DataLoader(DistributedRandomSampler(20, rank=0, world_size=1))
    with pytest.raises(ValueError, match="or load the states of all ranks"):
        loader.load_state_dict(states_of(2)[0])
