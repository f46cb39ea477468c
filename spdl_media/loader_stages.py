"""The stages of a DataLoader: the source with positions, and the user's functions over tagged values."""

from __future__ import annotations

import copy
import threading
from asyncio import CancelledError, current_task
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from functools import partial
from types import CoroutineType
from typing import Any, Self, TypeAlias

from spdl_media._resume import Ledger, Positions, Snapshot, State, Tag
from spdl_media.datasets import ImageFolder
from spdl_media.epochs import HasEpochs, Stateful, begin_by_position, iterator_in
from spdl_media.loader_arguments import AnySource
from spdl_media.pipeline import PipeConfig
from spdl_media.pipeline.executors import kind_of, name_of, refuse_coroutine
from spdl_media.pipeline.failures import short_repr
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
        fetch: Gives the value for a key, where the source is read key by key.
        is_async: Whether it is iterated by ``async for``. As in pipelines, what can be iterated both ways is.
        is_shared: Whether runs read one and the same thing: an iterator, or what has a state. They
            then take turns, since an item that a former run reads is missing in the next one.
    """

    def __init__(self, source: AnySource) -> None:
        self.source: Any = source
        self.fetch: Callable[[Any], Any] | None = None
        # A class of the user's own that iterates otherwise is iterated.
        if isinstance(source, MapIterator) and type(source).__iter__ is MapIterator.__iter__:
            self.fetch = source.mapping.__getitem__
        self.is_async = isinstance(source, AsyncIterable)
        self.is_iterator = isinstance(source, Iterator | AsyncIterator)
        self.is_stateful = isinstance(source, Stateful)
        self.is_shared = self.is_stateful or iterator_in(source) is not None
        # Number of the run that may read a shared source.
        self._turn = 0
        # Held when an epoch begins, and during each read of a shared source.
        self._lock = threading.Lock()
        # What `epoch` of the source was when the latest epoch had begun.
        self._epoch_left: int | None = 0

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the lock, which cannot be pickled."""
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

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
        self._lock.release()

    def snapshot(self, position: int) -> Snapshot:
        """Return a copy of the state of a source that has one."""
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
            return _tagged(value, tags, ledger) if drops_none else Tagged(value, tags)

        def read() -> Iterator[Tagged]:
            items: Any = given
            if items is None and not start.is_fresh:
                items = self.begin_by_position(start)
            for position in range(done.leading, 0 if items is None else len(items)):
                # Asked before the item is fetched: that may be the dear part.
                if position not in done and (item := tagged(position, items[position])):
                    yield item
            if items is not None:
                return
            position, values = self._begin(start, ledger, turn)
            for value in self._in_turn(values, turn) if self.is_shared else values:
                if position not in done and (item := tagged(position, value)):
                    yield item
                position += 1
                self._keep_snapshot(position, ledger, turn)

        async def read_async() -> AsyncIterator[Tagged]:
            position, values = self._begin(start, ledger, turn)
            # The lock is held while others run on the loop. None of them waits for it: a later run begins
            # elsewhere.
            async for value in self._in_turn_async(values, turn) if self.is_shared else values:
                if position not in done and (item := tagged(position, value)):
                    yield item
                position += 1
                self._keep_snapshot(position, ledger, turn)

        return read_async() if self.is_async else self._without_thread(read())

    def _without_thread(self, items: Iterator[Tagged]) -> Iterable[Tagged]:
        is_ready = type(self.source if self.fetch is None else self.source.keys) in _READY
        return ReadyItems(items) if is_ready else items

    def _begin(self, start: State, ledger: Ledger, turn: int) -> tuple[int, Any]:
        """Begin or resume an epoch; return the position of the next item, and the iterator."""
        source, position = self.source, 0
        with self._reading(turn):
            if isinstance(source, HasEpochs):
                source.set_epoch(start.epoch)
            if self.is_stateful and start.snapshot is not None:
                position = start.snapshot.position
                # Copied: the same snapshot may be needed for another try.
                source.load_state_dict(copy.deepcopy(start.snapshot.state))
            items = source if self.fetch is None else source.keys
            iterator = aiter(items) if self.is_async else iter(items)
            self._epoch_left = getattr(source, "epoch", None)
        # The next iteration over an iterator leads back to here. What is iterated anew needs no state
        # to begin with. Not before set_epoch(), which tells the iterator its epoch.
        if self.is_iterator and start.snapshot is None:
            self._keep_snapshot(position, ledger, turn)
        return position, iterator

    def begin_by_position(self, start: State) -> Any:
        """Begin an epoch whose items are asked for by position; ``None`` if the source has none."""
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

    def _in_turn(self, iterator: Iterator[Any], turn: int) -> Iterator[Any]:
        while True:
            with self._reading(turn):
                value = next(iterator, _END)
            if value is _END:
                return
            yield value

    async def _in_turn_async(self, iterator: AsyncIterator[Any], turn: int) -> AsyncIterator[Any]:
        while True:
            with self._reading(turn):
                value = await anext(iterator, _END)
            if value is _END:
                return
            yield value

    def _keep_snapshot(self, position: int, ledger: Ledger, turn: int) -> None:
        if self.is_stateful and position % _SNAPSHOT_INTERVAL == 0:
            with self._reading(turn):
                ledger.keep_snapshot(self.snapshot(position))


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


