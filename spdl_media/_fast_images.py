"""Images cut, scaled, padded and converted by FFmpeg's scaler alone, without a filter graph.

It is called directly where it gives the same image, bit for bit. Borders are made and cut in NumPy.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import Any, NamedTuple

import av
from av.video.reformatter import ColorRange, Colorspace, Interpolation, VideoReformatter

from spdl_media.errors import FilterError, PictureSizeError
from spdl_media.formats import RGB_8BIT, chroma_steps, is_yuv, plane_steps, plane_views
from spdl_media.geometry import CHROMA_GRID, Placement, Size, fits, middle, place
from spdl_media.operations import PictureOps
from spdl_media.orientation import Box

HALF_CHROMA = "yuv420p"
GBR, FULL_RANGE = 0, 2
_UNKNOWN_MATRIX, _UNKNOWN_RANGE, _BT601 = 2, 0, 5
# The scale filter's names where PyAV has others; the rest are PyAV's in lower case.
_FLAG_NAMES = {
    "neighbor": "POINT",
    "full_chroma_int": "FULL_CHR_H_INT",
    "full_chroma_inp": "FULL_CHR_H_INP",
}
_JPEG_COLORS: dict[str, Any] = {
    "dst_colorspace": Colorspace.ITU601,
    "dst_color_range": ColorRange.JPEG,
    "src_color_range": ColorRange.JPEG,
}
# Kernels that take single pixels of a large image, and leave out those between. Of a smaller image they
# would take others: on photographs at 224x224 that is up to 9 levels of 255 on average.
_OF_SINGLE_PIXELS = ("neighbor", "fast_bilinear")
# 8-bit YUV that a chain may end in, besides RGB.
_YUV = frozenset("yuv420p yuv422p yuv444p yuvj420p yuvj422p yuvj444p nv12".split())
# Formats of 8 bits that are cut and mirrored here.
_CUTTABLE = RGB_8BIT.union("gray yuv444p yuvj444p yuvj440p yuvj422p yuvj420p".split())
# A thread keeps the scalers of so many pairs of a size and a conversion, over all chains: their tables depend
# on both, and making them takes a third of the time. 64 photographs of 5 sizes, cropped to 224x224, took 304
# microseconds each, and 395 where one pair was kept; 64 pairs gained nothing. One for photographs of 1920
# pixels' width takes some 300 KiB.
_MAX_SCALERS = 32
# FFmpeg's av_image_check_size: 8 bytes a pixel, and a margin on both sides, are to be counted in an int.
_EDGE, _MAX_PIXELS = 128, 2**28


class _Conversion(NamedTuple):
    """One call of the scaler: the format that it gives, and its flags."""

    pix_fmt: str
    flags: int


class Plan(NamedTuple):
    """What becomes of an image of one size.

    Attributes:
        source: The size that is scaled, after the cut.
        placement: How it is scaled, and padded or cropped to the size asked for.
        crop: How the middle is cut out after that, if at all.
    """

    source: Size
    placement: Placement
    crop: Placement


@lru_cache(maxsize=256)
def _flags(names: str) -> int:
    return sum(int(Interpolation[_FLAG_NAMES.get(n, n.upper())]) for n in names.split("+"))


class FastChain:
    """The conversions of operations that need no graph.

    Attributes:
        ops: The operations.

    Thread safety: free to share; each thread has scalers of its own.
    """

    __slots__ = ("_before", "_conversions", "_is_yuv", "ops")

    def __init__(self, ops: PictureOps, conversions: tuple[_Conversion, ...], before: int) -> None:
        self.ops = ops
        self._conversions = conversions
        # So many conversions come before the borders.
        self._before = before
        self._is_yuv = conversions[-1].pix_fmt in _YUV

    def plan(self, width: int, height: int) -> Plan | None:
        """The sizes for an upright image of this size; ``None``: a crop is larger than the image."""
        ops = self.ops
        if ops.box is not None:
            if not fits(ops.box, width, height):
                return None
            width, height = ops.box[2:]
        # Borders of RGB are placed to the pixel; those of YUV on whole samples of chroma.
        format = self._conversions[-1].pix_fmt
        is_exact = self._is_yuv or format in ("gbrp", "gbrap")
        sample, grid = (chroma_steps(format), CHROMA_GRID) if is_exact else ((1, 1), 1)
        size = (width, height)
        placement = place(size, ops.width, ops.height, ops.scale_mode, sample=sample, grid=grid)
        canvas = placement.canvas
        crop = middle(canvas, (ops.crop_width or canvas[0], ops.crop_height or canvas[1]), grid)
        if crop.has_border:
            return None
        if ops.scale_mode == "pad" and not placement.is_inside:
            return None  # one sample of chroma is larger than the canvas
        return Plan(size, placement, crop)

    def plan_for(self, frame: av.VideoFrame) -> Plan | None:
        """The plan for a frame; ``None`` where the result would not be the graph's, bit for bit."""
        if not self.takes(frame) or (self._is_cut and frame.format.name not in _CUTTABLE):
            return None
        plan = self.plan(frame.width, frame.height)
        if plan is None or ((self._is_cut or _has_margins(plan)) and carries_more(frame)):
            return None
        return plan

    def takes(self, frame: av.VideoFrame) -> bool:
        """Whether the scaler alone converts such a frame as a graph does."""
        needs_range = self._is_yuv or self._conversions[0].pix_fmt == HALF_CHROMA
        return _same_without_graph(frame.format.name) and (not needs_range or _keeps_range(frame))

    @property
    def _is_cut(self) -> bool:
        return self.ops.box is not None or self.ops.mirror

    def __call__(self, frame: av.VideoFrame, plan: Plan) -> av.VideoFrame:
        """Cut, and run the conversions, for a plan that :meth:`plan_for` gave.

        The frame is given away: it can be the result, with colour metadata written to it, and the scaler
        changes its fields meanwhile, so no other thread may see it.
        """
        if self._is_cut:
            frame = cut(frame, self.ops.box, mirror=self.ops.mirror)
        return self.run(frame, plan)

    def run(self, frame: av.VideoFrame, plan: Plan) -> av.VideoFrame:
        """Run the conversions alone. The frame is given away, as in a call."""
        if self._changes_nothing(frame, plan):
            frame.colorspace, frame.color_range = GBR, FULL_RANGE
            return frame
        scalers = self._scalers(frame, plan)
        for position in range(self._before):
            frame = self._convert(frame, position, plan.placement.scaled, scalers[position])
        for margin in plan[1:]:
            frame = _with_margins(frame, margin)
        for position in range(self._before, len(self._conversions)):
            size = frame.width, frame.height
            frame = self._convert(frame, position, size, scalers[position])
        return frame

    def convert_first(self, frame: av.VideoFrame) -> av.VideoFrame:
        """Run the first conversion alone, without a change of size."""
        size = frame.width, frame.height
        return self._convert(frame, 0, size, self._scalers(frame, _unchanged(size))[0])

    def convert_last(self, frame: av.VideoFrame) -> av.VideoFrame:
        """Run the other conversions, without a change of size."""
        if len(self._conversions) == 1:
            return frame
        size = frame.width, frame.height
        scaler = self._scalers(frame, _unchanged(size))[1]
        return self._convert(frame, 1, size, scaler)

    def _convert(
        self, frame: av.VideoFrame, position: int, size: Size, scaler: VideoReformatter
    ) -> av.VideoFrame:
        conversion = self._conversions[position]
        tags = self._tags(frame, conversion.pix_fmt)
        if conversion.pix_fmt == HALF_CHROMA and not self._is_yuv and frame.format.name in RGB_8BIT:
            # PNG says that its range is full, as RGB's always is. The scaler alone then makes YUV of full
            # range; in a graph it is of limited range, whatever is said.
            frame.color_range = _UNKNOWN_RANGE
        colors = _JPEG_COLORS if self._is_yuv else {}
        try:
            result = scaler.reformat(
                frame,
                *size,
                conversion.pix_fmt,
                interpolation=conversion.flags,
                threads=1,
                **colors,
            )
        except av.FFmpegError as error:
            raise self._cannot_make(frame, size, error) from error
        if result is not frame or self._is_yuv:
            result.colorspace, result.color_range = tags
        return result

    def _tags(self, frame: av.VideoFrame, pix_fmt: str) -> tuple[int, int]:
        """Matrix and range of the result, as a graph states them."""
        if self._is_yuv:
            return _BT601, FULL_RANGE
        if pix_fmt != HALF_CHROMA:
            return GBR, FULL_RANGE
        if frame.format.name in RGB_8BIT:
            return _UNKNOWN_MATRIX, _UNKNOWN_RANGE
        return int(frame.colorspace), int(frame.color_range)

    def _changes_nothing(self, frame: av.VideoFrame, plan: Plan) -> bool:
        """Packed RGB of this size already: through planar RGB and back, it would come out as it is."""
        return (
            self._conversions[-1].pix_fmt == frame.format.name
            and frame.format.name in RGB_8BIT
            and self._conversions[0].pix_fmt != HALF_CHROMA
            and plan.placement.scaled == plan.placement.canvas == plan.crop.canvas == plan.source
        )

    def _scalers(self, frame: av.VideoFrame, plan: Plan) -> list[VideoReformatter]:
        """This thread's scalers for such frames, one for each conversion.

        One that served two would make its tables anew at each change of format.
        """
        kept: dict[object, list[VideoReformatter]] = _kept.__dict__.setdefault("sets", {})
        scaled, final = plan.placement.scaled, plan.crop.canvas
        key = (self._conversions, scaled, final, frame.width, frame.height, frame.format.name)
        found = kept.pop(key, None) or [VideoReformatter() for _ in self._conversions]
        kept[key] = found  # the last one, so that the first is the one not used for longest
        if len(kept) > _MAX_SCALERS:
            del kept[next(iter(kept))]
        return found

    def _cannot_make(self, frame: av.VideoFrame, size: Size, error: av.FFmpegError) -> FilterError:
        made = f"a picture of {size[0]}x{size[1]} cannot be made of one of {frame.width}x{frame.height}"
        if _is_possible(*size):
            return PictureSizeError(f"{made}: {error.strerror}")
        asked = self.ops.width or 0, self.ops.height or 0
        # Of what was asked for as it is, no image is to blame.
        kind = PictureSizeError if min(asked) < 1 or _is_possible(*asked) else FilterError
        return kind(
            f"{made}: FFmpeg takes pictures with (width + {_EDGE}) * (height + {_EDGE}) below {_MAX_PIXELS}, "
            "up to 16255x16255 for example. Give a smaller width= or height="
        )

    def from_rgb(self) -> FastChain:
        """The chain for RGB images. They gain nothing from the yuv420p shortcut."""
        if self._conversions[0].pix_fmt != HALF_CHROMA or self._is_yuv:
            return self
        first = self._conversions[0]._replace(pix_fmt="gbrp")
        return FastChain(self.ops, (first, self._conversions[1]), 1)

    @property
    def scales_first(self) -> bool:
        """Whether all pixels are scaled to a size, so that an RGB image small already will do."""
        is_rgb = not self._is_yuv
        return is_rgb and self.ops.is_scaled and self.ops.scale_algo not in _OF_SINGLE_PIXELS


