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
from spdl_media.epochs import Mapped
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
            name = "".join(Path(folder).relative_to(root).parts[:1])
            found.setdefault(name, []).extend(sorted(paths))
        del found[""]  # the files beside the classes
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
        # Pairs are made when asked for: a million would take 60 MB beside their paths.
        pair = partial(_pair, [path for paths in found.values() for path in paths], self.targets)
        self.samples = Mapped(pair, range(len(self.targets)))
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
    return not link.exists() or link.parent.resolve().is_relative_to(link.resolve())


def _some(names: Sequence[str]) -> str:
    more = f", ... ({len(names)} in all)" if len(names) > _MAX_LISTED else ""
    return f"{', '.join(sorted(names)[:_MAX_LISTED])}{more}"
