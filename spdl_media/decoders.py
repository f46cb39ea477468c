"""Decode long streams chunk by chunk, and single frames of packets by index."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np

from spdl_media._checks import check_int, counted, with_argument_hints
from spdl_media._ffmpeg import AvPacket, ffmpeg_log, naming
from spdl_media._picture_decoder import PicturePath, check_start
from spdl_media._sample_decoder import SampleDecoder
from spdl_media._threads import OneThread
from spdl_media.codec import AudioCodec, Codec, VideoCodec
from spdl_media.config import DecodeConfig, as_decode_config, as_indexing_config
from spdl_media.decode import DEFAULT_FILTER, Default, decode_packets, picture_filter, sample_filter
from spdl_media.errors import DecodeError
from spdl_media.frame_decoder import FrameDecoder
from spdl_media.frame_index import make_index
from spdl_media.frames import AudioFrames, FrameList
from spdl_media.image_frames import ImageFrames, VideoFrames, frame_numbers
from spdl_media.packet_table import read_table
from spdl_media.packets import (
    AudioPackets,
    PacketMetadata,
    Packets,
    VideoPackets,
    av_packets,
    check_complete,
    discarded_pts,
    metadata_of,
    with_data,
)
from spdl_media.pillow_frames import PILLOW
from spdl_media.sample_rows import SampleChunks
from spdl_media.timing import Window

__all__ = ("AudioDecoder", "VideoDecoder", "sample_decode_video")

P = TypeVar("P", VideoPackets, AudioPackets)
F = TypeVar("F", VideoFrames, AudioFrames)


class _Decoder(Generic[P, F]):
    """Base class of the streaming decoders. Packets are queued until the caller iterates over the frames."""

    _kind: str
    _codecs: type[Codec]
    _packets_type: type[P]
    _frames_type: type[F]
    _filter: Callable[[str | Default | None], Any]
    # Uses the metadata of the next packets.
    _accept: Callable[[Any], None]
    # Opens a decoder and filters for a stream.
    _start: Callable[[], None]
    # Opens another decoder and filters. Frames that are ready remain.
    _reopen: Callable[[], None]
    _flushed = False
    # The decoder of one stream. It is closed and replaced at the end of the stream.
    _decoder: Any
    # Sink of decoded frames that are not yet in a chunk.
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
        # Steps of decoding that are run when the caller iterates.
        self._waiting: deque[Callable[[], None]] = deque()
        self._last: P | None = None  # without data
        self._start()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._codec.name}>"

    def decode(self, packets: Packets) -> Iterator[F]:
        """Return an iterator over the frames of these and earlier packets, in chunks of ``num_frames``.

        The packets are queued immediately. Frames that an unfinished iteration leaves come with the next
        call.

        Raises:
            TypeError: The packets are of another kind.
            ValueError: The packets are of another codec.
            DecodeError: The data is damaged.
            FilterError: The filter graph cannot be used.
            RuntimeError: Another thread is using the decoder.
        """
        with self._guard:
            if not isinstance(packets, self._packets_type):
                raise TypeError(
                    f"{type(self).__name__} decodes {self._packets_type.__name__}, "
                    f"not {type(packets).__name__}"
                )
            if _stream_key(packets.codec) != _stream_key(self._codec):
                raise ValueError(
                    f"this {type(self).__name__} was made for {_stream_key(self._codec)}, but the "
                    f"packets are {_stream_key(packets.codec)}; make one from packets.codec"
                )
            # Queued as a step, too: window and clock apply to these packets, not to those still queued.
            self._waiting.append(partial(self._accept, packets))
            self._waiting.extend(partial(self._push, packet) for packet in av_packets(packets))
            self._last = self._packets_type((), packets.codec, metadata_of(packets))
        return self._chunks(flush=False)

    def flush(self) -> Iterator[F]:
        """Return an iterator over the remaining frames of the stream; the last chunk may be shorter.

        Afterwards another stream can be decoded.

        Raises:
            DecodeError: The data is damaged, or, after all frames, the file is truncated or no packet of a
                video is a key frame.
            FilterError: The filter graph cannot be used.
            RuntimeError: Another thread is using the decoder.
        """
        return self._chunks(flush=True)

    def _chunks(self, *, flush: bool) -> Iterator[F]:
        while True:
            with self._guard:
                with ffmpeg_log():  # one block for all packets; see current_log
                    self._fill(flush=flush)
                count = self._ready.count
                size = count if self._num_frames is None else self._num_frames
                # An unfinished chunk waits for more packets, or for the flush.
                if count == 0 or (count < size and not flush):
                    if flush:
                        try:
                            self._check_end()
                        finally:
                            self._restart()
                    return
                chunk = self._cut(min(size, count))
            # Outside of the guard, because the caller may keep the iterator suspended for long.
            yield chunk

    def _fill(self, *, flush: bool) -> None:
        while self._num_frames is None or self._ready.count < self._num_frames:
            if self._waiting:
                if self._flushed:  # the caller left the last flush, or it failed
                    self._reopen()
                self._waiting.popleft()()
            elif flush and not self._flushed:
                self._flushed = True
                # None flushes the decoder and the filters.
                self._push(None)
            else:
                return

    def _push(self, packet: AvPacket | None) -> None:
        self._decoder.push(packet, self._ready)

    def _check_end(self) -> None:
        """Raise, after all frames, what is wrong with the stream as a whole."""
        last, self._last = self._last, None
        if last is not None:
            check_complete(last, self._config)

    def _cut(self, size: int) -> F:
        return self._frames_type(self._ready.take(size), self._decoder.take_metadata())

    def _restart(self) -> None:
        # Flushed filters accept no more frames, so make new ones for the next stream.
        self._flushed = False
        self._start()


def _unflagged_pts(packets: VideoPackets | AudioPackets) -> frozenset[int]:
    """Return the timestamps of hidden frames that FFmpeg does not drop, because the packets lack its flag.

    With the flag, timestamps are not used: another chunk may show frames at the same times.
    """
    is_flagged = any(packet.is_discard for packet in av_packets(packets))
    return frozenset() if is_flagged else discarded_pts(packets)


def _stream_key(codec: Codec) -> str:
    """Return the parameters that may not change within a stream, as text."""
    if isinstance(codec, VideoCodec):
        return codec.name
    return f"{codec.name} at {codec.sample_rate} Hz with {counted(codec.num_channels, 'channel')}"


# Added to the timestamp of a hidden frame, so that no frame of another chunk has the same one.
_HIDDEN_SHIFT = 1 << 41


@with_argument_hints({})
class VideoDecoder(_Decoder[VideoPackets, VideoFrames]):
    """Decodes a video stream chunk by chunk, for streams that are too long for memory.

    Chunks of ``streaming_demux``, and slices of packets, continue the packets before them. Other packets,
    such as those of a window, do not: all delayed frames of earlier packets come out before theirs.

    Args:
        codec: ``packets.codec`` of the stream.
        filter_desc: As for :func:`decode_packets`. One graph filters the whole stream.
        decode_config: As for :func:`decode_packets`.
        num_frames: Number of frames in each resulting chunk. ``None``: all that a call makes available.

    Raises:
        DecodeError: This FFmpeg has no decoder for the codec, or Pillow decodes the animation.
        ValueError: A decoder or option of ``decode_config`` does not exist, or ``num_frames`` is below 1.
        TypeError: ``codec`` is that of another kind of stream, or an argument has the wrong type.

    Thread safety: one thread at a time; a second one gets a RuntimeError.

    Example:
        >>> with sm.Demuxer("clip.mp4") as demuxer:
        ...     decoder = sm.VideoDecoder(demuxer.video_codec, num_frames=100)
        ...     for packets in demuxer.streaming_demux(duration=2):
        ...         for frames in decoder.decode(packets):
        ...             print(len(frames))
        ...     for frames in decoder.flush():
        ...         print(len(frames))
        100
        100
        100
        90
    """

    _kind, _codecs, _packets_type, _frames_type = "video", VideoCodec, VideoPackets, VideoFrames
    _filter = staticmethod(picture_filter)

    def _start(self) -> None:
        if self._codec.decoder == PILLOW:
            raise DecodeError(
                "Pillow decodes an animation whole: take decode_packets or load_video"
            )
        path = PicturePath(self._codec, PacketMetadata(), self._filter_desc, self._config)
        self._decoder, self._ready = path, FrameList()

    def _reopen(self) -> None:
        ready = self._ready
        self._restart()
        self._ready = ready

    def _accept(self, packets: VideoPackets) -> None:
        self._hidden = _unflagged_pts(packets)
        moved = frozenset(pts + _HIDDEN_SHIFT for pts in self._hidden)
        self._decoder.follow(metadata_of(packets), moved, self._ready)

    def _push(self, packet: AvPacket | None) -> None:
        decoder = self._decoder.decoder
        if packet is not None and packet.pts in self._hidden:
            if decoder.needs_key or decoder.is_lead_in(packet.pts):
                decoder.discarded |= {packet.pts}
            else:  # another chunk may show a frame at this time
                packet = with_data(packet, memoryview(packet))
                packet.pts = (packet.pts or 0) + _HIDDEN_SHIFT
        super()._push(packet)

    def _check_end(self) -> None:
        super()._check_end()
        self._decoder.decoder.check_keyed()


@with_argument_hints({"num_samples": "Use num_frames=, which counts samples"})
class AudioDecoder(_Decoder[AudioPackets, AudioFrames]):
    """Decodes an audio stream chunk by chunk, for streams that are too long for memory.

    Chunks of ``streaming_demux``, and slices of packets, continue the packets before them. Other packets,
    such as those of a window, do not: all delayed samples of earlier packets come out before theirs.

    Args:
        codec: ``packets.codec`` of the stream.
        filter_desc: As for :func:`decode_packets`. One graph filters the whole stream.
        decode_config: As for :func:`decode_packets`.
        num_frames: Number of samples in each resulting chunk. ``None``: all that a call makes available.

    Raises:
        DecodeError: This FFmpeg has no decoder for the codec.
        ValueError: A decoder or option of ``decode_config`` does not exist, or ``num_frames`` is below 1.
        TypeError: ``codec`` is that of another kind of stream, or an argument has the wrong type.

    Thread safety: one thread at a time; a second one gets a RuntimeError.
    """

    _kind, _codecs, _packets_type, _frames_type = "audio", AudioCodec, AudioPackets, AudioFrames
    _filter = staticmethod(sample_filter)

    def _start(self) -> None:
        self._decoder = SampleDecoder(self._codec, PacketMetadata(), self._config)
        self._ready = SampleChunks(self._codec, PacketMetadata().zero, self._filter_desc)

    def _reopen(self) -> None:
        ready, dropped = self._ready, self._decoder.num_dropped
        self._restart()
        self._decoder.num_dropped = dropped
        self._ready.chunks, self._ready.count = ready.chunks, ready.count

    def _accept(self, packets: AudioPackets) -> None:
        metadata = metadata_of(packets)
        if not metadata.continues and self._decoder.has_started:
            # The packets do not continue the last ones. Flush those first, then use a new decoder, which
            # keeps no state of them.
            self._push(None)
            self._reopen()
        self._decoder.follow(metadata, _unflagged_pts(packets))
        self._ready.zero = metadata.zero


def sample_decode_video(
    packets: VideoPackets,
    indices: Iterable[int],
    *,
    decode_config: DecodeConfig | None = None,
    filter_desc: str | Default | None = DEFAULT_FILTER,
) -> list[ImageFrames]:
    """Decode some frames of packets: the frames of ``decode_packets(packets)[indices]``.

    Packets that these frames do not need are not decoded. :class:`VideoFile` does not even read them.

    Args:
        packets: Packets from :func:`~spdl_media.demux_video`. They stay usable.
        indices: Indices of frames in the window of the packets, in any order, also repeated; negative ones
            count from the end.
        decode_config: Options of decoding, except ``on_corrupt="drop"``, which would change the indices.
        filter_desc: As for :func:`~spdl_media.decode_packets`; it must give one frame per input frame.

    Raises:
        IndexError: There is no frame of an index.
        DecodeError: A frame is damaged or missing, or this FFmpeg has no decoder for the packets.
        FilterError: The filters cannot be used, or do not give one frame per input frame.
        ValueError: An option is invalid.
        TypeError: ``packets`` are not those of a video, or an index is not a whole number.

    Thread safety: safe.
    """
    if not isinstance(packets, VideoPackets):
        raise TypeError(f"sample_decode_video takes VideoPackets, not {type(packets).__name__}")
    config = as_indexing_config(decode_config)
    metadata, coded = metadata_of(packets), av_packets(packets)

    def chosen_of_all() -> list[ImageFrames]:
        frames = decode_packets(packets, filter_desc, config)
        return list(frames[frame_numbers(indices, len(frames), packets.source)])

    if metadata.pillow is not None:
        return chosen_of_all()
    check_start(packets)
    # The decoder must not cut to the window, because the frames are chosen by index.
    whole = replace(metadata, window=Window())
    codec, table = packets.codec, read_table(packets.codec, coded)
    # Pickled packets have lost the flag of frames that an edit list hides, so hide them by timestamp.
    hidden = np.isin(table.pts, list(discarded_pts(packets)))
    table = replace(table, is_shown=table.is_shown & ~hidden)
    # H.264 with start codes may have a packet per field. With lengths, it comes from a container whose
    # packets are whole frames.
    is_cut = codec.name == "h264" and (codec.extradata or b"")[:1] != b"\1"
    index = make_index(table, codec, whole, config, "h264" if is_cut else "", lambda: coded)
    if index.is_counted and hidden.any():
        return chosen_of_all()  # the hidden frames were counted
    first, stop = metadata.span(packets.time_base)
    window = np.flatnonzero((index.pts >= first) & (index.pts < stop))
    numbers = window[frame_numbers(indices, len(window), packets.source)].tolist()
    decoder = FrameDecoder(codec, whole, index, config, lambda number: coded[number:])
    with naming(packets.source), ffmpeg_log():
        return list(decoder.frames(numbers, picture_filter(filter_desc)))
