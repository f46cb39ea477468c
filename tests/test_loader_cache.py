"""DataLoader(cache=): samples that are kept in memory for later epochs."""

from __future__ import annotations

import functools
import pickle
from collections import Counter
from typing import Any

import numpy as np
import pytest
from effort import each

import spdl_media as sm
from spdl_media.pipeline import PipelineFailure
from spdl_media.source import DistributedRandomSampler, MapIterator
from spdl_media.testing import make_image

calls: Counter[int] = Counter()


@pytest.fixture(autouse=True)
def no_calls() -> None:
    calls.clear()


def square(item: int) -> np.ndarray | None:
    calls[item] += 1
    if item == 5:
        raise ValueError(item)
    return None if item == 7 else np.full(1000, item * item, np.uint8)


async def square_async(item: int) -> np.ndarray | None:
    return square(item)


def firsts(loader: sm.DataLoader) -> list[int]:
    return sorted(int(sample[0]) for sample in loader)


@pytest.mark.parametrize("preprocessor", [square, square_async])
def test_samples_are_made_once(preprocessor: Any) -> None:
    source = MapIterator(range(10), DistributedRandomSampler(10, seed=1))
    loader = sm.DataLoader(source, preprocessor=preprocessor, cache=1_000_000)
    for _ in range(3):
        assert firsts(loader) == [0, 1, 4, 9, 16, 36, 64, 81]
        assert loader.failure_counts[preprocessor.__name__] == 1
    # A failure is not cached, because another try may succeed. A dropped item stays dropped.
    assert calls == Counter(dict.fromkeys(range(10), 1)) + Counter({5: 2})


def test_no_more_is_kept_than_was_allowed() -> None:
    size = len(pickle.dumps(square(1), pickle.HIGHEST_PROTOCOL))
    loader = sm.DataLoader(range(5), preprocessor=square, cache=3 * size, num_threads=1)
    assert firsts(loader) == firsts(loader) == [0, 1, 4, 9, 16]
    calls.clear()
    assert firsts(loader) == [0, 1, 4, 9, 16]
    assert calls == Counter([3, 4])
    # A copy in another process begins with an empty cache.
    copy = pickle.loads(pickle.dumps(loader))
    assert firsts(copy) == [0, 1, 4, 9, 16]
    assert calls == Counter([0, 1, 2, 3, 3, 4, 4])


def test_a_sample_that_is_changed_changes_no_other() -> None:
    loader = sm.DataLoader(range(3), preprocessor=square, cache=1_000_000)
    for _ in range(2):
        for sample in loader:
            assert int(sample[0]) in {0, 1, 4}
            sample[:] = 77


def test_stand_ins_are_kept_as_well() -> None:
    loader = sm.DataLoader(
        range(7), preprocessor=square, cache=1_000_000, on_error="replace", num_threads=1
    )
    for _ in range(2):
        assert [int(sample[0]) for sample in loader] == [0, 1, 4, 9, 16, 36, 36]
    assert calls[6] == 1


def test_items_that_are_no_keys_are_reported() -> None:
    loader = sm.DataLoader([{"path": "a"}], preprocessor=repr, cache=1000)
    with pytest.raises(PipelineFailure, match="unhashable type: 'dict'"):
        list(loader)


def drawn(item: int, rng: np.random.Generator) -> int:
    return int(rng.integers(item))


def drawn_at_will(item: int, rng: np.random.Generator | None = None) -> float:
    return item if rng is None else rng.random()


def generate(item: int) -> Any:
    yield item


load = functools.partial(functools.partial, sm.load_image)


def test_an_image_that_is_cut_the_same_in_each_epoch_is_kept() -> None:
    png = make_image(np.zeros((8, 8, 3), np.uint8))
    for options in (
        {},
        {"crops": (0, 0, 8, 8)},
        {"crops": sm.ResizeCenterCrop(8, 8), "flips": True},
        {"crops": [(0, 0, 8, 8)], "flips": np.float32(1), "rng": 3},
    ):
        loader = sm.DataLoader([png], cache=9**9, preprocessor=load(**options))
        assert [image.shape for image in loader] == [(8, 8, 3)]


@each(
    "options, error, message",
    [
        ({"preprocessor": drawn}, ValueError, "drawn draws another in each"),
        ({"preprocessor": sm.ImageRecipe(8, flip=0.5)}, ValueError, "ImageRecipe draws another"),
        ({"preprocessor": sm.ImageRecipe(8, random_crop=True)}, ValueError, "ImageRecipe draws"),
        ({"preprocessor": drawn_at_will}, ValueError, "drawn_at_will draws another"),
        ({"preprocessor": load(crops=sm.RandomResizedCrop())}, ValueError, "load_image draws"),
        ({"preprocessor": load(crops=[sm.RandomResizedCrop()])}, ValueError, "load_image draws"),
        ({"preprocessor": load(flips=0.5)}, ValueError, "load_image draws"),
        ({"preprocessor": load(flips=np.float32(0.5))}, ValueError, "load_image draws"),
        ({"preprocessor": generate}, ValueError, "generate is a generator"),
        ({}, ValueError, "there is neither"),
        ({"preprocessor": abs, "cache": 0}, ValueError, "cache must be at least 1, not 0"),
        ({"preprocessor": abs, "cache": 0.5}, TypeError, "cache must be an int"),
    ],
)
def test_what_cannot_be_kept_is_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        sm.DataLoader(range(3), **{"cache": 1000} | options)
