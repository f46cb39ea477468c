"""Each kind of source is resumed where the loader was stopped, in the same and in another process."""

from __future__ import annotations

import gc
import itertools
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Self

import pytest
from effort import each
from resumable_sources import Anew, Cards, Counting, CountingAsync, Deals, Growing, TorchSampler

from spdl_media.dataloader import DataLoader
from spdl_media.pipeline import PipelineFailure
from spdl_media.source import (
    DistributedRandomSampler,
    LocalDirectory,
    MapIterator,
    MergeIterator,
    embed_shuffle,
    repeat_source,
)


def sampler(n: int) -> DistributedRandomSampler:
    return DistributedRandomSampler(n, rank=0, world_size=1)


def through_pickle(state: dict[str, Any]) -> Any:
    return pickle.loads(pickle.dumps(state))


class TestIteratorsWithState:
    @pytest.mark.parametrize("make", [Counting, CountingAsync, lambda n: repeat_source(range(n))])
    def test_stopped_over_and_over(self, make: Any) -> None:
        """The loader always continues after its last sample, wherever the source was read to."""
        loader = DataLoader(make(400), output_order="input")
        given: list[int] = []
        for count in (4, 39, 3, 16, 5, 0, 30):
            given += itertools.islice(loader, count)
        assert given == list(range(97))
        resumed = DataLoader(make(400), output_order="input")
        resumed.load_state_dict(through_pickle(loader.state_dict()))
        assert list(itertools.islice(resumed, 303)) == list(range(97, 400))

    def test_little_is_read_again_however_often_it_went_on(self) -> None:
        loader = DataLoader(Counting(5000), output_order="input")
        list(itertools.islice(loader, 3000))
        for start in (3000, 3002, 3004):
            source = Counting(5000)
            resumed = DataLoader(source, output_order="input")
            resumed.load_state_dict(through_pickle(loader.state_dict()))
            assert list(itertools.islice(resumed, 2)) == [start, start + 1]
            assert source.num_read < 200
            loader = resumed

    def test_a_state_from_before_the_source_was_asked_for_anything(self) -> None:
        class Late(Counting):
            proceed = threading.Event()

            def __iter__(self) -> Self:
                assert self.proceed.wait(20)
                return self

        loader = DataLoader(Late(90), output_order="input")
        iterator = iter(loader)
        state = loader.state_dict()
        Late.proceed.set()
        assert list(itertools.islice(iterator, 3)) == [0, 1, 2]
        del iterator
        loader.load_state_dict(through_pickle(state))
        assert list(loader) == list(range(90))

    @pytest.mark.parametrize("make", [Counting, CountingAsync])
    def test_a_state_from_before_the_first_item(self, make: Any) -> None:
        loader = DataLoader(make(90), output_order="input")
        state = loader.state_dict()
        assert list(itertools.islice(loader, 3)) == [0, 1, 2]
        loader.load_state_dict(through_pickle(state))
        assert list(loader) == list(range(90))


SEQUENCES: dict[str, Callable[[int], Any]] = {
    "shuffled": Cards,
    "with epochs": Deals,
    "mapped": lambda n: MapIterator(range(n), Deals(n)),
    "mapped by PyTorch": lambda n: MapIterator(range(n), TorchSampler(n)),
}


