"""Each kind of source goes on where the loader was stopped, in the same process and in another."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from spdl_media.dataloader import DataLoader
from spdl_media.source import repeat_source


class Counting(Iterator[int]):
    """An iterator with a state, which counts what is read of it."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.position = 0
        self.num_read = 0

    def __next__(self) -> int:
        if self.position >= self.n:
            raise StopIteration
        self.position += 1
        self.num_read += 1
        return self.position - 1

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class CountingAsync:
    """The same for ``async for``."""

    def __init__(self, n: int) -> None:
        self.inner = Counting(n)
        self.state_dict = self.inner.state_dict
        self.load_state_dict = self.inner.load_state_dict

    def __aiter__(self) -> CountingAsync:
        return self

    async def __anext__(self) -> int:
        for item in self.inner:
            return item
        raise StopAsyncIteration


def through_pickle(state: dict[str, Any]) -> Any:
    return pickle.loads(pickle.dumps(state))


class TestIteratorsWithState:
    @pytest.mark.parametrize("make", [Counting, CountingAsync, lambda n: repeat_source(range(n))])
    def test_stopped_over_and_over(self, make: Any) -> None:
        """Each time the loader begins behind what it gave last, wherever the reading was."""
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

    @pytest.mark.parametrize("make", [Counting, CountingAsync])
    def test_a_state_from_before_the_first_item(self, make: Any) -> None:
        loader = DataLoader(make(90), output_order="input")
        state = loader.state_dict()
        assert list(itertools.islice(loader, 3)) == [0, 1, 2]
        loader.load_state_dict(through_pickle(state))
        assert list(loader) == list(range(90))
