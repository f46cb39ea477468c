"""From sources to what DALI decodes: the file as it is, or, where DALI will not do, pixels decoded here.

Pixels decoded here travel as PNM, which DALI unpacks without changing them. So a batch is one call of each
operator, whatever its files are.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from spdl_media._optional import require
from spdl_media.config import DecodeConfig, DemuxConfig
from spdl_media.convert import convert_frames
from spdl_media.decode import decode_packets
from spdl_media.demux import demux_image
from spdl_media.filter_desc import FilterDesc
from spdl_media.inputs import Source
from spdl_media.operations import PictureOps
from spdl_media.packets import ImagePackets, av_packets, metadata_of
from spdl_media.stills import HEAD_SIZE, still_codec

# Decoders of FFmpeg whose images DALI gives too, within 1 level of 255 on average at their own size, in
# every variant tried. Not TIFF: gray with alpha, and JPEG or YCbCr inside, come out 7 to 99 levels off.
_DALI_DECODERS = frozenset({"bmp", "jpeg2000", "mjpeg", "png", "webp"})

# Where FFmpeg refuses an image as too large (av_image_check_size), DALI may try to find memory for it.
_FFMPEG_LIMIT, _FFMPEG_MARGIN = (2**31 - 1) // 8, 128


@dataclass(frozen=True, slots=True)
class Encoded:
    """An image as DALI gets it.

    Attributes:
        data: The bytes of the file.
        source: What it was read from, for messages.
        nbytes: Bytes of the decoded image.
        packets: What it was read from the source as; ``None``: the image was decoded here, and scaled.
    """

    data: npt.NDArray[np.uint8] = field(repr=False)
    source: str
    nbytes: int
    packets: ImagePackets | None = None

    @property
    def is_finished(self) -> bool:
        """Whether its pixels were decoded and scaled here."""
        return self.packets is None


class Reader:
    """Reads sources and chooses who decodes them.

    Args:
        options: How images are to come out.
        demux_config: How to open sources.
        decode_config: How to decode. Decoders and options of FFmpeg are for the CPU alone.
        name: What to call a single source in messages.

    Attributes:
        size: Width and height of every result, if both are known.

    Thread safety: safe.
    """

    def __init__(
        self,
        options: PictureOps,
        demux_config: DemuxConfig | None,
        decode_config: DecodeConfig,
        name: str | None = None,
    ) -> None:
        self.size = (
            None
            if options.width is None or options.height is None
            else (options.width, options.height)
        )
        # DALI puts the channels of the PNM in the order asked for.
        pix_fmt = "gray" if options.pix_fmt == "gray" else "rgb24"
        self._desc = FilterDesc(replace(options, pix_fmt=pix_fmt, quality="accurate"))
        self._demux_config = demux_config
        self._decode_config = decode_config
        self._name = name
        self._headers: Any = require("nvimgcodec", "decoding pictures with DALI")

    def read(self, src: Source) -> Encoded:
        """Read one source.

        Raises:
            SourceError: It cannot be opened or read.
            DemuxError: It is no image.
            DecodeError: It is damaged, and DALI would not have decoded it.
        """
        packets = demux_image(src, demux_config=self._demux_config, name=self._name)
        return self._for_dali(packets) or self.decoded(packets)

    def _for_dali(self, packets: ImagePackets) -> Encoded | None:
        """The file as it is, if DALI decodes it to the same image."""
        facts, config = metadata_of(packets), self._decode_config
        content = memoryview(av_packets(packets)[0])
        if (
            packets.codec.decoder not in _DALI_DECODERS
            or config.decoder is not None
            or config.decoder_options
            or facts.incomplete is not None
            or (facts.orientation != 1 and not _turned_by_dali(packets.codec.decoder, content))
        ):
            return None
        if still_codec(content[:HEAD_SIZE]) != packets.codec.decoder:
            return None  # a frame of a film or an animation
        data = np.frombuffer(content, np.uint8)
        size = self._size(data)
        return None if size is None else Encoded(data, facts.source, size[0] * size[1] * 3, packets)

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

    def decoded(self, packets: ImagePackets) -> Encoded:
        """The image decoded, turned upright and scaled as without DALI.

        Raises:
            DecodeError: It is damaged.
        """
        frames = decode_packets(packets, self._desc, self._decode_config)
        return pixels(convert_frames(frames).array, packets.source)

    def decoded_again(self, one: Encoded) -> Encoded:
        """An image that DALI fails to decode, decoded without it: FFmpeg may manage, or says what is wrong.

        Raises:
            DecodeError: It is damaged.
        """
        return one if one.packets is None else self.decoded(one.packets)


def pixels(array: npt.NDArray[np.uint8], source: str) -> Encoded:
    """Finished pixels, ``(height, width, 3)`` or ``(height, width, 1)``, as a file for DALI, a copy."""
    height, width, channels = array.shape
    head = f"P{5 if channels == 1 else 6}\n{width} {height}\n255\n".encode()
    data = np.concatenate([np.frombuffer(head, np.uint8), array.reshape(-1)])
    return Encoded(data, source, array.nbytes)


def black(channels: int) -> Encoded:
    """One black pixel, which fills any row that it is scaled to."""
    return pixels(np.zeros((1, 1, channels), np.uint8), "fill")


def _turned_by_dali(decoder: str, content: memoryview) -> bool:
    """Whether DALI reads as we do how an image stands: from the Exif of a JPEG alone, and not from XMP."""
    return decoder == "mjpeg" and b"tiff:Orientation" not in bytes(content[:HEAD_SIZE])
