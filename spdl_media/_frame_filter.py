"""Graphs of FFmpeg's, built from a description, and run over the frames of one stream."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import count
from typing import Any, TypeAlias

import av
import av.filter
import numpy as np
from av.filter import Graph as AvGraph
from av.filter.context import FilterContext

from spdl_media._ffmpeg import (
    LogLine,
    as_fraction,
    current_log,
    describe,
    ffmpeg_log,
)
from spdl_media._graph_syntax import (
    SINKS,
    SOURCES,
    Kind,
    Wiring,
    add_filter,
    filter_errors,
    graph_error,
    quote_option,
    wire,
)
from spdl_media.errors import FilterError
from spdl_media.frames import AudioChunk
from spdl_media.timing import nearest_sample

AvFrame: TypeAlias = av.VideoFrame | av.AudioFrame

_SOURCE_OF = {"video": "buffer", "audio": "abuffer"}
_SINK_OF = {"video": "buffersink", "audio": "abuffersink"}


@dataclass(frozen=True, slots=True)
class BuiltGraph:
    """A configured graph with its ends: declared ones first, then open ones in the order of the wiring."""

    graph: AvGraph  # kept, because contexts refer to it weakly
    sources: tuple[FilterContext, ...]
    sinks: tuple[FilterContext, ...]


def build(wiring: Wiring, source_args: Sequence[str]) -> BuiltGraph:
    """Make and configure a graph whose open inputs are fed by sources with the given arguments."""
    graph, desc = AvGraph(), wiring.desc
    # The pipeline owns the parallelism; FFmpeg's default starts threads for each graph.
    graph.threads = 1
    contexts = [add_filter(graph, desc, node) for node in wiring.nodes]
    sources = [c for c, node in zip(contexts, wiring.nodes, strict=True) if node.name in SOURCES]
    sinks = [c for c, node in zip(contexts, wiring.nodes, strict=True) if node.name in SINKS]
    with filter_errors(desc, "its filters cannot be joined"):
        for from_, output, to, input in wiring.links:
            contexts[from_].link_to(contexts[to], output, input)
        for pad, args in zip(wiring.inputs, source_args, strict=True):
            sources.append(graph.add(_SOURCE_OF[pad.kind], args))
            sources[-1].link_to(contexts[pad.node], 0, pad.index)
        for pad in wiring.outputs:
            sinks.append(graph.add(_SINK_OF[pad.kind]))
            contexts[pad.node].link_to(sinks[-1], pad.index, 0)
    with filter_errors(
        desc, f"it cannot be set up for {' and '.join(source_args) or 'its inputs'}"
    ):
        graph.configure()
    return BuiltGraph(graph, tuple(sources), tuple(sinks))


def frame_options(frame: AvFrame) -> dict[str, str]:
    """Size and format of a frame, by the names of FFmpeg's ``buffer`` and ``abuffer``."""
    if isinstance(frame, av.AudioFrame):
        return {
            "sample_rate": str(frame.sample_rate),
            "sample_fmt": frame.format.name,
            "channel_layout": frame.layout.name,
        }
    return {"video_size": f"{frame.width}x{frame.height}", "pix_fmt": frame.format.name}


def in_words(options: dict[str, str]) -> str | None:
    """Size and format for messages; ``None``: nothing is said of them."""
    parts = map(options.get, ("video_size", "pix_fmt", "sample_fmt", "channel_layout"))
    rate = options.get("sample_rate")
    return " ".join(filter(None, (*parts, f"{rate} Hz" if rate else None))) or None