def tagged_stage(
    fn: Callable[..., Any],
    ledger: Ledger,
    name: str = "",
    make_rng: Callable[[int], object] | None = None,
    **options: Any,
) -> PipeConfig:
    """Make the description of a stage of :func:`stage_of`, with the options of its place in the pipeline."""
    around = lambda call, _: stage_of(call, ledger, make_rng)  # noqa: E731
    return PipeConfig(fn, name, around=around, **options)


# `call` applies the user's function to the value of what is tagged.
_Call: TypeAlias = Callable[[Any], Any]


class One:
    """A call that gives one result: tags it, or settles what it is for when nothing comes of it."""

    def __init__(self, tagged: Any, ledger: Ledger) -> None:
        self._tags = tags_of(tagged)
        self._ledger = ledger

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, _traceback: object) -> None:
        if error is not None and not ends_with_run(error):
            self._ledger.settle(self._tags)

    def tag(self, value: Any) -> Tagged | None:
        """Return the result, or ``None`` if it is dropped."""
        return _tagged(value, self._tags, self._ledger)


class _Several(One):
    """A call that gives several samples of one item, with the offset of each in its tag."""

    def __init__(self, tagged: Tagged, ledger: Ledger) -> None:
        super().__init__(tagged, ledger)
        ((self._position, _),) = tagged.tags
        self._done = ledger.done_offsets(self._position)
        self._count = 0

    def __exit__(self, _: object, error: BaseException | None, _traceback: object) -> None:
        if error is None or not ends_with_run(error):
            self._ledger.count_samples(self._position, self._count)

    def tag(self, value: Any) -> Tagged | None:
        """Return the next sample, or ``None`` if it is dropped or was done before the resume."""
        # Counted even if it is dropped, so that offsets are the same after a resume.
        offset, self._count = self._count, self._count + 1
        if offset in self._done:
            return None
        return _tagged(value, ((self._position, offset),), self._ledger)


def _function(call: _Call, ledger: Ledger) -> Callable[[Any], Any]:
    # Not by the context that the others have: it would take as long as all else here.
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
        with One(tagged, ledger) as one:
            return one.tag(await call(tagged))

    return stage


def _generator_function(call: _Call, ledger: Ledger) -> Callable[[Any], Any]:
    def stage(item: Tagged) -> Iterator[Tagged]:
        with _Several(item, ledger) as several:
            for value in call(item):
                if sample := several.tag(value):
                    yield sample

    return stage


def _async_generator_function(call: _Call, ledger: Ledger) -> Callable[[Any], Any]:
    async def stage(item: Tagged) -> AsyncIterator[Tagged]:
        with _Several(item, ledger) as several:
            async with aclosing(call(item)) as values:
                async for value in values:
                    if sample := several.tag(value):
                        yield sample

    return stage


_KINDS = {
    "function": _function,
    "async": _coroutine_function,
    "generator": _generator_function,
    "async_generator": _async_generator_function,
}


def ends_with_run(error: BaseException) -> bool:
    """Whether a call was ended by its run, not by itself: the next run makes it again."""
    if not isinstance(error, CancelledError):
        return isinstance(error, GeneratorExit)
    # The function may raise it as well, and has failed then. In a thread there is no task to cancel.
    with suppress(RuntimeError):
        task = current_task()
        return task is not None and task.cancelling() > 0
    return False


def _tagged(value: Any, tags: Sequence[Tag], ledger: Ledger) -> Tagged | None:
    """Tag a result; ``None`` drops what it was made of."""
    if value is None:
        ledger.settle(tags)
        return None
    return Tagged(value, tags)
