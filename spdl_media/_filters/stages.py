"""The stages that descriptions are made of, each a list of filters as text."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Literal, TypeAlias, get_args

from spdl_media._checks import check_choice, check_positive, did_you_mean
from spdl_media._ffmpeg import (
    is_color,
    is_pixel_format,
    is_sample_format,
)
from spdl_media.layouts import PIXEL_LAYOUTS, SAMPLE_DTYPES
from spdl_media.timing import Timestamp, parse_window

ScaleAlgo: TypeAlias = Literal[
    "fast_bilinear",
    "bilinear",
    "bicubic",
    "neighbor",
    "area",
    "bicublin",
    "gauss",
    "sinc",
    "lanczos",
    "spline",
]
ScaleMode: TypeAlias = Literal["pad", "crop"]
Quality: TypeAlias = Literal["accurate", "fast"]
ColorMatrix: TypeAlias = Literal["bt601", "bt709", "bt2020"]
ColorRange: TypeAlias = Literal["tv", "pc"]
Rate: TypeAlias = "int | float | Decimal | Fraction | str | tuple[int, int]"

# Of a fast bicubic, only luma is: chroma is bilinear, which takes 13% off the time and adds 0.03 levels.
_QUICK = {"bicubic": "bicublin"}

ACCURATE = "accurate_rnd+full_chroma_int+full_chroma_inp"

# Packed RGB -> planar RGB of the same depth, with alpha where the packed one has it.
PLANAR = {
    **dict.fromkeys(("rgb24", "bgr24", "rgb0", "bgr0", "0rgb", "0bgr"), "gbrp"),
    **dict.fromkeys(("rgba", "bgra", "argb", "abgr"), "gbrap"),
    **dict.fromkeys(("rgb48le", "rgb48be", "bgr48le", "bgr48be", "rgb48", "bgr48"), "gbrp16le"),
    **dict.fromkeys(
        ("rgba64le", "rgba64be", "bgra64le", "bgra64be", "rgba64", "bgra64"), "gbrap16le"
    ),
}
# Chroma is stored for at most 4x4 pixels, and FFmpeg's pad filter rounds sizes down to whole samples.
_CHROMA_STEP = 4
_COLOR = re.compile(
    r"([A-Za-z]+|(0x|#)[0-9A-Fa-f]{6}([0-9A-Fa-f]{2})?)(@(0x[0-9A-Fa-f]{1,2}|[0-9.]+))?\Z"
)
_RGB = re.compile("rgb|bgr|gbr")
_FORMAT_NAME = re.compile(r"[a-z0-9]+\Z")

# An example of each kind of format, what tells whether a name is one, and the usual ones for a hint.
_FORMATS: Mapping[str, tuple[str, Callable[[str], bool], tuple[str, ...]]] = {
    "pix_fmt": (
        "rgb24",
        is_pixel_format,
        tuple(name for name, layout in PIXEL_LAYOUTS.items() if layout.dtype == "uint8"),
    ),
    "sample_fmt": (
        "fltp",
        is_sample_format,
        (*SAMPLE_DTYPES, *(f"{name}p" for name in SAMPLE_DTYPES)),
    ),
}


def check_names(
    scale_algo: str,
    scale_mode: str | None,
    pix_fmt: str | None,
    pad_color: str,
    pad_mode: str | None,
    quality: str,
) -> None:
    """Refuse what FFmpeg would refuse later, in words that say what is allowed."""
    check_choice("scale_algo", scale_algo, get_args(ScaleAlgo))
    check_choice("scale_mode", scale_mode, (*get_args(ScaleMode), None))
    check_choice("quality", quality, get_args(Quality))
    if pix_fmt is not None:
        format_name("pix_fmt", pix_fmt)
    _check_color("pad_color", pad_color)
    if pad_mode is not None:
        _check_color("pad_mode", pad_mode)


def rate_and_window(frame_rate: Rate | None, timestamp: Timestamp | None) -> list[str]:
    """Repeat or leave out frames, then cut in time."""
    rate = [] if frame_rate is None else [f"fps={ratio(_rate(frame_rate))}"]
    return rate + trim("trim", timestamp)


def trim(name: str, timestamp: Timestamp | None) -> list[str]:
    """Cut in time, by ``trim`` or ``atrim``."""
    window = parse_window(timestamp)
    sides = (("start", window.start), ("end", window.end))
    options = [f"{side}={_microseconds(value)}" for side, value in sides if value is not None]
    return [f"{name}={':'.join(options)}"] if options else []


def color_options(matrix: str | None, range: str | None, pix_fmt: str | None) -> str:
    """What a scaler is told of the colours of its result, to be put behind its flags."""
    options = ""
    for name, option, value, allowed in (
        ("color_matrix", "out_color_matrix", matrix, get_args(ColorMatrix)),
        ("color_range", "out_range", range, get_args(ColorRange)),
    ):
        if value is None:
            continue
        check_choice(name, value, (*allowed, None))
        if pix_fmt is not None and _RGB.search(pix_fmt):
            raise ValueError(
                f"{name}={value!r} is for YUV, such as pix_fmt='yuv420p', and not for {pix_fmt}, whose "
                "numbers are the colours themselves"
            )
        options += f":{option}={value}"
    return options


def scale(
    width: int | None,
    height: int | None,
    algo: str,
    mode: str | None,
    formats: tuple[str, ...],
    pad_color: str,
    quality: str,
    colors: str,
) -> list[str]:
    """Scale, by way of these formats if any, and give it the exact size.

    The last of the formats has no chroma planes of another size, so that borders are exact. ``colors`` is
    what :func:`color_options` gives.
    """
    if width is None and height is None:
        return []
    for name, side in (("scale_width", width), ("scale_height", height)):
        if side is not None:
            check_positive(name, side)
    names = f"{algo}+{ACCURATE}" if quality == "accurate" else _QUICK.get(algo, algo)
    flags = f"flags={names}{colors}"
    converted = [f"format={name}" for name in formats]
    exact = not formats
    if width is None or height is None or mode is None:
        return [f"scale={_sides(width, height)}:{flags}", *converted]
    if mode == "crop":
        size = f"{width}:{height}:force_original_aspect_ratio=increase"
        return [f"scale={size}:{flags}", *converted, *crop(width, height, exact=exact)]
    border = _border(width, height, pad_color, exact=exact)
    fitted = _fitted_samples(width, height) if exact else _fitted(width, height)
    return [f"scale={fitted}:{flags}", *converted, *border]


# FFmpeg's own ways to keep the aspect ratio (-1 and force_original_aspect_ratio) round a side of a thin
# picture to 0, and then refuse it: a line 2000 pixels long and 3 high would not go into 224x224.


def _sides(width: int | None, height: int | None) -> str:
    """The size; a side that is not given keeps the aspect ratio, and has one pixel at least."""
    if width is None:
        return f"'max(1,round({height}*iw/ih))':{height}"
    return f"{width}:'max(1,round({width}*ih/iw))'" if height is None else f"{width}:{height}"


def _fitted(width: int, height: int) -> str:
    """The largest size of the picture's aspect ratio that fits, one pixel at least on each side."""
    across = f"max(1,min({width},round({height}*iw/ih)))"
    return f"'{across}':'max(1,min({height},round({width}*ih/iw)))'"


