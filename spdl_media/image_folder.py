"""A folder of classes as a source: each file with the number of the folder that it lies in."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spdl_media._checks import listed
from spdl_media._epochs import Mapped
from spdl_media.samplers import DistributedDeterministicSampler, DistributedRandomSampler, Uneven
from spdl_media.source import MapIterator

__all__ = ("ImageFolder",)

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
        self._root = os.fspath(root)
        if not Path(self._root).is_dir():
            raise NotADirectoryError(f"{self._root!r} is no folder that can be searched")
        suffixes = _IMAGES if extensions is None else _checked(extensions)
        broken: list[str] = []
        folders, _ = _entries(self._root, suffixes, broken)
        by_class = [_search(folder, suffixes, broken) for folder in sorted(folders)]
        self.classes = [Path(folder).name for folder in sorted(folders)]
        self.class_to_idx = {name: index for index, name in enumerate(self.classes)}
        if broken:
            raise FileNotFoundError(
                f"links below {self._root!r} lead nowhere or in a circle, {_in_words(broken)}. Remove them"
            )
        if not folders:
            raise FileNotFoundError(
                f"{self._root!r} has no folders, each of which would be a class. LocalDirectory of "
                "spdl_media.source gives files without classes"
            )
        empty = [name for name, found in zip(self.classes, by_class, strict=True) if not found]
        if empty and not allow_empty:
            raise FileNotFoundError(
                f"classes of {self._root!r} have no file that ends in {listed(suffixes)}, "
                f"{_in_words(empty)}. Pass extensions= for other files, or allow_empty=True"
            )
        counts = [len(found) for found in by_class]
        self.targets = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
        paths = [path for found in by_class for path in found]
        # Pairs are made when asked for: a million would take 60 MB beside their paths.
        self.samples = Mapped(partial(_pair, paths, self.targets), range(len(paths)))
        arguments: Any = {"rank": rank, "world_size": world_size, "uneven": uneven}
        super().__init__(
            self.samples,
            DistributedRandomSampler(len(paths), seed=seed, **arguments)
            if shuffle
            else DistributedDeterministicSampler(len(paths), **arguments),
        )

    def __iter__(self) -> Iterator[tuple[str, int]]:
        # Of its own, for there is nothing to fetch: a DataLoader has a stage less.
        return super().__iter__()

    def __repr__(self) -> str:
        return (
            f"ImageFolder({self._root!r}): {len(self.samples)} files of {len(self.classes)} classes, "
            f"{self.sampler!r}"
        )


def _pair(paths: Sequence[str], targets: npt.NDArray[np.int64], position: int) -> tuple[str, int]:
    return paths[position], int(targets[position])


def _checked(extensions: Sequence[str]) -> tuple[str, ...]:
    suffixes = tuple(str(one).lower() for one in extensions)
    if not suffixes or not all(one.startswith(".") for one in suffixes):
        raise ValueError(f"extensions must be endings such as ('.jpg', '.png'), not {extensions!r}")
    return suffixes


def _search(folder: str, suffixes: tuple[str, ...], broken: list[str]) -> list[str]:
    """Files in a folder and below it, in torchvision's order: by the path of the folder, then by name."""
    return [path for _, names in sorted(_walk(folder, suffixes, broken)) for path in sorted(names)]


def _walk(
    folder: str, suffixes: tuple[str, ...], broken: list[str], above: tuple[object, ...] = ()
) -> Iterator[tuple[str, list[str]]]:
    """Each folder, from this one on, with the paths of its files."""
    status = Path(folder).stat()
    identity = status.st_dev, status.st_ino
    if identity in above:  # by a link
        broken.append(folder)
        return
    folders, paths = _entries(folder, suffixes, broken)
    yield folder, paths
    for below in folders:
        yield from _walk(below, suffixes, broken, (*above, identity))


def _entries(
    folder: str, suffixes: tuple[str, ...], broken: list[str]
) -> tuple[list[str], list[str]]:
    """Paths of the folders in a folder, and of the files with such endings."""
    folders, paths = [], []
    # Not pathlib: the system says with each name what it is, and a million files take a second.
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                folders.append(entry.path)
            elif entry.is_symlink() and not Path(entry.path).exists():
                broken.append(entry.path)
            elif entry.name.lower().endswith(suffixes) and entry.is_file():
                paths.append(entry.path)
    return folders, paths


def _in_words(names: Sequence[str]) -> str:
    more = ", ..." if len(names) > _MAX_LISTED else ""
    return f"{len(names)} of them: {', '.join(sorted(names)[:_MAX_LISTED])}{more}"
