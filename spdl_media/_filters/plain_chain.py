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
keeps the scalers of the last 32 pairs of a size and a chain, and no more, however many targets and boxes
there are. 64 photographs of 5 sizes, cropped to 224x224, took 304 microseconds each, and 395 where one pair
was kept; at three targets in turn, 301 and 387. Keeping 64 pairs gained nothing there.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import av
from av.video.reformatter import Interpolation, VideoReformatter

from spdl_media._filters.cuts import INTERLEAVED, RGB, Cut, Size
from spdl_media._filters.steps import FULL_RANGE, GBR, HALF_CHROMA, Crop, Pad, Scale, Step
from spdl_media._graph_syntax import Node, parse_graph
from spdl_media.errors import FilterError, PictureSizeError

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
# Kernels that take single pixels of a large picture, and leave out those between. Of a smaller picture they
# would take others: on photographs at 224x224 that is up to 9 levels of 255 on average.
_OF_SINGLE_PIXELS = int(Interpolation.POINT | Interpolation.FAST_BILINEAR)
_PACKED_RGB = INTERLEAVED["gbrp"]
_FORMATS = RGB | {HALF_CHROMA}
# Formats in which borders are made and cut.
_MARGINS = _PACKED_RGB.union(INTERLEAVED)
# Sets of a thread, over all chains; a set has one scaler a step. One for photographs of 1920 pixels' width
# takes some 300 KiB.
_MAX_SCALERS = 32
# FFmpeg's av_image_check_size: 8 bytes a pixel, and a margin on both sides, are to be counted in an int.
_EDGE, _MAX_PIXELS = 128, 2**28


class PlainChain:
    """The steps of a chain that needs no graph.

    Attributes:
        cut: What is cut out before the steps, if anything.

    Thread safety: free to share; each thread has scalers of its own.
    """

    __slots__ = ("_pads_or_crops", "_steps", "_via_chroma", "cut")

    def __init__(self, steps: tuple[Step, ...]) -> None:
        self._steps = steps
        self.cut: Cut | None = None
        self._pads_or_crops = any(isinstance(step, Pad | Crop) for step in steps)
        self._via_chroma = any(
            isinstance(step, Scale) and step.pix_fmt == HALF_CHROMA for step in steps
        )

    def after(self, cut: Cut) -> PlainChain:
        """The same steps behind a cut."""
        chain = PlainChain(self._steps)
        chain.cut, chain._pads_or_crops = cut, True
        return chain

    def halves(self) -> tuple[PlainChain, PlainChain]:
        """The first step alone, and the others, without the cut."""
        return PlainChain(self._steps[:1]), PlainChain(self._steps[1:])

    def accepts(self, frame: av.VideoFrame) -> bool:
        """Whether the result for this frame is the graph's, bit for bit."""
        if not _same_without_graph(frame.format.name) or (
            self._pads_or_crops and carries_more(frame)
        ):
            return False
        if self._via_chroma and not _keeps_range(frame):
            return False
        if self.cut is not None and not self.cut.fits(frame):
            return False
        return self.sizes(frame.width, frame.height) is not None

    def sizes(self, width: int, height: int) -> list[Size] | None:
        """The size after each step, for a picture of this size before the cut; ``None``: one fails."""
        size = (width, height) if self.cut is None else self.cut.size(width, height)
        sizes = []
        for step in self._steps:
            after = step.size(*size)
            if after is None or 0 in after:
                return None
            size = after
            sizes.append(size)
        return sizes

    def __call__(self, frame: av.VideoFrame) -> av.VideoFrame:
        """Cut, and run the steps, on a frame that :meth:`accepts` accepted.

        The frame is given away: it can be the result, with colour facts written to it, and the scaler
        changes its fields meanwhile, so no other thread may see it.
        """
        sizes = self.sizes(frame.width, frame.height) or []
        if self.cut is not None:
            frame = self.cut.run(frame)
        if self._steps and self._changes_nothing(frame, sizes):
            frame.colorspace, frame.color_range = GBR, FULL_RANGE
            return frame
        return self.run(frame, sizes)

    def run(self, frame: av.VideoFrame, sizes: list[Size]) -> av.VideoFrame:
        """Run the steps alone, to sizes that :meth:`sizes` gave. The frame is given away, as in a call."""
        if not self._steps:
            return frame
        scalers = _scalers(self._steps, frame)
        for step, size, scaler in zip(self._steps, sizes, scalers, strict=True):
            try:
                frame = step.run(frame, size, scaler)
            except av.FFmpegError as error:
                raise _cannot_make(step, frame, size, error) from error
        return frame

    def _changes_nothing(self, frame: av.VideoFrame, sizes: list[Size]) -> bool:
        """Packed RGB of this size already: through planar RGB and back, it would come out as it is."""
        last = self._steps[-1]
        packed = isinstance(last, Scale) and last.pix_fmt == frame.format.name
        rewritten = self._pads_or_crops or self._via_chroma
        return packed and not rewritten and set(sizes) == {(frame.width, frame.height)}

    def from_rgb(self) -> PlainChain:
        """The chain for RGB pictures: for them, the way by half of the chroma is none that is quick."""
        return _without_chroma(self._steps) if self._via_chroma else self

    @property
    def scales_first(self) -> bool:
        """Whether the first step scales all pixels to a size, so that a picture small already will do."""
        first = self._steps[0] if self._steps else None
        if not isinstance(first, Scale) or first.width is None:
            return False
        return not first.flags & _OF_SINGLE_PIXELS


# Chains are many where targets vary, as in training at several scales, and boxes make sizes without end.
_kept = threading.local()


