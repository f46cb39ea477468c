"""What DALI decodes: batches of whole images, and, for those who ask for it, frames of videos.

Images come out as on the CPU: the same boxes and placement, upright, cubic scaling with antialiasing. On 64
photographs scaled to 224x224 with DALI's CPU operators, the mean difference from
:func:`~spdl_media.load_image_batch` is 0.35 to 0.51 levels of 255, as the scale mode is, and 1.95 for the
worst of them. Most of it is 4:2:0 chroma, which FFmpeg scales from its own size; small 4:2:0 images that
are enlarged differ more (63x47 to 224x224: 5.2). One thing DALI does not tell: wrong data inside a JPEG that
goes on to its end, of which FFmpeg notices most.

The video operator takes whole files, knows frames by their number among the packets, converts by BT.601
without asking the stream, and reports no damage. Packets go in as a file made in memory; what it would get
wrong is refused.
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
from spdl_media.batch import FrameRequest, TimedFrames, decode_each
from spdl_media.buffer import Buffer, Failure
from spdl_media.coded_units import may_have_fields
from spdl_media.config import DEFAULT_DECODE_CONFIG
from spdl_media.cuda.dali import (
    DALI_ERRORS,
    DaliBatch,
    Settings,
    Slot,
    dali_module,
    named,
    ready_buffer,
    slot_pool,
)
from spdl_media.cuda.nvdec import has_lengths
from spdl_media.demux import demux_image, make_filter
from spdl_media.devices import is_out_of_memory
from spdl_media.errors import DecodeError, MediaError, TransferError
from spdl_media.geometry import Box, Placement, Size, place, swaps_sides
from spdl_media.packets import (
    VideoPackets,
    av_packets,
    copy_packet,
    cut_short_error,
    discarded_pts,
    metadata_of,
)
from spdl_media.row_plan import (
    FrameKind,
    kinds_differ,
)
from spdl_media.rows import no_frames
from spdl_media.stills import HEAD_SIZE, still_codec
from spdl_media.timing import ticks_to_seconds

COLORS = {"rgb24": "RGB", "bgr24": "BGR", "gray": "GRAY"}
FILTERS = {"bicubic": "INTERP_CUBIC", "bilinear": "INTERP_LINEAR"}
"""Pixel formats and scaling algorithms, and what DALI calls them."""

# Decoders of FFmpeg whose images DALI gives too, within 1 level of 255 on average at their own size, in
# every variant tried. Not TIFF: gray with alpha, and JPEG or YCbCr inside, come out 7 to 99 levels off.
_DALI_DECODERS = frozenset({"bmp", "jpeg2000", "mjpeg", "png", "webp"})

# Where FFmpeg refuses an image as too large (av_image_check_size), DALI may try to find memory for it.
_FFMPEG_LIMIT, _FFMPEG_MARGIN = (2**31 - 1) // 8, 128

# Memory that each decoder and thread has beyond its largest image. DALI's own 16 MiB is for the largest
# of photographs.
_PADDING = 1 << 20


class NotForDaliError(Exception):
    """A batch holds what DALI does not decode. The message says what."""


@dataclass(frozen=True, slots=True)
class _File:
    """An image as DALI gets it.

    Attributes:
        data: The bytes of the file.
        source: What it was read from, for messages.
        size: Of the decoded image, upright.
        box: What is cut out of it, or all of it.
        mirror: Whether left and right are exchanged.
        placement: How what was cut out is scaled and placed.
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
        MediaError: One fails, and is to be raised. The message names it and its position.
        NotForDaliError: DALI does not decode one, or one fails, and is not to be raised.
    """
    # Its error is raised as it is, without a position in a batch.
    if request.is_single:
        return [_read(inputs, 0, request)]
    files: dict[int, _File] = {}
    failures: list[Failure] = []
    decode_each(
        inputs,
        lambda _, position: _read(inputs, position, request),
        # In the order of the inputs: they are read one after the other.
        files.__setitem__,
        failures,
        on_error=request.on_error,
        stopped=stopped,
    )
    if failures:
        raise NotForDaliError(str(failures[0].error).rstrip("."))
    pix_fmt = request.ops.pix_fmt or ""
    kinds = [
        (f"input {at} ({file.source})", FrameKind(*file.placement.canvas, pix_fmt))
        for at, file in files.items()
    ]
    if others := [one for one in kinds if one[1] != kinds[0][1]]:
        raise kinds_differ(kinds[0], others[0])
    return list(files.values())


def _read(inputs: list[Any], position: int, request: FrameRequest) -> _File:
    """Read an input, which the packets or the error replace: some sources can be read once."""
    try:
        packets = demux_image(
            inputs[position], demux_config=request.demux_config, name=request.name
        )
    except MediaError as error:
        inputs[position] = error
        raise
    inputs[position] = packets
    facts, decoder, ops = metadata_of(packets), packets.codec.decoder, request.ops
    content = memoryview(av_packets(packets)[0])
    data = np.frombuffer(content, np.uint8)
    size = _size(data) if decoder in _DALI_DECODERS else None
    if (
        size is None
        or facts.incomplete is not None
        or (facts.orientation != 1 and not _is_turned_by_dali(decoder, content))
        or still_codec(content[:HEAD_SIZE]) != decoder  # a frame of a film or an animation
    ):
        raise NotForDaliError(
            f"{facts.source}: DALI does not decode this {decoder} file as FFmpeg does"
        )
    if request.decode_config.orient and swaps_sides(facts.orientation):
        size = size[::-1]
    if request.cuts is not None:
        ops = request.cuts.filter(position, size, ops, facts.source)
    box = ops.box or (0, 0, *size)
    placement = place(box[2:], ops.width, ops.height, ops.scale_mode)
    return _File(data, facts.source, size, box, ops.mirror, placement)


def _size(data: npt.NDArray[np.uint8]) -> Size | None:
    """Width and height in the file's header, as DALI reads it; ``None`` where it cannot.

    Not left to the decoder: one file whose header it cannot read, in a batch of 32, crashes the process
    (DALI 2.4, nvImageCodec 0.9: 9 of 9 runs). Reading a header takes 2 microseconds.
    """
    headers: Any = require("nvimgcodec", "decoding pictures with DALI")
    try:
        header = headers.CodeStream(data)
        width, height = int(header.width), int(header.height)
    except RuntimeError:
        return None
    too_large = (width + _FFMPEG_MARGIN) * (height + _FFMPEG_MARGIN) >= _FFMPEG_LIMIT
    return None if too_large else (width, height)


def _is_turned_by_dali(decoder: str, content: memoryview) -> bool:
    """Whether DALI reads as we do how an image stands: from the Exif of a JPEG alone, and not from XMP."""
    return decoder == "mjpeg" and b"tiff:Orientation" not in bytes(content[:HEAD_SIZE])


def load_images(
    inputs: list[Any],
    request: FrameRequest,
    index: int | None,
    stopped: Callable[[], bool] | None,
    hw_decoder_load: float | None,
) -> Buffer:
    """Load images through DALI's operators.

    Args:
        inputs: The images; packets and errors replace those that were read.
        request: How to load them.
        index: Number of the device; ``None``: the CPU.
        stopped: Asked before each image is read.
        hw_decoder_load: Share of the GPU's JPEG engine; ``None``: DALI's own.

    Raises:
        MediaError: As for :func:`~spdl_media.load_image_batch`.
        MissingDependencyError: DALI is not installed, or is too old.
        TransferError: The batch does not fit into the memory of the device; there is no GPU; or this process
            was forked after CUDA had been used.
        NotForDaliError: The CPU is to decode the batch.
    """
    pool, files = slot_pool(index), _read_all(inputs, request, stopped)
    with pool.borrow() as slot:
        try:
            made = _made(slot, files, request, hw_decoder_load)
        except DALI_ERRORS as error:
            said = f"DALI says {str(error).strip() or type(error).__name__!r}"
            if not is_out_of_memory(error):
                raise NotForDaliError(said) from error
            size = sum(3 * file.size[0] * file.size[1] for file in files) / 1e6
            raise TransferError(
                f"the {len(files)} pictures of this batch, {size:.1f} MB when decoded, do not fit into the "
                f"memory of {named(index)}: {said}. Load fewer at a time, in smaller batches or fewer threads"
            ) from error
        array = made.tensors[0] if request.is_single else slot.as_array(made)
        positions = range(len(files))
        indices = None if request.is_single else tuple(positions)
        buffer = ready_buffer(array, slot.stream, indices=indices)
        if request.cuts is not None:
            buffer.boxes, buffer.flips = request.cuts.drawn(positions, positions)
        return buffer


def _made(
    slot: Slot, files: Sequence[_File], request: FrameRequest, hw_decoder_load: float | None
) -> DaliBatch:
    """Decode, cut, scale, place, mirror, normalise and transpose images."""
    types: Any = dali_module("types")
    ops, values = request.ops, request.values
    decoder: Settings = {
        "output_type": getattr(types, COLORS[ops.pix_fmt or ""]),
        "adjust_orientation": request.decode_config.orient,
        # Threads belong to whoever runs many slots, not to a core.
        "affine": False,
        # As the CPU decoder does, or edges between colours would differ.
        "jpeg_fancy_upsampling": True,
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
        pictures = _window(slot, pictures, [_shown(file) for file in files])
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
        # In levels of 255.
        for name, numbers in (("mean", values.mean), ("std", values.std)):
            arguments[name] = [np.float32(255) * np.array(numbers, np.float32)] * len(files)
    return slot.run("CropMirrorNormalize", pictures, finish, arguments)


def _shown(file: _File) -> Box:
    """The canvas in the scaled image; where it begins outside, there is a border."""
    placement = file.placement
    (width, height), left = placement.canvas, placement.left
    if file.mirror:  # which comes afterwards
        left = width - placement.scaled[0] - left
    return -left, -placement.top, width, height


def _window(slot: Slot, pictures: DaliBatch, boxes: Sequence[Box]) -> DaliBatch:
    settings = {"axes": (0, 1), "out_of_bounds_policy": "pad", "fill_values": (0.0,)}
    window = {
        "start": [np.array([y, x], np.int32) for x, y, _, _ in boxes],
        "shape": [np.array([height, width], np.int32) for _, _, width, height in boxes],
    }
    return slot.run("Slice", pictures, settings, window)


# Times that Matroska keeps exactly, in its milliseconds. The real ones may be negative, which DALI skips, or
# closer together than that.
_STEP, _TIME_BASE = 40, Fraction(1, 1000)

# The operator takes each frame that is decoded for one that is shown. AV1 and VP9 show frames again without
# decoding anything, and MPEG-4 in AVI packs two frames into a packet.
_CODECS, _CODECS_OF_CPU = ("h264", "hevc"), ("vp8", "vp9")

# Without "none", DALI fills up with black what the file does not have.
_DECODE = {"affine": False, "pad_mode": "none"}


def load_video_by_dali(
    packets: VideoPackets, index: int | None, num_frames: int | None = None
) -> TimedFrames:
    """Decode packets by DALI's operator, to RGB in their own size.

    Args:
        packets: Of a window.
        index: Number of the device; ``None``: the CPU.
        num_frames: At most so many frames; ``None``: all.

    Raises:
        DecodeError: It would not decode the video right, or cannot.
        ConvertError: No frame lies in the window.
        TransferError: The device has too little memory.
    """
    codec, source = packets.codec, packets.source
    if refusals := list(_refusals(packets, index)):
        raise DecodeError(
            f"decoder='dali' would not decode this video right: it needs {'; '.join(refusals)}. "
            "decoder='auto' takes PyAV's decoder for such a video, or the CPU",
            source=source,
        )
    if missing := cut_short_error(packets, DEFAULT_DECODE_CONFIG):
        raise missing
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
            # DALI's types of errors do not tell a full device from damaged data.
            kind = TransferError if is_out_of_memory(error) else DecodeError
            raise kind(
                f"DALI cannot decode {len(numbers)} frames of this {codec.width}x{codec.height} {codec.name} "
                f"video on {named(index)}: {error}. Load fewer frames at a time, or take decoder='pyav', "
                "another way to the same hardware",
                source=source,
            ) from error
        buffer = ready_buffer(frames.tensors[0], slot.stream)
    return buffer, lambda: tuple(times[one] for one in numbers)


def _refusals(packets: VideoPackets, index: int | None) -> Iterator[str]:
    """What the operator needs, and the video does not have."""
    codec, codecs = packets.codec, _CODECS_OF_CPU if index is None else _CODECS
    coded: Sequence[Any] = av_packets(packets)
    if codec.name not in codecs:
        yield f"{' or '.join(codecs)}, and this is {codec.name}"
    if codec.pix_fmt not in ("yuv420p", "nv12"):
        yield f"8-bit 4:2:0, and this is {codec.pix_fmt}"
    # By FFmpeg's numbers: limited range and a matrix of BT.601, or none stated.
    if codec.color[0] not in (0, 1) or codec.color[1] not in (2, 5, 6):
        yield f"limited range and BT.601, and this states {codec.color[:2]} (range and matrix in H.273)"
    if codec.width % 2 or codec.height % 2:
        yield f"even sides, and this is {codec.width}x{codec.height}"
    headers = codec.extradata
    if codec.name == "h264" and has_lengths(codec):
        headers = make_filter("h264_mp4toannexb", codec)[1].extradata
    if codec.name == "h264" and may_have_fields(headers):
        yield "progressive pictures, and this H.264 may have fields"
    if len({packet.pts for packet in coded} - {None}) != len(coded):
        yield "a time of its own for each packet"
    # None is shown before a key frame that it follows.
    keys: Iterator[Any] = accumulate(coded, lambda key, one: one if one.is_keyframe else key)
    if any(
        not k.is_keyframe or (p.pts or 0) < (k.pts or 0) for k, p in zip(keys, coded, strict=True)
    ):
        yield "closed groups of pictures, from a key frame on"
    if metadata_of(packets).orientation != 1:
        yield "pictures that stand upright"


def remux(packets: VideoPackets) -> bytes:
    """Write packets with distinct times into a Matroska file whose times are made up: their order counts."""
    coded, sink = av_packets(packets), io.BytesIO()
    rank = {pts: number for number, pts in enumerate(sorted(one.pts or 0 for one in coded))}
    ranks = [rank[packet.pts or 0] for packet in coded]
    # Nothing may be shown before it is decoded.
    delay = max(position - place for position, place in enumerate(ranks))
    with av.open(sink, "w", format="matroska") as container:
        # PyAV copies packets to a stream that has another's parameters; the filter puts the codec's there.
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
