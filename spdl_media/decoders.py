"""From packets to frames: chunk by chunk, for streams too long to hold, and single ones by number."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np

from spdl_media._checks import OneThread, check_int
from spdl_media._ffmpeg import AvPacket, ffmpeg_log
from spdl_media._picture_decoder import FrameList, PicturePath
from spdl_media._sample_decoder import SampleChunks, SampleDecoder
from spdl_media.codec import AudioCodec, Codec, VideoCodec
from spdl_media.config import DecodeConfig, as_decode_config
from spdl_media.decode import (
    DEFAULT_FILTER,
    Default,
    check_start,
    decode_packets,
    picture_filter,
    sample_filter,
)
from spdl_media.errors import DecodeError
from spdl_media.filters import naming
from spdl_media.frame_decoder import FrameDecoder
from spdl_media.frame_index import make_index
from spdl_media.frames import AudioFrames
from spdl_media.image_frames import ImageFrames, VideoFrames, frame_numbers
from spdl_media.packet_table import read_table
from spdl_media.packets import (
    AudioPackets,
    PacketMetadata,
    VideoPackets,
    av_packets,
    cut_short_error,
    discarded_pts,
    metadata_of,
)
from spdl_media.timing import Window

__all__ = ("AudioDecoder", "VideoDecoder", "sample_decode_video")

P = TypeVar("P", VideoPackets, AudioPackets)
F = TypeVar("F", VideoFrames, AudioFrames)


class _Decoder(Generic[P, F]):
    """Base of the streaming decoders: packets wait until their frames are asked for."""

    _kind: str
    _codecs: type[Codec]
    _takes: type[P]
    _gives: type[F]
    _filter: Callable[[str | Default | None], Any]
    _flushed = False
    # It decodes, and is closed and made anew at the end of a stream.
    _decoder: Any
    # What has come out, and is not cut off yet.
    _ready: Any

    def __init__(
        self,
        codec: Codec,
        *,
        filter_desc: str | Default | None = DEFAULT_FILTER,
        decode_config: DecodeConfig | None = None,
        num_frames: int | None = None,
    ) -> None:
        if not isinstance(codec, self._codecs):
            name = type(self).__name__
            raise TypeError(f"{name} takes the codec of {self._kind} packets, not {codec!r}")
        self._codec: Any = codec
        self._num_frames = None if num_frames is None else check_int("num_frames", num_frames)
        self._guard = OneThread(type(self).__name__)
        self._config = as_decode_config(decode_config)
        self._filter_desc = self._filter(filter_desc)
        # Steps that are due when frames are asked for.
        self._waiting: deque[Callable[[], None]] = deque()
        self._cut_short: DecodeError | None = None
        self._start()

    def decode(self, packets: P) -> Iterator[F]:
        """Frames of these packets and those before them, in chunks of exactly ``num_frames``.

        The packets are taken at once; what an unfinished iteration leaves comes with the next call.

        Raises:
            TypeError: The packets are of another kind.
            ValueError: The packets are of another codec.
            DecodeError: The data is damaged.
            FilterError: The filter graph cannot be used.
            RuntimeError: Another thread is inside.
        """
        with self._guard:
            if not isinstance(packets, self._takes):
                raise TypeError(
                    f"{type(self).__name__} decodes {self._takes.__name__}, "
                    f"not {type(packets).__name__}"
                )
            if _stream_key(packets.codec) != _stream_key(self._codec):
                raise ValueError(
                    f"this {type(self).__name__} was made for {_stream_key(self._codec)}, but the "
                    f"packets are {_stream_key(packets.codec)}; make one from packets.codec"
                )
            # Their window and clock count from here on, and not for what still waits.
            self._waiting.append(partial(self._accept, packets))
            self._waiting.extend(partial(self._push, packet) for packet in av_packets(packets))
            # Raised when all frames that there are have come out.
            self._cut_short = cut_short_error(packets, self._config)
        return self._chunks(flush=False)

    def flush(self) -> Iterator[F]:
        """Give the rest at the end of the stream, the last chunk shorter; then another can start.

        Raises:
            DecodeError: The data is damaged, or, when all frames are out, the file was cut short.
            FilterError: The filter graph cannot be used.
            RuntimeError: Another thread is inside.
        """
        return self._chunks(flush=True)

    def _chunks(self, *, flush: bool) -> Iterator[F]:
        while True:
            with self._guard:
                with ffmpeg_log():  # one for all packets; see current_log
                    self._fill(flush=flush)
                count = self._ready.count
                size = count if self._num_frames is None else self._num_frames
                # An unfinished chunk waits for more packets, or for the flush.
                if count == 0 or (count < size and not flush):
                    if flush:
                        self._restart()
                        error, self._cut_short = self._cut_short, None
                        if error is not None:
                            raise error
                    return
                chunk = self._cut(min(size, count))
            # Without the guard: the caller works on the chunk for as long as it likes.
            yield chunk

    def _fill(self, *, flush: bool) -> None:
        while self._num_frames is None or self._ready.count < self._num_frames:
            if self._waiting:
                self._waiting.popleft()()
            elif flush and not self._flushed:
                self._flushed = True
                # None drains the decoder and the filters.
                self._push(None)
            else:
                return

    def _accept(self, packets: P) -> None:
        """Take the metadata of packets whose data follow."""
        raise NotImplementedError

    def _push(self, packet: AvPacket | None) -> None:
        raise NotImplementedError

    def _cut(self, size: int) -> F:
        return self._gives(self._ready.take(size), self._decoder.take_metadata())

    def _start(self) -> None:
        """Open a decoder and filters for a stream."""
        raise NotImplementedError

    def _restart(self) -> None:
        # Filters that were flushed take no more frames, so the next stream gets new ones.
        self._decoder.close()
        self._flushed = False
        self._start()


def _stream_key(codec: Codec) -> str:
    """Describe what a decoder cannot change in mid-stream."""
    if isinstance(codec, VideoCodec):
        return codec.name
    return f"{codec.name} at {codec.sample_rate} Hz with {codec.num_channels} channels"


class VideoDecoder(_Decoder[VideoPackets, VideoFrames]):
    """Decodes a video stream chunk by chunk, for streams too long to hold.

    Chunks of ``streaming_demux`` and slices continue each other. Other packets, such as those of a window,
    start anew: all frames of those before them come out first.

    Args:
        codec: ``packets.codec`` of the stream.
        filter_desc: As for :func:`decode_packets`. One graph serves the whole stream.
        decode_config: As for :func:`decode_packets`.
        num_frames: Frames of each chunk that comes out. ``None``: as many as each call has ready.

    Raises:
        DecodeError: This FFmpeg has no decoder for the codec.
        ValueError: A decoder or option of ``decode_config`` does not exist, or ``num_frames`` is below 1.

    Thread safety: one thread at a time; a second one gets a RuntimeError.

    Example::

        decoder = VideoDecoder(demuxer.video_codec, num_frames=32)
        for packets in demuxer.streaming_demux(duration=10):
            for frames in decoder.decode(packets):
                ...  # exactly 32 frames
        for frames in decoder.flush():
            ...  # the rest
    """

    _kind, _codecs, _takes, _gives = "video", VideoCodec, VideoPackets, VideoFrames
    _filter = staticmethod(picture_filter)

    def _start(self) -> None:
        self._decoder = self._new_path()
        self._ready = FrameList()

    def _new_path(self) -> PicturePath:
        return PicturePath(self._codec, PacketMetadata(), self._filter_desc, self._config)

    def _accept(self, packets: VideoPackets) -> None:
        self._decoder.follow(metadata_of(packets), discarded_pts(packets), self._ready)

    def _push(self, packet: AvPacket | None) -> None:
        self._decoder.push(packet, self._ready)


class AudioDecoder(_Decoder[AudioPackets, AudioFrames]):
    """Decodes an audio stream chunk by chunk, for streams too long to hold.

    Chunks of ``streaming_demux`` and slices continue each other. Other packets, such as those of a window,
    start anew: all samples of those before them come out first.

    Args:
        codec: ``packets.codec`` of the stream.
        filter_desc: As for :func:`decode_packets`. One graph serves the whole stream.
        decode_config: As for :func:`decode_packets`.
        num_frames: Samples of each chunk that comes out. ``None``: as many as each call has ready.

    Raises:
        DecodeError: This FFmpeg has no decoder for the codec.
        ValueError: A decoder or option of ``decode_config`` does not exist, or ``num_frames`` is below 1.

    Thread safety: one thread at a time; a second one gets a RuntimeError.
    """

    _kind, _codecs, _takes, _gives = "audio", AudioCodec, AudioPackets, AudioFrames
    _filter = staticmethod(sample_filter)

    def _start(self) -> None:
        self._decoder = SampleDecoder(self._codec, PacketMetadata(), self._config)
        self._ready = SampleChunks(self._codec, PacketMetadata().zero, self._filter_desc)

    def _accept(self, packets: AudioPackets) -> None:
        metadata = metadata_of(packets)
        if not metadata.continues and self._decoder.has_started:
            # They do not follow on what came before: what is held back comes out first, and nothing of
            # it is left in the decoder for what comes.
            self._push(None)
            ready, dropped = self._ready, self._decoder.num_dropped
            self._restart()
            self._decoder.num_dropped = dropped
            self._ready.chunks, self._ready.count = ready.chunks, ready.count
        self._decoder.follow(metadata, discarded_pts(packets))
        self._ready.zero = metadata.zero

    def _push(self, packet: AvPacket | None) -> None:
        self._decoder.decode((packet,), self._ready.put)
        if packet is None:
            self._ready.flush()


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
    check_start(packets)
    # No decoder cuts to the window, because numbers have chosen the frames.
    whole = replace(metadata, window=Window())
    codec, table = packets.codec, read_table(packets.codec, coded)
    # The mark of what an edit list hides does not travel to other processes with the packets.
    hidden = np.isin(table.pts, list(discarded_pts(packets)))
    table = replace(table, is_shown=table.is_shown & ~hidden)
    # Where units stand behind their lengths, they come from a container whose packets are frames.
    is_cut = codec.name == "h264" and (codec.extradata or b"")[:1] != b"\1"
    index = make_index(table, codec, whole, config, "h264" if is_cut else "", lambda: coded)
    first, stop = metadata.window.ticks(packets.time_base, metadata.zero)
    window = np.flatnonzero((index.pts >= first) & (index.pts < stop))
    numbers = window[frame_numbers(indices, len(window), packets.source)].tolist()
    decoder = FrameDecoder(codec, whole, index, config, lambda number: coded[number:])
    with naming(packets.source), ffmpeg_log():
        return list(decoder.frames(numbers, picture_filter(filter_desc)))
