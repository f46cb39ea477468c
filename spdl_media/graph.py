"""Parse descriptions of FFmpeg's filter graphs, build the graphs, and pass frames through them.

    [in0][in1] overlay=x=8 [mixed]; [mixed] scale=64:48, format=rgb24 [out]

Filters joined by ``,`` form a chain; ``;`` separates chains. A label in brackets names an input (before the
filter) or an output (after it); a label that is both links the output to the input. ``filter@id`` names an
instance. The filter's arguments follow ``=``.

There are two levels of quoting. The graph's level is undone here: text within ``'...'`` is literal, and so
is the character after a backslash. The filter gets the result and undoes the second level in the same way;
there ``:`` separates options. :func:`quote` writes the first level, :func:`quote_option` the second,
:func:`quote_value` both.

See:
    "Filtergraph syntax" and "Notes on filtergraph escaping" in https://ffmpeg.org/ffmpeg-filters.html
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from functools import lru_cache
from itertools import accumulate
from typing import Any, Literal, NamedTuple, TypeAlias

import av
import av.filter
from av.filter import Graph as AvGraph
from av.filter.context import FilterContext

from spdl_media._checks import did_you_mean
from spdl_media._ffmpeg import TranslatedErrors
from spdl_media.errors import FilterError

AvFrame: TypeAlias = av.VideoFrame | av.AudioFrame
Kind: TypeAlias = Literal["video", "audio"]

SOURCES: dict[str, Kind] = {"buffer": "video", "abuffer": "audio"}
SINKS: dict[str, Kind] = {"buffersink": "video", "abuffersink": "audio"}
_PREFIX = {"video": "", "audio": "a"}
# FFmpeg requires a size, a format and a time base to create a buffer.
_ANY_VIDEO = "video_size=16x16:pix_fmt=yuv420p:time_base=1/1"

_NAME = re.compile(r"[A-Za-z0-9_]+\Z")
_WORD = re.compile(r"[A-Za-z0-9_.+-]+\Z")
_PLAIN = re.compile(r"[A-Za-z0-9_.:=|/+*()<>?!%&#@-]+\Z")
_EXCERPT = 24

_SPACE = r"[ \n\t\r]*"
_QUOTED = re.compile(r"\\(.)|'([^']*)'", re.DOTALL)


def _up_to(stops: str) -> str:
    """Return a pattern of the text up to one of these characters, without the space before them."""
    return rf"(?:{_SPACE}(?:\\.?|'[^']*'|[^ \n\t\r\\'{re.escape(stops)}])+)*+"


_LABEL = rf"\[{_SPACE}(?P<label>{_up_to(']')}){_SPACE}\]{_SPACE}"
_LABELS = f"(?:{_LABEL.replace('?P<label>', '?:')})*"
# The name ends at the arguments, the next filter or chain, or the label of an output. Options are not split,
# because the filter does that itself.
_FILTER = re.compile(
    rf"{_SPACE}(?P<inputs>{_LABELS})(?P<name>{_up_to('=,;[')}){_SPACE}"
    rf"(?:={_SPACE}(?P<args>{_up_to('[],;')}){_SPACE})?(?P<outputs>{_LABELS})",
    re.DOTALL,
)


class Node(NamedTuple):
    """One filter of a description.

    Attributes:
        name: Name of the filter, ``"scale"``.
        id: What follows ``@``, or ``None``.
        args: What follows ``=``, with the graph's quoting undone; ``None`` without ``=``.
        inputs: Labels before the filter, in the order of its inputs.
        outputs: Labels after the filter, in the order of its outputs.
    """

    name: str
    id: str | None = None
    args: str | None = None
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()

    @property
    def full_name(self) -> str:
        """The name of this instance."""
        return f"{self.name}@{self.id}" if self.id else self.name

    def __str__(self) -> str:
        sides = self.inputs, self.outputs
        before, after = ("".join(f"[{quote(x)}]" for x in side) for side in sides)
        id = "" if self.id is None else f"@{quote_option(self.id)}"
        args = "" if self.args is None else f"={quote(self.args)}"
        return f"{before}{self.name}{id}{args}{after}"


Chains: TypeAlias = tuple[tuple[Node, ...], ...]
"""A parsed description: chains of filters."""


def quote(text: str) -> str:
    """Quote a text so that :func:`parse_graph` returns it unchanged, as arguments or as a label."""
    return text if _PLAIN.match(text) else _in_quotes(text)


def quote_value(value: str) -> str:
    """Quote the value of one option at both levels, so that the filter gets it unchanged."""
    return value if _WORD.match(value) else quote(quote_option(value))


def quote_option(value: str) -> str:
    """Quote the value of one option at the filter's level only, for arguments that skip the parser."""
    return value if _WORD.match(value) else _in_quotes(value)


