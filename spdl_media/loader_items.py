"""Items of a DataLoader: tags, calls with random numbers, the sample cache, replacements for bad items."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from spdl_media._checks import check_int
from spdl_media._resume import Ledger, Positions, Tag
from spdl_media.epochs import Purpose, random_bits
from spdl_media.pipeline.executors import kind_of
from spdl_media.pipeline.failures import PoolBroken, short_repr

if TYPE_CHECKING:
    from spdl_media.pipeline.engine.hub import Node


# Makes the sample of an item, with the random numbers of the given position.
Load: TypeAlias = Callable[[Any, int], Awaitable[Any]]


@dataclass(slots=True, eq=False, repr=False)
class Tagged:
    """An item, sample or batch in the pipeline, with the tags of the samples it is made of."""

    value: Any
    tags: Sequence[Tag]

    def __repr__(self) -> str:
        # Failure records show the user's value.
        return short_repr(self.value)


def value_of(tagged: Tagged | list[Tagged]) -> Any:
    """Return the user's value, or the list of values of samples that the pipeline grouped."""
    return [one.value for one in tagged] if isinstance(tagged, list) else tagged.value


def tags_of(tagged: Tagged | list[Tagged]) -> Sequence[Tag]:
    """Return the tags of the samples that a value is made of."""
    return [tag for one in tagged for tag in one.tags] if isinstance(tagged, list) else tagged.tags


class OneResult:
    """Context manager of a call for an item or a batch, whose value tags the result.

    Samples that fail or are dropped are then done.
    """

    def __init__(self, ledger: Ledger, tagged: Tagged | list[Tagged]) -> None:
        self.ledger, self.tagged = ledger, tagged

    def __enter__(self) -> Callable[[Any], Tagged | None]:
        return self.tag

    def tag(self, value: Any) -> Tagged | None:
        """Tag a result. ``None`` drops its samples, which are then done."""
        # The tags now: those of a replacement were set during the call.
        return tag_result(value, tags_of(self.tagged), self.ledger)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None and not is_final(error):
            self.ledger.settle(tags_of(self.tagged))


class SeveralSamples(OneResult):
    """Context manager of a generator's call. Its value tags each sample; ``None`` if it was done before."""

    def __init__(self, ledger: Ledger, tagged: Tagged) -> None:
        super().__init__(ledger, tagged)
        ((self.position, _),) = tagged.tags
        self.done = Positions(dict(ledger.start.partly_done).get(self.position, ()))
        self.count = 0

    def tag(self, value: Any) -> Tagged | None:
        """Tag a sample. It is counted even if it is dropped, so that a resumed epoch has the same offsets."""
        offset, self.count = self.count, self.count + 1
        if offset in self.done:
            return None
        return tag_result(value, ((self.position, offset),), self.ledger)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        # A generator that was left has not given all, even if its cleanup raised an error.
        if error is None or not (is_final(error) or isinstance(error.__context__, GeneratorExit)):
            self.ledger.count_samples(self.position, self.count)


def tag_result(value: Any, tags: Sequence[Tag], ledger: Ledger) -> Tagged | None:
    """Tag a result. A result of ``None`` drops its samples, which are then done."""
    if value is None:
        ledger.settle(tags)
        return None
    return Tagged(value, tags)


def is_final(error: BaseException) -> bool:
    """Whether an error is not the item's, so that the next run repeats it: the run or its pool ended."""
    if not isinstance(error, asyncio.CancelledError):
        return isinstance(error, PoolBroken | GeneratorExit)
    # If the function itself raised CancelledError, it has failed. In a thread there is no task to cancel.
    with suppress(RuntimeError):
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0
    return False


def sample_rng(seed: int, epoch: int, position: int) -> np.random.Generator:
    """Make the random number generator of one item in one epoch.

    A :class:`DataLoader` passes it to a preprocessor with a parameter named ``rng``. Its numbers do not
    depend on threads, on other items, or on stopping and resuming.

    Args:
        seed: Seed of the loader.
        epoch: The epoch, counted from 0.
        position: Position of the item in the epoch, counted from 0. If the source knows its rank (a
            distributed sampler, or a :class:`~spdl_media.source.MapIterator` over one), the position
            among the items of all ranks, ``rank + world_size * position``, so that no two ranks get the
            same numbers.

    Returns:
        NumPy's generator, over PCG64.

    Raises:
        ValueError: An argument is negative.

    Thread safety: safe; each call returns a new generator.
    """
    key = (check_int("epoch", epoch, at_least=0), check_int("position", position, at_least=0))
    seed = check_int("seed", seed, at_least=0)
    return np.random.Generator(random_bits(Purpose.SAMPLE, seed, *key))


@dataclass(frozen=True)
class ItemCall:
    """Reads an item of a dataset and preprocesses it. Picklable if its functions are.

    Attributes:
        steps: The function that reads the item, the preprocessor, or both.
        rng_key: Seed and epoch, if the preprocessor takes ``rng``. The calls then get pairs of an item and
            the position for its random numbers, otherwise items.
    """

    steps: Sequence[Callable[..., Any]]
    rng_key: tuple[int, int] | None

    def __call__(self, request: Any) -> Any:
        """Make the sample of an item."""
        value, steps = self._parts(request)
        for step in steps:
            value = step(value)
            if value is None:
                break
        return value

    def _parts(self, request: Any) -> tuple[Any, Sequence[Callable[..., Any]]]:
        """Return the item, and the functions to apply to it."""
        if self.rng_key is None:
            return request, self.steps
        # The preprocessor is the last step, and the only one that takes `rng`.
        (item, place), (*first, last) = request, self.steps
        return item, [*first, partial(last, rng=sample_rng(*self.rng_key, place))]


