"""What a source may offer beyond iteration, and how it is asked for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence, Sized
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np

__all__ = (
    "HasEpochs",
    "IterableWithShuffle",
    "SizedIterable",
    "SizedIterableWithShuffle",
    "Stateful",
    "begin_by_position",
    "begin_epoch",
    "iterator_in",
    "length_of",
    "place_of",
)

T_co = TypeVar("T_co", covariant=True)


@runtime_checkable
class IterableWithShuffle(Iterable[T_co], Protocol[T_co]):
    """An iterable whose order can be changed."""

    def shuffle(self, seed: int) -> None:
        """Put the items in the order that belongs to ``seed``, whatever their order was before."""


@runtime_checkable
class SizedIterable(Sized, Iterable[T_co], Protocol[T_co]):
    """An iterable that knows how many items an iteration gives."""


@runtime_checkable
class SizedIterableWithShuffle(SizedIterable[T_co], Protocol[T_co]):
    """An iterable that knows its length and whose order can be changed."""

    def shuffle(self, seed: int) -> None:
        """Put the items in the order that belongs to ``seed``, whatever their order was before."""


@runtime_checkable
class HasEpochs(Protocol):
    """An iterable that can be told which epoch the next iteration is. PyTorch's samplers are such ones."""

    def set_epoch(self, epoch: int, /) -> None:
        """Make the next iteration that of an epoch."""


@runtime_checkable
class Stateful(Protocol):
    """An iterable that can tell where it is, and go on from there, as those of torchdata do.

    If it is no iterator, each iteration begins at its start, but for the first one after
    :meth:`load_state_dict`.
    """

    def state_dict(self) -> dict[str, Any]:
        """Say where the iteration is: behind the item that it gave last."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Make the next iteration go on behind that item."""


def begin_epoch(source: Iterable[T_co], epoch: int) -> Iterator[T_co]:
    """Iterate over an epoch of a source, if it has epochs, else over the source."""
    if isinstance(source, HasEpochs):
        source.set_epoch(epoch)
    return iter(source)


def begin_by_position(source: object, epoch: int) -> Sequence[Any] | None:
    """Begin an epoch whose items are asked for by position, and leave the source as an iteration does.

    Returns ``None``, and has done nothing, if the source can only be read from its start. The items may be
    those of the source itself, so they stay the same until its next epoch begins.

    Having ``__getitem__`` is not enough: of a table, it takes the names of columns. It is for a class without
    ``__iter__``, whose items Python itself reads by position.
    """
    begin = getattr(source, "begin_by_position", None)
    if begin is not None:
        items: Sequence[Any] | None = begin(epoch)
        return items
    is_indexed = isinstance(source, Sequence | np.ndarray) or (
        hasattr(source, "__getitem__")
        and isinstance(source, Sized)
        and not hasattr(source, "__iter__")
    )
    if not is_indexed:
        return None
    if isinstance(source, HasEpochs):
        source.set_epoch(epoch)
    return source  # type: ignore[return-value]  # a sequence in all but name


def iterator_in(source: object) -> object | None:
    """What of a source can be read once: itself if it is an iterator, or one that it is ``made_of``."""
    if isinstance(source, Iterator | AsyncIterator):
        return source
    parts = getattr(source, "made_of", ())
    found = map(iterator_in, parts if isinstance(parts, tuple) else ())
    return next((iterator for iterator in found if iterator is not None), None)


def length_of(source: object) -> int:
    """The number of items of an epoch.

    Raises:
        TypeError: The source has no length.
    """
    if not isinstance(source, Sized):
        raise TypeError(f"the source has no length, because {type(source).__name__} has none")
    return len(source)


def place_of(source: object) -> tuple[int, int]:
    """Rank and world size of a source, or of its sampler; ``(0, 1)`` if it knows nothing of ranks."""
    sampler = getattr(source, "sampler", source)
    rank = getattr(sampler, "rank", 0)
    # What PyTorch's DistributedSampler calls it.
    world_size = getattr(sampler, "world_size", getattr(sampler, "num_replicas", 1))
    return (rank, world_size) if isinstance(rank, int) and isinstance(world_size, int) else (0, 1)
