"""Decode images or a video to the rows of one array in host memory, and report failed images by position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar

from spdl_media._checks import abridged
from spdl_media._threads import in_threads
from spdl_media.arguments import OnError, VideoDecoder
from spdl_media.buffer import Buffer, CPUBuffer, Failure
from spdl_media.config import DEFAULT_DECODE_CONFIG, CUDAConfig, DecodeConfig, DemuxConfig
from spdl_media.crops import CropPlan
from spdl_media.demux import demux_image
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
from spdl_media.image_decoder import decode_image
from spdl_media.inputs import Source
from spdl_media.operations import ColorMatrix, ColorRange, Desc, PictureOps
from spdl_media.packets import ImagePackets
from spdl_media.rows import FrameRows, RowOptions, why_no_array
from spdl_media.storage import new_array
from spdl_media.transfer import on_its_way

PICTURE_COLORS: Final[tuple[ColorMatrix, ColorRange]] = ("bt601", "pc")
"""Matrix and range of YUV made from stills: those of JPEG, so that most files need no conversion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameRequest(RowOptions):
    """Checked options of one load of images or frames, for the CPU and for devices.

    Attributes:
        ops: Operations on images or frames: size, format, quality and so on.
        desc: The filters to run: a graph of the caller's, or ``ops``.
        cuts: Crops and flips, one for each image or one for all frames; ``None``: none.
        is_plain: Whether there is no filter graph of the caller's.
        config: The device; ``None`` for host memory.
        decoder: The decoder to use.
        purpose: The public function, for messages.
        is_single: Whether the result is a single image instead of a batch.
    """

    ops: PictureOps
    desc: Desc
    cuts: CropPlan | None = None
    is_plain: bool = True
    demux_config: DemuxConfig | None = None
    decode_config: DecodeConfig = DEFAULT_DECODE_CONFIG
    config: CUDAConfig | None = None
    decoder: VideoDecoder = "auto"
    on_error: OnError = "raise"
    num_threads: int = 1
    name: str | None = None
    purpose: str = ""
    is_single: bool = False

    def staged(self) -> tuple[Callable[[CPUBuffer], Buffer], FrameRequest]:
        """Return a function that transfers an array to the device, and the request that decodes on the CPU.

        Raises:
            TransferError: There is no CUDA device.
            ValueError: There are devices, but not this one.
        """
        finish, storage = on_its_way(self.config, self.storage, self.purpose)
        desc = self.desc
        if self.config is not None and self.is_plain and self.ops.quality == "auto":
            # Decoders on the device are exact. The result must not depend on which decoder is used.
            desc = replace(self.ops, quality="accurate")
        return finish, replace(self, storage=storage, desc=desc)


# Errors that concern one input. All others come from the arguments, and are raised whatever on_error is.
_INPUT_ERRORS = (SourceError, DemuxError, DecodeError, ConvertError, PictureSizeError)

# The result of decoding one input.
Decoded = TypeVar("Decoded")


class Stopped(Exception):  # noqa: N818  # not an error: the caller asked for it
    """The load was cancelled."""


def load_rows(
    inputs: Sequence[Any], request: FrameRequest, stopped: Callable[[], bool] | None
) -> CPUBuffer:
    """Load images into one array in host memory.

    Args:
        inputs: The sources. For those that have been read already, their packets or errors.
        request: Options of the load.
        stopped: Called before each image; if it returns true, the load ends with :class:`Stopped`.
            ``None``: the load cannot be stopped.

    Raises:
        Stopped: ``stopped`` returned true.
        MediaError: As for :func:`~spdl_media.load_image_batch`.
    """
    # A single image is not a batch: the array has no axis B, and errors have no position.
    if request.is_single:
        rows = FrameRows(1, request)
        rows.put([0], *decode_cut(inputs[0], 0, request))
        image = rows.take(shape=())
        if request.cuts is not None:
            image.boxes, image.flips = request.cuts.drawn([0], [0])
        return image
    positions: list[int] = []
    failures: list[Failure] = []
    # Closed explicitly, because the traceback of an error would keep the memory through this frame.
    with closing(FrameRows(len(inputs), request, "input")) as rows:

        def add(position: int, image: tuple[Any, str]) -> None:
            rows.put([position], *image)
            positions.append(position)

        decode_each(
            *(inputs, partial(decode_cut, request=request), add, failures),
            on_error=request.on_error,
            stopped=stopped,
            num_threads=request.num_threads,
        )
        return _finished(rows, sorted(positions), failures, request, len(inputs))


def _finished(
    rows: FrameRows, loaded: list[int], failures: list[Failure], request: FrameRequest, count: int
) -> CPUBuffer:
    """Return the batch. Rows of failed inputs are left out, or zeros with ``on_error="fill"``."""
    # Threads add failures in any order.
    failures.sort(key=lambda failure: failure.index)
    fill = request.on_error == "fill"
    indices = list(range(count)) if fill else loaded
    if loaded:
        buffer = rows.take(indices, [failure.index for failure in failures] if fill else [])
    else:
        buffer = _zeros(failures, request, count)
    buffer.failures, buffer.indices = tuple(failures), tuple(indices)
    if request.cuts is not None:
        buffer.boxes, buffer.flips = request.cuts.drawn(indices, set(loaded))
    return buffer


