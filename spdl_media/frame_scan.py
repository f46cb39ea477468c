"""Find the coded frames of MP3 and FLAC files by their headers, so that a packet can hold many frames.

To seek, FFmpeg's demuxers parse such a file from its start or probe it in a dozen places, and they return
one packet per frame, which takes longer than decoding it. This module replaces them for regular files: each
frame must begin where the previous one ends, and no sample may be missing. FFmpeg reads all other files: for
them, the functions return ``None`` or raise a ``LookupError``, ``ArithmeticError``, ``struct.error`` or
``ValueError``.

See:
    RFC 9639, sections 8 and 9.1: the metadata and the frame headers of FLAC
"""

from __future__ import annotations

import math
import re
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from fractions import Fraction
from functools import lru_cache
from itertools import islice, pairwise
from typing import NamedTuple

from spdl_media.audio_clock import AUDIO_PREROLL
from spdl_media.codec import AudioCodec
from spdl_media.inputs import Input
from spdl_media.packets import padded
from spdl_media.timing import Window

MOST_BYTES = 2**25
"""Limit of the bytes held in memory."""

PACKET_SAMPLES = 16 * 1024
"""Samples per packet: so few that decoded frames are still in the CPU cache when they are converted."""


class CodedFrames(NamedTuple):
    """Consecutive frames of a file.

    Attributes:
        codec: Codec of the stream.
        window: First sample of the window, and the one after its last.
        positions: Position of the first sample of each packet, and last that after the frames.
        packets: The packets, each with padding or another packet after it.
    """

    codec: AudioCodec
    window: tuple[int, int]
    positions: Sequence[int]
    packets: Sequence[memoryview]


def sample_codec(
    name: str, rate: int, num_channels: int, extradata: bytes | None = None
) -> AudioCodec:
    """Return the codec of a stream whose timestamps count samples.

    Raises:
        IndexError: There are more than two channels; FFmpeg reads such files.
        ZeroDivisionError: The sample rate is 0.
    """
    decoder, unit = "mp3float" if name == "mp3" else name, Fraction(1, rate)
    layout = ("mono", "stereo")[num_channels - 1], num_channels
    return AudioCodec(name, decoder, rate, *layout, time_base=unit, extradata=extradata)


def packet_positions(start: int, stop: int, packet_samples: int) -> list[int]:
    """Return the positions of packets that all have one number of samples, but for the last one."""
    return [*range(start, stop, packet_samples), stop]


def split(data: bytes, offsets: Iterable[int]) -> list[memoryview]:
    """Return the packets between offsets in a copy of the data with padding."""
    copy = padded(data)
    return [copy[start:end] for start, end in pairwise(offsets)]


# MP3: all headers from the first one on are read, because frames have no numbers.

# Delay of decoders in samples. The padding stated in a tag includes it.
_DECODER_DELAY = 529
# Bytes of the first frame that hold an info tag; size of the ID3v1 tag after the last frame.
_INFO_TAG_SIZE, _ID3V1_SIZE = 256, 128


