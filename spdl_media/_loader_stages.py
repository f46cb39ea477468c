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
from spdl_media._resume import Intervals, Ledger, Snapshot, State, Tag
from spdl_media.pipeline.executors import kind_of, name_of, refuse_coroutine
from spdl_media.pipeline.failures import short_repr

AnySource: TypeAlias = Iterable[Any] | AsyncIterable[Any]

# A source's state may be large, and it is copied. After a resume, up to so many items less one are
# read again and thrown away.
_SNAPSHOT_INTERVAL = 16

# How long a new iteration waits for a read that the former one began.
_FORMER_READ_SECONDS = 30.0

_END: Any = object()


class Tagged:
    """An item, sample or batch in the pipeline, with the samples that it was made of."""

    __slots__ = ("tags", "value")

    def __init__(self, value: Any, tags: Sequence[Tag]) -> None:
        self.value = value
        self.tags = tags

    def __repr__(self) -> str:
        # Records of failures show the user's value.
        return short_repr(self.value)


def value_of(tagged: Tagged | list[Tagged]) -> Any:
    """Return the user's value; of samples that the pipeline grouped, the list of their values."""
    return [one.value for one in tagged] if isinstance(tagged, list) else tagged.value


def tags_of(tagged: Tagged | list[Tagged]) -> Sequence[Tag]:
    """Return which samples a value was made of."""
    if isinstance(tagged, list):
        return [tag for one in tagged for tag in one.tags]
    return tagged.tags


class SharedSource:
    """A source that several runs of a loader may read, one after the other.

    Attributes:
        source: The source.
        is_shared: Whether runs read one and the same thing: an iterator, or what has a state. They
            then take turns, since an item that a former run reads is missing in the next one.
        turn: Number of the run that may read such a source.
        lock: Held when an epoch begins, and during each read of such a source.
    """

    def __init__(self, source: AnySource) -> None:
        self.source = source
        self.is_iterator = isinstance(source, Iterator | AsyncIterator)
        self.is_stateful = isinstance(source, Stateful)
        self.is_shared = self.is_stateful or iterator_in(source) is not None
        self.turn = 0
        self.lock = threading.Lock()
        # What `epoch` of the source was when the latest epoch had begun.
        self._epoch_left: int | None = 0

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
        self.turn += 1
        if not self.lock.acquire(timeout=_FORMER_READ_SECONDS):
            raise TimeoutError(
                f"a read of the source, a {type(self.source).__name__}, that the last iteration began, has "
                f"not ended within {_FORMER_READ_SECONDS} s, and the next one would miss what it gives; "
                "iterate again when it has ended, or make the source and the loader anew"
            )
        self.lock.release()

    def check_turn(self, turn: int) -> None:
        """Refuse a read in a former run. The lock must be held.

        Raises:
            RuntimeError: A later run has begun.
        """
        if self.is_shared and turn != self.turn:
            raise RuntimeError(
                f"a later iteration of the loader reads the source, a {type(self.source).__name__}, "
                "which one at a time can read; make a loader and a source for each"
            )

    def snapshot(self, position: int) -> Snapshot:
        """Return a copy of the state of a source that has one."""
        source: Any = self.source
        # Copied, because a source may hand out the dictionary that it goes on to change.
        return Snapshot(position, copy.deepcopy(source.state_dict()))

    def begin(self, start: State, turn: int) -> tuple[int, Any]:
        """Begin or resume an epoch; return the position of the next item, and the iterator."""
        source: Any = self.source
        with self.lock:
            self.check_turn(turn)
            position = 0
            if isinstance(source, HasEpochs):
                source.set_epoch(start.epoch)
            if self.is_stateful and start.snapshot is not None:
                position = start.snapshot.position
                # Copied: the same snapshot may be needed for another try.
                source.load_state_dict(copy.deepcopy(start.snapshot.state))
            # As in pipelines: what can be iterated both ways is asynchronous.
            iterator = aiter(source) if isinstance(source, AsyncIterable) else iter(source)
            self._epoch_left = getattr(source, "epoch", None)
        return position, iterator

    def begin_by_position(self, start: State) -> Sequence[Any] | None:
        """Begin an epoch whose items are asked for by position, if the source allows that."""
        if self.is_stateful:
            return None
        with self.lock:
            items = begin_by_position(self.source, start.epoch)
            if items is not None:
                self._epoch_left = getattr(self.source, "epoch", None)
        return items


