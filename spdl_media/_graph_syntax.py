"""FFmpeg's syntax of filter graphs, read into plain values, written back, and wired filter to filter.

    [in0][in1] overlay=x=8 [mixed]; [mixed] scale=64:48, format=rgb24 [out]

Filters joined by ``,`` form a chain, chains stand side by side between ``;``. A label in brackets names an
input (before the filter) or an output (after it); one that is both an output and an input joins the two.
``filter@id`` names an instance. What follows ``=`` are the filter's arguments.

Two levels of quoting apply, one after the other. The graph's level is undone here: within ``'...'`` all is
literal, and a backslash takes the next character literally. The result is what the filter gets, which undoes
the level of its options in the same way: there ``:`` separates options. :func:`quote` writes the first level,
:func:`quote_value` both.

See:
    "Filtergraph syntax" and "Notes on filtergraph escaping" in https://ffmpeg.org/ffmpeg-filters.html
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

import av
import av.filter
from av.filter import Graph as AvGraph
from av.filter.context import FilterContext

from spdl_media._ffmpeg import ffmpeg_errors
from spdl_media.errors import FilterError

_SPACE = " \n\t\r"
_NAME = re.compile(r"[A-Za-z0-9_]+\Z")
_WORD = re.compile(r"[A-Za-z0-9_.+-]+\Z")
_PLAIN = re.compile(r"[A-Za-z0-9_.:=|/+*()<>?!%&#@-]+\Z")
_EXCERPT = 24


@dataclass(frozen=True, slots=True)
class Node:
    """One filter of a description.

    Attributes:
        name: Name of the filter, ``"scale"``.
        id: What follows ``@``, or ``None``.
        args: What follows ``=`` with the graph's quoting undone, or ``None`` where there is no ``=``.
        inputs: Labels before the filter, in the order of its inputs.
        outputs: Labels after the filter, in the order of its outputs.
    """

    name: str
    id: str | None = None
    args: str | None = None
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()

    def __str__(self) -> str:
        id = "" if self.id is None else f"@{quote_option(self.id)}"
        args = "" if self.args is None else f"={quote(self.args)}"
        return f"{_labels(self.inputs)}{self.name}{id}{args}{_labels(self.outputs)}"


@dataclass(frozen=True, slots=True)
class Graph:
    """A parsed description: chains of filters, side by side. ``str`` writes it back."""

    chains: tuple[tuple[Node, ...], ...]

    @property
    def nodes(self) -> Iterator[Node]:
        """All filters, in the order of the text."""
        return (node for chain in self.chains for node in chain)

    def __str__(self) -> str:
        return ";".join(",".join(map(str, chain)) for chain in self.chains)


def quote(text: str) -> str:
    """Write a text so that :func:`parse_graph` gives it back whole, as arguments or as a label."""
    return text if _PLAIN.match(text) else _in_quotes(text)


def quote_value(value: str) -> str:
    """Write the value of one option so that the filter gets it whole, through both levels of quoting."""
    return value if _WORD.match(value) else quote(quote_option(value))


def quote_option(value: str) -> str:
    """Write the value of one option for the options' level alone, for arguments that are not parsed here."""
    return value if _WORD.match(value) else _in_quotes(value)


def _in_quotes(text: str) -> str:
    # Nothing can be escaped between quotes, so a quote in the text ends them and begins them anew.
    return "'" + text.replace("'", "'\\''") + "'"


def parse_graph(desc: str) -> Graph:
    """Read FFmpeg's description of a filter graph.

    Whether the filters exist and like their arguments is found out when the graph is made.

    Raises:
        FilterError: The text does not follow the syntax; the message says where.
        TypeError: ``desc`` is no ``str``.
    """
    if not isinstance(desc, str):
        raise TypeError(f"a filter description is a str, such as 'scale=64:48', not {desc!r}")
    graph = _Parser(desc).graph()
    _check_labels(desc, graph)
    return graph


def _labels(labels: tuple[str, ...]) -> str:
    return "".join(f"[{quote(label)}]" for label in labels)


def _check_labels(desc: str, graph: Graph) -> None:
    for side in ("inputs", "outputs"):
        counts = Counter(label for node in graph.nodes for label in getattr(node, side))
        for label, count in counts.items():
            if count > 1:
                helps = " Use split (asplit for sound) for copies." if side == "inputs" else ""
                raise graph_error(
                    desc,
                    f"the label [{label}] names {count} {side}, but joins one output to one input.{helps}",
                )
    for node in graph.nodes:
        if loop := sorted(set(node.inputs) & set(node.outputs)):
            raise graph_error(desc, f"[{loop[0]}] joins {node.name} to itself")