def _zeros(failures: list[Failure], request: FrameRequest, count: int) -> CPUBuffer:
    """Return a batch of zeros for ``on_error="fill"`` if no input could be loaded."""
    ops, layout, values = request.ops, request.layout, request.values
    fill = request.on_error == "fill"
    if not fill or ops.width is None or ops.height is None or ops.pix_fmt is None:
        raise none_loaded(failures, count, fill=fill)
    own = pixel_layout(ops.pix_fmt)
    reason = why_no_array(ops.width, ops.height, ops.pix_fmt, layout)
    if own is None or reason is not None:
        raise none_loaded(failures, count, f" on_error='fill' has no zeros for them: {reason}.")
    shape = count, *own.shape(ops.width, ops.height, layout)
    array = new_array(shape, own.dtype if values is None else values.dtype, request.storage)
    array[...] = 0
    # The same metadata as for a batch of which an input could be loaded.
    colorspace, color_range = PICTURE_COLORS if is_yuv(ops.pix_fmt) else (None, None)
    return CPUBuffer(array, colorspace=colorspace, color_range=color_range)


def decode_cut(
    src: Source | ImagePackets | MediaError, position: int, request: FrameRequest
) -> tuple[Any, str]:
    """Demux and decode an image, and apply the crop and flip for its position in the batch.

    Returns:
        An FFmpeg frame, and the name of its source.

    Raises:
        MediaError: ``src`` is this error, from reading the source before.
        ConvertError: The crop is not inside the image.
    """
    # A source that can be read only once may have been read by another decoder that has given up. It then
    # comes as packets or as an error.
    if isinstance(src, MediaError):
        raise src
    packets = src
    if not isinstance(packets, ImagePackets):
        packets = demux_image(packets, demux_config=request.demux_config, name=request.name)
    filter: Any = request.desc
    if request.cuts is not None:
        cut = request.cuts.filter
        filter = partial(cut, position, filter=request.desc, source=packets.source)
    return decode_image(packets, filter, request.decode_config).frame, packets.source


def none_loaded(
    failures: Sequence[Failure], count: int, remedy: str = "", *, fill: bool = False
) -> ConvertError:
    """Return the error for a batch of which no input could be loaded.

    Args:
        failures: The failures of all inputs.
        count: Number of inputs.
        remedy: A sentence in the middle of the message.
        fill: Whether to explain which options ``on_error="fill"`` needs.
    """
    if fill:
        remedy = " on_error='fill' gives zeros if width=, height= and pix_fmt= state the shape."
    listed = abridged([f"input {f.index}: {f.error}" for f in failures], "; ")
    error = ConvertError(f"none of the {count} inputs could be loaded.{remedy} {listed}")
    error.__cause__ = failures[0].error
    return error


def decode_each(
    srcs: Sequence[Any],
    decode: Callable[[Any, int], Decoded],
    add: Callable[[int, Decoded], None],
    failures: list[Failure],
    *,
    on_error: OnError,
    stopped: Callable[[], bool] | None,
    num_threads: int = 1,
) -> None:
    """Decode inputs in one or several threads, and pass on each result or failure.

    Args:
        srcs: The inputs.
        decode: Called with an input and its position; returns the result.
        add: Called with the position of an input and its result, in any order and from any thread.
        failures: Failures are appended to it, in any order.
        on_error: With ``"raise"``, the first failure is raised, with the input and its position in the
            message. With several threads it is the one of the lowest position among those seen.
        stopped: Called before each input; if it returns true, decoding ends with :class:`Stopped`.
            ``None``: decoding cannot be stopped.
        num_threads: Number of threads, with that of the caller. All others have ended when the function
            returns or raises, except after a Ctrl-C.

    Raises:
        Stopped: ``stopped`` returned true.
        MediaError: An input cannot be loaded, with ``on_error="raise"``.
        TypeError: An input is not a source.
        ValueError: An option is not valid for an input.
    """

    def decode_one(position: int) -> None:
        if stopped is not None and stopped():
            raise Stopped
        try:
            decoded = decode(srcs[position], position)
        except _INPUT_ERRORS as error:
            if on_error == "raise":
                raise _placed(error, position, len(srcs)) from error
            name = type(srcs[position]).__name__ if error.source is None else error.source
            failures.append(Failure(position, name, _without_tracebacks(error)))
        except (MediaError, TypeError, ValueError) as error:
            raise _placed(error, position, len(srcs)) from error
        else:
            add(position, decoded)

    if num_threads > 1:
        in_threads(decode_one, len(srcs), num_threads)
        return
    for position in range(len(srcs)):
        decode_one(position)


def _placed(error: Exception, position: int, count: int) -> Exception:
    """Return an error of the same kind, with the position of the input in the message."""
    where = f"input {position} of the batch of {count}"
    if isinstance(error, MediaError):
        # From message, not str(error): that of the copy adds the source again.
        return with_message(error, f"{where}: {error.message}")
    # Not type(error), because subclasses may take other arguments.
    kind = TypeError if isinstance(error, TypeError) else ValueError
    return kind(f"{where}: {error}")


def _without_tracebacks(error: MediaError) -> MediaError:
    """Clear the tracebacks of an error and its causes, which keep inputs, packets and frames alive."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error
