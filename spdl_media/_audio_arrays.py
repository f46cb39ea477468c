"""Samples into one array: frames that are decoded, and packets straight to rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache

import numpy as np

from spdl_media._checks import check_int
from spdl_media._jpeg import keep_freed_memory
from spdl_media._rows import Array, new_array
from spdl_media._sample_decoder import (
    SampleDecoder,
    SampleRows,
    filter_samples,
    layout_name,
    num_channels,
)
from spdl_media._wav import read_wav
from spdl_media.buffer import CPUBuffer
from spdl_media.config import DecodeConfig, DemuxConfig, as_decode_config
from spdl_media.decode import cut_short_error, decode_packets
from spdl_media.demux import Demuxer
from spdl_media.errors import ConvertError, FilterError
from spdl_media.filter_desc import sound_ops
from spdl_media.formats import SAMPLE_DTYPES
from spdl_media.frames import AudioFrames, FrameMetadata, frame_metadata
from spdl_media.inputs import Input, Source, open_input
from spdl_media.operations import SoundOps
from spdl_media.packets import AudioPackets, PacketMetadata, av_packets, discarded_pts, metadata_of
from spdl_media.storage import Storage, lease_memory
from spdl_media.timing import Window


def convert_audio(
    items: list[AudioFrames], storage: Storage | None, *, single: bool, pad: bool
) -> CPUBuffer:
    """Copy audio frames into one array; see :func:`~spdl_media.convert_frames`."""
    check_audio(items, pad=pad)
    first = items[0]
    planar = first.sample_fmt.endswith("p")
    dtype = SAMPLE_DTYPES[first.sample_fmt.removesuffix("p")]
    length = max(map(len, items))
    one = (first.num_channels, length) if planar else (length, first.num_channels)
    array = new_array(one if single else (len(items), *one), dtype, storage)
    for part, item in zip(array.reshape(len(items), *one), items, strict=True):
        # Samples along the first axis, whichever way the array has them.
        _copy_samples(part.T if planar else part, item)
    return CPUBuffer(array)


def _copy_samples(target: Array, frames: AudioFrames) -> None:
    start = 0
    for chunk in frames.chunks:
        stop = start + len(chunk)
        planes = chunk.planes
        if planes[0].ndim == 2:
            target[start:stop] = planes[0]
        else:
            for channel, samples in enumerate(planes):
                target[start:stop, channel] = samples
        start = stop
    # Silence is half of the range in unsigned samples, and 0 in all others.
    target[start:] = 128 if target.dtype == np.uint8 else 0


def check_audio(items: list[AudioFrames], *, pad: bool) -> None:
    """Refuse sound that differs in format or, without ``pad``, in length, and sound without samples."""
    expected = None
    for position, item in enumerate(items):
        if not len(item):
            raise ConvertError(
                f"there is no sample in the window {frame_metadata(item).window}",
                source=item.source,
            )
        # A stream may change in its middle.
        for chunk in item.chunks:
            frame = chunk.frame
            found = frame.layout.nb_channels, frame.format.name, frame.sample_rate
            expected = expected or found
            if found != expected:
                raise ConvertError(
                    f"item 0 ({items[0].source}) is {_sound(expected)}, but item {position} "
                    f"({item.source}) is {_sound(found)}. One array holds one format: "
                    "get_audio_filter_desc(sample_rate=, num_channels=, sample_fmt=) converts"
                )
    lengths = [len(item) for item in items]
    if len(set(lengths)) > 1 and not pad:
        raise ConvertError(
            f"the items have different lengths: {_some(lengths)} samples. pad=True fills with silence to the "
            "longest; timestamp= and num_frames= cut"
        )


def _sound(format: tuple[int, str, int]) -> str:
    return f"{format[0]} channels {format[1]} at {format[2]} Hz"


def _some(lengths: list[int]) -> str:
    """At most eight of them, and the span of the rest."""
    shown = ", ".join(map(str, lengths[:8]))
    if len(lengths) <= 8:
        return shown
    return f"{shown}, ... ({len(lengths)} items of {min(lengths)} to {max(lengths)})"


_FLOATS = ("flt", "dbl")


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples as they were decoded, which become an array of another format without FFmpeg.

    Attributes:
        array: ``(channels, samples)`` in planar formats, ``(samples, channels)`` in packed ones.
        format: Sample format, channel layout and sample rate.
        first: Position of the first sample on the container's clock.
        wanted_fmt: The sample format that the array is to have.
    """

    array: Array
    format: tuple[str, str, int]
    first: int
    wanted_fmt: str

    @property
    def by_time(self) -> Array:
        """The samples along the first axis, whichever way the array has them."""
        return self.array.T if self.format[0].endswith("p") else self.array

    @property
    def sample_rate(self) -> int:
        """Samples of one channel in a second."""
        return self.format[2]

    @property
    def timestamp(self) -> float:
        """Seconds on the container's clock at which the first sample stands."""
        return self.first / self.format[2]

    def convert(self, storage: Storage | None) -> CPUBuffer:
        """Make the array that was asked for, with the very numbers that FFmpeg would give."""
        if self.wanted_fmt == self.format[0] and storage is None and self.array.flags.c_contiguous:
            return CPUBuffer(self.array)
        planar, source = self.wanted_fmt.endswith("p"), self.by_time
        source = source.T if planar else source
        array = new_array(source.shape, SAMPLE_DTYPES[self.wanted_fmt.removesuffix("p")], storage)
        _copy_numbers(source, array)
        return CPUBuffer(array)


