"""Items of a DataLoader: their random numbers, the stages that make samples of them, and stand-ins."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from types import CoroutineType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from spdl_media._checks import check_int
from spdl_media._resume import Ledger, State
from spdl_media.epochs import Purpose, random_bits
from spdl_media.loader_arguments import OnError
from spdl_media.loader_stages import One, SharedSource, Tagged, ends_with_run, tagged_stage
from spdl_media.pipeline import PipeConfig
from spdl_media.pipeline.executors import ExecutorConfig, kind_of, name_of, refuse_coroutine
from spdl_media.pipeline.failures import PoolBroken

if TYPE_CHECKING:
    from spdl_media.pipeline.engine.hub import Node


def sample_rng(seed: int, epoch: int, position: int) -> np.random.Generator:
    """Make the random number generator of one item in one epoch.

    A :class:`DataLoader` passes it to a preprocessor with a parameter named ``rng``. Its numbers
    depend neither on threads, nor on other items, nor on a stop and resume.

    Args:
        seed: Seed of the loader.
        epoch: The epoch, counted from 0.
        position: Position of the item in the epoch, counted from 0. If the source knows its rank (a
            distributed sampler, or a :class:`~spdl_media.source.MapIterator` over one), the
            position among the items of all ranks, ``rank + world_size * position``, so that no two
            ranks get the same numbers.

    Returns:
        NumPy's generator, over PCG64.

    Raises:
        ValueError: One of the three is negative.

    Thread safety: each call gives a generator of its own.
    """
    key = (check_int("epoch", epoch, at_least=0), check_int("position", position, at_least=0))
    return np.random.Generator(
        random_bits(Purpose.SAMPLE, check_int("seed", seed, at_least=0), *key)
    )


@dataclass(frozen=True)
class ItemCall:
    """Reads an item of a dataset and preprocesses it. Can be pickled if its parts can.

    Attributes:
        fetch: Gives the value for a key.
        preprocessor: Makes the sample of the value.
        rng_key: Seed and epoch, if the preprocessor takes ``rng``.
    """

    fetch: Callable[[Any], Any] | None
    preprocessor: Callable[..., Any] | None
    rng_key: tuple[int, int] | None

    def __call__(self, request: tuple[Any, int]) -> Any:
        """Make the sample of an item, with the random numbers of a place."""
        value, place = request
        for step in self._steps(place):
            value = step(value)
            if value is None:
                break
        return value

    def _steps(self, place: int) -> Iterator[Callable[[Any], Any]]:
        if self.fetch is not None:
            yield self.fetch
        if (fn := self.preprocessor) is not None:
            yield fn if self.rng_key is None else partial(fn, rng=sample_rng(*self.rng_key, place))


class AsyncItemCall(ItemCall):
    """The same where one of the two is a coroutine function; the other one runs in a thread."""

    async def __call__(self, request: tuple[Any, int]) -> Any:
        """Run both on one item."""
        value, place = request
        for step in self._steps(place):
            is_async = kind_of(step) == "async"
            value = await (step(value) if is_async else asyncio.to_thread(step, value))
            if value is None:
                break
        return value


class SampleCache:
    """Keeps samples in memory, pickled: so their bytes are known, and who changes a sample changes no other.

    Attributes:
        max_bytes: What they may take together. What comes later is not kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._num_bytes = 0
        self._samples: dict[Any, bytes] = {}
        self._lock = threading.Lock()

    async def sample(self, item: Any, make: Callable[[], Awaitable[Any]]) -> Any:
        """Return the sample of an item, made if it is not kept.

        Raises:
            TypeError: The item cannot be hashed.
            Exception: The sample cannot be made or pickled.
        """
        try:
            kept = self._samples.get(item)
        except TypeError as error:
            raise TypeError(
                f"cache= keeps samples by their items, and one is no key: {error}. Take paths or indices, as "
                "of MapIterator(dataset)"
            ) from error
        if kept is not None:
            return pickle.loads(kept)  # noqa: S301  # our own
        sample = await make()
        if self._num_bytes < self.max_bytes:
            data = pickle.dumps(sample, pickle.HIGHEST_PROTOCOL)
            with self._lock:
                if item not in self._samples and self._num_bytes + len(data) <= self.max_bytes:
                    self._num_bytes += len(data)
                    self._samples[item] = data
        return sample

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of a loader begins with an empty one.
        return SampleCache, (self.max_bytes,)


