"""Decodes packets to arrays on a device. It is the CPU path with NVDEC as decoder and rows on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from typing import Any

from spdl_media._ffmpeg import ffmpeg_log
from spdl_media._picture_decoder import PictureDecoder, PicturePath, decode_into
from spdl_media.buffer import Buffer
from spdl_media.codec import VideoCodec
from spdl_media.config import DecodeConfig
from spdl_media.convert import no_frames
from spdl_media.cuda.cuvid import NotOnDeviceError
from spdl_media.cuda.nvdec import GATE, DeviceDecoder, decoder_key, nvdec_refusal
from spdl_media.cuda.video_rows import DeviceRows, Output, Shown, VideoDevice
from spdl_media.demuxer import Demuxer
from spdl_media.errors import DecodeError, TransferError
from spdl_media.filters import PictureFilter
from spdl_media.operations import PictureOps
from spdl_media.packets import (
    PacketMetadata,
    VideoPackets,
    av_packets,
    check_complete,
    discarded_pts,
    metadata_of,
)
from spdl_media.video_arrays import expected_frames

# Number of packets to read at once: little memory, and almost no overhead per packet.
_CHUNK = 64


class DevicePath(PicturePath):
    """Decodes packets to frames on a device, and cuts them to the window and to a frame rate.

    Frames are not rotated here but by :class:`DeviceRows`.

    Args:
        device: The device that decodes.
        codec: Codec parameters of the stream.
        metadata: Metadata of the packets.
        ops: Operations on frames, of which only the frame rate is used.
        config: Options of the decoder.
        makes_room: Whether to close idle decoders before a new one is opened.

    Raises:
        NotOnDeviceError: The hardware does not support the stream.
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
        self._device, self._key = device, decoder_key(codec, device.index)
        found = device.decoders.take(self._key)
        if found is None:
            if makes_room:
                device.decoders.clear()
            found = DeviceDecoder(device.open_decoder(codec))
        found.begin(codec, metadata.source, device.stream)
        self._lent = found
        self.decoder = PictureDecoder(codec, metadata, config, found)
        self._filter = _DeviceFrames(codec, ops, config, metadata)
        # As in PicturePath.__init__, which is not called because it opens a CPU decoder.
        self.decoder.gives_lead_in = self._filter.rate is not None

    def give_back(self) -> None:
        """Return the decoder to the pool, for the next clip. All frames must be written or dropped."""
        lent = self._lent
        if lent.is_sound:
            lent.flush_buffers()
            self._device.decoders.give(self._key, lent)


class _DeviceFrames(PictureFilter):
    """Drops or repeats frames for a constant rate, and adds the orientation to each frame."""

    def _push(self, frame: Any, orientation: int) -> list[Any]:
        turned = orientation if self._orient else 1
        return [Shown(frame, frame.pts, turned, self._time_base)]


def decode_clip(
    packets: VideoPackets,
    device: VideoDevice,
    output: Output,
    config: DecodeConfig,
    num_frames: int | None = None,
) -> tuple[Buffer, list[int | None], Fraction]:
    """Decode packets to an array on a device.

    Args:
        packets: Packets of a window.
        device: The device that decodes.
        output: Operations on frames, and layout and dtype of the array.
        config: Options of the decoder.
        num_frames: Maximum number of frames; ``None`` means all.

    Returns:
        The array, the presentation times of its frames (the same as on the CPU path), and the unit of these
        times in seconds.

    Raises:
        NotOnDeviceError: NVDEC does not decode this stream.
        DecodeError: The data is damaged.
        ConvertError: No frame lies in the window, or the frames do not fit into one array.
        TransferError: The device has no memory or no decoder left, or is gone.
    """
    # An estimate: the rows grow if there are more frames.
    room, _ = expected_frames(packets, None, num_frames)
    # The rows do all other operations.
    ops = PictureOps(frame_rate=output.ops.frame_rate)

    def decoded() -> tuple[Buffer, list[int | None], Fraction]:
        rows: Any = DeviceRows(device, output, room, packets.source, num_frames)
        paths: list[DevicePath] = []

        def make_path(*arguments: Any) -> DevicePath:
            paths.append(DevicePath(device, *arguments))
            return paths[0]

        try:
            decode_into(rows, packets, ops, config, num_frames, make_path)
            if not rows.pts:
                raise no_frames(packets)
            pts = rows.pts
            return rows.take(), pts, rows.time_base
        finally:
            rows.drop()
            for path in paths:
                path.give_back()

    with GATE:
        try:
            return decoded()
        except TransferError:
            # Idle decoders take memory, too: close them and try once more.
            if not device.decoders.clear():
                raise
        return decoded()


def not_on_nvdec(found: NotOnDeviceError, source: str) -> DecodeError:
    """Return the error for a stream that NVDEC does not decode when no other decoder is allowed."""
    return DecodeError(
        f"{found}. load_video(cuda=, decoder='auto') decodes it on the CPU and copies its frames there",
        source=source,
    )


class _Batches(DeviceRows):
    """Rows that are collected into a batch of a fixed number of frames."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.ready: list[Buffer] = []

    def put(self, shown: Shown) -> bool:
        if super().put(shown):
            self.ready.append(self.take())
        # Never full: the loop over the packets takes ready batches and continues.
        return False


def decode_batches(
    demuxer: Demuxer,
    device: VideoDevice,
    output: Callable[[VideoPackets], Output],
    config: DecodeConfig,
    num_frames: int,
    stream_index: int | None,
) -> Iterator[Buffer]:
    """Decode a whole stream into arrays of ``num_frames`` frames; the last one may be shorter.

    Raises:
        DecodeError: The data is damaged or cut short, or NVDEC does not decode it.
        ConvertError: The frames of a batch do not fit into one array.
        TransferError: The device has no memory or no decoder left, or is gone.
        TypeError: The stream is not video.
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
                    # Close idle decoders now: a stream cannot start again when memory is short, as a clip
                    # can.
                    path = DevicePath(
                        device, packets.codec, metadata, None, config, makes_room=True
                    )
                path.follow(metadata, discarded_pts(packets), rows)
                yield from _full_batches(path, rows, av_packets(packets))
            if path is not None:
                yield from _full_batches(path, rows, [None])
                if rows.pts:
                    yield rows.take()
                # After all frames that could be decoded.
                check_complete(packets, config)
        except NotOnDeviceError as found:
            raise not_on_nvdec(found, source) from found.__cause__
        finally:
            if path is not None:
                # Also when the consumer stops before the end.
                rows.drop()
                path.give_back()


def _full_batches(path: DevicePath, rows: _Batches, packets: Iterable[Any]) -> Iterator[Buffer]:
    """Decode packets, and yield each batch when it is full."""
    sink: Any = rows
    left, is_full = iter(packets), True
    while is_full:
        with GATE, ffmpeg_log():  # one for all packets of a batch; see current_log
            is_full = any(path.push(packet, sink) or rows.ready for packet in left)
        # Yield outside of the block: the consumer may wait long, or continue in another thread.
        ready, rows.ready = rows.ready, []
        yield from ready
