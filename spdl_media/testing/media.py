"""Makes media files in memory, with one or several streams and lossless encoder options."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from typing import Any, TypeAlias

import av
import av.error
import numpy as np
from av.container import OutputContainer
from numpy.typing import NDArray

from spdl_media._ffmpeg import check_codec_options
from spdl_media.array_frames import channel_layout, frames_from_array
from spdl_media.destination import Draft
from spdl_media.encode import best_pix_fmt, best_sample_fmt, find_encoder, open_encoder, set_all
from spdl_media.geometry import display_matrix, rotation
from spdl_media.image_frames import av_frames

__all__ = ("AudioTrack", "VideoTrack", "make_audio", "make_image", "make_media", "make_video")

# Options that make an encoder lossless, as good as possible or fast, or work at all. The caller's options
# override them.
_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "libx264": {"qp": "0", "preset": "ultrafast"},
    "libx264rgb": {"qp": "0", "preset": "ultrafast"},
    "libx265": {"preset": "ultrafast", "x265-params": "lossless=1:log-level=none:pools=none"},
    "libvpx-vp9": {"lossless": "1", "cpu-used": "8", "deadline": "realtime"},
    "libwebp": {"lossless": "1"},
    "libwebp_anim": {"lossless": "1"},
    "jpeg2000": {"pred": "dwt53"},
    "mjpeg": {"qmin": "1", "qmax": "1"},
    "mpeg4": {"qmin": "1", "qmax": "1"},
    "mpeg2video": {"qmin": "1", "qmax": "1"},
    "aac": {"aac_coder": "fast"},
    "libmp3lame": {"compression_level": "9"},
    "vorbis": {"strict": "experimental"},
}

_SAMPLE_FORMATS = {"uint8": "u8", "int16": "s16", "int32": "s32", "float32": "flt"}

# Encoders that can make open GOPs, and the option for their private parameters.
_OPEN_GOP_CODECS = {"libx264": "x264-params", "libx265": "x265-params"}


# One image: RGB ``(H, W, 3)``, RGBA ``(H, W, 4)``, luma ``(H, W)``, or a sequence of planes.
Image: TypeAlias = "NDArray[Any] | Sequence[NDArray[Any]]"


def plane_shapes(pix_fmt: str, width: int, height: int) -> tuple[list[tuple[int, int]], int]:
    """Return the shape ``(h, w)`` of each plane, and the number of bits per value minus 8.

    Raises:
        ValueError: The format is packed, or its values are not integers of 8 to 16 bits.
    """
    format = av.VideoFormat(pix_fmt, width, height)
    components = sorted(format.components, key=lambda component: component.plane)
    # Packed formats have several components in one plane.
    if [component.plane for component in components] != list(range(len(components))):
        raise ValueError(f"pix_fmt must be planar, such as 'yuv420p' or 'gbrp', not {pix_fmt!r}")
    if not 8 <= components[0].bits <= 16:
        raise ValueError(f"pix_fmt must have integers of 8 to 16 bits, not {pix_fmt!r}")
    shapes = [(component.height, component.width) for component in components]
    return shapes, components[0].bits - 8


def _video_frame(image: Image, pix_fmt: str) -> av.VideoFrame:
    """Convert an image to a frame of ``pix_fmt``; luma and planes are not converted.

    Raises:
        ValueError: Shape or dtype of the image does not fit.
    """
    if not isinstance(image, np.ndarray):
        return _frame_of(tuple(image), pix_fmt)
    frame = _frame_of(image)
    if frame.format.name == "gray" and pix_fmt.startswith("yuv"):
        shapes, shift = plane_shapes(pix_fmt, frame.width, frame.height)
        dtype = np.uint16 if shift else np.uint8
        neutral = [np.full(shape, 128 << shift, dtype) for shape in shapes[1:]]
        return _frame_of((np.left_shift(image, shift, dtype=dtype), *neutral), pix_fmt)
    return frame if pix_fmt == frame.format.name else frame.reformat(format=pix_fmt)


def _frame_of(image: Any, pix_fmt: str | None = None) -> av.VideoFrame:
    """Make an FFmpeg frame of one image.

    Raises:
        ValueError: There are several images, or shape or dtype does not fit.
    """
    (frame,) = av_frames(frames_from_array(image, pix_fmt))  # type: ignore[arg-type]
    return frame


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoTrack:
    """One video stream of a file.

    Attributes:
        frames: Images: RGB ``(H, W, 3)``, RGBA ``(H, W, 4)`` or luma ``(H, W)`` arrays, or tuples of planes.
            Planes and luma are encoded without conversion (luma gets neutral chroma). RGB is exact for RGB
            formats, and converted by swscale for all others.
        codec: FFmpeg encoder. ``ffv1``, ``libx264`` and ``libx264rgb`` without B-frames, ``libx265`` with or
            without B-frames, ``libvpx-vp9``, ``huffyuv``, ``utvideo``, ``png`` and ``rawvideo`` are lossless
            here. ``libx264`` with B-frames differs by a few levels (x264 has no lossless B-frames). With
            other codecs, such as ``mpeg4`` and ``mpeg2video``, only the index stays readable.
        pix_fmt: Pixel format of the stream.
        frame_rate: Frames per second; also the default of ``time_base``.
        gop_size: Maximum number of frames from one key frame to the next.
        max_b_frames: Maximum number of B-frames between two other frames, for encoders that support them.
        open_gop: Whether the B-frames shown before a key frame (not the first) may refer to the GOP before;
            for ``libx264`` and ``libx265``. ``gop_size`` should not be one more than a multiple of
            ``max_b_frames + 1``, which leaves no B-frame before the key frame.
        pts: Presentation time of each frame in ticks of ``time_base``, rising; default 0, 1, 2, ...
        time_base: Seconds per tick; default ``1 / frame_rate``.
        orientation: EXIF orientation from 1 to 8, which the file asks players to apply. MP4 and MOV only.
        options: Further options of the encoder.
    """

    frames: Sequence[Image]
    codec: str = "ffv1"
    pix_fmt: str = "yuv420p"
    frame_rate: int | Fraction = 10
    gop_size: int = 10
    max_b_frames: int = 0
    open_gop: bool = False
    pts: Sequence[int] | None = None
    time_base: Fraction | None = None
    orientation: int = 1
    options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.frames) == 0:
            raise ValueError("frames is empty: a video stream needs at least one frame")
        # Report a wrong codec here, not when the file is made.
        find_encoder(self.codec, "video")
        if self.frame_rate <= 0:
            raise ValueError(f"frame_rate must be above 0, not {self.frame_rate!r}")
        if self.open_gop and self.codec not in _OPEN_GOP_CODECS:
            raise ValueError(f"open_gop needs codec {list(_OPEN_GOP_CODECS)}, not {self.codec!r}")
        rotation(self.orientation)  # raises if it is invalid
        if self.pts is not None and len(self.pts) != len(self.frames):
            raise ValueError(f"{len(self.frames)} frames need as many pts, got {len(self.pts)}")
        if self.pts is not None and any(a >= b for a, b in pairwise(self.pts)):
            raise ValueError(f"pts must rise from frame to frame, not {list(self.pts)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioTrack:
    """One audio stream of a file.

    Attributes:
        samples: Array of shape ``(num_samples, num_channels)`` and dtype uint8, int16, int32 or float32, with
            one to eight channels.
        sample_rate: Samples per second.
        codec: FFmpeg encoder. ``pcm_*``, ``flac``, ``alac`` and ``wavpack`` are lossless here; ``aac``,
            ``ac3``, ``mp2``, ``libmp3lame``, ``libopus`` and ``vorbis`` (stereo only) are not.
        start: Time of the first sample, in samples.
        bit_rate: Bits per second, for lossy encoders; the default is the encoder's.
        options: Further options of the encoder.
    """

    samples: NDArray[Any]
    sample_rate: int = 48000
    codec: str = "pcm_s16le"
    start: int = 0
    bit_rate: int | None = None
    options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        find_encoder(self.codec, "audio")
        if self.sample_rate <= 0:
            raise ValueError(f"sample_rate must be above 0, not {self.sample_rate!r}")
        if self.samples.ndim != 2 or not 1 <= self.samples.shape[1] <= 8:
            raise ValueError(
                f"samples must be (num_samples, num_channels) with 1 to 8 channels, "
                f"not of shape {self.samples.shape}"
            )
        if self.samples.dtype.name not in _SAMPLE_FORMATS:
            raise ValueError(
                f"samples must be one of {sorted(_SAMPLE_FORMATS)}, not {self.samples.dtype}"
            )


def _options(track: VideoTrack | AudioTrack) -> dict[str, str]:
    """Return the encoder options of a track."""
    # Check them, because FFmpeg ignores options that the encoder does not have.
    check_codec_options(track.codec, track.options, "w")
    options = dict(_OPTIONS.get(track.codec, {}))
    if isinstance(track, VideoTrack) and track.codec in _OPEN_GOP_CODECS:
        if track.codec == "libx264" and track.max_b_frames:
            # x264 makes no B-frames in lossless mode; with qp=1, it is off by a level or two.
            options["qp"] = "1"
        # The positions of key frames and B-frames must depend on the arguments, not on the images.
        name = _OPEN_GOP_CODECS[track.codec]
        fixed = f"scenecut=0:b-adapt=0:open-gop={int(track.open_gop)}"
        structure = f"{fixed}:keyint={track.gop_size}:min-keyint={track.gop_size}"
        options[name] = ":".join(filter(None, [options.get(name), structure]))
    return {**options, **track.options}


def make_video(
    frames: Sequence[Image], *, format: str = "matroska", faststart: bool = False, **track: Any
) -> bytes:
    """Make a file with one video stream.

    Args:
        frames: Images, as for :class:`VideoTrack`.
        format: FFmpeg container format.
        faststart: Whether to put the index of an MP4 or MOV file in front of the data.
        **track: The other arguments of :class:`VideoTrack`: ``codec``, ``pix_fmt``, ``options``, ...

    Returns:
        The file's content.

    Raises:
        ValueError: An argument is invalid, or FFmpeg cannot make such a file; the message says why.
        TypeError: The dtype of planes does not fit the depth of the pixel format.
    """
    return make_media([VideoTrack(frames=frames, **track)], format=format, faststart=faststart)


def make_audio(
    samples: NDArray[Any], sample_rate: int = 48000, *, format: str = "wav", **track: Any
) -> bytes:
    """Make a file with one audio stream.

    Args:
        samples: Array of shape ``(num_samples, num_channels)``, as for :class:`AudioTrack`.
        sample_rate: Samples per second.
        format: FFmpeg container format.
        **track: The other arguments of :class:`AudioTrack`: ``codec``, ``bit_rate``, ``start``, ``options``.

    Returns:
        The file's content.

    Raises:
        ValueError: An argument is invalid, or FFmpeg cannot make such a file; the message says why.
    """
    audio = AudioTrack(samples=samples, sample_rate=sample_rate, **track)
    return make_media([audio], format=format)


def make_media(
    tracks: Sequence[VideoTrack | AudioTrack],
    *,
    format: str = "matroska",
    faststart: bool = False,
    options: Mapping[str, str] | None = None,
) -> bytes:
    """Make a file with several streams, in the order of ``tracks``, interleaved by time.

    Args:
        tracks: The streams.
        format: FFmpeg muxer: ``mp4``, ``mov``, ``matroska``, ``webm``, ``mpegts``, ``avi``, ``nut``, ...
        faststart: Whether to put the index of an MP4 or MOV file in front; by default it is at the end.
        options: Options of the muxer, such as ``{"muxdelay": "0"}``.

    Returns:
        The file's content.

    Raises:
        ValueError: An argument is invalid, or FFmpeg cannot make such a file; the message says why.
    """
    if not tracks:
        raise ValueError("tracks is empty: a file needs at least one stream")
    oriented = any(isinstance(track, VideoTrack) and track.orientation != 1 for track in tracks)
    # Both options change the index ("moov"), which only these two formats have.
    if (oriented or faststart) and format not in ("mp4", "mov"):
        raise ValueError(f"orientation and faststart need format 'mp4' or 'mov', not {format!r}")
    # Without dates, version numbers and random ids, which would differ from run to run.
    muxing = {"fflags": "+bitexact", **(options or {})}
    if faststart:
        muxing["movflags"] = "+faststart" + muxing.get("movflags", "")
    codecs = "+".join(track.codec for track in tracks)
    file = io.BytesIO()
    try:
        # Write to a file first: to move the index to the front, FFmpeg opens the file again by name.
        with (
            Draft(file) as draft,
            av.open(str(draft.path), "w", format=format, options=muxing) as container,
        ):
            _write(container, tracks)
        return file.getvalue()
    except (av.error.FFmpegError, ValueError) as error:
        raise ValueError(f"cannot make {format} with {codecs}: {error}") from error


def make_image(
    image: Image,
    *,
    codec: str = "png",
    pix_fmt: str | None = None,
    options: Mapping[str, str] | None = None,
) -> bytes:
    """Make a file with one still image.

    Args:
        image: RGB ``(H, W, 3)``, RGBA ``(H, W, 4)`` or gray ``(H, W)``, uint8 or uint16, or planes.
        codec: FFmpeg encoder. ``png``, ``bmp``, ``tiff``, ``ppm``, ``pgm``, ``pam``, ``qoi``, ``targa``,
            ``jpeg2000`` and ``libwebp`` are lossless here. ``gif`` is meant for gray images, and reduces RGB
            to 256 fixed colours. ``mjpeg`` makes JPEG, and ``libsvtav1`` AVIF.
        pix_fmt: Pixel format of the file; the default is the encoder's format that loses least.
        options: Further options of the encoder, such as ``{"qmin": "5", "qmax": "5"}``.

    Returns:
        The file's content.

    Raises:
        TypeError: The dtype does not fit the format.
        ValueError: An argument is invalid, or FFmpeg cannot make such a file; the message says why.
    """
    if pix_fmt is None:
        if not isinstance(image, np.ndarray):
            raise ValueError("planes need a pix_fmt that says what they are")
        given, encoder = _frame_of(image).format.name, find_encoder(codec, "video")
        # The first format of the JPEG encoder is 4:2:0, which loses most of the chroma.
        pix_fmt = "yuvj444p" if codec == "mjpeg" else best_pix_fmt(encoder, given, exact=True)
    track = VideoTrack(
        frames=[image], codec=codec, pix_fmt=pix_fmt, frame_rate=1, options=options or {}
    )
    # The packets of most image encoders are complete files.
    return make_media([track], format=_STILL_FORMATS.get(codec, "image2pipe"))


_STILL_FORMATS = {"apng": "apng", "gif": "gif", "libsvtav1": "avif"}


def _write(container: OutputContainer, tracks: Sequence[VideoTrack | AudioTrack]) -> None:
    encoders = [
        _encode_video(container, track)
        if isinstance(track, VideoTrack)
        else _encode_audio(container, track)
        for track in tracks
    ]
    # The first step of each generator adds its stream; the header needs all streams.
    for encoder in encoders:
        next(encoder)
    container.start_encoding()
    packets = [packet for encoder in encoders for packet in encoder if packet is not None]
    # Muxers need the packets of all streams in decoding order.
    packets.sort(key=lambda packet: packet.dts * Fraction(packet.time_base))
    for packet in packets:
        container.mux(packet)


def _encode_video(container: OutputContainer, track: VideoTrack) -> Iterator[Any]:
    first = _video_frame(track.frames[0], track.pix_fmt)
    rate = Fraction(track.frame_rate)
    stream: Any = container.add_stream(track.codec, rate=rate, options=_options(track))
    stream.time_base = time_base = track.time_base or 1 / rate
    set_all(
        stream.codec_context,
        width=first.width,
        height=first.height,
        pix_fmt=track.pix_fmt,
        time_base=time_base,
        gop_size=track.gop_size,
        max_b_frames=track.max_b_frames,
        # One thread, so that the bytes do not depend on the number of cores.
        thread_count=1,
    )
    if track.orientation != 1:
        stream.set_display_matrix(display_matrix(track.orientation))
    open_encoder(stream.codec_context)
    yield None
    for number, image in enumerate(track.frames):
        frame = _video_frame(image, track.pix_fmt)
        if (frame.width, frame.height) != (first.width, first.height):
            raise ValueError(
                f"frame {number} is {frame.width} x {frame.height}, "
                f"the first one {first.width} x {first.height}"
            )
        frame.pts = number if track.pts is None else track.pts[number]
        frame.time_base = time_base
        yield from stream.encode(frame)
    yield from stream.encode(None)


def _encode_audio(container: OutputContainer, track: AudioTrack) -> Iterator[Any]:
    given = _SAMPLE_FORMATS[track.samples.dtype.name]
    stream: Any = container.add_stream(track.codec, rate=track.sample_rate, options=_options(track))
    stream.layout = channel_layout(track.samples.shape[1])
    sample_fmt = best_sample_fmt(find_encoder(track.codec, "audio"), given)
    set_all(stream.codec_context, format=sample_fmt, bit_rate=track.bit_rate)
    yield None
    # Frames of one second, which are then cut to the frame size of the encoder.
    for first in range(0, len(track.samples), track.sample_rate):
        block = track.samples[first : first + track.sample_rate]
        frames: Any = frames_from_array(
            block, sample_fmt=given, sample_rate=track.sample_rate, pts=track.start + first
        )
        for chunk in frames.chunks:
            yield from stream.encode(chunk.frame)
    yield from stream.encode(None)
