"""Source and sink of a DataLoader: the source that its epochs read, and the iterators that return batches."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import os
import threading
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeAlias

from spdl_media._checks import warn_caller
from spdl_media._resume import Ledger, Positions, Snapshot, State
from spdl_media._threads import when_dropped
from spdl_media.arrays import to_jax, to_numpy, to_torch
from spdl_media.datasets import ImageFolder
from spdl_media.epochs import HasEpochs, Stateful, begin_by_position, iterator_in
from spdl_media.loader_items import Tagged, tags_of, value_of
from spdl_media.pipeline import Pipeline, PipelineFailure, PipelineStopped, SourceConfig
from spdl_media.pipeline.executors import name_of
from spdl_media.pipeline.stages import OwnSource, source_length
from spdl_media.samplers import DistributedDeterministicSampler, DistributedRandomSampler
from spdl_media.source import MapIterator

AnySource: TypeAlias = Iterable[Any] | AsyncIterable[Any]

# Items between copies of a source's state, which may be large. After a resume, the items since the last copy
# are read again and discarded.
_SNAPSHOT_INTERVAL = 16

# Seconds that a new iteration waits for a read that the previous one began.
_FORMER_READ_SECONDS = 30.0

# Sources whose items need no time to read, and therefore no thread. Exact types: subclasses may be slow.
_READY = (
    *(list, tuple, range),
    *(DistributedDeterministicSampler, DistributedRandomSampler, ImageFolder),
)

_END: Any = object()


CONVERTERS = {"torch": to_torch, "numpy": to_numpy, "jax": to_jax}


def checked_source(source: Any) -> AnySource:
    """Return the iterable of a source: the source itself, or a :class:`MapIterator` of a map-style dataset.

    Raises:
        TypeError: The source is neither iterable nor a map-style dataset.
    """
    is_path = isinstance(source, str | os.PathLike)
    if isinstance(source, Iterable | AsyncIterable) and not is_path:
        # SourceConfig refuses bytes, as in any pipeline.
        return SourceConfig(source).source
    # Map-style datasets of PyTorch have no __iter__.
    if is_path or not hasattr(type(source), "__getitem__"):
        hint = f". Call it: {name_of(source)}()" if callable(source) else ""
        if is_path:
            hint = ". For the files of a folder, use ImageFolder or source.LocalDirectory"
        raise TypeError(
            f"src must be an iterable, an async iterable or a map-style dataset, not {source!r}{hint}"
        )
    return MapIterator(source)


class SharedSource:
    """A source that successive runs (iterations) of a loader read.

    Attributes:
        source: The source.
        fetch: Returns the value for a key, if the source is a :class:`MapIterator`.
        is_async: Whether it is iterated by ``async for``, which takes precedence as in pipelines.
        is_stateful: Whether it can save and load the state of an iteration.
        is_rewindable: Whether it is a stateful iterator, which begins again only by loading a state.
        is_shared: Whether runs share a position: the source is an iterator or stateful. Then only the latest
            run may read, because an item that an earlier run takes would be missing in it.
    """

    def __init__(self, source: AnySource, epoch_left: int | None = 0) -> None:
        self.source: Any = source
        self.fetch: Callable[[Any], Any] | None = None
        # A subclass with its own __iter__ is iterated instead.
        if isinstance(source, MapIterator) and type(source).__iter__ is MapIterator.__iter__:
            self.fetch = source.mapping.__getitem__
        self.is_async = isinstance(source, AsyncIterable)
        self.is_stateful = isinstance(source, Stateful)
        self.is_rewindable = self.is_stateful and isinstance(source, Iterator | AsyncIterator)
        self.is_shared = self.is_stateful or iterator_in(source) is not None
        # Number of the run that may read a shared source.
        self._turn = 0
        # Held when an epoch begins, and during each read of a shared source. Reentrant, because the beginning
        # of an epoch may read.
        self._lock = threading.RLock()
        # Value of the source's `epoch` after the latest epoch began.
        self._epoch_left = epoch_left

    def __reduce__(self) -> tuple[Any, ...]:
        # The lock cannot be pickled.
        return SharedSource, (self.source, self._epoch_left)

    def chosen_by_user(self) -> int | None:
        """Return the epoch that the user set on the source since the latest epoch began, if any.

        Raises:
            Exception: The source's ``epoch`` raises.
        """
        epoch = getattr(self.source, "epoch", None)
        is_known = isinstance(self.source, HasEpochs) and isinstance(epoch, int)
        return epoch if is_known and epoch != self._epoch_left else None

    def length_in(self, epoch: int) -> int | None:
        """Set the epoch of the source, and return the number of its items, if the source knows it.

        Raises:
            Exception: The source refuses the epoch, or its ``__len__`` raises.
        """
        if isinstance(self.source, HasEpochs):
            self.source.set_epoch(epoch)
            self._epoch_left = getattr(self.source, "epoch", None)
        return source_length(self.source)

    def take_turn(self) -> None:
        """Stop earlier runs from reading a shared source, and wait for a read in progress.

        Raises:
            TimeoutError: The read in progress takes too long. The call can be repeated.
        """
        if not self.is_shared:
            return
        # Before waiting, so that a run that reads without pause does not take the lock again.
        self._turn += 1
        if not self._lock.acquire(timeout=_FORMER_READ_SECONDS):
            raise TimeoutError(
                f"the last iteration still reads the source, a {type(self.source).__name__}, after "
                f"{_FORMER_READ_SECONDS} s, and the next one would lose that item; iterate again later, or "
                "make the source and the loader again"
            )
        # Released at once: each read of the new run acquires it.
        self._lock.release()

    def snapshot(self, position: int) -> Snapshot:
        """Return a copy of the state of a stateful source.

        Raises:
            Exception: The source's ``state_dict`` raises, or the state cannot be copied.
        """
        # Copied, because a source may return a dictionary that it changes later.
        return Snapshot(position, copy.deepcopy(self.source.state_dict()))

    def feed(self, start: State, ledger: Ledger, given: Sequence[Any] | None) -> AnySource:
        """Return the source of a run: the items that are not done, tagged with their positions.

        Args:
            start: Where the run begins.
            ledger: The ledger of the run.
            given: The items, if :meth:`begin_by_position` has begun the epoch.

        Raises:
            RuntimeError: On iteration, if a later run reads the source, which is shared.
        """
        done, turn = Positions(start.done), self._turn

        def numbered() -> Iterator[tuple[int, Any]]:
            items: Any = given
            if items is None and not start.is_fresh:
                items = self.begin_by_position(start)
            if items is None:
                first, values = self._begin(start, ledger, turn)
                return enumerate(values, first)
            # `done` is checked before the item is fetched, which may be expensive.
            left = (at for at in range(done.leading, len(items)) if at not in done)
            return ((at, items[at]) for at in left)

        def read() -> Iterator[Tagged]:
            for position, value in numbered():
                if position not in done:
                    yield Tagged(value, ((position, None),))

        async def read_async() -> AsyncIterator[Tagged]:
            first, values = self._begin(start, ledger, turn)
            for position in itertools.count(first):
                # The lock may be held across an await. No coroutine of this loop waits for it: take_turn()
                # runs in another thread.
                with self._reading(turn):
                    if (value := await anext(values, _END)) is _END:
                        return
                    self._keep_snapshot(position + 1, ledger)
                if position not in done:
                    yield Tagged(value, ((position, None),))

        if self.is_async:
            return read_async()
        is_ready = type(self.source if self.fetch is None else self.source.keys) in _READY
        return OwnSource(read, SourceConfig(self.source).name, is_ready)

    def _begin(self, start: State, ledger: Ledger, turn: int) -> tuple[int, Any]:
        """Begin or resume an epoch. Return the position of the next item, and the iterator from there."""
        source, position = self.source, 0
        with self._lock, self._reading(turn):
            ledger.source_length = self.length_in(start.epoch)
            if self.is_stateful and start.snapshot is not None:
                position = start.snapshot.position
                # Copied, because the same snapshot may be needed again.
                source.load_state_dict(copy.deepcopy(start.snapshot.state))
            items = source if self.fetch is None else source.keys
            iterator: Any = aiter(items) if self.is_async else iter(items)
            self._epoch_left = getattr(source, "epoch", None)
            # The start of an iterator, to which the next iteration returns; other sources begin without a
            # state. After set_epoch(), so that the state includes the epoch.
            if self.is_rewindable and start.snapshot is None:
                self._keep_snapshot(position, ledger)
        if self.is_shared and not self.is_async:
            iterator = self._in_turn(iterator, position, ledger, turn)
        return position, iterator

    def begin_by_position(self, start: State) -> Any:
        """Begin an epoch and return its items for access by position; ``None`` if there are no positions.

        Raises:
            ValueError: The source or its sampler refuses the epoch.
        """
        # A stateful source is resumed by its state, although it may be a sequence as well.
        if self.is_stateful or self.is_async:
            return None
        with self._lock:
            by_key = self.fetch is not None
            begin = self.source.begin_keys if by_key else partial(begin_by_position, self.source)
            items = begin(start.epoch, start.before)
            if items is not None:
                self._epoch_left = getattr(self.source, "epoch", None)
        return items

    @contextmanager
    def _reading(self, turn: int) -> Iterator[None]:
        """Hold the lock of a shared source while the run with this turn reads.

        Raises:
            RuntimeError: A later run has begun.
        """
        with self._lock if self.is_shared else nullcontext():
            if self.is_shared and turn != self._turn:
                raise RuntimeError(
                    f"a later iteration of the loader reads the source, a {type(self.source).__name__}, "
                    "which has one reader at a time; make a loader and a source for each"
                )
            yield

    def _in_turn(
        self, iterator: Iterator[Any], position: int, ledger: Ledger, turn: int
    ) -> Iterator[Any]:
        for after in itertools.count(position + 1):
            with self._reading(turn):
                if (value := next(iterator, _END)) is _END:
                    return
                self._keep_snapshot(after, ledger)
            yield value

    def _keep_snapshot(self, position: int, ledger: Ledger) -> None:
        if self.is_stateful and position % _SNAPSHOT_INTERVAL == 0:
            ledger.keep_snapshot(self.snapshot(position))


class _Iteration:
    """Base of the iterators that return the batches of a loader's pipeline.

    Args:
        loader: The loader.
        ledger: Record of the samples of the epoch.
        stop: Called when the iterator is dropped, to stop the pipeline.
    """

    def __init__(self, loader: Any, ledger: Ledger, stop: Callable[[], object]) -> None:
        self._loader, self._ledger = loader, ledger
        # A loop left by "break" drops its iterator without closing it.
        self._end = when_dropped(_close, ledger, stop, loader, loader._pinned)

    def _converted(self, tagged: Any) -> Any:
        value = value_of(tagged)
        if (to := self._loader.to) is not None:
            # In the consumer's thread, because its CUDA stream has to wait for arrays on a device.
            (value,) = CONVERTERS[to]((value,))
        # After the conversion, because a batch that could not be converted is not done.
        self._loader._tags = tags = tags_of(tagged)
        self._ledger.settle(tags)
        self._ledger.has_delivered = True
        return value

    def _complete(self) -> None:
        # A signal handler may have called close() while this iterator waited.
        if self._ledger.is_closed:
            return
        stages: Any = ()
        # The loader's state becomes the start of the next epoch, unless that has begun already.
        if self._loader._ledger is self._ledger:
            self._loader._ledger = None
            if self._ledger.start.is_fresh:
                stages = self._loader.statistics().stages
        self.close()
        for stage in stages:
            # drop_last drops samples that belong to no call.
            if 0 < stage.dropped == stage.calls.number and not (stage.failures or stage.outputs):
                text = "returned None for all its inputs, which drops them; does it lack a return?"
                warn_caller(f"the epoch gave nothing, because {stage.name!r} {text}", UserWarning)

    def close(self) -> None:
        """Stop loading. Batches that were not returned count as not done."""
        self._ledger.close()


def _close(ledger: Ledger, stop: Callable[[], object], loader: Any, pinned: State | None) -> None:
    if not ledger.is_closed:
        # Lightning makes an iterator to check a loader, and drops it unused.
        if loader._ledger is ledger and not ledger.has_delivered:
            loader._pinned, loader._next_epoch = pinned, ledger.start.epoch
        ledger.close()
        stop()


class Epoch(_Iteration, Iterator[Any]):
    """Iterator over the batches of one epoch. Its pipeline ends with it."""

    def __init__(self, loader: Any, pipeline: Pipeline[Any], ledger: Ledger) -> None:
        super().__init__(loader, ledger, pipeline.stop)
        self._pipeline = pipeline
        pipeline.start()

    def __next__(self) -> Any:
        if self._ledger.is_closed:
            raise StopIteration
        with contextlib.suppress(PipelineStopped):
            try:
                return self._converted(self._pipeline.get_item(timeout=self._loader.timeout))
            except (TimeoutError, PipelineStopped):
                # After a timeout the batch is still being made, and another call may return it.
                raise
            except PipelineFailure as failure:
                self.close()
                # Without the package's frames, so that tracebacks show the user's lines.
                raise failure.with_traceback(None) from None
            except BaseException:
                self.close()
                raise
        # Outside of the handler: otherwise PipelineStopped would be in the traceback of a Ctrl-C here.
        self._complete()
        raise StopIteration

    def close(self) -> None:
        """Stop loading, and wait for the threads."""
        super().close()
        self._pipeline.stop()


class AsyncEpoch(_Iteration, AsyncIterator[Any]):
    """Async iterator over the batches of one epoch. Its pipeline starts with the first ``anext``."""

    def __init__(self, loader: Any, pipeline: Pipeline[Any], ledger: Ledger) -> None:
        super().__init__(loader, ledger, lambda: None)
        # This iterator stops the pipeline when it ends or is dropped, without blocking the event loop.
        self._items: AsyncIterator[Any] | None = aiter(pipeline)

    async def __anext__(self) -> Any:
        if self._items is None:
            raise StopAsyncIteration
        try:
            async with asyncio.timeout(self._loader.timeout):
                tagged = await anext(self._items)
            # Another task may have called close() meanwhile, so that this batch does not count as done.
            if self._ledger.is_closed:
                raise StopAsyncIteration
            return self._converted(tagged)
        except (TimeoutError, asyncio.CancelledError):
            # As in Epoch: the batch is still being made, and another call may return it.
            raise
        except StopAsyncIteration:
            self._complete()
            raise
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop loading."""
        super().close()
        # The iterator's finalizer stops the pipeline; waiting here would block the event loop.
        self._items = None
