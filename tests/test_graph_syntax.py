"""The parser of FFmpeg's graph syntax, compared with FFmpeg's own parser."""

from __future__ import annotations

import contextlib
import string
from fractions import Fraction

import av
import pytest
from effort import each
from hypothesis import given
from hypothesis import strategies as st

from spdl_media import FilterError, FilterGraph, VideoFrames

# Private: only the grammar is tested. FilterGraph would reject most of these texts for their filters.
from spdl_media.graph import Chains, Node, parse_graph, quote, quote_option, quote_value
from spdl_media.image_frames import av_frames

# All characters except NUL, which ends C strings, and lone surrogates, which cannot be encoded.
texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
some_texts = texts.filter(bool)
words = st.text(string.ascii_letters + string.digits + "_", min_size=1)


@st.composite
def graphs(draw: st.DrawFn) -> Chains:
    """Draw graphs in which each label is used once."""
    labels = iter(draw(st.lists(some_texts, unique=True, max_size=8)))

    def some() -> tuple[str, ...]:
        return tuple(
            label for _, label in zip(range(draw(st.integers(0, 2))), labels, strict=False)
        )

    def node() -> Node:
        id, args = draw(st.none() | some_texts), draw(st.none() | texts)
        return Node(draw(words), id, args, some(), some())

    return tuple(
        tuple(node() for _ in range(draw(st.integers(1, 3))))
        for _ in range(draw(st.integers(1, 3)))
    )


def written(graph: Chains) -> str:
    return ";".join(",".join(map(str, chain)) for chain in graph)


@given(graphs())
def test_what_is_written_reads_back(graph: Chains) -> None:
    assert parse_graph(written(graph)) == graph


@given(texts)
def test_quoted_arguments_come_back_whole(text: str) -> None:
    assert parse_graph(f"x={quote(text)}")[0][0].args == text


@given(texts)
def test_quoted_values_undo_in_two_levels(text: str) -> None:
    ((node,),) = parse_graph(f"x={quote_value(text)}")
    assert node.args == quote_option(text)


@given(
    st.text(
        st.characters(exclude_characters="\0", exclude_categories=["Cs"], max_codepoint=0x2FF),
        min_size=1,
    )
)
def test_ffmpeg_gets_a_quoted_value_whole(text: str) -> None:
    frame = av.VideoFrame(16, 16, "gray")
    frame.pts, frame.time_base = 0, Fraction(1, 25)
    desc = f"metadata=add:key=k:value={quote_value(text)}"
    graph = FilterGraph(desc)
    graph.add_frames(VideoFrames([frame]))
    (result,) = av_frames(graph.get_frames())  # type: ignore[arg-type]  # of a graph of video
    assert result.metadata == {"k": text}


@given(st.text("ab,;[]'\\=@ \n:"))
def test_any_text_parses_or_is_a_filter_error(text: str) -> None:
    with contextlib.suppress(FilterError):
        graph = parse_graph(text)
        assert parse_graph(written(graph)) == graph


def test_chains_labels_ids_and_space() -> None:
    graph = parse_graph(" [a] [ b ]overlay@o = x=8 [c] ;\n[c] null , scale=64:48[d];")
    assert graph == (
        (Node("overlay", "o", "x=8", ("a", "b"), ("c",)),),
        (Node("null", None, None, ("c",)), Node("scale", None, "64:48", (), ("d",))),
    )


@each(
    "desc, args",
    [
        (r"x=a\,b", "a,b"),
        ("x='a,b;[c]'", "a,b;[c]"),
        (r"x='a\b'", r"a\b"),
        (r"x=it\'s", "it's"),
        ("x='a'  ", "a"),
        ("x=' a ' ", " a "),
        (r"x=a\ ", "a "),
        ("x=", ""),
        ("x", None),
        ("x=a=b:c=d", "a=b:c=d"),
        ("x=\\", "\\"),
    ],
)
def test_quotes_and_escapes(desc: str, args: str | None) -> None:
    assert parse_graph(desc) == ((Node("x", args=args),),)


@each(
    "desc, match",
    [
        ("", "a filter is missing, at the end"),
        ("a,,b", r"a filter is missing, at position 2 \(',b'\)"),
        ("a,", "a filter is missing, at the end"),
        (";a", "a filter is missing, at position 0"),
        ("[in a", r"the bracket is never closed, at position 0 \('\[in a'\)"),
        ("a[out", "the bracket is never closed, at position 1"),
        ("[]a", "a label is empty, at position 0"),
        ("x='abc", r"""the quote is never closed, at position 2 \("'abc"\)"""),
        ("x=1]", r"unexpected '\]', at position 3"),
        ("a b", "'a b' is not the name of a filter, at position 0"),
        ("a@=1", "'a@' is not the name of a filter"),
        ("[a]x[b];[a]y[c]", r"the label \[a\] names 2 inputs.*Use split"),
        ("x[a];y[a]", r"the label \[a\] names 2 outputs"),
        ("[a]x[a]", r"\[a\] joins x to itself"),
        ("x=a\0b", "a zero character, at position 3"),
    ],
)
def test_bad_syntax_says_what_and_where(desc: str, match: str) -> None:
    with pytest.raises(FilterError, match=match) as caught:
        parse_graph(desc)
    assert caught.value.filter_desc == desc


def test_only_text_is_parsed() -> None:
    with pytest.raises(TypeError, match="a filter description is a str"):
        parse_graph(None)  # type: ignore[arg-type]
