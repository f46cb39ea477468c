"""Sources of each kind that a DataLoader can resume."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any

import numpy as np


class Counting(Iterator[int]):
    """An iterator with a state, which counts the items that are read."""

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
    """An asynchronous iterator with a state, which counts the items that are read."""

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


class Cards(Sequence[int]):
    """A sequence that can be shuffled in place, like a list."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.order = list(range(n))

    def shuffle(self, seed: int) -> None:
        self.order[:] = np.random.default_rng(seed).permutation(self.n).tolist()

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, position: Any) -> Any:
        return self.order[position]


class Deals(Cards):
    """A sequence with another order in each epoch. Iteration does not advance the epoch."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.shuffle(epoch)


class TorchSampler:
    """Like PyTorch's DistributedSampler: it has a length and epochs, and does not advance them by itself."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng(self.epoch).permutation(self.n).tolist())

    def __len__(self) -> int:
        return self.n


class Growing(TorchSampler):
    """Has more items in each epoch, as curricula have."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __len__(self) -> int:
        return self.n * (self.epoch + 1)


class Anew:
    """Begins again in each iteration, except in the first one after a state was loaded."""

    def __init__(self, inner: Counting) -> None:
        self.inner = inner
        self.start = 0

    def __iter__(self) -> Iterator[int]:
        self.inner.position, self.start = self.start, 0
        yield from self.inner

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["position"]


class ManyTimesAsync:
    """Can be iterated any number of times by ``async for``."""

    def __init__(self, items: Iterable[int]) -> None:
        self.items = list(items)

    async def __aiter__(self) -> AsyncIterator[int]:
        for item in self.items:
            await asyncio.sleep(0)
            yield item
