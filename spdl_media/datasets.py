"""Data sets as sources: a folder of classes, and a mixture of other sources. Both are read by position."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spdl_media._checks import check_int, check_weights, listed
from spdl_media.epochs import Mapped, Purpose, is_indexed, permutation, place_of, random_bits
from spdl_media.samplers import DistributedDeterministicSampler, DistributedRandomSampler, Uneven
from spdl_media.source import MapIterator

__all__ = ("ImageFolder", "Mix")

_FORMATS = "avif bmp gif heic heif jp2 jpeg jpg pgm png ppm tif tiff webp"
_IMAGES = tuple(f".{name}" for name in _FORMATS.split())

# How many names an error lists.
_MAX_LISTED = 5


class ImageFolder(MapIterator[tuple[str, int]]):
    """Pairs ``(path, class)`` of the files in a folder that has a subfolder for each class.

    Classes are numbered in the order of their names. The files of a class are those of its folder and of
    all folders below it, sorted as by torchvision's ``ImageFolder``, so that both number them alike. Files
    beside the folders of classes are left out. Links are followed.

    Each iteration is the next epoch. A :class:`~spdl_media.DataLoader` resumes by index.

    Args:
        root: The folder. It is searched once, here.
        shuffle: Give another order in each epoch, which depends on ``seed`` and the epoch alone.
        seed: All ranks must have the same.
        rank: The process that the files are for; as for
            :class:`~spdl_media.source.DistributedRandomSampler`, as are the next two.
        world_size: How many processes there are.
        uneven: What becomes of a last round with fewer files than ranks.
        extensions: Endings of the files to take, whatever their case. ``None``: those of images.
        allow_empty: Take classes without files, too.

    Attributes:
        classes: Names of the classes, sorted.
        class_to_idx: The number of each.
        samples: All pairs, in the order of the paths; a sequence.
        targets: The class of each, int64.
        epoch: The epoch of the next iteration.

    Raises:
        NotADirectoryError: ``root`` is no folder.
        FileNotFoundError: There are no folders of classes, classes without files, or links that lead nowhere
            or in a circle; these are listed.
        ValueError: An extension does not begin with a dot, or as for the samplers.

    Thread safety: iterators are independent; begin each in one thread at a time.

    Example:
        >>> train = ImageFolder("train/", shuffle=True)  # doctest: +SKIP
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
            raise NotADirectoryError(f"{str(root)!r} is no folder that can be searched")
        suffixes = tuple(
            str(one).lower() for one in (_IMAGES if extensions is None else extensions)
        )
        if not suffixes or not all(one.startswith(".") for one in suffixes):
            raise ValueError(f"extensions must be endings such as ('.jpg',), not {extensions!r}")
        broken: list[str] = []
        found: dict[str, list[str]] = {}
        # By the path of the folder, then by name.
        for folder, paths in sorted(_walk(os.fspath(root), suffixes, broken)):
            # The root itself has no part, so its files are found under "".
            name = "".join(Path(folder).relative_to(root).parts[:1])
            found.setdefault(name, []).extend(sorted(paths))
        del found[""]  # files next to the folders of classes
        if broken:
            raise FileNotFoundError(
                f"links lead nowhere or in circles: {_some(broken)}. Remove them"
            )
        if not found:
            raise FileNotFoundError(
                f"{str(root)!r} has no folders, each of which would be a class. LocalDirectory of "
                "spdl_media.source gives files without classes"
            )
        if (empty := [name for name, paths in found.items() if not paths]) and not allow_empty:
            raise FileNotFoundError(
                f"classes of {str(root)!r} have no file that ends in {listed(suffixes)}: {_some(empty)}. "
                "Pass extensions= for other files, or allow_empty=True"
            )
        self.classes = list(found)
        self.class_to_idx = {name: index for index, name in enumerate(found)}
        self.targets = np.repeat(np.arange(len(found), dtype=np.int64), [*map(len, found.values())])
        # Pairs are made when asked for: a million would take 60 MB, besides their paths.
        pair = partial(_pair, [path for paths in found.values() for path in paths], self.targets)
        self.samples = Mapped(pair, range(len(self.targets)))
        # Without shuffling a last round that is left out is warned of, once, by the sampler.
        kind: Any = DistributedRandomSampler if shuffle else DistributedDeterministicSampler
        order: Any = {"seed": seed} if shuffle else {}
        order |= {"rank": rank, "world_size": world_size, "uneven": uneven}
        super().__init__(self.samples, kind(len(self.targets), **order))

    def __iter__(self) -> Iterator[tuple[str, int]]:
        # Of its own, for there is nothing to fetch: a DataLoader has a stage less.
        return super().__iter__()


