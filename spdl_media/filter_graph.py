"""Any filter graph, run over frames that are decoded already."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import av

from spdl_media._checks import OneThread
from spdl_media._ffmpeg import as_fraction
from spdl_media.codec import AudioCodec, VideoCodec
from spdl_media.errors import FilterError
from spdl_media.filters import frame_options, pull_all, push_frame, source_args
from spdl_media.formats import format_name
from spdl_media.frames import (
    AudioFrames,
    Frames,
    frame_of,
    placed_chunk,
    sample_time_base,
    time_base_of,
)
from spdl_media.geometry import swaps_sides
from spdl_media.graph import (
    SINKS,
    SOURCES,
    AvFrame,
    BuiltGraph,
    Kind,
    Wiring,
    build,
    filter_errors,
    graph_error,
    quote_value,
    wire,
)
from spdl_media.image_frames import (
    ImageFrames,
    VideoFrames,
    av_frames,
    frame_metadata,
)
from spdl_media.operations import ratio
from spdl_media.packets import AudioPackets, FrameMetadata, VideoPackets

__all__ = ("FilterGraph", "get_abuffer_desc", "get_buffer_desc")


@dataclass(slots=True, eq=False)
class _Port:
    """An end of a graph: where frames enter or leave.

    Attributes:
        node: Position of the filter that is the end, or that an open end belongs to.
        kind: What flows there.
        name: What messages call it.
        key: What callers call it.
        declared: The text has a node for it.
        options: What is said of the frames, by FFmpeg's names: by the text, or by the first frame.
        time_base: The unit of time that the frames have, if known; audio is brought to it.
        args: Arguments of the source that feeds an open input, once its first frame has come.
        waiting: Frames that came before the graph could be made.
    """

    node: int
    kind: Kind
    name: str
    key: str
    declared: bool = False
    options: dict[str, str] = field(default_factory=dict)
    time_base: Fraction | None = None
    args: str = ""
    waiting: deque[AvFrame] = field(default_factory=deque)

    def __post_init__(self) -> None:
        # An expression is FFmpeg's to evaluate.
        with suppress(KeyError, ValueError):
            self.time_base = Fraction(self.options["time_base"])

    def check(self, frame: AvFrame, desc: str) -> None:
        """Refuse a frame of another format; the first one of an open input says which it takes.

        Raises:
            FilterError: The frame has another size, format or time base than the input takes.
        """
        given = frame_options(frame)
        # An open input takes its format from its first frame.
        if not (self.declared or self.args):
            self.options, self.args = given, source_args(frame)
            return
        base = as_fraction(frame.time_base)
        # Only what both sides say is compared: a declaration may leave some out.
        is_other = any(self.options.get(name, value) != value for name, value in given.items())
        if is_other or (self.declared and self.time_base and base and base != self.time_base):
            takes, are = _in_words(self.options), _in_words(given)
            what = f"the input {self.name} takes {takes}, but the frames are {are}"
            raise graph_error(desc, what)

    def unit(self, frame: av.AudioFrame, zero: Fraction) -> Fraction:
        """The unit of time that the input takes audio in."""
        if self.time_base is None and "time_base" in self.options:
            return time_base_of(frame)  # an expression, which FFmpeg evaluates
        if self.time_base is None:
            rate = frame.sample_rate
            # FFmpeg's own, if the text says none.
            self.time_base = Fraction(1, rate) if self.declared else sample_time_base(rate, zero)
        return self.time_base


def _in_words(options: dict[str, str]) -> str:
    """Size and format; empty: nothing is said of them."""
    parts = map(options.get, ("video_size", "pix_fmt", "sample_fmt", "channel_layout"))
    rate = options.get("sample_rate")
    return " ".join(filter(None, (*parts, f"{rate} Hz" if rate else None)))


def _make_ports(wiring: Wiring, kinds: dict[str, Kind], side: str) -> list[_Port]:
    """The ends on one side, declared ones first, as :class:`BuiltGraph` has them."""
    ports = []
    for position, node in enumerate(wiring.nodes):
        if node.name in kinds:
            names, options = (node.full_name, node.id or ""), _options(node.args or "")
            ports.append(_Port(position, kinds[node.name], *names, declared=True, options=options))
    pads = wiring.inputs if kinds is SOURCES else wiring.outputs
    # One without a label needs no name; of several, each must be reachable.
    unlabelled = [pad for pad in pads if not pad.label]
    for pad in pads:
        number = f"{side}{unlabelled.index(pad)}" if len(unlabelled) > 1 and not pad.label else ""
        key = pad.label or number
        ports.append(_Port(pad.node, pad.kind, key or side, key))
    return ports


def _options(args: str) -> dict[str, str]:
    pairs = (part.partition("=") for part in args.split(":"))
    # A value in quotes is a layout without a name: '2 channels'.
    options = {name.strip(): value.strip().strip("'") for name, equals, value in pairs if equals}
    # FFmpeg takes the size in either form.
    if "width" in options and "height" in options:
        options.setdefault("video_size", f"{options['width']}x{options['height']}")
    return options


class FilterGraph:
    """Any filter graph, run over decoded frames.

    Inputs are ``buffer`` and ``abuffer`` nodes of the text (:func:`get_buffer_desc` writes them), and inputs
    left open (``[left][right]hstack``, or just ``hflip``), which take their format from the first frames
    added. Outputs are ``buffersink`` and ``abuffersink`` nodes, and outputs left open. Each goes by its label
    or name as ``key``: ``"left"`` for ``[left]``, ``"a"`` or ``"buffer@a"`` for ``buffer@a=...``. A graph
    with one input or one output needs no key for it.

        graph = FilterGraph("[left][right]hstack,format=rgb24")
        graph.add_frames(frames_a, key="left")
        graph.add_frames(frames_b, key="right")
        graph.flush()
        side_by_side = graph.get_frames()

    All frames of one input have one size and format. Filters run with one thread. Frames are not consumed.
    A description is code of yours: filters such as ``movie``, ``lut3d=file=...``, ``metadata=file=...`` and
    ``drawtext=textfile=...`` read and write files by name, so never take one from a stranger.

    Args:
        desc: FFmpeg's description of the graph.

    Raises:
        FilterError: The description is bad.

    Thread safety: one thread at a time; a second one gets a RuntimeError.

    See:
        https://ffmpeg.org/ffmpeg-filters.html
    """

    def __init__(self, desc: str) -> None:
        self._wiring = wire(desc)
        self._inputs = _make_ports(self._wiring, SOURCES, "in")
        self._outputs = _make_ports(self._wiring, SINKS, "out")
        if not self._inputs or not self._outputs:
            side = "output" if self._inputs else "input"
            raise FilterError(f"filter description {desc!r} has no {side}", filter_desc=desc)
        self._guard = OneThread("FilterGraph")
        self._metadata: FrameMetadata | None = None
        self._built: BuiltGraph | None = None
        self._flushed = False
        # A graph without open inputs is made at once, so that FFmpeg refuses a bad one here.
        self._run()

    @property
    def filter_desc(self) -> str:
        """The description as it was given."""
        return self._wiring.desc

    @property
    def inputs(self) -> tuple[str, ...]:
        """The keys of the inputs; ``""`` for one without a label."""
        return tuple(port.key for port in self._inputs)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The keys of the outputs; ``""`` for one without a label."""
        return tuple(port.key for port in self._outputs)

    def add_frames(self, frames: Frames, *, key: str | None = None) -> None:
        """Put frames into an input.

        Args:
            frames: Images or audio, as the input takes. Not consumed.
            key: Which input, where there are several.

        Raises:
            FilterError: The frames are of another kind, size or format than the input takes, a filter
                refuses them, or there is no such input.
            RuntimeError: After :meth:`flush`, or while another thread is inside.
        """
        with self._guard:
            if self._flushed:
                raise RuntimeError("this FilterGraph was flushed; make a new one for more frames")
            # An unknown key is an error before any frame goes in.
            port = self._port(self._inputs, key, "input")
            for frame in _frames_of(frames, port, self._wiring.desc):
                port.check(frame, self._wiring.desc)
                # Until the first frames of all open inputs are there, no graph can be made.
                port.waiting.append(frame)
            # Clock and window are those of the first frames.
            self._metadata = self._metadata or frame_metadata(frames)
            self._run()

    def get_frames(self, *, key: str | None = None) -> VideoFrames | AudioFrames | None:
        """Take what an output has ready.

        Args:
            key: Which output, where there are several.

        Returns:
            The frames, images always as ``VideoFrames``; ``None``: nothing is ready.

        Raises:
            FilterError: A filter fails, or there is no such output.
            RuntimeError: Another thread is inside.
        """
        with self._guard:
            port = self._port(self._outputs, key, "output")
            if self._built is None:
                return None
            sink = self._built.sinks[self._outputs.index(port)]
            with filter_errors(self._wiring.desc, "it failed"):
                frames, _ = pull_all(sink)
            if not frames:
                return None
            metadata = self._metadata or FrameMetadata()
            if port.kind == "video":
                return VideoFrames(frames, metadata)
            return AudioFrames([placed_chunk(one, metadata.zero) for one in frames], metadata)

    def flush(self) -> None:
        """End all inputs, so that the filters give out what they hold.

        Raises:
            FilterError: An open input has had no frame, so its format is not known.
            RuntimeError: Another thread is inside.
        """
        with self._guard:
            if self._flushed:
                return
            if self._built is None:
                empty = [port.key for port in self._inputs if not (port.declared or port.args)]
                raise graph_error(self._wiring.desc, f"the inputs {empty} have had no frame")
            self._flushed = True
            with filter_errors(self._wiring.desc, "it failed"):
                for source in self._built.sources:
                    push_frame(source, None)

    def dump(self) -> str:
        """Draw the graph as text: each filter with its arguments, and where its outputs go.

            in -> scale=32:24 -> format=rgb24
            format=rgb24 -> out

        An input whose format is known shows it. Filters that FFmpeg puts in itself to convert formats are
        not drawn.

        Raises:
            RuntimeError: Another thread is inside.
        """
        with self._guard:
            names = _unique_names(self._wiring)
            arrows = [
                *((port.name, names[port.node]) for port in self._inputs if not port.declared),
                *((names[link[0]], names[link[2]]) for link in self._wiring.links),
                *((names[port.node], port.name) for port in self._outputs if not port.declared),
            ]
            lines = [f"{p.name} ({_in_words(p.options) or p.kind})" for p in self._inputs]
            return "\n".join([*lines, *map(" -> ".join, arrows)])

    def __repr__(self) -> str:
        return f"<FilterGraph {self._wiring.desc!r}>"

    def _port(self, ports: list[_Port], key: str | None, side: str) -> _Port:
        if key is None and len(ports) == 1:
            return ports[0]
        for port in ports:
            if key is not None and key in (port.key, port.name):
                return port
        asked = "no key was given" if key is None else f"there is no {side} {key!r}"
        keys = ", ".join(repr(port.key) for port in ports)
        raise graph_error(self._wiring.desc, f"{asked}; its {side}s are {keys}")

    def _run(self) -> None:
        """Give the graph what waits for it; it is made when all its inputs have a format."""
        if self._built is None:
            args = [port.args for port in self._inputs if not port.declared]
            if not all(args):
                return
            self._built = build(self._wiring, args)
        with filter_errors(self._wiring.desc, "it failed"):
            for source, port in zip(self._built.sources, self._inputs, strict=True):
                while port.waiting:
                    # One input may end before others: the frames that it no longer takes are dropped.
                    push_frame(source, port.waiting.popleft())


