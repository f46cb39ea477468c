"""Turn the decoded images of one stream upright and filter them, by the scaler alone or through a graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TypeAlias

import av

from spdl_media._fast_images import (
    converts_first,
    full_range_gray,
    part_around,
    whole_samples,
    without_graph,
)
from spdl_media._graph import FrameFilter
from spdl_media.codec import VideoCodec, usual_duration
from spdl_media.config import DecodeConfig
from spdl_media.errors import FilterError, PictureSizeError
from spdl_media.filter_desc import conversion_filters, cut_filters, filter_text, picture_ops
from spdl_media.formats import like_frame
from spdl_media.operations import PictureOps, parse_rate
from spdl_media.orientation import UPRIGHT_FILTERS, Box
from spdl_media.packets import PacketMetadata
from spdl_media.timing import ConstantRate

# FFmpeg does not say why a graph fails. If it takes a square of this side, it fails for the image's size.
_USUAL_SIDE = 256

# A decoded frame, its orientation, and whether it is damaged.
_Shown: TypeAlias = tuple[av.VideoFrame, int, bool]

_LIMITED = 1  # AVCOL_RANGE_MPEG
_LIMITED_GRAY = frozenset({"gray", "gray9le", "gray10le", "gray12le", "gray14le"})
"""Gray formats of video codecs, which may be of limited range."""


class PictureFilter:
    """Turns decoded images of one stream upright, and filters them.

    Args:
        codec: Of the stream.
        filter: What is done; ``None`` gives images as they are decoded, not turned either.
        config: Says whether they are turned.
        metadata: Of the packets; ``None``: they are those of a still, which has no time and no rate.

    Attributes:
        has_rate: Whether frames come at a constant rate. Then :meth:`push` takes those before the window,
            too: one of them is shown when it starts.
        upright: Whether what came out was turned.
        copied_corrupt: Timestamps of damaged frames that were copied, which PyAV cannot mark on a copy.
    """

    def __init__(
        self,
        codec: VideoCodec,
        filter: str | PictureOps | None,
        config: DecodeConfig,
        metadata: PacketMetadata | None = None,
    ) -> None:
        self._codec = codec
        self._desc = filter
        self._ops = picture_ops(filter)
        self._time_base, self._frame_rate = codec.time_base, codec.frame_rate
        self._rate: ConstantRate[_Shown] | None = None
        self.has_rate = self._goes_on = False
        if self._ops is not None and self._ops.frame_rate is not None:
            if metadata is not None:
                self._frame_rate, self.has_rate = parse_rate(self._ops.frame_rate), True
                self.follow(metadata)
            self._ops = replace(self._ops, frame_rate=None)
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

    def follow(self, metadata: PacketMetadata) -> None:
        """Take the window and the clock of the frames that come next."""
        self._goes_on = metadata.goes_on
        if self.has_rate and (self._rate is None or not metadata.continues):
            assert self._frame_rate is not None
            self._rate = ConstantRate(
                self._frame_rate, metadata.window, self._codec.time_base, metadata.zero
            )
            self._time_base = self._rate.time_base

    def push(
        self, frame: av.VideoFrame, orientation: int, *, is_corrupt: bool = False
    ) -> Iterable[av.VideoFrame]:
        """The frames that come out for this one, which is given away.

        Args:
            frame: As decoded.
            orientation: From which it is turned upright.
            is_corrupt: It is damaged in a way that FFmpeg does not say.

        Raises:
            FilterError: The filters do not take the frame; a PictureSizeError: not in this size.
        """
        if self._rate is None:
            return self._push(frame, orientation)
        if frame.pts is None:
            raise FilterError("frame_rate= needs the times of frames, and the source states none")
        # Where the file does not say how long the last frame is shown, it is as long as others.
        duration = frame.duration or usual_duration(self._codec)
        return self._at_rate(self._rate.push((frame, orientation, is_corrupt), frame.pts, duration))

    def _at_rate(self, moments: Iterable[tuple[_Shown, int]]) -> Iterator[av.VideoFrame]:
        for (frame, orientation, is_corrupt), pts in moments:
            # A graph takes a reference to the pixels, so the same frame can stand at several moments.
            frame.pts, frame.time_base, frame.duration = pts, self._time_base, 0
            if is_corrupt:
                self.copied_corrupt |= {pts}
            yield from self._push(frame, orientation)

    def _push(self, frame: av.VideoFrame, orientation: int) -> list[av.VideoFrame]:
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
            if self._ops.keeps_frames and not self.has_rate:
                return [frame]  # even a graph of nothing costs 25 microseconds a frame
            if self._is_still and (image := without_graph(frame, self._ops)) is not None:
                return [image]
        desc, self._part = self._route(frame, turn)
        before: list[av.VideoFrame] = []
        if self._graph is None or desc != self._graph_desc:
            before = self._drain()  # the size has changed in the stream
            self._graph = FrameFilter(
                desc,
                kind="video",
                time_base=self._time_base,
                frame_rate=self._frame_rate,
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

    def flush(self) -> Iterator[av.VideoFrame]:
        """The frames that are held back."""
        yield from self.end_run()
        yield from self._drain()

    def end_run(self) -> Iterable[av.VideoFrame]:
        """The frames at the moments of the last one, before frames that do not continue it."""
        return () if self._rate is None else self._at_rate(self._rate.flush(goes_on=self._goes_on))

    def _drain(self) -> list[av.VideoFrame]:
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