class Replaced(NamedTuple):
    """A row of a batch whose own item failed, so that another sample stands in it.

    Attributes:
        row: The row, counted from 0; without ``batch_size`` always 0.
        position: Position in the epoch of the item that failed, counted from 0 in the share of this rank.
        item: That item, as the source gave it; of a dataset, its key.
        by: Position of the good item whose sample stands in; ``None`` for the result of a function.
    """

    row: int
    position: int
    item: Any
    by: int | None


class StandInTag(tuple[int, int | None]):  # noqa: SLOT001  # a tag that says more
    """The tag of a sample that stands in for the item at that position."""

    item: Any
    by: int | None


# Makes the sample of an item, with the random numbers of a position.
_Load: TypeAlias = Callable[[Any, int], Awaitable[Any]]


class StandIns:
    """Has each failure counted once, and finds what stands in for the item: by a function, or another item.

    Good samples go in the place of bad ones, each of one at most, as brackets are matched. A bad item is an
    opening bracket, a good one closes it, and the positions form a ring. So the choice depends on which items
    are good and on nothing else: not on threads, nor on where an epoch was resumed.

    Args:
        fn: A function of the user's that makes the sample.
        items: Those of the epoch, without a function.
        ledger: Of the run.
    """

    def __init__(
        self, fn: Callable[[Any, BaseException], Any] | None, items: Sequence[Any], ledger: Ledger
    ) -> None:
        self.items = items
        self._fn = fn
        self._ledger = ledger
        self._lock = threading.Lock()
        self._counted: set[int] = set()
        # Of the items that were tried: 1 is bad, -1 good, and 0 one that the preprocessor drops.
        self._turns: dict[int, int] = {}
        # From bad items to what closes them: else each of a long run of them would walk over all the others.
        self._steps: dict[int, int] = {}

    async def find(
        self, tagged: Tagged, error: BaseException, load: _Load, node: Node
    ) -> Tagged | None:
        """Return what stands in for an item that failed; ``None`` drops it.

        Raises:
            PoolBroken: No item can be loaded any more.
            BaseException: What the function raised.
        """
        sample, by = None, None
        if self._fn is not None:
            try:
                sample = self._fn(tagged.value, error)
            except BaseException as own:
                # Counted by the stage, as the failure of this item.
                own.__context__ = error
                raise
        self._count(tagged, error, node)
        try:
            if self._fn is None:
                sample, by = await self._walk(tagged.tags[0][0], load, node)
        finally:
            node.end_early()
        if sample is None:
            return None
        tag = StandInTag(tagged.tags[0])
        tag.item, tag.by = tagged.value, by
        return Tagged(sample, (tag,))

    def _count(self, tagged: Tagged, error: BaseException, node: Node) -> None:
        position = tagged.tags[0][0]
        with self._lock:
            is_new = position not in self._counted
            self._counted.add(position)
        if is_new:
            node.fail_early(tagged, error)

    async def _walk(self, position: int, load: _Load, node: Node) -> tuple[Any, int | None]:
        """Walk ahead to the good item that closes the bracket, and note what closes those on the way."""
        count, opened = len(self.items), [position]
        self._turns[position] = 1
        for step in range(self._steps.get(position, 1), count):
            # The consumer has gone, and the way may be long.
            if self._ledger.is_closed:
                return None, None
            by = (position + step) % count
            turn, sample = self._turns.get(by), None
            if turn is None or (turn < 0 and len(opened) == 1):
                turn, sample = await self._try(by, position, load, node)
            if turn > 0:
                opened.append(by)
            elif turn < 0:
                start = opened.pop()
                self._steps[start] = (by - start) % count
                if not opened:
                    return sample, by
        # Nothing is left for the others either.
        self._steps.update(dict.fromkeys(opened, count))
        return None, None

    async def _try(self, by: int, position: int, load: _Load, node: Node) -> tuple[int, Any]:
        turn, sample, item = 1, None, None
        try:
            item = self.items[by]
            sample = await load(item, position)
            turn = 0 if sample is None else -1
        except BaseException as error:
            if is_final(error):
                raise
            self._count(Tagged(item, ((by, None),)), error, node)
        self._turns[by] = turn
        return turn, sample


def is_final(error: BaseException) -> bool:
    """Whether an error says nothing of an item: the run ends, or its pool."""
    return isinstance(error, PoolBroken) or ends_with_run(error)


