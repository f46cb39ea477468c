"""Decoders of the hardware, and their surfaces: decoded frames, which are mapped when they are read."""

from __future__ import annotations

from contextlib import suppress
from ctypes import byref, c_uint, c_ulonglong, c_void_p
from typing import Any, NamedTuple

from spdl_media._threads import when_dropped
from spdl_media.cuda.cuvid import (
    DecoderParams,
    Format,
    MapParams,
    NotOnDeviceError,
    Shown,
    Status,
    call,
    library,
)
from spdl_media.cuda_driver import HISTORY, DriverError, current

# Number of frames per launch: many, to make its overhead negligible; fewer if they exceed so many bytes.
_MOST, _LEAST, _BYTES = 16, 8, 128 << 20

_ERRORS_FOUND = 8, 9


class HardwareDecoder:
    """A decoder of the hardware. It is destroyed when nothing refers to it, its surfaces included.

    Attributes:
        per_launch: Number of frames to convert at once.
    """

    def __init__(self, index: int, format: Format, num_surfaces: int) -> None:
        self.handle, self.index, self.num_surfaces = c_void_p(), index, num_surfaces
        self.kind = kind_of(format)
        width, height = (side + side % 2 for side in (format.width, format.height))
        nbytes = width * height * 3 // 2 * (2 if format.luma_depth else 1)
        self.per_launch = _MOST if _MOST * nbytes <= _BYTES else _LEAST
        # The frames of a launch, and some on their way to it.
        num_outputs = self.per_launch + 4
        self.rows, self.nbytes = height, nbytes * (num_surfaces + num_outputs)
        params = DecoderParams(
            width=width,
            height=height,
            num_surfaces=num_surfaces,
            codec=format.codec,
            chroma=format.chroma,
            depth=format.luma_depth,
            most_wide=width,
            most_high=height,
            format=int(format.luma_depth > 0),
            out_width=width,
            out_height=height,
            num_outputs=num_outputs,
        )
        self._end = when_dropped(_destroy, self.handle, index)
        call(index, "cuvidCreateDecoder", byref(self.handle), byref(params))


def _destroy(handle: c_void_p, index: int) -> None:
    if handle.value and not HISTORY.lost:
        with suppress(DriverError), current(index):  # the device may be gone
            library()[0].cuvidDestroyDecoder(handle)
    # If they are in a cycle, surfaces may be freed later.
    handle.value = None


def kind_of(format: Format) -> tuple[int, ...]:
    """Return what the frames of a decoder have in common."""
    return format.codec, format.chroma, format.luma_depth, format.width, format.height


class PixelFormat(NamedTuple):
    """FFmpeg's name of a pixel format, as an attribute like PyAV's."""

    name: str


# By the bits beyond 8.
_FORMATS = {0: PixelFormat("nv12"), 2: PixelFormat("p010le"), 4: PixelFormat("p012le")}


class Plane(NamedTuple):
    """Address and bytes of a row of a plane, named as PyAV names them."""

    buffer_ptr: int
    line_size: int


class Surface:
    """A decoded frame in the memory of its decoder, with the attributes of PyAV's frames.

    It is mapped at the first use, and unmapped when it is freed. Work that was queued on its stream before
    still reads it, because the decoder writes to its memory on the same stream.

    Args:
        decoder: The decoder.
        format: Properties of the stream.
        shown: Number and kind of the picture.
        stream: The stream on which it is mapped.
        color: Range, matrix, primaries and transfer that the container states, as FFmpeg's numbers.

    Attributes:
        number: Number of the surface in the decoder.
        per_launch: Number of frames to convert at once.
        pts: Timestamp of its packet; ``None``: the packet has none.
    """

    def __init__(
        self,
        decoder: HardwareDecoder,
        format: Format,
        shown: Shown,
        stream: int,
        color: tuple[int, int, int, int],
    ) -> None:
        self._decoder, self.number, self.per_launch = decoder, shown.surface, decoder.per_launch
        self._params = MapParams(
            is_progressive=shown.is_progressive,
            top_first=shown.top_first,
            unpaired=int(shown.repeat < 0),
            stream=stream,
        )
        self.pts: int | None = None
        self.duration = 0
        self.time_base: Any = None
        self.format = _FORMATS[format.luma_depth]
        self._offset = format.left, format.top
        self.width, self.height = format.right - format.left, format.bottom - format.top
        # As FFmpeg does, what the data states comes before what the container states.
        full, matrix, primaries, transfer = color
        self.color_range = 2 if format.signal >> 3 & 1 else full
        self.colorspace = _stated(format.matrix, matrix)
        self.color_primaries = _stated(format.primaries, primaries)
        self.color_trc = _stated(format.transfer, transfer)
        # The driver writes the address here, so that no Ctrl-C loses it.
        self._address, self._pitch = c_ulonglong(), c_uint()
        self._end = when_dropped(_unmap, decoder, self._address)

    def map(self) -> None:
        """Wait until the frame is decoded, and map it.

        Raises:
            TransferError: The device fails.
        """
        if self._address.value:
            return
        decoder, status = self._decoder, Status()
        place = decoder.handle, self.number
        with current(decoder.index):
            target = byref(self._address), byref(self._pitch), byref(self._params)
            call(decoder.index, "cuvidMapVideoFrame64", *place, *target)
            library()[1].cuvidGetDecodeStatus(*place, byref(status))  # some codecs have none
        self._is_corrupt = status.status in _ERRORS_FOUND

    @property
    def is_corrupt(self) -> bool:
        """Whether the hardware found errors in the data of the frame.

        Raises:
            TransferError: The device fails.
        """
        self.map()
        return self._is_corrupt

    @property
    def planes(self) -> tuple[Plane, Plane]:
        """Luma, and interleaved chroma.

        Raises:
            TransferError: The device fails.
        """
        self.map()
        (left, top), pitch, size = self._offset, self._pitch.value, 1 + (self.format.name != "nv12")
        luma = self._address.value
        chroma = luma + pitch * self._decoder.rows
        return (
            Plane(luma + top * pitch + left * size, pitch),
            Plane(chroma + top // 2 * pitch + left // 2 * 2 * size, pitch),
        )

    @property
    def side_data(self) -> Any:
        """Not known; it is read for streams whose data states an orientation.

        Raises:
            NotOnDeviceError: Always.
        """
        raise NotOnDeviceError("this video states its orientation in the data, which NVDEC skips")

    def unmap(self) -> None:
        """Give the memory back to the decoder. The frame must not be used afterwards."""
        _unmap(self._decoder, self._address)


def _unmap(decoder: HardwareDecoder, mapped: c_ulonglong) -> None:
    address, mapped.value = c_ulonglong(mapped.value), 0
    if address.value and decoder.handle.value and not HISTORY.lost:
        with suppress(DriverError), current(decoder.index):
            library()[1].cuvidUnmapVideoFrame64(decoder.handle, address)


def _stated(number: int, other: int) -> int:
    """Return a number of H.273, or the other one if it states nothing: 2 is unspecified, 0 not set."""
    return number if number not in (0, 2) else other
