"""Ranks that share an epoch compare seed, length and epoch through the store of torch.distributed."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import spdl_media as sm
from spdl_media import dataloader
from spdl_media.source import DistributedRandomSampler, MapIterator


class Store:
    """A stand-in for a store of torch.distributed, with the methods that are used."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        assert not expected  # a missing key has this value
        return self.values.setdefault(key, desired.encode())


class Ranks:
    """Two ranks in one process: a new loader belongs to the rank that was chosen last."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = Store()
        self.rank = 0
        monkeypatch.setitem(
            sys.modules,
            "torch.distributed",
            SimpleNamespace(
                is_available=lambda: True,
                is_initialized=lambda: True,
                get_rank=lambda: self.rank,
                get_world_size=lambda: 2,
                distributed_c10d=SimpleNamespace(_get_default_store=lambda: self.store),
            ),
        )
        self._monkeypatch = monkeypatch

    def choose(self, rank: int) -> None:
        # Each process counts its own loaders.
        self._monkeypatch.setattr(dataloader, "_loaders", type(dataloader._loaders)())
        self.rank = rank

    def loader(self, rank: int, n: int = 9, **options: Any) -> sm.DataLoader:
        self.choose(rank)
        return sm.DataLoader(DistributedRandomSampler(n, **options), num_threads=1)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(monkeypatch)


def test_equal_ranks_continue(ranks: Ranks) -> None:
    loaders = [ranks.loader(rank, uneven="keep") for rank in (0, 1)]
    for _ in range(2):
        items = []
        for rank, loader in enumerate(loaders):
            ranks.rank = rank
            items += list(loader)
        # One of the ranks has one more item, and they agree nevertheless.
        assert sorted(items) == list(range(9))
    assert len(ranks.store.values) == 2


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"seed": 3}, "ranks 1 and 0 split different epochs, .*: seed 3 and 0. Make"),
        ({"n": 11}, "length 11 and 9"),
        ({"n": 11, "seed": 1}, "seed 1 and 0, length 11 and 9"),
    ],
)
def test_differences_are_reported(ranks: Ranks, other: dict[str, Any], message: str) -> None:
    first, second = ranks.loader(0), ranks.loader(1, **other)
    ranks.rank = 0
    batches = iter(first)
    assert next(batches) is not None
    ranks.rank = 1
    with pytest.raises(ValueError, match=message):
        iter(second)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"seed": 3}, r"sources .*'seed': 3.* and .*'seed': 0"),
        ({"n": 8}, r"sources .*'length': 8.* and .*'length': 9"),
        ({"length": 9}, "length 9 and None"),
        ({}, None),
    ],
)
def test_the_sources_of_a_mixture_are_compared(
    ranks: Ranks, other: dict[str, Any], message: str | None
) -> None:
    def loader(rank: int, n: int = 9, length: int | None = None, **options: Any) -> sm.DataLoader:
        ranks.choose(rank)
        # The two ranks have 5 and 4 items, 9 together.
        sources = [DistributedRandomSampler(n, uneven="keep", **options) for _ in range(2)]
        return sm.DataLoader(sm.Mix(sources, length=length), num_threads=1)

    second, first = loader(1, **other), loader(0)
    batches = iter(first)
    ranks.rank = 1
    if message is None:
        assert len([*batches, *second]) == 18
        return
    with pytest.raises(ValueError, match=message):
        iter(second)


def test_numbers_of_numpy_are_compared(ranks: Ranks) -> None:
    two: Any = np.int64(2)
    for rank in (0, 1):
        ranks.choose(rank)
        sampler = DistributedRandomSampler(8)
        assert len(list(sm.DataLoader(sampler, batch_size=two))) == 2
        mix = sm.Mix([sampler], length=two)
        assert len(list(sm.DataLoader(mix))) == 2


@pytest.mark.parametrize("uneven", ["drop", "pad", "keep"])
def test_other_batches_are_reported_where_ranks_need_equally_many(
    ranks: Ranks, uneven: Any
) -> None:
    def loader(rank: int, batch_size: int) -> sm.DataLoader:
        ranks.choose(rank)
        sampler = DistributedRandomSampler(9, uneven=uneven)
        return sm.DataLoader(sampler, batch_size=batch_size, num_threads=1)

    first, second = loader(0, 2), loader(1, 3)
    ranks.rank = 0
    batches = iter(first)
    ranks.rank = 1
    if uneven == "keep":
        assert len([*batches, *second]) == 5
        return
    with pytest.raises(
        ValueError, match=r"ranks 1 and 0 split different epochs.*batch_size 3 and 2"
    ):
        iter(second)


def test_another_epoch_is_reported(ranks: Ranks) -> None:
    first, second = ranks.loader(0), ranks.loader(1)
    second.set_epoch(4)
    ranks.rank = 0
    list(first)
    ranks.rank = 1
    with pytest.raises(ValueError, match="epoch 4 and 0"):
        iter(second)


def test_loaders_that_one_rank_alone_has_do_no_harm(ranks: Ranks) -> None:
    first = ranks.loader(0)
    shown = sm.DataLoader(DistributedRandomSampler(5, seed=7))
    second = ranks.loader(1)
    ranks.rank = 0
    list(shown)
    list(first)
    ranks.rank = 1
    assert len(list(second)) == 4


def test_a_loader_that_one_rank_makes_first_takes_the_number_of_no_other(ranks: Ranks) -> None:
    def make() -> sm.DataLoader:
        return sm.DataLoader(DistributedRandomSampler(9), num_threads=1)

    ranks.choose(0)
    shown, first = sm.DataLoader(DistributedRandomSampler(5, seed=7)), make()
    ranks.choose(1)
    second = make()
    ranks.rank = 0
    list(shown)
    list(first)
    ranks.rank = 1
    assert len(list(second)) == 4


def test_nothing_is_written_where_the_ranks_are_not_those_of_the_process_group(
    ranks: Ranks,
) -> None:
    other = DistributedRandomSampler(9, rank=1, world_size=2)
    list(sm.DataLoader(MapIterator(list(range(9)), other)))
    list(sm.DataLoader(DistributedRandomSampler(9, rank=0, world_size=1)))
    list(sm.DataLoader(range(9)))
    assert not ranks.store.values
