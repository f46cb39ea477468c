"""Videos with ``cuda=``: NVDEC by DALI or PyAV where it decodes them right, else finished frames are copied.

Which of the two takes a video, :mod:`spdl_media.cuda._nvdec_rule` says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from spdl_media._batch import TimedFrames, VideoRequest
from spdl_media._lengths import check_enough
from spdl_media.config import CUDAConfig, as_decode_config
from spdl_media.cuda.on_device import cupy_device, why_no_kernels
from spdl_media.decode import Default
from spdl_media.filter_desc import FilterDesc
from spdl_media.packets import VideoPackets
from spdl_media.transfer import on_its_way


def device_frame_steps(
    request: VideoRequest, config: CUDAConfig
) -> Callable[[VideoPackets], TimedFrames]:
    """Check the request, and give what makes frames in an array on a device of packets.

    Raises:
        ValueError: An option is invalid, or the decoder cannot make such frames.
        MissingDependencyError: A decoder is asked for that is not there.
        TransferError: There is no device.
    """
    finish, memory = on_its_way(config, request.storage, request.purpose)
    on_cpu = replace(request, storage=memory)
    if isinstance(request.filter_desc, Default) and request.ops.quality == "auto":
        # NVDEC's frames are converted exactly, so whoever decodes, the array on the device is the same.
        on_cpu = replace(on_cpu, desc=FilterDesc(replace(request.ops, quality="accurate")))
    if _takes_nvdec(request):
        return lambda packets: _by_nvdec(packets, config, request)

    def by_cpu(packets: VideoPackets) -> TimedFrames:
        buffer, timestamps = on_cpu.load(packets)
        return finish(buffer), timestamps

    return by_cpu


def _by_nvdec(packets: VideoPackets, config: CUDAConfig, request: VideoRequest) -> TimedFrames:
    from spdl_media.cuda.nvdec import decode_to_device

    options = request.ops
    stream = cupy_device(config, request.purpose).stream
    buffer, timestamps = decode_to_device(
        packets,
        cuda=CUDAConfig(config.device_index, stream),
        decoder="auto" if request.decoder == "cpu" else request.decoder,
        width=options.width,
        height=options.height,
        pix_fmt=options.pix_fmt,  # type: ignore[arg-type]  # looked at above, as are the next two
        scale_mode=options.scale_mode,
        scale_algo=options.scale_algo,  # type: ignore[arg-type]
        frame_rate=options.frame_rate,
        num_frames=request.num_frames,
        decode_config=request.decode_config,
        layout=request.layout or "NHWC",
    )
    found, wanted = buffer.shape[0], request.num_frames or 0
    check_enough(found, wanted, request.on_short, "frames", packets.window, packets.source)
    return buffer, lambda: timestamps


def _takes_nvdec(request: VideoRequest) -> bool:
    """Whether NVDEC is to decode; under ``"auto"`` a warning says what is missing for it.

    Raises:
        ValueError: A decoder is asked for that cannot make such frames.
    """
    if request.decoder == "cpu":
        return False
    refusal = _nvdec_refusal(request)
    if refusal and request.decoder != "auto":
        raise ValueError(
            f"decoder={request.decoder!r}: {refusal}. decoder='auto' takes the CPU for it"
        )
    if refusal or request.config is None:
        return False
    return request.decoder != "auto" or _has_nvdec(request.config.device_index)


def _nvdec_refusal(request: VideoRequest) -> str | None:
    """Why no decoder of the device makes such frames, as far as the arguments say."""
    options = request.ops
    if not isinstance(request.filter_desc, Default) or options.quality == "fast":
        return "filter_desc= and quality='fast' are for the CPU"
    if options.pix_fmt not in ("rgb24", "bgr24"):
        return f"it gives pix_fmt 'rgb24' or 'bgr24', not {options.pix_fmt!r}"
    if options.scale_algo not in ("bicubic", "bilinear"):
        return f"it scales with 'bicubic' or 'bilinear', not with {options.scale_algo!r}"
    if not request.cuts.is_empty:
        return "crops= and flips= are for the CPU"
    if request.on_short not in (None, "error"):
        return f"on_short={request.on_short!r} is for the CPU"
    if as_decode_config(request.decode_config).decoder is not None:
        return "decode_config(decoder=) names a decoder of the CPU"
    return None


def _has_nvdec(index: int) -> bool:
    from spdl_media.cuda.fallback import warn_of_fallback
    from spdl_media.cuda.nvdec import why_not_nvdec

    missing = why_not_nvdec() or why_no_kernels(index)
    if missing:
        warn_of_fallback(missing)
    return missing is None
