"""Cut, scale, pad and convert images with FFmpeg's scaler alone, without a filter graph.

The scaler is called directly where it gives the same image as a graph, bit for bit. NumPy draws borders
and crops.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import Any

import av
from av.video.reformatter import ColorRange, Colorspace, Interpolation, VideoReformatter

from spdl_media.errors import FilterError, PictureSizeError
from spdl_media.formats import (
    RGB_8BIT,
    TO_INTEGERS,
    chroma_steps,
    has_cut_chroma,
    is_yuv,
    like_frame,
    plane_steps,
    plane_views,
    whole_samples,
)
from spdl_media.geometry import CHROMA_GRID, Box, Placement, Size, fits, middle, place
from spdl_media.operations import PictureOps

_HALF_CHROMA = "yuv420p"
BICUBIC = int(Interpolation.BICUBIC)
GBR, FULL_RANGE = 0, 2
_UNKNOWN_MATRIX, _UNKNOWN_RANGE, _BT601 = 2, 0, 5
# Flags of the scale filter with other names in PyAV; all others are PyAV's in lower case.
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
# Kernels that sample single pixels of a large image and skip those between. From an image that was reduced
# first they sample others: on photographs at 224x224 the result is up to 9 levels of 255 off on average.
_SPARSE_KERNELS = ("neighbor", "fast_bilinear")
# 8-bit YUV formats that a chain may produce, besides RGB.
_YUV = frozenset("yuv420p yuv422p yuv444p yuvj420p yuvj422p yuvj444p nv12".split())
# 8-bit formats that are cropped and mirrored in NumPy.
_CUTTABLE = RGB_8BIT.union("gray yuv444p yuvj444p yuvj440p yuvj422p yuvj420p".split())
# Image sizes and conversions for which idle scalers are kept, and how many sets for each. The tables of a
# scaler depend on both, and building them takes a third of the time. 64 photographs of 5 sizes, cropped to
# 224x224, took 304 microseconds each, against 395 with one set kept; 64 sets gained nothing more. A scaler
# for photographs 1920 pixels wide takes some 300 KiB.
_MAX_SCALERS, _MAX_SETS = 32, 16
# FFmpeg's av_image_check_size: the bytes of an image (8 a pixel), with a margin on both sides, fit an int.
_EDGE, _MAX_PIXELS = 128, 2**28


def _flags(names: str) -> int:
    return sum(int(Interpolation[_FLAG_NAMES.get(n, n.upper())]) for n in names.split("+"))


class FastChain:
    """The scaler's conversions for operations that need no graph. The caller crops the input box first.

    Args:
        ops: The operations.
        formats: Pixel format after each conversion.
        before: Number of conversions that run before borders are drawn.
        flags: Scaler flags of the first conversion.

    Attributes:
        converts_first: Whether a part around the box is converted before the box is cropped.
        plan: :meth:`_plan` with a cache of its last results.

    Thread safety: free to share; a scaler serves one thread at a time.
    """

    def __init__(self, ops: PictureOps, formats: tuple[str, ...], before: int, flags: int) -> None:
        self.ops, self._formats, self._before = ops, formats, before
        self._flags = flags, *[BICUBIC] * (len(formats) - 1)
        self._is_yuv = formats[-1] in _YUV
        self.converts_first = ops.is_exact_conversion
        # Frames in this format need no conversion if they have the right size: planar RGB and back would not
        # change them.
        is_exact = formats[-1] in RGB_8BIT and formats[0] != _HALF_CHROMA
        self._kept_format = formats[-1] if is_exact else None
        # Computing a plan takes 8 microseconds, and many images share a size.
        self.plan = lru_cache(maxsize=64)(self._plan)

    def _plan(self, size: Size) -> Placement | None:
        """Place an upright image of this size; ``None``: the crop is larger than the image."""
        ops = self.ops
        # Borders of RGB can start at any pixel, those of YUV only at a whole chroma sample.
        last = self._formats[-1]
        is_exact = self._is_yuv or last in ("gbrp", "gbrap")
        sample, grid = (chroma_steps(last), CHROMA_GRID) if is_exact else ((1, 1), 1)
        placement = place(size, ops.width, ops.height, ops.scale_mode, sample=sample, grid=grid)
        canvas = placement.canvas
        crop = middle(canvas, (ops.crop_width or canvas[0], ops.crop_height or canvas[1]), grid)
        # A chroma sample may be larger than the canvas.
        if crop.has_border or (ops.scale_mode == "pad" and not placement.is_inside):
            return None
        left, top = placement.left + crop.left, placement.top + crop.top
        return Placement(placement.scaled, crop.canvas, left, top)

    def takes(self, frame: av.VideoFrame) -> bool:
        """Whether the scaler alone converts this frame as a graph does."""
        # The scaler alone would scale the fields of an interlaced frame one by one. Decoders mark the rows of
        # an interlaced PNG as fields, and Adam7 has none.
        if frame.interlaced_frame or not _same_without_graph(frame.format.name):
            return False
        needs_range = self._is_yuv or self._formats[0] == _HALF_CHROMA
        return not needs_range or _keeps_range(frame)

    def run(
        self, frame: av.VideoFrame, placement: Placement, *, mirror: bool = False
    ) -> av.VideoFrame:
        """Run the conversions.

        Args:
            frame: The frame, of which this takes ownership: it may be returned, with colour metadata written
                to it, and the scaler changes its fields while it runs. No other thread may use it.
            placement: How it is scaled, padded and cropped.
            mirror: Whether the result is mirrored left to right.

        Raises:
            PictureSizeError: The scaler does not take an image of this size.
            FilterError: The scaler cannot produce the requested size.
        """
        is_right = frame.format.name == self._kept_format and not mirror
        if is_right and (frame.width, frame.height) == placement.scaled and _is_whole(placement):
            frame.colorspace, frame.color_range = GBR, FULL_RANGE
            return frame
        if not _is_possible(*placement.canvas):
            raise self._cannot_make(frame, placement.canvas, "")
        # One for each conversion: a scaler shared by two would build its tables again at each change.
        sizes = placement.scaled, placement.canvas, frame.width, frame.height
        idle = _idle_scalers((self._formats, self._flags, sizes, frame.format.name))
        try:
            scalers = idle.pop()
        except IndexError:
            scalers = [VideoReformatter() for _ in self._formats]
        steps = list(zip(self._formats, self._flags, scalers, strict=True))
        for step in steps[: self._before]:
            frame = self._convert(frame, placement.scaled, *step)
        frame = placed(frame, placement, mirror=mirror)
        for step in steps[self._before :]:
            frame = self._convert(frame, (frame.width, frame.height), *step)
        idle.append(scalers)
        return frame

    def _convert(
        self, frame: av.VideoFrame, size: Size, pix_fmt: str, flags: int, scaler: VideoReformatter
    ) -> av.VideoFrame:
        # Matrix and range of the result, the same as a graph reports.
        tags = (_BT601 if self._is_yuv else GBR), FULL_RANGE
        if pix_fmt == _HALF_CHROMA and not self._is_yuv:
            tags = int(frame.colorspace), int(frame.color_range)
            if frame.format.name in RGB_8BIT:
                tags = _UNKNOWN_MATRIX, _UNKNOWN_RANGE
                # A decoded PNG is marked as full range, as RGB always is. The scaler alone would then produce
                # full-range YUV; a graph produces limited range, whatever the mark.
                frame.color_range = _UNKNOWN_RANGE
        colors = _JPEG_COLORS if self._is_yuv else {}
        try:
            result = scaler.reformat(
                frame, *size, pix_fmt, interpolation=flags, threads=1, **colors
            )
        except MemoryError:
            raise
        except (av.FFmpegError, OverflowError) as error:  # the latter: a side exceeds 31 bits
            raise self._cannot_make(frame, size, getattr(error, "strerror", "")) from error
        if result is not frame or self._is_yuv:
            result.colorspace, result.color_range = tags
        return result

    def _cannot_make(self, frame: av.VideoFrame, size: Size, error: str) -> FilterError:
        given, (width, height) = f"{frame.width}x{frame.height}", size
        made = f"an image of {width}x{height} cannot be made of one of {given}"
        if _is_possible(*size):
            return PictureSizeError(f"{made} {frame.format.name}: {error}")
        asked = self.ops.width or 0, self.ops.height or 0
        # If the requested size itself is impossible, the argument is wrong, not this image.
        kind = PictureSizeError if min(asked) < 1 or _is_possible(*asked) else FilterError
        return kind(
            f"{made}: FFmpeg takes images with (width + {_EDGE}) * (height + {_EDGE}) below {_MAX_PIXELS}, "
            "up to 16255x16255 for example. Give a smaller width= or height="
        )

    def from_rgb(self) -> FastChain:
        """Return the chain for RGB images, which gain nothing from the yuv420p shortcut."""
        if self._formats[0] != _HALF_CHROMA or self._is_yuv:
            return self
        return FastChain(self.ops, ("gbrp", self._formats[1]), 1, self._flags[0])

    @property
    def scales_first(self) -> bool:
        """Whether a reduced RGB image gives the same result: its scaling kernel reads all pixels."""
        is_rgb = not self._is_yuv
        return is_rgb and self.ops.is_scaled and self.ops.scale_algo not in _SPARSE_KERNELS


# Shared by all chains: training at several scales makes many chains, and random boxes make endless sizes, so
# a cache for each chain would grow without limit. Shared by all threads: those of a batch are new ones, and
# each would build the tables of each size again.
@lru_cache(maxsize=_MAX_SCALERS)
def _idle_scalers(conversions: tuple[Any, ...]) -> deque[list[VideoReformatter]]:  # noqa: ARG001  # the key
    """Return the sets of scalers for such conversions that no thread uses now."""
    return deque(maxlen=_MAX_SETS)


# A graph has to be built for each still, because sizes differ. Microseconds for a JPEG of 500x375 (of
# 1920x1280), without decoding:
#     224x224 rgb24, bicubic        graph 470 (1970)    scaler alone 290 (1680)
#     the same, padded              graph 480 (1920)    scaler alone 290 (1610)
#     the same, area, padded        graph 340 (990)     scaler alone 165 (690)
#     FFmpeg's own one step         graph 610 (2290)
@lru_cache(maxsize=256)
def fast_chain(ops: PictureOps) -> FastChain | None:
    """Return the conversions that perform operations without a graph; ``None``: they need a graph.

    Args:
        ops: The operations, without the input box and the mirroring, so that few chains are cached.
    """
    if not ops.gives_one or ops.pad_color != "black":
        return None
    if not ops.is_scaled and (ops.crop_width or ops.crop_height):
        return None  # a graph crops in the decoder's format, before the conversion
    target = ops.pix_fmt or ""
    # YUV only with JPEG's matrix and range: the colour of a border then needs no conversion.
    is_jpeg = (ops.color_matrix, ops.color_range) == ("bt601", "pc")
    if not (target in RGB_8BIT or (target in _YUV and is_jpeg)):
        return None
    is_default = ops.uses_default_conversion
    before = (() if is_default else ops.formats) or (target,)
    formats = before if before[-1] == target else (*before, target)
    return FastChain(ops, formats, len(before), BICUBIC if is_default else _flags(ops.flags))


def without_graph(frame: av.VideoFrame, ops: PictureOps) -> av.VideoFrame | None:
    """Perform operations by the scaler alone. Takes ownership of the frame.

    Returns:
        The same image as from a graph, bit for bit; ``None``: this frame needs a graph.

    Raises:
        PictureSizeError: The scaler does not take an image of this size.
        FilterError: The scaler cannot produce the requested size.
    """
    is_cut = ops.box is not None or ops.mirror
    chain = fast_chain(ops.uncut if is_cut else ops)
    if chain is None or not chain.takes(frame):
        return None
    if chain.converts_first and (part := part_to_convert(frame, ops)) is not None:
        if carries_more(frame):
            return None
        outer, (x, y, w, h) = part
        whole = whole_samples(frame, outer)
        inner = Placement((whole.width, whole.height), (w, h), -x, -y)
        return chain.run(whole, inner, mirror=ops.mirror)
    size = frame.width, frame.height
    if not is_cut:
        placement = chain.plan(size)
        if placement is None or (not _is_whole(placement) and carries_more(frame)):
            return None
        return chain.run(frame, placement)
    x, y, w, h = box = ops.box or (0, 0, *size)
    placement = chain.plan((w, h)) if fits(box, *size) else None
    if placement is None or frame.format.name not in _CUTTABLE or carries_more(frame):
        return None
    cut = Placement(size, (w, h), -x, -y)
    return chain.run(placed(frame, cut, mirror=ops.mirror), placement)


def _is_whole(placement: Placement) -> bool:
    """Whether an image is neither cropped nor gets a border."""
    return (placement.scaled, placement.left, placement.top) == (placement.canvas, 0, 0)


def _is_possible(width: int, height: int) -> bool:
    return (width + _EDGE) * (height + _EDGE) < _MAX_PIXELS


def placed(frame: av.VideoFrame, placement: Placement, *, mirror: bool = False) -> av.VideoFrame:
    """Draw a black border around an image or crop it, and mirror it, in at most one copy.

    The chroma of a crop begins with the sample that contains its corner, as in FFmpeg's ``crop=exact=1``.

    Returns:
        A new frame, or ``frame`` itself if nothing changes.

    Raises:
        ValueError: FFmpeg takes no frame as large as the canvas.
    """
    if _is_whole(placement) and not mirror:
        return frame
    name, left, top = frame.format.name, placement.left, placement.top
    (across, down), (width, height) = placement.scaled, placement.canvas
    result = like_frame(frame, width, height)
    # The part of the result that the image covers.
    first_x, first_y = max(0, left), max(0, top)
    end_x, end_y = min(width, left + across), min(height, top + down)
    has_border = (first_x, first_y, end_x, end_y) != (0, 0, width, height)
    planes = zip(plane_views(result), plane_views(frame), plane_steps(name), strict=True)
    for index, (plane, source, (right, below)) in enumerate(planes):
        if has_border:
            # Plane 3 is alpha: opaque. Chroma is neutral at 128.
            plane[:] = 255 if index == 3 else 128 if index and is_yuv(name) else 0
        # A chroma sample at the edge belongs to the image, even if the image covers only a part of it.
        target = plane[first_y // below : -(-end_y // below), first_x // right : -(-end_x // right)]
        rows, columns = target.shape[:2]
        part = source[max(0, -top) // below :, max(0, -left) // right :][:rows, :columns]
        target[:] = part[:, ::-1] if mirror else part
    return result


@lru_cache(maxsize=256)
def _same_without_graph(pix_fmt: str) -> bool:
    """Whether the scaler gives the same result alone and in a graph.

    With subsampled chroma, the scale filter reads the chroma location from the frame and the scaler alone
    does not: decoded video differs by up to 151 levels. The full-range JPEG formats state no location, and
    the remaining formats have full chroma. ``tests/test_fastpath_equivalence.py`` tries each.
    """
    if pix_fmt in TO_INTEGERS:
        return False
    if pix_fmt.startswith("yuvj"):
        return True
    format = av.VideoFormat(pix_fmt, 16, 16)
    return format.chroma_width() == 16 and format.chroma_height() == 16


def _keeps_range(frame: av.VideoFrame) -> bool:
    """Whether both the scaler alone and a graph keep the range of this frame."""
    name = frame.format.name
    return name in RGB_8BIT or (name.startswith("yuvj") and frame.color_range == FULL_RANGE)


def carries_more(frame: av.VideoFrame) -> bool:
    """Whether a frame carries a damage flag or metadata, which PyAV cannot write to a new frame."""
    try:
        return frame.is_corrupt or bool(frame.metadata)
    except UnicodeDecodeError:
        return True


@lru_cache(maxsize=256)
def _has_full_chroma(pix_fmt: str) -> bool:
    components = av.VideoFormat(pix_fmt, 16, 16).components
    return len(components) > 2 and all(part.width == part.height == 16 for part in components)


# Pixels converted around a box: at least one chroma sample of 4:1:0, then up to a multiple of twice that,
# where the scaler's rounding pattern restarts.
_MARGIN = 4
# Fewer than five chroma samples across or down are scaled by a kernel of less than three.
_LEAST = 5 * _MARGIN


def part_to_convert(
    frame: av.VideoFrame, ops: PictureOps, turn: str = ""
) -> tuple[Box, Box] | None:
    """Return the part of an image to convert before its box is cropped, and the box within that part.

    A box may begin and end inside a chroma sample, and a sample at the edge may cover fewer pixels.
    Converting a larger part of whole samples and then cropping gives the same pixels as converting the
    whole image, bit for bit. For a box of 256x256 in a JPEG of 2040x1356 it takes 14 ms with decoding, and
    the whole image 22.

    Args:
        frame: The image.
        ops: The operations: an exact conversion.
        turn: Filters that turn it upright before the box is cropped.

    Returns:
        The part and the box; ``None``: the crop can come first, or the box exceeds the image.
    """
    if ops.pix_fmt is None or not _has_full_chroma(ops.pix_fmt):
        return None
    name, width, height = frame.format.name, frame.width, frame.height
    is_cut = ops.box is not None or ops.mirror
    if not (turn or has_cut_chroma(name, width, height)) and not (
        is_cut and max(chroma_steps(name)) > 1
    ):
        return None
    # ops.box refers to the upright image, so a turned one is converted whole.
    x, y, w, h = (0, 0, width, height) if turn or ops.box is None else ops.box
    if ops.box is not None and not fits((x, y, w, h), width, height):
        return None
    left, right = _around(x, x + w, width)
    top, bottom = _around(y, y + h, height)
    return (left, top, right - left, bottom - top), (x - left, y - top, w, h)


def _around(start: int, end: int, side: int) -> tuple[int, int]:
    grain = 2 * _MARGIN
    first = max(0, min(start - _MARGIN, side - _LEAST)) // grain * grain
    last = max(end + _MARGIN, first + _LEAST)
    return first, min(side, -(-last // grain) * grain)
