"""Datasets as sources, which are read by position: a folder of classes, and a mixture of other sources."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spdl_media._checks import abridged, check_int, check_weights, listed, with_argument_hints
from spdl_media.epochs import (
    Mapped,
    Purpose,
    Ranked,
    is_indexed,
    permutation,
    place_of,
    random_bits,
)
from spdl_media.samplers import DistributedDeterministicSampler, DistributedRandomSampler, Uneven
from spdl_media.source import MapIterator

__all__ = ("ImageFolder", "Mix")

_IMAGES = ".avif .bmp .gif .heic .heif .jp2 .jpeg .jpg .pgm .png .ppm .tif .tiff .webp".split()


@with_argument_hints({"transform": "Use preprocessor= of the DataLoader"})
class ImageFolder(MapIterator[tuple[str, int]]):
    """Pairs ``(path, class)`` of the files in a folder that has a subfolder for each class.

    Classes are numbered in the order of their names, so a folder for validation needs the same ones, also
    empty ones (``allow_empty``). The files of a class are those in its folder and in all folders below it,
    sorted as by torchvision's ``ImageFolder``, so that both have the same indices. Files directly in
    ``root`` are ignored. Links are followed.

    Each iteration is the next epoch. A :class:`~spdl_media.DataLoader` resumes by index.

    Args:
        root: The folder. It is searched once, when the object is made.
        shuffle: Whether to shuffle in each epoch. The order depends only on ``seed`` and the epoch.
        seed: Seed of the order. All ranks must have the same.
        rank: Rank of the process that reads the files; as for
            :class:`~spdl_media.source.DistributedRandomSampler`.
        world_size: Number of ranks; as for :class:`~spdl_media.source.DistributedRandomSampler`.
        uneven: What to do with a last round of fewer files than ranks; as for
            :class:`~spdl_media.source.DistributedRandomSampler`.
        extensions: File name extensions to include, in any case. ``None``: those of images.
        allow_empty: Whether to allow classes without files.

    Attributes:
        classes: Names of the classes, sorted.
        class_to_idx: Index of each class, by name.
        samples: All pairs, in the order of torchvision's ``ImageFolder``; a sequence.
        targets: Class of each file, int64.
        epoch: The epoch of the next iteration.

    Raises:
        NotADirectoryError: ``root`` is not a folder.
        FileNotFoundError: There are no class folders, or there are classes without files, or broken or
            circular links. The message lists the classes or links.
        ValueError: An extension does not begin with a dot, or an argument of the sampler is invalid.

    Thread safety: iterators are independent; begin each in one thread at a time.

    Example:
        >>> train = sm.ImageFolder("train/", shuffle=True)  # doctest: +SKIP
        >>> train.classes, train.samples[0]  # doctest: +SKIP
        (['cat', 'dog'], ('train/cat/0001.jpg', 0))
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        shuffle: bool = False,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        uneven: Uneven | None = None,
        extensions: Sequence[str] | None = None,
        allow_empty: bool = False,
    ) -> None:
        if not Path(root).is_dir():
            raise NotADirectoryError(f"{str(Path(root).absolute())!r} is not a folder")
        suffixes = tuple(
            str(one).lower() for one in (_IMAGES if extensions is None else extensions)
        )
        if not suffixes or not all(one.startswith(".") for one in suffixes):
            raise ValueError(f"extensions must be endings such as ('.jpg',), not {extensions!r}")
        broken: list[str] = []
        found: dict[str, list[str]] = {}
        # Sorted by the path of the folder, then by name.
        for folder, paths in sorted(_walk(os.fspath(root), suffixes, broken)):
            # The root itself has no relative part, so its files are under "".
            name = "".join(Path(folder).relative_to(root).parts[:1])
            found.setdefault(name, []).extend(sorted(paths))
        del found[""]  # files directly in the root
        if broken := sorted(broken):
            raise FileNotFoundError(
                f"links lead nowhere or in circles: {abridged(broken)}. Remove them"
            )
        if not found:
            raise FileNotFoundError(
                f"{str(root)!r} has no folders, each of which would be a class. LocalDirectory of "
                "spdl_media.source gives files without classes"
            )
        if (empty := [name for name, paths in found.items() if not paths]) and not allow_empty:
            raise FileNotFoundError(
                f"classes of {str(root)!r} have no file that ends in {listed(suffixes)}: {abridged(empty)}. "
                "Pass extensions= for other files, or allow_empty=True"
            )
        self.classes = list(found)
        self.class_to_idx = {name: index for index, name in enumerate(found)}
        self.targets = np.repeat(np.arange(len(found), dtype=np.int64), [*map(len, found.values())])
        # Pairs are made on access: a million of them would take 60 MB, besides their paths.
        pair = partial(_pair, [path for paths in found.values() for path in paths], self.targets)
        self.samples = Mapped(pair, range(len(self.targets)))
        # Without shuffling, the sampler warns once if it leaves out the last round.
        kind: Any = DistributedRandomSampler if shuffle else DistributedDeterministicSampler
        order: Any = {"seed": seed} if shuffle else {}
        order |= {"rank": rank, "world_size": world_size, "uneven": uneven}
        super().__init__(self.samples, kind(len(self.targets), **order))

    def __iter__(self) -> Iterator[tuple[str, int]]:
        # A DataLoader does not read a source that has its own __iter__ by key, which saves a stage. Pairs
        # need no reading in threads.
        return super().__iter__()

    def __repr__(self) -> str:
        return f"ImageFolder({len(self.samples)} files in {len(self.classes)} classes)"


