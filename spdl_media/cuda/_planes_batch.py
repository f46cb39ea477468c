"""Images decoded on the CPU and finished on the device: planes go over the bus, scaling and colour follow.

    sources -> FFmpeg's planes, upright -> one block of pinned memory -> one copy -> a kernel for each image

The planes of 4:2:0 are half of RGB of the same size, and FFmpeg's scaler has nothing to do. What is not YUV
(PNG and others) is finished on the CPU and goes along as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from spdl_media._arguments import ArrayLayout, OnError
from spdl_media._devices.cupy_device import CupyDevice
from spdl_media.buffer import CUDABuffer
from spdl_media.config import CUDAConfig, DecodeConfig, DemuxConfig
from spdl_media.convert import convert_frames
from spdl_media.cuda._color_formats import yuv_format
from spdl_media.cuda._nvjpeg_batch import Batch
from spdl_media.cuda._nvjpeg_operators import one_size
from spdl_media.cuda._owner import buffer_on_stream
from spdl_media.cuda.color import yuv_to_rgb
from spdl_media.decode import decode_packets
from spdl_media.demux import demux_image
from spdl_media.errors import StorageTooSmallError
from spdl_media.filter_desc import FilterDesc
from spdl_media.geometry import Placement, place
from spdl_media.inputs import Source
from spdl_media.operations import PictureOps
from spdl_media.storage import PinnedMemory, Storage, lease_memory
from spdl_media.transfer import to_device

# Decoders of FFmpeg whose images are YUV, most of them; others are not decoded twice to find that out.
_YUV_DECODERS = frozenset({"av1", "hevc", "jpeg2000", "libdav1d", "mjpeg", "webp"})

# Where each plane begins: what the widest loads of a kernel ask for.
_ALIGNMENT = 16

# A graph that does nothing but turn images upright.
_UPRIGHT = "null"

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Decoded:
    """An image on its way to the device.

    Attributes:
        planes: Of FFmpeg; or one, finished, ``(height, width, 3)``.
        size: Width and height.
        source: What it was read from, for messages.
        pix_fmt: Of the planes; ``None``: the image is finished.
        matrix: That the image states.
        color_range: Likewise.
    """

    planes: tuple[Array, ...]
    size: tuple[int, int]
    source: str
    pix_fmt: str | None = None
    matrix: str | None = None
    color_range: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in the block."""
        return sum(_aligned(plane.nbytes) for plane in self.planes)


class PlanesReader:
    """Reads sources and decodes them, to planes where that will do.

    Args:
        options: How images are to come out.
        demux_config: How to open sources.
        decode_config: How to decode.

    Attributes:
        size: Width and height of every result, if both are known.

    Thread safety: safe.
    """

    def __init__(
        self,
        options: PictureOps,
        demux_config: DemuxConfig | None,
        decode_config: DecodeConfig | None,
    ) -> None:
        known = options.width is not None and options.height is not None
        self.size = (options.width or 0, options.height or 0) if known else None
        self._desc = FilterDesc(replace(options, quality="accurate"))
        self._demux_config = demux_config
        self._decode_config = decode_config

    def read(self, src: Source) -> Decoded:
        """Read and decode one source.

        Raises:
            SourceError: It cannot be opened or read.
            DemuxError: It is no image.
            DecodeError: It is damaged.
        """
        packets = demux_image(src, demux_config=self._demux_config)
        if packets.codec.decoder in _YUV_DECODERS or packets.codec.name in _YUV_DECODERS:
            frames = decode_packets(packets, _UPRIGHT, self._decode_config)
            if _is_yuv(frames.pix_fmt):
                return Decoded(
                    frames.planes,
                    (frames.width, frames.height),
                    packets.source,
                    frames.pix_fmt,
                    frames.colorspace,
                    frames.color_range,
                )
        frames = decode_packets(packets, self._desc, self._decode_config)
        array = convert_frames(frames).array
        return Decoded((array,), (frames.width, frames.height), packets.source)


def _is_yuv(pix_fmt: str) -> bool:
    try:
        yuv_format(pix_fmt)
    except ValueError:
        return False
    return True