class Slow(Counting):
    """An iterator that waits for permission before each item."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.was_asked = threading.Event()
        self.proceed = threading.Event()

    def __next__(self) -> int:
        if self.position == 5:
            self.was_asked.set()
            assert self.proceed.wait(30)
        return super().__next__()


class TestReadsThatOutlastTheirIteration:
    @pytest.mark.parametrize("is_stateful", [True, False])
    def test_the_next_one_waits_for_it(
        self, is_stateful: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        slow = Slow(30)
        source = slow if is_stateful else (item for item in slow)
        loader = DataLoader(source, output_order="input")
        iterator = iter(loader)
        given = list(itertools.islice(iterator, 5))
        assert slow.was_asked.wait(20)
        del iterator
        monkeypatch.setattr("spdl_media.loader_ends._FORMER_READ_SECONDS", 0.01)
        message = f"a {type(source).__name__}, after 0.01 s, and the next one would lose"
        with warns_unless(is_stateful), pytest.raises(TimeoutError, match=message):
            iter(loader)
        monkeypatch.undo()
        slow.proceed.set()
        with warns_unless(is_stateful):
            given += loader
        # Items that a generator has given to a stopped iteration are lost, which the warning says.
        assert given == [item for item in range(30) if is_stateful or item != 5]

    def test_an_iterable_with_a_state(self, monkeypatch: pytest.MonkeyPatch) -> None:
        slow = Slow(30)
        loader = DataLoader(Anew(slow), output_order="input")
        iterator = iter(loader)
        given = list(itertools.islice(iterator, 5))
        assert slow.was_asked.wait(20)
        del iterator
        loader.load_state_dict(loader.state_dict())
        monkeypatch.setattr("spdl_media.loader_ends._FORMER_READ_SECONDS", 0.01)
        with pytest.raises(TimeoutError, match="still reads the source, a Anew, after"):
            iter(loader)
        slow.proceed.set()
        monkeypatch.undo()
        assert given + list(loader) == list(range(30))

    @pytest.mark.parametrize("make", [Counting, CountingAsync])
    def test_an_iteration_that_another_one_overtook_says_so(self, make: Any) -> None:
        loader = DataLoader(make(4000), output_order="input")
        former = iter(loader)
        given = [next(former)]
        given += loader
        assert given == list(range(4000))
        with pytest.raises(PipelineFailure, match=f"later iteration .* source, a {make.__name__},"):
            list(former)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (
            lambda: MergeIterator([[1, 2], repeat_source([3])]),
            "MergeIterator over a RepeatedSource",
        ),
        (
            lambda: MapIterator(range(99), iter(range(99))),
            "MapIterator over a range_iterator",
        ),
        (
            lambda: MapIterator(range(99), MergeIterator([iter(range(99))])),
            "MapIterator over a range_iterator",
        ),
    ],
)
def test_what_is_made_of_an_iterator_can_be_read_once(make: Any, name: str) -> None:
    loader = DataLoader(make(), output_order="input")
    first = list(itertools.islice(loader, 3))
    state = loader.state_dict()
    with pytest.warns(UserWarning, match=f"a {name}, can be read only once"):
        iter(loader)
    loader.load_state_dict(state)
    with pytest.raises(ValueError, match=f"a {name}, can be read only once, and was read already"):
        iter(loader)
    resumed = DataLoader(make(), output_order="input")
    resumed.load_state_dict(state)
    whole = DataLoader(make(), output_order="input")
    assert first + list(itertools.islice(resumed, 20)) == list(itertools.islice(whole, 23))


def test_what_has_no_weight_is_not_read_at_all() -> None:
    loader = DataLoader(MergeIterator([[1, 2], iter([3])], weights=[1, 0]), output_order="input")
    assert [list(loader), list(loader)] == [[1, 2], [1, 2]]


def warns_unless(condition: bool) -> AbstractContextManager[Any]:
    return nullcontext() if condition else pytest.warns(UserWarning, match="can be read only once")


class TestSequences:
    @pytest.mark.parametrize("kind", SEQUENCES)
    @pytest.mark.parametrize("epoch", [0, 2])
    def test_the_rest_is_in_the_order_of_its_epoch(self, kind: str, epoch: int) -> None:
        def make_loader() -> DataLoader:
            loader = DataLoader(SEQUENCES[kind](20), output_order="input")
            loader.set_epoch(epoch)
            return loader

        loader = make_loader()
        whole, following = list(loader), list(loader)
        assert (whole == following) == (kind == "shuffled")
        loader = make_loader()
        first = list(itertools.islice(loader, 7))
        state = through_pickle(loader.state_dict())
        for resumed in (loader, make_loader()):
            resumed.load_state_dict(state)
            assert first + list(resumed) == whole
            assert list(resumed) == following

    @pytest.mark.parametrize("kind", SEQUENCES)
    @pytest.mark.parametrize("count", [0, 7, 20, 33])
    def test_repeated(self, kind: str, count: int) -> None:
        whole = list(itertools.islice(repeat_source(SEQUENCES[kind](20)), 70))
        source = repeat_source(SEQUENCES[kind](20))
        first = list(itertools.islice(source, count))
        state = source.state_dict()
        list(itertools.islice(source, 15))
        for resumed in (source, repeat_source(SEQUENCES[kind](20))):
            resumed.load_state_dict(state)
            assert first + list(itertools.islice(resumed, 70 - count)) == whole

    def test_a_folder_takes_no_pattern_of_another_place(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="pattern must be relative to root, not '/"):
            LocalDirectory(tmp_path, str(tmp_path / "*.jpg"))

    def test_a_repeated_folder(self, tmp_path: Path) -> None:
        for index in range(12):
            (tmp_path / f"{index}.jpg").touch()

        def source() -> Any:
            return repeat_source(LocalDirectory(tmp_path))

        saved = source()
        first = list(itertools.islice(saved, 5))
        resumed = source()
        resumed.load_state_dict(saved.state_dict())
        assert first + list(itertools.islice(resumed, 31)) == list(itertools.islice(source(), 36))


@pytest.mark.parametrize(
    "make_sampler",
    [
        sampler,
        TorchSampler,
        lambda n: embed_shuffle(sampler(n)),
        lambda n: dict.fromkeys(range(n)),
    ],
    ids=["ours", "PyTorch's", "shuffled", "keys"],
)
def test_values_that_are_done_are_not_asked_for_again(make_sampler: Callable[[int], Any]) -> None:
    touched: list[int] = []

    class Dataset:
        def __getitem__(self, index: int) -> int:
            touched.append(index)
            return index

    def make_loader() -> DataLoader:
        return DataLoader(MapIterator(Dataset(), make_sampler(100)), output_order="input")

    loader = make_loader()
    whole, following = list(loader), list(loader)
    loader = make_loader()
    first = list(itertools.islice(loader, 90))
    resumed = make_loader()
    resumed.load_state_dict(through_pickle(loader.state_dict()))
    touched.clear()
    assert first + list(resumed) == whole
    assert touched == whole[90:]
    assert list(resumed) == following


@pytest.mark.parametrize("on_error", ["skip", "replace"])
@pytest.mark.parametrize("stop", [0, 5])
def test_epochs_may_differ_in_length(stop: int, on_error: Any) -> None:
    def make_loader() -> DataLoader:
        source = MapIterator(range(20), Growing(4))
        return DataLoader(source, output_order="input", on_error=on_error)

    loader = make_loader()
    assert [len(list(loader)) for epoch in range(2)] == [4, 8]
    first = list(itertools.islice(loader, stop))
    state = loader.state_dict()
    # The source of the first loader is at an earlier epoch, that of the second at a later one.
    list(loader)
    for resumed in (make_loader(), loader):
        resumed.load_state_dict(state)
        assert first + list(resumed) == list(range(12))


@each(
    "make",
    [range, sampler, Counting, lambda n: Anew(Counting(n)), Deals, TorchSampler, Growing],
)
def test_an_iterator_of_which_nothing_was_taken_is_no_epoch(make: Any) -> None:
    """Lightning makes one to check a loader; the rest of the epoch of a loaded state was lost to it."""

    def loader_of_90() -> DataLoader:
        return DataLoader(make(90), batch_size=5, output_order="input")

    loader, checked = loader_of_90(), loader_of_90()
    iter(checked)
    first = list(itertools.islice(loader, 3))
    assert list(itertools.islice(checked, 3)) == first
    resumed = loader_of_90()
    resumed.load_state_dict(through_pickle(loader.state_dict()))
    for _ in range(2):
        iter(resumed)
    assert [*first, *resumed] == list(loader_of_90())
    assert resumed.epoch == 1


def test_an_epoch_chosen_by_the_sampler_outlasts_an_unused_iterator() -> None:
    order = sampler(9)
    loader = DataLoader(order, output_order="input")
    order.set_epoch(5)
    iter(loader)
    expected = sampler(9)
    expected.set_epoch(5)
    assert list(loader) == list(expected)


class CollectsOften(DataLoader):
    """Collects garbage whenever an attribute is set, as Python may do by itself."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        gc.collect()


