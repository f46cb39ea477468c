"""Files made in memory, of one or several streams."""

from __future__ import annotations

import io
import os
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import av
import av.error
import numpy as np
from av.codec.context import CodecContext
from av.container import OutputContainer
from numpy.typing import NDArray

from spdl_media.testing.pictures import Picture, best_pix_fmt, video_frame
from spdl_media.testing.tracks import (
    TRACK_MATRIX,
    AudioTrack,
    VideoTrack,
    audio_options,
    channel_layout,
    encoder_sample_format,
    sample_format,
    time_base,
    video_options,
)

__all__ = ("make_audio", "make_image", "make_media", "make_video")


def make_video(
    frames: Sequence[Picture],
    *,
    codec: str = "ffv1",
    format: str = "matroska",
    pix_fmt: str = "yuv420p",
    frame_rate: int | Fraction = 10,
    gop_size: int = 10,
    max_b_frames: int = 0,
    open_gop: bool = False,
    faststart: bool = False,
    options: Mapping[str, str] | None = None,
) -> bytes:
    """Make a file with one video stream; :class:`VideoTrack` explains the arguments, and has more.

    Returns:
        The file's content, in the FFmpeg container format ``format``.

    Raises:
        ValueError: An argument does not fit, or FFmpeg cannot make such a file; the message says
            why.
    """
    track = VideoTrack(
        frames=frames,
        codec=codec,
        pix_fmt=pix_fmt,
        frame_rate=frame_rate,
        gop_size=gop_size,
        max_b_frames=max_b_frames,
        open_gop=open_gop,
        options=options or {},
    )
    return make_media([track], format=format, faststart=faststart)


def make_audio(
    samples: NDArray[Any],
    sample_rate: int = 48000,
    *,
    codec: str = "pcm_s16le",
    format: str = "wav",
    bit_rate: int | None = None,
    options: Mapping[str, str] | None = None,
) -> bytes:
    """Make a file with one audio stream; see :class:`AudioTrack` for the arguments.

    Returns:
        The file's content, in the FFmpeg container format ``format``.

    Raises:
        ValueError: An argument does not fit, or FFmpeg cannot make such a file; the message says
            why.
    """
    track = AudioTrack(
        samples=samples,
        sample_rate=sample_rate,
        codec=codec,
        bit_rate=bit_rate,
        options=options or {},
    )
    return make_media([track], format=format)


def make_media(
    tracks: Sequence[VideoTrack | AudioTrack],
    *,
    format: str = "matroska",
    faststart: bool = False,
    options: Mapping[str, str] | None = None,
) -> bytes:
    """Make a file of several streams, in the order of ``tracks``, interleaved by time.

    Args:
        tracks: The streams.
        format: FFmpeg muxer: ``mp4``, ``mov``, ``matroska``, ``webm``, ``mpegts``, ``avi``,
            ``nut``, ...
        faststart: Put the index of an MP4 or MOV in front; by default it is at the end.
        options: Options of the muxer, such as ``{"muxdelay": "0"}``.

    Returns:
        The file's content.

    Raises:
        ValueError: An argument does not fit, or FFmpeg cannot make such a file; the message says
            why.
    """
    if not tracks:
        raise ValueError("tracks is empty: a file needs at least one stream")
    oriented = any(isinstance(track, VideoTrack) and track.orientation != 1 for track in tracks)
    if (oriented or faststart) and format not in ("mp4", "mov"):
        raise ValueError(f"orientation and faststart need format 'mp4' or 'mov', not {format!r}")
    # Dates, version numbers and random ids would differ from run to run.
    muxing = {"fflags": "+bitexact", **(options or {})}
    if faststart:
        muxing["movflags"] = "+faststart" + muxing.get("movflags", "")
    codecs = "+".join(track.codec for track in tracks)
    try:
        data = _mux(tracks, format, muxing, to_file=faststart)
    except (av.error.FFmpegError, ValueError) as error:
        raise ValueError(f"cannot make {format} with {codecs}: {error}") from error
    return _turn(data, tracks) if oriented else data


def make_image(
    picture: Picture,
    *,
    codec: str = "png",
    pix_fmt: str | None = None,
    options: Mapping[str, str] | None = None,
) -> bytes:
    """Make a file with one still picture.

    Args:
        picture: RGB ``(H, W, 3)``, RGBA ``(H, W, 4)`` or gray ``(H, W)``, uint8 or uint16, or
            planes.
        codec: FFmpeg encoder. ``png``, ``bmp``, ``tiff``, ``ppm``, ``pgm``, ``pam``, ``qoi``,
            ``targa``, ``jpeg2000`` and ``libwebp`` are lossless here. ``gif`` is for gray pictures,
            and takes RGB to 256 fixed colours. ``mjpeg`` is JPEG, and ``libsvtav1`` AVIF.
        pix_fmt: Pixel format of the file; by default the encoder's own that loses least.
        options: More options of the encoder, such as ``{"qmin": "5", "qmax": "5"}``.

    Returns:
        The file's content.

    Raises:
        ValueError: An argument does not fit, or FFmpeg cannot make such a file; the message says
            why.
    """
    try:
        track = VideoTrack(
            frames=[picture],
            codec=codec,
            pix_fmt=pix_fmt or best_pix_fmt(codec, picture),
            frame_rate=1,
            options=options or {},
        )
        if codec in _STILL_FORMATS:
            return make_media([track], format=_STILL_FORMATS[codec])
        frame = video_frame(picture, track.pix_fmt)
        context = _open_encoder(track, frame)
        return b"".join(bytes(packet) for packet in [*context.encode(frame), *context.encode(None)])
    except (av.error.FFmpegError, ValueError) as error:
        raise ValueError(f"cannot make a picture with {codec}: {error}") from error


