"""Copy the frames of a video into the rows of an array, estimate their number, and fill missing rows."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from spdl_media._checks import check_choice, check_int
from spdl_media._ffmpeg import as_fraction
from spdl_media.buffer import CPUBuffer
from spdl_media.errors import ConvertError
from spdl_media.formats import Array
from spdl_media.image_frames import VideoFrames, frame_metadata
from spdl_media.operations import PictureOps, picture_ops
from spdl_media.packets import VideoPackets, av_packets, metadata_of
from spdl_media.row_plan import OnShort, RowOptions, RowPlan
from spdl_media.shared_memory import Bytes
from spdl_media.storage import StoragePool, lease_memory
from spdl_media.timing import Window, ticks_to_seconds

# A custom graph may output more frames than it gets, so memory is reserved for so many times the expected
# rows. Untouched memory takes only address space.
_RESERVE = 8


def no_frames(frames: VideoFrames | VideoPackets) -> ConvertError:
    """Make the error for a window without frames."""
    window = frames.window if isinstance(frames, VideoPackets) else frame_metadata(frames).window
    return ConvertError(f"there is no frame in the window {window}", source=frames.source)


class VideoRows:
    """A sink that copies the frames of a video into rows of an array, so that no frame is kept.

    The number of frames is known only at the end: headers can be wrong, and filters repeat or drop frames. So
    memory is reserved for the expected number, and unused memory is never touched. A storage lends its whole
    block.

    Args:
        packets: The packets that are decoded.
        filter_desc: The filters after the decoder.
        options: Number of rows, memory, axis order and values, and what to do if there are too few frames.
        are_all: No packets follow these.

    Thread safety: one thread at a time.
    """

    def __init__(
        self,
        packets: VideoPackets,
        filter_desc: str | PictureOps | None,
        options: RowOptions,
        *,
        are_all: bool = True,
    ) -> None:
        self._packets, self._options, self._storage = packets, options, options.storage
        self._source = packets.source
        # From the packets, because the number of frames in the header may be wrong.
        self._expected, self._is_exact = expected_frames(packets, filter_desc, options.num_frames)
        # Later packets may add frames, up to the limit.
        self._is_exact &= are_all or self._expected == options.num_frames
        if options.on_short is not None and options.num_frames is not None:
            self._expected, self._is_exact = options.num_frames, True
        self._pts: list[int | None] = []
        self._array: Array | None = None
        self._places: list[Array] = []
        self._capacity = 0

    def put(self, frame: Any) -> bool:
        """Copy a frame to the next row. Return whether the limit of rows is reached.

        Raises:
            ConvertError: The frame differs from the first in size, format, matrix or range, or its format has
                no array layout.
        """
        row, source, options = len(self._pts), self._source, self._options
        if row == 0:
            self._plan = RowPlan(frame, 0, source, options, "frame {} of item 0 ({})".format)
            # The time base of the frames, not of the packets, because filters may change it.
            self._time_base = as_fraction(frame.time_base) or Fraction(1)
        self._plan.check(frame, row, source)
        if row == self._capacity:
            self._make_room()
        # Without memory, frames are only counted; see _make_room.
        if self._places:
            self._plan.copy(frame, self._places, row)
        self._pts.append(frame.pts)
        return row + 1 == options.num_frames

    def _make_room(self) -> None:
        nbytes, filled = self._plan.nbytes, self._array
        if isinstance(self._storage, StoragePool):
            # If the storage is too small, the remaining frames are only counted, so that the error can name
            # the size that is needed.
            if filled is not None or nbytes > self._storage.nbytes:
                self.close()
                self._capacity = sys.maxsize
                return
            memory = self._storage.acquire(nbytes)
        else:
            memory = self._reserve(nbytes)
        count = memory.size // nbytes
        array = memory[: count * nbytes].view(self._plan.dtype).reshape(count, *self._plan.shape)
        # The capacity doubles, so each row is moved once on average.
        if filled is not None:
            array[: self._capacity] = filled
        self._array, self._capacity = array, count
        self._places = self._plan.places(array)

    def _reserve(self, nbytes: int) -> Bytes:
        """Allocate memory for the expected rows, or for twice the current rows."""
        count = 2 * self._capacity or self._expected
        # No reserve in a storage, because pinned memory is occupied even if it is not touched.
        if self._storage is None and not self._is_exact:
            try:
                return lease_memory(count * nbytes, None, spare=(_RESERVE - 1) * count * nbytes)
            except MemoryError:  # the system does not overcommit
                pass
        return lease_memory(count * nbytes, self._storage)

    def take(self) -> CPUBuffer:
        """Return the filled rows, and those that ``on_short`` adds.

        Raises:
            ConvertError: There are no rows, or too few.
            StorageTooSmallError: The storage is too small for the rows.
        """
        count = len(self._pts)
        packets, options, wanted = self._packets, self._options, count
        if not count:
            raise no_frames(packets)
        if (on_short := options.on_short) is not None and options.num_frames is not None:
            wanted = options.num_frames
            check_enough(count, wanted, on_short, "frames", packets.window, packets.source)
        if self._array is None or self._capacity < wanted:
            # The storage is too small: this raises the error with the size that is needed.
            lease_memory(wanted * self._plan.nbytes, self._storage)
        assert self._array is not None, "there is room for the rows"
        # From here on, only the buffer holds the memory, so deleting the buffer releases it.
        array = self._array[:wanted]
        self.close()
        if on_short is not None and count < wanted:
            places = fill_up(array, count, on_short)
            missing = [None] * (wanted - count)
            self._pts += missing if places is None else [self._pts[place] for place in places]
        return self._plan.buffer(array)

    def timestamps(self) -> tuple[float, ...]:
        """Return the time of each row in seconds on the container's clock; ``nan`` if it has none."""
        return seconds_of(self._pts, self._time_base, metadata_of(self._packets).zero)

    def close(self) -> None:
        """Release the memory."""
        self._array, self._places = None, []


