"""Images and videos to the rows of one array in host memory, with failures of images by position."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

from spdl_media.arguments import OnError, VideoDecoder
from spdl_media.buffer import Buffer, CPUBuffer, Failure
from spdl_media.config import DEFAULT_DECODE_CONFIG, CUDAConfig, DecodeConfig, DemuxConfig
from spdl_media.crops import CropPlan
from spdl_media.decode import decode_into
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
from spdl_media.filters import naming
from spdl_media.formats import is_yuv, pixel_layout
from spdl_media.geometry import swaps_sides
from spdl_media.image_decoder import decode_image, filtered
from spdl_media.inputs import Source
from spdl_media.operations import ColorMatrix, ColorRange, PictureOps
from spdl_media.packets import ImagePackets, VideoPackets, metadata_of
from spdl_media.row_plan import RowOptions, why_no_array
from spdl_media.rows import FrameRows, VideoRows
from spdl_media.storage import new_array
from spdl_media.transfer import on_its_way

PICTURE_COLORS: Final[tuple[ColorMatrix, ColorRange]] = ("bt601", "pc")
"""Matrix and range of YUV made from stills: JPEG's own, so that most files need no conversion."""

# How many failures an error lists.
_MAX_LISTED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameRequest(RowOptions):
    """Checked options of one load of images or frames, for the CPU and for devices.

    Attributes:
        ops: How they come out.
        desc: Their filters, which are the caller's own or those of ``ops``.
        cuts: What is cut out and mirrored, of each image or of all frames; ``None``: nothing is.
        is_plain: No graph of the caller's own is run.
        config: The device; ``None`` for host memory.
        decoder: Who decodes.
        purpose: The function, for messages.
        is_single: The result is one image, and not an array of one.
    """

    ops: PictureOps
    desc: str | PictureOps | None
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
        """What moves an array to where it is wanted, and the request to the CPU that makes it.

        Raises:
            TransferError: There is no device.
            ValueError: There are devices, but not this one.
        """
        finish, storage = on_its_way(self.config, self.storage, self.purpose)
        desc = self.desc
        if self.config is not None and self.is_plain and self.ops.quality == "auto":
            # On a device an array is the same, whoever decodes, and its own decoders are exact.
            desc = replace(self.ops, quality="accurate")
        return finish, replace(self, storage=storage, desc=desc)


# Errors of one input. All others come from the arguments, and end the batch whatever on_error says.
_OF_ONE_INPUT = (SourceError, DemuxError, DecodeError, ConvertError, PictureSizeError)

# What one input is decoded to.
Decoded = TypeVar("Decoded")


class Stopped(Exception):  # noqa: N818  # not an error: whoever asked for it knows
    """The load was cancelled."""


def load_rows(
    inputs: Sequence[Any], request: FrameRequest, stopped: Callable[[], bool] | None
) -> CPUBuffer:
    """Load images into one array in host memory.

    Args:
        inputs: The sources; packets and errors of those that were read before.
        request: How to load them.
        stopped: Asked before each image; when it is true, :class:`Stopped` is raised. ``None``: never.

    Raises:
        Stopped: ``stopped`` said so.
        MediaError: As for :func:`~spdl_media.load_image_batch`.
    """
    # No array of one, and no position in its errors.
    if request.is_single:
        rows = FrameRows(1, request)
        rows.put([0], *decode_cut(inputs[0], 0, request))
        image = rows.take(shape=())
        if request.cuts is not None:
            image.boxes, image.flips = request.cuts.drawn([0], [0])
        return image
    positions: list[int] = []
    failures: list[Failure] = []
    # Closed at errors, too: their tracebacks hold on to this frame, and the memory shall be free at once.
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
    rows: FrameRows,
    loaded: list[int],
    failures: list[Failure],
    request: FrameRequest,
    count: int,
) -> CPUBuffer:
    """The batch: rows of failed inputs are left out, or become zeros with ``on_error="fill"``."""
    # Threads add failures as they come.
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
    """Return a batch of zeros, where no input could be loaded."""
    ops, layout, values = request.ops, request.layout, request.values
    fill = request.on_error == "fill"
    if not fill or ops.width is None or ops.height is None or ops.pix_fmt is None:
        raise none_loaded(failures, count, fill=fill)
    own = pixel_layout(ops.pix_fmt)
    reason = why_no_array(ops.width, ops.height, ops.pix_fmt, layout)
    if own is None or reason is not None:
        remedy = f" on_error='fill' has no zeros for them: {reason}."
        raise none_loaded(failures, count, remedy)
    shape = count, *own.shape(ops.width, ops.height, layout)
    array = new_array(shape, own.dtype if values is None else values.dtype, request.storage)
    array[...] = 0
    # As a batch of which one input could be loaded.
    colorspace, color_range = PICTURE_COLORS if is_yuv(ops.pix_fmt) else (None, None)
    return CPUBuffer(array, colorspace=colorspace, color_range=color_range)


