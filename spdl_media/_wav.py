"""Windows and metadata of WAV files without FFmpeg, which looks at 32 packets first.

It is asked only where a file is unusual or damaged.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np

from spdl_media.array_formats.wav import KINDS, PCM, SURE_BELOW, WAVHeader, find_chunks, parse_file
from spdl_media.errors import ArrayFormatError
from spdl_media.inputs import Input
from spdl_media.timing import Window

# Enough for the chunks before the samples in most files, and to tell DTS by its first frame, of up to 4 KiB.
_HEAD_SIZE = 8 * 1024
_MOST_CHANNELS = 64
# DTS and compressed data for S/PDIF come as stereo PCM of 16 bits, and begin their frames with these.
_SYNC_WORDS = tuple(
    bytes.fromhex(word)
    for word in ("7ffe8001 fe7f0180 1fffe800 ff1f00e8 72f81f4e f8724e1f".split())
)
# FFmpeg's names for what a LIST of INFO states.
_INFO_NAMES = dict(
    pair.encode().split(b":")
    for pair in "IART:artist ICMT:comment ICOP:copyright ICRD:date IGNR:genre ILNG:language INAM:title "
    "IPRD:album IPRT:track ISFT:encoder ISMP:timecode ITCH:encoded_by ITRK:track".split()
)


class WAVInfo(NamedTuple):
    """A WAV file in FFmpeg's words.

    Attributes:
        header: What its header says.
        codec: FFmpeg's name of the codec.
        sample_fmt: FFmpeg's name of the format of the samples.
        channel_layout: FFmpeg's text for the layout: a mask of speakers, or a number of channels.
        metadata: What the file says of itself; empty unless it was asked for.
    """

    header: WAVHeader
    codec: str
    sample_fmt: str
    channel_layout: str
    metadata: dict[str, str] = {}  # noqa: RUF012  # nobody changes it


def read_wav(
    input: Input, window: Window, num_samples: int | None
) -> tuple[WAVInfo, np.ndarray[Any, Any], int] | None:
    """Read a window of a WAV file, and no more of it.

    Args:
        input: The opened file.
        window: Which samples.
        num_samples: At most so many.

    Returns:
        What the file holds, the samples as ``(samples, channels)``, and the position of the first one;
        ``None`` where FFmpeg has to judge, or the window holds none.
    """
    info = _known_info(input)
    if info is None:
        return None
    header = info.header
    start, stop = window.samples(header.sample_rate)
    stop = min(header.num_samples, sys.maxsize if stop is None else stop)
    if num_samples is not None:
        stop = min(stop, start + num_samples)
    size = (stop - start) * header.block_align
    sample_size = header.block_align // header.num_channels
    before = int(sample_size == 3)  # the reader of 24 bits looks at the byte before
    offset = header.data_offset + start * header.block_align - before
    content = input.read_at(offset, size + before) if size > 0 else b""
    if size <= 0 or len(content) < size + before:
        return None
    read = KINDS[header.sample_format, sample_size].read
    return info, read(content, before, (stop - start, header.num_channels)), start


def read_wav_info(input: Input) -> WAVInfo | None:
    """Tell what a WAV file holds, its metadata included; ``None`` where FFmpeg has to."""
    info = _known_info(input)
    if info is None:
        return None
    header = info.header
    end = header.data_offset + header.data_size + header.data_size % 2
    # Long chunks behind the samples are FFmpeg's to read.
    if input.size() - end > _HEAD_SIZE:
        return None
    metadata: dict[str, str] = {}
    # From behind RIFF, its size and WAVE (12 bytes) to the name and size of the samples' chunk (8 bytes).
    parts = (input.read_at(12, header.data_offset - 20), input.read_at(end, _HEAD_SIZE))
    for part in map(bytes, parts):
        for name, start, size in find_chunks(part, 0):
            content = part[start : start + size]
            if name == b"LIST" and content[:4] == b"INFO":
                for key, place, length in find_chunks(content, 4):
                    text = content[place : place + length]
                    # The file does not say which encoding other text has.
                    if key not in _INFO_NAMES or not text.isascii():
                        return None
                    metadata[_INFO_NAMES[key].decode()] = text.partition(b"\0")[0].decode()
            elif name == b"fact" and content == header.num_samples.to_bytes(4, "little"):
                continue
            # FFmpeg may find metadata in it.
            elif name != b"fmt ":
                return None
    return info._replace(metadata=metadata)


def _known_info(input: Input) -> WAVInfo | None:
    """What a file holds that FFmpeg reads as it is read here.

    ``None`` where FFmpeg has to judge: it is no WAV file, or one that is cut short, has no stated size, or
    samples that are not of whole bytes, one size, and PCM, float, A-law or mu-law.
    """
    if not input.has_size:
        return None
    head = bytes(input.read_at(0, _HEAD_SIZE))
    if head[:4] != b"RIFF":
        return None
    try:
        header, bits, mask, stated = parse_file(head)
    except ArrayFormatError:
        return None
    if not 0 < stated < SURE_BELOW or header.data_offset + stated > input.size():
        return None
    num_channels = header.num_channels
    size = header.block_align // num_channels
    kind = KINDS.get((header.sample_format, size))
    # FFmpeg goes by the bits that count, not by the room that they have.
    if kind is None or (bits + 7) // 8 != size or num_channels > _MOST_CHANNELS:
        return None
    is_stereo_16 = (header.sample_format, size, num_channels) == (PCM, 2, 2)
    if is_stereo_16 and any(word in head for word in _SYNC_WORDS):
        return None
    layout = f"{mask:#x}" if mask.bit_count() == num_channels else f"{num_channels} channels"
    return WAVInfo(header, kind.codec, kind.sample_fmt, layout)
