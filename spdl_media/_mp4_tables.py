"""Times, places and key frames of the packets of an MP4 or MOV, from its tables: no packet is read.

FFmpeg's own list has the times of decoding alone, and of a fragmented file the first fragments.

See:
    ISO/IEC 14496-12, 8.6 (times, sync samples), 8.7 (sizes and places), 8.8 (fragments).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from spdl_media.exif import Read, boxes, read_boxes

Ticks: TypeAlias = npt.NDArray[np.int64]
Mask: TypeAlias = npt.NDArray[np.bool_]

# A file of many hours in fragments of a second has some ten thousand of them.
_MAX_FRAGMENTS = 1 << 18

_IS_NO_KEY = 0x01010000
"""Flags of a sample in a fragment: it is no sync sample, or it depends on others."""


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of a track in decoding order, before edit lists.

    Attributes:
        dts: Ticks of decoding, from the first sample or the fragments' own zero.
        offsets: What is added to them for the ticks of presentation.
        places: Byte in the file at which each begins.
        durations: Ticks from each to the next in decoding order.
        is_key: Whether decoding can begin there.
        is_listed: They stand in the tables of the track, and not in fragments.
    """

    dts: Ticks
    offsets: Ticks
    durations: Ticks
    places: Ticks
    is_key: Mask
    is_listed: bool = True


def read_samples(read: Read, size: int, track_id: int) -> Samples | None:
    """Read the tables of the track with this number.

    Args:
        read: Gives ``(start, size)`` bytes of the file.
        size: Of the file.
        track_id: As the header of the track has it.

    Returns:
        The samples; ``None``: there is not one such track, its tables contradict each other, or it has
        samples both in tables and in fragments.

    Raises:
        SourceError: ``read`` cannot read the file.
    """
    try:
        moov, runs, defaults = memoryview(b""), [], b""
        # The walk over the boxes of the file reads their headers alone; a fragment is two boxes.
        for kind, start, end in read_boxes(read, 0, size, 2 * _MAX_FRAGMENTS):
            if kind == b"moov":
                moov = memoryview(read(start, end - start))
                if next(_boxes(moov, "mvex"), None) is None:
                    break  # then no fragments follow, and what follows is not walked over
                defaults = _track_defaults(moov, track_id)
            elif kind == b"moof":
                view = memoryview(read(start, end - start))
                runs += _fragment(view, start - 8, track_id, defaults, size)
        (track,) = [one for one in _boxes(moov, "trak") if _track_id(one) == track_id]
        samples = _tabled(track, size)
        if not runs:
            return samples
        return None if len(samples.dts) else _joined(runs)
    # Boxes that are missing end a search, and others are too short or have impossible numbers.
    except (StopIteration, struct.error, ValueError, IndexError, OverflowError):
        return None


def _boxes(view: memoryview, path: str) -> Iterator[memoryview]:
    """The contents of the boxes at a path below this one, such as ``"mdia/minf/stbl"``."""
    name, _, rest = path.partition("/")
    for kind, start, end in boxes(view):
        if kind == name.encode():
            content = view[start:end]
            yield from _boxes(content, rest) if rest else (content,)


def _table(view: memoryview, path: str, dtype: str, skip: int = 0) -> Any:
    """The rows behind the version and the count of a table; none, if it is not there."""
    content = next(_boxes(view, path), None)
    if content is None:
        return np.empty(0, dtype)
    (count,) = struct.unpack_from(">I", content, 4 + skip)
    return np.frombuffer(content, dtype, count, 8 + skip)


def _track_id(track: memoryview) -> int:
    header = next(_boxes(track, "tkhd"))
    (number,) = struct.unpack_from(">I", header, 20 if header[0] == 1 else 12)
    return int(number)


def _tabled(track: memoryview, size: int) -> Samples:
    """The samples that the tables of a track list, in a file of this size."""
    stbl = next(_boxes(track, "mdia/minf/stbl"))
    same, count = struct.unpack_from(">II", next(_boxes(stbl, "stsz")), 4)
    _check_fits(count, same, size)
    sizes = np.full(count, same) if same else _table(stbl, "stsz", ">u4", 4).astype(np.int64)
    steps = _table(stbl, "stts", ">u4,>u4")
    deltas = _repeated(steps["f1"], steps["f0"], count)
    shifts = _table(stbl, "ctts", ">u4,>i4")
    offsets = _repeated(shifts["f1"], shifts["f0"], count) if len(shifts) else deltas * 0
    is_key = np.isin(np.arange(count), _table(stbl, "stss", ">u4").astype(np.int64) - 1)
    if next(_boxes(stbl, "stss"), None) is None:
        is_key[:] = True
    return Samples(np.cumsum(deltas) - deltas, offsets, deltas, _places(stbl, sizes), is_key)


