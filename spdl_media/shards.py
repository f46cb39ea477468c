"""Samples of tar shards in the layout of WebDataset, one after the other or in a random order."""

from __future__ import annotations

import glob
import hashlib
import itertools
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from spdl_media._checks import check_int, with_argument_hints
from spdl_media._remote import download, retried
from spdl_media._threads import in_threads
from spdl_media.array_formats.tar import Archive
from spdl_media.config import DemuxConfig
from spdl_media.destination import Draft
from spdl_media.epochs import Purpose, permutation, random_bits, uniform
from spdl_media.errors import ArrayFormatError, SourceError
from spdl_media.inputs import Input, Source, local_path, open_input
from spdl_media.readers import memory_of, path_error
from spdl_media.samplers import DistributedSampler, Uneven
from spdl_media.source import MapIterator

__all__ = ("Shards", "iter_samples")

T = TypeVar("T")

# Shards whose headers are read concurrently.
_READERS = 8
# A block of zeros marks the end of an archive.
_END = bytes(512)
_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)", re.DOTALL)
# Metadata of a whole WebDataset, such as __meta__/info.json, which belongs to no sample.
_META = re.compile(r"__[^/]*__(?:/|\Z)")
_RANGE = re.compile(r"([0-9]{1,18})\.\.([0-9]{1,18})")
_BRACES = re.compile(r"\{([^{}]*)\}")
_MAX_SHARDS = 10_000_000


def iter_samples(
    shards: Source | Sequence[Source],
    *,
    rank: int = 0,
    world_size: int = 1,
    worker: int = 0,
    num_workers: int = 1,
) -> Iterator[dict[str, Any]]:
    """Iterate over the samples of tar archives, in the order of the archives.

    Consecutive members whose names agree up to the first dot after the last slash make one sample, such as
    ``0001.jpg``, ``0001.json`` and ``0001.cls``. Names without a suffix or with a leading dot are skipped,
    and so are folders whose names begin and end with two underscores, such as ``__meta__/info.json``.

    Args:
        shards: One archive, or a sequence of archives, such as a :class:`~spdl_media.source.LocalDirectory`.
            Each is a path, a URL, bytes or another buffer, or a file object (for a pipe:
            ``subprocess.Popen(...).stdout``); see :func:`~spdl_media.iter_tarfile`. In a ``str``,
            ``{000..099}`` expands to all numbers with leading zeros, and ``{train,val}`` to each word; a
            ``PathLike`` is not expanded.
        rank: Index of this process, from 0 to ``world_size - 1``. It gets every ``world_size``-th shard.
        world_size: Number of processes that share the shards.
        worker: Index of this worker within the process, from 0 to ``num_workers - 1``. It gets every
            ``num_workers``-th of the process's shards.
        num_workers: Number of workers of each process.

    Returns:
        Iterator over dictionaries. They map suffixes in lower case to contents, which are ``bytes``, or
        ``memoryview`` of given memory; ``"__key__"`` to the common name; and ``"__url__"`` to the path or URL
        of the shard, or its name in errors.

    Raises:
        ArrayFormatError: As for :func:`~spdl_media.iter_tarfile`, or a sample has a suffix twice. Raised when
            the iteration reaches the member.
        SourceError: As for :func:`~spdl_media.iter_tarfile`.
        TypeError: ``shards`` is not a source, or a rank, a worker or their number is not an integer.
        ValueError: A rank or worker is out of range, a pattern is invalid, or there are fewer shards than
            workers of all processes: some workers would get none, and the others would wait for them forever.

    Thread safety: one thread at a time, as any generator.

    Example:
        >>> for sample in sm.iter_samples("train-{000..099}.tar", rank=0, world_size=8):  # doctest: +SKIP
        ...     image, label = sample["jpg"], int(sample["cls"])
    """
    rank, world_size = _place("rank", rank, "world_size", world_size)
    worker, num_workers = _place("worker", worker, "num_workers", num_workers)
    sources = _expanded(shards)
    if len(sources) < world_size * num_workers:
        raise ValueError(
            f"{len(sources)} shards cannot be shared by world_size={world_size} times "
            f"num_workers={num_workers}: some would get none. Write more shards, or use fewer workers."
        )
    return _iterate(sources[rank::world_size][worker::num_workers])


def _place(name: str, value: int, of_name: str, of: int) -> tuple[int, int]:
    value, of = check_int(name, value, at_least=None), check_int(of_name, of, at_least=None)
    if of < 1 or not 0 <= value < of:
        raise ValueError(f"{name} must be from 0 to below {of_name}, not {name}={value} of {of}")
    return value, of


