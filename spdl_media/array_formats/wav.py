"""Samples out of a WAV file in memory, as views where their type allows."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias

import numpy as np

from spdl_media.errors import ArrayFormatError
from spdl_media.readers import Content, content_of, name_of
from spdl_media.timing import Seconds, Window, parse_window

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ("WAVHeader", "load_wav", "parse_wav")

_Reader: TypeAlias = Callable[[Content, int, tuple[int, int]], np.ndarray[Any, Any]]
"""Makes the array of (content, offset of the first byte, shape)."""

_PCM, _FLOAT, _A_LAW, _MU_LAW = 1, 3, 6, 7
_FORMATS = frozenset({_PCM, _FLOAT, _A_LAW, _MU_LAW})
"""The formats whose samples are of one size each. What else there is comes in packets."""

# np.take needs eight bytes for each index, so not all at once; each piece hands the GIL over twice, so not in
# small ones: with 16 Ki indices two threads get 1.2 times as much done as one, with these 1.8 times.
_BLOCK = 256 * 1024

_CHUNK = struct.Struct("<4sI")
_SIZE = struct.Struct("<I")
_LONG_SIZES = struct.Struct("<2Q")
_FORMAT = struct.Struct("<HHIIHH")
_WANTED = (b"fmt ", b"ds64", b"data")
_EXTENSIBLE = 0xFFFE
# The size of the extension, the bits that count, the mask of speakers, and the format as a GUID, of which all
# but the first two bytes are the same for every code.
_EXTENSION = struct.Struct("<HHIH14s")
_GUID_END = bytes.fromhex("000000001000800000aa00389b71")
# What is written where the size is not known yet (a pipe), or stands in "ds64" (RF64).
_NO_SIZE, _NO_LONG_SIZE = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
# What some write instead, down to whole samples: SoX the first, ALSA's arecord the last.
_STAND_INS = (0x7FFFF000, 0x7FFFFFFF, 0x80000000)
_SURE_BELOW = min(_STAND_INS) - 0xFFFF


class WAVHeader(NamedTuple):
    """What the header of a WAV file says. Made by :func:`parse_wav`.

    Attributes:
        audio_format: The code of the format as it stands there: 1 is PCM, 3 float, 6 A-law, 7 mu-law,
            65534 WAVE_FORMAT_EXTENSIBLE.
        num_channels: Channels.
        sample_rate: Samples a second, of each channel.
        byte_rate: Bytes a second, as the file says; nothing depends on it.
        block_align: Bytes of one sample of all channels.
        bits_per_sample: Bits of a sample, or of the room that it has.
        data_size: Bytes of all samples.
        data_offset: Where they begin, in bytes from the start of the file.
        sample_format: The code of what the samples are; differs from ``audio_format`` where that is
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
        """Samples of each channel."""
        return self.data_size // self.block_align


def parse_wav(data: Buffer | np.ndarray[Any, Any]) -> WAVHeader:
    """Read the header of a WAV file (RIFF, RF64 or BW64).

    Args:
        data: The file's content up to the first sample, at least: bytes, any contiguous buffer, a 1-D uint8
            array or CPU tensor.

    Returns:
        The header. Of a file that was begun when its size was not known, and never finished,
            ``data_size`` is what there is. Of formats that :func:`load_wav` does not read, such as MP3,
            ``num_samples`` counts packets.

    Raises:
        ArrayFormatError: Not WAV, cut short before the first sample, or values that contradict each other.
        TypeError: ``data`` is not memory (a path, for example).

    Thread safety: safe.

    See:
        https://www.mmsp.ece.mcgill.ca/Documents/AudioFormats/WAVE/WAVE.html, EBU Tech 3306 for RF64
    """
    content = content_of(data, "a WAV file")
    return _parse(content)