def test_an_unused_iterator_that_ends_while_a_state_is_loaded_does_not_replace_it() -> None:
    former = DataLoader(range(9), output_order="input")
    former.set_epoch(4)
    loader = CollectsOften(range(9), output_order="input")
    cycle: list[Any] = [iter(loader)]
    cycle.append(cycle)
    del cycle
    loader.load_state_dict(former.state_dict())
    assert loader.epoch == 4


def test_a_source_may_use_the_names_of_samplers_for_other_things() -> None:
    """``mixed`` of a user's source was taken for the sources of a mixture."""

    class Recordings(list[int]):
        mixed = True
        rank, seed, made_of = "first", "none", "tape"

    loader = DataLoader(Recordings(range(5)), batch_size=2)
    first = next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    assert [first, *loader] == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("is_in_the_middle", [True, False])
def test_a_sampler_that_draws_anew_is_warned_of(is_in_the_middle: bool) -> None:
    data = pytest.importorskip("torch.utils.data")

    class Reversed(data.RandomSampler):
        """Has the attributes of its base, and an order of its own."""

        def __iter__(self) -> Iterator[int]:
            return iter(range(8, -1, -1))

    class Named:
        generator = "This name may stand for anything."

        def __iter__(self) -> Iterator[int]:
            return iter(range(9))

    def load(source: Any) -> None:
        loader = DataLoader(source, batch_size=2)
        for _ in loader:
            if is_in_the_middle:
                break
        loader.load_state_dict(loader.state_dict())

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for sampler in (data.SequentialSampler(range(9)), Reversed(range(9)), Named()):
            load(MapIterator(range(9), sampler))
        load(Named())
        # Between two epochs, no order has begun.
        if not is_in_the_middle:
            load(data.RandomSampler(range(9)))
    if is_in_the_middle:
        with pytest.warns(UserWarning, match="^RandomSampler draws .* use DistributedRandomS"):
            load(MapIterator(range(9), data.RandomSampler(range(9))))
