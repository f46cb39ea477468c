"""Plain chains of scale, pad, crop and format, run over stills without a graph.

A graph is made anew for each still, because each has its own size. What the builders in ``filter_desc`` write
for RGB needs none: the scaler is called directly, and borders are cut and made in planar RGB, where each
plane is an array of bytes. The result equals the graph's, bit for bit.

Microseconds for a JPEG of 500x375 (of 1920x1280), decoding not counted:

    224x224 rgb24, bicubic        graph 470 (1970)    plain chain 290 (1680)
    the same, padded              graph 480 (1920)    plain chain 290 (1610)
    the same, area, padded        graph 340 (990)     plain chain 165 (690)
    FFmpeg's own one step         graph 610 (2290)

The tables of a scaler depend on the picture's size, and making them takes a third of its time. So a thread
keeps a few scalers, one for each size that it has seen: 64 photographs of 10 sizes took 238 instead of 343.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeAlias

import av
import numpy as np
from av.video.reformatter import Interpolation, VideoReformatter

from spdl_media._filters.graph_syntax import Node, parse_graph
from spdl_media.errors import FilterError
from spdl_media.planes import picture_planes

Size: TypeAlias = tuple[int, int]

_FLAGS = {
    "fast_bilinear": Interpolation.FAST_BILINEAR,
    "bilinear": Interpolation.BILINEAR,
    "bicubic": Interpolation.BICUBIC,
    "neighbor": Interpolation.POINT,
    "area": Interpolation.AREA,
    "bicublin": Interpolation.BICUBLIN,
    "gauss": Interpolation.GAUSS,
    "sinc": Interpolation.SINC,
    "lanczos": Interpolation.LANCZOS,
    "spline": Interpolation.SPLINE,
    "accurate_rnd": Interpolation.ACCURATE_RND,
    "full_chroma_int": Interpolation.FULL_CHR_H_INT,
    "full_chroma_inp": Interpolation.FULL_CHR_H_INP,
}
_INTERLEAVED = {
    "gbrp": frozenset(("rgb24", "bgr24")),
    "gbrap": frozenset(("rgba", "bgra", "argb", "abgr")),
}
# The quick way: chroma keeps half of its width and height until RGB is made.
_HALF_CHROMA = "yuv420p"
_PACKED_RGB = frozenset(("rgb24", "bgr24"))
_RGB = frozenset(_INTERLEAVED).union(*_INTERLEAVED.values())
_FORMATS = _RGB | {_HALF_CHROMA}
# Formats in which borders are made and cut.
_MARGINS = _PACKED_RGB.union(_INTERLEAVED)
# Formats of 8 bits that are cut and mirrored here.
_CUTTABLE = _RGB.union("gray yuv444p yuvj444p yuvj440p yuvj422p yuvj420p".split())
# Scalers of a thread for one chain. One for photographs of 1920 pixels' width takes some 300 KiB.
_MAX_SIZES = 16
_GBR, _FULL_RANGE, _OPAQUE = 0, 2, 255
_UNKNOWN_MATRIX, _UNKNOWN_RANGE = 2, 0


@dataclass(frozen=True, slots=True)
class _Scale:
    """Scale to a size, and convert.

    ``fit`` is how the aspect ratio is kept: decrease, increase, disable. ``least`` is what a side is at
    least; 0 is FFmpeg's own way, which then fails.
    """

    width: int | None
    height: int | None
    fit: str
    flags: int
    pix_fmt: str
    least: int = 0

    def size(self, width: int, height: int) -> Size | None:
        if self.width is None or self.height is None:
            return width, height
        if self.width < 0 or self.height < 0:
            return (
                self._keep(self.height, width, height) if self.width < 0 else self.width,
                self._keep(self.width, height, width) if self.height < 0 else self.height,
            )
        if self.fit == "disable":
            return self.width, self.height
        choose = min if self.fit == "decrease" else max
        return (
            choose(self.width, self._keep(self.height, width, height)),
            choose(self.height, self._keep(self.width, height, width)),
        )

    def _keep(self, value: int, times: int, by: int) -> int:
        return max(self.least, _rescale(value, times, by))

    def run(self, frame: av.VideoFrame, reformatter: VideoReformatter) -> av.VideoFrame:
        width, height = self.size(frame.width, frame.height) or (0, 0)
        tags = self._tags(frame)
        result = reformatter.reformat(
            frame, width, height, self.pix_fmt, interpolation=self.flags, threads=1
        )
        if result is not frame:
            result.colorspace, result.color_range = tags
        return result

    def _tags(self, frame: av.VideoFrame) -> tuple[int, int]:
        """Matrix and range of the result, as a graph states them."""
        if self.pix_fmt != _HALF_CHROMA:
            return _GBR, _FULL_RANGE
        if frame.format.name in _RGB:
            return _UNKNOWN_MATRIX, _UNKNOWN_RANGE
        return int(frame.colorspace), int(frame.color_range)


@dataclass(frozen=True, slots=True)
class _Pad:
    """A black border around the middle, in RGB."""

    width: int
    height: int

    def size(self, width: int, height: int) -> Size | None:
        fits = width <= self.width and height <= self.height
        return (self.width, self.height) if fits else None

    def run(self, frame: av.VideoFrame, _: VideoReformatter) -> av.VideoFrame:
        if (frame.width, frame.height) == (self.width, self.height):
            return frame
        left, top = (self.width - frame.width) // 2, (self.height - frame.height) // 2
        result = _like(frame, self.width, self.height)
        for index, (target, source) in enumerate(zip(_planes(result), _planes(frame), strict=True)):
            target[:] = _OPAQUE if index == 3 else 0
            target[top : top + frame.height, left : left + frame.width] = source
        return result


@dataclass(frozen=True, slots=True)
class _Crop:
    """The middle of a picture in RGB."""

    width: int
    height: int

    def size(self, width: int, height: int) -> Size | None:
        fits = width >= self.width and height >= self.height
        return (self.width, self.height) if fits else None

    def run(self, frame: av.VideoFrame, _: VideoReformatter) -> av.VideoFrame:
        if (frame.width, frame.height) == (self.width, self.height):
            return frame
        # FFmpeg rounds halves to the even number, as Python's round does.
        left, top = round((frame.width - self.width) / 2), round((frame.height - self.height) / 2)
        result = _like(frame, self.width, self.height)
        for target, source in zip(_planes(result), _planes(frame), strict=True):
            target[:] = source[top : top + self.height, left : left + self.width]
        return result


@dataclass(frozen=True, slots=True)
class _Cut:
    """A box of the decoded picture, then left and right exchanged, in one copy.

    Chroma begins with the sample that the box's corner lies in, as in FFmpeg's crop with ``exact=1``.
    """

    box: tuple[int, int, int, int] | None
    mirror: bool

    def fits(self, frame: av.VideoFrame) -> bool:
        if frame.format.name not in _CUTTABLE:
            return False
        x, y, width, height = self.box or (0, 0, 1, 1)
        return x + width <= frame.width and y + height <= frame.height

    def run(self, frame: av.VideoFrame) -> av.VideoFrame:
        x, y, width, height = self.box or (0, 0, frame.width, frame.height)
        result = _like(frame, width, height)
        targets = _planes(result)
        for index, (target, source) in enumerate(zip(targets, picture_planes(frame), strict=True)):
            across, down = _chroma_steps(frame.format.name) if index in (1, 2) else (1, 1)
            left, top = x // across, y // down
            part = source[top : top + target.shape[0], left : left + target.shape[1]]
            target[:] = part[:, ::-1] if self.mirror else part
        return result


_Step: TypeAlias = _Scale | _Pad | _Crop


class PlainChain:
    """The steps of a chain that needs no graph.

    Thread safety: free to share; each thread has scalers of its own.
    """

    __slots__ = ("_cut", "_local", "_pads_or_crops", "_steps", "_via_chroma")

    def __init__(self, steps: tuple[_Step, ...]) -> None:
        self._steps = steps
        self._cut: _Cut | None = None
        self._pads_or_crops = any(isinstance(step, _Pad | _Crop) for step in steps)
        self._via_chroma = any(
            isinstance(step, _Scale) and step.pix_fmt == _HALF_CHROMA for step in steps
        )
        self._local = threading.local()

    def after(self, cut: _Cut) -> PlainChain:
        """The same steps behind a cut, with the same scalers."""
        chain = PlainChain(self._steps)
        chain._cut, chain._pads_or_crops, chain._local = cut, True, self._local
        return chain

    def accepts(self, frame: av.VideoFrame) -> bool:
        """Whether the result for this frame is the graph's, bit for bit."""
        if not _same_without_graph(frame.format.name) or (
            self._pads_or_crops and _carries_more(frame)
        ):
            return False
        if self._via_chroma and not _keeps_range(frame):
            return False
        if self._cut is not None and not self._cut.fits(frame):
            return False
        box = None if self._cut is None else self._cut.box
        size = (frame.width, frame.height) if box is None else box[2:]
        for step in self._steps:
            after = step.size(*size)
            if after is None or 0 in after:
                return False
            size = after
        return True

    def __call__(self, frame: av.VideoFrame) -> av.VideoFrame:
        """Run the steps.

        The frame is given away: it can be the result, with colour facts written to it, and the scaler
        changes its fields meanwhile, so no other thread may see it.
        """
        if self._cut is not None:
            frame = self._cut.run(frame)
        if not self._steps:
            return frame
        if self._changes_nothing(frame):
            frame.colorspace, frame.color_range = _GBR, _FULL_RANGE
            return frame
        for step, reformatter in zip(self._steps, self._reformatters(frame), strict=True):
            frame = step.run(frame, reformatter)
        return frame

    def _changes_nothing(self, frame: av.VideoFrame) -> bool:
        """Packed RGB of this size already: through planar RGB and back, it would come out as it is."""
        last = self._steps[-1]
        packed = isinstance(last, _Scale) and last.pix_fmt == frame.format.name
        sides = frame.width, frame.height
        rewritten = self._pads_or_crops or self._via_chroma
        return packed and not rewritten and all(step.size(*sides) == sides for step in self._steps)

    def _reformatters(self, frame: av.VideoFrame) -> list[VideoReformatter]:
        # One for each step: one that serves two rebuilds its tables at each change of format.
        kept: dict[tuple[int, int, str], list[VideoReformatter]] | None
        kept = getattr(self._local, "kept", None)
        if kept is None:
            kept = self._local.kept = {}
        key = (frame.width, frame.height, frame.format.name)
        found = kept.pop(key, None) or [VideoReformatter() for _ in self._steps]
        kept[key] = found  # the last one, so that the first is the one not used for longest
        if len(kept) > _MAX_SIZES:
            del kept[next(iter(kept))]
        return found


