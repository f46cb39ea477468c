"""Decode audio to one array: from packets, from a source while it is read, or from a WAV file."""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache, partial
from typing import NamedTuple, TypeAlias

import numpy as np

from spdl_media._container import Container
from spdl_media._ffmpeg import ffmpeg_log, keep_freed_memory, unheard_log
from spdl_media._sample_decoder import READ_FIRST, SampleDecoder, decode_frames
from spdl_media.array_formats.wav import KINDS, NO_SIZE, PCM, SURE_BELOW, WAVHeader, parse_file
from spdl_media.buffer import CPUBuffer
from spdl_media.codec import AudioCodec
from spdl_media.config import DecodeConfig, DemuxConfig
from spdl_media.convert import convert_frames, no_samples
from spdl_media.decode import decode_audio_into, decode_packets
from spdl_media.errors import ArrayFormatError, DecodeError, DemuxError, FilterError
from spdl_media.filter_desc import FilterDesc
from spdl_media.formats import SAMPLE_DTYPES, Array
from spdl_media.frame_scan import CodedFrames, find_flac, find_mp3
from spdl_media.frames import layout_name, silence_of
from spdl_media.inputs import Input, Source, open_input
from spdl_media.mp4_audio import find_aac
from spdl_media.ogg_audio import OggAudio, decode_ogg, find_ogg
from spdl_media.operations import SoundOps
from spdl_media.packets import AudioPackets, PacketMetadata, metadata_of
from spdl_media.rows import OnShort, check_enough, fill_up
from spdl_media.sample_rows import SampleRows, ops_on_samples
from spdl_media.storage import Storage, lease_memory, new_array
from spdl_media.timing import Window
from spdl_media.window import audio_packets, read_audio

TimedAudio: TypeAlias = tuple[CPUBuffer, float]
"""Samples, and the time of the first one on the container's clock, in seconds."""


@dataclass(frozen=True, slots=True)
class AudioRequest:
    """Options of one audio load.

    Attributes:
        desc: Operations, a filter graph of the caller's, or ``None``: no graph.
        storage: Memory for the result; ``None``: fresh memory.
        config: Options of decoding.
        num_samples: Maximum number of samples per channel.
        on_short: How to fill up to ``num_samples``; ``None``: the result may be shorter.
        ops: Operations of ``desc``; ``None``: a graph whose result may depend on where frames begin.
    """

    desc: SoundOps | str | None
    storage: Storage | None
    config: DecodeConfig
    num_samples: int | None = None
    on_short: OnShort | None = None
    ops: SoundOps | None = field(init=False)

    def __post_init__(self) -> None:
        desc = SoundOps(sample_fmt=None) if self.desc is None else self.desc
        object.__setattr__(self, "ops", ops_on_samples(desc))

    def rows(self, zero: Fraction, end: Fraction | float | None) -> SampleRows:
        """Return a sink for the result, if there are :attr:`ops`.

        Args:
            zero: Second 0 of the container on the stream's own clock.
            end: Expected time of the last sample, in seconds on the container's clock, if known.
        """
        ops, limit = self.ops, self.num_samples
        assert ops is not None, "other graphs filter frames"
        return SampleRows(ops, partial(lease_memory, storage=None), zero=zero, end=end, limit=limit)

    def result(
        self, array: Array, sample_fmt: str, metadata: PacketMetadata, sample_rate: int, first: int
    ) -> TimedAudio:
        """Return the samples in the requested length, and in the storage if there is one.

        Raises:
            ConvertError: There are too few samples, or the storage is too small.
        """
        planar = sample_fmt.endswith("p")
        found = array.shape[planar]
        wanted = found if self.on_short is None else self.num_samples or found
        if found < wanted:
            check_enough(found, wanted, self.on_short, "samples", metadata.window, metadata.source)
        if self.storage is not None or found < wanted:
            # Copied, because the length was not known when the array was allocated.
            shape = (len(array), wanted) if planar else (wanted, array.shape[1])
            array, made = new_array(shape, array.dtype.str, self.storage), array
            # View both with samples along the first axis, in planar formats, too.
            rows = array.T if planar else array
            rows[:found] = made.T if planar else made
            if self.on_short is not None:
                fill_up(rows, found, self.on_short, silence_of(sample_fmt))
        return CPUBuffer(array, sample_rate=sample_rate), first / sample_rate


