"""What DALI makes of a batch of images: cut, scaled, placed, mirrored and normalised, in one array."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from spdl_media._arguments import ArrayLayout
from spdl_media._driver import one_name
from spdl_media._handover import free_after, kept_stream
from spdl_media.buffer import CPUBuffer, CUDABuffer
from spdl_media.cuda.slots import DaliBatch, Settings, Slot, dali_types
from spdl_media.geometry import Box, Placement
from spdl_media.values import Values

# Memory that each decoder and thread has beyond its largest image. DALI's own 16 MiB is for the largest
# of photographs.
_PADDING = 1 << 20

COLORS = {"rgb24": "RGB", "bgr24": "BGR", "gray": "GRAY"}
"""Pixel formats, and what DALI calls them."""

FILTERS = {"bicubic": "INTERP_CUBIC", "bilinear": "INTERP_LINEAR"}
"""Scaling algorithms, and what DALI calls them."""


@dataclass(frozen=True, slots=True)
class Image:
    """What an image goes through after it is decoded.

    Attributes:
        box: What is cut out of the upright image; ``None``: nothing is cut off.
        mirror: Whether left and right are exchanged.
        placement: How what was cut out is scaled and placed.
        is_blank: The row is of zeros.
    """

    box: Box | None
    mirror: bool
    placement: Placement
    is_blank: bool = False


class ImageOperators:
    """The operators that a batch goes through: decode, cut, scale, place, mirror, normalise, transpose.

    Args:
        pix_fmt: ``"rgb24"``, ``"bgr24"`` or ``"gray"``.
        scale_algo: ``"bicubic"`` or ``"bilinear"``.
        layout: Of the result.
        values: The numbers that pixels become; ``None``: they stay as they are.
        orient: Whether images are turned upright.
        hw_decoder_load: Share of the GPU's JPEG engine; ``None``: DALI's own.
    """

    def __init__(
        self,
        pix_fmt: str,
        scale_algo: str,
        layout: ArrayLayout,
        values: Values | None,
        *,
        orient: bool,
        hw_decoder_load: float | None = None,
    ) -> None:
        types = dali_types()
        self._values = values if values is not None and values.is_float else None
        self._layout = "CHW" if layout == "NCHW" else "HWC"
        load = {} if hw_decoder_load is None else {"hw_decoder_load": float(hw_decoder_load)}
        self._decoder: Settings = {
            "output_type": getattr(types, COLORS[pix_fmt]),
            "adjust_orientation": orient,
            # Threads belong to whoever runs many slots, not to a core.
            "affine": False,
            # As the CPU decoder does, or edges between colours would differ.
            "jpeg_fancy_upsampling": True,
            "device_memory_padding": _PADDING,
            "host_memory_padding": _PADDING,
            **load,
        }
        interpolation = getattr(types, FILTERS[scale_algo])
        self._scaler: Settings = {"interp_type": interpolation, "antialias": True}
        dtype = "UINT8" if self._values is None else self._values.dtype.upper().replace("32", "")
        self._finish: Settings = {"dtype": getattr(types, dtype), "output_layout": self._layout}

    def decode(self, slot: Slot, files: Sequence[npt.NDArray[np.uint8]]) -> DaliBatch:
        """Decode files; see :meth:`Slot.run` for the errors."""
        return slot.run("decoders.Image", files, self._decoder)

    def finish(self, slot: Slot, pictures: DaliBatch, images: Sequence[Image]) -> DaliBatch:
        """Make images of one size and type of decoded ones."""
        boxes = [
            one.box or (0, 0, *_size(shape))
            for one, shape in zip(images, pictures.shape, strict=True)
        ]
        if any(one.box for one in images):
            pictures = _window(slot, pictures, boxes)
        scaled = [one.placement.scaled for one in images]
        if scaled != [box[2:] for box in boxes]:
            size = [np.array([height, width], np.float32) for width, height in scaled]
            pictures = slot.run("Resize", pictures, self._scaler, {"size": size})
        if any(one.placement.scaled != one.placement.canvas for one in images):
            pictures = _window(slot, pictures, [_shown(one) for one in images])
        if self._values is None and not any(one.mirror for one in images):
            if self._layout == "CHW":
                pictures = slot.run("Transpose", pictures, {"perm": (2, 0, 1)})
            return pictures
        return slot.run("CropMirrorNormalize", pictures, self._finish, self._numbers(images))

    def _numbers(self, images: Sequence[Image]) -> dict[str, Sequence[Any]]:
        """What to mirror, and the mean and deviation of each image in levels of 255."""
        arguments: dict[str, Sequence[Any]] = {
            "mirror": [np.array(one.mirror, np.int32) for one in images]
        }
        if (values := self._values) is not None:
            mean, std = (
                np.float32(255) * np.array(one, np.float32) for one in (values.mean, values.std)
            )
            # Zeros stay zeros.
            arguments["mean"] = [mean * (not one.is_blank) for one in images]
            arguments["std"] = [std] * len(images)
        return arguments


def _size(shape: Sequence[int]) -> tuple[int, int]:
    return int(shape[1]), int(shape[0])


def _shown(one: Image) -> Box:
    """The canvas in the scaled image; where it begins outside, there is a border."""
    placement = one.placement
    (width, height), left = placement.canvas, placement.left
    if one.mirror:  # which comes afterwards
        left = width - placement.scaled[0] - left
    return -left, -placement.top, width, height


def _window(slot: Slot, pictures: DaliBatch, boxes: Sequence[Box]) -> DaliBatch:
    settings = {"axes": (0, 1), "out_of_bounds_policy": "pad", "fill_values": (0.0,)}
    window = {
        "start": [np.array([y, x], np.int32) for x, y, _, _ in boxes],
        "shape": [np.array([height, width], np.int32) for _, _, width, height in boxes],
    }
    return slot.run("Slice", pictures, settings, window)


class DaliArray:
    """A finished array of DALI's, whose memory goes back only after the streams that read it.

    DALI gives memory to whoever asks next in the order of the stream that it was made on, and knows of no
    other. So that stream waits for theirs before the memory goes, without PyTorch or CuPy, which need not be
    there.

    Args:
        tensor: Of DALI.
        stream: The stream that it was made on.

    Thread safety: safe.
    """

    __slots__ = ("__weakref__", "_readers", "_tensor")

    stream = None
    """Nobody needs to wait: the array is complete."""

    def __init__(self, tensor: Any, stream: int) -> None:
        self._tensor = tensor
        self._readers: dict[int, object] = {}
        _, index = self.__dlpack_device__()
        # Runs before the reference to the tensor goes. At exit nobody waits, and the driver may be gone.
        weakref.finalize(self, _after_readers, index, stream, self._readers).atexit = False

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        interface: dict[str, Any] = self._tensor.__cuda_array_interface__
        return interface

    def __dlpack__(self, **options: Any) -> Any:
        return self._tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, index = self._tensor.__dlpack_device__()
        return int(kind), int(index)

    def hand_to(self, stream: int) -> None:
        """Keep the memory for work on this stream."""
        self._readers[one_name(stream)] = kept_stream(stream)

    keep_for = hand_to

    def synchronize(self) -> None:
        """Nothing: the array is complete."""


def _after_readers(index: int, stream: int, readers: dict[int, object]) -> None:
    if set(readers) - {stream}:
        free_after(index, stream, readers, readers.clear)


def ready_buffer(tensor: Any, stream: int | None = None, **metadata: Any) -> CPUBuffer | CUDABuffer:
    """The buffer over an array that is ready, of DALI or of a stand-in in host memory.

    Args:
        tensor: The array.
        stream: The stream that it was made on; ``None``: in host memory.
        metadata: Of the buffer.
    """
    if stream is None or not hasattr(tensor, "__cuda_array_interface__"):
        return CPUBuffer(np.asarray(tensor), **metadata)
    array = DaliArray(tensor, stream)
    interface = array.__cuda_array_interface__
    shape, index = tuple(interface["shape"]), array.__dlpack_device__()[1]
    return CUDABuffer(array, shape, interface["typestr"], index, ready=array, **metadata)
