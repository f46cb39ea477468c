"""Filter graphs of FFmpeg's: wired from a description, set up for frames, and run over them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import Any, Literal, NamedTuple, TypeAlias

import av
import av.filter
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
from spdl_media._graph_syntax import Chains, Node, graph_error, parse_graph, quote_option
from spdl_media.errors import FilterError

AvFrame: TypeAlias = av.VideoFrame | av.AudioFrame
Kind: TypeAlias = Literal["video", "audio"]

SOURCES: dict[str, Kind] = {"buffer": "video", "abuffer": "audio"}
SINKS: dict[str, Kind] = {"buffersink": "video", "abuffersink": "audio"}
_PREFIX = {"video": "", "audio": "a"}
# FFmpeg makes no buffer without a size, a format and a time base.
_ANY_VIDEO = "video_size=16x16:pix_fmt=yuv420p:time_base=1/1"


class Pad(NamedTuple):
    """An open input or output of a graph: which pad of which filter, its label, and what flows there."""

    node: int
    position: int
    label: str | None
    kind: Kind


class Wiring(NamedTuple):
    """A description, parsed and with every pad accounted for: all that building a graph needs.

    Attributes:
        desc: The description.
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


# Descriptions repeat, and each filter of a new one is made to count its pads.
@lru_cache(maxsize=512)
def wire(desc: str) -> Wiring:
    """Parse a description and find out how its filters are joined.

    Raises:
        FilterError: Bad syntax, an unknown filter, an option or a value that it does not take.
    """
    chains = parse_graph(desc)
    nodes = tuple(node for chain in chains for node in chain)
    # How many pads a filter has can depend on its arguments (split=3), so each is made once.
    scratch = AvGraph()
    pads = [_count_pads(scratch, desc, node) for node in nodes]
    links = tuple(_links(chains, pads))
    ends: list[tuple[Pad, ...]] = []
    for side, taken in enumerate(({link[2:] for link in links}, {link[:2] for link in links})):
        ends.append(
            tuple(
                Pad(position, index, *_label_and_kind(desc, node, side, index))
                for position, node in enumerate(nodes)
                for index in range(pads[position][side])
                if (position, index) not in taken
            )
        )
    return Wiring(desc, nodes, links, *ends)


def _count_pads(scratch: AvGraph, desc: str, node: Node) -> tuple[int, int]:
    context = add_filter(scratch, desc, node)
    counts = len(context.inputs), len(context.outputs)  # type: ignore[attr-defined] # not in PyAV's stubs
    for labels, count, side in zip(
        (node.inputs, node.outputs), counts, ("input", "output"), strict=True
    ):
        if len(labels) > count:
            raise graph_error(
                desc, f"{node} has {len(labels)} {side} labels, but the filter has {count} {side}s"
            )
    return counts


def _links(chains: Chains, pads: list[tuple[int, int]]) -> Iterator[tuple[int, int, int, int]]:
    """Labels join first; an unlabelled output goes to the next filter's first free unlabelled input."""
    nodes = [node for chain in chains for node in chain]
    labelled = {
        label: (position, index)
        for position, node in enumerate(nodes)
        for index, label in enumerate(node.inputs)
    }
    # The last filter of each chain has none behind it.
    ends = {end - 1 for end in accumulate(map(len, chains))}
    for position, node in enumerate(nodes):
        for output, label in enumerate(node.outputs):
            if label in labelled:
                yield position, output, *labelled[label]
        if position not in ends:
            follower = position + 1
            outputs = range(len(node.outputs), pads[position][1])
            inputs = range(len(nodes[follower].inputs), pads[follower][0])
            # Filters need not have as many free outputs as the next one has inputs.
            for output, free in zip(outputs, inputs, strict=False):
                yield position, output, follower, free


def _label_and_kind(desc: str, node: Node, side: int, index: int) -> tuple[str | None, Kind]:
    """The label of an open input (side 0) or output (1), and what flows there."""
    labels = (node.inputs, node.outputs)[side]
    label = labels[index] if index < len(labels) else None
    # PyAV does not tell a pad's media type, but FFmpeg refuses to join pads of two types.
    graph = AvGraph()
    context = add_filter(graph, desc, node)
    with av.logging.Capture():  # what FFmpeg says of it is no fault to be told
        try:
            if side == 0:
                graph.add("buffer", _ANY_VIDEO).link_to(context, 0, index)
            else:
                context.link_to(graph.add("buffersink"), index, 0)
        except av.FFmpegError:
            return label, "audio"
    return label, "video"


def add_filter(graph: AvGraph, desc: str, node: Node) -> FilterContext:
    """Add one filter, or say why FFmpeg refuses it.

    Raises:
        FilterError: There is no such filter, or it refuses its arguments.
    """
    if node.name not in av.filter.filters_available:
        close = difflib.get_close_matches(node.name, av.filter.filters_available, n=3)
        hint = f"; did you mean {', '.join(close)}?" if close else ""
        raise graph_error(desc, f"this FFmpeg has no filter {node.name!r}{hint}")
    with filter_errors(desc, f"{node.name} refuses {node.args!r}" if node.args else node.name):
        full_name = f"{node.name}@{node.id}" if node.id else None
        return graph.add(node.name, node.args, **({"name": full_name} if full_name else {}))


def filter_errors(desc: str, what: str) -> AbstractContextManager[object]:
    """Turn FFmpeg's errors in a block into a FilterError."""
    return ffmpeg_errors(lambda text: graph_error(desc, f"{what}: {text}"))