def _expanded(shards: Any) -> Sequence[Source]:
    """Return the shards, with braces expanded."""
    # Strings and buffers are sequences, too, but each of them is one shard.
    is_one = isinstance(shards, str) or memory_of(shards) is not None
    if isinstance(shards, Sequence) and not is_one:
        return [source for shard in shards for source in _expand_one(shard)]
    return _expand_one(shards)


def _expand_one(shard: Source) -> Sequence[Source]:
    """Return the shards of a pattern; the last braces vary fastest."""
    if not isinstance(shard, str):
        return [shard]
    if shard.startswith("pipe:"):
        raise ValueError(
            f"{shard!r} names a command, and no command is run here. Give what it writes: "
            "subprocess.Popen([...], stdout=subprocess.PIPE).stdout"
        )
    parts = _BRACES.split(shard)
    if any("{" in part or "}" in part for part in parts):
        raise ValueError(
            f"{shard!r} has braces inside of braces, or without their other half. Write a list of shards, or "
            "give a path with braces in its name as a pathlib.Path"
        )
    choices = [[part] if i % 2 == 0 else _choices(part, shard) for i, part in enumerate(parts)]
    return ["".join(words) for words in itertools.product(*choices)]


def _choices(inside: str, pattern: str) -> Sequence[str]:
    if match := _RANGE.fullmatch(inside):
        first, last = int(match[1]), int(match[2])
        if last < first:
            raise ValueError(f"the range {{{inside}}} in {pattern!r} runs backwards")
        if last - first >= _MAX_SHARDS:
            raise ValueError(f"the range {{{inside}}} in {pattern!r} is too long")
        # As in shells: if one of the ends has a leading zero, all numbers are as wide as the wider end.
        has_zeros = any(end.startswith("0") and end != "0" for end in match.groups())
        width = max(map(len, match.groups())) if has_zeros else 0
        return [f"{number:0{width}}" for number in range(first, last + 1)]
    if "," in inside:
        return inside.split(",")
    raise ValueError(
        f"{{{inside}}} in {pattern!r} is neither a range such as {{000..099}} nor words such as "
        "{train,val}. Give a path with braces in its name as a pathlib.Path"
    )


def _iterate(sources: Sequence[Source]) -> Iterator[dict[str, Any]]:
    for source in sources:
        url = os.fsdecode(os.fspath(source)) if isinstance(source, str | os.PathLike) else None
        with closing(Archive(source)) as archive:
            yield from _samples_of(archive, url or archive.name)


def _sample_offsets(archive: Archive) -> list[int]:
    """Return the offsets of the samples of an archive, and at the end that of the end of the last sample."""
    return [*(archive.member_offset for _ in _by_sample(archive)), archive.offset]


def _samples_of(archive: Archive, url: str) -> Iterator[dict[str, Any]]:
    """Yield the samples of an archive, or of the opened part of one."""
    for key, members in _by_sample(archive):
        sample: dict[str, Any] = {"__key__": key, "__url__": url}
        for _, ending, content in members:
            # In lower case, as in WebDataset.
            if ending.lower() in sample:
                archive.fail(f"sample {key!r} has {ending.lower()!r} twice")
            sample[ending.lower()] = content
        yield sample


def _by_sample(archive: Archive) -> Iterator[tuple[str, Iterator[tuple[str, str, Any]]]]:
    """Group the members of an archive, as key, ending and content; the files of a sample are consecutive."""
    named = ((_NAME.fullmatch(name), content) for name, content in archive.members())
    members = (
        (match[1], match[2], content)
        for match, content in named
        if match and not _META.match(match[0])
    )
    return itertools.groupby(members, key=itemgetter(0))


