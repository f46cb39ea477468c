"""Samplers divide each epoch among the ranks, in the same way on every machine."""

from __future__ import annotations

import itertools
import pickle
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from effort import each
from hypothesis import given
from hypothesis import strategies as st

import spdl_media as sm
from spdl_media.epochs import place_of
from spdl_media.samplers import DistributedDeterministicSampler, DistributedRandomSampler, Uneven
from spdl_media.source import MapIterator

SIZES = st.integers(1, 200)
WORLDS = st.integers(1, 9)
UNEVEN: st.SearchStrategy[Uneven] = st.sampled_from(["drop", "pad", "keep"])
SEEDS = st.integers(0, 2**70)
EPOCHS = st.integers(0, 1000)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove rank variables of the environment, so that the tests count as one process."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def share_out(order: list[int], world_size: int, uneven: Uneven) -> list[list[int]]:
    """Return the expected shares: deal the order out like cards, then adjust the last round."""
    order = list(order)
    if uneven == "drop":
        order = order[: len(order) // world_size * world_size]
    elif uneven == "pad":
        missing = -len(order) % world_size
        order += list(itertools.islice(itertools.cycle(order), missing))
    return [order[rank::world_size] for rank in range(world_size)]


def of_each_rank(make: Callable[..., Any], world_size: int) -> list[list[int]]:
    samplers = [make(rank=rank, world_size=world_size) for rank in range(world_size)]
    given = [list(sampler) for sampler in samplers]
    assert [len(sampler) for sampler in samplers] == [len(indices) for indices in given]
    return given


@given(SIZES, WORLDS, UNEVEN)
def test_deterministic_deals_out_the_numbers(n: int, world_size: int, uneven: Uneven) -> None:
    if n < world_size and uneven == "drop":
        return

    def make(**place: int) -> DistributedDeterministicSampler:
        return DistributedDeterministicSampler(n, uneven=uneven, **place)

    expected = share_out(list(range(n)), world_size, uneven)
    assert of_each_rank(make, world_size) == expected


@given(SIZES, WORLDS, UNEVEN, SEEDS, EPOCHS, st.data())
def test_random_deals_out_one_order(
    n: int, world_size: int, uneven: Uneven, seed: int, epoch: int, data: st.DataObject
) -> None:
    draws = data.draw(st.integers(1, n))
    if draws < world_size and uneven == "drop":
        return

    def make(**place: int) -> DistributedRandomSampler:
        sampler = DistributedRandomSampler(n, seed=seed, uneven=uneven, num_draws=draws, **place)
        sampler.set_epoch(epoch)
        return sampler

    order = list(make(rank=0, world_size=1))
    assert len(order) == len(set(order)) == draws
    assert set(order) <= set(range(n))
    assert of_each_rank(make, world_size) == share_out(order, world_size, uneven)


@given(SEEDS, EPOCHS, WORLDS, st.integers(1, 300))
def test_weights_deal_out_one_order_with_replacement(
    seed: int, epoch: int, world_size: int, draws: int
) -> None:
    def make(**place: int) -> DistributedRandomSampler:
        sampler = DistributedRandomSampler(
            5, weights=[0, 1, 2, 0, 0.5], num_draws=draws, seed=seed, uneven="pad", **place
        )
        sampler.set_epoch(epoch)
        return sampler

    order = list(make(rank=0, world_size=1))
    assert len(order) == draws
    assert set(order) <= {1, 2, 4}
    assert of_each_rank(make, world_size) == share_out(order, world_size, "pad")


def test_weights_are_kept_in_the_long_run() -> None:
    weights = np.array([1, 0, 3, 6.0])
    draws = 100_000
    sampler = DistributedRandomSampler(4, weights=weights, num_draws=draws, rank=0, world_size=1)
    counts = np.bincount(list(sampler), minlength=4)
    expected = draws * weights / weights.sum()
    # Five standard deviations of the binomial distribution.
    assert (abs(counts - expected) <= 5 * np.sqrt(expected * (1 - weights / 10))).all()


def test_every_order_is_as_likely() -> None:
    """All 24 orders of four items are equally likely, by the chi-square test."""
    sampler = DistributedRandomSampler(4, rank=0, world_size=1)
    orders = [tuple(sampler) for _ in range(4800)]
    counts = np.array([orders.count(order) for order in itertools.permutations(range(4))])
    # 99.99 % of the chi-square distribution with 23 degrees of freedom are below 58.6.
    assert ((counts - 200) ** 2 / 200).sum() < 58.6


def test_orders_never_change() -> None:
    """Fixed expected values: a training that is resumed with a newer release must get the same order."""
    sampler = DistributedRandomSampler(12, rank=0, world_size=1, seed=7)
    assert [list(sampler), list(sampler)] == [
        [3, 1, 10, 4, 5, 0, 2, 11, 8, 6, 7, 9],
        [10, 3, 2, 1, 5, 7, 11, 4, 8, 0, 9, 6],
    ]
    weighted = DistributedRandomSampler(
        4, rank=1, world_size=2, seed=2**65, weights=[1, 2, 3, 4], num_draws=12
    )
    assert list(weighted) == [1, 3, 3, 0, 1, 3]


def test_another_process_finds_the_same_order() -> None:
    program = (
        "from spdl_media.source import DistributedRandomSampler as S;"
        "s = S(1000, rank=1, world_size=3, seed=5); s.set_epoch(4); print(list(s))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    sampler = DistributedRandomSampler(1000, rank=1, world_size=3, seed=5)
    sampler.set_epoch(4)
    assert done.stdout.strip() == str(list(sampler))


def test_each_iteration_is_the_next_epoch() -> None:
    sampler = DistributedRandomSampler(50, rank=0, world_size=1)
    epochs = [list(sampler) for _ in range(3)]
    assert sampler.epoch == 3
    assert epochs[0] != epochs[1] != epochs[2]
    for epoch in (2, 0, 1):
        sampler.set_epoch(epoch)
        assert list(sampler) == epochs[epoch]
        assert sampler.epoch == epoch + 1
    # The epoch of an iteration is the one in which it began.
    sampler.set_epoch(0)
    begun = iter(sampler)
    sampler.set_epoch(2)
    assert list(begun) == epochs[0]
    sampler.shuffle(seed=1)
    assert list(sampler) == epochs[1]


def test_an_order_can_be_asked_for_by_position() -> None:
    sampler = DistributedRandomSampler(9000, rank=1, world_size=2, seed=3)
    sampler.set_epoch(5)
    order = sampler.begin_by_position(0)
    # The state after an iteration.
    assert sampler.epoch == 1
    sampler.set_epoch(0)
    indices = list(sampler)
    assert list(order) == indices
    assert (order[0], order[-1], len(order)) == (indices[0], indices[-1], 4500)
    assert list(order[4:40:3]) == indices[4:40:3]
    assert {type(index) for index in (*indices, *order[:5])} == {int}
    with pytest.raises(IndexError):
        order[4500]


def test_samplers_pickle_with_their_epoch() -> None:
    sampler = DistributedRandomSampler(20, rank=1, world_size=2, weights=range(20))
    list(sampler)
    again = pickle.loads(pickle.dumps(sampler))
    assert list(again) == list(sampler)


def test_the_deterministic_one_names_the_samples_that_are_never_seen() -> None:
    with pytest.warns(UserWarning, match=r"last 3 of 11 samples are in no epoch.*uneven=\"keep\""):
        DistributedDeterministicSampler(11, rank=0, world_size=4)
    DistributedDeterministicSampler(12, rank=0, world_size=4)


def test_repr_says_what_it_was_made_with() -> None:
    sampler = DistributedRandomSampler(6, rank=0, world_size=2, seed=1, weights=[1] * 6)
    assert repr(sampler) == (
        "DistributedRandomSampler(6, num_draws=6, seed=1, rank=0, world_size=2, uneven='drop')"
    )
    assert repr(DistributedDeterministicSampler(6, rank=1, world_size=2)) == (
        "DistributedDeterministicSampler(6, num_draws=6, rank=1, world_size=2, uneven='drop')"
    )


def place(sampler: DistributedRandomSampler) -> tuple[int, int]:
    return sampler.rank, sampler.world_size


class TestWhereTheRankComesFrom:
    def test_one_process(self) -> None:
        assert place(DistributedRandomSampler(10)) == (0, 1)

    def test_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RANK", "2")
        monkeypatch.setenv("WORLD_SIZE", "5")
        assert place(DistributedRandomSampler(10)) == (2, 5)
        assert place(DistributedRandomSampler(10, rank=0, world_size=2)) == (0, 2)

    @pytest.mark.parametrize("initialized", [True, False])
    def test_pytorch_before_the_environment(
        self, monkeypatch: pytest.MonkeyPatch, initialized: bool
    ) -> None:
        monkeypatch.setenv("RANK", "2")
        monkeypatch.setenv("WORLD_SIZE", "5")
        stand_in = types.SimpleNamespace(
            is_available=lambda: True,
            is_initialized=lambda: initialized,
            get_rank=lambda: 3,
            get_world_size=lambda: 4,
        )
        monkeypatch.setitem(sys.modules, "torch.distributed", stand_in)
        assert place(DistributedRandomSampler(10)) == ((3, 4) if initialized else (2, 5))

    def test_pytorch_initialised_after_the_sampler(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # As by Lightning, with samplers that are sent to its processes or made there first.
        group: list[int] = []
        stand_in = types.SimpleNamespace(
            is_available=lambda: True,
            is_initialized=lambda: bool(group),
            get_rank=lambda: group[0],
            get_world_size=lambda: group[1],
        )
        monkeypatch.setitem(sys.modules, "torch.distributed", stand_in)
        monkeypatch.setenv("WORLD_SIZE", "4")
        samplers = [DistributedRandomSampler(10, seed=1) for _ in range(3)]
        alone, small = (
            DistributedRandomSampler(10, rank=0, world_size=1),
            DistributedRandomSampler(3),
        )
        mix = sm.Mix([MapIterator([*range(10)], DistributedRandomSampler(10))])
        evaluated = DistributedDeterministicSampler(10)
        assert (place(samplers[0]), len(samplers[0]), len(evaluated)) == ((0, 1), 10, 10)
        sent = pickle.dumps(samplers[0])
        group += 1, 4
        expected = list(DistributedRandomSampler(10, seed=1, rank=1, world_size=4))
        assert list(samplers[0]) == list(pickle.loads(sent)) == expected
        assert (len(samplers[1]), place(alone), place_of(mix)) == (2, (0, 1), (1, 4))
        with pytest.raises(ValueError, match="3 samples are fewer than 4 ranks"):
            len(small)
        with pytest.warns(UserWarning, match="last 2 of 10 samples are in no epoch, .* of 4 ranks"):
            assert len(evaluated) == 2
        # A process without a group, such as that of iterate_in_subprocess.
        sent = pickle.dumps(samplers[2])
        group.clear()
        assert list(pickle.loads(sent)) == expected
        assert place(samplers[0]) == (1, 4)

    @pytest.mark.long
    def test_pytorch_itself(self, tmp_path: Any) -> None:
        distributed = pytest.importorskip("torch.distributed")
        distributed.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1
        )
        try:
            assert place(DistributedRandomSampler(10)) == (0, 1)
        finally:
            distributed.destroy_process_group()

    @pytest.mark.parametrize(
        ("rank", "world_size", "message"),
        [
            ("1", None, r"RANK and WORLD_SIZE give rank 1 and world size None; set both variables"),
            ("4", "4", r"rank 4 of 4 processes; ranks count from 0 to 3"),
            ("x", "4", r"environment variable RANK must be a whole number, not 'x'"),
            ("0", "0", r"world_size must be at least 1, not 0"),
        ],
    )
    def test_a_bad_environment(
        self, monkeypatch: pytest.MonkeyPatch, rank: str, world_size: str, message: str
    ) -> None:
        for name, value in (("RANK", rank), ("WORLD_SIZE", world_size)):
            if value is not None:
                monkeypatch.setenv(name, value)
        with pytest.raises(ValueError, match=message):
            DistributedRandomSampler(10)

    def test_a_world_size_alone_is_an_error_when_an_epoch_begins(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("WORLD_SIZE", "4")
        sampler = DistributedRandomSampler(10)
        for begin in (iter, lambda one: one.begin_by_position(0)):
            with pytest.raises(ValueError, match="rank None and world size 4; set both variables"):
                begin(sampler)
        assert sampler.epoch == 0

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"rank": 0}, r"the arguments give rank 0 and world size None; pass both, or neither"),
            ({"rank": -1, "world_size": 2}, r"rank must be at least 0, not -1"),
            ({"rank": 2, "world_size": 2}, r"ranks count from 0 to 1"),
        ],
    )
    def test_bad_arguments(self, arguments: dict[str, int], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            DistributedDeterministicSampler(10, **arguments)


ONE: dict[str, Any] = {"rank": 0, "world_size": 1}


@each(
    "make, error, message",
    [
        (lambda: DistributedRandomSampler(0, **ONE), ValueError, "n must be at least 1, not 0"),
        (lambda: DistributedRandomSampler(2.5, **ONE), TypeError, "n must be an int"),
        (
            lambda: DistributedRandomSampler(list(range(10**4)), **ONE),  # type: ignore[arg-type]
            TypeError,
            r"n must be an int, not \[0, 1, 2, 3, 4, 5, \.\.\.\]. Pass len\(dataset\)",
        ),
        (lambda: DistributedRandomSampler(True, **ONE), TypeError, "an int, not True"),
        (
            lambda: DistributedRandomSampler(5, num_draws=6, **ONE),
            ValueError,
            "num_draws is 6.*each of 5 samples.*pass weights",
        ),
        (
            lambda: DistributedRandomSampler(5, num_draws=0, **ONE),
            ValueError,
            "num_draws must be at least 1",
        ),
        (
            lambda: DistributedRandomSampler(5, weights=[1, 2], **ONE),
            ValueError,
            r"one number for each sample, which are 5; it has the shape \(2,\)",
        ),
        (
            lambda: DistributedRandomSampler(2, weights=iter([1, 2]), **ONE),  # type: ignore[arg-type]
            TypeError,
            "weights must be a sequence of numbers, not list_iterator",
        ),
        (
            lambda: DistributedRandomSampler(2, weights=[1, -2], **ONE),
            ValueError,
            r"weights\[1\] is -2",
        ),
        (
            lambda: DistributedRandomSampler(2, weights=[float("nan"), 1], **ONE),
            ValueError,
            r"weights\[0\] is nan",
        ),
        (
            lambda: DistributedRandomSampler(2, weights=[0, 0], **ONE),
            ValueError,
            "sum of weights must be finite and above 0, not 0",
        ),
        (
            lambda: DistributedRandomSampler(2, weights=[1e308, 1e308], **ONE),
            ValueError,
            "sum of weights must be finite and above 0, not inf",
        ),
        (
            lambda: DistributedRandomSampler(3, rank=0, world_size=4),
            ValueError,
            '3 samples are fewer than 4 ranks.*uneven="pad"',
        ),
        (
            lambda: DistributedRandomSampler(3, uneven="fill", **ONE),  # type: ignore[arg-type]
            ValueError,
            r"uneven must be 'drop', 'pad' or 'keep', not 'fill'",
        ),
        (
            lambda: DistributedRandomSampler(3, seed=-1, **ONE),
            ValueError,
            "seed must be at least 0",
        ),
        (
            lambda: DistributedRandomSampler(3, **ONE).set_epoch(-1),
            ValueError,
            "epoch must be at least 0",
        ),
    ],
)
def test_bad_arguments(make: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_the_last_index_without_weight_is_never_drawn() -> None:
    """The largest random number times the total may be rounded up to the total."""
    from spdl_media.epochs import weighted_choice

    cumulative = np.cumsum([0.1, 0.7, 0.0])
    chances = np.array([0.0, np.nextafter(1.0, 0.0), 1.0])
    assert weighted_choice(cumulative, chances).tolist() == [0, 1, 1]
