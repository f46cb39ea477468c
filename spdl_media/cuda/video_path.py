"""Packets to frames on a device, and these to arrays: the CPU path with another decoder and other rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

from spdl_media._ffmpeg import ffmpeg_log
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
from spdl_media.demuxer import Demuxer
from spdl_media.errors import DecodeError, TransferError
from spdl_media.filters import PictureFilter
from spdl_media.operations import PictureOps
from spdl_media.packets import (
    PacketMetadata,
    VideoPackets,
    av_packets,
    cut_short_error,
    discarded_pts,
    metadata_of,
)
from spdl_media.rows import (
    expected_frames,
    no_frames,
)

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
        makes_room: Decoders that wait for clips go, if one is opened.

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
        *,
        makes_room: bool = False,
    ) -> None:
        if refusal := nvdec_refusal(codec):
            raise NotOnDeviceError(refusal)
        self._device, self._key = device, decoder_key(codec, config, device.index)
        found = device.decoders.take(self._key)
        if found is None:
            if makes_room:
                device.decoders.clear()
            # Headers come with the packets, so that the next clip may have others.
            coded = replace(codec, extradata=None) if has_lengths(codec) else codec
            try:
                context = device.open_decoder(coded, config, metadata.source)
            except DecodeError as error:
                raise NotOnDeviceError(error.args[0]) from error
            found = DeviceDecoder(context, device.index)
        found.begin(codec, metadata.source)
        self._lent: DeviceDecoder | None = found
        self.decoder = PictureDecoder(codec, metadata, config, found)
        self._filter = _Moments(codec, ops, config, metadata)
        # As in PicturePath, whose __init__ would open a decoder of the CPU's.
        self.decoder.gives_lead_in = self._filter.has_rate

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
        turned = orientation if self._orient else 1
        return [Shown(frame, frame.pts, turned, width, self._time_base)]


def decode_clip(
    packets: VideoPackets,
    device: VideoDevice,
    output: Output,
    config: DecodeConfig,
    num_frames: int | None = None,
) -> tuple[Buffer, list[int | None], Fraction]:
    """Decode packets to an array on a device.

    Args:
        packets: Of a window.
        device: Where they are decoded.
        output: What is made of frames.
        config: How to decode.
        num_frames: At most so many frames; ``None``: all.

    Returns:
        The array, the times of its frames, which are those of the CPU path, and their unit in seconds.

    Raises:
        NotOnDeviceError: NVDEC does not decode them.
        DecodeError: The data is damaged.
        ConvertError: No frame lies in the window, or they make no one array.
        TransferError: The device has no memory or no decoder left, or is gone.
    """
    # There is more room if there are more.
    room, _ = expected_frames(packets, None, num_frames)
    # The rows do all else that is asked for.
    ops = PictureOps(frame_rate=output.ops.frame_rate)

    def decoded() -> tuple[Buffer, list[int | None], Fraction]:
        rows: Any = DeviceRows(device, output, room, packets.source, num_frames)
        decode_into(rows, packets, ops, config, num_frames, partial(DevicePath, device))
        if not rows.pts:
            raise no_frames(packets)
        pts = rows.pts
        return rows.take(), pts, rows.time_base

    try:
        return decoded()
    except TransferError:
        # Decoders that wait for other clips take memory, too.
        if not device.decoders.clear():
            raise
    return decoded()


def not_on_nvdec(found: NotOnDeviceError, source: str) -> DecodeError:
    """The error for a stream that NVDEC does not decode, where nothing else may."""
    return DecodeError(
        f"{found}. load_video(cuda=, decoder='auto') decodes it on the CPU and copies its frames there",
        source=source,
    )


class _Batches(DeviceRows):
    """Rows that become an array whenever there are so many."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.ready: list[Buffer] = []

    def put(self, shown: Shown) -> bool:
        if super().put(shown):
            self.ready.append(self.take())
        # The loop over the packets takes what is full, and goes on.
        return False


def decode_batches(
    demuxer: Demuxer,
    device: VideoDevice,
    output: Callable[[VideoPackets], Output],
    config: DecodeConfig,
    num_frames: int,
    stream_index: int | None,
) -> Iterator[Buffer]:
    """Decode a whole stream, so many frames an array.

    Raises:
        DecodeError: The data is damaged or cut short, or NVDEC does not decode it.
        TransferError: As for :func:`decode_clip`, as is ConvertError.
        TypeError: The stream is no video.
    """
    index = demuxer.video_stream_index if stream_index is None else stream_index
    path: Any = None
    with demuxer:
        try:
            for packets in demuxer.streaming_demux(index, num_packets=_CHUNK):
                if not isinstance(packets, VideoPackets):
                    raise TypeError(f"stream {index} holds {type(packets).__name__}, not video")
                metadata, source = metadata_of(packets), packets.source
                if path is None:
                    rows: Any = _Batches(device, output(packets), num_frames, source, num_frames)
                    # A stream cannot begin again where it lacks room, as a clip does.
                    path = DevicePath(
                        device, packets.codec, metadata, None, config, makes_room=True
                    )
                path.follow(metadata, discarded_pts(packets), rows)
                missing = cut_short_error(packets, config)
                yield from _full_batches(path, rows, av_packets(packets))
            if path is not None:
                yield from _full_batches(path, rows, [None])
                if rows.pts:
                    yield rows.take()
                # All frames that there are have come out.
                if missing is not None:
                    raise missing
        except NotOnDeviceError as found:
            raise not_on_nvdec(found, source) from found.__cause__
        finally:
            if path is not None:
                # Also where whoever iterates stops half way.
                path.close()


def _full_batches(path: DevicePath, rows: _Batches, packets: Iterable[Any]) -> Iterator[Buffer]:
    """Decode packets, and give each batch when it is full."""
    sink: Any = rows
    left, is_full = iter(packets), True
    while is_full:
        with ffmpeg_log():  # one for all packets of a batch; see current_log
            is_full = any(path.push(packet, sink) or rows.ready for packet in left)
        # Taken out of the block: whoever gets them may take its time, or go on in another thread.
        ready, rows.ready = rows.ready, []
        yield from ready
