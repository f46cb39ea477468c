"""Run any filter graph over decoded frames."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import av

from spdl_media._ffmpeg import as_fraction
from spdl_media._threads import OneThread
from spdl_media.codec import AudioCodec, VideoCodec
from spdl_media.errors import FilterError
from spdl_media.filters import FrameFilter, frame_options, source_args
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
    pull_all,
    push_frame,
    quote_value,
    wire,
)
from spdl_media.image_frames import ImageFrames, VideoFrames, av_frames, frame_metadata
from spdl_media.packets import AudioPackets, FrameMetadata, VideoPackets

__all__ = ("FilterGraph", "get_abuffer_desc", "get_buffer_desc")


@dataclass(slots=True, eq=False)
class _Port:
    """An input or output of a graph.

    Attributes:
        node: Position of its buffer or sink node, or of the filter that the open input or output belongs to.
        kind: Video or audio.
        name: Name in error messages.
        key: Name for callers.
        declared: The text has a buffer or sink node for it.
        options: Format of the frames by FFmpeg's option names, from the text or from the first frame.
        time_base: Time base of the frames, if known; audio is converted to it.
        args: Arguments of the buffer source of an open input, once its first frame has arrived.
        waiting: Frames that arrived before the graph could be built.
        counter: Numbers frames without a time, once there is one.
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
    counter: FrameFilter | None = None

    def __post_init__(self) -> None:
        # The text may state an expression, which only FFmpeg evaluates.
        with suppress(KeyError, ValueError):
            self.time_base = Fraction(self.options["time_base"])

    def check(self, frame: AvFrame, desc: str) -> None:
        """Refuse a frame of another format. The first frame of an open input sets its format.

        Raises:
            FilterError: The frame has another size, format or time base than the input takes.
        """
        given = frame_options(frame)
        # The first frame of an open input: nothing to compare with.
        if not (self.declared or self.args):
            self.options, self.args = given, source_args(frame)
            return
        base = as_fraction(frame.time_base)
        # Only options that both sides state are compared: a buffer node may omit some.
        is_other = any(self.options.get(name, value) != value for name, value in given.items())
        if is_other or (self.declared and self.time_base and base and base != self.time_base):
            takes, are = _described(self.options), _described(given)
            what = f"the input {self.name} takes {takes}, but the frames are {are}"
            raise graph_error(desc, what)

    def timed(self, frame: AvFrame) -> AvFrame:
        """Return the frame itself, or if it has no time a new one that is at its number, from 0 on."""
        if frame.pts is not None or self.kind == "audio":
            return frame
        # Frames may be shared with other threads, so this one cannot be changed.
        self.counter = self.counter or FrameFilter("setpts=N", kind="video", gives_one=True)
        return self.counter.push(frame)[0]  # type: ignore[no-any-return]  # PyAV's frames

    def unit(self, frame: av.AudioFrame, zero: Fraction) -> Fraction:
        """Return the time base in which the input takes audio."""
        if self.time_base is None and "time_base" in self.options:
            return time_base_of(frame)  # an expression, which FFmpeg evaluates
        if self.time_base is None:
            rate = frame.sample_rate
            # FFmpeg's default, if the text states none.
            self.time_base = Fraction(1, rate) if self.declared else sample_time_base(rate, zero)
        return self.time_base


def _described(options: dict[str, str]) -> str:
    """Write size and format for a message; empty: none are stated."""
    parts = map(options.get, ("video_size", "pix_fmt", "sample_fmt", "channel_layout"))
    rate = options.get("sample_rate")
    return " ".join(filter(None, (*parts, f"{rate} Hz" if rate else None)))


def _make_ports(wiring: Wiring, kinds: dict[str, Kind], side: str) -> list[_Port]:
    """Return the inputs or the outputs, declared ones first, in the order of :class:`BuiltGraph`."""
    ports = []
    for position, node in enumerate(wiring.nodes):
        if node.name in kinds:
            names, options = (node.full_name, node.id or ""), _options(node.args or "")
            ports.append(_Port(position, kinds[node.name], *names, declared=True, options=options))
    pads = wiring.inputs if kinds is SOURCES else wiring.outputs
    # A single unlabelled input or output needs no key; several are numbered, so that each has one.
    unlabelled = [pad for pad in pads if not pad.label]
    for pad in pads:
        number = f"{side}{unlabelled.index(pad)}" if len(unlabelled) > 1 and not pad.label else ""
        key = pad.label or number
        ports.append(_Port(pad.node, pad.kind, key or side, key))
    return ports


