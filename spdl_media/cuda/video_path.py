"""Packets to frames on a device, and these to arrays: the CPU path with another decoder and other rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from spdl_media._picture_decoder import PictureDecoder, PicturePath
from spdl_media.buffer import Buffer
from spdl_media.codec import VideoCodec
from spdl_media.config import DecodeConfig
from spdl_media.cuda.nvdec import (
    DeviceDecoder,
    NotOnDeviceError,
    decoder_key,
    has_lengths,
    nvdec_refusal,
)
from spdl_media.cuda.video_rows import DeviceRows, Output, Shown, VideoDevice
from spdl_media.decode import decode_into
from spdl_media.decoders import VideoDecoder
from spdl_media.demuxer import Demuxer
from spdl_media.errors import DecodeError
from spdl_media.filters import PictureFilter
from spdl_media.operations import PictureOps
from spdl_media.packets import PacketMetadata, VideoPackets, metadata_of
from spdl_media.rows import no_frames
from spdl_media.video_rows import expected_frames, seconds_of

# Packets that are read at once. Few enough to hold, many enough that reading costs nothing.
_CHUNK = 64


class DevicePath(PicturePath):
    """Packets to frames on a device: cut to the window, and at their rate; the rows turn them.

    Args:
        device: Where they are decoded.
        codec: As for :class:`PicturePath`, as are the next arguments.
        metadata: Of the packets.
        ops: Of which the frame rate counts.
        config: How to decode.

    Raises:
        NotOnDeviceError: The hardware does not take the stream, or does not open.
    """

    def __init__(
        self,
        device: VideoDevice,
        codec: VideoCodec,
        metadata: PacketMetadata,
        ops: PictureOps | None,
        config: DecodeConfig,
    ) -> None:
        if refusal := nvdec_refusal(codec):
            raise NotOnDeviceError(refusal)
        self._device, self._key = device, decoder_key(codec, config, device.index)
        found = device.decoders.take(self._key)
        if found is None:
            coded = replace(codec, extradata=None) if has_lengths(codec) else codec
            open = partial(device.open_decoder, coded, config, metadata.source)
            try:
                found = DeviceDecoder(open, device.decoders.clear, device.index)
            except DecodeError as error:
                raise NotOnDeviceError(error.args[0]) from error
        found.begin(codec, metadata.source)
        self._lent: DeviceDecoder | None = found
        self.decoder = PictureDecoder(codec, metadata, config, found)
        self._filter = _Moments(codec, ops, config, metadata)
        self.decoder.gives_lead_in = self._filter.has_rate

    @property
    def time_base(self) -> Any:
        """Seconds in one unit of the timestamps of what comes out."""
        return self._filter._time_base

    def close(self) -> None:
        """Give the decoder back for the next clip."""
        lent, self._lent = self._lent, None
        if lent is None:
            return
        del self.decoder._context  # or it would flush what another clip has by then
        if lent.is_sound:
            lent.flush_buffers()
            self._device.decoders.give(self._key, lent)


class _Moments(PictureFilter):
    """Puts frames at the moments of a constant rate, and says how they stand."""

    def _push(self, frame: Any, orientation: int) -> list[Any]:
        # FFmpeg makes surfaces of even width.
        width = self._codec.width if self._codec.width == frame.width - 1 else frame.width
        return [Shown(frame, frame.pts, orientation if self._orient else 1, width)]


class DeviceClip(NamedTuple):
    """Frames on a device, with their times, which are those that the CPU path gives.

    Attributes:
        buffer: The frames, one behind the other.
        pts: In units of ``time_base``.
        time_base: Seconds in one unit.
        zero: Second 0 of the container, in seconds.
    """

    buffer: Buffer
    pts: tuple[int | None, ...]
    time_base: Fraction
    zero: Fraction

    @property
    def timestamps(self) -> tuple[float, ...]:
        """Seconds of each frame on the container's clock."""
        return seconds_of(self.pts, self.time_base, self.zero)


