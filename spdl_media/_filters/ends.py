"""The ends of a filter graph: where our frames enter, and where they leave."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import av
import numpy as np
from av.filter.context import FilterContext

from spdl_media._ffmpeg import as_fraction
from spdl_media._filters.wiring import SINKS, SOURCES, AvFrame, Kind, Wiring
from spdl_media.errors import FilterError
from spdl_media.frames import (
    AudioChunk,
    AudioFrames,
    FrameMetadata,
    Frames,
    ImageFrames,
    VideoFrames,
    av_frames,
    frame_metadata,
)
from spdl_media.timing import nearest_sample


class Port:
    """An end of a graph: where frames enter or leave.

    Attributes:
        node: Position among the filters of the one that is the end, or that an open end belongs to.
        kind: What flows there.
        name: What messages call it.
        key: What callers call it.
        declared: Whether the text has a node for it; otherwise it is left open.
        options: What that node says of the frames, by FFmpeg's names.
        format: The same in words, or that of the first frame of an open end; ``None``: not yet known.
        time_base: The unit of time that the frames have, if known; sound is brought to it.
        args: Arguments of the source that feeds an open input, once its first frame has come.
        waiting: Frames that came before the graph could be made.
    """

    def __init__(
        self, node: int, kind: Kind, name: str, key: str, *, options: dict[str, str] | None
    ) -> None:
        self.node = node
        self.kind = kind
        self.name = name
        self.key = key
        self.declared = options is not None
        self.options = options or {}
        self.format = _declared_format(self.options)
        self.time_base = _declared_time_base(self.options)
        self.args = ""
        self.waiting: deque[AvFrame] = deque()


def make_ports(wiring: Wiring, *, inputs: bool) -> list[Port]:
    """The ends on one side, declared ones first, as :class:`BuiltGraph` has them."""
    kinds = SOURCES if inputs else SINKS
    declared = [
        Port(
            position,
            kinds[node.name],
            f"{node.name}@{node.id}" if node.id else node.name,
            node.id or "",
            options=_options(node.args or ""),
        )
        for position, node in enumerate(wiring.nodes)
        if node.name in kinds
    ]
    pads = wiring.inputs if inputs else wiring.outputs
    side = "in" if inputs else "out"
    unnamed = [pad for pad in pads if not pad.label]
    # One without a label needs no name; of several, each must be reachable.
    numbers = {id(pad): str(number) for number, pad in enumerate(unnamed)} if unnamed[1:] else {}
    return declared + [
        Port(
            pad.node,
            pad.kind,
            pad.label or side + numbers.get(id(pad), ""),
            pad.label or (side + numbers[id(pad)] if numbers else ""),
            options=None,
        )
        for pad in pads
    ]


def _options(args: str) -> dict[str, str]:
    pairs = (part.partition("=") for part in args.split(":"))
    return {name.strip(): value.strip() for name, equals, value in pairs if equals}


def _declared_format(options: dict[str, str]) -> str | None:
    size = options.get("video_size")
    if size is None and "width" in options and "height" in options:
        size = f"{options['width']}x{options['height']}"
    parts = (size, options.get("pix_fmt"), options.get("sample_fmt"), options.get("channel_layout"))
    rate = options.get("sample_rate")
    return " ".join(filter(None, (*parts, f"{rate} Hz" if rate else None))) or None


def fits(port: Port, frame: AvFrame, given: str) -> bool:
    """Whether an input takes a frame, which is ``given`` in words."""
    if not port.declared:
        return given == port.format
    # Only words that both sides say are compared: a declaration may leave some out, or give numbers.
    if isinstance(frame, av.AudioFrame):
        said = {
            "sample_rate": str(frame.sample_rate),
            "sample_fmt": frame.format.name,
            "channel_layout": frame.layout.name,
        }
    else:
        said = {
            "video_size": f"{frame.width}x{frame.height}",
            "width": str(frame.width),
            "height": str(frame.height),
            "pix_fmt": frame.format.name,
        }
    declared = port.time_base
    if declared is not None and frame.time_base and declared != as_fraction(frame.time_base):
        return False
    return all(port.options.get(name, value) == value for name, value in said.items())


def _declared_time_base(options: dict[str, str]) -> Fraction | None:
    try:
        return Fraction(options["time_base"]) if "time_base" in options else None
    except ValueError:  # an expression, which FFmpeg evaluates
        return None


def frames_of(frames: Frames, port: Port, desc: str) -> Iterator[AvFrame]:
    """FFmpeg's frames behind ours, if they are of the kind that the input takes."""
    kind = "audio" if isinstance(frames, AudioFrames) else "video"
    if not isinstance(frames, AudioFrames | VideoFrames | ImageFrames):
        raise TypeError(f"frames must be AudioFrames, VideoFrames or ImageFrames, not {frames!r}")
    if kind != port.kind:
        raise FilterError(
            f"filter description {desc!r}: the input {port.name} takes {port.kind}, but the frames are "
            f"{kind}",
            filter_desc=desc,
        )
    if isinstance(frames, AudioFrames):
        return _shared_frames(frames, port)
    return iter(av_frames(frames))


