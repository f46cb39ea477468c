"""Random programs that stop and resume a loader over each kind of source, against a model."""

from __future__ import annotations

import asyncio
import itertools
import pickle
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from array_formats.made_files import tar
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from resumable_sources import (
    Anew,
    Cards,
    Counting,
    CountingAsync,
    Deals,
    ManyTimesAsync,
    TorchSampler,
)

import spdl_media as sm
from spdl_media.dataloader import DataLoader
from spdl_media.source import (
    DistributedDeterministicSampler,
    DistributedRandomSampler,
    LocalDirectory,
    MapIterator,
    MergeIterator,
    embed_shuffle,
    repeat_source,
)

N = 40
NUM_FILES = 23


def shuffled(n: int = N, **arguments: Any) -> DistributedRandomSampler:
    return DistributedRandomSampler(n, rank=0, world_size=1, **arguments)


def merged(**arguments: Any) -> MergeIterator[int]:
    return MergeIterator([shuffled(13), range(13, 20), TorchSampler(9)], **arguments)


async def generated_async() -> AsyncIterator[int]:
    for item in range(N):
        await asyncio.sleep(0)
        yield item


def samples_of_tar() -> Iterator[dict[str, Any]]:
    return sm.iter_samples([tar({f"{n}.cls": b"%d" % n for n in range(k, k + 9)}) for k in (0, 9)])


# Sources of which each iteration is an epoch, from its start.
ANEW: dict[str, Callable[[Path], Any]] = {
    "list": lambda _: list(range(N)),
    "array": lambda _: np.arange(N),
    "mapping": lambda _: MapIterator({str(n): n for n in range(N)}),
    "sequence that is shuffled": lambda _: Cards(N),
    "sequence with epochs": lambda _: Deals(N),
    "folder": LocalDirectory,
    "random sampler": lambda _: shuffled(),
    "weighted sampler": lambda _: shuffled(weights=range(N)),
    "deterministic sampler": lambda _: DistributedDeterministicSampler(N, rank=0, world_size=1),
    "PyTorch's sampler": lambda _: TorchSampler(N),
    "mapped": lambda _: MapIterator(range(N), shuffled()),
    "mapped by a sequence with epochs": lambda _: MapIterator(range(N), Deals(N)),
    "mapped by PyTorch's sampler": lambda _: MapIterator(range(N), TorchSampler(N)),
    "mapped by a merge": lambda _: MapIterator(range(N), merged()),
    "merged": lambda _: merged(),
    "merged by chance": lambda _: merged(weights=[1, 0.5, 2]),
    "merged up to a number": lambda _: merged(stop_after=11),
    "shuffled folder": lambda folder: embed_shuffle(LocalDirectory(folder)),
    "shuffled in place": lambda _: embed_shuffle(Cards(N)),
    "shuffled sampler": lambda _: embed_shuffle(shuffled()),
    "asynchronous": lambda _: ManyTimesAsync(range(N)),
    "with a state": lambda _: Anew(Counting(N)),
}

# Iterators with a state: an iteration continues where the last one was stopped.
GOES_ON: dict[str, Callable[[Path], Any]] = {
    "iterator": lambda _: Counting(150),
    "asynchronous iterator": lambda _: CountingAsync(150),
    **{
        f"repeated {name}": lambda folder, make=make: repeat_source(make(folder))  # type: ignore[misc]
        for name, make in ANEW.items()
        if name != "asynchronous"
    },
}