def _copy_numbers(source: Array, target: Array) -> None:
    if source.dtype.kind == target.dtype.kind:
        target[...] = source
    elif source.dtype == np.uint8:
        np.subtract(source, 128, out=target, dtype=target.dtype, casting="unsafe")
        target *= 2.0**-7
    else:
        # A power of two, so the number is rounded once, as it becomes a float.
        scale = target.dtype.type(2.0 ** (1 - 8 * source.itemsize))
        np.multiply(source, scale, out=target, dtype=target.dtype, casting="unsafe")


def decode_samples(
    packets: AudioPackets,
    desc: str | None,
    decode_config: DecodeConfig | None = None,
    *,
    num_frames: int | None = None,
) -> Samples | AudioFrames:
    """Decode packets for one array; what :func:`~spdl_media.decode_packets` gives makes the same one.

    Args:
        packets: What to decode.
        desc: The filter graph; ``None`` for none.
        decode_config: How to decode.
        num_frames: At most so many samples of each channel.
    """
    ops = _plain_ops(desc, num_frames)
    if ops is not None:
        rows = _decode_rows(packets, as_decode_config(decode_config), num_frames)
        if rows is not None:
            return _as_wanted(rows, metadata_of(packets), desc, ops)
    return decode_packets(packets, desc, decode_config, num_frames=num_frames)


def load_samples(
    src: Source,
    window: Window,
    desc: str | None,
    *,
    stream_index: int | None,
    num_frames: int | None,
    demux_config: DemuxConfig | None,
    decode_config: DecodeConfig | None,
    name: str | None,
) -> Samples | AudioFrames:
    """Read and decode audio for one array. :func:`~spdl_media.load_audio` explains the arguments."""
    with open_input(src, name=name) as input:
        if stream_index is None and demux_config is None:
            samples = _wav_samples(input, window, desc, decode_config, num_frames)
            if samples is not None:
                return samples
        with Demuxer(input, demux_config=demux_config) as demuxer:
            packets = demuxer.demux_audio(window, stream_index=stream_index)
    return decode_samples(packets, desc, decode_config, num_frames=num_frames)


