"""The stages of a DataLoader: the source with positions, and the user's functions over tagged values."""

from __future__ import annotations

import copy
import inspect
import threading
from asyncio import CancelledError, current_task
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from types import CoroutineType
from typing import Any, TypeAlias

from spdl_media._epochs import HasEpochs, Stateful, begin_by_position, iterator_in
from spdl_media._resume import Intervals, Ledger, Pairs, Snapshot, State, Tag
from spdl_media.pipeline.failures import short_repr
from spdl_media.pipeline.functions import FunctionKind, kind_of, name_of, refuse_coroutine

__all__ = (
    "AnySource",
    "Batch",
    "Feed",
    "Item",
    "Sample",
    "SourceEpochs",
    "batch_stage",
    "item_stage",
    "snapshot_of",
    "takes_rng",
    "value_of",
)


class Item:
    """An item of the source, for the preprocessor.

    Attributes:
        position: Its position in the source.
        value: What the source gave.
        done: Offsets of those of its samples that are not to be made again.
    """

    __slots__ = ("done", "position", "value")

    def __init__(self, position: int, value: Any, done: Pairs = ()) -> None:
        self.position = position
        self.value = value
        self.done = done

    def __repr__(self) -> str:
        # Reports of failures name the user's item.
        return short_repr(self.value)


class Sample:
    """What the preprocessor made of an item, or one of several such."""

    __slots__ = ("offset", "position", "value")

    def __init__(self, position: int, offset: int | None, value: Any) -> None:
        self.position = position
        self.offset = offset
        self.value = value

    @property
    def tags(self) -> list[Tag]:
        """Where it comes from."""
        return [(self.position, self.offset)]

    def __repr__(self) -> str:
        return short_repr(self.value)


class Batch:
    """What was made of several samples. Holds on to none of them."""

    __slots__ = ("tags", "value")

    def __init__(self, tags: list[Tag], value: Any) -> None:
        self.tags = tags
        self.value = value

    def __repr__(self) -> str:
        return short_repr(self.value)


def value_of(tagged: Any) -> Any:
    """The user's value: of a list of samples the list of their values."""
    if isinstance(tagged, list):
        return [sample.value for sample in tagged]
    return tagged.value


def tags_of(tagged: Any) -> list[Tag]:
    """Where the samples in it come from."""
    if isinstance(tagged, list):
        return [(sample.position, sample.offset) for sample in tagged]
    tags: list[Tag] = tagged.tags
    return tags


AnySource: TypeAlias = Iterable[Any] | AsyncIterable[Any]

# A source's state may be large. Between two copies of it, items are read again and thrown away.
_SNAPSHOT_INTERVAL = 16

# How long a new iteration waits for the read in which the former one was stopped.
_FORMER_READ_SECONDS = 30.0

_END: Any = object()


def snapshot_of(source: object, position: int) -> Snapshot | None:
    """What a source says of itself, if it has a state."""
    if not isinstance(source, Stateful):
        return None
    return Snapshot(position, copy.deepcopy(source.state_dict()))


class SourceEpochs:
    """Begins epochs of a source that several runs may share, and notices when its user chooses one.

    A source with ``set_epoch`` is told the epoch; a user who sets it there means the loader's as
    well.

    Attributes:
        source: The source.
        is_shared: Whether runs read one and the same thing, an iterator or what has a state: then they take
            turns: what is read for a former one is missing in the next.
        turn: Which run may read a source that is shared.
        lock: Held when an epoch begins, and during each read of a source that is shared.
    """

    def __init__(self, source: AnySource) -> None:
        self.source = source
        self.is_shared = iterator_in(source) is not None or isinstance(source, Stateful)
        self.turn = 0
        self.lock = threading.Lock()
        self._epoch_left: int | None = 0

    def chosen_by_user(self) -> int | None:
        """The epoch that the user has set at the source since the last one was begun."""
        epoch = getattr(self.source, "epoch", None)
        if not isinstance(self.source, HasEpochs) or not isinstance(epoch, int):
            return None
        return None if epoch == self._epoch_left else epoch

    def take_turn(self) -> None:
        """Let former runs read a shared source no more, and wait for the read in which one may be.

        Raises:
            TimeoutError: That read takes too long. Another try may follow.
        """
        if not self.is_shared:
            return
        # First, so that a run that reads on and on does not come in again.
        self.turn += 1
        if not self.lock.acquire(timeout=_FORMER_READ_SECONDS):
            raise TimeoutError(
                f"a read of the source, a {type(self.source).__name__}, that the last iteration began, has "
                f"not ended within {_FORMER_READ_SECONDS} s, and the next one would miss what it gives; "
                "iterate again when it has ended, or make the source and the loader anew"
            )
        self.lock.release()

    def check(self, turn: int) -> None:
        """Before each read of a source that is shared, with the lock held: see whose turn it is.

        Raises:
            RuntimeError: It is that of a later run.
        """
        if self.is_shared and turn != self.turn:
            raise RuntimeError(
                f"a later iteration of the loader reads the source, a {type(self.source).__name__}, "
                "which one at a time can read; make a loader and a source for each"
            )

    def begin(self, start: State, turn: int) -> tuple[int, Any]:
        """Begin or go on with an epoch; gives the position of the first item, and the iterator."""
        with self.lock:
            self.check(turn)
            position = 0
            if isinstance(self.source, HasEpochs):
                self.source.set_epoch(start.epoch)
            if isinstance(self.source, Stateful) and start.snapshot is not None:
                self.source.load_state_dict(copy.deepcopy(start.snapshot.state))
                position = start.snapshot.position
            # As in pipelines: what can be iterated both ways is asynchronous.
            iterator = (
                aiter(self.source) if isinstance(self.source, AsyncIterable) else iter(self.source)
            )
            self._epoch_left = getattr(self.source, "epoch", None)
            return position, iterator

    def begin_by_position(self, start: State) -> Sequence[Any] | None:
        """Begin the epoch and give its items by position, if the source can be read that way."""
        with self.lock:
            if isinstance(self.source, Stateful):
                return None
            items = begin_by_position(self.source, start.epoch)
            if items is not None:
                self._epoch_left = getattr(self.source, "epoch", None)
            return items


