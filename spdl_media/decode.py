"""From packets to frames: a whole window at once, or a stream in chunks of exact length."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from enum import Enum
from typing import Final, Generic, TypeVar, overload

import av

from spdl_media._backends._pyav import AvPacket
from spdl_media.codec import AudioCodec, Codec, VideoCodec
from spdl_media.config import DecodeConfig
from spdl_media.config import decode_config as _decode_config
from spdl_media.decode_path import PicturePath, SamplePath, without_damage_check
from spdl_media.errors import DecodeError, FilterError
from spdl_media.filter_desc import get_audio_filter_desc, get_video_filter_desc
from spdl_media.frames import (
    AudioChunk,
    AudioFrames,
    Frames,
    ImageFrames,
    VideoFrames,
    cut_chunks,
)
from spdl_media.one_thread import OneThread
from spdl_media.packets import (
    AudioPackets,
    ImagePackets,
    PacketFacts,
    Packets,
    VideoPackets,
    av_packets,
    discarded_pts,
    facts_of,
)

__all__ = ("AudioDecoder", "VideoDecoder", "decode_packets")


class Default(Enum):
    """Stands for an argument that was not given, where ``None`` means something else."""

    FILTER = "the default filter"

    def __repr__(self) -> str:
        return f"<{self.value}>"


DEFAULT_FILTER: Final = Default.FILTER


@overload
def decode_packets(  # type: ignore[overload-overlap]  # ImagePackets are VideoPackets, and come first
    packets: ImagePackets,
    filter_desc: str | Default | None = ...,
    decode_config: DecodeConfig | None = ...,
    *,
    num_frames: int | None = ...,
) -> ImageFrames: ...
@overload
def decode_packets(
    packets: VideoPackets,
    filter_desc: str | Default | None = ...,
    decode_config: DecodeConfig | None = ...,
    *,
    num_frames: int | None = ...,
) -> VideoFrames: ...
@overload
def decode_packets(
    packets: AudioPackets,
    filter_desc: str | Default | None = ...,
    decode_config: DecodeConfig | None = ...,
    *,
    num_frames: int | None = ...,
) -> AudioFrames: ...
def decode_packets(
    packets: Packets,
    filter_desc: str | Default | None = DEFAULT_FILTER,
    decode_config: DecodeConfig | None = None,
    *,
    num_frames: int | None = None,
) -> Frames:
    """Decode packets, cut the result to their window, turn pictures upright, and filter them.

    The packets are not consumed; they can be decoded again, in other threads at the same time too.

    Args:
        packets: From ``demux_*``. Chunks of a stream go to :class:`VideoDecoder` and
            :class:`AudioDecoder`, unless each starts with a key frame.
        filter_desc: FFmpeg filter graph with one input and one output, such as
            :func:`~spdl_media.get_video_filter_desc` writes. The default gives ``rgb24`` pictures and
            ``fltp`` samples. ``None`` keeps what the decoder gives, neither turned nor converted.
        decode_config: How to decode; see :func:`~spdl_media.decode_config`.
        num_frames: At most this many frames (samples, for audio) come out, and no more than they need
            is decoded. ``None``: all.

    Returns:
        ``ImageFrames``, ``VideoFrames`` or ``AudioFrames``, as the packets are. A window in which nothing
        lies gives empty frames. For video these are exactly the frames with ``start <= t < end``; for audio
        the samples ``ceil(start * rate)`` up to ``ceil(end * rate)``.

    Raises:
        DecodeError: The data is damaged, or this FFmpeg has no decoder for it.
        FilterError: The filter graph cannot be used.
        ValueError: A decoder or option of ``decode_config`` does not exist.

    Thread safety: safe.

    See:
        FFmpeg's filters: https://ffmpeg.org/ffmpeg-filters.html
    """
    config = decode_config or _decode_config()
    if num_frames is not None:
        _check_positive("num_frames", num_frames)
    try:
        if isinstance(packets, ImagePackets):
            return _decode_image(packets, _picture_filter(filter_desc), config)
        if isinstance(packets, VideoPackets):
            return _decode_video(packets, _picture_filter(filter_desc), config, num_frames)
        if isinstance(packets, AudioPackets):
            return _decode_audio(packets, _sample_filter(filter_desc), config, num_frames)
    except FilterError as error:  # the graph does not know whose frames it was given
        error.source = error.source or packets.source
        raise
    raise TypeError(
        f"decode_packets takes AudioPackets, VideoPackets or ImagePackets, not {type(packets).__name__}"
    )


def _picture_filter(filter_desc: str | Default | None) -> str | None:
    return get_video_filter_desc() if isinstance(filter_desc, Default) else filter_desc


def _sample_filter(filter_desc: str | Default | None) -> str | None:
    return get_audio_filter_desc() if isinstance(filter_desc, Default) else filter_desc


def _check_positive(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, not {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, not {value}")


def _decode_image(
    packets: ImagePackets, filter_desc: str | None, config: DecodeConfig
) -> ImageFrames:
    facts = facts_of(packets)
    # There is one picture, or an error: what is dropped or kept without a frame would lose its reason.
    strict = replace(config, on_corrupt="raise")
    if config.on_corrupt != "keep":
        if facts.incomplete:
            raise _cut_short(facts, packets.codec)
        return _picture(packets, filter_desc, strict)
    try:
        whole = _picture(packets, filter_desc, strict)
    except DecodeError as error:
        try:
            return _picture(packets, filter_desc, without_damage_check(config), is_corrupt=True)
        except DecodeError:  # there is nothing to keep
            raise error from error.__cause__
    return whole if not facts.incomplete else whole.marked_corrupt()


def _cut_short(facts: PacketFacts, codec: Codec) -> DecodeError:
    return DecodeError(
        f"the {codec.name} data is cut short: {facts.incomplete}. decode_config(on_corrupt='keep') "
        "decodes what is there, as far as the decoder can",
        source=facts.source,
    )


def _cut_short_error(packets: Packets, config: DecodeConfig) -> DecodeError | None:
    facts = facts_of(packets)
    if facts.incomplete is None or config.on_corrupt != "raise":
        return None
    return _cut_short(facts, packets.codec)


def _picture(
    packets: ImagePackets,
    filter_desc: str | None,
    config: DecodeConfig,
    *,
    is_corrupt: bool = False,
) -> ImageFrames:
    path = PicturePath(packets.codec, facts_of(packets), filter_desc, config)
    try:
        frame = next(path.push((*av_packets(packets), None)), None)
    finally:
        path.close()
    if frame is None:
        raise DecodeError(
            f"the {packets.codec.name} data holds no picture that can be decoded",
            source=packets.source,
        )
    return ImageFrames((frame,), replace(path.facts(), is_corrupt=is_corrupt))


def _decode_video(
    packets: VideoPackets,
    filter_desc: str | None,
    config: DecodeConfig,
    num_frames: int | None,
) -> VideoFrames:
    facts, coded = facts_of(packets), av_packets(packets)
    cut_short = _cut_short_error(packets, config)
    if cut_short is not None and num_frames is None:
        raise cut_short
    if facts.continues and coded and not coded[0].is_keyframe:
        raise DecodeError(
            "these packets continue a stream and do not start with a key frame, so they cannot be decoded "
            "alone. Give the chunks of a stream, in order, to one VideoDecoder",
            source=facts.source,
        )
    path = PicturePath(packets.codec, facts, filter_desc, config)
    path.decoder.discarded = discarded_pts(packets)
    # A stream without any key frame is one that refreshes bit by bit; its decoder knows what to do.
    path.decoder.needs_key = any(packet.is_keyframe for packet in coded)
    frames: list[av.VideoFrame] = []
    try:
        for frame in path.push((*coded, None) if coded else ()):
            frames.append(frame)
            if len(frames) == num_frames:
                break
    finally:
        path.close()
    if cut_short is not None and len(frames) != num_frames:
        raise cut_short
    return VideoFrames(frames, path.facts())


def _decode_audio(
    packets: AudioPackets,
    filter_desc: str | None,
    config: DecodeConfig,
    num_frames: int | None,
) -> AudioFrames:
    coded = av_packets(packets)
    cut_short = _cut_short_error(packets, config)
    if cut_short is not None and num_frames is None:
        raise cut_short
    path = SamplePath(packets.codec, facts_of(packets), filter_desc, config)
    path.decoder.discarded = discarded_pts(packets)
    chunks: list[AudioChunk] = []
    first_sample, count = 0, 0
    try:
        for position, chunk in path.push((*coded, None) if coded else ()):
            if not chunks:
                first_sample = position
            chunks.append(chunk)
            count += len(chunk)
            if num_frames is not None and count >= num_frames:
                chunks = list(cut_chunks(chunks, 0, num_frames))
                break
    finally:
        path.close()
    if cut_short is not None and (num_frames is None or count < num_frames):
        raise cut_short
    return AudioFrames(chunks, path.facts(), first_sample=first_sample)


P = TypeVar("P", VideoPackets, AudioPackets)
F = TypeVar("F", VideoFrames, AudioFrames)


class _Decoder(Generic[P, F]):
    """What the streaming decoders share: packets wait until their frames are asked for."""

    _takes: type[P]

    def __init__(self, decode_config: DecodeConfig | None, num_frames: int | None) -> None:
        if num_frames is not None:
            _check_positive("num_frames", num_frames)
        self._guard = OneThread(type(self).__name__)
        self._config = decode_config or _decode_config()
        self._num_frames = num_frames
        self._waiting: deque[tuple[P | None, AvPacket | None]] = deque()
        self._flushed = False
        self._cut_short: DecodeError | None = None

    def decode(self, packets: P) -> Iterator[F]:
        """Frames of these packets and those before them, in chunks of exactly ``num_frames``.

        The packets are taken at once; what an unfinished iteration leaves comes with the next call.

        Raises:
            DecodeError: The data is damaged.
            FilterError: The filter graph cannot be used.
        """
        with self._guard:
            if not isinstance(packets, self._takes):
                raise TypeError(
                    f"{type(self).__name__} decodes {self._takes.__name__}, "
                    f"not {type(packets).__name__}"
                )
            # The packets themselves stand before what they hold, so that their window and clock count from
            # there on, and not for what still waits.
            self._waiting.append((packets, None))
            self._waiting.extend((None, packet) for packet in av_packets(packets))
            self._cut_short = _cut_short_error(packets, self._config)
        return self._chunks(flush=False)

    def flush(self) -> Iterator[F]:
        """What is left at the end of the stream, the last chunk shorter; then another can start.

        Raises:
            DecodeError: The data is damaged, or, when all frames are out, the file was cut short.
            FilterError: The filter graph cannot be used.
        """
        return self._chunks(flush=True)

    def _chunks(self, *, flush: bool) -> Iterator[F]:
        while True:
            with self._guard:
                self._fill(flush=flush)
                count = self._count()
                size = count if self._num_frames is None else self._num_frames
                if count == 0 or (count < size and not flush):
                    if flush:
                        self._restart()
                        self._raise_cut_short()
                    return
                chunk = self._cut(min(size, count))
            yield chunk

    def _fill(self, *, flush: bool) -> None:
        while self._num_frames is None or self._count() < self._num_frames:
            if self._waiting:
                packets, packet = self._waiting.popleft()
                if packets is None:
                    self._push(packet)
                else:
                    self._accept(packets)
            elif flush and not self._flushed:
                self._flushed = True
                self._push(None)
            else:
                return

    def _raise_cut_short(self) -> None:
        error, self._cut_short = self._cut_short, None
        if error is not None:
            raise error

    def _accept(self, packets: P) -> None:
        """What follows belongs to these packets."""
        raise NotImplementedError

    def _push(self, packet: AvPacket | None) -> None:
        raise NotImplementedError

    def _count(self) -> int:
        raise NotImplementedError

    def _cut(self, size: int) -> F:
        raise NotImplementedError

    def _restart(self) -> None:
        self._flushed = False


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

    Thread safety: one thread at a time; a second one gets a RuntimeError.

    Example::

        decoder = VideoDecoder(demuxer.video_codec, num_frames=32)
        for packets in demuxer.streaming_demux(duration=10):
            for frames in decoder.decode(packets):
                ...  # exactly 32 frames
        for frames in decoder.flush():
            ...  # the rest
    """

    def __init__(
        self,
        codec: VideoCodec,
        *,
        filter_desc: str | Default | None = DEFAULT_FILTER,
        decode_config: DecodeConfig | None = None,
        num_frames: int | None = None,
    ) -> None:
        if not isinstance(codec, VideoCodec):
            raise TypeError(f"VideoDecoder takes the codec of video packets, not {codec!r}")
        super().__init__(decode_config, num_frames)
        self._takes = VideoPackets
        self._codec = codec
        self._filter_desc = _picture_filter(filter_desc)
        self._ready: list[av.VideoFrame] = []
        self._path = self._new_path()

    def _new_path(self) -> PicturePath:
        return PicturePath(self._codec, PacketFacts(), self._filter_desc, self._config)

    def _accept(self, packets: VideoPackets) -> None:
        decoder, facts = self._path.decoder, facts_of(packets)
        if not facts.continues:
            # They do not follow on what came before (a window of its own, say): the frames that the decoder
            # holds back have to come out first, and none of them is a reference for what comes.
            self._ready.extend(self._path.drain())
        decoder.facts = facts
        if decoder.orientation == 1:
            decoder.orientation = facts.orientation
        decoder.discarded |= discarded_pts(packets)

    def _push(self, packet: AvPacket | None) -> None:
        self._ready.extend(self._path.push((packet,)))

    def _count(self) -> int:
        return len(self._ready)

    def _cut(self, size: int) -> VideoFrames:
        frames = VideoFrames(self._ready[:size], self._path.facts())
        del self._ready[:size]
        return frames

    def _restart(self) -> None:
        super()._restart()
        self._path.close()
        self._path = self._new_path()


