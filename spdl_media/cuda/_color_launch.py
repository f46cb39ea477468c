"""The conversion on a device: the arguments of ``yuv_to_rgb.cu``, and its launch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from spdl_media._devices.cupy_device import CupyDevice
from spdl_media.cuda._color_formats import Planes
from spdl_media.cuda._color_plan import Plan
from spdl_media.cuda._color_taps import Taps

Array: TypeAlias = npt.NDArray[Any]

# The structs of the kernel, as its compiler lays them out.
_AXIS = np.dtype([("first", "u8"), ("weights", "u8"), ("taps", "i4"), ("size", "i4")], align=True)
_PLANE = np.dtype([("data", "u8"), ("row_step", "i8"), ("sample_step", "i8")], align=True)
FRAME = np.dtype([("planes", _PLANE, 3), ("out", "u8")], align=True)
_AXES = ("luma_x", "luma_y", "chroma_x", "chroma_y")
CONVERSION = np.dtype(
    [
        ("frames", "u8"),
        *((name, _AXIS) for name in _AXES),
        *((name, "i8") for name in ("out_row", "out_pixel", "out_channel")),
        ("matrix", "f4", (3, 4)),
        ("scale", "f4", 3),
        ("bias", "f4", 3),
        ("ceiling", "f4"),
        ("shift", "i4"),
        ("num_frames", "i4"),
    ],
    align=True,
)

# Products and sums are rounded one by one, as in the reference.
OPTIONS = ("--std=c++14", "--fmad=false")
_BLOCK = (32, 8, 1)
_MOST_LAYERS = 65535
_ALIGNMENT = 16


@lru_cache(maxsize=1)
def kernel_source() -> str:
    """The CUDA C++ source."""
    return Path(__file__).with_name("yuv_to_rgb.cu").read_text(encoding="utf-8")


def convert_on_device(device: CupyDevice, batches: Sequence[Planes], plan: Plan, out: Any) -> None:
    """Launch the conversion of all frames on the device's stream, and don't wait for it.

    Args:
        device: Where the planes and the result lie.
        batches: Y, U and V of frames, each ``(frames, rows, samples)``, all of one size and type.
        plan: What to do.
        out: Filled with the result, ``(frames, height, width, 3)`` in any strides.
    """
    frames = np.concatenate([_frames(planes) for planes in batches])
    frames["out"] = _address(out) + np.arange(len(frames)) * out.strides[0]
    conversion = _conversion(plan, out)
    conversion["num_frames"] = len(frames)
    tables = _Tables(frames)
    axes = [tables.add(taps) for taps in (*plan.luma, *plan.chroma)]
    uploaded = device.upload(tables.bytes())
    base = _address(uploaded)
    conversion["frames"] = base
    for name, axis in zip(_AXES, axes, strict=True):
        axis["first"] += base
        axis["weights"] += base
        conversion[name] = axis
    device.launch(
        kernel_source(),
        f"yuv{8 * batches[0][0].dtype.itemsize}_to_{plan.dtype}",
        OPTIONS,
        (-(-plan.width // _BLOCK[0]), -(-plan.height // _BLOCK[1]), min(len(frames), _MOST_LAYERS)),
        _BLOCK,
        conversion,
    )


def _frames(planes: Planes) -> Array:
    """Where the planes of each frame lie."""
    frames = np.zeros(len(planes[0]), FRAME)
    for index, plane in enumerate(planes):
        if any(step % plane.dtype.itemsize for step in plane.strides):
            raise ValueError(
                f"rows and frames of {plane.dtype} planes must begin on whole samples, but the strides are "
                f"{plane.strides} bytes. Copy the planes into contiguous arrays"
            )
        place = frames["planes"][:, index]
        place["data"] = _address(plane) + np.arange(len(frames)) * plane.strides[0]
        place["row_step"], place["sample_step"] = plane.strides[1:]
    return frames


def _conversion(plan: Plan, out: Any) -> Array:
    """The argument of the kernel, but for what lies on the device."""
    conversion = np.zeros(1, CONVERSION)
    steps = (stride // out.dtype.itemsize for stride in out.strides[1:])
    for name, step in zip(("out_row", "out_pixel", "out_channel"), steps, strict=True):
        conversion[name] = step
    for name in ("matrix", "scale", "bias", "ceiling", "shift"):
        conversion[name] = getattr(plan, name)
    return conversion


class _Tables:
    """What the kernel reads by address, in one block that goes to the device in one piece."""

    __slots__ = ("_parts", "_size")

    def __init__(self, frames: Array) -> None:
        self._parts: list[bytes] = []
        self._size = 0
        self._put(frames)

    def add(self, taps: Taps) -> Array:
        """Put the windows of an axis into the block. Their addresses count from its beginning."""
        axis = np.zeros((), _AXIS)
        axis["first"], axis["weights"] = self._put(taps.first), self._put(taps.weights)
        axis["taps"], axis["size"] = taps.weights.shape
        return axis

    def _put(self, array: Array) -> int:
        start = self._size
        raw = array.tobytes()
        self._parts.append(raw + bytes(-len(raw) % _ALIGNMENT))
        self._size += len(self._parts[-1])
        return start

    def bytes(self) -> Array:
        """The block, uint8."""
        return np.frombuffer(b"".join(self._parts), np.uint8)


def _address(array: Any) -> int:
    """Where the first element lies on the device."""
    return int(array.__cuda_array_interface__["data"][0])
