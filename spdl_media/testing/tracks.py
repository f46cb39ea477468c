"""The streams of a file to be made, as values, and what their encoders need to be exact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from typing import Any

from av.codec.context import CodecContext
from numpy.typing import NDArray

from spdl_media.testing.pictures import Picture, find_encoder

__all__ = ("AudioTrack", "VideoTrack")

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
    "vorbis": {"strict": "experimental"},
}
"""Options that make an encoder exact, or as good as it gets, or work at all; the caller's win."""

_OPEN_GOP_CODECS = {"libx264": "x264-params", "libx265": "x265-params"}
"""Encoders that can leave a group of pictures open, and the option that holds their parameters."""

# EXIF orientation -> (a, b, c, d) of the matrix in an MP4 track header: x' = ax + cy, y' = bx + dy.
TRACK_MATRIX: Mapping[int, tuple[int, int, int, int]] = {
    1: (1, 0, 0, 1),
    2: (-1, 0, 0, 1),
    3: (-1, 0, 0, -1),
    4: (1, 0, 0, -1),
    5: (0, 1, 1, 0),
    6: (0, 1, -1, 0),
    7: (0, -1, -1, 0),
    8: (0, -1, 1, 0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoTrack:
    """One video stream of a file to be made.

    Attributes:
        frames: Pictures: RGB ``(H, W, 3)``, RGBA ``(H, W, 4)`` or luma ``(H, W)`` arrays, or tuples
            of planes. Planes and luma go into the encoder as they are (luma gets neutral chroma);
            RGB is exact for RGB formats, and converted by swscale for all others.
        codec: FFmpeg encoder. ``ffv1``, ``libx264`` and ``libx264rgb`` without B frames,
            ``libx265`` also with them, ``libvpx-vp9``, ``huffyuv``, ``utvideo``, ``png`` and
            ``rawvideo`` are lossless here. ``libx264`` with B frames is within a few levels of
            exact (x264 has no lossless B frames); the rest, such as ``mpeg4`` and ``mpeg2video``,
            keeps only the index readable.
        pix_fmt: Pixel format of the stream.
        frame_rate: Frames a second; also what ``time_base`` is made from.
        gop_size: Frames from one key frame to the next, at most.
        max_b_frames: B frames between two other frames, for encoders that have them.
        open_gop: Let the B frames before a key frame (not the first) refer across it, for
            ``libx264`` and ``libx265``. ``gop_size`` should not be one more than a multiple of
            ``max_b_frames + 1``, which leaves no B frame before the key frame.
        pts: Time of each frame in ticks of ``time_base``, rising; default 0, 1, 2, ...
        time_base: Seconds a tick; default ``1 / frame_rate``.
        orientation: EXIF's 1 to 8: how the file says the pictures are to be turned. MP4 and MOV
            only.
        options: More options of the encoder.
    """

    frames: Sequence[Picture]
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
        find_encoder(self.codec, "video")
        if self.frame_rate <= 0:
            raise ValueError(f"frame_rate must be above 0, not {self.frame_rate!r}")
        if self.open_gop and self.codec not in _OPEN_GOP_CODECS:
            raise ValueError(f"open_gop needs codec {list(_OPEN_GOP_CODECS)}, not {self.codec!r}")
        if self.orientation not in TRACK_MATRIX:
            raise ValueError(f"orientation must be 1 to 8, as in EXIF, not {self.orientation!r}")
        if self.pts is not None and len(self.pts) != len(self.frames):
            raise ValueError(f"{len(self.frames)} frames need as many pts, got {len(self.pts)}")
        if self.pts is not None and any(a >= b for a, b in pairwise(self.pts)):
            raise ValueError(f"pts must rise from frame to frame, not {list(self.pts)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioTrack:
    """One audio stream of a file to be made.

    Attributes:
        samples: ``(num_samples, num_channels)`` of uint8, int16, int32 or float32. One to eight
            channels.
        sample_rate: Samples a second.
        codec: FFmpeg encoder. ``pcm_*``, ``flac``, ``alac`` and ``wavpack`` are lossless here;
            ``aac``, ``ac3``, ``mp2``, ``libmp3lame``, ``libopus`` and ``vorbis`` (stereo only) are
            not.
        start: Time of the first sample, in samples.
        bit_rate: Bits a second, for lossy encoders; the default is the encoder's.
        options: More options of the encoder.
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
        if self.samples.ndim != 2 or self.samples.shape[1] not in _LAYOUTS:
            raise ValueError(
                f"samples must be (num_samples, num_channels) with 1 to 8 channels, "
                f"not of shape {self.samples.shape}"
            )
        if self.samples.dtype.name not in _SAMPLE_FORMATS:
            raise ValueError(
                f"samples must be one of {sorted(_SAMPLE_FORMATS)}, not {self.samples.dtype}"
            )


_SAMPLE_FORMATS = {"uint8": "u8", "int16": "s16", "int32": "s32", "float32": "flt"}
_LAYOUTS = dict(enumerate(("mono", "stereo", "2.1", "4.0", "5.0", "5.1", "6.1", "7.1"), start=1))


def video_options(track: VideoTrack) -> dict[str, str]:
    """Options for the encoder of a video stream."""
    options = dict(_OPTIONS.get(track.codec, {}))
    if track.codec == "libx264" and track.max_b_frames:
        # x264 makes no B frames when it is lossless; at 1 it is off by a level or two.
        options["qp"] = "1"
    if track.codec in _OPEN_GOP_CODECS:
        # Where key frames and B frames stand must follow from the arguments, not from the pictures.
        name = _OPEN_GOP_CODECS[track.codec]
        fixed = f"scenecut=0:b-adapt=0:open-gop={int(track.open_gop)}"
        structure = f"{fixed}:keyint={track.gop_size}:min-keyint={track.gop_size}"
        options[name] = ":".join(filter(None, [options.get(name), structure]))
    return options | _checked_options(track)


def time_base(track: VideoTrack) -> Fraction:
    """Seconds a tick of the pts of a video stream."""
    return track.time_base or 1 / Fraction(track.frame_rate)


def encoder_sample_format(track: AudioTrack) -> str:
    """The encoder's own format that is closest to the samples as they are."""
    given = sample_format(track)
    formats = [format.name for format in find_encoder(track.codec, "audio").audio_formats or ()]
    for name in (given, f"{given}p"):
        if name in formats:
            return name
    return formats[0] if formats else given


def sample_format(track: AudioTrack) -> str:
    """FFmpeg's name for the samples as they are: packed, of their own type."""
    return _SAMPLE_FORMATS[track.samples.dtype.name]


def channel_layout(track: AudioTrack) -> str:
    """FFmpeg's usual layout for the number of channels."""
    return _LAYOUTS[track.samples.shape[1]]


def audio_options(track: AudioTrack) -> dict[str, str]:
    """Options for the encoder of an audio stream."""
    return dict(_OPTIONS.get(track.codec, {})) | _checked_options(track)


def _checked_options(track: VideoTrack | AudioTrack) -> dict[str, str]:
    """The caller's options; FFmpeg would ignore those that the encoder does not have."""
    supported = CodecContext.create(track.codec, "w").supported_options
    names = {option.name for option in (*supported.generic, *supported.private)}
    if unknown := sorted(set(track.options) - names):
        raise ValueError(f"encoder {track.codec!r} has no option {', '.join(map(repr, unknown))}")
    return dict(track.options)
