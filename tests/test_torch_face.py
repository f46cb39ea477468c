"""``spdl_media.torch``: torch's own DataLoader is the oracle."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import queue
import subprocess
import sys
import textwrap
import threading
import weakref
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from effort import LONG, each

import spdl_media as sm
from spdl_media.testing import make_image

torch = pytest.importorskip("torch")

from torch.utils import data as torch_data  # noqa: E402

from spdl_media.torch import DataLoader, WorkerInfo, get_pytorch_dataloader, get_worker_info  # noqa: E402

NUM_SAMPLES = 23
WEIGHTS = [1.0 + number % 5 for number in range(NUM_SAMPLES)]


def plain(value: Any) -> Any:
    """Convert arrays and tensors to lists with their type, so that nested batches can be compared."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value).__name__, [plain(one) for one in value]
    return type(value).__name__, value


def batches(loader: Any, num_epochs: int = 3) -> list[Any]:
    """Return the batches of some epochs; the consumer draws random numbers in between."""
    epochs = []
    for epoch in range(num_epochs):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        epochs.append([(plain(batch), torch.rand(1).item()) for batch in loader])
    return epochs


class Squares(torch_data.Dataset[Any]):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        return index * index


class Stream(torch_data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from range(NUM_SAMPLES)


class SizedStream(Stream):
    def __len__(self) -> int:
        return NUM_SAMPLES


class EagerSampler(torch_data.Sampler[int]):
    """Draws all indices from torch's global generator when iteration begins."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(NUM_SAMPLES).tolist())

    def __len__(self) -> int:
        return NUM_SAMPLES


class OneByOneSampler(torch_data.Sampler[int]):
    """Draws each index only when it is taken."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(NUM_SAMPLES):
            yield int(torch.randint(NUM_SAMPLES, ()).item())


def generator() -> Any:
    return torch.Generator().manual_seed(11)


def in_batches(sampler: Any) -> Any:
    return torch_data.BatchSampler(sampler, 4, drop_last=True)


ORDERS: dict[str, Callable[[], dict[str, Any]]] = {
    "in order": lambda: {"batch_size": 5},
    "one by one": dict,
    "shuffled": lambda: {"batch_size": 5, "shuffle": True},
    "drop_last": lambda: {"batch_size": 5, "shuffle": True, "drop_last": True},
    "generator": lambda: {"batch_size": 5, "shuffle": True, "generator": generator()},
    "no batches": lambda: {"batch_size": None, "shuffle": True},
    "replacement": lambda: {
        "batch_size": 7,
        "sampler": torch_data.RandomSampler(range(NUM_SAMPLES), True, 70, generator()),
    },
    "weighted": lambda: {"batch_size": 7, "sampler": torch_data.WeightedRandomSampler(WEIGHTS, 40)},
    "subset": lambda: {
        "batch_size": 2,
        "sampler": torch_data.SubsetRandomSampler([3, 5, 8, 13, 21]),
    },
    "list": lambda: {"batch_size": 2, "sampler": [4, 2, 2, 0, 9]},
    "batch_sampler": lambda: {
        "batch_sampler": in_batches(torch_data.RandomSampler(range(NUM_SAMPLES)))
    },
    "batches of a list": lambda: {"batch_sampler": [[1, 2], [3], [4, 5, 6]]},
    "rank": lambda: {
        "batch_size": 3,
        "sampler": torch_data.DistributedSampler(range(NUM_SAMPLES), num_replicas=2, rank=1),
    },
    "collate_fn": lambda: {"batch_size": 4, "collate_fn": sum},
    "eager sampler": lambda: {"batch_size": 4, "sampler": EagerSampler()},
    "sampler that draws late": lambda: {"batch_size": 4, "sampler": OneByOneSampler()},
}


# Their order is that of the caller's thread; with workers, they run only with --long.
QUICK = {"rank", "eager sampler", "batches of a list"}


@each("order", ORDERS)
def test_batches_are_those_of_torch_in_the_callers_thread(order: str) -> None:
    results = []
    for loader_type in (torch_data.DataLoader, DataLoader):
        torch.manual_seed(5)
        results.append(batches(loader_type(Squares(), **ORDERS[order]())))
    assert results[0] == results[1]


@each(
    "order, is_persistent",
    [(order, order == "shuffled") for order in ORDERS if LONG or order not in QUICK]
    + [("shuffled", False)],
)
def test_batches_are_those_of_torch_with_workers(order: str, is_persistent: bool) -> None:
    """Also if sampler and consumer alternately draw from one random generator."""
    results = []
    for loader_type in (torch_data.DataLoader, DataLoader):
        torch.manual_seed(5)
        # Each worker of torch is a process. How far torch draws ahead depends on their number.
        is_one_enough = loader_type is torch_data.DataLoader and order != "sampler that draws late"
        loader = loader_type(
            Squares(),
            num_workers=1 if is_one_enough else 2,
            persistent_workers=is_persistent,
            **ORDERS[order](),
        )
        results.append(batches(loader, 2))
    assert results[0] == results[1]


Pair = namedtuple("Pair", "left right")  # noqa: PYI024  # what users of torch collate
SAMPLES: list[Any] = [
    3,
    2.5,
    "text",
    b"bytes",
    (1, 2.0, "three"),
    [1, [2, 3]],
    Pair(1, torch.tensor([2, 3])),
    {"image": np.ones((2, 2), np.float32), "label": 1, "names": {"file": "a.png"}},
    np.int16(4),
    torch.tensor([True, False]),
]


@each("sample, batch_size", [(sample, size) for sample in SAMPLES for size in (2, None)])
def test_samples_collate_and_convert_as_in_torch(sample: Any, batch_size: int | None) -> None:
    dataset = [sample] * 3
    expected = [plain(one) for one in torch_data.DataLoader(dataset, batch_size)]
    assert [plain(one) for one in DataLoader(dataset, batch_size, num_workers=2)] == expected


def test_datasets_that_fetch_a_batch_at_once_are_asked_for_batches() -> None:
    asked = queue.SimpleQueue[Any]()

    class Fetching(Squares):
        def __getitems__(self, indices: list[int]) -> list[int]:
            asked.put(indices)
            return [-index for index in indices]

    loader = DataLoader(Fetching(), 10, num_workers=2)
    assert [batch.tolist()[-1] for batch in loader] == [-9, -19, -22]
    assert sorted(asked.get() for _ in range(3)) == [
        list(range(10)),
        list(range(10, 20)),
        [20, 21, 22],
    ]
    # A subset calls the method of its dataset.
    subset = torch_data.Subset(Fetching(), [7, 5])
    assert next(iter(DataLoader(subset, 2, num_workers=1))).tolist() == [-7, -5]


@each(
    "options",
    [
        {"batch_size": 5},
        {"batch_size": 5, "drop_last": True},
        {"batch_size": 23},
        {"batch_size": 50, "drop_last": True},
        {"batch_size": None},
        {"batch_size": 5, "persistent_workers": True},
        {"batch_size": 5, "in_order": False},
    ],
)
def test_iterable_datasets_give_each_item_once(options: dict[str, Any]) -> None:
    """With any number of threads; torch's workers would repeat each item once per worker."""
    alone = {key: one for key, one in options.items() if key != "persistent_workers"}
    expected = torch_data.DataLoader(SizedStream(), **alone)
    loader = DataLoader(SizedStream(), num_workers=4, **options)
    assert len(loader) == len(expected)
    for epoch in batches(loader, 2):
        assert [batch for batch, _ in epoch] == [plain(batch) for batch in expected]


def test_an_iterable_dataset_is_read_in_one_thread_that_knows_it_is_alone() -> None:
    class Knowing(Stream):
        def __iter__(self) -> Iterator[Any]:
            for _ in range(4):
                info = get_worker_info()
                assert info is not None
                yield info.id, info.num_workers, info.dataset is self, threading.get_ident()

    items = list(map(tuple, DataLoader(Knowing(), None, num_workers=3)))
    assert {item[:3] for item in items} == {(0, 1, True)}
    assert {thread for *_, thread in items}.isdisjoint({threading.get_ident()})
    assert len({thread for *_, thread in items}) == 1


def test_an_iterator_that_has_ended_is_not_asked_again() -> None:
    class Endless:
        """An invalid iterator, which continues after its end."""

        numbers = iter([1, 2, 3, None, 4, 5, 6, 7, 8])

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> int:
            number = next(self.numbers)
            if number is None:
                raise StopIteration
            return number

    class Restless(torch_data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(Endless())

    assert [batch.tolist() for batch in DataLoader(Restless(), 2, num_workers=1)] == [[1, 2], [3]]


def test_more_items_than_the_length_says_are_a_warning_as_in_torch() -> None:
    class Modest(Stream):
        def __len__(self) -> int:
            return 2

    for loader in (
        torch_data.DataLoader(Modest(), None),
        DataLoader(Modest(), None, num_workers=1),
    ):
        assert len(loader) == 2
        with pytest.warns(UserWarning, match="was reported to be 2.*samples have been fetched"):
            assert len(list(loader)) == NUM_SAMPLES


@each(
    "options",
    [
        {"num_workers": -1},
        {"timeout": -1},
        {"prefetch_factor": 2},
        {"num_workers": 1, "prefetch_factor": -1},
        {"persistent_workers": True},
        {"sampler": [1], "shuffle": True},
        {"batch_sampler": [[1]], "batch_size": 2},
        {"batch_sampler": [[1]], "shuffle": True},
        {"batch_sampler": [[1]], "sampler": [1]},
        {"batch_sampler": [[1]], "drop_last": True},
        {"batch_size": None, "drop_last": True},
        {"batch_size": 0},
        {"batch_size": 2.5},
        {"multiprocessing_context": "fork"},
        {"multiprocessing_context": "thread", "num_workers": 1},
        {"multiprocessing_context": 3, "num_workers": 1},
        {"workers": 3},
        {"dataset": Stream(), "shuffle": True},
        {"dataset": Stream(), "sampler": [1]},
        {"dataset": Stream(), "batch_sampler": [[1]]},
    ],
)
def test_what_torch_refuses_is_refused_in_its_words(options: dict[str, Any]) -> None:
    arguments = {"dataset": [1, 2, 3], **options}
    with pytest.raises((TypeError, ValueError)) as expected:
        torch_data.DataLoader(**arguments)
    with pytest.raises((TypeError, ValueError)) as given:
        DataLoader(**arguments)
    assert type(given.value) is type(expected.value)
    assert str(given.value) == str(expected.value)


def test_it_is_a_dataloader_of_torch() -> None:
    loader = DataLoader(Squares(), 5, num_workers=99, multiprocessing_context="spawn")
    assert isinstance(loader, torch_data.DataLoader)
    assert isinstance(loader.sampler, torch_data.SequentialSampler)
    assert loader.batch_sampler.batch_size == 5
    with pytest.raises(ValueError, match="batch_size attribute should not be set after DataLoader"):
        loader.batch_size = 3
    with pytest.raises(TypeError, match=r"'Stream' has no len\(\)"):
        len(DataLoader(Stream()))
    assert get_pytorch_dataloader is DataLoader
    copied = pickle.loads(pickle.dumps(loader))
    assert [batch.tolist() for batch in copied] == [batch.tolist() for batch in loader]
    with pytest.raises(ValueError, match="prefetch_factor must be at least 1, not 0"):
        iter(DataLoader(Squares(), num_workers=1, prefetch_factor=0))
    with pytest.raises(
        TypeError, match=r"dataset, of type set, has no __getitem__\. Pass the samples of"
    ):
        iter(DataLoader({1, 2}))
    pipe = torch_data.datapipes.iter.IterableWrapper([1, 2])
    assert [batch.tolist() for batch in DataLoader(pipe, 2)] == [[1, 2]]
    with pytest.raises(TypeError, match=r"DataPipe.*num_workers=0 alone, not 3"):
        iter(DataLoader(pipe, num_workers=3))


class Damage(Exception):  # noqa: N818  # a user's error
    def __init__(self, index: int, reason: str) -> None:
        super().__init__(f"{index}: {reason}")
        self.index = index


class Damaged(Squares):
    def __getitem__(self, index: int) -> Any:
        if index % 10 == 7:
            raise Damage(index, "damaged")
        return index


def test_an_error_is_raised_when_its_batch_is_due_and_the_next_batch_follows() -> None:
    items = iter(DataLoader(Damaged(), 4, num_workers=3))
    assert next(items).tolist() == [0, 1, 2, 3]
    with pytest.raises(Damage, match="7: damaged") as caught:
        next(items)
    # The exception itself, with the lines that raised it.
    assert caught.value.index == 7
    assert caught.traceback[-1].name == "__getitem__"
    assert next(items).tolist() == [8, 9, 10, 11]
    assert next(items).tolist() == [12, 13, 14, 15]
    with pytest.raises(Damage, match="17: damaged"):
        next(items)
    assert next(items).tolist() == [20, 21, 22]
    assert list(items) == []
    with pytest.raises(ZeroDivisionError):
        list(DataLoader(Squares(), collate_fn=lambda _: 1 // 0, num_workers=1))


@dataclass(frozen=True)
class FrozenError(Exception):
    code: int


@pytest.mark.parametrize("kind", [SystemExit, FrozenError])
def test_an_unusual_exception_ends_the_program_and_not_a_thread_alone(
    kind: type[BaseException],
) -> None:
    class Failing(Squares):
        def __getitem__(self, index: int) -> Any:
            raise kind(3)

    with pytest.raises(kind, match="3"):
        next(iter(DataLoader(Failing(), num_workers=1, timeout=10)))


LEFT_OVER = """
    import threading
    from spdl_media.torch import DataLoader

    class Stuck:
        def __len__(self):
            return 9

        def __getitem__(self, index):
            if index > 2:
                threading.Event().wait()
            return index

    batches = iter(DataLoader(Stuck(), 3, num_workers=2))
    print(next(batches).tolist())
"""


@pytest.mark.long  # a process that imports torch
def test_a_program_ends_though_a_batch_is_still_being_made() -> None:
    command = [sys.executable, "-c", textwrap.dedent(LEFT_OVER)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0, 1, 2]\n", "")


def test_an_iterable_dataset_that_fails_has_ended() -> None:
    class Failing(Stream):
        def __iter__(self) -> Iterator[Any]:
            yield from range(5)
            raise Damage(5, "no more")

    for loader in (torch_data.DataLoader(Failing(), 2), DataLoader(Failing(), 2, num_workers=2)):
        items = iter(loader)
        assert [next(items).tolist(), next(items).tolist()] == [[0, 1], [2, 3]]
        with pytest.raises(Damage, match="5: no more"):
            next(items)
        assert list(items) == []


def test_a_batch_that_takes_too_long_is_an_error_of_torchs_kind() -> None:
    may_go_on = threading.Event()

    class Slow(Squares):
        def __getitem__(self, index: int) -> Any:
            assert may_go_on.wait(60)
            return index

    items = iter(DataLoader(Slow(), 4, num_workers=1, timeout=0.01))
    with pytest.raises(RuntimeError, match=r"DataLoader timed out after 0\.01 seconds"):
        next(items)
    may_go_on.set()
    # The batch is still being made, and is returned by a later call.
    for _ in range(1000):
        try:
            assert next(items).tolist() == [0, 1, 2, 3]
            break
        except RuntimeError:
            continue


class Meeting(Squares):
    """A dataset whose threads wait for each other, so that each makes a batch."""

    def __init__(self, num_threads: int) -> None:
        self.barrier = threading.Barrier(num_threads)

    def __getitem__(self, index: int) -> tuple[WorkerInfo | None, int]:
        self.barrier.wait(60)
        return get_worker_info(), threading.get_ident()

    def __len__(self) -> int:
        return 6


@pytest.mark.parametrize("is_persistent", [False, True])
def test_each_thread_gets_its_number_once(is_persistent: bool) -> None:
    called: list[tuple[int, int, int]] = []

    def init(number: int) -> None:
        info = get_worker_info()
        assert info is not None
        assert info.id == number
        called.append((number, info.num_workers, threading.get_ident()))

    dataset = Meeting(3)
    loader = DataLoader(
        dataset,
        None,
        num_workers=3,
        worker_init_fn=init,
        persistent_workers=is_persistent,
        collate_fn=lambda sample: sample,
    )
    epochs = [list(loader) for _ in range(2)]
    num_sets = 1 if is_persistent else 2
    assert sorted(call[:2] for call in called) == sorted([(0, 3), (1, 3), (2, 3)] * num_sets)
    for epoch in epochs:
        infos = {info for info, _ in epoch}
        assert {(info.id, info.num_workers) for info in infos} == {(0, 3), (1, 3), (2, 3)}
        assert len({info.seed - info.id for info in infos}) == 1
        assert all(info.dataset is dataset for info in infos)
    assert {thread for *_, thread in called} == {thread for epoch in epochs for _, thread in epoch}
    assert get_worker_info() is None
    with pytest.raises(KeyError, match="'0'"):
        next(iter(DataLoader(Squares(), num_workers=1, worker_init_fn=lambda n: {}[str(n)])))


def test_an_iteration_that_is_broken_off_stops_reading_and_another_begins_again() -> None:
    dataset = Squares()
    loader = DataLoader(dataset, 3, num_workers=2)
    before = set(threading.enumerate())
    for batch in loader:
        assert batch.tolist() == [0, 1, 4]
        break
    assert set(threading.enumerate()) <= before
    assert len(list(loader)) == len(loader) == 8
    iterator = weakref.ref(items := iter(loader))
    del items
    gc.collect()
    assert iterator() is None
    assert set(threading.enumerate()) <= before


def test_several_iterations_at_once_do_not_disturb_each_other() -> None:
    loader = DataLoader(Squares(), 5, num_workers=2)
    pairs = list(zip(loader, loader, strict=True))
    assert len(pairs) == 5
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("is_persistent", [False, True])
def test_a_forked_process_is_told_that_it_has_no_threads(is_persistent: bool) -> None:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    loader = DataLoader(Squares(), 5, num_workers=2, persistent_workers=is_persistent)
    items = iter(loader)
    assert next(items).tolist() == [0, 1, 4, 9, 16]

    def child() -> None:
        try:
            next(iter(loader) if is_persistent else items)
        except RuntimeError as error:
            sender.send(str(error))
        # A loader of the child's own gives batches.
        sender.send(len(list(DataLoader(Squares(), 5, num_workers=2))))

    process = context.Process(target=child)
    process.start()
    try:
        assert receiver.poll(60)
        assert f"threads in process {os.getpid()}, from which this process" in receiver.recv()
        assert receiver.poll(60)
        assert receiver.recv() == 5
    finally:
        process.kill()
        process.join()
    assert len(list(items)) == 4


def test_threads_that_cannot_start_end_those_that_did(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail)
    unraisable: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        iter(DataLoader(Squares(), 5, num_workers=3))
    gc.collect()
    assert unraisable == []
    assert not started[0].is_alive()


def test_threads_that_stay_give_nothing_of_an_iteration_that_was_broken_off() -> None:
    loader = DataLoader(Squares(), 2, num_workers=3, persistent_workers=True, prefetch_factor=3)
    items = iter(loader)
    assert next(items).tolist() == [0, 1]
    # The iterator is the same object, started again, as in torch.
    again = iter(loader)
    assert again is items
    assert [batch.tolist()[0] for batch in again] == [n * n for n in range(0, NUM_SAMPLES, 2)]
    assert list(again) == []
    assert len(list(loader)) == 12
    stream = DataLoader(Stream(), 2, num_workers=3, persistent_workers=True)
    next(iter(stream))
    assert [len(list(stream)) for _ in range(2)] == [12, 12]


def test_batches_come_as_they_are_ready_where_order_does_not_matter() -> None:
    second_is_made = threading.Event()

    class FirstIsSlow(Squares):
        def __getitem__(self, index: int) -> int:
            assert index or second_is_made.wait(60)
            return index

    items = iter(DataLoader(FirstIsSlow(), 1, num_workers=2, in_order=False))
    assert next(items).item() == 1
    second_is_made.set()
    assert sorted(batch.item() for batch in items) == [0, *range(2, NUM_SAMPLES)]


def test_indices_are_drawn_ahead_in_the_consumers_thread() -> None:
    drawn: list[int] = []

    class Watched(torch_data.Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            for index in range(NUM_SAMPLES):
                drawn.append(threading.get_ident())
                yield index

    items = iter(DataLoader(Squares(), sampler=Watched(), num_workers=2, prefetch_factor=3))
    assert len(drawn) == 6
    next(items)
    assert len(drawn) == 7
    assert set(drawn) == {threading.get_ident()}


def test_pinning_without_an_accelerator_is_a_warning_as_in_torch() -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    for loader_type in (torch_data.DataLoader, DataLoader):
        loader = loader_type(Squares(), 5, pin_memory=True, num_workers=2)
        with pytest.warns(UserWarning, match="no accelerator is found"):
            assert not next(iter(loader)).is_pinned()


def test_the_threads_pin_for_the_consumers_device(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = threading.local()

    def pin(batch: Any, device: str) -> Any:
        return batch, device, chosen.index, threading.current_thread() is threading.main_thread()

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    monkeypatch.setattr(
        torch.accelerator, "set_device_index", lambda index: setattr(chosen, "index", index)
    )
    monkeypatch.setattr(torch_data._utils.pin_memory, "pin_memory", pin)
    batch, *how = next(iter(DataLoader(Squares(), 3, pin_memory=True, num_workers=2)))
    assert (batch.tolist(), how) == ([0, 1, 4], ["cuda", 3, False])


def test_pictures_decode_in_the_threads_and_damage_names_the_file(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    paths = [tmp_path / f"{number}.png" for number in range(6)]
    pictures = rng.integers(0, 256, (6, 8, 8, 3), np.uint8)
    for path, picture in zip(paths, pictures, strict=True):
        path.write_bytes(make_image(picture, codec="png"))

    class Pictures(torch_data.Dataset[Any]):
        def __len__(self) -> int:
            return len(paths)

        def __getitem__(self, index: int) -> Any:
            return sm.to_torch(sm.load_image(paths[index])), index

    loader = DataLoader(Pictures(), 4, shuffle=True, num_workers=2)
    for images, labels in loader:
        assert np.array_equal(images, pictures[labels])
    paths[3].write_bytes(b"no picture")
    with pytest.raises(sm.MediaError, match=r"3\.png"):
        list(loader)
