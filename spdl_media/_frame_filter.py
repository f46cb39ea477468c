"""Graphs of FFmpeg's, built from a description, and run over the frames of one stream."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal, TypeAlias

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
    ffmpeg_errors,
    ffmpeg_log,
)
from spdl_media._graph_syntax import Graph, Node, parse_graph, quote_option
from spdl_media.errors import FilterError
from spdl_media.frames import AudioChunk
from spdl_media.timing import nearest_sample

Kind: TypeAlias = Literal["video", "audio"]
AvFrame: TypeAlias = av.VideoFrame | av.AudioFrame

SOURCES: dict[str, Kind] = {"buffer": "video", "abuffer": "audio"}
SINKS: dict[str, Kind] = {"buffersink": "video", "abuffersink": "audio"}
_SOURCE_OF = {"video": "buffer", "audio": "abuffer"}
_SINK_OF = {"video": "buffersink", "audio": "abuffersink"}
_ANY_VIDEO = "video_size=16x16:pix_fmt=yuv420p:time_base=1/1"


@dataclass(frozen=True, slots=True)
class Pad:
    """An open input or output of a graph: which pad of which filter, its label, and what flows there."""

    node: int
    index: int
    label: str | None
    kind: Kind


@dataclass(frozen=True, slots=True)
class Wiring:
    """A description, parsed and with every pad accounted for, so that graphs are built without thought.

    Attributes:
        nodes: The filters.
        links: ``(from filter, its output, to filter, its input)``, by position in ``nodes``.
        inputs: Inputs that nothing in the text feeds.
        outputs: Outputs that go nowhere in the text.
    """

    desc: str
    nodes: tuple[Node, ...]
    links: tuple[tuple[int, int, int, int], ...]
    inputs: tuple[Pad, ...]
    outputs: tuple[Pad, ...]


@lru_cache(maxsize=512)
def wire(desc: str) -> Wiring:
    """Parse a description and find out how its filters are joined.

    How many inputs and outputs a filter has can depend on its arguments (``split=3``), so each is made once.

    Raises:
        FilterError: Bad syntax, an unknown filter, an option or a value that it does not take.
    """
    graph = parse_graph(desc)
    nodes = tuple(graph.nodes)
    scratch = AvGraph()
    pads = [_count_pads(scratch, desc, node) for node in nodes]
    links = tuple(_links(graph, pads))
    fed = {(node, index) for _, _, node, index in links}
    used = {(node, index) for node, index, _, _ in links}
    return Wiring(
        desc,
        nodes,
        links,
        tuple(_open_pads(desc, nodes, pads, fed, inputs=True)),
        tuple(_open_pads(desc, nodes, pads, used, inputs=False)),
    )


def _count_pads(scratch: AvGraph, desc: str, node: Node) -> tuple[int, int]:
    context = add_filter(scratch, desc, node)
    counts = len(context.inputs), len(context.outputs)  # type: ignore[attr-defined] # not in PyAV's stubs
    for labels, count, side in zip(
        (node.inputs, node.outputs), counts, ("input", "output"), strict=True
    ):
        if len(labels) > count:
            raise FilterError(
                f"filter description {desc!r}: {node} has {len(labels)} {side} labels, but the filter has "
                f"{count} {side}s",
                filter_desc=desc,
            )
    return counts


def _links(graph: Graph, pads: list[tuple[int, int]]) -> Iterator[tuple[int, int, int, int]]:
    """Labels join first; an unlabelled output goes to the next filter's first free unlabelled input."""
    nodes = list(graph.nodes)
    labelled = {
        label: (position, index)
        for position, node in enumerate(nodes)
        for index, label in enumerate(node.inputs)
    }
    start = 0
    for chain in graph.chains:
        stop = start + len(chain)
        for position in range(start, stop):
            follower = position + 1
            free = len(nodes[follower].inputs) if follower < stop else 0
            for output in range(pads[position][1]):
                if output < len(nodes[position].outputs):
                    target = labelled.get(nodes[position].outputs[output])
                    if target:
                        yield position, output, *target
                elif follower < stop and free < pads[follower][0]:
                    yield position, output, follower, free
                    free += 1
        start = stop


def _open_pads(
    desc: str,
    nodes: tuple[Node, ...],
    pads: list[tuple[int, int]],
    taken: set[tuple[int, int]],
    *,
    inputs: bool,
) -> Iterator[Pad]:
    for position, node in enumerate(nodes):
        labels = node.inputs if inputs else node.outputs
        for index in range(pads[position][0 if inputs else 1]):
            if (position, index) not in taken:
                label = labels[index] if index < len(labels) else None
                yield Pad(position, index, label, _pad_kind(desc, node, index, inputs=inputs))


