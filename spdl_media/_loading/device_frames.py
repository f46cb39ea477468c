"""Videos with ``cuda=``: NVDEC by DALI or PyAV where it decodes them right, else finished frames are copied.

Which of the two takes a video, :mod:`spdl_media.cuda._nvdec_rule` says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from spdl_media._loading.batch import ArrayLayout
from spdl_media._loading.on_device import VideoDecoder, cupy_device, into_array, why_no_kernels
from spdl_media._loading.options import VIDEO_OPS, chosen_filter
from spdl_media.config import CUDAConfig, DecodeConfig, as_decode_config
from spdl_media.cuda_buffer import Buffer
from spdl_media.decode import Default, decode_packets
from spdl_media.operations import PictureOps
from spdl_media.packets import VideoPackets
from spdl_media.storage import Storage

Timed: TypeAlias = tuple[Buffer, tuple[float, ...]]
"""Frames in an array, and the seconds of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FramesAsked:
    """How frames are to come out, and where. The arguments of :func:`~spdl_media.load_video` explain them."""

    options: PictureOps
    filter_desc: str | Default | None
    num_frames: int | None
    decode_config: DecodeConfig | None
    storage: Storage | None
    layout: ArrayLayout | None
    config: CUDAConfig | None
    decoder: VideoDecoder
    purpose: str


def frame_steps(asked: FramesAsked) -> Callable[[VideoPackets], Timed]:
    """Check what is asked for, and give what makes it of packets.

    Raises:
        ValueError: An option that cannot be, or a decoder that cannot make such frames.
        MissingDependencyError: A decoder is asked for that is not there.
        TransferError: There is no device.
    """
    desc = chosen_filter(asked.options, asked.filter_desc, VIDEO_OPS)

    config = asked.config
    convert = into_array(config, asked.storage, asked.layout, asked.purpose)
    if config is not None and _takes_nvdec(asked):
        return lambda packets: _by_nvdec(packets, config, asked)

    def by_cpu(packets: VideoPackets) -> Timed:
        frames = decode_packets(packets, desc, asked.decode_config, num_frames=asked.num_frames)
        return convert(frames), frames.timestamps

    return by_cpu


def _by_nvdec(packets: VideoPackets, config: CUDAConfig, asked: FramesAsked) -> Timed:
    from spdl_media.cuda.nvdec import decode_to_device

    options = asked.options
    stream = cupy_device(config, asked.purpose).stream
    return decode_to_device(
        packets,
        cuda=CUDAConfig(config.device_index, stream),
        decoder="auto" if asked.decoder == "cpu" else asked.decoder,
        width=options.width,
        height=options.height,
        pix_fmt=options.pix_fmt,  # type: ignore[arg-type]  # looked at above, as are the next two
        scale_mode=options.scale_mode,
        scale_algo=options.scale_algo,  # type: ignore[arg-type]
        frame_rate=options.frame_rate,
        num_frames=asked.num_frames,
        decode_config=asked.decode_config,
        layout=asked.layout or "NHWC",
    )


def _takes_nvdec(asked: FramesAsked) -> bool:
    """Whether NVDEC is to decode; under ``"auto"`` a warning says what is missing for it.

    Raises:
        ValueError: A decoder is asked for that cannot make such frames.
    """
    if asked.decoder == "cpu":
        return False
    refusal = _nvdec_refusal(asked)
    if refusal and asked.decoder != "auto":
        raise ValueError(
            f"decoder={asked.decoder!r}: {refusal}. decoder='auto' takes the CPU for it"
        )
    if refusal or asked.config is None:
        return False
    return asked.decoder != "auto" or _has_nvdec(asked.config.device_index)


def _nvdec_refusal(asked: FramesAsked) -> str | None:
    """Why no decoder of the device makes such frames, as far as the arguments say."""
    options = asked.options
    if not isinstance(asked.filter_desc, Default) or options.quality == "fast":
        return "filter_desc= and quality='fast' are for the CPU"
    if options.pix_fmt not in ("rgb24", "bgr24"):
        return f"it gives pix_fmt 'rgb24' or 'bgr24', not {options.pix_fmt!r}"
    if options.scale_algo not in ("bicubic", "bilinear"):
        return f"it scales with 'bicubic' or 'bilinear', not with {options.scale_algo!r}"
    if as_decode_config(asked.decode_config).decoder is not None:
        return "decode_config(decoder=) names a decoder of the CPU"
    return None


def _has_nvdec(index: int) -> bool:
    from spdl_media.cuda.fallback import warn_of_fallback
    from spdl_media.cuda.nvdec import why_not_nvdec

    missing = why_not_nvdec() or why_no_kernels(index)
    if missing:
        warn_of_fallback(missing)
    return missing is None
