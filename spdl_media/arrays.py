"""Buffers as arrays of other libraries, without a copy, one by one or all of a batch.

Batches are nested lists, tuples, mappings and dataclasses. Containers are made again with other leaves,
without asking their constructors.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from spdl_media._optional import require
from spdl_media.buffer import Buffer, CPUBuffer, CUDABuffer
from spdl_media.convert import NUMBER_KINDS

__all__ = ("to_cupy", "to_jax", "to_numba", "to_numpy", "to_torch")

Array: TypeAlias = npt.NDArray[Any]
Key: TypeAlias = str | int


def to_numpy(batch: Any) -> Any:
    """View a buffer or an array as a NumPy array, or all of them in a batch.

    Args:
        batch: A buffer, an array, or a tuple, named tuple, list, mapping or dataclass (such as a
            :class:`~spdl_media.Clip`) of such, nested in any way. All else in it is passed on.

    Returns:
        A view of the buffer's memory, which it keeps alive; writable, unless it is of a read-only array. Of a
        batch the same containers with such views; a dataclass is made without running its ``__init__``.

    Raises:
        TypeError: ``batch`` is none of these, or a buffer lies on a device.
        ValueError: A buffer was released.

    Thread safety: safe.
    """
    return _mapped(batch, _to_numpy, "to_numpy")


def _to_numpy(buffer: Buffer | Array) -> Array:
    if isinstance(buffer, CUDABuffer):
        raise TypeError(
            f"to_numpy takes a CPUBuffer, and this one lies on {buffer.device}. transfer_buffer_cpu copies it"
        )
    # A view of its own: its shape may be set in place without a change of the buffer's.
    return _array_of(buffer).view()


def to_torch(batch: Any) -> Any:
    """View a buffer or a NumPy array as a PyTorch tensor, or all of them in a batch.

    Args:
        batch: A buffer, an array, or containers of such, as for :func:`to_numpy`. All else in it, tensors
            and arrays of text included, is passed on.

    Returns:
        A tensor over the buffer's memory, which it keeps alive: on the CPU, or on the buffer's device. There
        PyTorch's current stream waits for the memory to be ready, and the host does not. PyTorch has no
        read-only tensors: do not write to that of a read-only array, of which PyTorch warns once. Of a batch
        the same containers, which ``torch.utils.data.default_collate`` takes (but no dataclasses).

    Raises:
        MissingDependencyError: torch is not installed.
        TypeError: ``batch`` is none of these, or PyTorch has no such type.
        ValueError: A buffer was released, or an array has negative strides and must be copied.

    Thread safety: safe.
    """
    torch: Any = require("torch", "to_torch")

    def convert(buffer: Buffer | Array) -> Any:
        if isinstance(buffer, np.ndarray):
            # Negative strides in DLPack end the process.
            return torch.from_numpy(buffer)
        if isinstance(buffer, CUDABuffer) and isinstance(buffer.array, torch.Tensor):
            # PyTorch's own memory, so that record_stream works for whoever uses it on further streams.
            buffer.wait_on(torch.cuda.current_stream(buffer.device_index).cuda_stream)
            return buffer.array.detach()
        return torch.from_dlpack(buffer)

    return _mapped(batch, convert, "to_torch")


def to_cupy(buffer: CUDABuffer) -> Any:
    """View a buffer on a CUDA device as a CuPy array.

    Returns:
        An array over the buffer's memory, which it keeps alive. CuPy's current stream waits for the memory to
        be ready, and the host does not.

    Raises:
        MissingDependencyError: cupy is not installed.
        TypeError: ``buffer`` is not a buffer, or lies in host memory.
        ValueError: The buffer was released.

    Thread safety: safe.
    """
    cupy: Any = require("cupy", "to_cupy")
    if not isinstance(buffer, CUDABuffer):
        raise TypeError(
            f"to_cupy takes a CUDABuffer, not {type(buffer).__name__}. transfer_buffer copies a buffer to a "
            "device"
        )
    # CuPy's current stream is that of its current device.
    with cupy.cuda.Device(buffer.device_index):
        return cupy.from_dlpack(buffer)


def to_jax(batch: Any) -> Any:
    """View a buffer as a JAX array, or make one of a NumPy array, or of all of them in a batch.

    Args:
        batch: A buffer, an array, or containers of such, as for :func:`to_numpy`. All else in it, arrays of
            text included, is passed on.

    Returns:
        An array over the buffer's memory, which it keeps alive, on the CPU or on the buffer's device. JAX
        takes it for constant: do not write to the buffer while it lives. JAX copies a NumPy array that
        does not begin on 64 bytes, as buffers do. Of a batch the same containers, in which labels and other
        64-bit numbers in host memory are copied to 32 bits, JAX's own, unless it allows 64.

    Raises:
        MissingDependencyError: jax is not installed.
        TypeError: ``batch`` is none of these, or JAX, with 64-bit types switched off as they are at first,
            would cut it to 32 bits: a single buffer, or integers in a batch that 32 bits do not hold.
        ValueError: A buffer was released.

    Thread safety: safe.
    """
    jax = require("jax", "to_jax")
    is_batch = fields_of(batch) is not None

    def convert(buffer: Buffer | Array) -> Any:
        dtype = jax.dtypes.canonicalize_dtype(buffer.dtype)
        if dtype != buffer.dtype:
            cut = _cut_to(dtype, buffer) if is_batch else None
            if cut is None:
                raise TypeError(
                    f"JAX would cut {buffer.dtype} to {dtype}, and copy. Allow 64 bits: "
                    "jax.config.update('jax_enable_x64', True); or make the buffer of 32 bits: "
                    "convert_array(dtype=)"
                )
            buffer = cut
        if isinstance(buffer, np.ndarray):
            return jax.numpy.asarray(buffer)
        return jax.dlpack.from_dlpack(buffer)

    return _mapped(batch, convert, "to_jax")


def _cut_to(dtype: Any, buffer: Buffer | Array) -> Array | None:
    """A copy of half the bits; ``None`` where that changes integers, or lies on a device."""
    if isinstance(buffer, CUDABuffer):
        return None
    array = _array_of(buffer)
    cut = array.astype(dtype)
    return cut if array.dtype.kind in "fc" or np.array_equal(cut, array) else None


def to_numba(buffer: Buffer | Array) -> Any:
    """View a buffer or an array as what Numba compiles for: an array of NumPy or of ``numba.cuda``.

    Returns:
        A view of the buffer's memory, which it keeps alive; writable, unless it is of a read-only array. On a
        device Numba waits on the host until it is ready.

    Raises:
        MissingDependencyError: The buffer lies on a device, and numba is not installed.
        TypeError: ``buffer`` is neither a buffer nor an array.
        ValueError: The buffer was released.

    Thread safety: safe.
    """
    if isinstance(buffer, CUDABuffer):
        cuda: Any = require("numba", "to_numba of a buffer on a device")
        with cuda.gpus[buffer.device_index]:
            return cuda.as_cuda_array(buffer)
    return _array_of(_checked(buffer, "to_numba")).view()


def _mapped(batch: Any, convert: Callable[[Any], Any], function: str) -> Any:
    """Convert a buffer or array, or those in a batch."""
    if fields_of(batch) is None:
        return convert(_checked(batch, function))
    return map_nested(batch, lambda value: convert(value) if _is_numeric(value) else value)


def _is_numeric(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.dtype.kind in NUMBER_KINDS
    return isinstance(value, CPUBuffer | CUDABuffer)


def _array_of(buffer: CPUBuffer | Array) -> Array:
    return buffer if isinstance(buffer, np.ndarray) else buffer.array


def _checked(buffer: Any, function: str) -> Any:
    if not isinstance(buffer, CPUBuffer | CUDABuffer | np.ndarray):
        raise TypeError(
            f"{function} takes a CPUBuffer, a CUDABuffer or a NumPy array, not {type(buffer).__name__}. "
            "convert_frames and convert_array make a buffer"
        )
    return buffer


def map_nested(value: Any, move: Callable[[Any], Any]) -> Any:
    """Apply a function to the leaves of nested lists, tuples, mappings and dataclasses.

    Returns:
        Containers of the same kinds; a dict for a mapping of the user's that copies no items. A dataclass is
        a copy whose fields are set, without its ``__init__``.
    """
    fields = fields_of(value)
    if fields is None:
        return move(value)
    return rebuilt(value, {key: map_nested(one, move) for key, one in fields.items()})


def rebuilt(value: Any, moved: dict[Key, Any]) -> Any:
    """A container like this one, of other values for its fields."""
    if isinstance(value, list):
        return type(value)(list(moved.values()))
    if isinstance(value, MutableMapping):
        # A copy knows more than its items: a defaultdict its factory, a class of the user's its fields.
        copies = isinstance(value, dict) or hasattr(value, "__copy__")
        like: Any = copy.copy(value) if copies else {}
        if getattr(value, "__dict__", None) is value:  # its items are its attributes
            like.__dict__ = like
        for key, one in moved.items():  # update() of a Counter adds
            like[key] = one
        return like
    if isinstance(value, Mapping):
        return type(value)(moved)  # type: ignore[call-arg]  # those of Python take a dict
    return with_fields(value, moved)


def fields_of(value: Any) -> dict[Key, Any] | None:
    """The fields of a structure by name, key or index, without those of a dataclass that are not set.

    Returns:
        ``None``: it is a plain value.
    """
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple | list):
        return dict(zip(getattr(value, "_fields", range(len(value))), value, strict=True))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in dataclasses.fields(value))
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    return None


def with_fields(value: Any, fields: Mapping[Key, Any]) -> Any:
    """A tuple or dataclass like this one, of other values."""
    if isinstance(value, tuple):
        # Without its own __new__, which may take other arguments.
        return tuple.__new__(type(value), fields.values())
    # Without its __init__, which may check or compute. This sets the fields of frozen ones too.
    result = copy.copy(value)
    for name, one in fields.items():
        object.__setattr__(result, str(name), one)
    return result
