"""Pictures with ``cuda=``: which way they go to the device, and the steps of each.

There are three ways, and ``decoder="auto"`` takes the first that can make what is asked for:

``dali``    the file goes to DALI's operators, which decode and scale it on the device
``planes``  FFmpeg's planes are copied, and a kernel scales and colours them on the device
``copied``  the finished array is copied

``decoder="cpu"`` leaves the first out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from spdl_media._devices.choose import open_device
from spdl_media._loading.batch import ArrayLayout, OnError, as_list, image_batch_steps
from spdl_media._loading.on_device import (
    DeviceLike,
    PictureDecoder,
    copied,
    cupy_device,
    device_config,
    staging,
    why_no_kernels,
)
from spdl_media._loading.pictures import CropPlan
from spdl_media._optional import is_available
from spdl_media.buffer import CPUBuffer
from spdl_media.config import CUDAConfig, DecodeConfig, DemuxConfig, as_decode_config
from spdl_media.cuda_buffer import Buffer
from spdl_media.decode import Default
from spdl_media.errors import MissingDependencyError, TransferError
from spdl_media.inputs import Source
from spdl_media.operations import PictureOps
from spdl_media.storage import Storage

Steps: TypeAlias = Callable[[Callable[[], bool]], Buffer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is asked for, beside the pictures.

    Attributes:
        config: The device.
        decoder: Who decodes.
        options: How pictures are to come out.
        is_plain: They are neither cut nor mirrored, and no graph of the caller's own is run.
        demux_config: How to open them.
        decode_config: How to decode them.
        storage: Memory that they pass through.
        layout: Of the result.
        on_error: What becomes of those that fail.
        purpose: The function, for messages.
        is_single: The result is one picture, and not an array of one.
        name: What to call the single picture.
    """

    config: CUDAConfig
    decoder: PictureDecoder
    options: PictureOps
    is_plain: bool
    demux_config: DemuxConfig | None
    decode_config: DecodeConfig | None
    storage: Storage
    layout: ArrayLayout | None
    on_error: OnError = "raise"
    purpose: str = "load_image_batch(cuda=)"
    is_single: bool = False
    name: str | None = None


def batch_steps(
    srcs: Iterable[Source],
    *,
    options: PictureOps,
    filter_desc: str | Default | None,
    cuts: CropPlan,
    demux_config: DemuxConfig | None,
    decode_config: DecodeConfig | None,
    storage: Storage | None,
    layout: ArrayLayout | None,
    on_error: OnError,
    cuda: DeviceLike | None,
    cuda_config: DeviceLike | None,
    decoder: PictureDecoder,
) -> Steps:
    """Check the arguments, and give what loads the batch; it asks before each picture whether to stop."""
    config = device_config(cuda, cuda_config, decoder, PictureDecoder)
    inputs = as_list(srcs)
    on_cpu = image_batch_steps(
        inputs,
        options=options,
        filter_desc=filter_desc,
        cuts=cuts,
        demux_config=demux_config,
        decode_config=decode_config,
        storage=storage if config is None else staging(storage),
        layout=layout,
        on_error=on_error,
    )
    if config is None:
        return on_cpu
    asked = Asked(
        config=config,
        decoder=decoder,
        options=options,
        is_plain=isinstance(filter_desc, Default) and cuts.is_empty,
        demux_config=demux_config,
        decode_config=decode_config,
        storage=staging(storage),
        layout=layout,
        on_error=on_error,
    )
    _check_decoder(asked)
    # The device is opened in the thread that does the work, whose own stream it is.
    return lambda stopped: _to_device(inputs, asked, on_cpu, stopped)


def load_picture(src: Source, asked: Asked, load: Callable[[], CPUBuffer]) -> Buffer:
    """Load one picture to a device.

    Args:
        src: The picture.
        asked: How, as a single one.
        load: Loads it to host memory.
    """
    _check_decoder(asked)
    return _to_device([src], asked, lambda _: load(), lambda: False)