TimedFrames: TypeAlias = tuple[Buffer, Callable[[], tuple[float, ...]]]
"""Frames in an array, and what gives the seconds of each."""


def load_frames(
    packets: VideoPackets, request: FrameRequest, more: Iterable[VideoPackets] | None = None
) -> tuple[CPUBuffer, Callable[[], tuple[float, ...]]]:
    """Decode packets to an array in host memory, each frame as it leaves the filters.

    The result is that of ``convert_frames(decode_packets(...))``, without keeping the frames.

    Args:
        packets: All packets, or the first ones.
        request: How to decode them, and what becomes of the frames.
        more: Those that continue the first ones, asked for when they are due.

    Raises:
        DecodeError: As for :func:`~spdl_media.decode_packets`, as are FilterError and ValueError.
        ConvertError: As for :func:`~spdl_media.convert_frames`, as is StorageTooSmallError.
    """
    desc = cut_of_all(packets, request, request.desc)
    config, count = request.decode_config, request.num_frames
    with closing(VideoRows(packets, desc, request, are_all=more is None)) as rows:
        decode_into(rows, packets, desc, config, count, more=more)
        buffer = rows.take()
    if request.cuts is not None:
        buffer.boxes, buffer.flips = request.cuts.drawn([0], [0])
    return buffer, rows.timestamps


def cut_of_all(
    packets: VideoPackets, request: FrameRequest, desc: str | PictureOps | None
) -> str | PictureOps | None:
    """Filters, and before them what is cut out of all frames of a video and mirrored.

    Raises:
        ConvertError: The header states no size, or the crop does not lie inside the frames.
    """
    if request.cuts is None:
        return desc
    size = stated_size(packets, request.decode_config)
    if not size[0]:
        raise ConvertError(
            "crops= and flips= need the size of a video before it is decoded, and this header states none; "
            "load it whole, and cut the array",
            source=packets.source,
        )
    return request.cuts.filter(0, size, desc, packets.source)


def stated_size(packets: VideoPackets, config: DecodeConfig) -> tuple[int, int]:
    """Width and height of frames as the header states them, 0 where it does not."""
    stated = packets if config.orient else packets.codec
    return stated.width, stated.height


