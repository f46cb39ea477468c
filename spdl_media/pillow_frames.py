"""Read images and animations with Pillow, which FFmpeg would decode wrongly, as FFmpeg's frames."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final

import av
import numpy as np

from spdl_media._optional import require
from spdl_media.config import DecodeConfig
from spdl_media.errors import DecodeError
from spdl_media.fast_images import FULL_RANGE, GBR
from spdl_media.filters import PictureFilter
from spdl_media.operations import Desc
from spdl_media.packets import FrameMetadata, VideoPackets, av_packets, metadata_of
from spdl_media.still_variants import is_avif
from spdl_media.window import PILLOW_TIME_BASE

PILLOW: Final = "pillow"  # the only decoder name of decode_config that is not FFmpeg's


def read_with_pillow(
    packets: VideoPackets, *, is_video: bool = False
) -> Iterator[tuple[av.VideoFrame, int]]:
    """Decode an image, or the frames of an animation, with Pillow.

    Args:
        packets: One packet, the whole file.
        is_video: Yield all frames of an animation.

    Yields:
        The composed frames in order, each with its EXIF orientation. They are ``rgb24``, ``rgba``, ``gray``,
        ``gray16le`` or ``grayf32le`` of full range. Without ``is_video``, one frame: the one shown by
        programs without animation support, the largest image of an icon, or the primary one of a HEIC.

    Raises:
        MissingDependencyError: Pillow is not installed, or pillow-heif for HEIC.
        DecodeError: The data is damaged, or Pillow does not know the format.
    """
    reason = metadata_of(packets).pillow or "decode_config(decoder='pillow')"
    purpose, view = f"{packets.source}: {reason}", memoryview(av_packets(packets)[0])
    image_module: Any = require("pillow", purpose)
    if bytes(view[4:8]) == b"ftyp" and not is_avif(view):
        require("pillow-heif", purpose).register_heif_opener()
    try:
        with image_module.open(io.BytesIO(view)) as image:
            count = getattr(image, "n_frames", 1)
            # Not TIFF: its pages are separate images.
            is_animation = count > 1 and image.format in ("GIF", "PNG", "WEBP", "AVIF", "HEIF")
            # The default image of an animated PNG, for programs without animation, is not one of its frames.
            first = int(bool(image.info.get("default_image")))
            time = 0
            # Without a seek, Pillow is at the primary image.
            for index in range(first, count) if is_video and is_animation else [None]:
                if index is not None:
                    image.seek(index)
                frame = _as_frame(image)
                # Pillow states milliseconds, the unit of PILLOW_TIME_BASE.
                duration = round(image.info.get("duration", 0))
                if image.format == "GIF" and duration <= 10:
                    duration = 100  # as FFmpeg shows it
                frame.pts, frame.time_base, frame.duration = time, PILLOW_TIME_BASE, duration
                time += duration
                # Like FFmpeg, ignore the orientation of animations.
                turn = 1 if is_animation else image.getexif().get(0x0112, 1)
                # Files may contain numbers outside of Exif's range.
                yield frame, turn if turn in range(1, 9) else 1
    except MemoryError:
        raise
    # Pillow's plugins raise many kinds of errors for bad data: OSError, SyntaxError, struct.error, KeyError.
    except Exception as error:
        what = reason if reason.startswith(("a ", "an ")) else "the image"
        text = str(error).partition(" <_io.")[0]  # without the file object that Pillow was given
        raise DecodeError(f"Pillow cannot decode {what}: {text}", source=packets.source) from error


_TIFF_BITS, _TIFF_PHOTOMETRIC = 258, 262
_WHITE_IS_ZERO = 0


def _mend_tiles(image: Any) -> None:
    """Correct the number formats that Pillow 13 takes for two kinds of TIFF, whose pixels it would garble."""
    is_short = 16 in image.tag_v2.get(_TIFF_BITS, ())
    for index, tile in enumerate(image.tile):
        numbers, *rest = tile.args
        if tile.codec_name == "libtiff" and numbers == "F;32BF":
            numbers = "F;32NF"  # libtiff has swapped the bytes already
        elif is_short and numbers in ("R", "G", "B", "A"):  # a plane, without its number of bits
            numbers += ";16B" if image.tag_v2.prefix == b"MM" else ";16L"
        elif is_short and numbers == "I":  # the only plane of the file
            numbers = image.mode
        image.tile[index] = tile._replace(args=(numbers, *rest))


# Gray of 8 bits for 1, by Pillow's name of the stored numbers.
_SHADES = {"L;2": 85, "L;4": 17}


def _as_frame(image: Any) -> av.VideoFrame:
    """Convert a Pillow image to a frame in the nearest of FFmpeg's formats."""
    if image.format == "TIFF":
        _mend_tiles(image)
    mode = image.mode
    if image.format == "PNG" and mode == "L" and image.tile and image.tile[0].args in _SHADES:
        # Pillow compares the stored number with gray of 8 bits.
        image.info["transparency"] *= _SHADES[image.tile[0].args]
    if mode.startswith("I;16"):
        pixels: np.ndarray[Any, Any] = np.asarray(image).astype(np.uint16)
        tags: Any = image.tag_v2 if image.format == "TIFF" else {}
        # Pillow does not scale the 12 bits that a TIFF may have, and where white is 0 it inverts only 8 bits.
        if tags.get(_TIFF_BITS) == (12,):
            pixels = pixels << 4 | pixels >> 8
        if tags.get(_TIFF_PHOTOMETRIC) == _WHITE_IS_ZERO:
            pixels = ~pixels
        return _new_frame(pixels, "gray16le")
    if mode == "F":
        return _new_frame(np.asarray(image), "grayf32le")
    if mode == "I":
        raise ValueError("its pixels are 32-bit integers, for which FFmpeg has no format")
    if mode == "La":
        image = image.convert("LA")  # the only mode to which Pillow converts it
    if image.has_transparency_data:
        return _new_frame(np.asarray(image.convert("RGBA")), "rgba")
    if mode in ("1", "L"):
        return _new_frame(np.asarray(image.convert("L")), "gray")
    return _new_frame(np.asarray(image.convert("RGB")), "rgb24")


def _new_frame(pixels: np.ndarray[Any, Any], pix_fmt: str) -> av.VideoFrame:
    frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), pix_fmt)
    frame.color_range = FULL_RANGE
    if pix_fmt.startswith("rgb"):
        frame.colorspace = GBR
    return frame


def decode_animation(
    put: Callable[[av.VideoFrame], bool],
    packets: VideoPackets,
    filter_desc: Desc,
    config: DecodeConfig,
) -> Callable[[], FrameMetadata]:
    """Do what :func:`decode_into` does for an animation that Pillow decodes.

    Raises:
        MissingDependencyError: Pillow is not installed.
        DecodeError: The data is damaged.
        FilterError: There is no such filter, or it does not take the frames.
    """
    metadata = metadata_of(packets)
    first, stop = metadata.span(packets.time_base)
    filter = PictureFilter(packets.codec, filter_desc, config, metadata)

    def filtered_frames() -> Iterator[av.VideoFrame]:
        for frame, orientation in read_with_pillow(packets, is_video=True):
            pts = frame.pts or 0
            if pts >= stop:
                filter.follow(replace(metadata, continues=True, goes_on=True))
                break
            if pts >= first or filter.rate:
                yield from filter.push(frame, orientation)
        # Filters may have delayed frames, also if the window ended the loop.
        yield from filter.flush()

    any(map(put, filtered_frames()))
    return partial(FrameMetadata.of, metadata, orientation=filter.orientation or 1)