def sample_time_base(sample_rate: int, zero: Fraction) -> Fraction:
    """The unit of time in which each sample of the container's clock stands at a whole number.

    Files count in units of their own, in Matroska in milliseconds, and what filters give would stand at
    such a place. Where there is none that FFmpeg can count in, one sample is the unit.
    """
    unit = math.lcm(sample_rate, zero.denominator)
    return Fraction(1, unit if unit < 2**31 else sample_rate)


def place_frame(frame: av.AudioFrame, pts: int | None, time_base: Fraction) -> None:
    """Let a frame begin there."""
    frame.time_base = time_base
    frame.pts = pts


def exact_pts(chunk: AudioChunk, time_base: Fraction, zero: Fraction) -> int | None:
    """Where the chunk begins on the stream's own clock, in this unit, rounded; ``None``: no one knows."""
    frame, rate = chunk.frame, chunk.frame.sample_rate
    # In whole numbers: fractions would take longer than small frames take to filter.
    if chunk.position is not None:
        ticks = chunk.position * zero.denominator + zero.numerator * rate
        unit = zero.denominator * rate
    elif frame.pts is not None:
        base = as_fraction(frame.time_base) or Fraction(1, rate)
        ticks = frame.pts * base.numerator * rate + chunk.start * base.denominator
        unit = base.denominator * rate
    else:
        return None
    divisor = unit * time_base.numerator
    return (2 * ticks * time_base.denominator + divisor) // (2 * divisor)


def whole_frame(chunk: AudioChunk) -> av.AudioFrame:
    """The chunk as a frame that is not shared, unless it is the whole one: filters take whole frames."""
    return chunk.frame if len(chunk) == chunk.frame.samples else _copy(chunk)


def _copy(chunk: AudioChunk) -> av.AudioFrame:
    whole = chunk.frame
    part = av.AudioFrame(whole.format.name, whole.layout.name, len(chunk))
    part.sample_rate = whole.sample_rate
    for plane, samples in zip(part.planes, chunk.planes, strict=True):
        target = np.frombuffer(memoryview(plane), samples.dtype, samples.size)
        target[:] = samples.reshape(-1)
    return part


def _shared_frames(frames: AudioFrames, port: Port) -> Iterator[av.AudioFrame]:
    """FFmpeg's frames in the port's unit of time. They are others' too, so those that differ are copied."""
    zero = frame_metadata(frames).zero
    for chunk in frames.chunks:
        frame = whole_frame(chunk)
        time_base = _time_base_at(port, chunk.frame, zero)
        pts = exact_pts(chunk, time_base, zero)
        if frame is chunk.frame and (pts, time_base) != (frame.pts, _time_base_of(frame)):
            frame = _copy(chunk)
        if frame is not chunk.frame:
            place_frame(frame, pts, time_base)
        yield frame


def _time_base_at(port: Port, frame: av.AudioFrame, zero: Fraction) -> Fraction:
    """The unit of time that an input takes sound in."""
    if port.time_base is None and "time_base" in port.options:
        return _time_base_of(frame)  # an expression, which FFmpeg evaluates
    if port.time_base is None:
        rate = frame.sample_rate
        # FFmpeg's own, if the text says none.
        port.time_base = Fraction(1, rate) if port.declared else sample_time_base(rate, zero)
    return port.time_base


def _time_base_of(frame: av.AudioFrame) -> Fraction:
    return as_fraction(frame.time_base) or Fraction(1, frame.sample_rate)


def wrap_frames(
    frames: list[Any], kind: Kind, facts: FrameMetadata | None
) -> VideoFrames | AudioFrames:
    """Our frames around those that came out."""
    facts = facts or FrameMetadata()
    if kind == "video":
        return VideoFrames(frames, facts)
    chunks = [placed_chunk(frame, facts.zero) for frame in frames]
    return AudioFrames(chunks, facts, first_sample=chunks[0].position or 0)


def placed_chunk(frame: av.AudioFrame, zero: Fraction) -> AudioChunk:
    """A frame that came out of a filter, with its place on the container's clock."""
    base = frame.time_base or Fraction(1, frame.sample_rate)
    position = nearest_sample(frame.pts or 0, base, zero, frame.sample_rate)
    return AudioChunk(frame, 0, frame.samples, position)


def pull_all(sink: FilterContext) -> tuple[list[Any], bool]:
    """All frames that a sink has ready, and whether it has ended."""
    frames: list[Any] = []
    while True:
        try:
            frames.append(sink.pull())
        except av.BlockingIOError:
            return frames, False
        except av.EOFError:
            return frames, True


def push_frame(source: FilterContext, frame: AvFrame | None) -> bool:
    """Put a frame in; False: the filters have ended and take no more."""
    try:
        source.push(frame)
    except av.EOFError:
        return False
    return True