def _unique_names(wiring: Wiring) -> list[str]:
    """Each filter by its text; a number tells apart those that are equal."""
    # Without labels, which the arrows of the drawing replace.
    texts = [str(node._replace(inputs=(), outputs=())) for node in wiring.nodes]
    return [
        f"{text} #{texts[:position].count(text) + 1}" if texts.count(text) > 1 else text
        for position, text in enumerate(texts)
    ]


def _frames_of(frames: Frames, port: _Port, desc: str) -> Iterable[AvFrame]:
    """FFmpeg's frames behind ours, if they are of the kind that the input takes."""
    kind = "audio" if isinstance(frames, AudioFrames) else "video"
    if not isinstance(frames, AudioFrames | VideoFrames | ImageFrames):
        raise TypeError(f"frames must be AudioFrames, VideoFrames or ImageFrames, not {frames!r}")
    if kind != port.kind:
        what = f"the input {port.name} takes {port.kind}, but the frames are {kind}"
        raise graph_error(desc, what)
    if not isinstance(frames, AudioFrames):
        return av_frames(frames)
    zero = frame_metadata(frames).zero
    return (
        frame_of(chunk, port.unit(chunk.frame, zero), zero, is_shared=True)
        for chunk in frames.chunks
    )


def get_buffer_desc(
    source: VideoCodec | VideoPackets, label: str | None = None, pix_fmt: str | None = None
) -> str:
    """Write the source node through which frames of a stream enter a :class:`~spdl_media.FilterGraph`.

    Args:
        source: Codec of a video, or packets. Packets know the orientation, and decoding turns images
            upright, so the size named for packets is the upright one.
        label: Name of the input, as in ``buffer@label``, for :meth:`FilterGraph.add_frames`.
        pix_fmt: Pixel format of the frames, where they are converted before they enter.

    Returns:
        The text of the node, to be followed by its output label or ``,``.

    Raises:
        ValueError: The size or format is not known before a frame is decoded, or a bad label or name.
    """
    orientation: int = getattr(source, "orientation", 1)
    codec: Any = getattr(source, "codec", source)
    pix_fmt = codec.pix_fmt if pix_fmt is None else format_name("pix_fmt", pix_fmt)
    if not (codec.width and codec.height and pix_fmt):
        raise ValueError(
            "the size and the pixel format of this stream are known once a frame is decoded; leave the "
            "input of the FilterGraph open, as in '[in]scale=64:48', and it takes them from the first frame"
        )
    width, height = codec.width, codec.height
    aspect = codec.sample_aspect_ratio or Fraction(1)
    # A pixel that is wider than high is higher than wide when it lies on its side.
    if swaps_sides(orientation):
        width, height, aspect = height, width, 1 / aspect
    rate = f":frame_rate={ratio(codec.frame_rate)}" if codec.frame_rate else ""
    return (
        f"buffer{_label(label)}=video_size={width}x{height}:pix_fmt={pix_fmt}:"
        f"time_base={ratio(codec.time_base)}:pixel_aspect={ratio(aspect)}{rate}"
    )


