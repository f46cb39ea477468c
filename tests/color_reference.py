"""The NumPy reference of the colour kernel, and functions that convert by it on stand-in devices."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from color_kernel import FakeArray, fake_cupy, host
from fake_cuda import FakeCupy, FakeTorch

import spdl_media as sm
from spdl_media import cuda_driver
from spdl_media.arguments import parse_values
from spdl_media.config import as_cuda_config
from spdl_media.cuda import color
from spdl_media.cuda.color import Planes
from spdl_media.cuda.color_plan import SEMI_PLANAR, Plan, Taps, make_plan
from spdl_media.devices import open_device
from spdl_media.formats import Array
from spdl_media.handover import in_place
from spdl_media.transfer import buffer_on_stream


def convert_on_host(batches: Sequence[Planes], plan: Plan, out: Array) -> None:
    """Convert frames by NumPy: the reference of ``yuv_to_rgb.cu``, operation by operation.

    All arithmetic is float32. Each product and each sum is rounded separately, in the order of the kernel.
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


def there(planes: Any, device: int = 0) -> Any:
    """Copy arrays or buffers in host memory to a stand-in device."""
    if isinstance(planes, list | tuple):
        return [there(plane, device) for plane in planes]
    about = planes.metadata if isinstance(planes, sm.CPUBuffer) else {}
    array = np.asarray(planes)
    return sm.CUDABuffer(FakeArray(array, device), array.shape, array.dtype, device, **about)


def by_reference(
    function: Callable[..., Any], planes: Any, *arguments: Any, **options: Any
) -> np.ndarray:
    """Call a function of the package with the reference instead of the kernel."""
    with pytest.MonkeyPatch.context() as patch:
        if not isinstance(sys.modules.get("cupy"), FakeCupy):
            assert not isinstance(sys.modules.get("torch"), FakeTorch)
            fake_cupy(patch)
        patch.setattr(color, "convert_on_device", _put_on_stream)
        return host(function(there(planes), *arguments, **options)).copy()


def _put_on_stream(device: Any, batches: Sequence[Planes], plan: Plan, out: Array) -> None:
    def convert() -> bool:
        convert_on_host(batches, plan, out)
        return True

    stream = cuda_driver.driver().card.stream(device.index, device.stream)
    stream.put("the reference", convert)


def noise(
    pix_fmt: str, width: int, height: int, frames: int | None = None, contrast: float = 0.5
) -> list[np.ndarray]:
    """Make Y and UV of random values, by default over the full range."""
    dtype, bits, shift = SEMI_PLANAR[pix_fmt]
    rng = np.random.default_rng(width * 1000 + height)
    low, high = (int((1 << bits) * (0.5 + side * contrast)) for side in (-1, 1))
    lead = () if frames is None else (frames,)
    shapes = (*lead, height, width), (*lead, -(-height // 2), -(-width // 2), 2)
    return [(rng.integers(low, high, shape) << shift).astype(dtype) for shape in shapes]


def to_rgb(
    planes: Sequence[sm.CUDABuffer],
    pix_fmt: str,
    *,
    matrix: str | None = None,
    color_range: str | None = None,
    width: int | None = None,
    height: int | None = None,
    scale_algo: Any = None,
    layout: str = "NHWC",
    normalize: Any = None,
    cuda_config: Any = None,
) -> sm.CUDABuffer:
    """Convert Y and UV on a device by the kernel, for one or several frames, with a plan as for decoding."""
    index = planes[0].device_index
    device = open_device(as_cuda_config(index if cuda_config is None else cuda_config), "a test")
    for one in planes:
        one.wait_on(device.stream)
    luma, pairs = (in_place(one.array) for one in planes)
    has_frames = luma.ndim == 3
    batch = [part if has_frames else part[None] for part in (luma, pairs[..., 0], pairs[..., 1])]
    source: Any = luma.shape[:-3:-1]
    size = width or source[0], height or source[1]
    algo = scale_algo or (None if size == source else "bicubic")
    values = normalize and parse_values("float32", *normalize, pix_fmt="rgb24")
    plan = make_plan(pix_fmt, source, size, matrix, color_range, algo=algo, values=values)
    shape = (plan.height, plan.width, 3) if layout == "NHWC" else (3, plan.height, plan.width)
    block = device.empty((*luma.shape[:-2], *shape), plan.dtype)
    array = in_place(block.array)
    out = array if has_frames else array[None]
    pixels = out if layout == "NHWC" else out.transpose(0, 2, 3, 1)
    color.convert_on_device(device, [tuple(batch)], plan, pixels)  # type: ignore[list-item]  # of three
    return buffer_on_stream(block, device)