def load_planes(
    inputs: Sequence[Source],
    device: CupyDevice,
    config: CUDAConfig,
    options: PictureOps,
    demux_config: DemuxConfig | None,
    decode_config: DecodeConfig | None,
    storage: Storage,
    layout: ArrayLayout | None,
    on_error: OnError,
    stopped: Callable[[], bool],
) -> CUDABuffer:
    """Load images into one array on a device.

    Args:
        inputs: The sources.
        device: A stream of the device.
        config: The same device, and who gives its memory.
        options: How images are to come out: ``"rgb24"`` or ``"bgr24"``, by an algorithm of the kernel.
        demux_config: How to open sources.
        decode_config: How to decode.
        storage: Memory that the planes pass through, if they fit.
        layout: Of the result.
        on_error: What becomes of an image that cannot be loaded.
        stopped: Asked before each input whether nobody waits any longer.

    Returns:
        uint8 ``(B, height, width, 3)`` or ``(B, 3, height, width)``.

    Raises:
        ConvertError: None could be loaded, or they differ in size.
        TransferError: The device's memory is full, or a copy fails.
    """
    reader = PlanesReader(options, demux_config, decode_config)
    batch: Batch[Decoded] = Batch(inputs, on_error, stopped, reader.size)
    batch.read(reader.read)
    rows = batch.rows()
    places = [None if one is None else _placed(one, options) for one in rows.values()]
    size = one_size(rows, places) or reader.size
    assert size is not None  # or there would be no rows
    width, height = size
    # Dropped at the end of this function, when the kernels are on the stream behind the copy.
    pictures = [one for one in rows.values() if one is not None]
    block, parts = _uploaded(pictures, device, config, storage)
    shape = (3, height, width) if layout == "NCHW" else (height, width, 3)
    result = device.empty((len(rows), *shape), np.dtype(np.uint8), config.allocator)
    with device.active():
        if any(placed is None or placed.has_border for placed in places):
            result.array.fill(0)
        planes = iter(parts)
        for row, (one, placed) in enumerate(zip(rows.values(), places, strict=True)):
            if one is None or placed is None:
                continue
            target = result.array[row]
            target = target.transpose(1, 2, 0) if layout == "NCHW" else target
            _finish(one, next(planes), placed, target, options)
    del block
    return buffer_on_stream(result, device, failures=tuple(batch.failures), indices=batch.indices)


def _placed(one: Decoded, options: PictureOps) -> Placement:
    if one.pix_fmt is None:
        return Placement(one.size, one.size)
    return place(one.size, options.width, options.height, options.scale_mode)


def _uploaded(
    pictures: Sequence[Decoded], device: CupyDevice, config: CUDAConfig, storage: Storage
) -> tuple[CUDABuffer | None, list[list[Any]]]:
    """All planes in one block on the device, and views of them there, by image."""
    total = sum(one.nbytes for one in pictures)
    if not total:
        return None, [[] for _ in pictures]
    try:
        memory = lease_memory(total, storage)[:total]
    except StorageTooSmallError:
        # It was made for the result, and planes have the size of the files.
        memory = lease_memory(total, PinnedMemory())[:total]
    places: list[list[tuple[int, Array]]] = []
    start = 0
    for one in pictures:
        places.append([])
        for plane in one.planes:
            part = memory[start : start + plane.nbytes].view(plane.dtype).reshape(plane.shape)
            part[...] = plane
            places[-1].append((start, plane))
            start += _aligned(plane.nbytes)
    block = to_device(memory, device, config)
    with device.active():
        views = [
            [
                block.array[first : first + plane.nbytes].view(plane.dtype).reshape(plane.shape)
                for first, plane in planes
            ]
            for planes in places
        ]
    return block, views


def _finish(
    one: Decoded,
    planes: Sequence[Any],
    placement: Placement,
    target: Any,
    options: PictureOps,
) -> None:
    """Put one image into its row, ``(height, width, 3)`` in any strides, on CuPy's current stream."""
    if one.pix_fmt is None:
        target[...] = planes[0]
        return
    target = target[:, :, ::-1] if options.pix_fmt == "bgr24" else target
    width, height = placement.scaled
    converted = yuv_to_rgb(
        list(planes),
        one.pix_fmt,
        matrix=one.matrix,
        color_range=one.color_range,
        width=width,
        height=height,
        scale_algo=None if placement.scaled == one.size else options.scale_algo,  # type: ignore[arg-type]  # one of the kernel's
        out=placement.part_of(target) if placement.is_inside else None,
    )
    if not placement.is_inside:
        target[...] = placement.visible(converted.array)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
