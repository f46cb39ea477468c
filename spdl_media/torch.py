"""PyTorch's DataLoader with threads of this library in place of processes.

It derives from torch's own class, which checks the arguments, makes the samplers and knows the length. The
iterator is made here, and derives from torch's private base of iterators, because that draws from the
generator as all of torch's iterators do, and what is drawn there decides the order.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

from spdl_media._checks import check_int
from spdl_media._optional import require
from spdl_media.pipeline.pipeline import STOP_SECONDS, deferred_interrupt

__all__ = ("DataLoader", "WorkerInfo", "get_pytorch_dataloader", "get_worker_info")

_torch: Any = require("torch", "spdl_media.torch")
_data: Any = _torch.utils.data
_TorchLoader: Any = _data.DataLoader
_TorchIterator: Any = _data.dataloader._BaseDataLoaderIter


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker thread knows of itself, see :func:`get_worker_info`.

    Attributes:
        id: Number of the thread, from 0.
        num_workers: How many threads read the dataset; 1 if it is iterable.
        seed: Differs from thread to thread. Nothing is seeded with it, because threads share random state.
        dataset: The dataset itself, not a copy.
    """

    id: int
    num_workers: int
    seed: int
    dataset: Any


_thread = threading.local()


def get_worker_info() -> WorkerInfo | None:
    """Return what the current worker thread of a :class:`DataLoader` knows of itself; elsewhere ``None``.

    ``torch.utils.data.get_worker_info()`` keeps one answer a process, and is ``None`` in these threads.
    """
    return getattr(_thread, "info", None)


class DataLoader(_TorchLoader):  # type: ignore[misc]  # torch is optional, so its classes are Any here
    """``torch.utils.data.DataLoader`` with threads instead of processes.

    It takes torch's arguments, refuses what torch refuses, and gives the same batches in the same order for
    the same seed, if the dataset draws nothing from global random state. Some arguments mean something else:

    Args:
        num_workers: Threads. Each makes one batch at a time. An iterable dataset is read by one of them, so
            each item comes once. 0: the caller's thread, by torch's own iterator.
        worker_init_fn: Called with its number in each thread, before its first batch. Threads share the
            dataset and all global state.
        persistent_workers: The threads stay for the next iteration, with what they keep in a
            ``threading.local``.
        multiprocessing_context: Checked as in torch, without effect, because there are no processes.
        prefetch_factor: Batches made ahead for each thread, at least 1 (default 2).
        pin_memory: The threads pin the batches that they make.
        in_order: ``False``: batches come as they are ready.

    Raises:
        TypeError: As in torch; or, by ``iter``, a DataPipe with ``num_workers`` above 0.
        ValueError: As in torch; or, by ``iter``, a ``prefetch_factor`` of 0.

    Iteration raises the very exception of the dataset, ``collate_fn`` or ``worker_init_fn`` when its batch
    is due; another ``next()`` gives the batch after it. It raises ``RuntimeError`` if a batch takes longer
    than ``timeout``.

    Thread safety: the dataset must bear to be read by several threads at a time. An iterator serves one
    thread; a loader may be iterated several times at once, unless ``persistent_workers`` is set.

    Example:
        >>> loader = DataLoader(range(10), batch_size=4, num_workers=2)
        >>> [batch.tolist() for batch in loader]
        [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    """

    def _get_iterator(self) -> Iterator[Any]:
        if self.num_workers == 0:
            return super()._get_iterator()  # type: ignore[no-any-return]
        check_int("prefetch_factor", self.prefetch_factor)
        if isinstance(self.dataset, _data.IterDataPipe | _data.MapDataPipe):
            raise TypeError(
                "dataset is a DataPipe, which spdl_media.torch.DataLoader reads with num_workers=0 alone, "
                f"not {self.num_workers}; torch.utils.data.DataLoader reads it in processes"
            )
        return _ThreadedIterator(self)

    def check_worker_number_rationality(self) -> None:
        """Do nothing: torch warns of more processes than cores, and threads may wait for files."""


#: SPDL's name of it. The defaults are torch's, with ``num_workers=0``.
get_pytorch_dataloader = DataLoader