class Feed:
    """The source of one run: the items that are not done, tagged with their positions.

    Args:
        source: What is read.
        start: Where the run begins.
        ledger: Of the run.
        drops_none: Whether there is no preprocessor to see ``None``, which then drops the item.
    """

    def __init__(
        self, source: SharedSource, start: State, ledger: Ledger, *, drops_none: bool
    ) -> None:
        self._source = source
        self._turn = source.turn
        self._start = start
        self._ledger = ledger
        self._drops_none = drops_none
        self._done = Intervals(start.done)

    def __iter__(self) -> Iterator[Tagged]:
        is_fresh = self._start.is_fresh
        items = None if is_fresh else self._source.begin_by_position(self._start)
        if items is None:
            yield from self._read()
            return
        for position in range(len(items)):
            # Asked before the item is fetched: that may be the dear part.
            if position not in self._done and (tagged := self._tag(position, items[position])):
                yield tagged

    def _read(self) -> Iterator[Tagged]:
        position, values = self._begin()
        if self._source.is_shared:
            values = self._in_turn(values)
        for value in values:
            if position not in self._done and (tagged := self._tag(position, value)):
                yield tagged
            position += 1
            self._keep_snapshot(position)

    def _in_turn(self, iterator: Iterator[Any]) -> Iterator[Any]:
        while True:
            with self._source.lock:
                self._source.check_turn(self._turn)
                value = next(iterator, _END)
            if value is _END:
                return
            yield value

    def _begin(self) -> tuple[int, Any]:
        position, iterator = self._source.begin(self._start, self._turn)
        # The next iteration over an iterator leads back to here. What is iterated anew needs no state
        # to begin with. Not before begin(), which tells the iterator its epoch.
        if self._source.is_iterator and self._start.snapshot is None:
            self._keep_snapshot(position)
        return position, iterator

    def _tag(self, position: int, value: Any) -> Tagged | None:
        tags = ((position, None),)
        return _tagged(value, tags, self._ledger) if self._drops_none else Tagged(value, tags)

    def _keep_snapshot(self, position: int) -> None:
        if not self._source.is_stateful or position % _SNAPSHOT_INTERVAL:
            return
        with self._source.lock:
            self._source.check_turn(self._turn)
            self._ledger.keep_snapshot(self._source.snapshot(position))


class AsyncFeed(Feed):
    """The feed of an asynchronous source, which is read from its start."""

    __iter__ = None  # type: ignore[assignment]

    async def __aiter__(self) -> AsyncIterator[Tagged]:
        position, iterator = self._begin()
        while (value := await self._next(iterator)) is not _END:
            if position not in self._done and (tagged := self._tag(position, value)):
                yield tagged
            position += 1
            self._keep_snapshot(position)

    async def _next(self, iterator: AsyncIterator[Any]) -> Any:
        if not self._source.is_shared:
            return await anext(iterator, _END)
        # Held while others run on the loop. None of them waits for it: a later run begins elsewhere.
        with self._source.lock:
            self._source.check_turn(self._turn)
            return await anext(iterator, _END)


def takes_rng(fn: Callable[..., Any]) -> bool:
    """Whether a function has a parameter named ``rng``, apart from its first, which is the item."""
    try:
        _, *others = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # no signature, as some functions of C; or no parameters
        return False
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return any(other.name == "rng" and other.kind in by_name for other in others)