class AsyncItemCall(ItemCall):
    """An ItemCall with a step that is a coroutine function; other steps run in a thread."""

    async def __call__(self, request: Any) -> Any:
        """Make the sample of an item."""
        value, steps = self._parts(request)
        for step in steps:
            # This call runs on the event loop and must not block it.
            call = step if kind_of(step) == "async" else partial(asyncio.to_thread, step)
            value = await call(value)
            if value is None:
                break
        return value


class SampleCache:
    """Caches samples in memory. They are pickled, so their size is known and users get independent copies.

    Attributes:
        max_bytes: Limit of their total size. Samples beyond it are not cached.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._num_bytes = 0
        self._samples: dict[Any, bytes] = {}
        self._lock = threading.Lock()

    async def sample(self, make: Load, item: Any, position: int) -> Any:
        """Return the cached sample of an item, or make and cache it.

        Raises:
            TypeError: The item cannot be hashed.
            Exception: The sample cannot be made or pickled.
        """
        kept = self._samples.get(item)
        # Unpickled for each use, so that changing a sample in place does not change the cached one.
        if kept is not None:
            return pickle.loads(kept)  # noqa: S301  # our own
        sample = await make(item, position)
        # Not pickled when the cache is full, because it stays full.
        if self._num_bytes < self.max_bytes:
            data = pickle.dumps(sample, pickle.HIGHEST_PROTOCOL)
            with self._lock:
                # Another thread may have cached the same sample by now.
                if item not in self._samples and self._num_bytes + len(data) <= self.max_bytes:
                    self._num_bytes += len(data)
                    self._samples[item] = data
        return sample

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of a loader begins with an empty cache.
        return SampleCache, (self.max_bytes,)


class Replaced(NamedTuple):
    """A row of a batch whose item failed and was replaced by another sample.

    Attributes:
        row: The row, counted from 0; always 0 without ``batch_size``.
        position: Position of the failed item in the epoch, counted from 0 among the items of this rank.
        item: The failed item as the source gave it; for a dataset, its key.
        by: Position of the item whose sample replaces it; ``None`` if the ``on_error`` function made it.
    """

    row: int
    position: int
    item: Any
    by: int | None


class StandInTag(tuple[int, int | None]):  # noqa: SLOT001  # a tag that says more
    """The tag of a sample that replaces the failed item at that position."""

    item: Any
    by: int | None


@dataclass(eq=False)
class StandIns:
    """Replaces failed items, by a function or by other items, and counts each failure once.

    A good sample replaces at most one failed item. Items are matched like brackets on the ring of positions:
    a failed item opens, a good item closes. The choice therefore depends only on which items are good, not on
    threads or on where an epoch was resumed.

    Attributes:
        fn: The user's function that makes a replacement, if any.
        items: Items of the epoch, if there is no function.
        ledger: The ledger of the run.
    """

    fn: Callable[[Any, BaseException], Any] | None
    items: Any
    ledger: Ledger
    _lock: threading.Lock = field(default_factory=threading.Lock)
    # Results of items that were tried, by position: 1 failed, -1 good, 0 dropped by the preprocessor.
    _turns: dict[int, int] = field(default_factory=dict)
    # Steps from failed items to their replacements, so that a run of failed items is walked only once.
    _steps: dict[int, int] = field(default_factory=dict)

    async def find(self, tagged: Tagged, error: BaseException, load: Load, node: Node) -> Any:
        """Return the sample that replaces a failed item, whose tag then says so; ``None`` drops the item.

        Raises:
            PoolBroken: No further item can be loaded.
            BaseException: The error of the function.
        """
        sample, by = None, None
        if self.fn is not None:
            try:
                sample = self.fn(tagged.value, error)
            except BaseException as own:
                # Counted by the stage, as the failure of this item.
                own.__context__ = error
                raise
        self._count(tagged, error, node)
        try:
            if self.fn is None:
                sample, by = await self._walk(tagged.tags[0][0], load, node)
        finally:
            # From here on, the stage counts the call by its own result.
            node.end_early()
        if sample is not None:
            tag = StandInTag(tagged.tags[0])
            tag.item, tag.by = tagged.value, by
            tagged.tags = (tag,)
        return sample

    def _count(self, tagged: Tagged, error: BaseException, node: Node) -> None:
        position = tagged.tags[0][0]
        with self._lock:
            is_new = self._turns.get(position) != 1
            self._turns[position] = 1
        if is_new:
            node.fail_early(tagged, error)

    async def _walk(self, position: int, load: Load, node: Node) -> tuple[Any, int | None]:
        """Walk ahead to the good item that replaces this one; record replacements of others on the way."""
        # Stack of the failed items without a replacement, this one at the bottom.
        count, opened = len(self.items), [position]
        for step in range(self._steps.get(position, 1), count):
            # Stop if the consumer has gone, because the rest of the walk may be long.
            if self.ledger.is_closed:
                return None, None
            by = (position + step) % count
            turn, sample = self._turns.get(by), None
            # An item known to be good is loaded again only if its sample is needed.
            if turn is None or (turn < 0 and len(opened) == 1):
                turn, sample = await self._try(by, position, load, node)
            if turn > 0:
                opened.append(by)
            elif turn < 0:
                start = opened.pop()
                self._steps[start] = (by - start) % count
                if not opened:
                    return sample, by
        # The others on the stack have no replacement either.
        self._steps.update(dict.fromkeys(opened, count))
        return None, None

    async def _try(self, by: int, position: int, load: Load, node: Node) -> tuple[int, Any]:
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
