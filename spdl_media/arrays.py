"""Buffers as arrays of other libraries, without a copy."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from spdl_media._optional import require
from spdl_media.buffer import Buffer, CPUBuffer, CUDABuffer

__all__ = ("to_cupy", "to_jax", "to_numba", "to_numpy", "to_torch")


def to_numpy(buffer: CPUBuffer) -> npt.NDArray[Any]:
    """View a buffer as a NumPy array.

    Returns:
        A writable view of the buffer's memory, which it keeps alive.

    Raises:
        TypeError: ``buffer`` is not a buffer, or lies on a device.
        ValueError: The buffer was released.

    Thread safety: safe.
    """
    if isinstance(buffer, CUDABuffer):
        raise TypeError(
            f"to_numpy takes a CPUBuffer, and this one lies on {buffer.device}. transfer_buffer_cpu copies it"
        )
    # A view of its own: its shape may be set in place without a change of the buffer's.
    return _checked(buffer, "to_numpy").array.view()


def to_torch(buffer: Buffer) -> Any:
    """View a buffer as a PyTorch tensor.

    Returns:
        A tensor over the buffer's memory, which it keeps alive: on the CPU, or on the buffer's device. There
        PyTorch's current stream waits for the memory to be ready, and the host does not.

    Raises:
        MissingDependencyError: torch is not installed.
        TypeError: ``buffer`` is not a buffer.
        ValueError: The buffer was released.

    Thread safety: safe.
    """
    torch: Any = require("torch", "to_torch")
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


def to_jax(buffer: Buffer) -> Any:
    """View a buffer as a JAX array.

    Returns:
        An array over the buffer's memory, which it keeps alive, on the CPU or on the buffer's device. JAX
        takes it for constant: do not write to the buffer while it lives.

    Raises:
        MissingDependencyError: jax is not installed.
        TypeError: ``buffer`` is not a buffer, or JAX, with 64-bit types switched off as they are at first,
            would cut its values to 32 bits.
        ValueError: The buffer was released.

    Thread safety: safe.
    """
    jax = require("jax", "to_jax")
    dtype = _checked(buffer, "to_jax").dtype
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise TypeError(
            f"JAX would cut {dtype} to {jax.dtypes.canonicalize_dtype(dtype)}, and copy. Allow 64 bits: "
            "jax.config.update('jax_enable_x64', True); or make the buffer of 32 bits: convert_array(dtype=)"
        )
    return jax.dlpack.from_dlpack(buffer)


def to_numba(buffer: Buffer) -> Any:
    """View a buffer as what Numba compiles for: a NumPy array, or a device array of ``numba.cuda``.

    Returns:
        A writable view of the buffer's memory, which it keeps alive. On a device Numba waits on the host
        until it is ready.

    Raises:
        MissingDependencyError: The buffer lies on a device, and numba is not installed.
        TypeError: ``buffer`` is not a buffer.
        ValueError: The buffer was released.

    Thread safety: safe.
    """
    checked = _checked(buffer, "to_numba")
    if isinstance(checked, CUDABuffer):
        cuda: Any = require("numba", "to_numba of a buffer on a device")
        with cuda.gpus[checked.device_index]:
            return cuda.as_cuda_array(checked)
    return checked.array.view()


def _checked(buffer: Buffer, function: str) -> Buffer:
    if not isinstance(buffer, CPUBuffer | CUDABuffer):
        raise TypeError(
            f"{function} takes a CPUBuffer or a CUDABuffer, not {type(buffer).__name__}. convert_frames and "
            "convert_array make one"
        )
    return buffer
