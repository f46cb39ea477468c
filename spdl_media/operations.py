"""Operations on images and audio as values, and the FFmpeg filters that perform them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Literal, TypeAlias, get_args

from spdl_media._checks import check_choice, check_positive
from spdl_media._ffmpeg import is_color
from spdl_media.formats import PLANAR, format_name
from spdl_media.geometry import CHROMA_GRID, Box, ScaleMode
from spdl_media.timing import Rate, Window, parse_rate

__all__ = ("PictureOps", "SoundOps")

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
Quality: TypeAlias = Literal["accurate", "auto", "fast"]
ColorMatrix: TypeAlias = Literal["bt601", "bt709", "bt2020"]
ColorRange: TypeAlias = Literal["tv", "pc"]

_SCALE_ALGOS, _SCALE_MODES = get_args(ScaleAlgo), (*get_args(ScaleMode), None)
_QUALITIES = get_args(Quality)

ACCURATE = "accurate_rnd+full_chroma_int+full_chroma_inp"
# quality="fast": a bilinear kernel for chroma with a bicubic one for luma. 13% less time, error +0.03 levels.
_QUICK_ALGO = {"bicubic": "bicublin"}
# Characters of colours, none of which needs quotes in a graph.
_COLOR = re.compile(r"[A-Za-z0-9#@.]+\Z")
_RGB = re.compile("rgb|bgr|gbr")


@dataclass(frozen=True, slots=True)
class PictureOps:
    """Operations on images, in this order: cut, rate, window, scale, crop, count, custom filters, format.

    Values are checked on construction. :func:`get_video_filter_desc` documents those that are not below.

    Attributes:
        box: ``(x, y, width, height)`` in the upright image, cropped before all other operations.
        mirror: Mirror the box, or the whole image, left to right.
        window: Keep frames with ``start <= t < end`` on the stream's own clock.

    Raises:
        ValueError: A size, rate or count is not positive, a name is unknown, or RGB has a matrix or range.
        TypeError: A value has the wrong type.
    """

    width: int | None = None
    height: int | None = None
    pix_fmt: str | None = "rgb24"
    scale_mode: ScaleMode | None = "pad"
    scale_algo: ScaleAlgo = "bicubic"
    quality: Quality = "accurate"
    frame_rate: Rate | None = None
    window: Window = Window()
    box: Box | None = None
    mirror: bool = False
    crop_width: int | None = None
    crop_height: int | None = None
    num_frames: int | None = None
    pad_mode: str | None = None
    pad_color: str = "black"
    color_matrix: ColorMatrix | None = None
    color_range: ColorRange | None = None
    filter_desc: str | None = None
    _uncut: PictureOps | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_choice("scale_algo", self.scale_algo, _SCALE_ALGOS)
        check_choice("scale_mode", self.scale_mode, _SCALE_MODES)
        check_choice("quality", self.quality, _QUALITIES)
        _make_positive(self, "width", "height", "crop_width", "crop_height", "num_frames")
        if self.pix_fmt is not None:
            format_name("pix_fmt", self.pix_fmt)
        if self.pad_color != "black":
            _check_color("pad_color", self.pad_color)
        if self.pad_mode is not None:
            _check_color("pad_mode", self.pad_mode)
        if self.frame_rate is not None:
            object.__setattr__(self, "frame_rate", parse_rate(self.frame_rate))
        if self.color_matrix is not None or self.color_range is not None:
            _check_matrix_and_range(self)
        if self.filter_desc is not None:
            _check_own_filters(self, self.filter_desc)

    @property
    def is_scaled(self) -> bool:
        """Whether the image is scaled."""
        return self.width is not None or self.height is not None

    @property
    def is_conversion(self) -> bool:
        """Whether only a cut comes before the conversion to ``pix_fmt``."""
        is_cropped = (self.crop_width, self.crop_height) != (None, None)
        return self.gives_one and not (self.is_scaled or is_cropped)

    @property
    def is_exact_conversion(self) -> bool:
        """Whether only a cut comes before an exact conversion to ``pix_fmt``."""
        return self.is_conversion and not self.uses_default_conversion

    @property
    def keeps_frames(self) -> bool:
        """Whether frames are not changed at all."""
        asked = (self.pix_fmt, self.box, self.color_matrix, self.color_range)
        return self.is_conversion and not self.mirror and asked == (None,) * 4

    @property
    def gives_one(self) -> bool:
        """Whether each input frame gives one output frame without delay."""
        in_time = (self.window.start, self.window.end, self.num_frames, self.frame_rate)
        return (*in_time, self.filter_desc) == (None,) * 5

    @property
    def formats(self) -> tuple[str, ...]:
        """Pixel formats of the scaler on the way to packed RGB; empty for other results."""
        planar = PLANAR.get(self.pix_fmt or "")
        if planar is None or self.pix_fmt is None:
            return ()
        # yuv420p only for 8-bit RGB without alpha, which it cannot hold. yuv422p would be 0.2 levels more
        # exact for JPEG, but FFmpeg confuses the range of RGB input, whose colours would change.
        return ("yuv420p", self.pix_fmt) if self._is_fast and planar == "gbrp" else (planar,)

    @property
    def flags(self) -> str:
        """Flags of the scaler: with ``scale_algo`` if the image is scaled, else for a conversion only."""
        algo = self.scale_algo if self.is_scaled else "bilinear"
        return _QUICK_ALGO.get(algo, algo) if self._is_fast else f"{algo}+{ACCURATE}"

    @property
    def uses_default_conversion(self) -> bool:
        """Whether FFmpeg's default conversion is used, as for a graph of ``format=`` only."""
        # 1920x1280 4:2:0 to rgb24, microseconds and mean (largest) difference from the exact equations:
        #     format=rgb24                              640    0.85-1.28 (38)
        #     scale to rgb24, accurate flags           7000    0.25 (1)
        #     scale to gbrp, accurate flags, rgb24     4080    0.25 (1)
        # FFmpeg has a fast conversion only to packed 8-bit RGB; the one to rgb48 overflows.
        is_packed = PLANAR.get(self.pix_fmt or "") in ("gbrp", "gbrap")
        return self.quality != "accurate" and not self.is_scaled and is_packed

    @property
    def _is_fast(self) -> bool:
        return self.quality == "fast" and self.is_scaled

    def with_cut(self, box: Box | None, *, mirror: bool) -> PictureOps:
        """Return the same operations with another cut. The box must be valid; it is not checked."""
        # Each image of a batch has its own box, and dataclasses.replace would check all values again.
        ops = object.__new__(PictureOps)
        for name in PictureOps.__slots__:
            object.__setattr__(ops, name, getattr(self, name))
        for name, value in (("box", box), ("mirror", mirror), ("_uncut", self.uncut)):
            object.__setattr__(ops, name, value)
        return ops

    def in_planes(self) -> PictureOps:
        """Return operations for NCHW arrays: planar instead of packed RGB, if the values are the same."""
        # The scaler produces planar RGB first, so a 224x224 image in NCHW takes 0.1 ms less, as uint8 or
        # float. In planar RGB, crops have other offsets, and other qualities convert differently.
        is_same = self.pix_fmt == "rgb24" and self.quality == "accurate"
        if is_same and None not in (self.width, self.height) and self.scale_mode != "crop":
            return replace(self, pix_fmt="gbrp")
        return self

    @property
    def uncut(self) -> PictureOps:
        """The same operations without box and mirroring: one value for all images of a batch."""
        if self.box is None and not self.mirror:
            return self
        return self._uncut or replace(self, box=None, mirror=False)


