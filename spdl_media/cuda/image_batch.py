"""A batch of images through DALI: files that it decodes as the CPU does, and those that the CPU does.

The result is that of the CPU: the same boxes and placement, the image upright, cubic scaling with
antialiasing. On 64 photographs scaled to 224x224 with DALI's CPU operators, the mean difference from
:func:`~spdl_media.load_image_batch` is 0.35 to 0.51 levels of 255, as the scale mode is, and 1.95 for the
worst of them. Most of it is 4:2:0 chroma, which FFmpeg scales from its own size; small 4:2:0 images that
are enlarged differ more (63x47 to 224x224: 5.2).

What DALI does not decode, or not to the same image (GIF, AVIF, TIFF and others), is finished on the CPU
and joins its batch as PNM, which DALI unpacks without changing it. So does an image that DALI fails to
decode: FFmpeg may manage it, and otherwise says what is wrong with it. One thing DALI does not tell:
wrong data inside a JPEG that goes on to its end, of which FFmpeg notices most.

One bad image fails DALI's whole batch, often without a word about which it was, so each is then tried
alone: with one bad image among 32 that takes 3 times the CPU time, as halving the batch does, which takes
more with four. nvImageCodec alone would say which it was, but most bad files are found before they come
so far.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from spdl_media._batch import ImageRequest, cut_packets, none_loaded
from spdl_media._decode_each import decode_each
from spdl_media._optional import require
from spdl_media.buffer import Buffer, Failure
from spdl_media.config import as_decode_config
from spdl_media.convert import convert_frames
from spdl_media.cuda.dali import Image, ImageOperators, ready_buffer
from spdl_media.cuda.slots import DALI_ERRORS, Slot, SlotDevice, slot_pool
from spdl_media.demux import demux_image
from spdl_media.devices import is_out_of_memory
from spdl_media.errors import ConvertError, TransferError
from spdl_media.filter_desc import FilterDesc
from spdl_media.geometry import Box, Placement, place, swaps_sides
from spdl_media.inputs import Source
from spdl_media.operations import PictureOps
from spdl_media.packets import ImagePackets, av_packets, metadata_of
from spdl_media.stills import HEAD_SIZE, still_codec

# Decoders of FFmpeg whose images DALI gives too, within 1 level of 255 on average at their own size, in
# every variant tried. Not TIFF: gray with alpha, and JPEG or YCbCr inside, come out 7 to 99 levels off.
_DALI_DECODERS = frozenset({"bmp", "jpeg2000", "mjpeg", "png", "webp"})

# Where FFmpeg refuses an image as too large (av_image_check_size), DALI may try to find memory for it.
_FFMPEG_LIMIT, _FFMPEG_MARGIN = (2**31 - 1) // 8, 128

_MAX_LISTED = 5


@dataclass(frozen=True, slots=True)
class _File:
    """An image as DALI gets it.

    Attributes:
        data: The bytes of the file.
        source: What it was read from, for messages.
        nbytes: Bytes of the decoded image.
        packets: What it was read from the source as; ``None``: the image was finished here.
        box: What is cut out of the upright image; ``None``: nothing is cut off.
        mirror: Whether left and right are exchanged.
    """

    data: npt.NDArray[np.uint8] = field(repr=False)
    source: str
    nbytes: int
    packets: ImagePackets | None = None
    box: Box | None = None
    mirror: bool = False


def _pixels(array: npt.NDArray[np.uint8], source: str) -> _File:
    """Finished pixels, ``(height, width, 3)`` or ``(height, width, 1)``, as a file for DALI, a copy."""
    height, width, channels = array.shape
    head = f"P{5 if channels == 1 else 6}\n{width} {height}\n255\n".encode()
    data = np.concatenate([np.frombuffer(head, np.uint8), array.reshape(-1)])
    return _File(data, source, array.nbytes)


_Rows: TypeAlias = "dict[int, _File | None]"
"""What each row is made of, by position among the inputs; ``None``: of zeros."""


class _Batch:
    """The inputs of a batch: read for DALI, finished on the CPU where DALI will not do, or failed."""

    def __init__(
        self, inputs: Sequence[Source], request: ImageRequest, stopped: Callable[[], bool]
    ) -> None:
        self._inputs, self._request, self._stopped = inputs, request, stopped
        self._headers: Any = require("nvimgcodec", "decoding pictures with DALI")
        self._config = as_decode_config(request.decode_config)
        # DALI puts the channels of PNM in the order asked for.
        pix_fmt = "gray" if request.ops.pix_fmt == "gray" else "rgb24"
        ops = replace(request.ops, pix_fmt=pix_fmt, quality="accurate")
        self._on_cpu = replace(request, desc=FilterDesc(ops))
        self._files: dict[int, _File] = {}
        self.failures: list[Failure] = []

    def add(self, position: int, decoded: _File | None, /) -> None:
        """Take what the input at a position was read as; ``None``: it was read before, or has failed."""
        if decoded is not None:
            self._files[position] = decoded

    def read(self) -> None:
        """Read all inputs.

        Raises:
            MediaError: One fails, and is to be raised. The message names it and its position.
        """
        self._take(self._inputs, self._read)

    def finish_on_cpu(self, bad: Sequence[int]) -> None:
        """Replace the images at these positions, or let them fail.

        Raises:
            MediaError: As :meth:`read`.
        """
        files = [self._files.get(at) for at in range(len(self._inputs))]
        for position in bad:
            del self._files[position]
        self._take(
            range(len(files)), lambda at, _: self._finished(files[at], at) if at in bad else None
        )

    def _take(self, inputs: Sequence[Any], read: Callable[[Any, int], _File | None]) -> None:
        if self._request.is_single:
            self.add(0, read(inputs[0], 0))
            return
        decode_each(inputs, read, self, on_error=self._request.on_error, stopped=self._stopped)
        self.failures.sort(key=lambda failure: failure.index)

    def _read(self, src: Source, position: int) -> _File:
        request = self._request
        packets = demux_image(src, demux_config=request.demux_config, name=request.name)
        return self._for_dali(packets, position) or self._decoded(packets, position)

    def _for_dali(self, packets: ImagePackets, position: int) -> _File | None:
        """The file as it is, if DALI decodes it to the same image."""
        facts, config, decoder = metadata_of(packets), self._config, packets.codec.decoder
        content = memoryview(av_packets(packets)[0])
        if (
            decoder not in _DALI_DECODERS
            or config.decoder is not None
            or config.decoder_options
            or facts.incomplete is not None
            or (facts.orientation != 1 and not _is_turned_by_dali(decoder, content))
            or still_codec(content[:HEAD_SIZE]) != decoder  # a frame of a film or an animation
        ):
            return None
        data = np.frombuffer(content, np.uint8)
        if (size := self._size(data)) is None:
            return None
        file = _File(data, facts.source, size[0] * size[1] * 3, packets)
        if self._request.cuts.is_empty:
            return file
        size = size[::-1] if config.orient and swaps_sides(facts.orientation) else size
        ops = self._request.cuts.filter(position, size, self._on_cpu.desc, facts.source)
        return replace(file, box=ops.box, mirror=ops.mirror)

    def _size(self, data: npt.NDArray[np.uint8]) -> tuple[int, int] | None:
        """Width and height in the file's header, as DALI reads it; ``None`` where it cannot.

        Not left to the decoder: one file whose header it cannot read, in a batch of 32, crashes the process
        (DALI 2.4, nvImageCodec 0.9: 9 of 9 runs). Reading a header takes 2 microseconds.
        """
        try:
            header = self._headers.CodeStream(data)
            width, height = int(header.width), int(header.height)
        except RuntimeError:
            return None
        too_large = (width + _FFMPEG_MARGIN) * (height + _FFMPEG_MARGIN) >= _FFMPEG_LIMIT
        return None if too_large else (width, height)

    def _decoded(self, packets: ImagePackets, position: int) -> _File:
        image = cut_packets(packets, position, self._on_cpu)
        return _pixels(convert_frames(image).array, packets.source)

    def _finished(self, file: _File | None, position: int) -> _File | None:
        packets = None if file is None else file.packets
        return file if packets is None else self._decoded(packets, position)

    @property
    def indices(self) -> tuple[int, ...]:
        """Positions among the inputs of the rows."""
        fill = self._request.on_error == "fill"
        return tuple(range(len(self._inputs)) if fill else sorted(self._files))

    def rows(self) -> _Rows:
        """What the rows are made of.

        Raises:
            ConvertError: No input could be loaded, and no size is known for zeros.
        """
        ops, fill = self._request.ops, self._request.on_error == "fill"
        if not self._files and not (fill and ops.width and ops.height):
            raise none_loaded(self.failures, len(self._inputs), fill=fill)
        return {position: self._files.get(position) for position in self.indices}

    def buffer(self, array: Any, stream: int | None) -> Buffer:
        """The buffer over the result, with what is known of its rows."""
        boxes, flips = self._request.cuts.drawn(self.indices, self._files)
        indices = None if self._request.is_single else self.indices
        failures = tuple(self.failures)
        return ready_buffer(
            array, stream, failures=failures, indices=indices, boxes=boxes, flips=flips
        )


def _is_turned_by_dali(decoder: str, content: memoryview) -> bool:
    """Whether DALI reads as we do how an image stands: from the Exif of a JPEG alone, and not from XMP."""
    return decoder == "mjpeg" and b"tiff:Orientation" not in bytes(content[:HEAD_SIZE])


def load_by_dali(
    srcs: Sequence[Source],
    request: ImageRequest,
    device: SlotDevice,
    stopped: Callable[[], bool] = lambda: False,
    hw_decoder_load: float | None = None,
) -> Buffer:
    """Load images through DALI's operators.

    Raises:
        MediaError: As for :func:`~spdl_media.load_image_batch`.
        MissingDependencyError: DALI is not installed, or is too old.
        TransferError: The batch does not fit into the memory of the device; there is no GPU; or this process
            was forked after CUDA had been used.
        RuntimeError: DALI fails in another way.
    """
    pool, batch = slot_pool(device), _Batch(srcs, request, stopped)
    operators = ImageOperators(
        request.ops.pix_fmt or "",
        request.ops.scale_algo,
        request.layout or "NHWC",
        request.values,
        orient=as_decode_config(request.decode_config).orient,
        hw_decoder_load=hw_decoder_load,
    )
    batch.read()
    # Once more, if FFmpeg or on_error can mend what DALI does not decode.
    for _ in range(2):
        rows = batch.rows()
        with pool.borrow() as slot:
            try:
                return batch.buffer(_made(slot, operators, rows, request), slot.stream)
            except DALI_ERRORS as error:
                # DALI seldom says which image it was, so each is tried alone.
                failed, bad = error, _fail_alone(slot, operators, rows)
        # Each can be decoded alone, so it is the batch that is too much.
        if not bad:
            break
        batch.finish_on_cpu(bad)
    raise _not_together(failed, rows, device) from failed


def _made(slot: Slot, operators: ImageOperators, rows: _Rows, request: ImageRequest) -> Any:
    """The array of a batch, or of its only image."""
    ops = request.ops
    black = _pixels(np.zeros((1, 1, 1 if ops.pix_fmt == "gray" else 3), np.uint8), "fill")
    pictures = operators.decode(slot, [(one or black).data for one in rows.values()])
    places = [
        _placement(one, (int(shape[1]), int(shape[0])), ops)
        for one, shape in zip(rows.values(), pictures.shape, strict=True)
    ]
    out = _one_size(rows, places) or (ops.width or 1, ops.height or 1)
    # One black pixel fills any row that it is scaled to.
    blank = Image(None, mirror=False, placement=Placement(out, out), is_blank=True)
    images = [
        blank if one is None or placed is None else Image(one.box, one.mirror, placed)
        for one, placed in zip(rows.values(), places, strict=True)
    ]
    finished = operators.finish(slot, pictures, images)
    return slot.first(finished) if request.is_single else slot.as_array(finished)


def _placement(one: _File | None, size: tuple[int, int], ops: PictureOps) -> Placement | None:
    if one is None:
        return None
    if one.packets is None:
        return Placement(size, size)
    return place(one.box[2:] if one.box else size, ops.width, ops.height, ops.scale_mode)


def _one_size(
    rows: Mapping[int, Any], places: Sequence[Placement | None]
) -> tuple[int, int] | None:
    """The size of all rows that are images; ``None`` if there are none.

    Raises:
        ConvertError: They differ.
    """
    first: dict[tuple[int, int], str] = {}
    for (position, one), placed in zip(rows.items(), places, strict=True):
        if placed is not None:
            size = placed.canvas
            first.setdefault(size, f"{size[0]}x{size[1]} (input {position}, {one.source})")
    if len(first) > 1:
        more = f" and {len(first) - _MAX_LISTED} more" if len(first) > _MAX_LISTED else ""
        raise ConvertError(
            f"the images differ: {', '.join(list(first.values())[:_MAX_LISTED])}{more}. One array holds "
            "one size: give width= and height="
        )
    return next(iter(first), None)


def _fail_alone(slot: Slot, operators: ImageOperators, rows: _Rows) -> list[int]:
    """Positions of the images that DALI does not decode one at a time either."""
    bad = []
    for position, one in rows.items():
        if one is not None and one.packets is not None:
            try:
                operators.decode(slot, [one.data])
            except DALI_ERRORS:
                bad.append(position)
    return bad


def _not_together(failed: Exception, rows: _Rows, device: SlotDevice) -> Exception:
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
