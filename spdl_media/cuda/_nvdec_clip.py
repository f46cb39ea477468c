"""Packets of a window to one array on a device: the three ways, and the step from one to another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from math import nan
from typing import Any

import numpy as np

from spdl_media._optional import is_available
from spdl_media.codec import VideoCodec, usual_duration
from spdl_media.config import DecodeConfig
from spdl_media.convert import convert_frames
from spdl_media.cuda._nvdec_dali import decode_by_number
from spdl_media.cuda._nvdec_device import VideoDevice
from spdl_media.cuda._nvdec_pictures import DevicePictures, NotOnDeviceError
from spdl_media.cuda._nvdec_planes import NO_COLORS, Colors
from spdl_media.cuda._nvdec_rule import (
    Clip,
    VideoDecoderName,
    Way,
    choose,
    clip_of,
    not_on_nvdec,
    nvdec_refusal,
)
from spdl_media.cuda._nvdec_timeline import at_rate
from spdl_media.cuda._nvdec_writer import FrameWriter, Output
from spdl_media.cuda.fallback import warn_of_fallback
from spdl_media.decode import cut_short_error, decode_packets
from spdl_media.errors import ConvertError, DecodeError
from spdl_media.filter_desc import get_video_filter_desc
from spdl_media.image_frames import VideoFrames
from spdl_media.operations import Rate, parse_rate
from spdl_media.packets import (
    VideoPackets,
    av_packets,
    discarded_pts,
    metadata_of,
)
from spdl_media.timing import ConstantRate, ticks_to_seconds


@dataclass(frozen=True, slots=True)
class DeviceClip:
    """Frames on a device, with their times.

    Attributes:
        array: The frames, one behind the other.
        pts: Their timestamps, in units of ``time_base``; those that the CPU path gives.
        time_base: Seconds in one unit.
        timestamps: The same in seconds on the container's clock.
        way: How they were decoded.
        colors: What they mean, if they are YUV.
    """

    array: Any
    pts: tuple[int | None, ...]
    time_base: Fraction
    timestamps: tuple[float, ...]
    way: Way
    colors: Colors = NO_COLORS


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of packets.

    Attributes:
        output: What is made of each frame.
        config: How to decode.
        num_frames: At most so many frames; ``None``: all.
        frame_rate: Frames in a second; ``None``: as they are.
        decoder: The way, or ``"auto"``.
        may_use_dali: Whether ``"auto"`` may be DALI.
    """

    output: Output
    config: DecodeConfig
    num_frames: int | None = None
    frame_rate: Rate | None = None
    decoder: VideoDecoderName = "auto"
    may_use_dali: bool = False


def decode_clip(packets: VideoPackets, device: VideoDevice, request: Request) -> DeviceClip:
    """Decode packets to an array on a device, by the way that the rule or the request says.

    Raises:
        DecodeError: The data is damaged, or the forced decoder does not take it.
        ConvertError: No frame lies in the window, or they make no one array.
    """
    clip = clip_of(packets, device.kind, request.output, request.config)
    has_dali = request.may_use_dali and is_available("dali")
    way = choose(clip, request.decoder, may_use_dali=has_dali, source=packets.source)
    if way == "dali":
        return _by_dali(packets, device, request, clip)
    if way == "pyav":
        try:
            return _by_pyav(packets, device, request)
        except NotOnDeviceError as found:
            refusal = str(found)
            if request.decoder != "auto":
                raise not_on_nvdec(refusal, packets.source) from found.__cause__
    else:
        refusal = str(nvdec_refusal(packets.codec))
    warn_of_fallback(f"{packets.source}: {refusal}")
    return _by_cpu(packets, device, request)


def _by_dali(
    packets: VideoPackets, device: VideoDevice, request: Request, clip: Clip
) -> DeviceClip:
    missing = cut_short_error(packets, request.config)
    if missing is not None:
        raise missing
    numbers: Sequence[int] = clip.timeline.wanted
    pts: Sequence[int | None] = [clip.timeline.times[number][0] for number in numbers]
    time_base = packets.time_base
    if request.frame_rate is not None:
        time_base, chosen = at_rate(packets, clip.timeline, request.frame_rate)
        numbers, pts = [number for number, _ in chosen], [ticks for _, ticks in chosen]
    # Up to None is all of them.
    numbers, pts = numbers[: request.num_frames], pts[: request.num_frames]
    if not numbers:
        raise _no_frame(packets)
    orientation = metadata_of(packets).orientation if request.config.orient else 1
    array = decode_by_number(
        packets,
        clip.timeline,
        numbers,
        device,
        request.output,
        orientation=orientation,
    )
    return _timed(array, pts, time_base, packets, "dali")


