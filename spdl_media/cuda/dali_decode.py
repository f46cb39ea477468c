"""Decoding with DALI: batches of whole images, and frames of videos if the caller asks for DALI.

Images agree with those of the CPU path: the same crops and placement, upright, cubic scaling with
antialiasing. On 64 photographs scaled to 224x224 with DALI's CPU operators, the mean difference from
:func:`~spdl_media.load_image_batch` is 0.35 to 0.51 levels of 255, depending on the scale mode, and 1.95 for
the worst photograph. Most of it comes from 4:2:0 chroma, which FFmpeg scales from its own size. Small 4:2:0
images that are enlarged differ more (63x47 to 224x224: 5.2). DALI does not report wrong data inside a
complete JPEG, of which FFmpeg detects most.

The video operator reads whole files, identifies frames by their number among the packets, always converts by
BT.601, and reports no damage. So packets are written to a file in memory, and videos that it would decode
wrongly are rejected.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate
from typing import Any

import av
import numpy as np
import numpy.typing as npt
from av.bitstream import BitStreamFilterContext

from spdl_media._optional import require
from spdl_media.batch import FrameRequest, decode_each
from spdl_media.buffer import Buffer, Failure
from spdl_media.coded_headers import may_have_fields
from spdl_media.config import DEFAULT_DECODE_CONFIG
from spdl_media.convert import no_frames
from spdl_media.cuda.cuvid import NotOnDeviceError
from spdl_media.cuda.dali import (
    DALI_ERRORS,
    DaliBatch,
    Settings,
    Slot,
    dali_module,
    dynamic,
    named,
    ready_buffer,
    slot_pool,
)
from spdl_media.demux import demux_image
from spdl_media.devices import is_out_of_memory
from spdl_media.errors import DecodeError, MediaError, TransferError
from spdl_media.geometry import Box, Placement, Size, place, swaps_sides
from spdl_media.packets import (
    VideoPackets,
    av_packets,
    check_complete,
    coded_image,
    copy_packet,
    discarded_pts,
    metadata_of,
)
from spdl_media.rows import FrameKind, kinds_differ
from spdl_media.stills import HEAD_SIZE, still_codec
from spdl_media.timing import ticks_to_seconds
from spdl_media.video_arrays import TimedFrames

COLORS = {"rgb24": "RGB", "bgr24": "BGR", "gray": "GRAY"}
FILTERS = {"bicubic": "INTERP_CUBIC", "bilinear": "INTERP_LINEAR"}
"""DALI's names of pixel formats and scaling algorithms."""

# Limits of FFmpeg's av_image_check_size. DALI has none, and would try to allocate memory for any size.
_FFMPEG_LIMIT, _FFMPEG_MARGIN = (2**31 - 1) // 8, 128

# Bytes that each decoder and thread preallocates. DALI's default of 16 MiB is for very large photographs.
_PADDING = 1 << 20


@dataclass(frozen=True, slots=True)
class _File:
    """The file of an image, and its crop and placement.

    Attributes:
        data: The bytes of the file.
        source: Name of the source, for messages.
        size: Size of the decoded image, upright.
        box: The crop, which may be the whole image.
        mirror: Whether to mirror the image horizontally.
        placement: Size and position of the crop on the canvas.
    """

    data: npt.NDArray[np.uint8] = field(repr=False)
    source: str
    size: Size
    box: Box
    mirror: bool
    placement: Placement


def _read_all(
    inputs: list[Any], request: FrameRequest, stopped: Callable[[], bool] | None
) -> list[_File]:
    """Read all inputs.

    Raises:
        MediaError: An input fails, and ``on_error`` is ``"raise"``. The message has its name and position.
        NotOnDeviceError: DALI does not decode an input, or an input fails and ``on_error`` is not
            ``"raise"``.
    """
    # The error of a single image has no position in a batch.
    if request.is_single:
        return [_read(inputs, 0, request)]
    files: dict[int, _File] = {}
    failures: list[Failure] = []
    decode_each(
        inputs,
        lambda _, position: _read(inputs, position, request),
        # This keeps the order of the inputs, because they are read one after the other.
        files.__setitem__,
        failures,
        on_error=request.on_error,
        stopped=stopped,
    )
    if failures:
        raise NotOnDeviceError(str(failures[0].error).rstrip("."))
    pix_fmt = request.ops.pix_fmt or ""
    kinds = [
        (f"input {at} ({file.source})", FrameKind(*file.placement.canvas, pix_fmt))
        for at, file in files.items()
    ]
    if others := [one for one in kinds if one[1] != kinds[0][1]]:
        raise kinds_differ(kinds[0], others[0])
    return list(files.values())