def plain_chain(desc: str) -> PlainChain | None:
    """The plain chain that a description is, or ``None``: it takes a graph.

    Plain are ``null`` and what leads to 8-bit RGB: ``scale`` with literal numbers followed by
    ``format``, then ``pad`` and ``crop`` around the middle of RGB, and interleaving at the end;
    before them, what :func:`~spdl_media.crops.crop_filters` writes.
    Text that does not parse is not plain; the graph says what is wrong with it.
    """
    # Boxes differ from picture to picture, and what follows does not: it is read once.
    match = _CUT.match(desc)
    if match is None or not match.end():
        return _read_chain(desc)
    chain = _read_chain(desc[match.end() :])
    if chain is None:
        return None
    box = (
        (int(match["x"]), int(match["y"]), int(match["w"]), int(match["h"])) if match["x"] else None
    )
    return chain.after(_Cut(box, mirror=match["mirror"] is not None))


@lru_cache(maxsize=512)
def _read_chain(desc: str) -> PlainChain | None:
    try:
        graph = parse_graph(desc)
    except FilterError:
        return None
    if len(graph.chains) != 1:
        return None
    nodes = [node for node in graph.chains[0] if node != Node("null")]
    if any(node.id or node.inputs or node.outputs for node in nodes):
        return None
    steps = list(_steps(nodes))
    if not all(steps) or _ends_in_half_chroma(steps):
        return None
    return PlainChain(tuple(step for step in steps if step))