def stage_of(
    fn: Callable[..., Any],
    ledger: Ledger,
    make_rng: Callable[[int], object] | None = None,
) -> Callable[[Any], Any]:
    """Make a stage of a user's function, which sees plain values; the ledger learns what is done.

    Args:
        fn: Takes the value of an item, sample or batch.
        ledger: Of the run.
        make_rng: Makes the argument ``rng`` for the item at a position.

    Returns:
        A function of the same kind (coroutine function, generator function ...) over tagged values.
    """
    kind = kind_of(fn)

    def call(tagged: Any) -> Any:
        if make_rng is None:
            value = fn(value_of(tagged))
        else:
            # By its position: the numbers depend neither on threads nor on other items.
            value = fn(tagged.value, rng=make_rng(tagged.tags[0][0]))
        if kind == "function" and isinstance(value, CoroutineType):
            refuse_coroutine(value, name_of(fn))
        return value

    return _KINDS[kind](call, ledger)


# `call` applies the user's function to the value of what is tagged.
_Call: TypeAlias = Callable[[Any], Any]


def _function(call: _Call, ledger: Ledger) -> Callable[[Any], Any]:
    def stage(tagged: Any) -> Tagged | None:
        try:
            value = call(tagged)
        except BaseException:
            ledger.settle(tags_of(tagged))
            raise
        return _tagged(value, tags_of(tagged), ledger)

    return stage


def _coroutine_function(call: _Call, ledger: Ledger) -> Callable[[Any], Any]:
    async def stage(tagged: Any) -> Tagged | None:
        try:
            value = await call(tagged)
        except BaseException as error:
            if not _ends_with_run(error):
                ledger.settle(tags_of(tagged))
            raise
        return _tagged(value, tags_of(tagged), ledger)

    return stage


def _generator_function(call: _Call, ledger: Ledger) -> Callable[[Any], Any]:
    def stage(item: Tagged) -> Iterator[Tagged]:
        samples = _Samples(item, ledger)
        try:
            for value in call(item):
                if sample := samples.tag(value):
                    yield sample
        except GeneratorExit:
            # The run was stopped, and the next one processes the item again.
            raise
        except BaseException:
            samples.end()
            raise
        samples.end()

    return stage


def _async_generator_function(call: _Call, ledger: Ledger) -> Callable[[Any], Any]:
    async def stage(item: Tagged) -> AsyncIterator[Tagged]:
        samples = _Samples(item, ledger)
        try:
            async with aclosing(call(item)) as values:
                async for value in values:
                    if sample := samples.tag(value):
                        yield sample
        except BaseException as error:
            if not _ends_with_run(error):
                samples.end()
            raise
        samples.end()

    return stage


_KINDS = {
    "function": _function,
    "async": _coroutine_function,
    "generator": _generator_function,
    "async_generator": _async_generator_function,
}


def _ends_with_run(error: BaseException) -> bool:
    """Whether a coroutine was ended by its run, not by itself: the next run makes the call again."""
    if isinstance(error, CancelledError):
        # The function may raise it as well, and has failed then.
        task = current_task()
        return task is not None and task.cancelling() > 0
    return isinstance(error, GeneratorExit)


def _tagged(value: Any, tags: Sequence[Tag], ledger: Ledger) -> Tagged | None:
    """Tag a result; ``None`` drops what it was made of."""
    if value is None:
        ledger.settle(tags)
        return None
    return Tagged(value, tags)


class _Samples:
    """Tags the samples that a generator makes of one item."""

    def __init__(self, item: Tagged, ledger: Ledger) -> None:
        ((self._position, _),) = item.tags
        self._ledger = ledger
        self._done = ledger.done_offsets(self._position)
        self._count = 0

    def tag(self, value: Any) -> Tagged | None:
        """Return the next sample, or ``None`` if it is dropped or was done before the resume."""
        # Counted even if it is dropped, so that offsets are the same after a resume.
        offset, self._count = self._count, self._count + 1
        if offset in self._done:
            return None
        return _tagged(value, ((self._position, offset),), self._ledger)

    def end(self) -> None:
        """Tell the ledger that no more samples come."""
        self._ledger.count_samples(self._position, self._count)
