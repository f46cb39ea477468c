"""Buffers as arrays of other libraries, without a copy."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from spdl_media._optional import require
from spdl_media.buffer import Buffer, CPUBuffer, CUDABuffer

__all__ = ("to_cupy", "to_jax", "to_numba", "to_numpy", "to_torch")

Array: TypeAlias = npt.NDArray[Any]


def to_numpy(buffer: CPUBuffer | Array) -> Array:
    """View a buffer or an array as a NumPy array.

    Returns:
        A view of the buffer's memory, which it keeps alive; writable, unless it is of a read-only array.

    Raises:
        TypeError: ``buffer`` is neither a buffer nor an array, or lies on a device.
        ValueError: The buffer was released.

    Thread safety: safe.
    """
    if isinstance(buffer, CUDABuffer):
        raise TypeError(
            f"to_numpy takes a CPUBuffer, and this one lies on {buffer.device}. transfer_buffer_cpu copies it"
        )
    # A view of its own: its shape may be set in place without a change of the buffer's.
    return _array_of(buffer, "to_numpy").view()


def to_torch(buffer: Buffer | Array) -> Any:
    """View a buffer or a NumPy array as a PyTorch tensor.

    Returns:
        A tensor over the buffer's memory, which it keeps alive: on the CPU, or on the buffer's device. There
        PyTorch's current stream waits for the memory to be ready, and the host does not. PyTorch has no
        read-only tensors: do not write to that of a read-only array, of which PyTorch warns once.

    Raises:
        MissingDependencyError: torch is not installed.
        TypeError: ``buffer`` is neither a buffer nor an array, or PyTorch has no such type.
        ValueError: The buffer was released, or the array has negative strides and must be copied.

    Thread safety: safe.
    """
    torch: Any = require("torch", "to_torch")
    if isinstance(buffer, np.ndarray):
        # Negative strides in DLPack end the process.
        return torch.from_numpy(buffer)
    checked = _checked(buffer, "to_torch")
    if isinstance(checked, CUDABuffer) and isinstance(checked.array, torch.Tensor):
        # PyTorch's own memory, so that record_stream works for whoever uses it on further streams.
        checked.wait_on(torch.cuda.current_stream(checked.device_index).cuda_stream)
        return checked.array.detach()
    return torch.from_dlpack(checked)


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


def to_jax(buffer: Buffer | Array) -> Any:
    """View a buffer as a JAX array, or make one of a NumPy array.

    Returns:
        An array over the buffer's memory, which it keeps alive, on the CPU or on the buffer's device. JAX
        takes it for constant: do not write to the buffer while it lives. JAX copies a NumPy array that
        does not begin on 64 bytes, as buffers do.

    Raises:
        MissingDependencyError: jax is not installed.
        TypeError: ``buffer`` is neither a buffer nor an array, or JAX, with 64-bit types switched off as they
            are at first, would cut its values to 32 bits.
        ValueError: The buffer was released.

    Thread safety: safe.
    """
    jax = require("jax", "to_jax")
    dtype = buffer.dtype if isinstance(buffer, np.ndarray) else _checked(buffer, "to_jax").dtype
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise TypeError(
            f"JAX would cut {dtype} to {jax.dtypes.canonicalize_dtype(dtype)}, and copy. Allow 64 bits: "
            "jax.config.update('jax_enable_x64', True); or make the buffer of 32 bits: convert_array(dtype=)"
        )
    if isinstance(buffer, np.ndarray):
        return jax.numpy.asarray(buffer)
    return jax.dlpack.from_dlpack(buffer)


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
    return _array_of(buffer, "to_numba").view()


def _array_of(buffer: CPUBuffer | Array, function: str) -> Array:
    return buffer if isinstance(buffer, np.ndarray) else _checked(buffer, function).array


def _checked(buffer: Any, function: str) -> Buffer:
    if not isinstance(buffer, CPUBuffer | CUDABuffer):
        raise TypeError(
            f"{function} takes a CPUBuffer, a CUDABuffer or a NumPy array, not {type(buffer).__name__}. "
            "convert_frames and convert_array make a buffer"
        )
    return buffer
