"""A contiguous array that any array library takes without a copy."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

__all__ = ("CPUBuffer", "Failure")

# One for all buffers: it is held for nanoseconds. A finalizer may meet it in its own thread, hence RLock.
_RELEASING = threading.RLock()


@dataclass(frozen=True, slots=True)
class Failure:
    """An input of a batch that could not be loaded.

    Attributes:
        index: Its position among the inputs.
        source: What it was: a path, a URL, or "bytes of length n".
        error: Why.
    """

    index: int
    source: str
    error: BaseException


class CPUBuffer:
    """A C-contiguous array in host memory, with what is known of how it was made.

    It speaks NumPy's array interface and DLPack, so ``np.asarray(buffer)``, ``torch.from_dlpack(buffer)``
    and ``jax.dlpack.from_dlpack(buffer)`` share its memory. The memory lives as long as any of them.

    Its memory goes back to its storage when the buffer and all arrays over it are gone, or earlier with
    :meth:`release`, which ``with buffer:`` calls at its end.

    Attributes:
        failures: Inputs that could not be loaded, in their order.
        indices: Position among the inputs of each row of the batch; ``None``: not a batch of inputs.
        colorspace: Of YUV pictures, the matrix between RGB and YUV: ``"bt601"`` (for both of FFmpeg's names,
            and where the file says nothing), ``"bt709"``, ``"bt2020nc"``, ... ``None``: no YUV.
        color_range: Of YUV pictures, ``"pc"`` (full) or ``"tv"`` (limited). ``None``: no YUV.

    Thread safety: safe; the memory is writable and shared as the caller shares it.

    See:
        https://numpy.org/doc/stable/reference/arrays.interface.html and https://dmlc.github.io/dlpack/
    """

    __slots__ = (
        "__weakref__",
        "_array",
        "_kept",
        "color_range",
        "colorspace",
        "failures",
        "indices",
    )

    def __init__(
        self,
        array: npt.NDArray[Any],
        *,
        failures: tuple[Failure, ...] = (),
        indices: tuple[int, ...] | None = None,
        colorspace: str | None = None,
        color_range: str | None = None,
    ) -> None:
        self._array: npt.NDArray[Any] | None = array
        # Memory that outlives release(): arrays made through the array interface hold this object alone.
        self._kept: npt.NDArray[Any] | None = None
        self.failures = failures
        self.indices = indices
        self.colorspace = colorspace
        self.color_range = color_range

    @property
    def array(self) -> npt.NDArray[Any]:
        """The memory as a NumPy array, a writable view that keeps it alive."""
        array = self._array
        if array is None:
            raise ValueError(
                "this buffer was released, and its memory may hold another batch. Release a buffer after its "
                "last use"
            )
        return array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.array.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of an element."""
        return self.array.dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return self.array.ndim

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.array.nbytes

    @property
    def device(self) -> str:
        """Always ``"cpu"``."""
        return "cpu"

    @property
    def valid(self) -> npt.NDArray[np.bool_]:
        """Whether each entry of the first axis was loaded: False where ``on_error="fill"`` put zeros.

        Only a batch of inputs has any False.
        """
        mask = np.ones(self.shape[0] if self.shape else 1, np.bool_)
        if self.indices is not None:
            failed = {failure.index for failure in self.failures}
            mask[:] = [index not in failed for index in self.indices]
        return mask

    @property
    def is_released(self) -> bool:
        """Whether :meth:`release` was called."""
        return self._array is None

    def release(self) -> None:
        """Give the memory back now, not when this object is gone. To use the buffer afterwards is an error.

        Tensors and arrays made of the buffer stay right: while one lives, its memory is not used again.
        Those of ``np.asarray(buffer)`` hold the buffer itself, so the memory then waits for both;
        :func:`~spdl_media.to_numpy` has no such effect. A second call does nothing.
        """
        with _RELEASING:
            # Out of the lock before it is dropped: what that sets free may run code of others.
            array, self._array = self._array, None
        del array

    def __enter__(self) -> Self:
        self.array  # noqa: B018  # a released buffer cannot be entered
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    @property
    def __array_interface__(self) -> dict[str, Any]:
        with _RELEASING:
            self._kept = self.array
        return self._kept.__array_interface__

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        options = {
            "stream": stream,
            "max_version": max_version,
            "dl_device": dl_device,
            "copy": copy,
        }
        # NumPy before 2.1 knows the first alone.
        given = {name: value for name, value in options.items() if value is not None}
        return self.array.__dlpack__(**given)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __len__(self) -> int:
        return len(self.array)

    def __repr__(self) -> str:
        if self._array is None:
            return "<CPUBuffer: released>"
        failed = f", {len(self.failures)} failed" if self.failures else ""
        return f"<CPUBuffer: {self.shape} {self.dtype}{failed}>"
