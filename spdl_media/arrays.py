"""View buffers as arrays of other libraries without a copy: one buffer, or all in a batch.

A batch consists of nested lists, tuples, mappings and dataclasses. The result has new ones: dictionaries for
mappings, and the same classes of named tuples and dataclasses, whose ``__init__`` is not run.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from spdl_media._optional import require
from spdl_media.buffer import Buffer, CPUBuffer, CUDABuffer
from spdl_media.convert import NUMBER_KINDS
from spdl_media.formats import Array

__all__ = ("to_cupy", "to_jax", "to_numba", "to_numpy", "to_torch")

Key: TypeAlias = str | int


def to_numpy(batch: Any) -> Any:
    """View a buffer or an array as a NumPy array, or all of them in a batch.

    Args:
        batch: A buffer, an array, or a batch of them: tuples, named tuples, lists, mappings and dataclasses
            (such as a :class:`~spdl_media.Clip`), nested to any depth. Other values in a batch are returned
            unchanged.

    Returns:
        A view of the buffer's memory, which it keeps alive. It is writable, unless it views a read-only
        array. For a batch, new containers with such views: a dict for a mapping, a list for a list, a tuple
        for a tuple. Named tuples and dataclasses keep their class; ``__init__`` is not run.

    Raises:
        TypeError: ``batch`` is none of these, or a buffer is on a device.
        ValueError: A buffer was released.

    Thread safety: safe.
    """
    return _mapped(batch, _to_numpy, "to_numpy")


def _to_numpy(buffer: Buffer | Array) -> Array:
    if isinstance(buffer, CUDABuffer):
        raise TypeError(
            f"to_numpy takes a CPUBuffer, and this one lies on {buffer.device}. transfer_buffer_cpu copies it"
        )
    # A new view, so that setting its shape in place does not change the buffer's.
    return _array_of(buffer).view()


def to_torch(batch: Any) -> Any:
    """View a buffer or a NumPy array as a PyTorch tensor, or all of them in a batch.

    Args:
        batch: A buffer, an array, or a batch of them, as for :func:`to_numpy`. Other values in a batch,
            including tensors and arrays of text, are returned unchanged.

    Returns:
        A tensor that shares the buffer's memory and keeps it alive, on the CPU or on the buffer's device. On
        a device, PyTorch's current stream waits until the memory is ready; the host does not wait. PyTorch
        has no read-only tensors: do not write to the tensor of a read-only array, for which PyTorch warns
        once. For a batch, containers as for :func:`to_numpy`; ``torch.utils.data.default_collate`` accepts
        all of them but dataclasses.

    Raises:
        MissingDependencyError: torch is not installed.
        TypeError: ``batch`` is none of these, or PyTorch does not have the dtype.
        ValueError: A buffer was released, or an array has negative strides and must be copied first.

    Thread safety: safe.
    """
    torch: Any = require("torch", "to_torch")

    def convert(buffer: Buffer | Array) -> Any:
        if isinstance(buffer, np.ndarray):
            # Not by DLPack, in which negative strides crash the process.
            return torch.from_numpy(buffer)
        if isinstance(buffer, CUDABuffer) and isinstance(buffer.array, torch.Tensor):
            # The original tensor, so that record_stream works for users of more streams.
            buffer.wait_on(torch.cuda.current_stream(buffer.device_index).cuda_stream)
            return buffer.array.detach()
        return torch.from_dlpack(buffer)

    return _mapped(batch, convert, "to_torch")


def to_cupy(buffer: CUDABuffer) -> Any:
    """View a buffer on a CUDA device as a CuPy array.

    Returns:
        An array that shares the buffer's memory and keeps it alive. CuPy's current stream waits until the
        memory is ready; the host does not wait.

    Raises:
        MissingDependencyError: cupy is not installed.
        TypeError: ``buffer`` is not a buffer, or is in host memory.
        ValueError: The buffer was released.

    Thread safety: safe.
    """
    cupy: Any = require("cupy", "to_cupy")
    if not isinstance(buffer, CUDABuffer):
        raise TypeError(
            f"to_cupy takes a CUDABuffer, not {type(buffer).__name__}. transfer_buffer copies a buffer to a "
            "device"
        )
    # Switch the device first: CuPy's current stream is that of the current device.
    with cupy.cuda.Device(buffer.device_index):
        return cupy.from_dlpack(buffer)


def to_jax(batch: Any) -> Any:
    """View a buffer as a JAX array, or convert a NumPy array to one, or all of them in a batch.

    Args:
        batch: A buffer, an array, or a batch of them, as for :func:`to_numpy`. Other values in a batch,
            including arrays of text, are returned unchanged.

    Returns:
        An array that shares the buffer's memory and keeps it alive, on the CPU or on the buffer's device. JAX
        assumes that it is constant: do not write to the buffer while the array is in use. JAX copies a NumPy
        array that is not aligned to 64 bytes, as buffers are. For a batch, containers as for
        :func:`to_numpy`. Unless JAX's 64-bit types are enabled, labels and other 64-bit numbers of a batch in
        host memory are copied to 32 bits, JAX's default.

    Raises:
        MissingDependencyError: jax is not installed.
        TypeError: ``batch`` is none of these, or JAX, without 64-bit types enabled, would truncate it to 32
            bits: a single 64-bit buffer, or integers of a batch that do not fit 32 bits.
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
    """Return a copy of a narrower dtype; ``None`` if that changes integers, or the buffer is on a device."""
    if isinstance(buffer, CUDABuffer):
        return None
    array = _array_of(buffer)
    cut = array.astype(dtype)
    return cut if array.dtype.kind in "fc" or np.array_equal(cut, array) else None


def to_numba(buffer: Buffer | Array) -> Any:
    """View a buffer or an array as an array for Numba: a NumPy array, or on a device one of ``numba.cuda``.

    Returns:
        A view of the buffer's memory, which it keeps alive. It is writable, unless it views a read-only
        array. For a buffer on a device, Numba blocks the host until the memory is ready.

    Raises:
        MissingDependencyError: The buffer is on a device, and numba is not installed.
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
        Containers as :func:`rebuilt` makes them.

    Raises:
        RecursionError: A container holds itself.
        Exception: Any class; ``move`` raises it.
    """
    fields = fields_of(value)
    if fields is None:
        return move(value)
    return rebuilt(value, {key: map_nested(one, move) for key, one in fields.items()})


def rebuilt(value: Any, fields: dict[Key, Any]) -> Any:
    """Return a container like this one, with other values for its fields.

    Returns:
        A dict for a mapping, a list for a list, a tuple for a tuple. Named tuples and dataclasses keep their
        class; ``__init__`` is not run.

    Raises:
        Exception: Any class; the dataclass raises it when it is copied.
    """
    if isinstance(value, Mapping):
        return fields
    if isinstance(value, list):
        return list(fields.values())
    if isinstance(value, tuple):
        # Not by the class's own __new__, which may take other arguments.
        return tuple.__new__(type(value) if hasattr(value, "_fields") else tuple, fields.values())
    # Not by its __init__, which may check or compute. object.__setattr__ also sets fields of frozen classes.
    result = copy.copy(value)
    for name, one in fields.items():
        object.__setattr__(result, str(name), one)
    return result


def fields_of(value: Any) -> dict[Key, Any] | None:
    """Return the fields of a container by name, key or index; ``None`` for a plain value.

    Fields of a dataclass that are not set are left out.

    Raises:
        Exception: Any class; the mapping or an attribute raises it.
    """
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple | list):
        return dict(zip(getattr(value, "_fields", range(len(value))), value, strict=True))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in dataclasses.fields(value))
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    return None
