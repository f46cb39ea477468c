"""Items of a DataLoader: their tags and random numbers, a cache of samples, and stand-ins for bad items."""

from __future__ import annotations

import pickle
import threading
from asyncio import CancelledError, current_task
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from spdl_media._checks import check_int
from spdl_media._resume import Ledger, Tag
from spdl_media.epochs import Purpose, random_bits
from spdl_media.pipeline.failures import PoolBroken, short_repr

if TYPE_CHECKING:
    from spdl_media.pipeline.engine.hub import Node


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


def tag_result(value: Any, tags: Sequence[Tag], ledger: Ledger) -> Tagged | None:
    """Tag a result; ``None`` drops what it was made of."""
    if value is None:
        ledger.settle(tags)
        return None
    return Tagged(value, tags)


def ends_with_run(error: BaseException) -> bool:
    """Whether a call was ended by its run, not by itself: the next run makes it again."""
    if not isinstance(error, CancelledError):
        return isinstance(error, GeneratorExit)
    # The function may raise it as well, and has failed then. In a thread there is no task to cancel.
    with suppress(RuntimeError):
        task = current_task()
        return task is not None and task.cancelling() > 0
    return False


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
        # Unpickled for each use, so that one that is changed in place stays as it was made.
        if kept is not None:
            return pickle.loads(kept)  # noqa: S301  # our own
        sample = await make()
        # Pickling is in vain when the memory is full, which it stays.
        if self._num_bytes < self.max_bytes:
            data = pickle.dumps(sample, pickle.HIGHEST_PROTOCOL)
            with self._lock:
                # Another thread may have made the same sample meanwhile.
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
        items: Those of the epoch, if there is no function.
        ledger: Of the run.
    """

    def __init__(
        self,
        fn: Callable[[Any, BaseException], Any] | None,
        items: Any,
        ledger: Ledger,
    ) -> None:
        self.items = items
        self._fn = fn
        self._ledger = ledger
        self._lock = threading.Lock()
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
            # From here on the call counts by its own result.
            node.end_early()
        if sample is None:
            return None
        tag = StandInTag(tagged.tags[0])
        tag.item, tag.by = tagged.value, by
        return Tagged(sample, (tag,))

    def _count(self, tagged: Tagged, error: BaseException, node: Node) -> None:
        position = tagged.tags[0][0]
        with self._lock:
            is_new = self._turns.get(position) != 1
            self._turns[position] = 1
        if is_new:
            node.fail_early(tagged, error)

    async def _walk(self, position: int, load: _Load, node: Node) -> tuple[Any, int | None]:
        """Walk ahead to the good item that closes the bracket, and note what closes those on the way."""
        # A stack of the bad items that have no good one yet, this one at the bottom.
        count, opened = len(self.items), [position]
        for step in range(self._steps.get(position, 1), count):
            # The consumer has gone, and the rest of the walk may be long.
            if self._ledger.is_closed:
                return None, None
            by = (position + step) % count
            turn, sample = self._turns.get(by), None
            # A good item that was tried is loaded again only if its sample is needed.
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
