"""Tar shards as a source: samples by position, shuffled, and shared out over ranks."""

from __future__ import annotations

import glob
import hashlib
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from spdl_media._checks import check_int
from spdl_media._remote import download, glob_urls, retried
from spdl_media.array_formats.samples import expanded, sample_offsets, samples_of
from spdl_media.array_formats.tar import Archive
from spdl_media.config import DemuxConfig
from spdl_media.errors import ArrayFormatError, SourceError
from spdl_media.inputs import Input, open_input
from spdl_media.readers import local_path, path_error
from spdl_media.samplers import DistributedSampler, Purpose, permutation, random_bits, uniform
from spdl_media.source import MapIterator

__all__ = ("Shards",)

T = TypeVar("T")

# Shards whose headers are read at a time.
_READERS = 8
# One of them is held while a shard is copied. They are none of the reader's, which is pickled.
_COPYING = [threading.Lock() for _ in range(64)]


class Shards(MapIterator[dict[str, Any]]):
    """Samples of tar shards, as :func:`~spdl_media.iter_samples` gives them, in an order by seed and epoch.

    The headers of all shards are read here, once, to know where each sample stands; with ``cache`` not again
    the next time. Then each sample is read when it is asked for, by a :class:`~spdl_media.DataLoader` in its
    threads: none is held in memory to be shuffled, and a loader that resumes reads nothing that is done. Each
    iteration is the next epoch.

    The order of an epoch is the same for all ranks. Each has a run of it, not every n-th sample, so that it
    reads few shards beside its own.

    Args:
        urls: A path or URL, or a sequence of them. In a ``str``, braces stand for many as in
            :func:`~spdl_media.iter_samples`, and ``*`` for all that is there; in paths ``?``, ``[...]`` and
            ``**`` as for :func:`glob.glob`. A ``PathLike`` is taken as it is.
        shuffle_shards: Take the shards in another order in each epoch.
        shuffle_buffer: Mix samples over so many places: each comes less than this number of places earlier or
            later than the order of shards has it. Many times the number of samples: any order. 0: none are
            mixed.
        seed: Of the order. All ranks must have the same.
        rank: As for :class:`~spdl_media.source.DistributedRandomSampler`.
        world_size: As there. There may be more ranks than shards.
        equal_length: Give all ranks equally many samples, as DistributedDataParallel needs: the last of an
            epoch, fewer than there are ranks, are left out of it. False: some ranks get one more, and none is
            left out.
        cache: A folder for the places of the samples of each shard, and for whole copies of remote shards. It
            may be shared by processes and machines. A file that has changed is read again; a URL is not
            looked at again, so delete the folder where one has changed. ``None``: nothing is kept.
        keep_copies: Keep copies of remote shards in ``cache``. False: fetch each sample from the server.
        storage_options: Options of fsspec for URLs: credentials, timeouts and the like. What fails is tried
            three times.

    Attributes:
        urls: The shards, in the order in which they are given, found or written out.
        num_samples: Samples of all of them.
        epoch: The epoch of the next iteration.

    Raises:
        ArrayFormatError: A shard is damaged or cut short; the error names the shard and the member.
        SourceError: A shard cannot be read, or cannot be read from any place, as a pipe.
        FileNotFoundError: Nothing matches a pattern.
        TypeError: A shard is neither a path nor a URL.
        ValueError: Braces that cannot be read; no samples, or fewer than ranks with ``equal_length``; a
            negative number; a rank that is not below the world size.

    Thread safety: iterators are independent; begin each in one thread at a time. Samples may be read by
    any number of threads.

    Example:
        >>> shards = Shards("train-*.tar", shuffle_shards=True, shuffle_buffer=10_000)  # doctest: +SKIP
        >>> DataLoader(shards, preprocessor=decode, batch_size=256)  # doctest: +SKIP
    """

    def __init__(
        self,
        urls: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        shuffle_shards: bool = False,
        shuffle_buffer: int = 0,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        equal_length: bool = True,
        cache: str | os.PathLike[str] | None = None,
        keep_copies: bool = True,
        storage_options: Mapping[str, object] | None = None,
    ) -> None:
        config = DemuxConfig(storage_options=storage_options or {})
        shards = [path for one in expanded(urls) for path in _matches(one, config)]
        folder = None if cache is None else Path(cache)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        reader = _Reader(shards, config, folder, keep_copies=keep_copies)
        order = _ShardOrder(
            reader.counts,
            shuffle_shards=shuffle_shards,
            shuffle_buffer=shuffle_buffer,
            seed=seed,
            rank=rank,
            world_size=world_size,
            equal_length=equal_length,
        )
        super().__init__(reader, order)
        self.urls = tuple(shards)
        self.num_samples = order.num_draws

    def __repr__(self) -> str:
        return f"Shards of {self.num_samples} samples in {len(self.urls)} shards, {self.sampler!r}"


def _matches(shard: Any, config: DemuxConfig) -> list[str]:
    """Paths or URLs that a pattern stands for; of anything else, itself."""
    if not isinstance(shard, str | os.PathLike):
        raise TypeError(
            f"a shard of Shards is a path or a URL, not {type(shard).__name__}; iter_samples takes memory "
            "and file objects"
        )
    path = local_path(shard)
    if not isinstance(shard, str) or not any(sign in shard for sign in ("*?[" if path else "*")):
        return [os.fsdecode(shard)]
    if path is None:
        found = glob_urls(shard, config.storage_options)
    else:
        found = sorted(glob.glob(path, recursive=True))  # noqa: PTH207  # Path.glob takes no absolute patterns
    if not found:
        raise FileNotFoundError(
            f"no file matches {shard!r}; give a path with {'*?['} in its name as a pathlib.Path"
        )
    return found


