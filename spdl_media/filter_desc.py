"""Build descriptions of filter graphs that keep the options they were built from.

    >>> desc = sm.get_video_filter_desc(scale_width=224, scale_height=224)
    >>> desc.ops.width
    224

The builders return a ``str`` with its options as ``ops``: FFmpeg gets the text, this package reads ``ops``.
"""

from __future__ import annotations

from typing import Any, Self

from spdl_media._checks import check_positive
from spdl_media.geometry import ScaleMode
from spdl_media.operations import (
    ColorMatrix,
    ColorRange,
    PictureOps,
    Quality,
    ScaleAlgo,
    SoundOps,
    filter_text,
)
from spdl_media.packets import AudioPackets, VideoPackets
from spdl_media.timing import Rate, Timestamp, parse_window

__all__ = ("FilterDesc", "get_audio_filter_desc", "get_filter_desc", "get_video_filter_desc")


class FilterDesc(str):
    """Text of a filter graph that keeps the options it was built from.

    Copies and pickles keep the options. Joining or editing the text gives a plain ``str``.

    Attributes:
        ops: The options.
    """

    __slots__ = ("ops",)

    ops: PictureOps | SoundOps

    def __new__(cls, ops: PictureOps | SoundOps) -> Self:  # noqa: D102
        # "null" is a graph that does nothing: without a graph, images would not be turned upright.
        desc = super().__new__(cls, ",".join(filter_text(ops)) or "null")
        desc.ops = ops
        return desc

    def __reduce__(self) -> tuple[type[FilterDesc], tuple[PictureOps | SoundOps]]:
        # The text is rebuilt from the options; the options cannot be read from the text.
        return FilterDesc, (self.ops,)


def get_video_filter_desc(
    *,
    frame_rate: Rate | None = None,
    timestamp: Timestamp | None = None,
    scale_width: int | None = None,
    scale_height: int | None = None,
    scale_algo: ScaleAlgo = "bicubic",
    scale_mode: ScaleMode | None = "pad",
    quality: Quality = "auto",
    crop_width: int | None = None,
    crop_height: int | None = None,
    pix_fmt: str | None = "rgb24",
    num_frames: int | None = None,
    pad_mode: str | None = None,
    pad_color: str = "black",
    color_matrix: ColorMatrix | None = None,
    color_range: ColorRange | None = None,
    filter_desc: str | None = None,
) -> FilterDesc | None:
    """Build the filters for images, in this order: rate, window, scale, crop, count, custom, format.

    Args:
        frame_rate: Frames per second. Frame ``k`` is the one shown at ``start + k / frame_rate``, where
            ``start`` is that of the packets' window, or the time of the first frame. If the text is run as
            a plain graph, FFmpeg's ``fps`` filter samples at whole multiples of ``1 / frame_rate``.
        timestamp: Window ``(start, end)`` in seconds on the stream's own clock. Not needed for packets
            that were demuxed with a window, which is applied before the graph.
        scale_width: Width in pixels. Without ``scale_height`` the aspect ratio is kept.
        scale_height: Height in pixels. Without ``scale_width`` the aspect ratio is kept.
        scale_algo: FFmpeg's scaling algorithm, such as ``"bicubic"``, ``"bilinear"`` or ``"area"``.
        scale_mode: With both sides given, ``"pad"`` fits the whole image inside and adds a border,
            ``"crop"`` covers the whole size and crops the excess, ``None`` stretches. The result has exactly
            the requested size.
        quality: ``"accurate"`` is exact. ``"auto"`` is the fastest conversion that is never less exact than
            FFmpeg's default: 8-bit RGB without scaling uses FFmpeg's default conversion (about one level off,
            as ``format=rgb24`` is), everything else is exact. ``"fast"`` is faster still: the image is scaled
            as 4:2:0 before it becomes RGB, with a bilinear kernel for chroma where luma has a bicubic one.
            It is 1.2 to 1.6 levels off on photographs, more at sharp edges between colours.
        crop_width: Width of the centre crop after scaling, at most that of the image.
        crop_height: Height of the centre crop.
        pix_fmt: FFmpeg's name of the pixel format of the result; ``None`` keeps the format of the filters.
        num_frames: Exact number of frames, as in SPDL: later ones are dropped, missing ones added. The
            ``num_frames`` of :func:`~spdl_media.decode_packets` and :func:`~spdl_media.load_video` is a
            maximum.
        pad_mode: The frames added for ``num_frames``: ``None`` repeats the last one, a colour (a name or
            ``"#rrggbb"``) adds frames of that colour.
        pad_color: Colour of the border that ``scale_mode="pad"`` adds.
        color_matrix: Matrix of a YUV result, by the name of its standard. ``None`` keeps that of the file,
            or BT.601 for RGB input.
        color_range: Range of a YUV result: ``"pc"`` is full, ``"tv"`` limited. ``None`` keeps that of the
            file; RGB input gives limited range, or full range in the ``yuvj`` formats.
        filter_desc: Custom filters, inserted before the conversion to ``pix_fmt``. After scaling to an RGB
            format they get planar RGB, else the decoder's format.

    Returns:
        The description, a ``str`` with the options as ``ops``; ``None`` if there is nothing to do (every
        argument is ``None``).

    Raises:
        ValueError: A size, rate or count is not positive, a name is unknown, or a matrix or range is given
            for RGB.
        TypeError: An argument has the wrong type.
    """
    for name, side in (("scale_width", scale_width), ("scale_height", scale_height)):
        if side is not None:
            check_positive(name, side)
    ops = PictureOps(
        width=scale_width,
        height=scale_height,
        pix_fmt=pix_fmt,
        scale_mode=scale_mode,
        scale_algo=scale_algo,
        quality=quality,
        frame_rate=frame_rate,
        window=parse_window(timestamp),
        crop_width=crop_width,
        crop_height=crop_height,
        num_frames=num_frames,
        pad_mode=pad_mode,
        pad_color=pad_color,
        color_matrix=color_matrix,
        color_range=color_range,
        filter_desc=filter_desc,
    )
    return FilterDesc(ops) if filter_text(ops) else None


