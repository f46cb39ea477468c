"""Loading of images with ``cuda=``: by DALI on the device, or on the CPU followed by a copy.

``decoder="auto"`` uses DALI for batches if it is installed and supports the request: files are decoded by
nvJPEG and the GPU's JPEG engine. Everything else, including single images, is decoded on the CPU and copied.
So is a whole batch if one of its files is not a JPEG, or DALI does not decode it: FFmpeg may decode it, or
its error tells what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, SupportsIndex, TypeAlias, cast, get_args

from spdl_media._checks import check_choice, check_positive, warn_caller
from spdl_media._optional import is_available
from spdl_media.arguments import OnError, as_list, check_array_layout
from spdl_media.batch import FrameRequest, load_rows
from spdl_media.buffer import Buffer
from spdl_media.config import CUDAConfig, one_cuda_config
from spdl_media.cuda.cuvid import NotOnDeviceError
from spdl_media.cuda.dali import check_device
from spdl_media.cuda.dali_decode import COLORS, FILTERS, load_images
from spdl_media.devices import check_stream, open_device
from spdl_media.errors import ConvertError, MissingDependencyError, TransferError
from spdl_media.inputs import Source
from spdl_media.operations import PictureOps
from spdl_media.rows import ArrayLayout
from spdl_media.transfer import copied

__all__ = ("CPUFallbackWarning", "decode_image_nvjpeg", "load_image_batch_nvjpeg")


class CPUFallbackWarning(UserWarning):
    """Media was decoded on the CPU and copied to the device, instead of on the GPU. The message says why."""


def warn_of_fallback(refusal: str, what: str = "this video") -> None:
    """Warn that the CPU decodes, with the reason."""
    message = f"{refusal}. The CPU decodes {what}, and the result is copied to the device"
    warn_caller(message, CPUFallbackWarning)


DeviceLike: TypeAlias = SupportsIndex | CUDAConfig
CPU: TypeAlias = Literal["cpu"]
"""Stands for a device: DALI's operators run on the CPU."""

SPDL_COLORS = {"rgb": "rgb24", "bgr": "bgr24"}


def device_steps(
    srcs: Sequence[Source], request: FrameRequest, config: CUDAConfig
) -> Callable[[Callable[[], bool] | None], Buffer]:
    """Check the request, and return a function that loads the images to a device.

    Raises:
        ValueError: The requested decoder does not support the request.
    """
    is_forced, refusal = request.decoder == "dali", _why_not_dali(request)
    if is_forced and refusal:
        raise ValueError(f"decoder='dali': {refusal}. decoder='auto' takes the CPU for it")

    def steps(stopped: Callable[[], bool] | None) -> Buffer:
        unusable: Exception | None = None
        # DALI is worth it for batches only: a single image takes 1.6 ms of CPU time with it.
        if refusal is None and (is_forced or (not request.is_single and _has_dali())):
            check_stream(config)
            try:
                check_device(config.device_index)
            except (MissingDependencyError, TransferError) as error:
                # PyTorch or CuPy may still find the device; then decode on the CPU and copy.
                if is_forced:
                    raise
                unusable = error
            else:
                return _load_by_dali(srcs, request, config, stopped)
        # Open the device in the thread that does the work, because the default stream is the thread's own.
        device = open_device(config, request.purpose)
        if unusable is not None:
            warn_of_fallback(str(unusable), "the images")
        return copied(load_rows(srcs, request, stopped), device, config)

    return steps


def _has_dali() -> bool:
    return is_available("dali") and is_available("nvimgcodec")


def _why_not_dali(request: FrameRequest) -> str | None:
    """Return why DALI is not used for the request, or ``None`` if it can be."""
    decode, ops = request.decode_config, request.ops
    if request.decoder == "cpu":
        return "decoder='cpu'"
    if not request.is_plain:
        return "DALI's operators take no filter_desc="
    if decode.decoder is not None or decode.decoder_options:
        return "decode_config(decoder=, decoder_options=) is for FFmpeg's decoders"
    if ops.pix_fmt not in COLORS:
        return f"DALI makes pix_fmt {_listed(COLORS)}, not {ops.pix_fmt!r}"
    if ops.scale_algo not in FILTERS:
        return f"DALI scales with scale_algo {_listed(FILTERS)} as FFmpeg does, not with {ops.scale_algo!r}"
    return None


