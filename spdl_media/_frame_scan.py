"""Coded frames of MP3 and FLAC files, found by their headers, so that many at a time can be decoded.

FFmpeg's demuxers parse such a file up to the place that is sought, or in a dozen places, and give one packet
a frame, which takes longer than to decode it. They are asked only where a file is unusual or damaged: here
each frame has to begin where the one before ends, and has to give its samples.

See:
    RFC 9639, sections 8 and 9.1: the metadata and the frame headers of FLAC
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise

from spdl_media._ffmpeg import AvPacket
from spdl_media._window import AUDIO_PREROLL
from spdl_media.codec import AudioCodec, id3_size, mp3_frame_size, mp3_sample_rate
from spdl_media.inputs import Input
from spdl_media.packets import make_packet
from spdl_media.timing import Window

# At most so many bytes are held in memory.
_MOST_BYTES = 2**25
# Samples of a packet: decoded frames stay in the cache until they are converted.
_PACKET_SAMPLES = 16 * 1024
# FFmpeg's readers of bits look at so many bytes behind the last one.
_PADDING = bytes(64)


@dataclass(frozen=True, slots=True)
class CodedFrames:
    """Frames of a file that stand one behind the other.

    Attributes:
        codec: Of the stream.
        zero: Second 0 of the container on the stream's own clock.
        window: Positions of the first sample of the window and of the one behind its last.
        position: Of the first sample of the frames.
        num_samples: Samples of all frames.
        packet_samples: Samples of each packet but the last.
        data: The bytes, and padding behind them.
        cuts: Where packets begin in them and, at last, where the frames end.
    """

    codec: AudioCodec
    zero: Fraction
    window: tuple[int, int]
    position: int
    num_samples: int
    packet_samples: int
    data: bytes
    cuts: list[int]

    def packets(self) -> Iterator[tuple[AvPacket, int]]:
        """Packets of many frames each, and how many samples they give."""
        view, left = memoryview(self.data), self.num_samples
        for begin, end in pairwise(self.cuts):
            packet = make_packet(view[begin:end], self.codec.time_base)
            yield packet, min(left, self.packet_samples)
            left -= self.packet_samples


def find_frames(input: Input, window: Window, num_samples: int | None) -> CodedFrames | None:
    """Find the frames that decode to a window.

    Args:
        input: The opened file, of which any place can be read.
        window: Which samples.
        num_samples: At most so many.

    Returns:
        The frames; ``None`` where FFmpeg has to judge, or the window holds no sample.
    """
    head = bytes(input.read_at(0, _INFO_TAG_SIZE))
    find = _find_flac if head[:4] == b"fLaC" else _find_mp3
    try:
        return find(input, head, window, num_samples)
    except (LookupError, struct.error):  # a header is cut short
        return None


def _samples(window: Window, rate: int, num_samples: int | None) -> tuple[int, int]:
    start, stop = window.samples(rate)
    stop = sys.maxsize if stop is None else stop
    return start, stop if num_samples is None else min(stop, start + num_samples)


# MP3: all headers from the first one on are looked at, for nothing else tells the place of a frame.

# Samples that decoders are late. The padding that a tag states counts them as well.
_DECODER_DELAY = 529
# Enough of the first frame for a tag in it; and the size of a tag behind the last frame.
_INFO_TAG_SIZE, _ID3V1_SIZE = 256, 128


@dataclass(frozen=True, slots=True)
class _InfoTag:
    """What a first frame without sound says of the others.

    Attributes:
        num_frames: Number of frames behind this one; 0: there is no tag.
        num_bytes: Size of all frames and this one; 0: not stated.
        delay: Samples before the first one that is heard.
        padding: Samples behind the last one that is heard.
    """

    num_frames: int = 0
    num_bytes: int = 0
    delay: int = 0
    padding: int = 0


def _find_mp3(
    input: Input, head: bytes, window: Window, num_samples: int | None
) -> CodedFrames | None:
    begin, size = id3_size(head), input.size()
    top = bytes(input.read_at(begin, _INFO_TAG_SIZE)) if begin else head
    frame_size, tag = mp3_frame_size(top[:4]), _read_info_tag(top)
    if frame_size is None or tag is None:
        return None
    rate, samples, is_mono = mp3_sample_rate(top), _mp3_samples(top), _is_mono(top)
    start, stop = _samples(window, rate, num_samples)
    if tag.num_frames and stop > tag.num_frames * samples - tag.delay - tag.padding:
        stop = sys.maxsize
    first = max(start + tag.delay - math.ceil(AUDIO_PREROLL * rate), 0) // samples
    last, step = -(-(stop + tag.delay) // samples), _PACKET_SAMPLES // samples
    place = begin + (frame_size if tag.num_frames else 0)
    wanted = place + (last + 2) * frame_size
    while True:
        data = bytes(input.read_at(0, min(wanted, _MOST_BYTES)))
        end = size - _ID3V1_SIZE if data[size - _ID3V1_SIZE :].startswith(b"TAG") else size
        try:
            number, cuts = _walk(data, top, (place, end), (first, last, step))
            break
        except LookupError:  # a bit rate that varies takes more
            if len(data) in (size, _MOST_BYTES):
                return None
            wanted *= 2
    if number < last:
        # FFmpeg does not believe a tag of another file.
        is_right = number == tag.num_frames and tag.num_bytes in (0, end - begin)
        if cuts[-1] != end or (tag.num_frames and not is_right):
            return None
        stop = min(stop, number * samples - tag.delay - tag.padding)
    if start >= stop:
        return None
    codec = AudioCodec(
        name="mp3",
        decoder="mp3float",
        sample_rate=rate,
        channel_layout="mono" if is_mono else "stereo",
        num_channels=2 - is_mono,
        sample_fmt="fltp",
        time_base=Fraction(1, rate),
    )
    return CodedFrames(
        codec,
        zero=Fraction(tag.delay, rate),
        window=(start, stop),
        position=first * samples - tag.delay,
        num_samples=(number - first) * samples,
        packet_samples=step * samples,
        data=data + _PADDING,
        cuts=cuts,
    )


def _mp3_samples(header: bytes) -> int:
    """Samples of a frame: half as many in MPEG-2 and 2.5."""
    return 1152 if header[1] & 8 else 576


def _is_mono(header: bytes) -> bool:
    return header[3] >= 0xC0


def _read_info_tag(top: bytes) -> _InfoTag | None:
    """Read the tag that encoders write into the first frame; ``None``: FFmpeg has to read it."""
    # Behind the header and the side information.
    place = 4 + ((17, 32) if top[1] & 8 else (9, 17))[not _is_mono(top)]
    if top[36:40] == b"VBRI":
        return None
    if top[place : place + 4] not in (b"Xing", b"Info"):
        return _InfoTag()
    flags, place = top[place + 7], place + 8
    if not flags & 1:
        return None
    num_frames, num_bytes = struct.unpack_from(">II", top, place)
    # Number of frames, size, 100 places, quality: each is there if its bit is set.
    place += sum(size for bit, size in ((1, 4), (2, 4), (4, 100), (8, 4)) if flags & bit)
    delay = padding = 0
    if top[place : place + 4] in (b"LAME", b"Lavf", b"Lavc"):
        both = int.from_bytes(top[place + 21 : place + 24], "big")
        delay = (both >> 12) + _DECODER_DELAY
        padding = max((both & 0xFFF) - _DECODER_DELAY, 0)
    return (
        _InfoTag(num_frames, num_bytes if flags & 2 else 0, delay, padding) if num_frames else None
    )


def _walk(
    data: bytes, top: bytes, span: tuple[int, int], frames: tuple[int, int, int]
) -> tuple[int, list[int]]:
    """Go from frame to frame.

    Args:
        data: The file, or its beginning.
        top: The first frame. All have its version, layer and sample rate.
        span: Where the first frame with sound begins, and the last one of the file ends.
        frames: Numbers of the first frame, of the one behind the last, and of those in a packet.

    Returns:
        The number of frames up to the last one, and where packets begin and the last one ends.

    Raises:
        LookupError: The data ends, or something else stands between two frames.
    """
    (place, end), (first, last, step) = span, frames
    sizes = _mp3_sizes(top[1], top[2] & 0x0C)
    number, place = _skip(data, place, end, first, top[1], sizes)
    cuts = [place]
    while number < last and place < end:
        passed, place = _skip(data, place, end, min(step, last - number), top[1], sizes)
        number += passed
        cuts.append(place)
    if place > len(data):
        raise IndexError("the last frame is cut short")
    return number, cuts


def _skip(
    data: bytes, place: int, end: int, count: int, version: int, sizes: dict[int, int]
) -> tuple[int, int]:
    """Go over so many frames, or to the end; give their number, and the place behind them."""
    for passed in range(count):
        if place >= end:
            return passed, place
        if data[place] != 0xFF or data[place + 1] != version:
            raise LookupError("no frame of this stream")
        place += sizes[data[place + 2]]
    return count, place


@lru_cache(maxsize=32)
def _mp3_sizes(version: int, rate: int) -> dict[int, int]:
    """Sizes of frames by the third byte of the header, of one version and sample rate."""
    thirds = (third for third in range(256) if third & 0x0C == rate)
    sizes = {third: mp3_frame_size(bytes((0xFF, version, third, 0))) for third in thirds}
    return {third: size for third, size in sizes.items() if size}


# FLAC: each header has the number of its frame.

# Signature, kind and length of the block, sizes of blocks and frames, and rate, channels, bits and samples.
_STREAMINFO = struct.Struct(">4s B 3s HH 6s Q")
_COMMENTS, _LAST_BLOCK = 4, 0x80
_PROBE_SIZE, _MOST_PROBES = 32 * 1024, 20


def _find_flac(
    input: Input, head: bytes, window: Window, num_samples: int | None
) -> CodedFrames | None:
    _, kind, length, smallest, block, _, bits = _STREAMINFO.unpack_from(head)
    rate, channels, total = bits >> 44, (bits >> 41 & 7) + 1, bits & (1 << 36) - 1
    # Where blocks vary, samples are numbered and not frames; FFmpeg knows the layouts of more channels.
    if kind & 0x7F or length != b"\0\0\x22" or not 0 < smallest == block or channels > 2:
        return None
    begin = _first_flac_frame(input)
    start, stop = _samples(window, rate, num_samples)
    stop = min(stop, total)
    if begin is None or not rate or start >= stop:
        return None
    first, last, step = start // block, -(-stop // block), max(_PACKET_SAMPLES // block, 1)
    numbers = [*range(first, last, step), last]
    found = _FlacScan(input, begin, -(-total // block)).read(numbers)
    if found is None:
        return None
    data, cuts = found
    codec = AudioCodec(
        name="flac",
        decoder="flac",
        sample_rate=rate,
        channel_layout="mono" if channels == 1 else "stereo",
        num_channels=channels,
        time_base=Fraction(1, rate),
        extradata=head[8:42],
    )
    return CodedFrames(
        codec,
        zero=Fraction(0),
        window=(start, stop),
        position=first * block,
        num_samples=min(last * block, total) - first * block,
        packet_samples=step * block,
        data=data + _PADDING,
        cuts=cuts,
    )


def _first_flac_frame(input: Input) -> int | None:
    """Where frame 0 begins; ``None``: another one does, or metadata state which channels there are."""
    place, kind = 4, 0
    while kind < _LAST_BLOCK:
        header = input.read_at(place, 4)
        kind, length = header[0], int.from_bytes(header[1:], "big")
        comments = bytes(input.read_at(place + 4, length)) if kind & 0x7F == _COMMENTS else b""
        if b"CHANNEL_MASK" in comments.upper():
            return None
        place += 4 + length
    top = input.read_at(place, 5)
    return place if bytes(top[:2]) == b"\xff\xf8" and top[4] == 0 else None


class _FlacScan:
    """Finds frames by their numbers.

    Args:
        input: The opened file.
        begin: Where the first frame begins.
        num_frames: Number of frames.
    """

    def __init__(self, input: Input, begin: int, num_frames: int) -> None:
        self._input, self._begin, self._num_frames = input, begin, num_frames
        # Sync code, and size and rate of all frames but the last, which may be shorter.
        self._sync = bytes(input.read_at(begin, 3))

    def read(self, numbers: Sequence[int]) -> tuple[bytes, list[int]] | None:
        """Read frames: the first of these numbers up to the last one, which is not read itself.

        Returns:
            Bytes, and where in them the frames with these numbers begin; ``None``: one is not found.
        """
        size = self._input.size()
        number = min(numbers[0], max(self._num_frames - 2, 0))
        place = self._seek(number)
        if place is None:
            return None
        # Frames may be larger here than elsewhere.
        mean = (size - self._begin) // self._num_frames
        wanted = (numbers[-1] - number + 1) * mean * 5 // 4 + _PROBE_SIZE
        while True:
            data = bytes(self._input.read_at(place, min(wanted, _MOST_BYTES)))
            cuts = self._cuts(data, number, numbers, is_all=place + len(data) == size)
            if cuts is not None:
                return data, cuts
            if place + len(data) == size or len(data) == _MOST_BYTES:
                return None
            wanted *= 2

    def _seek(self, wanted: int) -> int | None:
        """The place of a frame with a number; ``None``: it is not found."""
        low, number, high, above = self._begin, 0, self._input.size(), self._num_frames
        for _ in range(_MOST_PROBES):
            if number == wanted:
                return low
            # So that the frame before it is in sight.
            place = low + (wanted - number - 1) * (high - low) // (above - number)
            chunk = bytes(self._input.read_at(place, _PROBE_SIZE))
            offset = chunk.find(self._sync)
            while 0 <= offset < len(chunk) - 8:
                found = _flac_number(chunk[offset + 4 : offset + 8])
                if number < found <= wanted:
                    low, number = place + offset, found
                elif wanted < found < above:
                    high, above = place + offset, found
                offset = chunk.find(self._sync, offset + 1)
        return None

    def _cuts(
        self, data: bytes, number: int, numbers: Sequence[int], *, is_all: bool
    ) -> list[int] | None:
        """Where frames begin in data that begin with one of them; ``None``: one is not there."""
        place = 0
        cuts = []
        for wanted in numbers:
            if wanted == self._num_frames:
                place = len(data) if is_all else -1
            elif wanted != number:
                sync = self._sync[: 3 if wanted < self._num_frames - 1 else 2]
                code = _flac_code(wanted)
                place = data.find(sync, place + 1)
                while place >= 0 and not data.startswith(code, place + 4):
                    place = data.find(sync, place + 1)
            if place < 0:
                return None
            cuts.append(place)
        return cuts


def _flac_code(number: int) -> bytes:
    """How a header writes the number of its frame: as UTF-8 writes characters."""
    return chr(number).encode("utf-8", "surrogatepass")


def _flac_number(code: bytes) -> int:
    """The number that begins there; -1: none."""
    size = 1 + sum(code[0] >= least for least in (0xC0, 0xE0, 0xF0))
    try:
        return ord(code[:size].decode("utf-8", "surrogatepass"))
    except UnicodeDecodeError:
        return -1