def get_audio_filter_desc(
    *,
    sample_rate: int | None = None,
    num_channels: int | None = None,
    sample_fmt: str | None = "fltp",
    timestamp: Timestamp | None = None,
    num_frames: int | None = None,
    filter_desc: str | None = None,
) -> FilterDesc | None:
    """Build the filters for audio, in this order: channels, rate, window, count, custom, format.

    Args:
        sample_rate: Samples per second and channel. ``None`` keeps the rate.
        num_channels: Number of channels, mixed up or down to FFmpeg's default layout for that number.
            ``None`` keeps the channels.
        sample_fmt: FFmpeg's name of the sample format; a final ``p`` means one plane per channel. ``None``
            keeps the format.
        timestamp: Window ``(start, end)`` in seconds on the stream's own clock. Not needed for packets
            that were demuxed with a window, which is applied before the graph.
        num_frames: Exact number of samples per channel: later ones are dropped, silence is added.
        filter_desc: Custom filters, inserted before the conversion to ``sample_fmt``.

    Returns:
        The description, a ``str`` with the options as ``ops``; ``None`` if there is nothing to do (every
        argument is ``None``).

    Raises:
        ValueError: A rate or count is not positive, or a name is unknown.
        TypeError: An argument has the wrong type.
    """
    window = parse_window(timestamp)
    ops = SoundOps(sample_rate, num_channels, sample_fmt, window, num_frames, filter_desc)
    return FilterDesc(ops) if filter_text(ops) else None


def get_filter_desc(
    packets: VideoPackets | AudioPackets | None = None, **options: Any
) -> FilterDesc | None:
    """Build the filters for packets of either kind.

    Args:
        packets: Their kind chooses :func:`get_video_filter_desc` or :func:`get_audio_filter_desc`. The
            window of the packets is not part of the description: it is applied before the graph. Without
            packets, an option that only audio has chooses audio, anything else chooses images.
        **options: Arguments of the chosen function.

    Returns:
        The description; ``None`` if there is nothing to do.

    Raises:
        TypeError: ``packets`` are none, or the chosen function has no such option.
        ValueError: The chosen function refuses a value.
    """
    if packets is None:
        is_audio = not options.keys().isdisjoint(("sample_rate", "num_channels", "sample_fmt"))
    elif isinstance(packets, AudioPackets | VideoPackets):
        is_audio = isinstance(packets, AudioPackets)
    else:
        raise TypeError(f"packets must be audio, video or image packets, not {packets!r}")
    return get_audio_filter_desc(**options) if is_audio else get_video_filter_desc(**options)
