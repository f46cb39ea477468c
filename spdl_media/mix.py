"""A mixture of sources in given proportions, read by position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from spdl_media._checks import check_int, check_weights
from spdl_media._epochs import is_indexed, place_of
from spdl_media.samplers import Purpose, permutation, random_bits
from spdl_media.source import MapIterator

__all__ = ("Mix",)


class Mix(MapIterator[Any]):
    """Items of several sources in given proportions, in random order.

    An epoch has exactly the share of each source that its weight says, to the nearest whole number. A source
    that is used up goes on with its own next epoch, and one that is not goes on in the next epoch of the
    mixture where it was: no item of a source comes again before all others have come.

    The order depends on ``seed`` and the epoch alone. A :class:`~spdl_media.DataLoader` resumes by index, and
    reads map-style datasets in its threads. Ranks are split by the sources, each by itself.

    Args:
        sources: What is read by position: :class:`~spdl_media.ImageFolder`,
            :class:`~spdl_media.source.MapIterator`, samplers, sequences, map-style datasets, other mixtures.
        weights: The proportions of the sources in an epoch. 0: none. ``None``: those of their lengths, so
            that each item comes once.
        length: Items of an epoch, of this rank. ``None``: the sum of the lengths of the sources that have
            weight.
        seed: Of the order. All ranks should have the same.

    Attributes:
        counts: Items of each source in an epoch.
        epoch: The epoch of the next iteration.

    Raises:
        TypeError: A source cannot be read by position, or has no length.
        ValueError: There are no sources, or a source with weight is empty; sources are of other ranks than
            each other; weights that are negative, not finite, all zero, or not one for each.

    Thread safety: iterators are independent; begin each in one thread at a time.

    Example:
        >>> mix = Mix([["a", "b", "c"], range(9)], weights=[1, 1])
        >>> mix.counts, sorted(map(str, mix))
        ([6, 6], ['0', '1', '2', '3', '4', '5', 'a', 'a', 'b', 'b', 'c', 'c'])
    """

    def __init__(
        self,
        sources: Sequence[Any],
        weights: Sequence[float] | None = None,
        *,
        length: int | None = None,
        seed: int = 0,
    ) -> None:
        if not sources:
            raise ValueError("sources must hold at least one source, and is empty")
        parts = [_by_position(position, source) for position, source in enumerate(sources)]
        lengths = [len(part) for part in parts]
        shares = check_weights(lengths if weights is None else weights, len(parts), "source")
        for position, (size, share) in enumerate(zip(lengths, shares, strict=True)):
            if share and not size:
                raise ValueError(f"sources[{position}] has no items; give it the weight 0")
        total = sum(size for size, share in zip(lengths, shares, strict=True) if share)
        total = total if length is None else check_int("length", length)
        order = _MixOrder(parts, _apportioned(total, shares), seed)
        super().__init__(_Values(parts), order)
        self.counts = order.counts.tolist()


def _by_position(position: int, source: Any) -> MapIterator[Any]:
    """The source as keys and their values."""
    if isinstance(source, MapIterator):
        part = source
    elif hasattr(source, "begin_by_position") or (
        is_indexed(source) and hasattr(source, "set_epoch")
    ):
        part = MapIterator(_Same(), source)
    elif is_indexed(source):
        part = MapIterator(source)
    else:
        raise TypeError(
            f"sources[{position}], a {type(source).__name__}, cannot be read by position. Pass a list, a "
            "map-style dataset or a MapIterator; MergeIterator of spdl_media.source takes any iterables"
        )
    try:
        len(part)
    except TypeError as error:
        raise TypeError(f"sources[{position}]: {error}") from error
    return part


def _apportioned(total: int, shares: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Whole numbers in proportion to the shares: rounded down, and then up where most is missing."""
    exact = total * (shares / shares.sum())
    counts: npt.NDArray[np.int64] = np.floor(exact).astype(np.int64)
    most = np.argsort(counts - exact, kind="stable")
    counts[most[: total - counts.sum()]] += 1
    return counts


class _Same:
    """Values that are their own keys."""

    def __getitem__(self, key: Any) -> Any:
        return key


class _Values:
    """The value of a source's key."""

    def __init__(self, parts: Sequence[MapIterator[Any]]) -> None:
        self._parts = parts

    def __getitem__(self, key: tuple[int, Any]) -> Any:
        source, own = key
        return self._parts[source].mapping[own]


class _MixOrder:
    """The sampler of a mixture: pairs of a source's number and the key that it has there."""

    def __init__(
        self, parts: Sequence[MapIterator[Any]], counts: npt.NDArray[np.int64], seed: int
    ) -> None:
        self._parts = parts
        self.counts = counts
        self.seed = check_int("seed", seed, at_least=0)
        places = {place_of(part) for part, count in zip(parts, counts, strict=True) if count}
        if len(places) > 1:
            raise ValueError(
                f"the sources are of different (rank, world size): {sorted(places)}. Split each by the same, "
                "a list or dataset by MapIterator(it, DistributedRandomSampler(len(it)))"
            )
        self.rank, self.world_size = places.pop()
        self.epoch = 0

    def __len__(self) -> int:
        return int(self.counts.sum())

    def set_epoch(self, epoch: int) -> None:
        self.epoch = check_int("epoch", epoch, at_least=0)

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return iter(self.begin_by_position(self.epoch))

    def begin_by_position(self, epoch: int) -> Sequence[tuple[int, Any]]:
        self.set_epoch(epoch + 1)
        order = permutation(random_bits(Purpose.MIX, self.seed, epoch), len(self))
        chosen = np.repeat(np.arange(len(self.counts)), self.counts)[order]
        # Which of its own items a source gives, counted from the first epoch on.
        numbers = np.empty_like(order)
        firsts = epoch * self.counts
        numbers[np.argsort(chosen, kind="stable")] = np.concatenate(
            [np.arange(first, first + n) for first, n in zip(firsts, self.counts, strict=True)]
        )
        return _Keys(self._parts, chosen, numbers)


class _Keys(Sequence[tuple[int, Any]]):
    """The keys of one epoch. Of each source the epoch is kept that was asked for last."""

    def __init__(
        self,
        parts: Sequence[MapIterator[Any]],
        chosen: npt.NDArray[np.int64],
        numbers: npt.NDArray[np.int64],
    ) -> None:
        self._parts, self._chosen, self._numbers = parts, chosen, numbers
        self._begun: dict[int, tuple[int, Any]] = {}

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, position: Any) -> Any:
        if isinstance(position, slice):
            return [self[one] for one in range(*position.indices(len(self)))]
        source = int(self._chosen[position])
        part = self._parts[source]
        epoch, place = divmod(int(self._numbers[position]), len(part))
        begun, keys = self._begun.get(source, (-1, None))
        if begun != epoch:
            keys = part.begin_keys(epoch)
            self._begun[source] = epoch, keys
        return source, keys[place]