def _listed(names: Iterable[str]) -> str:
    return " or ".join(repr(name) for name in names)


def _load_by_dali(
    srcs: Sequence[Source],
    request: FrameRequest,
    config: CUDAConfig | None,
    stopped: Callable[[], bool] | None = None,
    hw_decoder_load: float | None = 1.0,
) -> Buffer:
    """Load images by DALI; if it does not support one of them, load all on the CPU with a warning.

    Args:
        srcs: The images.
        request: Options of the load.
        config: The device; ``None`` means DALI's operators on the CPU.
        stopped: Checked before each image is read; ``True`` cancels the load.
        hw_decoder_load: As for :func:`decode_image_nvjpeg`.

    Raises:
        Exception: As :func:`load_images`.
    """
    # A copy of the list: packets replace sources that were read, because some can be read only once.
    index, inputs = None if config is None else config.device_index, list(srcs)
    try:
        return load_images(inputs, request, index, stopped, hw_decoder_load)
    except NotOnDeviceError as found:
        # Load the whole batch on the CPU, so that all its images are decoded the same way.
        buffer = load_rows(inputs, request, stopped)
        warn_of_fallback(str(found), "the images")
    return (
        buffer if config is None else copied(buffer, open_device(config, request.purpose), config)
    )


def decode_image_nvjpeg(
    src: Source | Sequence[Source],
    *,
    cuda: DeviceLike | CPU | None = None,
    cuda_config: DeviceLike | None = None,
    scale_width: int | None = None,
    scale_height: int | None = None,
    pix_fmt: str = "rgb",
    layout: ArrayLayout = "NCHW",
    hw_decoder_load: float | None = 1.0,
) -> Buffer:
    """Decode a JPEG on a device by DALI, or a list of JPEGs into one array.

    If a file is in another format, all are decoded on the CPU, with a :class:`CPUFallbackWarning`.
    ``load_image_batch(cuda=0, decoder="dali")`` does the same with more options.

    Args:
        src: The source, as for :func:`~spdl_media.load_image`, or a list or tuple of sources.
        cuda: Number of the device, a ``CUDAConfig``, or ``"cpu"`` for the same operators without a GPU. The
            work is done on a stream of DALI's own.
        cuda_config: The same as ``cuda``; give exactly one of the two.
        scale_width: Width to scale to. Without ``scale_height`` the aspect ratio is kept; with it, the
            image is stretched.
        scale_height: Height to scale to.
        pix_fmt: ``"rgb"`` or ``"bgr"``.
        layout: ``"NCHW"`` or ``"NHWC"``.
        hw_decoder_load: Share of the JPEGs for the GPU's JPEG engine, if it has one, from 0 to 1; ``None``
            means DALI's default, 0.65. On an H200, 1 is 1.4 times as fast as that in one thread, and takes
            0.6 of its CPU time.

    Returns:
        uint8 array ``(3, height, width)``, or ``(B, 3, height, width)`` for a list, values 0 to 255; channels
        are last for ``"NHWC"``. DALI owns the memory. The array is complete when this returns, so it can be
        read on any stream.

    Raises:
        MediaError: As for :func:`~spdl_media.load_image_batch`.
        MissingDependencyError: DALI is not installed, or is too old.
        TransferError: The batch does not fit into the memory of the device; there is no GPU; or this process
            was forked after CUDA had been used.
        RuntimeError: DALI fails in another way.
        ValueError: An option is invalid, or there is no such device.
        TypeError: An input is not a source, or the device is neither a number nor a config.

    Thread safety: safe.
    """
    for name, side in (("scale_width", scale_width), ("scale_height", scale_height)):
        if side is not None:
            check_positive(name, side)
    is_list = isinstance(src, list | tuple)
    srcs = cast("Sequence[Source]", src) if is_list else [cast("Source", src)]
    size = scale_width, scale_height
    options = {"layout": layout, "is_single": not is_list}
    return _as_spdl(srcs, (cuda, cuda_config), size, pix_fmt, hw_decoder_load, **options)


