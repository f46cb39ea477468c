"""The memory behind bytes, buffers, arrays and tensors, as flat bytes, without a copy."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ("flat", "memory_of")


def memory_of(src: Any) -> bytes | memoryview | None:
    """The memory behind bytes, buffers, arrays and tensors; ``None`` for what is none of them."""
    if isinstance(src, bytes):
        return src
    # PyTorch's CPU tensors raise AttributeError here, those on a GPU do not.
    if hasattr(src, "__cuda_array_interface__"):
        raise TypeError(
            f"{type(src).__name__} is in the memory of a GPU; copy it with .cpu() or .get()"
        )
    if hasattr(src, "__array__"):
        return _array_content(src)
    try:
        view = memoryview(src)
    except TypeError:
        return None
    if not view.c_contiguous:
        raise ValueError(
            f"the buffer of {type(src).__name__} is not C-contiguous (shape {view.shape}, strides "
            f"{view.strides}); copy it with bytes(...)"
        )
    return flat(view)


def _array_content(src: Any) -> memoryview:
    try:
        array = np.asarray(src)
    except RuntimeError as error:  # PyTorch's word for tensors that NumPy cannot view
        raise TypeError(
            f"an encoded file in a tensor is 1-D uint8 on the CPU, this one NumPy cannot view: {error}"
        ) from error
    what = f"{type(src).__name__} of {array.dtype} with shape {array.shape}"
    if array.dtype != np.uint8:
        raise TypeError(f"an encoded file in an array is 1-D uint8, this is a {what}")
    if array.ndim != 1:
        raise ValueError(f"an encoded file in an array is 1-D uint8, this is a {what}")
    if not array.flags.c_contiguous:
        raise ValueError(f"the {what} is not contiguous; copy it with numpy.ascontiguousarray")
    return array.data


def flat(view: memoryview) -> memoryview:
    """The bytes of any C-contiguous view."""
    # Not memoryview.cast, which refuses formats such as "<B".
    return np.frombuffer(view, np.uint8).data if view.nbytes else memoryview(b"")