# The packets of these are no files by themselves.
_STILL_FORMATS = {"apng": "apng", "gif": "gif", "libsvtav1": "avif"}


def _set_up_video(context: Any, track: VideoTrack, frame: av.VideoFrame) -> None:
    context.width, context.height = frame.width, frame.height
    context.pix_fmt = track.pix_fmt
    context.time_base = time_base(track)
    context.gop_size = track.gop_size
    context.max_b_frames = track.max_b_frames
    # The same bytes on every machine, whatever its number of cores.
    context.thread_count = 1


def _open_encoder(track: VideoTrack, frame: av.VideoFrame) -> Any:
    context = CodecContext.create(track.codec, "w")
    _set_up_video(context, track, frame)
    context.options = video_options(track)
    frame.pts, frame.time_base = 0, time_base(track)
    return context


def _mux(
    tracks: Sequence[VideoTrack | AudioTrack],
    format: str,
    options: dict[str, str],
    *,
    to_file: bool,
) -> bytes:
    if not to_file:
        sink = io.BytesIO()
        with av.open(sink, "w", format=format, options=options) as container:
            _write(container, tracks)
        return sink.getvalue()
    # FFmpeg opens the file a second time, by name, to move the index to the front.
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "media")
        with av.open(path, "w", format=format, options=options) as container:
            _write(container, tracks)
        with open(path, "rb") as file:
            return file.read()


def _write(container: OutputContainer, tracks: Sequence[VideoTrack | AudioTrack]) -> None:
    encoders = [
        _encode_video(container, track)
        if isinstance(track, VideoTrack)
        else _encode_audio(container, track)
        for track in tracks
    ]
    # The first step of each adds its stream; a header can only be written when all are there.
    for encoder in encoders:
        next(encoder)
    container.start_encoding()
    packets = [packet for encoder in encoders for packet in encoder if packet is not None]
    packets.sort(key=lambda packet: packet.dts * Fraction(packet.time_base))
    for packet in packets:
        container.mux(packet)


def _encode_video(container: OutputContainer, track: VideoTrack) -> Iterator[Any]:
    first = video_frame(track.frames[0], track.pix_fmt)
    stream: Any = container.add_stream(
        track.codec, rate=Fraction(track.frame_rate), options=video_options(track)
    )
    _set_up_video(stream.codec_context, track, first)
    stream.time_base = time_base(track)
    yield None
    for number, picture in enumerate(track.frames):
        frame = video_frame(picture, track.pix_fmt)
        if (frame.width, frame.height) != (first.width, first.height):
            raise ValueError(
                f"frame {number} is {frame.width} x {frame.height}, "
                f"the first one {first.width} x {first.height}"
            )
        frame.pts = number if track.pts is None else track.pts[number]
        frame.time_base = time_base(track)
        yield from stream.encode(frame)
    yield from stream.encode(None)


def _encode_audio(container: OutputContainer, track: AudioTrack) -> Iterator[Any]:
    layout = channel_layout(track)
    stream: Any = container.add_stream(
        track.codec, rate=track.sample_rate, layout=layout, options=audio_options(track)
    )
    stream.codec_context.format = encoder_sample_format(track)
    if track.bit_rate is not None:
        stream.codec_context.bit_rate = track.bit_rate
    yield None
    # One frame a second of sound; the encoder cuts them to its own size.
    for first in range(0, len(track.samples), track.sample_rate):
        block = np.ascontiguousarray(track.samples[first : first + track.sample_rate])
        format = sample_format(track)
        frame = av.AudioFrame.from_ndarray(block.reshape(1, -1), format=format, layout=layout)
        frame.sample_rate = track.sample_rate
        frame.pts, frame.time_base = track.start + first, Fraction(1, track.sample_rate)
        yield from stream.encode(frame)
    yield from stream.encode(None)


# Orientation: FFmpeg's muxer takes it only from side data, which PyAV cannot set, so it is written
# into the finished file: nine numbers in the header of each track.


def _turn(data: bytes, tracks: Sequence[VideoTrack | AudioTrack]) -> bytes:
    content = bytearray(data)
    position, end = _box(content, b"moov", 0, len(content))
    for track in tracks:
        header = content.index(b"tkhd", position, end)
        position = header + 4
        if isinstance(track, VideoTrack):
            a, b, c, d = (value << 16 for value in TRACK_MATRIX[track.orientation])
            # Version 1 has three fields of 8 bytes where version 0 has 4.
            matrix = position + (52 if content[position] else 40)
            struct.pack_into(">9i", content, matrix, a, b, 0, c, d, 0, 0, 0, 1 << 30)
    return bytes(content)


def _box(data: bytearray, kind: bytes, position: int, end: int) -> tuple[int, int]:
    """Where the content of a box begins and ends, among the boxes from ``position`` on."""
    while position < end:
        size, name = struct.unpack_from(">I4s", data, position)
        if size == 1:
            (size,) = struct.unpack_from(">Q", data, position + 8)
        if name == kind:
            return position + 8, position + size
        position += size
    raise ValueError(f"the file has no {kind.decode()} box")