def _ends_in_half_chroma(steps: list[_Step | None]) -> bool:
    """That is no way to RGB: such frames state more, such as where chroma stands."""
    last = steps[-1] if steps else None
    return isinstance(last, _Scale) and last.pix_fmt == _HALF_CHROMA


def _steps(nodes: list[Node]) -> Iterator[_Step | None]:
    """The steps in turn; ``None`` where one is not plain."""
    pix_fmt, position = "", 0
    while position < len(nodes):
        node = nodes[position]
        follower = nodes[position + 1] if position + 1 < len(nodes) else None
        if node.name == "scale" and follower and follower.name == "format":
            pix_fmt = follower.args or ""
            yield _read_scale(node.args or "", pix_fmt)
            position += 2
            continue
        packed = _PACKED_RGB if pix_fmt == _HALF_CHROMA else _INTERLEAVED.get(pix_fmt, ())
        if node.name == "format" and node.args in packed:
            pix_fmt = node.args or ""
            yield _Scale(None, None, "disable", int(Interpolation.BICUBIC), pix_fmt)
        elif node.name == "pad" and pix_fmt in _MARGINS:
            yield _read_pad(node.args or "")
        elif node.name == "crop" and pix_fmt in _MARGINS:
            yield _read_crop(node.args or "")
        elif node.name != "format" or node.args != pix_fmt:
            yield None
        position += 1


