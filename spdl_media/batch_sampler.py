"""Batches of samples of similar length, so that little of a batch is padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from spdl_media._checks import check_int
from spdl_media.epochs import Mapped, Pairs
from spdl_media.samplers import (
    DistributedRandomSampler,
    Purpose,
    Uneven,
    permutation,
    random_bits,
)

__all__ = ("BatchByLength",)

# Samples are mixed among those of similar length: a part of all such as this one, if it is a batch or more.
_GROUPS = 32


class BatchByLength(DistributedRandomSampler):
    """Lists of indices of samples of similar length, in another order and combination each epoch.

    It is a source of a :class:`~spdl_media.DataLoader`, whose preprocessor then loads a whole batch; and a
    ``batch_sampler`` of PyTorch's. The order depends on the arguments and the epoch alone, and all epochs
    have equally many batches. Each iteration is the next epoch.

    Args:
        lengths: The length of each sample, in any unit, such as seconds or samples.
        batch_size: Samples of a batch; with ``max_total`` at most so many.
        max_total: At most so much in a batch with its padding: its longest length times its number of
            samples.
        rank: The process that the batches are for, as for
            :class:`~spdl_media.source.DistributedRandomSampler`.
        world_size: How many processes there are.
        seed: All ranks must have the same.
        uneven: What becomes of a last round with fewer batches than ranks: ``"drop"``, ``"pad"`` or
            ``"keep"``. ``None`` is ``"drop"``, which leaves out other batches in each epoch.

    Raises:
        ValueError: There are no lengths, some are not positive and finite, one is more than ``max_total``,
            neither limit is given, or one is not positive, or there are fewer batches than ranks.

    Thread safety: iterators are independent; begin each in one thread at a time.

    Example:
        >>> list(BatchByLength([3, 9, 2, 8, 3], max_total=18))
        [[1, 3], [4, 2, 0]]
    """

    def __init__(
        self,
        lengths: Sequence[float] | npt.NDArray[np.number],
        *,
        batch_size: int | None = None,
        max_total: float | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        seed: int = 0,
        uneven: Uneven | None = None,
    ) -> None:
        sizes = np.asarray(lengths, np.float64)
        if sizes.ndim != 1 or not sizes.size or not (np.isfinite(sizes) & (sizes > 0)).all():
            raise ValueError(
                "lengths must be positive numbers, one for each sample, and at least one"
            )
        if batch_size is None and max_total is None:
            raise ValueError(
                "nothing says how large a batch is: give batch_size=, max_total= or both"
            )
        if max_total is not None and not 0 < max_total < np.inf:
            raise ValueError(f"max_total must be a finite number above 0, not {max_total!r}")
        most = sizes.size if batch_size is None else check_int("batch_size", batch_size)
        order, start = np.argsort(-sizes, kind="stable"), 0
        # Each has samples and how many make a batch: any of them, since none is longer than the first.
        self._groups: list[tuple[npt.NDArray[np.int64], int]] = []
        while start < sizes.size:
            longest = sizes[order[start]]
            count = most if max_total is None else min(most, int(max_total // longest))
            if count < 1:
                raise ValueError(
                    f"sample {order[start]} has length {longest:g}, more than max_total={max_total:g}"
                )
            stop = start + max(1, sizes.size // (_GROUPS * count)) * count
            self._groups.append((order[start:stop], count))
            start = stop
        number = sum(-(-len(group) // count) for group, count in self._groups)
        super().__init__(number, rank=rank, world_size=world_size, seed=seed, uneven=uneven)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.begin_by_position(self.epoch))

    def begin_by_position(self, epoch: int, before: Pairs = ()) -> Sequence[Any]:
        """Begin an epoch; return its batches by position, in the order of an iteration.

        Raises:
            ValueError: The epoch is negative.
        """
        order, batches = super().begin_by_position(epoch, before), list(self._batches(epoch))
        return Mapped(lambda number: batches[number].tolist(), order)

    def _batches(self, epoch: int) -> Iterator[npt.NDArray[np.int64]]:
        bits = random_bits(Purpose.BATCHES, self.seed, epoch)
        for group, count in self._groups:
            mixed = group[permutation(bits, len(group))]
            yield from (mixed[start : start + count] for start in range(0, len(mixed), count))
