"""Probe a source: container, streams, sizes, rates, durations, orientation and colour."""

from __future__ import annotations

import re
from contextlib import closing
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, TypeAlias

import av

from spdl_media._container import Container
from spdl_media._ffmpeg import as_fraction
from spdl_media.audio_arrays import WAV_HEAD_SIZE, read_wav_info
from spdl_media.audio_clock import opus_delay
from spdl_media.codec import (
    AudioCodec,
    VideoCodec,
    color_numbers,
    read_audio_codec,
    read_video_codec,
)
from spdl_media.config import DEFAULT_DEMUX_CONFIG, DemuxConfig
from spdl_media.decode import decode_packets
from spdl_media.demux import read_image, still_decoder
from spdl_media.formats import COLOR_TABLES
from spdl_media.geometry import is_mirrored, rotation, swaps_sides
from spdl_media.image_frames import av_frames
from spdl_media.inputs import Input, Source, open_input
from spdl_media.mp4_audio import itunes_edges
from spdl_media.packets import ImagePackets
from spdl_media.still_headers import StillHeader, read_still, webp_canvas
from spdl_media.stills import HEAD_SIZE, container_still, only_pillow_reads, still_codec

__all__ = ("AudioStreamInfo", "MediaInfo", "OtherStreamInfo", "VideoStreamInfo", "probe")


@dataclass(frozen=True, slots=True)
class VideoStreamInfo:
    """A video stream, or a still image.

    Attributes:
        index: Index of the stream in its container.
        codec: FFmpeg's name of the codec, such as ``"h264"``.
        width: Width of an upright frame, in pixels.
        height: Height of an upright frame, in pixels.
        pix_fmt: FFmpeg's name of the coded pixel format; ``None`` if FFmpeg has no decoder for it, or the
            header of a still does not state it.
        frame_rate: Average number of frames per second; ``None`` for a still.
        num_frames: Number of frames that the container's header states; ``None``: not stated.
        duration: Duration in seconds that the container's header states; ``None``: not stated.
        orientation: EXIF orientation of the coded frame, 1 to 8.
        rotation: Degrees clockwise, 0, 90, 180 or 270, that turn the coded frame upright.
        mirrored: Whether the coded frame must be mirrored as well to be upright.
        colorspace: FFmpeg's name of the matrix between RGB and YUV; ``None``: not stated.
        color_range: ``"tv"`` (limited), ``"pc"`` (full); ``None``: not stated.
        color_primaries: FFmpeg's name of the primaries; ``None``: not stated.
        color_trc: FFmpeg's name of the transfer function; ``None``: not stated.
    """

    index: int
    codec: str
    width: int
    height: int
    pix_fmt: str | None
    frame_rate: Fraction | None
    num_frames: int | None
    duration: float | None
    orientation: int
    rotation: int
    mirrored: bool
    colorspace: str | None
    color_range: str | None
    color_primaries: str | None
    color_trc: str | None


@dataclass(frozen=True, slots=True)
class AudioStreamInfo:
    """An audio stream.

    Attributes:
        index: Index of the stream in its container.
        codec: FFmpeg's name of the codec, such as ``"aac"``.
        sample_rate: Samples per second and channel, in Hz.
        num_channels: Number of channels.
        channel_layout: FFmpeg's name of the channel layout.
        sample_fmt: FFmpeg's name of the sample format that the decoder gives; ``None``: not known.
        duration: Duration in seconds that the container's header states; ``None``: not stated.
    """

    index: int
    codec: str
    sample_rate: int
    num_channels: int
    channel_layout: str
    sample_fmt: str | None
    duration: float | None


@dataclass(frozen=True, slots=True)
class OtherStreamInfo:
    """A stream of subtitles, data or an attachment, or one that this FFmpeg cannot decode.

    Attributes:
        index: Index of the stream in its container.
        kind: ``"subtitle"``, ``"data"``, ``"attachment"``, ``"video"``, ``"audio"`` or
            ``"unknown"``.
        codec: FFmpeg's name of the codec, such as ``"mov_text"``; ``None`` if this FFmpeg cannot decode it.
    """

    index: int
    kind: str
    codec: str | None = None


StreamInfo: TypeAlias = VideoStreamInfo | AudioStreamInfo | OtherStreamInfo


