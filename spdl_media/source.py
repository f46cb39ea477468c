"""Sources for pipelines: iterables with the same order for the same seed and epoch on every machine.

An *epoch* is one iteration over a source. Each iteration is the next epoch; ``set_epoch`` sets it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, cast, overload

import numpy as np

from spdl_media._checks import check_int, check_weights
from spdl_media.epochs import (
    Epochs,
    HasEpochs,
    IterableWithShuffle,
    Mapped,
    Pairs,
    Purpose,
    RepeatedSource,
    ShuffledSource,
    Stateful,
    begin_by_position,
    begin_epoch,
    permutation,
    random_bits,
    uniform,
    weighted_choice,
)
from spdl_media.samplers import (
    DistributedDeterministicSampler,
    DistributedRandomSampler,
    DistributedSampler,
    Uneven,
)

__all__ = (
    "DistributedDeterministicSampler",
    "DistributedRandomSampler",
    "HasEpochs",
    "IterableWithShuffle",
    "LocalDirectory",
    "MapIterator",
    "MergeIterator",
    "Stateful",
    "Uneven",
    "embed_shuffle",
    "repeat_source",
)

T = TypeVar("T")
K_contra = TypeVar("K_contra", contravariant=True)
V_co = TypeVar("V_co", covariant=True)

_END: Any = object()


class SupportsGetItem(Protocol[K_contra, V_co]):
    """A mapping, a sequence, or a map-style dataset of PyTorch."""

    def __getitem__(self, key: K_contra, /) -> V_co: ...


class MapIterator(Generic[V_co]):
    """The values of a mapping, sequence or map-style dataset, in the order of a sampler's keys.

    Args:
        mapping: The values are read lazily; by a :class:`~spdl_media.DataLoader`, in its threads.
        sampler: The keys, such as a :class:`~spdl_media.source.DistributedRandomSampler`. ``None``:
            all keys in the order of the mapping, or the positions from 0 if it has no ``keys()``.

    Raises:
        TypeError: Without a sampler, the mapping has neither keys nor a length.
        ValueError: A sampler of this module is for more items than the mapping has.

    Thread safety: that of the mapping.

    Example:
        >>> list(MapIterator({"a": 1, "b": 2, "c": 3}, sampler=["c", "a"]))
        [3, 1]
    """

    def __init__(
        self, mapping: SupportsGetItem[Any, V_co], sampler: Iterable[Any] | None = None
    ) -> None:
        name = type(mapping).__name__
        if not hasattr(mapping, "__getitem__"):
            raise TypeError(f"mapping must have __getitem__, which {name} lacks")
        if sampler is None and not (hasattr(mapping, "keys") or isinstance(mapping, Sized)):
            raise TypeError(f"{name} has neither keys() nor a length; pass a sampler for its keys")
        # Only our own samplers can be checked; with others, missing keys fail one by one.
        if isinstance(sampler, DistributedSampler) and isinstance(mapping, Sized):
            sampler.check_size(len(mapping))
        self.mapping = mapping
        self.sampler = sampler

    def __repr__(self) -> str:
        # By their classes: a list of keys may be long.
        mapping, sampler = type(self.mapping).__name__, type(self.sampler).__name__
        return f"{type(self).__name__}({mapping}, {sampler})"

    def __iter__(self) -> Iterator[V_co]:
        # Lazy: a value is read when the iteration reaches it.
        return map(self.mapping.__getitem__, self.keys)

    def __len__(self) -> int:
        """Return the number of values of an iteration.

        Raises:
            TypeError: The sampler has no length.
        """
        return len(cast("Sized", self.mapping if self.sampler is None else self.sampler))

    @property
    def made_of(self) -> tuple[Iterable[Any], ...]:
        """The iterables that an iteration reads."""
        # Not the mapping, which is read by key and therefore not exhausted.
        return () if self.sampler is None else (self.sampler,)

    @property
    def epoch(self) -> int | None:
        """The epoch of the next iteration, if the sampler has epochs.

        Raises:
            Exception: The sampler's ``epoch`` raises.
        """
        return getattr(self.sampler, "epoch", None)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, if the sampler has epochs.

        Raises:
            ValueError: The sampler refuses the epoch.
        """
        if isinstance(self.sampler, HasEpochs):
            self.sampler.set_epoch(epoch)

    @property
    def keys(self) -> Iterable[Any]:
        """The keys, in the order of the next epoch.

        Raises:
            Exception: The mapping's ``keys()`` or ``__len__`` raises.
        """
        if self.sampler is not None:
            return self.sampler
        # A dictionary is read by key, a list or dataset by position.
        keys: Callable[[], Iterable[Any]] | None = getattr(self.mapping, "keys", None)
        return range(len(self)) if keys is None else keys()

    def begin_keys(self, epoch: int, before: Pairs = ()) -> Sequence[Any] | None:
        """Begin an epoch. Return its keys as a sequence, or ``None`` if they have no length.

        Args:
            epoch: The epoch.
            before: Positions that were done before a resume with another number of ranks.

        Raises:
            ValueError: The sampler refuses the epoch.
        """
        keys = self.keys
        order = begin_by_position(keys, epoch, before)
        # Not an iterator, which listing would exhaust.
        if order is None and not isinstance(keys, Iterator):
            try:
                len(self)
            except TypeError:  # the keys may be infinite
                return None
            order = list(begin_epoch(keys, epoch))
        return order

    def begin_by_position(self, epoch: int, before: Pairs = ()) -> Sequence[V_co] | None:
        """Begin an epoch. Return its values as a sequence, or ``None`` if the keys have no length.

        Args:
            epoch: The epoch.
            before: Positions that were done before a resume with another number of ranks.

        Raises:
            ValueError: The sampler refuses the epoch.
        """
        order = self.begin_keys(epoch, before)
        return None if order is None else Mapped(self.mapping.__getitem__, order)