class _Parser:
    """A cursor over the text; each method reads what it is named after."""

    def __init__(self, desc: str) -> None:
        self._desc = desc
        self._at = 0

    def graph(self) -> Graph:
        self._refuse_head()
        # The text ends there for FFmpeg, which would leave out the rest without a word.
        if "\0" in self._desc:
            raise self._error("a zero character", self._desc.index("\0"))
        chains = [self._chain()]
        while self._take(";"):
            self._skip_space()
            # FFmpeg allows a final ";", and files of long graphs often have it.
            if not self._next():
                break
            chains.append(self._chain())
        if self._next():
            raise self._error(f"unexpected {self._next()!r}", self._at)
        return Graph(tuple(chains))

    def _refuse_head(self) -> None:
        self._skip_space()
        if self._desc.startswith("sws_flags=", self._at):
            raise self._error(
                "flags of all scalers cannot be set by PyAV; give them to each scale filter instead, as in "
                "scale=64:48:flags=lanczos",
                self._at,
            )

    def _chain(self) -> tuple[Node, ...]:
        nodes = [self._node()]
        while self._take(","):
            nodes.append(self._node())
        return tuple(nodes)

    def _node(self) -> Node:
        inputs = self._link_labels()
        start = self._at
        token = self._token("=,;[")
        if not token:
            raise self._error("a filter is missing", start)
        name, at, id = token.partition("@")
        if not _NAME.match(name) or (at and not id):
            raise self._error(f"{token!r} is no name of a filter", start)
        args = self._token("[],;") if self._take("=") else None
        return Node(name, id if at else None, args, inputs, self._link_labels())

    def _link_labels(self) -> tuple[str, ...]:
        labels = []
        self._skip_space()
        while self._take("["):
            start = self._at - 1
            label = self._token("]")
            if not self._take("]"):
                raise self._error("the bracket is never closed", start)
            if not label:
                raise self._error("a label is empty", start)
            labels.append(label)
            self._skip_space()
        return tuple(labels)

    def _token(self, stops: str) -> str:
        """The text up to one of ``stops``, unquoted, without unquoted space around it."""
        self._skip_space()
        text: list[str] = []
        kept = 0  # how much of the text is quoted up to, whose trailing space stays
        while (char := self._next()) and char not in stops:
            self._at += 1
            if char == "\\" and self._next():
                text.append(self._next())
                self._at += 1
                kept = len(text)
            elif char == "'":
                text.extend(self._quoted())
                kept = len(text)
            else:
                text.append(char)
        while len(text) > kept and text[-1] in _SPACE:
            text.pop()
        return "".join(text)

    def _quoted(self) -> str:
        start = self._at
        end = self._desc.find("'", start)
        if end < 0:
            raise self._error("the quote is never closed", start - 1)
        self._at = end + 1
        return self._desc[start:end]

    def _next(self) -> str:
        return self._desc[self._at : self._at + 1]

    def _take(self, char: str) -> bool:
        if self._next() != char:
            return False
        self._at += 1
        return True

    def _skip_space(self) -> None:
        while self._next() and self._next() in _SPACE:
            self._at += 1

    def _error(self, what: str, position: int) -> FilterError:
        rest = self._desc[position : position + _EXCERPT]
        where = f"at position {position} ({rest!r})" if rest else "at the end"
        return graph_error(self._desc, f"{what}, {where}")


Kind: TypeAlias = Literal["video", "audio"]

SOURCES: dict[str, Kind] = {"buffer": "video", "abuffer": "audio"}
SINKS: dict[str, Kind] = {"buffersink": "video", "abuffersink": "audio"}
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
    """A description, parsed and with every pad accounted for: all that building a graph needs.

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


# Descriptions repeat, and each filter of a new one is made to count its pads.
@lru_cache(maxsize=512)
def wire(desc: str) -> Wiring:
    """Parse a description and find out how its filters are joined.

    How many inputs and outputs a filter has can depend on its arguments (``split=3``), so each is made once.

    Raises:
        FilterError: Bad syntax, an unknown filter, an option or a value that it does not take.
    """
    graph = parse_graph(desc)
    nodes = tuple(graph.nodes)
    # Made only to count their pads: nothing here is joined or configured.
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
            raise graph_error(
                desc, f"{node} has {len(labels)} {side} labels, but the filter has {count} {side}s"
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
            # Filters of one chain are joined without labels.
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
        raise graph_error(desc, f"this FFmpeg has no filter {node.name!r}{hint}")
    with filter_errors(desc, f"{node.name} refuses {node.args!r}" if node.args else node.name):
        full_name = f"{node.name}@{node.id}" if node.id else None
        return graph.add(node.name, node.args, **({"name": full_name} if full_name else {}))


def filter_errors(desc: str, what: str) -> AbstractContextManager[object]:
    """Turn FFmpeg's errors in a block into a FilterError."""
    return ffmpeg_errors(lambda text: graph_error(desc, f"{what}: {text}"))


def graph_error(desc: str, what: str) -> FilterError:
    """Say what is wrong with a description."""
    return FilterError(f"filter description {desc!r}: {what}", filter_desc=desc)
