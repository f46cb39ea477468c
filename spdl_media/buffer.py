"""Contiguous arrays, in host memory or on a CUDA device, that any array library takes without a copy."""

from __future__ import annotations

import sys
import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeAlias, TypedDict, Unpack, cast

import numpy as np
import numpy.typing as npt

from spdl_media.cuda_driver import HISTORY
from spdl_media.geometry import Box
from spdl_media.image_frames import gallery, of_array

__all__ = ("Buffer", "CPUBuffer", "CUDABuffer", "Failure")

# One for all buffers: it is held for nanoseconds. A finalizer may meet it in its own thread, hence RLock.
RELEASING = threading.RLock()

# DLPack's numbers.
_CUDA_DEVICE, _NO_SYNC, _LEGACY_DEFAULT = 2, -1, 1

_PURPOSE = "a CUDABuffer"


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


class BufferMetadata(TypedDict, total=False):
    """Metadata of the rows of a buffer; see :class:`CPUBuffer`."""

    failures: tuple[Failure, ...]
    indices: tuple[int, ...] | None
    boxes: tuple[Box | None, ...] | None
    flips: tuple[bool, ...] | None
    colorspace: str | None
    color_range: str | None


class _Buffer:
    """An array and what is known of how it was made, wherever its memory lies."""

    __slots__ = ("__weakref__", "_array", "_kept", *BufferMetadata.__annotations__)

    def __init__(self, array: Any, **metadata: Unpack[BufferMetadata]) -> None:
        self._array = array
        # Memory that outlives release(): arrays made through the array interface hold this object alone.
        self._kept: Any = None
        self.failures = metadata.get("failures", ())
        self.indices = metadata.get("indices")
        self.boxes = metadata.get("boxes")
        self.flips = metadata.get("flips")
        self.colorspace = metadata.get("colorspace")
        self.color_range = metadata.get("color_range")

    @property
    def metadata(self) -> BufferMetadata:
        """Arguments for another buffer of the same content, beside its array."""
        given = {name: getattr(self, name) for name in BufferMetadata.__annotations__}
        return cast("BufferMetadata", given)

    def _alive(self) -> Any:
        # Read once: another thread may release the buffer meanwhile.
        array = self._array
        if array is None:
            raise ValueError(
                "this buffer was released, and its memory may hold another batch. Release a buffer after its "
                "last use"
            )
        return array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array.

        Raises:
            ValueError: The buffer lay in host memory and was released.
        """
        return cast("tuple[int, ...]", self._alive().shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of an element.

        Raises:
            ValueError: The buffer lay in host memory and was released.
        """
        return cast("np.dtype[Any]", self._alive().dtype)

    @property
    def device(self) -> str:
        """``"cpu"``, or ``"cuda:0"`` for the first CUDA device."""
        return "cpu"

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        # Named, because NumPy 1 computes with 32 bits on Windows.
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    @property
    def valid(self) -> npt.NDArray[np.bool_]:
        """Whether each entry of the first axis was loaded: False where ``on_error="fill"`` put zeros.

        Only a batch of inputs has any False. The mask itself lies in host memory.

        Raises:
            ValueError: The buffer lay in host memory and was released.
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
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._alive()  # a released buffer cannot be entered
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a buffer without dimensions")
        return self.shape[0]

    def __repr__(self) -> str:
        name = type(self).__name__
        if self._array is None:
            return f"<{name}: released>"
        where = "" if self.device == "cpu" else f" on {self.device}"
        failed = f", {len(self.failures)} failed" if self.failures else ""
        return f"<{name}: {self.shape} {self.dtype}{where}{failed}>"


class CPUBuffer(_Buffer):
    """A C-contiguous array in host memory, with what is known of how it was made.

    It speaks NumPy's array interface and DLPack, so ``np.asarray(buffer)``, ``torch.from_dlpack(buffer)``
    and ``jax.dlpack.from_dlpack(buffer)`` share its memory, and so does a row, ``buffer[i]``. The memory
    lives as long as any of them.

    Its memory goes back to its storage when the buffer and all arrays over it are gone, or earlier with
    :meth:`release`, which ``with buffer:`` calls at its end.

    Attributes:
        failures: Inputs that could not be loaded, in their order.
        indices: Position among the inputs of each row of the batch; ``None``: not a batch of inputs.
        boxes: What was cut out of each image, ``(x, y, width, height)`` of the upright one, in the order of
            the rows; ``None`` where it could not be loaded. ``None``: no crops and flips were asked for.
        flips: Whether each image was mirrored, likewise.
        colorspace: Of YUV images, the matrix between RGB and YUV: ``"bt601"`` (for both of FFmpeg's names,
            and where the file says nothing), ``"bt709"``, ``"bt2020nc"``, ... ``None``: no YUV.
        color_range: Of YUV images, ``"pc"`` (full) or ``"tv"`` (limited). ``None``: no YUV.

    Thread safety: safe; the memory is writable and shared as the caller shares it.

    See:
        https://numpy.org/doc/stable/reference/arrays.interface.html and https://dmlc.github.io/dlpack/
    """

    __slots__ = ()

    @property
    def array(self) -> npt.NDArray[Any]:
        """The memory as a NumPy array, a writable view that keeps it alive.

        Raises:
            ValueError: The buffer was released.
        """
        return cast("npt.NDArray[Any]", self._alive())

    def release(self) -> None:
        """Give the memory back now, not when this object is gone. To use the buffer afterwards is an error.

        Tensors and arrays made of the buffer stay right: while one lives, its memory is not used again.
        Those of ``np.asarray(buffer)`` hold the buffer itself, so the memory then waits for both;
        :func:`~spdl_media.to_numpy` has no such effect. A second call does nothing.
        """
        with RELEASING:
            # Out of the lock before it is dropped: what that sets free may run code of others.
            array, self._array = self._array, None
        del array

    @property
    def __array_interface__(self) -> dict[str, Any]:
        with RELEASING:
            # The taker holds this object alone, which must hold the memory even when it is released.
            self._kept = array = self.array
        return array.__array_interface__

    # The signature is NumPy's.
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:  # noqa: FBT001
        # NumPy asks for the interface above first; pandas, matplotlib and others look for this.
        array = self.array.view()
        if dtype is None or np.dtype(dtype) == array.dtype:
            return array.copy() if copy else array
        if copy is False:
            raise ValueError(f"a buffer of {array.dtype} becomes {np.dtype(dtype)} by a copy alone")
        return array.astype(dtype)

    def __getitem__(self, index: Any) -> Any:
        """Index the array as NumPy does: a view, except by lists, masks, or to one element."""
        return self.array[index]

    def __dlpack__(self, **options: Any) -> Any:
        # Of DLPack's arguments, NumPy before 2.1 knows stream alone.
        given = {name: value for name, value in options.items() if value is not None}
        return self.array.__dlpack__(**given)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def _repr_html_(self) -> str:
        # Read once: another thread may release the buffer meanwhile.
        array = self._array
        return gallery(repr(self), () if array is None else of_array(array))


class _Ready(Protocol):
    """When an array is ready, and who reads it."""

    @property
    def stream(self) -> int | None: ...
    def synchronize(self) -> None: ...
    def hand_to(self, stream: int) -> None: ...
    def keep_for(self, stream: int) -> None: ...


class CUDABuffer(_Buffer):
    """An array on a CUDA device, with what is known of how it was made.

    Work that fills it may still be under way on its stream. Whoever takes it through DLPack, such as
    ``torch.from_dlpack(buffer)``, ``cupy.from_dlpack(buffer)`` and the ``to_*`` functions, has its own stream
    wait for that, and the host waits for nothing. ``__cuda_array_interface__`` names the stream, for which
    its takers wait. :meth:`synchronize` waits on the host.

    The memory goes back to its pool when the buffer and all arrays over it are gone and the streams that took
    it have come so far; those must live as long. An array that is used on further streams afterwards is the
    taker's to look after.

    Args:
        array: What owns the memory, C-contiguous: a tensor of PyTorch, or what states its address by
            ``__cuda_array_interface__`` and DLPack.
        shape: Of the array.
        dtype: Type of an element.
        device_index: Number of the device.
        ready: When it is ready; ``None``: now.
        metadata: As of :class:`CPUBuffer`.

    Attributes:
        failures: Inputs that could not be loaded, in their order.
        indices: Position among the inputs of each row of the batch; ``None``: not a batch of inputs.
        boxes: What was cut out of each image, as :class:`CPUBuffer` has it.
        flips: Whether each was mirrored, likewise.
        colorspace: Matrix of YUV images, as :class:`CPUBuffer` has it; ``None``: no YUV.
        color_range: Range of YUV images, likewise.
        device_index: Number of the device.

    Thread safety: safe; the memory is writable and shared as the caller shares it.

    See:
        https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html and https://dmlc.github.io/dlpack/
    """

    __slots__ = ("_dtype", "_ready", "_shape", "device_index")

    def __init__(
        self,
        array: Any,
        shape: tuple[int, ...],
        dtype: npt.DTypeLike,
        device_index: int,
        *,
        ready: _Ready | None = None,
        **metadata: Unpack[BufferMetadata],
    ) -> None:
        super().__init__(array, **metadata)
        self._shape = tuple(shape)
        self._dtype = np.dtype(dtype)
        self._ready = ready
        self.device_index = device_index

    @property
    def array(self) -> Any:
        """The owner of the memory, which may not be ready yet; see the class.

        Raises:
            ValueError: The buffer was released.
        """
        return self._alive()

    @property
    def shape(self) -> tuple[int, ...]:  # noqa: D102  # as in _Buffer, as are the next two
        return self._shape

    @property
    def dtype(self) -> np.dtype[Any]:  # noqa: D102
        return self._dtype

    @property
    def device(self) -> str:  # noqa: D102
        return f"cuda:{self.device_index}"

    def synchronize(self) -> None:
        """Wait until the array is ready. Most takers need not: see the class.

        Raises:
            TransferError: This process was forked from one that had used CUDA.
        """
        HISTORY.check(_PURPOSE)
        if (ready := self._ready) is not None:
            ready.synchronize()

    def wait_on(self, stream: int) -> None:
        """Let later work on a stream find the array ready, and keep its memory for that work.

        Args:
            stream: Address of a ``cudaStream_t`` of the same device; 0 is the default stream.

        Raises:
            TransferError: This process was forked from one that had used CUDA.
        """
        HISTORY.check(_PURPOSE)
        if (ready := self._ready) is not None:
            ready.hand_to(stream)

    def release(self) -> None:
        """Give the memory back now, not when this object is gone. To use the buffer afterwards is an error.

        Arrays made of the buffer stay right: while one lives, its memory is not used again. A second call
        does nothing.
        """
        # What tells when the array is ready may keep it, too.
        self._array = self._ready = None

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        HISTORY.check(_PURPOSE)
        ready, stream = self._ready, None
        self._kept = array = self.array
        if ready is not None:
            stream = ready.stream
            # Nobody says who asks. Most work on the default stream, for which other streams wait in turn.
            ready.keep_for(_LEGACY_DEFAULT)
        # The interface asks for 0 where there are no elements.
        address = int(array.__cuda_array_interface__["data"][0]) if self.nbytes else 0
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (address, False),
            "strides": None,
            "stream": stream,
            "version": 3,
        }

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Hand the array over in DLPack's form.

        Args:
            stream: The stream that is going to read it, as DLPack numbers them: ``None`` or 1 is the default
                one, 2 that of the thread, -1 says not to wait.
            max_version: The newest form that the taker knows. What is given may be older.
            dl_device: Where it is wanted, which must be where it is.
            copy: True is refused; nothing is ever copied here.

        Raises:
            BufferError: A copy or another device is asked for.
            ValueError: The buffer was released, or ``stream`` is 0, which DLPack does not allow.
            TransferError: This process was forked from one that had used CUDA.
        """
        HISTORY.check(_PURPOSE)
        if copy:
            raise BufferError(
                "a CUDABuffer hands its own memory over, so copy=True is not possible"
            )
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(
                f"the array lies on {self.device}, and DLPack device {tuple(dl_device)} was asked for. "
                "transfer_buffer_cpu copies it to host memory"
            )
        if stream == 0:
            raise ValueError(
                "DLPack has no stream 0: 1 is the default stream, 2 that of the thread"
            )
        ready, array = self._ready, self.array
        if ready is not None:
            if stream != _NO_SYNC:
                ready.hand_to(_LEGACY_DEFAULT if stream is None else stream)
            # The taker's stream waits already, and what the owner takes for its own stream may be another.
            stream = _NO_SYNC
        with _exported_from(array, self.device_index):
            return array.__dlpack__(stream=stream)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA_DEVICE, self.device_index


def _exported_from(array: Any, index: int) -> AbstractContextManager[object]:
    """A block in which memory is handed over: PyTorch refuses while another device is the current one."""
    torch = sys.modules.get("torch")
    if not isinstance(array, getattr(torch, "Tensor", ())):  # nor while another thread imports it
        return nullcontext()
    assert torch is not None
    return cast("AbstractContextManager[object]", torch.cuda.device(index))


Buffer: TypeAlias = CPUBuffer | CUDABuffer
"""Result of ``load_*``: a buffer in host memory, or with ``cuda=`` on a device."""
