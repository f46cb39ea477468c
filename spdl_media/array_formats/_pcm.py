"""Coded samples as arrays: a table of how each kind is read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from spdl_media.array_formats._content import Content

Reader: TypeAlias = Callable[[Content, int, tuple[int, int]], np.ndarray[Any, Any]]
"""Makes the array of (content, offset of the first byte, shape)."""

PCM, _FLOAT, _A_LAW, _MU_LAW = 1, 3, 6, 7
FORMATS = frozenset({PCM, _FLOAT, _A_LAW, _MU_LAW})
"""The formats whose samples are of one size each. What else there is comes in packets."""

# np.take needs eight bytes for each index, so not all at once; each piece hands the GIL over twice, so not in
# small ones: with 16 Ki indices two threads get 1.2 times as much done as one, with these 1.8 times.
_BLOCK = 256 * 1024


def _view(
    dtype: np.dtype[Any], content: Content, offset: int, shape: tuple[int, int]
) -> np.ndarray[Any, Any]:
    return np.ndarray(shape, dtype, content, offset)


def _read_24_bits(content: Content, offset: int, shape: tuple[int, int]) -> np.ndarray[Any, Any]:
    """24 bits at the top of 32."""
    # Four bytes from the one before each sample on, of which the lowest is then cleared: one pass, where
    # copying three bytes to their places takes six times as long. Before the first there is the header.
    size = shape[0] * shape[1]
    if not size:
        return np.empty(shape, np.int32)
    wide = np.ndarray((size,), "<i4", content, offset - 1, (3,))
    out = np.empty(shape, np.int32)
    np.bitwise_and(wide, -256, out=out.reshape(-1))
    return out


def _read_by_table(
    make_table: Callable[[], np.ndarray[Any, Any]],
    content: Content,
    offset: int,
    shape: tuple[int, int],
) -> np.ndarray[Any, Any]:
    """Look the bytes up, two at a time, which is twice as fast as one by one."""
    size = shape[0] * shape[1]
    out = np.empty(shape, np.int16)
    table = _pairs_of(make_table)
    codes = np.ndarray((size // 2,), "<u2", content, offset)
    pairs = out.reshape(-1)[: size // 2 * 2].view(np.uint32)
    for start in range(0, len(codes), _BLOCK):
        piece = slice(start, start + _BLOCK)
        # Not mode "raise", for which NumPy would fill a buffer first.
        np.take(table, codes[piece], out=pairs[piece], mode="clip")
    if size % 2:
        out.reshape(-1)[-1] = make_table()[content[offset + size - 1]]
    return out


@functools.cache
def _pairs_of(make_table: Callable[[], np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Two samples for every two bytes: 256 KiB, made at first use."""
    table = make_table()
    return np.stack([np.tile(table, 256), table.repeat(256)], axis=1).view(np.uint32).reshape(-1)


@functools.cache
def _mu_law() -> np.ndarray[Any, Any]:
    """ITU-T G.711, table 2: sign, three bits of exponent and four of mantissa, all inverted."""
    codes = ~np.arange(256, dtype=np.uint8)
    exponent, mantissa = (codes >> 4 & 7).astype(np.int32), (codes & 15).astype(np.int32)
    size = ((2 * mantissa + 33) << exponent) - 33
    return (4 * np.where(codes & 0x80, -size, size)).astype(np.int16)


@functools.cache
def _a_law() -> np.ndarray[Any, Any]:
    """ITU-T G.711, table 1: the same fields with every second bit inverted; exponents 0 and 1 are linear."""
    codes = np.arange(256, dtype=np.uint8) ^ 0x55
    exponent, mantissa = (codes >> 4 & 7).astype(np.int32), (codes & 15).astype(np.int32)
    size = np.where(
        exponent == 0, 2 * mantissa + 1, (2 * mantissa + 33) << np.maximum(exponent - 1, 0)
    )
    return (8 * np.where(codes & 0x80, size, -size)).astype(np.int16)


READERS: Mapping[tuple[int, int], Reader] = MappingProxyType(
    {
        (PCM, 1): partial(_view, np.dtype("u1")),
        (PCM, 2): partial(_view, np.dtype("<i2")),
        (PCM, 3): _read_24_bits,
        (PCM, 4): partial(_view, np.dtype("<i4")),
        (PCM, 8): partial(_view, np.dtype("<i8")),
        (_FLOAT, 4): partial(_view, np.dtype("<f4")),
        (_FLOAT, 8): partial(_view, np.dtype("<f8")),
        (_A_LAW, 1): partial(_read_by_table, _a_law),
        (_MU_LAW, 1): partial(_read_by_table, _mu_law),
    }
)
"""By code of the format and bytes of a sample."""