# Sources that can be read only once: to resume, loader and source are made again.
ONCE: dict[str, Callable[[Path], Any]] = {
    "generator": lambda _: (item for item in range(N)),
    "asynchronous generator": lambda _: generated_async(),
    "mapped generator": lambda _: MapIterator(range(N), (item for item in range(N))),
    "iter_samples": lambda _: samples_of_tar(),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    for number in range(NUM_FILES):
        (folder / f"{number}.jpg").touch()
    return folder


@dataclass
class Model:
    """The expected behaviour of a loader: a position in lists of items.

    Attributes:
        epochs: The items of each epoch. A source that continues, or can be read only once, has one epoch.
        goes_on: Whether an iteration continues after the last one.
        state: Epoch, and number of its items that were delivered, as in state_dict().
        next: The same for the next iteration.
    """

    epochs: list[list[Any]]
    goes_on: bool
    state: tuple[int, int] = (0, 0)
    next: tuple[int, int] = (0, 0)

    def take(self, count: int, batch_size: int) -> list[list[Any]]:
        epoch, start = self.next
        items = self.epochs[epoch][start : start + count * batch_size]
        batches = [items[n : n + batch_size] for n in range(0, len(items), batch_size)]
        self.state = (epoch, start + len(items))
        is_complete = len(batches) < count
        if self.goes_on:
            self.next = self.state
        elif count:
            self.next = (epoch + 1, 0)
            if is_complete:
                self.state = self.next
        return batches


def sequentially(source: Any) -> list[list[Any]]:
    """Return the epochs of a source, as in a loop without a loader."""
    if isinstance(source, ManyTimesAsync):
        source = source.items
    epochs = []
    for epoch in range(9):
        if isinstance(source, TorchSampler | Deals | MapIterator):
            # These sources or their samplers do not advance the epoch by themselves.
            source.set_epoch(epoch)
        epochs.append(list(source))
    return epochs


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["iterate", "load", "load elsewhere"]),
        st.integers(0, 2),
        st.integers(0, 6) | st.just(99),
    ),
    min_size=2,
    max_size=5,
)


def run(
    make: Callable[[], Any],
    model: Model,
    steps: list[tuple[str, int, int]],
    arguments: dict[str, Any],
    *,
    is_once: bool = False,
) -> None:
    """Compare the loader with the model, from the state of an earlier step on."""

    def make_loader() -> DataLoader:
        return DataLoader(make(), output_order="input", **arguments)

    batch_size = arguments["batch_size"]
    loader = make_loader()
    saved = [(loader.state_dict(), model.state)]
    for how, back, count in steps:
        state, place = saved[-1 - min(back, len(saved) - 1)]
        if how == "load elsewhere" or is_once:
            loader = make_loader()
            state = pickle.loads(pickle.dumps(state))
        if how != "iterate" or is_once:
            loader.load_state_dict(state)
            model.next = place
        # Infinite sources cannot be read to the end.
        some = min(count, 8) if model.goes_on else count
        assert list(itertools.islice(loader, some)) == model.take(some, batch_size)
        saved.append((loader.state_dict(), model.state))


ARGUMENTS = st.fixed_dictionaries(
    {
        "batch_size": st.integers(1, 4),
        "num_threads": st.integers(1, 3),
        "preprocessor": st.sampled_from([None, lambda item: item]),
        "buffer_size": st.sampled_from([1, 3, 30]),
    }
)


@pytest.mark.parametrize("kind", ANEW)
@settings(max_examples=examples(12))
@given(steps=STEPS, arguments=ARGUMENTS)
def test_epochs(
    kind: str, folder: Path, steps: list[tuple[str, int, int]], arguments: dict[str, Any]
) -> None:
    epochs = sequentially(ANEW[kind](folder))
    run(lambda: ANEW[kind](folder), Model(epochs, goes_on=False), steps, arguments)


@pytest.mark.parametrize("kind", GOES_ON)
@settings(max_examples=examples(12))
@given(steps=STEPS, arguments=ARGUMENTS)
def test_iterators_with_a_state(
    kind: str, folder: Path, steps: list[tuple[str, int, int]], arguments: dict[str, Any]
) -> None:
    source = GOES_ON[kind](folder)
    items = list(range(150)) if isinstance(source, CountingAsync) else itertools.islice(source, 200)
    run(lambda: GOES_ON[kind](folder), Model([list(items)], goes_on=True), steps, arguments)


@pytest.mark.parametrize("kind", ONCE)
@settings(max_examples=examples(12))
@given(steps=STEPS, arguments=ARGUMENTS)
def test_what_can_be_read_once(
    kind: str, folder: Path, steps: list[tuple[str, int, int]], arguments: dict[str, Any]
) -> None:
    source = ONCE[kind](folder)
    items = list(range(N)) if isinstance(source, AsyncIterator) else list(source)
    model = Model([items] * 9, goes_on=False)
    run(lambda: ONCE[kind](folder), model, steps, arguments, is_once=True)
