"""Turn the decoded images of one stream upright and filter them, by the scaler alone or through a graph."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import av

from spdl_media._fast_images import carries_more, cut, fast_chain, like_frame
from spdl_media._frame_filter import FrameFilter
from spdl_media.codec import VideoCodec
from spdl_media.config import DecodeConfig
from spdl_media.errors import FilterError, PictureSizeError
from spdl_media.filter_desc import conversion_filters, cut_filters, filter_text, picture_ops
from spdl_media.formats import chroma_steps, plane_steps, plane_views
from spdl_media.geometry import Size, fits
from spdl_media.operations import PictureOps
from spdl_media.orientation import UPRIGHT_FILTERS, Box

# FFmpeg does not say why a graph fails. If it takes a square of this side, it fails for the image's size.
_USUAL_SIDE = 256
# What is converted beyond a box: a sample of chroma in 4:1:0 at least, and up to a multiple of twice that,
# where FFmpeg's patterns of rounding begin anew.
_MARGIN = 4


class _Route(NamedTuple):
    """The graph that frames of one size, format and orientation go through.

    Attributes:
        desc: Its description.
        whole: The box that is first copied with its last samples made whole, if any.
    """

    desc: str
    whole: Box | None = None


class PictureFilter:
    """Turns decoded images of one stream upright, and filters them.

    Args:
        codec: Of the stream.
        filter: What is done; ``None`` gives images as they are decoded, not turned either.
        config: Says whether they are turned.

    Attributes:
        upright: Whether what came out was turned.
        copied_corrupt: Timestamps of damaged frames that were copied, which PyAV cannot mark on a copy.
    """

    __slots__ = (
        "_codec",
        "_desc",
        "_fast",
        "_graph",
        "_is_conversion",
        "_is_still",
        "_keeps_frames",
        "_key",
        "_ops",
        "_orient",
        "_route",
        "copied_corrupt",
        "upright",
    )

    def __init__(
        self, codec: VideoCodec, filter: str | PictureOps | None, config: DecodeConfig
    ) -> None:
        self._codec = codec
        self._desc = filter
        self._ops = picture_ops(filter)
        self._orient = config.orient
        self._is_still = codec.frame_rate is None
        self._keeps_frames = self._ops is not None and self._ops.keeps_frames
        self._graph: FrameFilter | None = None
        self._route = _Route("")
        self._key: object = None
        self._fast = None if self._ops is None else fast_chain(self._ops)
        self._is_conversion = self._ops is not None and _is_exact_conversion(self._ops)
        self.upright = False
        self.copied_corrupt: frozenset[int | None] = frozenset()
        if isinstance(filter, str) and self._fast is None:
            # Say what is wrong before the window proves empty.
            FrameFilter(filter, kind="video")

    def push(self, frame: av.VideoFrame, orientation: int) -> list[av.VideoFrame]:
        """The frames that come out for this one, which is given away."""
        if self._desc is None:
            return [frame]
        # Attributes of a frame cost 0.2 microseconds together, and what follows from them 100 times that.
        key = frame.width, frame.height, frame.format.name, orientation
        if key == self._key and self._graph is not None:
            return self._through_graph(frame)
        self.upright = self._orient
        turn = UPRIGHT_FILTERS[orientation] if self._orient else ""
        if self._keeps_frames and not turn:
            return [frame]  # even a graph of nothing costs 25 microseconds a frame
        if self._is_still and not turn and (image := self._by_scaler(frame)) is not None:
            return [image]
        self._key = key
        before = self._take_route(self._route_of(frame, turn))
        return before + self._through_graph(frame)

    def flush(self) -> list[av.VideoFrame]:
        """The frames that the graph holds back."""
        return [] if self._graph is None else self._graph.flush()

    def _by_scaler(self, frame: av.VideoFrame) -> av.VideoFrame | None:
        """The result without a graph; ``None``: it takes one."""
        chain = self._fast
        if chain is None or self._ops is None:
            return None
        if not self._converts_first(frame, ""):
            plan = chain.plan_for(frame)
            return None if plan is None else chain(frame, plan)
        part = _part(frame, self._ops.box)
        if part is None or carries_more(frame) or not chain.takes(frame):
            return None
        outer, inner = part
        converted = chain.convert_first(_whole_samples(frame, outer))
        return chain.convert_last(cut(converted, inner, mirror=self._ops.mirror))

    def _converts_first(self, frame: av.VideoFrame, turn: str) -> bool:
        """Whether chroma of less than full size would lose its place in what is done before a conversion."""
        if not self._is_conversion or self._ops is None:
            return False
        name = frame.format.name
        if turn or _has_cut_chroma(name, frame.width, frame.height):
            return True
        # A box begins and ends amid chroma samples. So a larger one of whole samples is converted and then
        # cut, which gives the same part of the whole image's conversion, bit for bit.
        return (self._ops.box is not None or self._ops.mirror) and max(chroma_steps(name)) > 1

    def _route_of(self, frame: av.VideoFrame, turn: str) -> _Route:
        ops = self._ops
        if ops is None:
            return _Route(_joined(turn, str(self._desc)))
        # Boxes are those of upright images.
        part = _part(frame, None if turn else ops.box)
        if part is None or not self._converts_first(frame, turn):
            return _Route(_joined(turn, *filter_text(ops)) or "null")
        outer, inner = part
        scaler, first, *rest = conversion_filters(ops)
        is_padded = _has_cut_chroma(frame.format.name, *outer[2:])
        is_whole = outer == (0, 0, frame.width, frame.height)
        cuts = cut_filters(ops.box, mirror=ops.mirror)
        desc = _joined(
            "" if is_padded or is_whole else _crop(outer),
            *(scaler, first),
            "" if not is_padded and inner == outer else _crop(inner),
            *([turn, *cuts] if turn else cut_filters(None, mirror=ops.mirror)),
            *rest,
        )
        return _Route(desc, outer if is_padded else None)

    def _take_route(self, route: _Route) -> list[av.VideoFrame]:
        """Make the graph of a route; what the graph before it still held."""
        if self._graph is not None and route == self._route:
            return []
        before = self.flush()  # the size has changed in the stream
        self._route = route
        self._graph = FrameFilter(
            route.desc,
            kind="video",
            time_base=self._codec.time_base,
            frame_rate=self._codec.frame_rate,
            sample_aspect_ratio=self._codec.sample_aspect_ratio,
            gives_one=self._ops is not None and self._ops.gives_one,
        )
        return before

    def _through_graph(self, frame: av.VideoFrame) -> list[av.VideoFrame]:
        if self._route.whole is not None:
            if frame.is_corrupt:
                self.copied_corrupt |= {frame.pts}
            frame = _whole_samples(frame, self._route.whole)
        try:
            return self._graph.push(frame)  # type: ignore[union-attr]  # the callers made it
        except FilterError as error:
            if self._is_still and self._takes_others(frame):
                raise _too_thin(frame, error) from error
            raise

    def _takes_others(self, frame: av.VideoFrame) -> bool:
        """Whether a graph that fails for an image takes such images of a usual size."""
        usual = like_frame(frame, _USUAL_SIDE, _USUAL_SIDE)
        try:
            FrameFilter(self._route.desc, kind="video", time_base=self._codec.time_base).push(usual)
        except FilterError:
            return False
        return True


def _too_thin(frame: av.VideoFrame, error: FilterError) -> PictureSizeError:
    return PictureSizeError(
        f"a picture of {frame.width}x{frame.height} is too thin or too small for these filters, which take "
        f"one of {_USUAL_SIDE}x{_USUAL_SIDE}: {error.args[0]}",
        filter_desc=error.filter_desc,
    )


def _joined(*filters: str) -> str:
    return ",".join(filter(None, filters))


def _is_exact_conversion(ops: PictureOps) -> bool:
    """Whether operations only convert, exactly, to a format with chroma in full."""
    if ops.pix_fmt is None or ops.uses_default_conversion or not ops.is_conversion:
        return False
    return _has_full_chroma(ops.pix_fmt)


@lru_cache(maxsize=256)
def _has_full_chroma(pix_fmt: str) -> bool:
    components = av.VideoFormat(pix_fmt, 16, 16).components
    return len(components) > 2 and all(part.width == part.height == 16 for part in components)


def _has_cut_chroma(pix_fmt: str, width: int, height: int) -> bool:
    """Whether the last row or column of chroma is for fewer rows or columns of pixels than the others."""
    across, down = chroma_steps(pix_fmt)
    return width % across != 0 or height % down != 0


def _crop(box: Box) -> str:
    x, y, w, h = box
    return f"crop={w}:{h}:{x}:{y}:exact=1"


def _part(frame: av.VideoFrame, box: Box | None) -> tuple[Box, Box] | None:
    """What to convert of an image for a box, and where that lies in it; ``None``: the box lies outside."""
    size: Size = frame.width, frame.height
    x, y, w, h = box or (0, 0, *size)
    if not fits((x, y, w, h), *size):
        return None
    left, right = _around(x, x + w, size[0])
    top, bottom = _around(y, y + h, size[1])
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
def _whole_samples(frame: av.VideoFrame, box: Box) -> av.VideoFrame:
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