@dataclass(frozen=True, slots=True)
class SoundOps:
    """Operations on audio, in this order: channels, rate, window, count, custom filters, format.

    Values are checked on construction; :func:`get_audio_filter_desc` documents them.

    Raises:
        ValueError: A rate or count is not positive, or a name is unknown.
        TypeError: A value has the wrong type.
    """

    sample_rate: int | None = None
    num_channels: int | None = None
    sample_fmt: str | None = "fltp"
    window: Window = Window()
    num_frames: int | None = None
    filter_desc: str | None = None

    def __post_init__(self) -> None:
        _make_positive(self, "sample_rate", "num_channels", "num_frames")
        if self.sample_fmt is not None:
            format_name("sample_fmt", self.sample_fmt)
        if self.filter_desc is not None:
            _check_own_filters(self, self.filter_desc)


Desc: TypeAlias = str | PictureOps | None
"""What filters frames: a description, or its operations. ``None`` keeps frames as the decoder gives them."""


def picture_ops(desc: object) -> PictureOps | None:
    """Return the operations of a description; ``None``: it is a custom graph, or for audio."""
    # `desc` may also be operations, which are not written as text for single images of a batch.
    ops = getattr(desc, "ops", desc)
    return ops if isinstance(ops, PictureOps) else None


def sound_ops(desc: object) -> SoundOps | None:
    """Return the operations of a description; ``None``: it is a custom graph, or for images."""
    ops = getattr(desc, "ops", desc)
    return ops if isinstance(ops, SoundOps) else None


def _make_positive(ops: PictureOps | SoundOps, *names: str) -> None:
    for name in names:
        value = getattr(ops, name)
        if value is not None:
            # NumPy's integers are converted to int, so that equal operations have equal text.
            object.__setattr__(ops, name, check_positive(name, value))


