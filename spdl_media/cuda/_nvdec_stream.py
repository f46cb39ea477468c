"""A video that is too long to hold: batches of the decoder's own planes, in order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any, TypeAlias

from spdl_media.codec import VideoCodec
from spdl_media.cuda._nvdec_clip import (
    Request,
    cpu_filter,
    host_array,
)
from spdl_media.cuda._nvdec_device import VideoDevice
from spdl_media.cuda._nvdec_pictures import DevicePictures, NotOnDeviceError
from spdl_media.cuda._nvdec_planes import Colors
from spdl_media.cuda._nvdec_rule import not_on_nvdec, nvdec_refusal
from spdl_media.cuda._nvdec_writer import FrameWriter
from spdl_media.cuda.fallback import warn_of_fallback
from spdl_media.decode import cut_short_error
from spdl_media.decoders import VideoDecoder
from spdl_media.image_frames import VideoFrames
from spdl_media.packets import VideoPackets, av_packets, discarded_pts, metadata_of

ColoredPlanes: TypeAlias = tuple[Any, Colors]
"""Planes on the device, and what they mean."""

# Packets that are read at once. Few enough to hold, many enough that reading costs nothing.
PACKETS_A_CHUNK = 64


class BatchStream:
    """Decodes the chunks of a stream into batches of a fixed number of frames.

    Args:
        chunks: Packets that continue each other.
        codec: Parameters of the stream.
        device: Where to decode.
        request: What is asked for; ``num_frames`` is the size of a batch.
        source: What is read, for messages.

    Thread safety: one thread at a time.
    """

    def __init__(
        self,
        chunks: Iterator[VideoPackets],
        codec: VideoCodec,
        device: VideoDevice,
        request: Request,
        source: str,
    ) -> None:
        if request.num_frames is None:
            raise TypeError("num_frames is the size of a batch, and must be given")
        self._num_frames = request.num_frames
        self._chunks = chunks
        self._codec = codec
        self._device = device
        self._request = request
        self._source = source
        # Kept until the first frame shows whether the hardware takes the stream.
        self._untried: list[VideoPackets] = []
        self._started = False

    def __iter__(self) -> Iterator[ColoredPlanes]:
        refusal = nvdec_refusal(self._codec) if self._device.kind == "cuda" else None
        cause: BaseException | None = None
        if refusal is None:
            try:
                yield from self._on_device()
                return
            except NotOnDeviceError as found:
                refusal, cause = str(found), found.__cause__
        # Once frames are out, those of the CPU cannot take their place.
        if self._started or self._request.decoder != "auto":
            raise not_on_nvdec(refusal, self._source) from cause
        warn_of_fallback(f"{self._source}: {refusal}")
        yield from self._on_cpu()

    def _on_device(self) -> Iterator[ColoredPlanes]:
        pictures: DevicePictures | None = None
        writer = FrameWriter(self._device, self._request.output, self._num_frames, self._source)
        last: VideoPackets | None = None
        for packets in self._chunks:
            if not self._started:
                self._untried.append(packets)
            pictures = pictures or self._pictures(packets)
            last = self._begin(pictures, packets)
            for packet in av_packets(packets):
                yield from self._written(writer, pictures, packet)
        if pictures is None or last is None:
            return
        yield from self._written(writer, pictures, None)
        if writer.count:
            yield writer.result(), writer.colors
        if missing := cut_short_error(last, self._request.config):
            raise missing

    def _pictures(self, packets: VideoPackets) -> DevicePictures:
        return DevicePictures(self._device, self._codec, metadata_of(packets), self._request.config)

    def _begin(self, pictures: DevicePictures, packets: VideoPackets) -> VideoPackets:
        pictures.metadata = metadata_of(packets)
        pictures.discarded |= discarded_pts(packets)
        if pictures.orientation == 1:
            pictures.orientation = metadata_of(packets).orientation
        return packets

    def _written(
        self, writer: FrameWriter, pictures: DevicePictures, packet: Any
    ) -> Iterator[ColoredPlanes]:
        frames = pictures.decode(packet)
        # A caller may make another stream the current one while it has a batch, so none is held open then.
        while (first := next(frames, None)) is not None:
            self._started, self._untried = True, []
            with self._device.after_decoder():
                for frame in chain([first], frames):
                    writer.add(frame, pictures.standing)
                    if writer.is_full:
                        break
            if writer.is_full:
                yield writer.result(), writer.colors

    def _on_cpu(self) -> Iterator[ColoredPlanes]:
        output = self._request.output
        decoder = VideoDecoder(
            self._codec,
            filter_desc=cpu_filter(self._codec, output),
            decode_config=self._request.config,
            num_frames=self._num_frames,
        )
        for packets in self._again():
            for frames in decoder.decode(packets):
                yield self._uploaded(frames)
        for frames in decoder.flush():
            yield self._uploaded(frames)

    def _uploaded(self, frames: VideoFrames) -> ColoredPlanes:
        array, colors = host_array(frames, self._request.output)
        return self._device.upload(array), colors

    def _again(self) -> Iterator[VideoPackets]:
        """All chunks from the first on."""
        yield from self._untried
        yield from self._chunks