def _read(inputs: list[Any], position: int, request: FrameRequest) -> _File:
    """Read an input, and replace it by its packets or error, because some sources can be read only once."""
    try:
        packets = demux_image(
            inputs[position], demux_config=request.demux_config, name=request.name
        )
    except MediaError as error:
        inputs[position] = error
        raise
    inputs[position] = packets
    facts, ops = metadata_of(packets), request.ops
    content = coded_image(packets)
    data, head = np.frombuffer(content, np.uint8), bytes(content[:HEAD_SIZE])
    # Also not a frame of a video. For other formats, DALI has no decoder on the device, or is not exact.
    is_jpeg = still_codec(head) == packets.codec.decoder == "mjpeg"
    # DALI finds an orientation only in Exif.
    in_xmp = facts.orientation != 1 and b"tiff:Orientation" in head
    size = _size(data) if is_jpeg and facts.incomplete is None and not in_xmp else None
    if size is None:
        raise NotOnDeviceError(
            f"{facts.source}: DALI is used for whole JPEGs without an orientation in XMP"
        )
    if request.decode_config.orient and swaps_sides(facts.orientation):
        size = size[::-1]
    if request.cuts is not None:
        ops = request.cuts.filter(position, size, ops, facts.source)
    box = ops.box or (0, 0, *size)
    placement = place(box[2:], ops.width, ops.height, ops.scale_mode)
    return _File(data, facts.source, size, box, ops.mirror, placement)


def _size(data: npt.NDArray[np.uint8]) -> Size | None:
    """Return width and height in the header as DALI reads it; ``None`` if it cannot, or for FFmpeg's limits.

    The header is checked before decoding, because one file with an unreadable header in a batch of 32 crashes
    the process (DALI 2.4, nvImageCodec 0.9: 9 of 9 runs). Reading a header takes 2 microseconds.
    """
    headers: Any = require("nvimgcodec", "decoding images with DALI")
    try:
        header = headers.CodeStream(data)
        width, height = int(header.width), int(header.height)
    except RuntimeError:
        return None
    too_large = (width + _FFMPEG_MARGIN) * (height + _FFMPEG_MARGIN) >= _FFMPEG_LIMIT
    return (width, height) if width and height and not too_large else None


def load_images(
    inputs: list[Any],
    request: FrameRequest,
    index: int | None,
    stopped: Callable[[], bool] | None,
    hw_decoder_load: float | None,
) -> Buffer:
    """Load images by DALI's operators.

    Args:
        inputs: The images. Packets or errors replace those that were read.
        request: Options of the load.
        index: Number of the device; ``None`` means the CPU.
        stopped: Checked before each image is read; ``True`` cancels the load.
        hw_decoder_load: Share of the images for the GPU's JPEG engine; ``None`` means DALI's default.

    Raises:
        MediaError: As for :func:`~spdl_media.load_image_batch`.
        MissingDependencyError: DALI is not installed, or is too old.
        TransferError: The batch does not fit into the memory of the device; there is no GPU; or this process
            was forked after CUDA had been used.
        NotOnDeviceError: DALI cannot decode the batch, so the CPU has to.
    """
    pool, files = slot_pool(index), _read_all(inputs, request, stopped)
    with pool.borrow() as slot:
        try:
            made = _run_operators(slot, files, request, hw_decoder_load)
        except DALI_ERRORS as error:
            said = f"DALI says {str(error).strip() or type(error).__name__!r}"
            if not is_out_of_memory(error):
                raise NotOnDeviceError(said) from error
            size = sum(3 * file.size[0] * file.size[1] for file in files) / 1e6
            raise TransferError(
                f"the {len(files)} images of this batch, {size:.1f} MB when decoded, do not fit into the "
                f"memory of {named(index)}: {said}. Load fewer at a time, in smaller batches or fewer threads"
            ) from error
        array = made.tensors[0] if request.is_single else dynamic().as_tensor(made)
        positions = range(len(files))
        indices = None if request.is_single else tuple(positions)
        buffer = ready_buffer(array, slot.stream, indices=indices)
        if request.cuts is not None:
            buffer.boxes, buffer.flips = request.cuts.drawn(positions, positions)
        return buffer


