"""YUV to RGB: one function for arrays in host memory and on a CUDA device, with the same result.

On a device, one kernel (``yuv_to_rgb.cu``) reads the planes, scales, converts and writes the layout and type
that were asked for. In host memory NumPy does the same operations in the same order: that is the reference,
not a fast path; :func:`~spdl_media.decode_packets` converts faster on the CPU.

    planes -> planes_of (views of Y, U, V) -> make_plan (tables, matrix) -> NumPy, or a launch of the kernel
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from spdl_media.buffer import Buffer, CPUBuffer, CUDABuffer
from spdl_media.cuda.color_formats import Planes, planes_of, yuv_format
from spdl_media.cuda.color_launch import (
    color_device,
    convert_on_device,
    convert_on_host,
    device_of,
    on_device,
)
from spdl_media.cuda.color_plan import (
    COEFFICIENTS,
    Look,
    Plan,
    RGBLayout,
    ScaleAlgo,
    make_plan,
)
from spdl_media.devices import Device
from spdl_media.handover import Block, in_place
from spdl_media.transfer import buffer_on_stream
from spdl_media.values import PerChannel, Values, parse_values

__all__ = ("nv12_to_bgr", "nv12_to_rgb", "yuv_to_rgb")

Array: TypeAlias = npt.NDArray[Any]

_LAYOUTS = get_args(RGBLayout)
_NV12 = yuv_format("nv12")


def yuv_to_rgb(
    planes: Any,
    pix_fmt: str,
    *,
    matrix: str | None = None,
    color_range: str | None = None,
    chroma_location: str | None = None,
    width: int | None = None,
    height: int | None = None,
    scale_algo: ScaleAlgo | None = None,
    layout: RGBLayout = "NHWC",
    normalize: tuple[PerChannel, PerChannel] | None = None,
    out: Any = None,
    cuda_config: Any = None,
) -> Buffer:
    """Convert planes of YUV to RGB, and scale them in the same pass.

    The result is within one level of 255 of FFmpeg's scaler with its accurate flags, which the CPU path uses,
    in host memory and on a device alike. Primaries and gamma are left alone, as everywhere.

    Args:
        planes: An array for each plane of the format: luma ``(H, W)``, chroma ``(h, w)``, or ``(h, w, 2)`` or
            ``(h, 2 w)`` where U and V alternate; sides of chroma are rounded up. Or one array with all of
            them as :func:`~spdl_media.convert_frames` makes it: ``(1, rows, W)``, ``(3, H, W)`` for 4:4:4.
            All may have a dimension of frames in front. uint8, or uint16 for deep formats, in any strides.
        pix_fmt: FFmpeg's name: ``"nv12"``, ``"yuv420p"``, ``"yuvj422p"``, ``"p010le"``, ``"yuv420p10le"``,
            ``"yuv444p12msble"``, ``"gray"``, ... The byte order is that of the arrays.
        matrix: As ``frames.colorspace`` has it: ``"bt709"``, ``"smpte170m"`` or ``"bt601"``, ``"bt2020nc"``,
            ``"fcc"``, ``"smpte240m"``, ``"ycgco"``, ... ``None``: what buffers say (``buffer.colorspace``),
            else BT.601, as FFmpeg takes it.
        color_range: ``"tv"`` or ``"pc"``, as ``frames.color_range`` has it; ``None``: what buffers say, else
            limited, but full for the ``yuvj`` formats. Gray is full whatever is said here, as in FFmpeg, and
            has no matrix.
        chroma_location: Where chroma stands: ``"left"``, ``"center"``, ``"topleft"``, ``"top"``,
            ``"bottomleft"`` or ``"bottom"``; ``None``: the center, as FFmpeg's scaler takes it.
        width: Pixels in a row of the result; ``None``: as it is.
        height: Rows of the result.
        scale_algo: The filter for chroma and for scaling, antialiased: ``"bicubic"`` (FFmpeg's, which
            is sharper than Pillow's) or ``"bilinear"``. ``None``: bicubic where the size changes, else
            bilinear for chroma, as the CPU path has it.
        layout: ``"NHWC"`` or ``"NCHW"``.
        normalize: ``(mean, std)`` of three values each, in the order of the channels, for a float32 result
            ``(rgb / 255 - mean) / std`` that was not rounded to whole levels; ``((0, 0, 0), (1, 1, 1))``
            gives 0 to 1. ``None``: uint8.
        out: An array to fill, of the shape and type of the result and beside the planes.
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
    format = yuv_format(pix_fmt)
    said = _said_by(planes)
    look = Look(
        matrix or said[0],
        color_range or said[1],
        chroma_location,
        width,
        height,
        scale_algo,
        _values_of(normalize),
    )
    tiled = not isinstance(planes, list | tuple)
    device, arrays = _placed([planes] if tiled else planes, cuda_config)
    views, has_frames = planes_of(arrays[0] if tiled else arrays, format)
    plan = make_plan(format, look, *_size(views))
    return _run(device, [views], plan, layout, out, has_frames=has_frames)


def nv12_to_rgb(
    buffers: Any,
    *,
    cuda_config: Any = None,
    coeff: int | None = None,
    matrix: str | None = None,
    color_range: str | None = None,
    layout: RGBLayout = "NCHW",
    sync: bool = False,
) -> Buffer:
    """Convert NV12 frames to RGB, as SPDL's function of this name does.

    :func:`yuv_to_rgb` can do more, and takes what FFmpeg takes for a matrix that is not stated: BT.601.

    Args:
        buffers: An array ``(rows, W)`` or ``(frames, rows, W)`` (a 1 before the rows does no harm) with
            ``rows = H + H / 2``, or a sequence of such arrays, all of one size. uint8, in any strides.
        cuda_config: As in :func:`yuv_to_rgb`.
        coeff: The matrix as a number of H.273: 1 BT.709, 4 FCC, 5 and 6 BT.601, 7 SMPTE 240M, 8 YCgCo,
            9 and 10 BT.2020 (10 means another equation, for which SPDL takes the same matrix, too).
            ``None``: what the buffers say (``buffer.colorspace``), else BT.709, SPDL's default.
        matrix: The matrix by name; then ``coeff`` does not count.
        color_range: ``"tv"`` or ``"pc"``; ``None``: what the buffers say, else limited.
        layout: ``"NCHW"`` or ``"NHWC"``.
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
    look = _nv12_look(buffers, coeff, matrix, color_range)
    return _convert_nv12(buffers, look, cuda_config, layout, sync=sync)


def nv12_to_bgr(
    buffers: Any,
    *,
    cuda_config: Any = None,
    coeff: int | None = None,
    matrix: str | None = None,
    color_range: str | None = None,
    layout: RGBLayout = "NCHW",
    sync: bool = False,
) -> Buffer:
    """Convert NV12 frames to RGB with blue first. All else is as in :func:`nv12_to_rgb`.

    Returns:
        uint8 buffer ``(frames, 3, H, W)``; see :func:`yuv_to_rgb`.

    Raises:
        ValueError: As in :func:`nv12_to_rgb`.
        TypeError: As in :func:`nv12_to_rgb`.
        TransferError: As in :func:`nv12_to_rgb`.
    """
    look = replace(_nv12_look(buffers, coeff, matrix, color_range), bgr=True)
    return _convert_nv12(buffers, look, cuda_config, layout, sync=sync)


def _nv12_look(
    buffers: Any, coeff: int | None, matrix: str | None, color_range: str | None
) -> Look:
    if coeff is not None:
        matrix = matrix or _matrix_of(coeff)
    if matrix and color_range:
        return Look(matrix, color_range)
    said = _said_by(buffers)
    return Look(matrix or said[0] or _matrix_of(1), color_range or said[1])


def _values_of(normalize: Any) -> Values | None:
    if normalize is None:
        return None
    if not isinstance(normalize, Sequence) or len(normalize) != 2:
        raise TypeError(
            f"normalize must be (mean, std), each a number or one for each channel, not {normalize!r}"
        )
    return parse_values("float32", *normalize, pix_fmt="rgb24")


def _said_by(planes: Any) -> tuple[str | None, str | None]:
    """Matrix and range that a buffer or a sequence of them states; other arrays state none.

    Raises:
        ValueError: They state different ones.
    """
    given = planes if isinstance(planes, list | tuple) else [planes]
    found = {
        (one.colorspace, one.color_range)
        for one in given
        if isinstance(one, CPUBuffer | CUDABuffer) and one.colorspace
    }
    if len(found) > 1:
        raise ValueError(
            f"the buffers state different colours (matrix, range), {sorted(found, key=str)}, and one call "
            "takes one kind. Convert them one by one, or say what counts: matrix= and color_range="
        )
    return found.pop() if found else (None, None)


def _matrix_of(coeff: int) -> str:
    if coeff not in COEFFICIENTS:
        allowed = ", ".join(f"{number} ({name})" for number, name in COEFFICIENTS.items())
        raise ValueError(f"coeff must be one of {allowed}, not {coeff!r}. matrix= takes names")
    return COEFFICIENTS[coeff]


def _convert_nv12(
    buffers: Any, look: Look, cuda_config: Any, layout: RGBLayout, *, sync: bool
) -> Buffer:
    given = buffers if isinstance(buffers, list | tuple) else [buffers]
    if not given:
        raise ValueError("there are no buffers to convert, at least one is needed")
    device, arrays = _placed(given, cuda_config)
    batches = [planes_of(_with_frames(array), _NV12)[0] for array in arrays]
    if len(sizes := {_size(planes) for planes in batches}) > 1:
        raise ValueError(
            f"all buffers must have pictures of one size (width, height), not {sorted(sizes)}"
        )
    plan = make_plan(_NV12, look, *_size(batches[0]))
    result = _run(device, batches, plan, layout, None, has_frames=True)
    if sync and device is not None:
        device.record().synchronize()
    return result


def _size(planes: Planes) -> tuple[int, int]:
    """Width and height."""
    height, width = planes[0].shape[1:]
    return int(width), int(height)


def _with_frames(array: Any) -> Any:
    """An array of NV12 as (frames, 1, rows, W)."""
    if array.ndim == 2:
        return array[None, None]
    return array[:, None] if array.ndim == 3 else array


def _placed(arrays: Sequence[Any], cuda_config: Any) -> tuple[Device | None, list[Any]]:
    """The device that the arrays lie on, or ``None``, and views of them as its library has them."""
    places = {device_of(array) for array in arrays}
    if places == {None}:
        if cuda_config is not None:
            raise ValueError(
                "cuda_config is given, but the planes lie in host memory. Copy them to the device first, "
                "with transfer_buffer"
            )
        return None, [np.asarray(array) for array in arrays]
    if len(places) > 1:
        found = ["host memory" if place is None else f"device {place}" for place in places]
        raise ValueError(f"all planes must lie on one device, not in {' and '.join(sorted(found))}")
    index = places.pop()
    assert index is not None
    device = color_device(arrays, cuda_config, index)
    return device, [on_device(array, device) for array in arrays]


def _run(
    device: Device | None,
    batches: Sequence[Planes],
    plan: Plan,
    layout: str,
    out: Any,
    *,
    has_frames: bool,
) -> Buffer:
    """Convert frames, all of one size, into one array."""
    if layout not in _LAYOUTS:
        raise ValueError(f"layout must be one of {_LAYOUTS}, not {layout!r}")
    sides = (plan.height, plan.width)
    shape: tuple[int, ...] = (*sides, 3) if layout == "NHWC" else (3, *sides)
    if has_frames:
        shape = (sum(len(planes[0]) for planes in batches), *shape)
    block, array = _memory(device, shape, plan.dtype, out)
    frames = array if has_frames else array[None]
    # The conversion writes in any strides, so a view with the channels last will do.
    pixels = frames if layout == "NHWC" else frames.transpose(0, 2, 3, 1)
    if device is not None:
        convert_on_device(device, batches, plan, pixels)
        return buffer_on_stream(block, device)
    start = 0
    for planes in batches:
        stop = start + len(planes[0])
        convert_on_host(planes, plan, pixels[start:stop])
        start = stop
    return CPUBuffer(array)


def _memory(
    device: Device | None, shape: tuple[int, ...], dtype: str, out: Any
) -> tuple[Block, Array]:
    """New memory, or that of ``out``, and NumPy's view of it."""
    if out is None:
        if device is not None:
            block = device.empty(shape, dtype)
            return block, in_place(block.array)
        out = np.empty(shape, dtype)
    if (device is None) != (device_of(out) is None):
        place = "in host memory" if device is None else "on a CUDA device"
        raise ValueError(f"out must lie where the planes do, {place}")
    array = np.asarray(out) if device is None else on_device(out, device)
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(f"out must be {shape} {dtype}, not {array.shape} {array.dtype}")
    if device is None and not array.flags.writeable:
        raise ValueError("out must be writable, and this array is read-only")
    return Block(array if device is None else out, _nobody), array


def _nobody(stream: int) -> None:
    """The memory is the caller's, who knows who reads it."""
