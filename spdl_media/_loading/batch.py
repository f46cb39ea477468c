"""Many pictures into one array, and what becomes of those that cannot be loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from spdl_media._decoding.defaults import Default
from spdl_media._loading.options import PictureOptions
from spdl_media._loading.pictures import CropPlan, decode_picture
from spdl_media.buffer import CPUBuffer, Failure
from spdl_media.config import DecodeConfig, DemuxConfig
from spdl_media.convert import convert_array, convert_frames
from spdl_media.errors import (
    ConvertError,
    DecodeError,
    DemuxError,
    MediaError,
    SourceError,
    with_message,
)
from spdl_media.frames import ImageFrames
from spdl_media.inputs import Source
from spdl_media.layouts import pixel_layout
from spdl_media.storage import Storage

OnError: TypeAlias = Literal["raise", "skip", "fill"]
ArrayLayout: TypeAlias = Literal["NCHW", "NHWC"]
Shape: TypeAlias = tuple[int, ...]

_MAX_LISTED = 5

# What is the matter with one input, and not with how all of them are to be loaded.
_OF_ONE_INPUT = (SourceError, DemuxError, DecodeError, ConvertError)


class Stopped(Exception):  # noqa: N818  # not an error: whoever asked for it knows
    """Nobody waits for the batch any longer."""


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of each row of a batch before anything is decoded."""

    width: int
    height: int
    pix_fmt: str


@dataclass(slots=True)
class Outcome:
    """Pictures decoded so far, by position, and those that failed."""

    frames: dict[int, ImageFrames] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)


def check_on_error(on_error: str) -> None:
    if on_error not in get_args(OnError):
        raise ValueError(f"on_error must be 'raise', 'skip' or 'fill', not {on_error!r}")


def check_array_layout(layout: str | None) -> None:
    if layout not in (*get_args(ArrayLayout), None):
        raise ValueError(
            f"layout must be 'NCHW', 'NHWC' or None, not {layout!r}. convert_frames(layout='planes') gives "
            "one array a plane"
        )


def image_batch_steps(
    srcs: Iterable[Source],
    options: PictureOptions,
    filter_desc: str | Default | None,
    cuts: CropPlan,
    demux_config: DemuxConfig | None,
    decode_config: DecodeConfig | None,
    storage: Storage | None,
    layout: ArrayLayout | None,
    on_error: OnError,
) -> Callable[[Callable[[], bool]], CPUBuffer]:
    """Check the arguments, and give what loads the batch; it asks before each picture whether to stop."""
    check_on_error(on_error)
    check_array_layout(layout)
    desc = options.desc(filter_desc)
    if isinstance(srcs, str | bytes | bytearray | memoryview):
        raise TypeError(
            f"load_image_batch takes a sequence of sources, not one of {type(srcs).__name__}; load_image "
            "takes one"
        )
    inputs = list(srcs)
    if not inputs:
        raise ConvertError("there are no inputs to load: the sequence is empty")
    cuts.check(len(inputs))
    decode = partial(
        decode_picture, desc=desc, cuts=cuts, demux_config=demux_config, decode_config=decode_config
    )

    def run(stopped: Callable[[], bool]) -> CPUBuffer:
        outcome = decode_each(inputs, decode, on_error=on_error, stopped=stopped)
        known = _known(options)
        return to_batch(
            outcome, len(inputs), known, storage=storage, layout=layout, fill=on_error == "fill"
        )

    return run


def _known(options: PictureOptions) -> Known | None:
    if options.width is None or options.height is None or options.pix_fmt is None:
        return None
    return Known(options.width, options.height, options.pix_fmt)


def decode_each(
    srcs: Sequence[Any],
    decode: Callable[[Any, int], ImageFrames],
    *,
    on_error: OnError,
    stopped: Callable[[], bool],
) -> Outcome:
    """Decode one input after the other.

    Args:
        srcs: The inputs.
        decode: Gives the picture of an input at a position.
        on_error: With ``"raise"``, the first failure is raised, and names the input and its position.
        stopped: Asked before each input; decoding ends with :class:`Stopped` when it says so.
    """
    outcome = Outcome()
    for position, src in enumerate(srcs):
        if stopped():
            raise Stopped
        try:
            outcome.frames[position] = decode(src, position)
        except _OF_ONE_INPUT as error:
            if on_error == "raise":
                raise _placed(error, position, len(srcs)) from error
            outcome.failures.append(
                Failure(position, error.source or type(src).__name__, _without_tracebacks(error))
            )
        except (MediaError, TypeError, ValueError) as error:
            raise _placed(error, position, len(srcs)) from error
    return outcome


