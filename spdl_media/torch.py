"""PyTorch's DataLoader with threads instead of processes.

The loader derives from torch's class, which checks the arguments, creates the samplers and knows the length.
The iterator derives from torch's private base class of iterators, because that draws from the generator as
all of torch's iterators do, which determines the order.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from queue import SimpleQueue
from typing import Any

from spdl_media._checks import check_int
from spdl_media._optional import require
from spdl_media._threads import when_dropped
from spdl_media.pipeline.pipeline import STOP_SECONDS

__all__ = ("DataLoader", "WorkerInfo", "get_pytorch_dataloader", "get_worker_info")

_torch: Any = require("torch", "spdl_media.torch")
_data: Any = _torch.utils.data
_TorchLoader: Any = _data.DataLoader
_TorchIterator: Any = _data.dataloader._BaseDataLoaderIter


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Information on a worker thread, see :func:`get_worker_info`.

    Attributes:
        id: Number of the thread, from 0.
        num_workers: Number of threads that read the dataset; 1 if it is iterable.
        seed: Differs between threads. Nothing is seeded with it, because threads share random state.
        dataset: The dataset itself, not a copy.
    """

    id: int
    num_workers: int
    seed: int
    dataset: Any


_thread = threading.local()


def get_worker_info() -> WorkerInfo | None:
    """Return information on the current worker thread of a :class:`DataLoader`; ``None`` in other threads.

    ``torch.utils.data.get_worker_info()`` has one value per process, and is ``None`` in these threads.
    """
    return getattr(_thread, "info", None)


class DataLoader(_TorchLoader):  # type: ignore[misc]  # torch is optional, so its classes are Any here
    """``torch.utils.data.DataLoader`` with threads instead of processes.

    It has torch's arguments and checks, and returns the same batches in the same order for the same seed, if
    the dataset does not use global random state. Some arguments have another meaning:

    Args:
        num_workers: Number of threads. Each makes one batch at a time. A single thread reads an iterable
            dataset, so that each item occurs once. 0: the caller's thread, with torch's own iterator.
        worker_init_fn: Called in each thread with its number, before its first batch. Threads share the
            dataset and all global state.
        persistent_workers: Keep the threads, and their ``threading.local`` data, for the next iteration.
        multiprocessing_context: Checked as in torch, without effect, because there are no processes.
        prefetch_factor: Batches prepared ahead per thread, at least 1 (default 2).
        pin_memory: Pin batches, in the threads that make them.
        in_order: ``False`` returns batches as soon as they are ready.

    Raises:
        TypeError: As in torch; or, on ``iter``, for a dataset without ``__getitem__``, or a DataPipe with
            ``num_workers`` above 0.
        ValueError: As in torch; or, on ``iter``, for a ``prefetch_factor`` of 0.

    Iteration raises the original exception of the dataset, ``collate_fn`` or ``worker_init_fn`` in place of
    its batch; the following ``next()`` returns the next batch. It raises ``RuntimeError`` if a batch takes
    longer than ``timeout``, and in a process that was forked after the threads started.

    Thread safety: several threads read the dataset at a time. An iterator serves one thread; a loader may
    have several iterators at once, unless ``persistent_workers`` is set.

    Example:
        >>> loader = DataLoader(range(10), batch_size=4, num_workers=2)
        >>> [batch.tolist() for batch in loader]
        [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    """

    def _get_iterator(self) -> Iterator[Any]:
        readable = hasattr(self.dataset, "__getitem__") or hasattr(self.dataset, "__getitems__")
        if not (readable or isinstance(self.dataset, _data.IterableDataset)):
            raise TypeError(
                f"dataset, of type {type(self.dataset).__name__}, has no __getitem__. Pass the samples of an "
                "ImageFolder, samplers as sampler=, and other sources to spdl_media.DataLoader"
            )
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
        """Do nothing: torch would warn of more workers than cores, but threads may wait for files."""


#: SPDL's name of :class:`DataLoader`. The defaults are torch's, with ``num_workers=0``.
get_pytorch_dataloader = DataLoader