def _check_matrix_and_range(ops: PictureOps) -> None:
    check_choice("color_matrix", ops.color_matrix, (*get_args(ColorMatrix), None))
    check_choice("color_range", ops.color_range, (*get_args(ColorRange), None))
    for name in ("color_matrix", "color_range"):
        value = getattr(ops, name)
        # _RGB includes gbr formats, which are planar RGB.
        if value is not None and ops.pix_fmt is not None and _RGB.search(ops.pix_fmt):
            raise ValueError(
                f"{name}={value!r} is for YUV, such as pix_fmt='yuv420p', and not for {ops.pix_fmt}, whose "
                "numbers are the colours themselves"
            )


def _check_own_filters(ops: PictureOps | SoundOps, filters: str) -> None:
    if not isinstance(filters, str):
        raise TypeError(f"filter_desc must be a str, such as 'hflip', not {filters!r}")
    if not filters.strip():
        object.__setattr__(ops, "filter_desc", None)


def _check_color(argument: str, color: str) -> None:
    if not (isinstance(color, str) and _COLOR.match(color) and is_color(color)):
        raise ValueError(
            f"{argument} must be a colour by name or as '#rrggbb', such as 'black', not {color!r}. "
            "See https://ffmpeg.org/ffmpeg-utils.html#Color"
        )


# Numbers of channels for which FFmpeg has a default layout.
_WITH_LAYOUT = frozenset({*range(1, 9), 10, 12, 14, 16, 24})


def filter_text(ops: PictureOps | SoundOps) -> list[str]:
    """Return the filters that perform operations, as text for FFmpeg's graph."""
    own = [ops.filter_desc] if ops.filter_desc else []
    count = ops.num_frames
    if isinstance(ops, SoundOps):
        # "c" is the default layout, "C" channels without one.
        layout = f"{ops.num_channels}{'c' if ops.num_channels in _WITH_LAYOUT else 'C'}"
        return [
            *([f"aformat=channel_layouts={layout}"] if ops.num_channels else []),
            *([f"aresample={ops.sample_rate}"] if ops.sample_rate else []),
            *_trim("atrim", ops.window),
            # apad only adds samples and atrim only drops them; together they give the exact count.
            *([f"apad=whole_len={count}", f"atrim=end_sample={count}"] if count else []),
            *own,
            *([f"aformat=sample_fmts={ops.sample_fmt}"] if ops.sample_fmt else []),
        ]
    formats = ops.formats if ops.is_scaled else ()
    is_converted = ops.is_scaled and (bool(formats) or not own)
    # tpad adds frames without end and trim drops the excess: the number of missing frames is not known.
    added = f"add:color={ops.pad_mode}" if ops.pad_mode else "clone"
    return [
        *_cut(ops.box, mirror=ops.mirror),
        *([f"fps={parse_rate(ops.frame_rate)}:round=up"] if ops.frame_rate else []),
        *_trim("trim", ops.window),
        *_scale(ops, formats),
        *_crop(ops.crop_width, ops.crop_height, exact=not formats),
        *([f"tpad=stop=-1:stop_mode={added}", f"trim=end_frame={count}"] if count else []),
        *own,
        *(_formats(ops.pix_fmt) if is_converted else _conversion(ops)),
    ]


def _cut(box: Box | None, *, mirror: bool) -> list[str]:
    """Return the filters that crop a box and mirror it."""
    filters = []
    if box is not None:
        x, y, w, h = box
        # FFmpeg's crop filter would move a box that exceeds the image inside; a size of 0 makes it an error.
        sides = f"'if(gt({x}+{w},iw),0,{w})':'if(gt({y}+{h},ih),0,{h})'"
        filters.append(f"crop={sides}:{x}:{y}:exact=1")
    return [*filters, "hflip"] if mirror else filters


def filters_of_part(ops: PictureOps, part: Box, turn: str) -> list[str]:
    """Return the filters that convert exactly, crop a part in the planar format, and turn that."""
    x, y, w, h = part
    scaler, planar, *rest = _conversion(ops)
    cut = _cut(ops.box if turn else None, mirror=ops.mirror)
    return [scaler, planar, f"crop={w}:{h}:{x}:{y}:exact=1", turn, *cut, *rest]


def _conversion(ops: PictureOps) -> list[str]:
    """Return the filters that convert to the final format without scaling."""
    colors = _colors(ops)
    if not (ops.pix_fmt or colors) or ops.uses_default_conversion:
        return _formats(ops.pix_fmt)
    formats = _formats(PLANAR.get(ops.pix_fmt or ""), ops.pix_fmt)
    return [f"scale=flags=bilinear+{ACCURATE}{colors}", *formats]