def _by_pyav(packets: VideoPackets, device: VideoDevice, request: Request) -> DeviceClip:
    facts, coded = metadata_of(packets), av_packets(packets)
    _check_start(packets)
    limit, base = request.num_frames, packets.time_base
    missing = cut_short_error(packets, request.config)
    if missing is not None and limit is None:
        raise missing
    pictures = DevicePictures(device, packets.codec, facts, request.config)
    pictures.discarded = discarded_pts(packets)
    # A stream without any key frame is one that refreshes bit by bit; its decoder knows what to do.
    pictures.needs_key = any(packet.is_keyframe for packet in coded)
    clock: ConstantRate[Any] | None = None
    if request.frame_rate is not None:
        clock = ConstantRate(parse_rate(request.frame_rate), facts.window, base, facts.zero)
        pictures.gives_lead_in = True
    # A frame for each packet of the window; the writer makes room if there are more.
    room = min(len(packets.get_timestamps()) or len(coded), limit or len(coded))
    writer = FrameWriter(device, request.output, max(1, room), packets.source)
    rows: list[int] = []
    times: list[int | None] = []
    last: Any = None
    # None drains the decoder.
    for packet in (*coded, None) if coded else ():
        shown = _shown(pictures.decode(packet), clock, packets, is_last=packet is None)
        if (first := next(shown, None)) is None:
            continue
        with device.after_decoder():
            for frame, pts in chain([first], shown):
                if len(times) == limit:
                    break
                # One that is shown at several moments is written once.
                if frame is not last:
                    writer.add(frame, pictures.standing)
                last = frame
                rows.append(writer.count - 1)
                times.append(pts)
        if len(times) == limit:
            break
    if missing is not None and len(times) != limit:
        raise missing
    if not times:
        raise _no_frame(packets)
    array = writer.result()
    if rows != list(range(len(rows))):
        array = device.take(array, rows)
    return _timed(array, times, clock.time_base if clock else base, packets, "pyav", writer.colors)


def _shown(
    frames: Iterable[Any],
    clock: ConstantRate[Any] | None,
    packets: VideoPackets,
    *,
    is_last: bool,
) -> Iterator[tuple[Any, int | None]]:
    """Frames as they come, or at the moments of a constant rate, with their timestamps."""
    if clock is None:
        yield from ((frame, frame.pts) for frame in frames)
        return
    for frame in frames:
        yield from clock.push(frame, frame.pts, frame.duration or usual_duration(packets.codec))
    if is_last:
        yield from clock.flush(goes_on=metadata_of(packets).goes_on)


def _check_start(packets: VideoPackets) -> None:
    coded = av_packets(packets)
    if metadata_of(packets).continues and coded and not coded[0].is_keyframe:
        raise DecodeError(
            "these packets continue a stream and do not start with a key frame, so they cannot be decoded "
            "alone. streaming_load_video_nvdec decodes a whole stream, batch by batch",
            source=packets.source,
        )


def _by_cpu(packets: VideoPackets, device: VideoDevice, request: Request) -> DeviceClip:
    frames = decode_packets(
        packets,
        cpu_filter(packets.codec, request.output, request.frame_rate),
        request.config,
        num_frames=request.num_frames,
    )
    array, colors = host_array(frames, request.output)
    uploaded = device.upload(array)
    return DeviceClip(uploaded, frames.pts, frames.time_base, frames.timestamps, "cpu", colors)


def host_array(frames: VideoFrames, output: Output) -> tuple[np.ndarray[Any, Any], Colors]:
    """Frames of the CPU in the shape that the output has on a device, and what they mean."""
    if output.pix_fmt == "nv12":
        buffer = convert_frames(frames)
        return buffer.array[:, 0], (buffer.colorspace, buffer.color_range)
    return convert_frames(frames, layout=output.layout).array, NO_COLORS


def cpu_filter(codec: VideoCodec, output: Output, frame_rate: Rate | None = None) -> str:
    """The filter graph that makes on the CPU what is made on a device."""
    pix_fmt: str = output.pix_fmt
    if pix_fmt == "nv12" and any(depth in str(codec.pix_fmt) for depth in ("p10", "p12")):
        # As on the device, where deep planes have 16 bits with the value in the high ones.
        pix_fmt = "p010le" if "p10" in str(codec.pix_fmt) else "p016le"
    desc = get_video_filter_desc(
        frame_rate=frame_rate,
        scale_width=output.width,
        scale_height=output.height,
        scale_mode=output.scale_mode,
        scale_algo=output.scale_algo,
        pix_fmt=pix_fmt,
        # The device converts exactly as well.
        quality="accurate",
    )
    crop = output.crop
    width, height = f"iw-{crop.left + crop.right}", f"ih-{crop.top + crop.bottom}"
    cut = f"crop={width}:{height}:{crop.left}:{crop.top}," if any(crop.sides) else ""
    return f"{cut}{desc}"


def _timed(
    array: Any,
    pts: Sequence[int | None],
    time_base: Fraction,
    packets: VideoPackets,
    way: Way,
    colors: Colors = NO_COLORS,
) -> DeviceClip:
    zero = metadata_of(packets).zero
    seconds = tuple(
        nan if time is None else float(ticks_to_seconds(time, time_base, zero)) for time in pts
    )
    return DeviceClip(array, tuple(pts), time_base, seconds, way, colors)


def _no_frame(packets: VideoPackets) -> ConvertError:
    return ConvertError(
        f"there is no frame in the window {metadata_of(packets).window}, so there is nothing to convert",
        source=packets.source,
    )
