"""Walk the parts of files: boxes, chunks, segments, directories.

Readers yield the start and end of each part's payload as declared in the file; the end may lie past the data.
A truncated header raises ``struct.error``. Nothing is copied.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple, TypeAlias

# Data of a still image: any contiguous memory of bytes.
Bytes: TypeAlias = bytes | bytearray | memoryview

# Kind, first byte of the payload, first byte after it.
Part: TypeAlias = tuple[bytes, int, int]

# ``read(position, size)`` returns up to ``size`` bytes of the file from a position.
Read: TypeAlias = Callable[[int, int], Bytes]


# Limit of parts, so that a file made of empty parts takes milliseconds, not minutes.
MAX_PARTS = 1 << 16


# Offset, signature, name for opening, and FFmpeg's list of names of formats with a unique signature. Naming
# the format saves FFmpeg's probing of all demuxers: 0.1 ms, or 0.3 ms for MP3.
_SIGNATURES = (
    (0, b"fLaC", "flac", "flac"),
    (0, b"OggS", "ogg", "ogg"),
    (4, b"ftyp", "mov", "mov,mp4,m4a,3gp,3g2,mj2"),
    (0, b"\x1aE\xdf\xa3", "matroska", "matroska,webm"),
)


def signed_format(head: Bytes) -> tuple[str, str] | None:
    """Find a format by its signature in the first bytes: its name for opening, and all its names."""
    for offset, signature, name, names in _SIGNATURES:
        if head[offset : offset + len(signature)] == signature:
            return name, names
    return None


class Chunks(NamedTuple):
    """Layout of the chunks in a family of formats.

    Attributes:
        start: Offset of the first chunk.
        header: Layout of kind and payload length, in the order of the file.
        padding: Payloads are padded to a multiple of so many bytes.
        trailer: Bytes after each payload.
    """

    start: int
    header: struct.Struct
    padding: int = 1
    trailer: int = 0

    def of(self, view: memoryview) -> Iterator[Part]:
        """Yield the chunks of a file in memory.

        Raises:
            struct.error: The file ends inside the header of a chunk.
        """
        return self.read(lambda start, size: view[start : start + size], len(view))

    def read(self, read: Read, size: int) -> Iterator[Part]:
        """Yield the chunks of a file of this size; only their headers are read.

        Raises:
            struct.error: The file ends inside the header of a chunk.
        """
        position = self.start
        for _ in range(MAX_PARTS):
            if position >= size:
                return
            first, second = self.header.unpack(read(position, self.header.size))
            kind, length = (first, second) if isinstance(first, bytes) else (second, first)
            # A negative length means "unknown" in CAF; the walk must still advance.
            position += self.header.size
            end = position + max(0, length)
            yield kind, position, position + length
            position = end + -end % self.padding + self.trailer


PNG = Chunks(8, struct.Struct(">I4s"), trailer=4)
RIFF = Chunks(12, struct.Struct("<4sI"), padding=2)
IFF = Chunks(12, struct.Struct(">4sI"), padding=2)
CAF = Chunks(8, struct.Struct(">4sq"))


def boxes(view: memoryview, start: int = 0, stop: int | None = None) -> Iterator[Part]:
    """Yield the boxes of an ISO base media file (AVIF, HEIF, JPEG 2000) between two positions.

    Raises:
        struct.error: The data ends inside the header of a box.
    """
    stop = len(view) if stop is None else min(stop, len(view))
    return read_boxes(lambda position, size: view[position : position + size], start, stop)


def read_boxes(read: Read, position: int, stop: int, most: int = MAX_PARTS) -> Iterator[Part]:
    """Yield at most ``most`` boxes between two positions of a file; only their headers are read.

    Raises:
        struct.error: The data ends inside the header of a box.
    """
    for _ in range(most):
        if position + 8 > stop:
            return
        header = read(position, 16)
        length, kind = struct.unpack_from(">I4s", header)
        start = position + 8
        # 1 means that a 64-bit length follows the kind.
        if length == 1:
            (length,), start = struct.unpack_from(">Q", header, 8), position + 16
        end = stop if length == 0 else position + length  # 0 means up to the end
        if end < start:
            return
        yield kind, start, end
        position = end


def describing_boxes(read: Read, size: int) -> bytes:
    """Return the boxes ftyp, meta and moov of an ISO base media file, wherever they are.

    Raises:
        struct.error: The data ends inside the header of a box.
    """
    return b"".join(
        struct.pack(">I4s", 8 + min(end, size) - start, kind) + read(start, min(end, size) - start)
        for kind, start, end in read_boxes(read, 0, size)
        if kind in (b"ftyp", b"meta", b"moov")
    )


JPEG_START, JPEG_END, JPEG_SCAN, JPEG_APP1 = 0xD8, 0xD9, 0xDA, 0xE1

# Markers that begin a segment or end the image. Inside coded data, 0xFF is followed by 0x00 or a restart
# marker (0xD0-0xD7), in JPEG-LS by anything below 0x80.
_JPEG_MARKER = re.compile(rb"\xff[\xc0-\xcf\xd8-\xfe]")


def jpeg_segments(view: memoryview) -> Iterator[tuple[int, int, int]]:
    """Yield the markers of a JPEG with their payloads, skipping coded data and stray bytes.

    Raises:
        struct.error: The data ends inside the length of a segment.
    """
    position = 0
    for _ in range(MAX_PARTS):
        match = _JPEG_MARKER.search(view, position)
        if match is None:
            return
        marker, position = view[match.end() - 1], match.end()
        if marker in (JPEG_START, JPEG_END):
            yield marker, position, position
            continue
        (length,) = struct.unpack_from(">H", view, position)
        # The length includes its own two bytes. A smaller one is invalid, but the walk must advance.
        yield marker, position + 2, position + max(2, length)
        position += max(2, length)


# In concatenated images (mjpeg, webp_anim, and all formats called "..._pipe") FFmpeg lands inside an image,
# or takes a later one for the first. H.263 has other timestamps after a seek, and H.261 packets do not tell
# whether they are key frames. In an MPEG program stream only some packets have a timestamp; after a seek,
# those of the packets in between are extrapolated from the wrong one.
_SEEKS_ASTRAY = frozenset({"mjpeg", "mpeg", "webp_anim", "h261", "h263", "rm"})

# Key of an index table in an MXF file (SMPTE ST 377-1). Most writers put one near the start or the end.
_MXF_INDEX = bytes.fromhex("060e2b34025301010d01020101100100")


def seeks_astray(format: str, read: Read, size: Callable[[], int]) -> bool:
    """Whether FFmpeg seeks to wrong packets, or gives them wrong timestamps, in files of a format.

    Args:
        format: FFmpeg's name of the format.
        read: Reads bytes of the file.
        size: Returns the size of the file.
    """
    if format != "mxf":
        return format in _SEEKS_ASTRAY or format.endswith("_pipe")
    # Without an index, FFmpeg seeks by the average size of a packet, and counts on from a wrong timestamp.
    end = max(0, size() - _NEAR)
    return all(_MXF_INDEX not in bytes(read(at, min(_NEAR, size() - at))) for at in (0, end))


_NEAR = 1 << 18


def png_head(view: memoryview) -> set[bytes]:
    """Return the kinds of a PNG's chunks up to the first IDAT, or up to the end of the data."""
    kinds: set[bytes] = set()
    with suppress(struct.error):  # the data may end inside a header
        for kind, _, _ in PNG.of(view):
            kinds.add(kind)
            if kind == b"IDAT":
                break
    return kinds


