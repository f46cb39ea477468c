"""YUV to RGB on a CUDA device: one kernel reads the planes, scales, converts and writes the layout and type.

planes -> views of Y, U, V -> make_plan (tables, matrix) -> a launch of the kernel (yuv_to_rgb.cu)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from spdl_media._checks import check_choice, check_int
from spdl_media.buffer import CUDABuffer
from spdl_media.config import as_cuda_config
from spdl_media.cuda.color_plan import (
    COEFFICIENTS,
    SCALE_ALGOS,
    Plan,
    ScaleAlgo,
    YUVFormat,
    make_plan,
    yuv_format,
)
from spdl_media.cuda_driver import launch
from spdl_media.devices import Device, open_device
from spdl_media.errors import TransferError
from spdl_media.formats import Array, pixel_layout
from spdl_media.geometry import Size
from spdl_media.handover import Block, in_place
from spdl_media.row_plan import PerChannel, Values, parse_values
from spdl_media.transfer import buffer_on_stream

__all__ = ("nv12_to_bgr", "nv12_to_rgb", "yuv_to_rgb")

RGBLayout: TypeAlias = Literal["NHWC", "NCHW"]

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

_NV12 = yuv_format("nv12")
_PURPOSE = "converting colours on a CUDA device"


def yuv_to_rgb(
    planes: CUDABuffer | Sequence[CUDABuffer],
    pix_fmt: str,
    *,
    matrix: str | None = None,
    color_range: str | None = None,
    width: int | None = None,
    height: int | None = None,
    scale_algo: ScaleAlgo | None = None,
    layout: RGBLayout = "NHWC",
    normalize: tuple[PerChannel, PerChannel] | None = None,
    cuda_config: Any = None,
) -> CUDABuffer:
    """Convert planes of YUV on a device to RGB, and scale them in the same pass.

    The result is within one level of 255 of the CPU path's. Primaries and gamma are left alone.

    Args:
        planes: A buffer with all planes, as ``load_*`` and :func:`~spdl_media.convert_frames` make it:
            ``(1, rows, W)``, or ``(3, H, W)`` for 4:4:4. Or a list with one for each plane, as
            ``convert_frames(layout="planes")`` makes them: luma ``(H, W)``, chroma ``(h, w)``, or
            ``(h, w, 2)`` where U and V alternate; sides of chroma are rounded up. All may have a dimension of
            frames in front. uint8, or uint16 for deep formats.
        pix_fmt: FFmpeg's name: ``"nv12"``, ``"yuv420p"``, ``"yuvj422p"``, ``"p010le"``, ``"yuv420p10le"``,
            ``"yuv444p12msble"``, ``"gray"``, ... The byte order is that of the arrays.
        matrix: As ``frames.colorspace`` has it: ``"bt709"``, ``"smpte170m"`` or ``"bt601"``, ``"bt2020nc"``,
            ``"fcc"``, ``"smpte240m"``, ``"ycgco"``, ... ``None``: what the buffers say
            (``buffer.colorspace``), else BT.601, as FFmpeg takes it.
        color_range: ``"tv"`` or ``"pc"``, as ``frames.color_range`` has it; ``None``: what the buffers say,
            else limited, but full for the ``yuvj`` formats. Gray is full whatever is said here, as in FFmpeg,
            and has no matrix.
        width: Pixels in a row of the result; ``None``: as it is.
        height: Rows of the result.
        scale_algo: The filter for chroma and for scaling, antialiased: ``"bicubic"`` (FFmpeg's, which
            is sharper than Pillow's) or ``"bilinear"``. ``None``: bicubic where the size changes, else
            bilinear for chroma, as the CPU path has it.
        layout: ``"NHWC"`` or ``"NCHW"``.
        normalize: ``(mean, std)`` of three values each, in the order of the channels, for a float32 result
            ``(rgb / 255 - mean) / std`` that was not rounded to whole levels; ``((0, 0, 0), (1, 1, 1))``
            gives 0 to 1. ``None``: uint8.
        cuda_config: Device and stream: a ``CUDAConfig`` or the number of the device. ``None``: where the
            planes lie. Without a stream: one of the calling thread's own.

    Returns:
        Buffer ``(H, W, 3)`` or ``(3, H, W)``, uint8 or float32, with the dimension of frames in front if the
        planes have one. It is ready when its stream gets there.

    Raises:
        ValueError: Shapes that do not fit the format, an unknown name, planes on several devices.
        TypeError: Planes of another type than the format's, or that are no :class:`CUDABuffer`.
        TransferError: Each pixel would stand for more than a million samples; the driver refuses the work;
            CUDA cannot be used in this process.

    Thread safety: safe.

    See:
        FFmpeg ``libswscale``; ITU-T H.273 for the names.
    """
    check_choice("color_range", color_range, ("tv", "pc", None))
    check_choice("scale_algo", scale_algo, (*SCALE_ALGOS, None))
    for name, side in (("width", width), ("height", height)):
        if side is not None:
            check_int(name, side)
    format, values = yuv_format(pix_fmt), _values_of(normalize)
    device, arrays, said = _placed(planes, cuda_config)
    is_list = isinstance(planes, list | tuple)
    views, has_frames = _planes_of(arrays if is_list else _untiled(arrays[0], format), format)
    source = _size(views)
    size = width or source[0], height or source[1]
    colors = matrix or said[0], color_range or said[1]
    plan = make_plan(format, source, size, *colors, algo=scale_algo, values=values)
    return _run(device, [views], plan, layout, has_frames=has_frames)


def nv12_to_rgb(
    buffers: CUDABuffer | Sequence[CUDABuffer],
    *,
    cuda_config: Any = None,
    coeff: int | None = None,
    sync: bool = False,
) -> CUDABuffer:
    """Convert NV12 frames on a device to RGB, as SPDL's function of this name does.

    :func:`yuv_to_rgb` can do more, and takes what FFmpeg takes for a matrix that is not stated: BT.601.

    Args:
        buffers: ``(rows, W)`` or ``(frames, rows, W)`` (a 1 before the rows does no harm) with
            ``rows = H + H / 2``, or a sequence of such, all of one size. uint8, in limited range unless they
            say otherwise (``buffer.color_range``).
        cuda_config: As in :func:`yuv_to_rgb`.
        coeff: The matrix as a number of H.273: 1 BT.709, 4 FCC, 5 and 6 BT.601, 7 SMPTE 240M, 8 YCgCo,
            9 and 10 BT.2020 (10 means another equation, for which SPDL takes the same matrix, too).
            ``None``: what the buffers say (``buffer.colorspace``), else BT.709, SPDL's default.
        sync: Wait until the result is ready.

    Returns:
        uint8 buffer ``(frames, 3, H, W)``; see :func:`yuv_to_rgb`.

    Raises:
        ValueError: As in :func:`yuv_to_rgb`; no frames; frames of several sizes; an unknown ``coeff``;
            buffers that say different things of their colours.
        TypeError: As in :func:`yuv_to_rgb`.
        TransferError: As in :func:`yuv_to_rgb`.

    Thread safety: safe.
    """
    return _convert_nv12(buffers, cuda_config, coeff, sync=sync)


def nv12_to_bgr(
    buffers: CUDABuffer | Sequence[CUDABuffer],
    *,
    cuda_config: Any = None,
    coeff: int | None = None,
    sync: bool = False,
) -> CUDABuffer:
    """Convert NV12 frames to RGB with blue first. All else is as in :func:`nv12_to_rgb`.

    Returns:
        uint8 buffer ``(frames, 3, H, W)``; see :func:`yuv_to_rgb`.

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
    device, arrays, said = _placed(buffers, cuda_config)
    # SPDL's default; yuv_to_rgb has FFmpeg's.
    matrix = (said[0] or "bt709") if coeff is None else COEFFICIENTS[coeff]
    tiled = (array.reshape(-1, 1, *array.shape[-2:]) for array in arrays)
    batches = [_planes_of(_untiled(array, _NV12), _NV12)[0] for array in tiled]
    size, *others = sorted({_size(planes) for planes in batches})
    if others:
        raise ValueError(
            f"all buffers must have pictures of one size (width, height), not {[size, *others]}"
        )
    plan = make_plan(_NV12, size, size, matrix, said[1], bgr=bgr)
    result = _run(device, batches, plan, "NCHW", has_frames=True)
    if sync:
        result.synchronize()
    return result


def _values_of(normalize: Any) -> Values | None:
    if normalize is None:
        return None
    if not isinstance(normalize, Sequence) or len(normalize) != 2:
        raise TypeError(
            f"normalize must be (mean, std), each a number or one for each channel, not {normalize!r}"
        )
    return parse_values("float32", *normalize, pix_fmt="rgb24")


def _size(planes: Planes) -> Size:
    """Width and height."""
    height, width = planes[0].shape[1:]
    return int(width), int(height)


def _placed(
    planes: Any, cuda_config: Any
) -> tuple[Device, list[Array], tuple[str | None, str | None]]:
    """The device that buffers lie on, views as :func:`in_place` has them, and the colours that they state.

    Raises:
        TransferError: CUDA cannot be used in this process, or the stream is of another device.
        TypeError: They are no buffers on a device.
        ValueError: There are none, or they lie elsewhere, or state different matrices or ranges.
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
        raise ValueError(f"all planes must lie on one device, not on {[index, *others]}")
    found = {(one.colorspace, one.color_range) for one in buffers if one.colorspace}
    if len(found) > 1:
        raise ValueError(
            f"the buffers state different colours (matrix, range), {sorted(found, key=str)}, and one call "
            "takes one kind. Convert them one by one"
        )
    config = as_cuda_config(index if cuda_config is None else cuda_config)
    device = open_device(config, _PURPOSE)
    if config.device_index != index:
        raise ValueError(
            f"the planes lie on CUDA device {index}, and device {config.device_index} is to work on them. "
            "Copy them there first, or name their own device"
        )
    # Which also keeps their memory for the work on this stream, whoever drops them meanwhile.
    for one in buffers:
        one.wait_on(device.stream)
    return device, [in_place(one.array) for one in buffers], found.pop() if found else (None, None)


def _planes_of(parts: Sequence[Array], format: YUVFormat) -> tuple[Planes, bool]:
    """Y, U and V of an array for each plane, all views, and whether they have a dimension of frames.

    Raises:
        ValueError: Shapes that do not fit each other or the format.
        TypeError: Another type than the format's samples.
    """
    count = 1 if not format.sub_x else 2 if format.pairs else 3
    if len(parts) != count:
        raise ValueError(
            f"{format.name} has {count} planes, not {len(parts)}: pass a buffer for each, or one with all of "
            "them as convert_frames makes it"
        )
    for part in parts:
        if part.dtype.kind != "u" or f"uint{8 * part.dtype.itemsize}" != format.dtype:
            raise TypeError(f"planes of {format.name} must be {format.dtype}, not {part.dtype}")
    luma, *chroma = parts
    if luma.ndim not in (2, 3) or not all(luma.shape):
        raise ValueError(
            f"the luma plane must be (height, width) or (frames, height, width), not {luma.shape}"
        )
    *frames, height, width = luma.shape
    if format.sub_x:
        pair = (2,) if format.pairs else ()
        shape = (*frames, *format.chroma_shape(height, width), *pair)
        if others := [part.shape for part in chroma if part.shape != shape]:
            raise ValueError(
                f"chroma of {format.name} for luma of shape {luma.shape} must be {shape}, not {others[0]}"
            )
    if format.pairs:
        chroma = [chroma[0][..., place] for place in format.pairs]
    y, u, v = (part if frames else part[None] for part in (luma, *(chroma or (luma, luma))))
    return (y, u, v), bool(frames)


def _untiled(array: Array, format: YUVFormat) -> list[Array]:
    """The planes of an array in which they lie as in :mod:`spdl_media.formats`.

    Raises:
        ValueError: Its shape is none of the format's.
    """
    layout = pixel_layout(format.name)
    frames = array[None] if array.ndim == 3 else array
    if layout is None or frames.ndim != 4 or not frames.size:
        raise ValueError(
            f"one buffer of {format.name}, of shape {array.shape}, must be as convert_frames makes it: "
            "(1, rows, W), (3, H, W) for 4:4:4, or several. Pass a list with one for each plane otherwise"
        )
    height, width = frames.shape[1:3] if layout.kind == "packed" else frames.shape[2:]
    if layout.kind == "tiled":  # of which the rows below luma are chroma
        height = height * layout.chroma_rows // (layout.chroma_rows + 1)
    if frames.shape[1:] != layout.shape(width, height) or not layout.tiles(width):
        raise ValueError(
            f"no {format.name} picture fills an array of {array.shape}: it must be "
            f"{layout.shape(width + width % 2, height)}, or one for each plane"
        )
    shapes: list[tuple[int, ...]] = [(height, width)]
    if format.sub_x:
        chroma = format.chroma_shape(height, width)
        shapes += [(*chroma, 2)] if format.pairs else [chroma, chroma]
    planes = layout.places(frames, shapes, None)
    return planes if array.ndim == 4 else [plane[0] for plane in planes]


def _run(
    device: Device, batches: Sequence[Planes], plan: Plan, layout: str, *, has_frames: bool
) -> CUDABuffer:
    """Convert frames, all of one size, into one array."""
    check_choice("layout", layout, get_args(RGBLayout))
    shape = [plan.height, plan.width]
    shape.insert(2 if layout == "NHWC" else 0, 3)
    if has_frames:
        shape.insert(0, sum(len(planes[0]) for planes in batches))
    block = device.empty(shape, plan.dtype)
    array = in_place(block.array)
    frames = array if has_frames else array[None]
    # The kernel writes in any strides, so a view with the channels last will do.
    pixels = frames if layout == "NHWC" else frames.transpose(0, 2, 3, 1)
    convert_on_device(device, batches, plan, pixels)
    return buffer_on_stream(block, device)


@lru_cache(maxsize=1)
def _kernel_code() -> bytes:
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
    kernel = _kernel_code(), name
    blocks = -(-plan.width // _BLOCK[0]), -(-plan.height // _BLOCK[1])
    # As many frames as the struct holds, which may have 4 KB.
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
