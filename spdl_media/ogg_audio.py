"""Load Ogg files of Vorbis and Opus without PyAV's demuxer.

FFmpeg takes longer to open a file and to seek than to decode a second of Vorbis, so only the pages that hold
a window are read. The packets of a whole file are many, and PyAV releases the GIL four times for each, so
that two threads are slower than one. So FFmpeg's source ``amovie`` demuxes and decodes whole files without
Python. This is for usual files, of one stream that begins at second 0. FFmpeg's demuxer reads all others.

See:
    RFC 3533, section 6: the pages of an Ogg file
    RFC 6716, section 3: the frames in a packet of Opus
    RFC 7845, section 5.1, and the Vorbis I specification, 4.2.2: the first packets of the two codecs
"""

from __future__ import annotations

import os
import struct
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import suppress
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import av
from av.filter import Graph

from spdl_media._ffmpeg import unheard_log
from spdl_media._threads import interrupts_delayed
from spdl_media.audio_clock import AUDIO_PREROLL, vorbis_blocks
from spdl_media.codec import AudioCodec
from spdl_media.frame_scan import MOST_BYTES, CodedFrames, sample_codec
from spdl_media.inputs import Input
from spdl_media.packet_corrections import ExactTimes
from spdl_media.packets import padded
from spdl_media.parts import Read
from spdl_media.timing import Window, most_combined, tick_at

# Signature, version, flags, position after the page, serial number, sequence number, checksum, segments.
_PAGE = struct.Struct("<4sBBqIIIB")
_CONTINUED, _FIRST, _LAST = 1, 2, 4
# Longest header, and longest page.
_HEADER_SIZE, _PAGE_SIZE = _PAGE.size + 255, 1 << 16
_MIRRORED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))

# Samples in a frame of Opus by its mode: of SILK, of both, of CELT. Frames in a packet, of at most 120 ms.
_FRAME_SIZES = (480, 960, 1920, 2880) * 3 + (480, 960) * 2 + (120, 240, 480, 960) * 4
_NUM_FRAMES = 1, 2, 2, 0  # 0: the second byte states it
_MOST_IN_PACKET = 5760
_CELT = 0x80  # in the first byte of a packet

# Number of pages with audio whose positions are compared with their packets.
_PROBED = 3

# Longer windows are left to FFmpeg, because their packets are held in memory.
_MOST_SAMPLES = 1 << 24

# Samples per frame of the graph. With 16 Ki, the C library returns memory to the system and gets it again for
# each file, which takes a third of the time.
_BLOCK = 8 * 1024


class OggAudio(NamedTuple):
    """An Ogg file of one stream of audio that begins at second 0.

    Attributes:
        codec: Codec of the stream.
        window: First sample, and the one after the last.
        content: The whole file.
    """

    codec: AudioCodec
    window: tuple[int, int]
    content: bytes | memoryview


class _Page(NamedTuple):
    end: int  # where the next page begins
    flags: int
    position: int  # after the last packet that ends in the page; -1: none does
    serial: int
    sizes: bytes
    data: bytes