def _run_operators(
    slot: Slot, files: Sequence[_File], request: FrameRequest, hw_decoder_load: float | None
) -> DaliBatch:
    """Decode, cut, scale, place, mirror, normalise and transpose images."""
    types: Any = dali_module("types")
    ops, values = request.ops, request.values
    decoder: Settings = {
        "output_type": getattr(types, COLORS[ops.pix_fmt or ""]),
        "adjust_orientation": request.decode_config.orient,
        # Do not pin threads to cores, because there are several slots.
        "affine": False,
        "jpeg_fancy_upsampling": not _all_shrink(files),
        "device_memory_padding": _PADDING,
        "host_memory_padding": _PADDING,
        **({} if hw_decoder_load is None else {"hw_decoder_load": float(hw_decoder_load)}),
    }
    pictures = slot.run("decoders.Image", [file.data for file in files], decoder)
    boxes = [file.box for file in files]
    if boxes != [(0, 0, *file.size) for file in files]:
        pictures = _window(slot, pictures, boxes)
    scaled = [file.placement.scaled for file in files]
    if scaled != [box[2:] for box in boxes]:
        scaler = {"interp_type": getattr(types, FILTERS[ops.scale_algo]), "antialias": True}
        size = [np.array([height, width], np.float32) for width, height in scaled]
        pictures = slot.run("Resize", pictures, scaler, {"size": size})
    if any(file.placement.scaled != file.placement.canvas for file in files):
        pictures = _window(slot, pictures, [_canvas_box(file) for file in files])
    is_float = values is not None and values.is_float
    layout = "CHW" if request.layout == "NCHW" else "HWC"
    if layout == "HWC" and not is_float and not any(file.mirror for file in files):
        return pictures
    finish = {"dtype": types.UINT8, "output_layout": layout}
    arguments: dict[str, Sequence[Any]] = {
        "mirror": [np.array(one.mirror, np.int32) for one in files]
    }
    if values is not None and is_float:
        finish["dtype"] = getattr(types, values.dtype.upper().replace("32", ""))
        # From 0..1 to levels from 0 to 255.
        for name, numbers in (("mean", values.mean), ("std", values.std)):
            arguments[name] = [np.float32(255) * np.array(numbers, np.float32)] * len(files)
    return slot.run("CropMirrorNormalize", pictures, finish, arguments)


def _all_shrink(files: Sequence[_File]) -> bool:
    """Whether all images are scaled to at most 3/4, so that chroma need not be interpolated before.

    The result is as near to that of the CPU path, which scales chroma from its own size. On an H200, DALI
    then decodes 64 photographs in 3.5 ms instead of 8.2 ms.
    """
    return all(
        4 * scaled <= 3 * side
        for file in files
        for scaled, side in zip(file.placement.scaled, file.box[2:], strict=True)
    )


def _canvas_box(file: _File) -> Box:
    """Return the box of the canvas relative to the scaled image; parts outside of it become borders."""
    placement = file.placement
    (width, height), left = placement.canvas, placement.left
    if file.mirror:  # mirroring comes afterwards
        left = width - placement.scaled[0] - left
    return -left, -placement.top, width, height


def _window(slot: Slot, pictures: DaliBatch, boxes: Sequence[Box]) -> DaliBatch:
    settings = {"axes": (0, 1), "out_of_bounds_policy": "pad", "fill_values": (0.0,)}
    window = {
        "start": [np.array([y, x], np.int32) for x, y, _, _ in boxes],
        "shape": [np.array([height, width], np.int32) for _, _, width, height in boxes],
    }
    return slot.run("Slice", pictures, settings, window)


# Made-up times for the Matroska file, in its unit of a millisecond. The real times may be negative, which
# DALI skips, or less than a millisecond apart.
_STEP, _TIME_BASE = 40, Fraction(1, 1000)

# Codecs that the operator decodes correctly on a GPU, and on the CPU. It assumes that each packet decodes to
# one shown frame. AV1 and VP9 can show a frame again without decoding one, and MPEG-4 in AVI packs two frames
# into a packet.
_CODECS, _CODECS_OF_CPU = ("h264", "hevc"), ("vp8", "vp9")

# pad_mode="none": otherwise DALI replaces missing frames by black ones.
_DECODE = {"affine": False, "pad_mode": "none"}