def decode_cut(
    src: Source | ImagePackets | MediaError, position: int, request: FrameRequest
) -> tuple[Any, str]:
    """Demux and decode an image, and cut out of it what is asked for at this position.

    Returns:
        A frame of FFmpeg's, and what it was decoded from.

    Raises:
        MediaError: It is that, of somebody who has read it before.
        ConvertError: Its crop does not lie inside it.
    """
    # Some sources can be read once, so a backend that gives up passes on what it has read.
    if isinstance(src, MediaError):
        raise src
    packets = src
    if not isinstance(packets, ImagePackets):
        packets = demux_image(packets, demux_config=request.demux_config, name=request.name)
    config, cuts, source = request.decode_config, request.cuts, packets.source
    if cuts is None:
        return decode_image(packets, request.desc, config).frame, source
    head = metadata_of(packets).jpeg

    def cut(width: int, height: int, orientation: int) -> PictureOps:
        swaps = config.orient and swaps_sides(orientation)
        size = (height, width) if swaps else (width, height)
        return cuts.filter(position, size, request.desc, source)

    if config.downscale is not None and head is not None and head.is_ycc:
        # How far it is shrunk while it is decoded depends on the crop.
        ops = cut(head.width, head.height, head.orientation)
        return decode_image(packets, ops, config).frame, source
    whole = decode_image(packets, None, config)
    ops = cut(whole.frame.width, whole.frame.height, whole.orientation)
    with naming(source):
        return filtered(whole, packets, ops, config).frame, source


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
    """Decode inputs, in one thread or several, and say what becomes of each.

    Args:
        srcs: The inputs.
        decode: Gives what an input at a position is decoded to.
        add: Takes the position of an input and what it was decoded to, in any order and from any thread.
        failures: Where failures go, likewise.
        on_error: With ``"raise"``, the first failure is raised, and names the input and its position. With
            several threads that is the one of the lowest position among those that were seen.
        stopped: Asked before each input; decoding ends with :class:`Stopped` when it says so.
        num_threads: How many threads take part. All have ended when the function returns or raises.

    Raises:
        Stopped: ``stopped`` said so.
        MediaError: An input cannot be loaded, with ``on_error="raise"``.
        TypeError: An input is no source.
        ValueError: An option does not suit an input.
    """

    def decode_one(position: int) -> None:
        if stopped is not None and stopped():
            raise Stopped
        try:
            decoded = decode(srcs[position], position)
        except _OF_ONE_INPUT as error:
            if on_error == "raise":
                raise _placed(error, position, len(srcs)) from error
            name = type(srcs[position]).__name__ if error.source is None else error.source
            failures.append(Failure(position, name, _without_tracebacks(error)))
        except (MediaError, TypeError, ValueError) as error:
            raise _placed(error, position, len(srcs)) from error
        else:
            add(position, decoded)

    num_threads = min(num_threads, len(srcs))
    if num_threads > 1:
        _in_threads(decode_one, len(srcs), num_threads)
        return
    for position in range(len(srcs)):
        decode_one(position)


def _in_threads(decode_one: Callable[[int], None], count: int, num_threads: int) -> None:
    """Call a function with each position, in the calling thread and in others beside it."""
    positions, lock = iter(range(count)), threading.Lock()
    errors: dict[int, BaseException] = {}

    def work() -> None:
        # One failure ends all threads, each after its current input.
        while not errors:
            with lock:
                position = next(positions, None)
            if position is None:
                return
            try:
                decode_one(position)
            except BaseException as error:  # noqa: BLE001  # raised below, in the calling thread
                errors[position] = error

    # Threads of this call alone: they cost 0.1 ms, and a pool that stays would have to survive forks.
    with ThreadPoolExecutor(num_threads - 1, "spdl_media_batch") as pool:
        for _ in range(num_threads - 1):
            pool.submit(work)
        work()
    if errors:
        # An interrupt of the calling thread is not to be hidden by an input that failed meanwhile.
        worst = min(errors, key=lambda at: (isinstance(errors[at], Exception), at))
        error = errors[worst]
        errors.clear()
        try:
            raise error
        finally:
            # The traceback holds this frame, which would hold the error: inputs would stay alive.
            del error


def _placed(error: Exception, position: int, count: int) -> Exception:
    """The same kind of error, with the position of its input in the message."""
    where = f"input {position} of the batch of {count}"
    if isinstance(error, MediaError):
        # Its text names the source as well, and so does that of the copy.
        return with_message(error, f"{where}: {error.message}")
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