def decode_clip(
    packets: VideoPackets,
    device: VideoDevice,
    output: Output,
    config: DecodeConfig,
    num_frames: int | None = None,
) -> DeviceClip:
    """Decode packets to an array on a device.

    Args:
        packets: Of a window.
        device: Where they are decoded.
        output: What is made of frames.
        config: How to decode.
        num_frames: At most so many frames; ``None``: all.

    Raises:
        NotOnDeviceError: NVDEC does not decode them.
        DecodeError: The data is damaged.
        ConvertError: No frame lies in the window, or they make no one array.
        TransferError: The device has no memory or no decoder left, or is gone.
    """
    # There is more room if there are more.
    room, _ = expected_frames(packets, None, num_frames)
    rows: Any = DeviceRows(device, output, room, packets.source, num_frames)
    # The rows do all else that is asked for.
    ops = PictureOps(frame_rate=output.ops.frame_rate)
    paths: list[DevicePath] = []

    def make_path(*arguments: Any) -> DevicePath:
        paths.append(DevicePath(device, *arguments))
        return paths[0]

    decode_into(rows, packets, ops, config, num_frames, make_path)
    if not rows.count:
        raise no_frames(packets)
    times = tuple(rows.pts), paths[0].time_base, metadata_of(packets).zero
    return DeviceClip(rows.take(rows.count), *times)


def not_on_nvdec(found: NotOnDeviceError, source: str) -> DecodeError:
    """The error for a stream that NVDEC does not decode, where nothing else may."""
    return DecodeError(
        f"{found}. load_video(cuda=, decoder='auto') decodes it on the CPU and copies its frames there",
        source=source,
    )


def decode_batches(
    demuxer: Demuxer,
    device: VideoDevice,
    options: tuple[Callable[[VideoPackets], Output], DecodeConfig, int],
    stream_index: int | None,
) -> Iterator[Buffer]:
    """Decode a whole stream, so many frames an array.

    Raises:
        NotOnDeviceError: NVDEC does not decode it.
        TransferError: As for :func:`decode_clip`, as are the others.
    """
    with demuxer:
        chunks = _video_chunks(demuxer, stream_index)
        first = next(chunks, None)  # which tells the codec
        if first is None:
            return
        try:
            with closing(_DeviceStream(first, device, *options)) as stream:
                for packets in chain([first], chunks):
                    yield from stream.decode(packets)  # type: ignore[misc]  # a VideoDecoder gives frames
                yield from stream.flush()  # type: ignore[misc]  # likewise
        except NotOnDeviceError as found:
            raise not_on_nvdec(found, first.source) from found.__cause__


def _video_chunks(demuxer: Demuxer, stream_index: int | None) -> Iterator[VideoPackets]:
    index = demuxer.video_stream_index if stream_index is None else stream_index
    for packets in demuxer.streaming_demux(index, num_packets=_CHUNK):
        if not isinstance(packets, VideoPackets):
            raise TypeError(f"stream {index} holds {type(packets).__name__}, not video")
        yield packets


class _DeviceStream(VideoDecoder):
    """A decoder of a whole stream, whose chunks are batches on a device."""

    def __init__(
        self,
        first: VideoPackets,
        device: VideoDevice,
        output: Callable[[VideoPackets], Output],
        config: DecodeConfig,
        num_frames: int,
    ) -> None:
        self._device, self._first = device, metadata_of(first)
        super().__init__(first.codec, decode_config=config, num_frames=num_frames)
        self._ready: Any = DeviceRows(
            device, output(first), num_frames, first.source, is_batch=True
        )

    def _new_path(self) -> PicturePath:
        return DevicePath(self._device, self._codec, self._first, None, self._config)

    def _cut(self, size: int) -> Any:
        return self._ready.take(size)

    def _restart(self) -> None:
        self.close()

    def close(self) -> None:
        """Give the decoder back."""
        self._decoder.close()
