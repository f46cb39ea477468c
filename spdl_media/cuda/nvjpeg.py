"""Images decoded and scaled on a GPU by DALI, whose decoder uses nvJPEG and the GPU's own JPEG engine.

The result is that of the CPU path: the same geometry, the image upright, cubic scaling with antialiasing.
On 64 photographs scaled to 224x224 with DALI's CPU operators, the mean difference from
:func:`~spdl_media.load_image_batch` is 0.35 to 0.51 levels of 255, as the scale mode is, and 1.95 for the
worst of them. Most of it is 4:2:0 chroma, which FFmpeg scales from its own size; small 4:2:0 images that
are enlarged differ more (63x47 to 224x224: 5.2).

What DALI does not decode, or not to the same image (GIF, AVIF, TIFF and others), is decoded and scaled on
the CPU and joins its batch on the device. So does an image that DALI fails to decode: FFmpeg may manage it,
and otherwise says what is wrong with it. One thing DALI does not tell: wrong data inside a JPEG that goes on
to its end, of which FFmpeg notices most.

One bad image fails DALI's whole batch, often without a word about which it was. Three ways to find it, in
milliseconds of CPU time for 32 photographs, decoded only:

    bad images    each alone, then the rest    halves, again and again    nvImageCodec, no DALI
    0                           18                           18                     18
    1                           56                           57                     18
    4                           54                           98                     19

Each is tried alone. nvImageCodec, DALI's own decoder, says which one it was in its first try, but its
images would have to be handed to DALI's scaler one by one in the memory of the GPU, which is worth it only
where bad images are common; and most of them never come so far, because files that are cut short and
headers that cannot be read are found before.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, Protocol, SupportsIndex, TypeAlias, cast

from spdl_media._arguments import ArrayLayout, OnError, check_array_layout, check_on_error
from spdl_media._batch import as_list
from spdl_media._checks import check_positive
from spdl_media._devices.device import is_out_of_memory
from spdl_media.buffer import Buffer
from spdl_media.config import CUDAConfig, DecodeConfig, DemuxConfig, as_decode_config
from spdl_media.cuda._nvjpeg_batch import Batch, Rows
from spdl_media.cuda._nvjpeg_inputs import Encoded, Reader
from spdl_media.cuda._nvjpeg_operators import COLORS, DALI_ERRORS, FILTERS, Operators
from spdl_media.cuda._owner import ready_buffer
from spdl_media.cuda._streams import check_stream
from spdl_media.cuda.slots import SlotDevice, slot_pool
from spdl_media.errors import ConvertError, TransferError
from spdl_media.inputs import Source
from spdl_media.operations import PictureOps, ScaleAlgo, ScaleMode

__all__ = ("decode_image_nvjpeg", "load_image_batch_nvjpeg")


class _HasDevice(Protocol):
    @property
    def device_index(self) -> int: ...


DeviceLike: TypeAlias = "SupportsIndex | _HasDevice | Literal['cpu']"
"""Number of a CUDA device, a ``CUDAConfig``, or ``"cpu"`` for the same operators without a GPU."""

_SPDL_COLORS = {"rgb": "rgb24", "bgr": "bgr24"}


def why_not_dali(pix_fmt: str | None, scale_algo: str) -> str | None:
    """Say why DALI cannot make such images; ``None``: it can."""
    if pix_fmt not in COLORS:
        return f"DALI makes pix_fmt {_listed(COLORS)}, not {pix_fmt!r}"
    if scale_algo not in FILTERS:
        return f"DALI scales with scale_algo {_listed(FILTERS)} as FFmpeg does, not with {scale_algo!r}"
    return None


def _listed(names: Iterable[str]) -> str:
    return " or ".join(repr(name) for name in names)


def decode_image_batch(
    srcs: Iterable[Source],
    *,
    cuda: DeviceLike | None = None,
    cuda_config: DeviceLike | None = None,
    width: int | None = None,
    height: int | None = None,
    pix_fmt: str = "rgb24",
    scale_mode: ScaleMode | None = "pad",
    scale_algo: ScaleAlgo = "bicubic",
    demux_config: DemuxConfig | None = None,
    decode_config: DecodeConfig | None = None,
    layout: ArrayLayout | None = None,
    on_error: OnError = "raise",
    hw_decoder_load: float | None = None,
    stopped: Callable[[], bool] = lambda: False,
    is_single: bool = False,
    name: str | None = None,
) -> Buffer:
    """Decode and scale images on a device, into one array.

    Args:
        srcs: The images, each as for :func:`~spdl_media.load_image`.
        cuda: Number of the device, a ``CUDAConfig``, or ``"cpu"``: the same operators without a GPU. The work
            is done on a stream of DALI's own.
        cuda_config: The same by another name; one of the two is needed.
        width: Width of the result. Without ``height`` the aspect ratio is kept; without both, the size, which
            must then be the same for all.
        height: Height of the result.
        pix_fmt: ``"rgb24"``, ``"bgr24"`` or ``"gray"``.
        scale_mode: As in :func:`~spdl_media.load_image`.
        scale_algo: ``"bicubic"`` or ``"bilinear"``, both with antialiasing.
        demux_config: How to open the sources.
        decode_config: How to decode. With a decoder or options of FFmpeg in it, the CPU decodes.
        layout: ``"NHWC"``, the default, or ``"NCHW"``.
        on_error: What becomes of an image that cannot be opened, read or decoded: ``"raise"`` the error,
            which then names the input and its position; ``"skip"`` it; or ``"fill"`` its row with zeros.
        hw_decoder_load: Share of the JPEGs that goes to the GPU's JPEG engine, where it has one: 0 to 1. The
            default is DALI's.
        stopped: Asked before each input whether nobody waits any longer.
        is_single: The result is the only image, and not an array of one.
        name: What to call that image in messages.

    Returns:
        uint8, 0 to 255, ``(B, height, width, channels)`` or ``(B, channels, height, width)``, in memory that
        DALI owns. It is complete when this returns, so it may be read from any stream.

    Raises:
        SourceError: An input cannot be opened or read, with ``on_error="raise"``.
        DemuxError: An input is no image, likewise.
        DecodeError: An input is damaged, likewise.
        ConvertError: There are no inputs, none could be loaded, or they differ in size.
        MissingDependencyError: DALI is not installed, or is too old.
        TransferError: The batch does not fit into the memory of the device; there is no GPU; or this process
            was forked after CUDA had been used.
        RuntimeError: DALI fails in another way.
        ValueError: An option is invalid, or there is no such device.
        TypeError: An input that is no source, or no device.

    Thread safety: safe.
    """
    array, stream, batch = _decode(
        srcs,
        _checked_device(cuda, cuda_config),
        PictureOps(width, height, pix_fmt, scale_mode, scale_algo),
        demux_config,
        decode_config,
        layout or "NHWC",
        on_error,
        hw_decoder_load,
        stopped,
        is_single=is_single,
        name=name,
    )
    indices = None if is_single else batch.indices
    return ready_buffer(array, stream, failures=tuple(batch.failures), indices=indices)


def decode_image_nvjpeg(
    src: Source | Sequence[Source],
    *,
    cuda: DeviceLike | None = None,
    cuda_config: DeviceLike | None = None,
    scale_width: int | None = None,
    scale_height: int | None = None,
    pix_fmt: str = "rgb",
    layout: ArrayLayout = "NCHW",
    hw_decoder_load: float | None = None,
) -> Buffer:
    """Decode an image on a device, or a list of images into one array.

    Args:
        src: As for :func:`~spdl_media.load_image`, or a list or tuple of such.
        cuda: As in :func:`decode_image_batch`.
        cuda_config: As in :func:`decode_image_batch`.
        scale_width: Width to scale to. Without ``scale_height`` the aspect ratio is kept; with it, the
            image is stretched.
        scale_height: Height to scale to.
        pix_fmt: ``"rgb"`` or ``"bgr"``.
        layout: ``"NCHW"`` or ``"NHWC"``.
        hw_decoder_load: As in :func:`decode_image_batch`.

    Returns:
        uint8, 0 to 255, ``(3, height, width)``; of a list, ``(B, 3, height, width)``. DALI owns the memory.
        It is complete when this returns.

    Raises:
        Exception: As :func:`decode_image_batch`.

    Thread safety: safe.
    """
    is_list = isinstance(src, list | tuple)
    for name, side in (("scale_width", scale_width), ("scale_height", scale_height)):
        if side is not None:
            check_positive(name, side)
    options = PictureOps(scale_width, scale_height, _spdl_color(pix_fmt), scale_mode=None)
    array, stream, _ = _decode(
        cast("Sequence[Source]", src) if is_list else [cast("Source", src)],
        _checked_device(cuda, cuda_config),
        options,
        layout=layout,
        hw_decoder_load=hw_decoder_load,
        is_single=not is_list,
    )
    return ready_buffer(array, stream)


def load_image_batch_nvjpeg(
    srcs: Iterable[Source],
    *,
    cuda: DeviceLike | None = None,
    cuda_config: DeviceLike | None = None,
    width: int,
    height: int,
    pix_fmt: str = "rgb",
    layout: ArrayLayout = "NCHW",
    on_error: OnError = "raise",
    hw_decoder_load: float | None = None,
) -> Buffer:
    """Load images into one array on a device, each stretched to the size asked for.

    Args:
        srcs: The images, each as for :func:`~spdl_media.load_image`.
        cuda: As in :func:`decode_image_batch`, as are the arguments that are not listed here.
        cuda_config: See ``cuda``.
        width: Width of the result.
        height: Height of the result.
        pix_fmt: ``"rgb"`` or ``"bgr"``.
        layout: ``"NCHW"`` or ``"NHWC"``.
        on_error: See ``cuda``.
        hw_decoder_load: See ``cuda``.

    Returns:
        uint8, 0 to 255, ``(B, 3, height, width)``. DALI owns the memory. It is complete when this returns.

    Raises:
        Exception: As :func:`decode_image_batch`.

    Thread safety: safe.
    """
    return decode_image_batch(
        srcs,
        cuda=cuda,
        cuda_config=cuda_config,
        width=width,
        height=height,
        pix_fmt=_spdl_color(pix_fmt),
        scale_mode=None,
        layout=layout,
        on_error=on_error,
        hw_decoder_load=hw_decoder_load,
    )


def _decode(
    srcs: Iterable[Source],
    device: SlotDevice,
    options: PictureOps,
    demux_config: DemuxConfig | None = None,
    decode_config: DecodeConfig | None = None,
    layout: ArrayLayout = "NHWC",
    on_error: OnError = "raise",
    hw_decoder_load: float | None = None,
    stopped: Callable[[], bool] = lambda: False,
    *,
    is_single: bool = False,
    name: str | None = None,
) -> tuple[Any, int | None, Batch[Encoded]]:
    """The array of a batch, or of its only image, and the stream that it was made on."""
    check_on_error(on_error)
    check_array_layout(layout)
    _check_operators(options, hw_decoder_load)
    config = as_decode_config(decode_config)
    inputs = as_list(srcs, one="decode_image_nvjpeg")
    if not inputs:
        raise ConvertError("there are no inputs to load: the sequence is empty")
    pool = slot_pool(device)
    reader = Reader(options, demux_config, config, name)
    operators = Operators(
        options, layout, hw_decoder_load, orient=config.orient, is_single=is_single
    )
    batch: Batch[Encoded] = Batch(inputs, on_error, stopped, reader.size, is_single=is_single)
    batch.read(reader.read)
    # Once more, if FFmpeg or on_error can mend what DALI does not decode.
    for _ in range(2):
        rows = batch.rows()
        with pool.borrow() as slot:
            try:
                return operators.run(slot, rows), slot.stream, batch
            except DALI_ERRORS as error:
                # DALI seldom says which image it was, so each is tried alone.
                failed, bad = error, operators.fail_alone(slot, rows)
        # Each can be decoded alone, so it is the batch that is too much.
        if not bad:
            break
        batch.decode_again(bad, reader.decoded_again)
    raise _not_together(failed, rows, device) from failed


def _not_together(failed: Exception, rows: Rows[Encoded], device: SlotDevice) -> Exception:
    """The error for a batch that fails although each of its images can be decoded alone."""
    files = [one for one in rows.values() if one is not None]
    size = sum(file.nbytes for file in files) / 1e6
    is_memory = is_out_of_memory(failed)
    what = "do not fit into the memory of" if is_memory else "cannot be decoded together on"
    text = (
        f"the {len(files)} pictures of this batch, {size:.1f} MB when decoded, {what} {device}: DALI says "
        f"{str(failed).strip() or type(failed).__name__!r}. Load fewer at a time, in smaller batches or "
        "fewer threads"
    )
    return TransferError(text) if is_memory else RuntimeError(text)


def _check_operators(options: PictureOps, hw_decoder_load: float | None) -> None:
    if refusal := why_not_dali(options.pix_fmt, options.scale_algo):
        raise ValueError(f"{refusal}. The CPU makes every other: decoder='cpu'")
    if hw_decoder_load is not None and not 0 <= hw_decoder_load <= 1:
        raise ValueError(
            f"hw_decoder_load must be a share from 0 to 1, or None for DALI's own, not {hw_decoder_load!r}"
        )


def _checked_device(cuda: DeviceLike | None, cuda_config: DeviceLike | None) -> SlotDevice:
    """The device that one of two arguments names; its stream is not used, and must be of it all the same."""
    device = _slot_device(cuda, cuda_config)
    config = cuda_config if cuda is None else cuda
    if isinstance(config, CUDAConfig):
        check_stream(config, "decoding with DALI")
    return device


def _slot_device(cuda: DeviceLike | None, cuda_config: DeviceLike | None) -> SlotDevice:
    """The device that one of two arguments names."""
    if (cuda is None) == (cuda_config is None):
        given = "neither" if cuda is None else f"cuda={cuda!r} and cuda_config={cuda_config!r}"
        raise ValueError(f"give one of cuda= and cuda_config=, such as cuda=0, not {given}")
    device: Any = cuda_config if cuda is None else cuda
    if isinstance(device, str) and device == "cpu":
        return SlotDevice("cpu")
    index = getattr(device, "device_index", device)
    if isinstance(index, bool) or not isinstance(index, SupportsIndex):
        raise TypeError(
            f"cuda must be the number of a device, such as 0, a CUDAConfig or 'cpu', not {device!r}"
        )
    return SlotDevice("gpu", operator.index(index))


def _spdl_color(pix_fmt: str) -> str:
    if pix_fmt not in _SPDL_COLORS:
        raise ValueError(f"pix_fmt must be {_listed(_SPDL_COLORS)}, not {pix_fmt!r}")
    return _SPDL_COLORS[pix_fmt]