def source_args(
    frame: AvFrame,
    *,
    time_base: Fraction | None = None,
    frame_rate: Fraction | None = None,
    sample_aspect_ratio: Fraction | None = None,
) -> str:
    """Arguments of the ``buffer`` or ``abuffer`` that takes frames like this one."""
    options: dict[str, object] = {**frame_options(frame)}
    base = as_fraction(frame.time_base) or time_base
    if isinstance(frame, av.AudioFrame):
        # Layouts such as "5.1(side)" have characters that mean something between options.
        options["channel_layout"] = quote_option(frame.layout.name)
        options["time_base"] = base or Fraction(1, frame.sample_rate)
    else:
        # Filters negotiate matrix and range like the format; left out, they count as unspecified.
        options["time_base"] = base or Fraction(1)
        options["colorspace"], options["range"] = int(frame.colorspace), int(frame.color_range)
        if rate := frame_rate or _rate_by_duration(frame, base):
            options["frame_rate"] = rate
        if sample_aspect_ratio:
            options["pixel_aspect"] = sample_aspect_ratio
    return ":".join(f"{name}={value}" for name, value in options.items())


def _rate_by_duration(frame: av.VideoFrame, time_base: Fraction | None) -> Fraction | None:
    # tpad gives its frames nonsensical times where no rate is known.
    return 1 / (frame.duration * time_base) if frame.duration > 0 and time_base else None


def pull_all(sink: FilterContext) -> tuple[list[Any], bool]:
    """All frames that a sink has ready, and whether it has ended."""
    frames: list[Any] = []
    # FFmpeg tells "not yet" from "no more" by two errors.
    while True:
        try:
            frames.append(sink.pull())
        except av.BlockingIOError:
            return frames, False
        except av.EOFError:
            return frames, True


def push_frame(source: FilterContext, frame: AvFrame | None) -> bool:
    """Put a frame in; False: the filters have ended and take no more."""
    # Filters such as trim end before their input does.
    try:
        source.push(frame)
    except av.EOFError:
        return False
    return True


class FrameFilter:
    """One input, one output: what decoding runs its frames through.

    The graph is made for the first frame; when a later one has another size, format or colour, the old graph
    is drained and a new one made.

    Args:
        desc: FFmpeg's description of the filters.
        kind: What flows: ``"video"`` or ``"audio"``.
        time_base: Of the frames, where they carry none themselves.
        frame_rate: Of a video, if known; filters such as ``fps`` and ``tpad`` read it.
        sample_aspect_ratio: Of the pixels, if known; PyAV's frames do not tell.
        gives_one: Each frame gives one at once.

    Raises:
        FilterError: The description is bad, or has more than one input or output, or turns one kind into
            the other.

    Thread safety: one thread at a time; its owner takes care.
    """

    __slots__ = ("_gives_one", "_graph", "_key", "_of_stream", "_wiring", "finished")

    finished: bool
    """The graph has said that it gives no more frames, whatever comes (``trim`` past its end)."""

    def __init__(
        self,
        desc: str,
        *,
        kind: Kind,
        time_base: Fraction | None = None,
        frame_rate: Fraction | None = None,
        sample_aspect_ratio: Fraction | None = None,
        gives_one: bool = False,
    ) -> None:
        self._wiring = wire(desc)
        _check_simple(self._wiring, kind)
        self._gives_one = gives_one
        self._of_stream = (time_base, frame_rate, sample_aspect_ratio)
        self._graph: BuiltGraph | None = None
        self._key: object = None
        self.finished = False

    def push(self, frame: AvFrame) -> list[Any]:
        """Put in one frame; take out all that are ready, of the same kind. The frame stays the caller's."""
        if self.finished:
            return []
        lines = current_log()
        if lines is None:
            with ffmpeg_log() as lines:
                return self._push(frame, lines)
        return self._push(frame, lines)

    def _push(self, frame: AvFrame, lines: list[LogLine]) -> list[Any]:
        done = self._follow(frame) if _frame_key(frame) != self._key else []
        source, sink = self._graph.sources[0], self._graph.sinks[0]  # type: ignore[union-attr]
        mark = len(lines)
        try:
            if not push_frame(source, frame):
                self.finished = True
            # A second pull would raise BlockingIOError, which costs 10 microseconds a frame.
            if self._gives_one and not done:
                return [sink.pull()]
            return done + self._pull()
        except av.BlockingIOError:
            return done
        except av.FFmpegError as error:
            text = f"it failed: {describe(error, lines[mark:])}"
            raise graph_error(self._wiring.desc, text) from error

    def flush(self) -> list[Any]:
        """End the input; take out what the filters still hold. Nothing can be pushed afterwards."""
        rest = self._drain()
        self.finished = True
        return rest

    def _follow(self, frame: AvFrame) -> list[Any]:
        """Make the graph fit the frame; what the graph before it still held."""
        rest = self._drain()
        time_base, frame_rate, aspect = self._of_stream
        # A source has one size and format for good.
        args = source_args(
            frame, time_base=time_base, frame_rate=frame_rate, sample_aspect_ratio=aspect
        )
        self._graph, self._key = build(self._wiring, (args,)), _frame_key(frame)
        self.finished = False
        return rest

    def _drain(self) -> list[Any]:
        if self._graph is None or self.finished:
            return []
        with filter_errors(self._wiring.desc, "it failed"):
            push_frame(self._graph.sources[0], None)
            return self._pull()

    def _pull(self) -> list[Any]:
        frames, ended = pull_all(self._graph.sinks[0])  # type: ignore[union-attr]  # the callers made it
        self.finished = self.finished or ended
        return frames


