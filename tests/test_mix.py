"""Mix: proportions, epochs, ranks, and access by position."""

from __future__ import annotations

import itertools
import json
import pickle
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from effort import each

import spdl_media as sm
from spdl_media.source import (
    DistributedDeterministicSampler,
    DistributedRandomSampler,
    LocalDirectory,
    MapIterator,
    embed_shuffle,
)


class Squares:
    """A map-style dataset like those of PyTorch."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < 4:
            raise IndexError(index)
        return f"square {index * index}"


def test_an_epoch_without_weights_has_each_item_once() -> None:
    mix = sm.Mix([list("abc"), range(50), Squares()])
    first, second = list(mix), list(mix)
    assert Counter(first) == Counter(second) == Counter([*"abc", *range(50), *Squares()])
    assert first != second
    assert len(mix) == 57
    mix.set_epoch(0)
    assert list(pickle.loads(pickle.dumps(mix))) == first
    assert list(sm.Mix([list("abc"), range(50), Squares()], seed=1)) != first


def test_orders_never_change() -> None:
    mix = sm.Mix([["a", "b"], range(3)], weights=[1, 3], length=8, seed=1)
    assert list(mix) == [0, 1, 2, "a", 0, "b", 1, 2]
    assert list(mix) == ["a", 0, 1, 2, 0, "b", 1, 2]


@pytest.mark.parametrize(
    ("weights", "length", "counts"),
    [([3, 1], 8, [6, 2]), ([1, 1], 5, [3, 2]), ([0.1, 0.2], 100, [33, 67]), ([0, 1], None, [0, 7])],
)
def test_an_epoch_has_the_shares_of_the_weights(
    weights: list[float], length: int | None, counts: list[int]
) -> None:
    mix = sm.Mix([["a"] * 3, ["b"] * 7], weights, length=length)
    items = list(mix)
    assert mix.counts == [items.count("a"), items.count("b")] == counts
    assert len(mix) == len(items)


def test_no_item_comes_again_before_all_have_come() -> None:
    shuffled = DistributedRandomSampler(10, rank=0, world_size=1, seed=3)
    mix = sm.Mix([shuffled, ["x", "y", "z"]], weights=[1, 2], length=12)
    epochs = [list(mix) for _ in range(5)]
    numbers = [item for epoch in epochs for item in epoch if isinstance(item, int)]
    letters = [item for epoch in epochs for item in epoch if isinstance(item, str)]
    # 4 of 10 items per epoch: the source's own epochs begin in the middle of the mixture's.
    expected = [shuffled.begin_by_position(epoch) for epoch in (0, 1)]
    assert numbers == [*expected[0], *expected[1]]
    assert letters == [*"xyz"] * (5 * 8 // 3) + ["x"]


def test_all_that_can_be_read_by_position_can_be_mixed(tmp_path: Any) -> None:
    (tmp_path / "a").touch()
    sources = [
        MapIterator({"k": "v"}),
        LocalDirectory(tmp_path),
        embed_shuffle(LocalDirectory(tmp_path)),
        np.array([7]),
        sm.Mix([["inner"], [8]]),
    ]
    found = list(sm.Mix(sources))
    assert Counter(map(str, found)) == Counter(["v", "7", "8", "inner", *[str(tmp_path / "a")] * 2])


def test_ranks_are_those_of_the_sources() -> None:
    def of_rank(rank: int) -> sm.Mix:
        place = {"rank": rank, "world_size": 2}
        one = MapIterator(list("abcd"), DistributedDeterministicSampler(4, **place))
        return sm.Mix([one, DistributedRandomSampler(6, **place)], weights=[1, 1])

    ranks = [list(of_rank(rank)) for rank in (0, 1)]
    # 5 items per rank: 3 of the first source, which has 2 for each rank, and 2 of the other.
    assert Counter(item for item in ranks[0] + ranks[1] if isinstance(item, str)).total() == 6
    assert set(ranks[0]).isdisjoint(ranks[1])
    state = sm.DataLoader(of_rank(1)).state_dict()
    with pytest.raises(ValueError, match="'rank': 1, 'world_size': 2"):
        sm.DataLoader(of_rank(0)).load_state_dict(state)
    states = [sm.DataLoader(of_rank(rank)).state_dict() for rank in (0, 1)]
    with pytest.raises(TypeError, match=r"Mix cannot\. Load the state of each rank there, and"):
        sm.DataLoader(of_rank(0)).load_state_dict(states)


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Let threads alternate as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("quick_switches")
def test_threads_may_read_different_epochs_of_a_source() -> None:
    source = MapIterator(range(4), DistributedRandomSampler(4, rank=0, world_size=1))
    mix = sm.Mix([source], length=40)
    expected = list(mix.begin_by_position(0) or ())

    def reads(position: int) -> set[Any]:
        return {items[position] for _ in range(20_000)}

    items = mix.begin_by_position(0) or ()
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(reads, (0, 39))) == [{expected[0]}, {expected[39]}]


def test_a_state_is_that_of_the_same_sources_and_weights() -> None:
    def loader(seed: int, *weights: float) -> sm.DataLoader:
        one = DistributedRandomSampler(6, rank=0, world_size=1, seed=seed)
        return sm.DataLoader(sm.Mix([one, range(6)], weights=weights))

    state = json.loads(json.dumps(loader(0, 1, 2).state_dict()))
    loader(0, 2, 4).load_state_dict(state)
    for other, message in (
        (loader(1, 1, 2), "'seed': 1"),
        (loader(0, 2, 1), r"'counts': \[8, 4\]"),
    ):
        with pytest.raises(ValueError, match=message):
            other.load_state_dict(state)


def test_a_loader_reads_datasets_in_threads_and_resumes_by_index() -> None:
    read: list[int] = []

    class Noted(Squares):
        def __getitem__(self, index: int) -> str:
            read.append(index)
            return super().__getitem__(index)

    def loader() -> sm.DataLoader:
        mix = sm.Mix([Noted(), range(100, 120)], weights=[1, 1])
        return sm.DataLoader(mix, batch_size=4, output_order="input", num_threads=2)

    whole, stopped, resumed = list(loader()), loader(), loader()
    begun = list(itertools.islice(stopped, 3))
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    read.clear()
    rest = list(resumed)
    assert begun + rest == whole
    assert len(read) == sum(isinstance(item, str) for batch in rest for item in batch)


@each(
    "make, message",
    [
        (lambda: sm.Mix([]), "sources must hold at least one source"),
        (lambda: sm.Mix([[1], iter([2])]), r"sources\[1\], a list_iterator, cannot be read by pos"),
        (lambda: sm.Mix({"photos": [1]}), r"sources\[0\], a str, cannot be read by position"),
        (lambda: sm.Mix([{"a": 1}]), r"sources\[0\], a dict, cannot be read by position.*MapIter"),
        (
            lambda: sm.Mix([MapIterator([1], iter([0]))]),
            "object of type 'list_iterator' has no len",
        ),
        (
            lambda: sm.Mix([[1], []], weights=[1, 1]),
            r"sources\[1\] has no items; give it the weight 0",
        ),
        (lambda: sm.Mix([[1], [2]], weights=[1]), "weights must have one number for each source"),
        (lambda: sm.Mix([[1], [2]], weights=[1, -1]), r"weights\[1\] is -1.0"),
        (lambda: sm.Mix([[1]], length=0), "length must be at least 1, not 0"),
        (
            lambda: sm.Mix([[1], DistributedRandomSampler(4, rank=1, world_size=2)]),
            r"different \(rank, world size\): \[\(0, 1\), \(1, 2\)\]. Split each by the same",
        ),
    ],
)
def test_bad_mixtures(make: Callable[[], object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_a_mixture_made_before_its_rank_is_known_has_the_length_of_the_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lightning makes the process group after the loaders; epochs were as long as those of all ranks."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def make(*place: int) -> sm.Mix:
        places = dict(zip(("rank", "world_size"), place, strict=False))
        samplers = [DistributedRandomSampler(size, **places) for size in (100, 60)]
        return sm.Mix([MapIterator(range(sampler.num_draws), sampler) for sampler in samplers])

    mix = make()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert (mix.counts, list(mix)) == ([50, 30], list(make(1, 2)))