class _ThreadedIterator(_TorchIterator):  # type: ignore[misc]  # as above
    """Submits indices, which torch draws in the consumer's thread, to threads that make batches."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self._pid = os.getpid()
        self._is_iterable = isinstance(self._dataset, _data.IterableDataset)
        num_threads = 1 if self._is_iterable else self._num_workers
        self._num_ahead = loader.prefetch_factor * self._num_workers
        self._in_order = loader.in_order
        self._pool = _Pool()
        self._at_drop = when_dropped(self._pool.close)
        self._pin = _pinning(self._pin_memory_device) if self._pin_memory else None
        # Not a ThreadPoolExecutor, which at exit would wait for all batches that were begun ahead.
        for number in range(num_threads):
            info = WorkerInfo(number, num_threads, self._base_seed + number, self._dataset)
            name = f"spdl_media torch-{number}"
            thread = threading.Thread(
                target=_work, args=(self._pool.tasks, info), name=name, daemon=True
            )
            thread.start()
            self._pool.threads.append(thread)
        # Daemon threads that still run when the interpreter ends may crash it.
        atexit.register(self._pool.close)
        # Begins the sampler a second time, as torch's iterator with workers does: it may draw random numbers.
        self._reset(loader, first_iter=True)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:  # noqa: FBT001, FBT002  # torch's signature
        super()._reset(loader, first_iter)
        self._pool.abandon()
        make_fetcher = partial(
            _data.dataloader._DatasetKind.create_fetcher,
            *(self._dataset_kind, self._dataset, self._auto_collation),
            *(self._collate_fn, self._drop_last),
        )
        # Cached, so that an iterable dataset is begun once, in the thread that reads it.
        self._read = partial(_read, cache(make_fetcher), loader.worker_init_fn, self._pin)
        for _ in range(self._num_ahead):
            self._add_task()

    def _add_task(self) -> None:
        # StopIteration is the end of the sampler: there are no more tasks.
        with suppress(StopIteration):
            task = self._read, self._next_index(), Future[Any]()
            self._pool.due.append(task[-1])
            self._pool.tasks.put(task)

    def _next_data(self) -> Any:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"this iterator has its threads in process {self._pid}, from which this process was forked; "
                "threads are not forked. Make a DataLoader in each process"
            )
        if not self._pool.due:
            self._end()
        batch = self._take()
        # Before reading the result, so that an error does not reduce the number of batches ahead.
        self._add_task()
        try:
            return batch.result()
        except StopIteration:
            # Only for an iterable dataset, this is the end; otherwise it is an error of the dataset.
            if not self._is_iterable:
                raise
            self._end()
        finally:
            # Breaks a reference cycle: the traceback of the error refers to this frame.
            del batch

    def _take(self) -> Future[Any]:
        due = self._pool.due
        awaited = due[:1] if self._in_order else due
        if not wait(awaited, self._timeout or None, FIRST_COMPLETED).done:
            raise RuntimeError(f"DataLoader timed out after {self._timeout} seconds")
        batch = next(one for one in due if one.done())
        due.remove(batch)
        return batch

    def _end(self) -> None:
        if self._persistent_workers:
            self._pool.abandon()
        else:
            self._pool.close()
        raise StopIteration


@dataclass(eq=False)
class _Pool:
    """Threads of an iterator, and the batches that it submitted. It has no reference to the iterator."""

    threads: list[threading.Thread] = field(default_factory=list)
    tasks: SimpleQueue[Any] = field(default_factory=SimpleQueue)
    due: list[Future[Any]] = field(default_factory=list)

    def abandon(self) -> list[Future[Any]]:
        """Drop the batches that were not taken, and return those that are still being made."""
        running = [batch for batch in self.due if not batch.cancel()]
        self.due.clear()
        return running

    def close(self) -> None:
        """End the threads."""
        atexit.unregister(self.close)
        threads, self.threads = self.threads, []
        # Each thread ends at the first None that it gets.
        for _ in threads:
            self.tasks.put(None)
        if threads and not wait(self.abandon(), STOP_SECONDS).not_done:
            for thread in threads:
                thread.join()


def _work(tasks: SimpleQueue[Any], info: WorkerInfo) -> None:
    _thread.info = info
    for read, index, batch in iter(tasks.get, None):
        if batch.set_running_or_notify_cancel():
            try:
                batch.set_result(read(index))
            except BaseException as error:  # noqa: BLE001  # the consumer raises it, even a SystemExit
                batch.set_exception(error)
        # Otherwise the batch would be kept alive until the next task.
        del read, index, batch


def _read(
    fetcher: Callable[[], Any],
    init_fn: Callable[[int], object] | None,
    pin: Callable[[Any], Any] | None,
    index: Any,
) -> Any:
    """Return a batch, or one sample without batching, from torch's fetcher.

    Raises:
        StopIteration: An iterable dataset has ended.
    """
    # Persistent threads are initialised once, as torch's persistent workers are.
    if init_fn is not None and not hasattr(_thread, "is_ready"):
        init_fn(_thread.info.id)
    _thread.is_ready = True
    batch = fetcher().fetch(index)
    return batch if pin is None else pin(batch)


def _pinning(device: str) -> Callable[[Any], Any]:
    """Return a function that pins batches in another thread, on the consumer's current device."""
    # Read in the consumer's thread, because the current device is set per thread.
    index = _torch.accelerator.current_device_index()

    def pin(batch: Any) -> Any:
        _torch.accelerator.set_device_index(index)
        return _data._utils.pin_memory.pin_memory(batch, device)

    return pin