@dataclass(frozen=True, slots=True)
class MediaInfo:
    """Result of :func:`probe`.

    Attributes:
        format: FFmpeg's name of the container format; for a still, the name of its codec.
        duration: Duration in seconds that the container's header states; ``None``: not stated, or a still.
        streams: All streams, in the order of their indices.
        best_video: Index of the video stream that :func:`~spdl_media.demux_video` takes, or
            ``None``.
        best_audio: Index of the audio stream that :func:`~spdl_media.demux_audio` takes, or
            ``None``.
        is_still: Whether the source is one image.

    Thread safety: safe; it and the streams are immutable.
    """

    format: str
    duration: float | None
    streams: tuple[StreamInfo, ...]
    best_video: int | None = None
    best_audio: int | None = None
    is_still: bool = False

    @property
    def video(self) -> VideoStreamInfo | None:
        """The best video stream, or ``None``."""
        # FFmpeg may choose a stream that it cannot decode, which is an OtherStreamInfo.
        videos = [stream for stream in self.streams if isinstance(stream, VideoStreamInfo)]
        return next((video for video in videos if video.index == self.best_video), None)

    @property
    def audio(self) -> AudioStreamInfo | None:
        """The best audio stream, or ``None``."""
        audios = [stream for stream in self.streams if isinstance(stream, AudioStreamInfo)]
        return next((audio for audio in audios if audio.index == self.best_audio), None)


def probe(
    src: Source, *, demux_config: DemuxConfig | None = None, name: str | None = None
) -> MediaInfo:
    """Read container format and streams of a source.

    For a JPEG, PNG, WebP, BMP or single-image GIF the header is read, and the end of the image searched for.
    Values that the header does not state, such as the pixel format of a CMYK JPEG, are ``None``. Of other
    stills, and of truncated ones, one frame is decoded. Nothing of other media is decoded.

    Args:
        src: As for :func:`~spdl_media.demux_image`.
        demux_config: Options of opening the source.
        name: Name of the source in messages.

    Returns:
        Container and streams as plain values. The source is closed.

    Raises:
        SourceError: The source cannot be opened or read.
        DemuxError: The source is not a media file.
        DecodeError: The source is a still that cannot be decoded.
        ValueError: ``demux_config`` has a format or an option that FFmpeg does not know.

    Thread safety: safe, if no other thread uses a file-like ``src``.

    Example:
        >>> info = sm.probe("clip.mp4")
        >>> info.duration, info.video.codec, info.video.width, info.audio.sample_rate
        (13.056, 'h264', 480, 16000)
    """
    with open_input(src, demux_config, name=name) as input:
        return _probe_input(input)


def _probe_input(input: Input) -> MediaInfo:
    # With a given format, the content is not examined.
    head = input.head(HEAD_SIZE) if input.config.format is None else b""
    if head and (still_codec(head) or container_still(head)):
        # The orientation and the end of a still may be anywhere in the file.
        if not input.seekable:
            with open_input(input.read_all(), input.config, name=input.name) as whole:
                return _probe_input(whole)
        if found := read_still(head, input.read_at, input.size()):
            return _still_media(*found)
    # The brand "avis" marks an image sequence, which is treated as a video.
    is_avif = container_still(head) == "avif" and head[8:12] != b"avis"
    if is_avif or only_pillow_reads(head) or still_decoder(input) is not None:
        return _probe_still(read_image(input))
    # Without FFmpeg, which reads 32 packets of a WAV file to find out whether they hold DTS.
    if input.config == DEFAULT_DEMUX_CONFIG and input.seekable:
        info = _wav_info(input, bytes(head[:WAV_HEAD_SIZE]))
        if info is not None:
            return info
    # Closed at once: PyAV's reference cycles would keep it open until the garbage collector runs.
    with closing(Container(input)) as container:
        info = _probe_container(container)
    if (canvas := webp_canvas(head)) is None:
        return info
    # FFmpeg 8.0 does not read the size of an animated WebP.
    stream: Any = info.streams[0]
    return replace(info, streams=(replace(stream, width=canvas[0], height=canvas[1]),))


# Files with longer chunks after the samples are left to FFmpeg.
_WAV_TAIL_SIZE = 8 * 1024


def _wav_info(input: Input, head: bytes) -> MediaInfo | None:
    """Return the stream of a WAV file; ``None`` if the file must be read by FFmpeg."""
    wav = read_wav_info(input, head)
    if wav is None:
        return None
    header, codec = wav
    end = header.data_offset + header.data_size + header.data_size % 2
    if input.size() - end > _WAV_TAIL_SIZE:
        return None
    # Before and after the samples: an ID3 tag may hold a cover, which is a stream of its own.
    parts = input.read_at(12, header.data_offset - 20), input.read_at(end, _WAV_TAIL_SIZE)
    if any(b"id3 " in bytes(part).lower() for part in parts):
        return None
    rate, count = header.sample_rate, header.num_samples
    # Rounded to microseconds, as FFmpeg rounds the duration of a container.
    duration = (2 * count * 1_000_000 + rate) // (2 * rate) / 1_000_000
    stream = _audio_stream(codec, 0, count / rate)
    return MediaInfo("wav", duration, (stream,), best_audio=0)