def load_image_batch_nvjpeg(
    srcs: Iterable[Source],
    *,
    cuda: DeviceLike | CPU | None = None,
    cuda_config: DeviceLike | None = None,
    width: int,
    height: int,
    pix_fmt: str = "rgb",
    layout: ArrayLayout = "NCHW",
    on_error: OnError = "raise",
    hw_decoder_load: float | None = 1.0,
) -> Buffer:
    """Load images into one array on a device by DALI, stretched to one size.

    ``load_image_batch(cuda=0, decoder="dali")`` does the same with more options.

    Args:
        srcs: The images, each as for :func:`~spdl_media.load_image`.
        cuda: Number of the device, a ``CUDAConfig``, or ``"cpu"`` for the same operators without a GPU. The
            work is done on a stream of DALI's own.
        cuda_config: The same as ``cuda``; give exactly one of the two.
        width: Width of the result.
        height: Height of the result.
        pix_fmt: ``"rgb"`` or ``"bgr"``.
        layout: ``"NCHW"`` or ``"NHWC"``.
        on_error: Handling of images that fail, as for :func:`~spdl_media.load_image_batch`.
        hw_decoder_load: Share of the JPEGs for the GPU's JPEG engine, if it has one, from 0 to 1; ``None``
            means DALI's default, 0.65. On an H200, 1 is 1.4 times as fast as that in one thread, and takes
            0.6 of its CPU time.

    Returns:
        uint8 array ``(B, 3, height, width)`` or ``(B, height, width, 3)``, values 0 to 255. DALI owns the
        memory. The array is complete when this returns, so it can be read on any stream.

    Raises:
        Exception: As :func:`decode_image_nvjpeg`.

    Thread safety: safe.
    """
    check_choice("on_error", on_error, get_args(OnError))
    options = {"layout": layout, "on_error": on_error}
    return _as_spdl(srcs, (cuda, cuda_config), (width, height), pix_fmt, hw_decoder_load, **options)


def _as_spdl(
    srcs: Iterable[Source],
    devices: tuple[Any, Any],
    size: tuple[int | None, int | None],
    pix_fmt: str,
    hw_decoder_load: float | None,
    **options: Any,
) -> Buffer:
    """Check the arguments of SPDL's functions, and load the images."""
    # DALI does not use the stream of a config, but it must belong to the device.
    is_cpu = devices in (("cpu", None), (None, "cpu"))
    config = None if is_cpu else one_device(*devices)
    check_choice("pix_fmt", pix_fmt, tuple(SPDL_COLORS))
    check_array_layout(options["layout"])
    if hw_decoder_load is not None and not 0 <= hw_decoder_load <= 1:
        raise ValueError(
            f"hw_decoder_load must be a share from 0 to 1, or None for DALI's own, not {hw_decoder_load!r}"
        )
    # SPDL stretches images to the size.
    ops = PictureOps(*size, SPDL_COLORS[pix_fmt], scale_mode=None)
    inputs = as_list(srcs, one="decode_image_nvjpeg")
    if not inputs:
        raise ConvertError("there are no inputs to load: the sequence is empty")
    request = FrameRequest(ops=ops, desc=ops, purpose="load_image_batch(cuda=)", **options)
    return _load_by_dali(inputs, request, config, hw_decoder_load=hw_decoder_load)


def one_device(cuda: Any, cuda_config: Any) -> CUDAConfig:
    """Return the config that is given by one of the two arguments.

    Raises:
        ValueError: Neither or both arguments are given.
        TypeError: The argument is neither a number nor a config.
        TransferError: The stream belongs to another device.
    """
    config = one_cuda_config(cuda, cuda_config)
    if config is None:
        raise ValueError("give one of cuda= and cuda_config=, such as cuda=0, not neither")
    check_stream(config)
    return config