def load_audio_array(
    src: Source,
    window: Window,
    request: AudioRequest,
    stream_index: int | None = None,
    demux_config: DemuxConfig | None = None,
    name: str | None = None,
) -> TimedAudio:
    """Read and decode audio to one array. See :func:`~spdl_media.load_audio` for the arguments.

    Raises:
        SourceError: The source cannot be opened or read.
        DemuxError: The source is not a media file, or has no such stream.
        DecodeError: The data is damaged.
        FilterError: The filters do not accept the samples.
        ConvertError: The window contains no sample.
    """
    keep_freed_memory()
    with open_input(src, demux_config, name=name) as input:
        if (ops := request.ops) is not None and input.seekable:
            array = None
            # These readers choose the stream themselves, and take none of FFmpeg's options.
            if stream_index is None and demux_config is None:
                array = _load_without_container(input, window, ops, request)
            array = array or _decode_while_reading(input, stream_index, window, request)
            if array is not None:
                return array
        # After any fault, read from the start with a new container: in a damaged MPEG-TS, FFmpeg does not
        # seek back to the first packet.
        with closing(Container(input)) as container:
            packets = read_audio(container, stream_index, window)
    return decode_audio_array(packets, request)


def decode_audio_array(packets: AudioPackets, request: AudioRequest) -> TimedAudio:
    """Decode packets to one array, equal to that of ``convert_frames(decode_packets(...))``.

    Raises:
        DecodeError: The data is damaged.
        FilterError: The filters do not accept the samples.
        ConvertError: The window contains no sample.
    """
    keep_freed_memory()
    metadata = metadata_of(packets)
    # Decode into the array if possible, so that frames are not kept.
    if request.ops is not None:
        rows = request.rows(metadata.zero, metadata.window.end)
        decode_audio_into(rows, packets, request.config, request.num_samples)
        if not rows.mixed:
            return _finished(rows, request, metadata, packets.codec)
    # Frames of several formats, or a graph of the caller's. The graph may convert all to one format.
    desc = FilterDesc(request.desc) if isinstance(request.desc, SoundOps) else request.desc
    frames = decode_packets(packets, desc, request.config, num_samples=request.num_samples)
    array = convert_frames(frames).array
    return request.result(
        array, frames.sample_fmt, metadata, frames.sample_rate, frames.first_sample
    )


def _decode_while_reading(
    input: Input, stream_index: int | None, window: Window, request: AudioRequest
) -> TimedAudio | None:
    """Decode each packet as it is read, without keeping packets.

    Returns:
        The audio; ``None`` if the source has a fault. The caller then reads all packets before it decodes
        them, which raises the right error.
    """
    # FFmpeg reports damaged Ogg pages only in its log.
    is_ogg = bytes(input.head(4)) == b"OggS"
    try:
        with (
            ffmpeg_log() if is_ogg else unheard_log(),
            closing(Container(input)) as container,
        ):
            if (container.format == "ogg") != is_ogg:
                return None
            with container.reading():
                index, codec, packets = audio_packets(container, stream_index, window, keep=False)
                # FFmpeg rounds the duration to microseconds. If a sample is missing at the end, all channels
                # but the first have to be moved in memory.
                stated = container.duration and container.duration - 1e-6
                end = min((end for end in (window.end, stated) if end), default=None)
                rows = request.rows(container.zero, end)
                metadata = PacketMetadata(container.name, container.zero, window)
                decoder = SampleDecoder(codec, metadata, request.config)
                most = READ_FIRST if not window and request.num_samples is None else 0
                decoder.run(packets, rows, in_memory=input.in_memory(most))
            last = decoder.last_packet  # later ones may be cut: the window does not need them
            # The caller's other path raises the error.
            if rows.mixed or last is None or container.missing_end(index, last):
                return None
    except (DemuxError, DecodeError, FilterError):
        return None
    return _finished(rows, request, metadata, codec)


