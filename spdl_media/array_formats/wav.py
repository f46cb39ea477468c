"""Reader of WAV files in memory. Samples are views of the memory where their type allows it."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from spdl_media._checks import counted
from spdl_media.errors import ArrayFormatError
from spdl_media.inputs import Buffer
from spdl_media.readers import Content, content_of, name_of
from spdl_media.timing import Seconds, Window, parse_time

__all__ = ("WAVHeader", "load_wav", "parse_wav")

Array: TypeAlias = npt.NDArray[Any]

PCM, _FLOAT, _A_LAW, _MU_LAW = 1, 3, 6, 7
# Formats with samples of a fixed size. All other formats store packets.
_FORMATS = frozenset({PCM, _FLOAT, _A_LAW, _MU_LAW})

# Number of codes that np.take converts at a time. It needs eight bytes per index, so not all at once. Each
# call releases and takes the GIL, so pieces must not be small: with 16 Ki codes, two threads are 1.2 times as
# fast as one, with 256 Ki codes 1.8 times.
_BLOCK = 256 * 1024

_CHUNK = struct.Struct("<4sI")
_FORMAT = struct.Struct("<HHIIHH")
_LONG_SIZES = struct.Struct("<2Q")
_WANTED = (b"fmt ", b"ds64", b"data")
_EXTENSIBLE = 0xFFFE
# Size of the extension, valid bits, mask of speakers, and the format as a GUID, which consists of the code in
# two bytes and a constant rest.
_EXTENSION = struct.Struct("<HHIH14s")
_GUID_END = bytes.fromhex("000000001000800000aa00389b71")
# Sizes that mean "not known yet" (in a pipe), or "see the chunk ds64" (in RF64).
NO_SIZE, _NO_LONG_SIZE = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
# Stand-ins of other programs for an unknown size, rounded down to whole samples: SoX writes the first, ALSA's
# arecord the last.
_STAND_INS = (0x7FFFF000, 0x7FFFFFFF, 0x80000000)
SURE_BELOW = min(_STAND_INS) - 0xFFFF

# Code of the format, channels, sample rate, bytes per second, bytes of one sample of all channels, bits.
_Fields: TypeAlias = tuple[int, int, int, int, int, int]


class WAVHeader(NamedTuple):
    """Header of a WAV file. Made by :func:`parse_wav`.

    Attributes:
        audio_format: Code of the format in the file: 1 is PCM, 3 float, 6 A-law, 7 mu-law, 65534
            WAVE_FORMAT_EXTENSIBLE.
        num_channels: Number of channels.
        sample_rate: Samples per second, of each channel.
        byte_rate: Bytes per second according to the file; the value is not used.
        block_align: Bytes of one sample of all channels.
        bits_per_sample: Bits of a sample, or of the container of a sample.
        data_size: Bytes of all samples.
        data_offset: Offset of the first sample in the file, in bytes.
        sample_format: Code of the format of the samples. It differs from ``audio_format`` only if that is
            65534.
    """

    audio_format: int
    num_channels: int
    sample_rate: int
    byte_rate: int
    block_align: int
    bits_per_sample: int
    data_size: int
    data_offset: int
    sample_format: int

    @property
    def num_samples(self) -> int:
        """Number of samples per channel."""
        return self.data_size // self.block_align


def parse_wav(data: Buffer | np.ndarray[Any, Any]) -> WAVHeader:
    """Read the header of a WAV file (RIFF, RF64 or BW64).

    Args:
        data: The file's content, at least up to the first sample: bytes, any contiguous buffer, a 1-D uint8
            array or CPU tensor.

    Returns:
        The header. If the file does not contain its size, because it was never finished, ``data_size`` is the
        size of the existing data. For formats that :func:`load_wav` does not read, such as MP3,
        ``num_samples`` counts packets.

    Raises:
        ArrayFormatError: The data is not WAV, is cut short before the first sample, or has contradictory
            values.
        TypeError: ``data`` is not memory (a path, for example).

    Thread safety: safe.

    See:
        https://www.mmsp.ece.mcgill.ca/Documents/AudioFormats/WAVE/WAVE.html, EBU Tech 3306 for RF64
    """
    return _parse_header(content_of(data, "a WAV file"))


def load_wav(
    data: Buffer | np.ndarray[Any, Any],
    time_offset_seconds: Seconds | None = None,
    duration_seconds: Seconds | None = None,
) -> Array:
    """Read samples of a WAV file.

    Args:
        data: The file's content: bytes, any contiguous buffer, a 1-D uint8 array or CPU tensor.
        time_offset_seconds: Start of the window; sample ``k`` is at ``k / sample_rate`` seconds. Adjacent
            windows neither share nor lose a sample.
        duration_seconds: Length of the window. The result is shorter if the file ends before.

    Returns:
        Array of shape ``(num_samples, num_channels)``. PCM of 8, 16, 32 and 64 bits and float are views of
        ``data``, read-only if that is: uint8 (128 is silence), int16, int32, int64, float32 or float64,
        little-endian, not scaled. Other formats give new arrays: 24 bits int32 with the low 8 bits 0, A-law
        and mu-law the decoded int16. If a sample has fewer valid bits than its type, they are the upper ones.

    Raises:
        ArrayFormatError: The data is not WAV, is cut short, has another sample format or contradictory
            values. Sizes are checked before memory is allocated.
        TypeError: ``data`` is not memory (a path, for example), or a time is not a number.
        ValueError: The offset is negative or past the end, the duration is negative, or one of them is not
            finite.

    Thread safety: safe. Conversion of more than 64 KiB is done without the GIL.
    """
    content = content_of(data, "a WAV file")
    header = _parse_header(content)
    kind = KINDS.get((header.sample_format, header.block_align // header.num_channels))
    if kind is None:
        raise _error(
            content,
            f"holds {header.bits_per_sample} bits of format {header.sample_format}; PCM (1) of 8, 16, 24, 32 "
            "and 64 bits, float (3) of 32 and 64, A-law (6) and mu-law (7) are read. load_audio reads what "
            "FFmpeg can",
            _CHUNK.size,
        )
    start, stop = 0, header.num_samples
    if time_offset_seconds is not None or duration_seconds is not None:
        start, stop = _window(header, time_offset_seconds, duration_seconds)
    missing = header.data_offset + header.data_size - len(content)
    if missing > 0:
        message = f"is cut short: {missing} of {header.data_size} bytes of samples are missing"
        raise _error(content, message, len(content))
    offset = header.data_offset + start * header.block_align
    return kind.read(content, offset, (stop - start, header.num_channels))


def _error(content: Content, message: str, offset: int) -> ArrayFormatError:
    return ArrayFormatError(message, source=name_of(content), offset=offset)


def _window(header: WAVHeader, offset: Seconds | None, duration: Seconds | None) -> tuple[int, int]:
    """Return the indices of the first sample and of the one after the last."""
    begin = Fraction(0) if offset is None else _seconds("time_offset_seconds", offset)
    end = None if duration is None else begin + _seconds("duration_seconds", duration)
    # Separately, because a window of no length is no Window.
    start, _ = Window(begin).samples(header.sample_rate)
    _, stop = Window(None, end).samples(header.sample_rate)
    if start > header.num_samples:
        seconds = header.num_samples / header.sample_rate
        raise ValueError(f"time_offset_seconds={offset!r} is past the end, at {seconds:g} s")
    stop = header.num_samples if stop is None else min(stop, header.num_samples)
    return start, max(start, stop)


def _seconds(name: str, value: Seconds) -> Fraction:
    if (seconds := parse_time(value, name)) < 0:
        raise ValueError(f"{name} must be 0 or more, not {value!r}")
    return seconds


def _parse_header(content: Content) -> WAVHeader:
    try:
        return parse_file(content)[0]
    except ArrayFormatError as error:
        error.source = name_of(content)
        raise


def parse_file(content: Content) -> tuple[WAVHeader, int, int, int]:
    """Parse the chunks before the samples.

    Returns:
        The header; the valid bits of a sample, of which the others are padding; the bit mask of the speakers,
        0 if unknown; and the bytes of samples according to the chunk, which may be a stand-in for an unknown
        size.

    Raises:
        ArrayFormatError: As :func:`parse_wav`, without the name of the source.
    """
    head = bytes(content[:12])
    if head[:4] not in (b"RIFF", b"RF64", b"BW64") or head[8:] != b"WAVE":
        raise ArrayFormatError(f"is not a WAV file: it begins with {head!r}", offset=0)
    chunks: dict[bytes, tuple[int, int]] = {}
    for name, start, size in _find_chunks(content, 12):
        if name in _WANTED:
            chunks.setdefault(name, (start, size))
        # Chunks after the samples are not needed.
        if name == b"data":
            break
    else:
        raise ArrayFormatError("is cut short: there is no chunk 'data'", offset=len(content))
    offset, stated = chunks[b"data"]
    if b"fmt " not in chunks:
        raise ArrayFormatError(
            "has samples before the chunk 'fmt ' that describes them", offset=offset
        )
    fields, code, bits, mask = _read_format(content, *chunks[b"fmt "])
    _check_format(fields, code, offset - _CHUNK.size)
    size, riff_size = stated, int.from_bytes(content[4:8], "little")
    if head[:4] != b"RIFF" and b"ds64" in chunks:
        riff_size, long_size = _read_long_sizes(content, *chunks[b"ds64"])
        # A size of all ones means that the size is in the chunk "ds64".
        size = long_size if size == NO_SIZE else size
    block_align = fields[4]
    if not 0 < size < SURE_BELOW and not _is_known(
        size, offset, riff_size, block_align=block_align, length=len(content)
    ):
        rest = len(content) - offset
        # A file that was never finished may end within a sample.
        size = rest - rest % block_align
    if size % block_align and code in _FORMATS:
        raise ArrayFormatError(
            f"has {size} bytes of samples, not a multiple of {block_align} for one of all channels",
            offset=offset,
        )
    return WAVHeader(*fields, size, offset, code), bits, mask, stated


def _find_chunks(data: Content, offset: int) -> Iterator[tuple[bytes, int, int]]:
    """Iterate over name, offset and size of the chunks from a byte on."""
    while offset + _CHUNK.size <= len(data):
        name, size = _CHUNK.unpack_from(data, offset)
        offset += _CHUNK.size
        yield name, offset, size
        offset += size + size % 2  # chunks begin at even offsets


def _read_format(content: Content, offset: int, size: int) -> tuple[_Fields, int, int, int]:
    """Return the fields of the format, the code of the samples, the valid bits and the mask of speakers."""
    if size < _FORMAT.size or offset + size > len(content):
        raise ArrayFormatError(f"its chunk 'fmt ' of {size} bytes is cut short", offset=offset)
    fields: _Fields = _FORMAT.unpack_from(content, offset)
    if fields[0] != _EXTENSIBLE:
        return fields, fields[0], fields[5], 0
    if size < _FORMAT.size + _EXTENSION.size:
        raise ArrayFormatError(
            f"its format is extensible, and its chunk has only {size} bytes", offset=offset
        )
    _, bits, mask, code, guid_end = _EXTENSION.unpack_from(content, offset + _FORMAT.size)
    # After the code, the GUID is the same for all known formats.
    if guid_end != _GUID_END:
        raise ArrayFormatError("its extensible format is none of the known ones", offset=offset)
    return fields, code, bits, mask


def _check_format(fields: _Fields, code: int, offset: int) -> None:
    """Check that channels, bits and bytes of a sample fit together."""
    _, num_channels, rate, _, block_align, bits = fields
    if not (num_channels and rate and block_align):
        raise ArrayFormatError(
            f"has {counted(num_channels, 'channel')}, {rate} Hz and {block_align} bytes a sample",
            offset=offset,
        )
    if code not in _FORMATS:
        return  # samples come in packets, and the fields mean something else
    size, rest = divmod(block_align, num_channels)
    fits = bits == 8 * size
    if code == PCM:
        # As many bytes as the bits need; 24 bits in 4 bytes also occur.
        fits = 8 * (size - 1) < bits <= 8 * size or (bits, size) == (24, 4)
    if rest or not fits:
        raise ArrayFormatError(
            f"says {block_align} bytes for {counted(num_channels, 'channel')} of {bits} bits, which do not "
            "fit",
            offset=offset,
        )


def _is_known(size: int, offset: int, riff_size: int, *, block_align: int, length: int) -> bool:
    """Whether the size of the samples is the final one, and not that of an unfinished file.

    Some programs first write 0, so that an unfinished file looks empty. They also write 0 as the size of the
    file, which then ends before the first sample.
    """
    if size == 0:
        return riff_size not in (NO_SIZE, _NO_LONG_SIZE) and riff_size + _CHUNK.size > offset
    if size in (NO_SIZE, _NO_LONG_SIZE):
        return False
    is_stand_in = any(0 <= stand_in - size < block_align for stand_in in _STAND_INS)
    return not is_stand_in or offset + size <= length


def _read_long_sizes(content: Content, offset: int, size: int) -> tuple[int, int]:
    """Return the 64-bit sizes of the file and of the samples in RF64."""
    if size < 28 or offset + 28 > len(content):
        raise ArrayFormatError(f"its chunk 'ds64' has {size} bytes, less than 28", offset=offset)
    return _LONG_SIZES.unpack_from(content, offset)


def _view(dtype: np.dtype[Any], content: Content, offset: int, shape: tuple[int, int]) -> Array:
    return np.ndarray(shape, dtype, content, offset)


def _read_24_bits(content: Content, offset: int, shape: tuple[int, int]) -> Array:
    """Return samples of 24 bits as int32, in the upper 24 bits."""
    # Read four bytes from the byte before each sample on, and clear the lowest: this is one pass, whereas
    # copying three bytes takes six times as long. The byte before the first sample belongs to the header.
    out = np.empty(shape, np.int32)
    if out.size:
        wide = np.ndarray((out.size,), "<i4", content, offset - 1, (3,))
        np.bitwise_and(wide, -256, out=out.reshape(-1))
    return out


def _read_by_table(
    make_table: Callable[[], Array], content: Content, offset: int, shape: tuple[int, int]
) -> Array:
    """Decode bytes by a table, two at a time, which is twice as fast as one by one."""
    out = np.empty(shape, np.int16)
    table, size = _pairs_of(make_table), out.size
    codes = np.ndarray((size // 2,), "<u2", content, offset)
    pairs = out.reshape(-1)[: size // 2 * 2].view(np.uint32)
    for start in range(0, len(codes), _BLOCK):
        piece = slice(start, start + _BLOCK)
        # Not mode="raise", for which NumPy writes to a temporary buffer first.
        np.take(table, codes[piece], out=pairs[piece], mode="clip")
    if size % 2:
        out.reshape(-1)[-1] = make_table()[content[offset + size - 1]]
    return out


@functools.cache
def _pairs_of(make_table: Callable[[], Array]) -> Array:
    """Return the table of two samples for each pair of bytes: 256 KiB, made at first use."""
    table = make_table()
    return np.stack([np.tile(table, 256), table.repeat(256)], axis=1).view(np.uint32).reshape(-1)


@functools.cache
def _mu_law() -> Array:
    """Return the table of mu-law (ITU-T G.711, table 2): sign, exponent and mantissa, all bits inverted."""
    codes = ~np.arange(256, dtype=np.uint8)
    exponent, mantissa = (codes >> 4 & 7).astype(np.int32), (codes & 15).astype(np.int32)
    size = ((2 * mantissa + 33) << exponent) - 33
    # 14 bits, in the upper bits of 16.
    return (4 * np.where(codes & 0x80, -size, size)).astype(np.int16)


@functools.cache
def _a_law() -> Array:
    """Return the table of A-law (ITU-T G.711, table 1): alternate bits inverted, exponents 0, 1 linear."""
    codes = np.arange(256, dtype=np.uint8) ^ 0x55
    exponent, mantissa = (codes >> 4 & 7).astype(np.int32), (codes & 15).astype(np.int32)
    size = (2 * mantissa + 1 + 32 * (exponent > 0)) << np.maximum(exponent - 1, 0)
    # 13 bits, in the upper bits of 16.
    return (8 * np.where(codes & 0x80, size, -size)).astype(np.int16)


class _Kind(NamedTuple):
    """A sample format: FFmpeg's names of codec and sample format, and the function that reads it.

    ``read(content, offset of the first byte, shape)`` returns the array.
    """

    codec: str
    sample_fmt: str
    read: Callable[[Content, int, tuple[int, int]], Array]


# Keys: code of the format, and bytes of a sample.
KINDS: Mapping[tuple[int, int], _Kind] = MappingProxyType(
    {
        (PCM, 1): _Kind("pcm_u8", "u8", partial(_view, np.dtype("u1"))),
        (PCM, 2): _Kind("pcm_s16le", "s16", partial(_view, np.dtype("<i2"))),
        (PCM, 3): _Kind("pcm_s24le", "s32", _read_24_bits),
        (PCM, 4): _Kind("pcm_s32le", "s32", partial(_view, np.dtype("<i4"))),
        (PCM, 8): _Kind("pcm_s64le", "s64", partial(_view, np.dtype("<i8"))),
        (_FLOAT, 4): _Kind("pcm_f32le", "flt", partial(_view, np.dtype("<f4"))),
        (_FLOAT, 8): _Kind("pcm_f64le", "dbl", partial(_view, np.dtype("<f8"))),
        (_A_LAW, 1): _Kind("pcm_alaw", "s16", partial(_read_by_table, _a_law)),
        (_MU_LAW, 1): _Kind("pcm_mulaw", "s16", partial(_read_by_table, _mu_law)),
    }
)
