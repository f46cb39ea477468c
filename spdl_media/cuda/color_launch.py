"""The conversion: by the kernel for arrays of any library on a device, by NumPy in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from spdl_media.cuda.color_plan import Plan, Taps
from spdl_media.cuda_driver import launch
from spdl_media.devices import Device
from spdl_media.errors import TransferError
from spdl_media.formats import Array
from spdl_media.handover import Block, in_place

Planes: TypeAlias = tuple[Any, Any, Any]
"""Y, U, V of several frames, each ``(frames, rows, samples)``. Without chroma, U and V are Y."""

# The structs of the kernel, as its compiler lays them out.
_AXIS = np.dtype([("first", "u8"), ("weights", "u8"), ("taps", "i4"), ("size", "i4")], align=True)
_PLANE = np.dtype([("data", "u8"), ("row_step", "i8"), ("sample_step", "i8")], align=True)
_FRAME = np.dtype([("planes", _PLANE, 3), ("out", "u8")], align=True)
_AXES = ("luma_x", "luma_y", "chroma_x", "chroma_y")
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

_BLOCK = (32, 8, 1)
_ALIGNMENT = 16
# Samples that one thread sums up for a pixel, at most: some hundredths of a second.
_MOST_WORK = 1 << 20


@lru_cache(maxsize=1)
def kernel_code() -> bytes:
    """The kernel as PTX, which NVIDIA's driver compiles."""
    return Path(__file__).with_name("yuv_to_rgb.ptx").read_bytes()


def convert_on_device(device: Device, batches: Sequence[Planes], plan: Plan, out: Any) -> None:
    """Launch the conversion of all frames on the device's stream, and don't wait for it.

    Args:
        device: Where the planes and the result lie.
        batches: The planes of frames that are all of one size and type.
        plan: What to do.
        out: Filled with the result, ``(frames, height, width, 3)`` in any strides; by the plan of one plane
            ``(frames, height, width, 1)``.

    Raises:
        TransferError: A pixel of the result stands for too many samples, or the driver refuses the launch.
        ValueError: Planes whose rows begin amid a sample.
    """
    work = max(len(one[0].weights) * len(one[1].weights) for one in (plan.luma, plan.chroma))
    if work > _MOST_WORK:
        raise TransferError(
            f"each pixel of {plan.width}x{plan.height} would sum up {work} samples on the device, and "
            f"{_MOST_WORK} are the most. Scale to a larger size first, or let the CPU decode and scale: "
            "decoder='cpu'"
        )
    frames = np.concatenate([_frames(planes) for planes in batches])
    frames["out"] = out.ctypes.data + np.arange(len(frames)) * out.strides[0]
    tables, axes = _tables(device.torch, device.index, plan)
    conversion = np.zeros(1, CONVERSION)
    for name, axis in zip(_AXES, axes, strict=True):
        conversion[name] = axis
    steps = (stride // out.dtype.itemsize for stride in out.strides[1:])
    for name, step in zip(("out_row", "out_pixel", "out_channel"), steps, strict=True):
        conversion[name] = step
    for name in ("matrix", "scale", "bias", "ceiling", "shift"):
        conversion[name] = getattr(plan, name)
    bits = 8 * batches[0][0].dtype.itemsize
    name = f"plane{bits}" if plan.dtype == "samples" else f"yuv{bits}_to_{plan.dtype}"
    kernel = kernel_code(), name
    blocks = -(-plan.width // _BLOCK[0]), -(-plan.height // _BLOCK[1])
    for start in range(0, len(frames), MOST_FRAMES):
        part = frames[start : start + MOST_FRAMES]
        conversion["frames"][0, : len(part)] = part
        launch(device.index, device.stream, kernel, (*blocks, len(part)), _BLOCK, conversion)
    tables.used_on(device.stream)


def _frames(planes: Planes) -> Array:
    """Where the planes of each frame lie."""
    frames = np.zeros(len(planes[0]), _FRAME)
    for index, plane in enumerate(planes):
        if any(step % plane.dtype.itemsize for step in plane.strides):
            raise ValueError(
                f"rows and frames of {plane.dtype} planes must begin on whole samples, but the strides are "
                f"{plane.strides} bytes. Copy the planes into contiguous arrays"
            )
        place = frames["planes"][:, index]
        place["data"] = plane.ctypes.data + np.arange(len(frames)) * plane.strides[0]
        place["row_step"], place["sample_step"] = plane.strides[1:]
    return frames


@lru_cache(maxsize=64)
def _tables(torch: Any, index: int, plan: Plan) -> tuple[Block, list[Array]]:
    """The windows of a plan on a device, and where each axis has its own there."""
    device = Device(torch, index)  # the thread's own stream, on which no work of others waits
    parts: list[bytes] = []
    axes = []
    for taps in (*plan.luma, *plan.chroma):
        axis = np.zeros((), _AXIS)
        axis["taps"], axis["size"] = taps.weights.shape
        for name, values in (("first", taps.first), ("weights", taps.weights)):
            axis[name] = sum(map(len, parts))
            raw = values.tobytes()
            parts.append(raw + bytes(-len(raw) % _ALIGNMENT))
        axes.append(axis)
    table = np.frombuffer(b"".join(parts), np.uint8)
    block = device.empty(table.shape, table.dtype)
    device.copy_in(block.array, table)
    device.record().synchronize()  # once for a plan, and nobody has to wait for it afterwards
    start = np.uint64(in_place(block.array).ctypes.data)
    for axis in axes:
        axis["first"] += start
        axis["weights"] += start
    return block, axes


def convert_on_host(batches: Sequence[Planes], plan: Plan, out: Array) -> None:
    """Convert frames by NumPy: the reference of ``yuv_to_rgb.cu``, operation by operation.

    All arithmetic is float32, each product and each sum rounded on its own, in the order of the kernel.
    The arguments are those of :func:`convert_on_device`.
    """
    frames = (frame for planes in batches for frame in zip(*planes, strict=True))
    for target, (luma, *chroma) in zip(out, frames, strict=True):
        y = _resample(luma, plan.luma, plan)
        if plan.dtype == "samples":
            value = np.rint(np.clip(y, 0, plan.scale[0]))
            target[..., 0] = value.astype(out.dtype) << plan.shift
            continue
        u, v = (_resample(plane, plan.chroma, plan) for plane in chroma)
        for channel, weights in enumerate(plan.matrix):
            value = weights[0] * y + weights[1] * u + weights[2] * v + weights[3]
            value = np.clip(value, np.float32(0), np.float32(255))
            if plan.dtype == "uint8":
                target[..., channel] = np.rint(value)
            else:
                target[..., channel] = value * plan.scale[channel] + plan.bias[channel]


def _resample(plane: Array, taps: tuple[Taps, Taps], plan: Plan) -> Array:
    """Weighted sums of windows of samples, rows first."""
    across, down = taps
    samples = (plane >> plan.shift).astype(np.float32)
    lines = np.zeros((len(samples), len(across.first)), np.float32)
    for tap, weights in enumerate(across.weights):
        lines += weights * samples[:, across.first + tap]
    np.minimum(lines, np.float32(plan.ceiling), out=lines)
    result = np.zeros((len(down.first), lines.shape[1]), np.float32)
    for tap, weights in enumerate(down.weights):
        result += weights[:, None] * lines[down.first + tap]
    return result