def _formats(*names: str | None) -> list[str]:
    return [f"format={name}" for name in names if name]


def _colors(ops: PictureOps) -> str:
    """Return the scaler options for matrix and range of the result, to append to its flags."""
    matrix = f":out_color_matrix={ops.color_matrix}" if ops.color_matrix else ""
    return f"{matrix}:out_range={ops.color_range}" if ops.color_range else matrix


def _scale(ops: PictureOps, formats: tuple[str, ...]) -> list[str]:
    """Return the filters that scale to the exact size, through these pixel formats if there are any.

    The last of the formats has no subsampled chroma, so that borders can start at any pixel.
    """
    width, height = ops.width, ops.height
    if width is None and height is None:
        return []
    flags = f"flags={ops.flags}{_colors(ops)}"
    exact = not formats
    after: list[str] = []
    if width is None or height is None or ops.scale_mode is None:
        size = _sides(width, height)
    elif ops.scale_mode == "crop":
        size = f"{width}:{height}:force_original_aspect_ratio=increase"
        after = _crop(width, height, exact=exact)
    else:
        size = _fitted_samples(width, height) if exact else _fitted(width, height)
        after = _border(width, height, ops.pad_color, exact=exact)
    return [f"scale={size}:{flags}", *_formats(*formats), *after]


# Sizes are computed by expressions, because FFmpeg's options that keep the aspect ratio (-1 and
# force_original_aspect_ratio) round a side of a thin image to 0 and then fail, as for 2000x3 into 224x224.


def _sides(width: int | None, height: int | None) -> str:
    """Write the size; a side that is ``None`` keeps the aspect ratio and is at least one pixel."""
    if width is None:
        return f"'max(1,round({height}*iw/ih))':{height}"
    return f"{width}:'max(1,round({width}*ih/iw))'" if height is None else f"{width}:{height}"


def _fitted(width: int, height: int) -> str:
    """Write the largest size with the image's aspect ratio that fits, at least one pixel on each side."""
    # Quoted below, because a comma would end the filter.
    across = f"max(1,min({width},round({height}*iw/ih)))"
    return f"'{across}':'max(1,min({height},round({width}*ih/iw)))'"


def _fitted_samples(width: int, height: int) -> str:
    """Write the same in whole chroma samples of the result, because FFmpeg's pad filter crops the rest."""
    across = f"min(floor({width}/ohsub),round({height}*iw/ih/ohsub))*ohsub"
    down = f"min(floor({height}/ovsub),round({width}*ih/iw/ovsub))*ovsub"
    return f"'max(ohsub,{across})':'max(ovsub,{down})'"


def _border(width: int, height: int, color: str, *, exact: bool) -> list[str]:
    # FFmpeg's pad filter rounds sizes down to whole chroma samples.
    step = CHROMA_GRID if exact else 1
    # So the size is rounded up to whole chroma samples for pad, and crop removes the excess.
    outer = [-(-side // step) * step for side in (width, height)]
    place = f"({width}-iw)/2:({height}-ih)/2"
    pad = f"pad={outer[0]}:{outer[1]}:{place}:color={color}"
    return [pad] if outer == [width, height] else [pad, f"crop={width}:{height}:0:0:exact=1"]


def _crop(width: int | None, height: int | None, *, exact: bool) -> list[str]:
    """Return the filter that crops the centre, at any pixel or, if ``exact``, keeping chroma in place."""
    if width is None and height is None:
        return []
    sides = f"{'iw' if width is None else width}:{'ih' if height is None else height}"
    if not exact:
        return [f"crop={sides}"]
    # The size is not rounded to whole chroma samples, but the offset is, so that chroma does not shift.
    step = CHROMA_GRID
    left, top = (f"trunc(({side}-o{side[1]})/{2 * step})*{step}" for side in ("iw", "ih"))
    return [f"crop={sides}:{left}:{top}:exact=1"]


def _trim(name: Literal["trim", "atrim"], window: Window) -> list[str]:
    """Return the filter that keeps a window of time."""
    sides = (("start", window.start), ("end", window.end))
    options = [f"{side}={_seconds(value)}" for side, value in sides if value is not None]
    return [f"{name}={':'.join(options)}"] if options else []


def _seconds(value: Fraction) -> str:
    # FFmpeg parses times in microseconds and rounds them to the nearest tick. Rounding to nearest here keeps
    # a frame at 1/3 s in the window that begins at 1/3 s.
    count = math.floor(value * 1_000_000 + Fraction(1, 2))
    return f"{'-' if count < 0 else ''}{abs(count) // 1_000_000}.{abs(count) % 1_000_000:06d}"