def _fitted_samples(width: int, height: int) -> str:
    """The same in whole samples of the result's chroma: FFmpeg's pad filter cuts off what is left over."""
    across = f"min(floor({width}/ohsub),round({height}*iw/ih/ohsub))*ohsub"
    down = f"min(floor({height}/ovsub),round({width}*ih/iw/ovsub))*ovsub"
    return f"'max(ohsub,{across})':'max(ovsub,{down})'"


def _border(width: int, height: int, color: str, *, exact: bool) -> list[str]:
    step = _CHROMA_STEP if exact else 1
    outer = [-(-side // step) * step for side in (width, height)]
    place = f"({width}-iw)/2:({height}-ih)/2"
    pad = f"pad={outer[0]}:{outer[1]}:{place}:color={color}"
    return [pad] if outer == [width, height] else [pad, f"crop={width}:{height}:0:0:exact=1"]


def crop(width: int | None, height: int | None, *, exact: bool) -> list[str]:
    """Cut out the middle; ``exact``: chroma may have its own size, and FFmpeg would round to it."""
    if width is None and height is None:
        return []
    sides = [
        whole if side is None else str(check_positive(name, side))
        for name, side, whole in (("crop_width", width, "iw"), ("crop_height", height, "ih"))
    ]
    if not exact:
        return [f"crop={sides[0]}:{sides[1]}"]
    # The size is not rounded to whole chroma samples, but the position is, so that chroma stays in place.
    step = _CHROMA_STEP
    place = [
        f"trunc(({inner}-{outer})/{2 * step})*{step}"
        for inner, outer in (("iw", "ow"), ("ih", "oh"))
    ]
    return [f"crop={sides[0]}:{sides[1]}:{place[0]}:{place[1]}:exact=1"]


def count(num_frames: int | None, pad_mode: str | None) -> list[str]:
    """Make it exactly so many frames."""
    if num_frames is None:
        return []
    end = check_positive("num_frames", num_frames)
    added = "stop_mode=clone" if pad_mode is None else f"stop_mode=add:color={pad_mode}"
    return [f"tpad=stop=-1:{added}", f"trim=end_frame={end}"]


def formats_on_the_way(pix_fmt: str | None, quality: str) -> tuple[str, ...]:
    """Formats through which scaling leads to packed RGB; none for other formats."""
    planar = PLANAR.get(pix_fmt or "")
    if planar is None or pix_fmt is None:
        return ()
    # Without alpha and more than 8 bits, which it would lose. Not yuv422p, though from JPEG it would be 0.2
    # levels truer: what is RGB comes back with other colours, because FFmpeg mistakes the range.
    return ("yuv420p", pix_fmt) if quality == "fast" and planar == "gbrp" else (planar,)


def own_filters(filter_desc: str | None) -> list[str]:
    """Put in what the caller wrote."""
    if filter_desc is None:
        return []
    if not isinstance(filter_desc, str):
        raise TypeError(f"filter_desc must be a str, such as 'hflip', not {filter_desc!r}")
    return [filter_desc] if filter_desc.strip() else []


def to_format(pix_fmt: str | None, colors: str, *, converted: bool) -> list[str]:
    """Name the final format, and put in a scaler that leads to it exactly, unless one has already."""
    named = [] if pix_fmt is None else [f"format={pix_fmt}"]
    if converted or not (named or colors):
        return named
    planar = [f"format={PLANAR[pix_fmt]}"] if pix_fmt in PLANAR else []
    return [f"scale=flags=bilinear+{ACCURATE}{colors}", *planar, *named]


def _rate(value: Rate) -> Fraction:
    try:
        rate = Fraction(*value) if isinstance(value, tuple) else Fraction(str(value))
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise ValueError(
            f"frame_rate must be a number, 'numerator/denominator' or a pair of int, not {value!r}"
        ) from error
    if rate <= 0:
        raise ValueError(f"frame_rate must be positive, not {value!r}")
    return rate


def ratio(value: Fraction) -> str:
    """Write a fraction as FFmpeg reads it."""
    return f"{value.numerator}/{value.denominator}"


def _microseconds(seconds: Fraction) -> str:
    # FFmpeg reads times to the microsecond; a frame that stands at a third of a second is in the window
    # that begins there, so times are rounded to the nearest, as it rounds them to ticks afterwards.
    count = math.floor(seconds * 1_000_000 + Fraction(1, 2))
    return f"{'-' if count < 0 else ''}{abs(count) // 1_000_000}.{abs(count) % 1_000_000:06d}"


def format_name(argument: Literal["pix_fmt", "sample_fmt"], name: str) -> str:
    """Check that FFmpeg has a format of this name."""
    example, exists, usual = _FORMATS[argument]
    if not isinstance(name, str):
        raise TypeError(f"{argument} must be a str, such as {example!r}, not {name!r}")
    if not (_FORMAT_NAME.match(name) and exists(name)):
        hint = did_you_mean(name.lower(), usual, likely=example)
        raise ValueError(
            f"{argument} must be one of FFmpeg's names, such as {example!r}, not {name!r}"
            f"{hint and '. ' + hint}"
        )
    return name


def _check_color(argument: str, color: str) -> None:
    if not (isinstance(color, str) and _COLOR.match(color) and is_color(color)):
        raise ValueError(
            f"{argument} must be a colour by name or as '#rrggbb', such as 'black', not {color!r}. "
            "See https://ffmpeg.org/ffmpeg-utils.html#Color"
        )
