"""YUV to RGB on a CUDA device: one kernel reads planes, scales, converts, and writes any layout and dtype.

planes -> views of Y, U, V -> make_plan (tables, matrix) -> a launch of the kernel (yuv_to_rgb.cu)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from spdl_media.buffer import CUDABuffer
from spdl_media.config import as_cuda_config
from spdl_media.cuda.color_plan import COEFFICIENTS, Plan, make_plan
from spdl_media.cuda_driver import launch
from spdl_media.devices import Device, open_device
from spdl_media.errors import TransferError
from spdl_media.formats import Array
from spdl_media.handover import Block, in_place
from spdl_media.transfer import buffer_on_stream

__all__ = ("nv12_to_bgr", "nv12_to_rgb")

Planes: TypeAlias = tuple[Any, Any, Any]
"""Y, U, V of several frames, each ``(frames, rows, samples)``."""

# The structs of the kernel, in the memory layout of its compiler.
_AXIS = np.dtype([("first", "u8"), ("weights", "u8"), ("taps", "i4"), ("size", "i4")], align=True)
_PLANE = np.dtype([("data", "u8"), ("row_step", "i8"), ("sample_step", "i8")], align=True)
_FRAME = np.dtype([("planes", _PLANE, 3), ("out", "u8")], align=True)
_AXES = ("luma_x", "luma_y", "chroma_x", "chroma_y")
# Maximum number of frames with which the struct stays below the 4 KB that a launch passes by value.
MOST_FRAMES = 16
CONVERSION = np.dtype(
    [
        ("frames", _FRAME, MOST_FRAMES),
        *((name, _AXIS) for name in _AXES),
        *((name, "i8") for name in ("out_row", "out_pixel", "out_channel")),
        ("matrix", "f4", (3, 4)),
        ("scale", "f4", 3),
        ("bias", "f4", 3),
        ("ceiling", "f4"),
        ("shift", "i4"),
    ],
    align=True,
)

# The 32 threads of a warp write adjacent pixels of a row.
_BLOCK = (32, 8, 1)
# Maximum number of samples that a thread sums up for one pixel, which takes some hundredths of a second.
_MOST_WORK = 1 << 20


def nv12_to_rgb(
    buffers: CUDABuffer | Sequence[CUDABuffer],
    *,
    cuda_config: Any = None,
    coeff: int | None = None,
    sync: bool = False,
) -> CUDABuffer:
    """Convert NV12 frames on a device to RGB, like SPDL's function of this name.

    The result differs by at most one level of 255 from FFmpeg's accurate scaler. Primaries and transfer
    function are not converted.

    Args:
        buffers: uint8 buffer ``(rows, W)`` or ``(frames, rows, W)`` with ``rows = H + ceil(H / 2)``, or a
            sequence of such buffers, all of one size. Further axes of size 1 before the rows are allowed. The
            range is ``buffer.color_range``, or limited if that is ``None``.
        cuda_config: Device and stream: a ``CUDAConfig`` or the number of the device. ``None`` means the
            device of the buffers. Without a stream, the calling thread's own stream is used.
        coeff: The matrix as a number of H.273: 1 BT.709, 4 FCC, 5 and 6 BT.601, 7 SMPTE 240M, 8 YCgCo, 9 and
            10 BT.2020 (10 means constant luminance, for which SPDL also uses the matrix of 9). ``None`` means
            ``buffer.colorspace`` or, if that is ``None``, BT.709, SPDL's default.
        sync: Whether to wait until the result is ready.

    Returns:
        uint8 buffer ``(frames, 3, H, W)``. It is ready when its stream has done its work.

    Raises:
        ValueError: There are no frames; frames differ in size; an array has no shape of NV12; ``coeff`` is
            unknown; or buffers have different colours or lie on several devices.
        TypeError: Values are not uint8, or an argument is not a :class:`CUDABuffer`.
        TransferError: The driver rejects the work, or CUDA cannot be used in this process.

    Thread safety: safe.

    See:
        FFmpeg ``libswscale``; ITU-T H.273 for the names.
    """
    return _convert_nv12(buffers, cuda_config, coeff, sync=sync)


def nv12_to_bgr(
    buffers: CUDABuffer | Sequence[CUDABuffer],
    *,
    cuda_config: Any = None,
    coeff: int | None = None,
    sync: bool = False,
) -> CUDABuffer:
    """Convert NV12 frames on a device to BGR. Everything else is as in :func:`nv12_to_rgb`.

    Returns:
        uint8 buffer ``(frames, 3, H, W)``. It is ready when its stream has done its work.

    Raises:
        ValueError: As in :func:`nv12_to_rgb`.
        TypeError: As in :func:`nv12_to_rgb`.
        TransferError: As in :func:`nv12_to_rgb`.
    """
    return _convert_nv12(buffers, cuda_config, coeff, sync=sync, bgr=True)


def _convert_nv12(
    buffers: Any, cuda_config: Any, coeff: int | None, *, sync: bool, bgr: bool = False
) -> CUDABuffer:
    if coeff is not None and coeff not in COEFFICIENTS:
        allowed = ", ".join(f"{number} ({name})" for number, name in COEFFICIENTS.items())
        raise ValueError(f"coeff must be one of {allowed}, not {coeff!r}")
    device, arrays, (matrix, color_range) = _device_and_views(buffers, cuda_config)
    # The default here is SPDL's, BT.709; decoding uses FFmpeg's, BT.601.
    matrix = (matrix or "bt709") if coeff is None else COEFFICIENTS[coeff]
    batches = [_planes_of(array) for array in arrays]
    size, *others = sorted({planes[0].shape[:0:-1] for planes in batches})
    if others:
        raise ValueError(
            f"all buffers must have images of one size (width, height), not {[size, *others]}"
        )
    plan = make_plan("nv12", size, size, matrix, color_range, bgr=bgr)
    count = sum(len(planes[0]) for planes in batches)
    block = device.empty((count, 3, plan.height, plan.width), plan.dtype)
    # The kernel writes any strides, so a view with the channels last is enough.
    pixels = in_place(block.array).transpose(0, 2, 3, 1)
    convert_on_device(device, batches, plan, pixels)
    result = buffer_on_stream(block, device)
    if sync:
        result.synchronize()
    return result


def _device_and_views(
    planes: Any, cuda_config: Any
) -> tuple[Device, list[Array], tuple[str | None, str | None]]:
    """Return the device of buffers, device views of them (see :func:`in_place`), and their matrix and range.

    Raises:
        TransferError: CUDA cannot be used in this process, or the stream belongs to another device.
        TypeError: An argument is not a :class:`CUDABuffer`.
        ValueError: There are no buffers, they lie on another or several devices, or their colours differ.
    """
    buffers = list(planes) if isinstance(planes, list | tuple) else [planes]
    if not buffers:
        raise ValueError("there are no buffers to convert, at least one is needed")
    for one in buffers:
        if not isinstance(one, CUDABuffer):
            raise TypeError(
                f"colours are converted in a CUDABuffer, not in {type(one).__name__}: transfer_buffer makes "
                "one. On the CPU load_* and decode_packets give RGB, and frames_from_array takes arrays"
            )
    index, *others = sorted({one.device_index for one in buffers})
    if others:
        raise ValueError(f"all buffers must lie on one device, not on {[index, *others]}")
    found = {
        (one.colorspace, one.color_range) for one in buffers if one.colorspace or one.color_range
    }
    if len(found) > 1:
        raise ValueError(
            f"the buffers state different colours (matrix, range), {sorted(found, key=str)}, and one call "
            "takes one kind. Convert them one by one"
        )
    config = as_cuda_config(index if cuda_config is None else cuda_config)
    device = open_device(config, "converting colours on a CUDA device")
    if config.device_index != index:
        raise ValueError(
            f"the buffers lie on CUDA device {index}, and device {config.device_index} is to work on them. "
            "Copy them there first, or name their own device"
        )
    # This also keeps their memory alive until the work on this stream is done.
    for one in buffers:
        one.wait_on(device.stream)
    return device, [in_place(one.array) for one in buffers], found.pop() if found else (None, None)


def _planes_of(array: Array) -> Planes:
    """Return Y, U and V of NV12 frames as views.

    Raises:
        ValueError: The shape of the array is not that of NV12.
        TypeError: The dtype is not uint8.
    """
    if array.dtype != np.uint8:
        raise TypeError(
            f"planes of nv12 must be uint8, not {array.dtype}. load_video(cuda=) makes RGB of deep video"
        )
    rows, width = array.shape[-2:] if array.ndim > 1 else (0, 0)
    # For an odd height, the number of chroma rows is rounded up.
    height = 2 * rows // 3
    if not rows * array.size or width % 2 or height + -(-height // 2) != rows:
        raise ValueError(
            f"no nv12 image fills an array of {array.shape}: it must be (H + ceil(H / 2), W), or several "
            "of them, with an even W"
        )
    frames = array.reshape(-1, rows, width)
    chroma = frames[:, height:]
    return frames[:, :height], chroma[:, :, ::2], chroma[:, :, 1::2]


@lru_cache(maxsize=1)
def _kernel_code() -> bytes:
    """Return the kernels as PTX, which NVIDIA's driver compiles."""
    return Path(__file__).with_name("yuv_to_rgb.ptx").read_bytes()


