"""DALI's video operator: packets go in as a file made in memory, frames come out by their number."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import av
import numpy as np

from spdl_media._devices.device import is_out_of_memory
from spdl_media.codec import VideoCodec
from spdl_media.cuda._nvdec_device import VideoDevice
from spdl_media.cuda._nvdec_geometry import coded_size, upright
from spdl_media.cuda._nvdec_timeline import Timeline
from spdl_media.cuda._nvdec_writer import Output
from spdl_media.cuda._nvjpeg_operators import DALI_ERRORS
from spdl_media.cuda.slots import dali_types, slot_pool
from spdl_media.errors import DecodeError, TransferError
from spdl_media.geometry import Placement
from spdl_media.packets import VideoPackets, av_packets, copy_packet

# Times that Matroska keeps exactly, in its milliseconds. The real ones may be negative, which DALI skips, or
# closer together than that.
_STEP, _TIME_BASE = 40, Fraction(1, 1000)


def decode_by_number(
    packets: VideoPackets,
    timeline: Timeline,
    numbers: Sequence[int],
    device: VideoDevice,
    output: Output,
    *,
    orientation: int,
) -> Any:
    """Decode frames by their numbers in display order.

    Args:
        packets: Of a clip that the rule gives to DALI.
        timeline: Theirs.
        numbers: Which frames, in any order, repeated or not.
        device: Where they are decoded.
        output: What is made of them, RGB without a crop.
        orientation: How the frames stand.

    Returns:
        An array of the output's shape on the device, ready to be read on any stream.

    Raises:
        DecodeError: DALI cannot decode them.
        TransferError: The device has too little memory.
    """
    placement = output.placement(
        coded_size((packets.codec.width, packets.codec.height), orientation)
    )
    width, height = coded_size(placement.scaled, orientation)
    encoded = np.frombuffer(remux(packets, timeline), np.uint8)
    wanted = np.array(numbers, np.int32)
    with slot_pool(device.slots).borrow() as slot:
        try:
            batch = slot.run("decoders.Video", [encoded], _DECODE, {"frames": [wanted]})
            if (width, height) != (packets.codec.width, packets.codec.height):
                size = np.array([height, width], np.float32)
                batch = slot.run("Resize", batch, _filter(output), {"size": [size]})
            pictures = device.adopt(slot.as_array(batch))[0]
        except DALI_ERRORS as error:
            if is_out_of_memory(error):
                what = f"{len(numbers)} frames of {width}x{height}"
                raise TransferError(
                    f"{what}, {3 * len(numbers) * width * height / 1e6:.1f} MB of RGB, do not "
                    f"fit into the memory of {device.slots}: DALI says {error!s}. Load "
                    "fewer frames at a time: timestamp=, num_frames=",
                    source=packets.source,
                ) from error
            raise DecodeError(
                f"DALI cannot decode this {packets.codec.name} video: {error}. decoder='pyav' takes another "
                "way to the same hardware",
                source=packets.source,
            ) from error
        return _arranged(device, upright(device, pictures, orientation, (1, 2)), output, placement)


# Without "none", DALI fills up with black what the file does not have.
_DECODE = MappingProxyType({"affine": False, "pad_mode": "none"})


def _filter(output: Output) -> dict[str, Any]:
    kinds = dali_types().DALIInterpType
    kind = kinds.INTERP_CUBIC if output.scale_algo == "bicubic" else kinds.INTERP_LINEAR
    return {"interp_type": kind, "antialias": True}


def _arranged(device: VideoDevice, pictures: Any, output: Output, placement: Placement) -> Any:
    """The frames at their places, with channels and axes in the order that was asked for."""
    plain = output.layout == "NHWC" and output.pix_fmt == "rgb24"
    if plain and pictures.shape[1:3] == placement.canvas[::-1] and pictures.flags.c_contiguous:
        return pictures
    width, height = placement.canvas
    chw = output.layout == "NCHW"
    make = device.zeros if placement.has_border else device.empty
    array = make((len(pictures), *((3, height, width) if chw else (height, width, 3))), "uint8")
    target = device.swap(device.swap(array, 1, 2), 2, 3) if chw else array
    if output.pix_fmt == "bgr24":
        target = target[..., ::-1]
    device.copy(placement.part_of(target, 1), placement.visible(pictures, 1))
    return array


def remux(packets: VideoPackets, timeline: Timeline) -> bytes:
    """Write packets into a Matroska file whose frames, in display order, are as the timeline numbers them.

    Args:
        packets: With distinct timestamps.
        timeline: Theirs.

    Returns:
        The file. Its times are made up: DALI goes by their order alone.
    """
    sink = io.BytesIO()
    delay = max(position - rank for position, rank in enumerate(timeline.ranks))
    with (
        _empty_file(packets.codec) as empty,
        av.open(sink, "w", format="matroska") as container,
    ):
        stream = container.add_stream_from_template(empty.streams.video[0], opaque=True)
        context = stream.codec_context
        context.width, context.height = packets.codec.width, packets.codec.height
        context.extradata = packets.codec.extradata
        for position, (packet, rank) in enumerate(
            zip(map(copy_packet, av_packets(packets)), timeline.ranks, strict=True)
        ):
            packet.time_base, packet.stream = _TIME_BASE, stream
            packet.pts, packet.dts = (rank + delay) * _STEP, position * _STEP
            packet.duration = _STEP
            container.mux(packet)
    return sink.getvalue()


def _ivf(tag: bytes) -> bytes:
    """The header of a file that holds a stream and no frames."""
    words = (1).to_bytes(4, "little") * 2 + bytes(8)
    return b"DKIF\0\0\x20\0" + tag + (16).to_bytes(2, "little") * 2 + words


_START_CODES = b"\0\0\0\1" * 16
_EMPTY_FILES: Mapping[str, tuple[str, bytes]] = MappingProxyType(
    {
        "h264": ("h264", _START_CODES),
        "hevc": ("hevc", _START_CODES),
        "vp8": ("ivf", _ivf(b"VP80")),
        "vp9": ("ivf", _ivf(b"VP90")),
    }
)


def _empty_file(codec: VideoCodec) -> Any:
    """A file without frames: PyAV passes a codec's parameters on only from a stream that it has read."""
    format, content = _EMPTY_FILES[codec.name]
    return av.open(io.BytesIO(content), format=format)
