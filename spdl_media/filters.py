"""Filter decoded frames: graphs with one input and one output, and images with or without a graph."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from fractions import Fraction
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, TypeAlias

import av
from av.video.reformatter import VideoReformatter

from spdl_media._ffmpeg import as_fraction, current_log, describe, ffmpeg_log, keep_freed_memory
from spdl_media.codec import VideoCodec, usual_duration
from spdl_media.config import DecodeConfig
from spdl_media.errors import FilterError, PictureSizeError
from spdl_media.fast_images import BICUBIC, FULL_RANGE, GBR, part_to_convert
from spdl_media.formats import (
    FLOAT_GRAY,
    full_range_gray,
    has_limited_gray,
    like_frame,
    to_ints,
    whole_samples,
)
from spdl_media.geometry import UPRIGHT_FILTERS, Box
from spdl_media.graph import (
    AvFrame,
    BuiltGraph,
    Kind,
    build,
    filter_errors,
    graph_error,
    pull_all,
    push_frame,
    quote_option,
    wire_simple,
)
from spdl_media.operations import Desc, filter_text, filters_of_part, picture_ops
from spdl_media.packets import PacketMetadata
from spdl_media.timing import ConstantRate, parse_rate

# FFmpeg does not say why a graph fails. If the graph takes a square of this side, the image's size is why.
_USUAL_SIDE = 256

# A decoded frame, its orientation, and whether it is damaged.
_OrientedFrame: TypeAlias = tuple[av.VideoFrame, int, bool]


def frame_options(frame: AvFrame) -> dict[str, str]:
    """Return size and format of a frame as options of FFmpeg's ``buffer`` or ``abuffer``."""
    if isinstance(frame, av.AudioFrame):
        return {
            "sample_rate": str(frame.sample_rate),
            "sample_fmt": frame.format.name,
            "channel_layout": frame.layout.name,
        }
    return {"video_size": f"{frame.width}x{frame.height}", "pix_fmt": frame.format.name}


def source_args(
    frame: AvFrame,
    time_base: Fraction | None = None,
    frame_rate: Fraction | None = None,
    sample_aspect_ratio: Fraction | None = None,
) -> str:
    """Write the arguments of a ``buffer`` or ``abuffer`` that takes frames like this one."""
    options: dict[str, object] = {**frame_options(frame)}
    base = as_fraction(frame.time_base) or time_base
    if isinstance(frame, av.AudioFrame):
        # Layouts such as "5.1(side)" contain characters that are special in options.
        options["channel_layout"] = quote_option(frame.layout.name)
        options["time_base"] = base or Fraction(1, frame.sample_rate)
    else:
        # Filters negotiate matrix and range like the format; if omitted, they are unspecified.
        options["time_base"] = base or Fraction(1)
        options["colorspace"], options["range"] = int(frame.colorspace), int(frame.color_range)
        if not frame_rate and base and frame.duration > 0:
            # Without a rate, tpad gives its frames wrong timestamps.
            frame_rate = 1 / (frame.duration * base)
        if frame_rate:
            options["frame_rate"] = frame_rate
        if sample_aspect_ratio:
            options["pixel_aspect"] = sample_aspect_ratio
    return ":".join(f"{name}={value}" for name, value in options.items())


