"""Checked requests, and many images into one array."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from spdl_media._decode_each import decode_each
from spdl_media.arguments import ArrayLayout, ImageDecoder, OnError, VideoDecoder
from spdl_media.buffer import Buffer, CPUBuffer, Failure
from spdl_media.config import CUDAConfig, DecodeConfig, DemuxConfig, as_decode_config
from spdl_media.convert import convert_array
from spdl_media.crops import CropPlan
from spdl_media.decode import Default, decode_into, decode_packets, filtered
from spdl_media.demux import demux_image
from spdl_media.errors import ConvertError, MediaError
from spdl_media.filters import naming
from spdl_media.formats import is_yuv, pixel_layout
from spdl_media.frame_rows import FrameRows, VideoRows
from spdl_media.geometry import swaps_sides
from spdl_media.image_frames import ImageFrames, av_frames
from spdl_media.inputs import Source
from spdl_media.operations import ColorMatrix, ColorRange, PictureOps
from spdl_media.packets import ImagePackets, VideoPackets, metadata_of
from spdl_media.rows import OnShort, Values, colors_differ, colors_of, why_no_array
from spdl_media.storage import Storage

PICTURE_COLORS: Final[tuple[ColorMatrix, ColorRange]] = ("bt601", "pc")
"""Matrix and range of YUV made from stills: JPEG's own, so that most files need no conversion."""

# How many failures an error lists.
_MAX_LISTED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRequest:
    """Checked options of one load of images, for the CPU and for devices.

    Attributes:
        ops: How images come out.
        desc: Their filters, which are the caller's own or those of ``ops``.
        cuts: What is cut out of each and mirrored.
        is_plain: No graph of the caller's own is run.
        config: The device; ``None`` for host memory.
        decoder: Who decodes.
        purpose: The function, for messages.
        is_single: The result is one image, and not an array of one.
    """

    ops: PictureOps
    desc: str | PictureOps | None
    cuts: CropPlan
    is_plain: bool
    demux_config: DemuxConfig | None = None
    decode_config: DecodeConfig | None = None
    storage: Storage | None = None
    layout: ArrayLayout | None = None
    values: Values | None = None
    on_error: OnError = "raise"
    num_threads: int = 1
    config: CUDAConfig | None = None
    decoder: ImageDecoder = "auto"
    purpose: str = "load_image_batch(cuda=)"
    is_single: bool = False
    name: str | None = None