def _pair(paths: Sequence[str], targets: npt.NDArray[np.int64], position: int) -> tuple[str, int]:
    return paths[position], int(targets[position])


def _walk(
    folder: str, suffixes: tuple[str, ...], broken: list[str]
) -> Iterator[tuple[str, list[str]]]:
    """Yield this folder and all folders below it, each with the paths of its files."""
    folders, paths = [], []
    # Not pathlib: scandir gets the types of entries with the names, so that 100,000 files take 0.15 s.
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink() and _is_broken(Path(entry.path)):
                broken.append(entry.path)
            elif entry.is_dir():
                folders.append(entry.path)
            elif entry.name.lower().endswith(suffixes) and entry.is_file():
                paths.append(entry.path)
    yield folder, paths
    for below in folders:
        yield from _walk(below, suffixes, broken)


def _is_broken(link: Path) -> bool:
    # A link to a folder that contains it would be followed forever.
    return not link.exists() or link.parent.resolve().is_relative_to(link.resolve())


class Mix(MapIterator[Any]):
    """Items of several sources in given proportions, in random order.

    In each epoch, the number of items of a source is exactly its share by weight, rounded to a whole number.
    An exhausted source continues with its own next epoch. A source that is not exhausted continues in the
    next epoch of the mixture. So no item of a source is repeated before all its others have been used.

    The order depends only on ``seed`` and the epoch. A :class:`~spdl_media.DataLoader` resumes by index, and
    reads map-style datasets in its threads. Each source splits its items among the ranks itself, and which
    of them a rank gets in an epoch depends on its earlier epochs. So a loader can load only the state of its
    own rank, and the number of ranks may change only between two epochs.

    Args:
        sources: Sources that can be read by position: :class:`~spdl_media.ImageFolder`,
            :class:`~spdl_media.source.MapIterator`, samplers, sequences, map-style datasets, other mixtures.
        weights: Proportions of the sources in an epoch; a source of weight 0 is not used. ``None``: in
            proportion to their lengths, so that each item is used once.
        length: Number of items in an epoch of this rank. ``None``: the sum of the lengths of the sources with
            a weight above 0.
        seed: Seed of the order. All ranks should have the same.

    Attributes:
        epoch: The epoch of the next iteration.

    Raises:
        TypeError: A source cannot be read by position, or has no length.
        ValueError: There are no sources; a source with a weight above 0 is empty; sources are split for
            different ranks; weights are negative, not finite, all zero, or not one per source.

    Thread safety: iterators are independent; begin each in one thread at a time.

    Example:
        >>> mix = sm.Mix([["a", "b", "c"], range(9)], weights=[1, 1])
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
        given = None if weights is None else check_weights(weights, len(parts), "source")
        length = length if length is None else check_int("length", length)
        order = _MixOrder(parts, given, check_int("seed", seed, at_least=0), length)
        super().__init__(_Values([part.mapping for part in parts]), order)

    @property
    def counts(self) -> list[int]:
        """Number of items of each source in an epoch."""
        return [*self.sampler.counts.tolist()]  # type: ignore[union-attr]

    def __repr__(self) -> str:
        return f"Mix({len(self)} items, counts={self.counts})"


def _by_position(position: int, source: Any) -> MapIterator[Any]:
    """Return the source as a ``MapIterator``, which has keys and values."""
    if isinstance(source, MapIterator):
        return source
    if hasattr(source, "begin_by_position"):
        return MapIterator(_Identity(), source)
    if is_indexed(source) and not isinstance(source, str | bytes):
        return MapIterator(source)
    raise TypeError(
        f"sources[{position}], a {type(source).__name__}, cannot be read by position. Pass a list, a "
        "map-style dataset or a MapIterator; MergeIterator of spdl_media.source takes any iterables"
    )


class _Identity:
    """A mapping in which each key is its own value."""

    def __getitem__(self, key: Any) -> Any:
        return key


class _Values:
    """The mappings of all sources as one, with keys ``(source, key)``."""

    def __init__(self, mappings: Sequence[Any]) -> None:
        self._mappings = mappings

    def __getitem__(self, key: tuple[int, Any]) -> Any:
        return self._mappings[key[0]][key[1]]


@dataclass(eq=False, repr=False)
class _MixOrder(Ranked):
    """The sampler of a mixture. Its keys are pairs of a source's index and a key of that source."""

    mixed: Sequence[MapIterator[Any]]
    weights: npt.NDArray[np.float64] | None
    seed: int
    # The explicit length is the same for all ranks; the sum of the sources' lengths may differ by rank.
    num_draws: int | None

    def __post_init__(self) -> None:
        # A source without weight is not read, so its ranks do not matter.
        places = {place_of(self.mixed[index]) for index in np.flatnonzero(self.counts).tolist()}
        if len(places) > 1:
            raise ValueError(
                f"the sources are of different (rank, world size): {sorted(places)}. Split each by the same, "
                "a list or dataset by MapIterator(it, DistributedRandomSampler(len(it)))"
            )

    def _find_place(self) -> tuple[int, int]:
        return place_of(self.mixed[int(self.counts.argmax())])

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """Number of items of each source in an epoch. Sources may learn their rank only when it begins.

        Raises:
            ValueError: A source with a weight has no items.
        """
        sizes = np.array([len(part) for part in self.mixed])
        given = sizes if self.weights is None else self.weights
        shares = check_weights(given, len(sizes), "source")
        if (empty := (shares > 0) & (sizes == 0)).any():
            raise ValueError(f"sources[{empty.argmax()}] has no items; give it the weight 0")
        total = int(sizes[shares > 0].sum()) if self.num_draws is None else self.num_draws
        # Round down, then add one to those with the largest remainders.
        exact = total * (shares / shares.sum())
        counts: npt.NDArray[np.int64] = np.floor(exact).astype(np.int64)
        counts[np.argsort(counts - exact, kind="stable")[: total - counts.sum()]] += 1
        return counts

    def __len__(self) -> int:
        return int(self.counts.sum())

    def begin_by_position(self, epoch: int) -> Sequence[tuple[int, Any]]:
        self.set_epoch(epoch + 1)
        counts = self.counts
        order = permutation(random_bits(Purpose.MIX, self.seed, epoch), int(counts.sum()))
        chosen = np.repeat(np.arange(len(counts)), counts)[order]
        # The index of each item in its source, counted from the first epoch on.
        numbers = np.empty_like(order)
        numbers[np.argsort(chosen, kind="stable")] = np.concatenate(
            [np.arange(epoch * count, (epoch + 1) * count) for count in counts.tolist()]
        )
        return Mapped(partial(self._key, chosen, numbers, {}), range(len(order)))

    def _key(self, chosen: Any, numbers: Any, begun: Any, position: int) -> tuple[int, Any]:
        """Return the key at a position; ``begun`` caches the last epoch of each source."""
        source, part = int(chosen[position]), self.mixed[chosen[position]]
        # An exhausted source continues with its next epoch.
        epoch, place = divmod(int(numbers[position]), len(part))
        # Read once, because another thread may begin another epoch of the source meanwhile.
        last, keys = begun.get(source, (-1, None))
        if last != epoch:
            begun[source] = epoch, (keys := part.begin_keys(epoch))
        return source, keys[place]
