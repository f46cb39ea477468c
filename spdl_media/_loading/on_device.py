"""What ``load_*`` do with ``cuda=``: which way to the device, and the steps of each.

Pictures go one of three ways, and ``decoder="auto"`` takes the first that can make what is asked for:

``dali``    the file goes to DALI's operators, which decode and scale it on the device
``cpu``     FFmpeg's planes are copied, and a kernel scales and colours them on the device (``planes``)
``cpu``     the finished array is copied

Videos: NVDEC by DALI or PyAV, see :mod:`spdl_media.cuda._nvdec_rule`; else the finished array is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal, SupportsIndex, TypeAlias, get_args

from spdl_media._backends import is_available, require
from spdl_media._decoding.defaults import Default
from spdl_media._devices.choose import open_device
from spdl_media._devices.cupy_device import CupyDevice
from spdl_media._loading.batch import (
    ArrayLayout,
    OnError,
    image_batch_steps,
)
from spdl_media._loading.options import PictureOptions
from spdl_media._loading.pictures import CropPlan
from spdl_media.buffer import CPUBuffer
from spdl_media.config import (
    CUDAConfig,
    DecodeConfig,
    DemuxConfig,
    as_decode_config,
    one_cuda_config,
)
from spdl_media.cuda_buffer import Buffer, CUDABuffer
from spdl_media.errors import MissingDependencyError
from spdl_media.inputs import Source
from spdl_media.storage import PinnedMemory, Storage
from spdl_media.timing import Timestamp, Window
from spdl_media.transfer import to_device

PictureDecoder: TypeAlias = Literal["auto", "cpu", "dali"]
VideoDecoder: TypeAlias = Literal["auto", "cpu", "dali", "pyav"]
Device: TypeAlias = CUDAConfig | SupportsIndex
Steps: TypeAlias = Callable[[Callable[[], bool]], Buffer]


def device_config(
    cuda: Device | None, cuda_config: Device | None, decoder: str, allowed: Any
) -> CUDAConfig | None:
    """The config of the device that is asked for, or ``None``.

    Raises:
        ValueError: Both arguments are given, or a decoder that is none, or one that needs a device.
        TypeError: It is no device.
    """
    config = one_cuda_config(cuda, cuda_config)
    if decoder not in get_args(allowed):
        raise ValueError(f"decoder must be one of {get_args(allowed)}, not {decoder!r}")
    if config is None and decoder not in ("auto", "cpu"):
        raise ValueError(
            f"decoder={decoder!r} decodes on a CUDA device, so it needs one: cuda=0. FFmpeg's decoders for "
            "the CPU are chosen by decode_config(decoder=)"
        )
    return config


def batch_steps(
    srcs: Iterable[Source],
    options: PictureOptions,
    filter_desc: str | Default | None,
    cuts: CropPlan,
    demux_config: DemuxConfig | None,
    decode_config: DecodeConfig | None,
    storage: Storage | None,
    layout: ArrayLayout | None,
    on_error: OnError,
    cuda: Device | None,
    cuda_config: Device | None,
    decoder: PictureDecoder,
) -> Steps:
    """Check the arguments, and give what loads the batch; it asks before each picture whether to stop."""
    config = device_config(cuda, cuda_config, decoder, PictureDecoder)
    steps = partial(image_batch_steps, options=options, filter_desc=filter_desc, cuts=cuts)
    steps = partial(steps, demux_config=demux_config, decode_config=decode_config)
    steps = partial(steps, layout=layout, on_error=on_error)
    if config is None:
        return steps(srcs, storage=storage)
    staging: Storage = PinnedMemory() if storage is None else storage
    inputs: Any = srcs if isinstance(srcs, str | bytes | bytearray | memoryview) else list(srcs)
    on_cpu = steps(inputs, storage=staging)
    whole = isinstance(filter_desc, Default) and cuts.is_empty
    asked = inputs, config, options, demux_config, decode_config, layout, on_error
    if _takes_dali(decoder, options, whole=whole):
        return partial(_by_dali, *asked)
    device = open_device(config, "load_image_batch(cuda=)")
    if _takes_planes(options, as_decode_config(decode_config), whole=whole):
        return partial(_by_planes, *asked, staging=staging)
    return lambda stopped: _copied(on_cpu(stopped), device, config)


def _takes_dali(decoder: str, options: PictureOptions, *, whole: bool) -> bool:
    """Whether DALI is to decode.

    Raises:
        ValueError: It is asked for and cannot make such pictures.
        MissingDependencyError: It is asked for and not installed.
    """
    if decoder == "cpu":
        return False
    from spdl_media.cuda.nvjpeg import why_not_dali

    refusal = why_not_dali(options.pix_fmt, options.scale_algo)
    if not whole:
        refusal = "DALI's operators take no crops=, flips= or filter_desc="
    if decoder == "dali":
        if refusal:
            raise ValueError(f"decoder='dali': {refusal}. decoder='auto' takes the CPU for it")
        require("dali", "decoder='dali'")
        return True
    return refusal is None and is_available("dali") and is_available("nvimgcodec")


def _takes_planes(options: PictureOptions, config: DecodeConfig, *, whole: bool) -> bool:
    """Whether the kernel makes such pictures from planes."""
    return (
        whole
        and options.pix_fmt in ("rgb24", "bgr24")
        and options.scale_algo in ("bicubic", "bilinear")
        and options.quality == "accurate"
        and config.downscale is None
        and is_available("cupy")
    )


def _by_dali(
    srcs: Sequence[Source],
    config: CUDAConfig,
    options: PictureOptions,
    demux_config: DemuxConfig | None,
    decode_config: DecodeConfig | None,
    layout: ArrayLayout | None,
    on_error: OnError,
    stopped: Callable[[], bool],
    *,
    is_single: bool = False,
) -> Buffer:
    from spdl_media.cuda.nvjpeg import decode_image_batch

    return decode_image_batch(
        srcs,
        cuda=config,
        width=options.width,
        height=options.height,
        pix_fmt=options.pix_fmt or "",
        scale_mode=options.scale_mode,
        scale_algo=options.scale_algo,
        demux_config=demux_config,
        decode_config=decode_config,
        layout=layout,
        on_error=on_error,
        stopped=stopped,
        is_single=is_single,
    )


def _by_planes(
    srcs: Sequence[Source],
    config: CUDAConfig,
    options: PictureOptions,
    demux_config: DemuxConfig | None,
    decode_config: DecodeConfig | None,
    layout: ArrayLayout | None,
    on_error: OnError,
    stopped: Callable[[], bool],
    *,
    staging: Storage,
) -> Buffer:
    from spdl_media.cuda._planes_batch import load_planes

    return load_planes(
        srcs,
        _cupy_device(config),
        config,
        options,
        demux_config,
        decode_config,
        staging,
        layout,
        on_error,
        stopped,
    )


def _cupy_device(config: CUDAConfig) -> CupyDevice:
    """The stream of a config under CuPy, in the thread that asks."""
    device = CupyDevice(require("cupy", "load_*(cuda=)"), config.device_index, config.stream)
    return device if config.stream is not None else device.on_own_stream()


def _copied(buffer: CPUBuffer, device: Any, config: CUDAConfig) -> CUDABuffer:
    """The buffer on the device. Its memory goes back when the copy is done."""
    with buffer:
        return to_device(
            buffer.array, device, config, failures=buffer.failures, indices=buffer.indices
        )


def load_picture(
    src: Source,
    config: CUDAConfig,
    decoder: PictureDecoder,
    options: PictureOptions,
    filter_desc: str | Default | None,
    demux_config: DemuxConfig | None,
    decode_config: DecodeConfig | None,
    storage: Storage | None,
    layout: ArrayLayout | None,
    load: Callable[[Storage], CPUBuffer],
) -> Buffer:
    """Load one picture to a device.

    Args:
        src: The picture.
        config: The device.
        decoder: Who decodes.
        options: How it is to come out.
        filter_desc: The caller's own graph.
        demux_config: How to open it.
        decode_config: How to decode it.
        storage: Memory that it passes through.
        layout: Of the result.
        load: Loads it to host memory.
    """
    options.desc(filter_desc)  # refuses what cannot be
    whole = isinstance(filter_desc, Default)
    if _takes_dali(decoder, options, whole=whole):
        return _by_dali(
            [src],
            config,
            options,
            demux_config,
            decode_config,
            layout,
            "raise",
            lambda: False,
            is_single=True,
        )
    device = open_device(config, "load_image(cuda=)")
    return _copied(load(PinnedMemory() if storage is None else storage), device, config)


def load_frames(
    src: Source,
    timestamp: Timestamp | Window | None,
    config: CUDAConfig,
    decoder: VideoDecoder,
    options: PictureOptions,
    filter_desc: str | Default | None,
    num_frames: int | None,
    stream_index: int | None,
    demux_config: DemuxConfig | None,
    decode_config: DecodeConfig | None,
    storage: Storage | None,
    layout: ArrayLayout | None,
    name: str | None,
    load: Callable[[Storage], CPUBuffer],
) -> Buffer:
    """Load the frames of a video to a device.

    Args:
        src: The video.
        timestamp: The window.
        config: The device.
        decoder: Who decodes.
        options: How frames are to come out.
        filter_desc: The caller's own graph.
        num_frames: At most so many.
        stream_index: Of the stream in its container.
        demux_config: How to open it.
        decode_config: How to decode it.
        storage: Memory that they pass through, if the CPU decodes.
        layout: Of the result.
        name: What to call the source.
        load: Loads them to host memory.
    """
    options.desc(filter_desc)  # refuses what cannot be
    device = open_device(config, "load_video(cuda=)")
    if decoder != "cpu" and _takes_nvdec(decoder, options, whole=isinstance(filter_desc, Default)):
        from spdl_media.cuda.nvdec import load_video_nvdec

        return load_video_nvdec(
            src,
            timestamp,
            cuda=CUDAConfig(config.device_index, _cupy_device(config).stream),
            decoder=decoder,
            width=options.width,
            height=options.height,
            pix_fmt=options.pix_fmt,  # type: ignore[arg-type]  # looked at above, as are the next two
            scale_mode=options.scale_mode,
            scale_algo=options.scale_algo,  # type: ignore[arg-type]
            frame_rate=options.frame_rate,
            num_frames=num_frames,
            stream_index=stream_index,
            demux_config=demux_config,
            decode_config=decode_config,
            layout=layout or "NHWC",
            name=name,
        )
    return _copied(load(PinnedMemory() if storage is None else storage), device, config)


def _takes_nvdec(decoder: str, options: PictureOptions, *, whole: bool) -> bool:
    """Whether NVDEC is to decode; under ``"auto"`` a warning says what is missing for it.

    Raises:
        ValueError: A decoder is asked for that cannot make such frames.
        MissingDependencyError: Or one that is not there.
    """
    refusal = None
    if not whole or options.quality != "accurate":
        refusal = "filter_desc= and quality='fast' are for the CPU"
    elif options.pix_fmt not in ("rgb24", "bgr24"):
        refusal = f"it gives pix_fmt 'rgb24' or 'bgr24', not {options.pix_fmt!r}"
    elif options.scale_algo not in ("bicubic", "bilinear"):
        refusal = f"it scales with 'bicubic' or 'bilinear', not with {options.scale_algo!r}"
    if refusal and decoder != "auto":
        raise ValueError(f"decoder={decoder!r}: {refusal}. decoder='auto' takes the CPU for it")
    return refusal is None and (decoder != "auto" or _has_nvdec())


def _has_nvdec() -> bool:
    from spdl_media.cuda.fallback import warn_of_fallback
    from spdl_media.cuda.nvdec import why_not_nvdec

    missing = why_not_nvdec()
    if missing is None and not is_available("cupy"):
        try:
            require("cupy", "decoding video on the GPU")
        except MissingDependencyError as error:
            missing = str(error)
    if missing:
        warn_of_fallback(missing)
    return missing is None
