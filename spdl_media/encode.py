"""Encode frames to packets: the options, and the conversion to the format of the encoder."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import av
import numpy as np
from av.codec.codec import find_best_pix_fmt_of_list
from av.codec.context import Flags

from spdl_media._checks import check_choice, check_int, counted, did_you_mean
from spdl_media._ffmpeg import AvPacket, as_fraction, check_codec_options, has_codec
from spdl_media.array_frames import channel_layout, color_number, limited
from spdl_media.config import string_options
from spdl_media.errors import EncodeError
from spdl_media.filters import FrameFilter
from spdl_media.formats import COLOR_RANGES, COLOR_TABLES, COLORSPACES, format_name, is_yuv, to_ints
from spdl_media.frames import AudioChunk, AudioFrames, frame_of, silent_frame
from spdl_media.geometry import rotation
from spdl_media.image_frames import ImageFrames, VideoFrames, av_frames, frame_metadata
from spdl_media.operations import ACCURATE
from spdl_media.rows import matrix_and_range
from spdl_media.timing import Rate, parse_rate

__all__ = ("AudioEncodeConfig", "VideoEncodeConfig", "audio_encode_config", "video_encode_config")

# Set before the first use of SVT-AV1, which otherwise writes to stderr without FFmpeg's log.
_QUIET_SVT = ("SVT_LOG", "1")
_TASKS = Path("/proc/self/task")  # Linux's list of this process's threads
_FLAGS = f"flags=bilinear+{ACCURATE}"
_NARROW = 128  # columns; a margin to the 16 at which the scaler crashes, for other processors
_MAX_PEAK = 1000.0  # of float samples; encoders clip those that are a little above 1
_QP2LAMBDA = 118  # FFmpeg's unit of an encoder's quality, in steps of the quantiser


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoEncodeConfig:
    """Options of encoding a video stream. ``video_encode_config`` is SPDL's name of this class.

    Args:
        width: Width of the frames, in pixels.
        height: Height of the frames, in pixels.
        frame_rate: Frames per second. Frame ``k`` is shown at ``k / frame_rate``; the timestamps of frames
            are ignored. With ``time_base=``, the rate is only written into the file, and may be ``None``.
        pix_fmt: Pixel format of the coded video, to which frames are converted. The default is ``yuv420p``,
            which every player supports, or else the first format of the encoder.
        encoder: FFmpeg's name of an encoder (``"libx264"``) or codec (``"h264"``); default: by file format.
        encoder_options: Options of the encoder, such as ``{"crf": 18, "preset": "fast"}``; ``"threads"`` is
            its number of threads, by default the number of cores.
        bit_rate: Bit rate in bits per second. The default is that of the encoder.
        qscale: Constant quality, from 1 (best) to 31, for encoders such as ``mpeg4`` and ``mjpeg``.
        gop_size: Maximum number of frames from one key frame to the next.
        max_b_frames: Maximum number of consecutive B-frames.
        colorspace: FFmpeg's name of the matrix of a YUV stream, which is also written into the file. The
            default is BT.601 (``"smpte170m"``), which FFmpeg and this library assume if a file states none.
        color_range: ``"tv"`` (limited) or ``"pc"`` (full). The default is limited, in ``yuvj`` formats full.
        color_primaries: FFmpeg's name of the primaries, only written into the file.
        color_trc: FFmpeg's name of the transfer function, only written into the file.
        orientation: EXIF orientation, 1 to 8, by which players turn the frames. Supported in MP4, MOV and,
            without mirroring, Matroska.
        sample_aspect_ratio: Width of a pixel divided by its height.
        time_base: Unit of time in seconds. If given, each frame is shown at its own timestamp, rounded to
            this unit. File formats may round further: Matroska to milliseconds.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A number is out of range, a name is unknown, or ``frame_rate`` and ``time_base`` are None.

    See:
        FFmpeg's encoders and their options: https://ffmpeg.org/ffmpeg-codecs.html#Video-Encoders
    """

    width: int
    height: int
    frame_rate: Rate | None = 30
    pix_fmt: str | None = None
    encoder: str | None = None
    encoder_options: Mapping[str, object] | None = None
    bit_rate: int | None = None
    qscale: int | None = None
    gop_size: int | None = None
    max_b_frames: int | None = None
    colorspace: str | None = None
    color_range: Literal["tv", "pc"] | None = None
    color_primaries: str | None = None
    color_trc: str | None = None
    orientation: int = 1
    sample_aspect_ratio: Fraction | None = None
    time_base: Fraction | None = None

    def __post_init__(self) -> None:
        if self.frame_rate is None and self.time_base is None:
            raise ValueError("give frame_rate=, or time_base= for frames with times of their own")
        _check_numbers(self, "width", "height", bit_rate=1, qscale=1, gop_size=1, max_b_frames=0)
        if self.pix_fmt is not None:
            format_name("pix_fmt", self.pix_fmt)
        for name in COLOR_TABLES:
            color_number(name, getattr(self, name))
        rotation(self.orientation)  # raises for an invalid orientation
        for name in ("frame_rate", "time_base", "sample_aspect_ratio"):
            if (ratio := getattr(self, name)) is not None:
                object.__setattr__(self, name, parse_rate(ratio, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioEncodeConfig:
    """Options of encoding an audio stream. ``audio_encode_config`` is SPDL's name of this class.

    Args:
        sample_rate: Sample rate in Hz.
        num_channels: Number of channels.
        sample_fmt: Sample format to which samples are converted; by default, the encoder's first one.
        encoder: FFmpeg's name of an encoder (``"libmp3lame"``) or codec (``"mp3"``); default: by file format.
        encoder_options: Options of the encoder; see https://ffmpeg.org/ffmpeg-codecs.html#Audio-Encoders.
        bit_rate: Bit rate in bits per second, for lossy encoders. The default is that of the encoder.
        qscale: Constant quality, for encoders such as ``libmp3lame`` and ``vorbis``.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of range, or a name is unknown.
    """

    sample_rate: int
    num_channels: int
    sample_fmt: str | None = None
    encoder: str | None = None
    encoder_options: Mapping[str, object] | None = None
    bit_rate: int | None = None
    qscale: int | None = None

    def __post_init__(self) -> None:
        _check_numbers(self, "sample_rate", "num_channels", bit_rate=1, qscale=1)
        if self.sample_fmt is not None:
            format_name("sample_fmt", self.sample_fmt)


video_encode_config = VideoEncodeConfig
audio_encode_config = AudioEncodeConfig


def _check_numbers(config: Any, *needed: str, **least: int) -> None:
    """Convert numbers to ``int`` and encoder options to strings; numbers with a minimum may be ``None``."""
    for name in (*needed, *least):
        if name in needed or getattr(config, name) is not None:
            number = check_int(name, getattr(config, name), at_least=least.get(name, 1))
            number = limited(name, number, 62 if name == "bit_rate" else 31)
            object.__setattr__(config, name, number)
    options = string_options("encoder_options", config.encoder_options or {})
    object.__setattr__(config, "encoder_options", options)


@lru_cache(maxsize=64)
def find_encoder(name: str, kind: Literal["video", "audio"]) -> av.Codec:
    """Return an encoder by its name, or by the name of its codec.

    Raises:
        ValueError: This FFmpeg has no such encoder of that kind.
    """
    os.environ.setdefault(*_QUIET_SVT)
    try:
        encoder = av.Codec(name, "w")
    except ValueError as error:
        # codecs_available lists decoders, too.
        hint = did_you_mean(name, (one for one in av.codecs_available if has_codec(one, "w")))
        raise ValueError(
            f"this FFmpeg has no encoder {name!r}. {hint and hint + ' '}"
            "`python -m av --codecs` lists those that it has"
        ) from error
    if encoder.type != kind:
        raise ValueError(f"{name!r} encodes {encoder.type}, not {kind}")
    return encoder


def open_encoder(context: Any) -> None:
    """Open an encoder, without a change in the scheduling of threads.

    If the process runs as root, SVT-AV1 gives real-time priority to its own threads and to the calling
    thread, from which later threads inherit it. A computing thread would then block its core for all others.

    Raises:
        FFmpegError: The encoder refuses an option or a value, such as an odd width.
    """
    if context.name != "libsvtav1" or not _TASKS.is_dir():
        context.open()
        return
    policy, parameter = os.sched_getscheduler(0), os.sched_getparam(0)
    others = set(_TASKS.iterdir()) - {_TASKS / str(threading.get_native_id())}
    try:
        context.open()
    finally:
        for task in set(_TASKS.iterdir()) - others:
            with suppress(ProcessLookupError):
                os.sched_setscheduler(int(task.name), policy, parameter)


def _pix_fmts(encoder: av.Codec) -> list[str]:
    """Return the pixel formats that an encoder accepts; empty if it accepts any."""
    names = [format.name for format in encoder.video_formats or ()]
    # The JPEG encoder also accepts limited range, which a JPEG file cannot state.
    full = [name for name in names if name.startswith("yuvj")]
    return full if names[:1] == full[:1] else names


def best_pix_fmt(encoder: av.Codec, given: str, *, exact: bool = False) -> str:
    """Return the encoder's pixel format that loses least; for a lossy encoder, one that players support."""
    # "exact" is for images, and for test media, whose encoders are set to be lossless.
    formats, is_lossy = _pix_fmts(encoder), encoder.lossy and not exact
    if not formats or (given in formats and (not is_lossy or is_yuv(given))):
        return given
    usual = [name for name in formats if name in ("yuv420p", "yuvj420p") and is_lossy]
    best, _ = find_best_pix_fmt_of_list(usual or formats, given, True)  # noqa: FBT003  # alpha counts
    return str(best and best.name)


