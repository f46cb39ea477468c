"""Indices for the processes of a distributed training, each of which gets its own part.

All processes compute the same order of the whole epoch, and process ``rank`` of ``world_size`` takes
the positions ``rank``, ``rank + world_size``, ``rank + 2 * world_size`` and so on. So the order of
training, over all processes, does not depend on how many there are, unless samples are dropped or
repeated.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Literal, Self, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from spdl_media._checks import check_choice, check_int, check_weights, warn_caller
from spdl_media.epochs import (
    Mapped,
    Pairs,
    Purpose,
    permutation,
    random_bits,
    uniform,
    weighted_choice,
)

__all__ = (
    "BatchByLength",
    "DistributedDeterministicSampler",
    "DistributedRandomSampler",
    "Uneven",
)

Uneven: TypeAlias = Literal["drop", "pad", "keep"]
"""Treatment of a last round that is too short for all ranks: left out, filled from the start, or kept."""

# Samples are mixed among those of similar length: a part of all such as this one, if it is a batch or more.
_GROUPS = 32
# Indices that are turned into Python's ints at a time: quick, and little memory next to the order itself.
_CHUNK = 4096


class DistributedSampler:
    """Base of both samplers: ranks, epochs, and the rank's part of an order.

    Attributes:
        rank: The process that the indices are for.
        world_size: How many processes there are.
        epoch: The epoch of the next iteration.
        num_draws: Indices of an epoch, over all ranks.
    """

    _remedy = 'uneven="pad" or uneven="keep"'

    def __init__(
        self,
        n: int,
        rank: int | None,
        world_size: int | None,
        uneven: Uneven | None,
        *,
        drop: bool | None = None,
        num_draws: int | None = None,
    ) -> None:
        remedy = "It is the size of the dataset, and there is nothing in an empty one"
        self._n = check_int("n", n, remedy=remedy)
        self.num_draws = self._n if num_draws is None else check_int("num_draws", num_draws)
        if drop is not None and uneven is not None:
            raise TypeError(
                "uneven and ddp_drop_last_distributed_round say the same; pass one of them"
            )
        if not isinstance(drop, bool | None):
            raise TypeError(f"ddp_drop_last_distributed_round must be a bool, not {drop!r}")
        if uneven is not None:
            check_choice("uneven", uneven, get_args(Uneven))
        # SPDL has no word for "pad".
        self._uneven: Uneven = "keep" if drop is False else uneven or "drop"
        self.rank, self.world_size = _rank_and_world_size(rank, world_size)
        self.epoch = 0
        if self.num_draws < self.world_size and self._uneven == "drop":
            raise ValueError(
                f"{self.num_draws} samples are fewer than {self.world_size} ranks, and the last round, "
                f"which is the only one, would be dropped; pass {self._remedy}"
            )

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration.

        Raises:
            ValueError: The epoch is negative.
        """
        self.epoch = check_int("epoch", epoch, at_least=0)

    def check_size(self, count: int) -> None:
        """Check that a dataset has all items that indices are drawn for.

        Raises:
            ValueError: It has less.
        """
        if self._n > count:
            raise ValueError(
                f"the sampler is for {self._n} items, and the dataset has {count}, so some have none. "
                "Make it with the length of this dataset"
            )

    def __len__(self) -> int:
        """The number of indices that the rank gets in an epoch."""
        return len(self._share(self.num_draws))

    def __iter__(self) -> Iterator[Any]:
        order = self._order_of_rank(self.epoch, ())
        self.epoch += 1
        # One tolist() of all would hold an object for each index at once.
        starts = range(0, len(order), _CHUNK)
        return chain.from_iterable(order[start : start + _CHUNK].tolist() for start in starts)

    def begin_by_position(self, epoch: int, before: Pairs = ()) -> Sequence[Any]:
        """Begin an epoch; return its indices by position, in the order of an iteration.

        Args:
            epoch: The epoch.
            before: Places in the order of all ranks that were done by other ranks than there are now. The
                others are shared out.

        Raises:
            ValueError: The epoch is negative.
        """
        # As an iteration leaves it.
        self.set_epoch(epoch + 1)
        # Each is made Python's int when it is asked for.
        return Mapped(int, self._order_of_rank(epoch, before))

    def places_of_rank(self, before: Pairs = ()) -> range | npt.NDArray[np.int64]:
        """Return where the rank's indices stand in the order of all ranks; padding stands beyond its end."""
        if not before:
            return self._share(self.num_draws)
        is_left = np.ones(self.num_draws, bool)
        for start, stop in before:
            is_left[start:stop] = False
        (left,) = is_left.nonzero()
        # Padding goes on from the start of what is left, beyond the end.
        rounds, which = np.divmod(_array(self._share(len(left))), max(1, len(left)))
        places: npt.NDArray[np.int64] = left[which] + self.num_draws * rounds
        return places

    def of_rank(self, rank: int, world_size: int) -> Self:
        """Return the sampler of another rank, or of one among more or less of them."""
        # Nothing that it holds is changed in place.
        other = copy.copy(self)
        other.rank, other.world_size = rank, world_size
        return other

    def _share(self, count: int) -> range:
        """Return which of so many places are the rank's; with padding, some are beyond them."""
        # Dealt out like cards, so that the order of training is the same with any number of ranks.
        rounds, rest = divmod(count, self.world_size)
        if self._uneven == "keep":
            return range(self.rank, count, self.world_size)
        # The last, incomplete round counts if it is filled up.
        rounds += rest > 0 and self._uneven == "pad"
        return range(self.rank, rounds * self.world_size, self.world_size)

    def _order_of_rank(self, epoch: int, before: Pairs) -> npt.NDArray[np.int64]:
        # Modulo: padding goes on from the start of the order.
        return self._draw(epoch, _array(self.places_of_rank(before)) % self.num_draws)

    def _draw(self, epoch: int, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:  # noqa: ARG002
        """Return the indices at some places of the order of all ranks."""
        return places

    def __repr__(self) -> str:
        names = [
            name for name in ("num_draws", "seed", "rank", "world_size") if hasattr(self, name)
        ]
        values = "".join(f"{name}={getattr(self, name)}, " for name in names)
        return f"{type(self).__name__}({self._n}, {values}uneven={self._uneven!r})"


class DistributedDeterministicSampler(DistributedSampler):
    """The numbers from 0 to ``n``, in this order, shared out over the ranks; the same in each epoch.

    Args:
        n: Size of the dataset.
        rank: The process that the indices are for, counted from 0. ``None``, with ``world_size``:
            as PyTorch says, if ``torch.distributed`` has been imported and initialised, else as the
            environment variables ``RANK`` and ``WORLD_SIZE`` say, else the only one. Found out
            once, here.
        world_size: How many processes there are.
        uneven: What becomes of a last round with fewer samples than ranks. ``"drop"`` leaves it
            out: all ranks get equally many, as DistributedDataParallel needs. ``"pad"`` fills it
            with samples from the start: equally many, and none left out. ``"keep"`` hands each
            sample to exactly one rank, so that some ranks get one more, which suits evaluation.
            ``None`` is ``"drop"`` with a warning if that leaves samples out.
        ddp_drop_last_distributed_round: SPDL's way to say ``uneven``: True is ``"drop"``, False is
            ``"keep"``.

    Attributes:
        rank: The process that the indices are for.
        world_size: How many processes there are.
        epoch: The epoch of the next iteration.

    Raises:
        ValueError: ``n`` is not positive, or smaller than the number of ranks with ``"drop"``; the
            rank is not below the world size.

    Thread safety: iterators are independent; begin each in one thread at a time.

    Example:
        >>> list(DistributedDeterministicSampler(5, rank=1, world_size=2, uneven="pad"))
        [1, 3, 0]
    """

    def __init__(
        self,
        n: int,
        /,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        uneven: Uneven | None = None,
        ddp_drop_last_distributed_round: bool | None = None,
    ) -> None:
        super().__init__(n, rank, world_size, uneven, drop=ddp_drop_last_distributed_round)
        rest = self._n % self.world_size
        if rest and uneven is None and ddp_drop_last_distributed_round is None:
            warn_caller(
                f"the last {rest} of {self._n} samples are in no epoch, because {self._n} is no multiple of "
                f'{self.world_size} ranks; pass uneven="keep" or "pad" to have them, or "drop" to say so',
                UserWarning,
            )


class DistributedRandomSampler(DistributedSampler):
    """Random indices below ``n``, shared out over the ranks, in another order each epoch.

    Without weights, each index comes at most once in an epoch; with weights, indices are drawn with
    replacement. The order depends on ``seed``, the epoch and the arguments alone: it is the same on
    every machine, and in each release of NumPy. Each iteration is the next epoch; :meth:`set_epoch`
    chooses one.

    Args:
        n: Size of the dataset.
        rank: As for :class:`DistributedDeterministicSampler`.
        world_size: As for :class:`DistributedDeterministicSampler`.
        num_draws: Indices of an epoch, over all ranks. ``None``: ``n``. Without weights, ``n`` at
            most.
        weights: How likely each index is to be drawn, in proportion to the sum. 0: never.
        seed: All ranks must have the same.
        uneven: As for :class:`DistributedDeterministicSampler`; ``None`` is ``"drop"``. Other
            samples are left out in each epoch.
        ddp_drop_last_distributed_round: SPDL's way to say ``uneven``: True is ``"drop"``, False is
            ``"keep"``.

    Raises:
        ValueError: Sizes that are not positive; more draws than ``n`` without weights; fewer draws
            than ranks with ``"drop"``; weights that are negative, not finite, all zero, or not
            ``n``.

    Thread safety: iterators are independent; begin each in one thread at a time.

    Example:
        >>> sampler = DistributedRandomSampler(6, rank=0, world_size=2, seed=1)
        >>> list(sampler), list(sampler)
        ([2, 5, 1], [0, 3, 2])
    """

    def __init__(
        self,
        n: int,
        /,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        num_draws: int | None = None,
        weights: Sequence[float] | npt.NDArray[np.floating] | None = None,
        seed: int = 0,
        uneven: Uneven | None = None,
        ddp_drop_last_distributed_round: bool | None = None,
    ) -> None:
        drop = ddp_drop_last_distributed_round
        super().__init__(n, rank, world_size, uneven, drop=drop, num_draws=num_draws)
        if weights is None and self.num_draws > self._n:
            raise ValueError(
                f"num_draws is {num_draws}, but without weights each of {n} samples is drawn once at most; "
                "pass weights (all equal, if you like) to draw with replacement"
            )
        self.seed = check_int("seed", seed, at_least=0)
        self._cumulative = (
            None if weights is None else np.cumsum(check_weights(weights, self._n, "sample"))
        )

    def shuffle(self, seed: int) -> None:
        """The same as :meth:`set_epoch`, by the name that :func:`~spdl_media.source.embed_shuffle` calls.

        Raises:
            ValueError: The seed is negative.
        """
        self.set_epoch(seed)

    def _draw(self, epoch: int, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        # All ranks draw the whole order and take their places of it.
        bits = random_bits(Purpose.ORDER, self.seed, epoch)
        if self._cumulative is None:
            return permutation(bits, self._n)[places]
        return weighted_choice(self._cumulative, uniform(bits, self.num_draws)[places])


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
        # From the longest on: the first of a group then says how many of it make a batch.
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
            # Whole batches, or each group would have a smaller last one.
            stop = start + max(1, sizes.size // (_GROUPS * count)) * count
            self._groups.append((order[start:stop], count))
            start = stop
        # The same in each epoch, because samples change places within their group alone.
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


def _array(places: range | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    # NumPy would ask a range for each number.
    if isinstance(places, range):
        return np.arange(places.start, places.stop, places.step)
    return places


def _rank_and_world_size(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return what the caller says, else PyTorch, else the environment, else that of a single process.

    Raises:
        ValueError: Only one of the two is given, or the rank is not below the world size.
    """
    where, remedy = "the arguments", "pass both, or neither"
    if rank is None and world_size is None:
        # Asked if the program has imported it; nothing is imported for it.
        torch = sys.modules.get("torch.distributed")
        if torch is not None and torch.is_available() and torch.is_initialized():
            return torch.get_rank(), torch.get_world_size()
        rank, world_size = _number_in("RANK"), _number_in("WORLD_SIZE")
        where = "RANK and WORLD_SIZE"
        remedy = "set both variables (torchrun does), unset both, or pass rank= and world_size="
    if rank is None and world_size is None:
        return 0, 1
    if rank is None or world_size is None:
        raise ValueError(f"{where} give rank {rank} and world size {world_size}; {remedy}")
    rank = check_int("rank", rank, at_least=0)
    world_size = check_int("world_size", world_size)
    if rank >= world_size:
        raise ValueError(
            f"{where} give rank {rank} of {world_size} processes; ranks count from 0 to "
            f"{world_size - 1}"
        )
    return rank, world_size


def _number_in(variable: str) -> int | None:
    text = os.environ.get(variable, "").strip()
    try:
        return int(text) if text else None
    except ValueError:
        raise ValueError(
            f"the environment variable {variable} must be a whole number, not {text!r}"
        ) from None
