"""Stand-in for NVDEC: software-decoded frames in NVDEC's memory layout, with PyAV's interface.

Chroma is that of the software decoder, interleaved, in memory with padded rows as NVDEC's. Only the name of
the frame's format says that it is on a device. When a frame is dropped, its memory is overwritten, because
the decoder's surfaces are reused.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import av
import numpy as np
from av.codec.context import CodecContext
from av.codec.hwaccel import HWAccel
from color_reference import convert_on_host

import spdl_media as sm
from spdl_media.codec import VideoCodec, make_decoder
from spdl_media.config import DecodeConfig, as_decode_config
from spdl_media.cuda.nvdec import DecoderPool
from spdl_media.cuda.video_path import decode_clip
from spdl_media.cuda.video_rows import Output, VideoDevice
from spdl_media.formats import picture_planes
from spdl_media.handover import Block, Guard, in_place
from spdl_media.operations import PictureOps
from spdl_media.packets import metadata_of
from spdl_media.rows import seconds_of

PITCH = 256
STORED = {
    "yuv420p": ("nv12", "u1", 0),
    "yuvj420p": ("nv12", "u1", 0),
    "yuv420p10le": ("p010le", "<u2", 6),
    "yuv420p12le": ("p016le", "<u2", 4),
}


@dataclass(frozen=True)
class Format:
    name: str


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


class HardwareFrame:
    """A frame as PyAV returns it with ``is_hw_owned=True``: metadata, and only the addresses of planes."""

    alive = 0

    def __init__(self, frame: av.VideoFrame, surface: Surface, stored: str) -> None:
        HardwareFrame.alive += 1
        self._frame = frame
        self._surface = surface
        self.format = Format("cuda")
        self.sw_format = Format(stored)
        self.planes = tuple(Plane(memory) for memory in surface.planes)
        self.width, self.height = (side + side % 2 for side in (frame.width, frame.height))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._frame, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("time_base", "pts"):
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
    """A software decoder whose frames become surfaces; unsupported ones stay, as with FFmpeg's fallback."""

    def __init__(self, context: Any) -> None:
        self._context = context

    @property
    def width(self) -> int:
        return int(self._context.width)

    @property
    def height(self) -> int:
        return int(self._context.height)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_context":
            object.__setattr__(self, name, value)
        else:
            setattr(self._context, name, value)

    def decode(self, packet: Any) -> list[Any]:
        frames: Any = self._context.decode(packet)
        return [to_surface(f) if f.format.name in STORED else SoftwareFrame(f) for f in frames]

    def flush_buffers(self) -> None:
        self._context.flush_buffers()


class SoftwareFrame:
    """A PyAV frame in host memory, whose ``sw_format`` is ``None``."""

    sw_format = None

    def __init__(self, frame: av.VideoFrame) -> None:
        self.__dict__["_frame"] = frame

    def __getattr__(self, name: str) -> Any:
        return getattr(self._frame, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._frame, name, value)


class StandIn(VideoDevice):
    """A device in host memory that records its decoders, and counts waits and conversions."""

    def __init__(self) -> None:
        self.index = 0
        self.decoders = DecoderPool()
        self.opened: list[str] = []
        self.colors: list[Any] = []
        self.waits = 0
        self.launches: list[int] = []

    def open_decoder(self, codec: VideoCodec, config: DecodeConfig, source: str) -> Any:
        self.opened.append(codec.name)
        return HardwareDecoder(make_decoder(codec, config, source))

    @contextmanager
    def after_decoder(self) -> Iterator[None]:
        self.waits += 1
        yield

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


class FakeFFmpeg:
    """PyAV's CodecContext with a CPU decoder, and with the checks of FFmpeg's ``hwcontext_cuda.c``.

    Args:
        current: The device whose context is current in this thread, or ``None``.
        active: Flags of the primary context if it is in use; PyTorch, CuPy and DALI use 0.
    """

    BLOCKING_SYNC = 4

    def __init__(self, current: Callable[[], int | None], active: int | None = 0) -> None:
        self._current, self._active = current, active

    def create(self, name: str, mode: str, hwaccel: HWAccel) -> Any:
        """Make a decoder with a CUDA device.

        Raises:
            av.FFmpegError: FFmpeg cannot make the device.
        """
        assert hwaccel.is_hw_owned
        primary, current = (
            int(hwaccel.options.get(option, "0")) for option in ("primary_ctx", "current_ctx")
        )
        if primary and current:
            raise av.FFmpegError(errno.EINVAL, "Invalid argument")
        if primary and self._active not in (None, self.BLOCKING_SYNC):
            # "Primary context already active with incompatible flags."
            raise av.FFmpegError(errno.EOPNOTSUPP, "Operation not supported")
        assert primary or current, (
            "frames would lie in a context of their own, which no kernel reads"
        )
        if current:
            assert self._current() == hwaccel.device_id, "another context is current"
        return CodecContext.create(name, mode)


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