class _Reader:
    """Samples of shards by number, counted through all shards.

    Attributes:
        counts: Samples of each shard.
    """

    def __init__(
        self,
        shards: Sequence[str],
        config: DemuxConfig,
        folder: Path | None,
        *,
        keep_copies: bool,
    ) -> None:
        self._shards = shards
        self._config = config
        self._folder = folder
        self._keep_copies = keep_copies
        pool = ThreadPoolExecutor(_READERS)
        try:
            self._offsets = list(pool.map(self._offsets_of, shards))
        finally:
            # After an error the others are not waited for.
            pool.shutdown(cancel_futures=True)
        self.counts = np.array([len(offsets) - 1 for offsets in self._offsets], np.int64)
        self._firsts = (np.cumsum(self.counts) - self.counts).tolist()

    def __getitem__(self, number: int) -> dict[str, Any]:
        # Of shards that begin at one number, all but the last one are empty.
        index = bisect_right(self._firsts, number) - 1
        place, url = number - self._firsts[index], self._shards[index]
        start, stop = self._offsets[index][place : place + 2].tolist()

        def read(src: Input) -> dict[str, Any]:
            samples = list(samples_of(Archive(src, (start, stop)), url))
            if len(samples) != 1:
                raise ArrayFormatError(
                    f"has {len(samples)} samples where there was one. It has changed; make Shards anew",
                    source=src.name,
                    offset=start,
                )
            return samples[0]

        return self._use(url, read)

    def _offsets_of(self, url: str) -> npt.NDArray[np.int64]:
        """Where the samples of a shard begin, and the last one ends."""
        path = self._folder and _file(self._folder, url, ".npy")
        if path is not None:
            with suppress(OSError, ValueError):
                kept: npt.NDArray[np.int64] = np.load(path)
                return kept
        offsets = np.array(self._use(url, _offsets_in), np.int64)
        if path is not None:
            # Under its own name when it is whole: other processes look for it.
            part = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
            with part.open("wb") as file:
                np.save(file, offsets)
            part.replace(path)
        return offsets

    def _use(self, url: str, use: Callable[[Input], T]) -> T:
        def once() -> T:
            with open_input(self._copy(url) or url, self._config, name=url) as src:
                return use(src)

        return retried(once) if local_path(url) is None else once()

    def _copy(self, url: str) -> Path | None:
        """The whole copy of a remote shard, if there is to be one."""
        if self._folder is None or not self._keep_copies or local_path(url) is not None:
            return None
        path = _file(self._folder, url, ".tar")
        if not path.exists():
            with _COPYING[hash(url) % len(_COPYING)]:
                # Another thread may have copied it meanwhile.
                if not path.exists():
                    download(url, path, self._config.storage_options)
        return path


def _file(folder: Path, url: str, suffix: str) -> Path:
    """The file in a folder for what is known of a shard."""
    key, path = url, local_path(url)
    if path is not None:
        try:
            status = Path(path).stat()
        except OSError as error:
            raise path_error(path, error) from error
        key = f"{Path(path).absolute()} {status.st_size} {status.st_mtime_ns}"
    return folder / (hashlib.sha256(os.fsencode(key)).hexdigest()[:32] + suffix)


def _offsets_in(src: Input) -> list[int]:
    if not src.seekable:
        raise SourceError(
            "cannot be read from any place; Shards needs files, iter_samples takes pipes",
            source=src.name,
        )
    return sample_offsets(Archive(src))


class _ShardOrder(DistributedSampler):
    """Numbers of samples, shard by shard or mixed, of which each rank has a run."""

    def __init__(
        self,
        counts: npt.NDArray[np.int64],
        *,
        shuffle_shards: bool,
        shuffle_buffer: int,
        seed: int,
        rank: int | None,
        world_size: int | None,
        equal_length: bool,
    ) -> None:
        total = int(counts.sum())
        super().__init__(total, rank, world_size, "keep", drop=None)
        if total < (self.world_size if equal_length else 1):
            raise ValueError(
                f"{len(counts)} shards have {total} samples for {self.world_size} ranks; give more shards, "
                "or pass equal_length=False where some ranks may have none"
            )
        self.seed = check_int("seed", seed, at_least=0)
        self.shuffle_shards = shuffle_shards
        self.shuffle_buffer = check_int("shuffle_buffer", shuffle_buffer, at_least=0)
        self._counts = counts
        self._equal_length = equal_length

    def _share(self, count: int) -> range:
        # A run, so that a rank reads few shards.
        if self._equal_length:
            count -= count % self.world_size
        return range(
            count * self.rank // self.world_size, count * (self.rank + 1) // self.world_size
        )

    def _draw(self, epoch: int, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        order = np.arange(len(self._counts))
        if self.shuffle_shards:
            bits = random_bits(Purpose.SHARDS, self.seed, epoch, 0)
            order = permutation(bits, len(order))
        counts = self._counts[order]
        firsts = (np.cumsum(self._counts) - self._counts)[order]
        numbers = np.arange(self.num_draws) + np.repeat(
            firsts - (np.cumsum(counts) - counts), counts
        )
        if self.shuffle_buffer:
            moved = uniform(random_bits(Purpose.SHARDS, self.seed, epoch, 1), self.num_draws)
            key = np.arange(self.num_draws) + moved * self.shuffle_buffer
            numbers = numbers[np.argsort(key, kind="stable")]
        drawn: npt.NDArray[np.int64] = numbers[places]
        return drawn

    def __repr__(self) -> str:
        return self._describe(
            f"shuffle_shards={self.shuffle_shards}",
            f"shuffle_buffer={self.shuffle_buffer}",
            f"seed={self.seed}",
        )
