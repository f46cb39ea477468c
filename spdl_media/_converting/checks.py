"""What frames must have in common before one array can hold them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, cast

from spdl_media.color_tags import COLOR_RANGES, COLORSPACES
from spdl_media.errors import ConvertError
from spdl_media.frames import AudioFrames, ImageFrames, VideoFrames, av_frames, facts_of
from spdl_media.planes import is_yuv

Pictures: TypeAlias = Sequence[VideoFrames | ImageFrames]


def check_counts(items: Pictures) -> None:
    """Refuse videos of unequal length, and those without frames."""
    first = items[0]
    if not isinstance(first, VideoFrames):
        return
    for position, item in enumerate(cast("Sequence[VideoFrames]", items)):
        if not len(item):
            raise ConvertError(
                f"there is no frame in the window {facts_of(item).window}", source=item.source
            )
        if len(item) != len(first):
            raise ConvertError(
                f"item 0 ({first.source}) has {len(first)} frames, but item {position} ({item.source}) has "
                f"{len(item)}. decode_packets(num_frames=) and tpad in the filter make them equal"
            )


def check_formats(items: Pictures) -> None:
    """Refuse pictures that differ in size, format or meaning of their colours, and those without pixels."""
    expected = None
    for position, item in enumerate(items):
        for index, frame in enumerate(av_frames(item)):
            found = frame.width, frame.height, frame.format.name
            expected = expected or found
            if found != expected:
                raise ConvertError(
                    f"{_where(items, 0, 0)} is {_in_words(expected)}, but "
                    f"{_where(items, position, index)} is {_in_words(found)}. One array holds one size and "
                    "format: give decode_packets a filter that scales and converts",
                    source=items[position].source,
                )
    width, height, pix_fmt = expected or (0, 0, "")
    if not (width and height):
        raise ConvertError(
            f"a frame of {width}x{height} {pix_fmt} has no pixels", source=items[0].source
        )
    if is_yuv(pix_fmt):
        _check_colors(items)


def colors_of(frame: Any) -> tuple[str | None, str | None]:
    """Matrix and range of a frame of FFmpeg's, as buffers name them; ``None`` for what is no YUV."""
    return matrix_and_range(frame) if is_yuv(frame.format.name) else (None, None)


def _check_colors(items: Pictures) -> None:
    """Refuse YUV numbers that mean different colours: nobody could tell them apart in one array."""
    expected = None
    for position, item in enumerate(items):
        for index, frame in enumerate(av_frames(item)):
            found = matrix_and_range(frame)
            expected = expected or found
            if found != expected:
                raise colors_differ(
                    (_where(items, 0, 0), expected),
                    (_where(items, position, index), found),
                    frame.format.name,
                    items[position].source,
                )


def colors_differ(
    one: tuple[str, tuple[str | None, str | None]],
    other: tuple[str, tuple[str | None, str | None]],
    pix_fmt: str,
    source: str,
) -> ConvertError:
    """The error for two pictures, each by its name and :func:`colors_of` it."""
    return ConvertError(
        f"{one[0]} has {_colors_in_words(one[1])}, but {other[0]} has {_colors_in_words(other[1])}, so equal "
        f"numbers of {pix_fmt} are different colours. Take RGB, or convert to one kind: pix_fmt='yuvj420p' "
        "is always of full range, and get_video_filter_desc(color_matrix='bt601', color_range='pc') says "
        "both",
        source=source,
    )


def matrix_and_range(frame: Any) -> tuple[str, str]:
    """What the numbers of a YUV frame of FFmpeg's mean, also if it does not say."""
    # BT.601 has two names, and is what pictures have that don't say.
    name = COLORSPACES.get(int(frame.colorspace), "bt601")
    full = frame.format.name.startswith("yuvj") or COLOR_RANGES.get(int(frame.color_range)) == "pc"
    return "bt601" if name in ("bt470bg", "smpte170m") else name, "pc" if full else "tv"


def _colors_in_words(colors: tuple[str | None, str | None]) -> str:
    return f"{colors[0]} {'full' if colors[1] == 'pc' else 'limited'} range"


def _where(items: Pictures, position: int, index: int) -> str:
    frame = f"frame {index} of " if isinstance(items[position], VideoFrames) else ""
    return f"{frame}item {position} ({items[position].source})"


def _in_words(format: tuple[int, int, str]) -> str:
    return f"{format[0]}x{format[1]} {format[2]}"


def check_audio(items: list[AudioFrames], *, pad: bool) -> None:
    """Refuse sound that differs in format or, without ``pad``, in length, and sound without samples."""
    expected = None
    for position, item in enumerate(items):
        if not len(item):
            raise ConvertError(
                f"there is no sample in the window {facts_of(item).window}", source=item.source
            )
        # A stream may change in its middle.
        for chunk in item.chunks:
            frame = chunk.frame
            found = frame.layout.nb_channels, frame.format.name, frame.sample_rate
            expected = expected or found
            if found != expected:
                raise ConvertError(
                    f"item 0 ({items[0].source}) is {_sound(expected)}, but item {position} "
                    f"({item.source}) is {_sound(found)}. One array holds one format: "
                    "get_audio_filter_desc(sample_rate=, num_channels=, sample_fmt=) converts"
                )
    lengths = [len(item) for item in items]
    if len(set(lengths)) > 1 and not pad:
        raise ConvertError(
            f"the items have different lengths: {_some(lengths)} samples. pad=True fills with silence to the "
            "longest; timestamp= and num_frames= cut"
        )


def _sound(format: tuple[int, str, int]) -> str:
    return f"{format[0]} channels {format[1]} at {format[2]} Hz"


def _some(lengths: list[int]) -> str:
    """At most eight of them, and the span of the rest."""
    shown = ", ".join(map(str, lengths[:8]))
    if len(lengths) <= 8:
        return shown
    return f"{shown}, ... ({len(lengths)} items of {min(lengths)} to {max(lengths)})"