class MergeIterator(Epochs, Generic[T]):
    """The items of several iterables as one: in turn, or chosen at random.

    Each iteration is the next epoch, for the random choice and for the iterables that have epochs.

    Args:
        iterables: The iterables to merge.
        weights: Relative probability that the next item comes from each iterable that has not ended.
            0 excludes an iterable. ``None``: one item of each in turn.
        stop_after: When to stop: 0 when all iterables have ended, -1 when the first one has, any
            other number after so many items, or when all have ended.
        seed: Seed of the choice by ``weights``. The same seed and epoch give the same choices on
            every machine.

    Raises:
        TypeError: One of the iterables is a single string.
        ValueError: There are no iterables; ``stop_after`` is less than -1; weights are negative, not
            finite, all zero, or not one for each iterable.

    Thread safety: iterators are independent if those of the iterables are; begin each in one thread
    at a time.

    Example:
        >>> list(MergeIterator([[0, 1, 2], [10, 11], [20]]))
        [0, 10, 20, 1, 11, 2]
        >>> list(MergeIterator([[0, 1, 2], [10, 11], [20]], stop_after=-1))
        [0, 10, 20, 1, 11]
    """

    def __init__(
        self,
        iterables: Sequence[Iterable[T]],
        *,
        weights: Sequence[float] | None = None,
        stop_after: int = 0,
        seed: int = 0,
    ) -> None:
        if not iterables:
            raise ValueError("iterables must hold at least one iterable, and is empty")
        # A copy, because the weights must match the iterables.
        self._iterables = list(iterables)
        for position, one in enumerate(self._iterables):
            if isinstance(one, str | bytes):
                raise TypeError(
                    f"iterables[{position}] is a single {type(one).__name__}; pass a list of it"
                )
        count = len(self._iterables)
        self._weights = None if weights is None else check_weights(weights, count, "iterable")
        self._stop_after = check_int("stop_after", stop_after, at_least=-1)
        self._seed = check_int("seed", seed, at_least=0)

    @property
    def made_of(self) -> tuple[Iterable[T], ...]:
        """The iterables that an iteration reads, all except those with weight 0."""
        weights = itertools.repeat(1) if self._weights is None else self._weights
        return tuple(itertools.compress(self._iterables, weights))

    def __iter__(self) -> Iterator[T]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        # Iterables with weight 0 are not begun: they may be connections, or iterators.
        merged = self._merge([begin_epoch(iterable, epoch) for iterable in self.made_of], epoch)
        return itertools.islice(merged, self._stop_after) if self._stop_after > 0 else merged

    def _merge(self, iterators: list[Iterator[T]], epoch: int) -> Iterator[T]:
        weights = None if self._weights is None else self._weights[self._weights > 0]
        cumulative = None if weights is None else np.cumsum(weights)
        # A new generator for each epoch, so that each epoch is reproducible.
        bits = random_bits(Purpose.MERGE, self._seed, epoch)
        # 1024 at a time, because drawing a single number takes as long as drawing a hundred.
        numbers = itertools.chain.from_iterable(
            uniform(bits, 1024).tolist() for _ in itertools.count()
        )
        index = 0
        while iterators:
            if cumulative is not None:
                index = int(weighted_choice(cumulative, np.array([next(numbers)]))[0])
            index %= len(iterators)
            if (item := next(iterators[index], _END)) is not _END:
                yield item
                index += 1
            elif self._stop_after == -1:
                return
            else:
                # The next iterator in turn gets this index, and the remaining ones keep their proportions.
                del iterators[index]
                if weights is not None:
                    weights = np.delete(weights, index)
                    cumulative = np.cumsum(weights)


