"""Walk the parts of containers, boxes and chunks; tell what is truncated, and what FFmpeg reads wrongly.

Readers yield the start and end of each part's payload as declared in the file; the end may lie past the data.
A truncated header raises ``struct.error``. Nothing is copied.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

# Data of a still image: any contiguous memory of bytes.
Bytes: TypeAlias = bytes | bytearray | memoryview

# Kind, first byte of the payload, first byte after it.
Part: TypeAlias = tuple[bytes, int, int]

# ``read(position, size)`` returns up to ``size`` bytes of the file from a position.
Read: TypeAlias = Callable[[int, int], Bytes]

# Limit of parts, so that a file made of empty parts takes milliseconds, not minutes.
MAX_PARTS = 1 << 16

MATROSKA = b"\x1a\x45\xdf\xa3"

# Offset, signature, name for opening, and FFmpeg's list of names of formats with a unique signature. Naming
# the format saves FFmpeg's probing of all demuxers: 0.1 ms, or 0.3 ms for MP3.
_SIGNATURES = (
    (0, b"fLaC", "flac", "flac"),
    (0, b"OggS", "ogg", "ogg"),
    (4, b"ftyp", "mov", "mov,mp4,m4a,3gp,3g2,mj2"),
    (0, MATROSKA, "matroska", "matroska,webm"),
)


def signed_format(head: Bytes) -> tuple[str, str] | None:
    """Find a format by its signature in the first bytes: its name for opening, and all its names."""
    for offset, signature, name, names in _SIGNATURES:
        if head[offset : offset + len(signature)] == signature:
            return name, names
    return None


def refusal(head: Bytes, format: str | None = None) -> str | None:
    """Return why FFmpeg must not read a file, from its first 16 bytes and named format; ``None``: it may."""
    if bytes(head[:4]) == b"RIFX" and format in (None, "wav"):
        return "it is a WAV of big-endian numbers (RIFX), which FFmpeg reads as little-endian; convert it"
    if bytes(head[:4]) == b"\x59\xa6\x6a\x95":
        # FFmpeg's decoder asserts that the size fits into 31 bits, which would end the process.
        return "it is a Sun raster, which FFmpeg reads only in part; convert it"
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


def box_kinds(head: Bytes) -> Iterator[bytes]:
    """Yield the kinds of the boxes that begin in the first bytes of a file, without those in other boxes."""
    with suppress(struct.error):
        yield from (kind for kind, _, _ in boxes(memoryview(head)))


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


# In concatenated images (mjpeg, webp_anim, and all formats called "..._pipe") FFmpeg lands inside an image,
# or takes a later one for the first. After a seek, H.263 has other timestamps, and an MPEG program stream
# wrong ones for packets that state none. H.261 does not tell key frames. Short OBU files lose a packet.
_SEEKS_ASTRAY = frozenset({"mjpeg", "mpeg", "webp_anim", "h261", "h263", "obu", "rm"})

# Key of an index table in an MXF file (SMPTE ST 377-1). Most writers put one near the start or the end.
_MXF_INDEX = bytes.fromhex("060e2b34025301010d01020101100100")


def seeks_astray(format: str, read: Read, size: Callable[[], int]) -> bool:
    """Whether FFmpeg seeks to wrong packets, or gives them wrong timestamps, in a file of this format.

    Raises:
        SourceError: The file cannot be read.
    """
    if format != "mxf":
        return format in _SEEKS_ASTRAY or format.endswith("_pipe")
    # Without an index, FFmpeg seeks by the average size of a packet, and counts on from a wrong timestamp.
    near = min(1 << 18, size())
    return all(_MXF_INDEX not in bytes(read(at, near)) for at in (0, size() - near))


def read_moov(read: Read, size: int, most_bytes: int, most_boxes: int = MAX_PARTS) -> bytes:
    """Return the index of an MP4, the content of its box moov; empty if it is missing or too long.

    Args:
        read: Reads the file.
        size: Size of the file.
        most_bytes: Limit of the size of the index.
        most_boxes: Limit of the boxes up to the index.

    Raises:
        SourceError: ``read`` cannot read the file.
    """
    with suppress(struct.error):  # the file may be truncated
        for kind, start, end in read_boxes(read, 0, size, most_boxes):
            if kind == b"moov":
                return bytes(read(start, end - start)) if end - start <= most_bytes else b""
    return b""


_BEFORE_INDEX = frozenset({b"ftyp", b"free", b"skip", b"wide", b"uuid", b"pnot"})


def index_is_last(head: Bytes) -> bool:
    """Whether an MP4 or QuickTime file certainly has its samples before its index, from its first bytes."""
    return next((kind for kind in box_kinds(head) if kind not in _BEFORE_INDEX), None) == b"mdat"


# Truncated files, by the sizes that they state.

_Check: TypeAlias = Callable[[Read, int], str | None]


def missing_after(size: int, before: str) -> str:
    """Return the clause that the data of a file ends too early."""
    return f"the data ends after {size} bytes, {before}"


def short_of(size: int, needed: int, what: str) -> str | None:
    """Return the clause that the data ends before ``what`` does; ``None`` if there are enough bytes."""
    clause = f"but {what} should end at byte {needed}"
    return missing_after(size, clause) if size < needed else None


# Limit of steps, each a small read. A fragmented MP4 of many hours takes some thousand.
_MAX_STEPS = 1 << 14
# Writers that cannot seek back put placeholders for sizes: FFmpeg 2**32 - 1, SoX numbers from 0x7ffff000 up,
# others 0.
_UNKNOWN_SIZE = 0x7FFFF000
_UNKNOWN_CAF_SIZE = 1 << 62  # FFmpeg writes -1
_TS_PACKET = 188


def missing_end(read: Read, size: int) -> str | None:
    """Describe what is missing at the end of a container file of ``size`` bytes.

    WAV, AVI, AIFF, AU, CAF, MP4, MOV, Matroska and WebM are detected wherever they are truncated; Ogg and
    MPEG-TS only if they end inside a page or packet.

    Returns:
        A clause such as ``"the data ends after 512 bytes, but the chunk data should end at byte 1024"``, or
        ``None`` if the file is complete or its format does not tell.

    Raises:
        SourceError: ``read`` cannot read the file.
    """
    head = read(0, 2 * _TS_PACKET + 1)
    try:
        for position, signature, check in _CONTAINER_CHECKS:
            if head[position : position + len(signature)] == signature:
                return check(read, size)
    except struct.error:
        return missing_after(size, "inside a header")
    rest = size % _TS_PACKET
    if rest and head[::_TS_PACKET] == b"GGG":  # an MPEG transport stream
        return short_of(size, size - rest + _TS_PACKET, "the last packet")
    return None


# Formats whose chunk "data" has no size if it was written to a pipe.
_OPEN_ENDED = {b"RIFF": (RIFF, _UNKNOWN_SIZE), b"caff": (CAF, _UNKNOWN_CAF_SIZE)}


def is_open_ended(head: Bytes) -> bool:
    """Whether an audio file does not state the size of its samples, which then reach to its end."""
    form, unknown = _OPEN_ENDED.get(bytes(head[:4]), (None, 0))
    if form is None:
        return False
    with suppress(struct.error):
        for kind, start, end in form.of(memoryview(head)):
            if kind == b"data":
                return not 0 < end - start < unknown
    return False


def missing_packets(streams: Iterable[Any], size: int) -> str | None:
    """Describe what is missing from an MP4 whose boxes are complete, from FFmpeg's index of its packets."""
    last = [stream.index_entries[-1] for stream in streams if stream.index_entries]
    end = max((entry.pos + entry.size for entry in last), default=0)
    return short_of(size, end, "the last packet")