def find_ogg(
    input: Input, head: bytes, window: Window, limit: int | None
) -> CodedFrames | OggAudio | None:
    """Find what an Ogg file of Vorbis or Opus, or a window of it, decodes to.

    Arguments and result are those of :func:`~spdl_media.frame_scan.find_mp3`.

    Raises:
        SourceError: The file cannot be read.
        LookupError, ArithmeticError, struct.error, ValueError: It has more than two channels, does not begin
            at second 0, or is damaged.
    """
    start = _PAGE.size + head[_PAGE.size - 1]
    if head[start : start + 7] == b"\x01vorbis":
        name, skipped = "vorbis", 0
        channels, rate = struct.unpack_from("<BI", head, start + 11)
    elif head[start : start + 8] == b"OpusHead" and not head[start + 18]:
        name, rate = "opus", 48000
        channels, skipped = struct.unpack_from("<BH", head, start + 9)
    else:
        return None
    is_whole, size = not window and limit is None, input.size()
    # Only Linux has memfd_create. FFmpeg cannot read from Python's memory without the GIL.
    is_held = size <= MOST_BYTES and hasattr(os, "memfd_create")
    if not (is_held if is_whole else input.is_local):
        return None
    content = input.read_all() if is_whole else b""
    read = (lambda at, size: content[at : at + size]) if is_whole else input.read_at
    extradata, before, first, last = _read_ends(read, size)
    codec = sample_codec(name, rate, channels, extradata)
    if is_whole:
        _packets(codec, [before, first])  # raises if the stream does not begin at second 0
        # FFmpeg states wrong times in a single page of Vorbis, and cuts the end wrongly.
        is_usual = name == "opus" or first != last
        return OggAudio(codec, (0, last.position - skipped), content) if is_usual else None
    start, stop = window.sample_range(rate, limit)
    stop = min(stop, last.position - skipped)
    if not 0 < stop - start <= _MOST_SAMPLES:
        return None
    # Where a decoder may start: see audio_clock.preroll.
    lead = vorbis_blocks(codec)[1] if name == "vorbis" else int(AUDIO_PREROLL * rate)
    begin = tick_at(window.start or Fraction(0), codec.time_base, Fraction(0)) - lead
    pages = _find_pages(read, before, size, (begin, stop + skipped))
    if pages[0] is not before:
        _packets(codec, [before, first])
    packets, positions = _packets(codec, pages)
    number, end = max(bisect_right(positions, begin) - 1, 0), bisect_left(positions, stop + skipped)
    packets, positions = packets[number:end], [one - skipped for one in positions[number : end + 1]]
    if name == "vorbis":
        positions[0] = positions[1]  # its decoder gives nothing for the first packet
    else:
        packets, positions = _joined(packets, positions)
    return CodedFrames(codec, (start, stop), positions, [*map(padded, packets)])


def _read_ends(read: Read, size: int) -> tuple[bytes, _Page, _Page, _Page]:
    """Read the headers, the first page with samples, and the last one.

    Returns:
        The headers for a decoder, without what differs between files of one encoder; an empty page that ends
        where the headers do; and the two pages.

    Raises:
        ValueError: The file is damaged, truncated, chained, more follows after the last page, or no packet
            ends in the first page with samples.
        struct.error: It ends before.
    """
    pages = [_read_page(read, 0)]
    while pages[-1].position <= 0:
        pages.append(_read_page(read, pages[-1].end))
    *headers, first = pages
    if first.flags & _CONTINUED:
        raise ValueError("samples begin in the pages before")
    data, tail = b"".join(page.data for page in headers), max(size - _PAGE_SIZE, 0)
    last = _read_page(read, tail + bytes(read(tail, _PAGE_SIZE)).rfind(b"OggS"))
    if last.serial != first.serial or last.end != size or not last.flags & _LAST:
        raise ValueError("truncated, chained, or more follows")
    # Opus: nothing to skip, which the decoder would do wherever it starts, but only once.
    extradata = data[:10] + bytes(2) + data[12:19]
    if data[1:7] == b"vorbis":
        extradata = b"\2\x1e\0" + data[:30] + data[data.index(b"\5vorbis") :]
    return extradata, headers[-1]._replace(position=0, sizes=b"", data=b""), first, last


