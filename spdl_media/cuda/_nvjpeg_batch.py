"""The inputs of a batch: read, decoded without DALI where that is needed, or failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

from spdl_media._loading.batch import OnError, Outcome, decode_each, to_batch
from spdl_media.buffer import Failure
from spdl_media.cuda._nvjpeg_inputs import Encoded, Reader
from spdl_media.inputs import Source

Rows: TypeAlias = "dict[int, Encoded | None]"
"""What each row is made of, by position among the inputs; ``None``: of zeros."""


class Batch:
    """The inputs of a batch on their way: read, or failed.

    Args:
        inputs: The sources.
        reader: Reads them.
        on_error: What becomes of those that fail.
        stopped: Asked before each input.
    """

    def __init__(
        self,
        inputs: Sequence[Source],
        reader: Reader,
        on_error: OnError,
        stopped: Callable[[], bool],
    ) -> None:
        self._reader = reader
        self._on_error = on_error
        self._stopped = stopped
        self._count = len(inputs)
        self._read: dict[int, Encoded] = {}
        self._failures: dict[int, Failure] = {}
        self._take(inputs, lambda src, _: reader.read(src))

    def decode_without_dali(self, bad: Sequence[int]) -> None:
        """Decode these with FFmpeg, which also says what is wrong with them."""
        failed = {position: self._read.pop(position) for position in bad}

        def decode(_: object, position: int) -> Encoded | None:
            packets = failed[position].packets if position in failed else None
            return None if packets is None else self._reader.decoded(packets)

        self._take(range(self._count), decode)

    def _take(self, inputs: Sequence[Any], read: Callable[[Any, int], Encoded | None]) -> None:
        # It asks nothing of what it collects by position.
        each = cast("Callable[..., Outcome]", decode_each)
        outcome = each(inputs, read, on_error=self._on_error, stopped=self._stopped)
        found = cast("dict[int, Encoded | None]", outcome.frames)
        self._read |= {position: one for position, one in found.items() if one is not None}
        self._failures |= {failure.index: failure for failure in outcome.failures}

    @property
    def failures(self) -> tuple[Failure, ...]:
        return tuple(self._failures[position] for position in sorted(self._failures))

    @property
    def indices(self) -> tuple[int, ...]:
        return tuple(range(self._count) if self._on_error == "fill" else sorted(self._read))

    def rows(self) -> Rows:
        """What the rows are made of.

        Raises:
            ConvertError: No input could be loaded, and no size is known for zeros.
        """
        size = self._reader.size
        if not self._read and (self._on_error != "fill" or size is None):
            # It finds the words for a batch of nothing.
            failed = Outcome({}, list(self.failures))
            to_batch(
                failed,
                self._count,
                None,
                storage=None,
                layout=None,
                fill=self._on_error == "fill",
            )
        return {position: self._read.get(position) for position in self.indices}