def bmp_header(view: memoryview) -> tuple[int, int, int, int, int, int]:
    """Return a BMP's pixel offset, width, height, bits per pixel, compression and size of the pixel data.

    Raises:
        struct.error: The data ends inside the header.
    """
    pixels, size = struct.unpack_from("<II", view, 10)
    # The OS/2 header has 16-bit sizes and no compression.
    if size == 12:
        return pixels, *struct.unpack_from("<HH2xH", view, 18), 0, 0
    return pixels, *struct.unpack_from("<ii2xHII", view, 18)


GIF_EXTENSION, GIF_IMAGE, GIF_TRAILER = 0x21, 0x2C, 0x3B


def gif_blocks(view: memoryview) -> Iterator[int]:
    """Yield the kinds of a GIF's complete blocks, skipping stray bytes as FFmpeg does.

    Raises:
        struct.error: The data ends inside the header of the file or of an image.
    """
    position, size = 13 + _gif_colors(view, 10), len(view)
    for _ in range(MAX_PARTS):
        if position >= size:
            return
        kind = view[position]
        position += 1
        if kind in (GIF_EXTENSION, GIF_IMAGE):
            # An image has nine bytes of position and size, a colour table, and the code size.
            position += 1 if kind == GIF_EXTENSION else 10 + _gif_colors(view, position + 8)
            while position < size and view[position]:  # data sub-blocks; the last one is empty
                position += view[position] + 1
            position += 1
            if position > size:
                return
        yield kind
        if kind == GIF_TRAILER:
            return