class _ThreadedIterator(_TorchIterator):  # type: ignore[misc]  # as above
    """Submits indices, which torch draws in the consumer's thread, to threads that make batches of them."""

    # Nothing is to be closed if __init__ fails.
    _threads: tuple[threading.Thread, ...] = ()

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self._is_iterable = isinstance(self._dataset, _data.IterableDataset)
        num_threads = 1 if self._is_iterable else self._num_workers
        self._num_ahead = loader.prefetch_factor * self._num_workers
        self._in_order = loader.in_order
        self._due: list[Future[Any]] = []
        self._reading: _Reading | None = None
        self._pin = _pinning(self._pin_memory_device) if self._pin_memory else None
        self._tasks: SimpleQueue[Any] = SimpleQueue()
        # Not a ThreadPoolExecutor, at whose exit a program would wait for all that was begun ahead.
        for number in range(num_threads):
            info = WorkerInfo(number, num_threads, self._base_seed + number, self._dataset)
            thread = threading.Thread(target=_work, args=(self._tasks, info), daemon=True)
            thread.start()
            self._threads += (thread,)
        _iterators.add(self)
        # Begins the sampler a second time, as torch's iterator with workers does: it may draw random numbers.
        self._reset(loader, first_iter=True)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:  # noqa: FBT001, FBT002  # torch's signature
        super()._reset(loader, first_iter)
        self._abandon()
        make_fetcher = partial(
            _data.dataloader._DatasetKind.create_fetcher,
            *(self._dataset_kind, self._dataset, self._auto_collation),
            *(self._collate_fn, self._drop_last),
        )
        # A dataset that fetches all samples at once is given the indices as they are.
        fetches_all = getattr(self._dataset, "__getitems__", None)
        may_stop_early = self._auto_collation and not fetches_all
        self._reading = _Reading(make_fetcher, loader.worker_init_fn, self._pin, may_stop_early)
        for _ in range(self._num_ahead):
            self._add_task()

    def _add_task(self) -> None:
        # At the end of the sampler no task is added.
        with suppress(StopIteration):
            task = self._reading, self._next_index(), Future[Any]()
            self._due.append(task[-1])
            self._tasks.put(task)

    def _next_data(self) -> Any:
        if not self._due:
            self._end()
        batch = self._take()
        # Before the result is looked at: an error costs its own batch alone.
        self._add_task()
        try:
            return batch.result()
        except StopIteration:
            # Of a map-style dataset it is an error of its own.
            if not self._is_iterable:
                raise
            self._end()
        finally:
            # The traceback of an error has this frame, which would hold the error.
            del batch

    def _take(self) -> Future[Any]:
        awaited = self._due[:1] if self._in_order else self._due
        if not wait(awaited, self._timeout or None, FIRST_COMPLETED).done:
            raise RuntimeError(f"DataLoader timed out after {self._timeout} seconds")
        batch = next(one for one in self._due if one.done())
        self._due.remove(batch)
        return batch

    def _end(self) -> None:
        if self._persistent_workers:
            self._abandon()
        else:
            self._close()
        raise StopIteration

    def _abandon(self) -> list[Future[Any]]:
        """End the reading; return the batches that are still being made."""
        if self._reading is not None:
            self._reading.is_over = True
        running = [batch for batch in self._due if not batch.cancel()]
        self._due.clear()
        return running

    def _close(self) -> None:
        threads, self._threads = self._threads, ()
        # Each thread ends at the first None that it gets.
        for _ in threads:
            self._tasks.put(None)
        if threads and not wait(self._abandon(), STOP_SECONDS).not_done:
            for thread in threads:
                thread.join()

    def __del__(self) -> None:
        with deferred_interrupt():
            self._close()


_iterators: weakref.WeakSet[_ThreadedIterator] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # Daemon threads that run on while the interpreter ends may crash it.
    for iterator in list(_iterators):
        iterator._close()


def _work(tasks: SimpleQueue[Any], info: WorkerInfo) -> None:
    _thread.info = info
    for reading, index, batch in iter(tasks.get, None):
        if batch.set_running_or_notify_cancel():
            try:
                batch.set_result(reading(index))
            except BaseException as error:  # noqa: BLE001  # the consumer raises it, even a SystemExit
                batch.set_exception(error)
        # Else held until the next one comes.
        del reading, index, batch


@dataclass(eq=False)
class _Reading:
    """One iteration over a dataset, in all threads. It knows no iterator, so that one can be dropped."""

    make_fetcher: Callable[[], Any]
    init_fn: Callable[[int], object] | None
    pin: Callable[[Any], Any] | None
    may_stop_early: bool
    is_over: bool = False
    fetcher: Any = None

    def __call__(self, index: Any) -> Any:
        """Return a batch, or one sample if there are no batches, as torch's fetcher makes it.

        Raises:
            StopIteration: An iterable dataset has ended.
        """
        try:
            # Threads that stay are prepared once, as torch's persistent workers are.
            if self.init_fn is not None and not hasattr(_thread, "is_ready"):
                self.init_fn(_thread.info.id)
            _thread.is_ready = True
            # An iterable dataset is begun in the thread that reads it.
            self.fetcher = fetcher = self.fetcher or self.make_fetcher()
            batch = fetcher.fetch(_Indices(index, self) if self.may_stop_early else index)
            return batch if self.pin is None else self.pin(batch)
        except BaseException as error:
            if not isinstance(error, StopIteration):
                name = threading.current_thread().name
                error.add_note(f"Raised in {name}, a worker thread of a DataLoader")
            raise


class _Indices(list[Any]):
    """Indices of a batch, which end in an error when nobody waits for it any more."""

    def __init__(self, indices: Iterable[Any], reading: _Reading) -> None:
        super().__init__(indices)
        self._reading = reading

    def __iter__(self) -> Iterator[Any]:
        for index in super().__iter__():
            if self._reading.is_over:
                raise RuntimeError("the iteration was broken off")
            yield index


def _pinning(device: str) -> Callable[[Any], Any]:
    """A function that pins a batch, in a thread which has another current device than the consumer's."""
    # Asked in the consumer's thread, where it has been set.
    index = _torch.accelerator.current_device_index()

    def pin(batch: Any) -> Any:
        _torch.accelerator.set_device_index(index)
        return _data._utils.pin_memory.pin_memory(batch, device)

    return pin