@dataclass(eq=False)
class FrameFilter:
    """A graph with one input and one output, which filters the frames of a decoder.

    The graph is built for the first frame. When the size, format or colour of the frames changes, the graph
    is drained and rebuilt.

    Args:
        desc: FFmpeg's description of the filters.
        kind: ``"video"`` or ``"audio"``.
        time_base: Time base of frames that have none themselves.
        frame_rate: Frame rate of a video, if known; filters such as ``fps`` and ``tpad`` read it.
        sample_aspect_ratio: Width to height of a pixel, if known; PyAV's frames do not carry it.
        gives_one: The graph outputs one frame for each input, without delay. One of audio may hold frames.

    Raises:
        FilterError: The description is invalid, has more than one input or output, or its output is of the
            other kind.

    Thread safety: one thread at a time; the owner has to ensure it.
    """

    desc: str
    _: KW_ONLY
    kind: Kind
    time_base: Fraction | None = None
    frame_rate: Fraction | None = None
    sample_aspect_ratio: Fraction | None = None
    gives_one: bool = False
    finished: bool = field(default=False, init=False)
    """The graph outputs no more frames, whatever is sent (``trim`` after its end)."""

    def __post_init__(self) -> None:
        self._wiring = wire_simple(self.desc, self.kind)
        self._graph: BuiltGraph | None = None
        self._key: object = None
        self._idle, self._may_stay = deque[BuiltGraph](), False

    def push(self, frame: AvFrame, *, is_alike: bool = False) -> list[Any]:
        """Send one frame and return all frames that are ready. The caller keeps the frame.

        Args:
            frame: The frame.
            is_alike: It is known to have the size, format and colours of the previous frame.

        Raises:
            FilterError: A filter refuses the frame, or fails.
        """
        if self.finished:
            return []
        lines = current_log.lines
        if lines is None:
            with ffmpeg_log():
                return self.push(frame, is_alike=is_alike)
        key = self._key if is_alike else frame_key(frame)
        done: list[Any] = []
        if key != self._key or self._graph is None:
            # The size and format of a buffer source cannot change.
            done = self._drain()
            args = source_args(frame, self.time_base, self.frame_rate, self.sample_aspect_ratio)
            graph = None
            if self.gives_one:
                self._idle = _idle_graphs(self.desc, args)
                with suppress(IndexError):
                    graph = self._idle.pop()
            self._graph = graph or build(self._wiring, (args,))
            self._key, self.finished = key, False
        mark, self._may_stay = len(lines), False
        try:
            push_frame(self._graph.sources[0], frame)
            # A second pull would raise BlockingIOError, which costs 10 microseconds a frame.
            if self.gives_one and not done:
                result: Any = self._graph.sinks[0].pull()
                self._may_stay = self.kind == "video" and result.width * result.height <= _LARGEST
                return [result]
            return done + self._pull(self._graph)
        except av.BlockingIOError:
            return done
        except MemoryError:
            raise
        except av.FFmpegError as error:
            raise graph_error(self.desc, f"it failed: {describe(error, lines[mark:])}") from error

    def flush(self) -> list[Any]:
        """End the input and return the frames that the filters still hold. Later frames are ignored.

        Raises:
            FilterError: A filter fails.
        """
        rest = self._drain()
        self.finished = True
        return rest

    def release(self) -> None:
        """Let other filters use the graph. It keeps the memory of its frames, so none may be in use."""
        if self._graph is not None and self._may_stay:
            self._idle.append(self._graph)
            self._graph = None

    def _drain(self) -> list[Any]:
        if self._graph is None or self.finished or self._may_stay:
            return []
        with filter_errors(self._wiring.desc, "it failed"):
            push_frame(self._graph.sources[0], None)
            return self._pull(self._graph)

    def _pull(self, graph: BuiltGraph) -> list[Any]:
        frames, ended = pull_all(graph.sinks[0])
        self.finished = self.finished or ended
        return frames


# Graphs of such frames are kept for other videos: building one takes as long as scaling two small frames.
_LARGEST = 1 << 18  # pixels


@lru_cache(maxsize=16)
def _idle_graphs(desc: str, source: str) -> deque[BuiltGraph]:  # noqa: ARG001  # the key
    """Return graphs of these filters and this source that no filter uses now."""
    return deque(maxlen=16)


# Without the time base: it is the same for all frames of a stream, and reading its Fraction takes 10 times as
# long as the rest.
_video_key = attrgetter("width", "height", "format.name", "colorspace", "color_range")
_audio_key = attrgetter("sample_rate", "format.name", "layout.name")


def frame_key(frame: AvFrame) -> object:
    """Return what a graph is built for: it cannot take frames of another key."""
    return (_audio_key if isinstance(frame, av.AudioFrame) else _video_key)(frame)


# FFmpeg's default conversion to packed RGB takes each pixel's colour from one chroma sample, wherever that is
# said to lie, so a graph gives the same pixels. It needs pairs of rows. A scaler takes 40 microseconds for
# 480x270, a graph 62.
_QUICK_YUV = frozenset({"yuv420p", "yuvj420p", "yuv422p", "yuvj422p"})
_QUICK_RGB = {f"format={name}": name for name in ("rgb24", "bgr24")}


def _quick_conversion(
    frame: av.VideoFrame, desc: str
) -> Callable[[av.VideoFrame], av.VideoFrame] | None:
    """Return the scaler for frames like this one; ``None``: only a graph gives the same pixels."""
    pix_fmt = _QUICK_RGB.get(desc)
    if pix_fmt is None or frame.format.name not in _QUICK_YUV or frame.height % 2:
        return None
    keep_freed_memory()
    return partial(VideoReformatter().reformat, format=pix_fmt, interpolation=BICUBIC, threads=1)