def _probe_container(container: Container) -> MediaInfo:
    # Listed first: reading an orientation may reopen the container.
    streams = tuple(_stream_info(container, stream) for stream in list(container.av.streams))
    best = container.best_index("video"), container.best_index("audio")
    return MediaInfo(container.format, container.duration, streams, *best)


def _stream_info(container: Container, stream: av.stream.Stream) -> StreamInfo:
    # codec_context is None if this FFmpeg has no decoder for the stream.
    has_decoder = stream.codec_context is not None
    if has_decoder and isinstance(stream, av.AudioStream):
        return _audio_stream(read_audio_codec(stream), stream.index, _seconds(container, stream))
    if not has_decoder or not isinstance(stream, av.VideoStream):
        codec_name = stream.codec_context.name if has_decoder else None
        return OtherStreamInfo(stream.index, stream.type, codec_name)
    codec, index = read_video_codec(stream), stream.index
    stated = {"num_frames": stream.frames or None, "duration": _seconds(container, stream)}
    return _video_stream(
        codec, container.orientation(index), index=index, frame_rate=codec.frame_rate, **stated
    )


def _audio_stream(codec: AudioCodec, index: int, duration: float | None) -> AudioStreamInfo:
    numbers = codec.sample_rate, codec.num_channels
    return AudioStreamInfo(
        index, codec.name, *numbers, codec.channel_layout, codec.sample_fmt, duration
    )


def _seconds(container: Container, stream: av.stream.Stream) -> float | None:
    is_matroska = container.format.startswith("matroska")
    # These count the samples that decoders skip at the start.
    counts = is_matroska or container.format == "ogg"
    skipped = Fraction(opus_delay(stream.codec_context) if counts else 0, 48000)
    if container.format.startswith("mov") and isinstance(stream, av.AudioStream):
        skipped = Fraction(sum(itunes_edges(stream)), stream.sample_rate or 1)
    total: Any = container.duration if is_matroska else None
    if stream.duration is not None:
        total = stream.duration * as_fraction(stream.time_base)
    # Matroska has a duration for the file only. Writers put a stream's duration into its tags: 00:00:12.345.
    elif is_matroska and (stated := _TIME.fullmatch(stream.metadata.get("DURATION", ""))):
        hours, minutes, seconds = stated.groups()
        total = int(hours) * 3600 + int(minutes) * 60 + float(seconds)
    return None if total is None else float(total - skipped)


_TIME = re.compile(r"(\d+):(\d\d):(\d\d(?:\.\d+)?)")


def _video_stream(codec: VideoCodec, orientation: int, **stated: Any) -> VideoStreamInfo:
    size = codec.width, codec.height
    # Decoded frames are upright, so the sizes here are, too.
    width, height = reversed(size) if swaps_sides(orientation) else size
    named = zip(COLOR_TABLES.items(), codec.color, strict=True)
    colors: dict[str, Any] = {name: table.get(number) for (name, table), number in named}
    return VideoStreamInfo(
        **stated,
        codec=codec.name,
        width=width,
        height=height,
        pix_fmt=codec.pix_fmt,
        orientation=orientation,
        rotation=rotation(orientation),
        mirrored=is_mirrored(orientation),
        **colors,
    )


def _probe_still(packets: ImagePackets) -> MediaInfo:
    image = decode_packets(packets, None)
    (frame,) = av_frames(image)
    # The codec of a still states neither size nor colour until a frame is decoded.
    header = StillHeader(frame.width, frame.height, frame.format.name, color_numbers(frame))
    return _still_media(packets.codec.name, header, image.orientation)


def _still_media(name: str, header: StillHeader, orientation: int) -> MediaInfo:
    codec = VideoCodec(name, name, header.width, header.height, header.pix_fmt, color=header.color)
    stated = {"index": 0, "frame_rate": None, "num_frames": 1, "duration": None}
    stream = _video_stream(codec, orientation, **stated)
    return MediaInfo(name, None, (stream,), best_video=0, is_still=True)