def _in_quotes(text: str) -> str:
    # Nothing can be escaped between quotes: a quote in the text closes them, is escaped, and reopens them.
    return "'" + text.replace("'", "'\\''") + "'"


def graph_error(desc: str, what: str) -> FilterError:
    """Make the error for a bad description."""
    return FilterError(f"filter description {desc!r}: {what}", filter_desc=desc)


def parse_graph(desc: str) -> Chains:
    """Parse FFmpeg's description of a filter graph.

    Names and arguments of the filters are checked only when the graph is built.

    Raises:
        FilterError: A syntax error; the message gives its position.
        TypeError: ``desc`` is not a ``str``.
    """
    if not isinstance(desc, str):
        raise TypeError(f"a filter description is a str, such as 'scale=64:48', not {desc!r}")
    chains = _read_chains(desc)
    nodes = [node for chain in chains for node in chain]
    for side in ("inputs", "outputs"):
        counts = Counter(label for node in nodes for label in getattr(node, side))
        for label, count in counts.items():
            if count > 1:
                helps = " Use split (asplit for audio) for copies." if side == "inputs" else ""
                raise graph_error(
                    desc,
                    f"the label [{label}] names {count} {side}, but joins one output to one input.{helps}",
                )
    for node in nodes:
        if loop := sorted(set(node.inputs) & set(node.outputs)):
            raise graph_error(desc, f"[{loop[0]}] joins {node.name} to itself")
    return chains


def _read_chains(desc: str) -> Chains:
    # FFmpeg would silently ignore the text after a zero character.
    if "\0" in desc:
        raise _syntax_error(desc, "a zero character", desc.index("\0"))
    chains: list[list[Node]] = [[]]
    position, stop = 0, ","
    # FFmpeg allows a final ";", which is common in files of long graphs.
    while stop == "," or (stop == ";" and desc[position:].strip(" \n\t\r")):
        if stop == ";":
            chains.append([])
        node, position = _read_filter(desc, position)
        chains[-1].append(node)
        stop = desc[position : position + 1]
        position += 1
    return tuple(map(tuple, chains))


def _read_filter(desc: str, position: int) -> tuple[Node, int]:
    """Read the filter at a position. Return it, and the position of the character after it."""
    found = _FILTER.match(desc, position)
    assert found is not None, "all parts are optional"
    start, end, token = found.start("name"), found.end(), _unquoted(found["name"])
    if not token:
        raise _syntax_error(desc, "a filter is missing", start)
    # FFmpeg allows filter@id, by which commands find a filter.
    name, at, id = token.partition("@")
    if not _NAME.match(name) or (at and not id):
        raise _syntax_error(desc, f"{token!r} is not the name of a filter", start)
    if desc[end : end + 1] not in ("", ",", ";"):
        raise _syntax_error(desc, f"unexpected {desc[end]!r}", end)
    inputs, outputs = (_labels(desc, *found.span(side)) for side in ("inputs", "outputs"))
    args = None if found["args"] is None else _unquoted(found["args"])
    return Node(name, id or None, args, inputs, outputs), end


def _labels(desc: str, start: int, end: int) -> tuple[str, ...]:
    labels: list[str] = []
    for found in re.compile(_LABEL, re.DOTALL).finditer(desc, start, end):
        labels.append(_unquoted(found["label"]))
        if not labels[-1]:
            raise _syntax_error(desc, "a label is empty", found.start())
    return tuple(labels)


def _unquoted(text: str) -> str:
    return _QUOTED.sub(lambda quoted: quoted[1] or quoted[2], text)


def _syntax_error(desc: str, what: str, position: int) -> FilterError:
    rest = desc[position : position + _EXCERPT]
    # The pattern ends before a bracket or a quote that is never closed.
    if rest.startswith("[") and what != "a label is empty":
        what = "the bracket is never closed"
    elif rest.startswith("'") and desc.count("'", position) == 1:
        what = "the quote is never closed"
    where = f"at position {position} ({rest!r})" if rest else "at the end"
    return graph_error(desc, f"{what}, {where}")


