"""DataLoader(on_error=): drop, raise or replace items that fail, or call a function."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from left_behind import wait_for_threads
from resumable_sources import Counting

import spdl_media as sm
from spdl_media import loader_items
from spdl_media.dataloader import Replaced, sample_rng
from spdl_media.pipeline import PipelineFailure
from spdl_media.source import DistributedRandomSampler, MapIterator
from spdl_media.testing import make_image

NO_LIMIT = float("inf")


class Fragile:
    """A preprocessor that fails for some items and drops others."""

    def __init__(self, bad: set[int], dropped: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        self.bad = bad
        self.dropped = dropped
        self.calls: list[int] = []

    def __call__(self, item: int) -> int | None:
        self.calls.append(item)
        if item in self.bad:
            raise ValueError(f"no {item}")
        return None if item in self.dropped else item


class FragileAsync(Fragile):
    async def __call__(self, item: int) -> int | None:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().__call__(item)


class Dataset:
    """A map-style dataset, whose keys are ten times the values."""

    def __init__(self, n: int, bad: set[int]) -> None:
        self.n = n
        self.bad = bad

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, key: int) -> int:
        if key in self.bad:
            raise OSError(f"unreadable {key}")
        return key


def stand_ins(n: int, bad: set[int], dropped: set[int]) -> dict[int, int]:
    """Return which good item replaces which bad one: remove pairs "bad, good" from the ring repeatedly."""
    ring = [item for item in range(n) if item not in dropped]
    found: dict[int, int] = {}
    while True:
        pairs = zip(ring, ring[1:] + ring[:1], strict=True)
        pair = next(((one, two) for one, two in pairs if one in bad and two not in bad), None)
        if pair is None:
            return found
        found[pair[0]] = pair[1]
        ring = [item for item in ring if item not in pair]


@pytest.mark.parametrize("is_async", [False, True])
@settings(max_examples=examples(30), deadline=None)
@given(
    kinds=st.lists(st.sampled_from(["good", "good", "bad", "dropped"]), max_size=16),
    num_threads=st.integers(1, 4),
    batch_size=st.none() | st.integers(1, 5),
)
@pytest.mark.filterwarnings("ignore:the epoch gave nothing")
def test_each_good_sample_stands_in_for_one_bad_item_at_most(
    is_async: bool, kinds: list[str], num_threads: int, batch_size: int | None
) -> None:
    bad = {item for item, kind in enumerate(kinds) if kind == "bad"}
    dropped = {item for item, kind in enumerate(kinds) if kind == "dropped"}
    expected = stand_ins(len(kinds), bad, dropped)
    told: list[int] = []
    loader = sm.DataLoader(
        range(len(kinds)),
        preprocessor=(FragileAsync if is_async else Fragile)(bad, dropped),
        batch_size=batch_size,
        num_threads=num_threads,
        output_order="input",
        max_failures=NO_LIMIT,
        on_failure=lambda record, item: told.append(item),
        on_error="replace",
    )
    samples, replaced = [], []
    for batch in loader:
        samples += batch if batch_size else [batch]
        replaced += [(each.item, each.by) for each in loader.replaced]
        rows = batch if batch_size else [batch]
        assert all(rows[each.row] == each.by for each in loader.replaced)
        assert all(each.position == each.item for each in loader.replaced)
    kept = [item for item in range(len(kinds)) if item not in dropped]
    wanted = [expected.get(item) if item in bad else item for item in kept]
    assert samples == [item for item in wanted if item is not None]
    assert replaced == sorted(expected.items())
    # Each item is processed once, even if it replaces several others.
    assert sorted(told) == sorted(bad)
    assert sum(loader.failure_counts.values()) == len(bad)


def recorded(index: int, rng: np.random.Generator) -> tuple[int, int]:
    if index % 7 == 3:
        raise ValueError(index)
    return index, int(rng.integers(2**40))


def make_loader(num_threads: int = 3) -> sm.DataLoader:
    sampler = DistributedRandomSampler(60, rank=1, world_size=2, seed=5)
    return sm.DataLoader(
        MapIterator(Dataset(60, bad={4, 8, 12, 16}), sampler),
        preprocessor=recorded,
        batch_size=4,
        num_threads=num_threads,
        output_order="input",
        on_error="replace",
        seed=9,
    )


def test_a_resumed_epoch_has_the_same_stand_ins() -> None:
    """A replacement gets the random numbers of the failed item, at any batch where the loader was stopped."""
    order = list(DistributedRandomSampler(60, rank=1, world_size=2, seed=5))
    loader = make_loader()
    whole, states, replaced = [], [], []
    for batch in loader:
        whole.append(batch)
        replaced.append(loader.replaced)
        states.append(json.dumps(loader.state_dict()))
    assert [len(batch) for batch in whole] == [4] * 7 + [2]
    assert sum(map(len, replaced)) > 4
    for batch, rows in zip(whole, replaced, strict=True):
        for row, position, item, by in rows:
            assert order[position] == item
            draw = sample_rng(9, 0, 1 + 2 * position).integers(2**40)
            assert batch[row] == (order[by], int(draw))
    counts = Counter(index for batch in whole for index, _ in batch)
    assert max(counts.values()) == 2
    for number, state in enumerate(states[:-1], start=1):
        resumed = make_loader(num_threads=1 + number % 4)
        resumed.load_state_dict(json.loads(state))
        rest = [(batch, resumed.replaced) for batch in resumed]
        assert rest == list(zip(whole, replaced, strict=True))[number:]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_function_makes_the_sample(is_async: bool, caplog: pytest.LogCaptureFixture) -> None:
    def instead(item: int, error: BaseException) -> str | None:
        if item == 5:
            raise KeyError(item)
        return None if item == 3 else f"{item}: {error}"

    preprocessor = (FragileAsync if is_async else Fragile)({0, 3, 5})
    loader = sm.DataLoader(
        MapIterator(Dataset(10, bad={8}), range(10)),
        preprocessor=preprocessor,
        batch_size=4,
        output_order="input",
        on_error=instead,
    )
    first, second = loader
    assert first == ["0: no 0", 1, 2, 4]
    assert second == [6, 7, "8: unreadable 8", 9]
    assert loader.replaced == (Replaced(row=2, position=8, item=8, by=None),)
    assert loader.failure_counts[type(preprocessor).__name__] == 4
    (own,) = [
        record.exception for record in loader.failures if isinstance(record.exception, KeyError)
    ]
    assert str(own.__context__) == "no 5"
    assert "first failure of stage" in caplog.text
    assert "4 of 10" in caplog.text


def test_a_plain_function_that_returns_a_coroutine_fails() -> None:
    loader = sm.DataLoader(
        [1], preprocessor=lambda item: later(item, OSError()), on_error="replace"
    )
    with pytest.raises(PipelineFailure, match="stage 'lambda' returned a coroutine"):
        list(loader)


def test_a_function_of_a_source_without_positions() -> None:
    loader = sm.DataLoader(iter([1, 2, 3]), preprocessor=Fragile({2}), on_error=lambda *_: "two")
    assert sorted(map(str, loader)) == ["1", "3", "two"]


def test_the_failure_of_everything_is_reported_before_the_walks_are_over() -> None:
    num_items = 1_000_000
    fragile = Fragile(set(range(num_items)))
    loader = sm.DataLoader(
        range(num_items), preprocessor=fragile, num_threads=2, on_error="replace"
    )
    with pytest.raises(PipelineFailure, match="10 of 10 calls failed") as caught:
        list(loader)
    assert isinstance(caught.value.exceptions[0], ValueError)
    assert len(fragile.calls) < num_items


@pytest.mark.parametrize("num_bad", [600, 1400])
def test_a_long_run_of_bad_items_is_walked_over_once(
    num_bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Counted(dict[int, int]):
        asked = 0

        def get(self, key: int, default: Any = None) -> Any:
            self.asked += 1
            return super().get(key, default)

    turns = Counted()
    init = loader_items.StandIns.__init__

    def counted(self: Any, *args: Any) -> None:
        init(self, *args)
        self._turns = turns

    monkeypatch.setattr(loader_items.StandIns, "__init__", counted)
    loader = sm.DataLoader(
        range(2000),
        preprocessor=Fragile(set(range(300, 300 + num_bad))),
        on_error="replace",
        output_order="input",
        max_failures=-1,
    )
    assert len(list(loader)) == min(2000, 2 * (2000 - num_bad))
    assert turns.asked < 4 * 2000


def test_a_walk_ends_when_the_consumer_has_gone() -> None:
    reached, gone = threading.Event(), threading.Event()

    def preprocess(item: int) -> int:
        if item == 0:
            return item
        calls.append(item)
        if item == 50:
            reached.set()
            gone.wait(20)
        raise ValueError(item)

    calls: list[int] = []
    before = set(threading.enumerate())
    loader = sm.DataLoader(
        range(1000),
        preprocessor=preprocess,
        num_threads=1,
        max_failures=NO_LIMIT,
        on_error="replace",
    )
    for item in loader:
        assert item == 0
        assert reached.wait(20)
        break
    gone.set()
    wait_for_threads(before)
    assert calls == list(range(1, 51))


@pytest.fixture
def photos(tmp_path: Path) -> list[Path]:
    """Make twelve images whose level is their number; 3, 4 and 11 are damaged in different ways."""
    paths = [tmp_path / f"{number}.jpg" for number in range(12)]
    for number, path in enumerate(paths):
        path.write_bytes(make_image(np.full((32, 32, 3), 20 * number, np.uint8), codec="mjpeg"))
    paths[3].unlink()
    whole = paths[4].read_bytes()
    paths[4].write_bytes(whole[: len(whole) // 2])
    paths[11].write_bytes(b"<html>404</html>")
    return paths


def labelled(path: Path) -> tuple[Any, int]:
    return sm.load_image(path, width=16, height=16), int(path.stem)


def grey(path: Path, error: BaseException) -> tuple[np.ndarray, int]:
    assert isinstance(error, sm.MediaError)
    return np.full((16, 16, 3), 7, np.uint8), -1


def batches_of(photos: list[Path], **options: Any) -> tuple[sm.DataLoader, list[Any]]:
    loader = sm.DataLoader(
        photos, preprocessor=labelled, batch_size=4, to="numpy", output_order="input", **options
    )
    return loader, [(*batch, loader.replaced) for batch in loader]


def check_labels(images: np.ndarray, labels: np.ndarray) -> None:
    assert np.array_equal(np.rint(images.mean((1, 2, 3)) / 20), labels)


def test_damaged_files_under_each_policy(
    photos: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    errors = {"3": sm.SourceError, "4": sm.DecodeError, "11": sm.MediaError}
    for policy in ("skip", "replace", grey):
        caplog.clear()
        loader, batches = batches_of(photos, on_error=policy)
        assert loader.failure_counts["labelled"] == 3
        assert "first failure of stage 'labelled'" in caplog.text
        assert "failures of this epoch: 3 of 12 in 'labelled'" in caplog.text
        for record in loader.failures:
            (number,) = (stem for stem in errors if f"/{stem}.jpg" in record.input)
            assert isinstance(record.exception, errors[number])
        sizes = [len(labels) for _, labels, _ in batches]
        assert sizes == ([4, 4, 1] if policy == "skip" else [4, 4, 4])
        for images, labels, replaced in batches:
            good = labels >= 0
            check_labels(images[good], labels[good])
            # Only rows that are reported as replaced contain another sample.
            rows = [each.row for each in replaced]
            assert [photos[each.position] for each in replaced] == [each.item for each in replaced]
            assert rows == ([] if policy == "skip" else rows)
        numbers = [int(label) for _, labels, _ in batches for label in labels]
        assert (
            numbers
            == {
                "skip": [0, 1, 2, 5, 6, 7, 8, 9, 10],
                "replace": [0, 1, 2, 6, 5, 5, 6, 7, 8, 9, 10, 0],
                grey: [0, 1, 2, -1, -1, 5, 6, 7, 8, 9, 10, -1],
            }[policy]
        )


@pytest.mark.parametrize("number", [3, 4, 11])
def test_the_first_damaged_file_ends_the_epoch_under_raise(
    photos: list[Path], number: int, caplog: pytest.LogCaptureFixture
) -> None:
    paths = [path for path in photos if path.stem not in {"3", "4", "11"} - {str(number)}]
    with pytest.raises(PipelineFailure, match="max_failures=0") as caught:
        batches_of(paths, on_error="raise")
    (error,) = caught.value.exceptions
    assert isinstance(error, sm.MediaError)
    assert f"{number}.jpg" in str(error)
    assert "first failure of stage 'labelled'" in caplog.text


def test_batches_are_filled_by_load_image_batch(photos: list[Path]) -> None:
    fill = partial(sm.load_image_batch, width=16, height=16, on_error="fill")
    loader = sm.DataLoader(photos, batch_size=4, aggregator=fill, output_order="input")
    valid = [batch.valid.tolist() for batch in loader]
    assert valid == [[True] * 3 + [False], [False] + [True] * 3, [True] * 3 + [False]]


def generate(item: int) -> Iterator[int]:
    yield item


async def numbers() -> AsyncIterator[int]:
    yield 1


async def later(item: int, error: BaseException) -> int:
    return item


@pytest.mark.parametrize(
    ("source", "options", "error", "message"),
    [
        (range(3), {"on_error": "ignore"}, ValueError, "on_error must be .*'skip'"),
        (
            range(3),
            {"on_error": later},
            TypeError,
            "on_error must be a plain function, and later is a coroutine function",
        ),
        (range(3), {"on_error": "raise", "max_failures": 3}, ValueError, "leave one of them out"),
        (range(3), {"preprocessor": generate}, ValueError, "generate is a generator"),
        (
            range(3),
            {"preprocessor": generate, "on_error": lambda *_: 1},
            ValueError,
            "generate is a generator",
        ),
        (iter([1]), {}, ValueError, "list_iterator, can only be read from its start; pass a seq"),
        (Counting(3), {}, ValueError, "Counting, can only be read from its start"),
        (numbers(), {}, ValueError, "async_generator, can only be read from its start"),
        (MapIterator([5], iter([0])), {}, ValueError, "MapIterator, can only be read"),
    ],
)
def test_what_does_not_go_together_is_refused(
    source: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        list(sm.DataLoader(source, **{"preprocessor": double, "on_error": "replace"} | options))


def double(item: int) -> int:
    return 2 * item


RANK = """
    import sys
    import torch.distributed as dist
    import spdl_media as sm
    from spdl_media.source import DistributedRandomSampler, MapIterator

    rank, store, *paths = sys.argv[1:]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=2)
    loader = sm.DataLoader(
        MapIterator(paths, DistributedRandomSampler(len(paths), seed=1)),
        preprocessor=lambda path: sm.load_image(path, width=8, height=8),
        batch_size=4,
        drop_last=True,
        to="torch",
        on_error="replace",
    )
    steps = replaced = 0
    for images in loader:
        # Waits for the other rank: with one batch less there, it would wait for ever.
        dist.all_reduce(images.float().mean())
        steps, replaced = steps + 1, replaced + len(loader.replaced)
    dist.barrier()
    print(steps, replaced)
    for seed in (0, rank):
        try:
            for item in sm.DataLoader(DistributedRandomSampler(40, seed=int(seed))):
                dist.barrier()
            print("ended")
        except ValueError as error:
            print(error)
            break
"""


@pytest.mark.long  # two processes that import torch
def test_two_ranks_end_together_and_compare_their_epochs(tmp_path: Path) -> None:
    pytest.importorskip("torch.distributed")
    data = make_image(np.full((16, 16, 3), 90, np.uint8), codec="mjpeg")
    paths = [tmp_path / f"{number}.jpg" for number in range(80)]
    for path in paths:
        path.write_bytes(data)
    # All damaged items belong to one rank, which would have one batch less without replacements.
    share = list(DistributedRandomSampler(80, seed=1, rank=0, world_size=2))
    for index in share[3:20:5]:
        paths[index].write_bytes(data[: len(data) // 2])
    command = [sys.executable, "-c", textwrap.dedent(RANK)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store"), *map(str, paths)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=500)[0].splitlines() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [output[:2] for output in outputs] == [["10 4", "ended"], ["10 0", "ended"]]
    # The second rank detects the difference, and the first then finds that the other one is gone.
    assert any("split different epochs" in output[-1] for output in outputs)
