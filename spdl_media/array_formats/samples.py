"""Samples out of tar shards: members that share a key, as WebDataset lays them out."""

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
# What WebDataset keeps about a data set, and not for a sample: __meta__/info.json.
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

    Members that follow each other and share the name up to the first dot behind the last slash make one
    sample: ``0001.jpg``, ``0001.json`` and ``0001.cls``. Names without an ending, or that begin with a dot,
    are left out, and so are folders with two underscores on both sides, as ``__meta__/info.json``.

    Args:
        shards: One archive, or a sequence of them, such as a :class:`~spdl_media.source.LocalDirectory`;
            each of them a path, a URL, bytes or another buffer, or a file object (of a pipe:
            ``subprocess.Popen(...).stdout``), see :func:`~spdl_media.iter_tarfile`. In a ``str``,
            ``{000..099}`` stands for each number, with zeros before it up to that many digits, and
            ``{train,val}`` for each word; a ``PathLike`` is taken as it is.
        rank: Which of ``world_size`` processes this is. It gets every ``world_size``-th shard.
        world_size: Processes that share the shards.
        worker: Which of ``num_workers`` workers of the process this is. It gets every ``num_workers``-th of
            the process's shards.
        num_workers: Workers of each process.

    Returns:
        Iterator over dictionaries: contents by ending, in lower case, as ``bytes``, or as ``memoryview`` of
        memory that was given; ``"__key__"``, the shared name; ``"__url__"``, the shard's path or URL, or what
        errors call it.

    Raises:
        ArrayFormatError: As :func:`~spdl_media.iter_tarfile`, or one sample has an ending twice. When the
            iteration comes to it.
        SourceError: As :func:`~spdl_media.iter_tarfile`.
        TypeError: ``shards`` is no source.
        ValueError: A rank or worker outside of its range, a pattern that cannot be read, or fewer shards than
            workers of all processes: some would get nothing, and wait for the others for ever.

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
    """Return the shards, with braces written out.

    Raises:
        ValueError: Braces cannot be read.
    """
    # Strings and memory are sequences as well, and each of them is one shard.
    is_one = isinstance(shards, str) or memory_of(shards) is not None
    if isinstance(shards, Sequence) and not is_one:
        return [source for shard in shards for source in _expand_one(shard)]
    return _expand_one(shards)


def _expand_one(shard: Source) -> Sequence[Source]:
    """The shards that a pattern stands for, the last braces running fastest."""
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
    # Counted before the names are made, which could fill the memory.
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
        # As in shells: with a zero before one of the ends all are as wide as the wider one.
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
    """Where the samples of an ``Input`` begin, and behind them where the last one ends.

    Raises:
        ArrayFormatError: As :func:`iter_samples`, or its members cannot be read one by one.
        SourceError: It cannot be read.
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
    """Yield the samples of an archive, or of the part of it that was opened.

    Raises:
        ArrayFormatError: As :func:`iter_samples`.
        SourceError: It cannot be read.
    """
    sample: dict[str, Any] = {}
    last = None
    for name, content in archive.members():
        key, ending = _key_and_ending(name)
        if key is None:
            continue
        # WebDataset puts the files of a sample behind each other, so another key ends it.
        if key != last:
            if sample:
                yield sample
            last = key
            sample = {"__key__": key, "__url__": url}
        # As WebDataset has it.
        ending = ending.lower()
        if ending in sample:
            archive.fail(f"sample {key!r} has {ending!r} twice")
        sample[ending] = content
    if sample:
        yield sample