def _to_device(
    srcs: Sequence[Source],
    asked: Asked,
    on_cpu: Callable[[Callable[[], bool]], CPUBuffer],
    stopped: Callable[[], bool],
) -> Buffer:
    """Load pictures the first way that can make what is asked for."""
    is_for_dali = _dali_refusal(asked) is None and (asked.decoder == "dali" or _has_dali())
    unusable = _why_dali_fails(asked) if is_for_dali else None
    if is_for_dali and unusable is None:
        return _by_dali(srcs, asked, stopped)
    device = open_device(asked.config, asked.purpose)
    if unusable is not None:
        from spdl_media.cuda.fallback import warn_of_fallback

        warn_of_fallback(str(unusable), "the pictures")
    if _takes_planes(asked):
        return _by_planes(srcs, asked, stopped)
    return copied(on_cpu(stopped), device, asked.config)


def _check_decoder(asked: Asked) -> None:
    """Refuse pictures that the decoder that is asked for cannot make."""
    if asked.decoder == "dali" and (refusal := _dali_refusal(asked)):
        raise ValueError(f"decoder='dali': {refusal}. decoder='auto' takes the CPU for it")


def _dali_refusal(asked: Asked) -> str | None:
    """Why DALI is not to make such pictures, or cannot; ``None``: it can."""
    if asked.decoder == "cpu":
        return "decoder='cpu'"
    if not asked.is_plain:
        return "DALI's operators take no crops=, flips= or filter_desc="
    from spdl_media.cuda.nvjpeg import why_not_dali

    return why_not_dali(asked.options.pix_fmt, asked.options.scale_algo)


def _has_dali() -> bool:
    return is_available("dali") and is_available("nvimgcodec")


def _why_dali_fails(asked: Asked) -> Exception | None:
    """Why DALI, which is installed, cannot be used on the device.

    Raises:
        MissingDependencyError: It is asked for, and is not installed or too old.
        TransferError: It is asked for, and finds no device.
        ValueError: There are devices, but not this one.
    """
    from spdl_media.cuda.slots import SlotDevice, check_device

    try:
        check_device(SlotDevice("gpu", asked.config.device_index))
    except (MissingDependencyError, TransferError) as error:
        if asked.decoder == "dali":
            raise
        return error
    return None


def _takes_planes(asked: Asked) -> bool:
    """Whether the kernel makes such pictures from planes."""
    options, config = asked.options, as_decode_config(asked.decode_config)
    return (
        asked.is_plain
        and not asked.is_single
        and options.pix_fmt in ("rgb24", "bgr24")
        and options.scale_algo in ("bicubic", "bilinear")
        and options.quality != "fast"
        and config.downscale is None
        and is_available("cupy")
        and why_no_kernels(asked.config.device_index) is None
    )


def _by_dali(srcs: Sequence[Source], asked: Asked, stopped: Callable[[], bool]) -> Buffer:
    from spdl_media.cuda.nvjpeg import decode_image_batch

    return decode_image_batch(
        srcs,
        cuda=asked.config,
        width=asked.options.width,
        height=asked.options.height,
        pix_fmt=asked.options.pix_fmt or "",
        scale_mode=asked.options.scale_mode,
        scale_algo=asked.options.scale_algo,
        demux_config=asked.demux_config,
        decode_config=asked.decode_config,
        layout=asked.layout,
        on_error=asked.on_error,
        stopped=stopped,
        is_single=asked.is_single,
        name=asked.name,
    )


def _by_planes(srcs: Sequence[Source], asked: Asked, stopped: Callable[[], bool]) -> Buffer:
    from spdl_media.cuda._planes_batch import load_planes

    return load_planes(
        srcs,
        cupy_device(asked.config, asked.purpose),
        asked.config,
        asked.options,
        asked.demux_config,
        asked.decode_config,
        asked.storage,
        asked.layout,
        asked.on_error,
        stopped,
    )
