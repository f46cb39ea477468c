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
import warnings
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Literal, Self, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from spdl_media._checks import check_choice, check_int, check_weights
from spdl_media.epochs import Mapped, Pairs

__all__ = (
    "DistributedDeterministicSampler",
    "DistributedRandomSampler",
    "Uneven",
)

Uneven: TypeAlias = Literal["drop", "pad", "keep"]
"""Treatment of a last round that is too short for all ranks: left out, filled from the start, or kept."""

# Indices that are turned into Python's ints at a time: quick, and little beside the order itself.
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
        num_draws: int,
        rank: int | None,
        world_size: int | None,
        uneven: Uneven | None,
        *,
        drop: bool | None,
    ) -> None:
        if drop is not None and uneven is not None:
            raise TypeError(
                "uneven and ddp_drop_last_distributed_round say the same; pass one of them"
            )
        if not isinstance(drop, bool | None):
            raise TypeError(f"ddp_drop_last_distributed_round must be a bool, not {drop!r}")
        if uneven is not None:
            check_choice("uneven", uneven, get_args(Uneven))
        self._uneven: Uneven = "keep" if drop is False else uneven or "drop"
        self.rank, self.world_size = _rank_and_world_size(rank, world_size)
        self.epoch = 0
        self.num_draws = self._n = num_draws
        if num_draws < self.world_size and self._uneven == "drop":
            raise ValueError(
                f"{num_draws} samples are fewer than {self.world_size} ranks, and the last round, "
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

    def __iter__(self) -> Iterator[int]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        return self._indices(epoch)

    def _indices(self, epoch: int) -> Iterator[int]:
        order = self._order_of_rank(epoch, ())
        # One tolist() of all would hold an object for each index at once.
        for start in range(0, len(order), _CHUNK):
            yield from order[start : start + _CHUNK].tolist()

    def begin_by_position(self, epoch: int, before: Pairs = ()) -> Sequence[int]:
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
        other = copy.copy(self)
        other.rank, other.world_size = rank, world_size
        return other

    def _share(self, count: int) -> range:
        """Return which of so many places are the rank's; with padding, some are beyond them."""
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

    def _describe(self, *parts: str) -> str:
        arguments = ", ".join(parts)
        place = f"rank={self.rank}, world_size={self.world_size}, uneven={self._uneven!r}"
        return f"{type(self).__name__}({arguments}, {place})"


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
        count = _size(n)
        super().__init__(count, rank, world_size, uneven, drop=ddp_drop_last_distributed_round)
        rest = count % self.world_size
        if rest and uneven is None and ddp_drop_last_distributed_round is None:
            warnings.warn(
                f"the last {rest} of {count} samples are in no epoch, because {count} is no multiple of "
                f'{self.world_size} ranks; pass uneven="keep" or "pad" to have them, or "drop" to say so',
                stacklevel=2,
            )

    def __repr__(self) -> str:
        return self._describe(str(self.num_draws))


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
        n = _size(n)
        draws = n if num_draws is None else check_int("num_draws", num_draws, at_least=1)
        if weights is None and draws > n:
            raise ValueError(
                f"num_draws is {draws}, but without weights each of {n} samples is drawn once at most; "
                "pass weights (all equal, if you like) to draw with replacement"
            )
        super().__init__(draws, rank, world_size, uneven, drop=ddp_drop_last_distributed_round)
        self._n = n
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
        bits = random_bits(Purpose.ORDER, self.seed, epoch)
        if self._cumulative is None:
            return permutation(bits, self._n)[places]
        return weighted_choice(self._cumulative, uniform(bits, self.num_draws)[places])

    def __repr__(self) -> str:
        weights = [] if self._cumulative is None else ["weights=..."]
        draws = f"num_draws={self.num_draws}"
        return self._describe(str(self._n), draws, *weights, f"seed={self.seed}")


def _array(places: range | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    # NumPy would ask a range for each number.
    if isinstance(places, range):
        return np.arange(places.start, places.stop, places.step)
    return places


def _size(n: int) -> int:
    return check_int(
        "n",
        n,
        remedy="It is the size of the dataset, and there is nothing in an empty one",
    )


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


class Purpose(IntEnum):
    """A part of the key of random numbers, so that no two uses of one seed get the same ones."""

    ORDER = 0
    SAMPLE = 1
    MERGE = 2
    FILES = 3
    MIX = 4
    SHARDS = 5
    BATCHES = 6


def random_bits(purpose: Purpose, seed: int, *key: int) -> np.random.PCG64:
    """Return a source of random bits that depends on its arguments alone.

    See:
        NEP 19 of NumPy: the raw output of PCG64 and SeedSequence stays the same in each release,
        that of the methods of its ``Generator`` may change. So orders are made of raw numbers here.

    Raises:
        ValueError: A number is negative.
    """
    return np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(int(purpose), *key)))


def permutation(bits: np.random.PCG64, count: int) -> npt.NDArray[np.int64]:
    """Return the numbers from 0 to ``count`` in random order."""
    # NumPy's shuffle is quicker (0.3 s instead of 1.2 s for ten million), but may change with a
    # release. The sort is stable, so that even equal numbers have one order.
    return np.argsort(bits.random_raw(count), kind="stable").astype(np.int64, copy=False)


def uniform(bits: np.random.PCG64, count: int) -> npt.NDArray[np.float64]:
    """Return random multiples of 2**-53 from 0 up to, and not including, 1."""
    raw: npt.NDArray[np.uint64] = bits.random_raw(count)
    # A float64 has 53 bits of precision.
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53


def weighted_choice(
    cumulative: npt.NDArray[np.float64], numbers: npt.NDArray[np.float64]
) -> npt.NDArray[np.int64]:
    """Choose positions in proportion to their weights, never one without weight.

    Args:
        cumulative: The cumulative sums of the weights.
        numbers: A uniform random number for each choice.
    """
    total = cumulative[-1]
    chosen: npt.NDArray[np.intp] = np.searchsorted(cumulative, numbers * total, side="right")
    # The product may be rounded up to the total, beyond the last position that has weight.
    last = np.searchsorted(cumulative, total, side="left")
    positions: npt.NDArray[np.int64] = np.minimum(chosen, last, dtype=np.int64)
    return positions
