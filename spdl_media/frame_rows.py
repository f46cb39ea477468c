"""Where decoded frames end: rows of an array, each written as its frame leaves the filters."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any, Literal, Unpack

from spdl_media._ffmpeg import as_fraction
from spdl_media.buffer import RELEASING, BufferMetadata, CPUBuffer
from spdl_media.filter_desc import picture_ops
from spdl_media.formats import Array, Shape
from spdl_media.image_frames import ImageFrames, av_frames
from spdl_media.operations import PictureOps
from spdl_media.packets import VideoPackets, av_packets, metadata_of
from spdl_media.rows import OnShort, RowPlan, Values, check_enough, fill_up, new_array, no_frames
from spdl_media.shared_memory import Bytes
from spdl_media.storage import Storage, StoragePool, lease_memory
from spdl_media.timing import ticks_to_seconds

# A graph of the user's own may give more frames than it takes. So many times as many rows are reserved:
# memory that is not touched is address space alone.
_RESERVE = 8


@dataclass(eq=False)
class FrameRows:
    """One array for frames that come one by one, so that none has to be kept until the last.

    Memory is taken with the first frame, and let go of by :meth:`take` or :meth:`release`.

    Args:
        count: Number of rows.
        storage: Memory to fill; fresh memory without one.
        layout: As in :func:`~spdl_media.convert_frames`, without ``"planes"``.
        values: The numbers that pixels become; ``None``: they stay as they are.

    Thread safety: threads may put different rows at the same time, once the first was put.
    """

    count: int
    storage: Storage | None
    layout: Literal["NCHW", "NHWC"] | None
    values: Values | None = None
    _array: Array | None = field(default=None, init=False)

    def put(self, rows: Sequence[int], frame: Any, source: str) -> None:
        """Copy a frame of FFmpeg's into rows.

        Raises:
            ConvertError: It differs from the first in size or format, or its format makes no array, or the
                storage is too small.
        """
        if self._array is None:
            name = f"the frame of row {rows[0]}"
            plan = self._plan = RowPlan(frame, self.layout, name, source, self.values)
            self._array = new_array((self.count, *plan.shape), plan.dtype, self.storage)
            self._places: Sequence[Array] = plan.places(self._array)
        self._plan.check(frame, lambda: f"that of row {rows[0]}", source)
        for row in rows:
            self._plan.copy(frame, self._places, row)

    def put_image(self, row: int, image: ImageFrames) -> None:
        """Copy an image into a row; see :meth:`put`."""
        (frame,) = av_frames(image)
        self.put([row], frame, image.source)

    def take(
        self,
        rows: Sequence[int] | None = None,
        zeros: Sequence[int] = (),
        shape: Shape | None = None,
    ) -> CPUBuffer:
        """All rows, or these, moved together; some become zeros. ``shape`` stands for their number."""
        array = self._array
        assert array is not None, "a frame was put into a row"
        self.release()
        if rows is not None:
            for target, row in enumerate(rows):
                # Rows only move towards the start, so none is overwritten before it has moved.
                if target != row:
                    array[target] = array[row]
            array = array[: len(rows)]
        if zeros:
            array[list(zeros)] = 0
        return self._plan.buffer(
            array if shape is None else array.reshape(*shape, *array.shape[1:])
        )

    def release(self) -> None:
        """Let go of the memory."""
        self._array, self._places = None, ()


class ImageBuffer(CPUBuffer):
    """A buffer of a decoded image, whose array is made when somebody asks for it.

    A batch does not ask: :func:`collate_images` writes the image to its row. So floats of an image are
    written once, and until then it is kept in bytes, a quarter of their size.

    Thread safety: safe.
    """

    __slots__ = ("_image", "_layout", "_lock", "_values")

    def __init__(
        self,
        image: ImageFrames,
        layout: Literal["NCHW", "NHWC"] | None,
        values: Values | None,
        **metadata: Unpack[BufferMetadata],
    ) -> None:
        # No array yet; None would be a released one.
        super().__init__((), **metadata)  # type: ignore[arg-type]
        self._image: ImageFrames | None = image
        self._layout, self._values = layout, values
        self._lock = threading.Lock()

    def _alive(self) -> Any:
        with self._lock:
            if self._image is not None:
                rows = self.rows(1, None)
                rows.put_image(0, self._image)
                self._array, self._image = rows.take().array[0], None
        return super()._alive()

    def __reduce__(self) -> tuple[Any, ...]:
        # Planes of FFmpeg's go to no other process: a copy has the array.
        return partial(CPUBuffer, self.array, **self.metadata), ()

    def release(self) -> None:
        """Give the memory back, as other buffers do."""
        # The outer lock first, as whoever asks for the array interface.
        with RELEASING, self._lock:
            self._image = None
            super().release()

    @property
    def __array_interface__(self) -> dict[str, Any]:
        self._alive()  # made before the lock of all buffers is taken
        return super().__array_interface__

    def rows(self, count: int, storage: Storage | None) -> FrameRows:
        """Rows for so many images like this one."""
        return FrameRows(count, storage, self._layout, self._values)

    def pending(self) -> tuple[ImageFrames, object] | None:
        """The image, and what others must share to be rows beside it; ``None``: it has become an array."""
        image = self._image
        if image is None:
            return None
        return image, (image.width, image.height, image.pix_fmt, self._layout, self._values)


def collate_images(images: Sequence[Any], storage: Storage | None) -> CPUBuffer | None:
    """Copy images to the rows of a buffer, each once.

    Returns:
        The buffer; ``None``: they are no such images, or not alike, or arrays already.
    """
    found = [one.pending() for one in images if type(one) is ImageBuffer]
    pairs = [pair for pair in found if pair is not None]
    if len(pairs) < len(images) or len({kind for _, kind in pairs}) != 1:
        return None
    rows = images[0].rows(len(images), storage)
    for row, (image, _) in enumerate(pairs):
        rows.put_image(row, image)
    buffer: CPUBuffer = rows.take()
    if images[0].boxes is not None:
        buffer.boxes = tuple(box for one in images for box in one.boxes)
        buffer.flips = tuple(flip for one in images for flip in one.flips)
    return buffer


@dataclass(eq=False)
class VideoRows:
    """A sink that copies the frames of a video into rows of an array, so that none is kept.

    How many frames come is known at the end: headers are wrong, filters repeat frames or leave some out. So
    memory is reserved for as many as can be expected, and what is left over is never touched. A storage
    lends its whole block.

    Args:
        packets: What is decoded.
        filter_desc: The filters behind the decoder.
        storage: Memory to fill; fresh memory without one.
        layout: As in :func:`~spdl_media.convert_frames`, without ``"planes"``.
        limit: How many frames are wanted; ``None``: all.
        values: The numbers that pixels become; ``None``: they stay as they are.
        on_short: What fills up to ``limit``; ``None``: nothing does.

    Thread safety: one thread at a time.
    """

    packets: VideoPackets
    filter_desc: str | PictureOps | None
    storage: Storage | None
    layout: Literal["NCHW", "NHWC"] | None
    limit: int | None
    values: Values | None = None
    on_short: OnShort | None = None

    def __post_init__(self) -> None:
        # Counted by the packets: the header's number of frames may be wrong.
        self._expected, self._is_exact = expected_frames(self.packets, self.filter_desc, self.limit)
        if self.on_short is not None and self.limit is not None:
            self._expected, self._is_exact = self.limit, True
        self._pts: list[int | None] = []
        # Arrays that are full or filled now, and how many frames they hold together.
        self._arrays: list[Array] = []
        self._places: list[Array] = []
        self._start = self._capacity = 0

    def put(self, frame: Any) -> bool:
        """Copy a frame of FFmpeg's into the next row.

        Raises:
            ConvertError: It has another size, format, matrix or range than the first, or makes no array.
        """
        row, source = len(self._pts), self.packets.source
        if row == 0:
            name = f"frame 0 of item 0 ({source})"
            self._plan = RowPlan(frame, self.layout, name, source, self.values)
            # Filters may have changed it, so it is that of the frames and not of the packets.
            self._time_base = as_fraction(frame.time_base) or Fraction(1)
        self._plan.check(frame, lambda: f"frame {row} of item 0 ({source})", source)
        if row == self._capacity:
            self._make_room()
        if self._places:
            self._plan.copy(frame, self._places, row - self._start)
        self._pts.append(frame.pts)
        return row + 1 == self.limit

    def _make_room(self) -> None:
        nbytes = self._plan.nbytes
        self._start = self._capacity
        if isinstance(self.storage, StoragePool):
            # Whether it is large enough shows with the last frame, and the error shall name the whole size.
            # So frames that find no room are only counted.
            if self._start or nbytes > self.storage.nbytes:
                self.release()
                self._capacity = sys.maxsize
                return
            memory = self.storage.acquire(nbytes)
        else:
            memory = self._reserve(nbytes)
        count = memory.size // nbytes
        array = memory[: count * nbytes].view(self._plan.dtype).reshape(count, *self._plan.shape)
        self._arrays.append(array)
        self._places = self._plan.places(array)
        self._capacity += count

    def _reserve(self, nbytes: int) -> Bytes:
        """Fresh memory for all rows that can be expected, or for as many again as there are."""
        count = self._start or self._expected
        # Page-locked memory is there from the start, touched or not.
        if self.storage is None and not self._is_exact:
            try:
                return lease_memory(count * nbytes, None, spare=(_RESERVE - 1) * count * nbytes)
            except MemoryError:  # the system does not reserve more than it has
                pass
        return lease_memory(count * nbytes, self.storage)

    def take(self) -> CPUBuffer:
        """The rows that were filled, and those that stand in for missing ones.

        Raises:
            ConvertError: There are none, or too few.
            StorageTooSmallError: They are more than the storage holds.
        """
        count = len(self._pts)
        if not count:
            raise no_frames(self.packets)
        wanted, on_short, packets = count, self.on_short, self.packets
        if on_short is not None and self.limit is not None:
            wanted = self.limit
            check_enough(count, wanted, on_short, "frames", packets.window, packets.source)
        if not self._arrays:
            # The frames found no room and were only counted, so the storage is too small for certain.
            lease_memory(wanted * self._plan.nbytes, self.storage)  # which says what it lacks
        array = self._arrays[0][:wanted]
        if len(self._arrays) > 1 or len(array) < wanted:
            array = new_array((wanted, *self._plan.shape), self._plan.dtype, self.storage)
            start = 0
            while self._arrays:
                part = self._arrays.pop(0)[: count - start]
                array[start : start + len(part)] = part
                start += len(part)
        self.release()
        if on_short is not None and count < wanted:
            places = fill_up(array, count, on_short)
            missing = [None] * (wanted - count)
            self._pts += missing if places is None else [self._pts[place] for place in places]
        return self._plan.buffer(array)

    def timestamps(self) -> tuple[float, ...]:
        """Seconds of each row on the container's clock; ``nan``: the file has none."""
        return seconds_of(self._pts, self._time_base, metadata_of(self.packets).zero)

    def release(self) -> None:
        """Let go of the memory."""
        self._arrays, self._places = [], []


def seconds_of(pts: Sequence[int | None], time_base: Fraction, zero: Fraction) -> tuple[float, ...]:
    """Timestamps in seconds on the container's clock; ``nan``: the file has none."""
    return tuple(
        float("nan") if one is None else float(ticks_to_seconds(one, time_base, zero))
        for one in pts
    )


def expected_frames(
    packets: VideoPackets, filter_desc: str | PictureOps | None, limit: int | None
) -> tuple[int, bool]:
    """How many frames are to be expected, and whether hardly more can come."""
    start, end = packets.window.ticks(packets.time_base, metadata_of(packets).zero)
    first, stop = -math.inf if start is None else start, math.inf if end is None else end
    pts = [packet.pts for packet in av_packets(packets)]
    count = max(1, sum(p is None or first <= p < stop for p in pts))
    if limit is not None and limit <= count:
        return limit, True
    ops = None if filter_desc is None else picture_ops(filter_desc)
    is_exact = filter_desc is None or (
        ops is not None and (ops.frame_rate, ops.num_frames, ops.filter_desc) == (None,) * 3
    )
    return count, is_exact
