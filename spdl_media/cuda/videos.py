"""Videos decoded by the hardware of an NVIDIA GPU (NVDEC), with frames that never leave the device.

    packets -> NVIDIA's parser and decoder -> surfaces on the device -> rows of an array there

Window, times, lead-in and damage are handled by the same code as on the CPU path; only the decoder and the
rows differ. Streams that NVDEC does not support are decoded on the CPU, with a warning, unless the caller
chose the decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal, SupportsIndex, TypeAlias

from spdl_media._checks import check_choice, check_int
from spdl_media.arguments import check_array_layout
from spdl_media.batch import FrameRequest
from spdl_media.buffer import Buffer
from spdl_media.config import (
    DEFAULT_DECODE_CONFIG,
    CUDAConfig,
    DecodeConfig,
    DemuxConfig,
    as_decode_config,
)
from spdl_media.cuda.color_plan import SCALE_ALGOS, ScaleAlgo
from spdl_media.cuda.cuvid import NotOnDeviceError
from spdl_media.cuda.dali_decode import load_video_by_dali
from spdl_media.cuda.images import SPDL_COLORS, one_device, warn_of_fallback
from spdl_media.cuda.nvdec import config_refusal, missing_library
from spdl_media.cuda.video_path import decode_batches, decode_clip, not_on_nvdec
from spdl_media.cuda.video_rows import Output, VideoDevice
from spdl_media.demuxer import Demuxer
from spdl_media.devices import open_device
from spdl_media.geometry import Box, Size
from spdl_media.inputs import Source
from spdl_media.operations import PictureOps
from spdl_media.packets import ImagePackets, VideoPackets, metadata_of
from spdl_media.rows import ArrayLayout, check_enough
from spdl_media.timing import seconds_of
from spdl_media.video_arrays import TimedFrames, cut_of_all, load_frames, stated_size

__all__ = ("decode_packets_nvdec", "streaming_load_video_nvdec")

DeviceLike: TypeAlias = SupportsIndex | CUDAConfig | VideoDevice


def device_frame_steps(
    request: FrameRequest, config: CUDAConfig
) -> Callable[[VideoPackets], TimedFrames]:
    """Check the request, and return a function that decodes packets to an array on a device.

    Raises:
        ValueError: An option is invalid, or the decoder does not support the request.
        MissingDependencyError: The requested decoder is not installed.
        TransferError: There is no device.
    """
    finish, on_cpu = request.staged()

    def by_cpu(packets: VideoPackets) -> TimedFrames:
        buffer, timestamps = load_frames(packets, on_cpu)
        return finish(buffer), timestamps

    if not _decodes_on_device(request):
        return by_cpu

    def on_device(packets: VideoPackets) -> TimedFrames:
        try:
            if request.decoder == "dali":
                index = config.device_index
                buffer, timestamps = load_video_by_dali(packets, index, request.num_frames)
            else:
                buffer, timestamps = _by_nvdec(packets, config, request)
        except NotOnDeviceError as refusal:
            if request.decoder != "auto":
                # A decoder that the caller chose is not replaced.
                raise not_on_nvdec(refusal, packets.source) from refusal.__cause__
            warn_of_fallback(f"{packets.source}: {refusal}")
            return by_cpu(packets)
        # The CPU path checks this itself.
        found, wanted, on_short = buffer.shape[0], request.num_frames or 0, request.on_short
        check_enough(found, wanted, on_short, "frames", packets.window, packets.source)
        return buffer, timestamps

    return on_device


def _by_nvdec(packets: VideoPackets, config: CUDAConfig, request: FrameRequest) -> TimedFrames:
    ops = cut_of_all(packets, request, request.ops)
    assert isinstance(ops, PictureOps)
    output = Output(ops, request.layout or "NHWC", request.values)
    device, decode, count = _video_device(config), request.decode_config, request.num_frames
    buffer, pts, time_base = decode_clip(packets, device, output, decode, count)
    # One box and one flip for all frames of a clip.
    if request.cuts is not None:
        buffer.boxes, buffer.flips = request.cuts.drawn([0], [0])
    return buffer, lambda: seconds_of(pts, time_base, metadata_of(packets).zero)


def _decodes_on_device(request: FrameRequest) -> bool:
    """Whether to decode on the device. For ``"auto"``, warn if a library is missing.

    Raises:
        ValueError: The requested decoder does not support the request.
    """
    if request.decoder == "cpu":
        return False
    refusal = _refusal(request)
    if refusal and request.decoder != "auto":
        raise ValueError(
            f"decoder={request.decoder!r}: {refusal}. decoder='auto' takes the CPU for it"
        )
    if refusal or request.decoder != "auto":
        return not refusal
    # A decoder that the caller chose is not replaced; its own error says what is missing.
    missing = missing_library()
    if missing:
        warn_of_fallback(str(missing))
    return missing is None


def _refusal(request: FrameRequest) -> str | None:
    """Return why decoders of the device do not support the request, judged by the arguments, or ``None``."""
    options = request.ops
    if not request.is_plain or options.quality == "fast":
        return "filter_desc= and quality='fast' are for the CPU"
    if options.pix_fmt not in ("rgb24", "bgr24"):
        return f"it gives pix_fmt 'rgb24' or 'bgr24', not {options.pix_fmt!r}"
    if options.scale_algo not in ("bicubic", "bilinear"):
        return f"it scales with 'bicubic' or 'bilinear', not with {options.scale_algo!r}"
    if request.on_short not in (None, "error"):
        # It would have to fill rows on the device.
        return f"on_short={request.on_short!r} is for the CPU"
    if request.values is not None and request.values.dtype == "float16":
        # The kernel writes uint8 and float32.
        return "dtype='float16' is for the CPU"
    if refusal := config_refusal(request.decode_config):
        return refusal
    asked = options.width, options.height, options.frame_rate
    order = options.pix_fmt, request.layout or "NHWC"
    is_plain = request.cuts is None and not (request.values and request.values.is_float)
    if request.decoder == "dali" and not (
        is_plain
        and asked == (None,) * 3
        and request.decode_config == DEFAULT_DECODE_CONFIG
        and order == ("rgb24", "NHWC")
    ):
        return (
            "DALI gives frames as they are, rgb24 in NHWC, without width=, height=, frame_rate=, crops=, "
            "flips=, dtype= of floats and decode_config="
        )
    return None


def decode_packets_nvdec(
    packets: VideoPackets,
    *,
    cuda: DeviceLike | None = None,
    cuda_config: DeviceLike | None = None,
    pix_fmt: Literal["rgb", "bgr"] = "rgb",
    crop_left: int = 0,
    crop_top: int = 0,
    crop_right: int = 0,
    crop_bottom: int = 0,
    scale_width: int | None = None,
    scale_height: int | None = None,
    scale_algo: ScaleAlgo = "bicubic",
    layout: ArrayLayout = "NCHW",
    num_frames: int | None = None,
    decode_config: DecodeConfig | None = None,
) -> Buffer:
    """Decode video packets on a GPU to upright frames of their window.

    Args:
        packets: From :func:`~spdl_media.demux_video`. Not consumed.
        cuda: Number of the device, or a config, whose allocator is ignored.
        cuda_config: The same as ``cuda``; give exactly one of the two.
        pix_fmt: ``"rgb"`` or ``"bgr"``, 8 bits per channel.
        crop_left: Pixels to crop from the left of the upright frame, before it is scaled; even.
        crop_top: Pixels to crop from the top; even.
        crop_right: Pixels to crop from the right; even.
        crop_bottom: Pixels to crop from the bottom; even.
        scale_width: Width to scale to. Without ``scale_height`` the aspect ratio is kept.
        scale_height: Height to scale to.
        scale_algo: ``"bicubic"`` or ``"bilinear"``, antialiased.
        layout: ``"NCHW"`` or ``"NHWC"``.
        num_frames: Maximum number of frames. Decoding stops after them.
        decode_config: Options; ``decoder`` and ``decoder_options`` are for the CPU.

    Returns:
        uint8 array ``(N, 3, H, W)`` or ``(N, H, W, 3)`` on the device, values 0 to 255. It is ready when its
        stream has done its work.

    Raises:
        DecodeError: The data is damaged, or NVDEC does not decode it.
        ConvertError: No frame lies in the window, or frames differ in size.
        MissingDependencyError: The driver or its video library is missing.
        ValueError: There is no such device, or an option is invalid.
        TransferError: The device has no memory or no decoder left, or is gone; the driver is too old.

    Thread safety: safe.
    """
    if not isinstance(packets, VideoPackets) or isinstance(packets, ImagePackets):
        raise TypeError(f"decode_packets_nvdec takes VideoPackets, not {type(packets).__name__}")
    check_choice("pix_fmt", pix_fmt, tuple(SPDL_COLORS))
    check_array_layout(layout)
    if num_frames is not None:
        num_frames = check_int("num_frames", num_frames)
    config = _config(decode_config)
    sides = crop_left, crop_top, crop_right, crop_bottom
    ops = _spdl_ops(SPDL_COLORS[pix_fmt], scale_width, scale_height, scale_algo)
    output = Output(replace(ops, box=_box(sides, stated_size(packets, config))), layout)
    device = _video_device(cuda, cuda_config)
    try:
        return decode_clip(packets, device, output, config, num_frames)[0]
    except NotOnDeviceError as found:
        raise not_on_nvdec(found, packets.source) from found.__cause__


def streaming_load_video_nvdec(
    src: Source,
    cuda: DeviceLike | None = None,
    *,
    cuda_config: DeviceLike | None = None,
    num_frames: int,
    crop_left: int = 0,
    crop_top: int = 0,
    crop_right: int = 0,
    crop_bottom: int = 0,
    scale_width: int | None = None,
    scale_height: int | None = None,
    scale_algo: ScaleAlgo = "bicubic",
    stream_index: int | None = None,
    demux_config: DemuxConfig | None = None,
    decode_config: DecodeConfig | None = None,
    name: str | None = None,
) -> Iterator[Buffer]:
    """Decode a whole video on a GPU, batch by batch, to the YUV planes of the decoder.

    :func:`~spdl_media.nv12_to_rgb` converts planes of 8 bits. The source is read lazily, as batches are
    taken.

    Args:
        src: The source, as for :func:`~spdl_media.load_video`.
        cuda: Number of the device, or a config, whose allocator is ignored.
        cuda_config: The same as ``cuda``; give exactly one of the two.
        num_frames: Number of frames per batch; the last one may be shorter.
        crop_left: Pixels to crop from the left of the upright frame, before it is scaled; even.
        crop_top: Pixels to crop from the top; even.
        crop_right: Pixels to crop from the right; even.
        crop_bottom: Pixels to crop from the bottom; even.
        scale_width: Width to scale to, even. Without ``scale_height`` the aspect ratio is kept.
        scale_height: Height to scale to, even.
        scale_algo: ``"bicubic"`` or ``"bilinear"``, antialiased.
        stream_index: Index of the stream in its container. The default is FFmpeg's best stream.
        demux_config: Options for opening the source.
        decode_config: Options; ``decoder`` and ``decoder_options`` are for the CPU.
        name: Name of the source in messages.

    Returns:
        An iterator over arrays ``(N, H + ceil(H / 2), W)`` on the device: luma, and below it interleaved U
        and V. The dtype is uint8 (NV12), or for 10 and 12 bits uint16 with the value in the high bits (P010,
        P012). An odd width is rounded up, with a last column of zeros. ``colorspace`` and ``color_range`` of
        a batch are those of its values. Each batch has its own memory, and is ready when its stream has done
        its work.

    Raises:
        SourceError: The source cannot be opened or read.
        DemuxError: The source is not media, or has no such stream.
        DecodeError: While iterating: the data is damaged, or NVDEC does not decode it.
        ConvertError: While iterating: frames differ in size.
        MissingDependencyError: The driver or its video library is missing.
        TransferError: While iterating: the device has no memory or no decoder left, or is gone.
        ValueError: There is no such device, or an option is invalid.

    Thread safety: one thread at a time for each iterator.
    """
    num_frames = check_int("num_frames", num_frames)
    sides = crop_left, crop_top, crop_right, crop_bottom
    # Chroma is stored for 2 x 2 pixels.
    for side, value in (("width", scale_width), ("height", scale_height)):
        _check_even(f"scale_{side}", value or 0)
    # Only check here: the size of frames is not known before the first packets.
    _box(sides, None)
    ops = _spdl_ops("nv12", scale_width, scale_height, scale_algo)
    config = _config(decode_config)
    device = _video_device(cuda, cuda_config)
    # Opened here and not in the generator, so that this call raises the error of a bad source.
    demuxer = Demuxer(src, demux_config=demux_config, name=name)

    def output(first: VideoPackets) -> Output:
        return Output(replace(ops, box=_box(sides, stated_size(first, config))))

    return decode_batches(demuxer, device, output, config, num_frames, stream_index)


def _config(given: DecodeConfig | None) -> DecodeConfig:
    """Check the config.

    Raises:
        ValueError: It names a decoder of the CPU, or options of one.
    """
    config = as_decode_config(given)
    if refusal := config_refusal(config):
        raise ValueError(
            f"{refusal}. Leave them out, or decode with load_video(cuda=, decoder='cpu')"
        )
    return config


def _spdl_ops(
    pix_fmt: str, width: int | None, height: int | None, scale_algo: ScaleAlgo
) -> PictureOps:
    check_choice("scale_algo", scale_algo, SCALE_ALGOS)
    return PictureOps(width, height, pix_fmt, scale_mode=None, scale_algo=scale_algo)


def _box(sides: tuple[int, int, int, int], size: Size | None) -> Box | None:
    """Return the box that is left of an upright frame after cropping its sides, or ``None`` for all of it.

    Raises:
        TypeError: A number of pixels is not an integer.
        ValueError: A number of pixels is odd or negative, or nothing is left.
    """
    for name, value in zip(("left", "top", "right", "bottom"), sides, strict=True):
        _check_even(f"crop_{name}", check_int(f"crop_{name}", value, at_least=0))
    if size is None or not any(sides):
        return None
    left, top, right, bottom = sides
    width, height = size[0] - left - right, size[1] - top - bottom
    if width < 1 or height < 1:
        raise ValueError(
            f"crop_left={left}, crop_top={top}, crop_right={right}, crop_bottom={bottom} leave nothing of a "
            f"frame of {size[0]}x{size[1]}"
        )
    return left, top, width, height


def _check_even(name: str, value: int) -> None:
    if value % 2:
        raise ValueError(
            f"{name} must be even, because chroma is stored for two pixels, not {value}"
        )


def _video_device(cuda: Any, cuda_config: Any = None) -> VideoDevice:
    """Open the device that is given by one of the two arguments. The allocator of a config is ignored.

    Raises:
        MissingDependencyError: The driver or its video library is missing.
        TypeError: The argument is neither a number nor a config.
        ValueError: There is no such device, or neither or both arguments are given.
        TransferError: Neither PyTorch nor CuPy finds a device; this process was forked from one that had used
            CUDA; or the stream belongs to another device.
    """
    if isinstance(cuda, VideoDevice):
        return cuda
    config = one_device(cuda, cuda_config)
    if missing := missing_library():
        raise missing
    device = open_device(config, "decoding video on the GPU")
    # Use the device's stream, which is the thread's own if none was given.
    return VideoDevice(device.torch, device.index, device.stream)