def _pad_kind(desc: str, node: Node, index: int, *, inputs: bool) -> Kind:
    # PyAV does not tell a pad's media type, but FFmpeg refuses to join pads of two types.
    graph = AvGraph()
    context = add_filter(graph, desc, node)
    with av.logging.Capture():  # what FFmpeg says of it is no fault to be told
        try:
            if inputs:
                graph.add("buffer", _ANY_VIDEO).link_to(context, 0, index)
            else:
                context.link_to(graph.add("buffersink"), index, 0)
        except av.FFmpegError:
            return "audio"
    return "video"


def add_filter(graph: AvGraph, desc: str, node: Node) -> FilterContext:
    """Add one filter, or say why FFmpeg refuses it."""
    if node.name not in av.filter.filters_available:
        close = difflib.get_close_matches(node.name, av.filter.filters_available, n=3)
        hint = f"; did you mean {', '.join(close)}?" if close else ""
        raise FilterError(
            f"filter description {desc!r}: this FFmpeg has no filter {node.name!r}{hint}",
            filter_desc=desc,
        )
    with filter_errors(desc, f"{node.name} refuses {node.args!r}" if node.args else node.name):
        full_name = f"{node.name}@{node.id}" if node.id else None
        return graph.add(node.name, node.args, **({"name": full_name} if full_name else {}))


def filter_errors(desc: str, what: str) -> AbstractContextManager[object]:
    """Turn FFmpeg's errors in a block into a FilterError."""
    return ffmpeg_errors(lambda text: _error(desc, f"{what}: {text}"))


def _error(desc: str, what: str) -> FilterError:
    return FilterError(f"filter description {desc!r}: {what}", filter_desc=desc)


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


def describe_frame(frame: AvFrame) -> str:
    """Size and format of a frame in words, as far as an input must know them."""
    if isinstance(frame, av.AudioFrame):
        return f"{frame.format.name} {frame.layout.name} {frame.sample_rate} Hz"
    return f"{frame.width}x{frame.height} {frame.format.name}"


def source_args(
    frame: AvFrame,
    *,
    time_base: Fraction | None = None,
    frame_rate: Fraction | None = None,
    sample_aspect_ratio: Fraction | None = None,
) -> str:
    """Arguments of the ``buffer`` or ``abuffer`` that takes frames like this one."""
    base = as_fraction(frame.time_base) or time_base
    if isinstance(frame, av.AudioFrame):
        base = base or Fraction(1, frame.sample_rate)
        return (
            f"sample_rate={frame.sample_rate}:sample_fmt={frame.format.name}:"
            f"channel_layout={quote_option(frame.layout.name)}:time_base={base}"
        )
    rate = frame_rate or _rate_by_duration(frame, base)
    aspect = f":pixel_aspect={sample_aspect_ratio}" if sample_aspect_ratio else ""
    return (
        f"video_size={frame.width}x{frame.height}:pix_fmt={frame.format.name}:"
        f"time_base={base or Fraction(1)}:colorspace={int(frame.colorspace)}:"
        f"range={int(frame.color_range)}{f':frame_rate={rate}' if rate else ''}{aspect}"
    )


def _rate_by_duration(frame: av.VideoFrame, time_base: Fraction | None) -> Fraction | None:
    # tpad gives its frames nonsensical times where no rate is known.
    return 1 / (frame.duration * time_base) if frame.duration > 0 and time_base else None


def pull_all(sink: FilterContext) -> tuple[list[Any], bool]:
    """All frames that a sink has ready, and whether it has ended."""
    frames: list[Any] = []
    while True:
        try:
            frames.append(sink.pull())
        except av.BlockingIOError:
            return frames, False
        except av.EOFError:
            return frames, True


def push_frame(source: FilterContext, frame: AvFrame | None) -> bool:
    """Put a frame in; False: the filters have ended and take no more."""
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
        gives_one: Each frame gives one at once. Asking for a second one costs 10 microseconds a frame.

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
            if self._gives_one and not done:
                return [sink.pull()]
            return done + self._pull()
        except av.BlockingIOError:
            return done
        except av.FFmpegError as error:
            text = f"it failed: {describe(error, lines[mark:])}"
            raise _error(self._wiring.desc, text) from error

    def flush(self) -> list[Any]:
        """End the input; take out what the filters still hold. Nothing can be pushed afterwards."""
        rest = self._drain()
        self.finished = True
        return rest

    def _follow(self, frame: AvFrame) -> list[Any]:
        """Make the graph fit the frame; what the graph before it still held."""
        rest = self._drain()
        time_base, frame_rate, aspect = self._of_stream
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
