"""Descriptions of filter graphs that carry the values they were written from.

    >>> desc = get_video_filter_desc(scale_width=224, scale_height=224)
    >>> desc.ops.width
    224

The builders return a ``str`` that carries its values: FFmpeg gets the text, everything else reads ``ops``.
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

__all__ = (
    "FilterDesc",
    "get_audio_filter_desc",
    "get_filter_desc",
    "get_video_filter_desc",
)


class FilterDesc(str):
    """Text of a filter graph that carries the values it was written from.

    Copies and pickles keep the values. What is made of the text, by joining or editing, is a plain ``str``.

    Attributes:
        ops: The values.
    """

    __slots__ = ("ops",)

    ops: PictureOps | SoundOps

    def __new__(cls, ops: PictureOps | SoundOps) -> Self:  # noqa: D102
        # A graph that does nothing: without any graph, images would not be turned upright.
        desc = super().__new__(cls, ",".join(filter_text(ops)) or "null")
        desc.ops = ops
        return desc

    def __reduce__(self) -> tuple[type[FilterDesc], tuple[PictureOps | SoundOps]]:
        # The text follows from the values, and not the other way round.
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
    """Write the filters for images, in this order: rate, window, scale, crop, count, your own, format.

    Args:
        frame_rate: Frames in a second. Frame ``k`` is the one that is shown at ``start + k / frame_rate``,
            with ``start`` that of the packets' window, or the time of the first frame. In a graph of text
            FFmpeg's filter ``fps`` does it, whose moments are whole multiples of ``1 / frame_rate``.
        timestamp: Window ``(start, end)`` in seconds on the stream's own clock. Not needed for packets
            that were demuxed with a window: it is cut before the graph.
        scale_width: Width in pixels. Without ``scale_height`` the aspect ratio is kept.
        scale_height: Height in pixels. Without ``scale_width`` the aspect ratio is kept.
        scale_algo: Name of FFmpeg's scaling algorithm.
        scale_mode: With both sides given, ``"pad"`` fits the whole image inside and puts a border
            around it, ``"crop"`` covers the whole size and cuts off what lies over it, ``None`` stretches.
            The result has exactly the size that was asked for.
        quality: ``"accurate"`` is exact. ``"auto"`` is the quickest conversion that is never farther from
            exact than FFmpeg's own: without scaling, RGB of 8 bits is FFmpeg's own (about one level off, as a
            graph of ``format=rgb24`` is), all else is exact. ``"fast"`` is quicker still: RGB is made of an
            image that was scaled with half of its chroma, and with a bilinear kernel for it where luma has
            a bicubic one: 1.2 to 1.6 levels off on photographs, more at sharp edges between colours.
        crop_width: Width of a piece from the middle, after scaling. Not above the image's.
        crop_height: Height of a piece from the middle.
        pix_fmt: FFmpeg's name of the pixel format of the result; ``None`` keeps what the filters give.
        num_frames: Exactly so many frames, as in SPDL: later ones are cut off, missing ones added. That of
            :func:`~spdl_media.decode_packets` and :func:`~spdl_media.load_video` is at most so many.
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
        The description, a ``str`` with the values as its ``ops``; ``None`` when there is nothing to do
        (every argument ``None``).

    Raises:
        ValueError: A size, rate or count that is not positive, an unknown name, or a matrix or range for RGB.
        TypeError: An argument of the wrong type.
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
    """Write the filters for audio, in this order: channels, rate, window, count, your own, format.

    Args:
        sample_rate: Samples of one channel in a second.
        num_channels: Channels, mixed up or down to FFmpeg's usual layout of that many.
        sample_fmt: FFmpeg's name of the sample format; a final ``p`` means one plane a channel.
        timestamp: Window ``(start, end)`` in seconds on the stream's own clock. Not needed for packets
            that were demuxed with a window: it is cut before the graph.
        num_frames: Exactly so many samples of each channel: later ones are cut off, silence is added.
        filter_desc: Filters of your own, put in before the conversion to ``sample_fmt``.

    Returns:
        The description, a ``str`` with the values as its ``ops``; ``None`` when there is nothing to do
        (every argument ``None``).

    Raises:
        ValueError: A rate or count that is not positive, or an unknown name.
        TypeError: An argument of the wrong type.
    """
    window = parse_window(timestamp)
    ops = SoundOps(sample_rate, num_channels, sample_fmt, window, num_frames, filter_desc)
    return FilterDesc(ops) if filter_text(ops) else None


def get_filter_desc(
    packets: VideoPackets | AudioPackets | None = None, **options: Any
) -> FilterDesc | None:
    """Write the filters for packets of either kind.

    Args:
        packets: Their kind decides between :func:`get_video_filter_desc` and :func:`get_audio_filter_desc`.
            Their window is not repeated: it is cut before the graph. Without packets, options that only
            audio has choose audio, and anything else chooses images.
        **options: The arguments of that function.

    Returns:
        The description; ``None`` when there is nothing to do.

    Raises:
        TypeError: Options of the other kind, or of both kinds.
        ValueError: As the two functions say.
    """
    # Both functions have keyword-only arguments alone, so these are all of them.
    for_audio = get_audio_filter_desc.__kwdefaults__ or {}
    for_video = get_video_filter_desc.__kwdefaults__ or {}
    defaults = for_audio | for_video
    if unknown := sorted(options.keys() - defaults.keys()):
        raise TypeError(f"get_filter_desc() got an unexpected keyword argument {unknown[0]!r}")
    # An option that says what would be anyway is for either kind.
    given = {name: value for name, value in options.items() if value != defaults[name]}
    video = [name for name in given if name not in for_audio]
    audio = [name for name in given if name not in for_video]
    if packets is None and video and audio:
        raise TypeError(
            f"{video[0]} is for images and {audio[0]} is for audio: one description serves one kind"
        )
    codec = getattr(packets, "codec", None)
    is_audio = bool(audio) if packets is None else hasattr(codec, "sample_rate")
    if not (packets is None or is_audio or hasattr(codec, "pix_fmt")):
        raise TypeError(f"packets must be audio, video or image packets, not {packets!r}")
    if wrong := video if is_audio else audio:
        kinds = ("audio", "images") if is_audio else ("video", "audio")
        raise TypeError(f"the packets are {kinds[0]}, but {wrong[0]} is for {kinds[1]}")
    return get_audio_filter_desc(**given) if is_audio else get_video_filter_desc(**given)
