"""Any filter graph, run over frames that are decoded already."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import av

from spdl_media._checks import OneThread
from spdl_media._ffmpeg import as_fraction
from spdl_media._frame_filter import (
    AvFrame,
    BuiltGraph,
    Port,
    build,
    copy_chunk,
    exact_pts,
    fits_port,
    frame_options,
    in_words,
    make_ports,
    place_frame,
    placed_chunk,
    pull_all,
    push_frame,
    sample_time_base,
    source_args,
    whole_frame,
)
from spdl_media._graph_syntax import Kind, Wiring, filter_errors, graph_error, quote_value, wire
from spdl_media.codec import AudioCodec, VideoCodec
from spdl_media.errors import FilterError
from spdl_media.filter_desc import ratio
from spdl_media.frames import (
    AudioFrames,
    FrameMetadata,
    Frames,
    ImageFrames,
    VideoFrames,
    av_frames,
    frame_metadata,
)
from spdl_media.operations import format_name
from spdl_media.orientation import swaps_sides
from spdl_media.packets import AudioPackets, VideoPackets

__all__ = ("FilterGraph", "get_abuffer_desc", "get_buffer_desc")


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

    __slots__ = ("_built", "_flushed", "_guard", "_inputs", "_metadata", "_outputs", "_wiring")

    def __init__(self, desc: str) -> None:
        self._wiring = wire(desc)
        self._inputs = make_ports(self._wiring, inputs=True)
        self._outputs = make_ports(self._wiring, inputs=False)
        if not self._inputs or not self._outputs:
            side = "output" if self._inputs else "input"
            raise FilterError(f"filter description {desc!r} has no {side}", filter_desc=desc)
        self._guard = OneThread("FilterGraph")
        self._metadata: FrameMetadata | None = None
        self._built: BuiltGraph | None = None
        self._flushed = False
        # A graph without open inputs is made at once, so that FFmpeg refuses a bad one here.
        self._try_to_build()

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
            port = self._port(self._inputs, key, "input")
            for frame in _frames_of(frames, port, self._wiring.desc):
                self._check_format(port, frame)
                # Until the first frames of all open inputs are there, no graph can be made.
                port.waiting.append(frame)
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
            return _wrap_frames(frames, port.kind, self._metadata) if frames else None

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
                empty = [port.key for port in self._inputs if port.format is None]
                raise graph_error(self._wiring.desc, f"the inputs {empty} have had no frame")
            self._flushed = True
            for source in self._built.sources:
                with filter_errors(self._wiring.desc, "it failed"):
                    push_frame(source, None)

    def dump(self) -> str:
        """Draw the graph as text: each filter with its arguments, and where its outputs go.

            in -> scale=32:24 -> format=rgb24
            format=rgb24 -> out

        An input whose format is known shows it. Filters that FFmpeg puts in itself to convert formats are
        not drawn.
        """
        with self._guard:
            names = _unique_names(self._wiring)
            lines = [f"{port.name} ({port.format or port.kind})" for port in self._inputs]
            lines += [
                f"{port.name} -> {names[port.node]}" for port in self._inputs if not port.declared
            ]
            lines += [f"{names[link[0]]} -> {names[link[2]]}" for link in self._wiring.links]
            lines += [
                f"{names[port.node]} -> {port.name}" for port in self._outputs if not port.declared
            ]
            return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<FilterGraph {self._wiring.desc!r}>"

    def _port(self, ports: list[Port], key: str | None, side: str) -> Port:
        if key is None and len(ports) == 1:
            return ports[0]
        for port in ports:
            if key is not None and key in (port.key, port.name):
                return port
        asked = "no key was given" if key is None else f"there is no {side} {key!r}"
        keys = ", ".join(repr(port.key) for port in ports)
        raise graph_error(self._wiring.desc, f"{asked}; its {side}s are {keys}")

    def _check_format(self, port: Port, frame: AvFrame) -> None:
        given = in_words(frame_options(frame))
        if port.format is None:
            port.format = given
            port.args = source_args(frame)
        elif not fits_port(port, frame, given):
            what = f"the input {port.name} takes {port.format}, but the frames are {given}"
            raise graph_error(self._wiring.desc, what)

    def _try_to_build(self) -> None:
        open_inputs = [port for port in self._inputs if not port.declared]
        if self._built is None and all(port.args for port in open_inputs):
            self._built = build(self._wiring, tuple(port.args for port in open_inputs))

    def _run(self) -> None:
        self._try_to_build()
        if self._built is None:
            return
        for source, port in zip(self._built.sources, self._inputs, strict=True):
            with filter_errors(self._wiring.desc, "it failed"):
                while port.waiting:
                    # One input may end before others: the frames that it no longer takes are dropped.
                    push_frame(source, port.waiting.popleft())


def _unique_names(wiring: Wiring) -> list[str]:
    """Each filter by its text; a number tells apart those that are equal."""
    texts = []
    for node in wiring.nodes:
        id = f"@{node.id}" if node.id else ""
        args = f"={node.args}" if node.args else ""
        texts.append(f"{node.name}{id}{args}")
    return [
        f"{text} #{texts[:position].count(text) + 1}" if texts.count(text) > 1 else text
        for position, text in enumerate(texts)
    ]


def _frames_of(frames: Frames, port: Port, desc: str) -> Iterator[AvFrame]:
    """FFmpeg's frames behind ours, if they are of the kind that the input takes."""
    kind = "audio" if isinstance(frames, AudioFrames) else "video"
    if not isinstance(frames, AudioFrames | VideoFrames | ImageFrames):
        raise TypeError(f"frames must be AudioFrames, VideoFrames or ImageFrames, not {frames!r}")
    if kind != port.kind:
        what = f"the input {port.name} takes {port.kind}, but the frames are {kind}"
        raise graph_error(desc, what)
    if isinstance(frames, AudioFrames):
        return _shared_frames(frames, port)
    return iter(av_frames(frames))


