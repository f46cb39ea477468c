"""What of a WAV file ``load_audio`` and ``probe`` need, without FFmpeg, which looks at 32 packets first."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from spdl_media.array_formats.wav import READERS, WAVHeader, known_header
from spdl_media.inputs import Input
from spdl_media.timing import Window

_CHUNK = struct.Struct("<4sI")


class WAVSamples(NamedTuple):
    """Samples of a window of a WAV file.

    Attributes:
        array: ``(samples, channels)``.
        sample_fmt: FFmpeg's name of their format.
        channel_layout: FFmpeg's text for the layout: a mask of speakers, or a number of channels.
        sample_rate: Samples of one channel in a second.
        first: Position of the first sample.
    """

    array: np.ndarray[Any, Any]
    sample_fmt: str
    channel_layout: str
    sample_rate: int
    first: int


# Enough for the chunks before the samples in most files, and to tell DTS by its first frame, of up to 4 KiB.
_HEAD_SIZE = 8 * 1024

# FFmpeg's names for what a LIST of INFO states.
_INFO_NAMES = {
    b"IART": "artist",
    b"ICMT": "comment",
    b"ICOP": "copyright",
    b"ICRD": "date",
    b"IGNR": "genre",
    b"ILNG": "language",
    b"INAM": "title",
    b"IPRD": "album",
    b"IPRT": "track",
    b"ISFT": "encoder",
    b"ISMP": "timecode",
    b"ITCH": "encoded_by",
    b"ITRK": "track",
}
# FFmpeg's codecs and sample formats, by code of the format and bytes of a sample.
_CODECS = {
    (1, 1): ("pcm_u8", "u8"),
    (1, 2): ("pcm_s16le", "s16"),
    (1, 3): ("pcm_s24le", "s32"),
    (1, 4): ("pcm_s32le", "s32"),
    (1, 8): ("pcm_s64le", "s64"),
    (3, 4): ("pcm_f32le", "flt"),
    (3, 8): ("pcm_f64le", "dbl"),
    (6, 1): ("pcm_alaw", "s16"),
    (7, 1): ("pcm_mulaw", "s16"),
}


class WAVInfo(NamedTuple):
    """What a WAV file holds, in FFmpeg's words."""

    codec: str
    sample_fmt: str
    channel_layout: str
    header: WAVHeader
    metadata: dict[str, str]


def read_wav_info(input: Input) -> WAVInfo | None:
    """Tell what a WAV file holds; ``None`` where FFmpeg has to."""
    found = _known_header(input)
    if found is None:
        return None
    header, layout = found
    end = header.data_offset + header.data_size + header.data_size % 2
    if input.size() - end > _HEAD_SIZE:
        return None
    parts = (
        bytes(input.read_at(12, header.data_offset - 20)),
        bytes(input.read_at(end, _HEAD_SIZE)),
    )
    metadata: dict[str, str] = {}
    for name, content in (chunk for part in parts for chunk in _chunks(part)):
        if name == b"LIST" and content[:4] == b"INFO":
            for key, text in _chunks(content[4:]):
                if key not in _INFO_NAMES or not text.isascii():
                    return None
                metadata[_INFO_NAMES[key]] = text.partition(b"\0")[0].decode()
        elif name != b"fmt " and (name, content) != (
            b"fact",
            struct.pack("<I", header.num_samples),
        ):
            return None
    size = header.block_align // header.num_channels
    return WAVInfo(*_CODECS[header.sample_format, size], layout, header, metadata)


def _chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    offset = 0
    while offset + _CHUNK.size <= len(data):
        name, size = _CHUNK.unpack_from(data, offset)
        offset += _CHUNK.size
        yield name, data[offset : offset + size]
        offset += size + size % 2


def _known_header(input: Input) -> tuple[WAVHeader, str] | None:
    if not input.has_size:
        return None
    return known_header(bytes(input.read_at(0, _HEAD_SIZE)), input.size())


def read_wav(input: Input, window: Window, num_samples: int | None) -> WAVSamples | None:
    """Read a window of a WAV file, and no more of it.

    Args:
        input: The opened file.
        window: Which samples.
        num_samples: At most so many.

    Returns:
        The samples; ``None`` where FFmpeg has to judge, or the window holds none.
    """
    found = _known_header(input)
    if found is None:
        return None
    header, layout = found
    start, stop = window.samples(header.sample_rate)
    stop = min(header.num_samples, sys.maxsize if stop is None else stop)
    if num_samples is not None:
        stop = min(stop, start + num_samples)
    size = (stop - start) * header.block_align
    # The reader of 24 bits looks at the byte before.
    before = int(header.block_align == 3 * header.num_channels)
    offset = header.data_offset + start * header.block_align - before
    content = input.read_at(offset, size + before) if size > 0 else b""
    if size <= 0 or len(content) < size + before:
        return None
    read = READERS[header.sample_format, header.block_align // header.num_channels]
    array = read(content, before, (stop - start, header.num_channels))
    fmt = _CODECS[header.sample_format, header.block_align // header.num_channels][1]
    return WAVSamples(array, fmt, layout, header.sample_rate, start)