def _chunk(
    form: Callable[[Read, int], Iterable[Part]], wanted: bytes, unknown: int = _UNKNOWN_SIZE
) -> _Check:
    """Make a check that the chunk with the samples is complete."""

    def check(read: Read, size: int) -> str | None:
        end = size
        for kind, start, end in islice(form(read, size), _MAX_STEPS):
            if kind == wanted:
                is_known = 0 < end - start < unknown
                return short_of(size, end, f"the chunk {wanted.decode()}") if is_known else None
        return short_of(size, end + end % 2, "the last chunk")

    return check


def _avi(read: Read, size: int) -> str | None:
    """Check an AVI: one or more RIFF forms, each with one list ``movi``, which an index may follow."""
    steps = iter(range(_MAX_STEPS))  # one limit for all forms together
    for form, position, end in RIFF._replace(start=0).read(read, size - 11):
        # Padding, an index or other data may follow the last form.
        if form != b"RIFF" or not 0 < end - position < _UNKNOWN_SIZE:
            return None
        start = position + 4
        for _ in steps:
            kind, length, name = struct.unpack("<4sI4s", read(start, 12))
            if kind == b"LIST" and name == b"movi":
                if 0 < length < _UNKNOWN_SIZE and start + 8 + length > size:
                    return short_of(size, start + 8 + length, "the list movi")
                break
            start += 8 + length + length % 2
    return None