# Chains are many where targets vary, as in training at several scales, and boxes make sizes without end.
_kept = threading.local()


# A graph is made anew for each still, as each has its own size. Microseconds for a JPEG of 500x375 (of
# 1920x1280), decoding not counted:
#     224x224 rgb24, bicubic        graph 470 (1970)    scaler alone 290 (1680)
#     the same, padded              graph 480 (1920)    scaler alone 290 (1610)
#     the same, area, padded        graph 340 (990)     scaler alone 165 (690)
#     FFmpeg's own one step         graph 610 (2290)
def fast_chain(ops: PictureOps) -> FastChain | None:
    """The conversions that perform operations without a graph; ``None``: they take one."""
    if ops.frame_rate is not None or ops.window or ops.num_frames is not None:
        return None
    if (ops.filter_desc or "").strip() or ops.pad_color != "black":
        return None
    if not ops.is_scaled and (ops.crop_width or ops.crop_height):
        return None  # the graph crops what the decoder gave, before it is converted
    bicubic = int(Interpolation.BICUBIC)
    target = ops.pix_fmt or ""
    first = bicubic if ops.uses_default_conversion else _flags(ops.flags)
    if target in _YUV:
        # The colours of JPEG, in which stills of all formats are wanted: no border colour is computed.
        if (ops.color_matrix, ops.color_range) != ("bt601", "pc"):
            return None
        return FastChain(ops, (_Conversion(target, first),), 1)
    if target not in RGB_8BIT:
        return None
    if ops.uses_default_conversion:
        return FastChain(ops, (_Conversion(target, bicubic),), 1)
    formats = ops.formats or (target,)
    if formats[-1] == target:  # yuv420p and then packed RGB, or planar RGB alone
        conversions = tuple(
            _Conversion(name, bicubic if position else first)
            for position, name in enumerate(formats)
        )
        return FastChain(ops, conversions, len(conversions))
    return FastChain(ops, (_Conversion(formats[0], first), _Conversion(target, bicubic)), 1)


