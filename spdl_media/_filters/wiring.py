"""How the filters of a description are joined, and FFmpeg's graphs built from that."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Literal, TypeAlias

import av
import av.filter
from av.filter import Graph as AvGraph
from av.filter.context import FilterContext

from spdl_media._ffmpeg import as_fraction, ffmpeg_errors
from spdl_media._filters.graph_syntax import Graph, Node, parse_graph, quote_option
from spdl_media.errors import FilterError

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

    def make_error(text: str) -> FilterError:
        return FilterError(f"filter description {desc!r}: {what}: {text}", filter_desc=desc)

    return ffmpeg_errors(make_error)


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
