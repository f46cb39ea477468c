"""Stand-in for NVDEC: software-decoded frames in NVDEC's memory layout, with PyAV's interface.

Chroma is that of the software decoder, interleaved, in memory with padded rows as NVDEC's. When a frame is
dropped, its memory is overwritten, because the decoder's surfaces are reused.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

import av
import numpy as np
from color_reference import convert_on_host

import spdl_media as sm
from spdl_media.codec import VideoCodec, make_decoder
from spdl_media.config import DEFAULT_DECODE_CONFIG, DecodeConfig, as_decode_config
from spdl_media.cuda.nvdec import DecoderPool, has_lengths
from spdl_media.cuda.surfaces import PixelFormat
from spdl_media.cuda.video_path import decode_clip
from spdl_media.cuda.video_rows import Output, VideoDevice
from spdl_media.formats import picture_planes
from spdl_media.handover import Block, Guard, in_place
from spdl_media.operations import PictureOps
from spdl_media.packets import make_packet, metadata_of
from spdl_media.timing import seconds_of

PITCH = 256
STORED = {
    "yuv420p": ("nv12", "u1", 0),
    "yuvj420p": ("nv12", "u1", 0),
    "yuv420p10le": ("p010le", "<u2", 6),
    "yuv420p12le": ("p012le", "<u2", 4),
}


class Surface:
    """Memory for one frame: two planes with rows of a fixed pitch."""

    def __init__(self, planes: list[np.ndarray]) -> None:
        self.planes = []
        for plane in planes:
            rows = plane.reshape(len(plane), -1)
            pitch = -(-rows.shape[1] * rows.itemsize // PITCH) * PITCH
            memory = np.full((len(rows), pitch), 0xEE, np.uint8)
            memory[:, : rows.shape[1] * rows.itemsize] = rows.view(np.uint8)
            self.planes.append(memory)


class Plane:
    def __init__(self, memory: np.ndarray) -> None:
        self.buffer_ptr = memory.ctypes.data
        self.line_size = memory.shape[1]


ATTRIBUTES = (
    *("pts", "time_base", "duration", "is_corrupt", "width", "height", "side_data"),
    *("colorspace", "color_range", "color_primaries", "color_trc"),
)


class HardwareFrame:
    """A frame like ``cuda.surfaces.Surface``: metadata, and only the addresses of planes."""

    alive, per_launch = 0, 16

    def __init__(self, frame: av.VideoFrame, surface: Surface, stored: str) -> None:
        HardwareFrame.alive += 1
        self._frame = frame
        self._surface = surface
        self.format = PixelFormat(stored)
        self.planes = tuple(Plane(memory) for memory in surface.planes)

    def __getattr__(self, name: str) -> Any:
        assert name in ATTRIBUTES, f"a surface has no {name}"
        return getattr(self._frame, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("time_base", "pts", "duration", "color_primaries", "color_trc"):
            setattr(self._frame, name, value)
        else:
            object.__setattr__(self, name, value)

    def __del__(self) -> None:
        HardwareFrame.alive -= 1
        for memory in self._surface.planes:
            memory[:] = 0x55


def to_surface(frame: av.VideoFrame) -> HardwareFrame:
    """Convert a frame to one as of NVDEC, with even sides."""
    stored, dtype, shift = STORED[frame.format.name]
    luma, u, v = (plane.astype(dtype) << shift for plane in picture_planes(frame))
    luma = np.pad(luma, [(0, side % 2) for side in luma.shape], constant_values=0xEE)
    return HardwareFrame(frame, Surface([luma, np.stack([u, v], 2)]), stored)


class HardwareDecoder:
    """A software decoder whose frames become surfaces, like ``cuda.session.Session``."""

    nbytes = 0

    _context: Any

    def use(self, _: int, codec: VideoCodec) -> None:
        # Headers stand in the packets.
        coded = replace(codec, extradata=None) if has_lengths(codec) else codec
        self._context = make_decoder(coded, DEFAULT_DECODE_CONFIG, "stand-in")

    def decode(self, packet: Any, data: bytes) -> list[Any]:
        bare = None
        if packet is not None:  # without side data, which NVDEC does not see
            bare = make_packet(data, packet.time_base)
            bare.pts, bare.dts, bare.duration = packet.pts, packet.dts, packet.duration
        frames: Any = self._context.decode(bare)
        return list(map(to_surface, frames))

    def flush_buffers(self) -> None:
        self._context.flush_buffers()


class StandIn(VideoDevice):
    """A device in host memory that records its decoders and conversions."""

    def __init__(self) -> None:
        self.index, self.stream = 0, 1
        self.decoders = DecoderPool()
        self.opened: list[str] = []
        self.colors: list[Any] = []
        self.launches: list[int] = []

    def open_decoder(self, codec: VideoCodec) -> Any:
        self.opened.append(codec.name)
        return HardwareDecoder()

    def memory(self, shape: Any, row: Any, *, fill: bool) -> Block:
        array = np.full(shape, row if fill else 0x77, row.dtype)
        guard = Guard(0, 1, array.ctypes.data, array.shape, array.dtype, [array].clear)
        return Block(guard, guard.used_on)

    def convert(self, planes: Any, plan: Any, out: Any) -> None:
        self.launches.append(len(planes))
        convert_on_host(planes, plan, out)

    def copy(self, way: Any, target: Any, source: Any) -> None:
        target[...] = source

    def buffer(self, block: Block, colors: Any) -> Any:
        self.colors.append(colors)
        return in_place(block.array)


class DeviceClip(NamedTuple):
    """Frames on a device with their times."""

    buffer: Any
    pts: tuple[int | None, ...]
    time_base: Fraction
    timestamps: tuple[float, ...]


def clip_of(
    packets: sm.VideoPackets,
    device: Any,
    *,
    num_frames: int | None = None,
    frame_rate: Any = None,
    decode_config: DecodeConfig | None = None,
    layout: Any = "NHWC",
    values: Any = None,
    **options: Any,
) -> DeviceClip:
    """Decode packets on a device, with the options of ``load_video``."""
    config = as_decode_config(decode_config)
    output = Output(PictureOps(frame_rate=frame_rate, **options), layout, values)
    buffer, pts, time_base = decode_clip(packets, device, output, config, num_frames)
    seconds = seconds_of(pts, time_base, metadata_of(packets).zero)
    return DeviceClip(buffer, tuple(pts), time_base, seconds)


def load_video_nvdec(src: Any, timestamp: Any = None, *, cuda: Any, **options: Any) -> Any:
    """Do what ``load_video`` does with a device, on a stand-in."""
    return clip_of(sm.demux_video(src, timestamp=timestamp), cuda, **options).buffer
