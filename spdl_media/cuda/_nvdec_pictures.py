"""Frames of one stream on a device, by the rules of the CPU path for window, lead-in and damage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import av

from spdl_media._picture_decoder import PictureDecoder
from spdl_media.codec import VideoCodec
from spdl_media.config import DecodeConfig
from spdl_media.cuda._nvdec_device import VideoDevice
from spdl_media.cuda._nvdec_planes import format_name, is_on_device
from spdl_media.cuda._nvdec_rule import found_refusal
from spdl_media.errors import DecodeError
from spdl_media.packets import PacketMetadata


class NotOnDeviceError(Exception):
    """The hardware does not take this stream, or cannot be had. The message says why."""


class OnDevice:
    """A decoder that gives frames on the device, or says that it does not.

    Args:
        decoder: PyAV's.
        codec: Parameters of the stream.
    """

    def __init__(self, decoder: Any, codec: VideoCodec) -> None:
        self._decoder = decoder
        self._codec = codec

    def decode(self, packet: Any) -> list[Any]:
        """Frames that are ready after this packet.

        Raises:
            NotOnDeviceError: They are in host memory, or there is no decoder but the hardware's.
        """
        try:
            frames: list[Any] = self._decoder.decode(packet)
        # FFmpeg's own AV1 decoder has no software part.
        except av.error.NotImplementedError as error:
            raise NotOnDeviceError(found_refusal(self._codec, "no")) from error
        for frame in frames:
            if not is_on_device(frame):
                raise NotOnDeviceError(found_refusal(self._codec, format_name(frame)))
            self._check_cut(frame)
        return frames

    def _check_cut(self, frame: Any) -> None:
        """Refuse frames that are to be cut on the left or at the top.

        On a device FFmpeg cuts what lies on the right and at the bottom alone. The decoder's own size is
        right, but may be that of frames to come; then these have the size that the stream states.
        """
        size = frame.width, frame.height
        right = (
            (self._decoder.width, self._decoder.height),
            (self._codec.width, self._codec.height),
        )
        if size not in right:
            raise NotOnDeviceError(
                f"NVDEC gives {size[0]}x{size[1]} for pictures of {right[0][0]}x{right[0][1]}, which this "
                f"{self._codec.name} stream cuts on the left or at the top"
            )

    def flush_buffers(self) -> None:
        """Start anew."""
        self._decoder.flush_buffers()


class DevicePictures(PictureDecoder):
    """The decoder of frames with FFmpeg's decoder on the device: the same window, lead-in and damage.

    Args:
        device: Where to decode.
        codec: Parameters of the stream.
        facts: Metadata of the packets.
        config: How to decode.

    Raises:
        NotOnDeviceError: The device does not open. Its ``decode`` raises it as :class:`OnDevice` does.
    """

    def __init__(
        self, device: VideoDevice, codec: VideoCodec, facts: PacketMetadata, config: DecodeConfig
    ) -> None:
        # The decoder that it opens is replaced at once. Libraries such as dav1d take other options.
        super().__init__(replace(codec, decoder=codec.name), facts, config)
        try:
            opened = device.open_decoder(codec, config, facts.source)
        except DecodeError as error:
            raise NotOnDeviceError(error.args[0]) from error
        decoder: Any = OnDevice(opened, codec)
        self._context = decoder

    @property
    def standing(self) -> int:
        """The orientation that frames are to be turned from."""
        return self.orientation if self._config.orient else 1
