"""Samplers for distributed training: each process (rank) gets its own part of the indices.

All processes compute the same order of the whole epoch, and process ``rank`` of ``world_size`` takes
the positions ``rank``, ``rank + world_size``, ``rank + 2 * world_size`` and so on. So the order over
all processes does not depend on their number, unless samples are dropped or repeated.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from numbers import Real
from typing import Any, Literal, Self, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from spdl_media._checks import (
    check_choice,
    check_floats,
    check_int,
    check_weights,
    int_in_environment,
    warn_caller,
)
from spdl_media.epochs import (
    Mapped,
    Pairs,
    Purpose,
    Ranked,
    permutation,
    random_bits,
    uniform,
    weighted_choice,
)

__all__ = ("BatchByLength", "DistributedDeterministicSampler", "DistributedRandomSampler", "Uneven")

Uneven: TypeAlias = Literal["drop", "pad", "keep"]
"""What to do with a last round with fewer samples than ranks: drop it, fill it from the start, or keep it."""

Place: TypeAlias = tuple[int | None, int | None]
"""Rank and world size; ``None``: that of the process."""

_VARIABLES = "RANK and WORLD_SIZE"

# BatchByLength shuffles within so many groups of similar length, or fewer, of at least a batch each.
_GROUPS = 32


class DistributedSampler(Ranked):
    """Base of the samplers: ranks, epochs, and the rank's part of an order.

    Attributes:
        epoch: The epoch of the next iteration.
        num_draws: Number of indices in an epoch, over all ranks.
    """

    # For messages.
    _unit, _remedy = "samples", 'uneven="pad" or uneven="keep"'

    def __init__(
        self, n: int, place: Place, uneven: Uneven | None, num_draws: int | None = None
    ) -> None:
        self._n = check_int("n", n, remedy="Pass len(dataset); an empty one has no samples")
        self.num_draws = self._n if num_draws is None else check_int("num_draws", num_draws)
        self._uneven: Uneven = "drop" if uneven is None else uneven
        check_choice("uneven", self._uneven, get_args(Uneven))
        self._place: tuple[int, int] | None = None
        self._find_place(None if place == (None, None) else _checked_place("the arguments", *place))

    def _find_place(self, given: tuple[int, int] | None = None) -> tuple[int, int]:
        # Not on construction alone: Lightning makes the process group after the loaders.
        if self._place is None:
            place = given or _place_of_process()
            if place and self.num_draws < place[1] and self._uneven == "drop":
                raise ValueError(
                    f"{self.num_draws} {self._unit} are fewer than {place[1]} ranks, so the only round "
                    f"would be dropped; pass {self._remedy}"
                )
            self._place = place
        return self._place or (0, 1)

    def __getstate__(self) -> dict[str, Any]:
        self._find_place()  # the process that gets the copy may have no place
        return self.__dict__

    def check_size(self, count: int) -> None:
        """Check that a dataset of ``count`` items is large enough for the indices.

        Raises:
            ValueError: The dataset is too small.
        """
        if self._n > count:
            raise ValueError(
                f"the sampler is for {self._n} items, but the dataset has {count}. Make it with the length "
                "of this dataset"
            )

    def __len__(self) -> int:
        """Return the number of indices of this rank in an epoch."""
        return len(self.share(self.num_draws))

    def begin_by_position(self, epoch: int, before: Pairs = ()) -> Sequence[Any]:
        """Begin an epoch. Return its indices as a sequence, in the order of an iteration.

        Args:
            epoch: The epoch.
            before: Positions in the order of all ranks that were done before a resume with another number of
                ranks. The remaining positions are divided among the ranks.

        Raises:
            ValueError: The epoch is negative.
        """
        places = self.places_of_rank(before)
        if self._place is None and (world_size := int_in_environment("WORLD_SIZE")) is not None:
            # Lightning sets it before it makes the process group, but an epoch begins after that.
            _checked_place(_VARIABLES, None, world_size)
        # The same state as after beginning an iteration.
        self.set_epoch(epoch + 1)
        # Modulo, because padding repeats the order from its start. Converted to int on access, because
        # tolist() would create all int objects at once.
        return Mapped(int, self._draw(epoch, places % self.num_draws))

    def places_of_rank(self, before: Pairs = ()) -> npt.NDArray[np.int64]:
        """Return the rank's positions in the order of all ranks; positions of padding are beyond its end."""
        if not before:
            return _numbers(self.share(self.num_draws))
        is_left = np.ones(self.num_draws, bool)
        for start, stop in before:
            is_left[start:stop] = False
        (left,) = is_left.nonzero()
        # Padding repeats the remaining positions from their start, shifted beyond the end.
        rounds, which = np.divmod(_numbers(self.share(len(left))), max(1, len(left)))
        places: npt.NDArray[np.int64] = left[which] + self.num_draws * rounds
        return places

    def of_rank(self, rank: int, world_size: int) -> Self:
        """Return a copy of the sampler for another rank or number of ranks."""
        # A shallow copy, because no attribute is changed in place.
        other = copy.copy(self)
        other._place = rank, world_size
        return other

    def share(self, count: int) -> range:
        """Return the rank's positions among ``count``; those of padding are beyond ``count``."""
        # Round-robin, so that the order of training is the same with any number of ranks.
        rounds, rest = divmod(count, self.world_size)
        if self._uneven == "keep":
            return range(self.rank, count, self.world_size)
        # With padding, the incomplete last round counts.
        rounds += rest > 0 and self._uneven == "pad"
        return range(self.rank, rounds * self.world_size, self.world_size)

    def _draw(self, epoch: int, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:  # noqa: ARG002
        """Return the indices at these positions of the order of all ranks."""
        return places

    def __repr__(self) -> str:
        names = filter(partial(hasattr, self), ("num_draws", "seed", "rank", "world_size"))
        values = "".join(f"{name}={getattr(self, name)}, " for name in names)
        return f"{type(self).__name__}({self._n}, {values}uneven={self._uneven!r})"


class DistributedDeterministicSampler(DistributedSampler):
    """Indices from 0 to ``n - 1`` in order, divided among the ranks; the same in each epoch.

    Args:
        n: Size of the dataset.
        rank: The process that the indices are for, counted from 0. If both ``rank`` and
            ``world_size`` are ``None``, they come from ``torch.distributed`` if it has been imported
            and initialised, else from the environment variables ``RANK`` and ``WORLD_SIZE``. Until one
            of them states them, there is a single process.
        world_size: Number of processes.
        uneven: What to do with a last round with fewer samples than ranks. ``"drop"`` drops it, so
            that all ranks get equally many samples, as DistributedDataParallel needs. ``"pad"``
            fills it with samples from the start: equally many, and none dropped. ``"keep"`` gives
            each sample to exactly one rank, so that some ranks get one more; use it for evaluation.
            ``None`` is ``"drop"``, with a warning if samples are dropped.

    Attributes:
        rank: The process that the indices are for.
        world_size: Number of processes.
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
    ) -> None:
        self._warns = uneven is None
        super().__init__(n, (rank, world_size), uneven)

    def _find_place(self, given: tuple[int, int] | None = None) -> tuple[int, int]:
        rank, world_size = super()._find_place(given)
        if self._warns and (rest := self._n % world_size):
            self._warns = False
            warn_caller(
                f"the last {rest} of {self._n} samples are in no epoch, because {self._n} is not a multiple "
                f'of {world_size} ranks; pass uneven="keep" or "pad" to have them, or "drop" to say so',
                UserWarning,
            )
        return rank, world_size


class DistributedRandomSampler(DistributedSampler):
    """Random indices below ``n``, divided among the ranks, in another order each epoch.

    Without weights, an index occurs at most once in an epoch; with weights, indices are drawn with
    replacement. The order depends only on ``seed``, the epoch and the arguments: it is the same on
    every machine and with every release of NumPy. Each iteration is the next epoch;
    :meth:`set_epoch` sets it.

    Args:
        n: Size of the dataset.
        rank: The process that the indices are for, as for :class:`DistributedDeterministicSampler`.
        world_size: Number of processes, as for :class:`DistributedDeterministicSampler`.
        num_draws: Number of indices in an epoch, over all ranks. ``None`` is ``n``. Without weights,
            at most ``n``.
        weights: Relative probability of each index. 0 excludes it.
        seed: Seed of the order, equal on all ranks.
        uneven: As for :class:`DistributedDeterministicSampler`; ``None`` is ``"drop"``, which drops
            different samples in each epoch.

    Raises:
        ValueError: A size is not positive; ``num_draws`` exceeds ``n`` without weights, or is below
            the number of ranks with ``"drop"``; weights are negative, not finite, all zero, or not
            ``n`` in number.

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
    ) -> None:
        super().__init__(n, (rank, world_size), uneven, num_draws)
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
        """Set the epoch to ``seed``, as :func:`~spdl_media.source.embed_shuffle` asks its source to.

        Raises:
            ValueError: The seed is negative.
        """
        self.set_epoch(seed)

    def _draw(self, epoch: int, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        # All ranks draw the whole order and take their positions from it.
        bits = random_bits(Purpose.ORDER, self.seed, epoch)
        if self._cumulative is None:
            return permutation(bits, self._n)[places]
        return weighted_choice(self._cumulative, uniform(bits, self.num_draws)[places])


class BatchByLength(DistributedRandomSampler):
    """Batches (lists of indices) of samples of similar length, in another order and combination each epoch.

    Use it as the source of a :class:`~spdl_media.DataLoader`, whose preprocessor then loads a whole batch, or
    as a ``batch_sampler`` of PyTorch. The order depends only on the arguments and the epoch, and all epochs
    have equally many batches. Each iteration is the next epoch.

    Args:
        lengths: Length of each sample, in any unit, such as seconds or samples.
        batch_size: Samples per batch; a maximum if ``max_total`` is given.
        max_total: Maximum size of a padded batch: its longest length times its number of samples.
        rank: The process that the batches are for, as for
            :class:`~spdl_media.source.DistributedRandomSampler`.
        world_size: Number of processes.
        seed: Seed of the order, equal on all ranks.
        uneven: What to do with a last round with fewer batches than ranks: ``"drop"``, ``"pad"`` or
            ``"keep"``. ``None`` is ``"drop"``, which drops different batches in each epoch.

    Raises:
        ValueError: There are no lengths, some are not positive and finite, one is more than ``max_total``,
            neither limit is given, or one is not positive, or there are fewer batches than ranks with
            ``"drop"``.

    Thread safety: iterators are independent; begin each in one thread at a time.

    Example:
        >>> list(sm.BatchByLength([3, 9, 2, 8, 3], max_total=18))
        [[1, 3], [4, 2, 0]]
    """

    _unit = "batches"

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
        sizes = check_floats("lengths", lengths)
        if sizes.ndim != 1 or not sizes.size:
            raise ValueError(
                f"lengths must have one number for each sample, at least one; it has the shape {sizes.shape}"
            )
        if batch_size is None and max_total is None:
            raise ValueError("the batches have no size: give batch_size= or max_total=")
        if max_total is not None and not (isinstance(max_total, Real) and 0 < max_total < np.inf):
            raise ValueError(f"max_total must be a finite number above 0, not {max_total!r}")
        # Part of the state, because other samples may make equally many batches.
        self.num_lengths = sizes.size
        most = sizes.size if batch_size is None else check_int("batch_size", batch_size)
        # Longest first, so that the first sample of a group determines its number of samples per batch.
        order, start = np.argsort(-sizes, kind="stable"), 0
        # Samples of each group, and samples per batch: any of them fit, as none is longer than the first.
        self._groups: list[tuple[npt.NDArray[np.int64], int]] = []
        while start < sizes.size:
            longest = sizes[order[start]]
            count = most if max_total is None else min(most, int(max_total // longest))
            if count < 1:
                raise ValueError(
                    f"sample {order[start]} has length {longest:g}, more than max_total={max_total:g}"
                )
            # Whole batches, otherwise each group would have a smaller last one.
            stop = start + max(1, sizes.size // (_GROUPS * count)) * count
            self._groups.append((order[start:stop], count))
            start = stop
        # Equal in each epoch, because samples are shuffled only within their group.
        number = sum(-(-len(group) // count) for group, count in self._groups)
        super().__init__(number, rank=rank, world_size=world_size, seed=seed, uneven=uneven)

    def begin_by_position(self, epoch: int, before: Pairs = ()) -> Sequence[Any]:
        """Begin an epoch. Return its batches as a sequence, in the order of an iteration.

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


def _numbers(places: range) -> npt.NDArray[np.int64]:
    # Not np.array, which would iterate over the range.
    return np.arange(places.start, places.stop, places.step)


def _place_of_process() -> tuple[int, int] | None:
    """Return rank and world size of PyTorch, else of the environment; ``None``: neither states them."""
    # Only if the program has imported it; torch is not imported for this.
    torch = sys.modules.get("torch.distributed")
    if torch is not None and torch.is_available() and torch.is_initialized():
        return torch.get_rank(), torch.get_world_size()
    if (rank := int_in_environment("RANK")) is None:
        return None
    return _checked_place(_VARIABLES, rank, int_in_environment("WORLD_SIZE"))


def _checked_place(where: str, rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Check rank and world size.

    Raises:
        ValueError: Only one of the two is given, or the rank is not below the world size.
    """
    if rank is None or world_size is None:
        remedy = "set both variables (torchrun does), unset both, or pass rank= and world_size="
        raise ValueError(
            f"{where} give rank {rank} and world size {world_size}; "
            f"{remedy if where == _VARIABLES else 'pass both, or neither'}"
        )
    rank = check_int("rank", rank, at_least=0)
    world_size = check_int("world_size", world_size)
    if rank >= world_size:
        raise ValueError(
            f"{where} give rank {rank} of {world_size} processes; ranks count from 0 to "
            f"{world_size - 1}"
        )
    return rank, world_size
