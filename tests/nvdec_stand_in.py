"""Devices without a GPU: software frames in the layout of NVDEC's, behind the interface of PyAV's.

Their chroma is what the software decoder gave, interleaved, in memory whose rows are padded as NVDEC's are,
and the frame is "on a device" by its format's name. When a frame is dropped, its memory is overwritten: the
decoder's surfaces are used again too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import av
import numpy as np
from av.codec.context import CodecContext

import spdl_media as sm
from spdl_media.codec import VideoCodec, make_decoder
from spdl_media.config import DecodeConfig
from spdl_media.cuda._nvdec_device import VideoDevice
from spdl_media.cuda.nvdec import decode_to_device
from spdl_media.planes import picture_planes

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
    """Memory for one frame, two planes in rows of a fixed pitch."""

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
    """What PyAV gives with ``is_hw_owned=True``: the facts of a frame, and planes by address alone."""

    alive = 0

    def __init__(self, frame: av.VideoFrame, surface: Surface, stored: str) -> None:
        HardwareFrame.alive += 1
        self._frame = frame
        self._surface = surface
        self.format = Format("cuda")
        self.sw_format = Format(stored)
        self.planes = tuple(Plane(memory) for memory in surface.planes)

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
    """The frame as NVDEC would give it."""
    stored, dtype, shift = STORED[frame.format.name]
    luma, u, v = (plane.astype(dtype) << shift for plane in picture_planes(frame))
    return HardwareFrame(frame, Surface([luma, np.stack([u, v], 2)]), stored)


class HardwareDecoder:
    """A software decoder whose frames are turned into surfaces; others pass, as FFmpeg's fallback does."""

    def __init__(self, context: CodecContext) -> None:
        self._context = context

    def decode(self, packet: Any) -> list[Any]:
        frames: Any = self._context.decode(packet)
        return [to_surface(f) if f.format.name in STORED else SoftwareFrame(f) for f in frames]

    def flush_buffers(self) -> None:
        self._context.flush_buffers()


class SoftwareFrame:
    """A frame of PyAV's that is in host memory, where ``sw_format`` is ``None``."""

    sw_format = None

    def __init__(self, frame: av.VideoFrame) -> None:
        self.__dict__["_frame"] = frame

    def __getattr__(self, name: str) -> Any:
        return getattr(self._frame, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._frame, name, value)


class StandIn(VideoDevice):
    """A device in host memory that notes the decoders it opened, and counts the frames it waited for."""

    def __init__(self, library: Any = np) -> None:
        super().__init__(library)
        self.opened: list[str] = []
        self.colors: list[Any] = []
        self.waits = 0

    def open_decoder(self, codec: VideoCodec, config: DecodeConfig, source: str) -> Any:
        self.opened.append(codec.name)
        return HardwareDecoder(make_decoder(codec, config, source))

    def buffer(self, array: Any, colors: Any = (None, None)) -> Any:
        self.colors.append(colors)
        return array

    @contextmanager
    def after_decoder(self) -> Iterator[None]:
        self.waits += 1
        with super().after_decoder():
            yield


class FakeCupy:
    """CuPy over host memory: NumPy's functions, and streams and events that are written down."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.devices = 1
        self.cuda = FakeCuda(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def asarray(self, value: Any, dtype: Any = None) -> np.ndarray:
        interface = getattr(value, "__cuda_array_interface__", None)
        if interface is not None:
            assert interface["stream"] is None  # CuPy would wait for it on the host
            value = type("Host", (), {"__array_interface__": interface, "owner": value})()
        return np.asarray(value, dtype)


class FakeCuda:
    class CUDARuntimeError(RuntimeError):
        pass

    def __init__(self, cupy: FakeCupy) -> None:
        self._cupy = cupy
        self.runtime = self
        self.Stream = type("Stream", (), {"null": FakeStream("default", cupy.log)})
        self.current = FakeStream("current", cupy.log)

    def getDeviceCount(self) -> int:  # noqa: N802  # CuPy's name
        if self._cupy.devices == 0:
            raise self.CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")
        return self._cupy.devices

    def get_current_stream(self) -> FakeStream:
        return self.current

    @contextmanager
    def Device(self, index: int) -> Iterator[None]:  # noqa: N802  # CuPy's name
        assert 0 <= index < self._cupy.devices
        yield


class FakeStream:
    def __init__(self, name: str, log: list[str]) -> None:
        self._name = name
        self._log = log

    def record(self) -> str:
        self._log.append(f"event on {self._name}")
        return f"event on {self._name}"

    def wait_event(self, event: str) -> None:
        self._log.append(f"{self._name} waits for {event}")


def load_video_nvdec(src: Any, timestamp: Any = None, **options: Any) -> Any:
    """What ``load_video`` does with a device, on a stand-in."""
    packets = sm.demux_video(src, timestamp=timestamp)
    return decode_to_device(packets, **options)[0]
