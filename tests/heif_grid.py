"""Writes HEIF files with a grid of AV1 tiles, box by box, because no FFmpeg muxer does."""

from __future__ import annotations

import io
import struct

import av
import numpy as np

from spdl_media.testing import make_image


def make_grid(
    picture: np.ndarray, columns: int, *, brand: bytes = b"avif", meta_is_last: bool = False
) -> bytes:
    """Make an AVIF whose primary item is a grid of ``columns`` tiles of equal width.

    With ``meta_is_last``, 100 kB of coded data that no item uses come before the metadata, too.
    """
    height, width = picture.shape[:2]
    tiles = [_tile(part) for part in np.split(picture, columns, axis=1)]
    size, tile_size = _ispe(width, height), _ispe(width // columns, height)
    grid = struct.pack(">BBBBHH", 0, 0, 0, columns - 1, width, height)
    ids = range(2, 2 + columns)
    infe = [_infe(1, b"grid"), *(_infe(item, b"av01") for item in ids)]
    iinf = _full(b"iinf", struct.pack(">H", len(infe)) + b"".join(infe))
    dimg = struct.pack(f">HH{columns}H", 1, columns, *ids)
    iref = _full(b"iref", _box(b"dimg", dimg))
    ipco = _box(b"ipco", size + tile_size + _box(b"av1C", tiles[0][0]))
    ipma = struct.pack(">I", 1 + columns) + struct.pack(">HBB", 1, 1, 1)
    ipma += b"".join(struct.pack(">HBBB", item, 2, 2, 0x83) for item in ids)
    iprp = _box(b"iprp", ipco + _full(b"ipma", ipma))
    data = [grid, *(coded for _, coded in tiles)]

    def meta(start: int) -> bytes:
        entries = b""
        for item, part in enumerate(data, 1):
            entries += struct.pack(">HHHII", item, 0, 1, start, len(part))
            start += len(part)
        iloc = _full(b"iloc", struct.pack(">BBH", 0x44, 0, len(data)) + entries)
        hdlr = _full(b"hdlr", b"\0" * 4 + b"pict" + b"\0" * 13)
        pitm = _full(b"pitm", struct.pack(">H", 1))
        return _full(b"meta", hdlr + pitm + iloc + iinf + iref + iprp)

    ftyp = _box(b"ftyp", brand + b"\0\0\0\0" + brand + b"mif1miaf")
    if meta_is_last:
        return ftyp + _box(b"mdat", b"".join(data) + bytes(100_000)) + meta(len(ftyp) + 8)
    start = len(ftyp) + len(meta(0)) + 8
    return ftyp + meta(start) + _box(b"mdat", b"".join(data))


def make_in_idat(picture: np.ndarray, colors: bytes = b"") -> bytes:
    """Make an AVIF whose coded data are within its metadata, in the box idat.

    Args:
        picture: The image. Its coded data state limited range.
        colors: Primaries, transfer and matrix in two bytes each, and 0x80 for full range.
    """
    config, coded = _tile(picture)
    height, width = picture.shape[:2]
    properties = [_ispe(width, height), _box(b"av1C", config)]
    if colors:
        properties.append(_box(b"colr", b"nclx" + colors))
    numbers = bytes((1, 0x82, 3)[: len(properties)])
    ipma = struct.pack(">IHB", 1, 1, len(properties)) + numbers
    iprp = _box(b"iprp", _box(b"ipco", b"".join(properties)) + _full(b"ipma", ipma))
    # Construction method 1: offsets are relative to the box idat.
    entry = struct.pack(">HHHHII", 1, 1, 0, 1, 0, len(coded))
    iloc = _box(b"iloc", b"\1\0\0\0" + struct.pack(">BBH", 0x44, 0, 1) + entry)
    hdlr = _full(b"hdlr", b"\0" * 4 + b"pict" + b"\0" * 13)
    pitm = _full(b"pitm", struct.pack(">H", 1))
    iinf = _full(b"iinf", struct.pack(">H", 1) + _infe(1, b"av01"))
    meta = _full(b"meta", hdlr + pitm + iloc + iinf + iprp + _box(b"idat", coded))
    return _box(b"ftyp", b"avif\0\0\0\0avifmif1miaf") + meta


def _tile(picture: np.ndarray) -> tuple[bytes, bytes]:
    """Encode a tile; return the decoder configuration and the coded data."""
    with av.open(io.BytesIO(make_image(np.ascontiguousarray(picture), codec="libsvtav1"))) as file:
        stream = file.streams.video[0]
        packet = next(packet for packet in file.demux(stream) if packet.size)
        return bytes(stream.codec_context.extradata or b""), bytes(packet)


def _box(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I4s", 8 + len(content), kind) + content


def _full(kind: bytes, content: bytes) -> bytes:
    return _box(kind, b"\0\0\0\0" + content)


def _infe(item: int, kind: bytes) -> bytes:
    return _box(b"infe", b"\x02\0\0\0" + struct.pack(">HH4s", item, 0, kind) + b"\0")


def _ispe(width: int, height: int) -> bytes:
    return _full(b"ispe", struct.pack(">II", width, height))
