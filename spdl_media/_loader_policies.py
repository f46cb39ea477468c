"""What stands in for the items of a DataLoader that fail."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from spdl_media._loader_arguments import OnError
from spdl_media._loader_stages import SharedSource, Tagged, ends_with_run
from spdl_media._resume import Ledger, State, Tag
from spdl_media.pipeline.failures import PoolBroken

if TYPE_CHECKING:
    from spdl_media.pipeline.engine.hub import Node


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


def replaced_in(tags: Iterable[Tag]) -> tuple[Replaced, ...]:
    """Return the rows of a batch in which other samples stand."""
    return tuple(
        Replaced(row, tag[0], tag.item, tag.by)
        for row, tag in enumerate(tags)
        if isinstance(tag, StandInTag)
    )


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