def _wrap_frames(
    frames: list[Any], kind: Kind, metadata: FrameMetadata | None
) -> VideoFrames | AudioFrames:
    """Our frames around those that came out."""
    metadata = metadata or FrameMetadata()
    if kind == "video":
        return VideoFrames(frames, metadata)
    chunks = [placed_chunk(frame, metadata.zero) for frame in frames]
    return AudioFrames(chunks, metadata, first_sample=chunks[0].position or 0)


def _shared_frames(frames: AudioFrames, port: Port) -> Iterator[av.AudioFrame]:
    """FFmpeg's frames in the port's unit of time. They are others' too, so those that differ are copied."""
    zero = frame_metadata(frames).zero
    for chunk in frames.chunks:
        frame = whole_frame(chunk)
        time_base = _time_base_at(port, chunk.frame, zero)
        pts = exact_pts(chunk, time_base, zero)
        if frame is chunk.frame and (pts, time_base) != (frame.pts, _time_base_of(frame)):
            frame = copy_chunk(chunk)
        if frame is not chunk.frame:
            place_frame(frame, pts, time_base)
        yield frame


def _time_base_at(port: Port, frame: av.AudioFrame, zero: Fraction) -> Fraction:
    """The unit of time that an input takes sound in."""
    if port.time_base is None and "time_base" in (port.options or ()):
        return _time_base_of(frame)  # an expression, which FFmpeg evaluates
    if port.time_base is None:
        rate = frame.sample_rate
        # FFmpeg's own, if the text says none.
        port.time_base = Fraction(1, rate) if port.declared else sample_time_base(rate, zero)
    return port.time_base


def _time_base_of(frame: av.AudioFrame) -> Fraction:
    return as_fraction(frame.time_base) or Fraction(1, frame.sample_rate)


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
    any_source: Any = source
    codec: VideoCodec = getattr(any_source, "codec", any_source)
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
    any_source: Any = source
    codec: AudioCodec = getattr(any_source, "codec", any_source)
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
