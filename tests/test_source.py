"""Sources: their items in each epoch, and access by position."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spdl_media.epochs import begin_by_position
from spdl_media.source import (
    DistributedDeterministicSampler,
    DistributedRandomSampler,
    HasEpochs,
    IterableWithShuffle,
    LocalDirectory,
    MapIterator,
    MergeIterator,
    Stateful,
    embed_shuffle,
    repeat_source,
)


def random_sampler(n: int, **arguments: Any) -> DistributedRandomSampler:
    return DistributedRandomSampler(n, rank=0, world_size=1, **arguments)


class Letters:
    """A source that can be shuffled, and records the seeds."""

    def __init__(self, letters: str = "abcdef") -> None:
        self.letters = letters
        self.order = list(letters)
        self.seeds: list[int] = []

    def shuffle(self, seed: int) -> None:
        self.seeds.append(seed)
        start = seed % len(self.letters)
        self.order = list(self.letters[start:] + self.letters[:start])

    def __iter__(self) -> Iterator[str]:
        return iter(self.order)

    def __len__(self) -> int:
        return len(self.order)


class TestMapIterator:
    def test_without_sampler(self) -> None:
        assert list(MapIterator({"a": 1, "b": 2})) == [1, 2]
        assert list(MapIterator(["x", "y"])) == ["x", "y"]
        assert len(MapIterator({"a": 1, "b": 2})) == 2

    def test_a_map_style_dataset(self) -> None:
        class Dataset:
            def __getitem__(self, index: int) -> int:
                return index * index

            def __len__(self) -> int:
                return 4

        assert list(MapIterator(Dataset())) == [0, 1, 4, 9]
        assert list(MapIterator(Dataset(), iter([3, 1]))) == [9, 1]

    def test_epochs_are_those_of_the_sampler(self) -> None:
        squares = {index: index * index for index in range(20)}
        source = MapIterator(squares, random_sampler(20))
        assert len(source) == 20
        epochs = [list(source), list(source)]
        sampler = random_sampler(20)
        assert epochs == [[index * index for index in sampler] for _ in range(2)]
        assert source.epoch == 2
        source.set_epoch(0)
        assert list(source) == epochs[0]
        order = source.begin_by_position(1)
        assert order is not None
        assert list(order) == epochs[1]
        assert (order[3], list(order[2:5])) == (epochs[1][3], epochs[1][2:5])

    def test_asks_for_a_value_when_it_comes_to_it(self) -> None:
        asked = []

        class Noting(dict[int, int]):
            def __getitem__(self, key: int) -> int:
                asked.append(key)
                return super().__getitem__(key)

        source = MapIterator(Noting({0: 0, 1: 10, 2: 20}), [2, 0, 1])
        next(iter(source))
        assert asked == [2]
        order = source.begin_by_position(0)
        assert order is not None
        assert order[1] == 0
        assert asked == [2, 0]

    def test_order_is_known_of_all_keys_and_of_keys_in_a_list(self) -> None:
        assert list(MapIterator({"a": 1, "b": 2}).begin_by_position(0) or ()) == [1, 2]
        assert list(MapIterator([5, 6], [1]).begin_by_position(0) or ()) == [6]
        assert MapIterator([5, 6], iter([1])).begin_by_position(0) is None

    def test_sampler_without_length_or_epochs(self) -> None:
        source = MapIterator([5, 6], iter([1, 1]))
        with pytest.raises(TypeError, match="'list_iterator' has no len"):
            len(source)
        assert source.epoch is None
        source.set_epoch(3)
        assert list(source) == [6, 6]

    def test_bad_mappings(self) -> None:
        with pytest.raises(TypeError, match="__getitem__, which int lacks"):
            MapIterator(3)  # type: ignore[arg-type]

        class KeysUnknown:
            def __getitem__(self, key: int) -> int:
                return key

        with pytest.raises(TypeError, match=r"neither keys\(\) nor a length; pass a sampler"):
            MapIterator(KeysUnknown())


class TestMergeIterator:
    @given(st.lists(st.integers(0, 6), min_size=1, max_size=5))
    def test_in_turn(self, lengths: list[int]) -> None:
        lists = [[(row, n) for n in range(length)] for row, length in enumerate(lengths)]
        rounds = itertools.zip_longest(*lists)
        expected = [item for items in rounds for item in items if item is not None]
        assert list(MergeIterator(lists)) == expected

    @given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.integers(1, 20))
    def test_stops_after_so_many(self, lengths: list[int], count: int) -> None:
        lists = [[(row, n) for n in range(length)] for row, length in enumerate(lengths)]
        assert list(MergeIterator(lists, stop_after=count)) == list(MergeIterator(lists))[:count]

    def test_stops_when_the_first_one_ends(self) -> None:
        assert list(MergeIterator([[0, 1, 2], [10, 11], [20, 21, 22]], stop_after=-1)) == [
            *[0, 10, 20],
            *[1, 11, 21],
            2,
        ]

    @given(st.integers(0, 2**40), st.integers(0, 9))
    def test_chance_keeps_the_order_of_each(self, seed: int, epoch: int) -> None:
        lists = [[(row, n) for n in range(7)] for row in range(3)]
        source = MergeIterator(lists, weights=[1, 2, 3], seed=seed)
        source.set_epoch(epoch)
        items = list(source)
        for row in range(3):
            assert [item for item in items if item[0] == row] == lists[row]
        source.set_epoch(epoch)
        assert list(source) == items

    def test_chance_differs_from_epoch_to_epoch(self) -> None:
        source = MergeIterator([range(30), range(30, 60)], weights=[1, 1])
        first = list(source)
        assert source.epoch == 1
        assert list(source) != first

    def test_weights_are_kept_in_the_long_run(self) -> None:
        source = MergeIterator(
            [itertools.repeat(0), itertools.repeat(1)], weights=[1, 4], stop_after=10_000
        )
        # Five standard deviations of the binomial distribution are 200.
        assert abs(sum(source) - 8000) < 200

    def test_what_has_no_weight_is_not_begun(self) -> None:
        def unwanted() -> Iterator[int]:
            raise AssertionError
            yield

        source = MergeIterator([unwanted(), [1, 2]], weights=[0, 1])
        assert list(source) == [1, 2]

    def test_weighted_until_the_first_one_ends(self) -> None:
        source = MergeIterator([[1], itertools.repeat(2)], weights=[1, 1], stop_after=-1)
        items = list(source)
        assert items.count(1) == 1

    def test_epochs_reach_what_is_merged(self) -> None:
        source = MergeIterator([random_sampler(9), random_sampler(9, seed=1)])
        epochs = [list(source), list(source)]
        source.set_epoch(1)
        assert list(source) == epochs[1] != epochs[0]

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: MergeIterator([[1], "ab"]), r"iterables\[1\] is a single str"),
            (lambda: MergeIterator([]), "at least one iterable, and is empty"),
            (lambda: MergeIterator([[1]], stop_after=-2), "stop_after must be at least -1, not -2"),
            (lambda: MergeIterator([[1]], weights=[1, 2]), "one number for each iterable"),
            (lambda: MergeIterator([[1]], weights=[-1]), r"weights\[0\] is -1"),
            (lambda: MergeIterator([[1]], weights=[0]), "at least one iterable a weight"),
        ],
    )
    def test_bad_arguments(self, make: Callable[[], object], message: str) -> None:
        with pytest.raises((TypeError, ValueError), match=message):
            make()


def take(count: int, source: Iterable[Any]) -> list[Any]:
    return list(itertools.islice(source, count))


class TestRepeatSource:
    def test_epochs_follow_each_other(self) -> None:
        sampler = random_sampler(5)
        epochs = [list(sampler) for _ in range(5)]
        assert take(15, repeat_source(sampler, epoch=2)) == epochs[2] + epochs[3] + epochs[4]

    def test_shuffles_what_has_no_epochs(self) -> None:
        letters = Letters("abc")
        assert "".join(take(9, repeat_source(letters, epoch=1))) == "bcacababc"
        assert letters.seeds == [1, 2, 3]

    @pytest.mark.parametrize("make", [lambda: random_sampler(5), Letters, lambda: [1, 2, 3]])
    @pytest.mark.parametrize("count", [0, 1, 4, 5, 13])
    def test_continues_in_another_place(self, make: Callable[[], Any], count: int) -> None:
        source = repeat_source(make())
        take(count, source)
        resumed = repeat_source(make())
        resumed.load_state_dict(source.state_dict())
        pickled = pickle.loads(pickle.dumps(repeat_source(make())))
        pickled.load_state_dict(source.state_dict())
        expected = take(20, repeat_source(make()))[count:]
        assert take(20 - count, resumed) == take(20 - count, pickled) == expected
        assert isinstance(resumed, Stateful)

    def test_an_empty_source_is_an_error_not_a_hang(self) -> None:
        with pytest.raises(ValueError, match="a list, gave no item in epoch 3"):
            next(repeat_source([], epoch=3))

    def test_an_iterator_cannot_be_repeated(self) -> None:
        with pytest.raises(TypeError, match="list_iterator is an iterator, which can be read once"):
            repeat_source(iter([1]))


class TestEmbedShuffle:
    def test_each_iteration_is_another_order(self) -> None:
        letters = Letters("abc")
        source = embed_shuffle(letters, epoch=1)
        assert ["".join(source) for _ in range(3)] == ["bca", "cab", "abc"]
        assert letters.seeds == [1, 2, 3]
        assert (len(source), source.epoch) == (3, 4)

    def test_any_epoch_can_be_had(self) -> None:
        whole = embed_shuffle(Letters())
        epochs = ["".join(whole) for _ in range(5)]
        source = embed_shuffle(Letters())
        for epoch in (4, 2, 3, 1, 0):
            source.set_epoch(epoch)
            assert "".join(source) == epochs[epoch]
        # An epoch that was left early does not change the next one.
        source = embed_shuffle(Letters())
        take(2, source)
        assert "".join(source) == epochs[1]

    def test_order_by_position(self, tmp_path: Path) -> None:
        for name in "abcd":
            (tmp_path / name).touch()
        source = embed_shuffle(LocalDirectory(tmp_path))
        order = source.begin_by_position(1)
        assert order is not None
        expected = list(order)
        source.set_epoch(1)
        assert list(source) == expected
        assert embed_shuffle(Letters()).begin_by_position(0) is None

    def test_what_cannot_be_shuffled(self) -> None:
        with pytest.raises(TypeError, match=r"list cannot be shuffled.*shuffle\(seed\)"):
            embed_shuffle([1])  # type: ignore[arg-type]


class TestLocalDirectory:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        for name in ("b/2.jpg", "b/10.jpg", "a/1.jpg", "c.jpg", "a.jpg", "note.txt"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).touch()
        return tmp_path

    def names(self, source: Iterable[Path], folder: Path) -> list[str]:
        return [path.relative_to(folder).as_posix() for path in source]

    def test_sorted_by_name(self, folder: Path) -> None:
        source = LocalDirectory(folder, "**/*.jpg")
        expected = ["a/1.jpg", "a.jpg", "b/10.jpg", "b/2.jpg", "c.jpg"]
        assert self.names(source, folder) == expected
        assert len(source) == 5
        assert source[-1] == folder / "c.jpg"
        assert self.names(source[1:3], folder) == expected[1:3]
        assert len(LocalDirectory(str(folder))) == 6
        assert self.names(LocalDirectory(folder, "*.jpg"), folder) == ["a.jpg", "c.jpg"]
        assert repr(source) == f"LocalDirectory({str(folder)!r}, '**/*.jpg'): 5 files"

    def test_shuffle_depends_on_the_seed_alone(self, folder: Path) -> None:
        source = LocalDirectory(folder)
        plain = list(source)
        source.shuffle(1)
        first = list(source)
        assert first != plain
        assert sorted(first) == sorted(plain)
        source.shuffle(2)
        assert list(source) != first
        source.shuffle(seed=1)
        assert list(source) == first
        assert isinstance(source, IterableWithShuffle)

    def test_nothing_found(self, folder: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"matches '\*\.png'.*subfolders too"):
            LocalDirectory(folder, "*.png")
        with pytest.raises(NotADirectoryError, match=r"note\.txt' is not a folder"):
            LocalDirectory(folder / "note.txt")


class TestWhatCanBeReadByPosition:
    def test_sequences_and_what_python_reads_by_position(self) -> None:
        class Old:
            def __getitem__(self, index: int) -> int:
                return [5, 6][index]

            def __len__(self) -> int:
                return 2

        for source in ([1, 2], range(5), "ab", np.arange(3), Old()):
            assert begin_by_position(source, 0) is source

    def test_a_table_cannot(self) -> None:
        class Table:
            """Like a table of pandas: iteration gives the names of columns, but the length counts rows."""

            def __getitem__(self, column: str) -> list[int]:
                return [1, 2, 3]

            def __len__(self) -> int:
                return 3

            def __iter__(self) -> Iterator[str]:
                return iter(["x", "y"])

        for source in (Table(), {"a": 1}, {1, 2}, iter([1])):
            assert begin_by_position(source, 0) is None


def test_epochs_are_a_protocol() -> None:
    assert isinstance(random_sampler(3), HasEpochs)
    assert not isinstance([1], HasEpochs)


@pytest.mark.parametrize("kind", [DistributedRandomSampler, DistributedDeterministicSampler])
def test_a_sampler_for_more_items_than_there_are(kind: Any) -> None:
    with pytest.raises(ValueError, match="the sampler is for 11 items, but the dataset has 10"):
        MapIterator(range(10), kind(11, rank=0, world_size=1))
    # Fewer draws than items, and more, are both allowed.
    assert sorted(MapIterator(range(10), kind(9, rank=0, world_size=1))) == [*range(9)]
    repeated = DistributedRandomSampler(10, num_draws=30, weights=[1] * 10)
    assert set(MapIterator(range(10), repeated)) <= set(range(10))
