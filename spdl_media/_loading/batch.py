"""Many pictures into one array, and what becomes of those that cannot be loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, get_args

import numpy as np

from spdl_media._checks import check_choice
from spdl_media._loading.options import PICTURE_COLORS, still_filter
from spdl_media._loading.pictures import CropPlan, decode_picture
from spdl_media._rows import PictureRows, colors_differ, colors_of, why_no_array
from spdl_media.buffer import CPUBuffer, Failure
from spdl_media.config import DecodeConfig, DemuxConfig
from spdl_media.convert import convert_array
from spdl_media.decode import Default
from spdl_media.errors import (
    ConvertError,
    DecodeError,
    DemuxError,
    MediaError,
    PictureSizeError,
    SourceError,
    with_message,
)
from spdl_media.formats import is_yuv, pixel_layout
from spdl_media.frames import ImageFrames, av_frames
from spdl_media.inputs import Source
from spdl_media.operations import PictureOps
from spdl_media.storage import Storage

OnError: TypeAlias = Literal["raise", "skip", "fill"]
ArrayLayout: TypeAlias = Literal["NCHW", "NHWC"]

_MAX_LISTED = 5

# What is the matter with one input, and not with how all of them are to be loaded.
_OF_ONE_INPUT = (SourceError, DemuxError, DecodeError, ConvertError, PictureSizeError)


# What one input is decoded to.
Decoded = TypeVar("Decoded")
_Taken_contra = TypeVar("_Taken_contra", contravariant=True)


class Collector(Protocol[_Taken_contra]):
    """What :func:`decode_each` gives the inputs to that it decoded, and those that failed."""

    failures: list[Failure]

    def add(self, position: int, decoded: _Taken_contra, /) -> None: ...


class Stopped(Exception):  # noqa: N818  # not an error: whoever asked for it knows
    """Nobody waits for the batch any longer."""


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of each row of a batch before anything is decoded."""

    width: int
    height: int
    pix_fmt: str


class _Batch:
    """The rows of a batch as its pictures come, and what is known of them.

    Args:
        count: Number of inputs.
        known: Size and format, if they are known.
        storage: Memory to fill; fresh memory without one.
        layout: Of the array.
        fill: Failed inputs have rows, too.
    """

    def __init__(
        self,
        count: int,
        known: Known | None,
        storage: Storage | None,
        layout: ArrayLayout | None,
        *,
        fill: bool,
    ) -> None:
        self.failures: list[Failure] = []
        self._positions: list[int] = []
        self._first: _Loaded | None = None
        self._rows = PictureRows(count, storage, layout)
        self._count, self._known, self._storage = count, known, storage
        self._layout, self._fill = layout, fill

    def add(self, position: int, picture: ImageFrames) -> None:
        """Copy the picture of the input at a position.

        Raises:
            ConvertError: It differs from the first one, so that no array holds both, whatever else comes; or
                its format makes no array, or the storage is too small.
        """
        kind = _kind_of(picture)
        if self._first is None:
            self._first = _Loaded(position, picture.source, kind)
        elif kind != self._first.kind:
            raise _pictures_differ(self._first, _Loaded(position, picture.source, kind))
        self._rows.put(position if self._fill else len(self._positions), picture)
        self._positions.append(position)

    def finish(self) -> CPUBuffer:
        """The array; with ``fill``, zeros stand where there is no picture."""
        if self._positions:
            failed = [failure.index for failure in self.failures] if self._fill else []
            buffer = self._rows.take(len(self._positions) + len(failed), failed)
        else:
            buffer = self._zeros()
        buffer.failures = tuple(self.failures)
        buffer.indices = tuple(range(self._count) if self._fill else self._positions)
        return buffer

    def release(self) -> None:
        """Let go of the memory."""
        self._rows.release()

    def _zeros(self) -> CPUBuffer:
        """What stands for inputs of which none could be loaded."""
        known, layout = self._known, self._layout
        if not self._fill or known is None:
            raise none_loaded(self.failures, self._count, fill=self._fill)
        own = pixel_layout(known.pix_fmt)
        reason = why_no_array(known.width, known.height, known.pix_fmt, layout)
        if own is None or reason is not None:
            remedy = f" on_error='fill' has no zeros for them: {reason}."
            raise none_loaded(self.failures, self._count, remedy)
        shape = own.shape(known.width, known.height)
        if layout == "NCHW" and own.kind == "packed":
            shape = shape[2], *shape[:2]
        elif layout == "NHWC" and own.kind == "planar":
            shape = (*shape[1:], shape[0])
        # One zero that looks like many, so that nothing is allocated but the buffer.
        zeros = np.broadcast_to(np.zeros((), own.dtype), (self._count, *shape))
        buffer = convert_array(zeros, self._storage)
        if is_yuv(known.pix_fmt):
            buffer.colorspace, buffer.color_range = PICTURE_COLORS
        return buffer


# Size and format, and the matrix and range of YUV: what pictures of one array have in common.
_Kind: TypeAlias = tuple[tuple[int, int, str], tuple[str | None, str | None]]


class _Loaded(NamedTuple):
    """What is remembered of a picture."""

    position: int
    source: str
    kind: _Kind


def _kind_of(picture: ImageFrames) -> _Kind:
    frame = av_frames(picture)[0]
    return (frame.width, frame.height, frame.format.name), colors_of(frame)