TimedFrames: TypeAlias = tuple[Buffer, Callable[[], tuple[float, ...]]]
"""Frames in an array, and what gives the seconds of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoRequest:
    """Checked options of one load of frames, for the CPU and for devices."""

    ops: PictureOps
    desc: str | None
    cuts: CropPlan
    filter_desc: str | Default | None
    num_frames: int | None
    on_short: OnShort | None
    decode_config: DecodeConfig | None
    storage: Storage | None
    layout: ArrayLayout | None
    values: Values | None
    config: CUDAConfig | None
    decoder: VideoDecoder
    purpose: str

    def cut(self, packets: VideoPackets, desc: str | PictureOps | None) -> str | PictureOps | None:
        """Filters, and before them what is cut out of the frames and mirrored.

        Raises:
            ConvertError: The header states no size, or the crop does not lie inside the frames.
        """
        if self.cuts.is_empty:
            return desc
        size = stated_size(packets, as_decode_config(self.decode_config))
        if not size[0]:
            raise ConvertError(
                "crops= and flips= need the size of a video before it is decoded, and this header states "
                "none; load it whole, and cut the array",
                source=packets.source,
            )
        return self.cuts.filter(0, size, desc, packets.source)

    def load(self, packets: VideoPackets) -> tuple[CPUBuffer, Callable[[], tuple[float, ...]]]:
        """Decode packets to an array in host memory, each frame as it leaves the filters.

        The result is that of ``convert_frames(decode_packets(...))``, without keeping the frames.

        Returns:
            The array, and what gives the seconds of each row.

        Raises:
            DecodeError: As for :func:`~spdl_media.decode_packets`, as are FilterError and ValueError.
            ConvertError: As for :func:`~spdl_media.convert_frames`, as is StorageTooSmallError.
        """
        config = as_decode_config(self.decode_config)
        desc = self.cut(packets, self.desc)
        count = self.num_frames
        rows = VideoRows(
            packets, desc, self.storage, self.layout, count, self.values, self.on_short
        )
        try:
            decode_into(rows, packets, desc, config, count)
            buffer = rows.take()
        except BaseException:
            # The traceback holds on to this frame, and the memory shall be free at once.
            rows.release()
            raise
        buffer.boxes, buffer.flips = self.cuts.drawn([0], [0])
        return buffer, rows.timestamps


def stated_size(packets: VideoPackets, config: DecodeConfig) -> tuple[int, int]:
    """Width and height of frames as the header states them, 0 where it does not."""
    stated = packets if config.orient else packets.codec
    return stated.width, stated.height


def load_rows(
    inputs: Sequence[Any], request: ImageRequest, stopped: Callable[[], bool]
) -> CPUBuffer:
    """Load images into one array in host memory.

    Args:
        inputs: The sources; packets and errors of those that were read before.
        request: How to load them.
        stopped: Asked before each image; when it is true, :class:`Stopped` is raised.

    Raises:
        Stopped: ``stopped`` said so.
        MediaError: As for :func:`~spdl_media.load_image_batch`.
    """
    if request.is_single:
        rows = FrameRows(1, request.storage, request.layout, request.values)
        rows.put_image(0, decode_cut(inputs[0], 0, request))
        array = rows.take()
        array.boxes, array.flips = request.cuts.drawn([0], [0])
        return CPUBuffer(array.array[0], **array.metadata)
    batch = _Batch(len(inputs), request)

    def decode(src: Source, position: int) -> ImageFrames:
        return decode_cut(src, position, request)

    try:
        decode_each(
            inputs,
            decode,
            batch,
            on_error=request.on_error,
            stopped=stopped,
            num_threads=request.num_threads,
        )
        return batch.finish()
    except BaseException:
        # The traceback holds on to this frame, and the memory shall be free at once.
        batch.release()
        raise


def decode_cut(
    src: Source | ImagePackets | MediaError, position: int, request: ImageRequest
) -> ImageFrames:
    """Demux and decode an image, and cut out of it what is asked for at this position.

    Raises:
        MediaError: It is that, of somebody who has read it before.
        ConvertError: Its crop does not lie inside it.
    """
    if isinstance(src, MediaError):
        raise src
    packets = src
    if not isinstance(packets, ImagePackets):
        packets = demux_image(packets, demux_config=request.demux_config, name=request.name)
    if request.cuts.is_empty:
        return decode_packets(packets, request.desc, request.decode_config)
    config, head = as_decode_config(request.decode_config), metadata_of(packets).jpeg

    def cut(width: int, height: int, orientation: int) -> PictureOps:
        swaps = config.orient and swaps_sides(orientation)
        size = (height, width) if swaps else (width, height)
        return request.cuts.filter(position, size, request.desc, packets.source)

    if config.downscale is not None and head is not None and head.is_ycc:
        # How far it is shrunk while it is decoded depends on the crop.
        ops = cut(head.width, head.height, head.orientation)
        return decode_packets(packets, ops, config)
    whole = decode_packets(packets, None, config)
    stored = packets.with_metadata(orientation=whole.orientation)
    ops = cut(whole.width, whole.height, whole.orientation)
    with naming(packets.source):
        image = filtered(av_frames(whole)[0], stored, ops, config)
    return image.marked_corrupt() if whole.is_corrupt else image


class _Batch:
    """The rows of a batch, which come in any order and from any thread.

    Each image goes to the row of its position. Rows of failed inputs become zeros, or are left out at
    the end: then later rows are moved, which costs nothing while nothing fails.
    """

    def __init__(self, count: int, request: ImageRequest) -> None:
        self.failures: list[Failure] = []
        self._positions: list[int] = []
        self._first: Loaded | None = None
        self._rows = FrameRows(count, request.storage, request.layout, request.values)
        self._count, self._request = count, request
        self._lock = threading.Lock()

    def add(self, position: int, image: ImageFrames) -> None:
        """Copy the image of the input at a position.

        Raises:
            ConvertError: It differs from the first one, so that no array holds both, whatever else comes; or
                its format makes no array, or the storage is too small.
        """
        (frame,) = av_frames(image)
        size = frame.width, frame.height, frame.format.name
        loaded = Loaded(position, image.source, (size, colors_of(frame)))
        with self._lock:
            is_first = self._first is None
            if self._first is None:
                self._first = loaded
                # Takes the memory, which no other thread may do meanwhile.
                self._rows.put_image(position, image)
        if loaded.kind != self._first.kind:
            # By position, so that the message is the same whichever thread was first.
            raise images_differ(*sorted((self._first, loaded)))
        if not is_first:
            self._rows.put_image(position, image)
        self._positions.append(position)

    def finish(self) -> CPUBuffer:
        """The array; with ``on_error="fill"``, zeros stand where there is no image."""
        fill = self._request.on_error == "fill"
        # Threads add failures as they come.
        self.failures.sort(key=lambda failure: failure.index)
        indices = list(range(self._count)) if fill else sorted(self._positions)
        if self._positions:
            failed = [failure.index for failure in self.failures] if fill else []
            buffer = self._rows.take(indices, failed)
        else:
            buffer = self._zeros()
        buffer.failures = tuple(self.failures)
        buffer.indices = tuple(indices)
        cuts = self._request.cuts
        buffer.boxes, buffer.flips = cuts.drawn(indices, set(self._positions))
        return buffer

    def release(self) -> None:
        """Let go of the memory."""
        self._rows.release()

    def _zeros(self) -> CPUBuffer:
        """Return a batch of zeros, where no input could be loaded."""
        ops, layout = self._request.ops, self._request.layout
        fill = self._request.on_error == "fill"
        if not fill or ops.width is None or ops.height is None or ops.pix_fmt is None:
            raise none_loaded(self.failures, self._count, fill=fill)
        own = pixel_layout(ops.pix_fmt)
        reason = why_no_array(ops.width, ops.height, ops.pix_fmt, layout)
        if own is None or reason is not None:
            remedy = f" on_error='fill' has no zeros for them: {reason}."
            raise none_loaded(self.failures, self._count, remedy)
        shape = own.shape(ops.width, ops.height, layout)
        # One zero that looks like many, so that nothing is allocated but the buffer.
        values = self._request.values
        zero = np.zeros((), own.dtype if values is None else values.dtype)
        zeros = np.broadcast_to(zero, (self._count, *shape))
        buffer = convert_array(zeros, self._request.storage)
        if is_yuv(ops.pix_fmt):
            buffer.colorspace, buffer.color_range = PICTURE_COLORS
        return buffer


# Size and format, and the matrix and range of YUV: what images of one array have in common.
_Kind: TypeAlias = tuple[tuple[int, int, str], tuple[str | None, str | None]]


class Loaded(NamedTuple):
    """Position, source and kind of a loaded image."""

    position: int
    source: str
    kind: _Kind


def images_differ(one: Loaded, other: Loaded) -> ConvertError:
    """The error for two images of different kinds."""
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
        f"the images differ: {_in_words(one)} and {_in_words(other)}. One array holds one size and format: "
        "give width=, height= and pix_fmt="
    )


def _in_words(one: Loaded) -> str:
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


def as_list(srcs: Iterable[Source], *, one: str = "load_image") -> list[Source]:
    """The sources of a batch; ``one`` is the function that takes a single one, for the error.

    Raises:
        TypeError: It is a single source, or cannot be iterated.
    """
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