def get_abuffer_desc(
    source: AudioCodec | AudioPackets, label: str | None = None, sample_fmt: str | None = None
) -> str:
    """Write the source node through which audio enters a :class:`~spdl_media.FilterGraph`.

    Args:
        source: Codec of the audio, or packets.
        label: Name of the input, as in ``abuffer@label``, for :meth:`FilterGraph.add_frames`.
        sample_fmt: Sample format of the frames, where they are converted before they enter.

    Returns:
        The text of the node, to be followed by its output label or ``,``.

    Raises:
        ValueError: The sample format is not known before a frame is decoded, or a bad label or name.
    """
    codec: Any = getattr(source, "codec", source)
    if sample_fmt is not None:
        format_name("sample_fmt", sample_fmt)
    if not (sample_fmt or codec.sample_fmt):
        raise ValueError(
            "the sample format of this stream is known once a frame is decoded; say it as sample_fmt=, or "
            "leave the input of the FilterGraph open"
        )
    # In samples, so that each stands at a whole number; add_frames brings frames to this unit.
    return (
        f"abuffer{_label(label)}=time_base=1/{codec.sample_rate}:sample_rate={codec.sample_rate}:"
        f"sample_fmt={sample_fmt or codec.sample_fmt}:channel_layout={quote_value(codec.channel_layout)}"
    )


def _label(label: str | None) -> str:
    if label is None:
        return ""
    if not re.match(r"[A-Za-z0-9_.-]+\Z", label):
        raise ValueError(f"label must be made of letters, digits, '_', '.' and '-', not {label!r}")
    return f"@{label}"