class PictureFilter:
    """Turns the decoded images of one stream upright and filters them.

    Args:
        codec: Codec of the stream.
        filter: The filters; ``None`` returns images as decoded, not turned upright either.
        config: Tells whether images are turned upright.
        metadata: Metadata of the packets; ``None`` for a still, which has no time and no rate.

    Attributes:
        rate: Resamples to a constant frame rate; ``None``: frames keep their times. If set, :meth:`push`
            needs the frames before the window, too: one of them is shown at its start.
        orientation: EXIF orientation of the output, 1 if it was turned upright; 0 before any output.
        copied_corrupt: Timestamps of damaged frames that were copied: PyAV cannot set the flag on a copy.
    """

    def __init__(
        self,
        codec: VideoCodec,
        filter: Desc,
        config: DecodeConfig,
        metadata: PacketMetadata | None = None,
    ) -> None:
        self._codec = codec
        self._desc = filter
        self._ops = picture_ops(filter)
        self._time_base, self._frame_rate = codec.time_base, codec.frame_rate
        self.rate: ConstantRate[_OrientedFrame] | None = None
        self._goes_on = self._is_limited_gray = False
        if self._ops is not None and self._ops.frame_rate is not None:
            if metadata is not None:
                rate = self._frame_rate = parse_rate(self._ops.frame_rate)
                self.rate = ConstantRate(rate, metadata.window, codec.time_base, metadata.zero)
                self._time_base, self._goes_on = self.rate.time_base, metadata.goes_on
            self._ops = replace(self._ops, frame_rate=None)
        self._orient = config.orient
        self._graph: FrameFilter | None = None
        self._quick: Callable[[av.VideoFrame], av.VideoFrame] | None = None
        # The part of a frame that is copied before the graph runs, if any.
        self._part: Box | None = None
        self._key: object = None
        self.orientation = 0
        self.copied_corrupt: frozenset[int | None] = frozenset()
        if isinstance(filter, str) and (self._ops is None or self._ops.filter_desc):
            # Report a bad description even if the window turns out to be empty.
            FrameFilter(filter, kind="video")

    def follow(self, metadata: PacketMetadata) -> None:
        """Take the window and the clock of the next frames."""
        self._goes_on = metadata.goes_on
        if self.rate is not None and not metadata.continues:
            self.rate = self.rate.at(metadata.window, metadata.zero)

    def push(
        self, frame: av.VideoFrame, orientation: int, *, is_corrupt: bool = False
    ) -> Iterable[av.VideoFrame]:
        """Return the output frames for this one. Takes ownership of the frame.

        Args:
            frame: The frame as decoded.
            orientation: Its EXIF orientation.
            is_corrupt: It has damage that FFmpeg does not report.

        Raises:
            FilterError: The filters do not take the frame; PictureSizeError: they do not take its size.
        """
        if self.rate is None:
            return self._push(frame, orientation)
        if frame.pts is None:
            raise FilterError("frame_rate= needs the times of frames, and the source states none")
        # If the file states no duration for a frame, it gets the usual one.
        duration = frame.duration or usual_duration(self._codec)
        return self._at_rate(self.rate.push((frame, orientation, is_corrupt), frame.pts, duration))

    def _at_rate(self, moments: Iterable[tuple[_OrientedFrame, int]]) -> Iterator[av.VideoFrame]:
        for (frame, orientation, is_corrupt), pts in moments:
            # A graph only references the pixels, so one frame can be sent with several timestamps.
            frame.pts, frame.time_base, frame.duration = pts, self._time_base, 0
            if is_corrupt:
                self.copied_corrupt |= {pts}
            yield from self._push(frame, orientation)

    def _push(self, frame: av.VideoFrame, orientation: int) -> list[av.VideoFrame]:
        if self._desc is None:
            self.orientation = orientation
            return [frame]
        # Reading these attributes costs 0.3 microseconds, what is derived from them 100 times that.
        key = _video_key(frame), orientation
        is_alike = key == self._key
        if not is_alike:
            self._is_limited_gray = has_limited_gray(frame)
        if self._is_limited_gray:
            # FFmpeg's scaler treats all gray as full range, so limited range is expanded first.
            frame = self._marked(full_range_gray(frame), frame)
        if is_alike and self._graph is not None:
            return self._through_graph(self._graph, frame, is_alike=True)
        self.orientation = 1 if self._orient else orientation
        turn = UPRIGHT_FILTERS[orientation] if self._orient else ""
        if self._ops is not None and self._ops.keeps_frames and not (turn or self.rate):
            return [frame]  # even an empty graph costs 25 microseconds per frame
        desc, self._part = self._route(frame, turn)
        before: list[av.VideoFrame] = []
        if self._graph is None or desc != self._graph.desc:
            before = self._drain()  # the size has changed in the stream
            self._graph = FrameFilter(
                desc,
                kind="video",
                time_base=self._time_base,
                frame_rate=self._frame_rate,
                sample_aspect_ratio=self._codec.sample_aspect_ratio,
                gives_one=self._ops is not None and self._ops.gives_one,
            )
        self._key, self._quick = key, _quick_conversion(frame, desc)
        return before + self._through_graph(self._graph, frame)

    def _marked(self, copy: av.VideoFrame, frame: av.VideoFrame) -> av.VideoFrame:
        """Record the damage of a frame that was copied: PyAV cannot set the flag on a copy."""
        if copy is not frame and frame.is_corrupt:
            self.copied_corrupt |= {frame.pts}
        return copy

    def flush(self) -> Iterator[av.VideoFrame]:
        """Return the frames that the filters hold back.

        Raises:
            FilterError: A filter fails.
        """
        yield from self.end_run()
        yield from self._drain()

    def end_run(self) -> Iterable[av.VideoFrame]:
        """Return the output for the last frame at a constant rate, before frames that do not follow it.

        Raises:
            FilterError: The filters do not take the frame.
        """
        return () if self.rate is None else self._at_rate(self.rate.flush(goes_on=self._goes_on))

    def release(self) -> None:
        """End the use of the graph, whose frames the caller has not kept."""
        if self._graph is not None:
            self._graph.release()

    def _drain(self) -> list[av.VideoFrame]:
        return [] if self._graph is None else self._graph.flush()

    def _route(self, frame: av.VideoFrame, turn: str) -> tuple[str, Box | None]:
        """Return the graph for such frames, and the part that is copied first, if any."""
        ops = self._ops
        if ops is None:
            return _joined(turn, str(self._desc)), None
        part = part_to_convert(frame, ops, turn) if ops.is_exact_conversion else None
        name = frame.format.name
        first = to_ints(name, ops.pix_fmt, is_scaled=ops.is_scaled)
        last = "" if ops.pix_fmt or not name.startswith(FLOAT_GRAY) else f"format={name}"
        if part is None:
            return _joined(first, turn, *filter_text(ops), last) or "null", None
        outer, inner = part
        return _joined(first, *filters_of_part(ops, inner, turn)), outer

    def _through_graph(
        self, graph: FrameFilter, frame: av.VideoFrame, *, is_alike: bool = False
    ) -> list[av.VideoFrame]:
        if self._part is not None:
            frame = self._marked(whole_samples(frame, self._part), frame)
        # The scaler alone would convert the fields of an interlaced frame one by one.
        if self._quick is not None and not frame.interlaced_frame:
            result = self._quick(frame)
            result.colorspace, result.color_range = GBR, FULL_RANGE
            return [result]
        try:
            # After a quick conversion, the graph has not seen the previous frame.
            return graph.push(frame, is_alike=is_alike and self._quick is None)
        except FilterError as error:
            if self._codec.frame_rate is None and self._takes_others(graph.desc, frame):
                raise PictureSizeError(
                    f"an image of {frame.width}x{frame.height} is too thin or too small for these filters, "
                    f"which take one of {_USUAL_SIDE}x{_USUAL_SIDE}: {error.args[0]}",
                    filter_desc=error.filter_desc,
                ) from error
            raise

    def _takes_others(self, desc: str, frame: av.VideoFrame) -> bool:
        """Whether the graph that failed for an image takes one of usual size in the same format."""
        usual = like_frame(frame, _USUAL_SIDE, _USUAL_SIDE)
        with suppress(FilterError):
            FrameFilter(desc, kind="video", time_base=self._codec.time_base).push(usual)
            return True
        return False


def _joined(*filters: str) -> str:
    return ",".join(filter(None, filters))
