"""Buffers as arrays of other libraries, without a copy."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from spdl_media._backends import require
from spdl_media.buffer import CPUBuffer

__all__ = ("to_jax", "to_numba", "to_numpy", "to_torch")


def to_numpy(buffer: CPUBuffer) -> npt.NDArray[Any]:
    """View a buffer as a NumPy array.

    Returns:
        A writable view of the buffer's memory, which it keeps alive.

    Raises:
        TypeError: ``buffer`` is not a buffer.
        ValueError: The buffer was released.

    Thread safety: safe.
    """
    # A view of its own: its shape may be set in place without a change of the buffer's.
    return _checked(buffer, "to_numpy").array.view()


def to_torch(buffer: CPUBuffer) -> Any:
    """View a buffer as a PyTorch tensor.

    Returns:
        A tensor on the CPU over the buffer's memory, which it keeps alive.

    Raises:
        MissingDependencyError: torch is not installed.
        TypeError: ``buffer`` is not a buffer.
        ValueError: The buffer was released.

    Thread safety: safe.
    """
    return require("torch", "to_torch").from_dlpack(_checked(buffer, "to_torch"))


def to_jax(buffer: CPUBuffer) -> Any:
    """View a buffer as a JAX array.

    Returns:
        An array on the CPU over the buffer's memory, which it keeps alive. JAX takes it for constant: do
        not write to the buffer while it lives.

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


def to_numba(buffer: CPUBuffer) -> npt.NDArray[Any]:
    """View a buffer as what Numba compiles for: on the CPU, a NumPy array.

    Returns:
        A writable view of the buffer's memory, which it keeps alive.

    Raises:
        TypeError: ``buffer`` is not a buffer.
        ValueError: The buffer was released.

    Thread safety: safe.
    """
    return _checked(buffer, "to_numba").array.view()


def _checked(buffer: CPUBuffer, function: str) -> CPUBuffer:
    if not isinstance(buffer, CPUBuffer):
        raise TypeError(
            f"{function} takes a CPUBuffer, not {type(buffer).__name__}. convert_frames and convert_array "
            "make one"
        )
    return buffer