def _unchanged(size: Size) -> Plan:
    return Plan(size, Placement(size, size), Placement(size, size))


def _has_margins(plan: Plan) -> bool:
    return not plan.placement.scaled == plan.placement.canvas == plan.crop.canvas


def _is_possible(width: int, height: int) -> bool:
    return (width + _EDGE) * (height + _EDGE) < _MAX_PIXELS


def cut(frame: av.VideoFrame, box: Box | None, *, mirror: bool) -> av.VideoFrame:
    """Cut a box out and mirror it, in one copy.

    Chroma begins with the sample that the box's corner lies in, as in FFmpeg's crop with ``exact=1``.
    """
    x, y, width, height = box or (0, 0, frame.width, frame.height)
    result = like_frame(frame, width, height)
    planes = plane_views(result), plane_views(frame), plane_steps(frame.format.name)
    for target, source, (across, down) in zip(*planes, strict=True):
        left, top = x // across, y // down
        part = source[top : top + target.shape[0], left : left + target.shape[1]]
        target[:] = part[:, ::-1] if mirror else part
    return result


def _with_margins(frame: av.VideoFrame, margin: Placement) -> av.VideoFrame:
    """Put a black border around an image, or cut its middle out."""
    if margin.scaled == margin.canvas:
        return frame
    name = frame.format.name
    result = like_frame(frame, *margin.canvas)
    planes = plane_views(result), plane_views(frame), plane_steps(name)
    for index, (target, source, step) in enumerate(zip(*planes, strict=True)):
        if margin.has_border:
            # Alpha is opaque, and so is what lies in it of packed formats; chroma has its zero in the middle.
            target[:] = 255 if index == 3 else 128 if index and is_yuv(name) else 0
        margin.part_of(target, step=step)[:] = margin.visible(source, step=step)
    return result