class Feed:
    """What enters the pipeline: items with their positions, without those that are done."""

    def __init__(
        self, epochs: SourceEpochs, start: State, ledger: Ledger, *, as_samples: bool
    ) -> None:
        self._epochs = epochs
        self._turn = epochs.turn
        self._start = start
        self._ledger = ledger
        self._as_samples = as_samples
        self._done = Intervals(start.done)
        self._offsets = dict(start.partly_done)

    def _tag(self, position: int, value: Any) -> Item | Sample | None:
        if not self._as_samples:
            return Item(position, value, self._offsets.get(position, ()))
        if value is None:
            self._ledger.settle([(position, None)])
            return None
        return Sample(position, None, value)

    def _is_wanted(self, position: int) -> bool:
        return position not in self._done

    def _begin(self) -> tuple[int, Any]:
        """Begin or go on with the epoch; gives the position of the first item, and the iterator."""
        position, iterator = self._epochs.begin(self._start, self._turn)
        # What is iterated anew needs no state to begin with. An iterator does, and it knows its epoch by
        # now: the next iteration of it leads back there, unless it goes on from a state already.
        is_iterator = isinstance(self._epochs.source, Iterator | AsyncIterator)
        if is_iterator and self._start.snapshot is None:
            self._note(position)
        return position, iterator

    def _note(self, position: int) -> None:
        """Ask the source for its state now and then."""
        if position % _SNAPSHOT_INTERVAL:
            return
        with self._epochs.lock:
            self._epochs.check(self._turn)
            snapshot = snapshot_of(self._epochs.source, position)
        if snapshot is not None:
            self._ledger.keep_snapshot(snapshot)


class SyncFeed(Feed):
    """The feed of an iterable."""

    def __iter__(self) -> Iterator[Item | Sample]:
        for position, value in self._pairs():
            tagged = self._tag(position, value)
            if tagged is not None:
                yield tagged

    def _pairs(self) -> Iterator[tuple[int, Any]]:
        items = None if self._start.is_fresh else self._epochs.begin_by_position(self._start)
        if items is None:
            yield from self._read()
            return
        for position in range(len(items)):
            if self._is_wanted(position):
                yield position, items[position]

    def _read(self) -> Iterator[tuple[int, Any]]:
        position, iterator = self._begin()
        for value in self._in_turn(iterator) if self._epochs.is_shared else iterator:
            if self._is_wanted(position):
                yield position, value
            position += 1
            self._note(position)

    def _in_turn(self, iterator: Iterator[Any]) -> Iterator[Any]:
        while True:
            with self._epochs.lock:
                self._epochs.check(self._turn)
                value = next(iterator, _END)
            if value is _END:
                return
            yield value


class AsyncFeed(Feed):
    """The feed of an async iterable."""

    async def __aiter__(self) -> AsyncIterator[Item | Sample]:
        position, iterator = self._begin()
        while (value := await self._next(iterator)) is not _END:
            if self._is_wanted(position):
                tagged = self._tag(position, value)
                if tagged is not None:
                    yield tagged
            position += 1
            self._note(position)

    async def _next(self, iterator: AsyncIterator[Any]) -> Any:
        if not self._epochs.is_shared:
            return await anext(iterator, _END)
        # Nobody waits for this on the loop: a later run begins when it is over.
        with self._epochs.lock:
            self._epochs.check(self._turn)
            return await anext(iterator, _END)


Extra: TypeAlias = Callable[[int], dict[str, Any]]
"""Further arguments for the item at a position."""


