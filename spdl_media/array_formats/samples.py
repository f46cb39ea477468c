"""Samples of tar shards in the layout of WebDataset: members with the same key make one sample."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

from spdl_media.array_formats.tar import Archive
from spdl_media.inputs import Source
from spdl_media.readers import memory_of

__all__ = ("iter_samples",)

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
        TypeError: ``shards`` is not a source.
        ValueError: A rank or worker is out of range, a pattern is invalid, or there are fewer shards than
            workers of all processes: some workers would get none, and the others would wait for them forever.

    Thread safety: one thread at a time, as any generator.

    Example:
        >>> for sample in iter_samples("train-{000..099}.tar", rank=0, world_size=8):
        ...     image, label = sample["jpg"], int(sample["cls"])
    """
    _check_place("rank", rank, "world_size", world_size)
    _check_place("worker", worker, "num_workers", num_workers)
    sources = expanded(shards)
    if len(sources) < world_size * num_workers:
        raise ValueError(
            f"{len(sources)} shards cannot be shared by world_size={world_size} times "
            f"num_workers={num_workers}: some would get none. Write more shards, or use fewer workers."
        )
    return _iterate(sources[rank::world_size][worker::num_workers])


def _check_place(name: str, value: int, of_name: str, of: int) -> None:
    if of < 1 or not 0 <= value < of:
        raise ValueError(f"{name} must be from 0 to below {of_name}, not {name}={value} of {of}")


def expanded(shards: Any) -> Sequence[Source]:
    """Return the shards, with braces expanded.

    Raises:
        ValueError: A pattern is invalid.
    """
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
    choices = [
        [part] if index % 2 == 0 else _choices(part, shard) for index, part in enumerate(parts)
    ]
    count = math.prod(map(len, choices))
    # Count before the names are made, which could fill the memory.
    if count > _MAX_SHARDS:
        raise ValueError(f"{shard!r} stands for {count} shards; {_MAX_SHARDS} are the most")
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
            yield from samples_of(archive, url or archive.name)


def sample_offsets(archive: Archive) -> list[int]:
    """Return the offsets of the samples of an archive, and at the end that of the end of the last sample.

    Raises:
        ArrayFormatError: As for :func:`iter_samples`, or the members cannot be read by their positions.
        SourceError: The archive cannot be read.
    """
    offsets, last = [], None
    for name, _ in archive.members():
        key, _ = _key_and_ending(name)
        if key is not None and key != last:
            offsets.append(archive.member_offset)
            last = key
    return [*offsets, archive.offset]


def _key_and_ending(name: str) -> tuple[str | None, str]:
    match = _NAME.fullmatch(name)
    return (None, "") if match is None or _META.match(name) else (match[1], match[2])


def samples_of(archive: Archive, url: str) -> Iterator[dict[str, Any]]:
    """Yield the samples of an archive, or of the opened part of one.

    Raises:
        ArrayFormatError: As for :func:`iter_samples`.
        SourceError: The archive cannot be read.
    """
    sample: dict[str, Any] = {}
    last = None
    for name, content in archive.members():
        key, ending = _key_and_ending(name)
        if key is None:
            continue
        # In the layout of WebDataset, the files of a sample are consecutive, so another key ends the sample.
        if key != last:
            if sample:
                yield sample
            last = key
            sample = {"__key__": key, "__url__": url}
        # In lower case, as in WebDataset.
        ending = ending.lower()
        if ending in sample:
            archive.fail(f"sample {key!r} has {ending!r} twice")
        sample[ending] = content
    if sample:
        yield sample