def _pair(paths: Sequence[str], targets: npt.NDArray[np.int64], position: int) -> tuple[str, int]:
    return paths[position], int(targets[position])


def _walk(
    folder: str, suffixes: tuple[str, ...], broken: list[str]
) -> Iterator[tuple[str, list[str]]]:
    """Each folder, from this one on, with the paths of its files."""
    folders, paths = [], []
    # Not pathlib: the system says with each name what it is, so that 100,000 files take 0.15 s.
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
    # A link to a folder that it lies in would be followed for ever.
    return not link.exists() or link.parent.resolve().is_relative_to(link.resolve())


def _some(names: Sequence[str]) -> str:
    more = f", ... ({len(names)} in all)" if len(names) > _MAX_LISTED else ""
    return f"{', '.join(sorted(names)[:_MAX_LISTED])}{more}"


class Mix(MapIterator[Any]):
    """Items of several sources in given proportions, in random order.

    An epoch has exactly the share of each source that its weight says, to the nearest whole number. A source
    that is used up goes on with its own next epoch, and one that is not goes on in the next epoch of the
    mixture where it was: no item of a source comes again before all others have come.

    The order depends on ``seed`` and the epoch alone. A :class:`~spdl_media.DataLoader` resumes by index, and
    reads map-style datasets in its threads. Ranks are split by the sources, each by itself, and what a rank
    has of one depends on what it had in the epochs before: so a loader takes the state of its own rank, and
    the number of ranks changes between two epochs alone.

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
        sizes = np.array([len(part) for part in parts])
        shares = check_weights(sizes if weights is None else weights, len(parts), "source")
        if (empty := (shares > 0) & (sizes == 0)).any():
            raise ValueError(f"sources[{empty.argmax()}] has no items; give it the weight 0")
        total = int(sizes[shares > 0].sum()) if length is None else check_int("length", length)
        # In proportion to the shares: rounded down, and then up where most is missing.
        exact = total * (shares / shares.sum())
        counts = np.floor(exact).astype(np.int64)
        counts[np.argsort(counts - exact, kind="stable")[: total - counts.sum()]] += 1
        self.counts: list[int] = counts.tolist()
        super().__init__(
            _Values([part.mapping for part in parts]), _MixOrder(parts, counts, seed, length)
        )


def _by_position(position: int, source: Any) -> MapIterator[Any]:
    """The source as keys and their values."""
    if isinstance(source, MapIterator):
        return source
    if hasattr(source, "begin_by_position"):
        return MapIterator(_Same(), source)
    if is_indexed(source):
        return MapIterator(source)
    raise TypeError(
        f"sources[{position}], a {type(source).__name__}, cannot be read by position. Pass a list, a "
        "map-style dataset or a MapIterator; MergeIterator of spdl_media.source takes any iterables"
    )


class _Same:
    """Values that are their own keys."""

    def __getitem__(self, key: Any) -> Any:
        return key


class _Values:
    """The value of a source's key."""

    def __init__(self, mappings: Sequence[Any]) -> None:
        self._mappings = mappings

    def __getitem__(self, key: tuple[int, Any]) -> Any:
        return self._mappings[key[0]][key[1]]


class _MixOrder:
    """The sampler of a mixture: pairs of a source's number and the key that it has there."""

    def __init__(
        self,
        parts: Sequence[MapIterator[Any]],
        counts: npt.NDArray[np.int64],
        seed: int,
        length: int | None,
    ) -> None:
        self.mixed = parts
        # Said for all ranks; the sum of the sources may differ by rank.
        self.num_draws = length
        self.counts = counts
        self.seed = check_int("seed", seed, at_least=0)
        # A source without weight is not read, so its ranks do not matter.
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
        numbers[np.argsort(chosen, kind="stable")] = np.concatenate(
            [np.arange(epoch * count, (epoch + 1) * count) for count in self.counts.tolist()]
        )
        return Mapped(partial(self._key, chosen, numbers, {}), range(len(order)))

    def _key(self, chosen: Any, numbers: Any, begun: Any, position: int) -> tuple[int, Any]:
        """The key at a position; ``begun`` keeps the epoch that each source was asked for last."""
        source, part = int(chosen[position]), self.mixed[chosen[position]]
        # A source that is used up goes on with its next epoch.
        epoch, place = divmod(int(numbers[position]), len(part))
        if begun.get(source, (-1, None))[0] != epoch:
            begun[source] = epoch, part.begin_keys(epoch)
        return source, begun[source][1][place]
