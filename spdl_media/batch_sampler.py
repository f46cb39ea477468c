"""Batches of samples of similar length, so that little of a batch is padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from spdl_media._checks import check_int
from spdl_media._epochs import Mapped
from spdl_media.samplers import (
    DistributedDeterministicSampler,
    DistributedRandomSampler,
    Purpose,
    Uneven,
    permutation,
    random_bits,
)

__all__ = ("BatchByLength",)

# Samples are mixed among those of similar length: a part of all such as this one, if it is a batch or more.
_GROUPS = 32


class BatchByLength:
    """Lists of indices of samples of similar length, in another order and combination each epoch.

    It is a source of a :class:`~spdl_media.DataLoader`, whose preprocessor then loads a whole batch; and a
    ``batch_sampler`` of PyTorch's. The order depends on the arguments and the epoch alone, and all epochs
    have equally many batches. Each iteration is the next epoch.

    Args:
        lengths: The length of each sample, in any unit, such as seconds or samples.
        batch_size: Samples of a batch; with ``max_total`` at most so many.
        max_total: At most so much in a batch with its padding: its longest length times its number of
            samples.
        shuffle: ``False``: the longest first, and the same in each epoch.
        seed: All ranks must have the same.
        rank: The process that the batches are for, as for
            :class:`~spdl_media.source.DistributedRandomSampler`.
        world_size: How many processes there are.
        uneven: What becomes of a last round with fewer batches than ranks: ``"drop"``, ``"pad"`` or
            ``"keep"``. ``None`` is ``"drop"``, which leaves out other batches in each epoch.

    Raises:
        ValueError: There are no lengths, some are not positive and finite, one is more than ``max_total``,
            neither limit is given, or one is not positive, or there are fewer batches than ranks.

    Thread safety: iterators are independent; begin each in one thread at a time.

    Example:
        >>> list(BatchByLength([3, 9, 2, 8, 3], max_total=18, shuffle=False))
        [[1, 3], [0, 4, 2]]
    """

    def __init__(
        self,
        lengths: Sequence[float] | npt.NDArray[np.number],
        *,
        batch_size: int | None = None,
        max_total: float | None = None,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        uneven: Uneven | None = None,
    ) -> None:
        sizes = np.asarray(lengths, np.float64)
        if sizes.ndim != 1 or not sizes.size or not (np.isfinite(sizes) & (sizes > 0)).all():
            raise ValueError(
                "lengths must be positive numbers, one for each sample, and at least one"
            )
        if batch_size is None and max_total is None:
            raise ValueError(
                "give batch_size=, max_total= or both: nothing says how large a batch is"
            )
        most = sizes.size if batch_size is None else check_int("batch_size", batch_size)
        order = np.argsort(-sizes, kind="stable")
        longest = sizes[order[0]]
        if max_total is not None and not longest <= max_total:
            raise ValueError(
                f"sample {order[0]} has length {longest:g}, which is more than max_total={max_total:g}"
            )
        # Samples of a group have at most the length of its first, so any of them make a batch of its size.
        self._groups: list[tuple[npt.NDArray[np.int64], int]] = []
        start = 0
        while start < sizes.size:
            count = most
            if max_total is not None:
                count = min(most, int(max_total // sizes[order[start]]))
            stop = start + max(1, sizes.size // (_GROUPS * count)) * count
            self._groups.append((order[start:stop], count))
            start = stop
        self._shuffle, self._seed = shuffle, check_int("seed", seed, at_least=0)
        number = sum(-(-len(group) // count) for group, count in self._groups)
        place = {"rank": rank, "world_size": world_size, "uneven": uneven or "drop"}
        self.sampler: DistributedDeterministicSampler | DistributedRandomSampler
        if shuffle:
            self.sampler = DistributedRandomSampler(number, seed=seed, **place)  # type: ignore[arg-type]  # by name
        else:
            self.sampler = DistributedDeterministicSampler(number, **place)  # type: ignore[arg-type]

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration."""
        return self.sampler.epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration.

        Raises:
            ValueError: The epoch is negative.
        """
        self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        """The number of batches that the rank gets in an epoch."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.begin_by_position(self.epoch))

    def begin_by_position(self, epoch: int) -> Sequence[list[int]]:
        """Begin an epoch; return its batches by position, in the order of an iteration.

        Raises:
            ValueError: The epoch is negative.
        """
        order = self.sampler.begin_by_position(epoch)
        batches = list(self._batches(epoch))
        return Mapped(lambda number: batches[number].tolist(), order)

    def _batches(self, epoch: int) -> Iterator[npt.NDArray[np.int64]]:
        bits = random_bits(Purpose.BATCHES, self._seed, epoch)
        for group, count in self._groups:
            mixed = group[permutation(bits, len(group))] if self._shuffle else group
            yield from (mixed[start : start + count] for start in range(0, len(mixed), count))
