"""Frames by number out of packets, by SPDL's name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from spdl_media._ffmpeg import ffmpeg_log
from spdl_media._frame_decoder import FrameDecoder
from spdl_media._frame_index import FrameIndex, empty_index, frame_numbers, make_index
from spdl_media._packet_table import read_table
from spdl_media.config import DecodeConfig, as_decode_config
from spdl_media.decode import DEFAULT_FILTER, Default, decode_packets, naming, picture_filter
from spdl_media.errors import DecodeError
from spdl_media.image_frames import ImageFrames
from spdl_media.packets import (
    PacketMetadata,
    VideoPackets,
    av_packets,
    discarded_pts,
    metadata_of,
)
from spdl_media.timing import Window

__all__ = ("sample_decode_video",)


def sample_decode_video(
    packets: VideoPackets,
    indices: Iterable[int],
    *,
    decode_config: DecodeConfig | None = None,
    filter_desc: str | Default | None = DEFAULT_FILTER,
) -> list[ImageFrames]:
    """Decode some frames of packets: those that ``decode_packets(packets)[indices]`` gives.

    What the frames do not need is not decoded. :class:`VideoFile` does not even read it.

    Args:
        packets: From :func:`~spdl_media.demux_video`. They are not consumed.
        indices: Numbers of frames in the window of the packets, in any order, with repeats; negative ones
            count from the end.
        decode_config: How to decode. ``on_corrupt="drop"`` is none of it, because frames are numbered.
        filter_desc: As for :func:`~spdl_media.decode_packets`; it must give one frame for each.

    Raises:
        IndexError: There is no such frame.
        DecodeError: A frame is damaged or missing, or no decoder takes the packets.
        FilterError: The filters cannot be used, or give more or fewer frames than they take.
        ValueError: An option is invalid.
        TypeError: ``packets`` are no packets of a video, or an index is no number.

    Thread safety: safe.
    """
    if not isinstance(packets, VideoPackets):
        raise TypeError(f"sample_decode_video takes VideoPackets, not {type(packets).__name__}")
    config = as_decode_config(decode_config)
    if config.on_corrupt == "drop":
        raise ValueError(
            "decode_config(on_corrupt='drop') leaves frames out, and they are numbered here"
        )
    metadata, coded = metadata_of(packets), av_packets(packets)
    if metadata.pillow is not None:
        frames = decode_packets(packets, filter_desc, config)
        return list(frames[frame_numbers(indices, len(frames), packets.source)])
    if metadata.continues and coded and not coded[0].is_keyframe:
        raise DecodeError(
            "these packets continue a stream and do not start with a key frame, so they cannot be decoded "
            "alone",
            source=packets.source,
        )
    index = _index_of(packets, config)
    first, stop = metadata.window.ticks(packets.time_base, metadata.zero)
    low = 0 if first is None else int(np.searchsorted(index.pts, first))
    high = len(index) if stop is None else int(np.searchsorted(index.pts, stop))
    numbers = [low + one for one in frame_numbers(indices, high - low, packets.source)]
    decoder = FrameDecoder(
        packets.codec, _whole(packets), index, config, lambda number: coded[number:]
    )
    with naming(packets.source), ffmpeg_log():
        return list(decoder.frames(numbers, picture_filter(filter_desc)))


def _whole(packets: VideoPackets) -> PacketMetadata:
    """Metadata for a decoder that cuts to no window, because numbers have chosen the frames."""
    return replace(metadata_of(packets), window=Window())


def _index_of(packets: VideoPackets, config: DecodeConfig) -> FrameIndex:
    coded, codec = av_packets(packets), packets.codec
    table = read_table(codec, coded)
    if not len(table):
        return empty_index()
    # The mark of what an edit list hides does not travel to other processes with the packets.
    hidden = np.isin(table.pts, list(discarded_pts(packets)))
    table = replace(table, is_shown=table.is_shown & ~hidden)
    # Where units stand behind their lengths, they come from a container whose packets are frames.
    is_cut = codec.name == "h264" and (codec.extradata or b"")[:1] != b"\1"
    format = "h264" if is_cut else ""
    return make_index(table, codec, _whole(packets), config, format, lambda: coded)