def _options(args: str) -> dict[str, str]:
    pairs = (part.partition("=") for part in args.split(":"))
    # Quotes surround a channel layout without a name: '2 channels'.
    options = {name.strip(): value.strip().strip("'") for name, equals, value in pairs if equals}
    # FFmpeg takes the size as width and height, too.
    if "width" in options and "height" in options:
        options.setdefault("video_size", f"{options['width']}x{options['height']}")
    return options


class FilterGraph:
    """A filter graph that runs over decoded frames.

    Inputs are ``buffer`` and ``abuffer`` nodes of the text (:func:`get_buffer_desc` writes them), and inputs
    left open (``[left][right]hstack``, or just ``hflip``), which take their format from the first frames
    added. Outputs are ``buffersink`` and ``abuffersink`` nodes, and outputs left open. The ``key`` of each is
    its label or name: ``"left"`` for ``[left]``, ``"a"`` or ``"buffer@a"`` for ``buffer@a=...``. A single
    input or output needs no key.

        graph = FilterGraph("[left][right]hstack,format=rgb24")
        graph.add_frames(frames_a, key="left")
        graph.add_frames(frames_b, key="right")
        graph.flush()
        side_by_side = graph.get_frames()

    All frames of one input have the same size and format. Where there are several inputs, images without a
    time follow each other from second 0. Filters run in one thread. Frames are not consumed. Never run a
    description from an untrusted source: filters such as ``movie``, ``lut3d=file=...``,
    ``metadata=file=...`` and ``drawtext=textfile=...`` read and write files by name.

    Args:
        desc: FFmpeg's description of the graph.

    Raises:
        FilterError: The description is invalid.

    Thread safety: one thread at a time; a concurrent call raises RuntimeError.

    See:
        https://ffmpeg.org/ffmpeg-filters.html
    """

    def __init__(self, desc: str) -> None:
        self._guard = OneThread("FilterGraph")
        self._wiring = wire(desc)
        self._inputs = _make_ports(self._wiring, SOURCES, "in")
        self._outputs = _make_ports(self._wiring, SINKS, "out")
        if not self._inputs or not self._outputs:
            side = "output" if self._inputs else "input"
            raise FilterError(f"filter description {desc!r} has no {side}", filter_desc=desc)
        self._metadata: FrameMetadata | None = None
        self._built: BuiltGraph | None = None
        self._flushed = False
        # A graph without open inputs is built at once, so that FFmpeg reports errors here.
        self._run()

    @property
    def inputs(self) -> tuple[str, ...]:
        """The keys of the inputs; ``""`` for one without a label."""
        return tuple(port.key for port in self._inputs)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The keys of the outputs; ``""`` for one without a label."""
        return tuple(port.key for port in self._outputs)

    def add_frames(self, frames: Frames, *, key: str | None = None) -> None:
        """Send frames to an input.

        Args:
            frames: Images for a video input, audio for an audio input. Not consumed.
            key: The input; needed only if there are several.

        Raises:
            FilterError: The frames have another kind, size or format than the input takes, a filter
                refuses them, or there is no such input.
            RuntimeError: :meth:`flush` was called before, or another thread is using the graph.
        """
        with self._guard:
            if self._flushed:
                raise RuntimeError("this FilterGraph was flushed; make a new one for more frames")
            # An unknown key raises before any frame is sent.
            port = self._port(self._inputs, key, "input")
            for frame in _frames_of(frames, port, self._wiring.desc):
                port.check(frame, self._wiring.desc)
                # Filters with several inputs join frames by time, and FFmpeg computes nonsense from none.
                timed = port.timed(frame) if len(self._inputs) > 1 else frame
                # The graph cannot be built before all open inputs have had a frame.
                port.waiting.append(timed)
            # Clock and window of the output are those of the first frames.
            self._metadata = self._metadata or frame_metadata(frames)
            self._run()

    def get_frames(self, *, key: str | None = None) -> VideoFrames | AudioFrames | None:
        """Take all frames that an output has ready.

        Args:
            key: The output; needed only if there are several.

        Returns:
            The frames, images always as ``VideoFrames``; ``None`` if none are ready.

        Raises:
            FilterError: A filter fails, or there is no such output.
            RuntimeError: Another thread is using the graph.
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
        """End all inputs, so that the filters release the frames that they hold back.

        Raises:
            FilterError: An open input has had no frame, so its format is not known.
            RuntimeError: Another thread is using the graph.
        """
        with self._guard:
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

        Inputs are drawn with their format once it is known. Filters that FFmpeg inserts to convert formats
        are not drawn.

        Raises:
            RuntimeError: Another thread is using the graph.
        """
        with self._guard:
            # Without labels, because arrows replace them in the drawing.
            nodes = [node._replace(inputs=(), outputs=()) for node in self._wiring.nodes]
            names = [
                f"{node} #{at}" if nodes.count(node) > 1 else str(node)
                for at, node in enumerate(nodes)
            ]
            arrows = [
                *((port.name, names[port.node]) for port in self._inputs if not port.declared),
                *((names[link[0]], names[link[2]]) for link in self._wiring.links),
                *((names[port.node], port.name) for port in self._outputs if not port.declared),
            ]
            lines = [f"{p.name} ({_described(p.options) or p.kind})" for p in self._inputs]
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
        """Send waiting frames to the graph, which is built once all its inputs have a format."""
        if self._built is None:
            args = [port.args for port in self._inputs if not port.declared]
            if not all(args):
                return
            self._built = build(self._wiring, args)
        with filter_errors(self._wiring.desc, "it failed"):
            for source, port in zip(self._built.sources, self._inputs, strict=True):
                while port.waiting:
                    # Filters may end one input before the others; its further frames are dropped.
                    push_frame(source, port.waiting.popleft())


def _frames_of(frames: Frames, port: _Port, desc: str) -> Iterable[AvFrame]:
    """Return PyAV's frames, checked to be of the kind that the input takes."""
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
    """Write the ``buffer`` node that feeds frames of a stream to a :class:`~spdl_media.FilterGraph`.

    Args:
        source: Codec of a video, or packets. With packets the size is the upright one, because packets know
            the orientation and decoding turns images upright.
        label: Name of the input, as in ``buffer@label``, for :meth:`FilterGraph.add_frames`.
        pix_fmt: Pixel format of the frames, if they are converted before they are added.

    Returns:
        The text of the node, to be followed by its output label or ``,``.

    Raises:
        TypeError: ``source`` is neither a codec of images nor packets of one.
        ValueError: The size or format is not known before a frame is decoded, or a label or name is invalid.
    """
    orientation: int = getattr(source, "orientation", 1)
    codec = _codec_of(source, "pix_fmt", "VideoCodec")
    pix_fmt = codec.pix_fmt if pix_fmt is None else format_name("pix_fmt", pix_fmt)
    if not (codec.width and codec.height and pix_fmt):
        raise ValueError(
            "the size and the pixel format of this stream are known once a frame is decoded; leave the "
            "input of the FilterGraph open, as in '[in]scale=64:48', and it takes them from the first frame"
        )
    width, height = codec.width, codec.height
    aspect = codec.sample_aspect_ratio or Fraction(1)
    # Turning the image by a quarter swaps the sides of its pixels, too.
    if swaps_sides(orientation):
        width, height, aspect = height, width, 1 / aspect
    rate = f":frame_rate={codec.frame_rate}" if codec.frame_rate else ""
    return (
        f"buffer{_label(label)}=video_size={width}x{height}:pix_fmt={pix_fmt}:"
        f"time_base={codec.time_base}:pixel_aspect={aspect}{rate}"
    )


