"""Filter graphs of FFmpeg, run over frames.

:class:`FrameFilter` is the one-in, one-out graph inside decoding, :class:`FilterGraph` any graph over frames
that are decoded already.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import av

from spdl_media._checks import OneThread
from spdl_media._filters.ends import (
    Port,
    fits,
    frames_of,
    make_ports,
    pull_all,
    push_frame,
    wrap_frames,
)
from spdl_media._filters.wiring import (
    SINKS,
    SOURCES,
    AvFrame,
    BuiltGraph,
    Kind,
    Wiring,
    build,
    describe_frame,
    filter_errors,
    source_args,
    wire,
)
from spdl_media.errors import FilterError
from spdl_media.frames import AudioFrames, FrameMetadata, Frames, VideoFrames, frame_metadata

__all__ = ("FilterGraph",)


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

    Raises:
        FilterError: The description is bad, or has more than one input or output, or turns one kind into
            the other.

    Thread safety: one thread at a time; its owner takes care.
    """

    __slots__ = ("_facts", "_graph", "_key", "_wiring", "finished")

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
    ) -> None:
        self._wiring = wire(desc)
        _check_simple(self._wiring, kind)
        self._facts = (time_base, frame_rate, sample_aspect_ratio)
        self._graph: BuiltGraph | None = None
        self._key: object = None
        self.finished = False

    def push(self, frame: AvFrame) -> list[Any]:
        """Put in one frame; take out all that are ready, of the same kind. The frame stays the caller's."""
        if self.finished:
            return []
        with filter_errors(self._wiring.desc, "it failed"):
            done = self._follow(frame)
            if not push_frame(self._graph.sources[0], frame):  # type: ignore[union-attr]  # made by _follow
                self.finished = True
            return done + self._pull()

    def flush(self) -> list[Any]:
        """End the input; take out what the filters still hold. Nothing can be pushed afterwards."""
        with filter_errors(self._wiring.desc, "it failed"):
            rest = self._drain()
        self.finished = True
        return rest

    def _follow(self, frame: AvFrame) -> list[Any]:
        """Make the graph fit the frame; what the graph before it still held."""
        key = _frame_key(frame)
        if key == self._key:
            return []
        rest = self._drain()
        time_base, frame_rate, aspect = self._facts
        args = source_args(
            frame, time_base=time_base, frame_rate=frame_rate, sample_aspect_ratio=aspect
        )
        self._graph, self._key = build(self._wiring, (args,)), key
        self.finished = False
        return rest

    def _drain(self) -> list[Any]:
        if self._graph is None or self.finished:
            return []
        push_frame(self._graph.sources[0], None)
        return self._pull()

    def _pull(self) -> list[Any]:
        frames, ended = pull_all(self._graph.sinks[0])  # type: ignore[union-attr]  # the callers made it
        self.finished = self.finished or ended
        return frames


def _frame_key(frame: AvFrame) -> object:
    if isinstance(frame, av.AudioFrame):
        return frame.sample_rate, frame.format.name, frame.layout.name, frame.time_base
    return (
        frame.width,
        frame.height,
        frame.format.name,
        int(frame.colorspace),
        int(frame.color_range),
        frame.time_base,
    )


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

    __slots__ = ("_built", "_facts", "_flushed", "_guard", "_inputs", "_outputs", "_wiring")

    def __init__(self, desc: str) -> None:
        self._wiring = wire(desc)
        self._inputs = make_ports(self._wiring, inputs=True)
        self._outputs = make_ports(self._wiring, inputs=False)
        if not self._inputs or not self._outputs:
            side = "output" if self._inputs else "input"
            raise FilterError(f"filter description {desc!r} has no {side}", filter_desc=desc)
        self._guard = OneThread("FilterGraph")
        self._facts: FrameMetadata | None = None
        self._built: BuiltGraph | None = None
        self._flushed = False
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
            frames: Pictures or sound, as the input takes. Not consumed.
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
            for frame in frames_of(frames, port, self._wiring.desc):
                self._check_format(port, frame)
                port.waiting.append(frame)
            self._facts = self._facts or frame_metadata(frames)
            self._run()

    def get_frames(self, *, key: str | None = None) -> VideoFrames | AudioFrames | None:
        """Take what an output has ready.

        Args:
            key: Which output, where there are several.

        Returns:
            The frames, pictures always as ``VideoFrames``; ``None``: nothing is ready.

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
            return wrap_frames(frames, port.kind, self._facts) if frames else None

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
                raise FilterError(
                    f"filter description {self._wiring.desc!r}: the inputs {empty} have had no frame",
                    filter_desc=self._wiring.desc,
                )
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
        raise FilterError(
            f"filter description {self._wiring.desc!r}: {asked}; its {side}s are "
            f"{', '.join(repr(port.key) for port in ports)}",
            filter_desc=self._wiring.desc,
        )

    def _check_format(self, port: Port, frame: AvFrame) -> None:
        given = describe_frame(frame)
        if port.format is None:
            port.format = given
            port.args = source_args(frame)
        elif not fits(port, frame, given):
            raise FilterError(
                f"filter description {self._wiring.desc!r}: the input {port.name} takes {port.format}, but "
                f"the frames are {given}",
                filter_desc=self._wiring.desc,
            )

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