# What the builders write to keep the aspect ratio of thin pictures as well.
_FITTED = re.compile(
    r"max\(1,min\((\d+),round\((\d+)\*iw/ih\)\)\):max\(1,min\(\2,round\(\1\*ih/iw\)\)\)(?=:|$)"
)
_KEPT_WIDTH = re.compile(r"max\(1,round\((\d+)\*iw/ih\)\):\1(?=:|$)")
_KEPT_HEIGHT = re.compile(r"(\d+):max\(1,round\(\1\*ih/iw\)\)(?=:|$)")


def _read_scale(args: str, pix_fmt: str) -> _Scale | None:
    literal = _FITTED.sub(r"\1:\2:force_original_aspect_ratio=decrease", args)
    literal = _KEPT_HEIGHT.sub(r"\1:-1", _KEPT_WIDTH.sub(r"-1:\1", literal))
    scale = _read_literal_scale(literal, pix_fmt)
    return scale if scale is None or literal == args else replace(scale, least=1)


def _read_literal_scale(args: str, pix_fmt: str) -> _Scale | None:
    sizes, options = _split(args)
    flags = _read_flags(options.pop("flags", ""))
    fit = options.pop("force_original_aspect_ratio", "disable")
    width = options.pop("w", options.pop("width", sizes[0] if sizes else ""))
    height = options.pop("h", options.pop("height", sizes[1] if len(sizes) > 1 else ""))
    known = fit in ("disable", "decrease", "increase") and not options and len(sizes) in (0, 2)
    if not known or flags is None or pix_fmt not in _FORMATS:
        return None
    if not width and not height:
        return _Scale(None, None, "disable", flags, pix_fmt)
    if not (_is_side(width) and _is_side(height)) or (width == height == "-1"):
        return None
    if fit != "disable" and "-1" in (width, height):
        return None
    return _Scale(int(width), int(height), fit, flags, pix_fmt)


def _is_side(text: str) -> bool:
    return text == "-1" or re.fullmatch(r"[1-9][0-9]{0,5}", text) is not None


def _read_flags(text: str) -> int | None:
    flags = 0
    for name in text.split("+"):
        if name not in _FLAGS:
            return None
        flags |= int(_FLAGS[name])
    return flags