class BuiltGraph(NamedTuple):
    """A configured graph with its ends: declared ones first, then open ones in the order of the wiring."""

    graph: AvGraph  # kept, because contexts refer to it weakly
    sources: list[FilterContext]
    sinks: list[FilterContext]


def build(wiring: Wiring, source_args: Sequence[str]) -> BuiltGraph:
    """Make and configure a graph whose open inputs are fed by sources with the given arguments.

    Raises:
        FilterError: FFmpeg refuses the filters, or cannot join them.
    """
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
            sources.append(graph.add(f"{_PREFIX[pad.kind]}buffer", args))
            sources[-1].link_to(contexts[pad.node], 0, pad.position)
        for pad in wiring.outputs:
            sinks.append(graph.add(f"{_PREFIX[pad.kind]}buffersink"))
            contexts[pad.node].link_to(sinks[-1], pad.position, 0)
    with filter_errors(
        desc, f"it cannot be set up for {' and '.join(source_args) or 'its inputs'}"
    ):
        graph.configure()
    return BuiltGraph(graph, sources, sinks)


def frame_options(frame: AvFrame) -> dict[str, str]:
    """Size and format of a frame, by the names of FFmpeg's ``buffer`` and ``abuffer``."""
    if isinstance(frame, av.AudioFrame):
        return {
            "sample_rate": str(frame.sample_rate),
            "sample_fmt": frame.format.name,
            "channel_layout": frame.layout.name,
        }
    return {"video_size": f"{frame.width}x{frame.height}", "pix_fmt": frame.format.name}


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
        if not frame_rate and base and frame.duration > 0:
            # tpad gives its frames nonsensical times where no rate is known.
            frame_rate = 1 / (frame.duration * base)
        if frame_rate:
            options["frame_rate"] = frame_rate
        if sample_aspect_ratio:
            options["pixel_aspect"] = sample_aspect_ratio
    return ":".join(f"{name}={value}" for name, value in options.items())


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
        self._of_stream = {
            "time_base": time_base,
            "frame_rate": frame_rate,
            "sample_aspect_ratio": sample_aspect_ratio,
        }
        self._graph: BuiltGraph | None = None
        self._key: object = None
        self.finished = False

    def push(self, frame: AvFrame) -> list[Any]:
        """Put in one frame; take out all that are ready, of the same kind. The frame stays the caller's.

        Raises:
            FilterError: A filter refuses the frame, or fails.
        """
        if self.finished:
            return []
        lines = current_log()
        if lines is None:
            with ffmpeg_log() as lines:
                return self._push(frame, lines)
        return self._push(frame, lines)

    def _push(self, frame: AvFrame, lines: list[LogLine]) -> list[Any]:
        key = _frame_key(frame)
        done: list[Any] = []
        if key != self._key or self._graph is None:
            # A source has one size and format for good.
            done = self._drain()
            args = source_args(frame, **self._of_stream)
            self._graph, self._key, self.finished = build(self._wiring, (args,)), key, False
        mark = len(lines)
        try:
            if not push_frame(self._graph.sources[0], frame):
                self.finished = True
            # A second pull would raise BlockingIOError, which costs 10 microseconds a frame.
            if self._gives_one and not done:
                return [self._graph.sinks[0].pull()]
            return done + self._pull(self._graph)
        except av.BlockingIOError:
            return done
        except av.FFmpegError as error:
            text = f"it failed: {describe(error, lines[mark:])}"
            raise graph_error(self._wiring.desc, text) from error

    def flush(self) -> list[Any]:
        """End the input; take out what the filters still hold. Nothing can be pushed afterwards.

        Raises:
            FilterError: A filter fails.
        """
        rest = self._drain()
        self.finished = True
        return rest

    def _drain(self) -> list[Any]:
        if self._graph is None or self.finished:
            return []
        with filter_errors(self._wiring.desc, "it failed"):
            push_frame(self._graph.sources[0], None)
            return self._pull(self._graph)

    def _pull(self, graph: BuiltGraph) -> list[Any]:
        frames, ended = pull_all(graph.sinks[0])
        self.finished = self.finished or ended
        return frames


def _frame_key(frame: AvFrame) -> object:
    if isinstance(frame, av.AudioFrame):
        return frame.sample_rate, frame.format.name, frame.layout.name
    # Without the time base, whose Fraction takes 10 times as long: it is one for all frames of a stream.
    return frame.width, frame.height, frame.format.name, frame.colorspace, frame.color_range


def _check_simple(wiring: Wiring, kind: Kind) -> None:
    def refuse(what: str) -> FilterError:
        return FilterError(f"filter description {wiring.desc!r} {what}", filter_desc=wiring.desc)

    declared = [node.name for node in wiring.nodes if node.name in (*SOURCES, *SINKS)]
    ends = len(wiring.inputs), len(wiring.outputs)
    if declared or ends != (1, 1):
        found = f"has {ends[0]} open inputs and {ends[1]} open outputs"
        raise refuse(
            f"{f'declares {declared[0]}' if declared else found}; decoding needs one input and one output, "
            "both left open. FilterGraph runs any graph over decoded frames"
        )
    for pad, verb in ((wiring.inputs[0], "takes"), (wiring.outputs[0], "gives")):
        if pad.kind != kind:
            raise refuse(f"{verb} {pad.kind}, but the packets are {kind}")
