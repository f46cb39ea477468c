"""Texts of filter graphs for what is wanted most often: rate, window, size, count and format.

    scale=224:224:flags=bicubic+accurate_rnd+full_chroma_int+full_chroma_inp,format=gbrp,format=rgb24

RGB is made in two moves: FFmpeg's scaler writes planar RGB (``gbrp``), which is then interleaved. From
every format tried that equals one accurate step to ``rgb24`` (at some odd widths, but for one level in one
of a thousand values), and takes less time than even the inaccurate step.
500x375 4:2:0 to 224x224, bicubic, microseconds and mean (largest) difference in levels:

    scale to rgb24, FFmpeg's default flags    316    3.4-3.7 (76)
    scale to rgb24, accurate flags            671    0
    scale to gbrp, accurate flags, rgb24      195    0

Without scaling the cost is other: FFmpeg's quick conversion takes each chroma sample for a square of pixels.
1920x1280 4:2:0, against the exact equations with bilinear chroma:

    format=rgb24                              640    0.85-1.28 (38)
    scale to rgb24, accurate flags           7000    0.25 (1)
    scale to gbrp, accurate flags, rgb24     4080    0.25 (1)

(At odd heights, where there is no quick conversion, planar RGB is the fastest there, too.) The builders take
the true one; ``filter_desc="format=rgb24"``, given to the decoder as it is, takes the quick one.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any, Protocol

from spdl_media._checks import check_positive
from spdl_media._filters.graph_syntax import quote_value
from spdl_media._filters.stages import (
    ColorMatrix,
    ColorRange,
    Quality,
    Rate,
    ScaleAlgo,
    ScaleMode,
    check_names,
    color_options,
    count,
    crop,
    format_name,
    formats_on_the_way,
    own_filters,
    rate_and_window,
    ratio,
    scale,
    to_format,
    trim,
)
from spdl_media.orientation import swaps_sides
from spdl_media.timing import Timestamp

__all__ = (
    "get_abuffer_desc",
    "get_audio_filter_desc",
    "get_buffer_desc",
    "get_filter_desc",
    "get_video_filter_desc",
)


# What the builders read of codecs and packets, whose own modules come later: this one writes text, and asks
# FFmpeg nothing but whether a name is one.


class _VideoCodec(Protocol):
    @property
    def width(self) -> int: ...
    @property
    def height(self) -> int: ...
    @property
    def pix_fmt(self) -> str | None: ...
    @property
    def time_base(self) -> Fraction: ...
    @property
    def frame_rate(self) -> Fraction | None: ...
    @property
    def sample_aspect_ratio(self) -> Fraction | None: ...


class _AudioCodec(Protocol):
    @property
    def sample_rate(self) -> int: ...
    @property
    def sample_fmt(self) -> str | None: ...
    @property
    def channel_layout(self) -> str: ...


class _VideoPackets(Protocol):
    @property
    def codec(self) -> _VideoCodec: ...
    @property
    def orientation(self) -> int: ...


class _AudioPackets(Protocol):
    @property
    def codec(self) -> _AudioCodec: ...


def get_video_filter_desc(
    *,
    frame_rate: Rate | None = None,
    timestamp: Timestamp | None = None,
    scale_width: int | None = None,
    scale_height: int | None = None,
    scale_algo: ScaleAlgo = "bicubic",
    scale_mode: ScaleMode | None = "pad",
    quality: Quality = "accurate",
    crop_width: int | None = None,
    crop_height: int | None = None,
    pix_fmt: str | None = "rgb24",
    num_frames: int | None = None,
    pad_mode: str | None = None,
    pad_color: str = "black",
    color_matrix: ColorMatrix | None = None,
    color_range: ColorRange | None = None,
    filter_desc: str | None = None,
) -> str | None:
    """Write the filters for pictures, in this order: rate, window, scale, crop, count, your own, format.

    Args:
        frame_rate: Frames in a second; frames are repeated or left out.
        timestamp: Window ``(start, end)`` in seconds on the stream's own clock. Not needed for packets
            that were demuxed with a window: it is cut before the graph.
        scale_width: Width in pixels. Without ``scale_height`` the aspect ratio is kept.
        scale_height: Height in pixels. Without ``scale_width`` the aspect ratio is kept.
        scale_algo: Name of FFmpeg's scaling algorithm.
        scale_mode: With both sides given, ``"pad"`` fits the whole picture inside and puts a border
            around it, ``"crop"`` covers the whole size and cuts off what lies over it, ``None`` stretches.
            The result has exactly the size that was asked for.
        quality: ``"fast"`` makes RGB of a picture that was scaled with half of its chroma, and with a
            bilinear kernel for it where luma has a bicubic one: 1.2 to 1.6 levels off on photographs, more at
            sharp edges between colours.
        crop_width: Width of a piece from the middle, after scaling. Not above the picture's.
        crop_height: Height of a piece from the middle.
        pix_fmt: FFmpeg's name of the pixel format of the result; ``None`` keeps what the filters give.
        num_frames: Exactly so many frames: later ones are cut off, missing ones added.
        pad_mode: The frames added for ``num_frames``: ``None`` repeats the last one, a colour (a name or
            ``"#rrggbb"``) makes frames of that colour.
        pad_color: Colour of the border that ``scale_mode="pad"`` adds.
        color_matrix: Matrix of a YUV result, by the name of its standard. ``None`` keeps the file's; what is
            made from RGB has BT.601.
        color_range: ``"pc"`` for a YUV result of full range, ``"tv"`` of limited. ``None`` keeps the
            file's; what is made from RGB is of limited range, in the ``yuvj`` formats of full.
        filter_desc: Filters of your own, put in before the conversion to ``pix_fmt``. After scaling to an
            RGB format they see planar RGB, else what the decoder gives.

    Returns:
        The description, or ``None`` when there is nothing to do (every argument ``None``).

    Raises:
        ValueError: A size, rate or count that is not positive, an unknown name, or a matrix or range for RGB.
        TypeError: An argument of the wrong type.
    """
    check_names(scale_algo, scale_mode, pix_fmt, pad_color, pad_mode, quality)
    scaled = scale_width is not None or scale_height is not None
    colors = color_options(color_matrix, color_range, pix_fmt)
    formats = formats_on_the_way(pix_fmt, quality) if scaled else ()
    filters = [
        *rate_and_window(frame_rate, timestamp),
        *scale(
            scale_width, scale_height, scale_algo, scale_mode, formats, pad_color, quality, colors
        ),
        *crop(crop_width, crop_height, exact=not formats),
        *count(num_frames, pad_mode),
        *own_filters(filter_desc),
        *to_format(pix_fmt, colors, converted=scaled and (bool(formats) or filter_desc is None)),
    ]
    return ",".join(filters) or None


def get_audio_filter_desc(
    *,
    sample_rate: int | None = None,
    num_channels: int | None = None,
    sample_fmt: str | None = "fltp",
    timestamp: Timestamp | None = None,
    num_frames: int | None = None,
    filter_desc: str | None = None,
) -> str | None:
    """Write the filters for sound, in this order: channels, rate, window, count, your own, format.

    Args:
        sample_rate: Samples of one channel in a second.
        num_channels: Channels, mixed up or down to FFmpeg's usual layout of that many.
        sample_fmt: FFmpeg's name of the sample format; a final ``p`` means one plane a channel.
        timestamp: Window ``(start, end)`` in seconds on the stream's own clock. Not needed for packets
            that were demuxed with a window: it is cut before the graph.
        num_frames: Exactly so many samples of each channel: later ones are cut off, silence is added.
        filter_desc: Filters of your own, put in before the conversion to ``sample_fmt``.

    Returns:
        The description, or ``None`` when there is nothing to do (every argument ``None``).

    Raises:
        ValueError: A rate or count that is not positive, or an unknown name.
        TypeError: An argument of the wrong type.
    """
    filters = []
    if num_channels is not None:
        filters.append(f"aformat=channel_layouts={check_positive('num_channels', num_channels)}c")
    if sample_rate is not None:
        filters.append(f"aresample={check_positive('sample_rate', sample_rate)}")
    filters += trim("atrim", timestamp)
    if num_frames is not None:
        end = check_positive("num_frames", num_frames)
        filters += [f"apad=whole_len={end}", f"atrim=end_sample={end}"]
    filters += own_filters(filter_desc)
    if sample_fmt is not None:
        filters.append(f"aformat=sample_fmts={format_name('sample_fmt', sample_fmt)}")
    return ",".join(filters) or None


def get_filter_desc(
    packets: _VideoPackets | _AudioPackets | None = None,
    *,
    frame_rate: Rate | None = None,
    timestamp: Timestamp | None = None,
    scale_width: int | None = None,
    scale_height: int | None = None,
    scale_algo: ScaleAlgo = "bicubic",
    scale_mode: ScaleMode | None = "pad",
    quality: Quality = "accurate",
    crop_width: int | None = None,
    crop_height: int | None = None,
    pix_fmt: str | None = "rgb24",
    num_frames: int | None = None,
    pad_mode: str | None = None,
    pad_color: str = "black",
    color_matrix: ColorMatrix | None = None,
    color_range: ColorRange | None = None,
    sample_rate: int | None = None,
    num_channels: int | None = None,
    sample_fmt: str | None = "fltp",
    filter_desc: str | None = None,
) -> str | None:
    """Write the filters for packets of either kind.

    With packets, their kind decides between :func:`get_video_filter_desc` and :func:`get_audio_filter_desc`,
    whose arguments these are. Their window is not repeated: it is cut before the graph. Without packets,
    arguments that only sound has choose sound, and anything else chooses pictures.

    Returns:
        The description, or ``None`` when there is nothing to do.

    Raises:
        TypeError: Arguments of the other kind, or of both kinds.
        ValueError: As the two functions say.
    """
    video = {
        "frame_rate": frame_rate is not None,
        "scale_width": scale_width is not None,
        "scale_height": scale_height is not None,
        "scale_algo": scale_algo != "bicubic",
        "scale_mode": scale_mode != "pad",
        "quality": quality != "accurate",
        "crop_width": crop_width is not None,
        "crop_height": crop_height is not None,
        "pix_fmt": pix_fmt != "rgb24",
        "pad_mode": pad_mode is not None,
        "pad_color": pad_color != "black",
        "color_matrix": color_matrix is not None,
        "color_range": color_range is not None,
    }
    audio = {
        "sample_rate": sample_rate is not None,
        "num_channels": num_channels is not None,
        "sample_fmt": sample_fmt != "fltp",
    }
    if _is_audio(packets, [k for k, v in video.items() if v], [k for k, v in audio.items() if v]):
        return get_audio_filter_desc(
            sample_rate=sample_rate,
            num_channels=num_channels,
            sample_fmt=sample_fmt,
            timestamp=timestamp,
            num_frames=num_frames,
            filter_desc=filter_desc,
        )
    return get_video_filter_desc(
        frame_rate=frame_rate,
        timestamp=timestamp,
        scale_width=scale_width,
        scale_height=scale_height,
        scale_algo=scale_algo,
        scale_mode=scale_mode,
        quality=quality,
        crop_width=crop_width,
        crop_height=crop_height,
        pix_fmt=pix_fmt,
        num_frames=num_frames,
        pad_mode=pad_mode,
        pad_color=pad_color,
        color_matrix=color_matrix,
        color_range=color_range,
        filter_desc=filter_desc,
    )


def get_buffer_desc(
    source: _VideoCodec | _VideoPackets, label: str | None = None, pix_fmt: str | None = None
) -> str:
    """Write the source node through which frames of a stream enter a :class:`~spdl_media.FilterGraph`.

    Args:
        source: Codec of a video, or packets. Packets know how the pictures stand, and decoding turns them
            upright, so the size named for packets is the upright one.
        label: Name of the input, as in ``buffer@label``, for :meth:`FilterGraph.add_frames`.
        pix_fmt: Pixel format of the frames, where they are converted before they enter.

    Returns:
        The text of the node, to be followed by its output label or ``,``.

    Raises:
        ValueError: The size or format is not known before a frame is decoded, or a bad label or name.
    """
    orientation: int = getattr(source, "orientation", 1)
    any_source: Any = source
    codec: _VideoCodec = getattr(any_source, "codec", any_source)
    pix_fmt = codec.pix_fmt if pix_fmt is None else format_name("pix_fmt", pix_fmt)
    if not (codec.width and codec.height and pix_fmt):
        raise ValueError(
            "the size and the pixel format of this stream are known once a frame is decoded; leave the "
            "input of the FilterGraph open, as in '[in]scale=64:48', and it takes them from the first frame"
        )
    sides = (codec.width, codec.height)
    width, height = reversed(sides) if swaps_sides(orientation) else sides
    aspect = codec.sample_aspect_ratio or Fraction(1)
    if swaps_sides(orientation):
        aspect = 1 / aspect
    rate = f":frame_rate={ratio(codec.frame_rate)}" if codec.frame_rate else ""
    return (
        f"buffer{_label(label)}=video_size={width}x{height}:pix_fmt={pix_fmt}:"
        f"time_base={ratio(codec.time_base)}:pixel_aspect={ratio(aspect)}{rate}"
    )


def get_abuffer_desc(
    source: _AudioCodec | _AudioPackets, label: str | None = None, sample_fmt: str | None = None
) -> str:
    """Write the source node through which sound enters a :class:`~spdl_media.FilterGraph`.

    Args:
        source: Codec of the sound, or packets.
        label: Name of the input, as in ``abuffer@label``, for :meth:`FilterGraph.add_frames`.
        sample_fmt: Sample format of the frames, where they are converted before they enter.

    Returns:
        The text of the node, to be followed by its output label or ``,``.

    Raises:
        ValueError: The sample format is not known before a frame is decoded, or a bad label or name.
    """
    any_source: Any = source
    codec: _AudioCodec = getattr(any_source, "codec", any_source)
    if sample_fmt is not None:
        format_name("sample_fmt", sample_fmt)
    if not (sample_fmt or codec.sample_fmt):
        raise ValueError(
            "the sample format of this stream is known once a frame is decoded; say it as sample_fmt=, or "
            "leave the input of the FilterGraph open"
        )
    return (
        f"abuffer{_label(label)}=time_base=1/{codec.sample_rate}:sample_rate={codec.sample_rate}:"
        f"sample_fmt={sample_fmt or codec.sample_fmt}:channel_layout={quote_value(codec.channel_layout)}"
    )


def _is_audio(packets: object, video: list[str], audio: list[str]) -> bool:
    if packets is None:
        if video and audio:
            raise TypeError(
                f"{video[0]} is for pictures and {audio[0]} is for sound: one description serves one kind"
            )
        return bool(audio)
    codec = getattr(packets, "codec", None)
    is_audio = hasattr(codec, "sample_rate")
    if not is_audio and not hasattr(codec, "pix_fmt"):
        raise TypeError(f"packets must be audio, video or image packets, not {packets!r}")
    if wrong := video if is_audio else audio:
        kinds = ("audio", "pictures") if is_audio else ("video", "sound")
        raise TypeError(f"the packets are {kinds[0]}, but {wrong[0]} is for {kinds[1]}")
    return is_audio


def _label(label: str | None) -> str:
    if label is None:
        return ""
    if not re.match(r"[A-Za-z0-9_.-]+\Z", label):
        raise ValueError(f"label must be made of letters, digits, '_', '.' and '-', not {label!r}")
    return f"@{label}"