def load_video_by_dali(
    packets: VideoPackets, index: int | None, num_frames: int | None = None
) -> TimedFrames:
    """Decode packets by DALI's operator to RGB, in the original size.

    Args:
        packets: Packets of a window.
        index: Number of the device; ``None`` means the CPU.
        num_frames: Maximum number of frames; ``None`` means all.

    Raises:
        DecodeError: DALI cannot decode the video, or would decode it wrongly.
        ConvertError: No frame lies in the window.
        TransferError: The device has too little memory.
    """
    codec, source = packets.codec, packets.source
    if refusals := list(_refusals(packets, index)):
        raise DecodeError(
            f"decoder='dali' would not decode this video right: it needs {'; '.join(refusals)}. "
            "decoder='auto' takes NVDEC or the CPU for such a video",
            source=source,
        )
    check_complete(packets, DEFAULT_DECODE_CONFIG)
    base, zero, hidden = packets.time_base, metadata_of(packets).zero, discarded_pts(packets)
    times = {
        number: float(seconds)
        for number, pts in enumerate(sorted(packet.pts or 0 for packet in av_packets(packets)))
        if pts not in hidden and (seconds := ticks_to_seconds(pts, base, zero)) in packets.window
    }
    numbers = list(times)[:num_frames]
    if not numbers:
        raise no_frames(packets)
    encoded, wanted = np.frombuffer(remux(packets), np.uint8), np.array(numbers, np.int32)
    with slot_pool(index).borrow() as slot:
        try:
            frames = slot.run("decoders.Video", [encoded], _DECODE, {"frames": [wanted]})
        except DALI_ERRORS as error:
            # The type of DALI's error does not distinguish a full device from damaged data.
            kind = TransferError if is_out_of_memory(error) else DecodeError
            raise kind(
                f"DALI cannot decode {len(numbers)} frames of this {codec.width}x{codec.height} {codec.name} "
                f"video on {named(index)}: {error}. Load fewer frames at a time, or take decoder='nvdec', "
                "another way to the same hardware",
                source=source,
            ) from error
        buffer = ready_buffer(frames.tensors[0], slot.stream)
    return buffer, lambda: tuple(times[one] for one in numbers)


def _refusals(packets: VideoPackets, index: int | None) -> Iterator[str]:
    """Yield the requirements of the operator that the video does not meet."""
    codec, codecs = packets.codec, _CODECS_OF_CPU if index is None else _CODECS
    coded: Sequence[Any] = av_packets(packets)
    if codec.name not in codecs:
        yield f"{' or '.join(codecs)}, and this is {codec.name}"
    if codec.pix_fmt not in ("yuv420p", "nv12"):
        yield f"8-bit 4:2:0, and this is {codec.pix_fmt}"
    # FFmpeg's numbers of range and matrix: limited or unspecified, and BT.601 or unspecified.
    if codec.color[0] not in (0, 1) or codec.color[1] not in (2, 5, 6):
        yield f"limited range and BT.601, and this states {codec.color[:2]} (range and matrix in H.273)"
    if codec.width % 2 or codec.height % 2:
        yield f"even sides, and this is {codec.width}x{codec.height}"
    if may_have_fields(codec):
        yield "progressive frames, and this H.264 may have fields"
    if len({packet.pts for packet in coded} - {None}) != len(coded):
        yield "a time of its own for each packet"
    # In closed GOPs, no frame is shown before the key frame that it follows.
    keys: Iterator[Any] = accumulate(coded, lambda key, one: one if one.is_keyframe else key)
    if any(
        not k.is_keyframe or (p.pts or 0) < (k.pts or 0) for k, p in zip(keys, coded, strict=True)
    ):
        yield "closed groups of pictures, from a key frame on"
    if metadata_of(packets).orientation != 1:
        yield "upright frames"


def remux(packets: VideoPackets) -> bytes:
    """Write packets with distinct times to a Matroska file with made-up times in the same order.

    Raises:
        FFmpegError: Matroska does not take the codec.
    """
    coded, sink = av_packets(packets), io.BytesIO()
    rank = {pts: number for number, pts in enumerate(sorted(one.pts or 0 for one in coded))}
    ranks = [rank[packet.pts or 0] for packet in coded]
    # Delay all times so that no frame is shown before it is decoded.
    delay = max(position - place for position, place in enumerate(ranks))
    with av.open(sink, "w", format="matroska") as container:
        # PyAV can only add a stream for packets from a template; the null filter then sets the codec.
        model = av.open(io.BytesIO(), "w", format="nut").add_stream("mpeg4")
        stream: Any = container.add_stream_from_template(model, opaque=True)
        BitStreamFilterContext("null", av.Codec(packets.codec.name, "r"), stream)
        context = stream.codec_context
        context.width, context.height = packets.codec.width, packets.codec.height
        context.extradata = packets.codec.extradata
        for position, (packet, place) in enumerate(
            zip(map(copy_packet, coded), ranks, strict=True)
        ):
            packet.time_base, packet.stream = _TIME_BASE, stream
            packet.pts, packet.dts = (place + delay) * _STEP, position * _STEP
            packet.duration = _STEP
            container.mux(packet)
    return sink.getvalue()