def seconds_of(pts: Sequence[int | None], time_base: Fraction, zero: Fraction) -> tuple[float, ...]:
    """Convert timestamps to seconds on the container's clock; ``nan`` for ``None``."""
    return tuple(
        float("nan") if one is None else float(ticks_to_seconds(one, time_base, zero))
        for one in pts
    )


def expected_frames(
    packets: VideoPackets, filter_desc: str | PictureOps | None, limit: int | None
) -> tuple[int, bool]:
    """Estimate the number of frames; the second result tells whether more are unlikely."""
    first, stop = packets.window.ticks(packets.time_base, metadata_of(packets).zero)
    pts = [packet.pts for packet in av_packets(packets)]
    # Packets without a timestamp may lie in the window, too.
    count = max(1, sum(p is None or first <= p < stop for p in pts))
    if limit is not None and limit <= count:
        return limit, True
    ops = None if filter_desc is None else picture_ops(filter_desc)
    is_exact = filter_desc is None or (
        ops is not None and (ops.frame_rate, ops.num_frames, ops.filter_desc) == (None,) * 3
    )
    return count, is_exact


def check_length(name: str, count: int | None, on_short: str | None) -> None:
    """Check a number of frames or samples, given as the argument ``name``, and ``on_short``.

    Raises:
        TypeError: The number is not an integer.
        ValueError: The number is not positive, ``on_short`` is unknown, or is given without a number.
    """
    if on_short is not None:
        check_choice("on_short", on_short, (*get_args(OnShort), None))
    if count is not None:
        check_int(name, count)
    elif on_short is not None:
        raise ValueError(
            f"on_short={on_short!r} says what becomes of too few, so it needs {name}=, which says how many"
        )


def check_enough(
    found: int, wanted: int, on_short: OnShort | None, what: str, window: Window, source: str
) -> None:
    """Check that there are enough frames or samples, if ``on_short`` is ``"error"``.

    Raises:
        ConvertError: There are too few.
    """
    if found < wanted and on_short == "error":
        remedy = "on_short='repeat_last', 'wrap' or 'zeros' fills up"
        if what == "samples":
            remedy += "; decode_config(gaps='fill') puts silence where the file leaves audio out"
        raise ConvertError(
            f"{wanted} {what} are asked for, and there are {found} in the window {window}. {remedy}",
            source=source,
        )


def fill_up(
    rows: npt.NDArray[Any], found: int, on_short: OnShort, zero: int = 0
) -> npt.NDArray[np.intp] | None:
    """Fill the rows of an array after the first ``found``, which is at least 1 unless zeros fill it.

    Returns:
        The rows that were copied there; ``None`` for zeros.
    """
    missing = np.arange(found, len(rows))
    if on_short == "zeros":
        rows[found:] = zero
        return None
    places = missing % found if on_short == "wrap" else np.full_like(missing, found - 1)
    rows[found:] = rows[places]
    return places
