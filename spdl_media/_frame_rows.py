"""Frames by number as rows of one array, in any order, each written as it leaves the filters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from spdl_media._rows import Array, RowPlan, new_array
from spdl_media.buffer import CPUBuffer
from spdl_media.storage import Storage
from spdl_media.values import Values


@dataclass(frozen=True, slots=True)
class Rows:
    """Which frames the rows of an array are.

    Attributes:
        numbers: Of each row, the frame; -1: zeros.
        count: Into so many groups of equally many rows, each with a crop of its own.
        shape: In place of the number of rows, in the shape of the array.
    """

    numbers: list[int]
    count: int = 1
    shape: tuple[int, ...] | None = None

    def zeros(self) -> list[int]:
        """The rows that are zeros."""
        return [row for row, number in enumerate(self.numbers) if number < 0]

    def targets(self) -> dict[int, dict[int, list[int]]]:
        """By frame and group, its rows."""
        found: dict[int, dict[int, list[int]]] = {}
        size = len(self.numbers) // self.count or 1
        for row, number in enumerate(self.numbers):
            if number >= 0:
                found.setdefault(number, {}).setdefault(row // size, []).append(row)
        return found


class FrameRows:
    """An array of so many rows, which is made when the first frame comes.

    Args:
        count: Number of rows.
        storage: Memory to fill; fresh memory without one.
        layout: As in :func:`~spdl_media.convert_frames`, without ``"planes"``.
        values: The numbers that pixels become; ``None``: they stay as they are.
        source: For messages.
    """

    def __init__(
        self,
        count: int,
        storage: Storage | None,
        layout: Literal["NCHW", "NHWC"] | None,
        values: Values | None,
        source: str,
    ) -> None:
        self._count, self._storage, self._source = count, storage, source
        self._layout, self._values = layout, values
        self._array: Array | None = None
        self._places: list[Array] = []

    def put(self, rows: Sequence[int], frame: Any) -> None:
        """Copy a frame of FFmpeg's into rows.

        Raises:
            ConvertError: It differs from the first in size or format, or its format makes no array, or the
                storage is too small.
        """
        if self._array is None:
            name = f"the frame of row {rows[0]}"
            plan = RowPlan(frame, self._layout, name, self._source, self._values)
            self._array = new_array((self._count, *plan.shape), plan.dtype, self._storage)
            self._plan, self._places = plan, plan.places(self._array)
        self._plan.check(frame, lambda: f"that of row {rows[0]}", self._source)
        for row in rows:
            self._plan.copy(frame, self._places, row)

    def take(self, zeros: Sequence[int] = (), shape: tuple[int, ...] | None = None) -> CPUBuffer:
        """The array, some of whose rows become zeros, in this shape instead of a row of frames."""
        array = self._array
        assert array is not None, "there is a frame for each array"
        self.release()
        if zeros:
            array[list(zeros)] = 0
        return self._plan.buffer(
            array if shape is None else array.reshape(*shape, *array.shape[1:])
        )

    def release(self) -> None:
        """Let go of the memory."""
        self._array, self._places = None, []
