"""Indices for the processes of a distributed training, each of which gets its own part.

All processes work out the same order of the whole epoch, and process ``rank`` of ``world_size``
takes the positions ``rank``, ``rank + world_size``, ``rank + 2 * world_size`` and so on. So the
order in which samples are trained on, over all processes, does not depend on how many there are, as
long as nothing is dropped or repeated.
"""

from __future__ import annotations

import os
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Literal, NamedTuple, TypeAlias, get_args, overload

import numpy as np
import numpy.typing as npt

from spdl_media._checks import check_choice, check_int, check_weights

__all__ = (
    "DistributedDeterministicSampler",
    "DistributedRandomSampler",
    "Uneven",
)

Uneven: TypeAlias = Literal["drop", "pad", "keep"]
"""What becomes of a last round too short for all ranks: left out, filled from the start, or kept."""

# Indices that are turned into Python's ints at a time: quick, and little beside the order itself.
_CHUNK = 4096


class _DistributedSampler(ABC):
    """What both samplers share: ranks, epochs, and what the rank takes of an order."""

    def __init__(
        self, num_draws: int, rank: int | None, world_size: int | None, uneven: Uneven
    ) -> None:
        self._rank, self._world_size = _find_place(rank, world_size)
        self._num_draws = num_draws
        self._uneven = uneven
        self._epoch = 0
        if num_draws < self._world_size and uneven == "drop":
            raise ValueError(
                f"{num_draws} samples are fewer than {self._world_size} ranks, and the last round, "
                'which is the only one, would be dropped; pass uneven="pad" or uneven="keep"'
            )

    @property
    def rank(self) -> int:
        """The process that the indices are for."""
        return self._rank

    @property
    def world_size(self) -> int:
        """How many processes there are."""
        return self._world_size

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that of an epoch.

        Raises:
            ValueError: The epoch is negative.
        """
        self._epoch = check_int("epoch", epoch, at_least=0)

    def __len__(self) -> int:
        """The number of indices that the rank gets in an epoch."""
        return len(self._positions())

    def __iter__(self) -> Iterator[int]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        return self._indices(epoch)

    def _indices(self, epoch: int) -> Iterator[int]:
        order = self._order_of_rank(epoch)
        for start in range(0, len(order), _CHUNK):
            yield from order[start : start + _CHUNK].tolist()

    def begin_by_position(self, epoch: int) -> Sequence[int]:
        """Begin an epoch, and give its indices by position, in the order of an iteration."""
        self.set_epoch(epoch + 1)
        return _Indices(self._order_of_rank(epoch))

    def _positions(self) -> range:
        """The rank's positions in the order of all ranks. With padding, some are behind its end."""
        rounds, rest = divmod(self._num_draws, self._world_size)
        if self._uneven == "keep":
            return range(self._rank, self._num_draws, self._world_size)
        rounds += rest > 0 and self._uneven == "pad"
        return range(self._rank, rounds * self._world_size, self._world_size)

    def _order_of_rank(self, epoch: int) -> npt.NDArray[np.int64]:
        positions = self._positions()
        places = np.arange(positions.start, positions.stop, positions.step) % self._num_draws
        return self._draw(epoch, places)

    @abstractmethod
    def _draw(self, epoch: int, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The indices at some places of the order of all ranks."""

    def _describe(self, *parts: str) -> str:
        parts = (
            *parts,
            f"rank={self._rank}, world_size={self._world_size}, uneven={self._uneven!r}",
        )
        return f"{type(self).__name__}({', '.join(parts)})"


class DistributedDeterministicSampler(_DistributedSampler):
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

    Raises:
        ValueError: ``n`` is not positive, or smaller than the number of ranks with ``"drop"``; rank
            and world size do not fit.

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
        chosen = _checked_uneven(uneven, drop=ddp_drop_last_distributed_round)
        super().__init__(count, rank, world_size, chosen or "drop")
        rest = count % self._world_size
        if chosen is None and rest:
            warnings.warn(
                f"the last {rest} of {count} samples are in no epoch, because {count} is no multiple of "
                f'{self._world_size} ranks; pass uneven="keep" or "pad" to have them, or "drop" to say so',
                stacklevel=2,
            )

    def _draw(self, epoch: int, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:  # noqa: ARG002
        return places

    def __repr__(self) -> str:
        return self._describe(str(self._num_draws))


class DistributedRandomSampler(_DistributedSampler):
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
        self._n = _size(n)
        draws = self._n if num_draws is None else check_int("num_draws", num_draws, at_least=1)
        if weights is None and draws > self._n:
            raise ValueError(
                f"num_draws is {draws}, but without weights each of {self._n} samples is drawn once at most; "
                "pass weights (all equal, if you like) to draw with replacement"
            )
        chosen = _checked_uneven(uneven, drop=ddp_drop_last_distributed_round)
        super().__init__(draws, rank, world_size, chosen or "drop")
        self._seed = check_int("seed", seed, at_least=0)
        self._cumulative = (
            None if weights is None else np.cumsum(check_weights(weights, self._n, "sample"))
        )

    @property
    def seed(self) -> int:
        """What the orders depend on, beside the epoch."""
        return self._seed

    def shuffle(self, seed: int) -> None:
        """The same as :meth:`set_epoch`, by the name that :func:`~spdl_media.source.embed_shuffle` calls."""
        self.set_epoch(seed)

    def _draw(self, epoch: int, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        if self._cumulative is None:
            return permutation(self._n, Purpose.ORDER, self._seed, epoch)[places]
        chances = _uniform(self._num_draws, Purpose.ORDER, self._seed, epoch)[places]
        return weighted_choice(self._cumulative, chances)

    def __repr__(self) -> str:
        weights = [] if self._cumulative is None else ["weights=..."]
        draws = f"num_draws={self._num_draws}"
        return self._describe(str(self._n), draws, *weights, f"seed={self._seed}")


def _size(n: int) -> int:
    return check_int(
        "n",
        n,
        remedy="It is the size of the dataset, and there is nothing in an empty one",
    )


def _checked_uneven(uneven: Uneven | None, *, drop: bool | None) -> Uneven | None:
    if drop is None:
        if uneven is not None:
            check_choice("uneven", uneven, get_args(Uneven))
        return uneven
    if uneven is not None:
        raise TypeError("uneven and ddp_drop_last_distributed_round say the same; pass one of them")
    if not isinstance(drop, bool):
        raise TypeError(f"ddp_drop_last_distributed_round must be a bool, not {drop!r}")
    return "drop" if drop else "keep"


class _Indices(Sequence[int]):
    """An array of indices, which are ints of Python one by one."""

    def __init__(self, array: npt.NDArray[np.int64]) -> None:
        self._array = array

    def __len__(self) -> int:
        return len(self._array)

    @overload
    def __getitem__(self, position: int) -> int: ...

    @overload
    def __getitem__(self, position: slice) -> Sequence[int]: ...

    def __getitem__(self, position: int | slice) -> int | Sequence[int]:
        part = self._array[position]
        return _Indices(part) if isinstance(position, slice) else int(part)


class _Place(NamedTuple):
    """A process among those that train together."""

    rank: int
    world_size: int


def _find_place(rank: int | None, world_size: int | None) -> _Place:
    """What the caller says, else what PyTorch says, else the environment, else that it is the only one.

    PyTorch is asked if the caller's program has imported it and joined a process group; nothing is imported.

    Raises:
        ValueError: One of the two is given without the other, or they do not fit each other.
    """
    if rank is not None or world_size is not None:
        return _checked(rank, world_size, "the arguments", "pass both, or neither")
    return _of_torch() or _of_environment() or _Place(0, 1)


def _of_torch() -> _Place | None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return _Place(distributed.get_rank(), distributed.get_world_size())


def _of_environment() -> _Place | None:
    rank, world_size = (os.environ.get(name, "").strip() for name in ("RANK", "WORLD_SIZE"))
    if not rank and not world_size:
        return None
    remedy = "set both variables (torchrun does), unset both, or pass rank= and world_size="
    return _checked(
        _number("RANK", rank), _number("WORLD_SIZE", world_size), "RANK and WORLD_SIZE", remedy
    )


def _number(name: str, text: str) -> int | None:
    try:
        return int(text) if text else None
    except ValueError:
        raise ValueError(
            f"the environment variable {name} must be a whole number, not {text!r}"
        ) from None


def _checked(rank: int | None, world_size: int | None, where: str, remedy: str) -> _Place:
    if rank is None or world_size is None:
        raise ValueError(f"{where} give rank {rank} and world size {world_size}; {remedy}")
    place = _Place(
        check_int("rank", rank, at_least=0), check_int("world_size", world_size, at_least=1)
    )
    if place.rank >= place.world_size:
        raise ValueError(
            f"{where} give rank {place.rank} of {place.world_size} processes; ranks count from 0 to "
            f"{place.world_size - 1}"
        )
    return place


_BLOCK = 1024


class Purpose(IntEnum):
    """What numbers are for. It is a part of their key, so that no two uses of one seed get the same ones."""

    ORDER = 0
    SAMPLE = 1
    MERGE = 2
    FILES = 3


def _bits(purpose: Purpose, seed: int, key: tuple[int, ...]) -> np.random.PCG64:
    return np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(int(purpose), *key)))


def generator(purpose: Purpose, seed: int, *key: int) -> np.random.Generator:
    """NumPy's generator over the numbers of a seed and key."""
    return np.random.Generator(_bits(purpose, seed, key))


def permutation(count: int, purpose: Purpose, seed: int, *key: int) -> npt.NDArray[np.int64]:
    """The numbers from 0 to ``count``, in random order, each once.

    Sorting random numbers takes longer than NumPy's shuffle (1.2 s instead of 0.3 s for ten
    million), and gives the same order in every release. The sort is stable, so that even equal
    numbers are no matter of chance.
    """
    order = np.argsort(_bits(purpose, seed, key).random_raw(count), kind="stable")
    return order.astype(np.int64, copy=False)


def _uniform(count: int, purpose: Purpose, seed: int, *key: int) -> npt.NDArray[np.float64]:
    """Numbers from 0 up to, and not including, 1: multiples of 2**-53."""
    return _as_fractions(_bits(purpose, seed, key).random_raw(count))


def uniforms(purpose: Purpose, seed: int, *key: int) -> Iterator[float]:
    """The numbers of :func:`_uniform`, without end."""
    bits = _bits(purpose, seed, key)
    while True:
        yield from _as_fractions(bits.random_raw(_BLOCK)).tolist()


def _as_fractions(raw: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53


def weighted_choice(
    cumulative: npt.NDArray[np.float64], chances: npt.NDArray[np.float64]
) -> npt.NDArray[np.int64]:
    """Positions chosen in proportion to weights, of which the cumulative sums are given.

    A position without weight is never chosen.
    """
    total = cumulative[-1]
    chosen: npt.NDArray[np.intp] = np.searchsorted(cumulative, chances * total, side="right")
    # The product may be rounded up to the total, behind the last position that has weight.
    last = np.searchsorted(cumulative, total, side="left")
    positions: npt.NDArray[np.int64] = np.minimum(chosen, last, dtype=np.int64)
    return positions