def find_mp3(input: Input, head: bytes, window: Window, limit: int | None) -> CodedFrames | None:
    """Find the frames of an MP3 file that decode to the samples of a window.

    Args:
        input: The open file; it can be read at any offset.
        head: Its first bytes.
        window: The window.
        limit: Maximum number of samples.

    Returns:
        The frames; ``None`` if FFmpeg has to read the file, or the window holds no sample.

    Raises:
        SourceError: The file cannot be read.
    """
    begin = _id3_size(head)
    size = input.size() - begin
    top = bytes(input.read_at(begin, _INFO_TAG_SIZE)) if begin else head
    is_mpeg1, is_mono = top[1] & 8 != 0, top[3] >= 0xC0
    # The tag follows the header and the side information.
    tag = _read_info_tag(top, 4 + ((9, 17), (17, 32))[is_mpeg1][not is_mono])
    frame_size = mp3_frame_size(top[:4])
    if frame_size is None or tag is None:
        return None
    rate, samples = _mp3_sample_rate(top), 1152 if is_mpeg1 else 576
    start, stop = window.sample_range(rate, limit)
    num_frames, num_bytes, delay, padding = tag
    if num_frames and stop > num_frames * samples - delay - padding:
        stop = sys.maxsize
    first = max(start + delay - math.ceil(AUDIO_PREROLL * rate), 0) // samples
    last, step = -(-(stop + delay) // samples), PACKET_SAMPLES // samples
    place = frame_size if num_frames else 0
    # With a variable bit rate, frames may take more; the loop doubles it.
    wanted, cuts = place + (last + 2) * frame_size, None
    while cuts is None:
        if min(wanted, size) > MOST_BYTES:
            return None
        data = bytes(input.read_at(begin, wanted))
        end = size - _ID3V1_SIZE * data[size - _ID3V1_SIZE :].startswith(b"TAG")
        number, cuts = _walk(data, top, (place, end), (first, last, step))
        if cuts is None and wanted >= size:
            return None
        wanted *= 2
    if number < last:
        # The tag may be from another file. FFmpeg detects and ignores that, so it has to read this file.
        is_right = number == num_frames and num_bytes in (0, end)
        if cuts[-1] != end or (num_frames and not is_right):
            return None
        stop = min(stop, number * samples - delay - padding)
    if start >= stop:
        return None
    codec = sample_codec("mp3", rate, 2 - is_mono)
    found = packet_positions(first * samples - delay, number * samples - delay, step * samples)
    return CodedFrames(codec, (start, stop), found, split(data, cuts))


def _read_info_tag(top: bytes, place: int) -> tuple[int, int, int, int] | None:
    """Read the Xing or Info tag that encoders write into the first frame, which then has no audio.

    Returns:
        The number of frames after the tag (0: no tag), the size of all frames with that of the tag (0: not
        stated), the delay before the first audible sample, and the padding after the last one. ``None``:
        FFmpeg has to read the tag.
    """
    if top[36:40] == b"VBRI":
        return None
    if top[place : place + 4] not in (b"Xing", b"Info"):
        return 0, 0, 0, 0
    flags, num_frames, num_bytes = struct.unpack_from(">III", top, place + 4)
    if not flags & 1 or not num_frames:
        return None
    # Number of frames, size, a table of 100 bytes, quality: each is present if its bit is set.
    place += 8 + sum(size for bit, size in ((1, 4), (2, 4), (4, 100), (8, 4)) if flags & bit)
    delay = padding = 0
    if top[place : place + 4] in (b"LAME", b"Lavf", b"Lavc"):
        both = int.from_bytes(top[place + 21 : place + 24], "big")
        delay = (both >> 12) + _DECODER_DELAY
        padding = max((both & 0xFFF) - _DECODER_DELAY, 0)
    return num_frames, num_bytes if flags & 2 else 0, delay, padding


def _walk(
    data: bytes, top: bytes, span: tuple[int, int], frames: tuple[int, int, int]
) -> tuple[int, list[int] | None]:
    """Walk from frame to frame by their sizes.

    Args:
        data: The file after its ID3 tag, or the beginning of that.
        top: The first frame. All frames have its version, layer and sample rate.
        span: Offsets where the first frame with audio begins and where the last one ends.
        frames: Number of the first wanted frame, of the one after the last, and frames per packet.

    Returns:
        The number of the frame after the last one found, and the offsets where packets begin and the last
        one ends; ``None`` for the offsets if the data ends too early or other bytes lie between frames.
    """
    (place, end), (goal, last, step) = span, frames
    version, sizes = top[1], _mp3_sizes(top[1], top[2] & 0x0C)
    number, cuts = 0, []
    try:
        while True:
            if number < goal and place < end:
                # Fast path: frames are nearly always of one size, so their headers are compared at once.
                count, third = goal - number, data[place + 2]
                until = place + count * sizes[third]
                heads = (data[place + each : until : sizes[third]] for each in range(3))
                if until <= end and all(
                    head == bytes((byte,)) * count
                    for head, byte in zip(heads, (0xFF, version, third), strict=True)
                ):
                    place, number = until, goal
            while number < goal and place < end:
                if data[place] != 0xFF or data[place + 1] != version:
                    return number, None
                place += sizes[data[place + 2]]
                number += 1
            cuts.append(place)
            if number == last or place >= end:
                break
            goal = min(goal + step, last)
    except LookupError:
        return number, None
    return number, cuts if place <= len(data) else None


@lru_cache(maxsize=32)
def _mp3_sizes(version: int, rate: int) -> dict[int, int]:
    """Return frame sizes by the third byte of the header, for one version and sample rate."""
    thirds = (third for third in range(256) if third & 0x0C == rate)
    sizes = {third: mp3_frame_size(bytes((0xFF, version, third, 0))) for third in thirds}
    return {third: size for third, size in sizes.items() if size}


# Kilobits per second by the index in the header: layer III of MPEG-1, and of MPEG-2 and 2.5.
_MP3_RATES = (
    (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
)
_MP3_SAMPLE_RATES = (44100, 48000, 32000)


def _id3_size(head: bytes | memoryview) -> int:
    """Return the size in bytes of the ID3 tag at the start of a file; 0 if there is none."""
    if head[:3] != b"ID3" or len(head) < 10:
        return 0
    # Each byte of the size holds 7 bits.
    return 10 + sum((head[6 + i] & 127) << 7 * (3 - i) for i in range(4))


def _mp3_sample_rate(header: bytes) -> int:
    """Return the sample rate of the MP3 frame that begins with this header."""
    version = header[1] >> 3 & 3
    # MPEG-2 halves the sample rates, MPEG-2.5 quarters them.
    return _MP3_SAMPLE_RATES[header[2] >> 2 & 3] >> (3 - version + 1) // 2


def mp3_frame_size(header: bytes) -> int | None:
    """Return the size of the MP3 frame with this 4-byte header; ``None``: not MP3, or a free bit rate."""
    # Eleven sync bits, then layer III.
    if len(header) < 4 or header[0] != 0xFF or header[1] & 0xE6 != 0xE2:
        return None
    version, rate = header[1] >> 3 & 3, header[2] >> 4
    # Version 1, rate 15 and sample rate 3 are reserved; rate 0 is a free bit rate.
    if version == 1 or rate in (0, 15) or header[2] & 0x0C == 0x0C:
        return None
    is_mpeg1 = version == 3
    bits = _MP3_RATES[not is_mpeg1][rate] * (144_000 if is_mpeg1 else 72_000)
    # Bit 1 of the third byte adds a byte of padding.
    return bits // _mp3_sample_rate(header) + (header[2] >> 1 & 1)


# FFmpeg's probe also takes so many consecutive frames as proof.
_MP3_FRAMES = 7


def is_mp3(head: bytes | memoryview) -> bool:
    """Whether the first bytes of a file are MP3 frames, with or without an ID3 tag before them."""
    start = _id3_size(head)
    for _ in range(_MP3_FRAMES):
        size = mp3_frame_size(bytes(head[start : start + 4]))
        if size is None:
            return False
        start += size
    return True


# FLAC: each header begins with a sync code and states the number of its frame.

# Signature; type and length of the block; block and frame sizes; sample rate, channels, bits and samples.
_STREAMINFO = struct.Struct(">4s B 3s HH 6s Q")
_COMMENTS, _LAST_BLOCK = 4, 0x80
_FLAC_SYNC = b"\xff\xf8"
_FLAC_SYNC_OF_SAMPLES = b"\xff\xf9"  # the header states the number of the first sample
# A byte of block size and sample rate, one of channels and bits, and the number of the frame, coded like a
# character in UTF-8. In a lookahead, because another header may begin inside of what only looks like one.
_CODE = rb"[\0-\x7f]|[\xc0-\xdf].|[\xe0-\xef]..|[\xf0-\xf7]..."
_FLAC_HEADER = re.compile(_FLAC_SYNC + rb"(?=(.).(" + _CODE + rb"))", re.DOTALL)
_MOST_PROBES, _MOST_HEADERS = 24, 32
# Assumed largest frame in bytes, if the file states none.
_LARGE = 32 * 1024


def find_flac(input: Input, head: bytes, window: Window, limit: int | None) -> CodedFrames | None:
    """Find the frames of a FLAC file that decode to the samples of a window; see :func:`find_mp3`.

    Raises:
        SourceError: The file cannot be read.
        LookupError, ArithmeticError, struct.error: FFmpeg has to read the file, which is truncated or
            damaged, or has more than two channels.
    """
    signature, kind, length, smallest, block, sizes, bits = _STREAMINFO.unpack_from(head)
    rate, channels, total = bits >> 44, (bits >> 41 & 7) + 1, bits & (1 << 36) - 1
    # With variable block sizes, headers number samples, not frames, so FFmpeg reads those files.
    if (signature, kind & 0x7F, length) != (b"fLaC", 0, b"\0\0\x22") or not 0 < smallest == block:
        return None
    # Frame sizes, number of samples and checksum are cleared, so that many files have equal extradata.
    extradata = head[8:12] + bytes(6) + (bits >> 36 << 36).to_bytes(8, "big") + bytes(16)
    codec = sample_codec("flac", rate, channels, extradata)
    begin, top, comments = _flac_start(input)
    # FFmpeg reads the order of channels from the comments.
    is_usual = top.startswith(_FLAC_SYNC) and b"CHANNEL_MASK" not in comments.upper()
    start, stop = window.sample_range(rate, limit)
    stop = min(stop, total)
    if not is_usual or top[4] or start >= stop:
        return None
    first, last, step = start // block, -(-stop // block), max(PACKET_SAMPLES // block, 1)
    least, largest = int.from_bytes(sizes[:3], "big"), int.from_bytes(sizes[3:], "big")
    span = begin, -(-total // block), largest or _LARGE
    frames = _read_flac(input, span, [*range(first, last, step), last], least)
    if frames is None:
        return None
    data, cuts = frames
    found = packet_positions(first * block, min(last * block, total), step * block)
    return CodedFrames(codec, (start, stop), found, split(data, cuts))


def begins_at_0(input: Input) -> bool:
    """Whether the first frame of a FLAC file is number 0.

    Raises:
        SourceError: The file cannot be read.
    """
    with suppress(LookupError):  # it is truncated
        top = _flac_start(input)[1] if input.seekable else b""
        return top.startswith((_FLAC_SYNC, _FLAC_SYNC_OF_SAMPLES)) and top[4] == 0
    return False


def _flac_start(input: Input) -> tuple[int, bytes, bytes]:
    """Return the offset of the first frame, its first bytes up to its number, and the comments of the file.

    Raises:
        SourceError: The file cannot be read.
        LookupError: It is truncated.
    """
    place, kind, comments = 4, 0, b""
    while kind < _LAST_BLOCK:
        header = input.read_at(place, 4)
        kind, length = header[0], int.from_bytes(header[1:], "big")
        if kind & 0x7F == _COMMENTS:
            comments += bytes(input.read_at(place + 4, length))
        place += 4 + length
    return place, bytes(input.read_at(place, 5)), comments


def _read_flac(
    input: Input, span: tuple[int, int, int], numbers: Sequence[int], least: int
) -> tuple[bytes, list[int]] | None:
    """Read the frames ``numbers[0]`` up to, but not including, ``numbers[-1]``.

    Args:
        input: The open file.
        span: Offset of the first frame of the file, number of frames, and size of the largest.
        numbers: Frame numbers whose offsets are wanted.
        least: Size of the smallest frame; 0: not stated.

    Returns:
        The bytes, and the offsets in them of the frames ``numbers``; ``None`` if one is not found.
    """
    (begin, num_frames, _), size, number = span, input.size(), numbers[0]
    # Block size and sample rate of all frames but the last, whose block may be shorter.
    usual = input.read_at(begin, 3)[2]
    start = _seek_flac(input, span, number, usual)
    # A quarter more than the average, because frames may be larger here than elsewhere.
    wanted = (numbers[-1] - number + 1) * (size - begin) // num_frames * 5 // 4 + 4096
    while start is not None and wanted <= MOST_BYTES:
        data = bytes(input.read_at(start, wanted))
        is_end, places = start + len(data) == size, [0]
        for place, found in _flac_headers(data, usual, num_frames - 1):
            # Coded data may look like the next header; it is not one before the smallest frame has ended.
            if found == number + len(places) and place >= places[-1] + least:
                places.append(place)
        if is_end and numbers[-1] == num_frames:
            places.append(len(data))
        if len(places) > numbers[-1] - number:
            return data, [places[each - number] for each in numbers]
        if is_end:
            return None
        wanted *= 2
    return None


def _seek_flac(input: Input, span: tuple[int, int, int], number: int, usual: int) -> int | None:
    """Return the offset of the frame with a number; ``None`` if it is not found."""
    (low, above, largest), high, passed = span, input.size(), 0
    last = above - 1
    for probe in range(_MOST_PROBES):
        if passed == number:
            return low
        # Aim one frame before the target, so that the chunk holds its neighbours, too. Every fourth probe
        # bisects, for files with uneven frame sizes.
        mean = (high - low) // (above - passed)
        place = (low + high) // 2 if probe % 4 == 3 else low + (number - passed - 1) * mean
        chunk = bytes(input.read_at(place, largest + 2 * mean + 64))
        for offset, found in islice(_flac_headers(chunk, usual, last), _MOST_HEADERS):
            if passed < found <= number:
                low, passed = place + offset, found
            elif number < found < above:
                high, above = place + offset, found
    return None


def _flac_headers(data: bytes, usual: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield offsets where frames may begin, with their frame numbers.

    Args:
        data: A part of the file.
        usual: Byte after the sync code: block size and sample rate.
        last: Number of the last frame, in which that byte may differ.
    """
    for header in _FLAC_HEADER.finditer(data, 0, len(data) - 4):
        try:
            number = ord(header[2].decode("utf-8", "surrogatepass"))
        except UnicodeDecodeError:
            number = -1
        if header[1][0] == usual or number == last:
            yield header.start(), number