class AudioDecoder(_Decoder[AudioPackets, AudioFrames]):
    """Decodes an audio stream chunk by chunk, for streams too long to hold.

    Args:
        codec: ``packets.codec`` of the stream.
        filter_desc: As for :func:`decode_packets`. One graph serves the whole stream.
        decode_config: As for :func:`decode_packets`.
        num_frames: Samples of each chunk that comes out. ``None``: as many as each call has ready.

    Raises:
        DecodeError: This FFmpeg has no decoder for the codec.

    Thread safety: one thread at a time; a second one gets a RuntimeError.
    """

    def __init__(
        self,
        codec: AudioCodec,
        *,
        filter_desc: str | Default | None = DEFAULT_FILTER,
        decode_config: DecodeConfig | None = None,
        num_frames: int | None = None,
    ) -> None:
        if not isinstance(codec, AudioCodec):
            raise TypeError(f"AudioDecoder takes the codec of audio packets, not {codec!r}")
        super().__init__(decode_config, num_frames)
        self._takes = AudioPackets
        self._codec = codec
        self._filter_desc = _sample_filter(filter_desc)
        self._ready: list[AudioChunk] = []
        self._first_sample = 0
        self._path = self._new_path()

    def _new_path(self) -> SamplePath:
        return SamplePath(self._codec, PacketFacts(), self._filter_desc, self._config)

    def _accept(self, packets: AudioPackets) -> None:
        self._path.decoder.facts = facts_of(packets)
        self._path.decoder.discarded |= discarded_pts(packets)

    def _push(self, packet: AvPacket | None) -> None:
        for position, chunk in self._path.push((packet,)):
            if not self._ready:
                self._first_sample = position
            self._ready.append(chunk)

    def _count(self) -> int:
        return sum(len(chunk) for chunk in self._ready)

    def _cut(self, size: int) -> AudioFrames:
        taken = list(cut_chunks(self._ready, 0, size))
        frames = AudioFrames(taken, self._path.facts(), first_sample=self._first_sample)
        self._ready = list(cut_chunks(self._ready, size, None))
        self._first_sample += len(frames)
        return frames

    def _restart(self) -> None:
        super()._restart()
        self._path.close()
        self._path = self._new_path()
