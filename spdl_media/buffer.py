"""Contiguous arrays, in host memory or on a CUDA device, that other array libraries share without a copy."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypedDict, Unpack, cast

import numpy as np
import numpy.typing as npt

from spdl_media.cuda_driver import HISTORY
from spdl_media.geometry import Box
from spdl_media.handover import CUDA_DEVICE, Handover
from spdl_media.image_frames import gallery, of_array

__all__ = ("Buffer", "CPUBuffer", "CUDABuffer", "Failure")

# Numbers of streams in DLPack.
_NO_SYNC, _LEGACY_DEFAULT = -1, 1
_PURPOSE = "a CUDABuffer"
_NO_ARRAY = ". A buffer only holds an array: use to_torch(buffer), to_numpy(buffer) or the like"


@dataclass(frozen=True, slots=True)
class Failure:
    """An input of a batch that could not be loaded.

    Attributes:
        index: Position among the inputs.
        source: The input: a path, a URL, or "bytes of length n".
        error: The exception.
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
    sample_rate: int | None


class _Buffer:
    """An array in host memory or on a device, and metadata of its rows."""

    __slots__ = ("__weakref__", "_array", "_kept", *BufferMetadata.__annotations__)
    release: Callable[[], None]

    def __init__(self, array: Any, **metadata: Unpack[BufferMetadata]) -> None:
        self._array = array
        # An array that must outlive release(): consumers of the array interface hold only this object.
        self._kept: Any = None
        self.failures = metadata.get("failures", ())
        self.indices = metadata.get("indices")
        # Any instead of None, as typeshed does: whoever requested crops need not test for None.
        self.boxes: tuple[Box | Any, ...] | Any = metadata.get("boxes")
        self.flips: tuple[bool, ...] | Any = metadata.get("flips")
        self.colorspace = metadata.get("colorspace")
        self.color_range = metadata.get("color_range")
        self.sample_rate = metadata.get("sample_rate")

    @property
    def metadata(self) -> BufferMetadata:
        """Keyword arguments to make another buffer with the same metadata."""
        given = {name: getattr(self, name) for name in BufferMetadata.__annotations__}
        return cast("BufferMetadata", given)

    def _alive(self) -> Any:
        # Read the attribute only once: another thread may release the buffer meanwhile.
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
            ValueError: The buffer is one in host memory and was released.
        """
        return cast("tuple[int, ...]", self._alive().shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of an element.

        Raises:
            ValueError: The buffer is one in host memory and was released.
        """
        return cast("np.dtype[Any]", self._alive().dtype)

    @property
    def device(self) -> str:
        """``"cpu"``, or ``"cuda:0"`` for the first CUDA device."""
        return "cpu"

    @property
    def ndim(self) -> int:
        """Number of dimensions.

        Raises:
            ValueError: The buffer is one in host memory and was released.
        """
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes.

        Raises:
            ValueError: The buffer is one in host memory and was released.
        """
        # int64, because NumPy 1 computes in 32 bits on Windows.
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    @property
    def valid(self) -> npt.NDArray[np.bool_]:
        """Mask of the rows that were loaded, False where ``on_error="fill"`` has put zeros.

        Only a batch of inputs can have False. The mask is a NumPy array, also for a buffer on a device.

        Raises:
            ValueError: The buffer is one in host memory and was released.
        """
        mask = np.ones(self.shape[0] if self.shape else 1, np.bool_)
        if self.indices is not None:
            failed = {failure.index for failure in self.failures}
            mask[:] = [index not in failed for index in self.indices]
        return mask

    def __enter__(self) -> Self:
        self._alive()  # raises if the buffer was released
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a buffer without dimensions")
        return self.shape[0]

    if not TYPE_CHECKING:  # checkers would take any attribute to exist

        def __getattr__(self, name: str) -> Any:
            hint = "" if name.startswith("_") else _NO_ARRAY
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")

    def __repr__(self) -> str:
        name = type(self).__name__
        if self._array is None:
            return f"<{name}: released>"
        where = "" if self.device == "cpu" else f" on {self.device}"
        failed = f", {len(self.failures)} failed" if self.failures else ""
        return f"<{name}: {self.shape} {self.dtype}{where}{failed}>"


class CPUBuffer(_Buffer):
    """A C-contiguous array in host memory, with metadata of its rows.

    It supports NumPy's array interface and DLPack: ``np.asarray(buffer)``, ``torch.from_dlpack(buffer)``
    and ``jax.dlpack.from_dlpack(buffer)`` share its memory, and so does a row, ``buffer[i]``. Each of them
    keeps the memory alive.

    The memory goes back to its storage when the buffer and all arrays that share it are gone. To give it
    back earlier, call :meth:`release`, or use ``with buffer:``, which releases the buffer at its end.

    Attributes:
        failures: Inputs that could not be loaded, in the order of the inputs.
        indices: For each row of a batch, the position of its input; ``None``: not a batch of inputs.
        boxes: For each row, the crop ``(x, y, width, height)`` of the upright image, or ``None`` if the image
            could not be loaded. ``None`` as a whole: neither crops nor flips were requested.
        flips: For each row, whether the image was mirrored. ``None``: as for ``boxes``.
        colorspace: Matrix between RGB and YUV, for YUV images: ``"bt601"`` (for both of FFmpeg's names, and
            if the file states none), ``"bt709"``, ``"bt2020nc"``, ... ``None``: not YUV.
        color_range: ``"pc"`` (full) or ``"tv"`` (limited), for YUV images. ``None``: not YUV.
        sample_rate: Samples per second and channel, for audio. ``None``: not audio.

    Thread safety: safe. The memory is writable; threads that share it must synchronize their access.

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
        """Give the memory back now instead of when this object is gone. Using the buffer then is an error.

        Tensors and arrays that share the buffer's memory stay valid: while one exists, the memory is not
        reused. An array of ``np.asarray(buffer)`` refers to the buffer itself, so the memory is kept until
        both are gone; :func:`~spdl_media.to_numpy` has no such effect. A second call does nothing.
        """
        self._array = None

    @property
    def __array_interface__(self) -> dict[str, Any]:
        # The consumer refers only to this object, which must keep the memory even after release().
        self._kept = array = self.array
        return array.__array_interface__

    # The signature is NumPy's.
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:  # noqa: FBT001
        # NumPy prefers the interface above; pandas, matplotlib and others call this.
        array = self.array.view()
        if dtype is None or np.dtype(dtype) == array.dtype:
            return array.copy() if copy else array
        if copy is False:
            raise ValueError(f"a buffer of {array.dtype} becomes {np.dtype(dtype)} by a copy alone")
        return array.astype(dtype)

    def __getitem__(self, index: Any) -> Any:
        """Index the array as NumPy does: a view, or a copy for lists, masks and single elements."""
        return self.array[index]

    def __dlpack__(self, **options: Any) -> Any:
        # Leave out what is None: NumPy before 2.1 knows only the argument stream.
        given = {name: value for name, value in options.items() if value is not None}
        return self.array.__dlpack__(**given)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def _repr_html_(self) -> str:
        # First, because this makes the array of an ImageBuffer.
        caption = repr(self)
        # Read the attribute only once: another thread may release the buffer meanwhile.
        array = self._array
        return gallery(caption, () if array is None else of_array(array))