def _scalers(steps: tuple[Step, ...], frame: av.VideoFrame) -> list[VideoReformatter]:
    """This thread's scalers for such frames, one for each step.

    One that served two would make its tables anew at each change of format.
    """
    kept: dict[tuple[tuple[Step, ...], int, int, str], list[VideoReformatter]]
    kept = _kept.__dict__.setdefault("sets", {})
    key = (steps, frame.width, frame.height, frame.format.name)
    found = kept.pop(key, None) or [VideoReformatter() for _ in steps]
    kept[key] = found  # the last one, so that the first is the one not used for longest
    if len(kept) > _MAX_SCALERS:
        del kept[next(iter(kept))]
    return found


def _cannot_make(
    step: Step, frame: av.VideoFrame, size: Size, error: av.FFmpegError
) -> FilterError:
    made = f"a picture of {size[0]}x{size[1]} cannot be made of one of {frame.width}x{frame.height}"
    if _is_possible(*size):
        return PictureSizeError(f"{made}: {error.strerror}")
    asked = step.width or 0, step.height or 0
    # Of what was asked for as it is, no picture is to blame.
    kind = PictureSizeError if min(asked) < 1 or _is_possible(*asked) else FilterError
    return kind(
        f"{made}: FFmpeg takes pictures with (width + {_EDGE}) * (height + {_EDGE}) below {_MAX_PIXELS}, "
        "up to 16255x16255 for example. Give a smaller width= or height="
    )


def _is_possible(width: int, height: int) -> bool:
    return (width + _EDGE) * (height + _EDGE) < _MAX_PIXELS


@lru_cache(maxsize=64)
def _without_chroma(steps: tuple[Step, ...]) -> PlainChain:
    return PlainChain(
        tuple(
            replace(step, pix_fmt="gbrp")
            if isinstance(step, Scale) and step.pix_fmt == HALF_CHROMA
            else step
            for step in steps
        )
    )


def plain_chain(desc: str) -> PlainChain | None:
    """The plain chain that a description is, or ``None``: it takes a graph.

    Plain are ``null`` and what leads to 8-bit RGB: ``scale`` with literal numbers followed by
    ``format``, then ``pad`` and ``crop`` around the middle of RGB, and interleaving at the end;
    before them, what :func:`~spdl_media.crops.crop_filters` writes.
    Text that does not parse is not plain; the graph says what is wrong with it.
    """
    cut, _, rest = split_cut(desc)
    chain = _read_chain(rest)
    return chain if chain is None or cut is None else chain.after(cut)


def split_cut(desc: str) -> tuple[Cut | None, str, str]:
    """What a description first cuts out, as it is and as text, and the filters that follow.

    Boxes differ from picture to picture, and what follows does not: it is read once.
    """
    match = _CUT.match(desc) if desc.startswith(("crop=", "hflip,")) else None
    if match is None or not match.end():
        return None, "", desc
    box = (
        (int(match["x"]), int(match["y"]), int(match["w"]), int(match["h"])) if match["x"] else None
    )
    cut = Cut(box, mirror=match["mirror"] is not None)
    return cut, match[0].removesuffix(","), desc[match.end() :]


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


def _ends_in_half_chroma(steps: list[Step | None]) -> bool:
    """That is no way to RGB: such frames state more, such as where chroma stands."""
    last = steps[-1] if steps else None
    return isinstance(last, Scale) and last.pix_fmt == HALF_CHROMA


def _steps(nodes: list[Node]) -> Iterator[Step | None]:
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
        packed = _PACKED_RGB if pix_fmt == HALF_CHROMA else INTERLEAVED.get(pix_fmt, ())
        if node.name == "format" and node.args in packed:
            pix_fmt = node.args or ""
            yield Scale(None, None, "disable", int(Interpolation.BICUBIC), pix_fmt)
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


def _read_scale(args: str, pix_fmt: str) -> Scale | None:
    literal = _FITTED.sub(r"\1:\2:force_original_aspect_ratio=decrease", args)
    literal = _KEPT_HEIGHT.sub(r"\1:-1", _KEPT_WIDTH.sub(r"-1:\1", literal))
    scale = _read_literal_scale(literal, pix_fmt)
    return scale if scale is None or literal == args else replace(scale, least=1)


def _read_literal_scale(args: str, pix_fmt: str) -> Scale | None:
    sizes, options = _split(args)
    flags = _read_flags(options.pop("flags", ""))
    fit = options.pop("force_original_aspect_ratio", "disable")
    width = options.pop("w", options.pop("width", sizes[0] if sizes else ""))
    height = options.pop("h", options.pop("height", sizes[1] if len(sizes) > 1 else ""))
    known = fit in ("disable", "decrease", "increase") and not options and len(sizes) in (0, 2)
    if not known or flags is None or pix_fmt not in _FORMATS:
        return None
    if not width and not height:
        return Scale(None, None, "disable", flags, pix_fmt)
    if not (_is_side(width) and _is_side(height)) or (width == height == "-1"):
        return None
    if fit != "disable" and "-1" in (width, height):
        return None
    return Scale(int(width), int(height), fit, flags, pix_fmt)


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


def _read_pad(args: str) -> Pad | None:
    match = _PAD.fullmatch(args)
    return Pad(int(match[1]), int(match[2])) if match else None


def _read_crop(args: str) -> Crop | None:
    match = _CROP.fullmatch(args)
    return Crop(int(match[1]), int(match[2])) if match else None


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
    return name in RGB or (name.startswith("yuvj") and frame.color_range == FULL_RANGE)


def carries_more(frame: av.VideoFrame) -> bool:
    """Whether a frame carries what PyAV cannot write into a new one: its damage and its metadata."""
    try:
        return frame.is_corrupt or bool(frame.metadata)
    except UnicodeDecodeError:
        return True