_ZERO = Fraction(0)

# Samples of its output that a resampler may hold back.
_MOST_DELAYED = 32


def _load_without_container(
    input: Input, window: Window, ops: SoundOps, request: AudioRequest
) -> TimedAudio | None:
    """Load WAV, MP3, FLAC, AAC or Ogg without PyAV's container; ``None`` if that has to read or to raise."""
    config, limit, rate, asked = request.config, request.num_samples, ops.sample_rate, window
    if config.decoder is not None or config.decoder_options:
        return None
    if rate is not None and limit is not None:
        # More than needed, because the resampler delays some samples.
        begin = max(window.start or _ZERO, _ZERO)
        end = begin + Fraction(limit + _MOST_DELAYED, rate) + Fraction(1, 10)
        window = Window(window.start, end if window.end is None else min(end, window.end))
    head = bytes(input.read_at(0, WAV_HEAD_SIZE))
    is_wav, is_mp4 = head[:4] == b"RIFF", head[4:8] == b"ftyp"
    find = find_aac if is_mp4 else _FINDERS.get(head[:1])
    if find is None or (config.gaps == "fill" and not is_wav) or (is_mp4 and not input.is_local):
        return None
    try:
        found = find(input, head, window, limit if rate is None else None)
    # A header is truncated, or states what only FFmpeg handles.
    except (StopIteration, LookupError, ValueError, ArithmeticError, struct.error):
        found = None
    return None if found is None else _load_found(input.name, found, asked, request)


def _load_found(
    name: str, found: CodedFrames | OggAudio | _WAVSamples, window: Window, request: AudioRequest
) -> TimedAudio | None:
    """Return the samples; ``None`` if a frame does not give the expected ones, or a filter fails."""
    codec, rate = found.codec, found.codec.sample_rate
    metadata = PacketMetadata(name, _ZERO, window)
    rows = request.rows(_ZERO, found.window[1] / rate)
    try:
        if isinstance(found, CodedFrames):
            # Decode many frames per packet.
            if not decode_frames(found, request.config, rows, name):
                return None
        elif isinstance(found, OggAudio):
            if not decode_ogg(found, rows):
                return None
        else:
            format = codec.sample_fmt or "", codec.channel_layout, rate
            rows.put_range(found.read, found.window, format)
    except (DecodeError, FilterError):  # the former: a decoder cannot be opened
        return None
    # Without a sample, the sample format is unknown here. FFmpeg's demuxer states it.
    return _finished(rows, request, metadata, codec) if rows.count else None


def _finished(
    rows: SampleRows, request: AudioRequest, metadata: PacketMetadata, codec: AudioCodec
) -> TimedAudio:
    array = rows.array()
    if array is not None:
        return request.result(array, rows.sample_fmt, metadata, rows.sample_rate, rows.first)
    ops = request.ops
    assert ops is not None, "rows were made"
    sample_fmt = ops.sample_fmt or codec.sample_fmt
    if request.on_short != "zeros" or not sample_fmt:
        raise no_samples(metadata.window, metadata.source)
    channels, rate = ops.num_channels or codec.num_channels, ops.sample_rate or codec.sample_rate
    shape = (channels, 0) if sample_fmt.endswith("p") else (0, channels)
    empty = np.empty(shape, SAMPLE_DTYPES[sample_fmt.removesuffix("p")])
    return request.result(empty, sample_fmt, metadata, rate, metadata.window.samples(rate)[0])


# WAV files are read without FFmpeg, which reads 32 packets to open one. It reads unusual and damaged files.