class CUDABuffer(_Buffer):
    """An array on a CUDA device, with metadata of its rows.

    The work that fills the array may still be running on its stream. If the array is shared by DLPack, as by
    ``torch.from_dlpack(buffer)``, ``cupy.from_dlpack(buffer)`` and the ``to_*`` functions, the consumer's
    stream waits for that work, and the host does not wait. ``__cuda_array_interface__`` states the stream on
    which its consumers must wait. :meth:`synchronize` waits on the host.

    The memory goes back to its pool when the buffer and all arrays that share it are gone, and all work that
    was queued until then on the consumers' streams has finished; these streams must exist until then. If a
    consumer uses the array on further streams, it must keep the array alive itself.

    Args:
        array: Owner of the C-contiguous memory: a PyTorch tensor, or an object with
            ``__cuda_array_interface__`` and DLPack.
        shape: Shape of the array.
        dtype: Type of an element.
        device_index: Index of the device.
        ready: Tracks when the array is ready; ``None``: it is ready.
        metadata: As for :class:`CPUBuffer`.

    Attributes:
        failures: Inputs that could not be loaded, in the order of the inputs.
        indices: For each row of a batch, the position of its input; ``None``: not a batch of inputs.
        boxes: For each row, the crop of the image, as for :class:`CPUBuffer`.
        flips: For each row, whether the image was mirrored, as for :class:`CPUBuffer`.
        colorspace: Matrix of YUV images, as for :class:`CPUBuffer`; ``None``: not YUV.
        color_range: Range of YUV images, as for :class:`CPUBuffer`; ``None``: not YUV.
        sample_rate: Sample rate of audio in Hz; ``None``: not audio.
        device_index: Index of the device.

    Thread safety: safe. The memory is writable; threads that share it must synchronize their access.

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
        ready: Handover | None = None,
        **metadata: Unpack[BufferMetadata],
    ) -> None:
        super().__init__(array, **metadata)
        self._shape = tuple(shape)
        self._dtype = np.dtype(dtype)
        self._ready = ready
        self.device_index = device_index

    @property
    def array(self) -> Any:
        """The owner of the memory. The array may not be ready yet; see the class.

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
        """Wait on the host until the array is ready. Most consumers need not call this; see the class.

        Raises:
            TransferError: This process was forked from one that had used CUDA.
        """
        HISTORY.check(_PURPOSE)
        if (ready := self._ready) is not None:
            ready.event.synchronize()

    def wait_on(self, stream: int) -> None:
        """Make later work on a stream wait until the array is ready, and keep the memory for that work.

        Args:
            stream: Address of a ``cudaStream_t`` of the same device; 0 is the default stream.

        Raises:
            TransferError: This process was forked from one that had used CUDA.
        """
        HISTORY.check(_PURPOSE)
        if (ready := self._ready) is not None:
            ready.hand_to(stream)

    def release(self) -> None:
        """Give the memory back now instead of when this object is gone. Using the buffer then is an error.

        Arrays that share the buffer's memory stay valid: while one exists, the memory is not reused. A second
        call does nothing.
        """
        # _ready may refer to the array, too.
        self._array = self._ready = None

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        HISTORY.check(_PURPOSE)
        ready, stream = self._ready, None
        self._kept = array = self.array
        if ready is not None:
            stream = ready.stream
            # The consumer's stream is unknown. Most use the default stream, which other streams wait for.
            ready.used_on(_LEGACY_DEFAULT)
        # The interface demands address 0 for an array without elements.
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
        """Export the array as a DLPack capsule.

        Args:
            stream: The stream that will read the array, numbered as in DLPack: ``None`` or 1 is the legacy
                default stream, 2 the per-thread one, -1 means not to wait.
            max_version: The newest DLPack version that the consumer supports. The capsule may be older.
            dl_device: The requested device, which must be that of the array.
            copy: ``True`` is refused: the array is never copied.

        Raises:
            BufferError: A copy or another device is requested.
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
            # The consumer's stream waits already, and the owner would wait on a stream that may be another.
            stream = _NO_SYNC
        torch: Any = sys.modules.get("torch")
        # PyTorch exports on the current device only. It has no Tensor while another thread still imports it.
        is_tensor = isinstance(array, getattr(torch, "Tensor", ()))
        with torch.cuda.device(self.device_index) if is_tensor else nullcontext():
            return array.__dlpack__(stream=stream)

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA_DEVICE, self.device_index


Buffer: TypeAlias = CPUBuffer | CUDABuffer
"""Result of the ``load_*`` functions: a buffer in host memory, or with ``cuda=`` on a device."""
