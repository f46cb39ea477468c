"""The two ends of a DataLoader: the source that its runs read, and the iterations that hand batches out."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import threading
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from spdl_media._resume import Ledger, Positions, Snapshot, State
from spdl_media.arrays import to_jax, to_numpy, to_torch
from spdl_media.datasets import ImageFolder
from spdl_media.epochs import HasEpochs, Stateful, begin_by_position, iterator_in
from spdl_media.loader_arguments import AnySource
from spdl_media.loader_items import Tagged, tag_result, tags_of, value_of
from spdl_media.pipeline import Pipeline, PipelineFailure, PipelineStopped
from spdl_media.pipeline.pipeline import deferred_interrupt
from spdl_media.pipeline.stages import ReadyItems
from spdl_media.samplers import DistributedDeterministicSampler, DistributedRandomSampler
from spdl_media.source import MapIterator

# A source's state may be large, and it is copied. After a resume, up to so many items less one are
# read again and thrown away.
_SNAPSHOT_INTERVAL = 16

# How long a new iteration waits for a read that the former one began.
_FORMER_READ_SECONDS = 30.0

# Their items are there, or computed in no time, and take no thread of their own. Not classes that derive from
# these, which may do anything.
_READY = (
    *(list, tuple, range),
    *(DistributedDeterministicSampler, DistributedRandomSampler, ImageFolder),
)

_END: Any = object()


CONVERTERS = {"torch": to_torch, "numpy": to_numpy, "jax": to_jax}


class SharedSource:
    """A source that several runs of a loader may read, one after the other.

    Attributes:
        source: The source.
        fetch: Gives the value for a key, where the source is read key by key.
        is_async: Whether it is iterated by ``async for``. As in pipelines, what can be iterated both ways is.
        is_shared: Whether runs read one and the same thing: an iterator, or what has a state. They
            then take turns, since an item that a former run reads is missing in the next one.
    """

    def __init__(self, source: AnySource, epoch_left: int | None = 0) -> None:
        self.source: Any = source
        self.fetch: Callable[[Any], Any] | None = None
        # A class of the user's own that iterates otherwise is iterated.
        if isinstance(source, MapIterator) and type(source).__iter__ is MapIterator.__iter__:
            self.fetch = source.mapping.__getitem__
        self.is_async = isinstance(source, AsyncIterable)
        self.is_stateful = isinstance(source, Stateful)
        self.leads_back = self.is_stateful and isinstance(source, Iterator | AsyncIterator)
        self.is_shared = self.is_stateful or iterator_in(source) is not None
        # Number of the run that may read a shared source.
        self._turn = 0
        # Held when an epoch begins, and during each read of a shared source.
        self._lock = threading.Lock()
        # What `epoch` of the source was when the latest epoch had begun.
        self._epoch_left = epoch_left

    def __reduce__(self) -> tuple[Any, ...]:
        # The lock cannot be pickled.
        return SharedSource, (self.source, self._epoch_left)

    def chosen_by_user(self) -> int | None:
        """Return the epoch that the user has set at the source since the latest one was begun."""
        epoch = getattr(self.source, "epoch", None)
        if not isinstance(self.source, HasEpochs) or not isinstance(epoch, int):
            return None
        return None if epoch == self._epoch_left else epoch

    def take_turn(self) -> None:
        """Keep former runs from reading a shared source, and wait for a read that one has begun.

        Raises:
            TimeoutError: That read takes too long. Another try may follow.
        """
        if not self.is_shared:
            return
        # First, so that a run that reads without a pause does not get the lock again.
        self._turn += 1
        if not self._lock.acquire(timeout=_FORMER_READ_SECONDS):
            raise TimeoutError(
                f"a read of the source, a {type(self.source).__name__}, that the last iteration began, has "
                f"not ended within {_FORMER_READ_SECONDS} s, and the next one would miss what it gives; "
                "iterate again when it has ended, or make the source and the loader anew"
            )
        # Not kept: reads of the run that has the turn now take it one by one.
        self._lock.release()

    def snapshot(self, position: int) -> Snapshot:
        """Return a copy of the state of a source that has one.

        Raises:
            Exception: The source's ``state_dict`` raises, or the state cannot be copied.
        """
        # Copied, because a source may hand out the dictionary that it goes on to change.
        return Snapshot(position, copy.deepcopy(self.source.state_dict()))

    def feed(
        self, start: State, ledger: Ledger, given: Sequence[Any] | None, *, drops_none: bool
    ) -> AnySource:
        """Give what a run reads: the items that are not done, tagged with their positions.

        Args:
            start: Where the run begins.
            ledger: Of the run.
            given: The items, if :meth:`begin_by_position` has begun the epoch.
            drops_none: Whether there is no stage to see ``None``, which then drops the item.
        """
        done, turn = Positions(start.done), self._turn

        def tagged(position: int, value: Any) -> Tagged | None:
            tags = ((position, None),)
            return tag_result(value, tags, ledger) if drops_none else Tagged(value, tags)

        def numbered() -> Iterator[tuple[int, Any]]:
            items: Any = given
            if items is None and not start.is_fresh:
                items = self.begin_by_position(start)
            if items is None:
                first, values = self._begin(start, ledger, turn)
                return enumerate(values, first)
            # `done` is asked before the item is fetched, which may be expensive.
            left = (at for at in range(done.leading, len(items)) if at not in done)
            return ((at, items[at]) for at in left)

        def read() -> Iterator[Tagged]:
            for position, value in numbered():
                if position not in done and (item := tagged(position, value)):
                    yield item

        async def read_async() -> AsyncIterator[Tagged]:
            position, values = self._begin(start, ledger, turn)
            async for value in values:
                if position not in done and (item := tagged(position, value)):
                    yield item
                position += 1

        if self.is_async:
            return read_async()
        is_ready = type(self.source if self.fetch is None else self.source.keys) in _READY
        return ReadyItems(read()) if is_ready else read()

    def _begin(self, start: State, ledger: Ledger, turn: int) -> tuple[int, Any]:
        """Begin or resume an epoch; return the position of the next item, and what reads from there."""
        source, position = self.source, 0
        with self._reading(turn):
            if isinstance(source, HasEpochs):
                source.set_epoch(start.epoch)
            if self.is_stateful and start.snapshot is not None:
                position = start.snapshot.position
                # Copied: the same snapshot may be needed for another try.
                source.load_state_dict(copy.deepcopy(start.snapshot.state))
            items = source if self.fetch is None else source.keys
            iterator: Any = aiter(items) if self.is_async else iter(items)
            self._epoch_left = getattr(source, "epoch", None)
            # The next iteration over an iterator leads back to here. What is iterated anew needs no state
            # to begin with. Not before set_epoch(), which tells the iterator its epoch.
            if self.leads_back and start.snapshot is None:
                self._keep_snapshot(position, ledger)
        if self.is_shared:
            in_turn: Any = self._in_turn_async if self.is_async else self._in_turn
            iterator = in_turn(iterator, position, ledger, turn)
        return position, iterator

    def begin_by_position(self, start: State) -> Any:
        """Begin an epoch whose items are asked for by position; ``None`` if the source has none.

        Raises:
            ValueError: The source or its sampler refuses the epoch.
        """
        # What has a state is asked for that, although it may be a sequence as well.
        if self.is_stateful or self.is_async:
            return None
        with self._lock:
            by_key = self.fetch is not None
            begin = self.source.begin_keys if by_key else partial(begin_by_position, self.source)
            items = begin(start.epoch, start.before)
            if items is not None:
                self._epoch_left = getattr(self.source, "epoch", None)
        return items

    def positions_to_replace(self, start: State) -> Sequence[Any]:
        """Begin an epoch as :meth:`begin_by_position`, whose items stand in for one another.

        Raises:
            ValueError: The source has no positions at which to look.
        """
        items: Sequence[Any] | None = self.begin_by_position(start)
        if items is None:
            raise ValueError(
                "on_error='replace' looks for another good item by its position, and the source, a "
                f"{type(self.source).__name__}, can only be read from its start; pass a sequence, a sampler "
                "or MapIterator(dataset, sampler), or a function as on_error"
            )
        return items

    @contextmanager
    def _reading(self, turn: int) -> Iterator[None]:
        """Hold the lock for a read of the run with this turn.

        Raises:
            RuntimeError: A later run has begun.
        """
        with self._lock:
            if self.is_shared and turn != self._turn:
                raise RuntimeError(
                    f"a later iteration of the loader reads the source, a {type(self.source).__name__}, "
                    "which one at a time can read; make a loader and a source for each"
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

    async def _in_turn_async(
        self, iterator: AsyncIterator[Any], position: int, ledger: Ledger, turn: int
    ) -> AsyncIterator[Any]:
        for after in itertools.count(position + 1):
            # Held while others run on the loop. None of them waits for it: a later run begins elsewhere.
            with self._reading(turn):
                if (value := await anext(iterator, _END)) is _END:
                    return
                self._keep_snapshot(after, ledger)
            yield value

    def _keep_snapshot(self, position: int, ledger: Ledger) -> None:
        if self.is_stateful and position % _SNAPSHOT_INTERVAL == 0:
            ledger.keep_snapshot(self.snapshot(position))


class _Iteration:
    """Hands out what a pipeline of a loader gives."""

    # Of the class, for __del__ where __init__ fails: nothing is to be closed then.
    _is_over = True

    def __init__(self, loader: Any, pipeline: Pipeline[Any], ledger: Ledger) -> None:
        self._loader, self._pipeline, self._ledger = loader, pipeline, ledger
        self._timeout = loader.timeout
        self._convert = None if loader.to is None else CONVERTERS[loader.to]
        self._is_over = False

    def _converted(self, tagged: Any) -> Any:
        value = value_of(tagged)
        if self._convert is not None:
            # In the consumer's thread, whose stream is to wait for arrays on a device.
            (value,) = self._convert((value,))
        # After the conversion: a batch that could not be converted is not done.
        self._loader._tags = tags = tags_of(tagged)
        self._ledger.settle(tags)
        return value

    def _complete(self) -> None:
        # The state is now the beginning of the next epoch, unless that has begun.
        if self._loader._ledger is self._ledger:
            self._loader._ledger = None
        self.close()

    def close(self) -> None:
        """Stop loading. Batches that were not handed out are not done."""
        self._is_over = True
        self._ledger.close()

    def __del__(self) -> None:
        # A loop that is left by "break" drops its iterator without closing it.
        if not self._is_over:
            with deferred_interrupt():
                self.close()


class Epoch(_Iteration, Iterator[Any]):
    """An iteration under way. Its pipeline ends with it."""

    def __init__(self, loader: Any, pipeline: Pipeline[Any], ledger: Ledger) -> None:
        super().__init__(loader, pipeline, ledger)
        pipeline.start()

    def __next__(self) -> Any:
        if self._is_over:
            raise StopIteration
        with contextlib.suppress(PipelineStopped):
            try:
                return self._converted(self._pipeline.get_item(timeout=self._timeout))
            except (TimeoutError, PipelineStopped):
                # After a time-out the batch is still being made, and another call may get it.
                raise
            except PipelineFailure as failure:
                self.close()
                # Tracebacks are to show the user's lines.
                raise failure.with_traceback(None) from None
            except BaseException:
                self.close()
                raise
        # Not while the error is handled, which would stand in the traceback of a Ctrl-C.
        self._complete()
        raise StopIteration

    def close(self) -> None:
        """Stop loading, and wait for the threads."""
        super().close()
        self._pipeline.stop()


class AsyncEpoch(_Iteration, AsyncIterator[Any]):
    """The same for a task. Its pipeline starts with the first batch that is asked for."""

    def __init__(self, loader: Any, pipeline: Pipeline[Any], ledger: Ledger) -> None:
        super().__init__(loader, pipeline, ledger)
        # Stops the pipeline when it ends or is dropped, without blocking the event loop.
        self._items = aiter(pipeline)

    async def __anext__(self) -> Any:
        if self._is_over:
            raise StopAsyncIteration
        try:
            async with asyncio.timeout(self._timeout):
                tagged = await anext(self._items)
            return self._converted(tagged)
        except (TimeoutError, asyncio.CancelledError):
            # As in Epoch: the batch is still being made, and another call may get it.
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
        # Its finalizer stops the pipeline; to wait here would block the event loop.
        del self._items
