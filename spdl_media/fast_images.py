"""Images cut, scaled, padded and converted by FFmpeg's scaler alone, without a filter graph.

It is called directly where it gives the same image, bit for bit. Borders are made and cut in NumPy.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import Any, NamedTuple

import av
import numpy as np
from av.video.reformatter import ColorRange, Colorspace, Interpolation, VideoReformatter

from spdl_media.errors import FilterError, PictureSizeError
from spdl_media.formats import RGB_8BIT, chroma_steps, is_yuv, like_frame, plane_steps, plane_views
from spdl_media.geometry import CHROMA_GRID, Box, Placement, Size, fits, middle, place
from spdl_media.operations import PictureOps

_HALF_CHROMA = "yuv420p"
_BICUBIC = int(Interpolation.BICUBIC)
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


class Plan(NamedTuple):
    """Plan for images of one size.

    Attributes:
        placement: How it is scaled, and padded or cropped to the size asked for.
        crop: What is cut out after that.
        mirror: Whether that is mirrored.
    """

    placement: Placement
    crop: Placement
    mirror: bool = False


@lru_cache(maxsize=256)
def _flags(names: str) -> int:
    return sum(int(Interpolation[_FLAG_NAMES.get(n, n.upper())]) for n in names.split("+"))


class FastChain:
    """The conversions of operations that need no graph. What they cut out first is not its business.

    Args:
        ops: The operations.
        formats: What the scaler gives, one after the other.
        before: So many conversions come before the borders.
        flags: Of the scaler, for the first of them.

    Attributes:
        plan: :meth:`_plan`, of which the last results are kept.

    Thread safety: free to share; each thread has scalers of its own.
    """

    def __init__(self, ops: PictureOps, formats: tuple[str, ...], before: int, flags: int) -> None:
        self.ops, self._formats, self._before = ops, formats, before
        self._flags = flags, *[_BICUBIC] * (len(formats) - 1)
        self._is_yuv = formats[-1] in _YUV
        # Computing a plan takes 8 microseconds, and images of one size come in many.
        self.plan = lru_cache(maxsize=64)(self._plan)

    def _plan(self, size: Size) -> Plan | None:
        """The sizes for an upright image of this size; ``None``: a crop is larger than the image."""
        ops = self.ops
        # Borders of RGB are placed to the pixel; those of YUV on whole samples of chroma.
        last = self._formats[-1]
        is_exact = self._is_yuv or last in ("gbrp", "gbrap")
        sample, grid = (chroma_steps(last), CHROMA_GRID) if is_exact else ((1, 1), 1)
        placement = place(size, ops.width, ops.height, ops.scale_mode, sample=sample, grid=grid)
        canvas = placement.canvas
        crop = middle(canvas, (ops.crop_width or canvas[0], ops.crop_height or canvas[1]), grid)
        # One sample of chroma may be larger than the canvas.
        if crop.has_border or (ops.scale_mode == "pad" and not placement.is_inside):
            return None
        return Plan(placement, crop)

    def takes(self, frame: av.VideoFrame) -> bool:
        """Whether the scaler alone converts such a frame as a graph does."""
        needs_range = self._is_yuv or self._formats[0] == _HALF_CHROMA
        return _same_without_graph(frame.format.name) and (not needs_range or _keeps_range(frame))

    def run(self, frame: av.VideoFrame, plan: Plan) -> av.VideoFrame:
        """Run the conversions.

        The frame is given away: it can be the result, with colour metadata written to it, and the scaler
        changes its fields meanwhile, so no other thread may see it.

        Raises:
            PictureSizeError: The scaler does not take an image of this size.
            FilterError: It makes none of the size that was asked for.
        """
        if self._changes_nothing(frame, plan):
            frame.colorspace, frame.color_range = GBR, FULL_RANGE
            return frame
        steps = list(zip(self._formats, self._flags, self._scalers(frame, plan), strict=True))
        for step in steps[: self._before]:
            frame = self._convert(frame, plan.placement.scaled, *step)
        frame = placed(placed(frame, plan.placement), plan.crop, mirror=plan.mirror)
        for step in steps[self._before :]:
            frame = self._convert(frame, (frame.width, frame.height), *step)
        return frame

    def _convert(
        self, frame: av.VideoFrame, size: Size, pix_fmt: str, flags: int, scaler: VideoReformatter
    ) -> av.VideoFrame:
        # Matrix and range of the result, as a graph states them.
        tags = (_BT601 if self._is_yuv else GBR), FULL_RANGE
        if pix_fmt == _HALF_CHROMA and not self._is_yuv:
            tags = int(frame.colorspace), int(frame.color_range)
            if frame.format.name in RGB_8BIT:
                tags = _UNKNOWN_MATRIX, _UNKNOWN_RANGE
                # PNG says that its range is full, as RGB's always is. The scaler alone then makes YUV of full
                # range; in a graph it is of limited range, whatever is said.
                frame.color_range = _UNKNOWN_RANGE
        colors = _JPEG_COLORS if self._is_yuv else {}
        try:
            result = scaler.reformat(
                frame, *size, pix_fmt, interpolation=flags, threads=1, **colors
            )
        except av.FFmpegError as error:
            raise self._cannot_make(frame, size, error) from error
        if result is not frame or self._is_yuv:
            result.colorspace, result.color_range = tags
        return result

    def _changes_nothing(self, frame: av.VideoFrame, plan: Plan) -> bool:
        """Packed RGB of this size already: through planar RGB and back, it would come out as it is."""
        return (
            self._formats[-1] == frame.format.name
            and frame.format.name in RGB_8BIT
            and self._formats[0] != _HALF_CHROMA
            and plan.placement.scaled == (frame.width, frame.height)
            and not (plan.mirror or _has_margins(plan))
        )

    def _scalers(self, frame: av.VideoFrame, plan: Plan) -> list[VideoReformatter]:
        """This thread's scalers for such frames, one for each conversion.

        One that served two would make its tables anew at each change of format.
        """
        kept: dict[object, list[VideoReformatter]] = _kept.__dict__.setdefault("sets", {})
        scaled, final = plan.placement.scaled, plan.crop.canvas
        sizes = scaled, final, frame.width, frame.height
        key = (self._formats, self._flags, sizes, frame.format.name)
        found = kept.pop(key, None) or [VideoReformatter() for _ in self._formats]
        kept[key] = found  # the last one, so that the first is the one not used for longest
        if len(kept) > _MAX_SCALERS:
            del kept[next(iter(kept))]
        return found

    def _cannot_make(self, frame: av.VideoFrame, size: Size, error: av.FFmpegError) -> FilterError:
        made = (
            f"an image of {size[0]}x{size[1]} cannot be made of one of {frame.width}x{frame.height}"
        )
        if _is_possible(*size):
            return PictureSizeError(f"{made}: {error.strerror}")
        asked = self.ops.width or 0, self.ops.height or 0
        # Of what was asked for as it is, no image is to blame.
        kind = PictureSizeError if min(asked) < 1 or _is_possible(*asked) else FilterError
        return kind(
            f"{made}: FFmpeg takes images with (width + {_EDGE}) * (height + {_EDGE}) below {_MAX_PIXELS}, "
            "up to 16255x16255 for example. Give a smaller width= or height="
        )

    def from_rgb(self) -> FastChain:
        """The chain for RGB images, which gain nothing from the yuv420p shortcut."""
        if self._formats[0] != _HALF_CHROMA or self._is_yuv:
            return self
        return FastChain(self.ops, ("gbrp", self._formats[1]), 1, self._flags[0])

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
@lru_cache(maxsize=256)
def fast_chain(ops: PictureOps) -> FastChain | None:
    """The conversions that perform operations without a graph; ``None``: they take one.

    Args:
        ops: Without a cut, so that chains are few.
    """
    if not ops.gives_one or ops.pad_color != "black":
        return None
    if not ops.is_scaled and (ops.crop_width or ops.crop_height):
        return None  # the graph crops what the decoder gave, before it is converted
    target = ops.pix_fmt or ""
    # The colours of JPEG, in which stills of all formats are wanted: no border colour is computed.
    is_jpeg = (ops.color_matrix, ops.color_range) == ("bt601", "pc")
    if not (target in RGB_8BIT or (target in _YUV and is_jpeg)):
        return None
    is_default = ops.uses_default_conversion
    before = (() if is_default else ops.formats) or (target,)
    formats = before if before[-1] == target else (*before, target)
    return FastChain(ops, formats, len(before), _BICUBIC if is_default else _flags(ops.flags))


def without_graph(frame: av.VideoFrame, ops: PictureOps) -> av.VideoFrame | None:
    """Perform operations by the scaler alone, on a frame that is given away.

    Returns:
        What a graph gives, bit for bit; ``None``: this frame takes a graph.

    Raises:
        PictureSizeError: The scaler does not take an image of this size.
        FilterError: It makes none of the size that was asked for.
    """
    chain = fast_chain(ops.uncut)
    if chain is None or not chain.takes(frame):
        return None
    if (part := part_to_convert(frame, ops)) is not None:
        if carries_more(frame):
            return None
        outer, (x, y, w, h) = part
        whole = whole_samples(frame, outer)
        size = whole.width, whole.height
        inner = Placement(size, (w, h), -x, -y)
        return chain.run(whole, Plan(Placement(size, size), inner, ops.mirror))
    size = frame.width, frame.height
    is_cut = ops.box is not None or ops.mirror
    x, y, w, h = ops.box or (0, 0, *size)
    plan = chain.plan((w, h)) if fits((x, y, w, h), *size) else None
    if plan is None or (is_cut and frame.format.name not in _CUTTABLE):
        return None
    if (is_cut or _has_margins(plan)) and carries_more(frame):
        return None
    cut = Placement(size, (w, h), -x, -y)
    return chain.run(placed(frame, cut, mirror=ops.mirror), plan)


def _has_margins(plan: Plan) -> bool:
    return not plan.placement.scaled == plan.placement.canvas == plan.crop.canvas


def _is_possible(width: int, height: int) -> bool:
    return (width + _EDGE) * (height + _EDGE) < _MAX_PIXELS


def placed(frame: av.VideoFrame, placement: Placement, *, mirror: bool = False) -> av.VideoFrame:
    """Put a black border around an image, or cut a part out, and mirror it; in one copy, if any.

    Chroma of a part begins with the sample that its corner lies in, as in FFmpeg's crop with ``exact=1``.
    """
    if placement.scaled == placement.canvas and not mirror:
        return frame
    name = frame.format.name
    result = like_frame(frame, *placement.canvas)
    x, y = max(0, -placement.left), max(0, -placement.top)
    planes = zip(plane_views(result), plane_views(frame), plane_steps(name), strict=True)
    for index, (plane, source, step) in enumerate(planes):
        target = plane
        if placement.has_border:
            # Alpha is opaque, and so is what lies in it of packed formats; chroma has its zero in the middle.
            plane[:] = 255 if index == 3 else 128 if index and is_yuv(name) else 0
            target = placement.part_of(plane, step=step)
        rows, columns = target.shape[:2]
        part = source[y // step[1] :, x // step[0] :][:rows, :columns]
        target[:] = part[:, ::-1] if mirror else part
    return result


def full_range_gray(frame: av.VideoFrame) -> av.VideoFrame:
    """A gray frame of limited range (16 to 235 of 8 bits) with its levels spread to full range."""
    unit = 1 << frame.format.components[0].bits - 8
    levels = np.arange(256 * unit, dtype=np.float64)
    spread = (levels - 16 * unit) * (256 * unit - 1) / (219 * unit)
    result = like_frame(frame, frame.width, frame.height)
    result.color_range = 2  # AVCOL_RANGE_JPEG
    (source,), (target,) = plane_views(frame), plane_views(result)
    target[...] = np.clip(np.rint(spread), 0, len(levels) - 1).astype(target.dtype)[source]
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


@lru_cache(maxsize=256)
def _has_full_chroma(pix_fmt: str) -> bool:
    components = av.VideoFormat(pix_fmt, 16, 16).components
    return len(components) > 2 and all(part.width == part.height == 16 for part in components)


def _has_cut_chroma(pix_fmt: str, width: int, height: int) -> bool:
    """Whether the last row or column of chroma is for fewer rows or columns of pixels than the others."""
    across, down = chroma_steps(pix_fmt)
    return width % across != 0 or height % down != 0


# What is converted beyond a box: a sample of chroma in 4:1:0 at least, and up to a multiple of twice that,
# where FFmpeg's patterns of rounding begin anew.
_MARGIN = 4


def part_to_convert(
    frame: av.VideoFrame, ops: PictureOps, turn: str = ""
) -> tuple[Box, Box] | None:
    """The part of an image that is converted exactly before its box is cut out, and the box within it.

    A box begins and ends amid samples of chroma, and at the edge a sample may be for fewer pixels. So a
    larger part of whole samples is converted and then cut, which gives the same part of the whole image's
    conversion, bit for bit.

    Args:
        frame: The image.
        ops: What is done with it.
        turn: The filters that turn it upright, before its box is cut out.

    Returns:
        ``None``: the cut comes first, or the box does not lie inside.
    """
    # Most are scaled, and the other questions take microseconds.
    if ops.is_scaled or ops.pix_fmt is None or not _has_full_chroma(ops.pix_fmt):
        return None
    if not ops.is_conversion or ops.uses_default_conversion:
        return None
    name, width, height = frame.format.name, frame.width, frame.height
    is_cut = ops.box is not None or ops.mirror
    if not (turn or _has_cut_chroma(name, width, height)) and not (
        is_cut and max(chroma_steps(name)) > 1
    ):
        return None
    # Boxes are those of upright images.
    x, y, w, h = (0, 0, width, height) if turn or ops.box is None else ops.box
    if not fits((x, y, w, h), width, height):
        return None
    left, right = _around(x, x + w, width)
    top, bottom = _around(y, y + h, height)
    return (left, top, right - left, bottom - top), (x - left, y - top, w, h)


def _around(start: int, end: int, side: int) -> tuple[int, int]:
    grain = 2 * _MARGIN
    return (
        max(0, start - _MARGIN) // grain * grain,
        min(side, -(-(end + _MARGIN) // grain) * grain),
    )


# In 4:2:0, the last chroma sample of an odd row covers one pixel, not two. FFmpeg's scaler stretches the row
# of chroma over the row of pixels all the same, so colour drifts by up to a pixel across the image: 4 levels
# of 255 on average for a photograph, and 40 at edges. With one more column of pixels, a copy of the last, it
# has nothing to stretch. When an image is scaled as well, the drift is below a fifth of a pixel for common
# sizes (0.2 levels at 224x224), and left alone.
def whole_samples(frame: av.VideoFrame, box: Box) -> av.VideoFrame:
    """A copy of a box, with further rows and columns, equal to the last, where they make a sample whole.

    The box begins with a sample of its own. The frame itself, if that is the box.
    """
    name = frame.format.name
    if box == (0, 0, frame.width, frame.height) and not _has_cut_chroma(name, *box[2:]):
        return frame
    across, down = chroma_steps(name)
    x, y, w, h = box
    part = like_frame(frame, -(-w // across) * across, -(-h // down) * down)
    planes = plane_views(part), plane_views(frame), plane_steps(name)
    for target, whole, (right, below) in zip(*planes, strict=True):
        width, height = -(-w // right), -(-h // below)
        source = whole[y // below :, x // right :][:height, :width]
        target[:height, :width] = source
        target[:height, width:] = source[:, -1:]
        target[height:] = target[height - 1 : height]
    return part