@with_argument_hints({})
class Shards(MapIterator[dict[str, Any]]):
    """Samples of tar shards, as from :func:`~spdl_media.iter_samples`, in an order by seed and epoch.

    The constructor reads the headers of all shards to index the samples; with ``cache`` it does so only once.
    Each sample is then read on demand, by a :class:`~spdl_media.DataLoader` in its threads. Shuffling keeps
    no samples in memory, and a resumed loader does not read samples that are done. Each iteration is the
    next epoch.

    The order of an epoch is the same for all ranks. Each rank gets a contiguous part of it, so that it reads
    few shards.

    Args:
        urls: A path or URL, or a sequence of them. In a ``str``, braces are expanded as in
            :func:`~spdl_media.iter_samples`, and in paths ``*``, ``?``, ``[...]`` and ``**`` are patterns as
            for :func:`glob.glob`. A ``PathLike`` is not expanded.
        shuffle_shards: Use another order of shards in each epoch.
        shuffle_buffer: Shuffle samples locally: each moves by fewer than this number of positions from its
            position in the order of shards. A multiple of the number of samples shuffles globally, 0 not
            at all.
        seed: Seed of the order, equal on all ranks.
        rank: As for :class:`~spdl_media.source.DistributedRandomSampler`.
        world_size: As for :class:`~spdl_media.source.DistributedRandomSampler`. There may be more ranks than
            shards.
        equal_length: Give all ranks equally many samples, as DistributedDataParallel needs, and drop the last
            samples of an epoch, fewer than there are ranks. False drops none, and some ranks get one more.
        cache: Folder for the index of each shard, and for copies of remote shards. Processes and machines
            may share it. A local file that has changed is indexed again; URLs are not checked for changes, so
            delete the folder if one has changed. ``None`` keeps nothing.
        keep_copies: Keep copies of remote shards in ``cache``. False: fetch each sample from the server.
        storage_options: Options of fsspec for URLs, such as credentials and timeouts. Failed requests are
            tried three times.

    Attributes:
        urls: The shards, in the given order, with patterns sorted and braces expanded.
        num_samples: Number of samples in all shards.
        epoch: The epoch of the next iteration.

    Raises:
        ArrayFormatError: A shard is damaged or truncated; the error names the shard and the member.
        SourceError: A shard cannot be read, or is not seekable, such as a pipe.
        FileNotFoundError: A pattern matches no file.
        TypeError: A shard is neither a path nor a URL.
        ValueError: Braces are invalid; there are no samples, or fewer than ranks with ``equal_length``; a
            number is negative; the rank is not below the world size.

    Thread safety: iterators are independent; begin each in one thread at a time. Samples may be read by
    any number of threads.

    Example:
        >>> shards = sm.Shards("train-*.tar", shuffle_shards=True, shuffle_buffer=10_000)  # doctest: +SKIP
        >>> sm.DataLoader(shards, preprocessor=decode, batch_size=256)  # doctest: +SKIP
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
        shards = [path for one in _expanded(urls) for path in _matches(one)]
        folder = None if cache is None else Path(cache)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        reader = _Reader(shards, config, folder if keep_copies else None, folder)
        # Counts of all shards, although a rank reads few of them, because the order covers all samples.
        counts = reader.counts
        if not counts.sum():
            raise ValueError(f"there are no samples in {len(shards)} shards: {shards[:5]}")
        uneven: Uneven = "drop" if equal_length else "keep"
        order = _ShardOrder(int(counts.sum()), (rank, world_size), uneven)
        order.counts = counts
        order.seed = check_int("seed", seed, at_least=0)
        order.shuffle_shards = shuffle_shards
        order.shuffle_buffer = check_int("shuffle_buffer", shuffle_buffer, at_least=0)
        super().__init__(reader, order)
        self.urls = tuple(shards)
        self.num_samples = order.num_draws

    def __repr__(self) -> str:
        return f"Shards({self.num_samples} samples in {len(self.urls)} shards)"


def _matches(shard: Any) -> list[str]:
    """Expand a pattern to the paths that match; anything else is returned unchanged."""
    if not isinstance(shard, str | os.PathLike):
        raise TypeError(
            f"a shard is a path or a URL, not {type(shard).__name__}; pass several as a list, and what is in "
            "memory to iter_samples"
        )
    path = local_path(shard)
    if path is None or not isinstance(shard, str) or not set(path) & set("*?["):
        return [os.fsdecode(shard)]
    found = sorted(glob.glob(path, recursive=True))  # noqa: PTH207  # Path.glob takes no absolute patterns
    if not found:
        raise FileNotFoundError(
            f"no file matches {shard!r}. If *, ? or [ is part of the file's name, pass a pathlib.Path"
        )
    return found


class _Reader:
    """Reads samples by number, counted through all shards.

    Attributes:
        counts: Number of samples in each shard.
    """

    def __init__(
        self, urls: Sequence[str], config: DemuxConfig, copies: Path | None, places: Path | None
    ) -> None:
        self._urls, self._config, self._sources = urls, config, list(urls)
        self._offsets: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)] * len(urls)
        in_threads(lambda at: self._prepare(at, copies, places), len(urls), _READERS)
        self.counts = np.array([len(offsets) - 1 for offsets in self._offsets], np.int64)
        self._count = int(self.counts.sum())
        self._firsts = (np.cumsum(self.counts) - self.counts).tolist()

    def __getitem__(self, number: int) -> dict[str, Any]:
        if not 0 <= number < self._count:
            last = self._count - 1
            raise IndexError(f"there is no sample {number}: they are numbered from 0 to {last}")
        # bisect_right, because empty shards begin at the same number as the next shard.
        index = bisect_right(self._firsts, number) - 1
        place, url = number - self._firsts[index], self._urls[index]
        start, stop = self._offsets[index][place : place + 2].tolist()
        data = bytes(self._use(index, lambda src: src.read_at(start, stop - start), start))
        # With an end mark, a part of an archive is a valid archive.
        archive = Archive(data + _END)
        archive.name = url
        try:
            samples = list(_samples_of(archive, url)) if len(data) == stop - start else []
        except ArrayFormatError as error:
            error.offset = start + (error.offset or 0)
            raise
        if len(samples) != 1:
            raise ArrayFormatError(
                "has changed since its headers were read; make Shards again",
                source=url,
                offset=start,
            )
        contents = samples[0].items()
        # Copied, because a view would keep the memory of the whole archive alive.
        return {name: part if isinstance(part, str) else bytes(part) for name, part in contents}

    def _prepare(self, index: int, copies: Path | None, places: Path | None) -> None:
        """Find the offsets where the samples of a shard begin and the last one ends, cached in a folder."""
        url = self._urls[index]
        # The copy first, so that headers are read from the disk.
        if copies is not None and local_path(url) is None:
            copy = _file(copies, url, ".tar")
            if not copy.exists():
                retried(lambda: download(url, copy, self._config.storage_options))
            self._sources[index] = str(copy)
        kept = places and _file(places, url, ".npy")
        # A damaged cache file is ignored and rewritten.
        with suppress(OSError, ValueError, EOFError):
            if kept:
                self._offsets[index] = np.load(kept)
                return
        offsets = np.array(self._use(index, lambda src: _sample_offsets(Archive(src))))
        if kept:
            # Written atomically, because other processes may use the folder.
            with Draft(kept) as draft, draft.path.open("wb") as file:
                np.save(file, offsets)
        self._offsets[index] = offsets

    def _use(self, index: int, use: Callable[[Input], T], at: int = 0) -> T:
        source, name = self._sources[index], self._urls[index]

        def once() -> T:
            with open_input(source, self._config, name=name, at=at) as src:
                if not src.seekable:
                    text = "cannot seek: a pipe, or a server that states no size. Use cache= and copies"
                    raise SourceError(text, source=src.name)
                return use(src)

        return retried(once) if local_path(source) is None else once()


def _file(folder: Path, url: str, suffix: str) -> Path:
    """Return the path of a shard's cache file in a folder."""
    # The key of a local file changes with the file; servers are not asked for changes.
    key, path = url, local_path(url)
    if path is not None:
        try:
            status = Path(path).stat()
        except OSError as error:
            raise path_error(path, error) from error
        key = f"{Path(path).absolute()} {status.st_size} {status.st_mtime_ns}"
    return folder / (hashlib.sha256(os.fsencode(key)).hexdigest()[:32] + suffix)


