"""Decode one image with FFmpeg or Pillow."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple, TypeAlias

import av
import numpy as np
import numpy.typing as npt

from spdl_media._ffmpeg import LogState, keep_freed_memory
from spdl_media._optional import require
from spdl_media._picture_decoder import PicturePath
from spdl_media.codec import VideoCodec, make_decoder
from spdl_media.config import DEFAULT_DECODE_CONFIG, DecodeConfig
from spdl_media.demux import is_unsupported
from spdl_media.errors import DecodeError, FilterError
from spdl_media.fast_images import FULL_RANGE, GBR, FastChain, fast_chain, without_graph
from spdl_media.filters import PictureFilter
from spdl_media.formats import has_limited_gray
from spdl_media.frames import FrameList
from spdl_media.geometry import Box, Placement, Size, fits, stored_box, stored_flips, swaps_sides
from spdl_media.image_frames import ImageFrames
from spdl_media.operations import Desc, PictureOps, picture_ops
from spdl_media.packets import (
    FrameMetadata,
    ImagePackets,
    PacketMetadata,
    av_packets,
    check_complete,
    coded_image,
    metadata_of,
    padded_image,
)
from spdl_media.pillow_frames import PILLOW, read_with_pillow


class DecodedImage(NamedTuple):
    """A decoded frame with the metadata that FFmpeg's frame does not carry.

    Attributes:
        frame: The image; the holder of this object owns it.
        orientation: EXIF orientation, 1 once the image is upright.
        is_corrupt: Whether the data is damaged or truncated.
    """

    frame: av.VideoFrame
    orientation: int
    is_corrupt: bool = False

    def of(self, packets: ImagePackets) -> ImageFrames:
        """Return the public object of the image, with the metadata of its packets."""
        base = metadata_of(packets)
        metadata = FrameMetadata.of(base, orientation=self.orientation, is_corrupt=self.is_corrupt)
        if not self.frame.time_base:
            self.frame.time_base = packets.time_base
        return ImageFrames((self.frame,), metadata)


Filter: TypeAlias = Desc | Callable[[Size], Desc]
"""The filters of an image, or a function that returns them for the size of the image as it is filtered."""


def decode_image(packets: ImagePackets, filter: Filter, config: DecodeConfig) -> DecodedImage:
    """Decode an image, turn it upright, and filter it.

    Args:
        packets: The image.
        filter: The filters as text or operations; ``None`` returns the image as decoded.
        config: How to decode.

    Raises:
        DecodeError: The data is damaged, or no decoder takes it.
        FilterError: The filters do not take the image; PictureSizeError: they do not take its size.
        MissingDependencyError: Pillow or simplejpeg is needed, and not installed.
        ValueError: A decoder or option of ``config`` does not exist.
    """
    # Otherwise glibc would return the memory of each small image to the system and request it again.
    keep_freed_memory()
    try:
        if config.downscale is not None:
            small = _decode_downscaled(packets, filter, config)
            if small is not None:
                return DecodedImage(small, 1 if config.orient else metadata_of(packets).orientation)
        image = _decode_whole(packets, config)
        size = image.frame.width, image.frame.height
        desc = _filter_of(size, image.orientation, filter, config)
        return image if desc is None else _filtered(image, packets, desc, config)
    except FilterError as error:
        error.source = error.source or packets.source
        raise


def _filter_of(stored: Size, orientation: int, filter: Filter, config: DecodeConfig) -> Desc:
    if not callable(filter):
        return filter
    return filter(stored[::-1] if config.orient and swaps_sides(orientation) else stored)


def _decode_whole(packets: ImagePackets, config: DecodeConfig) -> DecodedImage:
    """Decode an image at full size, in stored orientation."""
    metadata = metadata_of(packets)
    # Most JPEGs need no new decoder: an open one gives the same image.
    if (frame := _decode_plain_jpeg(packets, metadata, config)) is not None:
        return DecodedImage(frame, metadata.orientation)
    # A decoder chosen by the caller takes precedence over the one that suits the file.
    if config.decoder == PILLOW or (metadata.pillow is not None and config.decoder is None):
        return DecodedImage(*next(read_with_pillow(packets)))
    try:
        return _decode_by_ffmpeg(packets, config)
    except DecodeError as error:
        if config.decoder is not None or not is_unsupported(error):
            raise
        reason = f"{packets.codec.name} data that FFmpeg does not know"
        with suppress(DecodeError):
            return DecodedImage(*next(read_with_pillow(packets.with_metadata(pillow=reason))))
        raise


def _decode_by_ffmpeg(packets: ImagePackets, config: DecodeConfig) -> DecodedImage:
    # Decode with "raise": with other policies, an image without a frame would lose its error.
    strict = config if config.on_corrupt == "raise" else replace(config, on_corrupt="raise")
    if config.on_corrupt != "keep":
        check_complete(packets, strict)
        return _picture(packets, strict)
    try:
        image = _picture(packets, strict)
    except DecodeError as error:
        try:
            # Without error detection, FFmpeg returns what it could decode.
            options = {"err_detect": "0", **config.decoder_options}
            image = _picture(packets, replace(config, decoder_options=options))
        except DecodeError:  # nothing could be decoded
            raise error from error.__cause__
        return image._replace(is_corrupt=True)
    return image._replace(is_corrupt=metadata_of(packets).incomplete is not None)


def _filtered(
    image: DecodedImage, packets: ImagePackets, filter_desc: str | PictureOps, config: DecodeConfig
) -> DecodedImage:
    """Turn a decoded image upright, and filter it.

    Raises:
        FilterError: The filters do not take the image.
        DecodeError: The filters output no frame.
    """
    frame, orientation, is_corrupt = image
    ops = picture_ops(filter_desc)
    is_turned = config.orient and orientation != 1
    # Images of video codecs, as in HEIC, have a frame rate. Only a graph reads their chroma location.
    needs_graph = is_turned or packets.codec.frame_rate is not None or has_limited_gray(frame)
    if ops is not None and not needs_graph:
        # Without a graph, if the scaler alone gives the same image.
        small = without_graph(frame, ops)
        if small is not None:
            return DecodedImage(small, 1 if config.orient else orientation, is_corrupt)
    # A still has no rate, also if the container of a GIF or AVIF states one for its frames.
    filter = PictureFilter(replace(packets.codec, frame_rate=None), filter_desc, config)
    # Some filters hold back a single frame until they are flushed.
    frames = [*filter.push(frame, orientation)] or [*filter.flush()]
    if not frames:
        raise DecodeError(
            "the filters drop the image: a still has no time, which fps and trim need",
            source=packets.source,
        )
    return DecodedImage(frames[0], filter.orientation, is_corrupt)


def _picture(packets: ImagePackets, config: DecodeConfig) -> DecodedImage:
    path = PicturePath(packets.codec, metadata_of(packets), None, config)
    sink = FrameList(1)
    path.run(av_packets(packets), sink)
    if not sink.frames:
        raise DecodeError(
            f"the {packets.codec.name} data holds no image that can be decoded",
            source=packets.source,
        )
    return DecodedImage(sink.frames[0], path.take_metadata().orientation)


_STILL_JPEG = VideoCodec("mjpeg", "mjpeg")
# Decoders of larger images are not kept: they keep the memory of the last image.
_MAX_PIXELS = 4_000_000
_NOT_STATED = Fraction(0, 1)


# Open JPEG decoders that no thread uses now. Opening one takes 60 microseconds, a tenth of the time to decode
# 500x375 pixels: half of it builds tables, half is spent on memory that the system has to clear again. A
# limited number, because each keeps the memory of an image.
_idle_decoders: deque[Any] = deque(maxlen=16)


def _decode_plain_jpeg(
    packets: ImagePackets, metadata: PacketMetadata, config: DecodeConfig
) -> av.VideoFrame | None:
    """Decode a JPEG with a decoder that is open already, if the result cannot depend on its earlier images.

    Returns:
        The frame; ``None``: the file depends on the decoder's state, options were set, or decoding failed.
        A new decoder then decodes it or reports the error.
    """
    if metadata.jpeg is None or not metadata.jpeg.stands_alone or metadata.incomplete is not None:
        return None
    is_special = config.decoder is not None or config.decoder_options or LogState.forwarded
    if is_special or len(packets) != 1:
        return None
    packet = padded_image(packets)
    try:
        context = _idle_decoders.pop()
    except IndexError:
        context = make_decoder(_STILL_JPEG, DEFAULT_DECODE_CONFIG, "JPEG")
    with av.logging.Capture():
        try:
            frames: list[av.VideoFrame] = context.decode(packet)
        # The decoder is not put back: after an error its state differs from that of a new one.
        except av.FFmpegError:
            return None
    # Nor is a decoder put back after any other unusual result.
    if len(frames) != 1 or frames[0].is_corrupt:
        return None
    frame = frames[0]
    if frame.width * frame.height <= _MAX_PIXELS:
        context.sample_aspect_ratio = _NOT_STATED  # else a JPEG that states none would inherit it
        _idle_decoders.append(context)
    return frame


# decode_config(downscale="dct"): libjpeg decodes JPEGs at a reduced size.

# Reduced size in eighths of a side, smallest first. Other factors take longer than the next larger one here.
_EIGHTHS = (1, 2, 4)
# The reduced image is at least so many times as large as the result, which keeps its high frequencies.
_MARGIN = 1.2
# Crop edges are rounded to pixels of the reduced image, and may move by this part of a pixel of the result.
_MAX_SHIFT = 0.125


def _decode_downscaled(
    packets: ImagePackets, filter: Filter, config: DecodeConfig
) -> av.VideoFrame | None:
    """Decode a JPEG at a reduced size, turn it upright, and filter it.

    Returns:
        The frame; ``None`` if the image must be decoded at full size: it is not a YCbCr JPEG, is truncated,
        damaged or too small, the filter does not scale first, or the edges of the crop would move.

    Raises:
        MissingDependencyError: simplejpeg is not installed.
    """
    simplejpeg = require("simplejpeg", "decode_config(downscale='dct')")
    metadata = metadata_of(packets)
    head = metadata.jpeg
    if head is None or not head.is_ycc or metadata.incomplete is not None or len(packets) != 1:
        return None
    # The crop is chosen before the scale, which depends on it.
    size = head.width, head.height
    ops = picture_ops(_filter_of(size, metadata.orientation, filter, config))
    if ops is None or config.decoder is not None or config.decoder_options:
        return None
    chain = fast_chain(ops.uncut)
    if chain is None or not chain.scales_first:
        return None
    orientation = metadata.orientation if config.orient else 1
    part = _smallest_part(size, orientation, chain, ops.box)
    if part is None:
        return None
    # libjpeg rounds the reduced size up.
    eighths, box, placement = part
    small = [-(-side * eighths // 8) for side in size]
    pixels = _decode_small(simplejpeg, packets, *small)
    if pixels is None:
        return None
    frame = av.VideoFrame.from_numpy_buffer(_upright(pixels[box], orientation), "rgb24")
    # PyAV does not set these for an array.
    frame.colorspace, frame.color_range = GBR, FULL_RANGE
    # Mirroring comes last, because the result is the smaller image.
    return chain.from_rgb().run(frame, placement, mirror=ops.mirror)


def _smallest_part(
    size: Size, orientation: int, chain: FastChain, box: Box | None
) -> tuple[int, tuple[slice, slice], Placement] | None:
    """Choose the smallest reduced image that has enough pixels for the result.

    Returns:
        The factor of the reduction in eighths, the rows and columns of the box in stored orientation, and
        what follows.
    """
    swaps = swaps_sides(orientation)
    upright = size[::-1] if swaps else size
    box = box or (0, 0, *upright)
    placement = chain.plan(box[2:]) if fits(box, *upright) else None
    if placement is None:
        return None
    # From here on, coordinates are those of the stored image.
    across, down = placement.scaled[::-1] if swaps else placement.scaled
    x, y, w, h = stored_box(box, orientation, *size)
    for eighths in _EIGHTHS:
        columns, rows = _shrunk_span(x, w, eighths, across), _shrunk_span(y, h, eighths, down)
        if columns is not None and rows is not None:
            return eighths, (rows, columns), placement
    return None


def _shrunk_span(start: int, length: int, eighths: int, target: int) -> slice | None:
    """Map a span of one side to the reduced image; ``None``: too few pixels, or its edges would move."""
    exact = [edge * eighths / 8 for edge in (start, start + length)]
    first, last = map(round, exact)
    if last - first < _MARGIN * target:
        return None
    shift = max(abs(exact[0] - first), abs(exact[1] - last)) * target / (last - first)
    return slice(first, last) if shift <= _MAX_SHIFT else None


def _decode_small(
    simplejpeg: Any, packets: ImagePackets, width: int, height: int
) -> npt.NDArray[np.uint8] | None:
    try:
        pixels: npt.NDArray[np.uint8] = simplejpeg.decode_jpeg(
            coded_image(packets), colorspace="RGB", min_width=width, min_height=height
        )
    except ValueError:  # any damage: FFmpeg then decodes the image or reports the error
        return None
    # libjpeg chooses the factor by the minimal size; if it is another one, the shape differs.
    return pixels if pixels.shape == (height, width, 3) else None


def _upright(view: npt.NDArray[np.uint8], orientation: int) -> npt.NDArray[np.uint8]:
    backwards, upwards = stored_flips(orientation)
    view = view[:: -1 if upwards else 1, :: -1 if backwards else 1]
    if swaps_sides(orientation):
        view = view.swapaxes(0, 1)
    # from_numpy_buffer needs contiguous pixels, so a turned image is copied.
    return view if orientation == 1 else np.ascontiguousarray(view)