class Pad(NamedTuple):
    """An open input or output of a graph: its filter, the pad's position there, its label and media kind."""

    node: int
    position: int
    label: str | None
    kind: Kind


class Wiring(NamedTuple):
    """A parsed description with all its links and open pads, from which graphs are built.

    Attributes:
        desc: The description.
        nodes: The filters.
        links: ``(from filter, its output, to filter, its input)``, by position in ``nodes``.
        inputs: Inputs that are linked to no output.
        outputs: Outputs that are linked to no input.
    """

    desc: str
    nodes: tuple[Node, ...]
    links: tuple[tuple[int, int, int, int], ...]
    inputs: tuple[Pad, ...]
    outputs: tuple[Pad, ...]


# Cached, because descriptions repeat and each filter has to be created to count its pads.
@lru_cache(maxsize=512)
def wire(desc: str) -> Wiring:
    """Parse a description and resolve the links between its filters.

    Raises:
        FilterError: A syntax error, an unknown filter, or an invalid option or value.
    """
    chains = parse_graph(desc)
    nodes = tuple(node for chain in chains for node in chain)
    # The number of pads can depend on arguments (split=3), so each filter is created in a scratch graph.
    scratch = AvGraph()
    contexts = [add_filter(scratch, desc, node) for node in nodes]
    labels = [_pad_labels(desc, *pair) for pair in zip(nodes, contexts, strict=True)]
    # The last filter of a chain has no follower.
    last = {end - 1 for end in accumulate(map(len, chains))}
    named = {
        label: (position, index)
        for position, (inputs, _) in enumerate(labels)
        for index, label in enumerate(inputs)
    }
    links: list[tuple[int, int, int, int]] = []
    for position, (_, outputs) in enumerate(labels):
        follower = position + 1
        inputs = () if position in last else labels[follower][0]
        free = (index for index, label in enumerate(inputs) if label is None)
        for output, label in enumerate(outputs):
            # An unlabelled output goes to the next filter's first free unlabelled input, if it has one.
            if label is not None and label in named:
                links.append((position, output, *named[label]))
            elif label is None and (input := next(free, None)) is not None:
                links.append((position, output, follower, input))
    ends = [
        tuple(
            Pad(position, index, label, _kind(scratch, contexts[position], side, index))
            for position, of_node in enumerate(labels)
            for index, label in enumerate(of_node[side])
            if (position, index) not in taken
        )
        for side, taken in enumerate(({link[2:] for link in links}, {link[:2] for link in links}))
    ]
    return Wiring(desc, nodes, tuple(links), *ends)


@lru_cache(maxsize=512)
def wire_simple(desc: str, kind: Kind) -> Wiring:
    """Do what :func:`wire` does for a graph with one open input and one open output, of this kind.

    Raises:
        FilterError: As for :func:`wire`, or the graph has other inputs or outputs.
    """
    wiring = wire(desc)
    declared = [node.name for node in wiring.nodes if node.name in (*SOURCES, *SINKS)]
    ends = len(wiring.inputs), len(wiring.outputs)
    if declared or ends != (1, 1):
        found = f"declares {declared[0]}" if declared else "has {} open inputs and {} open outputs"
        raise graph_error(
            desc,
            f"it {found.format(*ends)}; decoding needs one input and one output, both left open. FilterGraph "
            "runs any graph over decoded frames",
        )
    for pad, verb in ((wiring.inputs[0], "takes"), (wiring.outputs[0], "gives")):
        if pad.kind != kind:
            raise graph_error(desc, f"it {verb} {pad.kind}, but the packets are {kind}")
    return wiring


_Labels: TypeAlias = tuple[str | None, ...]


def _pad_labels(desc: str, node: Node, context: FilterContext) -> tuple[_Labels, _Labels]:
    """Return the labels of all inputs and all outputs of a filter, ``None`` for unlabelled ones."""
    counts = len(context.inputs), len(context.outputs)  # type: ignore[attr-defined] # not in PyAV's stubs
    for labels, count, side in zip(
        (node.inputs, node.outputs), counts, ("input", "output"), strict=True
    ):
        if len(labels) > count:
            raise graph_error(
                desc, f"{node} has {len(labels)} {side} labels, but the filter has {count} {side}s"
            )
    inputs = *node.inputs, *[None] * (counts[0] - len(node.inputs))
    return inputs, (*node.outputs, *[None] * (counts[1] - len(node.outputs)))