def _mp4(read: Read, size: int) -> str | None:
    found, end = False, 0
    for kind, _, end in islice(read_boxes(read, 0, size), _MAX_STEPS):
        if not kind.isascii():
            return None  # not a box
        found |= kind == b"mdat"
        # Some writers count the header of mdat twice. missing_packets() checks the packets themselves.
        slack = 8 if kind == b"mdat" else 0
        if kind in (b"moov", b"mdat", b"moof") and end > size + slack:
            return short_of(size, end, f"the box {kind.decode()}")
    is_cut = end + 8 > size  # otherwise the walk stopped at something that is not a box
    return missing_after(size, "before the box mdat") if is_cut and not found else None


def _au(read: Read, size: int) -> str | None:
    start, length = struct.unpack_from(">II", read(0, 12), 4)
    return short_of(size, start + length, "the audio data") if 0 < length < _UNKNOWN_SIZE else None


def _matroska(read: Read, size: int) -> str | None:
    head = bytes(read(0, 4096))
    if (position := head.find(b"\x18\x53\x80\x67")) < 0:
        return None  # the segment, which holds everything else, does not follow the header
    start, length = ebml_size(head, position + 4)
    if length is not None:
        return short_of(size, start + length, "the segment")
    # Of a live recording only the last cluster shows it, whose size may also be unknown: its blocks follow.
    start = max(start, size - _LONGEST_TAIL)
    tail = bytes(read(start, _LONGEST_TAIL))
    position = max((found.start() for found in _CLUSTER.finditer(tail)), default=len(tail))
    while found := _LAST_ELEMENT.match(tail, position):
        position, length = ebml_size(tail, found.end())
        position += length or 0
    return short_of(size, start + position, "the last cluster or block")


_LONGEST_TAIL = 1 << 19
_CLUSTER = re.compile(rb"\x1fC\xb6u.{1,8}?[\xe7\xbf]", re.DOTALL)  # and its time or checksum
# A cluster, or what is in one. No size begins with a zero.
_LAST_ELEMENT = re.compile(rb"([\xa0\xa3\xa7\xab\xbf\xe7\xec]|\x1fC\xb6u)(?!\0)")


def ebml_size(data: Bytes, position: int) -> tuple[int, int | None]:
    """Return the start of an element's payload, and its size; ``None``: unknown, as in live streams."""
    (first,) = struct.unpack_from("B", data, position)
    # The number of zero bits before the first 1 is the number of bytes that follow; all ones after it mean
    # "unknown".
    width = 9 - first.bit_length()
    (value,) = struct.unpack_from(f"{width}s", data, position)
    number = int.from_bytes(value, "big") - (1 << 7 * width)
    return position + width, None if number == (1 << 7 * width) - 1 else number


# The largest page: header, table of segments, 255 segments of 255 bytes.
_OGG_PAGE = 27 + 255 + 255 * 255


def _ogg(read: Read, size: int) -> str | None:
    """Check that the last page is complete. Missing pages go unnoticed: live recordings have no last page."""
    start = max(0, size - _OGG_PAGE)
    tail = bytes(read(start, _OGG_PAGE))
    # With the version byte 0, because the four letters may occur in coded data.
    position = tail.rfind(b"OggS\0")
    if position < 0:
        return None
    (segments,) = struct.unpack_from("B", tail, position + 26)
    lengths = struct.unpack_from(f"{segments}B", tail, position + 27)
    return short_of(size, start + position + 27 + segments + sum(lengths), "the last page")


_CONTAINER_CHECKS: tuple[tuple[int, bytes, _Check], ...] = (
    # The size of the RIFF form is not checked: it is wrong in many complete files.
    (8, b"WAVE", _chunk(RIFF.read, b"data")),
    (8, b"AVI ", _avi),
    (0, b"FORM", _chunk(IFF.read, b"SSND")),
    (0, b".snd", _au),
    (0, b"caff", _chunk(CAF.read, b"data", unknown=_UNKNOWN_CAF_SIZE)),
    (4, b"ftyp", _mp4),
    (4, b"moov", _mp4),
    (0, MATROSKA, _matroska),
    (0, b"OggS", _ogg),
)
