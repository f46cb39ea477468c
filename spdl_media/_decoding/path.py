"""The way of packets through a decoder and a filter graph, for one stream."""

from __future__ import annotations

import av

from spdl_media._decoding.odd_sizes import (
    Conversion,
    conversion_of,
    crop_text,
    has_cut_chroma,
    part_around,
    whole_samples,
)
from spdl_media._filters.cuts import Cut, fits, like_frame
from spdl_media._filters.plain_chain import carries_more, plain_chain, split_cut
from spdl_media._frame_filter import (
    FrameFilter,
)
from spdl_media.codec import VideoCodec
from spdl_media.config import DecodeConfig
from spdl_media.errors import FilterError, PictureSizeError
from spdl_media.formats import chroma_steps
from spdl_media.orientation import UPRIGHT_FILTERS

# FFmpeg does not say why a graph fails. If it takes a square of this side, it fails for the picture's size.
_USUAL_SIDE = 256


class PictureFilter:
    """Turns decoded pictures of one stream upright, and filters them.

    Attributes:
        upright: Whether what came out was turned.
        copied_corrupt: Timestamps of damaged frames that were copied, which PyAV cannot mark on a copy.
    """

    __slots__ = (
        "_codec",
        "_conversion",
        "_cut",
        "_cut_desc",
        "_desc",
        "_graph",
        "_graph_desc",
        "_is_still",
        "_orient",
        "_plain",
        "copied_corrupt",
        "upright",
    )

    def __init__(self, codec: VideoCodec, filter_desc: str | None, config: DecodeConfig) -> None:
        self._codec = codec
        self._desc = filter_desc
        self._orient = config.orient
        self._is_still = codec.frame_rate is None
        self._graph: FrameFilter | None = None
        self._graph_desc = ""
        self._cut, self._cut_desc, rest = split_cut(filter_desc or "")
        self._conversion = conversion_of(rest)
        self._plain = None if filter_desc is None else plain_chain(filter_desc)
        if filter_desc is not None and self._plain is None:
            FrameFilter(
                filter_desc, kind="video"
            )  # says what is wrong before a window proves empty
        self.upright = False
        self.copied_corrupt: frozenset[int | None] = frozenset()

    def push(self, frame: av.VideoFrame, orientation: int) -> list[av.VideoFrame]:
        """The frames that come out for this one, which is given away."""
        if self._desc is None:
            return [frame]
        turn = UPRIGHT_FILTERS[orientation] if self._orient else ""
        self.upright = self._orient
        if self._conversion is not None and self._converts_first(frame, turn):
            return self._converted(frame, self._conversion, turn)
        if self._is_still and not turn and self._plain is not None and self._plain.accepts(frame):
            return [self._plain(frame)]
        return self._through_graph(frame, ",".join(filter(None, (turn, self._desc))))

    def flush(self) -> list[av.VideoFrame]:
        """The frames that the graph holds back."""
        return [] if self._graph is None else self._graph.flush()

    def _converts_first(self, frame: av.VideoFrame, turn: str) -> bool:
        """Whether chroma of less than full size would lose its place in what is done before a conversion."""
        if turn or has_cut_chroma(frame.format.name, frame.width, frame.height):
            return True
        return self._cut is not None and max(chroma_steps(frame.format.name)) > 1

    def _converted(
        self, frame: av.VideoFrame, conversion: Conversion, turn: str
    ) -> list[av.VideoFrame]:
        """Convert first, and turn, cut and mirror then."""
        size = frame.width, frame.height
        # Boxes are those of upright pictures.
        cut = (None if turn else self._cut) or Cut(None, mirror=False)
        if cut.box is not None and not fits(cut.box, *size):
            return self._through_graph(frame, self._desc or "")  # which says so
        part = part_around(cut.box or (0, 0, *size), *size)
        if not turn and self._is_still and self._plain is not None and not carries_more(frame):
            first, rest = self._plain.halves()
            if first.accepts(frame) and rest.sizes(*part.inner[2:]) is not None:
                converted = first(whole_samples(frame, part.outer))
                return [rest(Cut(part.inner, mirror=cut.mirror).run(converted))]
        padded = has_cut_chroma(frame.format.name, *part.outer[2:])
        if padded:
            if frame.is_corrupt:
                self.copied_corrupt |= {frame.pts}
            frame = whole_samples(frame, part.outer)
        filters = (
            "" if padded or part.outer == (0, 0, *size) else crop_text(part.outer),
            conversion.filters,
            "" if not padded and part.inner == part.outer else crop_text(part.inner),
            *((turn, self._cut_desc) if turn else ("hflip" if cut.mirror else "",)),
            conversion.rest,
        )
        return self._through_graph(frame, ",".join(filter(None, filters)))

    def _through_graph(self, frame: av.VideoFrame, desc: str) -> list[av.VideoFrame]:
        before: list[av.VideoFrame] = []
        if (
            self._graph is not None and desc != self._graph_desc
        ):  # the size has changed in the stream
            before = self._graph.flush()
            self._graph = None
        if self._graph is None:
            self._graph_desc = desc
            self._graph = FrameFilter(
                desc,
                kind="video",
                time_base=self._codec.time_base,
                frame_rate=self._codec.frame_rate,
                sample_aspect_ratio=self._codec.sample_aspect_ratio,
            )
        try:
            return before + self._graph.push(frame)
        except FilterError as error:
            if self._is_still and self._takes_others(frame, desc):
                raise _too_thin(frame, error) from error
            raise

    def _takes_others(self, frame: av.VideoFrame, desc: str) -> bool:
        """Whether a graph that fails for a picture takes such pictures of a usual size."""
        usual = like_frame(frame, _USUAL_SIDE, _USUAL_SIDE)
        try:
            FrameFilter(desc, kind="video", time_base=self._codec.time_base).push(usual)
        except FilterError:
            return False
        return True


def _too_thin(frame: av.VideoFrame, error: FilterError) -> PictureSizeError:
    return PictureSizeError(
        f"a picture of {frame.width}x{frame.height} is too thin or too small for these filters, which take "
        f"one of {_USUAL_SIDE}x{_USUAL_SIDE}: {error.args[0]}",
        filter_desc=error.filter_desc,
    )