def _read_page(read: Read, place: int) -> _Page:
    """Read the page at an offset.

    Raises:
        ValueError: There is none, it is damaged, or begins another stream.
        struct.error: The file ends before it.
    """
    header = read(place, _HEADER_SIZE)
    signature, _, flags, position, serial, _, _, segments = _PAGE.unpack_from(header)
    start, sizes = _PAGE.size + segments, bytes(header[_PAGE.size : _PAGE.size + segments])
    page = bytes(read(place, start + sum(sizes)))
    # The CRC of zlib has the bits of each byte, and of the result, in reverse order.
    blank = (page[:22] + bytes(4) + page[26:]).translate(_MIRRORED)
    checksum = (~zlib.crc32(blank, 0xFFFFFFFF) & 0xFFFFFFFF).to_bytes(4, "big").translate(_MIRRORED)
    if (signature, page[22:26], flags & _FIRST) != (b"OggS", checksum, 0 if place else _FIRST):
        raise ValueError("damaged, or another stream")
    return _Page(place + len(page), flags, position, serial, sizes, page[start:])


def page_times(_stream: Any, codec: AudioCodec, input: Input) -> ExactTimes | None:
    """Tell that windows need all packets from the start; ``None``: no page of Vorbis states a wrong position.

    FFmpeg copies the times of a Matroska file, which are in milliseconds, and those before second 0 of a part
    of a file. It ignores the latter when it reads from the start, but not after a seek.

    Raises:
        SourceError: The file cannot be read.
    """
    if codec.name != "vorbis" or not input.seekable:
        return None
    pages, end = list[_Page](), 0
    try:
        while len(pages) < _PROBED and not (pages and pages[-1].flags & _LAST):
            page = _read_page(input.read_at, end)
            # No packet ends in a page of position -1, such as one of a long comment before the audio.
            pages, end = [*pages, page] if pages or page.position not in (0, -1) else [], page.end
    except (ValueError, struct.error):
        return None  # it is damaged, or there is another stream
    with suppress(ValueError, IndexError):
        if pages[0].position > 0 and _packets(codec, pages):
            return None
    return ExactTimes({}, only_from_start=True)


def _find_pages(read: Read, before: _Page, size: int, span: tuple[int, int]) -> list[_Page]:
    """Read the pages that hold positions, after the last page before them.

    Raises:
        ValueError: They are damaged, or of another stream.
    """
    low, high = before.end, size
    while high - low > _HEADER_SIZE:
        middle = (low + high) // 2
        chunk = bytes(read(middle, min(high - middle, _PAGE_SIZE) + _PAGE.size))
        found = chunk[: -_PAGE.size].find(b"OggS")
        # A page in which no packet ends has the largest position.
        if found >= 0 and int.from_bytes(chunk[found + 6 : found + 14], "little") <= span[0]:
            low = middle + found
        else:
            high = middle
    pages = [_read_page(read, low) if low > before.end else before]
    if pages[0].serial != before.serial:
        raise ValueError("another stream")
    while pages[-1].position < span[1]:
        pages.append(_read_page(read, pages[-1].end))
    return pages