def load_wav(
    data: Buffer | np.ndarray[Any, Any],
    time_offset_seconds: Seconds | None = None,
    duration_seconds: Seconds | None = None,
) -> np.ndarray[Any, Any]:
    """Read samples of a WAV file.

    Args:
        data: The file's content: bytes, any contiguous buffer, a 1-D uint8 array or CPU tensor.
        time_offset_seconds: Where to begin; sample ``k`` stands at ``k / sample_rate`` seconds. Windows that
            touch share no sample and lose none.
        duration_seconds: How long; to the end if the file has less.

    Returns:
        Array ``(num_samples, num_channels)``. Views of ``data``, read-only if it is: uint8 (128 is silence),
        int16, int32, int64, float32 or float64, little-endian, not scaled. New arrays: 24 bits as int32
        with the low 8 bits 0, A-law and mu-law as the int16 that they stand for. Fewer bits in wider
        samples are at the top of them.

    Raises:
        ArrayFormatError: Not WAV, cut short, of another sample format, or values that contradict each
            other. No memory is allocated before the sizes are checked.
        TypeError: ``data`` is not memory (a path, for example), or a time is no number.
        ValueError: The offset is negative or past the end, the duration is negative, or one is NaN.

    Thread safety: safe. Conversion of more than 64 KiB is done without the GIL.
    """
    content = content_of(data, "a WAV file")
    header = _parse(content)
    kind = (header.sample_format, header.block_align // header.num_channels)
    read = READERS.get(kind)
    if read is None:
        _fail(
            content,
            f"holds {header.bits_per_sample} bits of format {kind[0]}; PCM (1) of 8, 16, 24, 32 and 64 bits, "
            "float (3) of 32 and 64, A-law (6) and mu-law (7) are read. load_audio reads what FFmpeg can",
            _CHUNK.size,
        )
    start, stop = 0, header.num_samples
    if time_offset_seconds is not None or duration_seconds is not None:
        start, stop = _window(header, time_offset_seconds, duration_seconds)
    missing = header.data_offset + header.data_size - len(content)
    if missing > 0:
        message = f"is cut short: {missing} of {header.data_size} bytes of samples are missing"
        _fail(content, message, len(content))
    offset = header.data_offset + start * header.block_align
    shape = (stop - start, header.num_channels)
    try:
        return read(content, offset, shape)
    except ValueError as error:  # more channels and samples than NumPy can count
        _fail(content, f"NumPy has no array of shape {shape}: {error}", offset)


_MOST_CHANNELS = 64

# DTS and compressed data for S/PDIF come as stereo PCM of 16 bits, and begin their frames with these.
_SYNC_WORDS = tuple(
    bytes.fromhex(word)
    for word in ("7ffe8001 fe7f0180 1fffe800 ff1f00e8 72f81f4e f8724e1f".split())
)


def known_header(head: bytes, length: int) -> tuple[WAVHeader, str] | None:
    """What the header says, and the channel layout as FFmpeg's text.

    ``None`` where FFmpeg has to judge: it is no WAV file, or one that is cut short, has no stated size, or
    samples that are not of whole bytes, one size, and PCM, float, A-law or mu-law.

    Args:
        head: The beginning of the file.
        length: Bytes of the file.
    """
    if head[:4] != b"RIFF" or head[8:12] != b"WAVE":
        return None
    try:
        header = _parse(head)
    except ArrayFormatError:
        return None
    offset, size = header.data_offset, header.block_align // header.num_channels
    stated = _SIZE.unpack_from(head, offset - _SIZE.size)[0]
    if not 0 < stated < _SURE_BELOW or offset + stated > length:
        return None
    bits, layout = header.bits_per_sample, f"{header.num_channels} channels"
    if header.audio_format == _EXTENSIBLE:
        place = _find_chunks(head)[b"fmt "][0] + _FORMAT.size
        _, bits, mask, _, _ = _EXTENSION.unpack_from(head, place)
        if mask.bit_count() == header.num_channels:
            layout = f"{mask:#x}"
    # FFmpeg goes by the bits that count, not by the room that they have.
    if (header.sample_format, size) not in READERS or (bits + 7) // 8 != size:
        return None
    if header.num_channels > _MOST_CHANNELS:
        return None
    is_stereo_16 = (header.sample_format, size, header.num_channels) == (_PCM, 2, 2)
    if is_stereo_16 and any(word in head for word in _SYNC_WORDS):
        return None
    return header, layout


def _window(header: WAVHeader, offset: Seconds | None, duration: Seconds | None) -> tuple[int, int]:
    """First sample and the one after the last."""
    begin = _seconds("time_offset_seconds", 0 if offset is None else offset)
    if begin is None:
        raise ValueError(f"time_offset_seconds must be finite, not {offset!r}")
    start, _ = Window(begin).samples(header.sample_rate)
    if start > header.num_samples:
        length = header.num_samples / header.sample_rate
        raise ValueError(f"time_offset_seconds={offset!r} is past the end, at {length:g} s")
    length_asked = None if duration is None else _seconds("duration_seconds", duration)
    if length_asked is None:
        return start, header.num_samples
    _, stop = Window(None, begin + length_asked).samples(header.sample_rate)
    assert stop is not None, "the window has an end"
    return start, min(max(start, stop), header.num_samples)


def _seconds(name: str, value: Seconds) -> Fraction | None:
    """A time from 0 on; ``None`` is infinity."""
    message = f"{name} must be a number of seconds, 0 or more, not {value!r}"
    try:
        seconds = parse_window((None, value)).end
    except TypeError as error:
        raise TypeError(message) from error
    except ValueError as error:
        raise ValueError(message) from error
    if seconds is not None and seconds < 0:
        raise ValueError(message)
    return seconds


def _parse(content: Content) -> WAVHeader:
    head = bytes(content[:12])
    if head[:4] not in (b"RIFF", b"RF64", b"BW64") or head[8:] != b"WAVE":
        also = "; load_audio reads big-endian WAV" if head[:4] == b"RIFX" else ""
        _fail(content, f"is not a WAV file: it begins with {head!r}{also}", 0)
    chunks = _find_chunks(content)
    if b"data" not in chunks:
        _fail(content, "is cut short: there is no chunk 'data'", len(content))
    if b"fmt " not in chunks:
        _fail(
            content, "has samples before the chunk 'fmt ' that describes them", chunks[b"data"][0]
        )
    offset, size = chunks[b"data"]
    riff_size = _SIZE.unpack_from(content, 4)[0]
    if head[:4] != b"RIFF" and b"ds64" in chunks:
        riff_size, long_size = _read_long_sizes(content, *chunks[b"ds64"])
        size = long_size if size == _NO_SIZE else size
    format = _read_format(content, *chunks[b"fmt "])
    if not 0 < size < _SURE_BELOW and not _is_known(
        size, offset, riff_size, block_align=format[4], length=len(content)
    ):
        return _header(content, format, offset, None)
    return _header(content, format, offset, size)


def _is_known(size: int, offset: int, riff_size: int, *, block_align: int, length: int) -> bool:
    """Whether the writer has filled in the size of the samples, and not only begun the header.

    Some begin with 0, so that a file that was never finished looks empty; but so does its end, which would
    be before the first sample.
    """
    if size == 0:
        return riff_size not in (_NO_SIZE, _NO_LONG_SIZE) and riff_size + _CHUNK.size > offset
    if size in (_NO_SIZE, _NO_LONG_SIZE):
        return False
    is_stand_in = any(0 <= stand_in - size < block_align for stand_in in _STAND_INS)
    return not is_stand_in or offset + size <= length


def _find_chunks(content: Content) -> dict[bytes, tuple[int, int]]:
    """Place and size of the chunks that matter, up to the samples."""
    chunks: dict[bytes, tuple[int, int]] = {}
    offset, last = 12, len(content) - _CHUNK.size
    while offset <= last:
        name, size = _CHUNK.unpack_from(content, offset)
        offset += _CHUNK.size
        if name in _WANTED:
            chunks.setdefault(name, (offset, size))
            if name == b"data":
                break
        offset += size + size % 2  # chunks begin at even places
    return chunks


def _read_format(content: Content, offset: int, size: int) -> tuple[int, ...]:
    """The six fields of the format, and the code that stands behind an extensible one."""
    if size < _FORMAT.size or offset + size > len(content):
        _fail(content, f"its chunk 'fmt ' of {size} bytes is cut short", offset)
    fields = _FORMAT.unpack_from(content, offset)
    if fields[0] != _EXTENSIBLE:
        return *fields, fields[0]
    if size < _FORMAT.size + _EXTENSION.size:
        _fail(content, f"its format is extensible, and its chunk has only {size} bytes", offset)
    _, _, _, code, guid_end = _EXTENSION.unpack_from(content, offset + _FORMAT.size)
    if guid_end != _GUID_END:
        _fail(content, "its extensible format is none of the known ones", offset)
    return *fields, code


def _read_long_sizes(content: Content, offset: int, size: int) -> tuple[int, int]:
    """What RF64 says of the file and the samples, where their own chunks have no room for it."""
    if size < 28 or offset + 28 > len(content):
        _fail(content, f"its chunk 'ds64' has {size} bytes, less than 28", offset)
    riff_size, data_size = _LONG_SIZES.unpack_from(content, offset)
    return riff_size, data_size


def _header(content: Content, format: tuple[int, ...], offset: int, size: int | None) -> WAVHeader:
    code, num_channels, rate, byte_rate, block_align, bits, sample_format = format
    place = offset - _CHUNK.size
    if not (num_channels and rate and block_align):
        message = f"has {num_channels} channels, {rate} Hz and {block_align} bytes a sample"
        _fail(content, message, place)
    # All bits of whole bytes are the rule, and the rest of the question is asked of few.
    if (bits * num_channels != 8 * block_align or bits % 8) and not _fits(
        sample_format, bits, block_align, num_channels
    ):
        message = (
            f"says {block_align} bytes for {num_channels} channels of {bits} bits, which do not fit"
        )
        _fail(content, message, place)
    if size is None:
        rest = len(content) - offset
        size = rest - rest % block_align
    if size % block_align and sample_format in _FORMATS:
        message = (
            f"has {size} bytes of samples, no multiple of {block_align} for one of all channels"
        )
        _fail(content, message, offset)
    return WAVHeader(
        code, num_channels, rate, byte_rate, block_align, bits, size, offset, sample_format
    )


def _fits(sample_format: int, bits: int, block_align: int, num_channels: int) -> bool:
    """Whether samples of whole bytes take the room that the file says."""
    if sample_format not in _FORMATS:
        return True  # they come in packets, and the fields mean something else
    size, rest = divmod(block_align, num_channels)
    if rest:
        return False
    if sample_format != _PCM:
        return bits == 8 * size
    # No more bytes than the bits need, but for 24 bits in 32, which some write.
    return 8 * (size - 1) < bits <= 8 * size or (bits, size) == (24, 4)


def _fail(content: Content, message: str, offset: int) -> NoReturn:
    raise ArrayFormatError(message, source=name_of(content), offset=offset)


def _view(
    dtype: np.dtype[Any], content: Content, offset: int, shape: tuple[int, int]
) -> np.ndarray[Any, Any]:
    return np.ndarray(shape, dtype, content, offset)


def _read_24_bits(content: Content, offset: int, shape: tuple[int, int]) -> np.ndarray[Any, Any]:
    """24 bits at the top of 32."""
    # Four bytes from the one before each sample on, of which the lowest is then cleared: one pass, where
    # copying three bytes to their places takes six times as long. Before the first there is the header.
    size = shape[0] * shape[1]
    if not size:
        return np.empty(shape, np.int32)
    wide = np.ndarray((size,), "<i4", content, offset - 1, (3,))
    out = np.empty(shape, np.int32)
    np.bitwise_and(wide, -256, out=out.reshape(-1))
    return out


def _read_by_table(
    make_table: Callable[[], np.ndarray[Any, Any]],
    content: Content,
    offset: int,
    shape: tuple[int, int],
) -> np.ndarray[Any, Any]:
    """Look the bytes up, two at a time, which is twice as fast as one by one."""
    size = shape[0] * shape[1]
    out = np.empty(shape, np.int16)
    table = _pairs_of(make_table)
    codes = np.ndarray((size // 2,), "<u2", content, offset)
    pairs = out.reshape(-1)[: size // 2 * 2].view(np.uint32)
    for start in range(0, len(codes), _BLOCK):
        piece = slice(start, start + _BLOCK)
        # Not mode "raise", for which NumPy would fill a buffer first.
        np.take(table, codes[piece], out=pairs[piece], mode="clip")
    if size % 2:
        out.reshape(-1)[-1] = make_table()[content[offset + size - 1]]
    return out


@functools.cache
def _pairs_of(make_table: Callable[[], np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Two samples for every two bytes: 256 KiB, made at first use."""
    table = make_table()
    return np.stack([np.tile(table, 256), table.repeat(256)], axis=1).view(np.uint32).reshape(-1)


@functools.cache
def _mu_law() -> np.ndarray[Any, Any]:
    """ITU-T G.711, table 2: sign, three bits of exponent and four of mantissa, all inverted."""
    codes = ~np.arange(256, dtype=np.uint8)
    exponent, mantissa = (codes >> 4 & 7).astype(np.int32), (codes & 15).astype(np.int32)
    size = ((2 * mantissa + 33) << exponent) - 33
    return (4 * np.where(codes & 0x80, -size, size)).astype(np.int16)


@functools.cache
def _a_law() -> np.ndarray[Any, Any]:
    """ITU-T G.711, table 1: the same fields with every second bit inverted; exponents 0 and 1 are linear."""
    codes = np.arange(256, dtype=np.uint8) ^ 0x55
    exponent, mantissa = (codes >> 4 & 7).astype(np.int32), (codes & 15).astype(np.int32)
    size = np.where(
        exponent == 0, 2 * mantissa + 1, (2 * mantissa + 33) << np.maximum(exponent - 1, 0)
    )
    return (8 * np.where(codes & 0x80, size, -size)).astype(np.int16)


READERS: Mapping[tuple[int, int], _Reader] = MappingProxyType(
    {
        (_PCM, 1): partial(_view, np.dtype("u1")),
        (_PCM, 2): partial(_view, np.dtype("<i2")),
        (_PCM, 3): _read_24_bits,
        (_PCM, 4): partial(_view, np.dtype("<i4")),
        (_PCM, 8): partial(_view, np.dtype("<i8")),
        (_FLOAT, 4): partial(_view, np.dtype("<f4")),
        (_FLOAT, 8): partial(_view, np.dtype("<f8")),
        (_A_LAW, 1): partial(_read_by_table, _a_law),
        (_MU_LAW, 1): partial(_read_by_table, _mu_law),
    }
)
"""By code of the format and bytes of a sample."""