def _gif_colors(view: memoryview, flags: int) -> int:
    """Return the size in bytes of the colour table, from the flag byte at this position."""
    (bits,) = struct.unpack_from("B", view, flags)
    return 3 << ((bits & 7) + 1) if bits & 0x80 else 0


_TIFF_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}
# struct codes by type: BYTE, SHORT, LONG and UNDEFINED.
_TIFF_TYPES = {1: "B", 3: "H", 4: "I", 7: "B"}


def tiff_entry(view: memoryview, wanted: int) -> tuple[str, int, memoryview] | None:
    """Return byte order, type and values of a tag in a TIFF file or an Exif block, if it is present.

    Raises:
        struct.error: The data ends before the directory does.
    """
    # Only the first directory: others describe thumbnails and further pages.
    order = _TIFF_ORDERS.get(bytes(view[:4]))
    if order is None:
        return None
    (position,) = struct.unpack_from(f"{order}I", view, 4)
    (count,) = struct.unpack_from(f"{order}H", view, position)
    entries = view[position + 2 : position + 2 + 12 * count]
    if len(entries) < 12 * count:
        raise struct.error("the directory is cut short")
    for number, (tag, kind, length) in enumerate(struct.iter_unpack(f"{order}HHI4x", entries)):
        if tag == wanted and kind in _TIFF_TYPES and length:
            size = struct.calcsize(_TIFF_TYPES[kind]) * length
            # Values of more than four bytes are stored at an offset.
            place = position + 2 + 12 * number + 8
            if size > 4:
                (place,) = struct.unpack_from(f"{order}I", view, place)
            return order, kind, view[place : place + size]
    return None


def tiff_value(view: memoryview, wanted: int) -> int | None:
    """Return the first number of a tag; ``None`` if the tag is missing.

    Raises:
        struct.error: The data ends before the directory or the value does.
    """
    if (entry := tiff_entry(view, wanted)) is None:
        return None
    order, kind, values = entry
    return int(struct.unpack_from(order + _TIFF_TYPES[kind], values)[0])


def read_moov(
    read: Read, size: int, most_bytes: int, most_boxes: int = MAX_PARTS
) -> tuple[set[bytes], bytes]:
    """Read the index of an MP4, the box moov, if it is not too long.

    Args:
        read: Reads the file.
        size: Size of the file.
        most_bytes: Limit of the size of the index.
        most_boxes: Limit of the boxes up to the index.

    Returns:
        The kinds of the boxes before it, and its content; empty if it is missing or too long.
    """
    kinds: set[bytes] = set()
    with suppress(struct.error):  # the file may be truncated
        for kind, start, end in read_boxes(read, 0, size, most_boxes):
            if kind == b"moov":
                return kinds, bytes(read(start, end - start)) if end - start <= most_bytes else b""
            kinds.add(kind)
    return kinds, b""


_BEFORE_INDEX = frozenset({b"ftyp", b"free", b"skip", b"wide", b"uuid", b"pnot"})


def index_is_last(head: Bytes) -> bool:
    """Whether an MP4 or QuickTime file certainly has its samples before its index, from its first bytes."""
    kinds = (kind for kind, _, _ in boxes(memoryview(head)))
    with suppress(struct.error):
        return next((kind for kind in kinds if kind not in _BEFORE_INDEX), None) == b"mdat"
    return False


# Reading a longer one takes more time than the hint saves. A damaged header may state any size.
_LONGEST_INDEX = 1 << 20


def has_equal_audio(read: Read, size: int) -> bool:
    """Whether an MP4 probably has several audio tracks, and not exactly one of them is enabled.

    It is a hint: ``False`` as well if the index is too long to be read for it.

    Raises:
        SourceError: ``read`` cannot read the file.
    """
    _, moov = read_moov(read, size, _LONGEST_INDEX)
    tracks = [track for track in moov.split(b"trak") if b"soun" in track]
    # The type tkhd is followed by a version byte and three bytes of flags, whose lowest bit means "enabled".
    flags = [track[track.find(b"tkhd") + 7 :][:1] for track in tracks]
    return len(tracks) > 1 and sum(flag > b"" and flag[0] & 1 for flag in flags) != 1