def best_sample_fmt(encoder: av.Codec, given: str) -> str | None:
    """Return the encoder's sample format that loses least; ``None``: use its first format."""
    formats = [format.name for format in encoder.audio_formats or ()]
    base = given.removesuffix("p")
    wider = () if base in ("u8", "s16") else ("s32", "s32p", "fltp")
    return next((name for name in (given, base, f"{base}p", *wider) if name in formats), None)


class VideoEncoder:
    """Converts frames to the format, colours and timestamps of a stream, and encodes them.

    Args:
        target: A PyAV stream, or a codec context.
        config: The options. Their encoder must be that of the target.

    Raises:
        ValueError: The encoder does not support an option or the pixel format.
    """

    def __init__(self, target: Any, config: VideoEncodeConfig) -> None:
        self._target, self._config = target, config
        context = getattr(target, "codec_context", target)
        self._is_x265 = context.name == "libx265"
        self.pix_fmt = config.pix_fmt or best_pix_fmt(context.codec, "yuv420p")
        if formats := _pix_fmts(context.codec):
            check_choice(f"pix_fmt of encoder {context.name!r}", self.pix_fmt, formats)
        rate: Any = config.frame_rate or Fraction(30)
        self.time_base: Fraction = config.time_base or 1 / rate
        levels = "pc" if self.pix_fmt.startswith("yuvj") else "tv"
        colors = {"color_range": levels, "colorspace": "smpte170m"} if is_yuv(self.pix_fmt) else {}
        colors |= {name: value for name in COLOR_TABLES if (value := getattr(config, name))}
        self._colors = [color_number(name, colors.get(name)) for name in COLOR_TABLES]
        self._filter: FrameFilter | None = None
        self._desc, self._count, self._last, self._duration = "", 0, -1, 1
        set_all(context, **dict(zip(COLOR_TABLES, self._colors, strict=True)))
        own = ("width", "height", "gop_size", "max_b_frames", "sample_aspect_ratio")
        set_all(context, **{name: getattr(config, name) for name in own})
        set_all(context, pix_fmt=self.pix_fmt, time_base=self.time_base)
        context.framerate = config.frame_rate or Fraction(0)  # PyAV's default is 24
        context.flags |= Flags.frame_duration  # use the durations of frames
        # PyAV's default is slice threading, with which x264 splits each frame; frame threading is faster.
        # FFmpeg's own encoders keep it, because their frame threads would free shared memory without the GIL.
        if context.name.startswith("lib"):
            context.thread_type = "AUTO"
        _set_rate(context, config)

    def encode(self, frames: VideoFrames | ImageFrames) -> Iterator[AvPacket]:
        """Encode frames.

        Raises:
            EncodeError: A frame has another size than the stream, no timestamp, or is not after the last one.
            FFmpegError: The encoder fails.
        """
        config, zero = self._config, frame_metadata(frames).zero
        for frame in av_frames(frames):
            if (frame.width, frame.height) != (config.width, config.height):
                raise EncodeError(
                    f"frame {self._count} is {frame.width}x{frame.height}, but the stream is {config.width}x"
                    f"{config.height}. Scale it: scale_width= and scale_height= of get_video_filter_desc"
                )
            yield from self._target.encode(self._prepared(frame, self._ticks(frame, zero)))

    def flush(self) -> Iterator[AvPacket]:
        """Yield the packets that the encoder has delayed.

        Raises:
            FFmpegError: The encoder fails.
        """
        for packet in self._target.encode(None):
            # For one or two frames, coded in order, libx265 reads decoding times from uninitialized memory.
            if self._count <= 2 and self._is_x265:
                packet.dts = packet.pts
            yield packet

    def _ticks(self, frame: av.VideoFrame, zero: Fraction) -> int:
        ticks = self._count
        if self._config.time_base is not None:
            if frame.pts is None:
                raise EncodeError(f"frame {ticks} has no time; give frame_rate= alone")
            unit = (as_fraction(frame.time_base) or 1) / self.time_base
            exact = frame.pts * unit - zero / self.time_base
            # The nearest, or if that is the last frame's, the one above: times near a half are inexact.
            ticks = max((exact + Fraction(1, 2)) // 1, min(self._last + 1, -(-exact // 1)))
            # At least 1: players do not show the last frame of an MP4 if its duration is 0.
            self._duration = max(1, round(frame.duration * unit) or ticks - self._last)
        if ticks <= self._last and self._count:
            raise EncodeError(
                f"frame {self._count} is not after the frame before it, but "
                f"{float((self._last - ticks) * self.time_base):g} s earlier. Sort frames by time, or place "
                "them evenly: frame_rate= of save_video or video_encode_config"
            )
        self._count, self._last = self._count + 1, ticks
        return ticks

    def _prepared(self, frame: av.VideoFrame, ticks: int) -> av.VideoFrame:
        """Return the frame for the encoder; a new frame if anything changes, because threads may share it."""
        desc = self._conversion(frame)
        # Without a graph if possible: even one that does nothing takes 15 microseconds.
        in_place = frame.pts == ticks and frame.time_base == self.time_base
        if desc == "null" and in_place and not frame.pict_type:
            return frame
        if self._filter is None or desc != self._desc:
            self._filter = FrameFilter(desc, kind="video", time_base=self.time_base, gives_one=True)
            self._desc = desc
        own: av.VideoFrame = self._filter.push(frame)[0]
        own.pts, own.time_base, own.duration = ticks, self.time_base, self._duration
        own.pict_type = 0  # otherwise the encoder would repeat the key frames of the source
        own.color_range, own.colorspace, own.color_primaries, own.color_trc = self._colors
        return own

    def _conversion(self, frame: av.VideoFrame) -> str:
        """Return the filters that convert a frame to the pixel format, matrix and range of the stream."""
        given, end = frame.format.name, f"format={self.pix_fmt}"
        scale = f"{to_ints(given, self.pix_fmt, is_scaled=True)},scale={_FLAGS}".lstrip(",")
        if not is_yuv(self.pix_fmt):
            return "null" if given == self.pix_fmt else f"{scale},{end}"
        matrix, levels = COLORSPACES[self._colors[1]], COLOR_RANGES[self._colors[0]]
        same = "bt601" if matrix in ("bt470bg", "smpte170m") else matrix
        if given == self.pix_fmt and matrix_and_range(frame) == (same, levels):
            return "null"
        wanted = f":out_color_matrix={matrix}:out_range={levels}"
        if levels == "pc" and frame.format.is_rgb:
            # FFmpeg's scaler makes full-range chroma half a level too small, as it maps 128 to the middle
            # of 0 and 255. Its newer code ("unstable"), for 4:4:4 only, does not, but it crashes on packed
            # images of up to 16 columns or of one row, so those are made planar first. The second scale has
            # no accurate_rnd, which would take a third of the time for 0.005 levels.
            exact = f"scale={_FLAGS}+unstable:sws_dither=none{wanted},format=yuv444p"
            if frame.width <= _NARROW or frame.height == 1:
                exact = f"format=gbrp|gbrp16,{exact}"
            return f"{exact},scale=flags=bilinear:out_range=pc,{end}"
        return f"{scale}{wanted},{end}"


def set_all(context: Any, **values: object) -> None:
    """Set attributes of an encoder's context, except those that are ``None``."""
    for name, value in values.items():
        if value is not None:
            setattr(context, name, value)


def _set_rate(context: Any, config: VideoEncodeConfig | AudioEncodeConfig) -> None:
    options: dict[str, Any] = dict(config.encoder_options or {})
    check_codec_options(context.name, options, "w")
    is_narrow = isinstance(config, VideoEncodeConfig) and min(config.width, config.height) < 64
    if context.name == "libx265":  # it writes its settings to stderr, without FFmpeg's log
        safe = "cutree=0:" if is_narrow else ""  # for 33 to 48 columns, cutree corrupts memory
        options["x265-params"] = f"log-level=error:{safe}{options.get('x265-params', '')}"
    if context.name == "libsvtav1" and is_narrow:  # for sides up to 24, threads wait forever
        options["svtav1-params"] = f"lp=1:{options.get('svtav1-params', '')}"
    set_all(context, bit_rate=config.bit_rate, qscale=config.qscale and True)
    if (number := config.qscale) is not None:
        # Audio encoders take the first, video encoders the others.
        quality = {"global_quality": _QP2LAMBDA * number, "qmin": number, "qmax": number}
        options = string_options("qscale", quality) | options
    context.options = options


class AudioEncoder:
    """Converts samples to the format of a stream, places them one after the other, and encodes them.

    Args:
        stream: A PyAV stream.
        config: The options. Their encoder must be that of the stream.

    Raises:
        ValueError: The encoder does not support an option or the sample format.
    """

    def __init__(self, stream: Any, config: AudioEncodeConfig) -> None:
        self._stream, self._config, self._count, self._padding = stream, config, 0, 0
        self._context = context = stream.codec_context
        formats = [format.name for format in context.codec.audio_formats or ()]
        if config.sample_fmt is not None:
            check_choice(f"sample_fmt of encoder {context.name!r}", config.sample_fmt, formats)
            context.format = config.sample_fmt
        # FFmpeg would write the layout 7.1 in an order at which PyAV crashes: is_native_layout.
        is_bare = config.num_channels == 8 and stream.container.format.name in ("aiff", "caf")
        context.layout = "8 channels" if is_bare else channel_layout(config.num_channels)
        context.time_base = Fraction(1, config.sample_rate)
        _set_rate(context, config)

    def encode(self, frames: AudioFrames) -> Iterator[AvPacket]:
        """Encode samples directly after those before them; their timestamps are ignored.

        Raises:
            EncodeError: Sample rate or number of channels are not those of the stream.
            FFmpegError: The encoder fails.
        """
        both = frames, self._config
        given, wanted = ((one.sample_rate, counted(one.num_channels, "channel")) for one in both)
        if given != wanted:
            raise EncodeError(
                "the samples have {} Hz and {}, but the stream has {} Hz and {}. Resample them: "
                "sample_rate= and num_channels= of get_audio_filter_desc".format(*given, *wanted)
            )
        for chunk in frames.chunks:
            self._check_range(chunk)
            placed, unit = replace(chunk, position=self._count), Fraction(1, frames.sample_rate)
            self._last, self._count = chunk.frame, self._count + len(chunk)
            for packet in self._stream.encode(frame_of(placed, unit, Fraction(0), is_shared=True)):
                self._padding = max(self._padding, -(packet.pts or 0))
                yield packet

    def _check_range(self, chunk: AudioChunk) -> None:
        # NaN and huge values abort the process in LAME, and make noise in other encoders.
        is_safe = self._context.name.startswith(("pcm_", "wavpack"))
        for plane in () if is_safe else chunk.planes:
            peak = float(np.abs(plane).max()) if plane.dtype.kind == "f" else 0
            if not peak <= _MAX_PEAK:
                raise EncodeError(
                    f"the samples reach {peak:g}, but floats must be from -1 to 1. Divide values of int16 by "
                    "32768, and replace NaN: np.nan_to_num"
                )

    def flush(self) -> Iterator[AvPacket]:
        """Yield the packets that the encoder has delayed.

        Raises:
            FFmpegError: The encoder fails.
        """
        if self._context.name.startswith("mp2") and 0 < self._count < self._context.frame_size:
            self._padding = self._context.frame_size  # readers recognise MP2 by two frames
        if self._padding and not self._context.codec.delay:
            # Encoders of MP2 and AC-3 put padding before the samples, and drop as many at the end.
            end = AudioChunk(silent_frame(self._last, self._padding), 0, self._padding, 0)
            yield from self.encode(AudioFrames([end]))
        yield from self._stream.encode(None)
