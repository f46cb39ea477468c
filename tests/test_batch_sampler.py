"""``BatchByLength``: little padding, enforced limits, equal numbers of batches per rank, exact resume."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from effort import each

import spdl_media as sm

LENGTHS = np.random.default_rng(0).integers(1, 1000, 500)


def padded_size(batches: list[list[int]]) -> int:
    return sum(len(batch) * int(LENGTHS[batch].max()) for batch in batches)


@pytest.mark.parametrize(
    "limits", [{"batch_size": 8}, {"max_total": 5000}, {"batch_size": 8, "max_total": 5000}]
)
def test_batches_of_similar_length(limits: dict[str, Any]) -> None:
    source = sm.BatchByLength(LENGTHS, seed=3, **limits)
    epochs = [list(source) for _ in range(3)]
    for batches in epochs:
        assert sorted(itertools.chain(*batches)) == list(range(500))
        assert max(map(len, batches)) <= limits.get("batch_size", 500)
        most = max(len(batch) * int(LENGTHS[batch].max()) for batch in batches)
        assert most <= limits.get("max_total", 8 * 1000)
        assert len(batches) == len(source)
        assert padded_size(batches) < 1.15 * LENGTHS.sum()
    assert epochs[0] != epochs[1]
    again = sm.BatchByLength(LENGTHS.tolist(), seed=3, **limits)
    again.set_epoch(2)
    assert list(again) == epochs[2]
    assert again.epoch == 3


def test_other_samples_share_a_batch_in_each_epoch() -> None:
    source = sm.BatchByLength(LENGTHS, batch_size=2)
    first, second = ({frozenset(batch) for batch in source} for _ in range(2))
    assert len(first & second) < len(first) / 4


@pytest.mark.parametrize("uneven", [None, "pad", "keep"])
def test_ranks_get_equally_many_and_no_batch_twice(uneven: Any) -> None:
    ranks = [
        sm.BatchByLength(LENGTHS, max_total=5000, rank=rank, world_size=3, uneven=uneven)
        for rank in range(3)
    ]
    batches = [list(rank) for rank in ranks]
    whole = list(sm.BatchByLength(LENGTHS, max_total=5000))
    assert len(whole) % 3
    rows = itertools.zip_longest(*batches)
    assert [batch for row in rows for batch in row if batch][: len(whole)] == whole[
        : sum(map(len, batches))
    ]
    counts = {len(part) for part in batches}
    assert counts == ({len(whole) // 3, -(-len(whole) // 3)} if uneven == "keep" else counts)
    assert len(counts) == 1 or uneven == "keep"


def load(indices: list[int], rng: np.random.Generator) -> list[tuple[int, int]]:
    return [(index, int(rng.integers(1000))) for index in indices]


def test_a_loader_continues_at_the_same_batch() -> None:
    def loader() -> sm.DataLoader:
        source = sm.BatchByLength(LENGTHS, max_total=5000, seed=1)
        return sm.DataLoader(source, preprocessor=load, output_order="input")

    whole = list(loader())
    first = loader()
    assert len(first) == len(whole)
    begun = list(itertools.islice(first, 7))
    resumed = loader()
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert begun + list(resumed) == whole
    assert list(resumed) != whole  # the next epoch


def test_a_state_of_other_samples_is_refused() -> None:
    # 7 and 8 samples make four batches each.
    seven, eight = (sm.DataLoader(sm.BatchByLength([1] * n, batch_size=2)) for n in (7, 8))
    with pytest.raises(ValueError, match=r"'num_lengths': 7.* and this one has .*'num_lengths': 8"):
        eight.load_state_dict(seven.state_dict())


def test_other_ranks_continue_with_the_batches_that_are_left() -> None:
    def loader(rank: int, world_size: int) -> sm.DataLoader:
        source = sm.BatchByLength(
            LENGTHS, max_total=5000, rank=rank, world_size=world_size, uneven="keep"
        )
        return sm.DataLoader(source, preprocessor=load, output_order="input")

    ranks = [loader(rank, 3) for rank in range(3)]
    begun = [batch for rank in ranks for batch in itertools.islice(rank, 5)]
    states = [rank.state_dict() for rank in ranks]
    for rank in range(2):
        resumed = loader(rank, 2)
        resumed.load_state_dict(states)
        begun += list(resumed)
    assert sorted(begun) == sorted(loader(0, 1))


def test_it_is_a_batch_sampler_of_pytorch() -> None:
    data = pytest.importorskip("torch.utils.data")
    source = sm.BatchByLength(LENGTHS, batch_size=8)
    found = list(data.DataLoader(range(500), batch_sampler=source, collate_fn=list))
    assert found == list(sm.BatchByLength(LENGTHS, batch_size=8))


@each(
    "lengths, options, match",
    [
        ([], {"batch_size": 1}, "at least one"),
        ([1, 0], {"batch_size": 1}, r"lengths must be finite and above 0, but lengths\[1\] is 0.0"),
        ([1, float("nan")], {"batch_size": 1}, r"lengths\[1\] is nan"),
        (iter([1]), {"batch_size": 1}, "lengths must be a sequence of numbers, not list_iterator"),
        ([1, 2], {}, "the batches have no size: give batch_size= or"),
        ([1, 2], {"batch_size": 0}, "batch_size must be at least 1"),
        ([1, 7, 2], {"max_total": 5}, "sample 1 has length 7, more than max_total=5"),
        ([1, 2], {"max_total": float("inf")}, "max_total must be a finite number above 0, not inf"),
        ([1, 2], {"max_total": "9"}, "max_total must be a finite number above 0, not '9'"),
        ([1, 2], {"max_total": 0}, "max_total must be a finite number above 0, not 0"),
        ([1, 2], {"batch_size": 2, "rank": 0, "world_size": 2}, "fewer than 2 ranks"),
    ],
)
def test_invalid_batches(lengths: Any, options: dict[str, Any], match: str) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        sm.BatchByLength(lengths, **options)
