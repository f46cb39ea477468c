"""FFmpeg's syntax of filter graphs, read into plain values and written back.

    [in0][in1] overlay=x=8 [mixed]; [mixed] scale=64:48, format=rgb24 [out]

Filters joined by ``,`` form a chain, chains stand side by side between ``;``. A label in brackets names an
input (before the filter) or an output (after it); one that is both an output and an input joins the two.
``filter@id`` names an instance. What follows ``=`` are the filter's arguments.

Two levels of quoting apply, one after the other. The graph's level is undone here: within ``'...'`` all is
literal, and a backslash takes the next character literally. The result is what the filter gets, which undoes
the level of its options in the same way: there ``:`` separates options. :func:`quote` writes the first level,
:func:`quote_option` the second, :func:`quote_value` both.

See:
    "Filtergraph syntax" and "Notes on filtergraph escaping" in https://ffmpeg.org/ffmpeg-filters.html
"""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple, TypeAlias

from spdl_media.errors import FilterError

_NAME = re.compile(r"[A-Za-z0-9_]+\Z")
_WORD = re.compile(r"[A-Za-z0-9_.+-]+\Z")
_PLAIN = re.compile(r"[A-Za-z0-9_.:=|/+*()<>?!%&#@-]+\Z")
_EXCERPT = 24

_SPACE = re.compile(r"[ \n\t\r]*")
_QUOTED = re.compile(r"\\(.)|'([^']*)'", re.DOTALL)
# The text up to one of the characters. Space at its end is left out: each run of it is followed by something.
_UP_TO = {
    stops: re.compile(
        rf"(?:[ \n\t\r]*(?:\\.?|'[^']*'|[^ \n\t\r\\'{re.escape(stops)}]))*", re.DOTALL
    )
    for stops in ("=,;[", "[],;", "]")
}


class Node(NamedTuple):
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
        before, after = (
            "".join(f"[{quote(x)}]" for x in side) for side in (self.inputs, self.outputs)
        )
        id = "" if self.id is None else f"@{quote_option(self.id)}"
        args = "" if self.args is None else f"={quote(self.args)}"
        return f"{before}{self.name}{id}{args}{after}"


Chains: TypeAlias = tuple[tuple[Node, ...], ...]
"""A parsed description: chains of filters, side by side."""


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


def graph_error(desc: str, what: str) -> FilterError:
    """Say what is wrong with a description."""
    return FilterError(f"filter description {desc!r}: {what}", filter_desc=desc)


def parse_graph(desc: str) -> Chains:
    """Read FFmpeg's description of a filter graph.

    Whether the filters exist and like their arguments is found out when the graph is made.

    Raises:
        FilterError: The text does not follow the syntax; the message says where.
        TypeError: ``desc`` is no ``str``.
    """
    if not isinstance(desc, str):
        raise TypeError(f"a filter description is a str, such as 'scale=64:48', not {desc!r}")
    chains = _Reader(desc).graph()
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


class _Reader:
    """A cursor over the text; each method reads what it is named after."""

    def __init__(self, desc: str) -> None:
        self._desc = desc
        self._at = 0

    def graph(self) -> Chains:
        self._skip_space()
        if self._desc.startswith("sws_flags=", self._at):
            raise self._error(
                "flags of all scalers cannot be set by PyAV; give them to each scale filter instead, as in "
                "scale=64:48:flags=lanczos",
                self._at,
            )
        # The text ends there for FFmpeg, which would leave out the rest without a word.
        if "\0" in self._desc:
            raise self._error("a zero character", self._desc.index("\0"))
        chains = [self._chain()]
        # FFmpeg allows a final ";", and files of long graphs often have it.
        while self._take(";") and self._at < len(self._desc):
            chains.append(self._chain())
        if self._at < len(self._desc):
            raise self._error(f"unexpected {self._desc[self._at]!r}", self._at)
        return tuple(chains)

    def _chain(self) -> tuple[Node, ...]:
        nodes = [self._node()]
        while self._take(","):
            nodes.append(self._node())
        return tuple(nodes)

    def _node(self) -> Node:
        inputs = self._labels()
        start = self._at
        # Up to its arguments, the next filter, the next chain, or its output label.
        token = self._text("=,;[")
        if not token:
            raise self._error("a filter is missing", start)
        # FFmpeg allows filter@id, by which commands find a filter.
        name, at, id = token.partition("@")
        if not _NAME.match(name) or (at and not id):
            raise self._error(f"{token!r} is no name of a filter", start)
        # Options are told apart by the filter itself, so this is one text.
        args = self._text("[],;") if self._take("=") else None
        return Node(name, id or None, args, inputs, self._labels())

    def _labels(self) -> tuple[str, ...]:
        labels: list[str] = []
        start = self._at
        while self._take("["):
            labels.append(self._text("]"))
            if not self._take("]"):
                raise self._error("the bracket is never closed", start)
            if not labels[-1]:
                raise self._error("a label is empty", start)
            start = self._at
        return tuple(labels)

    def _text(self, stops: str) -> str:
        """The text up to one of these characters, without its quotes, and without space around it."""
        start = self._at
        self._at = _UP_TO[stops].match(self._desc, start).end()  # type: ignore[union-attr]  # all is optional
        if self._desc.startswith("'", self._at):
            raise self._error("the quote is never closed", self._at)
        text = self._desc[start : self._at]
        self._skip_space()
        return _QUOTED.sub(lambda quoted: quoted[1] or quoted[2], text)

    def _take(self, char: str) -> bool:
        """Whether this character comes next. It is passed then, with the space behind it."""
        if not self._desc.startswith(char, self._at):
            return False
        self._at += 1
        self._skip_space()
        return True

    def _skip_space(self) -> None:
        self._at = _SPACE.match(self._desc, self._at).end()  # type: ignore[union-attr]  # all is optional

    def _error(self, what: str, position: int) -> FilterError:
        rest = self._desc[position : position + _EXCERPT]
        where = f"at position {position} ({rest!r})" if rest else "at the end"
        return graph_error(self._desc, f"{what}, {where}")
