"""Videos decoded by the hardware of an NVIDIA GPU (NVDEC), with frames that never leave the device.

    packets -> choose (one rule) -> DALI's operator, or FFmpeg's decoder in PyAV -> colour, size -> array

Both give the frames that the CPU path gives: cut to the window, turned upright, the same in number and time.
The rule is data, in :mod:`spdl_media.cuda._nvdec_rule`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, SupportsIndex, TypeAlias

from spdl_media._checks import check_int
from spdl_media.buffer import Buffer
from spdl_media.config import CUDAConfig, DecodeConfig, DemuxConfig, as_decode_config
from spdl_media.cuda._color_taps import ScaleAlgo
from spdl_media.cuda._nvdec_clip import DeviceClip, Request, decode_clip
from spdl_media.cuda._nvdec_device import VideoDevice, video_device
from spdl_media.cuda._nvdec_geometry import Crop
from spdl_media.cuda._nvdec_hwaccel import missing_library
from spdl_media.cuda._nvdec_rule import VideoDecoderName, check_decoder
from spdl_media.cuda._nvdec_stream import PACKETS_A_CHUNK, BatchStream
from spdl_media.cuda._nvdec_writer import ArrayLayout, Output, OutputFormat
from spdl_media.demux import Demuxer
from spdl_media.inputs import Source
from spdl_media.operations import Rate, ScaleMode
from spdl_media.packets import ImagePackets, VideoPackets

__all__ = (
    "decode_packets_nvdec",
    "streaming_load_video_nvdec",
    "why_not_nvdec",
)

_FORMATS: dict[str, OutputFormat] = {"rgb": "rgb24", "bgr": "bgr24"}

DeviceLike: TypeAlias = SupportsIndex | CUDAConfig | VideoDevice
PacketDecoderName: TypeAlias = Literal["auto", "pyav"]


def why_not_nvdec() -> str | None:
    """Say which library of NVIDIA's driver is missing for NVDEC, and how to get it; ``None``: none is.

    Nothing is opened: that a library is there does not say that there is a device.

    Thread safety: safe.
    """
    missing = missing_library()
    return None if missing is None else str(missing)


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
    decoder: PacketDecoderName = "auto",
) -> Buffer:
    """Decode video packets on a GPU, cut to their window and upright.

    FFmpeg's decoder in PyAV decodes them; DALI takes files, not packets.

    Args:
        packets: From :func:`~spdl_media.demux_video`. Not consumed.
        cuda: Number of the device, or a config, of which the allocator does not count.
        cuda_config: The same by another name; one of the two is needed.
        pix_fmt: ``"rgb"`` or ``"bgr"``, 8 bit.
        crop_left: Pixels to cut off the upright frame before it is scaled; even.
        crop_top: The same.
        crop_right: The same.
        crop_bottom: The same.
        scale_width: Width to scale to. Without ``scale_height`` the aspect ratio is kept.
        scale_height: Height to scale to.
        scale_algo: ``"bicubic"`` or ``"bilinear"``, antialiased.
        layout: ``"NCHW"`` or ``"NHWC"``.
        num_frames: At most so many frames, and no more are decoded than they need.
        decode_config: How to decode. Options of the decoder are those of FFmpeg's own.
        decoder: ``"pyav"``: an error where NVDEC does not decode the stream; ``"auto"``: the CPU decodes it,
            and its frames are copied to the device, with a :class:`CPUFallbackWarning`.

    Returns:
        uint8 array ``(N, 3, H, W)`` or ``(N, H, W, 3)``, values 0 to 255, on the device, ready when CuPy's
        current stream gets there.

    Raises:
        DecodeError: The data is damaged, or NVDEC does not decode it.
        ConvertError: No frame lies in the window, or frames differ in size.
        MissingDependencyError: CuPy, the driver or its video library is missing.
        ValueError: There is no such device, or an option is invalid.
        TransferError: The device has too little memory; the message has the sizes.

    Thread safety: safe.
    """
    if pix_fmt not in _FORMATS:
        raise ValueError(f"pix_fmt must be one of {tuple(_FORMATS)}, not {pix_fmt!r}")
    output = Output(
        _FORMATS[pix_fmt],
        layout,
        Crop(crop_left, crop_top, crop_right, crop_bottom),
        scale_width,
        scale_height,
        scale_algo=scale_algo,
    )
    _check_packet_decoder(decoder)
    device = video_device(_one(cuda, cuda_config))
    clip = _decoded(packets, device, output, decode_config, num_frames, decoder=decoder)
    return device.buffer(clip.array, clip.colors)


def _decoded(
    packets: VideoPackets,
    device: VideoDevice,
    output: Output,
    decode_config: DecodeConfig | None,
    num_frames: int | None,
    *,
    frame_rate: Rate | None = None,
    decoder: VideoDecoderName = "auto",
    from_file: bool = False,
) -> DeviceClip:
    if not isinstance(packets, VideoPackets) or isinstance(packets, ImagePackets):
        raise TypeError(f"decode_packets_nvdec takes VideoPackets, not {type(packets).__name__}")
    if num_frames is not None:
        check_int("num_frames", num_frames)
    check_decoder(decoder)
    config = as_decode_config(decode_config)
    request = Request(output, config, num_frames, frame_rate, decoder, may_use_dali=from_file)
    return decode_clip(packets, device, request)


def decode_to_device(
    packets: VideoPackets,
    *,
    cuda: DeviceLike,
    decoder: VideoDecoderName = "auto",
    width: int | None = None,
    height: int | None = None,
    pix_fmt: OutputFormat = "rgb24",
    scale_mode: ScaleMode | None = "pad",
    scale_algo: ScaleAlgo = "bicubic",
    frame_rate: Rate | None = None,
    num_frames: int | None = None,
    decode_config: DecodeConfig | None = None,
    layout: ArrayLayout = "NHWC",
) -> tuple[Buffer, tuple[float, ...]]:
    """Decode packets that come from a file: what ``load_video(cuda=)`` does with them.

    Args:
        packets: As for :func:`~spdl_media.decode_packets`. Not consumed.
        cuda: Number of the device, or a config, of which the allocator does not count.
        decoder: ``"dali"``: DALI's operator, an error for a video that it would not decode right.
            ``"pyav"``: FFmpeg's decoder in PyAV, an error for a video that NVDEC does not decode.
            ``"auto"``: DALI where it decodes the video right, else PyAV, else the CPU with a
            :class:`CPUFallbackWarning`.
        width: Width of the result, as are the next arguments as in :func:`~spdl_media.load_video`.
        height: Height of the result.
        pix_fmt: ``"rgb24"``, ``"bgr24"``, or ``"nv12"`` for the decoder's own planes.
        scale_mode: ``"pad"``, ``"crop"`` or ``None``.
        scale_algo: ``"bicubic"`` or ``"bilinear"``, antialiased.
        frame_rate: Frames in a second, as for :func:`~spdl_media.load_video`.
        num_frames: At most so many frames.
        decode_config: How to decode.
        layout: ``"NHWC"`` or ``"NCHW"``.

    Returns:
        A uint8 array ``(N, height, width, 3)``, values 0 to 255, on the device, and the seconds of each
        frame. ``(N, H + H / 2, W)`` for ``"nv12"``, uint16 with the value in the high bits for deep video.

    Raises:
        DecodeError: It is damaged, or the forced decoder does not take it.
        ConvertError: No frame lies in the window, or frames differ in size.
        MissingDependencyError: CuPy, DALI, the driver or its video library is missing.
        TransferError: The device has too little memory; the message has the sizes.
        ValueError: There is no such device, or an option is invalid.

    Thread safety: safe.
    """
    # A scale mode is for two sides.
    stretch = width is None or height is None
    output = Output(
        pix_fmt,
        layout,
        width=width,
        height=height,
        scale_mode=None if stretch else scale_mode,
        scale_algo=scale_algo,
    )
    device = video_device(cuda)
    clip = _decoded(
        packets,
        device,
        output,
        decode_config,
        num_frames,
        frame_rate=frame_rate,
        decoder=decoder,
        from_file=True,
    )
    return device.buffer(clip.array, clip.colors), clip.timestamps


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
    decoder: PacketDecoderName = "auto",
    name: str | None = None,
) -> Iterator[Buffer]:
    """Decode a whole video on a GPU, batch by batch, as the decoder's own planes.

    :func:`~spdl_media.nv12_to_rgb` converts them. The source is read as the batches are asked for.

    Args:
        src: As for :func:`~spdl_media.load_video`.
        cuda: Number of the device, or a config, of which the allocator does not count.
        cuda_config: The same by another name; one of the two is needed.
        num_frames: Frames of each batch; the last one may be shorter.
        crop_left: Pixels to cut off the upright frame before it is scaled; even.
        crop_top: The same.
        crop_right: The same.
        crop_bottom: The same.
        scale_width: Width to scale to, even. Without ``scale_height`` the aspect ratio is kept.
        scale_height: Height to scale to, even.
        scale_algo: ``"bicubic"`` or ``"bilinear"``, antialiased.
        stream_index: Index of the stream in its container. The default is FFmpeg's best one.
        demux_config: How to open the source.
        decode_config: How to decode. Options of the decoder are those of FFmpeg's own.
        decoder: As in :func:`decode_packets_nvdec`.
        name: What to call the source in messages.

    Returns:
        An iterator of arrays ``(N, H + ceil(H / 2), W)`` on the device: luma, and below it U and V in turn.
        uint8 (NV12); uint16 with the value in the high bits (P010, P016) for 10 and 12 bit. An odd width is
        rounded up, with a last column of zeros. ``colorspace`` and ``color_range`` of a batch say what its
        values mean. Each batch is memory of its own, ready when CuPy's current stream gets there.

    Raises:
        SourceError: It cannot be opened or read.
        DemuxError: It is no media, or has no such stream.
        DecodeError: While iterating: the data is damaged, or NVDEC does not decode it.
        ConvertError: While iterating: frames differ in size.
        MissingDependencyError: CuPy, the driver or its video library is missing.
        TransferError: While iterating: the device has too little memory.
        ValueError: There is no such device, or an option is invalid.

    Thread safety: one thread at a time for each iterator.
    """
    check_int("num_frames", num_frames)
    _check_packet_decoder(decoder)
    crop = Crop(crop_left, crop_top, crop_right, crop_bottom)
    output = Output(
        "nv12", crop=crop, width=scale_width, height=scale_height, scale_algo=scale_algo
    )
    request = Request(output, as_decode_config(decode_config), num_frames, decoder=decoder)
    device = video_device(_one(cuda, cuda_config))
    # Opened here and not in the generator, so that a bad source is an error of this call.
    demuxer = Demuxer(src, demux_config=demux_config, name=name)
    return _batches(demuxer, device, request, stream_index)


def _batches(
    demuxer: Demuxer, device: VideoDevice, request: Request, stream_index: int | None
) -> Iterator[Buffer]:
    with demuxer:
        chunks = _video_chunks(demuxer, stream_index)
        # The first packets tell the codec.
        first = next(chunks, None)
        if first is None:
            return
        joined = _joined(first, chunks)
        for array, colors in BatchStream(joined, first.codec, device, request, first.source):
            yield device.buffer(array, colors)


def _video_chunks(demuxer: Demuxer, stream_index: int | None) -> Iterator[VideoPackets]:
    index = demuxer.video_stream_index if stream_index is None else stream_index
    for packets in demuxer.streaming_demux(index, num_packets=PACKETS_A_CHUNK):
        if not isinstance(packets, VideoPackets):
            raise TypeError(f"stream {index} holds {type(packets).__name__}, not video")
        yield packets


def _joined(first: VideoPackets, rest: Iterator[VideoPackets]) -> Iterator[VideoPackets]:
    yield first
    yield from rest


def _one(cuda: DeviceLike | None, cuda_config: DeviceLike | None) -> DeviceLike:
    if (cuda is None) == (cuda_config is None):
        given = "neither" if cuda is None else f"cuda={cuda!r} and cuda_config={cuda_config!r}"
        raise ValueError(f"give one of cuda= and cuda_config=, such as cuda=0, not {given}")
    device = cuda_config if cuda is None else cuda
    assert device is not None
    return device


def _check_packet_decoder(decoder: str) -> None:
    if decoder == "dali":
        raise ValueError(
            "decoder='dali' decodes whole files alone; load_video(cuda=, decoder='dali') does that. Packets "
            "and streams take 'auto' or 'pyav'"
        )
    check_decoder(decoder)