def get_abuffer_desc(
    source: AudioCodec | AudioPackets, label: str | None = None, sample_fmt: str | None = None
) -> str:
    """Write the ``abuffer`` node that feeds audio to a :class:`~spdl_media.FilterGraph`.

    Args:
        source: Codec of the audio, or packets.
        label: Name of the input, as in ``abuffer@label``, for :meth:`FilterGraph.add_frames`.
        sample_fmt: Sample format of the frames, if they are converted before they are added.

    Returns:
        The text of the node, to be followed by its output label or ``,``.

    Raises:
        TypeError: ``source`` is neither a codec of audio nor packets of one.
        ValueError: The sample format is not known before a frame is decoded, or a label or name is invalid.
    """
    codec = _codec_of(source, "sample_fmt", "AudioCodec")
    if sample_fmt is not None:
        format_name("sample_fmt", sample_fmt)
    if not (sample_fmt or codec.sample_fmt):
        raise ValueError(
            "the sample format of this stream is known once a frame is decoded; say it as sample_fmt=, or "
            "leave the input of the FilterGraph open"
        )
    # One tick per sample, so that timestamps are exact; add_frames converts frames to this time base.
    return (
        f"abuffer{_label(label)}=time_base=1/{codec.sample_rate}:sample_rate={codec.sample_rate}:"
        f"sample_fmt={sample_fmt or codec.sample_fmt}:channel_layout={quote_value(codec.channel_layout)}"
    )


def _codec_of(source: Any, attribute: str, kind: str) -> Any:
    codec = getattr(source, "codec", source)
    if not hasattr(codec, attribute):
        raise TypeError(
            f"source must be of type {kind} or have one as codec, not {type(source).__name__}"
        )
    return codec


def _label(label: str | None) -> str:
    if label is None:
        return ""
    if not re.match(r"[A-Za-z0-9_.-]+\Z", label):
        raise ValueError(f"label must be made of letters, digits, '_', '.' and '-', not {label!r}")
    return f"@{label}"
