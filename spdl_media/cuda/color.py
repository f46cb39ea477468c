"""YUV to RGB: one function for arrays in host memory and on a CUDA device, with the same result.

On a device, one kernel (``yuv_to_rgb.cu``) reads the planes, scales, converts and writes the layout and type
that were asked for. In host memory NumPy does the same operations in the same order: that is the reference,
not a fast path; :func:`~spdl_media.decode_packets` converts faster on the CPU.

    planes -> planes_of (views of Y, U, V) -> make_plan (tables, matrix) -> NumPy, or a launch of the kernel
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from spdl_media._checks import check_choice, check_int
from spdl_media.buffer import Buffer, CPUBuffer, CUDABuffer
from spdl_media.config import as_cuda_config
from spdl_media.cuda.color_launch import Planes, convert_on_device, convert_on_host
from spdl_media.cuda.color_plan import (
    COEFFICIENTS,
    SCALE_ALGOS,
    Plan,
    ScaleAlgo,
    YUVFormat,
    make_plan,
    yuv_format,
)
from spdl_media.cuda_driver import wait_for
from spdl_media.devices import Device, open_device
from spdl_media.formats import Array, pixel_layout
from spdl_media.geometry import Size
from spdl_media.handover import in_place
from spdl_media.row_plan import PerChannel, Values, parse_values
from spdl_media.transfer import buffer_on_stream

__all__ = ("nv12_to_bgr", "nv12_to_rgb", "yuv_to_rgb")

RGBLayout: TypeAlias = Literal["NHWC", "NCHW"]

_LAYOUTS = get_args(RGBLayout)
_NV12 = yuv_format("nv12")
_PURPOSE = "converting colours on a CUDA device"


def yuv_to_rgb(
    planes: Any,
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
) -> Buffer:
    """Convert planes of YUV to RGB, and scale them in the same pass.

    The result is within one level of 255 of FFmpeg's scaler with its accurate flags, which the CPU path uses,
    in host memory and on a device alike. Primaries and gamma are left alone, as everywhere.

    Args:
        planes: An array for each plane of the format: luma ``(H, W)``, chroma ``(h, w)``, or ``(h, w, 2)`` or
            ``(h, 2 w)`` where U and V alternate; sides of chroma are rounded up. In any strides. Or one
            C-contiguous array with all of them as :func:`~spdl_media.convert_frames` makes it:
            ``(1, rows, W)``, ``(3, H, W)`` for 4:4:4. All may have a dimension of frames in front. uint8, or
            uint16 for deep formats.
        pix_fmt: FFmpeg's name: ``"nv12"``, ``"yuv420p"``, ``"yuvj422p"``, ``"p010le"``, ``"yuv420p10le"``,
            ``"yuv444p12msble"``, ``"gray"``, ... The byte order is that of the arrays.
        matrix: As ``frames.colorspace`` has it: ``"bt709"``, ``"smpte170m"`` or ``"bt601"``, ``"bt2020nc"``,
            ``"fcc"``, ``"smpte240m"``, ``"ycgco"``, ... ``None``: what buffers say (``buffer.colorspace``),
            else BT.601, as FFmpeg takes it.
        color_range: ``"tv"`` or ``"pc"``, as ``frames.color_range`` has it; ``None``: what buffers say, else
            limited, but full for the ``yuvj`` formats. Gray is full whatever is said here, as in FFmpeg, and
            has no matrix.
        width: Pixels in a row of the result; ``None``: as it is.
        height: Rows of the result.
        scale_algo: The filter for chroma and for scaling, antialiased: ``"bicubic"`` (FFmpeg's, which
            is sharper than Pillow's) or ``"bilinear"``. ``None``: bicubic where the size changes, else
            bilinear for chroma, as the CPU path has it.
        layout: ``"NHWC"`` or ``"NCHW"``.
        normalize: ``(mean, std)`` of three values each, in the order of the channels, for a float32 result
            ``(rgb / 255 - mean) / std`` that was not rounded to whole levels; ``((0, 0, 0), (1, 1, 1))``
            gives 0 to 1. ``None``: uint8.
        cuda_config: Device and stream for planes on a device: a ``CUDAConfig`` or the number of the device.
            ``None``: where the planes lie. Without a stream: the current one of their library, PyTorch or
            CuPy.

    Returns:
        Buffer ``(H, W, 3)`` or ``(3, H, W)``, uint8 or float32, with the dimension of frames in front if the
        planes have one. In host memory a :class:`~spdl_media.CPUBuffer`. On a device a
        :class:`~spdl_media.CUDABuffer`, for which other streams wait. Keep the planes until the stream gets
        there.

    Raises:
        ValueError: Shapes that do not fit the format, an unknown name, planes on several devices.
        TypeError: Planes of another type than the format's, arguments of the wrong type.
        TransferError: The planes lie on a device, and neither PyTorch nor CuPy is installed; each pixel would
            stand for more than a million samples there; the driver refuses the work.

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
    is_list = isinstance(planes, list | tuple)
    given = planes if is_list else [planes]
    said = _said_by(given)
    device, arrays = _placed(given, cuda_config)
    views, has_frames = _planes_of(arrays if is_list else arrays[0], format)
    source = _size(views)
    size = width or source[0], height or source[1]
    colors = matrix or said[0], color_range or said[1]
    plan = make_plan(format, source, size, *colors, algo=scale_algo, values=values)
    return _run(device, [views], plan, layout, has_frames=has_frames)


def nv12_to_rgb(
    buffers: Any, *, cuda_config: Any = None, coeff: int | None = None, sync: bool = False
) -> Buffer:
    """Convert NV12 frames to RGB, as SPDL's function of this name does.

    :func:`yuv_to_rgb` can do more, and takes what FFmpeg takes for a matrix that is not stated: BT.601.

    Args:
        buffers: An array ``(rows, W)`` or ``(frames, rows, W)`` (a 1 before the rows does no harm) with
            ``rows = H + H / 2``, or a sequence of such arrays, all of one size. uint8, C-contiguous. Limited
            range, unless they say otherwise (``buffer.color_range``).
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
    buffers: Any, *, cuda_config: Any = None, coeff: int | None = None, sync: bool = False
) -> Buffer:
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
) -> Buffer:
    if coeff is not None and coeff not in COEFFICIENTS:
        allowed = ", ".join(f"{number} ({name})" for number, name in COEFFICIENTS.items())
        raise ValueError(f"coeff must be one of {allowed}, not {coeff!r}")
    given = buffers if isinstance(buffers, list | tuple) else [buffers]
    if not given:
        raise ValueError("there are no buffers to convert, at least one is needed")
    said = _said_by(given)
    matrix = (said[0] or "bt709") if coeff is None else COEFFICIENTS[coeff]
    device, arrays = _placed(given, cuda_config)
    tiled = (
        one[:, None] if one.ndim == 3 else one[None] if one.ndim == 2 else one for one in arrays
    )
    batches = [_planes_of(one, _NV12)[0] for one in tiled]
    size, *others = {_size(planes) for planes in batches}
    if others:
        raise ValueError(
            f"all buffers must have pictures of one size (width, height), not {sorted([size, *others])}"
        )
    result = _run(device, batches, make_plan(_NV12, size, size, matrix, said[1], bgr=bgr), "NCHW")
    if sync and isinstance(result, CUDABuffer):
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


def _said_by(given: Sequence[Any]) -> tuple[str | None, str | None]:
    """Matrix and range that buffers state; other arrays state none.

    Raises:
        ValueError: They state different ones.
    """
    found = {
        (one.colorspace, one.color_range)
        for one in given
        if isinstance(one, CPUBuffer | CUDABuffer) and one.colorspace
    }
    if len(found) > 1:
        raise ValueError(
            f"the buffers state different colours (matrix, range), {sorted(found, key=str)}, and one call "
            "takes one kind. Convert them one by one"
        )
    return found.pop() if found else (None, None)


def _size(planes: Planes) -> Size:
    """Width and height."""
    height, width = planes[0].shape[1:]
    return int(width), int(height)


def _placed(arrays: Sequence[Any], cuda_config: Any) -> tuple[Device | None, list[Array]]:
    """The device that the arrays lie on, or ``None``, and NumPy's views of them.

    Raises:
        TransferError: CUDA cannot be used in this process, or the stream is of another device.
        ValueError: They lie in several places, or not where the configuration says.
    """
    places = {_device_of(array) for array in arrays}
    if len(places) > 1:
        found = ["host memory" if place is None else f"device {place}" for place in places]
        raise ValueError(f"all planes must lie on one device, not in {' and '.join(sorted(found))}")
    index = places.pop()
    if index is None:
        if cuda_config is not None:
            raise ValueError(
                "cuda_config is given, but the planes lie in host memory. Copy them to the device first, "
                "with transfer_buffer"
            )
        return None, [np.asarray(array) for array in arrays]
    config = as_cuda_config(index if cuda_config is None else cuda_config)
    device = open_device(config, _PURPOSE)
    if config.device_index != index:
        raise ValueError(
            f"an array lies on CUDA device {index}, and device {config.device_index} is to work on it. Copy "
            "it there first, or name its own device"
        )
    if config.stream is None:
        streams = (_current_stream(array, index) for array in arrays)
        device.stream = next((one for one in streams if one is not None), device.stream)
    return device, [_on_device(array, device) for array in arrays]


def _device_of(array: Any) -> int | None:
    """Number of the CUDA device that an array lies on; ``None``: in host memory."""
    if callable(getattr(array, "__dlpack_device__", None)):
        kind, index = array.__dlpack_device__()
        # kDLCUDA and kDLCUDAManaged; pinned memory (3) is host memory.
        return int(index) if int(kind) in (2, 13) else None
    # The interface alone does not say which.
    return 0 if hasattr(array, "__cuda_array_interface__") else None


def _current_stream(array: Any, index: int) -> int | None:
    """The stream that the library of an array, if it is PyTorch or CuPy, uses in this thread."""
    torch: Any = sys.modules.get("torch")
    cupy: Any = sys.modules.get("cupy")
    if torch is not None and isinstance(array, torch.Tensor):
        return int(torch.cuda.current_stream(index).cuda_stream)
    if cupy is not None and isinstance(array, cupy.ndarray):
        with cupy.cuda.Device(index):
            return int(cupy.cuda.get_current_stream().ptr)
    return None


def _on_device(array: Any, device: Device) -> Array:
    """An array of the device as :func:`in_place` has it; the device's stream waits for what fills it.

    Raises:
        TypeError: It says by DLPack alone where it lies.
    """
    if isinstance(array, CUDABuffer):
        array.wait_on(device.stream)
        return in_place(array.array)
    if not hasattr(array, "__cuda_array_interface__"):
        raise TypeError(
            f"{type(array).__name__} has no __cuda_array_interface__. torch.from_dlpack or cupy.from_dlpack "
            "makes an array of it that has"
        )
    stream = array.__cuda_array_interface__.get("stream")
    if stream is None:  # PyTorch names none, and means its current one
        stream = _current_stream(array, device.index)
    if stream is not None:
        wait_for(device.index, device.stream, [stream])
    return in_place(array)


def _planes_of(arrays: Any, format: YUVFormat) -> tuple[Planes, bool]:
    """Make Y, U and V, all views, of one array with all planes or of one array for each.

    Returns:
        The planes, and whether the arrays have a dimension of frames.

    Raises:
        ValueError: Shapes that do not fit each other or the format.
        TypeError: Another type than the format's samples.
    """
    parts = list(arrays) if isinstance(arrays, list | tuple) else _untiled(arrays, format)
    count = 1 if not format.sub_x else 2 if format.pairs else 3
    if len(parts) != count:
        raise ValueError(
            f"{format.name} has {count} planes, not {len(parts)}: pass an array for each, or one "
            "array with all of them as convert_frames makes it"
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
        down, across = format.chroma_shape(height, width)
        allowed = [(*frames, down, across)]
        if format.pairs:
            allowed = [(*frames, down, across, 2), (*frames, down, 2 * across)]
        for part in chroma:
            if part.shape not in allowed:
                raise ValueError(
                    f"chroma of {format.name} for luma of shape {luma.shape} must be "
                    f"{' or '.join(map(str, allowed))}, not {part.shape}"
                )
        if format.pairs:
            # Splits an axis, and so is a view in any strides.
            both = chroma[0].reshape(*frames, down, across, 2)
            chroma = [both[..., place] for place in format.pairs]
    y, u, v = (part if frames else part[None] for part in (luma, *(chroma or (luma, luma))))
    return (y, u, v), bool(frames)


def _untiled(array: Array, format: YUVFormat) -> list[Array]:
    """The planes of an array in which they lie as in :mod:`spdl_media.formats`."""
    layout = pixel_layout(format.name)
    frames = array[None] if array.ndim == 3 else array
    if layout is None or frames.ndim != 4 or not frames.flags.c_contiguous:
        raise ValueError(
            f"one array of {format.name}, of shape {array.shape}, must be C-contiguous and as convert_frames "
            "makes it: (1, rows, W), or (3, H, W) for 4:4:4, or several such. Pass a list with an array for "
            "each plane otherwise"
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
    device: Device | None,
    batches: Sequence[Planes],
    plan: Plan,
    layout: str,
    *,
    has_frames: bool = True,
) -> Buffer:
    """Convert frames, all of one size, into one array."""
    check_choice("layout", layout, _LAYOUTS)
    shape = [plan.height, plan.width]
    shape.insert(2 if layout == "NHWC" else 0, 3)
    if has_frames:
        shape.insert(0, sum(len(planes[0]) for planes in batches))
    block = None if device is None else device.empty(shape, plan.dtype)
    array = np.empty(shape, plan.dtype) if block is None else in_place(block.array)
    frames = array if has_frames else array[None]
    # The conversion writes in any strides, so a view with the channels last will do.
    pixels = frames if layout == "NHWC" else frames.transpose(0, 2, 3, 1)
    if device is None or block is None:
        convert_on_host(batches, plan, pixels)
        return CPUBuffer(array)
    convert_on_device(device, batches, plan, pixels)
    return buffer_on_stream(block, device)
