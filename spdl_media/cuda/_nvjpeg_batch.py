"""The inputs of a batch: read, decoded without DALI where that is needed, or failed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from spdl_media._arguments import OnError
from spdl_media._batch import none_loaded
from spdl_media._decode_each import decode_each
from spdl_media.buffer import Failure
from spdl_media.inputs import Source


class Picture(Protocol):
    """What is asked of an image, however far it is decoded."""

    @property
    def source(self) -> str: ...


P = TypeVar("P", bound=Picture)

Rows: TypeAlias = "dict[int, P | None]"
"""What each row is made of, by position among the inputs; ``None``: of zeros."""


class Batch(Generic[P]):
    """The inputs of a batch on their way to a device: read, or failed.

    Args:
        inputs: The sources.
        on_error: What becomes of those that fail.
        stopped: Asked before each input.
        size: Width and height of every result, if both are known.
        is_single: It is one image, whose errors need not say which.
    """

    def __init__(
        self,
        inputs: Sequence[Source],
        on_error: OnError,
        stopped: Callable[[], bool],
        size: tuple[int, int] | None,
        *,
        is_single: bool = False,
    ) -> None:
        self._inputs = inputs
        self._on_error: OnError = on_error
        self._stopped = stopped
        self._size = size
        self._is_single = is_single
        self._read: dict[int, P] = {}
        self.failures: list[Failure] = []

    def add(self, position: int, picture: P | None, /) -> None:
        """Take what the input at a position was decoded to."""
        if picture is not None:
            self._read[position] = picture

    def read(self, read: Callable[[Source], P]) -> None:
        """Read all inputs.

        Raises:
            MediaError: One fails, and is to be raised. The message names it and its position.
        """
        self._take(self._inputs, lambda src, _: read(src))

    def decode_again(self, bad: Iterable[int], decode: Callable[[P], P]) -> None:
        """Replace the images at these positions, or let them fail.

        Raises:
            MediaError: As :meth:`read`.
        """
        again = {position: self._read.pop(position) for position in bad}

        def decode_or_keep(position: int, _: int) -> P | None:
            found = again.get(position)
            return self._read.get(position) if found is None else decode(found)

        # All positions, which count in messages.
        self._take(range(len(self._inputs)), decode_or_keep)

    def _take(self, inputs: Sequence[Any], decode: Callable[[Any, int], P | None]) -> None:
        if self._is_single:
            self.add(0, decode(inputs[0], 0))
            return
        decode_each(inputs, decode, self, on_error=self._on_error, stopped=self._stopped)
        self.failures.sort(key=lambda failure: failure.index)

    @property
    def indices(self) -> tuple[int, ...]:
        """Positions among the inputs of the rows."""
        return tuple(range(len(self._inputs)) if self._on_error == "fill" else sorted(self._read))

    def rows(self) -> Rows[P]:
        """What the rows are made of.

        Raises:
            ConvertError: No input could be loaded, and no size is known for zeros.
        """
        fill = self._on_error == "fill"
        if not self._read and (not fill or self._size is None):
            raise none_loaded(self.failures, len(self._inputs), fill=fill)
        return {position: self._read.get(position) for position in self.indices}