_PAD = re.compile(
    r"([1-9]\d{0,5}):([1-9]\d{0,5}):(?:\(\1-iw\)/2:\(\2-ih\)/2|-1:-1)(?::color=black)?"
)
_CROP = re.compile(r"([1-9]\d{0,5}):([1-9]\d{0,5})")
# What ``crops.crop_filters`` writes; the condition is that the box lies inside.
_CUT = re.compile(
    r"(?:crop='if\(gt\((?P<x>\d{1,6})\+(?P<w>\d{1,6}),iw\),0,(?P=w)\)':"
    r"'if\(gt\((?P<y>\d{1,6})\+(?P<h>\d{1,6}),ih\),0,(?P=h)\)':(?P=x):(?P=y):exact=1,)?"
    r"(?P<mirror>hflip,)?"
)


def _read_pad(args: str) -> _Pad | None:
    match = _PAD.fullmatch(args)
    return _Pad(int(match[1]), int(match[2])) if match else None


def _read_crop(args: str) -> _Crop | None:
    match = _CROP.fullmatch(args)
    return _Crop(int(match[1]), int(match[2])) if match else None


def _split(args: str) -> tuple[list[str], dict[str, str]]:
    """Positional and named options."""
    positional, named = [], {}
    for part in args.split(":") if args else ():
        name, equals, value = part.partition("=")
        if equals:
            named[name] = value
        else:
            positional.append(part)
    return positional, named


@lru_cache(maxsize=256)
def _same_without_graph(pix_fmt: str) -> bool:
    """Whether the scaler gives the same alone and in a graph.

    Where chroma has its own size, the scale filter reads from the frame where the samples stand, and the
    scaler alone does not: decoded video differs by up to 23 levels. Full-range JPEG formats say nothing
    of it, and the others have no such chroma. ``tests/test_fastpath_equivalence.py`` tries each.
    """
    if pix_fmt.startswith("yuvj"):
        return True
    format = av.VideoFormat(pix_fmt, 16, 16)
    return format.chroma_width() == 16 and format.chroma_height() == 16


def _keeps_range(frame: av.VideoFrame) -> bool:
    """Whether the range stays as it is in ``yuv420p``, alone and in a graph."""
    name = frame.format.name
    return name in _RGB or (name.startswith("yuvj") and frame.color_range == _FULL_RANGE)


@lru_cache(maxsize=64)
def _chroma_steps(pix_fmt: str) -> Size:
    """Pixels across and down for which there is one sample of chroma."""
    format = av.VideoFormat(pix_fmt, 16, 16)
    return 16 // format.chroma_width(), 16 // format.chroma_height()


def _carries_more(frame: av.VideoFrame) -> bool:
    """Whether a frame carries what PyAV cannot write into a new one: its damage and its metadata."""
    try:
        return frame.is_corrupt or bool(frame.metadata)
    except UnicodeDecodeError:
        return True


def _rescale(value: int, times: int, by: int) -> int:
    """As FFmpeg's ``av_rescale``: rounded to the nearest, halves up."""
    return (value * times + by // 2) // by


def _like(frame: av.VideoFrame, width: int, height: int) -> av.VideoFrame:
    result = av.VideoFrame(width, height, frame.format.name)
    result.pts, result.dts = frame.pts, frame.dts
    if frame.time_base:
        result.time_base = frame.time_base
    result.duration = frame.duration
    result.colorspace, result.color_range = frame.colorspace, frame.color_range
    result.color_primaries, result.color_trc = frame.color_primaries, frame.color_trc
    return result


def _planes(frame: av.VideoFrame) -> Iterator[np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]:
    """The planes of an 8-bit format made here, rows without padding; packed ones as (H, W, C)."""
    planes = frame.planes
    channels = len(frame.format.components) if len(planes) == 1 else 1
    for plane in planes:
        memory: Any = plane  # a buffer, which PyAV's stubs do not say
        rows = np.frombuffer(memory, np.uint8).reshape(plane.height, plane.line_size)
        view = rows[:, : plane.width * channels]
        yield view if channels == 1 else view.reshape(plane.height, plane.width, channels)