def _kind(scratch: AvGraph, context: FilterContext, side: int, index: int) -> Kind:
    """Return the media kind of an open input (side 0) or output (side 1), which is linked here."""
    # PyAV 18 does not expose a pad's media type (19 does), but FFmpeg refuses to link pads of two types.
    with av.logging.Capture():  # a refusal is expected here and must not be logged
        try:
            if side == 0:
                scratch.add("buffer", _ANY_VIDEO).link_to(context, 0, index)
            else:
                context.link_to(scratch.add("buffersink"), index, 0)
        except av.FFmpegError:
            return "audio"
    return "video"


def add_filter(graph: AvGraph, desc: str, node: Node) -> FilterContext:
    """Add one filter to a graph.

    Raises:
        FilterError: There is no such filter, or it refuses its arguments.
    """
    if node.name not in av.filter.filters_available:
        hint = did_you_mean(node.name, av.filter.filters_available)
        raise graph_error(desc, f"this FFmpeg has no filter {node.name!r}{hint and '. ' + hint}")
    with filter_errors(desc, f"{node.name} refuses {node.args!r}" if node.args else node.name):
        # Without an id, FFmpeg chooses the name.
        return graph.add(node.name, node.args, **({"name": node.full_name} if node.id else {}))


def filter_errors(desc: str, what: str) -> AbstractContextManager[object]:
    """Turn FFmpeg's errors in a block into a FilterError.

    Raises:
        FilterError: FFmpeg raised an error in the block.
    """
    return TranslatedErrors(lambda text, _: graph_error(desc, f"{what}: {text}"))


class BuiltGraph(NamedTuple):
    """A configured graph with its buffer sources and sinks: first those of the text, then the open ones."""

    graph: AvGraph  # kept, because contexts refer to it weakly
    sources: list[FilterContext]
    sinks: list[FilterContext]


def build(wiring: Wiring, source_args: Sequence[str]) -> BuiltGraph:
    """Build and configure a graph. ``source_args`` are the arguments of the sources of its open inputs.

    Raises:
        FilterError: FFmpeg refuses the filters, or cannot join them.
    """
    graph, desc = AvGraph(), wiring.desc
    # The pipeline provides the parallelism; by default FFmpeg starts threads for each graph.
    graph.threads = 1
    contexts = [add_filter(graph, desc, node) for node in wiring.nodes]
    sources, sinks = (
        [c for c, node in zip(contexts, wiring.nodes, strict=True) if node.name in ends]
        for ends in (SOURCES, SINKS)
    )
    with filter_errors(desc, "its filters cannot be joined"):
        for from_, output, to, input in wiring.links:
            contexts[from_].link_to(contexts[to], output, input)
        for pad, args in zip(wiring.inputs, source_args, strict=True):
            sources.append(graph.add(f"{_PREFIX[pad.kind]}buffer", args))
            sources[-1].link_to(contexts[pad.node], 0, pad.position)
        for pad in wiring.outputs:
            sinks.append(graph.add(f"{_PREFIX[pad.kind]}buffersink"))
            contexts[pad.node].link_to(sinks[-1], pad.position, 0)
    given = " and ".join(source_args) or "its inputs"
    with filter_errors(desc, f"it cannot be set up for {given}"):
        graph.configure()
    return BuiltGraph(graph, sources, sinks)


def pull_all(sink: FilterContext) -> tuple[list[Any], bool]:
    """Take all frames that a sink has ready; the second result tells whether it has ended.

    Raises:
        av.FFmpegError: A filter fails.
    """
    frames: list[Any] = []
    while True:
        try:
            frames.append(sink.pull())
        except (av.BlockingIOError, av.EOFError) as error:  # "not yet", "no more"
            return frames, isinstance(error, av.EOFError)


def push_frame(source: FilterContext, frame: AvFrame | None) -> None:
    """Send a frame; ``None``: the end. It is dropped if the filters have ended, as trim does.

    Raises:
        av.FFmpegError: A filter fails.
    """
    with suppress(av.EOFError):
        source.push(frame)