def _pictures_differ(one: _Loaded, other: _Loaded) -> ConvertError:
    """The error for two pictures of different kinds."""
    size, colors = one.kind
    other_size, other_colors = other.kind
    if size == other_size:
        return colors_differ(
            (f"input {one.position} ({one.source})", colors),
            (f"input {other.position} ({other.source})", other_colors),
            size[2],
            other.source,
        )
    return ConvertError(
        f"the pictures differ: {_in_words(one)} and {_in_words(other)}. One array holds one size and format: "
        "give width=, height= and pix_fmt="
    )


def _in_words(one: _Loaded) -> str:
    width, height, pix_fmt = one.kind[0]
    return f"{width}x{height} {pix_fmt} (input {one.position}, {one.source})"


def none_loaded(
    failures: Sequence[Failure], count: int, remedy: str = "", *, fill: bool = False
) -> ConvertError:
    """The error for a batch of which no input could be loaded.

    Args:
        failures: Of all inputs.
        count: How many there are.
        remedy: A sentence in its middle.
        fill: Zeros were asked for, and no size for them.
    """
    if fill:
        remedy = " on_error='fill' can make zeros of them where width=, height= and pix_fmt= say the size."
    listed = "; ".join(f"input {f.index}: {f.error}" for f in failures[:_MAX_LISTED])
    more = f"; and {count - _MAX_LISTED} more" if count > _MAX_LISTED else ""
    error = ConvertError(f"none of the {count} inputs could be loaded.{remedy} {listed}{more}")
    error.__cause__ = failures[0].error
    return error


def check_on_error(on_error: str) -> None:
    check_choice("on_error", on_error, get_args(OnError))


def check_array_layout(layout: str | None) -> None:
    remedy = "convert_frames(layout='planes') gives one array a plane"
    check_choice("layout", layout, (*get_args(ArrayLayout), None), remedy=remedy)


def image_batch_steps(
    inputs: Sequence[Source],
    *,
    options: PictureOps,
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
    desc = still_filter(options, filter_desc)
    if not inputs:
        raise ConvertError("there are no inputs to load: the sequence is empty")
    cuts.check(len(inputs))
    decode = partial(
        decode_picture, desc=desc, cuts=cuts, demux_config=demux_config, decode_config=decode_config
    )

    def run(stopped: Callable[[], bool]) -> CPUBuffer:
        fill = on_error == "fill"
        batch = _Batch(len(inputs), _known(options), storage, layout, fill=fill)
        try:
            decode_each(inputs, decode, batch, on_error=on_error, stopped=stopped)
            return batch.finish()
        except BaseException:
            # The traceback holds on to this frame, and the memory shall be free at once.
            batch.release()
            raise

    return run


def as_list(srcs: Iterable[Source], *, one: str = "load_image") -> list[Source]:
    """The sources of a batch; ``one`` is the function that takes a single one, for the error."""
    if isinstance(srcs, Iterable) and not _is_one_source(srcs):
        return list(srcs)
    raise TypeError(
        f"a batch is a sequence of sources, such as a list of paths, not one of {type(srcs).__name__}; "
        f"{one} takes one"
    )


def _is_one_source(srcs: Any) -> bool:
    """Whether something iterable is a single source all the same."""
    if hasattr(srcs, "__array__"):  # of more dimensions or other types, it may hold sources
        dtype = str(getattr(srcs, "dtype", "")).removeprefix("torch.")
        return dtype == "uint8" and srcs.ndim == 1
    if isinstance(srcs, str) or (hasattr(srcs, "read") and not hasattr(srcs, "__len__")):
        return True
    try:
        memoryview(srcs)
    except TypeError:
        return False
    return True


def _known(options: PictureOps) -> Known | None:
    if options.width is None or options.height is None or options.pix_fmt is None:
        return None
    return Known(options.width, options.height, options.pix_fmt)


def decode_each(
    srcs: Sequence[Any],
    decode: Callable[[Any, int], Decoded],
    batch: Collector[Decoded],
    *,
    on_error: OnError,
    stopped: Callable[[], bool],
) -> None:
    """Decode one input after the other, and add what becomes of it to the batch.

    Args:
        srcs: The inputs.
        decode: Gives what an input at a position is decoded to.
        batch: Where pictures and failures go.
        on_error: With ``"raise"``, the first failure is raised, and names the input and its position.
        stopped: Asked before each input; decoding ends with :class:`Stopped` when it says so.
    """
    for position, src in enumerate(srcs):
        if stopped():
            raise Stopped
        try:
            decoded = decode(src, position)
        except _OF_ONE_INPUT as error:
            if on_error == "raise":
                raise _placed(error, position, len(srcs)) from error
            name = type(src).__name__ if error.source is None else error.source
            batch.failures.append(Failure(position, name, _without_tracebacks(error)))
        except (MediaError, TypeError, ValueError) as error:
            raise _placed(error, position, len(srcs)) from error
        else:
            batch.add(position, decoded)


def _placed(error: Exception, position: int, count: int) -> Exception:
    """The same kind of error, with the position of its input in the message."""
    where = f"input {position} of the batch of {count}"
    if isinstance(error, MediaError):
        # Its text names the source as well, and so does that of the copy.
        return with_message(error, f"{where}: {error.args[0] if error.args else error}")
    # Subclasses may want other arguments. Of some, the first argument is a mere number.
    kind = TypeError if isinstance(error, TypeError) else ValueError
    return kind(f"{where}: {error}")


def _without_tracebacks(error: MediaError) -> MediaError:
    """The error, without what its tracebacks hold: inputs, packets and frames."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error