def _frame_key(frame: AvFrame) -> object:
    if isinstance(frame, av.AudioFrame):
        return frame.sample_rate, frame.format.name, frame.layout.name
    # Without the time base, whose Fraction takes 10 times as long: it is one for all frames of a stream.
    return frame.width, frame.height, frame.format.name, frame.colorspace, frame.color_range


def _check_simple(wiring: Wiring, kind: Kind) -> None:
    declared = [node.name for node in wiring.nodes if node.name in (*SOURCES, *SINKS)]
    ends = len(wiring.inputs), len(wiring.outputs)
    if declared or ends != (1, 1):
        what = (
            f"declares {declared[0]}"
            if declared
            else f"has {ends[0]} open inputs and {ends[1]} open outputs"
        )
        raise FilterError(
            f"filter description {wiring.desc!r} {what}; decoding needs one input and one output, both left "
            "open. FilterGraph runs any graph over decoded frames",
            filter_desc=wiring.desc,
        )
    for pad, verb in ((wiring.inputs[0], "takes"), (wiring.outputs[0], "gives")):
        if pad.kind != kind:
            raise FilterError(
                f"filter description {wiring.desc!r} {verb} {pad.kind}, but the packets are {kind}",
                filter_desc=wiring.desc,
            )


def sample_time_base(sample_rate: int, zero: Fraction) -> Fraction:
    """The unit of time in which each sample of the container's clock stands at a whole number.

    Files count in units of their own, in Matroska in milliseconds, and what filters give would stand at
    such a place. Where there is none that FFmpeg can count in, one sample is the unit.
    """
    unit = math.lcm(sample_rate, zero.denominator)
    return Fraction(1, unit if unit < 2**31 else sample_rate)


def place_frame(frame: av.AudioFrame, pts: int | None, time_base: Fraction) -> None:
    """Let a frame begin there."""
    frame.time_base = time_base
    frame.pts = pts


def exact_pts(chunk: AudioChunk, time_base: Fraction, zero: Fraction) -> int | None:
    """Where the chunk begins on the stream's own clock, in this unit, rounded; ``None``: no one knows."""
    frame, rate = chunk.frame, chunk.frame.sample_rate
    # In whole numbers: fractions would take longer than small frames take to filter.
    if chunk.position is not None:
        ticks = chunk.position * zero.denominator + zero.numerator * rate
        unit = zero.denominator * rate
    elif frame.pts is not None:
        base = as_fraction(frame.time_base) or Fraction(1, rate)
        ticks = frame.pts * base.numerator * rate + chunk.start * base.denominator
        unit = base.denominator * rate
    else:
        return None
    divisor = unit * time_base.numerator
    return (2 * ticks * time_base.denominator + divisor) // (2 * divisor)