class _ShardOrder(DistributedSampler):
    """Order of sample numbers, by shards or shuffled; each rank gets a contiguous part."""

    _remedy = "equal_length=False, and some ranks will have none"
    counts: npt.NDArray[np.int64]
    seed: int
    shuffle_shards: bool
    shuffle_buffer: int

    def share(self, count: int) -> range:
        """Return the rank's positions among ``count``."""
        # Contiguous, so that a rank reads few shards.
        if self._uneven == "drop":
            count -= count % self.world_size
        return range(*(count * rank // self.world_size for rank in (self.rank, self.rank + 1)))

    def _draw(self, epoch: int, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        order = np.arange(len(self.counts))
        if self.shuffle_shards:
            order = permutation(random_bits(Purpose.SHARDS, self.seed, epoch, 0), len(order))
        counts, numbers = self.counts[order], np.arange(self.num_draws)
        # For each shard in order, the consecutive numbers from its first one.
        firsts = (np.cumsum(self.counts) - self.counts)[order]
        drawn = numbers + np.repeat(firsts - (np.cumsum(counts) - counts), counts)
        if self.shuffle_buffer:
            moved = uniform(random_bits(Purpose.SHARDS, self.seed, epoch, 1), self.num_draws)
            drawn = drawn[np.argsort(numbers + moved * self.shuffle_buffer, kind="stable")]
        result: npt.NDArray[np.int64] = drawn[places]
        return result
