"""A video that is too long to hold: batches of the decoder's own planes, in order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from spdl_media._checks import check_int
from spdl_media._picture_decoder import PicturePath
from spdl_media.buffer import Buffer
from spdl_media.config import DecodeConfig, DemuxConfig, as_decode_config
from spdl_media.cuda._color_taps import ScaleAlgo
from spdl_media.cuda.nvdec import NotOnDeviceError
from spdl_media.cuda.video_output import Crop, Output
from spdl_media.cuda.video_path import DevicePath
from spdl_media.cuda.video_rows import DeviceRows, VideoDevice
from spdl_media.cuda.videos import (
    DeviceLike,
    not_on_nvdec,
    one_device,
    video_device,
)
from spdl_media.decoders import VideoDecoder
from spdl_media.demux import Demuxer
from spdl_media.errors import TransferError
from spdl_media.inputs import Source
from spdl_media.packets import VideoPackets, metadata_of

__all__ = ("streaming_load_video_nvdec",)

# Packets that are read at once. Few enough to hold, many enough that reading costs nothing.
_CHUNK = 64


def streaming_load_video_nvdec(
    src: Source,
    cuda: DeviceLike | None = None,
    *,
    cuda_config: DeviceLike | None = None,
    num_frames: int,
    crop_left: int = 0,
    crop_top: int = 0,
    crop_right: int = 0,
    crop_bottom: int = 0,
    scale_width: int | None = None,
    scale_height: int | None = None,
    scale_algo: ScaleAlgo = "bicubic",
    stream_index: int | None = None,
    demux_config: DemuxConfig | None = None,
    decode_config: DecodeConfig | None = None,
    name: str | None = None,
) -> Iterator[Buffer]:
    """Decode a whole video on a GPU, batch by batch, as the decoder's own planes.

    :func:`~spdl_media.nv12_to_rgb` converts them. The source is read as the batches are asked for.

    Args:
        src: As for :func:`~spdl_media.load_video`.
        cuda: Number of the device, or a config, of which the allocator does not count.
        cuda_config: The same by another name; one of the two is needed.
        num_frames: Frames of each batch; the last one may be shorter.
        crop_left: Pixels to cut off the upright frame before it is scaled; even.
        crop_top: The same.
        crop_right: The same.
        crop_bottom: The same.
        scale_width: Width to scale to, even. Without ``scale_height`` the aspect ratio is kept.
        scale_height: Height to scale to, even.
        scale_algo: ``"bicubic"`` or ``"bilinear"``, antialiased.
        stream_index: Index of the stream in its container. The default is FFmpeg's best one.
        demux_config: How to open the source.
        decode_config: How to decode. Options of the decoder are those of FFmpeg's own.
        name: What to call the source in messages.

    Returns:
        An iterator of arrays ``(N, H + ceil(H / 2), W)`` on the device: luma, and below it U and V in turn.
        uint8 (NV12); uint16 with the value in the high bits (P010, P016) for 10 and 12 bit. An odd width is
        rounded up, with a last column of zeros. ``colorspace`` and ``color_range`` of a batch say what its
        values mean. Each batch is memory of its own, ready when its stream gets there.

    Raises:
        SourceError: It cannot be opened or read.
        DemuxError: It is no media, or has no such stream.
        DecodeError: While iterating: the data is damaged, or NVDEC does not decode it.
        ConvertError: While iterating: frames differ in size.
        MissingDependencyError: The driver, or its video library, is missing.
        TransferError: While iterating: the device has no memory or no decoder left, or is gone.
        ValueError: There is no such device, or an option is invalid.

    Thread safety: one thread at a time for each iterator.
    """
    check_int("num_frames", num_frames)
    crop = Crop(crop_left, crop_top, crop_right, crop_bottom)
    size = scale_width, scale_height
    output = Output("nv12", "NHWC", crop, *size, scale_algo=scale_algo)
    options = output, as_decode_config(decode_config), num_frames
    device = video_device(one_device(cuda, cuda_config))
    # Opened here and not in the generator, so that a bad source is an error of this call.
    demuxer = Demuxer(src, demux_config=demux_config, name=name)
    return _batches(demuxer, device, options, stream_index)


def _batches(
    demuxer: Demuxer,
    device: VideoDevice,
    options: tuple[Output, DecodeConfig, int],
    stream_index: int | None,
) -> Iterator[Buffer]:
    with demuxer:
        chunks = _video_chunks(demuxer, stream_index)
        first = next(chunks, None)  # which tells the codec
        if first is None:
            return
        # Kept until frames are out: decoders that wait for other clips take memory, too.
        untried: list[VideoPackets] | None = []
        todo: Iterator[VideoPackets] = chain([first], chunks)
        while True:
            stream = None
            try:
                stream = _DeviceStream(first, device, *options)
                for packets in todo:
                    if untried is not None:
                        untried.append(packets)
                    for buffer in stream.decode(packets):
                        untried = None
                        yield buffer  # type: ignore[misc]  # a VideoDecoder gives frames
                yield from stream.flush()  # type: ignore[misc]  # likewise
                return
            except NotOnDeviceError as found:
                raise not_on_nvdec(found, first.source) from found.__cause__
            except TransferError:
                if untried is None or not device.decoders.clear():
                    raise
                todo, untried = chain(untried, todo), []
            finally:
                if stream is not None:
                    stream.close()


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
        output: Output,
        config: DecodeConfig,
        num_frames: int,
    ) -> None:
        self._device, self._first = device, metadata_of(first)
        super().__init__(first.codec, decode_config=config, num_frames=num_frames)
        self._ready: Any = DeviceRows(device, output, num_frames, first.source, is_batch=True)

    def _new_path(self) -> PicturePath:
        return DevicePath(self._device, self._codec, self._first, None, self._config)

    def _count(self) -> int:
        return int(self._ready.count)

    def _cut(self, size: int) -> Any:
        return self._ready.take(size)

    def _restart(self) -> None:
        self.close()

    def close(self) -> None:
        """Give the decoder back."""
        self._decoder.close()