def _check_fits(count: int, sample_size: int, size: int) -> None:
    # Before an array of so many samples is made: a damaged count may ask for any amount of memory.
    if count * sample_size > size:
        raise ValueError("more samples than the file can hold")


def _repeated(values: Any, counts: Any, total: int) -> Ticks:
    if counts.sum(dtype=np.int64) != total:
        raise ValueError("tables of different lengths")
    return np.repeat(values.astype(np.int64), counts)


def _places(stbl: memoryview, sizes: Ticks) -> Ticks:
    """Where samples begin, by the chunks in which they lie one behind the other."""
    chunks = _table(stbl, "stco", ">u4")
    if not len(chunks):
        chunks = _table(stbl, "co64", ">u8")
    runs = _table(stbl, "stsc", ">u4,>u4,>u4")
    firsts = runs["f0"].astype(np.int64) - 1
    lengths = np.diff(firsts, append=len(chunks))
    counts = np.repeat(runs["f1"].astype(np.int64), lengths)
    if len(counts) != len(chunks) or counts.sum() != len(sizes):
        raise ValueError("chunks that do not hold the samples")
    # Where samples would lie without gaps between chunks, and the gap before each chunk.
    closed = np.cumsum(sizes) - sizes
    gaps = chunks.astype(np.int64) - closed[np.cumsum(counts) - counts]
    places: Ticks = closed + np.repeat(gaps, counts)
    return places


def _track_defaults(moov: memoryview, track_id: int) -> bytes:
    """Duration, size and flags of samples in fragments that do not say so themselves."""
    for content in _boxes(moov, "mvex/trex"):
        if struct.unpack_from(">I", content, 4)[0] == track_id:
            return bytes(content[12:24])
    return b""


# Start of decoding as stated, and of each sample: duration, size, flags, offset; and the first place.
_Run: TypeAlias = tuple[int | None, Any, int]


def _fragment(view: memoryview, moof: int, track_id: int, defaults: bytes, size: int) -> list[_Run]:
    """The runs of samples of a track in a box ``moof`` that begins at this byte of a file of this size."""
    runs: list[_Run] = []
    for traf in _boxes(view, "traf"):
        header = next(_boxes(traf, "tfhd"))
        flags, number = struct.unpack_from(">II", header)
        if number != track_id:
            continue
        words = iter(np.frombuffer(header, ">u4", offset=8).tolist())
        base = next(words) << 32 | next(words) if flags & 1 else moof
        if flags & 2:
            next(words)
        stated = zip((0x8, 0x10, 0x20), struct.unpack(">3I", defaults), strict=True)
        usual = [next(words) if flags & flag else default for flag, default in stated]
        tfdt = next(_boxes(traf, "tfdt"), None)
        start = None if tfdt is None else struct.unpack_from(">Q" if tfdt[0] else ">I", tfdt, 4)[0]
        end = base
        for run in _boxes(traf, "trun"):
            rows, position = _run_rows(run, usual, size)
            end = end if position is None else base + position
            runs.append((start, rows, end))
            start, end = None, end + int(rows[:, 1].sum())
    return runs


def _run_rows(run: memoryview, usual: list[int], size: int) -> tuple[Any, int | None]:
    """Duration, size, flags and offset of each sample, and where the first one begins."""
    flags, count = struct.unpack_from(">II", run)
    start, position, first = 8, None, None
    if flags & 1:
        ((position,), start) = struct.unpack_from(">i", run, start), start + 4
    if flags & 4:
        ((first,), start) = struct.unpack_from(">I", run, start), start + 4
    columns = [column for column in range(4) if flags & 0x100 << column]
    # Without a column of sizes all have the usual one, and none has no bytes.
    _check_fits(count, 4 * len(columns) if 1 in columns else max(usual[1], 1), size)
    rows = np.empty((count, 4), np.int64)
    rows[:] = [*usual, 0]
    if columns:
        found = np.frombuffer(run, ">u4", count * len(columns), start).reshape(count, -1)
        rows[:, columns] = found
        # Offsets of version 0 are unsigned by the letter, and negative in files all the same.
        rows[:, 3] = rows[:, 3].astype(np.int32)
    if first is not None and count and not flags & 0x400:
        rows[0, 2] = first
    return rows, position


def _joined(runs: list[_Run]) -> Samples:
    """The samples of all runs, in the order of the file."""
    dts, places, now = [], [], 0
    for start, rows, position in runs:
        now = now if start is None else start
        dts.append(now + np.cumsum(rows[:, 0]) - rows[:, 0])
        places.append(position + np.cumsum(rows[:, 1]) - rows[:, 1])
        now += int(rows[:, 0].sum())
    rows = np.concatenate([rows for _, rows, _ in runs])
    return Samples(
        np.concatenate(dts),
        rows[:, 3],
        rows[:, 0],
        np.concatenate(places),
        rows[:, 2] & _IS_NO_KEY == 0,
        is_listed=False,
    )