def takes_rng(fn: Callable[..., Any]) -> bool:
    """Whether a function has a parameter named ``rng``, apart from its first, which is the item."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):  # some functions of C have no signature
        return False
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return any(
        parameter.name == "rng" and parameter.kind in by_name
        for place, parameter in enumerate(parameters)
        if place > 0
    )


def item_stage(fn: Callable[..., Any], ledger: Ledger, extra: Extra) -> Callable[[Item], Any]:
    """The preprocessor as a stage from items to samples, of the same kind as the function."""
    stage: Callable[[Item], Any] = _ITEM_STAGES[kind_of(fn)](fn, ledger, extra)
    return stage


def _of_function(fn: Callable[..., Any], ledger: Ledger, extra: Extra) -> Callable[[Item], Any]:
    def preprocess(item: Item) -> Sample | None:
        try:
            value = fn(item.value, **extra(item.position))
            if isinstance(value, CoroutineType):
                refuse_coroutine(value, name_of(fn))
        except BaseException:
            ledger.settle([(item.position, None)])
            raise
        return _sample(item.position, None, value, ledger)

    return preprocess


def _of_async(fn: Callable[..., Any], ledger: Ledger, extra: Extra) -> Callable[[Item], Any]:
    async def preprocess(item: Item) -> Sample | None:
        try:
            value = await fn(item.value, **extra(item.position))
        except BaseException as error:
            if not _ends_with_run(error):
                ledger.settle([(item.position, None)])
            raise
        return _sample(item.position, None, value, ledger)

    return preprocess


def _of_generator(fn: Callable[..., Any], ledger: Ledger, extra: Extra) -> Callable[[Item], Any]:
    def preprocess(item: Item) -> Iterator[Sample]:
        done = Intervals(item.done)
        count = 0
        try:
            for value in fn(item.value, **extra(item.position)):
                offset, count = count, count + 1
                sample = None if offset in done else _sample(item.position, offset, value, ledger)
                if sample is not None:
                    yield sample
        except GeneratorExit:
            # The run has ended, and the item is made again in the next one.
            raise
        except BaseException:
            ledger.count_samples(item.position, count)
            raise
        ledger.count_samples(item.position, count)

    return preprocess


def _of_async_generator(
    fn: Callable[..., Any], ledger: Ledger, extra: Extra
) -> Callable[[Item], Any]:
    async def preprocess(item: Item) -> AsyncIterator[Sample]:
        done = Intervals(item.done)
        count = 0
        try:
            async with aclosing(fn(item.value, **extra(item.position))) as values:
                async for value in values:
                    offset, count = count, count + 1
                    sample = (
                        None if offset in done else _sample(item.position, offset, value, ledger)
                    )
                    if sample is not None:
                        yield sample
        except BaseException as error:
            if not _ends_with_run(error):
                ledger.count_samples(item.position, count)
            raise
        ledger.count_samples(item.position, count)

    return preprocess


def _ends_with_run(error: BaseException) -> bool:
    """Whether a call did not end by itself: what it was given is then made again in the next run."""
    if isinstance(error, CancelledError):
        # The function may raise it as well, and has failed then.
        task = current_task()
        return task is not None and task.cancelling() > 0
    return isinstance(error, GeneratorExit)


_ITEM_STAGES: dict[FunctionKind, Callable[[Callable[..., Any], Ledger, Extra], Any]] = {
    "function": _of_function,
    "async": _of_async,
    "generator": _of_generator,
    "async_generator": _of_async_generator,
}


def _sample(position: int, offset: int | None, value: Any, ledger: Ledger) -> Sample | None:
    if value is None:
        ledger.settle([(position, offset)])
        return None
    return Sample(position, offset, value)


def batch_stage(fn: Callable[[Any], Any], ledger: Ledger) -> Callable[[Any], Any]:
    """The aggregator or the transfer as a stage: from samples or a batch to a batch."""
    if kind_of(fn) == "async":
        return _of_async_on_batches(fn, ledger)

    def convert(tagged: Any) -> Batch | None:
        try:
            value = fn(value_of(tagged))
            if isinstance(value, CoroutineType):
                refuse_coroutine(value, name_of(fn))
        except BaseException:
            ledger.settle(tags_of(tagged))
            raise
        return _batch(tagged, value, ledger)

    return convert


def _of_async_on_batches(fn: Callable[[Any], Any], ledger: Ledger) -> Callable[[Any], Any]:
    async def convert(tagged: Any) -> Batch | None:
        try:
            value = await fn(value_of(tagged))
        except BaseException as error:
            if not _ends_with_run(error):
                ledger.settle(tags_of(tagged))
            raise
        return _batch(tagged, value, ledger)

    return convert


def _batch(tagged: Any, value: Any, ledger: Ledger) -> Batch | None:
    tags = tags_of(tagged)
    if value is None:
        ledger.settle(tags)
        return None
    return Batch(tags, value)