def repeat_source(src: Iterable[T], /, epoch: int = 0) -> RepeatedSource[T]:
    """Repeat a source forever, each time as the next epoch.

    Before each repetition, ``set_epoch`` of the source is called with the epoch; a source that has
    only ``shuffle`` is shuffled with the epoch as the seed.

    Args:
        src: The source. It must be iterable more than once, so not an iterator.
        epoch: The first epoch.

    Returns:
        An iterator. It is picklable, and its ``state_dict()`` allows to continue it in another
        process.

    Raises:
        TypeError: ``src`` is an iterator.
        ValueError: ``epoch`` is negative. While iterating: an epoch of ``src`` is empty.

    Thread safety: one thread at a time.

    Example:
        >>> import itertools
        >>> list(itertools.islice(repeat_source([1, 2, 3]), 5))
        [1, 2, 3, 1, 2]
    """
    if isinstance(src, Iterator):
        raise TypeError(
            f"{type(src).__name__} is an iterator, which can be read once; pass what can be iterated "
            "again, such as a list, or an object whose __iter__ is a generator function"
        )
    return RepeatedSource(src, check_int("epoch", epoch, at_least=0))


def embed_shuffle(src: IterableWithShuffle[T], /, *, epoch: int = 0) -> ShuffledSource[T]:
    """Shuffle a source in each iteration by its own ``shuffle``, with the epoch as the seed.

    Args:
        src: A source with ``shuffle(seed=)``, such as :class:`LocalDirectory`.
        epoch: The first epoch.

    Returns:
        An iterable of the same items; each iteration is the next epoch.

    Raises:
        TypeError: ``src`` has no ``shuffle``.

    Thread safety: one iteration at a time, because all iterations share the order of ``src``.

    Example:
        >>> class Letters:
        ...     def shuffle(self, seed):
        ...         self.letters = "abc"[seed:] + "abc"[:seed]
        ...     def __iter__(self):
        ...         return iter(self.letters)
        >>> source = embed_shuffle(Letters())
        >>> "".join(source), "".join(source)
        ('abc', 'bca')
    """
    if not isinstance(src, IterableWithShuffle):
        raise TypeError(
            f"{type(src).__name__} cannot be shuffled: it must be iterable and have the method shuffle(seed)"
        )
    return ShuffledSource(src, check_int("epoch", epoch, at_least=0))


class LocalDirectory(Sequence[Path]):
    """The files below a folder, sorted by name: the same order on every machine.

    Args:
        root: The folder. It is searched once, on construction.
        pattern: Pattern for :meth:`pathlib.Path.glob`: ``"*.jpg"`` matches files in the folder,
            ``"**/*.jpg"`` also those in subfolders. Matching folders are ignored.

    Raises:
        NotADirectoryError: ``root`` is not a folder.
        FileNotFoundError: No file matches.
        ValueError: ``pattern`` is empty or absolute.

    Thread safety: safe, except :meth:`shuffle`.

    Example:
        >>> images = LocalDirectory("datasets/train", "**/*.jpg")  # doctest: +SKIP
        >>> DataLoader(embed_shuffle(images), ...)  # doctest: +SKIP
    """

    def __init__(self, root: str | os.PathLike[str], pattern: str = "**/*") -> None:
        self._root = Path(root)
        self._pattern = pattern
        if not self._root.is_dir():
            raise NotADirectoryError(f"{str(self._root.absolute())!r} is not a folder")
        if Path(pattern).is_absolute():
            raise ValueError(f"pattern must be relative to root, not {pattern!r}")
        # Only files, because the pattern may match folders, too.
        found = (path for path in self._root.glob(pattern) if path.is_file())
        # Sorted by parts, so that the files of a folder stay together on every system.
        self._sorted = sorted(found, key=lambda path: path.relative_to(self._root).parts)
        self._files = self._sorted
        if not self._files:
            raise FileNotFoundError(
                f"no file below {str(self._root)!r} matches {pattern!r}; "
                '"**/*" finds all of them, in subfolders too'
            )

    def shuffle(self, seed: int) -> None:
        """Shuffle the files. The order depends only on the seed, not on the previous order.

        Raises:
            ValueError: The seed is negative.
        """
        bits = random_bits(Purpose.FILES, check_int("seed", seed, at_least=0))
        order = permutation(bits, len(self._sorted))
        # A permutation of the sorted files, not of the previous order.
        self._files = [self._sorted[position] for position in order.tolist()]

    def __len__(self) -> int:
        return len(self._files)

    @overload
    def __getitem__(self, position: int) -> Path: ...

    @overload
    def __getitem__(self, position: slice) -> list[Path]: ...

    def __getitem__(self, position: int | slice) -> Path | list[Path]:
        return self._files[position]

    def __repr__(self) -> str:
        return f"LocalDirectory({str(self._root)!r}, {self._pattern!r}): {len(self)} files"