def stand_ins_of(
    on_error: OnError, source: SharedSource, start: State, ledger: Ledger
) -> StandIns | None:
    """Make what finds stand-ins in a run; if among the items of the source, begin its epoch.

    Raises:
        ValueError: The source has no positions at which to look.
    """
    if callable(on_error):
        return StandIns(on_error, (), ledger)
    if on_error != "replace":
        return None
    items = source.begin_by_position(start)
    if items is None:
        raise ValueError(
            "on_error='replace' looks for another good item by its position, and the source, a "
            f"{type(source.source).__name__}, can only be read from its start; pass a sequence, a sampler or "
            "MapIterator(dataset, sampler), or a function as on_error"
        )
    return StandIns(None, items, ledger)


@dataclass
class ItemStages:
    """Makes the stages in which items are read and preprocessed.

    Attributes:
        fetch: Gives the value for a key.
        preprocessor: Makes the sample of the value.
        rng_key: Seed and epoch, if the preprocessor takes ``rng``.
        place: Gives the place of the item at a position in the order of all ranks.
        ledger: Of the run.
        stand_ins: Finds what stands in for an item.
        executor: Where the calls are made.
        cache: Keeps samples for later epochs.
    """

    fetch: Callable[[Any], Any] | None
    preprocessor: Callable[..., Any] | None
    rng_key: tuple[int, int] | None
    place: Callable[[int], int]
    ledger: Ledger
    stand_ins: StandIns | None
    executor: Executor | ExecutorConfig | None
    cache: SampleCache | None

    def make(self, parallel: Callable[..., dict[str, Any]]) -> list[PipeConfig]:
        """Make the stages: one, if stand-ins, an executor or a cache need the call in one piece.

        Args:
            parallel: Gives the options of a stage by its function and executor.
        """
        fetch, preprocessor, rng_key = self.fetch, self.preprocessor, self.rng_key
        if self.stand_ins or self.executor or self.cache:
            has_calls = fetch is not None or preprocessor is not None
            return [self._whole(parallel)] if has_calls else []
        stages = []
        if fetch is not None:
            # In the threads: to read an item of a dataset is often the dear part.
            stages.append(tagged_stage(fetch, self.ledger, "dataset", **parallel(fetch)))
        if preprocessor is not None:
            make_rng = None
            if rng_key is not None:
                make_rng = lambda position: sample_rng(*rng_key, self.place(position))  # noqa: E731
            options = parallel(preprocessor)
            stages.append(tagged_stage(preprocessor, self.ledger, make_rng=make_rng, **options))
        return stages

    def _whole(self, parallel: Callable[..., dict[str, Any]]) -> PipeConfig:
        steps = [fn for fn in (self.fetch, self.preprocessor) if fn is not None]
        item_call = AsyncItemCall if "async" in map(kind_of, steps) else ItemCall
        call: Callable[..., Any] = item_call(self.fetch, self.preprocessor, self.rng_key)
        options = parallel(call, self.executor)
        is_bare = self.executor is not None and self.fetch is None and self.rng_key is None
        if is_bare:
            # A sub-interpreter could not import the class above.
            call = steps[0]
        name = "dataset" if self.preprocessor is None else name_of(self.preprocessor)
        return PipeConfig(call, name, around=partial(self._around, is_bare=is_bare), **options)

    def _around(
        self, call: Callable[..., Any], node: Node, *, is_bare: bool
    ) -> Callable[[Tagged], Any]:
        """Make what this process calls around a call that an executor may make elsewhere."""
        is_async, stand_ins = kind_of(call) == "async", self.stand_ins

        async def make(item: Any, position: int) -> Any:
            result = call(item if is_bare else (item, self.place(position)))
            if is_async:
                return await result
            if isinstance(result, CoroutineType):
                refuse_coroutine(result, name_of(self.preprocessor or call))
            return result

        async def load(item: Any, position: int) -> Any:
            if self.cache is None:
                return await make(item, position)
            return await self.cache.sample(item, partial(make, item, position))

        async def stage(tagged: Tagged) -> Tagged | None:
            with One(tagged, self.ledger) as one:
                try:
                    return one.tag(await load(tagged.value, tagged.tags[0][0]))
                except BaseException as error:
                    if stand_ins is None or is_final(error):
                        raise
                    failure = error
                # Not while the error is handled, which else were the context of all that follow.
                return await stand_ins.find(tagged, failure, load, node) or one.tag(None)

        return stage if is_async else lambda tagged: _finished(stage(tagged))


def _finished(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waited")