def whole_frame(chunk: AudioChunk) -> av.AudioFrame:
    """The chunk as a frame that is not shared, unless it is the whole one: filters take whole frames."""
    return chunk.frame if len(chunk) == chunk.frame.samples else copy_chunk(chunk)


def copy_chunk(chunk: AudioChunk) -> av.AudioFrame:
    whole = chunk.frame
    part = av.AudioFrame(whole.format.name, whole.layout.name, len(chunk))
    part.sample_rate = whole.sample_rate
    for plane, samples in zip(part.planes, chunk.planes, strict=True):
        target = np.frombuffer(memoryview(plane), samples.dtype, samples.size)
        target[:] = samples.reshape(-1)
    return part


def placed_chunk(frame: av.AudioFrame, zero: Fraction) -> AudioChunk:
    """A frame that came out of a filter, with its place on the container's clock."""
    base = frame.time_base or Fraction(1, frame.sample_rate)
    position = nearest_sample(frame.pts or 0, base, zero, frame.sample_rate)
    return AudioChunk(frame, 0, frame.samples, position)


@dataclass(slots=True, eq=False)
class Port:
    """An end of a graph: where frames enter or leave.

    Attributes:
        node: Position among the filters of the one that is the end, or that an open end belongs to.
        kind: What flows there.
        name: What messages call it.
        key: What callers call it.
        options: What a node of the text says of the frames, by FFmpeg's names; ``None``: it is left open.
        format: The same in words, or that of the first frame of an open end; ``None``: not yet known.
        time_base: The unit of time that the frames have, if known; sound is brought to it.
        args: Arguments of the source that feeds an open input, once its first frame has come.
        waiting: Frames that came before the graph could be made.
    """

    node: int
    kind: Kind
    name: str
    key: str
    options: dict[str, str] | None = None
    format: str | None = None
    time_base: Fraction | None = None
    args: str = ""
    waiting: deque[AvFrame] = field(default_factory=deque)

    def __post_init__(self) -> None:
        if self.options is not None:
            self.format = in_words(self.options)
            # An expression is FFmpeg's to evaluate.
            with suppress(KeyError, ValueError):
                self.time_base = Fraction(self.options["time_base"])

    @property
    def declared(self) -> bool:
        """Whether the text has a node for it."""
        return self.options is not None


def make_ports(wiring: Wiring, *, inputs: bool) -> list[Port]:
    """The ends on one side, declared ones first, as :class:`BuiltGraph` has them."""
    kinds = SOURCES if inputs else SINKS
    ports = []
    for position, node in enumerate(wiring.nodes):
        if node.name in kinds:
            name = f"{node.name}@{node.id}" if node.id else node.name
            options = _options(node.args or "")
            ports.append(Port(position, kinds[node.name], name, node.id or "", options))
    side, pads = ("in", wiring.inputs) if inputs else ("out", wiring.outputs)
    # One without a label needs no name; of several, each must be reachable.
    has_several = sum(not pad.label for pad in pads) > 1
    numbers = count()
    for pad in pads:
        key = pad.label or (f"{side}{next(numbers)}" if has_several else "")
        ports.append(Port(pad.node, pad.kind, key or side, key))
    return ports


def _options(args: str) -> dict[str, str]:
    pairs = (part.partition("=") for part in args.split(":"))
    options = {name.strip(): value.strip() for name, equals, value in pairs if equals}
    # FFmpeg takes the size in either form.
    if "width" in options and "height" in options:
        options.setdefault("video_size", f"{options['width']}x{options['height']}")
    return options


def fits_port(port: Port, frame: AvFrame, given: str | None) -> bool:
    """Whether an input takes a frame, which is ``given`` in words."""
    options = port.options
    if options is None:
        return given == port.format
    declared = port.time_base
    if declared is not None and frame.time_base and declared != as_fraction(frame.time_base):
        return False
    # Only what both sides say is compared: a declaration may leave some out.
    said = frame_options(frame)
    return all(options.get(name, value) == value for name, value in said.items())