def _placed(error: Exception, position: int, count: int) -> Exception:
    """The same kind of error, with the position of its input in the message."""
    text = f"input {position} of the batch of {count}: {error.args[0] if error.args else error}"
    if isinstance(error, MediaError):
        return with_message(error, text)
    # Subclasses may want other arguments.
    return TypeError(text) if isinstance(error, TypeError) else ValueError(text)


def _without_tracebacks(error: MediaError) -> MediaError:
    """The error, without what its tracebacks hold: inputs, packets and frames."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error


def to_batch(
    outcome: Outcome,
    count: int,
    known: Known | None,
    *,
    storage: Storage | None,
    layout: ArrayLayout | None,
    fill: bool,
) -> CPUBuffer:
    """Copy the pictures into one array; with ``fill``, zeros stand where there is none."""
    failures = tuple(outcome.failures)
    if not outcome.frames:
        if known is None or not fill:
            raise _none_loaded(failures, count, fill=fill)
        buffer = _zeros((count, *_shape(known, layout)), _dtype(known), storage)
    else:
        _check_sizes(outcome.frames)
        # Something has to stand where zeros go until they are written.
        stand_in = next(iter(outcome.frames.values()))
        rows = range(count) if fill else sorted(outcome.frames)
        frames = [outcome.frames.get(position, stand_in) for position in rows]
        buffer = convert_frames(frames, storage, layout=layout)
        if fill and failures:
            buffer.array[[failure.index for failure in failures]] = 0
    buffer.failures = failures
    buffer.indices = tuple(range(count)) if fill else tuple(sorted(outcome.frames))
    return buffer


def _none_loaded(failures: tuple[Failure, ...], count: int, *, fill: bool) -> ConvertError:
    listed = "; ".join(f"input {f.index}: {f.error}" for f in failures[:_MAX_LISTED])
    more = f"; and {count - _MAX_LISTED} more" if count > _MAX_LISTED else ""
    remedy = (
        " on_error='fill' can make zeros of them where width=, height= and pix_fmt= say the size."
        if fill
        else ""
    )
    error = ConvertError(f"none of the {count} inputs could be loaded.{remedy} {listed}{more}")
    error.__cause__ = failures[0].error
    return error


def _check_sizes(frames: dict[int, ImageFrames]) -> None:
    """Refuse pictures that differ, by their positions among the inputs."""
    first: dict[tuple[int, int, str], int] = {}
    for position, frame in frames.items():
        first.setdefault((frame.width, frame.height, frame.pix_fmt), position)
    if len(first) == 1:
        return
    listed = [
        f"{width}x{height} {pix_fmt} (input {position}, {frames[position].source})"
        for (width, height, pix_fmt), position in first.items()
    ]
    more = f" and {len(listed) - _MAX_LISTED} more" if len(listed) > _MAX_LISTED else ""
    raise ConvertError(
        f"the pictures differ: {', '.join(listed[:_MAX_LISTED])}{more}. One array holds one size and format: "
        "give width=, height= and pix_fmt="
    )


def _shape(known: Known, layout: ArrayLayout | None) -> Shape:
    own = pixel_layout(known.pix_fmt)
    if own is None or (own.kind == "tiled" and layout is not None) or not own.tiles(known.width):
        raise ConvertError(
            f"{known.width}x{known.height} {known.pix_fmt} with layout={layout!r} makes no array"
        )
    shape = own.shape(known.width, known.height)
    if layout == "NCHW" and own.kind == "packed":
        return shape[2], *shape[:2]
    return (*shape[1:], shape[0]) if layout == "NHWC" and own.kind == "planar" else shape


def _dtype(known: Known) -> str:
    own = pixel_layout(known.pix_fmt)
    return own.dtype if own else "uint8"


def _zeros(shape: Shape, dtype: str, storage: Storage | None) -> CPUBuffer:
    # One zero that looks like many, so that nothing is allocated but the buffer.
    return convert_array(np.broadcast_to(np.zeros((), dtype), shape), storage)