def like_frame(frame: av.VideoFrame, width: int, height: int) -> av.VideoFrame:
    """A new frame of this size, whose pixels are not set, with the other metadata of a frame."""
    result = av.VideoFrame(width, height, frame.format.name)
    result.pts, result.dts = frame.pts, frame.dts
    if frame.time_base:
        result.time_base = frame.time_base
    result.duration = frame.duration
    result.colorspace, result.color_range = frame.colorspace, frame.color_range
    result.color_primaries, result.color_trc = frame.color_primaries, frame.color_trc
    return result


@lru_cache(maxsize=256)
def _same_without_graph(pix_fmt: str) -> bool:
    """Whether the scaler gives the same alone and in a graph.

    Where chroma has its own size, the scale filter reads from the frame where the samples stand, and the
    scaler alone does not: decoded video differs by up to 151 levels. Full-range JPEG formats say nothing
    of it, and the others have no such chroma. ``tests/test_fastpath_equivalence.py`` tries each.
    """
    if pix_fmt.startswith("yuvj"):
        return True
    format = av.VideoFormat(pix_fmt, 16, 16)
    return format.chroma_width() == 16 and format.chroma_height() == 16


def _keeps_range(frame: av.VideoFrame) -> bool:
    """Whether the range of YUV stays as it is, alone and in a graph."""
    name = frame.format.name
    return name in RGB_8BIT or (name.startswith("yuvj") and frame.color_range == FULL_RANGE)


def carries_more(frame: av.VideoFrame) -> bool:
    """Whether a frame carries what PyAV cannot write into a new one: its damage and its metadata."""
    try:
        return frame.is_corrupt or bool(frame.metadata)
    except UnicodeDecodeError:
        return True
