"""Adds metadata to images by hand, because no encoder here writes all eight orientations."""

from __future__ import annotations

import struct
import zlib

import numpy as np


def exif_block(orientation: int, order: str = "<") -> bytes:
    """Make Exif data: a TIFF header and a directory with the orientation."""
    head = b"II*\0" if order == "<" else b"MM\0*"
    return (
        head
        + struct.pack(f"{order}IH", 8, 1)
        + struct.pack(f"{order}HHIHxx", 274, 3, 1, orientation)
        + bytes(4)
    )


def jpeg_with_exif(jpeg: bytes, exif: bytes) -> bytes:
    """Insert Exif as the first segment of a JPEG."""
    payload = b"Exif\0\0" + exif
    return jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(payload) + 2) + payload + jpeg[2:]


def png_chunk(kind: bytes, payload: bytes) -> bytes:
    return (
        struct.pack(">I", len(payload))
        + kind
        + payload
        + struct.pack(">I", zlib.crc32(kind + payload))
    )


def png_with_exif(png: bytes, exif: bytes, *, after_pixels: bool = False) -> bytes:
    """Insert a chunk eXIf after the header or after the pixels of a PNG."""
    position = len(png) - 12 if after_pixels else 33
    return png[:position] + png_chunk(b"eXIf", exif) + png[position:]


def riff_chunk(kind: bytes, payload: bytes) -> bytes:
    return kind + struct.pack("<I", len(payload)) + payload + bytes(len(payload) % 2)


def webp_form(*chunks: bytes) -> bytes:
    body = b"WEBP" + b"".join(chunks)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def webp_with_exif(webp: bytes, exif: bytes, width: int, height: int) -> bytes:
    """Convert a simple WebP to the extended format with a chunk EXIF at its end."""
    sizes = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    extended = riff_chunk(b"VP8X", b"\x08\0\0\0" + sizes)
    return webp_form(extended, webp[12:], riff_chunk(b"EXIF", exif))


def gray_tiff(
    gray: np.ndarray, *, orientation: int = 1, order: str = "<", rows_per_strip: int = 2
) -> bytes:
    """Make an uncompressed 8-bit TIFF whose directory comes before its strips."""
    height, width = gray.shape
    rows = [gray[row : row + rows_per_strip] for row in range(0, height, rows_per_strip)]
    entries = 9
    arrays = 8 + 2 + 12 * entries + 4
    pixels = arrays + 8 * len(rows)
    sizes = [strip.size for strip in rows]
    offsets = [pixels + sum(sizes[:index]) for index in range(len(rows))]
    # A single value is stored in the entry itself.
    where = (arrays, arrays + 4 * len(rows)) if len(rows) > 1 else (offsets[0], sizes[0])
    tags = [
        (256, 4, 1, width),
        (257, 4, 1, height),
        (258, 4, 1, 8),
        (259, 4, 1, 1),
        (262, 4, 1, 1),
        (273, 4, len(rows), where[0]),
        (274, 4, 1, orientation),
        (278, 4, 1, rows_per_strip),
        (279, 4, len(rows), where[1]),
    ]
    head = b"II*\0" if order == "<" else b"MM\0*"
    directory = b"".join(struct.pack(f"{order}HHII", *tag) for tag in tags)
    body = struct.pack(f"{order}{2 * len(rows)}I", *offsets, *sizes)
    return (
        head
        + struct.pack(f"{order}IH", 8, entries)
        + directory
        + bytes(4)
        + body
        + gray.astype(np.uint8).tobytes()
    )


def box(kind: bytes, *payload: bytes) -> bytes:
    body = b"".join(payload)
    return struct.pack(">I", len(body) + 8) + kind + body


def irot(quarters: int) -> bytes:
    """Make an irot box: a rotation by quarter turns, anticlockwise."""
    return box(b"irot", bytes([quarters]))


def imir(axis: int) -> bytes:
    """Make an imir box: swap top and bottom (0) or left and right (1)."""
    return box(b"imir", bytes([axis]))


def avif_with_properties(
    properties: list[bytes],
    associated: list[int],
    *,
    wide: bool = False,
    item: int = 7,
    num_bytes: int = 16,
) -> bytes:
    """Make the boxes of an AVIF with dummy pixel data.

    Args:
        properties: Boxes of the property container.
        associated: Indices of properties, from 1, that apply to the primary item, in order.
        wide: Whether to write 32-bit items and 16-bit indices.
        item: The number of the primary item. Another item has a quarter turn.
        num_bytes: Length of the item's data.
    """
    number = ">I" if wide else ">H"
    unit = ">H" if wide else ">B"
    essential = 0x8000 if wide else 0x80
    own = b"".join(struct.pack(unit, position | essential) for position in associated)
    association = (
        struct.pack(">II", (1 << 24 | 1) if wide else 0, 2)
        + struct.pack(number, item + 1)
        + bytes([1])
        + struct.pack(unit, len(properties) + 1)
        + struct.pack(number, item)
        + bytes([len(associated)])
        + own
    )
    version = bytes([int(wide), 0, 0, 0])
    pitm = box(b"pitm", version, struct.pack(number, item))
    iprp = box(b"iprp", box(b"ipco", *properties, irot(1)), box(b"ipma", association))
    ftyp = box(b"ftyp", b"avif", bytes(4), b"mif1")

    def meta(offset: int) -> bytes:
        place = struct.pack(">HHHII", item, 0, 1, offset, num_bytes)
        iloc = box(b"iloc", bytes(4), b"\x44\x00", struct.pack(">H", 1), place)
        return box(b"meta", bytes(4), pitm, iloc, iprp)

    offset = len(ftyp) + len(meta(0)) + 8
    return ftyp + meta(offset) + box(b"mdat", bytes(num_bytes))


def turned_avif(avif: bytes, properties: list[bytes]) -> bytes:
    """Add properties, which apply in this order, to an AVIF of one item that FFmpeg has written."""
    data = bytearray(avif)
    meta, iprp, ipco, ipma = (avif.index(kind) - 4 for kind in (b"meta", b"iprp", b"ipco", b"ipma"))
    assert data[ipma + 12 : ipma + 16] == struct.pack(">I", 1), "one item"
    known, added, count = data[ipma + 18], b"".join(properties), len(properties)
    # FFmpeg associates all properties that it writes, by indices of one byte.
    for start, more in ((meta, len(added) + count), (iprp, len(added) + count)):
        _grow(data, start, more)
    _grow(data, ipco, len(added))
    _grow(data, ipma, count)
    data[ipma + 18] = known + count
    end = ipma + 19 + known
    data[end:end] = bytes(0x80 | number for number in range(known + 1, known + count + 1))
    data[ipma:ipma] = added
    # Skip version and flags, widths, two counts and two numbers to reach the only extent of the item.
    _grow(data, avif.index(b"iloc") + 4 + 14, len(added) + count)
    return bytes(data)


def _grow(data: bytearray, position: int, by: int) -> None:
    (value,) = struct.unpack_from(">I", data, position)
    struct.pack_into(">I", data, position, value + by)