def _packets(codec: AudioCodec, pages: list[_Page]) -> tuple[list[bytes], list[int]]:
    """Return the packets that end in consecutive pages, their positions, and last that after them.

    The first packet of Vorbis is given no samples.

    Raises:
        ValueError: The packets have other numbers of samples than the pages state.
        IndexError: A packet is empty.
    """
    data, sizes = b"".join(page.data for page in pages), b"".join(page.sizes for page in pages)
    cuts = [0, *(end for end, size in zip(accumulate(sizes), sizes, strict=True) if size < 255)]
    packets = [data[start:end] for start, end in pairwise(cuts)]
    if codec.name == "opus":
        counts = [_FRAME_SIZES[p[0] >> 3] * (_NUM_FRAMES[p[0] & 3] or p[1] & 63) for p in packets]
    else:
        # Halves of blocks overlap. If there are two sizes, the second bit usually tells which it is.
        blocks = vorbis_blocks(codec)
        of_packets = [blocks[packet[0] >> 1 & 1] for packet in packets]
        counts = [0, *((one + other) // 4 for one, other in pairwise(of_packets))]
    ends = [*accumulate(len(page.sizes) - page.sizes.count(255) for page in pages)]
    start = pages[0].position - sum(counts[: ends[0]])
    positions = [*accumulate(counts, initial=start)]
    for page, end in zip(pages, ends, strict=True):
        # Only the last packet of all may be cut.
        least = positions[end - 1] + 1 if page.flags & _LAST else positions[end]
        if not least <= page.position <= positions[end]:
            raise ValueError("other numbers of samples")
    return packets, positions


def _joined(packets: list[bytes], positions: list[int]) -> tuple[list[bytes], list[int]]:
    """Join packets of Opus that hold one frame each, which takes 0.9 of the time to decode.

    Only those of CELT, because a decoder must read zeros after a frame of SILK.
    """
    top = packets[0][0]
    if top & 3 or top < _CELT or any(one[0] != top for one in packets):
        return packets, positions
    joined, step = [], _MOST_IN_PACKET // _FRAME_SIZES[top >> 3]
    for number in range(0, len(packets), step):
        frames = [packet[1:] for packet in packets[number : number + step]]
        # Sizes below 252 take one byte.
        sizes = (
            bytes((size,) if size < 252 else (252 + size % 4, size // 4 - 63))
            for size in map(len, frames[:-1])
        )
        joined.append(b"".join((bytes((top | 3, 128 | len(frames))), *sizes, *frames)))
    return joined, [*positions[:-1:step], positions[-1]]


def decode_ogg(found: OggAudio, rows: Any) -> bool:
    """Decode a file, put its samples into rows, which are ``SampleRows``, and flush those.

    Returns:
        False if FFmpeg fails, or gives another number of samples than the file states: a page or a packet is
        damaged, or FFmpeg's times of this file are wrong.

    Raises:
        FilterError: The filters do not take the samples.
    """
    codec, (_, wanted), count = found.codec, found.window, 0
    # In the same graph, so that FFmpeg copies the samples less often.
    filters = rows.filters(("fltp", codec.channel_layout, codec.sample_rate))
    try:
        with unheard_log():
            for frame in _blocks(found.content, filters):
                if filters:
                    rows.put_filtered((frame,))
                elif not rows.put_frames((frame,), frame.samples, (0, frame.samples), 0):
                    return False
                count += frame.samples
            rows.flush()
    except (av.FFmpegError, OSError):  # the latter: no more files can be opened
        return False
    rate, into = codec.sample_rate, rows.sample_rate
    if filters and rows.resamples(rate):
        # The resampler rounds up or down. A lost packet, of at least 32 samples, must make a difference of
        # more than that. SampleRows resamples short audio in its own way.
        is_whole = 0 <= count - wanted * into // rate <= 1
        return is_whole and rate < 10 * into and wanted > most_combined(rate, into)
    return count == wanted


def _blocks(content: bytes | memoryview, filters: list[str]) -> Iterator[Any]:
    """Yield the samples of an Ogg file in frames of :data:`_BLOCK`, or what filters make of them."""
    graph = Graph()
    # A Ctrl-C before the number is assigned would leave the file open.
    with interrupts_delayed():
        file = os.memfd_create("spdl_media")
        try:
            os.write(file, content)  # decode_ogg counts the samples, if this writes only a part
            # One thread: FFmpeg's decoding threads would take buffers of the graph while it makes new ones.
            source = graph.add(
                "amovie", filename=f"/proc/self/fd/{file}", format_name="ogg", dec_threads="1"
            )
        finally:
            os.close(file)
    # FFmpeg's times may be wrong, so the filters get the number of each first sample.
    counted = ["asetpts=N", *filters] if filters else []
    sink = source
    for text in (f"asetnsamples=n={_BLOCK}:p=0", *counted, "abuffersink"):
        name, _, args = text.partition("=")
        before, sink = sink, graph.add(name, args or None)
        before.link_to(sink)
    graph.configure()
    with suppress(av.EOFError):
        while True:
            yield sink.pull()
