"""The planes of a hardware frame as arrays on the device, in place.

PyAV's own DLPack export cuts the chroma of odd sizes by one row or column, and has no formats but NV12, P010
and P016. The pointer and the pitch of a plane are known too, and make an array interface that is exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeAlias

DeviceKind: TypeAlias = Literal["cuda", "cpu"]

Colors: TypeAlias = tuple[str | None, str | None]
"""Matrix and range of YUV, as buffers have them."""

NO_COLORS: Colors = (None, None)
"""Of what is no YUV."""


@dataclass(frozen=True, slots=True)
class SemiPlanar:
    """How luma and the interleaved chroma of a 4:2:0 format are stored.

    Attributes:
        typestr: Type of a value, as in the array interface.
        dtype: The same as NumPy's name.
        bits: Bits of a value that count; they are the high ones.
    """

    typestr: str
    dtype: str
    bits: int


SEMI_PLANAR: Mapping[str, SemiPlanar] = MappingProxyType(
    {
        "nv12": SemiPlanar("|u1", "uint8", 8),
        "p010le": SemiPlanar("<u2", "uint16", 10),
        # What FFmpeg calls the frames of 12-bit streams, whose lowest four bits are zero.
        "p016le": SemiPlanar("<u2", "uint16", 16),
    }
)
"""The formats in which NVDEC gives frames, by FFmpeg's names."""


class Named(Protocol):
    """A pixel format of PyAV."""

    @property
    def name(self) -> str: ...


class HardwarePlane(Protocol):
    """What is needed of a plane of PyAV's."""

    @property
    def buffer_ptr(self) -> int: ...
    @property
    def line_size(self) -> int: ...


class HardwareFrame(Protocol):
    """What is needed of a frame of PyAV's that lies on a device."""

    @property
    def format(self) -> Named: ...
    @property
    def sw_format(self) -> Named | None: ...
    @property
    def planes(self) -> tuple[HardwarePlane, ...]: ...
    @property
    def width(self) -> int: ...
    @property
    def height(self) -> int: ...
    @property
    def colorspace(self) -> int: ...
    @property
    def color_range(self) -> int: ...


class _PlaneView:
    """Memory of a frame, which it keeps alive."""

    def __init__(
        self, owner: object, pointer: int, shape: tuple[int, ...], pitch: int, typestr: str
    ) -> None:
        self.owner = owner
        size = int(typestr[2:])
        inner = (size,) if len(shape) == 2 else (shape[2] * size, size)
        self._interface = {
            "shape": shape,
            "typestr": typestr,
            "data": (pointer, True),
            "strides": (pitch, *inner),
            "version": 3,
        }


class CudaPlane(_PlaneView):
    """A plane in device memory. It states no stream: the reader waits for the decoder by an event."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self._interface, "stream": None}


class HostPlane(_PlaneView):
    """A plane in host memory."""

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self._interface


Plane: TypeAlias = CudaPlane | HostPlane


def is_on_device(frame: HardwareFrame) -> bool:
    """Whether a frame came from NVDEC, and not from the software decoder that FFmpeg falls back to."""
    return frame.format.name == "cuda" and getattr(frame.sw_format, "name", "") in SEMI_PLANAR


def format_name(frame: HardwareFrame) -> str:
    """How the frame's pixels are stored, wherever they are."""
    return frame.format.name if frame.sw_format is None else frame.sw_format.name


def frame_planes(frame: HardwareFrame, kind: DeviceKind) -> tuple[Plane, Plane]:
    """Views of the planes of a frame of NVDEC's, without a copy.

    Returns:
        Luma ``(H, W)`` and chroma ``(ceil(H / 2), ceil(W / 2), 2)``, uint8 or uint16, with padded rows. They
        keep the frame alive, whose memory FFmpeg uses again for a later one.
    """
    layout = SEMI_PLANAR[format_name(frame)]
    luma, chroma = frame.planes
    width, height = frame.width, frame.height
    shapes = ((height, width), (-(-height // 2), -(-width // 2), 2))
    view = CudaPlane if kind == "cuda" else HostPlane
    first, second = (
        view(frame, plane.buffer_ptr, shape, plane.line_size, layout.typestr)
        for plane, shape in zip((luma, chroma), shapes, strict=True)
    )
    return first, second
