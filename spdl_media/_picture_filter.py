"""Turn the decoded images of one stream upright and filter them, by the scaler alone or through a graph."""

from __future__ import annotations

import av

from spdl_media._fast_images import (
    converts_first,
    full_range_gray,
    part_around,
    whole_samples,
    without_graph,
)
from spdl_media._graph import FrameFilter
from spdl_media.codec import VideoCodec
from spdl_media.config import DecodeConfig
from spdl_media.errors import FilterError, PictureSizeError
from spdl_media.filter_desc import conversion_filters, cut_filters, filter_text, picture_ops
from spdl_media.formats import like_frame
from spdl_media.operations import PictureOps
from spdl_media.orientation import UPRIGHT_FILTERS, Box

# FFmpeg does not say why a graph fails. If it takes a square of this side, it fails for the image's size.
_USUAL_SIDE = 256

_LIMITED = 1  # AVCOL_RANGE_MPEG
_LIMITED_GRAY = frozenset({"gray", "gray9le", "gray10le", "gray12le", "gray14le"})
"""Gray formats of video codecs, which may be of limited range."""


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

    def __init__(
        self, codec: VideoCodec, filter: str | PictureOps | None, config: DecodeConfig
    ) -> None:
        self._codec = codec
        self._desc = filter
        self._ops = picture_ops(filter)
        self._orient = config.orient
        self._is_still = codec.frame_rate is None
        self._graph: FrameFilter | None = None
        self._graph_desc = ""
        # What is copied of a frame before it goes through the graph, if anything.
        self._part: Box | None = None
        self._key: object = None
        self.upright = False
        self.copied_corrupt: frozenset[int | None] = frozenset()
        if isinstance(filter, str) and (self._ops is None or self._ops.filter_desc):
            # Say what is wrong before the window proves empty.
            FrameFilter(filter, kind="video")

    def push(self, frame: av.VideoFrame, orientation: int) -> list[av.VideoFrame]:
        """The frames that come out for this one, which is given away.

        Raises:
            FilterError: The filters do not take the frame; a PictureSizeError: not in this size.
        """
        if self._desc is None:
            return [frame]
        if frame.color_range == _LIMITED and frame.format.name in _LIMITED_GRAY:
            frame = self._full_range(frame)
        # Attributes of a frame cost 0.2 microseconds together, and what follows from them 100 times that.
        key = frame.width, frame.height, frame.format.name, orientation
        if key == self._key and self._graph is not None:
            return self._through_graph(self._graph, frame)
        self.upright = self._orient
        turn = UPRIGHT_FILTERS[orientation] if self._orient else ""
        if self._ops is not None and not turn:
            if self._ops.keeps_frames:
                return [frame]  # even a graph of nothing costs 25 microseconds a frame
            if self._is_still and (image := without_graph(frame, self._ops)) is not None:
                return [image]
        desc, self._part = self._route(frame, turn)
        before: list[av.VideoFrame] = []
        if self._graph is None or desc != self._graph_desc:
            before = self.flush()  # the size has changed in the stream
            self._graph = FrameFilter(
                desc,
                kind="video",
                time_base=self._codec.time_base,
                frame_rate=self._codec.frame_rate,
                sample_aspect_ratio=self._codec.sample_aspect_ratio,
                gives_one=self._ops is not None and self._ops.gives_one,
            )
        self._key, self._graph_desc = key, desc
        return before + self._through_graph(self._graph, frame)

    def _full_range(self, gray: av.VideoFrame) -> av.VideoFrame:
        """FFmpeg's scaler takes all gray for full range, so its levels are spread before."""
        if gray.is_corrupt:
            self.copied_corrupt |= {gray.pts}
        return full_range_gray(gray)

    def flush(self) -> list[av.VideoFrame]:
        """The frames that the graph holds back."""
        return [] if self._graph is None else self._graph.flush()

    def _route(self, frame: av.VideoFrame, turn: str) -> tuple[str, Box | None]:
        """The graph that such frames go through, and the part that is first copied, if any."""
        ops = self._ops
        if ops is None:
            return _joined(turn, str(self._desc)), None
        # Boxes are those of upright images.
        part = part_around(frame, None if turn else ops.box)
        if part is None or not converts_first(frame, ops, turn):
            return _joined(turn, *filter_text(ops)) or "null", None
        outer, inner = part
        x, y, w, h = inner
        scaler, first, *rest = conversion_filters(ops)
        return _joined(
            *(scaler, first, f"crop={w}:{h}:{x}:{y}:exact=1"),
            *([turn, *cut_filters(ops.box, mirror=ops.mirror)] if turn else []),
            *([] if turn else cut_filters(None, mirror=ops.mirror)),
            *rest,
        ), outer

    def _through_graph(self, graph: FrameFilter, frame: av.VideoFrame) -> list[av.VideoFrame]:
        if self._part is not None:
            whole = whole_samples(frame, self._part)
            if whole is not frame and frame.is_corrupt:
                self.copied_corrupt |= {frame.pts}
            frame = whole
        try:
            return graph.push(frame)
        except FilterError as error:
            if self._is_still and self._takes_others(frame):
                raise PictureSizeError(
                    f"an image of {frame.width}x{frame.height} is too thin or too small for these filters, "
                    f"which take one of {_USUAL_SIDE}x{_USUAL_SIDE}: {error.args[0]}",
                    filter_desc=error.filter_desc,
                ) from error
            raise

    def _takes_others(self, frame: av.VideoFrame) -> bool:
        """Whether a graph that fails for an image takes such images of a usual size."""
        usual = like_frame(frame, _USUAL_SIDE, _USUAL_SIDE)
        try:
            FrameFilter(self._graph_desc, kind="video", time_base=self._codec.time_base).push(usual)
        except FilterError:
            return False
        return True


def _joined(*filters: str) -> str:
    return ",".join(filter(None, filters))