def _wav_samples(
    input: Input,
    window: Window,
    desc: str | None,
    decode_config: DecodeConfig | None,
    num_frames: int | None,
) -> Samples | AudioFrames | None:
    """The samples of a WAV file, without FFmpeg's demuxer, which looks at many packets first.

    Args:
        input: The opened source, of any kind.
        window: Which samples.
        desc: The filter graph; ``None`` for none.
        decode_config: How to decode.
        num_frames: At most so many samples of each channel.

    Returns:
        ``None`` where FFmpeg is needed, or an error is due.
    """
    config, ops = as_decode_config(decode_config), _plain_ops(desc, num_frames)
    if ops is None or config.decoder is not None or config.decoder_options:
        return None
    if num_frames is not None:
        check_int("num_frames", num_frames)
    keep_freed_memory()
    found = read_wav(input, window, num_frames)
    if found is None:
        return None
    format = found.sample_fmt, layout_name(found.channel_layout), found.sample_rate
    samples = Samples(found.array, format, found.first, found.sample_fmt)
    return _as_wanted(samples, PacketMetadata(input.name, window=window), desc, ops)


def _plain_ops(desc: str | None, num_frames: int | None) -> SoundOps | None:
    """The values of a graph that can follow when everything is decoded."""
    ops = SoundOps(sample_fmt=None) if desc is None else sound_ops(desc)
    # Filters of the caller's own may depend on where frames begin, and only the graph knows how many samples
    # of one rate make so many of another.
    if (
        ops is None
        or (ops.window, ops.num_frames, ops.filter_desc) != (Window(), None, None)
        or (num_frames is not None and ops.sample_rate is not None)
    ):
        return None
    return ops


def _decode_rows(
    packets: AudioPackets, config: DecodeConfig, num_frames: int | None
) -> Samples | None:
    """Decode packets straight to one array; ``None``: there are no samples, or their format changes."""
    if num_frames is not None:
        check_int("num_frames", num_frames)
    keep_freed_memory()
    coded, metadata = av_packets(packets), metadata_of(packets)
    missing = cut_short_error(packets, config)
    if missing is not None and num_frames is None:
        raise missing
    rows = SampleRows(lambda size: lease_memory(size, None), _end_of(packets), num_frames)
    decoder = SampleDecoder(packets.codec, metadata, config, discarded_pts(packets))
    try:
        decoder.decode((*coded, None) if coded else (), rows.put)
    finally:
        decoder.close()
    if rows.mixed or rows.format is None:
        return None
    if missing is not None and rows.count < (num_frames or 0):
        raise missing
    return Samples(rows.array(), rows.format, rows.first, rows.format[0])


def _end_of(packets: AudioPackets) -> Fraction:
    """Where packets state that their last sample stands, or where their window ends."""
    metadata, last = metadata_of(packets), (av_packets(packets) or (None,))[-1]
    if last is None or last.pts is None:
        return metadata.window.end or Fraction(0)
    stated = (last.pts + (last.duration or 0)) * packets.codec.time_base - metadata.zero
    return stated if metadata.window.end is None else min(stated, metadata.window.end)


def _as_wanted(
    samples: Samples, metadata: PacketMetadata, desc: str | None, ops: SoundOps
) -> Samples | AudioFrames:
    """The samples, if NumPy can make of them what is wanted, or else what a graph makes of them."""
    name, layout, own_rate = samples.format
    wanted = ops.sample_fmt or name
    packed, into = name.removesuffix("p"), wanted.removesuffix("p")
    if desc is None or (
        ops.sample_rate in (None, own_rate)
        and ops.num_channels in (None, _usual_channels(layout))
        and (packed == into or into in _FLOATS)
    ):
        return replace(samples, wanted_fmt=wanted)
    try:
        chunks = filter_samples(samples.by_time, samples.format, samples.first, metadata.zero, desc)
    except FilterError as error:  # the graph does not know whose samples it was given
        error.source = error.source or metadata.source
        raise
    return AudioFrames(chunks, FrameMetadata(metadata.source, metadata.zero, metadata.window))


@cache
def _usual_channels(layout: str) -> int | None:
    """How many channels stand for this layout, where it is the usual one of so many, or says no more."""
    count = num_channels(layout)
    return count if layout in (layout_name(f"{count}c"), f"{count} channels") else None