def convert_on_device(device: Device, batches: Sequence[Planes], plan: Plan, out: Any) -> None:
    """Launch the conversion of all frames on the device's stream, without waiting for it.

    Args:
        device: The device of the planes and of the result.
        batches: The planes of frames, all of one size and dtype.
        plan: The conversion.
        out: Written with the result, ``(frames, height, width, 3)`` with any strides; for a plan of one plane
            ``(frames, height, width, 1)``.

    Raises:
        TransferError: A pixel of the result depends on too many samples, or the driver rejects the launch.
    """
    work = max(len(one[0].weights) * len(one[1].weights) for one in (plan.luma, plan.chroma))
    if work > _MOST_WORK:
        raise TransferError(
            f"each pixel of {plan.width}x{plan.height} would sum up {work} samples on the device, and "
            f"{_MOST_WORK} are the most. Scale to a larger size first, or let the CPU decode and scale: "
            "decoder='cpu'"
        )
    # Without arithmetic of NumPy, which takes longer than all other work on a frame.
    places = [place for planes in batches for place in _frames(planes)]
    frames = np.zeros(len(places), _FRAME)
    frames["planes"] = places
    frames["out"] = out.ctypes.data + np.arange(len(frames)) * out.strides[0]
    tables, axes = _tables(device.torch, device.index, plan)
    conversion = np.zeros(1, CONVERSION)
    for name, axis in zip(_AXES, axes, strict=True):
        conversion[name] = axis
    # Strides of the kernel are in values, those of NumPy in bytes.
    steps = (stride // out.dtype.itemsize for stride in out.strides[1:])
    for name, step in zip(("out_row", "out_pixel", "out_channel"), steps, strict=True):
        conversion[name] = step
    for name in ("matrix", "scale", "bias", "ceiling", "shift"):
        conversion[name] = getattr(plan, name)
    bits = 8 * batches[0][0].dtype.itemsize
    name = f"plane{bits}" if plan.dtype == "samples" else f"yuv{bits}_to_{plan.dtype}"
    kernel = _kernel_code(), name
    blocks = -(-plan.width // _BLOCK[0]), -(-plan.height // _BLOCK[1])
    # Launch as many frames at a time as the struct can hold.
    for start in range(0, len(frames), MOST_FRAMES):
        part = frames[start : start + MOST_FRAMES]
        conversion["frames"][0, : len(part)] = part
        launch(device.index, device.stream, kernel, (*blocks, len(part)), _BLOCK, conversion)
    # The tables were allocated on another stream, which must not reuse their memory while this one reads.
    tables.used_on(device.stream)


def _frames(planes: Planes) -> list[list[tuple[int, int, int]]]:
    """Return addresses and strides of the planes of each frame, as the kernel's structs have them."""
    starts = [(plane.ctypes.data, *plane.strides) for plane in planes]
    count = len(planes[0])
    return [[(at + k * step, *steps) for at, step, *steps in starts] for k in range(count)]


# The cache compares plans by identity, which works because the caches of plans keep them.
@lru_cache(maxsize=64)
def _tables(torch: Any, index: int, plan: Plan) -> tuple[Block, Array]:
    """Copy the windows of a plan to a device; return them and the structs with their addresses."""
    device = Device(torch, index)  # with the thread's own stream, so that no other work delays it
    taps = (*plan.luma, *plan.chroma)
    parts = [array for one in taps for array in (one.first, one.weights)]
    table = np.frombuffer(b"".join(part.tobytes() for part in parts), np.uint8)
    block = device.empty(table.shape, table.dtype)
    there = in_place(block.array)
    device.copy("HtoD", there, table)
    device.record().synchronize()  # once per plan, so that later users need not wait
    starts = there.ctypes.data + np.cumsum([0, *(part.nbytes for part in parts)])
    axes = np.zeros(len(taps), _AXIS)
    # First samples and weights alternate in the table.
    axes["first"], axes["weights"] = starts[:-1:2], starts[1::2]
    axes["taps"], axes["size"] = np.transpose([one.weights.shape for one in taps])
    return block, axes