# Enough for the chunks before the samples in most files, and for a first frame of DTS, of up to 4 KiB.
WAV_HEAD_SIZE = 8 * 1024
_MOST_CHANNELS = 64
# DTS and compressed data for S/PDIF pretend to be 16-bit stereo PCM. Their frames begin with these words.
_SYNC_HEX = "7ffe8001 fe7f0180 1fffe800 ff1f00e8 72f81f4e f8724e1f"
_SYNC_WORDS = tuple(map(bytes.fromhex, _SYNC_HEX.split()))


class _WAVSamples(NamedTuple):
    codec: AudioCodec
    read: Callable[[int, int], Array]  # from a position to another
    window: tuple[int, int]  # positions, as in CodedFrames


def _find_wav(input: Input, head: bytes, window: Window, limit: int | None) -> _WAVSamples | None:
    """Find the samples of a window of a WAV file.

    Args:
        input: The opened file.
        head: As for :func:`read_wav_info`.
        window: The samples to read.
        limit: Maximum number of samples.

    Returns:
        The samples; ``None`` if the file must be read by FFmpeg, or the window contains no sample.
    """
    if (info := read_wav_info(input, head)) is None:
        return None
    header, codec = info
    start, stop = window.sample_range(header.sample_rate, limit)
    stop = min(stop, header.num_samples)
    kind = KINDS[header.sample_format, header.block_align // header.num_channels]
    before = int(kind.codec == "pcm_s24le")  # its reader needs the byte before each sample

    def read(start: int, stop: int) -> Array:
        size = (stop - start) * header.block_align + before
        content = input.read_at(header.data_offset + start * header.block_align - before, size)
        if len(content) < size:
            raise DecodeError("the file became shorter", source=input.name)
        return kind.read(content, before, (stop - start, header.num_channels))

    # Others at once: a compressed file object is decompressed from its start for each read.
    whole = cache(partial(read, start, stop))
    part = read if input.is_local else lambda begin, end: whole()[begin - start : end - start]
    return _WAVSamples(codec, part, (start, stop)) if start < stop else None


# By the first byte: that of RIFF, fLaC, OggS, ID3 and of an MP3 frame.
_FINDERS: dict[bytes, Callable[..., CodedFrames | OggAudio | _WAVSamples | None]] = {
    b"R": _find_wav,
    b"f": find_flac,
    b"O": find_ogg,
    b"I": find_mp3,
    b"\xff": find_mp3,
}


def read_wav_info(input: Input, head: bytes) -> tuple[WAVHeader, AudioCodec] | None:
    """Return the header of a WAV file whose samples FFmpeg would decode in the same way, and its stream.

    Args:
        input: The opened file, which must have a size.
        head: Its first :data:`WAV_HEAD_SIZE` bytes.

    Returns:
        ``None`` if FFmpeg must read it: it is not a WAV file, is truncated, states an unusual size or sample
        rate, or its samples are not PCM, float, A-law or mu-law of whole bytes.

    Raises:
        SourceError: The source cannot be read.
    """
    if head[:4] != b"RIFF":
        return None
    try:
        header, bits, mask, stated = parse_file(head)
    except ArrayFormatError:
        return None
    rest = input.size() - header.data_offset
    if stated == NO_SIZE and rest % header.block_align == 0:
        stated, header = rest, header._replace(data_size=rest)
    if not 0 < stated < SURE_BELOW or stated > rest or header.sample_rate >= 1 << 31:
        return None
    num_channels = header.num_channels
    size = header.block_align // num_channels
    kind = KINDS.get((header.sample_format, size))
    # FFmpeg chooses the codec by the significant bits, not by the bytes that a sample occupies.
    if kind is None or (bits + 7) // 8 != size or num_channels > _MOST_CHANNELS:
        return None
    is_stereo_16 = (header.sample_format, size, num_channels) == (PCM, 2, 2)
    if is_stereo_16 and any(word in head for word in _SYNC_WORDS):
        return None
    layout = f"{mask:#x}" if mask.bit_count() == num_channels else f"{num_channels} channels"
    of_samples = header.sample_rate, layout_name(layout), num_channels, kind.sample_fmt
    return header, AudioCodec(kind.codec, kind.codec, *of_samples)
